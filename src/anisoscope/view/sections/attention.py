"""Mean queries and keys by head, their paths over training, and how sharp attention is.

Notation
    q̄, k̄   mean query and mean key of a head; their norms are the drift at query and key, their cosine is qk_cosine
    S, L, H  measured steps, layers, heads; a layer may have fewer heads than another, and what is missing is NaN
No vectors are stored: two norms and a cosine are all there is of q̄ and k̄ within the plane they span. The page carries
these numbers once, in as much detail as fits, and figures look them up.
"""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anisoscope.view.figure import (
    LIGHT,
    Axis,
    Figure,
    Panel,
    Ref,
    Series,
    Switch,
    Time,
    choice,
    sequence,
    series,
    value_axis,
)
from anisoscope.view.page import Controls, Heading, Prose, Ramp, Section, Swatch, Swatches, text
from anisoscope.view.subjects import RunRows, RunView
from anisoscope.view.words import Catalogue, few, number, plural, step_words, strided

PAIRS = {"query": "key", "query_unrotated": "key_unrotated", "cross_query": "cross_key"}
PAIR_WORDS = {"query": "self-attention", "query_unrotated": "self-attention, before rotation",
              "cross_query": "cross-attention"}  # fmt: skip
SCORES = {"scores": "self-attention", "cross_scores": "cross-attention"}
MEASURES = ("attention_entropy", "attention_sharpness", "attention_max", "first_key_mass", "score_spread")
IN_FILES = ("attention_entropy", "attention_sharpness", "attention_max")
SIZE = 450_000  # characters of JSON
STEPS = (40, 24, 16, 12, 8, 5, 3, 2, 1)
ENOUGH = 12  # steps that are kept before further seeds are
PANELS = 12  # small multiples at once; more layers are on further pages of them
SCALES = ("one scale for all layers", "each layer on its own scale", "angles alone (of paths: each layer on its own)")
CROWDED = 256  # heads from which one long arm would make all the others too short to read
TALL = 0.62  # a cell's height by its width: a mean query never points down
FILES = 4  # models that have figures of their own
Place = tuple[int | None, int, int]  # step, layer, head


@dataclass(frozen=True)
class Plane:
    """Norms of the mean query and the mean key of every head, and the cosine between them: [S, L, H]."""

    kind: str
    layers: tuple[int, ...]
    query: np.ndarray
    key: np.ndarray
    cosine: np.ndarray

    def tips(self) -> tuple[np.ndarray, np.ndarray]:
        """Where the mean query ends in the plane in which the mean key lies along the first axis."""
        cosine = np.clip(self.cosine, -1.0, 1.0)
        return self.query * cosine, self.query * np.sqrt(1 - cosine**2)


@dataclass(frozen=True)
class Spread:
    """A measure of attention over the heads of each layer: mean, least, quartiles and greatest, [S, L, 5]."""

    metric: str
    kind: str
    layers: tuple[int, ...]
    values: np.ndarray


@dataclass(frozen=True)
class Heads:
    """All per-head numbers of one stack of one model and seed."""

    label: str
    steps: tuple[int | None, ...]
    numbers: dict[tuple[str, str], dict[Place, float]]  # (metric, kind)
    turn: int = 0  # which repetition of its model this is: another seed, or another run

    @functools.cached_property
    def planes(self) -> list[Plane]:
        """The planes of queries and keys that were measured whole."""
        found = (self._plane(kind) for kind in PAIRS)
        return [plane for plane in found if plane is not None]

    def _plane(self, kind: str) -> Plane | None:
        parts = [self.numbers.get(name, {}) for name in (("drift", kind), ("drift", PAIRS[kind]), ("qk_cosine", kind))]
        if not all(parts):
            return None
        layers = tuple(sorted({layer for _, layer, _ in parts[2]}))
        width = 1 + max(head for _, _, head in parts[2])
        query, key, cosine = (self._array(part, layers, width) for part in parts)
        return Plane(kind, layers, query, _shared_keys(key, cosine), cosine)

    @functools.cached_property
    def spreads(self) -> list[Spread]:
        """Every measure of attention that was measured by head."""
        found = []
        for kind in SCORES:
            for metric in MEASURES:
                part = self.numbers.get((metric, kind), {})
                layers = tuple(sorted({layer for _, layer, _ in part}))
                if part:
                    values = self._array(part, layers, 1 + max(head for _, _, head in part))
                    found.append(Spread(metric, kind, layers, _five(values)))
        return found

    def _array(self, part: dict[Place, float], layers: Sequence[int], width: int) -> np.ndarray:
        rows = {layer: i for i, layer in enumerate(layers)}
        times = {step: i for i, step in enumerate(self.steps)}
        array = np.full((len(self.steps), len(layers), width), np.nan)
        for (step, layer, head), value in part.items():
            if layer in rows and head < width:
                array[times[step], rows[layer], head] = value
        return array


