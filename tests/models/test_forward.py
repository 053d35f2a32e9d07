"""The modality is read from the model: what it takes, what it is made of, and what its tokens are."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anisoscope.capture import find_layout
from anisoscope.models import forward
from anisoscope.models.forward import modalities_of
from anisoscope.models.tokenizer import ByteTokenizer
from anisoscope.results.modality import MODALITIES, Medium, Modality, row_words
from support.tiny_media import IMAGES, MEDIA, SPEECH, media
from support.tiny_models import FAMILIES, _plain, tiny

_STAGED = {"hidden_sizes": [8, 8], "depths": [1, 1]}
# what is built from no options of its own is built without weights, so its size costs nothing
OTHERS = {
    "vision": ("SwinModel", "SegformerModel", "Swinv2Model", "PvtModel", "MobileViTModel", "SiglipVisionModel"),
    "convolution": (
        "ResNetModel", "ConvNextModel", "ConvNextV2Model", "EfficientNetModel", "MobileNetV2Model", "CvtModel",
        "RegNetModel", "PoolFormerModel",
    ),
    "speech": ("UniSpeechModel", "Wav2Vec2BertModel", "Speech2TextModel"),
    "text": ("RobertaModel", "CLIPTextModel", "OPTModel"),
    "characters": ("CanineModel",),
}  # fmt: skip


def modality_of(model: nn.Module, tokenizer: Any = None) -> str:
    return forward.modality_of(model, tokenizer).name


def _empty(name: str) -> nn.Module:
    import transformers

    kind = getattr(transformers, name)
    with torch.device("meta"):
        return kind(kind.config_class())


@pytest.mark.parametrize(("expected", "name"), [(m, name) for m, names in OTHERS.items() for name in names])
def test_families_are_recognised_by_what_they_read_and_are_made_of(expected: str, name: str) -> None:
    assert modality_of(_empty(name)) == expected


def test_speech_and_vision_are_recognised_at_any_head() -> None:
    for name in MEDIA:
        assert modality_of(media(name)) == ("vision" if name in IMAGES else "speech")
    assert set(SPEECH) | set(IMAGES) == set(MEDIA)


def test_text_is_text_and_canine_characters() -> None:
    for name in ("bert", "gpt2", "t5", "bart", "llama", "modernbert"):
        assert modality_of(tiny(name)) == "text"
    assert modality_of(tiny("canine")) == "characters"


def test_a_decoder_under_sound_or_images_reads_text() -> None:
    for name in ("whisper", "whisper-generating", "moonshine"):
        model = media(name)
        stacks = [stack.name for stack in find_layout(model).stacks]
        assert modalities_of(model, stacks) == {"encoder": "speech", "decoder": "text"}
        assert modalities_of(model, stacks, ByteTokenizer())["decoder"] == "characters"
    assert modalities_of(tiny("t5"), ["encoder", "decoder"]) == {"encoder": "text", "decoder": "text"}
    assert modalities_of(media("vit"), ["single"]) == {"single": "vision"}


def test_sides_of_whisper_taken_alone_are_what_they_read() -> None:
    import transformers

    model = media("whisper")
    assert modality_of(model.encoder) == "speech"
    assert modality_of(model.decoder) == "text"
    options = {**MEDIA["whisper"][1], "is_encoder_decoder": False}
    assert modality_of(transformers.WhisperForCausalLM(transformers.WhisperConfig(**options))) == "text"


@pytest.mark.parametrize(("kind", "side"), [("Vision", "vit"), ("Speech", "wav2vec2")])
def test_two_models_in_one_are_told_by_the_encoder(kind: str, side: str) -> None:
    import transformers

    decoder = transformers.BertConfig(**FAMILIES["bert"][1], is_decoder=True, add_cross_attention=True)
    encoder = getattr(transformers, MEDIA[side][0])(**MEDIA[side][1])
    config = getattr(transformers, f"{kind}EncoderDecoderConfig").from_encoder_decoder_configs(encoder, decoder)
    model = getattr(transformers, f"{kind}EncoderDecoderModel")(config=config)
    assert modalities_of(model, ["encoder", "decoder"]) == {"encoder": kind.lower(), "decoder": "text"}


def test_a_convolutional_encoder_is_one_whatever_decodes_it() -> None:
    import transformers

    decoder = transformers.BertConfig(**_plain(is_decoder=True, add_cross_attention=True))
    encoder = transformers.ResNetConfig(**_STAGED, embedding_size=8)
    encoder.hidden_size = 8
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    assert modality_of(transformers.VisionEncoderDecoderModel(config=config)) == "convolution"


# tokens that are characters


class _Vocabulary:
    """A tokenizer of which only the words are asked."""

    def __init__(self, words: list[str], special: tuple[str, ...] = ("[PAD]", "[UNK]")) -> None:
        self.all_special_tokens = list(special)
        self.words = {word: i for i, word in enumerate([*special, *words])}

    def get_vocab(self) -> dict[str, int]:
        return self.words


def test_single_letters_are_characters_and_words_are_not() -> None:
    letters = [chr(i) for i in range(97, 123)]
    model = tiny("bert")
    assert modality_of(model, _Vocabulary(letters)) == "characters"
    assert modality_of(model, _Vocabulary([*letters, "<null_1>", "[unused0]"])) == "characters"
    assert modality_of(model, _Vocabulary([*letters, *(a + b for a in letters for b in letters)])) == "text"
    assert modality_of(model, _Vocabulary([])) == "text"
    assert modality_of(model, ByteTokenizer(300)) == "characters"
    assert modality_of(model) == "text"


def test_letters_among_pieces_of_atoms_are_text() -> None:
    atoms = ["C", "c", "O", "N", "(", ")", "=", "1", "[nH]", "[C@@H]", "Cl", "Br", "[O-]"]
    assert modality_of(tiny("bert"), _Vocabulary(atoms)) == "text"


def test_byt5_is_known_by_its_vocabulary_or_by_what_its_configuration_says() -> None:
    import transformers

    small = {k: v for k, v in FAMILIES["t5"][1].items() if k != "vocab_size"}
    sizes = {384: "characters", 385: "text"}
    for size, expected in sizes.items():
        model = transformers.T5Model(transformers.T5Config(**small, vocab_size=size))
        assert modalities_of(model, ["encoder", "decoder"]) == {"encoder": expected, "decoder": expected}
    said = transformers.T5Config(**small, vocab_size=60, tokenizer_class="ByT5Tokenizer")
    assert modality_of(transformers.T5EncoderModel(said)) == "characters"
    assert modality_of(tiny("t5"), transformers.ByT5Tokenizer()) == "characters"


def test_character_models_of_our_own_training_are_recognised(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from anisoscope.data.tokens import make_vocabulary, save_tokenizer

    for tokens, expected in (("char", "characters"), ("bpe:600", "text")):
        text = [b"the quick brown fox jumps over the lazy dog, and again the quick brown fox " * 40]
        tokenizer = make_vocabulary(tokens, text)
        save_tokenizer(tokenizer, tmp_path / expected)
        loaded = AutoTokenizer.from_pretrained(str(tmp_path / expected), local_files_only=True)
        assert modality_of(tiny("gpt_neox"), loaded) == expected
        assert modality_of(tiny("gpt_neox"), tokenizer) == expected


def test_antiberty_reads_letters() -> None:
    found = importlib.util.find_spec("antiberty")
    if found is None or found.origin is None:
        pytest.skip("the optional package antiberty is not installed")
    from transformers import BertTokenizerFast

    words = Path(found.origin).parent / "trained_models" / "vocab.txt"
    assert modality_of(tiny("bert"), BertTokenizerFast(str(words), do_lower_case=False)) == "characters"


# modules of no library


class _Own(nn.Module):
    """A model of no library, made of the parts it is given."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        return x


