"""Sections on metrics over depth: profiles, groups of contexts, heads, spectra, overview map, CKA between layers."""

from __future__ import annotations

import html
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np

from anisoscope.results.privacy import name_of
from anisoscope.results.quantity import mean_of
from anisoscope.results.query import Query, Row, options_of, with_options
from anisoscope.view import figure, subjects
from anisoscope.view.figure import Axis, Depth, Figure, Grid, Panel, Series, brief, wants_log
from anisoscope.view.page import DataTable, Fold, Heading, Key, Prose, Ramp, Section, TableCell, text
from anisoscope.view.sections.findings import doubtful
from anisoscope.view.subjects import ProfileRows, RunView, Subject, by_depth, known, place_of, without_first
from anisoscope.view.words import (
    OF_BLOCK,
    SITES,
    Catalogue,
    Entry,
    estimate,
    finite,
    number,
    sentences,
    site_name,
    strided,
)

SCORES = {"scores": "", "cross_scores": "cross-attention"}  # titles of sites that are attention scores
LARGE_MAP = 14
LEAD = (
    "Bands are 95&nbsp;% intervals that resample contexts, not rows, for each layer on its own. <em>embed</em> is the "
    "input of the first block; numbers are blocks, or relative depth (1: the last block) where models are compared. "
    "The <em>final</em> norm, where there is one, is a diamond apart. Dashed lines, drawn where the first position of "
    "each context is an outlier, leave it out. Point at a value for its counts and notes."
)
# "encoder.3.resid", or "some/model/3.resid" where one run holds several models
SITE = re.compile(
    r"(?:(?P<model>.+?)[/|:# ]+)?(?:(?P<stack>encoder|decoder|single)\.)?(?P<layer>\d+)\.(?P<kind>[A-Za-z_][\w.]*)"
)


@dataclass(frozen=True)
class Line:
    """The rows of one subject in order of depth, in one variant or for one group of contexts."""

    subject: Subject
    rows: Sequence[Any]
    variant: str = ""
    group: str = ""
    reach: str = ""  # what the band shows, if it is not the interval


@dataclass(frozen=True)
class Profile:
    """One metric (in one variant, at one kind of site) and the lines that share its axes."""

    entry: Entry
    lines: tuple[Line, ...]
    variant: str = ""
    kind: str = ""  # "" = the residual stream
    relative: bool | None = None  # whether the x axis is relative depth; None: where depths differ

    @property
    def title(self) -> str:
        return " · ".join(part for part in (self.entry.title, self.kind, self.variant) if part)

    @property
    def values(self) -> list[float]:
        return [row.value for line in self.lines for row in known(line.rows)]

    @property
    def depth(self) -> Depth:
        """The x axis: by layer for one model, by relative depth if depths differ or models are compared."""
        models, depths = ({getattr(line.subject, name) for line in self.lines} for name in ("model", "blocks"))
        rows = [row for line in self.lines for row in line.rows]
        beside = {"rows", "unembed", "embed_weight"}
        named = {row.kind for row in rows if row.kind in beside or row.kind not in (*SITES, *OF_BLOCK)}
        odd = {(float(row.layer or 0), row.kind) for row in rows if row.kind in named}
        relative = len(models) > 1 or len(depths) > 1 if self.relative is None else self.relative
        return Depth(max(depths, default=1), relative, any(row.kind == "final" for row in rows), tuple(sorted(odd)))


def profiles_of(rows: ProfileRows, catalogue: Catalogue, query: Query, kind: str = "") -> list[Profile]:
    """One profile per metric, main metrics first; the variant without the first position joins the default."""
    found = []
    by_metric = query.groups("metric")
    for metric in catalogue.ordered(by_metric):
        parts = by_metric[metric].groups("subject", "variant")
        lines = [Line(rows.subjects[i], by_depth(part), v) for (i, v), part in sorted(parts.items())]
        bases = list(dict.fromkeys(with_options(v, first=None) for v in by_metric[metric].values("variant")))
        if "" not in bases and len({line.subject.index for line in lines}) == 1:
            found.append(Profile(catalogue.entry(metric), tuple(lines), kind=kind))
            continue
        for base in bases:
            members = tuple(line for line in lines if with_options(line.variant, first=None) == base)
            found.append(Profile(catalogue.entry(metric), members, base, kind))
    return found


