"""The figures of gradient energy: every layer over training, one against its controls, depth at one step, maps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from anisoscope.view.traces import Axis, Spec
from anisoscope.view.training import TANGENT, Key, Learner, Line, Mark, Site, known, options_of
from anisoscope.view.training_board import Board, Choice, LearnerChart, Measure, Option, Switch, Views
from anisoscope.view.training_traces import (
    Look,
    brief,
    depth_layout,
    flat_layout,
    level_trace,
    over_depth,
    over_steps,
    step_map,
    traces_of,
)
from anisoscope.view.training_words import few, reading_words
from anisoscope.view.words import estimate, number

AGAINST = ("gradient_energy", "gradient_share", "gradient_isoscore_gain", "amplification")
DEPTH_STEPS = 14


def energy_section(board: Board) -> dict[str, Any]:
    """What the section on gradient energy shows; empty where no gradients were measured."""
    history = board.history
    metrics = [m for m in AGAINST if m in history.metrics()]
    if not metrics:
        return {}
    over_time = len(history.steps()) > 1
    found: dict[str, Any] = {
        "chances": _chances(board),
        "rank": history.rank,
        "frozen": any("fit=frozen" in reading for reading in history.readings(metrics)),
        "looks": key_of(board, history.keys(metrics)),
        "overview": _overview(board) if over_time else {},
        "against": _against(board, metrics) if over_time else {},
        "depth": _depth(board),
    }
    return found


def _chances(board: Board) -> list[tuple[str, str]]:
    """The level of chance, once where all models have the same."""
    found = {one.model: number(c) for one in board.history.learners if (c := board.history.chance(one))}
    return list(found.items()) if len(set(found.values())) > 1 else list(found.items())[:1]


def key_of(board: Board, keys: Sequence[Key]) -> list[dict[str, str]]:
    """Swatches for the lines of a figure with controls."""
    found = [options_of(key[4]) for key in keys]
    proxies, controls = ({options.get(name) for options in found} for name in ("proxy", "control"))
    looks = [board.proxy_look(p) for p in reversed(board.proxies("gradient_energy")) if p in proxies]
    looks += [board.control_look(c) for c in ("normal", "random", "next", "permuted") if c in controls]
    return [swatch(look) for look in looks]


STROKES = {"dash": "6 4", "longdash": "10 5", "dot": "2 2.5", "dashdot": "6 3 2 3"}


def swatch(look: Look) -> dict[str, str]:
    """A line's look as the page's own legend draws it."""
    colour = f"var(--{look.colour.removeprefix('@')})"
    return {"name": look.name, "colour": colour, "stroke": STROKES.get(look.dash, ""), "band": "1" if look.band else ""}


def choice_of_sites(board: Board, sites: Sequence[Site]) -> Choice:
    return Choice("Layer", tuple(Option(site.name) for site in sites), board.history.middle(sites))


def choice_of_readings(readings: Sequence[str]) -> Choice:
    return Choice("Proxy", tuple(Option(reading_words(reading)) for reading in readings))


def _overview(board: Board) -> dict[str, Any]:
    """Energy of every layer over training, coloured by depth, above the band of the normal control."""
    readings = board.readings(["gradient_energy"])
    if not readings:
        return {}
    switch = Switch("layers", (choice_of_readings(readings),))
    views: dict[int, Views] = {}
    for learner in board.history.learners:
        views[learner.index] = {str(i): _all_layers(board, learner, reading) for i, reading in enumerate(readings)}
    layouts = {k: flat_layout(board.palette, board.time.axis(board.palette), title="energy") for k in views}
    charts = board.paired(switch, views, layouts=layouts, told=lambda one: _tell(board, one, readings[0]), height=320)
    return {"switch": switch, "charts": charts} if charts else {}


def _all_layers(board: Board, learner: Learner, reading: str) -> list[Spec]:
    history, data = board.history, []
    sites = board.history.sites(["gradient_energy"])
    normal = [history.tangent(learner, "gradient_energy", s, reading=reading, control="normal") for s in sites]
    look = Look("normal control, all layers", board.palette.series(2), board.palette.series(2, 0.26), width=0)
    data += traces_of(over_steps(board.line(envelope(normal)), board.time), look, palette=board.palette)[:1]
    data += level_trace(history.chance(learner), board.time.ends, name="chance, r/d =", palette=board.palette)
    for site in sites:
        line = board.line(history.tangent(learner, "gradient_energy", site, reading=reading))
        look = board.depth_look(site, learner.blocks)
        data += traces_of(over_steps(line, board.time), look, palette=board.palette)
    return data


def envelope(lines: Iterable[Line]) -> Line:
    """From the lowest end of the bands to the highest, step by step."""
    steps: dict[int, list[Mark]] = {}
    for line in lines:
        for mark in line:
            if mark.interval:
                steps.setdefault(mark.step, []).append(mark)
    return tuple(
        marks[0]._replace(low=min(m.low or 0.0 for m in marks), high=max(m.high or 0.0 for m in marks))
        for _, marks in sorted(steps.items())
    )


def _tell(board: Board, learner: Learner, reading: str) -> str:
    """The overview in words: where energy starts, peaks and ends in the middle of the model."""
    sites = board.history.sites(["gradient_energy"])
    site = sites[board.history.middle(sites)]
    line = known(board.history.tangent(learner, "gradient_energy", site, reading=reading))
    if not line:
        return f"Gradient energy of {learner.label} over steps."
    return f"Gradient energy of {learner.label} over steps, by layer. {site.name}: {course_words(line)}."


def course_words(line: Sequence[Mark]) -> str:
    """Where a line starts, peaks and ends."""
    first, last, peak = line[0], line[-1], max(line, key=lambda m: m.value or 0.0)
    if len(line) == 1:
        return f"{number(first.value)} at step {first.step:,}"
    ends = f"{number(first.value)} at step {first.step:,} to {number(last.value)} at step {last.step:,}"
    return f"{ends}, highest {number(peak.value)} at step {peak.step:,}"


def chance_of(board: Board, learner: Learner, metric: str) -> float | None:
    """The level that a metric has when gradients know nothing of the proxy."""
    share = board.history.chance(learner)
    if metric == "gradient_isoscore_gain":
        return 0.0
    if metric == "gradient_share" and share and board.history.rank.isdigit():
        rank = int(board.history.rank)
        return share * share * (rank + 1) / rank
    return share


def _against(board: Board, metrics: Sequence[str]) -> dict[str, Any]:
    """One layer's energy (or share) over training against all its controls."""
    sites, readings = board.sites(metrics), board.readings(metrics)
    quantity = Choice("Quantity", tuple(Option(e.title, says(e.formula, e.description)) for m in metrics
                                        if (e := board.entry(m))))  # fmt: skip
    switch = Switch("against", (quantity, choice_of_sites(board, sites), choice_of_readings(readings)))
    views: dict[int, Views] = {learner.index: {} for learner in board.history.learners}
    for learner in board.history.learners:
        for i, metric in enumerate(metrics):
            for j, site in enumerate(sites):
                for k, reading in enumerate(readings):
                    views[learner.index][f"{i}|{j}|{k}"] = _one_layer(board, learner, metric, site, reading)
    layouts = {k: flat_layout(board.palette, board.time.axis(board.palette)) for k in views}
    charts = board.paired(switch, views, layouts=layouts, told=lambda one: _tell(board, one, readings[0]), height=320)
    return {"switch": switch, "charts": charts} if charts else {}


