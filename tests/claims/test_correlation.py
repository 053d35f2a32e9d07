"""Correlations over layers and models: exact where they can be, and intervals that cover what they say."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from anisoscope.claims.engine.claim import Finding, Part, pool
from anisoscope.claims.engine.correlation import (
    CorrelationUnit,
    fisher_interval,
    models_interval,
    order_p,
    permutation_p,
    pooled_correlation,
    welch,
)
from anisoscope.claims.inherent.drift import drift_correlations
from anisoscope.results.quantity import correlate
from support.fake_modalities import Media, media_table

Z95 = 1.959964


def test_the_permutation_p_is_exact_where_it_can_be_and_right_where_it_is_drawn() -> None:
    random = np.random.default_rng(0)
    one, two = random.normal(size=(2, 7))
    unit = CorrelationUnit.of("m", one, two)  # type: ignore[arg-type]
    seen = abs(pooled_correlation([unit]))
    every = [
        abs(pooled_correlation([CorrelationUnit("m", unit.one, np.array(p))])) for p in itertools.permutations(unit.two)
    ]
    exact = np.mean([value >= seen - 1e-9 for value in every])
    assert permutation_p([unit]) == pytest.approx(exact)
    assert permutation_p([unit], draws=4999) == pytest.approx(exact, abs=0.03), "7! is more than that: drawn"
    strong = [CorrelationUnit.of(str(i), range(12), range(12)) for i in range(3)]
    assert permutation_p(strong) == pytest.approx(1 / 10_000)
    assert math.isnan(permutation_p([CorrelationUnit.of("m", [1, 1, 1], [1, 2, 3])]))


def test_permutation_p_is_uniform_without_correlation_and_small_with_it() -> None:
    random = np.random.default_rng(1)

    def p(slope: float) -> float:
        units = []
        for i in range(3):
            x = random.normal(size=8)
            units.append(CorrelationUnit.of(str(i), x, slope * x + random.normal(size=8)))  # type: ignore[arg-type]
        return permutation_p(units, draws=499)

    null = [p(0.0) for _ in range(200)]
    assert 0.02 <= np.mean([value <= 0.05 for value in null]) <= 0.09
    assert np.mean([p(2.0) <= 0.05 for _ in range(20)]) == 1.0


def test_the_interval_over_models_leaves_out_models_with_all_their_stacks() -> None:
    agreeing = [CorrelationUnit.of(str(i), range(6), range(6)) for i in range(4)]
    against = CorrelationUnit.of("x", range(6), range(6)[::-1])
    low, high = models_interval(agreeing)
    assert 0.98 < low < high == 1.0, "24 sites in perfect order are no certainty"
    low, high = models_interval([*agreeing, against])
    assert low < 0 and high > 0.9
    same = [CorrelationUnit("m", unit.one, unit.two) for unit in (*agreeing, against)]
    assert math.isnan(models_interval(same)[0]), "stacks of one model are one model"


def _random_unit(
    random: np.random.Generator, name: str, *, slope: float, spread: float, n: int = 13
) -> CorrelationUnit:
    x = random.normal(size=n)
    return CorrelationUnit.of(name, x, random.normal(slope, spread) * x + random.normal(size=n))  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [3, 5, 8])
def test_the_interval_over_few_models_covers_what_it_says(count: int) -> None:
    random = np.random.default_rng(count)
    more = {"slope": 0.5, "spread": 0.5}
    truth = pooled_correlation([_random_unit(random, str(i), **more) for i in range(4000)])
    hits = []
    for _ in range(300):
        low, high = models_interval([_random_unit(random, str(i), **more) for i in range(count)])
        hits.append(low <= truth <= high)
    assert 0.92 <= np.mean(hits) <= 0.99
    wrong = [models_interval([_random_unit(random, str(i), slope=2.0, spread=0.1) for i in range(count)])
             for _ in range(50)]  # fmt: skip
    assert np.mean([low <= truth <= high for low, high in wrong]) < 0.5, "the counter-test"


@pytest.mark.parametrize("n", [6, 9, 13])
def test_the_interval_over_few_sites_covers_what_it_says(n: int) -> None:
    random = np.random.default_rng(n)
    for rho in (0.0, 0.6):
        hits: dict[bool, list[bool]] = {True: [], False: []}
        for _ in range(1000):
            x, noise = random.normal(size=(2, n))
            y = rho * x + math.sqrt(1 - rho**2) * noise
            for ranked, truth in ((True, 6 / math.pi * math.asin(rho / 2)), (False, rho)):
                value = correlate(x, y, "spearman" if ranked else "pearson")
                low, high = fisher_interval(value, n, ranked=ranked)
                hits[ranked].append(low <= truth <= high)
        assert all(0.93 <= np.mean(found) <= 0.985 for found in hits.values())
    assert fisher_interval(1.0, 5, ranked=True)[0] < 0.5 < fisher_interval(1.0, 13, ranked=True)[0]
    assert fisher_interval(0.9, 3, ranked=True) == (-1.0, 1.0)


def test_p_over_few_sites_tries_every_order() -> None:
    from scipy.stats import pearsonr, spearmanr

    random = np.random.default_rng(0)
    one, two = random.normal(size=(2, 6))
    seen = abs(pearsonr(one, two)[0])
    every = [abs(pearsonr(one, p)[0]) >= seen - 1e-9 for p in itertools.permutations(two)]
    assert order_p(one.tolist(), two.tolist()) == pytest.approx(np.mean(every))
    one, two = random.normal(size=(2, 12))
    assert order_p(one.tolist(), two.tolist()) == pytest.approx(pearsonr(one, two)[1])
    found = drift_correlations(
        media_table(Media(layers=5, noise=0.1, entropy=3).stream(lambda depth: 0.2 + 0.5 * depth))
    )[0]
    pairs = [(p["drift"], p["cosine"]) for p in found["points"] if p["counted"]]
    rho = spearmanr(*zip(*pairs, strict=True))[0]
    every = [abs(spearmanr([d for d, _ in pairs], p)[0]) >= abs(rho) - 1e-9
             for p in itertools.permutations([c for _, c in pairs])]  # fmt: skip
    assert found["spearman_p"] == pytest.approx(np.mean(every))


def test_statistics_equal_scipys() -> None:
    from scipy.stats import ttest_ind

    random = np.random.default_rng(2)
    one, two = random.normal(size=5), 1 + 3 * random.normal(size=3)
    gap, error, degrees = welch(one.tolist(), two.tolist())
    theirs = ttest_ind(one, two, equal_var=False)
    assert (gap / error, degrees) == pytest.approx((theirs.statistic, theirs.df))
    assert math.isnan(correlate([1, math.nan, 2], [1, 2, 3], "pearson"))
    assert math.isnan(correlate([1, 1, 1], [1, 2, 3], "pearson"))


def test_the_linear_pool_is_pearson_s_within_models_and_knows_nothing_of_their_levels() -> None:
    one, two = [1.0, 2.0, 4.0, 8.0, 9.0], [0.1, 0.3, 0.2, 0.9, 0.7]
    alone = CorrelationUnit.of("a", one, two, ranked=False)
    assert pooled_correlation([alone]) == pytest.approx(correlate(one, two, "pearson"))
    moved = CorrelationUnit.of("b", [100 + 7 * x for x in one], [y / 9 for y in two], ranked=False)
    assert pooled_correlation([alone, moved]) == pytest.approx(correlate(one, two, "pearson"))
    assert pooled_correlation([CorrelationUnit.of("a", one, two)]) != pytest.approx(correlate(one, two, "pearson")), (
        "ranks are another thing"
    )


def test_seeds_that_agree_to_the_last_digit_keep_the_interval_that_one_of_them_has() -> None:
    def over_seeds(effects: list[float]) -> Part:
        parts = [Part("r", value, value - 0.2, min(1.0, value + 0.2), margin=0.3, p=0.01) for value in effects]
        return pool([Finding((part,), lambda *_: "") for part in parts]).parts[0]

    same, apart = over_seeds([1.0, 1.0, 1.0]), over_seeds([1.0, 0.98, 0.99])
    assert (same.low, same.high, same.p) == (0.8, 1.0, 0.01)
    assert apart.low > 0.9, "where they differ it is their spread that counts"
