"""The table of model families: a row only where the general rules of `layout.py` do not suffice.

A new family needs no row when its blocks are the one list of the configured length and its parts have usual names.
Otherwise add a `Family` to `FAMILIES` under the configuration's `model_type`, and a tiny configuration to
`tests/test_families.py`; the tests then check it numerically.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.capture.index import Windows

Blocks = Callable[[nn.Module, Any], "list[str]"]
"""(backbone, configuration) -> path of the block applied at each layer, relative to the backbone."""


@dataclass(frozen=True)
class Family:
    """What is special about one family of models.

    `blocks` gives the path of the module applied at each layer, one entry per application (a shared block repeats).
    `hidden` maps (number of blocks, length of the model's own `hidden_states`) to the layer each entry must equal,
    None where it has no site. `windows` relates a lower resolution to the input's. `final` False: what looks like a
    final norm is none. `attention` says for which layers query, key and scores cannot be had, and why.
    """

    about: str
    blocks: Blocks | None = None
    hidden: Callable[[int, int], list[int | None]] | None = None
    windows: Callable[[Any], Windows] | None = None
    final: Callable[[Any], bool] | None = None
    attention: Callable[[int, int], str] | None = None  # (layer, number of blocks) -> reason, "" where all is well


def albert_blocks(backbone: nn.Module, config: Any) -> list[str]:
    """ALBERT applies each layer of a group once per hidden layer of the group."""
    per_group = config.num_hidden_layers / config.num_hidden_groups
    groups = [int(i / per_group) for i in range(config.num_hidden_layers)]
    inner = range(config.inner_group_num)
    return [f"encoder.albert_layer_groups.{g}.albert_layers.{j}" for g in groups for j in inner]


def canine_blocks(backbone: nn.Module, config: Any) -> list[str]:
    """CANINE: one block on characters, the deep blocks on molecules of several characters, one block on characters."""
    lists = ("initial_char_encoder.layer", "encoder.layer", "final_char_encoder.layer")
    return [f"{path}.{i}" for path in lists for i in range(len(backbone.get_submodule(path)))]  # type: ignore[arg-type]


def canine_hidden(blocks: int, given: int) -> list[int | None]:
    """CANINE's own hidden states repeat the input of each of its three encoders."""
    deep = blocks - 2
    return [0, 1, None, *range(2, 2 + deep), None, blocks]


def canine_windows(config: Any) -> Windows:
    """Molecule 0 is the first character again; molecule j reads characters r(j-1) … rj-1 of rate r."""
    rate = config.downsampling_rate

    def windows(length: int, rows: int) -> tuple[Tensor, Tensor]:
        start = (torch.arange(rows) - 1).clamp(min=0) * rate
        stop = torch.arange(rows) * rate
        stop[0] = 1
        return start.clamp(max=length), stop.clamp(max=length)

    return windows


def mamba_hidden(blocks: int, given: int) -> list[int | None]:
    """Mamba's own hidden states start after the first block."""
    return [*range(1, blocks + 1), blocks]


def padding_windows(config: Any) -> Windows:
    """A model that lengthens its input on the right: row j reads position j, and what it added is no data."""

    def windows(length: int, rows: int) -> tuple[Tensor, Tensor]:
        start = torch.arange(rows).clamp(max=length)
        return start, start + 1

    return windows


def local_attention(layer: int, blocks: int) -> str:
    """Attention computed in bands or chunks."""
    return "its attention is computed in bands"


def canine_attention(layer: int, blocks: int) -> str:
    """The first block attends within chunks, so that its queries and keys come in pieces."""
    return "the first block attends within chunks of characters" if layer == 1 else ""


def deberta_attention(layer: int, blocks: int) -> str:
    """DeBERTa's scores are not one product of queries with keys."""
    return "its scores are a sum of content and position products"


FAMILIES: dict[str, Family] = {
    "albert": Family("one shared layer: as many sites as applications", blocks=albert_blocks),
    "canine": Family(
        "characters, then molecules of several characters, then characters again",
        blocks=canine_blocks,
        hidden=canine_hidden,
        windows=canine_windows,
        attention=canine_attention,
    ),
    "deberta": Family("disentangled attention", final=lambda config: False, attention=deberta_attention),
    "deberta-v2": Family("disentangled attention", final=lambda config: False, attention=deberta_attention),
    "mamba": Family("state space, no attention", hidden=mamba_hidden),
    "longformer": Family("banded attention, lengthens its input", windows=padding_windows, attention=local_attention),
    "wav2vec2": Family("frames of speech", final=lambda config: bool(config.do_stable_layer_norm)),
    "hubert": Family("frames of speech", final=lambda config: bool(config.do_stable_layer_norm)),
}

# Found by the general rules; the words are for people, the numbers are checked in tests/test_families.py.
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
    "whisper": "speech encoder and text decoder",
    "vit": "image patches",
}


def family_of(config: Any) -> Family | None:
    """The row of a model's configuration, if its family has one."""
    return FAMILIES.get(str(getattr(config, "model_type", "")))


def list_families() -> list[dict[str, str]]:
    """Name, description and what the tests verify of every family known by name.

    >>> [row["about"] for row in list_families() if row["name"] == "bert"]
    ['encoder, norm after each sublayer']
    """
    rows = {**GENERAL, **{name: family.about for name, family in FAMILIES.items()}}
    return [{"name": name, "about": rows[name], "verified": _verified(name)} for name in sorted(rows)]


def _verified(name: str) -> str:
    family = FAMILIES.get(name)
    sites = "embed, resid, final, attn_in, attn_out, mlp_in, mlp_out"
    if name == "mamba":
        return "embed, resid, final"
    if family is not None and family.attention in (deberta_attention, local_attention):
        return sites
    return f"{sites}, query, key" + ("" if name == "gemma2" else ", scores")
