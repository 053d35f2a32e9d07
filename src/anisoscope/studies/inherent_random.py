"""Further families with random weights, small: what the architecture alone does in each modality."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LAYERS, WIDTH, HEADS, PIXELS = 4, 64, 4, 64
_SIZES: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
_BLOCKS: dict[str, Any] = {**_SIZES, "intermediate_size": 4 * WIDTH}
_PATCHES: dict[str, Any] = {**_BLOCKS, "image_size": PIXELS, "patch_size": 8}
_FRAMES: dict[str, Any] = {"conv_dim": [32] * 4, "conv_kernel": [10, 8, 4, 4], "conv_stride": [5, 8, 4, 2]}
_SPEECH: dict[str, Any] = {
    **_BLOCKS,
    **_FRAMES,
    "num_feat_extract_layers": 4,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "layerdrop": 0.0,
}
_T5: dict[str, Any] = {"d_model": WIDTH, "d_kv": 16, "d_ff": 4 * WIDTH, "num_layers": LAYERS, "num_heads": HEADS}
_SIDES: dict[str, Any] = {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in {"layers": LAYERS, "attention_heads": HEADS, "ffn_dim": 4 * WIDTH}.items()
}


@dataclass(frozen=True)
class Family:
    """One architecture of transformers at a small size, and what it reads."""

    model_type: str
    data: str  # text, images or audio
    fields: dict[str, Any] = field(default_factory=dict)
    norms: bool = False  # has batch norms, which must see data before they do anything
    words: bool = False  # reads the tokens that the text arms are trained on, not single bytes


FAMILIES: dict[str, Family] = {
    "roberta": Family("roberta", "text", {**_BLOCKS, "max_position_embeddings": 514}, words=True),
    "t5": Family("t5", "text", _T5, words=True),
    "canine": Family("canine", "text", {**_BLOCKS, "num_hash_buckets": 512, "max_position_embeddings": 512}),
    "byt5": Family("t5", "text", {**_T5, "vocab_size": 384, "feed_forward_proj": "gated-gelu"}),
    "hubert": Family("hubert", "audio", _SPEECH),
    "whisper": Family(
        "whisper",
        "audio",
        {
            "d_model": WIDTH,
            "vocab_size": 512,
            "num_mel_bins": 40,
            "max_source_positions": 400,
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
            "decoder_start_token_id": 1,
            **_SIDES,
        },
    ),
    "beit": Family("beit", "images", _PATCHES),
    "deit": Family("deit", "images", _PATCHES),
    "segformer": Family(
        "segformer",
        "images",
        {
            "num_encoder_blocks": 3,
            "depths": [1, 2, 1],
            "hidden_sizes": [32, WIDTH, 128],
            "num_attention_heads": [1, 2, 4],
            "sr_ratios": [4, 2, 1],
            "patch_sizes": [7, 3, 3],
            "strides": [4, 2, 2],
            "mlp_ratios": [4, 4, 4],
        },
    ),
    "swin": Family(
        "swin",
        "images",
        {
            "image_size": PIXELS,
            "patch_size": 4,
            "embed_dim": 32,
            "depths": [1, 2, 1],
            "num_heads": [2, 4, 4],
            "window_size": 4,
        },
    ),
    "resnet": Family(
        "resnet",
        "images",
        {"embedding_size": 32, "hidden_sizes": [32, WIDTH, 128], "depths": [2, 2, 2], "layer_type": "basic"},
        norms=True,
    ),
    "mobilenet_v2": Family("mobilenet_v2", "images", {"image_size": PIXELS, "depth_multiplier": 0.35}, norms=True),
    "efficientnet": Family(
        "efficientnet",
        "images",
        {
            "image_size": PIXELS,
            "width_coefficient": 0.25,
            "depth_coefficient": 0.25,
            "hidden_dim": 320,
            # transformers' 0.02 is so little here that variances fall below what the norms add to them
            "initializer_range": 0.25,
        },
        norms=True,
    ),
    "cvt": Family(
        "cvt", "images", {"embed_dim": [16, 32, WIDTH], "num_heads": [1, 2, 4], "depth": [1, 2, 3]}, norms=True
    ),
}


def random_name(family: str) -> str:
    """What such a model is called in the table.

    >>> random_name("swin")
    'swin-random'
    """
    return f"{family}-random"


def write_configuration(family: str, folder: Path, *, vocabulary: int = 512) -> Path:
    """The configuration of a family in a folder of its own, from which `profile --random-init` makes a model."""
    from anisoscope.capture.checkpoints import fresh_config

    row = FAMILIES[family]
    path = folder / random_name(family)
    if not (path / "config.json").is_file():
        described = fresh_config(row.model_type, row.fields)
        if hasattr(described, "image_size") or row.data == "images":
            described.image_size = PIXELS
        if row.words:
            described.vocab_size = vocabulary
        described.save_pretrained(str(path))
    return path
