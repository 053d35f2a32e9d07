"""Claims about training (intrinsic dimension rises and then falls, anisotropy grows), clusters and estimators.

Notation
    D(s)   intrinsic dimension at step s, the mean over blocks 1 … L
    s*     the step where D is largest on the first half of the contexts (group half:1)
    rise   D(s*)/D(first) − 1, fall 1 − D(last)/D(s*), both on the other half (group half:2): the maximum of noisy
           values is biased upwards on the contexts on which it was located
Local isotropy is judged by the share of variance along the first direction, inside clusters and outside of them. The
average cosine of centred rows is about 0 by construction, so it is not used.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from anisoscope.claims.engine import evidence
from anisoscope.claims.engine.claim import CORRELATION, Finding, Part, Parts, Status, claim, judge, outcome, span
from anisoscope.claims.engine.correlation import rank_correlation
from anisoscope.claims.engine.evidence import BlockStack, Missing, Readings, block_mean, shared_steps, stacks
from anisoscope.claims.shape.depth import FEWEST_BLOCKS, SOURCE, Curve
from anisoscope.results.quantity import Quantity, combine

PHASE_MARGIN = 0.1
GROWTH_MARGIN = 0.05
ESTIMATORS = {"two_nn": "TwoNN", "levina_bickel": "Levina–Bickel", "gride": "GRIDE"}
Halves = tuple[Readings, Readings]
ENOUGH = 2  # estimators that must show both phases
_CHOSEN, _TESTED = "half:1", "half:2"
_LATER = "after step 0"
_HALVES = "measure again with --halves: the peak is chosen on one half of the contexts and tested on the other"
AGREEMENT_MARGIN = 0.5
LOCAL_MARGIN = 0.05
CONSIDERABLE = 0.1  # share of variance along one direction; isotropic rows have about 1/d
_PARTITIONS = {"clusters": {}, "random": {"partition": "random"}, "whole": {"partition": "none"}}
_LESS = {"random": "less than at random", "whole": "less than the whole"}


@claim(
    "two_phases",
    of=stacks,
    statement="Intrinsic dimension first rises and then falls in training.",
    source=SOURCE,
    metrics=tuple(ESTIMATORS),
    margin=PHASE_MARGIN,
)
def two_phases(stack: BlockStack) -> Finding:
    """Rise to the peak and fall from it, relative, of the mean over blocks; chosen on half:1, tested on half:2.

    It must hold with two of the estimators TwoNN, Levina–Bickel and GRIDE at least, and also with step 0 left out:
    otherwise the rise is that from the initialisation alone, and the claim stays open.
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
    more: dict[str, Any] = {"settle": _second_best, "doubt": _hangs_on_step_0}
    more["aspects"] = {ESTIMATORS[name]: (f"{name}: rise", f"{name}: fall") for name in measured}
    return Finding(parts, _phases_sentence, details, **more)


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
    rise, fall, peak = _phases(halves, steps)
    parts = [
        Part.of(f"{name}: rise", rise, margin=PHASE_MARGIN),
        Part.of(f"{name}: fall", fall, margin=PHASE_MARGIN),
        Part.described(f"{name}: peak step", float(peak)),
    ]
    later = [step for step in steps if step > 0]
    if later != steps and len(later) > 1:
        rise, fall, _ = _phases(halves, later)
        parts += [
            Part.of(f"{name}: rise {_LATER}", rise, margin=PHASE_MARGIN, needed=False),
            Part.of(f"{name}: fall {_LATER}", fall, margin=PHASE_MARGIN, needed=False),
        ]
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
    judged = {name: judge([parts[f"{name}: rise"], parts[f"{name}: fall"]]) for name in _names(parts)}
    ranks = {"holds": 0, "undecided": 1, "fails": 2}
    order = sorted(judged, key=lambda name: (ranks[judged[name][0]], -_gap(judged[name][1])))
    decides = judged[order[min(ENOUGH, len(order)) - 1]][1]
    if len(order) < ENOUGH:
        others = " and ".join(name for name in ESTIMATORS if name not in order)
        reason = f"it was measured with {len(order)} estimator and needs {ENOUGH} (measure {others} too)"
        decides = replace(decides, name=f"{decides.name} alone", reason=reason)
    described = {name: replace(part, needed=False) for name, part in parts.items()}
    return {**described, decides.name: replace(decides, needed=True)}


def _names(parts: Parts) -> list[str]:
    return [name for name in ESTIMATORS if f"{name}: rise" in parts]


def _gap(part: Part) -> float:
    gap = (part.low if math.isfinite(part.low) else part.effect) - part.margin
    return gap if math.isfinite(gap) else -math.inf