def main_profiles(rows: ProfileRows, catalogue: Catalogue) -> list[Profile]:
    return profiles_of(rows, catalogue, rows.stream.where(group=""))


def profiles_elsewhere(rows: ProfileRows, catalogue: Catalogue) -> list[Profile]:
    """Profiles of sites outside the residual stream that are not per head, by kind."""

    def away(row: Row) -> bool:
        per_head = (row["subject"], row.metric, row.kind, row.variant) in rows.headed
        return not per_head and row.kind not in rows.streams[row["subject"]]

    found = rows.query.where(away, head=None, group="")
    return [p for kind, part in found.groups("kind").items() for p in profiles_of(rows, catalogue, part, kind)]


@dataclass(frozen=True)
class HeadMap:
    """One metric over the heads and layers of one subject."""

    subject: Subject
    values: Mapping[tuple[int, int], float | None]  # (head, layer)
    mean: Sequence[Row]  # the mean over heads from the table, with its interval

    def line(self, kind: str, *, banded: bool) -> Line:
        """The mean over heads: from the table with its interval, else computed here with the range of heads as band."""
        means: list[Any] = list(self.mean)
        for layer in sorted({layer for _, layer in self.values}) if not means else ():
            values = [v for (_, at), v in self.values.items() if at == layer and v is not None]
            low, high = (min(values), max(values)) if values and banded else (math.nan, math.nan)
            fields = {"layer": layer, "kind": kind, "depth": math.nan, "note": f"mean over {len(values)} heads"}
            fields |= {"value": mean_of(values), "low": low, "high": high}
            means.append(SimpleNamespace(**fields, interval=(low, high) if math.isfinite(low) else None))
        return Line(self.subject, means, reach="" if self.mean else "heads from")


def head_maps(rows: ProfileRows, catalogue: Catalogue) -> dict[tuple[str, str, str], list[HeadMap]]:
    """Maps by metric, kind and variant, one per subject; attention scores first."""
    every = rows.query.where(lambda row: (row["subject"], row.metric, row.kind, row.variant) in rows.headed, group="")
    order = {metric: i for i, metric in enumerate(catalogue.ordered(rows.metrics()))}
    found: dict[tuple[str, str, str], list[HeadMap]] = {}
    groups = every.groups("metric", "kind", "variant")
    for key in sorted(groups, key=lambda key: (key[1] not in SCORES, key[1] != "scores", order[key[0]], key[1:])):
        for i, part in groups[key].groups("subject").items():
            values = {(row.head, row.layer): finite(row.value) for row in part.where(head=...)}
            found.setdefault(key, []).append(HeadMap(rows.subjects[i], values, by_depth(part.where(head=None))))
    return found


def head_profile(catalogue: Catalogue, key: tuple[str, str, str], maps: Sequence[HeadMap]) -> Profile:
    """The profile of a metric's mean over heads; bands only for up to two lines, since more would overlap."""
    metric, kind, variant = key
    lines = tuple(found.line(kind, banded=len(maps) <= 2) for found in maps)
    return Profile(catalogue.entry(metric), lines, variant, "" if kind == "scores" else kind)


def profile_panel(profile: Profile, *, title: str = "", owner: str = "", caption: str = "") -> Panel:
    """A panel: models by colour, roles by marker, without first position dashed; for one model groups by colour."""
    depth, values = profile.depth, profile.values
    groups = list(dict.fromkeys(line.group for line in profile.lines))
    variants = [v for v in dict.fromkeys(line.variant for line in profile.lines) if not without_first(v)]
    drawn = [part for line in profile.lines for part in _line_series(line, depth, groups, variants)]
    from_zero = profile.entry.bounds[0] == 0 and bool(values) and min(values) < 0.4 * max(values)
    y = Axis(rules=True, log=True, most=4) if wants_log(values) else Axis(rules=True, from_zero=from_zero, most=5)
    # the panel has its own legend if colours stand for something other than the models of the page's legend
    legend = len(variants) > 1 or any(groups)
    words: dict[str, Any] = {"title": title or profile.title, "owner": owner, "alt": _profile_alt(profile)}
    words |= {"caption": caption or _profile_caption(profile), "formula": profile.entry.formula}
    return Panel(depth.axis(), y, tuple(drawn), **words, legend=legend, height=280 if legend else 240)


