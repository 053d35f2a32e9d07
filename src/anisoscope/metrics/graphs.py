"""Neighbour graphs of the batches of a sample, and what of them is left without some contexts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from anisoscope.metrics.neighbourhoods import Neighbours
from anisoscope.stats.sample import Sample

_BLOCK = 2**22  # distances of lines that are looked at together; those of many rows come one by one


@dataclass(frozen=True)
class Graph:
    """One batch's neighbour graph of its distinct rows, with the folds and first-position flags of all copies."""

    neighbours: Neighbours
    stands: Tensor  # for every row of the batch, the distinct row that stands for it
    fold: Tensor
    first: Tensor
    _left: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, sample: Sample, *, wanted: int, tolerance: float = 0.0, spare: bool = True) -> Graph:
        neighbours, stands = Neighbours.of(sample.rows.flatten(1), wanted, tolerance=tolerance, spare=spare)
        return cls(neighbours, stands, sample.fold, sample.label("first").bool())

    def left(self, *, without_first: bool = False, fold: int = -1) -> Neighbours:
        """The graph without the first rows of contexts, without a fold, or whole; made once for all metrics.

        A row that was seen several times goes only with the last of its copies.
        """
        key = (without_first, fold)
        if key not in self._left:
            mask = self._there(without_first, [fold])[0]
            whole = bool(mask.all())
            self._left[key] = self.neighbours if whole else self.neighbours.keep(mask.to(self.neighbours.index.device))
        found: Neighbours = self._left[key]
        return found

    def lines(self, *, without_first: bool, folds: Sequence[int]) -> list[Neighbours]:
        """The same without each of these folds (−1: none), as lines; in several parts where there are many rows."""
        key = ("lines", without_first, *folds)
        if key not in self._left:
            index = self.neighbours.index
            there = self._there(without_first, folds).to(index.device)
            size = max(1, _BLOCK // max(1, index.numel()))
            self._left[key] = [self.neighbours.lines(part) for part in there.split(size)]
        found: list[Neighbours] = self._left[key]
        return found

    def rows(self, *, without_first: bool) -> tuple[int, int]:
        """Distinct rows, and how many were removed because an equal one was there."""
        distinct = int(self._there(without_first, [-1]).sum())
        return distinct, int(self._rows(without_first, [-1]).sum()) - distinct

    def _there(self, without_first: bool, folds: Sequence[int]) -> Tensor:
        """Which distinct rows are left without each of these folds: [folds, n]."""
        found = torch.zeros(len(folds), len(self.neighbours), dtype=torch.int32)
        return found.index_add_(1, self.stands, self._rows(without_first, folds).to(torch.int32)) > 0

    def _rows(self, without_first: bool, folds: Sequence[int]) -> Tensor:
        stay = self.fold != torch.tensor(folds).unsqueeze(1)
        return stay & ~self.first if without_first else stay


def sample_graphs(
    sample: Sample, *, wanted: int, batch: int | None, tolerance: float = 0.0, spare: bool = True
) -> list[Graph]:
    """Graphs of consecutive batches of the (hash-ordered, so shuffled) sample; a last short one only if it is alone.

    `tolerance`: rows closer than this share of their norm are one row; without `spare` no rows can be left out.
    """
    parts = batches(sample, batch or max(1, len(sample)))
    return [Graph.of(part, wanted=wanted, tolerance=tolerance, spare=spare) for part in parts]


def batches(sample: Sample, size: int) -> list[Sample]:
    """Consecutive batches of a size; a last short one is left out unless it is alone.

    >>> ten = Sample(10).update(torch.eye(10), context=torch.arange(10))
    >>> [len(part) for part in batches(ten, 4)], [len(part) for part in batches(ten, 12)]
    ([4, 4], [10])
    """
    count = max(1, len(sample) // size) if len(sample) else 0
    return [sample.part(i * size, (i + 1) * size) for i in range(count)]