def _hangs_on_step_0(parts: Parts) -> str:
    """Whether fewer than two estimators show both phases when step 0 is left out."""
    names = _names(parts)
    later = {n: [parts[f"{n}: {w} {_LATER}"] for w in ("rise", "fall") if f"{n}: {w} {_LATER}" in parts] for n in names}
    holding = [name for name in names if not later[name] or judge(later[name])[0] == "holds"]
    if len(holding) >= ENOUGH:
        return ""
    worst = min((judge(phases)[1] for phases in later.values() if phases), key=_gap)
    name, what = worst.name.split(": ")
    return f"without step 0 the {what.removesuffix(f' {_LATER}')} by {ESTIMATORS[name]} is {span(worst)}"


def _course(halves: Halves) -> dict[str, Any]:
    """Records for the report: both halves over steps, and the phases of each block."""
    blocks = []
    for layer in sorted({cell.layer for cell in halves[0]}):
        rise, fall, peak = _phases(halves, evidence.steps_of(halves[0]), [layer])
        parts = [Part.of(name, q, margin=PHASE_MARGIN) for name, q in (("rise", rise), ("fall", fall))]
        phases = {part.name: part.record() for part in parts}
        blocks.append({"layer": layer, "peak_step": peak, "status": judge(parts)[0], **phases})
    return {"chosen": evidence.step_records(halves[0]), "tested": evidence.step_records(halves[1]), "blocks": blocks}


def _phases_sentence(parts: Parts, status: Status, part: Part) -> str:
    runs = []
    for name in _names(parts):
        peak = parts[f"{name}: peak step"].effect
        when = f"step {peak:.0f}" if peak == round(peak) else f"around step {peak:.0f}"
        rise, fall = parts[f"{name}: rise"], parts[f"{name}: fall"]
        runs.append(f"rises by {span(rise)} to {when} and falls by {span(fall)} after it ({ESTIMATORS[name]})")
    name, what = part.name.split(": ")
    text = f"on contexts that did not choose the peak, the intrinsic dimension in relative terms {', '.join(runs)}; of "
    text += f"the two estimators that must agree {ESTIMATORS[name]} decides by its {what}, "
    return text + outcome(status, part)


@claim(
    "anisotropy_grows",
    of=stacks,
    statement="Anisotropy grows in training.",
    source=SOURCE,
    metrics=("svd_ratio", "average_cosine"),
    margin=GROWTH_MARGIN,
)
def anisotropy_grows(stack: BlockStack) -> Finding:
    """svd_ratio, mean over blocks, at the last step minus step 0 and minus the first measured step after it."""
    readings = stack.needed("svd_ratio")
    evidence.need_series(readings)
    layers, steps = shared_steps([readings])
    grown = _growth(readings)
    if not grown:
        raise Missing("two steps with a number at the same blocks", f"{len(steps)} step has numbers at all of them")
    last = steps[-1]
    parts = [Part.of(name, gap, margin=GROWTH_MARGIN) for name, (_, gap) in grown.items()]
    parts.append(Part.described("at the end", block_mean(readings, last, layers)))
    others = _growth(stack.blocks("average_cosine"))
    parts += Part.describe_all({f"average cosine: {name}": gap for name, (_, gap) in others.items()})

    def sentence(parts: Parts, status: Status, part: Part) -> str:
        growths = [f"{span(parts[name])} since step {start}" for name, (start, _) in grown.items() if name in parts]
        text = f"the mean over blocks of σ₁/Σσ is {span(parts['at the end'])} at step {last} and has grown by "
        text += f"{' and by '.join(growths)}; what decides is the growth since step {grown[part.name][0]}, "
        cosines = [p for name, p in parts.items() if name.startswith("average cosine: ")]
        beside = f" (the average cosine has grown by {span(cosines[0])})" if cosines else ""
        return text + outcome(status, part) + beside

    course = evidence.step_records({c: r for c, r in readings.items() if c.layer in layers and c.step in steps})
    return Finding(parts, sentence, {"step": last, "steps": course})


def _growth(readings: Readings) -> dict[str, tuple[int, Quantity]]:
    """The last step minus step 0 and minus the first step after it: (start step, difference) for each."""
    layers, steps = shared_steps([readings])
    later = [step for step in steps if step > 0]
    starts = {"since step 0": 0} if len(steps) > 1 and steps[0] == 0 else {}
    starts |= {"since the first step": later[0]} if len(later) > 1 else {}
    means = {step: block_mean(readings, step, layers) for step in (*starts.values(), *steps[-1:])}
    return {name: (start, means[steps[-1]] - means[start]) for name, start in starts.items()}


