"""Samples of curved manifolds: variance against scale, the parabola, and tokens drawn by a Zipf law.

Variance against scale. Notation: t scale, in units of the radius of curvature 1/κ; C_T and C_N covariance of a centred
sample in the tangent and the normal space; visibility = tr C_N / tr C_T. To leading order tr C_T ~ t², tr C_N ~ t⁴,
visibility ~ t² (numerics.manifolds.expected_variances has the constants).

Tokens by frequency: what of the curvature is seen when rare types are spread more widely. Notation: types i = 1 … V,
frequency f_i ∝ i^(−s), each a point of the manifold with tokens scattered around it on the scale
t_i = t₀ (f_i / f_max)^(−β), at most 0.5/κ_i. β = 0: every type has the same scale, so frequency cannot matter; β > 0:
rare types are wider; β < 0: frequent types are. Lengths are in units of 1/κ at the manifold's centre. Two samplings of
the *same* types are compared: by frequency (`zipf`) and every type equally often (`uniform`). With s both the draw and,
through f_i, the scales change, so visibility alone need not be monotone in s; the ratio of the two samplings isolates
what frequency hides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from anisoscope.metrics import curvature as metrics
from anisoscope.metrics.engine.estimation import Estimate
from anisoscope.numerics import manifolds
from anisoscope.numerics.manifolds import Frames, Manifold, displace, expected_variances, unit_sample
from anisoscope.studies.curvature import CurvatureConfig

FEWEST_SCALES = 3
CLIP = 0.5  # the largest scale of a type, in units of 1/κ at its own point


@dataclass(frozen=True)
class Ladder:
    """Variances of repeated samples at a ladder of scales, [repetitions, scales], the floor not yet taken off."""

    scales: np.ndarray  # [scales] in units of 1/κ
    variance: dict[str, np.ndarray]  # tangent, normal
    floor: dict[str, np.ndarray]  # [repetitions]: the same of a sample of scale 0
    expected: dict[str, np.ndarray]  # [scales] to leading order
    rounding: float  # variance that float64 alone produces

    def excess(self, of: str) -> np.ndarray:
        """Variance above the floor, [repetitions, scales]; for `visibility` the ratio of the two."""
        if of == "visibility":
            with np.errstate(divide="ignore", invalid="ignore"):
                return self.excess("normal") / self.excess("tangent")
        return self.variance[of] - self.floor[of][:, None]

    def leading(self, of: str) -> np.ndarray:
        """What is expected of it, [scales]."""
        return self.expected["normal"] / self.expected["tangent"] if of == "visibility" else self.expected[of]

    def slopes(self, of: str, *, limit: float) -> tuple[np.ndarray, np.ndarray]:
        """Log–log slope of every repetition over the scales above the floor, and which they are; NaN under 3 scales.

        A scale t ≤ limit is fitted with as much signal as floor in the mean, and some in every repetition.
        """
        kept = self.scales <= limit * (1 + 1e-9)
        for part in ("tangent", "normal") if of == "visibility" else (of,):
            signal = self.excess(part)
            kept &= (signal.mean(0) >= self.floor[part].mean() + self.rounding) & (signal > 0).all(0)
        if kept.sum() < FEWEST_SCALES:
            return np.full(len(self.floor["tangent"]), np.nan), kept
        return metrics.curvature_slope(self.scales[kept], self.excess(of)[:, kept]), kept


def sample_ladder(manifold: Manifold, look: CurvatureConfig, *, seed: int) -> Ladder:
    """Independent samples for every scale and repetition around the centre; scales and floor in units of 1/κ."""
    frames, unit = manifold.frames(manifold.centre), length_unit(manifold.curvature(manifold.centre))
    generator = torch.Generator().manual_seed(seed)
    found = np.zeros((2, look.replicates, len(look.scales) + 1))
    for r in range(look.replicates):
        for i, t in enumerate((0.0, *look.scales)):
            u = t * unit * unit_sample(look.samples, dim=manifold.dim, kind=look.kind, generator=generator)
            x = displace(manifold, frames, u)
            x = x + look.floor * unit * torch.randn(x.shape, dtype=x.dtype, generator=generator)
            found[:, r, i] = [metrics.curvature_variance(x, basis) for basis in (frames.tangent, frames.normal)]
    reach = float(frames.position.norm()) + max(look.scales) * unit
    scales = unit * torch.tensor(look.scales, dtype=torch.float64)
    expected = [e.numpy() for e in expected_variances(frames.form, scale=scales, kind=look.kind)]
    variance, floor, leading = (
        dict(zip(("tangent", "normal"), part, strict=True)) for part in (found[:, :, 1:], found[:, :, 0], expected)
    )
    rounding = manifold.ambient * (4 * np.finfo(float).eps * reach) ** 2
    return Ladder(np.array(look.scales), variance, floor, leading, rounding)


def length_unit(curvature: float) -> float:
    """The radius of curvature 1/κ, or 1 where nothing is curved."""
    return 1 / curvature if curvature > 0 else 1.0


@dataclass(frozen=True)
class Parabola:
    """Where the gradient of a linear map on the parabola (u, u²) lies, seen from its apex."""

    row_tangent: float  # share of Σ‖g x‖² along the tangent (1, 0)
    mean_tangent: float  # |tangent part| of the mean gradient
    mean_normal: float  # |normal part| of the mean gradient

    @property
    def mean_share(self) -> float:
        """Tangent share of the squared mean gradient."""
        return metrics.parabola_tangent(self.mean_tangent**2, self.mean_normal**2)


def parabola_gradient(scale: float, *, n: int = 4096, seed: int = 0) -> Parabola:
    """The counter-example to the O(t) argument: x = (u, u²), u symmetric, g = 1 for every row, dL/dW = Σ g xᵀ.

    Every u comes with −u. Row by row almost all energy is tangent, 1 − O(t²); the tangent parts cancel in the sum, so
    the gradient that training sees is exactly normal at every scale.

    >>> found = parabola_gradient(0.1)
    >>> found.mean_share, found.row_tangent > 0.95
    (0.0, True)
    """
    half = scale * torch.randn(n // 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).abs()
    u = torch.stack([half, -half], 1)  # pairs are added first: the cancellation is exact, not to rounding
    tangent, normal = u.sum(1).sum() / n, u.square().sum() / n
    rows = metrics.parabola_tangent(float(u.square().sum()), float(u.pow(4).sum()))
    return Parabola(rows, abs(float(tangent)), abs(float(normal)))


@dataclass(frozen=True)
class Population:
    """Types as points of a manifold."""

    manifold: Manifold
    frames: Frames  # of the V types
    unit: float  # 1/κ at the manifold's centre
    widest: Tensor  # [V] 0.5/κ_i
    bend: Tensor  # [V] ‖II_i‖² over its mean; 1 where nothing is curved

    @classmethod
    def draw(cls, manifold: Manifold, types: int, *, seed: int) -> Population:
        frames = manifold.frames(manifold.points(types, seed=seed))
        unit = length_unit(manifold.curvature(manifold.centre))
        curvature = manifolds.largest_curvature(frames.form)
        widest = torch.where(curvature > 0, CLIP / curvature.clamp_min(1e-12), CLIP * unit)
        squares = frames.form.square().sum((1, 2, 3))
        bend = squares / squares.mean() if bool((squares > 0).all()) else torch.ones_like(squares)
        return cls(manifold, frames, unit, widest, bend)

    def scales(self, frequency: Tensor, beta: float, *, base: float) -> Tensor:
        """t_i = t₀ (f_i / f_max)^(−β), clipped at 0.5/κ_i."""
        return torch.minimum(base * self.unit * (frequency / frequency.max()) ** -beta, self.widest)


def zipf_frequencies(types: int, exponent: float) -> Tensor:
    """f_i ∝ i^(−s), adding up to 1.

    >>> zipf_frequencies(2, 1.0)
    tensor([0.6667, 0.3333], dtype=torch.float64)
    """
    weights = torch.arange(1, types + 1, dtype=torch.float64) ** -exponent
    return weights / weights.sum()


def draw_rows(
    population: Population, scales: Tensor, group: Tensor, *, kind: str, generator: torch.Generator
) -> Tensor:
    """One point of the manifold around the type of each token, [n, D]."""
    u = unit_sample(len(group), 1, dim=population.manifold.dim, kind=kind, generator=generator)
    frames = population.frames.take(group, bases=False)
    return displace(population.manifold, frames, scales[group, None, None] * u)[:, 0]


def true_visibility(rows: Tensor, group: Tensor, population: Population) -> float:
    """Σ normal / Σ tangent squares about each type's centroid, in the true spaces of its point.

    A type's normal squares are divided by its ‖II‖² over the mean of the population, so that it does not matter how
    curved the places are on which the few frequent types happen to lie.
    """
    frames = population.frames
    centred, _ = manifolds.centre_groups(rows, group, len(frames.chart))
    tangent, normal = (
        torch.einsum("nD,nDk->nk", centred, basis[group]).square().sum(1) for basis in (frames.tangent, frames.normal)
    )
    return metrics.curvature_visibility(normal / population.bend[group], tangent)


def see_tokens(
    population: Population, scales: Tensor, weights: Tensor, *, look: CurvatureConfig, generator: torch.Generator
) -> dict[str, float]:
    """Draw tokens by these weights and measure the curvature they show; keys are `metric|variant`.

    What is expected is to leading order; centring takes a degree of freedom from every type that occurs.
    """
    frames = population.frames
    group = torch.multinomial(weights, look.tokens, replacement=True, generator=generator)
    rows = draw_rows(population, scales, group, kind=look.kind, generator=generator)
    seen = {"curvature_visibility|estimate=true": true_visibility(rows, group, population)}
    tangent, normal = expected_variances(frames.form, scale=scales, kind=look.kind)
    expected = metrics.curvature_visibility_expected(normal / population.bend, tangent, weights, look.tokens)
    seen["curvature_visibility_expected|"] = expected
    noisy = rows + look.noise * population.unit * torch.randn(rows.shape, dtype=rows.dtype, generator=generator)
    fits = manifolds.fit_groups(noisy, group, groups=len(weights), dim=population.manifold.dim)
    share = torch.where(fits.usable, fits.count, 0).double()
    pooled = [torch.nan_to_num(v * share) for v in (fits.normal_variance, fits.tangent_variance)]
    seen["curvature_visibility|estimate=pca"] = metrics.curvature_visibility(*pooled)
    summary = _summary(manifolds.tangent_angle(fits, frames), manifolds.form_error(fits, frames), fits.count)
    return seen | {f"{metric}|count=natural": value for metric, value in summary.items()}


def see_neighbourhoods(
    population: Population, scales: Tensor, weights: Tensor, *, look: CurvatureConfig, generator: torch.Generator
) -> dict[str, float]:
    """Neighbourhoods of equally many rows around types drawn by these weights: only the scale can differ."""
    chosen = torch.multinomial(weights, look.neighbourhoods, replacement=True, generator=generator)
    angle, error = fit_neighbourhoods(population, scales[chosen], chosen, look=look, generator=generator)
    summary = _summary(angle, error, torch.ones(len(chosen)))
    return {f"{metric}|count=equal": value for metric, value in summary.items()}


def fit_neighbourhoods(
    population: Population, scales: Tensor, chosen: Tensor, *, look: CurvatureConfig, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Angle and relative error of curvature of local PCA around the chosen types, one scale for each."""
    frames = population.frames.take(chosen)
    u = unit_sample(len(chosen), look.neighbours, dim=population.manifold.dim, kind=look.kind, generator=generator)
    rows = displace(population.manifold, frames, scales[:, None, None] * u).flatten(0, 1)
    noisy = rows + look.noise * population.unit * torch.randn(rows.shape, dtype=rows.dtype, generator=generator)
    group = torch.arange(len(chosen)).repeat_interleave(look.neighbours)
    fits = manifolds.fit_groups(noisy, group, groups=len(chosen), dim=population.manifold.dim)
    return manifolds.tangent_angle(fits, frames), manifolds.form_error(fits, frames)


def _summary(angle: Tensor, error: Tensor, weight: Tensor) -> dict[str, float]:
    """Over tokens: medians of what was measured, and the share whose curvature was recovered (unmeasured is lost)."""
    return {
        "local_pca_angle": metrics.local_pca_angle(angle, weight),
        "curvature_error": metrics.curvature_error(error, weight),
        "curvature_recovered": metrics.curvature_recovered(error, weight),
        "curvature_unmeasured": metrics.curvature_unmeasured(angle, weight),
    }


def over_replicates(values: Sequence[float], *, n: int = 0, log: bool = False, note: str = "") -> Estimate:
    """Mean and 95 % interval over repetitions, on the log scale (a geometric mean) for ratios and variances.

    Repetitions of a simulation share nothing but the manifold, so Student's interval of their mean is the honest one; a
    percentile bootstrap of a dozen values would cover the truth too rarely.

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
    undo = math.exp if log else float
    spread = float(np.std(np.exp(x) if log else x, ddof=1))
    left_out = tuple(undo(v) for v in (x.sum() - x) / (len(x) - 1))
    ends = undo(mean - half), undo(mean + half)
    return Estimate(undo(mean), *ends, n=n, sd=spread, contexts=len(x), note=note, replicates=left_out)
