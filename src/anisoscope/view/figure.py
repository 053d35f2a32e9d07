"""Figures as plain data, declared once and drawn twice: by plotly on the page, by matplotlib as vector files.

A *figure* is one or several panels. On the page every panel is a drawing of its own, laid out by the style sheet; in a
file they stand side by side. A *panel* has two axes and series of points, or a grid of cells. A *switch* is a row of
selections (or a slider) that the reader sets; a panel may have a *view* for each combination of some of them, and
numbers may be looked up in arrays that the page carries once (`Ref`).

Colours by role: a figure names roles as tokens, a theme says what they are, so that it serves light and dark.

    @s1 … @s8   colours of series        @seq:0.4   a place on the ramp of depth or time
    @ink, @soft, @rule, @paper, @accent  roles of the page       TOKEN/0.2   the same, transparent
The page resolves tokens from its style sheet, vector files and notebooks by `resolve`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from anisoscope.view.words import few, step_words

FINAL_GAP = 0.12  # of the whole depth: how far the final norm stands apart from the last block


@dataclass(frozen=True)
class Ref:
    """Numbers of an array that the page carries once, times a number, plus numbers.

    An index is a whole number, "*" for all, a list of some, "#" for the number of the series (`Series.each`), "$a.1"
    for what is chosen in selection 1 of switch a, or "$a.1>name" for the entry of array `name` at that place.
    """

    array: str
    at: tuple[Any, ...]
    times: float | Ref = 1.0
    plus: Any = None

    def resolve(self, arrays: Mapping[str, Any], chosen: Mapping[str, int], each: int = 0) -> Any:
        at = []
        for index in self.at:
            if index == "#":
                index = each
            elif isinstance(index, str) and index.startswith("$"):
                name, _, through = index[1:].partition(">")
                index = arrays[through][chosen.get(name, 0)] if through else chosen.get(name, 0)
            at.append(index)
        found = _take(arrays[self.array], at)
        factor = self.times.resolve(arrays, chosen, each) if isinstance(self.times, Ref) else self.times
        return found if factor == 1.0 and self.plus is None else _scaled(found, factor, self.plus)


def _take(array: Any, at: Sequence[Any]) -> Any:
    if not at:
        return array
    if at[0] == "*":
        return [_take(part, at[1:]) for part in array]
    if isinstance(at[0], list | tuple):
        return [_take(array[i], at[1:]) for i in at[0]]
    return _take(array[at[0]], at[1:])


def _scaled(found: Any, factor: Any, plus: Any) -> Any:
    if isinstance(found, list):
        shift = plus if isinstance(plus, list | tuple) else [plus] * len(found)
        factors = factor if isinstance(factor, list | tuple) else [factor] * len(found)
        return [_scaled(value, f, s) for value, f, s in zip(found, factors, shift, strict=True)]
    return None if found is None else found * factor + (plus or 0.0)


Values = Any  # numbers (None where there is none), or a Ref to them


@dataclass(frozen=True)
class Series:
    """Points with one look: joined, marked, with a band or whiskers from `low` to `high`."""

    label: str
    x: Values
    y: Values
    colour: str = "@s1"
    low: Values | None = None
    high: Values | None = None
    bars: str = ""  # "y" or "x": whiskers along that axis instead of a band
    reach: str = "interval"  # what low and high are, in the words of the hover
    band: float = 0.16  # opacity of the band
    dash: str = "solid"
    width: float = 1.6  # of the line; 0 = none
    size: float = 0.0  # of the markers; 0 = none
    marker: str = "circle"
    hollow: bool | Sequence[bool] = False
    shade: Values | None = None  # places on the ramp, point by point
    where: Values = ()  # what each point is
    text: Values = ()  # the whole hover text, as markup
    facts: tuple[tuple[str, Values], ...] = ()  # further numbers of each point
    owner: int | None = None  # entry of the page's legend with which it is shown and hidden
    quiet: bool = False  # neither hover nor legend
    named: bool = True  # whether a legend names it
    join: bool = False  # whether a line crosses missing points
    stairs: bool = False
    start: tuple[Sequence[float], Sequence[float]] | None = None  # each point is the end of a stroke that starts here
    right: bool = False  # on the panel's right axis
    each: int = 0  # so many series of one look; "#" in a Ref is their number, lists of labels and colours go by it


@dataclass(frozen=True)
class Grid:
    """Cells of a map: rows of values, from the first row on; None where there is none."""

    z: Values
    columns: Sequence[str]
    rows: Sequence[str]
    low: Values | None = None
    high: Values | None = None
    ends: tuple[float | None, float | None] = (None, None)
    label: str = ""  # of the scale
    reach: str = "interval"
    by_row: bool = False  # whether each row has a scale of its own; a file writes the values into its cells


@dataclass(frozen=True)
class Axis:
    """One axis of a panel."""

    title: str = ""
    log: bool = False
    ticks: tuple[Sequence[float], Sequence[str]] | None = None
    bounds: tuple[float, float] | Ref | None = None
    from_zero: bool = False
    rules: bool = False  # whether lines go across the panel at the ticks
    reverse: bool = False
    hidden: bool = False
    most: int = 6  # ticks


@dataclass(frozen=True)
class Level:
    """A straight line at a value: chance, zero, or a boundary; a band where it has an end."""

    value: float | Ref
    label: str = ""
    upright: bool = False
    until: float | None = None
    dash: str = "dot"
    colour: str = "@soft"


@dataclass(frozen=True)
class Note:
    """Words inside a panel: at a place of the axes, or at a share of the panel's size."""

    text: str
    x: float
    y: float
    inside: bool = False  # whether x and y are shares
    colour: str = "@soft"


