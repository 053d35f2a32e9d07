"""Vector figures for papers: one column wide, fonts embedded, no display needed, the same bytes every time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from anisoscope.view.maps import parse_site, thin_spectrum
from anisoscope.view.palette import HEAT, Paper, blend
from anisoscope.view.series import Line, Panel, Sheet, Subject
from anisoscope.view.tables import default_metrics, pivot
from anisoscope.view.traces import Axis, Style, style_lines, wants_log
from anisoscope.view.words import number, power, site_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import XAxis, YAxis
    from matplotlib.figure import Figure

WIDTH = 3.4  # inches: one column
DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-.", "longdash": (0, (6, 2))}
MARKERS = {"circle": "o", "square": "s", "diamond": "D"}
RULES: dict[str, Any] = {
    "font.family": ["STIXGeneral", "DejaVu Serif", "DejaVu Sans"],
    "mathtext.fontset": "stix",
    "font.size": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.minor.width": 0.4,
    "ytick.minor.width": 0.4,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.unicode_minus": True,
    "axes.formatter.useoffset": False,
    "pdf.fonttype": 42,
    "svg.fonttype": "path",
    "svg.hashsalt": "anisoscope",
}


def write_figures(
    folder: Path, sheet: Sheet, *, spectra: Mapping[str, Mapping[str, np.ndarray]], compared: bool = False
) -> list[Path]:
    """A PDF and an SVG of each main metric's profile, of the spectra, and of the map of layers by metrics.

    Where runs are `compared`, only of what shows all models together.
    """
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    with matplotlib.rc_context(RULES):  # type: ignore[arg-type, unused-ignore]
        panels = [p for p in sheet.panels() if not p.variant]
        main = sheet.catalogue.main({p.metric for p in panels})
        for panel in (p for p in panels if p.metric in main and p.values):
            written += _save(profile(panel), _free(folder / slug(f"profile-{panel.metric}"), written))
        if compared:
            return written
        for label, found in spectra.items():
            written += _save(spectrum(found), _free(folder / _name("spectra", label, len(spectra)), written))
        maps = pivot(sheet, default_metrics(sheet))
        for index, places in maps.items():
            subject = sheet.subjects[index]
            stem = folder / _name("heat-map", subject.label, len(maps))
            written += _save(heat_map(sheet, subject, places), _free(stem, written))
    return written


def slug(text: str) -> str:
    """A file name that is safe everywhere.

    >>> slug("profile-<b>GPT 2</b>")
    'profile-b-gpt-2-b'
    """
    return re.sub(r"[^a-z0-9_.]+", "-", text.lower()).strip("-.")[:80] or "figure"


def _name(what: str, label: str, count: int) -> str:
    return what if count == 1 else slug(f"{what}-{label}")


def _free(stem: Path, written: list[Path]) -> Path:
    """The name itself, or with a number where another model's name came out the same."""
    taken = {path.name.rsplit(".", 1)[0] for path in written}
    names = [stem.name, *(f"{stem.name}-{i}" for i in range(2, len(written) + 3))]
    return stem.with_name(next(name for name in names if name not in taken))


def _save(figure: Figure, stem: Path) -> list[Path]:
    """Both formats, each by its own canvas (`savefig` draws twice); what is in a figure is arranged once."""
    from matplotlib.backends.backend_pdf import FigureCanvasPdf
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    paths = [stem.with_name(stem.name + suffix) for suffix in (".pdf", ".svg")]
    FigureCanvasPdf(figure).print_pdf(paths[0], metadata={"CreationDate": None})
    figure.set_layout_engine("none")
    FigureCanvasSVG(figure).print_svg(paths[1], metadata={"Date": None})
    return paths


