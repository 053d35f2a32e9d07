"""Small models of pictures and sounds, built from transformers configurations with a seed of their own.

All of them classify, with one cross-entropy for each picture or clip: that trains stably from scratch within minutes,
where contrastive or masked-frame objectives of speech need long schedules and mostly measure whether they collapsed.
All have pre-norm blocks with a four times wider feed-forward part, so that what differs between the modalities is the
data, and between the two models of vision what mixes positions: attention, or a depthwise convolution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from torch import nn

from anisoscope.errors import AnisoscopeError, unknown_name

if TYPE_CHECKING:
    from anisoscope.training.media import MediaConfig

KERNELS, STRIDES = (10, 8, 4, 4), (5, 8, 4, 2)  # of the convolutions that turn samples into frames, one every 20 ms
STAGES = (0.5, 1.0, 2.0)  # width of each stage of the convolutional model over that of its twin
_FIRST = 2 * KERNELS[0]  # samples that a sound needs at least, whatever else


@dataclass(frozen=True)
class Kind:
    """One architecture: what transformers calls it, what it reads, and its configuration at some sizes."""

    name: str
    model_type: str
    architecture: str  # the class with a classifier on top
    medium: str  # images or audio
    fields: Callable[[MediaConfig], dict[str, Any]]
    type: str = "encoder"


def _vit(config: MediaConfig) -> dict[str, Any]:
    dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), config.dropout)
    sizes = {"hidden_size": config.width, "num_hidden_layers": config.layers, "num_attention_heads": config.heads}
    sizes |= {"intermediate_size": 4 * config.width, "image_size": config.size, "patch_size": config.patch}
    return {**sizes, **dropout}


def _convnext(config: MediaConfig) -> dict[str, Any]:
    """The twin: as many blocks, about as many parameters, the same first patches.

    Its usual scale of 10⁻⁶ on every branch, made for hundreds of epochs, is left out: a brief training would end with
    blocks that do nothing.
    """
    widths = [max(1, int(share * config.width)) for share in STAGES]
    sizes: dict[str, Any] = {"num_stages": len(STAGES), "hidden_sizes": widths, "depths": stage_depths(config.layers)}
    sizes |= {"patch_size": config.patch, "image_size": config.size}
    return {**sizes, "layer_scale_init_value": 0.0, "drop_path_rate": config.dropout}


def _wav2vec2(config: MediaConfig) -> dict[str, Any]:
    """Raw sound through convolutions into frames; masks over frames, which come from numpy's generator, are off."""
    sizes: dict[str, Any] = {"hidden_size": config.width, "num_hidden_layers": config.layers}
    sizes |= {"num_attention_heads": config.heads, "intermediate_size": 4 * config.width}
    sizes |= {"conv_dim": [config.width // 2] * len(KERNELS), "conv_kernel": list(KERNELS)}
    sizes |= {"conv_stride": list(STRIDES), "classifier_proj_size": config.width}
    sizes |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": config.heads}
    norms = {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True}
    parts = ("hidden_dropout", "attention_dropout", "activation_dropout")
    off = {"feat_proj_dropout": 0.0, "final_dropout": 0.0, "layerdrop": 0.0, "apply_spec_augment": False}
    return {**sizes, **norms, **dict.fromkeys(parts, config.dropout), **off}


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("vit", "vit", "ViTForImageClassification", "images", _vit),
        Kind("convnext", "convnext", "ConvNextForImageClassification", "images", _convnext, type="convolution"),
        Kind("wav2vec2", "wav2vec2", "Wav2Vec2ForSequenceClassification", "audio", _wav2vec2),
    )
}


def kind_of(arch: str) -> Kind:
    """The architecture of that name."""
    if arch not in KINDS:
        raise unknown_name("architecture", arch, KINDS)
    return KINDS[arch]


def stage_depths(layers: int) -> list[int]:
    """Blocks of each stage, most of them in the middle.

    >>> stage_depths(4), stage_depths(6)
    ([1, 2, 1], [1, 4, 1])
    """
    outer = max(1, layers // 6)
    return [outer, max(1, layers - 2 * outer), outer]


def frames(samples: int) -> int:
    """Frames that a sound of so many samples becomes; none of them reads beyond its end.

    >>> frames(16_000)
    48
    """
    for kernel, stride in zip(KERNELS, STRIDES, strict=True):
        samples = (samples - kernel) // stride + 1
    return samples


def check_media_sizes(config: MediaConfig) -> None:
    """Refuse what does not divide evenly."""
    kind = kind_of(config.arch)
    whole = {"width": (config.width, 2 * config.heads)}
    if kind.medium == "images":
        steps = config.patch * (2 ** (len(STAGES) - 1) if kind.type == "convolution" else 1)
        whole["size"] = (config.size, steps)
    for name, (value, step) in whole.items():
        if value % step or not value:
            raise AnisoscopeError(f"{name} is {value}; a {config.arch} here needs a multiple of {step}.")
    least = (8 * prod(STRIDES) + _FIRST) / 16_000
    if kind.medium == "audio" and frames(round(config.seconds * 16_000)) < 8:
        raise AnisoscopeError(f"seconds is {config.seconds}; expected at least {least:.2f}, which is eight frames.")


def media_model(config: MediaConfig, *, classes: int) -> nn.Module:
    """A fresh classifier, whose forward returns a loss; the same weights for the same sizes and seed."""
    import transformers

    from anisoscope.capture.checkpoints import fresh_config, seeded
    from anisoscope.training.models import hushed

    kind = kind_of(config.arch)
    with hushed():
        described = fresh_config(kind.model_type, kind.fields(config))
        described.num_labels = classes
        described.problem_type = "single_label_classification"
        if kind.type != "convolution":
            described._attn_implementation = "sdpa"
        with seeded(config.seed):
            model: nn.Module = getattr(transformers, kind.architecture)(described)
    return model.double() if config.dtype == "float64" else model
