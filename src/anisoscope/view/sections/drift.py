"""Sections on drift against average cosine in every model, and on models of all modalities.

The values come from the claims (claims/inherent/) as a `Comparison`, so that the page shows the basis of the verdicts.
A *record* is one stack of one model and seed at its last measured step; a *bundle* is a stack with all its seeds.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from operator import itemgetter
from typing import Any

from anisoscope.results.manifest import PRETRAINED, SEEDED
from anisoscope.results.modality import MODALITIES
from anisoscope.results.quantity import mean_of
from anisoscope.view import figure, page, words
from anisoscope.view.figure import DASHES, Axis, Depth, Figure, Panel, Series, Switch, brief, series, wants_log
from anisoscope.view.page import Controls, DataTable, Fold, Heading, Prose, Section, Swatch, Swatches, TableCell, text
from anisoscope.view.subjects import short_names
from anisoscope.view.words import estimate, finite, interval_words, listed, number, p_words, plural, range_words, spans

Record = Mapping[str, Any]
# by status of a stack in the claim: its word, marker, legend text and sign
LOOKS = {
    "holds": ("yes", "circle", "explained by drift", "●"),
    "undecided": ("open", "circle-open", "open", "○"),
    "fails": ("no", "diamond-open", "not explained by drift", "◇"),
}
OPEN = 12  # scatter plots shown without a fold
DRIFT, IDENTITY = "drift ‖mean(h)‖", "(‖mean(h)‖ / mean ‖h‖)²"
NUMBERS = {"pearson": "Pearson", "spearman": "Spearman", "explained": "share"}
owner_of = itemgetter("model", "stack", "seed")


@dataclass(frozen=True)
class Comparison:
    """Results of the claims on all runs together; empty if neither drift nor cosine was measured.

    `units`: for each pooled stack its record and the standardised ranks of its sites by drift and by cosine.
    """

    records: Sequence[dict[str, Any]] = ()  # of each stack: correlations and anisotropy
    pooled: Sequence[dict[str, Any]] = ()
    units: Sequence[tuple[Record, Sequence[float], Sequence[float]]] = ()
    beyond: float = 0.0  # average cosine above which blocks are counted
    fewest: int = 0  # sites needed for a verdict on a stack
    near_identity: str = ""

    @classmethod
    def named(cls, correlations: Sequence[Record], anisotropy: Sequence[Record], **more: Any) -> Comparison:
        """A comparison whose records have a `label`, a `name` that all seeds share, and are `apart` as for claims."""
        shorten, more_of = short_names({r["model"] for r in correlations}), {owner_of(r): r for r in anisotropy}
        stacks, seeds = defaultdict(set), defaultdict(set)
        for record in correlations:
            stacks[record["model"]].add(record["stack"])
            seeds[record["model"]].add(record["seed"])
        records = []
        for record in correlations:
            model, stack, seed = owner_of(record)
            name = (shorten(model) or "unnamed") + (f" · {stack}" if len(stacks[model]) > 1 else "")
            label = f"{name} · seed {seed}" if len(seeds[model]) > 1 else name
            apart = bool(record.get("loaded")) and len(seeds[model]) == 1 < max(map(len, seeds.values()))
            records.append({**record, **more_of[model, stack, seed], "label": label, "name": name, "apart": apart})
        return cls(records, **more)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The records by modality, subject and seed."""
        order = {modality: i for i, modality in enumerate(MODALITIES)}
        return sorted(self.records, key=lambda r: (order.get(r["modality"], 99), r["subject"], str(r["seed"])))

    @property
    def modalities(self) -> list[str]:
        return list(dict.fromkeys(row["modality"] for row in self.rows))

    @property
    def scattered(self) -> list[dict[str, Any]]:
        """Records with enough sites for a correlation."""
        return [record for record in self.records if finite(record["pearson"]) is not None]


def colour_of(modality: str, alpha: float = 1.0) -> str:
    return series(MODALITIES[modality].hue if modality in MODALITIES else 6, alpha)


