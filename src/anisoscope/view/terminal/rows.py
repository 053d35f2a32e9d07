"""Long tables within a width: what is the same everywhere is said once, notes are numbered, names lose their middle."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Column as RichColumn
from rich.table import Table as RichTable
from rich.text import Text

from anisoscope.view.terminal import screen
from anisoscope.view.terminal.screen import elided, print_line, print_note

DROPPED = ("sd", "dropped", "contexts", "n", "second", "first")  # the first to go where there is no room
ELIDED = ("model", "metric", "variant", "group", "kind", "stack")
LEAST = 8  # columns that a name keeps
HEADINGS = ("metric", "variant")  # what rows stand below where there is no room beside them
SAID_ONCE = ("model", "seed", "step", "stack", "group", "metric", "variant", "n", "contexts", "dropped")
Columns = dict[str, list[str]]


def print_rows(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Print rows as a table; on a terminal it fits, and what was left out is said."""
    columns = {name: [_words(row.get(name)) for row in rows] for name in names}
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    if screen.bounded():
        _print_fitted(columns, screen.width())
    else:
        _print_columns(columns)


def _print_fitted(columns: Columns, room: int) -> None:
    """Print columns within the room; where they are too wide, rows of one metric and variant stand below their name."""
    same = {name: columns[name][0] for name in SAID_ONCE if name in columns and _said_once(columns[name])}
    if "other_layer" in columns and columns["other_layer"] == columns.get("layer"):
        same["other_layer"] = "as layer"
    kept = {name: cells for name, cells in columns.items() if name not in same}
    notes, over, left = _number_notes(kept), {}, []
    if _natural(kept) > room:
        over = {name: kept.pop(name) for name in HEADINGS if name in kept}
    for name in DROPPED:
        if name in kept and _natural(kept, elidable=LEAST) > room:
            left.append(name)
            del kept[name]
    if same:
        print_line(f"in all rows: {', '.join(f'{name} {word}' for name, word in same.items())}")
    _print_columns(_narrowed(kept, room), list(zip(*over.values(), strict=True)) if over else None)
    for number, note in enumerate(notes, 1):
        print_line(f"({number}) {note}")
    if left:
        print_note(f"no room for: {', '.join(left)}; a wider terminal or --format csv has them", style="yellow")


def _said_once(cells: Sequence[str]) -> bool:
    return len(cells) > 1 and len(set(cells)) == 1


def _number_notes(columns: Columns) -> list[str]:
    """Replace notes by numbers; the notes in their order."""
    cells = columns.get("note", [])
    numbers = {note: number for number, note in enumerate(dict.fromkeys(filter(None, cells)), 1)}
    if numbers:
        columns["note"] = [f"({numbers[cell]})" if cell else "" for cell in cells]
    return list(numbers)


def _widths(columns: Columns, *, elidable: int | None = None) -> dict[str, int]:
    widths = {name: max(map(len, (name, *cells))) for name, cells in columns.items()}
    return widths if elidable is None else {n: min(w, elidable) if n in ELIDED else w for n, w in widths.items()}


def _natural(columns: Columns, *, elidable: int | None = None) -> int:
    return sum(_widths(columns, elidable=elidable).values()) + screen.GAP * (len(columns) - 1)


def _narrowed(columns: Columns, room: int) -> Columns:
    """The columns with names elided, always the longest, until they fit or every name is at its shortest."""
    widths = _widths(columns)
    names = [name for name in widths if name in ELIDED]
    taken = sum(width + screen.GAP for name, width in widths.items() if name not in names)
    widths |= zip(names, screen.narrowed([widths[name] for name in names], room - taken, LEAST), strict=True)
    return {name: [elided(cell, widths[name]) for cell in cells] for name, cells in columns.items()}


def _print_columns(columns: Columns, headings: Sequence[tuple[str, ...]] | None = None) -> None:
    """Print a table, or one for each heading, given for every row, with the same columns in all."""
    lines = list(zip(*columns.values(), strict=True))
    if headings is None:
        screen.print_table(_table(columns, lines))
        return
    groups: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for heading, line in zip(headings, lines, strict=True):
        groups.setdefault(heading, []).append(line)
    screen.console.print(_table(columns, []))
    for heading, part in groups.items():
        print_line(" ".join(filter(None, heading)), style="bold")
        screen.console.print(_table(columns, part, show_header=False))


def _table(columns: Columns, lines: Sequence[tuple[str, ...]], **words: bool) -> RichTable:
    widths = _widths(columns)
    heads = [RichColumn(elided(name, widths[name]), no_wrap=True, width=widths[name]) for name in columns]
    table = screen.bare_table(*heads, **words)
    for line in lines:
        table.add_row(*map(Text, line))
    return table


def _words(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
