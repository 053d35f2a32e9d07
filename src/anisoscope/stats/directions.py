"""Sums of rows and of unit rows, norms and extremes: all that cosine, drift and outlier metrics need.

Notation: x a row, u = x/‖x‖. Leading dimensions (heads) are carried along.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import ClassVar, Self

import torch
from torch import Tensor

from anisoscope.numerics.host import float64_copy, together
from anisoscope.numerics.linalg import has_float64


@dataclass
class Additive:
    """Named tensors that merge by adding (or by the maximum), and how many rows they are of."""

    n: int = 0
    largest: ClassVar[frozenset[str]] = frozenset()  # fields that are maxima, not sums

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
        return {"n": torch.as_tensor(self.n), **self._tensors()}

    @classmethod
    def load(cls, state: dict[str, Tensor]) -> Self:
        return cls(n=int(state["n"]), **{name: value for name, value in state.items() if name != "n"})

    def _tensors(self) -> dict[str, Tensor]:
        names = (name for name in self.__dataclass_fields__ if name not in ("n", "largest"))
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def _add(self, other: Self) -> None:
        self.n += other.n
        mine = self._tensors()
        for name, theirs in other._tensors().items():
            if name in mine:
                theirs = theirs.to(mine[name].device)  # resumed statistics lie on the host
                theirs = torch.maximum(mine[name], theirs) if name in self.largest else mine[name] + theirs
            setattr(self, name, theirs)


@dataclass
class Sums(Additive, ABC):
    """Sums over rows [n, …, d], of each cell that rows are split into."""

    @classmethod
    @abstractmethod
    def _walk(cls, x: Tensor, cell: Tensor, cells: int) -> Self:
        """The sums of the rows for each cell at once: every tensor has a leading dimension of cells."""

    @classmethod
    def split(cls, x: Tensor, cell: Tensor, cells: int) -> list[Self]:
        """The sums of the rows of each cell 0…cells−1; one pass for all of them, since cells may be small."""
        counts = torch.bincount(cell, minlength=cells).tolist()
        cell = cell.to(x.device if has_float64(x.device) else "cpu")
        shares = torch.get_num_threads() if x.device.type == "cpu" and x.numel() >= _SHARED else 1
        step = max(1, -(-len(x) // shares))
        parts = together(lambda i: cls._walk(x[i : i + step], cell[i : i + step], cells), range(0, len(x), step))
        out = reduce(lambda a, b: a.merge(b), parts, cls())
        return [replace(out.head(number), n=count) for number, count in enumerate(counts)]

    def update(self, x: Tensor) -> Self:
        if len(x):
            self._add(self.split(x, torch.zeros(len(x), dtype=torch.int64), 1)[0])
        return self


_CHUNK, _CHUNK_ON_DEVICE = 3 << 17, 1 << 23  # numbers at a time: on the host their float64 copy stays in the cache
_SHARED = 1 << 22  # numbers from which every core takes a share


def _chunks(x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Float64 copies of a few rows at a time, to be overwritten, and where they are from."""
    size = max(1, (_CHUNK if x.device.type == "cpu" else _CHUNK_ON_DEVICE) // max(1, x.shape[1:].numel()))
    for start in range(0, len(x), size):
        part = x[start : start + size]
        yield slice(start, start + size), float64_copy(part) if has_float64(x.device) else part.cpu().double()


def _zeros(shape: Sequence[int], cell: Tensor) -> Tensor:
    return torch.zeros(tuple(shape), dtype=torch.float64, device=cell.device)


def _inverse(norms: Tensor) -> Tensor:
    """1/‖x‖ beside every coordinate; so large for a zero row that it stays one, but finite."""
    return norms.clamp_min(1e-300).reciprocal_().unsqueeze(-1)


def _add_cells(out: Tensor, cell: Tensor, values: Tensor) -> Tensor:
    """Add the rows of each cell to its sum: [n, …] to [C, …]."""
    if len(out) == 1:
        out += values.sum(0)
    elif values.device.type == "cpu":
        out.index_add_(0, cell, values)
    else:  # a device adds rows to the same few places one after another: multiply
        out += (_members(cell, len(out)).to(values).T @ values.reshape(len(values), -1)).view(out.shape)
    return out


def _cell_sums(cell: Tensor, cells: int, values: Tensor) -> Tensor:
    return _add_cells(_zeros((cells, *values.shape[1:]), cell), cell, values)


def _cell_largest(cell: Tensor, cells: int, values: Tensor) -> Tensor:
    """The maximum of values ≥ 0 over the rows of each cell, 0 where it has none: [n, …] gives [C, …]."""
    if cells == 1:
        return values.amax(0, keepdim=True)
    flat = values.reshape(len(values), -1)
    if values.device.type == "cpu":
        out = flat.new_zeros(cells, flat.shape[1])
        out.scatter_reduce_(0, cell.unsqueeze(1).expand_as(flat), flat, reduce="amax")
    else:
        out = torch.stack([(flat * mine.unsqueeze(1)).amax(0) for mine in _members(cell, cells).unbind(1)])
    return out.view(cells, *values.shape[1:])


def _members(cell: Tensor, cells: int) -> Tensor:
    """Which rows belong to each cell: [n, C]."""
    return cell.unsqueeze(1) == torch.arange(cells, device=cell.device)


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
    def _walk(cls, x: Tensor, cell: Tensor, cells: int) -> Self:
        total, units = _zeros((cells, *x.shape[1:]), cell), _zeros((cells, *x.shape[1:]), cell)
        norms = _zeros(x.shape[:-1], cell)
        for here, rows in _chunks(x):
            torch.linalg.vector_norm(rows, dim=-1, out=norms[here])
            _add_cells(total, cell[here], rows)
            _add_cells(units, cell[here], rows.mul_(_inverse(norms[here])))
        return cls(
            n=len(x),
            total=total,
            units=units,
            norms=_cell_sums(cell, cells, norms),
            squared_norms=_cell_sums(cell, cells, norms.square()),
            zeros=_cell_sums(cell, cells, (norms == 0).to(norms)),
            largest_norm=_cell_largest(cell, cells, norms),
        )


class Keys(Directions):
    """The key side of a query/key pair."""


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
    def _walk(cls, x: Tensor, cell: Tensor, cells: int) -> Self:
        squares, largest = _zeros((cells, *x.shape[1:]), cell), _zeros((cells, *x.shape[1:]), cell)
        for here, rows in _chunks(x):
            inverse = _inverse(torch.linalg.vector_norm(rows, dim=-1))
            torch.maximum(largest, _cell_largest(cell[here], cells, rows.abs_()), out=largest)
            _add_cells(squares, cell[here], rows.mul_(inverse).square_())
        return cls(len(x), squares, largest)


@dataclass
class Means(Additive):
    """Counts and sums of per-row quantities [n, …] of any further shape; NaN are left out and counted apart.

    >>> Means().update(torch.tensor([[1.0], [3.0], [float("nan")]])).mean().tolist()
    [2.0]
    """

    count: Tensor | None = None
    total: Tensor | None = None

    def update(self, x: Tensor) -> Self:
        if len(x):
            x = x.detach().cpu().double()
            finite = x.isfinite()
            self._add(type(self)(len(x), finite.sum(0).double(), torch.where(finite, x, 0.0).sum(0)))
        return self

    def mean(self) -> Tensor:
        assert self.total is not None and self.count is not None, "mean of no rows"
        return self.total / self.count


class Attention(Means):
    """Means of the attention-row quantities of `metrics.attention`: rows [n, H, 8]."""


class Coherence(Means):
    """Means over contexts of a context's mean cosine with its own mean row: rows [contexts]."""
