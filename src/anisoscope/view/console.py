"""Terminal output of commands (progress, tables, verdicts, paths) and the HTML table for notebooks.

Progress and notes go to standard error; tables, verdicts and paths to standard output.
"""

from __future__ import annotations

import csv
import html
import io
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.csv import WriteOptions, write_csv
from rich import box, progress
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Column as RichColumn
from rich.table import Table as RichTable
from rich.text import Text

from anisoscope.errors import AnisoscopeError, unknown_name
from anisoscope.results import frame
from anisoscope.results.folder import RunFolder
from anisoscope.results.manifest import is_grave
from anisoscope.results.query import SCHEMA, Query, Row
from anisoscope.results.state import run_state
from anisoscope.view.sections.findings import (
    badge_line,
    doubtful,
    grid_words,
    leading,
    measured,
    not_measured,
    robust_words,
    stands,
    unmeasured,
)
from anisoscope.view.sections.profiles import Places, pivot
from anisoscope.view.subjects import ProfileRows, RunView, known, place_of
from anisoscope.view.words import Catalogue, estimate, number

if TYPE_CHECKING:
    from anisoscope.results.query import Table

_LABELS = {"load": "loading the model", "forward": "rows", "metrics": "metrics (sites)", "rows": "reading rows"}
_LABELS |= {"report": "drawing the report"}
SHOWN_ROWS = 5_000  # that a table on a terminal shows
BLOCK = 8_192  # rows that are written at a time
_FORMS = ("table", "csv", "json")
_NUMBERS = ("metric", "variant", "value", "low", "high", "sd", "n", "contexts", "dropped", "note")
_DIFFERENCES = ("stack", "layer", "other_layer", "kind", "head", "group", "metric", "variant", "first", "second")
NARROW = 110  # columns below which a verdict is a block of lines, not a line of a table
_COLOURS = {"holds": "green", "fails": "red", "undecided": "yellow"}
console = Console(width=None if sys.stdout.isatty() else 160)  # a fixed width for pipes and files
errors = Console(stderr=True)


@contextmanager
def progress_bars() -> Iterator[Any]:
    """Yields a callback (what, done, total) that draws one progress bar per kind of work on standard error."""
    columns: list[Any] = [progress.TextColumn("{task.description}"), progress.BarColumn()]
    columns += [progress.MofNCompleteColumn(), progress.TimeElapsedColumn()]
    columns += [progress.TextColumn("left"), progress.TimeRemainingColumn()]
    bars = progress.Progress(*columns, console=errors, transient=not errors.is_terminal)
    tasks: dict[str, Any] = {}

    def tell(what: str, done: int, total: int) -> None:
        if what in tasks and bars.tasks[tasks[what]].finished and done < total:
            del tasks[what]  # so that the next model starts a new bar
        if what not in tasks:
            bars.start()  # not before there is work, so that an error in the options stays one line
            tasks[what] = bars.add_task(_LABELS.get(what, what), total=total)
        bars.update(tasks[what], completed=done, total=total)

    try:
        yield tell
    finally:
        if tasks:
            bars.stop()


# -- lines -------------------------------------------------------------------------------------------------------------


def print_line(words: str, *, error: bool = False, style: str | None = None) -> None:
    """Print one line without markup, to standard output or standard error."""
    (errors if error else console).print(words, style=style, highlight=False, soft_wrap=True, markup=False)


def print_note(words: str, *, style: str | None = None) -> None:
    """Print one line to standard error."""
    print_line(words, error=True, style=style)


def print_grave(about: Mapping[str, Any]) -> None:
    """Print the warnings that must be read before any number."""
    for warning in about.get("warnings", []):
        if is_grave(warning):
            print_note(f"warning: {warning}", style="red")


def print_warnings(about: Mapping[str, Any]) -> None:
    """Print the other warnings of a run."""
    for warning in about.get("warnings", []):
        if not is_grave(warning):
            print_note(f"note: {warning}", style="yellow")


