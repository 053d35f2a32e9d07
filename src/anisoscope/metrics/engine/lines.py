"""Statistics of all folds, and of all folds but each in turn, as one object with a leading dimension: its lines.

Notation: L lines (the first is everything), P parts of which a fold may have several, w [L, P] of zeros and ones: which
parts a line takes. Sums are w @ parts: nothing is subtracted, so no digit is lost where one fold outweighs the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from anisoscope.errors import TooFewRows
from anisoscope.numerics.linalg import eigenvalues
from anisoscope.stats.moments import Moments

Part = tuple[int, Any]  # fold, statistic


def unless(bad: Tensor, value: Tensor, why: Callable[[], TooFewRows]) -> Tensor:
    """The values, NaN where they cannot be had; a single one raises and says why.

    >>> unless(torch.tensor([False, True]), torch.tensor([1.0, 2.0]), lambda: TooFewRows("two")).tolist()
    [1.0, nan]
    """
    if not bad.ndim and bool(bad):
        raise why()
    return torch.where(bad, torch.nan, value)


@dataclass
class MomentLines:
    """Moments by line, on the host unless they are wide; reads as `Moments` does."""

    n: Tensor  # [L] or [L, 1] where there are heads
    mean: Tensor  # [L, ..., d]
    scatter: Tensor  # [L, ..., d, d]
    spectra: dict[bool, Tensor] = field(default_factory=dict, repr=False)

    @property
    def width(self) -> int:
        return self.mean.shape[-1]

    def matrix(self, *, centred: bool) -> Tensor:
        """Σ (x−m)(x−m)ᵀ, or Σ xxᵀ."""
        if centred:
            return self.scatter
        return self.scatter + self.n[..., None, None] * self.mean.unsqueeze(-1) * self.mean.unsqueeze(-2)

    def eigenvalues(self, *, centred: bool = True) -> Tensor:
        """Squared singular values of the rows of each line, descending; computed once."""
        if centred not in self.spectra:
            self.spectra[centred] = eigenvalues(self.matrix(centred=centred))
        return self.spectra[centred]

    def line(self, index: int) -> Moments:
        state = {"n": self.n.flatten()[index], "mean": self.mean[index], "scatter": self.scatter[index]}
        return Moments.load(state)


def stack_lines(parts: Sequence[Part], folds: Sequence[int]) -> Any:
    """One statistic with a line for everything and one without each of these folds.

    Every part has rows; a fold has one part where they are moments.
    """
    w = torch.tensor([[float(fold != gone) for fold, _ in parts] for gone in (-1, *folds)], dtype=torch.float64)
    counts = w @ torch.tensor([float(part.n) for _, part in parts], dtype=torch.float64)
    if isinstance(parts[0][1], Moments):
        return _moment_lines([part.on_host() for _, part in parts], w, counts)
    kind, states = type(parts[0][1]), [tensors_of(part) for _, part in parts]
    found: dict[str, Tensor] = {}
    for name, like in states[0].items():
        stacked = torch.stack([state[name].to(like.device) for state in states]).cpu()  # resumed ones lie on the host
        found[name] = (_most if name in getattr(kind, "largest", ()) else _sum)(w, stacked)
    heads = max(0, max(value.ndim for value in found.values()) - 2)
    return kind(n=counts.reshape(-1, *[1] * heads), **found)


def line_of(stacked: Any, index: int) -> Any:
    """One line of a stacked statistic, as a plain one."""
    if isinstance(stacked, MomentLines):
        return stacked.line(index)
    values = {name: value[index] for name, value in tensors_of(stacked).items()}
    return type(stacked)(n=int(stacked.n.flatten()[index]), **values)


def tensors_of(stat: Any) -> dict[str, Tensor]:
    """The sums and maxima of a statistic by name."""
    return {name: value for name, value in vars(stat).items() if name != "n" and isinstance(value, Tensor)}


def _sum(w: Tensor, parts: Tensor) -> Tensor:
    return (w @ parts.reshape(len(parts), -1).double()).view(len(w), *parts.shape[1:])


def _most(w: Tensor, parts: Tensor) -> Tensor:
    """The largest of the parts of each line, none of them negative; 0 where it has none."""
    return (w.view(*w.shape, *[1] * (parts.ndim - 1)) * parts).amax(1)


def _moment_lines(parts: Sequence[Moments], w: Tensor, counts: Tensor) -> MomentLines:
    """Chan, Golub and LeVeque (1983) for all lines at once: Σ Sₚ + Σ nₚ (mₚ − m)(mₚ − m)ᵀ over the parts of a line."""
    device = parts[0].mean.device
    heads = parts[0].mean.ndim - 1
    n = torch.tensor([float(part.n) for part in parts], dtype=torch.float64, device=device)
    w, counts = w.to(device), counts.to(device)
    means = torch.stack([part.mean for part in parts])  # [P, ..., d]
    mean = _sum(w * n, means) / counts.clamp_min(1.0).reshape(-1, *[1] * (heads + 1))
    gaps = means - mean.unsqueeze(1)  # [L, P, ..., d]
    weighted = gaps * (w * n).view(*w.shape, *[1] * (heads + 1))
    scatter = _left_out_sums([part.scatter for part in parts], w)
    scatter += weighted.movedim(1, -1) @ gaps.movedim(1, -2)  # [L, ..., d, P] @ [L, ..., P, d]
    return MomentLines(counts.reshape(-1, *[1] * heads), mean, scatter)


def _left_out_sums(parts: Sequence[Tensor], w: Tensor) -> Tensor:
    """w @ parts, where a line takes all parts or all but one, without a copy of them all: matrices are large."""
    out = parts[0].new_zeros(len(w), *parts[0].shape)
    lacking = [row.index(0.0) if 0.0 in row else -1 for row in w.tolist()]
    for places in (range(len(parts)), range(len(parts) - 1, -1, -1)):  # what lies before a part, what lies behind it
        run = torch.zeros_like(parts[0])
        for p in places:
            if p in lacking:
                out[lacking.index(p)] += run
            run += parts[p]
    for line, p in enumerate(lacking):
        if p < 0:
            out[line] = run
    return out
