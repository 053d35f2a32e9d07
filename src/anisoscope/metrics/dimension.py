"""Intrinsic dimension and other metrics of neighbourhoods.

Notation: rᵢ distance to the i-th nearest distinct row, μ = r₂/r₁, N rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError, TooFewRows, unknown_name
from anisoscope.metrics.metric import metric
from anisoscope.metrics.neighbourhoods import Neighbours

FEWEST = 32  # distinct rows below which a dimension is not worth a number
_RIGID = ("rotation", "scale", "shift")
_BATCHES = "mean over shuffled batches of 4096 rows in a profile, all rows on an array; exact duplicates removed"


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
    + "; biased low above about 15 at 4096 rows (true 20 gives 17.6, true 50 gives 33.7)"
    + "; per_context=1 takes one row of each context",
    invariant=_RIGID,
    bounds=(0.0, None),
    default=True,
    neighbours=2,
)
def two_nn(neighbours: Neighbours, *, method: str = "slope", keep: float = 0.9, per_context: bool = False) -> float:
    """Dimension of the surface the rows lie on, from the ratio of their two nearest neighbours."""
    if method not in ("slope", "ml"):
        raise unknown_name("method of two_nn", method, ("slope", "ml"))
    if not 0.0 < keep <= 1.0:
        raise AnisoscopeError(f"two_nn has keep {keep}; expected more than 0 and at most 1")
    near = _near(neighbours, 2)
    log_mu = (near[:, 1] / near[:, 0]).log()
    if method == "ml":
        return _quotient(len(log_mu), float(log_mu.sum()))
    log_mu = log_mu.sort().values
    count = len(log_mu)
    kept = min(math.floor(keep * count), count - 1)
    rank = torch.arange(1, kept + 1, dtype=torch.float64) / count
    x, y = log_mu[:kept], -torch.log1p(-rank)
    return _quotient(float(x @ y), float(x @ x))


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
    convention=_BATCHES,
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
    convention=_BATCHES + "; scale = k",
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
    from scipy.optimize import brentq

    total, count = float(log_mu.sum()), len(log_mu)

    def score(dimension: float) -> float:
        inner = float((log_mu / -torch.expm1(-dimension * log_mu)).sum()) if scale > 1 else 0.0
        return count / dimension + (scale - 1) * inner - (2 * scale - 1) * total

    least, most = 1e-6, 1e6
    if not count or not math.isfinite(total) or score(least) * score(most) > 0:
        raise TooFewRows("the nearest rows are all equally far (a lattice, or rounding), so there is no dimension")
    return float(brentq(score, least, most, xtol=1e-10, rtol=1e-12))


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