@claim(
    "locally_isotropic",
    of=stacks,
    statement="The rows are anisotropic as a whole and more isotropic inside their clusters.",
    source=SOURCE,
    metrics=("local_anisotropy", "svd_ratio"),
    margin=LOCAL_MARGIN,
)
def locally_isotropic(stack: BlockStack) -> Finding:
    """σ₁²/Σσ² of the centred cloud, and of random parts of the clusters' sizes, minus that inside k-means clusters.

    K is chosen by the silhouette. Mean over the blocks at the last measured step; the cloud as a whole must hold a
    tenth of its variance along one direction.
    """
    found = {name: stack.needed("local_anisotropy", **options) for name, options in _PARTITIONS.items()}
    step = evidence.last_step(found["clusters"])
    there = {name: {c: row for c, row in rows.items() if c.step == step} for name, rows in found.items()}
    layers = sorted(set.intersection(*({cell.layer for cell in rows} for rows in there.values())))
    if not layers:
        raise Missing("block with all three partitions at one step", "measure local_anisotropy with each partition")
    numbers = {name: block_mean(readings, step, layers) for name, readings in found.items()}
    parts = [Part.of(words, numbers[name] - numbers["clusters"], margin=LOCAL_MARGIN) for name, words in _LESS.items()]
    parts.append(Part.of("anisotropic as a whole", numbers["whole"], margin=CONSIDERABLE, p=math.nan, guard=True))
    ratios = stack.blocks("svd_ratio")
    described = {"svd_ratio": block_mean(ratios, evidence.last_step(ratios))} if ratios else {}
    parts += Part.describe_all({**numbers, **described})
    over = f"over {len(layers)} block{'s' if len(layers) > 1 else ''}{evidence.at_step(step)}"

    def sentence(parts: Parts, status: Status, part: Part) -> str:
        text = f"{over} the first direction holds {span(parts['clusters'])} of the variance inside clusters, "
        text += f"{span(parts['random'])} inside random parts of the same sizes and {span(parts['whole'])} of the "
        text += f"whole cloud; what decides is {_CLUSTER_WORDS[part.name]}{span(part)}, "
        return text + outcome(status, part)

    details = {"step": step, "layers": {name: evidence.layer_records(rows) for name, rows in there.items()}}
    return Finding(parts, sentence, details)


_CLUSTER_WORDS = {
    "less than at random": "random parts minus clusters with ",
    "less than the whole": "the whole minus clusters with ",
    "anisotropic as a whole": "whether the whole is anisotropic at all, with ",
}


@claim(
    "estimators_agree",
    of=stacks,
    statement="TwoNN, Levina–Bickel and GRIDE agree on which blocks have the higher intrinsic dimension.",
    source="not in the paper: a check of its estimator against others",
    metrics=tuple(ESTIMATORS),
    margin=AGREEMENT_MARGIN,
)
def estimators_agree(stack: BlockStack) -> Finding:
    """Spearman's correlation over blocks of the profiles of each two estimators, at the last measured step."""
    found = {name: stack.blocks(name) for name in ESTIMATORS}
    found = {name: readings for name, readings in found.items() if readings}
    if len(found) < 2:
        raise evidence.NotHere("two estimators of intrinsic dimension", "measure two_nn, levina_bickel and gride")
    step = evidence.last_step([cell for readings in found.values() for cell in readings])
    layers = sorted(set.intersection(*({c.layer for c in r if c.step == step} for r in found.values())))
    if len(layers) < FEWEST_BLOCKS:
        raise Missing(f"profile of {FEWEST_BLOCKS} blocks by two estimators", f"{len(layers)} have numbers of all")
    at = {n: {c.layer: row.quantity for c, row in rows.items() if c.step == step} for n, rows in found.items()}
    numbers = {name: [profile[layer] for layer in layers] for name, profile in at.items()}
    parts, named, n = [], {}, len(layers)
    for one, two in itertools.combinations(numbers, 2):
        quantity = combine([*numbers[one], *numbers[two]], lambda v: rank_correlation(v[:n], v[n:]))
        parts.append(Part.of(f"{one} and {two}", quantity, margin=AGREEMENT_MARGIN, p=math.nan, bounds=CORRELATION))
        named[parts[-1].name] = f"{ESTIMATORS[one]} and {ESTIMATORS[two]}"

    def sentence(parts: Parts, status: Status, part: Part) -> str:
        results = [f"{span(p)} ({named[name]})" for name, p in parts.items() if p.measured]
        text = f"over {n} blocks{evidence.at_step(step)} the profiles of two estimators correlate in rank at "
        return text + f"{', '.join(results)}; the least sure is {named[part.name]}, {outcome(status, part)}"

    depths = [layer / max(layers) for layer in layers]
    details = {"step": step, "profiles": {name: Curve.of(layers, depths, q).records() for name, q in numbers.items()}}
    return Finding(parts, sentence, details)
