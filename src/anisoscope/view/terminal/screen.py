"""Where commands print, and the one place that decides on width, colour, links and letters.

Progress and notes go to standard error; tables, verdicts and paths to standard output. Rich decides what a terminal can
do: its width (the terminal's, or COLUMNS; 80 where there is neither), colours (none in a pipe or with NO_COLOR), and
whether boxes must be ASCII.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.segment import Segment
from rich.style import Style
from rich.table import Column as RichColumn
from rich.table import Table as RichTable
from rich.text import Text

ANY_WIDTH = 10_000
NO_LINKS = ("linux", "dumb")  # terminals that would show the link's code
GAP = 2  # between the columns of a table without lines
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class PlainConsole(Console):
    """A console whose texts command no terminal: names and notes may come with the run folder of somebody else."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control is None and _CONTROLS.search(segment.text):
                yield Segment(_CONTROLS.sub("\ufffd", segment.text), segment.style)
            else:
                yield segment


console = PlainConsole(highlight=False, emoji=False)
errors = PlainConsole(stderr=True, highlight=False, emoji=False)
for _one in (console, errors):
    if _one.is_dumb_terminal:  # rich takes 80 columns for granted there
        _one.size = shutil.get_terminal_size()


def width() -> int:
    """Columns of standard output; asked again every time, since a window may have been resized."""
    return max(20, console.width)


def bounded() -> bool:
    """Whether a table must fit: a pipe or file without COLUMNS takes tables as wide as they are."""
    return console.is_terminal or os.environ.get("COLUMNS", "").isdigit()


def animated() -> bool:
    """Whether standard error can draw over itself: a terminal, and not a dumb one."""
    return errors.file.isatty() and not errors.is_dumb_terminal


def takes_every_letter() -> bool:
    """Whether standard output is some UTF."""
    return not console.options.ascii_only


# -- printing ----------------------------------------------------------------------------------------------------------


def print_line(words: str, *, error: bool = False, style: str | None = None, indent: int = 0) -> None:
    """Print a sentence without markup, wrapped between words: a path that is wider than the screen stays whole."""
    target = errors if error else console
    if indent:
        target.print(Padding(Text(words), (0, 0, 0, indent), expand=False), style=style)
    elif any(os.sep in word and cell_len(word) > target.width for word in words.split()):
        lines = textwrap.fill(words, target.width, break_long_words=False, break_on_hyphens=False)
        target.print(Text(lines), style=style, soft_wrap=True)
    else:
        target.print(Text(words), style=style)


def print_note(words: str, *, style: str | None = None) -> None:
    """Print a sentence to standard error."""
    print_line(words, error=True, style=style)


def print_table(table: RichTable) -> None:
    """Print a table: within the width on a terminal, as wide as it is elsewhere."""
    if not bounded():
        table.width = measured(table).maximum
    console.print(table, crop=bounded())


def measured(table: RichTable) -> Measurement:
    """The least width of a table, at which no word is broken, and the width at which no line is."""
    return console.measure(table, options=console.options.update(width=ANY_WIDTH))


def print_path(path: Path | str) -> None:
    """Print a path on one line of its own, whatever the width; a terminal that can gets a link."""
    console.print(linked(path), soft_wrap=True)


def linked(path: Path | str) -> Text:
    """A path that a terminal opens when it is clicked (OSC 8); rich writes the plain path elsewhere."""
    links = os.environ.get("TERM") not in NO_LINKS
    return Text(str(path), style=Style(link=Path(path).resolve().as_uri()) if links else "")


def print_json(value: Any, *, indent: int = 2) -> None:
    sys.stdout.write(json.dumps(value, indent=indent, ensure_ascii=not takes_every_letter()) + "\n")


# -- parts of tables ---------------------------------------------------------------------------------------------------


def elided(text: str, most: int) -> str:
    """A text of at most so many columns: too long a one loses its middle, since names differ at both ends.

    >>> elided("bidirectional-masked-6x256", 16), elided("decoder", 16), elided("decoder", 1)
    ('bidirect…d-6x256', 'decoder', '…')
    """
    kept = most if cell_len(text) <= most else most - 1
    while cell_len(text) > most:
        tail = max(0, kept) // 2
        if cell_len(shorter := f"{text[: max(0, kept - tail)]}…{text[len(text) - tail :]}") <= max(1, most):
            return shorter
        kept -= 1  # letters of East Asia are two columns wide
    return text


def narrowed(widths: Sequence[int], room: int, least: int) -> list[int]:
    """Widths that fit into `room` with the gaps between them: the widest gives way, down to `least`.

    >>> narrowed([20, 4, 10], room=30, least=8)
    [12, 4, 10]
    """
    fitted, spare = list(widths), room - GAP * (len(widths) - 1)
    while sum(fitted) > spare and max(fitted) > least:
        fitted[fitted.index(max(fitted))] -= 1
    return fitted


def bare_table(*columns: str | RichColumn, **words: Any) -> RichTable:
    """A table without lines, for what is read row by row."""
    heads = [column if isinstance(column, RichColumn) else RichColumn(column, no_wrap=True) for column in columns]
    options: dict[str, Any] = {"box": None, "pad_edge": False, "padding": (0, GAP, 0, 0), "header_style": "bold"}
    return RichTable(*heads, **options | words)


def new_table(title: str, words: tuple[str, ...], numbers: tuple[str, ...]) -> RichTable:
    """An empty table with columns for words, then right-aligned columns for numbers."""
    columns = [RichColumn(name, no_wrap=True, overflow="fold") for name in words]
    columns += [RichColumn(name, justify="right", overflow="fold") for name in numbers]
    return bare_table(*columns, title=title, title_justify="left")
