"""The causal ablation: arms that differ in the mask or in the objective alone, and what each of these does.

mask effect = (bidirectional, masked) − (causal, masked); objective effect = (causal, masked) − (causal, next token);
both at the last step, on the mean over blocks 1..L.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from anisoscope.view.catalogue import Catalogue
from anisoscope.view.palette import Palette
from anisoscope.view.shape_arms import Arm, ShapeMeasure, measures_of
from anisoscope.view.traces import Spec, base_layout
from anisoscope.view.training import History, Learner, known
from anisoscope.view.verdicts import leading
from anisoscope.view.words import estimate, finite, number

ARMS = ("causal-next", "causal-masked", "bidirectional-masked")
ARM_WORDS = {
    "causal-next": "causal, next token",
    "causal-masked": "causal, masked LM",
    "bidirectional-masked": "bidirectional, masked LM",
}
EFFECTS = {"mask_effect": ("mask effect", 2, 1), "objective_effect": ("objective effect", 1, 0)}  # name, arm − arm
METRICS = ("svd_ratio", "svd_ratio_squared", "two_nn", "attention_sharpness", "attention_entropy")
T95 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # by degrees of freedom


@dataclass(frozen=True)
class Effect:
    """One difference between arms, with its interval where there is one."""

    name: str  # of EFFECTS
    size: str
    metric: str
    value: float
    low: float | None
    high: float | None
    told: str  # what the interval is over


def designs(arms: Iterable[Arm]) -> dict[str, list[Arm | None]]:
    """The three arms of each size, in order; None where one is missing. Sizes with one arm alone are no ablation."""
    found: dict[str, list[Arm | None]] = {}
    for arm in arms:
        what, size = arm.design
        if what in ARMS:
            found.setdefault(size, [None] * len(ARMS))[ARMS.index(what)] = arm
    ordered = sorted(found.items(), key=lambda pair: tuple(map(int, pair[0].split("x"))) if pair[0] else (0, 0))
    return {size: three for size, three in ordered if sum(arm is not None for arm in three) > 1}


def block_mean(history: History, learner: Learner, measure: ShapeMeasure) -> float | None:
    """The mean over blocks 1..L at the learner's last step."""
    kind = "resid" if measure.family == "stream" else measure.family
    ends = []
    for site in (s for s in history.facets(measure.metric).sites if s.kind == kind and s.layer > 0):
        marks = known(history.line(learner, measure.metric, site, measure.variant))
        ends += [(marks[-1].step, marks[-1].value)] if marks else []
    last = max((step for step, _ in ends), default=None)
    values = [value for step, value in ends if step == last and value is not None]
    return fmean(values) if values else None


def ablation_measures(history: History, catalogue: Catalogue) -> list[ShapeMeasure]:
    """The measures that the effects are told of."""
    plain = [m for m in measures_of(history, catalogue) if not m.variant]
    return [m for name in METRICS for m in plain if m.metric == name]


def effects_of(
    history: History, arms: Sequence[Arm], catalogue: Catalogue, verdicts: Sequence[Mapping[str, Any]] = ()
) -> list[Effect]:
    """The effects as the verdicts have them; where they say nothing, from the means of the table."""
    said = {(e.name, e.size, e.metric): e for e in _judged(verdicts)}
    found = []
    for size, three in designs(arms).items():
        for measure in ablation_measures(history, catalogue):
            for name in EFFECTS:
                own = said.get((name, size, measure.metric)) or _difference(history, three, measure, name, size)
                found += [own] if own is not None else []
    return found


def _judged(verdicts: Sequence[Mapping[str, Any]]) -> list[Effect]:
    """Effects from the parts of verdicts: a part is named after its metric, the subject is the size."""
    found = []
    for verdict in (v for v in leading(verdicts) if v.get("claim") in EFFECTS):
        details, subject = verdict.get("details"), str(verdict.get("subject") or "")
        size = next((word for word in subject.split() if _is_size(word)), "")
        for part in (details.get("parts") or []) if isinstance(details, Mapping) else []:
            value = finite(part.get("effect")) if part.get("name") in METRICS else None
            if value is not None:
                ends = finite(part.get("low")), finite(part.get("high"))
                scope = str(verdict.get("scope") or "as judged")
                found.append(Effect(str(verdict["claim"]), size, str(part["name"]), value, *ends, told=scope))
    return found


