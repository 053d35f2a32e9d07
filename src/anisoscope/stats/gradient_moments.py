"""Second moments of gradients: all that the split between a subspace and its complement needs.

Notation: g rows of G, M = Σ ggᵀ (uncentred), U = Σ ggᵀ/‖g‖² (every row counts the same). Sums, so they merge by adding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from anisoscope.numerics.hashing import FOLDS, fold_of


@dataclass
class GradientMoments:
    """Moments of one site: by context fold, of unit rows, and of groups of rows.

    >>> one = GradientMoments().update(torch.eye(4), context=torch.arange(4))
    >>> two = one.merge(one)
    >>> float(two.total.trace()), two.n
    (8.0, 8)
    """

    folds: Tensor | None = None  # [FOLDS, d, d]
    unit: Tensor | None = None  # [d, d]
    groups: dict[str, Tensor] = field(default_factory=dict)  # [d, d] each
    counts: dict[str, int] = field(default_factory=dict)  # rows of each group
    n: int = 0
    still: int = 0  # rows without any gradient
    contexts: int = 0

    @property
    def total(self) -> Tensor:
        assert self.folds is not None
        return self.folds.sum(0)

    def update(self, g: Tensor, *, context: Tensor, groups: Mapping[str, Tensor] | None = None) -> GradientMoments:
        """Add rows; `groups` are masks [n] on the host. Contexts are counted by their hashes within one call."""
        rows = g.double()
        fold = fold_of(context.cpu())
        parts = torch.stack([_moment(rows, fold == f) for f in range(FOLDS)])
        norms = rows.norm(dim=1)
        unit = rows / norms.clamp_min(torch.finfo(torch.float64).tiny).unsqueeze(1)
        self._add("folds", parts)
        self._add("unit", unit.mT @ unit)
        for name, mask in (groups or {}).items():
            moment = _moment(rows, mask)
            self.groups[name] = self.groups[name] + moment if name in self.groups else moment
            self.counts[name] = self.counts.get(name, 0) + int(mask.sum())
        self.n += len(rows)
        self.still += int((norms == 0).sum())
        self.contexts += int(context.unique().numel())
        return self

    def _add(self, name: str, value: Tensor) -> None:
        old = getattr(self, name)
        setattr(self, name, value if old is None else old + value.to(old.device))

    def merge(self, other: GradientMoments) -> GradientMoments:
        out = GradientMoments()
        for part in (self, other):
            if part.folds is None or part.unit is None:
                continue
            out._add("folds", part.folds)
            out._add("unit", part.unit)
            for name, moment in part.groups.items():
                out.groups[name] = out.groups[name] + moment if name in out.groups else moment
                out.counts[name] = out.counts.get(name, 0) + part.counts[name]
            out.n, out.still, out.contexts = out.n + part.n, out.still + part.still, out.contexts + part.contexts
        return out

    def to(self, device: torch.device) -> GradientMoments:
        """The same moments elsewhere."""
        if self.folds is None or self.unit is None:
            return self
        groups = {name: moment.to(device) for name, moment in self.groups.items()}
        folds, unit = self.folds.to(device), self.unit.to(device)
        return GradientMoments(folds, unit, groups, dict(self.counts), self.n, self.still, self.contexts)

    def state(self) -> dict[str, Tensor]:
        """Tensors by name: upper triangles in float32, whose rounding (6e-8) is far below the sampling error."""
        if self.folds is None or self.unit is None:
            return {}
        sizes = torch.tensor([self.n, self.still, self.contexts])
        plain = {"folds": packed(self.folds), "unit": packed(self.unit), "sizes": sizes}
        for name, moment in self.groups.items():
            plain[f"group:{name}"] = packed(moment)
            plain[f"count:{name}"] = torch.tensor(self.counts[name])
        return plain

    @classmethod
    def load(cls, state: Mapping[str, Tensor]) -> GradientMoments:
        if "folds" not in state:
            return cls()
        n, still, contexts = (int(v) for v in state["sizes"])
        names = [name.removeprefix("group:") for name in state if name.startswith("group:")]
        groups = {name: unpacked(state[f"group:{name}"]) for name in names}
        counts = {name: int(state[f"count:{name}"]) for name in names}
        return cls(unpacked(state["folds"]), unpacked(state["unit"]), groups, counts, n, still, contexts)


def _moment(rows: Tensor, mask: Tensor) -> Tensor:
    mine = rows[mask.nonzero().squeeze(1).to(rows.device)]
    return mine.mT @ mine


def packed(matrix: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The upper triangle of symmetric matrices [..., d, d], on the host; in float32 by default.

    >>> torch.equal(unpacked(packed(torch.eye(3))), torch.eye(3, dtype=torch.float64))
    True
    """
    d = matrix.shape[-1]
    rows, columns = torch.triu_indices(d, d, device=matrix.device)
    return matrix[..., rows, columns].to(dtype).cpu()


def unpacked(triangle: Tensor) -> Tensor:
    """Symmetric matrices in float64 from their upper triangles."""
    d = int(((8 * triangle.shape[-1] + 1) ** 0.5 - 1) / 2 + 0.5)
    rows, columns = torch.triu_indices(d, d)
    out = torch.zeros(*triangle.shape[:-1], d, d, dtype=torch.float64)
    out[..., rows, columns] = triangle.double()
    out[..., columns, rows] = triangle.double()
    return out
