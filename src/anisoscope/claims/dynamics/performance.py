"""Does the geometry of representations go with performance? Verdicts of the performance study, from its table.

A correlation has two intervals, because there are two kinds of chance: over *contexts* (leave one fold of test contexts
out of both quantities: measurement noise) and over *points* (leave one checkpoint or layer out: does it hang on one?).
Layers of one model and checkpoints of one run are not independent samples, so no p-value of these correlations means
what it would for a sample; it describes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from anisoscope.claims.engine.claim import Verdict, verdict_of
from anisoscope.claims.engine.evidence import Cell
from anisoscope.claims.engine.part import Finding, Part, Parts, Status, figure, outcome, span
from anisoscope.results.quantity import correlate, jackknife
from anisoscope.results.query import Query, Row
from anisoscope.results.schema import variant_name
from anisoscope.results.table import Table

FEWEST = 4  # points of a correlation
FEW = 6  # points below which one of them decides
ACCURACY = 0.01  # one point in a hundred
NATS = 0.01
CORRELATION = 0.3
REPAIRED = {
    "mean": "Removing the mean",
    "all_but_top": "Removing the mean and the top directions",
    "whitened": "Whitening",
}
SAME = "a shift changes no probe with a free intercept, so this is exactly 0 by construction"
MetricName = tuple[str, Mapping[str, Any]]  # a metric and its options
SiteKey = tuple[str, int, str]
GEOMETRY: MetricName = ("svd_ratio", {"repair": "raw"})


@dataclass(frozen=True)
class ScoreSeries:
    """A quantity over layers or checkpoints, with its leave-one-fold-out values."""

    value: np.ndarray  # [points]
    folds: np.ndarray  # [points, folds], NaN where a fold is empty


class ScoreCorrelation(NamedTuple):
    """A correlation with its interval and the values without one fold, or one point."""

    value: float
    low: float
    high: float
    left: tuple[float, ...]


def over_contexts(x: ScoreSeries, y: ScoreSeries, method: str) -> ScoreCorrelation:
    """The correlation with its interval over context folds."""
    folds = [(x.folds[:, j], y.folds[:, j]) for j in range(x.folds.shape[1])]
    left = [correlate(*pair, method) if np.isfinite(pair).all() else math.nan for pair in folds]
    return _with_interval(x, y, method, left)


def over_points(x: ScoreSeries, y: ScoreSeries, method: str) -> ScoreCorrelation:
    """The same with its interval over the points: each layer or checkpoint is left out once."""
    left = [correlate(np.delete(x.value, i), np.delete(y.value, i), method) for i in range(len(x.value))]
    return _with_interval(x, y, method, left)


def _with_interval(x: ScoreSeries, y: ScoreSeries, method: str, left: Sequence[float]) -> ScoreCorrelation:
    value = correlate(x.value, y.value, method)
    return ScoreCorrelation(value, *jackknife(value, left, bounds=(-1.0, 1.0)), tuple(left))


def descriptive_p(x: ScoreSeries, y: ScoreSeries, method: str) -> float:
    """The two-sided p of no correlation, as if the points were independent, which they are not."""
    from scipy import stats

    r, n = correlate(x.value, y.value, method), len(x.value)
    if not math.isfinite(r) or n < 3:
        return math.nan
    if abs(r) >= 1.0:
        return 2.0 / math.factorial(n) if n < 12 else 0.0
    return float(2 * stats.t.sf(abs(r) * math.sqrt((n - 2) / (1 - r * r)), n - 2))


class PerformanceResults:
    """The table of one model as series."""

    def __init__(self, table: Table, model: str) -> None:
        self.model = model
        self.query = Query(table).where(model=model, kind=("embed", "resid", "final"))
        self._found: dict[tuple[str, str], dict[Cell, Row]] = {}
        cells = {Cell(*place) for place in zip(*map(self.query.column, Cell._fields[:4]), strict=True)}
        self.steps = sorted({cell.step for cell in cells}, key=lambda step: -1 if step is None else step)
        self.sites = sorted({cell.site for cell in cells}, key=lambda s: (s[1], s[2] != "embed", s[2] == "final"))

    def _rows(self, metric: str, options: Mapping[str, Any]) -> dict[Cell, Row]:
        key = (metric, variant_name(options))
        if key not in self._found:
            rows = self.query.where(metric=metric).exactly(**options)
            self._found[key] = {Cell(row.step, row.stack, row.layer, row.kind): row for row in rows}
        return self._found[key]

    def series(self, names: Sequence[MetricName], places: Sequence[tuple[int | None, SiteKey]]) -> ScoreSeries | None:
        """The mean of some quantities at each place; None where one is missing."""
        found = [[self._rows(*name).get(Cell(step, *site)) for name in names] for step, site in places]
        if any(row is None or not row.known for rows in found for row in rows):
            return None
        values = np.array([[row.value for row in rows if row] for rows in found])
        folds = np.array([[row.folds or (math.nan,) * 8 for row in rows if row] for rows in found])
        return ScoreSeries(values.mean(1), folds.mean(1))

    def mean_over(self, names: Sequence[MetricName], steps: Sequence[int | None]) -> ScoreSeries | None:
        """The mean over all sites at each step."""
        parts = [self.series(names, [(step, site) for step in steps]) for site in self.sites]
        known = [part for part in parts if part is not None]
        if not known or len(known) < len(parts):
            return None
        return ScoreSeries(np.mean([p.value for p in known], axis=0), np.mean([p.folds for p in known], axis=0))

    def tasks(self) -> list[str]:
        return self.query.where(metric="probe_selectivity").values("task")

    def performances(self) -> dict[str, list[MetricName]]:
        """What performance is: the model's own loss, a fresh readout's, the probes' accuracy."""
        probes: dict[str, MetricName] = {
            task: ("probe_accuracy", {"repair": "raw", "task": task}) for task in self.tasks()
        }
        found: dict[str, list[MetricName]] = {
            "loss": [("lm_loss", {"reading": "patched", "repair": "raw"})],
            "readout": [("lm_loss", {"reading": "readout", "repair": "raw"})],
            **{f"probe:{task}": [name] for task, name in probes.items()},
        }
        found |= {"probe": list(probes.values())} if probes else {}
        return {what: names for what, names in found.items() if all(self._rows(*name) for name in names)}


