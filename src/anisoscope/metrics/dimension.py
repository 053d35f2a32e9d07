"""Intrinsic dimension and other metrics of neighbourhoods.

Notation: rᵢ distance to the i-th nearest distinct row, μ = r₂/r₁, N rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError, TooFewRows, unknown_name
from anisoscope.metrics.engine.calibration import DEFAULT_KEEP, calibrated_dimension, in_table
from anisoscope.metrics.engine.lines import unless
from anisoscope.metrics.engine.metric import metric
from anisoscope.metrics.engine.neighbourhoods import Neighbours

FEWEST = 32  # distinct rows below which a dimension is not worth a number
_NEWTON = 100  # steps at most; five are usual
_RIGID = ("rotation", "scale", "shift")
_neighbouring = partial(metric, Neighbours, invariant=_RIGID, batched=True)
_BATCHES = "mean over shuffled batches of 4096 rows in a profile, all rows on an array; exact duplicates removed"


def _remarks(value: float, rows: int, options: dict[str, Any], graphs: list[Neighbours]) -> str:
    """The bias of TwoNN at this value and number of rows, and a warning where the next scale contradicts it."""
    return "; ".join(filter(None, (_bias_there(value, rows, options), _next_scale(value, graphs))))


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


def _next_scale(value: float, graphs: list[Neighbours]) -> str:
    """A warning where neighbours 2 and 4 give another dimension than neighbours 1 and 2.

    A near-copy of every tenth row is enough to bring TwoNN from 14 down to 0.2, with a narrow interval.
    """
    try:
        wider = [float(gride.function(graph, scale=2)) for graph in graphs]
    except TooFewRows:
        return ""
    other = sum(wider) / len(wider)
    if 0.5 <= value / other <= 2.0:
        return ""
    return f"the next scale (GRIDE, k = 2) gives {other:.3g}: near-copies or noise decide one of the two"


def _near(neighbours: Neighbours, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Distances to the k nearest, the rows that have that many, and how many those are (NaN: too few) by line."""
    near, usable = neighbours.near(k)
    count = usable.sum(-1)

    def why() -> TooFewRows:
        return TooFewRows(
            f"a neighbour estimate needs at least {FEWEST} distinct rows with {k} neighbours each, seen {int(count)}; "
            "give more tokens, or another layer"
        )

    return near, usable, unless(count < FEWEST, count.double(), why)


def _no_dimension() -> TooFewRows:
    return TooFewRows("the nearest rows are all equally far (a lattice, or rounding), so there is no dimension")


def _quotient(above: Tensor | float, below: Tensor) -> Tensor:
    """A dimension, or an error where neighbours lie at equal distances and therefore have none."""
    return unless(~((below > 0.0) & (below < torch.inf)), above / below, _no_dimension)


@_neighbouring(
    title="Intrinsic dimension (TwoNN)",
    formula="slope through 0 of −log(1−F(μ)) on log μ, F(μ₍ᵢ₎) = i/N, first ⌊0.9 N⌋",
    reference="Facco et al. 2017, arXiv:1803.06992",
    convention=_BATCHES
    + "; biased low above about 10: at 4096 rows a flat cloud of 20 dimensions gives 17.4 ± 0.3, one of 50 gives "
    "33.3 ± 0.6; calibrated=1 gives the dimension of the flat (Gaussian) cloud that has this value on average at the "
    "same number of rows, within 15 % of the truth on smooth clouds; per_context=1 takes one row of each context",
    bounds=(0.0, None),
    default=True,
    neighbours=2,
    remark=_remarks,
)
def two_nn(
    neighbours: Neighbours,
    *,
    method: str = "slope",
    keep: float = 0.9,
    per_context: bool = False,
    calibrated: bool = False,
) -> Tensor:
    """Dimension of the surface the rows lie on, from the ratio of their two nearest neighbours."""
    value, count = _two_nn(neighbours, method=method, keep=keep)
    if not calibrated:
        return value
    if keep != DEFAULT_KEEP:
        raise AnisoscopeError(f"two_nn has calibrated=1 with keep {keep}; the table is for keep {DEFAULT_KEEP} alone")
    pairs = zip(value.flatten().tolist(), count.flatten().tolist(), strict=True)
    found = [math.nan if math.isnan(one) else calibrated_dimension(one, int(n), method=method) for one, n in pairs]
    return torch.tensor(found, dtype=torch.float64).reshape(value.shape)


