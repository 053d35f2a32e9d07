"""The rows of one measured step: activations to fit on, and activations with their gradients to test on.

A context is wholly in the fit half or wholly in the test half, by a hash of its content.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from anisoscope.capture.gradients.gradient_pass import GradientPass, SiteRows
from anisoscope.capture.sites.site import Site
from anisoscope.errors import AnisoscopeError
from anisoscope.numerics.hashing import fold_of, row_hash

_LABELS = ("context", "position", "token", "target", "masked")


@dataclass(frozen=True)
class Half:
    """Rows of one half at one site, with what each row is; labels live on the host."""

    x: Tensor  # [n, d]
    g: Tensor | None  # [n, d], test half only
    context: Tensor  # [n] hash of the context
    position: Tensor
    token: Tensor  # the original token, never [MASK]
    target: Tensor  # −1 where there is none
    masked: Tensor  # 1 masked, 0 not, −1 where nothing is masked by design
    dropped: int = 0  # rows with NaN or infinity

    @property
    def fold(self) -> Tensor:
        return fold_of(self.context)

    @property
    def contexts(self) -> int:
        return int(self.context.unique().numel())

    def order(self, seed: int = 0) -> Tensor:
        """A shuffled order of the rows that does not depend on batching."""
        return row_hash(self.context, self.position, seed=seed)

    def __len__(self) -> int:
        return len(self.x)


@dataclass
class StepRows:
    """What the passes of one step gave, site by site."""

    step: int
    fit: dict[Site, list[SiteRows]] = field(default_factory=dict)
    test: dict[Site, list[tuple[SiteRows, float]]] = field(default_factory=dict)
    loss: float = 0.0
    tokens: int = 0
    losses: list[tuple[int, float, int]] = field(default_factory=list)  # (context hash, summed loss, tokens)
    weights: list[tuple[int, dict[str, Tensor]]] = field(default_factory=list)  # (fold or −1, gradients by name)
    embedded: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)  # ids, gradients, fold of each
    unreached: set[Site] = field(default_factory=set)

    def add_fit(self, found: GradientPass) -> None:
        for site, rows in found.sites.items():
            self.fit.setdefault(site, []).append(rows)

    def add_test(self, found: GradientPass, *, factor: float = 1.0) -> None:
        """Rows with gradients; `factor` turns them into gradients of the summed loss."""
        for site, rows in found.sites.items():
            if rows.g is not None:
                self.test.setdefault(site, []).append((rows, factor))
        self.unreached |= set(found.unreached)
        self.loss += found.loss
        self.tokens += found.tokens

    def sites(self) -> list[Site]:
        return [site for site in self.fit if site in self.test]

    def fit_half(self, site: Site) -> Half:
        """The rows to fit on of one site, whether or not it has gradients."""
        return _joined([(rows, 1.0) for rows in self.fit[site]])

    def lacking(self) -> str:
        """Why the step cannot be measured, or "": contexts of one half only, or no finite gradient."""
        fit = sum(len(r.x) for rows in self.fit.values() for r in rows)
        if not fit or not any(len(rows.x) for parts in self.test.values() for rows, _ in parts):
            return f"all contexts of step {self.step} are in one half"
        for site, rows in self.fit.items():
            if not any(bool(part.x.isfinite().all(1).any()) for part in rows):
                return f"no activation of step {self.step} is finite at {site}"
        for site, parts in self.test.items():
            scaled = [rows.g * factor for rows, factor in parts if rows.g is not None]
            if not any(bool(g.isfinite().all(1).any()) for g in scaled):
                return f"no gradient of step {self.step} is finite at {site}"
        return ""

    def halves(self) -> Iterator[tuple[Site, Half, Half]]:
        """Each site's fit and test half; an error where a half is empty."""
        if not self.fit or not self.test:
            seen = sum(len(r.x) for rows in self.fit.values() for r in rows)
            raise AnisoscopeError(
                f"step {self.step} has no contexts for {'the test' if self.fit else 'the fit'} half ({seen} rows to "
                "fit on); contexts are split in two by a hash: give at least eight different contexts."
            )
        for site in self.sites():
            fit, test = self.fit_half(site), _joined(self.test[site])
            if not len(fit) or not len(test):
                lost = f"{fit.dropped} rows to fit on and {test.dropped} to test on were not finite"
                raise AnisoscopeError(
                    f"nothing is left at {site} in step {self.step}: {lost}; lower the learning rate, or look at the "
                    "step before the loss became NaN."
                )
            yield site, fit, test


def _joined(parts: list[tuple[SiteRows, float]]) -> Half:
    x = torch.cat([rows.x for rows, _ in parts])
    with_g = all(rows.g is not None for rows, _ in parts)
    g = torch.cat([rows.g * factor for rows, factor in parts if rows.g is not None]) if with_g else None
    columns = {name: torch.cat([_label(rows, name) for rows, _ in parts]) for name in _LABELS}
    bad = ~x.isfinite().all(1) if g is None else ~(x.isfinite().all(1) & g.isfinite().all(1))
    dropped = int(bad.sum())
    if dropped:
        keep = (~bad).nonzero().squeeze(1)
        x, g = x[keep], None if g is None else g[keep]
        columns = {name: value[keep.cpu()] for name, value in columns.items()}
    return Half(x, g, **columns, dropped=dropped)


def _label(rows: SiteRows, name: str) -> Tensor:
    index, words = rows.index, rows.words
    if name == "context":
        return index.context.cpu()
    if name == "position":
        return index.position.cpu()
    if name == "masked":
        return torch.full((len(rows.x),), -1) if words.masked is None else words.masked.cpu().long()
    return (words.original if name == "token" else words.target).cpu()


def take(inputs: Mapping[str, Any], chosen: Tensor) -> dict[str, Any]:
    """Some contexts of a batch; what is not per context stays as it is."""
    size = next(len(v) for v in inputs.values() if isinstance(v, Tensor) and v.dim() > 1)
    return {
        name: value[chosen.to(value.device)]
        if isinstance(value, Tensor) and value.dim() and len(value) == size
        else value
        for name, value in inputs.items()
    }
