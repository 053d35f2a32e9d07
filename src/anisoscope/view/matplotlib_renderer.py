"""Write figures as vector files with matplotlib: embedded fonts, no display, reproducible bytes."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from anisoscope.errors import AnisoscopeError
from anisoscope.view.figure import HEAT, SEQUENCE, Axis, Figure, Panel, Ref, Series, blend, resolve
from anisoscope.view.words import number, power, strided

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import XAxis, YAxis
    from matplotlib.figure import Figure as Drawing

WIDTH, WIDE = 3.4, 7.0  # widths of one and two columns in inches
DASHES: dict[str, Any] = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-.", "longdash": (0, (6, 2))}
MARKERS = {"circle": "o", "square": "s", "diamond": "D", "circle-open": "o", "diamond-open": "D", "triangle-up": "^"}
MARKERS |= {"triangle-down": "v", "cross": "P", "x": "X", "star": "*"}

RULES: dict[str, Any] = {"font.family": ["STIXGeneral", "DejaVu Serif", "DejaVu Sans"], "mathtext.fontset": "stix"}
RULES |= {"font.size": 8, "axes.labelsize": 8, "axes.titlesize": 8, "axes.titlelocation": "left", "legend.fontsize": 7}
RULES |= {"axes.linewidth": 0.6, "axes.spines.top": False, "axes.spines.right": False, "axes.unicode_minus": True}
RULES |= {f"{axis}tick.labelsize": 7 for axis in "xy"}
RULES |= {f"{axis}tick.major.width": 0.6 for axis in "xy"} | {f"{axis}tick.minor.width": 0.4 for axis in "xy"}
RULES |= {f"{axis}tick.major.size": 2.5 for axis in "xy"} | {"axes.formatter.useoffset": False}
RULES |= {"pdf.fonttype": 42, "svg.fonttype": "path", "svg.hashsalt": "anisoscope"}


def write_figures(
    folder: Path,
    figures: Iterable[Figure],
    chosen: Mapping[str, int],
    *,
    meanwhile: Callable[[Sequence[Path]], object] = len,
) -> list[Path]:
    """Write a PDF and an SVG for every file of the figures, with the initial choices of the page.

    `meanwhile` is called with their paths while processes that were begun draw; this one draws what is left then.
    """
    files = list(_files(folder, figures, chosen))
    if files:
        folder.mkdir(parents=True, exist_ok=True)
    paths = [path for file in files for path in file.paths]
    with _begun() as helpers:
        waiting = deque(files)
        threads = [threading.Thread(target=helper.draw_from, args=(waiting,), daemon=True) for helper in helpers]
        for thread in threads:
            thread.start()
        try:
            meanwhile(paths)
            while (file := _next(waiting)) is not None:
                file.write()
        except BaseException:
            waiting.clear()
            raise
        finally:  # a file that is being written becomes whole, whatever went wrong here
            for thread in threads:
                thread.join(_PATIENCE if sys.exception() is not None else None)
        for helper in helpers:
            for file in helper.failed:  # here the error is told as it is, or there is none
                file.write()
    return paths


@dataclass(frozen=True)
class FigureFile:
    """A drawing that is written in both formats; plain data, which another process may be given."""

    figure: Figure
    panels: Sequence[Panel]
    chosen: Mapping[str, int]
    stem: Path

    @property
    def paths(self) -> list[Path]:
        return [self.stem.with_name(self.stem.name + suffix) for suffix in (".pdf", ".svg")]

    def write(self) -> None:
        import matplotlib

        with matplotlib.rc_context(RULES):  # type: ignore[arg-type, unused-ignore]
            _save(draw(self.figure, self.panels, self.chosen), self.paths)


def _files(folder: Path, figures: Iterable[Figure], chosen: Mapping[str, int]) -> Iterable[FigureFile]:
    taken: set[str] = set()
    for figure in figures:
        panels = figure.panels[: figure.most]
        if not panels:  # no value could be drawn, as of a model for which all tokens are the same
            continue
        each = figure.each and len(figure.panels) > 1
        for stem, changes in figure.files.items():
            for name, shown in [(f"{stem}-{p.title}", [p]) for p in panels] if each else [(stem, panels)]:
                # append a number if another name gives the same slug
                names = [slug(name), *(f"{slug(name)}-{i}" for i in range(2, len(taken) + 3))]
                free = next(name for name in names if name not in taken)
                taken.add(free)
                yield FigureFile(figure, shown, {**chosen, **changes}, folder / free)


def _next(waiting: deque[FigureFile]) -> FigureFile | None:
    try:
        return waiting.popleft()
    except IndexError:
        return None


# -- processes that draw beside this one -------------------------------------------------------------------------------

MOST_HELPERS, _PATIENCE = 6, 10.0  # seconds for a last file after an error
_SERVE = "from anisoscope.view.matplotlib_renderer import serve; serve()"
_helpers: list[DrawingProcess] = []  # begun, and not used yet


class DrawingProcess:
    """A process that draws the files it is given; it ends when this one does."""

    def __init__(self) -> None:
        home = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen([sys.executable, "-c", _SERVE], env={**os.environ, "PYTHONPATH": path}, **pipes)
        self.failed: list[FigureFile] = []

    def draw_from(self, waiting: deque[FigureFile]) -> None:
        """Have files drawn as long as some wait; what cannot be sent or drawn there is left to this process."""
        given, answers = self.process.stdin, self.process.stdout
        assert given is not None and answers is not None
        while (file := _next(waiting)) is not None:
            try:
                pickle.dump(file, given)
                given.flush()
                drawn = pickle.load(answers)
            except (OSError, EOFError, pickle.PickleError, TypeError, AttributeError, ValueError):
                self.failed.append(file)
                return
            if not drawn:
                self.failed.append(file)

    def end(self) -> None:
        self.process.kill()  # it holds nothing: every file that was asked for has been answered
        self.process.communicate()


def begin_drawing() -> None:
    """Start processes that the next `write_figures` shares its work with: they import while others still measure."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not _helpers and sys.executable:
        with contextlib.suppress(OSError):  # without them this process draws alone
            for _ in range(min(MOST_HELPERS, cores - 1)):
                _helpers.append(DrawingProcess())


