"""Drift against average cosine in every model, and models of all modalities side by side.

Everything here is read by the claims' own readers (claims/inherent/): the page draws what the verdicts are made from. A
*record* is one stack of one model and seed, at its last measured step.
"""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from anisoscope.claims.inherent.drift import correlations, pooled
from anisoscope.claims.inherent.modalities import BEYOND, modality_table
from anisoscope.claims.inherent.streams import METRICS
from anisoscope.results.modality import MODALITIES
from anisoscope.results.table import Table
from anisoscope.view.charts import Chart
from anisoscope.view.findings import Finding
from anisoscope.view.joining import joint
from anisoscope.view.palette import DASHES, Palette, Tokens
from anisoscope.view.seeds import Bundle, bundles_of, in_front, in_seeds, range_words, size_words
from anisoscope.view.series import Source, short_names
from anisoscope.view.traces import Axis, Spec, base_layout, x_axis
from anisoscope.view.words import estimate, finite, listed, number, shortened, site_name, spans

Record = Mapping[str, Any]
Owner = tuple[str, str, Any]  # model, stack, seed
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

    records: list[dict[str, Any]]  # of `correlations`, with a label, and a name that all seeds have in common
    rows: list[dict[str, Any]]  # of `modality_table`, likewise
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
    labels, names = _labels(rows), _labels(rows, seeded=False)
    return Comparison(_named(records, labels, names), _named(rows, labels, names), pooled(table))


def _named(records: Sequence[Record], labels: Mapping[Owner, str], names: Mapping[Owner, str]) -> list[dict[str, Any]]:
    return [{**record, "label": labels[owner_of(record)], "name": names[owner_of(record)]} for record in records]


def _narrow(table: Table) -> pa.Table:
    """The rows that the readers need: a table over training has a hundred times as many."""
    arrow = table.arrow
    kept = pc.and_(pc.is_null(arrow["head"]), pc.is_in(arrow["metric"], value_set=pa.array(METRICS, pa.string())))
    return arrow.filter(kept)


def owner_of(record: Record) -> Owner:
    return record["model"], record["stack"], record["seed"]


def _labels(rows: Sequence[Record], *, seeded: bool = True) -> dict[Owner, str]:
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
        parts += [f"seed {row['seed']}"] if seeded and len(seeds[row["model"]]) > 1 else []
        found[owner_of(row)] = " · ".join(parts)
    return found


def hue_of(modality: str) -> int:
    return MODALITIES[modality].hue if modality in MODALITIES else 6


# modalities side by side


def modality_section(found: Comparison) -> tuple[dict[str, Any], dict[str, Spec]]:
    """The paper's table by modality and the profile of every model; empty with a single modality."""
    if len(found.modalities) < 2:
        return {}, {}
    bundles = bundles_of(found.rows)
    dashes = dashes_of(bundles)
    front, behind = in_front(bundles)
    chart = Chart("modality-1", "", _profile_alt(front), 380)
    states = {state_of(row) for row in found.rows}
    section = {
        "chart": chart,
        "key": [{"name": m, "colour": f"var(--s{hue_of(m) + 1})", "stroke": "", "band": ""} for m in found.modalities],
        "marks": [(sign_of(state), words) for state, (_, _, words) in LOOKS.items() if state in states],
        "groups": _by_modality(found, [_table_row(bundle, dashes) for bundle in front]),
        "random": _by_modality(found, [_table_row(bundle, dashes) for bundle in behind]),
        "random_words": size_words(behind) if behind else "",
        "seeds": any(bundle.seeds for bundle in bundles),
        "beyond": BEYOND,
    }
    return section, {chart.id: profile_spec(found, Tokens())}


