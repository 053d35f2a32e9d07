"""Drift with average cosine in numbers: a row for each model with its seeds, and the pools of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from anisoscope.claims.engine.correlation import FEWEST_SITES, CorrelationUnit
from anisoscope.claims.inherent.drift import FEWEST_LAYERS
from anisoscope.view.modalities import LOOKS, Comparison, Record, common_state, counted, interval_words, state_words
from anisoscope.view.seeds import Bundle, bundles_of, in_front, in_seeds, size_words
from anisoscope.view.verdicts import neat
from anisoscope.view.words import finite, listed, plural, spans


def units_of(found: Comparison) -> list[tuple[dict[str, Any], CorrelationUnit]]:
    """The ranks of the stacks that are pooled, as `claims.drift.pooled` takes them."""
    units = []
    for record in (r for r in found.scattered if not r["untrained"]):
        sites = [p for p in counted(record) if finite(p["drift"]) is not None]
        if len(sites) >= FEWEST_SITES and finite(record["spearman"]) is not None:
            drift, cosine = ([p[name] for p in sites] for name in ("drift", "cosine"))
            units.append((record, CorrelationUnit.of(record["model"], drift, cosine)))
    return units


def correlation_table(found: Comparison) -> dict[str, Any]:
    """Drift with average cosine in every model, then pooled by modality and over all, and what is not explained."""
    records = sorted(found.records, key=lambda r: found.modalities.index(r["modality"]))
    front, behind = in_front(bundles_of(records))
    return {
        "groups": _by_modality(found, front),
        "random": _by_modality(found, behind),
        "random_words": _random_words(behind),
        "pooled": [_pooled_row(row, found) for row in _pools(found)],
        "unexplained": in_seeds(front, _status, "fails"),
        "open": in_seeds(front, _status, "undecided"),
        "fewest": FEWEST_LAYERS,
    }


def _status(record: Record) -> str:
    return str(record["status"])


def _by_modality(found: Comparison, bundles: Sequence[Bundle]) -> list[tuple[str, list[dict[str, Any]]]]:
    groups = [(m, [_bundle_row(b) for b in bundles if b.modality == m]) for m in found.modalities]
    return [(m, rows) for m, rows in groups if rows]


def _random_words(bundles: Sequence[Bundle]) -> str:
    """How many stacks stand behind, and what was found of them."""
    if not bundles:
        return ""
    counts = Counter(common_state(bundle, _status) for bundle in bundles)
    told = [f"{counts[state]} {words}" for state, (_, _, words) in LOOKS.items() if counts[state]]
    return f"{size_words(bundles)} with random weights: {listed(told)}"


def _bundle_row(bundle: Bundle) -> dict[str, Any]:
    """One seed with its intervals, or means over seeds, how far these reach, and every seed beneath."""
    row = _stack_row(bundle.first) | {"label": bundle.label, "states": state_words(bundle, _status), "seeds": []}
    if not bundle.seeds:
        return row
    notes = {record["note"] or _why_open(record) for record in bundle.members}
    means = {name: _mean_part(bundle, name) for name in ("pearson", "spearman", "explained")}
    plain = {"pearson_p": "", "spearman_p": "", "note": next(iter(notes)) if len(notes) == 1 else ""}
    sites = spans({record["n"] for record in bundle.members})
    return row | means | plain | {"sites": sites, "seeds": [_stack_row(record) for record in bundle.members]}


def _mean_part(bundle: Bundle, name: str) -> tuple[str, str]:
    value, _, ends = mean_words(bundle, name).partition(" ")
    return value, ends.strip("[]").replace(", ", " to ")


def mean_words(bundle: Bundle, name: str) -> str:
    """The mean over seeds, and from the lowest to the highest."""
    values = bundle.values(name)
    return interval_words(bundle.mean(name), min(values, default=None), max(values, default=None))


def _stack_row(record: Record) -> dict[str, Any]:
    named = {name: _parted(record, name) for name in ("pearson", "spearman", "explained")}
    tests = {name: p_words(record.get(name)) for name in ("pearson_p", "spearman_p")}
    return {"label": record["label"], "seed": f"seed {record['seed']}", "untrained": record["untrained"],
            "sites": record["n"], "note": record["note"] or _why_open(record), "word": LOOKS[record["status"]][0],
            **named, **tests}  # fmt: skip


def _why_open(record: Record) -> str:
    if record["status"] != "undecided":
        return ""
    if record["n"] < FEWEST_LAYERS:
        return f"{plural(record['n'], 'site')}, {FEWEST_LAYERS} are needed"
    return "the share was not measured" if finite(record["explained"]) is None else ""


def _parted(record: Record, name: str) -> tuple[str, str]:
    """A number, and its interval for the line below."""
    value, _, ends = interval_words(record[name], record.get(f"{name}_low"), record.get(f"{name}_high")).partition(" ")
    return value, ends.strip("[]").replace(", ", " to ")


def _pools(found: Comparison) -> list[dict[str, Any]]:
    """Each modality where there are several, then all; none of a single stack."""
    if len(units_of(found)) < 2:
        return []
    several = len({row["modality"] for row in found.pooled if row["modality"] != "all"}) > 1
    every = [row for row in found.pooled if row["modality"] != "all" and row["stacks"] > 1]
    return [*(every if several else []), *(row for row in found.pooled if row["modality"] == "all")]


def _pooled_row(row: Record, found: Comparison) -> dict[str, Any]:
    """The pool as `claims.drift.pooled` tells it; Pearson's only where it does."""
    ranked = {"spearman": row["spearman"], "spearman_low": row["low"], "spearman_high": row["high"]}
    linear = {name: row.get(name) for name in ("pearson", "pearson_low", "pearson_high")}
    return {
        "modality": "all models" if row["modality"] == "all" else row["modality"],
        "size": _pool_size(row, found),
        "sites": str(row["n"]),
        "spearman": _parted(ranked, "spearman"),
        "spearman_p": p_words(row["p"]),
        "pearson": _parted(linear, "pearson"),
        "pearson_p": p_words(row.get("pearson_p")),
        "note": row["note"],
    }


def _pool_size(row: Record, found: Comparison) -> str:
    """How many models and stacks; where seeds are pooled, models times seeds."""
    pool = bundles_of([record for record, _ in units_of(found) if row["modality"] in ("all", record["modality"])])
    if any(bundle.seeds for bundle in pool):
        return size_words(pool)
    return f"{plural(len(row['models']), 'model')}, {plural(row['stacks'], 'stack')}"


def p_words(p: float | None) -> str:
    """A p-value.

    >>> p_words(0.0333), p_words(1e-9), p_words(float("nan"))
    ('0.033', '< 0.0001', '–')
    """
    known = finite(p)
    return "–" if known is None else "< 0.0001" if known < 1e-4 else neat(known, 2)
