"""Exact k-nearest-neighbour search.

Low-precision products of centred rows give candidates (`screening`), whose distances are computed from differences in
float64. A row whose candidates are not proved to contain its k nearest neighbours is searched again in float64.
Notation: n rows, k neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, pairwise

import numpy as np
import torch
from torch import Tensor

from anisoscope.numerics.factors import exact_products
from anisoscope.numerics.host import cores, each_on_host, float64_copy, room, single_steps, together
from anisoscope.numerics.linalg import has_float64, lengths
from anisoscope.numerics.screening import (
    PLACES,
    Candidates,
    block_side,
    blocks,
    centre,
    quick_precision,
    rounded,
    screen,
)

_WIDE_ELEMENTS = 1 << 22  # of a block of rows in float64
_BLOCK = (512, 4096)  # rows and columns of a block of distances in float64
_DEVICE_BLOCK = (4096, 32768)  # the same on a GPU, where few large blocks are quicker
_PAIR_BYTES = 1 << 20  # differences computed at a time, which should fit into the cache
_DENSE_BYTES = 1 << 21  # the same of rows with equally long lists, whose few steps are done sooner
_DEVICE_BYTES = 1 << 30
_LISTED, _DEVICE_LISTED = 2, 4  # candidates listed per wanted neighbour; a constant number is added
_TRIED = 64  # rows on which bfloat16 is tried
_FEW = 3072  # rows up to which all products at once take less time than lists of groups
_IN_TURN = 16  # largest keys that are found one after the other
_STRIP = 1024  # most rows of a strip of products, which one core looks through
_KERNEL_ROWS, _READY = 1 << 14, 7e13  # rows, or n²·d of all searches, from which it pays to make kernels ready: seconds
_CROWD = 2 * PLACES  # rows per listed group below which a search in float64 is quicker than screening
_MOST_REDONE = 0.1  # share of these with too long lists above which float32 is used: twice the cost, far more precise
_EQUAL = 1e-9  # relative difference up to which squared distances count as equal (rows of a lattice have many)
_GAMMA = 0.002  # approximate γ of bfloat16, and half of its rounding unit


@dataclass
class Search:
    """Distances (n×k, float64, ascending) and indices of the k nearest other rows."""

    distance: Tensor
    index: Tensor
    sure: Tensor  # [n] whether the candidates were proved to contain the nearest; other rows were searched again
    precision: str  # of the products that gave the candidates

    @classmethod
    def among(cls, x: Tensor, candidates: Iterator[Candidates], precision: str, *, k: int) -> Search:
        """The k nearest among the candidates."""
        parts = [_settled(x, found, k=k) for found in candidates]
        distance, index, sure = (torch.cat(part) for part in zip(*parts, strict=True))
        return cls(distance, index, sure, precision)

    @property
    def redone(self) -> float:
        """The share of the rows for which the candidates did not suffice."""
        return int((~self.sure).sum()) / len(self.sure)


def first_equal(x: Tensor) -> Tensor:
    """For every row the index of the first row that equals it (possibly itself) [n].

    >>> first_equal(torch.tensor([[1.0, 2.0], [1.0, 2.0], [0.0, 0.0]])).tolist()
    [0, 0, 2]
    """
    weights = torch.arange(1, x.shape[1] + 1, dtype=x.dtype, device=x.device).sqrt()
    found = torch.arange(len(x), device=x.device)
    candidates = found[_shared(x.sum(1))]  # of rows that agree in their sum few have a projection in common as well
    if len(candidates):
        candidates = candidates[_shared(_projections(x, candidates, weights))]
    if len(candidates):
        _, inverse = torch.unique(x[candidates], dim=0, return_inverse=True)
        first = torch.full((int(inverse.max()) + 1,), len(x), dtype=torch.int64, device=x.device)
        first.scatter_reduce_(0, inverse, candidates, reduce="amin")
        found[candidates] = first[inverse]
    return found


def _projections(x: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """Of some rows, summed in the same order for each, so that equal rows have bit-equal ones; others rarely have."""
    step = next(blocks(x)).stop
    return torch.cat([(x[part] * weights).sum(1) for part in rows.split(step)])


def _shared(values: Tensor) -> Tensor:
    """Which values occur more than once."""
    ordered, order = values.sort()
    same = ordered[1:] == ordered[:-1]
    found = torch.zeros(len(values), dtype=torch.bool, device=values.device)
    found[order[1:]] = same
    found[order[:-1]] |= same
    return found


def nearest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Distances (n×k, float64, ascending) and indices of the k nearest other rows, exact.

    >>> d, i = nearest(torch.tensor([[0.0], [1.0], [3.0]]), 2)
    >>> d.tolist(), i.tolist()
    ([[1.0, 3.0], [1.0, 2.0], [2.0, 3.0]], [[1, 2], [0, 2], [1, 0]])
    """
    found = search(x, k)
    return found.distance, found.index


