"""Candidates for nearest neighbours, by products of low precision whose error is bounded row by row.

Notation: c rows about a centre, N their norms, y the same rows rounded; key_ij = yᵢ·yⱼ − Nⱼ²/2,
the larger the nearer, for D_ij = Nᵢ² − 2 key_ij is ‖cᵢ − cⱼ‖² up to γ (Nᵢ + Nⱼ)² + o |Nᵢ² + Nⱼ² − D_ij|. γ holds the
rounding of the rows (measured, by Cauchy–Schwarz: ε = max ‖c − y‖/‖c‖), of the sums in the product (s) and of the key:
2 (2ε + 3ε² + s) Nᵢ Nⱼ + 2⁻²³ (Nᵢ + Nⱼ)², where Nᵢ Nⱼ ≤ (Nᵢ + Nⱼ)²/4; o is the rounding of a product's result. Beside
them stands what products below the range of float32 may lose, which counts where one row is 10¹⁸ times the others.
"""

from __future__ import annotations

import math
import timeit
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from anisoscope.numerics.host import each_on_host, one_thread, room

GROUP = 16  # keys of which only the largest is compared at first
_SIDE = 1024  # rows of a square block of keys; a few such blocks stay in the host's last cache
_DEVICE_SIDE = 8192
_SPARE = 3  # times the wanted number: places of each row's list, sorted out when they are full
_WIDENED = 1 << 17  # elements in float64 at a time
_DEVICE_WIDENED = 1 << 26
_SEEN = 1024  # rows of which the centre is taken
_STRIP = 16384  # rows handed on at a time
_BFLOAT = 2.0**-8  # rounding unit
DTYPES = {"bfloat16": torch.bfloat16, "tfloat32": torch.float32, "float32": torch.float32}


@dataclass(frozen=True)
class Rounded:
    """Rows in low precision, with what their keys and the error of those need; padding has no key."""

    rows: Tensor  # y [n padded, d]
    half: Tensor  # N²/2 float32 [n padded], infinite where there is padding
    norm: Tensor  # N [n] float64
    gamma: float
    out: float  # o
    least: float  # what may be lost where products are smaller than float32 can say
    scale: float  # a power of two by which y and N were multiplied, so that squares stay within float32

    def error(self, norm: Tensor, squared: Tensor, *, within: Tensor) -> Tensor:
        """How far D may be off for any row at most `within` away whose D is at least `squared`.

        Its norm lies between the smallest and the largest there are, and no farther from N than `within`.
        """
        most = torch.minimum(norm + within, self.norm.max())
        least = torch.maximum(norm - within, self.norm.min())
        above, below = norm.square() + most.square() - squared, squared - norm.square() - least.square()
        rounding = self.out * torch.maximum(above, below).clamp_min(0.0)
        return self.gamma * (norm + most).square() + rounding + self.least


@dataclass(frozen=True)
class Candidates:
    """Pairs that may be neighbours, for some rows, ordered by row."""

    rows: Tensor  # [rows] their numbers
    line: Tensor  # [pairs] which of them
    column: Tensor  # [pairs]
    reach: Tensor  # [rows] D of the nearest row that is not listed, or less; infinite where all are listed
    low: Rounded

    def suffice(self, kth: Tensor) -> Tensor:
        """Whether the true distances to the k-th of the candidates prove that no other row is nearer."""
        kth = kth * self.low.scale
        proved = self.reach - self.low.error(self.low.norm[self.rows], self.reach, within=kth) >= kth.square()
        return proved | self.reach.isposinf()


