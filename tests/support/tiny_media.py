"""Tiny randomly initialised models of speech and vision, and inputs of theirs with padding in them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_COMMON = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
_IDS = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 3}
_FRAMES = {"conv_dim": [16, 16, 16], "conv_kernel": [10, 3, 2], "conv_stride": [5, 2, 2], "num_feat_extract_layers": 3,
           "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "vocab_size": 20}  # fmt: skip


def _speech(**options: Any) -> dict[str, Any]:
    """Frames of 35 samples every 20; the norm over channels honours a mask, the one over time cannot."""
    return {**_COMMON, **_FRAMES, "feat_extract_norm": "layer", "do_stable_layer_norm": True, **options}


def _squeezed(**options: Any) -> dict[str, Any]:
    """As above, two frames to a row."""
    return {**_COMMON, **_FRAMES, "feat_extract_norm": "layer", "squeeze_factor": 2, **options}


def _whisper(**options: Any) -> dict[str, Any]:
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in
             (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))}  # fmt: skip
    return {"vocab_size": 60, "d_model": 32, "num_mel_bins": 8, "max_source_positions": 40,
            "max_target_positions": 64, **sizes, **_IDS, **options}  # fmt: skip


def _moonshine(**options: Any) -> dict[str, Any]:
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in
             (("num_hidden_layers", 2), ("num_attention_heads", 4), ("num_key_value_heads", 4))}  # fmt: skip
    return {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64,
            **sizes, **_IDS, **options}  # fmt: skip


def _patches(**options: Any) -> dict[str, Any]:
    return {**_COMMON, "image_size": 24, "patch_size": 8, "num_channels": 3, **options}


# name -> (configuration class, options, model class)
MEDIA: dict[str, tuple[str, dict[str, Any], str]] = {
    "wav2vec2": ("Wav2Vec2Config", _speech(), "Wav2Vec2Model"),
    "wav2vec2-base": (
        "Wav2Vec2Config",
        _speech(feat_extract_norm="group", do_stable_layer_norm=False),
        "Wav2Vec2ForCTC",
    ),
    "wav2vec2-adapter": (
        "Wav2Vec2Config",
        _speech(add_adapter=True, num_adapter_layers=1, output_hidden_size=32),
        "Wav2Vec2Model",
    ),
    "hubert": ("HubertConfig", _speech(), "HubertModel"),
    "hubert-base": ("HubertConfig", _speech(feat_extract_norm="group", do_stable_layer_norm=False), "HubertModel"),
    "wavlm": ("WavLMConfig", _speech(), "WavLMModel"),
    "wavlm-base": ("WavLMConfig", _speech(feat_extract_norm="group", do_stable_layer_norm=False), "WavLMModel"),
    "data2vec-audio": ("Data2VecAudioConfig", _speech(conv_pos_kernel_size=5), "Data2VecAudioModel"),
    "sew": ("SEWConfig", _squeezed(), "SEWModel"),
    "sew-d": ("SEWDConfig", _squeezed(position_buckets=8), "SEWDModel"),
    "whisper": ("WhisperConfig", _whisper(), "WhisperModel"),
    "whisper-generating": ("WhisperConfig", _whisper(), "WhisperForConditionalGeneration"),
    "moonshine": ("MoonshineConfig", _moonshine(), "MoonshineForConditionalGeneration"),
    "ast": (
        "ASTConfig",
        {**_COMMON, "num_mel_bins": 16, "max_length": 40, "patch_size": 8, "frequency_stride": 4, "time_stride": 4},
        "ASTModel",
    ),
    "vit": ("ViTConfig", _patches(), "ViTModel"),
    "vit-classifier": ("ViTConfig", _patches(), "ViTForImageClassification"),
    "deit": ("DeiTConfig", _patches(), "DeiTModel"),
    "beit": ("BeitConfig", _patches(use_mean_pooling=False, use_relative_position_bias=True), "BeitModel"),
    "beit-shared": (
        "BeitConfig",
        _patches(use_shared_relative_position_bias=True, layer_scale_init_value=0.0),
        "BeitForImageClassification",
    ),
    "dinov2": ("Dinov2Config", _patches(mlp_ratio=2), "Dinov2Model"),
    "dinov2-registers": (
        "Dinov2WithRegistersConfig",
        _patches(mlp_ratio=2, num_register_tokens=3),
        "Dinov2WithRegistersModel",
    ),
    "vit-mae": ("ViTMAEConfig", _patches(mask_ratio=0.0), "ViTMAEModel"),
    "clip-vision": ("CLIPVisionConfig", _patches(), "CLIPVisionModel"),
}

# Image models that no row names, with their tokens before and after the patches: found by how they are built.
UNNAMED: dict[str, tuple[str, dict[str, Any], str, tuple[int, int]]] = {
    "dinov3": ("DINOv3ViTConfig", _patches(num_register_tokens=3), "DINOv3ViTModel", (4, 0)),
    "data2vec-vision": (
        "Data2VecVisionConfig",
        _patches(use_mean_pooling=False, use_relative_position_bias=True),
        "Data2VecVisionModel",
        (1, 0),
    ),
    "vit-msn": ("ViTMSNConfig", _patches(), "ViTMSNModel", (1, 0)),
    "yolos": ("YolosConfig", _patches(image_size=[24, 24], num_detection_tokens=5), "YolosModel", (1, 5)),
    "blip-vision": ("BlipVisionConfig", _patches(), "BlipVisionModel", (1, 0)),
    "blip2-vision": ("Blip2VisionConfig", _patches(), "Blip2VisionModel", (1, 0)),
    "altclip-vision": ("AltCLIPVisionConfig", _patches(), "AltCLIPVisionModel", (1, 0)),
    "chinese-clip-vision": ("ChineseCLIPVisionConfig", _patches(), "ChineseCLIPVisionModel", (1, 0)),
    "clipseg-vision": ("CLIPSegVisionConfig", _patches(), "CLIPSegVisionModel", (1, 0)),
    "git-vision": ("GitVisionConfig", _patches(), "GitVisionModel", (1, 0)),
    "flava-image": ("FlavaImageConfig", _patches(), "FlavaImageModel", (1, 0)),
    "dpt": (
        "DPTConfig",
        _patches(backbone_out_indices=[0, 1, 2, 2], neck_hidden_sizes=[8] * 4, fusion_hidden_size=8, is_hybrid=False),
        "DPTModel",
        (1, 0),
    ),
    "aimv2": ("Aimv2VisionConfig", _patches(), "Aimv2VisionModel", (0, 0)),
    "ijepa": ("IJepaConfig", _patches(), "IJepaModel", (0, 0)),
    "siglip-vision": ("SiglipVisionConfig", _patches(), "SiglipVisionModel", (0, 0)),
}

PREFIX = {"ast": 2, "vit": 1, "vit-classifier": 1, "deit": 2, "beit": 1, "beit-shared": 1, "dinov2": 1,
          "dinov2-registers": 4, "vit-mae": 1, "clip-vision": 1}  # fmt: skip
IMAGES = sorted(set(PREFIX) - {"ast"})
SPEECH = sorted(set(MEDIA) - set(IMAGES))
SQUEEZED = ["sew", "sew-d"]  # raw audio, several frames to a row
SAMPLES = [name for name in SPEECH if "whisper" not in name and name != "ast" and name not in SQUEEZED]  # raw audio
HONOURING = ["hubert", "wav2vec2", "wav2vec2-adapter", "wavlm"]  # the mask hides padding wholly
TYPES = {"wav2vec2", "hubert", "wavlm", "data2vec-audio", "whisper", "moonshine", "audio-spectrogram-transformer",
         "sew", "sew-d", "vit", "deit", "beit", "dinov2", "dinov2_with_registers", "vit_mae",
         "clip_vision_model"}  # fmt: skip


def media(name: str, *, attention: str | None = None) -> Any:
    """A tiny model, in evaluation mode, with norms, scales and biases away from their initial values."""
    import transformers

    config_class, options, model_class = MEDIA[name] if name in MEDIA else UNNAMED[name][:3]
    torch.manual_seed(sum(map(ord, name)))
    config = getattr(transformers, config_class)(**options)
    if attention is not None:
        config._attn_implementation = attention
    model: nn.Module = getattr(transformers, model_class)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def sound(*lengths: int, seed: int = 0) -> list[Tensor]:
    """Noise with a pitch in it, one clip for each length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator) * 0.3 + torch.sin(torch.arange(n) * 0.1) for n in lengths]