@torch.inference_mode(False)  # threads of the pool do not inherit the caller's mode
def search(x: Tensor, k: int, *, precision: str | None = None) -> Search:
    """The k nearest other rows of every row; `precision` is that of the screening (default: the fastest suitable one).

    >>> search(torch.tensor([[0.0], [1.0], [3.0]]), 1).redone
    0.0
    """
    x = (x if has_float64(x.device) else x.cpu()).contiguous()
    k = min(k, len(x) - 1)
    _Searched.size += len(x) ** 2 * x.shape[1]
    with exact_products(x.device), single_steps():  # the bounds are for float32 sums
        enough = len(x) >= 64 * (_DEVICE_LISTED * k + 28)  # the kernel needs more groups than listed candidates
        fused = precision != "float32" and enough and _gains_by_kernels(x)
        found = _fused(x, k, precision) if fused else _by_products(x, k, precision)
        again = (~found.sure).nonzero().squeeze(1)
        if len(again):
            found.distance[again], found.index[again] = _redone(x, again, k=k, shift=centre(x))
    return found


def _by_products(x: Tensor, k: int, precision: str | None) -> Search:
    """Search with plain matrix products for the screening; few rows need none."""
    shift = centre(x)
    if precision is None and len(x) <= _FEW:
        return _all_products(x, k, shift=shift)
    chosen, wanted = _plan(x, k, precision, shift=shift)
    if len(x) < _CROWD * (wanted + 1):
        everyone = torch.arange(len(x), device=x.device)
        far, index = _redone(x, everyone, k=k, shift=shift)
        return Search(far, index, torch.ones_like(everyone, dtype=torch.bool), "float64")
    side = block_side(len(x), x.device.type)
    candidates = screen(rounded(x, chosen, shift=shift, pad=side), side=side, k=k, wanted=wanted)
    return Search.among(x, candidates, chosen, k=k)


