"""The training page's bookkeeping: notes, and as much of the table as a page can carry."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from anisoscope.results.table import Table
from anisoscope.view.catalogue import Catalogue
from anisoscope.view.records import csv_link
from anisoscope.view.series import Sheet, Source
from anisoscope.view.training import OWN, STREAM, History
from anisoscope.view.training_words import entry_of
from anisoscope.view.words import plural

ROWS = 8_000  # of the table that the page carries
NOTES = 60
# parts of a note that figures already tell
USUAL = ("in-sample", "since step", "above", "below", "chance", "bias about", "mean over", "sd between")

Row = Mapping[str, str]
# What is left out of the page's own table, in this order, until the rest fits.
CUTS: tuple[tuple[str, Callable[[Row], bool]], ...] = (
    ("what the loop logged at every step", lambda row: row["kind"] == "training"),
    ("controls", lambda row: "control=" in row["variant"]),
    ("halves of the contexts", lambda row: row["group"].startswith("half:")),
    ("groups", lambda row: row["group"] != ""),
    ("other proxies", lambda row: "proxy=" in row["variant"] and "proxy=semi_nmf" not in row["variant"]),
    ("tests", lambda row: row["metric"].endswith(("_p", "_p_holm"))),
    ("means of row ratios", lambda row: "average=" in row["variant"]),
)


def last_rows(sources: Sequence[Source]) -> list[Source]:
    """The geometry of each model at its last step, as a profile has it."""
    found = []
    for source in sources:
        columns = [source.table.arrow[name].to_pylist() for name in ("model", "step", "metric", "kind", "head")]
        rows = list(zip(*columns, strict=True))
        ends: dict[str, int] = {}
        for model, step, metric, _, _ in rows:
            if step is not None and metric not in OWN:
                ends[model] = max(step, ends.get(model, step))
        keep = [
            metric not in OWN and kind in STREAM and head is None and (step is None or step == ends[model])
            for model, step, metric, kind, head in rows
        ]
        found.append(Source(_filtered(source.table, keep), source.about, source.path))
    return found


def _filtered(table: Table, keep: Sequence[bool]) -> Table:
    return Table(table.arrow.filter(pa.array(keep, type=pa.bool_())), table.about)


def step_notes(history: History, catalogue: Catalogue) -> dict[str, list[dict[str, str]]]:
    """Notes that figures do not tell, once each with the steps they hold for: what is missing apart from remarks."""
    missing: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    remarks: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for key in history.keys(history.metrics()):
        label, title = history.learners[key[0]].label, entry_of(catalogue, key[1]).title
        for mark in history.line_at(key):
            said = unusual(mark.note)
            if mark.value is None:
                missing[label, title, said or "no reason was recorded"].append(mark.step)
            elif said:
                remarks[label, title, said].append(mark.step)
    return {"missing": _noted(missing), "remarks": _noted(remarks)}


def unusual(note: str) -> str:
    """What a note says beyond what figures already tell.

    >>> unusual("in-sample; fewer than 10 d rows"), unusual("since step 64")
    ('fewer than 10 d rows', '')
    """
    parts = (part.strip() for part in note.split(";"))
    return "; ".join(part for part in parts if part and not part.startswith(USUAL))


def _noted(book: Mapping[tuple[str, str, str], list[int]]) -> list[dict[str, str]]:
    rows = [
        {"model": model, "metric": metric, "where": _when(steps), "note": note}
        for (model, metric, note), steps in book.items()
    ]
    left = len(rows) - NOTES
    more = {"model": "", "metric": "", "where": "", "note": f"{left:,} further notes are in table.parquet."}
    return [*rows[:NOTES], *([more] if left > 0 else [])]


def _when(steps: Sequence[int]) -> str:
    """How many rows, and at which steps."""
    low, high = min(steps), max(steps)
    return f"{plural(len(steps), 'row')}, " + (f"step {low:,}" if low == high else f"steps {low:,} to {high:,}")


def page_table(sources: Sequence[Source], catalogue: Catalogue) -> dict[str, Any]:
    """The download of the page: the whole table, or what is left of it without the least important rows."""
    total, gone = sum(len(source.table) for source in sources), []
    tables = [Table(t.arrow.filter(pc.is_null(t.arrow["head"])), t.about) for t in (s.table for s in sources)]
    heads = total - sum(map(len, tables))
    for words, unwanted in CUTS:
        before = sum(map(len, tables))
        if before <= ROWS:
            break
        tables = [_without(table, unwanted) for table in tables]
        gone += [words] if sum(map(len, tables)) < before else []
    if sum(map(len, tables)) > ROWS:
        tables, gone = [_last_steps(table) for table in tables], [*gone, "all steps but the last"]
    left, parts, room = sum(map(len, tables)), [], ROWS
    for table, source in zip(tables, sources, strict=True):
        parts.append(Source(Table(table.arrow.slice(0, room)), source.about, source.path))
        room -= len(parts[-1].table)
    counts = {"total": total - heads, "gone": gone, "cut": left > ROWS, "heads": heads}
    return csv_link(Sheet(parts, catalogue)) | counts


def _without(table: Table, unwanted: Callable[[Row], bool]) -> Table:
    rows = table.arrow.select(["kind", "group", "metric", "variant"]).to_pylist()
    return _filtered(table, [not unwanted({name: value or "" for name, value in row.items()}) for row in rows])


def _last_steps(table: Table) -> Table:
    """The rows of each model and seed at its last step, and those of no step."""
    rows = list(zip(*(table.arrow[name].to_pylist() for name in ("model", "seed", "step")), strict=True))
    ends: dict[tuple[Any, Any], int] = {}
    for model, seed, step in rows:
        ends[model, seed] = max(ends.get((model, seed), 0), step or 0)
    return _filtered(table, [step is None or step == ends[model, seed] for model, seed, step in rows])
