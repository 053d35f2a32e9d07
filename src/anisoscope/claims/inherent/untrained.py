"""Blocks at initialisation: are they anisotropic under biased inputs, and more so the larger the bias?

Notation: N the size of the bias, A the average cosine. An arm is one initialisation, width and kind of inputs; a claim
about a family must hold in every arm. Seeds are the independent samples (each has tokens, a direction and weights of
its own): a single one decides nothing, and is told only as one of those that a verdict over three or more rests on.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from anisoscope.claims.engine.claim import claim
from anisoscope.claims.engine.correlation import rank_correlation
from anisoscope.claims.engine.evidence import NotHere, Run, by_cell, models
from anisoscope.claims.engine.part import (
    CORRELATION,
    ONE_REPLICATE,
    Finding,
    Part,
    Parts,
    Status,
    figure,
    outcome,
    span,
)
from anisoscope.results.quantity import Quantity, combine

SOURCE = "Godey et al. 2024, arXiv:2401.12143"
ADDED_MARGIN = 0.05
BETWEEN = (0.25, 0.75)  # average cosines of inputs that leave room for a block to add to, or to take away from
RANK_MARGIN = 0.8
FEWEST_BIASES = 4
_HOW = "`anisoscope study untrained` measures it"


class UntrainedArm(NamedTuple):
    """One initialisation, width and kind of inputs."""

    init: str
    width: int
    norm: bool

    def __str__(self) -> str:
        return f"{self.init}, width {self.width}, {'normed' if self.norm else 'plain'} inputs"


Biased = dict[float, Quantity]  # by the size of the bias, ascending


@claim(
    "anisotropic_at_initialisation",
    of=models,
    statement="A block at initialisation makes rows that share a bias more anisotropic than they came: the average "
    "cosine of its outputs lies more than 0.05 above that of its inputs.",
    source=SOURCE,
    metrics=("average_cosine",),
    margin=ADDED_MARGIN,
)
def anisotropic_at_initialisation(run: Run) -> Finding:
    """A(outputs) − A(inputs) at the bias whose inputs come nearest to an average cosine of ½.

    Outputs that are as anisotropic as their inputs say nothing about a block: the identity has them, too. So what it
    adds is judged, and only at a bias whose inputs lie between 0.25 and 0.75: nearer to 0 nothing is shared, nearer to
    1 nothing can be added. What the outputs have, and what they have without a bias, is told beside it. The margin is
    ours, set when results were known; in those of docs/results/untrained any from 0.007 on gives the same verdicts.
    """
    inputs, outputs = (_arms(run, "average_cosine", kind) for kind in ("embed", "resid"))
    parts: list[Part] = []
    biases: dict[str, float] = {}
    for arm, there in outputs.items():
        known = {bias: inputs[arm][bias] for bias in there if bias > 0 and bias in inputs.get(arm, {})}
        if not known:
            continue
        bias = min(known, key=lambda n: abs(known[n].value - 0.5))
        if not BETWEEN[0] <= known[bias].value <= BETWEEN[1]:
            parts.append(Part.absent(str(arm), _out_of_reach(arm, known), margin=ADDED_MARGIN))
            continue
        biases[str(arm)] = bias
        parts.append(_judged(str(arm), there[bias] - known[bias], margin=ADDED_MARGIN))
        parts.append(_cosine(f"{arm}: inputs", known[bias]))
        parts.append(_cosine(f"{arm}: outputs", there[bias]))
        if 0 in there:
            parts.append(_cosine(f"{arm}: without bias", there[0.0]))
    if not parts:
        raise NotHere("block at initialisation with a bias of its inputs", _HOW)
    sentence = functools.partial(_added_sentence, biases=biases)
    return Finding(tuple(parts), sentence, {"biases": biases}, replicate=True)


def _judged(name: str, quantity: Quantity, *, margin: float) -> Part:
    """A part of one seed, which the seed alone cannot settle: a correlation, or a difference of cosines."""
    return Part.of(name, quantity, margin=margin, reason=ONE_REPLICATE, bounds=CORRELATION)


def _cosine(name: str, quantity: Quantity) -> Part:
    """A value that is told beside it; of sharpness as well, which has the same upper end."""
    return replace(Part.described(name, quantity), bounds=CORRELATION)


def _out_of_reach(arm: UntrainedArm, known: Biased) -> str:
    """Why an arm has no bias to ask at, and which one would do: A = N²/(N² + ‖x‖²) is ½ at N = ‖x‖."""
    values = [quantity.value for quantity in known.values()]
    text = f"in {arm} no bias brings the inputs to an average cosine between {BETWEEN[0]} and {BETWEEN[1]} (they have "
    text += f"{' and '.join(map(figure, dict.fromkeys((min(values), max(values)))))})"
    lengths = [n * math.sqrt(1 / q.value - 1) for n, q in known.items() if 0.01 < q.value < 0.999]
    return text + (f"; a bias of about {lengths[0]:.2g} would" if lengths else "")


def _added_sentence(parts: Parts, status: Status, part: Part, *, biases: dict[str, float]) -> str:
    alone = parts.get(f"{part.name}: without bias")
    text = f"what decides of {len(biases)} arms is {part.name}: at a bias of {figure(biases[part.name])} the outputs "
    text += f"have an average cosine of {span(parts[f'{part.name}: outputs'])}, their inputs "
    text += f"{span(parts[f'{part.name}: inputs'])}, so the block adds {span(part)}, {outcome(status, part)}"
    text += ": the anisotropy is that of its inputs" if part.high < part.margin else ""
    more = sum(parts[arm].low > ADDED_MARGIN for arm in biases)
    text += f"; it adds more than the margin in {more} of {len(biases)} arms"
    return text + (f"; without a bias the outputs there have {span(alone)}" if alone is not None else "")


@claim(
    "anisotropy_grows_with_bias",
    of=models,
    statement="The larger the bias of its inputs, the more anisotropic are the outputs of a block at initialisation.",
    source=SOURCE,
    metrics=("average_cosine",),
    margin=RANK_MARGIN,
)
def anisotropy_grows_with_bias(run: Run) -> Finding:
    """Rank correlation over biases of N with the average cosine of the outputs.

    It is true of anything that lets its inputs pass, and false of a block that undoes their bias; what the inputs do is
    told beside it, and what a block adds is another claim (`anisotropic_at_initialisation`).
    """
    inputs = _arms(run, "average_cosine", "embed")
    return _growth(_arms(run, "average_cosine", "resid"), "the average cosine of the outputs", inputs=inputs)


@claim(
    "sharpness_grows_with_bias",
    of=models,
    statement="The larger the bias of its inputs, the sharper is the attention of a block at initialisation.",
    source=SOURCE,
    metrics=("attention_sharpness",),
    margin=RANK_MARGIN,
)
def sharpness_grows_with_bias(run: Run) -> Finding:
    """Rank correlation over biases of N with attention sharpness, (max p − 1/m)/(1 − 1/m), mean over heads."""
    return _growth(_arms(run, "attention_sharpness", "scores"), "the sharpness of attention")


def _growth(
    arms: dict[UntrainedArm, Biased], what: str, *, inputs: Mapping[UntrainedArm, Biased] = MappingProxyType({})
) -> Finding:
    long = {arm: there for arm, there in arms.items() if len(there) >= FEWEST_BIASES}
    if not long:
        raise NotHere(f"block at initialisation with {FEWEST_BIASES} biases of its inputs or more", _HOW)
    parts = []
    for arm, there in long.items():
        trend = combine(list(there.values()), functools.partial(rank_correlation, list(there)))
        parts.append(_judged(str(arm), trend, margin=RANK_MARGIN))
    for arm, there in long.items():
        for end, words in ((min(there), "smallest"), (max(there), "largest")):
            parts.append(_cosine(f"{arm}: at the {words} bias", there[end]))
            if end in inputs.get(arm, {}):
                parts.append(_cosine(f"{arm}: inputs at the {words} bias", inputs[arm][end]))
    reach = max(max(there) for there in long.values())
    sentence = functools.partial(_growth_sentence, what=what, arms=[str(arm) for arm in long], reach=reach)
    return Finding(tuple(parts), sentence, {"arms": len(long)}, replicate=True)


def _growth_sentence(parts: Parts, status: Status, part: Part, *, what: str, arms: list[str], reach: float) -> str:
    rising = sum(parts[arm].low > RANK_MARGIN for arm in arms)
    text = f"{what} rises with the bias in {rising} of {len(arms)} arms; what decides is {part.name}, where the rank "
    text += f"correlation is {span(part)}, {outcome(status, part)} "
    low, high = _ends(parts, part.name)
    inputs = " to ".join(_ends(parts, part.name, "inputs "))
    text += f"(from {low} at the smallest bias to {high} at {figure(reach)}"
    return text + (f"; the inputs themselves go from {inputs})" if inputs else ")")


def _ends(parts: Parts, name: str, what: str = "") -> list[str]:
    """The values at the smallest and the largest bias; none where they were not measured."""
    names = [f"{name}: {what}at the {word} bias" for word in ("smallest", "largest")]
    return [figure(parts[each].effect) for each in names if each in parts]


def _arms(run: Run, metric: str, kind: str) -> dict[UntrainedArm, Biased]:
    """What the table has of a metric, by arm and bias."""
    found: dict[UntrainedArm, Biased] = {}
    mine = run.of(metric).where(kind=kind, group="", head=None)
    for same in (mine.where(seed=run.seed) or mine.where(seed=None)).groups("variant").values():
        for row in by_cell(same).values():
            if set(row.options) == {"bias", "init", "input_norm", "width"}:
                arm = UntrainedArm(row["init"], int(row["width"]), row["input_norm"] == "1")
                found.setdefault(arm, {})[float(row["bias"])] = row.quantity
    order = {arm: dict(sorted(there.items())) for arm, there in found.items()}
    return dict(sorted(order.items(), key=lambda item: (item[0].init, item[0].width, not item[0].norm)))
