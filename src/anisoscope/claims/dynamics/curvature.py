"""Verdicts of the curvature study: each claim must hold on every curved manifold, the flat one is the control.

A claim names a zone for its effect, margin included. It holds where the 95 % interval over independent repetitions lies
in the zone, fails where the interval lies outside, and is undecided otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anisoscope.claims.engine.claim import Verdict, verdict_of
from anisoscope.claims.engine.part import Finding, Part, Status, judge, t_interval
from anisoscope.results.query import Query, Row
from anisoscope.results.table import Table

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


@dataclass(frozen=True)
class ZonePart(Part):
    """The effect on one manifold, which must lie in a zone: not too small, not too large."""

    zone: Interval = (-math.inf, math.inf)

    @classmethod
    def over(cls, name: str, values: np.ndarray, zone: Interval, *, log: bool = False) -> ZonePart:
        """The mean over repetitions with Student's interval, on the log scale (a geometric mean) for ratios.

        p is the larger of the one-sided ones at the bounds that there are (two one-sided tests, Schuirmann 1987).
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

    @property
    def title(self) -> str:
        return self.name.replace("_", " ")

    @property
    def measured(self) -> bool:
        return True  # one without a number is told as such

    @property
    def lead(self) -> float:
        """How far inside the zone the interval lies."""
        return min(self.low - self.zone[0], self.zone[1] - self.high)

    @property
    def reach(self) -> float:
        return self.lead

    @property
    def status(self) -> Status:
        if self.lead > 0:
            return "holds"
        return "fails" if self.low >= self.zone[1] or self.high <= self.zone[0] else "undecided"

    def record(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("name", "effect", "low", "high", "p", "status")}


def repetitions(row: Row | None, *, log: bool = False) -> np.ndarray:
    """The values of the n repetitions, from their mean m and the means l without one: n·m − (n − 1)·l."""
    if row is None or not row.folds:
        return np.full(2, math.nan)
    mean, left = np.array(row.value), np.array(row.folds)
    if log:
        mean, left = np.log(mean), np.log(left)
    values = len(left) * mean - (len(left) - 1) * left
    return np.exp(values) if log else values


def curvature_verdicts(table: Table) -> list[Verdict]:
    """Every claim of the study, in the order of its parts; the settings are those in run.json."""
    study = _Curvature(table)
    verdicts = [study.slope(of, study.curved) for of in EXPECTED_SLOPES]
    if FLAT in study.manifolds:
        verdicts.append(study.slope("normal", [FLAT], subject="flat control"))
    verdicts += [study.attenuation(), study.null(), study.recovers(), study.lost("equal"), study.lost("natural")]
    return [verdict for verdict in (*verdicts, study.parabola()) if verdict is not None]


