"""The page of the performance study: verdicts, figures, tables; complete in itself, and the same figures as files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from anisoscope.results.folder import slug
from anisoscope.view.drawn import open_study, verdicts_of, write_drawings, write_page
from anisoscope.view.performance_figures import figures_of
from anisoscope.view.performance_results import GEOMETRY, READINGS, REPAIRS, Book, Mark
from anisoscope.view.records import settings
from anisoscope.view.verdicts import verdict_claims
from anisoscope.view.words import estimate, number

PERFORMANCES = {"loss": "the model’s own loss", "readout": "loss of a fresh readout", "probe": "mean probe accuracy"}


def write_performance_report(folder: str | Path) -> Path:
    """Write `report.html` and `figures/*.pdf|svg` of a finished study into its folder; the path of the page."""
    run = open_study(folder, "performance")
    books = Book.all(run.table().records())
    models = [_model(run.path / "figures", book, alone=len(books) == 1) for book in books]
    context = _context(run.about(), models, verdicts=verdicts_of(run), path=str(run.path))
    return write_page(run, "performance.html.j2", context)


def _model(folder: Path, book: Book, *, alone: bool) -> dict[str, Any]:
    """Everything about one model, its figures written on the way."""
    step = book.steps[-1]
    of = "" if alone else slug(book.model)
    drawings = write_drawings(folder, figures_of(book), book, named="performance", of=of)
    return {
        "name": book.model,
        "key": slug(book.model),
        "step": None if step is None else f"{step:,}",
        "steps": len(book.steps),
        "drawings": drawings,
        "loss": _loss_rows(book),
        "tasks": [_task(book, task) for task in book.tasks],
        "correlations": _correlations(book),
    }


def _words(mark: Mark | None) -> str:
    return "–" if mark is None or not mark.known else estimate(mark.value, mark.low, mark.high)


def _loss_rows(book: Book) -> list[dict[str, Any]]:
    """Loss by site and repair, both readings, and how many tokens it is about."""
    step = book.steps[-1]
    rows = []
    for site in book.sites:
        cells = {
            reading: [book.value("lm_loss", step, site, reading=reading, repair=repair) for repair in REPAIRS]
            for reading in READINGS
        }
        counts = [next((m.n for m in marks if m is not None), 0) for marks in cells.values()]
        told = [_words(mark) for marks in cells.values() for mark in marks]
        rows.append({"name": book.name(site), "cells": told, "n": " / ".join(f"{count:,}" for count in counts)})
    return rows


def _task(book: Book, task: str) -> dict[str, Any]:
    """Accuracy by site and repair, linear and by cosine, with chance and the shuffled control."""
    step = book.steps[-1]
    rows: list[dict[str, Any]] = []
    n = contexts = 0
    for site in book.sites:
        linear = [book.value("probe_accuracy", step, site, task=task, repair=r) for r in REPAIRS]
        near = [book.value("probe_accuracy", step, site, task=task, repair=r, probe="cosine") for r in REPAIRS]
        chance = book.value("probe_accuracy", step, site, task=task, control="majority")
        mixed = book.value("probe_accuracy", step, site, task=task, repair="raw", control="shuffled")
        if chance is not None:
            n, contexts = chance.n, chance.contexts
        cells = [_words(m) for m in (*linear, mixed, chance, *near)]
        rows.append({"name": book.name(site), "cells": cells})
    return {"name": task, "rows": rows, "n": f"{n:,}", "contexts": f"{contexts:,}"}


def _correlations(book: Book) -> list[dict[str, Any]]:
    """Rank correlations over checkpoints (mean over sites) and over layers (last checkpoint)."""
    rows = []
    for over, step, more in (("checkpoints", None, {"sites": "mean"}), ("layers", book.steps[-1], {})):
        for geometry, title in GEOMETRY.items():
            for performance, words in PERFORMANCES.items():
                where = {"geometry": geometry, "performance": performance, "over": over, "method": "spearman", **more}
                by = {
                    kind: book.value("performance_correlation", step, None, **where, interval=kind)
                    for kind in ("contexts", over)
                }
                contexts, points = by["contexts"], by[over]
                if contexts is None or points is None or not contexts.known:
                    continue
                linear = book.value(
                    "performance_correlation", step, None, **{**where, "method": "pearson"}, interval="contexts"
                )
                rows.append(
                    {
                        "over": f"{contexts.n} {over}",
                        "geometry": title,
                        "performance": words,
                        "spearman": number(contexts.value),
                        "pearson": number(linear.value) if linear is not None else "–",
                        "contexts": _interval(contexts),
                        "points": _interval(points),
                        "note": contexts.note,
                    }
                )
    return rows


def _interval(mark: Mark) -> str:
    return f"{number(mark.low, 2)} to {number(mark.high, 2)}" if mark.low == mark.low else "–"


def _context(
    about: Mapping[str, Any], models: Sequence[Mapping[str, Any]], *, verdicts: list[dict[str, Any]], path: str
) -> dict[str, Any]:
    return {
        "version": about.get("anisoscope", ""),
        "started": str(about.get("started", ""))[:10],
        "config": about["config"],
        "data": about.get("data") or {},
        "models": models,
        "names": [str(model["name"]) for model in models],
        "claims": verdict_claims(verdicts),
        "subjects": len(models),
        "repairs": list(REPAIRS.values()),
        "readings": list(READINGS.values()),
        "warnings": list(about.get("warnings") or []),
        "settings": settings(about, path),
    }
