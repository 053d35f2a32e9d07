"""Sections on mean queries and keys by head, their paths over training, and the sharpness of attention.

Notation
    q̄, k̄   mean query and mean key of a head; their norms are the drift at query and key, their cosine is qk_cosine
    S, L, H  measured steps, layers, heads; layers may have different numbers of heads, and missing values are NaN
No vectors are stored: two norms and a cosine determine q̄ and k̄ within the plane they span. The page contains these
numbers once, in as much detail as fits, and figures refer to them.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from anisoscope.view import figure
from anisoscope.view.figure import Axis, Figure, Panel, Ref, Series, Switch, Time, brief, choice, sequence, value_axis
from anisoscope.view.page import Controls, Heading, Prose, Ramp, Section, Swatch, Swatches, text
from anisoscope.view.subjects import RunRows, RunView
from anisoscope.view.words import Catalogue, few, number, plural, step_words, strided

PAIRS = {"query": "key", "query_unrotated": "key_unrotated", "cross_query": "cross_key"}
PAIR_WORDS = {"query": "self-attention", "query_unrotated": "self-attention, before rotation"}
PAIR_WORDS |= {"cross_query": "cross-attention"}
SCORES = {"scores": "self-attention", "cross_scores": "cross-attention"}
MEASURES = ("attention_entropy", "attention_sharpness", "attention_max", "first_key_mass", "score_spread")
IN_FILES = ("attention_entropy", "attention_sharpness", "attention_max")
SIZE = 450_000  # limit of the JSON arrays in characters
STEPS = (40, 24, 16, 12, 8, 5, 3, 2, 1)
ENOUGH = 12  # steps are reduced to this number before seeds are dropped
PANELS = 12  # small multiples shown at once; more layers are paged
SCALES = ("one scale for all layers", "each layer on its own scale", "angles alone (of paths: each layer on its own)")
ALIGNED = 0.8  # cosine beyond which the means of a head count as parallel or opposite
CROWDED = 256  # number of heads from which a common scale would make most arrows too short
TALL = 0.62  # height of a cell relative to its width: mean queries never point down
FILES = 4  # models with vector files
Place = tuple[int | None, int, int]  # step, layer, head


@dataclass(frozen=True)
class Plane:
    """Norms of the mean query and the mean key of every head, and their cosine, each [S, L, H]."""

    kind: str
    layers: tuple[int, ...]
    query: np.ndarray
    key: np.ndarray
    cosine: np.ndarray

    def tips(self) -> tuple[np.ndarray, np.ndarray]:
        """The end points of the mean queries in the plane whose first axis is the mean key."""
        cosine = np.clip(self.cosine, -1.0, 1.0)
        return self.query * cosine, self.query * np.sqrt(1 - cosine**2)


@dataclass(frozen=True)
class Spread:
    """A measure of attention over the heads of each layer: mean, minimum, quartiles and maximum, [S, L, 5]."""

    metric: str
    kind: str
    layers: tuple[int, ...]
    values: np.ndarray

    def colour(self, at: int) -> str:
        return sequence(self.layers[at] / max(1, self.layers[-1]))


@dataclass(frozen=True)
class Heads:
    """All per-head numbers of one stack of one model and seed."""

    label: str
    steps: tuple[int | None, ...]
    numbers: dict[tuple[str, str], dict[Place, float]]  # (metric, kind)
    turn: int = 0  # index among the seeds or runs of its model

    @functools.cached_property
    def planes(self) -> list[Plane]:
        """The planes of queries and keys for which both norms and the cosine were measured."""
        found = []
        for kind, other in PAIRS.items():
            names = (("qk_cosine", kind), ("drift", kind), ("drift", other))
            if all(name in self.numbers for name in names):
                layers, (cosine, query, key) = self._arrays(*names)
                found.append(Plane(kind, layers, query, _shared_keys(key, cosine), cosine))
        return found

    @functools.cached_property
    def spreads(self) -> list[Spread]:
        """All measures of attention that were measured per head."""
        found = []
        for kind, metric in itertools.product(SCORES, MEASURES):
            if (metric, kind) in self.numbers:
                layers, (values,) = self._arrays((metric, kind))
                found.append(Spread(metric, kind, layers, _five(values)))
        return found

    def _arrays(self, *names: tuple[str, str]) -> tuple[tuple[int, ...], list[np.ndarray]]:
        """The layers and heads of the first name, and the numbers of each name at them, [S, L, H]."""
        layers = tuple(sorted({layer for _, layer, _ in self.numbers[names[0]]}))
        heads = range(1 + max(head for _, _, head in self.numbers[names[0]]))
        places = [[[(step, layer, head) for head in heads] for layer in layers] for step in self.steps]
        return layers, [
            np.array([[[self.numbers[name].get(at, np.nan) for at in row] for row in block] for block in places])
            for name in names
        ]


def _shared_keys(key: np.ndarray, cosine: np.ndarray) -> np.ndarray:
    """Key norms by query head: with grouped-query attention several query heads share a key head."""
    spread = np.full(cosine.shape, np.nan)
    for i in range(cosine.shape[1]):
        keys, queries = (int(np.isfinite(a[:, i]).any(0).sum()) for a in (key, cosine))
        if keys and queries:
            spread[:, i, :queries] = key[:, i, np.arange(queries) * keys // queries]
    return spread


def _five(values: np.ndarray) -> np.ndarray:
    """Mean, minimum, lower and upper quartile, and maximum over the last axis; NaN without values."""
    known = np.isfinite(values).any(-1)
    found = np.full((*values.shape[:-1], 5), np.nan)
    rows = values[known]
    if len(rows):
        low, first, third, high = np.nanquantile(rows, [0, 0.25, 0.75, 1], axis=-1)
        found[known] = np.stack([np.nanmean(rows, axis=-1), low, first, third, high], axis=-1)
    return found


def head_numbers(runs: Sequence[RunView]) -> list[Heads]:
    """The heads of every stack, model and seed; the first seeds of all models come before further seeds."""
    kinds = [*PAIRS, *PAIRS.values(), *SCORES]
    only = {"head": ..., "metric": ["drift", "qk_cosine", *MEASURES], "kind": kinds, "variant": "", "group": ""}
    rows = RunRows(runs, by=("model", "stack", "seed", "source"), **only)
    turns: dict[tuple[str, str], int] = defaultdict(int)
    found = []
    for subject in rows.subjects:
        numbers: dict[tuple[str, str], dict[Place, float]] = defaultdict(dict)
        for row in rows.of(subject).known():
            numbers[row.metric, row.kind][row.step, row.layer, row.head] = row.value
        steps = {step for part in numbers.values() for step, _, _ in part}
        dated = sorted(step for step in steps if step is not None)
        if dated:  # drop rows without a step if others have one
            numbers = {k: {p: v for p, v in part.items() if p[0] is not None} for k, part in numbers.items()}
        turn = turns[subject.model, subject.stack]
        turns[subject.model, subject.stack] += 1
        found.append(Heads(subject.label, tuple(dated) or (None,), dict(numbers), turn))
    return sorted(found, key=lambda heads: heads.turn)


@dataclass(frozen=True)
class Carried:
    """The heads and steps on the page, and their values as arrays."""

    heads: Sequence[Heads]
    steps: Sequence[int]
    arrays: Mapping[str, Any]
    left_out: Sequence[str]
    over_time: bool

    @property
    def planes(self) -> list[tuple[int, Heads]]:
        return [(i, heads) for i, heads in enumerate(self.heads) if heads.planes]

    @property
    def pairs(self) -> list[str]:
        """The kinds of queries whose planes are there."""
        return [kind for kind in PAIR_WORDS if any(p.kind == kind for _, heads in self.planes for p in heads.planes)]

    @property
    def words(self) -> list[str]:
        return [f"step {step:,}" for step in self.steps] or [""]

    @property
    def omission(self) -> list[Prose]:
        """A paragraph on what was left out."""
        words = "Of single heads the page carries {what}; <code>table.parquet</code> has everything."
        return [Prose(text(words, what=" and ".join(self.left_out)), css="says")] if self.left_out else []


def carried(everyone: Sequence[Heads]) -> Carried | None:
    """The arrays for as many steps and models as fit on a page; further seeds are dropped before steps."""
    there = [heads for heads in everyone if heads.planes or heads.spreads]
    over_time = any(len(heads.steps) > 1 for heads in there)
    if not any(heads.planes for heads in there) and not over_time:
        return None
    if over_time:  # leave out models without a series
        there = [heads for heads in there if heads.steps != (None,)]
    every = sorted({step for heads in there for step in heads.steps if step is not None})
    for shown, most in _choices(there, len(every)):
        steps = few(every, most)
        arrays = {k: v for i, heads in enumerate(shown) for k, v in _arrays(i, heads, steps, over_time).items()}
        if len(json.dumps(arrays)) <= SIZE:
            break
    left_out = [f"{len(steps)} of {len(every)} steps"] if len(steps) < len(every) else []
    left_out += [f"{len(shown)} of {len(there)} models and seeds"] if len(shown) < len(there) else []
    return Carried(shown, steps, arrays, left_out, over_time)


def _choices(everyone: Sequence[Heads], steps: int) -> Iterator[tuple[Sequence[Heads], int]]:
    """Candidate selections in decreasing size: all seeds with enough steps, then fewer seeds, steps and models."""
    for turn in range(max(heads.turn for heads in everyone), -1, -1):
        shown = [heads for heads in everyone if heads.turn <= turn]
        yield from ((shown, most) for most in STEPS if most >= min(steps, ENOUGH) or not turn)
    while len(shown) > 1:
        shown = shown[: len(shown) // 2]
        yield from ((shown, most) for most in STEPS)


def _arrays(i: int, heads: Heads, steps: Sequence[int], over_time: bool) -> dict[str, Any]:
    """Norms, cosines and end points of every plane, length units for each scale, and the spreads, as lists by step."""
    times = [heads.steps.index(step) if step in heads.steps else -1 for step in steps] or [0]
    found: dict[str, Any] = {}
    for plane in heads.planes:
        name, (across, up) = f"qk/{i}/{plane.kind}", plane.tips()
        sine = np.sqrt(1 - np.clip(plane.cosine, -1, 1) ** 2)
        columns = {"q": plane.query, "k": plane.key, "c": plane.cosine, "s": sine, "x": across, "y": up}
        found |= {f"{name}/{part}": _nested(array, times) for part, array in columns.items()}
        longest = np.fmax(np.nan_to_num(plane.query), np.nan_to_num(plane.key)).max(-1) + 1e-30
        units = [np.broadcast_to(0.46 / longest.max(-1, keepdims=True), longest.shape), 0.46 / longest]
        found[f"{name}/unit"] = [_nested(unit, times) for unit in units]
        reach = [np.broadcast_to(longest.max(), longest.shape[1:]), longest.max(0), longest.max(0)]
        for part, low in (("wide", -1.08), ("high", -0.1)):
            found[f"{name}/{part}"] = [[[low * r, 1.08 * r] for r in ends.tolist()] for ends in reach]
    for spread in heads.spreads if over_time else ():
        found[f"sharp/{i}/{spread.kind}/{spread.metric}"] = _nested(spread.values, times, digits=5)
    return found


def _nested(array: np.ndarray, times: Sequence[int], *, digits: int = 3) -> Any:
    """Nested lists by step, layer and head, None for NaN; `digits` because entropies near 1 need more than lengths."""

    def short(value: Any) -> Any:
        if isinstance(value, list):
            return [short(part) for part in value]
        shown = brief(value, digits)
        return int(shown) if shown is not None and shown == int(shown) else shown

    padded = np.concatenate([array, np.full((1, *array.shape[1:]), np.nan)])  # time -1: not measured
    return short(padded[list(times)].tolist())


def attention_sections(runs: Sequence[RunView], catalogue: Catalogue) -> list[Section]:
    """Sections on mean queries and keys per head, their paths, and measures of attention; empty without heads."""
    everyone = head_numbers(runs)
    found = carried(everyone)
    sections = [_plane_section(found)] if found and found.planes else []
    undated = carried([heads for heads in everyone if heads.steps == (None,)])
    if sections and found and found.over_time and undated:  # a file of each model that has no step on the page
        stems = _stems("qk-heads", undated.planes, named=True)
        files = {stem: {**chosen, "qkstep.0": 0} for stem, chosen in stems.items()}
        drawn = replace(_glyph_figure(undated), id="", shown=False, files=files)
        sections = [replace(sections[0], parts=[*sections[0].parts, drawn])]
    if found and found.over_time and any(heads.spreads for heads in found.heads):
        sections.append(_sharp_section(found, catalogue, alone=not sections))
    return sections


def _plane_section(found: Carried) -> Section:
    pairs = found.pairs
    crowd = max(plane.cosine[0].size for _, heads in found.planes for plane in heads.planes) > CROWDED
    models = choice("Model", [heads.label for _, heads in found.planes])
    kinds = choice("Heads of", [PAIR_WORDS[kind] for kind in pairs])
    switch = Switch("qk", (models, kinds, choice("Length", SCALES, int(crowd))))
    when = Switch("qkstep", (choice("Step", found.words, len(found.words) - 1),))
    lead = (
        "One cell for each head. The mean key <i>k̄</i> points to the right, the mean query <i>q̄</i> at its angle to "
        "it: to the right they are parallel, upright they have nothing in common, to the left they are opposed. "
        "Lengths are the norms ‖q̄‖ and ‖k̄‖, the drift of queries and of keys as they meet, after rotation if there is "
        "one. Where either is near 0 the angle means little. Grouped heads share their key."
    )
    key = [Swatch("mean query", "@s1"), Swatch("mean key", "@s2")]
    parts: list[Any] = [Prose(text(lead)), Controls(switch), *([Controls(when)] if len(found.words) > 1 else [])]
    parts += [Swatches(key), _glyph_figure(found), *found.omission]
    parts += _path_parts(found, pairs) if found.over_time else []
    last = [plane.cosine[-1] for _, heads in found.planes for plane in heads.planes]
    cosines = np.concatenate([np.abs(part[np.isfinite(part)]).ravel() for part in last])
    count = int((cosines > ALIGNED).sum())
    aligned = f"have a mean query along their mean key or against it (|cosine| above {ALIGNED})"
    finding = f"{count} of {plural(cosines.size, 'head')} {aligned}." if cosines.size else ""
    return Section("mean-qk", "Mean query and mean key", parts, "Queries, keys", finding=finding)


def _stems(name: str, models: Sequence[tuple[int, Heads]], *, named: bool = False) -> dict[str, Mapping[str, int]]:
    """File names for the first seed of each of the first models; with the model's label if there are several."""
    first = [(place, heads) for place, (_, heads) in enumerate(models) if heads.turn == 0][:FILES]
    named = named or len(first) > 1
    return {f"{name}-{heads.label}" if named else name: {"qk.0": place} for place, heads in first}


