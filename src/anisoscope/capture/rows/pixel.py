"""Images: which positions of a feature map see padding, and in which order a map has its channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.errors import AnisoscopeError
from anisoscope.models.forward import PIXEL_MASK


def unpadded_cells(pixels: Tensor, length: int) -> Tensor:
    """Which of `length` positions of a feature map stand for a cell [B, H, W] of pixels that are all data: [B, length].

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
    """Height and width of a map of `length` positions, and the least and the greatest stride that it may have.

    Both sides have one stride; of several grids, the one whose shape is nearest to that of the image.
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
    """Strides that make `count` positions of a side: a remainder is left out, or filled up to one position more."""
    return {stride for stride in range(1, side + 1) if count in (side // stride, -(-side // stride))}


def _cells(side: int, count: int, strides: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """First and one-past-last pixel of each cell, whichever of the strides is meant; one alone has the whole side."""
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


def with_pixel_mask(arguments: dict[str, Any], *others: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a forward with the pixel_mask of the outer model or batch, where that was not passed on."""
    given = [found[PIXEL_MASK] for found in (arguments, *others) if isinstance(found.get(PIXEL_MASK), Tensor)]
    return {**arguments, PIXEL_MASK: given[0]} if given else arguments


def reads_last(model: nn.Module, layout: Any, site: Any, shape: torch.Size) -> bool:
    """Whether a site of a layout, or a module that the user named, has its channels last."""
    path = site.name or layout.stack(site.stack).module_at(site)
    return channels_last(model.get_submodule(path), shape)


def channels_last(module: nn.Module, shape: torch.Size) -> bool:
    """Whether a map of this shape that a module gave or took is [B, H, W, C] rather than [B, C, H, W].

    Convolutions have the channels first, linear maps and layer norms last; the side whose size is a width of theirs
    tells. Where both sides or neither are, a module with convolutions has them first.

    >>> channels_last(nn.Linear(6, 8), torch.Size([2, 5, 5, 8]))
    True
    """
    parts = list(module.modules())
    convolved = [part for part in parts if isinstance(part, (nn.Conv2d, nn.BatchNorm2d))]
    mapped = [part for part in parts if isinstance(part, (nn.Linear, nn.LayerNorm))]
    first, last = (side in set().union(*map(_widths, of)) for side, of in ((shape[1], convolved), (shape[3], mapped)))
    return last if first != last else bool(mapped) and not convolved


def _widths(part: nn.Module) -> set[int]:
    names = ("in_channels", "out_channels", "in_features", "out_features", "num_features")
    sizes = [getattr(part, name, None) for name in names]
    sizes += [getattr(part, "normalized_shape", (None,))[-1]]
    return {size for size in sizes if isinstance(size, int)}
