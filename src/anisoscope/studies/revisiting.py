"""The study *Revisiting Anisotropy* (arXiv 2604.08764): train a decoder and an encoder with a monitor, test the claims.

Each arm is a resumable training run under arms/; the study joins their tables and evaluates the claims.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from anisoscope.errors import AnisoscopeError
from anisoscope.option import Device, Option, Rank, Text, given, listed
from anisoscope.studies.config import (
    ArmRun,
    ArmsConfig,
    Background,
    BatchSize,
    Checkpoints,
    Contexts,
    Limit,
    PaperModels,
    PaperPreset,
    Preset,
    ProbeTokens,
    RemoveDownloads,
    Seeds,
    StudyArm,
    Updates,
    Vocabulary,
    When,
)
from anisoscope.studies.study_run import ArmsStudy

if TYPE_CHECKING:
    from anisoscope.studies.published import PaperModel

_ARM = re.compile(
    r"(?P<arch>decoder|encoder)(?:-(?P<text>flat|zipf\d+(?:\.\d+)?))?(?:-(?P<loss>flatloss|powerloss\d+(?:\.\d+)?))?"
)
_THREE = ("decoder", "encoder", "decoder-flatloss")  # the last is the intervention on token frequency
ARMS = {"tiny": _THREE, "small": (*_THREE, "encoder-flatloss")}  # of each preset
# options that replace what the preset has
_GIVEN = ("steps", "layers", "width", "context", "batch_size", "tokens", "limit", "checkpoints", "background")
# pre-norm, because a post-norm BERT of this size stays on the unigram plateau for so few steps
FAMILIES = {"decoder": "gpt2", "encoder": "modernbert"}
_TINY = {"layers": 4, "width": 96, "heads": 4, "context": 96, "steps": 300, "batch_size": 16, "lr": 2e-3}
_SMALL = {"layers": 12, "width": 512, "heads": 8, "context": 256, "steps": 4000, "batch_size": 64, "lr": 6e-4}
# a masked model predicts 15 % of its tokens, and with 16 contexts an update learns too slowly to leave the unigrams
_OF_ARCH: dict[tuple[str, str], dict[str, Any]] = {("tiny", "encoder"): {"batch_size": 32}}
PRESETS = {
    "tiny": Preset({**_TINY, "tokens": "bpe:512", "checkpoints": "0,every:150"}),
    "small": Preset(
        {**_SMALL, "tokens": "bpe:8192", "checkpoints": "log,every:1000"},
        seeds=(0, 1, 2),
        contexts=1024,  # in enwik8 4,157 of 8,130 types occur ten times in them, and 401 in the usual 96
    ),
}


@dataclass(frozen=True)
class RevisitingConfig(ArmsConfig):
    """What the study runs; what is None is as the preset has it.

    >>> [(name, seed) for name, _, seed in RevisitingConfig(arms=("encoder",), seeds=(0, 1)).runs()]
    [('encoder', 0), ('encoder', 1)]
    """

    preset: PaperPreset = "tiny"
    data: Text = "embedded"
    arms: Annotated[
        tuple[str, ...],
        Option(
            "decoder or encoder, then -flat, -zipf1.5 (corpus resampled), -flatloss, -powerloss1.5 (targets weighted).",
            parse=listed,
            preset="trained",
        ),
    ] = ()
    tokens: Vocabulary = None
    seeds: Seeds = ()
    steps: Updates = None
    layers: Annotated[int | None, Option("Blocks.", preset="trained")] = None
    width: Annotated[int | None, Option("Width of the residual stream.", preset="trained")] = None
    context: Annotated[int | None, Option("Tokens of a context.", preset="trained")] = None
    batch_size: BatchSize = None
    checkpoints: Checkpoints = None
    background: Background = None
    metrics: Annotated[
        str | None, Option("light, standard, full, or metrics; also standard,two_nn.", preset="trained")
    ] = None
    when: When = None
    rank: Rank = None
    contexts: Contexts = None
    limit: Limit = None
    probe_tokens: ProbeTokens = 32_768
    models: PaperModels = ()
    remove_downloads: RemoveDownloads = False
    device: Device = "auto"

    presets: ClassVar[Mapping[str, Preset]] = PRESETS
    measures_published: ClassVar[bool] = True

    def check_arms(self) -> None:
        for arm in self.arms:
            if not _ARM.fullmatch(arm):
                raise AnisoscopeError(
                    f"arm {arm!r} is not known; expected decoder or encoder, with -flat or -zipf1.5 for a resampled "
                    "corpus, -flatloss or -powerloss1.5 for a loss weighted by target frequency."
                )

    def published(self) -> list[PaperModel]:
        from anisoscope.studies.published import REVISITING_MODELS, chosen_models

        return chosen_models(self.models, REVISITING_MODELS)

    @property
    def chosen_seeds(self) -> tuple[int, ...]:
        """The seeds that were given, else those of the preset."""
        return self.seeds or self.size.seeds

    @property
    def watch(self) -> dict[str, Any]:
        """As in the base class; the monitor defaults to `standard`."""
        return {**super().watch, "monitor": self.metrics or "standard"}

    def runs(self) -> list[ArmRun]:
        """Every run, seed by seed; equivalent spellings of a frequency (zipf1.5, zipf1.50) give one name."""
        arms = self.arms or ARMS[self.preset]
        trainings = [self._training(arm, seed) for seed in self.chosen_seeds for arm in arms]
        return [ArmRun(training.arm, training, training.seed) for training in trainings]

    def _training(self, arm: str, seed: int) -> Any:
        from anisoscope.training.config import TrainConfig

        parts = _ARM.fullmatch(arm)
        assert parts is not None  # checked before
        text, loss = parts["text"] or "natural", parts["loss"] or "none"
        arch = parts["arch"]
        fields: dict[str, Any] = {"arch": arch, "family": FAMILIES[arch], **_OF_ARCH.get((self.preset, arch), {})}
        fields |= {"data": self.data, "device": self.device, "seed": seed}
        fields["frequency"] = text.replace("zipf", "zipf:")
        fields["target_weights"] = "flat" if loss == "flatloss" else loss.replace("powerloss", "power:")
        return TrainConfig(**{**self.size.train, **fields, **given(self, *_GIVEN)})


@dataclass
class Revisiting(ArmsStudy):
    """One run of the study."""

    config: RevisitingConfig
    name: ClassVar[str] = "revisiting"

    def arm(self, run: ArmRun) -> StudyArm:
        """The training run of an arm; its folder name includes the seed only if there are several."""
        arm = super().arm(run)
        return arm if len(self.config.chosen_seeds) > 1 else replace(arm, path=arm.path.with_name(run.model))

    def measure_published(self) -> None:
        """Measure the models of the paper, or those that were named, with their published checkpoints."""
        from anisoscope.studies.published import measure_models, sweep_model

        c = self.config
        options: dict[str, Any] = {"data": c.data, "rank": c.rank, "tokens": c.probe_tokens}
        measure = partial(sweep_model, self, remove_downloads=c.remove_downloads, **options)
        measure_models(self, c.published(), measure, named=True)
