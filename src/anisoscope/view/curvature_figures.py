"""Figures of the curvature study, from the rows of its table: two columns wide, fonts embedded, one look for all."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from anisoscope.view.curvature_curves import FLAT, SLOPES, Curves, title
from anisoscope.view.drawn import INK, RULE, SOFT
from anisoscope.view.palette import LIGHT, SEQUENCE, blend

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = {"tangent": "Tangent variance", "normal": "Normal variance", "visibility": "Normal / tangent"}
MARKS = ("o", "s", "D", "^", "v", "P", "X", "o")


def colour(curves: Curves, model: str) -> str:
    return LIGHT[6] if model == FLAT else [c for i, c in enumerate(LIGHT) if i != 6][curves.curved.index(model) % 7]


def beta_colours(betas: Sequence[float]) -> dict[float, str]:
    """Colours in order; the null is grey."""
    hues = [beta for beta in betas if beta != 0]
    return {b: LIGHT[6] if b == 0 else blend(SEQUENCE, hues.index(b) / max(1, len(hues) - 1)) for b in betas}


def _canvas(rows: int, columns: int, *, height: float) -> tuple[Figure, np.ndarray]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.04, h_pad=0.04, wspace=0.03, hspace=0.05)  # type: ignore[union-attr, call-arg, unused-ignore]
    return figure, np.atleast_1d(figure.subplots(rows, columns)).ravel()


def _legend(figure: Figure, handles: Sequence[Any], *, columns: int = 7) -> None:
    labels = [str(handle.get_label()) for handle in handles]
    figure.legend(
        handles, labels, loc="outside upper center", ncols=columns, frameon=False, handlelength=1.8, columnspacing=1.3
    )


def _key(label: str, **look: Any) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **look)


def _draw(axes: Axes, found: np.ndarray, **look: Any) -> None:
    """A line through the values with whiskers for their intervals."""
    if not found.size:
        return
    x, value, low, high = found
    style = {"linewidth": 0.9, "markersize": 2.8, "marker": "o", **look}
    axes.plot(x, value, **style)
    if np.isfinite(low).any():
        bars = np.clip(np.nan_to_num([value - low, high - value]), 0, None)
        axes.errorbar(x, value, yerr=bars, fmt="none", ecolor=style["color"], elinewidth=0.7, capsize=1.2)


def _number_of(panel: int, words: str) -> str:
    return f"({'abcdefgh'[panel]})  {words}"


def _manifold_keys(curves: Curves) -> list[Any]:
    look = {"linewidth": 0.9, "markersize": 3}
    return [
        _key(title(model), color=colour(curves, model), marker=MARKS[i % len(MARKS)], **look)
        for i, model in enumerate(curves.models)
    ]


def scales(curves: Curves) -> Figure:
    """Variance against scale: the leading order dashed, the floor dotted, fitted scales left of the upright rule."""
    figure, panels = _canvas(1, 3, height=2.65)
    kind, limit = str(curves.config.get("kind")), float(curves.config.get("fit_limit", math.nan))
    for number, (axes, of) in enumerate(zip(panels, SLOPES, strict=True)):
        for i, model in enumerate(curves.models):
            look = {"color": colour(curves, model), "marker": MARKS[i % len(MARKS)]}
            measured = curves.series(model, "curvature_variance", over="scale", of=of, sampling=kind)
            order = curves.series(model, "curvature_variance", over="scale", of=of, sampling=kind, expected=1)
            _draw(axes, measured, **look, linestyle="none", zorder=1.9 if model == FLAT else 2)
            if order.size and (order[1] > 0).all():
                axes.plot(order[0], order[1], color=look["color"], linewidth=0.7, linestyle=(0, (4, 2)))
            floor = curves.value(model, "curvature_floor", of=of, sampling=kind)
            if floor is not None and floor.value > 0 and of == "normal":
                axes.axhline(floor.value, color=SOFT, linewidth=0.5, linestyle=":")
        axes.axvline(limit, color=RULE, linewidth=0.8, zorder=0)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel(r"Scale $t$ (in units of $1/\kappa$)")
        axes.set_title(_number_of(number, f"{PANELS[of]}, ~ $t^{{{SLOPES[of]:g}}}$"))
    _legend(
        figure, [*_manifold_keys(curves), _key("leading order", color=SOFT, linewidth=0.7, linestyle="--")], columns=8
    )
    return figure


def slopes(curves: Curves) -> Figure:
    """The fitted slope on each manifold with its interval, and the margin of the verdict."""
    figure, panels = _canvas(1, 3, height=1.9)
    kind = str(curves.config.get("kind"))
    for number, (axes, of) in enumerate(zip(panels, SLOPES, strict=True)):
        axes.axvspan(SLOPES[of] - 0.1, SLOPES[of] + 0.1, color=RULE, alpha=0.45, linewidth=0)
        axes.axvline(SLOPES[of], color=SOFT, linewidth=0.6)
        for i, model in enumerate(curves.models):
            point = curves.value(model, "curvature_slope", of=of, sampling=kind)
            if point is None or not math.isfinite(point.value):
                axes.text(SLOPES[of], i, "under the floor", ha="center", va="center", fontsize=6.5, color=SOFT)
                continue
            bars = [[point.value - point.low], [point.high - point.value]]
            axes.errorbar(
                point.value,
                i,
                xerr=bars,
                fmt="o",
                markersize=3,
                color=colour(curves, model),
                capsize=1.5,
                elinewidth=0.9,
            )
        axes.set_yticks(range(len(curves.models)), [title(m) for m in curves.models] if number == 0 else [])
        axes.set_xlim(SLOPES[of] - 0.15, SLOPES[of] + 0.15)
        axes.set_ylim(len(curves.models) - 0.4, -0.6)
        axes.set_xlabel("Slope")
        axes.set_title(_number_of(number, PANELS[of]))
    return figure


def frequency(curves: Curves) -> Figure:
    """What of the curvature is visible when tokens are drawn by frequency."""
    figure, panels = _canvas(2, 2, height=4.9)
    shown, colours = curves.curved[0], beta_colours(curves.betas)
    for beta, shade in colours.items():
        seen = curves.series(shown, "curvature_visibility", over="zipf", beta=beta, estimate="true", sampling="zipf")
        order = curves.series(shown, "curvature_visibility_expected", over="zipf", beta=beta, sampling="zipf")
        _draw(panels[0], seen, color=shade)
        panels[0].plot(order[0], order[1], color=shade, linewidth=0.7, linestyle=(0, (4, 2)))
        _draw(
            panels[1],
            curves.series(shown, "curvature_attenuation", over="zipf", beta=beta, estimate="true"),
            color=shade,
        )
    _attenuation_by_beta(panels[2], curves)
    _raw_ratio(panels[3], curves)
    panels[0].set_yscale("log")
    panels[0].set_ylabel("Normal / tangent variance")
    panels[1].axhline(1, color=SOFT, linewidth=0.6, zorder=0)
    panels[1].set_ylabel("Visible, relative to a uniform draw")
    words = (
        f"Visible by frequency, {title(shown)}",
        f"The same over a uniform draw, {title(shown)}",
        f"The same at $s = {curves.reference[0]:g}$, every manifold",
        rf"Raw ratio of local PCA, $\beta = {curves.reference[1]:g}$",
    )
    for number, (axes, text) in enumerate(zip(panels, words, strict=True)):
        axes.set_title(_number_of(number, text))
        axes.set_xlabel(r"Spread exponent $\beta$" if number == 2 else "Zipf exponent $s$")
    _legend(figure, _beta_keys(colours))
    return figure


def _beta_keys(colours: Mapping[float, str]) -> list[Any]:
    return [
        _key(rf"$\beta$ = {f'{b:g}'.replace('-', '−')}{' (null)' if b == 0 else ''}", color=c, linewidth=1.2)
        for b, c in colours.items()
    ]


def _attenuation_by_beta(axes: Axes, curves: Curves) -> None:
    for i, model in enumerate(curves.curved):
        found = curves.series(model, "curvature_attenuation", over="beta", estimate="true", zipf=curves.reference[0])
        _draw(axes, found, color=colour(curves, model), marker=MARKS[i % len(MARKS)], label=title(model))
    axes.axhline(1, color=SOFT, linewidth=0.6, zorder=0)
    axes.axvline(0, color=RULE, linewidth=0.8, zorder=0)
    axes.set_ylabel("Visible, relative to a uniform draw")
    axes.legend(frameon=False, fontsize=6.2, handlelength=1.4, labelspacing=0.2, loc="upper right")


def _plain_ticks(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda v, _: ""))


def _raw_ratio(axes: Axes, curves: Curves) -> None:
    """The ratio local PCA gives away without knowing what is noise; on the flat control it is nothing but noise."""
    shown, beta = curves.curved[0], curves.reference[1]
    sides: dict[str, dict[str, Any]] = {
        "zipf": {"linestyle": "-"},
        "uniform": {"linestyle": ":", "markerfacecolor": "white"},
    }
    for model in [shown, *([FLAT] if FLAT in curves.models else [])]:
        for sampling, look in sides.items():
            found = curves.series(
                model, "curvature_visibility", over="zipf", beta=beta, estimate="pca", sampling=sampling
            )
            label = f"{title(model)}, {'by frequency' if sampling == 'zipf' else 'uniform'}"
            _draw(axes, found, color=colour(curves, model), label=label, **look)
    true = curves.series(shown, "curvature_visibility", over="zipf", beta=beta, estimate="true", sampling="zipf")
    _draw(
        axes, true, color=colour(curves, shown), marker="^", linestyle="--", label=f"{title(shown)}, true, by frequency"
    )
    axes.set_yscale("log")
    axes.set_ylim(bottom=axes.get_ylim()[0] / 12)  # room for the words
    axes.set_ylabel("Normal / tangent variance")
    axes.legend(frameon=False, fontsize=6.2, handlelength=2.2, labelspacing=0.2, loc="lower left")


def every_manifold(curves: Curves) -> Figure:
    """Visibility relative to a uniform draw, each manifold by itself; dotted with the scales kept as at s = 1."""
    rows = max(1, math.ceil(len(curves.curved) / 3))
    figure, panels = _canvas(rows, min(3, len(curves.curved)), height=0.5 + 1.75 * rows)
    colours = beta_colours(curves.betas)
    for number, axes in enumerate(panels):
        if number >= len(curves.curved):
            axes.set_visible(False)
            continue
        model = curves.curved[number]
        for beta, shade in colours.items():
            _draw(
                axes,
                curves.series(model, "curvature_attenuation", over="zipf", beta=beta, estimate="true"),
                color=shade,
            )
            fixed = curves.series(
                model, "curvature_attenuation", over="zipf", beta=beta, estimate="true", scales="fixed"
            )
            axes.plot(fixed[0], fixed[1], color=shade, linewidth=0.8, linestyle=":")
        axes.axhline(1, color=SOFT, linewidth=0.6, zorder=0)
        axes.set_yscale("log")
        _plain_ticks(axes)
        axes.set_title(_number_of(number, title(model)))
        axes.set_xlabel("Zipf exponent $s$")
    fixed_key = _key("scales as at $s$ = 1", color=SOFT, linewidth=0.8, linestyle=":")
    _legend(figure, [*_beta_keys(colours), fixed_key])
    return figure


def local_pca(curves: Curves) -> Figure:
    """What local PCA recovers: at one scale for all, and under frequency bias."""
    figure, panels = _canvas(2, 2, height=4.9)
    for i, model in enumerate(curves.models):
        look = {"color": colour(curves, model), "marker": MARKS[i % len(MARKS)], "label": title(model)}
        _draw(panels[0], curves.series(model, "local_pca_angle", over="scale"), **look)
        _draw(panels[1], curves.series(model, "curvature_error", over="scale"), **look)
    for axes, text in ((panels[0], "Tangent error (degrees)"), (panels[1], "Relative error of the curvature")):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_ylabel(text)
        axes.set_xlabel(r"Scale $t$ (in units of $1/\kappa$)")
    panels[1].axhline(0.5, color=SOFT, linewidth=0.6, linestyle=":")
    panels[0].legend(frameon=False, fontsize=6.2, handlelength=1.4, labelspacing=0.2)
    for axes, count in ((panels[2], "equal"), (panels[3], "natural")):
        _recovered(axes, curves, count)
    shown = title(curves.curved[0])
    words = ["Uniform sampling: the tangent", "Uniform sampling: the curvature"]
    words += (f"Equal rows per neighbourhood, {shown}", f"All tokens of a type, {shown}")
    for number, (axes, text) in enumerate(zip(panels, words, strict=True)):
        axes.set_title(_number_of(number, text))
    sides = [
        _key("by frequency", color=INK, linewidth=1.0),
        _key("uniform draw", color=INK, linewidth=0.8, linestyle=":"),
    ]
    _legend(figure, [*_beta_keys(beta_colours(curves.betas)), *sides], columns=7)
    return figure


def _recovered(axes: Axes, curves: Curves, count: str) -> None:
    sides: dict[str, dict[str, Any]] = {"zipf": {}, "uniform": {"linestyle": ":", "markerfacecolor": "white"}}
    for beta, shade in beta_colours(curves.betas).items():
        for sampling, look in sides.items():
            found = curves.series(
                curves.curved[0], "curvature_recovered", over="zipf", beta=beta, count=count, sampling=sampling
            )
            _draw(axes, found, color=shade, **look)
    axes.set_ylim(-0.04, 1.04)
    axes.set_ylabel("Tokens whose curvature is recovered")
    axes.set_xlabel("Zipf exponent $s$")


def parabola(curves: Curves) -> Figure:
    """The counter-example, drawn and measured."""
    figure, panels = _canvas(1, 2, height=2.45)
    _parabola_drawing(panels[0])
    rows = curves.series("parabola", "parabola_tangent", over="scale", per="row")
    total = curves.series("parabola", "parabola_tangent", over="scale", per="gradient")
    _draw(panels[1], rows, color=LIGHT[0], label="of each row's gradient, pooled")
    _draw(panels[1], total, color=LIGHT[1], marker="s", label="of the gradient, their sum")
    panels[1].set_xscale("log")
    panels[1].set_ylim(-0.05, 1.08)
    panels[1].set_xlabel("Scale $t$ of $u$")
    panels[1].set_ylabel("Tangent share of the energy")
    panels[1].legend(frameon=False, loc="center left")
    panels[0].set_title(_number_of(0, "Rows $(u, u^2)$ and $-u$: tangents cancel"))
    panels[1].set_title(_number_of(1, "Tangent at every row, normal in the sum"))
    return figure


def _parabola_drawing(axes: Axes) -> None:
    curve = np.linspace(-0.62, 0.62, 121)
    axes.plot(curve, curve**2, color=SOFT, linewidth=0.8)
    axes.axhline(0, color=RULE, linewidth=0.8, zorder=0)
    u = np.array([0.18, 0.34, 0.5])
    arrow = {"arrowstyle": "-|>", "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 7}
    for end in np.concatenate([u, -u]):
        axes.annotate("", (end, end**2), (0, 0), arrowprops={**arrow, "color": LIGHT[0]})
    axes.annotate("", (0, float(2 * (u**2).sum())), (0, 0), arrowprops={**arrow, "color": LIGHT[1], "linewidth": 1.6})
    axes.text(0.03, 0.7, r"$\sum g\,x$", color=LIGHT[1])
    axes.text(0.52, 0.19, r"$g\,x$", color=LIGHT[0])
    axes.text(-0.66, 0.03, "tangent at the apex", color=SOFT, fontsize=6.5)
    axes.set_xlim(-0.68, 0.68)
    axes.set_ylim(-0.06, 0.88)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


FIGURES: dict[str, Callable[[Curves], Figure]] = {
    "scales": scales,
    "slopes": slopes,
    "frequency": frequency,
    "every-manifold": every_manifold,
    "local-pca": local_pca,
    "parabola": parabola,
}
