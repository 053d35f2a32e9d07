"""Verdicts of the curvature study and of the performance study, from their tables.

Curvature: each claim must hold on every curved manifold; the flat one is the control. A claim gives a zone of allowed
effects, margin included. It holds when the 95 % interval over independent repetitions lies inside the zone, fails when
the interval lies outside, and is undecided otherwise.

Performance: is the geometry of representations correlated with it? A correlation has two intervals, one per source of
variation: over *contexts* (leave one fold of test contexts out of both quantities: measurement noise) and over
*points* (leave one checkpoint or layer out: does the result depend on a single one?). Layers of one model and
checkpoints of one run are not independent samples, so the p-values of these correlations are descriptive only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from anisoscope.claims.engine.claim import Finding, Part, Parts, Status, Verdict, judge, verdict_of
from anisoscope.claims.engine.correlation import two_sided_p
from anisoscope.claims.engine.evidence import Cell, figure
from anisoscope.results.quantity import correlate, jackknife, t_interval
from anisoscope.results.query import Query, Row, Table, variant_name

MARGIN = 0.1
FLAT = "flat"
EXPECTED_SLOPES = {"tangent": 2.0, "normal": 4.0, "visibility": 2.0}
RECOVERED = 0.5  # a curvature with a smaller relative error counts as recovered
_SLOPE_WORDS = {
    "tangent": ("tangent_variance_t2", "The tangent variance grows as t²"),
    "normal": ("normal_variance_t4", "The normal variance grows as t⁴"),
    "visibility": ("visibility_t2", "The visibility of curvature, normal over tangent variance, grows as t²"),
}
Interval = tuple[float, float]
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


# -- curvature ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ZonePart(Part):
    """The effect on one manifold, which must lie inside a zone (least, most)."""

    zone: Interval = (-math.inf, math.inf)

    @classmethod
    def over(cls, name: str, values: np.ndarray, zone: Interval, *, log: bool = False) -> ZonePart:
        """The mean over repetitions with Student's t interval; on the log scale (a geometric mean) for ratios.

        p is the larger of the one-sided p-values at the finite bounds (two one-sided tests, Schuirmann 1987).
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            x, (least, most) = (np.log(values), np.log(np.maximum(zone, 0.0))) if log else (values, zone)
        if len(x) < 2 or not np.isfinite(x).all():
            return cls(name, math.nan, margin=MARGIN, zone=zone)
        undo = math.exp if log else float
        half = t_interval(x.tolist())[0]
        tests = [t_interval(beyond.tolist())[1] for beyond in (x - least, most - x) if np.isfinite(beyond).all()]
        mean = float(x.mean())
        return cls(name, undo(mean), undo(mean - half), undo(mean + half), margin=MARGIN, p=max(tests), zone=zone)

    measured = True  # parts without a number are reported too

    @property
    def title(self) -> str:
        return self.name.replace("_", " ")

    def __format__(self, form: str) -> str:
        """The effect with its interval, each in this format, such as `.3f`."""
        return f"{self.effect:{form}} [{self.low:{form}}, {self.high:{form}}]"

    @property
    def lead(self) -> float:
        """Distance of the interval from the nearer bound of the zone; negative where it reaches beyond."""
        return min(self.low - self.zone[0], self.zone[1] - self.high)

    reach = lead

    @property
    def status(self) -> Status:
        if self.lead > 0:
            return "holds"
        return "fails" if self.low >= self.zone[1] or self.high <= self.zone[0] else "undecided"

    def record(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("name", "effect", "low", "high", "p", "status")}


def repetitions(row: Row | None, *, log: bool = False) -> np.ndarray:
    """The values of the n repetitions [n], from their mean m and the leave-one-out means l: n·m − (n − 1)·l."""
    if row is None or not row.folds:
        return np.full(2, math.nan)
    mean, left = np.array(row.value), np.array(row.folds)
    if log:
        mean, left = np.log(mean), np.log(left)
    values = len(left) * mean - (len(left) - 1) * left
    return np.exp(values) if log else values


def curvature_verdicts(table: Table) -> list[Verdict]:
    """The verdicts of the curvature study, in the order of its parts; settings are read from `table.about`."""
    study = _Curvature(table)
    verdicts = [study.slope(of, study.curved) for of in EXPECTED_SLOPES]
    if FLAT in study.manifolds:
        verdicts.append(study.slope("normal", [FLAT], subject="flat control"))
    verdicts += [study.attenuation(), study.null(), study.recovers(), study.lost("equal"), study.lost("natural")]
    return [verdict for verdict in (*verdicts, study.parabola()) if verdict is not None]


