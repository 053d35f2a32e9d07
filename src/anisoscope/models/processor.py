"""Model inputs from sounds and pictures, by the model's processor or one built from the sizes in its configuration."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anisoscope.errors import AnisoscopeError
from anisoscope.models.forward import unwrapped
from anisoscope.results.modality import IMAGES_DATA, SOUNDS_DATA, Medium

FILES = ("preprocessor_config.json", "processor_config.json", "image_processor_config.json")
RATE = 16_000
SIDE = 224  # pixels, if the configuration states no size
_MELS = ("num_mel_bins", "input_feat_per_channel", "feature_size")
_UNNORMALISED = ("moonshine", "moonshine_streaming")  # trained on samples as they are


@dataclass(frozen=True)
class PlainImages:
    """An image processor for models without one: resize, scale to 0 … 1, subtract `mean`, divide by `std`."""

    height: int
    width: int
    channels: int = 3
    mean: float = 0.5
    std: float = 0.5

    def __call__(self, array: np.ndarray) -> dict[str, Tensor]:
        """Pixels [1, channels, height, width] of an array [H, W, 3]."""
        x = torch.tensor(array).permute(2, 0, 1)[None].float() / 255.0
        x = nn.functional.interpolate(x, (self.height, self.width), mode="bilinear", antialias=True)
        x = x if self.channels == 3 else x.mean(1, keepdim=True).expand(-1, self.channels, -1, -1)
        return {"pixel_values": (x - self.mean) / self.std}


def load_processor(place: str, *, medium: Medium, notes: list[str], **options: Any) -> Any | None:
    """The processor at `place` (a folder or hub id); None if there is none or it cannot be used."""
    folder = Path(place).expanduser()
    if folder.exists() and not any((folder / name).is_file() for name in FILES):
        return None
    import transformers

    kind = PROCESSORS[medium]
    try:
        return getattr(transformers, kind.auto).from_pretrained(place, **kind.options(), **options)
    except Exception as error:  # classes raise various errors: a missing optional library, an unknown field
        if folder.exists():
            reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
            notes.append(
                f"its own processor could not be loaded ({reason}): one by the sizes of its configuration is used"
            )
        return None


def plain_images(config: Any) -> PlainImages:
    """An image processor from the image size, channels and patch size of a configuration.

    >>> from types import SimpleNamespace as Config
    >>> plain_images(Config(image_size=30, patch_size=8, num_channels=1))
    PlainImages(height=24, width=24, channels=1, mean=0.5, std=0.5)
    """
    for inner in ("vision_config", "encoder"):
        config = getattr(config, inner, None) if hasattr(getattr(config, inner, None), "image_size") else config
    height, width = _pair(getattr(config, "image_size", None) or SIDE)
    rows, columns = _pair(getattr(config, "patch_size", None) or 1)
    channels = getattr(config, "num_channels", 3)
    return PlainImages(max(height - height % rows, rows), max(width - width % columns, columns), int(channels))


def _pair(size: Any) -> tuple[int, int]:
    """Height and width from one number, a pair, or a mapping."""
    if isinstance(size, Mapping):
        return int(size["height"]), int(size["width"])
    if isinstance(size, (list, tuple)):
        return (int(size[0]), int(size[1])) if len(size) > 1 and isinstance(size[0], int) else (1, 1)
    return int(size), int(size)


def _extractor(config: Any) -> Any:
    import transformers
    from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES

    model_type = str(getattr(config, "model_type", ""))
    name = FEATURE_EXTRACTOR_MAPPING_NAMES.get(model_type, "Wav2Vec2FeatureExtractor")
    name = "SeamlessM4TFeatureExtractor" if model_type == "wav2vec2-bert" else name
    kind = getattr(transformers, str(name))
    known = inspect.signature(kind).parameters
    mels = next((int(getattr(config, field)) for field in _MELS if isinstance(getattr(config, field, None), int)), None)
    sizes: dict[str, Any] = {"sampling_rate": getattr(config, "sampling_rate", RATE)}
    if mels is not None and name != "Wav2Vec2FeatureExtractor":
        sizes |= {"feature_size": mels, "num_mel_bins": mels}
    if isinstance(getattr(config, "max_length", None), int) and name == "ASTFeatureExtractor":
        sizes["max_length"] = config.max_length
    if model_type in _UNNORMALISED:
        sizes["do_normalize"] = False
    made = kind(**{field: value for field, value in sizes.items() if field in known})
    positions = getattr(config, "max_source_positions", None)
    if hasattr(made, "nb_max_frames") and isinstance(positions, int):  # Whisper halves the frames
        made.nb_max_frames = 2 * positions
        made.n_samples = made.nb_max_frames * made.hop_length
    return made


@dataclass(frozen=True)
class ProcessorKind:
    """How the processor of one medium is loaded, and built from the sizes in a configuration."""

    auto: str  # class of transformers
    make: Callable[[Any], Any]
    options: Callable[[], dict[str, Any]] = dict


def _on_arrays() -> dict[str, Any]:
    """The option for image processors that work on arrays, without torchvision, in this version of transformers."""
    backends = importlib.util.find_spec("transformers.image_processing_backends") is not None
    return {"backend": "pil"} if backends else {"use_fast": False}


PROCESSORS = {
    SOUNDS_DATA: ProcessorKind("AutoFeatureExtractor", _extractor),
    IMAGES_DATA: ProcessorKind("AutoImageProcessor", plain_images, _on_arrays),
}


def processor_fingerprint(processor: Any) -> str:
    """A digest of the settings of a processor.

    >>> processor_fingerprint(PlainImages(8, 8)) == processor_fingerprint(PlainImages(8, 9))
    False
    """
    settings = processor.to_dict() if hasattr(processor, "to_dict") else vars(processor)
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()


def sampling_rate(processor: Any) -> int:
    """Samples per second that a model's sounds must have."""
    return int(getattr(processor, "sampling_rate", None) or RATE)


