"""Parts that pages of studies share: values with intervals, figures with captions, verdicts, record and glossary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from markupsafe import Markup

from anisoscope.results.manifest import is_grave
from anisoscope.results.modality import TEXT_DATA
from anisoscope.view.figure import Figure, Panel
from anisoscope.view.headline import headline
from anisoscope.view.page import Heading, Hero, Page, Prose, Section, Swatch, Swatches, TableCell, text
from anisoscope.view.sections.findings import leading, measured
from anisoscope.view.sections.provenance import grave_box, record_section, terms_section
from anisoscope.view.subjects import RunView
from anisoscope.view.words import estimate

RECORD = (
    "What is needed to run it again. All numbers are in <code>table.parquet</code>, the verdicts in "
    "<code>verdicts.json</code>."
)


def words_of(mark: Any) -> str:
    """A `Mark` or a row of the table as text; – for None."""
    return "–" if mark is None else estimate(mark.value, mark.low, mark.high)


def prose(words: str, **values: Any) -> Prose:
    """A paragraph from a markup template, with `values` filled in."""
    return Prose(text(words, **values))


def numeric(*words: str, **look: Any) -> list[TableCell]:
    """Right-aligned table cells, for numbers or their headings."""
    return [TableCell(word, css="num", **look) for word in words]


def files(stem: str, panels: Sequence[Panel], **look: Any) -> Figure:
    """A figure of panels side by side that is also written as a vector file `stem`."""
    return Figure(tuple(panels), files={stem: {}}, **look)


def shown(figure: Figure, caption: str, *, title: str = "", key: Sequence[Swatch] = ()) -> list[Any]:
    """A figure under its title and legend, with a caption of markup below it."""
    above: list[Any] = [Heading(title)] if title else []
    return [*above, *([Swatches(key)] if key else []), figure, Prose(Markup(caption), css="says")]


def found(section: Section, verdicts: Sequence[Mapping[str, Any]], *claims: str) -> Section:
    """A section with what was found there: the sentence of the first verdict on one of these claims."""
    why = next((str(v.get("why") or "") for v in leading(measured(verdicts)) if v.get("claim") in claims), "")
    return replace(section, finding=f"{why.partition('; ')[0].rstrip('.')}." if why else "")


def judged_section(note: str, *more: Any) -> Section:
    """What a study says on how its claims are judged (markup), and what belongs to it."""
    return Section("judged", "How it was judged", [prose(note), *more], "Judged")


def hero(panels: Sequence[Panel], title: str, caption: str, *, key: Sequence[Swatch] = (), height: int = 300) -> Hero:
    """The first figure of a page: at most three panels."""
    shown = tuple(replace(panel, height=height, caption="", formula="") for panel in panels[:3])
    figure = Figure(shown, layout="single" if len(shown) == 1 else "pairs", files={"hero": {}})
    return Hero(figure, title, [Swatches(key)] if key else [], caption)


def data_name(run: RunView) -> str:
    """The name of the text that a run read; empty if run.json has none."""
    name = str((run.about.get("data") or {}).get("name") or "")
    return TEXT_DATA.shipped if name == "embedded" else name


def page_of(
    run: RunView,
    title: str,
    deck: str,
    sections: Sequence[Section],
    *,
    terms: str,
    hero: Hero | None = None,
    heading: str = "",
    record: str = RECORD,
) -> Page:
    """A page of some sections, followed by warnings, the record of the run and the glossary.

    The finding of its verdicts is its title, `heading` where there is none.
    """
    started, about = str(run.about.get("started", ""))[:10], run.about
    warned = [Prose(str(words)) for words in about.get("warnings") or [] if not is_grave(str(words))]
    recorded = Section("record", "Record", [*warned, *record_section([run], text(record)).parts], "Record")
    deck = f"{deck}{', ' + started if started else ''}."
    return Page(
        title,
        headline(run.verdicts, str(about.get("study") or "")) or heading or title,
        [*sections, recorded, terms_section(_terms(terms))],
        deck=deck,
        hero=hero,
        verdicts=run.verdicts,
        notes=grave_box([about]),
        version=str(about.get("anisoscope", "")),
    )


def _terms(words: str) -> list[tuple[str, list[str], str, list[Markup]]]:
    """Parse the glossary: entries separated by empty lines, `title | names | formula` and then lines of markup."""
    terms = []
    for entry in words.strip().split("\n\n"):
        first, *rest = entry.split("\n")
        title, names, formula = (part.strip() for part in first.split("|"))
        terms.append((title, names.split(), formula, [Markup(" ".join(rest))] if rest else []))
    return terms
