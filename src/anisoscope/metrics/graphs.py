"""Neighbour graphs of the batches of a sample, and what of them is left without some contexts."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from anisoscope.metrics.neighbourhoods import Neighbours
from anisoscope.stats.sample import Sample


@dataclass(frozen=True)
class Graph:
    """One batch's neighbour graph of its distinct rows, with the folds and first-position flags of all copies."""

    neighbours: Neighbours
    stands: Tensor  # for every row of the batch, the distinct row that stands for it
    fold: Tensor
    first: Tensor
    _left: dict[tuple[bool, int], Neighbours] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, sample: Sample, *, wanted: int, tolerance: float = 0.0) -> Graph:
        neighbours, stands = Neighbours.of(sample.rows.flatten(1), wanted, tolerance=tolerance)
        return cls(neighbours, stands, sample.fold, sample.label("first").bool())

    def left(self, *, without_first: bool = False, fold: int = -1) -> Neighbours:
        """The graph without the first rows of contexts, without a fold, or whole; made once for all metrics.

        A row that was seen several times goes only with the last of its copies.
        """
        key = (without_first, fold)
        if key not in self._left:
            mask = torch.zeros(len(self.neighbours), dtype=torch.bool)
            mask[self.stands[self._rows(*key)]] = True
            self._left[key] = self.neighbours if bool(mask.all()) else self.neighbours.keep(mask)
        return self._left[key]

    def duplicates(self, *, without_first: bool) -> int:
        """Rows removed because an equal one was there."""
        return int(self._rows(without_first).sum()) - len(self.left(without_first=without_first))

    def _rows(self, without_first: bool, fold: int = -1) -> Tensor:
        return (self.fold != fold) & ~self.first if without_first else self.fold != fold


def sample_graphs(sample: Sample, *, wanted: int, batch: int | None, tolerance: float = 0.0) -> list[Graph]:
    """Graphs of consecutive batches of the (hash-ordered, so shuffled) sample; a last short one only if it is alone.

    `tolerance`: rows closer than this share of their norm are one row.
    """
    masks = batch_masks(len(sample), batch or max(1, len(sample)))
    return [Graph.of(sample.select(mask), wanted=wanted, tolerance=tolerance) for mask in masks]


def batch_masks(rows: int, size: int) -> list[Tensor]:
    """Which rows belong to each batch of a size; a last short one is left out unless it is alone.

    >>> [int(mask.sum()) for mask in batch_masks(10, 4)], [int(mask.sum()) for mask in batch_masks(3, 4)]
    ([4, 4], [3])
    """
    order = torch.arange(rows)
    count = max(1, rows // size) if rows else 0
    return [(order >= i * size) & (order < (i + 1) * size) for i in range(count)]