def performance_verdicts(results: PerformanceResults) -> list[Verdict]:
    """Every finding about one model, at its last checkpoint and over its checkpoints."""
    gains = [verdict for repair, words in REPAIRED.items() for verdict in _repair(results, repair, words)]
    return [*gains, *_over_checkpoints(results), *_over_layers(results)]


def _repair(results: PerformanceResults, repair: str, words: str) -> Iterator[Verdict]:
    """What one repair of the rows does at the last checkpoint, each against raw rows."""
    against = {"against": "raw", "repair": repair}
    probes: list[MetricName] = [("probe_accuracy", {**against, "task": task}) for task in results.tasks()]
    cosines: list[MetricName] = [(metric, {**options, "probe": "cosine"}) for metric, options in probes]
    readout: list[MetricName] = [("lm_loss", {**against, "reading": "readout"})]
    patched: list[MetricName] = [("lm_loss", {**against, "reading": "patched"})]
    same = SAME if repair == "mean" else ""
    more, nats = "the accuracy changes by {} against raw rows", "the gain is {} nats of loss against raw rows"
    risen = "the loss rises by {} nats against raw rows"
    table: tuple[tuple[str, str, list[MetricName], float, int, str, str], ...] = (
        ("improves_probe", "improves linear probes", probes, ACCURACY, 1, more, same),
        ("improves_cosine", "improves the nearest class mean by cosine", cosines, ACCURACY, 1, more, ""),
        ("improves_readout", "lowers the loss of a fresh readout", readout, NATS, -1, nats, same),
        ("harms_model", "inside the network harms the model's own loss", patched, NATS, 1, risen, ""),
    )
    for name, does, names, margin, sign, told, remark in table:
        found = _gain(results, names, margin=margin, sign=sign, told=told, remark=remark)
        if found is not None:
            yield verdict_of(f"{repair}_{name}", f"{words} {does}", found, subject=results.model)


def _gain(
    results: PerformanceResults, names: Sequence[MetricName], *, margin: float, sign: int, told: str, remark: str
) -> Finding | None:
    """The mean of a paired difference over sites (and tasks), with its jackknife over context folds."""
    step = results.steps[-1]
    series = results.mean_over(names, [step]) if names else None
    if series is None:
        return None
    whole = _change("mean over sites", series, sign, margin=margin)
    single = {_place(site): results.series(names, [(step, site)]) for site in results.sites}
    by_site = [_change(name, one, sign, needed=False) for name, one in single.items() if one is not None]
    best = max(by_site, key=lambda part: part.effect)
    tasks = f" and {len(names)} tasks" if len(names) > 1 else ""
    apart = f"; highest {best.name} ({span(best)})" if any(one.effect != best.effect for one in by_site) else ""

    def sentence(parts: Parts, status: Status, part: Part) -> str:
        text = f"{told.format(span(part))}, the mean over {len(by_site)} sites{tasks}, {outcome(status, part)}{apart}"
        return f"{text}; {remark}" if remark else text

    return Finding((whole, *by_site), sentence, aspects=None)


