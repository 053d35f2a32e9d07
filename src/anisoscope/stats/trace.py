"""Moments of the rows of many sites at once, on their device, without device–host synchronisation.

Notation: S sites, k rows of each, width d, h a row, u = h/‖h‖; C the scatter of the kept rows, about their mean or,
for gradients, about 0. Everything is float64 (float32 where a device has no float64).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anisoscope.numerics.linalg import has_float64

QUANTITIES = ("n", "dropped", "average_cosine", "drift", "mean_norm", "participation_ratio")


@dataclass(frozen=True)
class Trace:
    """Sums over the rows of S sites; `merge` adds those of other rows of the same sites."""

    centred: int  # the first `centred` sites have their scatter about the mean, the others about 0
    n: Tensor  # [S], kept rows
    dropped: Tensor  # [S], rows that are not finite
    directed: Tensor  # [S], rows that are not zero
    norms: Tensor  # [S], Σ‖h‖
    total: Tensor  # [S, d], Σh
    units: Tensor  # [S, d], Σu
    scatter: Tensor  # [S, d, d]

    @classmethod
    def of(cls, rows: Tensor, valid: Tensor, *, centred: int) -> Trace:
        """The sums of rows [S, k, d]; rows that are not `valid` [S or 1, k] are padding and ignored.

        >>> rows = torch.tensor([[[0.0, 1.0], [2.0, 1.0], [9.0, 9.0]]])
        >>> found = Trace.of(rows, torch.tensor([[True, True, False]]), centred=1)
        >>> found.n.tolist(), found.total.tolist(), found.scatter.tolist()
        ([2.0], [[2.0, 2.0]], [[[2.0, 0.0], [0.0, 0.0]]])
        """
        norm = torch.linalg.vector_norm(rows, dim=-1, dtype=wide(rows.device))
        kept = norm.isfinite() & valid  # a row that is not finite has no finite norm
        x = torch.where(kept.unsqueeze(-1), rows, 0.0).to(norm.dtype)  # converted last, to halve the memory traffic
        norm = torch.where(kept, norm, 0.0)
        ones, directed = kept.to(x.dtype), norm > 0
        n = ones.sum(-1)
        # one product for both sums, of rows and of unit rows
        sums = torch.stack((ones, torch.where(directed, norm.reciprocal(), 0.0)), dim=1) @ x
        total, units = sums[:, 0], sums[:, 1]
        about = total[:centred] / n[:centred].clamp(min=1).unsqueeze(-1)
        x[:centred].addcmul_(ones[:centred].unsqueeze(-1), about.unsqueeze(1), value=-1)
        counts = {"n": n, "dropped": valid.sum(-1) - n, "directed": directed.sum(-1).to(x.dtype)}
        return cls(centred, **counts, norms=norm.sum(-1), total=total, units=units, scatter=x.mT @ x)

    def merge(self, other: Trace) -> Trace:
        """The sums of both sets of rows (Chan, Golub and LeVeque 1983)."""
        gap = (other.mean - self.mean)[: self.centred]
        weight = (self.n * other.n / (self.n + other.n).clamp(min=1))[: self.centred]
        scatter = self.scatter + other.scatter
        scatter[: self.centred] += (weight.unsqueeze(-1) * gap).unsqueeze(-1) * gap.unsqueeze(-2)
        names = ("n", "dropped", "directed", "norms", "total", "units")
        added = {name: getattr(self, name) + getattr(other, name) for name in names}
        return Trace(self.centred, **added, scatter=scatter)

    @property
    def mean(self) -> Tensor:
        """The mean rows [S, d]; 0 for a site without rows."""
        return self.total / self.n.clamp(min=1).unsqueeze(-1)

    def quantities(self) -> Tensor:
        """The values of QUANTITIES [S, 6], which need no eigenvalues; NaN where there are too few rows."""
        pairs = self.directed * (self.directed - 1)
        cosine = (self.units.square().sum(-1) - self.directed) / pairs
        drift = torch.linalg.vector_norm(self.total, dim=-1) / self.n
        variance = self.scatter.diagonal(dim1=-2, dim2=-1).sum(-1)
        size = torch.linalg.vector_norm(self.scatter.flatten(1), dim=-1)
        found = (self.n, self.dropped, cosine.where(pairs > 0, torch.nan), drift, self.norms / self.n)
        return torch.stack((*found, (variance / size).square()), dim=-1)


def wide(device: torch.device) -> torch.dtype:
    """The most precise floating-point type that a device supports."""
    return torch.float64 if has_float64(device) else torch.float32