def _line_series(line: Line, depth: Depth, groups: list[str], variants: list[str]) -> list[Series]:
    """The line through the blocks, and isolated points: the final norm, or a site between gaps."""
    subject, dropped, several = line.subject, without_first(line.variant), len(variants) > 1
    hue = subject.index
    if line.group:
        hue = groups.index(line.group)
    elif several:
        hue = variants.index(line.variant) if line.variant in variants else 0
    family = 0 if several and not line.group else hue // len(figure.LIGHT)
    # the variant as text; only the variant if lines differ in nothing else
    options = options_of(line.variant).items()
    variant = ", ".join("without first position" if o == ("first", "out") else "=".join(o) for o in options)
    label = line.group or " · ".join(part for part in ("" if several else subject.label, variant) if part)
    look: dict[str, Any] = {"colour": figure.series(hue), "owner": subject.index, "hollow": dropped}
    body = [row for row in line.rows if row.kind != "final"]
    runs = [list(part) for there, part in groupby(body, key=lambda row: math.isfinite(row.value)) if there]
    lone = [row for run in runs if len(run) == 1 for row in run]
    lone += [row for row in known(line.rows) if row.kind == "final"]
    alone = {id(row) for row in lone}
    path = [row for row in body if id(row) not in alone] if any(len(run) > 1 for run in runs) else []
    drawn = []
    if path:
        dashes = ["dash"] if dropped else figure.DASHES
        more: dict[str, Any] = {"size": 4 if len(path) > 16 else 5.5, "dash": dashes[family % len(dashes)]}
        more |= {"width": 1.9, "band": 0.16} if not dropped else {"width": 1.4, "band": 0.09}
        drawn.append(_points(line, path, depth, label, marker=subject.marker, **look, **more))
    if lone:
        look |= {"marker": "diamond", "size": 7, "width": 0, "bars": "y", "named": not path}
        drawn.append(_points(line, lone, depth, label, **look))
    return drawn


def _points(line: Line, rows: Sequence[Any], depth: Depth, label: str, **look: Any) -> Series:
    places = [depth.place(row.layer or 0, row.kind, line.subject.blocks, row.depth) for row in rows]
    ends = {name: [finite(getattr(row, name)) if row.interval else None for row in rows] for name in ("low", "high")}
    look |= ends if any(end is not None for end in ends["low"]) else {}
    words = [_hover(row, label, line.reach) if math.isfinite(row.value) else "" for row in rows]
    return Series(label, places, [finite(row.value) for row in rows], text=words, **look)


def _hover(row: Any, label: str, reach: str) -> str:
    """The hover text of a point with all its columns; names are escaped, since hover text is markup."""
    parts = [f"<b>{html.escape(label)}</b>", html.escape(place_of(row))]
    parts.append(f"<b>{number(row.value) if reach else estimate(row.value, row.low, row.high)}</b>")
    if row.interval:
        parts.append(f"{reach or 'interval'} {number(row.low, 4)} to {number(row.high, 4)}")
    if isinstance(row, Row):
        parts += [f"sd {number(row.sd)}"] if math.isfinite(row.sd) else []
        parts.append(" · ".join(f"{n} {row[n]:,}" for n in ("n", "contexts", "dropped") if row[n] is not None))
    parts += [html.escape("\n".join(textwrap.wrap(row.note, 46))).replace("\n", "<br>")] if row.note else []
    return "<br>".join(part for part in parts if part)