def _change(name: str, series: ScoreSeries, sign: int, **more: Any) -> Part:
    """The first value of a series with its interval over context folds."""
    effect = sign * float(series.value[0]) + 0.0
    return Part(name, effect, *jackknife(effect, (sign * series.folds[0]).tolist(), bounds=(None, None)), **more)


def _place(site: SiteKey) -> str:
    return {"embed": "at the embedding", "final": "after the final norm"}.get(site[2], f"after block {site[1]}")


def _over_checkpoints(results: PerformanceResults) -> Iterator[Verdict]:
    for performance, sign, words in (("loss", 1, "a higher loss"), ("probe", -1, "worse linear probes")):
        of = results.performances().get(performance)
        if of is None:
            continue
        x, y = (results.mean_over(names, results.steps) for names in ([GEOMETRY], of))
        about = (f"anisotropy_worse_{performance}_checkpoints",
                 f"Over checkpoints, more anisotropy (σ₁/Σσ) goes with {words}")  # fmt: skip
        if x is not None and y is not None and len(results.steps) >= FEWEST:
            yield _correlation(results, *about, x, y, sign=sign, points="checkpoints")
        elif len(results.steps) > 1:
            few = f"{len(results.steps)} checkpoints were measured and a correlation needs {FEWEST}"
            part = Part.absent("rank correlation", few, margin=CORRELATION)
            absent = Finding((part,), lambda parts, status, part: "", {"parts": []}, aspects=None)
            yield verdict_of(*about, absent, subject=results.model)


def _over_layers(results: PerformanceResults) -> Iterator[Verdict]:
    places = [(results.steps[-1], site) for site in results.sites]
    if len(places) < FEWEST:
        return
    for performance, sign, words in (("readout", 1, "a higher readout loss"), ("probe", -1, "worse linear probes")):
        of = results.performances().get(performance)
        x = results.series([GEOMETRY], places)
        y = results.series(of, places) if of else None
        if x is not None and y is not None:
            statement = f"Over layers, more anisotropy (σ₁/Σσ) goes with {words}"
            claim = f"anisotropy_worse_{performance}_layers"
            yield _correlation(results, claim, statement, x, y, sign=sign, points="layers")


def _correlation(
    results: PerformanceResults, claim: str, statement: str, x: ScoreSeries, y: ScoreSeries, *, sign: int, points: str
) -> Verdict:
    """Both intervals must lie beyond the margin: over contexts and over checkpoints (or layers)."""
    turned = ScoreSeries(sign * y.value, sign * y.folds)
    ways: dict[str, Callable[[ScoreSeries, ScoreSeries, str], ScoreCorrelation]]
    ways = {"contexts": over_contexts, points: over_points}
    found = {f"over {what}": way(x, turned, "spearman") for what, way in ways.items()}
    ends = np.array([[one.low, one.high] for one in found.values()])
    low, high = (float(ends[:, 0].min()), float(ends[:, 1].max())) if np.isfinite(ends).all() else (math.nan, math.nan)
    n = len(x.value)
    few = f"{n} {points} are too few: any one of them can turn it" if n < FEW else ""
    value = found["over contexts"].value
    part = Part("rank correlation", value, low, high, margin=CORRELATION, reason=few)
    told = [Part(name, one.value, one.low, one.high, needed=False) for name, one in found.items()]
    finding = Finding((part, *told), partial(_sentence, n=n, points=points), aspects=None)
    verdict = verdict_of(claim, statement, finding, subject=results.model)
    return replace(verdict, p=descriptive_p(x, turned, "spearman"))  # beside the verdict, not a part of it


def _sentence(parts: Parts, status: Status, part: Part, *, n: int, points: str) -> str:
    known = [p for p in parts.values() if not p.needed and math.isfinite(p.low) and math.isfinite(p.high)]
    left = [f", leaving out {p.name.removeprefix('over ')} [{figure(p.low)}, {figure(p.high)}]" for p in known]
    text = f"Spearman {span(part)} over {n} {points} of one run, signed so that more is worse, {outcome(status, part)}"
    return f"{text}{''.join(left).replace(',', ';', 1)}; they are not independent, so this describes"
