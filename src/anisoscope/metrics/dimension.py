"""Intrinsic dimension and other metrics of neighbourhoods.

Notation: rᵢ distance to the i-th nearest distinct row, μ = r₂/r₁, N rows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError, TooFewRows, unknown_name
from anisoscope.metrics.calibration import DEFAULT_KEEP, calibrated_dimension, in_table
from anisoscope.metrics.metric import metric
from anisoscope.metrics.neighbourhoods import Neighbours

FEWEST = 32  # distinct rows below which a dimension is not worth a number
_NEWTON = 100  # steps at most; five are usual
_RIGID = ("rotation", "scale", "shift")
_BATCHES = "mean over shuffled batches of 4096 rows in a profile, all rows on an array; exact duplicates removed"


def _bias_there(value: float, rows: int, options: dict[str, Any]) -> str:
    """How far TwoNN is off at this value and number of rows, in words."""
    if options.get("keep", DEFAULT_KEEP) != DEFAULT_KEEP:
        return ""
    if options.get("calibrated"):
        return "" if in_table(value, rows) else "outside the table of known clouds: its nearest edge was taken"
    true = calibrated_dimension(value, rows, method=options.get("method", "slope"))
    if not in_table(true, rows):
        return "bias not known: outside the table of known clouds"
    return f"bias about {round(100 * (value / true - 1)):+d} % at this n"


def _near(neighbours: Neighbours, k: int) -> Tensor:
    near = neighbours.first(k)
    if len(near) < FEWEST:
        raise TooFewRows(
            f"a neighbour estimate needs at least {FEWEST} distinct rows with {k} neighbours each, seen {len(near)}; "
            "give more tokens, or another layer"
        )
    return near


@metric(
    Neighbours,
    title="Intrinsic dimension (TwoNN)",
    formula="slope through 0 of −log(1−F(μ)) on log μ, F(μ₍ᵢ₎) = i/N, first ⌊0.9 N⌋",
    reference="Facco et al. 2017, arXiv:1803.06992",
    convention=_BATCHES
    + "; biased low above about 10: at 4096 rows a flat cloud of 20 dimensions gives 17.4 ± 0.3, one of 50 gives "
    "33.3 ± 0.6; calibrated=1 gives the dimension of the flat (Gaussian) cloud that has this value on average at the "
    "same number of rows, within 15 % of the truth on smooth clouds; per_context=1 takes one row of each context",
    invariant=_RIGID,
    bounds=(0.0, None),
    default=True,
    neighbours=2,
    remark=_bias_there,
)
def two_nn(
    neighbours: Neighbours,
    *,
    method: str = "slope",
    keep: float = 0.9,
    per_context: bool = False,
    calibrated: bool = False,
) -> float:
    """Dimension of the surface the rows lie on, from the ratio of their two nearest neighbours."""
    value, count = _two_nn(neighbours, method=method, keep=keep)
    if not calibrated:
        return value
    if keep != DEFAULT_KEEP:
        raise AnisoscopeError(f"two_nn has calibrated=1 with keep {keep}; the table is for keep {DEFAULT_KEEP} alone")
    return calibrated_dimension(value, count, method=method)


def _two_nn(neighbours: Neighbours, *, method: str, keep: float) -> tuple[float, int]:
    """The estimate as published, and the rows that it was made of."""
    if method not in ("slope", "ml"):
        raise unknown_name("method of two_nn", method, ("slope", "ml"))
    if not 0.0 < keep <= 1.0:
        raise AnisoscopeError(f"two_nn has keep {keep}; expected more than 0 and at most 1")
    near = _near(neighbours, 2)
    log_mu = (near[:, 1] / near[:, 0]).log()
    if method == "ml":
        return _quotient(len(log_mu), float(log_mu.sum())), len(log_mu)
    log_mu = log_mu.sort().values
    count = len(log_mu)
    kept = min(math.floor(keep * count), count - 1)
    rank = torch.arange(1, kept + 1, dtype=torch.float64) / count
    x, y = log_mu[:kept], -torch.log1p(-rank)
    return _quotient(float(x @ y), float(x @ x)), count


def _quotient(above: float, below: float) -> float:
    """A dimension, or an error where neighbours lie at equal distances and therefore have none."""
    if not 0.0 < below < math.inf:
        raise TooFewRows("the nearest rows are all equally far (a lattice, or rounding), so there is no dimension")
    return above / below


@metric(
    Neighbours,
    title="Intrinsic dimension (Levina–Bickel)",
    formula="[mean over rows of (1/(k−1)) Σ_{j<k} log(r_k/r_j)]⁻¹, averaged over k = 10…20",
    reference="Levina & Bickel 2004; inverses averaged after MacKay & Ghahramani 2005",
    convention=_BATCHES
    + "; biased low above about 8: at 4096 rows a flat cloud of 20 dimensions gives 16.1 ± 0.1, one of 50 gives "
    "29.9 ± 0.1; less spread than TwoNN, more bias (docs/dimension.md)",
    invariant=_RIGID,
    bounds=(0.0, None),
    neighbours=20,
)
def levina_bickel(neighbours: Neighbours, *, smallest: int = 10, largest: int = 20) -> float:
    """Maximum-likelihood dimension from the distances to 10 to 20 neighbours: a wider scale than TwoNN."""
    if not 2 <= smallest <= largest:
        raise AnisoscopeError(f"levina_bickel has k from {smallest} to {largest}; expected 2 ≤ smallest ≤ largest")
    logs = _near(neighbours, largest).log()
    values = []
    for k in range(smallest, largest + 1):
        inverse = (logs[:, k - 1 : k] - logs[:, : k - 1]).sum(1) / (k - 1)
        values.append(_quotient(1.0, float(inverse.mean())))
    return sum(values) / len(values)


@metric(
    Neighbours,
    title="Intrinsic dimension (GRIDE)",
    formula="argmax_δ Π δ (μ^δ − 1)^{k−1} / μ^{(2k−1)δ+1}, μ = r₂ₖ/rₖ",
    reference="Denti et al. 2022, arXiv:2104.13832",
    convention=_BATCHES
    + "; scale = k; scale=1 is TwoNN by maximum likelihood; biased low above about 8, more at wider "
    "scales: 4096 "
    "rows a flat cloud of 50 dimensions gives 31.8, 30.2, 28.7 at k = 2, 4, 8 (docs/dimension.md); a dimension that "
    "falls steeply from k = 1 to 8 is noise at the smallest scale",
    invariant=_RIGID,
    bounds=(0.0, None),
    neighbours=4,
)
def gride(neighbours: Neighbours, *, scale: int = 2) -> float:
    """Maximum-likelihood dimension from the neighbours k and 2k: the larger k, the wider the scale it looks at."""
    if scale < 1:
        raise AnisoscopeError(f"gride has scale {scale}; expected 1 or more")
    near = _near(neighbours, 2 * scale)
    log_mu = (near[:, 2 * scale - 1] / near[:, scale - 1]).log()
    log_mu = log_mu[log_mu > 0]
    return _gride_root(log_mu, scale)


def _gride_root(log_mu: Tensor, scale: int) -> float:
    """The zero of the score N/δ + (k−1) Σ log μ/(1 − μ^−δ) − (2k−1) Σ log μ, which falls in δ."""
    total, count = float(log_mu.sum()), len(log_mu)
    if not count or not 0.0 < total < math.inf:
        raise TooFewRows("the nearest rows are all equally far (a lattice, or rounding), so there is no dimension")
    # E log μ = (1/δ) Σ_{i=k}^{2k−1} 1/i gives the start, which for k = 1 is the answer
    dimension = count * sum(1.0 / i for i in range(scale, 2 * scale)) / total
    low, high = 0.0, math.inf
    for _ in range(_NEWTON if scale > 1 else 0):
        inner = log_mu / -torch.expm1(-dimension * log_mu)
        score = count / dimension + (scale - 1) * float(inner.sum()) - (2 * scale - 1) * total
        slope = -count / dimension**2 - (scale - 1) * float((inner.square() * torch.exp(-dimension * log_mu)).sum())
        low, high = (dimension, high) if score > 0 else (low, dimension)
        # Newton's step in log δ, unless it leaves the interval that the signs have shown
        ahead = dimension * math.exp(max(-1.0, min(1.0, -score / (slope * dimension))))
        ahead = ahead if low < ahead < high else math.sqrt(low * high) if 0 < low < high < math.inf else ahead
        if abs(ahead - dimension) <= 1e-12 * dimension:
            break
        dimension = ahead
    return dimension


@metric(
    Neighbours,
    title="Hubness",
    formula="skewness of N_k(x), the number of rows that have x among their k = 10 nearest",
    reference="Radovanović et al. 2010",
    convention=_BATCHES,
    invariant=_RIGID,
    neighbours=10,
)
def hubness(neighbours: Neighbours, *, k: int = 10) -> float:
    """How unequal rows are as neighbours of others: 0 when all are alike, large when a few hubs are near to all."""
    if k < 1:
        raise AnisoscopeError(f"hubness has k {k}; expected 1 or more")
    usable = len(_near(neighbours, k))
    chosen = neighbours.index[:, :k][neighbours.distance[:, k - 1].isfinite()]
    counts = torch.bincount(chosen.flatten(), minlength=len(neighbours)).double()
    spread = counts.std(correction=0)
    if usable == 0 or float(spread) == 0.0:
        return 0.0
    return float(((counts - counts.mean()) / spread).pow(3).mean())
