"""The study *Revisiting Anisotropy* (arXiv 2604.08764): train a decoder and an encoder with a monitor, test the claims.

Each arm is a resumable training run under arms/; the study joins their tables and evaluates the claims.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar

from anisoscope.errors import AnisoscopeError
from anisoscope.option import Device, Option, Rank, Text, given, listed, seed_numbers
from anisoscope.studies.config import ArmRun, ArmsConfig, PaperPreset, Preset, StudyArm
from anisoscope.studies.study_run import ArmsStudy

_ARM = re.compile(r"(?:decoder|encoder)(?:-flat|-zipf\d+(?:\.\d+)?)?")
ARMS = ("decoder", "encoder", "decoder-flat")  # decoder-flat is the intervention on token frequency
# pre-norm, because a post-norm BERT of this size stays on the unigram plateau for so few steps
FAMILIES = {"decoder": "gpt2", "encoder": "modernbert"}
_TINY = {"layers": 4, "width": 96, "heads": 4, "context": 96, "steps": 300, "batch_size": 16, "lr": 2e-3}
_SMALL = {"layers": 12, "width": 512, "heads": 8, "context": 256, "steps": 4000, "batch_size": 64, "lr": 6e-4}
PRESETS = {
    "tiny": Preset({**_TINY, "checkpoints": "0,every:150"}),
    "small": Preset({**_SMALL, "checkpoints": "log,every:1000"}),
}


@dataclass(frozen=True)
class RevisitingConfig(ArmsConfig):
    """What the study runs; what is None is as the preset has it.

    >>> [(name, seed) for name, _, seed in RevisitingConfig(arms=("encoder",), seeds=(0, 1)).runs()]
    [('encoder', 0), ('encoder', 1)]
    """

    preset: PaperPreset = "tiny"
    data: Text = "embedded"
    arms: Annotated[tuple[str, ...], Option("decoder, encoder, decoder-flat, decoder-zipf1.5, ….", parse=listed)] = ARMS
    seeds: Annotated[tuple[int, ...], Option("Seeds such as 0,1,2; general claims need three.", parse=seed_numbers)] = (
        0,
    )
    steps: Annotated[int | None, Option("Updates of each arm.")] = None
    layers: Annotated[int | None, Option("Blocks.")] = None
    width: Annotated[int | None, Option("Width of the residual stream.")] = None
    context: Annotated[int | None, Option("Tokens of a context.")] = None
    metrics: Annotated[str | None, Option("light, standard, full, or metrics.")] = None
    when: Annotated[str | None, Option("log, log:COUNT, every:N, or steps.")] = None
    rank: Rank = None
    limit: Annotated[float | None, Option("Megabytes of text to use.")] = None
    tokens: Annotated[int, Option("Tokens of each model's probe (paper).")] = 32_768
    device: Device = "auto"

    presets: ClassVar[Mapping[str, Preset]] = PRESETS
    measures_published: ClassVar[bool] = True

    def check_arms(self) -> None:
        if not self.arms or not self.seeds:
            raise AnisoscopeError("a study needs at least one arm and one seed.")
        for arm in self.arms:
            if not _ARM.fullmatch(arm):
                raise AnisoscopeError(
                    f"arm {arm!r} is not known; expected decoder or encoder, with -flat or -zipf1.5 for a resampled "
                    "corpus."
                )

    @property
    def watch(self) -> dict[str, Any]:
        """As in the base class; the monitor defaults to `standard`."""
        return {**super().watch, "monitor": self.metrics or "standard"}

    def runs(self) -> list[ArmRun]:
        """Every run, seed by seed; equivalent spellings of a frequency (zipf1.5, zipf1.50) give one name."""
        trainings = [self._training(arm, seed) for seed in self.seeds for arm in self.arms]
        return [ArmRun(training.arm, training, training.seed) for training in trainings]

    def _training(self, arm: str, seed: int) -> Any:
        from anisoscope.training.config import TrainConfig

        arch, _, frequency = arm.partition("-")
        fields: dict[str, Any] = {"arch": arch, "family": FAMILIES[arch], "data": self.data, "device": self.device}
        fields["frequency"] = {"": "natural", "flat": "flat"}.get(frequency, f"zipf:{frequency.removeprefix('zipf')}")
        fields |= {"seed": seed, **given(self, "steps", "layers", "width", "context", "limit")}
        return TrainConfig(**{**self.size.train, **fields})


@dataclass
class Revisiting(ArmsStudy):
    """One run of the study."""

    config: RevisitingConfig
    name: ClassVar[str] = "revisiting"

    def train(self) -> None:
        """Train the arms in sequence; a failed arm ends the study."""
        from anisoscope.studies.arms import train_arm

        for run in self.config.runs():
            arm = self.arm(run)
            try:
                train_arm(arm, self.progress_of(arm.path.name))
            finally:  # also join what a failed or interrupted arm measured
                self.join(arm.path, name=arm.model, seed=run.seed)

    def arm(self, run: ArmRun) -> StudyArm:
        """The training run of an arm; its folder name includes the seed only if there are several."""
        arm = super().arm(run)
        return arm if len(self.config.seeds) > 1 else replace(arm, path=arm.path.with_name(run.model))

    def measure_published(self) -> None:
        """Measure the models of the paper, with their published checkpoints."""
        from anisoscope.studies.published import REVISITING_MODELS, measure_models, sweep_model

        options: dict[str, Any] = {"data": self.config.data, "rank": self.config.rank}
        measure_models(self, REVISITING_MODELS, partial(sweep_model, self, **options), named=True)
