"""What each command will take: its parts added up, with what a reader of the plan should know."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from anisoscope.data.text import files_in
from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.bank import prepare
from anisoscope.measurement.config import ProfileConfig
from anisoscope.measurement.saved_rows import KEPT_ROWS
from anisoscope.metrics.catalogue import parse_requests
from anisoscope.models.source import SHAPE
from anisoscope.monitor.instruments import stream_kinds
from anisoscope.monitor.schedule import parse_schedule
from anisoscope.planning.calibration import Calibration
from anisoscope.planning.cost import Cost, Costs, Passage, closing, map_bytes, starting, state_bytes
from anisoscope.planning.ends import MINI
from anisoscope.planning.stages import READING
from anisoscope.planning.subject import ModelShape, of_model, subject_of
from anisoscope.series import SweepConfig
from anisoscope.series.integrity import SKETCH
from anisoscope.studies.config import PROBED
from anisoscope.tangent.plan import PLANS, choose_plan, leading_preset, more_sites
from anisoscope.training.config import CommonTrainConfig, TrainConfig, checkpoint_steps
from anisoscope.view.words import spoken

_TOKENIZED = 2e-7  # seconds of tokenising a character, on one core; four characters a token
_VOCABULARIES = {"char": 180, "enwik8": 205}
Calibrated = Callable[[Sequence[str]], Calibration]  # a calibration with these parts


@dataclass
class RunPlan:
    """What a run will take, and what that was worked out from."""

    title: str
    cost: Cost
    calibration: Calibration
    facts: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    pilot: Mapping[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """As plain values, in seconds and bytes."""
        c = self.calibration
        cost = {name: getattr(self.cost, name) for name in ("seconds", "host", "device", "disk")}
        about = {"device": c.device, "title": c.title, "threads": c.threads, "made": c.made, "published": c.published}
        found = {"plan": self.title, **cost, "parts": dict(self.cost.parts), "facts": self.facts, "notes": self.notes}
        return found | {"calibration": about} | ({"pilot": self.pilot} if self.pilot else {})


def precision_of(name: str, subject: ModelShape, *, on_host: bool) -> str:
    """The type a model computes with: as asked, else as stored, which on a host is float32 in place of halves."""
    if name != "auto":
        return name
    stored = getattr(subject.config, "dtype", None)
    word = str(stored).removeprefix("torch.") if stored is not None else "float32"
    return "float32" if on_host or word not in ("bfloat16", "float16", "float64") else word


# -- profile -----------------------------------------------------------------------------------------------------------


def plan_profile(config: ProfileConfig, calibrated: Calibrated) -> RunPlan:
    """The plan of `anisoscope profile`."""
    c = calibrated(READING)
    total, notes = starting(c), list[str]()
    facts: dict[str, str] = {}
    for spec in config.models:
        cost, told, more = cost_of_profile(spec, config, c)
        total = total.plus(cost)
        facts |= told if len(config.models) == 1 else {spec: told["model"]}
        notes += more
    total = total.plus(closing(c, total.records, judged=False))
    return RunPlan(f"profile {' '.join(config.models)}", without_mini(total, c), c, facts, notes)


@cache
def _mini(c: tuple[Any, ...]) -> float:
    """Seconds of the small profile that the start of a calibration contains, without what is fixed."""
    config = ProfileConfig(models=(str(MINI["model"]),), tokens=int(str(MINI["tokens"])), random_init=True)
    return cost_of_profile(config.models[0], config, c[0])[0].seconds


def without_mini(total: Cost, c: Calibration) -> Cost:
    """Take off the small profile that was measured with the start."""
    key = _Hashed((c,))
    parts = tuple((n, max(0.5 * s, s - _mini(key)) if n == "start" else s) for n, s in total.parts)
    return replace(total, parts=parts)


class _Hashed(tuple[Any, ...]):
    """One calibration as an argument of a cached function."""

    def __hash__(self) -> int:
        return id(self[0])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashed) and other[0] is self[0]


def cost_of_profile(spec: str, config: ProfileConfig, c: Calibration) -> tuple[Cost, dict[str, str], list[str]]:
    """One model of a profile: its cost, facts about it, and notes."""
    subject = subject_of(spec, random_init=config.random_init, remote=config.trust_remote_code)
    requests = parse_requests(config.metrics)
    named: dict[str, Any] = {name: getattr(config, name) or None for name in ("sites", "layers", "modules")}
    setup = prepare(subject.model, requests, **named)
    reading = _reading(subject, config, c)
    costs = Costs(c, subject, reading)
    sizes = {name: getattr(config, name) for name in ("sample_size", "attention_rows", "halves")}
    trained = not config.random_init
    selections = 2 if trained and _first_stands_out(subject) else 1
    cost, passes = costs.geometry(setup, requests, selections=selections, kept=KEPT_ROWS, **sizes)
    text = Cost((("text", 4 * config.tokens * _TOKENIZED),)) if subject.reads_text else Cost()
    saved = Cost(disk=4.0 * config.tokens * subject.width * len(setup.captured)) if config.save_rows else Cost()
    over = f"{passes} pass{'es' * (passes > 1)} over the data"
    facts = _facts(subject, reading) | {"sites": f"{len(setup.captured)}, {over}"}
    return costs.load().plus(text).plus(cost).plus(saved), facts, [*subject.notes, *_room(cost, c)]


def _reading(subject: ModelShape, config: Any, c: Calibration, **more: Any) -> Passage:
    length = min(config.context or 512, subject.longest) if subject.reads_text else _positions(subject)
    dtype = precision_of(config.dtype, subject, on_host=c.device == "cpu")
    memory = getattr(config, "memory_mb", None)
    budget = memory * 2**20 if memory else 0.5 * (c.host or c.memory)  # as `plan_passes` takes it
    return Passage(config.tokens, length, config.batch_size, dtype, memory=budget)


def _positions(subject: ModelShape) -> int:
    """Rows of a context of a model of sounds or pictures."""
    setup = prepare(subject.model, parse_requests(None))
    shapes = subject.shapes(setup, 1)
    return max((shape.positions for shape in shapes.values()), default=1)


def _first_stands_out(subject: ModelShape) -> bool:
    """Whether the first position is likely an outlier, so that metrics are computed without it as well."""
    return subject.reads_text and subject.files > 0 and subject.parameters > 30e6


def _facts(subject: ModelShape, reading: Passage) -> dict[str, str]:
    layers = sum(stack.depth for stack in subject.layout.stacks)
    model = f"{_counted(subject.parameters)} parameters, {layers} layers of width {subject.width:,}"
    data = f"{reading.contexts:,} contexts of {reading.length:,}, {reading.batch} at a time, {reading.dtype}"
    return {"model": model, "data": data}


def _counted(number: float) -> str:
    """A number of parameters in words.

    >>> _counted(70_553_706_496), _counted(22_713_216), _counted(850_000)
    ('70.6 B', '22.7 M', '0.85 M')
    """
    if number >= 1e9:
        return f"{number / 1e9:.3g} B"
    return f"{number / 1e6:.3g} M"


def _room(cost: Cost, c: Calibration) -> list[str]:
    """A note where the memory of the device, or of the host, is not enough."""
    if cost.device and c.memory and cost.device > c.memory:
        devices = math.ceil(cost.device / (0.9 * c.memory))
        return [
            f"{cost.device / 1e9:,.0f} GB do not fit into one {c.title} ({c.memory / 1e9:,.0f} GB): spread it over "
            f"{devices} with --device-map auto; with --memory statistics take less room and more passes"
        ]
    if not cost.device and c.memory and cost.host > c.memory:
        return [f"{cost.host / 1e9:,.0f} GB do not fit into the {c.memory / 1e9:,.0f} GB of this machine"]
    return []


# -- sweep and tangent -------------------------------------------------------------------------------------------------


def plan_sweep(config: SweepConfig, calibrated: Calibrated, *, checkpoints: int | None = None) -> RunPlan:
    """The plan of `anisoscope sweep` or `tangent`; `checkpoints` where they are not here to be counted."""
    plan, requests = config.measured
    preset = config.preset if not config.metrics and config.preset in PLANS else "standard"
    c = calibrated(parts_of(preset if plan is not None else ""))
    number, spec, notes = _series(config, checkpoints)
    subject = subject_of(spec, random_init=config.random_init, architecture=config.architecture)
    reading = _reading(subject, config, c)
    costs = Costs(c, subject, reading)
    one = costs.load()
    if plan is not None:
        one = one.plus(costs.tangent(preset, plan, layers=config.layers or None))
    if requests:
        kinds = list(config.sites) or (stream_kinds(subject.layout) if config.at_stream else None)
        more = () if config.metrics else more_sites(config.preset)
        setup = prepare(subject.model, requests, sites=kinds, layers=config.layers or None, more=more)
        cost, _ = costs.geometry(setup, requests, halves=config.halves)
        if plan is not None:  # the probe's own passes serve the geometry as well
            cost = replace(cost, parts=tuple(part for part in cost.parts if part[0] != "forward passes"))
        one = one.plus(cost)
    one = one.plus(Cost((("text", 4 * config.tokens * _TOKENIZED),)))
    if plan is None:
        one = one.plus(Cost((("loss", costs.forward_seconds(reading.contexts)),)))
        streams = len(subject.layout.sites(stream_kinds(subject.layout), config.layers or None))
        one = one.plus(Cost(disk=map_bytes([subject.width] * streams)))
    one = one.plus(Cost(disk=4.0 * min(SKETCH, subject.parameters)))
    total = starting(c).plus(one.times(number))
    total = total.plus(closing(c, total.records, judged=True))
    facts = _facts(subject, reading) | {"checkpoints": f"{number:,}, about {spoken(one.seconds)} each"}
    notes += [*subject.notes, *_room(one, c)]
    if config.revisions and not _is_here(spec):
        notes.append(f"downloads are not counted: about {2 * subject.parameters / 1e9:.3g} GB or more a checkpoint")
    title = f"{'sweep' if config.series else 'tangent'} {config.model}"
    return RunPlan(title, without_mini(total, c), c, facts, notes)


def _is_here(spec: str) -> bool:
    return Path(spec).exists() or spec.startswith(SHAPE)


def _series(config: SweepConfig, checkpoints: int | None) -> tuple[int, str, list[str]]:
    """How many checkpoints there are, one of them, and notes."""
    from anisoscope.series.discovery import find_series

    if not config.series:
        return 1, config.model, []
    if checkpoints is not None:
        return checkpoints, config.model, []
    if config.model.startswith(SHAPE):
        raise AnisoscopeError("a shape has no checkpoints to count; say how many with --checkpoints, such as 1000.")
    if config.revisions and not any(word.partition(":")[0] in ("all", "log") for word in config.revisions):
        return len(config.revisions), config.model, []
    options: dict[str, Any] = {"revisions": config.revisions, "architecture": config.architecture}
    options |= {"inner": config.stage_checkpoints}
    found = find_series(list(config.models), **options)
    first = found.checkpoints[-1]
    return len(found.checkpoints), first.spec, list(found.notes)


# -- train -------------------------------------------------------------------------------------------------------------


def parts_of(preset: str) -> tuple[str, ...]:
    """The parts of a calibration that a run with verdicts needs, with those of a preset of gradients."""
    return (*READING, "update", "ends", *((preset,) if preset in PLANS else ()))


def plan_train(config: CommonTrainConfig, watch: Mapping[str, Any], calibrated: Calibrated) -> RunPlan:
    """The plan of `anisoscope train`."""
    plan, _ = _watched(watch)
    c = calibrated(parts_of(preset_of(watch) if plan is not None else ""))
    cost, facts, notes = cost_of_training(config, watch, c)
    total = starting(c).plus(cost)
    if watch["monitor"] != "none":
        total = total.plus(closing(c, total.records, judged=True))
    return RunPlan(f"train {config.arm}", without_mini(total, c), c, facts, notes)


def preset_of(watch: Mapping[str, Any]) -> str:
    preset = leading_preset(watch["monitor"])
    return preset if preset in PLANS else "standard"


def _watched(watch: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """The tangent plan and the metrics of a training's monitor."""
    if watch["monitor"] == "none":
        return None, []
    words: dict[str, Any] = {"rank": watch.get("rank"), "seed": 0, "window": watch.get("frozen_window")}
    plan, requests = choose_plan(watch["monitor"], None, **words, standardised=watch.get("standardised") or None)
    return (None if plan is None else replace(plan, splits=tuple(watch.get("split") or ()))), list(requests)


