"""Claims about token frequency: which tokens' gradients follow the tangent directions, which tokens spread.

Bins are of equal mass, 1 = the most frequent tokens. Effects between bins are relative (bin 1 over the rarest, minus
1), so that one margin serves every rank and width.
"""

from __future__ import annotations

import math
from typing import Any

from anisoscope.claims.claim import model_claim
from anisoscope.claims.controls import at_step, average, step_records, trained
from anisoscope.claims.evidence import Cell, Missing, Readings, Run
from anisoscope.claims.part import Finding, Part, Parts, Status, figure, outcome, span
from anisoscope.claims.quantity import Quantity, mean
from anisoscope.claims.tangent import SOURCE

RATIO_MARGIN = 0.1  # a tenth more
CORRELATION_MARGIN = 0.1
_FITS = {"plain": None, "balanced": 1}  # the proxy fitted on rows as they come, or on equal rows per bin


@model_claim(
    "frequent_most_enriched",
    statement="Gradients of frequent tokens are the most enriched in the tangent directions.",
    source=SOURCE,
    metrics=("gradient_enrichment",),
    margin=RATIO_MARGIN,
)
def frequent_most_enriched(run: Run) -> Finding:
    """Enrichment of the most frequent bin over that of the rarest, minus 1, with plain and balanced proxies alike."""
    bins = {name: _bin_means(run, balanced) for name, balanced in _FITS.items()}
    if len(bins["plain"]) < 2:
        raise Missing("gradient_enrichment in two frequency bins at least (groups frequency:1, frequency:2, …)")
    parts = [_frequent_over_rare(name, found) for name, found in bins.items()]
    first, rarest = min(bins["plain"]), max(bins["plain"])
    parts += [
        Part.described("most frequent bin", bins["plain"][first]),
        Part.described("rarest bin", bins["plain"][rarest]),
        Part.described("rank trend", Quantity.constant(_trend(bins["plain"]))),
        Part.described("ahead of the best other bin", _lead(bins["plain"])),
    ]
    details: dict[str, Any] = {"bins": {name: _records(found) for name, found in bins.items()}}
    details |= {"steps": _courses(run, bins["plain"]), "target_bins": _records(_bin_means(run, None, by="target"))}
    return Finding(tuple(parts), _frequency_sentence, details, doubt=_frequency_doubt, aspects={n: (n,) for n in _FITS})


def _bin_means(run: Run, balanced: int | None, *, by: str = "frequency") -> dict[int, Quantity]:
    """Mean enrichment of every bin over the cells after initialisation that all bins share."""
    found: dict[int, Readings] = {}
    for group in run.groups("gradient_enrichment"):
        name, _, number = group.partition(":")
        readings = run.readings("gradient_enrichment", group, balanced=balanced) if name == by else {}
        if readings:
            found[int(number)] = readings
    if not found:
        return {}
    cells = _shared([set(trained(readings)) for readings in found.values()])
    return {number: average(found[number], cells) for number in sorted(found)} if cells else {}


def _shared(sets: list[set[Cell]]) -> list[Cell]:
    return sorted(set.intersection(*sets), key=Cell.order)


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


def _lead(bins: dict[int, Quantity]) -> Quantity:
    """The most frequent bin minus the best of the others."""
    first = min(bins)
    return bins[first] - max((q for number, q in bins.items() if number != first), key=lambda q: q.value)


def _records(bins: dict[int, Quantity]) -> list[dict[str, Any]]:
    found = []
    for number, quantity in bins.items():
        low, high = quantity.interval()
        found.append({"bin": number, "value": quantity.value, "low": low, "high": high})
    return found


def _courses(run: Run, bins: dict[int, Quantity]) -> dict[str, Any]:
    return {str(n): step_records(run.readings("gradient_enrichment", f"frequency:{n}")) for n in bins}


def _frequency_sentence(parts: Parts, status: Status, part: Part) -> str:
    text = f"the most frequent tokens' gradients are enriched {span(parts['most frequent bin'])} times and the rarest "
    text += f"tokens' {span(parts['rarest bin'])} times in the tangent directions; with the {part.name} fit the excess "
    text += f"of the former is {span(part)}, {outcome(status, part)}"
    return text + f" (rank correlation of rarity with enrichment {figure(parts['rank trend'].effect)})"


def _frequency_doubt(parts: Parts) -> str:
    lead = parts["ahead of the best other bin"]
    return f"another bin is enriched more, by {figure(-lead.effect)}" if lead.high < 0 else ""


@model_claim(
    "rare_tokens_spread",
    statement="Rare tokens lie further from their centroid than frequent ones, across contexts and over training.",
    source=SOURCE,
    metrics=("frequency_spread", "frequency_spread_p"),
    margin=CORRELATION_MARGIN,
)
def rare_tokens_spread(run: Run) -> Finding:
    """Minus Spearman's correlation of log frequency with the distance to the type's centroid, at the last step."""
    parts = [_spread_part(run, over) for over in ("context", "time")]
    if not any(part.measured for part in parts):
        raise Missing("frequency_spread")
    details = {"spread": _spread_records(run)}
    aspects = {"contextual": ("context",), "temporal": ("time",)}
    return Finding(tuple(parts), _spread_sentence, details, aspects=aspects)


def _variant(over: str, correlation: str = "spearman", *, normalised: bool = False) -> str:
    return f"correlation={correlation};{'normalised=1;' if normalised else ''}over={over}"


def _spread_part(run: Run, over: str) -> Part:
    readings = run.plain("frequency_spread", _variant(over))
    cells = _final(readings)
    if not cells:
        gap = Missing(f"frequency_spread with over={over}")
        return Part.absent(over, str(gap), margin=CORRELATION_MARGIN)
    quantity = -mean([readings[cell].quantity for cell in cells])
    return Part.of(over, quantity, margin=CORRELATION_MARGIN, p=_spread_p(run, over))


def _spread_p(run: Run, over: str) -> float:
    """Bonferroni's p over the sites of the last step."""
    readings = run.plain("frequency_spread_p", _variant(over))
    values = [readings[cell].value for cell in _final(readings)]
    return min(1.0, len(values) * min(values)) if values else math.nan


def _final(readings: Readings) -> list[Cell]:
    steps = [cell.step for cell in readings if cell.step is not None]
    return at_step(readings, max(steps) if steps else None)


def _spread_records(run: Run) -> list[dict[str, Any]]:
    """Every correlation of the last step."""
    found = []
    for over in ("context", "time"):
        for correlation in ("pearson", "spearman"):
            for normalised in (False, True):
                readings = run.plain("frequency_spread", _variant(over, correlation, normalised=normalised))
                words = {"over": over, "correlation": correlation, "normalised": normalised}
                for cell in _final(readings):
                    r = readings[cell]
                    found.append({**cell.record(), **words, "value": r.value, "low": r.low, "high": r.high})
    return found


_OVER_WORDS = {"context": "across contexts", "time": "over training"}


def _spread_sentence(parts: Parts, status: Status, part: Part) -> str:
    """Tells correlations as they are; the effect is minus the correlation."""
    told = [f"{figure(-parts[o].effect)} {words}" for o, words in _OVER_WORDS.items() if parts[o].measured]
    text = f"log frequency and distance to the token's centroid correlate at {' and '.join(told)}; minus the "
    return text + f"correlation {_OVER_WORDS[part.name]} is {span(part)}, {outcome(status, part)}"
