"""The neighbour graph of a sample, from which leaving out rows needs no new search."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from anisoscope.numerics.neighbors import distinct_rows, nearest

_ROUNDS = 8  # looks for near-duplicates: a row sees as many at a time as it has neighbours


def spared(wanted: int) -> int:
    """Neighbours held for a metric that reads `wanted`: leaving out a fold, a quarter of a half, seldom runs out.

    >>> spared(2), spared(20)
    (9, 36)
    """
    return wanted + 6 + wanted // 2


def _repeated(rows: Tensor, distance: Tensor, index: Tensor, tolerance: float) -> Tensor:
    """Rows that repeat an earlier one within the tolerance, in the order of the sample, which no batching changes."""
    limit = tolerance * torch.linalg.vector_norm(rows.double(), dim=1, keepdim=True)
    later = index < torch.arange(len(rows), device=index.device).unsqueeze(1)
    return ((distance <= limit.to(distance.device)) & later).any(1)


@dataclass(frozen=True)
class Neighbours:
    """Distances to the nearest distinct rows, ascending; rows that ran out of neighbours are dropped.

    `wanted` is how many neighbours the metrics read; the graph holds a few more for leaving rows out.
    """

    distance: Tensor  # [n, k] float64
    index: Tensor  # [n, k]
    wanted: int
    duplicates: int = 0  # rows removed because an equal one was there

    @classmethod
    def of(cls, rows: Tensor, wanted: int, *, tolerance: float = 0.0) -> tuple[Neighbours, Tensor]:
        """The graph of the distinct rows, and which rows those are.

        Rows closer than `tolerance` times their norm count as equal: a causal model gives equal rows for equal
        prefixes, but a float32 forward pass makes them bit-equal in some batches and not in others.
        """
        kept = distinct_rows(rows)
        if len(kept) < 2:
            empty = torch.empty(len(kept), 0)
            return cls(empty.double(), empty.long(), wanted, len(rows) - len(kept)), kept
        # squares of rows far from 1 would leave float32; a power of two changes no digit
        scale = 2.0 ** math.frexp(float(rows.abs().max()))[1]
        distance, index = nearest(rows[kept] / scale, spared(wanted))
        for _ in range(_ROUNDS if tolerance else 0):
            again = _repeated(rows[kept] / scale, distance, index, tolerance)
            if not bool(again.any()):
                break
            kept = kept[~again.to(kept.device)]
            if len(kept) < 2:
                distance, index = distance[:1, :0], index[:1, :0]
                break
            distance, index = nearest(rows[kept] / scale, spared(wanted))
        return cls(distance.cpu() * scale, index.cpu(), wanted, len(rows) - len(kept)), kept.cpu()

    def __len__(self) -> int:
        return len(self.distance)

    def first(self, k: int) -> Tensor:
        """Distances to the k nearest, of the rows that have that many: [n', k]."""
        near = self.distance[:, :k]
        return near[near[:, -1].isfinite()] if near.shape[1] == k else near[:0]

    def keep(self, mask: Tensor) -> Neighbours:
        """The graph among the rows where the mask holds: the same distances, the others left out."""
        gone = ~mask[self.index]
        # a stable sort moves the neighbours that are left to the front without changing their order
        order = gone.to(torch.int8).sort(dim=1, stable=True).indices[:, : self.wanted]
        distance = self.distance.masked_fill(gone, torch.inf).gather(1, order)
        renumbered = torch.cumsum(mask, 0) - 1
        index = renumbered[self.index.gather(1, order)]
        return Neighbours(distance[mask], index[mask], self.wanted)
