"""Attention within the windows of a feature map: which position each place of a window holds.

Shapes: B contexts, W windows of w places each, h·w positions of the map in row-major order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from anisoscope.capture.rows import Index


@dataclass(frozen=True)
class Grid:
    """How the positions of a feature map lie in windows."""

    places: Tensor  # [W, w] position that each place holds, −1 where the map was padded
    allowed: Tensor  # [W, w, w] bool: places that are neighbours in the map, not only in the window
    known: bool = True  # whether the model says how; else positions are counted through the windows

    @property
    def positions(self) -> int:
        """Positions of the map."""
        return int((self.places >= 0).sum())

    @property
    def padded(self) -> bool:
        """Whether windows reach over the edge of the map."""
        return bool((self.places < 0).any())

    def restored(self, x: Tensor) -> Tensor:
        """[B·W, H, w, d] of the windows as [B, positions, H, d] of the map."""
        flat = x.transpose(1, 2).unflatten(0, (-1, len(self.places))).flatten(1, 2)
        return flat.index_select(1, self._order().to(x.device))

    def index(self, index: Index) -> Index:
        """An index of the map's positions as one of the windows' places: the same rows, in another order."""
        total = self.places.numel()
        keep = index.keep // index.length * total + self._order().to(index.keep.device)[index.keep % index.length]
        keep, order = keep.sort()
        names = ("context", "position", "token", "first")
        moved = {name: None if (x := getattr(index, name)) is None else x[order] for name in names}
        return replace(index, length=total, keep=keep, **moved)  # type: ignore[arg-type]

    def masks(self, contexts: int) -> Tensor:
        """Places that may attend to each other, [B·W, 1, w, w]."""
        return self.allowed.repeat(contexts, 1, 1).unsqueeze(1)

    def _order(self) -> Tensor:
        """The place of each position among those of all windows."""
        flat = self.places.flatten()
        found = (flat >= 0).nonzero().squeeze(1)
        return found[flat[found].argsort()]


def partition(height: int, width: int, *, size: int, shift: int) -> Grid:
    """Windows of size×size over a map that is padded to a multiple of it and, where shifted, turned around its edges.

    >>> partition(2, 3, size=2, shift=0).places.tolist()
    [[0, 1, 3, 4], [2, -1, 5, -1]]
    """
    tall, wide = (-(-side // size) * size for side in (height, width))
    row, column = torch.meshgrid(torch.arange(tall), torch.arange(wide), indexing="ij")
    position = torch.where((row < height) & (column < width), row * width + column, -1)
    places, rows, columns = (_windows(x.roll((-shift, -shift), (0, 1)), size) for x in (position, row, column))
    near = [(x[:, :, None] - x[:, None, :]).abs() < size for x in (rows, columns)]
    return Grid(places, near[0] & near[1])


def _windows(x: Tensor, size: int) -> Tensor:
    """[h, w] as [W, size²]."""
    parts = x.unflatten(1, (-1, size)).unflatten(0, (-1, size))  # [rows of windows, size, windows of a row, size]
    return parts.transpose(1, 2).flatten(2, 3).flatten(0, 1)


def grid_of(block: Any, dimensions: Any, *, windows: int, places: int) -> Grid:
    """The grid of a block that says its window and shift and is told the map's height and width; else a plain one."""
    size, shift = getattr(block, "window_size", None), getattr(block, "shift_size", None)
    if isinstance(size, int) and isinstance(shift, int) and dimensions is not None:
        found = partition(int(dimensions[0]), int(dimensions[1]), size=size, shift=max(0, shift))
        if tuple(found.places.shape) == (windows, places):
            return found
    counted = torch.arange(windows * places).view(windows, places)
    return Grid(counted, torch.ones(windows, places, places, dtype=torch.bool), known=False)
