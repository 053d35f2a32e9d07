"""Drift against average cosine in every model, and models of all modalities side by side.

Everything here is read by the claims' own readers (claims/drift.py, claims/modalities.py): the page draws what the
verdicts are made from. A *record* is one stack of one model and seed, at its last measured step.
"""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from anisoscope.claims.drift import correlations, pooled
from anisoscope.claims.modalities import BEYOND, modality_table
from anisoscope.claims.streams import METRICS
from anisoscope.runs.table import Table
from anisoscope.view.charts import Chart
from anisoscope.view.findings import Finding
from anisoscope.view.joining import joint
from anisoscope.view.palette import DASHES, Palette, Tokens
from anisoscope.view.series import Source, short_names
from anisoscope.view.traces import Axis, Spec, base_layout, x_axis
from anisoscope.view.words import estimate, finite, listed, number, plural, site_name

Record = Mapping[str, Any]
Owner = tuple[str, str, Any]  # model, stack, seed
HUES = {"text": 0, "characters": 4, "speech": 1, "vision": 2, "convolution": 3}
# by what the claim says of a stack: its word, its marker, and what the key says of that
LOOKS = {
    "holds": ("yes", "circle", "explained by drift"),
    "undecided": ("open", "circle-open", "open"),
    "fails": ("no", "diamond-open", "not explained by drift"),
}
STROKES = {"dash": "6 4", "dot": "2 2.5", "dashdot": "6 3 2 3", "longdash": "9 4"}


@dataclass(frozen=True)
class Comparison:
    """What the claims' readers tell of all runs together."""

    records: list[dict[str, Any]]  # of `correlations`, with a label
    rows: list[dict[str, Any]]  # of `modality_table`, with a label
    pooled: list[dict[str, Any]]

    @property
    def modalities(self) -> list[str]:
        return list(dict.fromkeys(row["modality"] for row in self.rows))

    @property
    def scattered(self) -> list[dict[str, Any]]:
        """Records with enough sites for a correlation."""
        return [record for record in self.records if finite(record["pearson"]) is not None]


def compare(sources: Sequence[Source]) -> Comparison:
    """Anisotropy and drift of all stacks of all runs; empty where neither was measured."""
    tables = [Table(source.table.arrow, dict(source.about)) for source in sources]
    narrow = [Table(_narrow(table), table.about) for table in tables]
    if not any(map(len, narrow)):
        return Comparison([], [], [])
    table = joint(narrow, [source.path for source in sources])
    rows, records = modality_table(table), correlations(table)
    labels = _labels(rows)
    return Comparison(_named(records, labels), _named(rows, labels), pooled(table))


def _named(records: Sequence[Record], labels: Mapping[Owner, str]) -> list[dict[str, Any]]:
    return [{**record, "label": labels[owner_of(record)]} for record in records]


def _narrow(table: Table) -> pa.Table:
    """The rows that the readers need: a table over training has a hundred times as many."""
    arrow = table.arrow
    kept = pc.and_(pc.is_null(arrow["head"]), pc.is_in(arrow["metric"], value_set=pa.array(METRICS, pa.string())))
    return arrow.filter(kept)


def owner_of(record: Record) -> Owner:
    return record["model"], record["stack"], record["seed"]


def _labels(rows: Sequence[Record]) -> dict[Owner, str]:
    """The model's short name, and of stack and seed only what tells it from a namesake."""
    shorten = short_names({row["model"] for row in rows})
    stacks, seeds = defaultdict(set), defaultdict(set)
    for row in rows:
        stacks[row["model"]].add(row["stack"])
        seeds[row["model"]].add(row["seed"])
    found = {}
    for row in rows:
        parts = [shorten(row["model"]) or "unnamed"]
        parts += [row["stack"]] if len(stacks[row["model"]]) > 1 else []
        parts += [f"seed {row['seed']}"] if len(seeds[row["model"]]) > 1 else []
        found[owner_of(row)] = " · ".join(parts)
    return found


def hue_of(modality: str) -> int:
    return HUES.get(modality, 6)


# modalities side by side


def modality_section(found: Comparison) -> tuple[dict[str, Any], dict[str, Spec]]:
    """The paper's table by modality and the profile of every model; empty with a single modality."""
    if len(found.modalities) < 2:
        return {}, {}
    dashes = dashes_of(found.rows)
    rows = [_table_row(row, dash=dashes[owner_of(row)]) for row in found.rows]
    groups = [(m, [row for row in rows if row["modality"] == m]) for m in found.modalities]
    chart = Chart("modality-1", "", _profile_alt(found), 380)
    states = {row["state"] for row in rows}
    section = {
        "chart": chart,
        "key": [{"name": m, "colour": f"var(--s{hue_of(m) + 1})", "stroke": "", "band": ""} for m in found.modalities],
        "marks": [(sign_of(state), words) for state, (_, _, words) in LOOKS.items() if state in states],
        "groups": groups,
        "beyond": BEYOND,
    }
    return section, {chart.id: profile_spec(found, Tokens())}


def sign_of(state: str) -> str:
    return {"holds": "●", "undecided": "○", "fails": "◇"}[state]


def state_of(row: Record) -> str:
    return {"yes": "holds", "no": "fails"}.get(row["explained_by_drift"], "undecided")


def dashes_of(rows: Sequence[Record]) -> dict[Owner, str]:
    """Lines of one modality have one colour: models differ in dashes."""
    models: dict[str, dict[str, None]] = defaultdict(dict)
    for row in rows:
        models[row["modality"]][row["model"]] = None
    order = {(m, model): i for m, mine in models.items() for i, model in enumerate(mine)}
    return {owner_of(row): DASHES[order[row["modality"], row["model"]] % len(DASHES)] for row in rows}