def end_drawing() -> None:
    """End the processes of `begin_drawing` that have not been used."""
    while _helpers:
        _helpers.pop().end()


@contextlib.contextmanager
def _begun() -> Iterator[list[DrawingProcess]]:
    """The processes that were begun; they end afterwards."""
    try:
        yield list(_helpers)
    finally:
        end_drawing()


def serve() -> None:
    """Draw the files that come through standard input until it ends; the answer says whether each could be drawn."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command, which ends this process
    given, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    from matplotlib.backends import backend_pdf, backend_svg  # noqa: F401  imported before there is work

    while True:
        try:
            file = pickle.load(given)
        except EOFError:
            return
        try:
            file.write()
            pickle.dump(True, answers)
        except Exception:  # told by the command, which draws it again
            pickle.dump(False, answers)
        answers.flush()


def slug(text: str) -> str:
    """A portable file name.

    >>> slug("profile-<b>GPT 2</b>")
    'profile-b-gpt-2-b'
    """
    return re.sub(r"[^a-z0-9_.]+", "-", text.lower()).strip("-.")[:80] or "figure"


def _save(drawing: Drawing, paths: Sequence[Path]) -> None:
    """Write both formats, each with its own canvas (`savefig` would draw twice); the layout is computed once."""
    from matplotlib.backends.backend_pdf import FigureCanvasPdf
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    FigureCanvasPdf(drawing).print_pdf(paths[0], metadata={"CreationDate": None})
    drawing.set_layout_engine("none")
    FigureCanvasSVG(drawing).print_svg(paths[1], metadata={"Date": None})


def draw(figure: Figure, panels: Sequence[Panel], chosen: Mapping[str, int]) -> Drawing:
    """Draw panels side by side with one legend above them."""
    from matplotlib.figure import Figure as Drawing

    shown = [panel.view(chosen) for panel in panels]
    grids = [panel.grid for panel in shown]
    high = 1 + any(panel.below is not None for panel in panels)  # rows of axes per panel
    across = min(len(shown), figure.columns)
    down = -(-len(shown) // across)
    size = figure.size or max(0.7 + (0.19 if g.by_row else 0.14) * max(4, len(g.rows)) if g else 2.1 for g in grids)
    whole = (WIDTH if across == 1 else WIDE, size * down * (1.4 if high > 1 else 1))
    drawing = Drawing(figsize=whole, layout="constrained")
    drawing.get_layout_engine().set(w_pad=0.03, h_pad=0.03)  # type: ignore[union-attr, call-arg, unused-ignore]
    ratios: dict[str, Any] = {"gridspec_kw": {"height_ratios": [2.2, 1.0] * down}} if high > 1 else {}
    axes = drawing.subplots(down * high, across, squeeze=False, sharey=figure.shared and "row", **ratios)

    def lookup(values: Any, each: int = 0) -> np.ndarray:
        found = values.resolve(figure.arrays, chosen, each) if isinstance(values, Ref) else values
        return np.asarray(found, dtype=float)

    for i, (panel, declared) in enumerate(zip(shown, panels, strict=True)):
        row, place = divmod(i, across)
        title = declared.title if len(shown) > 1 or panel.grid is not None else ""
        _panel(axes[row * high, place], panel, lookup, title=title)
        if declared.below is not None:
            _panel(axes[row * high + 1, place], declared.below, lookup)
        if figure.shared and place:
            axes[row * high, place].set_ylabel("")
    for empty in list(axes.flat)[len(shown) :] if high == 1 else ():
        empty.set_visible(False)
    _legend(drawing, list(axes.flat), columns=4 if across > 1 else 2)
    return drawing


COLUMN, LINES = 1.45, 22  # inches that a column of a notebook's legend takes, and its names at most


def notebook_axes(panels: Sequence[Panel], *, ax: Axes | None = None) -> Any:
    """Draw panels for a notebook, into `ax` or a new figure of pyplot, which the notebook then shows.

    Returns the axes of a single panel, and an array of them for several; the legend stands beside them.
    """
    import matplotlib
    from matplotlib import pyplot

    if ax is not None:
        if len(panels) > 1:
            raise AnisoscopeError(f"ax holds one panel, and these are {len(panels)}; name one metric and one kind.")
        _panel(ax, panels[0], _plain_lookup, title=panels[0].title)
        _side_legend(ax, [ax])
        return ax
    with matplotlib.rc_context(RULES):  # type: ignore[arg-type, unused-ignore]
        axes = _side_by_side(pyplot.figure(layout="constrained"), panels)
    return axes[0, 0] if len(panels) == 1 else axes.ravel()[: len(panels)]


def panels_image(panels: Sequence[Panel], *, dots: int = 144) -> np.ndarray:
    """Draw panels with their legend into a picture, uint8 [height, width, 3]; needs no display, and leaves none open.

    `dots` are those of an inch.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Drawing

    with matplotlib.rc_context(RULES):  # type: ignore[arg-type, unused-ignore]
        drawing = Drawing(layout="constrained", dpi=dots)
        canvas = FigureCanvasAgg(drawing)
        _side_by_side(drawing, panels)
        canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def write_png(figure: Figure, chosen: Mapping[str, int], path: Path, *, dots: int = 200) -> None:
    """Write a figure as a picture, for pages that show no vector files; `dots` are those of an inch."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with matplotlib.rc_context(RULES):  # type: ignore[arg-type, unused-ignore]
        drawing = draw(figure, figure.panels[: figure.most], chosen)
        drawing.set_dpi(dots)
        FigureCanvasAgg(drawing).print_png(path, metadata={"Software": None})


def _side_by_side(drawing: Drawing, panels: Sequence[Panel]) -> Any:
    """Draw panels into an empty figure, two in a row, with the legend beside them; returns all axes."""
    across = min(2, len(panels))
    down = -(-len(panels) // across)
    drawing.set_size_inches(4.6 * across, 3.0 * down)
    axes = drawing.subplots(down, across, squeeze=False)
    for place, panel in zip(axes.flat, panels, strict=False):
        _panel(place, panel, _plain_lookup, title=panel.title)
    for empty in list(axes.flat)[len(panels) :]:
        empty.set_visible(False)
    _side_legend(drawing, list(axes.flat))
    return axes


def _plain_lookup(values: Any, each: int = 0) -> np.ndarray:
    return np.asarray(values, dtype=float)


def _side_legend(owner: Any, panels: Sequence[Axes]) -> None:
    """A legend at the right, outside, in as many columns as it needs; a new figure is widened by them."""
    named: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    if len(named) < 2:
        return
    look: dict[str, Any] = {"frameon": False, "handlelength": 1.8, "labelspacing": 0.25, "columnspacing": 1.0}
    if len(panels) == 1 and owner is panels[0]:
        columns = math.ceil(len(named) / LINES)
        owner.legend(named.values(), named.keys(), loc="upper left", bbox_to_anchor=(1.01, 1.0), ncols=columns, **look)
        return
    lines = max(4, int((owner.get_figheight() - 0.2) / 0.135))
    columns = math.ceil(len(named) / lines)
    longest = max(map(len, named))
    owner.set_figwidth(owner.get_figwidth() + columns * max(0.9, min(COLUMN * 1.6, 0.45 + 0.05 * longest)))
    owner.legend(named.values(), named.keys(), loc="outside right upper", ncols=columns, **look)


Lookup = Callable[..., Any]  # from the values of a panel to an array; references are looked up


def _panel(axes: Axes, panel: Panel, lookup: Lookup, *, title: str = "") -> None:
    if panel.grid is not None:
        _map(axes, panel, lookup)
    for level in panel.levels:
        colour, value = resolve(level.colour)[0], lookup(level.value)
        if level.until is not None:
            (axes.axvspan if level.upright else axes.axhspan)(value, level.until, color=colour, alpha=0.2, linewidth=0)
            continue
        label = plain(level.label).split(",")[0].rstrip(" =") or "_"
        rule = axes.axvline if level.upright else axes.axhline
        rule(value, color=colour, linewidth=0.7, linestyle=DASHES[level.dash], label=label, zorder=0.5)
    right = axes.twinx() if panel.right is not None else axes
    for series in panel.series:
        for i in range(max(1, series.each)):
            _series(right if series.right else axes, series, lookup, i)
    if panel.right is not None:
        _axis(right, right.yaxis, panel.right, "y", lookup)
    if panel.grid is None:
        _axis(axes, axes.xaxis, panel.x, "x", lookup)
        _axis(axes, axes.yaxis, panel.y, "y", lookup)
    for note in panel.notes:
        inside: dict[str, Any] = {"transform": axes.transAxes, "ha": "left", "va": "top"}
        look = inside if note.inside else {"ha": "center"}
        axes.text(note.x, note.y, plain(note.text), fontsize=6.5, color=resolve(note.colour)[0], **look)
    if panel.equal and panel.grid is None:
        axes.set_aspect("equal")
    if panel.heading or title:
        axes.set_title(plain(panel.heading or title))


def plain(text: str) -> str:
    """Text escaped so that matplotlib does not parse it as mathematics."""
    return re.sub(r"\{[^}]*\}", "", text).replace("$", r"\$")


def _pick(values: Any, i: int) -> Any:
    return values[i] if isinstance(values, list | tuple) else values


def _series(axes: Axes, series: Series, lookup: Lookup, each: int) -> None:
    x, y = (lookup(values, each).ravel() for values in (series.x, series.y))
    if not np.isfinite(y).any():
        return
    colour, alpha = resolve(_pick(series.colour, each))
    label = "_" if series.quiet or not series.named else plain(str(_pick(series.label, each)))
    if series.low is not None and series.high is not None and (series.bars or series.band):
        _reach(axes, series, x, y, [lookup(v, each).ravel() for v in (series.low, series.high)], colour)
    if series.join:
        good = np.isfinite(y) & np.isfinite(x)
        x, y = x[good], y[good]
    look: dict[str, Any] = {"color": colour, "alpha": alpha, "label": label, "linestyle": "none"}
    look |= {"linestyle": DASHES[series.dash], "linewidth": 0.55 * series.width} if series.width else {}
    look |= {"drawstyle": "steps-post"} if series.stairs else {}
    if series.start is not None:
        gap = np.full(len(x), np.nan)
        x, y = (np.stack([a, b, gap], 1).ravel() for a, b in zip(map(np.asarray, series.start), (x, y), strict=True))
        axes.plot(x, y, **look, solid_capstyle="round")
    elif series.shade is not None:
        axes.plot(x, y, **look, zorder=1)
        axes.scatter(x, y, s=11, color=[blend(SEQUENCE, t) for t in lookup(series.shade, each)], zorder=2)
    else:
        axes.plot(x, y, **look)
        if series.size:
            _marks(axes, series, x, y, colour, alpha)


def _marks(axes: Axes, series: Series, x: np.ndarray, y: np.ndarray, colour: str, alpha: float) -> None:
    """Draw markers, hollow ones filled with white; a line with markers shows them in the legend."""
    hollow = series.hollow if not isinstance(series.hollow, bool) else [series.hollow] * len(x)
    hollow = [h or series.marker.endswith("open") for h in hollow][: len(x)] or [False]
    symbol, size = MARKERS.get(series.marker, "o"), (0.45 if len(x) > 16 else 0.58) * series.size
    if len(set(hollow)) == 1:
        line = axes.get_lines()[-1]
        line.set_marker(symbol)
        line.set_markersize(size)
        line.set_markeredgewidth(0.7)
        line.set_markerfacecolor("white" if hollow[0] else colour)
        return
    faces = ["white" if h else colour for h in hollow]
    axes.scatter(x, y, s=size**2, marker=symbol, facecolors=faces, edgecolors=colour, linewidths=0.7, alpha=alpha)


def _reach(axes: Axes, series: Series, x: np.ndarray, y: np.ndarray, ends: list[np.ndarray], colour: str) -> None:
    """Draw a band from low to high, or whiskers."""
    low, high = ends
    if not series.bars:
        good = np.isfinite(low) & np.isfinite(high) & np.isfinite(y)
        low, high = (np.where(good, end, np.nan) for end in ends)
        axes.fill_between(x, low, high, color=colour, alpha=series.band, linewidth=0)
        return
    middle = y if series.bars == "y" else x
    bars = np.clip(np.nan_to_num([middle - low, high - middle]), 0, None)
    look: dict[str, Any] = {"fmt": "none", "ecolor": colour, "elinewidth": 0.7, "capsize": 1.5}
    axes.errorbar(x, y, **{f"{series.bars}err": bars}, **look)


def _axis(axes: Axes, drawn: XAxis | YAxis, axis: Axis, name: str, lookup: Lookup) -> None:
    if axis.hidden:
        drawn.set_visible(False)
        axes.spines["bottom" if name == "x" else "left"].set_visible(False)
    if axis.log:
        getattr(axes, f"set_{name}scale")("log")
        few_powers(drawn)
    if axis.ticks is not None:
        drawn.set_ticks(list(axis.ticks[0]), [plain(str(word)) for word in axis.ticks[1]])
        drawn.set_ticks([], minor=True)
    limits = getattr(axes, f"set_{name}lim")
    if axis.bounds is not None:
        limits(*lookup(axis.bounds))
    elif axis.from_zero:
        limits(**{"left" if name == "x" else "bottom": 0})
    if axis.reverse:
        drawn.set_inverted(True)
    if axis.title:
        getattr(axes, f"set_{name}label")(plain(axis.title[:1].upper() + axis.title[1:]))


def few_powers(axis: XAxis | YAxis) -> None:
    """Give a logarithmic axis a few ticks at powers of ten, labelled as plain text.

    An axis of less than two orders keeps matplotlib's ticks: two powers of ten would not show the values between them.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = axis.get_data_interval()
    short = low <= 0 or high / low < 100
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)) if short else LogLocator(numticks=5))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if short else power(value)))
    axis.set_minor_locator(NullLocator())


