"""Statistics: what they hold equals sums done the slow way, also where naive sums lose everything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from anisoscope.numerics.hashing import row_hash
from anisoscope.stats.directions import Coordinates, Directions, Means
from anisoscope.stats.moments import Moments
from anisoscope.stats.sample import Sample
from support import references


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# moments


@pytest.mark.parametrize("mean", [0.0, 300.0, 3000.0])
def test_moments_keep_the_covariance_under_a_common_mean(mean: float) -> None:
    x = (normal(500, 6) + mean).float()
    moments = Moments()
    for part in x.split(37):
        moments.update(part)
    exact = x.double().numpy()
    np.testing.assert_allclose(moments.mean.numpy(), exact.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.scatter.numpy() / 499, np.cov(exact, rowvar=False), rtol=1e-9, atol=1e-9)


def test_raw_float32_sums_lose_the_covariance_where_moments_keep_it() -> None:
    x = (normal(4000, 4) + 3000.0).float()
    raw = x.T @ x / len(x) - x.mean(0)[:, None] * x.mean(0)[None]
    exact = np.cov(x.double().numpy(), rowvar=False)
    assert np.abs(raw.numpy() - exact).max() > 0.05
    assert np.abs(Moments().update(x).scatter.numpy() / 3999 - exact).max() < 1e-9


def test_second_moment_is_the_uncentred_sum() -> None:
    x = normal(40, 5) + 3
    moments = Moments().update(x[:11]).update(x[11:])
    torch.testing.assert_close(moments.matrix(centred=False), x.T @ x)
    for centred in (True, False):
        sigma = references.sigma(x.numpy(), centred=centred)
        np.testing.assert_allclose(moments.eigenvalues(centred=centred).numpy(), sigma**2, rtol=1e-9)


def test_a_spectrum_read_early_does_not_outlive_further_rows() -> None:
    x = normal(200, 3)
    moments = Moments().update(x[:100])
    moments.eigenvalues()
    moments.update(10 * x[100:])
    expected = Moments().update(torch.cat([x[:100], 10 * x[100:]])).eigenvalues()
    torch.testing.assert_close(moments.eigenvalues(), expected)


def test_few_rows_in_many_dimensions_count_before_they_are_folded() -> None:
    moments = Moments().update(normal(3, 500)).update(normal(2, 500, seed=1))
    assert moments.n == 5
    assert int((moments.eigenvalues() > 1e-9).sum()) == 4


# directions


def test_directions_hold_the_sums_they_name() -> None:
    x = (normal(50, 4) + 1).numpy()
    x[3] = 0.0
    parts = torch.as_tensor(x[:20]), torch.as_tensor(x[20:])
    d, c = (kind().update(parts[0]).update(parts[1]) for kind in (Directions, Coordinates))
    norms = np.linalg.norm(x, axis=1)
    units = x[norms > 0] / norms[norms > 0][:, None]
    expected = {
        "total": x.sum(0),
        "units": units.sum(0),
        "norms": norms.sum(),
        "squared_norms": (norms**2).sum(),
        "zeros": 1,
        "largest_norm": norms.max(),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(d, name).numpy(), value, rtol=1e-12, err_msg=name)
    np.testing.assert_allclose(c.unit_squares.numpy(), (units**2).sum(0), rtol=1e-12)
    np.testing.assert_allclose(c.largest_value.numpy(), np.abs(x).max(0), rtol=1e-12)


def test_direction_sums_of_float32_rows_are_float64_sums() -> None:
    x = (normal(3000, 4) * 1e-3 + 1.0).float()
    d = Directions().update(x)
    exact = x.double().numpy()
    np.testing.assert_allclose(d.total.numpy(), exact.sum(0), rtol=1e-12)
    np.testing.assert_allclose(d.units.numpy(), references.unit(exact).sum(0), rtol=1e-12)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_rows_of_any_size_have_a_direction(scale: float) -> None:
    x = (normal(20, 4) * scale).float()
    d = Directions().update(x)
    assert float(d.zeros) == 0
    np.testing.assert_allclose(d.units.numpy(), references.unit(x.double().numpy()).sum(0), rtol=1e-6)


# means


def test_means_leave_out_what_is_not_finite_and_count_it() -> None:
    x = torch.tensor([[1.0, torch.nan], [3.0, 5.0], [torch.inf, 7.0]])
    means = Means().update(x[:1]).update(x[1:])
    assert means.mean().tolist() == [2.0, 6.0]
    assert means.count.tolist() == [2.0, 2.0]
    assert means.n == 3


# sample


def test_a_sample_is_the_rows_with_the_smallest_hashes() -> None:
    x, context = normal(500, 3), torch.arange(500) // 7
    position = torch.arange(500) % 7
    sample = Sample(40)
    for part in torch.randperm(500, generator=torch.Generator().manual_seed(1)).split(23):
        sample.update(x[part], context=context[part], position=position[part], token=part)
    order = row_hash(context, position).argsort()[:40]
    assert torch.equal(sample.rows, x[order])
    assert torch.equal(sample.label("token"), order)
    assert torch.equal(sample.label("context"), context[order])


def test_a_sample_is_spread_over_contexts_and_another_seed_gives_another() -> None:
    context = torch.arange(4000) // 100
    args = {"context": context, "position": torch.arange(4000) % 100}
    one, two = (Sample(400, seed).update(normal(4000, 2), **args) for seed in (0, 1))
    counts = one.label("context").bincount(minlength=40)
    assert counts.min() > 0, "40 contexts, 10 rows expected of each"
    assert set(one.label("hash").tolist()).isdisjoint(two.label("hash").tolist())


def test_a_sample_keeps_its_own_copy() -> None:
    x = normal(10, 3)
    sample = Sample(100).update(x, context=torch.arange(10))
    before = sample.rows.clone()
    x.zero_()
    assert torch.equal(sample.rows, before)


def test_selecting_and_relabelling_leave_the_sample_alone() -> None:
    sample = Sample(50).update(normal(30, 2), context=torch.arange(30), group=torch.arange(30) % 3)
    chosen = sample.select(sample.label("group") == 1)
    assert len(chosen) == 10
    renamed = sample.relabel("group", torch.tensor([2, 0, 1]))
    assert torch.equal((renamed.label("group") == 0), (sample.label("group") == 1))
    assert len(sample) == 30
    assert len(sample.select(torch.zeros(30, dtype=torch.bool))) == 0


def test_an_empty_sample_can_be_read() -> None:
    sample = Sample(5)
    assert len(sample) == 0
    assert len(sample.fold) == 0
    assert len(Sample.load(sample.state())) == 0


def test_sums_that_nobody_reads_are_left_out_and_the_others_stay_the_same() -> None:
    x, cell = torch.randn(500, 16, generator=torch.Generator().manual_seed(5)), torch.arange(500) % 3
    whole, few = (Directions.split(x, cell, 3, read=read) for read in (None, frozenset({"units"})))
    for one, two in zip(whole, few, strict=True):
        assert two.total is None and set(two.tensors()) == set(one.tensors()) - {"total"}
        assert all(torch.equal(value, one.tensors()[name]) for name, value in two.tensors().items())


def test_sums_over_few_rows_use_one_thread_for_each_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, walk, before = list[int](), Directions._walk, torch.get_num_threads()

    def watched(*given: Any, **options: Any) -> Directions:
        seen.append(torch.get_num_threads())
        return walk(*given, **options)

    monkeypatch.setattr(Directions, "_walk", watched)
    torch.set_num_threads(2)
    try:
        Directions().update(torch.randn(64, 8))
        assert seen == [1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
