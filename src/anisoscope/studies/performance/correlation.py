"""Rows of the table: how the geometry of raw rows goes with performance, over the layers and over the checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from anisoscope.claims.dynamics.performance import (
    FEWEST,
    MetricName,
    PerformanceResults,
    ScoreSeries,
    SiteKey,
    descriptive_p,
    over_contexts,
    over_points,
)
from anisoscope.results.schema import variant_name

METHODS = ("spearman", "pearson")
ANISOTROPY = ("svd_ratio", "average_cosine", "two_nn", "iso_score")


def correlations(results: PerformanceResults) -> Iterator[dict[str, Any]]:
    """Geometry with performance, over layers at every checkpoint and over checkpoints at every site."""
    for geometry in ANISOTROPY:
        names: list[MetricName] = [(geometry, {"repair": "raw"})]
        for performance, of in results.performances().items():
            words = {"geometry": geometry, "performance": performance}
            if performance != "loss":  # that is one number for the whole model
                yield from _over_layers(results, names, of, {**words, "over": "layers"})
            if len(results.steps) >= FEWEST:
                yield from _over_checkpoints(results, names, of, {**words, "over": "checkpoints"})


def _over_layers(
    results: PerformanceResults, names: list[MetricName], of: list[MetricName], words: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    for step in results.steps:
        places = [(step, site) for site in results.sites]
        x, y = results.series(names, places), results.series(of, places)
        if x is not None and y is not None and len(places) >= FEWEST:
            yield from _rows(x, y, words, step=step)


def _over_checkpoints(
    results: PerformanceResults, names: list[MetricName], of: list[MetricName], words: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    for site in results.sites:
        places = [(step, site) for step in results.steps]
        x, y = results.series(names, places), results.series(of, places)
        if x is not None and y is not None:
            yield from _rows(x, y, words, site=site)
    x, y = results.mean_over(names, results.steps), results.mean_over(of, results.steps)
    if x is not None and y is not None:
        yield from _rows(x, y, {**words, "sites": "mean"})
        if len(results.steps) > FEWEST:
            yield from _rows(_changes(x), _changes(y), {**words, "sites": "mean", "of": "changes"})


def _changes(series: ScoreSeries) -> ScoreSeries:
    """Differences between neighbouring checkpoints: what both merely do over time falls out."""
    return ScoreSeries(np.diff(series.value), np.diff(series.folds, axis=0))


def _rows(
    x: ScoreSeries, y: ScoreSeries, words: Mapping[str, str], *, step: int | None = None, site: SiteKey | None = None
) -> Iterator[dict[str, Any]]:
    """One row for each method and interval: over contexts, and over layers or checkpoints."""
    stack, layer, kind = site or ("single", None, "study")
    for method in METHODS:
        p = descriptive_p(x, y, method)
        note = "points of one run are not independent" + ("" if math.isnan(p) else f"; descriptive p = {p:.2g}")
        for interval, way in (("contexts", over_contexts), (words["over"], over_points)):
            found = way(x, y, method)
            yield {
                "step": step,
                "stack": stack,
                "layer": layer,
                "kind": kind,
                "group": "",
                "metric": "performance_correlation",
                "variant": variant_name({**words, "method": method, "interval": interval}),
                "value": found.value,
                "low": found.low,
                "high": found.high,
                "n": len(x.value),
                "dropped": 0,
                "note": note,
                "replicates": list(found.left),
            }