@dataclass(frozen=True)
class Panel:
    """Two axes and what is drawn on them; `views` by the choices of the selections named in `by`, joined by "|"."""

    x: Axis = Axis()
    y: Axis = Axis()
    series: tuple[Series, ...] = ()
    grid: Grid | None = None
    levels: tuple[Level, ...] = ()
    notes: tuple[Note, ...] = ()
    title: str = ""
    owner: str = ""  # beside the title: whose it is
    heading: str = ""  # within the drawing; "{a.0}" stands for what is chosen
    alt: str = ""
    caption: str = ""
    formula: str = ""
    height: int = 240  # pixels; 0 = as high as wide
    line: int | None = None  # entry of the page's legend with which it goes
    least: int = 0  # pixels: the least width on the page
    equal: bool = False  # whether a unit is as long on both axes
    legend: bool = False  # whether the page needs a legend inside it
    right: Axis | None = None
    below: Panel | None = None  # a lower panel on the same x axis
    views: Mapping[str, Panel] = field(default_factory=dict)
    by: tuple[str, ...] = ()
    page_by: str = ""  # selection whose choice decides whether the panel is there at all (no such view: hidden)

    def view(self, chosen: Mapping[str, int]) -> Panel:
        """What is drawn for some choices."""
        if not self.views:
            return self
        key = "|".join(str(chosen.get(name, 0)) for name in self.by)
        return self.views.get(key) or next(iter(self.views.values()))


@dataclass(frozen=True)
class Figure:
    """Panels that belong together; `files` says which choices are drawn as vector files, by their names."""

    panels: tuple[Panel, ...]
    id: str = ""  # of its drawings on the page
    layout: str = "grid"  # grid | pairs | threes | single | narrow | wide | scroll
    arrays: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    each: bool = False  # a file for each panel, named after its title
    most: int = 6  # panels of a file
    columns: int = 3
    size: float = 0.0  # inches: height of a row of panels in a file; 0 = by what it shows
    shared: bool = False  # whether panels of a file share their value axis
    shown: bool = True  # on the page


@dataclass(frozen=True)
class SwitchOption:
    """One thing to choose, and what to say of it once it is chosen."""

    label: str
    says: str = ""


@dataclass(frozen=True)
class Choice:
    """One selection of a switch; a slider where its options are moments."""

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
        """What the options chosen at first say."""
        return " ".join(c.options[c.default].says for c in self.choices if c.options and c.options[c.default].says)

    @property
    def defaults(self) -> dict[str, int]:
        return {f"{self.id}.{i}": choice.default for i, choice in enumerate(self.choices)}


def choice(label: str, options: Iterable[str], default: int = 0, *, slider: bool = False) -> Choice:
    return Choice(label, tuple(map(SwitchOption, options)), default, slider)


