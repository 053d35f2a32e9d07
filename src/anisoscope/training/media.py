"""Training small image and audio classifiers with the loop of `training.loop`: their options, models and batches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from anisoscope.errors import AnisoscopeError, unknown_name
from anisoscope.models.checkpoint import fresh_config, seeded
from anisoscope.models.load import quiet
from anisoscope.models.placement import choose_device
from anisoscope.numerics.hashing import row_hash
from anisoscope.option import Progress
from anisoscope.results.modality import CONVOLUTION, IMAGES_DATA, SPEECH, VISION, Modality
from anisoscope.training.config import CommonTrainConfig
from anisoscope.training.language_model import MICRO
from anisoscope.training.loop import Recipe, train
from anisoscope.training.media_examples import RATE, Examples, ExampleShape, prepare_examples

# All models are classifiers with one cross-entropy per picture or clip, which trains stably from scratch in minutes,
# whereas contrastive or masked-frame objectives of speech need long schedules and often collapse. All have pre-norm
# blocks with a four times wider feed-forward part, so that modalities differ only in the data, and the vision models in
# what mixes positions: attention, or a depthwise convolution.

KERNELS, STRIDES = (10, 8, 4, 4), (5, 8, 4, 2)  # of the convolutions that turn samples into frames, one every 20 ms
STAGES = (0.5, 1.0, 2.0)  # width of each stage of the convolutional model relative to the vision transformer
_FIRST = 2 * KERNELS[0]  # samples added to the shortest sound for the edges of the convolutions


@dataclass(frozen=True)
class MediaModelKind:
    """One architecture: its class with a classifier on top, what it reads, and its configuration at some sizes."""

    name: str  # also transformers' model type
    architecture: str
    modality: Modality
    fields: Callable[[MediaConfig], dict[str, Any]]


def _vit(config: MediaConfig) -> dict[str, Any]:
    dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), config.dropout)
    sizes = {"hidden_size": config.width, "num_hidden_layers": config.layers, "num_attention_heads": config.heads}
    sizes |= {"intermediate_size": 4 * config.width, "image_size": config.size, "patch_size": config.patch}
    return {**sizes, **dropout}


def _convnext(config: MediaConfig) -> dict[str, Any]:
    """The counterpart of the ViT: as many blocks, about as many parameters, the same first patches.

    The usual layer scale of 10⁻⁶, meant for hundreds of epochs, is off: after a brief training the blocks would still
    do nothing.
    """
    widths = [max(1, int(share * config.width)) for share in STAGES]
    sizes: dict[str, Any] = {"num_stages": len(STAGES), "hidden_sizes": widths, "depths": stage_depths(config.layers)}
    sizes |= {"patch_size": config.patch, "image_size": config.size}
    return {**sizes, "layer_scale_init_value": 0.0, "drop_path_rate": config.dropout}


def _wav2vec2(config: MediaConfig) -> dict[str, Any]:
    """Convolutions turn samples into frames; masking of frames is off, as it uses numpy's global generator."""
    sizes: dict[str, Any] = {"hidden_size": config.width, "num_hidden_layers": config.layers}
    sizes |= {"num_attention_heads": config.heads, "intermediate_size": 4 * config.width}
    sizes |= {"conv_dim": [config.width // 2] * len(KERNELS), "conv_kernel": list(KERNELS)}
    sizes |= {"conv_stride": list(STRIDES), "classifier_proj_size": config.width}
    sizes |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": config.heads}
    norms = {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True}
    parts = ("hidden_dropout", "attention_dropout", "activation_dropout")
    off = {"feat_proj_dropout": 0.0, "final_dropout": 0.0, "layerdrop": 0.0, "apply_spec_augment": False}
    return {**sizes, **norms, **dict.fromkeys(parts, config.dropout), **off}


KINDS: dict[str, MediaModelKind] = {
    kind.name: kind
    for kind in (
        MediaModelKind("vit", "ViTForImageClassification", VISION, _vit),
        MediaModelKind("convnext", "ConvNextForImageClassification", CONVOLUTION, _convnext),
        MediaModelKind("wav2vec2", "Wav2Vec2ForSequenceClassification", SPEECH, _wav2vec2),
    )
}


def stage_depths(layers: int) -> list[int]:
    """Blocks of each stage, most of them in the middle.

    >>> stage_depths(4), stage_depths(6)
    ([1, 2, 1], [1, 4, 1])
    """
    outer = max(1, layers // 6)
    return [outer, max(1, layers - 2 * outer), outer]


def frames(samples: int) -> int:
    """The number of frames of a sound of so many samples (no padding).

    >>> frames(16_000)
    48
    """
    for kernel, stride in zip(KERNELS, STRIDES, strict=True):
        samples = (samples - kernel) // stride + 1
    return samples


def media_model(config: MediaConfig, *, classes: int) -> nn.Module:
    """A new classifier whose forward returns a loss; the same weights for the same sizes and seed."""
    import transformers

    kind = config.kind
    with quiet():
        described = fresh_config(kind.name, kind.fields(config))
        described.num_labels = classes
        described.problem_type = "single_label_classification"
        if kind.modality.attends:
            described._attn_implementation = "sdpa"
        with seeded(config.seed):
            model: nn.Module = getattr(transformers, kind.architecture)(described)
    return model.double() if config.dtype == "float64" else model


_CPU = torch.device("cpu")
LEFT_OUT = ("skipped", "useless", "dropped_pieces", "left_out")  # fields of examples.json on unused data
_QUIET = 1e-7  # added to the variance of a sound, as transformers does


@dataclass(frozen=True)
class MediaConfig(CommonTrainConfig):
    """The options of training an image or audio classifier.

    >>> MediaConfig().positions, MediaConfig(arch="wav2vec2").positions
    (64, 48)
    """

    arch: str = "vit"  # vit, its convolutional counterpart convnext, or wav2vec2
    size: int = 32  # pixels of a side
    patch: int = 4
    seconds: float = 1.0  # of a sound
    examples: int = 2048  # number of examples generated, or most that are read

    least: ClassVar[dict[str, float]] = {**CommonTrainConfig.least, "size": 4, "patch": 1, "examples": 4}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.arch not in KINDS:
            raise unknown_name("architecture", self.arch, KINDS)
        modality = self.kind.modality
        whole = {"width": (self.width, 2 * self.heads)}
        if modality.medium is IMAGES_DATA:
            halvings = 1 if modality.attends else 2 ** (len(STAGES) - 1)
            whole["size"] = (self.size, self.patch * halvings)
        for name, (value, step) in whole.items():
            if value % step or not value:
                raise AnisoscopeError(f"{name} is {value}; a {self.arch} here needs a multiple of {step}.")
        if modality is SPEECH and self.positions < 8:
            least = (8 * prod(STRIDES) + _FIRST) / RATE
            raise AnisoscopeError(f"seconds is {self.seconds}; expected at least {least:.2f}, which is eight frames.")

    @property
    def kind(self) -> MediaModelKind:
        """The architecture."""
        return KINDS[self.arch]

    @property
    def shape(self) -> ExampleShape:
        """The shape of one example."""
        return ExampleShape(self.kind.modality.medium.name, self.size, self.seconds)

    @property
    def positions(self) -> int:
        """Patches of a picture, or frames of a sound."""
        return (self.size // self.patch) ** 2 if self.shape.medium == IMAGES_DATA.name else frames(self.shape.samples)

    @property
    def arm(self) -> str:
        """The name of the architecture."""
        return self.arch

    @property
    def entry(self) -> dict[str, str]:
        """Fields of the model's entry in run.json: type (encoder or convolution), objective and family."""
        kind = "encoder" if self.kind.modality.attends else self.kind.modality.name
        return {"type": kind, "objective": "classes", "family": self.arch}


@dataclass(frozen=True, eq=False)
class MediaStream:
    """The training batches of one run as a function of (seed, step, micro-batch), and the examples of its probe."""

    examples: Examples
    batch_size: int = 16
    seed: int = 0
    device: torch.device = _CPU
    dtype: torch.dtype = torch.float32
    tokenizer: ClassVar[None] = None

    @property
    def files(self) -> Path:
        """The folder of the processor's settings."""
        return self.examples.path / "processor"

    @property
    def medium(self) -> str:
        """images or audio."""
        return str(self.examples.about["made_of"]["medium"])

    def about(self) -> dict[str, Any]:
        """The entry `data` of run.json."""
        about, width = self.examples.about, self.examples.values.shape[1]
        kept = {name: about[name] for name in ("fingerprint", "classes", "examples", "held_out", "repeated")}
        unit = {"pixels": width} if self.medium == IMAGES_DATA.name else {"samples": width}
        left_out = {name: about[name] for name in LEFT_OUT if about.get(name)}
        return {**kept, **left_out, "medium": self.medium, **unit, "notes": self.examples.notes}

    @cached_property
    def _training(self) -> tuple[Tensor, Tensor]:
        """Values and labels of the training examples, on the device."""
        return self._examples(np.flatnonzero(~self.examples.held_out))

    def batch(self, step: int, micro: int = 0) -> dict[str, Tensor]:
        """The examples of one micro-batch, drawn with replacement, and their classes."""
        values, labels = self._training
        key = torch.full((self.batch_size,), step * MICRO + micro, dtype=torch.int64, device=self.device)
        drawn = row_hash(key, torch.arange(self.batch_size, device=self.device), seed=self.seed)
        rows = ((drawn >> 2) & ((1 << 61) - 1)) % len(labels)
        return self._inputs(values[rows], labels[rows])

    def probe_batches(self, contexts: int = 64, *, batch_size: int = 16) -> list[dict[str, Tensor]]:
        """Fixed held-out examples, those with the smallest hashes of their content: the same for every seed."""
        held = np.flatnonzero(self.examples.held_out)
        digest = {i: hashlib.sha256(self.examples.values[i].tobytes()).digest() for i in held.tolist()}
        chosen = np.array(sorted(digest, key=lambda i: digest[i])[:contexts])
        parts = [chosen[at : at + batch_size] for at in range(0, len(chosen), batch_size)]
        return [self._inputs(*self._examples(part)) for part in parts]

    def _examples(self, chosen: np.ndarray) -> tuple[Tensor, Tensor]:
        """Some values and labels, on the device."""
        values, labels = self.examples.values[chosen], self.examples.labels[chosen]
        return torch.from_numpy(values).to(self.device), torch.from_numpy(labels).to(self.device)

    def _inputs(self, values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = values.to(self.dtype)
        if self.medium == IMAGES_DATA.name:  # ±1, channels first
            return {"pixel_values": (x / 255 - 0.5).div_(0.5).permute(0, 3, 1, 2).contiguous(), "labels": labels}
        x = x / 32767  # back to ±1, so that _QUIET has the same effect as in transformers
        x = (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True, unbiased=False) + _QUIET).sqrt()
        return {"input_values": x, "labels": labels}


def media_stream(
    config: MediaConfig, out: Path, *, corpus: str | Path | None = None, progress: Progress | None = None
) -> MediaStream:
    """The batches of a run; the examples are prepared once and then read from the folder."""
    tell = progress or (lambda what, done, of: None)
    tell("examples", 0, 1)
    folder = corpus if corpus is not None else out / "corpus"
    examples = prepare_examples(config.data, folder, shape=config.shape, most=config.examples)
    tell("examples", 1, 1)
    dtype = torch.float64 if config.dtype == "float64" else torch.float32
    return MediaStream(examples, config.batch_size, config.seed, choose_device(config.device), dtype)


MEDIA = Recipe(media_stream, lambda config, stream: media_model(config, classes=len(stream.examples.classes)))


def train_media(config: MediaConfig, out: str | Path, **options: Any) -> Path:
    """Train a model of pictures or sounds into a run folder; `options` as those of `training.loop.train`."""
    return train(config, out, recipe=MEDIA, **options)
