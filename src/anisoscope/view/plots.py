"""Interactive profiles: a metric over depth, alone or as small multiples."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from anisoscope.errors import AnisoscopeError, unknown_name
from anisoscope.view.catalogue import Catalogue
from anisoscope.view.heads import head_mean_panels
from anisoscope.view.palette import Palette, Paper
from anisoscope.view.series import Panel, Sheet, Source, without_first
from anisoscope.view.traces import Axis, Spec, base_layout, line_traces, style_lines, x_axis, y_axis

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from anisoscope.results.table import Table

COLUMNS = 2


def profile_figure(table: Table, metric: str | None = None, *, catalogue: Mapping[str, Any] | None = None) -> go.Figure:
    """A metric over depth with its intervals; without a name, small multiples of the main metrics."""
    import plotly.graph_objects as go

    sheet = Sheet([Source(table, table.about)], Catalogue(catalogue))
    panels = _chosen(sheet, metric)
    return go.Figure(_grid(panels, Paper()))


def _chosen(sheet: Sheet, metric: str | None) -> list[Panel]:
    known = sheet.metrics()
    if not known:
        raise AnisoscopeError("this table has no rows, so there is nothing to plot; measure something first.")
    if metric is not None and metric not in known:
        raise unknown_name("metric", metric, known)
    panels = [*sheet.panels(), *sheet.panels_elsewhere(), *head_mean_panels(sheet)]
    if metric is not None:
        return [p for p in panels if p.metric == metric]
    first = [p for p in panels if not p.variant and not p.kind] or panels
    main = sheet.catalogue.main({p.metric for p in first})
    return [p for p in first if p.metric in main]


def _grid(panels: Sequence[Panel], palette: Palette) -> Spec:
    """All panels in one figure, in a grid of axes."""
    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    layout = base_layout(palette) | {"height": 300 * rows + 60, "annotations": [], "showlegend": True}
    layout["legend"] = {"orientation": "h", "y": 1.0 + 0.16 / rows, "x": 0, "yanchor": "bottom"}
    layout["margin"] = {"l": 55, "r": 20, "t": 70, "b": 50}
    traces: list[Spec] = []
    seen: set[str] = set()
    for i, panel in enumerate(panels):
        box = _cell(i, rows=rows, columns=columns)
        name = "" if i == 0 else str(i + 1)
        drawn = panel_traces(panel, palette, axes=name)
        axis = Axis.of(panel.lines)
        layout[f"xaxis{name}"] = x_axis(axis, palette) | {"domain": box[0], "anchor": f"y{name}"}
        layout[f"yaxis{name}"] = y_axis(panel, palette) | {"domain": box[1], "anchor": f"x{name}"}
        layout["annotations"].append(_heading(panel.title, box))
        traces += [_once(trace, seen) for trace in drawn]
    return {"data": traces, "layout": layout}


def _cell(i: int, *, rows: int, columns: int) -> tuple[list[float], list[float]]:
    row, column = divmod(i, columns)
    gap_x, gap_y = 0.09, 0.32 / rows
    width = (1 - gap_x * (columns - 1)) / columns
    height = (1 - gap_y * (rows - 1)) / rows
    left, top = column * (width + gap_x), 1 - row * (height + gap_y)
    return [left, left + width], [max(0.0, top - height), top]


def _heading(text: str, box: tuple[list[float], list[float]]) -> Spec:
    base: Spec = {"text": f"<b>{html.escape(text)}</b>", "showarrow": False, "xref": "paper", "yref": "paper"}
    return base | {"x": box[0][0], "y": box[1][1], "xanchor": "left", "yanchor": "bottom", "yshift": 6}


def _once(trace: Spec, seen: set[str]) -> Spec:
    """One legend entry per name over all panels."""
    if trace["showlegend"] and trace["name"] in seen:
        return trace | {"showlegend": False}
    if trace["showlegend"]:
        seen.add(trace["name"])
    return trace


def panel_traces(panel: Panel, palette: Palette, *, axes: str = "") -> list[Spec]:
    """All traces of a panel, bands beneath lines."""
    axis = Axis.of(panel.lines)
    styles = style_lines(panel, palette)
    drawn = [
        trace
        for line, style in zip(panel.lines, styles, strict=True)
        for trace in line_traces(line, style, axis=axis, palette=palette, axes=axes)
    ]
    return sorted(drawn, key=lambda trace: trace.get("fill") != "toself")


def panel_spec(panel: Panel, palette: Palette) -> Spec:
    """One panel as a figure of its own; several variants or groups of one model need a legend inside it."""
    axis = Axis.of(panel.lines)
    layout = base_layout(palette) | {"xaxis": x_axis(axis, palette), "yaxis": y_axis(panel, palette)}
    if needs_legend(panel):
        layout |= {"showlegend": True, "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}}
    return {"data": panel_traces(panel, palette), "layout": layout}


def needs_legend(panel: Panel) -> bool:
    """Whether colours in this panel mean something other than the models of the page's own legend."""
    variants = {line.variant for line in panel.lines if not without_first(line.variant)}
    return len(variants) > 1 or any(line.group for line in panel.lines)