def few_powers(axis: XAxis | YAxis, most: int = 5) -> None:
    """A logarithmic axis with a few ticks at powers of ten, however many orders it spans, written as plain text.

    Less than two orders keep the library's own ticks: two powers of ten would not tell what lies between them.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = axis.get_data_interval()
    if low <= 0 or high / low < 100:
        return
    axis.set_major_locator(LogLocator(numticks=most))
    axis.set_major_formatter(FuncFormatter(lambda value, _: power(value)))
    axis.set_minor_locator(NullLocator())


def _figure(height: float, width: float = WIDTH) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.02, h_pad=0.02)  # type: ignore[union-attr, call-arg, unused-ignore]
    return figure, figure.subplots()


def plain(text: str) -> str:
    """Text that matplotlib will not take for mathematics."""
    return text.replace("$", r"\$")


def profile(panel: Panel) -> Figure:
    """One metric over depth, with bands, and the final norm apart."""
    figure, axes = _figure(2.25)
    axis = Axis.of(panel.lines)
    for line, style in zip(panel.lines, style_lines(panel, Paper()), strict=True):
        _draw(axes, line, style=style, axis=axis)
    at, text = axis.ticks()
    axes.set_xticks(at, text)
    axes.set_xlabel({"block": "Block", "relative depth": "Relative depth"}.get(axis.title, axis.title))
    axes.set_ylabel(plain(panel.entry.title))
    if wants_log(panel.values):
        axes.set_yscale("log")
        few_powers(axes.yaxis)
    elif panel.entry.bounds[0] == 0 and min(panel.values) < 0.4 * max(panel.values):
        axes.set_ylim(bottom=0)
    if len(panel.lines) > 1:
        columns = 2 if max(len(str(drawn.get_label())) for drawn in axes.get_lines()) <= 24 else 1
        spacing = {"handlelength": 2.2, "labelspacing": 0.25, "columnspacing": 1.2, "borderaxespad": 0.1}
        figure.legend(loc="outside upper left", frameon=False, ncols=columns, **spacing)
        figure.set_figheight(2.1 + 0.14 * -(-len(panel.lines) // columns))
    return figure


def _draw(axes: Axes, line: Line, *, style: Style, axis: Axis) -> None:
    colour = style.color
    body, final = line.body, [p for p in line.final if p.value is not None]
    x = np.array([axis.place(p) for p in body], dtype=float)
    value, low, high = (np.array([_nan(getattr(p, f)) for p in body]) for f in ("value", "low", "high"))
    axes.fill_between(x, low, high, color=colour, alpha=0.09 if style.hollow else 0.17, linewidth=0)
    face = "white" if style.hollow else colour
    marks: dict[str, Any] = {"color": colour, "markerfacecolor": face, "markeredgewidth": 0.7}
    size = 2.2 if len(body) > 16 else 3.0
    symbol, dash = MARKERS[style.symbol], DASHES[style.dash]
    axes.plot(
        x, value, linestyle=dash, marker=symbol, markersize=size, linewidth=1.0, label=plain(style.label), **marks
    )
    lone = [*final, *([p for p in body if p.value is not None] if len(body) == 1 else [])]
    for point in lone:
        v, lo, hi = (_nan(getattr(point, f)) for f in ("value", "low", "high"))
        bars = None if np.isnan(lo + hi) else [[max(0.0, v - lo)], [max(0.0, hi - v)]]
        axes.errorbar(
            [axis.place(point)],
            [v],
            yerr=bars,
            fmt="D",
            markersize=3.4,
            elinewidth=0.8,
            capsize=1.8,
            capthick=0.8,
            **marks,
        )


def _nan(value: float | None) -> float:
    return np.nan if value is None else value


def spectrum(spectra: Mapping[str, np.ndarray]) -> Figure:
    """Share of variance by rank, one line per layer, darker with depth."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap, Normalize

    figure, axes = _figure(2.5)
    palette = Paper()
    deepest = max((parse_site(name)[2] for name in spectra), default=1) or 1
    for name, values in sorted(spectra.items(), key=lambda item: parse_site(item[0])[2]):
        _, _, layer, kind = parse_site(name)
        ranks, shares = thin_spectrum(values)
        final = kind == "final"
        colour = "black" if final else palette.sequence(layer / deepest)
        if ranks:
            axes.loglog(ranks, shares, color=colour, linewidth=0.9, linestyle="--" if final else "-", label=kind)
    axes.set_xlabel("Rank $k$")
    axes.set_ylabel(r"Share of variance $\lambda_k / \sum\lambda$")
    for axis in (axes.xaxis, axes.yaxis):
        few_powers(axis)
    colours = ListedColormap([palette.sequence(i / deepest) for i in range(deepest + 1)])
    norm: Normalize = BoundaryNorm(np.arange(deepest + 2) - 0.5, deepest + 1)
    bar = figure.colorbar(ScalarMappable(norm, colours), ax=axes, pad=0.02, aspect=28)
    bar.set_label("Block (0 = embedding)")
    bar.outline.set_visible(False)  # type: ignore[operator, unused-ignore]
    bar.ax.minorticks_off()
    bar.set_ticks(_few(deepest))
    handles = [h for h in axes.get_lines() if h.get_label() == "final"][:1]
    if handles:
        axes.legend(handles, ["final norm"], frameon=False, loc="lower left")
    return figure


def _few(deepest: int) -> list[int]:
    step = max(1, round(deepest / 6))
    return [*range(0, deepest - step // 2, step), deepest]


def heat_map(sheet: Sheet, subject: Subject, places: Mapping[Any, Mapping[str, Any]]) -> Figure:
    """Layers by metrics, each metric scaled to its own range, the value in its cell where there is room."""
    from matplotlib.colors import LinearSegmentedColormap

    metrics = [m for m in default_metrics(sheet) if any(m in cells for cells in places.values())]
    values = np.array([[_nan(c[m].value) if m in c else np.nan for c in places.values()] for m in metrics])
    names = [_column(cells) for cells in places.values()]
    figure, axes = _figure(0.55 + 0.19 * len(metrics), WIDTH if len(names) <= 9 else 7.0)
    colours = LinearSegmentedColormap.from_list("anisoscope", [blend(HEAT, t) for t in np.linspace(0, 1, 9)])
    axes.imshow(scaled(values), aspect="auto", cmap=colours, vmin=0, vmax=1, interpolation="nearest")
    axes.set_yticks(range(len(metrics)), [plain(sheet.catalogue.entry(m).title) for m in metrics])
    step = max(1, len(names) // 18)
    axes.set_xticks(range(0, len(names), step), names[::step])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    if len(names) <= 18:
        _write_cells(axes, values, size=5.0 if len(names) <= 9 else 5.4)
    axes.set_title(plain(subject.label), fontsize=8, loc="left")
    return figure


def _column(cells: Mapping[str, Any]) -> str:
    point = next(iter(cells.values()))
    return {"embed": "emb", "resid": str(point.layer), "stage": str(point.layer), "final": "fin"}.get(
        point.kind, site_name(point.layer, point.kind)
    )


def _write_cells(axes: Axes, values: np.ndarray, *, size: float) -> None:
    shade = scaled(values)
    for (i, j), value in np.ndenumerate(values):
        if np.isfinite(value):
            colour = "white" if shade[i, j] > 0.6 else "#222222"
            axes.text(j, i, number(float(value), 2), ha="center", va="center", fontsize=size, color=colour)


def scaled(values: np.ndarray) -> np.ndarray:
    """Each row to [0, 1] over its own finite range; a constant row to 0.5; what is missing stays missing.

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
