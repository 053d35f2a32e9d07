"""The page of the study of untrained blocks: verdicts, reference values, panels of curves over the bias.

Curves are means over seeds with Student's interval, clipped to the bounds of the quantity: an average cosine is at most
1, a norm at least 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table as RichTable

from anisoscope.claims.engine.claim import Bounds
from anisoscope.results.query import Query
from anisoscope.studies.page_parts import (
    Mark,
    caption,
    files,
    numeric,
    over_seeds,
    page_of,
    prose,
    verdict_section,
    words_of,
)
from anisoscope.view.console import new_table
from anisoscope.view.figure import Axis, Figure, Level, Panel, Series, brief, points, sequence, series, value_axis
from anisoscope.view.matplotlib_renderer import slug
from anisoscope.view.page import DataTable, Fold, Heading, Page, Prose, Section, Swatch, Swatches, TableCell, text
from anisoscope.view.sections.findings import verdict_claims
from anisoscope.view.subjects import RunView
from anisoscope.view.words import Catalogue, few, listed, number, plural

Place = tuple[str, str]  # kind of site, metric


class CurveArm(NamedTuple):
    """One kind of block and of inputs."""

    family: str
    init: str
    width: int
    norm: bool

    def __str__(self) -> str:
        return f"{INITS.get(self.init, self.init)}, width {self.width}, {inputs(self.norm)}"


INITS = {"normal": "N(0, 0.02²)", "xavier": "Xavier", "orthogonal": "orthogonal", "own": "the family’s own"}
# (input_norm, bias, average cosine of inputs, of outputs, entropy / log m): BERT-base size, N(0, 0.02²), length 512
REFERENCE: tuple[tuple[bool, float, float, float, float | None], ...] = (
    (True, 0.0, 0.000, 0.012, 0.993),
    (True, 50.0, 0.765, 0.782, 0.968),
    (True, 100.0, 0.929, 0.935, 0.894),
    (True, 200.0, 0.981, 0.983, 0.639),
    (False, 0.5, 0.449, 0.476, None),
    (False, 1.0, 0.765, 0.783, None),
)
REFERENCE_BLOCK = ("bert", "normal", 768)
REFERENCE_LENGTH = 512
COSINE_IN, COSINE_OUT = ("embed", "average_cosine"), ("resid", "average_cosine")
ENTROPY = ("scores", "attention_entropy")
COLUMNS = {
    "Cosine in": COSINE_IN,
    "out": COSINE_OUT,
    "Norm in": ("embed", "mean_norm"),
    "out ": ("resid", "mean_norm"),
    "Norm of the mean, out": ("resid", "drift"),
    "cos(q̄, k̄)": ("query", "qk_cosine"),
    "Mean |score|": ("scores", "score_magnitude"),
    "Spread": ("scores", "score_spread"),
    "Entropy / log m": ENTROPY,
    "Largest p": ("scores", "attention_max"),
}
# panel title: title of the y axis, and its scale (logarithmic, or 0 to 1)
PANELS = {
    "Average cosine": ("Average cosine", "unit"),
    "Norms of the stream": ("Norm", "log"),
    "Norms of q and k": ("Norm", "log"),
    "Cosines of q and k": ("Cosine", ""),
    "Scores before softmax": ("Score", "log"),
    "Entropy and sharpness": ("Entropy / log m, sharpness", "unit"),
    "Softmax of a row": ("Weight p", "log"),
}
# panel, place, label, colour, dashed
LINES: tuple[tuple[str, Place, str, int, bool], ...] = (
    ("Average cosine", COSINE_IN, "input", 6, True),
    ("Average cosine", COSINE_OUT, "output", 0, False),
    ("Norms of the stream", ("embed", "mean_norm"), "input", 6, False),
    ("Norms of the stream", ("embed", "drift"), "its mean (input)", 6, True),
    ("Norms of the stream", ("resid", "mean_norm"), "output", 0, False),
    ("Norms of the stream", ("resid", "drift"), "its mean (output)", 0, True),
    ("Norms of q and k", ("query", "mean_norm"), "query", 1, False),
    ("Norms of q and k", ("query", "drift"), "mean query", 1, True),
    ("Norms of q and k", ("key", "mean_norm"), "key", 2, False),
    ("Norms of q and k", ("key", "drift"), "mean key", 2, True),
    ("Cosines of q and k", ("query", "average_cosine"), "within queries", 1, False),
    ("Cosines of q and k", ("key", "average_cosine"), "within keys", 2, False),
    ("Cosines of q and k", ("query", "qk_cosine"), "mean q, mean k", 3, True),
    ("Scores before softmax", ("scores", "score_magnitude"), "mean |score|", 4, False),
    ("Scores before softmax", ("scores", "score_spread"), "spread in a row", 3, False),
    ("Entropy and sharpness", ENTROPY, "entropy / log m", 0, False),
    ("Entropy and sharpness", ("scores", "attention_sharpness"), "sharpness", 1, True),
    ("Softmax of a row", ("scores", "attention_max"), "largest", 1, False),
    ("Softmax of a row", ("scores", "attention_median"), "median", 6, False),
    ("Softmax of a row", ("scores", "attention_min"), "smallest", 0, False),
)
MULTIPLES: tuple[tuple[Place, str, str], ...] = (
    (COSINE_OUT, "Average cosine of outputs", "unit"),
    (ENTROPY, "Entropy / log m", "unit"),
    (("scores", "score_spread"), "Spread of scores in a row", "log"),
)
MARKERS = ("circle", "square", "diamond", "triangle-up")


def inputs(norm: bool) -> str:
    """A phrase for inputs with or without layer norm."""
    return "normed inputs" if norm else "plain inputs"


def prediction(values: Sequence[float], *, bounds: Bounds = (None, None)) -> tuple[float, float]:
    """The 95 % prediction interval for a further seed: mean ± t·sd·√(1 + 1/n); NaN with fewer than three seeds."""
    further = over_seeds(values, bounds=bounds, widen=math.sqrt(len(values) + 1)) or Mark(math.nan)
    return further.low, further.high


@dataclass(frozen=True)
class BiasCurves:
    """The rows of the study by arm, place and bias."""

    query: Query
    about: Mapping[str, Any]
    catalogue: Catalogue

    @classmethod
    def of(cls, run: RunView, declared: Mapping[str, Any] | None = None) -> BiasCurves:
        grid = {"bias": ..., "init": ..., "input_norm": ..., "width": ...}
        return cls(Query(run.table).where(**grid), run.about, Catalogue(declared))

    @cached_property
    def arms(self) -> list[CurveArm]:
        keys = self.query.groups("model", "init", "width", "input_norm")
        return [CurveArm(model, init, int(width), norm == "1") for model, init, width, norm in keys]

    @cached_property
    def values(self) -> dict[tuple[CurveArm, str, str, float], list[float]]:
        """Values of all seeds, by arm, place and bias."""
        found = self.query.groups("model", "init", "width", "input_norm", "kind", "metric", "bias")
        return {
            (CurveArm(model, init, int(width), norm == "1"), kind, metric, float(bias)): rows.numbers().tolist()
            for (model, init, width, norm, kind, metric, bias), rows in found.items()
        }

    @cached_property
    def biases(self) -> list[float]:
        return sorted(map(float, self.query.values("bias")))

    @property
    def families(self) -> list[str]:
        return list(dict.fromkeys(arm.family for arm in self.arms))

    @property
    def seeds(self) -> int:
        """The largest number of seeds of any point."""
        return max(map(len, self.values.values()), default=0)

    def of_axis(self, name: str) -> list[Any]:
        """The distinct values of a field of the arms, in order of occurrence; widths are sorted."""
        found = list(dict.fromkeys(getattr(arm, name) for arm in self.arms))
        return sorted(found) if name == "width" else found

    def leading_arms(self) -> list[CurveArm]:
        """For each family and kind of inputs the arm shown in full: N(0, 0.02²) if measured, and the largest width."""
        best: dict[tuple[str, bool], CurveArm] = {}
        for arm in self.arms:
            rival = best.get((arm.family, arm.norm))
            if rival is None or (arm.init == "normal", arm.width) > (rival.init == "normal", rival.width):
                best[arm.family, arm.norm] = arm
        return list(best.values())

    def bounds(self, metric: str) -> Bounds:
        """The declared bounds of a metric; undeclared ones: 0 to 1 for softmax weights, else non-negative."""
        low, high = self.catalogue.entry(metric).bounds
        share = metric in ("attention_median", "attention_min")
        return (0.0, 1.0 if share else None) if low is None and high is None else (low, high)

    def seeds_at(self, arm: CurveArm, bias: float, kind: str, metric: str) -> list[float]:
        return self.values.get((arm, kind, metric, bias), [])

    def at(self, arm: CurveArm, bias: float, kind: str, metric: str) -> Mark | None:
        """The mean over seeds at one bias, or None where nothing was measured."""
        return over_seeds(self.seeds_at(arm, bias, kind, metric), bounds=self.bounds(metric))

    def exponent(self, arm: CurveArm, *, last: int = 3) -> tuple[Mark | None, list[float]]:
        """The slope of log mean |score| over log N at the largest biases, over seeds; and these biases."""
        there = {bias: self.seeds_at(arm, bias, "scores", "score_magnitude") for bias in self.biases if bias > 0}
        biases = [bias for bias, seeds in there.items() if seeds][-last:]
        if len(biases) < 2:
            return None, biases
        count = min(len(there[bias]) for bias in biases)
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log([[there[bias][n] for bias in biases] for n in range(count)])
            slopes = [float(np.polyfit(np.log(biases), line, 1)[0]) for line in logs]
        return over_seeds(slopes), biases

    def lengths(self) -> dict[str, float]:
        """The ratio of norms of normalised to plain inputs by family, where both were measured without bias."""
        found = {}
        for family in self.families:
            both = [[value for arm in self.arms if (arm.family, arm.norm) == (family, norm)
                     for value in self.seeds_at(arm, 0.0, "embed", "mean_norm")] for norm in (True, False)]  # fmt: skip
            if all(both) and all(both[1]):
                found[family] = float(np.mean(both[0]) / np.mean(both[1]))
        return found

    def fixed_norm(self, family: str) -> bool:
        """Whether all outputs of a family have norm √d (post-norm: a layer norm after the last residual sum)."""
        means = [
            abs(value / math.sqrt(arm.width) - 1) < 0.01
            for (arm, kind, metric, _), values in self.values.items()
            if (arm.family, kind, metric) == (family, "resid", "mean_norm")
            for value in values
        ]
        return bool(means) and all(means)

    def reference_rows(self) -> list[dict[str, Any]]:
        """Reference values with our values; empty if the block of the reference was not measured."""
        config = {**self.about.get("config", {}), **self.about.get("size", {})}
        if config.get("length") != REFERENCE_LENGTH or config.get("heads") not in (None, 12):
            return []
        rows = []
        for norm, bias, *expected in REFERENCE:
            cells = []
            for place, value in zip((COSINE_IN, COSINE_OUT, ENTROPY), expected, strict=True):
                seeds = self.seeds_at(CurveArm(*REFERENCE_BLOCK, norm), bias, *place)
                low, high = prediction(seeds, bounds=self.bounds(place[1]))
                rounding = 0.0006  # the reference values have three decimals
                inside = None if value is None or math.isnan(low) else low - rounding <= value <= high + rounding
                cells.append({"expected": value, "mark": over_seeds(seeds), "inside": inside, "low": low, "high": high})
            if any(cell["mark"] is not None for cell in cells):
                rows.append({"norm": norm, "bias": bias, "cells": cells})
        return rows


def bias_place(bias: float, least: float) -> float:
    """The x position of a bias: logarithmic for positive ones, with 0 placed left of the smallest."""
    return math.log10(bias / least) if bias > 0 else -0.5


def bias_axis(biases: Sequence[float]) -> Axis:
    """A logarithmic axis of the bias that also has a place for 0."""
    positive = [bias for bias in biases if bias > 0] or [1.0]
    least, most = min(positive), max(positive)
    decades = [10.0**e for e in range(-4, 7) if least <= 10.0**e <= most]
    ticks = [0.0, *decades] if len(decades) > 1 else [0.0, least, most]
    places = [bias_place(tick, least) for tick in ticks]
    ends = (-0.6, bias_place(most, least) + 0.1)
    return Axis("size of the bias N", ticks=(places, [f"{tick:g}" for tick in ticks]), bounds=ends)


def bias_panel(curves: BiasCurves, y: Axis, drawn: Sequence[Series], **look: Any) -> Panel:
    """A panel of lines over the bias; bias 0 is left of the dotted line."""
    zero = (Level(-0.25, upright=True, colour="@rule"),) if any(bias > 0 for bias in curves.biases) else ()
    return Panel(bias_axis(curves.biases), y, tuple(drawn), levels=zero, **look)


def curve(curves: BiasCurves, arm: CurveArm, place: Place, label: str, *, log: bool, **look: Any) -> list[Series]:
    """A line through the means with a band for their intervals; only positive values on a logarithmic axis."""
    least = min([bias for bias in curves.biases if bias > 0] or [1.0])
    found = {bias: mark for bias in curves.biases if (mark := curves.at(arm, bias, *place)) is not None}
    if log:
        found = {n: m._replace(low=m.value / 3 if m.low <= 0 else m.low) for n, m in found.items() if m.value > 0}
    if not found:
        return []
    x, where = [bias_place(bias, least) for bias in found], [f"N = {bias:g}" for bias in found]
    return [points(label, x, list(found.values()), size=4.2, where=where, reach="95 % over seeds:", **look)]


def upright_axis(scale: str, drawn: Sequence[Series], title: str = "") -> Axis:
    """The y axis: 0 to 1, or logarithmic over at least a decade, so that noise does not look like an effect."""
    if scale == "unit":
        return Axis(title, rules=True, bounds=(-0.04, 1.04))
    values = [v for s in drawn for v in s.y if v is not None and math.isfinite(v)]
    if scale != "log" or not values:
        return value_axis(values, title, log=False)
    low, high = min(values) / 1.3, max(values) * 1.3
    if high < 10 * low:
        middle = math.sqrt(low * high)
        low, high = middle / 3.5, middle * 3.5
    return Axis(title, log=True, rules=True, bounds=(low, high), most=5)


def block_figure(curves: BiasCurves, arm: CurveArm, histograms: Mapping[str, np.ndarray]) -> Figure:
    """All measurements of one block and one kind of inputs against the bias."""
    panels = []
    for title, (name, scale) in PANELS.items():
        drawn: list[Series] = []
        for _, place, label, hue, dashed in (line for line in LINES if line[0] == title):
            look = {"colour": series(hue), "hollow": dashed, "dash": "dash" if dashed else "solid"}
            drawn += curve(curves, arm, place, label, log=scale == "log", **look)
        alt = f"{title} of {arm.family} against the bias, {arm}."
        y = upright_axis(scale, drawn, name)
        panels.append(bias_panel(curves, y, drawn, title=title, legend=True, height=250, alt=alt))
    panels += score_panels(curves, arm, histograms)
    stem = f"untrained-panel-{slug(arm.family)}-{inputs(arm.norm).split()[0]}"
    return files(stem, panels, most=8, columns=4, size=2.0)


def score_panels(curves: BiasCurves, arm: CurveArm, histograms: Mapping[str, np.ndarray]) -> list[Panel]:
    """Densities of the scores at some biases over all seeds, on an axis that is fine near 0; empty without scores."""
    edges = np.asarray(histograms.get("edges", ()), dtype=float)
    shown = [curves.biases[i] for i in few(range(len(curves.biases)), 5)] if len(edges) else []
    drawn, far = [], 0.0
    where, x = [f"score {edge:.3g}" for edge in edges[:-1]], [brief(float(x)) for x in np.arcsinh(edges[:-1] / 0.05)]
    for i, bias in enumerate(shown):
        start, end = f"{arm.family}-{arm.init}-{arm.width}-", f"/input_norm={int(arm.norm)}/bias={bias:g}"
        matching = [np.asarray(v, float) for k, v in histograms.items() if k.startswith(start) and k.endswith(end)]
        counts = np.sum(matching, axis=0)
        if not np.sum(counts):
            continue
        density = counts / counts.sum() / np.diff(edges)  # bins widen away from 0: shares would have false humps
        there = np.flatnonzero(density * np.diff(edges) > 1e-4)
        far = max(far, *(abs(edges[[there[0], there[-1] + 1]]))) if len(there) else far
        y = [brief(float(d)) if d > 0 else None for d in density]
        drawn.append(Series(f"N = {bias:g}", x, y, sequence(i / max(1, len(shown) - 1)), stairs=True, where=where))
    if not drawn or not far:
        return []
    ticks = [t for t in (0.1, 1.0, 10.0, 100.0, 1000.0) if t <= far][-2:]
    both = [*(-t for t in reversed(ticks)), 0.0, *ticks]
    reach = float(np.arcsinh(far / 0.05))
    places, names = [float(np.arcsinh(t / 0.05)) for t in both], [f"{t:g}".replace("-", "−") for t in both]
    values = [v for s in drawn for v in s.y if v]
    ends = max(1e-5 * max(values), min(values)), 2 * max(values)  # below this are single scores
    x_axis = Axis("score before softmax", bounds=(-reach, reach), ticks=(places, names))
    y_axis = Axis("Density", log=True, rules=True, bounds=ends)
    alt = f"Densities of the scores of {arm.family}, {arm}."
    return [Panel(x_axis, y_axis, tuple(drawn), legend=True, height=250, title="Histogram of scores", alt=alt)]


def variants_figure(curves: BiasCurves, family: str, norm: bool) -> Figure | None:
    """One family and kind of inputs: rows are quantities, columns initialisations, lines widths; inputs in grey."""
    inits, widths = curves.of_axis("init"), curves.of_axis("width")
    if len(inits) * len(widths) < 2:
        return None
    panels = []
    for place, words, scale in MULTIPLES:
        rows = [_widths(curves, family, init, norm, place, log=scale == "log") for init in inits]
        y = upright_axis(scale, [one for drawn in rows for one in drawn], words)
        for name, drawn in zip([INITS.get(init, init) for init in inits], rows, strict=True):
            alt = f"{words} of {family} by width, {name}, {inputs(norm)}."
            panels.append(bias_panel(curves, y, drawn, height=230, title=name, alt=alt))
    stem = f"untrained-variants-{slug(family)}-{inputs(norm).split()[0]}"
    return files(stem, panels, most=99, columns=len(inits), size=1.6)


def _widths(curves: BiasCurves, family: str, init: str, norm: bool, place: Place, *, log: bool) -> list[Series]:
    widths, found = curves.of_axis("width"), []
    grey: dict[str, Any] = {"colour": "@soft", "dash": "dot", "width": 1.2}
    for i, width in enumerate(widths):
        arm = CurveArm(family, init, width, norm)
        if place == COSINE_OUT:
            found += curve(curves, arm, COSINE_IN, "inputs", log=log, named=i == 0, **grey)
        look = {"colour": sequence(i / max(1, len(widths) - 1)), "marker": MARKERS[i % len(MARKERS)]}
        found += curve(curves, arm, place, f"width {width}", log=log, **look)
    return found


def study_page(
    run: RunView, declared: Mapping[str, Any] | None = None, histograms: Mapping[str, np.ndarray] | None = None
) -> Page:
    """The page of the study: verdicts, reference values, growth of scores, and the curves of every family."""
    curves = BiasCurves.of(run, declared)
    size = run.about.get("size", {})
    deck = (
        f"One transformer block at initialisation whose inputs share a bias: {', '.join(curves.families)}; "
        f"{size.get('sequences')} sequences of {size.get('length')} positions, {plural(curves.seeds, 'seed')}"
    )
    sections = [_verdicts(curves, run), *_reference_section(curves), *_growth_section(curves)]
    sections += [_family_section(curves, name, histograms or {}) for name in curves.families]
    inits = listed([INITS.get(init, init) for init in curves.of_axis("init")])
    widths, biases = listed(list(map(str, curves.of_axis("width")))), listed([f"{bias:g}" for bias in curves.biases])
    record = (
        f"Initialisations: {inits}; widths: {widths}; biases: {biases}. All numbers are in <code>table.parquet</code> "
        "(there a row has an interval over the sequences of its one seed), histograms of scores in "
        "<code>arrays/histograms.safetensors</code>, the verdicts in <code>verdicts.json</code>."
    )
    return page_of(run, "Blocks before any training", deck, sections, terms=TERMS, record=record)


def _verdicts(curves: BiasCurves, run: RunView) -> Section:
    lengths = lengths_in_words(curves)
    seeds = "With fewer than three seeds there is no interval over seeds, and nothing general is said."
    if curves.seeds > 2:
        seeds = (
            "Seeds are the independent samples – each has tokens, direction and weights of its own – and intervals are "
            f"Student’s over the {curves.seeds} of them."
        )
    lead = prose(
        "The block is given rows x + N·b/‖b‖: embeddings x of random tokens, all moved by a bias of size N in one "
        "random direction b. <em>Normed inputs</em> went through a LayerNorm before the bias was added and have norm "
        "√d; <em>plain inputs</em> are left as they are drawn{lengths}. A "
        "claim <em>holds</em> for a family where the 95&nbsp;% interval of its effect lies beyond the margin in every "
        "arm (initialisation, width, kind of inputs), <em>fails</em> where it lies short of it in one, and is "
        "<em>undecided</em> otherwise; the numbers are those of the arm on which it hangs. {seeds}",
        lengths=f": {lengths}; what counts is N against ‖x‖" if lengths else "",
        seeds=seeds,
    )
    claims = verdict_claims(run.verdicts)
    body = [
        [TableCell(text("<code>{n}</code>", n=claim["name"])), row["subject"], part["name"],
         *numeric(part["effect"], part["interval"] or "–"), part["status"] or "told, not judged"]
        for claim in claims for row in claim["rows"] for part in row["parts"]
    ]  # fmt: skip
    heads = ["Claim", "Family", "Arm", *numeric("Effect", text("95&nbsp;% interval")), "Status"]
    table = DataTable([heads], [body], "Every arm by itself", "plain wide", numeric=99)
    return verdict_section(lead, claims, "Family", Fold("Every arm by itself", [table]), p=False)


def lengths_in_words(curves: BiasCurves) -> str:
    """A sentence that compares plain and normalised inputs: some families have embeddings as long as after a norm."""
    words = {family: f"{ratio:.2g} times shorter" if ratio > 1.1 else "as long as normed ones" if ratio > 0.9
             else f"{1 / ratio:.2g} times longer" for family, ratio in curves.lengths().items()}  # fmt: skip
    families = {word: listed([family for family in words if words[family] == word]) for word in words.values()}
    return "; ".join(f"{word} for {who}" for word, who in families.items())


def _reference_section(curves: BiasCurves) -> list[Section]:
    rows = curves.reference_rows()
    if not rows:
        return []
    lead = (
        f"A post-norm block of BERT-base size (width 768, 12 heads), weights N(0, 0.02²), length 512. Large: the mean "
        f"over {curves.seeds} seeds here; small: where one further seed falls 95 times in 100; ✓ where the reference "
        "does. Only the embeddings of tokens are used: the token-type embedding of BERT is itself a shared bias "
        "(average cosine ⅓ without any N), and position embeddings would double the variance of plain inputs."
    )
    pairs = ("Average cosine in", "Average cosine out", "Entropy / log m")
    first = [TableCell("Inputs", rows=2), *numeric("Bias N", rows=2), *numeric(*pairs, columns=2)]
    body = []
    for row in rows:
        cells = [TableCell(inputs(row["norm"]), head=True), *numeric(f"{row['bias']:g}")]
        for cell in row["cells"]:
            mark, known = cell["mark"], not math.isnan(cell["low"])
            sign = {True: "✓", False: "✕", None: ""}[cell["inside"]]
            span = f"{_three(cell['low'])} to {_three(cell['high'])}" if known else ""
            cells += numeric("–" if cell["expected"] is None else f"{cell['expected']:.3f}")
            cells += numeric(f"{'–' if mark is None else f'{mark.value:.3f}'} {sign}", small=[span] if span else ())
        body.append(cells)
    heads = [first, numeric(*["reference", "here"] * len(pairs))]
    table = DataTable(heads, [body], "Reference values beside ours", "plain wide", numeric=99)
    return [Section("reference", "Reference values", [Prose(lead), table], "Reference")]


def _three(value: float) -> str:
    """The value with three decimals, without a sign before zero."""
    return f"{round(value, 3) + 0.0:.3f}".replace("-", "−")


def _growth_section(curves: BiasCurves) -> list[Section]:
    """The growth exponent of mean |score| with the bias, for the leading arm of each family."""
    body = []
    for arm in curves.leading_arms():
        mark, biases = curves.exponent(arm)
        if mark is not None:
            body.append([TableCell(f"{arm.family}, {arm}", head=True), f"{biases[0]:g} to {biases[-1]:g}", mark.words])
    lead = (
        "The slope of log mean |score| over log N at the largest biases. Where queries and keys are linear in the "
        "inputs it tends to 2 as N outgrows ‖x‖: both grow with N. Where a norm stands before the attention it is near "
        "0: the norm takes the size of the bias away and leaves its direction."
    )
    table = DataTable([["Block", "N from … to", "Exponent"]], [body], "How fast scores grow")
    return [Section("growth", "How fast scores grow", [Prose(lead), table], "Scores")] if body else []


def _family_section(curves: BiasCurves, name: str, histograms: Mapping[str, np.ndarray]) -> Section:
    entry: Mapping[str, Any] = next((e for e in curves.about.get("models", []) if e.get("name") == name), {})
    lead = ("<code>{block}</code>" if entry.get("block") else "") + (": {about}" if entry.get("about") else "")
    lead += ". Rows x: {rows}."
    if curves.fixed_norm(name):
        lead += " Its outputs pass a norm last, so their norm is √d by construction and says nothing."
    parts: list[Any] = [prose(lead, **{key: entry.get(key, "") for key in ("block", "about", "rows")})]
    shown = [arm for arm in curves.leading_arms() if arm.family == name]
    for arm in shown:
        words = caption(
            f"{arm}. Lines: means over seeds; bands: 95&nbsp;% over seeds. Left of the dotted rule stands 0. "
            "Norms: mean norm of rows (solid) and norm of their mean (dashed). Queries, keys and scores: means over "
            "heads; softmax and histogram over sampled query rows."
        )
        parts += [Heading(str(arm)), block_figure(curves, arm, histograms), words]
    widths = curves.of_axis("width")
    key = Swatches([Swatch(f"width {w}", sequence(i / max(1, len(widths) - 1))) for i, w in enumerate(widths)])
    for norm in curves.of_axis("norm"):
        figure = variants_figure(curves, name, norm)
        if figure is not None:
            words = caption(
                f"Initialisations (columns) and widths (lines), {inputs(norm)}. Dotted grey: the inputs’ own average "
                "cosine, one line for each width."
            )
            parts += [Heading(f"Initialisations and widths, {inputs(norm)}"), key, figure, words]
    tables = [part for arm in shown for part in (Heading(str(arm), 4), _numbers(curves, arm))]
    return Section(f"family-{slug(name)}", name, [*parts, Fold("Numbers", tables)], name)


def _numbers(curves: BiasCurves, arm: CurveArm) -> DataTable:
    body = []
    for bias in curves.biases:
        cells = [words_of(curves.at(arm, bias, *place)) for place in COLUMNS.values()]
        body.append([TableCell(f"{bias:g}", head=True, css="num"), *cells])
    label = f"Numbers of {arm.family}, {arm}"
    return DataTable([[*numeric("Bias N"), *COLUMNS]], [body], label, "plain wide")


TERMS = """
Average cosine | average_cosine | (‖Σ hᵢ/‖hᵢ‖‖² − n) / (n(n − 1))
Over all pairs of rows: of inputs (<code>embed</code>), outputs (<code>resid</code>), queries and keys of a head.

