"""The largest eigenvalue of many covariances of the same rows at once, without forming any of them.

Notation: X n×d rows, W n×r zeros and ones (which rows belong to each of r sets), C_j the scatter of set j about its own
mean, Q the Krylov basis, T its tridiagonal matrix, θ the largest eigenvalue of T.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_BLOCK = 16  # steps between two looks at the convergence
_STILL = 1e-7  # of θ: how little it may move in a block of steps when no gap lets its vector settle
_SQUARINGS = 16  # T to the power 65536: directions within 1e-5 of the largest eigenvalue count as one
# residual in units of θ; the error of θ is its square over the gap: 1e-8 in trials, 1e-5 where the spectrum is flat
_CLOSE = 1e-4


def largest_directions(x: Tensor, member: Tensor) -> tuple[Tensor, Tensor]:
    """λ₁ [r] of each C_j, and the unit vectors that belong to them [r, d]; by Lanczos, fully reorthogonalised.

    >>> rows = torch.tensor([[-2.0, 0.0], [2.0, 0.0], [0.0, 1.0], [0.0, -1.0]], dtype=torch.float64)
    >>> top, _ = largest_directions(rows, torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 1.0], [1.0, 1.0]]))
    >>> [round(value, 6) for value in top.tolist()]
    [8.0, 2.0]
    """
    member = member.to(x).T.contiguous()  # [r, n]
    mean = member @ x / member.sum(1, keepdim=True).clamp_min(1.0)

    def scatter(v: Tensor) -> Tensor:
        along = (v @ x.T - (mean * v).sum(1, keepdim=True)) * member
        return along @ x  # the rows of a set sum to nothing along any direction, so the mean drops out

    spread = torch.linspace(-1.0, 1.0, len(x), dtype=x.dtype, device=x.device).add(0.37).cos()  # any start will do
    basis = x.new_zeros(len(member), _BLOCK + 1, x.shape[1])
    basis[:, 0], _ = _unit(scatter((member * spread) @ x))
    diagonal, beside = x.new_zeros(0, len(member)), x.new_zeros(0, len(member))
    before = torch.zeros_like(member[:, 0])
    while True:
        more_diagonal, more_beside = _extend(scatter, basis, diagonal)
        diagonal, beside = torch.cat([diagonal, more_diagonal]), torch.cat([beside, more_beside])
        top, weight = _ritz(diagonal, beside)
        settled = (beside[-1] * weight[-1].abs() <= _CLOSE * top) | ((top - before).abs() <= _STILL * top)
        if bool(settled.all()) or len(diagonal) >= x.shape[1]:  # as many steps as dimensions leave nothing to find
            return top.clamp_min(0.0), torch.einsum("rmd,mr->rd", basis[:, :-1], weight)
        before = top
        basis = torch.cat([basis, basis.new_zeros(len(member), _BLOCK, x.shape[1])], 1)


def _extend(scatter: Callable[[Tensor], Tensor], basis: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """A block of steps: the basis is filled in place, the new entries of T are returned."""
    diagonal, beside = [], []
    scale = known.amax(0) if len(known) else torch.zeros_like(known.sum(0))
    for step in range(len(known), len(known) + _BLOCK):
        ahead = scatter(basis[:, step])
        diagonal.append((ahead * basis[:, step]).sum(1))
        scale = torch.maximum(scale, diagonal[-1])
        so_far = basis[:, : step + 1]
        for _ in range(2):  # twice is enough (Parlett 1998)
            along = torch.bmm(so_far, ahead.unsqueeze(2))
            ahead = torch.baddbmm(ahead.unsqueeze(1), along.mT, so_far, alpha=-1.0).squeeze(1)
        basis[:, step + 1], length = _unit(ahead, floor=scale)
        beside.append(length)
    return torch.stack(diagonal), torch.stack(beside)


def _unit(vectors: Tensor, *, floor: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
    """Rows of length 1, and their lengths; what is rounding noise beside `floor` becomes 0 and stays it."""
    length = torch.linalg.vector_norm(vectors, dim=1)
    there = length > 1e-12 * floor
    return torch.where(there.unsqueeze(1), vectors / length.unsqueeze(1), 0.0), torch.where(there, length, 0.0)


def _ritz(diagonal: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
    """θ [r] and the weights of the basis vectors that make its vector [m, r], from T.

    High powers of T by squaring: many small products at once are quicker than many small eigenvalue problems.
    """
    off = beside[:-1].T
    band = torch.diag_embed(diagonal.T) + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)
    power = band
    for _ in range(_SQUARINGS):
        power = power / power.diagonal(dim1=1, dim2=2).sum(1).clamp_min(1e-300)[:, None, None]
        power = power @ power
    best = power.diagonal(dim1=1, dim2=2).argmax(1)
    weight, _ = _unit(power[torch.arange(len(power), device=power.device), :, best])
    top = ((band @ weight.unsqueeze(2)).squeeze(2) * weight).sum(1)
    return top, weight.T
