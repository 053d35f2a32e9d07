"""The rows of a training step that a monitor's hooks saw, with the scale of their gradients undone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anisoscope.capture.live import MicroBatch, live_pass
from anisoscope.capture.sites import Site
from anisoscope.errors import AnisoscopeError
from anisoscope.runs.monitor_checks import loss_factor, unseen
from anisoscope.runs.steprows import StepRows


def learned_rows(
    step: int, seen: list[MicroBatch], sites: Sequence[Site], *, bank: Any, said: tuple[str, int | None, float]
) -> StepRows:
    """Rows of all micro-batches that were learned from; `said` is what the loop said of its loss."""
    rows = StepRows(step)
    if seen and not any(batch.has_targets() for batch in seen):
        raise AnisoscopeError(
            f"every label of step {step} is ignored (-100), so there is no loss; expected labels somewhere: "
            "check the collator or the masking."
        )
    for batch in seen:
        if not batch.gradients:
            continue
        factor = loss_factor(batch, *said, step=step)
        if bank is not None:
            batch.feed(bank)
        rows.add_fit(live_pass(batch, sites, half=0))
        rows.add_test(live_pass(batch, sites, half=1), factor=factor)
    if not rows.test:
        raise unseen(step, forward=bool(seen))
    return rows
