"""What commands print: progress on standard error; tables, verdicts and paths on standard output.

Tables for people: the pivot in a notebook, and the few lines a terminal prints after a run.
"""

from __future__ import annotations

import csv
import html
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table as RichTable

from anisoscope.errors import unknown_name
from anisoscope.results.folder import RunFolder
from anisoscope.results.query import Row
from anisoscope.view.sections.findings import doubtful
from anisoscope.view.sections.profiles import Places, pivot
from anisoscope.view.subjects import ProfileRows, RunView, Subject, known, place_of
from anisoscope.view.words import Catalogue, estimate, half_width, number

_LABELS = {"load": "loading the model", "forward": "rows", "metrics": "metrics (sites)", "rows": "reading rows"}
_LABELS |= {"report": "drawing the report"}
_FORMS = ("table", "csv", "json")
_NUMBERS = ("metric", "variant", "value", "low", "high", "sd", "n", "contexts", "dropped", "note")
_DIFFERENCES = ("stack", "layer", "other_layer", "kind", "head", "group", "metric", "variant", "first", "second")
_COLOURS = {"holds": "green", "fails": "red", "undecided": "yellow"}
console = Console(width=None if sys.stdout.isatty() else 160)  # a pipe or a file has no width of its own
errors = Console(stderr=True)


@contextmanager
def progress_bars() -> Iterator[Any]:
    """A callable (what, done, total) that draws one bar for each kind of work, on standard error."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=errors, transient=not errors.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what in tasks and bars.tasks[tasks[what]].finished and done < total:
                del tasks[what]  # the next model starts the same work again
            if what not in tasks:
                tasks[what] = bars.add_task(_LABELS.get(what, what), total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield tell


# -- single lines ------------------------------------------------------------------------------------------------------


def print_line(words: str, *, error: bool = False, style: str | None = None) -> None:
    """One line as it is, on standard output or standard error."""
    (errors if error else console).print(words, style=style, highlight=False, soft_wrap=True, markup=False)


def print_note(words: str, *, style: str | None = None) -> None:
    """One line on standard error."""
    print_line(words, error=True, style=style)


def print_page(path: Path | None) -> None:
    """The path of what a command made, its last line."""
    print_line(str(path))


def print_warnings(about: Mapping[str, Any]) -> None:
    """The warnings of a run."""
    for warning in about.get("warnings", []):
        print_note(f"note: {warning}", style="yellow")


def print_memory(about: Mapping[str, Any]) -> None:
    """How long a profile took, and its memory."""
    took = f"{about['wall_seconds']:.0f} s, peak memory {about['peak_memory_mb']} MiB"
    estimated = about.get("memory_estimate_mb")
    print_note(f"{took} (estimated {estimated} MiB)" if estimated else took)


def print_json(value: Any) -> None:
    """A value for other programs."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


# -- tables of runs ----------------------------------------------------------------------------------------------------


def print_short(table: Any, catalogue: Mapping[str, Any]) -> None:
    """The short tables of a profile; `catalogue` are the declared metrics."""
    for shown in short_tables(table, catalogue=catalogue):
        console.print(shown)


def print_run(
    table: Any, about: Mapping[str, Any], *, form: str, wanted: Mapping[str, Sequence[str]], heads: bool
) -> None:
    """The long table of a run; `wanted` are values of columns, none of them meaning all."""
    for name, words in wanted.items():
        known = set(table.arrow[name].to_pylist())
        for word in words:
            if word not in known:
                raise unknown_name(f"{name} in this run", word, known)
        table = table.where(**{name: list(words)}) if words else table
    rows = table.records()
    if form == "table" and not heads:
        rows = [row for row in rows if row["head"] is None]
    names = [n for n in table.arrow.column_names if n not in ("schema", "replicates")] if form == "csv" else None
    if about.get("status") != "complete":
        words = f"this run is {about.get('status', 'unfinished')}; the table holds what was finished"
        print_note(words, style="yellow")
    _print_rows(rows, form, names or ["model", "stack", "layer", "kind", "head", "group", *_NUMBERS])


def _print_rows(rows: Iterable[Mapping[str, Any]], form: str, columns: Sequence[str]) -> None:
    if form not in _FORMS:
        raise unknown_name("format", form, _FORMS)
    if form == "json":
        _write_json([{k: _plain(v) for k, v in row.items()} for row in rows])
        return
    if form == "csv":
        writer = csv.writer(sys.stdout)
        writer.writerow(columns)
        writer.writerows([_blank(row.get(name)) for name in columns] for row in rows)
        return
    rows = list(rows)
    used = [name for name in columns if any(_blank(row.get(name)) != "" for row in rows)]
    table = RichTable(box=None, pad_edge=False)
    for name in used:
        table.add_column(name, overflow="fold", no_wrap=name != "note")
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in used))
    console.print(table)


