"""Everything the training page is made of."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anisoscope.view.catalogue import Catalogue
from anisoscope.view.charts import Desk
from anisoscope.view.concepts import concept_cards
from anisoscope.view.inputs import random_models
from anisoscope.view.modalities import modality_findings
from anisoscope.view.records import dropped, model_facts, settings
from anisoscope.view.sections import shared_sections, write_section_figures
from anisoscope.view.series import Sheet, Source
from anisoscope.view.shape_arms import arms_of
from anisoscope.view.shape_figures import write_shape_figures
from anisoscope.view.shape_sections import checkpoint_flags, shape_section
from anisoscope.view.traces import MARKERS, Spec
from anisoscope.view.training import TANGENT, History, Learner
from anisoscope.view.training_board import DETAILS, Board
from anisoscope.view.training_course import course_section, elsewhere_section
from anisoscope.view.training_energy import energy_section, map_section
from anisoscope.view.training_figures import write_training_figures
from anisoscope.view.training_findings import find_training
from anisoscope.view.training_frequency import frequency_section
from anisoscope.view.training_records import last_rows, page_table, step_notes
from anisoscope.view.training_words import entry_of, ordered
from anisoscope.view.verdicts import common_scope, measured, verdict_claims, verdict_counts
from anisoscope.view.warned import warnings
from anisoscope.view.words import plural

if TYPE_CHECKING:
    from anisoscope.view.report import RunView

SPECS = 4_000_000  # characters of JSON that figures may take
SHOWN, ARMS = 4, 9  # learners shown at first; arms, whose seeds are drawn together


def training_context(folder: Path, runs: Sequence[RunView], catalogue: Catalogue) -> dict[str, Any]:
    """What the template is given; writes the vector figures into the folder on the way."""
    sources = [Source(run.table, run.about, run.path) for run in runs]
    history, shared = History(sources), shared_sections(sources, catalogue)
    sections, specs, left_out = _sections(history, catalogue, runs)
    # the views over training show the last step too
    profiles, profile_specs = ({"charts": []}, {}) if sections["shape"] else _profiles(sources, catalogue, history)
    verdicts = [verdict for run in runs for verdict in run.verdicts]
    figures = write_training_figures(folder, history)
    figures += write_shape_figures(folder, history, catalogue, verdicts)
    figures += write_section_figures(folder, shared)
    random, _ = random_models([run.about for run in runs])
    claims = verdict_claims(verdicts, random)
    return {
        **sections,
        **shared.sections,
        **_bookkeeping(runs, history, catalogue),
        "claims": claims,
        "scope": common_scope(claims),
        "counts": verdict_counts(verdicts, random),
        "flags": checkpoint_flags(history, [run.about for run in runs]),
        "subjects": len({str(v.get("subject") or "") for v in measured(verdicts)}),
        "concepts": concept_cards([concept for run in runs for concept in run.concepts]),
        "findings": [*modality_findings(shared.comparison), *find_training(history)],
        "legend": _legend(history),
        "measured": _measured(history),
        "profiles": profiles,
        "left_out": list(left_out.values()),
        "csv": page_table(sources, catalogue),
        "figures": sorted({f"{path.parent.name}/{path.name.rsplit('.', 1)[0]}" for path in figures}),
        "specs": specs | profile_specs | shared.specs,
    }


def _bookkeeping(runs: Sequence[RunView], history: History, catalogue: Catalogue) -> dict[str, Any]:
    abouts = [run.about for run in runs]
    return {
        **_apart(_facts(abouts, history), random_models(abouts)[0]),
        "means": {},
        "warnings": warnings(abouts),
        "dropped": dropped(abouts),
        "notes": step_notes(history, catalogue),
        "settings": [settings(run.about, run.path) for run in runs],
        "glossary": [entry_of(catalogue, name) for name in ordered(catalogue, history.metrics())],
    }


def _sections(
    history: History, catalogue: Catalogue, runs: Sequence[RunView]
) -> tuple[dict[str, Any], dict[str, Spec], dict[str, str]]:
    """The sections in as much detail as a page can carry."""
    for detail in DETAILS[_likely(history) :]:
        board = Board(history, catalogue, detail)
        sections = {
            "energy": energy_section(board),
            "maps": map_section(board),
            "frequency": frequency_section(board),
            "course": course_section(board),
            "elsewhere": elsewhere_section(board),
            "shape": shape_section(board, runs),
        }
        if len(json.dumps(board.specs)) <= SPECS:
            break
    return sections, board.specs, board.left_out


def _likely(history: History) -> int:
    """The first level of detail worth trying: about 150 characters for a step of a site in a reading."""
    metrics, learners = ["gradient_energy"], len(history.learners)
    sites, readings, steps = len(history.sites(metrics)), len(history.readings(metrics)), len(history.steps())
    sizes = [150 * learners * min(sites, d.sites) * min(readings, d.readings) * min(steps, d.steps) for d in DETAILS]
    return next((i for i, size in enumerate(sizes) if size <= SPECS), len(DETAILS) - 1)


def _profiles(
    sources: Sequence[Source], catalogue: Catalogue, history: History
) -> tuple[dict[str, Any], dict[str, Spec]]:
    """The geometry at the last step over depth, as the report of a single model draws it."""
    sheet = Sheet(last_rows(sources), catalogue)
    if not sheet.records:
        return {"charts": []}, {}
    desk = Desk(sheet)
    charts = desk.profiles()["main"]
    specs = {f"profile-{chart.id}": desk.specs[chart.id] for chart in charts}
    aligned = [s.model for s in sheet.subjects] == [learner.model for learner in history.learners]
    if not aligned:  # lines of this section are not those of the page's legend: they stay when others are hidden
        for trace in (trace for spec in specs.values() for trace in spec["data"]):
            trace.pop("meta", None)
    renamed = [replace(chart, id=f"profile-{chart.id}") for chart in charts]
    return {"charts": renamed, "aligned": aligned, "legend": desk.legend()}, specs


def _legend(history: History) -> list[dict[str, Any]]:
    """Colour and role of each learner; of many, only the first of each model are shown at first.

    Where no gradients were measured, the seeds of a model are drawn together and have one entry.
    """
    if len(history.learners) < 2:
        return []
    if history.metrics().isdisjoint(TANGENT):
        arms = arms_of(history)
        items = [
            _legend_item(replace(arm.learners[0], label=arm.label), shown=arm.index < ARMS)
            | {"colour": arm.index % 8 + 1}
            for arm in arms
        ]
        return items if len(items) > 1 else []
    firsts = {next(x.index for x in history.learners if x.model == one.model) for one in history.learners}
    at_first = sorted(firsts)[:SHOWN] if len(history.learners) > SHOWN else [x.index for x in history.learners]
    return [_legend_item(learner, shown=learner.index in at_first) for learner in history.learners]


def _legend_item(learner: Learner, *, shown: bool) -> dict[str, Any]:
    item = {"index": learner.index, "colour": learner.index % 8 + 1, "label": learner.label, "shown": shown}
    role = learner.role if learner.role not in learner.label else ""
    return item | {"role": role, "mark": MARKERS.get(learner.role, "circle")}


def _measured(history: History) -> str:
    """At which steps."""
    steps = history.steps()
    if not history.dated or not steps:
        return ""
    if len(steps) == 1:
        return f"at step {steps[0]:,}"
    return f"at {plural(len(steps), 'step')} from {steps[0]:,} to {steps[-1]:,}"


def _facts(abouts: Sequence[Mapping[str, Any]], history: History) -> list[dict[str, str]]:
    if any(about.get("models") for about in abouts):
        facts = model_facts(Sheet([], Catalogue({})), abouts)
        return [fact for i, fact in enumerate(facts) if fact not in facts[:i]]  # seeds of one model are alike
    return [{"Model": learner.label, "Blocks": str(learner.blocks)} for learner in history.learners]


def _apart(facts: Sequence[dict[str, str]], random: Collection[str]) -> dict[str, list[dict[str, str]]]:
    """Models with random weights are folded away where there are others."""
    drawn = [fact for fact in facts if fact["Model"] in random]
    if len(drawn) == len(facts):
        return {"models": list(facts), "random_facts": []}
    return {"models": [fact for fact in facts if fact not in drawn], "random_facts": drawn}