def _map(axes: Axes, panel: Panel, lookup: Lookup) -> None:
    """Draw a heat map, first row at the bottom, or at the top if the axis is reversed."""
    from matplotlib.colors import LinearSegmentedColormap

    grid = panel.grid
    assert grid is not None  # for the type checker: the panel is a heat map
    values = lookup(grid.z)
    colours = LinearSegmentedColormap.from_list("anisoscope", [blend(HEAT, t) for t in np.linspace(0, 1, 9)])
    ends, shades = ((0.0, 1.0), scaled(values)) if grid.by_row else (grid.ends, values)
    look: dict[str, Any] = {"aspect": "equal" if panel.equal else "auto", "cmap": colours, "interpolation": "nearest"}
    look["origin"] = "upper" if panel.y.reverse else "lower"
    shown = axes.imshow(shades, **look, vmin=ends[0], vmax=ends[1])
    for drawn, axis, names, most in (
        (axes.xaxis, panel.x, grid.columns, 18 if grid.by_row else 8),
        (axes.yaxis, panel.y, grid.rows, 60 if grid.by_row else 10),
    ):
        at, text = axis.ticks or (strided(len(names), most), [names[i] for i in strided(len(names), most)])
        drawn.set_ticks(list(at), [plain(str(word)) for word in text])
        drawn.set_label_text(plain(axis.title[:1].upper() + axis.title[1:]))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    if not grid.by_row:
        bar = axes.figure.colorbar(shown, ax=axes, pad=0.02, aspect=22)
        bar.set_label(plain(grid.label))
        bar.outline.set_visible(False)  # type: ignore[operator, unused-ignore]
    elif len(grid.columns) <= 18:
        size = 5.0 if len(grid.columns) <= 9 else 5.4
        for (i, j), value in np.ndenumerate(values):
            if np.isfinite(value):
                colour = "white" if shades[i, j] > 0.6 else "#222222"
                axes.text(j, i, number(float(value), 2), ha="center", va="center", fontsize=size, color=colour)


