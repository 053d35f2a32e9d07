"""Tangent directions against their controls, in units of the chance level r/d.

Notation
    E      energy(Q_T) at a site and step: the part of the gradient's square norm inside the tangent directions
    C      the same for a control of matched rank: normal, random, next, permuted
    r/d    what a random subspace of r of d dimensions holds on average; enrichment = E / (r/d)
The effect is the mean of (E − C)/(r/d) over sites and over the measured steps after initialisation: no step is chosen
by looking at the outcome.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from anisoscope.claims.engine.evidence import Cell, Missing, Readings, Run, last_step, listing
from anisoscope.claims.engine.part import ALPHA, Part
from anisoscope.results.quantity import Quantity, mean
from anisoscope.results.query import Row

CONTROLS = ("normal", "random", "next", "permuted")
MARGIN = 0.5  # half of the chance level: less would not be called "unusually large"


def trained(readings: Readings) -> list[Cell]:
    """Cells after initialisation, without those where a frozen proxy was fitted on the very step it is tested on.

    A model that was measured by itself has no step; it counts as trained.
    """
    after = [cell for cell in readings if cell.step is None or cell.step > 0]
    unseen = [cell for cell in after if "in-sample" not in readings[cell].note]
    if not unseen:
        where = "outside the window that the frozen proxy was fitted on" if after else "after initialisation"
        raise Missing(f"measured step {where}", "measure later steps")
    return unseen


def average(readings: Readings, cells: Iterable[Cell]) -> Quantity:
    """The mean of a metric over cells."""
    return mean([readings[cell].quantity for cell in cells])


def chance_levels(run: Run, group: str = "", **options: Any) -> dict[Cell, float]:
    """r/d of every cell: energy over enrichment, or the mean of the random control where there is no enrichment."""
    energy, enrichment = (run.tangent(f"gradient_{name}", group, **options) for name in ("energy", "enrichment"))
    drawn = run.tangent("gradient_energy", group, control="random", **options)
    levels = {cell: reading.value for cell, reading in drawn.items()}
    for cell, reading in energy.items():
        if cell in enrichment and enrichment[cell].value > 0:
            levels[cell] = reading.value / enrichment[cell].value
    return {cell: level for cell, level in levels.items() if level > 0}


def control_quantity(control: str, drawn: Row, energy: Row) -> Quantity:
    """The control's energy, fold by fold where that is known.

    Random subspaces hold r/d of any gradient. Those normal to Q_T hold r(1 − E)/(d − r), so without E's fold their mean
    moves as 1 − E does.
    """
    if drawn.quantity.folds:
        return drawn.quantity
    if control == "normal" and energy.quantity.folds and energy.value < 1:
        folds = tuple(drawn.value * (1 - e) / (1 - energy.value) for e in energy.quantity.folds)
        return Quantity(drawn.value, folds)
    return Quantity.constant(drawn.value)


def differences(run: Run, control: str, group: str = "", **options: Any) -> dict[Cell, Quantity]:
    """(E − C)/(r/d) of every cell in which both were measured."""
    key = ("differences", control, group, *sorted(options.items()))
    return run.once(key, lambda: _differences(run, control, group, **options))


def _differences(run: Run, control: str, group: str, **options: Any) -> dict[Cell, Quantity]:
    energy = run.needed("gradient_energy", group, **options)
    drawn = run.tangent("gradient_energy", group, control=control, **options)
    levels = chance_levels(run, group, **options)
    return {
        cell: (reading.quantity - control_quantity(control, drawn[cell], reading)) / levels[cell]
        for cell, reading in energy.items()
        if cell in drawn and cell in levels
    }


def control_parts(run: Run, group: str = "", **options: Any) -> list[Part]:
    """One part for each control; a control that was not measured is a part that stays open."""
    cells = trained(run.needed("gradient_energy", group, **options))
    parts = []
    for control in CONTROLS:
        found = differences(run, control, group, **options)
        common = [found[cell] for cell in cells if cell in found]
        if not common:
            named = listing(run.directions(control=control, **options))
            gap = Missing(f"gradient_energy with {named}{f' for group {group}' if group else ''}")
            parts.append(Part.absent(control, str(gap), margin=MARGIN))
        elif control == "random":
            p = random_p(run, group, **options)
            parts.append(Part.of(control, mean(common), margin=MARGIN, p=p, tested=True))
        else:
            parts.append(Part.of(control, mean(common), margin=MARGIN))
    return parts


def random_p(run: Run, group: str = "", *, step: int | str | None = "last", **options: Any) -> float:
    """p that no site is better than random subspaces at one step (default: the last): the smallest Holm-adjusted p.

    The interval over contexts does not know that a random subspace may happen to lie well; this does. Without
    `gradient_p_holm` it is Bonferroni's from `gradient_p`, and without that a bound from the mean and sd of the draws.
    """
    adjusted = _values_at(run.tangent("gradient_p_holm", group, **options), step)
    return min(adjusted) if adjusted else exact_p(run, "gradient_energy", group, p="gradient_p", step=step, **options)


def exact_p(
    run: Run, metric: str, group: str = "", *, p: str, step: int | str | None = "last", **options: Any
) -> float:
    """Bonferroni's p over the sites of one step, from the metric named `p`; without it, the bound of `band_p`."""
    values = _values_at(run.tangent(p, group, **options), step)
    return min(1.0, len(values) * min(values)) if values else band_p(run, metric, group, step=step, **options)


