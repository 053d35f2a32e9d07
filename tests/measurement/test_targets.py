"""Labels of sounds and pictures: from the data where it has them, else the model's own answers, which is noted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.capture.row import Batch
from anisoscope.measurement.targets import NUMBERED, OWN_CLASS, OWN_TEXT, SOME_TEXT, MediaTargets
from support.tiny_media import _speech, sound


class Named(nn.Module):
    """Logits of five classes whose best is the number of the picture."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.config = SimpleNamespace(id2label=dict(enumerate(names)))

    def forward(self, pixel_values: Tensor) -> Any:
        return SimpleNamespace(logits=nn.functional.one_hot(torch.arange(len(pixel_values)), 5).float())


def labels(names: list[str], groups: tuple[str, ...] | None, classes: list[str]) -> tuple[list[int], MediaTargets]:
    loaded: Any = SimpleNamespace(model=Named(names), is_encoder_decoder=False, name="net", tokenizer=None)
    targets = MediaTargets(loaded, classes)
    batch = Batch({"pixel_values": torch.randn(2, 3, 8, 8)}, None, groups)
    return targets.labelled(batch)["labels"].tolist(), targets


def test_classes_are_found_by_name_then_by_order_then_by_the_models_own_answer() -> None:
    plain = [f"LABEL_{i}" for i in range(5)]
    known = ["a", "tabby, tabby cat", "c", "sea-lion", "e"]
    found, targets = labels(known, ("Tabby cat", "sea_lion"), ["Tabby cat", "sea_lion"])
    assert found == [1, 3] and targets.notes == [] and targets.source == "data"
    found, targets = labels(plain, ("cat", "ape"), ["ape", "cat", "dog"])
    assert found == [1, 0] and targets.notes == [NUMBERED] and targets.source == "data"
    for names, groups, classes in (
        (known, ("cat", "ape"), ["ape", "cat"]),  # the model has other classes
        (plain, ("1", "2"), [str(i) for i in range(9)]),  # and here fewer
        (plain, ("", ""), []),
    ):
        found, targets = labels(names, groups, classes)
        assert found == [0, 1] and targets.notes == [OWN_CLASS] and targets.source == "own"


def test_transcripts_are_spelled_in_the_models_symbols_and_missing_ones_are_its_own_reading() -> None:
    import transformers

    torch.manual_seed(0)
    model = transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**_speech(pad_token_id=0))).eval()

    def tokenizer(text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - ord("a") + 1 for letter in text]}

    inputs = {"input_values": torch.stack(sound(600, 600))}
    for tokens, texts, notes in (
        (tokenizer, ("abc", ""), [SOME_TEXT]),
        (tokenizer, ("abc", "de"), []),
        (None, ("abc", "de"), [OWN_TEXT]),
        (tokenizer, ("z~", ""), [OWN_TEXT]),  # symbols that the model does not have
    ):
        loaded: Any = SimpleNamespace(model=model, is_encoder_decoder=False, name="net", tokenizer=tokens)
        targets = MediaTargets(loaded)
        found = targets.labelled(Batch(inputs, None, None, texts))["labels"]
        assert targets.notes == notes
        if tokens is not None and texts[0] == "abc":
            assert found[0][found[0] >= 0].tolist() == [1, 2, 3]
        logits = model(**inputs).logits[1]
        own = [s for s in logits.argmax(-1).unique_consecutive().tolist() if s != 0]
        if texts[1] == "" and own:
            assert found[1][found[1] >= 0].tolist() == own
