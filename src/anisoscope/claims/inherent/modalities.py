"""Claims about models of every modality, with attention and without, and the table that compares them.

Notation
    A      average cosine, mean over the blocks of a stack at its last measured step
All models that are not convolutional count as models with attention. Hybrids (CvT) belong to the modality convolution,
as in the literature, but do not count as models without attention. Stages that end in a ReLU (ResNet, RegNet, …) have
rows without negative coordinates, whose average cosine is high whatever a model has learned: where convolution is
compared with attention, models known to be of that kind do not count.
The margin of .1 for "anisotropic" is our choice: rows without a common direction have A near 0 in any modality.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from anisoscope.claims.engine.claim import CORRELATION, Finding, Part, Parts, claim, descriptive, judge
from anisoscope.claims.engine.correlation import FEWEST_CLUSTERS, pooled_error, welch
from anisoscope.claims.engine.evidence import NotHere, Study, counted, listed, whole
from anisoscope.claims.inherent.drift import SOURCE, Stream, needed_streams, stream_record, table_streams
from anisoscope.results.modality import MODALITIES, attends
from anisoscope.results.quantity import Quantity, among, combine, mean, t_interval, t_quantile, t_tail
from anisoscope.results.query import Table

ANISOTROPIC = 0.1
# keys of `stream_record` that the table leaves out
_ELSEWHERE = {
    "n",
    "p_note",
    "status",
    "near_identity",
    "near_identity_note",
    "points",
    "explained_low",
    "explained_high",
}
BEYOND = 0.2  # average cosine above which a block counts in `share_beyond`
DIFFERENCE_MARGIN = 0.1
_GAP, _IMAGES = "attention minus convolution", "vision minus convolution"
_DIFFERENCES = (-2.0, 2.0)  # bounds of a difference of two cosines
_SCATTER = ": half-width over models"
FEWEST_SIDE = 2  # models needed on either side of a comparison: any two models differ
MORE = "profile models of other modalities too and give all runs to `anisoscope claims`"


def modality_table(table: Table) -> list[dict[str, Any]]:
    """One record per stack, model and seed: how anisotropic it is, at which block, and whether drift explains it.

    `share_beyond` is the share of blocks with an average cosine beyond .2.
    """
    order = {modality: i for i, modality in enumerate(MODALITIES)}
    return sorted(
        map(_record, table_streams(table)),
        key=lambda r: (order.get(r["modality"], len(order)), r["subject"], str(r["seed"])),
    )


def _record(stream: Stream) -> dict[str, Any]:
    correlation = stream_record(stream)
    cells = sorted(stream.blocks("average_cosine").items(), key=lambda item: item[0].layer)
    numbers = {cell.layer: reading.value for cell, reading in cells}
    depths = {cell.layer: reading.depth for cell, reading in cells}
    layers = list(numbers)
    middle = layers[(len(layers) - 1) // 2]
    top, bottom = max(layers, key=numbers.__getitem__), min(layers, key=numbers.__getitem__)
    average = Part.of("", stream.mean(), bounds=CORRELATION)
    drifts = {cell.layer: reading.value for cell, reading in stream.blocks("drift").items()}
    found = {name: value for name, value in correlation.items() if name not in _ELSEWHERE}
    found |= {"layers": len(layers), "middle": numbers[middle], "middle_layer": middle}
    found |= {"max": numbers[top], "max_layer": top, "max_depth": depths[top]}
    found |= {"min": numbers[bottom], "min_layer": bottom, "mean": sum(numbers.values()) / len(numbers)}
    found |= {"mean_low": average.low, "mean_high": average.high, "drift": drifts.get(middle, math.nan)}
    found["share_beyond"] = sum(value > BEYOND for value in numbers.values()) / len(numbers)
    return {**found, "explained_by_drift": {"holds": "yes", "fails": "no"}.get(str(correlation["status"]), "open")}


@claim(of=whole("modalities"), source=SOURCE, metrics=("average_cosine",), margin=ANISOTROPIC, about="training")
def anisotropic_in_every_modality(study: Study) -> Finding:
    """Representations are anisotropic in every modality: tokens, characters, speech, images.

    The average cosine over the blocks, mean over the models of each modality; every modality must lie beyond .1.

    The margin is ours. At the last measured step. The interval of a modality is over contexts where it has one model,
    spans both where it has two, and is over models (t) from three on, also where seeds are pooled; it speaks for the
    models that it names.
    Two of the five modalities are needed at least, of which convolution is one, and how many were seen is told; how it
    stands without convolution, and in every single model, is told beside, and models that are not anisotropic are
    named. Models with untrained weights do not count, nor do those that did not learn or were shown a text of unknown
    tokens.
    """
    found, note = needed_streams(study)
    seen = {stream.modality for stream in found.values()}
    present = [*(m for m in MODALITIES if m in seen), *sorted(seen - set(MODALITIES))]
    if len(present) < 2:
        raise NotHere("second modality", MORE)
    by_modality = [_modality_parts(m, [s for s in found.values() if s.modality == m]) for m in present]
    parts = [part for some in by_modality for part in some]
    more: dict[str, Any] = {"margin": ANISOTROPIC, "needed": False, "bounds": CORRELATION}
    single = [Part.of(f"{s.modality}: {name}", s.mean(), **more) for name, s in found.items()]
    aspects = {"every model": tuple(part.name for part in single)}
    aspects["modalities with attention"] = tuple(filter(attends, present))
    members = {m: [name for name, s in found.items() if s.modality == m] for m in present}
    sentence = functools.partial(_modality_sentence, members=members)
    details = {"modalities": members, "ends": {name: stream.step for name, stream in found.items()}}
    settle = functools.partial(_all_widened, names=present)
    about: dict[str, Any] = {"aspects": aspects, "scope": "for these models", "note": note, "settle": settle}
    return Finding([*parts, *single], sentence, details, **about)


def _modality_parts(modality: str, found: Sequence[Stream]) -> list[Part]:
    """The part for one modality: the mean over its models, with an interval that includes variation between models."""
    means = list(model_means(found).values())
    part = Part.of(modality, mean(means), margin=ANISOTROPIC, bounds=CORRELATION)
    return [_over_models(part, means), *_scatter(modality, means)]


def _scatter(name: str, means: Sequence[Quantity]) -> list[Part]:
    """The half-width over models of a mean, which `_widened` keeps where seeds are pooled; none of one model."""
    values = [quantity.value for quantity in means]
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return []
    half = t_interval(values)[0] if len(values) >= FEWEST_CLUSTERS else (max(values) - min(values)) / 2
    return Part.describe_all({f"{name}{_SCATTER}": half})


def _all_widened(parts: dict[str, Part], *, names: Sequence[str]) -> dict[str, Part]:
    """The parts, those of the names with intervals at least as wide as the scatter over models makes them."""
    return {**parts, **{name: _widened(parts, name) for name in names if name in parts}}


def _over_models(part: Part, means: Sequence[Quantity], *, looks: int = 1) -> Part:
    """A mean over models with an interval that includes their variation: both of two, t from three on."""
    if len(means) < 2 or not math.isfinite(part.low):
        return part
    if len(means) < FEWEST_CLUSTERS:
        ends = list(zip(*(quantity.interval_among(looks) for quantity in means), strict=True))
        return replace(part, low=min(part.low, *ends[0]), high=max(part.high, *ends[1]))
    half = t_interval([quantity.value for quantity in means], looks=looks)[0]
    low, high = min(part.low, part.effect - half), max(part.high, part.effect + half)
    return replace(part, low=low, high=high, degrees=float(len(means) - 1))


def model_means(found: Iterable[Stream]) -> dict[str, Quantity]:
    """By model: the average cosine over blocks, averaged over its stacks."""
    groups: dict[str, list[Quantity]] = {}
    for stream in found:
        groups.setdefault(stream.model, []).append(stream.mean())
    return {model: mean(parts) for model, parts in groups.items()}


def _modality_sentence(parts: Parts, part: Part, *, members: Mapping[str, Sequence[str]]) -> str:
    partly = [modality for modality in members if modality not in parts]  # of seeds that are pooled only some have it
    members = {modality: names for modality, names in members.items() if modality in parts}
    models = {name.split(", ")[0] for names in members.values() for name in names}
    known = sum(m in MODALITIES for m in members)
    text = f"in {counted(len(models), 'model')} of {known} of {len(MODALITIES)} modalities the average cosine over "
    text += "blocks is "
    text += listed([f"{parts[m]} in {m} ({_averaged(names)})" for m, names in members.items()])
    text += f"; what decides is {part.name}, {part.outcome}"
    text += f"; {listed(partly)} {'were' if len(partly) > 1 else 'was'} not measured in every seed" if partly else ""
    single = {name.split(": ", 1)[1]: p for name, p in parts.items() if ": " in name and not name.endswith(_SCATTER)}
    for state, words in (("fails", "not anisotropic"), ("undecided", "open")):
        names = [f"{name} with {p}" for name, p in single.items() if p.status == state]
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
    of=whole("attention and convolution"),
    source=SOURCE,
    metrics=("average_cosine",),
    margin=DIFFERENCE_MARGIN,
    about="training",
)
def convolution_differs(study: Study) -> Finding:
    """Convolutional models differ in anisotropy from models with attention.

    The average cosine over blocks of models with attention minus that of convolutional ones, in either direction.

    The difference of the means over models must lie beyond .1 (ours); fails where it surely lies within. Interval:
    over the models of each side, by Welch's or by the common variance of both sides, whichever is wider (two models
    may be alike by luck), also where seeds are pooled; two models on each side are needed, since any two differ.
    Vision minus convolution, which read the same kind of data, is told beside. Hybrids count as convolutions;
    models with untrained weights do not count, nor do those whose stages end in a ReLU: rows without negative
    coordinates have a high average cosine whatever a model has learned.
    """
    found, uncounted = needed_streams(study)
    convolution, left = _without_relu([s for s in found.values() if not attends(s.modality)])
    attention = [s for s in found.values() if attends(s.modality)]
    for side, words in ((convolution, f"convolutional model{left}"), (attention, "model with attention")):
        if not side:
            raise NotHere(f"{words} with average_cosine at blocks", MORE)
    parts = difference(_GAP, attention, convolution, margin=DIFFERENCE_MARGIN)
    media = {MODALITIES[s.modality].medium for s in convolution}
    same_data = [s for s in attention if s.modality in MODALITIES and MODALITIES[s.modality].medium in media]
    if same_data:
        images = difference(_IMAGES, same_data, convolution, margin=DIFFERENCE_MARGIN)
        parts += [replace(part, needed=False) for part in images]
    sides = {"attention": model_means(attention), "convolution": model_means(convolution)}
    parts += Part.describe_all({name: mean(list(means.values())).value for name, means in sides.items()})
    details: dict[str, Any] = {"models": {n: {m: q.value for m, q in means.items()} for n, means in sides.items()}}
    details["counts"] = counts = {name: len(means) for name, means in sides.items()}
    details["ends"] = {name: stream.step for name, stream in found.items()}
    several = min(counts.values()) >= FEWEST_SIDE
    scope = "over {attention} models and {convolution}".format(**counts) if several else "for these models"
    few = "" if several else f"it takes {FEWEST_SIDE} models on each side, since any two differ, and there are "
    few += "" if several else "{attention} with attention and {convolution} of convolutions".format(**counts)
    note = "; ".join(filter(None, (f"of the convolutions{left}" if left else "", uncounted)))

    def sentence(parts: Parts, part: Part) -> str:
        one, two = (parts[name] for name in sides)
        more, less = sides if one.effect >= two.effect else reversed(sides)
        text = f"the average cosine over blocks is {one.number} in {counted(counts['attention'], 'model')} with "
        text += f"attention and {two.number} in {counted(counts['convolution'], 'model')} of convolutions, "
        text += f"{parts[_GAP]} higher with {more} than with {less}, {part.outcome}"
        images = parts.get(_IMAGES)
        return text + (f" (vision minus convolution is {images})" if images and images.measured else "")

    return Finding(parts, sentence, details, settle=_oriented, scope=scope, note=note, left_open=few)


def _without_relu(found: Sequence[Stream]) -> tuple[list[Stream], str]:
    """Those streams whose stages are not known to end in a ReLU, and a phrase on the others."""
    rectified = [stream.subject for stream in found if stream.rectified]
    left = f" without {listed(rectified)}, whose stages end in a ReLU" if rectified else ""
    return [stream for stream in found if not stream.rectified], left


def difference(name: str, one: Iterable[Stream], two: Iterable[Stream], *, margin: float, looks: int = 1) -> list[Part]:
    """The part for a difference of means over models; interval over models, or contexts if a side has one model.

    With it comes the half-width over models, which `_widened` keeps where seeds are pooled: seeds of the same models
    do not say what other models would do.
    """
    more: dict[str, Any] = {"margin": margin, "looks": looks, "bounds": _DIFFERENCES}
    sides = [list(model_means(side).values()) for side in (one, two)]
    gap, error, degrees = welch(*([q.value for q in side] for side in sides))
    if not error > 0:  # one model on a side, or exactly equal models
        # different models may read different contexts, so their folds cannot be paired
        apart = [mean(side).unpaired() for side in sides]
        return [Part.of(name, apart[0] - apart[1], **more)]
    # two models may be alike by luck, which makes Welch's interval that of the other side: the wider one counts
    values = [[quantity.value for quantity in side] for side in sides]
    ways = [(error, degrees), pooled_error(*values)]
    error, degrees = max(ways, key=lambda way: t_quantile(way[1], among(looks)) * way[0])
    half = t_quantile(degrees, among(looks)) * error
    p = t_tail(gap, error, degrees=degrees)
    return [
        Part(name, gap, gap - half, gap + half, p=p, degrees=degrees, **more),
        *Part.describe_all({f"{name}{_SCATTER}": half}),
    ]


def _widened(parts: Parts, name: str) -> Part:
    """A difference with an interval at least as wide as the scatter over models makes it."""
    part, scatter = parts[name], parts.get(f"{name}{_SCATTER}")
    if scatter is None or not scatter.effect > (part.high - part.low) / 2:
        return part
    return replace(part, low=part.effect - scatter.effect, high=part.effect + scatter.effect)


def _oriented(parts: dict[str, Part]) -> dict[str, Part]:
    """Orient the difference in its observed direction; p is two-sided."""
    part = _widened(parts, _GAP)
    part = -part if part.effect < 0 else part
    p = min(1.0, 2 * min(part.p, 1 - part.p)) if math.isfinite(part.p) else part.p
    return {**parts, _GAP: replace(part, p=p)}


# The counter-claim. The best of K stacks with attention is chosen, and the better of two routes, so the intervals are
# simultaneous (Bonferroni: level 1 − .05/2K for each stack, 1 − .05/2 for the second route).

FEWEST_WITH, FEWEST_WITHOUT = 3, 1  # trained models needed with attention and without
_WITHOUT, _ITSELF = "without attention", "without attention: anisotropic itself"
_LARGEST = "largest cosine: "  # over the blocks of a stack
_LONE = "one model without attention says little of others: any two models differ"


@claim(
    of=whole("with and without attention"),
    source="the counter-claim to Godey et al. 2024, arXiv:2401.12143; after Machina & Mercer 2024, who found large "
    "Pythia models nearly isotropic",
    metrics=("average_cosine",),
    margin=ANISOTROPIC,
    about="training",
)
def not_inherent(study: Study) -> Finding:
    """Anisotropy is not inherent to attention: a model with attention does without it, or models without attention are
    as anisotropic.

    Two routes on the same table; it holds by either, and fails only where both fail.

    First, a stack with attention whose average cosine stays below .1 at every block (the largest of them counts).
    Second, models without any attention whose average cosine over blocks lies beyond .1, so that they are anisotropic
    at all, and is not more than .1 below that of the models with it (interval over models); models whose stages end in
    a ReLU do not count, since that alone makes a cosine high. The best of many is chosen, so the intervals hold for all
    stacks and the second route at once (Bonferroni). So that it can fail as well as hold it needs three trained models
    with attention and one without any, and its second route two. Models that did not learn do not count: before
    training almost any is isotropic.
    """
    found, uncounted = needed_streams(study)
    attention = {name: s for name, s in found.items() if s.attends}
    others, left = _without_relu([s for s in found.values() if not s.attends])
    without = {stream.subject: stream for stream in others}
    if not attention:
        raise NotHere(f"{FEWEST_WITH} trained models with attention that have average_cosine at blocks", MORE)
    routes = 2 if without else 1
    more: dict[str, Any] = {"margin": ANISOTROPIC, "bounds": CORRELATION}
    parts = []
    for name, stream in attention.items():  # the largest average cosine over blocks must lie below the margin
        cosines = [row.quantity for row in stream.blocks("average_cosine").values()]
        largest = combine(cosines, lambda values: max(values) if all(map(math.isfinite, values)) else math.nan)
        parts.append(Part.of(f"{_LARGEST}{name}", largest, looks=routes * len(attention), below=True, **more))
    if without:
        sides = (without.values(), attention.values())
        parts += difference(_WITHOUT, *sides, margin=-DIFFERENCE_MARGIN, looks=routes)
        means = list(model_means(without.values()).values())
        parts = [
            p if p.name != _WITHOUT else replace(p, reason=_LONE if len(means) < FEWEST_SIDE else "") for p in parts
        ]
        parts.append(_over_models(Part.of(_ITSELF, mean(means), looks=routes, **more), means, looks=routes))
        parts += _scatter(_ITSELF, means)
    models = [len({stream.model for stream in side.values()}) for side in (attention, without)]
    few = ""  # why the table has too few models to decide
    if models[0] < FEWEST_WITH or models[1] < FEWEST_WITHOUT:
        few = f"it takes {FEWEST_WITH} trained models with attention and {FEWEST_WITHOUT} without any, and the table "
        few += f"has {models[0]} and {models[1]}"
    details: dict[str, Any] = {"models": {"attention": list(attention), "without attention": list(without)}}
    details["ends"] = {name: stream.step for name, stream in found.items()}
    details |= {"missing": True} if sum(models) < 2 else {}
    notes = [f"of the models without attention{left}" if left else "", uncounted]
    about: dict[str, Any] = {"left_open": few, "scope": "for these models", "note": "; ".join(filter(None, notes))}
    settle = functools.partial(_best_route, lone=_LONE if models[1] < FEWEST_SIDE else "")
    return Finding(parts, _either_sentence, details, settle=settle, **about)


def _best_route(parts: dict[str, Part], *, lone: str) -> dict[str, Part]:
    """The stack that comes closest to isotropy, or the weaker half of the second route, whichever stands better."""
    routes = [part for name, part in parts.items() if name.startswith(_LARGEST)]
    if _WITHOUT in parts:
        parts = _all_widened(parts, names=(_WITHOUT, _ITSELF))
        second = parts[_WITHOUT]
        parts = {**parts, _WITHOUT: replace(second, reason=second.reason or lone)}
        routes.append(judge([parts[_WITHOUT], parts[_ITSELF]])[1])
    best = max(routes, key=lambda part: part.standing)
    return {**descriptive(parts), best.name: replace(best, needed=True)}


def _either_sentence(parts: Parts, part: Part) -> str:
    stacks = [p for name, p in parts.items() if name.startswith(_LARGEST)]
    lowest = max((replace(p, reason="") for p in stacks), key=lambda stack: stack.standing)
    text = f"of {counted(len(stacks), 'stack')} with attention "
    text += f"{lowest.name.removeprefix(_LARGEST)} comes closest to isotropy, with an average cosine of "
    text += f"{lowest} at its most anisotropic block, "
    text += f"{_SIDES[lowest.status]} the {ANISOTROPIC} from which it counts as anisotropic"
    second = parts.get(_WITHOUT)
    if second is None or not second.measured:
        return text
    words = f"{second} higher" if second.effect >= 0 else f"{-second} lower"
    itself = parts[_ITSELF]
    text += f"; in models without attention the average cosine over blocks is {itself}, {words} than in those with it, "
    return text + _SECOND_ROUTE[judge([replace(second, reason=""), replace(itself, reason="")])[0]]


_SIDES: dict[str, str] = {"holds": "short of", "fails": "beyond", "undecided": "which may lie on either side of"}
_SECOND_ROUTE: dict[str, str] = {
    "holds": f"so they are anisotropic, and at least as much, to within {DIFFERENCE_MARGIN}",
    "fails": f"so they are not anisotropic, or less so by more than {DIFFERENCE_MARGIN}",
    "undecided": f"which may or may not be anisotropic and within {DIFFERENCE_MARGIN}",
}
