"""The query rows of a batch whose attention is looked at, and how sharp they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from anisoscope.capture.rows import Index, Scores
from anisoscope.numerics.attention import row_sharpness
from anisoscope.numerics.hashing import row_hash


def chosen_rows(index: Index, most: int, *, seed: int) -> Iterable[tuple[int, Tensor, int]]:
    """For each context of a batch: its number, the positions of its chosen query rows, and one of its rows."""
    keep = index.keep.cpu()
    sequence, position = keep // index.length, keep % index.length
    order = row_hash(index.context.cpu(), index.position.cpu(), seed=seed).argsort(stable=True)
    order = order[sequence[order].argsort(stable=True)]  # by context, and by hash within it
    numbers, sizes = torch.unique_consecutive(sequence[order], return_counts=True)
    for number, mine in zip(numbers.tolist(), order.split(sizes.tolist()), strict=True):
        mine = mine[:most] if most else mine
        yield number, position[mine].sort().values, int(mine[0])


@dataclass
class QueryRows:
    """The same rows of every layer that has the index; what they need on a device is made for the first layer."""

    contexts: list[int]
    positions: list[Tensor]
    leads: list[int]  # a row of the index for each context
    _places: tuple[tuple[torch.device, int, int], Tensor | None, Tensor] | None = None
    _seen: tuple[Tensor, Tensor, Tensor] | None = None

    @classmethod
    def of(cls, index: Index, most: int, *, seed: int) -> QueryRows:
        chosen = list(chosen_rows(index, most, seed=seed))
        return cls([c for c, _, _ in chosen], [p for _, p, _ in chosen], [row for _, _, row in chosen])

    def sharpness(self, scores: Scores) -> Tensor:
        """The quantities of `numerics.attention` [B, H, R, …], R the most rows of any context; others repeat one."""
        number, rows = self._at(scores)
        allowed, first = self._allowed(scores.allowed, number, rows)
        found = row_sharpness(
            _of_rows(_chosen(scores.query, number), rows),
            _chosen(scores.key, number),
            allowed,
            bias=None if scores.bias is None else _of_rows(_chosen(scores.bias, number), rows),
            scaling=scores.scaling,
            first=first,
        )
        if scores.windows == 1:
            return found
        return found.squeeze(2).unflatten(0, (len(self.contexts), -1)).transpose(1, 2)

    def _at(self, scores: Scores) -> tuple[Tensor | None, Tensor]:
        """The sequences [n], None for all in order, and their query rows [n, R]; with windows each row is one."""
        places, windows = scores.query.shape[2], scores.windows
        key = (scores.query.device, windows, places)
        if self._places is None or self._places[0] != key:
            most = max(map(len, self.positions))
            rows = torch.stack([torch.cat([p, p[:1].expand(most - len(p))]) for p in self.positions])
            number = None if windows == 1 and len(self.contexts) == len(scores.query) else torch.tensor(self.contexts)
            if windows > 1 and number is not None:  # each row in the window it lies in
                number, rows = (number[:, None] * windows + rows // places).flatten(), rows.flatten()[:, None] % places
            there = None if number is None else number.to(scores.query.device, non_blocking=True)
            self._places = (key, there, rows.to(scores.query.device, non_blocking=True))
        return self._places[1:]

    def _allowed(self, allowed: Tensor, number: Tensor | None, rows: Tensor) -> tuple[Tensor, Tensor]:
        """What the chosen rows may attend to, and the first key of each sequence; layers with one mask share them."""
        if self._seen is None or self._seen[0] is not allowed:
            mine = _chosen(allowed, number)
            first = mine.flatten(1, 2).any(1).to(torch.int8).argmax(1).expand(len(rows))
            self._seen = (allowed, _of_rows(mine, rows), first)
        return self._seen[1:]


def _chosen(x: Tensor, number: Tensor | None) -> Tensor:
    """Some of the sequences of [B or 1, …], all of them where no number is given."""
    if number is None:
        return x
    return x.index_select(0, number) if len(x) > 1 else x.expand(len(number), *x.shape[1:])


def _of_rows(matrix: Tensor, rows: Tensor) -> Tensor:
    """The chosen query rows of [B or 1, 1 or H, T or 1, S]."""
    matrix = matrix.expand(len(rows), -1, -1, -1)
    if matrix.shape[2] == 1:
        return matrix.expand(-1, -1, rows.shape[1], -1)
    return matrix.gather(2, rows[:, None, :, None].expand(-1, matrix.shape[1], -1, matrix.shape[3]))
