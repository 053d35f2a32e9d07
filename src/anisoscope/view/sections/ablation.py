"""The section on the causal ablation: arms that differ only in the mask or in the objective, and the two effects.

mask effect = (bidirectional, masked) − (causal, masked); objective effect = (causal, masked) − (causal, next token);
both at the last step, on the mean over blocks 1..L.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from anisoscope.results.quantity import over_seeds
from anisoscope.results.query import last_mean
from anisoscope.view.figure import Axis, Figure, Level, Panel, Series, Switch, series
from anisoscope.view.page import Controls, DataTable, Heading, Prose, Says, Section, Swatch, Swatches, TableCell, text
from anisoscope.view.sections.findings import leading
from anisoscope.view.sections.gradients import Measure, measure_choice
from anisoscope.view.sections.shape import Arm, Shape, arms_of, arms_profile, beside, measures_of
from anisoscope.view.subjects import Subject, TrainingRows
from anisoscope.view.words import Catalogue, estimate, finite, number

ARMS = ("causal-next", "causal-masked", "bidirectional-masked")
ARM_WORDS = {
    "causal-next": "causal, next token",
    "causal-masked": "causal, masked LM",
    "bidirectional-masked": "bidirectional, masked LM",
}
EFFECTS = {"mask_effect": ("mask effect", 2, 1), "objective_effect": ("objective effect", 1, 0)}  # title, arm − arm
METRICS = ("svd_ratio", "svd_ratio_squared", "two_nn", "attention_sharpness", "attention_entropy")


@dataclass(frozen=True)
class Effect:
    """One difference between arms, with its interval where there is one."""

    name: str  # a key of EFFECTS
    size: str
    metric: str
    value: float
    low: float | None
    high: float | None
    told: str  # what the interval covers


def designs(arms: Iterable[Arm]) -> dict[str, list[Arm | None]]:
    """The three arms of each size in order, None for missing ones; sizes with a single arm are left out."""
    found: dict[str, list[Arm | None]] = {}
    for arm in arms:
        what, size = arm.design
        if what in ARMS:
            found.setdefault(size, [None] * len(ARMS))[ARMS.index(what)] = arm
    ordered = sorted(found.items(), key=lambda pair: tuple(map(int, pair[0].split("x"))) if pair[0] else (0, 0))
    return {size: three for size, three in ordered if sum(arm is not None for arm in three) > 1}


def block_mean(rows: TrainingRows, subject: Subject, measure: Measure) -> float | None:
    """The mean over blocks 1..L at the subject's last step."""
    kind = "resid" if measure.family == "stream" else measure.family
    sites = [site for site in rows.sites([measure.metric], (kind,)) if site.layer > 0]
    return last_mean(rows.line(subject, measure.metric, site, measure.variant) for site in sites)


def ablation_measures(rows: TrainingRows, catalogue: Catalogue) -> list[Measure]:
    """The measures whose effects are shown."""
    plain = [m for m in measures_of(rows, catalogue) if not m.variant]
    return [m for name in METRICS for m in plain if m.metric == name]


def effects_of(rows: TrainingRows, catalogue: Catalogue, verdicts: Sequence[Mapping[str, Any]] = ()) -> list[Effect]:
    """The effects from the verdicts; without verdicts, from means of the table."""
    judged = {(e.name, e.size, e.metric): e for e in _judged(verdicts)}
    found = []
    for size, three in designs(arms_of(rows)).items():
        for measure in ablation_measures(rows, catalogue):
            for name in EFFECTS:
                effect = judged.get((name, size, measure.metric)) or _difference(rows, three, measure, name, size)
                found += [effect] if effect is not None else []
    return found


def _judged(verdicts: Sequence[Mapping[str, Any]]) -> list[Effect]:
    """Effects from the parts of verdicts: the name of a part is the metric, the subject the size."""
    found = []
    for verdict in (v for v in leading(verdicts) if v.get("claim") in EFFECTS):
        details, subject = verdict.get("details"), str(verdict.get("subject") or "")
        size = next((word for word in subject.split() if re.fullmatch(r"\d+x\d+", word)), "")
        for part in (details.get("parts") or []) if isinstance(details, Mapping) else []:
            value = finite(part.get("effect")) if part.get("name") in METRICS else None
            if value is not None:
                ends = finite(part.get("low")), finite(part.get("high"))
                scope = str(verdict.get("scope") or "as judged")
                found.append(Effect(str(verdict["claim"]), size, str(part["name"]), value, *ends, told=scope))
    return found


def _difference(
    rows: TrainingRows, three: Sequence[Arm | None], measure: Measure, name: str, size: str
) -> Effect | None:
    one, other = (three[i] for i in EFFECTS[name][1:])
    if one is None or other is None:
        return None
    by_seed = [{x.seed: block_mean(rows, x, measure) for x in arm.subjects} for arm in (one, other)]
    pairs = [(by_seed[0][s], by_seed[1][s]) for s in by_seed[0] if s in by_seed[1]]
    gaps = [a - b for a, b in pairs if a is not None and b is not None]
    mean = over_seeds(gaps, fewest=2)
    if mean is None:
        return None
    scope = f"over {len(gaps)} seeds" if mean.high > mean.low else "one seed"
    return Effect(name, size, measure.metric, mean.value, finite(mean.low), finite(mean.high), scope)