def blocks(x: Tensor) -> Iterator[slice]:
    """Slices of rows whose float64 copies are small enough to stay near the processor."""
    step = max(1, (_WIDENED if x.device.type == "cpu" else _DEVICE_WIDENED) // max(1, x.shape[1]))
    for start in range(0, len(x), step):
        yield slice(start, min(start + step, len(x)))


def centre(x: Tensor) -> Tensor:
    """The median of some rows, coordinate by coordinate, in float64: a few rows of huge norm do not move it."""
    return x[:: -(-len(x) // _SEEN)].double().median(0).values


def rounded(x: Tensor, precision: str, *, pad: int, width: int = 1, fused: bool = False) -> Rounded:
    """Rows about their centre in low precision, their number padded to a multiple of `pad`, their width of `width`."""
    n, d = x.shape
    top = torch.stack([torch.stack(x[mine].aminmax()).abs().amax() for mine in blocks(x)]).amax()
    shift, scale = centre(x), 2.0 ** -math.frexp(float(top))[1]  # the largest number comes to about 1, no digit changes
    tall, wide = -(-n // pad) * pad, -(-d // width) * width
    rows = torch.zeros(tall, wide, dtype=DTYPES[precision], device=x.device)
    norm = torch.empty(n, dtype=torch.float64, device=x.device)
    lost = torch.zeros((), dtype=torch.float64, device=x.device)
    for mine in blocks(x):
        centred = x[mine].to(torch.float64, copy=True).sub_(shift).mul_(scale)
        norm[mine] = mine_norm = torch.linalg.vector_norm(centred, dim=1)
        if precision == "tfloat32":  # float32 rounded to the ten bits that TF32 products read
            rows[mine, :d] = ((centred.float().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
        else:
            rows[mine, :d] = centred
        gap = torch.linalg.vector_norm(centred.sub_(rows[mine, :d]), dim=1)
        lost = torch.maximum(lost, (gap / mine_norm.clamp_min(torch.finfo(torch.float64).tiny)).max())
    half = torch.full((tall,), torch.inf, dtype=torch.float32, device=x.device)
    half[:n] = norm.square() / 2
    out = _BFLOAT if rows.dtype == torch.bfloat16 and not fused else 0.0  # the kernel keeps its results in float32
    return Rounded(rows, half, norm, _gamma(float(lost), wide, x.device.type), out, (wide + 8) * 2.0**-124, scale)


def _gamma(eps: float, wide: int, device: str) -> float:
    """γ of rows that were rounded by at most ε of their norm."""
    # tensor cores cut sums where they should round, and align sixteen products at a time: less than twice as much
    sums = (wide + 8) * (2.0**-24 if device == "cpu" else 2.0**-23)
    return (2 * eps + 3 * eps**2 + sums * (1 + eps) ** 2) / 2 + 2.0**-23


@cache
def quick_precision() -> str:
    """bfloat16 where this processor multiplies it much quicker than float32: tried once, as no flag says so."""
    seconds = {}
    with one_thread():
        for precision in ("float32", "bfloat16"):
            y = torch.ones(512, 512, dtype=DTYPES[precision])
            # a busy machine makes some of them longer, none shorter
            seconds[precision] = min(timeit.repeat(partial(torch.matmul, y, y.T), number=1, repeat=8))
    return "bfloat16" if seconds["bfloat16"] < 0.75 * seconds["float32"] else "float32"


class _Block:
    """Keys of a block in groups: of columns that lie apart or, turned, of rows that lie together; quick to compare."""

    def __init__(self, keys: Tensor, columns: Tensor, *, turned: bool = False) -> None:
        self.keys, self.turned = keys, turned
        self.grouped = keys.unflatten(0, (-1, GROUP)) if turned else keys.unflatten(1, (GROUP, -1))
        self.peaks = self.grouped.amax(1).T if turned else self.grouped.amax(1)  # [rows, groups]
        self.columns = columns.view(-1, GROUP).T if turned else columns.view(GROUP, -1)  # [members, groups]


class _Best:
    """The keys of each row that were among its `wanted` largest when they were seen; `bar` bounds all others."""

    def __init__(self, n: int, wanted: int, device: torch.device) -> None:
        room = _SPARE * wanted
        self.wanted = wanted
        self.value = torch.full((n, room), -torch.inf, dtype=torch.float32, device=device)
        self.index = torch.zeros(n, room, dtype=torch.int64, device=device)
        self.count = torch.zeros(n, dtype=torch.int64, device=device)
        self.bar = torch.full((n,), -torch.inf, dtype=torch.float32, device=device)

    def take(self, mine: slice, block: _Block) -> None:
        """The keys of some rows, few of which are above their bar."""
        bar = self.bar[mine]
        row, group = (block.peaks > bar.unsqueeze(1)).nonzero(as_tuple=True)
        near = block.grouped[group, :, row] if block.turned else block.grouped[row, :, group]  # [groups, members]
        hit, member = (near > bar[row].unsqueeze(1)).nonzero(as_tuple=True)
        row, group = row[hit], group[hit]
        fresh = torch.bincount(row, minlength=len(bar))
        if int((self.count[mine] + fresh).max()) <= self.value.shape[1]:
            slot = self.count[mine][row] + torch.arange(len(row), device=row.device) - (fresh.cumsum(0) - fresh)[row]
            self.value[mine][row, slot] = near[hit, member]
            self.index[mine][row, slot] = block.columns[member, group]
            self.count[mine] += fresh
        elif bool((self.count[mine] > self.wanted).any()):
            self._keep(mine, self.value[mine], self.index[mine])  # raises the bar: look again
            self.take(mine, block)
        else:
            whole = block.keys.T.contiguous() if block.turned else block.keys
            near, place = whole.topk(self.wanted, dim=1, sorted=False)
            self.add(mine, near, place + block.columns[0, 0])

    def add(self, mine: slice, near: Tensor, columns: Tensor) -> None:
        """The largest keys [rows, some] of some rows, with their columns."""
        self._keep(mine, torch.cat([self.value[mine], near], 1), torch.cat([self.index[mine], columns], 1))

    def _keep(self, mine: slice, value: Tensor, index: Tensor) -> None:
        """The largest of these are what is known of some rows; their bar rises to the last that is kept."""
        best, order = value.topk(self.wanted, dim=1, sorted=False)
        self.value[mine, : self.wanted], self.value[mine, self.wanted :] = best, -torch.inf
        self.index[mine, : self.wanted] = index.gather(1, order)
        self.count[mine] = self.wanted
        self.bar[mine] = best.amin(1)


class _Screening:
    """Products of blocks of rows; each serves its rows and its columns."""

    def __init__(self, low: Rounded, wanted: int, side: int) -> None:
        self.low, self.side = low, side
        self.number = torch.arange(len(low.rows), device=low.rows.device)
        self.best = _Best(len(low.rows), wanted, low.rows.device)

    def alone(self, start: int) -> None:
        """A block with itself: it sets a bar for all that follow."""
        mine = slice(start, start + self.side)
        keys = self._product(mine, mine).sub_(self.low.half[mine]).fill_diagonal_(-torch.inf)
        near, place = keys.topk(min(self.best.wanted, len(keys)), dim=1, sorted=False)
        self.best.add(mine, near, place + start)

    def together(self, pair: tuple[int, int]) -> None:
        one, two = (slice(start, start + self.side) for start in pair)
        product, half = self._product(one, two), self.low.half
        keys = _memory("keys", product.shape, product)
        self.best.take(one, _Block(torch.sub(product, half[two], out=keys), self.number[two]))
        self.best.take(two, _Block(product.sub_(half[one].unsqueeze(1)), self.number[one], turned=True))

    def _product(self, one: slice, two: slice) -> Tensor:
        """The products of two blocks of rows in float32."""
        first, second = self.low.rows[one], self.low.rows[two]
        shape = (len(first), len(second))
        product = torch.mm(first, second.T, out=_memory("low", shape, first))
        return product if first.dtype == torch.float32 else _memory("float", shape, self.low.half).copy_(product)


def _memory(name: str, shape: Sequence[int], like: Tensor) -> Tensor:
    """A block that each thread of the host uses again: fresh pages cost as much as what is written to them."""
    if like.device.type == "cpu":
        return room(f"screening {name}", shape, like.dtype)
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)


def _rounds(items: list[int]) -> Iterator[list[tuple[int, int]]]:
    """All pairs, in rounds that have each item once at most: those of a round can be worked on at the same time.

    >>> list(_rounds([1, 2, 3]))
    [[(2, 3)], [(1, 3)], [(1, 2)]]
    """
    ring: list[int | None] = [*items, *([None] if len(items) % 2 else [])]
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        ring.insert(1, ring.pop())


def screen(low: Rounded, *, k: int, wanted: int) -> Iterator[Candidates]:
    """Candidates for the k nearest of every row."""
    n, on_host = len(low.norm), low.rows.device.type == "cpu"
    work = _Screening(low, wanted, _SIDE if on_host else _DEVICE_SIDE)
    best, starts = work.best, list(range(0, len(low.rows), work.side))
    each_on_host(work.alone, starts, low.rows.device.type)
    for pairs in _rounds(starts):
        each_on_host(work.together, pairs, low.rows.device.type)
    for mine in work.number[:n].split(_STRIP):
        yield _chosen(low, best.value[mine], best.index[mine], best.bar[mine], rows=mine, k=k)


def _chosen(low: Rounded, value: Tensor, index: Tensor, bar: Tensor, *, rows: Tensor, k: int) -> Candidates:
    """Of some rows' lists those that may be among the k nearest."""
    index = index.clamp_max(len(low.norm) - 1)  # padding has no key
    squared, error = squared_range(low, value, index, rows=rows)
    needed = squared - error <= (squared + error).kthvalue(k, dim=1, keepdim=True).values
    line, slot = (needed & value.isfinite()).nonzero(as_tuple=True)
    reach = low.norm[rows].square() - 2.0 * bar.double()
    if value.shape[1] >= _SPARE * (len(low.norm) - 1):
        reach.fill_(torch.inf)  # every other row is listed
    return Candidates(rows, line, index[line, slot], reach, low)


def squared_range(low: Rounded, value: Tensor, index: Tensor, *, rows: Tensor) -> tuple[Tensor, Tensor]:
    """D [rows, listed] of keys and columns of some rows, and how far it may be off."""
    mine = low.norm[rows].unsqueeze(1)
    squared = mine.square() - 2.0 * value.double()
    other = low.norm[index]
    rounding = (mine.square() + other.square() - squared).abs()
    return squared, low.gamma * (mine + other).square() + (low.out * rounding).nan_to_num_(0.0) + low.least