# -- seeds of one model ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bundle:
    """One stack of one model with the records of all its seeds."""

    members: tuple[Record, ...]
    dash: str = "solid"  # models of one modality share a colour and differ in dashes
    apart: bool = False  # a pretrained model beside models with several seeds

    @property
    def first(self) -> Record:
        return self.members[0]

    @property
    def label(self) -> str:
        return str(self.first["name"])

    @property
    def modality(self) -> str:
        return str(self.first["modality"])

    @property
    def untrained(self) -> bool:
        return all(member["untrained"] for member in self.members)

    @property
    def doubt(self) -> str:
        """Why the claims leave it out, as a phrase; empty if some seed counts."""
        return str(self.first.get("doubt", "")) if all(member.get("doubt") for member in self.members) else ""

    @property
    def seeds(self) -> str:
        """The number of seeds as text; empty for one."""
        return plural(len(self.members), "seed") if len(self.members) > 1 else ""

    @property
    def counts(self) -> dict[str, int]:
        """The number of seeds of each status, the most common first."""
        return dict(Counter(member["status"] for member in self.members).most_common())

    @property
    def status(self) -> str:
        """The status that all seeds share, else undecided."""
        return next(iter(self.counts)) if len(self.counts) == 1 else "undecided"

    def values(self, name: str) -> list[float]:
        """The finite values of the seeds under a key."""
        return [value for member in self.members if (value := finite(member.get(name))) is not None]

    def mean(self, name: str) -> float | None:
        return finite(mean_of(self.values(name)))

    def told(self, name: str) -> str:
        """A number with its interval as text; of several seeds their mean and range."""
        values = self.values(name)
        ends = (min(values, default=None), max(values, default=None)) if self.seeds else _ends(self.first, name)
        return interval_words(self.mean(name), *ends)

    def p(self, name: str) -> str:
        """The p-value of a number as text; empty for several seeds."""
        return "" if self.seeds else p_equals(self.first.get(f"{name}_p"))

    def status_cell(self, note: str = "") -> TableCell:
        """The cell for whether drift explains a model: one sign and word, or several with numbers of seeds."""
        several = f" of {self.seeds}" if len(self.counts) > 1 else ""
        looks = [f"{LOOKS[s][3]} {LOOKS[s][0]}{f' in {n}{several}' if several else ''}" for s, n in self.counts.items()]
        return TableCell(", ".join(looks), [note] if note else (), css="missed" if "fails" in self.counts else "")


def _ends(record: Record, name: str) -> tuple[float | None, float | None]:
    return record.get(f"{name}_low"), record.get(f"{name}_high")


def p_equals(p: float | None) -> str:
    told = p_words(p)
    return "" if told == "–" else f"p {'' if told.startswith('<') else '= '}{told}"


def bundles_of(records: Sequence[Record]) -> list[Bundle]:
    """The records grouped by stack, trained models first."""
    found: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for record in records:
        found[record["model"], record["stack"], record["modality"]].append(record)
    models: dict[str, list[str]] = defaultdict(list)
    bundles = []
    for bundle in sorted((Bundle(tuple(members)) for members in found.values()), key=lambda b: b.untrained):
        known = models[bundle.modality]
        known += [bundle.first["model"]] if bundle.first["model"] not in known else []
        dash = DASHES[known.index(bundle.first["model"]) % len(DASHES)]
        bundles.append(Bundle(bundle.members, dash, bool(bundle.first.get("apart"))))
    return bundles


def in_front(bundles: Sequence[Bundle]) -> tuple[list[Bundle], list[Bundle]]:
    """The bundles shown directly, and those in a fold: untrained models, if there are trained ones."""
    trained = [bundle for bundle in bundles if not bundle.untrained]
    return (trained, [b for b in bundles if b.untrained]) if trained else (list(bundles), [])


def in_seeds(bundles: Sequence[Bundle], status: str) -> list[str]:
    """The models of a status, with the number of seeds if not all have it.

    >>> seeds = [{"name": "m", "status": "fails"}, {"name": "m", "status": "holds"}]
    >>> in_seeds([Bundle(tuple(seeds))], "fails")
    ['m in 1 of 2 seeds']
    """
    counts = [(bundle, bundle.counts.get(status, 0)) for bundle in bundles]
    return [b.label if n == len(b.members) else f"{b.label} in {n} of {b.seeds}" for b, n in counts if n]


