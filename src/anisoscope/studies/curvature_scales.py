"""How the variance around a point of a curved manifold grows with the scale of the sample, and the parabola.

Notation: t scale, in units of the radius of curvature 1/κ; C_T and C_N covariance of a centred sample in the tangent
and the normal space; visibility = tr C_N / tr C_T. To leading order tr C_T ~ t², tr C_N ~ t⁴, visibility ~ t²
(numerics.manifolds.expected_variances has the constants).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from anisoscope.numerics.manifolds import Frames, Manifold, displace, expected_variances, unit_sample

EXPECTED_SLOPES = {"tangent": 2.0, "normal": 4.0, "visibility": 2.0}
FEWEST_SCALES = 3


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
        return self.expected["normal"] / self.expected["tangent"] if of == "visibility" else self.expected[of]

    def above_floor(self, of: str, *, limit: float) -> np.ndarray:
        """Which scales may be fitted: as much signal as floor in the mean and in no repetition nothing; t ≤ limit."""
        kept = self.scales <= limit * (1 + 1e-9)
        for part in ("tangent", "normal") if of == "visibility" else (of,):
            signal = self.excess(part)
            kept &= (signal.mean(0) >= self.floor[part].mean() + self.rounding) & (signal > 0).all(0)
        return kept

    def slopes(self, of: str, *, limit: float) -> tuple[np.ndarray, np.ndarray]:
        """Log–log slope of every repetition over the scales above the floor, and which they are; NaN under 3 scales."""
        kept = self.above_floor(of, limit=limit)
        if kept.sum() < FEWEST_SCALES:
            return np.full(len(self.floor["tangent"]), np.nan), kept
        x = np.log(self.scales[kept])
        y = np.log(self.excess(of)[:, kept])
        x = x - x.mean()
        return (y @ x) / (x @ x), kept


def sample_ladder(
    manifold: Manifold,
    point: Tensor,
    *,
    scales: tuple[float, ...],
    samples: int,
    replicates: int,
    noise: float,
    kind: str,
    seed: int,
) -> Ladder:
    """Independent samples for every scale and repetition around one point; scales and noise in units of 1/κ."""
    frames = manifold.frames(point)
    unit = length_unit(manifold.curvature(point))
    generator = torch.Generator().manual_seed(seed)
    found = np.zeros((2, replicates, len(scales) + 1))
    for r in range(replicates):
        for i, t in enumerate((0.0, *scales)):
            u = t * unit * unit_sample(samples, dim=manifold.dim, kind=kind, generator=generator)
            x = displace(manifold, frames, u)
            x = x + noise * unit * torch.randn(x.shape, dtype=x.dtype, generator=generator)
            found[:, r, i] = split_variance(x, frames)
    reach = float(frames.position.norm()) + max(scales) * unit
    expected = expected_variances(frames.form, scale=unit * torch.tensor(scales, dtype=torch.float64), kind=kind)
    return Ladder(
        np.array(scales),
        dict(zip(("tangent", "normal"), found[:, :, 1:], strict=True)),
        dict(zip(("tangent", "normal"), found[:, :, 0], strict=True)),
        dict(zip(("tangent", "normal"), (e.numpy() for e in expected), strict=True)),
        manifold.ambient * (4 * np.finfo(float).eps * reach) ** 2,
    )


def length_unit(curvature: float) -> float:
    """The radius of curvature 1/κ, or 1 where nothing is curved."""
    return 1 / curvature if curvature > 0 else 1.0


def split_variance(x: Tensor, frames: Frames) -> tuple[float, float]:
    """tr C_T and tr C_N of the centred rows [n, D], in the true tangent and normal space."""
    centred = x - x.mean(0)
    parts = (centred @ basis for basis in (frames.tangent, frames.normal))
    tangent, normal = (float(p.square().sum() / (len(x) - 1)) for p in parts)
    return tangent, normal


@dataclass(frozen=True)
class Parabola:
    """Where the gradient of a linear map on the parabola (u, u²) lies, seen from its apex."""

    row_tangent: float  # share of Σ‖g x‖² along the tangent (1, 0)
    mean_tangent: float  # |tangent part| of the mean gradient
    mean_normal: float  # |normal part| of the mean gradient

    @property
    def mean_share(self) -> float:
        """Tangent share of the squared mean gradient."""
        total = self.mean_tangent**2 + self.mean_normal**2
        return self.mean_tangent**2 / total if total else float("nan")


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
    energy = u.square().sum(), u.pow(4).sum()
    return Parabola(float(energy[0] / (energy[0] + energy[1])), abs(float(tangent)), abs(float(normal)))
