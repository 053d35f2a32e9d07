"""Exact non-negative least squares, for many rows at once.

Block principal pivoting (Kim and Park 2011, doi:10.1137/110821172): guess which codes are positive, solve for these
alone, exchange all that violate the optimality conditions, fall back to one at a time where that would cycle. Rows
with the same guess share one inverse. Everything in float64.
Notation: D k×d directions, G = DDᵀ, b = Dx of a row, z ≥ 0 its code, y = Gz − b the gradient; at the optimum z ≥ 0,
y ≥ 0, zᵀy = 0.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

_INVERSES = {"cpu": 1 << 22, "cuda": 1 << 25}  # elements of the k×k inverses held at a time
_WIDENED = 1 << 17  # elements of the rows in float64 at a time
_RIDGE = 1e-11  # on unit directions, in the inverse alone: with a direction given twice there still is one
_REFINED = 2
_SLACK = 1e-10  # relative to the row: what counts as a violation
_GUESSES = 30  # steps towards the first guess
_FULL = 3  # full exchanges without improvement before only one is exchanged
_ROUNDS = 50  # plus 5 per direction; what is left then is solved one by one


def nonnegative_codes(rows: Tensor, directions: Tensor, *, start: Tensor | None = None) -> Tensor:
    """argmin over z ≥ 0 of ‖x − zD‖² for each row of [..., n, d], in float64 [..., n, k].

    `start` holds codes near the solution: only their signs are used, and only time depends on them.

    >>> nonnegative_codes(torch.tensor([[3.0, -1.0]]), torch.eye(2)).tolist()
    [[3.0, 0.0]]
    """
    wide = directions.double()
    norms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    norms = torch.where(norms > 0, norms, 1.0)
    unit = wide / norms
    gram = unit @ unit.mT
    target = wide_products(rows, unit)
    passive = (_guess(gram, target, rows.dtype) if start is None else start) > 0
    k = gram.shape[-1]
    codes = _all_codes(gram.reshape(-1, k, k), target.reshape(-1, *target.shape[-2:]), passive.reshape(-1, k))
    return codes.reshape(target.shape) / norms.mT


def descend(gram: Tensor, target: Tensor, start: Tensor, *, steps: int) -> Tensor:
    """Codes [..., n, k] ≥ 0 nearer to the least squares ones than `start`, by `descent`."""
    return descent(gram, target, start, steps=steps)[0]


def descent(gram: Tensor, target: Tensor, start: Tensor, *, steps: int) -> tuple[Tensor, Tensor]:
    """Codes [..., n, k] ≥ 0 nearer to the least squares ones than `start`, and by how much ‖R‖² fell [...].

    Accelerated projected gradient: Nesterov's steps of length 1/λ, λ ≥ the largest eigenvalue of G. They may overshoot;
    a row for which they did keeps its start, so that no row gets worse.
    """
    bound = _largest_eigenvalue(gram)[..., None, None]
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    step, pull = (eye - gram / bound).to(target.dtype), target / bound.to(target.dtype)
    codes = ahead = start
    t = 1.0
    for _ in range(steps):
        moved = (ahead @ step).add_(pull).clamp_(min=0.0)
        t, before = (1.0 + math.sqrt(1.0 + 4.0 * t * t)) / 2.0, t
        ahead = torch.lerp(codes, moved, 1.0 + (before - 1.0) / t)
        codes = moved
    mine = gram.to(target.dtype)
    fall = _heights(start, mine, target) - _heights(codes, mine, target)
    return torch.where((fall < 0).unsqueeze(-1), start, codes), 2.0 * fall.clamp_min(0.0).sum(-1, dtype=torch.float64)


def _heights(codes: Tensor, gram: Tensor, target: Tensor) -> Tensor:
    """½ zᵀGz − zᵀb of each row, what is being minimised."""
    return ((codes @ gram).mul_(0.5).sub_(target).mul_(codes)).sum(-1)


def _largest_eigenvalue(gram: Tensor) -> Tensor:
    """‖G¹⁶‖^(1/16): never below the largest eigenvalue, at most k^(1/32) above it, and without waiting for a device."""
    bound, power = 1.0, gram
    for doubling in range(5):
        norm = torch.linalg.matrix_norm(power).clamp_min(torch.finfo(gram.dtype).tiny)
        bound = bound * norm ** (0.5**doubling)
        power = power / norm[..., None, None]
        power = power @ power
    return torch.as_tensor(bound)


def wide_products(rows: Tensor, unit: Tensor) -> Tensor:
    """X Dᵀ in float64; rows of less precision are widened a block at a time, which stays in the cache."""
    if rows.dtype == torch.float64 or rows.device.type != "cpu":
        return rows.double() @ unit.mT
    step = max(1, _WIDENED // rows.shape[-1])
    n = rows.shape[-2]
    return torch.cat([rows[..., i : i + step, :].double() @ unit.mT for i in range(0, n, step)], -2)


def _guess(gram: Tensor, target: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes near the solution: a few steps from the unconstrained ones, cut at 0."""
    ridge = _RIDGE * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    free = torch.cholesky_solve(target.mT, torch.linalg.cholesky_ex(gram + ridge)[0]).mT.clamp_min(0.0)
    return descend(gram, target.to(dtype), free.to(dtype), steps=_GUESSES)