@dataclass(frozen=True)
class Time:
    """A logarithmic axis of steps on which step 0, the initialisation, stands apart."""

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
        """Where a step stands.

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
    """Where sites stand: by layer for one depth, by relative depth where depths differ or models are compared."""

    blocks: int
    relative: bool = False
    final: bool = False
    named: tuple[tuple[float, str], ...] = ()  # places that are no blocks: rows of a file, weight tables, modules
    first: int = 0  # the first layer that has a place

    def place(self, layer: int, kind: str, blocks: int = 0, depth: float | None = None) -> float:
        if kind == "final":
            return 1 + FINAL_GAP if self.relative else self.blocks + max(1.0, FINAL_GAP * self.blocks)
        if self.relative:
            return layer / max(1, blocks or self.blocks) if depth is None or not math.isfinite(depth) else depth
        return float(layer)

    def ticks(self) -> tuple[list[float], list[str]]:
        if self.relative:
            at, text = [0.0, 0.25, 0.5, 0.75, 1.0], ["embed", "¼", "½", "¾", "1"]
            at, text = (at, text) if self.blocks else ([0.0], ["rows"])
        elif self.named:
            names = {"embed_weight": "embedding table", "unembed": "output head"}
            at, text = [place for place, _ in self.named], [names.get(kind, kind) for _, kind in self.named]
        else:
            step = next((s for s in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20) if self.blocks / s <= 8), 25)
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
    """Whether values span so many orders (massive activations do) that only a logarithmic axis shows them."""
    return len(values) > 1 and min(values) > 0 and max(values) / min(values) > 100


def value_axis(values: Iterable[float | None], title: str = "", *, log: bool = True) -> Axis:
    """An axis that holds these values: from zero where that is near, logarithmic over orders."""
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
    """All values and ends of bands that are written out in some panels."""
    drawn = [series for panel in panels for series in panel.series]
    parts = [part for s in drawn for part in (s.y, *((s.low, s.high) if s.band or s.bars else ()))]
    written = [v for part in parts if isinstance(part, Sequence) for v in part]
    return [float(v) for v in written if v is not None and math.isfinite(v)]


def brief(value: float | None, digits: int = 5) -> float | None:
    """A few digits: what a drawing can show; None where there is no number."""
    return float(f"{value:.{digits}g}") if value is not None and math.isfinite(value) else None


def column(rows: Iterable[Any], name: str = "value", digits: int = 5) -> list[float | None]:
    """A field of rows as numbers that a drawing can show; None for what is no row."""
    return [brief(getattr(row, name, None), digits) for row in rows]


def points(label: str, x: Values, rows: Sequence[Any], *, ends: Mapping[str, Any] | None = None, **look: Any) -> Series:
    """Values as a series: with their intervals, drawn as `ends` says, where any has one; None leaves a gap."""
    both = {name: column(rows, name) for name in ("low", "high")}
    told = both | dict(ends or {}) if any(end is not None for end in both["low"]) else {}
    return Series(label, x, column(rows), **told, **look)


# Okabe and Ito's hues, darkened or lightened until thin lines keep contrast on paper and on slate.
LIGHT = ("#0b6aa8", "#c8500a", "#00805c", "#9c4a86", "#a37400", "#3b8fc4", "#6b6660", "#7a3b12")
SEQUENCE = ("#dd9a2b", "#c9572f", "#9b3163", "#5a3286", "#1f2f6b")
HEAT = ("#f3efe4", "#c3d6d0", "#78adb3", "#34768f", "#173a5e")
ROLES = {"ink": "#1d1b18", "soft": "#625d55", "rule": "#ddd7ca", "paper": "#ffffff", "accent": "#0b6aa8"}
# In a notebook, whose background may be dark, text and rules are a middle grey.
NOTEBOOK = {"ink": "#77726b", "soft": "#77726b", "rule": "rgba(128,128,128,0.22)"}
DASHES = ("solid", "dot", "dashdot", "longdash")


def series(i: int, alpha: float = 1.0) -> str:
    """The token of the i-th series.

    >>> series(0), series(9, 0.2)
    ('@s1', '@s2/0.2')
    """
    return faded(f"@s{i % len(LIGHT) + 1}", alpha)


def sequence(t: float) -> str:
    """The token of a place on the ramp, t in [0, 1]."""
    return f"@seq:{t:.3f}"


def faded(token: str, alpha: float) -> str:
    """The same colour, transparent."""
    return token if alpha == 1 else f"{token.split('/')[0]}/{alpha:g}"


def resolve(token: str) -> tuple[str, float]:
    """The colour of a token on paper, and how opaque it is.

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
    """A token as plotly's own notation in a notebook.

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