def _glyph_figure(found: Carried) -> Figure:
    """A figure of layers by heads: the mean key points right, the mean query is drawn at its angle."""
    views, sizes, summaries = {}, [], []
    for place, (i, heads) in enumerate(found.planes):
        for plane in heads.planes:
            sizes.append((len(plane.layers), plane.cosine.shape[2]))
            kind = found.pairs.index(plane.kind)
            for scale in range(len(SCALES)):
                views[f"{place}|{kind}|{scale}"] = _glyphs(f"qk/{i}/{plane.kind}", plane, scale)
        plane = heads.planes[0]
        size = f"{plural(len(plane.layers), 'layer')} of {plural(plane.cosine.shape[2], 'head')}"
        one, two, angle = (number(float(np.nanmean(np.abs(a[-1])))) for a in (plane.query, plane.key, plane.cosine))
        summaries.append(f"{heads.label}, {size}: mean norms {one} and {two}, mean |cosine| {angle}")
    widest = max(h for _, h in sizes)
    height = max(round(38 + min(96.0, 942 / h) * TALL * layers) for layers, h in sizes)
    alt = f"Mean query and mean key of every head. {'; '.join(summaries[:4])}."
    panel = Panel(views=views, by=("qk.0", "qk.1", "qk.2"), height=height, least=58 + 26 * widest, alt=alt)
    high = max(1.2, 0.6 + 2.9 / min(widest, 16) * TALL * max(layers for layers, _ in sizes))
    files = _stems("qk-heads", found.planes)
    return Figure((panel,), id="qk-heads", layout="scroll", arrays=found.arrays, size=high, files=files)


