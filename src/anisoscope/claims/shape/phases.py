"""Claims about training: intrinsic dimension rises and then falls, anisotropy grows.

Notation
    D(s)   intrinsic dimension at step s, the mean over blocks 1 … L
    s*     the step where D is largest on the first half of the contexts (group half:1)
    rise   D(s*)/D(first) − 1, fall 1 − D(last)/D(s*), both on the other half (group half:2): the largest of many noisy
           numbers is too large on the contexts that it was chosen on
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from anisoscope.claims.engine.blocks import SOURCE, BlockStack, block_mean, series_of, shared_steps, stacks
from anisoscope.claims.engine.claim import claim
from anisoscope.claims.engine.evidence import Missing, NotHere, Readings, step_records, steps_of
from anisoscope.claims.engine.part import Finding, Part, Parts, Status, judge, outcome, span
from anisoscope.results.quantity import Quantity

PHASE_MARGIN = 0.1
GROWTH_MARGIN = 0.05
ESTIMATORS = {"two_nn": "TwoNN", "levina_bickel": "Levina–Bickel", "gride": "GRIDE"}
ENOUGH = 2  # estimators that must agree
_CHOSEN, _TESTED = "half:1", "half:2"
_LATER = "after step 0"
_HALVES = "measure again with --halves: the peak is chosen on one half of the contexts and tested on the other"


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
    halves = {name: _halves(stack, name) for name in ESTIMATORS}
    measured = {name: both for name, both in halves.items() if both is not None}
    if not measured:
        raise _why_not(stack)
    parts = [part for name, both in measured.items() for part in _phase_parts(name, both)]
    details: dict[str, Any] = {"estimators": {name: _course(both) for name, both in measured.items()}}
    details["step"] = max(steps_of(one)[-1] for one, _ in measured.values())
    aspects = {ESTIMATORS[name]: (f"{name}: rise", f"{name}: fall") for name in measured}
    return Finding(
        tuple(parts), _phases_sentence, details, settle=_second_best, doubt=_hangs_on_step_0, aspects=aspects
    )


Halves = tuple[Readings, Readings]


def _halves(stack: BlockStack, metric: str) -> Halves | None:
    """An estimator on both halves, at the blocks and steps that both share; None without three such steps."""
    one, two = (stack.blocks(metric, group=group) for group in (_CHOSEN, _TESTED))
    if not one or not two:
        return None
    layers, steps = shared_steps([one, two])
    if len(steps) < 3:
        return None
    chosen = [{c: r for c, r in half.items() if c.step in steps and c.layer in layers} for half in (one, two)]
    return chosen[0], chosen[1]


def _why_not(stack: BlockStack) -> Missing:
    metric = next((name for name in ESTIMATORS if stack.blocks(name)), None)
    if metric is None:
        return stack.gap("two_nn", how="measure it with --metrics two_nn,levina_bickel,gride")
    if len(steps_of(stack.blocks(metric))) < 3:
        return NotHere("series of 3 steps or more", "sweep the checkpoints of a model or watch its training")
    if stack.blocks(metric, group=_CHOSEN):
        return Missing("three steps with a number at the same blocks", "measure more steps")
    return Missing(f"{metric} for groups {_CHOSEN} and {_TESTED}", _HALVES)


def _phase_parts(name: str, halves: Halves) -> list[Part]:
    """Rise and fall over all steps; where step 0 is among them also without it, and the peak's step."""
    steps = steps_of(halves[0])
    rise, fall, peak = _phases(halves, steps)
    parts = [
        Part.of(f"{name}: rise", rise, margin=PHASE_MARGIN),
        Part.of(f"{name}: fall", fall, margin=PHASE_MARGIN),
        Part.described(f"{name}: peak step", Quantity.constant(float(peak))),
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
    """Rise and fall on the second half, around the peak of the first."""
    one, two = halves
    peak = max(steps, key=lambda step: block_mean(one, step, layers).value)
    first, top, last = (block_mean(two, step, layers) for step in (steps[0], peak, steps[-1]))
    unit = Quantity.constant(1.0)
    # a peak at an end is no rise, or no fall, whatever the contexts
    rise = top.over(first) - unit if peak != steps[0] else Quantity(0.0, half=0.0)
    fall = unit - last.over(top) if peak != steps[-1] else Quantity(0.0, half=0.0)
    return rise, fall, peak


def _second_best(parts: dict[str, Part]) -> dict[str, Part]:
    """Only the estimator that is second best decides: two must hold.

    Where fewer were measured, the claim stays open whatever they say.
    """
    judged = {name: judge([parts[f"{name}: rise"], parts[f"{name}: fall"]]) for name in _names(parts)}
    ranks = {"holds": 0, "undecided": 1, "fails": 2}
    order = sorted(judged, key=lambda name: (ranks[judged[name][0]], -_gap(judged[name][1])))
    decides = judged[order[min(ENOUGH, len(order)) - 1]][1]
    if len(order) < ENOUGH:
        others = " and ".join(name for name in ESTIMATORS if name not in order)
        reason = f"it was measured with {len(order)} estimator and needs {ENOUGH} (measure {others} too)"
        decides = replace(decides, name=f"{decides.name} alone", reason=reason)
    told = {name: replace(part, needed=False) for name, part in parts.items()}
    return {**told, decides.name: replace(decides, needed=True)}


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
    worst = min((judge(mine)[1] for mine in later.values() if mine), key=_gap)
    name, what = worst.name.split(": ")
    return f"without step 0 the {what.removesuffix(f' {_LATER}')} by {ESTIMATORS[name]} is {span(worst)}"


def _course(halves: Halves) -> dict[str, Any]:
    """What the report draws: both halves over steps, and the phases of each block."""
    records = {"chosen": step_records(halves[0]), "tested": step_records(halves[1])}
    return {**records, "blocks": [_block(halves, layer) for layer in sorted({cell.layer for cell in halves[0]})]}


def _block(halves: Halves, layer: int) -> dict[str, Any]:
    rise, fall, peak = _phases(halves, steps_of(halves[0]), [layer])
    parts = [Part.of(name, q, margin=PHASE_MARGIN) for name, q in (("rise", rise), ("fall", fall))]
    return {"layer": layer, "peak_step": peak, "status": judge(parts)[0], **{p.name: p.record() for p in parts}}


def _phases_sentence(parts: Parts, status: Status, part: Part) -> str:
    told = []
    for name in _names(parts):
        peak = parts[f"{name}: peak step"].effect
        when = f"step {peak:.0f}" if peak == round(peak) else f"around step {peak:.0f}"
        rise, fall = parts[f"{name}: rise"], parts[f"{name}: fall"]
        told.append(f"rises by {span(rise)} to {when} and falls by {span(fall)} after it ({ESTIMATORS[name]})")
    name, what = part.name.split(": ")
    text = f"on contexts that did not choose the peak, the intrinsic dimension in relative terms {', '.join(told)}; of "
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
    series_of(readings)
    layers, steps = shared_steps([readings])
    starts = _starts(steps)
    if not starts:
        raise Missing("two steps with a number at the same blocks", f"{len(steps)} step has numbers at all of them")
    parts = [
        Part.of(
            name, block_mean(readings, steps[-1], layers) - block_mean(readings, start, layers), margin=GROWTH_MARGIN
        )
        for name, start in starts.items()
    ]
    parts.append(Part.described("at the end", block_mean(readings, steps[-1], layers)))
    cosines = stack.blocks("average_cosine")
    found, common = shared_steps([cosines]) if cosines else ([], [])
    for name, start in _starts(common).items():
        gap = block_mean(cosines, common[-1], found) - block_mean(cosines, start, found)
        parts.append(Part.described(f"average cosine: {name}", gap))
    course = step_records({c: r for c, r in readings.items() if c.layer in layers and c.step in steps})
    details = {"step": steps[-1], "steps": course}
    sentence = functools.partial(_growth_sentence, starts=starts, last=steps[-1])
    return Finding(tuple(parts), sentence, details)


def _starts(steps: Sequence[int]) -> dict[str, int]:
    """What the last step is compared with: step 0, and the first step after it."""
    found = {}
    if steps and steps[0] == 0 and len(steps) > 1:
        found["since step 0"] = 0
    later = [step for step in steps if step > 0]
    if len(later) > 1:
        found["since the first step"] = later[0]
    return found


def _growth_sentence(parts: Parts, status: Status, part: Part, *, starts: dict[str, int], last: int) -> str:
    told = [f"{span(parts[name])} since step {step}" for name, step in starts.items() if name in parts]
    text = f"the mean over blocks of σ₁/Σσ is {span(parts['at the end'])} at step {last} and has grown by "
    text += (
        f"{' and by '.join(told)}; what decides is the growth since step {starts[part.name]}, {outcome(status, part)}"
    )
    cosines = [p for name, p in parts.items() if name.startswith("average cosine: ")]
    return text + (f" (the average cosine has grown by {span(cosines[0])})" if cosines else "")
