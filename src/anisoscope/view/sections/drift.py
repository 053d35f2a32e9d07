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
from statistics import fmean
from typing import Any

from anisoscope.results.modality import MODALITIES
from anisoscope.view import figure, page, words
from anisoscope.view.figure import DASHES, Axis, Depth, Figure, Panel, Series, Switch, brief, series, wants_log
from anisoscope.view.page import Controls, DataTable, Fold, Heading, Prose, Section, Swatch, Swatches, TableCell, text
from anisoscope.view.subjects import short_names
from anisoscope.view.words import estimate, finite, interval_words, listed, number, p_words, plural, range_words, spans

Record = Mapping[str, Any]
Owner = tuple[str, str, Any]  # model, stack, seed
# by status of a stack in the claim: its word, marker, legend text and sign
LOOKS = {
    "holds": ("yes", "circle", "explained by drift", "●"),
    "undecided": ("open", "circle-open", "open", "○"),
    "fails": ("no", "diamond-open", "not explained by drift", "◇"),
}
OPEN = 12  # scatter plots shown without a fold
DRIFT, IDENTITY = "drift ‖mean(h)‖", "(‖mean(h)‖ / mean ‖h‖)²"


@dataclass(frozen=True)
class Comparison:
    """Results of the claims on all runs together; empty if neither drift nor cosine was measured.

    `units`: for each pooled stack its record and the standardised ranks of its sites by drift and by cosine.
    """

    records: Sequence[dict[str, Any]] = ()  # correlations of each stack
    rows: Sequence[dict[str, Any]] = ()  # anisotropy of each stack by modality
    pooled: Sequence[dict[str, Any]] = ()
    units: Sequence[tuple[Record, Sequence[float], Sequence[float]]] = ()
    beyond: float = 0.0  # average cosine above which blocks are counted
    fewest: int = 0  # sites needed for a verdict on a stack
    near_identity: str = ""

    @classmethod
    def named(cls, records: Sequence[Record], rows: Sequence[Record], **more: Any) -> Comparison:
        """A comparison whose records have a `label`, and a `name` that all seeds of a stack share."""
        labels, names = _labels(rows), _labels(rows, seeded=False)

        def labelled(found: Sequence[Record]) -> list[dict[str, Any]]:
            return [{**r, "label": labels[owner_of(r)], "name": names[owner_of(r)]} for r in found]

        return cls(labelled(records), labelled(rows), **more)

    @property
    def modalities(self) -> list[str]:
        return list(dict.fromkeys(row["modality"] for row in self.rows))

    @property
    def scattered(self) -> list[dict[str, Any]]:
        """Records with enough sites for a correlation."""
        return [record for record in self.records if finite(record["pearson"]) is not None]


def owner_of(record: Record) -> Owner:
    return record["model"], record["stack"], record["seed"]


def _labels(rows: Sequence[Record], *, seeded: bool = True) -> dict[Owner, str]:
    """The model's short name, followed by stack and seed where they distinguish it from others."""
    shorten = short_names({row["model"] for row in rows})
    stacks, seeds = defaultdict(set), defaultdict(set)
    for row in rows:
        stacks[row["model"]].add(row["stack"])
        seeds[row["model"]].add(row["seed"])
    found = {}
    for row in rows:
        parts = [shorten(row["model"]) or "unnamed"]
        parts += [row["stack"]] if len(stacks[row["model"]]) > 1 else []
        parts += [f"seed {row['seed']}"] if seeded and len(seeds[row["model"]]) > 1 else []
        found[owner_of(row)] = " · ".join(parts)
    return found


def hue_of(modality: str) -> int:
    return MODALITIES[modality].hue if modality in MODALITIES else 6


