"""Sections on gradients: energy over training against controls and over depth, maps, embeddings and weights.

A *reading* is how the proxy was fitted and the energies averaged: all options of a variant except proxy, rank, control
and kind of gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, NamedTuple

from anisoscope.results.quantity import share_by_chance
from anisoscope.results.query import options_of, variant_name, with_options
from anisoscope.results.row import envelope, median_ratio
from anisoscope.view import figure, page, words
from anisoscope.view.figure import Axis, Choice, Figure, Level, Panel, Series, Switch, brief, choice, sequence, series
from anisoscope.view.page import Controls, DataTable, Heading, Key, Prose, Section, Swatch, Swatches, TableCell, text
from anisoscope.view.subjects import DrawnSite, LineKey, Subject, TrainingRows, in_stream, known, model_entries
from anisoscope.view.words import TANGENT, Catalogue, estimate, few, is_module, number, reading_of, reading_words

ENERGY, ENRICHMENT, ALIGNMENT = "gradient_energy", "gradient_enrichment", "gradient_alignment"
AGAINST = (ENERGY, "gradient_share", "gradient_isoscore_gain", "amplification")
DEPTH_STEPS = 14
COORDINATE_STEPS = 6
STANDARDISED = "standardised"
FILE_PANELS = 4
MAP_ALT = "Map of steps by layers of {}; the table below holds its numbers."
IN_FILES: dict[str, Any] = {"most": FILE_PANELS, "columns": 4, "shared": True}  # of figures with a panel per model
IN_SAMPLE = "in-sample"  # note of a step that the frozen proxy was fitted on
ONE = (Level(1.0, "chance", colour="@ink"),)
Look = dict[str, Any]
Draw = Callable[..., Panel]  # (subject, *choices) -> panel
# in drawing order
CONTROLS: dict[str, Look] = {
    "random": {"colour": series(6), "band": 0.3, "width": 1.0},
    "normal": {"colour": series(2), "band": 0.26, "width": 1.0},
    "permuted": {"colour": series(4), "band": 0.0, "width": 1.7, "dash": "dashdot"},
    "next": {"colour": series(3), "band": 0.0, "width": 1.7, "dash": "dot"},
}


class Detail(NamedTuple):
    """Limits for the data on the page: numbers of steps, sites, readings and measures."""

    steps: int
    sites: int
    readings: int
    measures: int


# in decreasing size; the first that fits is used
DETAILS = (
    Detail(64, 64, 6, 48), Detail(48, 24, 4, 40), Detail(40, 16, 3, 32), Detail(32, 14, 2, 24), Detail(28, 9, 2, 20),
    Detail(20, 8, 1, 16), Detail(16, 6, 1, 12), Detail(8, 3, 1, 6),
)  # fmt: skip


@dataclass(frozen=True)
class Measure:
    """A metric in one variant at one family of sites, as an option of a selection."""

    metric: str
    variant: str
    label: str
    says: str
    family: str = "stream"  # or a kind of site inside the blocks

    def at(self, kind: str) -> bool:
        """Whether a kind of site is of the family."""
        return in_stream(kind) if self.family == "stream" else kind == self.family


def measure_choice(measures: Iterable[Measure], default: int = 0) -> Choice:
    return Choice("Measure", tuple(figure.SwitchOption(m.label, m.says) for m in measures), default)


class Options(NamedTuple):
    """The values of one selection of a figure, and their labels."""

    values: Sequence[Any]
    choice: Choice


class Gradients:
    """Lines of gradient metrics by subject, site and reading, within the limits of `detail`."""

    def __init__(self, rows: TrainingRows, catalogue: Catalogue, detail: Detail = DETAILS[0]) -> None:
        self.rows, self.catalogue, self.detail = rows, catalogue, detail
        self.time = figure.Time.of(rows.steps)
        self.left_out, self.proxies = dict[str, str](), cache(self._proxies)  # proxies are asked for every line
        self.rank, self.proxy = self._main("rank", ("16",)), self._main("proxy", ("semi_nmf", "pca"))
        self.chances = {subject.index: self._chance(subject) for subject in rows.subjects}

    def _main(self, option: str, preferred: Sequence[str]) -> str:
        """The main value of an option: the first preferred one that occurs, else the most common."""
        keys = self.keys([ENERGY]) or self.keys([*TANGENT, "amplification"])
        options = [options_of(key.variant) for key in keys]
        counts = Counter(of_key[option] for of_key in options if option in of_key and "of" not in of_key)
        best = counts.most_common(1)[0][0] if counts else preferred[0]
        return next((value for value in preferred if value in counts), best)

    def _chance(self, subject: Subject) -> float | None:
        """The chance level r/d, from the table or from the recorded width of the model."""
        lines, keys = self.rows.lines, [key for key in self.keys([ENRICHMENT]) if key.subject == subject.index]
        same_rank = [key for key in keys if options_of(key.variant).get("rank") == self.rank]
        chance = median_ratio((lines.get(key._replace(metric=ENERGY), []), lines[key]) for key in same_rank)
        widths = {entry.get("name"): entry.get("width") for entry in model_entries(self.rows.abouts)}
        width = widths.get(subject.model)
        return int(self.rank) / int(width) if chance is None and width and self.rank.isdigit() else chance

    def is_main(self, variant: str) -> bool:
        """Whether a variant has the main proxy and rank, and is not a control."""
        options = options_of(variant)
        same = options.get("rank", self.rank) == self.rank and options.get("proxy", self.proxy) == self.proxy
        return same and "control" not in options

    def keys(self, metrics: Iterable[str]) -> list[LineKey]:
        return [key for metric in dict.fromkeys(metrics) for key in self.rows.keys.get(metric, [])]

    def whole(
        self, one: Subject, metric: str, site: DrawnSite, *, reading: str = "fit=refit", group: str = "", **also: str
    ) -> list[Any]:
        """All rows of a line, for the main proxy and rank unless `also` names others or a control."""
        options = {**options_of(reading), "proxy": self.proxy, "rank": self.rank, **also}
        return self.rows.line(one, metric, site, variant_name(options), group=group)

    def line(self, subject: Subject, metric: str, site: DrawnSite, **how: Any) -> list[Any]:
        return self.thin(self.whole(subject, metric, site, **how))

    def last(self, subject: Subject, metric: str, site: DrawnSite, **how: Any) -> Any:
        """The last row with a value of a line; None without values."""
        return next(reversed(known(self.whole(subject, metric, site, **how))), None)

    def thin(self, line: Sequence[Any]) -> list[Any]:
        return limited(line, self.detail.steps, "steps", left_out=self.left_out)

    def sites(self, sites: Sequence[DrawnSite]) -> Options:
        shown = limited(sites, self.detail.sites, "layers", left_out=self.left_out)
        default = self.rows.middle(shown) if shown else 0
        return Options(shown, choice("Layer", [site.name for site in shown], default))

    def readings(self, keys: Iterable[LineKey]) -> Options:
        look: Look = {"left_out": self.left_out, "evenly": False}
        shown = limited(readings_of(keys), self.detail.readings, "ways to fit and average", **look)
        return Options(shown, choice("Proxy", map(reading_words, shown)))

    def _proxies(self, metric: str) -> list[str]:
        """The proxies of a metric, the main one last, so that it is drawn on top."""
        others = {options_of(key.variant).get("proxy", "") for key in self.keys([metric])} - {"", self.proxy}
        return [*sorted(others, key=lambda proxy: (proxy == "pca", proxy)), self.proxy]

    def levels(self, subject: Subject, metric: str = ENERGY, label: str = "chance") -> tuple[Level, ...]:
        """The level of a metric if gradients are unrelated to the proxy."""
        level = self.chances[subject.index]
        if metric == "gradient_isoscore_gain":
            level = 0.0
        elif metric == "gradient_share" and level and self.rank.isdigit():
            level = share_by_chance(level, int(self.rank))
        return () if level is None else (Level(level, label, colour="@ink"),)

    def drawn(self, label: str, line: Sequence[Any], **look: Any) -> Series:
        """A series over steps."""
        x = [self.time.place(row.step or 0) for row in line]
        where = [f"step {row.step or 0:,}" + (f" · {IN_SAMPLE}" if IN_SAMPLE in row.note else "") for row in line]
        return points(label, line, x, where, **look)

    def panel(self, drawn: Sequence[Series], levels: tuple[Level, ...] = ONE) -> Panel:
        """A panel of lines over steps; levels only if there are lines."""
        return Panel(self.time.axis(), series=tuple(drawn), levels=levels if drawn else ())

    def controlled(self, subject: Subject, metric: str, site: DrawnSite, **how: Any) -> list[tuple[Look, list[Any]]]:
        """Controls, other proxies and, on top, the main proxy; empty if the main proxy was not measured."""
        lines = [(control_look(name), self.line(subject, metric, site, control=name, **how)) for name in CONTROLS]
        for proxy in self.proxies(metric):
            lines.append((self.proxy_look(proxy), self.line(subject, metric, site, proxy=proxy, **how)))
        return [(look, line) for look, line in lines if line] if lines[-1][1] else []

    def proxy_look(self, proxy: str) -> Look:
        label = words.PROXIES.get(proxy, proxy)
        if proxy == self.proxy:
            return {"label": label, "colour": "@s1", "band": 0.18, "width": 2.2, "size": 5.0}
        hue = {"pca": 1, "svd": 5, "ica": 7, "kmeans": 3, "random": 6}.get(proxy, 4)
        dash = "dash" if proxy == "pca" else "longdash"
        return {"label": label, "colour": series(hue), "band": 0.0, "width": 1.7, "dash": dash}

    def swatches(self, keys: Sequence[LineKey]) -> Swatches:
        """The legend of a figure with controls."""
        options = [options_of(key.variant) for key in keys]
        proxies, controls = ({of_key.get(name) for of_key in options} for name in ("proxy", "control"))
        looks = [self.proxy_look(proxy) for proxy in reversed(self.proxies(ENERGY)) if proxy in proxies]
        looks += [control_look(control) for control in words.CONTROLS if control in controls]
        key = [Swatch(look["label"], look["colour"], look.get("dash", "solid"), bool(look["band"])) for look in looks]
        return Swatches([*key, page.CHANCE])

    def parts(
        self, name: str, options: Sequence[Options], draw: Draw, *, heading: str, lead: str, key: Any, alt: str,
        look: Look | None = None, **how: Any,
    ) -> list[Any]:  # fmt: skip
        """A figure with its heading, explanation, selections and legend; empty if nothing was measured."""
        panels = self.panels(name, options, draw, alt=alt, **how)
        if not panels:
            return []
        switch = Switch(name, tuple(option.choice for option in options))
        shown = Figure(panels, layout="pairs", **(look or {}))
        says = [page.Says(switch)] if switch.says else []
        title = [Heading(heading)] if heading else []
        return [*title, Prose(text(lead)), Controls(switch), key, shown, *says]

    def panels(
        self, name: str, options: Sequence[Options], draw: Draw, *, alt: str, height: int = 300, title: str = ""
    ) -> tuple[Panel, ...]:
        """One panel per subject, with a view `draw(subject, *chosen)` for each combination of choices.

        Views of one combination share their scale across subjects. `alt` is completed by the label of the subject, and
        by the course of some lines of the view shown initially.
        """
        every = product(*(enumerate(option.values) for option in options))
        chosen = {"|".join(str(i) for i, _ in at): [value for _, value in at] for at in every}
        views = {one.index: {at: draw(one, *picked) for at, picked in chosen.items()} for one in self.rows.subjects}
        values: dict[str, list[float]] = {}
        for key, view in (pair for by_choice in views.values() for pair in by_choice.items()):
            levels = [level.value for level in view.levels if isinstance(level.value, float)]
            values.setdefault(key, []).extend([*figure.numbers_in([view]), *(levels if view.series else [])])
        panels, by = [], tuple(f"{name}.{i}" for i in range(len(options)))
        default = "|".join(str(option.choice.default) for option in options)
        for subject in self.rows.subjects:
            scaled = {}
            for key, view in views[subject.index].items():
                if view.series or view.grid:
                    y = figure.value_axis(values[key], title, log=False) if view.series else view.y
                    scaled[key] = replace(view, y=y)
            if scaled:
                shown = scaled.get(default) or next(iter(scaled.values()))
                told = f"{alt.format(subject.label)} {courses(shown.series)}".strip()
                panels.append(self.named(subject, Panel(views=scaled, by=by, height=height, alt=told)))
        return tuple(panels)

    def named(self, subject: Subject, panel: Panel) -> Panel:
        return linked(panel, subject, several=len(self.rows.subjects) > 1)

    def tables(self, make: Callable[[Subject], DataTable]) -> list[Any]:
        """One table per subject that has rows, below its label if there are several."""
        several, parts = len(self.rows.subjects) > 1, []
        for subject, table in ((one, make(one)) for one in self.rows.subjects):
            if table.groups[0]:
                parts += [*([Heading(subject.label, 4, css="apart")] if several else []), table]
        return parts


def linked(panel: Panel, one: Any, *, several: bool, aside: str = "") -> Panel:
    """A panel with the legend entry of a subject or arm; its title is the label if there are several."""
    role = one.role if several and one.role not in one.label else ""
    title, owner = one.label if several or aside else "", ", ".join(part for part in (role, aside) if part)
    return replace(panel, title=title, owner=owner, line=one.line)


def limited(values: Sequence[Any], most: int, what: str, *, left_out: dict[str, str], evenly: bool = True) -> list[Any]:
    """At most `most` of the values, evenly chosen or the first; notes in `left_out` what is not on the page."""
    if len(values) > most:
        left_out[what] = f"{most} of {len(values)} {what}"
    return [values[i] for i in few(range(len(values)), most)] if evenly else list(values[:most])


def readings_of(keys: Iterable[LineKey]) -> list[str]:
    """The readings of lines, the simplest first, each followed by that in standardised coordinates."""
    readings = {reading_of(key.variant) for key in keys}

    def place(reading: str) -> tuple[Any, ...]:
        plain = with_options(reading, coordinates=None)
        return plain.count(";"), "fit=refit" not in plain, plain, reading != plain

    return sorted(readings, key=place)


def points(label: str, rows: Sequence[Any], x: Sequence[float], where: Sequence[str], **look: Any) -> Series:
    """Rows as a series; a single row has whiskers, in-sample rows hollow markers."""
    if len(known(rows)) == 1:
        look |= {"size": max(look.get("size", 0.0), 6.0), "bars": "y"}
    hollow = [IN_SAMPLE in row.note for row in rows]
    if any(hollow) and look.get("size"):
        look["hollow"] = hollow
    return figure.points(label, x, rows, where=where, **look)


def control_look(control: str) -> Look:
    return {"label": words.CONTROLS[control], **CONTROLS[control]}


def depth_look(site: DrawnSite, blocks: int) -> Look:
    """The line style of a site: colour by depth, the final norm dashed."""
    colour, dash = sequence(site.layer / max(1, blocks)), "solid"
    if site.kind == "final":
        colour, dash = "@accent", "dash"
    return {"label": site.name, "colour": colour, "width": 1.5, "size": 3.5, "band": 0.0, "dash": dash}


def courses(drawn: Sequence[Series], most: int = 3) -> str:
    """The last few named lines as text, for readers who do not see the figure."""
    named = [one for one in drawn if one.named and not one.quiet][-most:]
    told = [f"{one.label}: {course}" for one in named if (course := course_words(one.y, one.where))]
    return f"{'; '.join(told)}." if told else ""


def course_words(values: Sequence[float | None], where: Sequence[str]) -> str:
    """Start, peak and end of a line as text.

    >>> course_words([0.1, None, 0.4, 0.2], ["step 0", "step 1", "step 2", "step 4"])
    '0.100 at step 0 to 0.200 at step 4, highest 0.400 at step 2'
    """
    found = [(value, f"{number(value)} at {place}") for value, place in zip(values, where, strict=True)
             if value is not None]  # fmt: skip
    if len(found) < 2:
        return found[0][1] if found else ""
    return f"{found[0][1]} to {found[-1][1]}, highest {max(found, key=lambda pair: pair[0])[1]}"


def energy_section(found: Gradients) -> Section | None:
    """The section on energy: of every layer, against controls, and over depth; None if no gradients were measured."""
    rows = found.rows
    metrics = [metric for metric in AGAINST if metric in rows.metrics()]
    if not metrics:
        return None
    over_time = len(rows.steps) > 1
    chances = ", ".join(dict.fromkeys(number(chance) for chance in found.chances.values() if chance))
    lead = (
        "A proxy of rank {rank} is fitted on activations alone; its <em>energy</em> is the share of the gradients of "
        'other contexts that lies in its span, <span class="formula">‖GQ‖²&nbsp;/&nbsp;‖G‖²</span>. By chance it is r/d'
        + (": {chances}." if chances else ".")
    )
    lead += " The axis of steps is logarithmic; step 0, the initialisation, stands apart from it." if over_time else ""
    parts: list[Any] = [Prose(text(lead, rank=found.rank, chances=chances)), Key()]
    if over_time:
        parts += [*_against(found, metrics), *_overview(found)]  # the hero shows every layer, too
    parts += [*_depth(found, metrics, alone=not over_time), *_coordinates(found)]
    return Section("energy", "Where gradients go", parts, "Energy")


def _bands(found: Gradients, metrics: Sequence[str]) -> str:
    frozen = any("fit=frozen" in reading for reading in readings_of(found.keys(metrics)))
    seen = (
        " A frozen proxy has seen the first 30&nbsp;% of the measured steps: those inside that window are in-sample "
        "and drawn hollow."
    )
    return (
        "Around the proxy its 95&nbsp;% interval over contexts; around the controls the band that holds 95&nbsp;% of "
        "their draws. <em>Normal</em> subspaces are orthogonal to the proxy, <em>random</em> ones lie anywhere, "
        "<em>next r</em> are the largest principal components outside the proxy, and <em>permuted</em> is fitted on "
        "activations whose columns were shuffled, so that only means and variances of coordinates are left."
    ) + (seen if frozen else "")


def _overview(found: Gradients) -> list[Any]:
    """Energy of every layer over training, coloured by depth, above the band of the normal control."""
    keys, sites = found.keys([ENERGY]), found.rows.sites([ENERGY])

    def draw(one: Subject, reading: str) -> Panel:
        drawn = []
        ends = envelope(found.whole(one, ENERGY, site, reading=reading, control="normal") for site in sites)
        if len(ends) > 1:
            steps = found.thin(list(ends))
            lows, highs = ([brief(ends[step][i]) for step in steps] for i in (0, 1))
            look: Look = {"colour": "@s3", "low": lows, "high": highs, "band": 0.26, "width": 0, "quiet": True}
            drawn.append(Series("normal control, all layers", [*map(found.time.place, steps)], lows, **look))
        lines = [(site, line) for site in sites if (line := found.line(one, ENERGY, site, reading=reading))]
        named = {lines[i][0] for i in few(range(len(lines)), 3)}
        drawn += [found.drawn(**depth_look(site, one.blocks), line=line, named=site in named) for site, line in lines]
        return found.panel(drawn if lines else (), found.levels(one, label="chance, r/d ="))

    lead = (
        "One line per layer. The shaded band holds the normal control of all layers: 95&nbsp;% of random subspaces "
        "orthogonal to the proxy. The dotted line is chance."
    )
    how: Look = {"alt": "Gradient energy of {} over steps, by layer.", "height": 320, "title": "energy"}
    how |= {"look": {"files": {"energy-over-training": {}}, **IN_FILES}}
    key, heading = page.Ramp("embedding", "last block", final=True), "Every layer over training"
    return found.parts("layers", [found.readings(keys)], draw, heading=heading, lead=lead, key=key, **how)


def _against(found: Gradients, metrics: Sequence[str]) -> list[Any]:
    """One layer's energy (or share) over training against all its controls."""

    def draw(one: Subject, metric: str, site: DrawnSite, reading: str) -> Panel:
        return _controlled(found, one, metric, site, reading=reading)

    keys, entries = found.keys(metrics), [found.catalogue.entry(metric) for metric in metrics]
    options = tuple(figure.SwitchOption(e.title, words.sentences(e.formula, e.description)) for e in entries)
    sites = found.sites(found.rows.sites(metrics))
    every = [Options(metrics, Choice("Quantity", options)), sites, found.readings(keys)]
    how: Look = {"heading": "One layer against its controls", "lead": _bands(found, metrics), "height": 320}
    alt = "Gradient energy of {} over steps against controls, at one layer."
    return found.parts("against", every, draw, key=found.swatches(keys), alt=alt, **how)