def _table_row(row: Record, *, dash: str) -> dict[str, Any]:
    state = state_of(row)
    return {
        "label": row["label"],
        "modality": row["modality"],
        "untrained": row["untrained"],
        "colour": f"var(--s{hue_of(row['modality']) + 1})",
        "stroke": STROKES.get(dash, ""),
        "blocks": row["layers"],
        "middle": number(row["middle"]),
        "max": number(row["max"]),
        "max_at": f"block {row['max_layer']}",
        "mean": (number(row["mean"]), _between(row["mean_low"], row["mean_high"])),
        "beyond": f"{100 * row['share_beyond']:.0f} %",
        "drift": number(row["drift"]),
        "state": state,
        "word": LOOKS[state][0],
        "sign": sign_of(state),
    }


def _between(low: float, high: float) -> str:
    return f"{number(low)} to {number(high)}" if finite(low) is not None and finite(high) is not None else ""


def interval_words(value: float | None, low: float | None, high: float | None) -> str:
    """A correlation with both ends of its interval, two decimals.

    >>> interval_words(0.982, 0.97, 0.991), interval_words(0.5, None, None), interval_words(float("nan"), 0, 1)
    ('0.98 [0.97, 0.99]', '0.50', '–')
    """
    if finite(value) is None:
        return "–"
    shown = [f"{v:.2f}".replace("-", "−") for v in (value, low, high) if finite(v) is not None and v is not None]
    return f"{shown[0]} [{shown[1]}, {shown[2]}]" if len(shown) == 3 else shown[0]


def counted(record: Record) -> list[dict[str, Any]]:
    """The sites that correlations count, in order of depth: the embedding and the blocks."""
    return [point for point in record["points"] if point["counted"]]


def profile_spec(found: Comparison, palette: Palette) -> Spec:
    """Average cosine over relative depth, a line for each stack, coloured by modality."""
    told = {owner_of(record): record for record in found.records}
    dashes = dashes_of(found.rows)
    traces = []
    for row in found.rows:
        points = counted(told[owner_of(row)])
        colour, state = palette.series(hue_of(row["modality"])), state_of(row)
        name = html.escape(f"{row['label']} ({row['modality']})")
        text = [f"<b>{name}</b><br>{place_words(p)}<br><b>{cosine_words(p)}</b>" for p in points]
        traces.append({
            "type": "scatter", "mode": "lines+markers", "name": name, "showlegend": False,
            "x": [p["depth"] for p in points], "y": [brief(p["cosine"]) for p in points], "text": text,
            "hovertemplate": "%{text}<extra></extra>",
            "line": {"color": colour, "width": 1.8, "dash": dashes[owner_of(row)]},
            "marker": {"color": colour, "size": 8 if state == "fails" else 6, "symbol": LOOKS[state][1],
                       "line": {"color": colour, "width": 1.6}},
        })  # fmt: skip
    layout = base_layout(palette) | {"xaxis": x_axis(Axis(True, 1, False), palette)}
    return {"data": traces, "layout": layout | {"yaxis": value_axis(palette, "average cosine")}}


def brief(value: float | None) -> float | None:
    """Four digits: what a drawing can show; None where there is no number."""
    known = finite(value)
    return None if known is None else float(f"{known:.4g}")


def place_words(point: Record) -> str:
    return html.escape(site_name(point["layer"], point["kind"]))


def cosine_words(point: Record) -> str:
    return f"average cosine {estimate(point['cosine'], point['low'], point['high'])}"


def value_axis(palette: Palette, title: str) -> Spec:
    axis: Spec = {"gridcolor": palette.role("rule"), "zeroline": False, "nticks": 6, "exponentformat": "power"}
    axis |= {"tickcolor": palette.role("rule"), "automargin": True}
    return axis | {"title": {"text": title, "font": {"size": 11}, "standoff": 8}}


def _profile_alt(found: Comparison) -> str:
    told = [f"{row['label']} ({row['modality']}) {number(row['mean'])}" for row in found.rows[:8]]
    return f"Average cosine over relative depth; means over blocks: {'; '.join(told)}."


# in sentences


def modality_findings(found: Comparison) -> list[Finding]:
    """How anisotropic each modality is, and which models drift does not explain; nothing of a single modality."""
    if len(found.modalities) < 2:
        return []
    trained = [row for row in found.rows if not row["untrained"]]
    means = [_modality_words(m, [row for row in trained if row["modality"] == m]) for m in found.modalities]
    if not any(means):
        return []
    texts = [f"Average cosine over blocks: {listed([text for text in means if text])}."]
    missed, unsure = ([r["label"] for r in trained if state_of(r) == state] for state in ("fails", "undecided"))
    texts += [f"The anisotropy of {listed(missed)} is not explained by drift."] if missed else []
    texts += [f"Whether drift explains it is open in {listed(unsure)}."] if unsure else []
    left = len(found.rows) - len(trained)
    verb = "is" if left == 1 else "are"
    texts += [f"{plural(left, 'stack')} with untrained weights {verb} shown and not counted here."] if left else []
    return [Finding("Modality", tuple(texts))]


def _modality_words(modality: str, rows: Sequence[Record]) -> str:
    """The mean over the models of one modality; of one model with its interval."""
    if not rows:
        return ""
    if len(rows) == 1:
        return f"{estimate(rows[0]['mean'], rows[0]['mean_low'], rows[0]['mean_high'])} in {modality}"
    values = sorted(row["mean"] for row in rows)
    mean = sum(values) / len(values)
    return f"{number(mean)} in {modality} ({plural(len(rows), 'stack')}, {number(values[0])} to {number(values[-1])})"
