"""The report: one HTML file that opens offline, and vector figures beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from anisoscope.results.folder import replace_file
from anisoscope.results.query import Query, Table
from anisoscope.view.matplotlib_renderer import write_figures
from anisoscope.view.page import DataTable, LegendEntry, Page, Piece, Section, TableCell, render
from anisoscope.view.sections import profiles, provenance
from anisoscope.view.sections.attention import attention_sections
from anisoscope.view.sections.drift import Comparison, drift_section, modality_findings, modality_section
from anisoscope.view.sections.findings import find, mean_over_blocks
from anisoscope.view.sections.training_page import training_page
from anisoscope.view.subjects import ProfileRows, RunView
from anisoscope.view.words import OF_TRAINING, Catalogue

PAGE = "report.html"


def write_page(folder: Path, page: Page, *, name: str = PAGE, figures: bool = True) -> Path:
    """Write a page, and its figures as vector files; returns the path of the page.

    A page with another file name has its own folder of figures, so that two pages can share a folder.
    """
    path = Path(folder) / name
    beside = path.with_name("figures" if name == PAGE else f"{path.stem}-figures")
    written = write_figures(beside, page.figures(), page.chosen()) if figures else []
    links = sorted({f"{beside.name}/{file.name.rsplit('.', 1)[0]}" for file in written})
    replace_file(path, lambda draft: draft.write_text(render(page, links), encoding="utf-8"))
    return path


def report_page(runs: Sequence[RunView], catalogue: Catalogue, comparison: Comparison) -> Page:
    """The page of some runs: profiles of models, or a training page for series over steps."""
    if any(is_training(run.table) for run in runs):
        names = Query(*(run.table for run in runs)).values("model")
        return training_page(runs, catalogue, comparison, provenance.masthead(names, [run.about for run in runs]))
    rows = ProfileRows(runs)
    head = provenance.masthead(list(dict.fromkeys(s.model for s in rows.subjects)), rows.abouts)
    sections = [
        Section("summary", "Summary", _summary(rows, catalogue, comparison, head), "Summary"),
        profiles.profiles_section(rows, catalogue),
        modality_section(comparison),
        drift_section(comparison),
        profiles.spectra_section(runs, rows),
        profiles.heat_section(rows, catalogue, compared=len(runs) > 1),
        profiles.heads_section(rows, catalogue),
        *attention_sections(runs, catalogue),
        profiles.cka_section(runs, rows),
        profiles.groups_section(rows, catalogue),
        provenance.table_section(rows.query),
        provenance.dropped_section(rows, catalogue),
        provenance.record_section(runs),
        provenance.glossary_section(catalogue, rows.metrics()),
    ]
    deck = ", ".join(part for part in (f"Measured on {head['data']}" if head["data"] else "", head["started"]) if part)
    every = [LegendEntry(s.index, s.label, s.index % 8 + 1, s.role, s.marker) for s in rows.subjects]
    look = {"deck": f"{deck}." if deck else "", "version": head["version"], "legend": every if len(every) > 1 else []}
    shown = [section for section in sections if section is not None]
    return Page(head["title"], provenance.heading(head, "layer by layer"), shown, **look)


def is_training(table: Table) -> bool:
    """Whether a table has steps or gradient metrics and therefore gets the training page.

    >>> is_training(Table.from_records([{"metric": "two_nn"}])), is_training(Table.from_records([{"step": 0}]))
    (False, True)
    """
    return bool(len(Query(table).where(step=...))) or not set(OF_TRAINING).isdisjoint(table.metrics)


def _summary(rows: ProfileRows, catalogue: Catalogue, comparison: Comparison, head: Mapping[str, Any]) -> list[Any]:
    """The summary: findings, warnings, facts about the models and, for several models, their means over blocks."""
    findings = [*modality_findings(comparison), *find(rows, catalogue)]
    facts = provenance.model_facts(rows.abouts, [{"Model": s.label, "Blocks": str(s.blocks)} for s in rows.subjects])
    metrics = catalogue.main(rows.default_metrics())
    body = []
    for subject in rows.subjects if len(rows.subjects) > 1 else ():
        for without, label in ((False, subject.label), (True, f"{subject.label}, without first position")):
            means = [mean_over_blocks(rows, catalogue, subject, metric, without=without) for metric in metrics]
            if any(means):
                body.append([TableCell(label, head=True), *(mean.text if mean else "" for mean in means)])
    heads = ["Mean over blocks", *(catalogue.entry(metric).title for metric in metrics)]
    parts = [*provenance.grave_box(rows.abouts), *provenance.partial_banner(head)]
    parts += [*([Piece("findings", findings)] if findings else [])]
    parts += [*provenance.warnings_box(rows.abouts), *provenance.facts_parts(facts)]
    return [*parts, *([DataTable([heads], [body], "Means over blocks")] if body else [])]
