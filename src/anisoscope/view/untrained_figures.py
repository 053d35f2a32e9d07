"""Figures of the study of untrained blocks: one panel for each block and kind of inputs, and small multiples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from anisoscope.view.drawn import INK, RULE, SOFT
from anisoscope.view.palette import LIGHT, SEQUENCE, blend
from anisoscope.view.untrained_curves import INITS, Arm, Curves, Place, inputs
from anisoscope.view.words import power

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Histograms = Mapping[str, np.ndarray]
_AWAY = -0.28  # of a panel's width, where the name of its upright axis is
_MARKS = ("o", "s", "D", "^")


class Line(NamedTuple):
    """One curve of a panel; a hollow one is dashed."""

    place: Place
    label: str
    hue: int
    hollow: bool = False


class Panel(NamedTuple):
    """One small plot."""

    title: str
    ylabel: str
    lines: tuple[Line, ...]
    log: bool = False
    unit: bool = False  # whether the axis runs from 0 to 1


PANELS = (
    Panel(
        "Average cosine",
        "Average cosine",
        (Line(("embed", "average_cosine"), "input", 6, True), Line(("resid", "average_cosine"), "output", 0)),
        unit=True,
    ),
    Panel(
        "Norms of the stream",
        "Norm",
        (
            Line(("embed", "mean_norm"), "input", 6),
            Line(("embed", "drift"), "its mean", 6, True),
            Line(("resid", "mean_norm"), "output", 0),
            Line(("resid", "drift"), "its mean", 0, True),
        ),
        log=True,
    ),
    Panel(
        "Norms of q and k",
        "Norm",
        (
            Line(("query", "mean_norm"), "query", 1),
            Line(("query", "drift"), "mean query", 1, True),
            Line(("key", "mean_norm"), "key", 2),
            Line(("key", "drift"), "mean key", 2, True),
        ),
        log=True,
    ),
    Panel(
        "Cosines of q and k",
        "Cosine",
        (
            Line(("query", "average_cosine"), "within queries", 1),
            Line(("key", "average_cosine"), "within keys", 2),
            Line(("query", "qk_cosine"), "mean q, mean k", 3, True),
        ),
    ),
    Panel(
        "Scores before softmax",
        "Score",
        (
            Line(("scores", "score_magnitude"), "mean |score|", 4),
            Line(("scores", "score_spread"), "spread in a row", 3),
        ),
        log=True,
    ),
    Panel(
        "Entropy and sharpness",
        "Entropy / log m, sharpness",
        (
            Line(("scores", "attention_entropy"), "entropy / log m", 0),
            Line(("scores", "attention_sharpness"), "sharpness", 1, True),
        ),
        unit=True,
    ),
    Panel(
        "Softmax of a row",
        "Weight p",
        (
            Line(("scores", "attention_max"), "largest", 1),
            Line(("scores", "attention_median"), "median", 6),
            Line(("scores", "attention_min"), "smallest", 0),
        ),
        log=True,
    ),
)


def _canvas(rows: int, columns: int, *, height: float, margins: Mapping[str, float]) -> tuple[Figure, np.ndarray]:
    """Axes at places that are given: finding them takes as long as drawing."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, height))
    return figure, figure.subplots(rows, columns, squeeze=False, gridspec_kw=dict(margins))


def bias_axis(axes: Axes, biases: Sequence[float]) -> None:
    """A logarithmic axis of the bias on which 0 has its place."""
    from matplotlib.ticker import NullLocator

    positive = [bias for bias in biases if bias > 0]
    if not positive:
        return
    least = min(positive)
    axes.set_xscale("symlog", linthresh=least, linscale=0.5)
    decades = [10.0**e for e in range(-4, 7) if least <= 10.0**e <= max(positive)]
    ticks = [0.0, *decades] if len(decades) > 1 else [0.0, least, max(positive)]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(-0.12 * least, 1.25 * max(positive))
    axes.axvline(least, color=RULE, linewidth=0.5, linestyle=":", zorder=0)


def _draw(axes: Axes, found: np.ndarray, *, colour: str, hollow: bool = False, marker: str = "o", label: str) -> None:
    """A line through the means with a band for their intervals."""
    if not found.size:
        return
    bias, value, low, high = found
    fill = {"markerfacecolor": "white", "linestyle": (0, (4, 2))} if hollow else {"linestyle": "-"}
    axes.plot(bias, value, color=colour, marker=marker, markersize=2.4, linewidth=0.9, label=label, **fill)
    if np.isfinite(low).any():
        axes.fill_between(bias, low, high, color=colour, alpha=0.16, linewidth=0)


