"""Pages as plain data: a list of sections, each a list of parts, rendered by one template into one HTML file.

A part is prose, a heading, a figure, a table, something folded away, the controls of a figure, or one of the few things
that every page has in one form (findings, verdicts, notes, the record of a run, the table of results).
"""

from __future__ import annotations

import json
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
    """A paragraph; markup where it is `Markup`."""

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
    """A cell of a table: words, smaller words below, a shade; a heading of its row or group where it says so."""

    text: str = ""
    small: Sequence[str] = ()
    title: str = ""
    css: str = ""
    shade: str = ""
    head: bool = False
    rows: int = 1
    columns: int = 1
    swatch: Swatch | None = None
    fold: tuple[str, Sequence[str]] | None = None  # a summary, and what it hides


@dataclass(frozen=True)
class DataTable:
    """Rows of cells under rows of headings; `groups` are divided by rules."""

    heads: Sequence[Sequence[Any]]
    groups: Sequence[Sequence[Sequence[Any]]]
    label: str
    css: str = ""
    line: int | None = None  # entry of the page's legend with which it goes
    numeric: int = 1  # from this column on, headings stand right


@dataclass(frozen=True)
class Fold:
    """Parts behind a summary."""

    summary: str
    parts: Sequence[Any]
    open: bool = False
    css: str = ""


@dataclass(frozen=True)
class Box:
    """Parts that stand together, with the look of a class."""

    parts: Sequence[Any]
    css: str
    label: str = ""


@dataclass(frozen=True)
class Key:
    """The page's legend: models to be shown and hidden."""


@dataclass(frozen=True)
class Swatch:
    """A line's look in a legend."""

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
        """A place on the ramp, whose colour is set by the script."""
        return self.colour[5:] if self.colour.startswith("@seq") else ""

    @property
    def css(self) -> str:
        return "" if self.ramp else f"var(--{self.colour[1:].split('/')[0]})"


CHANCE = Swatch("chance", "@ink", "dot")


@dataclass(frozen=True)
class Swatches:
    """What the lines of a figure are."""

    items: Sequence[Swatch]


@dataclass(frozen=True)
class Ramp:
    """What the ends of the ramp of colours are."""

    first: str
    last: str
    final: bool = False


@dataclass(frozen=True)
class Controls:
    """The selections of a switch; `steer` keeps them in sight, and plays a slider."""

    switch: Switch
    steer: bool = False


@dataclass(frozen=True)
class Says:
    """What is said of what is chosen."""

    switch: Switch


@dataclass(frozen=True)
class PageFinding:
    """A topic and what is said of it, a paragraph each."""

    topic: str
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Piece:
    """What each page has in one form: findings, facts, a listing, the record of runs, a glossary, a download, cards."""

    kind: str
    items: Any


@dataclass(frozen=True)
class Verdicts:
    """A table of claims with their verdicts, each with a sign, numbers and a reason."""

    claims: Sequence[Mapping[str, Any]]
    subjects: str = ""  # heading of the column of subjects; "" = none
    scope: str = ""  # said once, and beside a verdict only where that is about something else
    first: str = "Claim"
    p: bool = True
    parts: bool = True  # whether what a verdict is made of is folded beneath it


@dataclass(frozen=True)
class Section:
    """A section of a page, and its name in the table of contents."""

    id: str
    title: str
    parts: Sequence[Any]
    menu: str = ""  # "" = not in the contents
    bar: Controls | None = None  # selections that stay in sight, above this section and those `under` it
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
    files: Sequence[Figure] = ()  # figures that are files only

    def walk(self) -> Iterator[Any]:
        """All parts, in order, those inside others too."""
        waiting = [part for s in self.sections for part in (*([s.bar] if s.bar else []), *s.parts)]
        while waiting:
            part = waiting.pop(0)
            yield part
            if isinstance(part, Fold | Box):
                waiting[:0] = part.parts

    def figures(self) -> list[Figure]:
        return [*(part for part in self.walk() if isinstance(part, Figure)), *self.files]

    def chosen(self) -> dict[str, int]:
        """What all selections are set to at first."""
        switches = [part.switch for part in self.walk() if isinstance(part, Controls)]
        return {name: at for switch in switches for name, at in switch.defaults.items()}


def text(template: str, **values: Any) -> Markup:
    """Markup with values filled in, escaped.

    >>> text("a <b>{x}</b>", x="<")
    Markup('a <b>&lt;</b>')
    """
    return Markup(template).format(**values)


def render(page: Page, links: Sequence[str] = ()) -> str:
    """The page as HTML; `links` are the vector files beside it, without their suffix."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    specs: dict[str, Any] = {}
    sections = [{**vars(s), "parts": [_shown(part, specs) for part in s.parts]} for s in page.sections]
    on_page = (part for part in page.walk() if isinstance(part, Figure) and part.shown)
    arrays = {name: array for figure in on_page for name, array in figure.arrays.items()}
    blocks: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True}
    made = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, **blocks)
    made.filters["json"] = lambda value: Markup(script_json(value))
    own = {name: Markup((TEMPLATES / f"page.{name}").read_text(encoding="utf-8")) for name in ("css", "js")}
    own["plotly"] = Markup(get_plotlyjs() if specs else "")
    told = {"sections": sections, "links": links, "specs": specs, "arrays": arrays}
    return made.get_template("page.html.j2").render(vars(page) | told | own)


def _shown(part: Any, specs: dict[str, Any]) -> dict[str, Any]:
    """A part as the template takes it; the drawings of figures are kept under their ids."""
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
    """JSON that may stand inside a script element: no NaN, and no character that could end the element.

    >>> script_json(["</script>"])
    '["\\\\u003c/script\\\\u003e"]'
    """
    found = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    unsafe: dict[str, str | int | None] = {
        "<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029",
    }  # fmt: skip
    return found.translate(str.maketrans(unsafe))
