"""Spectra and subspaces.

Notation: S d×d scatter of rows, λ its eigenvalues in descending order, σ = √λ the singular values of the rows.
"""

from __future__ import annotations

import contextlib

import numpy as np
import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError
from anisoscope.numerics.host import one_blas_thread, room

_WIDE = 2048  # columns from which a spectrum is worth several threads
_NARROW = 64  # columns under which handing a matrix over costs more than it saves


def has_float64(device: torch.device) -> bool:
    return device.type != "mps"


def add_gram(out: Tensor, x: Tensor) -> None:
    """Add XᵀX of float64 rows […, n, d] to `out`, in place; on the host a half or a quarter of the work is saved."""
    half = x.shape[-1] // 2
    if x.device.type != "cpu" or x.ndim > 2 or half < _NARROW // 2:
        out += x.mT @ x
    elif torch.get_num_threads() == 1:  # NumPy sees that both factors are one array: a symmetric update
        product = room("product", out.shape, torch.float64)
        with one_blas_thread():
            np.matmul(x.numpy().T, x.numpy(), out=product.numpy())
        out += product
    else:  # NumPy's threads and torch's would wait for each other; here the lower left quarter is the upper right one
        left, right = x[:, :half], x[:, half:]
        out[:half, :half].addmm_(left.T, left)
        out[half:, half:].addmm_(right.T, right)
        corner = left.T @ right
        out[:half, half:] += corner
        out[half:, :half] += corner.T


def _symmetric_values(matrix: Tensor) -> Tensor:
    """Ascending eigenvalues; on the host by NumPy, whose LAPACK is the quicker one on most processors."""
    if matrix.device.type != "cpu" or matrix.shape[-1] < _NARROW:
        return torch.linalg.eigvalsh(matrix)
    with one_blas_thread() if matrix.shape[-1] <= _WIDE else contextlib.nullcontext():
        return torch.from_numpy(np.linalg.eigvalsh(matrix.numpy()))


def eigenvalues(scatter: Tensor) -> Tensor:
    """Eigenvalues of a symmetric positive matrix, descending; those that are rounding noise are 0.

    Under d·ε·λ₁ (ε = 2.2e-16) an eigenvalue is noise of the float64 sums: σ below √(d·ε)·σ₁, 4e-7·σ₁ at d = 768, has
    no correct digit, and its square root would still count in Σσ (a layer norm leaves one direction exactly empty).
    """
    values = _symmetric_values(scatter).flip(-1).clamp_min(0.0)
    noise = scatter.shape[-1] * torch.finfo(torch.float64).eps * values[..., :1]
    return torch.where(values > noise, values, 0.0)


def orthonormal_basis(rows: Tensor, *, tolerance: float = 1e-6) -> Tensor:
    """A d×r orthonormal basis of the row space, r the numerical rank.

    >>> orthonormal_basis(torch.tensor([[1.0, 0.0, 0.0], [2.0, 0.0, 0.0]])).shape
    torch.Size([3, 1])
    """
    rows = torch.as_tensor(rows).double()
    if rows.ndim != 2 or not bool(rows.isfinite().all()) or not bool(rows.any()):
        raise AnisoscopeError(
            f"a matrix of shape {tuple(rows.shape)} spans no subspace; expected finite rows × width, not all zero"
        )
    _, sigma, right = torch.linalg.svd(rows, full_matrices=False)
    return right[: int((sigma > tolerance * sigma[0]).sum())].T.contiguous()


def orthonormal_bases(rows: Tensor, *, tolerance: float = 1e-6) -> list[Tensor]:
    """A d×r orthonormal basis of the row space of each of several matrices [b, k, d], all in one go.

    Through the k×k Gram matrix, which is exact enough where every matrix has full rank; else one by one.
    """
    rows = rows.double()
    values, vectors = torch.linalg.eigh(rows @ rows.mT)
    if bool((values[:, 0] <= (100 * tolerance) ** 2 * values[:, -1]).any()):
        return [orthonormal_basis(part, tolerance=tolerance) for part in rows]
    basis, _ = torch.linalg.qr(rows.mT @ (vectors / values.sqrt().unsqueeze(-2)))
    return list(basis)


def _bases(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    one, two = orthonormal_basis(first), orthonormal_basis(second)
    if len(one) != len(two):
        raise AnisoscopeError(
            f"the rows have widths {len(one)} and {len(two)}; expected the same space, align them first"
        )
    return one, two


def principal_angles(first: Tensor, second: Tensor) -> Tensor:
    """Angles in radians, ascending, between the row spaces of two matrices of the same width."""
    two, one = sorted(_bases(first, second), key=lambda basis: basis.shape[1])  # angles do not depend on the order
    cosines = torch.linalg.svdvals(one.T @ two).clamp(0.0, 1.0)
    # arccos loses half of the digits near 1; the sine of the small angles comes from the residual instead
    sines = torch.linalg.svdvals(two - one @ (one.T @ two)).flip(0)[: len(cosines)].clamp(0.0, 1.0)
    return torch.where(cosines > 0.7, torch.arcsin(sines), torch.arccos(cosines))


def subspace_overlap(first: Tensor, second: Tensor) -> float:
    """‖Q₁ᵀQ₂‖_F² / min(r₁, r₂): 1 when one row space contains the other, about r/d by chance.

    >>> subspace_overlap(torch.eye(4)[:2], torch.eye(4)[1:3])
    0.5
    """
    one, two = _bases(first, second)
    return float((one.T @ two).square().sum() / min(one.shape[1], two.shape[1]))
