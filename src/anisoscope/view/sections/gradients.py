"""Sections on gradients: energy over training against controls and over depth, maps, embeddings and weights.

A *reading* is how the proxy was fitted and the energies averaged: all options of a variant except proxy, rank, control
and kind of gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any

from anisoscope.results.quantity import share_by_chance
from anisoscope.results.query import median_ratio, options_of, variant_name
from anisoscope.view import figure, page, words
from anisoscope.view.figure import Axis, Choice, Figure, Level, Panel, Series, Switch, brief, choice, sequence, series
from anisoscope.view.page import Controls, DataTable, Heading, Key, Prose, Section, Swatch, Swatches, TableCell, text
from anisoscope.view.subjects import STREAM, DrawnSite, Subject, TrainingRows, known
from anisoscope.view.words import TANGENT, Catalogue, estimate, few, number, reading_of, reading_words

ENERGY, ENRICHMENT = "gradient_energy", "gradient_enrichment"
AGAINST = (ENERGY, "gradient_share", "gradient_isoscore_gain", "amplification")
DEPTH_STEPS = 14
BANDS = ("random", "normal")
FILE_PANELS = 4
IN_SAMPLE = "in-sample"
ONE = (Level(1.0, "chance", colour="@ink"),)
LineKey = tuple[int, str, DrawnSite, str, str]  # subject, metric, site, group, variant
Look = dict[str, Any]
Draw = Callable[..., Panel]  # (subject, *choices) -> panel
Told = Callable[[Subject], str]  # alternative text of a figure


@dataclass(frozen=True)
class Detail:
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

    @property
    def kinds(self) -> tuple[str, ...]:
        return STREAM if self.family == "stream" else (self.family,)


def measure_choice(measures: Iterable[Measure], default: int = 0) -> Choice:
    return Choice("Measure", tuple(figure.SwitchOption(m.label, m.says) for m in measures), default)


class Gradients:
    """Lines of gradient metrics by subject, site and reading, within the limits of `detail`."""

    def __init__(self, rows: TrainingRows, catalogue: Catalogue, detail: Detail = DETAILS[0]) -> None:
        self.rows, self.catalogue, self.detail = rows, catalogue, detail
        self.time = figure.Time.of(rows.steps)
        self.left_out: dict[str, str] = {}
        self.rank, self.proxy = self._main("rank", ("16",)), self._main("proxy", ("semi_nmf", "pca"))
        self.chances = {subject.index: self._chance(subject) for subject in rows.subjects}

    def _main(self, option: str, preferred: Sequence[str]) -> str:
        """The main value of an option: the first preferred one that occurs, else the most common."""
        keys = self.keys([ENERGY]) or self.keys([*TANGENT, "amplification"])
        found = [options_of(key[4]) for key in keys]
        counts = Counter(options[option] for options in found if option in options and "of" not in options)
        best = counts.most_common(1)[0][0] if counts else preferred[0]
        return next((value for value in preferred if value in counts), best)

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

    def thin(self, line: Sequence[Any]) -> list[Any]:
        """A line reduced to the number of steps of `detail`."""
        if len(line) > self.detail.steps:
            self.left_out["steps"] = f"at most {self.detail.steps} steps"
        return [line[i] for i in few(range(len(line)), self.detail.steps)]

    def last(self, subject: Subject, metric: str, site: DrawnSite, **how: Any) -> Any:
        """The last row with a value of a line; None without values."""
        return next(reversed(known(self.whole(subject, metric, site, **how))), None)

    def sites(self, metrics: Iterable[str]) -> list[DrawnSite]:
        """The sites to select from, evenly reduced to the number of `detail`."""
        found = self.rows.sites(metrics)
        if len(found) > self.detail.sites:
            self.left_out["layers"] = f"{self.detail.sites} of {len(found)} layers"
        return [found[i] for i in few(range(len(found)), self.detail.sites)]

    def readings_in(self, keys: Iterable[LineKey]) -> list[str]:
        return readings_of(keys)[: self.detail.readings]

    def readings(self, metrics: Iterable[str]) -> list[str]:
        """The readings of these metrics, the simplest first, limited by `detail`."""
        found = readings_of(self.keys(metrics))
        if len(found) > self.detail.readings:
            self.left_out["readings"] = f"{self.detail.readings} of {len(found)} ways to fit and average"
        return found[: self.detail.readings]

    def proxies(self, metric: str) -> list[str]:
        """The proxies of a metric, the main one last, so that it is drawn on top."""
        found = {options_of(key[4]).get("proxy", "") for key in self.keys([metric])} - {"", self.proxy}
        return [*sorted(found, key=lambda proxy: (proxy == "pca", proxy)), self.proxy]

    def _chance(self, subject: Subject) -> float | None:
        """The chance level r/d, from the table or from the recorded width of the model."""
        keys = [k for k in self.keys([ENRICHMENT]) if k[0] == subject.index]
        keys = [k for k in keys if options_of(k[4]).get("rank") == self.rank]
        lines = self.rows.lines
        chance = median_ratio((lines.get((k[0], ENERGY, *k[2:]), []), lines[k]) for k in keys)
        width = self.rows.width(subject)
        return int(self.rank) / width if chance is None and width and self.rank.isdigit() else chance

    def levels(self, subject: Subject, metric: str = ENERGY, label: str = "chance") -> tuple[Level, ...]:
        """The level of a metric if gradients are unrelated to the proxy."""
        level = share = self.chances[subject.index]
        if metric == "gradient_isoscore_gain":
            level = 0.0
        elif metric == "gradient_share" and share and self.rank.isdigit():
            level = share_by_chance(share, int(self.rank))
        return () if level is None else (Level(level, label, colour="@ink"),)

    def drawn(self, label: str, line: Sequence[Any], **look: Any) -> Series:
        """A series over steps."""
        x = [self.time.place(row.step or 0) for row in line]
        where = [f"step {row.step or 0:,}" + (" · in-sample" if _inside(row) else "") for row in line]
        return points(label, line, x, where, **look)

    def panel(self, drawn: Sequence[Series], levels: tuple[Level, ...] = ONE) -> Panel:
        """A panel of lines over steps; levels only if there are lines."""
        return Panel(self.time.axis(), series=tuple(drawn), levels=levels if drawn else ())

    def controlled(self, subject: Subject, metric: str, site: DrawnSite, **how: Any) -> list[tuple[Look, list[Any]]]:
        """Controls, other proxies and, on top, the main proxy; empty if the main proxy was not measured."""
        found = [(control_look(name), self.line(subject, metric, site, control=name, **how))
                 for name in (*BANDS, "permuted", "next")]  # fmt: skip
        found += [(self.proxy_look(name), self.line(subject, metric, site, proxy=name, **how))
                  for name in self.proxies(metric)]  # fmt: skip
        there = [(look, line) for look, line in found if line]
        return there if any(look["label"] == self.proxy_look(self.proxy)["label"] for look, _ in there) else []

    def proxy_look(self, proxy: str) -> Look:
        label = words.PROXIES.get(proxy, proxy)
        if proxy == self.proxy:
            return {"label": label, "colour": "@s1", "band": 0.18, "width": 2.2, "size": 5.0}
        hue = {"pca": 1, "svd": 5, "ica": 7, "kmeans": 3, "random": 6}.get(proxy, 4)
        return {"label": label, "colour": series(hue), "band": 0.0, "width": 1.7,
                "dash": "dash" if proxy == "pca" else "longdash"}  # fmt: skip

    def swatches(self, keys: Sequence[LineKey]) -> Swatches:
        """The legend of a figure with controls."""
        found = [options_of(key[4]) for key in keys]
        proxies, controls = ({options.get(name) for options in found} for name in ("proxy", "control"))
        looks = [self.proxy_look(p) for p in reversed(self.proxies(ENERGY)) if p in proxies]
        looks += [control_look(c) for c in ("normal", "random", "next", "permuted") if c in controls]
        key = [Swatch(look["label"], look["colour"], look.get("dash", "solid"), bool(look["band"])) for look in looks]
        return Swatches([*key, page.CHANCE])

    def switched(
        self, name: str, choices: Sequence[Sequence[Any]], draw: Draw, *, alt: Told, height: int = 300, title: str = ""
    ) -> tuple[Panel, ...]:
        """One panel per subject, with a view `draw(subject, *chosen)` for each combination of choices.

        Views of one combination share their scale across subjects.
        """
        every = product(*map(enumerate, choices))
        chosen = {"|".join(str(i) for i, _ in at): [value for _, value in at] for at in every}
        views = {one.index: {at: draw(one, *picked) for at, picked in chosen.items()} for one in self.rows.subjects}
        values: dict[str, list[float]] = {}
        for key, view in (pair for by_choice in views.values() for pair in by_choice.items()):
            levels = [level.value for level in view.levels if isinstance(level.value, float)]
            values.setdefault(key, []).extend([*figure.numbers_in([view]), *(levels if view.series else [])])
        panels, by = [], tuple(f"{name}.{i}" for i in range(len(choices)))
        for subject in self.rows.subjects:
            scaled = {key: replace(view, y=figure.value_axis(values[key], title, log=False))
                   for key, view in views[subject.index].items() if view.series}  # fmt: skip
            panels += (
                [self.named(subject, Panel(views=scaled, by=by, height=height, alt=alt(subject)))] if scaled else []
            )
        return tuple(panels)

    def named(self, subject: Subject, panel: Panel) -> Panel:
        """A panel linked to the legend entry of its subject; with several subjects its title is the label."""
        several = len(self.rows.subjects) > 1
        role = subject.role if several and subject.role not in subject.label else ""
        return replace(panel, title=subject.label if several else "", owner=role, line=subject.index)

    def tables(self, make: Callable[[Subject], DataTable]) -> list[Any]:
        """One table per subject that has rows, below its label if there are several."""
        found: list[Any] = []
        for one in self.rows.subjects:
            table = make(one)
            if table.groups[0]:
                several = len(self.rows.subjects) > 1
                found += [*([Heading(one.label, 4, css="apart")] if several else []), table]
        return found


def readings_of(keys: Iterable[LineKey]) -> list[str]:
    """The readings of lines, the simplest first."""
    return sorted({reading_of(key[4]) for key in keys}, key=lambda r: (r.count(";"), not r.startswith("fit=refit"), r))


def _inside(row: Any) -> bool:
    """Whether the frozen proxy was fitted on a window that includes this step (in-sample)."""
    return IN_SAMPLE in getattr(row, "note", "")


def points(label: str, rows: Sequence[Any], x: Sequence[float], where: Sequence[str], **look: Any) -> Series:
    """Rows as a series; a single row has whiskers, in-sample rows hollow markers."""
    if len(known(rows)) == 1:
        look |= {"size": max(look.get("size", 0.0), 6.0), "bars": "y"}
    hollow = [_inside(row) for row in rows]
    if any(hollow) and look.get("size"):
        look["hollow"] = hollow
    return figure.points(label, x, rows, where=where, **look)


def control_look(control: str) -> Look:
    hue, dash = {"normal": (2, "solid"), "random": (6, "solid"), "next": (3, "dot")}.get(control, (4, "dashdot"))
    band = {"normal": 0.26, "random": 0.3}.get(control, 0.0)
    return {"label": words.CONTROLS.get(control, control), "colour": series(hue), "band": band, "dash": dash,
            "width": 1.0 if band else 1.7}  # fmt: skip


def depth_colour(site: DrawnSite, blocks: int) -> str:
    return "@accent" if site.kind == "final" else sequence(site.layer / max(1, blocks))


def depth_look(site: DrawnSite, blocks: int) -> Look:
    """The line style of a site: colour by depth, the final norm dashed."""
    look: Look = {"label": site.name, "colour": depth_colour(site, blocks), "width": 1.5, "size": 3.5, "band": 0.0}
    return look | {"dash": "dash" if site.kind == "final" else "solid"}


def site_choice(rows: TrainingRows, sites: Sequence[DrawnSite]) -> Choice:
    return choice("Layer", [site.name for site in sites], rows.middle(sites) if sites else 0)


def reading_choice(readings: Sequence[str]) -> Choice:
    return choice("Proxy", map(reading_words, readings))


def course_words(line: Sequence[Any]) -> str:
    """Start, peak and end of a line as text."""
    first, last, peak = line[0], line[-1], max(line, key=lambda row: row.value)
    if len(line) == 1:
        return f"{number(first.value)} at step {first.step or 0:,}"
    ends = f"{number(first.value)} at step {first.step or 0:,} to {number(last.value)} at step {last.step or 0:,}"
    return f"{ends}, highest {number(peak.value)} at step {peak.step or 0:,}"


def energy_section(found: Gradients) -> Section | None:
    """The section on energy: of every layer, against controls, and over depth; None if no gradients were measured."""
    rows = found.rows
    metrics = [m for m in AGAINST if m in rows.metrics()]
    if not metrics:
        return None
    over_time = len(rows.steps) > 1
    levels = {one.model: number(c) for one in rows.subjects if (c := found.chances[one.index])}
    named = list(levels.items()) if len(set(levels.values())) > 1 else list(levels.items())[:1]
    chances = ", ".join(level + (f" for {name}" if len(named) > 1 else "") for name, level in named)
    lead = (
        "A proxy of rank {rank} is fitted on activations alone; its <em>energy</em> is the share of the gradients of "
        'other contexts that lies in its span, <span class="formula">‖GQ‖²&nbsp;/&nbsp;‖G‖²</span>. By chance it is r/d'
        + (": {chances}." if named else ".")
    )
    lead += " The axis of steps is logarithmic; step 0, the initialisation, stands apart from it." if over_time else ""
    parts: list[Any] = [Prose(text(lead, rank=found.rank, chances=chances)), Key()]
    if over_time:
        parts += [*_overview(found), *_against(found, metrics)]
    return Section("energy", "Where gradients go", [*parts, *_depth(found, metrics, alone=not over_time)], "Energy")


def _bands(found: Gradients, metrics: Sequence[str]) -> Prose:
    explanation = (
        "Around the proxy its 95&nbsp;% interval over contexts; around the controls the band that holds 95&nbsp;% of "
        "their draws. <em>Normal</em> subspaces are orthogonal to the proxy, <em>random</em> ones lie anywhere, "
        "<em>next r</em> are the largest principal components outside the proxy, and <em>permuted</em> is fitted on "
        "activations whose columns were shuffled, so that only means and variances of coordinates are left."
    )
    if any("fit=frozen" in reading for reading in readings_of(found.keys(metrics))):
        explanation += (
            " A frozen proxy has seen the first 30&nbsp;% of training: steps inside that window are in-sample "
            "and drawn hollow."
        )
    return Prose(text(explanation))


def _overview(found: Gradients) -> list[Any]:
    """Energy of every layer over training, coloured by depth, above the band of the normal control."""
    readings = found.readings([ENERGY])
    alt = partial(_tell, found, readings)
    panels = found.switched("layers", [readings], partial(_all_layers, found), alt=alt, height=320, title="energy")
    if not panels:
        return []
    lead = (
        "One line per layer. The shaded band holds the normal control of all layers: 95&nbsp;% of random subspaces "
        "orthogonal to the proxy. The dotted line is chance."
    )
    files: Look = {"files": {"energy-over-training": {}}, "most": FILE_PANELS, "columns": 4, "shared": True}
    switch = Switch("layers", (reading_choice(readings),))
    return [Heading("Every layer over training"), Prose(text(lead)), Controls(switch),
            page.Ramp("embedding", "last block", final=True), Figure(panels, layout="pairs", **files)]  # fmt: skip


def _all_layers(found: Gradients, subject: Subject, reading: str) -> Panel:
    sites, drawn = found.rows.sites([ENERGY]), []
    ends: dict[int, tuple[float, float]] = {}  # range of the bands by step
    for site in sites:
        for row in found.whole(subject, ENERGY, site, reading=reading, control="normal"):
            if row.interval:
                low, high = ends.get(row.step, row.interval)
                ends[row.step] = (min(low, row.low), max(high, row.high))
    if len(ends) > 1:
        steps = found.thin(sorted(ends))
        low_, high_ = ([brief(ends[step][i]) for step in steps] for i in (0, 1))
        look: Look = {"colour": "@s3", "low": low_, "high": high_, "band": 0.26, "width": 0, "quiet": True}
        drawn.append(Series("normal control, all layers", [*map(found.time.place, steps)], low_, **look))
    there = [(site, line) for site in sites if (line := found.line(subject, ENERGY, site, reading=reading))]
    shown = {there[i][0] for i in few(range(len(there)), 3)}
    drawn += [found.drawn(**depth_look(site, subject.blocks), line=line, named=site in shown) for site, line in there]
    return found.panel(drawn if there else (), found.levels(subject, label="chance, r/d ="))


def _tell(found: Gradients, readings: Sequence[str], subject: Subject) -> str:
    """Alternative text of the overview: start, peak and end of the energy in the middle of the model."""
    sites = found.rows.sites([ENERGY])
    site = sites[found.rows.middle(sites)] if sites else None
    line = known(found.whole(subject, ENERGY, site, reading=readings[0])) if site else []
    if not site or not line:
        return f"Gradient energy of {subject.label} over steps."
    return f"Gradient energy of {subject.label} over steps, by layer. {site.name}: {course_words(line)}."


def _against(found: Gradients, metrics: Sequence[str]) -> list[Any]:
    """One layer's energy (or share) over training against all its controls."""
    sites, readings = found.sites(metrics), found.readings(metrics)
    draw, alt = partial(_controlled, found), partial(_tell, found, readings)
    panels = found.switched("against", [metrics, sites, readings], draw, alt=alt, height=320)
    if not panels:
        return []
    entries = [found.catalogue.entry(metric) for metric in metrics]
    options = tuple(figure.SwitchOption(e.title, words.sentences(e.formula, e.description)) for e in entries)
    switch = Switch("against", (Choice("Quantity", options), site_choice(found.rows, sites), reading_choice(readings)))
    return [Heading("One layer against its controls"), _bands(found, metrics), Controls(switch),
            found.swatches(found.keys(metrics)), Figure(panels, layout="pairs"), page.Says(switch)]  # fmt: skip