def longest(processor: Any) -> float | None:
    """Seconds after which a feature extractor truncates its input, or None."""
    if hasattr(processor, "nb_max_frames"):
        return float(processor.n_samples / processor.sampling_rate)
    if type(processor).__name__ == "ASTFeatureExtractor":  # 25 ms every 10 ms
        return float(0.025 + (processor.max_length - 1) * 0.010)
    return None


def sound_inputs(processor: Any, samples: np.ndarray, model: nn.Module) -> dict[str, Tensor]:
    """The model's inputs for one context of samples [T], with a mask of padding where there is any.

    A single context is padded only if the model reads a fixed length (Whisper): then the mask is over frames, and a
    frame is data if its whole analysis window lies within the samples.
    """
    found = processor(samples, sampling_rate=sampling_rate(processor), return_tensors="pt")
    inputs = _accepted(found, model)
    content = inputs.get(str(getattr(unwrapped(model), "main_input_name", "")))
    masked = "attention_mask" in inspect.signature(unwrapped(model).forward).parameters
    if content is None or "attention_mask" in inputs or not masked:
        return inputs
    if hasattr(processor, "nb_max_frames"):
        # the window of a frame is n_fft samples about every hop_length-th
        ends = torch.arange(content.shape[-1]) * processor.hop_length + processor.n_fft // 2
        whole = len(samples) >= processor.n_samples
        inputs["attention_mask"] = (torch.ones_like(ends) if whole else (ends <= len(samples)).long())[None]
    elif content.dim() == 2:  # without a mask, silence at the end of a recording could be taken for padding
        inputs["attention_mask"] = torch.ones(content.shape, dtype=torch.int64)
    return inputs


def picture_inputs(processor: Any, array: np.ndarray, model: nn.Module) -> dict[str, Tensor]:
    """The model's inputs for one picture [H, W, 3]; a single picture is not padded."""
    if isinstance(processor, PlainImages):
        return processor(array)
    options: dict[str, Any] = {"return_tensors": "pt", "input_data_format": "channels_last"}
    if getattr(processor, "do_pad", False):
        options["do_pad"] = False
    if getattr(getattr(unwrapped(model), "config", None), "num_channels", 3) == 1:
        array = np.rint(array.mean(2, keepdims=True)).astype(np.uint8)
    return _accepted(processor(images=[array], **options), model)


def _accepted(found: Mapping[str, Any], model: nn.Module) -> dict[str, Tensor]:
    """The tensors that the model's forward has arguments for."""
    known = inspect.signature(unwrapped(model).forward).parameters
    inputs = {name: value for name, value in found.items() if isinstance(value, Tensor) and name in known}
    if not inputs:
        raise AnisoscopeError(
            f"the processor of {type(unwrapped(model)).__name__} gives {', '.join(found) or 'nothing'}, which it does "
            "not take; anisoscope.measure takes any batches."
        )
    return inputs
