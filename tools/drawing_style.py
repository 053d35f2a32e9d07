"""How the pictures of the documentation look, in light and in dark: colours, sizes, and files that do not change
when they are drawn again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("svg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure


@dataclass(frozen=True)
class Look:
    """The colours of one theme; `lines` can be told apart with every kind of colour vision."""

    paper: str
    ink: str
    faint: str
    grid: str
    lines: tuple[str, ...]
    heat: str  # name of matplotlib's colour map


LIGHT = Look("#ffffff", "#24292f", "#6e7781", "#d8dee4",
             ("#0072b2", "#d55e00", "#009e73", "#aa4499", "#b8860b", "#555555"), "viridis")  # fmt: skip
DARK = Look("#131416", "#e6edf3", "#9aa4ae", "#32383f",
            ("#56b4e9", "#ff8c42", "#2fc99a", "#e08bd0", "#e6c229", "#b0b0b0"), "viridis")  # fmt: skip
Draw = Callable[[Figure, Look], None]


def draw_both(draw: Draw, path: Path, size: tuple[float, float]) -> list[Path]:
    """Draw a picture as PATH.svg (on white) and PATH-dark.svg; the same picture gives the same bytes."""
    return [
        _draw(draw, path.with_name(f"{path.name}{end}.svg"), size, look) for end, look in (("", LIGHT), ("-dark", DARK))
    ]


def _draw(draw: Draw, path: Path, size: tuple[float, float], look: Look) -> Path:
    with plt.rc_context(_settings(look)):
        figure = plt.figure(figsize=size, layout="constrained")
        draw(figure, look)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(figure)
    text = path.read_text(encoding="utf-8")
    path.write_text(re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE), encoding="utf-8")
    return path


def _settings(look: Look) -> dict[str, object]:
    plain = {f"{side}.color": look.faint for side in ("xtick", "ytick")}
    return plain | {
        "svg.hashsalt": "anisoscope", "svg.fonttype": "path", "font.family": "DejaVu Sans", "font.size": 10,
        "figure.facecolor": look.paper, "savefig.facecolor": look.paper, "axes.facecolor": look.paper,
        "text.color": look.ink, "axes.labelcolor": look.ink, "axes.edgecolor": look.faint, "axes.titlecolor": look.ink,
        "axes.titlesize": 11, "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False,
        "axes.grid": True, "axes.axisbelow": True, "grid.color": look.grid, "grid.linewidth": 0.6,
        "xtick.labelcolor": look.ink, "ytick.labelcolor": look.ink, "legend.frameon": False, "legend.fontsize": 9,
        "axes.prop_cycle": matplotlib.cycler(color=look.lines), "lines.linewidth": 1.8, "path.simplify": True,
    }  # fmt: skip


def step_axis(axes: Axes, steps: Iterable[int]) -> None:
    """A logarithmic axis of training steps on which step 0 has a place."""
    last = max(steps)
    axes.set_xscale("symlog", linthresh=1, linscale=0.5)
    ticks = [0, 1, *(t for t in (8, 64, 512, 4096) if t < last * 0.4), last]
    axes.set_xticks(ticks, [f"{t:,}" for t in ticks])
    axes.minorticks_off()
    axes.set_xlim(-0.15, last * 1.15)
    axes.set_xlabel("training step (logarithmic, with 0)")


def label_ends(axes: Axes, ends: Iterable[tuple[float, float, str, str]], *, apart: float = 11.5) -> None:
    """Name lines (x, y, text, colour) at their last points, pushed apart; call it when limits and scales are set."""
    axes.figure.draw_without_rendering()
    points = 72 / axes.figure.dpi
    placed = sorted((axes.transData.transform((x, y))[1] * points, x, y, text, color) for x, y, text, color in ends)
    heights = [height for height, *_ in placed]
    wanted = np.array(heights)
    for _ in range(200):  # push neighbours apart until none overlap
        for i in range(len(wanted) - 1):
            short = apart - (wanted[i + 1] - wanted[i])
            if short > 0.01:
                wanted[i] -= short / 2
                wanted[i + 1] += short / 2
    for (height, x, y, text, color), at in zip(placed, wanted, strict=True):
        axes.annotate(text, (x, y), xytext=(7, at - height), textcoords="offset points", color=color, fontsize=9,
                      va="center", annotation_clip=False)  # fmt: skip


def bare(axes: Axes) -> Axes:
    """An axis without frame, ticks and grid, for a sketch."""
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.grid(False)
    axes.set_aspect("equal")
    return axes
