"""A number with its leave-one-fold-out values, so that means and differences of such numbers have valid intervals.

Notation
    θ      a number measured on all contexts
    θ₍ⱼ₎   the same without context fold j, j = 1 … 8; NaN where fold j holds no context of θ
    G      number of live folds: those whose θ₍ⱼ₎ is a number, in all terms of a combined number
    mⱼ     contexts of fold j, m their number in all live folds
    rⱼ     what is kept as the leave-one-fold-out value: θ + √((m/mⱼ − 1)/(G − 1)) (θ₍ⱼ₎ − θ), which is θ₍ⱼ₎ where folds
           are equal
Folds are made by the hash of a context, which is known when it arrives, so they are not of equal size. The jackknife
for unequal groups (Busing, Meijer and van der Leeden 1999) has the variance (1/G) Σ (m/mⱼ − 1) (θ₍ⱼ₎ − θ)²; on rⱼ the
plain formula (G−1)/G Σ (rⱼ − r̄)² gives it (r̄ in place of θ costs under 1 % of it at 16 contexts). So every reader of
the kept values uses the plain formula, and below θ₍ⱼ₎ means rⱼ. The factors depend on the contexts alone.
The folds are the same contexts at every layer, step and proxy of a run. So the mean over layers of θ has the
leave-one-fold-out values mean(θ₍ⱼ₎), and a difference θ − φ has θ₍ⱼ₎ − φ₍ⱼ₎: whatever the dependence between layers is,
the jackknife of the combined number contains it. A fold is live for a combined number where it is for all its terms;
the interval has G − 1 degrees of freedom, and there is none with fewer than three live folds.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

Bounds = tuple[float | None, float | None]  # possible values; None = no end
FEWEST_FOLDS = 3  # minimum number of live folds for an interval
FEWEST_SEEDS = 3  # needed for a statement that generalises beyond one run
THIN = (math.nan,)  # the folds of a number without live ones
# two-sided 95 % quantiles of Student's t for 1, 2, … degrees of freedom: FOLDS is 8, so 7 is the usual one
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365)


def jackknife(value: float, replicates: Sequence[float], *, bounds: Bounds) -> tuple[float, float]:
    """A 95 % interval from leave-one-fold-out values: value ± t·√((G−1)/G Σ(θ₍ⱼ₎−θ̄)²), cut to the possible range.

    Efron and Stein (1981). With fewer than two folds there is no interval (NaN).

    >>> jackknife(2.0, [2.0, 2.0, 2.0], bounds=(None, None))
    (2.0, 2.0)
    """
    finite = [r for r in replicates if math.isfinite(r)]
    if len(finite) < 2 or not math.isfinite(value):
        return math.nan, math.nan
    return _within(value, _T95[min(len(finite) - 1, len(_T95)) - 1] * _error(finite), bounds)


def jackknives(values: np.ndarray, replicates: np.ndarray, *, bounds: Bounds) -> tuple[np.ndarray, np.ndarray]:
    """`jackknife` of many values [...] with their leave-one-fold-out values [..., G].

    >>> [end.tolist() for end in jackknives(np.array([2.0]), np.array([[2.0, 2.0, np.nan]]), bounds=(None, None))]
    [[2.0], [2.0]]
    """
    live = np.isfinite(replicates)
    count = live.sum(-1)
    folds, number = np.where(live, replicates, 0.0), np.maximum(count, 1)
    centre = _total(np.moveaxis(folds, -1, 0)) / number
    squares = np.where(live, (folds - np.expand_dims(centre, -1)) ** 2, 0.0)
    error = np.sqrt((number - 1) / number * _total(np.moveaxis(squares, -1, 0)))
    half = np.array((math.nan, math.nan, *_T95))[np.minimum(count, len(_T95) + 1)] * error
    values, (low, high) = np.where(np.isfinite(values), values, math.nan), bounds
    lower, upper = values - half, values + half
    lower = lower if low is None else np.maximum(lower, np.minimum(low, values))
    return lower, upper if high is None else np.minimum(upper, np.maximum(high, values))


def as_equal_folds(value: float, left_out: Sequence[float], sizes: Sequence[int]) -> list[float]:
    """rⱼ: leave-one-fold-out values of folds with these numbers of contexts, as if the folds were equal.

    >>> as_equal_folds(2.0, [2.5, 1.0], [3, 3])
    [2.5, 1.0]
    >>> as_equal_folds(0.0, [1.0, 1.0, 1.0], [9, 1, 1])[1]  # what a small fold changes counts for more
    2.23606797749979
    """
    pairs = list(zip(left_out, sizes, strict=True))
    live = [size for left, size in pairs if size > 0 and math.isfinite(left)]
    if len(live) < 2:
        return list(left_out)

    def scaled(left: float, size: int) -> float:
        if not size > 0 or not math.isfinite(left):
            return left
        return value + math.sqrt((sum(live) / size - 1) / (len(live) - 1)) * (left - value)

    return [scaled(left, size) for left, size in pairs]


def _within(value: float, half: float, bounds: Bounds) -> tuple[float, float]:
    """The ends of value ± half, cut to the possible range."""
    low, high = bounds
    lower = value - half if low is None else max(value - half, min(low, value))
    upper = value + half if high is None else min(value + half, max(high, value))
    return lower, upper


def _error(folds: Sequence[float]) -> float:
    """The jackknife's standard error."""
    n, centre = len(folds), _total(folds) / len(folds)
    return math.sqrt((n - 1) / n * _total((fold - centre) ** 2 for fold in folds))


