"""Intrinsic dimension and other metrics of neighbourhoods, and their expected values at a known dimension.

Notation: rᵢ distance to the i-th nearest distinct row, μ = r₂/r₁, N rows; d the true dimension, n the rows of a known
cloud, E the mean of the estimate, b = E − d its bias. The reference cloud is flat: independent Gaussian rows.
calibration.json, which benchmarks/calibrate_dimension.py makes, has means and standard deviations over many clouds, one
line for each dimension, one column for each number of rows. Between its cells log E is taken to be linear in log d and
in log n.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import json
import math
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError, TooFewRows, unknown_name
from anisoscope.metrics.engine.folds import Neighbours, once, unless
from anisoscope.metrics.engine.metric import metric

FEWEST = 32  # minimum number of distinct rows for an estimate
_NEWTON = 100  # maximum number of Newton steps; five are usual
DEFAULT_KEEP = 0.9
DIMENSIONS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 18, 22, 27, 33, 40, 50, 60, 75, 100, 140, 200)
SIZES = (256, 1024, 4096, 16_384, 65_536)
ESTIMATORS = ("two_nn", "two_nn:method=ml", "levina_bickel", "gride:scale=2", "gride:scale=4", "gride:scale=8")
SHAPE_ERROR = 0.08
_WELL_DRAWN = 3  # first sizes of the table, for which it has many clouds
_SAME = {"gride": "gride:scale=2", "gride:scale=1": "two_nn:method=ml"}  # the same formula under another name
_RIGID = ("rotation", "scale", "shift")
_neighbouring = partial(metric, Neighbours, invariant=_RIGID, batched=True)
_dimension = partial(_neighbouring, bounds=(0.0, None))
_NO_DIMENSION = "the nearest rows are all equally far (a lattice, or rounding), so there is no dimension"
_BATCHES = "mean over shuffled batches of 4096 rows in a profile, all rows on an array; exact duplicates removed"


def expected_dimension(dimension: float, n: int, *, estimator: str = "two_nn") -> float:
    """E: the mean of an estimator over flat clouds of n rows and this dimension.

    >>> round(expected_dimension(20, 4096)), round(expected_dimension(50, 4096))
    (17, 33)
    """
    _check(dimension, n)
    means = _means(n, estimator)
    # below dimension 1, where the table begins, edges do not matter and E/d is constant
    inside = min(max(dimension, DIMENSIONS[0]), DIMENSIONS[-1])
    ratio = np.interp(np.log(inside), np.log(DIMENSIONS), np.log(means / DIMENSIONS))
    return float(dimension * np.exp(ratio))


def two_nn_bias(dimension: float, n: int, *, method: str = "slope") -> float:
    """b = E − d of TwoNN at a true dimension and a number of rows.

    >>> -18 < two_nn_bias(50, 4096) < -15
    True
    """
    return expected_dimension(dimension, n, estimator=_of_method(method)) - dimension


def dimension_spread(dimension: float, n: int, *, estimator: str = "two_nn") -> float:
    """The standard deviation of an estimate between flat clouds of n independent rows.

    >>> 0.1 < dimension_spread(20, 4096) < 0.5
    True
    """
    expected = expected_dimension(dimension, n, estimator=estimator)
    shares = (_columns("sd", estimator) / _columns("mean", estimator))[:, :_WELL_DRAWN]
    # the relative spread is c/√n, with c pooled over the sizes for which the table has many clouds
    pooled = np.sqrt((np.square(shares) * SIZES[:_WELL_DRAWN]).mean(1))
    return float(np.interp(np.log(dimension), np.log(DIMENSIONS), pooled) / np.sqrt(n) * expected)


def stated_error(dimension: float, n: int, *, estimator: str = "two_nn") -> float:
    """The tolerance |estimate − E| on a smooth cloud, flat or gently curved: 8 % of E plus three standard deviations.

    The 8 % allow for edges, in which closed surfaces and Gaussian tails differ; a cloud with hard edges (a cube) may
    lie 15 % lower.
    """
    expected = expected_dimension(dimension, n, estimator=estimator)
    return SHAPE_ERROR * expected + 3.0 * dimension_spread(dimension, n, estimator=estimator)


def calibrated_dimension(value: float, n: int, *, method: str = "slope") -> float:
    """The dimension of flat clouds of n rows whose mean TwoNN is `value`, at most the largest of the table.

    >>> round(calibrated_dimension(expected_dimension(37.0, 3000), 3000), 6)
    37.0
    """
    _check(value, n)
    means = np.maximum.accumulate(_means(n, _of_method(method)))
    if value < means[0]:
        return float(value * DIMENSIONS[0] / means[0])
    if value >= means[-1]:
        return float(DIMENSIONS[-1])
    return float(np.exp(np.interp(np.log(value), np.log(means), np.log(DIMENSIONS))))


def in_table(dimension: float, n: int) -> bool:
    """Whether the calibration table covers a true dimension (below 1 it is extrapolated) and a number of rows.

    >>> in_table(20.0, 4096), in_table(20.0, 50), in_table(200.0, 4096)
    (True, False, False)
    """
    return SIZES[0] <= n <= SIZES[-1] and dimension < DIMENSIONS[-1]


def _of_method(method: str) -> str:
    return "two_nn" if method == "slope" else f"two_nn:method={method}"


def _means(n: int, estimator: str) -> np.ndarray:
    """E at a number of rows for every dimension of the table."""
    at = np.log(min(max(n, SIZES[0]), SIZES[-1]))
    return np.exp([np.interp(at, np.log(SIZES), np.log(row)) for row in _columns("mean", estimator)])


@cache
def _columns(part: str, estimator: str) -> np.ndarray:
    """A part of the table (means or standard deviations) for one estimator [dimensions, sizes]."""
    name = _SAME.get(estimator, estimator)
    if name not in ESTIMATORS:
        raise unknown_name("estimator of a dimension", estimator, (*ESTIMATORS, *_SAME))
    text = importlib.resources.files("anisoscope.metrics").joinpath("calibration.json").read_text("utf-8")
    return np.array(json.loads(text)[part][name])


def _check(dimension: float, n: int) -> None:
    if not dimension > 0 or n < 2:
        raise AnisoscopeError(f"seen dimension {dimension} of {n} rows; expected more than 0, and at least 2 rows")


def _remarks(value: float, rows: int, options: dict[str, Any], graphs: list[Neighbours]) -> str:
    """Text on the bias of TwoNN, with a warning where neighbours 2 and 4 give another dimension than 1 and 2.

    A near-copy of every tenth row is enough to bring TwoNN from 14 down to 0.2, with a narrow interval.
    """
    remarks = [_bias_remark(value, rows, options)]
    with contextlib.suppress(TooFewRows):
        if len(graphs) == 1 and _gride_within(graphs[0], 0.5 * value, 2.0 * value):
            return "; ".join(filter(None, remarks))
        other = sum(float(gride.function(graph, scale=2)) for graph in graphs) / len(graphs)
        if not 0.5 <= value / other <= 2.0:
            words = "near-copies or noise decide one of the two"
            remarks.append(f"the next scale (GRIDE, k = 2) gives {other:.3g}: {words}")
    return "; ".join(filter(None, remarks))


def _bias_remark(value: float, rows: int, options: dict[str, Any]) -> str:
    if options.get("keep", DEFAULT_KEEP) != DEFAULT_KEEP:
        return ""
    if options.get("calibrated"):
        return "" if in_table(value, rows) else "outside the table of known clouds: its nearest edge was taken"
    true = calibrated_dimension(value, rows, method=options.get("method", "slope"))
    if not in_table(true, rows):
        return "bias not known: outside the table of known clouds"
    return f"bias about {round(100 * (value / true - 1)):+d} % at this n"


def _near(neighbours: Neighbours, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """By line: distances to the k nearest, which rows have k neighbours, and their number (NaN if below FEWEST)."""
    near, usable = neighbours.near(k)
    count = usable.sum(-1)
    needed = f"a neighbour estimate needs at least {FEWEST} distinct rows with {k} neighbours each"
    enough = unless(
        count < FEWEST, count.double(), lambda: f"{needed}, seen {int(count)}; give more tokens, or another layer"
    )
    return near, usable, enough


def _quotient(above: Tensor | float, below: Tensor) -> Tensor:
    """above / below; NaN or an error where `below` is 0 because the nearest rows are equally far."""
    return unless(~((below > 0.0) & (below < torch.inf)), above / below, _NO_DIMENSION)


def _two_nn_contributions(graph: Neighbours, options: dict[str, Any]) -> Tensor:
    """log μ of each row; of the slope, which does not read the largest, cut at the last one that it keeps."""
    near, usable = graph.near(2)
    log_mu = torch.where(usable, (near[:, 1] / near[:, 0]).log(), torch.nan)
    if options.get("method", "slope") == "ml":
        return log_mu
    ordered = log_mu[usable].sort().values
    kept = min(math.floor(options.get("keep", DEFAULT_KEEP) * len(ordered)), len(ordered) - 1)
    return log_mu.clamp_max(float(ordered[max(0, kept - 1)]))


@_dimension(
    title="Intrinsic dimension (TwoNN)",
    formula="slope through 0 of −log(1−F(μ)) on log μ, F(μ₍ᵢ₎) = i/N, first ⌊0.9 N⌋",
    reference="Facco et al. 2017, arXiv:1803.06992",
    convention=_BATCHES
    + "; biased low above about 10: at 4096 rows a flat cloud of 20 dimensions gives 17.4 ± 0.3, one of 50 gives "
    "33.3 ± 0.6; calibrated=1 gives the dimension of the flat (Gaussian) cloud that has this value on average at the "
    "same number of rows, within 15 % of the truth on smooth clouds; per_context=1 takes one row of each context",
    default=True,
    neighbours=2,
    remark=_remarks,
    contributions=_two_nn_contributions,
)
def two_nn(
    graph: Neighbours, *, method: str = "slope", keep: float = 0.9, per_context: bool = False, calibrated: bool = False
) -> Tensor:
    """Dimension of the surface the rows lie on, from the ratio of their two nearest neighbours."""
    if method not in ("slope", "ml"):
        raise unknown_name("method of two_nn", method, ("slope", "ml"))
    if not 0.0 < keep <= 1.0:
        raise AnisoscopeError(f"two_nn has keep {keep}; expected more than 0 and at most 1")
    key = ("two_nn", method, keep)
    value, count = once(graph.known, key, lambda: _two_nn(graph, method=method, keep=keep))
    if not calibrated:
        return value
    if keep != DEFAULT_KEEP:
        raise AnisoscopeError(f"two_nn has calibrated=1 with keep {keep}; the table is for keep {DEFAULT_KEEP} alone")
    pairs = zip(value.flatten().tolist(), count.flatten().tolist(), strict=True)
    found = [math.nan if math.isnan(v) else calibrated_dimension(v, int(n), method=method) for v, n in pairs]
    return torch.tensor(found, dtype=torch.float64).reshape(value.shape)


def _two_nn(neighbours: Neighbours, *, method: str, keep: float) -> tuple[Tensor, Tensor]:
    """The published estimate, and the number of rows that it was computed from, by line."""
    near, usable, count = _near(neighbours, 2)
    log_mu = (near[..., 1] / near[..., 0]).log()
    if method == "ml":
        return _quotient(count, torch.where(usable, log_mu, 0.0).sum(-1)), count
    log_mu, place = log_mu.sort()  # once for all lines, which leave some out
    usable = usable[..., place]
    order = usable.cumsum(-1).double()  # i among those of the line
    kept = usable & (order <= torch.minimum((keep * count).floor(), count - 1).unsqueeze(-1))
    x = torch.where(kept, log_mu, 0.0)
    y = torch.where(kept, -torch.log1p(-order / count.unsqueeze(-1)), 0.0)
    return _quotient((x * y).sum(-1), x.square().sum(-1)), count


def _log_ratios(near: Tensor) -> Tensor:
    """log(rⱼ/r_k) of each row [n, k]; 0 for rows with fewer than k neighbours."""
    return torch.where(near[:, -1:] < torch.inf, (near / near[:, -1:]).log(), 0.0)


def _levina_bickel_contributions(graph: Neighbours, options: dict[str, Any]) -> Tensor:
    """The mean over k of (1/(k−1)) Σ_{j<k} log(r_k/r_j) of each row."""
    smallest, largest = options.get("smallest", 10), options.get("largest", 20)
    near, usable = graph.near(largest)
    logs = _log_ratios(near)
    k = torch.arange(smallest, largest + 1, device=logs.device)
    inverse = logs[:, smallest - 1 :] - logs.cumsum(1)[:, smallest - 2 : -1] / (k - 1)
    return torch.where(usable, inverse.mean(1), torch.nan)


@_dimension(
    title="Intrinsic dimension (Levina–Bickel)",
    formula="[mean over rows of (1/(k−1)) Σ_{j<k} log(r_k/r_j)]⁻¹, averaged over k = 10…20",
    reference="Levina & Bickel 2004; inverses averaged after MacKay & Ghahramani 2005",
    convention=_BATCHES
    + "; biased low above about 8: at 4096 rows a flat cloud of 20 dimensions gives 16.1 ± 0.1, one of 50 gives "
    "29.9 ± 0.1; less spread than TwoNN, more bias (docs/dimension.md)",
    neighbours=20,
    contributions=_levina_bickel_contributions,
)
def levina_bickel(neighbours: Neighbours, *, smallest: int = 10, largest: int = 20) -> Tensor:
    """Maximum-likelihood dimension from the distances to 10 to 20 neighbours: a wider scale than TwoNN."""
    if not 2 <= smallest <= largest:
        raise AnisoscopeError(f"levina_bickel has k from {smallest} to {largest}; expected 2 ≤ smallest ≤ largest")
    near, usable, count = _near(neighbours, largest)
    logs = usable.double() @ _log_ratios(near) / count.unsqueeze(-1)
    # (1/(k−1)) Σ_{j<k} log(r_k/r_j) = log r_k − (1/(k−1)) Σ_{j<k} log r_j: one cumulative sum serves all k
    k = torch.arange(smallest, largest + 1, device=logs.device)
    inverse = logs[..., smallest - 1 :] - logs.cumsum(-1)[..., smallest - 2 : -1] / (k - 1)
    values = torch.where((inverse > 0.0) & inverse.isfinite(), 1.0 / inverse, torch.nan).mean(-1)
    return unless(values.isnan(), values, _NO_DIMENSION)


def _gride_contributions(graph: Neighbours, options: dict[str, Any]) -> Tensor:
    """The score of each row at the estimate: (k−1) log μ/(1 − μ^−δ) − (2k−1) log μ."""
    scale = options.get("scale", 2)
    near, usable = graph.near(2 * scale)
    log_mu = (near[:, 2 * scale - 1] / near[:, scale - 1]).log()
    inner = -log_mu / torch.expm1(-log_mu * gride.function(graph, scale=scale))
    return torch.where(usable & (log_mu > 0), (scale - 1) * inner - (2 * scale - 1) * log_mu, torch.nan)


@_dimension(
    title="Intrinsic dimension (GRIDE)",
    formula="argmax_δ Π δ (μ^δ − 1)^{k−1} / μ^{(2k−1)δ+1}, μ = r₂ₖ/rₖ",
    reference="Denti et al. 2022, arXiv:2104.13832",
    convention=_BATCHES
    + "; scale = k; scale=1 is TwoNN by maximum likelihood; biased low above about 8, more at wider scales: at 4096 "
    "rows a flat cloud of 50 dimensions gives 31.8, 30.2, 28.7 at k = 2, 4, 8 (docs/dimension.md); a dimension that "
    "falls steeply from k = 1 to 8 is noise at the smallest scale",
    neighbours=4,
    contributions=_gride_contributions,
)
def gride(neighbours: Neighbours, *, scale: int = 2) -> Tensor:
    """Maximum-likelihood dimension from the neighbours k and 2k: the larger k, the wider the scale it looks at."""
    if scale < 1:
        raise AnisoscopeError(f"gride has scale {scale}; expected 1 or more")
    return once(neighbours.known, ("gride", scale), lambda: _gride(neighbours, scale))


def _gride(neighbours: Neighbours, scale: int) -> Tensor:
    """The zero of the score of every line."""
    log_mu, count = _gride_ratios(neighbours, scale)
    # E log μ = (1/δ) Σ_{i=k}^{2k−1} 1/i gives the start, which for k = 1 is the answer
    dimension = _quotient(count * sum(1.0 / i for i in range(scale, 2 * scale)), log_mu.sum(-1))
    if scale == 1:
        return dimension
    low, high = torch.zeros_like(dimension), torch.full_like(dimension, torch.inf)
    for _ in range(_NEWTON):  # Newton's method in log δ, kept between the bounds found so far
        score, slope = _gride_score(log_mu, count, dimension, scale)
        moves = score.abs() > 1e-12 * slope.abs()
        if not bool(moves.any()):
            break
        low, high = torch.where(score > 0, dimension, low), torch.where(score > 0, high, dimension)
        ahead = dimension * (-score / slope).clamp(-1.0, 1.0).exp()
        inside = (low < ahead) & (ahead < high) | (low <= 0) | (low >= high) | (high == torch.inf)
        dimension = torch.where(moves, torch.where(inside, ahead, (low * high).sqrt()), dimension)
    return dimension


def _gride_within(neighbours: Neighbours, low: float, high: float) -> bool:
    """Whether GRIDE (k = 2) lies between two dimensions, by the signs of its score, without finding the zero."""
    log_mu, count = _gride_ratios(neighbours, 2)
    score, _ = _gride_score(log_mu, count, log_mu.new_tensor([low, high]), 2)
    return bool(score[0] > 0.0) and bool(score[1] < 0.0)


def _gride_ratios(neighbours: Neighbours, scale: int) -> tuple[Tensor, Tensor]:
    """log μ, 0 in the rows that do not count, and N, how many do, of every line."""
    near, usable, enough = _near(neighbours, 2 * scale)
    log_mu = (near[..., 2 * scale - 1] / near[..., scale - 1]).log()
    spread = usable & (log_mu > 0)
    return torch.where(spread, log_mu, 0.0), torch.where(enough.isnan(), enough, spread.sum(-1))


def _gride_score(log_mu: Tensor, count: Tensor, dimension: Tensor, scale: int) -> tuple[Tensor, Tensor]:
    """N/δ + (k−1) Σ log μ/(1 − μ^−δ) − (2k−1) Σ log μ, which falls in δ, and its slope in log δ."""
    power = (log_mu * -dimension.unsqueeze(-1)).expm1_()  # μ^−δ − 1
    inner = (log_mu / power).masked_fill_(log_mu <= 0, 0.0)
    score = count / dimension - (scale - 1) * inner.sum(-1) - (2 * scale - 1) * log_mu.sum(-1)
    squares = inner.square_().mul_(power.add_(1.0)).sum(-1)
    return score, -count / dimension - (scale - 1) * squares * dimension


def _few_hubs(value: float, rows: int, options: dict[str, Any], graphs: list[Neighbours]) -> str:
    """A skewness rests on the few largest counts, and eight folds do not tell how few: see docs/intervals.md."""
    return "few rows are hubs: its interval may hold .90 to .96, not .95"


@_neighbouring(
    title="Hubness",
    formula="skewness of N_k(x), the number of rows that have x among their k = 10 nearest",
    reference="Radovanović et al. 2010",
    convention=_BATCHES + "; its interval holds in 90 to 96 of 100 cases, because few rows are hubs",
    neighbours=10,
    remark=_few_hubs,
)
def hubness(neighbours: Neighbours, *, k: int = 10) -> Tensor:
    """How unequal rows are as neighbours of others: 0 when all are alike, large when a few hubs are near to all."""
    if k < 1:
        raise AnisoscopeError(f"hubness has k {k}; expected 1 or more")
    near, _, enough = _near(neighbours, k)
    there = neighbours.present
    chosen = neighbours.index[near[:, -1] < torch.inf][:, :k]  # rows that do not count are still neighbours of others
    counts = torch.bincount(chosen.flatten(), minlength=len(neighbours)).double()
    n = there.sum(-1).double()
    gaps = torch.where(there, counts - ((counts * there).sum(-1) / n).unsqueeze(-1), 0.0)
    variance = gaps.square().sum(-1) / n
    skewness = torch.where(variance > 0, gaps.pow(3).sum(-1) / n / variance.pow(1.5), 0.0)
    return torch.where(enough.isnan(), enough, skewness)
