"""Where gradients go: energy over training against controls and over depth, maps, embeddings and weights.

A *reading* is how the proxy was fitted and the energies averaged: every option of a variant that does not say which
proxy, rank, control or kind of gradient it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from anisoscope.results.query import options_of, variant_name
from anisoscope.view.figure import (
    Axis,
    Choice,
    Depth,
    Figure,
    Grid,
    Level,
    Panel,
    Series,
    Switch,
    SwitchOption,
    Time,
    brief,
    choice,
    column,
    numbers_in,
    sequence,
    series,
    value_axis,
)
from anisoscope.view.page import (
    CHANCE,
    Controls,
    DataTable,
    Heading,
    Key,
    Prose,
    Ramp,
    Says,
    Section,
    Swatch,
    Swatches,
    TableCell,
    text,
)
from anisoscope.view.subjects import STREAM, DrawnSite, Subject, TrainingRows, known
from anisoscope.view.words import (
    CONTROLS,
    KINDS,
    MOVEMENT,
    PROXIES,
    SOURCES,
    TANGENT,
    Catalogue,
    Entry,
    estimate,
    few,
    listed,
    number,
    reading_of,
    reading_words,
    sentences,
    step_words,
    strided,
    variant_words,
)

ENERGY = "gradient_energy"
AGAINST = (ENERGY, "gradient_share", "gradient_isoscore_gain", "amplification")
DEPTH_STEPS = 14
BANDS = ("random", "normal")
FILE_PANELS = 4
IN_SAMPLE = "in-sample"
LineKey = tuple[int, str, DrawnSite, str, str]  # subject, metric, site, group, variant
Look = dict[str, Any]


@dataclass(frozen=True)
class Detail:
    """How much of a table the page carries: at most so many steps, sites, readings and measures."""

    steps: int
    sites: int
    readings: int
    measures: int


# the first that fits is used
DETAILS = (
    Detail(64, 64, 6, 48), Detail(48, 24, 4, 40), Detail(40, 16, 3, 32), Detail(32, 14, 2, 24), Detail(28, 9, 2, 20),
    Detail(20, 8, 1, 16), Detail(16, 6, 1, 12), Detail(8, 3, 1, 6),
)  # fmt: skip


class Gradients:
    """Lines of gradient metrics by subject, place and reading, in as much detail as a page carries."""

    def __init__(self, rows: TrainingRows, catalogue: Catalogue, detail: Detail = DETAILS[0]) -> None:
        self.rows, self.catalogue, self.detail = rows, catalogue, detail
        self.time = Time.of(rows.steps)
        self.left_out: dict[str, str] = {}
        self.rank, self.proxy = self._main("rank", ("16",)), self._main("proxy", ("semi_nmf", "pca"))
        self._chances = {subject.index: self._chance(subject) for subject in rows.subjects}

    def _main(self, option: str, preferred: Sequence[str]) -> str:
        """The value of an option that most lines have, or one of those that are preferred."""
        keys = self.keys([ENERGY]) or self.keys([*TANGENT, "amplification"])
        found = [options_of(key[4]) for key in keys]
        counts = Counter(options[option] for options in found if option in options and "of" not in options)
        best = counts.most_common(1)[0][0] if counts else preferred[0]
        return next((value for value in preferred if value in counts), best)

    def keys(self, metrics: Iterable[str]) -> list[LineKey]:
        return [key for metric in dict.fromkeys(metrics) for key in self.rows.keys.get(metric, [])]

    def whole(
        self,
        subject: Subject,
        metric: str,
        site: DrawnSite,
        *,
        reading: str = "fit=refit",
        group: str = "",
        proxy: str = "",
        **also: str,
    ) -> list[Any]:
        """A line: of the main proxy at the main rank, unless another or a control is named."""
        options = {**options_of(reading), "proxy": proxy or self.proxy, "rank": self.rank, **also}
        return self.rows.line(subject, metric, site, variant_name(options), group=group)

    def thin(self, line: Sequence[Any]) -> list[Any]:
        """A line with as many steps as the page carries."""
        if len(line) > self.detail.steps:
            self.left_out["steps"] = f"at most {self.detail.steps} steps"
        return [line[i] for i in few(range(len(line)), self.detail.steps)]

    def line(self, subject: Subject, metric: str, site: DrawnSite, **how: Any) -> list[Any]:
        return self.thin(self.whole(subject, metric, site, **how))

    def sites(self, metrics: Iterable[str]) -> list[DrawnSite]:
        """Sites to choose from: all of them, or an even choice where they would not fit."""
        found = self.rows.sites(metrics)
        if len(found) > self.detail.sites:
            self.left_out["layers"] = f"{self.detail.sites} of {len(found)} layers"
        return [found[i] for i in few(range(len(found)), self.detail.sites)]

    def every_reading(self, metrics: Iterable[str]) -> list[str]:
        """Ways in which these metrics were read off, the plainest first."""
        found = {reading_of(key[4]) for key in self.keys(metrics)}
        return sorted(found, key=lambda r: (r.count(";"), not r.startswith("fit=refit"), r))

    def readings(self, metrics: Iterable[str]) -> list[str]:
        found = self.every_reading(metrics)
        if len(found) > self.detail.readings:
            self.left_out["readings"] = f"{self.detail.readings} of {len(found)} ways to fit and average"
        return found[: self.detail.readings]

    def readings_in(self, metric: str, keys: Sequence[LineKey]) -> list[str]:
        """Ways in which these lines of a metric were read off."""
        there = {reading_of(key[4]) for key in keys}
        return [reading for reading in self.every_reading([metric]) if reading in there][: self.detail.readings]

    def proxies(self, metric: str) -> list[str]:
        """Proxies that a metric was measured with, the main one last: it is drawn on top."""
        found = {options_of(key[4]).get("proxy", "") for key in self.keys([metric])} - {"", self.proxy}
        return [*sorted(found, key=lambda proxy: (proxy == "pca", proxy)), self.proxy]

    def chance(self, subject: Subject) -> float | None:
        """r/d: the share of energy in a random subspace, from the table, or from the model's recorded width."""
        return self._chances[subject.index]

    def _chance(self, subject: Subject) -> float | None:
        ratios = []
        for key in self.keys(["gradient_enrichment"]):
            if key[0] == subject.index and options_of(key[4]).get("rank") == self.rank:
                energy = {row.step: row.value for row in self.rows.lines.get((key[0], ENERGY, *key[2:]), [])}
                line = known(self.rows.lines[key])
                ratios += [energy[row.step] / row.value for row in line if row.value and energy.get(row.step)]
        if ratios:
            return median(ratios)
        width = self.rows.width(subject)
        return int(self.rank) / width if width and self.rank.isdigit() else None

    def level_of(self, subject: Subject, metric: str) -> float | None:
        """The level that a metric has when gradients know nothing of the proxy."""
        share = self.chance(subject)
        if metric == "gradient_isoscore_gain":
            return 0.0
        if metric == "gradient_share" and share and self.rank.isdigit():
            return share * share * (int(self.rank) + 1) / int(self.rank)
        return share

    def entry(self, metric: str) -> Entry:
        return self.catalogue.entry(metric)

    # drawing

    def drawn(self, label: str, line: Sequence[Any], **look: Any) -> Series:
        """A line over steps."""
        x = [self.time.place(row.step or 0) for row in line]
        where = [f"step {row.step or 0:,}" + (" · in-sample" if _inside(row) else "") for row in line]
        return points(label, line, x, where, **look)

    def controlled(self, subject: Subject, metric: str, site: DrawnSite, **how: Any) -> list[tuple[Look, list[Any]]]:
        """The proxy's line last, over its controls and the other proxies; nothing where it was not measured."""
        found = [(control_look(name), self.line(subject, metric, site, control=name, **how))
                 for name in (*BANDS, "permuted", "next")]  # fmt: skip
        found += [(self.proxy_look(name), self.line(subject, metric, site, proxy=name, **how))
                  for name in self.proxies(metric)]  # fmt: skip
        there = [(look, line) for look, line in found if line]
        return there if any(look["label"] == self.proxy_look(self.proxy)["label"] for look, _ in there) else []

    def proxy_look(self, proxy: str) -> Look:
        label = PROXIES.get(proxy, proxy)
        if proxy == self.proxy:
            return {"label": label, "colour": "@s1", "band": 0.18, "width": 2.2, "size": 5.0}
        hue = {"pca": 1, "svd": 5, "ica": 7, "kmeans": 3, "random": 6}.get(proxy, 4)
        return {"label": label, "colour": series(hue), "band": 0.0, "width": 1.7,
                "dash": "dash" if proxy == "pca" else "longdash"}  # fmt: skip

    def swatches(self, keys: Sequence[LineKey]) -> Swatches:
        """What the lines of a figure with controls are."""
        found = [options_of(key[4]) for key in keys]
        proxies, controls = ({options.get(name) for options in found} for name in ("proxy", "control"))
        looks = [self.proxy_look(p) for p in reversed(self.proxies(ENERGY)) if p in proxies]
        looks += [control_look(c) for c in ("normal", "random", "next", "permuted") if c in controls]
        return Swatches([*map(swatch, looks), CHANCE])

    def paired(
        self, views: Mapping[int, Mapping[str, Panel]], by: Sequence[str], *, told: Callable[[Subject], str],
        height: int = 300, title: str = "",
    ) -> tuple[Panel, ...]:  # fmt: skip
        """A panel for each subject, switched together, on the same scale, so that they can be compared."""
        values: dict[str, list[float]] = {}
        for mine in views.values():
            for key, view in mine.items():
                levels = [level.value for level in view.levels if isinstance(level.value, float)]
                values.setdefault(key, []).extend([*numbers_in([view]), *(levels if view.series else [])])
        panels = []
        for subject in self.rows.subjects:
            own = {key: replace(view, y=value_axis(values[key], title, log=False))
                   for key, view in views.get(subject.index, {}).items() if view.series}  # fmt: skip
            if own:
                panels.append(self.named(subject, Panel(views=own, by=tuple(by), height=height, alt=told(subject))))
        return tuple(panels)

    def named(self, subject: Subject, panel: Panel) -> Panel:
        """A panel of one subject, which goes when that is hidden; its name is the title where there are several."""
        several = len(self.rows.subjects) > 1
        role = subject.role if several and subject.role not in subject.label else ""
        return replace(panel, title=subject.label if several else "", owner=role, line=subject.index)


