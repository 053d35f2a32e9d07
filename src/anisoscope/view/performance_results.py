"""The table of the performance study as marks that can be drawn."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from anisoscope.results.quantity import jackknife
from anisoscope.results.schema import variant_name
from anisoscope.view.words import finite, site_name

REPAIRS = {"raw": "raw", "mean": "mean removed", "all_but_top": "all but the top", "whitened": "whitened"}
READINGS = {"patched": "patched into the model", "readout": "fresh readout"}
GEOMETRY = {
    "svd_ratio": "Anisotropy σ₁/Σσ",
    "average_cosine": "Average cosine",
    "two_nn": "Intrinsic dimension (TwoNN)",
    "iso_score": "IsoScore",
}
Site = tuple[str, int, str]  # stack, layer, kind
Step = int | None


class Mark(NamedTuple):
    """One number with its interval."""

    value: float
    low: float
    high: float
    n: int
    contexts: int
    note: str

    @property
    def known(self) -> bool:
        return math.isfinite(self.value)


class Book:
    """The numbers of one model."""

    def __init__(self, records: Iterable[Mapping[str, Any]], model: str) -> None:
        self.model = model
        self.rows: dict[tuple[str, str, Step, Site | None], Mapping[str, Any]] = {}
        for row in records:
            if row["model"] == model:
                place = None if row["layer"] is None else (row["stack"], row["layer"], row["kind"])
                self.rows[row["metric"], row["variant"], row["step"], place] = row
        there = {key[2:] for key in self.rows if key[3] is not None and key[0] != "performance_correlation"}
        self.steps: list[Step] = sorted({step for step, _ in there}, key=lambda s: -1 if s is None else s)
        self.sites: list[Site] = sorted({site for _, site in there if site}, key=_depth)
        words = [key[1] for key in self.rows if key[0] == "probe_selectivity"]
        self.tasks = list(dict.fromkeys(dict(w.split("=") for w in v.split(";"))["task"] for v in words))

    @classmethod
    def all(cls, records: Sequence[Mapping[str, Any]]) -> list[Book]:
        """A book for each model of a table."""
        return [cls(records, model) for model in dict.fromkeys(str(row["model"]) for row in records)]

    def name(self, site: Site) -> str:
        return site_name(site[1], site[2])

    def short(self, site: Site) -> str:
        return {"embed": "emb", "final": "fin"}.get(site[2], str(site[1]))

    def value(self, metric: str, step: Step, site: Site | None, **variant: Any) -> Mark | None:
        row = self.rows.get((metric, variant_name(variant), step, site))
        if row is None:
            return None
        low, high = (math.nan if row[k] is None else float(row[k]) for k in ("low", "high"))
        return Mark(float(row["value"]), low, high, row["n"] or 0, row["contexts"] or 0, row["note"] or "")

    def accuracy(self, step: Step, site: Site, repair: str, **variant: Any) -> Mark | None:
        """The mean accuracy over tasks; its interval from the means of what is left when a fold is left out."""
        names = [variant_name({"task": task, "repair": repair, **variant}) for task in self.tasks]
        rows = [self.rows.get(("probe_accuracy", name, step, site)) for name in names]
        found = [row for row in rows if row is not None and finite(row["value"]) is not None]
        if not found or len(found) < len(rows):
            return None
        value = sum(row["value"] for row in found) / len(found)
        folds = [list(row["replicates"] or []) for row in found]
        left = [sum(part) / len(part) for part in zip(*folds, strict=False)]
        low, high = jackknife(value, left, bounds=(0.0, 1.0))
        return Mark(value, low, high, min(r["n"] for r in found), min(r["contexts"] for r in found), "")


def _depth(site: Site) -> tuple[str, int, int]:
    return site[0], site[1], {"embed": 0, "final": 2}.get(site[2], 1)
