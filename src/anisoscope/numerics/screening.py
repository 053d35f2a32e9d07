"""Candidates for nearest neighbours, from low-precision products with an error bound for each row.

Notation: c centred rows, N their norms, y the same rows rounded; D_ij, the squared distance as computed, is ‖cᵢ − cⱼ‖²
up to γ (Nᵢ + Nⱼ)² + o |D_ij|. γ holds the rounding of the rows (measured, by Cauchy–Schwarz: ε = max ‖c − y‖/‖c‖), of
the sums in the product (s), whose terms sum to at most (Nᵢ + Nⱼ)²/2, and of N². o is the rounding of a product's result
and what the place in the last bits of a key changes. The bound also has a term for float32 underflow, which matters
where one row is 10¹⁸ times as large as the others.

A key is −D/2 = yᵢ·yⱼ − Nᵢ²/2 − Nⱼ²/2: one product of rows that hold N²/2 in additional columns, the same for i and j,
so that a block of keys serves the rows of both sides. Of each group of columns only the two largest keys are kept. The
last bits of a key hold the place of its column within the group, so that a maximum finds both. Where the second largest
key may also be a neighbour, the whole group becomes candidates; otherwise only its largest key."""

from __future__ import annotations

import math
import timeit
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations_with_replacement

import numpy as np
import torch
from torch import Tensor

from anisoscope.numerics.host import each_on_host, float64_copy, one_thread, room
from anisoscope.numerics.linalg import lengths

PLACES = 16  # columns of a group
LOWEST = -1.0e38  # key of padding and of a row with itself; finite, because last bits would make a NaN of an infinity
_SIDE = 1024  # most rows of a square block of keys; a few such blocks fit into the last-level cache of the CPU
_DEVICE_SIDE = 8192
_SPAN = 8  # blocks of a span, after which the lists are brought up to date
_WIDENED = 1 << 17  # elements converted to float64 at a time
_DEVICE_WIDENED = 1 << 26
_SEEN = 128  # rows that the centre is computed from
_MOST_GROUPS = 8  # whole groups that a row may have as candidates; with more the row is searched again
_BFLOAT = 2.0**-8  # rounding unit
_MODERATE = 16  # powers of two up to which the largest entry needs no scaling
_TINY = torch.finfo(torch.float64).tiny
_PACKED = PLACES * 2.0**-22  # change of a key by the bits that hold the place
_STRIP = 16384  # rows per `Candidates` object
_SORTED = 256  # columns sorted at a time: more are several times slower
_COLUMN_BITS = (1 << 29) - 1
_MERGED = 1 << 18  # keys of groups from which lists are made at a time
DTYPES = {"bfloat16": torch.bfloat16, "tfloat32": torch.float32, "float32": torch.float32}


@dataclass(frozen=True)
class Rounded:
    """Rows in low precision, with the norms and constants of their keys and error bounds; padding has no key."""

    rows: Tensor  # y [n padded, d], then `parts` columns of ones and as many that sum to −N²/2
    norm: Tensor  # N [n] float64
    gamma: float
    out: float  # o
    least: float  # bound on the loss by float32 underflow
    scale: float  # power of two by which y and N were multiplied, so that squares stay within float32
    parts: int = 0

    @property
    def half(self) -> Tensor:
        """N²/2 float32 [n padded], infinite where there is padding."""
        half = torch.full((len(self.rows),), torch.inf, dtype=torch.float32, device=self.norm.device)
        half[: len(self.norm)] = self.norm.square() / 2
        return half

    def error(self, norm: Tensor, squared: Tensor, *, within: Tensor) -> Tensor:
        """Bound on the error of D for rows at distance at most `within` whose D is at least `squared`.

        It holds because the norm of such a row differs from N by at most `within`.
        """
        most = torch.minimum(norm + within, self.norm.max())
        return self.gamma * (norm + most).square() + self.out * squared.abs() + self.least

    def keys(self, upper: slice, lower: slice) -> Tensor:
        """−D/2 of two blocks of rows in float32, in memory of this thread."""
        left, right = self.rows[upper], self.rows[lower]
        turned = _memory("turned", right.shape, right).copy_(right)
        end, parts = right.shape[1], self.parts  # ones meet −N²/2 of the other row
        turned[:, end - 2 * parts : end - parts], turned[:, end - parts :] = (
            right[:, end - parts :],
            right[:, end - 2 * parts : end - parts],
        )
        shape = (len(left), len(right))
        product = torch.mm(left, turned.T, out=_memory("low", shape, left))
        if left.dtype == torch.float32:
            return product
        return _memory("float", shape, torch.empty(0, device=left.device)).copy_(product)


