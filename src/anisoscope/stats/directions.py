"""Sums of rows and of unit rows, norms and extremes: all that cosine, drift and outlier metrics need.

Notation: x a row, u = x/‖x‖. Leading dimensions (heads) are carried along.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from anisoscope.numerics.linalg import has_float64

_LARGEST = ("largest_norm", "largest")


@dataclass
class Directions:
    """Float64 sums over rows [n, …, d]; a zero row counts as a row without a direction.

    >>> d = Directions().update(torch.tensor([[3.0, 4.0], [0.0, 2.0]]))
    >>> d.n, d.norms.item(), d.units.tolist()
    (2, 7.0, [0.6, 1.8])
    """

    n: int = 0
    total: Tensor | None = None  # Σ x             [..., d]
    units: Tensor | None = None  # Σ u             [..., d]
    unit_squares: Tensor | None = None  # Σ u²     [..., d]
    norms: Tensor | None = None  # Σ ‖x‖           [...]
    squared_norms: Tensor | None = None  # Σ ‖x‖²  [...]
    zeros: Tensor | None = None  # rows of norm 0  [...]
    largest_norm: Tensor | None = None  # max ‖x‖  [...]
    largest: Tensor | None = None  # max |x|       [..., d]

    def update(self, x: Tensor) -> Directions:
        if not len(x):
            return self
        heads_first = x.movedim(0, -2)
        rows = heads_first.double() if has_float64(x.device) else heads_first.cpu().double()
        norms = torch.linalg.vector_norm(rows, dim=-1)
        inverse = torch.where(norms > 0, 1.0 / norms, 0.0)
        sums = torch.stack([torch.ones_like(inverse), inverse], dim=-2) @ rows
        largest = heads_first.abs().amax(-2).to(rows)
        unit_squares = (inverse.square().unsqueeze(-2) @ (rows.square())).squeeze(-2)
        self._add(
            Directions(
                n=len(x),
                total=sums[..., 0, :],
                units=sums[..., 1, :],
                unit_squares=unit_squares,
                norms=norms.sum(-1),
                squared_norms=norms.square().sum(-1),
                zeros=(norms == 0).sum(-1).double(),
                largest_norm=norms.amax(-1),
                largest=largest,
            )
        )
        return self

    def merge(self, other: Directions) -> Directions:
        """The sums over both sets of rows; neither is changed."""
        out = Directions()
        out._add(self)
        out._add(other)
        return out

    def head(self, index: int) -> Directions:
        parts = {f.name: getattr(self, f.name)[index] for f in fields(self) if f.name != "n"}
        return Directions(n=self.n, **parts)

    def state(self) -> dict[str, Tensor]:
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "n"}
        return {"n": torch.tensor(self.n), **{k: v for k, v in tensors.items() if v is not None}}

    @classmethod
    def load(cls, state: dict[str, Tensor]) -> Directions:
        return cls(n=int(state["n"]), **{k: v for k, v in state.items() if k != "n"})

    def _add(self, other: Directions) -> None:
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if field.name == "n" or (mine is not None and theirs is not None):
                theirs = theirs.to(mine.device) if isinstance(theirs, Tensor) else theirs
                both = torch.maximum(mine, theirs) if field.name in _LARGEST else mine + theirs
                setattr(self, field.name, both)
            elif theirs is not None:
                setattr(self, field.name, theirs)
