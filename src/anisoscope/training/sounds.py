"""Sounds as examples of classifiers: windows of recordings, read by a wav2vec2."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from anisoscope.data.audio import RATE, read_audio
from anisoscope.data.synthetic import make_clip
from anisoscope.data.text import files_in
from anisoscope.errors import AnisoscopeError
from anisoscope.results.modality import SOUNDS_DATA, SPEECH
from anisoscope.training.config import ClassifierConfig
from anisoscope.training.examples import ClassCounts, ExampleKind, Labelled, MediaModelKind, class_folders

KERNELS, STRIDES = (10, 8, 4, 4), (5, 8, 4, 2)  # of the convolutions that turn samples into frames, one every 20 ms
FEWEST = 8  # frames of a window
_EDGES = 2 * KERNELS[0]  # samples added to the shortest sound for the edges of the convolutions
_QUIET = 1e-7  # added to the variance of a sound, as transformers does


def _generate(index: int, *, seconds: float) -> tuple[np.ndarray, int]:
    samples, label = make_clip(index, seconds=seconds, rate=RATE)
    return _integers(samples), label


def _read(data: str, seconds: float, *, most: int, counts: ClassCounts) -> Labelled:
    """From a folder with a folder of recordings for each class, or of recordings, each a class of its own."""
    path = Path(data)
    loose = path.is_dir() and any(each.suffix.lower() in SOUNDS_DATA.suffixes for each in path.iterdir())
    sources = _recordings(path) if loose else class_folders(path, "recordings")
    counts.classes = [os.path.relpath(source, path) for source in sources]
    for source, name in zip(sources, counts.classes, strict=True):
        for samples in islice(_windows(source, seconds, counts=counts), -(-most // len(sources))):
            yield _integers(samples), name


def _windows(source: Path, seconds: float, *, counts: ClassCounts) -> Iterator[np.ndarray]:
    """The whole windows of a recording, or of all in a folder."""
    for file in [source] if source.is_file() else _recordings(source):
        count, skipped = 0, len(counts.skipped)
        for clip in read_audio(file, rate=RATE, seconds=seconds, counts=counts):
            if len(clip.samples) == round(seconds * RATE):
                count += 1
                yield clip.samples
            else:  # an incomplete last window
                counts.dropped_pieces += 1
        if not count and len(counts.skipped) == skipped:
            counts.useless.append(str(file))


def _recordings(path: Path) -> list[Path]:
    return [each for each in files_in(path) if each.suffix.lower() in SOUNDS_DATA.suffixes]


def _integers(samples: np.ndarray) -> np.ndarray:
    """Samples within ±1 as int16."""
    return np.clip(np.rint(samples * 32767), -32768, 32767).astype(np.int16)


def _processor(seconds: float) -> dict[str, Any]:
    settings: dict[str, Any] = {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "do_normalize": True}
    settings |= {"sampling_rate": RATE, "feature_size": 1, "padding_value": 0.0, "return_attention_mask": False}
    return settings


def _inputs(values: Tensor) -> dict[str, Tensor]:
    x = values / 32767  # back to ±1, so that _QUIET has the same effect as in transformers
    x = (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True, unbiased=False) + _QUIET).sqrt()
    return {"input_values": x}


def frames(samples: int) -> int:
    """The number of frames of a sound of so many samples (no padding).

    >>> frames(16_000)
    48
    """
    for kernel, stride in zip(KERNELS, STRIDES, strict=True):
        samples = (samples - kernel) // stride + 1
    return samples


def _positions(config: ClassifierConfig) -> int:
    count = frames(round(config.seconds * RATE))
    if count < FEWEST:
        least = (FEWEST * prod(STRIDES) + _EDGES) / RATE
        raise AnisoscopeError(f"seconds is {config.seconds}; expected at least {least:.2f}, which is eight frames.")
    return count


def _wav2vec2(config: ClassifierConfig) -> dict[str, Any]:
    """Convolutions turn samples into frames; masking is off but where frames to mask are given.

    Otherwise transformers draws them itself, from numpy's global generator.
    """
    sizes: dict[str, Any] = {"hidden_size": config.width, "num_hidden_layers": config.layers}
    sizes |= {"num_attention_heads": config.heads, "intermediate_size": 4 * config.width}
    sizes |= {"conv_dim": [config.width // 2] * len(KERNELS), "conv_kernel": list(KERNELS)}
    sizes |= {"conv_stride": list(STRIDES), "classifier_proj_size": config.width}
    sizes |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": config.heads}
    norms = {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True}
    parts = ("hidden_dropout", "attention_dropout", "activation_dropout")
    off = {"feat_proj_dropout": 0.0, "final_dropout": 0.0, "layerdrop": 0.0, "apply_spec_augment": False}
    return {**sizes, **norms, **dict.fromkeys(parts, config.dropout), **off}


SOUNDS = ExampleKind(
    SOUNDS_DATA,
    extent="seconds",
    noun="windows of sound",
    unit="samples",
    most_generated=2048,
    generate=_generate,
    read=_read,
    inputs=_inputs,
    processor=_processor,
    in_time=True,
    remedy=", or several recordings, or a shorter window",
)
KINDS = (
    MediaModelKind(
        "wav2vec2",
        "Wav2Vec2ForSequenceClassification",
        SPEECH,
        SOUNDS,
        _positions,
        _wav2vec2,
        others={"ctc": "Wav2Vec2ForCTC", "masked": "Wav2Vec2ForPreTraining"},
    ),
)
