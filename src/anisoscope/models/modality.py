"""What kind of data a model reads, and what one row of it is."""

from __future__ import annotations

import inspect
import re
from typing import Any

from torch import nn

from anisoscope.capture.rows.frame import SOUND
from anisoscope.capture.sites.layout import Layout, find_layout, unwrapped
from anisoscope.capture.sites.part import attends

ROWS: dict[str, str] = {
    "text": "one token",
    "characters": "one character (or byte) of text",
    "speech": "one frame of audio",
    "vision": "one patch of an image",
    "convolution": "one position of a feature map",
}
APART = "; class and register tokens are apart"
_CHARACTERS = ("canine", "byt5")
_CONVOLUTION = ("cvt",)  # attends, but between convolutions: the literature counts it with them
_LETTERS = ("ByteTokenizer", "ByT5Tokenizer", "CanineTokenizer")
_BYT5_WORDS = 384  # three special tokens, 256 bytes, 125 sentinels
_PLACEHOLDERS = re.compile(r"\[(PAD|UNK|CLS|SEP|MASK|BOS|EOS|unused\d+)\]|<[^<>]+>")


def modality_of(model: nn.Module, tokenizer: Any = None) -> str:
    """Text, characters, speech, vision or convolution: by what the model reads and what it is made of."""
    inner = _reading(unwrapped(model))
    reads = _main_input(inner)
    config = getattr(inner, "config", None)
    if reads in SOUND:
        return "speech"
    if reads == "pixel_values":
        counted = getattr(config, "model_type", "") in _CONVOLUTION or not attends(inner)
        return "convolution" if counted else "vision"
    return "characters" if _letters(config, tokenizer) else "text"


def modalities_of(model: nn.Module, stacks: list[str], tokenizer: Any = None) -> dict[str, str]:
    """The modality of every stack: a decoder under a speech or image encoder reads tokens."""
    whole = modality_of(model, tokenizer)
    inner = getattr(unwrapped(model), "decoder", None)
    token = "characters" if _letters(getattr(inner, "config", None), tokenizer) else "text"
    under = whole not in ("text", "characters")
    return {stack: token if stack == "decoder" and under else whole for stack in stacks}


def pool_fits(model: nn.Module, pool: str, layout: Layout | None = None) -> bool:
    """Whether the row that a pool takes of a context means something in a model: a class token, the last of a text.

    Of sounds and pictures the first and the last position are frames or patches like any other.
    """
    if pool not in ("cls", "last") or modality_of(model) in ("text", "characters"):
        return True
    return pool == "cls" and any(stack.prefix for stack in (layout or find_layout(model)).stacks)


def row_words(modalities: dict[str, str], layout: Layout | None = None) -> dict[str, str]:
    """What a row is, by stack; where a layout has tokens that are no part of the input, that they are apart.

    >>> row_words({"encoder": "speech"})
    {'encoder': 'one frame of audio'}
    """
    apart = {s.name for s in layout.stacks if s.prefix or s.suffix} if layout is not None else set()
    return {stack: ROWS[modality] + (APART if stack in apart else "") for stack, modality in modalities.items()}


def _reading(model: nn.Module) -> nn.Module:
    """The outermost part that says what it reads (a module of one's own may hold such a model), of two the encoder."""
    said = (part for part in model.modules() if hasattr(part, "main_input_name") and hasattr(part, "config"))
    found = next(said, model)
    encoder = getattr(found, "encoder", None)
    heard = getattr(encoder, "main_input_name", "") in (*SOUND, "pixel_values")  # an encoder inside may not say
    return encoder if heard and isinstance(encoder, nn.Module) else found


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


def _letters(config: Any, tokenizer: Any) -> bool:
    """Whether tokens are single characters or bytes, by the family or by the tokenizer."""
    kind = str(getattr(config, "model_type", ""))
    named = str(getattr(config, "tokenizer_class", "") or "")
    byt5 = kind == "t5" and getattr(config, "vocab_size", None) == _BYT5_WORDS
    return kind in _CHARACTERS or named in _LETTERS or byt5 or _single_letters(tokenizer)


def _single_letters(tokenizer: Any) -> bool:
    """Whether the ordinary tokens of a tokenizer are single characters or bytes."""
    if tokenizer is None:
        return False
    if type(tokenizer).__name__ in _LETTERS:
        return True
    special = set(getattr(tokenizer, "all_special_tokens", ()))
    vocabulary: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
    words = [word for word in vocabulary if word not in special and not _PLACEHOLDERS.fullmatch(word)]
    return bool(words) and sum(len(word) == 1 for word in words) > 0.9 * len(words)