def size_words(bundles: Sequence[Bundle]) -> str:
    """The number of models or stacks, and of seeds of each, as text.

    >>> size_words([Bundle(({"model": "m"},) * 3)] * 2)
    '2 stacks × 3 seeds'
    """
    models = {bundle.first["model"] for bundle in bundles}
    size = plural(len(bundles), "model" if len(models) == len(bundles) else "stack")
    seeds = {len(bundle.members) for bundle in bundles if not bundle.apart}
    if len(seeds) < 2:
        return f"{size} × {bundles[0].seeds}" if bundles[0].seeds and not any(b.apart for b in bundles) else size
    return f"{size}, {min(seeds)} to {max(seeds)} seeds each"


def counted(record: Record) -> list[dict[str, Any]]:
    """The sites used for correlations, sorted by depth: the embedding and the blocks."""
    return [point for point in record["points"] if point["counted"]]


def points_over_seeds(lines: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The points of a model with their intervals; for several seeds means with the range over seeds."""
    if len(lines) == 1:
        return list(lines[0])
    places: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for point in (point for line in lines for point in line):
        places[point["layer"], point["kind"]].append(point)
    found = []
    for points in places.values():
        values = [value for p in points if (value := finite(p["cosine"])) is not None]
        ends = {"seeds": range_words(values), "low": None, "high": None}
        found.append({**points[0], **ends, "cosine": finite(mean_of(values))})
    return found


def _where(points: Sequence[Record], name: str = "") -> list[str]:
    """Hover texts of points: model, site, and cosine with its interval."""
    texts = []
    for p in points:
        lead = f"<b>{escape(name)}</b><br>" if name else ""
        cosine = f"<b>average cosine {estimate(p['cosine'], p['low'], p['high'])}"
        seeds = f"<br>seeds from {p['seeds']}</b>" if p.get("seeds") else "</b>"
        drift = f"<br>drift {number(p['drift'])}" if finite(p.get("drift")) is not None else ""
        texts.append(f"{lead}{escape(words.site_name(p['layer'], p['kind']))}<br>{cosine}{seeds}{drift}")
    return texts


# -- modalities --------------------------------------------------------------------------------------------------------


def modality_hero(found: Comparison) -> page.Hero | None:
    """Average cosine over depth of every model, by modality, as the first figure of a page; None for one modality."""
    if len(found.modalities) < 2:
        return None
    shown = _depth_figure(found, 320, pale=False, files={"hero": {}})
    key = Swatches([Swatch(modality, colour_of(modality)) for modality in found.modalities])
    caption = "How alike the directions of rows are in every model: 0 spread evenly, 1 a single direction."
    return page.Hero(shown, "Average cosine over depth, by modality", [key], caption)


def _depth_figure(found: Comparison, height: int, *, pale: bool, **more: Any) -> Figure:
    """Average cosine over relative depth; pretrained models beside models with seeds in a panel of their own."""
    front = in_front(bundles_of(found.rows))[0]
    kinds = {SEEDED: False, PRETRAINED: True} if any(b.apart for b in front) else {"": None}
    lines = [modality_series(found, apart, pale=apart is None or pale > apart) for apart in kinds.values()]
    low = min((at for drawn in lines for line in drawn for at in line.y if at is not None), default=0.0)
    y = Axis("average cosine", rules=True, bounds=(min(low, 0.0) - 0.03, 1.03) if len(lines) > 1 else None)
    panels = []
    for (title, apart), drawn in zip(kinds.items(), lines, strict=True):
        shown = [bundle for bundle in front if apart in (None, bundle.apart)][:8]
        means = "; ".join(f"{b.label} ({b.modality}) {number(b.mean('mean'))}" for b in shown)
        alt, name = f"Average cosine over relative depth; means over blocks: {means}.", title.capitalize()
        panels.append(Panel(Depth(1, relative=True).axis(), y, drawn, alt=alt, title=name, height=height))
    return Figure(tuple(panels), layout="pairs" if len(panels) > 1 else "wide", **more)


def modality_section(found: Comparison, *, claimed: bool = False) -> Section | None:
    """The section that compares modalities, with the profile of every model; None for a single modality."""
    if len(found.modalities) < 2:
        return None
    front, behind = in_front(bundles_of(found.rows))
    seeds = any(bundle.seeds for bundle in (*front, *behind))
    lead = (
        "Average cosine from the embedding to the last block of every model, coloured by modality; models of one "
        "modality differ in dashes."
        + (" Of several seeds the mean, over thin lines of the seeds." if seeds else "")
        + (" Pale lines are models with random weights." if behind else "")
        + " Markers say whether drift explains it: drift and average cosine rise together over the layers, and "
        "removing the mean removes most of the cosine."
    )
    key = [Swatch(modality, colour_of(modality)) for modality in found.modalities]
    states = {row["status"] for row in found.rows}
    key += [Swatch(meaning, sign=sign) for state, (_, _, meaning, sign) in LOOKS.items() if state in states]
    shown = _depth_figure(found, 380, pale=True, id="modality", files={"modalities": {}}, size=2.6)
    parts: list[Any] = [Prose(lead), Swatches(key), shown, _modality_table(found, front, "Models by modality")]
    if behind:
        table = _modality_table(found, behind, "Models with random weights by modality")
        parts.append(Fold(f"{size_words(behind)} with random weights", [table], css="behind"))
    aside = "Means over seeds; beneath the mean the lowest and the highest seed; <em>explained</em> seed by seed"
    aside = aside + (", not as the verdict over all seeds has it. " if claimed else ". ") if seeds else ""
    below = aside + (
        "Average cosine at the middle block, at the block where it is largest, and as mean over blocks; the share of "
        'blocks beyond {beyond}; drift ‖mean(h)‖ at the middle block; whether <a href="#drift">drift explains it</a>.'
    )
    parts.append(Prose(text(below, beyond=found.beyond), css="says"))
    return Section("modalities", "Modalities", parts, "Modalities")


def modality_series(found: Comparison, apart: bool | None = None, *, pale: bool = True) -> tuple[Series, ...]:
    """Average cosine over relative depth, one line per stack, coloured by modality; untrained models are `pale`.

    Of several seeds the mean, above thin lines of the seeds. `apart`: pretrained models alone, or all but them.
    """
    front, behind = in_front(bundles_of(found.rows))
    front, drawn = [bundle for bundle in front if apart in (None, bundle.apart)], []
    for bundle, pale in [*((bundle, True) for bundle in behind if pale), *((bundle, False) for bundle in front)]:
        lines = [counted(member) for member in bundle.members]
        about = (bundle.modality, "untrained weights" if pale else "", bundle.seeds)
        name = f"{bundle.label} ({', '.join(part for part in about if part)})"
        thin: dict[str, Any] = {"colour": colour_of(bundle.modality, 0.35), "width": 0.9, "quiet": True}
        for line in lines if not pale and len(lines) > 1 else ():
            drawn.append(Series(name, *_course(line), dash=bundle.dash, **thin))
        size = 8.0 if bundle.status == "fails" else 6.0
        look: dict[str, Any] = {"colour": colour_of(bundle.modality), "width": 1.8, "size": size}
        look |= {"colour": thin["colour"], "width": 1.1, "size": 4.0, "named": False} if pale else {}
        points = points_over_seeds(lines)
        look |= {"dash": bundle.dash, "marker": LOOKS[bundle.status][1], "text": _where(points, name)}
        drawn.append(Series(name, *_course(points), **look))
    return tuple(drawn)


def _course(points: Sequence[Record]) -> tuple[list[float], list[float | None]]:
    return [p["depth"] for p in points], [brief(p["cosine"], 4) for p in points]


def _groups(found: Comparison, bundles: Sequence[Bundle], row: Callable[[Bundle], list[TableCell]]) -> list[Any]:
    """Table rows by modality; with several modalities the first row of each has its name."""
    groups = [[row(b) for b in bundles if b.modality == modality] for modality in found.modalities]
    for modality, group in zip(found.modalities, groups, strict=True):
        if group and len(groups) > 1:
            group[0].insert(0, TableCell(modality, head=True, rows=len(group), css="group"))
    return [group for group in groups if group]


def _modality_table(found: Comparison, bundles: Sequence[Bundle], label: str) -> DataTable:
    numeric = ("Blocks", "Middle", "Largest", "Mean", f"Beyond {found.beyond}", "Drift")
    heads = ["Modality", "Model", *(TableCell(name, css="num") for name in numeric), "Explained"]
    return DataTable([heads], _groups(found, bundles, _modality_row), label, "plain modal", numeric=99)


def _modality_row(bundle: Bundle) -> list[TableCell]:
    """The table row of a model: means and ranges over its seeds."""
    row, blocks = bundle.first, spans({member["max_layer"] for member in bundle.members})
    ends = f"{number(row['mean_low'])} to {number(row['mean_high'])}" if finite(row["mean_low"]) is not None else ""
    whose = "untrained weights" if bundle.untrained else "pretrained" if bundle.apart else ""
    aside = ", ".join(part for part in (whose, bundle.seeds) if part)
    owner = TableCell(bundle.label, [aside], head=True, swatch=Swatch("", colour_of(bundle.modality), bundle.dash))
    middle, peak, mean, drift = (number(bundle.mean(name)) for name in ("middle", "max", "mean", "drift"))
    numbers = [(str(row["layers"]), ""), (middle, ""), (peak, f"block{'' if blocks.isdigit() else 's'} {blocks}")]
    numbers += [(mean, range_words(bundle.values("mean")) if bundle.seeds else ends)]
    numbers += [(f"{100 * (bundle.mean('share_beyond') or 0.0):.0f} %", ""), (drift, "")]
    return [owner, *(TableCell(t, [s] if s else (), css="num") for t, s in numbers), bundle.status_cell()]


# -- drift against average cosine --------------------------------------------------------------------------------------


def drift_section(found: Comparison) -> Section | None:
    """The section with a scatter plot per model and the pooled ranks; None if no stack has three sites with both."""
    front, behind = in_front(bundles_of(found.scattered))
    bundles = [*front, *behind]
    if not bundles:
        return None
    several, seeds = len(found.modalities) > 1, any(bundle.seeds for bundle in bundles)
    panels = [drift_panel(b, alone=len(bundles) == 1, several=several) for b in bundles]
    near = any(finite(p["relative_drift"]) is not None for record in found.scattered for p in counted(record))
    remark = f"This is {found.near_identity}: it explains nothing."
    options = ((f"{DRIFT}, unnormalised", ""), (f"{IDENTITY}, a near-identity", remark))[: 1 + near]
    switch = Switch("drift", (figure.Choice("Against", tuple(figure.SwitchOption(*option) for option in options)),))
    lead = (
        "Each point is a layer, from the embedding to the last block. Layers of one model are neighbours, not draws: a "
        "correlation describes the model, and p with it."
        + (" Seeds of a model are drawn together, a path for each; its numbers are means over seeds, from the lowest "
           "to the highest." if seeds else "")
        + " Intervals of single layers are told where you point."
    )  # fmt: skip
    parts: list[Any] = [Prose(lead), page.Ramp("embedding", "last block"), Controls(switch), page.Says(switch)]
    files: dict[str, Mapping[str, int]] = {"drift-and-cosine": {}}
    files |= {"drift-near-identity": {"drift.0": 1}} if near else {}
    first, rest = panels[: len(front)][:OPEN], panels[OPEN : len(front)]
    layout = "grid" if len(first) > 1 else "narrow"
    parts += [Figure(tuple(first), id="drift", layout=layout, files=files, most=OPEN, size=1.75)]
    for name, more in (("Further models", rest), ("Models with random weights", panels[len(front) :])):
        parts += [Fold(f"{name} ({len(more)})", [Figure(tuple(more))], css="behind")] if more else []
    front, behind = in_front(bundles_of(found.records))  # stacks with too few sites are in the tables too
    parts += [Heading("Correlations"), _drift_table(found, front, pooled=True)]
    if behind:
        counts = Counter(bundle.status for bundle in behind)
        states = listed([f"{counts[state]} {look[2]}" for state, look in LOOKS.items() if counts[state]])
        table = _drift_table(found, behind, pooled=False)
        parts.append(Fold(f"{size_words(behind)} with random weights: {states}", [table], css="behind"))
    parts.append(Prose(_drift_words(found, front, seeds=seeds), css="says"))
    told = [f"{b.told('spearman')} in {b.label}" for b in bundles_of(found.scattered)[:3] if not b.untrained]
    lead = "Rank correlation of drift and average cosine over layers:"
    finding = f"{lead} {'; '.join(told)}." if told else ""
    return Section("drift", "Drift and average cosine", [*parts, *_pool_parts(found)], "Drift", finding=finding)


def drift_panel(bundle: Bundle, *, alone: bool, several: bool) -> Panel:
    """Average cosine against drift, and in a second view against squared relative drift; one path per seed."""
    views = {}
    for i, (name, title) in enumerate((("drift", DRIFT), ("relative_drift", IDENTITY))):
        drawn, places = [], []
        for record in bundle.members:  # sites are connected in order of depth and coloured by depth
            points = [p for p in counted(record) if finite(p[name]) is not None]
            values, label = [p[name] ** (1 + i) for p in points], f"seed {record['seed']}" if bundle.seeds else ""
            look: dict[str, Any] = {"colour": "@rule", "width": 1.2, "size": 6 if label else 7.5, "named": False}
            look |= {"shade": [float(p["depth"]) for p in points], "text": _where(points, label)}
            x, y = [brief(at, 4) for at in values], [brief(p["cosine"], 4) for p in points]
            drawn += [Series(label, x, y, **look)] if points else []
            places += values
        if drawn:
            views[str(i)] = Panel(drift_axis(places, title), Axis("average cosine", rules=True), tuple(drawn))
    owner = ", ".join(part for part in (bundle.modality if several else "", bundle.seeds) if part)
    summary = bundle_words(bundle)
    alt = f"Scatter plot of drift against average cosine of {bundle.label}: {summary}"
    title = "" if alone else bundle.label
    return Panel(title=title, owner=owner, alt=alt, caption=summary, height=250, views=views, by=("drift.0",))


def drift_axis(places: Sequence[float], title: str) -> Axis:
    """The axis of drift: logarithmic if values span orders of magnitude, with ticks at some powers of ten."""
    ends = (min(places) / 1.15, max(places) * 1.15) if wants_log(places) else None
    return Axis(title, log=ends is not None, bounds=ends)


def bundle_words(bundle: Bundle) -> str:
    """Both correlations, the number of sites, and whether drift explains, as text."""
    pearson, spearman = (f"{NUMBERS[key]} {bundle.told(key)}" for key in ("pearson", "spearman"))
    sites = spans({record["n"] for record in bundle.members})
    summary = f"{pearson}, {spearman} over {sites} sites."
    if bundle.values("explained"):
        summary += f" Share that goes with the mean: {bundle.told('explained')}."
    if bundle.values("explained") or bundle.seeds:
        summary += f" Explained by drift: {bundle.status_cell().text}."
    if bundle.seeds:
        return summary
    near = interval_words(bundle.first["near_identity"], None, None)
    summary += "" if near == "–" else f" Near-identity: Pearson {near}."
    final = [p for p in bundle.first["points"] if not p["counted"] and finite(p["drift"]) is not None]
    for point in final[:1]:
        summary += f" Not counted: the final norm, drift {number(point['drift'])}, cosine {number(point['cosine'])}."
    return summary


def _drift_table(found: Comparison, bundles: Sequence[Bundle], *, pooled: bool) -> DataTable:
    """The table of all models by modality, followed by the pooled correlations."""
    numeric = [TableCell(name, css="num") for name in ("Sites", "Pearson", "Spearman", "Share")]
    heads = [*(["Modality"] if len(found.modalities) > 1 else []), "Model", *numeric, "Explained"]
    groups = _groups(found, bundles, lambda bundle: _drift_row(bundle, found.fewest))
    pools = [_pool_row(found, row) for row in (_pools(found) if pooled else [])]
    label = "Correlations of drift with average cosine" if pooled else "Correlations of models with random weights"
    return DataTable([heads], [*groups, *([pools] if pools else [])], label, "plain modal", numeric=99)


def _drift_row(bundle: Bundle, fewest: int) -> list[TableCell]:
    """The table row of a model: one seed with intervals, or means and ranges over seeds with a fold for each seed."""
    notes, each = set(), []
    for one in bundle.members:
        told = {word: interval_words(one[name], *_ends(one, name)) for name, word in NUMBERS.items()}
        results = ", ".join(f"{word} {value.replace(', ', ' to ')}" for word, value in told.items())
        each.append(f"seed {one['seed']}: {results}: {LOOKS[one['status']][0]}".replace("[", "(").replace("]", ")"))
        few = f"{plural(one['n'], 'site')}, {fewest} are needed" if one["n"] < fewest else ""
        unmeasured = "the share was not measured" if finite(one["explained"]) is None else ""
        notes.add(one["note"] or (few or unmeasured if one["status"] == "undecided" else ""))
    parts = [_parted(bundle.told(name), bundle.p(name)) for name in NUMBERS]
    fold = (f"each of {len(each)} seeds", each) if bundle.seeds else None
    owner = TableCell(bundle.label, ["untrained weights"] if bundle.untrained else [], head=True, fold=fold)
    sites = TableCell(spans({one["n"] for one in bundle.members}), css="num")
    return [owner, sites, *parts, bundle.status_cell(notes.pop() if len(notes) == 1 else "")]


def _parted(words: str, p: str) -> TableCell:
    """A table cell with a value, its interval below, and its p."""
    value, _, ends = words.partition(" ")
    small = (ends.strip("[]").replace(", ", " to "), p)
    return TableCell(value, [part for part in small if part], css="num")


def _pools(found: Comparison) -> list[dict[str, Any]]:
    """The pooled correlations of each modality (if there are several) and of all; none for a single stack."""
    if len(found.units) < 2:
        return []
    parts = [row for row in found.pooled if row["modality"] != "all"]
    shown = [row for row in parts if row["stacks"] > 1] if len(parts) > 1 else []
    return [*shown, *(row for row in found.pooled if row["modality"] == "all")]


def _pool_row(found: Comparison, row: Record) -> list[TableCell]:
    """The table row of a pooled correlation with the values of the claim; Pearson's only if the claim has it."""
    name = "all models" if row["modality"] == "all" else row["modality"]
    spearman = _parted(interval_words(row["spearman"], row["low"], row["high"]), p_equals(row["p"]))
    pearson = _parted(interval_words(row.get("pearson"), *_ends(row, "pearson")), p_equals(row.get("pearson_p")))
    cells = [TableCell(name, head=True, css="group")] if len(found.modalities) > 1 else []
    cells += [TableCell("pooled", [pool_size(found, row)], head=True), TableCell(str(row["n"]), css="num")]
    return [*cells, pearson, spearman, TableCell(), TableCell("", [row["note"]] if row["note"] else ())]


def pool_size(found: Comparison, row: Record) -> str:
    """The number of models and stacks as text; with pooled seeds, models × seeds."""
    pool = bundles_of([record for record, *_ in found.units if row["modality"] in ("all", record["modality"])])
    if any(bundle.seeds for bundle in pool):
        return size_words(pool)
    return f"{plural(len(row['models']), 'model')}, {plural(row['stacks'], 'stack')}"


def _drift_words(found: Comparison, front: Sequence[Bundle], *, seeds: bool) -> Any:
    lost, open_ = (", ".join(in_seeds(front, status)) for status in ("fails", "undecided"))
    parts = ["<strong>Not explained by drift{how}: {lost}.</strong>"] if lost else []
    parts += ["Open: {open}."] if open_ else []
    parts.append(
        "Drift with average cosine over the embedding and the blocks; "
        + ("of several seeds the mean, from the lowest to the highest; of one seed " if seeds else "")
        + "95&nbsp;% intervals that know both contexts and how few layers there are; <em>share</em>: of the "
        "cosine, what goes with the mean, median over sites. <em>Explained</em> needs both the rank correlation and "
        "the share, at {fewest} sites at least. p is {note}."
    )
    pooled = "Pooled are the ranks of layers within their own models, of trained models alone; intervals are over "
    parts += [f"{pooled}models, p is that of layers shuffled within models."] if _pools(found) else []
    values = {"how": ", seed by seed" if seeds else "", "lost": lost, "open": open_, "fewest": found.fewest}
    return text(" ".join(parts), **values, note=found.scattered[0]["p_note"])


def _pool_parts(found: Comparison) -> list[Any]:
    if len(found.units) < 2 or not found.pooled:
        return []
    whole = found.pooled[0]
    words = interval_words(whole["spearman"], whole["low"], whole["high"])
    alt = f"Ranks of drift against ranks of average cosine within {plural(whole['stacks'], 'stack')}: Spearman {words}."
    ends: dict[str, Any] = {"bounds": (-0.06, 1.06), "ticks": ([0, 0.5, 1], ["lowest", "", "highest"])}
    axes = Axis("rank of drift in its model", **ends), Axis("rank of average cosine", rules=True, **ends)
    panel = Panel(*axes, pooled_series(found), alt=alt, height=320)
    key = [Swatch(m, colour_of(m)) for m in dict.fromkeys(record["modality"] for record, *_ in found.units)]
    lead = (
        "Every layer at its rank within its own model, so that models of any scale can be pooled; models are shifted "
    )
    lead += "a little aside so that equal ranks can be seen."
    shown = Figure((panel,), id="drift-pooled", layout="narrow", files={"drift-and-cosine-pooled": {}}, size=3.0)
    return [Heading("All models together"), Prose(lead), Swatches(key), shown]


def pooled_series(found: Comparison) -> tuple[Series, ...]:
    """Every site of every trained stack at its relative ranks, coloured by modality."""
    drawn, seen, count = [], set(), len(found.units)
    for i, (record, one, two) in enumerate(found.units):
        aside = 0.5 + min(0.012, 0.1 / count) * (i - (count - 1) / 2)  # offset: stacks often have equal ranks
        sites = [p for p in counted(record) if finite(p["drift"]) is not None]
        look: dict[str, Any] = {"colour": colour_of(record["modality"], 0.7), "width": 0, "size": 7}
        look |= {"marker": "circle" if record["status"] != "fails" else "diamond-open"}
        look |= {"named": record["modality"] not in seen, "text": _where(sites, record["label"])}
        seen.add(record["modality"])
        x, y = [brief(z + aside, 4) for z in one], [brief(z + 0.5, 4) for z in two]
        drawn.append(Series(record["label"], x, y, **look))
    return tuple(drawn)


# -- findings ----------------------------------------------------------------------------------------------------------


def modality_findings(found: Comparison) -> list[page.PageFinding]:
    """Findings on the anisotropy of each modality and on models that drift does not explain; none for one modality."""
    bundles = bundles_of(found.rows)
    trained = [bundle for bundle in bundles if not bundle.doubt]
    means, beside = (
        [_modality_words(m, [b for b in trained if b.modality == m and b.apart is apart]) for m in found.modalities]
        for apart in (False, True)
    )
    if len(means) < 2 or not any([*means, *beside]):
        return []
    told = {"Average cosine over blocks": means, "In pretrained models, one set of weights each": beside}
    texts = [f"{lead}: {listed([mean for mean in each if mean])}." for lead, each in told.items() if any(each)]
    missed, unsure = (words.shortened(in_seeds(trained, status), 5) for status in ("fails", "undecided"))
    # over all seeds more can be decided than in one
    start = "Seed by seed, the" if any(bundle.seeds for bundle in trained) else "The"
    texts += [f"{start} anisotropy of {missed} is not explained by drift."] if missed else []
    texts += [f"Whether drift explains it is open in {unsure}."] if unsure else []
    left = [bundle for bundle in bundles if bundle.untrained]
    verb = "is" if len(left) == 1 and not left[0].seeds else "are"
    texts += [f"{size_words(left)} with untrained weights {verb} shown and not counted here."] if left else []
    texts += [f"{b.label} {b.doubt}: shown and not counted here." for b in bundles if b.doubt and not b.untrained]
    return [page.PageFinding("Modality", tuple(texts))]


def _modality_words(modality: str, bundles: Sequence[Bundle]) -> str:
    """The mean over models of one modality as text; for one model with its interval or the range of its seeds."""
    rows = [row for bundle in bundles for row in bundle.members]
    if len(rows) < 2:
        return "".join(f"{estimate(row['mean'], row['mean_low'], row['mean_high'])} in {modality}" for row in rows)
    size = bundles[0].seeds if len(bundles) == 1 else size_words(bundles)
    values = [row["mean"] for row in rows]
    return f"{number(mean_of(values))} in {modality} ({size}, {range_words(values)})"