def _inside(row: Any) -> bool:
    """Whether the frozen proxy was fitted on a window that holds this step."""
    return IN_SAMPLE in getattr(row, "note", "")


def points(label: str, rows: Sequence[Any], x: Sequence[float], where: Sequence[str], **look: Any) -> Series:
    """Rows as a series; a single one with whiskers, in-sample ones hollow."""
    there = known(rows)
    ends: dict[str, Any] = {name: column(rows, name) for name in ("low", "high")}
    if all(end is None for end in ends["low"]):
        ends = {}
    if len(there) == 1:
        look |= {"size": max(look.get("size", 0.0), 6.0), "bars": "y"}
    hollow = [_inside(row) for row in rows]
    if any(hollow) and look.get("size"):
        look["hollow"] = hollow
    return Series(label, x, column(rows), where=where, **ends, **look)


def control_look(control: str) -> Look:
    hue, dash = {"normal": (2, "solid"), "random": (6, "solid"), "next": (3, "dot")}.get(control, (4, "dashdot"))
    band = {"normal": 0.26, "random": 0.3}.get(control, 0.0)
    return {"label": CONTROLS.get(control, control), "colour": series(hue), "band": band, "dash": dash,
            "width": 1.0 if band else 1.7}  # fmt: skip


def depth_look(site: DrawnSite, blocks: int) -> Look:
    """Colour by depth; the final norm dashed."""
    final = site.kind == "final"
    colour = "@accent" if final else sequence(site.layer / max(1, blocks))
    return {"label": site.name, "colour": colour, "dash": "dash" if final else "solid", "width": 1.5, "size": 3.5,
            "band": 0.0}  # fmt: skip