def _controlled(found: Gradients, subject: Subject, metric: str, site: DrawnSite, **how: str) -> Panel:
    lines = found.controlled(subject, metric, site, **how)
    return found.panel([found.drawn(**look, line=line) for look, line in lines], found.levels(subject, metric))


def _depth(found: Gradients, metrics: Sequence[str], *, alone: bool) -> list[Any]:
    """Energy over depth at a selectable step, initially the last."""
    keys, sites = found.keys([ENERGY]), found.rows.sites([ENERGY])
    steps = sorted({row.step or 0 for key in keys for row in found.rows.lines[key]})
    steps = few(steps, min(DEPTH_STEPS, found.detail.steps))

    @cache
    def lines(one: Subject, reading: str) -> list[tuple[DrawnSite, Look, list[Any]]]:
        return [(site, *both) for site in sites for both in found.controlled(one, ENERGY, site, reading=reading)]

    def draw(one: Subject, step: int, reading: str) -> Panel:
        depth = figure.Depth.of_sites(one.blocks, [key.site for key in keys if key.subject == one.index])
        parts: dict[str, tuple[Look, list[tuple[DrawnSite, Any]]]] = {}
        for site, look, line in lines(one, reading):
            at_step = [(site, row) for row in line if (row.step or 0) == step]
            parts.setdefault(look["label"], (look, []))[1].extend(at_step)
        drawn = []
        for look, pairs in (part for part in parts.values() if part[1]):
            x, where = [depth.place(s.layer, s.kind) for s, _ in pairs], [site.name for site, _ in pairs]
            drawn.append(points(rows=[row for _, row in pairs], x=x, where=where, **look))
        return replace(found.panel(drawn, found.levels(one, label="chance, r/d =")), x=depth.axis())

    when = (" at this step" if len(steps) == 1 else " at one step") if found.rows.dated else ""
    moments = Options(steps, choice("Step", [f"{step:,}" for step in steps], len(steps) - 1))
    lead = _bands(found, metrics) if alone else "The same lines and bands from the embedding to the final norm."
    how: Look = {"heading": f"Over depth{when}", "lead": lead, "alt": "Gradient energy of {} by depth at one step."}
    return found.parts("depth", [moments, found.readings(keys)], draw, key=found.swatches(found.keys(metrics)), **how)


