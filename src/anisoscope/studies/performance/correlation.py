"""Does geometry go with performance, over the layers of a model and over the checkpoints of a run?

Two intervals, because there are two kinds of chance: over *contexts* (leave one fold of test contexts out of both
quantities: measurement noise) and over *checkpoints* (leave one checkpoint out: does the correlation hang on one?).
Layers of one model and checkpoints of one run are not independent samples, so no p-value of these correlations means
what it would for a sample; it describes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anisoscope.metrics.engine.estimate import Estimate, jackknife
from anisoscope.metrics.performance import performance_correlation
from anisoscope.results.table import variant_name

FEWEST = 4  # points of a correlation
METHODS = ("spearman", "pearson")
ANISOTROPY = ("svd_ratio", "average_cosine", "two_nn", "iso_score")
Record = Mapping[str, Any]


@dataclass(frozen=True)
class ScoreSeries:
    """A quantity over layers or checkpoints, with its leave-one-fold-out values."""

    value: np.ndarray  # [points]
    folds: np.ndarray  # [points, folds], NaN where a fold is empty


def over_contexts(x: ScoreSeries, y: ScoreSeries, method: str) -> Estimate:
    """The correlation with its interval over context folds."""
    value = performance_correlation(x.value, y.value, method)
    left = [
        performance_correlation(x.folds[:, j], y.folds[:, j], method)
        if np.isfinite(x.folds[:, j]).all() and np.isfinite(y.folds[:, j]).all()
        else math.nan
        for j in range(x.folds.shape[1])
    ]
    low, high = jackknife(value, left, bounds=(-1.0, 1.0))
    return Estimate(value, low, high, n=len(x.value), replicates=tuple(left), note=_note(x, y, method))


def over_points(x: ScoreSeries, y: ScoreSeries, method: str) -> Estimate:
    """The same with its interval over the points: each layer or checkpoint is left out once."""
    value, n = performance_correlation(x.value, y.value, method), len(x.value)
    left = [performance_correlation(np.delete(x.value, i), np.delete(y.value, i), method) for i in range(n)]
    low, high = jackknife(value, left, bounds=(-1.0, 1.0))
    return Estimate(value, low, high, n=n, replicates=tuple(left), note=_note(x, y, method))


def _note(x: ScoreSeries, y: ScoreSeries, method: str) -> str:
    p = descriptive_p(x, y, method)
    return "points of one run are not independent" + ("" if math.isnan(p) else f"; descriptive p = {p:.2g}")


def descriptive_p(x: ScoreSeries, y: ScoreSeries, method: str) -> float:
    """The two-sided p of no correlation, as if the points were independent, which they are not."""
    from scipy import stats

    r, n = performance_correlation(x.value, y.value, method), len(x.value)
    if not math.isfinite(r) or n < 3:
        return math.nan
    if abs(r) >= 1.0:
        return 2.0 / math.factorial(n) if n < 12 else 0.0
    return float(2 * stats.t.sf(abs(r) * math.sqrt((n - 2) / (1 - r * r)), n - 2))


class PerformanceResults:
    """The table of one model as series."""

    def __init__(self, records: Sequence[Record], model: str) -> None:
        self.model = model
        self.rows: dict[tuple[str, str], dict[tuple[int | None, tuple[Any, ...]], Record]] = {}
        for row in records:
            if row["model"] == model and row["kind"] in ("embed", "resid", "final"):
                place = (row["step"], (row["stack"], row["layer"], row["kind"]))
                self.rows.setdefault((row["metric"], row["variant"]), {})[place] = row
        places = {place for found in self.rows.values() for place in found}
        self.steps = sorted({step for step, _ in places}, key=lambda s: -1 if s is None else s)
        self.sites = sorted({site for _, site in places}, key=lambda s: (s[1], s[2] != "embed", s[2] == "final"))

    def row(self, metric: str, variant: str, step: int | None, site: tuple[Any, ...]) -> Record | None:
        return self.rows.get((metric, variant), {}).get((step, site))

    def series(self, names: Sequence[tuple[str, str]], places: Sequence[tuple[int | None, Any]]) -> ScoreSeries | None:
        """The mean of some quantities at each place; None where one is missing."""
        found = [[self.row(*name, *place) for name in names] for place in places]
        if any(row is None or not math.isfinite(row["value"]) for rows in found for row in rows):
            return None
        values = np.array([[row["value"] for row in rows if row] for rows in found])
        folds = np.array([[list(row["replicates"] or [math.nan] * 8) for row in rows if row] for rows in found])
        return ScoreSeries(values.mean(1), folds.mean(1))

    def mean_over(self, names: Sequence[tuple[str, str]], steps: Sequence[int | None]) -> ScoreSeries | None:
        """The mean over all sites at each step."""
        parts = [self.series(names, [(step, site) for step in steps]) for site in self.sites]
        known = [part for part in parts if part is not None]
        if not known or len(known) < len(parts):
            return None
        return ScoreSeries(np.mean([p.value for p in known], axis=0), np.mean([p.folds for p in known], axis=0))

    def tasks(self) -> list[str]:
        found = [dict(w.split("=") for w in v.split(";")) for m, v in self.rows if m == "probe_selectivity"]
        return list(dict.fromkeys(word["task"] for word in found))

    def performances(self) -> dict[str, list[tuple[str, str]]]:
        """What performance is: the model's own loss, a fresh readout's, the probes' accuracy."""
        tasks = self.tasks()
        found = {
            "loss": [("lm_loss", "reading=patched;repair=raw")],
            "readout": [("lm_loss", "reading=readout;repair=raw")],
        }
        found |= {f"probe:{task}": [("probe_accuracy", f"repair=raw;task={task}")] for task in tasks}
        if tasks:
            found["probe"] = [("probe_accuracy", f"repair=raw;task={task}") for task in tasks]
        return {name: names for name, names in found.items() if all(n in self.rows for n in names)}


