"""Figures as plain data, rendered by plotly on the page and by matplotlib as vector files.

A *figure* is one or several panels. On the page every panel is a separate plot, laid out by the style sheet; in a file
they are side by side. A *panel* has two axes and series of points, or a grid of cells. A *switch* is a row of select
boxes (or a slider); a panel may have a *view* for each combination of some choices, and values may be references into
arrays that the page contains once (`Ref`).

Colours are given as tokens for roles, which a theme maps to colours, so that light and dark both work.

    @s1 … @s8   colours of series        @seq:0.4   a place on the colour ramp of depth or time
    @ink, @soft, @rule, @paper, @accent  roles of the page       TOKEN/0.2   the same, transparent
The page resolves tokens from its style sheet, vector files and notebooks by `resolve`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from anisoscope.view.words import few, is_module, site_name, step_words

FINAL_GAP = 0.12  # distance of the final norm from the last block, as a share of the depth


@dataclass(frozen=True)
class Ref:
    """A reference to values of an array that the page contains once, scaled by a factor and shifted.

    An index is an integer, "*" for all, a list of integers, "#" for the index of the series (`Series.each`), "$a.1" for
    the choice in selection 1 of switch a, or "$a.1>name" for the entry of array `name` at that choice.
    """

    array: str
    at: tuple[Any, ...]
    times: float | Ref = 1.0
    plus: Any = None

    def resolve(self, arrays: Mapping[str, Any], chosen: Mapping[str, int], each: int = 0) -> np.ndarray:
        """The numbers it refers to; NaN for missing ones."""
        found, axis = np.asarray(arrays[self.array], dtype=float), 0
        for index in self.at:
            if isinstance(index, str) and index.startswith("$"):
                name, _, through = index[1:].partition(">")
                index = arrays[through][chosen.get(name, 0)] if through else chosen.get(name, 0)
            if index != "*":
                found = found.take(each if index == "#" else index, axis)
            axis += index == "*" or isinstance(index, list | tuple)
        factor = self.times.resolve(arrays, chosen, each) if isinstance(self.times, Ref) else np.asarray(self.times)
        factor = factor.reshape(factor.shape + (1,) * (found.ndim - factor.ndim))  # a factor for each row of numbers
        return found * factor + np.asarray(0.0 if self.plus is None else self.plus)


Values = Any  # numbers (None for missing ones), or a Ref to them


@dataclass(frozen=True)
class Series:
    """Points with one style: line, markers, and a band or whiskers from `low` to `high`."""

    label: str
    x: Values
    y: Values
    colour: str = "@s1"
    low: Values | None = None
    high: Values | None = None
    bars: str = ""  # "y" or "x": whiskers along that axis instead of a band
    reach: str = "interval"  # what low and high are, in the hover text
    band: float = 0.16  # opacity of the band
    dash: str = "solid"
    width: float = 1.6  # of the line; 0 = no line
    size: float = 0.0  # of the markers; 0 = no markers
    marker: str = "circle"
    hollow: bool | Sequence[bool] = False
    shade: Values | None = None  # positions on the colour ramp, one per point
    where: Values = ()  # name of each point in the hover text
    text: Values = ()  # the whole hover text, as markup
    facts: tuple[tuple[str, Values], ...] = ()  # further values of each point in the hover text
    owner: int | None = None  # index of the page's legend entry that shows and hides it
    quiet: bool = False  # no hover text and no legend entry
    named: bool = True  # whether it appears in a legend
    join: bool = False  # whether a line crosses missing points
    stairs: bool = False
    start: tuple[Sequence[float], Sequence[float]] | None = None  # starts of line segments that end at the points
    right: bool = False  # on the panel's right axis
    each: int = 0  # number of series of one style; "#" in a Ref, and lists of labels and colours, are indexed by them


@dataclass(frozen=True)
class Grid:
    """Cells of a heat map: rows of values; None for missing ones."""

    z: Values
    columns: Sequence[str]
    rows: Sequence[str]
    low: Values | None = None
    high: Values | None = None
    ends: tuple[float | None, float | None] = (None, None)
    label: str = ""  # of the colour scale
    reach: str = "interval"
    by_row: bool = False  # whether each row has its own scale; files then print the values into the cells


@dataclass(frozen=True)
class Axis:
    """One axis of a panel."""

    title: str = ""
    log: bool = False
    ticks: tuple[Sequence[float], Sequence[str]] | None = None
    bounds: tuple[float, float] | Ref | None = None
    from_zero: bool = False
    rules: bool = False  # whether grid lines are drawn at the ticks
    reverse: bool = False
    hidden: bool = False
    most: int = 6  # largest number of ticks


@dataclass(frozen=True)
class Level:
    """A straight line at a value, such as chance or zero; a band if it has an end."""

    value: float | Ref
    label: str = ""
    upright: bool = False
    until: float | None = None
    dash: str = "dot"
    colour: str = "@soft"


@dataclass(frozen=True)
class Note:
    """A text inside a panel, at axis coordinates or at a share of the panel's size."""

    text: str
    x: float
    y: float
    inside: bool = False  # whether x and y are shares of the panel's size
    colour: str = "@soft"


