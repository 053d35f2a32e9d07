"""The average cosine of sampled rows, as they are and about their mean, with every fold of contexts left out in turn.

Notation: h a row, m the mean of all sampled rows, δ how far the mean of the rows that stay lies from m. One pass over
the rows serves all folds: Σ (h − m − δ) / ‖h − m − δ‖ needs products of h − m with the few δ alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from anisoscope.errors import TooFewRows
from anisoscope.metrics.engine.lines import unless
from anisoscope.numerics.linalg import has_float64
from anisoscope.stats.directions import Directions
from anisoscope.stats.sample import Sample

_NOISE = 1e-13  # of the largest norm: what rounding of the mean leaves of equal rows is no direction


def mean_pair_cosine(units: Tensor, n: float) -> float:
    """(‖Σu‖² − n) / (n(n−1)): the mean cosine over all pairs of n unit rows, from their sum."""
    return float(pair_cosines(units, torch.tensor(float(n), dtype=torch.float64, device=units.device)))


def pair_cosines(units: Tensor, n: Tensor) -> Tensor:
    """The same of several sums [..., d] of n [...] unit rows."""
    found = (units.square().sum(-1) - n) / (n * (n - 1))
    return unless(n < 2, found, lambda: too_few_directions(float(n)))


def without_direction(directions: Directions, _: dict[str, Any]) -> Tensor:
    """Rows of zeros, which have no direction: a metric of cosines leaves them out."""
    assert directions.zeros is not None
    return directions.zeros


def too_few_directions(n: float) -> TooFewRows:
    """What to say of an average over pairs of which there are none; more rows of zeros would not help."""
    if n == 0:
        return TooFewRows("every row is exactly zero, so none has a direction; look at the model")
    return TooFewRows(f"an average over pairs needs at least 2 rows that are not zero, seen {int(n)}; give more")


@dataclass(frozen=True)
class Centred:
    """Sampled rows whose average cosines are found once, for all rows and without each fold."""

    rows: Tensor  # [n, d] float64
    fold: Tensor  # [n]
    left_out: tuple[int, ...] = ()  # a line for each; () for all rows
    _known: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, sample: Sample) -> Centred:
        rows = sample.rows.flatten(1)
        return cls(rows.double() if has_float64(rows.device) else rows.cpu().double(), sample.fold)

    def without(self, *folds: int) -> Centred:
        """Lines of the rows that stay when each of these folds is left out; −1 leaves out none."""
        return Centred(self.rows, self.fold, folds)

    @property
    def n(self) -> int:
        """Rows of the first line."""
        return int((self.fold != self.left_out[0]).sum()) if self.left_out else len(self.rows)

    @property
    def plain(self) -> Tensor:
        """The average cosine of the rows as they are."""
        return self._cosines("plain", self._plain_sums)

    @property
    def centred(self) -> Tensor:
        """The average cosine of the rows about the mean of those that stay."""
        return self._cosines("centred", self._centred_sums)

    def _cosines(self, name: str, sums: Any) -> Tensor:
        if name not in self._known:
            units, counts = sums()
            units, counts = (units, counts) if self.left_out else (units[0], counts[0])
            self._known[name] = pair_cosines(units.cpu(), counts.cpu())
        found: Tensor = self._known[name]
        return found

    def _members(self) -> Tensor:
        """Which rows stay [n, lines]."""
        return (self.fold.unsqueeze(1) != torch.tensor(self.left_out or (-1,))).to(self.rows)

    def _plain_sums(self) -> tuple[Tensor, Tensor]:
        """Σ h/‖h‖ and how many rows have a direction, by line."""
        there = self._members()
        norms = torch.linalg.vector_norm(self.rows, dim=1)
        weights = there * torch.where(norms > 0, 1.0 / norms, 0.0).unsqueeze(1)
        return weights.T @ self.rows, there.T @ (norms > 0).to(there)

    def _centred_sums(self) -> tuple[Tensor, Tensor]:
        """The same of h − m − δ."""
        there = self._members()
        rows = self.rows - self.rows.mean(0)
        shift = (there.T @ rows) / there.sum(0).clamp_min(1.0).unsqueeze(1)  # δ [lines, d]
        squares = rows.square().sum(1, keepdim=True) - 2.0 * rows @ shift.T + shift.square().sum(1)
        noise = _NOISE * torch.linalg.vector_norm(self.rows, dim=1).max()
        has = there * (squares > noise**2)
        weights = torch.where(has > 0, squares.clamp_min(noise**2).rsqrt(), 0.0)
        return weights.T @ rows - weights.sum(0).unsqueeze(1) * shift, has.sum(0)
