"""Local PCA and local quadratic fits of many groups of rows at once.

Notation: rows x [n, D], each of one of g groups with n_g rows; m dimension of the tangent space, T̂ [g, D, m] the top m
principal directions of a group, λ its eigenvalues; v = T̂ᵀ(x − x̄) tangent coordinates of a row;
S [g, D, m, m] the estimated second fundamental form, from x ≈ a + L v + ½ S(v, v) with S projected off T̂.

Groups have unequal sizes, so everything is a sum over rows scattered to groups: no loop over groups, no padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError
from anisoscope.numerics.manifolds import Frames


@dataclass(frozen=True)
class LocalFits:
    """What was estimated in each group; NaN for groups with fewer than `fewest_rows(m)` rows."""

    count: Tensor  # [g] rows
    tangent: Tensor  # [g, D, m]
    tangent_variance: Tensor  # [g] sum of the m largest eigenvalues of the covariance
    normal_variance: Tensor  # [g] sum of the others
    form: Tensor  # [g, D, m, m]

    @property
    def usable(self) -> Tensor:
        return self.count >= fewest_rows(self.tangent.shape[-1])


def fewest_rows(dim: int) -> int:
    """Rows that a group must have: twice the coefficients of the quadratic fit, and at least ten.

    >>> fewest_rows(2), fewest_rows(4)
    (12, 30)
    """
    return max(10, 2 * (1 + dim + dim * (dim + 1) // 2))


def scatter_sum(values: Tensor, group: Tensor, groups: int) -> Tensor:
    """Sums of values [n, ...] over the rows of each group, [groups, ...]."""
    return torch.zeros(groups, *values.shape[1:], dtype=values.dtype).index_add_(0, group, values)


def centre_groups(rows: Tensor, group: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Rows minus the mean of their group, and the number of rows of each group."""
    count = torch.bincount(group, minlength=groups)
    mean = scatter_sum(rows, group, groups) / count.clamp_min(1)[:, None]
    return rows - mean[group], count


def fit_groups(rows: Tensor, group: Tensor, *, groups: int, dim: int) -> LocalFits:
    """Local PCA, then the quadratic fit, of every group."""
    rows = rows.double()
    if dim < 1 or dim >= rows.shape[1]:
        raise AnisoscopeError(
            f"a tangent space of dimension {dim} was asked of rows of width {rows.shape[1]}; "
            f"expected 1 to {rows.shape[1] - 1}."
        )
    centred, count = centre_groups(rows, group, groups)
    scatter = scatter_sum(centred[:, :, None] * centred[:, None, :], group, groups)
    values, vectors = torch.linalg.eigh(scatter / (count - 1).clamp_min(1)[:, None, None])
    tangent, values = vectors[..., -dim:], values.clamp_min(0.0)
    form = _quadratic(centred, group, tangent, values[:, -dim:].clamp_min(1e-300).sqrt())
    few = count < fewest_rows(dim)
    form[few] = torch.nan
    within, across = values[:, -dim:].sum(1), values[:, :-dim].sum(1)
    return LocalFits(count, tangent, within.masked_fill(few, torch.nan), across.masked_fill(few, torch.nan), form)


def _quadratic(centred: Tensor, group: Tensor, tangent: Tensor, spread: Tensor) -> Tensor:
    """S of each group by least squares, the tangent coordinates in units of their spread for the sake of the solver."""
    groups, _, dim = tangent.shape
    v = torch.einsum("nD,nDm->nm", centred, tangent[group]) / spread[group]
    i, j = torch.triu_indices(dim, dim)
    design = torch.cat([torch.ones(len(v), 1, dtype=v.dtype), v, v[:, i] * v[:, j]], 1)
    gram = scatter_sum(design[:, :, None] * design[:, None, :], group, groups)
    target = scatter_sum(design[:, :, None] * centred[:, None, :], group, groups)
    # a pseudo-inverse, because on a shell the squares add up to a constant and the fit is not unique
    solved = torch.linalg.pinv(gram, rtol=1e-12, hermitian=True) @ target
    S = torch.zeros(groups, centred.shape[1], dim, dim, dtype=v.dtype)
    S[:, :, i, j] = solved[:, 1 + dim :].mT
    S = (S + S.mT) / (spread[:, None, :, None] * spread[:, None, None, :])
    return S - torch.einsum("gDm,gEm,gEab->gDab", tangent, tangent, S)


def tangent_angle(fits: LocalFits, frames: Frames) -> Tensor:
    """The largest principal angle, in degrees, between the estimated and the true tangent space of each group."""
    off = fits.tangent - frames.tangent @ (frames.tangent.mT @ fits.tangent)
    return torch.linalg.matrix_norm(off, ord=2).clamp(0.0, 1.0).arcsin().rad2deg().masked_fill(~fits.usable, torch.nan)


def form_error(fits: LocalFits, frames: Frames) -> Tensor:
    """‖Ŝ − II‖_F / ‖II‖_F for each group, the estimate expressed in the true bases; NaN where nothing is curved."""
    turn = fits.tangent.mT @ frames.tangent
    found = torch.einsum("gDc,gDij,gia,gjb->gcab", frames.normal, fits.form, turn, turn)
    size = frames.form.square().sum((1, 2, 3)).sqrt()
    error = (found - frames.form).square().sum((1, 2, 3)).sqrt()
    return torch.where(size > 0, error / size.clamp_min(1e-300), torch.nan)
