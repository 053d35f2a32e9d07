"""The table of the study of sharpness as marks: means over blocks of every arm, and over its seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anisoscope.claims.engine.part import FEWEST_SEEDS, Bounds, Part, t_interval
from anisoscope.view.catalogue import Catalogue
from anisoscope.view.performance_results import Mark

ARMS = {
    "softmax": "ordinary softmax",
    "qk-norm": "normed, learned temperature",
    "mean-removed": "means removed",
    "fixed-sharp": "normed, fixed sharp temperature",
    "uniform": "uniform, no scores",
}
RELATIVE = "relative_drift"  # ‖mean‖ / mean ‖·‖, here from drift and mean norm
Number = Callable[[str, int], float]  # of an arm and a seed


class Results:
    """The numbers of all arms of one size."""

    def __init__(self, records: Sequence[Mapping[str, Any]], size: str) -> None:
        self.size = size
        self.rows: dict[tuple[Any, ...], float] = {}
        ends = {f"{arm}-{size}": arm for arm in ARMS}
        for row in records:
            if row["model"] in ends and row["head"] is None and not row["variant"] and not row["group"]:
                place = (ends[row["model"]], row["seed"], row["step"], row["kind"], row["layer"], row["metric"])
                self.rows[place] = math.nan if row["value"] is None else float(row["value"])
        self.arms = [arm for arm in ARMS if any(key[0] == arm for key in self.rows)]
        self.seeds = sorted({key[1] for key in self.rows})
        self.blocks = sorted({key[4] for key in self.rows if key[3] == "resid"})
        self.steps = self._shared_steps()

    @classmethod
    def all(cls, records: Sequence[Mapping[str, Any]]) -> list[Results]:
        """Those of every size that the table has arms of."""
        names = dict.fromkeys(str(row["model"]) for row in records)
        sizes = dict.fromkeys(n.removeprefix(f"{arm}-") for n in names for arm in ARMS if n.startswith(f"{arm}-"))
        return [cls(records, size) for size in sizes]

    def _shared_steps(self) -> list[int]:
        """Steps that every run has: what is compared is compared at the same step."""
        runs: dict[tuple[str, int], set[int]] = {}
        for arm, seed, step, kind, *_ in self.rows:
            if kind == "resid" and step is not None:
                runs.setdefault((arm, seed), set()).add(step)
        return sorted(set.intersection(*runs.values())) if runs else []

    def at(self, arm: str, seed: int, step: int, kind: str, metric: str, layer: int | None = None) -> float:
        """A metric at one block, or its mean over blocks; NaN where one has none."""
        if metric == RELATIVE:
            above, below = (self.at(arm, seed, step, kind, name, layer) for name in ("drift", "mean_norm"))
            return above / below if below else 0.0  # queries and keys that are zero do not drift
        layers = self.blocks if layer is None else [layer]
        values = [self.rows.get((arm, seed, step, kind, each, metric), math.nan) for each in layers]
        return sum(values) / len(values) if values else math.nan

    def loss(self, arm: str, seed: int, step: int) -> float:
        return self.rows.get((arm, seed, step, "training", None, "probe_loss"), math.nan)

    def over_seeds(self, number: Callable[[int], float], *, bounds: Bounds = (None, None)) -> Mark:
        """The mean over the seeds that have one, with its t interval from three of them on, cut to what is possible."""
        values = [value for value in map(number, self.seeds) if math.isfinite(value)]
        if not values:
            return Mark(math.nan, math.nan, math.nan, 0, 0, "")
        centre = sum(values) / len(values)
        half = t_interval(values)[0] if len(values) >= FEWEST_SEEDS else math.nan
        part = Part("", centre, centre - half, centre + half, bounds=bounds)
        return Mark(part.effect, part.low, part.high, len(values), 0, "")

    def mark(self, arm: str, step: int, kind: str, metric: str, layer: int | None = None) -> Mark:
        bounds = (0.0, 1.0) if metric == RELATIVE else Catalogue().entry(metric).bounds
        return self.over_seeds(lambda seed: self.at(arm, seed, step, kind, metric, layer), bounds=bounds)

    def loss_mark(self, arm: str, step: int) -> Mark:
        return self.over_seeds(lambda seed: self.loss(arm, seed, step), bounds=(0.0, None))

    def loss_difference(self, arm: str, step: int) -> Mark:
        """Loss minus that of ordinary attention from the same seed."""
        return self.over_seeds(lambda seed: self.loss(arm, seed, step) - self.loss("softmax", seed, step))

    @property
    def height(self) -> int | None:
        """The step after the first at which ordinary attention is most anisotropic, over all seeds."""
        later = [step for step in self.steps if step > 0]
        if not later or "softmax" not in self.arms:
            return None
        return max(later, key=lambda step: self.mark("softmax", step, "resid", "average_cosine").value)
