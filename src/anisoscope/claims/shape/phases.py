"""Claims about training (intrinsic dimension rises and then falls, anisotropy grows), clusters and estimators.

Notation
    D(s)   intrinsic dimension at step s, the mean over blocks 1 … L
    s*     the step where D is largest on the first half of the contexts (group half:1)
    rise   D(s*)/D(first) − 1, fall 1 − D(last)/D(s*), both on the other half (group half:2): the maximum of noisy
           values is biased upwards on the contexts on which it was located
Growth of anisotropy compares *late*, the mean over the last third of the measured steps after initialisation, with step
0 and with *early*, the mean over their first third. Steps of one run are not independent: what a walk without direction
gives too often (`claims.engine.walk`) stays open.
Local isotropy is judged by the share of variance along the first direction, inside clusters and outside of them. The
average cosine of centred rows is about 0 by construction, so it is not used.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from anisoscope.claims.engine import evidence
from anisoscope.claims.engine.claim import CORRELATION, Finding, Part, Parts, claim, descriptive, judge
from anisoscope.claims.engine.correlation import correlated, sites_interval
from anisoscope.claims.engine.evidence import BlockStack, Missing, Readings, block_mean, shared_steps, stacks
from anisoscope.claims.engine.walk import Statistic, Walk, rank_correlations, walk_doubt
from anisoscope.claims.shape.depth import FEWEST_BLOCKS, SOURCE, Curve
from anisoscope.results.quantity import Quantity, mean, relative_fall

PHASE_MARGIN = 0.1
GROWTH_MARGIN = 0.2  # relative: the scale of σ₁/Σσ depends on the width
ESTIMATORS = {"two_nn": "TwoNN", "levina_bickel": "Levina–Bickel", "gride": "GRIDE"}
Halves = tuple[Readings, Readings]
ENOUGH = 2  # estimators that must show both phases
_CHOSEN, _TESTED = "half:1", "half:2"
_LATER = "after step 0"
_WALKS = "walks that rise and fall as much"
_HALVES = "measure again with --halves: the peak is chosen on one half of the contexts and tested on the other"
AGREEMENT_MARGIN = 0.5
LOCAL_MARGIN = 0.05
CONSIDERABLE = 0.1  # share of variance along one direction; isotropic rows have about 1/d
_PARTITIONS = {"clusters": {}, "random": {"partition": "random"}, "whole": {"partition": "none"}}
_LESS = {"random": "less than at random", "whole": "less than the whole"}


@claim(of=stacks, source=SOURCE, metrics=tuple(ESTIMATORS), margin=PHASE_MARGIN, about="training")
def two_phases(stack: BlockStack) -> Finding:
    """Intrinsic dimension first rises and then falls in training.

    Rise to the peak and fall from it, relative, of the mean over blocks; chosen on half:1, tested on half:2.

    It must hold with two of the estimators TwoNN, Levina–Bickel and GRIDE at least, and also with step 0 left out:
    otherwise the rise is that from the initialisation alone, and the claim stays open. So it does where as many steps
    whose changes go up or down by chance rise and fall as much too often (p > .02 of all choices of their signs).
    """
    measured: dict[str, Halves] = {}
    for name in ESTIMATORS:  # both halves, at their common blocks and steps
        one, two = (stack.blocks(name, group=group) for group in (_CHOSEN, _TESTED))
        layers, steps = shared_steps([one, two])
        if len(steps) > 2:
            chosen = [{c: r for c, r in half.items() if c.step in steps and c.layer in layers} for half in (one, two)]
            measured[name] = (chosen[0], chosen[1])
    if not measured:
        raise _why_not(stack)
    parts = [part for name, both in measured.items() for part in _phase_parts(name, both)]
    details: dict[str, Any] = {"estimators": {name: _course(both) for name, both in measured.items()}}
    details["step"] = max(evidence.steps_of(one)[-1] for one, _ in measured.values())
    aspects = {ESTIMATORS[name]: (f"{name}: rise", f"{name}: fall") for name in measured}
    return Finding(parts, _phases_sentence, details, settle=_second_best, doubt=_phase_doubt, aspects=aspects)


def _why_not(stack: BlockStack) -> Missing:
    metric = next((name for name in ESTIMATORS if stack.blocks(name)), None)
    if metric is None:
        return stack.gap("two_nn", how="measure it with --metrics two_nn,levina_bickel,gride")
    if len(evidence.steps_of(stack.blocks(metric))) < 3:
        return evidence.NotHere("series of 3 steps or more", "sweep the checkpoints of a model or watch its training")
    if stack.blocks(metric, group=_CHOSEN):
        return Missing("three steps with a number at the same blocks", "measure more steps")
    return Missing(f"{metric} for groups {_CHOSEN} and {_TESTED}", _HALVES)


def _phase_parts(name: str, halves: Halves) -> list[Part]:
    """Parts for rise and fall over all steps and, if step 0 is among them, without it; and the step of the peak."""
    steps = evidence.steps_of(halves[0])
    later = [step for step in steps if step > 0]
    rise, fall, peak = _phases(halves, steps)
    parts = [Part.of(f"{name}: {phase}", q, margin=PHASE_MARGIN) for phase, q in (("rise", rise), ("fall", fall))]
    course = _logs([block_mean(halves[1], step).value for step in steps])
    lucky = Walk.of([course], _both_phases, "steps").p
    parts += Part.describe_all({f"{name}: peak step": float(peak), f"{name}: {_WALKS}": lucky})
    if later != steps and len(later) > 1:
        phases = zip(("rise", "fall"), _phases(halves, later)[:2], strict=True)
        more: dict[str, Any] = {"margin": PHASE_MARGIN, "needed": False}
        parts += [Part.of(f"{name}: {phase} {_LATER}", quantity, **more) for phase, quantity in phases]
    return parts


def _phases(
    halves: Halves, steps: Sequence[int], layers: Sequence[int] | None = None
) -> tuple[Quantity, Quantity, int]:
    """Rise and fall on the second half, around the peak of the first half."""
    one, two = halves
    peak = max(steps, key=lambda step: block_mean(one, step, layers).value)
    first, top, last = (block_mean(two, step, layers) for step in (steps[0], peak, steps[-1]))
    unit = Quantity.constant(1.0)
    # with the peak at an end there is no rise, or no fall
    rise = top.over(first) - unit if peak != steps[0] else Quantity(0.0, half=0.0)
    fall = unit - last.over(top) if peak != steps[-1] else Quantity(0.0, half=0.0)
    return rise, fall, peak


def _second_best(parts: dict[str, Part]) -> dict[str, Part]:
    """Only the second-best estimator is needed, since two must hold.

    With fewer than two estimators the claim is undecided.
    """
    judged = {name: judge([parts[f"{name}: rise"], parts[f"{name}: fall"]])[1] for name in _names(parts)}
    order = sorted(judged, key=lambda name: judged[name].standing, reverse=True)
    decides = judged[order[min(ENOUGH, len(order)) - 1]]
    if len(order) < ENOUGH:
        others = " and ".join(name for name in ESTIMATORS if name not in order)
        reason = f"it was measured with {len(order)} estimator and needs {ENOUGH} (measure {others} too)"
        decides = replace(decides, name=f"{decides.name} alone", reason=reason)
    return {**descriptive(parts), decides.name: replace(decides, needed=True)}


def _names(parts: Parts) -> list[str]:
    return [name for name in ESTIMATORS if f"{name}: rise" in parts]


def _logs(values: Sequence[float]) -> np.ndarray:
    """Logarithms: rises and falls are relative, and a walk of relative changes is one of logarithms."""
    return np.log(np.maximum(values, 1e-12))


def _both_phases(walks: np.ndarray) -> np.ndarray:
    """The smaller of rise and fall around the peak, of courses [sets, steps]."""
    return walks.max(-1) - np.maximum(walks[:, 0], walks[:, -1])


def _phase_doubt(parts: Parts) -> str:
    """Why the phases may be none: a walk over the steps, or step 0 alone; empty if neither."""
    sure = sorted(parts[f"{name}: {_WALKS}"].effect for name in _names(parts))
    return walk_doubt(sure[ENOUGH - 1], "steps") or _hangs_on_step_0(parts)


def _hangs_on_step_0(parts: Parts) -> str:
    """Whether fewer than two estimators show both phases when step 0 is left out."""
    names = _names(parts)
    later = {n: [parts[f"{n}: {w} {_LATER}"] for w in ("rise", "fall") if f"{n}: {w} {_LATER}" in parts] for n in names}
    holding = [name for name in names if not later[name] or judge(later[name])[0] == "holds"]
    if len(holding) >= ENOUGH:
        return ""
    worst = min((judge(phases)[1] for phases in later.values() if phases), key=lambda part: part.standing[1])
    name, what = worst.name.split(": ")
    return f"without step 0 the {what.removesuffix(f' {_LATER}')} by {ESTIMATORS[name]} is {worst}"


def _course(halves: Halves) -> dict[str, Any]:
    """Records for the report: both halves over steps, and the phases of each block."""
    blocks = []
    for layer in sorted({cell.layer for cell in halves[0]}):
        rise, fall, peak = _phases(halves, evidence.steps_of(halves[0]), [layer])
        parts = {name: Part.of(name, q, margin=PHASE_MARGIN) for name, q in (("rise", rise), ("fall", fall))}
        phases = {name: part.record() for name, part in parts.items()}
        blocks.append({"layer": layer, "peak_step": peak, "status": judge(list(parts.values()))[0], **phases})
    return {"chosen": evidence.step_records(halves[0]), "tested": evidence.step_records(halves[1]), "blocks": blocks}


def _phases_sentence(parts: Parts, part: Part) -> str:
    runs = []
    for name in _names(parts):
        peak = parts[f"{name}: peak step"].effect
        when = f"step {peak:.0f}" if peak == round(peak) else f"around step {peak:.0f}"
        rise, fall = parts[f"{name}: rise"], parts[f"{name}: fall"]
        runs.append(f"rises by {rise} to {when} and falls by {fall} after it ({ESTIMATORS[name]})")
    name, what = part.name.split(": ")
    text = f"on contexts that did not choose the peak, the intrinsic dimension in relative terms {', '.join(runs)}; of "
    text += f"the two estimators that must agree {ESTIMATORS[name]} decides by its {what}, "
    return text + part.outcome


@claim(of=stacks, source=SOURCE, metrics=("svd_ratio", "average_cosine"), margin=GROWTH_MARGIN, about="training")
def anisotropy_grows(stack: BlockStack) -> Finding:
    """Anisotropy grows in training, by more than a fifth.

    svd_ratio, mean over blocks, late in training over that at step 0, and over that early in training, minus 1.

    Late and early are the means over the last and the first third of the measured steps after initialisation, so that
    no single step decides and a jump from step 0 to step 1 is no growth. The margin is relative, a fifth of the value
    before, since the scale of σ₁/Σσ depends on the width. Undecided where as many steps whose changes go up or down by
    chance grow as much too often (p > .02 of all choices of their signs); three seeds answer that by themselves.
    """
    readings = stack.needed("svd_ratio")
    evidence.need_series(readings)
    layers, steps = shared_steps([readings])
    if len(steps) < 2:
        raise Missing("two steps with a number at the same blocks", f"{len(steps)} step has numbers at all of them")
    grown = _growth(readings)
    parts = [_growth_part(name, readings, *ends) for name, ends in grown.items()]
    if _EARLY not in grown:
        parts.append(Part.absent(_EARLY, Missing("second step after step 0", "measure more"), margin=GROWTH_MARGIN))
    cosines = _growth(cosine := stack.blocks("average_cosine")) if stack.blocks("average_cosine") else {}
    described = {f"average cosine: {n}": _mean_of(cosine, b) - _mean_of(cosine, a) for n, (a, b) in cosines.items()}
    parts += Part.describe_all({"late": _mean_of(readings, evidence.late(steps)), **described})
    last = steps[-1]

    def sentence(parts: Parts, part: Part) -> str:
        growths = [f"{parts[name]} {name}" for name in grown if name in parts]
        text = f"the mean over blocks of σ₁/Σσ is {parts['late']} late in training, up to step {last}, and has grown "
        text += f"in relative terms by {' and by '.join(growths)}; what decides is the growth {part.name}, "
        cosines = [f"{p} {n.removeprefix('average cosine: ')}" for n, p in parts.items() if n.startswith("average cos")]
        beside = f" (the average cosine has grown by {' and by '.join(cosines)})" if cosines else ""
        return text + part.outcome + beside

    course = evidence.step_records({c: r for c, r in readings.items() if c.layer in layers and c.step in steps})
    return Finding(parts, sentence, {"step": last, "steps": course})


_START, _EARLY = "since step 0", "since early in training"


def _growth(readings: Readings) -> dict[str, tuple[Sequence[int | None], Sequence[int | None]]]:
    """The steps before and after each growth: step 0 and late, early and late."""
    steps = shared_steps([readings])[1]
    early, late = evidence.early(steps), evidence.late(steps)
    starts: dict[str, Sequence[int | None]] = {_START: [0]} if 0 in steps and len(steps) > 1 else {}
    starts |= {_EARLY: early} if early else {}
    return {name: (before, late) for name, before in starts.items()}


def _mean_of(readings: Readings, steps: Sequence[int | None]) -> Quantity:
    """The mean over steps of the mean over the blocks that all of them have."""
    layers = shared_steps([readings])[0]
    return mean([block_mean(readings, step, layers) for step in steps])


def _growth_part(name: str, readings: Readings, before: Sequence[int | None], after: Sequence[int | None]) -> Part:
    """The relative growth between two groups of steps; open where a walk grows as much too often."""
    layers, steps = shared_steps([readings])
    counted = [step for step in steps if step >= (before[0] or 0)]
    course = _logs([block_mean(readings, step, layers).value for step in counted])
    places = [[counted.index(step) for step in group] for group in (before, after)]  # type: ignore[arg-type]
    part = Part.of(name, -relative_fall(_mean_of(readings, before), _mean_of(readings, after)), margin=GROWTH_MARGIN)
    grown: Statistic = lambda walks: walks[:, places[1]].mean(-1) - walks[:, places[0]].mean(-1)  # noqa: E731
    return part.against(Walk.of([course], grown, "steps"))


@claim(of=stacks, source=SOURCE, metrics=("local_anisotropy", "svd_ratio"), margin=LOCAL_MARGIN, about="training")
def locally_isotropic(stack: BlockStack) -> Finding:
    """The rows are anisotropic as a whole and more isotropic inside their clusters.

    σ₁²/Σσ² of the centred cloud, and of random parts of the clusters' sizes, minus that inside k-means clusters.

    K is chosen by the silhouette. Mean over the blocks at the last measured step; the cloud as a whole must hold a
    tenth of its variance along one direction.
    """
    found = {name: stack.needed("local_anisotropy", **options) for name, options in _PARTITIONS.items()}
    step = evidence.last_step(found["clusters"])
    layers = evidence.common_layers(found.values(), step)
    if not layers:
        raise Missing("block with all three partitions at one step", "measure local_anisotropy with each partition")
    numbers = {name: block_mean(readings, step, layers) for name, readings in found.items()}
    parts = [Part.of(words, numbers[name] - numbers["clusters"], margin=LOCAL_MARGIN) for name, words in _LESS.items()]
    parts.append(Part.of("anisotropic as a whole", numbers["whole"], margin=CONSIDERABLE, guard=True))
    ratios = stack.blocks("svd_ratio")
    described = {"svd_ratio": block_mean(ratios, evidence.last_step(ratios))} if ratios else {}
    parts += Part.describe_all({**numbers, **described})
    over = f"over {evidence.counted(len(layers), 'block')}{evidence.at_step(step)}"

    def sentence(parts: Parts, part: Part) -> str:
        text = f"{over} the first direction holds {parts['clusters']} of the variance inside clusters, "
        text += f"{parts['random']} inside random parts of the same sizes and {parts['whole']} of the "
        text += f"whole cloud; what decides is {_CLUSTER_WORDS[part.name]}{part}, "
        return text + part.outcome

    records = {name: evidence.layer_records(evidence.at(rows, step)) for name, rows in found.items()}
    return Finding(parts, sentence, {"step": step, "layers": records})


_CLUSTER_WORDS = {
    "less than at random": "random parts minus clusters with ",
    "less than the whole": "the whole minus clusters with ",
    "anisotropic as a whole": "whether the whole is anisotropic at all, with ",
}


@claim(
    of=stacks,
    source="not in the paper: a check of its estimator against others",
    metrics=tuple(ESTIMATORS),
    margin=AGREEMENT_MARGIN,
    about="measurement",
)
def estimators_agree(stack: BlockStack) -> Finding:
    """TwoNN, Levina–Bickel and GRIDE agree on which blocks have the higher intrinsic dimension.

    Spearman's correlation over blocks of the profiles of each two estimators, at the last measured step.

    Its interval is as wide as contexts (jackknife over folds) or the number of blocks (Fisher's Z) make it. Blocks side
    by side are alike, so that unrelated profiles correlate: undecided where profiles whose changes go up or down by
    chance do as well too often (p > .02 of all choices of their signs).
    """
    found = {name: readings for name in ESTIMATORS if (readings := stack.blocks(name))}
    if len(found) < 2:
        raise evidence.NotHere("two estimators of intrinsic dimension", "measure two_nn, levina_bickel and gride")
    step = evidence.last_step([cell for readings in found.values() for cell in readings])
    layers = evidence.common_layers(found.values(), step)
    n = len(layers)
    if n < FEWEST_BLOCKS:
        raise Missing(f"profile of {FEWEST_BLOCKS} blocks by two estimators", f"{n} have numbers of all")
    at = {name: {c.layer: row.quantity for c, row in evidence.at(rows, step).items()} for name, rows in found.items()}
    numbers = {name: [profile[layer] for layer in layers] for name, profile in at.items()}
    parts, named = [], {}
    for one, two in itertools.combinations(numbers, 2):
        quantity = correlated(numbers[one], numbers[two], "spearman")
        ends = sites_interval(quantity, n, ranked=True)
        part = Part.of(f"{one} and {two}", quantity, margin=AGREEMENT_MARGIN, bounds=CORRELATION)
        first, second = (np.array([number.value for number in numbers[name]]) for name in (one, two))
        walk = Walk.of([second], functools.partial(rank_correlations, first), "blocks", shared=True)
        parts.append(replace(part, low=ends[0], high=ends[1]).against(walk))
        named[parts[-1].name] = f"{ESTIMATORS[one]} and {ESTIMATORS[two]}"

    def sentence(parts: Parts, part: Part) -> str:
        results = [f"{p} ({named[name]})" for name, p in parts.items() if p.measured]
        text = f"over {n} blocks{evidence.at_step(step)} the profiles of two estimators correlate in rank at "
        return text + f"{', '.join(results)}; the least sure is {named[part.name]}, {part.outcome}"

    depths = [layer / max(layers) for layer in layers]
    details = {"step": step, "profiles": {name: Curve.of(layers, depths, q).records() for name, q in numbers.items()}}
    return Finding(parts, sentence, details)
