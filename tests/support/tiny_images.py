"""Tiny randomly initialised models that read images in stages, with statistics of batch norms that matter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_SIZES = {"depths": [2, 1, 2, 1], "hidden_sizes": [8, 12, 16, 24], "num_channels": 3}
_EFFICIENT = {
    "depthwise_padding": [], "in_channels": [160, 160, 320], "out_channels": [160, 320, 480], "hidden_dim": 64,
    "num_block_repeats": [1, 2, 2], "strides": [1, 2, 2], "kernel_sizes": [3, 3, 5], "expand_ratios": [1, 2, 2],
    "width_coefficient": 0.05, "depth_coefficient": 1.0,
}  # fmt: skip
_CVT = {
    "embed_dim": [8, 12, 16], "num_heads": [1, 2, 2], "depth": [1, 2, 3], "mlp_ratio": [2.0, 2.0, 2.0],
    "drop_rate": [0.0, 0.0, 0.0], "drop_path_rate": [0.0, 0.0, 0.0],
}  # fmt: skip
_SEGFORMER = {
    "depths": [1, 2, 1, 1], "hidden_sizes": [8, 8, 16, 16], "num_attention_heads": [1, 2, 2, 4],
    "mlp_ratios": [2, 2, 2, 2], "decoder_hidden_size": 16,
}  # fmt: skip
_PVT = {
    "image_size": 64, "depths": [1, 2, 1, 2], "hidden_sizes": [8, 8, 16, 16], "num_attention_heads": [1, 2, 2, 4],
    "sequence_reduction_ratios": [8, 4, 2, 1], "mlp_ratios": [2, 2, 2, 2],
}  # fmt: skip
_SWIN = {
    "image_size": 32,
    "patch_size": 4,
    "embed_dim": 8,
    "depths": [2, 2, 1],
    "num_heads": [2, 2, 4],
    "window_size": 2,
}

_UNFOLDED = {"image_size": 64, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 12, 16, 20, 24, 32]}
_SEPARABLE = {
    "image_size": 64,
    "width_multiplier": 0.25,
    "base_attn_unit_dims": [32, 48, 64],
    "n_attn_blocks": [2, 1, 2],
}
_SWIFT = {"embed_dims": [8, 8, 16, 16], "mlp_ratio": 2}

# name -> (configuration class, options, model class)
IMAGES: dict[str, tuple[str, dict[str, Any], str]] = {
    "resnet": ("ResNetConfig", {**_SIZES, "embedding_size": 8, "layer_type": "basic"}, "ResNetModel"),
    "resnet-bottleneck": (
        "ResNetConfig",
        {**_SIZES, "embedding_size": 8, "layer_type": "bottleneck"},
        "ResNetForImageClassification",
    ),
    "convnext": ("ConvNextConfig", _SIZES, "ConvNextModel"),
    "convnext-head": ("ConvNextConfig", _SIZES, "ConvNextForImageClassification"),
    "convnextv2": ("ConvNextV2Config", _SIZES, "ConvNextV2Model"),
    "efficientnet": ("EfficientNetConfig", _EFFICIENT, "EfficientNetModel"),
    "mobilenet_v1": ("MobileNetV1Config", {"depth_multiplier": 0.25}, "MobileNetV1Model"),
    "mobilenet_v2": ("MobileNetV2Config", {"depth_multiplier": 0.25}, "MobileNetV2Model"),
    "mobilenet_v2-head": ("MobileNetV2Config", {"depth_multiplier": 0.25}, "MobileNetV2ForImageClassification"),
    "mobilevit": ("MobileViTConfig", _UNFOLDED, "MobileViTModel"),
    "mobilevit-head": ("MobileViTConfig", _UNFOLDED, "MobileViTForImageClassification"),
    "mobilevitv2": ("MobileViTV2Config", _SEPARABLE, "MobileViTV2Model"),
    "cvt": ("CvtConfig", _CVT, "CvtModel"),
    "cvt-head": ("CvtConfig", _CVT, "CvtForImageClassification"),
    "pvt": ("PvtConfig", _PVT, "PvtModel"),
    "pvt-head": ("PvtConfig", _PVT, "PvtForImageClassification"),
    "segformer": ("SegformerConfig", _SEGFORMER, "SegformerModel"),
    "segformer-maps": ("SegformerConfig", _SEGFORMER, "SegformerForSemanticSegmentation"),
    "segformer-flat": ("SegformerConfig", {**_SEGFORMER, "reshape_last_stage": False}, "SegformerModel"),
    "swin": ("SwinConfig", _SWIN, "SwinModel"),
    "swin-head": ("SwinConfig", _SWIN, "SwinForImageClassification"),
    "swinv2": ("Swinv2Config", _SWIN, "Swinv2Model"),
    "swinv2-two": ("Swinv2Config", {**_SWIN, "depths": [2, 1], "num_heads": [2, 4]}, "Swinv2Model"),
}
# Families that no row names: found by how they are built.
UNNAMED: dict[str, tuple[str, dict[str, Any], str]] = {
    "regnet": ("RegNetConfig", {**_SIZES, "embedding_size": 8, "groups_width": 4}, "RegNetModel"),
    "poolformer": (
        "PoolFormerConfig",
        {"depths": [2, 1, 2, 1], "hidden_sizes": [8, 12, 16, 24], "mlp_ratio": 2.0, "layer_scale_init_value": 0.5},
        "PoolFormerModel",
    ),
    "swiftformer": ("SwiftFormerConfig", {**_SWIFT, "depths": [1, 1, 2, 1]}, "SwiftFormerModel"),
    "swiftformer-deep": ("SwiftFormerConfig", {**_SWIFT, "depths": [3, 2, 3, 4]}, "SwiftFormerModel"),
    "bit": ("BitConfig", {**_SIZES, "embedding_size": 8, "num_groups": 4}, "BitModel"),
}


def tiny_images(name: str) -> nn.Module:
    """The model of a name, the same one at every call, in evaluation mode."""
    import transformers

    kind, options, model = {**IMAGES, **UNNAMED}[name]
    torch.manual_seed(sum(map(ord, name)))
    made = getattr(transformers, model)(getattr(transformers, kind)(**options)).eval()
    with torch.no_grad():
        for part in made.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.running_mean.normal_(0, 0.1)  # type: ignore[union-attr]
                part.running_var.uniform_(0.5, 2.0)  # type: ignore[union-attr]
                part.weight.uniform_(0.5, 1.5)
            elif isinstance(part, (nn.Conv2d, nn.Linear)):
                nn.init.normal_(part.weight, 0, (2.0 / part.weight[0].numel()) ** 0.5)
            if getattr(part, "layer_scale_parameter", None) is not None:
                nn.init.normal_(part.layer_scale_parameter, 0.5, 0.1)
    return made


def images(count: int = 3, size: tuple[int, int] = (64, 48), seed: int = 0) -> Tensor:
    """Random images [B, 3, H, W]."""
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(seed))
