"""Models of every modality that never were: planted anisotropy and drift, and queries and keys over training.

A value is the mean of its fold values and its replicates leave one fold out, as in fake_profiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from anisoscope.results.query import Table
from support.fake_profiles import Sheet

STEPS = (0, 1, 4, 16, 64, 256, 1000)
Depth = Callable[[float], float]


class Media(Sheet):
    """Rows of one model, and what run.json says of it."""

    def __init__(
        self, model: str = "m", modality: str = "text", *, kind: str = "", entry: Any = None, **more: Any
    ) -> None:
        super().__init__(model, **more)
        self.kind = kind or ("stage" if modality == "convolution" else "resid")
        self.entry = {"name": model, "modality": {self.stack: modality}, **(entry or {})}

    def place(self, metric: str, value: float, *, layer: int, kind: str, **more: Any) -> Media:
        """A metric at one site, at every step."""
        place = {"layer": layer, "depth": layer / self.layers, "kind": kind, "group": "", "variant": "", "head": None}
        self.rows += [self._row({"step": s, **place, "metric": metric, **more}, value) for s in self.steps]
        return self

    def stream(
        self,
        cosine: Depth | float = 0.5,
        drift: Depth | float = lambda depth: 1 + depth,
        *,
        share: float | None = 0.95,
        norm: float | None = 4.0,
        variant: str = "",
        ends: bool = True,
    ) -> Media:
        """Embedding, blocks and final norm; the final norm lies far off, so that nothing may count it."""
        sites = [*([(0, "embed")] if ends else []), *((n, self.kind) for n in range(1, self.layers + 1))]
        for layer, kind in sites:
            self._site(layer, kind, layer / self.layers, cosine, drift, share=share, norm=norm, variant=variant)
        if ends:
            self.place("average_cosine", -0.5, layer=self.layers, kind="final", variant=variant)
            self.place("drift", 100.0, layer=self.layers, kind="final", variant=variant)
        return self

    def _site(
        self, layer: int, kind: str, depth: float, cosine: Any, drift: Any, *, share: Any, norm: Any, variant: str
    ) -> None:
        given = {"average_cosine": cosine, "drift": drift, "explained_by_drift": share, "mean_norm": norm}
        for metric, truth in given.items():
            if truth is not None:
                value = truth(depth) if callable(truth) else truth
                self.place(metric, value, layer=layer, kind=kind, variant=variant)


class Course(Sheet):
    """Queries, keys and attention of one model over training."""

    def __init__(self, model: str = "m", *, width: int | None = 128, heads: int = 2, **more: Any) -> None:
        super().__init__(model, **{"layers": 2, "steps": STEPS, **more})
        self.heads = heads
        self.entry = {"name": model, **({} if width is None else {"width": width})}

    def drifting(
        self, query: float = 3.0, key: float = 3.0, cosine: float = 0.6, *, start: float = 0.05, suffix: str = ""
    ) -> Course:
        """Norms of the means grow by `query` and `key`, |cos| by `cosine`; every other head is opposed."""
        for kind, growth in (("query", query), ("key", key)):
            self.add("drift", lambda step, _, g=growth: 1 + g * late(step), kind=f"{kind}{suffix}")
        for head in range(self.heads):
            sign = -1 if head % 2 else 1
            truth = lambda step, _, s=sign: s * (start + cosine * late(step))  # noqa: E731
            self.add("qk_cosine", truth, kind=f"query{suffix}", head=head)
        self.add("qk_cosine", 0.0, kind=f"query{suffix}")  # the mean over heads, in which the signs cancel
        return self

    def attending(self, sharp: float = 0.5, *, metrics: Iterable[str] = ("attention_sharpness", "attention_entropy"),
                  variant: str = "") -> Course:  # fmt: skip
        """Sharpness grows by `sharp` and entropy falls by as much."""
        for metric in metrics:
            sign = -1 if metric == "attention_entropy" else 1
            truth = lambda step, _, s=sign: (0.9 if s < 0 else 0.1) + s * sharp * late(step)  # noqa: E731
            self.add(metric, truth, kind="scores", variant=variant)
        return self


def late(step: int) -> float:
    return math.log1p(step) / math.log1p(STEPS[-1])


def media_table(*sheets: Any) -> Table:
    """One table of some models, with what run.json says of them; stacks of one model share an entry."""
    entries: dict[str, dict[str, Any]] = {}
    for sheet in sheets:
        mine = entries.setdefault(sheet.model, dict(sheet.entry))
        if "modality" in sheet.entry:
            mine["modality"] = {**mine.get("modality", {}), **sheet.entry["modality"]}
    return Table.from_records([row for sheet in sheets for row in sheet.rows], {"models": list(entries.values())})
