"""Scores of rows, with intervals over context folds: a loss or a hit for every test row.

The interval leaves out one fold of test contexts at a time. It says how far another sample of test contexts might
have moved the number; the repair and the probe stay as they were fitted, so their own chance is not in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anisoscope.metrics.estimate import Estimate, jackknife
from anisoscope.metrics.metric import Metric
from anisoscope.numerics.hashing import FOLDS, fold_of

Bounds = tuple[float | None, float | None]
SHARE: Bounds = (0.0, 1.0)
LOSS: Bounds = (0.0, None)
FREE: Bounds = (None, None)


@dataclass(frozen=True, eq=False)
class Scores:
    """One number for each test row, and the context each belongs to."""

    value: Tensor  # [n] float64, on the host
    key: Tensor  # [n]

    def estimate(self, bounds: Bounds, *, note: str = "", dropped: int = 0) -> Estimate:
        """The mean over rows; replicates in the order of the folds, NaN for a fold without contexts.

        >>> Scores(torch.ones(100), torch.arange(100)).estimate((0.0, 1.0)).value
        1.0
        """
        n, fold = len(self.value), fold_of(self.key)
        if not n:
            return Estimate(math.nan, note="no test row", dropped=dropped)
        sums = torch.zeros(FOLDS, dtype=torch.float64).index_add_(0, fold, self.value.double())
        counts = torch.bincount(fold, minlength=FOLDS).double()
        total, size = float(sums.sum()), float(counts.sum())
        left = [
            float((total - s) / (size - c)) if c and size > c else math.nan
            for s, c in zip(sums.tolist(), counts.tolist(), strict=True)
        ]
        low, high = jackknife(total / size, left, bounds=bounds)
        found = int(self.key.unique().numel())
        return Estimate(
            total / size, low, high, n=n, contexts=found, note=note, dropped=dropped, replicates=tuple(left)
        )

    def minus(self, other: Scores) -> Scores:
        """Row by row: both must score the same rows."""
        return Scores(self.value - other.value, self.key)


def metric_estimate(metric: Metric, x: Tensor, key: Tensor, *, seed: int = 0) -> Estimate:
    """A geometry metric of rows, its replicates in the order of the folds."""
    from dataclasses import replace

    from anisoscope.errors import AnisoscopeError

    try:
        found = metric(x, contexts=key, seed=seed)
    except AnisoscopeError as error:  # too few distinct rows, say: a row without a number and with the reason
        return Estimate(math.nan, n=len(x), contexts=int(key.unique().numel()), note=str(error))
    present = sorted(set(fold_of(key).tolist()))
    return replace(found, replicates=aligned(found.replicates, present))


def aligned(replicates: Sequence[float], folds: Sequence[int]) -> tuple[float, ...]:
    """Leave-one-out values of the folds that are there, at the places of all folds.

    >>> aligned([1.0, 2.0], [0, 3])[:4]
    (1.0, nan, nan, 2.0)
    """
    out = [math.nan] * FOLDS
    if len(replicates) == len(folds):
        for fold, value in zip(folds, replicates, strict=True):
            out[fold] = value
    return tuple(out)
