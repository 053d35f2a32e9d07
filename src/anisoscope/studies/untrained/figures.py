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

from anisoscope.results.quantity import Bounds, Mark, over_seeds
from anisoscope.results.query import Query
from anisoscope.studies.page_parts import files, hero, judged_section, numeric, page_of, shown, words_of
from anisoscope.view.figure import Axis, Figure, Level, Panel, Series, brief, points, sequence, series, value_axis
from anisoscope.view.matplotlib_renderer import slug
from anisoscope.view.page import DataTable, Fold, Heading, Hero, Page, Prose, Section, Swatch, TableCell, text
from anisoscope.view.sections.gradients import courses
from anisoscope.view.subjects import RunView
from anisoscope.view.terminal.screen import new_table
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
COSINE_IN, COSINE_OUT = ("embed", "average_cosine"), ("resid", "average_cosine")
NORM_IN, NORM_OUT = ("embed", "mean_norm"), ("resid", "mean_norm")
MAGNITUDE, SPREAD = ("scores", "score_magnitude"), ("scores", "score_spread")
ENTROPY, LARGEST = ("scores", "attention_entropy"), ("scores", "attention_max")
COLUMNS = {
    "Cosine in": COSINE_IN,
    "out": COSINE_OUT,
    "Norm in": NORM_IN,
    "out ": NORM_OUT,
    "Norm of the mean, out": ("resid", "drift"),
    "cos(q̄, k̄)": ("query", "qk_cosine"),
    "Mean |score|": MAGNITUDE,
    "Spread": SPREAD,
    "Entropy / log m": ENTROPY,
    "Largest p": LARGEST,
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
    ("Norms of the stream", NORM_IN, "input", 6, False),
    ("Norms of the stream", ("embed", "drift"), "its mean (input)", 6, True),
    ("Norms of the stream", NORM_OUT, "output", 0, False),
    ("Norms of the stream", ("resid", "drift"), "its mean (output)", 0, True),
    ("Norms of q and k", ("query", "mean_norm"), "query", 1, False),
    ("Norms of q and k", ("query", "drift"), "mean query", 1, True),
    ("Norms of q and k", ("key", "mean_norm"), "key", 2, False),
    ("Norms of q and k", ("key", "drift"), "mean key", 2, True),
    ("Cosines of q and k", ("query", "average_cosine"), "within queries", 1, False),
    ("Cosines of q and k", ("key", "average_cosine"), "within keys", 2, False),
    ("Cosines of q and k", ("query", "qk_cosine"), "mean q, mean k", 3, True),
    ("Scores before softmax", MAGNITUDE, "mean |score|", 4, False),
    ("Scores before softmax", SPREAD, "spread in a row", 3, False),
    ("Entropy and sharpness", ENTROPY, "entropy / log m", 0, False),
    ("Entropy and sharpness", ("scores", "attention_sharpness"), "sharpness", 1, True),
    ("Softmax of a row", LARGEST, "largest", 1, False),
    ("Softmax of a row", ("scores", "attention_median"), "median", 6, False),
    ("Softmax of a row", ("scores", "attention_min"), "smallest", 0, False),
)
MULTIPLES: tuple[tuple[Place, str, str], ...] = (
    (COSINE_OUT, "Average cosine of outputs", "unit"),
    (ENTROPY, "Entropy / log m", "unit"),
    (SPREAD, "Spread of scores in a row", "log"),
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
    """The values of all seeds by arm, place and bias."""

    values: Mapping[tuple[CurveArm, Place, float], list[float]]
    about: Mapping[str, Any]
    catalogue: Catalogue

    @classmethod
    def of(cls, run: RunView, declared: Mapping[str, Any] | None = None) -> BiasCurves:
        grid = Query(run.table).where(bias=...).groups("model", "init", "width", "input_norm", "kind", "metric", "bias")
        values = {
            (CurveArm(model, init, int(width), norm == "1"), (kind, metric), float(bias)): rows.numbers().tolist()
            for (model, init, width, norm, kind, metric, bias), rows in grid.items()
        }
        return cls(values, run.about, Catalogue(declared))

    @cached_property
    def arms(self) -> list[CurveArm]:
        return list(dict.fromkeys(arm for arm, _, _ in self.values))

    @cached_property
    def biases(self) -> list[float]:
        return sorted({bias for _, _, bias in self.values})

    @property
    def seeds(self) -> int:
        """The largest number of seeds of any point."""
        return max(map(len, self.values.values()), default=0)

    def of_axis(self, name: str) -> list[Any]:
        """The distinct values of a field of the arms, in order of occurrence; widths are sorted."""
        distinct = list(dict.fromkeys(getattr(arm, name) for arm in self.arms))
        return sorted(distinct) if name == "width" else distinct

    def leading_arms(self) -> list[CurveArm]:
        """For each family and kind of inputs the arm shown in full: N(0, 0.02²) if measured, and the largest width."""
        best: dict[tuple[str, bool], CurveArm] = {}
        for arm in self.arms:
            rival = best.setdefault((arm.family, arm.norm), arm)
            best[arm.family, arm.norm] = max(rival, arm, key=lambda arm: (arm.init == "normal", arm.width))
        return list(best.values())

    def bounds(self, metric: str) -> Bounds:
        return self.catalogue.entry(metric).bounds

    def seeds_at(self, arm: CurveArm, bias: float, place: Place) -> list[float]:
        return self.values.get((arm, place, bias), [])

    def at(self, arm: CurveArm, bias: float, place: Place) -> Mark | None:
        """The mean over seeds at one bias, or None where nothing was measured."""
        return over_seeds(self.seeds_at(arm, bias, place), bounds=self.bounds(place[1]))

    def exponent(self, arm: CurveArm, *, last: int = 3) -> tuple[Mark | None, list[float]]:
        """The slope of log mean |score| over log N at the largest biases, over seeds; and these biases."""
        sizes = {bias: self.seeds_at(arm, bias, MAGNITUDE) for bias in self.biases if bias > 0}
        biases = [bias for bias, seeds in sizes.items() if seeds][-last:]
        if len(biases) < 2:
            return None, biases
        count = min(len(sizes[bias]) for bias in biases)
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log([[sizes[bias][n] for bias in biases] for n in range(count)])
            slopes = [float(np.polyfit(np.log(biases), line, 1)[0]) for line in logs]
        return over_seeds(slopes), biases

    def norm_ratios(self) -> dict[str, float]:
        """The norm of normalised over that of plain inputs by family, where both were measured without bias."""
        ratios = {}
        for family in self.of_axis("family"):
            arms = [arm for arm in self.arms if arm.family == family]
            normed, plain = (
                [value for arm in arms if arm.norm == norm for value in self.seeds_at(arm, 0.0, NORM_IN)]
                for norm in (True, False)
            )
            if normed and plain and all(plain):
                ratios[family] = float(np.mean(normed) / np.mean(plain))
        return ratios

    def fixed_norm(self, family: str) -> bool:
        """Whether all outputs of a family have norm √d (post-norm: a layer norm after the last residual sum)."""
        outputs = [(arm, v) for (arm, place, _), seeds in self.values.items() if place == NORM_OUT for v in seeds]
        ratios = [value / math.sqrt(arm.width) for arm, value in outputs if arm.family == family]
        return bool(ratios) and all(abs(ratio - 1) < 0.01 for ratio in ratios)


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
    found = {bias: mark for bias in curves.biases if (mark := curves.at(arm, bias, place)) is not None}
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
    for place, title, scale in MULTIPLES:
        columns = [_widths(curves, [CurveArm(family, init, width, norm) for width in widths], place, log=scale == "log")
                   for init in inits]  # fmt: skip
        y = upright_axis(scale, [line for lines in columns for line in lines], title)
        for name, lines in zip([INITS.get(init, init) for init in inits], columns, strict=True):
            alt = f"{title} of {family} by width, {name}, {inputs(norm)}."
            panels.append(bias_panel(curves, y, lines, height=230, title=name, alt=alt))
    stem = f"untrained-variants-{slug(family)}-{inputs(norm).split()[0]}"
    return files(stem, panels, most=99, columns=len(inits), size=1.6)


def _widths(curves: BiasCurves, arms: Sequence[CurveArm], place: Place, *, log: bool) -> list[Series]:
    lines: list[Series] = []
    grey: dict[str, Any] = {"colour": "@soft", "dash": "dot", "width": 1.2}
    for i, arm in enumerate(arms):
        if place == COSINE_OUT:
            lines += curve(curves, arm, COSINE_IN, "inputs", log=log, named=i == 0, **grey)
        look = {"colour": sequence(i / max(1, len(arms) - 1)), "marker": MARKERS[i % len(MARKERS)]}
        lines += curve(curves, arm, place, f"width {arm.width}", log=log, **look)
    return lines


def study_page(
    run: RunView, declared: Mapping[str, Any] | None = None, histograms: Mapping[str, np.ndarray] | None = None
) -> Page:
    """The page of the study: verdicts, reference values, growth of scores, and the curves of every family."""
    curves = BiasCurves.of(run, declared)
    size, families = run.about.get("size", {}), curves.of_axis("family")
    deck = (
        f"One transformer block at initialisation whose inputs share a bias: {', '.join(families)}; "
        f"{size.get('sequences')} sequences of {size.get('length')} positions, {plural(curves.seeds, 'seed')}"
    )
    sections = [_family_section(curves, name, histograms or {}) for name in families]
    sections += [*_reference_section(curves), *_growth_section(curves), _judged(curves, run)]
    inits = listed([INITS.get(init, init) for init in curves.of_axis("init")])
    widths, biases = listed(list(map(str, curves.of_axis("width")))), listed([f"{bias:g}" for bias in curves.biases])
    record = (
        f"Initialisations: {inits}; widths: {widths}; biases: {biases}. All numbers are in <code>table.parquet</code> "
        "(there a row has an interval over the sequences of its one seed), histograms of scores in "
        "<code>arrays/histograms.safetensors</code>, the verdicts in <code>verdicts.json</code>."
    )
    return page_of(run, "Blocks before any training", deck, sections, terms=TERMS, record=record, hero=_hero(curves))


def _hero(curves: BiasCurves) -> Hero:
    """Anisotropy of what goes in and what comes out over the bias, and entropy of the attention, by family."""
    leads: dict[str, CurveArm] = {}
    for arm in sorted(curves.leading_arms(), key=lambda arm: not arm.norm):
        leads.setdefault(arm.family, arm)
    cosines: list[Series] = []
    entropies: list[Series] = []
    for i, (family, arm) in enumerate(leads.items()):
        look: dict[str, Any] = {"colour": series(i)}
        cosines += curve(curves, arm, COSINE_IN, f"{family}, input", log=False, dash="dot", hollow=True, **look)
        cosines += curve(curves, arm, COSINE_OUT, f"{family}, output", log=False, **look)
        entropies += curve(curves, arm, ENTROPY, family, log=False, **look)
    unit = Axis(rules=True, bounds=(-0.04, 1.04))
    alts = [
        f"{name} against the bias: {courses(drawn)}"
        for name, drawn in (("Average cosine", cosines), ("Entropy", entropies))
    ]
    panels = [bias_panel(curves, unit, cosines, title="Average cosine of inputs and outputs", alt=alts[0])]
    panels.append(bias_panel(curves, unit, entropies, title="Entropy of attention / log m", alt=alts[1]))
    key = [Swatch(family, series(i)) for i, family in enumerate(leads)]
    key += [Swatch("inputs", "@ink", "dot")]
    caption = (
        "Blocks with random weights are given rows that share a bias of growing size. Left: how alike rows are going "
        "in and coming out, 1 is one direction. Right: 1 is attention spread evenly, 0 on one key."
    )
    return hero(panels, "Before any training, over the size of the bias", caption, key=key)


def _judged(curves: BiasCurves, run: RunView) -> Section:
    ratios = listed([f"{ratio:.2g} for {family}" for family, ratio in curves.norm_ratios().items()])
    note = (
        "With several arms (initialisation, width, kind of inputs) the numbers are those of the arm that decides. The "
        "block is given rows x + N·b/‖b‖: embeddings x of random tokens, all moved by a bias of size N in one random "
        "direction b. <em>Normed inputs</em> went through a LayerNorm before the bias was added and have norm √d; "
        "<em>plain inputs</em> are left as they are drawn"
        + (f" (norm of normed over plain inputs: {ratios})" if ratios else "")
        + "; what counts is N against ‖x‖. Seeds are the independent samples – each has tokens, direction and weights "
        "of its own – and intervals are Student’s over three or more of them; with fewer nothing general is said."
    )
    body = [
        [TableCell(text("<code>{n}</code>", n=verdict["claim"])), verdict["subject"], part["name"],
         *numeric(words_of(Mark(part["effect"], part["low"], part["high"]))), part["status"] or "told, not judged"]
        for verdict in run.verdicts for part in (verdict.get("details") or {}).get("parts") or ()
        if part.get("effect") is not None
    ]  # fmt: skip
    heads = ["Claim", "Family", "Arm", *numeric("Effect"), "Status"]
    table = DataTable([heads], [body], "Every arm by itself", "plain wide", numeric=99)
    return judged_section(note, Fold("Every arm by itself", [table]))


def reference_rows(curves: BiasCurves) -> list[list[TableCell]]:
    """Reference values beside ours; empty if the block of the reference (width 768, length 512) was not measured."""
    config = {**curves.about.get("config", {}), **curves.about.get("size", {})}
    if config.get("length") != 512 or config.get("heads") not in (None, 12):
        return []
    rows = []
    for norm, bias, *expected in REFERENCE:
        arm, cells = CurveArm("bert", "normal", 768, norm), [TableCell(inputs(norm), head=True), *numeric(f"{bias:g}")]
        for place, value in zip((COSINE_IN, COSINE_OUT, ENTROPY), expected, strict=True):
            seeds = curves.seeds_at(arm, bias, place)
            low, high = prediction(seeds, bounds=curves.bounds(place[1]))
            sign = "" if value is None or math.isnan(low) else "✕"
            if sign and value is not None and low - 0.0006 <= value <= high + 0.0006:  # references have three decimals
                sign = "✓"
            span = [] if math.isnan(low) else [f"{_three(low)} to {_three(high)}"]
            mark = over_seeds(seeds)
            cells += numeric("–" if value is None else f"{value:.3f}")
            cells += numeric(f"{'–' if mark is None else f'{mark.value:.3f}'} {sign}", small=span)
        if any(curves.seeds_at(arm, bias, place) for place in (COSINE_IN, COSINE_OUT, ENTROPY)):
            rows.append(cells)
    return rows


def _three(value: float) -> str:
    """The value with three decimals, without a sign before zero."""
    return f"{round(value, 3) + 0.0:.3f}".replace("-", "−")


def _reference_section(curves: BiasCurves) -> list[Section]:
    lead = (
        f"A post-norm block of BERT-base size (width 768, 12 heads), weights N(0, 0.02²), length 512. Large: the mean "
        f"over {curves.seeds} seeds; small: where one further seed falls 95 times in 100; ✓ where the reference does. "
        "Token embeddings alone: BERT's token-type embedding is itself a shared bias (average cosine ⅓ without any N), "
        "and position embeddings would double the variance of plain inputs."
    )
    pairs = ("Average cosine in", "Average cosine out", "Entropy / log m")
    first = [TableCell("Inputs", rows=2), *numeric("Bias N", rows=2), *numeric(*pairs, columns=2)]
    heads, body = [first, numeric(*["reference", "here"] * len(pairs))], reference_rows(curves)
    table = DataTable(heads, [body], "Reference values beside ours", "plain wide", numeric=99)
    return [Section("reference", "Reference values", [Prose(lead), table], "Reference")] if body else []


def _growth_section(curves: BiasCurves) -> list[Section]:
    """The growth exponent of mean |score| with the bias, for the leading arm of each family."""
    body = []
    for arm in curves.leading_arms():
        mark, biases = curves.exponent(arm)
        if mark is not None:
            name, ends = TableCell(f"{arm.family}, {arm}", head=True), f"{biases[0]:g} to {biases[-1]:g}"
            body.append([name, ends, words_of(mark)])
    lead = (
        "The slope of log mean |score| over log N at the largest biases. It tends to 2 as N outgrows ‖x‖ where queries "
        "and keys are linear in the inputs, and is near 0 where a norm before the attention removes the bias’s size."
    )
    table = DataTable([["Block", "N from … to", "Exponent"]], [body], "How fast scores grow")
    return [Section("growth", "How fast scores grow", [Prose(lead), table], "Scores")] if body else []


def _family_section(curves: BiasCurves, name: str, histograms: Mapping[str, np.ndarray]) -> Section:
    entry: Mapping[str, Any] = next((e for e in curves.about.get("models", []) if e.get("name") == name), {})
    facts = {"block": name, "rows": "", **entry, "about": entry.get("about") or "a block of this family"}
    lead = text("<code>{block}</code>: {about}. Rows x: {rows}.", **facts)
    if curves.fixed_norm(name):
        lead += " Its outputs pass a norm last, so their norm is √d by construction and says nothing."
    parts: list[Any] = [Prose(lead)]
    tables: list[Any] = []
    for arm in (arm for arm in curves.leading_arms() if arm.family == name):
        words = (
            f"{arm}. Lines: means over seeds; bands: 95&nbsp;% over seeds. Left of the dotted rule stands 0. "
            "Norms: mean norm of rows (solid) and norm of their mean (dashed). Queries, keys and scores: means over "
            "heads; softmax and histogram over sampled query rows."
        )
        parts += shown(block_figure(curves, arm, histograms), words, title=str(arm))
        body = [[TableCell(f"{bias:g}", head=True, css="num"),
                 *(words_of(curves.at(arm, bias, place)) for place in COLUMNS.values())]
                for bias in curves.biases]  # fmt: skip
        label = f"Numbers of {arm.family}, {arm}"
        tables += [Heading(str(arm), 4), DataTable([[*numeric("Bias N"), *COLUMNS]], [body], label, "plain wide")]
    widths = curves.of_axis("width")
    key = [Swatch(f"width {w}", sequence(i / max(1, len(widths) - 1))) for i, w in enumerate(widths)]
    for norm in curves.of_axis("norm"):
        if (figure := variants_figure(curves, name, norm)) is not None:
            words = (
                f"Initialisations (columns) and widths (lines), {inputs(norm)}. Dotted grey: the inputs’ own average "
                "cosine, one line for each width."
            )
            parts += shown(figure, words, title=f"Initialisations and widths, {inputs(norm)}", key=key)
    return Section(f"family-{slug(name)}", name, [*parts, Fold("Numbers", tables)], name, finding=_told(curves, name))


def _told(curves: BiasCurves, family: str) -> str:
    """One sentence on what the largest bias does to the leading arm of a family."""
    arms = [arm for arm in curves.leading_arms() if arm.family == family]
    arm, most = max(arms, key=lambda arm: arm.norm), max(curves.biases)
    before, after, entropy = (curves.at(arm, most, place) for place in (COSINE_IN, COSINE_OUT, ENTROPY))
    if before is None or after is None:
        return ""
    cosines = f"average cosine {number(before.value, 2)} going in, {number(after.value, 2)} coming out"
    even = f"; entropy of attention / log m {number(entropy.value, 2)}" if entropy is not None else ""
    return f"At the largest bias, N = {most:g}, {inputs(arm.norm)}: {cosines}{even}."


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
    "norm out": NORM_OUT,
    "mean |score|": MAGNITUDE,
    "spread": SPREAD,
    "entropy": ENTROPY,
    "max p": LARGEST,
}


def summary(run: RunView) -> Iterator[RichTable]:
    """For the console: the main curves of the leading arms, one line per bias; means over seeds."""
    curves = BiasCurves.of(run)
    for arm in curves.leading_arms():
        table = new_table(f"{arm.family}, {arm}", (), ("bias", *_COLUMNS))
        for bias in curves.biases:
            marks = [curves.at(arm, bias, place) for place in _COLUMNS.values()]
            table.add_row(f"{bias:g}", *(number(mark.value) if mark is not None else "–" for mark in marks))
        yield table
