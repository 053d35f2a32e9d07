"""How many contexts a wanted interval needs, from a pilot of a few: half-widths shrink as 1/√contexts."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import median
from typing import Any

from anisoscope.errors import AnisoscopeError
from anisoscope.models.source import SHAPE
from anisoscope.planning.plans import Calibrated, RunPlan
from anisoscope.planning.subject import subject_of
from anisoscope.results.query import Query

PIPELINE = "anisoscope.commands.pipeline"  # above this room
USUAL = "5%"
MOST = 10**9


def parse_width(text: str) -> tuple[float, bool]:
    """A wanted half-width, and whether it is a share of the value.

    >>> parse_width("5%"), parse_width("0.01")
    ((0.05, True), (0.01, False))
    """
    share = text.strip().endswith("%")
    try:
        value = float(text.strip().rstrip("%")) / (100 if share else 1)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise AnisoscopeError(
            f"--wanted-width is {text!r}; expected a share of the value such as 5%, or a number above 0."
        )
    return value, share


def contexts_needed(contexts: int, half_width: float, *, value: float, wanted: tuple[float, bool]) -> int:
    """Contexts at which a half-width that so many gave is as wanted.

    >>> contexts_needed(16, 0.2, value=2.0, wanted=(0.05, True))
    64
    >>> contexts_needed(16, 0.2, value=2.0, wanted=(0.2, False))
    16
    """
    goal = wanted[0] * abs(value) if wanted[1] else wanted[0]
    return MOST if goal <= 0 else min(MOST, math.ceil(contexts * (half_width / goal) ** 2 - 1e-9))


def needs(rows: Iterable[Any], *, contexts: int, wanted: tuple[float, bool]) -> list[dict[str, Any]]:
    """What each metric needs at the median site and at the worst, dearest first; of heads their mean alone."""
    by_metric: dict[str, list[tuple[float, float, int]]] = {}
    for row in rows:
        half = (row.high - row.low) / 2
        if row.head is not None or row.variant or row.group or not math.isfinite(half) or half <= 0:
            continue
        need = contexts_needed(contexts, half, value=row.value, wanted=wanted)
        by_metric.setdefault(row.metric, []).append((row.value, half, need))
    found = [
        {
            "metric": name,
            "value": median(value for value, _, _ in sites),
            "half_width": median(half for _, half, _ in sites),
            "contexts": math.ceil(median(need for _, _, need in sites)),
            "worst": max(need for _, _, need in sites),
        }
        for name, sites in by_metric.items()
    ]
    return sorted(found, key=lambda row: -row["contexts"])


def with_pilot(
    plan: Callable[[Any, Calibrated], RunPlan], config: Any, *, contexts: int | None, wanted: str | None
) -> Callable[[Calibrated], RunPlan]:
    """A plan of a profile with a pilot beside it; without `contexts` the plan alone."""
    if contexts is None:
        return lambda calibrated: plan(config, calibrated)
    width = parse_width(wanted or USUAL)

    def make(calibrated: Calibrated) -> RunPlan:
        found = plan(config, calibrated)
        found.pilot = pilot(config, contexts, wanted=width)
        return found

    return make


def pilot(config: Any, contexts: int, *, wanted: tuple[float, bool]) -> dict[str, Any]:
    """Measure a few contexts of the first model, and say what intervals of a width need."""
    spec = config.models[0]
    if spec.startswith(SHAPE):
        raise AnisoscopeError("a shape has no weights to measure; leave --pilot out, or name a model that is here.")
    subject = subject_of(spec, random_init=config.random_init, remote=config.trust_remote_code)
    if not subject.reads_text:
        raise AnisoscopeError("a pilot counts contexts of text, and this model reads none; leave --pilot out.")
    length = min(config.context or 512, subject.longest)
    few = replace(config, models=(spec,), tokens=contexts * length)
    rows = list(Query(importlib.import_module(PIPELINE).profile_table(few)))
    seen = max((row.contexts or 0 for row in rows), default=0) or contexts
    found = needs(rows, contexts=int(seen), wanted=wanted)
    words = f"{100 * wanted[0]:g} % of the value" if wanted[1] else f"{wanted[0]:g}"
    return {"contexts": int(seen), "wanted": words, "metrics": found, "sentence": _sentence(found, length)}


def _sentence(found: list[dict[str, Any]], length: int) -> str:
    if not found:
        return "No metric of the pilot has an interval; give it more contexts."
    dearest = found[0]
    tokens = dearest["contexts"] * length
    return (
        f"The dearest is {dearest['metric']}: {dearest['contexts']:,} contexts, --tokens {tokens:,}. Intervals of the "
        "pilot come from eight folds, so these numbers are known within a factor of about two."
    )
