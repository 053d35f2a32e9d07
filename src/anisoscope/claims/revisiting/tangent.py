"""Claims of *Revisiting Anisotropy: The Geometry of Learning Dynamics* about gradients in tangent directions.

Directions fitted on activations only (the tangent proxy Q_T) are compared with the true gradients at the same sites.

Notation
    E      energy(Q_T) at a site and step: the share of the squared gradient norm inside the tangent directions
    C      the same for a control of matched rank: normal, random, next, permuted
    r/d    the chance level: the mean energy of a random subspace of r of d dimensions; enrichment = E / (r/d)
The effect is the mean of (E − C)/(r/d) over sites, early and late in training apart (`revisiting.period`): no step is
selected by its result, and a lead that is lost again is not averaged away. Early directions are refitted at every step,
late ones frozen where the table has such rows. A claim holds if it holds early and late against every control.

Refitted directions late in training, PCA in place of semi-NMF, standardised coordinates and rows without the first
position (`revisiting.reading`) stand beside that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from anisoscope.claims.engine import evidence
from anisoscope.claims.engine.claim import ALPHA, Finding, Part, Parts, Sentence, claim, judge
from anisoscope.claims.engine.evidence import Cell, Missing, Readings, Run, average, models, step_records
from anisoscope.claims.revisiting import determined
from anisoscope.claims.revisiting.period import (
    FIT_WORDS,
    REFIT,
    Period,
    by_period,
    group_fit,
    period_aspects,
    periods,
    told_by_period,
)
from anisoscope.claims.revisiting.reading import (
    READINGS,
    REFITTED,
    depends_on_readings,
    read_as,
    reading_parts,
    refitted,
)
from anisoscope.results.quantity import Quantity
from anisoscope.results.query import Row

SOURCE = "arXiv:2604.08764"
CONTROLS = ("normal", "random", "next", "permuted")
MARGIN = 0.5  # in units of the chance level; a smaller excess is not "unusually large"
SHARE_MARGIN = 0.05
ENERGY_METRICS = ("gradient_energy", "gradient_enrichment", "gradient_p", "gradient_p_holm", determined.METRIC)
_ROWS = {"masked": "masked rows", "unmasked": "unmasked rows"}  # groups of a masked language model
_CLASS = "at the class token"
_GAIN, _LACKING = "IsoScore* gain", "sites and steps below average"
_PCA = "with PCA"
RANK_FREE = "alignment"  # of updates, which needs no rank
CONTROL_WORDS = {
    "normal": "directions normal to them",
    "random": "random directions",
    "next": "the next principal components",
    "permuted": "directions fitted on column-permuted activations",
}


# -- tangent directions against their controls -------------------------------------------------------------------------


def trained(readings: Readings) -> list[Cell]:
    """The cells after initialisation, without those at which a frozen proxy is tested on the step it was fitted on.

    A model measured outside a series has no step and counts as trained.
    """
    after = [cell for cell in readings if cell.step is None or cell.step > 0]
    unseen = [cell for cell in after if "in-sample" not in readings[cell].note]
    if not unseen:
        where = "outside the window that the frozen proxy was fitted on" if after else "after initialisation"
        raise Missing(f"measured step {where}", "measure later steps")
    return unseen


def chance_levels(run: Run, group: str = "", **options: Any) -> dict[Cell, float]:
    """r/d of every cell: energy over enrichment, or the mean of the random control where enrichment is missing."""
    energy, enrichment = (run.tangent(f"gradient_{name}", group, **options) for name in ("energy", "enrichment"))
    drawn = run.tangent("gradient_energy", group, control="random", **options)
    levels = {cell: reading.value for cell, reading in drawn.items()}
    for cell, reading in energy.items():
        if cell in enrichment and enrichment[cell].value > 0:
            levels[cell] = reading.value / enrichment[cell].value
    return {cell: level for cell, level in levels.items() if level > 0}


def control_quantity(control: str, drawn: Row, energy: Row) -> Quantity:
    """The energy of a control, with leave-one-fold-out values where they are known.

    Random subspaces have mean energy r/d for any gradient. Those normal to Q_T have r(1 − E)/(d − r), so their
    leave-one-fold-out values scale with 1 − E.
    """
    if drawn.quantity.folds:
        return drawn.quantity
    if control == "normal" and energy.quantity.folds and energy.value < 1:
        unit = drawn.value / (1 - energy.whole)  # the draws are of all contexts, also where the energy is of a half
        return Quantity(unit * (1 - energy.value), tuple(unit * (1 - e) for e in energy.quantity.folds))
    return Quantity.constant(drawn.value)


def differences(run: Run, control: str, group: str = "", **options: Any) -> dict[Cell, Quantity]:
    """(E − C)/(r/d) of every cell in which both were measured."""

    def find() -> dict[Cell, Quantity]:
        energy = run.needed("gradient_energy", group, **options)
        drawn = run.tangent("gradient_energy", group, control=control, **options)
        levels = chance_levels(run, group, **options)
        return {
            cell: (reading.quantity - control_quantity(control, drawn[cell], reading)) / levels[cell]
            for cell, reading in energy.items()
            if cell in drawn and cell in levels
        }

    return run.once(("differences", control, group, *sorted(options.items())), find)


def control_parts(run: Run, period: Period, group: str = "", *, prefix: str = "", **options: Any) -> list[Part]:
    """One part for each control in a period; undecided for a control that was not measured."""
    options = {"fit": period.fit, **options}
    cells = period.cells(run.needed("gradient_energy", group, **options))
    if not cells:
        raise Missing(f"{period.name} step outside the window of the frozen directions", "measure later steps")
    parts, open_ = [], determined.undetermined(run, cells, **options)
    for control in CONTROLS:
        name, found = f"{prefix or period.name}: {control}", differences(run, control, group, **options)
        if not any(cell in found for cell in cells):
            named = evidence.listing(run.directions(control=control, **options))
            gap = Missing(f"gradient_energy with {named}{f' for group {group}' if group else ''}")
            parts.append(Part.absent(name, gap, margin=MARGIN))
            continue
        test: dict[str, Any] = dict(open_)
        if control == "random":
            step = evidence.last_step(cells)
            test |= {"p": random_p(run, group, step=step, **options), "tested": True}
        parts.append(Part.of(name, average(found, cells), margin=MARGIN, **test))
    return parts


def energy_parts(run: Run, group: str = "", **options: Any) -> list[Part]:
    """One part for each period and control."""
    found, options = periods(run, "gradient_energy", group, **options), {k: v for k, v in options.items() if k != "fit"}
    return [part for period in found for part in control_parts(run, period, group, **options)]


def beside_parts(run: Run, found: Sequence[Period]) -> list[Part]:
    """Parts that do not decide: late with refitted directions and with PCA, and all periods in other readings."""
    late, parts = found[-1], []
    others: dict[str, dict[str, Any]] = {REFITTED: {"fit": REFIT}} if late.fit != REFIT else {}
    others |= {_PCA: {"proxy": "pca"}} if run.proxy == "semi_nmf" else {}
    for words, options in others.items():
        if run.tangent("gradient_energy", **{"fit": late.fit, **options}):
            measured = control_parts(run, late, prefix=f"{words}, {late.name}", **options)
            parts += [replace(part, needed=False) for part in measured if part.measured]
    return parts + reading_parts(lambda read: energy_parts(read(run)), [run])


def random_p(run: Run, group: str = "", *, step: int | str | None = "last", **options: Any) -> float:
    """p of no site exceeding random subspaces at one step (default: the last): the smallest Holm-adjusted p.

    It covers the variation over random subspaces, which the interval over contexts does not. Without
    `gradient_p_holm` it is Bonferroni's from `gradient_p`, and without that a bound from mean and sd of the draws.
    """
    adjusted = _at(run.tangent("gradient_p_holm", group, **options), step).values()
    if adjusted:
        return min(row.value for row in adjusted)
    return exact_p(run, "gradient_energy", group, p="gradient_p", step=step, **options)


def exact_p(
    run: Run, metric: str, group: str = "", *, p: str, step: int | str | None = "last", **options: Any
) -> float:
    """Bonferroni's p over the sites of one step, from the metric named `p`.

    Without that metric it is Cantelli's bound 1/(1 + z²) from the random control, valid for any distribution: energies
    of random subspaces are skewed to the right, so normal tails would be too small.
    """
    values = [row.value for row in _at(run.tangent(p, group, **options), step).values()]
    if not values:
        readings = run.tangent(metric, group, **options)
        for cell, drawn in _at(run.tangent(metric, group, control="random", **options), step).items():
            if cell in readings and drawn.sd > 0:
                z = (readings[cell].value - drawn.value) / drawn.sd
                values.append(1 / (1 + z * z) if z > 0 else 1.0)
    return min(1.0, len(values) * min(values)) if values else math.nan


def _at(readings: Readings, step: int | str | None) -> Readings:
    return evidence.at(readings, evidence.last_step(readings) if isinstance(step, str) else step)


# -- the claims --------------------------------------------------------------------------------------------------------


@claim(of=models, source=SOURCE, metrics=ENERGY_METRICS, margin=MARGIN, about="training")
def tangent_energy(run: Run) -> Finding:
    """Directions fitted on activations hold more gradient energy than every control of the same rank, early and late in
    training.

    Mean over sites of (energy − control)/(r/d), early and late apart, against each of four controls; the class token of
    an image model is no such site and is told beside.

    Early, the first third of the measured steps after initialisation, directions are refitted at every step; late, the
    last third, they are those of the paper, frozen after the first three tenths of the measured steps.
    """
    found = periods(run, "gradient_energy")
    needed, late = energy_parts(run), found[-1].fit
    parts = [*needed, *described_energy(run, found), *beside_parts(run, found), *_class_token(run, found[-1])]
    cells, layers = cell_records(run, fit=late), _layers(run, found[-1])
    shares = {
        "layer-steps above every control": [c["above"] for c in cells if c["step"] is None or c["step"] > 0],
        "layers beyond the margin": [layer["beyond"] for layer in layers],
    }
    parts += Part.describe_all({name: sum(v) / len(v) for name, v in shares.items() if v})
    groups: dict[str, Any] = {}  # masked and unmasked rows of a masked language model, judged separately
    for group, rows in _ROWS.items():
        if run.tangent("gradient_energy", group, fit=REFIT):
            mine = periods(run, "gradient_energy", group, fit=group_fit(run, [group]))
            means = described_energy(run, mine, group)
            parts.append(replace(next(p for p in means if p.name == f"enrichment {mine[-1].name}"), name=rows))
            status, part = judge([p for period in mine for p in control_parts(run, period, group)])
            groups[group] = {**part.record(), "status": status, "control": part.name}
            groups[group] |= {"told": [p.record() for p in means], "steps": step_records(_scaled(run, group))}
    details: dict[str, Any] = {"cells": cells, "layers": layers, "steps": step_records(_scaled(run, fit=late))}
    details |= {"groups": groups, "fit": late, "periods": {p.name: [*p.steps] for p in found}}
    aspects = {c: tuple(p.name for p in needed if p.name.endswith(f": {c}")) for c in CONTROLS}
    aspects = {**period_aspects(needed), **aspects}
    sentence = energy_sentence("gradients' energy", found)
    return Finding(parts, sentence, details, aspects=aspects, settle=depends_on_readings())


def energy_sentence(what: str, found: Sequence[Period]) -> Sentence:
    """The sentence on enrichment and distance from the closest control in each period, and on other readings."""
    fits = {period.name: FIT_WORDS[period.fit] for period in found}

    def words(period: str, part: Part) -> str:
        lead = f"({fits[period]}) the tangent directions hold {parts_of[f'enrichment {period}']} times as much of the "
        lead += f"{what} as chance would give, {part} more than the control that comes closest, "
        return f"{lead}{CONTROL_WORDS[part.name.split(': ')[1]]}, {part.outcome}"

    parts_of: dict[str, Part] = {}

    def sentence(parts: Parts, part: Part) -> str:
        parts_of.clear()
        parts_of.update(parts)
        remarks = _beside_words(parts)
        remarks += [f"on {rows} late {parts[rows].number} times" for rows in _ROWS.values() if rows in parts]
        remarks += [f"{_CLASS}, which the mean leaves out, {parts[_CLASS].number} times"] if _CLASS in parts else []
        if aligned := parts.get(RANK_FREE):
            remarks.append(f"late their alignment with the activations, which needs no rank, is {aligned}, 1 by chance")
        if layers := parts.get("layers beyond the margin"):
            remarks.append(f"late the lead is beyond the margin in {_part_of(layers.effect)} layers")
        return told_by_period(parts, words) + (f" ({'; '.join(remarks)})" if remarks else "")

    return sentence


def _beside_words(parts: Parts) -> list[str]:
    """What other fits, proxies and readings give, as clauses."""
    statuses, clauses = _statuses(parts), []
    with_refit = {**statuses, **_statuses(read_as(REFITTED, parts))}
    plain = [other.phrase for other in READINGS]
    for words in (REFITTED, _PCA, *plain, *map(refitted, plain)):
        for period, status in (statuses if words in (REFITTED, _PCA, *plain) else with_refit).items():
            if members := by_period(read_as(words, parts)).get(period):
                other, part = judge(members)
                said = {"holds": "it holds", "fails": "it fails", "undecided": "it is open"}[other]
                clauses.append(f"{words} {said} {period} {'as well' if other == status else 'unlike here'} ({part})")
    return clauses


def _statuses(parts: Parts) -> dict[str, str]:
    return {period: judge(members)[0] for period, members in by_period(parts).items()}


def _part_of(share: float) -> str:
    """A share of layers as a phrase.

    >>> _part_of(1.0), _part_of(0.0), _part_of(0.25)
    ('all', 'none of the', '25 % of the')
    """
    return "all" if share >= 1 else "none of the" if share <= 0 else f"{100 * share:.0f} % of the"


def described_energy(run: Run, found: Sequence[Period], group: str = "", **options: Any) -> list[Part]:
    """Descriptive parts: mean enrichment of each period, and late of single rows."""
    numbers: dict[str, Quantity] = {}
    for period in found:
        scaled = _scaled(run, group, fit=period.fit, **options)
        cells = [
            c for c in period.cells(run.needed("gradient_energy", group, fit=period.fit, **options)) if c in scaled
        ]
        numbers[f"enrichment {period.name}"] = average(scaled, cells)
        rows = _scaled(run, group, average="row", fit=period.fit, **options)
        if period is found[-1] and any(cell in rows for cell in cells):
            numbers["enrichment of single rows"] = average(rows, cells)
    return Part.describe_all(numbers)


def _class_token(run: Run, late: Period) -> list[Part]:
    """The mean enrichment of the class token late in training, a descriptive part; none in a model without one."""
    found = run.class_token("gradient_enrichment", fit=late.fit)
    cells = late.cells(found) if found else []
    return Part.describe_all({_CLASS: average(found, cells)}) if cells else []


def _scaled(run: Run, group: str = "", **options: Any) -> dict[Cell, Quantity]:
    """Energy in units of the chance level r/d at every cell."""
    levels = chance_levels(run, group, **{k: v for k, v in options.items() if k != "average"})
    found = run.tangent("gradient_energy", group, **options)
    return {cell: reading.quantity / levels[cell] for cell, reading in found.items() if cell in levels}


def cell_records(run: Run, **options: Any) -> list[dict[str, Any]]:
    """One record per site and step: enrichment, its interval, controls in the same unit, p, whether above them all."""
    energy, levels = run.needed("gradient_energy", **options), chance_levels(run, **options)
    drawn = {c: run.tangent("gradient_energy", control=c, **options) for c in CONTROLS}
    gaps = {c: differences(run, c, **options) for c in CONTROLS}
    adjusted = run.tangent("gradient_p_holm", **options)
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


def _layers(run: Run, period: Period) -> list[dict[str, Any]]:
    """One record per site: its mean distance from each control in a period, and whether all exceed the margin.

    Beyond the margin is above chance, too, so at its last step random subspaces must not do as well.
    """
    records: dict[tuple[Any, ...], dict[str, Any]] = {}
    tests = _at(run.tangent("gradient_p_holm", fit=period.fit), period.last)
    lucky = {cell.site for cell, row in tests.items() if row.value > ALPHA}
    cells = set(period.cells(run.tangent("gradient_energy", fit=period.fit)))
    for control in CONTROLS:
        gaps = differences(run, control, fit=period.fit)
        for layer in evidence.layer_records({cell: gap for cell, gap in gaps.items() if cell in cells}):
            site = {name: layer.pop(name) for name in ("stack", "layer", "kind")}
            records.setdefault(tuple(site.values()), site)[control] = layer
    for place, record in records.items():
        record["beyond"] = place not in lucky and all(record[c]["low"] > MARGIN for c in CONTROLS if c in record)
    return list(records.values())


@claim(
    of=models,
    source=SOURCE,
    metrics=("gradient_share", "gradient_isoscore_gain", *ENERGY_METRICS),
    margin=SHARE_MARGIN,
    about="training",
)
def anisotropy_share(run: Run) -> Finding:
    """Tangent directions hold a larger share of the gradients' anisotropy than every control of the same rank, early
    and late in training.

    Mean over sites of the spectral share minus that of each control, early and late apart; ΔIsoScore* must not object,
    and random subspaces must not hold as much gradient energy (p ≤ .05).
    """
    found, needed, beside = periods(run, "gradient_share"), _share_parts(run), []
    shares: dict[str, Quantity] = {}
    lacking: list[bool] = []
    for period in found:
        share, gain = (run.tangent(f"gradient_{name}", fit=period.fit) for name in ("share", "isoscore_gain"))
        cells = period.cells(share)
        shares[f"share {period.name}"] = average(share, cells)
        lacking += [_below(share[cell]) for cell in cells]
        gains = _above(gain, run.tangent("gradient_isoscore_gain", control="normal", fit=period.fit))
        if any(cell in gains for cell in cells):
            beside.append(Part.of(f"{_GAIN} {period.name}", average(gains, cells), margin=0.0, needed=False))
    if not any(part.measured for part in needed):
        raise Missing("gradient_share with its controls")
    part_below = sum(lacking) / len(lacking) if lacking else 0.0
    parts = [*needed, *Part.describe_all({**shares, _LACKING: part_below}), *beside]
    parts += reading_parts(lambda read: _share_parts(read(run)), [run], metric="gradient_share")
    late = run.tangent("gradient_share", fit=found[-1].fit)
    details: dict[str, Any] = evidence.course_records({cell: _signed(reading) for cell, reading in late.items()})
    details |= {"flagged": sorted({row.note for row in late.values() if "fewer than" in row.note})}
    details |= {"fit": found[-1].fit, "periods": {p.name: [*p.steps] for p in found}}

    def doubt(parts: Parts) -> str:
        gains = [part for name, part in parts.items() if name.startswith(_GAIN)]
        confirmed = all(part.low > 0 for part in gains)
        return "" if confirmed else "the second measure, IsoScore*, does not confirm it"

    settle, aspects = depends_on_readings(), period_aspects(needed)
    return Finding(parts, _share_sentence, details, doubt=doubt, aspects=aspects, settle=settle)


def _share_parts(run: Run) -> list[Part]:
    """The spectral share minus that of each control, one part for each period and control."""
    parts = []
    for period in periods(run, "gradient_share"):
        share = run.tangent("gradient_share", fit=period.fit)
        cells = period.cells(share)
        open_ = determined.undetermined(run, cells, fit=period.fit)
        for control in CONTROLS:
            gaps = _above(share, run.tangent("gradient_share", control=control, fit=period.fit))
            name = f"{period.name}: {control}"
            test: dict[str, Any] = {}
            if control == "random":  # few strong directions of gradients may lie in any subspace by luck
                step = evidence.last_step(cells)
                test = {"p": random_p(run, step=step, fit=period.fit), "tested": True}
            if any(cell in gaps for cell in cells):
                parts.append(Part.of(name, average(gaps, cells), margin=SHARE_MARGIN, **test, **open_))
            else:
                parts.append(Part.absent(name, Missing(f"gradient_share with {control=!s}"), margin=SHARE_MARGIN))
    return parts


def _above(readings: Readings, drawn: Readings) -> dict[Cell, Quantity]:
    return {c: _signed(r) - Quantity.constant(drawn[c].value) for c, r in readings.items() if c in drawn}


def _signed(reading: Row) -> Quantity:
    """The share with negative sign where the tangent directions hold *less* gradient than average."""
    return -reading.quantity if _below(reading) else reading.quantity


def _below(reading: Row) -> bool:
    return bool(re.search(r"\bbelow\b", reading.note)) and not re.search(r"\babove\b", reading.note)


def _share_sentence(parts: Parts, part: Part) -> str:
    def words(period: str, part: Part) -> str:
        text = f"the tangent directions hold a share of {parts[f'share {period}']} of the gradients' spectral "
        text += f"anisotropy, {part} more than {CONTROL_WORDS[part.name.split(': ')[1]]}, {part.outcome}"
        return text

    remarks, lacking = ["spectral anisotropy is the unevenness of their energy over directions"], parts[_LACKING].effect
    if lacking > 0:
        remarks.append(f"at {100 * lacking:.0f} % of the sites and steps it is a lack of gradient and counts as minus")
    gains = [f"{name.removeprefix(_GAIN).strip()} by {gain}" for name, gain in parts.items() if name.startswith(_GAIN)]
    if gains:
        compared = "more without them than without normal ones"
        remarks.append(f"IsoScore*, a measure of evenness, changes {' and '.join(gains)} {compared}")
    return f"{told_by_period(parts, words)} ({'; '.join(remarks)})"
