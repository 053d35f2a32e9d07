"""Pages as plain data: sections, each a list of parts, rendered by one template into one HTML file.

A part is prose, a heading, a figure, a table, a collapsible part, the controls of a figure, or a `Piece`, which has the
same form on every page (findings, notes, the record of a run, the table of results).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from anisoscope.view.figure import Figure, Switch
from anisoscope.view.plotly_renderer import panel_spec

TEMPLATES = Path(__file__).parent / "templates"
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
class Verdicts:
    """A table of claims with their verdicts: sign, numbers and reason."""

    claims: Sequence[Mapping[str, Any]]
    subjects: str = ""  # heading of the column of subjects; "" = none
    scope: str = ""  # stated once; verdicts state only a different scope
    first: str = "Claim"
    p: bool = True
    parts: bool = True  # whether the parts of a verdict are listed in a fold below it


@dataclass(frozen=True)
class Section:
    """A section of a page, and its name in the table of contents."""

    id: str
    title: str
    parts: Sequence[Any]
    menu: str = ""  # "" = not in the table of contents
    bar: Controls | None = None  # selections that stay visible above this section and those `under` it
    under: bool = False


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
    """A whole page."""

    title: str
    heading: str
    sections: Sequence[Section]
    deck: str = ""
    version: str = ""
    legend: Sequence[LegendEntry] = ()
    files: Sequence[Figure] = ()  # figures written as files only

    def walk(self) -> Iterator[Any]:
        """All parts in order, including nested ones."""
        waiting = [part for s in self.sections for part in (*([s.bar] if s.bar else []), *s.parts)]
        while waiting:
            part = waiting.pop(0)
            yield part
            if isinstance(part, Fold | Box):
                waiting[:0] = part.parts

    def figures(self) -> list[Figure]:
        return [*(part for part in self.walk() if isinstance(part, Figure)), *self.files]

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


def render(page: Page, links: Sequence[str] = ()) -> str:
    """The page as HTML; `links` are the paths of its vector files, without suffix."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    specs: dict[str, Any] = {}
    sections = [{**vars(s), "parts": [_shown(part, specs) for part in s.parts]} for s in page.sections]
    on_page = (part for part in page.walk() if isinstance(part, Figure) and part.shown)
    arrays = {name: array for figure in on_page for name, array in figure.arrays.items()}
    blocks: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True}
    made = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, **blocks)
    made.filters["json"] = lambda value: Markup(script_json(value))
    assets = {name: Markup((TEMPLATES / f"page.{name}").read_text(encoding="utf-8")) for name in ("css", "js")}
    assets["plotly"] = Markup(get_plotlyjs() if specs else "")
    content = {"sections": sections, "links": links, "specs": specs, "arrays": arrays}
    return made.get_template("page.html.j2").render(vars(page) | content | assets)


def _shown(part: Any, specs: dict[str, Any]) -> dict[str, Any]:
    """A part as a record for the template; plots of figures are added to `specs` by id."""
    if isinstance(part, Figure):
        charts = []
        for i, panel in enumerate(part.panels if part.shown else ()):
            name = f"{part.id}-{i + 1}" if part.id else f"chart-{len(specs) + 1}"
            specs[name] = panel_spec(panel)
            charts.append({**vars(panel), "id": name})
        return {"kind": "figure", "layout": part.layout, "charts": charts}
    found = {"kind": type(part).__name__.lower(), **vars(part)}
    if isinstance(part, Fold | Box):
        found["parts"] = [_shown(inner, specs) for inner in part.parts]
    return found


def script_json(value: Any) -> str:
    """JSON for a script element: without NaN, and without characters that could end the element.

    >>> script_json(["</script>"])
    '["\\\\u003c/script\\\\u003e"]'
    """
    from jinja2.utils import htmlsafe_json_dumps

    return str(htmlsafe_json_dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")))
