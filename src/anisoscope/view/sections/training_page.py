"""The page of a training run or a series of checkpoints: its summary in sentences, its loss, and all its sections.

Two values are called different only if their intervals do not overlap; steps and layers of one run are not independent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from anisoscope.results.query import Query, seeds_mean
from anisoscope.view import figure, page, subjects
from anisoscope.view.figure import Figure, Panel, Series, Time, series, value_axis
from anisoscope.view.page import DataTable, Fold, Heading, Key, Page, Prose, Section, Swatch, Swatches, TableCell, text
from anisoscope.view.plotly_renderer import panel_spec
from anisoscope.view.sections import drift, findings, gradients, provenance
from anisoscope.view.sections import shape as shapes
from anisoscope.view.sections.ablation import ablation_section
from anisoscope.view.sections.attention import attention_sections
from anisoscope.view.sections.drift import Comparison
from anisoscope.view.sections.findings import apart
from anisoscope.view.sections.frequency import frequency_section
from anisoscope.view.sections.gradients import ENERGY, Gradients
from anisoscope.view.sections.profiles import main_profiles, profile_panel
from anisoscope.view.sections.shape import Arm, arms_of
from anisoscope.view.sections.single_rows import concepts_section, row_parts
from anisoscope.view.subjects import STREAM, DrawnSite, ProfileRows, RunView, Subject, TrainingRows, known
from anisoscope.view.words import LOOP, OF_TRAINING, TANGENT, Catalogue, estimate, number, plural, site_phrase

SPECS = 4_000_000  # limit of the JSON of gradient figures in characters
SHOWN, ARMS = 4, 9  # numbers of subjects, or of arms (all seeds in one line), shown initially
TELL_EACH = 4  # with more subjects there are no sentences on each
LOGS = (("loss", "probe_loss"), ("gradient_norm",), ("learning_rate",))
TITLES = {"loss": "Loss", "gradient_norm": "Gradient norm", "learning_rate": "Learning rate"}
MOST = 240  # largest number of points of a logged line
THIN = 0.9


def training_page(
    runs: Sequence[RunView], catalogue: Catalogue, comparison: Comparison, head: Mapping[str, Any]
) -> Page:
    """The training page: verdicts, gradients, geometry over training, sections shared by all pages, and the record."""
    rows = TrainingRows(runs)
    verdicts = [verdict for run in runs for verdict in run.verdicts]
    energy, maps, frequency, elsewhere, found = _gradient_sections(rows, catalogue)
    shape = shapes.make_shape(rows, catalogue)
    shaped = shapes.shape_sections(rows, shape, row_parts(rows, shape, runs)) if shape else []
    claims = findings.verdict_claims(verdicts, subjects.random_models(rows.abouts)[0])
    left_out = [*found.left_out.values(), *(shape.left_out.values() if shape else ())]
    sections = [
        _summary(rows, comparison, head, verdicts, claims, found),
        energy,
        maps,
        *shaped,
        ablation_section(rows, catalogue, shape, verdicts) if shape else None,
        drift.modality_section(comparison, claimed=bool(claims)),
        drift.drift_section(comparison),
        *attention_sections(runs, catalogue),
        frequency,
        concepts_section([concept for run in runs for concept in run.concepts]),
        elsewhere,
        _loss_section(rows, catalogue, several_seeds=shape is not None and shape.seeds > 1),
        None if shape else _last_profiles(runs, catalogue, rows),
        _left_out(left_out),
        provenance.table_section(Query(*(run.table for run in runs)), most=provenance.PAGE_ROWS),
        provenance.dropped_section(rows.abouts, provenance.step_notes(rows, catalogue)),
        provenance.record_section(runs),
        provenance.glossary_section(catalogue, rows.metrics()),
    ]
    manner = "step by step" if _steps_words(rows) else "under its gradients"
    look: dict[str, Any] = {"deck": _deck(rows, head), "version": head["version"], "legend": _legend(rows)}
    shown = [section for section in sections if section is not None]
    return Page(head["title"], provenance.heading(head, manner), shown, **look)


def _gradient_sections(rows: TrainingRows, catalogue: Catalogue) -> tuple[Any, Any, Any, Any, Gradients]:
    """The sections on gradients in as much detail as fits on a page."""
    make = (gradients.energy_section, gradients.map_section, frequency_section, gradients.elsewhere_section)
    for detail in gradients.DETAILS[_likely(rows, catalogue) :]:
        found = Gradients(rows, catalogue, detail)
        energy, maps, frequency, elsewhere = (section(found) for section in make)
        figures = Page("", "", [section for section in (energy, maps, frequency, elsewhere) if section]).figures()
        if sum(len(json.dumps(panel_spec(panel))) for drawn in figures for panel in drawn.panels) <= SPECS:
            break
    return energy, maps, frequency, elsewhere, found


def _likely(rows: TrainingRows, catalogue: Catalogue) -> int:
    """The first level of detail that may fit, at about 150 characters per step, site and reading."""
    sites, readings = len(rows.sites([ENERGY])), len(gradients.readings_of(Gradients(rows, catalogue).keys([ENERGY])))
    each, levels = 150 * len(rows.subjects), gradients.DETAILS
    sizes = [each * min(sites, d.sites) * min(readings, d.readings) * min(len(rows.steps), d.steps) for d in levels]
    return next((i for i, size in enumerate(sizes) if size <= SPECS), len(levels) - 1)


def _steps_words(rows: TrainingRows) -> str:
    """The measured steps as text."""
    steps = rows.steps
    if not rows.dated or not steps:
        return ""
    if len(steps) == 1:
        return f"at step {steps[0]:,}"
    return f"at {plural(len(steps), 'step')} from {steps[0]:,} to {steps[-1]:,}"


def _deck(rows: TrainingRows, head: Mapping[str, Any]) -> str:
    when = _steps_words(rows)
    measured = "Measured" + (f" on {head['data']}" if head["data"] else "") + (f" {when}" if when else "")
    parts = [measured if head["data"] or when else "", head["started"]]
    return f"{', '.join(part for part in parts if part)}." if any(parts) else ""


def _legend(rows: TrainingRows) -> list[page.LegendEntry]:
    """Legend entries with colour and role of each subject; with many, only the first of each model is shown initially.

    Without gradient metrics the seeds of a model are drawn as one line and have one entry.
    """
    if len(rows.subjects) < 2:
        return []
    if rows.metrics().isdisjoint(TANGENT):
        arms = arms_of(rows)
        items = [_entry(replace(arm.subjects[0], label=arm.label), arm.index, shown=arm.index < ARMS) for arm in arms]
        return items if len(items) > 1 else []
    firsts = {next(x.index for x in rows.subjects if x.model == one.model) for one in rows.subjects}
    at_first = sorted(firsts)[:SHOWN] if len(rows.subjects) > SHOWN else [x.index for x in rows.subjects]
    return [_entry(one, one.index, shown=one.index in at_first) for one in rows.subjects]


def _entry(subject: Subject, hue: int, *, shown: bool) -> page.LegendEntry:
    role = subject.role if subject.role not in subject.label else ""
    return page.LegendEntry(subject.index, subject.label, hue % 8 + 1, role, subject.marker, shown)


def _summary(
    rows: TrainingRows, comparison: Comparison, head: Mapping[str, Any], verdicts: Sequence[Mapping[str, Any]],
    claims: Sequence[Mapping[str, Any]], found: Gradients,
) -> Section:  # fmt: skip
    """The summary: flagged checkpoints, verdicts, findings, warnings, and facts about the models."""
    seen = [*drift.modality_findings(comparison), *find_training(found)]
    parts: list[Any] = [*provenance.partial_banner(head), *_flag_parts(checkpoint_flags(rows))]
    if claims:
        parts += _verdict_parts(verdicts, claims, subjects.random_models(rows.abouts)[0])
        parts += [Heading("What was seen")] if seen else []
    parts += [page.Piece("findings", seen)] if seen else []
    facts = provenance.model_facts(rows.abouts, [{"Model": s.label, "Blocks": str(s.blocks)} for s in rows.subjects])
    facts = [fact for i, fact in enumerate(facts) if fact not in facts[:i]]  # seeds of one model give equal facts
    random = subjects.random_models(rows.abouts)[0]
    drawn = [fact for fact in facts if fact["Model"] in random]
    drawn = [] if len(drawn) == len(facts) else drawn
    parts += provenance.warnings_box(provenance.warnings(rows.abouts))
    parts += provenance.facts_parts([fact for fact in facts if fact not in drawn])
    if drawn:
        behind = provenance.facts_parts(drawn, "Models with random weights")
        parts.append(Fold(f"{plural(len(drawn), 'model')} with random weights", behind, css="behind"))
    title = "Verdicts" if claims else "Summary"
    return Section("summary", title, parts, title)


def _verdict_parts(
    verdicts: Sequence[Mapping[str, Any]], claims: Sequence[Mapping[str, Any]], random: Collection[str]
) -> list[Any]:
    scope = findings.common_scope(claims)
    words = (
        "{counts} A claim <em>holds</em> where the whole 95&nbsp;% interval of its effect lies beyond the margin, "
        "<em>fails</em> where it lies short of it, and is <em>undecided</em> otherwise. Each claim has intervals of "
        "its own kind, over contexts, layers, models or seeds; steps and layers of one run are not independent, so p "
        "is descriptive."
    )
    words += " Unless it says otherwise, a verdict speaks <em>{scope}</em>." if scope else ""
    several = len({str(v.get("subject") or "") for v in findings.measured(verdicts)}) > 1
    lead = Prose(text(words, counts=findings.verdict_counts(verdicts, random), scope=scope))
    return [lead, page.Verdicts(claims, "Model" if several else "", scope)]


def checkpoint_flags(rows: TrainingRows) -> list[tuple[str, str, str]]:
    """Problems of checkpoints in a series (repeated, missing, out of order, not finite), without duplicates."""
    found: dict[tuple[str, str, str], None] = {}
    for key in rows.keys.get("checkpoint", []):
        label = rows.subjects[key[0]].label if len(rows.subjects) > 1 else ""
        for row in rows.lines[key]:
            if row.value == 0.0 or not row.known:
                found[label, f"{row.step or 0:,}", _sentence(row.note or "no reason was recorded")] = None
    seen = {(step, note) for _, step, note in found}
    for entry in (e for about in rows.abouts for e in about.get("checkpoints") or [] if e.get("flags")):
        step = "–" if entry.get("step") is None else f"{entry['step']:,}"
        note = _sentence("; ".join(map(str, entry["flags"])))
        if (step, note) not in seen:
            found["", step, note] = None
    return sorted(found, key=lambda f: (f[0], int(f[1].replace(",", "")) if f[1] != "–" else -1))


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def _flag_parts(flags: Sequence[tuple[str, str, str]]) -> list[Any]:
    if not flags:
        return []
    first = 0 if any(model for model, *_ in flags) else 1  # a single model is not named
    what = "checkpoint is not what it" if len(flags) == 1 else "checkpoints are not what they"
    heads = ["Model", TableCell("Step", css="num"), "What was found"][first:]
    body = [[model, TableCell(step, css="num"), TableCell(note, css="prose")][first:] for model, step, note in flags]
    table: Any = DataTable([heads], [body], "Checkpoints", numeric=99)
    inside = Fold("All of them", [table]) if len(flags) > 12 else table
    title = Heading(f"{len(flags)} {what} should be")
    return [page.Box([title, inside], "flags", "Checkpoints that are not what they should be")]


def _loss_section(rows: TrainingRows, catalogue: Catalogue, *, several_seeds: bool) -> Section | None:
    """The section with what the training loop logged, for all models."""
    steps = [row.step or 0 for name in LOOP for key in rows.keys.get(name, []) for row in rows.lines[key]]
    time = Time.of(steps)
    panels = [panel for names in LOGS if (panel := _log_panel(rows, catalogue, names, time))] if time.long else []
    if not panels:
        return None
    words = "What the training loop logged, on the same axis of steps."
    if len(_legend(rows)) > 1:
        words += (
            " Colours are models; in the first figure the paler line is the training batch, the one with "
            "points the held-out probe."
        )
        words += " Thin lines are seeds, over them their mean." if several_seeds else ""
    return Section("course", "Loss", [Prose(words), Key(), Figure(tuple(panels))], "Loss")


def _log_panel(rows: TrainingRows, catalogue: Catalogue, names: Sequence[str], time: Time) -> Panel | None:
    drawn: list[Series] = []
    averaged, courses, arms = False, [], arms_of(rows)
    if not rows.metrics().isdisjoint(TANGENT):  # gradient sections show each seed
        arms = [Arm(one.index, one.label, one.model, one.role, one.blocks, (one,)) for one in rows.subjects]
    for arm in arms:
        for name in names:
            lines = [rows.logged(one, name) for one in arm.subjects]
            whole = seeds_mean(lines)
            look = _log_look(rows, catalogue, arm, name, both="loss" in names and len(names) > 1)
            averaged |= len(whole) > MOST
            if len(lines) > 1 and look["width"] > THIN:  # seeds are drawn only for the main line
                thin = look | {"colour": figure.faded(look["colour"], 0.35), "width": THIN, "size": 0.0}
                thin |= {"interval": False, "quiet": True}
                drawn += [shapes.logged_series(line, time, MOST, **thin) for line in lines if known(line)]
            if known(whole):
                drawn.append(shapes.logged_series(whole, time, MOST, **look))
                courses.append(f"{look['label']}: {gradients.course_words(known(whole))}")
    panel = Panel(time.axis(), series=tuple(drawn))
    values = figure.numbers_in([panel])
    if not values:
        return None
    there = [n for n in names if any(rows.logged(one, n) for one in rows.subjects)]
    caption = " ".join(catalogue.entry(n).description for n in there)
    caption += " Points are means over neighbouring steps." if averaged else ""
    title = TITLES[names[0]]
    return replace(panel, y=value_axis(values, log="learning_rate" not in names), title=title, caption=caption,
                   alt=f"{title} over steps. {'; '.join(courses[:6])}.")  # fmt: skip


def _log_look(rows: TrainingRows, catalogue: Catalogue, arm: Arm, metric: str, *, both: bool) -> dict[str, Any]:
    probe, seeds = metric == "probe_loss", f"mean of {len(arm.subjects)} seeds" if len(arm.subjects) > 1 else ""
    words = {"loss": "training", "probe_loss": "probe"}.get(metric, "") if both else ""
    parts = (arm.label if len(rows.subjects) > 1 else "", words, seeds)
    pale = both and not probe
    return {
        "label": " · ".join(part for part in parts if part) or catalogue.entry(metric).title,
        "colour": series(shapes.arm_hue(rows, arm), 0.55 if pale else 1.0),
        "width": THIN if pale and seeds else 1.9 if probe else 1.3,
        "size": 5.0 if probe else 0.0,
        "interval": probe and not seeds,
        "owner": arm.line,
    }


# -- profiles of a run with a single step ------------------------------------------------------------------------------


def _last_profiles(runs: Sequence[RunView], catalogue: Catalogue, rows: TrainingRows) -> Section | None:
    """Profiles over depth at the last step, as in the report of a single model."""
    last = []
    for run in runs:
        query = Query(run.table).where(head=None, kind=[*STREAM, "stage"], metric=lambda m: m not in OF_TRAINING)
        ends = {model: max((s for s in part.values("step") if s is not None), default=None)
                for model, part in query.groups("model").items()}  # fmt: skip
        kept = query.where(lambda row, ends=ends: row.step is None or row.step == ends[row.model])  # type: ignore[misc]
        last.append(replace(run, table=kept.table(run.about)))
    profiles = ProfileRows(last)
    if not len(profiles.query):
        return None
    shown = [p for p in main_profiles(profiles, catalogue) if p.values and not p.variant]
    main = catalogue.main({p.entry.name for p in shown})
    panels = tuple(profile_panel(p) for p in shown if p.entry.name in main)
    aligned = [s.model for s in profiles.subjects] == [s.model for s in rows.subjects]
    key: Any = Key()
    if not aligned:  # these lines have no entries in the page's legend, so they are never hidden
        panels = tuple(replace(p, series=tuple(replace(s, owner=None) for s in p.series)) for p in panels)
        key = Swatches([Swatch(s.label, series(s.index)) for s in profiles.subjects])
    title = "Over depth at the last step" if _steps_words(rows) else "Over depth"
    return Section("geometry", "Geometry", [Heading(title), key, Figure(panels)], "Geometry") if panels else None


def _left_out(parts: Sequence[str]) -> Section | None:
    if not parts:
        return None
    words = "To stay a page that opens quickly, the figures carry {what}; <code>table.parquet</code> has everything."
    return Section("left-out", "", [Prose(text(words, what=", ".join(dict.fromkeys(parts))))])


def find_training(found: Gradients) -> list[page.PageFinding]:
    """All findings of a training table, most important first."""
    texts_by_topic = {
        "Energy": _each(found, _energy),
        "Layers": _each(found, _layers),
        "Frequency": _each(found, _frequency),
        "Loss": _each(found, _loss),
        "Caution": _caution(found),
    }
    whole = {
        topic: tuple(text.replace(" ± ", "\u00a0±\u00a0") for text in texts) for topic, texts in texts_by_topic.items()
    }
    return [page.PageFinding(topic, texts) for topic, texts in whole.items() if texts]


def _each(found: Gradients, tell: Callable[[Gradients, Subject], str]) -> list[str]:
    if len(found.rows.subjects) > TELL_EACH:
        return []
    texts = [(subject, text) for subject in found.rows.subjects if (text := tell(found, subject))]
    if len(found.rows.subjects) > 1:
        return [f"{subject.label}: {text}" for subject, text in texts]
    return [_sentence(text) for _, text in texts]


def tell(mark: Any) -> str:
    return estimate(mark.value, mark.low, mark.high)


def _middle(found: Gradients, subject: Subject) -> DrawnSite | None:
    sites = [s for s in found.rows.sites([ENERGY]) if found.whole(subject, ENERGY, s)]
    return sites[found.rows.middle(sites)] if sites else None


def _at(found: Gradients, mark: Any) -> str:
    return f" at step {mark.step or 0:,}" if found.rows.dated else ""


def _finally(found: Gradients) -> str:
    """The phrase "at the last step " for tables with several steps, else empty."""
    return "at the last step " if len(found.rows.steps) > 1 else ""


def _energy(found: Gradients, subject: Subject) -> str:
    """Sentences on the course of energy in the middle of the model, compared with chance and the normal control."""
    site = _middle(found, subject)
    line = known(found.whole(subject, ENERGY, site)) if site else []
    if not site or not line:
        return ""
    peak = max(line, key=lambda m: m.value)
    text = f"the proxy of rank {found.rank} holds {tell(line[0])} of the gradient energy "
    text += f"{site_phrase(site.layer, site.kind)}{_at(found, line[0])}"
    if len(line) > 1:
        text += f", {tell(line[-1])}{_at(found, line[-1])}"
        if peak not in (line[0], line[-1]) and apart(peak, line[-1]):
            text += f", after a peak of {tell(peak)}{_at(found, peak)}"
    chance = found.chances[subject.index]
    text += f"; chance is {number(chance)}." if chance else "."
    return text + _controls(found, subject, site, line)


def _controls(found: Gradients, subject: Subject, site: DrawnSite, line: Sequence[Any]) -> str:
    normal = [m.high for m in found.whole(subject, ENERGY, site, control="normal") if m.interval]
    text = f" Subspaces orthogonal to it stay below {number(max(normal))}." if normal else ""
    pca = {m.step: m.value for m in known(found.whole(subject, ENERGY, site, proxy="pca"))}
    gaps = [abs(m.value - pca[m.step]) for m in line if m.step in pca]
    if gaps and found.proxy != "pca":
        text += f" PCA of the same rank differs by at most {number(max(gaps), 2)}."
    return text


def _layers(found: Gradients, subject: Subject) -> str:
    """Sentences on the layers with the highest and lowest energy at the last step."""
    ends = [(site, row) for site in found.rows.sites([ENERGY]) if (row := found.last(subject, ENERGY, site))]
    if len(ends) < 2:
        return ""
    high, low = (f(ends, key=lambda pair: pair[1].value) for f in (max, min))
    if not apart(high[1], low[1]):
        ends_words = f"{number(low[1].value)} and {number(high[1].value)}"
        return f"{_finally(found)}all layers lie between {ends_words}, which the intervals cannot tell apart."
    places = [f"{tell(mark)} {site_phrase(site.layer, site.kind)}" for site, mark in (high, low)]
    return f"{_finally(found)}energy is highest with {places[0]}, lowest with {places[1]}."


def _frequency(found: Gradients, subject: Subject) -> str:
    """Sentences on the most frequent bin and the rarest, in the middle of the model at the last step."""
    site = _middle(found, subject)
    bins = sorted({k[3] for k in found.keys([gradients.ENRICHMENT]) if k[3].startswith("frequency:")})
    if not site or len(bins) < 2:
        return ""
    first, last = (found.last(subject, gradients.ENRICHMENT, site, group=group) for group in (bins[0], bins[-1]))
    if first is None or last is None:
        return ""
    text = f"{_finally(found)}enrichment {site_phrase(site.layer, site.kind)} is {tell(first)} for the most "
    text += f"frequent tokens and {tell(last)} for the rarest"
    return text + ("." if apart(first, last) else ", which the intervals cannot tell apart.")


def _loss(found: Gradients, subject: Subject) -> str:
    for metric, name in (("probe_loss", "the loss on the held-out probe"), ("loss", "the training loss")):
        line = known(found.rows.logged(subject, metric))
        if not line:
            continue
        ends = [f"{tell(mark)} at step {mark.step or 0:,}" for mark in (line[0], line[-1])]
        if len(line) == 1:
            return f"{name} is {tell(line[0])}."
        if tell(line[0]) == tell(line[-1]):
            return f"{name} is {ends[0]} and at step {line[-1].step or 0:,}."
        return f"{name} {'falls' if line[-1].value < line[0].value else 'goes'} from {ends[0]} to {ends[1]}."
    return ""


def _caution(found: Gradients) -> list[str]:
    keys = found.keys(found.rows.metrics())
    texts = []
    if any("fewer than 10 d" in mark.note for key in keys for mark in found.rows.lines[key]):
        texts.append("Fewer than 10 d rows at some sites: shares of anisotropy are then rough.")
    if found.rows.dated and len({subject.seed for subject in found.rows.subjects}) == 1:
        texts.append("One seed of each model: what is said holds for this run, not for models like it.")
    return texts
