"""The neighbour graph of a sample, from which leaving out rows needs no new search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from anisoscope.numerics.neighbors import first_equal, nearest

_READ = 4  # neighbours that a word of warning beside TwoNN reads
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
