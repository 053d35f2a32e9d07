"""Estimates from independent repetitions of a simulation.

Repetitions share nothing but the manifold, so Student's interval of their mean is the honest one; a percentile
bootstrap of a dozen values would cover the truth too rarely.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from anisoscope.metrics.estimate import Estimate


def over_replicates(values: Sequence[float], *, n: int = 0, log: bool = False, note: str = "") -> Estimate:
    """Mean and 95 % interval over repetitions, on the log scale (a geometric mean) for ratios and variances.

    >>> over_replicates([1.0, 2.0, 3.0], n=3)
    Estimate(2 [-0.4841, 4.484], n=3, sd=1)
    """
    from scipy.stats import t

    x = np.asarray(values, dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        x = np.log(x) if log else x
    if len(x) < 2 or not np.isfinite(x).all():
        return Estimate(math.nan, n=n, contexts=len(x), note=note or "not finite in every repetition")
    mean, sd = float(x.mean()), float(x.std(ddof=1))
    half = float(t.ppf(0.975, len(x) - 1)) * sd / math.sqrt(len(x))
    left_out = tuple((x.sum() - x) / (len(x) - 1))
    undo = math.exp if log else float
    return Estimate(
        undo(mean),
        undo(mean - half),
        undo(mean + half),
        n=n,
        sd=float(np.std(np.exp(x) if log else x, ddof=1)),
        contexts=len(x),
        note=note,
        replicates=tuple(undo(v) for v in left_out),
    )


def p_beyond(values: Sequence[float], bound: float) -> float:
    """One-sided p that the mean of the repetitions lies above the bound, by Student's t.

    >>> round(p_beyond([1.0, 2.0, 3.0], 2.0), 9)
    0.5
    """
    from scipy.stats import t

    x = np.asarray(values, dtype=float)
    if len(x) < 2 or not np.isfinite(x).all():
        return math.nan
    error = x.std(ddof=1) / math.sqrt(len(x))
    if error == 0:
        return 0.0 if x.mean() > bound else 1.0
    return float(t.sf((x.mean() - bound) / error, len(x) - 1))
