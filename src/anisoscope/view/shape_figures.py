"""Vector figures of the shape of learning: profiles at a few steps, maps, dimension with the loss, the ablation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from anisoscope.view.catalogue import Catalogue
from anisoscope.view.figures import DASHES, RULES, WIDTH, _free, _save, plain, slug
from anisoscope.view.palette import HEAT, Paper, blend
from anisoscope.view.shape_ablation import ARM_WORDS, EFFECTS, Effect, ablation_measures, designs, effects_of
from anisoscope.view.shape_arms import Arm, ShapeMeasure, arm_line, arms_of, at_step, measures_of, sites_of
from anisoscope.view.shape_sections import ESTIMATORS
from anisoscope.view.training import History, Mark, Site, known
from anisoscope.view.training_course import logged
from anisoscope.view.training_traces import Time, strided, thinned
from anisoscope.view.training_words import few, step_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIRST = ("svd_ratio", "average_cosine", "two_nn", "attention_sharpness")
MOST = 3  # measures that have figures of their own
WIDE = 7.0  # inches: two columns
PANELS, ACROSS = 6, 3
STEPS = 5  # of a figure of profiles


def write_shape_figures(
    folder: Path, history: History, catalogue: Catalogue, verdicts: Sequence[Mapping[str, Any]] = ()
) -> list[Path]:
    """A PDF and an SVG of each figure that the table has the rows for."""
    import matplotlib

    arms, measures = arms_of(history)[:PANELS], measures_of(history, catalogue)
    if len(history.steps()) < 2 or not measures:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    with matplotlib.rc_context(RULES):  # type: ignore[arg-type, unused-ignore]
        for measure in _main(measures):
            mine = [arm for arm in arms if _sites(history, arm, measure)]
            for stem, draw in (("profiles", profile_figure), ("steps-by-layers", map_figure)):
                name = folder / slug(f"{stem}-{measure.metric}")
                written += _save(draw(history, mine, measure), _free(name, written)) if mine else []
        estimators = [m for m in measures if any((m.metric, m.variant) == e[:2] for e in ESTIMATORS)]
        mine = [arm for arm in arms if any(_sites(history, arm, m) for m in estimators)]
        if mine and any(m.family == "stream" for m in estimators):
            written += _save(dimension_figure(history, mine, estimators), folder / "dimension-over-training")
        written += _ablation_files(folder, history, catalogue, verdicts)
    return written


def _main(measures: Sequence[ShapeMeasure]) -> list[ShapeMeasure]:
    plain_ones = {m.metric: m for m in reversed(measures) if not m.variant}
    if "svd_ratio" in plain_ones:
        plain_ones.pop("average_cosine", None)
    return [plain_ones[name] for name in FIRST if name in plain_ones][:MOST]


def _sites(history: History, arm: Arm, measure: ShapeMeasure) -> list[Site]:
    return [s for s in sites_of(history, measure, [arm]) if known(arm_line(history, arm, measure, s))]


def _grid(count: int, height: float, *, rows: int = 1, **more: Any) -> tuple[Figure, np.ndarray]:
    """Panels side by side, at most three; `rows` axes for each."""
    from matplotlib.figure import Figure

    across = min(count, ACROSS)
    down = -(-count // across) * rows
    figure = Figure(figsize=(WIDTH if across == 1 else WIDE, height * down / rows + 0.25), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.02, h_pad=0.02)  # type: ignore[union-attr, call-arg, unused-ignore]
    axes = figure.subplots(down, across, squeeze=False, **more)
    if rows == 1:
        for empty in list(axes.flat)[count:]:
            empty.set_visible(False)
    return figure, axes


def _legend(figure: Figure, panels: Sequence[Axes], columns: int = 5) -> Figure:
    """One legend over all panels, each name once."""
    named: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    if named:
        columns = columns if len(panels) > 1 else 2
        spacing = {"handlelength": 2.0, "labelspacing": 0.25, "columnspacing": 1.2, "borderaxespad": 0.1}
        figure.legend(named.values(), named.keys(), loc="outside upper left", frameon=False, ncols=columns, **spacing)
        figure.set_figheight(figure.get_figheight() + 0.15 * -(-len(named) // columns))
    return figure


def _columns(marks: Sequence[Mark]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    values = [[np.nan if (v := getattr(m, name)) is None else v for m in marks] for name in ("value", "low", "high")]
    return np.array(values[0], dtype=float), np.array(values[1], dtype=float), np.array(values[2], dtype=float)


def profile_figure(history: History, arms: Sequence[Arm], measure: ShapeMeasure) -> Figure:
    """A measure over depth at a few steps, darker with time, a panel for each arm."""
    figure, grid = _grid(len(arms), 2.0, sharey=True)
    steps = few(history.steps(), STEPS)
    for axes, arm in zip(grid.flat, arms, strict=False):
        sites = _sites(history, arm, measure)
        for i, step in enumerate(steps):
            colour = Paper().sequence(i / max(1, len(steps) - 1))
            _profile(axes, history, arm, measure, sites, step=step, colour=colour, label=f"step {step:,}")
        _depth(axes, sites, title=arm.label if len(arms) > 1 else "")
    for row in grid:
        row[0].set_ylabel(plain(measure.label))
    return _legend(figure, [axes for axes in grid.flat if axes.get_visible()])


def _profile(
    axes: Axes,
    history: History,
    arm: Arm,
    measure: ShapeMeasure,
    sites: Sequence[Site],
    *,
    step: int,
    colour: str,
    label: str,
) -> None:
    """One profile with its band; the final norm apart."""
    found = [(s, m) for s in sites if (m := at_step(arm_line(history, arm, measure, s), step))]
    body, final = [p for p in found if p[0].kind != "final"], [p for p in found if p[0].kind == "final"]
    if body:
        x = np.array([s.layer for s, _ in body], dtype=float)
        value, low, high = _columns([m for _, m in body])
        axes.fill_between(x, low, high, color=colour, alpha=0.17, linewidth=0)
        axes.plot(x, value, color=colour, linewidth=1.0, marker="o", markersize=2.2, label=plain(label))
    for site, mark in final:
        axes.plot([_final(site)], [mark.value or 0.0], color=colour, marker="D", markersize=2.8, linestyle="none")


def _final(site: Site) -> float:
    return site.layer + max(1.0, 0.12 * site.layer)


def _tick(site: Site) -> str:
    return {"embed": "emb", "final": "fin"}.get(site.kind, str(site.layer))


def _depth(axes: Axes, sites: Sequence[Site], *, title: str) -> None:
    blocks = max((s.layer for s in sites), default=1)
    at = [n for n in range(blocks + 1) if n % max(1, round(blocks / 6)) == 0]
    names = ["emb" if n == 0 else str(n) for n in at]
    final = [s for s in sites if s.kind == "final"]
    if final:
        at, names = [*at, _final(final[0])], [*names, "fin"]  # type: ignore[list-item]
    axes.set_xticks(at, names)
    axes.set_xlabel("Block")
    if title:
        axes.set_title(plain(title), fontsize=8, loc="left")


def map_figure(history: History, arms: Sequence[Arm], measure: ShapeMeasure) -> Figure:
    """A measure at every layer and step, a map for each arm, on one scale."""
    from matplotlib.colors import LinearSegmentedColormap

    maps = []
    for arm in arms:
        sites = _sites(history, arm, measure)
        lines = [{m.step: m.value for m in known(arm_line(history, arm, measure, site))} for site in sites]
        steps = sorted({step for line in lines for step in line})
        maps.append((sites, steps, np.array([[line.get(s, np.nan) for s in steps] for line in lines], dtype=float)))
    low, high = (f(float(f2(z)) for *_, z in maps) for f, f2 in ((min, np.nanmin), (max, np.nanmax)))
    colours = LinearSegmentedColormap.from_list("anisoscope", [blend(HEAT, t) for t in np.linspace(0, 1, 9)])
    figure, grid = _grid(len(arms), 0.7 + 0.12 * max(5, *(len(sites) for sites, *_ in maps)))
    shown = None
    for axes, arm, (sites, steps, z) in zip(grid.flat, arms, maps, strict=False):
        shown = axes.imshow(
            z, aspect="auto", cmap=colours, interpolation="nearest", origin="lower", vmin=low, vmax=high
        )
        across, down = strided(len(steps), 6 if len(arms) > 1 else 8), strided(len(sites), 10)
        axes.set_xticks(across, [step_words(steps[i]) for i in across])
        axes.set_yticks(down, [_tick(sites[i]) for i in down])
        axes.set_xlabel("Step")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(plain(arm.label), fontsize=8, loc="left")
    for row in grid:
        row[0].set_ylabel("Block")
    if shown is not None:
        bar = figure.colorbar(shown, ax=list(grid.flat), pad=0.02, aspect=24)
        bar.set_label(plain(measure.label))
        bar.outline.set_visible(False)  # type: ignore[operator, unused-ignore]
    return figure


def dimension_figure(history: History, arms: Sequence[Arm], estimators: Sequence[ShapeMeasure]) -> Figure:
    """Every estimator over training in the middle of the model, above the loss on the same axis."""
    arms = list(arms)[:ACROSS]
    with_loss = any(_loss(history, arm) for arm in arms)
    ratios = {"height_ratios": [2.2, 1.0]} if with_loss else {}
    figure, grid = _grid(len(arms), 3.0 if with_loss else 2.1, rows=2 if with_loss else 1, sharex=True, sharey="row",
                         gridspec_kw=ratios)  # fmt: skip
    logs = [m.step for arm in arms for line in _loss(history, arm) for m in line]
    time = Time.of([*history.steps(), *logs])
    at, text = time.ticks()
    by_name = {(m.metric, m.variant): m for m in estimators if m.family == "stream"}
    for i, arm in enumerate(arms):
        for metric, variant, name, hue, dash, width in ESTIMATORS:
            measure = by_name.get((metric, variant))
            sites = [s for s in _sites(history, arm, measure) if s.kind == "resid"] if measure else []
            if measure is None or not sites:
                continue
            site = sites[len(sites) // 2 - (len(sites) > 1 and len(sites) % 2 == 0)]
            marks = known(arm_line(history, arm, measure, site))
            x, value = np.array([time.place(m.step) for m in marks]), _columns(marks)[0]
            bars = np.array([0.0 if m.sd is None else m.sd for m in marks])
            look: dict[str, Any] = {"color": Paper().series(hue - 1), "linestyle": DASHES[dash], "linewidth": width / 2}
            look |= {"elinewidth": 0.5, "marker": "o", "markersize": 1.8, "label": plain(name)}
            grid[0][i].errorbar(x, value, yerr=bars, **look)
            grid[0][i].set_title(plain(f"{arm.label}, {site.name}"), fontsize=8, loc="left")
        for line in _loss(history, arm):
            shown = thinned(line, time, 200)
            grid[-1][i].plot(
                [time.place(m.step) for m in shown], [m.value for m in shown], color="#333333", linewidth=0.9
            )
        grid[-1][i].set_xticks(at, text)
        grid[-1][i].set_xlabel("Step")
    grid[0][0].set_ylabel("Intrinsic dimension")
    grid[0][0].set_ylim(bottom=0)
    if with_loss:
        grid[-1][0].set_ylabel("Loss")
    return _legend(figure, list(grid[0]), columns=4)


def _loss(history: History, arm: Arm) -> list[list[Mark]]:
    """The loss of each seed: on the probe where that was taken."""
    for name in ("probe_loss", "loss"):
        lines = [known(logged(history, one, name)) for one in arm.learners]
        if any(lines):
            return [line for line in lines if line]
    return []


def _ablation_files(
    folder: Path, history: History, catalogue: Catalogue, verdicts: Sequence[Mapping[str, Any]]
) -> list[Path]:
    arms = arms_of(history)
    sizes, measures = designs(arms), ablation_measures(history, catalogue)
    if not sizes or not measures:
        return []
    written = _save(ablation_figure(history, sizes, measures), folder / "ablation-profiles")
    effects = effects_of(history, arms, catalogue, verdicts)
    return written + (_save(effects_figure(effects, catalogue), folder / "ablation-effects") if effects else [])


def ablation_figure(
    history: History, sizes: Mapping[str, Sequence[Arm | None]], measures: Sequence[ShapeMeasure]
) -> Figure:
    """The arms over depth at their last step: a column for each size, a row for each measure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH if len(sizes) == 1 else WIDE, 1.5 * len(measures) + 0.4), layout="constrained")
    grid = figure.subplots(len(measures), len(sizes), squeeze=False, sharey="row")
    for row, measure in zip(grid, measures, strict=True):
        for axes, (size, three) in zip(row, sizes.items(), strict=True):
            for i, arm in enumerate(three):
                sites = _sites(history, arm, measure) if arm is not None else []
                if arm is None or not sites:
                    continue
                step = max(m.step for s in sites for m in known(arm_line(history, arm, measure, s)))
                label = list(ARM_WORDS.values())[i]
                _profile(axes, history, arm, measure, sites, step=step, colour=Paper().series(i), label=label)
                _depth(axes, sites, title=size.replace("x", " × ") if measure is measures[0] else "")
        row[0].set_ylabel(plain(measure.label), fontsize=7)
    return _legend(figure, list(grid.flat), columns=3)


