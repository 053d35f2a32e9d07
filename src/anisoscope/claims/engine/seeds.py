"""Several seeds of a model: which of them are runs of their own, and the step at which they can be judged together.

A general claim rests on independent trainings. The seed of a table may be that of the measurement alone (random
directions, starts of a fit) on the same weights; such seeds have the same losses, digit by digit, and count as one run.
A mean over seeds that end at different steps is taken at the last step that all of them have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from anisoscope.claims.engine.part import Finding
from anisoscope.results.query import Query

LOSSES = ("probe_loss", "loss")
ENERGY = "gradient_energy"
CLOSE = 1e-12  # two trainings do not agree to so many digits
Series = dict[tuple[Any, ...], float]  # by step, and by whatever else a value belongs to


def at_one_step(findings: Sequence[Finding]) -> tuple[list[Finding], str]:
    """The findings of the seeds, all at the last step that they share; where there is none, why they cannot be pooled.

    A finding says its step in `details["step"]` and can be asked for again with `until`; those that say none are left
    alone. Step 0 does not count as shared where a seed went on: it is no result of training.
    """
    own = [_step(finding) for finding in findings]
    found = list(findings)
    while len(steps := {_step(finding) for finding in found}) > 1:
        known = [step for step in steps if step is not None]
        if len(known) < len(steps):
            return list(findings), _apart(own)
        nearest = min(known)
        found = [f if _step(f) == nearest or f.until is None else f.until(nearest) for f in found]
        if nearest == 0 or {_step(finding) for finding in found} == steps:
            return list(findings), _apart(own)
    return _noted(found, own), ""


def _step(finding: Finding) -> int | None:
    return finding.details.get("step")


def _noted(found: list[Finding], own: Sequence[int | None]) -> list[Finding]:
    """A finding at another step than the last says so, and so does one whose models ended apart."""
    moved = any(_step(finding) != step for finding, step in zip(found, own, strict=True))
    note = f"step {_step(found[0])} is the last that all {len(found)} seeds have" if moved else _mixed(found)
    return [replace(finding, note=note) for finding in found] if note else found


def _mixed(found: Sequence[Finding]) -> str:
    """Which models of a claim about several were judged at different steps (`details["ends"]`, by model)."""
    ends: list[dict[str, Any]] = [finding.details.get("ends", {}) for finding in found]
    shared = [name for name in ends[0] if all(name in one for one in ends)]
    apart = [name for name in shared if len({one[name] for one in ends}) > 1]
    told = [f"those of {name} at steps {_listed([one[name] for one in ends])}" for name in apart]
    return f"the seeds were judged at different steps, {' and '.join(told)}" if told else ""


def _apart(own: Sequence[int | None]) -> str:
    return f"the seeds end at different steps ({_listed(own)}) and share none after step 0 to be compared at"


def _listed(steps: Sequence[int | None]) -> str:
    """Steps one after another, as they are read in a sentence.

    >>> _listed([200, 100, 100])
    '200, 100 and 100'
    """
    *before, last = ["no step" if step is None else str(step) for step in steps]
    return f"{', '.join(before)} and {last}" if before else last


def repeats(query: Query, seeds: Mapping[str, Sequence[int]]) -> dict[str, dict[int, list[int]]]:
    """For every model the seeds to keep, each with the later ones that are the same run, measured again."""
    several = [model for model, found in seeds.items() if len(found) > 1]
    runs = _compared(query.where(model=several)) if several else {}
    found: dict[str, dict[int, list[int]]] = {}
    for model, numbers in seeds.items():
        kept = found.setdefault(model, {})
        for seed in numbers:
            mine = runs.get((model, seed), {})
            original = next((k for k in kept if same_run(runs.get((model, k), {}), mine)), None)
            kept.setdefault(seed, []) if original is None else kept[original].append(seed)
    return found


def _compared(query: Query) -> dict[tuple[str, int], dict[str, Series]]:
    """The values that can tell two runs apart, by model and seed, then by metric: nothing that was drawn at random."""
    fixed = {"control": None, "proxy": lambda name: not (name or "").startswith("random")}
    found: dict[tuple[str, int], dict[str, Series]] = {}
    rows = query.where(metric=[*LOSSES, ENERGY], head=None, **fixed).known()
    for (model, seed, metric), mine in rows.groups("model", "seed", "metric").items():
        places = zip(*map(mine.column, ("step", "stack", "layer", "kind", "group", "variant")), strict=True)
        found.setdefault((model, seed), {})[metric] = dict(zip(places, mine.column("value"), strict=True))
    return found


def same_run(one: Mapping[str, Series], two: Mapping[str, Series]) -> bool:
    """Whether two seeds share a loss at all common steps or, without losses, the gradient energies of one step.

    A loss at step 0 alone proves nothing: an output head that starts at zero gives every seed the same one.

    >>> same_run({"loss": {(0,): 5.6, (9,): 2.1}}, {"loss": {(0,): 5.6, (9,): 2.1}})
    True
    >>> same_run({"loss": {(0,): 5.6, (9,): 2.1}}, {"loss": {(0,): 5.6, (9,): 2.2}})
    False
    """
    shared = {name: _pairs(one.get(name, {}), two.get(name, {})) for name in LOSSES}
    courses = [pairs for pairs in shared.values() if any(step != 0 for step in pairs)]
    if courses:
        return any(all(_equal(values) for values in pairs.values()) for pairs in courses)
    energies = _pairs(one.get(ENERGY, {}), two.get(ENERGY, {}))
    later = {step: values for step, values in energies.items() if step != 0} or energies
    return any(_equal(values) for values in later.values())


def _pairs(one: Series, two: Series) -> dict[int | None, list[tuple[float, float]]]:
    """Values of both at the same place, by step."""
    found: dict[int | None, list[tuple[float, float]]] = {}
    for key in one.keys() & two.keys():
        found.setdefault(key[0], []).append((one[key], two[key]))
    return found


def _equal(values: list[tuple[float, float]]) -> bool:
    return all(math.isclose(a, b, rel_tol=CLOSE, abs_tol=CLOSE) for a, b in values)


def remark(seed: int | None, again: Sequence[int]) -> str:
    """What a verdict says about seeds that were left out; empty where there are none.

    >>> remark(0, [1, 2])
    'seeds 1 and 2 are the same run as seed 0, measured again'
    """
    if not again:
        return ""
    *before, last = map(str, again)
    named = f"seeds {', '.join(before)} and {last} are" if before else f"seed {last} is"
    return f"{named} the same run as seed {seed}, measured again"
