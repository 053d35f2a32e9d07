"""What anisotropy and sharp attention owe to queries and keys that drift: arms that differ in their attention alone.

Notation
    A(s)     average cosine at step s, the mean over blocks 1 … L
    rise     A(s) − A(0); s is the step at which the arm with ordinary attention (softmax) is most anisotropic: it is
             chosen on another run than it is judged on
    drift    ‖mean q‖ / mean ‖q‖ of queries as they meet keys, means over heads and blocks above and below; k alike.
             Below 0.1 it counts as none (an average cosine of about 0.01)
    fall     (a − b)/a, a and b the sharpness of attention with softmax and with the means removed, at the last step
Arms of one seed are compared with each other, and seeds are the replicates: verdicts rest on the t interval over three
or more of them, and a single seed decides nothing, however narrow its interval over contexts is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from anisoscope.claims.engine.blocks import Arms, BlockStack, arms_of, block_mean, shared_steps
from anisoscope.claims.engine.claim import claim, judged, missing
from anisoscope.claims.engine.evidence import Missing, NotHere, Readings, Study
from anisoscope.claims.engine.part import (
    CORRELATION,
    ONE_REPLICATE,
    SHARE,
    Bounds,
    Finding,
    Part,
    Parts,
    Status,
    figure,
    outcome,
    span,
)
from anisoscope.results.quantity import Quantity, combine

SOURCE = "an open question of Godey et al. 2024, Anisotropy Is Inherent to Self-Attention, arXiv:2401.12143"
ORDINARY, CENTRED, FLAT = "softmax", "mean-removed", "uniform"
RISE_MARGIN = 0.05
FALL_MARGIN = 0.2  # of the sharpness with ordinary attention
NO_DRIFT = 0.1
UNIT: Bounds = (0.0, 1.0)
_OTHERS = ("qk-norm", "fixed-sharp")
_NAMES = (ORDINARY, CENTRED, FLAT, *_OTHERS)
_ENTROPY, _SPREAD = "entropy", "spread of scores"
_SIDES = {"query": "drift of queries", "key": "drift of keys"}
_LASTS = {
    "holds": "still beyond the start by more than the margin",
    "fails": "no longer beyond the start by the margin",
    "undecided": "which may or may not be beyond the start by the margin",
}


@claim(
    "anisotropy_without_drift",
    statement="Anisotropy emerges without drift of queries and keys: their means removed, or without scores at all, "
    "the average cosine of the blocks still rises by more than 0.05 where that of ordinary attention is highest.",
    source=SOURCE,
    metrics=("average_cosine", "drift", "mean_norm"),
    margin=RISE_MARGIN,
)
def anisotropy_without_drift(study: Study) -> dict[str, Finding]:
    """A(s) − A(0) of the arms mean-removed and uniform, at the step where the arm softmax is most anisotropic.

    The step is chosen on the arm softmax of the same seed, so that its choice does not favour the arm that is judged;
    the rise at the last step is told as an aspect of its own, and a rise that is gone by then is called transient.
    Undecided where drift was not removed after all (‖mean q‖ / mean ‖q‖ or that of keys not below 0.1), where the arm
    softmax has no drift at that step (not beyond 0.1), and where it does not rise either: then there is nothing that
    drift could have been needed for. The margins are ours.
    """
    found = {
        arms.runs[name].model: judged(functools.partial(_rising, name=name), arms, margin=RISE_MARGIN)
        for arms in arms_of(study, _NAMES).values()
        for name in (CENTRED, FLAT)
        if {name, ORDINARY} <= set(arms.runs)
    }
    return found or _nothing(RISE_MARGIN)


@claim(
    "sharpness_needs_drift",
    statement="Sharp attention needs drift of queries and keys: with their means removed attention is less sharp by "
    "more than a fifth.",
    source=SOURCE,
    metrics=("attention_sharpness", "attention_entropy", "score_spread", "drift", "mean_norm"),
    margin=FALL_MARGIN,
)
def sharpness_needs_drift(study: Study) -> dict[str, Finding]:
    """The relative fall of attention sharpness from the arm softmax to the arm mean-removed, at the last step.

    Sharpness is (max p − 1/m)/(1 − 1/m), mean over rows, heads and blocks. Undecided where the means were not removed
    after all (relative drift not below 0.1), and where the arm softmax has no drift (not beyond 0.1) that could be
    needed. Entropy, the spread of scores, and the arms qk-norm and fixed-sharp are told beside it. Margins are ours.
    """
    found = {
        size: judged(_sharp, arms, margin=FALL_MARGIN)
        for size, arms in arms_of(study, _NAMES).items()
        if {ORDINARY, CENTRED} <= set(arms.runs)
    }
    return found or _nothing(FALL_MARGIN)


def _nothing(margin: float) -> dict[str, Finding]:
    gap = NotHere(f"models {ORDINARY}-LxW and {CENTRED}-LxW of one size", "`anisoscope study sharpness` trains them")
    return {f"{ORDINARY} and {CENTRED}": missing(gap, margin=margin)}


# -- anisotropy --------------------------------------------------------------------------------------------------------


def _rising(arms: Arms, *, name: str) -> Finding:
    ordinary, own = (arms.stack(arm).needed("average_cosine") for arm in (ORDINARY, name))
    layers, steps = shared_steps([ordinary, own])
    if not steps or steps[0] != 0 or len(steps) < 2:
        raise Missing("average_cosine of both arms at step 0 and later", "watch the training from its first step on")
    height = max(steps[1:], key=lambda step: block_mean(ordinary, step, layers).value)
    moments = {"before": 0, "then": height, "at the end": steps[-1]}
    at = {when: block_mean(own, step, layers) for when, step in moments.items()}
    usual = {when: block_mean(ordinary, step, layers) for when, step in moments.items()}
    more: dict[str, Any] = {"margin": RISE_MARGIN, "needed": False, "bounds": CORRELATION}
    parts = [
        Part.of("rise", at["then"] - at["before"], margin=RISE_MARGIN, reason=ONE_REPLICATE, bounds=CORRELATION),
        Part.of("rise at the end", at["at the end"] - at["before"], **more),
        Part.of("rise of softmax", usual["then"] - usual["before"], **more),
        *(_told(when, quantity, bounds=CORRELATION) for when, quantity in at.items()),
        *(_told(f"softmax {when}", quantity, bounds=CORRELATION) for when, quantity in usual.items()),
        *_drift_parts(arms, name, height),
        *_drift_parts(arms, ORDINARY, height, prefix="softmax: "),
        Part.described("height", Quantity.constant(height)),
    ]
    details = {"step": steps[-1], "height": height, "blocks": len(layers)}
    sentence = functools.partial(_rise_sentence, last=steps[-1], name=name)
    return Finding(
        tuple(parts),
        sentence,
        details,
        settle=_settle_rise,
        aspects={"at the end": ("rise at the end",)},
        scope="for these runs only",
        replicate=True,
    )


def _told(name: str, quantity: Quantity, *, bounds: Bounds = UNIT) -> Part:
    return replace(Part.described(name, quantity), bounds=bounds)


def _drift_parts(arms: Arms, name: str, step: int | None, prefix: str = "") -> list[Part]:
    return [_told(f"{prefix}{words}", drift_of(arms.stack(name, kind), step)) for kind, words in _SIDES.items()]


def drift_of(stack: BlockStack, step: int | None) -> Quantity:
    """‖mean‖ / mean ‖·‖ of queries or keys, means over blocks of both; 0 where all of them are zero."""
    above, below = (block_mean(stack.needed(metric), step) for metric in ("drift", "mean_norm"))
    return above.over(below) if below.value else Quantity.constant(0.0)


def _settle_rise(parts: dict[str, Part]) -> dict[str, Part]:
    """Reasons that leave it open: drift that is still there, that never was, or nothing to be explained."""
    if "rise" not in parts:
        return parts
    reason = _still_drifting(parts) or _never_drifting(parts)
    usual = parts.get("rise of softmax")
    if not reason and usual is not None and usual.status != "holds" and parts["rise"].status != "holds":
        reason = f"with ordinary attention it does not rise beyond the margin either (by {span(usual)})"
    names = ("rise", "rise at the end")
    return parts | {n: replace(parts[n], reason=parts[n].reason or reason) for n in names if reason and n in parts}


def _still_drifting(parts: Parts) -> str:
    left = [parts[words] for words in _SIDES.values() if words in parts]
    over = [part for part in left if not (part.high if math.isfinite(part.high) else part.effect) < NO_DRIFT]
    worst = max(over, key=lambda part: part.effect, default=None)
    return "" if worst is None else f"the relative {worst.name} is still {span(worst)}, not below {figure(NO_DRIFT)}"


def _never_drifting(parts: Parts) -> str:
    """Whether ordinary attention has drift that the other arm can do without."""
    usual = [parts[name] for words in _SIDES.values() if (name := f"softmax: {words}") in parts]
    if not usual or any((part.low if math.isfinite(part.low) else part.effect) > NO_DRIFT for part in usual):
        return ""
    there = " and ".join(span(part) for part in usual)
    return f"ordinary attention has no relative drift beyond {figure(NO_DRIFT)} there either ({there})"


def _rise_sentence(parts: Parts, status: Status, part: Part, *, last: int, name: str) -> str:
    text = f"{_without(name, parts)} the average cosine of the blocks goes from {span(parts['before'])} at step 0 to "
    text += f"{span(parts['then'])} at step {figure(parts['height'].effect)}, where ordinary attention is most "
    drifts = " and ".join(span(parts[f"softmax: {words}"]) for words in _SIDES.values())
    text += f"anisotropic ({span(parts['softmax then'])}, at a drift of {drifts}): a "
    text += f"{'transient ' if transient(parts) else ''}rise of {span(parts['rise'])}, {outcome(status, parts['rise'])}"
    if parts["height"].effect != last:
        text += f"; at the last step, {last}, it is {span(parts['at the end'])} (softmax "
        text += f"{span(parts['softmax at the end'])}), {_LASTS[parts['rise at the end'].status]}"
    return text


def transient(parts: Parts) -> bool:
    """Whether there is a rise, and none of it beyond the margin is left at the last step."""
    return parts["rise"].low > RISE_MARGIN > parts["rise at the end"].high


def _without(name: str, parts: Parts) -> str:
    if name == FLAT:
        return "without any scores (uniform attention)"
    drifts = " and ".join(span(parts[words]) for words in _SIDES.values())
    return f"with a relative drift of queries and keys of {drifts} ({name})"


# -- sharpness ---------------------------------------------------------------------------------------------------------


def _sharp(arms: Arms) -> Finding:
    found = {name: arms.stack(name, "scores").blocks("attention_sharpness") for name in arms.runs}
    if not found[ORDINARY] or not found[CENTRED]:
        raise Missing("attention_sharpness at blocks of both arms", "measure it with --metrics attention")
    layers, steps = shared_steps([found[ORDINARY], found[CENTRED]])
    if not steps or steps[-1] == 0:
        raise Missing("step after the first with attention_sharpness of both arms", "measure both at the same steps")
    last = steps[-1]
    a, b = (block_mean(found[name], last, layers) for name in (ORDINARY, CENTRED))
    fall = combine([a, b], lambda v: (v[0] - v[1]) / v[0] if v[0] else math.nan)
    parts = [
        Part.of("fall", fall, margin=FALL_MARGIN, reason=ONE_REPLICATE, bounds=SHARE),
        *(_told(name, quantity) for name, quantity in ((ORDINARY, a), (CENTRED, b))),
        *_beside(arms, last, layers),
        *_drift_parts(arms, CENTRED, last),
        *_drift_parts(arms, ORDINARY, last, prefix="softmax: "),
        *_other_parts(arms, found, last),
    ]
    sentence = functools.partial(_fall_sentence, last=last)
    details: dict[str, Any] = {"step": last, "blocks": len(layers)}
    return Finding(tuple(parts), sentence, details, settle=_settle_fall, scope="for these runs only", replicate=True)


def _beside(arms: Arms, step: int, layers: list[int]) -> list[Part]:
    """Entropy and spread of the scores in both arms, where they were measured."""
    parts = []
    for metric, words, most in (("attention_entropy", _ENTROPY, UNIT), ("score_spread", _SPREAD, (0.0, None))):
        for name in (ORDINARY, CENTRED):
            readings = arms.stack(name, "scores").blocks(metric)
            if readings:
                parts.append(_told(f"{name}: {words}", block_mean(readings, step, layers), bounds=most))
    return parts


def _other_parts(arms: Arms, found: Mapping[str, Readings], step: int) -> list[Part]:
    """Sharpness and drift of the arms whose queries and keys are normed, where they have this step."""
    parts = []
    for name in _OTHERS:
        if name in arms.runs and any(cell.step == step for cell in found[name]):
            parts.append(_told(name, block_mean(found[name], step)))
            parts += _drift_parts(arms, name, step, prefix=f"{name}: ")
    return parts


def _settle_fall(parts: dict[str, Part]) -> dict[str, Part]:
    if "fall" not in parts:
        return parts
    reason = _still_drifting(parts) or _never_drifting(parts)
    return parts | ({"fall": replace(parts["fall"], reason=parts["fall"].reason or reason)} if reason else {})


def _fall_sentence(parts: Parts, status: Status, part: Part, *, last: int) -> str:
    text = f"at step {last} attention has a sharpness of {span(parts[CENTRED])} with the means of queries and keys "
    text += f"removed and of {span(parts[ORDINARY])} with ordinary attention, whose relative drift is "
    text += " and ".join(span(parts[f"softmax: {words}"]) for words in _SIDES.values())
    text += f": a relative fall of {span(parts['fall'])}, {outcome(status, parts['fall'])}"
    for words in (_ENTROPY, _SPREAD):
        both = [parts.get(f"{name}: {words}") for name in (CENTRED, ORDINARY)]
        if both[0] is not None and both[1] is not None:
            text += f"; {words} {span(both[0])} against {span(both[1])}"
    for name in _OTHERS:
        if name in parts:
            drifts = " and ".join(span(parts[f"{name}: {words}"]) for words in _SIDES.values())
            text += f"; {name} has {span(parts[name])} at a drift of {drifts}"
    return text
