"""What commands print: progress on standard error; tables, verdicts and paths on standard output."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table as RichTable

from anisoscope.errors import unknown_name
from anisoscope.results.folder import RunFolder

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
    from anisoscope.view.tables import short_tables

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
    from anisoscope.view.sections.verdicts import leading

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
    from anisoscope.view.sections.verdicts import measured, unmeasured

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