def swatch(look: Look) -> Swatch:
    return Swatch(look["label"], look["colour"], look.get("dash", "solid"), bool(look.get("band")))


def site_choice(rows: TrainingRows, sites: Sequence[DrawnSite]) -> Choice:
    return choice("Layer", [site.name for site in sites], rows.middle(sites) if sites else 0)


def reading_choice(readings: Sequence[str]) -> Choice:
    return choice("Proxy", map(reading_words, readings))


def course_words(line: Sequence[Any]) -> str:
    """Where a line starts, peaks and ends."""
    first, last, peak = line[0], line[-1], max(line, key=lambda row: row.value)
    if len(line) == 1:
        return f"{number(first.value)} at step {first.step or 0:,}"
    ends = f"{number(first.value)} at step {first.step or 0:,} to {number(last.value)} at step {last.step or 0:,}"
    return f"{ends}, highest {number(peak.value)} at step {peak.step or 0:,}"


def _levels(value: float | None, label: str = "chance") -> tuple[Level, ...]:
    return () if value is None else (Level(value, label, colour="@ink"),)


# energy


def energy_section(found: Gradients) -> Section | None:
    """Energy of every layer, of one against its controls, and over depth; none where no gradients were measured."""
    rows = found.rows
    metrics = [m for m in AGAINST if m in rows.metrics()]
    if not metrics:
        return None
    over_time = len(rows.steps) > 1
    levels = {one.model: number(c) for one in rows.subjects if (c := found.chance(one))}
    told = list(levels.items()) if len(set(levels.values())) > 1 else list(levels.items())[:1]
    chances = ", ".join(level + (f" for {name}" if len(told) > 1 else "") for name, level in told)
    lead = (
        "A proxy of rank {rank} is fitted on activations alone; its <em>energy</em> is the share of the gradients of "
        'other contexts that lies in its span, <span class="formula">‖GQ‖²&nbsp;/&nbsp;‖G‖²</span>. By chance it is r/d'
        + (": {chances}." if told else ".")
    )
    lead += " The axis of steps is logarithmic; step 0, the initialisation, stands apart from it." if over_time else ""
    parts: list[Any] = [Prose(text(lead, rank=found.rank, chances=chances)), Key()]
    if over_time:
        parts += [*_overview(found), *_against(found, metrics)]
    return Section("energy", "Where gradients go", [*parts, *_depth(found, metrics, alone=not over_time)], "Energy")


