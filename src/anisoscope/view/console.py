"""Terminal output of commands: the ends of runs, tables, lists; and the HTML table for notebooks.

How wide and in which colours is decided in `terminal/screen.py`.
"""

from __future__ import annotations

import csv
import html
import io
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.csv import WriteOptions, write_csv
from rich import box
from rich.table import Column as RichColumn
from rich.table import Table as RichTable
from rich.text import Text

from anisoscope.errors import AnisoscopeError, unknown_name
from anisoscope.results import frame
from anisoscope.results.folder import RunFolder
from anisoscope.results.manifest import is_grave
from anisoscope.results.query import SCHEMA, Query, Row
from anisoscope.results.state import run_state
from anisoscope.view.sections.findings import doubtful, find, leading
from anisoscope.view.sections.profiles import Places, pivot
from anisoscope.view.subjects import ProfileRows, RunView, known, place_of
from anisoscope.view.terminal import screen
from anisoscope.view.terminal.rows import print_rows
from anisoscope.view.terminal.screen import console, new_table, print_json, print_line, print_note, print_path
from anisoscope.view.terminal.verdicts import print_verdicts
from anisoscope.view.words import Catalogue, estimate, number, shortened, strided

if TYPE_CHECKING:
    from anisoscope.results.query import Table

SHOWN_ROWS = 1_000  # that a table on a terminal shows
MOST_NOTES, MOST_LETTERS = 5, 240  # kinds of warnings shown, and letters of each
BLOCK = 8_192  # rows that are written at a time
_FORMS = ("table", "csv", "json")
_NUMBERS = ("metric", "variant", "value", "low", "high", "sd", "n", "contexts", "dropped", "note")
_DIFFERENCES = ("stack", "layer", "other_layer", "kind", "head", "group", "metric", "variant", "first", "second")

# -- warnings ----------------------------------------------------------------------------------------------------------


def print_grave(about: Mapping[str, Any]) -> None:
    """Print the warnings that must be read before any number."""
    for warning in about.get("warnings", []):
        if is_grave(warning):
            print_note(f"warning: {warning}", style="red")


def print_warnings(about: Mapping[str, Any], *, why: bool = False) -> None:
    """Print the other warnings of a run: one of each kind with their number, all of them with `why`."""
    every = [warning for warning in about.get("warnings", []) if not is_grave(warning)]
    kinds = {warning: [warning] for warning in every} if why else _kinds(every, about)
    for first, alike in list(kinds.items())[: len(kinds) if why else MOST_NOTES]:
        words = first if why or len(first) <= MOST_LETTERS else f"{first[:MOST_LETTERS]}…"
        print_note(f"note: {words}{_others(alike)}", style="yellow")
    if (rest := len(every) - sum(map(len, list(kinds.values())[:MOST_NOTES]))) and not why:
        print_note(f"{rest} other notes are on the page and in run.json; --why prints them", style="yellow")


def _others(alike: Sequence[str]) -> str:
    """What else a warning is about: names before the colon where they differ, or a number.

    >>> _others(["a: short", "b: short", "c: short"]), _others(["3 rows", "4 rows"]), _others(["a: short"])
    (' (also b and c)', ' (1 more like it)', '')
    """
    names = list(dict.fromkeys(warning.partition(": ")[0] for warning in alike))
    if len(names) == len(alike) > 1 and all(": " in warning for warning in alike):
        return f" (also {shortened(names[1:])})"
    return f" ({len(alike) - 1} more like it)" if len(alike) > 1 else ""


def _kinds(warnings: Sequence[str], about: Mapping[str, Any]) -> dict[str, list[str]]:
    """Warnings by the first of those that differ in their model and in numbers only."""
    models = "|".join(re.escape(str(model.get("name"))) for model in about.get("models") or ())
    found: dict[str, list[str]] = {}
    for warning in warnings:
        found.setdefault(re.sub(rf"^({models}): |\d[\d.,]*", "#", warning), []).append(warning)
    return {alike[0]: alike for alike in found.values()}


def print_state(folder: Path, *, name: bool = False) -> None:
    """Print how far a run is that is not done, with its name where there are several."""
    if words := run_state(folder).words():
        print_note(f"{folder.name}: {words}" if name else words, style="yellow")


# -- tables of runs ----------------------------------------------------------------------------------------------------