def _all_products(x: Tensor, k: int, *, shift: Tensor) -> Search:
    """Search of few rows: all float32 products at once; the largest are candidates, and more where these are close."""
    low = rounded(x, "float32", shift=shift, pad=1, fused=True)
    low = replace(low, gamma=low.gamma + 2.0**-23)  # N²/2 is subtracted after the product
    keys, half, everyone = _symmetric_products(low.rows), low.half, torch.arange(len(x), device=x.device)
    found = Search(low.norm.new_empty(len(x), k), everyone.new_empty(len(x), k), everyone < 0, "float32")
    listed = everyone.new_empty(len(x), min(k + 1, len(x) - 1))
    step = min(_STRIP, -(-len(x) // cores())) if x.device.type == "cpu" else len(x)

    def settle(rows: Tensor | slice, near: Tensor, last: Tensor) -> Tensor:
        """Write the nearest of the candidates, and whether they are proved; the last one bounds all that follow."""
        here, every = everyone[rows], near.shape[1] == len(x) - 1
        near = near if every else near[:, :-1]
        distance, index = _smallest(_few_distances(x, rows, near), near, k)
        reach = low.norm[rows].square() - 2.0 * last.double()
        sure = here >= 0 if every else Candidates(here, here[:0], here[:0], reach, low).suffice(distance[:, -1])
        found.distance[rows], found.index[rows], found.sure[rows] = distance, index, sure
        return sure

    def first(start: int) -> None:
        part = slice(start, start + step)
        mine = keys[part].sub_(half)
        mine.diagonal(start).fill_(-torch.inf)
        value, listed[part] = _largest_keys(mine, listed.shape[1])
        settle(part, listed[part], value[:, -1])

    def further(rows: Tensor) -> None:
        mine, near = keys[rows], listed[rows]
        for more in (k + 5, 4 * k + 29):
            value, column = _largest_keys(mine, min(more, len(x) - 1 - near.shape[1]))
            near = torch.cat([near, column], 1)
            left = ~settle(rows, near, value[:, -1])
            rows, near, mine = rows[left], near[left], mine[left]
            if not len(rows):
                break

    each_on_host(first, range(0, len(x), step), x.device.type)
    again = (~found.sure).nonzero().squeeze(1)
    each_on_host(further, again.split(step) if len(again) else (), x.device.type)
    return found


def _symmetric_products(rows: Tensor) -> Tensor:
    """yᵢ·yⱼ [n, n]."""
    if rows.device.type != "cpu":
        return rows @ rows.T
    shape, wide, number = (len(rows), len(rows)), rows.numpy(), 1 if cores() < 2 else 2
    keys = room("keys", shape, torch.float32, most=_FEW**2)
    parts = [slice(*pair) for pair in pairwise(round(len(rows) * i / number) for i in range(number + 1))]

    def product(pair: tuple[slice, slice]) -> None:
        one, two = pair
        np.matmul(wide[one], wide[two].T, out=keys[one, two].numpy())  # of rows and themselves by half the work (syrk)
        if one != two:
            keys[two, one] = keys[one, two].T

    together(product, [*combinations(parts, 2), *((part, part) for part in parts)])
    return keys


def _largest_keys(keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest keys of each row, descending, and their columns; −inf is written in their place.

    NumPy finds a maximum at the speed of the memory, so that a few of them, one after the other, take less than `topk`.
    """
    if keys.device.type != "cpu" or count > _IN_TURN:
        value, column = keys.topk(count, dim=1)
        keys.scatter_(1, column, -torch.inf)
        return value, column
    part, lines = keys.numpy(), np.arange(len(keys))
    largest, place = np.empty((len(keys), count), np.float32), np.empty((len(keys), count), np.int64)
    for i in range(count):
        at = place[:, i] = part.argmax(1)
        largest[:, i] = part[lines, at]
        part[lines, at] = -np.inf
    return torch.from_numpy(largest), torch.from_numpy(place)


def _fused(x: Tensor, k: int, precision: str | None) -> Search:
    """Search with the Triton kernel: all rows in bfloat16, then those without proof in TF32."""
    from anisoscope.numerics.screening_triton import screen_fused

    first, *others = (precision,) if precision else ("bfloat16", "tfloat32")
    wanted = _DEVICE_LISTED * k + 28
    everyone = torch.arange(len(x), device=x.device)
    found = Search.among(x, screen_fused(x, first, rows=everyone, k=k, wanted=wanted), first, k=k)
    for other in others:
        rows = (~found.sure).nonzero().squeeze(1)
        if len(rows):
            better = Search.among(x, screen_fused(x, other, rows=rows, k=k, wanted=wanted), other, k=k)
            found.distance[rows], found.index[rows], found.sure[rows] = better.distance, better.index, better.sure
            found.precision = f"{first}, {other} for {len(rows) / len(x):.1%} of the rows"
    return found


class _Searched:
    """How much this process has searched, by n²·d."""

    size = 0.0


def _gains_by_kernels(x: Tensor) -> bool:
    """Whether kernels are to be used: for a large search, and once small ones have lost what it takes to begin."""
    return (len(x) > _KERNEL_ROWS or _Searched.size > _READY) and _has_kernels(x.device.type)


@cache
def _has_kernels(device: str) -> bool:
    """Whether the Triton kernels work here, tried once on a few rows; without them the search is only slower."""
    if device != "cuda" or torch.version.hip:
        return False
    try:
        from anisoscope.numerics.screening_triton import pair_distances, screen_fused

        x = torch.arange(4096.0, device=device).view(1024, 4).cos()
        for precision in ("bfloat16", "tfloat32"):
            for found in screen_fused(x, precision, rows=torch.arange(1024, device=device), k=1, wanted=4):
                pair_distances(x, found.line, found.column).sum().item()
    except Exception:  # a broken compiler can raise anything; plain products need none
        return False
    return True


def _plan(x: Tensor, k: int, precision: str | None, *, shift: Tensor) -> tuple[str, int]:
    """The precision of the products and the number of groups listed per row, from a trial on a few rows.

    bfloat16 if it is fast here and lists long enough for 95 % of the tried rows are worthwhile.
    """
    plain, most = ("float32", k + 8), _LISTED * k + 14
    if precision:
        return (precision, most) if precision != "float32" else plain
    if x.device.type != "cpu" or quick_precision() == "float32":
        return plain
    rows = torch.arange(0, len(x), len(x) // _TRIED)
    squared, _ = _nearest_products(x, rows, most + 1, shift=shift.float())
    step = max(64, _WIDE_ELEMENTS // x.shape[1])
    norm = torch.cat([torch.linalg.vector_norm(x[part].double() - shift, dim=1) for part in rows.split(step)])
    kth = squared[:, k].clamp_min(0.0)  # the first is the row itself
    farthest = torch.minimum(norm + kth.sqrt(), norm.max())
    window = _GAMMA * ((2.0 * norm).square() + (norm + farthest).square() + 4.0 * kth)
    needed = (squared <= (kth + window).unsqueeze(1)).sum(1).double()
    if float((needed > most).double().mean()) > _MOST_REDONE:
        return plain
    return "bfloat16", min(most, int(needed.quantile(0.95)) + 4)


def _settled(x: Tensor, found: Candidates, *, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Distances and indices [rows, k] of the nearest candidates, and whether they are proved to be the nearest rows."""
    line, device = found.line, x.device
    count = torch.bincount(line, minlength=len(found.rows))
    slot = torch.arange(len(line), device=device) - (count.cumsum(0) - count)[line]
    shape = (len(found.rows), max(k, int(count.max())))
    far = torch.full(shape, torch.inf, dtype=torch.float64, device=device)
    where = torch.full(shape, len(x), dtype=torch.int64, device=device)
    far[line, slot], where[line, slot] = _distances(x, found.rows[line], found.column), found.column
    far, where = _smallest(far, where, k)
    return far, where, found.suffice(far[:, -1])


def _smallest(far: Tensor, where: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k smallest of each line, ties in the order of their index."""
    where, order = where.sort(dim=1)
    far, again = far.gather(1, order).sort(dim=1, stable=True)
    return far[:, :k], where.gather(1, again)[:, :k]


def _distances(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """‖x_i − x_j‖ of pairs of rows in float64, from differences."""
    if _gains_by_kernels(x):
        from anisoscope.numerics.screening_triton import pair_distances

        return pair_distances(x, first, second)
    step = max(1, (_PAIR_BYTES if x.device.type == "cpu" else _DEVICE_BYTES) // (8 * x.shape[1]))
    # pairs mostly occur in both orders: each distance is computed once
    both = torch.minimum(first, second) * len(x) + torch.maximum(first, second)
    pairs, place = torch.unique(both, return_inverse=True)
    first, second = pairs // len(x), pairs % len(x)
    found = torch.empty(len(first), dtype=torch.float64, device=x.device)

    def some(start: int) -> None:
        part = slice(start, start + step)
        # of two types a difference costs more than another copy
        other = room("other", (len(first[part]), x.shape[1]), torch.float64) if x.device.type == "cpu" else None
        gap = float64_copy(_taken(x, second[part], "one"))
        taken = _taken(x, first[part], "two")
        gap.sub_(taken if other is None else other.copy_(taken))
        torch.linalg.vector_norm(gap, dim=1, out=found[part])

    each_on_host(some, range(0, len(first), step), x.device.type)
    return found[place]


def _dense_distances(x: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    """‖x_i − x_j‖ in float64 of some rows to the rows at `index` [rows, k], from differences; on all cores."""
    if x.device.type != "cpu":
        return _few_distances(x, rows, index)
    step = _dense_rows(x, index)
    pairs = zip(rows.split(step), index.split(step), strict=True)
    return torch.cat(together(lambda pair: _few_distances(x, *pair), list(pairs)))


def _few_distances(x: Tensor, rows: Tensor | slice, index: Tensor) -> Tensor:
    """As `_dense_distances`, by the calling thread alone; a slice of rows is not copied."""
    d, k = x.shape[1], index.shape[1]
    if x.device.type != "cpu":
        one = torch.arange(len(x), device=x.device)[rows]
        return _distances(x, one.repeat_interleave(k), index.flatten()).view(index.shape)
    found, own, step = torch.empty(index.shape, dtype=torch.float64), x[rows], _dense_rows(x, index)
    for start in range(0, len(own), step):
        part = slice(start, start + step)
        gap = _widened(_taken(x, index[part].flatten(), "one"), "one").view(-1, k, d)
        found[part] = lengths(gap.sub_(_widened(own[part], "two").unsqueeze(1)))
    return found


def _dense_rows(x: Tensor, index: Tensor) -> int:
    """Rows whose differences to the rows at `index` [rows, k] are computed at a time."""
    return max(1, _DENSE_BYTES // (8 * x.shape[1] * max(1, index.shape[1])))


def _widened(rows: Tensor, name: str) -> Tensor:
    """The rows in float64, in a buffer of this thread unless they have that type."""
    return rows if rows.dtype is torch.float64 else room(f"wide {name}", rows.shape, torch.float64).copy_(rows)


def _taken(x: Tensor, at: Tensor, name: str) -> Tensor:
    """x[at], on the host in a buffer of this thread: new memory for each of many small blocks scatters the heap."""
    if x.device.type != "cpu":
        return x[at]
    taken = room(f"rows {name}", (len(at), x.shape[1]), x.dtype)
    if x.dtype is torch.bfloat16:  # which NumPy does not have
        return torch.index_select(x, 0, at, out=taken)
    np.take(x.numpy(), at.numpy(), axis=0, out=taken.numpy(), mode="clip")
    return taken


def _redone(x: Tensor, rows: Tensor, *, k: int, shift: Tensor) -> tuple[Tensor, Tensor]:
    """The k nearest of some rows by float64 products, or by differences where these are not precise enough."""
    wanted = min(k + 7, len(x))  # includes the row itself
    squared, index = _nearest_products(x, rows, wanted, shift=shift)
    far = _dense_distances(x, rows, index)
    far, index = _smallest(far.masked_fill_(index == rows.unsqueeze(1), torch.inf), index, k)
    few = rows.split(next(blocks(x)).stop)  # in float64 all rows would be twice the data, and again their difference
    norm = torch.cat([torch.linalg.vector_norm(x[part].double() - shift, dim=1) for part in few])
    error = (x.shape[1] + 8) * 2.0**-53 * (2.0 * norm + far[:, -1]).square()
    coarse = squared[:, -1] - error < far[:, -1].square() * (1.0 - _EQUAL)
    for i in coarse.nonzero().flatten().tolist() if wanted < len(x) else ():
        every = _distances(x, rows[i].expand(len(x)), torch.arange(len(x), device=x.device))
        every[rows[i]] = torch.inf
        far[i], index[i] = (part[:k] for part in every.sort(stable=True))
    return far, index


def _nearest_products(x: Tensor, rows: Tensor, wanted: int, *, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Squared distances, ascending, and indices [rows, wanted] of the nearest rows, the row itself included.

    By matrix products of rows minus `shift`, in its precision.
    """
    found, dtype = [], shift.dtype
    tall, broad = _BLOCK if x.device.type == "cpu" else _DEVICE_BLOCK
    if x.device.type == "cpu":  # of very wide rows fewer at a time
        tall, broad = (min(side, max(64, _WIDE_ELEMENTS // x.shape[1])) for side in (tall, broad))
    for part in rows.split(tall):
        left = (x[part] - shift).to(dtype)
        value = torch.full((len(part), 0), torch.inf, dtype=dtype, device=x.device)
        index = torch.zeros(len(part), 0, dtype=torch.int64, device=x.device)
        for start in range(0, len(x), broad):
            right = (x[start : start + broad] - shift).to(dtype)
            squared = torch.addmm(right.square().sum(1).unsqueeze(0), left, right.T, alpha=-2.0)
            near, where = squared.topk(min(wanted, squared.shape[1]), dim=1, largest=False)
            value, order = torch.cat([value, near], 1).sort(dim=1)
            value, index = value[:, :wanted], torch.cat([index, where + start], 1).gather(1, order[:, :wanted])
        found.append((value + left.square().sum(1, keepdim=True), index))
    value, index = (torch.cat(part) for part in zip(*found, strict=True))
    return value, index