def _glyphs(name: str, plane: Plane, scale: int) -> Panel:
    layers, heads = len(plane.layers), plane.cosine.shape[2]
    x0 = [[h + 0.5 for h in range(heads)] for _ in range(layers)]
    y0 = [[round(-TALL * (row + 0.86), 4)] * heads for row in range(layers)]
    start = ([x for row in x0 for x in row], [y for row in y0 for y in row])
    when = ("$qkstep.0", "*", "*")
    if scale == 2:
        ends = [Ref(f"{name}/{part}", when, 0.46, plus) for part, plus in (("c", x0), ("s", y0))]
        key: Any = [[x + 0.276 for x in row] for row in x0]
    else:
        unit = Ref(f"{name}/unit", (scale, "$qkstep.0", "*"))
        ends = [Ref(f"{name}/{part}", when, unit, plus) for part, plus in (("x", x0), ("y", y0))]
        key = Ref(f"{name}/k", when, unit, x0)
    where = [f"block {layer} · head {h}" for layer in plane.layers for h in range(heads)]
    style: dict[str, Any] = {"where": where, "facts": _plane_facts(name, when), "start": start, "width": 2.2, "size": 5}
    left, right = ([x + side for x in start[0]] for side in (-0.46, 0.46))
    drawn = (
        Series("", right, start[1], "@rule", width=1, quiet=True, start=(left, start[1])),
        Series("mean key", key, start[1], "@s2", marker="square", **style),
        Series("mean query", ends[0], ends[1], "@s1", **style),
    )
    across, down = strided(heads, 24), strided(layers, 24)
    ticks = [h + 0.5 for h in across], [f"head {h}" if h == 0 else str(h) for h in across]
    blocks = [-TALL * (i + 0.6) for i in down], [str(plane.layers[i]) for i in down]
    x, y = Axis(ticks=ticks, bounds=(0.0, float(heads))), Axis("block", ticks=blocks, bounds=(-TALL * layers, 0.0))
    return Panel(x, y, drawn, equal=True)


