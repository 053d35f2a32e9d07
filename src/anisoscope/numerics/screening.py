"""Candidates for nearest neighbours, from low-precision products with an error bound for each row.

Notation: c centred rows, N their norms, y the same rows rounded; key_ij = yᵢ·yⱼ − Nⱼ²/2 is larger for nearer
rows: D_ij = Nᵢ² − 2 key_ij is ‖cᵢ − cⱼ‖² up to γ (Nᵢ + Nⱼ)² + o |Nᵢ² + Nⱼ² − D_ij|. γ holds the
rounding of the rows (measured, by Cauchy–Schwarz: ε = max ‖c − y‖/‖c‖), of the sums in the product (s) and of the key:
2 (2ε + 3ε² + s) Nᵢ Nⱼ + 2⁻²³ (Nᵢ + Nⱼ)², where Nᵢ Nⱼ ≤ (Nᵢ + Nⱼ)²/4; o is the rounding of a product's result. The
bound also has a term for float32 underflow, which matters where one row is 10¹⁸ times as large as the others."""

from __future__ import annotations

import math
import timeit
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from anisoscope.numerics.host import each_on_host, one_thread, room

GROUP = 16  # keys per group; the others are read only if the largest exceeds the bar
_SIDE = 1024  # rows of a square block of keys; a few such blocks fit into the last-level cache of the CPU
_DEVICE_SIDE = 8192
_SPARE = 3  # capacity of each row's list in units of the wanted number; a full list is reduced to that number
_WIDENED = 1 << 17  # elements converted to float64 at a time
_DEVICE_WIDENED = 1 << 26
_SEEN = 1024  # rows that the centre is computed from
_MIDDLES = 1 << 20  # elements whose medians are taken at a time
_STRIP = 16384  # rows per `Candidates` object
_BFLOAT = 2.0**-8  # rounding unit
DTYPES = {"bfloat16": torch.bfloat16, "tfloat32": torch.float32, "float32": torch.float32}


@dataclass(frozen=True)
class Rounded:
    """Rows in low precision, with the norms and constants of their keys and error bounds; padding has no key."""

    rows: Tensor  # y [n padded, d]
    half: Tensor  # N²/2 float32 [n padded], infinite where there is padding
    norm: Tensor  # N [n] float64
    gamma: float
    out: float  # o
    least: float  # bound on the loss by float32 underflow
    scale: float  # power of two by which y and N were multiplied, so that squares stay within float32

    def error(self, norm: Tensor, squared: Tensor, *, within: Tensor) -> Tensor:
        """Bound on the error of D for rows at distance at most `within` whose D is at least `squared`.

        It holds because the norm of such a row differs from N by at most `within`.
        """
        most = torch.minimum(norm + within, self.norm.max())
        least = torch.maximum(norm - within, self.norm.min())
        above, below = norm.square() + most.square() - squared, squared - norm.square() - least.square()
        rounding = self.out * torch.maximum(above, below).clamp_min(0.0)
        return self.gamma * (norm + most).square() + rounding + self.least


@dataclass(frozen=True)
class Candidates:
    """Pairs of rows that may be neighbours, for a subset of the rows, ordered by row."""

    rows: Tensor  # [rows] indices of the subset
    line: Tensor  # [pairs] position in `rows` of the first row of a pair
    column: Tensor  # [pairs] index of the second row of a pair
    reach: Tensor  # [rows] lower bound on D of all rows that are not listed; infinite where all are listed
    low: Rounded

    def suffice(self, kth: Tensor) -> Tensor:
        """Whether [rows] the true distance to the k-th candidate proves that no row outside the list is nearer."""
        kth = kth * self.low.scale
        proved = self.reach - self.low.error(self.low.norm[self.rows], self.reach, within=kth) >= kth.square()
        return proved | self.reach.isposinf()


