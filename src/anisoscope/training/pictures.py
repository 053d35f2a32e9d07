"""Pictures as examples of classifiers: a vision transformer, and its convolutional counterparts."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from anisoscope.data.images import read_images
from anisoscope.data.media_files import ARRAYS, labelled_arrays
from anisoscope.data.synthetic import make_picture
from anisoscope.errors import AnisoscopeError
from anisoscope.results.modality import CONVOLUTION, IMAGES_DATA, VISION
from anisoscope.training.config import ClassifierConfig
from anisoscope.training.examples import ClassCounts, ExampleKind, Labelled, MediaModelKind, class_folders

STAGES = (0.5, 1.0, 2.0)  # width of each stage of a convolutional model relative to the vision transformer
# of EfficientNet-B0, which has scale 1: its first layer, and the middle stage where the last one has 320 channels
_EFFICIENTNET_FIRST, _EFFICIENTNET_WIDTH = 32, 160


def _read(data: str, size: int, *, most: int, counts: ClassCounts) -> Labelled:
    """From `digits` (scikit-learn's), a folder with a folder for each class, MNIST's idx files, or an .npz."""
    path = Path(data)
    arrays = _digits() if data == "digits" else labelled_arrays(path)
    if arrays is not None:
        for image, label in islice(zip(*arrays, strict=True), most):
            image = image[:, :, None] if image.ndim == 2 else image
            coloured = image if image.shape[2] == 3 else image.repeat(3, axis=2)
            yield square(coloured, size), str(label)
        return
    folders = class_folders(path, "pictures")
    if not folders:
        raise AnisoscopeError(f"{str(path)!r} holds no folders; expected one for each class of pictures, {ARRAYS}")
    counts.classes = [folder.name for folder in folders]
    for folder in folders:
        for picture in islice(read_images(str(folder), counts=counts), -(-most // len(folders))):
            yield square(picture.array, size), folder.name


def _processor(size: int) -> dict[str, Any]:
    side = {"height": size, "width": size}
    settings = {"image_processor_type": "ViTImageProcessor", "do_resize": True, "size": side, "do_rescale": True}
    norms = {"do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return {**settings, "rescale_factor": 1 / 255, **norms}


def _inputs(values: Tensor) -> dict[str, Tensor]:
    """Pixels within ±1, channels first."""
    return {"pixel_values": (values / 255 - 0.5).div_(0.5).permute(0, 3, 1, 2).contiguous()}


def square(image: np.ndarray, size: int) -> np.ndarray:
    """The central square of a picture, scaled to `size` pixels.

    >>> square(np.zeros((40, 60, 3), np.uint8), 32).shape
    (32, 32, 3)
    """
    height, width = image.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    image = image[top : top + side, left : left + side]
    if side == size:
        return image
    from PIL import Image

    scaled = Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(scaled, dtype=np.uint8)


def _digits() -> tuple[np.ndarray, np.ndarray]:
    """The 8 × 8 digits that come with scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise AnisoscopeError("'digits' needs scikit-learn; install it, or give another --images.") from error
    digits = load_digits()
    return (digits.images * (255 / 16)).round().astype(np.uint8), digits.target


def _vit(config: ClassifierConfig) -> dict[str, Any]:
    dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), config.dropout)
    sizes = {"hidden_size": config.width, "num_hidden_layers": config.layers, "num_attention_heads": config.heads}
    sizes |= {"intermediate_size": 4 * config.width, "image_size": config.size, "patch_size": config.patch}
    return {**sizes, **dropout}


def _convnext(config: ClassifierConfig) -> dict[str, Any]:
    """The counterpart of the ViT: as many blocks, about as many parameters, the same first patches.

    The usual layer scale of 10⁻⁶, meant for hundreds of epochs, is off: after a brief training the blocks would still
    do nothing.
    """
    sizes: dict[str, Any] = {"num_stages": len(STAGES), **_stages(config)}
    sizes |= {"patch_size": config.patch, "image_size": config.size}
    return {**sizes, "layer_scale_init_value": 0.0, "drop_path_rate": config.dropout}


def _resnet(config: ClassifierConfig) -> dict[str, Any]:
    """Blocks of two 3 × 3 convolutions with batch norms; every stage ends in a ReLU. No part of it drops anything."""
    stages = _stages(config)
    return {**stages, "embedding_size": stages["hidden_sizes"][0], "layer_type": "basic"}


def _efficientnet(config: ClassifierConfig) -> dict[str, Any]:
    """Inverted residual blocks with squeeze and excitation; every stage ends in a batch norm, without a ReLU.

    transformers' momentum of .99 is TensorFlow's; here it would keep the statistics of the last batch alone. With its
    weights of deviation .02 the variances would fall below the ε of the norms.
    """
    scale = config.width / _EFFICIENTNET_WIDTH  # of all widths: those of the first and the last layer are fixed
    widths, repeats = [int(share * _EFFICIENTNET_WIDTH) for share in STAGES], stage_depths(config.layers)
    sizes: dict[str, Any] = {"in_channels": [_EFFICIENTNET_FIRST, *widths[:-1]]}
    sizes |= {"out_channels": widths, "strides": [1, 2, 2]}
    sizes |= {"num_block_repeats": repeats, "kernel_sizes": [3] * len(widths), "expand_ratios": [4] * len(widths)}
    sizes |= {"width_coefficient": scale, "depth_coefficient": 1.0, "hidden_dim": max(8, round(160 * scale) * 8)}
    norms = {"batch_norm_momentum": 0.1, "initializer_range": 0.25}
    dropped = {"dropout_rate": config.dropout, "drop_connect_rate": config.dropout}
    return {**sizes, **norms, **dropped, "image_size": config.size}


def _stages(config: ClassifierConfig) -> dict[str, list[int]]:
    """Width and blocks of every stage."""
    widths = [max(1, int(share * config.width)) for share in STAGES]
    return {"hidden_sizes": widths, "depths": stage_depths(config.layers)}


def stage_depths(layers: int) -> list[int]:
    """Blocks of each stage, most of them in the middle.

    >>> stage_depths(4), stage_depths(6)
    ([1, 2, 1], [1, 4, 1])
    """
    outer = max(1, layers // 6)
    return [outer, max(1, layers - 2 * outer), outer]


def _patches(config: ClassifierConfig) -> int:
    return (config.size // config.patch) ** 2


def _after_stem(stride: int) -> Callable[[ClassifierConfig], int]:
    """Positions of the first stage where the architecture fixes how much its first layers shrink a picture."""
    return lambda config: math.ceil(config.size / stride) ** 2


PICTURES = ExampleKind(
    IMAGES_DATA,
    extent="size",
    noun=IMAGES_DATA.noun,
    unit="pixels",
    most_generated=8192,
    generate=make_picture,
    read=_read,
    inputs=_inputs,
    processor=_processor,
)
KINDS = (  # ResNet's first layers halve a picture twice, those of EfficientNet once: their patches are not an option
    MediaModelKind(
        "vit",
        "ViTForImageClassification",
        VISION,
        PICTURES,
        _patches,
        _vit,
        halvings=0,
        others={"masked": "ViTForMaskedImageModeling"},
    ),
    MediaModelKind(
        "convnext", "ConvNextForImageClassification", CONVOLUTION, PICTURES, _patches, _convnext, halvings=2
    ),
    MediaModelKind("resnet", "ResNetForImageClassification", CONVOLUTION, PICTURES, _after_stem(4), _resnet),
    MediaModelKind(
        "efficientnet", "EfficientNetForImageClassification", CONVOLUTION, PICTURES, _after_stem(2), _efficientnet
    ),
)
