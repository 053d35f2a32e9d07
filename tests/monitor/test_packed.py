"""Sequences packed into one row are contexts of their own, as they would be in rows of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from anisoscope import Monitor, at, measure
from anisoscope.capture.padding import ATTENDED, SEPARATED, SEVERAL, find_packed
from anisoscope.capture.row import PositionChoice, original_contexts, read_contexts
from support.monitored import CHEAP, compare

SIZES = torch.randint(1, 14, (28,), generator=torch.Generator().manual_seed(0)).tolist()
TEXTS = [torch.randint(3, 60, (n,), generator=torch.Generator().manual_seed(i)) for i, n in enumerate(SIZES)]


def rows_of(parts: list[list[Tensor]]) -> dict[str, Tensor]:
    """A batch of a row for each part, in which its texts stand side by side; padding at the end has no label."""
    length = max(sum(map(len, part)) for part in parts)
    ids, places = torch.zeros(len(parts), length, dtype=torch.long), torch.zeros(len(parts), length, dtype=torch.long)
    for row, part in enumerate(parts):
        texts = torch.cat(part)
        ids[row, : len(texts)], places[row, : len(texts)] = texts, torch.cat([torch.arange(len(x)) for x in part])
    return {"input_ids": ids, "position_ids": places, "labels": ids.masked_fill((places == 0) | (ids == 0), -100)}


def padded() -> dict[str, Tensor]:
    batch = rows_of([[text] for text in TEXTS])
    del batch["position_ids"]
    return {**batch, "attention_mask": (batch["input_ids"] > 0).long()}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    words: dict[str, Any] = {"vocab_size": 60, "max_position_embeddings": 32, "use_cache": False, **sizes, **ids}
    return LlamaForCausalLM(LlamaConfig(**words)).double()


def monitored(batch: dict[str, Tensor]) -> Monitor:
    """Geometry and tangents of one step."""
    model = llama()
    plan = replace(CHEAP, splits=(1,))
    metrics = "tangent,average_cosine,average_cosine:pairs=between,context_similarity,drift,two_nn,svd_ratio"
    options: dict[str, Any] = {"metrics": f"{metrics},attention_entropy,attention_sharpness", "plan": plan}
    with Monitor(model, when=at([0]), strict=True, total_steps=1, **options) as monitor, monitor.step(0):
        model(**batch).loss.backward()
    return monitor


@pytest.mark.parametrize("parts", [[TEXTS], [TEXTS[:5], TEXTS[5:20], TEXTS[20:]]])
def test_a_packed_training_has_the_table_of_a_padded_one(parts: list[list[Tensor]]) -> None:
    packed = monitored(rows_of(parts))
    assert SEVERAL in packed.notes and "gradient_energy" in packed.table.metrics
    expected = monitored(padded()).table
    compare(packed.table, expected, 1e-6)
    compare(packed.table, expected, 1e-10, without=("=normal", "gradient_p", "gradient_ratio"))  # of draws in float32


def probed(batch: dict[str, Tensor], model: Any = None, **options: Any) -> Monitor:
    model, ids = model or llama(), TEXTS[0][None]
    words = {"metrics": "tangent,average_cosine,drift", "plan": replace(CHEAP, splits=(1,), weights=True), **options}
    with Monitor(model, when=at([0]), probe=batch, strict=True, total_steps=1, **words) as monitor, monitor.step(0):
        model(ids)
    return monitor


@pytest.mark.parametrize("parts", [[TEXTS], [TEXTS[:5], TEXTS[5:20], TEXTS[20:]]])
def test_a_packed_probe_has_the_table_of_a_padded_one(parts: list[list[Tensor]]) -> None:
    """Gradients of weights and losses by context as well."""
    batch = rows_of(parts)
    for inputs in (batch, {**batch, "cu_seq_lens_q": torch.tensor([0, 1]), "max_length_q": 3}):
        packed = probed(inputs)
        assert SEPARATED in packed.notes and {"gradient_energy", "probe_loss"} <= set(packed.table.metrics)
    expected = probed(padded()).table
    compare(packed.table, expected, 1e-6)
    compare(packed.table, expected, 1e-10, without=("=normal", "gradient_p", "gradient_ratio"))  # of draws in float32


def test_a_packed_probe_of_a_model_without_a_mask_is_read_by_length() -> None:
    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.places = torch.nn.Embedding(60, 16), torch.nn.Embedding(32, 16)
            self.layers = torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(2)])
            self.head = torch.nn.Linear(16, 60)

        def forward(self, input_ids: Tensor, position_ids: Any = None, labels: Any = None) -> Any:
            places = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
            x = self.embed(input_ids) + self.places(places)
            for layer in self.layers:
                x = x + layer(x).tanh()
            logits = self.head(x)
            if labels is None:
                return {"logits": logits}
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            return {"loss": loss, "logits": logits}

    words: dict[str, Any] = {"plan": replace(CHEAP, embedding=False), "metrics": "tangent,average_cosine"}
    packed = probed(rows_of([TEXTS]), Plain().double(), **words)
    apart = [rows_of([[text]]) for text in TEXTS]
    compare(packed.table, probed(apart, Plain().double(), **words).table, 1e-6)  # type: ignore[arg-type]


def test_measured_and_pooled_rows_are_those_of_texts() -> None:
    words: dict[str, Any] = {"metrics": ["average_cosine", "participation_ratio"]}
    for pool in ("none", "mean", "last", "cls"):
        compare(*(measure(llama(), [batch], pool=pool, **words) for batch in (rows_of([TEXTS]), padded())))


def told(**arguments: Any) -> list[int] | None:
    found = find_packed(arguments, arguments.pop("real", torch.ones(2, 4, dtype=torch.bool)), [])
    return None if found is None else found.number.flatten().tolist()


def test_what_says_where_sequences_begin() -> None:
    expected = [0, 0, 1, 1, 2, 3, 3, 3]
    assert told(position_ids=torch.tensor([[0, 1, 0, 1], [0, 0, 1, 2]])) == expected
    assert told(position_ids=torch.tensor([[7, 8, 2, 3], [2, 2, 3, 4]])) == expected  # a rest of one, and from 2 on
    assert told(seq_idx=torch.tensor([[0, 0, 1, 1], [2, 3, 3, 3]], dtype=torch.int32)) == expected
    for name in ("cu_seq_lens_q", "cu_seqlens"):
        assert told(**{name: torch.tensor([0, 2, 4, 5, 8], dtype=torch.int32)}) == expected
    assert told(position_ids=torch.arange(4)[None], cu_seq_lens_q=torch.tensor([0, 2, 4, 5, 8])) == expected


def test_positions_of_whole_rows_tell_nothing() -> None:
    assert told() is None and told(position_ids=torch.arange(4)[None]) is None
    assert told(cu_seq_lens_q=torch.tensor([0, 4, 8])) is None
    left = torch.tensor([[1, 1, 0, 1], [0, 1, 2, 3]])  # as generation counts them
    assert told(position_ids=left, real=torch.tensor([[False, False, True, True], [True] * 4])) is None
    assert told(position_ids=torch.zeros(3, 2, 4, dtype=torch.long)) is None  # of times, heights and widths
    assert told(position_ids=torch.arange(4.0).expand(2, 4) * 0) is None


def test_a_mask_beside_packed_rows_is_noted() -> None:
    batch = rows_of([TEXTS[:2], TEXTS[2:4]])
    assert read_contexts(batch)[1] == [SEVERAL]
    assert read_contexts({**batch, "attention_mask": torch.ones_like(batch["input_ids"])})[1] == [ATTENDED]


def test_texts_have_their_own_hash_places_and_beginnings() -> None:
    found, expected = read_contexts(rows_of([TEXTS]))[0], read_contexts(padded())[0]
    for first in ("in", "out"):
        choice = PositionChoice(first=first)
        some = found.select(sum(SIZES), choice, torch.device("cpu")).index
        other = expected.select(max(SIZES), choice, torch.device("cpu")).index
        for name in ("context", "position", "token", "first"):
            assert torch.equal(getattr(some, name), getattr(other, name))


def test_a_text_that_was_masked_keeps_its_hash() -> None:
    batch, whole = rows_of([TEXTS[:6]]), rows_of([TEXTS[:6]])
    hidden = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
    hidden[:, 1::3] = True
    batch["labels"] = batch["input_ids"].masked_fill(~hidden, -100)
    batch["input_ids"] = batch["input_ids"].masked_fill(hidden, 2)
    places = original_contexts(batch, packed=True)
    assert places.shape == batch["input_ids"].shape
    assert torch.equal(places, original_contexts({**whole, "labels": None}, packed=True))
