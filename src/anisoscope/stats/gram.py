"""Moments of few wide rows, from the products of the rows with each other.

Notation: n rows x of width d, n ≤ d; c their mean; lines: all rows, or those that remain without a fold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anisoscope.errors import TooFewRows
from anisoscope.numerics.host import float64_copy
from anisoscope.numerics.linalg import eigenvalues
from anisoscope.stats.moments import Moments, column_blocks


@dataclass
class Gram:
    """Products of n rows x about their mean c, so that a large common mean costs no digits."""

    about: Tensor  # (x − c)·(y − c) [n, n]
    along: Tensor  # (x − c)·c [n]
    square: float = 0.0  # ‖c‖²

    @classmethod
    def zeros(cls, n: int) -> Gram:
        return cls(torch.zeros(n, n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64))

    def add(self, block: Tensor) -> None:
        """Add some columns of the rows, in float64; they are overwritten."""
        mean = block.mean(0)
        block -= mean
        self.about.addmm_(block, block.T)
        self.along += block @ mean
        self.square += float(mean.square().sum())

    def products(self, kept: Tensor, *, centred: bool) -> Tensor:
        """The products of the rows that are kept, about their own mean or about 0."""
        at = kept.nonzero().squeeze(1)
        inner = self.about[at.unsqueeze(1), at]
        if centred:
            means = inner.mean(0)
            inner -= means
            inner -= (means - means.mean()).unsqueeze(1)
        else:
            inner += self.along[at]
            inner += (self.along[at] + self.square).unsqueeze(1)
        return inner


class GramMoments(Moments):
    """Moments of few wide rows, as lines of some of them, from their n×n Gram matrix instead of a d×d scatter.

    The spectra of X and Xᵀ are the same but for zeros, so that metrics of the spectrum read the same numbers.
    """

    def __init__(self, gram: Gram, kept: Tensor, mean: Tensor, *, single: bool = False) -> None:
        super().__init__(kept.sum(1).double(), mean)
        self.gram, self.kept, self.single = gram, kept, single
        if single:
            self._n, self._mean = int(kept.sum()), mean[0]

    @classmethod
    def of(cls, parts: Sequence[Moments], kept: Tensor) -> GramMoments:
        """Of several thin parts; `kept` [lines, parts] says which of them a line has."""
        lines = kept.bool().repeat_interleave(torch.tensor([part.n for part in parts]), dim=1)
        gram, share = Gram.zeros(len(lines.T)), lines.double() / lines.sum(1, keepdim=True).clamp_min(1)
        mean = torch.empty(len(lines), parts[0].width, dtype=torch.float64)
        for columns in column_blocks(lines.shape[1], parts[0].width):
            block = float64_copy(torch.cat([rows.gathered(columns).cpu() for part in parts for rows in part.rows]))
            mean[:, columns] = share @ block
            gram.add(block)
        return cls(gram, lines, mean)

    @property
    def width(self) -> int:
        return self._mean.shape[-1]

    @property
    def thin(self) -> bool:
        return False

    @property
    def scatter(self) -> Tensor:
        raise TooFewRows(f"{int(self.kept.shape[1])} rows in {self.width} dimensions: their d×d matrix is not made")

    @property
    def trace(self) -> Tensor:
        """tr of the scatter of each line: Σ‖x − c‖² − n‖m − c‖²."""
        kept = self.kept.double()
        inner = kept @ self.gram.about
        found = kept @ self.gram.about.diagonal() - (inner * kept).sum(1) / kept.sum(1).clamp_min(1)
        return found[0] if self.single else found

    @property
    def along_mean(self) -> Tensor:
        """‖(X − m) m‖² of each line, whose entries are centred sums of rows of the Gram matrix."""
        kept = self.kept.double()
        sizes = kept.sum(1, keepdim=True).clamp_min(1)
        products = kept @ self.gram.about / sizes + self.gram.along  # x·m but for what is the same for all rows
        centred = (products - (products * kept).sum(1, keepdim=True) / sizes) * kept
        found = centred.square().sum(1)
        return found[0] if self.single else found

    def eigenvalues(self, *, centred: bool = True) -> Tensor:
        """Squared singular values of each line, descending, zeros beyond its rows; one line at a time."""
        if centred not in self.spectra:
            found = torch.zeros(len(self.kept), self.width, dtype=torch.float64)
            for line, kept in zip(found, self.kept, strict=True):
                values = eigenvalues(self.gram.products(kept, centred=centred)) if bool(kept.any()) else line[:0]
                line[: len(values)] = values.clamp_min(0)
            self.spectra[centred] = found[0] if self.single else found
        return self.spectra[centred]

    def line(self, index: int) -> GramMoments:
        """One line, as plain moments."""
        one = GramMoments(self.gram, self.kept[index : index + 1], self._mean[index : index + 1], single=True)
        one.spectra = {centred: values[index] for centred, values in self.spectra.items()}
        return one
