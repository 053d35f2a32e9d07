"""Masked-language-model inputs for a model that somebody else trained: the usual 15 %, the same for the same context.

Shapes: B contexts, T positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError
from anisoscope.numerics.hashing import mix, row_hash

IGNORED = -100
RATE = 0.15


def mask_batch(inputs: dict[str, Tensor], special: Tensor, tokenizer: Any, *, rate: float = RATE, seed: int = 0) -> Any:
    """Hide `rate` of the ordinary positions: of those 80 % become the mask token, 10 % another token, 10 % stay.

    Which ones depends on the content of the context and the seed alone, so neither batch nor order matters.
    """
    mask_id = getattr(tokenizer, "mask_token_id", None)
    if mask_id is None:
        raise AnisoscopeError(
            "the tokenizer has no mask token, so no masked-language-model loss can be made; give --tokenizer with one."
        )
    ids = inputs["input_ids"]
    usable = (inputs["attention_mask"] != 0) & ~special
    keys = torch.stack([_content(row[keep]) for row, keep in zip(ids, inputs["attention_mask"] != 0, strict=True)])
    position = (inputs["attention_mask"] != 0).long().cumsum(1) - 1  # within the context, whichever side is padded
    chance = (row_hash(keys[:, None].expand_as(ids), position, seed=seed) >> 1) & ((1 << 62) - 1)
    chosen = usable & _smallest(chance, usable, rate)
    other = (mix(chance + 1) >> 3) & ((1 << 60) - 1)
    noise = (other // 10) % max(1, len(tokenizer))
    shown = torch.where(other % 10 < 8, mask_id, torch.where(other % 10 == 8, noise, ids))
    labels = torch.where(chosen, ids, IGNORED)
    return {**inputs, "input_ids": torch.where(chosen, shown, ids), "labels": labels}


def _content(ids: Tensor) -> Tensor:
    """A number for the content of one context."""
    place = torch.arange(len(ids))
    return mix(row_hash(ids, place).sum())


def _smallest(chance: Tensor, usable: Tensor, rate: float) -> Tensor:
    """In each context the round(rate·n) usable positions with the smallest numbers, at least one."""
    largest = torch.iinfo(torch.int64).max
    order = torch.where(usable, chance, largest).argsort(dim=1, stable=True).argsort(dim=1, stable=True)
    count = (usable.sum(1, keepdim=True) * rate).round().clamp_min(1)
    return order < count
