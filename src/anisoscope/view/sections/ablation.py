"""The section on the causal ablation: arms that differ only in the mask or in the objective, and the two effects.

mask effect = (bidirectional, masked) − (causal, masked); objective effect = (causal, masked) − (causal, next token);
both at the last step, on the mean over blocks 1..L.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from anisoscope.results.quantity import over_seeds
from anisoscope.results.row import last_mean
from anisoscope.view.figure import Axis, Figure, Level, Panel, Series, Switch, series
from anisoscope.view.page import Controls, DataTable, Heading, Prose, Says, Section, Swatch, Swatches, TableCell, text
from anisoscope.view.sections.findings import leading
from anisoscope.view.sections.gradients import Measure, measure_choice
from anisoscope.view.sections.shape import Arm, Shape, arms_of, arms_profile, beside, measures_of, sites_of
from anisoscope.view.subjects import TrainingRows
from anisoscope.view.words import Catalogue, estimate, finite, number

ARMS = {
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
    by_size: dict[str, dict[str, Arm]] = {}
    for arm in arms:
        by_size.setdefault(arm.design[1], {})[arm.design[0]] = arm
    threes = {size: [of_size.get(name) for name in ARMS] for size, of_size in by_size.items()}
    ordered = sorted(threes, key=lambda size: tuple(map(int, size.split("x"))) if size else (0, 0))
    return {size: threes[size] for size in ordered if sum(arm is not None for arm in threes[size]) > 1}


def ablation_measures(measures: Iterable[Measure]) -> list[Measure]:
    """The measures whose effects are shown."""
    plain = [measure for measure in measures if not measure.variant]
    return [measure for name in METRICS for measure in plain if measure.metric == name]


def effects_of(rows: TrainingRows, catalogue: Catalogue, verdicts: Sequence[Mapping[str, Any]] = ()) -> list[Effect]:
    """The effects from the verdicts; without verdicts, from means of the table."""
    judged = {(e.name, e.size, e.metric): e for e in _judged(verdicts)}
    effects = []
    for size, three in designs(arms_of(rows)).items():
        for measure, name in product(ablation_measures(measures_of(rows, catalogue)), EFFECTS):
            effect = judged.get((name, size, measure.metric)) or _difference(rows, three, measure, name, size)
            effects += [effect] if effect is not None else []
    return effects


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
    """The difference of two arms by seed, on the mean over blocks 1..L at the last step."""
    sites = [site for site in sites_of(rows, measure) if site.layer > 0 and site.kind != "final"]
    by_seed: list[dict[int | None, float | None]] = []
    for arm in (three[i] for i in EFFECTS[name][1:]):
        means = {}
        for one in arm.subjects if arm is not None else ():
            means[one.seed] = last_mean(rows.line(one, measure.metric, site, measure.variant) for site in sites)
        by_seed.append(means)
    pairs = [(by_seed[0][seed], by_seed[1].get(seed)) for seed in by_seed[0]]
    gaps = [one - other for one, other in pairs if one is not None and other is not None]
    mean = over_seeds(gaps, fewest=2)
    if mean is None:
        return None
    scope = f"over {len(gaps)} seeds" if mean.high > mean.low else "one seed"
    return Effect(name, size, measure.metric, mean.value, finite(mean.low), finite(mean.high), scope)


def ablation_section(
    rows: TrainingRows, catalogue: Catalogue, shape: Shape, verdicts: Sequence[Mapping[str, Any]]
) -> Section | None:
    """The three arms at the last step and the effects of mask and objective; None without such arms."""
    sizes, measures = designs(shape.arms), ablation_measures(shape.measures)
    if not measures or not sizes:
        return None
    everyone = [arm.index for three in sizes.values() for arm in three if arm is not None]
    last, panels, named = len(shape.steps) - 1, [], set()
    for size, three in sizes.items():
        arms = {i: arm for i, arm in enumerate(three) if arm is not None}
        named |= set(arms)
        looks = {arm.index: {"label": list(ARMS.values())[i], "colour": series(i)} for i, arm in arms.items()}
        views = {}
        for i, measure in enumerate(measures):
            m = shape.measures.index(measure)
            views[str(i)] = arms_profile(shape, m, list(arms.values()), looks, step=last, scale=everyone)
        alt = f"Profiles over depth of the arms of size {size} at the last step."
        panels.append(Panel(views=views, by=("ablation.0",), height=290, title=_title(size), alt=alt))
    switch = Switch("ablation", (measure_choice(measures),))
    lead = (
        "Arms that differ in one thing alone, at their last step. The <em>mask effect</em> is bidirectional minus "
        "causal, both with masked language modelling; the <em>objective effect</em> is masked minus next-token, both "
        "with a causal mask. Effects are on the mean over blocks; intervals are over seeds."
    )
    file_panels = []
    for (i, measure), panel in product(enumerate(measures), panels):
        view = panel.views[str(i)]
        file_panels.append(replace(view, title=panel.title, y=replace(view.y, title=measure.label)))
    as_file: dict[str, Any] = {"files": {"ablation-profiles": {}}, "shown": False, "most": 99, "size": 1.6}
    file = Figure(tuple(file_panels), arrays=shape.arrays, columns=len(panels), **as_file)
    key = Swatches([Swatch(label, series(i)) for i, label in enumerate(ARMS.values()) if i in named])
    shown = Figure(tuple(panels), layout=beside(panels), arrays=shape.arrays)
    parts = [Prose(text(lead)), Controls(switch), key, shown, Says(switch), file]
    parts += _effect_parts(effects_of(rows, catalogue, verdicts), catalogue)
    return Section("ablation", "Mask or objective?", parts, "Ablation")


def _title(size: str) -> str:
    return size.replace("x", " × ")


def _effect_parts(effects: Sequence[Effect], catalogue: Catalogue) -> list[Any]:
    """The effects as a figure and as a table."""
    if not effects:
        return []
    sizes, metrics = (list(dict.fromkeys(getattr(effect, name) for effect in effects)) for name in ("size", "metric"))
    key = Swatches([Swatch(_title(size), series(i)) for i, size in enumerate(sizes)])
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
        drawn += [Series(_title(size), [e.value for e in chosen], up, **look)] if chosen else []
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
        body.append([TableCell(catalogue.entry(metric).title, head=True), TableCell(_title(size)), *cells])
    heads = ["Metric", "Size", *(TableCell(words.capitalize(), css="num") for words, *_ in EFFECTS.values())]
    return DataTable([heads], [body], "Effects of mask and objective", "plain effects", numeric=99)
