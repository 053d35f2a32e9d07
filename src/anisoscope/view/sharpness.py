"""The page of the study of sharpness: verdicts, figures, a table of the arms; complete in itself, figures as files."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from anisoscope.errors import AnisoscopeError
from anisoscope.results.folder import RunFolder
from anisoscope.view.drawn import verdicts_of, write_drawings, write_page
from anisoscope.view.performance_results import Mark
from anisoscope.view.records import settings
from anisoscope.view.sharpness_figures import figures_of
from anisoscope.view.sharpness_results import ARMS, RELATIVE, Results
from anisoscope.view.verdicts import neat, verdict_claims
from anisoscope.view.words import estimate, listed, number

QUESTIONS = ("anisotropy_without_drift", "sharpness_needs_drift")  # what the study was made for
_LAST = (
    ("query", RELATIVE, "Relative drift of queries"),
    ("key", RELATIVE, "Relative drift of keys"),
    ("query", "qk_cosine", "Cosine of mean query and mean key"),
    ("scores", "attention_sharpness", "Sharpness"),
    ("scores", "attention_entropy", "Entropy / log m"),
    ("scores", "score_spread", "Spread of scores"),
)


def write_sharpness_report(folder: str | Path) -> Path:
    """Write `report.html` and `figures/*.pdf|svg` of a study into its folder; the path of the page."""
    run = RunFolder.open(folder)
    sizes = [results for results in Results.all(run.table().records()) if results.steps]
    if not sizes:
        raise AnisoscopeError(f"{str(folder)!r} has no step that all arms were measured at; let the study finish.")
    models = [_size(run.path / "figures", results, alone=len(sizes) == 1) for results in sizes]
    return write_page(run, "sharpness.html.j2", _context(run.about(), models, verdicts=verdicts_of(run), run=run))


def _size(folder: Path, results: Results, *, alone: bool) -> dict[str, Any]:
    """Everything about the arms of one size, their figures written on the way."""
    drawings = write_drawings(folder, figures_of(results), results, named="sharpness", of="" if alone else results.size)
    return {
        "name": results.size,
        "seeds": len(results.seeds),
        "height": results.height,
        "last": results.steps[-1],
        "drawings": drawings,
        "arms": [{"name": ARMS[arm], "key": arm} for arm in results.arms],
        "rows": _rows(results),
        "losses": loss_sentence(results),
    }


def _words(mark: Mark) -> str:
    return estimate(mark.value, mark.low, mark.high) if mark.known else "–"


def _rows(results: Results) -> list[dict[str, Any]]:
    """Every arm beside the others: loss, anisotropy at three moments, queries, keys and scores at the last step."""
    first, last = results.steps[0], results.steps[-1]
    numbers: dict[str, Callable[[str], Mark]] = {
        "Held-out loss": lambda arm: results.loss_mark(arm, last),
        "Held-out loss minus softmax": lambda arm: results.loss_difference(arm, last),
    }
    for step in sorted({first, results.height or last, last}):
        numbers[f"Average cosine of blocks, step {step}"] = functools.partial(_cosine, results, step)
    for kind, metric, words in _LAST:
        numbers[words] = functools.partial(_last, results, kind, metric)
    return [{"name": name, "cells": [_words(mark(arm)) for arm in results.arms]} for name, mark in numbers.items()]


def _cosine(results: Results, step: int, arm: str) -> Mark:
    return results.mark(arm, step, "resid", "average_cosine")


def _last(results: Results, kind: str, metric: str, arm: str) -> Mark:
    return results.mark(arm, results.steps[-1], kind, metric)


def loss_sentence(results: Results) -> str:
    """What each kind of attention costs, in one sentence."""
    last = results.steps[-1]
    own = results.loss_mark("softmax", last) if "softmax" in results.arms else None
    others = [(arm, results.loss_difference(arm, last)) for arm in results.arms if arm != "softmax"]
    told = [f"{arm} {_signed(gap)}" for arm, gap in others if gap.known]
    if own is None or not own.known or not told:
        return ""
    return f"{results.size}, step {last}: ordinary attention has a held-out loss of {_words(own)}; {', '.join(told)}."


def _signed(gap: Mark) -> str:
    """A difference with its sign and interval."""
    sign = "+" if gap.value >= 0 else "−"
    ends = f" [{number(gap.low, 2)}, {number(gap.high, 2)}]" if gap.low == gap.low else ""
    return f"{sign}{number(abs(gap.value), 2)}{ends}"


def _with_seeds(claim: dict[str, Any], verdicts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A claim whose rows also say what each seed gave, and whether what holds is gone at the last step."""
    for row in claim["rows"]:
        mine = next(v for v in verdicts if (v["claim"], v["subject"]) == (claim["name"], row["subject"]))
        details = mine["details"]
        row["by_seed"] = "" if row["seeds"] else listed([neat(each["effect"]) for each in details.get("per_seed", [])])
        last = details.get("aspects", {}).get("at the end", {})
        row["transient"] = row["status"] == "holds" and last.get("status") == "fails"
    return claim


def _context(
    about: Mapping[str, Any], models: Sequence[Mapping[str, Any]], *, verdicts: list[dict[str, Any]], run: RunFolder
) -> dict[str, Any]:
    claims = [_with_seeds(each, verdicts) for each in verdict_claims(verdicts)]
    return {
        "version": about.get("anisoscope", ""),
        "started": str(about.get("started", ""))[:10],
        "config": about["config"],
        "data": about.get("data") or {},
        "models": models,
        "claims": [each for each in claims if each["name"] in QUESTIONS],
        "others": [each for each in claims if each["name"] not in QUESTIONS],
        "warnings": list(about.get("warnings") or []),
        "settings": settings(about, str(run.path)),
    }