@dataclass(frozen=True)
class Candidates:
    """Pairs of rows that may be neighbours, for a subset of the rows, ordered by row."""

    rows: Tensor  # [rows] indices of the subset
    line: Tensor  # [pairs] position in `rows` of the first row of a pair
    column: Tensor  # [pairs] index of the second row of a pair
    reach: Tensor  # [rows] lower bound on D of all rows that are not listed
    low: Rounded

    def suffice(self, kth: Tensor) -> Tensor:
        """Whether [rows] the true distance to the k-th candidate proves that no row outside the list is nearer."""
        kth = kth * self.low.scale
        return self.reach - self.low.error(self.low.norm[self.rows], self.reach, within=kth) >= kth.square()


def blocks(x: Tensor) -> Iterator[slice]:
    """Slices of rows whose float64 copies fit into the cache."""
    step = max(1, (_WIDENED if x.device.type == "cpu" else _DEVICE_WIDENED) // max(1, x.shape[1]))
    for start in range(0, len(x), step):
        yield slice(start, min(start + step, len(x)))


def centre(x: Tensor) -> Tensor:
    """The coordinate-wise median of some rows, in float64, which is robust to a few rows of huge norm."""
    some = x[:: -(-len(x) // _SEEN)].contiguous().T.contiguous()  # columns of nearby rows are turned sooner
    if x.device.type != "cpu":
        return some.double().median(1).values
    short = some.numpy() if some.dtype.itemsize >= 4 else some.float().numpy()
    return torch.from_numpy(np.sort(short, axis=1)[:, (some.shape[1] - 1) // 2]).double()  # several times quicker


def rounded(x: Tensor, precision: str, *, shift: Tensor, pad: int, width: int = 1, fused: bool = False) -> Rounded:
    """Rows minus `shift` in low precision, padded to a multiple of `pad` rows and, if `fused`, of `width` columns.

    Without `fused` they have the additional columns of which `Rounded.keys` are made. The next call of this thread may
    use the memory of the rows again."""
    n, d = x.shape
    power = math.frexp(max(abs(float(end)) for end in x.aminmax()))[1]
    scale = 1.0 if abs(power) <= _MODERATE else 2.0**-power  # scales the largest entry to about 1, exactly
    parts = 0 if fused else 3 if precision == "bfloat16" else 1  # bfloat16 has a third of the digits of float32
    tall, wide = -(-n // pad) * pad, -(-d // width) * width + 2 * parts
    rows = _memory("rows", (tall, wide), torch.empty(0, dtype=DTYPES[precision], device=x.device))
    rows[n:], rows[:, d:] = 0.0, 0.0
    norm = torch.empty(n, dtype=torch.float64, device=x.device)
    lost = torch.zeros(n, dtype=torch.float64, device=x.device)

    near = shift.float() if precision == "float32" and x.dtype is torch.float32 and scale == 1.0 else None

    def some(part: slice) -> None:
        if near is not None:  # the median is one of the float32 numbers: their difference is rounded once
            torch.sub(x[part], near, out=rows[part, :d])
            norm[part] = lengths(float64_copy(rows[part, :d]))
            return
        centred = x[part].to(torch.float64, copy=True).sub_(shift)
        if scale != 1.0:
            centred.mul_(scale)
        torch.linalg.vector_norm(centred, dim=1, out=norm[part])
        if precision == "tfloat32":  # float32 rounded to the 10 mantissa bits that TF32 products use
            rows[part, :d] = ((centred.float().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
        else:
            rows[part, :d] = centred
        if precision == "float32":  # rounded by at most 2⁻²⁴; what underflows is within the bound for that
            return
        torch.linalg.vector_norm(centred.sub_(rows[part, :d]), dim=1, out=lost[part])

    each_on_host(some, list(blocks(x)), x.device.type)
    if parts:
        rows[:, wide - 2 * parts : wide - parts] = 1.0
        rows[n:, wide - parts] = LOWEST
        rest = norm.square() / -2.0
        for column in range(wide - parts, wide):
            rows[:n, column] = rest
            rest = rest - rows[:n, column]
    # the fused kernel accumulates in float32
    out = 0.0 if fused else _PACKED + (_BFLOAT / (1.0 - _BFLOAT) if rows.dtype == torch.bfloat16 else 0.0)
    # tensor cores truncate instead of rounding and align 16 products at a time: at most twice the error
    eps = 2.0**-24 if precision == "float32" else float((lost / norm.clamp_min(_TINY)).max())
    eps *= 1.0 if near is None else 2.0  # the norms are those of the rounded rows
    sums = (wide + 8) * (2.0**-24 if x.device.type == "cpu" else 2.0**-23)
    gamma = eps + 1.5 * eps**2 + sums * (1 + eps) ** 2 + 2.0**-23
    return Rounded(rows, norm, gamma, out, (wide + 8) * 2.0**-124, scale, parts)


@cache
def quick_precision() -> str:
    """bfloat16 if this CPU multiplies it much faster than float32, else float32; measured once, as no flag tells."""
    seconds = {}
    with one_thread():
        for precision in ("float32", "bfloat16"):
            y = torch.ones(512, 512, dtype=DTYPES[precision])
            # the minimum, because load on the machine can only make a run longer
            seconds[precision] = min(timeit.repeat(partial(torch.matmul, y, y.T), number=1, repeat=8))
    return "bfloat16" if seconds["bfloat16"] < 0.75 * seconds["float32"] else "float32"


def block_side(n: int, device: str) -> int:
    """Rows of a block of keys: equal blocks, a multiple of PLACES rows, few rows of padding.

    Of few rows there are still eight blocks, because half of the products of a block with itself are not needed.

    >>> block_side(3000, "cpu"), block_side(20_000, "cpu")
    (384, 1008)
    """
    most = _DEVICE_SIDE if device != "cpu" else min(_SIDE, max(_SIDE // 4, n // 8))
    count = -(-n // most)
    return -(-n // (count * PLACES)) * PLACES


@dataclass
class Lists:
    """For each row the largest keys of groups, with the group and its second largest key [n, listed]."""

    best: Tensor
    group: Tensor
    second: Tensor

    @classmethod
    def empty(cls, n: int, listed: int, device: torch.device) -> Lists:
        lowest = torch.full((n, listed), LOWEST, dtype=torch.float32, device=device)
        return cls(lowest, torch.zeros(n, listed, dtype=torch.int64, device=device), lowest.clone())

    def add(self, part: slice, best: Tensor, second: Tensor, *, first: int) -> None:
        """Bring the lists of some rows up to date with the keys of the groups from `first` on."""
        listed = self.best.shape[1]
        value, group = _largest(best, min(listed, best.shape[1]))
        lower, group = second.gather(1, group), group + first
        if first or value.shape[1] < listed:  # groups come in their order: before the first ones there are none
            value, order = torch.cat([self.best[part], value], 1).topk(listed, dim=1)
            group = torch.cat([self.group[part], group], 1).gather(1, order)
            lower = torch.cat([self.second[part], lower], 1).gather(1, order)
        self.best[part], self.group[part], self.second[part] = value, group, lower


def _largest(keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest keys of each row, descending, and their columns.

    Sorting short rows of numbers that hold their column in their last bits is several times quicker than `topk`.

    >>> [part.tolist() for part in _largest(torch.tensor([[-1.0, -3.0, -0.5]]), 2)]
    [[[-0.5, -1.0]], [[2, 0]]]
    """
    if keys.device.type != "cpu":
        value, column = keys.topk(count, dim=1)
        return value, column
    wide = keys.double()  # whose last 29 bits are 0
    wide.view(torch.int64).bitwise_or_(torch.arange(keys.shape[1]))
    while True:
        parts = wide.split(_SORTED, dim=1)
        for part in parts:
            part.numpy().sort(axis=1)
        if len(parts) == 1:
            break
        wide = torch.cat([part[:, -count:] for part in parts], 1)
    wide = wide[:, -count:].flip(1)
    return wide.float(), wide.view(torch.int64) & _COLUMN_BITS


class _Screening:
    """Keys of pairs of blocks, and of each group of columns of a span the two largest."""

    def __init__(self, low: Rounded, side: int, listed: int) -> None:
        self.low, self.side, self.groups, self.device = low, side, side // PLACES, low.rows.device
        self.lists = Lists.empty(len(low.rows), listed, self.device)
        # of rows i and columns j the sum of their places, so that either is told by the other
        place = torch.arange(side, device=self.device) // self.groups
        self.code = ((torch.arange(PLACES, device=self.device).unsqueeze(1) + place) % PLACES).int().unsqueeze(1)
        span = _SPAN * side
        self.spans = [slice(s, min(s + span, len(low.rows))) for s in range(0, len(low.rows), span)]

    def run(self) -> Lists:
        for one, two in combinations_with_replacement(self.spans, 2):
            starts = [range(span.start, span.stop, self.side) for span in (one, two)]
            shapes = [(one, two)] if one == two else [(one, two), (two, one)]
            found = [self._room(mine, other) for mine, other in shapes]
            pairs = [(i, j) for i in starts[0] for j in starts[1] if i <= j]
            each_on_host(partial(self._keep, found=found, corner=(one.start, two.start)), pairs, self.device.type)
            for (mine, other), (best, second) in zip(shapes, found, strict=True):
                self._merge(mine, other, best, second)
        return self.lists

    def _room(self, mine: slice, other: slice) -> tuple[Tensor, Tensor]:
        shape = (mine.stop - mine.start, (other.stop - other.start) // PLACES)
        best, second = (torch.empty(shape, dtype=torch.float32, device=self.device) for _ in range(2))
        return best, second

    def _keep(self, pair: tuple[int, int], *, found: list[tuple[Tensor, Tensor]], corner: tuple[int, int]) -> None:
        """Write the two largest keys of the groups of a block of keys, for its rows and for its columns."""
        (i, j), (top, left) = pair, corner
        keys = self.low.keys(slice(i, i + self.side), slice(j, j + self.side))
        if i == j:
            keys.fill_diagonal_(LOWEST)
        bits = keys.view(torch.int32)
        if self.low.rows.dtype == torch.float32:  # the last bits of what was bfloat16 are 0
            bits.bitwise_and_(-PLACES)
        bits.view(PLACES, self.groups, self.side).bitwise_or_(self.code)
        self._write(found[0], _two_largest(keys, 1), i - top, j - left)
        if i != j:
            one, two = _two_largest(keys, 0)
            self._write(found[-1], (one.T, two.T), j - left, i - top)

    def _write(self, found: tuple[Tensor, Tensor], values: tuple[Tensor, Tensor], row: int, column: int) -> None:
        at = slice(row, row + self.side), slice(column // PLACES, column // PLACES + self.groups)
        for into, value in zip(found, values, strict=True):
            into[at] = value

    def _merge(self, mine: slice, other: slice, best: Tensor, second: Tensor) -> None:
        step = max(1, _MERGED // best.shape[1]) if self.device.type == "cpu" else len(best)

        def some(start: int) -> None:
            stop = min(start + step, len(best))
            part = slice(mine.start + start, mine.start + stop)
            self.lists.add(part, best[start:stop], second[start:stop], first=other.start // PLACES)

        each_on_host(some, range(0, len(best), step), self.device.type)

    def members(self, group: Tensor) -> Tensor:
        """The columns of groups [..., places]."""
        block, inner = group // self.groups, group % self.groups
        places = torch.arange(PLACES, device=group.device)
        return (block * self.side + inner).unsqueeze(-1) + places * self.groups

    def column(self, rows: Tensor, value: Tensor, group: Tensor) -> Tensor:
        """The columns of the largest keys of groups."""
        mine = (rows % self.side) // self.groups
        place = ((value.view(torch.int32) & (PLACES - 1)) - mine.unsqueeze(1)) % PLACES
        return group // self.groups * self.side + group % self.groups + place * self.groups


def _two_largest(keys: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The largest and the second largest of the PLACES entries of each group along a dimension of a block of keys."""
    best, second = keys, None
    size, last = keys.shape[dim], keys.shape[dim] // PLACES
    while size > last:
        size //= 2
        shape = [len(keys), size] if dim else [size, keys.shape[1]]
        one, two = best.narrow(dim, 0, size), best.narrow(dim, size, size)
        lower = torch.minimum(one, two, out=_memory(f"lower {size}", shape, keys))
        if second is not None:
            low = torch.maximum(
                second.narrow(dim, 0, size), second.narrow(dim, size, size), out=_memory("low two", shape, keys)
            )
            torch.maximum(lower, low, out=lower)
        best = torch.maximum(one, two, out=_memory(f"best {size}", shape, keys))
        second = lower
    assert second is not None
    return best, second


def _memory(name: str, shape: Sequence[int], like: Tensor) -> Tensor:
    """A buffer; on the host each thread reuses its own, since page faults of new memory cost as much as writing it."""
    if like.device.type == "cpu":
        return room(f"screening {name}", shape, like.dtype)
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)


def screen(low: Rounded, *, side: int, k: int, wanted: int) -> Iterator[Candidates]:
    """Candidates for the k nearest neighbours of every row, a strip of rows at a time."""
    work = _Screening(low, side, wanted + 1)
    lists = work.run()
    for rows in torch.arange(len(low.norm), device=low.rows.device).split(_STRIP):
        best, group, second = lists.best[rows], lists.group[rows], lists.second[rows]
        squared, other = best.double() * -2.0, second.double() * -2.0
        column = work.column(rows, best, group)
        listed = Listed(rows, squared, column, other, group, work.members)
        yield listed.chosen(low, k=k)


@dataclass(frozen=True)
class Listed:
    """For some rows D of their best groups of columns, ascending; the last group only bounds what is not listed."""

    rows: Tensor  # [rows]
    squared: Tensor  # [rows, listed + 1] D of the nearest column of each group
    column: Tensor  # [rows, listed + 1] that column
    second: Tensor  # [rows, listed + 1] D of the next column of the group
    group: Tensor  # [rows, listed + 1]
    members: Callable[[Tensor], Tensor]  # from groups to their columns [..., places]

    def chosen(self, low: Rounded, *, k: int) -> Candidates:
        """The columns that may be among the k nearest: nearest columns of groups, or whole groups."""
        norm, reach = low.norm[self.rows], self.squared[:, -1]
        squared, second, group = self.squared[:, :-1], self.second[:, :-1], self.group[:, :-1]
        index = self.column[:, :-1].clamp(0, len(low.norm) - 1)  # columns of padding are dropped below
        there = squared < -LOWEST
        error = pair_error(low, squared, index, rows=self.rows)
        top = torch.where(there, squared + error, torch.inf).kthvalue(k, dim=1, keepdim=True).values
        crowded = second - low.error(norm.unsqueeze(1), second, within=top.clamp_min(0.0).sqrt()) <= top
        crowded &= second < -LOWEST
        many = crowded.sum(1, keepdim=True) > _MOST_GROUPS
        crowded &= ~many
        line, slot = ((squared - error <= top) & there & ~crowded).nonzero(as_tuple=True)
        column = index[line, slot]
        if bool(crowded.any()):
            more, others = self._whole_groups(crowded, group, n=len(low.norm))
            line, column = torch.cat([line, more]), torch.cat([column, others])
            order = line.argsort(stable=True)
            line, column = line[order], column[order]
        return Candidates(self.rows, line, column, torch.where(many.squeeze(1), -torch.inf, reach), low)

    def _whole_groups(self, crowded: Tensor, group: Tensor, *, n: int) -> tuple[Tensor, Tensor]:
        """Pairs (line, column) of all columns of the groups marked in `crowded`, without padding and the row itself."""
        line, slot = crowded.nonzero(as_tuple=True)
        column = self.members(group[line, slot])
        line = line.repeat_interleave(column.shape[1])
        column = column.flatten()
        real = (column < n) & (column != self.rows[line])
        return line[real], column[real]


def pair_error(low: Rounded, squared: Tensor, index: Tensor, *, rows: Tensor) -> Tensor:
    """The bound on the error of D [rows, listed] for columns `index` of some rows."""
    return low.gamma * (low.norm[rows].unsqueeze(1) + low.norm[index]).square() + low.out * squared.abs() + low.least
