"""A number with its interval over context folds (`jackknife` makes it)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from anisoscope.results.quantity import jackknife as jackknife


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
