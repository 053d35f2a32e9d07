"""The screening of neighbours as one Triton kernel, which writes only the two largest keys of each group of columns.

A key is here yᵢ·yⱼ − Nⱼ²/2; notation otherwise as in `screening`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from anisoscope.numerics.screening import Candidates, Listed, Rounded, centre, rounded

# mypy: allow-untyped-defs, allow-incomplete-defs


PLACES = 32  # columns of a group
_TALL, _BROAD, _DEEP, _BESIDE = 128, 256, 64, 8
_PLACE_BITS = PLACES - 1
_LOWEST = -3.0e38  # finite, because setting the last bits of an infinity would make it NaN
_STRIP_BYTES = 2 << 30  # memory of the keys of a strip of rows
_PACKED = 2.0**-17  # addition to γ for the bits that hold the place


@triton.jit
def _best_of_groups(
    part, numbers, rows, half, first, second, blocks, columns, groups,
    WIDE: tl.constexpr, TALL: tl.constexpr, BROAD: tl.constexpr, DEEP: tl.constexpr, PLACES: tl.constexpr,
    BESIDE: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    """Compute a TALL × BROAD block of keys; store the two largest of each group of PLACES columns."""
    program = tl.program_id(0)
    band = program // (BESIDE * columns)  # consecutive programs share columns, which then come from the cache
    size = min(blocks - band * BESIDE, BESIDE)
    within = program % (BESIDE * columns)
    block, column = band * BESIDE + within % size, within // size
    line = (block * TALL + tl.arange(0, TALL)).to(tl.int64)
    other = column * BROAD + tl.arange(0, BROAD)
    depth = tl.arange(0, DEEP)
    left = part + line[:, None] * WIDE + depth[None, :]
    right = rows + other.to(tl.int64)[None, :] * WIDE + depth[:, None]
    total = tl.zeros((TALL, BROAD), dtype=tl.float32)
    for _ in range(0, WIDE, DEEP):
        total = tl.dot(tl.load(left), tl.load(right), total)
        left += DEEP
        right += DEEP
    keys = tl.maximum(total - tl.load(half + other)[None, :], LOWEST)
    keys = tl.where(tl.load(numbers + line)[:, None] == other[None, :], LOWEST, keys)
    bits = (keys.to(tl.int32, bitcast=True) & -PLACES) | (other % PLACES)[None, :]
    keys = tl.reshape(bits.to(tl.float32, bitcast=True), (TALL, BROAD // PLACES, PLACES))
    best = tl.max(keys, 2)
    next_best = tl.max(tl.where(keys == best[:, :, None], LOWEST, keys), 2)
    place = line[:, None] * groups + (column * (BROAD // PLACES) + tl.arange(0, BROAD // PLACES))[None, :]
    tl.store(first + place, best)
    tl.store(second + place, next_best)


@triton.jit
def _squared_differences(rows, one, two, out, width, stride, BLOCK: tl.constexpr):
    """‖x_i − x_j‖² of one pair of rows in float64."""
    pair = tl.program_id(0).to(tl.int64)
    left, right = rows + tl.load(one + pair) * stride, rows + tl.load(two + pair) * stride
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for begin in range(0, width, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        inside = place < width
        gap = tl.load(left + place, inside, 0.0).to(tl.float64) - tl.load(right + place, inside, 0.0).to(tl.float64)
        total += gap * gap
    tl.store(out + pair, tl.sum(total))


def pair_distances(x: Tensor, one: Tensor, two: Tensor) -> Tensor:
    """‖x_i − x_j‖ of pairs of rows in float64; each row of x must be contiguous."""
    out = torch.empty(len(one), dtype=torch.float64, device=x.device)
    if len(one):
        one, two = one.contiguous(), two.contiguous()  # the kernel assumes it
        _squared_differences[(len(one),)](x, one, two, out, x.shape[1], x.stride(0), BLOCK=256, num_warps=2)
    return out.sqrt_()


def screen_fused(x: Tensor, precision: str, *, rows: Tensor, k: int, wanted: int) -> Iterator[Candidates]:
    """Candidates for the k nearest of some rows, a strip of them at a time."""
    low = rounded(x, precision, shift=centre(x), pad=_BROAD, width=_DEEP, fused=True)
    low = replace(low, gamma=low.gamma + _PACKED)
    step = max(_TALL, _STRIP_BYTES // (8 * len(low.rows) // PLACES) // _TALL * _TALL)
    for part in rows.split(step):
        best, next_best = _groups(low, part)
        yield _chosen(low, best, next_best, rows=part, k=k, wanted=wanted)


def _groups(low: Rounded, part: Tensor) -> tuple[Tensor, Tensor]:
    """The best and the next best key of every group of columns [rows, groups] for some rows."""
    tall, wide = low.rows.shape
    blocks, columns = -(-len(part) // _TALL), tall // _BROAD
    numbers = torch.nn.functional.pad(part, (0, blocks * _TALL - len(part)))  # padded with row 0, cut off below
    left_rows = low.rows[numbers]
    best = torch.empty(len(left_rows), tall // PLACES, dtype=torch.float32, device=left_rows.device)
    next_best = torch.empty_like(best)
    deep, stages = (_DEEP, 3) if left_rows.dtype == torch.bfloat16 else (_DEEP // 2, 3)
    _best_of_groups[(blocks * columns,)](
        left_rows, numbers, low.rows, low.half, best, next_best, blocks, columns, tall // PLACES,
        WIDE=wide, TALL=_TALL, BROAD=_BROAD, DEEP=deep, PLACES=PLACES, BESIDE=_BESIDE, LOWEST=_LOWEST,
        num_warps=8, num_stages=stages,
    )  # fmt: skip
    return best[: len(part)], next_best[: len(part)]


def _chosen(low: Rounded, best: Tensor, next_best: Tensor, *, rows: Tensor, k: int, wanted: int) -> Candidates:
    """The columns that may be among the k nearest."""
    value, group = best.topk(min(wanted, best.shape[1] - 1) + 1, dim=1)
    squares = low.norm[rows].square().unsqueeze(1)
    column = group * PLACES + (value.contiguous().view(torch.int32) & _PLACE_BITS)
    second = squares - 2.0 * next_best.gather(1, group).double()
    places = torch.arange(PLACES, device=group.device)
    listed = Listed(
        rows, squares - 2.0 * value.double(), column, second, group, lambda some: some.unsqueeze(-1) * PLACES + places
    )
    return listed.chosen(low, k=k)
