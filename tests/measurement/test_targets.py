"""Labels of sounds and pictures: from the data where it has them, else the model's own answers, which is noted."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anisoscope.capture.row import Batch
from anisoscope.measurement.targets import (
    _MASK_SEED,
    NUMBERED,
    OWN_CLASS,
    OWN_TEXT,
    SOME_TEXT,
    MediaTargets,
    chosen_spans,
)
from anisoscope.numerics.hashing import row_hash
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


def spans_one_by_one(keys: Tensor, real: Tensor, *, span: int, share: float) -> Tensor:
    """The slow twin of `chosen_spans`: one context after the other."""
    masked = torch.zeros_like(real)
    for b, row in enumerate(real):
        count = int(row.sum())
        width = max(1, min(span, count // 4))
        places = row.nonzero().squeeze(1)[: max(1, count - width + 1)]
        number = max(1, round(-math.log(1 - share) * count / width))
        order = row_hash(keys[b].expand(len(places)), places, seed=_MASK_SEED).argsort()
        for start in places[order[:number]].tolist():
            masked[b, start : start + width] = True
    return masked & real


@pytest.mark.parametrize("frames", [1, 3, 40, 99])
def test_spans_of_a_batch_are_those_of_its_contexts_one_by_one(frames: int) -> None:
    draws = torch.Generator().manual_seed(frames)
    keys = torch.randint(-(2**62), 2**62, (24,), generator=draws)
    whole = torch.ones(24, frames, dtype=torch.bool)
    padded = torch.arange(frames) < torch.randint(0, frames + 1, (24, 1), generator=draws)
    scattered = torch.rand(24, frames, generator=draws) < 0.7
    for real in (whole, padded, scattered):
        for span, share in ((10, 0.5), (4, 0.2)):
            found = chosen_spans(keys, real, span=span, share=share)
            assert torch.equal(found, spans_one_by_one(keys, real, span=span, share=share))
    if frames > 40:
        assert 0.4 < float(chosen_spans(keys, whole).float().mean()) < 0.6