def _bands(found: Gradients, metrics: Sequence[str]) -> Prose:
    frozen = any("fit=frozen" in reading for reading in found.every_reading(metrics))
    words = (
        "Around the proxy its 95&nbsp;% interval over contexts; around the controls the band that holds 95&nbsp;% of "
        "their draws. <em>Normal</em> subspaces are orthogonal to the proxy, <em>random</em> ones lie anywhere, "
        "<em>next r</em> are the largest principal components outside the proxy, and <em>permuted</em> is fitted on "
        "activations whose columns were shuffled, so that only means and variances of coordinates are left."
    )
    more = (
        " A frozen proxy has seen the first 30&nbsp;% of training: steps inside that window are in-sample "
        "and drawn hollow."
    )
    return Prose(text(words + (more if frozen else "")))


def _overview(found: Gradients) -> list[Any]:
    """Energy of every layer over training, coloured by depth, above the band of the normal control."""
    readings = found.readings([ENERGY])
    views = {
        one.index: {str(i): _all_layers(found, one, r) for i, r in enumerate(readings)} for one in found.rows.subjects
    }
    switch = Switch("layers", (reading_choice(readings),))
    panels = found.paired(
        views, ["layers.0"], told=lambda one: _tell(found, one, readings[0]), height=320, title="energy"
    )
    if not panels:
        return []
    words = (
        "One line per layer. The shaded band holds the normal control of all layers: 95&nbsp;% of random subspaces "
        "orthogonal to the proxy. The dotted line is chance."
    )
    figure = Figure(
        panels, layout="pairs", files={"energy-over-training": {}}, most=FILE_PANELS, columns=4, shared=True
    )
    return [Heading("Every layer over training"), Prose(text(words)), Controls(switch),
            Ramp("embedding", "last block", final=True), figure]  # fmt: skip


