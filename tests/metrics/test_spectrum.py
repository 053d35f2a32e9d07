"""Local anisotropy: clusters that do not depend on the order of rows, found once; and the numerics under it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import anisoscope
from anisoscope.metrics import spectrum as module
from anisoscope.metrics.engine.estimation import evaluate
from anisoscope.metrics.engine.metric import array_view
from anisoscope.metrics.spectrum import Clusters, divisive_k_means, local_anisotropy, silhouette, svd_ratio
from anisoscope.numerics.hashing import fold_of
from anisoscope.numerics.host import together
from anisoscope.numerics.linalg import largest_directions
from anisoscope.results.quantity import as_equal_folds
from anisoscope.stats.moments import Moments
from anisoscope.stats.sample import Sample


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def planted(n: int = 600, d: int = 20, k: int = 5, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Clusters of unequal spread around far centres, and which row belongs to which."""
    label = torch.arange(n) % k
    centres = 12.0 * normal(k, d, seed=seed)
    rows = centres[label] + normal(n, d, seed=seed + 1) * torch.linspace(0.5, 2.0, d)
    return rows, label


def share(rows: np.ndarray) -> float:
    """σ₁²/Σσ² the slow way."""
    energies = np.linalg.svd(rows - rows.mean(0), compute_uv=False) ** 2
    return float(energies[0] / energies.sum())


def stretch(rows: np.ndarray, labels: np.ndarray) -> float:
    parts = [rows[labels == k] for k in np.unique(labels)]
    return sum(len(part) * share(part) for part in parts) / len(rows)


# numerics


@pytest.mark.parametrize("kind", ["round", "stretched", "line", "few directions", "far"])
def test_the_largest_direction_of_many_sets_is_that_of_each_covariance(kind: str) -> None:
    n, d = 300, 60
    rows = normal(n, d)
    rows = {
        "round": rows,
        "stretched": rows * torch.arange(1, d + 1) ** -0.7,
        "line": torch.outer(rows[:, 0], rows[0]) + 5.0,
        "few directions": rows[:, :4] @ normal(4, d, seed=2),
        "far": rows + 100.0,
    }[kind]
    member = (torch.rand(n, 7, generator=torch.Generator().manual_seed(1)) < 0.6).double()
    member[:, 0] = 1.0
    top, vectors = largest_directions(rows, member)
    for j in range(7):
        mine = rows[member[:, j] > 0]
        centred = mine - mine.mean(0)
        values, axes = torch.linalg.eigh(centred.T @ centred)
        assert float(top[j]) == pytest.approx(float(values[-1]), rel=1e-7)
        assert float((vectors[j] @ axes[:, -1]).abs()) == pytest.approx(1.0, abs=1e-3)
    other = largest_directions(rows, 1.0 - member[:, 1:])[0]
    assert float((other / top[1:] - 1).abs().max()) > 1e-3, "other rows have another one"