def _by_modality(found: Comparison, rows: Sequence[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    groups = [(m, [row for row in rows if row["modality"] == m]) for m in found.modalities]
    return [(m, mine) for m, mine in groups if mine]


def sign_of(state: str) -> str:
    return {"holds": "●", "undecided": "○", "fails": "◇"}[state]


def state_of(row: Record) -> str:
    return {"yes": "holds", "no": "fails"}.get(row["explained_by_drift"], "undecided")


def dashes_of(bundles: Sequence[Bundle]) -> dict[Owner, str]:
    """Lines of one modality have one colour: models differ in dashes."""
    models: dict[str, dict[str, None]] = defaultdict(dict)
    for bundle in bundles:
        models[bundle.modality][bundle.first["model"]] = None
    order = {(m, model): i for m, mine in models.items() for i, model in enumerate(mine)}
    return {
        owner_of(row): DASHES[order[bundle.modality, row["model"]] % len(DASHES)]
        for bundle in bundles
        for row in bundle.members
    }


def _table_row(bundle: Bundle, dashes: Mapping[Owner, str]) -> dict[str, Any]:
    """A model in numbers: means over its seeds, and how far these reach."""
    row = bundle.first
    blocks = spans({member["max_layer"] for member in bundle.members})
    ends = range_words(bundle.values("mean")) if bundle.seeds else _between(row["mean_low"], row["mean_high"])
    return {
        "label": bundle.label,
        "seeds": bundle.seeds,
        "modality": bundle.modality,
        "untrained": bundle.untrained,
        "colour": f"var(--s{hue_of(bundle.modality) + 1})",
        "stroke": STROKES.get(dashes[owner_of(row)], ""),
        "blocks": row["layers"],
        "middle": number(bundle.mean("middle")),
        "max": number(bundle.mean("max")),
        "max_at": f"block{'' if blocks.isdigit() else 's'} {blocks}",
        "mean": (number(bundle.mean("mean")), ends),
        "beyond": f"{100 * (bundle.mean('share_beyond') or 0.0):.0f} %",
        "drift": number(bundle.mean("drift")),
        "states": state_words(bundle, state_of),
    }


def state_words(bundle: Bundle, state: Callable[[Record], str]) -> list[dict[str, str]]:
    """Whether drift explains a model: one sign and word, or several with the numbers of seeds."""
    counts = bundle.counts(state)
    seeds = {s: f" in {n} of {bundle.seeds}" if len(counts) > 1 else "" for s, n in counts.items()}
    return [{"state": s, "sign": sign_of(s), "word": LOOKS[s][0] + words} for s, words in seeds.items()]


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
    """Average cosine over relative depth, a line for each stack, coloured by modality; untrained ones are pale."""
    told = {owner_of(record): record for record in found.records}
    bundles = bundles_of(found.rows)
    dashes = dashes_of(bundles)
    front, behind = in_front(bundles)
    traces = [trace for b in behind for trace in _bundle_traces(b, told, dashes[owner_of(b.first)], palette, pale=True)]
    traces += [trace for b in front for trace in _bundle_traces(b, told, dashes[owner_of(b.first)], palette)]
    layout = base_layout(palette) | {"xaxis": x_axis(Axis(True, 1, False), palette)}
    return {"data": traces, "layout": layout | {"yaxis": value_axis(palette, "average cosine")}}


def _bundle_traces(
    bundle: Bundle, told: Mapping[Owner, Record], dash: str, palette: Palette, *, pale: bool = False
) -> list[Spec]:
    """The mean over seeds with a marker at every site, over thin lines of the seeds."""
    lines = [counted(told[owner_of(row)]) for row in bundle.members]
    colour, state = palette.series(hue_of(bundle.modality), 0.35 if pale else 1.0), common_state(bundle, state_of)
    words = ", ".join(part for part in (bundle.modality, "untrained weights" if pale else "", bundle.seeds) if part)
    name = html.escape(f"{bundle.label} ({words})")
    points = over_seeds(lines)
    drawn: Spec = {"type": "scatter", "name": name, "showlegend": False, "x": [p["depth"] for p in points]}
    path = drawn | {
        "mode": "lines+markers", "y": [brief(p["cosine"]) for p in points],
        "text": [f"<b>{name}</b><br>{place_words(p)}<br><b>{cosine_words(p)}</b>" for p in points],
        "hovertemplate": "%{text}<extra></extra>",
        "line": {"color": colour, "width": 1.1 if pale else 1.8, "dash": dash},
        "marker": {"color": colour, "size": 4 if pale else 8 if state == "fails" else 6, "symbol": LOOKS[state][1],
                   "line": {"color": colour, "width": 1 if pale else 1.6}},
    }  # fmt: skip
    if pale or len(lines) == 1:
        return [path]
    faint = {"mode": "lines", "hoverinfo": "skip", "line": {"color": palette.series(hue_of(bundle.modality), 0.35),
             "width": 0.9, "dash": dash}}  # fmt: skip
    thin = [drawn | faint | {"x": [p["depth"] for p in one], "y": [brief(p["cosine"]) for p in one]} for one in lines]
    return [*thin, path]


def common_state(bundle: Bundle, state: Callable[[Record], str]) -> str:
    """What all seeds agree on, else open."""
    counts = bundle.counts(state)
    return next(iter(counts)) if len(counts) == 1 else "undecided"


def over_seeds(lines: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The points of a model: its own with their intervals, or means over seeds from the lowest to the highest."""
    if len(lines) == 1:
        return list(lines[0])
    places: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for point in (point for line in lines for point in line):
        places[point["layer"], point["kind"]].append(point)
    return [_mean_point(points) for points in places.values()]


def _mean_point(points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    values = [value for p in points if (value := finite(p["cosine"])) is not None]
    ends = {"seeds": range_words(values), "low": None, "high": None}
    return {**points[0], **ends, "cosine": fmean(values) if values else None}


def brief(value: float | None) -> float | None:
    """Four digits: what a drawing can show; None where there is no number."""
    known = finite(value)
    return None if known is None else float(f"{known:.4g}")


def place_words(point: Record) -> str:
    return html.escape(site_name(point["layer"], point["kind"]))


def cosine_words(point: Record) -> str:
    words = f"average cosine {estimate(point['cosine'], point['low'], point['high'])}"
    return f"{words}<br>seeds from {point['seeds']}" if point.get("seeds") else words


def value_axis(palette: Palette, title: str) -> Spec:
    axis: Spec = {"gridcolor": palette.role("rule"), "zeroline": False, "nticks": 6, "exponentformat": "power"}
    axis |= {"tickcolor": palette.role("rule"), "automargin": True}
    return axis | {"title": {"text": title, "font": {"size": 11}, "standoff": 8}}


def _profile_alt(front: Sequence[Bundle]) -> str:
    told = [f"{bundle.label} ({bundle.modality}) {number(bundle.mean('mean'))}" for bundle in front[:8]]
    return f"Average cosine over relative depth; means over blocks: {'; '.join(told)}."


# in sentences


def modality_findings(found: Comparison) -> list[Finding]:
    """How anisotropic each modality is, and which models drift does not explain; nothing of a single modality."""
    if len(found.modalities) < 2:
        return []
    bundles = bundles_of(found.rows)
    trained = [bundle for bundle in bundles if not bundle.doubt]
    means = [_modality_words(m, [b for b in trained if b.modality == m]) for m in found.modalities]
    if not any(means):
        return []
    texts = [f"Average cosine over blocks: {listed([text for text in means if text])}."]
    missed, unsure = (shortened(in_seeds(trained, state_of, state), 5) for state in ("fails", "undecided"))
    alone = any(bundle.seeds for bundle in trained)  # each seed has few layers: over all seeds more can be said
    start = "Seed by seed, the" if alone else "The"
    texts += [f"{start} anisotropy of {missed} is not explained by drift."] if missed else []
    texts += [f"Whether drift explains it is open in {unsure}."] if unsure else []
    left = [bundle for bundle in bundles if bundle.untrained]
    verb = "is" if len(left) == 1 and not left[0].seeds else "are"
    texts += [f"{size_words(left)} with untrained weights {verb} shown and not counted here."] if left else []
    texts += [f"{b.label} {b.doubt}: shown and not counted here." for b in bundles if b.doubt and not b.untrained]
    return [Finding("Modality", tuple(texts))]


def _modality_words(modality: str, bundles: Sequence[Bundle]) -> str:
    """The mean over the models of one modality; of one model with its interval, or how far its seeds reach."""
    rows = [row for bundle in bundles for row in bundle.members]
    if not rows:
        return ""
    if len(rows) == 1:
        return f"{estimate(rows[0]['mean'], rows[0]['mean_low'], rows[0]['mean_high'])} in {modality}"
    size = bundles[0].seeds if len(bundles) == 1 else size_words(bundles)
    values = [row["mean"] for row in rows]
    return f"{number(fmean(values))} in {modality} ({size}, {range_words(values)})"