def _all_layers(found: Gradients, subject: Subject, reading: str) -> Panel:
    sites = found.rows.sites([ENERGY])
    normal = [found.whole(subject, ENERGY, site, reading=reading, control="normal") for site in sites]
    drawn = []
    steps = _envelope(normal)
    if len(steps) > 1:
        line = found.thin(sorted(steps))
        ends = [[brief(steps[step][i]) for step in line] for i in (0, 1)]
        drawn.append(
            Series(
                "normal control, all layers",
                [found.time.place(step) for step in line],
                ends[0],
                "@s3",
                ends[0],
                ends[1],
                band=0.26,
                width=0,
                quiet=True,
            )
        )
    lines = [(site, found.line(subject, ENERGY, site, reading=reading)) for site in sites]
    there = [(site, line) for site, line in lines if line]
    shown = {there[i][0] for i in few(range(len(there)), 3)}
    drawn += [found.drawn(**depth_look(site, subject.blocks), line=line, named=site in shown) for site, line in there]
    levels = _levels(found.chance(subject), "chance, r/d =") if there else ()
    return Panel(found.time.axis(), series=tuple(drawn) if there else (), levels=levels)


def _envelope(lines: Iterable[Sequence[Any]]) -> dict[int, tuple[float, float]]:
    """From the lowest end of the bands to the highest, step by step."""
    steps: dict[int, tuple[float, float]] = {}
    for row in (row for line in lines for row in line if row.interval):
        low, high = steps.get(row.step, row.interval)
        steps[row.step] = (min(low, row.low), max(high, row.high))
    return steps


def _tell(found: Gradients, subject: Subject, reading: str) -> str:
    """The overview in words: where energy starts, peaks and ends in the middle of the model."""
    sites = found.rows.sites([ENERGY])
    site = sites[found.rows.middle(sites)] if sites else None
    line = known(found.whole(subject, ENERGY, site, reading=reading)) if site else []
    if not site or not line:
        return f"Gradient energy of {subject.label} over steps."
    return f"Gradient energy of {subject.label} over steps, by layer. {site.name}: {course_words(line)}."


def _against(found: Gradients, metrics: Sequence[str]) -> list[Any]:
    """One layer's energy (or share) over training against all its controls."""
    sites, readings = found.sites(metrics), found.readings(metrics)
    entries = [found.entry(metric) for metric in metrics]
    quantity = Choice("Quantity", tuple(SwitchOption(e.title, sentences(e.formula, e.description)) for e in entries))
    switch = Switch("against", (quantity, site_choice(found.rows, sites), reading_choice(readings)))
    views: dict[int, dict[str, Panel]] = {one.index: {} for one in found.rows.subjects}
    for one in found.rows.subjects:
        for i, metric in enumerate(metrics):
            for j, site in enumerate(sites):
                for k, reading in enumerate(readings):
                    lines = found.controlled(one, metric, site, reading=reading)
                    views[one.index][f"{i}|{j}|{k}"] = _controlled(found, lines, found.level_of(one, metric))
    by = ["against.0", "against.1", "against.2"]
    panels = found.paired(views, by, told=lambda one: _tell(found, one, readings[0]), height=320)
    if not panels:
        return []
    return [Heading("One layer against its controls"), _bands(found, metrics), Controls(switch),
            found.swatches(found.keys(metrics)), Figure(panels, layout="pairs"), Says(switch)]  # fmt: skip


