"""Verdicts of the performance study, from its table: is the geometry of representations correlated with performance?

A correlation has two intervals, one per source of variation: over *contexts* (leave one fold of test contexts out of
both quantities: measurement noise) and over *points* (leave one checkpoint or layer out: does the result depend on a
single one?). Layers of one model and checkpoints of one run are not independent samples, so the p-values of these
correlations are descriptive only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from anisoscope.claims.engine.claim import Finding, Part, Parts, Verdict, verdict_of
from anisoscope.claims.engine.correlation import two_sided_p
from anisoscope.claims.engine.evidence import Cell, figure
from anisoscope.results.quantity import correlate, jackknife
from anisoscope.results.query import Query, Row, Table, variant_name

FEWEST = 4  # points needed for a correlation
FEW = 6  # with fewer points a single one can decide the correlation
ACCURACY = 0.01  # one percentage point
NATS = 0.01
CORRELATION = 0.3
REPAIRED = {
    "mean": "Removing the mean",
    "all_but_top": "Removing the mean and the top directions",
    "whitened": "Whitening",
}
_WORSE = (  # points, performance quantity, sign of a change for the worse, its wording
    ("checkpoints", "loss", 1, "a higher loss"),
    ("checkpoints", "probe", -1, "worse linear probes"),
    ("layers", "readout", 1, "a higher readout loss"),
    ("layers", "probe", -1, "worse linear probes"),
)
SAME = "a shift changes no probe with a free intercept, so this is exactly 0 by construction"
MetricName = tuple[str, Mapping[str, Any]]  # a metric and its options
SiteKey = tuple[str, int, str]
GEOMETRY: MetricName = ("svd_ratio", {"repair": "raw"})


@dataclass(frozen=True)
class ScoreSeries:
    """A quantity at each layer or checkpoint, with its leave-one-fold-out values."""

    value: np.ndarray  # [points]
    folds: np.ndarray  # [points, folds], NaN where a fold is empty


class ScoreCorrelation(NamedTuple):
    """A correlation with its interval and its leave-one-out values (over folds or over points)."""

    value: float
    low: float
    high: float
    left: tuple[float, ...]


def over_contexts(x: ScoreSeries, y: ScoreSeries, method: str) -> ScoreCorrelation:
    """The correlation of two series with its jackknife interval over context folds."""
    folds = zip(x.folds.T, y.folds.T, strict=True)
    return _with_interval(x, y, method, [correlate(one, two, method) for one, two in folds])


def over_points(x: ScoreSeries, y: ScoreSeries, method: str) -> ScoreCorrelation:
    """The correlation of two series with its jackknife interval over points (layers or checkpoints)."""
    left = [correlate(np.delete(x.value, i), np.delete(y.value, i), method) for i in range(len(x.value))]
    return _with_interval(x, y, method, left)


def _with_interval(x: ScoreSeries, y: ScoreSeries, method: str, left: Sequence[float]) -> ScoreCorrelation:
    value = correlate(x.value, y.value, method)
    return ScoreCorrelation(value, *jackknife(value, left, bounds=(-1.0, 1.0)), tuple(left))


def descriptive_p(x: ScoreSeries, y: ScoreSeries, method: str) -> float:
    """The two-sided p of no correlation for independent points; descriptive, since these points are not independent."""
    n = len(x.value)
    smallest = 2.0 / math.factorial(n) if n < 12 else 0.0
    return two_sided_p(correlate(x.value, y.value, method), n) or smallest


class PerformanceResults:
    """The rows of one model in the table of the performance study, read as series over layers or checkpoints."""

    def __init__(self, table: Table, model: str) -> None:
        self.model = model
        measured = Query(table).where(metric=lambda metric: metric != "performance_correlation")  # made of the others
        self.query = measured.where(model=model, kind=("embed", "resid", "final"))
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
        """The mean of some quantities at each place (step and site); None where one is missing."""
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
        return self.query.where(metric="probe_accuracy").values("task")

    def performances(self) -> dict[str, list[MetricName]]:
        """Measures of performance in the table: the model's own loss, the loss of a fresh readout, probe accuracy."""
        found: dict[str, list[MetricName]] = {
            "loss": [("lm_loss", {"reading": "patched", "repair": "raw"})],
            "readout": [("lm_loss", {"reading": "readout", "repair": "raw"})],
        }
        for task in self.tasks():
            found[f"probe:{task}"] = [("probe_accuracy", {"repair": "raw", "task": task})]
        probes = [names[0] for what, names in found.items() if what.startswith("probe:")]
        found |= {"probe": probes} if probes else {}
        return {what: names for what, names in found.items() if all(self._rows(*name) for name in names)}


def performance_verdicts(results: PerformanceResults) -> list[Verdict]:
    """The verdicts on one model, at its last checkpoint and over its checkpoints."""
    gains = [verdict for repair, words in REPAIRED.items() for verdict in _repair(results, repair, words)]
    return [*gains, *_with_geometry(results)]


def performance_of_models(table: Table) -> list[Verdict]:
    """The verdicts of the performance study, which are on one model at a time and not in the catalogue of claims."""
    models = Query(table).values("model")
    return [verdict for model in models for verdict in performance_verdicts(PerformanceResults(table, str(model)))]


