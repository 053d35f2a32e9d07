"""The metrics of the curvature study: how much curvature a sample shows, and where gradients on a manifold go.

Notation: t the scale of a sample in units of the radius of curvature 1/κ, C_T and C_N the covariance of the centred
sample in the tangent and in the normal space, visibility = tr C_N / tr C_T. To leading order tr C_T ~ t², tr C_N ~ t⁴.
Gradients: y = x − x₀ [n, D] rows about the point x₀, g [n, k] the signal that comes back for each of them, B [D, ·] an
orthonormal basis of the tangent or the normal space at x₀, G = √E|g|².
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch
from torch import Tensor

from anisoscope.metrics.engine.metric import measured

RECOVERED = 0.5  # a curvature with a smaller relative error counts as recovered
_curvature = partial(measured, "study curvature", reference="Revisiting Anisotropy, arXiv:2604.08764")
_positive = partial(_curvature, bounds=(0.0, None))
_portion = partial(_curvature, bounds=(0.0, 1.0))
_PCA = "over the rows drawn (count=natural) or over neighbourhoods of equally many rows (count=equal)"


@_positive(
    title="Variance of a sample",
    formula="tr C_T, tr C_N, or tr C_N / tr C_T",
    convention="of=tangent, normal, visibility, in the true spaces; expected=1: to leading order in the scale",
    invariant=("rotation",),
)
def curvature_variance(rows: Tensor, basis: Tensor) -> float:
    """Variance of a sample around a point of a manifold, in its tangent or in its normal space."""
    return float(((rows - rows.mean(0)) @ basis).square().sum() / (len(rows) - 1))


@_positive(
    title="Noise floor",
    formula="tr C_T, tr C_N at scale 0",
    convention="of ambient noise alone",
    invariant=("rotation",),
)
def curvature_floor(rows: Tensor, basis: Tensor) -> float:
    """Variance that ambient noise alone puts into the tangent or the normal space."""
    return curvature_variance(rows, basis)


@_curvature(
    title="Slope over scales",
    formula="slope of log(variance − floor) on log t",
    convention="over the scales above the floor; 2, 4, 2 expected for tangent, normal, visibility",
)
def curvature_slope(scales: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """How fast a variance grows with the scale of the sample, of every repetition [repetitions, scales].

    >>> curvature_slope(np.array([1.0, 2.0, 4.0]), np.array([[3.0, 12.0, 48.0]])).round(9).tolist()
    [2.0]
    """
    x, y = np.log(scales), np.log(variance)
    x = x - x.mean()
    return (y @ x) / (x @ x)


@_positive(
    title="Constant over scales",
    formula="exp mean log(variance / expected)",
    convention="expected: to leading order in the scale; 1 where theory holds",
)
def curvature_constant(variance: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """A variance in units of its leading order, of every repetition [repetitions, scales]."""
    return np.exp(np.log(variance / expected).mean(1))


@_positive(
    title="Visibility of curvature",
    formula="Σ normal squares / Σ tangent squares",
    convention="about each type's centroid; estimate=true: in the true spaces, normal squares over ‖II‖² of the type; "
    "estimate=pca: in those of local PCA",
    invariant=("rotation", "scale"),
)
def curvature_visibility(normal: Tensor, tangent: Tensor) -> float:
    """How much of the rows lies normal to the manifold, per unit along it."""
    return float(normal.sum() / tangent.sum())


@_positive(
    title="Visibility, expected",
    formula="Σ f_i tr C_N / Σ f_i tr C_T, f_i degrees of freedom",
    convention="to leading order; centring takes a degree of freedom from every type that occurs",
)
def curvature_visibility_expected(normal: Tensor, tangent: Tensor, weights: Tensor, tokens: int) -> float:
    """The visibility that theory gives for tokens of types with these variances, drawn with these weights."""
    freedom = tokens * weights - 1 + (1 - weights) ** tokens
    return float((freedom * normal).sum() / (freedom * tangent).sum())


@_positive(
    title="Attenuation of curvature",
    formula="visibility by frequency / visibility of a uniform draw",
    convention="of the same types; scales=fixed: the scales kept as at s = 1, so that only the draw changes",
)
def curvature_attenuation(frequent: float, uniform: float) -> float:
    """What drawing tokens by frequency leaves of the curvature: below 1 it is hidden."""
    return frequent / uniform if uniform else math.nan


def weighted_median(values: Tensor, weight: Tensor) -> float:
    """The median of the finite values, each counted by its weight.

    >>> weighted_median(torch.tensor([3.0, 1.0, torch.nan]), torch.tensor([5, 1, 9]))
    3.0
    """
    known = values.isfinite() & (weight > 0)
    if not bool(known.any()):
        return math.nan
    ordered, order = values[known].sort()
    total = weight[known][order].double().cumsum(0)
    return float(ordered[int(torch.searchsorted(total, total[-1] / 2))])


@_curvature(
    title="Angle of local PCA",
    formula="median largest principal angle to the true tangent space",
    convention="in degrees; " + _PCA,
    bounds=(0.0, 90.0),
)
def local_pca_angle(angles: Tensor, weight: Tensor) -> float:
    """How far the tangent space that local PCA finds is turned from the true one."""
    return weighted_median(angles, weight)


@_positive(
    title="Error of curvature",
    formula="median ‖ÎI − II‖ / ‖II‖",
    convention="the second fundamental form fitted in the frame of local PCA; " + _PCA,
)
def curvature_error(errors: Tensor, weight: Tensor) -> float:
    """How far the curvature that local PCA finds is from the true one, relative to it."""
    return weighted_median(errors, weight)


@_portion(
    title="Curvature recovered",
    formula=f"share with a relative error below {RECOVERED}",
    convention="what could not be measured counts as not recovered; none where nothing is curved; " + _PCA,
)
def curvature_recovered(errors: Tensor, weight: Tensor) -> float:
    """Share of the rows at which local PCA finds the curvature."""
    if bool(errors.isnan().all()):
        return math.nan
    return float(((errors < RECOVERED).double() * weight).sum() / weight.sum())


@_portion(title="Curvature unmeasured", formula="share without a fit", convention="too few rows of a type; " + _PCA)
def curvature_unmeasured(angles: Tensor, weight: Tensor) -> float:
    """Share of the rows around which there are too few for local PCA."""
    return float((angles.isnan() * weight).sum() / weight.sum())


@_portion(
    title="Tangent share on the parabola",
    formula="tangent² / (tangent² + normal²)",
    convention="x = (u, u²), g = 1 for every row, dL/dW = Σ g xᵀ; per=row: of the rows, per=gradient: of dL/dW",
)
def parabola_tangent(tangent: float, normal: float) -> float:
    """Share of squares along the tangent: almost 1 row by row, 0 for the gradient that training sees.

    >>> parabola_tangent(9.0, 1.0)
    0.9
    """
    return tangent / (tangent + normal) if tangent + normal else math.nan


_OF = "of=tangent, normal, ratio (normal over tangent); signal: what comes back to the layer for each row; "


@_positive(
    title="Gradient on a manifold",
    formula="‖E[g yᵀ] B‖ / G (per=mean), √E|g|²|Bᵀy|² / G (per=rows)",
    convention=_OF + "bound=1: the upper bound of per=mean, t·√E|u|² and (t²/2)·√E|II(u, u)|², our reconstruction",
    invariant=("rotation",),
)
def manifold_gradient(signal: Tensor, rows: Tensor, basis: Tensor, *, per: str = "mean") -> float:
    """Size of the tangent or normal part of the gradient of a linear layer on rows y of a manifold.

    >>> y, g = torch.tensor([[1.0, 1.0], [-1.0, 1.0]]), torch.ones(2, 1)
    >>> manifold_gradient(g, y, torch.eye(2)[:, :1]), manifold_gradient(g, y, torch.eye(2)[:, :1], per="rows")
    (0.0, 1.0)
    """
    size = signal.square().sum(1)
    parts = rows @ basis
    whole = (signal.T @ parts / len(rows)).norm() if per == "mean" else (size * parts.square().sum(1)).mean().sqrt()
    return float(whole / size.mean().sqrt())


@_curvature(
    title="Slope of the gradient over scales",
    formula="slope of log(part of the gradient) on log t",
    convention=_OF + "over the scales above rounding; the orders of Eq. 9, 10, 11 are 1, 2, 1",
)
def manifold_gradient_slope(scales: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """How fast a part of the gradient grows with the scale, of every repetition [repetitions, scales]."""
    return curvature_slope(scales, parts)


@_positive(
    title="Tightness of the gradient's bound",
    formula="exp mean log(‖E[g yᵀ] B‖ / (G · bound))",
    convention="of=tangent, normal; over the fitted scales; 1: the bound is reached, 0: the rows' gradients cancel; "
    "highest=1: the largest over the scales; bounds with our constants",
)
def manifold_gradient_tightness(parts: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """The mean gradient in units of its upper bound, of every repetition [repetitions, scales]."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.exp(np.log(parts / bounds).mean(1))


