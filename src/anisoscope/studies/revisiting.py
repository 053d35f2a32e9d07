"""Revisiting Anisotropy (arXiv 2604.08764): train a decoder and an encoder with the monitor on, and test the claims.

Each arm is a training run of its own under arms/, resumable; the study joins their tables and asks the claims.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from anisoscope.errors import AnisoscopeError, unknown_name
from anisoscope.results.folder import RunFolder
from anisoscope.studies.arms import ArmsStudy, StudyArm, schedule_of, train_arm
from anisoscope.studies.arms import judge_run as judge_run
from anisoscope.studies.arms import training_monitor as training_monitor
from anisoscope.training.config import TrainConfig

_ARM = re.compile(r"(?:decoder|encoder)(?:-flat|-zipf\d+(?:\.\d+)?)?")
ARMS = ("decoder", "encoder", "decoder-flat")  # the last one is the intervention on token frequency
_TINY = TrainConfig(
    layers=4, width=96, heads=4, context=96, steps=300, batch_size=16, lr=2e-3, checkpoints="0,every:150"
)
_SMALL = TrainConfig(
    layers=12, width=512, heads=8, context=256, steps=4000, batch_size=64, lr=6e-4, checkpoints="log,every:1000"
)
# a post-norm BERT of this size does not leave the unigram plateau in so few steps, a pre-norm encoder does
FAMILIES = {"decoder": "gpt2", "encoder": "modernbert"}
# the models of the paper with published checkpoints; revisions as their authors name them
PAPER: dict[str, tuple[str, ...]] = {
    "EuroBERT/EuroBERT-210m": (),
    "EuroBERT/EuroBERT-610m": (),
    "almanach/moderncamembert-base": (),
    "allenai/OLMo-1B-hf": (
        "step1000-tokens4B",
        "step10000-tokens41B",
        "step100000-tokens419B",
        "step738020-tokens3095B",
    ),
    "EleutherAI/pythia-160m": ("step0", "step1", "step8", "step64", "step512", "step4000", "step32000", "step143000"),
    "EleutherAI/pythia-410m": ("step0", "step1", "step8", "step64", "step512", "step4000", "step32000", "step143000"),
    "EleutherAI/pythia-1b": ("step0", "step1", "step8", "step64", "step512", "step4000", "step32000", "step143000"),
    "almanach/Gaperon-1125-1B": (),
    "HuggingFaceTB/SmolLM2-360M-intermediate-checkpoints": ("step-160000", "step-1600000", "step-3200000"),
    "HuggingFaceTB/SmolLM2-1.7B-intermediate-checkpoints": ("step-125000", "step-2500000", "step-4875000"),
}


@dataclass(frozen=True)
class RevisitingPreset:
    """How large a study is."""

    train: TrainConfig
    contexts: int  # of the probe
    metrics: str
    when: str


PRESETS = {
    "tiny": RevisitingPreset(_TINY, contexts=96, metrics="standard", when="log"),
    "small": RevisitingPreset(_SMALL, contexts=96, metrics="standard", when="log"),
}


@dataclass(frozen=True)
class RevisitingConfig:
    """What the study runs; what is None is as the preset has it."""

    preset: str = "tiny"
    data: str = "embedded"
    arms: tuple[str, ...] = ARMS
    seeds: tuple[int, ...] = (0,)
    steps: int | None = None
    layers: int | None = None
    width: int | None = None
    context: int | None = None
    metrics: str | None = None
    when: str | None = None
    rank: int | None = None
    limit: float | None = None
    device: str = "auto"
    tokens: int = 32_768  # paper: tokens of the probe of each model

    def __post_init__(self) -> None:
        if self.preset not in (*PRESETS, "paper"):
            raise unknown_name("preset", self.preset, [*PRESETS, "paper"])
        if not self.arms or not self.seeds:
            raise AnisoscopeError("a study needs at least one arm and one seed.")
        for arm in self.arms:
            if not _ARM.fullmatch(arm):
                raise AnisoscopeError(
                    f"arm {arm!r} is not known; expected decoder or encoder, with -flat or -zipf1.5 for a resampled "
                    "corpus."
                )
        if self.preset in PRESETS:
            self._check_runs()

    def _check_runs(self) -> None:
        """Every arm before the first one is trained; none twice, however it is written."""
        runs = [(self.training(arm, seed).arm, seed) for seed in self.seeds for arm in self.arms]
        twice = next((run for run in runs if runs.count(run) > 1), None)
        if twice is not None:
            raise AnisoscopeError(f"arm {twice[0]!r} of seed {twice[1]} is named twice; name every arm and seed once.")
        schedule_of(self.watch["when"], self.training(self.arms[0], self.seeds[0]).steps)

    @property
    def watch(self) -> dict[str, Any]:
        """The options of the monitor of every arm."""
        preset = PRESETS[self.preset]
        options: dict[str, Any] = {"monitor": self.metrics or preset.metrics, "when": self.when or preset.when}
        return {**options, "contexts": preset.contexts, "rank": self.rank}

    def training(self, arm: str, seed: int) -> TrainConfig:
        """The training run of one arm."""
        arch, _, frequency = arm.partition("-")
        changes: dict[str, Any] = {"arch": arch, "seed": seed, "data": self.data, "device": self.device}
        changes["family"] = FAMILIES[arch]
        changes["frequency"] = {"": "natural", "flat": "flat"}.get(frequency, f"zipf:{frequency.removeprefix('zipf')}")
        chosen = {name: getattr(self, name) for name in ("steps", "layers", "width", "context", "limit")}
        changes |= {name: value for name, value in chosen.items() if value is not None}
        return replace(PRESETS[self.preset].train, **changes)


@dataclass
class Revisiting(ArmsStudy):
    """One run of the study."""

    config: RevisitingConfig
    study: ClassVar[str] = "revisiting"

    def arms(self) -> None:
        """The models of the preset: trained here, or the paper's own."""
        if self.config.preset == "paper":
            self._paper()
        else:
            self._train()

    def _train(self) -> None:
        for seed in self.config.seeds:
            for arm in self.config.arms:
                one = self._arm(arm, seed)
                try:
                    train_arm(one, self.told(one.path.name))
                finally:  # of an arm that broke off, too: what it measured counts
                    self.join(one.path, name=arm, seed=seed)

    def _arm(self, arm: str, seed: int) -> StudyArm:
        name = arm if len(self.config.seeds) == 1 else f"{arm}-seed{seed}"
        training, watch, folder = self.config.training(arm, seed), self.config.watch, self.folder.path
        return StudyArm(arm, folder / "arms" / name, training, watch, folder / "corpus", tuple(self.command))

    def _paper(self) -> None:
        from anisoscope.series.config import SweepConfig
        from anisoscope.series.sweep import Sweeper

        for number, (model, revisions) in enumerate(PAPER.items()):
            if self.progress is not None:
                self.progress("models", number, len(PAPER))
            path = self.folder.path / "arms" / model.replace("/", "-")
            options: dict[str, Any] = {"data": self.config.data, "device": self.config.device, "rank": self.config.rank}
            sweep = SweepConfig(model, revisions, series=bool(revisions), tokens=self.config.tokens, **options)
            try:
                Sweeper(sweep, RunFolder.create(path, asdict(sweep), resume=True), command=self.command).run()
            except AnisoscopeError as error:
                self.skip(model, str(error))
                continue
            self.join(path, name=model.split("/")[-1], seed=0)
        if not self.tables:
            raise AnisoscopeError(
                f"none of the {len(PAPER)} models of the paper could be loaded (the first: "
                f"{self.about['skipped'][0]['reason'].rstrip('.')}); this preset needs their weights from the hub or "
                "its cache."
            )
