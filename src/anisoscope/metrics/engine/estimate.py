"""A number with its interval, and the jackknife over context folds that gives it.

Rows of one context are dependent, so an interval never resamples rows: whole folds of contexts are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

# two-sided 95 % quantiles of Student's t for 1, 2, … degrees of freedom: FOLDS is 8, so 7 is the usual one
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365)


@dataclass(frozen=True)
class Estimate:
    """A value, its 95 % interval, and what it was computed from.

    >>> Estimate(0.5, 0.4, 0.6, n=100)
    Estimate(0.5 [0.4, 0.6], n=100)
    """

    value: float
    low: float = math.nan
    high: float = math.nan
    n: int = 0
    sd: float = math.nan  # over the batches of a batched estimator
    contexts: int = 0
    dropped: int = 0
    note: str = ""
    replicates: tuple[float, ...] = field(default=(), repr=False)  # leave-one-fold-out values

    def __float__(self) -> float:
        return self.value

    def __repr__(self) -> str:
        extra = f", sd={self.sd:.3g}" if not math.isnan(self.sd) else ""
        extra += f", dropped={self.dropped}" if self.dropped else ""
        extra += f", note={self.note!r}" if self.note else ""
        return f"Estimate({self.value:.6g} [{self.low:.4g}, {self.high:.4g}], n={self.n}{extra})"


def jackknife(
    value: float, replicates: Sequence[float], *, bounds: tuple[float | None, float | None]
) -> tuple[float, float]:
    """A 95 % interval from leave-one-fold-out values: value ± t·√((G−1)/G Σ(θ₍ⱼ₎−θ̄)²), cut to the possible range.

    Efron and Stein (1981). With fewer than two folds there is no interval (NaN).

    >>> jackknife(2.0, [2.0, 2.0, 2.0], bounds=(None, None))
    (2.0, 2.0)
    """
    finite = [r for r in replicates if math.isfinite(r)]
    folds = len(finite)
    if folds < 2 or not math.isfinite(value):
        return math.nan, math.nan
    centre = sum(finite) / folds
    error = math.sqrt((folds - 1) / folds * sum((r - centre) ** 2 for r in finite))
    half = _T95[min(folds - 1, len(_T95)) - 1] * error
    low, high = bounds
    lower = value - half if low is None else max(value - half, min(low, value))
    upper = value + half if high is None else min(value + half, max(high, value))
    return lower, upper
