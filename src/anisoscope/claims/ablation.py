"""What the causal mask does to a model, and what the objective does: three arms that differ in one thing at a time.

Notation
    arm 1  causal mask, next token (`causal-next-…`)
    arm 2  causal mask, masked tokens (`causal-masked-…`)
    arm 3  no mask, masked tokens (`bidirectional-masked-…`)
    mask effect       arm 3 − arm 2
    objective effect  arm 2 − arm 1
Each is a difference of means over the blocks 1 … L at the last step that both arms were measured at. With three seeds
the pairs of a seed give the interval (a t interval over seeds); one seed has that of its contexts and speaks for its
runs only.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from anisoscope.claims.blocks import SOURCE, Stack, at_step, block_mean, last_step
from anisoscope.claims.claim import attempt, claim, missing
from anisoscope.claims.evidence import Missing, NotHere, Readings, Run, Study
from anisoscope.claims.part import Finding, Part, Parts, Status, outcome, span
from anisoscope.claims.quantity import Quantity
from anisoscope.claims.roles import arm_of

EFFECT_MARGIN = 0.05
METRICS = ("svd_ratio", "svd_ratio_squared", "two_nn", "attention_sharpness", "attention_entropy")
MIDDLE = (0.2, 0.8)
_DROP = "fall of anisotropy"
_KINDS = {"attention_sharpness": "scores", "attention_entropy": "scores"}
_NAMES = {
    "svd_ratio_squared": "σ₁²/Σσ²",
    "two_nn": "the intrinsic dimension (TwoNN)",
    "attention_sharpness": "attention sharpness",
    "attention_entropy": "attention entropy",
}


@dataclass(frozen=True)
class Contrast:
    """Two arms; the effect is the second minus the first."""

    before: str
    after: str
    words: str  # what changes from the first to the second

    def pairs(self, study: Study) -> dict[str, tuple[Run, Run]]:
        """The two arms of every size."""
        arms = {arm: run for model, run in study.items() if (arm := arm_of(model)) is not None}
        sizes = dict.fromkeys(arm.size for arm in arms)
        found = {size: [arms.get(arm._replace(size=size)) for arm in self._names(size)] for size in sizes}
        return {size: (one, two) for size, (one, two) in found.items() if one is not None and two is not None}

    def _names(self, size: str) -> list[Any]:
        return [arm_of(f"{name}-{size}") for name in (self.before, self.after)]


MASK = Contrast("causal-masked", "bidirectional-masked", "taking the causal mask away")
OBJECTIVE = Contrast("causal-next", "causal-masked", "predicting masked tokens instead of the next one")


@claim(
    "mask_effect",
    statement="Taking the causal mask away lowers anisotropy.",
    source=f"{SOURCE}, which names the causal mask as a cause of the decoders' profile",
    metrics=METRICS,
    margin=EFFECT_MARGIN,
)
def mask_effect(study: Study) -> dict[str, Finding]:
    """svd_ratio with the causal mask minus without it, both trained on masked tokens, mean over blocks.

    The mask effect itself (without − with) is told for anisotropy, intrinsic dimension and attention.
    """
    return _effects(study, MASK)


@claim(
    "objective_effect",
    statement="Predicting masked tokens instead of the next one lowers the anisotropy of a causal model.",
    source=f"{SOURCE}, which names the autoregressive objective as a cause of the decoders' profile",
    metrics=METRICS,
    margin=EFFECT_MARGIN,
)
def objective_effect(study: Study) -> dict[str, Finding]:
    """svd_ratio after next-token training minus after masked training, both under the causal mask, mean over blocks.

    The objective effect itself (masked − next token) is told for anisotropy, intrinsic dimension and attention.
    """
    return _effects(study, OBJECTIVE)


def _effects(study: Study, contrast: Contrast) -> dict[str, Finding]:
    pairs = contrast.pairs(study)
    if not pairs:
        names = f"{contrast.before}-LxW and {contrast.after}-LxW of one size"
        gap = NotHere(f"models {names}", "`anisoscope study shape` trains them")
        return {f"{contrast.before} and {contrast.after}": missing(gap, margin=EFFECT_MARGIN)}
    return {
        size: attempt(functools.partial(_effect, contrast), pair, margin=EFFECT_MARGIN) for size, pair in pairs.items()
    }


def _effect(contrast: Contrast, arms: tuple[Run, Run]) -> Finding:
    pairs = {metric: _Pair.of(metric, arms) for metric in METRICS}
    measured = {metric: pair for metric, pair in pairs.items() if pair is not None}
    if "svd_ratio" not in measured:
        raise Missing("svd_ratio at blocks of both arms at the same step", "measure both with the same schedule")
    main = measured["svd_ratio"]
    parts = [Part.of(_DROP, -main.effect(), margin=EFFECT_MARGIN)]
    parts += [Part.described(metric, pair.effect()) for metric, pair in measured.items()]
    if main.middle:
        parts.append(Part.described("svd_ratio of the middle blocks", main.effect(main.middle)))
    names = (contrast.before, contrast.after)
    parts += [Part.described(arm, mean) for arm, mean in zip(names, main.means(), strict=True)]
    details: dict[str, Any] = {
        "before": arms[0].model,
        "after": arms[1].model,
        "step": main.step,
        "paired": main.paired,
    }
    details["layers"] = {metric: pair.records() for metric, pair in measured.items()}
    sentence = functools.partial(_sentence, contrast=contrast, when=at_step(main.step))
    return Finding(tuple(parts), sentence, details, scope="for these two runs only")


@dataclass(frozen=True)
class _Pair:
    """A metric at the blocks of both arms, at the last step and the blocks that both have."""

    one: Readings
    two: Readings
    step: int | None
    layers: tuple[int, ...]
    paired: bool  # the same contexts, so that folds belong together

    @classmethod
    def of(cls, metric: str, arms: tuple[Run, Run]) -> _Pair | None:
        one, two = (Stack(run, kind=_KINDS.get(metric, "resid")).readings(metric) for run in arms)
        common = [cell for cell in one if cell in two]
        if not common:
            return None
        step = last_step(common)
        cells = [cell for cell in common if cell.step == step]
        paired = all((one[c].n, one[c].contexts) == (two[c].n, two[c].contexts) for c in cells)
        return cls(one, two, step, tuple(cell.layer for cell in cells), paired)

    @property
    def middle(self) -> list[int]:
        depths = {c.layer: r.depth for c, r in self.one.items() if c.step == self.step}
        return [layer for layer in self.layers if MIDDLE[0] <= depths[layer] <= MIDDLE[1]]

    def means(self, layers: list[int] | None = None) -> list[Quantity]:
        found = [block_mean(arm, self.step, layers or self.layers) for arm in (self.one, self.two)]
        return found if self.paired else [_without_folds(quantity) for quantity in found]

    def effect(self, layers: list[int] | None = None) -> Quantity:
        one, two = self.means(layers)
        return two - one

    def records(self) -> list[dict[str, Any]]:
        """The effect at every block."""
        found = []
        for layer in self.layers:
            effect = self.effect([layer])
            low, high = effect.interval()
            found.append({"layer": layer, "value": effect.value, "low": low, "high": high})
        return found


def _without_folds(quantity: Quantity) -> Quantity:
    low, high = quantity.interval()
    return quantity if quantity.thin else Quantity(quantity.value, half=(high - low) / 2)


def _sentence(parts: Parts, status: Status, part: Part, *, contrast: Contrast, when: str) -> str:
    text = f"{contrast.words} changes σ₁/Σσ, mean over blocks{when}, from {span(parts[contrast.before])} to "
    text += f"{span(parts[contrast.after])}, by {span(parts['svd_ratio'])}: a fall of {span(part)}, "
    text += outcome(status, part) + _reading(status, part)
    told = [f"{words} by {span(parts[metric])}" for metric, words in _NAMES.items() if metric in parts]
    return text + (f" (it changes {', '.join(told)})" if told else "")


def _reading(status: Status, part: Part) -> str:
    """What a failing effect says instead."""
    if status != "fails":
        return ""
    if part.high < -part.margin:
        return ", so anisotropy grows instead"
    return ", so there is next to no effect" if part.low > -part.margin else ", so anisotropy does not fall"
