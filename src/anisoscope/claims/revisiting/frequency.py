"""Claims about token frequency: which tokens' gradients follow the tangent directions, which tokens spread.

Bins are of equal mass, 1 = the most frequent tokens. Effects between bins are relative (bin 1 over the rarest, minus
1), so that one margin serves every rank and width. In masked language models a bin pools masked and unmasked rows: no
table has bins of each.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from typing import Any

from anisoscope.claims.engine.claim import claim
from anisoscope.claims.engine.evidence import Cell, Missing, Readings, Run, at_last, listing, models, step_records
from anisoscope.claims.engine.part import Finding, Part, Parts, Status, agreement, figure, judge, outcome, span
from anisoscope.claims.revisiting.controls import average, trained
from anisoscope.claims.revisiting.tangent import SOURCE
from anisoscope.results.quantity import Quantity, mean

RATIO_MARGIN = 0.1  # a tenth more
CORRELATION_MARGIN = 0.1
_OVER_WORDS = {"context": "across contexts", "time": "over training"}
_DISTANCES = {False: "plain distance", True: "distance relative to the norm"}
_FITS = {"plain": None, "balanced": 1}  # the proxy fitted on rows as they come, or on equal rows per bin
_FIT_WORDS = {"plain": "on rows as they come", "balanced": "with equal rows of every bin"}
_AHEAD = {"plain": "ahead of every other bin", "balanced": "ahead of every other bin, balanced fit"}


@claim(
    "frequent_most_enriched",
    of=models,
    statement="Gradients of the most frequent tokens are more enriched in the tangent directions than those of the "
    "rarest.",
    source=SOURCE,
    metrics=("gradient_enrichment",),
    margin=RATIO_MARGIN,
)
def frequent_most_enriched(run: Run) -> Finding:
    """Enrichment of the most frequent bin over that of the rarest, minus 1, with plain and balanced proxies alike.

    The aspect `most` asks for more: that it lies above every other bin.
    """
    bins = {name: _bin_means(run, balanced) for name, balanced in _FITS.items()}
    if len(bins["plain"]) < 2:
        raise Missing("gradient_enrichment in two frequency bins at least (groups frequency:1, frequency:2, …)")
    parts = [_frequent_over_rare(name, found) for name, found in bins.items()]
    first, rarest = min(bins["plain"]), max(bins["plain"])
    parts += [
        Part.described("most frequent bin", bins["plain"][first]),
        Part.described("rarest bin", bins["plain"][rarest]),
        Part.described("rank trend", Quantity.constant(_trend(bins["plain"]))),
        *(_ahead(_AHEAD[name], found) for name, found in bins.items() if len(found) > 1),
    ]
    mixed = bool({"masked", "unmasked"} & set(run.groups("gradient_enrichment")))
    courses = {str(n): step_records(run.tangent("gradient_enrichment", f"frequency:{n}")) for n in bins["plain"]}
    details: dict[str, Any] = {"bins": {name: _records(found) for name, found in bins.items()}}
    details |= {"steps": courses, "target_bins": _records(_bin_means(run, None, by="target"))}
    details["bins_pool_masked_and_unmasked"] = mixed
    aspects = {**{name: (name,) for name in _FITS}, "most": tuple(_AHEAD.values())}
    sentence = functools.partial(_frequency_sentence, mixed=mixed)
    return Finding(tuple(parts), sentence, details, aspects=aspects)


def _bin_means(run: Run, balanced: int | None, *, by: str = "frequency") -> dict[int, Quantity]:
    """Mean enrichment of every bin over the cells after initialisation that all bins share."""
    found: dict[int, Readings] = {}
    for group in run.groups("gradient_enrichment"):
        name, _, number = group.partition(":")
        readings = run.tangent("gradient_enrichment", group, balanced=balanced) if name == by else {}
        if readings:
            found[int(number)] = readings
    if not found:
        return {}
    cells = sorted(set.intersection(*(set(trained(readings)) for readings in found.values())), key=Cell.order)
    return {number: average(found[number], cells) for number in sorted(found)} if cells else {}


def _frequent_over_rare(name: str, bins: dict[int, Quantity]) -> Part:
    if len(bins) < 2:
        option = "gradient_enrichment of frequency bins" + (" with balanced=1" if name == "balanced" else "")
        return Part.absent(name, str(Missing(option)), margin=RATIO_MARGIN)
    ratio = bins[min(bins)].over(bins[max(bins)])
    return Part.of(name, ratio - Quantity.constant(1.0), margin=RATIO_MARGIN)


def _trend(bins: dict[int, Quantity]) -> float:
    """Spearman's correlation of the bin's number with its enrichment: −1 when it falls from frequent to rare."""
    values = [bins[number].value for number in sorted(bins)]
    ranks = [sum(other < value for other in values) for value in values]
    n = len(values)
    return 1 - 6 * sum((i - rank) ** 2 for i, rank in enumerate(ranks)) / (n * (n * n - 1))


def _ahead(name: str, bins: dict[int, Quantity]) -> Part:
    """The most frequent bin minus the other bin that decides whether it lies above all of them."""
    first = min(bins)
    leads = [Part.of(name, bins[first] - bins[n], margin=0.0, needed=False) for n in bins if n != first]
    return judge(leads)[1]


def _records(bins: dict[int, Quantity]) -> list[dict[str, Any]]:
    return [{"bin": number, **quantity.record()} for number, quantity in bins.items()]


def _frequency_sentence(parts: Parts, status: Status, part: Part, *, mixed: bool) -> str:
    text = (
        f"in the tangent directions the gradients of the most frequent tokens hold {span(parts['most frequent bin'])} "
    )
    text += f"times what chance would give and those of the rarest {span(parts['rarest bin'])} times; with directions "
    text += f"fitted {_FIT_WORDS[part.name]} the relative lead of the former is {span(part)}, {outcome(status, part)}"
    pooled = "; every bin pools masked and unmasked rows" if mixed else ""
    return f"{text} ({_most_words(parts)}{pooled})"


def _most_words(parts: Parts) -> str:
    """Whether the most frequent bin is the most enriched of all."""
    status, lead = judge([parts[name] for name in _AHEAD.values() if name in parts])
    if status == "holds":
        return "they are the most enriched of all bins"
    if status == "fails":
        ahead = f"another is ahead by {figure(-lead.effect)} times chance"
        return f"the most frequent are not the most enriched of all bins: {ahead}"
    nearest = f"their lead over the nearest is {span(lead)} times chance"
    return f"whether they are the most enriched of all bins is open: {nearest}"


@claim(
    "rare_tokens_spread",
    of=models,
    statement="Rare tokens lie further from their centroid than frequent ones, across contexts and over training.",
    source=SOURCE,
    metrics=("frequency_spread", "frequency_spread_p"),
    margin=CORRELATION_MARGIN,
)
def rare_tokens_spread(run: Run) -> Finding:
    """Minus Spearman's correlation of log frequency with the distance to the type's centroid, at the last step.

    The distance as it is and divided by the type's mean norm must agree: a longer vector spreads more by its length.
    """
    parts = [_spread_part(run, over, normalised=normalised) for over in _OVER_WORDS for normalised in (False, True)]
    if not any(part.measured for part in parts):
        raise Missing("frequency_spread")
    details = {"spread": _spread_records(run)}
    aspects = {"contextual": ("context",), "temporal": ("time",)}
    return Finding(tuple(parts), _spread_sentence, details, settle=_agreed, aspects=aspects)


def _options(over: str, correlation: str = "spearman", *, normalised: bool = False) -> dict[str, Any]:
    return {"correlation": correlation, **({"normalised": 1} if normalised else {}), "over": over}


def _spread_part(run: Run, over: str, *, normalised: bool) -> Part:
    options, name = _options(over, normalised=normalised), f"{over}: {_DISTANCES[normalised]}"
    final = at_last(run.rows("frequency_spread", **options))
    if not final:
        gap = Missing(f"frequency_spread with {listing(options)}")
        return Part.absent(name, str(gap), margin=CORRELATION_MARGIN)
    quantity = -mean([row.quantity for row in final.values()])
    return Part.of(name, quantity, margin=CORRELATION_MARGIN, p=_spread_p(run, options))


def _agreed(parts: dict[str, Part]) -> dict[str, Part]:
    """One part across contexts and one over training, in front of the two distances that each is made of."""
    made = {}
    for over in _OVER_WORDS:
        members = [part for name, part in parts.items() if name.startswith(f"{over}: ")]
        if members:
            made[over] = _of_both(over, members)
    return {**made, **{name: replace(part, needed=False) for name, part in parts.items()}}


def _of_both(over: str, members: list[Part]) -> Part:
    joined = agreement(members, over, what="measures of distance")
    if len({part.status for part in members if part.measured}) < 2:
        return joined
    told = " and ".join(f"{part.status} for the {part.name.split(': ')[1]}" for part in members)
    return replace(joined, reason=f"the two measures of distance {_OVER_WORDS[over]} do not agree ({told})")


def _spread_p(run: Run, options: dict[str, Any]) -> float:
    """Bonferroni's p over the sites of the last step."""
    values = [row.value for row in at_last(run.rows("frequency_spread_p", **options)).values()]
    return min(1.0, len(values) * min(values)) if values else math.nan