def _coordinates(found: Gradients) -> list[Any]:
    """Enrichment and alignment over depth at one step, as they are and in standardised coordinates; all are 1 by
    chance.
    """
    keys = found.keys([ENRICHMENT, ALIGNMENT])
    scaled = [reading_of(key.variant) for key in keys if options_of(key.variant).get("coordinates") == STANDARDISED]
    plain = {with_options(reading, coordinates=None) for reading in scaled}
    bases = [r for r in readings_of(found.keys([ENRICHMENT])) if r in plain or with_options(r, fit=None) in plain]
    bases = [r for r in bases if not {"average", "balanced"} & options_of(r).keys()]
    look: Look = {"left_out": found.left_out, "evenly": False}
    bases = limited(bases, found.detail.readings, "ways to fit and average", **look)
    sites = found.rows.sites([ENRICHMENT])
    steps = sorted({row.step or 0 for key in found.keys([ENRICHMENT]) for row in found.rows.lines[key]})
    steps = few(steps, min(COORDINATE_STEPS, found.detail.steps))

    def line(one: Subject, metric: str, site: DrawnSite, reading: str) -> list[Any]:
        if metric == ENRICHMENT:
            return found.whole(one, metric, site, reading=reading)
        return found.rows.line(one, metric, site, with_options(reading, fit=None))

    def draw(one: Subject, step: int, reading: str) -> Panel:
        depth, drawn = figure.Depth.of_sites(one.blocks, sites), []
        for metric, space in product(COORDINATES, ("", STANDARDISED)):
            lines = [(s, line(one, metric, s, with_options(reading, coordinates=space or None))) for s in sites]
            pairs = [(site, row) for site, rows in lines for row in rows if (row.step or 0) == step]
            if pairs:
                x, where = [depth.place(s.layer, s.kind) for s, _ in pairs], [site.name for site, _ in pairs]
                drawn.append(points(rows=[row for _, row in pairs], x=x, where=where, **coordinate_look(metric, space)))
        return replace(found.panel(drawn), x=depth.axis())

    lead = (
        "A gradient is a covector: where a coordinate of the stream is made smaller, its gradient grows, and energies "
        "move. <em>Standardised</em>: activations divided by their standard deviations, gradients multiplied by them, "
        "which no rescaling of coordinates changes. <em>Alignment</em>, "
        '<span class="formula">d·tr(C_G&nbsp;C_X)&nbsp;/&nbsp;(tr&nbsp;C_G·tr&nbsp;C_X)</span>, compares both '
        "covariances without a rank. All are 1 by chance."
    )
    looks = [coordinate_look(metric, space) for metric, space in product(COORDINATES, ("", STANDARDISED))]
    key = Swatches([*(Swatch(one["label"], one["colour"], one["dash"], True) for one in looks), page.CHANCE])
    options = [Options(steps, choice("Step", [f"{step:,}" for step in steps], len(steps) - 1))]
    options.append(Options(bases, choice("Proxy", map(reading_words, bases))))
    alt = "Enrichment and alignment of {} by depth, as they are and in standardised coordinates."
    how: Look = {"heading": "In other coordinates", "lead": lead, "key": key, "alt": alt, "title": "times chance"}
    return found.parts("coordinates", options, draw, **how) if bases else []


