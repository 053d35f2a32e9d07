"""Long tables within a width: what is the same everywhere is said once, notes are numbered, names lose their middle."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from anisoscope.view.terminal import screen
from anisoscope.view.terminal.screen import elided, print_line, print_note

DROPPED = ("sd", "dropped", "contexts", "n", "second")  # the first to go where there is no room
ELIDED = ("model", "metric", "variant", "group", "kind", "stack")
LEAST = 8  # columns that a name keeps
SAID_ONCE = ("model", "seed", "step", "stack", "group", "variant", "n", "contexts", "dropped")
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
    same = {name: columns[name][0] for name in SAID_ONCE if name in columns and _said_once(columns[name])}
    kept = {name: cells for name, cells in columns.items() if name not in same}
    notes = _number_notes(kept)
    left: list[str] = []
    for name in DROPPED:
        if name in kept and _natural(kept, elidable=LEAST) > room:
            left.append(name)
            del kept[name]
    if same:
        print_line(f"in all rows: {', '.join(f'{name} {word}' for name, word in same.items())}")
    _print_columns(_narrowed(kept, room))
    for number, note in enumerate(notes, 1):
        print_line(f"({number}) {note}")
    if left:
        print_note(f"no room for: {', '.join(left)}; a wider terminal or --format csv has them", style="yellow")


def _said_once(cells: Sequence[str]) -> bool:
    return len(cells) > 1 and len(set(cells)) == 1


def _number_notes(columns: Columns) -> list[str]:
    """Replace notes by numbers; the notes in their order."""
    cells = columns.get("note", [])
    notes = list(dict.fromkeys(filter(None, cells)))
    if notes:
        columns["note"] = [f"({notes.index(cell) + 1})" if cell else "" for cell in cells]
    return notes


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


def _print_columns(columns: Columns) -> None:
    table = screen.bare_table(*columns)
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*map(Text, cells))
    screen.print_table(table)


def _words(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