def _plane_facts(name: str, at: tuple[Any, ...]) -> tuple[tuple[str, Ref], ...]:
    return (("‖mean q‖", Ref(f"{name}/q", at)), ("‖mean k‖", Ref(f"{name}/k", at)), ("cosine", Ref(f"{name}/c", at)))


def _multiples(
    name: str, views: Mapping[tuple[str, int], Panel], by: Sequence[str], alt: str
) -> tuple[tuple[Panel, ...], list[Controls]]:
    """One panel per layer, at most `PANELS` at once, with a selection of pages if a model has more layers.

    `views` are keyed by the choices of `by` and the index of the layer.
    """
    deepest = 1 + max(at for _, at in views)
    by_panel: list[dict[str, Panel]] = [{} for _ in range(min(deepest, PANELS))]
    for (key, at), view in views.items():
        by_panel[at % PANELS][f"{key}|{at // PANELS}"] = view
    page = f"{name}.0"
    look: dict[str, Any] = {"by": (*by, page), "page_by": page, "height": 210}
    panels = tuple(Panel(views=panel_views, alt=alt.format(n + 1), **look) for n, panel_views in enumerate(by_panel))
    pages = [f"{a + 1} to {min(a + PANELS, deepest)}" for a in range(0, deepest, PANELS)]
    return panels, [Controls(Switch(name, (choice("Layers", pages),)))] if deepest > PANELS else []


