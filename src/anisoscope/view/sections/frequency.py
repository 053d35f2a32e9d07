"""The section on token frequency: enrichment by bin, masked and unmasked rows, frequency against spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from anisoscope.view import page
from anisoscope.view.figure import Axis, Figure, Level, Panel, Switch, choice, sequence, series
from anisoscope.view.page import Controls, DataTable, Heading, Prose, Section, Swatch, Swatches, TableCell, text
from anisoscope.view.sections import gradients
from anisoscope.view.sections.gradients import ENRICHMENT, FILE_PANELS, Gradients, LineKey, Look, depth_look, points
from anisoscope.view.subjects import STREAM, DrawnSite, Subject, known
from anisoscope.view.words import bin_words, estimate, neat, number, reading_words, variant_words

SPREAD = "frequency_spread"
GROUPINGS = {"frequency": "the token itself", "target": "the token to be predicted"}
# groups of rows: label, hue and dash style
MASKS = {"": ("all rows", 6, "dash"), "masked": ("masked rows", 1, "solid"), "unmasked": ("unmasked rows", 0, "solid")}


def frequency_section(found: Gradients) -> Section | None:
    """The section: enrichment by frequency bin, masked rows, and spread; None if nothing of it was measured."""
    parts = [*_strata(found), *_masked(found), *_spread(found)]
    return Section("frequency", "Token frequency", [page.Key(), *parts], "Frequency") if parts else None


@dataclass(frozen=True)
class Bins:
    """Frequency bins by grouping (token or target), the most frequent first, and their readings."""

    found: Gradients
    groups: Mapping[str, Sequence[str]]
    readings: Sequence[str]

    def over_training(self, one: Subject, site: DrawnSite, grouping: str, reading: str) -> Panel:
        """One line per bin over training, darker for rarer tokens."""
        drawn = []
        for group, (name, shade) in self.looks(grouping).items():
            line = self.found.line(one, ENRICHMENT, site, reading=reading, group=group)
            look: Look = {"colour": shade, "width": 1.5, "size": 4.0, "band": 0.0}
            drawn += [self.found.drawn(f"bin {name}", line, **look)] if line else []
        return self.found.panel(drawn)

    def looks(self, grouping: str) -> dict[str, tuple[str, str]]:
        """The labels and colours of the bins."""
        bins = self.groups[grouping]
        return {g: (bin_words(g, str(len(bins))), sequence(i / max(1, len(bins) - 1))) for i, g in enumerate(bins)}

    def at_last(self, one: Subject, site: DrawnSite, grouping: str) -> Panel:
        """Enrichment by bin at the last step, one line per reading."""
        bins, drawn = self.groups[grouping], []
        for i, reading in enumerate(self.readings):
            rows = [self.found.last(one, ENRICHMENT, site, reading=reading, group=group) for group in bins]
            ends = [(n, row) for n, row in enumerate(rows) if row]
            where = [f"bin {n + 1}, step {row.step or 0:,}" + (f" · n {row.n:,}" if row.n else "") for n, row in ends]
            x, rows = [float(n) for n, _ in ends], [row for _, row in ends]
            style: Look = reading_look(i) | {"band": 0.14, "width": 1.9, "size": 5.0}
            drawn += [points(reading_words(reading), rows, x, where, **style)] if ends else []
        ticks = [float(i) for i in range(len(bins))], [group.partition(":")[2] for group in bins]
        axis = Axis("frequency bin, 1 = most frequent", ticks=ticks, bounds=(-0.3, len(bins) - 0.7))
        return replace(self.found.panel(drawn), x=axis)

    def told(self, one: Subject) -> str:
        """Alternative text: enrichment in the middle of the model at the last step."""
        sites, values = self.found.rows.sites([ENRICHMENT]), []
        site = sites[self.found.rows.middle(sites)]
        for group in next(iter(self.groups.values())):
            row = self.found.last(one, ENRICHMENT, site, reading=self.readings[0], group=group)
            values += [f"bin {group.partition(':')[2]} {number(row.value)}"] if row else []
        return f"Enrichment of {one.label} by frequency, {site.name}, last step: {', '.join(values)}."


def reading_look(i: int) -> Look:
    return {"colour": series(i), "dash": ("solid", "dash", "dot", "dashdot")[i % 4]}


def _enriched(found: Gradients, keys: Sequence[LineKey]) -> tuple[list[DrawnSite], list[str]]:
    """The sites and readings for which some groups of rows have an enrichment."""
    there = {key[2] for key in keys}
    return [site for site in found.sites([ENRICHMENT]) if site in there], gradients.readings_of(keys)[
        : found.detail.readings
    ]


def _strata(found: Gradients) -> list[Any]:
    every = {key[3] for key in found.keys([ENRICHMENT])}
    ordered = sorted(every, key=lambda group: (len(group), group))
    groups = {name: members for name in GROUPINGS if (members := [g for g in ordered if g.startswith(f"{name}:")])}
    if not groups:
        return []
    sites, readings = _enriched(found, [k for k in found.keys([ENRICHMENT]) if k[3].partition(":")[0] in groups])
    bins, choices = Bins(found, groups, readings), (sites, list(groups), readings)
    look: Look = {"alt": bins.told, "title": "enrichment"}
    moving = found.switched("frequency", choices, bins.over_training, **look) if len(found.rows.steps) > 1 else ()
    final = found.switched("frequency", choices[:2], bins.at_last, height=260, **look)
    if not final:
        return []
    lead = (
        "Rows in bins of equal mass, 1 the most frequent tokens of the training corpus; enrichment is energy over "
        "chance. A proxy fitted on all rows fits frequent tokens best; <em>balanced</em> proxies saw equally many rows "
        "of each bin, and an effect of frequency should show under both."
    )
    by = choice("Frequency of", [GROUPINGS[name] for name in groups])
    switch = Switch("frequency", (gradients.site_choice(found.rows, sites), by, gradients.reading_choice(readings)))
    parts: list[Any] = [Heading("Enrichment by frequency"), Prose(text(lead)), Controls(switch)]
    files: Look = {"files": {"frequency-strata": {}}, "most": FILE_PANELS, "columns": 4, "shared": True}
    if moving:
        key = [Swatch(*look) for look in bins.looks(next(iter(groups))).values()]
        parts += [Swatches([*key, page.CHANCE]), Figure(moving, layout="pairs", **files)]
        parts += [Heading("At the last step", 4, css="apart")]
    key = [Swatch(reading_words(reading), **reading_look(i), band=True) for i, reading in enumerate(readings)]
    return [*parts, Swatches([*key, page.CHANCE]), Figure(final, layout="pairs", **({} if moving else files))]


def _masked(found: Gradients) -> list[Any]:
    """Enrichment of masked, unmasked and all rows over training: pooling can hide the effect."""
    keys = [key for key in found.keys([ENRICHMENT]) if key[3] in ("masked", "unmasked")]
    masked = {key[0] for key in keys}
    if not masked or len(found.rows.steps) < 2:
        return []
    sites, readings = _enriched(found, keys)

    def draw(one: Subject, site: DrawnSite, reading: str) -> Panel:
        drawn = []
        for group, (name, hue, dash) in MASKS.items() if one.index in masked else ():
            line = found.line(one, ENRICHMENT, site, reading=reading, group=group)
            drawn += [found.drawn(name, line, colour=series(hue), dash=dash, width=1.9, size=4.0)] if line else []
        return found.panel(drawn)

    alt = "Enrichment of {}, masked and unmasked rows apart."
    panels = found.switched(
        "masked", [sites, readings], draw, alt=lambda one: alt.format(one.label), title="enrichment"
    )
    lead = (
        "In a masked language model the loss sits on masked rows only; the gradients of the other rows come through "
        "attention. Their pool can hide what either shows."
    )
    key = [Swatch(name, series(hue), dash, band=True) for name, hue, dash in MASKS.values()]
    controls = Controls(
        Switch("masked", (gradients.site_choice(found.rows, sites), gradients.reading_choice(readings)))
    )
    return [Heading("Masked and unmasked rows"), Prose(lead), controls, Swatches([*key, page.CHANCE]),
            Figure(panels, layout="pairs")]  # fmt: skip


def _spread(found: Gradients) -> list[Any]:
    """Correlations of frequency with spread: over training by layer, and as a table at the last step."""
    keys = [key for key in found.keys([SPREAD]) if not key[3] and key[2].kind in STREAM]
    if not keys:
        return []
    variants = sorted({key[4] for key in keys}, key=lambda v: ("over=time" in v, "normalised" in v, v))
    chosen, sites = [v for v in variants if "over=time" not in v] or variants, found.rows.sites([SPREAD])

    def draw(one: Subject, variant: str) -> Panel:
        lines = [(site, found.thin(found.rows.line(one, SPREAD, site, variant))) for site in sites]
        drawn = [found.drawn(**depth_look(site, one.blocks), line=line) for site, line in lines if line]
        return found.panel(drawn, (Level(0.0, "no correlation", colour="@ink"),))

    def cell(one: Subject, site: DrawnSite, variant: str) -> TableCell | None:
        line, test = (known(found.rows.line(one, metric, site, variant)) for metric in (SPREAD, f"{SPREAD}_p"))
        if not line:
            return None
        last, p = line[-1], {row.step: row.value for row in test}.get(line[-1].step)
        small = [] if p is None else [f"p {neat(p, 2)}"]
        return TableCell(estimate(last.value, last.low, last.high), small, title=f"step {last.step or 0:,}", css="num")

    def table(one: Subject) -> DataTable:
        """A table of sites by variants at the last step, with intervals and p."""
        rows = {site: [cell(one, site, variant) for variant in variants] for site in sites}
        body = [[TableCell(site.name, head=True), *(found or TableCell(css="num") for found in cells)]
                for site, cells in rows.items() if any(cells)]  # fmt: skip
        heads = ["Layer", *(TableCell(variant_words(variant), css="num wraps") for variant in variants)]
        return DataTable([heads], [body], f"Frequency and spread, {one.label}", "plain sites", one.index)

    alt = "Correlation of token frequency with spread in {} over steps; the table below has the last."
    panels = (found.switched("spread", [chosen], draw, alt=lambda one: alt.format(one.label), title="correlation")
              if len(found.rows.steps) > 1 else ())  # fmt: skip
    lead = (
        "Over token types: the correlation of log frequency with the distance of a type's rows from their own "
        "centroid, equally many rows of each. Below 0, frequent tokens are the tighter ones."
    )
    parts: list[Any] = [Heading("Frequency and spread"), Prose(lead)]
    if panels:
        switch = Switch("spread", (choice("Correlation", map(variant_words, chosen)),))
        parts += [Controls(switch), page.Ramp("embedding", "last block", final=True), Figure(panels, layout="pairs")]
    when = " at the last step" if panels else ""
    name = f"All correlations{when}, with intervals and permutation p"
    return [*parts, page.Fold(name, found.tables(table), open=not panels)]