def _unicode() -> bool:
    """Whether standard output takes every letter."""
    return str(getattr(sys.stdout, "encoding", None) or "utf-8").lower().replace("-", "").startswith("utf")


def print_json(value: Any, *, indent: int = 2) -> None:
    sys.stdout.write(json.dumps(value, indent=indent, ensure_ascii=not _unicode()) + "\n")


def print_state(folder: Path, *, name: bool = False) -> None:
    """Print how far a run is that is not done, with its name where there are several."""
    if words := run_state(folder).words():
        print_note(f"{folder.name}: {words}" if name else words, style="yellow")


# -- tables of runs ----------------------------------------------------------------------------------------------------


def print_profile_end(folder: RunFolder, page: Path | None, catalogue: Mapping[str, Any]) -> None:
    """Print the end of a profile: its short tables, warnings, duration, peak memory, path of the page."""
    about = folder.about()
    print_grave(about)
    for shown in short_tables(folder.table(), catalogue=catalogue):
        console.print(shown)
    print_warnings(about)
    took = f"{about['wall_seconds']:.0f} s, peak memory {about['peak_memory_mb']} MiB"
    estimated = about.get("memory_estimate_mb")
    print_note(f"{took} (estimated {estimated} MiB)" if estimated else took)
    print_line(str(page))


def print_run(
    table: Any, about: Mapping[str, Any], *, form: str, wanted: Mapping[str, Sequence[str]], heads: bool
) -> None:
    """Print the long table of a run; `wanted` are accepted values by column, empty for all."""
    for name, chosen in wanted.items():
        measured_names = Query(table).values(name)
        for word in chosen:
            if word not in measured_names:
                raise unknown_name(f"{name} in this run", word, measured_names)
        table = table.where(**{name: list(chosen)}) if chosen else table
    if form not in _FORMS:
        raise unknown_name("format", form, _FORMS)
    if heads and not any(head is not None for head in Query(table).values("head")):
        raise AnisoscopeError("--heads does nothing here: no row is of a single head; leave it out.")
    if words := about.get("reading"):  # how far a run is that is not done
        print_note(str(words), style="yellow")
    several = [name for name in ("seed", "step") if len(Query(table).values(name)) > 1]
    names = ["model", *several, "stack", "layer", "kind", "head", "group", *_NUMBERS]
    if form == "csv":
        _stream_csv(table, [n for n in SCHEMA.names if n not in ("schema", "replicates")])
    elif form == "json":
        _stream_json(table)
    else:
        shown = table if heads else table.where(head=None)
        _print_rows(shown.take(np.arange(min(SHOWN_ROWS, len(shown)))).records(), form, names)
        if len(shown) > SHOWN_ROWS:
            how = "choose with --metric and --kind, or see all with --format csv"
            print_note(f"the first {SHOWN_ROWS:,} of {len(shown):,} rows; {how}", style="yellow")


def _stream_csv(table: Any, names: Sequence[str]) -> None:
    """Write all rows as CSV, a block at a time; a value that is not a number is an empty cell."""
    chosen = table.arrow.select(names)
    for at, field in enumerate(chosen.schema):
        if pa.types.is_floating(field.type):
            column = chosen[field.name]
            chosen = chosen.set_column(at, field, pc.if_else(pc.is_nan(column), None, column))
    sys.stdout.write(",".join(names) + "\n")
    for start in range(0, len(chosen), BLOCK):
        write_csv(chosen.slice(start, BLOCK), out := io.BytesIO(), WriteOptions(include_header=False))
        sys.stdout.write(out.getvalue().decode())


def _stream_json(table: Any) -> None:
    """Write all rows as a list of objects, a block at a time."""
    first = True
    for batch in table.arrow.to_batches(max_chunksize=BLOCK):
        for row in batch.to_pylist():
            text = json.dumps({k: _plain(v) for k, v in row.items()}, ensure_ascii=not _unicode())
            sys.stdout.write(f"{'[' if first else ','}\n {text}")
            first = False
    sys.stdout.write("[]\n" if first else "\n]\n")


