"""The table of the study of untrained blocks as curves over the bias: means over seeds, with Student's interval.

An interval ends where its quantity does: no average cosine lies beyond 1, no norm below 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np

from anisoscope.claims.engine.part import FEWEST_SEEDS, Bounds, Part, t_interval
from anisoscope.view.catalogue import Catalogue

Place = tuple[str, str]  # kind of site, metric
Seeds = dict[int, float]


class Arm(NamedTuple):
    """One kind of block and of inputs."""

    family: str
    init: str
    width: int
    norm: bool

    def __str__(self) -> str:
        return f"{INITS.get(self.init, self.init)}, width {self.width}, {inputs(self.norm)}"


class Mark(NamedTuple):
    """A mean over seeds with its interval; NaN for the interval of fewer than three."""

    value: float
    low: float
    high: float


INITS = {"normal": "N(0, 0.02²)", "xavier": "Xavier", "orthogonal": "orthogonal", "own": "the family’s own"}
# normed inputs?, bias, average cosine in, out, entropy / log m; of BERT-base size, N(0, 0.02²), length 512
REFERENCE: tuple[tuple[bool, float, float, float, float | None], ...] = (
    (True, 0.0, 0.000, 0.012, 0.993),
    (True, 50.0, 0.765, 0.782, 0.968),
    (True, 100.0, 0.929, 0.935, 0.894),
    (True, 200.0, 0.981, 0.983, 0.639),
    (False, 0.5, 0.449, 0.476, None),
    (False, 1.0, 0.765, 0.783, None),
)
REFERENCE_BLOCK = ("bert", "normal", 768)
REFERENCE_LENGTH = 512
COSINE_IN, COSINE_OUT = ("embed", "average_cosine"), ("resid", "average_cosine")
ENTROPY = ("scores", "attention_entropy")


def inputs(norm: bool) -> str:
    """How the rows come to the bias, in words."""
    return "normed inputs" if norm else "plain inputs"


@cache
def _point(variant: str) -> tuple[Arm, float] | None:
    """Where on the grid a row of the table belongs, whatever its family; None for rows of another study."""
    words = dict(word.split("=", 1) for word in variant.split(";") if "=" in word)
    if set(words) != {"bias", "init", "input_norm", "width"}:
        return None
    return Arm("", words["init"], int(words["width"]), words["input_norm"] == "1"), float(words["bias"])


@dataclass(frozen=True)
class Curves:
    """Values by arm, place and bias, one for each seed."""

    values: dict[Arm, dict[Place, dict[float, Seeds]]]
    config: Mapping[str, Any]
    models: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any]], about: Mapping[str, Any]) -> Curves:
        found: dict[Arm, dict[Place, dict[float, Seeds]]] = {}
        for row in records:
            where = _point(row["variant"] or "")
            if where is None:
                continue
            arm, bias = where[0]._replace(family=row["model"]), where[1]
            seeds = found.setdefault(arm, {}).setdefault((row["kind"], row["metric"]), {}).setdefault(bias, {})
            seeds[int(row["seed"])] = math.nan if row["value"] is None else float(row["value"])
        return cls(found, {**about.get("config", {}), **about.get("size", {})}, about.get("models", []))

    @cached_property
    def biases(self) -> list[float]:
        return sorted({bias for places in self.values.values() for found in places.values() for bias in found})

    @property
    def families(self) -> list[str]:
        return list(dict.fromkeys(arm.family for arm in self.values))

    @property
    def seeds(self) -> int:
        """Seeds of the point that has most."""
        every = (s for places in self.values.values() for found in places.values() for s in found.values())
        return max((len(seeds) for seeds in every), default=0)

    def of_axis(self, name: str) -> list[Any]:
        """The different values of a field of the arms, in their order; widths ascend."""
        found = list(dict.fromkeys(getattr(arm, name) for arm in self.values))
        return sorted(found) if name == "width" else found

    def leading_arms(self) -> list[Arm]:
        """For each family and kind of inputs the arm that is shown in full: N(0, 0.02²) where it is there, widest."""
        best: dict[tuple[str, bool], Arm] = {}
        for arm in self.values:
            rival = best.get((arm.family, arm.norm))
            if rival is None or _rank(arm) > _rank(rival):
                best[arm.family, arm.norm] = arm
        return list(best.values())

    def seeds_at(self, arm: Arm, bias: float, kind: str, metric: str) -> list[float]:
        """The value of every seed."""
        return list(self.values.get(arm, {}).get((kind, metric), {}).get(bias, {}).values())

    def at(self, arm: Arm, bias: float, kind: str, metric: str) -> Mark | None:
        """The mean over seeds at one bias, or None where nothing was measured."""
        return over_seeds(self.seeds_at(arm, bias, kind, metric), bounds=bounds_of(metric))

    def series(self, arm: Arm, kind: str, metric: str) -> np.ndarray:
        """Bias, mean, low and high: [4, biases]."""
        marks = [(bias, *m) for bias in self.biases if (m := self.at(arm, bias, kind, metric)) is not None]
        return np.array(marks).T if marks else np.empty((4, 0))

    def exponent(self, arm: Arm, *, last: int = 3) -> tuple[Mark | None, list[float]]:
        """The slope of log mean |score| over log N at the largest biases, over seeds; and those biases."""
        there = self.values.get(arm, {}).get(("scores", "score_magnitude"), {})
        biases = [bias for bias in sorted(there) if bias > 0][-last:]
        if len(biases) < 2:
            return None, biases
        x = np.log(biases)
        seeds = set.intersection(*(set(there[bias]) for bias in biases))
        with np.errstate(divide="ignore", invalid="ignore"):
            slopes = [float(np.polyfit(x, np.log([there[b][seed] for b in biases]), 1)[0]) for seed in sorted(seeds)]
        return over_seeds(slopes), biases

    def lengths(self) -> dict[str, float]:
        """How many times longer normed inputs are than plain ones, by family; where both were measured without bias."""
        found = {}
        for family in self.families:
            both = [[value for arm in self.values if (arm.family, arm.norm) == (family, norm)
                     for value in self.seeds_at(arm, 0.0, "embed", "mean_norm")] for norm in (True, False)]  # fmt: skip
            if all(both) and all(both[1]):
                found[family] = float(np.mean(both[0]) / np.mean(both[1]))
        return found

    def fixed_norm(self, family: str) -> bool:
        """Whether every output of a family has norm √d, whatever comes in: a norm after the last sum."""
        means = [
            abs(value / math.sqrt(arm.width) - 1) < 0.01
            for arm, places in self.values.items()
            if arm.family == family
            for seeds in places.get(("resid", "mean_norm"), {}).values()
            for value in seeds.values()
        ]
        return bool(means) and all(means)


def _rank(arm: Arm) -> tuple[bool, int]:
    return arm.init == "normal", arm.width


@cache
def bounds_of(metric: str) -> Bounds:
    """Between what a metric lies, as it is declared; a weight of softmax is a share, and no other of ours is negative.

    >>> bounds_of("attention_min"), bounds_of("average_cosine"), bounds_of("score_magnitude")
    ((0.0, 1.0), (-1.0, 1.0), (0.0, None))
    """
    low, high = Catalogue().entry(metric).bounds
    share = metric in ("attention_median", "attention_min")
    return (0.0, 1.0 if share else None) if low is None and high is None else (low, high)


def over_seeds(values: Sequence[float], *, bounds: Bounds = (None, None)) -> Mark | None:
    """Mean and Student's 95 % interval over seeds; without an interval for fewer than three.

    >>> over_seeds([2.0]).value, over_seeds([])
    (2.0, None)
    >>> over_seeds([0.9, 1.0, 1.0], bounds=(0.0, 1.0)).high
    1.0
    """
    if not values or not np.isfinite(values).all():
        return None
    half = t_interval(values)[0] if len(values) >= FEWEST_SEEDS else math.nan
    return _mark(values, half, bounds)


def _mark(values: Sequence[float], half: float, bounds: Bounds) -> Mark:
    centre = sum(values) / len(values)
    part = Part("", centre, centre - half, centre + half, bounds=bounds)
    return Mark(part.effect, part.low, part.high)


def prediction(values: Sequence[float], *, bounds: Bounds = (None, None)) -> tuple[float, float]:
    """The 95 % interval for the value of one further seed: mean ± t·sd·√(1 + 1/n); NaN with fewer than three."""
    if len(values) < FEWEST_SEEDS:
        return math.nan, math.nan
    further = _mark(values, t_interval(values)[0] * math.sqrt(len(values) + 1), bounds)  # t·sd/√n, √(n + 1) times
    return further.low, further.high


def reference_rows(curves: Curves) -> list[dict[str, Any]]:
    """The reference values beside ours; none where the block of the reference was not measured."""
    rows = []
    if curves.config.get("length") != REFERENCE_LENGTH or curves.config.get("heads") not in (None, 12):
        return []
    for norm, bias, *expected in REFERENCE:
        arm = Arm(*REFERENCE_BLOCK, norm)
        cells = []
        for place, value in zip((COSINE_IN, COSINE_OUT, ENTROPY), expected, strict=True):
            seeds = curves.seeds_at(arm, bias, *place)
            low, high = prediction(seeds, bounds=bounds_of(place[1]))
            rounding = 0.0006  # the reference has three decimals
            inside = None if value is None or math.isnan(low) else low - rounding <= value <= high + rounding
            cells.append({"expected": value, "mark": over_seeds(seeds), "inside": inside, "low": low, "high": high})
        if any(cell["mark"] is not None for cell in cells):
            rows.append({"norm": norm, "bias": bias, "cells": cells})
    return rows
