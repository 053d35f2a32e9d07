"""Shared by the pages of studies: values with intervals, prose, tables, verdicts, the record and the glossary."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from anisoscope.results import quantity
from anisoscope.results.quantity import Bounds
from anisoscope.view.figure import Figure, Panel
from anisoscope.view.page import Page, Prose, Section, TableCell, Verdicts, text
from anisoscope.view.sections.findings import common_scope
from anisoscope.view.sections.provenance import record_section, terms_section
from anisoscope.view.subjects import RunView
from anisoscope.view.words import estimate

RECORD = (
    "What is needed to run it again. All numbers are in <code>table.parquet</code>, the verdicts in "
    "<code>verdicts.json</code>."
)


class Mark(NamedTuple):
    """A value with its interval (NaN without one), and the numbers of rows and contexts behind it."""

    value: float
    low: float = math.nan
    high: float = math.nan
    n: int = 0
    contexts: int = 0

    @property
    def words(self) -> str:
        return estimate(self.value, self.low, self.high)


def words_of(mark: Mark | None) -> str:
    return "–" if mark is None else mark.words


def over_seeds(values: Sequence[float], *, bounds: Bounds = (None, None), widen: float = 1.0) -> Mark | None:
    """`results.quantity.over_seeds` as a mark of a page."""
    mean = quantity.over_seeds(values, bounds=bounds, widen=widen)
    return None if mean is None else Mark(*mean)


def prose(words: str, **values: Any) -> Prose:
    """A paragraph from a markup template, with `values` filled in."""
    return Prose(text(words, **values))


def caption(words: str, **values: Any) -> Prose:
    """The caption below a figure, from a markup template."""
    return Prose(text(words, **values), css="says")


def numeric(*words: str, **look: Any) -> list[TableCell]:
    """Right-aligned table cells, for numbers or their headings."""
    return [TableCell(word, css="num", **look) for word in words]


def files(stem: str, panels: Sequence[Panel], **look: Any) -> Figure:
    """A figure of panels side by side that is also written as a vector file `stem`."""
    return Figure(tuple(panels), files={stem: {}}, **look)


def verdict_section(
    lead: Prose, claims: Sequence[Mapping[str, Any]], subjects: str, *more: Any, **look: Any
) -> Section:
    """The first section: how claims are judged, and the verdicts."""
    table = Verdicts(claims, subjects, **{"scope": common_scope(claims), "parts": False, **look})
    return Section("summary", "Verdicts", [lead, table, *more], "Verdicts")


def page_of(
    run: RunView,
    title: str,
    deck: str,
    sections: Sequence[Section],
    *,
    terms: str,
    heading: str = "",
    record: str = RECORD,
) -> Page:
    """A page of some sections, followed by warnings, the record of the run and the glossary."""
    started, about = str(run.about.get("started", ""))[:10], run.about
    warned = [Prose(str(warning)) for warning in about.get("warnings") or []]
    recorded = Section("record", "Record", [*warned, *record_section([run], text(record)).parts], "Record")
    deck = f"{deck}{', ' + started if started else ''}."
    whole = [*sections, recorded, terms_section(_terms(terms))]
    return Page(title, heading or title, whole, deck=deck, version=str(about.get("anisoscope", "")))


def _terms(words: str) -> list[tuple[str, list[str], str, list[Markup]]]:
    """Parse the glossary: entries separated by empty lines, `title | names | formula` and then lines of markup."""
    terms = []
    for entry in words.strip().split("\n\n"):
        first, *rest = entry.split("\n")
        title, names, formula = (part.strip() for part in first.split("|"))
        terms.append((title, names.split(), formula, [Markup(" ".join(rest))] if rest else []))
    return terms