COORDINATES = {ENRICHMENT: ("Enrichment", "@s1"), ALIGNMENT: ("Alignment", series(2))}


def coordinate_look(metric: str, space: str) -> Look:
    label, colour = COORDINATES[metric]
    look: Look = {"label": f"{label}, {space or 'as it is'}", "colour": colour, "band": 0.15, "size": 4.0}
    return look | {"dash": "dash" if space else "solid", "width": 1.8}


def _measures(found: Gradients, metrics: Iterable[str]) -> list[Measure]:
    """The measures with values over steps and layers, in their default or available variants; enrichment first."""
    measures: list[Measure] = []
    for metric in found.catalogue.ordered(metrics):
        keys, entry = found.keys([metric]), found.catalogue.entry(metric)
        readings = found.readings(keys).values
        here = {
            key.variant for key in keys if not key.group and in_stream(key.site.kind) and found.is_main(key.variant)
        }
        variants = {v for v in here if not v or ("of" not in options_of(v) and reading_of(v) in readings)}
        names = [""] if "" in variants else sorted(variants, key=lambda v: (v.count(";"), "fit=refit" not in v, v))
        for variant in names:
            label = f"{entry.title} · {reading_words(reading_of(variant))}" if len(names) > 1 else entry.title
            measures.append(Measure(metric, variant, label, words.sentences(entry.formula, entry.description)))
    shown = limited(measures, found.detail.measures, "measures", left_out=found.left_out, evenly=False)
    return sorted(shown, key=lambda measure: measure.metric != ENRICHMENT)


