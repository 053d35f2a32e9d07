"""How much work there is: the amounts that the cost model multiplies with the coefficients of a calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anisoscope.capture.sites.site import Site
from anisoscope.measurement.bank import Plan, applies
from anisoscope.measurement.evaluation import HALVED_KINDS
from anisoscope.measurement.feed import SiteShape
from anisoscope.measurement.inspection import Amount
from anisoscope.metrics.engine.folds import Neighbours
from anisoscope.metrics.engine.metric import HEAD_KINDS, Request
from anisoscope.planning.trace import PassTrace
from anisoscope.stats.moments import Moments
from anisoscope.stats.sample import Sample
from anisoscope.tangent.plan import TangentPlan
from anisoscope.tangent.tangent_study import DEFAULT_RANK

Amounts = dict[str, float]
SCORED = ("scores", "cross_scores")


def added(*parts: Mapping[str, float]) -> Amounts:
    """The sums of features by name."""
    return {name: sum(part.get(name, 0.0) for part in parts) for name in dict.fromkeys(n for p in parts for n in p)}


def scaled(part: Mapping[str, float], factor: float) -> Amounts:
    return {name: value * factor for name, value in part.items()}


def pass_features(found: PassTrace, *, batches: float = 1.0, speed: float = 1.0) -> Amounts:
    """Features of passes over a model; `speed` is that of products of its type over those of float32."""
    return {
        "operations": found.operations * batches,
        "flops": found.flops * batches / speed,
        "bytes": found.bytes * batches,
    }


def capture_features(
    sites: Sequence[Site], shapes: Mapping[Site, SiteShape], plan: Plan, *, amount: Amount, batches: float
) -> tuple[Amounts, Amounts]:
    """Collecting statistics while a model runs: at sites of the stream, and at those with heads."""
    stream = dict.fromkeys(("site_batches", "row_values", "products"), 0.0)
    heads = dict.fromkeys(("site_batches", "row_values", "attended"), 0.0)
    for site in (s for s in sites if s in shapes):
        shape, wanted = shapes[site], plan.stats.get(site.kind, frozenset())
        rows = amount.rows(shape)
        into = heads if site.kind in HEAD_KINDS or site.kind in SCORED else stream
        into["site_batches"] += batches
        if site.kind in SCORED:
            asked = min(plan.attention_rows or shape.positions, shape.positions)
            heads["attended"] += float(amount.contexts) * asked * shape.heads * shape.positions * amount.longer
            continue
        into["row_values"] += float(rows) * shape.width * shape.heads
        if Moments in wanted:
            stream["products"] += float(rows) * min(rows, shape.width) * shape.width * shape.heads
    return stream, heads


def evaluation_features(
    sites: Sequence[Site],
    shapes: Mapping[Site, SiteShape],
    plan: Plan,
    requests: Sequence[Request],
    *,
    amount: Amount,
    selections: int = 1,
) -> tuple[Amounts, Amounts]:
    """Computing metrics from statistics: at sites of the stream (per selection of rows), and at those with heads."""
    stream = dict.fromkeys(("sites", "metrics", "cubes", "pairs", "sampled"), 0.0)
    heads = dict.fromkeys(("sites", "head_metrics"), 0.0)
    for site in (s for s in sites if s in shapes):
        shape, wanted = shapes[site], plan.stats.get(site.kind, frozenset())
        mine = [request for request in requests if applies(request, site.kind)]
        if site.kind in HEAD_KINDS or site.kind in SCORED:
            heads["sites"] += 1
            heads["head_metrics"] += float(len(mine)) * shape.heads
            continue
        rows, near = amount.rows(shape), [r for r in mine if Neighbours in r.metric.needs]
        sampled = min(plan.looked_at, rows) if Sample in wanted else 0
        halves = 1 if plan.halves and site.kind in HALVED_KINDS else 0
        stream["sites"] += 1
        stream["metrics"] += len(mine) * selections + 2 * halves * len(near)
        if Moments in wanted:
            stream["cubes"] += selections * float(min(rows, shape.width)) ** 3
        if near:
            stream["pairs"] += float(sampled) ** 2 * shape.width * (1 + halves * 2)
        stream["sampled"] += float(sampled) * shape.width * (1 + halves)
    return stream, heads


def tangent_features(widths: Sequence[int], plan: TangentPlan, *, rows: float) -> Amounts:
    """One measured step of the tangent study at sites of these widths, over so many rows of the probe."""
    found = dict.fromkeys(("steps", "sites", "values", "fits", "draws", "cubes"), 0.0)
    found["steps"] = 1.0
    for width in widths:
        rank = plan.rank or min(DEFAULT_RANK, max(1, width // 4))
        found["sites"] += 1
        found["values"] += rows * width
        found["fits"] += min(rows / 2, plan.fit_rows) * width * rank
        found["draws"] += float(plan.draws) * width * rank
        found["cubes"] += float(width) ** 3
    return scaled(found, 1 + 0.5 * len(plan.splits))


def update_features(found: PassTrace, parameters: float, *, tensors: float, speed: float = 1.0) -> Amounts:
    """One update of a training: its passes, and the optimizer over all parameters."""
    passes: dict[str, Any] = pass_features(found, speed=speed)
    return {**passes, "parameters": parameters, "tensors": tensors}