def padded_sound(clips: list[Tensor]) -> dict[str, Tensor]:
    """Samples and mask of a batch padded with zeros on the right."""
    length = max(len(clip) for clip in clips)
    rows = [nn.functional.pad(clip, (0, length - len(clip))) for clip in clips]
    masks = [torch.arange(length) < len(clip) for clip in clips]
    return {"input_values": torch.stack(rows), "attention_mask": torch.stack(masks).long()}


def mel_frames(*lengths: int, bins: int = 8, total: int = 80) -> dict[str, Tensor]:
    """Mel frames [B, bins, total] with the floor's value after each context's end, and the mask over frames."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(total) < torch.tensor(lengths)[:, None]
    x = torch.randn(len(lengths), bins, total, generator=generator).where(mask[:, None], -1.5)
    return {"input_features": x, "attention_mask": mask.long()}


def words(batch: int, length: int = 6) -> dict[str, Tensor]:
    """Input of a decoder, the last context one token shorter."""
    ids = torch.randint(6, 60, (batch, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[-1, -1], ids[-1, -1] = 0, 1
    return {"decoder_input_ids": ids, "decoder_attention_mask": mask}


def media_inputs(name: str) -> dict[str, Tensor]:
    """A batch of two or three contexts, the second shorter where the model can be told so."""
    if name in (*IMAGES, *UNNAMED):
        x = torch.randn(3, 3, 24, 24, generator=torch.Generator().manual_seed(0))
        order = {"noise": torch.arange(9.0).expand(3, 9)} if name == "vit-mae" else {}  # it shuffles its patches
        return {"pixel_values": x, **order}
    if name == "ast":
        return {"input_values": torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(0))}
    if "whisper" in name:
        return {**mel_frames(80, 43), **words(2)}
    if name == "moonshine":
        return {**padded_sound(sound(6000, 4100)), **words(2)}
    return padded_sound(sound(400, 290))
