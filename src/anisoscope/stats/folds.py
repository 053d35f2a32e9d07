"""Covariances with and without each context fold, from one pass.

Notation: rows x about their mean s, so that a large mean costs no digits; by fold n, Σ(x−s), Σ(x−s)(x−s)ᵀ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anisoscope.numerics.hashing import FOLDS, fold_of
from anisoscope.stats.gradients import packed, unpacked


@dataclass(frozen=True)
class FoldCovariance:
    """Sums by fold, from which the covariance of all rows, or of all but one fold, follows.

    >>> x = torch.randn(100, 3, dtype=torch.float64)
    >>> torch.allclose(FoldCovariance.of(x, torch.arange(100)).covariance(), torch.cov(x.T))
    True
    """

    n: Tensor  # [FOLDS]
    sums: Tensor  # [FOLDS, d]
    squares: Tensor  # [FOLDS, d, d]

    @classmethod
    def of(cls, x: Tensor, context: Tensor) -> FoldCovariance:
        rows = x.double() - x.double().mean(0)
        fold = fold_of(context.cpu()).to(x.device)
        parts = [rows[fold == f] for f in range(FOLDS)]
        n = torch.tensor([float(len(part)) for part in parts], dtype=torch.float64, device=x.device)
        squares = torch.stack([p.mT @ p for p in parts])
        upper = squares.triu()  # a product need not be symmetric to the last bit, but what comes back from disk is
        return cls(n, torch.stack([p.sum(0) for p in parts]), upper + upper.triu(1).mT)

    def covariance(self, without: int | None = None) -> Tensor:
        """The covariance of all rows, or of all but those of one fold."""
        keep = torch.ones(FOLDS, dtype=torch.bool)
        if without is not None:
            keep[without] = False
        keep = keep.to(self.n.device)
        n, total = self.n[keep].sum(), self.sums[keep].sum(0)
        return (self.squares[keep].sum(0) - torch.outer(total, total) / n) / (n - 1)

    def weighted(self, W: Tensor) -> Tensor:
        """tr(CW) of the covariances without each fold in turn, for several symmetric W [k, d, d]: [k, FOLDS].

        >>> x = torch.randn(100, 3, dtype=torch.float64)
        >>> folds, W = FoldCovariance.of(x, torch.arange(100)), torch.diag(torch.arange(3.0).double())
        >>> torch.allclose(folds.weighted(W[None])[0, 2], (folds.covariance(2) @ W).trace())
        True
        """
        rest = 1.0 - torch.eye(FOLDS, dtype=torch.float64, device=self.n.device)
        n, sums = rest @ self.n, rest @ self.sums
        within = W.flatten(1) @ self.squares.flatten(1).mT @ rest
        return (within - ((sums @ W) * sums).sum(-1) / n) / (n - 1)

    def state(self) -> dict[str, Tensor]:
        """Tensors by name, in float64: a run that goes on from them repeats one that was never interrupted."""
        return {"n": self.n.cpu(), "sums": self.sums.cpu(), "squares": packed(self.squares, torch.float64)}

    @classmethod
    def load(cls, state: dict[str, Tensor], device: torch.device | None = None) -> FoldCovariance:
        squares = unpacked(state["squares"])
        return cls(state["n"].double().to(device), state["sums"].double().to(device), squares.to(device))

    def to(self, device: torch.device) -> FoldCovariance:
        return FoldCovariance(self.n.to(device), self.sums.to(device), self.squares.to(device))