def _spread_records(run: Run) -> list[dict[str, Any]]:
    """Every correlation of the last step."""
    found = []
    for over, correlation, normalised in itertools.product(_OVER_WORDS, ("pearson", "spearman"), (False, True)):
        words = {"over": over, "correlation": correlation, "normalised": normalised}
        final = at_last(run.rows("frequency_spread", **_options(over, correlation, normalised=normalised)))
        found += [{**c.record(), **words, "value": r.value, "low": r.low, "high": r.high} for c, r in final.items()]
    return found


def _spread_sentence(parts: Parts, status: Status, part: Part) -> str:
    """Tells correlations as they are; the effect is minus the correlation."""
    told = [f"{_both_distances(parts, over)} {words}" for over, words in _OVER_WORDS.items() if parts[over].measured]
    text = (
        f"how often a token occurs and how far it lies from its centroid correlate at {' and '.join(told)}; the claim "
    )
    text += f"needs correlations below {figure(-CORRELATION_MARGIN)} and the one that decides, {_OVER_WORDS[part.name]}"
    return f"{text}, is {span(-part)}"


def _both_distances(parts: Parts, over: str) -> str:
    plain, normalised = (parts.get(f"{over}: {words}") for words in _DISTANCES.values())
    told = [figure(-plain.effect)] if plain and plain.measured else []
    told += [f"{figure(-normalised.effect)} relative to its norm"] if normalised and normalised.measured else []
    return f"{told[0]} ({told[1]})" if len(told) > 1 else "".join(told)
