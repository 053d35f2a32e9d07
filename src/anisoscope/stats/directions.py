"""Sums of rows and of unit rows, norms and extremes: all that cosine, drift and outlier metrics need.

Notation: x a row, u = x/‖x‖. Leading dimensions (heads) are carried along.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from anisoscope.numerics.linalg import has_float64
from anisoscope.numerics.scratch import float64_copy


@dataclass
class Sums(ABC):
    """Named sums (and maxima) over rows [n, …, d]: the monoid that the classes below fill."""

    n: int = 0
    largest: ClassVar[frozenset[str]] = frozenset()  # fields that are maxima, not sums

    @classmethod
    @abstractmethod
    def _chunk(cls, x: Tensor, cell: Tensor, cells: int) -> Self:
        """The sums of a few rows for each cell at once: every tensor has a leading dimension of cells."""

    @classmethod
    def split(cls, x: Tensor, cell: Tensor, cells: int) -> list[Self]:
        """The sums of the rows of each cell 0…cells−1; one pass for all of them, since cells may be small."""
        out = cls()
        for start in range(0, len(x), _CHUNK):
            mine = cell[start : start + _CHUNK]
            out._add(cls._chunk(x[start : start + _CHUNK], mine, cells))
        counts = torch.bincount(cell, minlength=cells).tolist()
        return [replace(out.head(number), n=count) for number, count in enumerate(counts)]

    def update(self, x: Tensor) -> Self:
        if len(x):
            self._add(self.split(x, torch.zeros(len(x), dtype=torch.int64), 1)[0])
        return self

    def merge(self, other: Self) -> Self:
        """The sums over both sets of rows; neither is changed."""
        out = type(self)()
        out._add(self)
        out._add(other)
        return out

    def head(self, index: int) -> Self:
        return type(self)(n=self.n, **{name: value[index] for name, value in self._tensors().items()})

    def on_host(self) -> Self:
        """The same sums on the host, where many small evaluations do not wait for a device."""
        return type(self)(n=self.n, **{name: value.cpu() for name, value in self._tensors().items()})

    def state(self) -> dict[str, Tensor]:
        return {"n": torch.tensor(self.n), **self._tensors()}

    @classmethod
    def load(cls, state: dict[str, Tensor]) -> Self:
        return cls(n=int(state["n"]), **{name: value for name, value in state.items() if name != "n"})

    def _tensors(self) -> dict[str, Tensor]:
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "n"}
        return {name: value for name, value in values.items() if value is not None}

    def _add(self, other: Self) -> None:
        self.n += other.n
        mine = self._tensors()
        for name, theirs in other._tensors().items():
            if name in mine:
                theirs = theirs.to(mine[name].device)  # resumed statistics lie on the host
                theirs = torch.maximum(mine[name], theirs) if name in self.largest else mine[name] + theirs
            setattr(self, name, theirs)


_CHUNK = 1024  # rows at a time: their float64 copy stays in the cache


def _rows_and_norms(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A float64 copy of the rows, their norms, and the inverse norms (0 for a zero row)."""
    rows = float64_copy(x) if has_float64(x.device) else x.cpu().double()
    norms = torch.linalg.vector_norm(rows, dim=-1)
    return rows, norms, torch.where(norms > 0, 1.0 / norms, 0.0).unsqueeze(-1)


def _cell_sums(cell: Tensor, cells: int, values: Tensor) -> Tensor:
    """Σ over the rows of each cell: [n, …] gives [C, …]."""
    return values.new_zeros(cells, *values.shape[1:]).index_add_(0, cell, values)


@dataclass
class Directions(Sums):
    """Float64 sums over rows [n, …, d]; a zero row counts as a row without a direction.

    >>> d = Directions().update(torch.tensor([[3.0, 4.0], [0.0, 2.0]]))
    >>> d.n, d.norms.item(), d.total.tolist()
    (2, 7.0, [3.0, 6.0])
    """

    largest = frozenset({"largest_norm"})
    total: Tensor | None = None  # Σ x             [..., d]
    units: Tensor | None = None  # Σ u             [..., d]
    norms: Tensor | None = None  # Σ ‖x‖           [...]
    squared_norms: Tensor | None = None  # Σ ‖x‖²  [...]
    zeros: Tensor | None = None  # rows of norm 0  [...]
    largest_norm: Tensor | None = None  # max ‖x‖  [...]

    @classmethod
    def _chunk(cls, x: Tensor, cell: Tensor, cells: int) -> Self:
        rows, norms, inverse = _rows_and_norms(x)
        cell = cell.to(rows.device)
        total = _cell_sums(cell, cells, rows)
        rows.mul_(inverse)  # in place: the copy is ours, and a fresh one costs more than the product
        norm = norms.reshape(len(norms), -1)
        largest = norm.new_zeros(cells, norm.shape[1])
        largest.scatter_reduce_(0, cell.unsqueeze(1).expand_as(norm), norm, reduce="amax")
        return cls(
            n=len(x),
            total=total,
            units=_cell_sums(cell, cells, rows),
            norms=_cell_sums(cell, cells, norms),
            squared_norms=_cell_sums(cell, cells, norms.square()),
            zeros=_cell_sums(cell, cells, (norms == 0).to(rows)),
            largest_norm=largest.view(cells, *norms.shape[1:]),
        )


@dataclass
class Coordinates(Sums):
    """What single coordinates do: their share of the unit rows and their largest value.

    >>> Coordinates().update(torch.tensor([[3.0, 4.0], [0.0, -2.0]])).largest_value.tolist()
    [3.0, 4.0]
    """

    largest = frozenset({"largest_value"})
    unit_squares: Tensor | None = None  # Σ u²       [..., d]
    largest_value: Tensor | None = None  # max |x|   [..., d]

    @classmethod
    def _chunk(cls, x: Tensor, cell: Tensor, cells: int) -> Self:
        rows, _, inverse = _rows_and_norms(x)
        squares = _cell_sums(cell.to(rows.device), cells, rows.mul_(inverse).square_())
        largest = rows.new_zeros(cells, *x.shape[1:])
        for number in cell.unique().tolist():
            mine = x[(cell == number).nonzero().squeeze(1).to(x.device)]
            largest[number] = torch.maximum(mine.amax(0), -mine.amin(0)).to(rows)
        return cls(n=len(x), unit_squares=squares, largest_value=largest)