def print_profile_end(folder: RunFolder, page: Path | None, catalogue: Mapping[str, Any], *, why: bool = False) -> None:
    """Print the end of a profile: its short tables, warnings, duration, peak memory, path of the page.

    `why` adds the sentences of the page, and all warnings.
    """
    about, table = folder.about(), folder.table()
    print_grave(about)
    for finding in find(ProfileRows([RunView(table, about)]), Catalogue(catalogue)) if why else ():
        print_line(" ".join([f"{finding.topic}:", *finding.texts]))
    for shown in short_tables(table, catalogue=catalogue, room=screen.width() if screen.bounded() else None):
        screen.print_table(shown)
    print_warnings(about, why=why)
    took = f"{about['wall_seconds']:.0f} s, peak memory {about['peak_memory_mb']} MiB"
    estimated = about.get("memory_estimate_mb")
    print_note(f"{took} (estimated {estimated} MiB)" if estimated else took)
    print_path(page or folder.path)


def print_run(run: RunFolder, *, form: str, wanted: Mapping[str, Sequence[str]], heads: bool) -> None:
    """Print the long table of a run, read and written in blocks; `wanted` are values by column, empty for all."""
    chosen = {name: list(words) for name, words in wanted.items() if words}
    seen = _Seen.of(run, chosen)
    for name, words in chosen.items():
        for word in words:
            if word not in seen.values[name]:
                raise unknown_name(f"{name} in this run", word, seen.values[name])
    if form not in _FORMS:
        raise unknown_name("format", form, _FORMS)
    if heads and not seen.heads:
        raise AnisoscopeError("--heads does nothing here: no row is of a single head; leave it out.")
    if told := run_state(run.path).words():  # how far a run is that is not done
        print_note(told, style="yellow")
    blocks = (part for part in map(partial(_only, chosen=chosen), run.batches(size=BLOCK)) if len(part))
    if form == "csv":
        _stream_csv(blocks, [n for n in SCHEMA.names if n not in ("schema", "replicates")])
    elif form == "json":
        _stream_json(blocks)
    else:
        several = [name for name in ("seed", "step") if len(seen.values[name]) > 1]
        names = ["model", *several, "stack", "layer", "kind", "head", "group", *_NUMBERS]
        _print_first(blocks if heads else map(_whole, blocks), names, total=seen.rows + heads * seen.heads)


@dataclass
class _Seen:
    """Distinct values of some columns, in order of appearance, and how many rows are chosen."""

    values: dict[str, list[Any]]
    rows: int = 0  # chosen ones that are of no single head
    heads: int = 0  # chosen ones of single heads

    @classmethod
    def of(cls, run: RunFolder, chosen: Mapping[str, list[str]]) -> _Seen:
        names = ("metric", "kind", "seed", "step")
        out = cls({name: [] for name in names})
        for part in run.batches([*names, "head"]):
            for name in ("metric", "kind"):
                out._add(name, part)
            part = _only(part, chosen)
            for name in ("seed", "step"):
                out._add(name, part)
            alone = part["head"].null_count
            out.rows, out.heads = out.rows + alone, out.heads + len(part) - alone
        return out

    def _add(self, name: str, part: pa.Table) -> None:
        self.values[name] = list(dict.fromkeys([*self.values[name], *pc.unique(part[name]).to_pylist()]))


def _only(part: pa.Table, chosen: Mapping[str, list[str]]) -> pa.Table:
    """The rows whose columns have one of the chosen values."""
    for name, words in chosen.items():
        part = part.filter(pc.is_in(part[name], pa.array(words, part[name].type)))
    return part


def _whole(part: pa.Table) -> pa.Table:
    """The rows that are of no single head."""
    return part.filter(pc.is_null(part["head"]))


def _print_first(blocks: Iterable[pa.Table], names: Sequence[str], *, total: int) -> None:
    """Print as many rows as anybody reads, and how to see the others."""
    rows: list[dict[str, Any]] = []
    for part in blocks:
        rows += part.select(names).slice(0, SHOWN_ROWS - len(rows)).to_pylist()
        if len(rows) == SHOWN_ROWS:
            break
    _print_rows(rows, "table", names)
    if total > len(rows):
        how = "choose with --metric and --kind, or see all with --format csv"
        print_note(f"the first {len(rows):,} of {total:,} rows; {how}", style="yellow")


def _stream_csv(blocks: Iterable[pa.Table], names: Sequence[str]) -> None:
    """Write rows as CSV, a block at a time; a value that is not a number is an empty cell."""
    sys.stdout.write(",".join(names) + "\n")
    for chosen in (part.select(names) for part in blocks):
        for at, field in enumerate(chosen.schema):
            if pa.types.is_floating(field.type):
                column = chosen[field.name]
                chosen = chosen.set_column(at, field, pc.if_else(pc.is_nan(column), None, column))
        write_csv(chosen, out := io.BytesIO(), WriteOptions(include_header=False))
        sys.stdout.write(out.getvalue().decode())