def _all_codes(gram: Tensor, target: Tensor, passive: Tensor) -> Tensor:
    """Codes of [items, n, k], as many rows at a time as memory allows, flat."""
    items, n, k = target.shape
    owner = torch.arange(items, device=gram.device).repeat_interleave(n)
    flat = target.reshape(-1, k)
    step = max(256, _INVERSES.get(gram.device.type, 1 << 22) // (k * k))
    parts = [
        _pivot(gram, owner[i : i + step], flat[i : i + step], passive[i : i + step]) for i in range(0, len(flat), step)
    ]
    return torch.cat(parts)


def _pivot(gram: Tensor, owner: Tensor, target: Tensor, passive: Tensor) -> Tensor:
    """Block principal pivoting of some rows; `owner` says which Gram matrix is theirs."""
    k = gram.shape[-1]
    codes = torch.zeros_like(target)
    left = torch.arange(len(target), device=target.device)
    patience = torch.full_like(left, _FULL)
    fewest = torch.full_like(left, k + 1)
    for _ in range(_ROUNDS + 5 * k):
        z, y = _solve(gram, owner, target, passive)
        slack = _SLACK * target.abs().amax(1, keepdim=True)
        wrong = torch.where(passive, z < -_SLACK * z.abs().amax(1, keepdim=True), y < -slack)
        count = wrong.sum(1)
        codes[left] = torch.where(passive, z.clamp_min(0.0), 0.0)
        improved = count < fewest
        change = torch.where((improved | (patience > 0)).unsqueeze(1), wrong, _last(wrong))
        patience = torch.where(improved, _FULL, patience - 1)
        fewest = torch.minimum(fewest, count)
        going = (count > 0).nonzero().squeeze(1)
        if not len(going):
            return codes
        passive = (passive ^ change)[going]
        left, owner, target, patience, fewest = (v[going] for v in (left, owner, target, patience, fewest))
    codes[left] = _one_by_one(gram, owner, target)
    return codes


def _last(wrong: Tensor) -> Tensor:
    """Only the last True of each row."""
    after = wrong.flip(1).cumsum(1).flip(1)
    return wrong & (after == 1)


def _solve(gram: Tensor, owner: Tensor, target: Tensor, passive: Tensor) -> tuple[Tensor, Tensor]:
    """z of the passive set and the gradient y; what the ridge has done to z is undone step by step."""
    first, tile_of, place = _tiles(owner, passive)
    m = passive[first].to(target.dtype)
    masked = gram[owner[first]] * m.unsqueeze(1) * m.unsqueeze(2)
    masked.diagonal(dim1=-2, dim2=-1).add_(1.0 - m + _RIDGE)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky_ex(masked)[0])[tile_of]
    inside, mine = m[tile_of].unsqueeze(1), gram[owner[first][tile_of]] if len(gram) > 1 else gram[0]
    k = target.shape[1]
    tiled = target.new_zeros(len(tile_of) * place[1], k).index_copy_(0, place[0], target).view(-1, place[1], k)
    z = (tiled * inside) @ inverse  # the matrices are symmetric
    for _ in range(_REFINED):
        z = z + ((tiled - z @ mine) * inside) @ inverse
    y = z @ mine - tiled
    return z.reshape(-1, k)[place[0]], y.reshape(-1, k)[place[0]]


def _tiles(owner: Tensor, passive: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, int]]:
    """The first row of every distinct (owner, passive set), and the rows laid out in tiles that share one.

    A tile holds the mean number of rows of a set: few matrices where many rows share one, little room in vain where
    they do not. Returned beside the first rows: the set of each tile, the place of each row, and the rows of a tile.
    """
    # a random 64-bit sum for each set, wrapping around: were two sets to collide, the optimality test would tell
    weights = _weights(passive.shape[1] + 1).to(owner.device)
    order = ((passive * weights[1:]).sum(1) + owner * weights[0]).sort(stable=True)
    _, counts = torch.unique_consecutive(order.values, return_counts=True)
    size = max(1, len(owner) // len(counts))
    before, tiles = counts.cumsum(0) - counts, (counts + size - 1) // size
    shift = (tiles.cumsum(0) - tiles) * size - before  # of a set's places against the sorted rows
    place = torch.empty_like(order.indices)
    place[order.indices] = torch.arange(len(owner), device=owner.device) + shift.repeat_interleave(counts)
    sets = torch.arange(len(counts), device=owner.device)
    return order.indices[before], sets.repeat_interleave(tiles), (place, size)


@lru_cache(maxsize=16)
def _weights(count: int) -> Tensor:
    return torch.randint(-(2**62), 2**62, (count,), generator=torch.Generator().manual_seed(0))


def _one_by_one(gram: Tensor, owner: Tensor, target: Tensor) -> Tensor:
    """Lawson and Hanson's active set method for the rows on which pivoting did not settle."""
    from scipy.optimize import nnls

    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    factors = torch.linalg.cholesky_ex(gram + _RIDGE * eye)[0].mT.cpu()  # ‖Rz − R⁻ᵀb‖² has the same minimum, G = RᵀR
    found = []
    for i, b in zip(owner.tolist(), target.cpu(), strict=True):
        right = torch.linalg.solve_triangular(factors[i].mT, b.unsqueeze(1), upper=False).squeeze(1)
        found.append(torch.from_numpy(nnls(factors[i].numpy(), right.numpy(), maxiter=100 * len(b))[0]))
    return torch.stack(found).to(target.device)
