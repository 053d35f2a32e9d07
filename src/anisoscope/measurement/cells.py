"""How the rows of batches fall into cells (group, part, fold), and which query rows of attention are read.

Parts are the first position of a context, the rest, and the whole of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from anisoscope.capture.row import Index, Rows, Scores
from anisoscope.metrics.attention import row_sharpness
from anisoscope.numerics.hashing import FOLDS, fold_of, row_hash
from anisoscope.stats.sample import row_labels

FIRST, REST, WHOLE = "first", "rest", "whole"
Cell = tuple[str, str, int]  # group, part, fold


def context_numbers(index: Index) -> Tensor:
    """Which context, counted from 0, each row of an index belongs to; a row of the batch may hold several.

    >>> where = {"keep": torch.arange(4), "position": torch.tensor([0, 1, 0, 1]), "token": torch.zeros(4)}
    >>> where |= {"context": torch.full((4,), 7), "first": torch.tensor([True, False, True, False])}  # one text twice
    >>> context_numbers(Index(1, 4, **where)).tolist()
    [0, 0, 1, 1]
    """
    row, context = index.keep.cpu() // max(1, index.length), index.context.cpu()
    begins = (row[1:] != row[:-1]) | (context[1:] != context[:-1])
    if index.first is not None:
        begins = begins | index.first.cpu()[1:]
    return torch.nn.functional.pad(begins.long().cumsum(0), (1, 0))[: len(row)]


def chosen_rows(index: Index, most: int, *, seed: int) -> Iterable[tuple[int, Tensor, int]]:
    """For each context: its row of the batch, the positions of its chosen query rows, and the index of one of them."""
    keep = index.keep.cpu()
    sequence, position = context_numbers(index), keep % index.length
    order = row_hash(index.context.cpu(), index.position.cpu(), seed=seed).argsort(stable=True)
    order = order[sequence[order].argsort(stable=True)]  # by context, and by hash within it
    sizes = torch.unique_consecutive(sequence[order], return_counts=True)[1]
    for rows in order.split(sizes.tolist()):
        lead = int(rows[0])
        rows = rows[:most] if most else rows
        yield int(keep[lead]) // index.length, position[rows].sort().values, lead


class QueryRows:
    """The query rows of a batch whose attention is read, the same in every layer."""

    def __init__(self, index: Index, most: int, *, seed: int) -> None:
        chosen = list(chosen_rows(index, most, seed=seed))
        self.contexts = [context for context, _, _ in chosen]
        self.positions = [positions for _, positions, _ in chosen]
        self.leads = [lead for _, _, lead in chosen]  # a row of the index for each context
        # where contexts begin that share a row of the batch
        packed = len(set(self.contexts)) < len(self.contexts)
        leads = torch.tensor(self.leads)
        self._begins = (index.keep.cpu() % index.length - index.position.cpu())[leads] if packed else None
        self._seen: tuple[Tensor, Tensor, Tensor] | None = None

    def sharpness(self, scores: Scores) -> Tensor:
        """The quantities of `metrics.attention` [B, H, R, …]; contexts with fewer than R rows repeat their first."""
        number, rows = self._at(scores)
        if self._seen is None or self._seen[0] is not scores.allowed:  # layers with the same mask share this
            allowed = _chosen(scores.allowed, number)
            first = allowed.flatten(1, 2).any(1).to(torch.int8).argmax(1).expand(len(rows))  # key of each sequence
            if self._begins is not None and scores.windows == 1:
                first = self._begins.to(first.device)
            self._seen = (scores.allowed, _of_rows(allowed, rows), first)
        values = row_sharpness(
            _of_rows(_chosen(scores.query, number), rows),
            _chosen(scores.key, number),
            self._seen[1],
            bias=None if scores.bias is None else _of_rows(_chosen(scores.bias, number), rows),
            scaling=scores.scaling,
            first=self._seen[2],
        )
        if scores.windows == 1:
            return values
        return values.squeeze(2).unflatten(0, (len(self.contexts), -1)).transpose(1, 2)

    def _at(self, scores: Scores) -> tuple[Tensor | None, Tensor]:
        """Sequence numbers [n] (None = all in order) and their query rows [n, R]; R = 1 for windowed attention."""
        places, windows, device = scores.query.shape[2], scores.windows, scores.query.device
        most = max(map(len, self.positions))
        rows = torch.stack([torch.cat([p, p[:1].expand(most - len(p))]) for p in self.positions])
        every = self.contexts == list(range(len(scores.query)))
        number = None if windows == 1 and every else torch.tensor(self.contexts)
        if windows > 1 and number is not None:  # each row in the window it lies in
            number, rows = (number[:, None] * windows + rows // places).flatten(), rows.flatten()[:, None] % places
        moved = None if number is None else number.to(device, non_blocking=True)
        return moved, rows.to(device, non_blocking=True)


def _chosen(x: Tensor, number: Tensor | None) -> Tensor:
    """Select sequences of [B or 1, …] by number; None selects all."""
    if number is None:
        return x
    return x.index_select(0, number) if len(x) > 1 else x.expand(len(number), *x.shape[1:])


def _of_rows(matrix: Tensor, rows: Tensor) -> Tensor:
    """The chosen query rows of [B or 1, 1 or H, T or 1, S]."""
    matrix = matrix.expand(len(rows), -1, -1, -1)
    if matrix.shape[2] == 1:
        return matrix.expand(-1, -1, rows.shape[1], -1)
    return matrix.gather(2, rows[:, None, :, None].expand(-1, matrix.shape[1], -1, matrix.shape[3]))


@dataclass
class Split:
    """The cells of the rows of one index, on the host; computed once and shared by all sites with that index."""

    index: Index
    cells: list[tuple[Cell, Tensor]]  # each with its rows, ascending
    sequence: Tensor  # which context of the batch each row belongs to
    contexts: Counter[tuple[str, int]]  # by (group, fold)
    group: Tensor
    fold: Tensor
    first: Tensor  # 1 at the first position of a context
    groups: Sequence[str]
    queries: QueryRows | None = None  # made when attention is first read
    _moved: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict)
    _whole: tuple[Tensor, Tensor, list[tuple[str, int]], Tensor] | None = None
    _grid: tuple[list[Cell], Tensor, list[int]] | None = None
    _labels: Tensor | None = None

    def pick(self, x: Tensor, number: int) -> Tensor:
        """The rows of one cell: a view where they are contiguous, as the rows of one context are."""
        rows = self.cells[number][1]
        first, last = int(rows[0]), int(rows[-1])
        if last - first + 1 == len(rows):
            return x[first : last + 1]
        at = (number, x.device)
        if at not in self._moved:
            self._moved[at] = rows.to(x.device, non_blocking=True)
        return x.index_select(0, self._moved[at])

    def grid(self) -> tuple[list[Cell], Tensor, list[int]]:
        """All cells that rows of these groups can fall into, the number of each row's cell, and the rows of each cell.

        Batches have rows in other folds, but the same grid, so that the sums of a batch are added at once.
        """
        if self._grid is None:
            present, group = torch.unique(self.group, return_inverse=True)
            parts = (REST,) if self.index.first is None else (REST, FIRST)
            cells = [(self.groups[g], part, f) for g in present.tolist() for part in parts for f in range(FOLDS)]
            place = (group * len(parts) + self.first * (len(parts) - 1)) * FOLDS + self.fold
            self._grid = cells, place, torch.bincount(place, minlength=len(cells)).tolist()
        return self._grid

    def labels(self, seed: int) -> Tensor:
        """The labels of the rows in a sample; the same for all sites."""
        if self._labels is None:
            index = self.index
            self._labels = row_labels(index.context, index.position, index.token, self.group, index.first, seed=seed)
        return self._labels

    def on(self, device: torch.device) -> Tensor:
        """The number of each row's cell of the grid, on a device."""
        if (-1, device) not in self._moved:
            self._moved[-1, device] = self.grid()[1].to(device, non_blocking=True)
        return self._moved[-1, device]

    def whole_contexts(self) -> tuple[Tensor, Tensor, list[tuple[str, int]], Tensor]:
        """By row twice its context's number, plus 1 at a first position; by context its cell; cells, and their rows.

        Cells are (group, fold) here; their rows [cells, 2] are those that are at no first position, and the others.
        """
        if self._whole is None:
            contexts, number = torch.unique_consecutive(self.sequence, return_inverse=True)
            present, group = torch.unique(self.group, return_inverse=True)
            cell = group * FOLDS + self.fold
            cells = [(self.groups[g], fold) for g in present.tolist() for fold in range(FOLDS)]
            home = torch.zeros(len(contexts), dtype=torch.int64).scatter_(0, number, cell)
            rows = torch.bincount(2 * cell + self.first, minlength=2 * len(cells)).view(-1, 2)
            self._whole = 2 * number + self.first, home, cells, rows
        return self._whole