class _Curvature:
    """The table of one run of the study, and what it was run with."""

    def __init__(self, table: Table) -> None:
        self.rows = Query(table)
        self.config: Mapping[str, Any] = table.about["config"]
        self.manifolds = self.rows.where(metric="curvature_slope").values("model")
        self.curved = [name for name in self.manifolds if name != FLAT]
        told = table.about["reference"]
        self.reference = {"zipf": f"{told['zipf']:g}", "beta": f"{told['beta']:g}"}
        words = "as given" if told["given"] else "assumed"
        self.assumed = f"for s = {self.reference['zipf']} and β = {self.reference['beta']} ({words})"

    def row(self, model: str, metric: str, **options: Any) -> Row | None:
        return self.rows.where(model=model, metric=metric).exactly(**options).one()

    def slope(self, of: str, manifolds: Sequence[str], subject: str = "") -> Verdict | None:
        target, kind = EXPECTED_SLOPES[of], self.config["kind"]
        zone = (target - MARGIN, target + MARGIN)
        found = {name: repetitions(self.row(name, "curvature_slope", of=of, sampling=kind)) for name in manifolds}
        scope = f"for samples around a point, {kind}, dimension {self.config['dim']} in {self.config['ambient']}"
        parts = [ZonePart.over(name, values, zone) for name, values in found.items()]
        far = "furthest from it" if len(parts) > 1 else "there"

        def why(part: ZonePart) -> str:
            if math.isnan(part.effect):
                return f"On the {part.title} manifold too few scales lie above the noise floor to fit a slope."
            return (
                f"Expected slope {target:g}; {far} is {part.title}, {part.effect:.3f} [{part.low:.3f}, "
                f"{part.high:.3f}], over {self.config['replicates']} independent samples at every scale above the "
                "noise floor."
            )

        return _judged(*_SLOPE_WORDS[of], parts, why=why, scope=scope, subject=subject)

    def _attenuations(self, zone: Interval, **options: Any) -> list[ZonePart]:
        rows = {name: self.row(name, "curvature_attenuation", **options) for name in self.curved}
        return [ZonePart.over(name, repetitions(row, log=True), zone, log=True) for name, row in rows.items() if row]

    def attenuation(self) -> Verdict | None:
        zone = (-math.inf, 1 - MARGIN)
        parts = self._attenuations(zone, estimate="true", **self.reference)
        raw = self._attenuations(zone, estimate="pca", **self.reference)

        def why(part: ZonePart) -> str:
            misled = max(raw, key=lambda one: one.effect)
            return (
                f"Tokens drawn by frequency show {part.effect:.2f} [{part.low:.2f}, {part.high:.2f}] of the "
                f"visibility that a uniform draw of the same types shows ({part.title}, the least clear); the raw "
                "ratio of local PCA, which cannot tell curvature from noise, goes up to "
                f"{misled.effect:.2f} times that of the uniform draw."
            )

        return _judged(
            "frequency_hides_curvature",
            "Frequency bias hides curvature: by frequency less of it is visible than in a uniform draw of the same "
            "types",
            parts,
            why=why,
            scope=self.assumed,
            details={"raw": [part.record() for part in raw], "by_beta": dict(self._by_beta())},
        )

    def _by_beta(self) -> Iterator[tuple[str, float]]:
        """Geometric mean over manifolds and draws, at the reference exponent."""
        options = {"metric": "curvature_attenuation", "estimate": "true", "scales": None}
        rows = self.rows.where(model=self.curved, zipf=self.reference["zipf"], **options)
        for beta in self.rows.where(metric="curvature_attenuation").values("beta"):
            logs = [math.log(row.value) if row.value > 0 else math.nan for row in rows.where(beta=beta)]
            yield beta, math.exp(sum(logs) / len(logs)) if logs else math.nan

    def null(self) -> Verdict | None:
        steepest = f"{max(map(float, self.rows.where(metric='curvature_attenuation').values('zipf'))):g}"
        parts = self._attenuations((1 - MARGIN, 1 / (1 - MARGIN)), estimate="true", zipf=steepest, beta="0")

        def why(part: ZonePart) -> str:
            return (
                f"With β = 0 and s = {steepest} the ratio to a uniform draw is {part.effect:.3f} "
                f"[{part.low:.3f}, {part.high:.3f}] ({part.title}, furthest from 1)."
            )

        return _judged(
            "frequency_null",
            "Where frequent and rare types are equally wide (β = 0), frequency changes nothing",
            parts,
            why=why,
            scope=f"for s = {steepest} and β = 0",
        )

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
                f"On the {part.title} manifold the median relative error of the curvature is {part.effect:.3f} "
                f"[{part.low:.3f}, {part.high:.3f}] and the tangent space is off by {angle:.1f}°, at the scale "
                f"{scale}/κ, the best of those tried."
            )

        return _judged(
            "local_pca_recovers_curvature",
            "With one suitable scale for all types local PCA recovers the tangent and the curvature",
            parts,
            why=why,
            scope=f"for {self.config['neighbours']} rows in every neighbourhood and noise {self.config['noise']:g}/κ",
        )

    def lost(self, count: str) -> Verdict | None:
        def side(name: str, metric: str, sampling: str) -> np.ndarray:
            return repetitions(self.row(name, metric, count=count, sampling=sampling, **self.reference))

        shares = {
            name: [side(name, "curvature_recovered", sampling) for sampling in ("uniform", "zipf")]
            for name in self.curved
        }
        parts = [ZonePart.over(name, one - two, (MARGIN, math.inf)) for name, (one, two) in shares.items()]
        angles = [float(side(name, "local_pca_angle", "zipf").mean()) for name in self.curved]

        def why(part: ZonePart) -> str:
            uniform, biased = (float(values.mean()) for values in shares[part.name])
            return (
                f"On the {part.title} manifold the curvature is recovered for {uniform:.0%} of the tokens in a uniform "
                f"draw and {biased:.0%} by frequency, a difference of {part.effect:.2f} "
                f"[{part.low:.2f}, {part.high:.2f}]; the tangent space is off by at most {max(angles):.1f}° in the "
                "median."
            )

        rows = {
            "equal": ("local_pca_loses_curvature", f"with {self.config['neighbours']} rows in every neighbourhood"),
            "natural": (
                "local_pca_loses_curvature_all_tokens",
                "also with all tokens of a type, of which the frequent have more",
            ),
        }
        claim, words = rows[count]
        statement = (
            f"Under frequency bias local PCA loses the curvature of tokens that a uniform draw recovers, {words}"
        )
        return _judged(claim, statement, parts, why=why, scope=self.assumed)

    def parabola(self) -> Verdict | None:
        rows = self.rows.where(metric="parabola_tangent")
        scale = min(rows.values("scale"), key=float)
        one, two = (repetitions(rows.exactly(per=per, scale=scale).one()) for per in ("row", "gradient"))
        return _judged(
            "parabola",
            "The O(t) argument is not a theorem: a gradient can be wholly normal though every row is almost tangent",
            [ZonePart.over("parabola", one - two, (1 - MARGIN, math.inf))],
            why=lambda part: (
                f"On (u, u²) at scale {scale} the rows put all but {1 - one.mean():.1g} of their energy into the "
                f"tangent; the gradient, their sum, puts {two.mean():.3g} there."
            ),
            scope="a counter-example",
        )


def _judged(
    claim: str,
    statement: str,
    parts: Sequence[ZonePart],
    *,
    why: Callable[[Any], str],
    scope: str,
    subject: str = "",
    details: Mapping[str, Any] | None = None,
) -> Verdict | None:
    """The verdict over manifolds; none without any."""
    if not parts:
        return None
    about = {**(details or {}), "hangs_on": judge(parts)[1].name}
    finding = Finding(tuple(parts), lambda parts, status, part: why(part), about, aspects=None)
    named = subject or ("all curved manifolds" if len(parts) > 1 else parts[0].name)
    return verdict_of(claim, statement, finding, subject=named, scope=scope)