def _profile_caption(profile: Profile) -> str:
    """The caption: the meaning of the metric, and special features of this panel."""
    entry, convention = profile.entry, profile.entry.convention.strip()
    parts = [entry.description.strip(), convention[:1].upper() + convention[1:]]
    if wants_log(profile.values):
        parts.append("Logarithmic axis.")
    if any(without_first(line.variant) for line in profile.lines):
        parts.append("Dashed: without the first position.")
    if entry.name == "two_nn" and max(profile.values) > 12 and "biased" not in convention:
        parts.append("Biased low above about 15 at 4,096 rows.")
    return sentences(*parts)


def _profile_alt(profile: Profile) -> str:
    """Alternative text: start, end and peak of each line."""
    courses = []
    for line in profile.lines[:6]:
        if there := known(line.rows):
            spots = (there[0], there[-1], max(there, key=lambda row: row.value))
            first, last, peak = (f"{number(row.value)} at {place_of(row)}" for row in spots)
            aside = " without first position" if without_first(line.variant) else ""
            courses.append(f"{line.group or line.subject.label}{aside}: {first} to {last}, highest {peak}")
    return f"Line chart of {profile.title} by depth. {'; '.join(courses)}."


def profiles_section(rows: ProfileRows, catalogue: Catalogue) -> Section:
    """The section of profiles: the residual stream with a file for each main metric, then variants and other sites."""
    every = [p for p in main_profiles(rows, catalogue) if p.values]
    plain = [p for p in every if not p.variant]
    main = catalogue.main({p.entry.name for p in plain})
    first = {p.entry.name: profile_panel(p) for p in plain if p.entry.name in main}
    parts: list[Any] = [Prose(text(LEAD)), Key(), *([Figure(tuple(first.values()))] if first else [])]
    parts += [Figure((p,), files={f"profile-{name}": {}}, size=2.25, shown=False) for name, p in first.items()]
    if more := [p for p in plain if p.entry.name not in main]:
        parts += [Heading("Further metrics"), Key(), Figure(tuple(map(profile_panel, more)))]
    if variants := [p for p in every if p.variant]:
        shown = Figure(tuple(map(profile_panel, variants)))
        parts.append(Fold(f"Other conventions of the same metrics ({len(variants)})", [Key(), shown]))
    away = (p for p in profiles_elsewhere(rows, catalogue) if p.values)
    for kind, members in groupby(away, key=lambda p: p.kind):
        shown = Figure(tuple(map(profile_panel, members)))
        parts.append(Fold(text("At <code>{kind}</code> ({n})", kind=kind, n=len(shown.panels)), [Key(), shown]))
    return Section("profiles", "Profiles over depth", parts, "Profiles")


def groups_section(rows: ProfileRows, catalogue: Catalogue) -> Section | None:
    """The section of groups: for each subject and metric one line per group of contexts."""
    by_metric = rows.stream.where(group=lambda group: group != "", variant="").groups("metric")
    panels = []
    for metric in catalogue.ordered(by_metric):
        for i, part in sorted(by_metric[metric].groups("subject").items()):
            subject, groups = rows.subjects[i], part.groups("group")
            lines = [Line(subject, by_depth(members), group=name) for name, members in groups.items()]
            profile = Profile(catalogue.entry(metric), tuple(lines))
            owner = subject.label if len(rows.subjects) > 1 else ""
            panels += [profile_panel(profile, owner=owner)] if profile.values else []
    words = (
        "The same metrics for each group on its own. Groups have fewer contexts than the whole, so their "
        "intervals are wider."
    )
    parts = [Prose(words), Figure(tuple(panels))]
    return Section("groups", "Groups of contexts", parts, "Groups") if panels else None


def heads_section(rows: ProfileRows, catalogue: Catalogue) -> Section | None:
    """The section of heads: per metric the mean over heads, and a map of heads by blocks for each subject."""
    every = {key: _head_parts(catalogue, key, maps) for key, maps in head_maps(rows, catalogue).items()}
    if not every:
        return None
    compared = ", so that models can be compared." if len(rows.subjects) > 1 else "."
    lead = Prose(f"Each number is per head. Maps of one metric share their colour scale{compared}")
    parts = [lead, Key(), *(part for key, of_metric in every.items() if key[1] in SCORES for part in of_metric)]
    others = [of_metric for key, of_metric in every.items() if key[1] not in SCORES]
    if others:
        inside = [part for of_metric in others for part in of_metric]
        parts.append(Fold(f"Queries and keys ({len(others)})", inside, open=len(others) == len(every)))
    return Section("attention", "Attention, head by head", parts, "Attention")


