"""Base classes for configurations of studies that train arms: presets, shared options, and checks of the runs.

An arm is one kind of training; a run is one arm at one size with one seed. No configuration of a study imports torch,
because the command line reads all of them to print its help.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, TypedDict

from anisoscope.errors import AnisoscopeError, check_known
from anisoscope.option import Device, Option, Text, check_least, check_values, given, listed, refuse_typed, seed_numbers

PAPER = "paper"  # the preset that measures published models and trains nothing
PROBED = {"cpu": 32, "cuda": 64}  # contexts of the probe in one pass with gradients, by device
SYMBOLS = "enwik8"  # a fixed vocabulary of 205 symbols, also on other text
PRENORM = "prenorm"  # the only family that supports both masks and both objectives with the same parameters
_SIZE = re.compile(r"([1-9]\d*)x([1-9]\d*)")

PaperPreset = Annotated[str, Option("tiny (2 cores, minutes), small (one GPU), paper (hub models).")]
TrainedPreset = Annotated[str, Option("tiny (2 cores, minutes) or small (one GPU).")]


def vocabulary(text: str, option: str = "--tokens") -> str:
    """The tokens as typed; a number is an error that names the option which had that name before.

    >>> vocabulary("bpe:8192")
    'bpe:8192'
    """
    if text.isdecimal():
        raise AnisoscopeError(
            f"{option} is {text}, a number; it is the vocabulary of the trained models: char, enwik8 or bpe:N, such as "
            f"bpe:8192. The size of the probe of published models is --probe-tokens {text}."
        )
    return text


Vocabulary = Annotated[
    str | None, Option("char, enwik8 (its 205 bytes), or bpe:8192.", parse=vocabulary, preset="trained")
]
Checkpoints = Annotated[
    str | None, Option("Kept weights: log, every:N, none, steps, comma-separated.", preset="trained")
]
Background = Annotated[
    bool | None,
    Option(
        "Analyse measured steps in other processes; default: on CUDA.",
        name="--background/--no-background",
        preset="trained",
    ),
]
Seeds = Annotated[
    tuple[int, ...], Option("Seeds such as 0,1,2; general claims need three.", parse=seed_numbers, preset="trained")
]
Updates = Annotated[int | None, Option("Updates of each arm.", least=1, preset="trained")]
BatchSize = Annotated[int | None, Option("Contexts of an update.", least=1, preset="trained")]
Limit = Annotated[float | None, Option("Megabytes of text to use.", preset="trained")]
When = Annotated[str | None, Option("When it is measured: log, log:COUNT, every:N, or steps.", preset="trained")]
Contexts = Annotated[int | None, Option("Held-out contexts that are looked at.", least=8, preset="trained")]
ProbeTokens = Annotated[  # not `tokens`, which is the vocabulary in `train` and in studies that let it be chosen
    int, Option("Tokens, frames or patches of each model's probe (paper).", least=64, preset=PAPER)
]
PaperModels = Annotated[
    tuple[str, ...], Option("Only these models of the paper, by name or hub id (paper).", parse=listed, preset=PAPER)
]
RemoveDownloads = Annotated[bool, Option("Delete what was downloaded for a model once it is measured.", preset=PAPER)]


@dataclass(frozen=True)
class Preset:
    """The size of a study: training fields of its arms, and when and on how many contexts they are measured."""

    train: Mapping[str, Any]  # training fields of every arm
    seeds: tuple[int, ...] = (0,)
    sizes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # layers x width -> its own seeds, steps
    contexts: int = 96  # contexts of the probe
    when: str = "log"
    jobs: int = 1  # arms trained in parallel


class ArmRun(NamedTuple):
    """One arm with one seed: its name in the table, and its training."""

    model: str
    training: Any  # a CommonTrainConfig
    seed: int


@dataclass(frozen=True)
class StudyArm:
    """The training run of an arm; picklable, so that it can be sent to another process."""

    model: str  # its name in the table
    path: Path
    training: Any  # a CommonTrainConfig, or what the work function of a study takes
    watch: Mapping[str, Any]  # options of `training_monitor`
    corpus: Path  # prepared data, shared by all arms that read the same
    command: tuple[str, ...] = ()
    log_to: tuple[str, ...] = ()  # experiment trackers


class ArmsConfig(ABC):
    """Base of configurations of studies that train arms; fields that are None or empty default to the preset."""

    presets: ClassVar[Mapping[str, Preset]] = {}
    measures_published: ClassVar[bool] = False  # whether the study has the preset `paper`
    preset: str
    seeds: tuple[int, ...]
    steps: int | None
    when: str | None
    metrics: Any

    @abstractmethod
    def runs(self) -> list[ArmRun]:
        """Every run: all arms of a size and seed after each other."""

    def published(self) -> Sequence[Any]:
        """The `PaperModel`s that the preset `paper` measures; raises for names that are not among them."""
        return ()

    @property
    def size(self) -> Preset:
        """The chosen preset."""
        return self.presets[self.preset]

    @property
    def seed(self) -> int:
        """The first seed, which is recorded in run.json."""
        return self.seeds[0] if self.seeds else 0

    @property
    def watch(self) -> dict[str, Any]:
        """Options of `training_monitor` for every arm."""
        contexts = getattr(self, "contexts", None) or self.size.contexts
        when = self.when or self.size.when
        return {"monitor": self.metrics, "when": when, "contexts": contexts, "rank": getattr(self, "rank", None)}

    @abstractmethod
    def check_arms(self) -> None:
        """Raise for wrong names of arms and the like."""

    def __post_init__(self) -> None:
        check_least(self, {})
        check_known("preset", self.preset, [*self.presets, PAPER] if self.measures_published else list(self.presets))
        self.check_arms()
        if self.preset == PAPER:
            self.published()  # validates the names
            return
        runs = self.runs()  # validates every training
        named = [(run.model, run.seed) for run in runs]
        for run in runs:
            if named.count((run.model, run.seed)) > 1:
                raise AnisoscopeError(
                    f"{run.model!r} of seed {run.seed} is named twice; name arms, sizes and seeds once."
                )
        for run in runs:
            check_watch(self.watch, run.training)


@dataclass(frozen=True)
class SizedArmsConfig(ArmsConfig):
    """A configuration whose arms differ in a few training fields and are trained at several sizes."""

    preset: TrainedPreset = "tiny"
    data: Text = "embedded"
    arms: tuple[str, ...] = ()
    tokens: Vocabulary = None
    sizes: tuple[str, ...] = ()
    seeds: Seeds = ()
    steps: Updates = None
    context: Annotated[int | None, Option("Tokens of a context.", least=4, preset="trained")] = None
    batch_size: BatchSize = None
    limit: Limit = None
    checkpoints: Checkpoints = None
    background: Background = None
    when: When = None
    contexts: Contexts = None
    metrics: str = ""
    device: Device = "auto"

    differences: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # training fields of each arm

    def check_arms(self) -> None:
        for arm in self.arms:
            check_known("arm", arm, self.differences)
        if not self.arms:
            raise AnisoscopeError("a study needs at least one arm.")

    def runs(self) -> list[ArmRun]:
        """Every run: all arms of a size and seed after each other."""
        presets = self.size.sizes
        return [
            ArmRun(f"{arm}-{size}", self._training(arm, size, seed), seed)
            for size in self.sizes or tuple(presets)
            for seed, arm in product(self.seeds or presets.get(size, {}).get("seeds", self.size.seeds), self.arms)
        ]

    def _training(self, arm: str, size: str, seed: int) -> Any:
        from anisoscope.training.config import TrainConfig

        match = _SIZE.fullmatch(size)
        if match is None:
            raise AnisoscopeError(f"size {size!r} is not understood; expected layers x width such as 12x512.")
        layers, width = int(match[1]), int(match[2])
        own = {name: value for name, value in self.size.sizes.get(size, {}).items() if name != "seeds"}
        fields: dict[str, Any] = {**self.size.train, **own, **self.differences[arm]}
        fields |= {"family": PRENORM, "tokens": SYMBOLS, "data": self.data, "device": self.device, "limit": self.limit}
        fields |= {"layers": layers, "width": width, "heads": max(4, width // 64)}
        fields |= given(self, "tokens", "steps", "context", "batch_size", "checkpoints", "background")
        return TrainConfig(**fields | {"seed": seed})


_TANGENT = ("rank", "split", "standardised", "frozen_window", "weighted_gradients")


class WatchOptions(TypedDict, total=False):
    """Types of the options of `training_monitor` that are looked at before a training begins."""

    when: str
    contexts: int
    rank: int | None
    frozen_window: str | None


def check_watch(watch: Mapping[str, Any], training: Any) -> None:
    """Raise an error for options of a training's monitor that are of no size, or that would do nothing."""
    from anisoscope.tangent.plan import choose_plan

    check_values(WatchOptions, watch, {"contexts": 2, "rank": 1})
    schedule_of(watch["when"], training.steps)
    if watch["monitor"] == "none":
        return
    plan, _ = choose_plan(watch["monitor"], None, rank=None, seed=0, window=watch.get("frozen_window"))
    given = [name for name in _TANGENT if watch.get(name)]
    if plan is None:
        refuse_typed(given, f"with --monitor {watch['monitor']}, which looks at no gradients")
        return
    how = f"with --monitor {watch['monitor']}"
    refuse_typed([] if plan.frozen else {"frozen_window"} & {*given}, f"{how}, which has no frozen proxy")
    refuse_typed({"standardised"} & {*given} if plan.standardised else [], f"{how}, which has such energies anyway")
    if getattr(training, "target_weights", "none") == "none":
        refuse_typed({"weighted_gradients"} & {*given}, "without --target-weights")


def schedule_of(when: str, steps: int) -> Any:
    """The schedule of measured steps; raises for steps after the last update.

    >>> str(schedule_of("0,10", 10))
    'at([0, 10])'
    """
    from anisoscope.monitor.schedule import parse_schedule

    schedule = parse_schedule(when, total=steps)
    if late := [step for step in sorted(schedule.steps) if step > steps]:
        raise AnisoscopeError(
            f"step {late[0]} is to be measured, but the training ends after {steps} updates; name steps up to {steps}, "
            "or train for more --steps."
        )
    return schedule
