"""Neighbour graphs of rows and of the batches of a sample; leaving out rows needs no new search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from anisoscope.numerics.neighbours.search import first_equal, nearest
from anisoscope.stats.sample import Sample

_READ = 4  # neighbours that the warning beside TwoNN reads
_ROUNDS = 8  # looks for near-duplicates: a row sees as many at a time as it has neighbours


def spared(wanted: int) -> int:
    """Neighbours held for a metric that reads `wanted`: leaving out a fold, a quarter of a half, seldom runs out.

    >>> spared(2), spared(20)
    (9, 36)
    """
    return wanted + 6 + wanted // 2


def _first_near(rows: Tensor, distance: Tensor, index: Tensor, tolerance: float) -> Tensor:
    """For every row the earliest one within the tolerance, or itself: the sample's order, which no batching changes."""
    limit = tolerance * torch.linalg.vector_norm(rows.double(), dim=1, keepdim=True)
    own = torch.arange(len(rows), device=index.device).unsqueeze(1)
    return torch.where((distance <= limit.to(distance.device)) & (index < own), index, own).amin(1)


def _standing(stands: Tensor) -> Tensor:
    """Rows that stand for themselves."""
    return (stands == torch.arange(len(stands), device=stands.device)).nonzero().squeeze(1)


def _numbered(stands: Tensor, kept: Tensor) -> Tensor:
    """The place in `kept` of the row that stands for each; a row may stand for it by way of others.

    >>> _numbered(torch.tensor([0, 0, 2, 1]), torch.tensor([0, 2])).tolist()
    [0, 0, 1, 0]
    """
    while not bool((stands[stands] == stands).all()):
        stands = stands[stands]
    return torch.searchsorted(kept, stands)


@dataclass(frozen=True)
class Neighbours:
    """Distances to the nearest distinct rows, ascending; rows that ran out of neighbours are dropped.

    `wanted` is how many neighbours the metrics read; the graph holds a few more for leaving rows out. A leading
    dimension, where there is one, are lines: the same rows with some of them left out, at infinite distances.
    """

    distance: Tensor  # [..., n, k] float64
    index: Tensor  # [..., n, k]
    wanted: int
    duplicates: int = 0  # rows removed because an equal one was there
    there: Tensor | None = None  # [..., n] rows that were not left out, unless all are there
    known: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, rows: Tensor, wanted: int, *, tolerance: float = 0.0, spare: bool = True) -> tuple[Neighbours, Tensor]:
        """The graph of the distinct rows, and for every row the number of the distinct row that stands for it.

        Rows closer than `tolerance` times their norm count as equal: a causal model gives equal rows for equal
        prefixes, but a float32 forward pass makes them bit-equal in some batches and not in others.
        """
        stands = first_equal(rows)
        kept = _standing(stands)
        if len(kept) < 2:
            empty = torch.empty(len(kept), 0)
            return cls(empty.double(), empty.long(), wanted, len(rows) - len(kept)), torch.zeros(len(rows)).long()
        distinct, held = rows if len(kept) == len(rows) else rows[kept], spared(wanted) if spare else max(wanted, _READ)
        distance, index = nearest(distinct, held)
        for _ in range(_ROUNDS if tolerance else 0):
            earlier = _first_near(distinct, distance, index, tolerance).to(kept.device)
            if bool((kept[earlier] == kept).all()):
                break
            stands[kept] = kept[earlier]
            kept = _standing(stands)
            if len(kept) < 2:
                distance, index = distance[:1, :0], index[:1, :0]
                break
            distinct = rows[kept]
            distance, index = nearest(distinct, held)
        graph = cls(distance, index, wanted, len(rows) - len(kept))
        return graph, _numbered(stands.cpu(), kept.cpu())

    def __len__(self) -> int:
        return len(self.distance)

    def first(self, k: int) -> Tensor:
        """Distances to the k nearest, of the rows that have that many: [n', k]."""
        near = self.distance[:, :k]
        return near[near[:, -1].isfinite()] if near.shape[1] == k else near[:0]

    def near(self, k: int) -> tuple[Tensor, Tensor]:
        """Distances to the k nearest [..., n, k], and which rows have that many [..., n]."""
        near = self.distance[..., :k]
        if near.shape[-1] < k:
            near = torch.nn.functional.pad(near, (0, k - near.shape[-1]), value=torch.inf)
        return near, near[..., -1] < torch.inf

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What several metrics share, made when the first asks."""
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]

    def lines(self, there: Tensor) -> Neighbours:
        """The graph among the rows where each line of a mask [lines, n] holds; rows keep their numbers."""
        left = there[:, self.index].logical_and_(there.unsqueeze(2))
        # where each neighbour that is left comes to stand; the column behind the last takes what is not wanted
        place = left.cumsum(-1).sub_(1).masked_fill_(left.logical_not_(), self.wanted).clamp_max_(self.wanted)
        shape = (*left.shape[:2], self.wanted + 1)
        distance = self.distance.new_full(shape, torch.inf).scatter_(2, place, self.distance.expand(left.shape))
        index = self.index.new_zeros(shape).scatter_(2, place, self.index.expand(left.shape))
        return Neighbours(distance[..., : self.wanted], index[..., : self.wanted], self.wanted, there=there)

    def keep(self, mask: Tensor) -> Neighbours:
        """The graph among the rows where the mask holds: the same distances, the others left out."""
        gone = ~mask[self.index]
        # a stable sort moves the neighbours that are left to the front without changing their order
        order = gone.to(torch.int8).sort(dim=1, stable=True).indices[:, : self.wanted]
        distance = self.distance.masked_fill(gone, torch.inf).gather(1, order)
        renumbered = torch.cumsum(mask, 0) - 1
        index = renumbered[self.index.gather(1, order)]
        return Neighbours(distance[mask], index[mask], self.wanted)


# -- graphs of the batches of a sample, and what is left of them without some contexts --

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
