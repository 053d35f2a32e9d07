"""The leading directions of rows, without the d×d matrix where d is large.

Block Krylov iteration with restarts (Musco and Musco 2015, arXiv:1504.05477): the rows are read a few times, and the
best directions within everything they were mapped to are taken. Small problems are solved exactly.
Notation: X n×d rows (leading dimensions are carried along), V d×q orthonormal, T = XV, θ = the squared norms of the
columns of T, descending; V are the leading right singular vectors, θ the squared singular values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_SPARE = 4  # columns of a block beyond the wanted ones
_DEPTH = 6  # blocks of one cycle; narrower problems are exact
_CYCLES = 12
_PRECISE = {torch.float32: 2e-4, torch.float64: 1e-7}  # ‖XᵀXv − θv‖ / θ at which a direction counts as found


@dataclass(frozen=True)
class Leading:
    """The q leading directions V [..., d, q] in float64, the scores T = XV [..., n, q], and θ [..., q]."""

    directions: Tensor
    scores: Tensor
    energies: Tensor
    passes: int = 1  # products with X and its transpose in turn


def leading(X: Tensor, count: int, *, keep: int | None = None, seed: int = 0, cycles: int = _CYCLES) -> Leading:
    """The `count` leading directions of X [..., n, d], and those after them up to `keep`, less precisely.

    One cycle is enough for a start; with more, every one of the `count` directions satisfies XᵀXv = θv.

    >>> found = leading(torch.diag(torch.tensor([3.0, 2.0, 1.0])), 2)
    >>> found.energies.tolist()
    [9.0, 4.0]
    """
    n, d = X.shape[-2:]
    keep = min(keep or count, n, d)
    width = min(d, count + _SPARE)
    if min(n, d) <= _DEPTH * width:
        return _exact(X, keep)
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(d, width, generator=generator, dtype=torch.float64).to(X.device)
    basis = torch.linalg.qr(first)[0].expand(*X.shape[:-2], d, width)
    scores = X @ basis.to(X.dtype)
    passes = 0
    for _ in range(cycles):
        found = _best(*_expand(X, basis, scores), keep=max(keep, width))
        passes += _DEPTH - 1
        basis, scores = found.directions[..., :width], found.scores[..., :width]
        if cycles > 1 and bool((_residuals(X, found, count) <= _PRECISE[X.dtype]).all()):
            break
    else:
        if cycles > 1:  # a flat spectrum: the long way
            return _exact(X, keep)
    return Leading(found.directions[..., :keep], found.scores[..., :keep], found.energies[..., :keep], passes)


def _expand(X: Tensor, basis: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """A Krylov basis that begins with `basis`, and X times it."""
    spaces, images = [basis], [scores]
    for _ in range(_DEPTH - 1):
        spaces.append(_orthogonal((X.mT @ images[-1]).double(), torch.cat(spaces, -1)))
        images.append(X @ spaces[-1].to(X.dtype))
    return torch.cat(spaces, -1), torch.cat(images, -1)


def _orthogonal(block: Tensor, against: Tensor) -> Tensor:
    """An orthonormal basis of the block's part that is orthogonal to `against`; twice, so that it really is.

    From the eigenvectors of its small Gram matrix, many at a time on a device; a column too many is 0.
    """
    for _ in range(2):
        block = block - against @ (against.mT @ block)
        values, vectors = torch.linalg.eigh(block.mT @ block)
        alive = values > 1e-14 * values[..., -1:].clamp_min(torch.finfo(values.dtype).tiny)
        block = block @ (vectors * torch.where(alive, values, torch.inf).rsqrt().unsqueeze(-2))
    return block


def _best(space: Tensor, image: Tensor, *, keep: int) -> Leading:
    """Rayleigh and Ritz: the directions within a space that hold the most energy."""
    wide = image.double()
    values, turn = torch.linalg.eigh(wide.mT @ wide)
    turn = turn.flip(-1)[..., :keep]
    return Leading(space @ turn, image @ turn.to(image.dtype), values.flip(-1)[..., :keep].clamp_min(0.0))


def _residuals(X: Tensor, found: Leading, count: int) -> Tensor:
    theta = found.energies[..., None, :count]
    gap = (X.mT @ found.scores[..., :count]).double() - found.directions[..., :count] * theta
    noise = 1e-12 * theta[..., :1].squeeze(-2)  # directions without energy are whatever they are
    return torch.linalg.vector_norm(gap, dim=-2) / theta.squeeze(-2).clamp_min(noise)


def _exact(X: Tensor, keep: int) -> Leading:
    """From the smaller of the two Gram matrices, in float64."""
    wide = X.double()
    if X.shape[-2] >= X.shape[-1]:
        turn = torch.linalg.eigh(wide.mT @ wide)[1].flip(-1)[..., :keep]
    else:
        left = torch.linalg.eigh(wide @ wide.mT)[1].flip(-1)[..., :keep]
        turn = torch.linalg.qr(wide.mT @ left)[0]
    scores = wide @ turn
    return Leading(turn, scores.to(X.dtype), scores.square().sum(-2))
