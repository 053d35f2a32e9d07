"""Verdicts and page of a result made again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from anisoscope.claims.catalogue import claims
from anisoscope.commands.drawing import page_of_runs
from anisoscope.results.folder import RunFolder
from anisoscope.view.report import write_page
from result_pages.result import Result, Verdict, judged, verdict_text

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