def _two_nn(neighbours: Neighbours, *, method: str, keep: float) -> tuple[Tensor, Tensor]:
    """The estimate as published, and the rows that it was made of, by line."""
    if method not in ("slope", "ml"):
        raise unknown_name("method of two_nn", method, ("slope", "ml"))
    if not 0.0 < keep <= 1.0:
        raise AnisoscopeError(f"two_nn has keep {keep}; expected more than 0 and at most 1")
    found: tuple[Tensor, Tensor] = neighbours.once(
        ("two_nn", method, keep), lambda: _published(neighbours, method=method, keep=keep)
    )
    return found


def _published(neighbours: Neighbours, *, method: str, keep: float) -> tuple[Tensor, Tensor]:
    near, usable, count = _near(neighbours, 2)
    log_mu = (near[..., 1] / near[..., 0]).log()
    if method == "ml":
        return _quotient(count, torch.where(usable, log_mu, 0.0).sum(-1)), count
    log_mu = torch.where(usable, log_mu, torch.inf).sort(-1).values  # rows left out come last
    order = torch.arange(1, log_mu.shape[-1] + 1, dtype=torch.float64, device=log_mu.device)
    kept = order <= torch.minimum((keep * count).floor(), count - 1).unsqueeze(-1)
    x = torch.where(kept, log_mu, 0.0)
    y = torch.where(kept, -torch.log1p(-order / count.unsqueeze(-1)), 0.0)
    return _quotient((x * y).sum(-1), x.square().sum(-1)), count


@_neighbouring(
    title="Intrinsic dimension (Levina–Bickel)",
    formula="[mean over rows of (1/(k−1)) Σ_{j<k} log(r_k/r_j)]⁻¹, averaged over k = 10…20",
    reference="Levina & Bickel 2004; inverses averaged after MacKay & Ghahramani 2005",
    convention=_BATCHES
    + "; biased low above about 8: at 4096 rows a flat cloud of 20 dimensions gives 16.1 ± 0.1, one of 50 gives "
    "29.9 ± 0.1; less spread than TwoNN, more bias (docs/dimension.md)",
    bounds=(0.0, None),
    neighbours=20,
)
def levina_bickel(neighbours: Neighbours, *, smallest: int = 10, largest: int = 20) -> Tensor:
    """Maximum-likelihood dimension from the distances to 10 to 20 neighbours: a wider scale than TwoNN."""
    if not 2 <= smallest <= largest:
        raise AnisoscopeError(f"levina_bickel has k from {smallest} to {largest}; expected 2 ≤ smallest ≤ largest")
    near, usable, count = _near(neighbours, largest)
    logs = (near / near[..., -1:]).log_().masked_fill_(~usable.unsqueeze(-1), 0.0).sum(-2) / count.unsqueeze(-1)
    # the mean of a difference is that of the means; up to k − 1 of them for the k at which they end
    k = torch.arange(smallest, largest + 1, device=logs.device)
    inverse = logs[..., smallest - 1 :] - logs.cumsum(-1)[..., smallest - 2 : -1] / (k - 1)
    values = torch.where((inverse > 0.0) & inverse.isfinite(), 1.0 / inverse, torch.nan).mean(-1)
    return unless(values.isnan(), values, _no_dimension)


@_neighbouring(
    title="Intrinsic dimension (GRIDE)",
    formula="argmax_δ Π δ (μ^δ − 1)^{k−1} / μ^{(2k−1)δ+1}, μ = r₂ₖ/rₖ",
    reference="Denti et al. 2022, arXiv:2104.13832",
    convention=_BATCHES
    + "; scale = k; scale=1 is TwoNN by maximum likelihood; biased low above about 8, more at wider "
    "scales: 4096 "
    "rows a flat cloud of 50 dimensions gives 31.8, 30.2, 28.7 at k = 2, 4, 8 (docs/dimension.md); a dimension that "
    "falls steeply from k = 1 to 8 is noise at the smallest scale",
    bounds=(0.0, None),
    neighbours=4,
)
def gride(neighbours: Neighbours, *, scale: int = 2) -> Tensor:
    """Maximum-likelihood dimension from the neighbours k and 2k: the larger k, the wider the scale it looks at."""
    if scale < 1:
        raise AnisoscopeError(f"gride has scale {scale}; expected 1 or more")
    found: Tensor = neighbours.once(("gride", scale), lambda: _gride(neighbours, scale))
    return found