@dataclass(frozen=True)
class Panel:
    """Two axes with their contents; keys of `views` are the choices of the selections in `by`, joined by "|"."""

    x: Axis = Axis()
    y: Axis = Axis()
    series: tuple[Series, ...] = ()
    grid: Grid | None = None
    levels: tuple[Level, ...] = ()
    notes: tuple[Note, ...] = ()
    title: str = ""
    owner: str = ""  # the model, shown beside the title
    heading: str = ""  # inside the plot; "{a.0}" is replaced by the choice
    alt: str = ""
    caption: str = ""
    formula: str = ""
    height: int = 240  # pixels; 0 = square
    line: int | None = None  # index of the page's legend entry that shows and hides it
    least: int = 0  # minimum width on the page in pixels
    equal: bool = False  # whether both axes have the same scale
    legend: bool = False  # whether the panel has its own legend on the page
    right: Axis | None = None
    below: Panel | None = None  # a lower panel on the same x axis
    views: Mapping[str, Panel] = field(default_factory=dict)
    by: tuple[str, ...] = ()
    page_by: str = ""  # selection that hides the panel if it has no view for the choice

    def view(self, chosen: Mapping[str, int]) -> Panel:
        """The panel with the view for some choices."""
        if not self.views:
            return self
        key = "|".join(str(chosen.get(name, 0)) for name in self.by)
        return self.views.get(key) or next(iter(self.views.values()))


@dataclass(frozen=True)
class Figure:
    """Panels that belong together; `files` maps names of vector files to the choices drawn in them."""

    panels: tuple[Panel, ...]
    id: str = ""  # prefix of the ids of its plots on the page
    layout: str = "grid"  # grid | pairs | threes | single | narrow | wide | scroll
    arrays: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    each: bool = False  # one file per panel, named after its title
    most: int = 6  # largest number of panels in a file
    columns: int = 3
    size: float = 0.0  # height of a row of panels in a file in inches; 0 = automatic
    shared: bool = False  # whether panels of a file share the y axis
    shown: bool = True  # whether it is on the page


@dataclass(frozen=True)
class SwitchOption:
    """One option of a selection, and the text shown when it is chosen."""

    label: str
    says: str = ""


@dataclass(frozen=True)
class Choice:
    """One selection of a switch; a slider if its options are steps."""

    label: str
    options: tuple[SwitchOption, ...]
    default: int = 0
    slider: bool = False


@dataclass(frozen=True)
class Switch:
    """The selections above some figures; its values are named ID.0, ID.1, …"""

    id: str
    choices: tuple[Choice, ...]

    @property
    def says(self) -> str:
        """The texts of the initially chosen options."""
        return " ".join(c.options[c.default].says for c in self.choices if c.options and c.options[c.default].says)

    @property
    def defaults(self) -> dict[str, int]:
        return {f"{self.id}.{i}": choice.default for i, choice in enumerate(self.choices)}


def choice(label: str, options: Iterable[str], default: int = 0, *, slider: bool = False) -> Choice:
    return Choice(label, tuple(map(SwitchOption, options)), default, slider)


