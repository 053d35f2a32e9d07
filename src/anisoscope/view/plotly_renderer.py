"""Panels as plotly dictionaries: compact ones, completed by the script of the page, and complete ones for notebooks.

A compact trace has, besides plotly's keys, `low`, `high` and `band` or `bars` (the script adds the band or whiskers),
`where` and `facts` (for the hover text), and `{"r": …}` for references into the arrays of the page.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from anisoscope.view.figure import HEAT, Axis, Grid, Level, Panel, Ref, Series, brief, faded, notebook_colour
from anisoscope.view.words import number, strided

LOG_FONT = 9.5  # plotly enlarges the labels of logarithmic axes by a quarter
ORDERS = 5  # number of ticks of a logarithmic axis
OWN_PARTS = ("y", "z", "text", "low", "high")  # keys that traces seldom share
LISTS = ("x", "where")
Spec = dict[str, Any]


def panel_spec(panel: Panel) -> Spec:
    """A panel as JSON for the page; with views, the traces and axes of each view, and what they share once."""
    base: Spec = {"data": _traces(panel), "layout": _layout(panel)}
    below = panel.below
    if below is not None:  # a lower panel on the same x axis
        base["data"] += _traces(below, "2")
        axes = base["layout"]
        axes["xaxis"] |= {"anchor": "y2"}
        axes["yaxis"] |= {"domain": [0.36, 1], "anchor": "x"}
        axes["yaxis2"] = _layout(below)["yaxis"] | {"domain": [0, 0.27], "anchor": "x", "nticks": 4}
        if below.right is not None:
            side = {"overlaying": "y2", "side": "right", "anchor": "x", "showgrid": False}
            axes["yaxis3"] = _axis(below.right) | side | {"tickfont": {"size": 9}}
        axes["margin"] = {"l": 46, "r": 44, "t": 10, "b": 40}
    if not panel.views:
        return base
    views = {key: _view(view, panel) for key, view in panel.views.items()}
    spec = with_shared(base | {"views": views, "by": list(panel.by)})
    return spec | ({"page": panel.page_by} if panel.page_by else {})


def _view(view: Panel, whole: Panel) -> Spec:
    """The traces, axes, shapes and annotations of a view."""
    layout = _layout(view)
    found: Spec = {"data": _traces(view), "x": layout["xaxis"], "y": layout["yaxis"]}
    if whole.below is not None:
        found["x"] |= {"anchor": "y2"}
        found["y"] |= {"domain": [0.36, 1]}
    found |= {"margin": layout["margin"]} if view.heading and whole.below is None else {}
    return found | {name: layout[name] for name in ("shapes", "annotations") if layout[name]}


def _traces(panel: Panel, axes: str = "") -> list[Spec]:
    drawn = [_trace(series, axes) for series in panel.series]
    if panel.legend:
        shown = [series.named and not series.quiet for series in panel.series]
        drawn = [trace | {"showlegend": named} for trace, named in zip(drawn, shown, strict=True)]
    for level in panel.levels:
        ends = _trace_ends(level, panel)
        if ends is None:
            continue
        both = [brief(level.value)] * 2  # type: ignore[arg-type]
        x, y = (both, ends) if level.upright else (ends, both)
        line, name = {"color": level.colour, "width": 1, "dash": level.dash}, html.escape(level.label)
        words = {"name": name, "hovertemplate": f"{name} {number(level.value)}<extra></extra>", "showlegend": False}  # type: ignore[arg-type]
        drawn.append({"type": "scatter", "mode": "lines", "x": x, "y": y, "line": line, **words})
    return drawn if panel.grid is None else [*drawn, _map_trace(panel.grid)]


def plain(values: Any) -> Any:
    """Numbers or references as JSON values."""
    if isinstance(values, Ref):
        found: Spec = {"r": [values.array, *(list(i) if isinstance(i, tuple) else i for i in values.at)]}
        found |= {} if values.times == 1.0 else {"times": plain(values.times)}
        return found | ({} if values.plus is None else {"plus": values.plus})
    return list(values) if isinstance(values, Sequence) and not isinstance(values, str) else values


def _escaped(words: Any) -> Any:
    if isinstance(words, str):
        return html.escape(words)
    return plain(words) if isinstance(words, Ref) else [html.escape(str(word)) for word in words]


def _trace(series: Series, axes: str = "") -> Spec:
    mode = "+".join(part for part, there in (("lines", series.width), ("markers", series.size)) if there) or "none"
    trace: Spec = {"type": "scatter", "mode": mode, "name": _escaped(series.label)}
    trace |= {"x": plain(series.x), "y": plain(series.y), "showlegend": False}
    if series.width or not series.size:
        line: Spec = {"color": series.colour, "width": series.width, "dash": series.dash}
        trace["line"] = line | ({"shape": "hv"} if series.stairs else {})
    if series.size:
        trace["marker"] = _marker(series)
    trace |= {"connectgaps": True} if series.join else {}
    trace |= {"meta": {"line": series.owner}} if series.owner is not None else {}
    trace |= {"each": series.each} if series.each else {}
    trace |= {"start": [list(part) for part in series.start]} if series.start else {}
    if series.low is not None and series.high is not None:
        trace |= {"low": plain(series.low), "high": plain(series.high), "reach": series.reach}
        trace |= {"bars": series.bars} if series.bars else {"band": series.band}
    if axes or series.right:
        trace["yaxis"] = "y3" if series.right else f"y{axes}"
    if series.quiet:
        return trace | {"hoverinfo": "skip"}
    words = {"text": plain(series.text), "where": _escaped(series.where)}
    words["facts"] = [[name, plain(values)] for name, values in series.facts]
    return trace | {key: value for key, value in words.items() if value}


def _marker(series: Series) -> Spec:
    marker: Spec = {"size": series.size, "symbol": series.marker}
    if series.shade is not None:
        return marker | {"color": plain(series.shade), "colorscale": "@seq", "cmin": 0, "cmax": 1, "line": {"width": 0}}
    if not isinstance(series.hollow, bool):
        marker["hollow"] = list(series.hollow)
    fill = "@paper" if series.hollow is True else series.colour
    return marker | {"color": fill, "line": {"color": series.colour, "width": 1.2}}


def _trace_ends(level: Level, panel: Panel) -> list[float] | None:
    """Where a level that is drawn as a trace with hover text begins and ends; None for one that is drawn as a shape.

    A trace counts in the range of its axes, so it must have the ends of the axis it runs along; where the page chooses
    those by the data, a shape across the panel carries the label instead.
    """
    bounds = (panel.y if level.upright else panel.x).bounds
    named = bool(level.label) and level.until is None and not isinstance(level.value, Ref)
    return list(bounds) if named and isinstance(bounds, tuple) else None


def _shape(level: Level) -> Spec:
    a, b = ("x", "y") if level.upright else ("y", "x")
    end = level.value if level.until is None else level.until
    ends = {f"{a}0": plain(level.value), f"{a}1": plain(end), f"{b}0": 0, f"{b}1": 1}
    place: Spec = {f"{a}ref": a, f"{b}ref": "paper", "layer": "below", **ends}
    if level.until is not None:
        return place | {"type": "rect", "fillcolor": faded(level.colour, 0.16), "line": {"width": 0}}
    place |= {"type": "line", "line": {"color": level.colour, "width": 1, "dash": level.dash}}
    if level.label:
        words = {"text": html.escape(level.label), "textposition": "end", "font": {"size": 10, "color": level.colour}}
        place["label"] = words | {"textangle": 0, "yanchor": "bottom"}
    return place


def _map_trace(grid: Grid) -> Spec:
    xs, ys = _escaped(grid.columns), _escaped(grid.rows)
    trace: Spec = {"type": "heatmap", "z": plain(grid.z), "x": xs, "y": ys, "colorscale": "@heat", "hoverongaps": False}
    trace |= {"xgap": 1, "ygap": 1, "hovertemplate": "%{y} · %{x}<br><b>%{z:.4~g}</b><extra></extra>"}
    trace["colorbar"] = {"thickness": 9, "outlinewidth": 0, "nticks": 5, "len": 1.0, "tickfont": {"size": 10}}
    if grid.low is not None and grid.high is not None:
        trace |= {"low": plain(grid.low), "high": plain(grid.high), "reach": grid.reach}
    if grid.ends[0] is not None and grid.ends[1] is not None:
        trace |= {"zmin": brief(grid.ends[0]), "zmax": brief(grid.ends[1])}
    return trace


def _layout(panel: Panel) -> Spec:
    layout = base_layout() | {"xaxis": _axis(panel.x, across=True), "yaxis": _axis(panel.y)}
    for name, axis, values in (("xaxis", panel.x, "x"), ("yaxis", panel.y, "y")):
        if axis.log and axis.bounds is None and axis.ticks is None:
            lists = [plain(getattr(one, values)) for one in panel.series]
            layout[name] |= _decades([v for numbers in lists if isinstance(numbers, list) for v in numbers])
    if panel.grid is not None:
        layout |= _map_axes(panel)
    if panel.equal:
        layout["yaxis"] |= {"scaleanchor": "x", "constrain": "domain"}
        layout["xaxis"] |= {"constrain": "domain"} | {"constraintoward": "right" if panel.grid else "left"}
    layout["shapes"] = [_shape(level) for level in panel.levels if _trace_ends(level, panel) is None]
    layout["annotations"] = words = []
    for note in panel.notes:
        place: Spec = {"x": note.x, "y": note.y, "showarrow": False, "text": html.escape(note.text)}
        place |= {"font": {"size": 11}, "align": "left", "xanchor": "left" if note.inside else "center"}
        words.append(place | ({"xref": "paper", "yref": "paper", "yanchor": "top"} if note.inside else {}))
    if panel.heading:
        place = {"showarrow": False, "xref": "paper", "yref": "paper", "x": 0, "y": 1}
        place["text"] = f"<b>{html.escape(panel.heading)}</b>"
        words.append(place | {"xanchor": "left", "yanchor": "bottom", "yshift": 2})
        layout["margin"] = layout["margin"] | {"t": 22}
    if panel.legend:
        layout |= {"showlegend": True, "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}}
    return layout


def base_layout() -> Spec:
    """The layout shared by all figures: transparent background, light grid lines, no template."""
    font = {"family": "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', sans-serif", "size": 11.5, "color": "@ink"}
    look: Spec = {"paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)", "font": font}
    look |= {"margin": {"l": 46, "r": 10, "t": 10, "b": 40}, "showlegend": False, "hovermode": "closest"}
    return look | {"hoverlabel": {"align": "left", "font": {"size": 12}}}


def _axis(axis: Axis, *, across: bool = False) -> Spec:
    ends = {} if axis.bounds is None else {"range": plain(axis.bounds)}
    if axis.hidden:
        return {"visible": False, **ends}
    spec: Spec = {"zeroline": False, "showgrid": axis.rules, "gridcolor": "@rule", "tickcolor": "@rule"}
    spec |= {"nticks": axis.most, "exponentformat": "power", "automargin": True}
    if axis.title:
        spec["title"] = {"text": html.escape(axis.title), "standoff": 6 if across else 8, "font": {"size": 11}}
    if across:
        spec |= {"tickangle": 0, "showline": True, "linecolor": "@rule"}
    if axis.ticks is not None:
        spec |= {"tickvals": list(axis.ticks[0]), "ticktext": [html.escape(str(t)) for t in axis.ticks[1]]}
    if not axis.log:
        spec |= {**({"rangemode": "tozero"} if axis.from_zero else {}), **ends}
    else:
        spec |= {"type": "log", "tickfont": {"size": LOG_FONT}}
        if isinstance(axis.bounds, tuple):
            spec |= {"range": [math.log10(end) for end in axis.bounds]}
            spec |= _ticks(*axis.bounds) if axis.ticks is None else {}
    return spec | ({"autorange": "reversed"} if axis.reverse else {})


def _decades(values: Sequence[Any]) -> Spec:
    """The ticks of a logarithmic axis over these values."""
    known = [v for v in values if isinstance(v, int | float) and v > 0]
    return _ticks(min(known), max(known)) if known else {}


def _ticks(low: float, high: float) -> Spec:
    """Powers of ten where there are several orders of magnitude, with 2 and 5 times them for one or two.

    plotly would write the latter as 2 and 5 alone, whatever the power.

    >>> _ticks(0.5, 4)["ticktext"][:6]
    ['0.01', '0.02', '0.05', '0.1', '0.2', '0.5']
    """
    orders = math.log10(high / low)
    if orders > 2:
        return {"dtick": math.ceil(orders / ORDERS - 0.05)}
    if orders <= 0.5:
        return {}
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    texts = [f"{float(f'{digit}e{power}'):g}" for power in powers for digit in (1, 2, 5)]
    return {"tickvals": [float(text) for text in texts], "ticktext": texts}


def _map_axes(panel: Panel) -> Spec:
    """The axes of a heat map: labels at some of its rows and columns."""
    quiet: Spec = {"showgrid": False, "zeroline": False, "ticks": "", "automargin": True, "type": "category"}
    found: Spec = {}
    for name, names, axis, most in (
        ("xaxis", panel.grid.columns, panel.x, 8),  # type: ignore[union-attr]
        ("yaxis", panel.grid.rows, panel.y, 14),  # type: ignore[union-attr]
    ):
        at, text = axis.ticks or (strided(len(names), most), [names[i] for i in strided(len(names), most)])
        found[name] = quiet | {"tickvals": list(at), "ticktext": [html.escape(str(word)) for word in text]}
        found[name]["tickangle"] = 0
        if axis.title:
            found[name]["title"] = {"text": html.escape(axis.title), "standoff": 6, "font": {"size": 11}}
        found[name] |= {"autorange": "reversed"} if axis.reverse else {}
    return found


def with_shared(spec: Spec) -> Spec:
    """The same figure with data common to several traces stored once: lists in `shared`, other keys in `styles`.

    >>> trace = {"type": "scatter", "x": [1, 2], "y": [3, 4]}
    >>> drawn = with_shared({"views": {"0": {"data": [trace, trace]}}})
    >>> drawn["views"]["0"]["data"][1], drawn["shared"], drawn["styles"]
    ({'y': [3, 4], 'x': 0, 'style': 0}, [[1, 2]], [{'type': 'scatter'}])
    """
    lists: dict[str, int] = {}
    styles: dict[str, int] = {}

    def slim(trace: Spec) -> Spec:
        style = {name: value for name, value in trace.items() if name not in (*OWN_PARTS, *LISTS)}
        compact = {name: trace[name] for name in OWN_PARTS if name in trace}
        compact |= {name: lists.setdefault(json.dumps(trace[name]), len(lists)) for name in LISTS if name in trace}
        return compact | {"style": styles.setdefault(json.dumps(style), len(styles))}

    views = {key: view | {"data": list(map(slim, view["data"]))} for key, view in spec["views"].items()}
    return spec | {"views": views, "shared": [*map(json.loads, lists)], "styles": [*map(json.loads, styles)]}


# whole figures for notebooks


def notebook_figure(panels: Sequence[Panel], *, columns: int = 2) -> Spec:
    """All panels as one plotly figure with a grid of axes in light colours; each name is once in the legend."""
    columns = min(columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    size, tall = _legend_size(panels)
    layout = base_layout() | {"height": max(320 * rows + 40, tall + 110), "annotations": []}
    layout["legend"] = {"x": 1.01, "y": 1.0, "xanchor": "left", "yanchor": "top", "font": {"size": size}}
    layout["legend"] |= {"tracegroupgap": 0, "itemwidth": 30}
    layout["margin"] = {"l": 55, "r": 20, "t": 40, "b": 50}
    width, height = (1 - 0.09 * (columns - 1)) / columns, (1 - 0.32 / rows * (rows - 1)) / rows
    traces: list[Spec] = []
    seen: set[str] = set()
    for i, panel in enumerate(panels):
        row, place = divmod(i, columns)
        left, top = place * (width + 0.09), 1 - row * (height + 0.32 / rows)
        across, up = [left, left + width], [max(0.0, top - height), top]
        name = "" if i == 0 else str(i + 1)
        panel_layout = _layout(panel)
        layout[f"xaxis{name}"] = panel_layout["xaxis"] | {"domain": across, "anchor": f"y{name}"}
        layout[f"yaxis{name}"] = panel_layout["yaxis"] | {"domain": up, "anchor": f"x{name}"}
        heading: Spec = {"text": f"<b>{html.escape(panel.title)}</b>", "showarrow": False, "xref": "paper"}
        layout["annotations"].append(
            heading | {"yref": "paper", "x": across[0], "y": up[1], "xanchor": "left", "yanchor": "bottom", "yshift": 6}
        )
        drawn: list[Spec] = []
        for trace, series in zip(_traces(panel), panel.series, strict=False):
            wanted = series.named and not series.quiet and trace["name"] not in seen
            seen |= {trace["name"]} if wanted else set()
            axes = {"xaxis": f"x{name}", "yaxis": f"y{name}"}
            drawn += [part | axes for part in complete(trace | {"showlegend": wanted})]
        traces += sorted(drawn, key=lambda trace: trace.get("fill") != "toself")
    layout["showlegend"] = len(seen) > 1
    return painted({"data": traces, "layout": layout})


def _legend_size(panels: Sequence[Panel]) -> tuple[float, int]:
    """The size of the letters of a legend beside the panels, and its height in pixels: smaller letters for many."""
    names = {str(s.label) for panel in panels for s in panel.series if s.named and not s.quiet}
    size = 11.5 if len(names) <= 16 else 10.0 if len(names) <= 32 else 9.0
    return size, round(len(names) * 19.2)  # a line of plotly's has 19 pixels, whatever its letters


def complete(trace: Spec) -> list[Spec]:
    """The plotly traces of a compact trace: with its band, whiskers and hover text."""
    low, high = trace.get("low"), trace.get("high")
    bare = {k: v for k, v in trace.items() if k not in ("low", "high", "band", "bars", "reach", "where", "facts")}
    if "text" in bare:
        bare["hovertemplate"] = "%{text}<extra></extra>"
    if not low or not high:
        return [bare]
    if "bars" in trace:
        middle = trace["y"] if trace["bars"] == "y" else trace["x"]
        up = [0 if v is None or h is None else max(0.0, h - v) for v, h in zip(middle, high, strict=True)]
        down = [0 if v is None or x is None else max(0.0, v - x) for v, x in zip(middle, low, strict=True)]
        colour = trace["marker"]["line"]["color"]
        whiskers = {"type": "data", "array": up, "arrayminus": down, "thickness": 1.2, "width": 3, "color": colour}
        return [bare | {f"error_{trace['bars']}": whiskers}]
    return [*_bands(trace, low, high), bare]


def _bands(trace: Spec, low: Sequence[Any], high: Sequence[Any]) -> list[Spec]:
    x: list[Any] = []
    y: list[Any] = []
    run: list[int] = []
    for i, ends in enumerate([*zip(low, high, trace["y"], strict=True), (None, None, None)]):
        if None not in ends:
            run.append(i)
            continue
        if len(run) > 1:
            x += [*(trace["x"][j] for j in run), *(trace["x"][j] for j in reversed(run)), None]
            y += [*(low[j] for j in run), *(high[j] for j in reversed(run)), None]
        run = []
    if not x:
        return []
    shade = faded(trace["line"]["color"], trace["band"])
    fill = {"fill": "toself", "hoverinfo": "skip", "fillcolor": shade, "line": {"width": 0, "color": shade}}
    line = {"type": "scatter", "mode": "lines", "x": x[:-1], "y": y[:-1], "name": trace["name"]}
    return [line | {"showlegend": False} | fill]


def painted(value: Any) -> Any:
    """A specification with all colour tokens replaced by colours."""
    if isinstance(value, Mapping):
        return {key: painted(part) for key, part in value.items()}
    if isinstance(value, list):
        return [painted(part) for part in value]
    if value == "@heat":
        return [[i / (len(HEAT) - 1), colour] for i, colour in enumerate(HEAT)]
    return notebook_colour(value) if isinstance(value, str) and value.startswith("@") else value
