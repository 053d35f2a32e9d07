"""Training small classifiers of pictures and sounds with the loop of `training.loop`: options, models and batches.

By default models have one cross-entropy per example, which trains stably from scratch in minutes and is the same for
all of them; other objectives (`training.task`) are for those that ask for them. ViT, ConvNeXt and wav2vec 2.0 have pre-
norm blocks with a four times wider feed-forward part, so that modalities differ only in the data, and the vision models
in what mixes positions: attention, or a depthwise convolution. ResNet and EfficientNet are other convolutional
families, with batch norms, so that what is said of convolutions does not rest on one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from anisoscope.capture.row import original_contexts
from anisoscope.errors import AnisoscopeError, unknown_name
from anisoscope.models.checkpoint import fresh_config, seeded
from anisoscope.models.load import quiet
from anisoscope.models.placement import choose_device
from anisoscope.numerics.hashing import row_hash
from anisoscope.option import Progress
from anisoscope.training import pictures, sounds
from anisoscope.training.config import ClassifierConfig
from anisoscope.training.examples import ExampleKind, Examples, MediaModelKind, prepare_examples
from anisoscope.training.language_model import MICRO
from anisoscope.training.loop import Recipe, train
from anisoscope.training.task import TASKS, MediaTask, NameClasses

KINDS: dict[str, MediaModelKind] = {kind.name: kind for kind in (*pictures.KINDS, *sounds.KINDS)}
EXAMPLES = {kind.examples.medium.name: kind.examples for kind in KINDS.values()}
CONSTANT = 4096  # training examples that the best constant answer is found on
LEFT_OUT = ("skipped", "useless", "dropped_pieces", "left_out")  # fields of examples.json on unused data
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class MediaConfig(ClassifierConfig):
    """The options of training an image or audio classifier.

    >>> MediaConfig().positions, MediaConfig(arch="wav2vec2").positions
    (64, 48)
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.arch not in KINDS:
            raise unknown_name("architecture", self.arch, KINDS)
        known = ("classes", *self.kind.others)
        if self.objective not in known:
            raise AnisoscopeError(
                f"a {self.arch} here is not trained on {self.objective!r}; expected one of {', '.join(known)}."
            )
        steps = {"width": 2 * self.heads}
        steps |= {} if self.kind.halvings is None else {"size": self.patch * 2**self.kind.halvings}
        for name, step in steps.items():
            if (value := getattr(self, name)) % step:
                raise AnisoscopeError(f"{name} is {value}; a {self.arch} here needs a multiple of {step}.")
        self.kind.positions(self)  # too few are an error

    @property
    def kind(self) -> MediaModelKind:
        """The architecture."""
        return KINDS[self.arch]

    @property
    def positions(self) -> int:
        """Patches of a picture, or frames of a sound."""
        return self.kind.positions(self)

    @property
    def arm(self) -> str:
        """The name of the architecture, and the objective if it is not `classes`."""
        return self.arch if self.objective == "classes" else f"{self.arch}-{self.objective}"

    @property
    def task(self) -> MediaTask:
        """The objective."""
        return TASKS[self.objective](self, self.positions)

    @property
    def entry(self) -> dict[str, str]:
        """Fields of the model's entry in run.json: type (encoder or convolution), objective and family."""
        kind = "encoder" if self.kind.modality.attends else self.kind.modality.name
        return {"type": kind, "objective": self.objective, "family": self.arch}


def media_model(config: MediaConfig, *, classes: int) -> nn.Module:
    """A new model whose forward returns a loss; the same weights for the same sizes and seed."""
    import transformers

    kind = config.kind
    with quiet():
        described = fresh_config(kind.name, kind.fields(config))
        for name, value in config.task.fields(config, classes=classes).items():
            setattr(described, name, value)
        if kind.modality.attends:
            described._attn_implementation = "sdpa"
        with seeded(config.seed):
            model: nn.Module = getattr(transformers, {"classes": kind.architecture, **kind.others}[config.objective])(
                described
            )
    return model.double() if config.dtype == "float64" else model


