"""What studies will take: their trainings and profiles added up; protocols without a model from a recorded run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from anisoscope.capture.sites.site import Site
from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.bank import make_plan
from anisoscope.measurement.config import ProfileConfig
from anisoscope.measurement.feed import SiteShape
from anisoscope.measurement.inspection import Amount
from anisoscope.planning.calibration import Calibration
from anisoscope.planning.cost import Cost, closing, starting
from anisoscope.planning.features import added, capture_features, evaluation_features
from anisoscope.planning.plans import (
    Calibrated,
    RunPlan,
    cores,
    cost_of_profile,
    cost_of_training,
    parts_of,
    plan_sweep,
    preset_of,
    temporary,
    without_mini,
)
from anisoscope.planning.stages import READING
from anisoscope.series import SweepConfig
from anisoscope.tangent.plan import GEOMETRY, PLANS, leading_preset
from anisoscope.view.words import spoken

# processor seconds of `study curvature` for one manifold, and of the probes of `study performance` for one layer of one
# checkpoint, on one core whose start takes _START seconds; another machine's are taken to differ by its start
_CURVATURE = {"tiny": 3.3, "small": 40.0}
_PROBES = 2.75
_START = 5.2


def arms_plan(title: str, config: Any, calibrated: Calibrated, *, jobs: int | None) -> RunPlan:
    """A study that trains arms: all of them, then claims and page over the joint table."""
    watch, runs = config.watch, config.runs()
    gradients = leading_preset(watch["monitor"]) in PLANS or watch.get("gradients")
    c = calibrated(parts_of(preset_of(watch) if gradients else ""))
    total, notes = Cost(), list[str]()
    cost_alike = functools.cache(lambda training: cost_of_training(training, watch, c))
    for run in runs:
        cost, _, more = cost_alike(replace(run.training, seed=0))  # an arm costs the same with every seed
        total, notes = total.plus(cost), [*notes, *more]
    total = total.plus(_random_families(config, c))
    together = min(jobs or getattr(config.size, "jobs", 1), len(runs) or 1)
    side = min(together, cores()) if c.device == "cpu" else 1
    if together > 1:
        # threads are shared as well: with one thread each, arms side by side use as many cores
        spent = starting(c).seconds * len(runs) / side
        total = replace(total, parts=tuple((n, s / side) for n, s in total.parts), host=total.host * together)
        total = total.plus(Cost((("start", spent),)))
        notes.append(f"{together} arms at a time on {cores()} cores; memory is that of all of them")
    total = starting(c).plus(total)
    total = total.plus(closing(c, total.records, judged=True))
    facts = {"arms": f"{len(runs)}: {', '.join(dict.fromkeys(run.model for run in runs))}"}
    return RunPlan(title, without_mini(total, c), c, facts, list(dict.fromkeys(notes)))


def _random_families(config: Any, c: Calibration) -> Cost:
    """The families that `study inherent` measures with random weights."""
    families, total = getattr(config, "every_family", ()), Cost()
    if not families:
        return total
    from anisoscope.studies.inherent import write_configuration

    with temporary() as place:
        for family in families:
            spec = write_configuration(family, Path(place))
            made = ProfileConfig((str(spec),), tokens=config.size.rows, metrics=GEOMETRY["attention"], random_init=True)
            total = total.plus(cost_of_profile(str(spec), made, c)[0])
    named = tuple(("random weights", seconds) for _, seconds in total.parts)
    return replace(total, parts=((named[0][0], sum(s for _, s in named)),)).times(len(config.every_seed))


def published_plan(title: str, config: Any, calibrated: Calibrated) -> RunPlan:
    """The models of a paper: those whose configuration is here."""
    total: Cost | None = None
    known, unknown, last = [], [], None
    preset = {"revisiting": "standard", "shape": "shape", "inherent": "attention"}[title.split()[-1]]
    for model in config.published():
        made = SweepConfig(model.spec, preset=preset, tokens=config.probe_tokens, device=config.device)
        number = max(1, len(getattr(model, "revisions", ()) or ()) + len(getattr(model, "others", ()) or ()))
        try:
            last = plan_sweep(made, calibrated, checkpoints=number)
        except AnisoscopeError:
            unknown.append(model.spec)
            continue
        known.append(model.spec)
        total = last.cost if total is None else total.plus(last.cost)
    if total is None or last is None:
        raise AnisoscopeError(
            f"no configuration of the {len(unknown)} models of this paper is here (the first is {unknown[0]}); go "
            "online, or name models that are in the hub's cache with --models."
        )
    notes = [f"{len(unknown)} models are left out, whose configurations are not here"] if unknown else []
    notes.append("downloads are not counted")
    return RunPlan(title, total, last.calibration, {"models": f"{len(known)}: {', '.join(known)}"}, notes)


def _speed(c: Calibration) -> float:
    return c.seconds("start", {"runs": 1.0}) / _START


def _curvature(title: str, config: Any, calibrated: Calibrated) -> RunPlan:
    c = calibrated((*READING, "ends"))
    work = _CURVATURE[config.preset] * len(config.manifolds) * _speed(c)
    total = starting(c).plus(Cost((("manifolds", work),), host=c.base + 150e6, disk=1e6))
    total = total.plus(closing(c, 3000.0, judged=True))
    notes = ["from a recorded run, by how long programs take to start here"]
    if config.model is not None:
        notes.append("measuring β in --model is not counted; see --dry-run of profile")
    facts = {"manifolds": ", ".join(config.manifolds)}
    return RunPlan(title, without_mini(total, c), c, facts, notes)


def _performance(title: str, config: Any, calibrated: Calibrated) -> RunPlan:
    c = calibrated((*READING, "update", "ends"))
    if config.models:
        raise AnisoscopeError("a plan is made of the model that this study trains; leave the models out.")
    training = config.training()
    cost, facts, notes = cost_of_training(training, {"monitor": "none"}, c)
    number = len([word for word in training.checkpoints.split(",") if word]) + 1
    scale = (config.size["rows"] / 2048) * (training.width / 64) ** 1.5
    probes = _PROBES * number * (training.layers + 1) * scale * _speed(c)
    total = starting(c).plus(cost).plus(Cost((("probes", probes),), host=c.base + 400e6, disk=3e6))
    total = total.plus(closing(c, 400.0 * number * training.layers, judged=True))
    notes.append("probes: from a recorded run, by how long programs take to start here")
    facts["checkpoints"] = f"{number}, about {spoken(probes / number)} of probes each"
    return RunPlan(title, without_mini(total, c), c, facts, notes)


def _untrained(title: str, config: Any, calibrated: Calibrated) -> RunPlan:
    """Blocks at initialisation: two sites of the stream and three with heads for every bias."""
    from anisoscope.studies.untrained.protocol import KINDS, requests

    c = calibrated((*READING, "ends"))
    total, size, asked = Cost(), config.size, list(requests())
    plan = make_plan(asked, KINDS, seed=0, sample_size=1)
    sites = [Site(0, "embed"), Site(1, "resid"), Site(1, "query"), Site(1, "key"), Site(1, "scores")]
    for arm in config.arms():
        heads = config.heads_of(arm.width)
        split = {"query": (arm.width // heads, heads), "key": (arm.width // heads, heads), "scores": (1, heads)}
        shapes = {s: SiteShape(size.length, *split.get(s.kind, (arm.width, 1))) for s in sites}
        amount = Amount(size.sequences)
        taken = capture_features(sites, shapes, plan, amount=amount, batches=1)
        found = evaluation_features(sites, shapes, plan, asked, amount=amount)
        one = c.seconds("measure", added(taken[0], found[0])) + c.seconds("measure:heads", added(taken[1], found[1]))
        rows = float(size.sequences * size.length)
        flops = rows * (24 * arm.width**2 + 4 * size.length * arm.width)
        one += c.seconds("forward", {"operations": 60, "flops": flops, "bytes": rows * arm.width * 4 * 60})
        total = total.plus(Cost((("blocks", config.points * one),), records=config.points * 12.0))
    host = c.base + 4 * max(size.sequences * size.length * w for w in size.widths) * 40.0 + 100e6
    total = starting(c).plus(replace(total, host=host, disk=total.records * 74))
    total = total.plus(closing(c, total.records, judged=True))
    facts = {"blocks": f"{len(config.arms())}, {config.points} measurements each"}
    return RunPlan(title, without_mini(total, c), c, facts)


PLANNED: dict[str, Callable[[str, Any, Calibrated], RunPlan]] = {
    "curvature": _curvature,
    "performance": _performance,
    "untrained": _untrained,
}


def plan_study(name: str, config: Any, calibrated: Calibrated, *, jobs: int | None = None) -> RunPlan:
    """The plan of a study."""
    title = f"study {name}"
    if getattr(config, "preset", "") == "paper":
        return published_plan(title, config, calibrated)
    if hasattr(config, "runs") and hasattr(config, "watch"):
        return arms_plan(title, config, calibrated, jobs=jobs)
    return PLANNED[name](title, config, calibrated)