def head_title(catalogue: Catalogue, key: tuple[str, str, str]) -> str:
    parts = (catalogue.entry(key[0]).title, SCORES.get(key[1], key[1]), key[2])
    return " · ".join(part for part in parts if part)


def _head_parts(catalogue: Catalogue, key: tuple[str, str, str], maps: Sequence[HeadMap]) -> list[Any]:
    title = head_title(catalogue, key)
    values = [v for found in maps for v in found.values.values() if v is not None]
    span = (min(values), max(values)) if values else (None, None)
    band = "The band runs from the lowest head to the highest." if len(maps) <= 2 else ""
    band = "The band is the interval of the mean." if all(found.mean for found in maps) else band
    caption = f"{catalogue.entry(key[0]).description} {band}".strip()
    panels = [profile_panel(head_profile(catalogue, key, maps), title="Mean over heads", caption=caption)]
    for found in maps:
        heads, layers = (sorted({place[i] for place in found.values}) for i in (0, 1))
        z = [[found.values.get((head, layer)) for layer in layers] for head in heads]
        grid = Grid(z, [f"block {n}" for n in layers], [f"head {n}" for n in heads], ends=span, label=title)
        across, down = (
            ([float(i) for i in strided(len(names), most)], [str(names[i]) for i in strided(len(names), most)])
            for names, most in ((layers, 8), (heads, 12))
        )
        size = f"{len(heads)} heads and {len(layers)} blocks"
        words: dict[str, Any] = {"alt": f"Map of {title} over {size}, from {number(span[0])} to {number(span[1])}."}
        words["title"] = f"Heads of {found.subject.label}" if len(maps) > 1 else "Each head"
        axes = Axis("block", ticks=across), Axis("head", ticks=down, reverse=True)
        panels.append(Panel(*axes, grid=grid, height=240 if len(heads) <= LARGE_MAP else 340, **words))
    return [Heading(title), Figure(tuple(panels), layout="pairs" if len(maps) == 1 else "grid")]


def parse_site(name: str) -> tuple[str, str, int, str]:
    """Model ("" if there is none), stack, layer and kind from the name of a site.

    >>> parse_site("encoder.3.resid"), parse_site("org/m-0.5B/3.resid")
    (('', 'encoder', 3, 'resid'), ('org/m-0.5B', 'single', 3, 'resid'))
    """
    match = SITE.fullmatch(name)
    if match is None:
        return "", "single", 0, name
    return match["model"] or "", match["stack"] or "single", int(match["layer"]), match["kind"]


def _short_site(layer: int, kind: str) -> str:
    names = {"embed": "embed", "resid": str(layer), "stage": str(layer), "final": "final"}
    return names.get(kind, site_name(layer, kind))


def spectra_section(runs: Sequence[RunView], rows: ProfileRows) -> Section | None:
    """The section of spectra: shares of variance λ_k / Σλ against k, both logarithmic, coloured by depth."""
    owned = _spectra_by_owner(runs)
    titles = {owner: _shown_name(rows, owner) if len(owned) > 1 else "" for owner in owned}
    every = [replace(spectrum_panel(found), title=titles[owner]) for owner, found in owned.items()]
    panels = [panel for panel in every if panel.series]
    if not panels:
        return None
    files: dict[str, dict[str, int]] = {} if len(runs) > 1 else {"spectra": {}}
    words = (
        "Eigenvalues λ of the covariance of each layer, as shares of their sum, by rank; both axes are logarithmic. "
        "A steep line means that few directions carry the variance."
    )
    layout = "pairs" if len(panels) > 1 else "single"
    shown = Figure(tuple(panels), layout=layout, files=files, each=True, most=99, size=2.5)
    return Section("spectra", "Spectra", [Prose(words), Ramp("embedding", "last block", final=True), shown], "Spectra")


