"""Other choices under which a verdict can be had from the same table: ranks, proxies, coordinates, halves, splits, …

An `Alternative` says which rows are read in place of those that a claim asks for; `Run.under` applies it, so that no
claim knows of it. Of two choices only one changes at a time. A model without such rows is read as before, and so is a
metric that does not depend on tangent directions; a metric that does is never read in a mixture: if the energies of a
model have the alternative, what lacks it counts as not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from anisoscope.results.query import Query, Row, Table

ENERGY = "gradient_energy"
# ratios of sums over contexts: their pseudo-values estimate them on a half of the folds (see results.quantity.halved)
LINEAR = frozenset({ENERGY, "gradient_enrichment"})
Reading = tuple[str, str, dict[str, Any]]  # metric, group and options


@dataclass(frozen=True)
class Alternative:
    """One choice that differs: `kind` is what was chosen, `name` what stands in its place."""

    kind: str
    name: str
    phrase: str  # as in "it fails {phrase}"
    noun: str  # as in "it depends on {noun}"
    directions: Mapping[str, Any] = field(default_factory=dict)  # proxy, rank or fit
    options: Mapping[str, Any] = field(default_factory=dict)  # keys of variants
    groups: Mapping[str, str] = field(default_factory=dict)  # group read in place of another
    metrics: Mapping[str, str] = field(default_factory=dict)  # metric read in place of another
    half: int = 0  # 1 or 2: the half of the folds on which linear metrics are read
    concerns: frozenset[str] = frozenset()  # the metrics that it can change

    def read(self, asked: Reading, of: Callable[[str], Query]) -> Reading:
        """What is read in place of what a claim asks for; `of` gives the rows of a metric of the model."""
        metric, group, options = asked
        if len(of(self.metrics.get(metric, ""))):
            metric = self.metrics[metric]
        rows = of(metric)
        if group in self.groups and len(rows.where(group=self.groups[group])):
            group = self.groups[group]
        offering = [rows, of(ENERGY).where(proxy=...)] if "proxy" in options else [rows]
        wanted = {k: v for k, v in self.options.items() if k not in options}
        more = {k: v for k, v in wanted.items() if any(len(found.where(**{k: v})) for found in offering)}
        return metric, group, {**options, **more}

    def halved(self, metric: str, rows: dict[Any, Row]) -> dict[Any, Row]:
        """The rows on one half of the folds, where the alternative asks for one and the metric allows it."""
        return {cell: row.on_half(self.half) for cell, row in rows.items()} if self.changes(metric) else rows

    def changes(self, metric: str) -> bool:
        """Whether it reads other values from the same rows."""
        return bool(self.half) and metric in LINEAR


AS_CHOSEN = Alternative("", "", "", "")
_KEYS = {  # keys of variants under which a metric is the same quantity: kind, name, phrase, noun
    ("average", "row"): ("rows", "single rows", "averaged over single rows", "the weight of rows"),
    ("coordinates", "standardised"): ("coordinates", "standardised", "in standardised coordinates", "the coordinates"),
    ("first", "out"): ("first position", "no first", "without the first position", "the first position"),
    ("pairs", "between"): ("pairs", "between contexts", "over pairs of different contexts", "pairs of one context"),
    ("batches", "1"): ("batches", "in batches", "in batches of rows", "the number of rows"),
    ("calibrated", "1"): ("calibration", "calibrated", "with calibrated estimates", "the calibration"),
}
OUTLIERS = frozenset({"first"})  # keys of rows that exist only where they differ: elsewhere rows are read as they are
_FORMULAS = {"svd_ratio": ("svd_ratio_squared", "σ₁²/Σσ²")}
_HALVES = {1: "on folds 1–4", 2: "on folds 5–8"}
_OF_FOLDS = "the half of the folds"


def alternatives(table: Table, *, proxy: str, rank: int | None, fit: str | None) -> list[Alternative]:
    """The alternatives that the rows of a table offer to a choice of tangent directions, in the order of badges."""
    query = Query(table).where(layer=...)
    tangent = query.where(proxy=lambda name: name is not None and not name.startswith("random"), control=None)
    concerned = frozenset(tangent.values("metric"))
    ranks = sorted({int(value) for value in tangent.values("rank") if value and value.isdigit()} - {rank})
    found = [_directions("rank", r, f"with rank {r}", "the rank", concerned) for r in ranks]
    others = [name for name in tangent.values("proxy") if name != proxy]
    found += [_directions("proxy", name, f"with {name}", "the proxy", concerned) for name in others]
    fits = [name for name in tangent.values("fit") if name not in (fit, None)]
    found += [_directions("fit", name, f"with the {name} proxy", "the fit", concerned) for name in fits]
    for key, value in _KEYS:
        rows = query.where(**{key: value})
        found += [replace(reading(key, value), concerns=_metrics(rows))] if len(rows) else []
    for metric, (other, symbol) in _FORMULAS.items():
        if other in query.values("metric"):
            words = ("formula", symbol, f"by {symbol}", "the formula")
            found.append(Alternative(*words, metrics={metric: other}, concerns=frozenset({metric})))
    found += _halves(query)
    for split in sorted(value for value in query.values("split") if value is not None):
        words = ("split", split, f"with split {split} of the contexts", "the split of the contexts")
        found.append(Alternative(*words, options={"split": split}, concerns=_metrics(query.where(split=split))))
    return found


def reading(key: str, value: str) -> Alternative:
    """The alternative that reads rows with a further key of their variant.

    >>> reading("first", "out").phrase
    'without the first position'
    """
    return Alternative(*_KEYS[key, value], options={key: value})


def _directions(kind: str, name: Any, phrase: str, noun: str, concerns: frozenset[str]) -> Alternative:
    return Alternative(kind, str(name), phrase, noun, directions={kind: name}, concerns=concerns)


def _halves(query: Query) -> list[Alternative]:
    """Each half of the contexts, and both in each other's place for claims that read both."""
    grouped = _metrics(query.where(group=["half:1", "half:2"]))
    concerns, found = grouped | (LINEAR & frozenset(query.values("metric"))), []
    for half in (1, 2) if concerns else ():
        words = ("half", str(half), _HALVES[half], _OF_FOLDS)
        found.append(Alternative(*words, groups={"": f"half:{half}"}, half=half, concerns=concerns))
    if grouped:
        words = ("half", "swapped", "with folds 1–4 and 5–8 swapped", _OF_FOLDS)
        swapped = {"half:1": "half:2", "half:2": "half:1"}
        found.append(Alternative(*words, groups=swapped, concerns=grouped))
    return found


def _metrics(rows: Query) -> frozenset[str]:
    return frozenset(rows.values("metric"))


def differing(alternative: Alternative, chosen: Mapping[str, Any]) -> Alternative:
    """The alternative without directions that are those of the choice: models may have different ranks."""
    changed = {key: value for key, value in alternative.directions.items() if chosen[key] != value}
    return replace(alternative, directions=changed)
