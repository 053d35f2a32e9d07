"""Vector figures of modalities and drift: profiles by modality, a scatter plot for each model, the pool of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from anisoscope.view.drift_scatter import DRIFT, IDENTITY, aside_of
from anisoscope.view.drift_table import mean_words, units_of
from anisoscope.view.figures import DASHES, RULES, WIDTH, _save, few_powers, plain
from anisoscope.view.modalities import (
    Comparison,
    common_state,
    counted,
    dashes_of,
    hue_of,
    interval_words,
    over_seeds,
    owner_of,
    state_of,
)
from anisoscope.view.palette import Paper
from anisoscope.view.seeds import Bundle, bundles_of, in_front
from anisoscope.view.shape_figures import _grid
from anisoscope.view.traces import wants_log
from anisoscope.view.words import finite

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 12  # panels of a figure
MARKS: dict[str, dict[str, Any]] = {
    "holds": {"marker": "o", "markersize": 2.6},
    "undecided": {"marker": "o", "markersize": 3.2, "markerfacecolor": "white"},
    "fails": {"marker": "D", "markersize": 3.6, "markerfacecolor": "white"},
}


def write_modality_figures(folder: Path, found: Comparison) -> list[Path]:
    """A PDF and an SVG of each figure that the table has the rows for."""
    import matplotlib

    drawn = {}
    with matplotlib.rc_context(RULES):  # type: ignore[arg-type, unused-ignore]
        if len(found.modalities) > 1:
            drawn["modalities"] = modality_figure(found)
        if found.scattered:
            bundles, _ = in_front(bundles_of(found.scattered))
            drawn["drift-and-cosine"] = scatter_figure(bundles[:MOST])
            near = [bundle for bundle in bundles if bundle.values("near_identity")]
            drawn |= {"drift-near-identity": scatter_figure(near[:MOST], squared=True)} if near else {}
        if len(units_of(found)) > 1:
            drawn["drift-and-cosine-pooled"] = pooled_figure(found)
        folder.mkdir(parents=True, exist_ok=True)
        return [path for name, figure in drawn.items() for path in _save(figure, folder / name)]


def modality_figure(found: Comparison) -> Figure:
    """Average cosine over relative depth; colours are modalities, hollow diamonds are not explained by drift.

    Lines are means over seeds; untrained weights are pale and share one entry of the legend.
    """
    from matplotlib.figure import Figure

    bundles = bundles_of(found.rows)
    front, behind = in_front(bundles)
    dashes = dashes_of(bundles)
    figure = Figure(figsize=(WIDTH * 1.5, 2.6 + 0.13 * -(-(len(front) + bool(behind)) // 2)), layout="constrained")
    axes = figure.subplots()
    told = {owner_of(record): record for record in found.records}
    for bundle in [*behind, *front]:
        pale = bundle in behind
        points = over_seeds([counted(told[owner_of(row)]) for row in bundle.members])
        x, y = ([p[name] for p in points] for name in ("depth", "cosine"))
        style: Any = DASHES[dashes[owner_of(bundle.first)]]
        label = None if pale else plain(f"{bundle.label} ({bundle.modality})")
        looks: dict[str, Any] = {"linewidth": 0.6, "alpha": 0.35} if pale else MARKS[common_state(bundle, state_of)]
        colour = Paper().series(hue_of(bundle.modality))
        axes.plot(x, y, color=colour, linestyle=style, label=label, **{"linewidth": 1.0} | looks)
    if behind:
        axes.plot([], [], color="#888888", linewidth=0.6, alpha=0.6, label=f"untrained weights ({len(behind)}, pale)")
    axes.set_xlabel("Relative depth")
    axes.set_ylabel("Average cosine")
    spacing = {"handlelength": 2.4, "labelspacing": 0.25, "columnspacing": 1.2, "borderaxespad": 0.1}
    figure.legend(loc="outside upper left", frameon=False, ncols=2, **spacing)
    return figure


def scatter_figure(bundles: Sequence[Bundle], *, squared: bool = False) -> Figure:
    """Average cosine against drift (or the squared relative drift, a near-identity) over layers, a panel per stack."""
    figure, grid = _grid(len(bundles), 1.75)
    for axes, bundle in zip(grid.flat, bundles, strict=False):
        _scatter(axes, bundle, squared=squared)
        axes.set_title(plain(_title(bundle, squared=squared)), fontsize=7, loc="left")
    name = f"{IDENTITY}, near-identity" if squared else DRIFT
    figure.supxlabel(plain(name[:1].upper() + name[1:]), fontsize=8)
    figure.supylabel("Average cosine", fontsize=8)
    return figure


def _title(bundle: Bundle, *, squared: bool) -> str:
    record, name = bundle.first, ", ".join(part for part in (bundle.label, bundle.seeds) if part)
    if squared:
        return f"{name}\nPearson {interval_words(bundle.mean('near_identity'), None, None)}"
    if bundle.seeds:
        ends = [mean_words(bundle, n) for n in ("pearson", "spearman")]
    else:
        ends = [interval_words(record[n], record[f"{n}_low"], record[f"{n}_high"]) for n in ("pearson", "spearman")]
    return f"{name}\nr {ends[0]}, ρ {ends[1]}"


def _scatter(axes: Axes, bundle: Bundle, *, squared: bool) -> None:
    name, power = ("relative_drift", 2) if squared else ("drift", 1)
    every: list[float] = []
    for record in bundle.members:
        points = [p for p in counted(record) if finite(p[name]) is not None]
        x, y = [p[name] ** power for p in points], [p["cosine"] for p in points]
        every += x
        axes.plot(x, y, color="#bbbbbb", linewidth=0.7, zorder=1)
        axes.scatter(x, y, s=11, color=[Paper().sequence(p["depth"]) for p in points], zorder=2)
    if wants_log(every):
        axes.set_xscale("log")
        few_powers(axes.xaxis, 4)
    else:
        axes.locator_params(axis="x", nbins=4)


def pooled_figure(found: Comparison) -> Figure:
    """Ranks within each trained stack, all stacks in one panel, coloured by modality."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 3.0), layout="constrained")
    axes = figure.subplots()
    seen: set[str] = set()
    units = units_of(found)
    for i, (record, unit) in enumerate(units):
        name = record["modality"]
        label: dict[str, Any] = {} if name in seen else {"label": plain(name)}
        seen.add(name)
        colour = Paper().series(hue_of(name))
        x = np.asarray(unit.one) + 0.5 + aside_of(i, len(units))
        axes.scatter(x, np.asarray(unit.two) + 0.5, s=9, color=colour, alpha=0.75, **label)
    whole = found.pooled[0]
    axes.set_title(f"ρ {interval_words(whole['spearman'], whole['low'], whole['high'])}", fontsize=8, loc="left")
    axes.set(
        xlim=(-0.06, 1.06), ylim=(-0.03, 1.03), xlabel="Rank of drift within its model", ylabel="Rank of average cosine"
    )
    figure.legend(loc="outside upper left", frameon=False, ncols=3, handletextpad=0.1, borderaxespad=0.1)
    return figure
