"""Configuration of the study *Anisotropy Is Inherent to Self-Attention*: arms of each kind of data, and presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from anisoscope.errors import AnisoscopeError, check_known
from anisoscope.option import Device, Option, Text, given, listed_or_none, refuse_idle, seed_numbers
from anisoscope.results import modality
from anisoscope.results.modality import IMAGES_DATA, SOUNDS_DATA, TEXT_DATA, Medium, Modality
from anisoscope.studies import config as shared
from anisoscope.studies.config import ArmRun, ArmsConfig, PaperPreset, Preset

if TYPE_CHECKING:
    from anisoscope.studies.published import PaperModel

# -- further families with random weights: the effect of the architecture alone in each modality -----------------------

LAYERS, WIDTH, HEADS, PIXELS = 4, 64, 4, 64
_SIZES: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
_BLOCKS: dict[str, Any] = {**_SIZES, "intermediate_size": 4 * WIDTH}
_PATCHES: dict[str, Any] = {**_BLOCKS, "image_size": PIXELS, "patch_size": 8}
_FRAMES: dict[str, Any] = {"conv_dim": [32] * 4, "conv_kernel": [10, 8, 4, 4], "conv_stride": [5, 8, 4, 2]}
_FRAMES |= {"num_feat_extract_layers": 4, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
_SPEECH: dict[str, Any] = {**_BLOCKS, **_FRAMES, "layerdrop": 0.0}
_T5: dict[str, Any] = {"d_model": WIDTH, "d_kv": 16, "d_ff": 4 * WIDTH, "num_layers": LAYERS, "num_heads": HEADS}
_SIDE = {"layers": LAYERS, "attention_heads": HEADS, "ffn_dim": 4 * WIDTH}


@dataclass(frozen=True)
class RandomFamily:
    """A small configuration of a transformers architecture, and the data it reads."""

    model_type: str
    data: Medium
    fields: dict[str, Any] = field(default_factory=dict)
    norms: bool = False  # has batch norms, whose statistics must be filled from data
    pixels: int | None = None  # side of its images, where its configuration class declares none
    words: bool = False  # reads the tokens of the text arms instead of bytes


_WHISPER: dict[str, Any] = {"d_model": WIDTH, "vocab_size": 512, "num_mel_bins": 40, "max_source_positions": 400}
_WHISPER |= {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in _SIDE.items()}
_WHISPER |= {**dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0), "decoder_start_token_id": 1}
_SEGFORMER: dict[str, Any] = {"num_encoder_blocks": 3, "depths": [1, 2, 1], "hidden_sizes": [32, WIDTH, 128]}
_SEGFORMER |= {"num_attention_heads": [1, 2, 4], "sr_ratios": [4, 2, 1], "patch_sizes": [7, 3, 3]}
_SEGFORMER |= {"strides": [4, 2, 2], "mlp_ratios": [4, 4, 4]}
_SWIN: dict[str, Any] = {"image_size": PIXELS, "patch_size": 4, "embed_dim": 32, "depths": [1, 2, 1]}
_SWIN |= {"num_heads": [2, 4, 4], "window_size": 4}
_RESNET: dict[str, Any] = {"embedding_size": 32, "hidden_sizes": [32, WIDTH, 128], "depths": [2, 2, 2]}
_EFFICIENTNET: dict[str, Any] = {"image_size": PIXELS, "width_coefficient": 0.25, "depth_coefficient": 0.25}
# with the default of 0.02 variances would fall below the ε of the norms
_EFFICIENTNET |= {"hidden_dim": 320, "initializer_range": 0.25}
_MOBILENET: dict[str, Any] = {"image_size": PIXELS, "depth_multiplier": 0.35}
_CVT: dict[str, Any] = {"embed_dim": [16, 32, WIDTH], "num_heads": [1, 2, 4], "depth": [1, 2, 3]}

FAMILIES: dict[str, RandomFamily] = {
    "roberta": RandomFamily("roberta", TEXT_DATA, {**_BLOCKS, "max_position_embeddings": 514}, words=True),
    "t5": RandomFamily("t5", TEXT_DATA, _T5, words=True),
    "canine": RandomFamily("canine", TEXT_DATA, {**_BLOCKS, "num_hash_buckets": 512, "max_position_embeddings": 512}),
    "byt5": RandomFamily("t5", TEXT_DATA, {**_T5, "vocab_size": 384, "feed_forward_proj": "gated-gelu"}),
    "hubert": RandomFamily("hubert", SOUNDS_DATA, _SPEECH),
    "whisper": RandomFamily("whisper", SOUNDS_DATA, _WHISPER),
    "beit": RandomFamily("beit", IMAGES_DATA, _PATCHES),
    "deit": RandomFamily("deit", IMAGES_DATA, _PATCHES),
    "segformer": RandomFamily("segformer", IMAGES_DATA, _SEGFORMER, pixels=PIXELS),
    "swin": RandomFamily("swin", IMAGES_DATA, _SWIN),
    "resnet": RandomFamily("resnet", IMAGES_DATA, {**_RESNET, "layer_type": "basic"}, norms=True, pixels=PIXELS),
    "mobilenet_v2": RandomFamily("mobilenet_v2", IMAGES_DATA, _MOBILENET, norms=True),
    "efficientnet": RandomFamily("efficientnet", IMAGES_DATA, _EFFICIENTNET, norms=True),
    "cvt": RandomFamily("cvt", IMAGES_DATA, _CVT, norms=True, pixels=PIXELS),
}


def random_name(family: str) -> str:
    """The name of such a model in the table.

    >>> random_name("swin")
    'swin-random'
    """
    return f"{family}-random"


def write_configuration(family: str, folder: Path, *, vocabulary: int = 512) -> Path:
    """Write the configuration of a family into a folder for `profile --random-init`; returns the folder."""
    from anisoscope.models.checkpoint import fresh_config

    row = FAMILIES[family]
    path = folder / random_name(family)
    if not (path / "config.json").is_file():
        described = fresh_config(row.model_type, row.fields)
        if row.pixels is not None:
            described.image_size = row.pixels
        if row.words:
            described.vocab_size = vocabulary
        described.save_pretrained(str(path))
    return path


# -- trained arms ------------------------------------------------------------------------------------------------------

_NOT_TOKENS = (modality.CHARACTERS, modality.SPEECH, modality.VISION, modality.CONVOLUTION)
ARMS: dict[str, Modality] = {  # and what each reads
    **dict.fromkeys(("text-decoder", "text-encoder"), modality.TEXT),
    **{modality.name: modality for modality in _NOT_TOKENS},
    # two further families: what one family of convolutions does may be its own (ConvNeXt is built like a transformer)
    **dict.fromkeys(("convolution-resnet", "convolution-efficientnet"), modality.CONVOLUTION),
}
# with those on request, of other objectives: transcripts (CTC), masked frames and masked patches
_ON_REQUEST = {"speech-ctc": modality.SPEECH, "speech-masked": modality.SPEECH, "vision-masked": modality.VISION}
EVERY_ARM = ARMS | _ON_REQUEST
_KINDS: dict[str, dict[str, Any]] = {  # fields of a TrainConfig for text, of a MediaConfig for the others
    "text-decoder": {"family": "gpt2"},
    # pre-norm, as today's encoders and the study `revisiting`; the blocks of `characters`, all of which see the whole
    # context (ModernBERT's alternate with windows)
    "text-encoder": {"arch": "encoder", "family": "prenorm"},
    "characters": {"family": "prenorm", "tokens": "enwik8"},
    "speech": {"arch": "wav2vec2"},
    "vision": {"arch": "vit", "patch": 4},
    "convolution": {"arch": "convnext", "patch": 2},
    "convolution-resnet": {"arch": "resnet"},
    "convolution-efficientnet": {"arch": "efficientnet"},
    "speech-ctc": {"arch": "wav2vec2", "objective": "ctc"},
    "speech-masked": {"arch": "wav2vec2", "objective": "masked"},
    "vision-masked": {"arch": "vit", "patch": 4, "objective": "masked"},
}
_CONVOLUTIONS = tuple(arm for arm, reads in ARMS.items() if reads is modality.CONVOLUTION)
_TEXT: dict[str, Any] = {"context": 64, "steps": 300, "batch_size": 16, "lr": 2e-3}
_TOKENS = "bpe:512"  # of `tiny`
_IMAGES: dict[str, Any] = {"batch_size": 32, "lr": 1e-3, "size": 24, "examples": 3072}
_LARGER: dict[str, Any] = {"layers": 6, "width": 256, "heads": 4, "steps": 2000, "lr": 6e-4, "batch_size": 64}


@dataclass(frozen=True)
class InherentPreset(Preset):
    """A preset with training fields for each arm, and the families with random weights."""

    arms: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    rows: int = 2048  # rows of the probe of a model with random weights
    gradients: bool = True  # of the arms that read sounds and pictures
    families: tuple[str, ...] = ()

    def fields(self, arm: str) -> dict[str, Any]:
        """The training fields of an arm."""
        alike = arm if arm in self.arms else arm.partition("-")[0]  # other objectives have the sizes of their modality
        return {**self.train, **_KINDS[arm], **self.arms[alike]}


PRESETS = {
    "tiny": InherentPreset(
        {"layers": 4, "width": 64, "checkpoints": "none"},
        arms={
            "text-decoder": {**_TEXT, "tokens": _TOKENS},
            # it learns at 15 % of the tokens only, hence larger batches and more steps than the decoder
            "text-encoder": {**_TEXT, "tokens": _TOKENS, "batch_size": 32, "lr": 3e-3, "steps": 400},
            "characters": _TEXT,
            "speech": {"batch_size": 16, "lr": 1e-3, "steps": 200, "examples": 800},
            "vision": {**_IMAGES, "steps": 400},
            **{arm: {**_IMAGES, "steps": 200} for arm in _CONVOLUTIONS},
        },
        contexts=64,
        when="log:8",
        rows=2048,
        families=("t5", "canine", "hubert", "whisper", "beit", "swin", "resnet", "efficientnet"),
        jobs=2,
    ),
    "small": InherentPreset(
        {**_LARGER, "checkpoints": "0,64,512,every:2000"},
        seeds=(0, 1, 2),
        arms={
            "text-decoder": {"tokens": "bpe:8192", "context": 256},
            "text-encoder": {"tokens": "bpe:8192", "context": 256},
            "characters": {"context": 256},
            "speech": {"seconds": 2.0, "examples": 20_000},
            "vision": {"size": 32, "examples": 60_000},
            **{arm: {"size": 32, "examples": 60_000} for arm in _CONVOLUTIONS},
        },
        rows=16_384,
        families=tuple(FAMILIES),
    ),
}


_PICTURES = (
    "A folder with a folder of pictures for each class, MNIST's idx files, an .npz with images and labels, "
    "'digits' (scikit-learn's), or 'embedded'."
)
_RECORDINGS = "A folder of recordings, each a class of its own, or with a folder of them for each class; or 'embedded'."
_TRAINED = f"Trained models: {', '.join(ARMS)}; on request {', '.join(_ON_REQUEST)}; or none."
_RANDOM = "Families measured with random weights, such as swin,resnet; or none."


@dataclass(frozen=True)
class InherentConfig(ArmsConfig):
    """The configuration of the study; fields that are None default to the preset.

    >>> [(name, seed) for name, _, seed in InherentConfig(arms=("vision",), seeds=(0, 1)).runs()]
    [('vision', 0), ('vision', 1)]
    """

    preset: PaperPreset = "tiny"
    text: Text = "embedded"
    images: Annotated[str, Option(_PICTURES)] = "embedded"
    audio: Annotated[str, Option(_RECORDINGS)] = "embedded"
    arms: Annotated[tuple[str, ...], Option(_TRAINED, parse=listed_or_none, preset="trained")] = tuple(ARMS)
    families: Annotated[tuple[str, ...] | None, Option(_RANDOM, parse=listed_or_none, preset="trained")] = None
    seeds: Annotated[
        tuple[int, ...], Option("Seeds of every model, such as 0,1,2.", parse=seed_numbers, preset="trained")
    ] = ()
    steps: shared.Updates = None
    batch_size: shared.BatchSize = None
    limit: shared.Limit = None
    examples: Annotated[int | None, Option("Pictures, and clips, to use at most.", least=4, preset="trained")] = None
    checkpoints: shared.Checkpoints = None
    background: shared.Background = None
    when: shared.When = None
    contexts: shared.Contexts = None
    metrics: str = "attention"
    gradients: Annotated[
        bool | None,
        Option("Gradients of speech, vision and convolution arms, against tangents of their rows.", preset="trained"),
    ] = None
    probe_tokens: shared.ProbeTokens = 16_384
    models: shared.PaperModels = ()
    remove_downloads: shared.RemoveDownloads = False
    device: Device = "auto"

    presets: ClassVar[Mapping[str, Preset]] = PRESETS
    measures_published: ClassVar[bool] = True

    def check_arms(self) -> None:
        for what, names, known in (("arm", self.arms, EVERY_ARM), ("family", self.families or (), FAMILIES)):
            for name in names:
                check_known(what, name, known)
                if names.count(name) > 1:
                    raise AnisoscopeError(f"{what} {name!r} is named twice; name it once.")
        if not self.arms and self.families == ():
            raise AnisoscopeError("there is nothing to do: name some arms or some families.")
        if self.preset in PRESETS:
            self._refuse_idle()
        if twice := [seed for seed in self.seeds if self.seeds.count(seed) > 1]:
            raise AnisoscopeError(f"seed {twice[0]} is named twice; name it once.")

    def _refuse_idle(self) -> None:
        """Raise an error for options of arms, or of media, that none of the chosen models has a use for."""
        arms = [EVERY_ARM[arm] for arm in self.arms]
        read = {arm.medium.name for arm in arms} | {FAMILIES[family].data.name for family in self.every_family}
        refuse_idle(self, {"text", "images", "audio"} - read, "here, since no chosen model reads it")
        if not arms:
            idle = ("steps", "batch_size", "checkpoints", "background", "when", "contexts", "gradients")
            refuse_idle(self, idle, "with --arms none, which trains nothing")
        if not any(arm.is_text for arm in arms):
            refuse_idle(self, ("limit",), "without an arm that reads text")
        if all(arm.is_text for arm in arms):
            refuse_idle(self, ("examples", "gradients"), "without an arm that reads pictures or sounds")

    def published(self) -> list[PaperModel]:
        from anisoscope.studies.published import INHERENT_MODELS, chosen_models

        return chosen_models(self.models, INHERENT_MODELS)

    @property
    def size(self) -> InherentPreset:
        """The chosen preset."""
        return PRESETS[self.preset]

    @property
    def every_family(self) -> tuple[str, ...]:
        """The given families, or those of the preset."""
        return self.size.families if self.families is None else self.families

    @property
    def every_seed(self) -> tuple[int, ...]:
        """The given seeds, or those of the preset."""
        return self.seeds or self.size.seeds

    @property
    def watch(self) -> dict[str, Any]:
        """Options of `training_monitor` for every arm; those that read tokens have no use for `gradients`."""
        wanted = self.size.gradients if self.gradients is None else self.gradients
        return super().watch | ({"gradients": True} if wanted else {})

    def runs(self) -> list[ArmRun]:
        """Every run: all arms of a seed after each other."""
        return [ArmRun(arm, self._training(arm, seed), seed) for seed in self.every_seed for arm in self.arms]

    def _training(self, arm: str, seed: int) -> Any:
        from anisoscope.training.classifier import MediaConfig
        from anisoscope.training.config import TrainConfig

        asked = given(self, "steps", "batch_size", "checkpoints", "background")
        fields = {**self.size.fields(arm), **asked, "seed": seed, "device": self.device}
        fields["data"] = getattr(self, EVERY_ARM[arm].medium.name)
        if EVERY_ARM[arm].is_text:
            return TrainConfig(**fields, limit=self.limit)
        return MediaConfig(**fields | given(self, "examples"))
