"""Drift against average cosine over the layers of each model, and over the within-model ranks of all models."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from anisoscope.claims.correlation import FEWEST_SITES, Unit
from anisoscope.claims.drift import FEWEST_LAYERS, NEAR_IDENTITY
from anisoscope.view.charts import Chart
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
    sign_of,
    value_axis,
)
from anisoscope.view.palette import Palette, Tokens
from anisoscope.view.traces import LOG_FONT, Spec, base_layout, wants_log
from anisoscope.view.training_board import Choice, Option, Switch, with_shared
from anisoscope.view.verdicts import neat
from anisoscope.view.words import finite, number, plural

ORDERS = 5  # ticks of a logarithmic axis
OPEN = 12  # scatter plots that are not folded away
DRIFT, IDENTITY = "drift ‖mean(h)‖", "(‖mean(h)‖ / mean ‖h‖)²"


def drift_section(found: Comparison) -> tuple[dict[str, Any], dict[str, Spec]]:
    """A scatter plot for each stack, and the pool of their ranks; empty where no stack has three sites with both."""
    records = found.scattered
    if not records:
        return {}, {}
    several = len(found.modalities) > 1
    charts = [_chart(r, i, alone=len(records) == 1, several=several) for i, r in enumerate(records)]
    specs = {chart.id: scatter_spec(record, Tokens()) for chart, record in zip(charts, records, strict=True)}
    near = [finite(point["relative_drift"]) is not None for record in records for point in counted(record)]
    says = f"This is {NEAR_IDENTITY}: it explains nothing."
    options = (Option(f"{DRIFT}, unnormalised"), *([Option(f"{IDENTITY}, a near-identity", says)] if any(near) else []))
    section = {
        "switch": Switch("drift", (Choice("Against", options),)),
        "charts": charts[:OPEN],
        "more": charts[OPEN:],
        "note": records[0]["p_note"],
        "table": correlation_table(found),
        "several": several,
        "pooled": {},
    }
    chart = pooled_chart(found)
    if chart is not None:
        section["pooled"] = {"chart": chart, "key": _key(found)}
        specs[chart.id] = pooled_spec(found, Tokens())
    return section, specs


def _chart(record: Record, i: int, *, alone: bool, several: bool) -> Chart:
    owner = record["modality"] if several else ""
    alt = f"Scatter plot of drift against average cosine of {record['label']}: {correlation_words(record)}"
    title = "" if alone else record["label"]
    return Chart(f"drift-{i + 1}", title, alt, 250, caption=correlation_words(record), owner=owner)


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


def scatter_spec(record: Record, palette: Palette) -> Spec:
    """Average cosine against drift, and in a second view against the squared relative drift."""
    views = {}
    for i, (name, title) in enumerate((("drift", DRIFT), ("relative_drift", IDENTITY))):
        points = [p for p in counted(record) if finite(p[name]) is not None]
        places = [p[name] ** (1 if i == 0 else 2) for p in points]
        if points:
            views[str(i)] = {"data": [_trace(points, places, palette)], "x": _across(places, title, palette)}
    layout = base_layout(palette) | {"xaxis": {}, "yaxis": value_axis(palette, "average cosine")}
    return with_shared({"layout": layout, "switch": "drift", "views": views})


def _across(places: Sequence[float], title: str, palette: Palette) -> Spec:
    axis = value_axis(palette, title) | {"showgrid": False, "showline": True, "linecolor": palette.role("rule")}
    if not wants_log(places):
        return axis
    orders = math.log10(max(places) / min(places))
    return axis | {"type": "log", "dtick": max(1, math.ceil(orders / ORDERS)), "tickfont": {"size": LOG_FONT}}


def _trace(points: Sequence[Record], places: Sequence[float], palette: Palette) -> Spec:
    """Sites joined in order of depth and coloured by it."""
    text = [f"<b>{place_words(p)}</b><br>{cosine_words(p)}<br>drift {number(p['drift'])}" for p in points]
    trace: Spec = {"type": "scatter", "mode": "lines+markers", "showlegend": False, "text": text}
    trace |= {"x": [brief(at) for at in places], "y": [brief(p["cosine"]) for p in points]}
    trace |= {"hovertemplate": "%{text}<extra></extra>", "line": {"color": palette.role("rule"), "width": 1.2}}
    shades = [palette.sequence(point["depth"]) for point in points]
    return trace | {"marker": {"size": 7.5, "color": shades}}


# all models together


def units_of(found: Comparison) -> list[tuple[dict[str, Any], Unit]]:
    """The ranks of the stacks that are pooled, as `claims.drift.pooled` takes them."""
    units = []
    for record in (r for r in found.scattered if not r["untrained"]):
        sites = [p for p in counted(record) if finite(p["drift"]) is not None]
        if len(sites) >= FEWEST_SITES and finite(record["spearman"]) is not None:
            drift, cosine = ([p[name] for p in sites] for name in ("drift", "cosine"))
            units.append((record, Unit.of(record["model"], drift, cosine)))
    return units


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
    """How far a model is shifted: models often have the same ranks."""
    return 0.012 * (i - (count - 1) / 2)


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
        "range": [-0.02, 1.02],
        "tickvals": [0, 0.5, 1],
        "ticktext": ["lowest", "", "highest"],
        "tickangle": 0,
    }
    x = value_axis(palette, "rank of drift in its model") | ends | {"showline": True, "linecolor": palette.role("rule")}
    y = value_axis(palette, "rank of average cosine") | ends
    margin = {"l": 46, "r": 34, "t": 10, "b": 40}
    return {"data": traces, "layout": base_layout(palette) | {"xaxis": x, "yaxis": y, "margin": margin}}


# in a table


def correlation_table(found: Comparison) -> dict[str, Any]:
    """Drift with average cosine in every stack, then pooled by modality and over all, and what is not explained."""
    records = sorted(found.records, key=lambda r: found.modalities.index(r["modality"]))
    groups = [(m, [_stack_row(r) for r in records if r["modality"] == m]) for m in found.modalities]
    return {
        "groups": groups,
        "pooled": [_pooled_row(row) for row in _pools(found)],
        "unexplained": [r["label"] for r in records if r["status"] == "fails"],
        "open": [r["label"] for r in records if r["status"] == "undecided"],
        "fewest": FEWEST_LAYERS,
    }


def _stack_row(record: Record) -> dict[str, Any]:
    named = {name: _parted(record, name) for name in ("pearson", "spearman", "explained")}
    tests = {name: p_words(record.get(name)) for name in ("pearson_p", "spearman_p")}
    word = {"sign": sign_of(record["status"]), "word": LOOKS[record["status"]][0], "state": record["status"]}
    return {"label": record["label"], "untrained": record["untrained"], "sites": record["n"],
            "note": record["note"] or _why_open(record), **named, **tests, **word}  # fmt: skip


def _why_open(record: Record) -> str:
    if record["status"] != "undecided":
        return ""
    if record["n"] < FEWEST_LAYERS:
        return f"{plural(record['n'], 'site')}, {FEWEST_LAYERS} are needed"
    return "the share was not measured" if finite(record["explained"]) is None else ""


def _parted(record: Record, name: str) -> tuple[str, str]:
    """A number, and its interval for the line below."""
    value, _, ends = interval_words(record[name], record.get(f"{name}_low"), record.get(f"{name}_high")).partition(" ")
    return value, ends.strip("[]").replace(", ", " to ")


def _pools(found: Comparison) -> list[dict[str, Any]]:
    """Each modality where there are several, then all; none of a single stack."""
    if len(units_of(found)) < 2:
        return []
    several = len({row["modality"] for row in found.pooled if row["modality"] != "all"}) > 1
    every = [row for row in found.pooled if row["modality"] != "all" and row["stacks"] > 1]
    return [*(every if several else []), *(row for row in found.pooled if row["modality"] == "all")]


def _pooled_row(row: Record) -> dict[str, Any]:
    """The pool as `claims.drift.pooled` tells it; Pearson's only where it does."""
    ranked = {"spearman": row["spearman"], "spearman_low": row["low"], "spearman_high": row["high"]}
    linear = {name: row.get(name) for name in ("pearson", "pearson_low", "pearson_high")}
    return {
        "modality": "all models" if row["modality"] == "all" else row["modality"],
        "size": f"{plural(len(row['models']), 'model')}, {plural(row['stacks'], 'stack')}",
        "sites": str(row["n"]),
        "spearman": _parted(ranked, "spearman"),
        "spearman_p": p_words(row["p"]),
        "pearson": _parted(linear, "pearson"),
        "pearson_p": p_words(row.get("pearson_p")),
        "note": row["note"],
    }


def p_words(p: float | None) -> str:
    """A p-value.

    >>> p_words(0.0333), p_words(1e-9), p_words(float("nan"))
    ('0.033', '< 0.0001', '–')
    """
    known = finite(p)
    return "–" if known is None else "< 0.0001" if known < 1e-4 else neat(known, 2)


def _key(found: Comparison) -> list[dict[str, str]]:
    seen = dict.fromkeys(record["modality"] for record, _ in units_of(found))
    return [{"name": m, "colour": f"var(--s{hue_of(m) + 1})", "stroke": "", "band": ""} for m in seen]