def _total(terms: Iterable[Any]) -> Any:
    """The plain sum in order, so that one interval and many have the same digits in every version of Python."""
    return reduce(operator.add, terms)


@dataclass(frozen=True)
class Quantity:
    """A value with its leave-one-fold-out values, or, where there are none, the half-width of its 95 % interval.

    >>> (Quantity(3.0, (3.0, 3.1, 2.9)) - Quantity.constant(1.0)).folds
    (2.0, 2.1, 1.9)
    """

    value: float
    folds: tuple[float, ...] = ()
    half: float = math.nan

    @classmethod
    def constant(cls, value: float) -> Quantity:
        """A number without sampling error."""
        return cls(value, half=0.0)

    @property
    def fixed(self) -> bool:
        return not self.folds and self.half == 0.0

    @property
    def live(self) -> tuple[float, ...]:
        """The leave-one-fold-out values of folds that hold contexts."""
        return tuple([fold for fold in self.folds if math.isfinite(fold)])

    @property
    def thin(self) -> bool:
        """Whether too few folds hold contexts for an interval.

        >>> Quantity(1.0, (1.1, 0.9, math.nan)).thin
        True
        """
        return bool(self.folds) and len(self.live) < FEWEST_FOLDS

    def interval(self) -> tuple[float, float]:
        """The 95 % interval; NaN where too few folds are live, or neither folds nor a half-width are known."""
        if self.thin:
            return math.nan, math.nan
        if self.folds:
            return jackknife(self.value, self.live, bounds=(None, None))
        return self.value - self.half, self.value + self.half

    def record(self) -> dict[str, float]:
        """Value and interval for a report."""
        low, high = self.interval()
        return {"value": self.value, "low": low, "high": high}

    def unpaired(self) -> Quantity:
        """The same without its folds, for combination with a number measured on other contexts."""
        low, high = self.interval()
        return self if self.thin else Quantity(self.value, half=(high - low) / 2)

    def interval_among(self, count: int) -> tuple[float, float]:
        """The 95 % interval when it must hold for `count` such numbers at once.

        >>> Quantity(0.0, half=1.0).interval_among(1)
        (-1.0, 1.0)
        """
        low, high = self.interval()
        if not math.isfinite(low) or count < 2:
            return low, high
        degrees = len(self.live) - 1 if self.folds else math.inf  # without folds the half-width is of a normal interval
        wider = t_quantile(degrees, among(count)) / t_quantile(degrees)
        return self.value - wider * (self.value - low), self.value + wider * (high - self.value)

    def __sub__(self, other: Quantity) -> Quantity:
        return combine([self, other], lambda values: values[0] - values[1])

    def __truediv__(self, number: float) -> Quantity:
        return Quantity(self.value / number, tuple([f / number for f in self.folds]), self.half / abs(number))

    def __neg__(self) -> Quantity:
        return self / -1.0

    def over(self, other: Quantity) -> Quantity:
        """The ratio of two numbers.

        >>> Quantity(6.0, (6.0, 8.0)).over(Quantity(2.0, (2.0, 4.0))).folds
        (3.0, 2.0)
        """
        return combine([self, other], lambda values: values[0] / values[1] if values[1] else math.nan)


