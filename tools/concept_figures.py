"""Draw the pictures of docs/concepts.md: small data made here, numbers computed by the package itself.

python tools/concept_figures.py docs
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import anisoscope
from drawing_style import Look, bare, draw_both
from gallery import CONTROLS, energies

Cloud = np.ndarray


def _arrows(axes: Axes, rows: Cloud, color: str, *, width: float = 0.006) -> None:
    zeros = np.zeros(len(rows))
    axes.quiver(zeros, zeros, rows[:, 0], rows[:, 1], color=color, angles="xy", scale_units="xy", scale=1, width=width)


def _window(axes: Axes, half: float, look: Look, *, height: float = 1.0) -> None:
    bare(axes)
    axes.axhline(0, color=look.grid, lw=0.8)
    axes.axvline(0, color=look.grid, lw=0.8)
    axes.set_xlim(-half, half)
    axes.set_ylim(-half * height, half * height)


def _under(axes: Axes, text: str, look: Look) -> None:
    axes.set_xlabel(text, color=look.faint, fontsize=9)


# -- anisotropy --------------------------------------------------------------------------------------------------------


@cache
def clouds() -> dict[str, Cloud]:
    """Rows in every direction, rows around a shared mean, rows along one direction."""
    random = np.random.default_rng(3)
    angle, length = np.arange(48) * 2 * np.pi / 48, random.uniform(1.2, 2.8, 48)
    plain = np.stack([length * np.cos(angle), length * np.sin(angle)], 1)
    return {
        "isotropic": plain,
        "a cone: a shared mean": plain * 0.42 + [2.0, 1.2],
        "one long direction": plain * [1.35, 0.16] @ np.array([[0.86, 0.5], [-0.5, 0.86]]),
    }


def draw_anisotropy(figure: Figure, look: Look) -> None:
    for axes, (name, rows), color in zip(figure.subplots(1, 3), clouds().items(), look.lines, strict=False):
        _window(axes, 3.9, look)
        _arrows(axes, rows, color)
        axes.set_title(name, loc="center")
        cosine = anisoscope.average_cosine(rows, interval=False).value
        ratio = anisoscope.svd_ratio(rows, interval=False).value
        _under(axes, f"average cosine {cosine:.2f}\nσ₁/Σσ, centred {ratio:.2f}", look)


def draw_drift(figure: Figure, look: Look) -> None:
    rows = clouds()["a cone: a shared mean"]
    left, right = figure.subplots(1, 2)
    for axes, shown, name in ((left, rows, "as they are"), (right, rows - rows.mean(0), "without their mean")):
        _window(axes, 3.9, look)
        _arrows(axes, shown, look.lines[0])
        axes.set_title(name, loc="center")
        _under(axes, f"average cosine {anisoscope.average_cosine(shown, interval=False).value:.2f}", look)
    mean = rows.mean(0)
    left.annotate("", mean, (0, 0), arrowprops={"arrowstyle": "-|>", "color": look.lines[1], "lw": 3})
    left.text(mean[0] + 0.2, mean[1] - 1.9, "drift: the mean row", color=look.lines[1], ha="center")


# -- intrinsic dimension -----------------------------------------------------------------------------------------------


@cache
def two_nn_of_spheres() -> tuple[list[int], list[float]]:
    """TwoNN of 4,096 rows on spheres of known dimension, inside 64 dimensions."""
    random = np.random.default_rng(0)
    dimensions = [1, 2, 4, 6, 8, 10, 12, 16, 20]
    found = []
    for m in dimensions:
        ball = random.normal(size=(4096, m + 1))
        rows = ball / np.linalg.norm(ball, axis=1, keepdims=True) @ np.linalg.qr(random.normal(size=(64, m + 1)))[0].T
        found.append(anisoscope.two_nn(rows, interval=False).value)
    return dimensions, found


def draw_dimension(figure: Figure, look: Look) -> None:
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.1])
    random = np.random.default_rng(5)
    turn = np.sqrt(np.linspace(1.5, 90, 60)) + random.uniform(-0.05, 0.05, 60)  # about even along the curve
    curve = np.stack([turn * np.cos(turn), turn * np.sin(turn)], 1)
    bare(left).plot(*curve.T, ".", color=look.lines[0], ms=5)
    at, gaps = _telling_point(curve)
    for neighbour, color in zip(np.argsort(gaps)[1:3], look.lines[1:], strict=False):
        left.add_patch(_circle(curve[at], gaps[neighbour], color))
    left.plot(*curve[at], "o", color=look.lines[1], ms=6)
    left.set_title("two coordinates, one dimension", loc="center")
    _under(left, "circles: first and second nearest neighbour, r₁ and r₂", look)
    true, found = two_nn_of_spheres()
    right.plot([0, 20], [0, 20], color=look.faint, ls=":", lw=1)
    right.plot(true, found, "o-", color=look.lines[0], ms=4)
    right.set_xlabel("true dimension of the sphere")
    right.set_ylabel("TwoNN")
    right.set_title("4,096 rows in 64 coordinates", loc="center")


def _telling_point(curve: Cloud) -> tuple[int, Cloud]:
    """A point in the middle whose second neighbour is about twice as far as its first, and its distances to all."""
    gaps = np.linalg.norm(curve[:, None] - curve[None], axis=2)
    near = np.sort(gaps, axis=1)
    at = 20 + int(np.abs(near[20:50, 2] / near[20:50, 1] - 1.9).argmin())
    return at, gaps[at]


def _circle(centre: Cloud, radius: float, color: str) -> object:
    from matplotlib.patches import Circle

    return Circle(tuple(centre), radius, fill=False, color=color, lw=1.5)


# -- tangent proxy -----------------------------------------------------------------------------------------------------


def draw_tangent(figure: Figure, look: Look) -> None:
    random = np.random.default_rng(1)
    turn = np.array([[0.94, 0.34], [-0.34, 0.94]])
    rows = random.normal(size=(160, 2)) * [1.6, 0.35] @ turn
    gradients = random.normal(size=(14, 2)) * [1.5, 0.55] @ turn
    direction = np.linalg.svd(rows - rows.mean(0))[2][0]
    direction = direction * np.sign(direction[0])
    left, right = figure.subplots(1, 2)
    for axes in (left, right):
        _window(axes, 4.2, look, height=0.6)
        axes.plot(*np.outer([-4, 4], direction).T, color=look.lines[1], lw=2)
    left.plot(*rows.T, ".", color=look.lines[0], ms=4)
    left.set_title("1. fit directions on activations", loc="center")
    _under(left, "line: the tangent proxy, here of rank r = 1\nin d = 2 coordinates", look)
    _arrows(right, gradients, look.lines[2], width=0.008)
    right.set_title("2. look where gradients go", loc="center")
    energy = float(((gradients @ direction) ** 2).sum() / (gradients**2).sum())
    _under(right, f"energy in the proxy {energy:.2f}, chance r/d = 0.50\nenrichment {energy / 0.5:.2f}", look)


def draw_controls(figure: Figure, look: Look) -> None:
    axes = figure.subplots()
    step = 64
    names = {**CONTROLS, "random": "random directions"}
    values = {name: energies(control)[step] for control, name in names.items()}
    for i, (name, value) in enumerate(values.items()):
        axes.barh(name, value, color=look.lines[0] if i == 0 else look.faint, height=0.6)
        words = f"{value:.3f}   {value / (16 / 512):.1f} × chance"
        axes.text(max(value, 0.031) + 0.012, i, words, va="center", fontsize=9)
    axes.axvline(16 / 512, color=look.lines[1], ls=":", lw=1.5)
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.set_xlim(0, 0.78)
    axes.set_xlabel("share of gradient energy; dotted: chance, r/d = 16/512")
    axes.set_title(f"Decoder, middle block, step {step}")


# -- intervals and verdicts --------------------------------------------------------------------------------------------


def alike_rows(random: np.random.Generator, contexts: int) -> tuple[Cloud, Cloud]:
    """Contexts of 16 rows that resemble each other, and the context of each row."""
    of = np.repeat(np.arange(contexts), 16)
    return random.normal(size=(len(of), 8)) + 2.0 * random.normal(size=(contexts, 8))[of], of


@cache
def repeated_intervals() -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Intervals of the mean norm over 30 draws of 32 contexts: as if rows were independent, and by contexts."""
    random, found = np.random.default_rng(2), []
    for _ in range(30):
        rows, of = alike_rows(random, 32)
        plain, honest = (anisoscope.mean_norm(rows, contexts=contexts) for contexts in (None, of))
        found.append(((plain.low, plain.high), (honest.low, honest.high)))
    return found