def map_section(found: Gradients) -> Section | None:
    """The section of maps of gradient metrics, steps by layers."""
    measures = _measures(found, {*TANGENT, "amplification"} & found.rows.metrics())
    if not measures or len(found.rows.steps) < 2:
        return None

    @cache
    def cells(one: Subject, measure: Measure) -> dict[DrawnSite, dict[int, float | None]]:
        lines = {}
        for site in found.rows.sites([measure.metric]):
            if line := found.thin(found.rows.line(one, measure.metric, site, measure.variant)):
                lines[site] = {row.step or 0: brief(row.value) for row in line}
        return lines

    def draw(one: Subject, measure: Measure) -> Panel:
        lines, every = cells(one, measure), [cells(other, measure) for other in found.rows.subjects]
        values = [v for of_subject in every for line in of_subject.values() for v in line.values() if v is not None]
        steps = sorted({step for line in lines.values() for step in line})
        z = [[line.get(step) for step in steps] for line in lines.values()]
        known_cells = any(v is not None for row in z for v in row)
        ends = (min(values), max(values)) if known_cells else (0.0, 1.0)
        return step_map(steps, list(lines), z, ends, measure.label) if known_cells else Panel()

    lead = (
        "Every layer at every measured step. Columns are measured steps, not evenly spaced in time. Maps of one "
        "measure share their colour scale."
    )
    files: Look = {"enrichment-map": {}} if measures[0].metric == ENRICHMENT else {}
    how: Look = {"heading": "", "lead": lead, "key": Key(), "alt": MAP_ALT}
    how |= {"look": {"most": FILE_PANELS, "files": files, "each": True}}
    how |= {"height": map_height(len(found.rows.sites(measure.metric for measure in measures)))}
    parts = found.parts("map", [Options(measures, measure_choice(measures))], draw, **how)
    return Section("maps", "Gradients, steps by layers", parts, "Gradients by layers") if parts else None


