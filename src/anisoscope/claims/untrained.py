"""Blocks at initialisation: are they anisotropic under biased inputs, and more so the larger the bias?

Notation: N the size of the bias, A the average cosine. An arm is one initialisation, width and kind of inputs; a claim
about a family must hold in every arm. A single seed has an interval over its sequences; seeds are the independent
samples, so the verdict over all of them counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from anisoscope.claims.claim import model_claim
from anisoscope.claims.correlation import rank_correlation
from anisoscope.claims.evidence import NotHere, Run
from anisoscope.claims.part import Finding, Part, Parts, Status, figure, outcome, span
from anisoscope.claims.quantity import Quantity, combine

SOURCE = "Godey et al. 2024, arXiv:2401.12143"
COSINE_MARGIN = 0.1
RANK_MARGIN = 0.8
FEWEST_BIASES = 4
_HOW = "`anisoscope study untrained` measures it"


class Arm(NamedTuple):
    """One initialisation, width and kind of inputs."""

    init: str
    width: int
    norm: bool

    def __str__(self) -> str:
        return f"{self.init}, width {self.width}, {'normed' if self.norm else 'plain'} inputs"


Biased = dict[float, Quantity]  # by the size of the bias, ascending


@model_claim(
    "anisotropic_at_initialisation",
    statement="A block at initialisation gives anisotropic outputs when its inputs share a bias.",
    source=SOURCE,
    metrics=("average_cosine",),
    margin=COSINE_MARGIN,
)
def anisotropic_at_initialisation(run: Run) -> Finding:
    """Average cosine of the outputs at the bias whose inputs come nearest to an average cosine of ½.

    A larger bias would make it true of anything that lets its inputs pass; what the block adds to its inputs, and what
    it gives without a bias, is told beside it.
    """
    inputs, outputs = (_arms(run, "average_cosine", kind) for kind in ("embed", "resid"))
    parts: list[Part] = []
    biases: dict[str, float] = {}
    for arm, there in outputs.items():
        known = [bias for bias in there if bias > 0 and bias in inputs.get(arm, {})]
        if not known:
            continue
        bias = min(known, key=lambda n: abs(inputs[arm][n].value - 0.5))
        biases[str(arm)] = bias
        parts.append(Part.of(str(arm), there[bias], margin=COSINE_MARGIN))
        parts.append(Part.described(f"{arm}: inputs", inputs[arm][bias]))
        parts.append(Part.described(f"{arm}: outputs − inputs", there[bias] - inputs[arm][bias]))
        if 0 in there:
            parts.append(Part.described(f"{arm}: without bias", there[0.0]))
    if not parts:
        raise NotHere("block at initialisation with a bias of its inputs", _HOW)
    return Finding(tuple(parts), functools.partial(_biased_sentence, biases=biases), {"biases": biases})


def _biased_sentence(parts: Parts, status: Status, part: Part, *, biases: dict[str, float]) -> str:
    more, alone = parts[f"{part.name}: outputs − inputs"], parts.get(f"{part.name}: without bias")
    text = (
        f"the lowest of {len(biases)} arms is {part.name}: at a bias of {figure(biases[part.name])} the outputs have "
    )
    text += f"an average cosine of {span(part)}, {outcome(status, part)}; their inputs have "
    text += f"{figure(parts[f'{part.name}: inputs'].effect)}, so the block itself adds {span(more)}"
    return text + (f", and without a bias the outputs have {span(alone)}" if alone is not None else "")


@model_claim(
    "anisotropy_grows_with_bias",
    statement="The larger the bias of its inputs, the more anisotropic are the outputs of a block at initialisation.",
    source=SOURCE,
    metrics=("average_cosine",),
    margin=RANK_MARGIN,
)
def anisotropy_grows_with_bias(run: Run) -> Finding:
    """Rank correlation over biases of N with the average cosine of the outputs."""
    return _growth(_arms(run, "average_cosine", "resid"), "the average cosine of the outputs")


@model_claim(
    "sharpness_grows_with_bias",
    statement="The larger the bias of its inputs, the sharper is the attention of a block at initialisation.",
    source=SOURCE,
    metrics=("attention_sharpness",),
    margin=RANK_MARGIN,
)
def sharpness_grows_with_bias(run: Run) -> Finding:
    """Rank correlation over biases of N with attention sharpness, (max p − 1/m)/(1 − 1/m), mean over heads."""
    return _growth(_arms(run, "attention_sharpness", "scores"), "the sharpness of attention")


def _growth(arms: dict[Arm, Biased], what: str) -> Finding:
    long = {arm: there for arm, there in arms.items() if len(there) >= FEWEST_BIASES}
    if not long:
        raise NotHere(f"block at initialisation with {FEWEST_BIASES} biases of its inputs or more", _HOW)
    parts = [Part.of(str(arm), combine(list(there.values()), _ranked(list(there))), margin=RANK_MARGIN)
             for arm, there in long.items()]  # fmt: skip
    for arm, there in long.items():
        for bias, words in ((min(there), "at the smallest bias"), (max(there), "at the largest bias")):
            parts.append(Part.described(f"{arm}: {words}", there[bias]))
    reach = max(max(there) for there in long.values())
    sentence = functools.partial(_growth_sentence, what=what, arms=[str(arm) for arm in long], reach=reach)
    return Finding(tuple(parts), sentence, {"arms": len(long)})


def _ranked(biases: list[float]) -> Callable[[object], float]:
    return lambda values: rank_correlation(biases, values)  # type: ignore[arg-type]


def _growth_sentence(parts: Parts, status: Status, part: Part, *, what: str, arms: list[str], reach: float) -> str:
    rising = sum(parts[arm].status == "holds" for arm in arms)
    ends = [figure(parts[f"{part.name}: at the {word} bias"].effect) for word in ("smallest", "largest")]
    text = f"{what} rises with the bias in {rising} of {len(arms)} arms; what decides is {part.name}, where the rank "
    text += f"correlation is {span(part)}, {outcome(status, part)} "
    return text + f"(from {ends[0]} at the smallest bias to {ends[1]} at {figure(reach)})"


def _arms(run: Run, metric: str, kind: str) -> dict[Arm, Biased]:
    """What the table has of a metric, by arm and bias."""
    found: dict[Arm, Biased] = {}
    variants = {key[3] for key in run.index.slices if key[0] == run.model and key[2] == metric and key[4] == ""}
    for variant in sorted(variants):
        words = dict(word.split("=", 1) for word in variant.split(";") if "=" in word)
        if set(words) != {"bias", "init", "input_norm", "width"}:
            continue
        arm = Arm(words["init"], int(words["width"]), words["input_norm"] == "1")
        for cell, reading in run.plain(metric, variant).items():
            if cell.kind == kind:
                found.setdefault(arm, {})[float(words["bias"])] = reading.quantity
    order = {arm: dict(sorted(there.items())) for arm, there in found.items()}
    return dict(sorted(order.items(), key=lambda item: (item[0].init, item[0].width, not item[0].norm)))
