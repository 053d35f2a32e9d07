"""Vector figures of a training run for papers: energy with its control band, maps of enrichment, frequency strata."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from anisoscope.view.figures import DASHES, RULES, WIDTH, _free, _save, plain, slug
from anisoscope.view.palette import HEAT, Paper, blend
from anisoscope.view.training import History, Learner, Line, Mark, Site, known
from anisoscope.view.training_traces import Time, strided
from anisoscope.view.training_words import PROXIES, step_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 4  # panels side by side
WIDE = 7.0  # inches: two columns
BANDS = {"normal": 2, "random": 6}


def write_training_figures(folder: Path, history: History) -> list[Path]:
    """A PDF and an SVG of each figure that the table has the rows for."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    with matplotlib.rc_context(RULES):  # type: ignore[arg-type, unused-ignore]
        learners = _with_energy(history)
        if learners and len(history.steps()) > 1:
            written += _save(energy_figure(history, learners), folder / "energy-over-training")
            for learner in learners[:MOST]:
                written += _map_files(folder, history, learner, written)
        strata = [one for one in learners if _bins(history, one)]
        if strata:
            written += _save(strata_figure(history, strata), folder / "frequency-strata")
    return written


def _map_files(folder: Path, history: History, learner: Learner, written: list[Path]) -> list[Path]:
    if not _mapped(history, learner):
        return []
    stem = "enrichment-map" if len(history.learners) == 1 else slug(f"enrichment-map-{learner.label}")
    return _save(map_figure(history, learner), _free(folder / stem, written))


def _mapped(history: History, learner: Learner) -> list[Site]:
    """Sites whose enrichment was measured."""
    sites = history.sites(["gradient_enrichment"])
    return [site for site in sites if known(history.tangent(learner, "gradient_enrichment", site))]


def _with_energy(history: History) -> list[Learner]:
    """Learners whose gradients were measured, the first of each model before its other seeds."""
    measured = {key[0] for key in history.keys(["gradient_energy"])}
    found = [one for one in history.learners if one.index in measured]
    seen: set[str] = set()
    firsts = [one for one in found if one.model not in seen and not seen.add(one.model)]  # type: ignore[func-returns-value]
    return [*firsts, *(one for one in found if one not in firsts)]