def correlations(results: PerformanceResults) -> Iterator[dict[str, Any]]:
    """Rows of the table: geometry of raw rows with performance, over layers and over checkpoints."""
    for geometry in ANISOTROPY:
        names = [(geometry, "repair=raw")]
        for performance, of in results.performances().items():
            yield from _over_layers(results, geometry, names, performance, of)
            yield from _over_checkpoints(results, geometry, names, performance, of)


def _over_layers(
    results: PerformanceResults,
    geometry: str,
    names: list[tuple[str, str]],
    performance: str,
    of: list[tuple[str, str]],
) -> Iterator[dict[str, Any]]:
    if performance == "loss":  # one number for the whole model
        return
    for step in results.steps:
        places = [(step, site) for site in results.sites]
        x, y = results.series(names, places), results.series(of, places)
        if x is not None and y is not None and len(places) >= FEWEST:
            words = {"geometry": geometry, "performance": performance, "over": "layers"}
            yield from _rows(x, y, words, step=step, points="layers")


def _over_checkpoints(
    results: PerformanceResults,
    geometry: str,
    names: list[tuple[str, str]],
    performance: str,
    of: list[tuple[str, str]],
) -> Iterator[dict[str, Any]]:
    if len(results.steps) < FEWEST:
        return
    words = {"geometry": geometry, "performance": performance, "over": "checkpoints"}
    for site in results.sites:
        places = [(step, site) for step in results.steps]
        x, y = results.series(names, places), results.series(of, places)
        if x is not None and y is not None:
            yield from _rows(x, y, words, site=site, points="checkpoints")
    x, y = results.mean_over(names, results.steps), results.mean_over(of, results.steps)
    if x is not None and y is not None:
        yield from _rows(x, y, {**words, "sites": "mean"}, points="checkpoints")
        if len(results.steps) > FEWEST:
            yield from _rows(
                _changes(x), _changes(y), {**words, "sites": "mean", "of": "changes"}, points="checkpoints"
            )


def _changes(series: ScoreSeries) -> ScoreSeries:
    """Differences between neighbouring checkpoints: what both merely do over time falls out."""
    return ScoreSeries(np.diff(series.value), np.diff(series.folds, axis=0))


def _rows(
    x: ScoreSeries,
    y: ScoreSeries,
    words: Mapping[str, str],
    *,
    step: int | None = None,
    site: tuple[Any, ...] | None = None,
    points: str,
) -> Iterator[dict[str, Any]]:
    ways: dict[str, Callable[[ScoreSeries, ScoreSeries, str], Estimate]] = {
        "contexts": over_contexts,
        points: over_points,
    }
    stack, layer, kind = site or ("single", None, "study")
    for method in METHODS:
        for interval, way in ways.items():
            found = way(x, y, method)
            variant = variant_name({**words, "method": method, "interval": interval})
            yield {
                "step": step,
                "stack": stack,
                "layer": layer,
                "kind": kind,
                "group": "",
                "metric": "performance_correlation",
                "variant": variant,
                "value": found.value,
                "low": found.low,
                "high": found.high,
                "n": found.n,
                "dropped": 0,
                "note": found.note,
                "replicates": list(found.replicates),
            }