def _write_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def _plain(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _blank(value: Any) -> Any:
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else value


def _cell(value: Any) -> str:
    value = _blank(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_comparison(found: Any, *, form: str, metrics: Sequence[str]) -> None:
    """Differences of two models, then CKA between their layers."""
    rows = [row for row in found.rows if not metrics or row["metric"] in metrics]
    if metrics and not rows:
        raise unknown_name("metric of this comparison", metrics[0], {row["metric"] for row in found.rows})
    names, others, matrix = found.cka
    if form == "json":
        cka = {"first": names, "second": others, "values": [[_plain(float(v)) for v in line] for line in matrix]}
        words = {"first": found.first, "second": found.second, "paired": found.paired, "notes": found.notes, "cka": cka}
        words["differences"] = [{k: _plain(v) for k, v in row.items()} for row in rows]
        _write_json(words)
        return
    if form == "table":
        rows = [row for row in rows if row["head"] is None]
        console.print(f"{found.second} − {found.first}{' (paired)' if found.paired else ''}", highlight=False)
    _print_rows(rows, form, [*_DIFFERENCES, "difference", "low", "high", "differs"])
    for note in found.notes:
        errors.print(f"note: {note}", style="yellow", highlight=False)
    if form == "table" and matrix.size and not all(math.isnan(v) for v in matrix.flat):
        _print_matrix(names, others, matrix)


def _print_matrix(names: Sequence[str], others: Sequence[str], matrix: Any) -> None:
    table = RichTable(title="linear CKA (debiased); rows: first, columns: second", box=None, title_justify="left")
    table.add_column("")
    for name in others:
        table.add_column(name)
    for name, line in zip(names, matrix, strict=True):
        table.add_row(name, *("" if math.isnan(v) else f"{v:.2f}" for v in line))
    console.print(table)


# -- verdicts ----------------------------------------------------------------------------------------------------------


def print_run_end(
    folder: RunFolder, page: Path | None, drawing_seconds: float, *, summary: Iterable[RichTable | str] = ()
) -> None:
    """What a judged run ends with: the short tables of a study, verdicts, warnings, seconds, and its page."""
    from anisoscope.view.sections.findings import leading

    about = folder.about()
    for shown in summary:
        if isinstance(shown, str):
            print_line(shown)
        else:
            console.print(shown)
    if (verdicts := folder.path / "verdicts.json").is_file():
        found = json.loads(verdicts.read_text(encoding="utf-8"))
        print_verdicts(leading(found) if about.get("study") == "untrained" else found)
    print_warnings(about)
    print_note(f"{about.get('wall_seconds', 0):.0f} s, and {drawing_seconds:.0f} s for the page")
    print_page(page)


def print_verdicts(verdicts: Sequence[Mapping[str, Any]], *, every: bool = False) -> None:
    """A table of verdicts, each with its one sentence; claims that were not measured share a line, unless asked for."""
    from anisoscope.view.sections.findings import measured, unmeasured

    absent = [] if every else unmeasured(verdicts)
    shown = verdicts if every else measured(verdicts)
    if shown:
        _print_verdict_table(shown)
    if absent:
        print_line(f"not measured here: {', '.join(absent)}")


def _print_verdict_table(verdicts: Sequence[Mapping[str, Any]]) -> None:
    table = RichTable(show_lines=True, header_style="bold")
    table.add_column("claim", overflow="fold", max_width=30)
    table.add_column("verdict")
    table.add_column("effect [95 %]", justify="right", no_wrap=True)
    table.add_column("p", justify="right")
    table.add_column("why", overflow="fold")
    for row in verdicts:
        colour = _COLOURS.get(str(row["status"]), "white")
        subject = f" ({row['subject']})" if row.get("subject") else ""
        effect = f"{_number(row['effect'])} [{_number(row['low'])}, {_number(row['high'])}]"
        status = f"[{colour}]{row['status']}[/{colour}]"
        table.add_row(f"{row['claim']}{subject}", status, effect, _number(row["p"]), str(row["why"]))
    console.print(table)


def _number(value: Any) -> str:
    return "–" if value is None or (isinstance(value, float) and math.isnan(value)) else f"{float(value):.3g}"


# -- lists, controls, data ---------------------------------------------------------------------------------------------


def print_two_columns(lines: Iterable[tuple[str, str]]) -> None:
    """Names, each with its explanation."""
    table = RichTable(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, words in lines:
        table.add_row(name, words)
    console.print(table)


def print_metric(name: str, metric: Any) -> None:
    """Everything that the declaration of a metric says."""
    options = ", ".join(f"{key}={value}" for key, value in metric.options.items())
    star = " (default)" if metric.default else ""
    console.print(f"[bold]{name}[/bold]{star}  {metric.title}", highlight=False)
    for label, words in (
        ("", metric.description),
        ("formula", metric.formula),
        ("convention", metric.convention),
        ("options", options),
        ("measured at", ", ".join(sorted(metric.kinds))),
        ("measured by", ", ".join(metric.measured_by)),
        ("reference", metric.reference),
    ):
        if words:
            console.print(f"    {label + ': ' if label else ''}{words}", highlight=False, markup=False)


def print_control(result: Any) -> None:
    """PASS or FAIL of one control of the self-test."""
    colour, word = ("green", "PASS") if result.passed else ("red", "FAIL")
    words = f"{result.metric:<26} {result.control:<34} {result.seen}"
    console.print(f"[{colour}]{word}[/{colour}]  {words}", highlight=False, soft_wrap=True)


def print_prepared(stats: Mapping[str, Any]) -> None:
    """What was read, kept and removed of enwik8, in a few lines that explain themselves."""
    raw, cleaning, kept = stats["raw"], stats["cleaning"], stats["kept"]
    if raw is not None:
        print_line(f"read: {raw['bytes']:,} bytes; {stats['note']}", style="green" if raw["is_enwik8"] else "yellow")
        pages = cleaning["pages"]
        words = f"{pages['redirects']:,} redirects, {pages['other_namespaces']:,} pages that are no articles"
        rest = f"{pages['empty']:,} empty and {pages['truncated']:,} cut off"
        print_line(f"pages: {pages['pages']:,}, without {words}, {rest}")
        console.print(removed_table(cleaning))
    else:
        print_line(f"source: the embedded corpus; {stats['note']}")
    size = f"{kept['characters']:,} characters ({kept['bytes']:,} bytes of UTF-8)"
    print_line(f"kept: {kept['articles']:,} articles, {size}")
    if cleaning is not None:
        whole = f"{kept['bytes'] / max(1, raw['bytes']):.1%} of all bytes read"
        print_line(f"that is {cleaning['kept_share']:.1%} of the characters of the articles, {whole}")
    print_line(f"symbols: {kept['symbols_used']} of the 205 of enwik8 are used; ids are 0 to 204 in any case")
    print_line(f"fingerprint (SHA-256 of enwik8.txt): {kept['sha256']}")
    if raw is not None and raw.get("as_expected") is False:
        print_line("note: the true enwik8 should give another fingerprint; please report this.", style="red")
    print_line(f"{stats['seconds']:.0f} s")


def new_table(title: str, words: tuple[str, ...], numbers: tuple[str, ...]) -> RichTable:
    """A table with columns of words, then columns of numbers."""
    table = RichTable(title=title, title_justify="left", header_style="bold")
    for name in words:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


# -- enwik8 ------------------------------------------------------------------------------------------------------------

_REMOVED = {
    "comments": "comments",
    "references": "references",
    "formulas": "formulas",
    "code": "code",
    "preformatted": "preformatted lines",
    "templates": "templates",
    "tables": "tables",
    "media": "images and media",
    "categories": "categories",
    "interlanguage": "links to other languages",
    "links": "brackets and targets of links (the label stays)",
    "external_links": "addresses of links (the label stays)",
    "addresses": "bare addresses",
    "tags": "HTML tags",
    "entities": "entities (decoded)",
    "emphasis": "marks of emphasis",
    "lists": "marks of lists, rules",
    "headings": "marks of headings",
    "symbols": "invisible characters, and those outside of the 205",
    "spaces": "white space, empty headings and brackets",
}


def removed_table(cleaning: Mapping[str, Any]) -> RichTable:
    """What was removed from the articles of enwik8, the most first."""
    table = new_table("removed from the articles", ("what",), ("how many", "characters", "share"))
    total = max(1, cleaning["characters_in"])
    for kind, figures in sorted(cleaning["removed"].items(), key=lambda item: -item[1]["characters"]):
        count = "" if figures["count"] is None else f"{figures['count']:,}"
        size = figures["characters"]
        table.add_row(_REMOVED.get(kind, kind), count, f"{size:,}", f"{size / total:.2%}")
    return table


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