def says(*parts: str) -> str:
    return " ".join(part if part.endswith(".") else f"{part}." for part in parts if part)


def _one_layer(board: Board, learner: Learner, metric: str, site: Site, reading: str) -> list[Spec]:
    lines = board.controlled(learner, metric, site, reading=reading)
    return controlled_traces(board, lines, level=chance_of(board, learner, metric))


def controlled_traces(board: Board, lines: Sequence[tuple[Look, Line]], *, level: float | None) -> list[Spec]:
    """Bands first, then the level of chance, then lines; nothing where the proxy itself was not measured."""
    if not any(look.interval for look, _ in lines):
        return []
    data: list[Spec] = []
    for look, line in lines:
        data += traces_of(over_steps(line, board.time), look, palette=board.palette)
    data += level_trace(level, board.time.ends, name="chance", palette=board.palette)
    return sorted(data, key=lambda trace: trace.get("fill") != "toself")


def _depth(board: Board) -> dict[str, Any]:
    """Energy over depth at a step that the reader chooses, the last at first."""
    readings = board.readings(["gradient_energy"])
    steps = sorted({m.step for k in board.history.keys(["gradient_energy"]) for m in board.history.line_at(k)})
    if not steps:
        return {"charts": []}
    steps = few(steps, min(DEPTH_STEPS, board.detail.steps))
    choice = Choice("Step", tuple(Option(f"{step:,}") for step in steps), len(steps) - 1)
    switch = Switch("depth", (choice, choice_of_readings(readings)))
    axes = {one.index: _axis(board, one) for one in board.history.learners}
    views: dict[int, Views] = {learner.index: {} for learner in board.history.learners}
    for learner in board.history.learners:
        for i, step in enumerate(steps):
            for j, reading in enumerate(readings):
                views[learner.index][f"{i}|{j}"] = _at_step(board, learner, step, reading, axes[learner.index])
    layouts = {k: depth_layout(board.palette, axis) for k, axis in axes.items()}
    charts = board.paired(switch, views, layouts=layouts, told=lambda one: _tell_depth(board, one), height=300)
    return {"switch": switch, "charts": charts, "alone": len(steps) == 1, "dated": board.history.dated}


