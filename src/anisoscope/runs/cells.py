"""How the rows of one batch fall into the cells of a bank: made once, read at every site with the same index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from anisoscope.capture.rows import Index
from anisoscope.numerics.hashing import FOLDS, fold_of
from anisoscope.runs.query_rows import QueryRows

FIRST, REST, WHOLE = "first", "rest", "whole"
Cell = tuple[str, str, int]  # group, part, fold


@dataclass
class Split:
    """The cells of an index; all of it lies on the host, and what a device needs is moved there once."""

    index: Index
    cells: list[tuple[Cell, Tensor]]  # each with its rows, ascending
    cell: Tensor  # which of the cells each row belongs to
    sequence: Tensor  # which context of the batch each row belongs to
    contexts: dict[tuple[str, int], int]
    group: Tensor
    fold: Tensor
    spans: list[tuple[int, int] | None]  # first and one past last row of a cell, where its rows are neighbours
    _moved: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict)
    _chosen: dict[tuple[int, int], QueryRows] = field(default_factory=dict)

    def pick(self, x: Tensor, number: int) -> Tensor:
        """The rows of one cell: a view where they are neighbours, as the rows of one context are."""
        span = self.spans[number]
        return x[span[0] : span[1]] if span else x.index_select(0, self._there(number, x.device))

    def _there(self, number: int, device: torch.device) -> Tensor:
        at = (number, device)
        if at not in self._moved:
            self._moved[at] = self.cells[number][1].to(device, non_blocking=True)
        return self._moved[at]

    def query_rows(self, most: int, *, seed: int) -> QueryRows:
        """The query rows whose attention is looked at."""
        if (most, seed) not in self._chosen:
            self._chosen[most, seed] = QueryRows.of(self.index, most, seed=seed)
        return self._chosen[most, seed]


def split_rows(index: Index, group: Tensor, groups: Sequence[str]) -> Split:
    """The cells that the rows of an index fall into; `group` is the number of each row's stratum."""
    fold = fold_of(index.context.cpu())
    first = torch.zeros_like(fold) if index.first is None else index.first.cpu().to(torch.int64)
    values, cell = torch.unique((group * 2 + first) * FOLDS + fold, return_inverse=True)
    order, sizes = cell.argsort(stable=True), torch.bincount(cell, minlength=len(values)).tolist()
    rows = list(order.split(sizes)) if sizes else []
    cells = [(_cell(value, groups), mine) for value, mine in zip(values.tolist(), rows, strict=True)]
    sequence = index.keep.cpu() // max(1, index.length)
    contexts = _contexts(sequence, group * FOLDS + fold, groups)
    return Split(index, cells, cell, sequence, contexts, group, fold, [_span(mine) for mine in rows])


def _cell(code: int, groups: Sequence[str]) -> Cell:
    name = groups[code // (2 * FOLDS)] if groups else ""
    return name, FIRST if (code // FOLDS) % 2 else REST, code % FOLDS


def _contexts(sequence: Tensor, code: Tensor, groups: Sequence[str]) -> dict[tuple[str, int], int]:
    """How many contexts there are of each (group, fold); rows are in the order of their contexts."""
    if not len(sequence):
        return {}
    leads = torch.ones_like(sequence, dtype=torch.bool)
    leads[1:] = sequence[1:] != sequence[:-1]
    found: dict[tuple[str, int], int] = {}
    for value in code[leads].tolist():
        label = (groups[value // FOLDS] if groups else "", value % FOLDS)
        found[label] = found.get(label, 0) + 1
    return found


def _span(rows: Tensor) -> tuple[int, int] | None:
    first, last = int(rows[0]), int(rows[-1])
    return (first, last + 1) if last - first + 1 == len(rows) else None
