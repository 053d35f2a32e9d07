"""Figures of the performance study: loss and accuracy over depth by repair, geometry beside them, and both together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from anisoscope.view.drawn import INK, RULE, SOFT
from anisoscope.view.palette import LIGHT, SEQUENCE, blend
from anisoscope.view.performance_results import GEOMETRY, READINGS, REPAIRS, Book, Mark, Site, Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HUES = dict(zip(REPAIRS, (LIGHT[6], LIGHT[0], LIGHT[2], LIGHT[1]), strict=True))
MARKS = dict(zip(REPAIRS, ("o", "s", "D", "^"), strict=True))
SHAPES = ("o", "s", "D", "^", "v", "P", "X", "*")
WIDTH = 7.0  # inches: two columns


def _canvas(count: int, columns: int, *, height: float = 1.9) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    rows = max(1, math.ceil(count / columns))
    figure = Figure(figsize=(WIDTH, 0.45 + height * rows), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.04, h_pad=0.04, wspace=0.03, hspace=0.05)  # type: ignore[union-attr, call-arg, unused-ignore]
    panels = list(np.atleast_1d(figure.subplots(rows, columns)).ravel())
    for axes in panels[count:]:
        axes.set_visible(False)
    return figure, panels[:count]


def _key(label: str, **look: Any) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **look)


def _legend(figure: Figure, handles: Sequence[Any], *, columns: int = 6) -> None:
    labels = [str(handle.get_label()) for handle in handles]
    place: dict[str, Any] = {"loc": "outside upper center", "ncols": columns, "frameon": False}
    figure.legend(handles, labels, handlelength=1.8, columnspacing=1.3, **place)


def _repair_keys() -> list[Any]:
    return [
        _key(name, color=HUES[repair], marker=MARKS[repair], markersize=3.2, linewidth=1.0)
        for repair, name in REPAIRS.items()
    ]


def _draw(axes: Axes, places: Iterable[float], marks: Sequence[Mark | None], **look: Any) -> None:
    """A line through the values with whiskers for their intervals; what is missing leaves a gap."""
    x = np.array(list(places), dtype=float)
    value = np.array([m.value if m is not None else math.nan for m in marks])
    if not np.isfinite(value).any():
        return
    style = {"linewidth": 1.0, "markersize": 3.2, "marker": "o", **look}
    axes.plot(x, value, **style)
    ends = np.array([[m.low, m.high] if m is not None else [math.nan] * 2 for m in marks])
    there = np.isfinite(ends).all(1) & np.isfinite(value)
    if there.any():
        bars = np.clip([value[there] - ends[there, 0], ends[there, 1] - value[there]], 0, None)
        axes.errorbar(x[there], value[there], yerr=bars, fmt="none", ecolor=style["color"], elinewidth=0.7, capsize=1.3)


def _depth_axis(axes: Axes, book: Book) -> None:
    every = max(1, math.ceil(len(book.sites) / 14))
    shown = [i for i in range(len(book.sites)) if i % every == 0 or i == len(book.sites) - 1]
    axes.set_xticks(shown, [book.short(book.sites[i]) for i in shown])
    axes.set_xlim(-0.35, len(book.sites) - 0.65)


def _by_repair(axes: Axes, book: Book, mark: Callable[[Site, str], Mark | None]) -> None:
    count = len(book.sites)
    for i, repair in enumerate(REPAIRS):
        look = {"color": HUES[repair], "marker": MARKS[repair], "zorder": 2.0 + 0.1 * (repair == "raw")}
        places = [x + 0.05 * (i - 1.5) for x in range(count)]
        _draw(axes, places, [mark(site, repair) for site in book.sites], **look)
    _depth_axis(axes, book)


def _titled(panels: Sequence[Axes], words: Sequence[str]) -> None:
    for number, (axes, text) in enumerate(zip(panels, words, strict=True)):
        axes.set_title(f"({'abcdefghijklmnop'[number % 16]})  {text}")


def losses(book: Book) -> Figure:
    """Loss over depth: of the model that goes on from repaired rows, and of a fresh readout."""
    figure, panels = _canvas(2, 2, height=2.2)
    step = book.steps[-1]
    for axes, reading in zip(panels, READINGS, strict=True):
        _by_repair(axes, book, lambda s, r, reading=reading: book.value("lm_loss", step, s, reading=reading, repair=r))  # type: ignore[misc]
        own = book.value("lm_loss", step, book.sites[-1], reading="patched", repair="raw")
        if own is not None:
            axes.axhline(own.value, color=INK, linewidth=0.7, linestyle=(0, (4, 2)), zorder=0)
        axes.set_ylabel("Loss (nats per token)")
    _titled(panels, ["Rows repaired inside the model", "A fresh linear readout"])
    own_key = _key("the model itself", color=INK, linewidth=0.7, linestyle="--")
    _legend(figure, [*_repair_keys(), own_key])
    return figure


def probes(book: Book, **variant: Any) -> Figure:
    """Accuracy of probes over depth, task by task, with the most frequent class and the shuffled control."""
    figure, panels = _canvas(len(book.tasks), 3)
    step = book.steps[-1]
    for axes, task in zip(panels, book.tasks, strict=True):
        _by_repair(
            axes,
            book,
            lambda s, r, task=task: book.value("probe_accuracy", step, s, task=task, repair=r, **variant),  # type: ignore[misc]
        )
        chance = [book.value("probe_accuracy", step, s, task=task, control="majority") for s in book.sites]
        _draw(axes, range(len(chance)), [m and m._replace(low=math.nan) for m in chance], **_control("--"))
        if not variant:
            mixed = [
                book.value("probe_accuracy", step, s, task=task, repair="raw", control="shuffled") for s in book.sites
            ]
            _draw(axes, range(len(mixed)), [m and m._replace(low=math.nan) for m in mixed], **_control(":"))
        axes.set_ylabel("Accuracy")
    _titled(panels, [task.replace("_", " ") for task in book.tasks])
    keys = [_key("most frequent class", **{**_control("--"), "marker": ""})]
    keys += [] if variant else [_key("shuffled labels", **{**_control(":"), "marker": ""})]
    _legend(figure, [*_repair_keys(), *keys])
    return figure


def _control(line: str) -> dict[str, Any]:
    return {"color": SOFT, "linestyle": line, "marker": "", "linewidth": 0.8, "zorder": 1.5}


def cosine_probes(book: Book) -> Figure:
    """The same for the nearest class mean by cosine."""
    return probes(book, probe="cosine")


def geometry(book: Book) -> Figure:
    """The geometry of the same rows, raw and repaired."""
    figure, panels = _canvas(len(GEOMETRY), 2)
    step = book.steps[-1]
    for axes, metric in zip(panels, GEOMETRY, strict=True):
        _by_repair(axes, book, lambda s, r, metric=metric: book.value(metric, step, s, repair=r))  # type: ignore[misc]
    _titled(panels, list(GEOMETRY.values()))
    _legend(figure, _repair_keys())
    return figure


def course(book: Book) -> Figure:
    """Over checkpoints: anisotropy, the model's own loss and the probes, each layer a line."""
    figure, panels = _canvas(3, 3, height=2.1)
    places = _step_places(book.steps)
    for i, site in enumerate(book.sites):
        look = {"color": blend(SEQUENCE, i / max(1, len(book.sites) - 1)), "marker": SHAPES[i % len(SHAPES)]}
        marks = [book.value("svd_ratio", step, site, repair="raw") for step in book.steps]
        _draw(panels[0], places, marks, **look)
        readout = [book.value("lm_loss", step, site, reading="readout", repair="raw") for step in book.steps]
        _draw(panels[1], places, readout, **look)
        _draw(panels[2], places, [book.accuracy(step, site, "raw") for step in book.steps], **look)
    own = [book.value("lm_loss", step, book.sites[-1], reading="patched", repair="raw") for step in book.steps]
    _draw(panels[1], places, own, color=INK, linestyle=(0, (4, 2)), marker="")
    for axes in panels:
        axes.set_xticks(places, [_step_name(step) for step in book.steps], rotation=60 if len(places) > 7 else 0)
        axes.set_xlabel("Step")
    _titled(panels, [GEOMETRY["svd_ratio"], "Loss (nats per token)", "Mean probe accuracy"])
    keys = [
        _key(
            book.name(site),
            color=blend(SEQUENCE, i / max(1, len(book.sites) - 1)),
            marker=SHAPES[i % len(SHAPES)],
            markersize=3.6,
            linewidth=1.0,
        )
        for i, site in _few(book.sites)
    ]
    _legend(figure, [*keys, _key("the model itself", color=INK, linewidth=0.7, linestyle="--")], columns=7)
    return figure


