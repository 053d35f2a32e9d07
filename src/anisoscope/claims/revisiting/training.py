"""Claims about how the tangent geometry forms: when it emerges, whether it stays, what training amplifies.

The early step is the last measured one within the first tenth of training and the end is the last measured one, so that
neither is selected by its result.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

from anisoscope.claims.engine import evidence
from anisoscope.claims.engine.claim import Finding, Part, Parts, Status, claim, outcome, span
from anisoscope.claims.engine.evidence import Cell, Missing, Run, average, figure, models, step_records
from anisoscope.claims.revisiting import tangent
from anisoscope.claims.revisiting.tangent import ENERGY_METRICS, MARGIN, SOURCE, described_energy, trained
from anisoscope.results.quantity import Quantity

EARLY = 0.1  # share of training that counts as early
START_MARGIN = MARGIN  # enrichment above 1 at step 0 that still counts as chance
GROWTH_MARGIN = 0.05
_SHARE = "share of growth"
_SCHEDULE = "a schedule such as log_spaced() measures it"


@claim(
    "emerges_early_and_persists",
    of=models,
    statement="Tangent enrichment is absent at initialisation, emerges in the first tenth of training and is still "
    "there at the end.",
    source=SOURCE,
    metrics=ENERGY_METRICS,
    margin=MARGIN,
)
def emerges_early_and_persists(run: Run) -> Finding:
    """Enrichment early minus 1, early minus the start, at the end minus 1, and at chance at the start.

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
    tests = {step: {"p": tangent.random_p(run, step=step), "tested": True} for step in (early, last)}
    parts = [
        Part.of("early over chance", early_ - one, margin=MARGIN, **tests[early]),
        Part.of("early over the start", early_ - start_, margin=MARGIN),
        Part.of("end over chance", last_ - one, margin=MARGIN, **tests[last]),
        # reversed: 1 minus the start must exceed minus the margin
        Part.of("at chance at the start", one - start_, margin=-START_MARGIN, p=math.nan, guard=True),
        *Part.describe_all({"at the start": start_, "early": early_, "at the end": last_}),
        *Part.describe_all({"early step": early, "last step": last}),
    ]
    aspects = {"emerges early": ("early over chance", "early over the start"), "persists": (parts[2].name,)}
    aspects["absent at the start"] = (parts[3].name,)
    details = {"starts_at_chance": {"holds": True, "fails": False}.get(parts[3].status), "courses": _courses(run)}
    return Finding(parts, _emergence_sentence, details, aspects=aspects)


def _courses(run: Run) -> dict[str, Any]:
    """Enrichment over training for all rows and for masked and unmasked rows, with the step of onset."""
    courses: dict[str, Any] = {}
    for group in ("", "masked", "unmasked"):
        if found := run.tangent("gradient_enrichment", group):
            layers = []
            for site in sorted({cell.site for cell in found}):
                course = {cell.step: reading.quantity for cell, reading in found.items() if cell.site == site}
                peak = max(course, key=lambda step: course[step].value)
                numbers = {"onset": onset(course), "peak_step": peak, "peak": course[peak].value}
                layers.append({**evidence.site_record(site), **numbers})
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


def _emergence_sentence(parts: Parts, status: Status, part: Part) -> str:
    early, last = (figure(parts[name].effect) for name in ("early step", "last step"))
    text = f"of the gradients' energy the tangent directions hold {span(parts['at the start'])} times what chance "
    text += f"would give at step 0, {span(parts['early'])} times at step {early} and {span(parts['at the end'])} times "
    text += f"at step {last}; {_AT_START[parts['at chance at the start'].status]}"
    if part.guard:
        return f"{text}, which decides"
    return f"{text}, and the comparison that decides, {_DECIDING[part.name]}, is {span(part)}, {outcome(status, part)}"


@claim(
    "amplified",
    of=models,
    statement="Training amplifies tangent directions: activations grow more along them than along controls.",
    source=SOURCE,
    metrics=("amplification", "amplification_p"),
    margin=GROWTH_MARGIN,
)
def amplified(run: Run) -> Finding:
    """Mean share of the growth of the activations' covariance inside the earlier directions, minus that of controls."""
    growth = run.needed("amplification")
    cells = trained(growth)
    parts = []
    for control in ("normal", "random"):
        drawn = run.tangent("amplification", control=control)
        gaps = {c: growth[c].quantity - Quantity.constant(drawn[c].value) for c in cells if c in drawn}
        if not gaps:
            parts.append(Part.absent(control, Missing(f"amplification with control={control}"), margin=GROWTH_MARGIN))
            continue
        test: dict[str, Any] = {}
        if control == "random":
            test = {"p": tangent.exact_p(run, "amplification", p="amplification_p"), "tested": True}
        parts.append(Part.of(control, average(gaps, cells), margin=GROWTH_MARGIN, **test))
    parts.append(Part.described(_SHARE, average(growth, cells)))

    def sentence(parts: Parts, status: Status, part: Part) -> str:
        text = f"of the growth of the activations' variance between measured steps a share of {span(parts[_SHARE])} "
        text += f"lies in the tangent directions fitted at the earlier step, {span(part)} more than in {part.name} "
        return f"{text}directions, {outcome(status, part)}"

    return Finding(parts, sentence, {"steps": step_records(growth), "layers": evidence.layer_records(growth)})


@claim(
    "embedding_updates_aligned",
    of=models,
    statement="Updates of the embedding table lie in the tangent directions more than in any control.",
    source=SOURCE,
    metrics=ENERGY_METRICS,
    margin=MARGIN,
)
def embedding_updates_aligned(run: Run) -> Finding:
    """Mean over measured steps of (energy of ΔW_E − control)/(r/d), decoupled weight decay taken out of ΔW_E."""
    parts = [*tangent.control_parts(run, of="update"), *described_energy(run, of="update")]
    if run.tangent("gradient_energy", of="update_raw"):
        raw = described_energy(run, of="update_raw")[0]
        parts.append(replace(raw, name="enrichment with weight decay left in"))
    bins = {}  # enrichment of the updates in each frequency bin
    for group in run.groups("gradient_enrichment"):
        readings = run.tangent("gradient_enrichment", group, of="update")
        if group.startswith("frequency:") and readings:
            bins[group] = average(readings, trained(readings)).record()
    details = {"steps": step_records(run.tangent("gradient_enrichment", of="update")), "frequency": bins}
    sentence = functools.partial(tangent.energy_sentence, what="energy of the embedding table's updates")
    return Finding(parts, sentence, details)
