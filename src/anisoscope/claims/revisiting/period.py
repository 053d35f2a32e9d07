"""Early and late in training: the steps, and the fit of the directions, that a claim is judged with in each.

Early is the first third of the measured steps after initialisation, late the last third. Early the directions are
refitted at every step: a frozen proxy is fitted on these very steps. Late they are frozen, the paper's setting, where
the table has frozen directions at steps outside their window, else refitted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from anisoscope.claims.engine import evidence
from anisoscope.claims.engine.claim import Part, Parts, judge
from anisoscope.claims.engine.evidence import Cell, Missing, Readings, Run

EARLY, LATE = "early", "late"
REFIT, FROZEN = "refit", "frozen"
FIT_WORDS = {REFIT: "refitted at every step", FROZEN: "frozen after the first measured steps"}


@dataclass(frozen=True)
class Period:
    """Some measured steps, and how the directions were fitted."""

    name: str
    steps: tuple[int | None, ...]
    fit: str

    def cells(self, readings: Readings) -> list[Cell]:
        """The cells of this period, without those inside the window of a frozen proxy."""
        mine = [cell for cell in readings if cell.step in self.steps]
        return [cell for cell in mine if "in-sample" not in readings[cell].note]

    @property
    def last(self) -> int | None:
        return self.steps[-1]


def main_fit(run: Run, metric: str = "gradient_energy", **options: Any) -> str:
    """The fit that late steps are judged with: the one chosen, else frozen where there are such steps, else refit."""
    if run.fit is not None:
        if "fit" in run.alternative.directions:  # counts where it changes what decides
            run.touched.add("late fit")
        return run.fit
    frozen = run.tangent(metric, fit=FROZEN, **options)
    late = evidence.late(evidence.steps_of(frozen) or [None])
    return FROZEN if Period(LATE, tuple(late), FROZEN).cells(frozen) else REFIT


def group_fit(run: Run, groups: Sequence[str]) -> str:
    """The fit that late rows of these groups are judged with: that of all rows, if it was tested on all of them alike.

    Frozen directions of older tables were tested against controls, and have intervals, on all rows alone.
    """
    fit = main_fit(run)
    return fit if all(_tested(run, group, fit) for group in groups) else REFIT


def _tested(run: Run, group: str, fit: str) -> bool:
    """Whether the late rows of a group were tested against drawn controls, with an interval."""
    energy = run.tangent("gradient_energy", group, fit=fit)
    late = Period(LATE, tuple(evidence.late(cell.step for cell in energy)), fit).cells(energy)
    drawn = run.tangent("gradient_energy", group, control="random", fit=fit)
    return bool(late) and all(cell in drawn and math.isfinite(energy[cell].low) for cell in late)


def periods(run: Run, metric: str, group: str = "", *, fit: str | None = None, **options: Any) -> list[Period]:
    """The periods in which a metric was measured; one state of a model, or one step, is late."""
    late_fit = fit or main_fit(run, metric)
    readings = run.tangent(metric, group, fit=REFIT, **options) or run.needed(metric, group, fit=late_fit, **options)
    steps = [cell.step for cell in readings]
    early, late = evidence.early(steps), evidence.late(steps)
    if not late:
        raise Missing("measured step after initialisation", "measure later steps")
    found = [Period(EARLY, tuple(early), REFIT)] if early else []
    return [*found, Period(LATE, tuple(late), late_fit)]


def by_period(parts: Parts) -> dict[str, list[Part]]:
    """The needed parts of each period, whose names begin with it."""
    found = {name: [p for n, p in parts.items() if n == name or n.startswith(f"{name}: ")] for name in (EARLY, LATE)}
    return {name: members for name, members in found.items() if members}


def period_aspects(parts: Sequence[Part]) -> dict[str, tuple[str, ...]]:
    """The aspects `early` and `late`, each with its parts."""
    named = by_period({part.name: part for part in parts})
    return {name: tuple(part.name for part in members) for name, members in named.items()}


def told_by_period(parts: Parts, words: Callable[[str, Part], str]) -> str:
    """What each period gives, as clauses: words(period, its deciding part)."""
    clauses = [f"{name} {words(name, _shown(members))}" for name, members in by_period(parts).items()]
    return "; ".join(clauses)


def _shown(members: Sequence[Part]) -> Part:
    measured = [part for part in members if part.measured]
    return judge(measured or members)[1]