def _print_rows(rows: Sequence[Mapping[str, Any]], form: str, columns: Sequence[str]) -> None:
    if form not in _FORMS:
        raise unknown_name("format", form, _FORMS)
    if form == "json":
        print_json([{k: _plain(v) for k, v in row.items()} for row in rows], indent=1)
        return
    cells = [[_blank(row.get(name)) for name in columns] for row in rows]
    if form == "csv":
        csv.writer(sys.stdout).writerows([columns, *cells])
        return
    used = [i for i in range(len(columns)) if any(row[i] != "" for row in cells)]
    heads = [RichColumn(columns[i], overflow="fold", no_wrap=columns[i] != "note") for i in used]
    table = RichTable(*heads, box=None, pad_edge=False)
    for row in cells:
        table.add_row(*(f"{row[i]:.4g}" if isinstance(row[i], float) else str(row[i]) for i in used))
    console.print(table)


def _plain(value: Any) -> Any:
    """A value for JSON: NaN becomes None."""
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _blank(value: Any) -> Any:
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else value


def print_comparison(found: Any, *, form: str, metrics: Sequence[str]) -> None:
    """Print the differences of two models, then the CKA between their layers."""
    rows = [row for row in found.rows if not metrics or row["metric"] in metrics]
    if metrics and not rows:
        raise unknown_name("metric of this comparison", metrics[0], {row["metric"] for row in found.rows})
    names, others, matrix = found.cka
    if form == "json":
        words = {name: getattr(found, name) for name in ("first", "second", "paired", "notes")}
        words["cka"] = {"first": names, "second": others, "values": _plain(matrix.astype(float).tolist())}
        words["differences"] = [{k: _plain(v) for k, v in row.items()} for row in rows]
        print_json(words, indent=1)
        return
    if form == "table":
        rows = [row for row in rows if row["head"] is None]
        console.print(f"{found.second} − {found.first}{' (paired)' if found.paired else ''}", highlight=False)
    _print_rows(rows, form, [*_DIFFERENCES, "difference", "low", "high", "differs"])
    for note in found.notes:
        errors.print(f"note: {note}", style="yellow", highlight=False)
    if form == "table" and not all(math.isnan(v) for v in matrix.flat):
        title = "linear CKA (debiased); rows: first, columns: second"
        table = RichTable("", *others, title=title, box=None, title_justify="left")
        for name, line in zip(names, matrix, strict=True):
            table.add_row(name, *("" if math.isnan(v) else f"{v:.2f}" for v in line))
        console.print(table)


# -- verdicts ----------------------------------------------------------------------------------------------------------


def print_run_end(
    folder: RunFolder, page: Path | None, drawing_seconds: float, *, summary: Iterable[RichTable | str] = ()
) -> None:
    """Print the end of a run with verdicts: tables of a study, verdicts, warnings, seconds, path of the page."""
    about = folder.about()
    print_grave(about)
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
    print_line(str(page))


def print_verdicts(verdicts: Sequence[Mapping[str, Any]], *, every: bool = False) -> None:
    """Print a table of verdicts with their sentences; unmeasured claims share one line unless `every` is set."""
    shown = verdicts if every else measured(verdicts)
    if shown and console.width < NARROW:
        _print_blocks(shown)
    elif shown:
        claim = RichColumn("claim", overflow="fold", max_width=30)
        effect = RichColumn("effect [95 %]", justify="right", no_wrap=True)
        p_column, why = RichColumn("p", justify="right"), RichColumn("why", overflow="fold")
        table = RichTable(claim, "verdict", effect, p_column, why, show_lines=True, header_style="bold")
        for row in shown:
            table.add_row(_about(row), _status(row), *_effect_and_p(row), str(row["why"]))
        console.print(table)
    if words := grid_words(verdicts):
        alone = " “alone”: not after that correction." if any(stands(row) is False for row in verdicts) else ""
        console.print(f"{words}{alone}", highlight=False, markup=False)
    if not every and (absent := unmeasured(verdicts)):
        print_line(f"not measured here: {', '.join(absent)}")


