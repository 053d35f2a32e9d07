"""Figures of the study of sharpness: loss, anisotropy, drift and sharpness of every arm, and two of them together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from anisoscope.view.drawn import INK, RULE
from anisoscope.view.palette import LIGHT
from anisoscope.view.performance_figures import _canvas, _draw, _key, _legend, _step_name, _step_places, _titled
from anisoscope.view.performance_results import Mark
from anisoscope.view.sharpness_results import ARMS, RELATIVE, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HUES = dict(zip(ARMS, (LIGHT[6], LIGHT[0], LIGHT[2], LIGHT[1], LIGHT[3]), strict=True))
MARKS = dict(zip(ARMS, ("o", "s", "D", "^", "v"), strict=True))


def _looks(results: Results) -> dict[str, dict[str, Any]]:
    return {arm: {"color": HUES[arm], "marker": MARKS[arm]} for arm in results.arms}


def _keys(results: Results) -> list[Any]:
    return [_key(ARMS[arm], markersize=3.4, linewidth=1.0, **look) for arm, look in _looks(results).items()]


def _over_training(axes: Axes, results: Results, mark: Callable[[str, int], Mark]) -> None:
    """A line for each arm over the measured steps, evenly spaced; the arms a little apart, so that whiskers show."""
    places = _step_places(results.steps)
    for i, (arm, look) in enumerate(_looks(results).items()):
        shifted = [place + 0.07 * (i - 2) for place in places]
        _draw(axes, shifted, [mark(arm, step) for step in results.steps], **look)
    axes.set_xticks(places, [_step_name(step) for step in results.steps], rotation=60 if len(places) > 8 else 0)
    axes.set_xlabel("Step")


def _metric_over_training(axes: Axes, results: Results, kind: str, metric: str) -> None:
    _over_training(axes, results, lambda arm, step: results.mark(arm, step, kind, metric))


def _over_depth(axes: Axes, results: Results, step: int) -> None:
    for i, (arm, look) in enumerate(_looks(results).items()):
        places = [block + 0.04 * (i - 2) for block in results.blocks]
        marks = [results.mark(arm, step, "resid", "average_cosine", block) for block in results.blocks]
        _draw(axes, places, marks, **look)
    axes.set_xticks(results.blocks)
    axes.set_xlabel("Block")


def losses(results: Results) -> Figure:
    """Held-out loss over training, and at the end minus that of ordinary attention, seed by seed."""
    figure, panels = _canvas(2, 2, height=2.2)
    _over_training(panels[0], results, results.loss_mark)
    panels[0].set_ylabel("Loss (nats per token)")
    last = results.steps[-1]
    others = [arm for arm in results.arms if arm != "softmax"]
    for place, arm in enumerate(others):
        gaps = [results.loss(arm, seed, last) - results.loss("softmax", seed, last) for seed in results.seeds]
        panels[1].plot([place - 0.12] * len(gaps), gaps, "o", color=HUES[arm], markersize=2.6, alpha=0.6)
        _draw(panels[1], [place + 0.08], [results.loss_difference(arm, last)], color=HUES[arm], marker=MARKS[arm])
    panels[1].set_visible(bool(others))
    panels[1].axhline(0.0, color=INK, linewidth=0.7, linestyle=(0, (4, 2)), zorder=0)
    panels[1].set_xticks(range(len(others)), others)
    panels[1].set_xlim(-0.5, max(1, len(others)) - 0.5)
    _titled(panels, ["Loss of held-out text", f"Difference to softmax at step {last}"])
    _legend(figure, _keys(results), columns=5)
    return figure


def anisotropy(results: Results) -> Figure:
    """Average cosine of the blocks over training, and over depth where it is highest and at the end."""
    figure, panels = _canvas(3, 3, height=2.1)
    _metric_over_training(panels[0], results, "resid", "average_cosine")
    panels[0].set_ylabel("Average cosine")
    height, last = results.height or results.steps[-1], results.steps[-1]
    for axes, step in zip(panels[1:], (height, last), strict=True):
        _over_depth(axes, results, step)
    low = min(0.0, *(axes.get_ylim()[0] for axes in panels))
    for axes in panels:
        axes.set_ylim(low, 1.0)
    _titled(panels, ["Mean over blocks", f"Over depth at step {height}", f"Over depth at step {last}"])
    _legend(figure, _keys(results), columns=5)
    return figure


def drift(results: Results) -> Figure:
    """How far queries and keys drift, how narrow their cones are, and whether their means point the same way."""
    shown = [
        ("query", RELATIVE, "Relative drift of queries"),
        ("key", RELATIVE, "Relative drift of keys"),
        ("query", "qk_cosine", "Cosine of the means"),
        ("query", "average_cosine", "Average cosine of queries"),
        ("key", "average_cosine", "Average cosine of keys"),
        ("query", "mean_norm", "Mean norm of queries"),
    ]
    return _small_multiples(results, shown, columns=3)


def sharpness(results: Results) -> Figure:
    """How sharp attention is, and the scores behind it."""
    shown = [
        ("scores", "attention_sharpness", "Sharpness"),
        ("scores", "attention_entropy", "Entropy / log m"),
        ("scores", "score_spread", "Spread of scores"),
        ("scores", "first_key_mass", "Mass on the first key"),
    ]
    return _small_multiples(results, shown, columns=2)


def _small_multiples(results: Results, shown: Sequence[tuple[str, str, str]], *, columns: int) -> Figure:
    figure, panels = _canvas(len(shown), columns)
    for axes, (kind, metric, _) in zip(panels, shown, strict=True):
        _metric_over_training(axes, results, kind, metric)
    _titled(panels, [words for _, _, words in shown])
    _legend(figure, _keys(results), columns=5)
    return figure


def together(results: Results) -> Figure:
    """A mark for each block of each seed at the last step: sharpness and the stream's anisotropy against drift."""
    figure, panels = _canvas(2, 2, height=2.3)
    last = results.steps[-1]
    for axes, (kind, metric, words) in zip(panels, _AGAINST, strict=True):
        for arm, look in _looks(results).items():
            points = [
                (_mean_drift(results, arm, seed, last, block), results.at(arm, seed, last, kind, metric, block))
                for seed in results.seeds
                for block in results.blocks
            ]
            axes.plot(*zip(*points, strict=True), linestyle="none", markersize=3.6, alpha=0.85, **look)
        axes.set_xlabel("Relative drift of queries and keys (mean)")
        axes.set_ylabel(words)
        axes.grid(visible=True, color=RULE, linewidth=0.4)
        axes.set_axisbelow(True)
    _titled(panels, ["Sharpness against drift", "Anisotropy against drift"])
    shape = [_key(ARMS[arm], linestyle="none", markersize=4, **look) for arm, look in _looks(results).items()]
    _legend(figure, shape, columns=5)
    return figure


_AGAINST = (
    ("scores", "attention_sharpness", "Attention sharpness"),
    ("resid", "average_cosine", "Average cosine after the block"),
)


def _mean_drift(results: Results, arm: str, seed: int, step: int, block: int) -> float:
    both = [results.at(arm, seed, step, kind, RELATIVE, block) for kind in ("query", "key")]
    return sum(both) / 2


FIGURES: dict[str, Callable[[Results], Figure]] = {
    "loss": losses,
    "anisotropy": anisotropy,
    "drift": drift,
    "sharpness": sharpness,
    "together": together,
}


def figures_of(results: Results) -> dict[str, Callable[[Results], Figure]]:
    """Those that these arms have numbers for."""
    without = set() if _measured(results, "probe_loss") else {"loss"}
    without |= set() if _measured(results, "attention_sharpness") else {"sharpness", "together"}
    return {name: draw for name, draw in FIGURES.items() if name not in without}


def _measured(results: Results, metric: str) -> bool:
    return any(key[-1] == metric and math.isfinite(value) for key, value in results.rows.items())