@dataclass(frozen=True)
class Time:
    """A logarithmic axis of steps with a separate place for step 0, the initialisation."""

    first: int  # the first step above 0
    last: int
    zero: bool

    @classmethod
    def of(cls, steps: Iterable[int]) -> Time:
        found = sorted(set(steps))
        later = [step for step in found if step > 0] or [1]
        return cls(later[0], later[-1], bool(found) and found[0] <= 0)

    @property
    def long(self) -> bool:
        """Whether there is more than one step."""
        return self.zero or self.last > self.first

    def place(self, step: int) -> float:
        """The x position of a step.

        >>> time = Time.of([0, 10, 1000])
        >>> time.place(1000), time.place(0) < time.place(10) - 0.2
        (3.0, True)
        """
        if step > 0:
            return round(math.log10(step), 4)
        reach = math.log10(self.last / self.first) or 1.0
        return round(math.log10(self.first) - max(0.3, 0.08 * reach), 4)

    def ticks(self) -> tuple[list[float], list[str]]:
        powers = [10**k for k in range(12) if self.first <= 10**k <= self.last]
        if len(powers) < 3:
            powers = [m * 10**k for k in range(12) for m in (1, 2, 5) if self.first <= m * 10**k <= self.last]
        powers = powers if len(powers) >= 2 else sorted({self.first, self.last})
        steps = [*([0] if self.zero else []), *few(powers, 7)]
        return [self.place(s) for s in steps], [step_words(s) for s in steps]

    @property
    def ends(self) -> tuple[float, float]:
        return self.place(0 if self.zero else self.first), self.place(self.last)

    def axis(self) -> Axis:
        low, high = self.ends
        pad = 0.05 * ((high - low) or 1.0)
        return Axis("step", ticks=self.ticks(), bounds=(round(low - pad, 4), round(high + pad, 4)))


@dataclass(frozen=True)
class Depth:
    """The x positions of sites: by layer for one depth, by relative depth if depths differ or models are compared."""

    blocks: int
    relative: bool = False
    final: bool = False
    named: tuple[tuple[float, str], ...] = ()  # positions that are not blocks: rows of a file, weight tables, modules
    first: int = 0  # the first layer on the axis

    @classmethod
    def of_sites(cls, blocks: int, sites: Iterable[Any]) -> Self:
        """The positions of some sites of one model, by their layers and kinds; modules have their names."""
        given = list(sites)
        named = {(float(site.layer), site.kind) for site in given if is_module(site.kind)}
        return cls(blocks, final=any(site.kind == "final" for site in given), named=tuple(sorted(named)))

    def place(self, layer: int, kind: str, blocks: int = 0, depth: float | None = None) -> float:
        if kind == "final":
            return 1 + FINAL_GAP if self.relative else self.blocks + max(1.0, FINAL_GAP * self.blocks)
        if self.relative:
            return layer / max(1, blocks or self.blocks) if depth is None or not math.isfinite(depth) else depth
        return float(layer)

    def ticks(self) -> tuple[list[float], list[str]]:
        """Marks on the axis, about eight, and what they say.

        >>> Depth(12).ticks()[1], len(Depth(2**31 - 1).ticks()[0])
        (['embed', '2', '4', '6', '8', '10', '12'], 9)
        """
        if self.relative:
            at, text = [0.0, 0.25, 0.5, 0.75, 1.0], ["embed", "¼", "½", "¾", "1"]
            at, text = (at, text) if self.blocks else ([0.0], ["rows"])
        elif self.named:
            at, text = [place for place, _ in self.named], [site_name(int(place), kind) for place, kind in self.named]
        else:
            steps = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 25 * math.ceil(self.blocks / 200))
            step = next(s for s in steps if self.blocks / s <= 8)
            layers = [n for n in range(step, self.blocks, step) if self.blocks - n >= step * 0.6]
            layers = [*([] if self.first else [0]), *layers, *([self.blocks] if self.blocks else [])]
            at, text = [float(n) for n in layers], [str(n) if n else "embed" for n in layers]
        if self.final:
            at.append(self.place(0, "final"))
            text.append("final")
        return at, text

    def axis(self) -> Axis:
        at, text = self.ticks()
        reach = (max(at) - min(at)) or 1.0
        title = "relative depth" if self.relative else "" if self.named else "block"
        return Axis(title, ticks=(at, text), bounds=(min(at) - 0.06 * reach, max(at) + 0.08 * reach))


def wants_log(values: Sequence[float]) -> bool:
    """Whether values span so many orders of magnitude (as massive activations do) that they need a logarithmic axis."""
    return len(values) > 1 and min(values) > 0 and max(values) / min(values) > 100


def value_axis(values: Iterable[float | None], title: str = "", *, log: bool = True) -> Axis:
    """An axis for these values: from zero if that is near, logarithmic if they span orders of magnitude."""
    known = [v for v in values if v is not None and math.isfinite(v)]
    if not known:
        return Axis(title, rules=True)
    if log and wants_log(known):
        return Axis(title, log=True, rules=True, most=4)
    low, high = min(known), max(known)
    reach = (high - low) or abs(high) or 1.0
    ends = (0.0, 1.06 * high) if 0 <= low < 0.4 * high else (low - 0.08 * reach, high + 0.08 * reach)
    return Axis(title, rules=True, bounds=(float(f"{ends[0]:.5g}"), float(f"{ends[1]:.5g}")))