def _is_size(word: str) -> bool:
    """Whether a word is layers × width.

    >>> _is_size("6x256"), _is_size("axis")
    (True, False)
    """
    parts = word.split("x")
    return len(parts) == 2 and all(part.isdigit() for part in parts)


def _difference(
    history: History, three: Sequence[Arm | None], measure: ShapeMeasure, name: str, size: str
) -> Effect | None:
    one, other = (three[i] for i in EFFECTS[name][1:])
    if one is None or other is None:
        return None
    by_seed = [{x.seed: block_mean(history, x, measure) for x in arm.learners} for arm in (one, other)]
    pairs = [(by_seed[0][s], by_seed[1][s]) for s in by_seed[0] if s in by_seed[1]]
    gaps = [a - b for a, b in pairs if a is not None and b is not None]
    if not gaps:
        return None
    half = _half(gaps)
    middle = fmean(gaps)
    low, high = (None, None) if half is None else (middle - half, middle + half)
    return Effect(name, size, measure.metric, middle, low, high, f"over {len(gaps)} seeds" if half else "one seed")


def _half(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % t interval of a mean; None for one value."""
    if len(values) < 2:
        return None
    quantile = T95[len(values) - 1] if len(values) <= len(T95) else 2.0
    return quantile * stdev(values) / math.sqrt(len(values))


def effect_rows(effects: Sequence[Effect], catalogue: Catalogue) -> list[dict[str, Any]]:
    """The effects as a table: a row for each metric and size."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for effect in effects:
        row = rows.setdefault(
            (effect.metric, effect.size),
            {"metric": catalogue.entry(effect.metric).title, "size": effect.size.replace("x", " × "), "cells": {}},
        )
        row["cells"][effect.name] = {"text": estimate(effect.value, effect.low, effect.high), "over": effect.told}
    return list(rows.values())


def effect_chart(effects: Sequence[Effect], metric: str, palette: Palette) -> Spec:
    """Both effects on one metric against zero, a colour for each size."""
    mine = [e for e in effects if e.metric == metric]
    sizes = list(dict.fromkeys(e.size for e in mine))
    names = [words for words, *_ in reversed(EFFECTS.values())]
    data: list[Spec] = []
    for i, size in enumerate(sizes):
        shift = 0.16 * ((len(sizes) - 1) / 2 - i)
        own = [e for e in mine if e.size == size]
        up = [0.0 if e.high is None else e.high - e.value for e in own]
        down = [0.0 if e.low is None else e.value - e.low for e in own]
        told = [f"<b>{EFFECTS[e.name][0]}</b>, {size}<br>{estimate(e.value, e.low, e.high)} ({e.told})" for e in own]
        colour = palette.series(i)
        bars: Spec = {"type": "data", "array": up, "arrayminus": down, "thickness": 1.4, "width": 4, "color": colour}
        trace: Spec = {"type": "scatter", "mode": "markers", "showlegend": False, "name": html.escape(size)}
        trace |= {"x": [e.value for e in own], "y": [names.index(EFFECTS[e.name][0]) + shift for e in own]}
        trace |= {"error_x": bars, "marker": {"size": 8, "color": colour}, "text": told}
        data.append(trace | {"hovertemplate": "%{text}<extra></extra>"})
    x: Spec = {
        "zeroline": True,
        "zerolinecolor": "rgba(128,128,128,0.7)",
        "gridcolor": palette.role("rule"),
        "nticks": 5,
    }
    y: Spec = {"tickvals": list(range(len(names))), "ticktext": names, "range": [-0.6, len(names) - 0.4]}
    y |= {"showgrid": False, "zeroline": False, "automargin": True}
    return {"data": data, "layout": base_layout(palette) | {"xaxis": x, "yaxis": y}}


def effect_words(effects: Sequence[Effect], metric: str) -> str:
    """The chart for who cannot see it."""
    told = [f"{EFFECTS[e.name][0]} at {e.size or 'one size'} {number(e.value)}" for e in effects if e.metric == metric]
    return f"Effects on {metric}: {'; '.join(told)}."
