"""Claims of the theory: curvature in samples of known manifolds, gradients on them, the loop, pinning.

Each claim must hold on every manifold it speaks of; the flat one is a control. A claim gives a zone of allowed effects,
margin included. It holds when the 95 % interval over independent repetitions lies inside the zone, fails when the
interval lies outside, and is undecided otherwise. The orders in t are those of the paper, the margins are ours.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from anisoscope.claims.engine.claim import DECLARED, Finding, Part, Status, claim, judge
from anisoscope.claims.engine.evidence import NotHere, Run, Study
from anisoscope.claims.revisiting.tangent import SOURCE
from anisoscope.results.quantity import t_interval
from anisoscope.results.query import Query, Row

MARGIN = 0.1
RATIO_MARGIN = 0.15  # of a slope of a ratio, which has the noise of two
BOUND_MARGIN = 0.05  # by which a mean gradient may exceed its bound: the bound is to leading order in the scale
PINNED_MARGIN = 0.05
FLAT = "flat"
EXPECTED_SLOPES = {"tangent": 2.0, "normal": 4.0, "visibility": 2.0}  # of variances
ORDERS = {"tangent": 1.0, "normal": 2.0, "ratio": 1.0}  # of gradients
RECOVERED = 0.5  # a curvature with a smaller relative error counts as recovered
ASSUMED = {"zipf": "1", "beta": "0.25"}
CURVED = "all curved manifolds"
_MODELS = {"1": "linear model", "2": "two-layer model"}
Interval = tuple[float, float]
_claim = functools.partial(claim, source=SOURCE, about="measurement")  # of samples and toy models, none has to learn
ABSENT = NotHere("samples of known manifolds", "anisoscope study curvature measures them")
Subjects = Mapping[str, Any]  # a `Samples` for each subject, or what is missing
_OF = {"tangent": "the tangent part", "normal": "the normal part", "ratio": "their ratio"}


@dataclass(frozen=True)
class ZonePart(Part):
    """The effect on one manifold, which must lie inside a zone (least, most)."""

    zone: Interval = (-math.inf, math.inf)

    @classmethod
    def over(
        cls, name: str, values: np.ndarray, zone: Interval, *, log: bool = False, margin: float = MARGIN
    ) -> ZonePart:
        """The mean over repetitions with Student's t interval; on the log scale (a geometric mean) for ratios.

        p is the larger of the one-sided p-values at the finite bounds (two one-sided tests, Schuirmann 1987).
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            x, (least, most) = (np.log(values), np.log(np.maximum(zone, 0.0))) if log else (values, zone)
        if len(x) < 2 or not np.isfinite(x).all():
            return cls(name, math.nan, margin=margin, zone=zone)
        undo = math.exp if log else float
        half = t_interval(x.tolist())[0]
        tests = [t_interval(beyond.tolist())[1] for beyond in (x - least, most - x) if np.isfinite(beyond).all()]
        mean = float(x.mean())
        more: dict[str, Any] = {"margin": margin, "p": max(tests), "degrees": float(len(x) - 1)}
        return cls(name, undo(mean), undo(mean - half), undo(mean + half), zone=zone, **more)

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
        if self.reason:
            return "undecided"
        if self.lead > 0:
            return "holds"
        return "fails" if self.low >= self.zone[1] or self.high <= self.zone[0] else "undecided"

    def record(self) -> dict[str, Any]:
        """The part with the nearer bound of its zone as the margin, which error control reads."""
        least, most = self.zone
        below = self.effect - least > most - self.effect
        kept = {name: getattr(self, name) for name in ("name", "effect", "low", "high", "p", "status", "needed")}
        return kept | {"margin": most if below else least, "below": below, "degrees": self.degrees}


def repetitions(row: Row | None, *, log: bool = False) -> np.ndarray:
    """The values of the n repetitions [n], from their mean m and the leave-one-out means l: n·m − (n − 1)·l."""
    if row is None or not row.folds:
        return np.full(2, math.nan)
    mean, left = np.array(row.value), np.array(row.folds)
    if log:
        mean, left = np.log(mean), np.log(left)
    values = len(left) * mean - (len(left) - 1) * left
    return np.exp(values) if log else values


