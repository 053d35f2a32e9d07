"""Profiles and courses that never were: long tables of blocks over depth and steps, with every shape planted.

A value is the mean of its fold values and its replicates leave one fold out, so that the jackknife is exact; part of
the noise is shared by the blocks and steps of a run, which see the same contexts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from anisoscope.results.quantity import jackknife
from anisoscope.results.query import Table

FOLDS = 8
Truth = Callable[[Any, float], float]  # of the step and the relative depth


class Sheet:
    """Rows of one run of one model."""

    def __init__(
        self, model: str = "m", *, number: int | None = 0, entropy: Any = 0, noise: float = 0.002, common: float = 0.7,
        layers: int = 12, steps: Iterable[int | None] = (None,), stack: str = "single", replicates: bool = True,
        contexts: int = 128, tails: float = math.inf,
    ) -> None:  # fmt: skip
        self.random = np.random.default_rng(entropy)
        self.tails = tails  # degrees of freedom of the noise: 3 has heavy tails, infinity is normal
        self.model, self.number, self.noise, self.common, self.layers = model, number, noise, common, layers
        self.steps, self.stack, self.replicates, self.contexts = tuple(steps), stack, replicates, contexts
        self.shared = self._luck()
        self.rows: list[dict[str, Any]] = []

    def add(
        self,
        metric: str,
        truth: Truth | float,
        *,
        variant: str = "",
        group: str = "",
        kind: str = "resid",
        head: Any = None,
    ) -> Sheet:
        """A metric at every block and step; `noise` is the standard error of a value."""
        for step in self.steps:
            for layer in range(1, self.layers + 1):
                depth = layer / self.layers
                mean = truth(step, depth) if callable(truth) else truth
                place = {"step": step, "layer": layer, "depth": depth, "kind": kind, "group": group, "head": head}
                self.rows.append(self._row({**place, "metric": metric, "variant": variant}, mean))
        return self

    def halves(self, metric: str, truth: Truth | float, *, variant: str = "") -> Sheet:
        self.add(metric, truth, variant=variant)
        for group in ("half:1", "half:2"):
            self.add(metric, truth, variant=variant, group=group)
        return self

    def losses(self, *, start: float = 5.0, end: float = 2.0, constant: float = 3.0) -> Sheet:
        """The held-out loss at every step, and that of the best constant predictor, as a training writes them."""
        steps = [step for step in self.steps if step is not None]
        for step in steps:
            done = math.log1p(step) / math.log1p(max(steps[-1], 1))
            place = {"step": step, "layer": None, "depth": None, "kind": "training", "group": "", "head": None}
            for metric, mean in (("probe_loss", start + (end - start) * done), ("constant_loss", constant)):
                self.rows.append(self._row({**place, "metric": metric, "variant": ""}, mean))
        return self

    def _luck(self) -> np.ndarray:
        """Noise of the folds, with a standard deviation of one."""
        if math.isinf(self.tails):
            return self.random.normal(size=FOLDS)
        return self.random.standard_t(self.tails, size=FOLDS) * math.sqrt((self.tails - 2) / self.tails)

    def _row(self, place: dict[str, Any], mean: float) -> dict[str, Any]:
        mine = {"half:1": slice(0, FOLDS // 2), "half:2": slice(FOLDS // 2, FOLDS)}.get(place["group"], slice(0, FOLDS))
        own = math.sqrt(1 - self.common**2) * self._luck()
        folds = (mean + self.noise * math.sqrt(FOLDS) * (self.common * self.shared + own))[mine]
        value, replicates = float(folds.mean()), ((folds.sum() - folds) / (len(folds) - 1)).tolist()
        low, high = jackknife(value, replicates, bounds=(None, None))
        row = {"run": "r", "model": self.model, "revision": "", "data": "d", "stack": self.stack, "seed": self.number}
        row |= {"value": value, "low": low, "high": high, "sd": math.nan, "n": 9000, "contexts": self.contexts}
        return {**row, "dropped": 0, "note": "", "replicates": replicates if self.replicates else None, **place}


def joined(*sheets: Sheet, types: dict[str, str] | None = None) -> Table:
    """One table of some runs; `types` is what run.json says of the models."""
    models = [{"name": name, "type": kind} for name, kind in (types or {}).items()]
    return Table.from_records([row for sheet in sheets for row in sheet.rows], {"models": models})


def bell(height: float = 0.15, *, base: float = 0.1, at: float = 0.5, width: float = 0.2) -> Truth:
    return lambda step, depth: base + height * math.exp(-0.5 * ((depth - at) / width) ** 2)


def flat(level: float = 0.2) -> Truth:
    return lambda step, depth: level


def hump(steps: Iterable[int], *, low: float = 5.0, peak: float = 12.0, end: float = 7.0, at: int = 64) -> Truth:
    """Over training: from low up to the peak at some step and down to the end, on a logarithmic axis of steps."""
    last = max(steps)

    def course(step: int, depth: float) -> float:
        if step <= at:
            return low + (peak - low) * math.log1p(step) / math.log1p(at)
        return peak + (end - peak) * math.log(step / at) / math.log(last / at)

    return course
