"""Mean queries and keys by head, their paths over training, and how sharp attention is: figures made by the page.

The page carries the numbers once, in as much detail as fits, and its script (attention.js) draws what is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from anisoscope.view.attention_heads import MEASURES, PAIR_WORDS, SCORES, Heads, Plane, Spread
from anisoscope.view.catalogue import Catalogue
from anisoscope.view.charts import Chart
from anisoscope.view.palette import Tokens
from anisoscope.view.traces import Spec, base_layout
from anisoscope.view.training_board import Choice, Option, Switch
from anisoscope.view.training_traces import Time
from anisoscope.view.training_words import few, step_words
from anisoscope.view.words import number, plural

SIZE = 230_000  # characters of JSON
STEPS = (40, 24, 16, 12, 8, 5, 3, 2, 1)
ENOUGH = 12  # steps that are kept before further seeds are
PANELS = 12  # small multiples at once; more layers are on further pages of them
SCALES = ("one scale for all layers", "each layer on its own scale", "angles alone (of paths: each layer on its own)")
CROWDED = 256  # heads from which one long arm would make all the others too short to read


def attention_section(found: Sequence[Heads], catalogue: Catalogue) -> tuple[dict[str, Any], dict[str, Spec]]:
    """Parts of the page and their specs; empty where no head was measured.

    `heads`: mean query and mean key of every head. `paths`: the same over steps. `sharp`: measures of attention over
    steps, by layer and over heads. The last two only where something was measured at two steps.
    """
    everyone = [heads for heads in found if heads.planes or heads.spreads]
    over_time = any(len(heads.steps) > 1 for heads in everyone)
    if not any(heads.planes for heads in everyone) and not over_time:
        return {}, {}
    if over_time:  # a model that was not followed has nothing to show at a step
        everyone = [heads for heads in everyone if heads.steps != (None,)]
    data, left_out = _fitting(everyone, catalogue, over_time=over_time)
    section: dict[str, Any] = {"data": data, "heads": {}, "paths": {}, "sharp": {}, "left_out": left_out}
    specs: dict[str, Spec] = {}
    planes = [(heads, heads.planes) for heads in everyone[: len(data["models"])] if heads.planes]
    if planes:
        section["heads"] = _heads_part(planes, data, specs)
    if planes and over_time:
        section["paths"] = _paths_part(planes, data, specs)
    if over_time and data["measures"]:
        section["sharp"] = _sharp_part(everyone[: len(data["models"])], data, specs)
    return section, specs


# the numbers


def _fitting(everyone: Sequence[Heads], catalogue: Catalogue, *, over_time: bool) -> tuple[dict[str, Any], list[str]]:
    """The numbers of as many steps and models as a page can carry: further seeds go before steps do."""
    every = sorted({step for heads in everyone for step in heads.steps if step is not None})
    for shown, most in _choices(everyone, len(every)):
        steps = few(every, most)
        data = _data(shown, steps, catalogue, over_time=over_time)
        if len(json.dumps(data)) <= SIZE:
            break
    left_out = [f"{len(steps)} of {len(every)} steps"] if len(steps) < len(every) else []
    return data, left_out + _models_left(shown, everyone)


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


def _data(everyone: Sequence[Heads], steps: Sequence[int], catalogue: Catalogue, *, over_time: bool) -> dict[str, Any]:
    time = Time.of(steps)
    at, text = time.ticks()
    low, high = time.ends
    pad = 0.04 * ((high - low) or 1.0)
    seen = {(s.metric, s.kind) for heads in everyone for s in heads.spreads} if over_time else set()
    measures = [m for m in MEASURES if any(metric == m for metric, _ in seen)]
    kinds = [kind for kind in SCORES if any(k == kind for _, k in seen)]
    return {
        "steps": list(steps),
        "x": [time.place(step) for step in steps],
        "ticks": [at, text],
        "range": [round(low - pad, 4), round(high + pad, 4)],
        "pairs": [kind for kind in PAIR_WORDS if any(p.kind == kind for heads in everyone for p in heads.planes)],
        "kinds": kinds,
        "measures": [{"name": m, "label": catalogue.entry(m).title} for m in measures],
        "models": [_model(heads, steps, over_time=over_time) for heads in everyone],
    }


def _model(heads: Heads, steps: Sequence[int], *, over_time: bool) -> dict[str, Any]:
    times = [heads.steps.index(step) if step in heads.steps else -1 for step in steps] or [0]
    spreads = [_spread(spread, times) for spread in heads.spreads] if over_time else []
    planes = [_plane(plane, times) for plane in heads.planes]
    return {"label": heads.label, "planes": {p["kind"]: p for p in planes}, "spreads": {s["key"]: s for s in spreads}}


def _plane(plane: Plane, times: Sequence[int]) -> dict[str, Any]:
    columns = {"q": plane.query, "k": plane.key, "c": plane.cosine}
    return {"kind": plane.kind, "layers": plane.layers} | {n: _nested(a, times) for n, a in columns.items()}


def _spread(spread: Spread, times: Sequence[int]) -> dict[str, Any]:
    return {
        "key": f"{spread.kind}:{spread.metric}",
        "layers": spread.layers,
        "v": _nested(spread.values, times, digits=5),
    }


def _nested(array: np.ndarray, times: Sequence[int], *, digits: int = 3) -> list[Any]:
    """Lists by step, layer and head; None where there is nothing. Entropies near 1 need more digits than lengths."""
    empty = np.full(array.shape[1:], np.nan)
    return [[[_short(v, digits) for v in row] for row in (array[t] if t >= 0 else empty)] for t in times]


def _short(value: float, digits: int) -> float | int | None:
    if not np.isfinite(value):
        return None
    shown = float(f"{value:.{digits}g}")
    return int(shown) if shown == int(shown) else shown


# the figures


def _made(maker: str, reads: list[str], **more: Any) -> Spec:
    return {"make": maker, "reads": reads, "data": [], "layout": base_layout(Tokens()), **more}


def _switch(name: str, *choices: tuple[str, Sequence[str], int]) -> Switch:
    return Switch(name, tuple(Choice(label, tuple(map(Option, options)), at) for label, options, at in choices))


def _heads_part(planes: Sequence[tuple[Heads, list[Plane]]], data: Any, specs: dict[str, Spec]) -> dict[str, Any]:
    """Every head's plane as a glyph, layers by heads."""
    models = [model["label"] for model in data["models"] if model["planes"]]
    pairs = [PAIR_WORDS[kind] for kind in data["pairs"]]
    steps = [f"step {step:,}" for step in data["steps"]]
    crowd = max(plane.cosine[0].size for _, mine in planes for plane in mine) > CROWDED
    choices = (("Model", models, 0), ("Heads of", pairs, 0), ("Length", SCALES, int(crowd)))
    specs["qk-heads"] = _made("glyphs", ["qk", "qkstep"], node="qk-heads")
    return {
        "switch": _switch("qk", *choices),
        "when": _switch("qkstep", ("Step", steps, len(steps) - 1)) if len(steps) > 1 else None,
        "chart": Chart("qk-heads", "", _heads_alt(planes), 200),
        "rotated": "query_unrotated" in data["pairs"],
        "crossed": "cross_query" in data["pairs"],
    }