# -- seeds of one model ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bundle:
    """One stack of one model with the records of all its seeds."""

    label: str
    modality: str
    untrained: bool
    members: tuple[Record, ...]

    @property
    def first(self) -> Record:
        return self.members[0]

    @property
    def doubt(self) -> str:
        """Why the claims leave it out, as a phrase; empty if some seed counts."""
        return str(self.first.get("doubt", "")) if all(member.get("doubt") for member in self.members) else ""

    @property
    def seeds(self) -> str:
        """The number of seeds as text; empty for one."""
        return plural(len(self.members), "seed") if len(self.members) > 1 else ""

    def values(self, name: str) -> list[float]:
        """The finite values of the seeds under a key."""
        return [value for member in self.members if (value := finite(member.get(name))) is not None]

    def mean(self, name: str) -> float | None:
        found = self.values(name)
        return fmean(found) if found else None

    def counts(self, state_of: Callable[[Record], str]) -> dict[str, int]:
        """The number of seeds in each state, the most common first."""
        return dict(Counter(map(state_of, self.members)).most_common())


def bundles_of(records: Sequence[Record]) -> list[Bundle]:
    """The records grouped by stack, trained models first."""
    found: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        found.setdefault((record["model"], record["stack"], record["modality"]), []).append(record)
    made = [Bundle(m[0]["name"], m[0]["modality"], all(r["untrained"] for r in m), tuple(m)) for m in found.values()]
    return sorted(made, key=lambda bundle: bundle.untrained)


def in_front(bundles: Sequence[Bundle]) -> tuple[list[Bundle], list[Bundle]]:
    """The bundles shown directly, and those in a fold: untrained models, if there are trained ones."""
    trained = [bundle for bundle in bundles if not bundle.untrained]
    return (trained, [b for b in bundles if b.untrained]) if trained else (list(bundles), [])


def in_seeds(bundles: Sequence[Bundle], state_of: Callable[[Record], str], state: str) -> list[str]:
    """The models in a state, with the number of seeds if not all are in it.

    >>> two = [{"status": "fails"}, {"status": "holds"}]
    >>> in_seeds([Bundle("m", "text", False, tuple(two))], lambda r: r["status"], "fails")
    ['m in 1 of 2 seeds']
    """
    labels = []
    for bundle in bundles:
        count = bundle.counts(state_of).get(state, 0)
        whole = count == len(bundle.members)
        labels += [bundle.label if whole else f"{bundle.label} in {count} of {bundle.seeds}"] if count else []
    return labels


def size_words(bundles: Sequence[Bundle]) -> str:
    """The number of models or stacks, and of seeds of each, as text.

    >>> one = {"model": "m", "status": ""}
    >>> size_words([Bundle("m", "text", False, (one, one, one))] * 2)
    '2 stacks × 3 seeds'
    """
    models = {bundle.first["model"] for bundle in bundles}
    size = plural(len(bundles), "model" if len(models) == len(bundles) else "stack")
    seeds = {len(bundle.members) for bundle in bundles}
    if len(seeds) == 1:
        return f"{size} × {bundles[0].seeds}" if bundles[0].seeds else size
    return f"{size}, {min(seeds)} to {max(seeds)} seeds each"


status_of = itemgetter("status")


def state_of(row: Record) -> str:
    return {"yes": "holds", "no": "fails"}.get(row["explained_by_drift"], "undecided")


def common_state(bundle: Bundle, state: Callable[[Record], str]) -> str:
    """The state of a bundle: the one that all seeds share, else undecided."""
    counts = bundle.counts(state)
    return next(iter(counts)) if len(counts) == 1 else "undecided"


def state_cell(bundle: Bundle, state: Callable[[Record], str], note: str = "") -> TableCell:
    """The cell for whether drift explains a model: one sign and word, or several with numbers of seeds."""
    counts = bundle.counts(state)
    words = [f"{LOOKS[s][3]} {LOOKS[s][0]}" + (f" in {n} of {bundle.seeds}" if len(counts) > 1 else "")
             for s, n in counts.items()]  # fmt: skip
    return TableCell(", ".join(words), [note] if note else (), css="missed" if "fails" in counts else "")


def counted(record: Record) -> list[dict[str, Any]]:
    """The sites used for correlations, sorted by depth: the embedding and the blocks."""
    return [point for point in record["points"] if point["counted"]]