# -- subjects ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Samples:
    """Some manifolds of a study, by name, and which of their rows a claim is about."""

    runs: Mapping[str, Run]
    study: Study
    options: Mapping[str, Any]

    def rows(self, name: str, metric: str) -> Query:
        run = self.runs[name]
        return run.of(metric).where(seed=run.seed)

    def row(self, name: str, metric: str, **options: Any) -> Row | None:
        return self.rows(name, metric).exactly(**options).one()

    @property
    def reference(self) -> tuple[dict[str, str], str]:
        """Zipf exponent and β used for the verdicts, as options of rows, and a phrase on them."""
        used = [row for run in self.study.values() for row in run.of("frequency_beta").where(used=1, seed=run.seed)]
        options, source = dict(ASSUMED), "assumed"
        if used:
            source, value = str(used[0]["from"]), used[0].value
            options["beta"] = f"{round(value, 3) + 0.0 if source == 'measured' else value:g}"
            words = {"measured": f"measured in {used[0].model}", "given": "as given"}
            source = words.get(source, source)
        return options, f"for s = {options['zipf']} and β = {options['beta']} ({source})"


def curved(metric: str, *, control: bool = False) -> Callable[[Study], Subjects]:
    """One subject: the curved manifolds that have rows of a metric; with `control` also the flat one by itself."""

    def subjects(study: Study) -> Subjects:
        runs = _manifolds(study, metric)
        bent = {name: run for name, run in runs.items() if name != FLAT}
        found = {CURVED if len(bent) > 1 else next(iter(bent)): Samples(bent, study, {})} if bent else {}
        if control and FLAT in runs:
            found["flat control"] = Samples({FLAT: runs[FLAT]}, study, {})
        return found or _nothing()

    return subjects


def _nothing() -> Subjects:
    return {"known manifolds": ABSENT}


def _manifolds(study: Study, metric: str) -> dict[str, Run]:
    return {name: run for name, run in study.items() if len(run.of(metric).where(kind="manifold"))}


def _by_signal(study: Study) -> Subjects:
    """Gradients row by row for all signals together, and the mean gradient for each signal."""
    runs = {name: run for name, run in _manifolds(study, "manifold_gradient_slope").items() if name != FLAT}
    signals = list(
        dict.fromkeys(s for run in runs.values() for s in run.of("manifold_gradient_slope").values("signal"))
    )
    found = {"row by row, every signal": Samples(runs, study, {"per": "rows", "signals": signals})} if runs else {}
    for signal in signals:
        found[f"mean gradient, {signal} signal"] = Samples(runs, study, {"per": "mean", "signals": [signal]})
    return found or _nothing()


def _by_layers(study: Study) -> Subjects:
    runs = _manifolds(study, "tangent_variance_share")
    layers = sorted({n for run in runs.values() for n in run.of("tangent_variance_share").values("layers")})
    return {_MODELS.get(n, f"{n} layers"): Samples(runs, study, {"layers": n}) for n in layers} or _nothing()


def _by_optimiser(study: Study) -> Subjects:
    runs = _manifolds(study, "pinning_slope")
    names = list(dict.fromkeys(o for run in runs.values() for o in run.of("pinning_slope").values("optimiser")))
    return {f"trained with {name}": Samples(runs, study, {"optimiser": name}) for name in names} or _nothing()


def _finding(
    parts: Sequence[ZonePart], why: Callable[[Any], str], *, scope: str, details: Mapping[str, Any] | None = None
) -> Finding:
    if not parts:
        raise ABSENT
    about = {**(details or {}), "hangs_on": judge(parts)[1].name}
    return Finding(parts, lambda parts, part: why(part), about, aspects=None, scope=scope)


# -- curvature in samples ----------------------------------------------------------------------------------------------


def _variance(given: Samples, of: str) -> Finding:
    """The slope of a variance on every manifold."""
    target, kinds, parts = EXPECTED_SLOPES[of], set(), []
    for name in given.runs:
        for row in given.rows(name, "curvature_slope").where(of=of):
            kinds.add(row["sampling"])
            parts.append(ZonePart.over(name, repetitions(row), (target - MARGIN, target + MARGIN)))
    far = "furthest from it" if len(parts) > 1 else "there"

    def why(part: ZonePart) -> str:
        if math.isnan(part.effect):
            return f"On the {part.title} manifold too few scales lie above the noise floor to fit a slope."
        text = f"Expected slope {target:g}; {far} is {part.title}, {part:.3f}, over independent samples at every scale"
        return f"{text} above the noise floor."

    return _finding(parts, why, scope=f"for samples around a point, {', '.join(sorted(kinds))}")