def spectrum_panel(spectra: Mapping[str, np.ndarray]) -> Panel:
    """A panel of the spectra of one model, by name of the site."""
    places = {name: parse_site(name)[2:] for name in spectra}
    order = sorted(spectra, key=lambda name: (places[name][0], places[name][1] == "final"))
    layers = [places[name][0] for name in order] or [0]
    drawn = []
    for name in order:
        (layer, kind), (ranks, shares) = places[name], _thin_spectrum(spectra[name])
        look: dict[str, Any] = {"width": 1.5, "where": [f"rank {k}" for k in ranks]}
        look |= {"named": kind == "final" or layer in (min(layers), max(layers))}
        colour = figure.sequence(layer / (max(layers) or 1))
        look |= {"colour": "@accent", "dash": "dash"} if kind == "final" else {"colour": colour}
        drawn += [Series(site_name(layer, kind), ranks, shares, **look)] if ranks else []
    alt = f"Eigenvalue spectra of {len(order)} sites, layers {min(layers)} to {max(layers)}, logarithmic."
    x, y = Axis("rank k", log=True), Axis("share of variance", log=True, rules=True)
    return Panel(x, y, tuple(drawn), alt=alt, height=360)


def _thin_spectrum(values: np.ndarray, *, keep: int = 160) -> tuple[list[int], list[float]]:
    """Ranks (log-spaced if many) and the share of variance at each, without non-positive values."""
    values = np.asarray(values, dtype=np.float64).ravel()
    values = values[np.isfinite(values)]
    total = values[values > 0].sum()
    if total <= 0:
        return [], []
    ranks = np.arange(1, len(values) + 1)
    if len(values) > keep:
        ranks = np.unique(np.round(np.geomspace(1, len(values), keep)).astype(int))
    shares = values[ranks - 1] / total
    # Eigenvalues below the float precision of the largest are rounding errors that would stretch the axis.
    good = shares > max(1e-12, 1e-9 * float(shares.max()))
    return [int(k) for k in ranks[good]], [float(f"{s:.5g}") for s in shares[good]]


