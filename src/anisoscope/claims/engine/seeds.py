"""Seeds of a table: which are trainings of their own, and which runs of several models go together.

A general claim needs independent trainings. The seed in a table may be that of the measurement only (random directions,
starts of a fit) on the same weights; such seeds have identical losses and count as one run. A pretrained model, whose
weights were loaded, is one training, whatever the seed in its rows: beside models that were trained from several seeds
it is no seed of theirs (`apart`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from anisoscope.results.query import Query

LOSSES = ("probe_loss", "loss")
ENERGY = "gradient_energy"
CLOSE = 1e-12  # losses this close (relative) come from the same training


class Weights(Protocol):
    """What is asked of a run."""

    @property
    def loaded(self) -> bool: ...


R = TypeVar("R", bound=Weights)


def apart(series: list[dict[str, R]]) -> tuple[list[dict[str, R]], dict[str, R]]:
    """The studies of seeds, and apart from them the pretrained models, of which there is one set of weights each.

    With one of the seeds such a model would have a part of its weight and be missing in the others; with each of them
    it would agree with itself. Where nothing has several seeds, no model is apart: one study has all of them.
    """
    counts = Counter(model for study in series for model in study)
    alone = {name: run for study in series for name, run in study.items() if counts[name] == 1 and run.loaded}
    trained = [{name: run for name, run in study.items() if name not in alone} for study in series]
    return (trained, alone) if len(series) > 1 and all(trained) else (series, {})


def aligned(seeds: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """The seed of each model in each study: equal seeds together if all models share one, else the i-th seed of each.

    >>> aligned({"a": [0, 2], "b": [0, 1, 2]})
    [{'a': 0, 'b': 0}, {'b': 1}, {'a': 2, 'b': 2}]
    >>> aligned({"a": [0, 1], "b": [7]})
    [{'a': 0, 'b': 7}, {'a': 1}]
    """
    if seeds and set.intersection(*map(set, seeds.values())):
        every = sorted(set().union(*seeds.values()), key=lambda seed: -1 if seed is None else seed)
        return [{model: seed for model, found in seeds.items() if seed in found} for seed in every]
    count = max((len(found) for found in seeds.values()), default=0)
    return [{model: found[i] for model, found in seeds.items() if i < len(found)} for i in range(count)]


Series = dict[tuple[Any, ...], float]  # values by (step, further columns)


def repeats(query: Query, seeds: Mapping[str, Sequence[int]]) -> dict[str, dict[int, list[int]]]:
    """For every model the seeds to keep, each with the later seeds that are measurements of the same run."""
    several = [model for model, found in seeds.items() if len(found) > 1]
    # compare only values that do not depend on the random draws of the measurement
    fixed = {"control": None, "proxy": lambda name: not (name or "").startswith("random")}
    rows = query.where(model=several, metric=[*LOSSES, ENERGY], head=None, **fixed).known()
    runs: dict[tuple[str, int], dict[str, Series]] = {}
    for (model, seed, metric), values in rows.groups("model", "seed", "metric").items():
        places = zip(*map(values.column, ("step", "stack", "layer", "kind", "group", "variant")), strict=True)
        runs.setdefault((model, seed), {})[metric] = dict(zip(places, values.column("value"), strict=True))
    kept: dict[str, dict[int, list[int]]] = {model: {} for model in seeds}
    for model, seed in ((model, seed) for model, numbers in seeds.items() for seed in numbers):
        current = runs.get((model, seed), {})
        original = next((k for k in kept[model] if same_run(runs.get((model, k), {}), current)), None)
        kept[model].setdefault(seed, []) if original is None else kept[model][original].append(seed)
    return kept


def same_run(one: Mapping[str, Series], two: Mapping[str, Series]) -> bool:
    """Whether two seeds have equal losses at all common steps or, without losses, equal gradient energies at one step.

    A loss at step 0 alone is not enough: an output head initialised to zero gives every seed the same loss.

    >>> same_run({"loss": {(0,): 5.6, (9,): 2.1}}, {"loss": {(0,): 5.6, (9,): 2.1}})
    True
    >>> same_run({"loss": {(0,): 5.6, (9,): 2.1}}, {"loss": {(0,): 5.6, (9,): 2.2}})
    False
    """
    equal: dict[str, dict[int | None, bool]] = {name: {} for name in (*LOSSES, ENERGY)}  # by metric and step
    for name, steps in equal.items():
        first, second = one.get(name, {}), two.get(name, {})
        for key in first.keys() & second.keys():
            same = math.isclose(first[key], second[key], rel_tol=CLOSE, abs_tol=CLOSE)
            steps[key[0]] = steps.get(key[0], True) and same
    courses = [equal[name] for name in LOSSES if any(step != 0 for step in equal[name])]
    if courses:
        return any(all(steps.values()) for steps in courses)
    later = {step: same for step, same in equal[ENERGY].items() if step != 0}
    return any((later or equal[ENERGY]).values())
