"""Configuration of the performance study: does the geometry of representations matter for performance?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from anisoscope import option
from anisoscope.errors import AnisoscopeError, check_known
from anisoscope.option import Option, check_least, distinct, given, numbers, refuse_idle
from anisoscope.studies.config import TrainedPreset

AUTO = "auto"  # the held-out text of a run of `anisoscope train`, else the embedded corpus
POOLS = ("mean", "cls", "last")
PENALTIES = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0)


@dataclass(frozen=True)
class PerformancePreset:
    """The size of a study; `train` are the training fields of the model that is trained if none is given."""

    train: Mapping[str, Any]
    tokens: int
    context: int
    rows: int


_TINY = {"layers": 3, "width": 64, "heads": 4, "context": 64, "steps": 300, "batch_size": 16, "lr": 2e-3}
_SMALL = {"layers": 6, "width": 256, "heads": 4, "context": 128, "steps": 3000, "batch_size": 64, "lr": 1e-3}
PRESETS = {
    "tiny": PerformancePreset({**_TINY, "checkpoints": "0,5,10,20,50,100,200"}, tokens=12_288, context=64, rows=2048),
    "small": PerformancePreset(
        {**_SMALL, "checkpoints": "0,10,30,100,200,400,800,1600"}, tokens=65_536, context=128, rows=16_384
    ),
}
_LEAST = {"tokens": 64, "context": 4, "rows": 64, "classes": 2, "articles": 2, "batch_size": 1, "steps": 1, "seed": 0}
_LEAST |= {"directions": 1}


@dataclass(frozen=True)
class PerformanceConfig:
    """The configuration of the study; fields that are None default to the preset."""

    models: Annotated[
        tuple[str, ...],
        Option(
            "Models, or folders of checkpoint-N folders (a run of `anisoscope train` too); without any a small "
            "decoder is trained first.",
            argument=True,
            metavar="[MODEL...]",
        ),
    ] = ()
    preset: TrainedPreset = "tiny"
    revisions: Annotated[tuple[str, ...], Option("Hub revisions of one model: step0,step1000,….", parse=distinct)] = ()
    data: Annotated[
        str, Option("Text; 'auto' is the held-out text of a training run of ours, else the embedded corpus.")
    ] = AUTO
    labels: Annotated[
        str | None, Option("Labelled texts (.jsonl, .csv, .parquet) for the probes, in place of the tasks.")
    ] = None
    text_field: Annotated[str, Option("Field that holds the text.")] = "text"
    label_field: Annotated[str, Option("Field of --labels: a class, or a list, one per word or token.")] = "label"
    tasks: Annotated[
        tuple[str, ...], Option("space_next, token_class, place_in_word, article, order; default: all.", parse=distinct)
    ] = ()
    pool: Annotated[str, Option("One row of a context for its label: mean, cls or last.")] = "mean"
    tokens: Annotated[int | None, Option("Tokens to look at; half to fit on, half to test on.")] = None
    context: Annotated[int | None, Option("Tokens of a context.")] = None
    # also the largest number of rows for geometry metrics
    rows: Annotated[int | None, Option("Rows that a probe is fitted on, at most.")] = None
    # number of most frequent tokens
    classes: Annotated[int, Option("Tokens that the fresh readout tells apart, at most.")] = 512
    articles: Annotated[int, Option("Documents that the contexts come from, and task `article` asks.")] = 8
    directions: Annotated[
        int | None, Option("Directions that all-but-the-top removes; default: a hundredth of the width.")
    ] = None
    shrinkage: Annotated[float | None, Option("Of the covariance before whitening, 0 to 1; default: d/(n + d).")] = None
    penalties: Annotated[
        tuple[float, ...],
        Option(
            "Penalties to choose from, relative to the variance; default: 1e-8 … 1.",
            parse=numbers(float, "1e-4,0.01,1"),
        ),
    ] = PENALTIES
    layers: option.Layers = ()
    steps: Annotated[int | None, Option("Updates of the model that is trained here.")] = None
    batch_size: option.BatchSize = 32
    tokenizer: option.Tokenizer = None
    random_init: option.RandomInit = False
    device: option.Device = "auto"
    dtype: Annotated[str, Option("auto, float32, float64, bfloat16.")] = "auto"
    seed: option.Seed = 0
    trust_remote_code: option.TrustRemoteCode = False

    def __post_init__(self) -> None:
        from anisoscope.capture.row import PositionChoice
        from anisoscope.data.tasks import check_tasks
        from anisoscope.models.placement import choose_device, choose_dtype

        choose_dtype(self.dtype, choose_device(self.device))
        check_known("preset", self.preset, PRESETS)
        check_known("pool", self.pool, POOLS)
        check_tasks(self.tasks)
        PositionChoice(pool=self.pool)
        check_least(self, _LEAST)
        if self.shrinkage is not None and not 0 <= self.shrinkage <= 1:
            raise AnisoscopeError(f"shrinkage is {self.shrinkage}; expected a share from 0 to 1.")
        if not self.penalties or any(not 0 <= p < float("inf") for p in self.penalties):
            raise AnisoscopeError(f"penalties are {self.penalties}; expected numbers from 0 on.")
        if self.revisions and len(self.models) != 1:
            raise AnisoscopeError(f"--revisions go with one model, not with {len(self.models)}.")
        if self.steps is not None and self.models:
            raise AnisoscopeError("--steps is for the model that is trained here; leave it out where models are given.")
        if not self.models:
            refuse_idle(self, ("tokenizer", "random_init", "trust_remote_code"), "for the model that is trained here")
        if self.labels is None:
            refuse_idle(self, ("label_field",), "without --labels")
        if len(set(self.models)) < len(self.models):
            raise AnisoscopeError("a model is named twice; name each once.")

    @property
    def size(self) -> dict[str, int]:
        """Tokens, context and rows as given, else from the preset."""
        preset = PRESETS[self.preset]
        return {name: getattr(self, name) or getattr(preset, name) for name in ("tokens", "context", "rows")}

    @property
    def asked_tasks(self) -> tuple[str, ...]:
        """The embedded tasks; with labels from the user only those that were named."""
        from anisoscope.data.tasks import TASKS

        return self.tasks or (() if self.labels else tuple(TASKS))

    def training(self) -> Any:
        """The TrainConfig of the model that is trained if none is given."""
        from anisoscope.training.config import TrainConfig

        fields = {**PRESETS[self.preset].train, "seed": self.seed, "device": self.device}
        fields |= {"data": "embedded" if self.data == AUTO else self.data, "text_field": self.text_field}
        if self.steps is not None:
            kept = [int(step) for step in fields["checkpoints"].split(",")]
            fields |= {"steps": self.steps, "checkpoints": ",".join(str(s) for s in kept if s < self.steps)}
        return TrainConfig(**fields | given(self, "context"))
