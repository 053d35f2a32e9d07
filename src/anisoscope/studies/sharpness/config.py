"""What the study of sharpness trains: one decoder with five kinds of attention, by preset."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from anisoscope.errors import AnisoscopeError, unknown_name
from anisoscope.models.attention_variant import VARIANTS
from anisoscope.studies.arms import schedule_of
from anisoscope.studies.shape.config import FAMILY, TOKENS, parse_size
from anisoscope.training.config import TrainConfig

ARMS = tuple(VARIANTS)  # what attention does with queries and keys
_TINY = TrainConfig(family=FAMILY, tokens=TOKENS, context=64, steps=300, batch_size=16, lr=3e-3, checkpoints="none")
_SMALL = replace(_TINY, context=256, steps=1500, batch_size=64, lr=6e-4, checkpoints="0,every:500")


@dataclass(frozen=True)
class SharpnessPreset:
    """How large a study is."""

    train: TrainConfig
    size: str
    seeds: tuple[int, ...]
    contexts: int  # of the probe
    when: str
    jobs: int  # arms at the same time


PRESETS = {
    "tiny": SharpnessPreset(_TINY, "3x64", (0, 1, 2), contexts=96, when="log:6", jobs=2),
    "small": SharpnessPreset(_SMALL, "6x256", (0, 1, 2), contexts=96, when="log", jobs=4),
}


@dataclass(frozen=True)
class SharpnessConfig:
    """What the study runs; what is None is as the preset has it.

    >>> [(name, seed) for name, _, seed in SharpnessConfig(arms=("uniform",), seeds=(0, 1)).runs()]
    [('uniform-3x64', 0), ('uniform-3x64', 1)]
    """

    preset: str = "tiny"
    data: str = "embedded"
    arms: tuple[str, ...] = ARMS
    sizes: tuple[str, ...] = ()  # layers × width, such as 6x256; none = that of the preset
    seeds: tuple[int, ...] = ()  # none = those of the preset
    steps: int | None = None
    context: int | None = None
    limit: float | None = None
    when: str | None = None
    contexts: int | None = None
    metrics: str = "attention"
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise unknown_name("preset", self.preset, PRESETS)
        for arm in self.arms:
            if arm not in ARMS:
                raise unknown_name("arm", arm, ARMS)
        if not self.arms:
            raise AnisoscopeError("a study needs at least one arm.")
        named = [(name, seed) for name, _, seed in self.runs()]
        twice = next((run for run in named if named.count(run) > 1), None)
        if twice is not None:
            raise AnisoscopeError(f"{twice[0]!r} of seed {twice[1]} is named twice; name arms, sizes and seeds once.")
        for _, training, _ in self.runs():
            schedule_of(self.watch["when"], training.steps)

    @property
    def watch(self) -> dict[str, Any]:
        """The options of the monitor of every arm."""
        preset = PRESETS[self.preset]
        options: dict[str, Any] = {"monitor": self.metrics, "when": self.when or preset.when, "rank": None}
        return {**options, "contexts": self.contexts or preset.contexts}

    def runs(self) -> list[tuple[str, TrainConfig, int]]:
        """Name, training and seed of every run: all arms of a size and seed after each other."""
        preset = PRESETS[self.preset]
        return [
            (f"{arm}-{size}", self._training(arm, size, seed), seed)
            for size in self.sizes or (preset.size,)
            for seed, arm in product(self.seeds or preset.seeds, self.arms)
        ]

    def _training(self, arm: str, size: str, seed: int) -> TrainConfig:
        """The arm's attention is all that depends on the arm."""
        preset, (layers, width) = PRESETS[self.preset], parse_size(size)
        changes: dict[str, Any] = {"attention": arm, "seed": seed, "layers": layers, "width": width}
        changes |= {"heads": max(4, width // 64), "data": self.data, "device": self.device, "limit": self.limit}
        changes["steps"] = self.steps or preset.train.steps
        changes["context"] = self.context or preset.train.context
        return replace(preset.train, **changes)
