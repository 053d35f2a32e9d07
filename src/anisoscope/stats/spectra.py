"""Sums over the spectrum of scatter matrices, and those without each fold from one eigenvalue problem.

Notation: λ eigenvalues of a scatter matrix S, V its eigenvectors, σ = √λ; S₍ₖ₎ the scatter without fold k, with
eigenvalues λ₍ₖ₎; aᵢ = (VᵀS₍ₖ₎V)ᵢᵢ.

tr S₍ₖ₎ and ‖S₍ₖ₎‖² need no eigenvalues. For the two other sums, with ∫₀^∞ log(1 + λ/t²) dt = π√λ and the same integral
with the weight log t + 1 equal to π√λ log √λ,
    Σ√λ₍ₖ₎           = Σ√aᵢ            + (1/π) ∫ c(t) dt,
    Σ√λ₍ₖ₎ log √λ₍ₖ₎ = Σ√aᵢ log √aᵢ   + (1/π) ∫ (log t + 1) c(t) dt,      c(t) = log det(S₍ₖ₎ + t²) − Σ log(aᵢ + t²),
where c is small, because S₍ₖ₎ is almost diagonal in V, and a determinant is a Cholesky factor, which costs a small part
of an eigenvalue problem on a GPU. In u = log t the trapezoidal rule with the step h has a relative error of about
exp(−π²/h), 4e-4 of the small second term. The largest eigenvalue is that of VᵀS₍ₖ₎V at the leading axes, with what the
others add by second-order perturbation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from anisoscope.numerics.linalg import clean_eigenvalues, eigenvalues

_STEP = 1.25  # h
_BELOW, _ABOVE = 2.5, 0.5  # by how much the nodes u go beyond log σ of the smallest and the largest eigenvalue
_LEADING = 32  # axes; matrices up to this size are solved in one batch on a GPU
_ROUNDS = 3  # of the largest eigenvalue, whose perturbation depends on itself
_TOGETHER = 1 << 22  # elements of matrices up to which all folds are factored at once


@dataclass(frozen=True)
class Spectrum:
    """Sums over eigenvalues λ, by line where there are several."""

    top: Tensor  # λ₁
    total: Tensor  # Σλ
    squares: Tensor  # Σλ²
    roots: Tensor  # Σ√λ
    logs: Tensor  # Σ√λ log √λ

    @classmethod
    def of(cls, values: Tensor) -> Spectrum:
        """Of eigenvalues [..., d], descending.

        >>> found = Spectrum.of(torch.tensor([4.0, 1.0]))
        >>> float(found.top), float(found.total), float(found.squares), float(found.roots)
        (4.0, 5.0, 17.0, 3.0)
        """
        sigma = values.sqrt()
        return cls(
            values[..., 0], values.sum(-1), values.square().sum(-1), sigma.sum(-1), torch.xlogy(sigma, sigma).sum(-1)
        )

    def defined(self, there: Tensor) -> Spectrum:
        """The same, NaN where it is not `there`."""
        return replace(self, **{f.name: torch.where(there, getattr(self, f.name), torch.nan) for f in fields(self)})

    def entropy(self) -> Tensor:
        """−Σ p log p of p = σ/Σσ."""
        return self.roots.log() - self.logs / self.roots


class DeviceSpectra:
    """Sums over the spectra of lines [L, d, d] on a device, the first of all rows, the others without a fold."""

    def __init__(self, lines: Tensor) -> None:
        self.sums, self.values = left_out_spectrum(lines)

    def spectrum(self, *, entropy: bool) -> Spectrum:
        """All of the sums, with those for an `entropy` in any case."""
        return self.sums


def left_out_spectrum(lines: Tensor) -> tuple[Spectrum, Tensor]:
    """The sums of scatter matrices [L, d, d], the first of all rows, and the eigenvalues [d] of the first, descending.

    Those of the first line are exact. Of the others the trace and Σλ² are exact, and the rest is so close that the
    standard errors of the jackknife agree to 1 %; where that cannot be had, they are solved one by one.

    >>> rows = torch.randn(8, 40, 4, dtype=torch.float64)
    >>> parts = rows.mT @ rows
    >>> lines = torch.cat([parts.sum(0, keepdim=True), parts.sum(0) - parts])
    >>> found, _ = left_out_spectrum(lines)
    >>> exact = Spectrum.of(torch.linalg.eigvalsh(lines).flip(-1))
    >>> torch.allclose(found.roots, exact.roots, rtol=1e-4), torch.allclose(found.top, exact.top, rtol=1e-4)
    (True, True)
    """
    ascending, V = torch.linalg.eigh(lines[0])
    values, V = clean_eigenvalues(ascending), V.flip(-1)
    found = _without_folds(lines[1:], values, V) if float(values[0]) > 0 else None
    if found is None:
        found = Spectrum.of(torch.stack([eigenvalues(line) for line in lines[1:]]))
    first = Spectrum.of(values)
    joined = {f.name: torch.cat([getattr(first, f.name)[None], getattr(found, f.name)]) for f in fields(first)}
    return Spectrum(**joined), values


def _without_folds(lines: Tensor, values: Tensor, V: Tensor) -> Spectrum | None:
    """The sums of the lines without a fold [L, d, d]; None if a factor fails, because a line lost rank."""
    a, top = _near(lines, V)
    a = torch.where(values > 0, a, 0.0).clamp_min(0.0)  # directions that are rounding noise count as empty
    sigma = a.sqrt()
    corrections = _corrections(lines, a, smallest=float(values[values > 0][-1]), largest=float(values[0]))
    if corrections is None:
        return None
    roots, logs = corrections
    return Spectrum(
        top=top,
        total=a.sum(-1),
        squares=torch.stack([torch.linalg.vector_norm(line) for line in lines]).square(),
        roots=sigma.sum(-1) + roots,
        logs=torch.xlogy(sigma, sigma).sum(-1) + logs,
    )


def _near(lines: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
    """aᵢ [L, d] and the largest eigenvalue [L] of each line."""
    k = min(_LEADING, V.shape[1])
    diagonals, leading = [], []
    for line in lines:  # one at a time, because they are wide
        image = line @ V
        diagonals.append((V * image).sum(0))
        leading.append(image[:, :k].T @ V)
    a, M = torch.stack(diagonals), torch.stack(leading)  # M [L, k, d]
    block, beyond = M[..., :k], M[..., k:]
    top = torch.linalg.eigvalsh(block)[:, -1]
    for _ in range(_ROUNDS if k < V.shape[1] else 0):
        gap = (top.unsqueeze(1) - a[:, k:]).clamp_min(1e-6 * top.unsqueeze(1))
        top = torch.linalg.eigvalsh(block + (beyond / gap.unsqueeze(1)) @ beyond.mT)[:, -1]
    return a, top


def _corrections(lines: Tensor, a: Tensor, *, smallest: float, largest: float) -> tuple[Tensor, Tensor] | None:
    """(1/π) ∫ c dt and (1/π) ∫ (log t + 1) c dt of each line; None if a factor fails."""
    first = 0.5 * math.log(smallest) - _BELOW
    count = math.ceil((0.5 * math.log(largest) + _ABOVE - first) / _STEP) + 1
    nodes = [first + _STEP * i for i in range(count)]
    found = [_log_determinants(lines, math.exp(2 * u)) for u in nodes]
    bad = torch.stack([failed for _, failed in found]).any()
    gaps = torch.stack(
        [whole - (a + math.exp(2 * u)).log().sum(-1) for u, (whole, _) in zip(nodes, found, strict=True)]
    )
    if bool(bad | ~gaps.isfinite().all()):
        return None
    weights = [_STEP * math.exp(u) / math.pi for u in nodes]
    moments = [weight * (u + 1) for u, weight in zip(nodes, weights, strict=True)]
    # below the first node c is constant: the rest of a geometric series
    ratio = math.exp(-_STEP)
    moments[0] += weights[0] * ratio / (1 - ratio) * (first + 1 - _STEP / (1 - ratio))
    weights[0] /= 1 - ratio
    both = torch.tensor([weights, moments], dtype=a.dtype, device=a.device) @ gaps
    return both[0], both[1]


def _log_determinants(lines: Tensor, shift: float) -> tuple[Tensor, Tensor]:
    """log det(S + shift) [L], and whether some factor failed."""
    parts = [lines] if lines[0].numel() <= _TOGETHER else list(lines.unsqueeze(1))
    found, failed = [], []
    for part in parts:
        shifted = part.clone()
        shifted.diagonal(dim1=-2, dim2=-1).add_(shift)
        factor, info = torch.linalg.cholesky_ex(shifted)
        found.append(2.0 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1))
        failed.append(info.any())
    return torch.cat(found), torch.stack(failed).any()