def test_together_keeps_the_order_and_gives_the_threads_back() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        found = together(lambda n: (n * 2, torch.get_num_threads()), list(range(20)))
        assert [n for n, _ in found] == list(range(0, 40, 2)) and {t for _, t in found} == {1}
        assert torch.get_num_threads() == 2
        with pytest.raises(ZeroDivisionError):
            together(lambda n: 1 // n, [1, 0, 2])
        assert torch.get_num_threads() == 2, "also after an error"
    finally:
        torch.set_num_threads(before)


def test_spectra_found_several_at_a_time_are_those_found_one_by_one() -> None:
    before, x = torch.get_num_threads(), normal(900, 140).numpy()
    try:
        torch.set_num_threads(1)
        plain = svd_ratio(x)
        torch.set_num_threads(3)
        threaded = svd_ratio(x)
    finally:
        torch.set_num_threads(before)
    assert threaded.value == pytest.approx(plain.value, rel=1e-12)
    assert threaded.replicates == pytest.approx(plain.replicates, rel=1e-12)
    assert plain.value == pytest.approx(float(svd_ratio.function(Moments().update(torch.as_tensor(x)))), rel=1e-12)


# clusters


def test_planted_clusters_are_found_and_their_number_too() -> None:
    rows, label = planted()
    for found in (divisive_k_means(rows, 5), Clusters.of(Sample(600).update(rows, context=torch.arange(600))).labels()):
        assert len(found.unique()) == 5
    found = divisive_k_means(rows, 5)
    assert all(len(found[label == k].unique()) == 1 for k in range(5))


def test_the_order_of_rows_does_not_matter_and_nothing_is_drawn() -> None:
    rows = torch.cat([planted(300)[0], normal(300, 20, seed=5)])
    order = torch.randperm(600, generator=torch.Generator().manual_seed(3))
    assert torch.equal(divisive_k_means(rows, 4)[order], divisive_k_means(rows[order], 4))
    state = torch.get_rng_state()
    one, two, again = (anisoscope.local_anisotropy(x.numpy()) for x in (rows, rows[order], rows))
    assert one.value == again.value and torch.equal(state, torch.get_rng_state())
    assert two.value == pytest.approx(one.value, rel=1e-9)
    drawn = [anisoscope.local_anisotropy(x.numpy(), partition="random").value for x in (rows, rows[order])]
    assert drawn[0] != drawn[1], "the random control is a draw of rows by their place"


def test_k_means_is_no_worse_than_that_of_scipy() -> None:
    from scipy.cluster.vq import kmeans2

    rows = normal(700, 12) * torch.arange(1, 13) ** -0.5

    def within(labels: Any) -> float:
        labels = torch.as_tensor(labels)
        parts = [rows[labels == k] for k in labels.unique()]
        return sum(float((part - part.mean(0)).square().sum()) for part in parts)

    for k in (2, 5, 10):
        theirs = min(within(kmeans2(rows.numpy(), k, minit="++", seed=s, iter=25)[1]) for s in range(5))
        assert within(divisive_k_means(rows, k)) < 1.03 * theirs


def test_silhouette_equals_that_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    rows, label = planted(200)
    label = torch.where(torch.arange(200) < 3, 7, label)  # and a small cluster that is none
    assert silhouette(torch.cdist(rows, rows), label) == pytest.approx(metrics.silhouette_score(rows, label), rel=1e-9)


# the metric


def test_the_value_and_every_fold_left_out_are_those_of_the_same_clusters() -> None:
    """A slow twin in NumPy: labels found once on all rows, rows of a fold taken away."""
    rows, _ = planted(400)
    contexts = torch.arange(400) // 8
    for partition in ("clusters", "random", "none"):
        view = array_view([(local_anisotropy, {})], (rows, contexts, torch.full((400,), -1), 0), seed=0, interval=True)
        found = evaluate(local_anisotropy, view, {"partition": partition})
        cloud = view.stat(Clusters)
        labels = cloud.labels()
        labels = {"clusters": labels, "random": labels.sort().values, "none": labels * 0}[partition].numpy()
        x, fold = cloud.rows.numpy(), cloud.fold.numpy()
        assert found.value == pytest.approx(stretch(x, labels), rel=1e-7)
        left = [stretch(x[fold != j], labels[fold != j]) for j in range(8)]
        sizes = torch.bincount(fold_of(contexts.unique()), minlength=8).tolist()
        assert list(found.replicates) == pytest.approx(as_equal_folds(found.value, left, sizes), rel=1e-7)
        assert found.n == 400 and found.low < found.value < found.high


def test_all_parts_at_once_are_the_parts_one_by_one() -> None:
    """On a GPU every part goes through one product; the numbers are the same."""
    rows, label = planted(300)
    there = (torch.rand(300, 3, generator=torch.Generator().manual_seed(0)) < 0.8).double()
    energy = rows.square().sum(1)
    parts = [label == k for k in range(5)]
    one_by_one = torch.cat([module._share(rows[mine], there[mine], energy[mine])[0] for mine in parts])
    one_hot = torch.nn.functional.one_hot(label).double()
    at_once, sizes = module._share(rows, (one_hot.unsqueeze(2) * there.unsqueeze(1)).flatten(1), energy)
    assert at_once.tolist() == pytest.approx(one_by_one.tolist(), rel=1e-7)
    assert float(sizes.sum()) == float(there.sum())


def test_on_a_gpu_every_partition_goes_through_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = planted(300)
    contexts = torch.arange(300) // 6
    calls = []
    share = module._share
    monkeypatch.setattr(module, "_share", lambda *part: calls.append(len(part[0])) or share(*part))  # type: ignore[func-returns-value]
    found = []
    for at_once in (False, True):
        monkeypatch.setattr(module, "_at_once", lambda rows, way=at_once: way)
        view = array_view([(local_anisotropy, {})], (rows, contexts, torch.full((300,), -1), 0), seed=0, interval=True)
        calls.clear()
        for partition in ("clusters", "random", "none"):
            seen = evaluate(local_anisotropy, view, {"partition": partition})
            found.append([seen.value, *seen.replicates])
    assert calls == [300, 300, 300]
    for apart, joined in zip(found[:3], found[3:], strict=True):
        assert joined == pytest.approx(apart, rel=1e-7)


def test_the_three_partitions_share_one_clustering(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    chosen = module._chosen
    monkeypatch.setattr(module, "_chosen", lambda rows: calls.append(len(rows)) or chosen(rows))  # type: ignore[func-returns-value]
    rows, _ = planted(300)
    view = array_view(
        [(local_anisotropy, {})], (rows, torch.arange(300), torch.full((300,), -1), 0), seed=0, interval=True
    )
    for partition in ("clusters", "random", "none"):
        evaluate(local_anisotropy, view, {"partition": partition})
    assert calls == [300], "once, also with eight folds left out of each"


def test_rows_of_any_unit_and_far_from_the_origin_give_the_same_number() -> None:
    rows, _ = planted(300)
    plain = anisoscope.local_anisotropy(rows.numpy()).value
    assert anisoscope.local_anisotropy(rows.numpy() * 1e30).value == pytest.approx(plain, rel=1e-7)
    assert anisoscope.local_anisotropy(rows.numpy() * 1e-30).value == pytest.approx(plain, rel=1e-7)
    assert anisoscope.local_anisotropy(rows.numpy() + 3000.0).value == pytest.approx(plain, rel=1e-7)


def test_equal_rows_and_few_of_them_are_told() -> None:
    assert anisoscope.local_anisotropy(np.ones((100, 4))).value == 1.0
    assert anisoscope.local_anisotropy(np.repeat(np.eye(4), 30, axis=0)).value == 1.0
    with pytest.raises(anisoscope.AnisoscopeError, match="at least 64"):
        anisoscope.local_anisotropy(np.random.default_rng(0).normal(size=(63, 4)))


def test_copies_of_a_few_vectors_have_no_direction_within_their_clusters() -> None:
    few = torch.randn(6, 12, generator=torch.Generator().manual_seed(0))
    found = local_anisotropy(few[torch.arange(1200) % 6], clusters=6)
    assert (found.value, found.low, found.high) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("distance", [1e3, 1e6])
def test_clusters_far_apart_are_as_round_as_they_are(distance: float) -> None:
    generator = torch.Generator().manual_seed(1)
    round_ones = torch.randn(1200, 12, generator=generator, dtype=torch.float64)
    centres = distance * torch.randn(6, 12, generator=generator, dtype=torch.float64)
    number = torch.arange(1200) % 6
    shares = []
    for k in range(6):
        mine = round_ones[number == k]
        sigma = torch.linalg.svdvals(mine - mine.mean(0)).square()
        shares.append(float(sigma[0] / sigma.sum()))
    found = local_anisotropy(round_ones + centres[number], clusters=6)
    assert found.value == pytest.approx(sum(shares) / 6, rel=1e-6)
