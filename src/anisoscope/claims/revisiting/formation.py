"""Claims of *Revisiting Anisotropy: The Geometry of Learning Dynamics* about how the tangent geometry forms.

When it emerges and whether it stays, what training amplifies, and where the updates of the embedding table lie; early
and late in training are judged apart (`revisiting.period`).
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Any

from anisoscope.claims.engine import evidence
from anisoscope.claims.engine.claim import ALPHA, Finding, Part, Parts, claim
from anisoscope.claims.engine.evidence import Missing, NotHere, Run, average, figure, models, step_records
from anisoscope.claims.revisiting.determined import undetermined
from anisoscope.claims.revisiting.period import (
    FIT_WORDS,
    REFIT,
    Period,
    main_fit,
    period_aspects,
    periods,
    told_by_period,
)
from anisoscope.claims.revisiting.reading import Read, depends_on_readings, reading_parts
from anisoscope.claims.revisiting.tangent import (
    CONTROL_WORDS,
    ENERGY_METRICS,
    MARGIN,
    RANK_FREE,
    SOURCE,
    control_parts,
    described_energy,
    energy_parts,
    energy_sentence,
    exact_p,
    random_p,
    trained,
)
from anisoscope.results.quantity import Quantity

START_MARGIN = MARGIN  # enrichment above 1 at step 0 that still counts as chance
GROWTH_MARGIN = 0.05
KEPT = 0.5  # part of the early excess that must be left late in training; ours
_SHARE = "share of growth"
_SCHEDULE = "a schedule such as log_spaced() measures it"


@claim(of=models, source=SOURCE, metrics=ENERGY_METRICS, margin=MARGIN, about="training")
def emerges_early_and_persists(run: Run) -> Finding:
    """Tangent enrichment is absent at initialisation, emerges in the first third of the measured steps and persists in
    the last third.

    Enrichment early minus 1 and minus the start; late minus 1; both against every control; at chance at the start.

    All are means over the sites measured at the start, early and late. At chance = the interval at step 0 ends below
    1 + margin. Early directions are refitted at every step, late ones frozen where the table has them. It persists if
    late enrichment is beyond chance and beyond every control by the margin, and if half of the early excess over chance
    at least is left (our rule): what is barely above chance at the end has not persisted.
    """
    early, late = _early_and_late(run)
    parts = _formation_parts(run)
    aspects: dict[str, tuple[str, ...]] = {
        "emerges early": ("early over chance", "early over the start", *_of_period(parts, early)),
        "persists": ("late over chance", "what is left of the early excess", *_of_period(parts, late)),
        "absent at the start": ("at chance at the start",),
    }
    absent = next(part for part in parts if part.guard).status
    details: dict[str, Any] = {"starts_at_chance": {"holds": True, "fails": False}.get(absent)}
    details |= {"courses": _courses(run), "fit": late.fit, "periods": {p.name: [*p.steps] for p in (early, late)}}

    def sentence(parts: Parts, part: Part) -> str:
        text = f"of the gradients' energy the tangent directions hold {parts['at the start']} times what chance would "
        text += f"give at step 0, {parts['early']} times early ({FIT_WORDS[early.fit]}) and {parts['late']} times late "
        # whether or not the verdict is left open
        text += f"({FIT_WORDS[late.fit]}); {_AT_START[replace(parts['at chance at the start'], reason='').status]}"
        if part.guard:
            return f"{text}, which decides"
        period, _, control = part.name.partition(": ")
        words = f"the lead {period} over {CONTROL_WORDS[control]}" if control else _DECIDING[part.name]
        return f"{text}, and the comparison that decides, {words}, is {part}, {part.outcome}"

    def needed(read: Read) -> list[Part]:
        return [part for part in _formation_parts(read(run)) if part.needed]

    settle = depends_on_readings()
    return Finding([*parts, *reading_parts(needed, [run])], sentence, details, aspects=aspects, settle=settle)


def _early_and_late(run: Run) -> tuple[Period, Period]:
    early, *rest = periods(run, "gradient_enrichment", fit=main_fit(run))
    if 0 not in evidence.steps_of(run.needed("gradient_enrichment", fit=REFIT)):
        raise Missing("gradient_enrichment at step 0, before any training", _SCHEDULE)
    if not rest:
        raise Missing("two measured steps after initialisation", _SCHEDULE)
    return early, rest[0]


def _of_period(parts: Sequence[Part], period: Period) -> list[str]:
    return [part.name for part in parts if part.name.startswith(f"{period.name}: ")]


def _formation_parts(run: Run) -> list[Part]:
    """What `emerges_early_and_persists` compares, and the three means."""
    early, late = _early_and_late(run)
    enrichment = run.needed("gradient_enrichment", fit=REFIT)
    ends = run.needed("gradient_enrichment", fit=late.fit)
    cells = {"early": early.cells(enrichment), "late": late.cells(ends)}
    starting = {cell.site for cell in enrichment if cell.step == 0}
    sites = set.intersection(starting, *({cell.site for cell in each} for each in cells.values()))
    if not sites:
        raise Missing("site measured at the start, early and late alike", "measure the same sites at every step")
    cells = {name: [cell for cell in each if cell.site in sites] for name, each in cells.items()}
    start_ = average(enrichment, [cell for cell in enrichment if cell.step == 0 and cell.site in sites])
    early_, late_ = average(enrichment, cells["early"]), average(ends, cells["late"])
    one = Quantity.constant(1.0)
    open_ = [undetermined(run, cells[p.name], fit=p.fit) for p in (early, late)]
    tests = [
        {"p": random_p(run, step=evidence.last_step(cells[p.name]), fit=p.fit), "tested": True, **doubt}
        for p, doubt in zip((early, late), open_, strict=True)
    ]
    either = open_[1] or open_[0]
    controls = [part for period in (early, late) for part in control_parts(run, period)]
    return [
        Part.of("early over chance", early_ - one, margin=MARGIN, **tests[0]),
        Part.of("early over the start", early_ - start_, margin=MARGIN, **open_[0]),
        Part.of("late over chance", late_ - one, margin=MARGIN, **tests[1]),
        Part.of("what is left of the early excess", (late_ - one) - (early_ - one) / (1 / KEPT), margin=0.0, **either),
        *controls,
        _at_chance(run, start_),
        *Part.describe_all({"at the start": start_, "early": early_, "late": late_}),
    ]


def _at_chance(run: Run, start: Quantity) -> Part:
    """Whether enrichment is absent at the start: it must lie below chance plus the margin.

    That it is there, above chance, is said only where random subspaces say so, too.
    """
    excess = start - Quantity.constant(1.0)
    found = Part.of("at chance at the start", excess, margin=START_MARGIN, guard=True, below=True)
    p = random_p(run, step=0, fit=REFIT)
    if found.status == "fails" and p > ALPHA:
        return replace(found, reason=f"random subspaces do as well at the start too often (p = {figure(p)})")
    return found


def _courses(run: Run) -> dict[str, Any]:
    """Enrichment over training for all rows and for masked and unmasked rows, with the step of onset."""
    courses: dict[str, Any] = {}
    for group in ("", "masked", "unmasked"):
        if found := run.tangent("gradient_enrichment", group):
            layers, tests = [], run.tangent("gradient_p_holm", group)
            for site in sorted({cell.site for cell in found}):
                mine = {cell: reading for cell, reading in found.items() if cell.site == site}
                course = {cell.step: reading.quantity for cell, reading in mine.items()}
                chance = {cell.step for cell in mine if cell in tests and tests[cell].value > ALPHA}
                peak = max(course, key=lambda step: course[step].value)
                place = dict(zip(("stack", "layer", "kind"), site, strict=True))
                layers.append({**place, "onset": onset(course, chance), "peak_step": peak, "peak": course[peak].value})
            steps = evidence.means_by(found, lambda cell: cell.step)
            whole = onset(steps, {step for step in steps if random_p(run, group, step=step) > ALPHA})
            courses[group or "all"] = {"steps": step_records(found), "onset": whole, "layers": layers}
    return courses


def onset(course: dict[Any, Quantity], chance: Set[int | None] = frozenset()) -> int | None:
    """The first step at which the interval exceeds the chance level by the margin; None if there is none.

    At the steps of `chance` random subspaces do as well, so whatever the interval says nothing is above chance there.
    """
    return next((step for step, q in course.items() if step not in chance and q.interval()[0] > 1 + MARGIN), None)


_LIMIT = f"{figure(1 + START_MARGIN)} times chance"
_AT_START = {
    "holds": f"enrichment is absent at the start (below {_LIMIT})",
    "fails": f"it is there before any training (beyond {_LIMIT})",
    "undecided": f"whether it is absent at the start cannot be told (at step 0 it may lie on either side of {_LIMIT})",
}
_DECIDING = {
    "early over chance": "early minus chance",
    "early over the start": "early minus step 0",
    "late over chance": "late minus chance",
    "what is left of the early excess": "what is left late of the early excess, minus half of it",
}


@claim(of=models, source=SOURCE, metrics=("amplification", "amplification_p"), margin=GROWTH_MARGIN, about="training")
def amplified(run: Run) -> Finding:
    """Training amplifies tangent directions: activations grow more along them than along controls, early and late.

    Mean share of the growth of the activations' covariance inside the earlier directions, minus that of controls, early
    and late in training apart.
    """
    growth, found = run.needed("amplification", fit=REFIT), periods(run, "amplification", fit=REFIT)
    needed, shares = [], {}
    for period in found:
        cells = period.cells(growth)
        p = exact_p(run, "amplification", p="amplification_p", step=evidence.last_step(cells), fit=REFIT)
        tests: dict[str, dict[str, Any]] = {"normal": {}, "random": {"p": p, "tested": True}}
        for control, test in tests.items():
            drawn = run.tangent("amplification", control=control, fit=REFIT)
            gaps, name = evidence.differences(growth, drawn, fixed=True), f"{period.name}: {control}"
            if any(cell in gaps for cell in cells):
                needed.append(Part.of(name, average(gaps, cells), margin=GROWTH_MARGIN, **test))
            else:
                needed.append(Part.absent(name, Missing(f"amplification with {control=!s}"), margin=GROWTH_MARGIN))
        shares[f"{_SHARE} {period.name}"] = average(growth, cells)

    def sentence(parts: Parts, part: Part) -> str:
        def words(period: str, part: Part) -> str:
            text = (
                f"a share of {parts[f'{_SHARE} {period}']} lies in the tangent directions fitted at the earlier step, "
            )
            return f"{text}{part} more than in {part.name.split(': ')[1]} directions, {part.outcome}"

        start = "of the growth of the activations' variance between measured steps, "
        return start + told_by_period(parts, words)

    parts = [*needed, *Part.describe_all(shares)]
    details = {**evidence.course_records(growth), "periods": {p.name: [*p.steps] for p in found}}
    return Finding(parts, sentence, details, aspects=period_aspects(needed))


@claim(of=models, source=SOURCE, metrics=(*ENERGY_METRICS, "gradient_alignment"), margin=MARGIN, about="training")
def embedding_updates_aligned(run: Run) -> Finding:
    """Updates of the embedding table lie in the tangent directions more than in any control, early and late.

    Mean over steps of (energy of ΔW_E − control)/(r/d), early and late apart; decoupled weight decay is taken out.
    """
    if run.entry.get("modules"):
        raise NotHere("embedding table among its modules", "a monitor without modules= follows one")
    found = periods(run, "gradient_energy", fit=REFIT, of="update")
    needed = energy_parts(run, fit=REFIT, of="update")
    parts = [*needed, *described_energy(run, found, of="update")]
    if run.tangent("gradient_energy", of="update_raw", fit=REFIT):
        raw = described_energy(run, found, of="update_raw")
        parts += [replace(part, name=f"{part.name} with weight decay left in") for part in raw]
    aligned = run.rows("gradient_alignment", of="update")
    if late := found[-1].cells(aligned):
        parts += Part.describe_all({RANK_FREE: average(aligned, late)})
    parts += reading_parts(lambda read: energy_parts(read(run), fit=REFIT, of="update"), [run], fit=REFIT)
    groups = [group for group in run.groups("gradient_enrichment") if group.startswith("frequency:")]
    bins = {group: run.tangent("gradient_enrichment", group, of="update", fit=REFIT) for group in groups}
    frequency = {group: average(rows, trained(rows)).record() for group, rows in bins.items() if rows}
    steps = step_records(run.tangent("gradient_enrichment", of="update", fit=REFIT))
    details = {"steps": steps, "frequency": frequency, "periods": {p.name: [*p.steps] for p in found}}
    sentence, settle = energy_sentence("energy of the embedding table's updates", found), depends_on_readings()
    return Finding(parts, sentence, details, aspects=period_aspects(needed), settle=settle)