def _controlled(found: Gradients, subject: Subject, metric: str, site: DrawnSite, reading: str, **how: str) -> Panel:
    lines = found.controlled(subject, metric, site, reading=reading, **how)
    return found.panel([found.drawn(**look, line=line) for look, line in lines], found.levels(subject, metric))


def _depth(found: Gradients, metrics: Sequence[str], *, alone: bool) -> list[Any]:
    """Energy over depth at a selectable step, initially the last."""
    readings, sites = found.readings([ENERGY]), found.rows.sites([ENERGY])
    steps = sorted({row.step or 0 for key in found.keys([ENERGY]) for row in found.rows.lines[key]})
    steps = few(steps, min(DEPTH_STEPS, found.detail.steps))

    @cache
    def lines(one: Subject, reading: str) -> list[tuple[DrawnSite, Look, list[Any]]]:
        return [(site, *both) for site in sites for both in found.controlled(one, ENERGY, site, reading=reading)]

    def draw(one: Subject, step: int, reading: str) -> Panel:
        final = any(key[0] == one.index and key[2].kind == "final" for key in found.keys([ENERGY]))
        depth = figure.Depth(one.blocks, final=final)
        parts: dict[str, tuple[Look, list[tuple[DrawnSite, Any]]]] = {}
        for site, look, line in lines(one, reading):
            at_step = [(site, row) for row in line if (row.step or 0) == step]
            parts.setdefault(look["label"], (look, []))[1].extend(at_step)
        drawn = []
        for look, pairs in (part for part in parts.values() if part[1]):
            x, where = [depth.place(s.layer, s.kind) for s, _ in pairs], [site.name for site, _ in pairs]
            drawn.append(points(rows=[row for _, row in pairs], x=x, where=where, **look))
        return replace(found.panel(drawn, found.levels(one, label="chance, r/d =")), x=depth.axis())

    def told(one: Subject) -> str:
        ends = [(site, last) for site in sites if (last := found.last(one, ENERGY, site))]
        values = [f"{site.name} {estimate(row.value, row.low, row.high)}" for site, row in ends]
        return f"Gradient energy of {one.label} by depth at the last step. {', '.join(values)}."

    panels = found.switched("depth", [steps, readings], draw, alt=told)
    if not panels:
        return []
    switch = Switch("depth", (choice("Step", [f"{s:,}" for s in steps], len(steps) - 1), reading_choice(readings)))
    when = (" at this step" if len(steps) == 1 else " at one step") if found.rows.dated else ""
    lead = _bands(found, metrics) if alone else Prose("The same lines and bands from the embedding to the final norm.")
    return [Heading(f"Over depth{when}"), lead, Controls(switch), found.swatches(found.keys(metrics)),
            Figure(panels, layout="pairs")]  # fmt: skip


