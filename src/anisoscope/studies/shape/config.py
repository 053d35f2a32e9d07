"""What the study of learning's shape trains: three arms of one architecture, in sizes and seeds, by preset."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from anisoscope.errors import AnisoscopeError, unknown_name
from anisoscope.studies.arms import schedule_of
from anisoscope.training.config import TrainConfig

_SIZE = re.compile(r"([1-9]\d*)x([1-9]\d*)")
# what a position sees, and what it predicts; effect of the mask = third − second, of the objective = second − first
ARMS = {
    "causal-next": ("decoder", "next"),
    "causal-masked": ("decoder", "masked"),
    "bidirectional-masked": ("encoder", "masked"),
}
TOKENS = "enwik8"  # its fixed vocabulary of 205 symbols, also on other text
FAMILY = "prenorm"  # has all three, with the same parameters
_TINY = TrainConfig(family=FAMILY, context=64, steps=300, batch_size=16, lr=3e-3, checkpoints="every:100")
_SMALL = TrainConfig(family=FAMILY, context=256, steps=2000, batch_size=64, lr=6e-4, checkpoints="0,64,512,every:2000")


@dataclass(frozen=True)
class ShapePreset:
    """How large a study is."""

    train: TrainConfig
    seeds: Mapping[str, tuple[int, ...]]  # by size
    contexts: int  # of the probe
    when: str
    steps: Mapping[str, int] = field(default_factory=dict)  # by size, where it is not as in `train`
    jobs: int = 1  # arms at the same time: three of one thread each keep two cores busier than one of two


PRESETS = {
    "tiny": ShapePreset(_TINY, {"6x64": (0,)}, contexts=192, when="log:6", jobs=3),
    "small": ShapePreset(_SMALL, {"6x256": (0, 1, 2), "12x512": (0,)}, contexts=96, when="log", steps={"12x512": 4000}),
}


@dataclass(frozen=True)
class ShapeConfig:
    """What the study runs; what is None is as the preset has it.

    >>> [(name, seed) for name, _, seed in ShapeConfig(arms=("causal-next",), seeds=(0, 1)).runs()]
    [('causal-next-6x64', 0), ('causal-next-6x64', 1)]
    """

    preset: str = "tiny"
    data: str = "embedded"
    arms: tuple[str, ...] = tuple(ARMS)
    sizes: tuple[str, ...] = ()  # layers × width, such as 12x512; none = those of the preset
    seeds: tuple[int, ...] = ()  # of every size; none = those of the preset
    steps: int | None = None
    context: int | None = None
    limit: float | None = None
    when: str | None = None
    contexts: int | None = None
    metrics: str = "shape"
    device: str = "auto"
    tokens: int = 65_536  # paper: tokens of the probe of each model
    models: tuple[str, ...] = ()  # paper: these only
    remove_downloads: bool = False  # paper: what was downloaded for a model is deleted once it is measured

    def __post_init__(self) -> None:
        if self.preset not in (*PRESETS, "paper"):
            raise unknown_name("preset", self.preset, [*PRESETS, "paper"])
        for arm in self.arms:
            if arm not in ARMS:
                raise unknown_name("arm", arm, ARMS)
        if not self.arms:
            raise AnisoscopeError("a study needs at least one arm.")
        if self.preset != "paper":
            self._check_runs()

    def _check_runs(self) -> None:
        """Every arm before the first one is trained; none twice."""
        runs = self.runs()
        twice = next(((name, seed) for name, _, seed in runs if [r[::2] for r in runs].count((name, seed)) > 1), None)
        if twice is not None:
            raise AnisoscopeError(f"{twice[0]!r} of seed {twice[1]} is named twice; name arms, sizes and seeds once.")
        for _, training, _ in runs:
            schedule_of(self.watch["when"], training.steps)

    @property
    def watch(self) -> dict[str, Any]:
        """The options of the monitor of every arm."""
        preset = PRESETS[self.preset]
        options: dict[str, Any] = {"monitor": self.metrics, "when": self.when or preset.when, "rank": None}
        return {**options, "contexts": self.contexts or preset.contexts, "halves": True, "clean": True}

    def runs(self) -> list[tuple[str, TrainConfig, int]]:
        """Name, training and seed of every run: all arms of a size and seed after each other."""
        preset = PRESETS[self.preset]
        return [
            (f"{arm}-{size}", self._training(arm, size, seed), seed)
            for size in self.sizes or tuple(preset.seeds)
            for seed, arm in product(self.seeds or preset.seeds.get(size, (0,)), self.arms)
        ]

    def _training(self, arm: str, size: str, seed: int) -> TrainConfig:
        preset, (layers, width) = PRESETS[self.preset], parse_size(size)
        arch, objective = ARMS[arm]
        changes: dict[str, Any] = {"arch": arch, "objective": objective, "seed": seed, "layers": layers, "width": width}
        changes |= {"heads": max(4, width // 64), "data": self.data, "device": self.device, "limit": self.limit}
        changes["steps"] = self.steps or preset.steps.get(size, preset.train.steps)
        changes["tokens"] = TOKENS
        changes["context"] = self.context or preset.train.context
        return replace(preset.train, **changes)


def parse_size(size: str) -> tuple[int, int]:
    """Layers and width of a size.

    >>> parse_size("12x512")
    (12, 512)
    """
    match = _SIZE.fullmatch(size)
    if match is None:
        raise AnisoscopeError(f"size {size!r} is not understood; expected layers x width such as 12x512.")
    return int(match[1]), int(match[2])
