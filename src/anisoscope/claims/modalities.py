"""Claims about models of every modality, with attention and without, and the table that compares them.

Notation
    A      average cosine, mean over the blocks of a stack at its last measured step
Models with attention are those that are not convolutional. Hybrids (CvT) are counted with the convolutions, as in the
literature, but not among models without attention.
A margin of .1 for "anisotropic" is ours: rows without a common direction have A near 0 in any modality.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from anisoscope.claims.claim import attempt, claim
from anisoscope.claims.correlation import welch
from anisoscope.claims.drift import correlations, explained_word
from anisoscope.claims.evidence import NotHere, Study, studies
from anisoscope.claims.part import Finding, Part, Parts, Status, figure, judge, outcome, span
from anisoscope.claims.quantity import Quantity, combine, mean, t_tail
from anisoscope.claims.streams import (
    CONVOLUTION,
    METRICS,
    MODALITIES,
    SOURCE,
    Stream,
    listed,
    model_means,
    streams,
    trained_streams,
    untrained_note,
)
from anisoscope.runs.table import Table

ANISOTROPIC = 0.1
BEYOND = 0.2  # average cosine from which a block counts in `share_beyond`
DIFFERENCE_MARGIN = 0.1
_GAP, _IMAGES = "attention minus convolution", "vision minus convolution"
_WITHOUT = "without attention"
_ROOM = "room below 1: "  # 1 − the largest average cosine of a stack
_MORE = "profile models of other modalities too and give all runs to `anisoscope claims`"


_KEPT = (  # of what `correlations` tells
    *("model", "stack", "subject", "modality", "role", "seed", "step", "kind", "untrained", "attends"),
    *("pearson", "pearson_low", "pearson_high", "spearman", "explained", "note"),
)


# what the views read


def modality_table(table: Table) -> list[dict[str, Any]]:
    """One record for each stack of each model (and seed): how anisotropic it is, where, and whether drift explains it.

    `share_beyond` is the share of blocks with an average cosine beyond .2.
    """
    told = {(found["subject"], found["seed"]): found for found in correlations(table)}
    records = []
    for study in studies(table, METRICS, proxy="semi_nmf", rank=None, fit="refit"):
        for name, stream in streams(study).items():
            records.append(_record(stream, told[name, stream.run.seed]))
    order = {modality: i for i, modality in enumerate(MODALITIES)}
    return sorted(records, key=lambda r: (order.get(r["modality"], len(order)), r["subject"], str(r["seed"])))


def _record(stream: Stream, told: Mapping[str, Any]) -> dict[str, Any]:
    cells = sorted(stream.blocks().items(), key=lambda item: item[0].layer)
    numbers = {cell.layer: reading.value for cell, reading in cells}
    depths = {cell.layer: reading.depth for cell, reading in cells}
    layers = list(numbers)
    middle = layers[(len(layers) - 1) // 2]
    top, bottom = max(layers, key=numbers.__getitem__), min(layers, key=numbers.__getitem__)
    low, high = stream.mean().interval()
    drift = {cell.layer: reading.value for cell, reading in stream.blocks("drift").items()}
    return {
        **{name: told[name] for name in _KEPT},
        "layers": len(layers),
        "middle": numbers[middle],
        "middle_layer": middle,
        "max": numbers[top],
        "max_layer": top,
        "max_depth": depths[top],
        "min": numbers[bottom],
        "min_layer": bottom,
        "mean": sum(numbers.values()) / len(numbers),
        "mean_low": low,
        "mean_high": high,
        "share_beyond": sum(value > BEYOND for value in numbers.values()) / len(numbers),
        "drift": drift.get(middle, math.nan),
        "explained_by_drift": explained_word(dict(told)),
    }


# the claims


@claim(
    "anisotropic_in_every_modality",
    statement="Representations are anisotropic in every modality: tokens, characters, speech, images.",
    source=SOURCE,
    metrics=("average_cosine",),
    margin=ANISOTROPIC,
)
def anisotropic_in_every_modality(study: Study) -> dict[str, Finding]:
    """The average cosine over the blocks, mean over the models of each modality; every modality must lie beyond .1.

    The margin is ours. At the last measured step; intervals over contexts, so it speaks for these models. Two
    modalities are needed at least, of which convolution is one; how it stands without it, and in every single model, is
    told beside, and models that are not anisotropic are named. Models with untrained weights do not count.
    """
    return {"modalities": attempt(_every_modality, study, margin=ANISOTROPIC)}


def _every_modality(study: Study) -> Finding:
    found = trained_streams(study)
    seen = {stream.modality for stream in found.values()}
    present = [*(m for m in MODALITIES if m in seen), *sorted(seen - set(MODALITIES))]
    if len(present) < 2:
        raise NotHere("second modality", _MORE)
    parts = [_modality_part(m, [s for s in found.values() if s.modality == m]) for m in present]
    single = [
        Part.of(f"{s.modality}: {name}", s.mean(), margin=ANISOTROPIC, p=math.nan, needed=False)
        for name, s in found.items()
    ]
    aspects = {"every model": tuple(part.name for part in single)}
    aspects["modalities with attention"] = tuple(m for m in present if m != CONVOLUTION)
    members = {m: [name for name, s in found.items() if s.modality == m] for m in present}
    details = {"modalities": members, "ends": _ends(found)}
    sentence = functools.partial(_modality_sentence, present=present)
    note = untrained_note(study)
    return Finding((*parts, *single), sentence, details, aspects=aspects, scope="for these models", note=note)


def _modality_part(modality: str, found: Sequence[Stream]) -> Part:
    return Part.of(modality, mean(list(model_means(found).values())), margin=ANISOTROPIC, p=math.nan)


def _ends(found: Mapping[str, Stream]) -> dict[str, int | None]:
    return {name: stream.step for name, stream in found.items()}


def _modality_sentence(parts: Parts, status: Status, part: Part, *, present: Sequence[str]) -> str:
    told = [f"{span(parts[m])} in {m}" for m in present]
    text = f"the average cosine over blocks is {listed(told)}; what decides is {part.name}, {outcome(status, part)}"
    single = {name.split(": ", 1)[1]: p for name, p in parts.items() if ": " in name}
    for state, words in (("fails", "not anisotropic"), ("undecided", "open")):
        names = [f"{name} with {span(p)}" for name, p in single.items() if p.status == state]
        text += f"; {words} {'are' if len(names) > 1 else 'is'} {listed(names)}" if names else ""
    return text


@claim(
    "convolution_differs",
    statement="Convolutional models differ in anisotropy from models with attention.",
    source=SOURCE,
    metrics=("average_cosine",),
    margin=DIFFERENCE_MARGIN,
)
def convolution_differs(study: Study) -> dict[str, Finding]:
    """The average cosine over blocks of models with attention minus that of convolutional ones, in either direction.

    The difference of the means over models must lie beyond .1 (ours); fails where it surely lies within. Interval:
    jackknife over the models of each side (Welch's degrees of freedom); with one model on a side over contexts, and
    then it speaks for these models alone. Vision minus convolution, which read the same kind of data, is told beside.
    Hybrids count as convolutions; models with untrained weights do not count.
    """
    return {"attention and convolution": attempt(_differs, study, margin=DIFFERENCE_MARGIN)}


def _differs(study: Study) -> Finding:
    found = trained_streams(study)
    convolution = [s for s in found.values() if s.modality == CONVOLUTION]
    attention = [s for s in found.values() if s.modality != CONVOLUTION]
    for side, words in ((convolution, "convolutional model"), (attention, "model with attention")):
        if not side:
            raise NotHere(f"{words} with average_cosine at blocks", _MORE)
    parts = [_difference(_GAP, attention, convolution, margin=DIFFERENCE_MARGIN)]
    vision = [s for s in attention if s.modality == "vision"]
    if vision:
        parts.append(replace(_difference(_IMAGES, vision, convolution, margin=DIFFERENCE_MARGIN), needed=False))
    sides = {"attention": model_means(attention), "convolution": model_means(convolution)}
    parts += [Part(name, _level(means), needed=False) for name, means in sides.items()]
    details: dict[str, Any] = {"models": {n: {m: q.value for m, q in means.items()} for n, means in sides.items()}}
    counts = {name: len(means) for name, means in sides.items()}
    sentence = functools.partial(_difference_sentence, counts=counts)
    details |= {"counts": counts, "ends": _ends(found)}
    scope = _scope(counts["attention"], counts["convolution"])
    note = untrained_note(study)
    return Finding(tuple(parts), sentence, details, settle=_oriented, scope=scope, note=note)


def _scope(one: int, two: int) -> str:
    return "for these models" if min(one, two) < 2 else f"over {one} models and {two}"


def _level(means: Mapping[str, Quantity]) -> float:
    return sum(quantity.value for quantity in means.values()) / len(means)


def _difference(name: str, one: Iterable[Stream], two: Iterable[Stream], *, margin: float) -> Part:
    """Mean over models of one side minus the other: interval over models, or over contexts where a side has one."""
    sides = [list(model_means(side).values()) for side in (one, two)]
    gap, error, degrees = welch(*([q.value for q in side] for side in sides))
    if not math.isfinite(error):
        # other models read other contexts: their folds do not belong together
        apart = [_unpaired(mean(side)) for side in sides]
        return Part.of(name, apart[0] - apart[1], margin=margin)
    from scipy.special import stdtrit

    half = float(stdtrit(degrees, 0.975)) * error
    return Part(name, gap, gap - half, gap + half, margin=margin, p=t_tail(gap, error, degrees=degrees))


def _unpaired(quantity: Quantity) -> Quantity:
    low, high = quantity.interval()
    return quantity if quantity.thin else Quantity(quantity.value, half=(high - low) / 2)


def _oriented(parts: dict[str, Part]) -> dict[str, Part]:
    """A difference in the direction in which it was found; p counts both directions."""
    part = _turned(parts[_GAP]) if parts[_GAP].effect < 0 else parts[_GAP]
    p = min(1.0, 2 * min(part.p, 1 - part.p)) if math.isfinite(part.p) else part.p
    return {**parts, _GAP: replace(part, p=p)}


def _turned(part: Part) -> Part:
    return replace(part, effect=-part.effect, low=-part.high, high=-part.low)


def _difference_sentence(parts: Parts, status: Status, part: Part, *, counts: Mapping[str, int]) -> str:
    one, two = parts["attention"], parts["convolution"]
    more, less = ("attention", "convolution") if one.effect >= two.effect else ("convolution", "attention")
    text = f"the average cosine over blocks is {figure(one.effect)} in {_models(counts['attention'])} with attention "
    text += f"and {figure(two.effect)} in {_models(counts['convolution'])} of convolutions, {span(parts[_GAP])} higher "
    text += f"with {more} than with {less}, {outcome(status, part)}"
    images = parts.get(_IMAGES)
    return text + (f" (vision minus convolution is {span(images)})" if images and images.measured else "")


def _models(count: int) -> str:
    return f"{count} model{'s' if count > 1 else ''}"


@claim(
    "not_inherent",
    statement="Anisotropy is not inherent to attention: a model with attention does without it, or models without "
    "attention are as anisotropic.",
    source="the counter-claim to Godey et al. 2024, arXiv:2401.12143; after Machina & Mercer 2024, who found large "
    "Pythia models nearly isotropic",
    metrics=("average_cosine",),
    margin=ANISOTROPIC,
)
def not_inherent(study: Study) -> dict[str, Finding]:
    """Two routes on the same table; it holds by either, and fails only where both fail.

    First, a stack with attention whose average cosine stays below .1 at every block (the largest of them counts, with
    its interval; told as one minus it, against .9). Second, models without any attention whose average cosine over
    blocks is not more than .1 below that of the models with it (interval over models, or over contexts where a side has
    one). Without a model of the second kind it can hold by the first route and cannot fail. A model with untrained
    weights is no evidence: before training almost any is isotropic.
    """
    return {"with and without attention": attempt(_not_inherent, study, margin=ANISOTROPIC)}


def _not_inherent(study: Study) -> Finding:
    found = trained_streams(study)
    attention = {name: s for name, s in found.items() if s.attends}
    without = [s for s in found.values() if not s.attends]
    if not attention:
        raise NotHere("model with attention that has average_cosine at blocks", _MORE)
    parts = [Part.of(f"{_ROOM}{n}", _room(s), margin=1 - ANISOTROPIC, p=math.nan) for n, s in attention.items()]
    if without:
        parts.append(_difference(_WITHOUT, without, attention.values(), margin=-DIFFERENCE_MARGIN))
    settled = _either(dict(zip((part.name for part in parts), parts, strict=True)))
    open_ = not without and judge([p for p in settled.values() if p.needed])[0] != "holds"
    sides = {"attention": list(attention), "without attention": [s.name for s in without]}
    details: dict[str, Any] = {"models": sides, "ends": _ends(found), **({"missing": True} if open_ else {})}
    note = untrained_note(study)
    return Finding(tuple(parts), _either_sentence, details, settle=_either, scope="for these models", note=note)


def _room(stream: Stream) -> Quantity:
    """1 − the largest average cosine of the blocks."""
    parts = [reading.quantity for reading in stream.blocks().values()]
    return combine(parts, lambda values: 1 - max(values) if all(map(math.isfinite, values)) else math.nan)


def _either(parts: dict[str, Part]) -> dict[str, Part]:
    """Only the better route decides; without the second one, the first cannot fail the claim."""
    first = _best([part for name, part in parts.items() if name.startswith(_ROOM)])
    second = parts.get(_WITHOUT)
    if second is None and first.status != "holds":
        reason = "the table has no model without attention to compare with (profile a convolutional one too)"
        first = replace(first, reason=first.reason or reason)
    decides = _best([first, *([second] if second is not None else [])])
    told = {name: replace(part, needed=False) for name, part in parts.items()}
    return {**told, decides.name: replace(decides, needed=True)}


def _best(parts: Sequence[Part]) -> Part:
    """The one that holds most surely, or fails least."""
    order = {"holds": 2, "undecided": 1, "fails": 0}

    def key(part: Part) -> tuple[int, float]:
        gap = (part.low if math.isfinite(part.low) else part.effect) - part.margin
        return order[part.status], gap if math.isfinite(gap) else -math.inf

    return max(parts, key=key)


def _either_sentence(parts: Parts, status: Status, part: Part) -> str:
    lowest = _best([p for name, p in parts.items() if name.startswith(_ROOM)])
    largest = replace(lowest, effect=1 - lowest.effect, low=1 - lowest.high, high=1 - lowest.low)
    text = f"of the models with attention {lowest.name.removeprefix(_ROOM)} comes closest to isotropy, with an average "
    text += f"cosine of {span(largest)} at its most anisotropic block, "
    text += _FIRST_ROUTE[replace(lowest, reason="").status]
    second = parts.get(_WITHOUT)
    if second is None or not second.measured:
        return text
    words = f"{span(second)} higher" if second.effect >= 0 else f"{span(_turned(second))} lower"
    text += f"; in models without attention the average cosine over blocks is {words} than in those with it, "
    return text + _SECOND_ROUTE[second.status]


_FIRST_ROUTE: dict[Status, str] = {
    "holds": f"short of the {ANISOTROPIC} from which it counts as anisotropic",
    "fails": f"beyond the {ANISOTROPIC} from which it counts as anisotropic",
    "undecided": f"which may lie on either side of the {ANISOTROPIC} from which it counts as anisotropic",
}
_SECOND_ROUTE: dict[Status, str] = {
    "holds": f"so they are as anisotropic to within {DIFFERENCE_MARGIN}",
    "fails": f"so they are less anisotropic by more than {DIFFERENCE_MARGIN}",
    "undecided": f"which may or may not be within {DIFFERENCE_MARGIN}",
}