def halved(quantity: Quantity, half: int) -> Quantity:
    """The number on one half of the folds (1: the first, 2: the second), from its pseudo-values.

    With θ₍ⱼ₎ over G folds, z₍ⱼ₎ = Gθ − (G−1)θ₍ⱼ₎ is what fold j alone gives, exactly for means over folds of equal size
    and to first order for smooth functions of them, such as a ratio of sums (Tukey 1958; Efron and Stein 1981). The
    half's number is the mean of its z₍ⱼ₎, and leaving one of them out gives its interval, with G/2 − 1 degrees of
    freedom. Ranks, maxima and neighbours are not smooth: this must not be used for them. Without folds the number stays
    as it is.

    >>> one = Quantity(4.5, tuple((36 - j) / 7 for j in range(1, 9)))  # the mean of 1, 2, … 8
    >>> round(halved(one, 1).value, 9), round(halved(one, 2).value, 9)
    (2.5, 6.5)
    """
    count = len(quantity.folds)
    if count < 2:
        return quantity
    middle = (count + 1) // 2
    live = len(quantity.live)
    chosen = quantity.folds[:middle] if half == 1 else quantity.folds[middle:]
    alone = [live * quantity.value - (live - 1) * fold for fold in chosen if math.isfinite(fold)]
    if len(alone) < FEWEST_FOLDS:
        return Quantity(sum(alone) / len(alone) if alone else math.nan, THIN)
    total = sum(alone)
    return Quantity(total / len(alone), tuple([(total - one) / (len(alone) - 1) for one in alone]))


def combine(parts: Sequence[Quantity], function: Callable[[Sequence[float]], float]) -> Quantity:
    """A function of several numbers, fold by fold where they all have the same folds.

    Without common folds the half-widths are carried through the slopes of the function and added as squares, which is
    safe for a difference of numbers that rise and fall together.
    """
    value = function([p.value for p in parts])
    moving = [p for p in parts if not p.fixed]
    if not moving:
        return Quantity.constant(value)
    count = len(moving[0].folds)
    if count and all(len(p.folds) == count for p in moving):
        rows = zip(*((p.value,) * count if p.fixed else p.folds for p in parts), strict=True)
        return Quantity(value, tuple([function(row) for row in rows]))
    if any(p.thin for p in moving):
        return Quantity(value, THIN)
    values, changes = [p.value for p in parts], []
    for i, (low, high) in enumerate(part.interval() for part in parts):
        changes.append(function([*values[:i], values[i] + (high - low) / 2, *values[i + 1 :]]) - value)
    return Quantity(value, half=math.sqrt(sum(change**2 for change in changes)))


def combine_folds(parts: Sequence[Quantity], function: Callable[[Sequence[float]], float]) -> Quantity:
    """As `combine`, for ranks and medians, through which no half-width can be carried: no interval without folds."""
    counts = {len(part.folds) for part in parts}
    if len(counts) == 1 and 0 not in counts:
        return combine(parts, function)
    return Quantity(function([part.value for part in parts]))


def relative_fall(before: Quantity, after: Quantity) -> Quantity:
    """(before − after) / before.

    >>> relative_fall(Quantity(4.0, (4.0, 5.0)), Quantity(3.0, (3.0, 3.0))).folds
    (0.25, 0.4)
    """
    return combine([before, after], lambda values: (values[0] - values[1]) / values[0] if values[0] else math.nan)


def mean(parts: Sequence[Quantity]) -> Quantity:
    """The mean of numbers of one run; without common folds its half-width is the mean of theirs.

    Layers and steps of one run are not independent: averaging half-widths is right if they move together and too wide
    otherwise.

    >>> mean([Quantity(1.0, (1.0, 1.2)), Quantity(3.0, (3.0, 3.4))]).value
    2.0
    """
    if not parts:
        return Quantity(math.nan)
    moving = [p for p in parts if not p.fixed]
    if all(p.folds and len(p.folds) == len(moving[0].folds) for p in moving):
        return combine(parts, lambda values: sum(values) / len(values))
    centre = sum(p.value for p in parts) / len(parts)
    if any(p.thin for p in moving):
        return Quantity(centre, THIN)
    halves = [(high - low) / 2 for low, high in (p.interval() for p in parts)]
    return Quantity(centre, half=sum(halves) / len(halves))