def cost_of_training(
    config: CommonTrainConfig, watch: Mapping[str, Any], c: Calibration
) -> tuple[Cost, dict[str, str], list[str]]:
    """One training: its cost without start, claims and page; facts; notes."""
    subject = _trainee(config)
    length = config.positions if isinstance(config, TrainConfig) else _positions(subject)
    dtype = "bfloat16" if config.dtype == "bfloat16" or (config.dtype == "auto" and c.device != "cpu") else "float32"
    dtype = "float64" if config.dtype == "float64" else dtype
    contexts = int(watch.get("contexts") or 96)
    together = min(contexts, PROBED.get(c.device, PROBED["cuda"]))
    costs = Costs(c, subject, Passage(contexts * length, length, together, dtype))
    total = costs.updates(
        config.steps, batch=config.batch_size, accumulate=config.accumulate, compiled=config.compiles(c.device)
    )
    if isinstance(config, TrainConfig):
        total = total.plus(_text(config, c))
    saved = len({*checkpoint_steps(config.checkpoints, config.steps), config.steps})
    newest = 12.0 * subject.parameters  # the state of the optimizer stays with the newest alone
    written = 4.0 * subject.parameters * saved + newest
    total = total.plus(Cost((("checkpoints", written / c.rates["disk"]),), disk=written))
    steps = len(parse_schedule(watch.get("when") or "log", total=config.steps).known(config.steps) or ())
    plan, requests = _watched(watch)
    plan = plan or (PLANS["standard"] if watch.get("gradients") and not isinstance(config, TrainConfig) else None)
    facts = _facts(subject, costs.reading)
    facts["data"] = f"{config.steps:,} updates of {config.batch_size * config.accumulate} × {length:,}, {dtype}"
    if watch["monitor"] != "none":
        each = _step(costs, plan, requests, watch)
        widths = [subject.width] * len(subject.layout.sites(stream_kinds(subject.layout), None))
        total = total.plus(each.times(steps)).plus(Cost(disk=state_bytes(widths) if plan is not None else 0.0))
        facts["measured"] = f"{steps} steps, about {spoken(each.seconds)} each, {contexts} contexts"
    return total, facts, _room(total, c)