def _shared_keys(key: np.ndarray, cosine: np.ndarray) -> np.ndarray:
    """Keys by query head: of grouped heads, several queries meet one key."""
    spread = np.full(cosine.shape, np.nan)
    for i in range(cosine.shape[1]):
        keys, queries = (int(np.isfinite(a[:, i]).any(0).sum()) for a in (key, cosine))
        if keys and queries:
            spread[:, i, :queries] = key[:, i, np.arange(queries) * keys // queries]
    return spread


def _five(values: np.ndarray) -> np.ndarray:
    """Mean, least, lower and upper quartile, greatest over the last axis; NaN where there is none."""
    known = np.isfinite(values).any(-1)
    found = np.full((*values.shape[:-1], 5), np.nan)
    rows = values[known]
    if len(rows):
        low, first, third, high = np.nanquantile(rows, [0, 0.25, 0.75, 1], axis=-1)
        found[known] = np.stack([np.nanmean(rows, axis=-1), low, first, third, high], axis=-1)
    return found


def head_numbers(runs: Sequence[RunView]) -> list[Heads]:
    """The heads of every stack of every model and seed, of each model the first seed before any second."""
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
        if dated:  # without rows of no step where others have one
            numbers = {k: {p: v for p, v in part.items() if p[0] is not None} for k, part in numbers.items()}
        turn = turns[subject.model, subject.stack]
        turns[subject.model, subject.stack] += 1
        found.append(Heads(subject.label, tuple(dated) or (None,), dict(numbers), turn))
    return sorted(found, key=lambda heads: heads.turn)


# what the page carries


@dataclass(frozen=True)
class Carried:
    """The heads and steps that the page shows, and their numbers as arrays."""

    heads: Sequence[Heads]
    steps: Sequence[int]
    arrays: Mapping[str, Any]
    left_out: Sequence[str]
    over_time: bool

    @property
    def planes(self) -> list[tuple[int, Heads]]:
        return [(i, heads) for i, heads in enumerate(self.heads) if heads.planes]

    @property
    def words(self) -> list[str]:
        return [f"step {step:,}" for step in self.steps] or [""]


def carried(everyone: Sequence[Heads]) -> Carried | None:
    """The numbers of as many steps and models as a page can carry: further seeds go before steps do."""
    there = [heads for heads in everyone if heads.planes or heads.spreads]
    over_time = any(len(heads.steps) > 1 for heads in there)
    if not any(heads.planes for heads in there) and not over_time:
        return None
    if over_time:  # a model that was not followed has nothing to show at a step
        there = [heads for heads in there if heads.steps != (None,)]
    every = sorted({step for heads in there for step in heads.steps if step is not None})
    for shown, most in _choices(there, len(every)):
        steps = few(every, most)
        arrays = {k: v for i, heads in enumerate(shown) for k, v in _arrays(i, heads, steps, over_time).items()}
        if len(json.dumps(arrays)) <= SIZE:
            break
    left_out = [f"{len(steps)} of {len(every)} steps"] if len(steps) < len(every) else []
    return Carried(shown, steps, arrays, left_out + _models_left(shown, there), over_time)


def _choices(everyone: Sequence[Heads], steps: int) -> Iterator[tuple[Sequence[Heads], int]]:
    """What to try, the fullest first: all seeds with enough steps, then fewer seeds, fewer steps, fewer models."""
    for turn in range(max(heads.turn for heads in everyone), -1, -1):
        shown = [heads for heads in everyone if heads.turn <= turn]
        yield from ((shown, most) for most in STEPS if most >= min(steps, ENOUGH) or not turn)
    while len(shown) > 1:
        shown = shown[: len(shown) // 2]
        yield from ((shown, most) for most in STEPS)


def _models_left(shown: Sequence[Heads], everyone: Sequence[Heads]) -> list[str]:
    """What is said of models and seeds that do not fit."""
    if len(shown) == len(everyone):
        return []
    firsts = sum(not heads.turn for heads in everyone)
    if len(shown) < firsts:
        return [f"the heads of {len(shown)} of {firsts} models"]
    seeds = 1 + max(heads.turn for heads in shown)
    return ["the first seed of each model" if seeds == 1 else f"the first {seeds} seeds of each model"]


def _arrays(i: int, heads: Heads, steps: Sequence[int], over_time: bool) -> dict[str, Any]:
    """Norms, cosines and tips of every plane, units of length for each scale, and the spreads: lists by step."""
    times = [heads.steps.index(step) if step in heads.steps else -1 for step in steps] or [0]
    found: dict[str, Any] = {}
    for plane in heads.planes:
        sine = np.sqrt(1 - np.clip(plane.cosine, -1, 1) ** 2)
        across, up = plane.tips()
        columns = {"q": plane.query, "k": plane.key, "c": plane.cosine, "s": sine, "x": across, "y": up}
        found |= {f"qk/{i}/{plane.kind}/{name}": _nested(a, times) for name, a in columns.items()}
        longest = np.fmax(np.nan_to_num(plane.query), np.nan_to_num(plane.key)).max(-1) + 1e-30
        units = [np.broadcast_to(0.46 / longest.max(-1, keepdims=True), longest.shape), 0.46 / longest]
        found[f"qk/{i}/{plane.kind}/unit"] = [_nested(unit, times) for unit in units]
        reach = np.broadcast_to(longest.max(), longest.shape[1:]), longest.max(0)
        found[f"qk/{i}/{plane.kind}/wide"] = [
            [[-1.08 * r, 1.08 * r] for r in ends.tolist()] for ends in (*reach, reach[1])
        ]
        found[f"qk/{i}/{plane.kind}/high"] = [
            [[-0.1 * r, 1.08 * r] for r in ends.tolist()] for ends in (*reach, reach[1])
        ]
    for spread in heads.spreads if over_time else ():
        found[f"sharp/{i}/{spread.kind}/{spread.metric}"] = _nested(spread.values, times, digits=5)
    return found


def _nested(array: np.ndarray, times: Sequence[int], *, digits: int = 3) -> Any:
    """Lists by step, layer and head; None where there is nothing. Entropies near 1 need more digits than lengths."""
    empty = np.full(array.shape[1:], np.nan)
    return _short(np.stack([array[t] if t >= 0 else empty for t in times]).tolist(), digits)


def _short(value: Any, digits: int) -> Any:
    if isinstance(value, list):
        return [_short(part, digits) for part in value]
    if not np.isfinite(value):
        return None
    shown = float(f"{value:.{digits}g}")
    return int(shown) if shown == int(shown) else shown


# the sections


def attention_sections(runs: Sequence[RunView], catalogue: Catalogue) -> list[Section]:
    """Mean query and mean key of every head and their paths; measures of attention over steps. Empty without heads."""
    found = carried(head_numbers(runs))
    if found is None:
        return []
    sections = [_plane_section(found)] if found.planes else []
    spreads = any(heads.spreads for heads in found.heads) and found.over_time
    return [*sections, *([_sharp_section(found, catalogue, alone=not sections)] if spreads else [])]


def _left_out(found: Carried) -> list[Prose]:
    words = "Of single heads the page carries {what}; <code>table.parquet</code> has everything."
    return [Prose(text(words, what=" and ".join(found.left_out)), css="says")] if found.left_out else []


def _plane_section(found: Carried) -> Section:
    pairs = [kind for kind in PAIR_WORDS if any(p.kind == kind for _, heads in found.planes for p in heads.planes)]
    crowd = max(plane.cosine[0].size for _, heads in found.planes for plane in heads.planes) > CROWDED
    models = [heads.label for _, heads in found.planes]
    switch = Switch("qk", (choice("Model", models), choice("Heads of", [PAIR_WORDS[kind] for kind in pairs]),
                           choice("Length", SCALES, int(crowd))))  # fmt: skip
    when = Switch("qkstep", (choice("Step", found.words, len(found.words) - 1),))
    rotated = (
        "; as they meet, after rotation, unless it says <em>before rotation</em>" if "query_unrotated" in pairs else ""
    )
    lead = (
        "One cell for each head. The mean key <i>k̄</i> points to the right, the mean query <i>q̄</i> at its angle to "
        "it: to the right they are parallel, upright they have nothing in common, to the left they are opposed. "
        "Lengths are the norms ‖q̄‖ and ‖k̄‖, the drift of queries and of keys"
        + rotated
        + ". Where either is near 0 the angle means "
        "little. Grouped heads share their key."
    )
    key = [Swatch("mean query", "@s1"), Swatch("mean key", "@s2")]
    parts: list[Any] = [Prose(text(lead)), Controls(switch), *([Controls(when)] if len(found.words) > 1 else [])]
    parts += [Swatches(key), _glyph_figure(found, pairs), *_left_out(found)]
    if found.over_time:
        parts += _path_parts(found, pairs)
    return Section("mean-qk", "Mean query and mean key", parts, "Queries, keys")


def _stems(found: Carried, name: str, models: Sequence[tuple[int, Heads]], of: str) -> dict[str, Mapping[str, int]]:
    """A file for the first seed of each of the first models."""
    first = [(place, heads) for place, (_, heads) in enumerate(models) if heads.turn == 0][:FILES]
    return {name if len(first) == 1 else f"{name}-{heads.label}": {of: place} for place, heads in first}


def _glyph_figure(found: Carried, pairs: Sequence[str]) -> Figure:
    """Layers by heads: the mean key to the right, the mean query at its angle."""
    views, sizes = {}, []
    for place, (i, heads) in enumerate(found.planes):
        for plane in heads.planes:
            sizes.append((len(plane.layers), plane.cosine.shape[2]))
            for scale in range(len(SCALES)):
                views[f"{place}|{pairs.index(plane.kind)}|{scale}"] = _glyphs(f"qk/{i}/{plane.kind}", plane, scale)
    told = [_plane_words(heads) for _, heads in found.planes[:4]]
    heads = max(h for _, h in sizes)
    height = max(round(38 + min(96.0, 942 / h) * TALL * layers) for layers, h in sizes)
    panel = Panel(views=views, by=("qk.0", "qk.1", "qk.2"), height=height, least=58 + 26 * heads,
                  alt=f"Mean query and mean key of every head. {'; '.join(told)}.")  # fmt: skip
    size = 0.6 + 2.9 / min(heads, 16) * TALL * max(layers for layers, _ in sizes)
    return Figure((panel,), id="qk-heads", layout="scroll", arrays=found.arrays, size=max(1.2, size),
                  files=_stems(found, "qk-heads", found.planes, "qk.0"))  # fmt: skip


def _plane_words(heads: Heads) -> str:
    plane = heads.planes[0]
    norms = [number(float(np.nanmean(a[-1]))) for a in (plane.query, plane.key)]
    size = f"{plural(len(plane.layers), 'layer')} of {plural(plane.cosine.shape[2], 'head')}"
    angle = number(float(np.nanmean(np.abs(plane.cosine[-1]))))
    return f"{heads.label}, {size}: mean norms {norms[0]} and {norms[1]}, mean |cosine| {angle}"


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
    told: dict[str, Any] = {"where": where, "facts": _plane_facts(name, when), "start": start, "named": True}
    rule = Series("", [x + 0.46 for x in start[0]], start[1], "@rule", width=1, quiet=True,
                  start=([x - 0.46 for x in start[0]], start[1]))  # fmt: skip
    across, down = strided(heads, 24), strided(layers, 24)
    ticks = [h + 0.5 for h in across], [f"head {h}" if h == 0 else str(h) for h in across]
    blocks = [-TALL * (i + 0.6) for i in down], [str(plane.layers[i]) for i in down]
    return Panel(
        Axis(ticks=ticks, bounds=(0.0, float(heads))), Axis("block", ticks=blocks, bounds=(-TALL * layers, 0.0)),
        (rule, Series("mean key", key, start[1], "@s2", width=2.2, size=5, marker="square", **told),
         Series("mean query", ends[0], ends[1], "@s1", width=2.2, size=5, **told)), equal=True,
    )  # fmt: skip


def _plane_facts(name: str, at: tuple[Any, ...]) -> tuple[tuple[str, Ref], ...]:
    return (("‖mean q‖", Ref(f"{name}/q", at)), ("‖mean k‖", Ref(f"{name}/k", at)), ("cosine", Ref(f"{name}/c", at)))


def _pages(name: str, deepest: int) -> list[Controls]:
    """Pages of small multiples, where a model has more layers than are shown at once."""
    if deepest <= PANELS:
        return []
    starts = range(0, deepest, PANELS)
    return [Controls(Switch(name, (choice("Layers", [f"{a + 1} to {min(a + PANELS, deepest)}" for a in starts]),)))]


def _path_parts(found: Carried, pairs: Sequence[str]) -> list[Any]:
    """The plane of every head over steps, a panel for each layer."""
    deepest = max(len(plane.layers) for _, heads in found.planes for plane in heads.planes)
    views: list[dict[str, Panel]] = [{} for _ in range(min(deepest, PANELS))]
    for place, (i, heads) in enumerate(found.planes):
        for plane in heads.planes:
            for at in range(len(plane.layers)):
                key = f"{place}|{pairs.index(plane.kind)}|{at // PANELS}"
                views[at % PANELS][key] = _paths(f"qk/{i}/{plane.kind}", plane, at, found)
    alt = "Paths of the mean queries and mean keys of one layer, number {} of those shown."
    panels = [Panel(views=mine, by=("qk.0", "qk.1", "qkpage.0"), page_by="qkpage.0", height=210, alt=alt.format(n + 1))
              for n, mine in enumerate(views)]  # fmt: skip
    first, last = (step_words(found.steps[n]) if found.steps else "" for n in (0, -1))
    lead = (
        "The same plane through all steps, one panel for each layer, one path for each head: circles are the "
        "mean query, "
        f"squares the mean key, which lies on the axis by construction. Hollow is the first step ({first}), filled the "
        f"last ({last}). The plane is spanned anew at every step by the two means themselves: a turn that both make "
        f"together does "
        "not show, only their lengths and the angle between them."
    )
    figure = Figure(
        tuple(panels), id="paths", arrays=found.arrays, size=1.6, files=_stems(found, "qk-paths", found.planes, "qk.0")
    )
    return [Heading("Over training"), Prose(lead), *_pages("qkpage", deepest), figure]


def _paths(name: str, plane: Plane, at: int, found: Carried) -> Panel:
    heads, last = plane.cosine.shape[2], len(found.words) - 1
    colours: Any = [series(h) if heads <= len(LIGHT) else sequence(h / (heads - 1)) for h in range(heads)]
    labels: Any = [f"block {plane.layers[at]} · head {h}" for h in range(heads)]
    zero = [0.0] * (last + 1)

    def path(x: str, y: str | None, marker: str, width: float) -> list[Series]:
        look: dict[str, Any] = {"each": heads, "named": False, "join": True}
        every, ends = ("*", at, "#"), ((0, last), at, "#")
        line = Series(labels, Ref(f"{name}/{x}", every), Ref(f"{name}/{y}", every) if y else zero, colours, width=width,
                      size=2.6, where=found.words, facts=_plane_facts(name, every), **look)  # fmt: skip
        both = [found.words[0], found.words[last]]
        marks = Series(
            labels,
            Ref(f"{name}/{x}", ends),
            Ref(f"{name}/{y}", ends) if y else [0.0, 0.0],
            colours,
            width=0,
            size=6.5,
            marker=marker,
            hollow=(True, False),
            where=both,
            facts=_plane_facts(name, ends),
            **look,
        )
        return [line, marks]

    wide, high = (Ref(f"{name}/{part}", ("$qk.2", at)) for part in ("wide", "high"))
    drawn = (*path("k", None, "square", 2.4), *path("x", "y", "circle", 1.4))
    return Panel(
        Axis(bounds=wide, most=5), Axis(bounds=high, most=5), drawn, heading=f"block {plane.layers[at]}", equal=True
    )


def _sharp_section(found: Carried, catalogue: Catalogue, *, alone: bool) -> Section:
    """Measures of attention over steps: all layers, and the heads of each."""
    there = {(s.metric, s.kind) for heads in found.heads for s in heads.spreads}
    measures = [m for m in MEASURES if any(metric == m for metric, _ in there)]
    kinds = [kind for kind in SCORES if any(k == kind for _, k in there)]
    models = [(i, heads) for i, heads in enumerate(found.heads) if heads.spreads]
    switch = Switch("sharp", (choice("Measure", [catalogue.entry(m).title for m in measures]),
                              choice("Model", [heads.label for _, heads in models]),
                              choice("Heads of", [SCORES[kind] for kind in kinds])))  # fmt: skip
    deepest = max(len(spread.layers) for _, heads in models for spread in heads.spreads)
    time = Time.of(found.steps)
    whole: dict[str, Panel] = {}
    layers: list[dict[str, Panel]] = [{} for _ in range(min(deepest, PANELS))]
    for place, (i, heads) in enumerate(models):
        for spread in heads.spreads:
            key = f"{measures.index(spread.metric)}|{place}|{kinds.index(spread.kind)}"
            whole[key] = _all_layers(f"sharp/{i}/{spread.kind}/{spread.metric}", spread, found, time)
            for at in range(len(spread.layers)):
                view = _one_layer(f"sharp/{i}/{spread.kind}/{spread.metric}", spread, at, found, time)
                layers[at % PANELS][f"{key}|{at // PANELS}"] = view
    by = ("sharp.0", "sharp.1", "sharp.2")
    first = Panel(views=whole, by=by, height=300, alt=_sharp_alt(found.heads))
    alt = "Spread of attention over the heads of one layer, number {} of those shown."
    panels = [Panel(views=mine, by=(*by, "sharppage.0"), page_by="sharppage.0", height=210, alt=alt.format(n + 1))
              for n, mine in enumerate(layers)]  # fmt: skip
    lead = (
        "How evenly a query spreads its attention: the entropy of a row over log m, 1 where all m keys get the same; "
        "the largest weight of a row; and sharpness, the largest weight beyond 1/m, 0 where all get the same and 1 "
        "where one gets all. Means over query rows. The axis of steps is logarithmic; step 0 stands apart."
    )
    below = (
        "The line is the mean over heads, the dark band holds the middle half of them, the pale one all. Panels share "
        "one scale."
    )
    parts = [
        Prose(lead),
        Controls(switch),
        Ramp("first block", "last block"),
        Figure((first,), id="sharp-all", layout="single", arrays=found.arrays),
        Heading("Heads of each layer"),
        Prose(below),
        *(_left_out(found) if alone else []),
        *_pages("sharppage", deepest),
        Figure(tuple(panels), id="spread", arrays=found.arrays),
        *_sharp_files(found, catalogue, models, time),
    ]
    return Section("sharpness", "Sharpness of attention", parts, "Sharpness")


def _scale(spread: Spread, low: int, high: int) -> Axis:
    ends = np.concatenate([spread.values[..., low].ravel(), spread.values[..., high].ravel()])
    return value_axis(float(v) for v in ends)


def _all_layers(name: str, spread: Spread, found: Carried, time: Time, *, banded: Sequence[int] = ()) -> Panel:
    """The mean over heads, a line for each layer; in a file with the band of some of them."""
    drawn, deepest = [], max(1, spread.layers[-1])
    for i, layer in enumerate(spread.layers):
        at: Any = {"low": Ref(name, ("*", i, 1)), "high": Ref(name, ("*", i, 4)), "band": 0.1} if i in banded else {}
        drawn.append(_course(f"block {layer}", name, i, sequence(layer / deepest), found, time,
                             named=i in (0, len(spread.layers) - 1), **at))  # fmt: skip
    return Panel(time.axis(), _scale(spread, 1, 4) if banded else _scale(spread, 0, 0), tuple(drawn))


def _course(label: str, name: str, at: int, colour: str, found: Carried, time: Time, **look: Any) -> Series:
    facts = tuple(
        (words, Ref(name, ("*", at, n)))
        for words, n in (
            ("mean", 0),
            ("lowest head", 1),
            ("a quarter below", 2),
            ("a quarter above", 3),
            ("highest head", 4),
        )
    )
    return Series(label, [time.place(s) for s in found.steps], Ref(name, ("*", at, 0)), colour, size=3.5, join=True,
                  where=found.words, facts=facts, **look)  # fmt: skip


def _one_layer(name: str, spread: Spread, at: int, found: Carried, time: Time) -> Panel:
    colour = sequence(spread.layers[at] / max(1, spread.layers[-1]))
    x, mean = [time.place(step) for step in found.steps], Ref(name, ("*", at, 0))
    bands = [Series("", x, mean, colour, Ref(name, ("*", at, low)), Ref(name, ("*", at, high)), band=alpha, width=0,
                    quiet=True) for low, high, alpha in ((1, 4, 0.14), (2, 3, 0.3))]  # fmt: skip
    label = f"block {spread.layers[at]}"
    drawn = (*bands, _course(label, name, at, colour, found, time, width=1.8))
    return Panel(time.axis(), _scale(spread, 1, 4), drawn, heading=label)


def _sharp_files(found: Carried, catalogue: Catalogue, models: Sequence[tuple[int, Heads]], time: Time) -> list[Figure]:
    """The main measures of a model side by side, each layer with the band from its lowest head to its highest."""
    first = [(i, heads) for i, heads in models if heads.turn == 0][:FILES]
    figures = []
    for i, heads in first:
        panels = []
        for spread in (s for s in heads.spreads if s.metric in IN_FILES and s.kind == "scores"):
            banded = few(range(len(spread.layers)), 6)
            drawn = _all_layers(f"sharp/{i}/{spread.kind}/{spread.metric}", spread, found, time, banded=banded)
            panels.append(Panel(drawn.x, drawn.y, drawn.series, heading=catalogue.entry(spread.metric).title))
        stem = "attention-over-training" if len(first) == 1 else f"attention-over-training-{heads.label}"
        figures += [Figure(tuple(panels), arrays=found.arrays, files={stem: {}}, shown=False)] if panels else []
    return figures


def _sharp_alt(everyone: Sequence[Heads]) -> str:
    told = []
    for heads in everyone[:4]:
        for spread in heads.spreads[:1]:
            ends = [number(float(np.nanmean(spread.values[t, :, 0]))) for t in (0, -1)]
            name = spread.metric.replace("_", " ")
            told.append(f"{heads.label}: {name} from {ends[0]} at the first step to {ends[1]} at the last")
    return f"Attention over steps, a line for each layer. {'; '.join(told)}."
