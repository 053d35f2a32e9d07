"""What the study of anisotropy in every modality trains: one small model of each kind of data, by preset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from anisoscope.errors import AnisoscopeError, unknown_name
from anisoscope.studies.arms import schedule_of
from anisoscope.studies.inherent_random import FAMILIES
from anisoscope.training.config import Course, TrainConfig
from anisoscope.training.media import MediaConfig

ARMS: dict[str, str] = {  # with the data that each reads
    "text-decoder": "text",
    "text-encoder": "text",
    "characters": "text",
    "speech": "audio",
    "vision": "images",
    "convolution": "images",
}
_GPT2, _BERT = TrainConfig(family="gpt2"), TrainConfig(arch="encoder", family="bert")
_CHARACTERS = TrainConfig(family="prenorm", tokens="enwik8")
_WAV2VEC2, _VIT, _CONVNEXT = (MediaConfig(arch=arch) for arch in ("wav2vec2", "vit", "convnext"))
_TEXT: dict[str, Any] = {"layers": 4, "width": 64, "context": 64, "steps": 300, "batch_size": 16, "lr": 2e-3}
_MEDIA: dict[str, Any] = {"layers": 4, "width": 64, "batch_size": 32, "lr": 1e-3}
_IMAGES: dict[str, Any] = {**_MEDIA, "size": 24, "examples": 3072}
_LARGER: dict[str, Any] = {"layers": 6, "width": 256, "heads": 4, "steps": 2000, "lr": 6e-4, "batch_size": 64}
_KEPT: dict[str, Any] = {"checkpoints": "none"}
_SERIES: dict[str, Any] = {"checkpoints": "0,64,512,every:2000"}


@dataclass(frozen=True)
class Preset:
    """How large a study is."""

    arms: Mapping[str, Course]
    seeds: tuple[int, ...]
    contexts: int  # of the probe
    when: str
    rows: int  # of the probe of a model with random weights
    families: tuple[str, ...]  # measured with random weights
    jobs: int = 1  # arms at the same time


PRESETS = {
    "tiny": Preset(
        {
            "text-decoder": replace(_GPT2, tokens="bpe:1024", **_TEXT, **_KEPT),
            "text-encoder": replace(_BERT, tokens="bpe:1024", **_TEXT, **_KEPT),
            "characters": replace(_CHARACTERS, **_TEXT, **_KEPT),
            "speech": replace(_WAV2VEC2, **{**_MEDIA, "batch_size": 16}, steps=200, examples=800, **_KEPT),
            "vision": replace(_VIT, **_IMAGES, steps=400, patch=4, **_KEPT),
            "convolution": replace(_CONVNEXT, **_IMAGES, steps=200, patch=2, **_KEPT),
        },
        seeds=(0,),
        contexts=64,
        when="log:8",
        rows=2048,
        families=("t5", "canine", "hubert", "whisper", "beit", "swin", "resnet", "efficientnet"),
        jobs=2,
    ),
    "small": Preset(
        {
            "text-decoder": replace(_GPT2, tokens="bpe:8192", context=256, **_LARGER, **_SERIES),
            "text-encoder": replace(_BERT, tokens="bpe:8192", context=256, **_LARGER, **_SERIES),
            "characters": replace(_CHARACTERS, context=256, **_LARGER, **_SERIES),
            "speech": replace(_WAV2VEC2, seconds=2.0, examples=20_000, **_LARGER, **_SERIES),
            "vision": replace(_VIT, size=32, patch=4, examples=60_000, **_LARGER, **_SERIES),
            "convolution": replace(_CONVNEXT, size=32, patch=2, examples=60_000, **_LARGER, **_SERIES),
        },
        seeds=(0, 1, 2),
        contexts=96,
        when="log",
        rows=16_384,
        families=tuple(FAMILIES),
    ),
}


@dataclass(frozen=True)
class InherentConfig:
    """What the study runs; what is None is as the preset has it.

    >>> [(name, seed) for name, _, seed in InherentConfig(arms=("vision",), seeds=(0, 1)).runs()]
    [('vision', 0), ('vision', 1)]
    """

    preset: str = "tiny"
    text: str = "embedded"
    images: str = "embedded"
    audio: str = "embedded"
    arms: tuple[str, ...] = tuple(ARMS)
    families: tuple[str, ...] | None = None  # measured with random weights
    seeds: tuple[int, ...] = ()  # none = those of the preset
    steps: int | None = None
    limit: float | None = None  # megabytes of text
    examples: int | None = None  # pictures and clips, at most
    when: str | None = None
    contexts: int | None = None
    metrics: str = "attention"
    device: str = "auto"
    tokens: int = 16_384  # paper: rows of the probe of each model
    models: tuple[str, ...] = ()  # paper: these only
    remove_downloads: bool = False  # paper: what was downloaded for a model is deleted once it is measured

    def __post_init__(self) -> None:
        if self.preset not in (*PRESETS, "paper"):
            raise unknown_name("preset", self.preset, [*PRESETS, "paper"])
        for what, names, known in (("arm", self.arms, ARMS), ("family", self.families or (), FAMILIES)):
            for name in names:
                if name not in known:
                    raise unknown_name(what, name, known)
                if names.count(name) > 1:
                    raise AnisoscopeError(f"{what} {name!r} is named twice; name it once.")
        if not self.arms and self.families == ():
            raise AnisoscopeError("there is nothing to do: name some arms or some families.")
        if self.preset != "paper":
            self._check_runs()

    def _check_runs(self) -> None:
        """Every arm before the first one is trained."""
        for seed in self.seeds:
            if self.seeds.count(seed) > 1:
                raise AnisoscopeError(f"seed {seed} is named twice; name it once.")
        for _, training, _ in self.runs():
            schedule_of(self.watch["when"], training.steps)

    @property
    def watch(self) -> dict[str, Any]:
        """The options of the monitor of every arm."""
        preset = PRESETS[self.preset]
        contexts = self.contexts or preset.contexts
        return {"monitor": self.metrics, "when": self.when or preset.when, "rank": None, "contexts": contexts}

    @property
    def every_family(self) -> tuple[str, ...]:
        """The families asked for, or those of the preset."""
        return PRESETS[self.preset].families if self.families is None else self.families

    @property
    def every_seed(self) -> tuple[int, ...]:
        """The seeds asked for, or those of the preset."""
        return self.seeds or PRESETS[self.preset].seeds

    def runs(self) -> list[tuple[str, Course, int]]:
        """Name, training and seed of every run: all arms of a seed after each other."""
        return [(arm, self._training(arm, seed), seed) for seed in self.every_seed for arm in self.arms]

    def _training(self, arm: str, seed: int) -> Course:
        training, medium = PRESETS[self.preset].arms[arm], ARMS[arm]
        changes: dict[str, Any] = {"seed": seed, "device": self.device, "data": getattr(self, medium)}
        if self.steps is not None:
            changes["steps"] = self.steps
        if medium == "text":
            changes["limit"] = self.limit
        elif self.examples is not None:
            changes["examples"] = self.examples
        return replace(training, **changes)