def _step(costs: Costs, plan: Any, requests: list[Any], watch: Mapping[str, Any]) -> Cost:
    """One measured step of a training."""
    one = Cost()
    if plan is not None:
        one = costs.tangent(preset_of(watch), plan, layers=None)
    if not requests:
        return one
    at_stream = leading_preset(watch["monitor"]) in PLANS
    kinds = stream_kinds(costs.subject.layout) if at_stream else None
    setup = prepare(costs.subject.model, requests, sites=kinds, more=more_sites(watch["monitor"]))
    cost, _ = costs.geometry(setup, requests, halves=bool(watch.get("halves")))
    # of a preset with gradients the geometry is in the calibration of its measured step, and its passes serve both
    found = Cost((), cost.host, cost.device) if at_stream else replace(cost, parts=(("measured steps", cost.seconds),))
    return one.plus(found)


def _trainee(config: CommonTrainConfig) -> ModelShape:
    """The model that will be trained, without weights where it reads text."""
    if isinstance(config, TrainConfig):
        from anisoscope.training.language_model import build_model

        known = _VOCABULARIES.get(config.tokens, 256)
        size = int(config.tokens.partition(":")[2]) if config.tokens.startswith("bpe:") else known
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            return of_model(config.arm, build_model(replace(config, device="cpu"), vocab_size=size))
    from anisoscope.training.classifier import media_model

    with torch.random.fork_rng(devices=[]):
        return of_model(config.arm, media_model(config, classes=10))  # type: ignore[arg-type]


def _text(config: TrainConfig, c: Calibration) -> Cost:
    """Reading and tokenising the text of a training."""
    size = _text_bytes(config)
    kind = "corpus:bpe" if config.tokens.startswith("bpe:") else "corpus:char"
    return Cost((("text", c.seconds(kind, {"runs": size / 3e6})),), disk=size)


def _text_bytes(config: TrainConfig) -> float:
    path = Path(config.data)
    found = sum(file.stat().st_size for file in files_in(path)) if path.is_dir() else 0
    size = float(found or (path.stat().st_size if path.is_file() else 3e6))
    return min(size, config.limit * 1e6) if config.limit else size


def temporary() -> Any:
    """A folder for files that a plan needs for a moment."""
    return tempfile.TemporaryDirectory()


def cores() -> int:
    return os.cpu_count() or 1
