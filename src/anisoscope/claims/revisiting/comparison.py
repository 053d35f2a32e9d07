"""Claims that compare token frequencies, encoders with decoders, semi-NMF with PCA.

Frequency bins have equal mass; bin 1 holds the most frequent tokens. Effects between bins are relative (bin 1 over the
rarest, minus 1), so that one margin applies to every rank and width. In masked language models a bin pools masked and
unmasked rows: tables have no bins for each.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from anisoscope.claims.engine import evidence
from anisoscope.claims.engine.claim import Finding, Part, Parts, agreements, claim, judge
from anisoscope.claims.engine.evidence import (
    Missing,
    NotHere,
    Readings,
    Run,
    Study,
    average,
    figure,
    models,
    step_records,
)
from anisoscope.claims.revisiting.determined import METRIC, undetermined
from anisoscope.claims.revisiting.frequency_arm import ARM, RATIO_MARGIN
from anisoscope.claims.revisiting.period import (
    EARLY,
    LATE,
    REFIT,
    Period,
    group_fit,
    main_fit,
    period_aspects,
    periods,
    told_by_period,
)
from anisoscope.claims.revisiting.reading import Read, depends_on_readings, moot, reading_parts
from anisoscope.claims.revisiting.tangent import ENERGY_METRICS, MARGIN, SOURCE, control_parts, trained
from anisoscope.results.quantity import Quantity, correlate

CORRELATION_MARGIN = 0.1
_OVER_WORDS = {"context": "across contexts", "time": "over training"}
_DISTANCES = {False: "plain distance", True: "distance relative to the norm"}
_FITS = {"plain": None, "balanced": 1}  # option `balanced`: fitted on all rows, or on equally many rows per bin
_FIT_WORDS = {"plain": "on rows as they come", "balanced": "with equal rows of every bin"}
_AHEAD = {"plain": "ahead of every other bin", "balanced": "ahead of every other bin, balanced fit"}
ENERGY_MARGIN = 0.02

TOKENS = f"{evidence.MEASURE} where rows are tokens; frames, patches and positions have no frequency"


@claim(
    of=models,
    source=SOURCE,
    metrics=("gradient_enrichment", "gradient_energy", METRIC),
    margin=RATIO_MARGIN,
    about="training",
)
def frequent_most_enriched(run: Run) -> Finding:
    """Gradients of the most frequent tokens are more enriched in the tangent directions than those of the rarest, early
    and late in training.

    Enrichment of the most frequent bin over that of the rarest, minus 1, with plain and balanced proxies alike, early
    and late apart.

    The aspect `most` asks for more: that it lies above every other bin. Directions are refitted at every step. For one
    model it stays open where the lead is no larger than random directions may give between bins; seeds answer that.
    """
    if len(_bins(run, None)) < 2:
        gap = NotHere if run.entry.get("modules") else Missing  # of modules that a user named, rows may be no tokens
        raise gap("gradient_enrichment in two frequency bins at least (groups frequency:1, frequency:2, …)", TOKENS)
    found = periods(run, "gradient_enrichment", f"frequency:{min(_bins(run, None))}", fit=REFIT)
    needed, ahead = _bin_parts(run, found), []
    told: dict[str, Quantity] = {}
    records: dict[str, Any] = {}
    for period in found:
        bins = {name: _bin_means(run, balanced, period) for name, balanced in _FITS.items()}
        for name, means in bins.items():
            if len(means) > 1:  # the smallest lead of the most frequent bin over another bin
                first, *others = means.values()
                words = f"{_AHEAD[name]}, {period.name}"
                ahead.append(judge([Part.of(words, first - other, margin=0.0, needed=False) for other in others])[1])
        if plain := bins["plain"]:
            trend = correlate(list(plain), [quantity.value for quantity in plain.values()], "spearman")  # −1: it falls
            told |= {
                f"most frequent bin {period.name}": plain[min(plain)],
                f"rarest bin {period.name}": plain[max(plain)],
            }
            told |= {f"rank trend {period.name}": Quantity.constant(trend)}
        records[period.name] = {name: _records(means) for name, means in bins.items()}
        records[period.name]["target"] = _records(_bin_means(run, None, period, by="target"))
    mixed = bool({"masked", "unmasked"} & set(run.groups("gradient_enrichment")))
    courses = {
        str(n): step_records(run.tangent("gradient_enrichment", f"frequency:{n}", fit=REFIT)) for n in _bins(run, None)
    }
    late = records[found[-1].name]
    details: dict[str, Any] = {"bins": {name: late[name] for name in _FITS}, "steps": courses, "by_period": records}
    details |= {"target_bins": late["target"], "bins_pool_masked_and_unmasked": mixed}
    parts = [*needed, *Part.describe_all(told), *ahead]
    how: dict[str, Any] = {"metric": "gradient_enrichment", "fit": REFIT}
    parts += reading_parts(lambda read: _bin_parts(read(run), found), [run], **how)
    aspects = {**period_aspects(needed), "most": tuple(part.name for part in ahead)}
    aspects |= {name: tuple(p.name for p in needed if p.name.endswith(f": {name}")) for name in _FITS}
    sentence, settle = functools.partial(_bins_sentence, mixed=mixed), depends_on_readings()
    return Finding(parts, sentence, details, aspects=aspects, settle=settle)


def _bin_parts(run: Run, found: Sequence[Period]) -> list[Part]:
    """The relative lead of the most frequent bin over the rarest, one part for each period and fit of the proxy."""
    parts = []
    for period, (name, balanced) in itertools.product(found, _FITS.items()):
        means = list(_bin_means(run, balanced, period).values())
        tested = run.tangent("gradient_enrichment", balanced=balanced, fit=REFIT)
        open_ = undetermined(run, period.cells(tested), balanced=balanced, fit=REFIT)
        if len(means) < 2:
            gap = Missing(f"gradient_enrichment of frequency bins{' with balanced=1' if name != 'plain' else ''}")
            parts.append(Part.absent(f"{period.name}: {name}", gap, margin=RATIO_MARGIN))
            continue
        lead = means[0].over(means[-1]) - Quantity.constant(1.0)
        part = Part.of(f"{period.name}: {name}", lead, margin=RATIO_MARGIN, **open_)
        luck = _luck(run, period, means) if part.status == "holds" else ""
        parts.append(replace(part, reason=part.reason or luck))
    return parts


def _luck(run: Run, period: Period, means: Sequence[Quantity]) -> str:
    """Why a lead may be luck: gradients of two bins differ in any directions; empty if random ones differ by less.

    Random subspaces give the enrichment of all rows a standard deviation s. If every one of B bins of equal mass had
    gradients of its own, that of a bin would be √B·s and that of a difference √(2B)·s, of which 1.96 are asked for.
    """
    drawn = evidence.at(run.tangent("gradient_energy", control="random", fit=REFIT), period.last)
    spreads = [row.sd / row.value for row in drawn.values() if row.sd > 0 and row.value > 0]
    if not spreads:
        return "random directions were not drawn, and any directions hold more of some bins than of others"
    needed = 1.96 * math.sqrt(2 * len(means)) * sum(spreads) / len(spreads)
    lead = means[0] - means[-1]
    if lead.interval()[0] > needed:
        return ""
    return f"in random directions two bins may differ by {figure(needed)} times chance, here by {figure(lead.value)}"


def _bins_sentence(parts: Parts, part: Part, *, mixed: bool) -> str:
    def words(period: str, part: Part) -> str:
        text = "in the tangent directions the gradients of the most frequent tokens hold "
        text += f"{parts[f'most frequent bin {period}']} times what chance would give and those of the rarest "
        text += f"{parts[f'rarest bin {period}']} times; with directions fitted {_FIT_WORDS[part.name.split(': ')[1]]} "
        return f"{text}the relative lead of the former is {part}, {part.outcome}"

    ahead = [each for name, each in parts.items() if name.startswith(_AHEAD["plain"])]
    most, lead = judge(ahead)
    of_all = "the most enriched of all bins"
    leading = {
        "holds": f"they are {of_all}",
        "fails": f"the most frequent are not {of_all}: another is ahead by {figure(-lead.effect)} times chance",
        "undecided": f"whether they are {of_all} is open: their lead over the nearest is {lead} times chance",
    }
    pooled = "; every bin pools masked and unmasked rows" if mixed else ""
    return f"{told_by_period(parts, words)} ({leading[most]}{pooled})"


def _bins(run: Run, balanced: int | None, *, by: str = "frequency") -> dict[int, Readings]:
    """The enrichment of every bin, by its number."""
    found: dict[int, Readings] = {}
    for group in run.groups("gradient_enrichment"):
        name, _, number = group.partition(":")
        if name == by and (readings := run.tangent("gradient_enrichment", group, balanced=balanced, fit=REFIT)):
            found[int(number)] = readings
    return dict(sorted(found.items()))


def _bin_means(run: Run, balanced: int | None, period: Period, *, by: str = "frequency") -> dict[int, Quantity]:
    """The mean enrichment of every bin over the cells of a period that all bins have."""
    found = _bins(run, balanced, by=by)
    if not found:
        return {}
    common = set.intersection(*(set(period.cells(readings)) for readings in found.values()))
    cells = sorted(common, key=evidence.Cell.order)
    return {number: average(found[number], cells) for number in found} if cells else {}


def _records(bins: dict[int, Quantity]) -> list[dict[str, Any]]:
    return [{"bin": number, **quantity.record()} for number, quantity in bins.items()]


@claim(
    of=models,
    source=SOURCE,
    metrics=("frequency_spread", "frequency_spread_p"),
    margin=CORRELATION_MARGIN,
    about="training",
)
def rare_tokens_spread(run: Run) -> Finding:
    """Rare tokens lie further from their centroid than frequent ones, across contexts and over training.

    Spearman's correlation of log frequency with the distance to the type's centroid, at the last step, below −.1.

    The distance as it is and divided by the type's mean norm must agree: a longer vector spreads more by its length.
    """
    parts, records = [], []
    for over, way, normalised in itertools.product(_OVER_WORDS, ("pearson", "spearman"), (False, True)):
        options: dict[str, Any] = {"correlation": way, **({"normalised": 1} if normalised else {}), "over": over}
        measured = (run.rows(f"frequency_spread{p}", **options) for p in ("", "_p"))
        spread, tests = (evidence.at(rows, evidence.last_step(rows)) for rows in measured)
        words = {"over": over, "correlation": way, "normalised": normalised}
        records += [{**c.record(), **words, "value": r.value, "low": r.low, "high": r.high} for c, r in spread.items()]
        name = f"{over}: {_DISTANCES[normalised]}"
        if way == "spearman" and spread:
            p = min(1.0, len(tests) * min(row.value for row in tests.values())) if tests else math.nan  # Bonferroni's
            parts.append(Part.of(name, average(spread, spread), margin=-CORRELATION_MARGIN, p=p, below=True))
        elif way == "spearman":
            gap = Missing(f"frequency_spread with {evidence.listing(options)}")
            parts.append(Part.absent(name, gap, margin=-CORRELATION_MARGIN))
    if not any(part.measured for part in parts):
        raise Missing("frequency_spread", TOKENS)
    aspects = {"contextual": ("context",), "temporal": ("time",)}
    return Finding(parts, _spread_sentence, {"spread": records}, settle=_agreed, aspects=aspects)


def _agreed(parts: dict[str, Part]) -> dict[str, Part]:
    """The two comparisons, each combined from two distances that must agree."""
    combined = agreements(dict.fromkeys(_OVER_WORDS, "measures of distance"), parts)
    for over, words in _OVER_WORDS.items():
        members = [part for name, part in parts.items() if name.startswith(f"{over}: ")]
        if len({part.status for part in members if part.measured}) > 1:
            statuses = " and ".join(f"{part.status} for the {part.name.split(': ')[1]}" for part in members)
            reason = f"the two measures of distance {words} do not agree ({statuses})"
            combined[over] = replace(combined[over], reason=reason)
    return combined


def _spread_sentence(parts: Parts, part: Part) -> str:
    results = []
    for over, words in _OVER_WORDS.items():
        plain, normalised = (parts.get(f"{over}: {distance}") for distance in _DISTANCES.values())
        both = [figure(plain.effect)] if plain and plain.measured else []
        both += [f"{figure(normalised.effect)} relative to its norm"] if normalised and normalised.measured else []
        if parts[over].measured:
            results.append(f"{f'{both[0]} ({both[1]})' if len(both) > 1 else ''.join(both)} {words}")
    text = f"how often a token occurs and how far it lies from its centroid correlate at {' and '.join(results)}; the "
    text += f"claim needs correlations below {figure(-CORRELATION_MARGIN)} and the one that decides, "
    return f"{text}{_OVER_WORDS[part.name]}, is {part}"


@claim(of=evidence.whole("encoder and decoder"), source=SOURCE, metrics=ENERGY_METRICS, margin=MARGIN, about="training")
def encoder_and_decoder(study: Study) -> Finding:
    """Tangent directions hold more gradient energy than every control in an encoder and in a decoder, early and late in
    training.

    `tangent_energy` in both kinds of model; masked and unmasked rows of an encoder are judged apart.
    """
    natural = {model: run for model, run in study.items() if not ARM.search(model)}
    kinds = {"encoder": [r for r in natural.values() if is_encoder(r)]}
    kinds["decoder"] = [r for r in natural.values() if r.tangent("gradient_energy") and not is_encoder(r)]
    for kind, runs in kinds.items():
        if not runs:
            raise Missing(f"{kind} with gradient_energy", f"train one with --arch {kind} and put both into one table")

    def needed(read: Read) -> list[Part]:
        return [part for kind, runs in kinds.items() for run in runs for part in _of_model(read(run), kind)]

    parts, every = needed(lambda run: run), [run for runs in kinds.values() for run in runs]
    details: dict[str, Any] = {"models": {kind: [run.model for run in runs] for kind, runs in kinds.items()}}
    fits = {main_fit(run) for run in every}
    details["fit"] = fits.pop() if len(fits) == 1 else "mixed"
    nouns = {"encoder": "encoders, periods and kinds of rows", "decoder": "decoders and periods"}
    settle = depends_on_readings(functools.partial(agreements, nouns))
    aspects = {period: tuple(part.name for part in parts if f" ({period}" in part.name) for period in (EARLY, LATE)}
    parts += reading_parts(needed, every)
    return Finding(parts, _kinds_sentence, details, settle=settle, scope="for these models", aspects=aspects)


def is_encoder(run: Run) -> bool:
    """Whether the run is a masked language model: only these have masked rows."""
    return bool(run.tangent("gradient_energy", "masked") or run.tangent("gradient_energy", "unmasked"))


def _of_model(run: Run, kind: str) -> list[Part]:
    """The weakest comparison of each period and kind of row, as parts whose names begin with the kind of model.

    Masked and unmasked rows are judged apart, each by the rule of all rows: late with frozen directions where these
    were tested against controls on such rows. Where they were tested on all rows alone, as in older tables, all rows
    are judged with them, and masked and unmasked rows with refitted ones.
    """
    groups = ("masked", "unmasked") if kind == "encoder" else ()
    apart = [group for group in groups if run.tangent("gradient_energy", group, control="random", fit=REFIT)]
    judged = [("", period) for period in periods(run, "gradient_energy")]
    if apart:
        fit = group_fit(run, apart)
        judged = judged[-1:] if fit != judged[-1][1].fit else []
        for group in apart:
            judged += [(group, period) for period in periods(run, "gradient_energy", group, fit=fit)]
    parts = []
    for group, period in judged:
        controls = [part for part in control_parts(run, period, group) if not moot(run, part.name)]
        p = max((c.p for c in controls if math.isfinite(c.p)), default=math.nan)
        rows = f", {group or 'masked and unmasked'} rows" if kind == "encoder" else ""
        name = f"{kind}: {run.model} ({period.name}{', frozen' if period.fit != REFIT else ''}{rows})"
        parts.append(replace(judge(controls)[1], name=name, p=p, tested=any(c.tested for c in controls)))
    return parts


def _kinds_sentence(parts: Parts, part: Part) -> str:
    own = {name: p for name, p in parts.items() if name.startswith(("encoder: ", "decoder: ")) and p.measured}
    results = [f"{p} in {name.split(': ', 1)[1]}" for name, p in own.items()]
    text = "the lead of the tangent directions over the control that comes closest is, in units of what chance would "
    text += f"give of the gradients' energy, {', '.join(results)}; what decides is the {part.name} with {part}, "
    return text + part.outcome


@claim(
    of=models,
    source="not in the paper: the comparison it leaves out",
    metrics=("gradient_energy", "proxy_overlap", METRIC),
    margin=ENERGY_MARGIN,
    about="training",
)
def semi_nmf_beats_pca(run: Run) -> Finding:
    """Semi-NMF directions hold more gradient energy than principal components of the same rank, early and late.

    Mean over sites of energy(semi-NMF) − energy(PCA), paired fold by fold, early and late in training apart.
    """
    both = {main_fit(run, proxy=proxy) for proxy in ("semi_nmf", "pca")}
    fit = both.pop() if len(both) == 1 else REFIT
    found, needed = periods(run, "gradient_energy", fit=fit, proxy="semi_nmf"), []
    told: dict[str, Quantity] = {}
    for period in found:
        ours, theirs = (run.needed("gradient_energy", proxy=proxy, fit=period.fit) for proxy in ("semi_nmf", "pca"))
        cells = [cell for cell in period.cells(ours) if cell in theirs]
        if not cells:
            raise Missing("gradient_energy of semi-NMF and PCA at the same site and step")
        gaps = evidence.differences(ours, theirs)
        doubts = [undetermined(run, cells, proxy=proxy, fit=period.fit) for proxy in ("semi_nmf", "pca")]
        needed.append(Part.of(period.name, average(gaps, cells), margin=ENERGY_MARGIN, **(doubts[0] or doubts[1])))
        told |= {f"semi-NMF {period.name}": average(ours, cells), f"PCA {period.name}": average(theirs, cells)}
    parts = [*needed, *Part.describe_all(told)]
    if overlap := run.rows("proxy_overlap", rank=run.rank):
        values = [overlap[cell].value for cell in trained(overlap)]
        parts += Part.describe_all({"overlap of the spans": sum(values) / len(values)})
    details = {**evidence.course_records(gaps), "fit": found[-1].fit, "periods": {p.name: [*p.steps] for p in found}}
    return Finding(parts, _pca_sentence, details, aspects=period_aspects(needed))


def _pca_sentence(parts: Parts, part: Part) -> str:
    def words(period: str, part: Part) -> str:
        text = f"semi-NMF holds {parts[f'semi-NMF {period}'].number} of the gradient energy and PCA of the same rank "
        text += f"{parts[f'PCA {period}'].number}, a difference of {part}, {part.outcome}"
        if part.status != "fails":
            return text
        if part.high < -part.margin:
            return f"{text}, so PCA is the better of the two"
        return f"{text}, so " + ("the two are as good as equal" if part.low > -part.margin else "semi-NMF is no better")

    return told_by_period(parts, words)