def _controlled(found: Gradients, lines: Sequence[tuple[Look, list[Any]]], level: float | None) -> Panel:
    drawn = tuple(found.drawn(**look, line=line) for look, line in lines)
    return Panel(found.time.axis(), series=drawn, levels=_levels(level) if drawn else ())


def _depth(found: Gradients, metrics: Sequence[str], *, alone: bool) -> list[Any]:
    """Energy over depth at a step that the reader chooses, the last at first."""
    readings = found.readings([ENERGY])
    steps = sorted({row.step or 0 for key in found.keys([ENERGY]) for row in found.rows.lines[key]})
    steps = few(steps, min(DEPTH_STEPS, found.detail.steps))
    views: dict[int, dict[str, Panel]] = {one.index: {} for one in found.rows.subjects}
    for one in found.rows.subjects:
        for j, reading in enumerate(readings):
            for i, view in enumerate(_at_steps(found, one, steps, reading)):
                views[one.index][f"{i}|{j}"] = view
    step = choice("Step", [f"{step:,}" for step in steps], len(steps) - 1)
    switch = Switch("depth", (step, reading_choice(readings)))
    panels = found.paired(views, ["depth.0", "depth.1"], told=lambda one: _tell_depth(found, one))
    if not panels:
        return []
    when = (" at this step" if len(steps) == 1 else " at one step") if found.rows.dated else ""
    lead = _bands(found, metrics) if alone else Prose("The same lines and bands from the embedding to the final norm.")
    return [Heading(f"Over depth{when}"), lead, Controls(switch), found.swatches(found.keys(metrics)),
            Figure(panels, layout="pairs")]  # fmt: skip


def _at_steps(found: Gradients, subject: Subject, steps: Sequence[int], reading: str) -> list[Panel]:
    """The lines of all sites at each of some steps."""
    final = any(key[0] == subject.index and key[2].kind == "final" for key in found.keys([ENERGY]))
    depth = Depth(subject.blocks, final=final)
    lines = {site: found.controlled(subject, ENERGY, site, reading=reading) for site in found.rows.sites([ENERGY])}
    panels = []
    for step in steps:
        parts: dict[str, tuple[Look, list[tuple[DrawnSite, Any]]]] = {}
        for site, both in lines.items():
            for look, line in both:
                mine = [(site, row) for row in line if (row.step or 0) == step]
                parts.setdefault(look["label"], (look, []))[1].extend(mine)
        drawn = []
        for look, pairs in parts.values():
            x = [depth.place(site.layer, site.kind) for site, _ in pairs]
            if pairs:
                drawn.append(
                    points(rows=[row for _, row in pairs], x=x, where=[site.name for site, _ in pairs], **look)
                )
        levels = _levels(found.chance(subject), "chance, r/d =") if drawn else ()
        panels.append(Panel(depth.axis(), series=tuple(drawn), levels=levels))
    return panels


def _tell_depth(found: Gradients, subject: Subject) -> str:
    """Energy over depth in words, at the last step."""
    told = []
    for site in found.rows.sites([ENERGY]):
        line = known(found.whole(subject, ENERGY, site))
        told += [f"{site.name} {estimate(line[-1].value, line[-1].low, line[-1].high)}"] if line else []
    return f"Gradient energy of {subject.label} by depth at the last step. {', '.join(told)}."


# maps


@dataclass(frozen=True)
class Measure:
    """A metric in one variant, as a selection offers it."""

    metric: str
    variant: str
    label: str
    says: str


