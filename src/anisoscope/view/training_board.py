"""What the figures of the training page share: views that a reader can switch between, and lines with controls.

A *switch* is a row of selections above some figures; a *view* of a figure is what it shows for one combination.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from anisoscope.view.catalogue import Catalogue, Entry
from anisoscope.view.charts import Chart
from anisoscope.view.palette import Tokens
from anisoscope.view.traces import Spec
from anisoscope.view.training import MOVEMENT, TANGENT, History, Key, Learner, Line, Site, options_of, reading_of
from anisoscope.view.training_traces import Look, Time, value_range, values_in
from anisoscope.view.training_words import CONTROLS, PROXIES, entry_of, few, ordered, reading_words, variant_words

Views = dict[str, list[Spec]]
BANDS = ("random", "normal")


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


@dataclass(frozen=True)
class Option:
    """One thing to choose, and what to say of it once it is chosen."""

    label: str
    says: str = ""


@dataclass(frozen=True)
class Choice:
    """One selection of a switch."""

    label: str
    options: tuple[Option, ...]
    default: int = 0


@dataclass(frozen=True)
class Switch:
    """The selections above some figures."""

    id: str
    choices: tuple[Choice, ...]

    @property
    def says(self) -> str:
        """What the options chosen at first say."""
        return " ".join(c.options[c.default].says for c in self.choices if c.options and c.options[c.default].says)


@dataclass(frozen=True)
class LearnerChart(Chart):
    """A figure of one learner, which goes when the learner is hidden."""

    line: int = 0


@dataclass(frozen=True)
class Measure:
    """A metric in one variant, as a selection offers it."""

    metric: str
    variant: str
    entry: Entry
    label: str

    @property
    def says(self) -> str:
        parts = (self.entry.formula, self.entry.description)
        return " ".join(part if part.endswith(".") else f"{part}." for part in parts if part)


class Board:
    """Collects the figures of one page under running ids."""

    def __init__(self, history: History, catalogue: Catalogue, detail: Detail = DETAILS[0]) -> None:
        self.history, self.catalogue, self.detail = history, catalogue, detail
        self.palette = Tokens()
        self.specs: dict[str, Spec] = {}
        self.time = Time.of(history.steps())
        self.left_out: dict[str, str] = {}

    def keep(self, spec: Spec, title: str, *, alt: str, height: int, caption: str = "") -> Chart:
        return Chart(self._store(spec), title, alt, height, caption=caption)

    def keep_for(self, learner: Learner, spec: Spec, *, alt: str, height: int, title: str = "") -> LearnerChart:
        """A figure of one learner; its name is the title where there are several."""
        several = len(self.history.learners) > 1
        role = learner.role if learner.role not in learner.label else ""
        shown = title or (learner.label if several else "")
        owner = (learner.label if title else role) if several else ""
        return LearnerChart(self._store(spec), shown, alt, height, owner=owner, line=learner.index)

    def _store(self, spec: Spec) -> str:
        name = f"chart-{len(self.specs) + 1}"
        self.specs[name] = with_shared(spec) if "views" in spec else spec
        return name

    def entry(self, metric: str) -> Entry:
        return entry_of(self.catalogue, metric)

    def sites(self, metrics: Iterable[str], kinds: Sequence[str] = ("embed", "resid", "final")) -> list[Site]:
        """Sites to choose from: all of them, or an even choice where they would not fit."""
        found = self.history.sites(metrics, kinds)
        if len(found) > self.detail.sites:
            self.left_out["layers"] = f"{self.detail.sites} of {len(found)} layers"
        return [found[i] for i in few(range(len(found)), self.detail.sites)]

    def readings(self, metrics: Iterable[str]) -> list[str]:
        found = self.history.readings(metrics)
        if len(found) > self.detail.readings:
            self.left_out["readings"] = f"{self.detail.readings} of {len(found)} ways to fit and average"
        return found[: self.detail.readings]

    def readings_in(self, metric: str, keys: Sequence[Key]) -> list[str]:
        """Ways in which these lines of a metric were read off."""
        there = {reading_of(key[4]) for key in keys}
        return [reading for reading in self.history.readings([metric]) if reading in there][: self.detail.readings]

    def line(self, line: Line) -> Line:
        """A line with as many steps as the page carries."""
        if len(line) > self.detail.steps:
            self.left_out["steps"] = f"at most {self.detail.steps} steps"
        return tuple(line[i] for i in few(range(len(line)), self.detail.steps))

    def measures(self, metrics: Iterable[str]) -> list[Measure]:
        """Metrics over steps and layers: in their default variant, or in those that they have."""
        wanted = set(metrics)
        variants: dict[str, dict[str, None]] = {name: {} for name in wanted}
        for _, metric, site, group, variant in self.history.keys(wanted):
            if not group and site.kind in ("embed", "resid", "final") and self._plain(metric, variant):
                variants[metric][variant] = None
        found: list[Measure] = []
        for metric in ordered(self.catalogue, wanted):
            entry = self.entry(metric)
            names = [""] if "" in variants[metric] else sorted(variants[metric], key=_refit_first)
            found += [Measure(metric, v, entry, _measure_label(entry, metric, v, len(names))) for v in names]
        if len(found) > self.detail.measures:
            self.left_out["measures"] = f"{self.detail.measures} of {len(found)} measures"
        return found[: self.detail.measures]

    def _plain(self, metric: str, variant: str) -> bool:
        """Whether a variant is of the main proxy and rank, and of no control."""
        options = options_of(variant)
        if metric not in (*TANGENT, *MOVEMENT) or not options:
            return True
        own = options.get("proxy", self.history.proxy) == self.history.proxy
        same = options.get("rank", self.history.rank) == self.history.rank
        few_enough = reading_of(variant) in self.readings([metric])
        return own and same and few_enough and "control" not in options and "of" not in options

    def paired(
        self,
        switch: Switch,
        views: Mapping[int, Views],
        *,
        layouts: Mapping[int, Spec],
        told: Callable[[Learner], str],
        title: str = "",
        height: int = 300,
        log: bool = False,
        parts: Sequence[int] | None = None,
    ) -> list[LearnerChart]:
        """A figure for each learner, switched together, on the same scale, so that they can be compared."""
        ranges = _shared_ranges(views, log=log)
        charts = []
        for learner in self.history.learners:
            mine = {key: data for key, data in views.get(learner.index, {}).items() if values_in(data)}
            if not mine:
                continue
            drawn = {k: {"data": d, "y": ranges[k]} for k, d in mine.items()}
            spec: Spec = {"layout": layouts[learner.index], "switch": switch.id, "views": drawn}
            spec |= {"parts": list(parts)} if parts is not None else {}
            charts.append(self.keep_for(learner, spec, alt=told(learner), height=height, title=title))
        return charts

    def controlled(
        self, learner: Learner, metric: str, site: Site, *, reading: str, group: str = "", **of: str
    ) -> list[tuple[Look, Line]]:
        """The proxy's line last, over its controls and the other proxies."""
        found = []
        for control in (*BANDS, "permuted", "next"):
            line = self.history.tangent(learner, metric, site, reading=reading, group=group, control=control, **of)
            found.append((self.control_look(control), line))
        for proxy in self.proxies(metric):
            line = self.history.tangent(learner, metric, site, reading=reading, group=group, proxy=proxy, **of)
            found.append((self.proxy_look(proxy), line))
        return [(look, self.line(line)) for look, line in found if line]

    def proxies(self, metric: str) -> list[str]:
        """Proxies that a metric was measured with, the main one last: it is drawn on top."""
        seen = self.history.facets(metric).proxies - {"", self.history.proxy}
        return [*sorted(seen, key=lambda proxy: (proxy == "pca", proxy)), self.history.proxy]

    def control_look(self, control: str) -> Look:
        hue, dash = {"normal": (2, "solid"), "random": (6, "solid"), "next": (3, "dot")}.get(control, (4, "dashdot"))
        band = self.palette.series(hue, 0.26 if control == "normal" else 0.3) if control in BANDS else ""
        width = 1.0 if control in BANDS else 1.7
        return Look(CONTROLS.get(control, control), self.palette.series(hue), band, dash, width)

    def proxy_look(self, proxy: str) -> Look:
        if proxy == self.history.proxy:
            band = self.palette.series(0, 0.18)
            return Look(PROXIES.get(proxy, proxy), self.palette.series(0), band, width=2.2, marks=5, interval=True)
        others = {"pca": 1, "svd": 5, "ica": 7, "kmeans": 3, "random": 6}
        hue, dash = others.get(proxy, 4), "dash" if proxy == "pca" else "longdash"
        return Look(PROXIES.get(proxy, proxy), self.palette.series(hue), dash=dash, width=1.7)

    def depth_look(self, site: Site, blocks: int) -> Look:
        """Colour by depth; the final norm dashed."""
        final = site.kind == "final"
        colour = self.palette.role("accent") if final else self.palette.sequence(site.layer / max(1, blocks))
        return Look(site.name, colour, dash="dash" if final else "solid", width=1.5, marks=3.5, interval=True)


