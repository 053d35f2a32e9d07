"""Spectra and subspaces.

Notation: S d×d scatter of rows, λ its eigenvalues in descending order, σ = √λ the singular values of the rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def has_float64(device: torch.device) -> bool:
    return device.type != "mps"


def eigenvalues(scatter: Tensor) -> Tensor:
    """Eigenvalues of a symmetric positive matrix, descending, rounding noise below zero cut off.

    An eigenvalue under ~1e-15·λ₁ is noise of the float64 sums: σ below 3e-8·σ₁ has no correct digit.
    """
    return torch.linalg.eigvalsh(scatter).flip(-1).clamp_min(0.0)


def orthonormal_basis(rows: Tensor, *, tolerance: float = 1e-6) -> Tensor:
    """A d×r orthonormal basis of the row space, r the numerical rank.

    >>> orthonormal_basis(torch.tensor([[1.0, 0.0, 0.0], [2.0, 0.0, 0.0]])).shape
    torch.Size([3, 1])
    """
    _, sigma, right = torch.linalg.svd(rows.double(), full_matrices=False)
    rank = int((sigma > tolerance * sigma[0].clamp_min(1e-300)).sum())
    return right[:rank].T.contiguous()


def principal_angles(first: Tensor, second: Tensor) -> Tensor:
    """Angles in radians, ascending, between the row spaces of two matrices of the same width."""
    one, two = orthonormal_basis(first), orthonormal_basis(second)
    cosines = torch.linalg.svdvals(one.T @ two).clamp(0.0, 1.0)
    # arccos loses half of the digits near 1; the sine of the small angles comes from the residual instead
    sines = torch.linalg.svdvals(two - one @ (one.T @ two)).flip(0)[: len(cosines)].clamp(0.0, 1.0)
    if two.shape[1] > one.shape[1]:
        return torch.arccos(cosines)
    return torch.where(cosines > 0.7, torch.arcsin(sines), torch.arccos(cosines))


def subspace_overlap(first: Tensor, second: Tensor) -> float:
    """‖Q₁ᵀQ₂‖_F² / min(r₁, r₂): 1 when one row space contains the other, about r/d by chance.

    >>> subspace_overlap(torch.eye(4)[:2], torch.eye(4)[1:3])
    0.5
    """
    one, two = orthonormal_basis(first), orthonormal_basis(second)
    return float((one.T @ two).square().sum() / min(one.shape[1], two.shape[1]))