def _print_blocks(verdicts: Sequence[Mapping[str, Any]]) -> None:
    """Print each verdict as a line with its sentence below, for a terminal too narrow for a table."""
    for row in verdicts:
        effect, p = _effect_and_p(row)
        console.print(f"[bold]{_about(row)}[/bold]  {_status(row)}  {escape(effect)}  p {p}", highlight=False)
        console.print(Padding(Text(str(row["why"])), (0, 0, 1, 2)))


def _about(row: Mapping[str, Any]) -> str:
    return escape(f"{row['claim']} ({row['subject']})" if row.get("subject") else str(row["claim"]))


def _status(row: Mapping[str, Any]) -> str:
    colour = _COLOURS.get(str(row["status"]), "white")
    return f"[{colour}]{row['status']}[/{colour}]{' alone' if stands(row) is False else ''}"


def _effect_and_p(row: Mapping[str, Any]) -> tuple[str, str]:
    value, low, high, p = (
        "–" if _blank(row[name]) == "" else f"{float(row[name]):.3g}" for name in ("effect", "low", "high", "p")
    )
    return f"{value} [{low}, {high}]", p


def print_robustness(verdicts: Sequence[Mapping[str, Any]]) -> None:
    """Print the verdicts again with a line of badges, one for each other choice that was measured."""
    claim = RichColumn("claim", overflow="fold", max_width=30)
    table = RichTable(claim, "verdict", RichColumn("under other choices", overflow="fold"), header_style="bold")
    for row in leading(measured(verdicts)):
        if line := badge_line(row):
            table.add_row(_about(row), _status(row), Text(f"{line}\n{robust_words(row)}"))
    if not table.row_count:
        print_line("no other choice was measured under which these verdicts could be had again")
        return
    table.show_lines = True
    console.print(table)
    absent = not_measured(leading(measured(verdicts)))
    rest = f"; not measured for some: {', '.join(absent)}" if absent else ""
    key = "✓ holds, ✕ fails, ? undecided, (3/4) by 3 of its 4 parts; one choice changes at a time"
    console.print(f"{key}{rest}", highlight=False, markup=False)


# -- lists, controls, data ---------------------------------------------------------------------------------------------


def print_two_columns(lines: Iterable[tuple[str, str]]) -> None:
    """Print names with their explanations."""
    names, explained = RichColumn(style="bold", no_wrap=True), RichColumn(overflow="fold")
    table = RichTable(names, explained, box=None, show_header=False, pad_edge=False)
    for name, words in lines:
        table.add_row(name, words)
    console.print(table)


def print_metric(name: str, metric: Any) -> None:
    """Print the declaration of a metric."""
    star = " (default)" if metric.default else ""
    console.print(f"[bold]{name}[/bold]{star}  {metric.title}", highlight=False)
    facts = {"": metric.description, "formula: ": metric.formula, "convention: ": metric.convention}
    facts["options: "] = ", ".join(f"{key}={value}" for key, value in metric.options.items())
    facts["by default also: "] = ", ".join(f"{key}={value}" for key, value in metric.beside.items())
    facts |= {"measured at: ": ", ".join(sorted(metric.kinds)), "measured by: ": ", ".join(metric.measured_by)}
    for label, words in (facts | {"reference: ": metric.reference}).items():
        if words:
            console.print(f"    {label}{words}", highlight=False, markup=False)


def print_control(result: Any) -> None:
    """Print PASS or FAIL for one control of the self-test."""
    colour, word = ("green", "PASS") if result.passed else ("red", "FAIL")
    words = f"{result.metric:<26} {result.control:<34} {result.seen}"
    console.print(f"[{colour}]{word}[/{colour}]  {words}", highlight=False, soft_wrap=True)


