"""Drift against average cosine over the layers of each model, and over the within-model ranks of all models."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from anisoscope.claims.inherent.drift import NEAR_IDENTITY
from anisoscope.view.charts import Chart
from anisoscope.view.drift_table import correlation_table, mean_words, p_words, units_of
from anisoscope.view.modalities import (
    LOOKS,
    Comparison,
    Record,
    brief,
    cosine_words,
    counted,
    hue_of,
    interval_words,
    place_words,
    state_words,
    value_axis,
)
from anisoscope.view.palette import Palette, Tokens
from anisoscope.view.seeds import Bundle, bundles_of, in_front
from anisoscope.view.traces import LOG_FONT, Spec, base_layout, wants_log
from anisoscope.view.training_board import Choice, Option, Switch, with_shared
from anisoscope.view.words import finite, listed, number, plural, spans

ORDERS = 5  # ticks of a logarithmic axis
OPEN = 12  # scatter plots that are not folded away
DRIFT, IDENTITY = "drift ‖mean(h)‖", "(‖mean(h)‖ / mean ‖h‖)²"


def drift_section(found: Comparison) -> tuple[dict[str, Any], dict[str, Spec]]:
    """A scatter plot for each model, and the pool of their ranks; empty where no stack has three sites with both."""
    front, behind = in_front(bundles_of(found.scattered))
    bundles = [*front, *behind]
    if not bundles:
        return {}, {}
    several = len(found.modalities) > 1
    charts = [_chart(b, i, alone=len(bundles) == 1, several=several) for i, b in enumerate(bundles)]
    specs = {chart.id: scatter_spec(bundle, Tokens()) for chart, bundle in zip(charts, bundles, strict=True)}
    near = [finite(point["relative_drift"]) is not None for record in found.scattered for point in counted(record)]
    says = f"This is {NEAR_IDENTITY}: it explains nothing."
    options = (Option(f"{DRIFT}, unnormalised"), *([Option(f"{IDENTITY}, a near-identity", says)] if any(near) else []))
    section = {
        "switch": Switch("drift", (Choice("Against", options),)),
        "charts": charts[: len(front)][:OPEN],
        "more": charts[OPEN : len(front)],
        "random": charts[len(front) :],
        "seeds": any(bundle.seeds for bundle in bundles),
        "note": found.scattered[0]["p_note"],
        "table": correlation_table(found),
        "several": several,
        "pooled": {},
    }
    chart = pooled_chart(found)
    if chart is not None:
        section["pooled"] = {"chart": chart, "key": _key(found)}
        specs[chart.id] = pooled_spec(found, Tokens())
    return section, specs


def _chart(bundle: Bundle, i: int, *, alone: bool, several: bool) -> Chart:
    owner = ", ".join(part for part in (bundle.modality if several else "", bundle.seeds) if part)
    words = bundle_words(bundle)
    alt = f"Scatter plot of drift against average cosine of {bundle.label}: {words}"
    return Chart(f"drift-{i + 1}", "" if alone else bundle.label, alt, 250, caption=words, owner=owner)


def bundle_words(bundle: Bundle) -> str:
    """The correlations of one seed with their intervals, or means over seeds and how far these reach."""
    if not bundle.seeds:
        return correlation_words(bundle.first)
    ends = [f"{name.capitalize()} {mean_words(bundle, name)}" for name in ("pearson", "spearman")]
    states = listed([state["word"] for state in state_words(bundle, lambda record: record["status"])])
    share = f" Share that goes with the mean: {mean_words(bundle, 'explained')}." if bundle.values("explained") else ""
    sites = spans({record["n"] for record in bundle.members})
    return f"{ends[0]}, {ends[1]} over {sites} sites.{share} Explained by drift: {states}."


def correlation_words(record: Record) -> str:
    """Both correlations with their intervals, how many sites, and whether drift explains."""
    ends = [
        f"{name.capitalize()} {interval_words(record[name], record[f'{name}_low'], record[f'{name}_high'])}"
        + (f" (p {'' if p.startswith('<') else '= '}{p})" if (p := p_words(record.get(f"{name}_p"))) != "–" else "")
        for name in ("pearson", "spearman")
    ]
    text = f"{ends[0]}, {ends[1]} over {plural(record['n'], 'site')}."
    if finite(record["explained"]) is not None:
        share = interval_words(record["explained"], record["explained_low"], record["explained_high"])
        text += f" Share that goes with the mean: {share}. Explained by drift: {LOOKS[record['status']][0]}."
    near = interval_words(record["near_identity"], None, None)
    text += "" if near == "–" else f" Near-identity: Pearson {near}."
    final = [p for p in record["points"] if not p["counted"] and finite(p["drift"]) is not None]
    told = [f"drift {number(p['drift'])}, cosine {number(p['cosine'])}" for p in final]
    return text + (f" Not counted: the final norm, {told[0]}." if told else "")


def scatter_spec(bundle: Bundle, palette: Palette) -> Spec:
    """Average cosine against drift, and in a second view against the squared relative drift; a path for each seed."""
    views = {}
    for i, (name, title) in enumerate((("drift", DRIFT), ("relative_drift", IDENTITY))):
        lines = [[p for p in counted(record) if finite(p[name]) is not None] for record in bundle.members]
        places = [[p[name] ** (1 if i == 0 else 2) for p in line] for line in lines]
        names = [f"seed {record['seed']}" if bundle.seeds else "" for record in bundle.members]
        data = [_trace(*drawn, palette) for drawn in zip(lines, places, names, strict=True) if drawn[0]]
        if data:
            views[str(i)] = {"data": data, "x": _across([at for line in places for at in line], title, palette)}
    layout = base_layout(palette) | {"xaxis": {}, "yaxis": value_axis(palette, "average cosine")}
    return with_shared({"layout": layout, "switch": "drift", "views": views})


def _across(places: Sequence[float], title: str, palette: Palette) -> Spec:
    axis = value_axis(palette, title) | {"showgrid": False, "showline": True, "linecolor": palette.role("rule")}
    if not wants_log(places):
        return axis
    orders = math.log10(max(places) / min(places))
    return axis | {"type": "log", "dtick": max(1, math.ceil(orders / ORDERS)), "tickfont": {"size": LOG_FONT}}


def _trace(points: Sequence[Record], places: Sequence[float], seed: str, palette: Palette) -> Spec:
    """Sites joined in order of depth and coloured by it."""
    whose = f", {seed}" if seed else ""
    text = [f"<b>{place_words(p)}{whose}</b><br>{cosine_words(p)}<br>drift {number(p['drift'])}" for p in points]
    trace: Spec = {"type": "scatter", "mode": "lines+markers", "showlegend": False, "text": text}
    trace |= {"x": [brief(at) for at in places], "y": [brief(p["cosine"]) for p in points]}
    trace |= {"hovertemplate": "%{text}<extra></extra>", "line": {"color": palette.role("rule"), "width": 1.2}}
    shades = [palette.sequence(point["depth"]) for point in points]
    return trace | {"marker": {"size": 6 if seed else 7.5, "color": shades}}


# all models together


def pooled_chart(found: Comparison) -> Chart | None:
    """The pool, where it is more than one stack."""
    if len(units_of(found)) < 2 or not found.pooled:
        return None
    whole = found.pooled[0]
    alt = (
        f"Ranks of drift against ranks of average cosine within {plural(whole['stacks'], 'stack')}: "
        f"Spearman {interval_words(whole['spearman'], whole['low'], whole['high'])}."
    )
    return Chart("drift-pooled", "", alt, 320)


def aside_of(i: int, count: int) -> float:
    """How far a stack is shifted, at most a twentieth: stacks often have the same ranks."""
    return min(0.012, 0.1 / count) * (i - (count - 1) / 2)


def pooled_spec(found: Comparison, palette: Palette) -> Spec:
    """Every site of every trained stack at its relative ranks, coloured by modality."""
    traces = []
    units = units_of(found)
    for i, (record, unit) in enumerate(units):
        aside = 0.5 + aside_of(i, len(units))
        sites = [p for p in counted(record) if finite(p["drift"]) is not None]
        name = html.escape(record["label"])
        traces.append({
            "type": "scatter", "mode": "markers", "name": name, "showlegend": False,
            "x": [brief(z + aside) for z in unit.one], "y": [brief(z + 0.5) for z in unit.two],
            "text": [f"<b>{name}</b><br>{place_words(p)}<br>{cosine_words(p)}<br>drift {number(p['drift'])}"
                     for p in sites],
            "hovertemplate": "%{text}<extra></extra>",
            "marker": {"size": 7, "color": palette.series(hue_of(record["modality"]), 0.7),
                       "symbol": "circle" if record["status"] != "fails" else "diamond-open"},
        })  # fmt: skip
    ends: Spec = {
        "range": [-0.06, 1.06],
        "tickvals": [0, 0.5, 1],
        "ticktext": ["lowest", "", "highest"],
        "tickangle": 0,
    }
    x = value_axis(palette, "rank of drift in its model") | ends | {"showline": True, "linecolor": palette.role("rule")}
    y = value_axis(palette, "rank of average cosine") | ends
    margin = {"l": 46, "r": 34, "t": 10, "b": 40}
    return {"data": traces, "layout": base_layout(palette) | {"xaxis": x, "yaxis": y, "margin": margin}}


def _key(found: Comparison) -> list[dict[str, str]]:
    seen = dict.fromkeys(record["modality"] for record, _ in units_of(found))
    return [{"name": m, "colour": f"var(--s{hue_of(m) + 1})", "stroke": "", "band": ""} for m in seen]
