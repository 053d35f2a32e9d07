"""Folders of tiny random models that hear or see, as `save_pretrained` leaves them, and data for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.io import wavfile

from anisoscope.capture import find_layout
from anisoscope.capture.capture import Capture
from anisoscope.data.synthetic import make_clip, make_picture
from anisoscope.measurement.config import ProfileConfig
from anisoscope.measurement.feed import Feed, make_feed
from anisoscope.models.load import Loaded, load_model

_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_FRAMES = {"conv_dim": [16, 16, 16], "conv_kernel": [10, 8, 4], "conv_stride": [5, 8, 4], "num_feat_extract_layers": 3,
           "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "vocab_size": 20}  # fmt: skip
_SIDES = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in
          (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))}  # fmt: skip
_IDS = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 4}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "wav2vec2": ("Wav2Vec2Config", "Wav2Vec2Model", {**_SIZES, **_FRAMES}),
    "whisper": (
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {"vocab_size": 60, "d_model": 32, "num_mel_bins": 8, "max_source_positions": 200, "max_target_positions": 80,
         "begin_suppress_tokens": None, "suppress_tokens": None, **_SIDES, **_IDS},
    ),
    "moonshine": (
        "MoonshineConfig",
        "MoonshineForConditionalGeneration",
        {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 80,
         **{f"{side}_num_{name}": size for side in ("encoder", "decoder") for name, size in
            (("hidden_layers", 2), ("attention_heads", 4), ("key_value_heads", 4))}, **_IDS},
    ),
    "vit": ("ViTConfig", "ViTModel", {**_SIZES, "image_size": 24, "patch_size": 8}),
    "dinov2": ("Dinov2Config", "Dinov2Model", {**_SIZES, "image_size": 28, "patch_size": 7}),
    "resnet": ("ResNetConfig", "ResNetModel", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 1],
                                               "layer_type": "basic"}),
}  # fmt: skip


def make_model(folder: Path, name: str, *, seed: int = 0, **more: Any) -> Path:
    """Save a tiny model, its weights large enough that every part matters."""
    import transformers

    config, model, options = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = getattr(transformers, model)(getattr(transformers, config)(**{**options, **more}))
        with torch.no_grad():
            for parameter in made.parameters():
                if parameter.dim() > 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    made.save_pretrained(folder)
    return folder


def make_sounds(folder: Path, seconds: tuple[float, ...] = (1.5, 2.0, 3.2), rate: int = 16_000) -> Path:
    """Clips of these lengths."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, length in enumerate(seconds):
        wavfile.write(folder / f"clip{number}.wav", rate, make_clip(number, seconds=length, rate=rate)[0])
    return folder


def make_pictures(folder: Path, sizes: tuple[tuple[int, int], ...] = ((30, 30), (20, 50), (64, 40))) -> Path:
    """Pictures of these heights and widths, in a folder for each class."""
    from PIL import Image

    for number, (height, width) in enumerate(sizes):
        array = make_picture(number, size=max(height, width))[0][:height, :width]
        (folder / f"class{number % 2}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.ascontiguousarray(array)).save(folder / f"class{number % 2}" / f"{number}.png")
    return folder


def make_shelf(folder: Path) -> dict[str, Path]:
    """Five models, sounds and pictures."""
    models = {name: make_model(folder / name, name) for name in ("wav2vec2", "whisper", "vit", "resnet", "moonshine")}
    return {**models, "sounds": make_sounds(folder / "sounds"), "pictures": make_pictures(folder / "pictures")}


def loaded(path: Path) -> Loaded:
    return load_model(str(path), device="cpu")


def feed_of(model: Loaded, data: object = "embedded", **options: Any) -> Feed:
    return make_feed(model, ProfileConfig(models=("x",), data=str(data), **{"tokens": 100_000, **options}))


def rows_of(model: Loaded, feed: Feed, kind: str = "resid", stack: str | None = None) -> np.ndarray:
    """Every row of the last site of a kind, sorted."""
    layout = find_layout(model.model)
    site = [s for s in layout.sites([kind]) if stack in (None, s.stack)][-1]
    found: list[torch.Tensor] = []

    class Keep:
        def rows(self, rows: Any) -> None:
            found.append(rows.x.double())

        def scores(self, scores: Any) -> None: ...

    with Capture(model.model, [site], Keep(), layout=layout) as capture:
        for batch in feed.batches():
            capture.run(batch)
    rows = torch.cat(found).numpy()
    return rows[np.lexsort(rows.T[::-1])]


class Fixed:
    """Stands for a feed whose batches are given."""

    def __init__(self, batches: list[dict[str, torch.Tensor]]) -> None:
        self._batches = batches

    def batches(self) -> list[dict[str, torch.Tensor]]:
        return self._batches
