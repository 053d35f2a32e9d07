"""The page of the curvature study: verdicts, β, variance against scale, frequency bias, local PCA, gradients, training.

Pages of older runs lack the sections on what they did not measure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from anisoscope.results.query import Query
from anisoscope.studies.curvature.curves import (
    DASHED,
    FLAT,
    SCALE,
    ScaleCurves,
    beta_label,
    lettered_figure,
    signed,
    title,
)
from anisoscope.studies.curvature.gradient_figures import (
    exponent_section,
    gradient_section,
    loop_section,
    pinning_section,
)
from anisoscope.studies.page_parts import found, hero, judged_section, numeric, page_of, prose, shown, words_of
from anisoscope.view.figure import Axis, Figure, Level, Note, Panel, Series
from anisoscope.view.page import DataTable, Fold, Hero, Page, Prose, Section, Swatch, TableCell
from anisoscope.view.subjects import RunView
from anisoscope.view.words import number

FOUND = {  # the claim that says what was found in a section
    "scales": ("visibility_t2",),
    "frequency": ("frequency_hides_curvature",),
    "local": ("local_pca_recovers_curvature",),
    "gradients": ("gradient_within_bounds",),
    "loop": ("self_reinforcing_loop",),
    "pinning": ("frequent_types_pinned",),
    "parabola": ("parabola",),
}
SLOPES = {"tangent": 2.0, "normal": 4.0, "visibility": 2.0}
PANELS = {"tangent": "Tangent variance", "normal": "Normal variance", "visibility": "Normal / tangent"}
ZIPF = "Zipf exponent s"
DOTTED: dict[str, Any] = {"dash": "dot", "hollow": True}
NO_EFFECT = Level(1.0, "no effect", dash="solid")


def scales_figure(curves: ScaleCurves) -> Figure:
    """Variance against scale: leading order dashed, noise floor dotted, fitted scales left of the vertical line."""
    panels, limit = [], float(curves.about["config"].get("fit_limit", math.nan))
    for of, slope in SLOPES.items():
        fixed = {"of": of, "sampling": curves.kind}
        drawn: list[Series] = []
        levels = [Level(limit, upright=True, dash="solid", colour="@rule")]
        for model in curves.models:
            place, look = (model, "curvature_variance", "scale"), curves.look(model)
            drawn += curves.line(title(model), place, look | {"width": 0}, **fixed)
            if all(row.value > 0 for row in curves.rows(*place, **fixed, expected=1)):
                dashed = {"colour": look["colour"], **DASHED}
                drawn += curves.line(f"{title(model)}, leading order", place, dashed, **fixed, expected=1)
            floor = curves.value(model, "curvature_floor", of)
            if floor is not None and floor.value > 0 and of == "normal":
                levels.append(Level(floor.value))
        axes, name = (
            (Axis(SCALE, log=True), Axis(log=True, rules=True)),
            f"{PANELS[of]}, ~ t{'⁴' if slope == 4 else '²'}",
        )
        panels.append(Panel(*axes, tuple(drawn), title=name, levels=tuple(levels)))
    return lettered_figure("scales", panels)


def slopes_figure(curves: ScaleCurves) -> Figure:
    """The fitted slope on each manifold with its interval, and the margin of the verdict."""
    panels, names = [], [title(model) for model in curves.models]
    y = Axis(ticks=([float(i) for i in range(len(names))], names), bounds=(len(names) - 0.4, -0.6))
    for of, slope in SLOPES.items():
        drawn, notes = [], []
        for i, model in enumerate(curves.models):
            row = curves.value(model, "curvature_slope", of)
            if row is None:
                notes.append(Note("under the floor", slope, float(i)))
                continue
            look: dict[str, Any] = {"colour": curves.look(model)["colour"], "bars": "x", "width": 0, "size": 7}
            look |= {"low": [row.low], "high": [row.high], "text": [f"<b>{names[i]}</b><br>{words_of(row)}"]}
            drawn.append(Series(names[i], [row.value], [float(i)], named=False, **look))
        x = Axis("slope", bounds=(slope - 0.15, slope + 0.15), most=5)
        margin = Level(slope - 0.1, upright=True, until=slope + 0.1, colour="@soft")
        levels = margin, Level(slope, upright=True, dash="solid")
        panels.append(Panel(x, y, tuple(drawn), title=PANELS[of], levels=levels, notes=tuple(notes)))
    return lettered_figure("slopes", panels, size=1.9)


def frequency_figure(curves: ScaleCurves) -> Figure:
    """Visibility of curvature when tokens are drawn by frequency."""
    model, (zipf, beta) = curves.curved[0], curves.reference
    true, metric = {"estimate": "true"}, "curvature_attenuation"
    order = ("leading order", "curvature_visibility_expected", DASHED, {"sampling": "zipf"})
    visible = curves.by_beta(model, ("", "curvature_visibility", {}, {**true, "sampling": "zipf"}), order)
    relative = curves.by_beta(model, ("", metric, {}, true))
    every = curves.by_model(curves.curved, metric, "beta", **true, zipf=zipf)
    none = Level(0.0, upright=True, dash="solid", colour="@rule")
    ends = min(curves.shades) - 0.04, max(curves.shades) + 0.04
    ratio = Axis("Normal / tangent variance", log=True, rules=True)
    share, x = Axis("Visible, relative to a uniform draw", rules=True), Axis(ZIPF)
    names = [f"Visible by frequency, {title(model)}", f"The same over a uniform draw, {title(model)}"]
    names += [f"The same at s = {zipf:g}, every manifold", f"Raw ratio of local PCA, β = {signed(beta)}"]
    panels = (
        Panel(x, ratio, tuple(visible), title=names[0]),
        Panel(x, share, tuple(relative), title=names[1], levels=(NO_EFFECT,)),
        Panel(
            Axis("spread exponent β", bounds=ends), share, every, title=names[2], levels=(NO_EFFECT, none), legend=True
        ),
        Panel(x, ratio, tuple(_raw_ratio(curves)), title=names[3], legend=True),
    )
    return lettered_figure("frequency", panels, layout="pairs", columns=2)


def _raw_ratio(curves: ScaleCurves) -> list[Series]:
    """The normal-to-tangent ratio of local PCA without noise correction; on the flat control it is pure noise."""
    models = [curves.curved[0], *([FLAT] if FLAT in curves.models else [])]
    sides: list[tuple[str, str, str, dict[str, Any]]] = [("by frequency", "pca", "zipf", {})]
    sides.append(("uniform", "pca", "uniform", DOTTED))
    lines = [(model, *side) for model in models for side in sides]
    lines.append((models[0], "true, by frequency", "true", "zipf", {"marker": "triangle-up", "dash": "dash"}))
    drawn = []
    for model, words, by, sampling, look in lines:
        fixed = {"beta": curves.reference[1], "estimate": by, "sampling": sampling}
        place = (model, "curvature_visibility", "zipf")
        drawn += curves.line(f"{title(model)}, {words}", place, curves.look(model) | look, **fixed)
    return drawn


def manifolds_figure(curves: ScaleCurves) -> Figure:
    """Visibility relative to a uniform draw, one panel per manifold; dotted: scales fixed at those of s = 1."""
    panels, metric, true = [], "curvature_attenuation", {"estimate": "true"}
    fixed = ("scales as at s = 1", metric, {**DASHED, "dash": "dot", "width": 1.4}, {**true, "scales": "fixed"})
    for model in curves.curved:
        drawn = curves.by_beta(model, ("", metric, {}, true), fixed)
        y = Axis(log=True, rules=True)
        panels.append(Panel(Axis(ZIPF), y, tuple(drawn), title=title(model), levels=(NO_EFFECT,)))
    return lettered_figure("every-manifold", panels, most=9, size=1.9)


def pca_figure(curves: ScaleCurves) -> Figure:
    """What local PCA recovers: at one scale for all, and under frequency bias."""
    x, model = Axis(SCALE, log=True), curves.curved[0]
    angle, error = (curves.by_model(curves.models, m, "scale") for m in ("local_pca_angle", "curvature_error"))
    degrees, relative = Axis("Tangent error (degrees)", log=True, rules=True), "Relative error of the curvature"
    half = (Level(0.5, "recovered below"),)
    panels = [
        Panel(x, degrees, angle, title="Uniform sampling: the tangent", legend=True),
        Panel(x, Axis(relative, log=True, rules=True), error, title="Uniform sampling: the curvature", levels=half),
    ]
    for count, words in {"equal": "Equal rows per neighbourhood", "natural": "All tokens of a type"}.items():
        metric, dotted = "curvature_recovered", {**DOTTED, "named": False}
        sides = [("", metric, look, {"count": count, "sampling": sampling})
                 for sampling, look in (("zipf", {}), ("uniform", dotted))]  # fmt: skip
        share = Axis("Tokens whose curvature is recovered", rules=True, bounds=(-0.04, 1.04))
        drawn = tuple(curves.by_beta(model, *sides))
        panels.append(Panel(Axis(ZIPF), share, drawn, title=f"{words}, {title(model)}"))
    return lettered_figure("local-pca", panels, layout="pairs", columns=2)


def parabola_figure(curves: ScaleCurves) -> Figure:
    """The parabola counter-example: a drawing and the measured shares."""
    ends = [0.18, 0.34, 0.5]
    u = [*ends, *(-end for end in ends)]
    arc = [-0.62 + 0.0124 * i for i in range(101)]
    drawn = (
        Series("rows (u, u²)", arc, [x * x for x in arc], "@soft", width=1.2, quiet=True),
        Series("gradient of a row", u, [x * x for x in u], "@s1", width=1.6, size=5, start=([0.0] * 6, [0.0] * 6)),
        Series("their sum", [0.0], [2 * sum(x * x for x in ends)], "@s2", width=3, size=7, start=([0.0], [0.0])),
    )
    notes = (Note("tangent at the apex", -0.5, 0.03), Note("Σ g x", 0.09, 0.72, colour="@s2"), Note("g x", 0.56, 0.2))
    zero = (Level(0.0, dash="solid", colour="@rule"),)
    hidden = Axis(bounds=(-0.68, 0.68), hidden=True), Axis(bounds=(-0.06, 0.88), hidden=True)
    first = Panel(*hidden, drawn, title="Rows (u, u²) and −u: tangents cancel", levels=zero, notes=notes)
    place, square = ("parabola", "parabola_tangent", "scale"), {"colour": "@s2", "marker": "square"}
    shares = curves.line("of each row's gradient, pooled", place, {"colour": "@s1"}, per="row")
    shares += curves.line("of the gradient, their sum", place, square, per="gradient")
    axes = Axis("scale t of u", log=True), Axis("Tangent share of the energy", rules=True, bounds=(-0.05, 1.08))
    second = Panel(*axes, tuple(shares), title="Tangent at every row, normal in the sum", legend=True)
    return lettered_figure("parabola", (first, second), layout="pairs", columns=2)


def study_page(run: RunView, declared: Mapping[str, Any] | None = None) -> Page:
    """Verdicts and the sections on β, variances, frequency, local PCA, gradients, training, and the parabola."""
    curves = ScaleCurves(Query(run.table), run.about)
    config = run.about["config"]
    deck = f"Manifolds of dimension {config['dim']} in {config['ambient']}, whose second fundamental form is known"
    note = (
        "It has to hold on every curved manifold; the numbers are those of the one that decides. Intervals are "
        "Student’s, over independent repetitions. All this is about geometry and sampling; what it takes from a "
        f"trained model is β, how widely types spread, and {_source(curves.about)}."
    )
    sections = [section for section in (exponent_section(curves), _scale_section(curves)) if section is not None]
    if curves.curved:
        sections += [_frequency_section(curves), _local_section(curves)]
        sections += [gradient_section(curves)] if len(curves.query.where(metric="manifold_gradient_slope")) else []
    sections += [loop_section(curves)] if len(curves.query.where(metric="tangent_variance_share")) else []
    sections += [pinning_section(curves)] if len(curves.query.where(metric="pinning_slope")) else []
    lead = (
        "Rows that are almost tangent do not make the gradient tangent. Take rows x = (u, u²) with u symmetric around "
        "0, the loss gradient g = 1 for every row, and a linear map, so that dL/dW = Σ g xᵀ. Row by row the energy is "
        "tangent up to O(t²); in the sum the tangent parts cancel, and the rest is normal at every scale. A ratio of "
        "order t between normal and tangent gradients is to be measured, not a theorem."
    )
    words = "(a) Gradients of single rows, and their sum. (b) Tangent share of the energy."
    parabola = Section("parabola", "The parabola", [Prose(lead), *shown(parabola_figure(curves), words)], "Parabola")
    sections = [found(section, run.verdicts, *FOUND.get(section.id, ())) for section in (*sections, parabola)]
    sections.append(judged_section(note))
    return page_of(run, "How much curvature can be seen", deck, sections, terms=TERMS, hero=_hero(curves))


def _hero(curves: ScaleCurves) -> Hero:
    """What a draw by frequency shows of the curvature, and how curvature shows with scale."""
    key = [Swatch(title(model), curves.look(model)["colour"]) for model in curves.models]
    scales = scales_figure(curves).panels[2]
    panels = [replace(scales, title="Normal over tangent variance, by scale")]
    if curves.curved:
        shown = frequency_figure(curves).panels[2]
        panels.insert(0, replace(shown, title="Visible by frequency, relative to a uniform draw", legend=False))
    caption = (
        "Surfaces of known curvature. Left: how much of the curvature is seen when tokens are drawn by frequency; 1 is "
        "no effect of frequency. Right: curvature shows more at larger scales; dashed is the theory."
    )
    if curves.curved:
        beta = curves.reference[1]
        wider = ", where frequent types spread wider" if beta < 0 else ", where rare types spread wider" if beta else ""
        caption += f" Judged is β = {signed(beta)}{wider}."
    return hero(panels, "How much curvature can be seen", caption, key=key)


def _source(about: Mapping[str, Any]) -> str:
    """Where β comes from, as the end of a sentence."""
    reference = about["reference"]
    beta, source = signed(float(reference["beta"])), reference.get("from")
    if source == "measured":
        ends = f"[{signed(float(reference['low']))}, {signed(float(reference['high']))}]"
        more = (
            " – below 0: frequent types are the wider ones, and curvature is <em>more</em> visible for frequent tokens"
        )
        return (
            f"was measured first, in {reference['model']}: {beta} {ends}{more if float(reference['beta']) < 0 else ''}"
        )
    given = reference.get("given") and source != "assumed"
    return f"is {beta} as given" if given else f"is <em>assumed</em> here to be {beta}; --model NAME measures it"


def _scale_section(curves: ScaleCurves) -> Section:
    config = curves.about["config"]
    lead = prose(
        "Points are scattered around one point of each manifold at tangent distance <i>t</i>. Their variance grows as "
        "<i>t</i>² in the tangent space and, by curvature alone, as <i>t</i>⁴ in the normal space: a sample twice as "
        "narrow shows a quarter of the curvature. The normal variance of a Gaussian scatter is ½ <i>t</i>⁴ ‖II‖², of a "
        "ball <i>t</i>⁴ (‖II‖² − ‖tr II‖²/(m+2)) / (2(m+2)(m+4)), of a shell around a point of a sphere 0."
    )
    beneath = (
        f"Measured variance (marks; {config['replicates']} samples of {config['samples']:,} rows each) and its leading "
        f"order (dashed). Ambient noise of {number(config['floor'])}/κ sets the floor (dotted). Slopes are fitted to "
        f"what exceeds the floor, up to the upright rule at {config['fit_limit']}/κ: beyond it the next order counts."
    )
    slopes = "Slopes with 95&nbsp;% intervals; the shaded band is the margin of the verdict."
    wide = numeric("Slope (expected)", "Measured / expected variance", columns=3)
    heads = [[TableCell("Manifold", rows=2), *wide], numeric(*(f"{of} ({s:g})" for of, s in SLOPES.items()), *SLOPES)]
    body = []
    for model in curves.models:
        metrics = ("curvature_slope", "curvature_constant")
        cells = [words_of(curves.value(model, metric, of)) for metric in metrics for of in SLOPES]
        body.append([TableCell(title(model), head=True), *cells])
    key = [Swatch(title(model), curves.look(model)["colour"]) for model in curves.models]
    key += [Swatch("leading order", "@soft", "dash")]
    figures = [*shown(scales_figure(curves), beneath, key=key), *shown(slopes_figure(curves), slopes)]
    table = DataTable(heads, [body], "Slopes and constants")
    return Section("scales", "Variance against scale", [lead, *figures, table], "Scale")


def _betas(curves: ScaleCurves) -> list[Swatch]:
    return [Swatch(beta_label(beta), shade) for beta, shade in curves.shades.items()]


def _frequency_section(curves: ScaleCurves) -> Section:
    config, (zipf, beta) = curves.about["config"], curves.reference
    lead = prose(
        "{types} token types are points of the manifold, with Zipf frequencies f<sub>i</sub> ∝ i<sup>−s</sup>; tokens "
        "scatter around their type on the scale t<sub>i</sub> = t₀ (f<sub>i</sub>/f<sub>max</sub>)<sup>−β</sup>, at "
        "most 0.5/κ. With β &gt; 0 frequent types are narrow: tokens drawn by frequency mostly come from where "
        "curvature cannot be seen. With β &lt; 0 it is the other way round; β = 0 is the null. Visibility need not "
        "fall with s, because a steeper law also makes the rare types wider; what frequency hides is the ratio to a "
        "<em>uniform draw of the same types</em>.",
        types=config["types"],
    )
    beneath = (
        "(a) Normal over tangent variance of tokens drawn by frequency, pooled within types; dashed: leading order. "
        f"(b) The same over that of a uniform draw of the same types; 1 is no effect. (c) At s = {zipf:g} on every "
        f"manifold, against β. (d) The ratio that local PCA gives with ambient noise {config['noise']}/κ, for β = "
        f"{signed(beta)}: partly noise (on the flat control wholly). It can rise under frequency bias while the true "
        "visibility falls, so it is no measure of curvature until the noise is known."
    )
    behind = (
        "Visibility relative to a uniform draw of the same types. Dotted: the scales of the types are kept as they are "
        "at s = 1 and only the draw changes, as when a corpus is resampled but the model is not."
    )
    every = shown(manifolds_figure(curves), behind, key=_betas(curves))
    parts = [lead, *shown(frequency_figure(curves), beneath, key=_betas(curves))]
    parts += [Fold("Every manifold, and with the scales held fixed", every)]
    return Section("frequency", "Frequency bias", parts, "Frequency")


def _local_section(curves: ScaleCurves) -> Section:
    config = curves.about["config"]
    lead = Prose(
        f"In each neighbourhood the top {config['dim']} principal directions estimate the tangent space, and "
        "regression of the rest on products of the tangent coordinates the second fundamental form. A curvature is "
        "recovered when its relative error is under one half."
    )
    beneath = (
        f"(a, b) Neighbourhoods of {config['neighbours']} rows at one scale, noise {config['noise']}/κ: noise hides "
        "the curvature of narrow neighbourhoods before their tangent, and wide ones bend away from both. (c) Share of "
        "tokens whose curvature is recovered with equally many rows in every neighbourhood, on the "
        f"{title(curves.curved[0])}: by frequency (solid) and in a uniform draw (dotted). (d) The same with all tokens "
        "of a type: the error goes as f<sup>2β−½</sup>, so for β below ¼ frequency <em>helps</em>."
    )
    parts = [lead, *shown(pca_figure(curves), beneath, key=_betas(curves))]
    return Section("local", "What local PCA recovers", parts, "Local PCA")


TERMS = """
Slope | curvature_slope | d log variance / d log t
Ordinary least squares over the scales above the noise floor, one slope for each independent repetition.