def _measures(found: Gradients, metrics: Iterable[str]) -> list[Measure]:
    """The measures with values over steps and layers, in their default or available variants; enrichment first."""
    measures: list[Measure] = []
    for metric in found.catalogue.ordered(metrics):
        few_readings, here = (
            found.readings([metric]),
            [k for k in found.keys([metric]) if not k[3] and k[2].kind in STREAM],
        )
        plain = [v for v in {key[4] for key in here} if found.is_main(v) and "of" not in options_of(v)]
        variants = {v for v in plain if not v or reading_of(v) in few_readings}
        names = [""] if "" in variants else sorted(variants, key=lambda v: (v.count(";"), "fit=refit" not in v, v))
        entry = found.catalogue.entry(metric)
        for variant in names:
            read = reading_words(reading_of(variant))
            label = f"{entry.title} · {read}" if len(names) > 1 else entry.title
            measures.append(Measure(metric, variant, label, words.sentences(entry.formula, entry.description)))
    if len(measures) > found.detail.measures:
        found.left_out["measures"] = f"{found.detail.measures} of {len(measures)} measures"
    return sorted(measures[: found.detail.measures], key=lambda m: m.metric != ENRICHMENT)


def map_section(found: Gradients) -> Section | None:
    """The section of maps of gradient metrics, steps by layers."""
    rows = found.rows
    measures = _measures(found, {*TANGENT, "amplification"} & rows.metrics())
    if not measures or len(rows.steps) < 2:
        return None
    maps = {one.index: [_cells(found, one, m) for m in measures] for one in rows.subjects}
    panels = []
    for one in rows.subjects:
        views = {}
        for i, (steps, sites, z) in enumerate(maps[one.index]):
            values = [v for of_subject in maps.values() for row in of_subject[i][2] for v in row if v is not None]
            if any(v is not None for row in z for v in row):
                views[str(i)] = step_map(steps, sites, z, (min(values), max(values)), measures[i].label)
        most = max(len(sites) for _, sites, _ in maps[one.index])
        panels += [found.named(one, map_panel(views, "map.0", one.label, most))] if views else []
    if not panels:
        return None
    lead = "Every layer at every measured step."
    lead += " Maps of one measure share their colour scale." if len(panels) > 1 else ""
    lead += " Columns are measured steps, not evenly spaced in time."
    files: Look = {"files": {"enrichment-map": {}} if measures[0].metric == ENRICHMENT else {}, "each": True}
    switch = Switch("map", (measure_choice(measures),))
    drawn = Figure(tuple(panels), layout="pairs", most=FILE_PANELS, **files)
    parts = [Prose(lead), Key(), Controls(switch), drawn, page.Says(switch)]
    return Section("maps", "Gradients, steps by layers", parts, "Gradients by layers")