class _Gate(_Own):
    """Attention by name, as convolutional models gate their channels."""


_Gate.__name__ = "LargeKernelAttention"
PLAIN: list[tuple[str, dict[str, Any]]] = [
    ("convolution", {"stem": nn.Conv2d(3, 8, 3), "block": nn.Conv2d(8, 8, 3)}),
    ("convolution", {"stem": nn.Conv2d(3, 8, 3), "gate": _Gate(proj_1=nn.Conv2d(8, 8, 1))}),
    ("vision", {"patches": nn.Conv2d(3, 8, 8, 8), "attention": nn.MultiheadAttention(8, 2)}),
    ("vision", {"patches": nn.Conv2d(3, 8, 8, 8), "block": _Own(qkv=nn.Linear(8, 24))}),
    ("speech", {"stem": nn.Conv1d(1, 8, 10, 5), "attention": nn.MultiheadAttention(8, 2)}),
    ("text", {"words": nn.Embedding(10, 8), "mix": nn.Conv1d(8, 8, 3)}),
    ("text", {"only": nn.Linear(8, 8)}),
]


@pytest.mark.parametrize(("expected", "parts"), PLAIN)
def test_plain_modules_are_told_by_their_layers(expected: str, parts: dict[str, Any]) -> None:
    assert modality_of(_Own(**parts)) == expected


def test_a_known_model_inside_a_module_of_ones_own_is_asked() -> None:
    assert modality_of(_Own(head=nn.Linear(2, 2), body=media("wav2vec2"))) == "speech"
    assert modality_of(_Own(body=media("vit"))) == "vision"
    assert modality_of(_Own(body=tiny("canine"))) == "characters"


def test_efficientnet_lite_is_convolutional() -> None:
    package = pytest.importorskip("efficientnet_lite_pytorch")
    model = package.EfficientNet.from_name("efficientnet-lite0")
    assert modality_of(model) == "convolution"


def test_every_modality_says_what_a_row_is() -> None:
    rows = {name: found.row for name, found in MODALITIES.items()}
    assert set(rows) == {"text", "characters", "speech", "vision", "convolution"}
    assert row_words({"encoder": "speech", "decoder": "text"}) == {"encoder": rows["speech"], "decoder": rows["text"]}


def test_a_row_of_the_table_is_all_that_recognising_a_new_modality_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    medium = Medium("signals", "signals", "the embedded signals", inputs=("signal_values",))
    monkeypatch.setitem(MODALITIES, "signals", Modality("signals", medium, "one beat", "beats", hue=5))
    model = _Own(block=_Own(qkv=nn.Linear(8, 24)))
    model.main_input_name, model.config = "signal_values", None  # type: ignore[assignment]
    assert modalities_of(model, ["single"]) == {"single": "signals"}
    assert row_words({"single": "signals"}) == {"single": "one beat"}
