"""The table of model families for which the general rules of `layout.py` do not suffice.

A new family needs no row when its blocks are the one list of the configured length and its parts have usual names.
Otherwise add a `Family` to `FAMILIES` under the configuration's `model_type`, and a tiny configuration to
`tests/capture/test_family.py`; the tests then check it numerically.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.capture.padding import convolved, squeezed

Blocks = Callable[[nn.Module, Any], "list[str]"]
"""(backbone, configuration) -> path of the block applied at each layer, relative to the backbone, shared or not."""
Reads = tuple[Tensor, Tensor]
"""First and one-past-last input position that each row reads."""


@dataclass(frozen=True)
class Family:
    """What is special about one family of models; a field may be a function of the configuration where it varies."""

    about: str
    blocks: Blocks | None = None
    hidden: Callable[[int], list[int | None]] | None = None  # blocks -> layers of its own hidden_states, None: no site
    windows: Callable[[Any, int, int], Reads] | None = None  # what rows of a lower resolution read of the input
    final: bool | Callable[[Any], bool] | None = None  # False: the apparent final norm is not one
    attention: str = ""  # why query, key and scores are unavailable
    prefix: int | Callable[[Any], int] = 0  # leading positions that are no input: class, distillation, register tokens
    prefixed: Callable[[Any], frozenset[int]] | None = None  # the layers that have them, if not all do
    staged: bool = False  # whether its blocks form stages
    undivided: bool = False  # whether a stage is one block: what its inner blocks read are no rows of the map
    without: Mapping[str, str] = field(default_factory=dict)  # kinds that cannot be read as rows, and why


def albert_blocks(backbone: nn.Module, config: Any) -> list[str]:
    """ALBERT applies each layer of a group once per hidden layer of the group."""
    per_group = config.num_hidden_layers / config.num_hidden_groups
    groups = [int(i / per_group) for i in range(config.num_hidden_layers)]
    return [f"encoder.albert_layer_groups.{g}.albert_layers.{j}" for g in groups for j in range(config.inner_group_num)]


def canine_blocks(backbone: nn.Module, config: Any) -> list[str]:
    """CANINE: one block on characters, the deep blocks on molecules of several characters, one block on characters."""
    lists = ("initial_char_encoder.layer", "encoder.layer", "final_char_encoder.layer")
    return [f"{path}.{i}" for path in lists for i in range(len(backbone.get_submodule(path)))]  # type: ignore[arg-type]


def canine_windows(config: Any, length: int, rows: int) -> Reads:
    """Molecule 0 is the first character again; molecule j reads characters r(j-1) … rj-1 of rate r."""
    rate = config.downsampling_rate
    start, stop = (torch.arange(rows) - 1).clamp(min=0) * rate, torch.arange(rows) * rate
    stop[0] = 1
    return start.clamp(max=length), stop.clamp(max=length)


def padding_windows(config: Any, length: int, rows: int) -> Reads:
    """For a model that pads its input on the right: row j reads position j, and added positions are not data."""
    start = torch.arange(rows).clamp(max=length)
    return start, start + 1


def _convolutions(config: Any) -> list[tuple[int, int, int]]:
    return [(kernel, stride, 0) for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True)]


def speech_windows(config: Any, length: int, rows: int) -> Reads:
    """wav2vec 2.0 and its relatives: convolutions over samples, then those of an adapter where there is one."""
    layers = _convolutions(config)
    if getattr(config, "add_adapter", False):
        kernel = int(getattr(config, "adapter_kernel_size", 3))
        layers += [(kernel, int(config.adapter_stride), 1)] * int(config.num_adapter_layers)
    return convolved(length, rows, layers)


def squeezed_windows(config: Any, length: int, rows: int) -> Reads:
    """SEW: blocks read means of several frames, and their outputs are expanded to as many frames again."""
    return squeezed(length, rows, _convolutions(config), factor=int(config.squeeze_factor))


def _convolved(*layers: tuple[int, int, int]) -> Callable[[Any, int, int], Reads]:
    """Windows of fixed convolutions (kernel, stride, padding)."""
    return lambda config, length, rows: convolved(length, rows, layers)


def spectrogram_windows(config: Any, length: int, rows: int) -> Reads:
    """Patches of a spectrogram, by frequency and then by time, after two tokens that read no input."""
    across = (length - config.patch_size) // config.time_stride + 1
    start = (torch.arange(rows) - 2) % across * config.time_stride
    stop = start + config.patch_size
    start[:2] = stop[:2] = 0
    return start, stop


def cvt_classes(config: Any) -> frozenset[int]:
    """CvT: the layers of the stages that have a class token; the input of the first block is layer 0."""
    stages = [stage for stage, depth in enumerate(config.depth) for _ in range(depth)]
    found = {layer for layer, stage in enumerate(stages, start=1) if config.cls_token[stage]}
    return frozenset(found | ({0} if config.cls_token[0] else set()))


def pvt_classes(config: Any) -> frozenset[int]:
    """PVT: the layers of the last stage."""
    depth = sum(config.depths)
    return frozenset(range(depth - config.depths[-1] + 1, depth + 1))


_DISENTANGLED = "its scores are a sum of content and position products"
_WINDOWED = dict.fromkeys(("attn_in", "attn_out"), "its attention reads windows of the map, one after another")
_UNFOLDED = dict.fromkeys(
    ("query", "key", "scores"), "its attention reads positions that lie a patch apart, each such set by itself"
)
_NORMED = dict.fromkeys(("mlp_in", "mlp_out"), "what its feed-forward part gives is normed before it is added")


def _speech(about: str) -> Family:
    """wav2vec 2.0 and its relatives norm after the last block only where they norm before each sublayer."""
    return Family(about, final=lambda config: bool(config.do_stable_layer_norm), windows=speech_windows)


FAMILIES: dict[str, Family] = {
    "albert": Family("one shared layer: as many sites as applications", blocks=albert_blocks),
    "canine": Family(
        "characters, then molecules of several characters, then characters again",
        blocks=canine_blocks,
        # its own hidden states repeat the input of each of its three encoders
        hidden=lambda blocks: [0, 1, None, *range(2, blocks), None, blocks],
        windows=canine_windows,
    ),
    "deberta": Family("disentangled attention", final=False, attention=_DISENTANGLED),
    "deberta-v2": Family("disentangled attention", final=False, attention=_DISENTANGLED),
    "mamba": Family(  # its own hidden states start after the first block
        "state space, no attention", hidden=lambda blocks: [*range(1, blocks + 1), blocks]
    ),
    "longformer": Family(
        "banded attention, lengthens its input", windows=padding_windows, attention="its attention is computed in bands"
    ),
    "wav2vec2": _speech("frames of speech"),
    "hubert": _speech("frames of speech"),
    "wavlm": _speech("frames of speech, gated relative bias"),
    "data2vec-audio": Family("frames of speech", final=False, windows=speech_windows),
    "sew": Family("frames of speech, several squeezed to a row", windows=squeezed_windows),
    "sew-d": Family(
        "frames of speech, several squeezed to a row, disentangled attention",
        windows=squeezed_windows,
        attention=_DISENTANGLED,
    ),
    "whisper": Family(
        "speech encoder over 30 s of mel frames, and text decoder", windows=_convolved((3, 1, 1), (3, 2, 1))
    ),
    "moonshine": Family(
        "speech encoder over samples, and text decoder, rotary", windows=_convolved((127, 64, 0), (7, 3, 0), (3, 2, 0))
    ),
    "audio-spectrogram-transformer": Family(
        "patches of a spectrogram, class and distillation token apart", windows=spectrogram_windows, prefix=2
    ),
    "vit": Family("image patches, class token apart", prefix=1),
    "deit": Family("image patches, class and distillation token apart", prefix=2),
    "beit": Family("image patches, class token apart, scaled sublayers", prefix=1),
    "dinov2": Family("image patches, class token apart, scaled sublayers", prefix=1),
    "dinov2_with_registers": Family(
        "as DINOv2, registers apart too", prefix=lambda config: 1 + int(config.num_register_tokens)
    ),
    "vit_mae": Family("the image patches that are shown, class token apart", prefix=1),
    "clip_vision_model": Family("image patches, class token apart", final=False, prefix=1),
    "resnet": Family("feature maps of residual convolutions", staged=True, final=False),
    "convnext": Family("feature maps, norm after the pooling alone", staged=True, final=False),
    "convnextv2": Family("feature maps, norm after the pooling alone", staged=True, final=False),
    "efficientnet": Family("feature maps, a flat list of blocks, final after its last convolution", staged=True),
    "mobilenet_v1": Family("feature maps, a flat list of convolutions", staged=True, final=False),
    "mobilenet_v2": Family(
        "feature maps, a flat list of blocks, final after its last convolution", staged=True, final=True
    ),
    "mobilevit": Family(
        "feature maps after each stage, final after its last convolution; inside, positions a patch apart",
        staged=True,
        undivided=True,
        final=True,
        without=_UNFOLDED,
    ),
    "mobilevitv2": Family(
        "feature maps after each stage; inside, positions a patch apart",
        staged=True,
        undivided=True,
        final=False,
        without=_UNFOLDED,
    ),
    "cvt": Family(
        "attention between convolutions, class token of the last stage apart",
        staged=True,
        final=False,
        prefix=lambda config: int(any(config.cls_token)),
        prefixed=cvt_classes,
    ),
    "pvt": Family(
        "patches in stages, class token of the last stage apart; keys of fewer positions",
        staged=True,
        prefix=1,
        prefixed=pvt_classes,
    ),
    "segformer": Family("patches in stages, a norm ends each stage; keys of fewer positions", staged=True, final=False),
    "swin": Family(
        "patches in stages, merged where a stage ends; attention in windows", staged=True, without=_WINDOWED
    ),
    "swinv2": Family("as Swin, sublayers normed before they are added", staged=True, without={**_WINDOWED, **_NORMED}),
}

# Found by the general rules; these are descriptions only, the layouts are checked in tests/capture/test_family.py.
GENERAL: dict[str, str] = {
    "bert": "encoder, norm after each sublayer",
    "roberta": "encoder, as BERT",
    "xlm-roberta": "encoder, as BERT",
    "distilbert": "encoder, as BERT",
    "electra": "encoder, as BERT",
    "mpnet": "encoder, as BERT, relative bias",
    "modernbert": "encoder, norm before each sublayer, rotary, alternating windows",
    "eurobert": "encoder, as Llama without the causal mask",
    "gpt2": "decoder, norm before each sublayer",
    "gpt_neo": "decoder, alternating windows, unscaled scores",
    "gptj": "decoder, parallel sublayers, rotary",
    "codegen": "decoder, parallel sublayers, rotary",
    "gpt_neox": "decoder (Pythia), parallel sublayers, rotary",
    "opt": "decoder, both norm placements, with or without projections",
    "llama": "decoder (Llama, TinyLlama, SmolLM2), rotary",
    "mistral": "decoder, rotary, sliding window",
    "qwen2": "decoder, rotary",
    "qwen3": "decoder, rotary, normed queries and keys",
    "gemma": "decoder, rotary",
    "gemma2": "decoder, norms before and after each sublayer, capped scores",
    "phi": "decoder, parallel sublayers, rotary",
    "phi3": "decoder, rotary, fused projections",
    "starcoder2": "decoder, rotary",
    "stablelm": "decoder, partly rotary, sequential or parallel",
    "falcon": "decoder, parallel or sequential, rotary or ALiBi",
    "bloom": "decoder, ALiBi, residual added inside the sublayers",
    "mpt": "decoder, ALiBi, residual added inside the feed-forward part",
    "olmo": "decoder, rotary, norms without weights",
    "olmo2": "decoder, rotary, norm after each sublayer and before the sum",
    "t5": "encoder and decoder (T5, ByT5), relative bias, unscaled scores",
    "mt5": "encoder and decoder, as T5",
    "umt5": "encoder and decoder, as T5, a bias in every block",
    "bart": "encoder and decoder, norm after each sublayer",
}


# Families that are not supported, and why.
REFUSED: dict[str, str] = {
    "funnel": "its encoder shortens the sequence between several lists of blocks, and its decoder reads two of them",
    "squeezebert": "it calls the forward of its blocks directly, past every hook, with channels before positions",
}


OTHER = Family("found by the general rules")


def family_of(config: Any) -> Family:
    """The row of a model's configuration; `OTHER` where its family has none."""
    return FAMILIES.get(str(getattr(config, "model_type", "")), OTHER)


def list_families() -> list[dict[str, str]]:
    """Name, description and what the tests verify of every family known by name.

    >>> [row["about"] for row in list_families() if row["name"] == "bert"]
    ['encoder, norm after each sublayer']
    """
    rows = {**GENERAL, **{name: family.about for name, family in FAMILIES.items()}}
    return [{"name": name, "about": rows[name], "verified": _verified(name)} for name in sorted(rows)]


def _verified(name: str) -> str:
    family = FAMILIES.get(name, OTHER)
    sites = "embed, resid, final, attn_in, attn_out, mlp_in, mlp_out"
    if family.staged:
        attends = name in ("cvt", "pvt", "segformer", "swin", "swinv2")
        return "embed, resid, stage, stage_mean, final" + (", query, key, scores" if attends else "")
    if name == "mamba":
        return "embed, resid, final"
    return sites if family.attention else f"{sites}, query, key" + ("" if name == "gemma2" else ", scores")