@_portion(
    title="Tangent share of the activation variance",
    formula="‖Y T TᵀW‖² / (‖Y T TᵀW‖² + ‖Y (I − T Tᵀ) W‖²)",
    convention="Y centred inputs, W [D, k] the trained first layer, T the tangent basis; layers=1, 2; labels=tangent, "
    "normal (linear in those coordinates), noise; update=all, random: only in a random subspace of the tangent's rank",
    invariant=("rotation", "scale"),
)
def tangent_variance_share(weight: Tensor, rows: Tensor, tangent: Tensor) -> float:
    """How much of the variance of a layer's activations comes from the tangent directions of its inputs."""
    centred = rows - rows.mean(0)
    along = centred @ tangent @ tangent.T
    inside, outside = (float((part @ weight).square().sum()) for part in (along, centred - along))
    return inside / (inside + outside) if inside + outside else math.nan


@_positive(
    title="Distance to the time mean",
    formula="√(mean over steps of |e − ē|²)",
    convention="of the trained embedding e of a type, ē its mean over the steps; window=all: evenly spaced steps of "
    "the training, late: of its second half; rank: of the type by frequency; optimiser=sgd, adam",
    invariant=("rotation",),
)
def pinning_distance(tables: Tensor) -> Tensor:
    """How far the embedding of each type moves about its mean place, [steps, …, d] to […]."""
    return (tables - tables.mean(0)).square().sum(-1).mean(0).sqrt()


@_curvature(
    title="Slope of pinning",
    formula="slope of log distance on log frequency",
    convention="over types that were drawn at least 10 times; negative: frequent types are pinned; window and "
    "optimiser as for the distance",
)
def pinning_slope(distance: Tensor, frequency: Tensor) -> float:
    """How the distance of embeddings to their time mean changes with the frequency of their types.

    >>> f = torch.tensor([1.0, 2.0, 4.0])
    >>> round(pinning_slope(f**-0.5, f), 6)
    -0.5
    """
    x, y = frequency.double().log(), distance.double().log()
    x = x - x.mean()
    spread = float(x.square().sum())
    return float((x * y).sum()) / spread if spread > 1e-12 * max(1, len(x)) else math.nan