class _Curvature:
    """The table and the configuration of one run of the curvature study, with a method for each claim."""

    def __init__(self, table: Table) -> None:
        self.rows = Query(table)
        self.config: Mapping[str, Any] = table.about["config"]
        self.manifolds = self.rows.where(metric="curvature_slope").values("model")
        self.curved = [name for name in self.manifolds if name != FLAT]
        reference = table.about["reference"]
        self.reference = {"zipf": f"{reference['zipf']:g}", "beta": f"{reference['beta']:g}"}
        words = "as given" if reference["given"] else "assumed"
        self.assumed = f"for s = {self.reference['zipf']} and β = {self.reference['beta']} ({words})"

    def row(self, model: str, metric: str, **options: Any) -> Row | None:
        return self.rows.where(model=model, metric=metric).exactly(**options).one()

    def slope(self, of: str, manifolds: Sequence[str], subject: str = "") -> Verdict | None:
        target, kind = EXPECTED_SLOPES[of], self.config["kind"]
        zone = (target - MARGIN, target + MARGIN)
        found = {name: repetitions(self.row(name, "curvature_slope", of=of, sampling=kind)) for name in manifolds}
        parts = [ZonePart.over(name, values, zone) for name, values in found.items()]
        far = "furthest from it" if len(parts) > 1 else "there"

        def why(part: ZonePart) -> str:
            if math.isnan(part.effect):
                return f"On the {part.title} manifold too few scales lie above the noise floor to fit a slope."
            text = f"Expected slope {target:g}; {far} is {part.title}, {part:.3f}, over "
            return f"{text}{self.config['replicates']} independent samples at every scale above the noise floor."

        scope = f"for samples around a point, {kind}, dimension {self.config['dim']} in {self.config['ambient']}"
        return _over_manifolds(*_SLOPE_WORDS[of], parts, why=why, scope=scope, subject=subject)

    def _attenuations(self, zone: Interval, **options: Any) -> list[ZonePart]:
        rows = {name: self.row(name, "curvature_attenuation", **options) for name in self.curved}
        return [ZonePart.over(name, repetitions(row, log=True), zone, log=True) for name, row in rows.items() if row]

    def attenuation(self) -> Verdict | None:
        zone = (-math.inf, 1 - MARGIN)
        parts, raw = (self._attenuations(zone, estimate=of, **self.reference) for of in ("true", "pca"))
        by_beta = {}  # geometric mean over manifolds and draws, at the reference exponent
        options = {"metric": "curvature_attenuation", "estimate": "true", "scales": None}
        rows = self.rows.where(model=self.curved, zipf=self.reference["zipf"], **options)
        for beta in self.rows.where(metric="curvature_attenuation").values("beta"):
            logs = [math.log(row.value) if row.value > 0 else math.nan for row in rows.where(beta=beta)]
            by_beta[beta] = math.exp(sum(logs) / len(logs)) if logs else math.nan

        def why(part: ZonePart) -> str:
            misled = max(raw, key=lambda one: one.effect)
            return (
                f"Tokens drawn by frequency show {part:.2f} of the visibility that a uniform draw of the same "
                f"types shows ({part.title}, the least clear); the raw ratio of local PCA, which cannot tell curvature "
                f"from noise, goes up to {misled.effect:.2f} times that of the uniform draw."
            )

        statement = "Frequency bias hides curvature: by frequency less of it is visible than in a uniform draw of the "
        words = "frequency_hides_curvature", f"{statement}same types"
        details = {"raw": [part.record() for part in raw], "by_beta": by_beta}
        return _over_manifolds(*words, parts, why=why, scope=self.assumed, details=details)

    def null(self) -> Verdict | None:
        steepest = f"{max(map(float, self.rows.where(metric='curvature_attenuation').values('zipf'))):g}"
        parts = self._attenuations((1 - MARGIN, 1 / (1 - MARGIN)), estimate="true", zipf=steepest, beta="0")

        def why(part: ZonePart) -> str:
            text = f"With β = 0 and s = {steepest} the ratio to a uniform draw is {part:.3f} "
            return f"{text}({part.title}, furthest from 1)."

        statement = "Where frequent and rare types are equally wide (β = 0), frequency changes nothing"
        return _over_manifolds("frequency_null", statement, parts, why=why, scope=f"for s = {steepest} and β = 0")

    def recovers(self) -> Verdict | None:
        errors: dict[str, tuple[str, np.ndarray]] = {}
        for name in self.curved:
            found = self.rows.where(model=name, metric="curvature_error", scale=...)
            tried = {row["scale"]: repetitions(row, log=True) for row in found}
            errors[name] = min(tried.items(), key=lambda item: float(item[1].mean()))
        zone = (-math.inf, RECOVERED - MARGIN)
        parts = [ZonePart.over(name, values, zone, log=True) for name, (_, values) in errors.items()]

        def why(part: ZonePart) -> str:
            scale = errors[part.name][0]
            angle = float(repetitions(self.row(part.name, "local_pca_angle", scale=scale), log=True).mean())
            return (
                f"On the {part.title} manifold the median relative error of the curvature is {part:.3f} and "
                f"the tangent space is off by {angle:.1f}°, at the scale {scale}/κ, the best of those tried."
            )

        statement = "With one suitable scale for all types local PCA recovers the tangent and the curvature"
        scope = f"for {self.config['neighbours']} rows in every neighbourhood and noise {self.config['noise']:g}/κ"
        return _over_manifolds("local_pca_recovers_curvature", statement, parts, why=why, scope=scope)

    def lost(self, count: str) -> Verdict | None:
        def side(name: str, metric: str, sampling: str) -> np.ndarray:
            return repetitions(self.row(name, metric, count=count, sampling=sampling, **self.reference))

        ways = ("uniform", "zipf")
        shares = {name: [side(name, "curvature_recovered", way) for way in ways] for name in self.curved}
        parts = [ZonePart.over(name, one - two, (MARGIN, math.inf)) for name, (one, two) in shares.items()]
        angles = [float(side(name, "local_pca_angle", "zipf").mean()) for name in self.curved]

        def why(part: ZonePart) -> str:
            uniform, biased = (float(values.mean()) for values in shares[part.name])
            return (
                f"On the {part.title} manifold the curvature is recovered for {uniform:.0%} of the tokens in a uniform "
                f"draw and {biased:.0%} by frequency, a difference of {part:.2f}; the tangent space is off by "
                f"at most {max(angles):.1f}° in the median."
            )

        name, words = "local_pca_loses_curvature", f"with {self.config['neighbours']} rows in every neighbourhood"
        if count == "natural":
            name, words = f"{name}_all_tokens", "also with all tokens of a type, of which the frequent have more"
        statement = "Under frequency bias local PCA loses the curvature of tokens that a uniform draw recovers, "
        return _over_manifolds(name, statement + words, parts, why=why, scope=self.assumed)

    def parabola(self) -> Verdict | None:
        rows = self.rows.where(metric="parabola_tangent")
        scale = min(rows.values("scale"), key=float)
        one, two = (repetitions(rows.exactly(per=per, scale=scale).one()) for per in ("row", "gradient"))
        statement = "a gradient can be wholly normal though every row is almost tangent"
        text = f"On (u, u²) at scale {scale} the rows put all but {1 - one.mean():.1g} of their energy into the "
        text += f"tangent; the gradient, their sum, puts {two.mean():.3g} there."
        parts = [ZonePart.over("parabola", one - two, (1 - MARGIN, math.inf))]
        words = ("parabola", f"The O(t) argument is not a theorem: {statement}")
        return _over_manifolds(*words, parts, why=lambda part: text, scope="a counter-example")


def _over_manifolds(
    claim: str, statement: str, parts: Sequence[ZonePart], *, why: Callable[[Any], str], scope: str, **more: Any
) -> Verdict | None:
    """The verdict over manifolds, None without parts; `more` may give a subject and details."""
    if not parts:
        return None
    about = {**more.get("details", {}), "hangs_on": judge(parts)[1].name}
    finding = Finding(parts, lambda parts, part: why(part), about, aspects=None)
    named = more.get("subject") or ("all curved manifolds" if len(parts) > 1 else parts[0].name)
    return verdict_of(claim, statement, finding, subject=named, scope=scope)


# -- performance -------------------------------------------------------------------------------------------------------


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
        return self.query.where(metric="probe_selectivity").values("task")

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
    effect = sign * float(series.value[0]) + 0.0
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