def map_panel(views: dict[str, Panel], by: str, label: str, most: int) -> Panel:
    """The panel of maps of one subject by measure, with the height for `most` sites."""
    alt = f"Map of steps by layers of {label}; the table below holds its numbers."
    return Panel(views=views, by=(by,), height=max(220, min(420, 90 + 19 * most)), alt=alt)


def _cells(found: Gradients, subject: Subject, measure: Measure) -> tuple[list[int], list[DrawnSite], list[list[Any]]]:
    lines = {site: found.thin(line) for site in found.rows.sites([measure.metric])
             if (line := found.rows.line(subject, measure.metric, site, measure.variant))}  # fmt: skip
    steps = sorted({row.step or 0 for line in lines.values() for row in line})
    cells = {site: {row.step or 0: brief(row.value) for row in line} for site, line in lines.items()}
    return steps, list(lines), [[cells[site].get(step) for step in steps] for site in lines]


def step_map(
    steps: Sequence[int], sites: Sequence[DrawnSite], z: Any, ends: tuple[float, float], label: str, **more: Any
) -> Panel:
    """A heat map of layers by steps; cells without a value stay empty."""
    across, down = words.strided(len(steps), 8), words.strided(len(sites), 14)
    x = Axis("step", ticks=([float(i) for i in across], [words.step_words(steps[i]) for i in across]))
    y = Axis("block", ticks=([float(i) for i in down], [sites[i].short for i in down]))
    # non-numeric names: plotly would place a tick at position 8 in the column named 8
    names = [f"step {step:,}" for step in steps]
    return Panel(x, y, grid=figure.Grid(z, names, [site.name for site in sites], ends=ends, label=label, **more))