def _step_places(steps: Sequence[Step]) -> list[float]:
    """Evenly spaced, in the order of training: steps are close to log-spaced anyway, and 0 has no logarithm."""
    return [float(i) for i in range(len(steps))]


def _step_name(step: Step) -> str:
    return "–" if step is None else f"{step // 1000}k" if step >= 10_000 and step % 1000 == 0 else str(step)


def _few(sites: Sequence[Site], most: int = 6) -> list[tuple[int, Site]]:
    """The first, the last and a few between."""
    chosen = {round(i * (len(sites) - 1) / (most - 1)) for i in range(most)} if len(sites) > most else range(len(sites))
    return [(i, sites[i]) for i in sorted(chosen)]


def together(book: Book) -> Figure:
    """Geometry against performance: a point for each layer (shape) and checkpoint (colour)."""
    figure, panels = _canvas(2 * len(GEOMETRY), len(GEOMETRY), height=2.0)
    hues = {s: blend(SEQUENCE, i / max(1, len(book.steps) - 1)) for i, s in enumerate(book.steps)}
    for number, axes in enumerate(panels):
        metric, top = list(GEOMETRY)[number % len(GEOMETRY)], number < len(GEOMETRY)
        for step in book.steps:
            for i, site in enumerate(book.sites):
                x = book.value(metric, step, site, repair="raw")
                y = (
                    book.value("lm_loss", step, site, reading="readout", repair="raw")
                    if top
                    else book.accuracy(step, site, "raw")
                )
                if x is not None and y is not None and x.known and y.known:
                    hue = hues[step] if len(book.steps) > 1 else LIGHT[0]
                    axes.plot(x.value, y.value, SHAPES[i % len(SHAPES)], color=hue, markersize=3.6, alpha=0.9)
        if number % len(GEOMETRY) == 0:
            axes.set_ylabel("Readout loss (nats)" if top else "Mean probe accuracy")
        if not top:
            axes.set_xlabel(GEOMETRY[metric])
        axes.grid(visible=True, color=RULE, linewidth=0.4)
        axes.set_axisbelow(True)
    shape: dict[str, Any] = {"color": INK, "linestyle": "none", "markersize": 4}
    keys = [_key(book.name(s), marker=SHAPES[i % len(SHAPES)], **shape) for i, s in _few(book.sites)]
    if len(book.steps) > 1:
        keys += [
            _key(f"step {_step_name(s)}", color=hues[s], marker="s", linestyle="none", markersize=4)
            for s in (book.steps[0], book.steps[len(book.steps) // 2], book.steps[-1])
        ]
    _legend(figure, keys, columns=8)
    return figure


FIGURES: dict[str, Callable[[Book], Figure]] = {
    "loss": losses,
    "probes": probes,
    "cosine": cosine_probes,
    "geometry": geometry,
    "course": course,
    "together": together,
}


def figures_of(book: Book) -> dict[str, Callable[[Book], Figure]]:
    """Those that this model has numbers for."""
    without = set() if book.tasks else {"probes", "cosine"}
    without |= set() if len(book.steps) > 1 else {"course"}
    return {name: draw for name, draw in FIGURES.items() if name not in without}
