"""Mergeable sums over rows (of rows, unit rows and norms) and maxima, for cosine, drift and outlier metrics.

Notation: x a row, u = x/‖x‖. Leading dimensions (heads) are carried along.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from anisoscope.numerics.host import cores, single_steps, together
from anisoscope.numerics.linalg import has_float64, lengths, widened

UNSET: Any = None  # a sum before the first rows


@dataclass
class Additive:
    """Named tensors over `n` rows that merge by addition or, for fields in `largest`, by the maximum."""

    n: int = 0
    largest: ClassVar[frozenset[str]] = frozenset()  # fields that are maxima, not sums

    def merge(self, other: Self) -> Self:
        """The sums over both sets of rows; neither is changed."""
        out = type(self)()
        out._add(self)
        out._add(other)
        return out

    def head(self, index: int) -> Self:
        return type(self)(n=self.n, **{name: value[index] for name, value in self.tensors().items()})

    def heads(self, counts: Sequence[int]) -> list[Self]:
        """One statistic for each entry of the leading dimension, of these numbers of rows."""
        names, parts = list(self.tensors()), zip(*(value.unbind() for value in self.tensors().values()), strict=True)
        return [type(self)(n=n, **dict(zip(names, part, strict=True))) for n, part in zip(counts, parts, strict=True)]

    def state(self) -> dict[str, Tensor]:
        return {"n": torch.as_tensor(self.n), **self.tensors()}

    @classmethod
    def load(cls, state: dict[str, Tensor]) -> Self:
        return cls(n=int(state["n"]), **{name: value for name, value in state.items() if name != "n"})

    def tensors(self) -> dict[str, Tensor]:
        """The sums and maxima by name."""
        return {name: value for name, value in vars(self).items() if name != "n" and isinstance(value, Tensor)}

    def is_finite(self) -> bool:
        """Whether all sums are finite; those of float32 rows are where the rows are."""
        return all(bool(value.isfinite().all()) for value in self.tensors().values())

    def _add(self, other: Self) -> None:
        self.n, present = self.n + other.n, self.tensors()
        for name, value in other.tensors().items():
            if name in present:
                value = value.to(present[name].device)  # statistics of a resumed run are on the host
                value = torch.maximum(present[name], value) if name in self.largest else present[name] + value
            setattr(self, name, value)


def bring(stats: Sequence[Additive], *, host: str = "cpu") -> None:
    """Bring the tensors of many statistics to the host, those of one type in one copy.

    >>> two = [Directions().update(torch.eye(2)), Directions().update(torch.eye(3))]
    >>> bring(two, host="as if these were elsewhere")
    >>> two[1].total.tolist(), two[0].units.untyped_storage().data_ptr() == two[1].norms.untyped_storage().data_ptr()
    ([1.0, 1.0, 1.0], True)
    """
    found: dict[tuple[torch.dtype, torch.device], list[tuple[Additive, str, Tensor]]] = {}
    for stat in stats:
        for name, value in stat.tensors().items():
            if value.device.type != host:
                found.setdefault((value.dtype, value.device), []).append((stat, name, value))
    for held in found.values():
        flat = torch.cat([value.flatten() for _, _, value in held]).cpu()
        for (stat, name, value), here in zip(held, flat.split([value.numel() for _, _, value in held]), strict=True):
            setattr(stat, name, here.view(value.shape))


@dataclass
class Sums(Additive, ABC):
    """Sums over rows [n, …, d]; `split` computes them for each cell of a partition of the rows."""

    costly: ClassVar[frozenset[str]] = frozenset()  # sums that are left out where nobody reads them

    @classmethod
    @abstractmethod
    def _walk(cls, x: Tensor, cell: Tensor, cells: int, *, read: frozenset[str]) -> Self:
        """The sums for all cells; every tensor has a leading dimension of `cells`. Of `costly` ones those in `read`."""

    @classmethod
    def split(cls, x: Tensor, cell: Tensor, cells: int, *, read: frozenset[str] | None = None) -> list[Self]:
        """The sums of the rows of each cell 0…cells−1; `cell` [n] is the cell of each row."""
        return cls.by_cell(x, cell, cells, read=read).heads(torch.bincount(cell, minlength=cells).tolist())

    @classmethod
    def by_cell(cls, x: Tensor, cell: Tensor, cells: int, *, read: frozenset[str] | None = None) -> Self:
        """The sums of all cells in one pass over the rows; every tensor has a leading dimension of `cells`."""
        cell = cell.to(x.device if has_float64(x.device) else "cpu")
        shares = cores() if x.device.type == "cpu" and x.numel() >= _SHARED else 1
        step = max(1, -(-len(x) // shares))
        chosen = cls.costly if read is None else cls.costly & read
        shared = [slice(start, start + step) for start in range(0, len(x), step)]
        # few rows: threads that meet after every small operation gain little, and wait long on a busy machine
        with single_steps() if x.device.type == "cpu" else contextlib.nullcontext():
            parts = together(lambda part: cls._walk(x[part], cell[part], cells, read=chosen), shared)
        return reduce(lambda a, b: a.merge(b), parts, cls())

    def update(self, x: Tensor) -> Self:
        if len(x):
            self._add(self.split(x, torch.zeros(len(x), dtype=torch.int64), 1)[0])
        return self


_MANY = 1024  # cells from which a matrix product that adds to them would be too large
_FEW = 1 << 18  # elements whose maxima by cell are one operation on a GPU
_SHARED = 1 << 22  # elements from which the work is divided among the cores


def _zeros(shape: Sequence[int], cell: Tensor) -> Tensor:
    return torch.zeros(tuple(shape), dtype=torch.float64, device=cell.device)


def _inverse(norms: Tensor) -> Tensor:
    """1/‖x‖; large but finite for a zero row, so that its product with the row is 0."""
    return norms.clamp_min(1e-300).reciprocal_()


def _add_cells(out: Tensor, cell: Tensor, values: Tensor) -> Tensor:
    """Add values [n, …] to the sums [C, …] of their cells, in place."""
    if len(out) == 1:
        out += values.sum(0)
    elif values.device.type == "cpu" or len(out) > _MANY:
        out.index_add_(0, cell, values)
    else:  # on a GPU index_add_ serialises additions to the same few cells; a matrix product does not
        out += (_members(cell, len(out)).to(values).T @ values.reshape(len(values), -1)).view(out.shape)
    return out


def _add_weighted(out: Tensor, cell: Tensor, rows: Tensor, weights: Tensor) -> None:
    """Add rows [n, …, d] times weights [n, …] to the sums [C, …, d] of their cells; the rows may be overwritten."""
    if len(out) == 1 and rows.ndim == 2 and rows.device.type == "cpu":  # NumPy's product is quicker than torch's
        out += torch.from_numpy(weights.numpy() @ rows.numpy())
    else:
        _add_cells(out, cell, rows.mul_(weights.unsqueeze(-1)))


def _cell_sums(cell: Tensor, cells: int, values: Tensor) -> Tensor:
    return _add_cells(_zeros((cells, *values.shape[1:]), cell), cell, values)


def _cell_largest(cell: Tensor, cells: int, values: Tensor) -> Tensor:
    """The maximum [C, …] of values ≥ 0 [n, …] over the rows of each cell, 0 for a cell without rows."""
    if cells == 1:
        return values.amax(0, keepdim=True)
    flat = values.reshape(len(values), -1)
    if values.device.type == "cpu" or flat.numel() <= _FEW:  # one kernel, if slow where many rows meet at one cell
        out = flat.new_zeros(cells, flat.shape[1])
        out.scatter_reduce_(0, cell.unsqueeze(1).expand_as(flat), flat, reduce="amax")
    else:
        out = torch.stack([(flat * member.unsqueeze(1)).amax(0) for member in _members(cell, cells).unbind(1)])
    return out.view(cells, *values.shape[1:])


def _members(cell: Tensor, cells: int) -> Tensor:
    """Whether each row belongs to each cell: bool [n, C]."""
    return cell.unsqueeze(1) == torch.arange(cells, device=cell.device)


@dataclass
class Directions(Sums):
    """Float64 sums over rows [n, …, d]; a zero row adds nothing to `units` and is counted in `zeros`.

    >>> d = Directions().update(torch.tensor([[3.0, 4.0], [0.0, 2.0]]))
    >>> d.n, d.norms.item(), d.total.tolist()
    (2, 7.0, [3.0, 6.0])
    """

    largest = frozenset({"largest_norm"})
    costly = frozenset({"total", "units"})
    total: Tensor = UNSET  # Σ x             [..., d]
    units: Tensor = UNSET  # Σ u             [..., d]
    norms: Tensor = UNSET  # Σ ‖x‖           [...]
    squared_norms: Tensor = UNSET  # Σ ‖x‖²  [...]
    zeros: Tensor = UNSET  # rows of norm 0  [...]
    largest_norm: Tensor = UNSET  # max ‖x‖  [...]

    @classmethod
    def _walk(cls, x: Tensor, cell: Tensor, cells: int, *, read: frozenset[str]) -> Self:
        total, units = (_zeros((cells, *x.shape[1:]), cell) if name in read else UNSET for name in ("total", "units"))
        norms = _zeros(x.shape[:-1], cell)
        for here, rows in widened(x):
            norms[here] = lengths(rows)
            if total is not None:
                _add_cells(total, cell[here], rows)
            if units is not None:
                _add_weighted(units, cell[here], rows, _inverse(norms[here]))
        of_norms = torch.stack((norms, norms.square(), (norms == 0).to(norms)), 1)
        sizes, squares, zeros = _cell_sums(cell, cells, of_norms).unbind(1)
        return cls(len(x), total, units, sizes, squares, zeros, _cell_largest(cell, cells, norms))


class Keys(Directions):
    """The key side of a query/key pair."""


@dataclass
class Coordinates(Sums):
    """Statistics of single coordinates: sums of squares over unit rows, and largest absolute values.

    >>> Coordinates().update(torch.tensor([[3.0, 4.0], [0.0, -2.0]])).largest_value.tolist()
    [3.0, 4.0]
    """

    largest = frozenset({"largest_value"})
    unit_squares: Tensor = UNSET  # Σ u²       [..., d]
    largest_value: Tensor = UNSET  # max |x|   [..., d]

    @classmethod
    def _walk(cls, x: Tensor, cell: Tensor, cells: int, *, read: frozenset[str]) -> Self:
        squares, largest = _zeros((cells, *x.shape[1:]), cell), _zeros((cells, *x.shape[1:]), cell)
        for here, rows in widened(x):
            inverse = _inverse(lengths(rows))
            torch.maximum(largest, _cell_largest(cell[here], cells, rows.abs_()), out=largest)
            _add_cells(squares, cell[here], rows.mul_(inverse.unsqueeze(-1)).square_())
        return cls(len(x), squares, largest)


@dataclass
class ContextPairs(Additive):
    """What pairs of rows of the same context are to the average cosine; a context must come whole, in one update.

    Notation: k_c the rows of context c that are not zero. `n` counts the rows, zero or not.

    >>> rows = torch.tensor([[3.0, 4.0], [0.0, 2.0], [1.0, 0.0]])
    >>> found = ContextPairs().update(rows, torch.tensor([7, 7, 9]))
    >>> round(found.inside.item(), 9), found.pairs.item()
    (4.6, 5.0)
    """

    inside: Tensor = UNSET  # Σ_c ‖Σ_{i∈c} u‖²  [...]
    pairs: Tensor = UNSET  # Σ_c k_c²            [...]

    def update(self, x: Tensor, context: Tensor) -> Self:
        if len(x):
            _, place = torch.unique(context.cpu(), return_inverse=True)
            units, directed = context_units(x, place, int(place.max()) + 1)
            home = torch.zeros(len(directed), dtype=torch.int64, device=units.device)
            self._add(self.of_cells(units, directed, home=home, cells=1).heads([len(x)])[0])
        return self

    @classmethod
    def of_cells(cls, units: Tensor, directed: Tensor, *, home: Tensor, cells: int) -> Self:
        """The sums over contexts of all cells from `context_units`; `home` is the cell of each context."""
        sums = [_cell_sums(home, cells, values) for values in (units.square().sum(-1), directed.square())]
        return cls(0, *sums)


def context_units(x: Tensor, place: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Σu [number, …, d], and how many rows are not zero [number, …], of rows [n, …, d] by place 0…number−1."""
    place = place.to(x.device if has_float64(x.device) else "cpu")
    units, directed = _zeros((number, *x.shape[1:]), place), _zeros((number, *x.shape[1:-1]), place)
    for here, rows in widened(x):
        norms = torch.linalg.vector_norm(rows, dim=-1)
        _add_cells(directed, place[here], (norms > 0).to(rows))
        _add_weighted(units, place[here], rows, _inverse(norms))
    return units, directed


@dataclass
class Means(Additive):
    """Sums, and counts of values that are not NaN, of per-row quantities [n, …]; NaN values are left out.

    >>> Means().update(torch.tensor([[1.0], [3.0], [float("nan")]])).mean().tolist()
    [2.0]
    """

    count: Tensor = UNSET
    total: Tensor = UNSET

    def update(self, x: Tensor) -> Self:
        if len(x):
            x = x.detach().cpu().double()
            finite = x.isfinite()
            self._add(type(self)(len(x), finite.sum(0).double(), torch.where(finite, x, 0.0).sum(0)))
        return self

    def mean(self) -> Tensor:
        return self.total / self.count


class Attention(Means):
    """Means of the attention-row quantities of `metrics.attention`: rows [n, H, 8]."""


class Coherence(Means):
    """Means over contexts of the mean cosine between a context's rows and their mean: rows [contexts]."""
