"""Pages as plain data: a finding, a hero figure, verdicts, and sections of parts; `view.document` makes HTML of them.

A part is prose, a heading, a figure, a table, a collapsible part, the controls of a figure, or a `Piece`, which has the
same form on every page (findings, notes, the record of a run, the table of results).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup

from anisoscope.view.figure import Figure, Switch

STROKES = {"dash": "6 4", "longdash": "10 5", "dot": "2 2.5", "dashdot": "6 3 2 3"}


@dataclass(frozen=True)
class Prose:
    """A paragraph; not escaped if it is `Markup`."""

    text: str
    css: str = ""


@dataclass(frozen=True)
class Heading:
    """A heading inside a section."""

    text: str
    level: int = 3
    id: str = ""
    css: str = ""
    menu: str = ""  # its name in the table of contents


@dataclass(frozen=True)
class TableCell:
    """A cell of a table: text, smaller text below, a shade; optionally the heading of its row or group."""

    text: str = ""
    small: Sequence[str] = ()
    title: str = ""
    css: str = ""
    shade: str = ""
    head: bool = False
    rows: int = 1
    columns: int = 1
    swatch: Swatch | None = None
    fold: tuple[str, Sequence[str]] | None = None  # a summary, and the hidden paragraphs


@dataclass(frozen=True)
class DataTable:
    """Rows of cells below rows of headings; `groups` are separated by lines."""

    heads: Sequence[Sequence[Any]]
    groups: Sequence[Sequence[Sequence[Any]]]
    label: str
    css: str = ""
    line: int | None = None  # index of the page's legend entry that shows and hides it
    numeric: int = 1  # headings are right-aligned from this column on


@dataclass(frozen=True)
class Fold:
    """Collapsed parts behind a summary."""

    summary: str
    parts: Sequence[Any]
    open: bool = False
    css: str = ""


@dataclass(frozen=True)
class Box:
    """Parts in one container with a CSS class."""

    parts: Sequence[Any]
    css: str
    label: str = ""


@dataclass(frozen=True)
class Key:
    """The page's legend, in which models are shown and hidden."""


@dataclass(frozen=True)
class Swatch:
    """The style of a line in a legend."""

    label: str
    colour: str = "@ink"
    dash: str = "solid"
    band: bool = False
    sign: str = ""

    @property
    def stroke(self) -> str:
        return STROKES.get(self.dash, "")

    @property
    def ramp(self) -> str:
        """The position on the colour ramp; the script sets the colour."""
        return self.colour[5:] if self.colour.startswith("@seq") else ""

    @property
    def css(self) -> str:
        return "" if self.ramp else f"var(--{self.colour[1:].split('/')[0]})"


CHANCE = Swatch("chance", "@ink", "dot")


@dataclass(frozen=True)
class Swatches:
    """A legend of the lines of a figure."""

    items: Sequence[Swatch]


@dataclass(frozen=True)
class Ramp:
    """A legend of the colour ramp with labels for its ends."""

    first: str
    last: str
    final: bool = False


@dataclass(frozen=True)
class Controls:
    """The selections of a switch; with `steer` they stay visible when scrolling and a slider can be played."""

    switch: Switch
    steer: bool = False


@dataclass(frozen=True)
class Says:
    """The text of the chosen options."""

    switch: Switch


@dataclass(frozen=True)
class PageFinding:
    """A topic with paragraphs of findings."""

    topic: str
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Piece:
    """A part with the same form on every page: findings, facts, a list, the record, a glossary, a download, cards."""

    kind: str
    items: Any


@dataclass(frozen=True)
class Section:
    """A section of a page: what was found in one sentence, and parts.

    Its first figure is shown with its legend and selections; text before it is behind "How to read this", everything
    else behind a fold. A section without a figure is one fold.
    """

    id: str
    title: str
    parts: Sequence[Any]
    menu: str = ""  # its name in the table of contents; "" = not there
    bar: Controls | None = None  # selections that stay visible above this section and those `under` it
    under: bool = False
    finding: str = ""


@dataclass(frozen=True)
class Hero:
    """The figure that is seen first, with its legend and one sentence on what it shows."""

    figure: Figure
    title: str
    key: Sequence[Any] = ()
    caption: str = ""


@dataclass(frozen=True)
class LegendEntry:
    """A model in the page's legend."""

    index: int
    label: str
    colour: int
    role: str = ""
    mark: str = "circle"
    shown: bool = True


@dataclass(frozen=True)
class Page:
    """A whole page: the finding as its heading, what it rests on, the hero, the verdicts, and sections."""

    title: str  # of the window: what was measured
    heading: str  # the finding
    sections: Sequence[Section]
    deck: str = ""  # what the finding rests on
    hero: Hero | None = None
    verdicts: Sequence[Mapping[str, Any]] = ()
    random: Collection[str] = ()  # models with random weights, whose verdicts stand apart
    beside: Sequence[Any] = ()  # beside the hero of a page without verdicts
    notes: Sequence[Any] = ()  # what must be read before any number
    version: str = ""
    legend: Sequence[LegendEntry] = ()
    files: Sequence[Figure] = ()  # figures written as files only

    def walk(self) -> Iterator[Any]:
        """All parts in order, including nested ones."""
        waiting = [*(self.hero.key if self.hero else ()), *self.beside, *self.notes]
        waiting += [part for s in self.sections for part in (*([s.bar] if s.bar else []), *s.parts)]
        while waiting:
            part = waiting.pop(0)
            yield part
            if isinstance(part, Fold | Box):
                waiting[:0] = part.parts

    def figures(self) -> list[Figure]:
        """All figures; the hero, which is drawn first, is written as a file too."""
        first = [replace(self.hero.figure, files=self.hero.figure.files or {"hero": {}})] if self.hero else []
        return [*first, *(part for part in self.walk() if isinstance(part, Figure)), *self.files]

    def chosen(self) -> dict[str, int]:
        """The initial choice of every selection."""
        switches = [part.switch for part in self.walk() if isinstance(part, Controls)]
        return {name: at for switch in switches for name, at in switch.defaults.items()}


def text(template: str, **values: Any) -> Markup:
    """A markup template with escaped values filled in.

    >>> text("a <b>{x}</b>", x="<")
    Markup('a <b>&lt;</b>')
    """
    return Markup(template).format(**values)
