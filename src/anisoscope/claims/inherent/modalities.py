"""Claims about models of every modality, with attention and without, and the table that compares them.

Notation
    A      average cosine, mean over the blocks of a stack at its last measured step
All models that are not convolutional count as models with attention. Hybrids (CvT) belong to the modality convolution,
as in the literature, but do not count as models without attention.
The margin of .1 for "anisotropic" is our choice: rows without a common direction have A near 0 in any modality.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from anisoscope.claims.engine.claim import CORRELATION, Finding, Part, Parts, Status, claim, outcome, span
from anisoscope.claims.engine.correlation import FEWEST_CLUSTERS, welch
from anisoscope.claims.engine.evidence import NotHere, Study, figure, listed, studies, whole
from anisoscope.claims.inherent import drift
from anisoscope.claims.inherent.drift import CONVOLUTION, MODALITIES, SOURCE, Stream, trained_streams, uncounted_note
from anisoscope.results.modality import VISION
from anisoscope.results.quantity import Quantity, among, combine, mean, t_interval, t_quantile, t_tail
from anisoscope.results.query import Table

ANISOTROPIC = 0.1
BEYOND = 0.2  # average cosine above which a block counts in `share_beyond`
DIFFERENCE_MARGIN = 0.1
_GAP, _IMAGES = "attention minus convolution", "vision minus convolution"
_DIFFERENCES = (-2.0, 2.0)  # bounds of a difference of two cosines
RELU = "stages that end in a ReLU have a high cosine by that alone, from which this does not tell convolution apart"
MORE = "profile models of other modalities too and give all runs to `anisoscope claims`"


_KEPT = (  # keys taken over from the records of `correlations`
    *("model", "stack", "subject", "modality", "role", "seed", "step", "kind", "untrained", "doubt", "attends"),
    *("pearson", "pearson_low", "pearson_high", "pearson_p"),
    *("spearman", "spearman_low", "spearman_high", "spearman_p", "explained", "note"),
)


def modality_table(table: Table) -> list[dict[str, Any]]:
    """One record per stack, model and seed: how anisotropic it is, at which block, and whether drift explains it.

    `share_beyond` is the share of blocks with an average cosine beyond .2.
    """
    by_stack = {(found["subject"], found["seed"]): found for found in drift.correlations(table)}
    found = (item for study in studies(table, drift.METRICS) for item in drift.streams(study).items())
    records = [_record(stream, by_stack[name, stream.run.seed]) for name, stream in found]
    order = {modality: i for i, modality in enumerate(MODALITIES)}
    return sorted(records, key=lambda r: (order.get(r["modality"], len(order)), r["subject"], str(r["seed"])))


def _record(stream: Stream, correlation: Mapping[str, Any]) -> dict[str, Any]:
    cells = sorted(stream.blocks("average_cosine").items(), key=lambda item: item[0].layer)
    numbers = {cell.layer: reading.value for cell, reading in cells}
    depths = {cell.layer: reading.depth for cell, reading in cells}
    layers = list(numbers)
    middle = layers[(len(layers) - 1) // 2]
    top, bottom = max(layers, key=numbers.__getitem__), min(layers, key=numbers.__getitem__)
    average = Part.of("", stream.mean(), bounds=CORRELATION)
    drifts = {cell.layer: reading.value for cell, reading in stream.blocks("drift").items()}
    return {
        **{name: correlation[name] for name in _KEPT},
        "layers": len(layers),
        "middle": numbers[middle],
        "middle_layer": middle,
        "max": numbers[top],
        "max_layer": top,
        "max_depth": depths[top],
        "min": numbers[bottom],
        "min_layer": bottom,
        "mean": sum(numbers.values()) / len(numbers),
        "mean_low": average.low,
        "mean_high": average.high,
        "share_beyond": sum(value > BEYOND for value in numbers.values()) / len(numbers),
        "drift": drifts.get(middle, math.nan),
        "explained_by_drift": {"holds": "yes", "fails": "no"}.get(str(correlation["status"]), "open"),
    }


@claim(
    "anisotropic_in_every_modality",
    of=whole("modalities"),
    statement="Representations are anisotropic in every modality: tokens, characters, speech, images.",
    source=SOURCE,
    metrics=("average_cosine",),
    margin=ANISOTROPIC,
)
def anisotropic_in_every_modality(study: Study) -> Finding:
    """The average cosine over the blocks, mean over the models of each modality; every modality must lie beyond .1.

    The margin is ours. At the last measured step. The interval of a modality is over contexts where it has one model,
    spans both where it has two, and is over models (t) from three on; it speaks for the models that it names.
    Two of the five modalities are needed at least, of which convolution is one, and how many were seen is told; how it
    stands without convolution, and in every single model, is told beside, and models that are not anisotropic are
    named. Models with untrained weights do not count, nor do those that hardly learned (a loss that fell by less than a
    tenth since step 0) or were shown a text of unknown tokens.
    """
    found = trained_streams(study)
    seen = {stream.modality for stream in found.values()}
    present = [*(m for m in MODALITIES if m in seen), *sorted(seen - set(MODALITIES))]
    if len(present) < 2:
        raise NotHere("second modality", MORE)
    parts = [_modality_part(m, [s for s in found.values() if s.modality == m]) for m in present]
    more: dict[str, Any] = {"margin": ANISOTROPIC, "p": math.nan, "needed": False, "bounds": CORRELATION}
    single = [Part.of(f"{s.modality}: {name}", s.mean(), **more) for name, s in found.items()]
    aspects = {"every model": tuple(part.name for part in single)}
    aspects["modalities with attention"] = tuple(m for m in present if m != CONVOLUTION)
    members = {m: [name for name, s in found.items() if s.modality == m] for m in present}
    sentence = functools.partial(_modality_sentence, members=members)
    details = {"modalities": members, "ends": {name: stream.step for name, stream in found.items()}}
    note = uncounted_note(study)
    return Finding([*parts, *single], sentence, details, aspects=aspects, scope="for these models", note=note)


def _modality_part(modality: str, found: Sequence[Stream]) -> Part:
    """The part for one modality: the mean over its models, with an interval that includes variation between models."""
    means = list(model_means(found).values())
    part = Part.of(modality, mean(means), margin=ANISOTROPIC, p=math.nan, bounds=CORRELATION)
    if len(means) < 2 or not math.isfinite(part.low):
        return part
    if len(means) < FEWEST_CLUSTERS:
        ends = list(zip(*(quantity.interval() for quantity in means), strict=True))
        return replace(part, low=min(part.low, *ends[0]), high=max(part.high, *ends[1]))
    half = t_interval([quantity.value for quantity in means])[0]
    return replace(part, low=min(part.low, part.effect - half), high=max(part.high, part.effect + half))


def model_means(found: Iterable[Stream]) -> dict[str, Quantity]:
    """By model: the average cosine over blocks, averaged over its stacks."""
    groups: dict[str, list[Quantity]] = {}
    for stream in found:
        groups.setdefault(stream.model, []).append(stream.mean())
    return {model: mean(parts) for model, parts in groups.items()}


def _modality_sentence(parts: Parts, status: Status, part: Part, *, members: Mapping[str, Sequence[str]]) -> str:
    models = {name.split(", ")[0] for names in members.values() for name in names}
    known = sum(m in MODALITIES for m in members)
    text = f"in {_models(len(models))} of {known} of {len(MODALITIES)} modalities the average cosine over blocks is "
    text += listed([f"{span(parts[m])} in {m} ({_averaged(names)})" for m, names in members.items()])
    text += f"; what decides is {part.name}, {outcome(status, part)}"
    single = {name.split(": ", 1)[1]: p for name, p in parts.items() if ": " in name}
    for state, words in (("fails", "not anisotropic"), ("undecided", "open")):
        names = [f"{name} with {span(p)}" for name, p in single.items() if p.status == state]
        text += f"; {words} {'are' if len(names) > 1 else 'is'} {listed(names)}" if names else ""
    return text


def _averaged(names: Sequence[str]) -> str:
    """The names of the stacks that a mean is over, as a phrase.

    >>> _averaged(["m"]), _averaged(["m", "w, decoder stack"])
    ('m', 'mean of m and w (decoder stack)')
    """
    labels = [f"{model} ({stack})" if stack else model for model, _, stack in (name.partition(", ") for name in names)]
    return labels[0] if len(labels) == 1 else f"mean of {listed(labels)}"


@claim(
    "convolution_differs",
    of=whole("attention and convolution"),
    statement="Convolutional models differ in anisotropy from models with attention.",
    source=SOURCE,
    metrics=("average_cosine",),
    margin=DIFFERENCE_MARGIN,
)
def convolution_differs(study: Study) -> Finding:
    """The average cosine over blocks of models with attention minus that of convolutional ones, in either direction.

    The difference of the means over models must lie beyond .1 (ours); fails where it surely lies within. Interval:
    jackknife over the models of each side (Welch's degrees of freedom); with one model on a side over contexts, and
    then it speaks for these models alone. Vision minus convolution, which read the same kind of data, is told beside.
    Hybrids count as convolutions; models with untrained weights do not count. The stages of ResNet, RegNet and others
    are read after a ReLU, and rows without negative coordinates have a high average cosine whatever a model has
    learned, which streams of transformers and of ConvNeXt have no part in: this does not tell convolution from ReLU.
    """
    found = trained_streams(study)
    convolution = [s for s in found.values() if s.modality == CONVOLUTION]
    attention = [s for s in found.values() if s.modality != CONVOLUTION]
    for side, words in ((convolution, "convolutional model"), (attention, "model with attention")):
        if not side:
            raise NotHere(f"{words} with average_cosine at blocks", MORE)
    parts = [difference(_GAP, attention, convolution, margin=DIFFERENCE_MARGIN)]
    vision = [s for s in attention if s.modality == VISION.name]
    if vision:
        parts.append(replace(difference(_IMAGES, vision, convolution, margin=DIFFERENCE_MARGIN), needed=False))
    sides = {"attention": model_means(attention), CONVOLUTION: model_means(convolution)}
    parts += Part.describe_all({name: mean(list(means.values())).value for name, means in sides.items()})
    details: dict[str, Any] = {"models": {n: {m: q.value for m, q in means.items()} for n, means in sides.items()}}
    details["counts"] = counts = {name: len(means) for name, means in sides.items()}
    details["ends"] = {name: stream.step for name, stream in found.items()}
    several = min(counts.values()) > 1
    scope = "over {attention} models and {convolution}".format(**counts) if several else "for these models"
    note = "; ".join(filter(None, (RELU, uncounted_note(study))))
    sentence = functools.partial(_difference_sentence, counts=counts)
    return Finding(parts, sentence, details, settle=_oriented, scope=scope, note=note)


def difference(name: str, one: Iterable[Stream], two: Iterable[Stream], *, margin: float, looks: int = 1) -> Part:
    """The part for a difference of means over models; interval over models, or contexts if a side has one model."""
    more: dict[str, Any] = {"margin": margin, "looks": looks, "bounds": _DIFFERENCES}
    sides = [list(model_means(side).values()) for side in (one, two)]
    gap, error, degrees = welch(*([q.value for q in side] for side in sides))
    if not error > 0:  # one model on a side, or exactly equal models
        # different models may read different contexts, so their folds cannot be paired
        apart = [mean(side).unpaired() for side in sides]
        return Part.of(name, apart[0] - apart[1], **more)
    half = t_quantile(degrees, among(looks)) * error
    return Part(name, gap, gap - half, gap + half, p=t_tail(gap, error, degrees=degrees), **more)


def _oriented(parts: dict[str, Part]) -> dict[str, Part]:
    """Orient the difference in its observed direction; p is two-sided."""
    part = -parts[_GAP] if parts[_GAP].effect < 0 else parts[_GAP]
    p = min(1.0, 2 * min(part.p, 1 - part.p)) if math.isfinite(part.p) else part.p
    return {**parts, _GAP: replace(part, p=p)}


def _difference_sentence(parts: Parts, status: Status, part: Part, *, counts: Mapping[str, int]) -> str:
    one, two = parts["attention"], parts[CONVOLUTION]
    more, less = ("attention", CONVOLUTION) if one.effect >= two.effect else (CONVOLUTION, "attention")
    text = f"the average cosine over blocks is {figure(one.effect)} in {_models(counts['attention'])} with attention "
    text += f"and {figure(two.effect)} in {_models(counts[CONVOLUTION])} of convolutions, {span(parts[_GAP])} higher "
    text += f"with {more} than with {less}, {outcome(status, part)}"
    images = parts.get(_IMAGES)
    return text + (f" (vision minus convolution is {span(images)})" if images and images.measured else "")


def _models(count: int) -> str:
    return f"{count} model{'s' if count > 1 else ''}"


# The counter-claim. The best of K stacks with attention is chosen, and the better of two routes, so the intervals are
# simultaneous (Bonferroni: level 1 − .05/2K for each stack, 1 − .05/2 for the second route).

FEWEST_WITH, FEWEST_WITHOUT = 3, 1  # trained models needed with attention and without
_WITHOUT = "without attention"
_LARGEST = "largest cosine: "  # over the blocks of a stack


@claim(
    "not_inherent",
    of=whole("with and without attention"),
    statement="Anisotropy is not inherent to attention: a model with attention does without it, or models without "
    "attention are as anisotropic.",
    source="the counter-claim to Godey et al. 2024, arXiv:2401.12143; after Machina & Mercer 2024, who found large "
    "Pythia models nearly isotropic",
    metrics=("average_cosine",),
    margin=ANISOTROPIC,
)
def not_inherent(study: Study) -> Finding:
    """Two routes on the same table; it holds by either, and fails only where both fail.

    First, a stack with attention whose average cosine stays below .1 at every block (the largest of them counts).
    Second, models without any attention whose average cosine over blocks is not more than .1 below that of the models
    with it (interval over models, or over contexts where a side has one); a ReLU at the end of their stages can do that
    by itself. The best of many is chosen, so the intervals hold for all stacks and the second route at once
    (Bonferroni). So that it can fail as well as hold it needs three trained models with attention and one without any.
    Models with untrained weights do not count, nor do those whose loss (on the held-out probe where there is one) fell
    by less than a tenth since step 0: before training almost any is isotropic. Where the table has no loss, that is
    said.
    """
    found = trained_streams(study)
    attention = {name: s for name, s in found.items() if s.attends}
    without = {name: s for name, s in found.items() if not s.attends}
    if not attention:
        raise NotHere(f"{FEWEST_WITH} trained models with attention that have average_cosine at blocks", MORE)
    routes = 2 if without else 1
    more: dict[str, Any] = {"margin": ANISOTROPIC, "p": math.nan, "below": True, "bounds": CORRELATION}
    parts = []
    for name, stream in attention.items():  # the largest average cosine over blocks must lie below the margin
        cosines = [row.quantity for row in stream.blocks("average_cosine").values()]
        largest = combine(cosines, lambda values: max(values) if all(map(math.isfinite, values)) else math.nan)
        parts.append(Part.of(f"{_LARGEST}{name}", largest, looks=routes * len(attention), **more))
    if without:
        sides = (without.values(), attention.values())
        parts.append(difference(_WITHOUT, *sides, margin=-DIFFERENCE_MARGIN, looks=routes))
    models = [len({stream.model for stream in side.values()}) for side in (attention, without)]
    few = ""  # why the table has too few models to decide
    if models[0] < FEWEST_WITH or models[1] < FEWEST_WITHOUT:
        few = f"it takes {FEWEST_WITH} trained models with attention and {FEWEST_WITHOUT} without any, and the table "
        few += f"has {models[0]} and {models[1]}"
    details: dict[str, Any] = {"models": {"attention": list(attention), "without attention": list(without)}}
    details["ends"] = {name: stream.step for name, stream in found.items()}
    details |= {"missing": True} if sum(models) < 2 else {}
    unknown = [name for name, stream in found.items() if not stream.run.learned(stream.step)]
    words = "learned anything is not known, since the table has no loss of the first and the last step"
    notes = [f"whether {listed(unknown)} {words}" if unknown else "", RELU if without else "", uncounted_note(study)]
    settle = functools.partial(_either, few=few)
    note = "; ".join(filter(None, notes))
    return Finding(parts, _either_sentence, details, settle=settle, scope="for these models", note=note)


def _either(parts: dict[str, Part], *, few: str) -> dict[str, Part]:
    """Only the better route is needed; with too few models it is undecided."""
    best = _best(list(parts.values()))
    described = {name: replace(part, needed=False) for name, part in parts.items()}
    return {**described, best.name: replace(best, needed=True, reason=few or best.reason)}


def _best(parts: Sequence[Part]) -> Part:
    """The part that exceeds its margin most clearly, or fails least."""
    order = {"holds": 2, "undecided": 1, "fails": 0}
    return max(parts, key=lambda p: (order[p.status], p.lead if math.isfinite(p.lead) else -math.inf))


def _either_sentence(parts: Parts, status: Status, part: Part) -> str:
    stacks = [p for name, p in parts.items() if name.startswith(_LARGEST)]
    lowest = _best([replace(p, reason="") for p in stacks])
    text = f"of {len(stacks)} stack{'s' if len(stacks) > 1 else ''} with attention "
    text += f"{lowest.name.removeprefix(_LARGEST)} comes closest to isotropy, with an average cosine of "
    text += f"{span(lowest)} at its most anisotropic block, "
    text += f"{_SIDES[lowest.status]} the {ANISOTROPIC} from which it counts as anisotropic"
    second = parts.get(_WITHOUT)
    if second is None or not second.measured:
        return text
    words = f"{span(second)} higher" if second.effect >= 0 else f"{span(-second)} lower"
    text += f"; in models without attention the average cosine over blocks is {words} than in those with it, "
    return text + _SECOND_ROUTE[replace(second, reason="").status]


_SIDES: dict[Status, str] = {"holds": "short of", "fails": "beyond", "undecided": "which may lie on either side of"}
_SECOND_ROUTE: dict[Status, str] = {
    "holds": f"so they are at least as anisotropic, to within {DIFFERENCE_MARGIN}",
    "fails": f"so they are less anisotropic by more than {DIFFERENCE_MARGIN}",
    "undecided": f"which may or may not be within {DIFFERENCE_MARGIN}",
}