_REMOVED = {"preformatted": "preformatted lines", "media": "images and media", "tags": "HTML tags"}
_REMOVED |= {"interlanguage": "links to other languages", "links": "brackets and targets of links (the label stays)"}
_REMOVED |= {"external_links": "addresses of links (the label stays)", "addresses": "bare addresses"}
_REMOVED |= {"entities": "entities (decoded)", "emphasis": "marks of emphasis", "lists": "marks of lists, rules"}
_REMOVED |= {"headings": "marks of headings", "symbols": "invisible characters, and those outside of the 205"}
_REMOVED |= {"spaces": "white space, empty headings and brackets"}


def print_prepared(stats: Mapping[str, Any]) -> None:
    """Print what was read, kept and removed of enwik8; removed parts are sorted by size.

    Parts without a description in `_REMOVED` appear under their own name: comments, references, templates, tables, …
    """
    raw, cleaning, kept = stats["raw"], stats["cleaning"], stats["kept"]
    if raw is not None:
        print_line(f"read: {raw['bytes']:,} bytes; {stats['note']}", style="green" if raw["is_enwik8"] else "yellow")
        pages = cleaning["pages"]
        words = f"{pages['redirects']:,} redirects, {pages['other_namespaces']:,} pages that are no articles"
        rest = f"{pages['empty']:,} empty and {pages['truncated']:,} cut off"
        print_line(f"pages: {pages['pages']:,}, without {words}, {rest}")
        table = new_table("removed from the articles", ("what",), ("how many", "characters", "share"))
        for kind, figures in sorted(cleaning["removed"].items(), key=lambda item: -item[1]["characters"]):
            count = "" if figures["count"] is None else f"{figures['count']:,}"
            share = f"{figures['characters'] / max(1, cleaning['characters_in']):.2%}"
            table.add_row(_REMOVED.get(kind, kind), count, f"{figures['characters']:,}", share)
        console.print(table)
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
    """An empty table with columns for words, then right-aligned columns for numbers."""
    columns: list[Any] = [*words, *(RichColumn(name, justify="right") for name in numbers)]
    return RichTable(*columns, title=title, title_justify="left", header_style="bold")


# -- layers by metrics, in a notebook and in the terminal --------------------------------------------------------------

MOST_ROWS = 30
TERMINAL_ROWS = 40  # for one model; several models get fewer rows and columns
TERMINAL_METRICS = 5

# Colours are mixed from the notebook's text colour, so that they work on light and dark backgrounds.
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
    """A compact HTML table, layers by main metrics at the last step, with intervals; all names are escaped.

    A table without such rows, as of gradients alone, shows its first and last ones.
    """
    plain = Query(table).where(kind=lambda kind: kind != "training", head=None, group="", variant="")
    last = plain.at_last_step("model", "seed", "stack").table(table.about)
    words = f"{frame.summary(table.arrow)}. All of it: .to_pandas(); drawn: .plot()."
    words = " ".join(filter(None, (str(table.about.get("reading") or ""), words)))
    rows, entries = ProfileRows([RunView(last, table.about)]), Catalogue(catalogue)
    metrics = entries.main(rows.default_metrics())
    if not metrics:
        shown = frame.preview_html(table.arrow).removeprefix("<table>")
        return _notebook(f"<table><caption>{html.escape(words)}</caption>{shown}")
    lines = []
    for index, places in pivot(rows, metrics).items():
        if len(rows.subjects) > 1:
            label = html.escape(rows.subjects[index].label)
            lines.append(f'<tr><th scope="rowgroup" colspan="{len(metrics) + 1}">{label}</th></tr>')
        for cells in places.values():
            place = html.escape(place_of(next(iter(cells.values()))))
            data = "".join(_html_cell(cells.get(m)) for m in metrics)
            lines.append(f'<tr><th scope="row">{place}</th>{data}</tr>')
    head = "".join(f'<th scope="col">{html.escape(entries.entry(m).title)}</th>' for m in metrics)
    cut = f" The first {MOST_ROWS} places." if len(lines) > MOST_ROWS else ""
    return _notebook(
        f'<table><caption>{html.escape(words)}{cut}</caption><thead><tr><th scope="col"></th>{head}</tr></thead>'
        f"<tbody>{''.join(lines[:MOST_ROWS])}</tbody></table>"
    )