@_claim(of=curved("curvature_slope"), metrics=("curvature_slope",), margin=MARGIN)
def tangent_variance_t2(given: Samples) -> Finding:
    """The tangent variance grows as t².

    Slope of log variance on log t over the scales above the noise floor, within 0.1 of 2 on every curved manifold.
    """
    return _variance(given, "tangent")


@_claim(of=curved("curvature_slope", control=True), metrics=("curvature_slope",), margin=MARGIN)
def normal_variance_t4(given: Samples) -> Finding:
    """The normal variance grows as t⁴.

    Slope within 0.1 of 4 on every curved manifold. The flat control has none above the floor.
    """
    return _variance(given, "normal")


@_claim(of=curved("curvature_slope"), metrics=("curvature_slope",), margin=MARGIN)
def visibility_t2(given: Samples) -> Finding:
    """The visibility of curvature, normal over tangent variance, grows as t².

    Slope within 0.1 of 2 on every curved manifold.
    """
    return _variance(given, "visibility")


_VISIBLE = ("curvature_attenuation", "frequency_beta")


def _attenuations(given: Samples, zone: Interval, **options: Any) -> list[ZonePart]:
    rows = {name: given.row(name, "curvature_attenuation", **options) for name in given.runs}
    return [ZonePart.over(name, repetitions(row, log=True), zone, log=True) for name, row in rows.items() if row]


@_claim(of=curved("curvature_attenuation"), metrics=_VISIBLE, margin=MARGIN)
def frequency_hides_curvature(given: Samples) -> Finding:
    """Frequency bias hides curvature: by frequency less of it is visible than in a uniform draw of the same types.

    Visibility of tokens drawn by frequency over that of a uniform draw of the same types, below 0.9 on every manifold,
    with the β that was measured in a model (`--model`), given (`--beta`), or assumed. With β below 0 frequent types are
    the wider ones and curvature is more visible by frequency.
    """
    reference, scope = given.reference
    zone = (-math.inf, 1 - MARGIN)
    parts, raw = (_attenuations(given, zone, estimate=of, **reference) for of in ("true", "pca"))
    by_beta: dict[str, float] = {}  # geometric mean over manifolds and draws, at the reference exponent
    logs: dict[str, list[float]] = {}
    for name in given.runs:
        found = given.rows(name, "curvature_attenuation").where(estimate="true", scales=None, zipf=reference["zipf"])
        for row in found:
            logs.setdefault(row["beta"], []).append(math.log(row.value) if row.value > 0 else math.nan)
    by_beta |= {beta: math.exp(sum(values) / len(values)) for beta, values in logs.items()}
    wider = float(reference["beta"]) < 0

    def why(part: ZonePart) -> str:
        text = f"Tokens drawn by frequency show {part:.2f} of the visibility that a uniform draw of the same types "
        text += f"shows ({part.title}, the least clear)"
        if raw:
            misled = max(raw, key=lambda one: one.effect)
            text += "; the raw ratio of local PCA, which cannot tell curvature from noise, goes up to "
            text += f"{misled.effect:.2f} times that of the uniform draw"
        if wider:
            text += "; β is negative, so frequent types are the wider ones and curvature is more visible for them"
        return f"{text}."

    details = {"raw": [part.record() for part in raw], "by_beta": by_beta}
    return _finding(parts, why, scope=scope, details=details)


@_claim(of=curved("curvature_attenuation"), metrics=("curvature_attenuation",), margin=MARGIN)
def frequency_null(given: Samples) -> Finding:
    """Where frequent and rare types are equally wide (β = 0), frequency changes nothing.

    The same ratio with β = 0, within a tenth of 1, at the steepest Zipf exponent.
    """
    laws = [s for name in given.runs for s in given.rows(name, "curvature_attenuation").where(beta="0").values("zipf")]
    steepest = f"{max(map(float, laws), default=math.nan):g}"
    zone = (1 - MARGIN, 1 / (1 - MARGIN))
    parts = _attenuations(given, zone, estimate="true", zipf=steepest, beta="0")

    def why(part: ZonePart) -> str:
        text = f"With β = 0 and s = {steepest} the ratio to a uniform draw is {part:.3f} "
        return f"{text}({part.title}, furthest from 1)."

    return _finding(parts, why, scope=f"for s = {steepest} and β = 0")