def _measures(found: Gradients, metrics: Iterable[str]) -> list[Measure]:
    """Metrics over steps and layers: in their default variant, or in those that they have; enrichment first."""
    measures: list[Measure] = []
    for metric in found.catalogue.ordered(metrics):
        keys = [key for key in found.keys([metric]) if not key[3] and key[2].kind in STREAM]
        variants = {key[4] for key in keys if _is_plain(found, metric, key[4])}
        names = [""] if "" in variants else sorted(variants, key=lambda v: (v.count(";"), "fit=refit" not in v, v))
        entry = found.entry(metric)
        for variant in names:
            words = (
                reading_words(reading_of(variant)) if metric in (*TANGENT, "amplification") else variant_words(variant)
            )
            label = f"{entry.title} · {words}" if len(names) > 1 and words else entry.title
            measures.append(Measure(metric, variant, label, sentences(entry.formula, entry.description)))
    if len(measures) > found.detail.measures:
        found.left_out["measures"] = f"{found.detail.measures} of {len(measures)} measures"
    return sorted(measures[: found.detail.measures], key=lambda m: m.metric != "gradient_enrichment")


def _is_plain(found: Gradients, metric: str, variant: str) -> bool:
    """Whether a variant is of the main proxy and rank, and of no control."""
    options = options_of(variant)
    if metric not in (*TANGENT, *MOVEMENT) or not options:
        return True
    own = options.get("proxy", found.proxy) == found.proxy and options.get("rank", found.rank) == found.rank
    few_enough = reading_of(variant) in found.readings([metric])
    return own and few_enough and "control" not in options and "of" not in options


def map_section(found: Gradients) -> Section | None:
    """Steps by layers, for what is measured on gradients; the views over training have the rest."""
    rows = found.rows
    measures = _measures(found, {*TANGENT, "amplification"} & rows.metrics())
    if not measures or len(rows.steps) < 2:
        return None
    switch = Switch("map", (Choice("Measure", tuple(SwitchOption(m.label, m.says) for m in measures)),))
    maps = {one.index: [_cells(found, one, m) for m in measures] for one in rows.subjects}
    panels = []
    for one in rows.subjects:
        views = {}
        for i, (steps, sites, z) in enumerate(maps[one.index]):
            values = [v for own in maps.values() for row in own[i][2] for v in row if v is not None]
            if any(v is not None for row in z for v in row):
                views[str(i)] = step_map(steps, sites, z, (min(values), max(values)), measures[i].label)
        height = max(220, min(420, 90 + 19 * max(len(sites) for _, sites, _ in maps[one.index])))
        alt = f"Map of steps by layers of {one.label}; the table below holds its numbers."
        panels += [found.named(one, Panel(views=views, by=("map.0",), height=height, alt=alt))] if views else []
    if not panels:
        return None
    words = "Every layer at every measured step."
    words += " Maps of one measure share their colour scale." if len(panels) > 1 else ""
    words += " Columns are measured steps, not evenly spaced in time."
    enriched = measures[0].metric == "gradient_enrichment"
    figure = Figure(tuple(panels), layout="pairs", files={"enrichment-map": {}} if enriched else {}, each=True,
                    most=FILE_PANELS)  # fmt: skip
    parts = [Prose(words), Key(), Controls(switch), figure, Says(switch)]
    return Section("maps", "Gradients, steps by layers", parts, "Gradients by layers")


def _cells(
    found: Gradients, subject: Subject, measure: Measure
) -> tuple[list[int], list[DrawnSite], list[list[float | None]]]:
    lines = {site: found.thin(line) for site in found.rows.sites([measure.metric])
             if (line := found.rows.line(subject, measure.metric, site, measure.variant))}  # fmt: skip
    steps = sorted({row.step or 0 for line in lines.values() for row in line})
    cells = {site: {row.step or 0: brief(row.value) for row in line} for site, line in lines.items()}
    return steps, list(lines), [[cells[site].get(step) for step in steps] for site in lines]


def step_map(
    steps: Sequence[int],
    sites: Sequence[DrawnSite],
    z: Any,
    ends: tuple[float | None, float | None],
    label: str,
    **more: Any,
) -> Panel:
    """A map of layers by steps; cells without a value stay empty."""
    across, down = strided(len(steps), 8), strided(len(sites), 14)
    x = Axis("step", ticks=([float(i) for i in across], [step_words(steps[i]) for i in across]))
    y = Axis("block", ticks=([float(i) for i in down], [sites[i].short for i in down]))
    # names that are no numbers: plotly would take a tick at place 8 for the column named 8
    names = [f"step {step:,}" for step in steps]
    return Panel(x, y, grid=Grid(z, names, [site.name for site in sites], ends=ends, label=label, **more))