def effects_figure(effects: Sequence[Effect], catalogue: Catalogue) -> Figure:
    """Mask and objective effects against zero, a panel for each metric, a colour for each size."""
    metrics, sizes = list(dict.fromkeys(e.metric for e in effects)), list(dict.fromkeys(e.size for e in effects))
    figure, grid = _grid(len(metrics), 0.95 + 0.1 * len(sizes))
    names = [words for words, *_ in reversed(EFFECTS.values())]
    for i, (axes, metric) in enumerate(zip(grid.flat, metrics, strict=False)):
        axes.axvline(0, color="#888888", linewidth=0.7)
        for effect in (e for e in effects if e.metric == metric):
            k = sizes.index(effect.size)
            y = names.index(EFFECTS[effect.name][0]) + 0.2 * ((len(sizes) - 1) / 2 - k)
            ends = None
            if effect.low is not None and effect.high is not None:
                ends = [[max(0.0, effect.value - effect.low)], [max(0.0, effect.high - effect.value)]]
            axes.errorbar([effect.value], [y], xerr=ends, fmt="o", color=Paper().series(k), markersize=3.4, capsize=2,
                          elinewidth=0.9, label=plain(effect.size.replace("x", " × ")))  # fmt: skip
        axes.set_yticks(range(len(names)), names if i % ACROSS == 0 else [""] * len(names))
        axes.set_ylim(-0.6, len(names) - 0.4)
        axes.set_title(plain(catalogue.entry(metric).title), fontsize=8, loc="left")
    return _legend(figure, [axes for axes in grid.flat if axes.get_visible()]) if len(sizes) > 1 else figure