def numbers_in(panels: Iterable[Panel]) -> list[float]:
    """All values and ends of bands in some panels, without references."""
    drawn = [series for panel in panels for series in panel.series]
    parts = [part for s in drawn for part in (s.y, *((s.low, s.high) if s.band or s.bars else ()))]
    written = [v for part in parts if isinstance(part, Sequence) for v in part]
    return [float(v) for v in written if v is not None and math.isfinite(v)]


def brief(value: float | None, digits: int = 5) -> float | None:
    """The value rounded to the precision of a plot; None if it is not finite."""
    return float(f"{value:.{digits}g}") if value is not None and math.isfinite(value) else None


def column(rows: Iterable[Any], name: str = "value", digits: int = 5) -> list[float | None]:
    """A field of rows, rounded to the precision of a plot; None for missing rows."""
    return [brief(getattr(row, name, None), digits) for row in rows]


def points(label: str, x: Values, rows: Sequence[Any], *, ends: Mapping[str, Any] | None = None, **look: Any) -> Series:
    """Rows as a series with intervals, if any row has one, styled by `ends`; None leaves a gap."""
    both = {name: column(rows, name) for name in ("low", "high")}
    interval = both | dict(ends or {}) if any(end is not None for end in both["low"]) else {}
    return Series(label, x, column(rows), **interval, **look)


# The hues of Okabe and Ito, darkened or lightened for contrast of thin lines on light and dark backgrounds.
LIGHT = ("#0b6aa8", "#c8500a", "#00805c", "#9c4a86", "#a37400", "#3b8fc4", "#6b6660", "#7a3b12")
SEQUENCE = ("#dd9a2b", "#c9572f", "#9b3163", "#5a3286", "#1f2f6b")
HEAT = ("#f3efe4", "#c3d6d0", "#78adb3", "#34768f", "#173a5e")
ROLES = {"ink": "#1d1b18", "soft": "#625d55", "rule": "#ddd7ca", "paper": "#ffffff", "accent": "#0b6aa8"}
# Text and grid lines in notebooks are medium grey, because the background may be dark.
NOTEBOOK = {"ink": "#77726b", "soft": "#77726b", "rule": "rgba(128,128,128,0.22)"}
DASHES = ("solid", "dot", "dashdot", "longdash")


def series(i: int, alpha: float = 1.0) -> str:
    """The token of the i-th series.

    >>> series(0), series(9, 0.2)
    ('@s1', '@s2/0.2')
    """
    return faded(f"@s{i % len(LIGHT) + 1}", alpha)


def sequence(t: float) -> str:
    """The token of a position t in [0, 1] on the colour ramp."""
    return f"@seq:{t:.3f}"


def faded(token: str, alpha: float) -> str:
    """The same colour with an opacity."""
    return token if alpha == 1 else f"{token.split('/')[0]}/{alpha:g}"


def resolve(token: str) -> tuple[str, float]:
    """The colour of a token on a light background, and its opacity.

    >>> resolve("@s2/0.2"), resolve("#123456"), resolve("@seq:0.000")
    (('#c8500a', 0.2), ('#123456', 1.0), ('#dd9a2b', 1.0))
    """
    name, _, alpha = token.partition("/")
    opacity = float(alpha) if alpha else 1.0
    if name.startswith("@seq:"):
        return blend(SEQUENCE, float(name[5:])), opacity
    if name.startswith("@s") and name[2:].isdigit():
        return LIGHT[int(name[2:]) - 1], opacity
    return ROLES.get(name[1:], name), opacity


def notebook_colour(token: str) -> str:
    """The colour of a token in a notebook, in plotly's notation.

    >>> notebook_colour("@s1/0.2"), notebook_colour("@rule")
    ('rgba(11,106,168,0.2)', 'rgba(128,128,128,0.22)')
    """
    if token[1:] in NOTEBOOK:
        return NOTEBOOK[token[1:]]
    colour, alpha = resolve(token)
    return colour if alpha == 1 else f"rgba({','.join(map(str, _channels(colour)))},{alpha:g})"


def blend(stops: Sequence[str], t: float) -> str:
    """The colour at t in [0, 1] of evenly spaced stops.

    >>> blend(("#000000", "#ffffff"), 0.5)
    '#808080'
    """
    place = min(max(t, 0.0), 1.0) * (len(stops) - 1)
    left = min(int(place), len(stops) - 2)
    pairs = zip(_channels(stops[left]), _channels(stops[left + 1]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (place - left)):02x}" for a, b in pairs)


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
