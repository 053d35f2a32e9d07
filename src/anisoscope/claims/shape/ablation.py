"""Claims about the effects of the causal mask and of the objective, from three arms that differ in one factor each.

Notation
    arm 1  causal mask, next token (`causal-next-…`)
    arm 2  causal mask, masked tokens (`causal-masked-…`)
    arm 3  no mask, masked tokens (`bidirectional-masked-…`)
    mask effect       arm 3 − arm 2
    objective effect  arm 2 − arm 1
    a, b              svd_ratio of the arm before the change and of the one after it; the effect is b − a
    relative fall     (a − b) / a, what the claims are judged by: positive where the effect is negative
All are means over the blocks 1 … L, at the last step that has all blocks of both arms. With three seeds the interval is
the t interval over pairs of one seed. One seed has an interval over contexts, but two trainings differ by more than
contexts say: it decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from anisoscope.claims.engine import evidence
from anisoscope.claims.engine.claim import ONE_SEED, Finding, Part, Parts, Sentence, claim
from anisoscope.claims.engine.evidence import Arms, Missing, NotHere, Readings, Study, figure
from anisoscope.claims.shape.depth import SOURCE
from anisoscope.results.quantity import Quantity, relative_fall
from anisoscope.results.query import Row

EFFECT_MARGIN = 0.2  # relative to the value before: the scale of σ₁/Σσ depends on the width
NEXT_TO_NOTHING = 0.1  # relative to the value before
METRICS = ("svd_ratio", "svd_ratio_squared", "two_nn", "attention_sharpness", "attention_entropy")
MIDDLE = (0.2, 0.8)
_FALL, _START = "relative fall of svd_ratio", "svd_ratio at step 0"
_FALL_SQUARED = f"{_FALL}_squared"
_NAMES = {
    "svd_ratio_squared": "σ₁²/Σσ²",
    "two_nn": "the intrinsic dimension (TwoNN)",
    "attention_sharpness": "attention sharpness",
    "attention_entropy": "attention entropy",
}


@dataclass(frozen=True)
class Contrast:
    """Two arms; the effect is the second minus the first."""

    name: str
    before: str
    after: str
    words: str  # what changes from the first arm to the second

    def pairs(self, study: Study) -> Mapping[str, Arms | Missing]:
        """The arms by size, for sizes that have both."""
        both = (self.before, self.after)
        names = f"{self.before}-LxW and {self.after}-LxW of one size"
        gap = NotHere(f"models {names}", "`anisoscope study shape` trains them")
        return evidence.arms_by_size(study, _ARMS, needed=both) or {" and ".join(both): gap}


_ARMS = ("causal-next", "causal-masked", "bidirectional-masked")
MASK = Contrast("mask effect", *_ARMS[1:], "taking the causal mask away")
OBJECTIVE = Contrast("objective effect", *_ARMS[:2], "predicting masked tokens instead of the next one")


@claim(
    of=MASK.pairs,
    source=f"{SOURCE}, which names the causal mask as a cause of the decoders' profile",
    metrics=METRICS,
    margin=EFFECT_MARGIN,
    about="training",
)
def mask_effect(arms: Arms) -> Finding:
    """Taking the causal mask away lowers anisotropy by more than a fifth.

    The relative fall of svd_ratio from causal-masked to bidirectional-masked: (with − without)/with the mask.

    A positive number is a fall. It is of the mean over blocks at the last step that has all blocks of both arms, and
    with several seeds at the last such step that all of them have; the margin is a fifth of the value with the mask. It
    has the opposite sign of the mask effect itself (bidirectional-masked − causal-masked, in the units of each metric),
    which is told for anisotropy, intrinsic dimension and attention, and at step 0, where no arm has learned anything.
    """
    return _effect(MASK, arms)


@claim(
    of=OBJECTIVE.pairs,
    source=f"{SOURCE}, which names the autoregressive objective as a cause of the decoders' profile",
    metrics=METRICS,
    margin=EFFECT_MARGIN,
    about="training",
)
def objective_effect(arms: Arms) -> Finding:
    """Predicting masked tokens instead of the next one lowers the anisotropy of a causal model by more than a fifth.

    The relative fall of svd_ratio from causal-next to causal-masked: (next token − masked)/next token.

    A positive number is a fall. It is of the mean over blocks at the last step that has all blocks of both arms, and
    with several seeds at the last such step that all of them have; the margin is a fifth of the value after next-token
    training. It has the opposite sign of the objective effect itself (causal-masked − causal-next, in the units of each
    metric), which is told for anisotropy, intrinsic dimension and attention, and at step 0.
    """
    return _effect(OBJECTIVE, arms)


def _effect(contrast: Contrast, arms: Arms) -> Finding:
    both = contrast.before, contrast.after
    main = _Pair.at_the_end("svd_ratio", arms, both)
    rest = {metric: _Pair.at(main.step, metric, arms, both) for metric in METRICS[1:]}
    measured = {"svd_ratio": main, **{metric: pair for metric, pair in rest.items() if pair is not None}}
    described = {metric: pair.effect() for metric, pair in measured.items()}
    if "svd_ratio_squared" in measured:
        described[_FALL_SQUARED] = relative_fall(*measured["svd_ratio_squared"].means())
    start = [{cell.layer for cell in arm if cell.step == 0} for arm in (main.one, main.two)]
    if main.step and all(set(main.layers) <= layers for layers in start):
        described[_START] = replace(main, step=0).effect()
    depths = zip(main.layers, main.rows(main.one), strict=True)
    if middle := [layer for layer, reading in depths if MIDDLE[0] <= reading.depth <= MIDDLE[1]]:
        described["svd_ratio of the middle blocks"] = main.effect(middle)
    described |= dict(zip(both, main.means(), strict=True))
    before, after = (arms.runs[name].model for name in both)
    details: dict[str, Any] = {"before": before, "after": after, "step": main.step}
    details |= {"blocks": len(main.layers), "paired": main.paired}
    details["layers"] = {
        metric: [{"layer": layer, **pair.effect([layer]).record()} for layer in pair.layers]
        for metric, pair in measured.items()
    }
    where = f"mean over {evidence.counted(len(main.layers), 'block')}{evidence.at_step(main.step)}"
    fall = Part.of(_FALL, relative_fall(*main.means()), margin=EFFECT_MARGIN)
    sentence = _sentence(contrast, where)
    how: dict[str, Any] = {"scope": "for these two runs only", "one_seed": ONE_SEED}
    return Finding([fall, *Part.describe_all(described)], sentence, details, **how)


@dataclass(frozen=True)
class _Pair:
    """The values of a metric at all blocks of both arms, at one step."""

    one: Readings
    two: Readings
    step: int | None
    layers: tuple[int, ...]

    @classmethod
    def at_the_end(cls, metric: str, arms: Arms, names: tuple[str, str]) -> _Pair:
        """The pair at the last step that has all blocks common to both arms; raises `Missing` if there is none."""
        one, two, layers, whole = _both(metric, arms, names)
        if not layers:
            raise Missing(f"{metric} at blocks of both arms at the same step", "measure both with the same schedule")
        last = max((step for step in whole if step is not None), default=None)
        started = any(cell.step for cell in one if cell in two)
        if (last is None and None not in whole) or (last == 0 and started):  # step 0 is not a result of training
            raise Missing(f"step with {metric} at all {len(layers)} blocks of both arms", "measure every block")
        return cls(one, two, last, layers)

    @classmethod
    def at(cls, step: int | None, metric: str, arms: Arms, names: tuple[str, str]) -> _Pair | None:
        """The pair at this step; None unless all blocks of both arms have a value there."""
        one, two, layers, whole = _both(metric, replace(arms, until=step), names)
        return cls(one, two, step, layers) if step in whole else None

    @property
    def paired(self) -> bool:
        """Whether folds of the arms can be paired: the same contexts in equally many folds."""
        sizes = [[(row.contexts, len(row.folds)) for row in self.rows(arm)] for arm in (self.one, self.two)]
        return sizes[0] == sizes[1] and all(contexts is not None for contexts, _ in sizes[0])

    def rows(self, arm: Readings) -> list[Row]:
        by_layer = {cell.layer: reading for cell, reading in evidence.at(arm, self.step).items()}
        return [by_layer[layer] for layer in self.layers]

    def means(self, layers: Iterable[int] | None = None) -> list[Quantity]:
        found = [evidence.block_mean(arm, self.step, layers or self.layers) for arm in (self.one, self.two)]
        return found if self.paired else [quantity.unpaired() for quantity in found]

    def effect(self, layers: Iterable[int] | None = None) -> Quantity:
        one, two = self.means(layers)
        return two - one


def _both(
    metric: str, arms: Arms, names: tuple[str, str]
) -> tuple[Readings, Readings, tuple[int, ...], list[int | None]]:
    """The rows of a metric in both arms, their common blocks, and the steps at which both arms have all of these."""
    kind = "scores" if metric.startswith("attention") else "resid"
    one, two = (arms.stack(name, kind).blocks(metric) for name in names)
    common = {(cell.step, cell.layer) for cell in one if cell in two}
    layers = tuple(sorted({layer for _, layer in common}))
    whole = [s for s in {s for s, _ in common} if all((s, layer) in common for layer in layers)]
    return one, two, layers, whole


def _sentence(contrast: Contrast, where: str) -> Sentence:
    before, after = contrast.before, contrast.after

    def sentence(parts: Parts, part: Part) -> str:
        text = f"{contrast.words} takes σ₁/Σσ, {where}, from {parts[before]} ({before}) to {parts[after]} "
        text += f"({after}): relative to {before} it {_reading(part, parts.get(_FALL_SQUARED))}"
        text += f"; the {contrast.name} ({after} − {before}) is {parts['svd_ratio']} for σ₁/Σσ"
        text += f" (at step 0, before any training, {parts[_START]})" if _START in parts else ""
        effects = [f"{parts[metric]} for {words}" for metric, words in _NAMES.items() if metric in parts]
        return ", ".join([text, *effects])

    return sentence


def _reading(fall: Part, squared: Part | None) -> str:
    """The relative fall as a clause; a negative fall is worded as a rise.

    >>> _reading(Part("", -0.75, -0.8, -0.7, margin=0.2), None)
    'rises by 75 % [70, 80], against the claim and by more than the margin of 20 %'
    """
    rises = fall.effect < 0
    sign = -100.0 if rises else 100.0
    low, high = sorted((sign * fall.low, sign * fall.high))
    ends = f" [{figure(low)}, {figure(high)}]" if math.isfinite(low) and math.isfinite(high) else ""
    text = f"{'rises' if rises else 'falls'} by {figure(sign * fall.effect)} %{ends}, "
    margin = f"the margin of {figure(100 * fall.margin)} %"
    inside = f"with {margin} inside the interval"
    if not math.isfinite(fall.low):
        return f"{text}without an interval to hold against {margin}"
    if fall.low > 0:
        reach = f"beyond {margin}" if fall.low > fall.margin else inside
        return text + (f"by less than {margin}" if fall.high < fall.margin else reach)
    if fall.high < 0:
        sizes = {fall.low > -fall.margin: " and by less than ", fall.high < -fall.margin: " and by more than "}
        return f"{text}against the claim" + (sizes[True] + margin if True in sizes else "")
    if _within(fall, NEXT_TO_NOTHING) and squared is not None and _within(squared, fall.margin):
        return f"{text}next to no effect"
    small = " and is no more than a tenth either way" if _within(fall, NEXT_TO_NOTHING) else ""
    out = f"though a fall by {margin} is ruled out" if fall.high < fall.margin else inside
    return f"{text}which cannot be told from nothing with these runs{small}, {out}"


def _within(part: Part, reach: float) -> bool:
    return -reach <= part.low and part.high <= reach
