"""The figures of training itself: loss and step size, gradients of embeddings and weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from anisoscope.view.charts import Chart
from anisoscope.view.shape_arms import Arm, arms_of, seeds_mean
from anisoscope.view.traces import Spec
from anisoscope.view.training import LOOP, TANGENT, History, Learner, Line, Site, known, last, options_of
from anisoscope.view.training_board import Board, Choice, Option, Switch, Views
from anisoscope.view.training_energy import choice_of_readings, controlled_traces, course_words, key_of
from anisoscope.view.training_traces import (
    Look,
    Time,
    flat_layout,
    over_steps,
    thinned,
    traces_of,
    value_range,
    values_in,
)
from anisoscope.view.training_words import CONTROLS, KINDS, SOURCES
from anisoscope.view.words import estimate, listed

METRIC = "gradient_energy"
PANELS = (("loss", "probe_loss"), ("gradient_norm",), ("learning_rate",))
TITLES = {"loss": "Loss", "gradient_norm": "Gradient norm", "learning_rate": "Learning rate"}
MOST = 240
THIN = 0.9


def course_section(board: Board) -> dict[str, Any]:
    """What the loop logged, all learners together."""
    time = Time.of([m.step for key in board.history.keys(LOOP) for m in board.history.line_at(key)])
    loop = [chart for names in PANELS if (chart := _loop_chart(board, names, time))] if time.long else []
    return {"loop": loop}


def _loop_chart(board: Board, names: Sequence[str], time: Time) -> Chart | None:
    data: list[Spec] = []
    averaged, told = False, []
    for arm in _arms(board.history):
        for name in names:
            lines = [logged(board.history, learner, name) for learner in arm.learners]
            whole = seeds_mean(lines)
            averaged |= len(whole) > MOST
            look = _loop_look(board, arm, name, both="loss" in names and len(names) > 1)
            drawn = [(whole, look)]
            if len(lines) > 1 and look.width > THIN:  # of the paler one of two only the mean
                faint = replace(look, colour=board.palette.series(_hue(board.history, arm), 0.35), width=THIN)
                drawn = [*((line, replace(faint, marks=0, band="", interval=False)) for line in lines), *drawn]
            for line, how in drawn:
                dots = over_steps(thinned(line, time, MOST), time)
                data += traces_of(dots, how, palette=board.palette, line=arm.line)
            told += [f"{look.name}: {course_words(found)}"] if (found := known(whole)) else []
    if not values_in(data):
        return None
    layout = flat_layout(board.palette, time.axis(board.palette))
    layout["yaxis"] |= value_range(values_in(data), log="learning_rate" not in names)
    title = TITLES[names[0]]
    caption = " ".join(
        board.entry(n).description for n in names if any(logged(board.history, x, n) for x in board.history.learners)
    )
    caption += " Points are means over neighbouring steps." if averaged else ""
    alt = f"{title} over steps. {'; '.join(told[:6])}."
    return board.keep({"data": data, "layout": layout}, title, alt=alt, height=240, caption=caption)


def logged(history: History, learner: Learner, metric: str) -> Line:
    """The line of a number that the loop logs, wherever the table puts it."""
    keys = [key for key in history.keys([metric]) if key[0] == learner.index and not key[3]]
    return history.line_at(min(keys, key=lambda key: len(key[4]))) if keys else ()


def _arms(history: History) -> list[Arm]:
    """The models with their seeds together, as the legend has them; apart where gradients are told of each."""
    if history.metrics().isdisjoint(TANGENT):
        return arms_of(history)
    return [Arm(one.index, one.label, one.model, one.role, one.blocks, (one,)) for one in history.learners]


def _hue(history: History, arm: Arm) -> int:
    """The colour of the legend."""
    return arm.index if history.metrics().isdisjoint(TANGENT) else arm.line


def _loop_look(board: Board, arm: Arm, metric: str, *, both: bool) -> Look:
    probe = metric == "probe_loss"
    several = len(board.history.learners) > 1
    words = {"loss": "training", "probe_loss": "probe"}.get(metric, "") if both else ""
    seeds = f"mean of {len(arm.learners)} seeds" if len(arm.learners) > 1 else ""
    parts = (arm.label if several else "", words, seeds)
    name = " · ".join(part for part in parts if part) or board.entry(metric).title
    hue = _hue(board.history, arm)
    colour = board.palette.series(hue, 1.0 if probe or not both else 0.55)
    band = board.palette.series(hue, 0.16) if probe and not seeds else ""
    pale = both and not probe
    return Look(name, colour, band, width=THIN if pale and seeds else 1.9 if probe else 1.3, marks=5 if probe else 0,
                interval=probe and not seeds)  # fmt: skip


def elsewhere_section(board: Board) -> dict[str, Any]:
    """Gradients of embeddings and weights, and updates of embeddings, against the controls over training."""
    history = board.history
    keys = [key for key in history.keys([METRIC]) if "of" in options_of(key[4]) and not key[3]]
    places = sorted({(options_of(key[4])["of"], key[2]) for key in keys}, key=_place_order)
    if not places:
        return {}
    readings = board.readings_in(METRIC, keys)
    if len(history.steps()) < 2:
        return {"charts": [], "tables": [_table(board, learner, places, readings[0]) for learner in history.learners]}
    what = Choice("Of", tuple(Option(_place_words(of, site)) for of, site in places))
    switch = Switch("elsewhere", (what, choice_of_readings(readings)))
    views: dict[int, Views] = {learner.index: {} for learner in history.learners}
    for learner in history.learners:
        for i, (of, site) in enumerate(places):
            for j, reading in enumerate(readings):
                lines = board.controlled(learner, METRIC, site, reading=reading, of=of)
                views[learner.index][f"{i}|{j}"] = controlled_traces(board, lines, level=history.chance(learner))
    layouts = {k: flat_layout(board.palette, board.time.axis(board.palette), title="energy") for k in views}
    names = listed([_place_words(of, site) for of, site in places[:4]])
    charts = board.paired(switch, views, layouts=layouts, told=lambda one: f"Energy over steps, {one.label}: {names}.")
    return {"switch": switch, "charts": charts, "looks": key_of(board, keys)} if charts else {}


def _table(board: Board, learner: Learner, places: Sequence[tuple[str, Site]], reading: str) -> dict[str, Any]:
    """Energies against the controls where there is one step only."""
    rows, heads = [], [board.proxy_look(board.history.proxy).name, *CONTROLS.values()]
    for of, site in places:
        options = {"reading": reading, "of": of}
        proxy = board.history.tangent(learner, METRIC, site, **options)
        controls = [board.history.tangent(learner, METRIC, site, control=name, **options) for name in CONTROLS]
        cells = [estimate(m.value, m.low, m.high) if (m := last(line)) else "" for line in (proxy, *controls)]
        rows += [{"place": _place_words(of, site), "cells": cells}] if any(cells) else []
    return {"owner": learner.label, "line": learner.index, "heads": heads, "rows": rows}


def _place_order(place: tuple[str, Site]) -> tuple[int, Site]:
    return list(SOURCES).index(place[0]) if place[0] in SOURCES else len(SOURCES), place[1]


def _place_words(of: str, site: Site) -> str:
    """What is measured, and where.

    >>> _place_words("weight", Site.of(3, "mlp_in")), _place_words("update", Site.of(0, "embed"))
    ('Weight gradients, block 3 · MLP input', 'Embedding updates, weight decay removed')
    """
    words = SOURCES.get(of, of)
    if site.kind == "embed":
        return words
    return (
        f"{words}, block {site.layer} · {KINDS.get(site.kind, site.kind)}"
        if site.kind in KINDS
        else f"{words}, {site.name}"
    )
