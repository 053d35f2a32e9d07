"""Metrics of plain rows: blocks, folds and shared statistics change nothing against the slow way in float64."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import anisoscope
from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.catalogue import parse_requests, registry
from anisoscope.metrics.engine import metric as arrays
from anisoscope.numerics.hashing import FOLDS, fold_of
from anisoscope.numerics.host import room
from anisoscope.numerics.linalg import add_gram, eigenvalues
from anisoscope.results.quantity import as_equal_folds
from anisoscope.stats import directions, moments
from anisoscope.stats.directions import Coordinates, Directions
from anisoscope.stats.moments import Moments

SPECTRAL = ("svd_ratio", "svd_ratio_squared", "participation_ratio", "effective_rank", "stable_rank")


def cloud(n: int, d: int, *, kind: str = "plain") -> torch.Tensor:
    """Float32 rows that are hard on sums in one way or another."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    if kind == "far":  # a common mean of norm 3000
        x = x + 3000.0 / d**0.5
    if kind == "dominated":  # one direction, along no axis, 1e4 times the rest
        axis = torch.randn(d, generator=generator, dtype=torch.float64)
        x = x + 1e4 * torch.randn(n, 1, generator=generator, dtype=torch.float64) * axis / axis.norm()
    if kind == "drifting":  # the first rows tell nothing of the mean of all
        x = x + torch.linspace(-500.0, 500.0, n, dtype=torch.float64).unsqueeze(1)
    return x.float()


def twin(x: torch.Tensor) -> dict[str, float]:
    """Spectral metrics from a float64 SVD of all rows."""
    rows = x.double().numpy()
    sigma = np.linalg.svd(rows - rows.mean(0), compute_uv=False)
    energy, share = sigma**2, sigma / sigma.sum()
    return {
        "svd_ratio": sigma[0] / sigma.sum(),
        "svd_ratio_squared": energy[0] / energy.sum(),
        "participation_ratio": energy.sum() ** 2 / (energy**2).sum(),
        "effective_rank": float(np.exp(-(share * np.log(share)).sum())),
        "stable_rank": energy.sum() / energy[0],
    }


@pytest.mark.parametrize("kind", ["plain", "far", "dominated", "drifting"])
def test_spectral_metrics_equal_a_float64_svd(kind: str) -> None:
    x = cloud(12_000, 96, kind=kind)  # several blocks in every fold
    found = anisoscope.measure_rows(x, SPECTRAL)
    for name, expected in twin(x).items():
        assert found[name].value == pytest.approx(expected, rel=1e-7), name
    fold = fold_of(torch.arange(len(x)))
    left = [twin(x[fold != 3])["svd_ratio"] if j == 3 else 0.0 for j in range(8)]
    kept = as_equal_folds(twin(x)["svd_ratio"], left, fold.bincount().tolist())[3]
    assert found["svd_ratio"].replicates[3] == pytest.approx(kept, rel=1e-7)


@pytest.mark.parametrize("kind", ["plain", "far", "dominated"])
def test_average_cosine_equals_the_mean_over_all_pairs(kind: str) -> None:
    x = cloud(3000, 48, kind=kind)
    units = x.double() / x.double().norm(dim=1, keepdim=True)
    expected = float(((units @ units.T).sum() - len(x)) / (len(x) * (len(x) - 1)))
    assert anisoscope.average_cosine(x).value == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", [(700, 96), (700, 3, 32), (1, 96)])
