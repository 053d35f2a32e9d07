"""Panels of `Table.plot`: one metric of any table over steps, layers or relative depth.

One of the two dimensions of a metric, steps and depth, is the x axis. The lines of one model are the other one, on the
colour ramp; several models have one line each, at their middle block or last step. Of several variants the plainest is
drawn, unless others are asked for; what the variants of all lines share stands in the title.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pyarrow as pa

from anisoscope.errors import AnisoscopeError, check_known, unknown_name
from anisoscope.results.query import SCHEMA, Query, Table, options_of, variant_name, with_options
from anisoscope.results.row import seeds_mean
from anisoscope.view import figure
from anisoscope.view.figure import Panel, Series, Time, points, value_axis
from anisoscope.view.sections.profiles import (
    Profile,
    head_maps,
    head_profile,
    main_profiles,
    profile_panel,
    profiles_elsewhere,
)
from anisoscope.view.subjects import DrawnSite, ProfileRows, RunRows, RunView, Subject
from anisoscope.view.words import Catalogue, few, number, variant_words

OVER = ("step", "layer", "depth")
STREAM = ("embed", "resid", "stage", "final")
BANDED = 4  # lines up to which intervals are drawn: the bands of more would hide each other
NAMED = 8  # lines on the ramp up to which all are in the legend; of more some are
LONGEST = 34  # characters of a name in the legend
OWNER = ("model", "seed", "stack", "source")
# what a plain reading of a metric is, for variants that have no default: the first of these values that there is
PLAIN: dict[str, tuple[str | None, ...]] = {
    "control": (None,), "of": (None,), "batch": (None,), "proxy": ("semi_nmf", "pca"), "fit": ("refit",),
}  # fmt: skip


def table_panels(
    table: Table,
    metric: str | None = None,
    *,
    over: str | None = None,
    where: Mapping[str, Any] | None = None,
    catalogue: Mapping[str, Any] | None = None,
) -> list[Panel]:
    """Panels of one metric, or of the main ones; `where` chooses among its rows as `Table.where` does."""
    if over is not None:
        check_known("axis of a plot", over, OVER)
    if not len(table):
        raise AnisoscopeError("this table has no rows, so there is nothing to plot; measure something first.")
    entries, chosen = Catalogue(catalogue), dict(where or {})
    if metric is None:
        names = _main(table.where(**chosen), entries)
        return [_panels(table, name, over, chosen, entries)[0] for name in names]
    if metric not in table.metrics:
        raise unknown_name("metric of this table", metric, table.metrics)
    return _panels(table, metric, over, chosen, entries)


def _main(table: Table, entries: Catalogue) -> list[str]:
    """The main metrics: those of the residual stream in their default variant, where there are such."""
    query = Query(table)
    stream = query.where(kind=STREAM, head=None, variant="", group="").values("metric")
    return entries.main(stream or query.where(kind=lambda kind: kind != "training").values("metric") or table.metrics)


def _panels(table: Table, metric: str, over: str | None, where: dict[str, Any], entries: Catalogue) -> list[Panel]:
    found = Query(table.where(**where, metric=metric)).known()
    if not len(found):
        told = ", ".join(f"{name}={value!r}" for name, value in where.items())
        raise AnisoscopeError(
            f"{metric} has no value{f' where {told}' if told else ''}, so there is nothing to plot; see "
            "table.unique(…) for what there is."
        )
    found = found if "group" in where else found.where(group="") if len(found.where(group="")) else found
    if "kind" not in where and len(found.where(kind=STREAM, head=None)):
        found = found.where(kind=STREAM)
    timed = len(found.where(step=...).values("step")) > 1 or not len(found.where(layer=...))
    over = over or ("step" if timed else "")
    chosen, shared = _plainest(found, where, beside=over != "step")
    narrow = Table(chosen, table.about)
    words = variant_words(shared)
    if over == "step":
        return [_step_panel(narrow, entries.entry(metric), words, where)]
    return _depth_panels(narrow, entries, words, relative={"layer": False, "depth": True}.get(over))


def _several(rows: pa.Table, name: str, *, least: int = 2) -> bool:
    return len(rows[name].drop_null().unique()) >= least


# -- which variant -----------------------------------------------------------------------------------------------------


def _plainest(found: Query, where: Mapping[str, Any], *, beside: bool) -> tuple[pa.Table, str]:
    """The rows to draw, with what all their variants share taken out of them, and that.

    Of each combination of variant keys that were asked for it is the plainest variant, and with `beside`, if that is
    the default, the one without the first position.
    """
    asked = [name for name in where if name not in SCHEMA.names and name != "variant"]
    groups = {(): found} if "variant" in where or not asked else found.groups(*asked)
    kept: list[str] = []
    for rows in groups.values():
        variants = rows.values("variant")
        kept += variants if "variant" in where else [min(variants, key=lambda v: plainness(v, rows))]
        kept += [v for v in variants if beside and v == "first=out" and "" in variants and not asked]
    distinct = list(dict.fromkeys(kept))
    sets = [set(options_of(variant).items()) for variant in distinct]
    shared = dict(set.intersection(*sets)) if sets else {}
    rows = found.where(variant=distinct).table().arrow
    short = {v: with_options(v, **dict.fromkeys(shared)) for v in distinct}
    variants = pa.array([short[v or ""] for v in rows["variant"].to_pylist()], pa.string())
    place = SCHEMA.get_field_index("variant")
    return rows.set_column(place, SCHEMA.field("variant"), variants), variant_name(shared)


def plainness(variant: str, rows: Query) -> tuple[Any, ...]:
    """A key by which the plainest of some variants comes first.

    >>> rows = Query(Table.from_records([{"variant": "fit=refit;proxy=pca;rank=16"}]))
    >>> names = ["average=row;proxy=semi_nmf", "control=next;proxy=semi_nmf", "proxy=pca", "fit=frozen;proxy=semi_nmf"]
    >>> sorted(names, key=lambda name: plainness(name, rows))[0], min(["", *names], key=lambda v: plainness(v, rows))
    ('fit=frozen;proxy=semi_nmf', '')
    """
    options = options_of(variant)
    odd = []
    for key, best in PLAIN.items():
        value = options.get(key)
        odd.append(best.index(value) if value in best else len(best) if value is not None or None in best else 0)
    others = sum(key not in PLAIN and key != "rank" for key in options)
    return (odd[0] + odd[1], others, *odd[2:], len(options), -len(rows.where(variant=variant)), variant)


# -- over steps --------------------------------------------------------------------------------------------------------


class _DrawnLine(NamedTuple):
    """One line over steps and what tells it from the others."""

    subject: Subject
    site: DrawnSite
    variant: str
    group: str
    rows: Sequence[Any]


def _step_panel(table: Table, entry: Any, shared: str, where: Mapping[str, Any]) -> Panel:
    lines = _step_lines(table, where)
    if len({line.subject for line in lines}) > 1 and "layer" not in where:
        lines = [line for line in lines if line.site == _middle(line.subject, lines)]
    sites = list(dict.fromkeys(line.site for line in lines))
    ramp = len(sites) > 1 and len({(line.subject, line.variant, line.group) for line in lines}) == 1
    steps = sorted({row.step or 0 for line in lines for row in line.rows})
    time = Time.of(steps)
    drawn = []
    for i, line in enumerate(lines):
        at = sites.index(line.site)
        look: dict[str, Any] = {"colour": figure.sequence(at / (len(sites) - 1))} if ramp else _hue(i)
        look |= {"size": 4.0 if len(line.rows) <= 40 else 0.0, "width": 1.7}
        series = points(_label(line, lines), [time.place(row.step or 0) for row in line.rows], line.rows, **look)
        drawn.append(replace(series, text=[f"{series.label} · step {r.step:,}: {number(r.value)}" for r in line.rows]))
    place = sites[0].name if len(sites) == 1 else "" if ramp or "layer" in where else "middle block"
    place = "" if place == "training loop" else place
    title = " · ".join(filter(None, (entry.title, place, shared)))
    y = value_axis(value for series in drawn for value in (*series.y, *(series.low or ()), *(series.high or ())))
    return Panel(time.axis(), y, tuple(legible(drawn, ramp=ramp)), title=title, alt=f"{title} over steps", height=360)


def _step_lines(table: Table, where: Mapping[str, Any]) -> list[_DrawnLine]:
    """Lines in order of subject and depth; heads are averaged."""
    narrow = Query(table)
    if "head" not in where and len(narrow.where(head=None)):
        narrow = narrow.where(head=None)
    narrow = narrow.where(step=...)
    if not len(narrow):
        raise AnisoscopeError("these rows have no steps, so they cannot be drawn over them; say over='layer'.")
    rows = RunRows([RunView(narrow.table(), table.about)], by=OWNER)
    heads: dict[tuple[Any, ...], list[list[Any]]] = {}
    fields = ("subject", "layer", "kind", "variant", "group", "head")
    for (*key, _), line in rows.query.lines(*fields, along="step").items():
        heads.setdefault(tuple(key), []).append(line)
    found = [
        _DrawnLine(rows.subjects[subject], DrawnSite.of(layer, kind), variant, group, seeds_mean(parts))
        for (subject, layer, kind, variant, group), parts in heads.items()
    ]
    return sorted(found, key=lambda line: (line.subject.index, line.site, line.variant, line.group))


def _middle(subject: Subject, lines: Iterable[_DrawnLine]) -> DrawnSite:
    """The site that stands for a model: its middle block, or the middle one of its sites."""
    sites = sorted({line.site for line in lines if line.subject == subject})
    wanted = DrawnSite.of(max(1, round(subject.blocks / 2)), "resid")
    return wanted if wanted in sites else sites[len(sites) // 2]


def _label(line: _DrawnLine, lines: Sequence[_DrawnLine]) -> str:
    """What tells a line from the others."""
    parts = {
        "subject": line.subject.label,
        "site": line.site.name,
        "variant": variant_words(line.variant),
        "group": line.group,
    }
    varying = [name for name in parts if len({getattr(one, name) for one in lines}) > 1]
    if "subject" in varying and len({one.site for one in lines if one.subject == line.subject}) == 1:
        varying = [name for name in varying if name != "site"]  # one site of each model
    return " · ".join(parts[name] or "all" for name in varying) or line.subject.label


def _hue(i: int) -> dict[str, Any]:
    """Colour and dash of the i-th line of several models."""
    return {"colour": figure.series(i), "dash": figure.DASHES[i // len(figure.LIGHT) % len(figure.DASHES)]}


# -- over depth --------------------------------------------------------------------------------------------------------


def _depth_panels(table: Table, entries: Catalogue, shared: str, *, relative: bool | None) -> list[Panel]:
    if not _several(table.arrow, "layer", least=1):
        raise AnisoscopeError("these rows have no layers, so they cannot be drawn over them; say over='step'.")
    query = Query(table)
    if len(query.groups("model", "seed", "stack")) > 1:
        table = query.at_last_step("model", "seed", "stack").table(table.about)
    rows = ProfileRows([RunView(table, table.about)])
    every = [*main_profiles(rows, entries), *profiles_elsewhere(rows, entries)]
    every += [head_profile(entries, key, maps) for key, maps in head_maps(rows, entries).items()]
    return [_depth_panel(profile, rows, shared, relative=relative) for profile in every if profile.values]


def _depth_panel(profile: Profile, rows: ProfileRows, shared: str, *, relative: bool | None) -> Panel:
    """The panel of a profile; the steps of one model are on the ramp."""
    panel = profile_panel(replace(profile, relative=relative))
    panel = replace(panel, title=" · ".join(filter(None, (panel.title, shared))), height=360)
    by_step = {i: part.values("step")[0] for i, part in rows.query.groups("subject").items()}
    steps = sorted({step for step in by_step.values() if step is not None})
    models = {(subject.model, subject.seed, subject.stack) for subject in rows.subjects}
    if len(steps) < 2 or len(models) > 1:
        return replace(panel, series=tuple(legible(panel.series, ramp=False)))
    drawn = []
    for series in panel.series:
        at = steps.index(by_step[series.owner or 0])
        drawn.append(
            replace(series, label=f"step {steps[at]:,}", colour=figure.sequence(at / (len(steps) - 1)), dash="solid")
        )
    return replace(panel, series=tuple(legible(drawn, ramp=True)))


# -- legends -----------------------------------------------------------------------------------------------------------


def legible(drawn: Sequence[Series], *, ramp: bool) -> list[Series]:
    """Lines without bands where they are many, short names in the legend, and of many lines on a ramp some names."""
    named = list(dict.fromkeys(series.label for series in drawn if series.named))
    kept = set(few(range(len(named)), 6)) if ramp and len(named) > NAMED else set(range(len(named)))
    names = {named[i] for i in kept}
    bare: dict[str, Any] = {"low": None, "high": None} if len(named) > BANDED else {}
    short = _shortened([series.label for series in drawn])
    return [
        replace(series, **bare, label=short[series.label], named=series.named and series.label in names)
        for series in drawn
    ]


def _shortened(labels: Iterable[str]) -> dict[str, str]:
    """Names cut in their middle where they are long, unless that makes two the same.

    >>> _shortened(["gpt2", "an-organisation/a-model-of-a-long-name-7b"])["an-organisation/a-model-of-a-long-name-7b"]
    'an-organisation/…of-a-long-name-7b'
    """
    half, found = LONGEST // 2, {}
    for label in labels:
        found[label] = label if len(label) <= LONGEST else f"{label[: half - 1]}…{label[-half:]}"
    return found if len(set(found.values())) == len(found) else {label: label for label in found}
