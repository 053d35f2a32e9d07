"""What the study of anisotropy in every modality trains: one small model of each kind of data, by preset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from anisoscope.errors import AnisoscopeError, unknown_name
from anisoscope.results.modality import (
    CHARACTERS,
    CONVOLUTION,
    IMAGES_DATA,
    SOUNDS_DATA,
    SPEECH,
    TEXT_DATA,
    VISION,
    Medium,
)
from anisoscope.studies.arms import schedule_of
from anisoscope.training.config import CommonTrainConfig, TrainConfig
from anisoscope.training.media import MediaConfig

# Further families with random weights, small: what the architecture alone does in each modality.


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
class RandomFamily:
    """One architecture of transformers at a small size, and what it reads."""

    model_type: str
    data: Medium
    fields: dict[str, Any] = field(default_factory=dict)
    norms: bool = False  # has batch norms, which must see data before they do anything
    words: bool = False  # reads the tokens that the text arms are trained on, not single bytes


FAMILIES: dict[str, RandomFamily] = {
    "roberta": RandomFamily("roberta", TEXT_DATA, {**_BLOCKS, "max_position_embeddings": 514}, words=True),
    "t5": RandomFamily("t5", TEXT_DATA, _T5, words=True),
    "canine": RandomFamily("canine", TEXT_DATA, {**_BLOCKS, "num_hash_buckets": 512, "max_position_embeddings": 512}),
    "byt5": RandomFamily("t5", TEXT_DATA, {**_T5, "vocab_size": 384, "feed_forward_proj": "gated-gelu"}),
    "hubert": RandomFamily("hubert", SOUNDS_DATA, _SPEECH),
    "whisper": RandomFamily(
        "whisper",
        SOUNDS_DATA,
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
    "beit": RandomFamily("beit", IMAGES_DATA, _PATCHES),
    "deit": RandomFamily("deit", IMAGES_DATA, _PATCHES),
    "segformer": RandomFamily(
        "segformer",
        IMAGES_DATA,
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
    "swin": RandomFamily(
        "swin",
        IMAGES_DATA,
        {
            "image_size": PIXELS,
            "patch_size": 4,
            "embed_dim": 32,
            "depths": [1, 2, 1],
            "num_heads": [2, 4, 4],
            "window_size": 4,
        },
    ),
    "resnet": RandomFamily(
        "resnet",
        IMAGES_DATA,
        {"embedding_size": 32, "hidden_sizes": [32, WIDTH, 128], "depths": [2, 2, 2], "layer_type": "basic"},
        norms=True,
    ),
    "mobilenet_v2": RandomFamily(
        "mobilenet_v2", IMAGES_DATA, {"image_size": PIXELS, "depth_multiplier": 0.35}, norms=True
    ),
    "efficientnet": RandomFamily(
        "efficientnet",
        IMAGES_DATA,
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
    "cvt": RandomFamily(
        "cvt", IMAGES_DATA, {"embed_dim": [16, 32, WIDTH], "num_heads": [1, 2, 4], "depth": [1, 2, 3]}, norms=True
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
    from anisoscope.models.checkpoint import fresh_config

    row = FAMILIES[family]
    path = folder / random_name(family)
    if not (path / "config.json").is_file():
        described = fresh_config(row.model_type, row.fields)
        if hasattr(described, "image_size") or row.data is IMAGES_DATA:
            described.image_size = PIXELS
        if row.words:
            described.vocab_size = vocabulary
        described.save_pretrained(str(path))
    return path


_TEXT_ARMS = ("text-decoder", "text-encoder")
ARMS: dict[str, Medium] = {  # with the data that each reads
    **dict.fromkeys(_TEXT_ARMS, TEXT_DATA),
    **{modality.name: modality.medium for modality in (CHARACTERS, SPEECH, VISION, CONVOLUTION)},
}
_GPT2, _BERT = TrainConfig(family="gpt2"), TrainConfig(arch="encoder", family="bert")
_CHARACTERS = TrainConfig(family="prenorm", tokens="enwik8")
_WAV2VEC2, _VIT, _CONVNEXT = (MediaConfig(arch=arch) for arch in ("wav2vec2", "vit", "convnext"))
_TEXT: dict[str, Any] = {"layers": 4, "width": 64, "context": 64, "steps": 300, "batch_size": 16, "lr": 2e-3}
_MEDIA: dict[str, Any] = {"layers": 4, "width": 64, "batch_size": 32, "lr": 1e-3}
_IMAGES: dict[str, Any] = {**_MEDIA, "size": 24, "examples": 3072}
_LARGER: dict[str, Any] = {"layers": 6, "width": 256, "heads": 4, "steps": 2000, "lr": 6e-4, "batch_size": 64}
_KEPT: dict[str, Any] = {"checkpoints": "none"}
_SERIES: dict[str, Any] = {"checkpoints": "0,64,512,every:2000"}


@dataclass(frozen=True)
class InherentPreset:
    """How large a study is."""

    arms: Mapping[str, CommonTrainConfig]
    seeds: tuple[int, ...]
    contexts: int  # of the probe
    when: str
    rows: int  # of the probe of a model with random weights
    families: tuple[str, ...]  # measured with random weights
    jobs: int = 1  # arms at the same time


PRESETS = {
    "tiny": InherentPreset(
        {
            "text-decoder": replace(_GPT2, tokens="bpe:1024", **_TEXT, **_KEPT),
            "text-encoder": replace(_BERT, tokens="bpe:1024", **_TEXT, **_KEPT),
            CHARACTERS.name: replace(_CHARACTERS, **_TEXT, **_KEPT),
            SPEECH.name: replace(_WAV2VEC2, **{**_MEDIA, "batch_size": 16}, steps=200, examples=800, **_KEPT),
            VISION.name: replace(_VIT, **_IMAGES, steps=400, patch=4, **_KEPT),
            CONVOLUTION.name: replace(_CONVNEXT, **_IMAGES, steps=200, patch=2, **_KEPT),
        },
        seeds=(0,),
        contexts=64,
        when="log:8",
        rows=2048,
        families=("t5", "canine", "hubert", "whisper", "beit", "swin", "resnet", "efficientnet"),
        jobs=2,
    ),
    "small": InherentPreset(
        {
            "text-decoder": replace(_GPT2, tokens="bpe:8192", context=256, **_LARGER, **_SERIES),
            "text-encoder": replace(_BERT, tokens="bpe:8192", context=256, **_LARGER, **_SERIES),
            CHARACTERS.name: replace(_CHARACTERS, context=256, **_LARGER, **_SERIES),
            SPEECH.name: replace(_WAV2VEC2, seconds=2.0, examples=20_000, **_LARGER, **_SERIES),
            VISION.name: replace(_VIT, size=32, patch=4, examples=60_000, **_LARGER, **_SERIES),
            CONVOLUTION.name: replace(_CONVNEXT, size=32, patch=2, examples=60_000, **_LARGER, **_SERIES),
        },
        seeds=(0, 1, 2),
        contexts=96,
        when="log",
        rows=16_384,
        families=tuple(FAMILIES),
    ),
}


@dataclass(frozen=True)
class InherentConfig:
    """What the study runs; what is None is as the preset has it.

    >>> [(name, seed) for name, _, seed in InherentConfig(arms=("vision",), seeds=(0, 1)).runs()]
    [('vision', 0), ('vision', 1)]
    """

    preset: str = "tiny"
    text: str = "embedded"
    images: str = "embedded"
    audio: str = "embedded"
    arms: tuple[str, ...] = tuple(ARMS)
    families: tuple[str, ...] | None = None  # measured with random weights
    seeds: tuple[int, ...] = ()  # none = those of the preset
    steps: int | None = None
    limit: float | None = None  # megabytes of text
    examples: int | None = None  # pictures and clips, at most
    when: str | None = None
    contexts: int | None = None
    metrics: str = "attention"
    device: str = "auto"
    tokens: int = 16_384  # paper: rows of the probe of each model
    models: tuple[str, ...] = ()  # paper: these only
    remove_downloads: bool = False  # paper: what was downloaded for a model is deleted once it is measured

    def __post_init__(self) -> None:
        if self.preset not in (*PRESETS, "paper"):
            raise unknown_name("preset", self.preset, [*PRESETS, "paper"])
        for what, names, known in (("arm", self.arms, ARMS), ("family", self.families or (), FAMILIES)):
            for name in names:
                if name not in known:
                    raise unknown_name(what, name, known)
                if names.count(name) > 1:
                    raise AnisoscopeError(f"{what} {name!r} is named twice; name it once.")
        if not self.arms and self.families == ():
            raise AnisoscopeError("there is nothing to do: name some arms or some families.")
        if self.preset != "paper":
            self._check_runs()

    def _check_runs(self) -> None:
        """Every arm before the first one is trained."""
        for seed in self.seeds:
            if self.seeds.count(seed) > 1:
                raise AnisoscopeError(f"seed {seed} is named twice; name it once.")
        for _, training, _ in self.runs():
            schedule_of(self.watch["when"], training.steps)

    @property
    def watch(self) -> dict[str, Any]:
        """The options of the monitor of every arm."""
        preset = PRESETS[self.preset]
        contexts = self.contexts or preset.contexts
        return {"monitor": self.metrics, "when": self.when or preset.when, "rank": None, "contexts": contexts}

    @property
    def every_family(self) -> tuple[str, ...]:
        """The families asked for, or those of the preset."""
        return PRESETS[self.preset].families if self.families is None else self.families

    @property
    def every_seed(self) -> tuple[int, ...]:
        """The seeds asked for, or those of the preset."""
        return self.seeds or PRESETS[self.preset].seeds

    def runs(self) -> list[tuple[str, CommonTrainConfig, int]]:
        """Name, training and seed of every run: all arms of a seed after each other."""
        return [(arm, self._training(arm, seed), seed) for seed in self.every_seed for arm in self.arms]

    def _training(self, arm: str, seed: int) -> CommonTrainConfig:
        training, medium = PRESETS[self.preset].arms[arm], ARMS[arm]
        changes: dict[str, Any] = {"seed": seed, "device": self.device, "data": getattr(self, medium.name)}
        if self.steps is not None:
            changes["steps"] = self.steps
        if medium is TEXT_DATA:
            changes["limit"] = self.limit
        elif self.examples is not None:
            changes["examples"] = self.examples
        return replace(training, **changes)