def test_sums_by_cell_do_not_depend_on_chunks_or_cores(
    shape: tuple[int, ...], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = cloud(shape[0], 96, kind="far").view(shape)
    x[0] = 0.0
    cell = torch.arange(len(x)) % 5 % 4
    monkeypatch.setattr("anisoscope.numerics.linalg._WIDENED", 96 * 37)
    monkeypatch.setattr(directions, "_SHARED", 0)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = [kind.split(x, cell, 5) for kind in (Directions, Coordinates)]
    finally:
        torch.set_num_threads(before)
    for number in range(4):
        _check_sums(x[cell == number].double(), found[0][number], found[1][number])
    assert found[0][4].n == 0 and float(found[0][4].norms.sum()) == 0.0


def _check_sums(rows: torch.Tensor, one: Directions, two: Coordinates) -> None:
    norms = rows.norm(dim=-1)
    units = torch.where(norms.unsqueeze(-1) > 0, rows / norms.unsqueeze(-1), 0.0)
    assert one.n == two.n == len(rows)
    expected = [rows.sum(0), units.sum(0), norms.sum(0), norms.square().sum(0), (norms == 0).double().sum(0)]
    for name, value in zip(("total", "units", "norms", "squared_norms", "zeros"), expected, strict=True):
        torch.testing.assert_close(getattr(one, name), value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(two.unit_squares, units.square().sum(0), rtol=1e-12, atol=1e-14)
    if len(rows):
        assert torch.equal(one.largest_norm, norms.amax(0)) and torch.equal(two.largest_value, rows.abs().amax(0))


@pytest.mark.parametrize("shape", [(5000, 100), (3000, 2, 70), (5000, 8)])
def test_blocks_of_rows_give_the_scatter_of_all(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "_BLOCK", 1)  # so that the least number of rows decides
    x = cloud(shape[0], shape[1] * (shape[2] if len(shape) > 2 else 1), kind="drifting").view(shape)
    found = Moments().update(x)
    rows = x.double().movedim(0, -2)
    centred = rows - rows.mean(-2, keepdim=True)
    torch.testing.assert_close(found.mean, rows.mean(-2), rtol=1e-12, atol=1e-10)
    torch.testing.assert_close(found.scatter, centred.mT @ centred, rtol=1e-12, atol=1e-6)


@pytest.mark.parametrize("width", [1, 63, 64, 130])
def test_a_gram_matrix_is_symmetric_and_added_to_what_is_there(width: int) -> None:
    x = torch.randn(200, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    out = torch.ones(width, width, dtype=torch.float64)
    add_gram(out, x)
    add_gram(out, x)
    torch.testing.assert_close(out, 1.0 + 2.0 * (x.T @ x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out, out.T, rtol=1e-14, atol=1e-12)
    expected = torch.linalg.svdvals(x).square()
    torch.testing.assert_close(eigenvalues(x.T @ x), expected, rtol=1e-10, atol=1e-10)


def test_memory_that_is_used_again_is_told_apart_by_name_and_type() -> None:
    one = room("one", (2, 3), torch.float64).fill_(1.0)
    room("two", (2, 3), torch.float64).fill_(2.0)
    room("one", (2, 3), torch.float32).fill_(3.0)
    assert one.unique().tolist() == [1.0]
    assert room("one", (6,), torch.float64).unique().tolist() == [1.0]


# hostile rows


def test_rows_that_are_not_finite_are_left_out_and_rows_of_large_numbers_are_not() -> None:
    x = cloud(400, 16)
    x[3, 2], x[7, 0], x[9, 1], x[9, 2] = torch.nan, torch.inf, torch.inf, -torch.inf
    x[5] = 3e38  # its sum is not finite, but it is
    left = arrays.finite_rows(x, "a metric", torch.arange(400))[1].tolist()
    assert sorted(set(range(400)) - set(left)) == [3, 7, 9]
    x[5] = 1.0
    kept = torch.tensor([i for i in range(400) if i not in (3, 7, 9)])
    for name in ("average_cosine", "svd_ratio"):
        whole = getattr(anisoscope, name)(x, contexts=torch.arange(400))
        part = getattr(anisoscope, name)(x[kept], contexts=kept)
        assert whole.value == part.value and whole.dropped == 3 and whole.n == 397


@pytest.mark.parametrize("name", ["average_cosine", "svd_ratio", "rogue_share"])
def test_an_array_may_lie_in_memory_or_on_disk_in_any_way(name: str, tmp_path: Path) -> None:
    metric, x = getattr(anisoscope, name), cloud(500, 64, kind="far")
    expected = metric(x.double()).value
    wide = torch.zeros(1000, 128)
    wide[::2, ::2] = x
    np.save(tmp_path / "rows.npy", x.numpy())
    others = [x, x.numpy(), wide[::2, ::2], x.T.contiguous().T, np.load(tmp_path / "rows.npy", mmap_mode="r")]
    for other in others:
        assert metric(other).value == pytest.approx(expected, rel=1e-12)
    half = x.bfloat16()
    assert metric(half).value == pytest.approx(metric(half.double()).value, rel=1e-12)


def test_one_context_gives_a_value_without_an_interval() -> None:
    x = cloud(300, 80)
    found = anisoscope.measure_rows(x, SPECTRAL, contexts=torch.zeros(300))
    for name, expected in twin(x).items():
        assert found[name].value == pytest.approx(expected, rel=1e-7)
        assert np.isnan(found[name].low) and found[name].contexts == 1


# several metrics at once


@pytest.mark.parametrize("words", [None, "all", ["two_nn", "gride:scale=4", "levina_bickel", "svd_ratio:batches=1"]])
def test_metrics_taken_together_equal_each_alone(words: str | list[str] | None) -> None:
    x, contexts = cloud(400, 12) + 1.0, torch.arange(400) // 4
    tokens = torch.arange(400) % 11
    found = anisoscope.measure_rows(x, words, contexts=contexts, tokens=tokens, seed=3)
    requests = [r for r in parse_requests(words) if arrays.is_of_rows(r.metric)]
    assert len(found) == len(requests) > 3
    for request, together in zip(requests, found.values(), strict=True):
        alone = request.metric(x, contexts=contexts, tokens=tokens, seed=3, **request.options)
        assert repr(alone) == repr(together) and alone.value == together.value, request.metric.name
        assert alone.replicates == together.replicates, request.metric.name


def test_the_neighbours_are_searched_once_for_all_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    searched = arrays.sample_graphs
    monkeypatch.setattr(arrays, "sample_graphs", lambda *a, **k: calls.append(k["wanted"]) or searched(*a, **k))
    anisoscope.measure_rows(cloud(200, 6), ["two_nn", "gride", "levina_bickel", "hubness"])
    assert len(calls) == 1


def test_metrics_of_rows_are_refused_or_missing_with_a_reason() -> None:
    with pytest.raises(AnisoscopeError, match="reads attention"):
        anisoscope.measure_rows(cloud(20, 4), "attention_entropy")
    with pytest.raises(AnisoscopeError, match="at least one"):
        anisoscope.measure_rows(cloud(20, 4), iter(()))
    found = anisoscope.measure_rows(cloud(20, 4), ["average_cosine", "self_similarity"])
    assert np.isnan(found["self_similarity"].value) and "tokens" in found["self_similarity"].note
    assert found["average_cosine"].n == 20


_PEAK = """
import resource, sys, torch, anisoscope
x = torch.randn(int(sys.argv[1]), 256)
anisoscope.svd_ratio(x[:20000]), anisoscope.average_cosine(x[:20000])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
anisoscope.svd_ratio(x), anisoscope.average_cosine(x)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is counted in other units elsewhere")
def test_spectra_and_cosines_make_no_copy_of_the_array() -> None:
    done = subprocess.run([sys.executable, "-c", _PEAK, "120000"], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 30_000, "kB beyond the peak of 20,000 rows; the array has 120,000"


def test_every_fold_is_a_share_of_the_rows() -> None:
    rows, contexts = cloud(900, 70), torch.arange(900)
    found = arrays._by_fold(Moments, rows, fold_of(contexts), contexts)
    assert sorted(found) == list(range(FOLDS)) and sum(part.n for part in found.values()) == 900


@pytest.mark.parametrize("words", [None, "all"])
def test_values_without_intervals_are_the_same_values(words: str | None) -> None:
    x = torch.randn(700, 24, generator=torch.Generator().manual_seed(3)) + 2.0
    x[5], x[9] = 0.0, torch.nan
    contexts = torch.arange(700) // 7
    whole = anisoscope.measure_rows(x, words, contexts=contexts, tokens=torch.arange(700) % 5)
    alone = anisoscope.measure_rows(x, words, contexts=contexts, tokens=torch.arange(700) % 5, interval=False)
    assert list(whole) == list(alone)
    for name, estimate in whole.items():
        other = alone[name]
        assert (other.n, other.contexts, other.dropped) == (estimate.n, estimate.contexts, estimate.dropped), name
        assert other.value == pytest.approx(estimate.value, rel=1e-9, nan_ok=True), name
        assert math.isnan(other.low) and not [r for r in other.replicates if not math.isnan(r)], name


def test_one_row_of_each_context_is_taken_without_an_interval_too() -> None:
    x = torch.randn(600, 8, generator=torch.Generator().manual_seed(4))
    contexts = torch.arange(600) // 3
    whole, alone = (anisoscope.two_nn(x, contexts=contexts, per_context=True, interval=i) for i in (True, False))
    assert alone.value == pytest.approx(whole.value, rel=1e-12)


def test_inference_mode_leaves_nothing_behind() -> None:
    x = torch.randn(900, 80, generator=torch.Generator().manual_seed(5))
    plain = anisoscope.measure_rows(x)
    with torch.inference_mode():
        inside = anisoscope.measure_rows(x)
    after = anisoscope.measure_rows(x)
    assert [e.value for e in plain.values()] == [e.value for e in inside.values()] == [e.value for e in after.values()]


def test_a_fold_with_most_of_the_rows_leaves_the_others_their_neighbours() -> None:
    """Rows that do not count stay neighbours, so that no row lacks any."""
    x = torch.randn(1200, 8, generator=torch.Generator().manual_seed(6))
    one_large = torch.where(torch.arange(1200) < 900, 0, torch.arange(1200))
    found, even = anisoscope.levina_bickel(x, contexts=one_large), anisoscope.levina_bickel(x)
    assert found.value == pytest.approx(even.value, rel=1e-12)
    assert len(found.replicates) == 8 and math.isfinite(found.low) and found.low < found.value < found.high


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["average_cosine", "drift", "mean_norm"])
def test_sums_that_are_not_finite_tell_of_rows_that_are_not(name: str, bad: float) -> None:
    """Sums of float32 rows are taken without looking at the rows first; a bad row is still left out and counted."""
    x = torch.randn(300, 12, generator=torch.Generator().manual_seed(0))
    spoiled = x.clone()
    spoiled[17, 3] = bad
    found = arrays.REGISTRY[name](spoiled)
    kept = torch.arange(300) != 17
    expected = arrays.REGISTRY[name](x[kept], contexts=torch.arange(300)[kept])
    assert found.dropped == 1
    assert found.value == expected.value
    assert found.replicates == expected.replicates


def test_metrics_say_truly_which_sums_they_read() -> None:
    rows, contexts = cloud(300, 12), torch.arange(300)
    told = [metric for metric in registry().values() if metric.sums is not None]
    assert {"average_cosine", "drift", "mean_norm"} <= {metric.name for metric in told}
    for metric in told:
        alone = metric(rows, contexts=contexts)
        beside = anisoscope.measure_rows(rows, [metric.name, "average_cosine", "drift"], contexts=contexts)
        assert alone.replicates == beside[metric.name].replicates and alone.value == beside[metric.name].value


def test_the_average_cosine_of_float32_rows_is_that_of_float64_ones() -> None:
    x = torch.randn(3000, 96, generator=torch.Generator().manual_seed(6)) + torch.linspace(0.0, 1.0, 96)
    wide = x.double()
    units = (wide / wide.norm(dim=1, keepdim=True)).sum(0)
    brute = float((units.square().sum() - 3000) / (3000 * 2999))
    for interval in (True, False):
        assert anisoscope.average_cosine(x, interval=interval).value == pytest.approx(brute, rel=1e-12)
