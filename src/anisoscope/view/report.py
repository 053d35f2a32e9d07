"""The report: one HTML file that opens offline, and vector figures beside it."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anisoscope.results.folder import replace_file
from anisoscope.results.query import Query, Table
from anisoscope.view.document import page_document
from anisoscope.view.figure import Axis, Depth, Figure, Grid, Level, Panel, Series, brief, value_axis
from anisoscope.view.matplotlib_renderer import write_figures
from anisoscope.view.page import (
    DataTable,
    Fold,
    Hero,
    Key,
    LegendEntry,
    Page,
    PageFinding,
    Piece,
    Prose,
    Section,
    Swatch,
    Swatches,
    TableCell,
)
from anisoscope.view.sections import profiles, provenance
from anisoscope.view.sections.attention import attention_sections
from anisoscope.view.sections.drift import Comparison, drift_section, modality_findings, modality_section
from anisoscope.view.sections.findings import find, mean_over_blocks, profile_headline
from anisoscope.view.sections.training_page import training_page
from anisoscope.view.subjects import STREAM, ProfileRows, RunView
from anisoscope.view.words import OF_TRAINING, Catalogue, Entry, number, plural, sentences, site_name, site_phrase

PAGE = "report.html"


def write_page(
    folder: Path, page: Page, *, name: str = PAGE, figures: bool = True, claims: Mapping[str, Any] | None = None
) -> Path:
    """Write a page, and its figures as vector files; returns the path of the page. `claims`: their declarations.

    A page with another file name has its own folder of figures, so that two pages can share a folder.
    """
    path = Path(folder) / name
    beside = path.with_name("figures" if name == PAGE else f"{path.stem}-figures")

    text: list[str] = []

    def compose(files: Sequence[Path]) -> None:
        links = sorted({f"{beside.name}/{file.name.rsplit('.', 1)[0]}" for file in files})
        text.append(page_document(page, claims=claims, links=links))

    if figures:
        write_figures(beside, page.figures(), page.chosen(), meanwhile=compose)
    else:
        compose([])
    replace_file(path, lambda draft: draft.write_text(text[0], encoding="utf-8"))
    return path


def report_page(runs: Sequence[RunView], catalogue: Catalogue, comparison: Comparison) -> Page:
    """The page of some runs: profiles of models, or a training page for series over steps."""
    if any(is_training(run.table) for run in runs):
        names = Query(*(run.table for run in runs)).values("model")
        return training_page(runs, catalogue, comparison, provenance.masthead(names, [run.about for run in runs]))
    rows = ProfileRows(runs)
    names = list(dict.fromkeys(subject.model for subject in rows.subjects))
    head = provenance.masthead(names, rows.abouts)
    findings = [*modality_findings(comparison), *find(rows, catalogue)]
    sections = [
        profiles.profiles_section(rows, catalogue),
        modality_section(comparison),
        drift_section(comparison),
        profiles.spectra_section(runs, rows),
        profiles.heat_section(rows, catalogue, compared=len(runs) > 1),
        profiles.heads_section(rows, catalogue),
        *attention_sections(runs, catalogue),
        profiles.cka_section(runs, rows),
        profiles.groups_section(rows, catalogue),
        Section("models", "Models", _models(rows, catalogue), "Models"),
        provenance.table_section(rows.query),
        provenance.dropped_section(rows, catalogue),
        provenance.record_section(runs),
        provenance.glossary_section(catalogue, rows.metrics()),
    ]
    every = [LegendEntry(s.index, s.label, s.index % 8 + 1, s.role, s.marker) for s in rows.subjects]
    return Page(
        f"The geometry of {head['title']}, layer by layer",
        profile_headline(rows, catalogue) or f"The geometry of {head['title']}, layer by layer",
        [section for section in sections if section is not None],
        deck=provenance.rests_on(head, rows.abouts),
        hero=_profile_hero(rows, catalogue),
        beside=_beside(findings, len(rows.subjects)),
        notes=provenance.grave_box(rows.abouts),
        version=head["version"],
        legend=every if len(every) > 1 else [],
    )


def _beside(findings: Sequence[PageFinding], count: int) -> list[Any]:
    """What was seen, beside the hero; of several models what is said of each is behind a fold."""
    each = [one for one in findings if one.topic in ("Direction", "Spread", "Dimension", "Attention")]
    rest = [one for one in findings if one not in each]
    if count < 2 or not rest:
        return [Piece("findings", findings)] if findings else []
    return [Piece("findings", rest), *([Fold("Each model", [Piece("findings", each)], css="behind")] if each else [])]


def _profile_hero(rows: ProfileRows, catalogue: Catalogue) -> Hero | None:
    """The metric that says most over depth: average cosine where it was measured, else the first of the profiles."""
    shown = [p for p in profiles.main_profiles(rows, catalogue) if p.values and not p.variant]
    if not shown:
        return None
    first = shown[0]
    panel = replace(profiles.profile_panel(first), title="", caption="", formula="", height=330)
    figure = Figure((panel,), layout="single", files={"hero": {}}, size=2.25)
    caption = sentences(first.entry.description, "Bands: 95 % intervals over contexts")
    return Hero(figure, f"{first.entry.title} over depth", [Key()], caption)


def is_training(table: Table) -> bool:
    """Whether a table has steps or gradient metrics and therefore gets the training page.

    >>> is_training(Table.from_records([{"metric": "two_nn"}])), is_training(Table.from_records([{"step": 0}]))
    (False, True)
    """
    return bool(len(Query(table).where(step=...))) or not set(OF_TRAINING).isdisjoint(table.metrics)


def _models(rows: ProfileRows, catalogue: Catalogue) -> list[Any]:
    """Facts about the models and, for several, their means over blocks."""
    facts = provenance.model_facts(rows.abouts, [{"Model": s.label, "Blocks": str(s.blocks)} for s in rows.subjects])
    metrics = catalogue.main(rows.default_metrics())
    body = []
    for subject in rows.subjects if len(rows.subjects) > 1 else ():
        for without, label in ((False, subject.label), (True, f"{subject.label}, without first position")):
            means = [mean_over_blocks(rows, catalogue, subject, metric, without=without) for metric in metrics]
            if any(means):
                body.append([TableCell(label, head=True), *(mean.text if mean else "" for mean in means)])
    heads = ["Mean over blocks", *(catalogue.entry(metric).title for metric in metrics)]
    table = [DataTable([heads], [body], "Means over blocks")] if body else []
    return [*provenance.facts_parts(facts), *table]


# -- two models compared -----------------------------------------------------------------------------------------------

DIFFERENCES: tuple[str, ...] = ("stack", "layer", "kind", "head", "group", "metric", "variant", "other_layer")
DIFFERENCES += ("first", "second", "difference", "low", "high", "differs")


def comparison_page(found: Any, catalogue: Catalogue) -> Page:
    """The page of two models compared (`measurement.compare`): where they differ, by how much, and their CKA."""
    rows = [row for row in found.rows if row["head"] is None and not row["group"] and not row["variant"]]
    stream = [row for row in rows if row["kind"] in (*STREAM, "stage")] or rows
    lines: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in sorted(stream, key=lambda row: (row["layer"], row["kind"] == "final")):
        lines.setdefault((row["metric"], row["stack"]), []).append(row)
    order = {metric: i for i, metric in enumerate(catalogue.ordered({metric for metric, _ in lines}))}
    keys = sorted(lines, key=lambda key: (order[key[0]], key[1]))
    told = {key: _ComparedLine(found, catalogue.entry(key[0]), lines[key], key[1]) for key in keys}
    first = max(told.values(), key=lambda line: len(line.differing) / len(line.rows)) if told else None
    notes = [Prose(words) for words in found.notes]
    table = {"csv": _csv(found.rows), "gone": [], "cut": False, "rows": len(found.rows), "total": len(found.rows)}
    sections = [
        Section("differences", "Differences over depth", [Prose(COMPARED_LEAD), Figure(_panels(told))], "Differences"),
        _cka_section(found),
        Section("table", "Table", [Piece("download", table | {"heads": 0})], "Table"),
        Section("notes", "Notes", notes, "Notes") if notes else None,
        provenance.glossary_section(catalogue, {row["metric"] for row in found.rows}),
    ]
    body = [[TableCell(line.title, head=True), *line.counts] for line in told.values()]
    heads = ["Metric", f"{found.second} higher at", "lower at", "not told apart at"]
    paired = "on the same contexts, differences paired" if found.paired else "on different contexts"
    return Page(
        f"{found.second} compared with {found.first}",
        first.sentence if first else f"{found.first} and {found.second} share no metric along their layers.",
        [section for section in sections if section is not None],
        deck=f"Differences {found.second} − {found.first} with 95 % intervals, {paired}.",
        hero=first.hero if first else None,
        beside=[DataTable([heads], [body], "Layers that differ, by metric")],
    )


COMPARED_LEAD = (
    "Second minus first at each layer of the first, with its 95 % interval over contexts: above 0 the second is "
    "higher. Models of different depth are matched at the nearest relative depth."
)


@dataclass(frozen=True)
class _ComparedLine:
    """One metric of two models over depth."""

    found: Any
    entry: Entry
    rows: Sequence[Mapping[str, Any]]
    stack: str

    @property
    def title(self) -> str:
        return self.entry.title + ("" if self.stack in ("", "single") else f" · {self.stack}")

    @property
    def differing(self) -> list[Mapping[str, Any]]:
        return [row for row in self.rows if row["differs"]]

    @property
    def counts(self) -> list[str]:
        higher = sum(row["difference"] > 0 for row in self.differing)
        numbers = (higher, len(self.differing) - higher, len(self.rows) - len(self.differing))
        return [plural(count, "layer") if count else "–" for count in numbers]

    @property
    def sentence(self) -> str:
        """What differs, in one sentence."""
        differing, one, two = self.differing, self.found.second, self.found.first
        if not differing:
            return f"No difference between {one} and {two} can be told at any layer, in any metric."
        largest = max(differing, key=lambda row: abs(row["difference"]))
        way = "higher" if largest["difference"] > 0 else "lower"
        same = [row for row in differing if (row["difference"] > 0) == (largest["difference"] > 0)]
        values = f"{number(largest['second'], 2)} against {number(largest['first'], 2)}"
        where = site_phrase(largest["layer"], largest["kind"])
        name = self.title[:1].lower() + self.title[1:] if self.title[1:2].islower() else self.title
        return f"In {one} {name} is {way} than in {two} at {len(same)} of {len(self.rows)} layers: {values} {where}."

    def _places(self) -> tuple[Depth, list[float], list[str]]:
        blocks = max(row["layer"] for row in self.rows)
        depth = Depth(blocks, final=any(row["kind"] == "final" for row in self.rows))
        x = [depth.place(row["layer"], row["kind"]) for row in self.rows]
        return depth, x, [site_name(row["layer"], row["kind"]) for row in self.rows]

    @property
    def panel(self) -> Panel:
        depth, x, where = self._places()
        numbers = {name: [brief(row[name]) for row in self.rows] for name in ("difference", "low", "high")}
        ends: dict[str, Any] = {"low": numbers["low"], "high": numbers["high"], "bars": "y"}
        drawn = Series("difference", x, numbers["difference"], size=5.0, where=where, **ends)
        y = Axis("difference", rules=True)
        alt = f"Difference of {self.title} by depth: {len(self.differing)} of {len(self.rows)} layers differ."
        words: dict[str, Any] = {"title": self.title, "alt": alt, "formula": self.entry.formula}
        return Panel(depth.axis(), y, (drawn,), levels=(Level(0.0, "no difference", colour="@ink"),), **words)

    @property
    def hero(self) -> Hero:
        depth, x, where = self._places()
        sides = [(self.found.first, "first", "@s1"), (self.found.second, "second", "@s2")]
        drawn = [
            Series(name, x, [brief(row[side]) for row in self.rows], colour, size=5.0, where=where)
            for name, side, colour in sides
        ]
        alt = f"{self.title} of {self.found.first} and {self.found.second} by depth. {self.sentence}"
        values = value_axis([v for one in drawn for v in one.y], log=True)
        both = Panel(depth.axis(), values, tuple(drawn), title=self.title, alt=alt, height=300)
        gap = replace(self.panel, title="Difference", formula="", height=300)
        key = Swatches([Swatch(name, colour) for name, _, colour in sides])
        figure = Figure((both, gap), layout="pairs", files={"hero": {}})
        return Hero(figure, f"{self.title} over depth", [key], "Whiskers: 95 % intervals of the difference.")


def _panels(told: Mapping[Any, _ComparedLine]) -> tuple[Panel, ...]:
    return tuple(line.panel for line in told.values())


def _cka_section(found: Any) -> Section | None:
    """A map of the CKA between all layers of both models; None where none could be computed."""
    names, others, matrix = found.cka
    z = [[brief(value, 3) for value in row] for row in matrix.tolist()]
    known = [value for row in z for value in row if value is not None]
    if not known:
        return None
    alt = (
        f"Linear CKA between {len(names)} and {len(others)} layers, from {number(min(known))} to {number(max(known))}."
    )
    grid = Grid(z, others, names, ends=(0.0, 1.0), label="CKA")
    axes = Axis(found.second), Axis(found.first, reverse=True)
    figure = Figure((Panel(*axes, grid=grid, alt=alt, height=420),), layout="single", files={"cka": {}})
    best = max(known)
    words = f"The layers that are most alike have a CKA of {number(best, 2)}: 1 is the same geometry up to rotation."
    lead = "Linear CKA, debiased, between sampled rows that both models have."
    return Section("cka", "Which layers are alike", [Prose(lead), figure], "CKA", finding=words)


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, DIFFERENCES, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: "" if row[name] is None else row[name] for name in DIFFERENCES} for row in rows)
    return out.getvalue()
