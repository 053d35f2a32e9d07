"""Plotly traces and layouts of one panel, as plain dictionaries."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from anisoscope.view.palette import DASHES, LIGHT, Palette
from anisoscope.view.series import Line, Panel, Point, without_first
from anisoscope.view.words import estimate, finite, number

FINAL_GAP = 0.12  # of the whole depth: how far the final norm stands apart from the last block
MARKERS = {"decoder": "square", "encoder": "circle", "encoder-decoder": "circle", "rows": "diamond"}
LOG_FONT = 9.5  # plotly enlarges the labels of logarithmic axes by a quarter
Spec = dict[str, Any]


@dataclass(frozen=True)
class Axis:
    """Where points stand: by layer for one depth, by relative depth where depths differ or models are compared."""

    relative: bool
    blocks: int
    has_final: bool
    named: tuple[tuple[float, str], ...] = ()  # places that are no blocks: rows of a file, weight tables, modules

    @classmethod
    def of(cls, lines: Sequence[Line]) -> Axis:
        """The axis that suits these lines."""
        models = {line.subject.model for line in lines}
        depths = {line.subject.blocks for line in lines}
        points = [p for line in lines for p in line.points]
        relative = len(models) > 1 or len(depths) > 1
        odd = {(float(p.layer), p.kind) for p in points if p.kind in ("rows", "unembed", "embed_weight")}
        return cls(relative, max(depths, default=1), any(p.kind == "final" for p in points), tuple(sorted(odd)))

    def place(self, point: Point) -> float:
        if point.kind == "final":
            return 1 + FINAL_GAP if self.relative else self.blocks + max(1.0, FINAL_GAP * self.blocks)
        return point.depth if self.relative else float(point.layer)

    def ticks(self) -> tuple[list[float], list[str]]:
        at, text = self._depth_ticks() if self.relative else self._layer_ticks()
        if self.has_final:
            at.append(1 + FINAL_GAP if self.relative else self.blocks + max(1.0, FINAL_GAP * self.blocks))
            text.append("final")
        return at, text

    def _depth_ticks(self) -> tuple[list[float], list[str]]:
        if self.blocks == 0:
            return [0.0], ["rows"]
        return [0.0, 0.25, 0.5, 0.75, 1.0], ["embed", "¼", "½", "¾", "1"]

    def _layer_ticks(self) -> tuple[list[float], list[str]]:
        if self.named:
            names = {"embed_weight": "embedding table", "unembed": "output head"}
            return [at for at, _ in self.named], [names.get(kind, kind) for _, kind in self.named]
        step = next((s for s in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20) if self.blocks / s <= 8), 25)
        layers = [n for n in range(step, self.blocks + 1, step) if self.blocks - n >= step * 0.6 or n == self.blocks]
        layers += [] if self.blocks in layers or not self.blocks else [self.blocks]
        return [0.0, *map(float, layers)], ["embed", *map(str, layers)]

    @property
    def title(self) -> str:
        return "relative depth" if self.relative else "" if self.named else "block"


@dataclass(frozen=True)
class Style:
    """How one line looks."""

    color: str
    band: str
    dash: str
    symbol: str
    label: str
    hollow: bool


def style_lines(panel: Panel, palette: Palette) -> list[Style]:
    """Models by colour, roles by marker, no first position by dashes; groups or variants by colour within one model."""
    lines = panel.lines
    groups = list(dict.fromkeys(line.group for line in lines))
    variants = [v for v in dict.fromkeys(line.variant for line in lines) if not without_first(v)]
    return [_style(line, palette, groups=groups, variants=variants) for line in lines]


def _style(line: Line, palette: Palette, *, groups: list[str], variants: list[str]) -> Style:
    hue, family = line.subject.index, 0
    if line.group:
        hue = groups.index(line.group)
        family = hue // len(LIGHT)
    elif len(variants) > 1:
        hue = variants.index(line.variant) if line.variant in variants else 0
    else:
        family = line.subject.index // len(LIGHT)
    dropped = without_first(line.variant)
    return Style(
        color=palette.series(hue),
        band=palette.series(hue, 0.09 if dropped else 0.16),
        dash="dash" if dropped else DASHES[family % len(DASHES)],
        symbol=MARKERS.get(line.subject.role, "circle"),
        label=line.group or line_label(line, alone=len(variants) > 1),
        hollow=dropped,
    )


def line_label(line: Line, *, alone: bool = False) -> str:
    """A line's name with its variant in words; the variant alone where only that tells lines apart."""
    variant = (line.variant or "").replace("first=out", "without first position").replace(";", ", ")
    return " · ".join(part for part in ("" if alone else line.subject.label, variant) if part)


def line_traces(line: Line, style: Style, *, axis: Axis, palette: Palette, axes: str = "") -> list[Spec]:
    """Band, line, and the points that stand alone (the final norm, or a place between gaps) with bars of their own."""
    runs = list(_runs(line.body))
    lone = [p for run in runs if len(run) == 1 for p in run] + [p for p in line.final if p.value is not None]
    name = html.escape(style.label)  # legends are markup too
    shared: Spec = {"meta": {"line": line.subject.index}, "legendgroup": name, "name": name}
    shared |= {"xaxis": f"x{axes}", "yaxis": f"y{axes}"}
    traces = [_band(runs, style, axis), _path(runs, style, axis, palette), _lone(lone, style, axis, palette)]
    shown = [shared | {"showlegend": False} | trace for trace in traces if trace]
    named = [trace for trace in shown if "markers" in trace["mode"]]  # a band alone would be a poor legend entry
    if named:
        named[0]["showlegend"] = True
    return shown