def among(count: int) -> float:
    """The quantile level of an interval's upper end if `count` intervals must hold at once (Bonferroni).

    >>> among(1), among(5)
    (0.975, 0.995)
    """
    return 1 - 0.025 / count


def t_quantile(degrees: float, level: float = 0.975) -> float:
    """The quantile of Student's t.

    >>> round(t_quantile(7), 3)
    2.365
    """
    from scipy.special import stdtrit

    return float(stdtrit(degrees, level))


def t_tail(value: float, error: float, *, degrees: float) -> float:
    """P(T ≥ value / error) for Student's t.

    >>> t_tail(0.0, 1.0, degrees=7)
    0.5
    """
    from scipy.special import stdtr

    if error == 0:
        return 0.0 if value > 0 else 1.0
    return float(stdtr(degrees, -value / error))


def t_interval(values: Sequence[float], *, looks: int = 1) -> tuple[float, float]:
    """Half-width of the 95 % t interval of the mean (simultaneous for `looks` means), and the one-sided p of mean ≤ 0.

    >>> half, p = t_interval([1.0, 2.0, 3.0])
    >>> round(half, 3), round(p, 4)
    (2.484, 0.0371)
    """
    n = len(values)
    centre = sum(values) / n
    error = math.sqrt(sum((v - centre) ** 2 for v in values) / (n - 1) / n)
    return t_quantile(n - 1, among(looks)) * error, t_tail(centre, error, degrees=n - 1)


class Mark(NamedTuple):
    """A value with its interval; NaN without one."""

    value: float
    low: float = math.nan
    high: float = math.nan


def mean_of(values: Iterable[float | None]) -> float:
    """The mean of the finite values; NaN if there is none.

    >>> mean_of([1.0, None, 2.0])
    1.5
    """
    known = [value for value in values if value is not None and math.isfinite(value)]
    return fmean(known) if known else math.nan


def over_seeds(
    values: Sequence[float], *, bounds: Bounds = (None, None), widen: float = 1.0, fewest: int = FEWEST_SEEDS
) -> Mark | None:
    """Mean and Student's 95 % interval over seeds, cut to `bounds`; no interval with fewer than `fewest` seeds.

    >>> over_seeds([2.0]).value, over_seeds([])
    (2.0, None)
    >>> over_seeds([0.9, 1.0, 1.0], bounds=(0.0, 1.0)).high
    1.0
    """
    if not values or not np.isfinite(values).all():
        return None
    centre = sum(values) / len(values)
    half = t_interval(values)[0] * widen if len(values) >= fewest else math.nan
    return Mark(centre, *_within(centre, half, bounds))


def share_by_chance(chance: float, rank: int) -> float:
    """The gradient share of a proxy unrelated to the gradients, (r/d)² (r + 1)/r, from chance = r/d."""
    return chance * chance * (rank + 1) / rank


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1; ties share their mean.

    >>> ranks(np.array([3.0, 1.0, 3.0])).tolist()
    [2.5, 1.0, 2.5]
    """
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[places]


def correlate(one: Sequence[float] | np.ndarray, two: Sequence[float] | np.ndarray, method: str) -> float:
    """Pearson's or Spearman's correlation; NaN where a side does not vary or is not finite.

    >>> correlate([1, 2, 3], [1, 8, 27], "spearman"), round(correlate([1, 2, 3, 4], [1, 3, 2, 4], "pearson"), 3)
    (1.0, 0.8)
    """
    sides = [np.asarray(values, dtype=float) for values in (one, two)]
    if any(len(side) < 2 or not np.isfinite(side).all() or np.ptp(side) == 0 for side in sides):
        return math.nan
    x, y = (side - side.mean() for side in (map(ranks, sides) if method == "spearman" else sides))
    below = math.sqrt(float((x * x).sum() * (y * y).sum()))
    return float(np.clip((x * y).sum() / below, -1.0, 1.0)) if below else math.nan


def refuse_infinite(columns: dict[str, list[Any]]) -> None:
    """Turn infinite values of a table's columns into NaN with a reason: they are no number to stand behind."""
    for at, value in enumerate(columns["value"]):
        if isinstance(value, float) and math.isinf(value):
            columns["value"][at] = math.nan
            columns["note"][at] = "; ".join(filter(None, ("infinite, so no number", columns["note"][at])))
