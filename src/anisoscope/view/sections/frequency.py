"""Token frequency: enrichment by bin, masked rows apart from the others, frequency against spread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anisoscope.view.figure import Axis, Figure, Level, Panel, Series, Switch, choice, sequence, series
from anisoscope.view.page import (
    CHANCE,
    Controls,
    DataTable,
    Fold,
    Heading,
    Key,
    Prose,
    Ramp,
    Section,
    Swatch,
    Swatches,
    TableCell,
    text,
)
from anisoscope.view.sections.gradients import FILE_PANELS, Gradients, depth_look, points, reading_choice, site_choice
from anisoscope.view.subjects import STREAM, DrawnSite, Subject, known
from anisoscope.view.words import bin_words, estimate, neat, number, reading_words, variant_words

ENRICHMENT = "gradient_enrichment"
GROUPINGS = {"frequency": "the token itself", "target": "the token to be predicted"}
ROWS = {"": "all rows", "masked": "masked rows", "unmasked": "unmasked rows"}
ONE = (Level(1.0, "chance", colour="@ink"),)


def frequency_section(found: Gradients) -> Section | None:
    """Enrichment by frequency bin, masked rows, and spread; none where nothing of it was measured."""
    parts = [*_strata(found), *_masked(found), *_spread(found)]
    return Section("frequency", "Token frequency", [Key(), *parts], "Frequency") if parts else None


def bins_of(found: Gradients, grouping: str) -> list[str]:
    """Frequency bins in order, the most frequent first."""
    groups = {key[3] for key in found.keys([ENRICHMENT]) if key[3].startswith(f"{grouping}:")}
    return sorted(groups, key=lambda group: (len(group), group))


def _strata(found: Gradients) -> list[Any]:
    groupings = [name for name in GROUPINGS if bins_of(found, name)]
    if not groupings:
        return []
    keys = [key for key in found.keys([ENRICHMENT]) if key[3].partition(":")[0] in groupings]
    sites = [site for site in found.sites([ENRICHMENT]) if any(key[2] == site for key in keys)]
    readings = found.readings_in(ENRICHMENT, keys)
    by = choice("Frequency of", [GROUPINGS[name] for name in groupings])
    switch = Switch("frequency", (site_choice(found.rows, sites), by, reading_choice(readings)))
    over: dict[int, dict[str, Panel]] = {one.index: {} for one in found.rows.subjects}
    last: dict[int, dict[str, Panel]] = {one.index: {} for one in found.rows.subjects}
    for one in found.rows.subjects:
        for i, site in enumerate(sites):
            for j, grouping in enumerate(groupings):
                last[one.index][f"{i}|{j}"] = _at_last(found, one, site, grouping, readings)
                for k, reading in enumerate(readings):
                    over[one.index][f"{i}|{j}|{k}"] = _over_training(found, one, site, grouping, reading)
    told: Any = lambda one: _tell(found, one, readings)  # noqa: E731
    names = ["frequency.0", "frequency.1", "frequency.2"]
    moving = found.paired(over, names, told=told, title="enrichment") if len(found.rows.steps) > 1 else ()
    final = found.paired(last, names[:2], told=told, title="enrichment", height=260)
    if not final:
        return []
    lead = (
        "Rows in bins of equal mass, 1 the most frequent tokens of the training corpus; enrichment is energy over "
        "chance. A proxy fitted on all rows fits frequent tokens best; <em>balanced</em> proxies saw equally many rows "
        "of each bin, and an effect of frequency should show under both."
    )
    bins = bins_of(found, groupings[0])
    key = [
        Swatch(bin_words(group, str(len(bins))), sequence(i / max(1, len(bins) - 1))) for i, group in enumerate(bins)
    ]
    parts: list[Any] = [Heading("Enrichment by frequency"), Prose(text(lead)), Controls(switch)]
    plain: dict[str, Any] = {"layout": "pairs"}
    strata = {**plain, "files": {"frequency-strata": {}}, "most": FILE_PANELS, "columns": 4, "shared": True}
    if moving:
        figure = Figure(moving, **strata)
        parts += [Swatches([*key, CHANCE]), figure, Heading("At the last step", 4, css="apart")]
    looks = [Swatch(reading_words(r), **_reading_look(i, swatch=True)) for i, r in enumerate(readings)]
    return [*parts, Swatches([*looks, CHANCE]), Figure(final, **(plain if moving else strata))]


def _over_training(found: Gradients, subject: Subject, site: DrawnSite, grouping: str, reading: str) -> Panel:
    """A line per bin, darker with rarity."""
    bins, drawn = bins_of(found, grouping), []
    for i, group in enumerate(bins):
        line = found.line(subject, ENRICHMENT, site, reading=reading, group=group)
        label, colour = f"bin {bin_words(group, str(len(bins)))}", sequence(i / max(1, len(bins) - 1))
        drawn += [found.drawn(label, line, colour=colour, width=1.5, size=4.0, band=0.0)] if line else []
    return Panel(found.time.axis(), series=tuple(drawn), levels=ONE if drawn else ())


def _at_last(found: Gradients, subject: Subject, site: DrawnSite, grouping: str, readings: Sequence[str]) -> Panel:
    """Enrichment by bin at the last step, a line per reading."""
    bins, drawn = bins_of(found, grouping), []
    for i, reading in enumerate(readings):
        lines = [known(found.whole(subject, ENRICHMENT, site, reading=reading, group=group)) for group in bins]
        ends = [(place, line[-1]) for place, line in enumerate(lines) if line]
        where = [
            f"bin {place + 1}, step {row.step or 0:,}" + (f" · n {row.n:,}" if row.n else "") for place, row in ends
        ]
        if ends:
            x = [float(place) for place, _ in ends]
            drawn.append(points(reading_words(reading), [row for _, row in ends], x, where, **_reading_look(i)))
    names = [group.partition(":")[2] for group in bins]
    ticks = [float(i) for i in range(len(bins))], names
    axis = Axis("frequency bin, 1 = most frequent", ticks=ticks, bounds=(-0.3, len(bins) - 0.7))
    return Panel(axis, series=tuple(drawn), levels=ONE if drawn else ())


def _reading_look(i: int, *, swatch: bool = False) -> dict[str, Any]:
    look: dict[str, Any] = {"colour": series(i), "dash": ("solid", "dash", "dot", "dashdot")[i % 4]}
    return look | ({"band": True} if swatch else {"band": 0.14, "width": 1.9, "size": 5.0})


def _tell(found: Gradients, subject: Subject, readings: Sequence[str]) -> str:
    """Enrichment by bin in words, in the middle of the model at the last step."""
    sites = found.rows.sites([ENRICHMENT])
    site, told = sites[found.rows.middle(sites)], []
    for grouping in [name for name in GROUPINGS if bins_of(found, name)][:1]:
        for group in bins_of(found, grouping):
            line = known(found.whole(subject, ENRICHMENT, site, reading=readings[0], group=group))
            told += [f"bin {group.partition(':')[2]} {number(line[-1].value)}"] if line else []
    return f"Enrichment of {subject.label} by frequency, {site.name}, last step: {', '.join(told)}."


def _masked(found: Gradients) -> list[Any]:
    """Masked rows, unmasked rows and their pool over training: pooling can hide the effect."""
    keys = [key for key in found.keys([ENRICHMENT]) if key[3] in ("masked", "unmasked")]
    subjects = [one for one in found.rows.subjects if any(key[0] == one.index for key in keys)]
    if not subjects or len(found.rows.steps) < 2:
        return []
    sites = [site for site in found.sites([ENRICHMENT]) if any(key[2] == site for key in keys)]
    readings = found.readings_in(ENRICHMENT, keys)
    switch = Switch("masked", (site_choice(found.rows, sites), reading_choice(readings)))
    views = {one.index: {f"{i}|{j}": _by_mask(found, one, site, reading) for i, site in enumerate(sites)
                         for j, reading in enumerate(readings)} for one in subjects}  # fmt: skip
    panels = found.paired(views, ["masked.0", "masked.1"], title="enrichment",
                          told=lambda one: f"Enrichment of {one.label}, masked and unmasked rows apart.")  # fmt: skip
    lead = (
        "In a masked language model the loss sits on masked rows only; the gradients of the other rows come through "
        "attention. Their pool can hide what either shows."
    )
    key = [Swatch(words, series(hue), dash, band=True) for words, hue, dash in map(_mask_look, ROWS)]
    return [Heading("Masked and unmasked rows"), Prose(lead), Controls(switch), Swatches([*key, CHANCE]),
            Figure(panels, layout="pairs")]  # fmt: skip


def _mask_look(group: str) -> tuple[str, int, str]:
    return (ROWS[group], *{"": (6, "dash"), "masked": (1, "solid"), "unmasked": (0, "solid")}[group])


def _by_mask(found: Gradients, subject: Subject, site: DrawnSite, reading: str) -> Panel:
    drawn: list[Series] = []
    for group in ROWS:
        line = found.line(subject, ENRICHMENT, site, reading=reading, group=group)
        words, hue, dash = _mask_look(group)
        drawn += [found.drawn(words, line, colour=series(hue), dash=dash, width=1.9, size=4.0)] if line else []
    return Panel(found.time.axis(), series=tuple(drawn), levels=ONE)


def _spread(found: Gradients) -> list[Any]:
    """Correlations of frequency with spread: over training by layer, and all of them at the last step."""
    keys = [key for key in found.keys(["frequency_spread"]) if not key[3] and key[2].kind in STREAM]
    if not keys:
        return []
    variants = sorted({key[4] for key in keys}, key=lambda v: ("over=time" in v, "normalised" in v, v))
    chosen = [v for v in variants if "over=time" not in v] or variants
    switch = Switch("spread", (choice("Correlation", map(variant_words, chosen)),))
    views = {one.index: {str(i): _by_layer(found, one, variant) for i, variant in enumerate(chosen)}
             for one in found.rows.subjects}  # fmt: skip
    words = "Correlation of token frequency with spread in {} over steps; the table below has the last."
    over_time = len(found.rows.steps) > 1
    panels = (
        found.paired(views, ["spread.0"], title="correlation", told=lambda one: words.format(one.label))
        if over_time
        else ()
    )
    lead = (
        "Over token types: the correlation of log frequency with the distance of a type's rows from their own "
        "centroid, equally many rows of each. Below 0, frequent tokens are the tighter ones."
    )
    parts: list[Any] = [Heading("Frequency and spread"), Prose(lead)]
    if panels:
        parts += [Controls(switch), Ramp("embedding", "last block", final=True), Figure(panels, layout="pairs")]
    when = " at the last step" if panels else ""
    tables = [part for one in found.rows.subjects for part in _spread_table(found, one, variants)]
    return [*parts, Fold(f"All correlations{when}, with intervals and permutation p", tables, open=not panels)]


def _by_layer(found: Gradients, subject: Subject, variant: str) -> Panel:
    drawn = []
    for site in found.rows.sites(["frequency_spread"]):
        line = found.thin(found.rows.line(subject, "frequency_spread", site, variant))
        drawn += [found.drawn(**depth_look(site, subject.blocks), line=line)] if line else []
    levels = (Level(0.0, "no correlation", colour="@ink"),) if drawn else ()
    return Panel(found.time.axis(), series=tuple(drawn), levels=levels)


def _spread_table(found: Gradients, subject: Subject, variants: Sequence[str]) -> list[Any]:
    """Sites by variants at the last step, with intervals and p."""
    body = []
    for site in found.rows.sites(["frequency_spread"]):
        cells = [_spread_cell(found, subject, site, variant) for variant in variants]
        body += (
            [[TableCell(site.name, head=True), *(cell or TableCell(css="num") for cell in cells)]] if any(cells) else []
        )
    if not body:
        return []
    heads = ["Layer", *(TableCell(variant_words(variant), css="num wraps") for variant in variants)]
    table = DataTable([heads], [body], f"Frequency and spread, {subject.label}", "plain sites", subject.index)
    several = len(found.rows.subjects) > 1
    return [*([Heading(subject.label, 4, css="apart")] if several else []), table]


def _spread_cell(found: Gradients, subject: Subject, site: DrawnSite, variant: str) -> TableCell | None:
    line = known(found.rows.line(subject, "frequency_spread", site, variant))
    if not line:
        return None
    last = line[-1]
    tests = {row.step: row.value for row in known(found.rows.line(subject, "frequency_spread_p", site, variant))}
    p = tests.get(last.step)
    small = [] if p is None else [f"p {neat(p, 2)}"]
    return TableCell(estimate(last.value, last.low, last.high), small, title=f"step {last.step or 0:,}", css="num")
