"""Tables for people: the pivot in a notebook, and the few lines a terminal prints after a run."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from anisoscope.view.catalogue import Catalogue
from anisoscope.view.findings import doubtful
from anisoscope.view.series import Point, Sheet, Source, Subject, make_point
from anisoscope.view.words import estimate, half_width, number

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from anisoscope.results.table import Table

MOST_ROWS = 64
TERMINAL_ROWS = 40  # of one model; several models side by side get fewer rows and columns
TERMINAL_METRICS = 5

# Colours are mixed from the notebook's own text colour, so that light and dark both read.
STYLE = """
.anisoscope-table{overflow-x:auto;font-variant-numeric:tabular-nums}
.anisoscope-table table{border-collapse:collapse;font-size:12.5px;line-height:1.35;margin:.3em 0}
.anisoscope-table caption{text-align:left;font-size:12px;opacity:.75;padding:.2em 0 .5em;caption-side:top}
.anisoscope-table th,.anisoscope-table td{padding:.28em .8em;text-align:right;border:0;background:none;
color:inherit;white-space:nowrap;vertical-align:top}
.anisoscope-table th{font-weight:600}
.anisoscope-table th[scope=row],.anisoscope-table th[scope=rowgroup]{text-align:left}
.anisoscope-table thead tr{border-bottom:1.5px solid currentColor}
.anisoscope-table tbody tr{border-bottom:1px solid rgba(128,128,128,.25)}
.anisoscope-table small{display:block;opacity:.65;font-size:10.5px}
"""

Cell = Point | None
Places = dict[int, dict[tuple[int, bool, str], dict[str, Point]]]  # by subject, place and metric


def pivot(sheet: Sheet, metrics: Sequence[str]) -> Places:
    """Points by subject, then by place in order of depth, then by metric: default variants, all rows together."""
    found: Places = {}
    for subject in sheet.subjects:
        places: dict[tuple[int, bool, str], dict[str, Point]] = {}
        for metric in metrics:
            line = sheet.line(subject, metric)
            for point in line.points if line else ():
                places.setdefault((point.layer, point.kind == "final", point.kind), {})[metric] = point
        if places:
            found[subject.index] = dict(sorted(places.items()))
    return found


def default_metrics(sheet: Sheet) -> list[str]:
    """Metrics of the residual stream that have a default variant, in reading order."""
    names = {r["metric"] for r in sheet.stream() if not r["variant"]}
    return sheet.catalogue.ordered(names)


def table_html(table: Table, *, catalogue: Mapping[str, Any] | None = None) -> str:
    """A compact pivot, layers by main metrics, each value with its interval; safe to show whatever the names are."""
    sheet = Sheet([Source(table, table.about)], Catalogue(catalogue))
    names = default_metrics(sheet)
    metrics = sheet.catalogue.main(names)
    rows = _html_rows(sheet, metrics)
    head = "".join(f'<th scope="col">{html.escape(sheet.catalogue.entry(m).title)}</th>' for m in metrics)
    body = "".join(rows[:MOST_ROWS])
    caption = html.escape(
        _caption(len(table), shown=len(metrics), metrics=len(sheet.metrics()), cut=len(rows) > MOST_ROWS)
    )
    return (
        f'<div class="anisoscope-table"><style>{STYLE}</style><table><caption>{caption}</caption>'
        f'<thead><tr><th scope="col"></th>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _caption(rows: int, *, shown: int, metrics: int, cut: bool) -> str:
    text = f"{rows:,} rows of results; {shown} of {metrics} metrics shown"
    text += f", first {MOST_ROWS} places" if cut else ""
    return text + ". All of them: .to_pandas(); drawn: .plot()."


def _html_rows(sheet: Sheet, metrics: Sequence[str]) -> list[str]:
    rows = []
    several = len(sheet.subjects) > 1
    for index, places in pivot(sheet, metrics).items():
        if several:
            label = html.escape(sheet.subjects[index].label)
            rows.append(f'<tr><th scope="rowgroup" colspan="{len(metrics) + 1}">{label}</th></tr>')
        for cells in places.values():
            place = html.escape(next(iter(cells.values())).place)
            data = "".join(_html_cell(cells.get(m)) for m in metrics)
            rows.append(f'<tr><th scope="row">{place}</th>{data}</tr>')
    return rows


def _html_cell(point: Cell) -> str:
    if point is None:
        return "<td></td>"
    if point.value is None:
        return f'<td title="{html.escape(point.record.get("note") or "not computed")}">–</td>'
    half = half_width(point.low, point.high)
    interval = "" if half is None else f"<small>{number(point.low)} … {number(point.high)}</small>"
    return f"<td>{number(point.value)}{interval}</td>"


def short_table(table: Table, *, catalogue: Mapping[str, Any] | None = None) -> RichTable:
    """What the terminal shows at the end of a run: a row per layer, or per model where that would be too long."""
    return short_tables(table, catalogue=catalogue)[0]


def short_tables(table: Table, *, catalogue: Mapping[str, Any] | None = None) -> list[RichTable]:
    """The residual stream, and a table of each further kind of site that was asked for by name."""
    sheet = Sheet([Source(table, table.about)], Catalogue(catalogue))
    metrics = default_metrics(sheet)
    asked = (table.about.get("config") or {}).get("sites") or ()
    shown = [_shortened(sheet, pivot(sheet, metrics), metrics)]
    for kind in asked:
        places = _pivot_of(sheet, kind)
        known = sheet.catalogue.ordered({m for rows in places.values() for cells in rows.values() for m in cells})
        shown += [_shortened(sheet, places, known)] if places else []
    return shown


def _pivot_of(sheet: Sheet, kind: str) -> Places:
    """Points of a kind of site outside the stream; of what is measured by head the means over heads."""
    found: Places = {}
    for record in sheet.records:
        plain = record["head"] is None and not record["group"] and not record["variant"]
        if plain and record["kind"] == kind and not sheet.in_stream(record):
            subject = sheet.subject(record)
            point = make_point(record, blocks=subject.blocks)
            found.setdefault(subject.index, {}).setdefault((point.layer, False, kind), {})[record["metric"]] = point
    return {index: dict(sorted(places.items())) for index, places in sorted(found.items())}


def _shortened(sheet: Sheet, places: Places, metrics: Sequence[str]) -> RichTable:
    several = len(sheet.subjects) > 1
    few = list(metrics)[: TERMINAL_METRICS - several]
    short = {i: {at: cells for at, cells in rows.items() if any(m in cells for m in few)} for i, rows in places.items()}
    if sum(map(len, short.values())) <= TERMINAL_ROWS - 10 * several:
        return _by_layer(sheet, short, few)
    return _by_model(sheet, short, few)


def _by_layer(sheet: Sheet, places: Mapping[int, Any], metrics: Sequence[str]) -> RichTable:
    from rich.text import Text

    several = len(places) > 1
    heads = ("model", "site") if several else ("site",)
    cells = [point for rows in places.values() for cells in rows.values() for point in cells.values()]
    doubt = "; ? near-copies or noise decide" if any(map(doubtful, cells)) else ""
    shown = _rich(sheet, metrics, heads=heads, caption=f"± half of the 95 % interval{doubt}")
    for index, rows in places.items():
        label = Text(_subject_line(sheet.subjects[index]))
        for i, cells in enumerate(rows.values()):
            place = Text(next(iter(cells.values())).place)
            lead = [label if i == 0 else "", place] if several else [place]
            shown.add_row(*lead, *(_rich_cell(cells.get(m)) for m in metrics))
        shown.add_section()
    return shown


def _by_model(sheet: Sheet, places: Mapping[int, Any], metrics: Sequence[str]) -> RichTable:
    from rich.text import Text

    shown = _rich(sheet, metrics, heads=("model",), caption="lowest … highest over the layers")
    for index, rows in places.items():
        ranges = [_range([cells[m] for cells in rows.values() if m in cells]) for m in metrics]
        shown.add_row(Text(_subject_line(sheet.subjects[index])), *ranges)
    return shown


def _rich(sheet: Sheet, metrics: Sequence[str], *, heads: Sequence[str], caption: str) -> RichTable:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, caption=caption, caption_justify="left")
    for head in heads:
        shown.add_column(head, no_wrap=head == "site", overflow="fold", max_width=24)
    for metric in metrics:
        shown.add_column(Text(sheet.catalogue.entry(metric).title), justify="right", overflow="fold")
    return shown


def _subject_line(subject: Subject) -> str:
    return f"{subject.label} ({subject.role})" if subject.role and subject.role != subject.stack else subject.label


def _rich_cell(point: Cell) -> str:
    if point is None:
        return ""
    text = estimate(point.value, point.low, point.high).replace(" ± ", "±").replace("[", r"\[")
    return f"{text} ?" if doubtful(point) else text


def _range(points: Sequence[Point]) -> str:
    values = [p.value for p in points if p.value is not None]
    return f"{number(min(values))} … {number(max(values))}" if values else "–"
