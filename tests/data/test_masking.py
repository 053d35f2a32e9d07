"""Masked inputs for somebody else's model: the usual 15 %, the same for the same context in any batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from anisoscope.data.tokens import IGNORED, mask_batch
from anisoscope.errors import AnisoscopeError
from support.tiny_models import contexts, padded

MASK, SIZE = 5, 60


class Words(SimpleNamespace):
    def __len__(self) -> int:
        return SIZE


TOKENIZER: Any = Words(mask_token_id=MASK)


def masked(ids: list[Tensor], *, side: str = "right", **options: Any) -> list[tuple[list[int], list[int]]]:
    """(ids, labels) of every context, without padding."""
    batch = padded(ids, side=side)
    nothing = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
    found = mask_batch(batch, nothing, TOKENIZER, **options)
    real = batch["attention_mask"].bool()
    assert bool((found["labels"][~real] == IGNORED).all()) and torch.equal(found["attention_mask"], real.long())
    return [(i[r].tolist(), x[r].tolist()) for i, x, r in zip(found["input_ids"], found["labels"], real, strict=True)]


def test_fifteen_per_cent_are_hidden_and_four_fifths_of_them_become_the_mask() -> None:
    ids = contexts(*[200] * 100)
    hidden = shown_as_mask = kept = 0
    for original, (shown, labels) in zip(ids, masked(ids), strict=True):
        chosen = [t for t, label in enumerate(labels) if label != IGNORED]
        assert len(chosen) == 30
        assert [labels[t] for t in chosen] == [int(original[t]) for t in chosen]
        assert all(shown[t] == int(original[t]) for t in range(200) if t not in set(chosen))
        hidden += len(chosen)
        shown_as_mask += sum(shown[t] == MASK for t in chosen)
        kept += sum(shown[t] == int(original[t]) for t in chosen)
    assert 0.78 < shown_as_mask / hidden < 0.82
    assert 0.08 < kept / hidden < 0.125


@pytest.mark.parametrize("side", ["right", "left"])
def test_what_is_hidden_depends_on_the_context_and_the_seed_alone(side: str) -> None:
    ids = contexts(20, 35, 12, 28)
    whole = masked(ids, side=side)
    assert [masked([row])[0] for row in ids] == whole
    assert masked(ids[::-1], side=side)[::-1] == whole
    assert masked(ids, side=side, seed=1) != whole


def test_special_tokens_are_never_hidden() -> None:
    batch = padded(contexts(20, 12))
    special = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
    special[:, 0] = True
    for seed in range(30):
        assert bool((mask_batch(batch, special, TOKENIZER, seed=seed)["labels"][:, 0] == IGNORED).all())


def test_even_the_shortest_context_has_something_to_learn() -> None:
    assert [sum(x != IGNORED for x in labels) for _, labels in masked(contexts(1, 2, 3))] == [1, 1, 1]
    batch = padded(contexts(3))
    assert bool((mask_batch(batch, torch.ones(1, 3, dtype=torch.bool), TOKENIZER)["labels"] == IGNORED).all())


def test_masking_leaves_its_input_and_the_random_numbers_alone() -> None:
    batch = padded(contexts(20, 12))
    before, state = batch["input_ids"].clone(), torch.get_rng_state()
    mask_batch(batch, torch.zeros_like(before, dtype=torch.bool), TOKENIZER)
    assert torch.equal(batch["input_ids"], before) and torch.equal(torch.get_rng_state(), state)


def test_a_tokenizer_without_a_mask_is_refused() -> None:
    batch = padded(contexts(4))
    with pytest.raises(AnisoscopeError, match="no mask token"):
        mask_batch(batch, torch.zeros(1, 4, dtype=torch.bool), SimpleNamespace(mask_token_id=None))