def split_rows(index: Index, group: Tensor, groups: Sequence[str]) -> Split:
    """The cells that the rows of an index fall into; `group` is the number of each row's stratum."""
    fold = fold_of(index.context.cpu())
    first = torch.zeros_like(fold) if index.first is None else index.first.cpu().to(torch.int64)
    values, cell = torch.unique((group * 2 + first) * FOLDS + fold, return_inverse=True)
    rows = cell.argsort(stable=True).split(torch.bincount(cell, minlength=len(values)).tolist()) if len(values) else ()
    cells = [
        ((groups[code // (2 * FOLDS)], FIRST if (code // FOLDS) % 2 else REST, code % FOLDS), cell_rows)
        for code, cell_rows in zip(values.tolist(), rows, strict=True)
    ]
    sequence = context_numbers(index)
    leads = torch.ones_like(sequence, dtype=torch.bool)
    leads[1:] = sequence[1:] != sequence[:-1]  # rows are in the order of their contexts
    contexts = Counter((groups[code // FOLDS], code % FOLDS) for code in (group * FOLDS + fold)[leads].tolist())
    return Split(index, cells, sequence, contexts, group, fold, first, groups)


def joined_index(parts: Sequence[Index]) -> Index:
    """One index of the rows of several batches, whose contexts are numbered on."""
    length, before, keep = max(1, *(part.length for part in parts)), 0, []
    for part in parts:
        own = max(1, part.length)
        keep.append((part.keep.cpu() // own + before) * length + part.keep.cpu() % own)
        before += part.batch
    named = any(part.group is not None for part in parts)
    groups = tuple(name for part in parts for name in part.group or ("",) * part.batch) if named else None
    context, position, token = (torch.cat([getattr(p, n) for p in parts]) for n in ("context", "position", "token"))
    firsts = [part.first for part in parts if part.first is not None]
    first = torch.cat(firsts) if firsts else None
    return Index(before, length, torch.cat(keep), context, position, token, groups, first)


def alike(parts: Sequence[Rows]) -> list[list[Rows]]:
    """Rows of one site in sets that can be one tensor."""
    sets: dict[tuple[object, ...], list[Rows]] = {}
    for rows in parts:
        x = rows.x
        sets.setdefault((x.shape[1:], x.dtype, x.device, rows.index.first is None), []).append(rows)
    return list(sets.values())
