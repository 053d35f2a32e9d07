"""Pages as HTML: one set of templates, styles and scripts for a file and for a page that is kept up to date.

`page_data` is a page as plain data: blocks of HTML by id, the figures, and the table. `page_document` is the same as
one HTML file. A live page is such a file whose script is handed new data (`window.anisoscope.update`) and changes what
is different, in place.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from anisoscope.view.figure import Figure
from anisoscope.view.matplotlib_renderer import slug
from anisoscope.view.page import (
    Box,
    Controls,
    Fold,
    Heading,
    Hero,
    Key,
    Page,
    Piece,
    Prose,
    Ramp,
    Says,
    Section,
    Swatches,
)
from anisoscope.view.plotly_renderer import panel_spec
from anisoscope.view.verdict_grid import verdict_grid

TEMPLATES = Path(__file__).parent / "templates"
SCRIPTS = ("charts.js", "table.js", "page.js")
PLOTLY = TEMPLATES / "plotly" / "plotly-pages.min.js.gz"
PANELS = 3  # of a figure that are shown before anything is opened
LEGENDS = (Controls, Key, Swatches, Ramp)  # parts that stay with the first figure of a section


def page_data(page: Page, *, claims: Mapping[str, Any] | None = None, links: Sequence[str] = ()) -> dict[str, Any]:
    """A page as plain data: its blocks as HTML in order, the figures (`specs`), their `arrays`, table and cards.

    `claims` are the declarations of the claims, for sources and definitions; `links` the paths of vector files, without
    suffix.
    """
    drawn = _Drawn(page, links, claims or {})
    blocks = [("masthead", drawn.made("masthead", page=page)), ("first", drawn.first())]
    keyed = page.hero is not None and any(isinstance(part, Key) for part in page.hero.key)
    blocks += [("contents", drawn.made("contents", sections=page.sections, keyed=keyed))]
    for group in _groups(page.sections):
        blocks.append((f"block-{group[0].id}", drawn.sections(group)))
    on_page = (part for part in page.walk() if isinstance(part, Figure) and part.shown)
    figures = [*([page.hero.figure] if page.hero else []), *on_page]
    arrays = {name: array for figure in figures for name, array in figure.arrays.items()}
    made = [{"id": name, "html": str(html)} for name, html in blocks]
    return {"title": page.title, "blocks": made, "specs": drawn.specs, "arrays": arrays, **drawn.more}


def page_document(
    page: Page, *, claims: Mapping[str, Any] | None = None, links: Sequence[str] = (), live: str | None = None
) -> str:
    """The page as one HTML file that opens offline.

    With `live`, the version of what it shows, it also asks the server that it came from for newer data; in a notebook
    ("") it is handed them.
    """
    data = page_data(page, claims=claims, links=links)
    inlined = {name: value for name, value in data.items() if name not in ("title", "blocks")}
    names = (*SCRIPTS, "live.js") if live else SCRIPTS
    scripts = "\n".join((TEMPLATES / name).read_text(encoding="utf-8") for name in names)
    assets = {"css": (TEMPLATES / "page.css").read_text(encoding="utf-8"), "js": scripts}
    growing = live is not None  # figures may come later
    blocks = [(block["id"], Markup(block["html"])) for block in data["blocks"]]
    content = {"title": page.title, "version": page.version, "blocks": blocks, "live": live}
    plotly = packed(gzip.decompress(PLOTLY.read_bytes()).decode()) if data["specs"] or growing else ""
    content |= {"data": packed(inlined), "plotly": plotly}
    made = {name: Markup(words) for name, words in assets.items()}
    return str(_templates().get_template("page.html.j2").render(content | made))


def runs_document(runs: Sequence[Mapping[str, Any]], *, most: int) -> str:
    """The page with the list of runs that a server shows, of which it draws at most so many together."""
    from jinja2.utils import htmlsafe_json_dumps

    return str(_templates().get_template("runs.html.j2").render(runs=htmlsafe_json_dumps(list(runs)), most=most))


def packed(value: Any) -> str:
    """A value as compressed JSON in base64, the same bytes every time; NaN is refused.

    >>> unpacked(packed({"a": [1, None]}))
    {'a': [1, None]}
    """
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def unpacked(text: str) -> Any:
    """What `packed` was given."""
    return json.loads(gzip.decompress(base64.b64decode(text)))


@cache
def _templates() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    blocks: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True}
    return Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, **blocks)


class _Drawn:
    """The blocks of a page; specifications of plots, table and cards are gathered on the way."""

    def __init__(self, page: Page, links: Sequence[str], claims: Mapping[str, Any]) -> None:
        self.page, self.links, self.claims = page, links, claims
        self.specs: dict[str, Any] = {}
        self.more: dict[str, Any] = {}
        glossary = [p for p in page.walk() if isinstance(p, Piece) and p.kind == "glossary"]
        self.terms = {entry["title"]: f"term-{slug(entry['title'])}" for part in glossary for entry in part.items}

    def made(self, macro: str, **values: Any) -> Markup:
        """A macro of the templates, filled in."""
        context = {"legend": self.page.legend, "links": self.links, "terms": self.terms}
        module = _templates().get_template("parts.html.j2").make_module(context)
        return Markup(getattr(module, macro)(**{k: self._record(v) for k, v in values.items()}))

    def _record(self, value: Any) -> Any:
        if isinstance(value, Page):
            return vars(value) | {"notes": [self.shown(part) for part in value.notes]}
        return value

    def first(self) -> Markup:
        """What is seen first: the hero, and beside it the grid of verdicts or what was seen."""
        grid = verdict_grid(self.page.verdicts, self.claims, self.page.random)
        beside = [self.shown(part) for part in self.page.beside] if grid is None else []
        return self.made("first", hero=self.hero(self.page.hero), grid=grid, beside=beside)

    def hero(self, hero: Hero | None) -> dict[str, Any] | None:
        if hero is None:
            return None
        figure = self.shown(replace(hero.figure, id="hero"))
        return {"title": hero.title, "caption": hero.caption, "key": [*map(self.shown, hero.key)], "figure": figure}

    def sections(self, group: Sequence[Section]) -> Markup:
        """Sections that share a bar of selections; most stand alone."""
        return self.made("sections", bar=group[0].bar, sections=[self.section(section) for section in group])

    def section(self, section: Section) -> dict[str, Any]:
        """A section arranged: its first figure with its legend, how to read it, and the rest."""
        shown, reading, rest = arranged(section.parts)
        titles = [str(part.text) for part in rest if isinstance(part, Heading) and part.level == 3]
        found: dict[str, Any] = {"id": section.id, "title": section.title, "closed": not shown}
        found |= {"finding": linked(section.finding, self.terms), "more": titles}
        parts = {"shown": shown, "reading": reading, "rest": rest}
        return found | {name: [self.shown(part) for part in some] for name, some in parts.items()}

    def shown(self, part: Any) -> dict[str, Any]:
        """A part as a record for the template; plots of figures are added to the specifications."""
        if isinstance(part, Figure):
            charts = []
            for i, panel in enumerate(part.panels if part.shown else ()):
                name = f"{part.id}-{i + 1}" if part.id else f"chart-{len(self.specs) + 1}"
                self.specs[name] = panel_spec(panel)
                charts.append({**vars(panel), "id": name})
            return {"kind": "figure", "layout": part.layout, "charts": charts, "first": PANELS}
        found = {"kind": type(part).__name__.lower(), **vars(part)}
        if isinstance(part, Fold | Box):
            found["parts"] = [self.shown(inner) for inner in part.parts]
        if isinstance(part, Piece) and part.kind == "download":
            self.more["csv"] = part.items["csv"]
        if isinstance(part, Piece) and part.kind == "cards":
            self.more["concepts"] = part.items
        return found


def _groups(sections: Sequence[Section]) -> list[list[Section]]:
    """The sections, those under a common bar together."""
    groups: list[list[Section]] = []
    for section in sections:
        if section.under and groups:
            groups[-1].append(section)
        else:
            groups.append([section])
    return groups


def arranged(parts: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Parts of a section: the first figure with its legend and selections, text on how to read it, and the rest."""
    first = next((i for i, part in enumerate(parts) if isinstance(part, Figure) and part.shown and part.panels), None)
    if first is None:
        return [], [], list(parts)
    before, after = list(parts[:first]), list(parts[first + 1 :])
    reading = [part for part in before if isinstance(part, Prose | Says)]
    while after and (isinstance(after[0], Says) or (isinstance(after[0], Prose) and after[0].css == "says")):
        reading.append(after.pop(0))
    heading = max((i for i, part in enumerate(before) if isinstance(part, Heading)), default=-1)
    legends = LEGENDS if _mixed(parts[first]) else tuple(kind for kind in LEGENDS if kind is not Key)
    kept = [part for i, part in enumerate(before) if isinstance(part, legends) or i == heading]
    aside = (*kept, *reading)
    rest = [part for part in before if part not in aside and not isinstance(part, Heading | Key)]
    return [*kept, parts[first]], reading, [*rest, *after]