@dataclass(frozen=True, eq=False)
class MediaStream:
    """The training batches of one run as a function of (seed, step, micro-batch), and the examples of its probe."""

    examples: Examples
    batch_size: int = 16
    seed: int = 0
    device: torch.device = _CPU
    dtype: torch.dtype = torch.float32
    task: MediaTask = field(default_factory=NameClasses)
    tokenizer: ClassVar[None] = None

    @property
    def files(self) -> Path:
        """The folder of the processor's settings."""
        return self.examples.path / "processor"

    @property
    def kind(self) -> ExampleKind:
        """What the examples are."""
        return EXAMPLES[self.examples.about["made_of"]["medium"]]

    def about(self) -> dict[str, Any]:
        """The entry `data` of run.json."""
        about = self.examples.about
        kept = about.get("of", {}) | {
            name: about[name] for name in ("fingerprint", "classes", "examples", "held_out", "repeated")
        }
        left_out = {name: about[name] for name in LEFT_OUT if about.get(name)}
        unit = {self.kind.unit: self.examples.values.shape[1]}
        return {**kept, **left_out, "medium": self.kind.medium.name, **unit, "notes": self.examples.notes}

    @cached_property
    def _training(self) -> tuple[Tensor, Tensor]:
        """Values and labels of the training examples, on the device."""
        return self._examples(np.flatnonzero(~self.examples.held_out))

    @property
    def constant(self) -> Any:
        """The best constant answer that the training examples allow: class counts, or a function of a batch."""
        values, labels = self._training
        known = self.kind.inputs(values[:CONSTANT].to(self.dtype))
        return self.task.constant(known, labels, classes=len(self.examples.classes))

    def batch(self, step: int, micro: int = 0) -> dict[str, Tensor]:
        """The examples of one micro-batch, drawn with replacement, and their classes."""
        values, labels = self._training
        key = torch.full((self.batch_size,), step * MICRO + micro, dtype=torch.int64, device=self.device)
        drawn = row_hash(key, torch.arange(self.batch_size, device=self.device), seed=self.seed)
        rows = ((drawn >> 2) & ((1 << 61) - 1)) % len(labels)
        return self._inputs(values[rows], labels[rows], keys=drawn)

    def loss(self, forward: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
        """The loss of the objective."""
        return self.task.loss(forward, batch)

    def probe_batches(self, contexts: int = 64, *, batch_size: int = 16) -> list[dict[str, Tensor]]:
        """Fixed held-out examples, those with the smallest hashes of their content: the same for every seed."""
        held = np.flatnonzero(self.examples.held_out).tolist()
        held.sort(key=lambda i: hashlib.sha256(self.examples.values[i].tobytes()).digest())
        chosen = held[:contexts]
        parts = [np.array(chosen[at : at + batch_size]) for at in range(0, len(chosen), batch_size)]
        return [self._inputs(*self._examples(part)) for part in parts]

    def _examples(self, chosen: np.ndarray) -> tuple[Tensor, Tensor]:
        """Some values and labels, on the device."""
        values, labels = self.examples.values[chosen], self.examples.labels[chosen]
        return torch.from_numpy(values).to(self.device), torch.from_numpy(labels).to(self.device)

    def _inputs(self, values: Tensor, labels: Tensor, keys: Tensor | None = None) -> dict[str, Tensor]:
        """A batch; what is hidden of it depends on the content alone, or on `keys` [B]."""
        inputs = self.kind.inputs(values.to(self.dtype))
        keys = original_contexts(inputs).to(self.device) if keys is None else keys
        return {**inputs, **self.task.targets(inputs, labels, keys=keys)}


def examples_of(config: MediaConfig, folder: str | Path) -> Examples:
    """The examples that a configuration asks for, prepared in `folder` once."""
    kind = config.kind.examples
    return prepare_examples(config.data, folder, kind=kind, extent=getattr(config, kind.extent), most=config.examples)


def media_stream(
    config: MediaConfig, out: Path, *, corpus: str | Path | None = None, progress: Progress | None = None
) -> MediaStream:
    """The batches of a run; the examples are prepared once and then read from the folder."""
    tell = progress or (lambda what, done, of: None)
    tell("examples", 0, 1)
    folder = corpus if corpus is not None else out / "corpus"
    examples = examples_of(config, folder)
    tell("examples", 1, 1)
    dtype = torch.float64 if config.dtype == "float64" else torch.float32
    return MediaStream(examples, config.batch_size, config.seed, choose_device(config.device), dtype, config.task)


def _first_model(config: MediaConfig, stream: MediaStream) -> nn.Module:
    """The model of a training before its first update; its batch norms know the first training batch.

    Fresh ones have mean 0 and variance 1: measured as they are, step 0 would show a network without norms.
    """
    model = media_model(config, classes=len(stream.examples.classes)).to(stream.device)
    fill_batch_norms(model, stream.batch(0))
    return model


def fill_batch_norms(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    """Run the model once with its batch norms in training mode, so that they store mean and variance of the inputs.

    Nothing else changes; a model without batch norms is not run.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    model.eval()
    for norm in norms:
        norm.momentum = 1.0
        norm.train()
    if norms:
        with torch.no_grad():
            model(**inputs)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    model.eval()


MEDIA = Recipe(media_stream, _first_model)


def train_media(config: MediaConfig, out: str | Path, **options: Any) -> Path:
    """Train a model of pictures or sounds into a run folder; `options` as those of `training.loop.train`."""
    return train(config, out, recipe=MEDIA, **options)