def _values_at(readings: Readings, step: int | str | None) -> list[float]:
    return [row.value for cell, row in readings.items() if cell.step == _chosen(readings, step)]


def _chosen(readings: Readings, step: int | str | None) -> int | str | None:
    return last_step(readings) if step == "last" else step


def band_p(run: Run, metric: str, group: str = "", *, step: int | str | None = "last", **options: Any) -> float:
    """A bound on p for any metric with a random control, times the number of sites: Cantelli's, 1/(1 + z²).

    It holds whatever the draws are like; the energies of random subspaces are skewed to the right, so that normal tails
    would promise too much.
    """
    readings = run.tangent(metric, group, **options)
    drawn = run.tangent(metric, group, control="random", **options)
    at = _chosen(drawn, step)
    tails = []
    for cell, row in readings.items():
        if cell.step == at and cell in drawn and drawn[cell].sd > 0:
            z = (row.value - drawn[cell].value) / drawn[cell].sd
            tails.append(1 / (1 + z * z) if z > 0 else 1.0)
    return min(1.0, len(tails) * min(tails)) if tails else math.nan


# what the report draws


def cell_records(run: Run, group: str = "", **options: Any) -> list[dict[str, Any]]:
    """Every site and step: enrichment with its interval, controls in the same unit, p, whether above all controls."""
    energy = run.needed("gradient_energy", group, **options)
    levels = chance_levels(run, group, **options)
    drawn = {c: run.tangent("gradient_energy", group, control=c, **options) for c in CONTROLS}
    gaps = {c: differences(run, c, group, **options) for c in CONTROLS}
    adjusted = run.tangent("gradient_p_holm", group, **options)
    records = []
    for cell in (c for c in energy if c in levels):
        low, high = (energy[cell].quantity / levels[cell]).interval()
        lows = [gaps[c][cell].interval()[0] for c in CONTROLS if cell in gaps[c]]
        p = adjusted[cell].value if cell in adjusted else math.nan
        above = bool(lows) and all(low > 0 for low in lows) and not p > ALPHA
        record = {**cell.record(), "enrichment": energy[cell].value / levels[cell], "low": low, "high": high, "p": p}
        record["controls"] = {c: drawn[c][cell].value / levels[cell] for c in CONTROLS if cell in drawn[c]}
        records.append({**record, "above": above})
    return records
