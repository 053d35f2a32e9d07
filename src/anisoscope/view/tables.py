"""Tables for people: the pivot in a notebook, and the few lines a terminal prints after a run."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from anisoscope.results.query import Row
from anisoscope.view.catalogue import Catalogue
from anisoscope.view.sections.findings import doubtful
from anisoscope.view.sections.profiles import Places, pivot
from anisoscope.view.subjects import ProfileRows, RunView, Subject, known, place_of
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


def table_html(table: Table, *, catalogue: Mapping[str, Any] | None = None) -> str:
    """A compact pivot, layers by main metrics, each value with its interval; safe to show whatever the names are."""
    rows, entries = ProfileRows([RunView(table, table.about)]), Catalogue(catalogue)
    metrics = entries.main(rows.default_metrics())
    lines = _html_rows(rows, metrics)
    head = "".join(f'<th scope="col">{html.escape(entries.entry(m).title)}</th>' for m in metrics)
    body = "".join(lines[:MOST_ROWS])
    cut = len(lines) > MOST_ROWS
    caption = html.escape(_caption(len(table), shown=len(metrics), metrics=len(rows.metrics()), cut=cut))
    return (
        f'<div class="anisoscope-table"><style>{STYLE}</style><table><caption>{caption}</caption>'
        f'<thead><tr><th scope="col"></th>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _caption(rows: int, *, shown: int, metrics: int, cut: bool) -> str:
    text = f"{rows:,} rows of results; {shown} of {metrics} metrics shown"
    text += f", first {MOST_ROWS} places" if cut else ""
    return text + ". All of them: .to_pandas(); drawn: .plot()."


def _html_rows(rows: ProfileRows, metrics: Sequence[str]) -> list[str]:
    found = []
    several = len(rows.subjects) > 1
    for index, places in pivot(rows, metrics).items():
        if several:
            label = html.escape(rows.subjects[index].label)
            found.append(f'<tr><th scope="rowgroup" colspan="{len(metrics) + 1}">{label}</th></tr>')
        for cells in places.values():
            place = html.escape(place_of(next(iter(cells.values()))))
            data = "".join(_html_cell(cells.get(m)) for m in metrics)
            found.append(f'<tr><th scope="row">{place}</th>{data}</tr>')
    return found


def _html_cell(row: Row | None) -> str:
    if row is None:
        return "<td></td>"
    if not row.known:
        return f'<td title="{html.escape(row.note or "not computed")}">–</td>'
    half = half_width(row.low, row.high)
    interval = "" if half is None else f"<small>{number(row.low)} … {number(row.high)}</small>"
    return f"<td>{number(row.value)}{interval}</td>"


def short_table(table: Table, *, catalogue: Mapping[str, Any] | None = None) -> RichTable:
    """What the terminal shows at the end of a run: a row per layer, or per model where that would be too long."""
    return short_tables(table, catalogue=catalogue)[0]


def short_tables(table: Table, *, catalogue: Mapping[str, Any] | None = None) -> list[RichTable]:
    """The residual stream, and a table of each further kind of site that was asked for by name."""
    rows, entries = ProfileRows([RunView(table, table.about)]), Catalogue(catalogue)
    metrics = entries.ordered(rows.default_metrics())
    asked = (table.about.get("config") or {}).get("sites") or ()
    shown = [_shortened(rows, entries, pivot(rows, metrics), metrics)]
    for kind in asked:
        places = _pivot_of(rows, kind)
        there = entries.ordered({m for found in places.values() for cells in found.values() for m in cells})
        shown += [_shortened(rows, entries, places, there)] if places else []
    return shown


def _pivot_of(rows: ProfileRows, kind: str) -> Places:
    """Rows of a kind of site outside the stream; of what is measured by head the means over heads."""
    found: Places = {}
    for row in rows.query.where(kind=kind, head=None, group="", variant=""):
        if kind not in rows.streams[row["subject"]]:
            places = found.setdefault(row["subject"], {})
            places.setdefault((row.layer or 0, False, kind), {})[row.metric] = row
    return {index: dict(sorted(places.items())) for index, places in sorted(found.items())}


def _shortened(rows: ProfileRows, entries: Catalogue, places: Places, metrics: Sequence[str]) -> RichTable:
    several = len(rows.subjects) > 1
    few = list(metrics)[: TERMINAL_METRICS - several]
    short = {
        i: {at: cells for at, cells in found.items() if any(m in cells for m in few)} for i, found in places.items()
    }
    if sum(map(len, short.values())) <= TERMINAL_ROWS - 10 * several:
        return _by_layer(rows, entries, short, few)
    return _by_model(rows, entries, short, few)


def _by_layer(rows: ProfileRows, entries: Catalogue, places: Mapping[int, Any], metrics: Sequence[str]) -> RichTable:
    from rich.text import Text

    several = len(places) > 1
    heads = ("model", "site") if several else ("site",)
    every = [row for found in places.values() for cells in found.values() for row in cells.values()]
    doubt = "; ? near-copies or noise decide" if any(map(doubtful, every)) else ""
    shown = _rich(entries, metrics, heads=heads, caption=f"± half of the 95 % interval{doubt}")
    for index, found in places.items():
        label = Text(_subject_line(rows.subjects[index]))
        for i, cells in enumerate(found.values()):
            place = Text(place_of(next(iter(cells.values()))))
            lead = [label if i == 0 else "", place] if several else [place]
            shown.add_row(*lead, *(_rich_cell(cells.get(m)) for m in metrics))
        shown.add_section()
    return shown


def _by_model(rows: ProfileRows, entries: Catalogue, places: Mapping[int, Any], metrics: Sequence[str]) -> RichTable:
    from rich.text import Text

    shown = _rich(entries, metrics, heads=("model",), caption="lowest … highest over the layers")
    for index, found in places.items():
        ranges = [_range([cells[m] for cells in found.values() if m in cells]) for m in metrics]
        shown.add_row(Text(_subject_line(rows.subjects[index])), *ranges)
    return shown


def _rich(entries: Catalogue, metrics: Sequence[str], *, heads: Sequence[str], caption: str) -> RichTable:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, caption=caption, caption_justify="left")
    for head in heads:
        shown.add_column(head, no_wrap=head == "site", overflow="fold", max_width=24)
    for metric in metrics:
        shown.add_column(Text(entries.entry(metric).title), justify="right", overflow="fold")
    return shown


def _subject_line(subject: Subject) -> str:
    return f"{subject.label} ({subject.role})" if subject.role and subject.role != subject.stack else subject.label


def _rich_cell(point: Row | None) -> str:
    if point is None:
        return ""
    text = estimate(point.value, point.low, point.high).replace(" ± ", "±").replace("[", r"\[")
    return f"{text} ?" if doubtful(point) else text


def _range(rows: Sequence[Row]) -> str:
    values = [row.value for row in known(rows)]
    return f"{number(min(values))} … {number(max(values))}" if values else "–"
