"""Verdicts and page of a result made again, and one result from several runs."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

import anisoscope
from anisoscope.claims.catalogue import claims, evaluate_claims
from anisoscope.claims.engine.claim import verdicts_to_dicts
from anisoscope.commands.drawing import open_runs, page_of_runs
from anisoscope.results.folder import RunFolder
from anisoscope.results.privacy import without_places
from anisoscope.results.query import Table
from anisoscope.view.report import write_page
from result_pages.result import Result, Verdict, judged, performance_judged, verdict_text

PLACE = ("model", "seed", "step", "stack", "layer", "kind", "head", "group", "metric", "variant")
KEPT = ".pdf"  # the format of figures that is kept: the one that pages link to, and the smaller


def judge_again(result: Result) -> bool:
    """Write verdicts.json and the page again if the rules of now say other than what is there; whether they do."""
    if not result.verdicts:
        return False
    now = judged(result, robust=is_robust(result))
    if [_said(verdict) for verdict in now] == [_said(verdict) for verdict in result.verdicts]:
        return False
    write_verdicts(result.folder, now)
    if "page" in (thinned := result.about.get("thinned") or {}):
        left = {key: words for key, words in thinned.items() if key != "page"}
        RunFolder(result.folder).write_about(result.about | {"thinned": left})
    for name in ("verdicts", "about"):
        result.__dict__.pop(name, None)
    redraw(result.folder)
    return True


def _said(verdict: Verdict) -> tuple[Any, ...]:
    """What a verdict says; the last digits of its numbers are those of a machine."""
    return tuple(verdict[name] for name in ("claim", "subject", "scope", "status", "why"))


def write_verdicts(folder: Path, verdicts: list[dict[str, Any]]) -> None:
    (folder / "verdicts.json").write_text(verdict_text(verdicts), encoding="utf-8")


def is_robust(result: Result) -> bool:
    """Whether the verdicts were tried under other choices, too."""
    return any("robust" in (verdict.get("details") or {}) for verdict in result.verdicts)


def redraw(folder: Path, *, figures: bool = True) -> None:
    """Write report.html and its figures again, in one format; without figures where there were to be none."""
    figures = figures and "figures" not in (RunFolder.open(folder).about().get("thinned") or {})
    shutil.rmtree(folder / "figures", ignore_errors=True)
    for path in folder.glob("*.*"):
        path.touch()  # the page of a run that was stopped says how long ago it wrote
    write_page(folder, page_of_runs([RunFolder.open(folder)]), figures=figures, claims=claims())
    for path in (folder / "figures").glob("*"):
        if path.suffix != KEPT:
            path.unlink()


def join(out: Path, runs: Sequence[Path]) -> None:
    """Write one folder from several runs: their tables under each other, their records, verdicts and a page."""
    folders = open_runs(runs)
    abouts = [without_places(folder.about(), share=True) for folder in folders]
    models = {str(model.get("name")): model for about in reversed(abouts) for model in about.get("models") or []}
    record = _record(abouts, list(reversed(models.values())))
    table = Table(without_repeats(Table.concat([folder.table() for folder in folders]).arrow), record)
    target = RunFolder(out)
    out.mkdir(parents=True)
    target.write_table(table)
    target.write_about(record)
    same = record.get("study") == "performance"
    write_verdicts(out, performance_judged(table) if same else verdicts_to_dicts(evaluate_claims(table)))
    redraw(out)


def without_repeats(arrow: pa.Table) -> pa.Table:
    """The first row of each place, metric and variant: a model may be profiled and its gradients studied apart."""
    seen: set[tuple[Any, ...]] = set()
    kept = []
    for at, key in enumerate(zip(*(arrow[name].to_pylist() for name in PLACE), strict=True)):
        if key not in seen:
            seen.add(key)
            kept.append(at)
    return arrow.take(pa.array(kept))


def _record(abouts: Sequence[dict[str, Any]], models: list[Any]) -> dict[str, Any]:
    """The record of a joined folder: what the runs share is that of the first."""
    first = abouts[0]
    shared = {key: first.get(key) for key in ("schema", "versions", "device", "started") if key in first}
    devices = sorted({str(about.get("device")) for about in abouts if about.get("device")})
    done = all(about.get("status") == "complete" for about in abouts)
    studies = {about.get("study") for about in abouts}
    shared |= {"study": studies.pop()} if len(studies) == 1 and None not in studies else {}
    configs = [about.get("config") or {} for about in abouts]
    alike = {key: value for key, value in configs[0].items() if all(value == each.get(key) for each in configs)}
    return shared | {
        "anisoscope": first.get("anisoscope", anisoscope.__version__),
        "kind": first.get("kind"),
        "commands": [about.get("command") for about in abouts],
        "config": alike,
        "models": [_slim(model) for model in models],
        "device": ", ".join(devices),
        "wall_seconds": sum(float(about.get("wall_seconds") or 0) for about in abouts),
        "status": "complete" if done else "interrupted",
        "warnings": [words for about in abouts for words in about.get("warnings") or []],
        "skipped": [item for about in abouts for item in about.get("skipped") or []],
    }


def _slim(model: dict[str, Any]) -> dict[str, Any]:
    """An entry of a model without the key of its arrays, which are not kept."""
    return {**model, "key": ""}
