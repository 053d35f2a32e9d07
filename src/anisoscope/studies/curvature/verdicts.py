"""Verdicts of the curvature study: each claim must hold on every curved manifold, the flat one is the control.

A claim names a zone for its effect, margin included. It holds where the 95 % interval lies in the zone, fails where
the interval lies outside, and is undecided otherwise; over manifolds it holds when all hold and fails when one fails
(an intersection–union test, Berger 1982, so nothing is corrected for the number of manifolds).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from anisoscope.claims.engine.claim import Verdict
from anisoscope.metrics.curvature import RECOVERED
from anisoscope.metrics.engine.estimate import Estimate
from anisoscope.studies.curvature.samples import EXPECTED_SLOPES, parabola_gradient

if TYPE_CHECKING:
    from anisoscope.claims.engine.part import Status
    from anisoscope.studies.curvature.config import CurvatureConfig


# Estimates from independent repetitions of a simulation.
#
# Repetitions share nothing but the manifold, so Student's interval of their mean is the honest one; a percentile
# bootstrap of a dozen values would cover the truth too rarely.


def over_replicates(values: Sequence[float], *, n: int = 0, log: bool = False, note: str = "") -> Estimate:
    """Mean and 95 % interval over repetitions, on the log scale (a geometric mean) for ratios and variances.

    >>> over_replicates([1.0, 2.0, 3.0], n=3)
    Estimate(2 [-0.4841, 4.484], n=3, sd=1)
    """
    from scipy.stats import t

    x = np.asarray(values, dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        x = np.log(x) if log else x
    if len(x) < 2 or not np.isfinite(x).all():
        return Estimate(math.nan, n=n, contexts=len(x), note=note or "not finite in every repetition")
    mean, sd = float(x.mean()), float(x.std(ddof=1))
    half = float(t.ppf(0.975, len(x) - 1)) * sd / math.sqrt(len(x))
    left_out = tuple((x.sum() - x) / (len(x) - 1))
    undo = math.exp if log else float
    return Estimate(
        undo(mean),
        undo(mean - half),
        undo(mean + half),
        n=n,
        sd=float(np.std(np.exp(x) if log else x, ddof=1)),
        contexts=len(x),
        note=note,
        replicates=tuple(undo(v) for v in left_out),
    )


def p_beyond(values: Sequence[float], bound: float) -> float:
    """One-sided p that the mean of the repetitions lies above the bound, by Student's t.

    >>> round(p_beyond([1.0, 2.0, 3.0], 2.0), 9)
    0.5
    """
    from scipy.stats import t

    x = np.asarray(values, dtype=float)
    if len(x) < 2 or not np.isfinite(x).all():
        return math.nan
    error = x.std(ddof=1) / math.sqrt(len(x))
    if error == 0:
        return 0.0 if x.mean() > bound else 1.0
    return float(t.sf((x.mean() - bound) / error, len(x) - 1))


MARGIN = 0.1
FLAT = "flat"
Seen = Mapping[str, Mapping[tuple[str, str, float, float], np.ndarray]]
_SLOPE_WORDS = {
    "tangent": ("tangent_variance_t2", "The tangent variance grows as t²"),
    "normal": ("normal_variance_t4", "The normal variance grows as t⁴"),
    "visibility": ("visibility_t2", "The visibility of curvature, normal over tangent variance, grows as t²"),
}


@dataclass(frozen=True)
class Zone:
    """Where an effect must lie for a claim to hold."""

    low: float = -math.inf
    high: float = math.inf

    def status(self, low: float, high: float) -> Status:
        """
        >>> Zone(1.9, 2.1).status(1.95, 2.05), Zone(1.9, 2.1).status(2.2, 2.3), Zone(1.9, 2.1).status(2.0, 2.2)
        ('holds', 'fails', 'undecided')
        """
        if self.low < low and high < self.high:
            return "holds"
        return "fails" if low >= self.high or high <= self.low else "undecided"

    def p(self, values: np.ndarray) -> float:
        """The larger of the one-sided p-values at the bounds there are (two one-sided tests, Schuirmann 1987)."""
        tests = [
            p_beyond((sign * values).tolist(), sign * bound)
            for sign, bound in ((1, self.low), (-1, self.high))
            if abs(bound) < math.inf
        ]
        return max(tests)

    def clearance(self, low: float, high: float) -> float:
        """How far inside the interval lies."""
        return min(low - self.low, self.high - high)


@dataclass(frozen=True)
class Case:
    """The effect on one manifold."""

    name: str
    effect: float
    low: float
    high: float
    p: float
    status: Status

    @property
    def title(self) -> str:
        return self.name.replace("_", " ")

    @classmethod
    def of(cls, name: str, values: np.ndarray, zone: Zone, *, log: bool = False) -> Case:
        found = over_replicates(values.tolist(), log=log)
        on = np.log(values) if log else values
        limits = Zone(*(_log(b) for b in (zone.low, zone.high))) if log else zone
        return cls(name, found.value, found.low, found.high, limits.p(on), zone.status(found.low, found.high))


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf


def judge(
    config: CurvatureConfig,
    *,
    slopes: Mapping[str, Mapping[str, np.ndarray]],
    seen: Seen,
    recovery: Mapping[str, Mapping[tuple[str, float], np.ndarray]],
) -> list[Verdict]:
    """Every claim of the study, in the order of its parts."""
    curved = [name for name in config.manifolds if name != FLAT]
    verdicts = [_slope(config, of, {m: slopes[m][of] for m in curved}) for of in EXPECTED_SLOPES]
    if FLAT in slopes:
        verdicts.append(_slope(config, "normal", {FLAT: slopes[FLAT]["normal"]}, control=True))
    visible = {m: seen[m] for m in curved}
    verdicts += [_attenuation(config, visible), _null(config, visible)]
    verdicts.append(_recovers(config, {m: recovery[m] for m in curved}))
    verdicts += [_lost(config, visible, count="equal"), _lost(config, visible, count="natural")]
    return [*(v for v in verdicts if v is not None), _parabola(config)]


def _decide(cases: Sequence[Case], zone: Zone) -> tuple[Status, Case]:
    """The outcome over manifolds, and the one it hangs on."""
    for status in ("fails", "undecided", "holds"):
        there = [case for case in cases if case.status == status]
        if there:
            return there[0].status, min(there, key=lambda c: _or_inf(zone.clearance(c.low, c.high)))
    raise ValueError("a verdict needs at least one case")


def _or_inf(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _verdict(
    claim: str,
    statement: str,
    cases: Sequence[Case],
    *,
    zone: Zone,
    why: Callable[[Status, Case], str],
    scope: str,
    subject: str = "",
    details: dict[str, Any] | None = None,
) -> Verdict | None:
    if not cases:
        return None
    status, binding = _decide(cases, zone)
    return Verdict(
        claim,
        statement,
        status,
        binding.effect,
        binding.low,
        binding.high,
        max(case.p for case in cases),
        MARGIN,
        why(status, binding),
        scope=scope,
        subject=subject or ("all curved manifolds" if len(cases) > 1 else cases[0].name),
        details={"parts": [asdict(case) for case in cases], "hangs_on": binding.name, **(details or {})},
    )


def _slope(
    config: CurvatureConfig, of: str, slopes: Mapping[str, np.ndarray], *, control: bool = False
) -> Verdict | None:
    target = EXPECTED_SLOPES[of]
    zone = Zone(target - MARGIN, target + MARGIN)
    claim, statement = _SLOPE_WORDS[of]

    def why(status: Status, case: Case) -> str:
        if math.isnan(case.effect):
            return f"On the {case.title} manifold too few scales lie above the noise floor to fit a slope."
        far = "furthest from it" if len(slopes) > 1 else "there"
        return (
            f"Expected slope {target:g}; {far} is {case.title}, {case.effect:.3f} [{case.low:.3f}, {case.high:.3f}], "
            f"over {config.replicates} independent samples at every scale above the noise floor."
        )

    cases = [Case.of(name, values, zone) for name, values in slopes.items()]
    scope = f"for samples around a point, {config.kind}, dimension {config.dim} in {config.ambient}"
    subject = "flat control" if control else ""
    return _verdict(claim, statement, cases, zone=zone, why=why, scope=scope, subject=subject)


def _assumed(config: CurvatureConfig) -> str:
    zipf, beta = config.reference
    return f"for s = {zipf:g} and β = {beta:g} ({'assumed' if config.beta is None else 'as given'})"


def _attenuation(config: CurvatureConfig, seen: Seen) -> Verdict | None:
    zone = Zone(high=1 - MARGIN)
    zipf, beta = config.reference
    cases = _cases(seen, ("curvature_attenuation", "estimate=true", zipf, beta), zone)
    raw = _cases(seen, ("curvature_attenuation", "estimate=pca", zipf, beta), zone)

    def why(status: Status, case: Case) -> str:
        misled = max(raw, key=lambda c: c.effect)
        return (
            f"Tokens drawn by frequency show {case.effect:.2f} [{case.low:.2f}, {case.high:.2f}] of the visibility "
            f"that a uniform draw of the same types shows ({case.title}, the least clear); the raw ratio of local PCA, "
            f"which cannot tell curvature from noise, goes up to {misled.effect:.2f} times that of the uniform draw."
        )

    return _verdict(
        "frequency_hides_curvature",
        "Frequency bias hides curvature: by frequency less of it is visible than in a uniform draw of the same types",
        cases,
        zone=zone,
        why=why,
        scope=_assumed(config),
        details={"raw": [asdict(c) for c in raw], "by_beta": _by_beta(config, seen)},
    )


def _cases(seen: Seen, key: tuple[str, str, float, float], zone: Zone) -> list[Case]:
    return [Case.of(name, arrays[key], zone, log=True) for name, arrays in seen.items() if key in arrays]


def _by_beta(config: CurvatureConfig, seen: Seen) -> dict[str, float]:
    """Geometric mean over manifolds and draws, at the reference exponent."""
    zipf = config.reference[0]
    found = {}
    for beta in config.all_betas:
        values = [arrays["curvature_attenuation", "estimate=true", zipf, beta] for arrays in seen.values()]
        found[f"{beta:g}"] = float(np.exp(np.mean(np.log(values)))) if values else math.nan
    return found


def _null(config: CurvatureConfig, seen: Seen) -> Verdict | None:
    zone = Zone(1 - MARGIN, 1 / (1 - MARGIN))
    steepest = max(config.all_zipf)
    cases = _cases(seen, ("curvature_attenuation", "estimate=true", steepest, 0.0), zone)

    def why(status: Status, case: Case) -> str:
        return (
            f"With β = 0 and s = {steepest:g} the ratio to a uniform draw is {case.effect:.3f} "
            f"[{case.low:.3f}, {case.high:.3f}] ({case.title}, furthest from 1)."
        )

    return _verdict(
        "frequency_null",
        "Where frequent and rare types are equally wide (β = 0), frequency changes nothing",
        cases,
        zone=zone,
        why=why,
        scope=f"for s = {steepest:g} and β = 0",
    )


def _recovers(
    config: CurvatureConfig, recovery: Mapping[str, Mapping[tuple[str, float], np.ndarray]]
) -> Verdict | None:
    zone = Zone(high=RECOVERED - MARGIN)
    best = {
        name: min(config.pca_scales, key=lambda scale, found=found: float(found["curvature_error", scale].mean()))  # type: ignore[misc]
        for name, found in recovery.items()
    }
    cases = [Case.of(name, found["curvature_error", best[name]], zone, log=True) for name, found in recovery.items()]

    def why(status: Status, case: Case) -> str:
        angle = float(recovery[case.name]["local_pca_angle", best[case.name]].mean())
        return (
            f"On the {case.title} manifold the median relative error of the curvature is {case.effect:.3f} "
            f"[{case.low:.3f}, {case.high:.3f}] and the tangent space is off by {angle:.1f}°, at the scale "
            f"{best[case.name]:g}/κ, the best of those tried."
        )

    return _verdict(
        "local_pca_recovers_curvature",
        "With one suitable scale for all types local PCA recovers the tangent and the curvature",
        cases,
        zone=zone,
        why=why,
        scope=f"for {config.neighbours} rows in every neighbourhood and noise {config.noise:g}/κ",
    )


def _lost(config: CurvatureConfig, seen: Seen, *, count: str) -> Verdict | None:
    zone = Zone(low=MARGIN)
    zipf, beta = config.reference

    def side(metric: str, sampling: str, arrays: Mapping[tuple[str, str, float, float], np.ndarray]) -> np.ndarray:
        return arrays[metric, f"count={count};sampling={sampling}", zipf, beta]

    shares = {
        name: tuple(side("curvature_recovered", sampling, arrays) for sampling in ("uniform", "zipf"))
        for name, arrays in seen.items()
    }
    cases = [Case.of(name, uniform - biased, zone) for name, (uniform, biased) in shares.items()]
    angles = [float(side("local_pca_angle", "zipf", arrays).mean()) for arrays in seen.values()]

    def why(status: Status, case: Case) -> str:
        uniform, biased = (float(values.mean()) for values in shares[case.name])
        return (
            f"On the {case.title} manifold the curvature is recovered for {uniform:.0%} of the tokens in a uniform "
            f"draw and {biased:.0%} by frequency, a difference of {case.effect:.2f} [{case.low:.2f}, {case.high:.2f}]; "
            f"the tangent space is off by at most {max(angles):.1f}° in the median."
        )

    rows = {
        "equal": ("local_pca_loses_curvature", f"with {config.neighbours} rows in every neighbourhood"),
        "natural": (
            "local_pca_loses_curvature_all_tokens",
            "also with all tokens of a type, of which the frequent have more",
        ),
    }
    claim, words = rows[count]
    return _verdict(
        claim,
        f"Under frequency bias local PCA loses the curvature of tokens that a uniform draw recovers, {words}",
        cases,
        zone=zone,
        why=why,
        scope=_assumed(config),
    )


def _parabola(config: CurvatureConfig) -> Verdict:
    scale = min(config.scales)
    found = [parabola_gradient(scale, n=config.samples, seed=config.seed + r) for r in range(config.replicates)]
    gap = np.array([p.row_tangent - p.mean_share for p in found])
    rows, total = (
        float(np.mean(values)) for values in zip(*((p.row_tangent, p.mean_share) for p in found), strict=True)
    )
    zone = Zone(low=1 - MARGIN)
    made = _verdict(
        "parabola",
        "The O(t) argument is not a theorem: a gradient can be wholly normal though every row is almost tangent",
        [Case.of("parabola", gap, zone)],
        zone=zone,
        why=lambda status, case: (
            f"On (u, u²) at scale {scale:g} the rows put all but {1 - rows:.1g} of their energy into the tangent; "
            f"the gradient, their sum, puts {total:.3g} there."
        ),
        scope="a counter-example",
    )
    assert made is not None
    return made