def map_height(sites: int) -> int:
    return max(220, min(420, 90 + 19 * sites))


def step_map(
    steps: Sequence[int], sites: Sequence[DrawnSite], z: Any, ends: tuple[float, float], label: str, **more: Any
) -> Panel:
    """A heat map of layers by steps; cells without a value stay empty."""
    across, down = words.strided(len(steps), 8), words.strided(len(sites), 14)
    x = Axis("step", ticks=([float(i) for i in across], [words.step_words(steps[i]) for i in across]))
    ticks = ([float(i) for i in down], [sites[i].short for i in down])
    y = Axis("" if is_module(sites[0].kind) else "block", ticks=ticks)
    # non-numeric names: plotly would place a tick at position 8 in the column named 8
    names = [f"step {step:,}" for step in steps]
    return Panel(x, y, grid=figure.Grid(z, names, [site.name for site in sites], ends=ends, label=label, **more))


def elsewhere_section(found: Gradients) -> Section | None:
    """The section on gradients of embeddings and weights, and updates of embeddings, against controls over training."""
    keys = [key for key in found.keys([ENERGY]) if "of" in options_of(key.variant) and not key.group]
    order = {of: i for i, of in enumerate(words.SOURCES)}
    every = {(options_of(key.variant)["of"], key.site) for key in keys}
    places = sorted(every, key=lambda place: (order.get(place[0], len(order)), place[1]))
    if not places:
        return None
    names, readings = [place_words(of, site) for of, site in places], found.readings(keys)
    lead = (
        "The same question for other gradients: those of the embedding table in its two roles, what the optimiser made "
        "of them (the <em>update</em> of each row between measured steps), and weight gradients of a linear map "
        "against a proxy fitted on that map's own input."
    )

    def draw(one: Subject, place: tuple[str, DrawnSite], reading: str) -> Panel:
        return _controlled(found, one, ENERGY, place[1], reading=reading, of=place[0])

    def table(one: Subject) -> DataTable:
        body, controls = [], [{}, *({"control": name} for name in words.CONTROLS)]
        for name, (of, site) in zip(names, places, strict=True):
            ends = [found.last(one, ENERGY, site, reading=readings.values[0], of=of, **how) for how in controls]
            cells = [estimate(row.value, row.low, row.high) if row else "" for row in ends]
            body += [[TableCell(name, head=True), *cells]] if any(cells) else []
        heads = ["Energy of", found.proxy_look(found.proxy)["label"], *words.CONTROLS.values()]
        return DataTable([heads], [body], f"Embeddings and weights, {one.label}", "plain sites", one.index)

    if len(found.rows.steps) < 2:
        parts = [Prose(text(lead)), *found.tables(table)]
    else:
        alt, of_places = f"Energy of {{}} over steps: {words.listed(names[:4])}.", Options(places, choice("Of", names))
        how: Look = {"heading": "", "lead": lead, "key": found.swatches(keys), "alt": alt, "title": "energy"}
        parts = found.parts("elsewhere", [of_places, readings], draw, **how)
    return Section("elsewhere", "Embeddings and weights", [Key(), *parts], "Embeddings, weights") if parts else None


def place_words(of: str, site: DrawnSite) -> str:
    """The kind of gradient and its site as text.

    >>> place_words("weight", DrawnSite.of(3, "mlp_in")), place_words("update", DrawnSite.of(0, "embed"))
    ('Weight gradients, block 3 · MLP input', 'Embedding updates, weight decay removed')
    """
    named = {"embed": "", **{kind: f", block {site.layer} · {name}" for kind, name in words.KINDS.items()}}
    return words.SOURCES.get(of, of) + named.get(site.kind, f", {site.name}")