@_claim(of=curved("curvature_error"), metrics=("curvature_error", "local_pca_angle"), margin=MARGIN)
def local_pca_recovers_curvature(given: Samples) -> Finding:
    """With one suitable scale for all types local PCA recovers the tangent and the curvature.

    Median relative error of the curvature, at the best scale, at least 0.1 below one half.
    """
    errors: dict[str, tuple[str, np.ndarray]] = {}
    for name in given.runs:
        found = given.rows(name, "curvature_error").where(scale=...)
        tried = {row["scale"]: repetitions(row, log=True) for row in found}
        if tried:
            errors[name] = min(tried.items(), key=lambda item: float(item[1].mean()))
    zone = (-math.inf, RECOVERED - MARGIN)
    parts = [ZonePart.over(name, values, zone, log=True) for name, (_, values) in errors.items()]

    def why(part: ZonePart) -> str:
        scale = errors[part.name][0]
        angle = float(repetitions(given.row(part.name, "local_pca_angle", scale=scale), log=True).mean())
        turned = f" and the tangent space is off by {angle:.1f}°" if math.isfinite(angle) else ""
        return (
            f"On the {part.title} manifold the median relative error of the curvature is {part:.3f}{turned}, at the "
            f"scale {scale}/κ, the best of those tried."
        )

    return _finding(parts, why, scope="for equally many rows in every neighbourhood")


_LOST = ("curvature_recovered", "local_pca_angle", "frequency_beta")


def _lost(given: Samples, count: str) -> Finding:
    reference, scope = given.reference

    def side(name: str, metric: str, sampling: str) -> np.ndarray:
        return repetitions(given.row(name, metric, count=count, sampling=sampling, **reference))

    shares = {name: [side(name, "curvature_recovered", way) for way in ("uniform", "zipf")] for name in given.runs}
    parts = []
    for name, (uniform, biased) in shares.items():
        lost = uniform - biased if len(uniform) == len(biased) else uniform * math.nan
        part = ZonePart.over(name, lost, (MARGIN, math.inf))
        if max(uniform.mean(), biased.mean()) < MARGIN:  # what no draw recovers cannot be lost
            part = replace(
                part,
                reason=f"on the {part.title} manifold neither draw recovers the curvature of"
                f" {MARGIN:.0%} of the tokens",
            )
        parts.append(part)
    angles = [float(side(name, "local_pca_angle", "zipf").mean()) for name in given.runs]
    known = [angle for angle in angles if math.isfinite(angle)]
    turned = f"; the tangent space is off by at most {max(known):.1f}° in the median" if known else ""

    def why(part: ZonePart) -> str:
        uniform, biased = (float(values.mean()) for values in shares[part.name])
        return (
            f"On the {part.title} manifold the curvature is recovered for {uniform:.0%} of the tokens in a uniform "
            f"draw and {biased:.0%} by frequency, a difference of {part:.2f}{turned}."
        )

    return _finding(parts, why, scope=scope)


@_claim(of=curved("curvature_recovered"), metrics=_LOST, margin=MARGIN)
def local_pca_loses_curvature(given: Samples) -> Finding:
    """Under frequency bias local PCA loses the curvature of tokens that a uniform draw recovers, with equal rows.

    Share of tokens whose curvature is recovered, uniform minus by frequency, with equally many rows in every
    neighbourhood, and the β that was measured, given or assumed. Undecided where neither draw recovers a tenth of the
    tokens: there is nothing to lose.
    """
    return _lost(given, "equal")


@_claim(of=curved("curvature_recovered"), metrics=_LOST, margin=MARGIN)
def local_pca_loses_curvature_all_tokens(given: Samples) -> Finding:
    """Under frequency bias local PCA loses curvature also with all tokens of a type, of which the frequent have more.

    The same with all tokens that were drawn of a type.
    """
    return _lost(given, "natural")


# -- gradients on manifolds --------------------------------------------------------------------------------------------

_SLOPE = ("manifold_gradient_slope",)