def _mixed(figure: Figure) -> bool:
    """Whether a panel holds lines of several models, which only a legend tells apart."""
    panels = [one for panel in figure.panels for one in (panel, *panel.views.values())]
    return any(len({line.owner for line in panel.series if line.owner is not None}) > 1 for panel in panels)


def linked(words: str, terms: Mapping[str, str]) -> Markup:
    """A sentence with the first mention of each glossary term as a link to it.

    >>> linked("average cosine rises", {"Average cosine": "term-average-cosine"})
    Markup('<a href="#term-average-cosine">average cosine</a> rises')
    """
    text = str(escape(words))
    if not terms or not text:
        return Markup(text)
    names = sorted((str(escape(term)) for term in terms), key=len, reverse=True)
    by_name = {str(escape(term)).lower(): anchor for term, anchor in terms.items()}
    seen: set[str] = set()

    def link(found: re.Match[str]) -> str:
        name = found[0].lower()
        if name in seen:
            return found[0]
        seen.add(name)
        return f'<a href="#{by_name[name]}">{found[0]}</a>'

    tags = r"<[^>]*>"  # words inside of tags are no mentions
    pattern = re.compile(rf"{tags}|\b(?:{'|'.join(map(re.escape, names))})\b", re.IGNORECASE)
    return Markup(pattern.sub(lambda found: found[0] if found[0].startswith("<") else link(found), text))