def _panels(count: int, height: float) -> tuple[Figure, list[Axes]]:
    """So many panels side by side, sharing their value axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH if count == 1 else WIDE, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.02, h_pad=0.02)  # type: ignore[union-attr, call-arg, unused-ignore]
    axes = figure.subplots(1, count, sharey=True, squeeze=False)
    return figure, list(axes[0])


def _places(history: History, learner: Learner, metric: str) -> list[Site]:
    """A few sites that stand for all: the embedding, the middle and the last block."""
    sites = [s for s in history.sites([metric], ("embed", "resid")) if history.tangent(learner, metric, s)]
    if len(sites) <= 3:
        return sites
    return [sites[0], sites[history.middle(sites)], sites[-1]]


def energy_figure(history: History, learners: Sequence[Learner]) -> Figure:
    """Energy over training at a few layers, above the bands of the normal and random controls, a panel per model."""
    shown = list(learners)[:MOST]
    figure, panels = _panels(len(shown), 2.4)
    time = Time.of(history.steps())
    for axes, learner in zip(panels, shown, strict=True):
        sites = _places(history, learner, "gradient_energy")
        for control, hue in BANDS.items() if sites else ():
            middle = sites[len(sites) // 2]
            band = history.tangent(learner, "gradient_energy", middle, control=control)
            _band(axes, band, time, colour=Paper().series(hue), label=f"{control} control")
        for site in sites:
            colour = Paper().sequence(site.layer / max(1, learner.blocks))
            _draw(axes, history.tangent(learner, "gradient_energy", site), time, colour=colour, label=site.name)
        pca = history.tangent(learner, "gradient_energy", sites[len(sites) // 2], proxy="pca") if sites else ()
        if history.proxy != "pca":
            name = f"PCA, {sites[len(sites) // 2].name}" if sites else ""
            _draw(axes, pca, time, colour="#222222", label=name, dash="dash", marker="")
        _chance(axes, history.chance(learner))
        _finish(axes, time, title=learner.label if len(shown) > 1 else "")
    proxy = PROXIES.get(history.proxy, history.proxy)
    panels[0].set_ylabel(plain(f"Gradient energy in the {proxy} span"))
    panels[0].set_ylim(bottom=0)
    return _with_legend(figure, panels)


def _draw(
    axes: Axes, line: Line, time: Time, *, colour: str, label: str, dash: str = "solid", marker: str = "o"
) -> None:
    """A line with its interval; hollow where the proxy was fitted on that step."""
    marks = known(line)
    if not marks:
        return
    x, value, low, high = _columns(marks, time)
    if marker:
        axes.fill_between(x, low, high, color=colour, alpha=0.17, linewidth=0)
    style: Any = DASHES[dash]
    axes.plot(x, value, linestyle=style, color=colour, linewidth=1.0, marker=marker, markersize=2.4, label=plain(label))


def _band(axes: Axes, line: Line, time: Time, *, colour: str, label: str) -> None:
    marks = [mark for mark in known(line) if mark.interval]
    if marks:
        x, _, low, high = _columns(marks, time)
        axes.fill_between(x, low, high, color=colour, alpha=0.3, linewidth=0, label=plain(label))


def _columns(marks: Sequence[Mark], time: Time) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    x = np.array([time.place(mark.step) for mark in marks])
    value, low, high = (
        np.array([np.nan if (v := getattr(mark, name)) is None else v for mark in marks], dtype=float)
        for name in ("value", "low", "high")
    )
    return x, value, low, high


def _chance(axes: Axes, level: float | None) -> None:
    if level is not None:
        axes.axhline(level, color="#555555", linewidth=0.7, linestyle=":", label="chance")


def _finish(axes: Axes, time: Time, *, title: str) -> None:
    at, text = time.ticks()
    axes.set_xticks(at, text)
    axes.set_xlabel("Step")
    if title:
        axes.set_title(plain(title), fontsize=8, loc="left")


def _with_legend(figure: Figure, panels: Sequence[Axes]) -> Figure:
    """One legend over all panels, each name once."""
    named: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    if named:
        columns = 4 if len(panels) > 1 else 2
        spacing = {"handlelength": 2.0, "labelspacing": 0.25, "columnspacing": 1.2, "borderaxespad": 0.1}
        figure.legend(named.values(), named.keys(), loc="outside upper left", frameon=False, ncols=columns, **spacing)
        figure.set_figheight(2.1 + 0.15 * -(-len(named) // columns))
    return figure


def map_figure(history: History, learner: Learner) -> Figure:
    """Enrichment at every layer and step."""
    from matplotlib.colors import LinearSegmentedColormap

    sites = _mapped(history, learner)
    lines = [{m.step: m.value for m in history.tangent(learner, "gradient_enrichment", site)} for site in sites]
    steps = sorted({step for line in lines for step in line})
    values = np.array([[np.nan if (v := line.get(s)) is None else v for s in steps] for line in lines], dtype=float)
    figure, panels = _panels(1, 0.7 + 0.14 * max(4, len(sites)))
    axes = panels[0]
    colours = LinearSegmentedColormap.from_list("anisoscope", [blend(HEAT, t) for t in np.linspace(0, 1, 9)])
    shown = axes.imshow(
        values.reshape(len(sites), len(steps)), aspect="auto", cmap=colours, interpolation="nearest", origin="lower"
    )
    across, down = strided(len(steps), 8), strided(len(sites), 10)
    axes.set_xticks(across, [step_words(steps[i]) for i in across])
    axes.set_yticks(down, [plain(sites[i].short) for i in down])
    axes.set_xlabel("Step")
    axes.set_ylabel("Block")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(shown, ax=axes, pad=0.02, aspect=22)
    bar.set_label("Enrichment")
    bar.outline.set_visible(False)  # type: ignore[operator, unused-ignore]
    axes.set_title(plain(learner.label), fontsize=8, loc="left")
    return figure


def _bins(history: History, learner: Learner) -> list[str]:
    keys = history.keys(["gradient_enrichment"])
    found = {key[3] for key in keys if key[0] == learner.index and key[3].startswith("frequency:")}
    return sorted(found, key=lambda group: (len(group), group))


def strata_figure(history: History, learners: Sequence[Learner]) -> Figure:
    """Enrichment by frequency bin in the middle of the model, over training, a panel per model."""
    shown = list(learners)[:MOST]
    figure, panels = _panels(len(shown), 2.3)
    time = Time.of(history.steps())
    for axes, learner in zip(panels, shown, strict=True):
        sites = history.sites(["gradient_enrichment"])
        site, bins = sites[history.middle(sites)], _bins(history, learner)
        for i, group in enumerate(bins):
            line = history.tangent(learner, "gradient_enrichment", site, group=group)
            name = {0: "most frequent bin", len(bins) - 1: "rarest bin"}.get(i, f"bin {group.partition(':')[2]}")
            _draw(axes, line, time, colour=Paper().sequence(i / max(1, len(bins) - 1)), label=name)
        _chance(axes, 1.0)
        _finish(axes, time, title=f"{learner.label}, {site.name}" if len(shown) > 1 else site.name)
    panels[0].set_ylabel("Enrichment")
    panels[0].set_ylim(bottom=0)
    return _with_legend(figure, panels)