def _notebook(table: str) -> str:
    return f'<div class="anisoscope-table"><style>{STYLE}</style>{table}</div>'


def _html_cell(row: Row | None) -> str:
    if row is None or not row.known:
        return "<td></td>" if row is None else f'<td title="{html.escape(row.note or "not computed")}">–</td>'
    interval = f"<small>{number(row.low)} … {number(row.high)}</small>" if row.interval else ""
    return f"<td>{number(row.value)}{interval}</td>"


def short_table(table: Table, *, catalogue: Mapping[str, Any] | None = None) -> RichTable:
    """The short table at the end of a run: one row per layer, or per model where that would be too long."""
    return short_tables(table, catalogue=catalogue)[0]


def short_tables(table: Table, *, catalogue: Mapping[str, Any] | None = None) -> list[RichTable]:
    """The table of the residual stream, and one for each further kind of site that was requested by name.

    Metrics measured per head are shown as means over heads.
    """
    rows, entries = ProfileRows([RunView(table, table.about)]), Catalogue(catalogue)
    metrics = entries.ordered(rows.default_metrics())
    shown = [_shortened(rows, entries, pivot(rows, metrics), metrics)]
    for kind in (table.about.get("config") or {}).get("sites") or ():
        places: Places = {}
        for row in rows.query.where(kind=kind, head=None, group="", variant=""):
            if kind not in rows.streams[row["subject"]]:
                at = (row.layer or 0, False, kind)
                places.setdefault(row["subject"], {}).setdefault(at, {})[row.metric] = row
        there = entries.ordered({m for found in places.values() for cells in found.values() for m in cells})
        places = {index: dict(sorted(found.items())) for index, found in sorted(places.items())}
        shown += [_shortened(rows, entries, places, there)] if places else []
    return shown


def _shortened(rows: ProfileRows, entries: Catalogue, places: Places, metrics: Sequence[str]) -> RichTable:
    """A few metrics at all places, or their range over the places of each model if there are too many."""
    several = len(rows.subjects) > 1
    few = metrics[: TERMINAL_METRICS - several]
    short = {i: [c for c in found.values() if any(m in c for m in few)] for i, found in places.items()}
    whole = sum(map(len, short.values())) <= TERMINAL_ROWS - 10 * several
    doubt = any(doubtful(row) for found in short.values() for cells in found for row in cells.values())
    caption = "± half of the 95 % interval" + ("; ? near-copies or noise decide" if doubt else "")
    caption = caption if whole else "lowest … highest over the layers"
    leads = [*(["model"] if len(short) > 1 or not whole else []), *(["site"] if whole else [])]
    columns = [RichColumn(head, no_wrap=head == "site", overflow="fold", max_width=24) for head in leads]
    columns += [RichColumn(Text(entries.entry(m).title), justify="right", overflow="fold") for m in few]
    shown = RichTable(*columns, box=box.SIMPLE_HEAD, pad_edge=False, caption=caption, caption_justify="left")
    for index, found in short.items():
        subject = rows.subjects[index]
        role = f" ({subject.role})" if subject.role and subject.role != subject.stack else ""
        label = Text(subject.label + role)
        if not whole:
            values = [[row.value for row in known(cells[m] for cells in found if m in cells)] for m in few]
            shown.add_row(label, *(f"{number(min(v))} … {number(max(v))}" if v else "–" for v in values))
            continue
        for i, cells in enumerate(found):
            lead = [label if i == 0 else ""] if len(short) > 1 else []
            place = Text(place_of(next(iter(cells.values()))))
            shown.add_row(*lead, place, *(_short_cell(cells.get(m)) for m in few))
        shown.add_section()
    return shown


def _short_cell(row: Row | None) -> str:
    if row is None:
        return ""
    words = estimate(row.value, row.low, row.high).replace(" ± ", "±").replace("[", r"\[")
    return f"{words} ?" if doubtful(row) else words