def _axis(board: Board, learner: Learner) -> Axis:
    keys = board.history.keys(["gradient_energy"])
    return Axis(False, learner.blocks, any(k[0] == learner.index and k[2].kind == "final" for k in keys))


def _at_step(board: Board, learner: Learner, step: int, reading: str, axis: Axis) -> list[Spec]:
    parts: dict[Look, list[tuple[Site, Mark]]] = {}
    for site in board.history.sites(["gradient_energy"]):
        for look, line in board.controlled(learner, "gradient_energy", site, reading=reading):
            parts.setdefault(look, []).extend((site, m) for m in line if m.step == step)
    data: list[Spec] = []
    for look, found in parts.items():
        data += traces_of(over_depth(found, axis), look, palette=board.palette)
    ends = (0.0, float(learner.blocks))
    data += level_trace(board.history.chance(learner), ends, name="chance, r/d =", palette=board.palette)
    return sorted(data, key=lambda trace: trace.get("fill") != "toself")


def _tell_depth(board: Board, learner: Learner) -> str:
    """Energy over depth in words, at the last step."""
    told = []
    for site in board.history.sites(["gradient_energy"]):
        line = known(board.history.tangent(learner, "gradient_energy", site))
        told += [f"{site.name} {estimate(line[-1].value, line[-1].low, line[-1].high)}"] if line else []
    return f"Gradient energy of {learner.label} by depth at the last step. {', '.join(told)}."


def map_section(board: Board) -> dict[str, Any]:
    """Steps by layers, for what is measured on gradients; the views over training have the rest."""
    history = board.history
    names = {*TANGENT, "amplification"} & history.metrics()
    measures = sorted(board.measures(names), key=lambda m: (m.metric != "gradient_enrichment",))
    if not measures or len(history.steps()) < 2:
        return {}
    switch = Switch("map", (Choice("Measure", tuple(Option(m.label, m.says) for m in measures)),))
    maps = {one.index: [_map(board, one, m) for m in measures] for one in history.learners}
    spans = [_span([maps[one.index][i] for one in history.learners]) for i in range(len(measures))]
    charts = [c for one in history.learners if (c := _map_chart(board, one, maps[one.index], spans))]
    return {"switch": switch, "charts": charts} if charts else {}


Grid = tuple[list[int], list[Site], list[list[float | None]]]


def _map(board: Board, learner: Learner, measure: Measure) -> Grid:
    history = board.history
    lines = {
        site: board.line(line)
        for site in history.sites([measure.metric])
        if (line := history.line(learner, measure.metric, site, measure.variant))
    }
    steps = sorted({mark.step for line in lines.values() for mark in line})
    cells = {site: {mark.step: mark.value for mark in line} for site, line in lines.items()}
    return steps, list(lines), [[cells[site].get(step) for step in steps] for site in lines]


def _span(maps: Sequence[Grid]) -> tuple[float, float] | None:
    values = [v for _, _, z in maps for row in z for v in row if v is not None]
    return (min(values), max(values)) if values else None


def _map_chart(
    board: Board, learner: Learner, maps: Sequence[Grid], spans: Sequence[tuple[float, float] | None]
) -> LearnerChart | None:
    views = {}
    for i, ((steps, sites, z), span) in enumerate(zip(maps, spans, strict=True)):
        if span and any(v is not None for row in z for v in row):
            drawn = step_map(z, steps=steps, sites=sites, palette=board.palette)
            drawn["data"][0] |= {"zmin": brief(span[0]), "zmax": brief(span[1])}
            views[str(i)] = {"data": drawn["data"], "x": drawn["layout"]["xaxis"], "y": drawn["layout"]["yaxis"]}
            layout = drawn["layout"]
    if not views:
        return None
    spec: Spec = {"layout": layout, "switch": "map", "views": views}
    rows = max(len(sites) for _, sites, _ in maps)
    alt = f"Map of steps by layers of {learner.label}; the table below holds its numbers."
    return board.keep_for(learner, spec, alt=alt, height=max(220, min(420, 90 + 19 * rows)))
