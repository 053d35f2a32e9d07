"""What single commands show beside verdicts: the short tables of studies, and what was removed from enwik8."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.table import Table as RichTable

from anisoscope.results.folder import RunFolder
from anisoscope.view.performance_results import READINGS, REPAIRS, Book
from anisoscope.view.sharpness import loss_sentence
from anisoscope.view.sharpness_results import Results
from anisoscope.view.untrained_curves import Curves
from anisoscope.view.words import estimate, number

_UNTRAINED_COLUMNS = {
    "cosine in": ("embed", "average_cosine"),
    "cosine out": ("resid", "average_cosine"),
    "norm out": ("resid", "mean_norm"),
    "mean |score|": ("scores", "score_magnitude"),
    "spread": ("scores", "score_spread"),
    "entropy": ("scores", "attention_entropy"),
    "max p": ("scores", "attention_max"),
}


def study_summary(folder: RunFolder, study: str) -> Iterator[RichTable | str]:
    """Tables and sentences that a study shows before its verdicts; most show none."""
    if study in _SUMMARIES:
        yield from _SUMMARIES[study](folder)


def _sharpness(folder: RunFolder) -> Iterator[str]:
    """What each kind of attention costs in loss."""
    for results in Results.all(folder.table().records()):
        if results.steps and (words := loss_sentence(results)):
            yield words


def _performance(folder: RunFolder) -> Iterator[RichTable]:
    """Loss and mean accuracy by site and repair, at the last checkpoint of each model."""
    for book in Book.all(folder.table().records()):
        step = book.steps[-1]
        when = "" if step is None else f" at step {step:,}"
        columns = (*(f"loss, {name}" for name in READINGS), "linear probes", "nearest class mean")
        table = new_table(f"{book.model}{when}, test contexts", ("site", "repair"), columns)
        for site in book.sites:
            for i, repair in enumerate(REPAIRS):
                loss = [book.value("lm_loss", step, site, reading=reading, repair=repair) for reading in READINGS]
                marks = [*loss, book.accuracy(step, site, repair), book.accuracy(step, site, repair, probe="cosine")]
                words = [estimate(m.value, m.low, m.high) if m is not None else "–" for m in marks]
                table.add_row(book.name(site) if not i else "", repair, *words)
        yield table


def _untrained(folder: RunFolder) -> Iterator[RichTable]:
    """The main curves of the leading arms, a line for each bias; means over seeds."""
    curves = Curves.of(folder.table().records(), folder.about())
    for arm in curves.leading_arms():
        table = new_table(f"{arm.family}, {arm}", (), ("bias", *_UNTRAINED_COLUMNS))
        for bias in curves.biases:
            points = [curves.at(arm, bias, *place) for place in _UNTRAINED_COLUMNS.values()]
            table.add_row(f"{bias:g}", *(number(p.value) if p is not None else "–" for p in points))
        yield table


_SUMMARIES: dict[str, Callable[[RunFolder], Iterator[RichTable | str]]] = {
    "sharpness": _sharpness,
    "performance": _performance,
    "untrained": _untrained,
}


def new_table(title: str, words: tuple[str, ...], numbers: tuple[str, ...]) -> RichTable:
    """A table with columns of words, then columns of numbers."""
    table = RichTable(title=title, title_justify="left", header_style="bold")
    for name in words:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


# -- enwik8 ------------------------------------------------------------------------------------------------------------

_REMOVED = {
    "comments": "comments",
    "references": "references",
    "formulas": "formulas",
    "code": "code",
    "preformatted": "preformatted lines",
    "templates": "templates",
    "tables": "tables",
    "media": "images and media",
    "categories": "categories",
    "interlanguage": "links to other languages",
    "links": "brackets and targets of links (the label stays)",
    "external_links": "addresses of links (the label stays)",
    "addresses": "bare addresses",
    "tags": "HTML tags",
    "entities": "entities (decoded)",
    "emphasis": "marks of emphasis",
    "lists": "marks of lists, rules",
    "headings": "marks of headings",
    "symbols": "invisible characters, and those outside of the 205",
    "spaces": "white space, empty headings and brackets",
}


def removed_table(cleaning: Mapping[str, Any]) -> RichTable:
    """What was removed from the articles of enwik8, the most first."""
    table = new_table("removed from the articles", ("what",), ("how many", "characters", "share"))
    total = max(1, cleaning["characters_in"])
    for kind, figures in sorted(cleaning["removed"].items(), key=lambda item: -item[1]["characters"]):
        count = "" if figures["count"] is None else f"{figures['count']:,}"
        size = figures["characters"]
        table.add_row(_REMOVED.get(kind, kind), count, f"{size:,}", f"{size / total:.2%}")
    return table
