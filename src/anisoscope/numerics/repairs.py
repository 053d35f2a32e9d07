"""Repairs of a cloud of rows: affine maps that remove their mean, their top directions or their unequal variances.

Notation: X n×d rows to fit on, μ their mean, C = (X−μ)ᵀ(X−μ)/n their covariance, U its eigenvectors by falling
eigenvalues λ. A repair is an affine map r(x) = (x − m) M, fitted on some rows and applied to others.

    raw          m = 0, M = I
    mean         m = μ, M = I
    all_but_top  m = μ, M = I − U_D U_Dᵀ                    (Mu and Viswanath 2018)
    whitened     m = μ, M = U Λ^(−½) Uᵀ, Λ = (1−s) λ + s·median λ   (ZCA; Bell and Sejnowski 1997)

The shrinkage is s = d/(n + d) unless it is given: the share of an eigenvalue that is the chance of the sample. It is
towards the median and not, as in Ledoit and Wolf (2004), towards the mean of the eigenvalues: where one direction has
nearly all the variance, which is when one whitens, the mean is that direction's, and shrinking towards it would leave
all others as they were. A direction without variance carries nothing but rounding, and whitening would blow that up to
the size of everything else: such directions are mapped to 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError, unknown_name

_ULPS = 8  # rounding steps that a norm or a sum in the precision of the rows may leave
REPAIRS = ("raw", "mean", "all_but_top", "whitened")


@dataclass(frozen=True)
class Repair:
    """A fitted affine map of rows; `removed` directions of the fit rows do not come through it."""

    name: str
    shift: Tensor | None = None  # [d]
    matrix: Tensor | None = None  # [d, d], symmetric
    scale: float = 1.0  # mean norm of the fit rows before over after: brings repaired rows back to the usual size
    removed: int = 0
    shrinkage: float = 0.0

    def __call__(self, x: Tensor, *, rescaled: bool = False) -> Tensor:
        """Repaired rows in float64 [n, d]; `rescaled` to the mean norm that the fit rows had."""
        rows = x.double()
        if self.shift is not None:
            rows = rows - self.shift.to(rows.device)
        if self.matrix is not None:
            rows = rows @ self.matrix.to(rows.device)
        return rows * self.scale if rescaled and self.scale != 1.0 else rows


def fit_repair(name: str, x: Tensor, *, directions: int | None = None, shrinkage: float | None = None) -> Repair:
    """Fit one of REPAIRS on rows; `directions` D of all_but_top is max(1, d // 100) by default.

    >>> rows = torch.tensor([[3.0, 1.0], [3.0, -1.0]])
    >>> fit_repair("mean", rows)(rows).tolist()
    [[0.0, 1.0], [0.0, -1.0]]
    """
    if name not in REPAIRS:
        raise unknown_name("repair", name, REPAIRS)
    rows = _checked(x)
    if name == "raw":
        return Repair(name)
    mean = rows.mean(0)
    centred = rows - mean
    if name == "mean":
        return _scaled(Repair(name, mean), rows)
    values, vectors = torch.linalg.eigh(centred.T @ centred / len(rows))
    values, vectors = values.flip(0).clamp_min(0.0), vectors.flip(1)
    alive = values > _floor(x, rows, values)
    if name == "all_but_top":
        count = directions_of(rows.shape[1], directions)
        top = vectors[:, :count]
        matrix = torch.eye(rows.shape[1], dtype=torch.float64, device=rows.device) - top @ top.T
        return _scaled(Repair(name, mean, matrix, removed=count), rows)
    share = rows.shape[1] / sum(rows.shape) if shrinkage is None else _share(shrinkage)
    middle = values[alive].median() if bool(alive.any()) else values.sum()
    shrunk = (1 - share) * values + share * middle
    inverse = torch.where(alive, shrunk, torch.ones_like(shrunk)).rsqrt() * alive
    matrix = (vectors * inverse) @ vectors.T
    return _scaled(Repair(name, mean, matrix, removed=int((~alive).sum()), shrinkage=share), rows)


def fit_repairs(x: Tensor, *, directions: int | None = None, shrinkage: float | None = None) -> dict[str, Repair]:
    """Every repair, fitted on the same rows."""
    return {name: fit_repair(name, x, directions=directions, shrinkage=shrinkage) for name in REPAIRS}


def directions_of(width: int, directions: int | None) -> int:
    """How many top directions all_but_top takes away.

    >>> directions_of(768, None), directions_of(64, None), directions_of(64, 3)
    (7, 1, 3)
    """
    count = max(1, width // 100) if directions is None else directions
    if not 1 <= count < width:
        raise AnisoscopeError(
            f"all-but-the-top is to take {count} directions of {width}; expected at least 1 and fewer than the width."
        )
    return count


def _checked(x: Tensor) -> Tensor:
    if x.ndim != 2 or len(x) < 2:
        raise AnisoscopeError(
            f"a repair was to be fitted on an array of shape {tuple(x.shape)}; expected at least two rows × width."
        )
    rows = x.double()
    if not bool(rows.isfinite().all()):
        raise AnisoscopeError("a repair was to be fitted on rows that are not all finite; leave those out first.")
    return rows


def _floor(x: Tensor, rows: Tensor, values: Tensor) -> float:
    """The largest variance that is rounding noise: of the float64 sums, or of the numbers as they were stored."""
    sums = rows.shape[1] * torch.finfo(torch.float64).eps * float(values[0])
    stored = (_ULPS * torch.finfo(x.dtype).eps) ** 2 * float(rows.square().mean()) if x.is_floating_point() else 0.0
    return max(sums, stored)


def _share(shrinkage: float) -> float:
    if not 0 <= shrinkage <= 1:
        raise AnisoscopeError(f"the shrinkage is {shrinkage}; expected a share from 0 to 1.")
    return float(shrinkage)


def _scaled(repair: Repair, rows: Tensor) -> Repair:
    """The same repair with the factor that gives the fit rows their mean norm back."""
    before, after = (float(torch.linalg.vector_norm(r, dim=1).mean()) for r in (rows, repair(rows)))
    scale = before / after if after > 0 else 1.0
    return Repair(repair.name, repair.shift, repair.matrix, scale, repair.removed, repair.shrinkage)
