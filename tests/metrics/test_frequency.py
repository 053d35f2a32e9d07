"""Frequency bins of equal mass, and the spread of types against their frequency: twins and planted cases."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.frequency import (
    OCCURRENCES,
    Correlation,
    TemporalSpread,
    TypeSpread,
    beta_points,
    bin_of,
    contextual_spread,
    correlate_types,
    equal_mass_bins,
    frequency_beta,
    frequency_spread,
    resampled,
    spread_points,
)
from support import references


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


ZIPF = (100_000 / torch.arange(1, 2001)).long()

# bins


def test_bins_hold_about_the_same_number_of_tokens() -> None:
    bins = equal_mass_bins(ZIPF)
    mass = torch.zeros(5, dtype=torch.int64).index_add_(0, bins, ZIPF).double() / ZIPF.sum()
    assert float(mass.min()) > 0.15 and float(mass.max()) < 0.25
    assert bins[0] == 0 and bins[-1] == 4 and bool((bins.diff() >= 0).all())


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40).filter(any), st.integers(1, 6))
def test_a_more_frequent_type_is_never_in_a_later_bin(counts: list[int], bins: int) -> None:
    found = equal_mass_bins(torch.tensor(counts), bins=bins)
    for count, place in zip(counts, found.tolist(), strict=True):
        assert (place == -1) == (count == 0) and place < bins
        assert all(other >= place for c, other in zip(counts, found.tolist(), strict=True) if 0 < c < count)


def test_a_type_that_is_most_of_the_corpus_is_alone_in_its_bin() -> None:
    assert equal_mass_bins(torch.tensor([900, 40, 30, 30])).tolist() == [2, 4, 4, 4]


def test_rows_without_a_type_or_with_an_unseen_one_have_no_bin() -> None:
    bins = equal_mass_bins(torch.tensor([50, 25, 0, 25]), bins=2)
    assert bin_of(torch.tensor([-1, 0, 2, 3, 99]), bins).tolist() == [-1, 0, -1, 1, -1]


@pytest.mark.parametrize("wrong", [torch.zeros(5), torch.tensor([3.0, -1.0]), torch.ones(2, 2), torch.zeros(0)])
def test_numbers_that_are_no_counts_are_refused(wrong: Tensor) -> None:
    with pytest.raises(AnisoscopeError, match="no counts of types"):
        equal_mass_bins(wrong)


# spread


def test_contextual_spread_is_its_definition() -> None:
    types, rows = 30, 800
    tokens = torch.randint(types, (rows,), generator=torch.Generator().manual_seed(1))
    tokens[:20] = -1
    x, counts, order = noise(rows, 6) * (tokens[:, None] + 1), torch.arange(types) * 10, torch.randperm(rows)
    found = contextual_spread(x, tokens, counts, order=order)
    by_type: dict[int, list[int]] = defaultdict(list)
    for i in order.argsort().tolist():
        if tokens[i] > 0:  # type 0 has no count, −1 is no type
            by_type[int(tokens[i])].append(i)
    wanted = {t: references.spread(x[rows[:10]].numpy()) for t, rows in sorted(by_type.items()) if len(rows) >= 10}
    assert len(wanted) > 10
    assert found.distance.tolist() == pytest.approx([v[0] for v in wanted.values()], rel=1e-10)
    assert found.norm.tolist() == pytest.approx([v[1] for v in wanted.values()], rel=1e-10)
    assert found.frequency.tolist() == pytest.approx([math.log(10 * t) for t in wanted])


def test_the_spread_of_a_type_does_not_grow_with_the_number_of_its_rows() -> None:
    x = noise(10_000 + OCCURRENCES, 8)
    tokens = torch.tensor([0] * 10_000 + [1] * OCCURRENCES)
    found = contextual_spread(x, tokens, torch.tensor([10_000, 10]), order=torch.arange(len(x)))
    assert float(found.distance[0] / found.distance[1]) == pytest.approx(1.0, abs=0.3)
    assert found.distance.numpy() == pytest.approx(np.full(2, math.sqrt(8)), rel=0.3)


def test_the_order_of_the_rows_changes_nothing() -> None:
    tokens = torch.randint(12, (400,), generator=torch.Generator().manual_seed(2))
    x, order = noise(400, 5), torch.randperm(400)
    shuffle = torch.randperm(400)
    one = contextual_spread(x, tokens, torch.arange(1, 13), order=order)
    two = contextual_spread(x[shuffle], tokens[shuffle], torch.arange(1, 13), order=order[shuffle])
    assert torch.equal(one.distance, two.distance)


def test_without_types_that_occur_often_enough_there_is_no_spread() -> None:
    found = contextual_spread(noise(50, 4), torch.arange(50), torch.ones(50), order=torch.arange(50))
    assert len(found.distance) == 0
    assert math.isnan(correlate_types(found.frequency, found.distance).value)


def test_temporal_spread_is_that_of_the_rows_over_time() -> None:
    history = [5.0 + 1e-3 * noise(20, 6, seed=s) for s in range(9)]
    spread = TemporalSpread()
    for table in history:
        spread.update(table)
    counts = torch.arange(20)
    found = spread.spread(counts)
    wanted = [references.spread(torch.stack([t[v] for t in history]).numpy()) for v in range(1, 20)]
    assert found.distance.tolist() == pytest.approx([w[0] for w in wanted], rel=1e-6)
    assert found.norm.tolist() == pytest.approx([w[1] for w in wanted], rel=1e-10)
    assert found.frequency.tolist() == pytest.approx([math.log(v) for v in range(1, 20)])


def test_one_moment_has_no_spread_over_time() -> None:
    assert len(TemporalSpread().update(noise(5, 3)).spread(torch.ones(5)).distance) == 0


def test_more_rows_than_counts_are_left_out() -> None:
    """Tables are often padded beyond the vocabulary."""
    spread = TemporalSpread().update(noise(8, 3)).update(noise(8, 3, seed=1))
    assert len(spread.spread(torch.ones(5)).distance) == 5
    assert len(spread.spread(torch.ones(12)).distance) == 8


# correlation


@pytest.mark.parametrize("method", ["pearson", "spearman"])
def test_correlations_are_scipys(method: str) -> None:
    from scipy import stats

    x = noise(60)
    y = (0.5 * x + noise(60, seed=1)).round(decimals=1)  # with ties
    found = correlate_types(x, y, method=method)
    wanted = getattr(stats, f"{method}r")(x.numpy(), y.numpy()).statistic
    assert found.value == pytest.approx(wanted, abs=1e-12)
    assert found.low < wanted < found.high and found.types == 60


def test_a_planted_relation_is_found_and_none_is_not() -> None:
    x = noise(200)
    assert correlate_types(x, -x + 0.1 * noise(200, seed=1)).p == 1 / 1000
    null = [correlate_types(noise(40, seed=2 * s), noise(40, seed=2 * s + 1), draws=99).p for s in range(200)]
    assert 0.01 <= np.mean(np.array(null) <= 0.05) <= 0.1


def test_the_interval_covers_the_true_correlation() -> None:
    truth = 0.6
    inside = 0
    for s in range(200):
        x = noise(80, seed=3 * s)
        y = truth * x + math.sqrt(1 - truth**2) * noise(80, seed=3 * s + 1)
        found = correlate_types(x, y, draws=199)
        inside += found.low <= truth <= found.high
    assert 0.88 <= inside / 200 <= 0.99


def test_a_whole_vocabulary_is_resampled_in_parts() -> None:
    """Two thousand types and 1 999 draws are more than is held at once."""
    x = noise(2000)
    found = correlate_types(x, 0.1 * x + noise(2000, seed=1), draws=1999)
    assert found.p == 1 / 2000 or found.p < 0.01
    assert found.low < found.value < found.high and found.high - found.low == pytest.approx(
        4 / math.sqrt(2000), rel=0.2
    )


def bare_resampling(x: Tensor, y: Tensor, *, draws: int) -> Correlation:
    """A correlation with permutations and bootstrap samples taken one by one, of the same random numbers."""
    generator = torch.Generator().manual_seed(0)
    order = torch.rand(draws, len(x), generator=generator).argsort(1)
    drawn = torch.randint(len(x), (draws, len(x)), generator=generator)
    r = float(np.corrcoef(x, y)[0, 1])
    null = [abs(np.corrcoef(x, y[mine])[0, 1]) >= abs(r) - 1e-12 for mine in order]
    low, high = np.quantile([np.corrcoef(x[mine], y[mine])[0, 1] for mine in drawn], [0.025, 0.975])
    return Correlation(r, float(low), float(high), (1 + sum(null)) / (draws + 1), len(x))


def test_statistics_that_share_their_resamplings_are_those_of_each_alone() -> None:
    frequency, dead = noise(40), torch.arange(40) == 3
    spreads = [TypeSpread(frequency, noise(40, seed=s).exp(), noise(40, seed=s + 9).abs() + 1) for s in (1, 2)]
    spreads.append(TypeSpread(frequency, noise(40, seed=3).exp().masked_fill(dead, 0.0), torch.ones(40)))
    spreads.append(TypeSpread(frequency, torch.zeros(40), torch.ones(40)))  # no variance, and no type for an exponent
    ways = [(one, method, n) for one in spreads for method in ("pearson", "spearman") for n in (False, True)]
    points = [spread_points(one, method=method, normalised=n) for one, method, n in ways]
    found = resampled([*points, *map(beta_points, spreads)])
    alone = [frequency_spread(one, method=method, normalised=n) for one, method, n in ways]
    for mine, wanted in zip(found, [*alone, *map(frequency_beta, spreads)], strict=True):
        assert vars(mine) == pytest.approx(vars(wanted), rel=1e-12, nan_ok=True)
    bare = bare_resampling(frequency, spreads[0].distance, draws=199)
    assert vars(resampled(points[:6], draws=199)[0]) == pytest.approx(vars(bare), rel=1e-9)
    assert found[-2].types == 39 and math.isnan(found[-1].value)


@pytest.mark.parametrize("method", ["pearson", "spearman"])
def test_without_points_or_variance_there_is_no_correlation(method: str) -> None:
    assert math.isnan(correlate_types(noise(7), noise(7), method=method).value)
    found = correlate_types(noise(20), torch.ones(20), method=method)
    assert math.isnan(found.value) and math.isnan(found.p) and found.types == 20