def _repair(results: PerformanceResults, repair: str, words: str) -> Iterator[Verdict]:
    """Verdicts on the effect of one repair at the last checkpoint, compared with raw rows."""
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
    for name, does, names, margin, sign, template, remark in table:
        found = _gain(results, names, margin=margin, sign=sign, form=template, remark=remark)
        if found is not None:
            yield verdict_of(f"{repair}_{name}", f"{words} {does}", found, subject=results.model)


def _gain(
    results: PerformanceResults, names: Sequence[MetricName], *, margin: float, sign: int, form: str, remark: str
) -> Finding | None:
    """The mean paired difference over sites (and tasks), with its jackknife interval over context folds."""
    step = results.steps[-1]
    series = results.mean_over(names, [step]) if names else None
    if series is None:
        return None
    whole = _change("mean over sites", series, sign, margin=margin)
    ends = {"embed": "at the embedding", "final": "after the final norm"}
    places = {ends.get(site[2], f"after block {site[1]}"): site for site in results.sites}
    single = {name: results.series(names, [(step, site)]) for name, site in places.items()}
    by_site = [_change(name, one, sign, needed=False) for name, one in single.items() if one is not None]
    best = max(by_site, key=lambda part: part.effect)
    tasks = f" and {len(names)} tasks" if len(names) > 1 else ""
    apart = f"; highest {best.name} ({best})" if any(one.effect != best.effect for one in by_site) else ""

    def sentence(parts: Parts, part: Part) -> str:
        text = f"{form.format(part)}, the mean over {len(by_site)} sites{tasks}, {part.outcome}{apart}"
        return f"{text}; {remark}" if remark else text

    return Finding([whole, *by_site], sentence, aspects=None)


def _change(name: str, series: ScoreSeries, sign: int, **more: Any) -> Part:
    """The first value of a series with its interval over context folds."""
    effect = round(sign * float(series.value[0]), 6) + 0.0  # means of what cancels leave rounding
    return Part(name, effect, *jackknife(effect, (sign * series.folds[0]).tolist(), bounds=(None, None)), **more)


def _with_geometry(results: PerformanceResults) -> Iterator[Verdict]:
    """Verdicts on whether anisotropy goes with worse performance, over checkpoints and over layers of the last one."""
    places = [(results.steps[-1], site) for site in results.sites]
    for points, performance, sign, words in _WORSE:
        of = results.performances().get(performance)
        if of is None:
            continue
        if points == "layers":
            x, y = (results.series(names, places) for names in ([GEOMETRY], of))
        else:
            x, y = (results.mean_over(names, results.steps) for names in ([GEOMETRY], of))
        name = f"anisotropy_worse_{performance}_{points}"
        statement = f"Over {points}, more anisotropy (σ₁/Σσ) goes with {words}"
        if x is not None and y is not None and len(x.value) >= FEWEST:
            yield _correlation(results, name, statement, x, y, sign=sign, points=points)
        elif points == "checkpoints" and len(results.steps) > 1:
            few = f"{len(results.steps)} checkpoints were measured and a correlation needs {FEWEST}"
            part = Part.absent("rank correlation", few, margin=CORRELATION)
            absent = Finding((part,), lambda parts, part: "", {"parts": []}, aspects=None)
            yield verdict_of(name, statement, absent, subject=results.model)


def _correlation(
    results: PerformanceResults, claim: str, statement: str, x: ScoreSeries, y: ScoreSeries, *, sign: int, points: str
) -> Verdict:
    """The verdict on a correlation: its intervals over contexts and over points must both lie beyond the margin."""
    turned = ScoreSeries(sign * y.value, sign * y.folds)
    found = {"over contexts": over_contexts(x, turned, "spearman")}
    found[f"over {points}"] = over_points(x, turned, "spearman")
    ends = np.array([[one.low, one.high] for one in found.values()])
    low, high = (float(ends[:, 0].min()), float(ends[:, 1].max())) if np.isfinite(ends).all() else (math.nan, math.nan)
    n = len(x.value)
    few = f"{n} {points} are too few: any one of them can turn it" if n < FEW else ""
    value = found["over contexts"].value
    part = Part("rank correlation", value, low, high, margin=CORRELATION, reason=few)
    described = [Part(name, one.value, one.low, one.high, needed=False) for name, one in found.items()]

    def sentence(parts: Parts, part: Part) -> str:
        known = [p for p in parts.values() if not p.needed and math.isfinite(p.low) and math.isfinite(p.high)]
        left = [f", leaving out {p.name.removeprefix('over ')} [{figure(p.low)}, {figure(p.high)}]" for p in known]
        text = f"Spearman {part} over {n} {points} of one run, signed so that more is worse, "
        text += part.outcome + "".join(left).replace(",", ";", 1)
        return f"{text}; they are not independent, so this describes"

    verdict = verdict_of(claim, statement, Finding([part, *described], sentence, aspects=None), subject=results.model)
    return replace(verdict, p=descriptive_p(x, turned, "spearman"))  # descriptive: it plays no part in the verdict