def _path_parts(found: Carried, pairs: Sequence[str]) -> list[Any]:
    """The paths of mean queries and keys over steps, one panel per layer."""
    views = {}
    for place, (i, heads) in enumerate(found.planes):
        for plane in heads.planes:
            for at in range(len(plane.layers)):
                view = _paths(f"qk/{i}/{plane.kind}", plane, at, found)
                views[f"{place}|{pairs.index(plane.kind)}", at] = view
    alt = "Paths of the mean queries and mean keys of one layer, number {} of those shown."
    panels, pages = _multiples("qkpage", views, ("qk.0", "qk.1"), alt)
    first, last = (step_words(found.steps[n]) if found.steps else "" for n in (0, -1))
    lead = (
        "The same plane through all steps, one panel for each layer, one path for each head: circles are the mean "
        "query, squares the mean key, which lies on the axis by construction. Hollow is the first step "
        f"({first}), filled the last ({last}). The plane is spanned anew at every step by the two means themselves: a "
        "turn that both make together does not show, only their lengths and the angle between them."
    )
    drawn = Figure(panels, id="paths", arrays=found.arrays, size=1.6, files=_stems("qk-paths", found.planes))
    return [Heading("Over training"), Prose(lead), *pages, drawn]


def _paths(name: str, plane: Plane, at: int, found: Carried) -> Panel:
    """The end points of mean key and mean query of every head of one layer over steps, with markers at both ends."""
    heads, last = plane.cosine.shape[2], len(found.words) - 1
    few_heads = heads <= len(figure.LIGHT)
    colours: Any = [figure.series(h) if few_heads else sequence(h / (heads - 1)) for h in range(heads)]
    labels: Any = [f"block {plane.layers[at]} · head {h}" for h in range(heads)]
    look: dict[str, Any] = {"colour": colours, "each": heads, "named": False, "join": True}
    every: tuple[Any, ...] = ("*", at, "#")
    ends: tuple[Any, ...] = ((0, last), at, "#")
    drawn = []
    for x, y, marker, width in (("k", "", "square", 2.4), ("x", "y", "circle", 1.4)):
        marks: dict[str, Any] = {"width": 0, "size": 6.5, "marker": marker, "hollow": (True, False)}
        line: dict[str, Any] = {"width": width, "size": 2.6}
        both = [found.words[0], found.words[last]]
        for at_steps, words, style in ((every, found.words, line), (ends, both, marks)):
            up: Any = Ref(f"{name}/{y}", at_steps) if y else [0.0] * len(words)
            style |= {"where": words, "facts": _plane_facts(name, at_steps)}
            drawn.append(Series(labels, Ref(f"{name}/{x}", at_steps), up, **look, **style))
    wide, high = (Axis(bounds=Ref(f"{name}/{part}", ("$qk.2", at)), most=5) for part in ("wide", "high"))
    return Panel(wide, high, tuple(drawn), heading=f"block {plane.layers[at]}", equal=True)