def _runs(points: Iterable[Point]) -> Iterable[list[Point]]:
    """Unbroken stretches of computed points."""
    run: list[Point] = []
    for point in points:
        if point.value is None:
            if run:
                yield run
            run = []
        else:
            run.append(point)
    if run:
        yield run


def _band(runs: list[list[Point]], style: Style, axis: Axis) -> Spec | None:
    x: list[float | None] = []
    y: list[float | None] = []
    for run in runs:
        banded = [p for p in run if p.interval]
        if len(banded) < 2:
            continue
        x += [*map(axis.place, banded), *map(axis.place, reversed(banded)), None]
        y += [*(p.low for p in banded), *(p.high for p in reversed(banded)), None]
    if not x:
        return None
    base = {"type": "scatter", "x": x[:-1], "y": y[:-1], "mode": "lines", "fill": "toself", "hoverinfo": "skip"}
    return base | {"fillcolor": style.band, "line": {"width": 0, "color": style.band}}


def _path(runs: list[list[Point]], style: Style, axis: Axis, palette: Palette) -> Spec | None:
    long = [run for run in runs if len(run) > 1]
    if not long:
        return None
    points: list[Point | None] = [p for run in long for p in (*run, None)][:-1]
    crowded = sum(p is not None for p in points) > 16
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [p and axis.place(p) for p in points],
        "y": [p and p.value for p in points],
        "text": [hover_text(p, style.label) if p else "" for p in points],
        "hovertemplate": "%{text}<extra></extra>",
        "line": {"color": style.color, "width": 1.4 if style.hollow else 1.9, "dash": style.dash},
        "marker": _marker(style, 4 if crowded else 5.5, palette),
    }


def _lone(points: list[Point], style: Style, axis: Axis, palette: Palette) -> Spec | None:
    if not points:
        return None
    up = [0 if p.high is None or p.value is None else max(0.0, p.high - p.value) for p in points]
    down = [0 if p.low is None or p.value is None else max(0.0, p.value - p.low) for p in points]
    bars = {"type": "data", "array": up, "arrayminus": down, "thickness": 1.2, "width": 3, "color": style.color}
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [axis.place(p) for p in points],
        "y": [p.value for p in points],
        "text": [hover_text(p, style.label) for p in points],
        "hovertemplate": "%{text}<extra></extra>",
        "error_y": bars,
        "marker": _marker(style, 7, palette) | {"symbol": "diamond"},
    }


def _marker(style: Style, size: float, palette: Palette) -> Spec:
    fill = palette.role("paper") if style.hollow else style.color
    return {"size": size, "symbol": style.symbol, "color": fill, "line": {"color": style.color, "width": 1.2}}


def hover_text(point: Point, label: str) -> str:
    """Everything the table knows of a point; names are escaped, since hover text is markup."""
    record = point.record
    parts = [f"<b>{html.escape(label)}</b>", html.escape(point.place)]
    band = record.get("band")  # what the band shows where it is no interval of the value
    parts.append(f"<b>{number(point.value) if band else estimate(point.value, point.low, point.high)}</b>")
    if point.interval:
        parts.append(f"{band or 'interval'} {number(point.low, 4)} to {number(point.high, 4)}")
    sd = finite(record.get("sd"))
    parts += [f"sd {number(sd)}"] if sd is not None else []
    counts = [f"{name} {record[name]:,}" for name in ("n", "contexts", "dropped") if record.get(name) is not None]
    parts += [" · ".join(counts)] if counts else []
    parts += [html.escape(_wrap(record["note"])).replace("\n", "<br>")] if record.get("note") else []
    return "<br>".join(parts)


def _wrap(text: str, width: int = 46) -> str:
    return "\n".join(textwrap.wrap(text, width))


def base_layout(palette: Palette) -> Spec:
    """What all figures share: no background of their own, quiet rules, no template."""
    font = {"family": "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', sans-serif", "size": 11.5}
    return {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": font | {"color": palette.role("ink")},
        "margin": {"l": 46, "r": 10, "t": 10, "b": 40},
        "showlegend": False,
        "hovermode": "closest",
        "hoverlabel": {"align": "left", "font": {"size": 12}},
    }


def wants_log(values: Sequence[float]) -> bool:
    """Whether a metric spans so many orders (massive activations do) that only a logarithmic axis shows it."""
    return len(values) > 1 and min(values) > 0 and max(values) / min(values) > 100


def y_axis(panel: Panel, palette: Palette) -> Spec:
    """The value axis: from zero where zero is the metric's floor and near enough to matter."""
    values = panel.values
    axis: Spec = {"gridcolor": palette.role("rule"), "zeroline": False, "nticks": 5, "exponentformat": "power"}
    axis |= {"tickcolor": palette.role("rule"), "automargin": True, "fixedrange": False}
    if wants_log(values):
        return axis | {"type": "log", "nticks": 4, "tickfont": {"size": LOG_FONT}}
    if panel.entry.bounds[0] == 0 and values and min(values) < 0.4 * max(values):
        axis["rangemode"] = "tozero"
    return axis


def x_axis(axis: Axis, palette: Palette) -> Spec:
    """The depth axis, with the embedding at its start and the final norm set apart."""
    at, text = axis.ticks()
    spec: Spec = {"tickvals": at, "ticktext": text, "showgrid": False, "zeroline": False, "tickangle": 0}
    spec |= {
        "title": {"text": axis.title, "standoff": 6, "font": {"size": 11}},
        "linecolor": palette.role("rule"),
        "showline": True,
    }
    reach = (max(at) - min(at)) or 1.0
    return spec | {"range": [min(at) - 0.06 * reach, max(at) + 0.08 * reach]}