def scaled(values: np.ndarray) -> np.ndarray:
    """Each row scaled to [0, 1] over its finite range; constant rows become 0.5, missing values stay NaN.

    >>> scaled(np.array([[1.0, 2.0, 3.0], [5.0, 5.0, np.nan]])).tolist()
    [[0.0, 0.5, 1.0], [0.5, 0.5, nan]]
    """
    result = np.full(values.shape, np.nan)
    for i, row in enumerate(values):
        good = np.isfinite(row)
        if good.any():
            low, reach = row[good].min(), np.ptp(row[good])
            result[i, good] = (row[good] - low) / reach if reach > 0 else 0.5
    return result


def _legend(drawing: Drawing, panels: Sequence[Axes], *, columns: int) -> None:
    """Draw one legend above all panels, each name once; none for a single line."""
    named: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    if len(named) < 2:
        return
    longest = max(map(len, named))
    columns = min(columns if longest <= 24 else max(1, columns // 2), len(named))
    spacing = {"handlelength": 2.0, "labelspacing": 0.25, "columnspacing": 1.2, "borderaxespad": 0.1}
    drawing.legend(named.values(), named.keys(), loc="outside upper left", frameon=False, ncols=columns, **spacing)
    drawing.set_figheight(drawing.get_figheight() + 0.15 * math.ceil(len(named) / columns))