Visibility | curvature_visibility | tr C_N / tr C_T
Pooled within types. <code>estimate=true</code>: in the known tangent and normal spaces, each type’s normal variance
divided by its own ‖II‖² over the mean, so that it does not matter where the few frequent types lie.
<code>estimate=pca</code>: in those that local PCA finds, noise included.

Attenuation | curvature_attenuation |
Visibility of a draw by frequency over that of a uniform draw of the same types with the same scales.

Tangent error | local_pca_angle |
Largest principal angle between the estimated and the true tangent space, in degrees; the median over tokens.

Curvature error | curvature_error | ‖Ŝ − II‖ / ‖II‖
The median over tokens of the relative error of the estimated second fundamental form.

β | frequency_beta | distance ∝ f^−β
Minus the slope of the log distance of a type’s rows to their centroid on its log frequency.

Gradient on a manifold | manifold_gradient | ‖E[g yᵀ] B‖ / G
Of the mean gradient (<code>per=mean</code>) and row by row (<code>per=rows</code>), in the true tangent and normal
spaces.

Slope of the gradient | manifold_gradient_slope | d log part / d log t
Over the scales above rounding, one for each independent repetition.

Tightness | manifold_gradient_tightness | part / (G · bound)
The mean gradient over its upper bound with our constants.

Tangent share | tangent_variance_share |
Share of the variance of a layer’s activations that comes from the tangent directions of its inputs.

Pinning | pinning_slope pinning_distance |
RMS distance of an embedding to its time mean, and the slope of its logarithm on the log frequency of the type.

Recovered | curvature_recovered |
Share of tokens with a curvature error under one half; a token whose type has too few rows for a fit is not recovered.
"""