def panel(curves: Curves, arm: Arm, histograms: Histograms) -> Figure:
    """Everything that is measured of one block and one kind of inputs, against the bias."""
    margins = {"left": 0.065, "right": 0.99, "bottom": 0.095, "top": 0.885, "wspace": 0.42, "hspace": 0.34}
    figure, grid = _canvas(2, 4, height=3.9, margins=margins)
    flat = grid.ravel()
    for number, (axes, shown) in enumerate(zip(flat, PANELS, strict=False)):
        for line in shown.lines:
            found = curves.series(arm, *line.place)
            _draw(axes, _positive(found) if shown.log else found, colour=LIGHT[line.hue], hollow=line.hollow,
                  label=line.label)  # fmt: skip
        bias_axis(axes, curves.biases)
        if shown.log:
            _log_axis(axes)
        if shown.unit:
            axes.set_ylim(-0.04, 1.04)
        _title(axes, number, shown.title)
        _ylabel(axes, shown.ylabel, x=_AWAY)
        axes.legend(frameon=False, fontsize=6, handlelength=1.6, labelspacing=0.15, borderpad=0.1)
    _scores(flat[7], curves, arm, histograms)
    for above, below in zip(grid[0, :3], grid[1, :3], strict=True):
        above.tick_params(labelbottom=False)  # the axis below is the same
        below.set_xlabel("Size of the bias N")
    figure.suptitle(f"{arm.family}: {arm}", fontsize=8, x=0.01, ha="left", color=INK)
    return figure


def _positive(found: np.ndarray) -> np.ndarray:
    """What a logarithmic axis can show: an interval ends where its value is smallest."""
    out = np.array(found)
    if out.size:
        out[1] = np.where(out[1] > 0, out[1], np.nan)
        out[2] = np.where(out[2] > 0, out[2], out[1] / 3)
    return out


