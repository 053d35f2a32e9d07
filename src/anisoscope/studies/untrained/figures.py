"""The page of the study of untrained blocks: verdicts, reference values, panels of curves over the bias.

Curves are means over seeds with Student's interval; an interval ends where its quantity does: no average cosine lies
beyond 1, no norm below 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table as RichTable

from anisoscope.claims.engine.part import FEWEST_SEEDS, Bounds, Part, t_interval
from anisoscope.results.query import Query
from anisoscope.view.console import new_table
from anisoscope.view.figure import Axis, Figure, Level, Panel, Series, brief, sequence, series, value_axis
from anisoscope.view.matplotlib_renderer import slug
from anisoscope.view.page import (
    DataTable,
    Fold,
    Heading,
    Page,
    Prose,
    Section,
    Swatch,
    Swatches,
    TableCell,
    Verdicts,
    text,
)
from anisoscope.view.sections.findings import common_scope, verdict_claims
from anisoscope.view.sections.record import record_section, terms_section
from anisoscope.view.subjects import RunView
from anisoscope.view.words import Catalogue, estimate, few, listed, number

Place = tuple[str, str]  # kind of site, metric


class CurveArm(NamedTuple):
    """One kind of block and of inputs."""

    family: str
    init: str
    width: int
    norm: bool

    def __str__(self) -> str:
        return f"{INITS.get(self.init, self.init)}, width {self.width}, {inputs(self.norm)}"


class SeedMean(NamedTuple):
    """A mean over seeds with its interval; NaN for the interval of fewer than three."""

    value: float
    low: float
    high: float


INITS = {"normal": "N(0, 0.02²)", "xavier": "Xavier", "orthogonal": "orthogonal", "own": "the family’s own"}
# normed inputs?, bias, average cosine in, out, entropy / log m; of BERT-base size, N(0, 0.02²), length 512
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
    "Cosine in": ("embed", "average_cosine"),
    "out": ("resid", "average_cosine"),
    "Norm in": ("embed", "mean_norm"),
    "out ": ("resid", "mean_norm"),
    "Norm of the mean, out": ("resid", "drift"),
    "cos(q̄, k̄)": ("query", "qk_cosine"),
    "Mean |score|": ("scores", "score_magnitude"),
    "Spread": ("scores", "score_spread"),
    "Entropy / log m": ("scores", "attention_entropy"),
    "Largest p": ("scores", "attention_max"),
}
# title, name of the upright axis, whether it is logarithmic or from 0 to 1, and lines: place, label, hue, dashed
PANELS: tuple[tuple[str, str, str, tuple[tuple[Place, str, int, bool], ...]], ...] = (
    (
        "Average cosine",
        "Average cosine",
        "unit",
        ((("embed", "average_cosine"), "input", 6, True), (("resid", "average_cosine"), "output", 0, False)),
    ),
    (
        "Norms of the stream",
        "Norm",
        "log",
        (
            (("embed", "mean_norm"), "input", 6, False),
            (("embed", "drift"), "its mean (input)", 6, True),
            (("resid", "mean_norm"), "output", 0, False),
            (("resid", "drift"), "its mean (output)", 0, True),
        ),
    ),
    (
        "Norms of q and k",
        "Norm",
        "log",
        (
            (("query", "mean_norm"), "query", 1, False),
            (("query", "drift"), "mean query", 1, True),
            (("key", "mean_norm"), "key", 2, False),
            (("key", "drift"), "mean key", 2, True),
        ),
    ),
    (
        "Cosines of q and k",
        "Cosine",
        "",
        (
            (("query", "average_cosine"), "within queries", 1, False),
            (("key", "average_cosine"), "within keys", 2, False),
            (("query", "qk_cosine"), "mean q, mean k", 3, True),
        ),
    ),
    (
        "Scores before softmax",
        "Score",
        "log",
        (
            (("scores", "score_magnitude"), "mean |score|", 4, False),
            (("scores", "score_spread"), "spread in a row", 3, False),
        ),
    ),
    (
        "Entropy and sharpness",
        "Entropy / log m, sharpness",
        "unit",
        (
            (("scores", "attention_entropy"), "entropy / log m", 0, False),
            (("scores", "attention_sharpness"), "sharpness", 1, True),
        ),
    ),
    (
        "Softmax of a row",
        "Weight p",
        "log",
        (
            (("scores", "attention_max"), "largest", 1, False),
            (("scores", "attention_median"), "median", 6, False),
            (("scores", "attention_min"), "smallest", 0, False),
        ),
    ),
)
MULTIPLES: tuple[tuple[Place, str, str], ...] = (
    (("resid", "average_cosine"), "Average cosine of outputs", "unit"),
    (("scores", "attention_entropy"), "Entropy / log m", "unit"),
    (("scores", "score_spread"), "Spread of scores in a row", "log"),
)
MARKERS = ("circle", "square", "diamond", "triangle-up")


def inputs(norm: bool) -> str:
    """How the rows come to the bias, in words."""
    return "normed inputs" if norm else "plain inputs"


def over_seeds(values: Sequence[float], *, bounds: Bounds = (None, None)) -> SeedMean | None:
    """Mean and Student's 95 % interval over seeds; without an interval for fewer than three.

    >>> over_seeds([2.0]).value, over_seeds([])
    (2.0, None)
    >>> over_seeds([0.9, 1.0, 1.0], bounds=(0.0, 1.0)).high
    1.0
    """
    if not values or not np.isfinite(values).all():
        return None
    half = t_interval(values)[0] if len(values) >= FEWEST_SEEDS else math.nan
    return _cut(values, half, bounds)


def _cut(values: Sequence[float], half: float, bounds: Bounds) -> SeedMean:
    centre = sum(values) / len(values)
    part = Part("", centre, centre - half, centre + half, bounds=bounds)
    return SeedMean(part.effect, part.low, part.high)


def prediction(values: Sequence[float], *, bounds: Bounds = (None, None)) -> tuple[float, float]:
    """The 95 % interval for the value of one further seed: mean ± t·sd·√(1 + 1/n); NaN with fewer than three."""
    if len(values) < FEWEST_SEEDS:
        return math.nan, math.nan
    further = _cut(values, t_interval(values)[0] * math.sqrt(len(values) + 1), bounds)  # t·sd/√n, √(n + 1) times
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
        """The values of all seeds."""
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
        """Seeds of the point that has most."""
        return max(map(len, self.values.values()), default=0)

    def of_axis(self, name: str) -> list[Any]:
        """The different values of a field of the arms, in their order; widths ascend."""
        found = list(dict.fromkeys(getattr(arm, name) for arm in self.arms))
        return sorted(found) if name == "width" else found

    def leading_arms(self) -> list[CurveArm]:
        """For each family and kind of inputs the arm that is shown in full: N(0, 0.02²) where it is there, widest."""
        best: dict[tuple[str, bool], CurveArm] = {}
        for arm in self.arms:
            rival = best.get((arm.family, arm.norm))
            if rival is None or (arm.init == "normal", arm.width) > (rival.init == "normal", rival.width):
                best[arm.family, arm.norm] = arm
        return list(best.values())

    def bounds(self, metric: str) -> Bounds:
        """Between what a metric lies, as it is declared; a weight of softmax is a share, and no other is negative."""
        low, high = self.catalogue.entry(metric).bounds
        share = metric in ("attention_median", "attention_min")
        return (0.0, 1.0 if share else None) if low is None and high is None else (low, high)

    def seeds_at(self, arm: CurveArm, bias: float, kind: str, metric: str) -> list[float]:
        return self.values.get((arm, kind, metric, bias), [])

    def at(self, arm: CurveArm, bias: float, kind: str, metric: str) -> SeedMean | None:
        """The mean over seeds at one bias, or None where nothing was measured."""
        return over_seeds(self.seeds_at(arm, bias, kind, metric), bounds=self.bounds(metric))

    def exponent(self, arm: CurveArm, *, last: int = 3) -> tuple[SeedMean | None, list[float]]:
        """The slope of log mean |score| over log N at the largest biases, over seeds; and those biases."""
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
        """How many times longer normed inputs are than plain ones, by family; where both were measured without bias."""
        found = {}
        for family in self.families:
            both = [[value for arm in self.arms if (arm.family, arm.norm) == (family, norm)
                     for value in self.seeds_at(arm, 0.0, "embed", "mean_norm")] for norm in (True, False)]  # fmt: skip
            if all(both) and all(both[1]):
                found[family] = float(np.mean(both[0]) / np.mean(both[1]))
        return found

    def fixed_norm(self, family: str) -> bool:
        """Whether every output of a family has norm √d, whatever comes in: a norm after the last sum."""
        means = [
            abs(value / math.sqrt(arm.width) - 1) < 0.01
            for (arm, kind, metric, _), values in self.values.items()
            if (arm.family, kind, metric) == (family, "resid", "mean_norm")
            for value in values
        ]
        return bool(means) and all(means)

    def reference_rows(self) -> list[dict[str, Any]]:
        """The reference values beside ours; none where the block of the reference was not measured."""
        config = {**self.about.get("config", {}), **self.about.get("size", {})}
        if config.get("length") != REFERENCE_LENGTH or config.get("heads") not in (None, 12):
            return []
        rows = []
        for norm, bias, *expected in REFERENCE:
            cells = []
            for place, value in zip((COSINE_IN, COSINE_OUT, ENTROPY), expected, strict=True):
                seeds = self.seeds_at(CurveArm(*REFERENCE_BLOCK, norm), bias, *place)
                low, high = prediction(seeds, bounds=self.bounds(place[1]))
                rounding = 0.0006  # the reference has three decimals
                inside = None if value is None or math.isnan(low) else low - rounding <= value <= high + rounding
                cells.append({"expected": value, "mark": over_seeds(seeds), "inside": inside, "low": low, "high": high})
            if any(cell["mark"] is not None for cell in cells):
                rows.append({"norm": norm, "bias": bias, "cells": cells})
        return rows


# figures


def bias_place(bias: float, least: float) -> float:
    """Where a bias stands on an axis that is logarithmic above the least one and on which 0 has its place."""
    return math.log10(bias / least) if bias > 0 else -0.5


def bias_axis(biases: Sequence[float]) -> Axis:
    """A logarithmic axis of the bias on which 0 has its place."""
    positive = [bias for bias in biases if bias > 0] or [1.0]
    least, most = min(positive), max(positive)
    decades = [10.0**e for e in range(-4, 7) if least <= 10.0**e <= most]
    ticks = [0.0, *decades] if len(decades) > 1 else [0.0, least, most]
    places = [bias_place(tick, least) for tick in ticks]
    ends = (-0.6, bias_place(most, least) + 0.1)
    return Axis("size of the bias N", ticks=(places, [f"{tick:g}" for tick in ticks]), bounds=ends)


def _apart(biases: Sequence[float]) -> tuple[Level, ...]:
    """Left of it stands 0."""
    return (Level(-0.25, upright=True, colour="@rule"),) if any(bias > 0 for bias in biases) else ()


def curve(curves: BiasCurves, arm: CurveArm, place: Place, label: str, *, log: bool, **look: Any) -> Series | None:
    """A line through the means with a band for their intervals; on a logarithmic axis what is positive."""
    least = min([bias for bias in curves.biases if bias > 0] or [1.0])
    marks = [(bias, mark) for bias in curves.biases if (mark := curves.at(arm, bias, *place)) is not None]
    marks = [(bias, mark) for bias, mark in marks if mark.value > 0 or not log]
    if not marks:
        return None
    low = [mark.low if mark.low > 0 or not log else mark.value / 3 for _, mark in marks]
    ends: dict[str, Any] = (
        {} if all(map(math.isnan, low)) else {"low": [brief(v) for v in low], "high": [brief(m.high) for _, m in marks]}
    )
    return Series(label, [bias_place(bias, least) for bias, _ in marks], [brief(m.value) for _, m in marks], size=4.2,
                  where=[f"N = {bias:g}" for bias, _ in marks], reach="95 % over seeds:", **ends, **look)  # fmt: skip


def upright_axis(scale: str, drawn: Sequence[Series], title: str = "") -> Axis:
    """From 0 to 1, or logarithmic over at least a decade, so that noise does not look like an effect."""
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
    """Everything that is measured of one block and one kind of inputs, against the bias."""
    panels = []
    for title, name, scale, lines in PANELS:
        drawn = [curve(curves, arm, place, label, log=scale == "log", colour=series(hue), hollow=hollow,
                       dash="dash" if hollow else "solid") for place, label, hue, hollow in lines]  # fmt: skip
        there = tuple(one for one in drawn if one is not None)
        panels.append(
            Panel(
                bias_axis(curves.biases),
                upright_axis(scale, there, name),
                there,
                levels=_apart(curves.biases),
                title=title,
                legend=True,
                height=250,
                alt=f"{title} of {arm.family} against the bias, {arm}.",
            )
        )
    scores = score_panel(curves, arm, histograms)
    stem = f"untrained-panel-{slug(arm.family)}-{inputs(arm.norm).split()[0]}"
    return Figure((*panels, *([scores] if scores else [])), files={stem: {}}, most=8, columns=4, size=2.0)


def score_panel(curves: BiasCurves, arm: CurveArm, histograms: Mapping[str, np.ndarray]) -> Panel | None:
    """Densities of the scores at some biases, over all seeds, on an axis that is fine at 0."""
    edges = histograms.get("edges")
    shown = [curves.biases[i] for i in few(range(len(curves.biases)), 5)]
    if edges is None:
        return None
    edges, drawn, far = np.asarray(edges, dtype=float), [], 0.0
    for i, bias in enumerate(shown):
        counts = _pooled(histograms, arm, bias)
        if counts is None or not counts.sum():
            continue
        density = counts / counts.sum() / np.diff(edges)  # bins widen away from 0: shares would show two false humps
        there = np.flatnonzero(density * np.diff(edges) > 1e-4)
        far = max(far, *(abs(edges[[there[0], there[-1] + 1]]))) if len(there) else far
        drawn.append(Series(f"N = {bias:g}", [brief(float(x)) for x in np.arcsinh(edges[:-1] / 0.05)],
                            [brief(float(d)) if d > 0 else None for d in density], sequence(i / max(1, len(shown) - 1)),
                            stairs=True, where=[f"score {edge:.3g}" for edge in edges[:-1]]))  # fmt: skip
    if not drawn or not far:
        return None
    ticks = [t for t in (0.1, 1.0, 10.0, 100.0, 1000.0) if t <= far][-2:]
    both = [*(-t for t in reversed(ticks)), 0.0, *ticks]
    reach = float(np.arcsinh(far / 0.05))
    x = Axis(
        "score before softmax",
        bounds=(-reach, reach),
        ticks=([float(np.arcsinh(t / 0.05)) for t in both], [f"{t:g}".replace("-", "−") for t in both]),
    )
    top = max(v for s in drawn for v in s.y if v)
    bottom = max(1e-5 * top, min(v for s in drawn for v in s.y if v))  # below it are single scores
    return Panel(
        x,
        Axis("Density", log=True, rules=True, bounds=(bottom, 2 * top)),
        tuple(drawn),
        legend=True,
        height=250,
        title="Histogram of scores",
        alt=f"Densities of the scores of {arm.family}, {arm}.",
    )


def _pooled(histograms: Mapping[str, np.ndarray], arm: CurveArm, bias: float) -> np.ndarray | None:
    point, start = f"input_norm={int(arm.norm)}/bias={bias:g}", f"{arm.family}-{arm.init}-{arm.width}-"
    mine = [np.asarray(v, float) for k, v in histograms.items() if k.startswith(start) and k.endswith(f"/{point}")]
    return np.sum(mine, axis=0) if mine else None


def variants_figure(curves: BiasCurves, family: str, norm: bool) -> Figure | None:
    """One family and kind of inputs: rows are quantities, columns initialisations, lines widths; grey: the inputs."""
    inits, widths = curves.of_axis("init"), curves.of_axis("width")
    if len(inits) * len(widths) < 2:
        return None
    panels = []
    for place, words, scale in MULTIPLES:
        rows = [_widths(curves, family, init, norm, place, log=scale == "log") for init in inits]
        y = upright_axis(scale, [one for drawn in rows for one in drawn], words)
        alt = "{} of {} by width, {}, {}."
        panels += [
            Panel(
                bias_axis(curves.biases),
                y,
                tuple(drawn),
                levels=_apart(curves.biases),
                height=230,
                title=INITS.get(init, init),
                alt=alt.format(words, family, INITS.get(init, init), inputs(norm)),
            )
            for init, drawn in zip(inits, rows, strict=True)
        ]
    stem = f"untrained-variants-{slug(family)}-{inputs(norm).split()[0]}"
    return Figure(tuple(panels), files={stem: {}}, most=99, columns=len(inits), size=1.6)


def _widths(curves: BiasCurves, family: str, init: str, norm: bool, place: Place, *, log: bool) -> list[Series]:
    widths, found = curves.of_axis("width"), []
    for i, width in enumerate(widths):
        arm = CurveArm(family, init, width, norm)
        if place == COSINE_OUT:
            found.append(
                curve(curves, arm, COSINE_IN, "inputs", log=log, colour="@soft", dash="dot", width=1.2, named=i == 0)
            )
        colour, marker = sequence(i / max(1, len(widths) - 1)), MARKERS[i % len(MARKERS)]
        found.append(curve(curves, arm, place, f"width {width}", log=log, colour=colour, marker=marker))
    return [one for one in found if one is not None]


# the page


def study_page(
    run: RunView, declared: Mapping[str, Any] | None = None, histograms: Mapping[str, np.ndarray] | None = None
) -> Page:
    """Verdicts, reference values, how fast scores grow, and the curves of every family."""
    curves, about = BiasCurves.of(run, declared), run.about
    size = about.get("size", {})
    count = f"{curves.seeds} {'seed' if curves.seeds == 1 else 'seeds'}"
    deck = (f"One transformer block at initialisation whose inputs share a bias: {', '.join(curves.families)}; "
            f"{size.get('sequences')} sequences of {size.get('length')} positions, {count}")  # fmt: skip
    started = str(about.get("started", ""))[:10]
    sections = [_verdict_section(curves, run), *_reference_section(curves), *_growth_section(curves)]
    sections += [_family_section(curves, name, histograms or {}) for name in curves.families]
    lead = (
        "Initialisations: {inits}; widths: {widths}; biases: {biases}. All numbers are in <code>table.parquet</code> "
        "(there a row has an interval over the sequences of its one seed), histograms of scores in "
        "<code>arrays/histograms.safetensors</code>, the verdicts in <code>verdicts.json</code>."
    )
    told = {
        "inits": listed([INITS.get(init, init) for init in curves.of_axis("init")]),
        "widths": listed([str(width) for width in curves.of_axis("width")]),
        "biases": listed([f"{bias:g}" for bias in curves.biases]),
    }
    return Page(
        "Blocks before any training", "Blocks before any training",
        [*sections, record_section([run], text(lead, **told)), terms_section(TERMS)],
        deck=f"{deck}{', ' + started if started else ''}.", version=str(about.get("anisoscope", "")),
    )  # fmt: skip


def _verdict_section(curves: BiasCurves, run: RunView) -> Section:
    lengths = lengths_in_words(curves)
    if curves.seeds > 2:
        seeds = (
            "Seeds are the independent samples – each has tokens, direction and weights of its own – and intervals are "
            f"Student’s over the {curves.seeds} of them."
        )
    else:
        seeds = "With fewer than three seeds there is no interval over seeds, and nothing general is said."
    lead = (
        "The block is given rows x + N·b/‖b‖: embeddings x of random tokens, all moved by a bias of size N in one "
        "random direction b. <em>Normed inputs</em> went through a LayerNorm before the bias was added and have norm "
        "√d; <em>plain inputs</em> are left as they are drawn"
        + (": {lengths}; what counts is N against ‖x‖" if lengths else "")
        + ". A "
        "claim <em>holds</em> for a family where the 95&nbsp;% interval of its effect lies beyond the margin in every "
        "arm (initialisation, width, kind of inputs), <em>fails</em> where it lies short of it in one, and is "
        "<em>undecided</em> otherwise; the numbers are those of the arm on which it hangs. {seeds}"
    )
    claims = verdict_claims(run.verdicts)
    body = [
        [
            TableCell(text("<code>{n}</code>", n=claim["name"])),
            row["subject"],
            part["name"],
            TableCell(part["effect"], css="num"),
            TableCell(part["interval"] or "–", css="num"),
            part["status"] or "told, not judged",
        ]
        for claim in claims
        for row in claim["rows"]
        for part in row["parts"]
    ]
    heads = [
        "Claim",
        "Family",
        "Arm",
        TableCell("Effect", css="num"),
        TableCell(text("95&nbsp;% interval"), css="num"),
        "Status",
    ]
    table = DataTable([heads], [body], "Every arm by itself", "plain wide", numeric=99)
    verdicts = Verdicts(claims, "Family", common_scope(claims), p=False, parts=False)
    parts = [Prose(text(lead, lengths=lengths, seeds=seeds)), verdicts, Fold("Every arm by itself", [table])]
    return Section("summary", "Verdicts", parts, "Verdicts")


def lengths_in_words(curves: BiasCurves) -> str:
    """How plain inputs compare to normed ones: some families begin with embeddings as long as a norm makes them."""
    words = {family: f"{ratio:.2g} times shorter" if ratio > 1.1 else "as long as normed ones" if ratio > 0.9
             else f"{1 / ratio:.2g} times longer" for family, ratio in curves.lengths().items()}  # fmt: skip
    told = {word: listed([family for family in words if words[family] == word]) for word in words.values()}
    return "; ".join(f"{word} for {who}" for word, who in told.items())


def _reference_section(curves: BiasCurves) -> list[Section]:
    rows = curves.reference_rows()
    if not rows:
        return []
    lead = (
        f"A post-norm block of BERT-base size (width 768, 12 heads), weights N(0, 0.02²), length 512. Large: the mean "
        f"over {curves.seeds} seeds here; small: where one further seed falls 95 times in 100; ✓ where the reference "
        f"does. Only the "
        "embeddings of tokens are used: the token-type embedding of BERT is itself a shared bias (average cosine ⅓ "
        "without any N), and position embeddings would double the variance of plain inputs."
    )
    pairs = ("Average cosine in", "Average cosine out", "Entropy / log m")
    heads = [
        [
            TableCell("Inputs", rows=2),
            TableCell("Bias N", rows=2, css="num"),
            *(TableCell(p, columns=2, css="num") for p in pairs),
        ],
        [TableCell(word, css="num") for _ in pairs for word in ("reference", "here")],
    ]
    body = []
    for row in rows:
        cells = [TableCell(inputs(row["norm"]), head=True), TableCell(f"{row['bias']:g}", css="num")]
        for cell in row["cells"]:
            mark, known = cell["mark"], not math.isnan(cell["low"])
            sign = {True: "✓", False: "✕", None: ""}[cell["inside"]]
            span = f"{_three(cell['low'])} to {_three(cell['high'])}" if known else ""
            cells.append(TableCell("–" if cell["expected"] is None else f"{cell['expected']:.3f}", css="num"))
            cells.append(
                TableCell(f"{'–' if mark is None else f'{mark.value:.3f}'} {sign}", [span] if span else (), css="num")
            )
        body.append(cells)
    table = DataTable(heads, [body], "Reference values beside ours", "plain wide", numeric=99)
    return [Section("reference", "Reference values", [Prose(lead), table], "Reference")]


def _three(value: float) -> str:
    """Three decimals, and no sign before a zero."""
    return f"{round(value, 3) + 0.0:.3f}".replace("-", "−")


def _growth_section(curves: BiasCurves) -> list[Section]:
    """The exponent of mean |score| over the bias, for the arm of each family that is shown in full."""
    body = []
    for arm in curves.leading_arms():
        mark, biases = curves.exponent(arm)
        if mark is not None:
            name = TableCell(f"{arm.family}, {arm}", head=True)
            body.append([name, f"{biases[0]:g} to {biases[-1]:g}", estimate(*mark)])
    lead = (
        "The slope of log mean |score| over log N at the largest biases. Where queries and keys are linear in the "
        "inputs it tends to 2 as N outgrows ‖x‖: both grow with N. Where a norm stands before the attention it is near "
        "0: the norm takes the size of the bias away and leaves its direction."
    )
    table = DataTable([["Block", "N from … to", "Exponent"]], [body], "How fast scores grow")
    return [Section("growth", "How fast scores grow", [Prose(lead), table], "Scores")] if body else []


def _family_section(curves: BiasCurves, name: str, histograms: Mapping[str, np.ndarray]) -> Section:
    told: Mapping[str, Any] = next((e for e in curves.about.get("models", []) if e.get("name") == name), {})
    lead = ("<code>{block}</code>" if told.get("block") else "") + (": {about}" if told.get("about") else "")
    lead += ". Rows x: {rows}."
    if curves.fixed_norm(name):
        lead += " Its outputs pass a norm last, so their norm is √d by construction and says nothing."
    words = {key: told.get(key, "") for key in ("block", "about", "rows")}
    parts: list[Any] = [Prose(text(lead, **words))]
    shown = [arm for arm in curves.leading_arms() if arm.family == name]
    for arm in shown:
        caption = (
            f"{arm}. Lines: means over seeds; bands: 95&nbsp;% over seeds. Left of the dotted rule stands 0. "
            f"Norms: mean norm "
            "of rows (solid) and norm of their mean (dashed). Queries, keys and scores: means over heads; softmax and "
            "histogram over sampled query rows."
        )
        parts += [Heading(str(arm)), block_figure(curves, arm, histograms), Prose(text(caption), css="says")]
    for norm in curves.of_axis("norm"):
        figure = variants_figure(curves, name, norm)
        if figure is not None:
            widths = curves.of_axis("width")
            key = [Swatch(f"width {w}", sequence(i / max(1, len(widths) - 1))) for i, w in enumerate(widths)]
            caption = (
                f"Initialisations (columns) and widths (lines), {inputs(norm)}. Dotted grey: the inputs’ "
                f"own average cosine, one line for each width."
            )
            parts += [
                Heading(f"Initialisations and widths, {inputs(norm)}"),
                Swatches(key),
                figure,
                Prose(caption, css="says"),
            ]
    tables = [part for arm in shown for part in (Heading(str(arm), 4), _numbers(curves, arm))]
    return Section(f"family-{slug(name)}", name, [*parts, Fold("Numbers", tables)], name)


def _numbers(curves: BiasCurves, arm: CurveArm) -> DataTable:
    body = []
    for bias in curves.biases:
        marks = [curves.at(arm, bias, *place) for place in COLUMNS.values()]
        cells = ["–" if m is None else estimate(m.value, m.low, m.high) for m in marks]
        body.append([TableCell(f"{bias:g}", head=True, css="num"), *cells])
    label = f"Numbers of {arm.family}, {arm}"
    return DataTable([[TableCell("Bias N", css="num"), *COLUMNS]], [body], label, "plain wide")


TERMS = (
    (
        "Average cosine",
        ["average_cosine"],
        "(‖Σ hᵢ/‖hᵢ‖‖² − n) / (n(n − 1))",
        [
            text(
                "Over all pairs of rows: of inputs (<code>embed</code>), outputs (<code>resid</code>), queries "
                "and keys of a head."
            )
        ],
    ),
    ("Drift", ["drift"], "‖mean(h)‖", [text("Norm of the mean row; <code>mean_norm</code> is the mean norm of rows.")]),
    (
        "Query–key cosine",
        ["qk_cosine"],
        "cos(mean q, mean k)",
        ["Mean over heads; queries and keys as they meet, after rotation where a family rotates."],
    ),
    (
        "Scores",
        ["score_magnitude", "score_spread"],
        "",
        ["Scores s as they are fed to softmax. Mean |s|, and the standard deviation of s over the keys of one row."],
    ),
    (
        "Entropy",
        ["attention_entropy"],
        "H(p) / log m",
        ["m keys allowed by the mask; rows with fewer than 8 are left out."],
    ),
    (
        "Softmax of a row",
        ["attention_max", "attention_median", "attention_min"],
        "",
        [
            text(
                "Means over rows of the largest, median and smallest weight. <code>attention_sharpness</code> is "
                "(max p − 1/m)/(1 − 1/m)."
            )
        ],
    ),
)


# -- what the console shows --------------------------------------------------------------------------------------------

_COLUMNS = {
    "cosine in": ("embed", "average_cosine"),
    "cosine out": ("resid", "average_cosine"),
    "norm out": ("resid", "mean_norm"),
    "mean |score|": ("scores", "score_magnitude"),
    "spread": ("scores", "score_spread"),
    "entropy": ("scores", "attention_entropy"),
    "max p": ("scores", "attention_max"),
}


def summary(run: RunView) -> Iterator[RichTable]:
    """The main curves of the leading arms, a line for each bias; means over seeds."""
    curves = BiasCurves.of(run)
    for arm in curves.leading_arms():
        table = new_table(f"{arm.family}, {arm}", (), ("bias", *_COLUMNS))
        for bias in curves.biases:
            points = [curves.at(arm, bias, *place) for place in _COLUMNS.values()]
            table.add_row(f"{bias:g}", *(number(p.value) if p is not None else "–" for p in points))
        yield table