def _sharp_section(found: Carried, catalogue: Catalogue, *, alone: bool) -> Section:
    """The section on measures of attention over steps: all layers, and the heads of each layer."""
    there = {(s.metric, s.kind) for heads in found.heads for s in heads.spreads}
    measures = [m for m in MEASURES if any(metric == m for metric, _ in there)]
    kinds = [kind for kind in SCORES if any(k == kind for _, k in there)]
    models = [(i, heads) for i, heads in enumerate(found.heads) if heads.spreads]
    options = {"Measure": [catalogue.entry(m).title for m in measures], "Model": [heads.label for _, heads in models]}
    options["Heads of"] = [SCORES[kind] for kind in kinds]
    switch = Switch("sharp", tuple(choice(label, names) for label, names in options.items()))
    time = Time.of(found.steps)
    whole: dict[str, Panel] = {}
    layers: dict[tuple[str, int], Panel] = {}
    summaries = []
    for place, (i, heads) in enumerate(models):
        for spread in heads.spreads:
            key = f"{measures.index(spread.metric)}|{place}|{kinds.index(spread.kind)}"
            name = f"sharp/{i}/{spread.kind}/{spread.metric}"
            whole[key] = _all_layers(name, spread, found, time)
            layers |= {(key, at): _one_layer(name, spread, at, found, time) for at in range(len(spread.layers))}
        spread = heads.spreads[0]
        first, last = (number(float(np.nanmean(spread.values[t, :, 0]))) for t in (0, -1))
        words = f"{spread.metric.replace('_', ' ')} from {first} at the first step to {last} at the last"
        summaries += [f"{heads.label}: {words}"] if i < 4 else []
    by = ("sharp.0", "sharp.1", "sharp.2")
    alt = "Spread of attention over the heads of one layer, number {} of those shown."
    panels, pages = _multiples("sharppage", layers, by, alt)
    alt = f"Attention over steps, a line for each layer. {'; '.join(summaries)}."
    lead = (
        "How evenly a query spreads its attention: the entropy of a row over log m, 1 where all m keys get the same; "
        "the largest weight of a row; and sharpness, the largest weight beyond 1/m, 0 where all get the same and 1 "
        "where one gets all. Means over query rows. The axis of steps is logarithmic; step 0 stands apart."
    )
    below = (
        "The line is the mean over heads, the dark band holds the middle half of them, the pale one all. Panels share "
        "one scale."
    )
    drawn = Panel(views=whole, by=by, height=300, alt=alt)
    parts = [Prose(lead), Controls(switch), Ramp("first block", "last block")]
    parts += [Figure((drawn,), id="sharp-all", layout="single", arrays=found.arrays), Heading("Heads of each layer")]
    parts += [Prose(below), *(found.omission if alone else []), *pages]
    parts += [Figure(panels, id="spread", arrays=found.arrays), *_sharp_files(found, catalogue, models, time)]
    told = f"{'; '.join(summaries[:3])}."
    finding = told[:1].upper() + told[1:] if summaries else ""
    return Section("sharpness", "Sharpness of attention", parts, "Sharpness", finding=finding)


