"""The parts of one block: attention and feed-forward, recognised by name, and where what they add can be read."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import nn

from anisoscope.capture.attention.rotation import rotates
from anisoscope.capture.sites.site import CALLED_KINDS, CROSS_KINDS, ROTARY_KINDS, SELF_KINDS

KINDS_OF_BLOCK = ("attn_in", "attn_out", "mlp_in", "mlp_out", *CALLED_KINDS)
ABSENT = {  # why most models have no such site, which is no lack
    **dict.fromkeys(ROTARY_KINDS, "its attention calls no rotary function"),
    **dict.fromkeys(CROSS_KINDS, "its blocks do not attend to another stack"),
}

_SELF = ("self_attn", "self_attention", "attn", "attention", "SelfAttention", "layer.0.SelfAttention")
_CROSS = ("encoder_attn", "crossattention", "cross_attn", "cross_attention", "layer.1.EncDecAttention")
_FEED = ("mlp", "feed_forward", "ffn", "ff", "feedforward", "block_sparse_moe", "moe", "layer.1.DenseReluDense")
_FEED_PAIRS = (("intermediate", "output.dense"), ("ffn", "ffn_output"), ("fc1", "fc2"), ("linear1", "linear2"))
_FEED_LAST = ("layer.2.DenseReluDense", *_FEED)
# Norms and scales that act on a sublayer's output before it is added. `post_attention_layernorm` is one only beside a
# norm after the feed-forward part; `post_mlp_layernorm` only beside a norm before the attention.
_AFTER_ATTENTION = ("layer_scale1", "post_self_attn_layernorm", "post_attention_layernorm", "post_attention_norm")
_AFTER_FEED = ("layer_scale2", "post_feedforward_layernorm", "post_ffw_layernorm", "post_feedforward_norm")


@dataclass(frozen=True)
class Place:
    """The input ("in") or output ("out") of a module, times a scale where the block scales what it adds."""

    path: str
    side: str
    scale: float = 1.0
    gain: str = ""  # path of a weight that multiplies each channel on top


def child(module: nn.Module, paths: Iterable[str]) -> str:
    """The first of these paths that the module has, or ""."""
    for path in paths:
        try:
            if isinstance(module.get_submodule(path), nn.Module):
                return path
        except AttributeError:
            continue
    return ""


def attention_of(block: nn.Module) -> str:
    """Path of a block's self-attention, or ""."""
    return child(block, _SELF)


def places_of(block: nn.Module, prefix: str, *, scale: float = 1.0) -> dict[str, Place]:
    """Where each kind is read in a block, by kind; kinds that cannot be found are left out."""
    found: dict[str, Place] = {}
    attention = attention_of(block)
    sandwich = child(block, _AFTER_FEED)
    if not sandwich and child(block, ("input_layernorm",)):
        sandwich = child(block, ("post_mlp_layernorm",))
    if attention:
        added = (child(block, _AFTER_ATTENTION) if sandwich else "") or _added_by_attention(block, attention)
        found["attn_in"] = Place(attention, "in")
        found["attn_out"] = Place(added, "out", scale, _gain(block, "lambda_1"))
        kinds = (*SELF_KINDS, *ROTARY_KINDS) if rotates(block.get_submodule(attention)) else SELF_KINDS
        found |= {kind: Place(attention, "call") for kind in kinds}
    reads, adds = _feed_forward(block)
    if reads:
        found["mlp_in"] = Place(reads, "in")
        found["mlp_out"] = Place(sandwich or adds, "out", scale, _gain(block, "lambda_2"))
    cross = child(block, _CROSS)
    if cross:
        found["cross_out"] = Place(_added_by_attention(block, cross), "out", scale)
        found |= {kind: Place(cross, "call") for kind in CROSS_KINDS}
    return {
        kind: replace(place, path=f"{prefix}.{place.path}", gain=place.gain and f"{prefix}.{place.gain}")
        for kind, place in found.items()
    }


def _gain(block: nn.Module, name: str) -> str:
    """A weight of the block itself that scales what a sublayer adds (BEiT), or ""."""
    return name if isinstance(getattr(block, name, None), nn.Parameter) else ""


def _added_by_attention(block: nn.Module, path: str) -> str:
    """The module whose output is what the attention adds, where the attention itself already contains the sum."""
    attention = block.get_submodule(path)
    inner = child(attention, ("output.dense",))
    if inner:
        return f"{path}.{inner}"
    normed = any("norm" in name.lower() for name, _ in attention.named_children())
    if normed and child(attention, ("LayerNorm",)):
        inner = child(attention, ("dense", "attn.o"))
    elif _takes_residual(attention):
        inner = child(attention, ("dense", "out_proj"))
    return f"{path}.{inner}" if inner else path


def _feed_forward(block: nn.Module) -> tuple[str, str]:
    """Paths of the module that reads and of the module whose output is added."""
    for reads, adds in _FEED_PAIRS:
        if child(block, (reads,)) and child(block, (adds,)):
            return reads, adds
    path = child(block, _FEED_LAST)
    if path and _takes_residual(block.get_submodule(path)):
        inner = child(block.get_submodule(path), ("dense_4h_to_h", "down_proj", "fc2"))
        return path, f"{path}.{inner}" if inner else path
    return path, path


def _takes_residual(module: nn.Module) -> bool:
    return "residual" in inspect.signature(module.forward).parameters