# embeddings and weights


def elsewhere_section(found: Gradients) -> Section | None:
    """Gradients of embeddings and weights, and updates of embeddings, against the controls over training."""
    keys = [key for key in found.keys([ENERGY]) if "of" in options_of(key[4]) and not key[3]]
    places = sorted({(options_of(key[4])["of"], key[2]) for key in keys}, key=_place_order)
    if not places:
        return None
    readings = found.readings_in(ENERGY, keys)
    lead = (
        "The same question for other gradients: those of the embedding table in its two roles, what the optimiser made "
        "of them (the <em>update</em> of each row between measured steps), and weight gradients of a linear map "
        "against a proxy fitted on that map's own input."
    )
    if len(found.rows.steps) < 2:
        tables = [part for one in found.rows.subjects for part in _place_table(found, one, places, readings[0])]
        return Section(
            "elsewhere", "Embeddings and weights", [Prose(text(lead)), Key(), *tables], "Embeddings, weights"
        )
    names = [place_words(of, site) for of, site in places]
    switch = Switch("elsewhere", (choice("Of", names), reading_choice(readings)))
    views: dict[int, dict[str, Panel]] = {one.index: {} for one in found.rows.subjects}
    for one in found.rows.subjects:
        for i, (of, site) in enumerate(places):
            for j, reading in enumerate(readings):
                lines = found.controlled(one, ENERGY, site, reading=reading, of=of)
                views[one.index][f"{i}|{j}"] = _controlled(found, lines, found.chance(one))
    told = f"Energy over steps, {{}}: {listed(names[:4])}."
    panels = found.paired(
        views, ["elsewhere.0", "elsewhere.1"], told=lambda one: told.format(one.label), title="energy"
    )
    if not panels:
        return None
    parts = [Prose(text(lead + " Lines and bands as above.")), Key(), Controls(switch), found.swatches(keys),
             Figure(panels, layout="pairs")]  # fmt: skip
    return Section("elsewhere", "Embeddings and weights", parts, "Embeddings, weights")


def _place_table(
    found: Gradients, subject: Subject, places: Sequence[tuple[str, DrawnSite]], reading: str
) -> list[Any]:
    """Energies against the controls where there is one step only."""
    body = []
    for of, site in places:
        lines = [found.whole(subject, ENERGY, site, reading=reading, of=of)]
        lines += [found.whole(subject, ENERGY, site, reading=reading, of=of, control=name) for name in CONTROLS]
        last = [known(line)[-1:] for line in lines]
        cells = [estimate(row[0].value, row[0].low, row[0].high) if row else "" for row in last]
        body += [[TableCell(place_words(of, site), head=True), *cells]] if any(cells) else []
    heads = ["Energy of", found.proxy_look(found.proxy)["label"], *CONTROLS.values()]
    several = len(found.rows.subjects) > 1
    table = DataTable([heads], [body], f"Embeddings and weights, {subject.label}", "plain sites", subject.index)
    return [*([Heading(subject.label, 4, css="apart")] if several else []), table]


def _place_order(place: tuple[str, DrawnSite]) -> tuple[int, DrawnSite]:
    return list(SOURCES).index(place[0]) if place[0] in SOURCES else len(SOURCES), place[1]


def place_words(of: str, site: DrawnSite) -> str:
    """What is measured, and where.

    >>> place_words("weight", DrawnSite.of(3, "mlp_in")), place_words("update", DrawnSite.of(0, "embed"))
    ('Weight gradients, block 3 · MLP input', 'Embedding updates, weight decay removed')
    """
    words = SOURCES.get(of, of)
    if site.kind == "embed":
        return words
    if site.kind in KINDS:
        return f"{words}, block {site.layer} · {KINDS[site.kind]}"
    return f"{words}, {site.name}"
