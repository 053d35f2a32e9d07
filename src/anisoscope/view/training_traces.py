"""Lines over steps or depth, and maps of steps by layers, as plain plotly dictionaries that stay small."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from anisoscope.view.palette import Palette
from anisoscope.view.series import Point
from anisoscope.view.traces import LOG_FONT, Axis, Spec, base_layout, wants_log
from anisoscope.view.traces import x_axis as depth_axis
from anisoscope.view.training import Mark, Site
from anisoscope.view.training_words import few, step_words
from anisoscope.view.words import estimate, number


@dataclass(frozen=True)
class Time:
    """A logarithmic axis of steps on which step 0, the initialisation, stands apart."""

    first: int  # the first step above 0
    last: int
    zero: bool

    @classmethod
    def of(cls, steps: Iterable[int]) -> Time:
        found = sorted(set(steps))
        later = [step for step in found if step > 0] or [1]
        return cls(later[0], later[-1], bool(found) and found[0] <= 0)

    @property
    def long(self) -> bool:
        """Whether there is more than one step."""
        return self.zero or self.last > self.first

    @property
    def reach(self) -> float:
        return math.log10(self.last / self.first) or 1.0

    def place(self, step: int) -> float:
        """Where a step stands.

        >>> time = Time.of([0, 10, 1000])
        >>> time.place(1000), time.place(0) < time.place(10) - 0.2
        (3.0, True)
        """
        if step > 0:
            return round(math.log10(step), 4)
        return round(math.log10(self.first) - max(0.3, 0.08 * self.reach), 4)

    def ticks(self) -> tuple[list[float], list[str]]:
        powers = [10**k for k in range(12) if self.first <= 10**k <= self.last]
        if len(powers) < 3:
            powers = [m * 10**k for k in range(12) for m in (1, 2, 5) if self.first <= m * 10**k <= self.last]
        powers = powers if len(powers) >= 2 else sorted({self.first, self.last})
        steps = [*([0] if self.zero else []), *few(powers, 7)]
        return [self.place(s) for s in steps], [step_words(s) for s in steps]

    @property
    def ends(self) -> tuple[float, float]:
        return self.place(0 if self.zero else self.first), self.place(self.last)

    def axis(self, palette: Palette) -> Spec:
        at, text = self.ticks()
        low, high = self.ends
        pad = 0.05 * ((high - low) or 1.0)
        spec: Spec = {"tickvals": at, "ticktext": text, "showgrid": False, "zeroline": False, "tickangle": 0}
        spec |= {"title": {"text": "step", "standoff": 6, "font": {"size": 11}}, "range": [low - pad, high + pad]}
        return spec | {"linecolor": palette.role("rule"), "showline": True}


class Dot(NamedTuple):
    """A place on a drawing."""

    x: float
    value: float | None
    low: float | None
    high: float | None
    where: str  # the step, or the place in the model
    hollow: bool = False
    note: str = ""


@dataclass(frozen=True)
class Look:
    """How a line is drawn."""

    name: str
    colour: str
    band: str = ""  # its colour; "" = none
    dash: str = "solid"
    width: float = 1.5
    marks: float = 0  # size of markers; 0 = none
    interval: bool = False  # whether the band is an interval of the value, to be told with it


def over_steps(line: Iterable[Mark], time: Time) -> list[Dot]:
    """Marks on the axis of steps."""
    return [Dot(time.place(m.step), m.value, m.low, m.high, _when(m), m.inside) for m in line]


def _when(mark: Mark) -> str:
    return f"step {mark.step:,}" + (" · in-sample" if mark.inside else "")


def over_depth(found: Iterable[tuple[Site, Mark]], axis: Axis) -> list[Dot]:
    """Marks of one step on the axis of layers."""
    return [
        Dot(place_of(site, axis), m.value, m.low, m.high, html.escape(site.name), m.inside)
        for site, m in sorted(found, key=lambda pair: pair[0])
    ]


def place_of(site: Site, axis: Axis) -> float:
    return axis.place(Point(site.layer, site.layer / max(1, axis.blocks), site.kind, None, None, None, {}))


def brief(value: float | None) -> float | None:
    """Five digits: what a drawing can show."""
    return None if value is None else float(f"{value:.5g}")


def traces_of(dots: Sequence[Dot], look: Look, *, palette: Palette, line: int | None = None) -> list[Spec]:
    """A line with its band beneath."""
    meta: Spec = {} if line is None else {"meta": {"line": line}}
    shared = meta | {"type": "scatter", "showlegend": False}
    band = _band(dots, look)
    drawn = [shared | band] if band else []
    if any(dot.value is not None for dot in dots):
        drawn.append(shared | _path(dots, look, palette))
    return drawn


def _band(dots: Sequence[Dot], look: Look) -> Spec | None:
    x: list[float | None] = []
    y: list[float | None] = []
    for run in _runs(dots):
        if look.band and len(run) > 1:
            x += [*(d.x for d in run), *(d.x for d in reversed(run)), None]
            y += [*(brief(d.low) for d in run), *(brief(d.high) for d in reversed(run)), None]
    if not x:
        return None
    fill: Spec = {"mode": "lines", "fill": "toself", "hoverinfo": "skip", "fillcolor": look.band}
    return fill | {"x": x[:-1], "y": y[:-1], "line": {"width": 0, "color": look.band}}


def _runs(dots: Sequence[Dot]) -> Iterable[list[Dot]]:
    """Unbroken stretches of dots that have an interval."""
    run: list[Dot] = []
    for dot in dots:
        if dot.value is None or dot.low is None or dot.high is None:
            yield run
            run = []
        else:
            run.append(dot)
    yield run


def _path(dots: Sequence[Dot], look: Look, palette: Palette) -> Spec:
    name = html.escape(look.name)  # hover text is markup
    lone = sum(dot.value is not None for dot in dots) == 1
    size = max(look.marks, 6.0) if lone else look.marks
    path: Spec = {
        "mode": "lines+markers" if size else "lines",
        "x": [d.x for d in dots],
        "y": [brief(d.value) for d in dots],
        "customdata": [d.where for d in dots],
        "name": name,
        "line": {"color": look.colour, "width": look.width, "dash": look.dash},
    }
    path["hovertemplate"] = f"<b>{name}</b><br>%{{customdata}}<br><b>%{{y:.3~g}}</b><extra></extra>"
    if look.interval:
        path["text"] = [estimate(d.value, d.low, d.high) + d.note for d in dots]
        path["hovertemplate"] = f"<b>{name}</b><br>%{{customdata}}<br><b>%{{text}}</b><extra></extra>"
    if size:
        path["marker"] = _marker(dots, look, size, palette)
    if lone:
        path["error_y"] = _bars(dots, look)
    return path


def _marker(dots: Sequence[Dot], look: Look, size: float, palette: Palette) -> Spec:
    fills: object = look.colour
    if any(dot.hollow for dot in dots):
        fills = [palette.role("paper") if dot.hollow else look.colour for dot in dots]
    return {"size": size, "color": fills, "line": {"color": look.colour, "width": 1.2}}


def _bars(dots: Sequence[Dot], look: Look) -> Spec:
    up = [0 if d.value is None or d.high is None else max(0.0, d.high - d.value) for d in dots]
    down = [0 if d.value is None or d.low is None else max(0.0, d.value - d.low) for d in dots]
    return {"type": "data", "array": up, "arrayminus": down, "thickness": 1.2, "width": 3, "color": look.colour}


def level_trace(value: float | None, ends: tuple[float, float], *, name: str, palette: Palette) -> list[Spec]:
    """A dotted line at a value, such as the level of chance."""
    if value is None:
        return []
    low, high = ends
    pad = 0.05 * ((high - low) or 1.0)
    line = {"color": palette.role("ink"), "width": 1, "dash": "dot"}
    level: Spec = {"type": "scatter", "mode": "lines", "x": [low - pad, high + pad], "y": [brief(value)] * 2}
    hover = f"{html.escape(name)} {number(value)}<extra></extra>"
    return [level | {"line": line, "hovertemplate": hover, "showlegend": False, "name": "chance"}]


def flat_layout(palette: Palette, x: Spec, *, title: str = "") -> Spec:
    """The layout of a line chart; its value axis is set for each view."""
    y: Spec = {"gridcolor": palette.role("rule"), "zeroline": False, "nticks": 6, "exponentformat": "power"}
    y |= {"tickcolor": palette.role("rule"), "automargin": True}
    y |= {"title": {"text": html.escape(title), "font": {"size": 11}, "standoff": 8}} if title else {}
    return base_layout(palette) | {"xaxis": x, "yaxis": y}


def depth_layout(palette: Palette, axis: Axis) -> Spec:
    return flat_layout(palette, depth_axis(axis, palette))


def values_in(data: Iterable[Spec]) -> list[float]:
    return [y for trace in data for y in trace.get("y", ()) if y is not None]


def value_range(values: Sequence[float], *, log: bool = False) -> Spec:
    """An axis that holds these values, from zero where that is near; logarithmic, where it may be, over orders."""
    low, high = min(values), max(values)
    if log and wants_log(values):
        return {"type": "log", "nticks": 4, "tickfont": {"size": LOG_FONT}}
    reach = (high - low) or abs(high) or 1.0
    if 0 <= low < 0.4 * high:
        return {"type": "linear", "range": [0, brief(1.06 * high)]}
    return {"type": "linear", "range": [brief(low - 0.08 * reach), brief(high + 0.08 * reach)]}


def strided(count: int, most: int) -> list[int]:
    """Evenly spaced places of a list, from the first on.

    >>> strided(5, 8), strided(14, 7)
    ([0, 1, 2, 3, 4], [0, 2, 4, 6, 8, 10, 12])
    """
    return list(range(0, count, max(1, math.ceil(count / most))))


def step_map(
    z: Sequence[Sequence[float | None]], *, steps: Sequence[int], sites: Sequence[Site], palette: Palette
) -> Spec:
    """A map of layers by steps; cells without a value stay empty."""
    names = [site.short for site in sites]
    # names that are no numbers: plotly would take a tick at place 8 for the column named 8
    xs, ys = [f"step {step:,}" for step in steps], [html.escape(site.name) for site in sites]
    trace: Spec = {"type": "heatmap", "z": [[brief(v) for v in row] for row in z], "x": xs, "y": ys}
    trace |= {"colorscale": palette.heat(), "xgap": 1, "ygap": 1, "hoverongaps": False}
    trace["hovertemplate"] = "%{y} · %{x}<br><b>%{z:.4~g}</b><extra></extra>"
    trace["colorbar"] = {"thickness": 9, "outlinewidth": 0, "nticks": 5, "len": 1.0, "tickfont": {"size": 10}}
    quiet: Spec = {"type": "category", "showgrid": False, "zeroline": False, "ticks": "outside", "ticklen": 3}
    quiet |= {"tickcolor": "rgba(0,0,0,0)", "automargin": True}
    across, down = strided(len(steps), 8), strided(len(sites), 14)
    x = quiet | {"tickvals": across, "ticktext": [step_words(steps[i]) for i in across], "tickangle": 0}
    x |= {"title": {"text": "step", "standoff": 6, "font": {"size": 11}}}
    y = quiet | {"tickvals": down, "ticktext": [html.escape(names[i]) for i in down]}
    return {"data": [trace], "layout": base_layout(palette) | {"xaxis": x, "yaxis": y}}


def thinned(line: Sequence[Mark], time: Time, most: int = 240) -> list[Mark]:
    """Marks averaged within even parts of the axis where there are more than a drawing can show."""
    if len(line) <= most:
        return list(line)
    low, high = time.ends
    width = ((high - low) or 1.0) / most
    parts: dict[int, list[Mark]] = {}
    for mark in line:
        parts.setdefault(int((time.place(mark.step) - low) / width), []).append(mark)
    return [_mean(marks) for _, marks in sorted(parts.items())]


def _mean(marks: Sequence[Mark]) -> Mark:
    values = [m.value for m in marks if m.value is not None]
    middle = marks[len(marks) // 2]
    if len(marks) == 1:
        return middle
    return middle._replace(value=fmean(values) if values else None, low=None, high=None)
