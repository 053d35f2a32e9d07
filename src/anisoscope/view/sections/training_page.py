"""The page of a training run or a series of checkpoints: its summary in sentences, its loss, and all its sections.

Two values are called different only if their intervals do not overlap; steps and layers of one run are not independent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

from anisoscope.results.query import Query, with_options
from anisoscope.results.row import envelope, largest_gap, median_ratio, seeds_mean
from anisoscope.view import figure, page, subjects
from anisoscope.view.figure import Figure, Panel, Time, series, value_axis
from anisoscope.view.headline import headline
from anisoscope.view.page import (
    DataTable,
    Fold,
    Heading,
    Hero,
    Key,
    Page,
    Prose,
    Section,
    Swatch,
    Swatches,
    TableCell,
    text,
)
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
from anisoscope.view.sections.shape import Arm, legend_arms
from anisoscope.view.sections.single_rows import concepts_section, row_parts
from anisoscope.view.subjects import DrawnSite, ProfileRows, RunView, Subject, TrainingRows, in_stream, known
from anisoscope.view.words import OF_TRAINING, TANGENT, Catalogue, estimate, number, plural, site_phrase

SPECS = 2_000_000  # limit of the JSON of gradient figures in characters
SHOWN, ARMS = 4, 9  # numbers of subjects, or of arms (all seeds in one line), shown initially
TELL_EACH = 4  # with more subjects there are no sentences on each
LOGS = (("loss", "probe_loss"), ("gradient_norm",), ("learning_rate",))
TITLES = {"loss": "Loss", "gradient_norm": "Gradient norm", "learning_rate": "Learning rate"}
MOST = 240  # largest number of points of a logged line
THIN = 0.9


def training_page(
    runs: Sequence[RunView], catalogue: Catalogue, comparison: Comparison, head: Mapping[str, Any]
) -> Page:
    """The training page: the finding, the hero, verdicts; gradients, geometry over training, and the record."""
    rows = TrainingRows(runs)
    verdicts = [verdict for run in runs for verdict in run.verdicts]
    (energy, maps, frequency, elsewhere), found = _gradient_sections(rows, catalogue)
    shape = shapes.make_shape(rows, catalogue)
    seen = {one.topic: one.texts for one in (*drift.modality_findings(comparison), *find_training(found))}
    sections = [
        _found(energy, [_energy_told(found)]),
        _found(maps, seen.get("Layers")),
        *(shapes.shape_sections(rows, shape, row_parts(rows, shape, runs)) if shape else ()),
        ablation_section(rows, catalogue, shape, verdicts) if shape else None,
        _found(drift.modality_section(comparison, claimed=bool(verdicts)), seen.get("Modality")),
        drift.drift_section(comparison),
        *attention_sections(runs, catalogue),
        _found(frequency, seen.get("Frequency")),
        concepts_section([concept for run in runs for concept in run.concepts]),
        elsewhere,
        _found(_loss_section(rows, catalogue), [_loss_told(found)]),
        None if shape else _last_profiles(runs, catalogue, rows),
        _seen_section(rows, seen),
        _left_out([*found.left_out.values(), *(shape.left_out.values() if shape else ())]),
        provenance.table_section(Query(*(run.table for run in runs)), most=provenance.PAGE_ROWS),
        provenance.dropped_section(rows, catalogue),
        provenance.record_section(runs),
        provenance.glossary_section(catalogue, rows.metrics()),
    ]
    manner = "step by step" if len(rows.steps) > 1 else "under its gradients"
    title = f"The geometry of {head['title']}, {manner}"
    told = seen.get("Energy") or seen.get("Modality") or seen.get("Loss") or (title,)
    study = next((str(about.get("study")) for about in rows.abouts if about.get("study")), "")
    claimed = bool(findings.measured(verdicts))
    return Page(
        title,
        headline(verdicts, study) or _first_sentence(told[0]),
        [section for section in sections if section is not None],
        deck=provenance.rests_on(head, rows.abouts, _steps_words(rows), _seed_count(rows)),
        hero=training_hero(rows, found, shape, comparison),
        verdicts=verdicts if claimed else (),
        random=subjects.random_models(rows.abouts)[0],
        beside=[page.Piece("findings", [page.PageFinding(topic, texts) for topic, texts in seen.items()])],
        notes=[*provenance.grave_box(rows.abouts), *_flag_parts(checkpoint_flags(rows))],
        version=head["version"],
        legend=_legend(rows),
    )


def _found(section: Section | None, texts: Sequence[str] | None) -> Section | None:
    """A section with what was found there: the first sentence on each of the first two models."""
    if section is None or not texts or not texts[0]:
        return section
    return replace(section, finding=" ".join(map(_first_sentence, texts[:2])))


def _clauses(found: Gradients, tell: Callable[[Subject], str]) -> str:
    """What is told of the first few subjects, one of each model, as one enumeration."""
    every = list({one.model: one for one in reversed(found.rows.subjects)}.values())[::-1]
    told = [(one.label, words) for one in every[:HEROES] if (words := tell(one))]
    return "; ".join(f"{words} in {label}" if len(every) > 1 else words for label, words in told)


def _energy_told(found: Gradients) -> str:
    """One sentence on the share of gradients in the middle of each model, from the first step to the last."""

    def tell(one: Subject) -> str:
        site = _middle(found, one)
        line = known(found.whole(one, ENERGY, site)) if site else []
        if not line:
            return ""
        peak = max(line, key=lambda row: row.value)
        ends = number(line[0].value, 2) + (f" to {number(line[-1].value, 2)}" if len(line) > 1 else "")
        top = f", at most {number(peak.value, 2)} at step {peak.step or 0:,}" if peak not in (line[0], line[-1]) else ""
        return f"{ends}{top}"

    told, chance = _clauses(found, tell), next((c for c in found.chances.values() if c), None)
    when = ", first step to last" if len(found.rows.steps) > 1 else ""
    by = f"; by chance {number(chance, 2)}" if chance else ""
    return (
        f"Share of the gradients in the fitted directions, in the middle of the model{when}: {told}{by}."
        if told
        else ""
    )


def _loss_told(found: Gradients) -> str:
    def tell(one: Subject) -> str:
        lines = [known(found.rows.logged(one, name)) for name in ("probe_loss", "loss")]
        line = next((line for line in lines if line), [])
        return f"{number(line[0].value)} to {number(line[-1].value)}" if len(line) > 1 else ""

    told = _clauses(found, tell)
    return f"Loss from the first step to the last: {told}." if told else ""


def _first_sentence(words: str) -> str:
    """The first sentence of some words.

    >>> _first_sentence("It is 0.5. Then it falls.")
    'It is 0.5.'
    """
    return words.partition(". ")[0].rstrip(".") + "."


def _seed_count(rows: TrainingRows) -> str:
    seeds = {one.seed for one in rows.subjects if one.seed is not None}
    return plural(len(seeds), "seed") if seeds else ""


def _seen_section(rows: TrainingRows, seen: Mapping[str, Sequence[str]]) -> Section:
    """A folded section with everything that was seen, and facts about the models."""
    parts: list[Any] = []
    if seen:
        parts.append(page.Piece("findings", [page.PageFinding(topic, tuple(texts)) for topic, texts in seen.items()]))
    facts = provenance.model_facts(rows.abouts, [{"Model": s.label, "Blocks": str(s.blocks)} for s in rows.subjects])
    facts = [fact for i, fact in enumerate(facts) if fact not in facts[:i]]  # seeds of one model give equal facts
    random = subjects.random_models(rows.abouts)[0]
    untrained = [fact for fact in facts if fact["Model"] in random]
    trained = [fact for fact in facts if fact not in untrained]
    parts += provenance.facts_parts(trained or facts)
    if trained and untrained:
        behind = provenance.facts_parts(untrained, "Models with random weights")
        parts.append(Fold(f"{plural(len(untrained), 'model')} with random weights", behind, css="behind"))
    return Section("models", "What was seen, and in which models", parts, "Models")


# -- the hero ----------------------------------------------------------------------------------------------------------

FROZEN = "kept from early on, mean of layers"
HEROES = 3  # panels of the hero at most
HERO_HEIGHT = 300


def training_hero(
    rows: TrainingRows, found: Gradients, shape: shapes.Shape | None, comparison: Comparison
) -> Hero | None:
    """Tangent enrichment of all layers against the controls; without gradients modalities, or anisotropy over depth."""
    shown = list({one.model: one for one in reversed(rows.subjects)}.values())[::-1][:HEROES]
    several = len({one.model for one in rows.subjects}) > 1
    draw = _enrichment_over_steps if len(rows.steps) > 1 else _enrichment_over_depth
    drawn = [(one, panel) for one in shown if (panel := draw(found, one)).series]
    if drawn:
        y = figure.value_axis([*figure.numbers_in([panel for _, panel in drawn]), 1.0], "times chance")
        panels = [replace(panel, y=y, title=one.label if several else "", height=HERO_HEIGHT) for one, panel in drawn]
        look: dict[str, Any] = {"layout": "pairs" if len(panels) > 1 else "single", "files": {"hero": {}}}
        band = Swatch("controls, all layers", "@s7", band=True)
        kept = (
            [Swatch(FROZEN, "@ink", "dash")] if any("fit=frozen" in key.variant for key in found.keys([ENERGY])) else []
        )
        key = [page.Ramp("first layer", "last"), Swatches([*kept, band, page.CHANCE])] if len(rows.steps) > 1 else []
        caption = (
            "Share of the gradients in directions fitted on activations alone, as multiples of chance"
            + (": a line for each layer, refitted at every step" if len(rows.steps) > 1 else "")
            + ". Controls are directions that do not know the activations."
        )
        when = "over training" if len(rows.steps) > 1 else "over depth"
        return Hero(Figure(tuple(panels), **look), f"How far gradients follow activations, {when}", key, caption)
    if (modal := drift.modality_hero(comparison)) is not None:
        return modal
    return shapes.depth_hero(rows, shape) if shape is not None else None


def _chance_at(found: Gradients, one: Subject, site: DrawnSite) -> float | None:
    """Chance at one site, r/d: modules and stages of a model may have different widths."""
    both = [known(found.whole(one, metric, site)) for metric in (ENERGY, gradients.ENRICHMENT)]
    return median_ratio([(both[0], both[1])]) or found.chances[one.index]


def _times_chance(found: Gradients, one: Subject, site: DrawnSite, line: Sequence[Any]) -> list[Any]:
    """A line of energies as multiples of chance."""
    chance, scaled = _chance_at(found, one, site), []
    for row in line if chance else ():
        value, low, high = (end / chance for end in (row.value, row.low, row.high))
        interval = (low, high) if row.interval else None
        fields = {"value": value, "low": low, "high": high, "interval": interval, "step": row.step, "note": row.note}
        scaled.append(SimpleNamespace(**fields, sd=math.nan, known=row.known))
    return scaled


def _enrichment_over_steps(found: Gradients, one: Subject) -> Panel:
    sites, drawn = found.rows.sites([ENERGY]), []
    ends = envelope(
        _times_chance(found, one, site, found.whole(one, ENERGY, site, control=name))
        for site in sites
        for name in gradients.CONTROLS
    )
    if len(ends) > 1:
        lows, highs = ([figure.brief(ends[step][i]) for step in ends] for i in (0, 1))
        look: dict[str, Any] = {"colour": "@s7", "low": lows, "high": highs, "band": 0.3, "width": 0, "quiet": True}
        drawn.append(figure.Series("controls", [*map(found.time.place, ends)], lows, **look))
    lines = [(site, _times_chance(found, one, site, found.line(one, ENERGY, site))) for site in sites]
    drawn += [found.drawn(**gradients.depth_look(site, one.blocks), line=line) for site, line in lines if line]
    frozen = [_times_chance(found, one, site, found.line(one, ENERGY, site, reading="fit=frozen")) for site in sites]
    if any(frozen):
        mean = seeds_mean([[], *(line for line in frozen if line)])
        x, where = [found.time.place(row.step or 0) for row in mean], [f"step {row.step or 0:,}" for row in mean]
        look = {"colour": "@ink", "dash": "dash", "width": 2.2, "where": where}
        drawn.append(figure.Series(FROZEN, x, figure.column(mean), **look))
    told = gradients.courses([line for line in drawn if not line.quiet])
    alt = f"Gradient energy of {one.label} in its tangent directions, times chance, over steps. {told}"
    return replace(found.panel(drawn if any(line for _, line in lines) else ()), alt=alt)


def _enrichment_over_depth(found: Gradients, one: Subject) -> Panel:
    sites = [site for site in found.rows.sites([ENERGY]) if found.whole(one, ENERGY, site)]
    depth = figure.Depth.of_sites(one.blocks, sites)
    drawn = []
    for look, how in (
        *((gradients.control_look(name), {"control": name}) for name in gradients.CONTROLS),
        (found.proxy_look(found.proxy), {}),
    ):
        lines = [(site, _times_chance(found, one, site, found.whole(one, ENERGY, site, **how))) for site in sites]
        pairs = [(site, line[-1]) for site, line in lines if line]
        if pairs:
            x, where = [depth.place(s.layer, s.kind) for s, _ in pairs], [site.name for site, _ in pairs]
            drawn.append(gradients.points(rows=[row for _, row in pairs], x=x, where=where, **look))
    alt = (
        f"Gradient energy of {one.label} in its tangent directions, times chance, by depth. {gradients.courses(drawn)}"
    )
    return replace(found.panel(drawn), x=depth.axis(), alt=alt, legend=True)


def _gradient_sections(rows: TrainingRows, catalogue: Catalogue) -> tuple[list[Section | None], Gradients]:
    """The sections on gradients in as much detail as fits on a page."""
    make = (gradients.energy_section, gradients.map_section, frequency_section, gradients.elsewhere_section)
    for detail in gradients.DETAILS[_likely(rows, catalogue) :]:
        found = Gradients(rows, catalogue, detail)
        sections = [section(found) for section in make]
        figures = Page("", "", [section for section in sections if section]).figures()
        if sum(len(json.dumps(panel_spec(panel))) for drawn in figures for panel in drawn.panels) <= SPECS:
            break
    return sections, found


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


def _legend(rows: TrainingRows) -> list[page.LegendEntry]:
    """Legend entries with colour and role of each subject; with many, only the first of each model is shown initially.

    Without gradient metrics the seeds of a model are drawn as one line and have one entry.
    """
    drawn = {key.subject for key in rows.lines}  # models measured at no step of a training have no lines
    arms = [arm for arm in legend_arms(rows) if any(one.index in drawn for one in arm.subjects)]
    shown = {arm.line for arm in arms[: ARMS if rows.metrics().isdisjoint(TANGENT) else SHOWN]}
    if len(arms) > SHOWN and not rows.metrics().isdisjoint(TANGENT):
        shown = {*sorted({one.model: one.index for one in reversed(rows.subjects)}.values())[:SHOWN]}
    entries = []
    for arm in arms if len(arms) > 1 else ():
        role, marker = arm.role if arm.role not in arm.label else "", arm.subjects[0].marker
        entries.append(page.LegendEntry(arm.line, arm.label, arm.index % 8 + 1, role, marker, arm.line in shown))
    return entries


def checkpoint_flags(rows: TrainingRows) -> list[tuple[str, int | None, str]]:
    """Problems of checkpoints in a series (repeated, missing, out of order, not finite), without duplicates."""
    flags: dict[tuple[str, int | None, str], None] = {}
    for key in rows.keys.get("checkpoint", []):
        label = rows.subjects[key.subject].label if len(rows.subjects) > 1 else ""
        for row in rows.lines[key]:
            if row.value == 0.0 or not row.known:
                flags[label, row.step or 0, _sentence(row.note or "no reason was recorded")] = None
    seen = {flag[1:] for flag in flags}
    for entry in (e for about in rows.abouts for e in about.get("checkpoints") or [] if e.get("flags")):
        flag = entry.get("step"), _sentence("; ".join(map(str, entry["flags"])))
        flags |= {("", *flag): None} if flag not in seen else {}
    return sorted(flags, key=lambda flag: (flag[0], -1 if flag[1] is None else flag[1]))


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def _flag_parts(flags: Sequence[tuple[str, int | None, str]]) -> list[Any]:
    """One line on checkpoints that are not what they should be, with all of them behind it."""
    if not flags:
        return []
    what = "checkpoint is not what it" if len(flags) == 1 else "checkpoints are not what they"
    fold = Fold(f"{len(flags)} {what} should be", [_flag_table(flags)], css="behind")
    return [page.Box([fold], "flags", "Checkpoints that are not what they should be")]


def _flag_table(flags: Sequence[tuple[str, int | None, str]]) -> DataTable:
    first = 0 if any(model for model, *_ in flags) else 1  # a single model is not named
    heads = ["Model", TableCell("Step", css="num"), "What was found"][first:]
    body = []
    for model, step, note in flags:
        at = TableCell("–" if step is None else f"{step:,}", css="num")
        body.append([model, at, TableCell(note, css="prose")][first:])
    return DataTable([heads], [body], "Checkpoints", numeric=99)


def _loss_section(rows: TrainingRows, catalogue: Catalogue) -> Section | None:
    """The section with what the training loop logged, for all models."""
    time = Time.of(rows.logged_steps)
    panels = [panel for names in LOGS if (panel := _log_panel(rows, catalogue, names, time))] if time.long else []
    if not panels:
        return None
    words = "What the training loop logged, on the same axis of steps."
    if len(_legend(rows)) > 1:
        words += (
            " Colours are models; in the first figure the paler line is the training batch, the one with points the "
            "held-out probe. Where a model has several seeds, thin lines are seeds, over them their mean."
        )
    if any(rows.logged(one, "weighted_probe_loss") for one in rows.subjects):
        words += (
            " Where training weighs targets by their frequency, the line of the training batch is the weighted loss; "
            "that of the probe never is."
        )
    return Section("course", "Loss", [Prose(words), Key(), Figure(tuple(panels))], "Loss")


def _log_panel(rows: TrainingRows, catalogue: Catalogue, names: Sequence[str], time: Time) -> Panel | None:
    """A panel of what was logged under some names: the mean of the seeds, above thin lines of each."""
    drawn, both = [], "loss" in names and len(names) > 1
    for arm, name in product(legend_arms(rows), names):
        lines = [rows.logged(one, name) for one in arm.subjects]
        look = _log_look(rows, catalogue, arm, name, both=both)
        if len(lines) > 1 and look["width"] > THIN:  # seeds are drawn only for the main line
            thin = look | {"colour": figure.faded(look["colour"], 0.35), "width": THIN, "size": 0.0, "quiet": True}
            drawn += [shapes.logged_series(line, time, MOST, **thin) for line in lines if known(line)]
        if known(whole := seeds_mean(lines)):
            drawn.append(shapes.logged_series(whole, time, MOST, **look))
    values = figure.numbers_in([Panel(series=tuple(drawn))])
    if not values:
        return None
    logged = [name for name in names if any(rows.logged(one, name) for one in rows.subjects)]
    title, caption = TITLES[names[0]], " ".join(catalogue.entry(name).description for name in logged)
    averaged = any(len(rows.logged(one, name)) > MOST for one in rows.subjects for name in names)
    caption += " Points are means over neighbouring steps." if averaged else ""
    y, alt = value_axis(values, log="learning_rate" not in names), f"{title} over steps. {gradients.courses(drawn, 6)}"
    return Panel(time.axis(), y, tuple(drawn), title=title, caption=caption, alt=alt)


def _log_look(rows: TrainingRows, catalogue: Catalogue, arm: Arm, metric: str, *, both: bool) -> dict[str, Any]:
    probe, seeds = metric == "probe_loss", f"mean of {len(arm.subjects)} seeds" if len(arm.subjects) > 1 else ""
    words = {"loss": "training", "probe_loss": "probe"}.get(metric, "") if both else ""
    parts = (arm.label if len(rows.subjects) > 1 else "", words, seeds)
    pale = both and not probe
    return {
        "label": " · ".join(part for part in parts if part) or catalogue.entry(metric).title,
        "colour": series(arm.index, 0.55 if pale else 1.0),
        "width": THIN if pale and seeds else 1.9 if probe else 1.3,
        "size": 5.0 if probe else 0.0,
        "interval": probe and not seeds,
        "owner": arm.line,
    }


def _over_depth(kind: str) -> bool:
    return in_stream(kind) or kind == "stage"


def _last_profiles(runs: Sequence[RunView], catalogue: Catalogue, rows: TrainingRows) -> Section | None:
    """Profiles over depth at the last step, as in the report of a single model."""
    kept = {"head": None, "kind": _over_depth, "metric": lambda metric: metric not in OF_TRAINING}
    last = [Query(run.table).where(**kept).at_last_step("model").table(run.about) for run in runs]
    profiles = ProfileRows([replace(run, table=table) for run, table in zip(runs, last, strict=True)])
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
    tellers = {"Energy": _energy, "Layers": _layers, "Frequency": _frequency, "Loss": _loss}
    of_topic = {topic: _each(found, tell) for topic, tell in tellers.items()} | {"Caution": _caution(found)}
    return [page.PageFinding(topic, tuple(texts)) for topic, texts in of_topic.items() if texts]


def _each(found: Gradients, tell: Callable[[Gradients, Subject], str]) -> list[str]:
    every = found.rows.subjects
    told = [(one.label, words) for one in every if (words := tell(found, one))] if len(every) <= TELL_EACH else []
    return [f"{label}: {words}" if len(every) > 1 else _sentence(words) for label, words in told]


def _value(row: Any) -> str:
    return estimate(row.value, row.low, row.high).replace(" ± ", "\u00a0±\u00a0")


def _at(found: Gradients, row: Any) -> str:
    return f"{_value(row)} at step {row.step or 0:,}" if found.rows.dated else _value(row)


def _finally(found: Gradients) -> str:
    """The phrase "at the last step " for tables with several steps, else empty."""
    return "at the last step " if len(found.rows.steps) > 1 else ""


def _middle(found: Gradients, subject: Subject) -> DrawnSite | None:
    sites = [s for s in found.rows.sites([ENERGY]) if found.whole(subject, ENERGY, s)]
    return sites[found.rows.middle(sites)] if sites else None


def _energy(found: Gradients, subject: Subject) -> str:
    """Sentences on the course of energy in the middle of the model, compared with chance, normal control and PCA."""
    site = _middle(found, subject)
    line = known(found.whole(subject, ENERGY, site)) if site else []
    if not site or not line:
        return ""
    first, last, peak = line[0], line[-1], max(line, key=lambda row: row.value)
    at = f" at step {first.step or 0:,}" if found.rows.dated else ""
    words = f"the proxy of rank {found.rank} holds {_value(first)} of the gradient energy "
    words += f"{site_phrase(site.layer, site.kind)}{at}"
    words += f", {_at(found, last)}" if len(line) > 1 else ""
    words += f", after a peak of {_at(found, peak)}" if peak not in (first, last) and apart(peak, last) else ""
    chance = found.chances[subject.index]
    words += f"; chance is {number(chance)}." if chance else "."
    normal = [row.high for row in found.whole(subject, ENERGY, site, control="normal") if row.interval]
    words += f" Subspaces orthogonal to it stay below {number(max(normal))}." if normal else ""
    gap = largest_gap(line, found.whole(subject, ENERGY, site, proxy="pca")) if found.proxy != "pca" else None
    words += f" PCA of the same rank differs by at most {number(gap, 2)}." if gap is not None else ""
    return words + _coordinates(found, subject, site)


def _coordinates(found: Gradients, subject: Subject, site: DrawnSite) -> str:
    """A sentence on enrichment as it is and in standardised coordinates; without the first position where measured."""
    texts = []
    for first in (None, "out"):
        spaces = (None, gradients.STANDARDISED)
        readings = [with_options("fit=refit", coordinates=space, first=first) for space in spaces]
        pair = [found.last(subject, gradients.ENRICHMENT, site, reading=reading) for reading in readings]
        if all(row is not None for row in pair):
            texts.append(f"{_value(pair[0])} times chance, {_value(pair[1])} times in standardised coordinates")
    if not texts:
        return ""
    rest = f"; without the first position {texts[1]}" if len(texts) > 1 else ""
    return f" There {_finally(found)}it is {texts[0]}{rest}."


def _layers(found: Gradients, subject: Subject) -> str:
    """A sentence on the layers with the highest and lowest energy at the last step."""
    ends = [(row, site) for site in found.rows.sites([ENERGY]) if (row := found.last(subject, ENERGY, site))]
    if len(ends) < 2:
        return ""
    high, low = (pick(ends, key=lambda pair: pair[0].value) for pick in (max, min))
    if not apart(high[0], low[0]):
        between = f"{number(low[0].value)} and {number(high[0].value)}"
        return f"{_finally(found)}all layers lie between {between}, which the intervals cannot tell apart."
    places = [f"{_value(row)} {site_phrase(site.layer, site.kind)}" for row, site in (high, low)]
    return f"{_finally(found)}energy is highest with {places[0]}, lowest with {places[1]}."


def _frequency(found: Gradients, subject: Subject) -> str:
    """A sentence on the most frequent bin and the rarest, in the middle of the model at the last step."""
    site, keys = _middle(found, subject), found.keys([gradients.ENRICHMENT])
    bins = sorted({key.group for key in keys if key.group.startswith("frequency:")})
    if not site or len(bins) < 2:
        return ""
    first, last = (found.last(subject, gradients.ENRICHMENT, site, group=group) for group in (bins[0], bins[-1]))
    if first is None or last is None:
        return ""
    words = f"{_finally(found)}enrichment {site_phrase(site.layer, site.kind)} is {_value(first)} for the most "
    words += f"frequent tokens and {_value(last)} for the rarest"
    return words + ("." if apart(first, last) else ", which the intervals cannot tell apart.")


def _loss(found: Gradients, subject: Subject) -> str:
    logged = {"the loss on the held-out probe": "probe_loss", "the training loss": "loss"}
    lines = {name: known(found.rows.logged(subject, metric)) for name, metric in logged.items()}
    name, line = next(((name, line) for name, line in lines.items() if line), ("", []))
    if len(line) < 2:
        return f"{name} is {_value(line[0])}." if line else ""
    first, last = (f"{_value(row)} at step {row.step or 0:,}" for row in (line[0], line[-1]))
    falls = line[-1].value < line[0].value and _value(line[0]) != _value(line[-1])
    return f"{name} {'falls' if falls else 'goes'} from {first} to {last}."


def _caution(found: Gradients) -> list[str]:
    lines = [found.rows.lines[key] for key in found.keys(found.rows.metrics())]
    texts = []
    if any("fewer than 10 d" in row.note for line in lines for row in line):
        texts.append("Fewer than 10 d rows at some sites: shares of anisotropy are then rough.")
    if found.rows.dated and len({subject.seed for subject in found.rows.subjects}) == 1:
        texts.append("One seed of each model: what is said holds for this run, not for models like it.")
    return texts