def ablation_section(
    rows: TrainingRows, catalogue: Catalogue, shape: Shape, verdicts: Sequence[Mapping[str, Any]]
) -> Section | None:
    """The three arms at the last step and the effects of mask and objective; None without such arms."""
    sizes = designs(shape.arms)
    index = {(m.metric, m.variant, m.family): i for i, m in enumerate(shape.measures)}
    measures = [m for m in ablation_measures(rows, catalogue) if (m.metric, "", m.family) in index] if sizes else []
    if not measures:
        return None
    shown = [index[m.metric, "", m.family] for m in measures]
    there = {size: [arm for arm in three if arm is not None] for size, three in sizes.items()}
    everyone = [arm.index for arms in there.values() for arm in arms]
    panels, names = [], list(ARM_WORDS.values())
    for size, arms in there.items():
        places = [(i, arm.index) for i, arm in enumerate(sizes[size]) if arm is not None]
        looks = {arm: {"label": names[i], "colour": series(i)} for i, arm in places}
        views = {str(i): arms_profile(shape, m, arms, looks, step=len(shape.steps) - 1, scale=everyone)
                 for i, m in enumerate(shown)}  # fmt: skip
        alt = f"Profiles over depth of the arms of size {size} at the last step."
        title = size.replace("x", " × ")
        panels.append(Panel(views=views, by=("ablation.0",), height=290, title=title, alt=alt))
    switch = Switch("ablation", (measure_choice(measures),))
    named = {arm.design[0] for arms in there.values() for arm in arms}
    key = [Swatch(words, series(i)) for i, (name, words) in enumerate(ARM_WORDS.items()) if name in named]
    lead = (
        "Arms that differ in one thing alone, at their last step. The <em>mask effect</em> is bidirectional minus "
        "causal, both with masked language modelling; the <em>objective effect</em> is masked minus next-token, both "
        "with a causal mask. Effects are on the mean over blocks; intervals are over seeds."
    )
    rows_of_file = [
        replace(panel.views[str(i)], title=panel.title, y=replace(panel.views[str(i)].y, title=m.label))
        for i, m in enumerate(measures)
        for panel in panels
    ]
    as_file: dict[str, Any] = {"files": {"ablation-profiles": {}}, "shown": False, "most": 99, "size": 1.6}
    file = Figure(tuple(rows_of_file), arrays=shape.arrays, columns=len(panels), **as_file)
    shown_as = Figure(tuple(panels), layout=beside(panels), arrays=shape.arrays)
    parts = [Prose(text(lead)), Controls(switch), Swatches(key), shown_as, Says(switch), file]
    parts += _effect_parts(effects_of(rows, catalogue, verdicts), catalogue)
    return Section("ablation", "Mask or objective?", parts, "Ablation")


def _effect_parts(effects: Sequence[Effect], catalogue: Catalogue) -> list[Any]:
    """The effects as a figure and as a table."""
    if not effects:
        return []
    sizes, metrics = (list(dict.fromkeys(getattr(effect, name) for effect in effects)) for name in ("size", "metric"))
    key = Swatches([Swatch(size.replace("x", " × "), series(i)) for i, size in enumerate(sizes)])
    panels = [_effect_panel([e for e in effects if e.metric == m], catalogue.entry(m).title, m, sizes) for m in metrics]
    figure = Figure(tuple(panels), files={"ablation-effects": {}}, size=0.95 + 0.1 * len(sizes))
    return [Heading("Effects"), *([key] if len(sizes) > 1 else []), figure, _effect_table(effects, catalogue)]


def _effect_panel(effects: Sequence[Effect], title: str, metric: str, sizes: Sequence[str]) -> Panel:
    """A panel of both effects on one metric relative to zero, one colour per size."""
    names = [words for words, *_ in reversed(EFFECTS.values())]
    drawn = []
    for i, size in enumerate(sizes):
        chosen = [e for e in effects if e.size == size]
        up = [names.index(EFFECTS[e.name][0]) + 0.16 * ((len(sizes) - 1) / 2 - i) for e in chosen]
        texts = [
            f"<b>{EFFECTS[e.name][0]}</b>, {size}<br>{estimate(e.value, e.low, e.high)} ({e.told})" for e in chosen
        ]
        look: dict[str, Any] = {"colour": series(i), "width": 0, "size": 8, "text": texts}
        if chosen and chosen[0].low is not None:
            look |= {"low": [e.low for e in chosen], "high": [e.high for e in chosen], "bars": "x"}
        drawn += [Series(size.replace("x", " × "), [e.value for e in chosen], up, **look)] if chosen else []
    y = Axis(ticks=([float(i) for i in range(len(names))], names), bounds=(-0.6, len(names) - 0.4))
    texts = [f"{EFFECTS[e.name][0]} at {e.size or 'one size'} {number(e.value)}" for e in effects]
    zero, alt = Level(0.0, upright=True, dash="solid"), f"Effects on {metric}: {'; '.join(texts)}."
    return Panel(Axis(rules=True, most=5), y, tuple(drawn), title=title, height=150, levels=(zero,), alt=alt)


def _effect_table(effects: Sequence[Effect], catalogue: Catalogue) -> DataTable:
    """A table of the effects with one row per metric and size."""
    rows: dict[tuple[str, str], dict[str, Effect]] = {}
    for effect in effects:
        rows.setdefault((effect.metric, effect.size), {})[effect.name] = effect
    body = []
    for (metric, size), by_effect in rows.items():
        found = [by_effect.get(name) for name in EFFECTS]
        cells = [TableCell(estimate(e.value, e.low, e.high), [e.told], css="num") if e else TableCell() for e in found]
        body.append([TableCell(catalogue.entry(metric).title, head=True), TableCell(size.replace("x", " × ")), *cells])
    heads = ["Metric", "Size", *(TableCell(words.capitalize(), css="num") for words, *_ in EFFECTS.values())]
    return DataTable([heads], [body], "Effects of mask and objective", "plain effects", numeric=99)
