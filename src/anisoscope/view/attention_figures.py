"""Vector figures of attention: mean query and mean key of every head, their paths, and sharpness over training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from anisoscope.view.attention_dynamics import CROWDED
from anisoscope.view.attention_heads import Heads, Plane, Spread
from anisoscope.view.catalogue import Catalogue
from anisoscope.view.figures import RULES, WIDTH, _free, _save, plain, slug
from anisoscope.view.palette import LIGHT, Paper
from anisoscope.view.shape_figures import _grid
from anisoscope.view.training_traces import Time, strided
from anisoscope.view.training_words import few

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 4  # models that have figures of their own
PANELS = 6  # layers of a figure of paths
SHARP = ("attention_entropy", "attention_sharpness", "attention_max")
BANDS = 6  # layers whose heads are shown as a band
TALL = 0.62  # a cell's height by its width: a mean query never points down
WIDE = 7.0


def write_attention_figures(folder: Path, everyone: Sequence[Heads], catalogue: Catalogue) -> list[Path]:
    """A PDF and an SVG of each figure that the table has the rows for, of the first seed of the first models."""
    import matplotlib

    shown = [heads for heads in everyone if heads.turn == 0 and (heads.planes or heads.spreads)][:MOST]
    written: list[Path] = []
    with matplotlib.rc_context(RULES):  # type: ignore[arg-type, unused-ignore]
        folder.mkdir(parents=True, exist_ok=True)
        for heads in shown:
            for name, draw in _figures(heads, catalogue).items():
                stem = name if len(shown) == 1 else slug(f"{name}-{heads.label}")
                written += _save(draw(), _free(folder / stem, written))
    return written


def _figures(heads: Heads, catalogue: Catalogue) -> dict[str, Callable[[], Figure]]:
    """What can be drawn of one model."""
    found: dict[str, Callable[[], Figure]] = {}
    over_time = len(heads.steps) > 1
    if heads.planes:
        found["qk-heads"] = lambda: heads_figure(heads.planes[0], title=heads.label)
    if heads.planes and over_time:
        found["qk-paths"] = lambda: paths_figure(heads.planes[0], title=heads.label)
    spreads = [s for s in heads.spreads if s.metric in SHARP and s.kind == "scores"]
    if spreads and over_time:
        found["attention-over-training"] = lambda: sharp_figure(heads, spreads, catalogue)
    return found


def heads_figure(plane: Plane, *, title: str) -> Figure:
    """Layers by heads at the last step: the mean key to the right, the mean query at its angle.

    On one scale, or where there are many heads each layer on its own, as the page has it.
    """
    from matplotlib.figure import Figure

    layers, heads = len(plane.layers), plane.cosine.shape[2]
    width = min(WIDE, max(WIDTH, 0.9 + 0.3 * heads))
    figure = Figure(figsize=(width, 0.6 + (width - 0.5) / heads * TALL * layers), layout="constrained")
    axes = figure.subplots()
    longest = np.nanmax(np.fmax(plane.query[-1], plane.key[-1]), axis=1, keepdims=True, initial=1e-30)
    unit = 0.46 / (longest if layers * heads > CROWDED else longest.max())
    x, y = np.meshgrid(np.arange(heads) + 0.5, -TALL * (np.arange(layers) + 0.86))
    across, up = (unit * part[-1] for part in plane.tips())
    key, none = unit * plane.key[-1], np.zeros_like(up)
    thick = 1.1 if heads <= 16 else 0.7
    _segments(axes, x - 0.46, y, np.full_like(x, 0.92), none, colour="#dddddd", width=0.5)
    _segments(axes, x, y, key, none, colour=LIGHT[1], width=thick, label="mean key")
    _segments(axes, x, y, across, up, colour=LIGHT[0], width=thick, label="mean query")
    at, down = strided(heads, 16), strided(layers, 20)
    axes.set_xticks([h + 0.5 for h in at], [str(h) for h in at])
    axes.set_yticks([-TALL * (i + 0.6) for i in down], [str(plane.layers[i]) for i in down])
    axes.set(xlim=(0, heads), ylim=(-TALL * layers, 0), aspect="equal", xlabel="Head", ylabel="Block")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.legend(loc="outside upper right", frameon=False, ncols=2, borderaxespad=0.1, handlelength=1.5)
    axes.set_title(plain(title), fontsize=8, loc="left")
    return figure


def _segments(
    axes: Axes, x: np.ndarray, y: np.ndarray, dx: np.ndarray, dy: np.ndarray, *, colour: str, width: float,
    label: str | None = None,
) -> None:  # fmt: skip
    from matplotlib.collections import LineCollection

    ends = np.stack([np.stack([x, y], -1), np.stack([x + dx, y + dy], -1)], -2).reshape(-1, 2, 2)
    drawn = ends[np.isfinite(ends).all((1, 2))]
    axes.add_collection(LineCollection(list(drawn), colors=colour, linewidths=width, label=label, capstyle="round"))


def paths_figure(plane: Plane, *, title: str) -> Figure:
    """The mean query (circles) and the mean key (squares, on the axis) of every head through the steps."""
    chosen = few(range(len(plane.layers)), PANELS)
    figure, grid = _grid(len(chosen), 1.6)
    most = float(np.nanmax([plane.query, plane.key])) or 1.0
    across, up = plane.tips()
    heads = plane.cosine.shape[2]
    colours = [Paper().series(h) if heads <= len(LIGHT) else Paper().sequence(h / (heads - 1)) for h in range(heads)]
    for axes, i in zip(grid.flat, chosen, strict=False):
        axes.axhline(0, color="#cccccc", linewidth=0.6, zorder=0)
        _paths(axes, plane.key[:, i], np.where(np.isfinite(plane.key[:, i]), 0.0, np.nan), colours, symbol="s")
        _paths(axes, across[:, i], up[:, i], colours, symbol="o")
        axes.set(xlim=(-1.08 * most, 1.08 * most), ylim=(-0.1 * most, 1.08 * most))
        axes.set_box_aspect(1.18 / 2.16)  # so that angles are true
        axes.set_title(f"block {plane.layers[i]}", fontsize=7, loc="left")
        axes.locator_params(nbins=4)
    figure.supxlabel(plain(f"Along the mean key, {title}"), fontsize=8)
    figure.supylabel("Across it", fontsize=8)
    return figure


def _paths(axes: Axes, x: np.ndarray, y: np.ndarray, colours: Sequence[str], *, symbol: str) -> None:
    """Paths [S, H] of all heads, each with its first step hollow and its last filled."""
    from matplotlib.collections import LineCollection

    known = [(h, np.flatnonzero(np.isfinite(x[:, h]) & np.isfinite(y[:, h]))) for h in range(x.shape[1])]
    drawn = [(h, np.stack([x[good, h], y[good, h]], -1)) for h, good in known if len(good)]
    if not drawn:
        return
    hues = [colours[h] for h, _ in drawn]
    axes.add_collection(LineCollection([path for _, path in drawn], colors=hues, linewidths=0.8))
    for at, faces in ((0, ["white"] * len(hues)), (-1, hues)):
        ends = np.array([path[at] for _, path in drawn])
        axes.scatter(ends[:, 0], ends[:, 1], s=8, marker=symbol, facecolors=faces, edgecolors=hues, linewidths=0.7)


def sharp_figure(heads: Heads, spreads: Sequence[Spread], catalogue: Catalogue) -> Figure:
    """Measures of attention over steps: a line for each layer, with the band from its lowest head to its highest.

    More bands than a few would hide each other: of a deep model some layers have theirs.
    """
    figure, grid = _grid(len(spreads), 2.0)
    time = Time.of([step for step in heads.steps if step is not None])
    x = np.array([time.place(step) for step in heads.steps if step is not None])
    for axes, spread in zip(grid.flat, spreads, strict=False):
        banded = few(range(len(spread.layers)), BANDS)
        for i, layer in enumerate(spread.layers):
            colour = Paper().sequence(layer / max(1, spread.layers[-1]))
            mean, low, _, _, high = spread.values[:, i].T
            good = np.isfinite(mean)
            if i in banded:
                axes.fill_between(x[good], low[good], high[good], color=colour, alpha=0.1, linewidth=0)
            name = f"block {layer}" if i in (0, len(spread.layers) - 1) else None
            axes.plot(x[good], mean[good], color=colour, linewidth=1.0, marker="o", markersize=1.8, label=name)
        at, text = time.ticks()
        axes.set_xticks(at, text)
        axes.set_xlabel("Step")
        axes.set_title(plain(catalogue.entry(spread.metric).title), fontsize=8, loc="left")
    grid.flat[0].legend(frameon=False, fontsize=6.5)
    return figure
