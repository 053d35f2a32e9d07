"""The section on token frequency: enrichment by bin, masked and unmasked rows, frequency against spread."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from anisoscope.view import page
from anisoscope.view.figure import Axis, Figure, Level, Panel, Switch, choice, sequence, series
from anisoscope.view.page import Controls, DataTable, Heading, Prose, Section, Swatch, Swatches, TableCell, text
from anisoscope.view.sections.gradients import ENRICHMENT, IN_FILES, Gradients, Look, Options, depth_look, points
from anisoscope.view.subjects import DrawnSite, Subject, in_stream, known
from anisoscope.view.words import bin_words, estimate, neat, reading_words, variant_words

SPREAD = "frequency_spread"
GROUPINGS = {"frequency": "the token itself", "target": "the token to be predicted"}
# groups of rows: label, hue and dash style
MASKS = {"": ("all rows", 6, "dash"), "masked": ("masked rows", 1, "solid"), "unmasked": ("unmasked rows", 0, "solid")}


def frequency_section(found: Gradients) -> Section | None:
    """The section: enrichment by frequency bin, masked rows, and spread; None if nothing of it was measured."""
    parts = [*_strata(found), *_masked(found), *_spread(found)]
    return Section("frequency", "Token frequency", [page.Key(), *parts], "Frequency") if parts else None


def _strata(found: Gradients) -> list[Any]:
    """Enrichment by bin of frequency (of the token or of its target): over training, and at the last step."""
    every = sorted({key.group for key in found.keys([ENRICHMENT])}, key=lambda group: (len(group), group))
    bins = {name: members for name in GROUPINGS if (members := [g for g in every if g.startswith(f"{name}:")])}
    if not bins:
        return []
    keys = [key for key in found.keys([ENRICHMENT]) if key.group.partition(":")[0] in bins]
    sites, readings = found.sites(sorted({key.site for key in keys if in_stream(key.site.kind)})), found.readings(keys)
    by = Options(list(bins), choice("Frequency of", [GROUPINGS[name] for name in bins]))
    reading_looks = [{"colour": series(i), "dash": ("solid", "dash", "dot", "dashdot")[i % 4]} for i in range(8)]

    def swatch(grouping: str, i: int) -> Swatch:
        last = len(bins[grouping])
        return Swatch(bin_words(bins[grouping][i], str(last)), sequence(i / max(1, last - 1)))

    def over_training(one: Subject, site: DrawnSite, grouping: str, reading: str) -> Panel:
        drawn = []
        for i, group in enumerate(bins[grouping]):
            if line := found.line(one, ENRICHMENT, site, reading=reading, group=group):
                look = {"colour": swatch(grouping, i).colour, "width": 1.5, "size": 4.0, "band": 0.0}
                drawn.append(found.drawn(f"bin {swatch(grouping, i).label}", line, **look))
        return found.panel(drawn)

    def at_last(one: Subject, site: DrawnSite, grouping: str) -> Panel:
        drawn = []
        for reading, style in zip(readings.values, reading_looks, strict=False):
            rows = [found.last(one, ENRICHMENT, site, reading=reading, group=group) for group in bins[grouping]]
            ends = [(n, row) for n, row in enumerate(rows) if row]
            where = [f"bin {n + 1}, step {row.step or 0:,}" + (f" · n {row.n:,}" if row.n else "") for n, row in ends]
            look: Look = {**style, "band": 0.14, "width": 1.9, "size": 5.0}
            x = [float(n) for n, _ in ends]
            drawn += [points(reading_words(reading), [row for _, row in ends], x, where, **look)] if ends else []
        ticks = [float(i) for i in range(len(rows))], [group.partition(":")[2] for group in bins[grouping]]
        axis = Axis("frequency bin, 1 = most frequent", ticks=ticks, bounds=(-0.3, len(rows) - 0.7))
        return replace(found.panel(drawn), x=axis)

    options = [sites, by, readings]
    look: Look = {"alt": "Enrichment of {} by token frequency.", "title": "enrichment"}
    moving = found.panels("frequency", options, over_training, **look) if len(found.rows.steps) > 1 else ()
    final = found.panels("frequency", options[:2], at_last, height=260, **look)
    if not final:
        return []
    lead = (
        "Rows in bins of equal mass, 1 the most frequent tokens of the training corpus; enrichment is energy over "
        "chance. A proxy fitted on all rows fits frequent tokens best; <em>balanced</em> proxies saw equally many rows "
        "of each bin, and an effect of frequency should show under both."
    )
    switch = Switch("frequency", tuple(option.choice for option in options))
    parts: list[Any] = [Heading("Enrichment by frequency"), Prose(text(lead)), Controls(switch)]
    files: Look = {"files": {"frequency-strata": {}}, **IN_FILES}
    if moving:
        key = [swatch(by.values[0], i) for i in range(len(bins[by.values[0]]))]
        parts += [Swatches([*key, page.CHANCE]), Figure(moving, layout="pairs", **files)]
        parts += [Heading("At the last step", 4, css="apart")]
    pairs = zip(readings.values, reading_looks, strict=False)
    key = [Swatch(reading_words(reading), **style, band=True) for reading, style in pairs]
    return [*parts, Swatches([*key, page.CHANCE]), Figure(final, layout="pairs", **({} if moving else files))]


def _masked(found: Gradients) -> list[Any]:
    """Enrichment of masked, unmasked and all rows over training: pooling can hide the effect."""
    keys = [key for key in found.keys([ENRICHMENT]) if key.group in ("masked", "unmasked")]
    masked = {key.subject for key in keys}
    if not masked or len(found.rows.steps) < 2:
        return []

    def draw(one: Subject, site: DrawnSite, reading: str) -> Panel:
        drawn = []
        for group, (name, hue, dash) in MASKS.items() if one.index in masked else ():
            line = found.line(one, ENRICHMENT, site, reading=reading, group=group)
            drawn += [found.drawn(name, line, colour=series(hue), dash=dash, width=1.9, size=4.0)] if line else []
        return found.panel(drawn)

    lead = (
        "In a masked language model the loss sits on masked rows only; the gradients of the other rows come through "
        "attention. Their pool can hide what either shows."
    )
    options = [found.sites(sorted({key.site for key in keys if in_stream(key.site.kind)})), found.readings(keys)]
    key = Swatches([*(Swatch(name, series(hue), dash, band=True) for name, hue, dash in MASKS.values()), page.CHANCE])
    how: Look = {"alt": "Enrichment of {}, masked and unmasked rows apart.", "title": "enrichment"}
    return found.parts("masked", options, draw, heading="Masked and unmasked rows", lead=lead, key=key, **how)


def _spread(found: Gradients) -> list[Any]:
    """Correlations of frequency with spread: over training by layer, and as a table at the last step."""
    keys = [key for key in found.keys([SPREAD]) if not key.group and in_stream(key.site.kind)]
    if not keys:
        return []
    variants = sorted({key.variant for key in keys}, key=lambda v: ("over=time" in v, "normalised" in v, v))
    chosen, sites = [v for v in variants if "over=time" not in v] or variants, found.rows.sites([SPREAD])

    def draw(one: Subject, variant: str) -> Panel:
        lines = [(site, found.thin(found.rows.line(one, SPREAD, site, variant))) for site in sites]
        drawn = [found.drawn(**depth_look(site, one.blocks), line=line) for site, line in lines if line]
        return found.panel(drawn, (Level(0.0, "no correlation", colour="@ink"),))

    def cell(one: Subject, site: DrawnSite, variant: str) -> TableCell:
        line, test = (known(found.rows.line(one, metric, site, variant)) for metric in (SPREAD, f"{SPREAD}_p"))
        if not line:
            return TableCell(css="num")
        last, p = line[-1], {row.step: row.value for row in test}.get(line[-1].step)
        small = [] if p is None else [f"p {neat(p, 2)}"]
        return TableCell(estimate(last.value, last.low, last.high), small, title=f"step {last.step or 0:,}", css="num")

    def table(one: Subject) -> DataTable:
        rows = {site: [cell(one, site, variant) for variant in variants] for site in sites}
        measured = {site: cells for site, cells in rows.items() if any(cell.text for cell in cells)}
        body = [[TableCell(site.name, head=True), *cells] for site, cells in measured.items()]
        heads = ["Layer", *(TableCell(variant_words(variant), css="num wraps") for variant in variants)]
        return DataTable([heads], [body], f"Frequency and spread, {one.label}", "plain sites", one.index)

    lead = (
        "Over token types: the correlation of log frequency with the distance of a type's rows from their own "
        "centroid, equally many rows of each. Below 0, frequent tokens are the tighter ones."
    )
    heading, key = "Frequency and spread", page.Ramp("embedding", "last block", final=True)
    how: Look = {"alt": "Correlation of token frequency with spread in {} over steps.", "title": "correlation"}
    options = [Options(chosen, choice("Correlation", map(variant_words, chosen)))]
    moving = len(found.rows.steps) > 1
    parts = found.parts("spread", options, draw, heading=heading, lead=lead, key=key, **how) if moving else []
    name = f"All correlations{' at the last step' if parts else ''}, with intervals and permutation p"
    above = parts or [Heading(heading), Prose(lead)]
    return [*above, page.Fold(name, found.tables(table), open=not parts)]
