"""Claims about anisotropy over depth: a bell in decoders, a flat line in encoders.

Notation
    y      anisotropy (svd_ratio) of the blocks 1 … L, at the last measured step
    d      relative depth of a block, l/L; d* that of the block where y is largest
    bell   min(d*, 1 − d*) ≥ .2, y[d*] − y[1] and y[d*] − y[L] ≥ .05, and the largest distance of y from the best
           up–down curve ≤ 10 % of max y − min y
    flat   (max y − min y) / mean y < .2
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from anisoscope.claims.engine.blocks import SOURCE, BlockStack, at_step, curve, curve_records, stacks
from anisoscope.claims.engine.claim import claim, judged
from anisoscope.claims.engine.curve import Curve, quantiles, roughness, spread
from anisoscope.claims.engine.evidence import Missing, NotHere, Readings, Study, last_step
from anisoscope.claims.engine.part import TOO_FEW, Finding, Part, Parts, Status, figure, judge, outcome, span
from anisoscope.results.quantity import Quantity

END_MARGIN = 0.05
AWAY = 0.2 - 1e-9  # a peak at exactly a fifth counts
SMOOTH = 0.9
FLAT = 0.8
METRICS = ("svd_ratio", "svd_ratio_squared")
_FIRST, _LAST, _PEAK, _SHAPE = ("above the first block", "above the last block", "peak from the ends", "up and down")
_BELL = (_FIRST, _LAST, _PEAK, _SHAPE)
_FORMULAS: dict[str, tuple[str, dict[str, str], str]] = {  # the first that was measured decides, the others are told
    "svd_ratio": ("svd_ratio", {}, "σ₁/Σσ"),
    "squared": ("svd_ratio_squared", {}, "σ₁²/Σσ²"),
    "without the first position": ("svd_ratio", {"first": "out"}, "σ₁/Σσ without the first position"),
}
Profiles = dict[str, tuple[Curve, int | None]]


def _profiles(stack: BlockStack) -> Profiles:
    """The profile by each formula that was measured, and its step."""
    found: Profiles = {}
    if not _first(stack):
        raise stack.gap("svd_ratio")
    for name, (metric, options, _) in _FORMULAS.items():
        readings = stack.blocks(metric, **options)
        step = last_step(readings)
        try:
            found |= {name: (curve(readings, step), step)} if readings else {}
        except Missing:
            if not found:  # what decides must be whole, what is told beside it may have gaps
                raise
    return found


def _by_formula(profiles: Profiles, parts_of: Callable[[Curve], list[Part]]) -> list[Part]:
    """The parts of the formula that decides, and those of the others, named after it, which only describe."""
    decides = next(iter(profiles))
    parts = parts_of(profiles[decides][0])
    for name, (profile, _) in profiles.items():
        if name != decides:
            parts += [replace(p, name=f"{name}: {p.name}", needed=False) for p in parts_of(profile)]
    return parts


def _details(profiles: Profiles) -> dict[str, Any]:
    decides = next(iter(profiles))
    profile, step = profiles[decides]
    found: dict[str, Any] = {"formula": _FORMULAS[decides][0], "step": step, "profile": curve_records(profile)}
    return found | {"profiles": {name: curve_records(one) for name, (one, _) in profiles.items()}}


@claim(
    "bell_shaped",
    of=stacks,
    statement="Anisotropy over depth is bell-shaped: highest in the middle blocks and lower at both ends.",
    source=SOURCE,
    metrics=METRICS,
    margin=END_MARGIN,
)
def bell_shaped(stack: BlockStack) -> Finding:
    """The peak of svd_ratio over blocks 1 … L minus the first and the last block, at the last measured step.

    The peak must lie at a relative depth of .2 to .8 (its interval: 4000 draws of the profile from a multivariate t
    with the jackknife covariance between blocks, which share their contexts), both ends .05 below it (it is chosen
    without the context fold on which its height is measured), and the profile must not leave the best up–down curve by
    more than a tenth of its range. `svd_ratio_squared`, and svd_ratio without the first position, are told beside it.
    """
    profiles = _profiles(stack)
    aspects = {name: tuple(f"{name}: {part}" for part in _BELL) for name in list(profiles)[1:]}
    sentence = functools.partial(_bell_sentence, **_words(profiles))
    return Finding(tuple(_by_formula(profiles, bell_parts)), sentence, _details(profiles), aspects=aspects)


def bell_parts(profile: Curve) -> list[Part]:
    """What a bell is made of, for one profile."""
    reason = TOO_FEW if profile.thin else ""
    smooth = profile.quantity(lambda y: 1 - roughness(y))
    return [
        Part.of(_FIRST, profile.above(0), margin=END_MARGIN),
        Part.of(_LAST, profile.above(len(profile) - 1), margin=END_MARGIN),
        _peak_part(profile, reason),
        Part.of(_SHAPE, smooth, margin=SMOOTH, p=math.nan, guard=True),
        _depth_part(profile),
        Part.described("peak", Quantity(float(profile.values.max()), half=0.0)),
    ]


def _peak_part(profile: Curve, reason: str) -> Part:
    """How far the peak lies from the nearer end, in relative depth."""
    near = np.minimum(profile.depths, 1 - profile.depths)
    low, high = quantiles(near[profile.draws().argmax(1)])
    return Part(_PEAK, float(near[profile.peak]), low, high, margin=AWAY, guard=True, reason=reason)


def _depth_part(profile: Curve) -> Part:
    low, high = quantiles(profile.depths[profile.draws().argmax(1)])
    return Part("peak depth", float(profile.depths[profile.peak]), low, high, needed=False)


def _words(profiles: Profiles) -> dict[str, Any]:
    name, (profile, step) = next(iter(profiles.items()))
    return {"formula": _FORMULAS[name][2], "blocks": len(profile), "when": at_step(step)}


def _bell_sentence(parts: Parts, status: Status, part: Part, *, formula: str, blocks: int, when: str) -> str:
    text = f"over {blocks} blocks{when} {formula} peaks at relative depth {span(parts['peak depth'])} with "
    text += f"{figure(parts['peak'].effect)}, {span(parts[_FIRST])} above the first block and {span(parts[_LAST])} "
    text += f"above the last, and leaves the best up–down curve by {figure(100 * (1 - parts[_SHAPE].effect))} % of its "
    text += f"range; what decides is {_DECIDING[part.name]} with {span(part)}, {outcome(status, part)}"
    return text + _others(parts, _BELL)


_DECIDING = {
    _FIRST: "the height above the first block",
    _LAST: "the height above the last block",
    _PEAK: "the distance of the peak from the nearer end",
    _SHAPE: "one minus the largest distance from an up–down curve",
}


def _others(parts: Parts, names: tuple[str, ...]) -> str:
    """What the formulas say that do not decide."""
    told = []
    for name, (_, _, words) in _FORMULAS.items():
        mine = [parts[f"{name}: {n}"] for n in names if f"{name}: {n}" in parts]
        if mine:
            status = judge(mine)[0]
            told.append(f"{'is ' if status == 'undecided' else ''}{status} by {words}")
    return f" (it {' and '.join(told)})" if told else ""


@claim(
    "flat_profile",
    of=stacks,
    statement="Anisotropy is uniform over depth.",
    source=SOURCE,
    metrics=METRICS,
    margin=FLAT,
)
def flat_profile(stack: BlockStack) -> Finding:
    """1 − (max − min)/mean of svd_ratio over blocks 1 … L: uniform where the spread stays below a fifth of the mean."""
    profiles = _profiles(stack)
    sentence = functools.partial(_flat_sentence, **_words(profiles))
    aspects = {name: (f"{name}: evenness",) for name in list(profiles)[1:]}
    return Finding(tuple(_by_formula(profiles, flat_parts)), sentence, _details(profiles), aspects=aspects)


def flat_parts(profile: Curve) -> list[Part]:
    """What a flat profile is made of."""
    return [
        Part.of("evenness", profile.quantity(lambda y: 1 - spread(y)), margin=FLAT, p=math.nan),
        Part.described("mean", Quantity.constant(float(profile.values.mean()))),
    ]


def _flat_sentence(parts: Parts, status: Status, part: Part, *, formula: str, blocks: int, when: str) -> str:
    turned = replace(part, effect=1 - part.effect, low=1 - part.high, high=1 - part.low)
    text = f"over {blocks} blocks{when} {formula} is {figure(parts['mean'].effect)} on average and its range is "
    text += f"{span(turned)} of that, where a uniform profile stays below {figure(1 - FLAT)}"
    return text + _others(parts, ("evenness",))


@claim(
    "decoders_bell_encoders_flat",
    statement="Every decoder has a bell-shaped profile of anisotropy and every encoder a uniform one.",
    source=SOURCE,
    metrics=METRICS,
    margin=END_MARGIN,
)
def decoders_bell_encoders_flat(study: Study) -> dict[str, Finding]:
    """`bell_shaped` of every decoder and `flat_profile` of every encoder; one that is not refutes it.

    Which is which is told by run.json, or by the names of the arms of the causal ablation, of which causal + masked LM
    is neither.
    """
    return {"decoders and encoders": judged(_both, study, margin=END_MARGIN)}


def _both(study: Study) -> Finding:
    found = stacks(study)
    kinds = {role: [n for n, s in found.items() if s.role == role and _first(s)] for role in ("decoder", "encoder")}
    unknown = [name for name, stack in found.items() if not stack.role and _first(stack)]
    for role, names in kinds.items():
        if not names:
            raise NotHere(f"{role} with svd_ratio at blocks", _how(role, unknown))
    parts: list[Part] = []
    for role, names in kinds.items():
        for name in names:
            parts += _of_stack(f"{role} {name}", found[name], bell_parts if role == "decoder" else flat_parts)
    sentence = functools.partial(_kinds_sentence, unknown=unknown)
    ends = {name: last_step(_first(found[name])) for names in kinds.values() for name in names}
    details = {"models": kinds, "unknown": unknown, "ends": ends}
    return Finding(tuple(parts), sentence, details, scope="for these models")


def _first(stack: BlockStack) -> Readings:
    """The first formula that was measured."""
    return next((found for found in map(stack.blocks, METRICS) if found), {})


def _how(role: str, unknown: list[str]) -> str:
    if unknown:
        return f"it is not known what {' and '.join(unknown)} are: give the run folders, whose run.json says it"
    return f"measure {'an' if role == 'encoder' else 'a'} {role} too and give both runs to `anisoscope claims`"


def _of_stack(name: str, stack: BlockStack, parts_of: Callable[[Curve], list[Part]]) -> list[Part]:
    try:
        profile = next(iter(_profiles(stack).values()))[0]
    except Missing as gap:  # too few blocks: this one stays open, the others are judged
        return [Part.absent(f"{name}: profile", f"of {name} {gap}", margin=END_MARGIN)]
    return [replace(part, name=f"{name}: {part.name}") for part in parts_of(profile) if math.isfinite(part.margin)]


def _kinds_sentence(parts: Parts, status: Status, part: Part, *, unknown: list[str]) -> str:
    told = []
    for role, words in (("decoder", "a bell"), ("encoder", "flat")):
        statuses: dict[str, list[Part]] = {}
        for name, p in parts.items():
            if name.startswith(f"{role} "):
                statuses.setdefault(name.rsplit(": ", 1)[0], []).append(p)
        judged = {name.removeprefix(f"{role} "): judge(mine)[0] for name, mine in statuses.items()}
        rest = [f"{name} {'is open' if s == 'undecided' else 'is not'}" for name, s in judged.items() if s != "holds"]
        holding = sum(s == "holds" for s in judged.values())
        text = f"{words} in {holding} of {len(judged)} {role}{'s' if len(judged) > 1 else ''}"
        told.append(text + (f" ({', '.join(rest)})" if rest else ""))
    text = (
        f"the profile is {' and '.join(told)}; what decides is {part.name} with {span(part)}, {outcome(status, part)}"
    )
    return text + (f"; it is not known what {' and '.join(unknown)} are" if unknown else "")