def over_seeds(lines: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
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
        found.append({**points[0], **ends, "cosine": fmean(values) if values else None})
    return found


def _where(points: Sequence[Record], name: str = "") -> list[str]:
    """Hover texts of points: model, site, and cosine with its interval."""
    texts = []
    for p in points:
        cosine = f"average cosine {estimate(p['cosine'], p['low'], p['high'])}"
        cosine += f"<br>seeds from {p['seeds']}" if p.get("seeds") else ""
        drift = f"<br>drift {number(p['drift'])}" if finite(p.get("drift")) is not None else ""
        texts.append(f"{escape(words.site_name(p['layer'], p['kind']))}<br><b>{cosine}</b>{drift}")
    return [f"<b>{escape(name)}</b><br>{one}" for one in texts] if name else texts


def modality_section(found: Comparison, *, claimed: bool = False) -> Section | None:
    """The section that compares modalities, with the profile of every model; None for a single modality."""
    if len(found.modalities) < 2:
        return None
    bundles = bundles_of(found.rows)
    front, behind = in_front(bundles)
    dashes, seeds = _dashes(bundles), any(bundle.seeds for bundle in bundles)
    lead = (
        "Average cosine from the embedding to the last block of every model, coloured by modality; models of one "
        "modality differ in dashes."
        + (" Of several seeds the mean, over thin lines of the seeds." if seeds else "")
        + (" Pale lines are models with random weights." if behind else "")
        + " Markers say whether drift explains it: drift and average cosine rise together over the layers, and "
        "removing the mean removes most of the cosine."
    )
    key = [Swatch(m, series(hue_of(m))) for m in found.modalities]
    states = set(map(state_of, found.rows))
    key += [Swatch(words, sign=sign) for state, (_, _, words, sign) in LOOKS.items() if state in states]
    means = [f"{b.label} ({b.modality}) {number(b.mean('mean'))}" for b in front[:8]]
    alt = f"Average cosine over relative depth; means over blocks: {'; '.join(means)}."
    panel = Panel(Depth(1, relative=True).axis(), Axis("average cosine", rules=True), modality_series(found), alt=alt,
                  height=380)  # fmt: skip
    shown = Figure((panel,), id="modality", layout="wide", files={"modalities": {}}, size=2.6)
    parts: list[Any] = [Prose(lead), Swatches(key), shown]
    parts.append(_modality_table(found, front, dashes, "Models by modality"))
    if behind:
        table = _modality_table(found, behind, dashes, "Models with random weights by modality")
        parts.append(Fold(f"{size_words(behind)} with random weights", [table], css="behind"))
    aside = "Means over seeds; beneath the mean the lowest and the highest seed; <em>explained</em> seed by seed"
    aside = aside + (", not as the verdict over all seeds has it. " if claimed else ". ") if seeds else ""
    words = aside + (
        "Average cosine at the middle block, at the block where it is largest, and as mean over blocks; the share of "
        'blocks beyond {beyond}; drift ‖mean(h)‖ at the middle block; whether <a href="#drift">drift explains it</a>.'
    )
    parts.append(Prose(text(words, beyond=found.beyond), css="says"))
    return Section("modalities", "Modalities", parts, "Modalities")


def _dashes(bundles: Sequence[Bundle]) -> dict[Owner, str]:
    """Dash styles by model: lines of one modality share a colour."""
    models: dict[str, dict[str, None]] = defaultdict(dict)
    for bundle in bundles:
        models[bundle.modality][bundle.first["model"]] = None
    order = {(m, model): i for m, members in models.items() for i, model in enumerate(members)}
    return {owner_of(row): DASHES[order[b.modality, row["model"]] % len(DASHES)] for b in bundles for row in b.members}


def modality_series(found: Comparison) -> tuple[Series, ...]:
    """Average cosine over relative depth, one line per stack, coloured by modality; untrained models are pale."""
    records = {owner_of(record): record for record in found.records}
    bundles = bundles_of(found.rows)
    dashes, (front, behind) = _dashes(bundles), in_front(bundles)
    sides = [*((bundle, True) for bundle in behind), *((bundle, False) for bundle in front)]
    return tuple(s for b, pale in sides for s in _bundle_series(b, records, dashes[owner_of(b.first)], pale=pale))


def _bundle_series(bundle: Bundle, records: Mapping[Owner, Record], dash: str, *, pale: bool = False) -> list[Series]:
    """The mean over seeds with markers, above thin lines for the seeds."""
    lines = [counted(records[owner_of(row)]) for row in bundle.members]
    hue, state = hue_of(bundle.modality), common_state(bundle, state_of)
    words = ", ".join(part for part in (bundle.modality, "untrained weights" if pale else "", bundle.seeds) if part)
    name, points = f"{bundle.label} ({words})", over_seeds(lines)
    look: dict[str, Any] = {"colour": series(hue, 0.35 if pale else 1.0), "dash": dash, "width": 1.1 if pale else 1.8}
    size = 4.0 if pale else 8.0 if state == "fails" else 6.0
    mean = Series(name, [p["depth"] for p in points], [brief(p["cosine"], 4) for p in points], size=size,
                  marker=LOOKS[state][1], text=_where(points, name), named=not pale, **look)  # fmt: skip
    if pale or len(lines) == 1:
        return [mean]
    faint: dict[str, Any] = {"colour": series(hue, 0.35), "width": 0.9, "dash": dash, "quiet": True}
    thin = [Series(name, [p["depth"] for p in one], [brief(p["cosine"], 4) for p in one], **faint) for one in lines]
    return [*thin, mean]


def _groups(found: Comparison, bundles: Sequence[Bundle], row: Callable[[Bundle], list[TableCell]]) -> list[Any]:
    """Table rows by modality; with several modalities the first row of each has its name."""
    groups = [[row(b) for b in bundles if b.modality == modality] for modality in found.modalities]
    for modality, group in zip(found.modalities, groups, strict=True):
        if group and len(groups) > 1:
            group[0].insert(0, TableCell(modality, head=True, rows=len(group), css="group"))
    return [group for group in groups if group]


def _modality_table(found: Comparison, bundles: Sequence[Bundle], dashes: Mapping[Owner, str], label: str) -> DataTable:
    numeric = ("Blocks", "Middle", "Largest", "Mean", f"Beyond {found.beyond}", "Drift")
    heads = ["Modality", "Model", *(TableCell(name, css="num") for name in numeric), "Explained"]
    rows = _groups(found, bundles, lambda bundle: _modality_row(bundle, dashes[owner_of(bundle.first)]))
    return DataTable([heads], rows, label, "plain modal", numeric=99)


def _modality_row(bundle: Bundle, dash: str) -> list[TableCell]:
    """The table row of a model: means and ranges over its seeds."""
    row, blocks = bundle.first, spans({member["max_layer"] for member in bundle.members})
    known = finite(row["mean_low"]) is not None and finite(row["mean_high"]) is not None
    alone = f"{number(row['mean_low'])} to {number(row['mean_high'])}" if known else ""
    ends = range_words(bundle.values("mean")) if bundle.seeds else alone
    aside = ", ".join(part for part in ("untrained weights" if bundle.untrained else "", bundle.seeds) if part)
    owner = TableCell(bundle.label, [aside], head=True, swatch=Swatch("", series(hue_of(bundle.modality)), dash))
    peak = f"block{'' if blocks.isdigit() else 's'} {blocks}"
    numbers = [(row["layers"], ""), (number(bundle.mean("middle")), ""), (number(bundle.mean("max")), peak)]
    numbers += [(number(bundle.mean("mean")), ends), (f"{100 * (bundle.mean('share_beyond') or 0.0):.0f} %", "")]
    numbers += [(number(bundle.mean("drift")), "")]
    return [owner, *(TableCell(str(t), [s] if s else (), css="num") for t, s in numbers), state_cell(bundle, state_of)]


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
    lead = ["Each point is a layer, from the embedding to the last block. Layers of one model are neighbours, not "
            "draws: a correlation describes the model, and p with it."]  # fmt: skip
    lead += ["Seeds of a model are drawn together, a path for each; its numbers are means over seeds, from the lowest "
             "to the highest."] if seeds else []  # fmt: skip
    parts: list[Any] = [Prose(" ".join([*lead, "Intervals of single layers are told where you point."]))]
    parts += [page.Ramp("embedding", "last block"), Controls(switch), page.Says(switch)]
    files: dict[str, Mapping[str, int]] = {"drift-and-cosine": {}}
    files |= {"drift-near-identity": {"drift.0": 1}} if near else {}
    first, rest = panels[: len(front)][:OPEN], panels[OPEN : len(front)]
    layout = "grid" if len(first) > 1 else "narrow"
    parts += [Figure(tuple(first), id="drift", layout=layout, files=files, most=OPEN, size=1.75)]
    for name, more in (("Further models", rest), ("Models with random weights", panels[len(front) :])):
        parts += [Fold(f"{name} ({len(more)})", [Figure(tuple(more))], css="behind")] if more else []
    parts += [Heading("Correlations"), _drift_table(found, front, several=several, pooled=True)]
    if behind:
        counts = Counter(common_state(bundle, status_of) for bundle in behind)
        states = listed([f"{counts[state]} {look[2]}" for state, look in LOOKS.items() if counts[state]])
        table = _drift_table(found, behind, several=several, pooled=False)
        parts.append(Fold(f"{size_words(behind)} with random weights: {states}", [table], css="behind"))
    parts.append(Prose(_drift_words(found, front, seeds=seeds), css="says"))
    return Section("drift", "Drift and average cosine", [*parts, *_pool_parts(found)], "Drift")


def drift_panel(bundle: Bundle, *, alone: bool, several: bool) -> Panel:
    """Average cosine against drift, and in a second view against squared relative drift; one path per seed."""
    views = {}
    for i, (name, title) in enumerate((("drift", DRIFT), ("relative_drift", IDENTITY))):
        drawn, places = [], []
        for record in bundle.members:  # sites are connected in order of depth and coloured by depth
            points, seed = [p for p in counted(record) if finite(p[name]) is not None], f"seed {record['seed']}"
            values, label = [p[name] ** (1 + i) for p in points], seed if bundle.seeds else ""
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
    if not wants_log(places):
        return Axis(title)
    return Axis(title, log=True, bounds=(min(places) / 1.15, max(places) * 1.15))


def bundle_words(bundle: Bundle) -> str:
    """The correlations of one seed with intervals, or means and ranges over seeds, as text."""
    if not bundle.seeds:
        return correlation_words(bundle.first)
    ends = [f"{name.capitalize()} {_mean_words(bundle, name)}" for name in ("pearson", "spearman")]
    states = state_cell(bundle, status_of).text
    share = f" Share that goes with the mean: {_mean_words(bundle, 'explained')}." if bundle.values("explained") else ""
    sites = spans({record["n"] for record in bundle.members})
    return f"{ends[0]}, {ends[1]} over {sites} sites.{share} Explained by drift: {states}."


def _mean_words(bundle: Bundle, name: str) -> str:
    """Mean and range over seeds as text."""
    values = bundle.values(name)
    return interval_words(bundle.mean(name), min(values, default=None), max(values, default=None))


def correlation_words(record: Record) -> str:
    """Both correlations with intervals, the number of sites, and whether drift explains, as text."""
    ends = []
    for name in ("pearson", "spearman"):
        p = p_words(record.get(f"{name}_p"))
        test = "" if p == "–" else f" (p {'' if p.startswith('<') else '= '}{p})"
        ends.append(f"{name.capitalize()} {_told(record, name)}{test}")
    summary = f"{ends[0]}, {ends[1]} over {plural(record['n'], 'site')}."
    if finite(record["explained"]) is not None:
        summary += f" Share that goes with the mean: {_told(record, 'explained')}."
        summary += f" Explained by drift: {LOOKS[record['status']][0]}."
    near = interval_words(record["near_identity"], None, None)
    summary += "" if near == "–" else f" Near-identity: Pearson {near}."
    final = [p for p in record["points"] if not p["counted"] and finite(p["drift"]) is not None]
    excluded = [f"drift {number(p['drift'])}, cosine {number(p['cosine'])}" for p in final]
    return summary + (f" Not counted: the final norm, {excluded[0]}." if excluded else "")


def _drift_table(found: Comparison, bundles: Sequence[Bundle], *, several: bool, pooled: bool) -> DataTable:
    """The table of all models by modality, followed by the pooled correlations."""
    numeric = [TableCell(name, css="num") for name in ("Sites", "Pearson", "Spearman", "Share")]
    heads = [*(["Modality"] if several else []), "Model", *numeric, "Explained"]
    groups = _groups(found, bundles, lambda bundle: _drift_row(bundle, found.fewest))
    pools = [_pool_row(found, row, several=several) for row in (_pools(found) if pooled else [])]
    label = "Correlations of drift with average cosine" if pooled else "Correlations of models with random weights"
    return DataTable([heads], [*groups, *([pools] if pools else [])], label, "plain modal", numeric=99)


def _drift_row(bundle: Bundle, fewest: int) -> list[TableCell]:
    """The table row of a model: one seed with intervals, or means and ranges over seeds with a fold for each seed."""
    notes = {record["note"] or _why_open(record, fewest) for record in bundle.members}
    names, each = {"pearson": "Pearson", "spearman": "Spearman", "explained": "share"}, []
    for one in bundle.members:
        results = [f"{word} {_told(one, name).replace(', ', ' to ')}" for name, word in names.items()]
        plain = ", ".join(results).replace("[", "(").replace("]", ")")
        each.append(f"seed {one['seed']}: {plain}: {LOOKS[one['status']][0]}")
    parts = [_parted(_mean_words(bundle, name)) for name in names]
    if not bundle.seeds:
        parts = [_parted(_told(bundle.first, name), p_words(bundle.first.get(f"{name}_p"))) for name in names]
    fold = (f"each of {len(each)} seeds", each) if bundle.seeds else None
    owner = TableCell(bundle.label, ["untrained weights"] if bundle.untrained else [], head=True, fold=fold)
    sites = TableCell(spans({one["n"] for one in bundle.members}), css="num")
    return [owner, sites, *parts, state_cell(bundle, status_of, next(iter(notes)) if len(notes) == 1 else "")]


def _told(record: Record, name: str) -> str:
    return interval_words(record[name], record.get(f"{name}_low"), record.get(f"{name}_high"))


def _parted(words: str, p: str = "") -> TableCell:
    """A table cell with a value, its interval below, and its p."""
    value, _, ends = words.partition(" ")
    small = [ends.strip("[]").replace(", ", " to ")] if ends else []
    small += [f"p {'' if p.startswith('<') else '= '}{p}"] if p and p != "–" else []
    return TableCell(value, small, css="num")


def _why_open(record: Record, fewest: int) -> str:
    if record["status"] != "undecided":
        return ""
    if record["n"] < fewest:
        return f"{plural(record['n'], 'site')}, {fewest} are needed"
    return "the share was not measured" if finite(record["explained"]) is None else ""


def _pools(found: Comparison) -> list[dict[str, Any]]:
    """The pooled correlations of each modality (if there are several) and of all; none for a single stack."""
    if len(found.units) < 2:
        return []
    several = len({row["modality"] for row in found.pooled if row["modality"] != "all"}) > 1
    every = [row for row in found.pooled if row["modality"] != "all" and row["stacks"] > 1]
    return [*(every if several else []), *(row for row in found.pooled if row["modality"] == "all")]


def _pool_row(found: Comparison, row: Record, *, several: bool) -> list[TableCell]:
    """The table row of a pooled correlation with the values of the claim; Pearson's only if the claim has it."""
    name = "all models" if row["modality"] == "all" else row["modality"]
    spearman = _parted(interval_words(row["spearman"], row["low"], row["high"]), p_words(row["p"]))
    ends = interval_words(row.get("pearson"), row.get("pearson_low"), row.get("pearson_high"))
    pearson = _parted(ends, p_words(row.get("pearson_p")))
    cells = [TableCell(name, head=True, css="group")] if several else []
    cells += [TableCell("pooled", [pool_size(found, row)], head=True), TableCell(str(row["n"]), css="num")]
    return [*cells, pearson, spearman, TableCell(), TableCell("", [row["note"]] if row["note"] else ())]


def pool_size(found: Comparison, row: Record) -> str:
    """The number of models and stacks as text; with pooled seeds, models × seeds."""
    pool = bundles_of([record for record, *_ in found.units if row["modality"] in ("all", record["modality"])])
    if any(bundle.seeds for bundle in pool):
        return size_words(pool)
    return f"{plural(len(row['models']), 'model')}, {plural(row['stacks'], 'stack')}"


def _drift_words(found: Comparison, front: Sequence[Bundle], *, seeds: bool) -> Any:
    lost, open_ = (in_seeds(front, status_of, state) for state in ("fails", "undecided"))
    parts = ["<strong>Not explained by drift{how}: {lost}.</strong>"] if lost else []
    parts += ["Open: {open}."] if open_ else []
    parts.append(
        "Drift with average cosine over the embedding and the blocks; "
        + ("of several seeds the mean, from the lowest to the highest; of one seed " if seeds else "")
        + "95&nbsp;% intervals that know both contexts and how few layers there are; <em>share</em>: of the "
        "cosine, what goes with the mean, median over sites. <em>Explained</em> needs both the rank correlation and "
        "the share, at {fewest} sites at least. p is {note}."
    )
    parts += ["Pooled are the ranks of layers within their own models, of trained models alone; intervals are over "
              "models, p is that of layers shuffled within models."] if _pools(found) else []  # fmt: skip
    how = ", seed by seed" if seeds else ""
    values = {"how": how, "lost": ", ".join(lost), "open": ", ".join(open_), "fewest": found.fewest}
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
    key = [Swatch(m, series(hue_of(m))) for m in dict.fromkeys(record["modality"] for record, *_ in found.units)]
    lead = (
        "Every layer at its rank within its own model, so that models of any scale can be pooled; models are shifted "
        "a little aside so that equal ranks can be seen."
    )
    shown = Figure((panel,), id="drift-pooled", layout="narrow", files={"drift-and-cosine-pooled": {}}, size=3.0)
    return [Heading("All models together"), Prose(lead), Swatches(key), shown]


def pooled_series(found: Comparison) -> tuple[Series, ...]:
    """Every site of every trained stack at its relative ranks, coloured by modality."""
    labels = {owner_of(record): record["label"] for record in found.records}
    drawn, seen, count = [], set(), len(found.units)
    for i, (record, one, two) in enumerate(found.units):
        aside = 0.5 + min(0.012, 0.1 / count) * (i - (count - 1) / 2)  # offset: stacks often have equal ranks
        sites = [p for p in counted(record) if finite(p["drift"]) is not None]
        name, new = labels.get(owner_of(record), str(record["model"])), record["modality"] not in seen
        seen.add(record["modality"])
        marker = "circle" if record["status"] != "fails" else "diamond-open"
        drawn.append(Series(name, [brief(z + aside, 4) for z in one], [brief(z + 0.5, 4) for z in two],
                            series(hue_of(record["modality"]), 0.7), width=0, size=7, marker=marker, named=new,
                            text=_where(sites, name)))  # fmt: skip
    return tuple(drawn)


def modality_findings(found: Comparison) -> list[page.PageFinding]:
    """Findings on the anisotropy of each modality and on models that drift does not explain; None for one modality."""
    if len(found.modalities) < 2:
        return []
    bundles = bundles_of(found.rows)
    trained = [bundle for bundle in bundles if not bundle.doubt]
    means = [_modality_words(m, [b for b in trained if b.modality == m]) for m in found.modalities]
    if not any(means):
        return []
    texts = [f"Average cosine over blocks: {listed([text for text in means if text])}."]
    missed, unsure = (words.shortened(in_seeds(trained, state_of, state), 5) for state in ("fails", "undecided"))
    alone = any(bundle.seeds for bundle in trained)  # over all seeds more can be decided than in one
    start = "Seed by seed, the" if alone else "The"
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
    if not rows:
        return ""
    if len(rows) == 1:
        return f"{estimate(rows[0]['mean'], rows[0]['mean_low'], rows[0]['mean_high'])} in {modality}"
    size = bundles[0].seeds if len(bundles) == 1 else size_words(bundles)
    values = [row["mean"] for row in rows]
    return f"{number(fmean(values))} in {modality} ({size}, {range_words(values)})"
