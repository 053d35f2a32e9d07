"""Whether a model has learned anything: how far its loss has fallen, that of the held-out probe where there is one."""

from __future__ import annotations

from anisoscope.claims.engine.evidence import Run
from anisoscope.claims.engine.part import figure

LEARNED = 0.1  # share by which the loss must have fallen


def _losses(run: Run) -> dict[int, float]:
    """The loss by step."""
    found = run.index.losses
    courses = found.get((run.model, run.seed)) or found.get((run.model, None)) or {}
    return courses.get("probe_loss") or courses.get("loss") or {}


def fall(run: Run, step: int | None) -> tuple[int, float, float] | None:
    """The first step with a loss, that loss, and the last one until the step that is judged."""
    course = {at: loss for at, loss in _losses(run).items() if step is None or at <= step}
    return (min(course), course[min(course)], course[max(course)]) if len(course) > 1 else None


def learned(found: tuple[int, float, float] | None) -> bool:
    """Whether the loss fell by a tenth or more."""
    return found is not None and found[2] < (1 - LEARNED) * found[1]


def hardly_learned(run: Run, step: int | None) -> str:
    """Words for a model whose loss has hardly fallen since step 0; empty where it has, or where nobody knows."""
    found = fall(run, step)
    if found is None or found[0] > 0 or learned(found):
        return ""
    return f"hardly learned (loss from {figure(found[1])} to {figure(found[2])})"
