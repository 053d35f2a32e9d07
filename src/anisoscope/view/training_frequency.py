"""The figures of token frequency: enrichment by bin, masked rows apart from the others, frequency against spread."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from anisoscope.view.traces import Spec
from anisoscope.view.training import STREAM, Learner, Mark, Site, known
from anisoscope.view.training_board import Board, Choice, Option, Switch, Views
from anisoscope.view.training_energy import choice_of_readings, choice_of_sites, swatch
from anisoscope.view.training_traces import Dot, Look, flat_layout, level_trace, over_steps, traces_of
from anisoscope.view.training_words import bin_words, reading_words, variant_words
from anisoscope.view.verdicts import neat
from anisoscope.view.words import estimate, number

METRIC = "gradient_enrichment"
GROUPINGS = {"frequency": "the token itself", "target": "the token to be predicted"}
ROWS = {"": "all rows", "masked": "masked rows", "unmasked": "unmasked rows"}


def bins_of(board: Board, grouping: str) -> list[str]:
    """Frequency bins in order, the most frequent first."""
    found = {group for group in board.history.facets(METRIC).groups if group.startswith(f"{grouping}:")}
    return sorted(found, key=lambda group: (len(group), group))


def frequency_section(board: Board) -> dict[str, Any]:
    """Enrichment by frequency bin, over training and at the last step; empty parts where nothing was measured."""
    groupings = [name for name in GROUPINGS if bins_of(board, name)]
    strata = _strata(board, groupings) if groupings else {}
    masked, spread = _masked(board), spread_section(board)
    return {"strata": strata, "masked": masked, "spread": spread} if strata or masked or spread else {}


def _strata(board: Board, groupings: Sequence[str]) -> dict[str, Any]:
    keys = [key for key in board.history.keys([METRIC]) if key[3].partition(":")[0] in groupings]
    sites = [s for s in board.sites([METRIC]) if any(key[2] == s for key in keys)]
    readings = board.readings_in(METRIC, keys)
    by = Choice("Frequency of", tuple(Option(GROUPINGS[name]) for name in groupings))
    switch = Switch("frequency", (choice_of_sites(board, sites), by, choice_of_readings(readings)))
    over_time: dict[int, Views] = {learner.index: {} for learner in board.history.learners}
    at_last: dict[int, Views] = {learner.index: {} for learner in board.history.learners}
    for learner in board.history.learners:
        for i, site in enumerate(sites):
            for j, grouping in enumerate(groupings):
                at_last[learner.index][f"{i}|{j}"] = _at_last(board, learner, site, grouping, readings)
                for k, reading in enumerate(readings):
                    data = _over_training(board, learner, site, grouping, reading)
                    over_time[learner.index][f"{i}|{j}|{k}"] = data
    first = bins_of(board, groupings[0])
    found: dict[str, Any] = {"switch": switch, "bins": _swatches(first), "over": [], "last": []}
    found["readings"] = [swatch(_reading_look(board, i, r)) for i, r in enumerate(readings)]
    if len(board.history.steps()) > 1:
        layouts = {k: flat_layout(board.palette, board.time.axis(board.palette), title="enrichment") for k in over_time}
        found["over"] = board.paired(switch, over_time, layouts=layouts, told=lambda one: _tell(board, one, readings))
    layouts = {k: flat_layout(board.palette, _bin_axis(board, first), title="enrichment") for k in at_last}
    found["last"] = board.paired(
        switch, at_last, layouts=layouts, told=lambda one: _tell(board, one, readings), parts=(0, 1), height=260
    )
    return found if found["last"] else {}


def _over_training(board: Board, learner: Learner, site: Site, grouping: str, reading: str) -> list[Spec]:
    """A line per bin, darker with rarity."""
    bins, data = bins_of(board, grouping), []
    for i, group in enumerate(bins):
        line = board.line(board.history.tangent(learner, METRIC, site, reading=reading, group=group))
        look = Look(f"bin {bin_words(group, str(len(bins)))}", _bin_colour(board, i, len(bins)), marks=4, interval=True)
        data += traces_of(over_steps(line, board.time), look, palette=board.palette)
    return [*data, *level_trace(1.0, board.time.ends, name="chance", palette=board.palette)] if data else []


def _bin_colour(board: Board, i: int, count: int) -> str:
    return board.palette.sequence(i / max(1, count - 1))


def _swatches(bins: Sequence[str]) -> list[dict[str, str]]:
    """The legend of bins; their colours are places on the ramp of depth."""
    return [
        {"name": bin_words(group, str(len(bins))), "at": f"{i / max(1, len(bins) - 1):.3f}"}
        for i, group in enumerate(bins)
    ]


def _at_last(board: Board, learner: Learner, site: Site, grouping: str, readings: Sequence[str]) -> list[Spec]:
    """Enrichment by bin at the last step, a line per reading."""
    bins, data = bins_of(board, grouping), []
    for i, reading in enumerate(readings):
        dots = []
        for place, group in enumerate(bins):
            line = known(board.history.tangent(learner, METRIC, site, reading=reading, group=group))
            dots += [_bin_dot(place, line[-1])] if line else []
        data += traces_of(dots, _reading_look(board, i, reading), palette=board.palette)
    return [*data, *level_trace(1.0, (0.0, len(bins) - 1.0), name="chance", palette=board.palette)] if data else []


def _bin_dot(place: int, mark: Mark) -> Dot:
    where, rows = f"bin {place + 1}, step {mark.step:,}", f" · n {mark.n:,}" if mark.n else ""
    return Dot(float(place), mark.value, mark.low, mark.high, where, note=rows)


def _reading_look(board: Board, i: int, reading: str) -> Look:
    dash = ("solid", "dash", "dot", "dashdot")[i % 4]
    colour, band = board.palette.series(i), board.palette.series(i, 0.14)
    return Look(reading_words(reading), colour, band, dash, 1.9, marks=5, interval=True)


def _bin_axis(board: Board, bins: Sequence[str]) -> Spec:
    count = len(bins)
    spec: Spec = {"tickvals": list(range(count)), "ticktext": [html.escape(g.partition(":")[2]) for g in bins]}
    spec |= {"showgrid": False, "zeroline": False, "range": [-0.3, count - 0.7], "showline": True}
    spec["title"] = {"text": "frequency bin, 1 = most frequent", "standoff": 6, "font": {"size": 11}}
    return spec | {"linecolor": board.palette.role("rule")}


def _tell(board: Board, learner: Learner, readings: Sequence[str]) -> str:
    """Enrichment by bin in words, in the middle of the model at the last step."""
    sites = board.history.sites([METRIC])
    site, told = sites[board.history.middle(sites)], []
    for grouping in [name for name in GROUPINGS if bins_of(board, name)][:1]:
        for group in bins_of(board, grouping):
            line = known(board.history.tangent(learner, METRIC, site, reading=readings[0], group=group))
            told += [f"bin {group.partition(':')[2]} {number(line[-1].value)}"] if line else []
    return f"Enrichment of {learner.label} by frequency, {site.name}, last step: {', '.join(told)}."


def _masked(board: Board) -> dict[str, Any]:
    """Masked rows, unmasked rows and their pool over training: pooling can hide the effect."""
    history = board.history
    keys = [key for key in history.keys([METRIC]) if key[3] in ("masked", "unmasked")]
    learners = [one for one in history.learners if any(key[0] == one.index for key in keys)]
    if not learners or len(history.steps()) < 2:
        return {}
    sites = [site for site in board.sites([METRIC]) if any(key[2] == site for key in keys)]
    readings = board.readings_in(METRIC, keys)
    switch = Switch("masked", (choice_of_sites(board, sites), choice_of_readings(readings)))
    views: dict[int, Views] = {one.index: {} for one in learners}
    for learner in learners:
        for i, site in enumerate(sites):
            for j, reading in enumerate(readings):
                views[learner.index][f"{i}|{j}"] = _by_mask(board, learner, site, reading)
    layouts = {k: flat_layout(board.palette, board.time.axis(board.palette), title="enrichment") for k in views}
    charts = board.paired(
        switch, views, layouts=layouts, told=lambda one: f"Enrichment of {one.label}, masked and unmasked rows apart."
    )
    return {"switch": switch, "charts": charts, "key": [swatch(_mask_look(board, name)) for name in ROWS]}


def _mask_look(board: Board, group: str) -> Look:
    i, dash = {"": (6, "dash"), "masked": (1, "solid"), "unmasked": (0, "solid")}[group]
    return Look(ROWS[group], board.palette.series(i), board.palette.series(i, 0.16), dash, 1.9, marks=4, interval=True)


def _by_mask(board: Board, learner: Learner, site: Site, reading: str) -> list[Spec]:
    data: list[Spec] = []
    for group in ROWS:
        line = board.line(board.history.tangent(learner, METRIC, site, reading=reading, group=group))
        data += traces_of(over_steps(line, board.time), _mask_look(board, group), palette=board.palette)
    data += level_trace(1.0, board.time.ends, name="chance", palette=board.palette)
    return sorted(data, key=lambda trace: trace.get("fill") != "toself")


def spread_section(board: Board) -> dict[str, Any]:
    """Correlations of frequency with spread: over training by layer, and all of them at the last step."""
    keys = [key for key in board.history.keys(["frequency_spread"]) if not key[3] and key[2].kind in STREAM]
    if not keys:
        return {}
    variants = sorted({key[4] for key in keys}, key=lambda v: ("over=time" in v, "normalised" in v, v))
    chosen = [v for v in variants if "over=time" not in v] or variants
    switch = Switch("spread", (Choice("Correlation", tuple(Option(variant_words(v)) for v in chosen)),))
    views = {
        one.index: {str(i): _by_layer(board, one, variant) for i, variant in enumerate(chosen)}
        for one in board.history.learners
    }
    layouts = {k: flat_layout(board.palette, board.time.axis(board.palette), title="correlation") for k in views}
    over_time = len(board.history.steps()) > 1
    charts = board.paired(switch, views, layouts=layouts, told=_tell_spread) if over_time else []
    return {"switch": switch, "charts": charts, "tables": _spread_tables(board, variants)}


def _tell_spread(learner: Learner) -> str:
    return f"Correlation of token frequency with spread in {learner.label} over steps; the table below has the last."


def _by_layer(board: Board, learner: Learner, variant: str) -> list[Spec]:
    data: list[Spec] = []
    for site in board.history.sites(["frequency_spread"]):
        line = board.line(board.history.line(learner, "frequency_spread", site, variant))
        look = board.depth_look(site, learner.blocks)
        data += traces_of(over_steps(line, board.time), look, palette=board.palette)
    return [*data, *level_trace(0.0, board.time.ends, name="no correlation", palette=board.palette)] if data else []


def _spread_tables(board: Board, variants: Sequence[str]) -> list[dict[str, Any]]:
    """Per learner: sites by variants at the last step, with intervals and p."""
    tables = []
    for learner in board.history.learners:
        rows = []
        for site in board.history.sites(["frequency_spread"]):
            cells = [_spread_cell(board, learner, site, variant) for variant in variants]
            if any(cells):
                rows.append({"place": site.name, "cells": cells})
        heads = [variant_words(variant) for variant in variants]
        if rows:
            tables.append({"owner": learner.label, "line": learner.index, "heads": heads, "rows": rows})
    return tables


def _spread_cell(board: Board, learner: Learner, site: Site, variant: str) -> dict[str, str] | None:
    line = known(board.history.line(learner, "frequency_spread", site, variant))
    if not line:
        return None
    p = {m.step: m.value for m in board.history.line(learner, "frequency_spread_p", site, variant)}
    last = line[-1]
    chance = p.get(last.step)
    text = estimate(last.value, last.low, last.high)
    return {"text": text, "p": "" if chance is None else f"p {neat(chance, 2)}", "step": f"step {last.step:,}"}