def _stream_json(blocks: Iterable[pa.Table]) -> None:
    """Write rows as a list of objects, a block at a time; their text is put together by columns, which is quicker."""
    before = "["
    for part in blocks:
        pieces: list[Any] = []
        for name in part.column_names:
            pieces += [f"{', ' if pieces else '{'}{json.dumps(name)}: ", _json_texts(part[name].combine_chunks())]
        lines = pc.binary_join_element_wise(*pieces, "}", "").to_pylist()
        sys.stdout.write(before + "\n " + ",\n ".join(lines))
        before = ","
    sys.stdout.write("[]\n" if before == "[" else "\n]\n")


def _json_texts(column: pa.Array) -> pa.Array:
    """Each value of a column as JSON; a number that is not finite is null."""
    kind = column.type
    if pa.types.is_list(kind):
        inner = pa.ListArray.from_arrays(_offsets(column), _json_texts(column.flatten()))
        texts = pc.binary_join_element_wise("[", pc.binary_join(inner, ", "), "]", "")
        return pc.if_else(pc.is_valid(column), texts, "null")
    if pa.types.is_string(kind):
        coded = column.dictionary_encode(null_encoding="encode")
        words = [
            json.dumps(word, ensure_ascii=not screen.takes_every_letter()) for word in coded.dictionary.to_pylist()
        ]
        return pa.array(words, pa.string()).take(coded.indices)
    if pa.types.is_floating(kind):
        column = pc.if_else(pc.is_finite(column), column, None)
        whole = pc.and_(pc.equal(column, pc.floor(column)), pc.less(pc.abs(column), 1e15))  # written without a point
        text = pc.cast(column, pa.string())
        return pc.fill_null(pc.if_else(whole, pc.binary_join_element_wise(text, ".0", ""), text), "null")
    return pc.fill_null(pc.cast(column, pa.string()), "null")


def _offsets(column: pa.Array) -> pa.Array:
    """Where the lists of a column begin among all of their values; a missing one is empty."""
    lengths = np.asarray(pc.fill_null(pc.list_value_length(column), 0))
    return pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())


def _print_rows(rows: Sequence[Mapping[str, Any]], form: str, columns: Sequence[str]) -> None:
    if form not in _FORMS:
        raise unknown_name("format", form, _FORMS)
    if form == "json":
        print_json([{k: _plain(v) for k, v in row.items()} for row in rows], indent=1)
        return
    if form == "csv":
        cells = [[_blank(row.get(name)) for name in columns] for row in rows]
        csv.writer(sys.stdout).writerows([columns, *cells])
        return
    print_rows(rows, columns)


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
        print_line(f"{found.second} − {found.first}{' (paired)' if found.paired else ''}")
    _print_rows(rows, form, [*_DIFFERENCES, "difference", "low", "high", "differs"])
    for note in found.notes:
        print_note(f"note: {note}", style="yellow")
    if form == "table" and not all(math.isnan(v) for v in matrix.flat):
        _print_cka(names, others, matrix)