@cache
def true_norm() -> float:
    """The mean norm of so many contexts that it is known."""
    return float(np.linalg.norm(alike_rows(np.random.default_rng(9), 40_000)[0], axis=1).mean())


def draw_intervals(figure: Figure, look: Look) -> None:
    truth = true_norm()
    panels = figure.subplots(1, 2, sharex=True)
    for which, (axes, name) in enumerate(zip(panels, ("by rows", "by contexts"), strict=True)):
        hits = 0
        for i, both in enumerate(repeated_intervals()):
            low, high = both[which]
            hit = low <= truth <= high
            hits += hit
            axes.plot([low, high], [i, i], color=look.lines[0] if hit else look.lines[1], lw=2)
        axes.axvline(truth, color=look.faint, ls=":", lw=1)
        axes.set_yticks([])
        axes.grid(False)
        axes.set_title(f"{name}: {hits} of 30 contain the truth", loc="center")
        axes.set_xlabel("mean norm, 95 % intervals")


def draw_verdicts(figure: Figure, look: Look) -> None:
    axes = figure.subplots()
    cases = [
        (0.9, 0.25, "holds: the whole interval is beyond the margin"),
        (0.55, 0.3, "undecided: the margin is inside"),
        (0.2, 0.2, "fails: the whole interval is short of it"),
        (0.62, 0.06, "holds: a small effect, known well"),
    ]
    for i, (effect, half, name) in enumerate(cases):
        color = look.lines[{"h": 2, "u": 4, "f": 1}[name[0]]]
        axes.plot([effect - half, effect + half], [i, i], color=color, lw=3)
        axes.plot(effect, i, "o", color=color)
        axes.text(1.25, i, name, va="center")
    axes.axvline(0.5, color=look.ink, lw=1)
    axes.text(0.52, -0.75, "margin, declared beforehand", fontsize=9)
    axes.set_ylim(3.5, -1)
    axes.set_xlim(-0.1, 2.4)
    axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
    axes.set_yticks([])
    axes.grid(False)
    axes.set_xlabel("effect and its 95 % interval", loc="left")


PICTURES: dict[str, tuple[Callable[[Figure, Look], None], tuple[float, float]]] = {
    "anisotropy": (draw_anisotropy, (8.2, 3.3)),
    "drift": (draw_drift, (6.4, 3.5)),
    "dimension": (draw_dimension, (8.2, 3.5)),
    "tangent": (draw_tangent, (8.2, 3.2)),
    "controls": (draw_controls, (8.2, 2.7)),
    "intervals": (draw_intervals, (8.2, 3.3)),
    "verdicts": (draw_verdicts, (8.2, 2.4)),
}


if __name__ == "__main__":
    for name, (draw, size) in PICTURES.items():
        draw_both(draw, Path(sys.argv[1]) / "figures" / "concepts" / name, size)
