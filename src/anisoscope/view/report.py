"""The report: one HTML file that opens offline, and vector figures beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from anisoscope.results.folder import replace_file
from anisoscope.results.query import Query, Table
from anisoscope.view.document import page_document
from anisoscope.view.figure import Figure
from anisoscope.view.matplotlib_renderer import write_figures
from anisoscope.view.page import DataTable, Hero, Key, LegendEntry, Page, Piece, Section, TableCell
from anisoscope.view.sections import profiles, provenance
from anisoscope.view.sections.attention import attention_sections
from anisoscope.view.sections.drift import Comparison, drift_section, modality_findings, modality_section
from anisoscope.view.sections.findings import find, mean_over_blocks, profile_headline
from anisoscope.view.sections.training_page import training_page
from anisoscope.view.subjects import ProfileRows, RunView
from anisoscope.view.words import OF_TRAINING, Catalogue, sentences

PAGE = "report.html"


def write_page(
    folder: Path, page: Page, *, name: str = PAGE, figures: bool = True, claims: Mapping[str, Any] | None = None
) -> Path:
    """Write a page, and its figures as vector files; returns the path of the page. `claims`: their declarations.

    A page with another file name has its own folder of figures, so that two pages can share a folder.
    """
    path = Path(folder) / name
    beside = path.with_name("figures" if name == PAGE else f"{path.stem}-figures")
    written = write_figures(beside, page.figures(), page.chosen()) if figures else []
    links = sorted({f"{beside.name}/{file.name.rsplit('.', 1)[0]}" for file in written})
    text = page_document(page, claims=claims, links=links)
    replace_file(path, lambda draft: draft.write_text(text, encoding="utf-8"))
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
        beside=[Piece("findings", findings)] if findings else [],
        notes=provenance.grave_box(rows.abouts),
        version=head["version"],
        legend=every if len(every) > 1 else [],
    )


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
    return bool(len(Query(table).where(step=...))) or not set(OF_TRAINING).isdisjoint(table.metrics())


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