def _order(given: Samples, of: str, *, margin: float = MARGIN) -> Finding:
    """The slope of a part of the gradient on every manifold, for the signals of the subject."""
    target, per = ORDERS[of], given.options["per"]
    zone, parts = (target - margin, target + margin), []
    for name in given.runs:
        for signal in given.options["signals"]:
            row = given.row(name, "manifold_gradient_slope", of=of, per=per, signal=signal)
            if row is None:
                continue
            label = f"{name}, {signal}" if len(given.options["signals"]) > 1 else name
            part = ZonePart.over(label, repetitions(row), zone, margin=margin)
            if math.isnan(part.effect) and "vanishes" in (row.note or ""):  # not even a slope is left
                gone = given.row(name, "manifold_gradient_slope", of="tangent", per=per, signal=signal)
                below = of == "ratio" and gone is not None and "vanishes" in (gone.note or "")
                end = -math.inf if below else math.inf
                part = replace(part, effect=end, low=end, high=end)
            parts.append(part)

    def why(part: ZonePart) -> str:
        if math.isnan(part.effect):
            return f"On the {part.title} manifold too few scales lie above rounding to fit a slope."
        if part.effect == math.inf:
            text = f"On the {part.title} manifold {_OF[of]} vanishes, nothing is left above rounding; expected slope "
            return f"{text}{target:g}; the bound holds and is not reached."
        if part.effect == -math.inf:
            text = (
                f"On the {part.title} manifold the tangent part vanishes and the normal part does not, so that their "
            )
            return f"{text}ratio has no bound; expected slope {target:g}."
        text = f"Expected slope {target:g}; furthest from it is {part.title}, {part:.3f}"
        if part.status == "fails" and part.effect > target:
            text += "; the leading order cancels, so that the bound holds and is not reached"
        elif part.status == "fails":
            text += "; it grows as the scale falls, so that it is not of this order"
        return f"{text}."

    return _finding(parts, why, scope="for a linear layer on rows centred at a point of each curved manifold")


@_claim(of=_by_signal, metrics=_SLOPE, margin=MARGIN)
def tangent_gradient_order(given: Samples) -> Finding:
    """The tangent part of the gradient of a linear layer grows as t (Eq. 9).

    Slope of log ‖E[g yᵀ]T‖ on log t within 0.1 of 1 on every curved manifold, row by row and for the mean gradient of
    each signal. It asks for the order itself: an upper bound holds also where the part vanishes.
    """
    return _order(given, "tangent")


@_claim(of=_by_signal, metrics=_SLOPE, margin=MARGIN)
def normal_gradient_order(given: Samples) -> Finding:
    """The normal part of the gradient of a linear layer grows as t² (Eq. 10).

    The same for ‖E[g yᵀ]N‖, within 0.1 of 2.
    """
    return _order(given, "normal")


@_claim(of=_by_signal, metrics=_SLOPE, margin=RATIO_MARGIN)
def gradient_ratio_order(given: Samples) -> Finding:
    """The normal part of the gradient over its tangent part grows as t (Eq. 11).

    The slope of the ratio within 0.15 of 1 (ours). It divides two upper bounds, so it is a measured quantity.
    """
    return _order(given, "ratio", margin=RATIO_MARGIN)


@claim(
    of=curved("manifold_gradient_tightness"), source="ours", metrics=("manifold_gradient_tightness",),
    margin=BOUND_MARGIN, about="measurement",
)  # fmt: skip
def gradient_within_bounds(given: Samples) -> Finding:
    """Both parts of the mean gradient stay within their bounds, with our constants, for every signal.

    The largest ratio to G·t·√E|u|² and G·(t²/2)·√E|II(u, u)|² over the fitted scales is at most 1.05; the constants are
    our reconstruction, and the bounds are to leading order in t.
    """
    parts: list[ZonePart] = []
    tight: dict[str, list[float]] = {}
    for name in given.runs:
        rows = given.rows(name, "manifold_gradient_tightness")
        for row in rows.where(highest=1):
            label = f"{name}, {row['of']}, {row['signal']}"
            parts.append(ZonePart.over(label, repetitions(row), (-math.inf, 1 + BOUND_MARGIN), margin=BOUND_MARGIN))
        for row in rows.where(highest=None):
            tight.setdefault(f"{row['of']}, {row['signal']}", []).append(row.value)
    means = {key: float(np.mean(values)) for key, values in tight.items()}

    def why(part: ZonePart) -> str:
        nearest = "; ".join(f"{key} {value:.2g}" for key, value in means.items())
        return f"The largest is {part:.3f} of the bound ({part.title}); mean over manifolds: {nearest}."

    return _finding(parts, why, scope="with our constants", details={"tightness": means})


# -- consequences for training -----------------------------------------------------------------------------------------


