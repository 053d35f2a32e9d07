"""Planted and null tables of the claims about known manifolds: rows of the curvature study with a chosen effect.

Nulls are of two kinds: nothing at all, and an effect that lies exactly on the margin, where a test errs most often.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from anisoscope.claims.revisiting.theory import EXPECTED_SLOPES, ORDERS
from anisoscope.results.query import Table, variant_name
from anisoscope.studies.curvature.gradients import over_replicates
from support.specimen import Specimen

Item = tuple[str, str, dict[str, Any], float]  # model, metric, options (`step` is the column), effect
MANIFOLDS = ("sphere", "torus")
REFERENCE = {"beta": "0.25", "zipf": "1"}
_LOGS = ("curvature_attenuation", "curvature_error", "local_pca_angle")


def theory_table(items: Iterator[Item], *, seed: int = 0, noise: float = 0.01, repetitions: int = 8) -> Table:
    """A table whose rows have these means over independent repetitions with normal noise."""
    drawn, records = np.random.default_rng(seed), []
    for model, metric, options, effect in items:
        step, log = options.pop("step", None), metric in _LOGS
        values = (math.log(effect) if log else effect) + noise * drawn.normal(size=repetitions)
        found = over_replicates((np.exp(values) if log else values).tolist(), log=log, n=100)
        place = {"run": "r", "stack": "single", "layer": 0, "kind": "manifold", "group": "", "seed": 0, "step": step}
        row = {**place, "model": model, "metric": metric, "variant": variant_name(options), **vars(found)}
        records.append({**row, "replicates": list(found.replicates)})
    return Table.from_records(records, {})


def slopes(of: str, effect: float) -> Iterator[Item]:
    for name in MANIFOLDS:
        yield name, "curvature_slope", {"of": of, "sampling": "gaussian"}, effect


def attenuation(effect: float, **options: Any) -> Iterator[Item]:
    for name, estimate in itertools.product(MANIFOLDS, ("true", "pca")):
        yield name, "curvature_attenuation", {**REFERENCE, **options, "estimate": estimate}, effect


def errors(effect: float) -> Iterator[Item]:
    for name in MANIFOLDS:
        yield name, "curvature_error", {"scale": "0.1"}, effect
        yield name, "local_pca_angle", {"scale": "0.1"}, 2.0


def recovered(count: str, lost: float) -> Iterator[Item]:
    for name, (sampling, share) in itertools.product(MANIFOLDS, {"uniform": 0.8, "zipf": 0.8 - lost}.items()):
        yield name, "curvature_recovered", {**REFERENCE, "count": count, "sampling": sampling}, share


def orders(of: str, effect: float) -> Iterator[Item]:
    for name, per, signal in itertools.product(MANIFOLDS, ("mean", "rows"), ("constant", "network")):
        yield name, "manifold_gradient_slope", {"of": of, "per": per, "signal": signal}, effect


def highest(effect: float) -> Iterator[Item]:
    for name, of in itertools.product(MANIFOLDS, ("tangent", "normal")):
        yield name, "manifold_gradient_tightness", {"highest": 1, "of": of, "signal": "noise"}, effect


def loop(gain: float, *, noise_labels: float = 0.0) -> Iterator[Item]:
    """The share rises by `gain` with labels, by `noise_labels` without, and not at all in a random subspace."""
    ends = {("tangent", "all"): gain, ("tangent", "random"): 0.0, ("noise", "all"): noise_labels}
    for name, layers, (way, end) in itertools.product(MANIFOLDS, (1, 2), ends.items()):
        for step, share in ((0, 0.3), (100, 0.3 + end)):
            options = {"labels": way[0], "layers": layers, "step": step, "update": way[1]}
            yield name, "tangent_variance_share", options, share


def pinned(slope: float) -> Iterator[Item]:
    for optimiser, window in itertools.product(("sgd", "adam"), ("all", "late")):
        yield "pinning", "pinning_slope", {"optimiser": optimiser, "window": window}, slope


def parabolas(share: float) -> Iterator[Item]:
    for per, value in (("row", 1.0), ("gradient", share)):
        yield "parabola", "parabola_tangent", {"per": per, "scale": "0.01"}, value


def specimen(
    items: Callable[..., Iterator[Item]], effect: float, *, none: float, edge: float, opposite: float, **fixed: Any
) -> Specimen:
    """A specimen from a function of the effect, and the effects that are planted, none, on the margin, opposite."""

    def null(value: float) -> Callable[[int], Table]:
        return lambda seed: theory_table(
            items(value, **fixed), seed=seed, noise=(0.005, 0.02, 0.1)[seed % 3], repetitions=(4, 8, 16)[seed // 3 % 3]
        )

    return Specimen(
        lambda: theory_table(items(effect, **fixed)),
        {"none": null(none), "edge": null(edge)},
        lambda: theory_table(items(opposite, **fixed)),
    )


def _slope(of: str) -> Specimen:
    order = EXPECTED_SLOPES[of]
    return specimen(lambda effect: slopes(of, effect), order, none=0.0, edge=order + 0.1, opposite=order - 1)


def _order(of: str) -> Specimen:
    order, margin = ORDERS[of], 0.15 if of == "ratio" else 0.1
    return specimen(lambda effect: orders(of, effect), order, none=0.0, edge=order - margin, opposite=order + 2)


def _lost(count: str) -> Specimen:
    return specimen(lambda effect: recovered(count, effect), 0.4, none=0.0, edge=0.1, opposite=-0.3)


THEORY: dict[str, Specimen] = {
    "tangent_variance_t2": _slope("tangent"),
    "normal_variance_t4": _slope("normal"),
    "visibility_t2": _slope("visibility"),
    "frequency_hides_curvature": specimen(attenuation, 0.5, none=1.0, edge=0.9, opposite=1.6),
    # nothing here is a ratio that frequency does change
    "frequency_null": specimen(attenuation, 1.0, none=0.6, edge=0.9, opposite=1.6, beta="0"),
    "local_pca_recovers_curvature": specimen(errors, 0.2, none=1.0, edge=0.4, opposite=2.0),
    "local_pca_loses_curvature": _lost("equal"),
    "local_pca_loses_curvature_all_tokens": _lost("natural"),
    "tangent_gradient_order": _order("tangent"),
    "normal_gradient_order": _order("normal"),
    "gradient_ratio_order": _order("ratio"),
    "gradient_within_bounds": specimen(highest, 0.8, none=2.0, edge=1.05, opposite=1.5),
    "self_reinforcing_loop": specimen(loop, 0.5, none=0.0, edge=0.1, opposite=-0.2),
    "frequent_types_pinned": specimen(pinned, -0.3, none=0.0, edge=-0.05, opposite=0.3),
    "parabola": specimen(parabolas, 0.0, none=1.0, edge=0.1, opposite=0.9),
}