OWN_PARTS = ("y", "z", "text")  # what traces seldom have in common
LISTS = ("x", "customdata")


def with_shared(spec: Spec) -> Spec:
    """The same figure with what its traces have in common kept once: lists in `shared`, all else in `styles`.

    >>> trace = {"type": "scatter", "x": [1, 2], "y": [3, 4]}
    >>> drawn = with_shared({"views": {"0": {"data": [trace, trace]}}})
    >>> drawn["views"]["0"]["data"][1], drawn["shared"], drawn["styles"]
    ({'y': [3, 4], 'x': 0, 'style': 0}, [[1, 2]], [{'type': 'scatter'}])
    """
    lists: dict[str, int] = {}
    styles: dict[str, int] = {}
    views = {}
    for key, view in spec["views"].items():
        views[key] = view | {"data": [_slim(trace, lists, styles) for trace in view["data"]]}
    return spec | {"views": views, "shared": [*map(json.loads, lists)], "styles": [*map(json.loads, styles)]}


def _slim(trace: Spec, lists: dict[str, int], styles: dict[str, int]) -> Spec:
    style = {name: value for name, value in trace.items() if name not in (*OWN_PARTS, *LISTS)}
    slim = {name: trace[name] for name in OWN_PARTS if name in trace}
    slim |= {name: lists.setdefault(json.dumps(trace[name]), len(lists)) for name in LISTS if name in trace}
    return slim | {"style": styles.setdefault(json.dumps(style), len(styles))}


def _shared_ranges(views: Mapping[int, Views], *, log: bool) -> dict[str, Spec]:
    """For each view an axis that holds what all learners show in it."""
    values: dict[str, list[float]] = {}
    for mine in views.values():
        for key, data in mine.items():
            values.setdefault(key, []).extend(values_in(data))
    return {key: value_range(found, log=log) for key, found in values.items() if found}


def _refit_first(variant: str) -> tuple[int, bool, str]:
    return variant.count(";"), "fit=refit" not in variant, variant


def _measure_label(entry: Entry, metric: str, variant: str, variants: int) -> str:
    if metric in (*TANGENT, "amplification"):
        return f"{entry.title} · {reading_words(reading_of(variant))}" if variants > 1 else entry.title
    return f"{entry.title} · {variant_words(variant)}" if variant and variants > 1 else entry.title