def _scale(spread: Spread, *columns: int) -> Axis:
    return value_axis(spread.values[..., columns].ravel().tolist())


def _all_layers(name: str, spread: Spread, found: Carried, time: Time, *, banded: Sequence[int] = ()) -> Panel:
    """The mean over heads, one line per layer; in a file with bands for some layers."""
    drawn = []
    for i in range(len(spread.layers)):
        ends: Any = {"low": Ref(name, ("*", i, 1)), "high": Ref(name, ("*", i, 4)), "band": 0.1} if i in banded else {}
        drawn.append(_course(name, spread, i, found, time, named=i in (0, len(spread.layers) - 1), **ends))
    return Panel(time.axis(), _scale(spread, 1, 4) if banded else _scale(spread, 0), tuple(drawn))


def _course(name: str, spread: Spread, at: int, found: Carried, time: Time, **look: Any) -> Series:
    words = ("mean", "lowest head", "a quarter below", "a quarter above", "highest head")
    look["facts"] = tuple((word, Ref(name, ("*", at, n))) for n, word in enumerate(words))
    look |= {"colour": spread.colour(at), "size": 3.5, "join": True, "where": found.words}
    return Series(f"block {spread.layers[at]}", [time.place(s) for s in found.steps], Ref(name, ("*", at, 0)), **look)


def _one_layer(name: str, spread: Spread, at: int, found: Carried, time: Time) -> Panel:
    x, mean = [time.place(step) for step in found.steps], Ref(name, ("*", at, 0))
    look: dict[str, Any] = {"colour": spread.colour(at), "width": 0, "quiet": True}
    drawn = []
    for low, high, alpha in ((1, 4, 0.14), (2, 3, 0.3)):
        ends: Any = {"low": Ref(name, ("*", at, low)), "high": Ref(name, ("*", at, high))}
        drawn.append(Series("", x, mean, band=alpha, **ends, **look))
    drawn.append(_course(name, spread, at, found, time, width=1.8))
    return Panel(time.axis(), _scale(spread, 1, 4), tuple(drawn), heading=f"block {spread.layers[at]}")


def _sharp_files(found: Carried, catalogue: Catalogue, models: Sequence[tuple[int, Heads]], time: Time) -> list[Figure]:
    """A file of the main measures of a model side by side, with bands from the lowest to the highest head."""
    first = [(i, heads) for i, heads in models if heads.turn == 0][:FILES]
    figures = []
    for i, heads in first:
        panels = []
        for spread in (s for s in heads.spreads if s.metric in IN_FILES and s.kind == "scores"):
            banded = few(range(len(spread.layers)), 6)
            drawn = _all_layers(f"sharp/{i}/{spread.kind}/{spread.metric}", spread, found, time, banded=banded)
            panels.append(replace(drawn, heading=catalogue.entry(spread.metric).title))
        stem = "attention-over-training" + (f"-{heads.label}" if len(first) > 1 else "")
        figures += [Figure(tuple(panels), arrays=found.arrays, files={stem: {}}, shown=False)] if panels else []
    return figures