# -- embeddings and weights --------------------------------------------------------------------------------------------


def elsewhere_section(found: Gradients) -> Section | None:
    """The section on gradients of embeddings and weights, and updates of embeddings, against controls over training."""
    keys = [key for key in found.keys([ENERGY]) if "of" in options_of(key[4]) and not key[3]]
    order = {of: i for i, of in enumerate(words.SOURCES)}
    places = sorted(
        {(options_of(key[4])["of"], key[2]) for key in keys}, key=lambda p: (order.get(p[0], len(order)), p[1])
    )
    if not places:
        return None
    readings = found.readings_in(keys)
    lead = (
        "The same question for other gradients: those of the embedding table in its two roles, what the optimiser made "
        "of them (the <em>update</em> of each row between measured steps), and weight gradients of a linear map "
        "against a proxy fitted on that map's own input."
    )
    names = [place_words(of, site) for of, site in places]

    def draw(one: Subject, place: tuple[str, DrawnSite], reading: str) -> Panel:
        return _controlled(found, one, ENERGY, place[1], reading, of=place[0])

    def table(one: Subject) -> DataTable:
        body = []
        for name, (of, site) in zip(names, places, strict=True):
            ends = [found.last(one, ENERGY, site, reading=readings[0], of=of, **control)
                    for control in ({}, *({"control": name} for name in words.CONTROLS))]  # fmt: skip
            cells = [estimate(row.value, row.low, row.high) if row else "" for row in ends]
            body += [[TableCell(name, head=True), *cells]] if any(cells) else []
        heads = ["Energy of", found.proxy_look(found.proxy)["label"], *words.CONTROLS.values()]
        return DataTable([heads], [body], f"Embeddings and weights, {one.label}", "plain sites", one.index)

    if len(found.rows.steps) < 2:
        parts = [Prose(text(lead)), Key(), *found.tables(table)]
    else:
        alt = f"Energy over steps, {{}}: {words.listed(names[:4])}."
        panels = found.switched(
            "elsewhere", [places, readings], draw, alt=lambda one: alt.format(one.label), title="energy"
        )
        if not panels:
            return None
        switch = Switch("elsewhere", (choice("Of", names), reading_choice(readings)))
        parts = [Prose(text(lead + " Lines and bands as above.")), Key(), Controls(switch), found.swatches(keys),
                 Figure(panels, layout="pairs")]  # fmt: skip
    return Section("elsewhere", "Embeddings and weights", parts, "Embeddings, weights")


def place_words(of: str, site: DrawnSite) -> str:
    """The kind of gradient and its site as text.

    >>> place_words("weight", DrawnSite.of(3, "mlp_in")), place_words("update", DrawnSite.of(0, "embed"))
    ('Weight gradients, block 3 · MLP input', 'Embedding updates, weight decay removed')
    """
    named = {"embed": "", **{kind: f", block {site.layer} · {name}" for kind, name in words.KINDS.items()}}
    return words.SOURCES.get(of, of) + named.get(site.kind, f", {site.name}")
