"""Claims of *Revisiting Anisotropy: The Geometry of Learning Dynamics* about gradients in tangent directions.

Directions fitted on activations only (the tangent proxy Q_T) are compared with the true gradients at the same sites.

Notation
    E      energy(Q_T) at a site and step: the share of the squared gradient norm inside the tangent directions
    C      the same for a control of matched rank: normal, random, next, permuted
    r/d    the chance level: the mean energy of a random subspace of r of d dimensions; enrichment = E / (r/d)
The effect is the mean of (E − C)/(r/d) over sites and over all measured steps after initialisation, so that no step is
selected by its result.

Further claims are about how the tangent geometry forms: when it emerges, whether it stays, what training amplifies.
The early step is the last measured one within the first tenth of training and the end is the last measured one, so that
neither is selected by its result.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

from anisoscope.claims.engine import evidence
from anisoscope.claims.engine.claim import ALPHA, Finding, Part, Parts, Sentence, claim, judge
from anisoscope.claims.engine.evidence import Cell, Missing, Readings, Run, average, figure, models, step_records
from anisoscope.results.quantity import Quantity
from anisoscope.results.query import Row

SOURCE = "arXiv:2604.08764"
CONTROLS = ("normal", "random", "next", "permuted")
MARGIN = 0.5  # in units of the chance level; a smaller excess is not "unusually large"
SHARE_MARGIN = 0.05
ENERGY_METRICS = ("gradient_energy", "gradient_enrichment", "gradient_p", "gradient_p_holm")
_ROWS = {"masked": "masked rows", "unmasked": "unmasked rows"}  # groups of a masked language model
EARLY = 0.1  # share of training that counts as early
START_MARGIN = MARGIN  # enrichment above 1 at step 0 that still counts as chance
GROWTH_MARGIN = 0.05
_SHARE, _GAIN = "share of growth", "IsoScore* gain"
_SCHEDULE = "a schedule such as log_spaced() measures it"
_CONTROL_WORDS = {
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


def control_parts(run: Run, group: str = "", **options: Any) -> list[Part]:
    """One part for each control; undecided for a control that was not measured."""
    cells = trained(run.needed("gradient_energy", group, **options))
    parts = []
    for control in CONTROLS:
        found = differences(run, control, group, **options)
        if not any(cell in found for cell in cells):
            named = evidence.listing(run.directions(control=control, **options))
            gap = Missing(f"gradient_energy with {named}{f' for group {group}' if group else ''}")
            parts.append(Part.absent(control, gap, margin=MARGIN))
            continue
        test = {"p": random_p(run, group, **options), "tested": True} if control == "random" else {}
        parts.append(Part.of(control, average(found, cells), margin=MARGIN, **test))
    return parts


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
    """Directions fitted on activations hold more gradient energy than every control of the same rank.

    Mean over sites and steps after initialisation of (energy − control)/(r/d), against each of four controls.
    """
    parts = [*control_parts(run), *described_energy(run)]
    cells, layers = cell_records(run), _layers(run)
    shares = {
        "layer-steps above every control": [c["above"] for c in cells if c["step"] is None or c["step"] > 0],
        "layers beyond the margin": [layer["beyond"] for layer in layers],
    }
    parts += Part.describe_all({name: sum(v) / len(v) for name, v in shares.items() if v})
    groups: dict[str, Any] = {}  # masked and unmasked rows of a masked language model, judged separately
    for group, rows in _ROWS.items():
        if run.tangent("gradient_energy", group):
            means = described_energy(run, group)
            parts.append(replace(means[0], name=rows))
            status, part = judge(control_parts(run, group))
            groups[group] = {**part.record(), "status": status, "control": part.name}
            groups[group] |= {"told": [p.record() for p in means], "steps": step_records(_scaled(run, group))}
    details = {"cells": cells, "layers": layers, "steps": step_records(_scaled(run)), "groups": groups}
    return Finding(parts, _energy_sentence("gradients' energy"), details, aspects={c: (c,) for c in CONTROLS})


def _energy_sentence(what: str) -> Sentence:
    """The sentence on enrichment, distance from the closest control, and at how many layers."""

    def sentence(parts: Parts, part: Part) -> str:
        text = f"the tangent directions hold {parts['enrichment']} times as much of the {what} as chance would give; "
        text += f"their lead over the control that decides, {_CONTROL_WORDS[part.name]}, is {part} in the same unit, "
        remarks = [f"at the last step {parts['enrichment at the last step'].number} times chance"]
        remarks += [f"on {rows} {parts[rows].number} times" for rows in _ROWS.values() if rows in parts]
        if layers := parts.get("layers beyond the margin"):
            remarks.append(f"the lead is beyond the margin in {_part_of(layers.effect)} layers")
        return f"{text}{part.outcome} ({'; '.join(remarks)})"

    return sentence


def _part_of(share: float) -> str:
    """A share of layers as a phrase.

    >>> _part_of(1.0), _part_of(0.0), _part_of(0.25)
    ('all', 'none of the', '25 % of the')
    """
    return "all" if share >= 1 else "none of the" if share <= 0 else f"{100 * share:.0f} % of the"


def described_energy(run: Run, group: str = "", **options: Any) -> list[Part]:
    """Descriptive parts: mean enrichment after initialisation and at the last step, pooled and per row."""
    scaled = _scaled(run, group, **options)
    cells = [cell for cell in trained(run.needed("gradient_energy", group, **options)) if cell in scaled]
    ends = [cell for cell in cells if cell.step in (None, evidence.last_step(cells))]
    numbers = {"enrichment": average(scaled, cells), "enrichment at the last step": average(scaled, ends)}
    rows = _scaled(run, group, average="row", **options)
    if any(cell in rows for cell in cells):
        numbers["enrichment of single rows"] = average(rows, cells)
    return Part.describe_all(numbers)


def _scaled(run: Run, group: str = "", **options: Any) -> dict[Cell, Quantity]:
    """Energy in units of the chance level r/d at every cell."""
    levels = chance_levels(run, group, **{k: v for k, v in options.items() if k != "average"})
    found = run.tangent("gradient_energy", group, **options)
    return {cell: reading.quantity / levels[cell] for cell, reading in found.items() if cell in levels}


def cell_records(run: Run) -> list[dict[str, Any]]:
    """One record per site and step: enrichment, its interval, controls in the same unit, p, whether above them all."""
    energy, levels = run.needed("gradient_energy"), chance_levels(run)
    drawn = {c: run.tangent("gradient_energy", control=c) for c in CONTROLS}
    gaps = {c: differences(run, c) for c in CONTROLS}
    adjusted = run.tangent("gradient_p_holm")
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


def _layers(run: Run) -> list[dict[str, Any]]:
    """One record per site: its mean distance from each control, and whether all exceed the margin."""
    records: dict[tuple[Any, ...], dict[str, Any]] = {}
    for control in CONTROLS:
        for layer in evidence.layer_records(differences(run, control)):
            site = {name: layer.pop(name) for name in ("stack", "layer", "kind")}
            records.setdefault(tuple(site.values()), site)[control] = layer
    for record in records.values():
        record["beyond"] = all(record[c]["low"] > MARGIN for c in CONTROLS if c in record)
    return list(records.values())


@claim(
    of=models,
    source=SOURCE,
    metrics=("gradient_share", "gradient_isoscore_gain"),
    margin=SHARE_MARGIN,
    about="training",
)
def anisotropy_share(run: Run) -> Finding:
    """Tangent directions hold a larger share of the gradients' anisotropy than normal directions do.

    Mean over sites and steps of the spectral share minus that of the normal control; ΔIsoScore* must not object.
    """
    share, gain = run.needed("gradient_share"), run.tangent("gradient_isoscore_gain")
    cells = trained(share)
    gaps = {c: _above(share, run.tangent("gradient_share", control=c)) for c in CONTROLS}
    if not gaps["normal"]:
        raise Missing("gradient_share with control=normal")
    parts = [Part.of("normal", average(gaps["normal"], cells), margin=SHARE_MARGIN)]
    parts += Part.describe_all({c: average(gaps[c], cells) for c in CONTROLS[1:] if gaps[c]})
    lacking = sum(_below(share[cell]) for cell in cells) / len(cells)
    parts += Part.describe_all({"share": average(share, cells), "sites and steps below average": lacking})
    if isotropy := _above(gain, run.tangent("gradient_isoscore_gain", control="normal")):
        parts.append(Part.of(_GAIN, average(isotropy, trained(gain)), margin=0.0, needed=False))
    details: dict[str, Any] = evidence.course_records({cell: _signed(reading) for cell, reading in share.items()})
    details |= {"flagged": sorted({share[c].note for c in cells if "fewer than" in share[c].note})}

    def doubt(parts: Parts) -> str:
        confirmed = _GAIN not in parts or parts[_GAIN].low > 0
        return "" if confirmed else "the second measure, IsoScore*, does not confirm it"

    return Finding(parts, _share_sentence, details, doubt=doubt)


def _above(readings: Readings, drawn: Readings) -> dict[Cell, Quantity]:
    return {c: _signed(r) - Quantity.constant(drawn[c].value) for c, r in readings.items() if c in drawn}


def _signed(reading: Row) -> Quantity:
    """The share with negative sign where the tangent directions hold *less* gradient than average."""
    return -reading.quantity if _below(reading) else reading.quantity


def _below(reading: Row) -> bool:
    return bool(re.search(r"\bbelow\b", reading.note)) and not re.search(r"\babove\b", reading.note)


def _share_sentence(parts: Parts, part: Part) -> str:
    text = f"the tangent directions hold a share of {parts['share']} of the gradients' spectral anisotropy, the "
    text += f"unevenness of their energy over directions; compared with normal directions that is {part} more, "
    remarks, lacking = [], parts["sites and steps below average"].effect
    if lacking > 0:
        remarks.append(f"at {100 * lacking:.0f} % of the sites and steps it is a lack of gradient and counts as minus")
    if gain := parts.get(_GAIN):
        compared = "more without them than without normal ones"
        remarks.append(f"IsoScore*, a measure of evenness, changes by {gain} {compared}")
    return text + part.outcome + (f" ({'; '.join(remarks)})" if remarks else "")


# -- how the tangent geometry forms ------------------------------------------------------------------------------------


@claim(of=models, source=SOURCE, metrics=ENERGY_METRICS, margin=MARGIN, about="training")
def emerges_early_and_persists(run: Run) -> Finding:
    """Tangent enrichment is absent at initialisation, emerges in the first tenth of training and is still there at the
    end.

    Enrichment early minus 1, early minus the start, at the end minus 1, and at chance at the start.

    All are means over the sites measured at all three steps. At chance = the interval at step 0 ends below 1 + margin.
    """
    enrichment = run.needed("gradient_enrichment")
    steps = evidence.steps_of(enrichment)
    if not steps or steps[0] != 0:
        raise Missing("gradient_enrichment at step 0, before any training", _SCHEDULE)
    last = steps[-1]
    early = max((step for step in steps if 0 < step <= EARLY * last), default=0)
    if not early:
        raise Missing(f"measured step in the first tenth of the {last} steps", _SCHEDULE)
    sites = [c.site for c in enrichment if all(c.step == 0 and c._replace(step=s) in enrichment for s in (early, last))]
    if not sites:
        raise Missing("site measured at the start, early and at the end alike", "measure the same sites at every step")
    if any("in-sample" in enrichment[Cell(step, *site)].note for step in (0, early) for site in sites):
        how = "choose fit=refit: a frozen proxy is fitted on steps after these"
        raise Missing("directions that are no later than step 0 and the early step", how)
    start_, early_, last_ = (average(enrichment, [Cell(step, *site) for site in sites]) for step in (0, early, last))
    one = Quantity.constant(1.0)
    tests = {step: {"p": random_p(run, step=step), "tested": True} for step in (early, last)}
    parts = [
        Part.of("early over chance", early_ - one, margin=MARGIN, **tests[early]),
        Part.of("early over the start", early_ - start_, margin=MARGIN),
        Part.of("end over chance", last_ - one, margin=MARGIN, **tests[last]),
        # reversed: 1 minus the start must exceed minus the margin
        Part.of("at chance at the start", one - start_, margin=-START_MARGIN, p=math.nan, guard=True),
        *Part.describe_all({"at the start": start_, "early": early_, "at the end": last_}),
        *Part.describe_all({"early step": early, "last step": last}),
    ]
    names = [part.name for part in parts]
    aspects = {"emerges early": tuple(names[:2]), "persists": (names[2],), "absent at the start": (names[3],)}
    details = {"starts_at_chance": {"holds": True, "fails": False}.get(parts[3].status), "courses": _courses(run)}

    def sentence(parts: Parts, part: Part) -> str:
        text = f"of the gradients' energy the tangent directions hold {parts['at the start']} times what chance would "
        text += f"give at step 0, {parts['early']} times at step {parts['early step'].number} and "
        text += f"{parts['at the end']} times at step {parts['last step'].number}; "
        text += _AT_START[parts["at chance at the start"].status]
        if part.guard:
            return f"{text}, which decides"
        return f"{text}, and the comparison that decides, {_DECIDING[part.name]}, is {part}, {part.outcome}"

    return Finding(parts, sentence, details, aspects=aspects)


def _courses(run: Run) -> dict[str, Any]:
    """Enrichment over training for all rows and for masked and unmasked rows, with the step of onset."""
    courses: dict[str, Any] = {}
    for group in ("", "masked", "unmasked"):
        if found := run.tangent("gradient_enrichment", group):
            layers = []
            for site in sorted({cell.site for cell in found}):
                course = {cell.step: reading.quantity for cell, reading in found.items() if cell.site == site}
                peak = max(course, key=lambda step: course[step].value)
                place = dict(zip(("stack", "layer", "kind"), site, strict=True))
                layers.append({**place, "onset": onset(course), "peak_step": peak, "peak": course[peak].value})
            whole = onset(evidence.means_by(found, lambda cell: cell.step))
            courses[group or "all"] = {"steps": step_records(found), "onset": whole, "layers": layers}
    return courses


def onset(course: dict[Any, Quantity]) -> int | None:
    """The first step at which the interval exceeds the chance level by the margin; None if there is none."""
    return next((step for step, q in course.items() if q.interval()[0] > 1 + MARGIN), None)


_LIMIT = f"{figure(1 + START_MARGIN)} times chance"
_AT_START = {
    "holds": f"enrichment is absent at the start (below {_LIMIT})",
    "fails": f"it is there before any training (beyond {_LIMIT})",
    "undecided": f"whether it is absent at the start cannot be told (at step 0 it may lie on either side of {_LIMIT})",
}
_DECIDING = {
    "early over chance": "the early step minus chance",
    "early over the start": "the early step minus step 0",
    "end over chance": "the last step minus chance",
}


@claim(of=models, source=SOURCE, metrics=("amplification", "amplification_p"), margin=GROWTH_MARGIN, about="training")
def amplified(run: Run) -> Finding:
    """Training amplifies tangent directions: activations grow more along them than along controls.

    Mean share of the growth of the activations' covariance inside the earlier directions, minus that of controls.
    """
    growth = run.needed("amplification")
    cells = trained(growth)
    tests = {"normal": {}, "random": {"p": exact_p(run, "amplification", p="amplification_p"), "tested": True}}
    parts = []
    for control, test in tests.items():
        gaps = evidence.differences(growth, run.tangent("amplification", control=control), fixed=True)
        if any(cell in gaps for cell in cells):
            parts.append(Part.of(control, average(gaps, cells), margin=GROWTH_MARGIN, **test))
        else:
            parts.append(Part.absent(control, Missing(f"amplification with control={control}"), margin=GROWTH_MARGIN))
    parts += Part.describe_all({_SHARE: average(growth, cells)})

    def sentence(parts: Parts, part: Part) -> str:
        text = f"of the growth of the activations' variance between measured steps a share of {parts[_SHARE]} "
        text += f"lies in the tangent directions fitted at the earlier step, {part} more than in {part.name} "
        return f"{text}directions, {part.outcome}"

    return Finding(parts, sentence, evidence.course_records(growth))


@claim(of=models, source=SOURCE, metrics=ENERGY_METRICS, margin=MARGIN, about="training")
def embedding_updates_aligned(run: Run) -> Finding:
    """Updates of the embedding table lie in the tangent directions more than in any control.

    Mean over measured steps of (energy of ΔW_E − control)/(r/d), decoupled weight decay taken out of ΔW_E.
    """
    parts = [*control_parts(run, of="update"), *described_energy(run, of="update")]
    if run.tangent("gradient_energy", of="update_raw"):
        raw = described_energy(run, of="update_raw")[0]
        parts.append(replace(raw, name="enrichment with weight decay left in"))
    groups = [group for group in run.groups("gradient_enrichment") if group.startswith("frequency:")]
    bins = {group: run.tangent("gradient_enrichment", group, of="update") for group in groups}
    frequency = {group: average(rows, trained(rows)).record() for group, rows in bins.items() if rows}
    details = {"steps": step_records(run.tangent("gradient_enrichment", of="update")), "frequency": frequency}
    return Finding(parts, _energy_sentence("energy of the embedding table's updates"), details)