def _log_axis(axes: Axes) -> None:
    """A logarithmic axis that shows at least a decade, so that noise does not look like an effect."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high < 10 * low:
        middle = np.sqrt(low * high)
        low, high = middle / 3.5, middle * 3.5
        axes.set_ylim(low, high)
    short = high < 100 * low
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if short else LogLocator(numticks=6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if short else power(value)))
    axes.yaxis.set_minor_locator(NullLocator())


def _title(axes: Axes, number: int, words: str) -> None:
    axes.set_title(f"({'abcdefghijkl'[number]})  {words}", fontsize=7, y=1.03)  # a place of its own need not be found


def _ylabel(axes: Axes, words: str, *, x: float) -> None:
    axes.set_ylabel(words)
    axes.yaxis.set_label_coords(x, 0.5)


def _scores(axes: Axes, curves: Curves, arm: Arm, histograms: Histograms) -> None:
    """Densities of the scores at some biases, over all seeds."""
    edges, shown = histograms.get("edges"), _spread_out(curves.biases)
    if edges is None:
        axes.set_visible(False)
        return
    for i, bias in enumerate(shown):
        counts = _pooled(histograms, arm, bias)
        if counts is None or not counts.sum():
            continue
        density = counts / counts.sum() / np.diff(edges)  # bins widen away from 0: shares would show two false humps
        hue = blend(SEQUENCE, i / max(1, len(shown) - 1))
        drawn = np.where(density > 0, density, np.nan)
        axes.stairs(drawn, np.arcsinh(edges / 0.05), baseline=None, color=hue, linewidth=0.9, label=f"N = {bias:g}")
    _title(axes, 7, "Histogram of scores")
    axes.set_xlabel("Score before softmax")
    _ylabel(axes, "Density", x=_AWAY)
    if axes.patches:
        _symmetric_axis(axes, np.asarray(edges))
        _log_axis(axes)
        axes.set_ylim(bottom=max(axes.get_ylim()[0], 1e-5 * axes.get_ylim()[1]))  # below it are single scores
        axes.legend(frameon=False, fontsize=6, handlelength=1, labelspacing=0.1, borderpad=0.1, loc="lower center")


def _spread_out(biases: Sequence[float], most: int = 5) -> list[float]:
    """Some of the biases, the first and the last among them.

    >>> _spread_out([0, 1, 2, 3, 4, 5, 6], 3)
    [0, 3, 6]
    """
    if len(biases) <= most:
        return list(biases)
    return [biases[round(i * (len(biases) - 1) / (most - 1))] for i in range(most)]


def _pooled(histograms: Histograms, arm: Arm, bias: float) -> np.ndarray | None:
    point = f"input_norm={int(arm.norm)}/bias={bias:g}"
    start = f"{arm.family}-{arm.init}-{arm.width}-"
    mine = [
        np.asarray(v, dtype=float) for k, v in histograms.items() if k.startswith(start) and k.endswith(f"/{point}")
    ]
    return np.sum(mine, axis=0) if mine else None


def _symmetric_axis(axes: Axes, edges: np.ndarray) -> None:
    """Ticks of scores on an axis that is fine at 0; cut to where there is something."""
    widths = np.diff(edges)
    shares = [np.nan_to_num(patch.get_data().values) * widths for patch in axes.patches]  # type: ignore[attr-defined]
    seen = np.flatnonzero(np.max(shares, axis=0) > 1e-4)
    if len(seen):
        reach = max(abs(edges[seen[0]]), abs(edges[seen[-1] + 1]))
        axes.set_xlim(-np.arcsinh(reach / 0.05), np.arcsinh(reach / 0.05))
        ticks = [t for t in (0.1, 1.0, 10.0, 100.0, 1000.0) if t <= reach][-2:]
        both = [-t for t in reversed(ticks)] + [0.0, *ticks]
        axes.set_xticks(np.arcsinh(np.array(both) / 0.05), [f"{t:g}".replace("-", "−") for t in both])


# -- small multiples ---------------------------------------------------------------------------------------------------

_ROWS: tuple[tuple[Place, str, bool], ...] = (
    (("resid", "average_cosine"), "Average cosine of outputs", True),
    (("scores", "attention_entropy"), "Entropy / log m", True),
    (("scores", "score_spread"), "Spread of scores in a row", False),
)


def variants(curves: Curves, family: str, norm: bool) -> Figure | None:
    """One family and kind of inputs: rows are quantities, columns initialisations, lines widths; grey: the inputs."""
    inits, widths = curves.of_axis("init"), curves.of_axis("width")
    if len(inits) * len(widths) < 2:
        return None
    margins = {"left": 0.085, "right": 0.99, "bottom": 0.08, "top": 0.895, "wspace": 0.08, "hspace": 0.22}
    figure, grid = _canvas(len(_ROWS), len(inits), height=0.7 + 1.35 * len(_ROWS), margins=margins)
    for column, init in enumerate(inits):
        for row, (place, words, unit) in enumerate(_ROWS):
            axes = grid[row, column]
            _widths(axes, curves, Arm(family, init, 0, norm), place, log=not unit)
            bias_axis(axes, curves.biases)
            if unit:
                axes.set_ylim(-0.04, 1.04)
            axes.tick_params(labelbottom=row == len(_ROWS) - 1, labelleft=column == 0)
            if column == 0:
                _ylabel(axes, words, x=-0.17)
            _title(axes, row * len(inits) + column, INITS.get(init, init))
        grid[-1, column].set_xlabel("Size of the bias N")
    for row, log in zip(grid, (False, False, True), strict=True):
        _shared(row, log=log)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="upper center", borderaxespad=0.2, ncols=len(labels), frameon=False, handlelength=1.8
    )
    return figure


def _shared(row: Sequence[Axes], *, log: bool) -> None:
    """One range for the axes of a row."""
    ends = [axes.get_ylim() for axes in row]
    for axes in row:
        axes.set_ylim(min(low for low, _ in ends), max(high for _, high in ends))
        if log:
            _log_axis(axes)


def _widths(axes: Axes, curves: Curves, arm: Arm, place: Place, *, log: bool) -> None:
    widths = curves.of_axis("width")
    for i, width in enumerate(widths):
        mine = arm._replace(width=width)
        hue = blend(SEQUENCE, i / max(1, len(widths) - 1))
        if place == ("resid", "average_cosine"):
            before = curves.series(mine, "embed", "average_cosine")
            if before.size:
                axes.plot(before[0], before[1], color=SOFT, linewidth=0.7, linestyle=(0, (1, 1.5)),
                          label="inputs" if i == 0 else None)  # fmt: skip
        found = curves.series(mine, *place)
        label = f"width {width}"
        _draw(axes, _positive(found) if log else found, colour=hue, marker=_MARKS[i % len(_MARKS)], label=label)


def figures(curves: Curves, histograms: Histograms) -> dict[str, Any]:
    """All figures by name: a panel for each family and kind of inputs, then the small multiples."""
    drawn: dict[str, Any] = {}
    for arm in curves.leading_arms():
        drawn[f"panel-{arm.family}-{_short(arm.norm)}"] = panel(curves, arm, histograms)
    for family in curves.families:
        for norm in curves.of_axis("norm"):
            made = variants(curves, family, norm)
            if made is not None:
                drawn[f"variants-{family}-{_short(norm)}"] = made
    return drawn


def _short(norm: bool) -> str:
    return inputs(norm).split()[0]