def _spectra_by_owner(runs: Sequence[RunView]) -> dict[str, dict[str, np.ndarray]]:
    """Spectra of all runs by model and stack; names without a model belong to the only model of the run."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for run in runs:
        by_label: dict[str, dict[str, np.ndarray]] = {}
        models = [str(m.get("name", "")) for m in run.about.get("models") or []]
        for name, values in run.spectra.items():
            model, stack, _, _ = parse_site(name)
            owner = model or (models[0] if len(models) == 1 else "")
            label = " · ".join(part for part in (owner, stack if stack != "single" else "") if part)
            by_label.setdefault(label, {})[name] = values
        found |= {
            f"{label} · {name_of(run.path)}" if label in found else label: sites for label, sites in by_label.items()
        }
    return found


def _shown_name(rows: ProfileRows, owner: str) -> str:
    """The label of a model in the legend."""
    models = {subject.model for subject in rows.subjects}
    model = next((m for m in models if owner == m or owner.startswith(f"{m} · ")), owner)
    return subjects.short_names(models)(model) + owner[len(model) :]


def cka_section(runs: Sequence[RunView], rows: ProfileRows) -> Section | None:
    """The section with linear CKA between the layers of each model."""
    found = [(model, *both) for run in runs for model, both in (run.cka or {}).items()]
    panels = []
    for model, labels, matrix in found:
        names = []
        for _, stack, layer, kind in (parse_site(str(label)) for label in labels):
            short = _short_site(layer, kind)
            names.append(short if stack == "single" else f"{stack} {short}")
        grid = Grid([[finite(v) for v in row] for row in matrix], names, names, ends=(0.0, 1.0), label="Linear CKA")
        look: dict[str, Any] = {"title": _shown_name(rows, model) if len(found) > 1 else "", "height": 0, "equal": True}
        alt = f"Map of linear CKA between {len(names)} layers of {model}."
        panels.append(Panel(y=Axis(reverse=True), grid=grid, alt=alt, **look))
    words = (
        "Linear CKA, debiased: 1 where two layers hold the same rows up to rotation and scale, 0 where they "
        "have nothing in common."
    )
    shown = Figure(tuple(panels), layout="pairs" if len(panels) > 1 else "narrow")
    return Section("cka", "Similarity between layers", [Prose(words), shown], "Similarity") if panels else None


Places = dict[int, dict[tuple[int, bool, str], dict[str, Row]]]  # rows by subject, site and metric


def pivot(rows: ProfileRows, metrics: Iterable[str]) -> Places:
    """Rows of default variants for all contexts, by subject, by site in order of depth, and by metric."""
    found: Places = {}
    for subject in rows.subjects:
        places: dict[tuple[int, bool, str], dict[str, Row]] = {}
        for metric in metrics:
            for row in rows.line(subject, metric):
                places.setdefault((row.layer or 0, row.kind == "final", row.kind), {})[metric] = row
        if places:
            found[subject.index] = dict(sorted(places.items()))
    return found


def heat_section(rows: ProfileRows, catalogue: Catalogue, *, compared: bool) -> Section | None:
    """The overview: one table per subject, cells shaded over the range of each metric across all subjects."""
    metrics = catalogue.ordered(rows.default_metrics())
    found = pivot(rows, metrics)
    shades = {m: _shader([c[m].value for p in found.values() for c in p.values() if m in c]) for m in metrics}
    several = len(found) > 1
    words = "Every metric at every layer. Shades run from the lowest to the highest value of each column"
    words += f"{' over all models' if several else ''}: compare down a column, not across."
    parts: list[Any] = [Prose(words)]
    titles = [TableCell(text("<span>{t}</span>", t=catalogue.entry(m).title)) for m in metrics]
    heads = [[TableCell(text('<span class="hidden">Layer</span>')), *titles]]
    for index, places in found.items():
        owner = rows.subjects[index].label
        named = [(place_of(next(iter(cells.values()))), cells) for cells in places.values()]
        body = [[TableCell(at, head=True), *(_heat_cell(c.get(m), shades[m]) for m in metrics)] for at, c in named]
        parts += [Heading(owner)] if several else []
        parts.append(DataTable(heads, [body], f"Layers by metrics, {owner}", "heat", numeric=99))
    if not compared:
        parts += [_heat_figure(rows, catalogue, index, places, alone=not several) for index, places in found.items()]
    return Section("heat", "Overview map", parts, "Overview map") if found else None


def _heat_figure(
    rows: ProfileRows, catalogue: Catalogue, index: int, places: Mapping[Any, Mapping[str, Row]], *, alone: bool
) -> Figure:
    """The overview as a file: each metric scaled to its range, with values in the cells if there is room."""
    metrics = [m for m in catalogue.ordered(rows.default_metrics()) if any(m in cells for cells in places.values())]
    z = [[brief(cells[m].value) if m in cells else None for cells in places.values()] for m in metrics]
    short, label = {"embed": "emb", "final": "fin"}, rows.subjects[index].label
    names = [short.get(kind, _short_site(layer, kind)) for layer, _, kind in places]
    grid = Grid(z, names, [catalogue.entry(m).title for m in metrics], by_row=True)
    panel = Panel(y=Axis(reverse=True), grid=grid, title=label, alt=label)
    return Figure((panel,), files={"heat-map" if alone else f"heat-map-{label}": {}}, shown=False, columns=1)


def _shader(values: Sequence[float]) -> Any:
    """A function from a value to [0, 1] over the range of these values; logarithmic if they span several orders."""
    good = [v for v in values if math.isfinite(v)]
    scale = math.log if wants_log(good) else float
    low, high = (scale(min(good)), scale(max(good))) if good else (0.0, 0.0)
    return lambda value: (scale(value) - low) / (high - low) if high > low else 0.5


def _heat_cell(row: Row | None, shade: Any) -> TableCell:
    if row is None or not row.known:
        return TableCell() if row is None else TableCell("–", title=row.note or "not computed")
    doubt, note = ("?", f" · {row.note}") if doubtful(row) else ("", "")
    hover = f"{row.value!r} · {estimate(row.value, row.low, row.high)} · n {row.n}{note}"
    return TableCell(number(row.value) + doubt, title=hover, shade=f"{shade(row.value):.3f}")