def blocks(x: Tensor) -> Iterator[slice]:
    """Slices of rows whose float64 copies fit into the cache."""
    step = max(1, (_WIDENED if x.device.type == "cpu" else _DEVICE_WIDENED) // max(1, x.shape[1]))
    for start in range(0, len(x), step):
        yield slice(start, min(start + step, len(x)))


def centre(x: Tensor) -> Tensor:
    """The coordinate-wise median of some rows, in float64, which is robust to a few rows of huge norm."""
    seen = x[:: -(-len(x) // _SEEN)]
    step = max(1, (_MIDDLES if x.device.type == "cpu" else _DEVICE_WIDENED) // len(seen))
    found = torch.empty(x.shape[1], dtype=torch.float64, device=x.device)
    for part in (slice(start, start + step) for start in range(0, len(found), step)):
        found[part] = seen[:, part].double().median(0).values
    return found


def rounded(x: Tensor, precision: str, *, pad: int, width: int = 1, fused: bool = False) -> Rounded:
    """Centred rows in low precision, padded to a multiple of `pad` rows and of `width` columns."""
    n, d = x.shape
    top = torch.stack([torch.stack(x[part].aminmax()).abs().amax() for part in blocks(x)]).amax()
    shift, scale = centre(x), 2.0 ** -math.frexp(float(top))[1]  # scales the largest entry to about 1, exactly
    tall, wide = -(-n // pad) * pad, -(-d // width) * width
    rows = torch.zeros(tall, wide, dtype=DTYPES[precision], device=x.device)
    norm = torch.empty(n, dtype=torch.float64, device=x.device)
    lost = torch.zeros((), dtype=torch.float64, device=x.device)
    for part in blocks(x):
        centred = x[part].to(torch.float64, copy=True).sub_(shift).mul_(scale)
        norm[part] = part_norm = torch.linalg.vector_norm(centred, dim=1)
        if precision == "tfloat32":  # float32 rounded to the 10 mantissa bits that TF32 products use
            rows[part, :d] = ((centred.float().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
        else:
            rows[part, :d] = centred
        gap = torch.linalg.vector_norm(centred.sub_(rows[part, :d]), dim=1)
        lost = torch.maximum(lost, (gap / part_norm.clamp_min(torch.finfo(torch.float64).tiny)).max())
    half = torch.full((tall,), torch.inf, dtype=torch.float32, device=x.device)
    half[:n] = norm.square() / 2
    out = _BFLOAT if rows.dtype == torch.bfloat16 and not fused else 0.0  # the fused kernel accumulates in float32
    # tensor cores truncate instead of rounding and align 16 products at a time: at most twice the error
    eps, sums = float(lost), (wide + 8) * (2.0**-24 if x.device.type == "cpu" else 2.0**-23)
    gamma = (2 * eps + 3 * eps**2 + sums * (1 + eps) ** 2) / 2 + 2.0**-23
    return Rounded(rows, half, norm, gamma, out, (wide + 8) * 2.0**-124, scale)


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


class _Block:
    """Keys of a block with the maximum of each group of GROUP columns (of rows, if `turned`), for quick comparison."""

    def __init__(self, keys: Tensor, columns: Tensor, *, turned: bool = False) -> None:
        self.keys, self.turned = keys, turned
        self.grouped = keys.unflatten(0, (-1, GROUP)) if turned else keys.unflatten(1, (GROUP, -1))
        self.peaks = self.grouped.amax(1).T if turned else self.grouped.amax(1)  # [rows, groups]
        self.columns = columns.view(-1, GROUP).T if turned else columns.view(GROUP, -1)  # [members, groups]


class _Screening:
    """A running list of each row's largest keys; `bar` is an upper bound on the keys that are not listed.

    Keys come from products of pairs of blocks; by symmetry each product serves the rows of both blocks.
    """

    def __init__(self, low: Rounded, wanted: int, side: int) -> None:
        self.low, self.wanted, self.side = low, wanted, side
        n, capacity, device = len(low.rows), _SPARE * wanted, low.rows.device
        self.number = torch.arange(n, device=device)
        self.value = torch.full((n, capacity), -torch.inf, dtype=torch.float32, device=device)
        self.index = torch.zeros(n, capacity, dtype=torch.int64, device=device)
        self.count = torch.zeros(n, dtype=torch.int64, device=device)
        self.bar = torch.full((n,), -torch.inf, dtype=torch.float32, device=device)

    def within(self, start: int) -> None:
        """Process a block with itself, which sets the first bars of its rows."""
        part = slice(start, start + self.side)
        keys = self._product(part, part).sub_(self.low.half[part]).fill_diagonal_(-torch.inf)
        near, place = keys.topk(min(self.wanted, len(keys)), dim=1, sorted=False)
        self._add(part, near, place + start)

    def between(self, pair: tuple[int, int]) -> None:
        upper, lower = (slice(start, start + self.side) for start in pair)
        product, half = self._product(upper, lower), self.low.half
        keys = _memory("keys", product.shape, product)
        self._take(upper, _Block(torch.sub(product, half[lower], out=keys), self.number[lower]))
        self._take(lower, _Block(product.sub_(half[upper].unsqueeze(1)), self.number[upper], turned=True))

    def _product(self, first: slice, second: slice) -> Tensor:
        """The products of two blocks of rows in float32."""
        left, right = self.low.rows[first], self.low.rows[second]
        shape = (len(left), len(right))
        product = torch.mm(left, right.T, out=_memory("low", shape, left))
        return product if left.dtype == torch.float32 else _memory("float", shape, self.low.half).copy_(product)

    def _take(self, part: slice, block: _Block) -> None:
        """Add the keys of a block for some rows; fast if few of them are above the bar."""
        bar = self.bar[part]
        row, group = (block.peaks > bar.unsqueeze(1)).nonzero(as_tuple=True)
        near = block.grouped[group, :, row] if block.turned else block.grouped[row, :, group]  # [groups, members]
        hit, member = (near > bar[row].unsqueeze(1)).nonzero(as_tuple=True)
        row, group = row[hit], group[hit]
        fresh = torch.bincount(row, minlength=len(bar))
        if int((self.count[part] + fresh).max()) <= self.value.shape[1]:
            slot = self.count[part][row] + torch.arange(len(row), device=row.device) - (fresh.cumsum(0) - fresh)[row]
            self.value[part][row, slot] = near[hit, member]
            self.index[part][row, slot] = block.columns[member, group]
            self.count[part] += fresh
        elif bool((self.count[part] > self.wanted).any()):
            self._keep(part, self.value[part], self.index[part])  # raises the bar, so that fewer keys are added
            self._take(part, block)
        else:
            whole = block.keys.T.contiguous() if block.turned else block.keys
            near, place = whole.topk(self.wanted, dim=1, sorted=False)
            self._add(part, near, place + block.columns[0, 0])

    def _add(self, part: slice, near: Tensor, columns: Tensor) -> None:
        """Add keys [rows, m] of some rows, with their columns."""
        self._keep(part, torch.cat([self.value[part], near], 1), torch.cat([self.index[part], columns], 1))

    def _keep(self, part: slice, value: Tensor, index: Tensor) -> None:
        """Replace the lists of some rows by the `wanted` largest of these keys, and their bars by the smallest kept."""
        best, order = value.topk(self.wanted, dim=1, sorted=False)
        self.value[part, : self.wanted], self.value[part, self.wanted :] = best, -torch.inf
        self.index[part, : self.wanted] = index.gather(1, order)
        self.count[part] = self.wanted
        self.bar[part] = best.amin(1)


def _memory(name: str, shape: Sequence[int], like: Tensor) -> Tensor:
    """A buffer; on the host each thread reuses its own, since page faults of new memory cost as much as writing it."""
    if like.device.type == "cpu":
        return room(f"screening {name}", shape, like.dtype)
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)


def _rounds(items: list[int]) -> Iterator[list[tuple[int, int]]]:
    """All pairs of items, in rounds in which each item occurs at most once, so that a round can run in parallel.

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
    """Candidates for the k nearest neighbours of every row, a strip of rows at a time."""
    n, on_host = len(low.norm), low.rows.device.type == "cpu"
    work = _Screening(low, wanted, _SIDE if on_host else _DEVICE_SIDE)
    starts = list(range(0, len(low.rows), work.side))
    each_on_host(work.within, starts, low.rows.device.type)
    for pairs in _rounds(starts):
        each_on_host(work.between, pairs, low.rows.device.type)
    for part in work.number[:n].split(_STRIP):
        yield _chosen(low, work.value[part], work.index[part], work.bar[part], rows=part, k=k)


def _chosen(low: Rounded, value: Tensor, index: Tensor, bar: Tensor, *, rows: Tensor, k: int) -> Candidates:
    """The entries of some rows' lists that may, within the error bounds, be among the k nearest."""
    index = index.clamp_max(len(low.norm) - 1)  # entries of padding have infinite keys and are dropped below
    squared, error = squared_range(low, value, index, rows=rows)
    needed = squared - error <= (squared + error).kthvalue(k, dim=1, keepdim=True).values
    line, slot = (needed & value.isfinite()).nonzero(as_tuple=True)
    reach = low.norm[rows].square() - 2.0 * bar.double()
    if value.shape[1] >= _SPARE * (len(low.norm) - 1):
        reach.fill_(torch.inf)  # every other row is listed
    return Candidates(rows, line, index[line, slot], reach, low)


def squared_range(low: Rounded, value: Tensor, index: Tensor, *, rows: Tensor) -> tuple[Tensor, Tensor]:
    """D [rows, listed] from keys and column indices of some rows, and the bound on its error."""
    norm, other = low.norm[rows].unsqueeze(1), low.norm[index]
    squared = norm.square() - 2.0 * value.double()
    rounding = low.out * (norm.square() + other.square() - squared).abs()
    return squared, low.gamma * (norm + other).square() + rounding.nan_to_num_(0.0) + low.least
