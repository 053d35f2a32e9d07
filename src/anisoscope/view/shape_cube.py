"""All numbers of the views over training, once, for the page's script: measure × arm × place × step.

Figures over steps, over depth, and maps of both show the same numbers from different sides, so the page carries them
once and draws from them what the reader asks for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anisoscope.view.catalogue import Catalogue
from anisoscope.view.shape_arms import Arm, ShapeMeasure, arms_of, first_of, measures_of, sites_of
from anisoscope.view.training import LOOP, STREAM, TANGENT, History, Line, Site
from anisoscope.view.training_course import logged
from anisoscope.view.training_traces import Time, over_steps, thinned
from anisoscope.view.training_words import few, step_words

SIZE = 2_600_000  # characters of JSON
# at most so many steps, places and measures; the first that fits is used
LEVELS = ((80, 80, 60), (48, 40, 48), (32, 26, 40), (24, 18, 32), (16, 12, 24), (10, 8, 12))
LOGGED = 140  # points of a logged line
CURVES = ("loss", "probe_loss", "gradient_norm")


@dataclass(frozen=True)
class Cube:
    """The numbers, and what they are of."""

    arms: list[Arm]
    measures: list[ShapeMeasure]
    steps: list[int]
    time: Time
    data: dict[str, Any]  # what the page carries
    left_out: dict[str, str]

    @property
    def default(self) -> int:
        return first_of(self.measures)


def make_cube(history: History, catalogue: Catalogue) -> Cube | None:
    """The cube in as much detail as a page can carry; None where nothing was measured at two steps."""
    arms, every = arms_of(history), measures_of(history, catalogue)
    if not every or len(history.steps()) < 2:
        return None
    cube = None
    for level in LEVELS:
        cube = _cube(history, arms, every, level)
        if len(json.dumps(cube.data)) <= SIZE:
            break
    return cube


def _cube(history: History, arms: list[Arm], every: list[ShapeMeasure], level: tuple[int, int, int]) -> Cube:
    most_steps, most_places, most = level
    left_out: dict[str, str] = {}
    steps = few(history.steps(), most_steps)
    if len(steps) < len(history.steps()):
        left_out["shape steps"] = f"{len(steps)} of {len(history.steps())} steps"
    measures = every[:most]
    if len(measures) < len(every):
        left_out["shape measures"] = f"{most} of {len(every)} measures"
    shown = {index: thinned(line, _time(history), LOGGED) for index, line in _loop_lines(history, arms).items()}
    time = _time(history)
    entries, numbers = [], []
    for measure in measures:
        found = sites_of(history, measure, arms)
        sites = [found[i] for i in few(range(len(found)), most_places)]
        if len(sites) < len(found):
            left_out["shape places"] = f"{most_places} of {len(found)} layers"
        entries.append({"label": measure.label, "says": measure.says, "sites": [_site(s) for s in sites]})
        numbers.append([_numbers(history, arm, measure, sites, steps) for arm in arms])
    at, text = time.ticks()
    low, high = time.ends
    pad = 0.04 * ((high - low) or 1.0)
    data = {
        "steps": steps,
        "words": [step_words(step) for step in steps],
        "x": [time.place(step) for step in steps],
        "ticks": [at, text],
        "range": [round(low - pad, 4), round(high + pad, 4)],
        "arms": [_arm(history, arm) for arm in arms],
        "measures": entries,
        "numbers": numbers,
        "loop": [_loop(arm, shown, time) for arm in arms],
    }
    return Cube(arms, measures, steps, time, data, left_out)


def _time(history: History) -> Time:
    """The axis of steps that holds both what was measured and what the loop logged."""
    logs = [mark.step for key in history.keys(LOOP) for mark in history.line_at(key)]
    return Time.of([*history.steps(), *logs])


def _arm(history: History, arm: Arm) -> dict[str, Any]:
    seeds = [one.seed for one in arm.learners]
    return {"label": arm.label, "line": arm.line, "hue": hue_of(history, arm), "blocks": arm.blocks, "seeds": seeds}


def hue_of(history: History, arm: Arm) -> int:
    """The colour of an arm, as the page's legend has it: by learner where gradients are told of each."""
    return (arm.index if history.metrics().isdisjoint(TANGENT) else arm.line) % 8 + 1


def _site(site: Site) -> list[Any]:
    """Layer, kind, and names; the measure's own name says which kind of place inside a block it is."""
    if site.kind in STREAM:
        return [site.layer, site.kind, site.name, site.short]
    return [site.layer, site.kind, f"block {site.layer}", str(site.layer)]


def brief(value: float | None) -> float | None:
    """Four digits: what a drawing can show."""
    return None if value is None else float(f"{value:.4g}")


def _numbers(
    history: History, arm: Arm, measure: ShapeMeasure, sites: Sequence[Site], steps: Sequence[int]
) -> dict[str, Any]:
    """Values by seed, place and step; of a single seed the interval too, and spreads where there are any."""
    lines = [[_by_step(history.line(one, measure.metric, s, measure.variant)) for s in sites] for one in arm.learners]
    found: dict[str, Any] = {"v": [[_row(line, "value", steps) for line in seed] for seed in lines]}
    if all(v is None for seed in found["v"] for row in seed for v in row):
        return {}
    for name, column in (("lo", "low"), ("hi", "high"), ("sd", "sd")):
        rows = [_row(line, column, steps) for line in lines[0]]
        if (name == "sd" or len(lines) == 1) and any(v is not None for row in rows for v in row):
            found[name] = rows
    return found


def _by_step(line: Line) -> dict[int, Any]:
    return {mark.step: mark for mark in line}


def _row(line: dict[int, Any], column: str, steps: Sequence[int]) -> list[float | None]:
    return [brief(getattr(line[step], column)) if step in line else None for step in steps]


def _loop_lines(history: History, arms: Sequence[Arm]) -> dict[tuple[int, str], Line]:
    learners = [one for arm in arms for one in arm.learners]
    return {(one.index, name): logged(history, one, name) for one in learners for name in CURVES}


def _loop(arm: Arm, lines: dict[tuple[int, str], list[Any]], time: Time) -> dict[str, Any]:
    """What the loop logged, by seed: places and values."""
    found: dict[str, Any] = {}
    for name in CURVES:
        dots = [over_steps(lines[one.index, name], time) for one in arm.learners]
        drawn = [[[dot.x for dot in line], [brief(dot.value) for dot in line]] for line in dots if line]
        if drawn:
            found[name] = drawn
    return found