def _gride(neighbours: Neighbours, scale: int) -> Tensor:
    near, usable, enough = _near(neighbours, 2 * scale)
    log_mu = (near[..., 2 * scale - 1] / near[..., scale - 1]).log()
    spread = usable & (log_mu > 0)
    return _gride_root(torch.where(spread, log_mu, 0.0), torch.where(enough.isnan(), enough, spread.sum(-1)), scale)


def _gride_root(log_mu: Tensor, count: Tensor, scale: int) -> Tensor:
    """The zero of the score N/δ + (k−1) Σ log μ/(1 − μ^−δ) − (2k−1) Σ log μ, which falls in δ, of every line.

    log μ is 0 in the rows that do not count, N = `count` is how many do.
    """
    total = log_mu.sum(-1)
    # E log μ = (1/δ) Σ_{i=k}^{2k−1} 1/i gives the start, which for k = 1 is the answer
    dimension = _quotient(count * sum(1.0 / i for i in range(scale, 2 * scale)), total)
    if scale == 1:
        return dimension
    rows = log_mu.reshape(-1, log_mu.shape[-1])
    apart = rows <= 0
    roots = [_Root(*line) for line in zip(*(x.flatten().tolist() for x in (dimension, count, total)), strict=True)]
    for _ in range(_NEWTON):
        power = (rows * -rows.new_tensor([[root.at] for root in roots])).expm1_()  # μ^−δ − 1
        inner = (rows / power).masked_fill_(apart, 0.0)
        sums = torch.stack([-inner.sum(1), inner.square_().mul_(power.add_(1.0)).sum(1)], 1).tolist()
        moved = [root.move(*line, scale=scale) for root, line in zip(roots, sums, strict=True)]
        if not any(moved):
            break
    return rows.new_tensor([root.at for root in roots]).reshape(dimension.shape)


@dataclass
class _Root:
    """Newton's search in log δ for the zero of one line's score, between the ends that its signs have shown."""

    at: float
    count: float
    total: float
    low: float = 0.0
    high: float = math.inf

    def move(self, inner: float, squares: float, *, scale: int) -> bool:
        """One step, from Σ log μ/(1 − μ^−δ) and Σ of its squares times μ^−δ; whether it was needed."""
        score = self.count / self.at + (scale - 1) * inner - (2 * scale - 1) * self.total
        slope = -self.count / self.at - (scale - 1) * squares * self.at  # in log δ
        if not abs(score) > 1e-12 * abs(slope):
            return False
        self.low, self.high = (self.at, self.high) if score > 0 else (self.low, self.at)
        ahead = self.at * math.exp(max(-1.0, min(1.0, -score / slope)))
        between = self.low < ahead < self.high or not 0 < self.low < self.high < math.inf
        self.at = ahead if between else math.sqrt(self.low * self.high)
        return True


@_neighbouring(
    title="Hubness",
    formula="skewness of N_k(x), the number of rows that have x among their k = 10 nearest",
    reference="Radovanović et al. 2010",
    convention=_BATCHES,
    neighbours=10,
)
def hubness(neighbours: Neighbours, *, k: int = 10) -> Tensor:
    """How unequal rows are as neighbours of others: 0 when all are alike, large when a few hubs are near to all."""
    if k < 1:
        raise AnisoscopeError(f"hubness has k {k}; expected 1 or more")
    _, usable, enough = _near(neighbours, k)
    there = torch.ones_like(usable) if neighbours.there is None else neighbours.there
    # all lines are counted at once: the rows of each have numbers of their own, and what does not count the last one
    first = torch.arange(0, there.numel(), there.shape[-1], device=there.device).view(*there.shape[:-1], 1, 1)
    chosen = torch.where(usable.unsqueeze(-1), neighbours.index[..., :k] + first, there.numel())
    counts = torch.bincount(chosen.flatten(), minlength=there.numel() + 1)[:-1].view(there.shape).double()
    n = there.sum(-1).double()
    gaps = torch.where(there, counts - (counts.sum(-1) / n).unsqueeze(-1), 0.0)
    variance = gaps.square().sum(-1) / n
    skewness = torch.where(variance > 0, gaps.pow(3).sum(-1) / n / variance.pow(1.5), 0.0)
    return torch.where(enough.isnan(), enough, skewness)
