"""Sums of per-row quantities, NaN left out and counted apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass
class Means:
    """Counts and sums over rows [n, …] of any further shape.

    >>> Means().update(torch.tensor([[1.0], [3.0], [float("nan")]])).mean().tolist()
    [2.0]
    """

    n: int = 0
    count: Tensor | None = None
    total: Tensor | None = None

    def update(self, x: Tensor) -> Self:
        if len(x):
            x = x.detach().cpu().double()
            finite = x.isfinite()
            self._add(len(x), finite.sum(0).double(), torch.where(finite, x, 0.0).sum(0))
        return self

    def merge(self, other: Self) -> Self:
        out = type(self)()
        for part in (self, other):
            if part.count is not None and part.total is not None:
                out._add(part.n, part.count, part.total)
        return out

    def mean(self) -> Tensor:
        assert self.total is not None and self.count is not None, "mean of no rows"
        return self.total / self.count

    def head(self, index: int) -> Self:
        assert self.total is not None and self.count is not None, "mean of no rows"
        return type(self)(self.n, self.count[index], self.total[index])

    def state(self) -> dict[str, Tensor]:
        parts = {"count": self.count, "total": self.total}
        return {"n": torch.tensor(self.n), **{k: v for k, v in parts.items() if v is not None}}

    @classmethod
    def load(cls, state: dict[str, Tensor]) -> Self:
        return cls(int(state["n"]), state.get("count"), state.get("total"))

    def _add(self, n: int, count: Tensor, total: Tensor) -> None:
        self.count = count if self.count is None else self.count + count
        self.total = total if self.total is None else self.total + total
        self.n += n


class Attention(Means):
    """Means of the attention-row quantities of `numerics.attention`: rows [n, H, 8]."""


class Coherence(Means):
    """Means over contexts of a context's mean cosine with its own mean row: rows [contexts]."""