@_claim(of=_by_layers, metrics=("tangent_variance_share",), margin=MARGIN)
def self_reinforcing_loop(given: Samples) -> Finding:
    """Training draws the variance of activations into the tangent directions of the inputs.

    Share of the activation variance that comes from the tangent directions after training by SGD with labels linear in
    the tangent coordinates: by 0.1 above that before, above a model updated only in a random subspace of the same rank,
    and above one whose labels are noise; on every manifold, over independent trainings. With labels linear in normal
    coordinates the share falls: what the labels depend on is reinforced.
    """
    layers, parts, courses = given.options["layers"], [], {}

    def share(name: str, labels: str, update: str, *, last: bool = True) -> np.ndarray:
        rows = given.rows(name, "tangent_variance_share").exactly(labels=labels, layers=layers, update=update)
        steps = sorted(step for step in rows.values("step") if step is not None)
        return repetitions(rows.where(step=steps[-1 if last else 0]).one()) if steps else np.full(2, math.nan)

    for name in given.runs:
        end, start = share(name, "tangent", "all"), share(name, "tangent", "all", last=False)
        others = {"the start": start, "a random subspace": share(name, "tangent", "random")}
        others["noise labels"] = share(name, "noise", "all")
        courses[name] = {"end": float(end.mean()), "normal labels": float(share(name, "normal", "all").mean())}
        courses[name] |= {other: float(values.mean()) for other, values in others.items()}
        for other, values in others.items():
            gain = end - values if len(end) == len(values) else np.full(2, math.nan)
            parts.append(ZonePart.over(f"{name} over {other}", gain, (MARGIN, math.inf)))

    def why(part: ZonePart) -> str:
        name, _, other = part.name.partition(" over ")
        seen = courses[name]
        text = f"On the {name.replace('_', ' ')} manifold the tangent share goes from {seen['the start']:.2f} to "
        text += f"{seen['end']:.2f}, against {seen['a random subspace']:.2f} with updates in a random subspace and "
        text += f"{seen['noise labels']:.2f} with noise labels; the least clear lead is {part:.2f}, over {other}"
        if math.isfinite(seen["normal labels"]):
            text += f"; with labels of normal coordinates it goes to {seen['normal labels']:.2f}"
        return f"{text}."

    return _finding(parts, why, scope="for labels linear in the tangent coordinates", details={"courses": courses})


@_claim(of=_by_optimiser, metrics=("pinning_slope",), margin=PINNED_MARGIN)
def frequent_types_pinned(given: Samples) -> Finding:
    """The embeddings of frequent types stay closer to their time mean than those of rare ones.

    Slope of log distance to the time mean on log frequency below −0.05 (ours), over all of training and over its second
    half, for each optimiser.
    """
    parts = []
    for name in given.runs:
        for row in given.rows(name, "pinning_slope").where(optimiser=given.options["optimiser"]):
            zone = (-math.inf, -PINNED_MARGIN)
            parts.append(ZonePart.over(str(row["window"]), repetitions(row), zone, margin=PINNED_MARGIN))
    words = {"all": "the whole training", "late": "its second half"}

    def why(part: ZonePart) -> str:
        rest = [f"over {words[one.name]} {one:.3f}" for one in parts if one.name != part.name]
        text = f"The slope is {part:.3f} over {words[part.name]}{'; ' if rest else ''}{'; '.join(rest)}"
        text += "; frequent types move more, not less" if part.status == "fails" and part.effect > 0 else ""
        return f"{text}."

    return _finding(parts, why, scope="for bigram models of types with Zipf frequencies")


def _parabola(study: Study) -> Subjects:
    runs = _manifolds(study, "parabola_tangent")
    return {"parabola": Samples(runs, study, {})} if runs else _nothing()


@claim(of=_parabola, source="ours", metrics=("parabola_tangent",), margin=MARGIN, about="measurement")
def parabola(given: Samples) -> Finding:
    """The O(t) argument is not a theorem: a gradient can be wholly normal though every row is almost tangent.

    On x = (u, u²) with u symmetric and g = 1: tangent share of the energy row by row minus that of the mean gradient.
    """
    name = next(iter(given.runs))
    rows = given.rows(name, "parabola_tangent")
    scale = min(rows.values("scale"), key=float)
    one, two = (repetitions(rows.exactly(per=per, scale=scale).one()) for per in ("row", "gradient"))
    text = f"On (u, u²) at scale {scale} the rows put all but {1 - one.mean():.1g} of their energy into the "
    text += f"tangent; the gradient, their sum, puts {two.mean():.3g} there."
    parts = [ZonePart.over("parabola", one - two, (1 - MARGIN, math.inf))]
    return _finding(parts, lambda part: text, scope="a counter-example")


def theory_claims() -> list[str]:
    """The names of the claims of this module, in the order of the page."""
    return [each.name for each in DECLARED.values() if each.module == __name__]
