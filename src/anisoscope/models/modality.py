"""Which modality a model is of: by the argument its forward reads, what it is made of, and its tokenizer."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from anisoscope.models.forward import attends, unwrapped
from anisoscope.results.modality import CHARACTERS, MODALITIES, TEXT, Modality

_CHARACTER_FAMILIES = ("canine", "byt5")
_CONVOLUTION_FAMILIES = ("cvt",)  # attends, but between convolutions: the literature counts it with them
_CHARACTER_TOKENIZERS = ("ByteTokenizer", "ByT5Tokenizer", "CanineTokenizer")
_BYT5_WORDS = 384  # three special tokens, 256 bytes, 125 sentinels
_PLACEHOLDERS = re.compile(r"\[(PAD|UNK|CLS|SEP|MASK|BOS|EOS|unused\d+)\]|<[^<>]+>")


def modality_of(model: nn.Module, tokenizer: Any = None) -> Modality:
    """The modality of what a model reads first."""
    inner = _reading_part(unwrapped(model))
    config, found = getattr(inner, "config", None), _reading(_main_input(inner))
    if not found:
        return _token_modality(config, tokenizer)
    mixes = getattr(config, "model_type", "") not in _CONVOLUTION_FAMILIES and attends(inner)
    return next((modality for modality in found if modality.attends == mixes), found[0])


def _reading(name: str) -> list[Modality]:
    """The modalities other than text whose medium a forward takes under this name."""
    return [modality for modality in MODALITIES.values() if name in modality.medium.inputs and not modality.is_text]


def modalities_of(model: nn.Module, stacks: Iterable[str], tokenizer: Any = None) -> dict[str, str]:
    """The name of the modality of every stack: a decoder under a speech or image encoder reads tokens."""
    whole = modality_of(model, tokenizer)
    decoder = getattr(unwrapped(model), "decoder", None)
    below = whole if whole.is_text else _token_modality(getattr(decoder, "config", None), tokenizer)
    return {stack: (below if stack == "decoder" else whole).name for stack in stacks}


def _reading_part(model: nn.Module) -> nn.Module:
    """The outermost part that names its input (a user's module may hold such a model); of two the encoder."""
    named = (part for part in model.modules() if hasattr(part, "main_input_name") and hasattr(part, "config"))
    found = next(named, model)
    encoder = getattr(found, "encoder", None)
    reads_media = _reading(getattr(encoder, "main_input_name", ""))  # an encoder inside may not name its input
    return encoder if reads_media and isinstance(encoder, nn.Module) else found


def _main_input(model: nn.Module) -> str:
    """The name of what a model reads; for a module of no library, by its first layers."""
    if (name := getattr(model, "main_input_name", None)) is not None:
        return str(name)
    takes_ids = "input_ids" in inspect.signature(model.forward).parameters
    parts = [part for part in model.modules() if isinstance(part, (nn.Conv1d, nn.Conv2d, nn.Embedding))]
    if takes_ids or not parts:
        return "input_ids"
    if any(isinstance(part, nn.Conv2d) for part in parts):
        return "pixel_values"
    return "input_values" if isinstance(parts[0], nn.Conv1d) else "input_ids"


def _token_modality(config: Any, tokenizer: Any) -> Modality:
    """Characters where tokens are single characters or bytes, by the family or by the tokenizer."""
    family = str(getattr(config, "model_type", ""))
    named = str(getattr(config, "tokenizer_class", "") or "")
    byt5 = family == "t5" and getattr(config, "vocab_size", None) == _BYT5_WORDS
    known = family in _CHARACTER_FAMILIES or named in _CHARACTER_TOKENIZERS or byt5
    return CHARACTERS if known or _splits_characters(tokenizer) else TEXT


def _splits_characters(tokenizer: Any) -> bool:
    """Whether the ordinary tokens of a tokenizer are single characters or bytes."""
    if tokenizer is None or type(tokenizer).__name__ in _CHARACTER_TOKENIZERS:
        return tokenizer is not None
    special = set(getattr(tokenizer, "all_special_tokens", ()))
    vocabulary: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
    words = [word for word in vocabulary if word not in special and not _PLACEHOLDERS.fullmatch(word)]
    return bool(words) and sum(len(word) == 1 for word in words) > 0.9 * len(words)