def _print_cka(names: Sequence[str], others: Sequence[str], matrix: np.ndarray) -> None:
    """Print the matrix of CKA; on a narrow terminal with every second column, every third, …"""
    lead = max(map(len, names))
    room = max(1, (screen.width() - lead) // (max(4, *map(len, others)) + screen.GAP))
    shown = strided(len(others), room) if screen.bounded() else range(len(others))
    fewer = "" if len(shown) == len(others) else f"; {len(shown)} of {len(others)} columns fit"
    print_line(f"linear CKA (debiased); rows: first, columns: second{fewer}")
    table = screen.bare_table("", *(others[i] for i in shown))
    for name, line in zip(names, matrix, strict=True):
        table.add_row(Text(name), *("" if math.isnan(line[i]) else f"{line[i]:.2f}" for i in shown))
    screen.print_table(table)


# -- verdicts ----------------------------------------------------------------------------------------------------------


def print_run_end(
    folder: RunFolder,
    page: Path | None,
    drawing_seconds: float,
    *,
    summary: Iterable[RichTable | str] = (),
    papers: Mapping[str, str] | None = None,
    why: bool = False,
) -> None:
    """Print the end of a run with verdicts: tables of a study, verdicts, warnings, seconds, path of the page.

    `papers` are the papers of claims by name; `why` adds the sentences of all verdicts, and all warnings.
    """
    about = folder.about()
    print_grave(about)
    for part in summary:
        if isinstance(part, str):
            print_line(part)
        else:
            screen.print_table(part)
    if (verdicts := folder.path / "verdicts.json").is_file():
        found = json.loads(verdicts.read_text(encoding="utf-8"))
        found = leading(found) if about.get("study") == "untrained" else found
        shown: dict[str, Any] = {"hint": f"anisoscope claims {folder.path} --why", "study": about.get("study") or ""}
        print_verdicts(found, why=why, papers=papers, **shown)
    print_warnings(about, why=why)
    print_note(f"{about.get('wall_seconds', 0):.0f} s, and {drawing_seconds:.0f} s for the page")
    print_path(page or folder.path)


# -- lists, controls, data ---------------------------------------------------------------------------------------------


def print_two_columns(lines: Iterable[tuple[str, str]]) -> None:
    """Print names with their explanations beside them, or below them where the names are long."""
    pairs = list(lines)
    if max((len(name) for name, _ in pairs), default=0) > screen.width() // 3:
        for name, words in pairs:
            print_line(name, style="bold")
            print_line(words, indent=4)
        return
    table = screen.bare_table(RichColumn(style="bold", no_wrap=True), RichColumn(), show_header=False)
    for name, words in pairs:
        table.add_row(Text(name), Text(words))
    console.print(table)


def print_metric(name: str, metric: Any) -> None:
    """Print the declaration of a metric."""
    star = " (default)" if metric.default else ""
    console.print(Text.assemble((name, "bold"), f"{star}  {metric.title}"))
    facts = {"": metric.description, "formula: ": metric.formula, "convention: ": metric.convention}
    facts["options: "] = ", ".join(f"{key}={value}" for key, value in metric.options.items())
    facts["by default also: "] = ", ".join(f"{key}={value}" for key, value in metric.beside.items())
    facts |= {"measured at: ": ", ".join(sorted(metric.kinds)), "measured by: ": ", ".join(metric.measured_by)}
    for label, words in (facts | {"reference: ": metric.reference}).items():
        if words:
            print_line(f"{label}{words}", indent=4)


def print_control(result: Any) -> None:
    """Print PASS or FAIL for one control of the self-test."""
    word = Text("PASS", style="green") if result.passed else Text("FAIL", style="red")
    words = f"{result.metric:<26} {result.control:<34} {result.seen}"
    table = screen.bare_table(RichColumn(no_wrap=True), RichColumn(), show_header=False)
    narrow = len(words) + len("PASS") + screen.GAP > screen.width()
    table.add_row(word, Text(f"{result.metric}, {result.control}: {result.seen}" if narrow else words))
    console.print(table)


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
        screen.print_table(table)
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


def short_tables(
    table: Table, *, catalogue: Mapping[str, Any] | None = None, room: int | None = None
) -> list[RichTable]:
    """The table of the residual stream, and one for each further kind of site that was requested by name.

    Metrics measured per head are shown as means over heads; `room` is a width, in which fewer metrics may fit.
    """
    rows, entries = ProfileRows([RunView(table, table.about)]), Catalogue(catalogue)
    metrics = entries.ordered(rows.default_metrics())
    shown = [_fitted(rows, entries, pivot(rows, metrics), metrics, room=room)]
    for kind in (table.about.get("config") or {}).get("sites") or ():
        places: Places = {}
        for row in rows.query.where(kind=kind, head=None, group="", variant=""):
            if kind not in rows.streams[row["subject"]]:
                at = (row.layer or 0, False, kind)
                places.setdefault(row["subject"], {}).setdefault(at, {})[row.metric] = row
        there = entries.ordered({m for found in places.values() for cells in found.values() for m in cells})
        places = {index: dict(sorted(found.items())) for index, found in sorted(places.items())}
        shown += [_fitted(rows, entries, places, there, room=room)] if places else []
    return shown


def _fitted(
    rows: ProfileRows, entries: Catalogue, places: Places, metrics: Sequence[str], *, room: int | None
) -> RichTable:
    """The short table with as many metrics as fit without breaking a number."""
    most = TERMINAL_METRICS - (len(rows.subjects) > 1)
    shown = _shortened(rows, entries, places, metrics[:most])
    while room is not None and most > 1 and screen.measured(shown).minimum > room:
        most -= 1
        shown = _shortened(rows, entries, places, metrics[:most])
    return shown


def _shortened(rows: ProfileRows, entries: Catalogue, places: Places, few: Sequence[str]) -> RichTable:
    """A few metrics at all places, or their range over the places of each model if there are too many."""
    several = len(rows.subjects) > 1
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
    sign = "±" if screen.takes_every_letter() else "+-"
    words = estimate(row.value, row.low, row.high).replace(" ± ", sign).replace("[", r"\[")
    return f"{words} ?" if doubtful(row) else words
