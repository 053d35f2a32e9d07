"""Figures and sections of the curvature study on β, the parts of gradients, the self-reinforcing loop and pinning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from anisoscope.results.query import Row
from anisoscope.studies.curvature.curves import DASHED, FLAT, SCALE, ScaleCurves, lettered_figure, title
from anisoscope.studies.page_parts import files, numeric, prose, shown, words_of
from anisoscope.view.figure import Axis, Figure, Level, Note, Panel, Series, points
from anisoscope.view.page import DataTable, Fold, Section, Swatch, TableCell
from anisoscope.view.words import number

ORDERS = {"tangent": 1.0, "normal": 2.0, "ratio": 1.0}
EQUATIONS = {"tangent": "Tangent part (Eq. 9)", "normal": "Normal part (Eq. 10)", "ratio": "Normal / tangent (Eq. 11)"}
SIGNALS = {
    "constant": "the same for every row",
    "noise": "independent noise",
    "linear": "linear in u",
    "network": "back-propagated",
}
LOOPS: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {  # labels, update: words and look
    ("tangent", "all"): ("labels of the tangent coordinates", {"colour": "@s1"}),
    ("tangent", "random"): ("the same, updated in a random subspace", {"colour": "@s1", "dash": "dot", "hollow": True}),
    ("noise", "all"): ("noise labels", {"colour": "@s7", "marker": "diamond"}),
    ("normal", "all"): ("labels of normal coordinates", {"colour": "@s2", "marker": "square"}),
}
LAYERS = {"1": "Linear model", "2": "Two-layer model"}
WINDOWS = {"all": "whole training", "late": "second half"}


def exponent_figure(curves: ScaleCurves, rows: Sequence[Row]) -> Figure:
    """β of every block of the model, of the distance and of the distance over the mean norm."""
    looks: dict[str | None, tuple[str, dict[str, Any]]] = {None: ("distance to the centroid", {"colour": "@s1"}),
             "1": ("over the mean norm", {"colour": "@s2", "marker": "square", "hollow": True})}  # fmt: skip
    drawn = []
    for normalised, (label, look) in looks.items():
        found = [row for row in rows if row.options.get("normalised") == normalised]
        x, words = [float(row.layer) for row in found], [f"block {row.layer}" for row in found]
        drawn += [points(label, x, found, ends={"bars": "y"}, where=words, size=5.0, **look)] if found else []
    levels = Level(0.0, "no effect of frequency", dash="solid"), Level(curves.reference[1], "used", colour="@s1")
    blocks = [float(row.layer) for row in rows]
    x_axis = Axis("block", bounds=(min(blocks) - 0.5, max(blocks) + 0.5))
    panel = Panel(x_axis, Axis("β", rules=True), tuple(drawn), title="β by block", levels=levels, legend=True)
    return files("curvature-exponent", [replace(panel, alt="β by block.", height=280)], size=2.4, layout="single")


def gradients_figure(curves: ScaleCurves) -> Figure:
    """Parts of the gradient against scale for each signal, with the bounds, on the first curved manifold."""
    model, panels = curves.curved[0], []
    limit = Level(float(curves.about["config"].get("fit_limit", math.nan)), upright=True, dash="solid", colour="@rule")
    for signal, words in SIGNALS.items():
        drawn: list[Series] = []
        for of, colour in (("tangent", "@s1"), ("normal", "@s2")):
            place, look = (model, "manifold_gradient", "scale"), {"colour": colour}
            marks = {**look, "width": 0, "marker": "circle" if of == "tangent" else "square"}
            drawn += curves.line(f"{of}, mean gradient", place, marks, of=of, per="mean", signal=signal)
            rows = {**marks, "hollow": True}
            drawn += curves.line(f"{of}, row by row", place, rows, of=of, per="rows", signal=signal)
            drawn += curves.line(f"{of}, bound of the mean", place, {**DASHED, **look}, bound=1, of=of)
        if drawn:
            axes = Axis(SCALE, log=True), Axis("Gradient / G", log=True, rules=True)
            panels.append(Panel(*axes, tuple(drawn), title=f"Signal: {words}", levels=(limit,)))
    return lettered_figure("gradients", panels, layout="pairs", columns=2)


def orders_figure(curves: ScaleCurves) -> Figure:
    """The slope of each part, row by row and of the mean gradient of each signal, on every curved manifold."""
    kinds = [(signal, "mean") for signal in SIGNALS] + [(signal, "rows") for signal in SIGNALS]
    names = [f"{signal}, {'mean' if per == 'mean' else 'by row'}" for signal, per in kinds]
    y = Axis(ticks=([float(i) for i in range(len(names))], names), bounds=(len(names) - 0.4, -0.6))
    panels = []
    for of, order in ORDERS.items():
        drawn: list[Series] = []
        notes: list[Note] = []
        for i, (signal, per) in enumerate(kinds):
            rows = {model: curves.order(model, of, per, signal) for model in curves.curved}
            for place, (model, row) in enumerate(rows.items()):
                if row is None or not row.known:
                    continue
                at = i + 0.6 * ((place + 0.5) / len(rows) - 0.5)
                look: dict[str, Any] = {**curves.look(model), "bars": "x", "width": 0, "size": 5}
                look |= {"low": [row.low], "high": [row.high]}
                text = [f"<b>{title(model)}, {names[i]}</b><br>{words_of(row)}<br>{row.note}"]
                drawn.append(Series(title(model), [row.value], [at], named=False, text=text, **look))
            if not any(row is not None and row.known for row in rows.values()):
                notes.append(Note("vanishes", order, float(i)))
        margin = 0.15 if of == "ratio" else 0.1
        band = Level(order - margin, upright=True, until=order + margin, colour="@soft")
        levels = band, Level(order, upright=True, dash="solid")
        panel = Panel(Axis("slope", most=6), y, tuple(drawn), title=EQUATIONS[of], levels=levels, notes=tuple(notes))
        panels.append(panel)
    return lettered_figure("orders", [replace(panel, height=360) for panel in panels], size=3.0)


def loop_figure(curves: ScaleCurves) -> Figure:
    """The tangent share of the activation variance over steps, with its control and its null."""
    panels = []
    for model in [*curves.curved[:1], *([FLAT] if FLAT in curves.models else [])]:
        for layers, words in LAYERS.items():
            drawn: list[Series] = []
            levels: list[Level] = []
            for (labels, update), (label, look) in LOOPS.items():
                options = {"labels": labels, "layers": layers, "update": update}
                every = sorted(curves.shares(model, **options), key=lambda row: row.step)
                levels += [Level(row.value) for row in every[:1] if row.step == 0 and not levels]
                rows = [row for row in every if row.step > 0]
                where = [f"step {row.step}" for row in rows]
                style: dict[str, Any] = {"size": 4.0, "width": 1.6, **look}
                drawn += [points(label, [row.step for row in rows], rows, where=where, **style)] if rows else []
            axes = Axis("step of SGD", log=True), Axis("Tangent share", rules=True, bounds=(-0.04, 1.04))
            name = f"{words}, {title(model)}"
            panels.append(Panel(*axes, tuple(drawn), title=name, levels=tuple(levels)))
    return lettered_figure("loop", panels, layout="pairs", columns=2)


def pinning_figure(curves: ScaleCurves) -> Figure:
    """How far embeddings move about their time mean, by the rank of their type."""
    panels = []
    for optimiser in curves.query.where(metric="pinning_slope").values("optimiser"):
        drawn: list[Series] = []
        for window, colour in (("all", "@s1"), ("late", "@s2")):
            place, look = ("pinning", "pinning_distance", "rank"), {"colour": colour, "width": 0, "size": 4.0}
            drawn += curves.line(WINDOWS[window], place, look, optimiser=optimiser, window=window)
        axes = Axis("rank of the type, 1 the most frequent", log=True), Axis("Distance", log=True, rules=True)
        panels.append(Panel(*axes, tuple(drawn), title=f"Trained with {optimiser.upper()}", legend=True))
    return lettered_figure("pinning", panels, layout="pairs", columns=2)


def exponent_section(curves: ScaleCurves) -> Section | None:
    """β of the model, block by block; None where it was not measured."""
    rows = list(curves.query.where(metric="frequency_beta", over="context").known())
    if not rows:
        return None
    model = str(curves.about["reference"].get("model"))
    lead = prose(
        "How far the rows of a token type lie from their centroid, against the type’s frequency, in {model}: distance "
        "∝ f<sup>−β</sup>, over types with ten occurrences, ten rows of each, never the first position of a context. "
        "β is minus the slope of the log distance on the log frequency; what is used below is the mean over blocks, "
        "with a bootstrap interval over types. Frequencies are those of the text that was read.",
        model=model,
    )
    beneath = "β with 95&nbsp;% intervals over types. Above 0 rare types are wider; below 0 frequent ones are."
    used = curves.query.where(metric="frequency_beta", used="1").one()
    body = [[TableCell(f"mean over {len({row.layer for row in rows})} blocks", head=True), words_of(used)]]
    table = DataTable([[TableCell("β of"), *numeric("value, with its interval")]], [body], "The value that is used")
    return Section("exponent", "β, measured", [lead, *shown(exponent_figure(curves, rows), beneath), table], "β")


def gradient_section(curves: ScaleCurves) -> Section:
    lead = prose(
        "Rows around a point x₀, <i>y</i> = x − x₀, go into a linear layer, and a signal <i>g</i> comes back for "
        "each: dL/dW = E[g yᵀ]. Its tangent part is at most G·t·√E|u|² (Eq. 9), its normal part at most "
        "G·(t²/2)·√E|II(u,u)|² (Eq. 10), G = √E|g|²; their ratio is to be O(κt) (Eq. 11). The orders are the paper’s, "
        "<em>the constants are our reconstruction</em>. These are bounds on the <em>mean</em> gradient, in which rows "
        "cancel, and how much is left depends on the signal; row by row (√E|g|²|Bᵀy|²) nothing can cancel. Every u "
        "comes with −u, so that E[u] = 0 exactly."
    )
    beneath = (
        f"Parts of the gradient on the {title(curves.curved[0])}, in units of G: of the mean gradient (filled) and "
        "row by row (hollow), tangent (circles) and normal (squares), with the bounds of the mean dashed. Slopes are "
        "fitted left of the upright rule, above rounding."
    )
    behind = (
        "Slopes with 95&nbsp;% intervals over independent repetitions, a mark for each curved manifold; the band is "
        "the margin of the verdict. A part vanishes to leading order where its mark lies far to the right, what is "
        "left being of a higher order, or where a manifold has no mark: nothing is left above rounding."
    )
    key = [Swatch(title(model), curves.look(model)["colour"]) for model in curves.curved]
    figures = [*shown(gradients_figure(curves), beneath, key=[Swatch("tangent", "@s1"), Swatch("normal", "@s2")])]
    figures += shown(orders_figure(curves), behind, key=key)
    tight = prose(
        "<b>For which signals the bounds are tight.</b> Eq. 9 is reached up to a constant by the linear and the "
        "back-propagated signal, Eq. 10 by the constant and the back-propagated one. A constant signal has no tangent "
        "part left and a linear one no normal part: there the bound holds and says nothing about the size. "
        "Independent noise cancels down to 1/√n of both bounds: what is left is sampling error, of the same orders in "
        "t. Eq. 11 therefore holds as an order for noise and the back-propagated signal; for a constant signal the "
        "ratio <em>grows</em> as t falls, for a linear one it falls faster than t."
    )
    return Section("gradients", "Gradients", [lead, *figures, tight, _tightness(curves), _slopes(curves)], "Gradients")


def _tightness(curves: ScaleCurves) -> DataTable:
    heads = [
        [TableCell("Manifold", rows=2), *numeric("Tangent", "Normal", columns=len(SIGNALS))],
        numeric(*SIGNALS, *SIGNALS),
    ]
    body = []
    for model in curves.curved:
        rows = curves.query.where(model=model, metric="manifold_gradient_tightness")
        found = [rows.exactly(of=of, signal=signal).one() for of in ("tangent", "normal") for signal in SIGNALS]
        cells = ["–" if row is None or not row.known else number(row.value) for row in found]
        body.append([TableCell(title(model), head=True), *numeric(*cells)])
    return DataTable(heads, [body], "Mean gradient over its bound (1: reached; with our constants)")


def _slopes(curves: ScaleCurves) -> Fold:
    heads = [[TableCell("Manifold"), TableCell("Signal"), *numeric(*(f"{of} ({o:g})" for of, o in ORDERS.items()))]]
    body = []
    for model in curves.curved:
        for signal in SIGNALS:
            rows = [curves.order(model, of, "mean", signal) for of in ORDERS]
            cells = [words_of(row) if row is not None and row.known else "vanishes" for row in rows]
            body.append([TableCell(title(model), head=True), TableCell(signal), *numeric(*cells)])
    return Fold(
        "Slopes of the mean gradient, every manifold", [DataTable(heads, [body], "Slopes of the mean gradient")]
    )


def loop_section(curves: ScaleCurves) -> Section:
    config = curves.about["config"]
    lead = prose(
        "A linear and a two-layer model are trained by SGD on rows of the manifold, with ambient noise of the "
        "variance of a tangent direction in every direction, so that the inputs alone do not favour the tangent. "
        "Shown is the share of the first layer’s activation variance that comes from the tangent directions. Labels "
        "are linear in the tangent coordinates; the control is updated only inside a random subspace of the tangent’s "
        "rank, the null has noise labels. With labels linear in <em>normal</em> coordinates the share falls: what the "
        "labels depend on is reinforced, and the flat control shows that the loop needs no curvature."
    )
    beneath = f"Mean over {config.get('loop_runs')} trainings with 95&nbsp;% intervals; dotted: before training."
    key = [Swatch(label, look["colour"], look.get("dash", "solid")) for label, look in LOOPS.values()]
    heads = [[TableCell("Manifold"), TableCell("Model"), *numeric(*(label for label, _ in LOOPS.values()))]]
    body = []
    for model in curves.models:
        for layers, words in LAYERS.items():
            lines = [curves.shares(model, labels=a, layers=layers, update=b) for a, b in LOOPS]
            ends = [max(line, key=lambda row: row.step, default=None) for line in lines]
            body.append([TableCell(title(model), head=True), TableCell(words), *numeric(*map(words_of, ends))])
    table = Fold("Shares after training, every manifold", [DataTable(heads, [body], "Tangent share after training")])
    return Section(
        "loop", "The self-reinforcing loop", [lead, *shown(loop_figure(curves), beneath, key=key), table], "Loop"
    )


def pinning_section(curves: ScaleCurves) -> Section:
    config = curves.about["config"]
    lead = prose(
        "{types} types with Zipf frequencies, each with its own distribution of followers; embeddings and output head "
        "of a bigram model are trained, and the distance of every embedding to its mean over evenly spaced steps is "
        "taken. Whether frequent types are pinned depends on the optimiser: plain SGD moves a type as often as it "
        "occurs, Adam divides that out.",
        types=config.get("pinned_types"),
    )
    rows = curves.query.where(metric="pinning_slope")
    body = [
        [
            TableCell(str(row["optimiser"]).upper(), head=True),
            TableCell(WINDOWS[str(row["window"])]),
            *numeric(words_of(row)),
        ]
        for row in rows
    ]
    heads = [[TableCell("Optimiser"), TableCell("Steps"), *numeric("slope of log distance on log frequency")]]
    beneath = (
        f"Geometric means over {config.get('pinned_runs')} trainings; rising to the right: frequent types are pinned."
    )
    parts = [lead, *shown(pinning_figure(curves), beneath), DataTable(heads, [body], "Slopes of pinning")]
    return Section("pinning", "Pinning", parts, "Pinning")
