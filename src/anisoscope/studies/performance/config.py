"""What decides the numbers of the performance study, checked before anything is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anisoscope.capture.rows.index import PositionChoice
from anisoscope.data.tasks import TASKS, check_tasks
from anisoscope.errors import AnisoscopeError, unknown_name
from anisoscope.numerics.linear_probes import GRID
from anisoscope.training.config import TrainConfig

AUTO = "auto"  # the held-out text of a training run of ours, else the embedded corpus
POOLS = ("mean", "cls", "last")


@dataclass(frozen=True)
class PerformancePreset:
    """How large a study is; `train` is the model that is trained where none is given."""

    train: TrainConfig
    tokens: int
    context: int
    rows: int


_TINY = TrainConfig(
    layers=3, width=64, heads=4, context=64, steps=300, batch_size=16, lr=2e-3, checkpoints="0,5,10,20,50,100,200"
)
_SMALL = TrainConfig(
    layers=6,
    width=256,
    heads=4,
    context=128,
    steps=3000,
    batch_size=64,
    lr=1e-3,
    checkpoints="0,10,30,100,200,400,800,1600",
)
PRESETS = {
    "tiny": PerformancePreset(_TINY, tokens=12_288, context=64, rows=2048),
    "small": PerformancePreset(_SMALL, tokens=65_536, context=128, rows=16_384),
}
_LEAST = {"tokens": 64, "context": 4, "rows": 64, "classes": 2, "articles": 2, "batch_size": 1, "steps": 1, "seed": 0}


@dataclass(frozen=True)
class PerformanceConfig:
    """What the study looks at and how; what is None is as the preset has it."""

    models: tuple[str, ...] = ()
    preset: str = "tiny"
    revisions: tuple[str, ...] = ()
    data: str = AUTO
    text_field: str = "text"
    labels: str | None = None
    label_field: str = "label"
    tasks: tuple[str, ...] = ()
    articles: int = 8
    pool: str = "mean"
    tokens: int | None = None
    context: int | None = None
    rows: int | None = None  # rows that a probe is fitted on, and that geometry is measured on, at most
    classes: int = 512  # tokens that the fresh readout tells apart, the most frequent ones
    directions: int | None = None
    shrinkage: float | None = None
    penalties: tuple[float, ...] = GRID
    layers: tuple[int, ...] = ()
    steps: int | None = None  # of the training, where no model is given
    batch_size: int = 32
    tokenizer: str | None = None
    random_init: bool = False
    device: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise unknown_name("preset", self.preset, PRESETS)
        if self.pool not in POOLS:
            raise unknown_name("pool", self.pool, POOLS)
        check_tasks(self.tasks)
        PositionChoice(pool=self.pool)
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise AnisoscopeError(f"{name} is {value}; expected at least {least}.")
        self._check_numbers()
        if self.revisions and len(self.models) != 1:
            raise AnisoscopeError(f"--revisions go with one model, not with {len(self.models)}.")
        if self.steps is not None and self.models:
            raise AnisoscopeError("--steps is for the model that is trained here; leave it out where models are given.")
        if len(set(self.models)) < len(self.models):
            raise AnisoscopeError("a model is named twice; name each once.")

    def _check_numbers(self) -> None:
        if self.shrinkage is not None and not 0 <= self.shrinkage <= 1:
            raise AnisoscopeError(f"shrinkage is {self.shrinkage}; expected a share from 0 to 1.")
        if self.directions is not None and self.directions < 1:
            raise AnisoscopeError(f"directions is {self.directions}; expected at least 1.")
        if not self.penalties or any(not 0 <= p < float("inf") for p in self.penalties):
            raise AnisoscopeError(f"penalties are {self.penalties}; expected numbers from 0 on.")

    @property
    def size(self) -> dict[str, int]:
        """Tokens, context and rows as asked for, else as the preset has them."""
        preset = PRESETS[self.preset]
        return {name: getattr(self, name) or getattr(preset, name) for name in ("tokens", "context", "rows")}

    @property
    def asked_tasks(self) -> tuple[str, ...]:
        """The embedded tasks; with labels of the user's own only those that were named."""
        return self.tasks or (() if self.labels else tuple(TASKS))

    def training(self) -> TrainConfig:
        """The model that is trained where none is given."""
        from dataclasses import replace

        changes: dict[str, Any] = {"seed": self.seed, "device": self.device}
        changes["data"] = "embedded" if self.data == AUTO else self.data
        if self.steps is not None:
            changes["steps"] = self.steps
            kept = [int(s) for s in PRESETS[self.preset].train.checkpoints.split(",")]
            changes["checkpoints"] = ",".join(str(s) for s in kept if s < self.steps)
        if self.context is not None:
            changes["context"] = self.context
        return replace(PRESETS[self.preset].train, **changes, text_field=self.text_field)