def _heads_alt(planes: Sequence[tuple[Heads, list[Plane]]]) -> str:
    told = []
    for heads, mine in planes[:4]:
        plane = mine[0]
        norms = [number(float(np.nanmean(a[-1]))) for a in (plane.query, plane.key)]
        size = f"{plural(len(plane.layers), 'layer')} of {plural(plane.cosine.shape[2], 'head')}"
        angle = number(float(np.nanmean(np.abs(plane.cosine[-1]))))
        told.append(f"{heads.label}, {size}: mean norms {norms[0]} and {norms[1]}, mean |cosine| {angle}")
    return f"Mean query and mean key of every head. {'; '.join(told)}."


def _paths_part(planes: Sequence[tuple[Heads, list[Plane]]], data: Any, specs: dict[str, Spec]) -> dict[str, Any]:
    """The plane of every head over steps, a panel for each layer."""
    deepest = max(len(plane.layers) for _, mine in planes for plane in mine)
    return {
        "pages": _pages("qkpage", deepest),
        "charts": _panels("paths", deepest, ["qk", "qkpage"], specs, alt="Paths of the mean queries and mean keys"),
        "first": step_words(data["steps"][0]) if data["steps"] else "",
        "last": step_words(data["steps"][-1]) if data["steps"] else "",
    }


def _sharp_part(everyone: Sequence[Heads], data: Any, specs: dict[str, Spec]) -> dict[str, Any]:
    """Measures of attention over steps: all layers, and the heads of each."""
    models = [model["label"] for model in data["models"] if model["spreads"]]
    measures = [measure["label"] for measure in data["measures"]]
    kinds = [SCORES[kind] for kind in data["kinds"]]
    deepest = max(len(spread.layers) for heads in everyone for spread in heads.spreads)
    specs["sharp-all"] = _made("sharp", ["sharp"])
    alt = "Spread of attention over the heads"
    return {
        "switch": _switch("sharp", ("Measure", measures, 0), ("Model", models, 0), ("Heads of", kinds, 0)),
        "chart": Chart("sharp-all", "", _sharp_alt(everyone), 300),
        "pages": _pages("sharppage", deepest),
        "charts": _panels("spread", deepest, ["sharp", "sharppage"], specs, alt=alt),
    }


def _sharp_alt(everyone: Sequence[Heads]) -> str:
    told = []
    for heads in everyone[:4]:
        for spread in heads.spreads[:1]:
            ends = [number(float(np.nanmean(spread.values[t, :, 0]))) for t in (0, -1)]
            name = spread.metric.replace("_", " ")
            told.append(f"{heads.label}: {name} from {ends[0]} at the first step to {ends[1]} at the last")
    return f"Attention over steps, a line for each layer. {'; '.join(told)}."


def _pages(name: str, deepest: int) -> Switch | None:
    """Pages of small multiples, where a model has more layers than are shown at once."""
    if deepest <= PANELS:
        return None
    starts = range(0, deepest, PANELS)
    return _switch(name, ("Layers", [f"{a + 1} to {min(a + PANELS, deepest)}" for a in starts], 0))


def _panels(maker: str, deepest: int, reads: list[str], specs: dict[str, Spec], *, alt: str) -> list[Chart]:
    charts = []
    for i in range(min(deepest, PANELS)):
        chart = Chart(f"{maker}-{i + 1}", "", f"{alt} of one layer, number {i + 1} of those shown.", 210)
        specs[chart.id] = _made(maker, reads, panel=i, node=chart.id)
        charts.append(chart)
    return charts
