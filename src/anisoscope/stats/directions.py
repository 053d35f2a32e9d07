"""Sums of rows and of unit rows, norms and extremes: all that cosine, drift and outlier metrics need.

Notation: x a row, u = x/‖x‖. Leading dimensions (heads) are carried along.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Self

import torch
from torch import Tensor

from anisoscope.numerics.linalg import has_float64


@dataclass
class Sums:
    """Named sums (and maxima) over rows [n, …, d]: the monoid that the classes below fill."""

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


def _rows_and_norms(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Float64 rows with heads first, their norms, and the inverse norms (0 for a zero row)."""
    heads_first = x.movedim(0, -2)
    rows = heads_first.double() if has_float64(x.device) else heads_first.cpu().double()
    norms = torch.linalg.vector_norm(rows, dim=-1)
    return rows, norms, torch.where(norms > 0, 1.0 / norms, 0.0)


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

    def update(self, x: Tensor) -> Self:
        if not len(x):
            return self
        rows, norms, inverse = _rows_and_norms(x)
        sums = torch.stack([torch.ones_like(inverse), inverse], dim=-2) @ rows
        new = type(self)(
            n=len(x),
            total=sums[..., 0, :],
            units=sums[..., 1, :],
            norms=norms.sum(-1),
            squared_norms=norms.square().sum(-1),
            zeros=(norms == 0).sum(-1).double(),
            largest_norm=norms.amax(-1),
        )
        self._add(new)
        return self


@dataclass
class Coordinates(Sums):
    """What single coordinates do: their share of the unit rows and their largest value.

    >>> Coordinates().update(torch.tensor([[3.0, 4.0], [0.0, -2.0]])).largest_value.tolist()
    [3.0, 4.0]
    """

    largest = frozenset({"largest_value"})
    unit_squares: Tensor | None = None  # Σ u²       [..., d]
    largest_value: Tensor | None = None  # max |x|   [..., d]

    def update(self, x: Tensor) -> Self:
        if not len(x):
            return self
        rows, _, inverse = _rows_and_norms(x)
        squares = (inverse.square().unsqueeze(-2) @ rows.square()).squeeze(-2)
        self._add(type(self)(n=len(x), unit_squares=squares, largest_value=rows.abs().amax(-2)))
        return self
