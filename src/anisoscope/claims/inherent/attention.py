"""Claims about queries and keys over training: they drift in parallel, and attention becomes sharper.

Notation
    ρ      Spearman's correlation of a quantity with the training step in each layer, averaged over layers
    |c|    |cos(mean q, mean k)| of a head, mean over the heads of a layer
    d      width of a head; two random directions have |cos| = √(2/(πd)) on average. Averaging rotated vectors over
           positions cancels the fast rotary channels, so this holds for d channels only before rotation
The value of a layer is the mean over its heads. Intervals are the jackknife over context folds: they cover variation
over contexts, not over trainings. Steps of one run are not independent: a trend that a walk without direction has too
often (`claims.engine.walk`; all layers turn together) is left open for one run, and three seeds answer it.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from anisoscope.claims.engine import evidence
from anisoscope.claims.engine.claim import CORRELATION, Finding, Part, Parts, Sentence, claim
from anisoscope.claims.engine.evidence import BlockStack, Cell, Missing, NotHere, block_mean, stacks, steps_of
from anisoscope.claims.engine.walk import Walk, rank_correlations
from anisoscope.claims.inherent.drift import SOURCE
from anisoscope.results.quantity import Quantity, combine, combine_folds, correlate, mean

TREND_MARGIN = 0.5
RISE_MARGIN = 0.05  # a twentieth of the way from even attention to a single key
FEWEST_STEPS = 5  # fewer steps are too often monotone by chance
_QUERY, _KEY, _ALIGNED, _RANDOM = "mean query", "mean key", "alignment", "beyond random directions"
_BEFORE = "before rotation: "
_HOW = "sweep or watch a training with --preset attention"
_ROTATED = "it rotates its queries and keys, whose random directions are known before rotation only (measure "
_ROTATED += "query_unrotated and key_unrotated too, as --preset attention does)"
_ROTARY = (  # prefixes of model classes with rotary positions
    *("Llama", "GPTNeoX", "GPTJ", "CodeGen", "Mistral", "Mixtral", "Ministral", "Qwen", "Gemma", "Phi", "Starcoder2"),
    *("StableLm", "Falcon", "Olmo", "ModernBert", "EuroBert", "NomicBert", "RoFormer", "Esm", "Cohere", "Granite"),
    *("SmolLM3", "Deepseek", "Glm", "Helium", "JetMoe", "Persimmon", "Exaone", "GptOss", "Moonshine"),
)
Course = dict[Cell, Quantity]
_TOLD = {_QUERY: "‖mean q‖", _KEY: "‖mean k‖", _ALIGNED: "|cos(mean q, mean k)|"}
_DECIDING = {
    _QUERY: "the mean query",
    _KEY: "the mean key",
    _ALIGNED: "the cosine between them",
    _RANDOM: "the lead over random directions",
}
_SHARP = {"attention_sharpness": "sharpness", "attention_max": "mean row maximum"}
_SHARPER, _ENTROPY, _NO_FIRST, _RISE = "sharpness", "entropy", "without the first key", "size of the rise"


@claim(of=stacks, source=SOURCE, metrics=("qk_cosine", "drift"), margin=TREND_MARGIN, about="training")
def queries_and_keys_drift_together(stack: BlockStack) -> Finding:
    """Over training the mean query and the mean key grow and turn parallel or opposite to each other.

    Spearman's correlation with the step of ‖mean q‖, of ‖mean k‖ and of |cos(mean q, mean k)|, each beyond .5.

    In each layer, of the mean over its heads; the mean over layers is judged, over five steps at least. At the last
    step |cos| must also lie beyond √(2/(πd)), the mean for random directions in the width d of a head, by more than as
    many random directions as there are keys reach by luck (1.96 of their standard errors). Queries and keys as they
    meet, after rotation; before rotation is told beside where it was measured. The lead over random directions is taken
    before rotation: after it the mean over positions keeps only slow channels, in which random directions are more
    parallel than d says (|cos| .15 instead of .10 for 64 channels and 512 positions). A model known to rotate that was
    measured after rotation alone stays undecided, and so does a trend that steps whose changes go up or down by chance
    have too often (p > .02 of all choices of their signs). Margins are ours.
    """
    courses = _courses(stack, "")
    try:
        unrotated = _courses(stack, "_unrotated")
    except Missing:
        unrotated = {}
    parts = [_trend_part(name, course) for name, course in courses.items()]
    parts.append(_random_part(stack, unrotated or courses, "_unrotated" if unrotated else ""))
    others = [_trend_part(f"{_BEFORE}{name}", course, needed=False) for name, course in unrotated.items()]
    aspects: dict[str, tuple[str, ...]] = {"growth": (_QUERY, _KEY), "parallel": (_ALIGNED, _RANDOM)}
    aspects |= {"before rotation": tuple(part.name for part in others)} if others else {}
    steps, layers = steps_of(courses[_ALIGNED]), sorted({cell.layer for cell in courses[_ALIGNED]})
    parts += Part.describe_all({"at the end": block_mean(courses[_ALIGNED], steps[-1])})

    def sentence(parts: Parts, part: Part) -> str:
        results = [f"{words} at {parts[name]}" for name, words in _TOLD.items() if parts[name].measured]
        text = f"over {len(steps)} steps the rank correlation with the step is {', '.join(results)}"
        text += f", and at step {steps[-1]} |cos| is {parts['at the end']}"
        random = parts[_RANDOM]
        text += f", {random} beyond that of random directions" if random.measured else ""
        text += " (before rotation)" if random.measured and unrotated else ""
        return f"{text}; what decides is {_DECIDING[part.name]}, {part.outcome}"

    by_layer = [{"layer": n, **{name: _trend(c, [n]).value for name, c in courses.items()}} for n in layers]
    return _over_training([*parts, *others], sentence, courses, aspects=aspects, layers=by_layer)


def _over_training(
    parts: list[Part],
    sentence: Sentence,
    courses: Mapping[str, Course],
    *,
    aspects: Any,
    **more: Any,
) -> Finding:
    """The finding with its courses."""
    last = steps_of(next(iter(courses.values())))[-1]
    details = {"step": last, "courses": {name: evidence.step_records(course) for name, course in courses.items()}}
    return Finding(parts, sentence, {**details, **more}, aspects=aspects)


def _courses(stack: BlockStack, suffix: str) -> dict[str, Course]:
    """‖mean q‖, ‖mean k‖ and |c| at the steps and layers that all three have."""
    query, key = (_course(replace(stack, kind=f"{kind}{suffix}"), "drift") for kind in ("query", "key"))
    aligned = _alignment(stack, f"query{suffix}")
    for readings, words in ((query, "drift at queries"), (key, "drift at keys"), (aligned, "qk_cosine by head")):
        if not readings:
            raise NotHere(words, _HOW)
    return _shared({_QUERY: query, _KEY: key, _ALIGNED: aligned})


def _course(stack: BlockStack, metric: str, **options: Any) -> Course:
    return {cell: row.quantity for cell, row in stack.blocks(metric, **options).items()}


def _alignment(stack: BlockStack, kind: str) -> Course:
    """|c| of every layer and step: the absolute value is taken per head, since heads may be parallel or opposed.

    Only heads with a value at every step are averaged, so that every mean is over the same heads.
    """
    found = {c: r for c, r in stack.sites("qk_cosine", heads=True).items() if c.kind == kind and c.layer > 0}
    steps = len({cell.step for cell in found})
    seen = Counter((cell.layer, cell.head) for cell in found)
    heads: dict[Cell, list[Quantity]] = {}
    for cell, row in found.items():
        if seen[cell.layer, cell.head] == steps:
            heads.setdefault(cell._replace(head=None), []).append(row.quantity)
    return {cell: combine(parts, lambda values: sum(map(abs, values)) / len(values)) for cell, parts in heads.items()}


def _shared(courses: Mapping[str, Course]) -> dict[str, Course]:
    """The courses restricted to common steps and layers; raises `Missing` with fewer than five steps."""
    evidence.need_series(next(iter(courses.values())), fewest=FEWEST_STEPS)
    layers, steps = evidence.shared_steps(courses.values())
    if len(steps) < FEWEST_STEPS:
        raise Missing(f"{FEWEST_STEPS} steps with a number at the same layers", f"there are {len(steps)}")
    kept = {(layer, step) for layer in layers for step in steps}
    return {name: {c: q for c, q in course.items() if (c.layer, c.step) in kept} for name, course in courses.items()}


def _trend(course: Course, layers: Sequence[int] | None = None) -> Quantity:
    """ρ averaged over layers, with its leave-one-fold-out values; no interval without folds."""
    chosen = sorted({cell.layer for cell in course} if layers is None else layers)
    rows = [sorted((cell for cell in course if cell.layer == layer), key=Cell.order) for layer in chosen]
    times = [[float(cell.step or 0) for cell in row] for row in rows]

    def statistic(values: Sequence[float]) -> float:
        rest = iter(values)
        trends = [correlate(time, [next(rest) for _ in time], "spearman") for time in times]
        return sum(trends) / len(trends)

    return combine_folds([course[cell] for row in rows for cell in row], statistic)


def _trend_part(name: str, course: Course, *, falls: bool = False, needed: bool = True) -> Part:
    trend = -_trend(course) if falls else _trend(course)
    more = {} if math.isfinite(trend.value) else {"reason": f"the {name} is the same at every step of a layer"}
    part = Part.of(name, trend, margin=TREND_MARGIN, needed=needed, bounds=CORRELATION, **more)
    layers, steps = evidence.shared_steps([course])
    values = {(cell.layer, cell.step): quantity.value for cell, quantity in course.items()}
    table = np.array([[values[layer, step] for step in steps] for layer in layers]) * (-1 if falls else 1)
    order = functools.partial(rank_correlations, np.arange(len(steps), dtype=float))
    return part.against(Walk.of(table, order, "steps"))


def _random_part(stack: BlockStack, courses: Mapping[str, Course], suffix: str) -> Part:
    """|c| at the last step minus its mean for random directions; the margin is 1.96 standard errors of that mean."""
    course, entry = courses[_ALIGNED], stack.run.entry
    last = steps_of(course)[-1]
    # count key heads of all layers where the table has single heads; grouped queries share a key head
    cells = {**stack.sites("qk_cosine", heads=True), **stack.sites("drift", heads=True)}
    queries, keys = (
        {(c.layer, c.head) for c in cells if (c.step, c.kind) == (last, f"{kind}{suffix}") and c.layer > 0}
        for kind in ("query", "key")
    )
    heads = len({head for _, head in queries})
    recorded, total = entry.get("head_width"), entry.get("width")  # from run.json, else width / heads
    width = total // heads if isinstance(total, int) and heads and total >= heads else None
    width = recorded if isinstance(recorded, int) and recorded > 0 else width
    rotates = str(entry.get("architecture") or "").startswith(_ROTARY)
    reason = "the width of a head is not known, so that it cannot be told from random directions"
    if width is None or (not suffix and rotates):
        return Part.absent(_RANDOM, reason if width is None else _ROTATED, margin=TREND_MARGIN)
    margin = 1.96 * math.sqrt((1 - 2 / math.pi) / width / min(len(queries), len(keys) or len(queries)))
    level = block_mean(course, last) - Quantity.constant(random_cosine(width))
    return Part.of(_RANDOM, level, margin=margin, guard=True, bounds=CORRELATION)


def random_cosine(width: int) -> float:
    """The mean |cos| of two random directions, √(2/(πd)).

    >>> round(random_cosine(64), 4)
    0.0997
    """
    return math.sqrt(2 / (math.pi * width))


@claim(
    of=stacks,
    source=SOURCE,
    metrics=("attention_sharpness", "attention_max", "attention_entropy"),
    margin=TREND_MARGIN,
    about="training",
)
def attention_sharpens(stack: BlockStack) -> Finding:
    """Attention becomes sharper in training: its largest weight grows and its entropy falls.

    Spearman's correlation with the step of attention_sharpness and, turned round, of attention_entropy; beyond .5.

    In each layer, of the mean over its heads; the mean over layers is judged, over five steps at least. Where sharpness
    was not measured the mean row maximum (attention_max) takes its place. It must also rise by more than .05 from the
    first step to late in training (the mean over the last third of the steps), a twentieth of the way from even
    attention to a single key: an order of steps can be perfect where nothing happens (.0012 to .0014 was such a course,
    and all that was looked at when the .05 was set). A trend that steps whose changes go up or down by chance have too
    often (p > .02 of all choices of their signs) stays open. Without the first key, which may be a mere sink, it is
    told beside where that was measured. Margins are ours.
    """
    scores = replace(stack, kind="scores")
    first = next((name for name in _SHARP if scores.blocks(name)), None)
    if first is None:
        raise NotHere("attention_sharpness or attention_max", _HOW)
    entropy = _course(scores, "attention_entropy")
    courses = _shared({first: _course(scores, first)} | ({"attention_entropy": entropy} if entropy else {}))
    parts = [_trend_part(_SHARPER, courses[first])]
    if entropy:
        parts.append(_trend_part(_ENTROPY, courses["attention_entropy"], falls=True))
    else:
        parts.append(Part.absent(_ENTROPY, Missing("attention_entropy", _HOW), margin=TREND_MARGIN))
    others = _without_first(scores, first)
    steps = steps_of(courses[first])
    start = block_mean(courses[first], steps[0])
    end = mean([block_mean(courses[first], step) for step in evidence.late(steps)])
    parts.append(Part.of(_RISE, end - start, margin=RISE_MARGIN, guard=True, bounds=CORRELATION))
    parts += Part.describe_all({"at the start": start, "late": end})

    def sentence(parts: Parts, part: Part) -> str:
        text = f"from step {steps[0]} to the last third of {len(steps)} steps up to {steps[-1]} the {_SHARP[first]} of "
        text += f"attention goes from {parts['at the start'].number} to {parts['late']}, by {parts[_RISE]}"
        told = {_SHARPER: "it", _ENTROPY: "minus the entropy"}
        results = [f"{parts[name]} for {words}" for name, words in told.items() if parts[name].measured]
        text += f"; the rank correlation with the step is {' and '.join(results)}" if results else ""
        text += f", and what decides is the {part.name}, {part.outcome}"
        rest = parts.get(f"{_NO_FIRST}: {_SHARPER}")
        return text + (f" (without the first key {rest})" if rest is not None and rest.measured else "")

    aspects = {_NO_FIRST: tuple(part.name for part in others)} if others else {}
    return _over_training([*parts, *others], sentence, courses, aspects=aspects)


def _without_first(scores: BlockStack, first: str) -> list[Part]:
    """The same measures without the first key, if both were measured so."""
    names = {_SHARPER: first, _ENTROPY: "attention_entropy"}
    given = {word: _course(scores, metric, first=0) for word, metric in names.items()}
    try:
        courses = _shared(given) if all(given.values()) else {}
    except Missing:
        return []
    parts = [_trend_part(word, c, falls=word == _ENTROPY, needed=False) for word, c in courses.items()]
    return [replace(part, name=f"{_NO_FIRST}: {part.name}") for part in parts]
