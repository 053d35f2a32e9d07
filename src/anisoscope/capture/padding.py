"""Padding of sounds and images: the samples or pixels that each row reads, and detection of unmarked padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.errors import AnisoscopeError

_RATE = 16_000  # samples per second of every speech model here; mel frames come every 10 ms
_LEAST = 0.1  # seconds of one exact value at the end of a context from which it counts as padding
REPEATED = (
    "no attention_mask was given; ends of contexts that repeat one exact value for 0.1 s or more were taken as "
    "padding, though the model heard them: give attention_mask, or contexts of equal length"
)


def convolved(length: int, rows: int, layers: Sequence[tuple[int, int, int]]) -> tuple[Tensor, Tensor]:
    """First and one-past-last input position behind each of `rows` outputs of a chain of convolutions.

    `layers` are (kernel, stride, padding); the rows may be the outputs of any of them. Padding that a convolution adds
    itself at the ends of the input is not part of a window.

    >>> [x.tolist() for x in convolved(10, 5, [(3, 1, 1), (3, 2, 1)])]
    [[0, 0, 2, 4, 6], [3, 5, 7, 9, 10]]
    """
    begin, step, reach, out, found = 0, 1, 1, length, None
    for kernel, stride, padding in layers:
        out = (out + 2 * padding - kernel) // stride + 1
        begin, reach, step = begin - padding * step, reach + (kernel - 1) * step, step * stride
        found = (begin, step, reach) if out == rows else found
    if found is None:
        raise AnisoscopeError(
            f"a site has {rows} frames, which no convolution of the model makes of {length} input positions; give "
            "contexts of equal length, or a mask at the site's resolution with rows=…."
        )
    begin, step, reach = found
    start = torch.arange(rows) * step + begin
    return start.clamp(0, length), (start + reach).clamp(0, length)


def squeezed(length: int, rows: int, layers: Sequence[tuple[int, int, int]], *, factor: int) -> tuple[Tensor, Tensor]:
    """As `convolved`, for models that average every `factor` frames to one row, and later expand rows to frames again.

    Frames after the last complete group are filled with zeros and represent no input.

    >>> [x.tolist() for x in squeezed(10, 2, [(2, 2, 0)], factor=2)]
    [[0, 4], [4, 8]]
    >>> [x.tolist() for x in squeezed(10, 5, [(2, 2, 0)], factor=2)]
    [[0, 0, 4, 4, 10], [4, 4, 8, 8, 11]]
    """
    frames = length
    for kernel, stride, padding in layers:
        frames = (frames + 2 * padding - kernel) // stride + 1
    groups = frames // factor
    start, stop = convolved(length, groups, [*layers, (factor, factor, 0)])
    if rows == groups:
        return start, stop
    if rows not in (frames, groups * factor):
        convolved(length, rows, layers)  # raises the error
    start, stop = torch.cat([start, start.new_tensor([length])]), torch.cat([stop, stop.new_tensor([length + 1])])
    group = (torch.arange(rows) // factor).clamp(max=groups)
    return start[group], stop[group]


def trusted(frames: Tensor, real: Tensor) -> Tensor:
    """A model's own mask [B, T'] of its frames; an error if it keeps a larger share than that of data in [B, T].

    >>> trusted(torch.tensor([[True, False]]), torch.tensor([[True, True, False, False]])).tolist()
    [[True, False]]
    """
    most = real.sum(1) * frames.shape[1] / real.shape[1] + 1
    if bool((frames.sum(1) > most).any()):
        worst = int((frames.sum(1) - most).argmax())
        raise AnisoscopeError(
            f"the model's own mask keeps {int(frames[worst].sum())} of {frames.shape[1]} frames of a context of which "
            f"{int(real[worst].sum())} of {real.shape[1]} positions are data, so padding would be counted; give "
            "contexts of equal length, or a mask at the site's resolution with rows=…."
        )
    return frames


def without_repeated_end(content: Tensor, *, config: Any, notes: list[str]) -> Tensor | None:
    """Which samples are data [B, T] if ends of contexts repeat one exact value for 0.1 s or more; None if none does.

    Each context is judged by itself, so that a recording gives the same rows in any batch.

    >>> without_repeated_end(torch.arange(4000.0).clamp(max=2000)[None], config=None, notes=[]).sum().item()
    2000
    """
    mels = content.dim() == 3 and content.shape[1] == getattr(config, "num_mel_bins", None) != content.shape[2]
    x = (content.transpose(1, 2) if mels else content).detach().cpu()
    length, least = x.shape[1], round(_LEAST * (_RATE if x.dim() == 2 else 100))
    same = (x == x[:, -1:]).flatten(2).all(-1) if x.dim() == 3 else x == x[:, -1:]
    run = same.flip(1).long().cumprod(1).sum(1)
    run = torch.where((run >= least) & (run < length), run, torch.zeros_like(run))
    if not bool(run.any()):
        return None
    notes.append(REPEATED)
    return torch.arange(length) < (length - run)[:, None]


def unpadded_cells(pixels: Tensor, length: int) -> Tensor:
    """Which of the `length` positions of a feature map cover only data pixels [B, H, W]: bool [B, length].

    >>> mask = torch.ones(1, 4, 4, dtype=torch.bool)
    >>> mask[:, :, 3] = False
    >>> unpadded_cells(mask, 4).tolist()
    [[True, False, True, False]]
    """
    if bool(pixels.all()):
        return torch.ones(pixels.shape[0], length, dtype=torch.bool)
    size = (pixels.shape[1], pixels.shape[2])
    counts, strides = _grid(size, length)
    sums = nn.functional.pad(pixels.long().cumsum(1).cumsum(2), (1, 0, 1, 0))
    (top, bottom), (left, right) = (_cells(side, count, strides) for side, count in zip(size, counts, strict=True))
    inside = sums[:, bottom][:, :, right] - sums[:, top][:, :, right] - sums[:, bottom][:, :, left]
    inside = inside + sums[:, top][:, :, left]
    return (inside == torch.outer(bottom - top, right - left)).flatten(1)


def _grid(size: tuple[int, int], length: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Height and width of a map of `length` positions, and the smallest and largest stride that it may have.

    Both sides have the same stride; of several possible grids the one with the most similar aspect ratio is used.
    """
    found = []
    for counts in ((h, length // h) for h in range(1, length + 1) if length % h == 0):
        common = _strides(size[0], counts[0]) & _strides(size[1], counts[1])
        if common:
            ratio = size[0] * counts[1] / (size[1] * counts[0])
            exact = {s for s in common if size == (s * counts[0], s * counts[1])}
            meant = exact or {s for s in common if s & (s - 1) == 0} or common  # exact, a power of two, or any
            found.append((max(ratio, 1 / ratio), counts, (min(meant), max(meant))))
    if not found:
        raise AnisoscopeError(
            f"a site has {length} positions where the padded images have {size[0]}×{size[1]} pixels, and how they "
            "correspond is not known; give images of one size without padding."
        )
    return min(found)[1:]


def _strides(side: int, count: int) -> set[int]:
    """Strides that give `count` positions along a side, with a remainder either dropped or padded."""
    return {stride for stride in range(1, side + 1) if count in (side // stride, -(-side // stride))}


def _cells(side: int, count: int, strides: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """First and one-past-last pixel of each cell for any of the strides; a single cell covers the whole side."""
    number = torch.arange(count)
    stop = ((number + 1) * strides[1]).clamp(max=side)
    return (number * strides[0]).clamp(max=side), stop if count > 1 else stop.fill_(side)


def read_pixels(mask: Any, content: Tensor) -> Tensor | None:
    """A bool mask [B, H, W] from the pixel_mask of images [B, C, H, W]; None without one."""
    if not isinstance(mask, Tensor):
        return None
    expected = (content.shape[0], *content.shape[-2:])
    if tuple(mask.shape) != expected:
        raise AnisoscopeError(
            f"pixel_mask has shape {tuple(mask.shape)} beside images of shape {tuple(content.shape)}; expected "
            f"one value for each pixel, {expected}."
        )
    return mask.detach().cpu() != 0
