"""Correlations over the layers of a model and over models: Pearson, Spearman, and ranks pooled within models.

Notation
    x, y   drift and average cosine of the n sites of one stack (a unit)
    z      rank within the unit, centred and divided by n, (rank − (n + 1)/2)/n: every site weighs about the same,
           however deep its model is; for the linear correlation, the value in standard deviations of the unit
    ρ      pooled over units: Σ z_x z_y / √(Σ z_x² Σ z_y²); for one unit it is Spearman's (linear: Pearson's)
    Z      Fisher's atanh(r), whose error is about 1/√(n − 3) (Spearman: √((1 + r²/2)/(n − 3)), Bonett & Wright 2000)
An interval over the layers of one model accounts for their number, but treats them as independent draws, which
neighbouring layers are not: it and p are descriptive.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from anisoscope.results.quantity import Quantity, combine_folds, correlate, ranks, t_quantile

FEWEST_SITES = 3  # two points always lie on a line
FEWEST_CLUSTERS = 3  # models needed for an interval over models
FEWEST_FISHER = 4  # sites needed for the standard error of Fisher's Z
MOST_ORDERED = 9  # sites up to which all permutations are enumerated: 9! = 362,880
NORMAL_95 = 1.959964
RANGE = (-1.0, 1.0)
DRAWS = 9999
DESCRIPTIVE = "descriptive: layers of one model are not independent"


def two_sided_p(correlation: float, n: int) -> float:
    """Two-sided p of no correlation for n independent pairs, by t = r √((n−2)/(1−r²)) with n − 2 degrees of freedom.

    >>> round(two_sided_p(0.8, 5), 4)
    0.1041
    """
    from scipy.special import stdtr

    if n < FEWEST_SITES or not math.isfinite(correlation):
        return math.nan
    if abs(correlation) >= 1:
        return 0.0
    t = abs(correlation) * math.sqrt((n - 2) / (1 - correlation**2))
    return 2 * float(stdtr(n - 2, -t))


def order_p(one: Sequence[float], two: Sequence[float]) -> float:
    """Two-sided p of Pearson's r: the share of permutations of `two` with as large an |r|; by t above nine sites.

    For ranks it is the p of Spearman's correlation.

    >>> order_p([1, 2, 3, 4], [1, 2, 3, 4])  # 2 of 24 orders
    0.08333333333333333
    """
    r, n = correlate(one, two, "pearson"), len(one)
    if n < FEWEST_SITES or not math.isfinite(r):
        return math.nan
    if n > MOST_ORDERED:
        return max(two_sided_p(r, n), 2 / math.factorial(n))  # the smallest possible p: one permutation and its reverse
    x, y = (np.asarray(side, dtype=float) - np.mean(side) for side in (one, two))
    products = np.abs(y[_orders(n)] @ x)
    return float(np.mean(products >= abs(float(x @ y)) * (1 - 1e-9)))


@functools.cache
def _orders(n: int) -> np.ndarray:
    return np.array(list(itertools.permutations(range(n))), dtype=np.int8)


def fisher_interval(correlation: float, n: int, *, ranked: bool) -> tuple[float, float]:
    """The 95 % interval of a correlation over n independent pairs, by Fisher's Z; [−1, 1] below four pairs.

    Spearman's correlation is discrete: ±1 enters Z as half a step to the next value, ±(1 − 6/(n(n² − 1))).

    >>> [round(end, 2) for end in fisher_interval(0.6, 5, ranked=True)]
    [-0.67, 0.98]
    """
    if not math.isfinite(correlation):
        return math.nan, math.nan
    if n < FEWEST_FISHER:
        return RANGE
    r = _inside(correlation, n if ranked else None)
    half = NORMAL_95 * math.sqrt((1 + (r**2 / 2 if ranked else 0)) / (n - 3))
    low, high = math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half)
    return min(low, correlation), max(high, correlation)


def _inside(correlation: float, n: int | None) -> float:
    """The correlation moved off ±1, so that atanh is finite."""
    most = 1 - (6 / (n * (n**2 - 1)) if n else 1e-12)
    return max(-most, min(most, correlation))


def sites_interval(quantity: Quantity, n: int, *, ranked: bool) -> tuple[float, float]:
    """The interval of a correlation over n sites: the wider of the jackknife over contexts and Fisher's Z over sites.

    NaN without folds, since the variation over contexts is then unknown.
    """
    low, high = quantity.interval()
    if not math.isfinite(low):
        return math.nan, math.nan
    few = fisher_interval(quantity.value, n, ranked=ranked)
    return max(-1.0, min(low, few[0])), min(1.0, max(high, few[1]))


def correlated(one: Sequence[Quantity], two: Sequence[Quantity], method: str) -> Quantity:
    """A correlation over sites with its leave-one-fold-out values; no interval unless all quantities share the folds.

    >>> correlated([Quantity(1.0), Quantity(2.0)], [Quantity(3.0), Quantity(5.0)], "pearson").value
    1.0
    """
    half = len(one)
    return combine_folds([*one, *two], lambda values: correlate(values[:half], values[half:], method))


@dataclass(frozen=True)
class CorrelationUnit:
    """z of the sites of one stack for both quantities, and the model of the stack."""

    cluster: str
    one: np.ndarray
    two: np.ndarray
    ranked: bool = True

    @classmethod
    def of(cls, cluster: str, one: Sequence[float], two: Sequence[float], *, ranked: bool = True) -> CorrelationUnit:
        sides = [np.asarray(values, dtype=float) for values in (one, two)]
        if ranked:
            x, y = ((ranks(side) - (len(side) + 1) / 2) / len(side) for side in sides)
        else:
            x, y = ((side - side.mean()) / (side.std() or 1.0) for side in sides)
        return cls(cluster, x, y, ranked)


def pooled_correlation(units: Sequence[CorrelationUnit]) -> float:
    """ρ pooled over all units; NaN where a side is constant in every unit."""
    sums = [_sums(unit) for unit in units]
    return _ratio(*np.sum(sums, axis=0)) if sums else math.nan


def _sums(unit: CorrelationUnit) -> tuple[float, float, float]:
    return float(unit.one @ unit.two), float(unit.one @ unit.one), float(unit.two @ unit.two)


def _ratio(product: float, one: float, two: float) -> float:
    return float(product / math.sqrt(one * two)) if one > 0 and two > 0 else math.nan


def permutation_p(units: Sequence[CorrelationUnit], *, draws: int = DRAWS) -> float:
    """Two-sided permutation p of ρ, shuffling the sites of one side within each unit; exact where that is cheaper.

    >>> permutation_p([CorrelationUnit.of("m", [1, 2, 3, 4], [1, 2, 3, 4])])  # 2 of 24 orders are as extreme
    0.08333333333333333
    """
    units = [unit for unit in units if len(unit.one)]
    if not math.isfinite(pooled_correlation(units)):
        return math.nan
    seen = abs(sum(_sums(unit)[0] for unit in units)) - 1e-12
    orders = math.prod(math.factorial(len(unit.one)) for unit in units)
    if orders <= draws:
        every = itertools.product(*([float(unit.one @ p) for p in itertools.permutations(unit.two)] for unit in units))
        return sum(abs(sum(products)) >= seen for products in every) / orders
    random = np.random.default_rng(0)
    drawn = np.zeros(draws)
    for unit in units:
        drawn += unit.two[random.random((draws, len(unit.two))).argsort(1)] @ unit.one
    return (1 + int((np.abs(drawn) >= seen).sum())) / (draws + 1)


def models_interval(units: Sequence[CorrelationUnit]) -> tuple[float, float]:
    """The 95 % interval of ρ over models (all stacks and seeds of a model left out together); NaN below three models.

    The jackknife over models gives the standard error of Z(ρ), with t of (models − 1) degrees of freedom; the interval
    always includes that of Fisher's Z over all sites.
    """
    clusters: dict[str, np.ndarray] = {}
    for unit in units:
        clusters[unit.cluster] = clusters.get(unit.cluster, np.zeros(3)) + _sums(unit)
    count = len(clusters)
    value = pooled_correlation(units)
    if count < FEWEST_CLUSTERS or not math.isfinite(value):
        return math.nan, math.nan
    sums = np.array([clusters[name] for name in sorted(clusters)])
    n = sum(len(unit.one) - 1 for unit in units) + 1
    steps = n if units[0].ranked else None
    left = np.array([math.atanh(_inside(_ratio(*(sums.sum(0) - left_out)), steps)) for left_out in sums])
    half = t_quantile(count - 1) * math.sqrt((count - 1) / count * float(((left - left.mean()) ** 2).sum()))
    centre = math.atanh(_inside(value, steps))
    fisher = fisher_interval(value, n, ranked=units[0].ranked)
    return min(math.tanh(centre - half), fisher[0]), max(math.tanh(centre + half), fisher[1])


def welch(one: Sequence[float], two: Sequence[float]) -> tuple[float, float, float]:
    """Difference of the means of two groups of models, its jackknife error, and Welch's degrees of freedom.

    Leaving out one model at a time gives the error √(s₁²/n₁ + s₂²/n₂); NaN with fewer than two models in a group.

    >>> welch([1.0, 3.0], [0.0, 2.0])
    (1.0, 1.4142135623730951, 2.0)
    """
    gap = sum(one) / len(one) - sum(two) / len(two)
    if min(len(one), len(two)) < 2:
        return gap, math.nan, math.nan
    shares = [float(np.var(side, ddof=1)) / len(side) for side in (one, two)]
    total = sum(shares)
    below = sum(share**2 / (len(side) - 1) for share, side in zip(shares, (one, two), strict=True))
    return gap, math.sqrt(total), total**2 / below if below else float(len(one) + len(two) - 2)


def pooled_error(one: Sequence[float], two: Sequence[float]) -> tuple[float, float]:
    """The error of a difference of means by the common variance of both groups, and its degrees of freedom.

    >>> pooled_error([1.0, 3.0], [0.0, 2.0])
    (1.4142135623730951, 2.0)
    """
    degrees = len(one) + len(two) - 2
    variance = sum(float(np.var(side, ddof=0)) * len(side) for side in (one, two)) / degrees
    return math.sqrt(variance * (1 / len(one) + 1 / len(two))), float(degrees)