Drift | drift | ‖mean(h)‖
Norm of the mean row; <code>mean_norm</code> is the mean norm of rows.

Query–key cosine | qk_cosine | cos(mean q, mean k)
Mean over heads; queries and keys as they meet, after rotation where a family rotates.

Scores | score_magnitude score_spread |
Scores s as they are fed to softmax. Mean |s|, and the standard deviation of s over the keys of one row.

Entropy | attention_entropy | H(p) / log m
m keys allowed by the mask; rows with fewer than 8 are left out.

Softmax of a row | attention_max attention_median attention_min |
Means over rows of the largest, median and smallest weight. <code>attention_sharpness</code> is
(max p − 1/m)/(1 − 1/m).
"""


_COLUMNS = {
    "cosine in": COSINE_IN,
    "cosine out": COSINE_OUT,
    "norm out": ("resid", "mean_norm"),
    "mean |score|": ("scores", "score_magnitude"),
    "spread": ("scores", "score_spread"),
    "entropy": ENTROPY,
    "max p": ("scores", "attention_max"),
}


def summary(run: RunView) -> Iterator[RichTable]:
    """For the console: the main curves of the leading arms, one line per bias; means over seeds."""
    curves = BiasCurves.of(run)
    for arm in curves.leading_arms():
        table = new_table(f"{arm.family}, {arm}", (), ("bias", *_COLUMNS))
        for bias in curves.biases:
            marks = [curves.at(arm, bias, *place) for place in _COLUMNS.values()]
            table.add_row(f"{bias:g}", *(number(mark.value) if mark is not None else "–" for mark in marks))
        yield table
