"""The rows of the curvature study as curves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

FLAT = "flat"
TITLES = {"swiss_roll": "Swiss roll", "quadratic": "quadratic patch", FLAT: "flat (control)"}
SLOPES = {"tangent": 2.0, "normal": 4.0, "visibility": 2.0}


@dataclass(frozen=True)
class Point:
    """One row of the table, its variant taken apart."""

    model: str
    metric: str
    variant: Mapping[str, str]
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Curves:
    """The rows of one study."""

    points: tuple[Point, ...]
    config: Mapping[str, Any]
    reference: tuple[float, float]  # Zipf exponent and β that the verdicts are about

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any]], about: Mapping[str, Any]) -> Curves:
        reference = about["reference"]
        points = tuple(_point(record) for record in records)
        return cls(points, about["config"], (float(reference["zipf"]), float(reference["beta"])))

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(p.model for p in self.points if p.metric == "curvature_slope"))

    @property
    def curved(self) -> list[str]:
        return [name for name in self.models if name != FLAT]

    @property
    def betas(self) -> list[float]:
        return sorted({float(p.variant["beta"]) for p in self.points if "beta" in p.variant})

    def series(self, model: str, metric: str, *, over: str, **fixed: Any) -> np.ndarray:
        """x, value, low, high [4, points] of the rows whose variant is exactly `over` and `fixed`, finite ones only."""
        wanted = {key: f"{v:g}" if isinstance(v, float) else str(v) for key, v in fixed.items()}
        rows = [
            (float(p.variant[over]), p.value, p.low, p.high)
            for p in self.points
            if p.model == model and p.metric == metric and over in p.variant
            if {k: v for k, v in p.variant.items() if k != over} == wanted and math.isfinite(p.value)
        ]
        return np.array(sorted(rows)).T.reshape(4, -1)

    def value(self, model: str, metric: str, **fixed: Any) -> Point | None:
        wanted = {key: f"{v:g}" if isinstance(v, float) else str(v) for key, v in fixed.items()}
        found = (p for p in self.points if p.model == model and p.metric == metric and dict(p.variant) == wanted)
        return next(found, None)


def _point(record: Mapping[str, Any]) -> Point:
    variant = dict(word.split("=", 1) for word in str(record["variant"] or "").split(";") if word)
    numbers = (math.nan if record[name] is None else float(record[name]) for name in ("value", "low", "high"))
    return Point(str(record["model"]), str(record["metric"]), variant, *numbers)


def title(model: str) -> str:
    return TITLES.get(model, model)
