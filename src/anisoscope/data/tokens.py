"""From documents to contexts to batches: token ids in pieces that a model takes; what is dropped is counted.

Shapes: B contexts, T positions.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anisoscope.capture.rows.row import Batch
from anisoscope.data.text import Document
from anisoscope.errors import AnisoscopeError
from anisoscope.models.tokenizer import Frame, plain_ids, special_frame, special_ids
from anisoscope.numerics.hashing import mix, row_hash

SLICE = 100_000  # characters tokenised at a time, so that memory does not grow with a document
FEWEST = 2  # ordinary tokens that a context needs to be one
_WHITE = (" ", "\n", "\t")


@dataclass(frozen=True, eq=False)
class Context:
    """Token ids of one piece of one document, with the special tokens that its tokenizer adds."""

    ids: np.ndarray  # [T] int64
    special: np.ndarray  # [T] bool
    group: str = ""

    def __len__(self) -> int:
        return len(self.ids)


@dataclass
class TextCounts:
    """Counts of what went into contexts, and of what was dropped."""

    documents: int = 0
    contexts: int = 0
    tokens: int = 0  # rows given, special tokens included
    special: int = 0
    unknown: int = 0  # positions that the tokenizer had no word for
    dropped_pieces: int = 0  # with fewer than two ordinary tokens
    dropped_tokens: int = 0


@dataclass
class DataFingerprint:
    """A digest of the ids of all contexts used, whatever their order: the sum of their SHA-256 digests."""

    contexts: int = 0
    _sum: int = field(default=0, repr=False)

    def update(self, context: Context) -> None:
        """Add one context."""
        self.add(np.ascontiguousarray(context.ids, dtype="<i8").tobytes())

    def add(self, raw: bytes) -> None:
        """Add the content of one context as bytes."""
        digest = hashlib.sha256(raw).digest()
        self._sum = (self._sum + int.from_bytes(digest, "little")) % (1 << 256)
        self.contexts += 1

    def hexdigest(self) -> str:
        """The digest so far."""
        return f"{self._sum:064x}"


def contexts(
    documents: Iterable[Document],
    tokenizer: Any,
    *,
    length: int,
    tokens: int | None = None,
    counts: TextCounts | None = None,
) -> Iterator[Context]:
    """Each document in pieces of at most `length` tokens, special tokens included; no piece crosses documents.

    Pieces with fewer than two ordinary tokens are dropped and counted in `counts`. Stops after the context that
    reaches `tokens`.

    >>> from anisoscope.models.tokenizer import ByteTokenizer
    >>> pieces = contexts([Document("abcdefg")], ByteTokenizer(), length=4)
    >>> [c.ids.tolist() for c in pieces]
    [[97, 98, 99, 100], [101, 102, 103]]
    """
    counts = counts if counts is not None else TextCounts()
    return _counted(_Cutter(tokenizer, length), documents, tokens=tokens, counts=counts)


def _counted(
    cut: _Cutter, documents: Iterable[Document], *, tokens: int | None, counts: TextCounts
) -> Iterator[Context]:
    for document in documents:
        counts.documents += 1
        for context in cut(document):
            ordinary = int((~context.special).sum())
            if ordinary < FEWEST:
                counts.dropped_pieces += 1
                counts.dropped_tokens += ordinary
                continue
            counts.contexts += 1
            counts.tokens += len(context)
            counts.special += int(context.special.sum())
            counts.unknown += int((context.ids == cut.unknown).sum())
            yield context
            if tokens is not None and counts.tokens >= tokens:
                return


class _Cutter:
    """Cuts documents for one tokenizer and one length."""

    def __init__(self, tokenizer: Any, length: int) -> None:
        self.tokenizer = tokenizer
        self.frame: Frame = special_frame(tokenizer)
        self.special = np.array(sorted(special_ids(tokenizer)), dtype=np.int64)
        unknown = tokenizer.unk_token_id
        self.unknown = -1 if unknown is None or unknown in self.special else unknown
        self.room = length - len(self.frame)
        if self.room < FEWEST:
            raise AnisoscopeError(
                f"a context of {length} tokens leaves room for {self.room} beside {len(self.frame)} special tokens; "
                f"ask for at least {len(self.frame) + FEWEST}."
            )

    def __call__(self, document: Document) -> Iterator[Context]:
        ids: list[int] = []
        for text in slices(document.text):
            ids.extend(plain_ids(self.tokenizer, text))
            whole = len(ids) - len(ids) % self.room
            for start in range(0, whole, self.room):
                yield self._framed(ids[start : start + self.room], document.group)
            ids = ids[whole:]
        if ids:
            yield self._framed(ids, document.group)

    def _framed(self, piece: list[int], group: str) -> Context:
        context = framed(self.frame, piece)
        return Context(context.ids, context.special | np.isin(context.ids, self.special), group)


def framed(frame: Frame, piece: list[int]) -> Context:
    """Ids with the special tokens before and after them."""
    ids = np.array([*frame.before, *piece, *frame.after], dtype=np.int64)
    place = np.arange(len(ids))
    return Context(ids, (place < len(frame.before)) | (place >= len(ids) - len(frame.after)))


def slices(text: str, *, size: int = SLICE) -> Iterator[str]:
    """Slices of about `size` characters, cut before white space where there is some nearby, so no word is split.

    >>> list(slices("one two three", size=9))
    ['one two', ' three']
    """
    start = 0
    while len(text) - start > size:
        end = max(text.rfind(white, start + size // 2, start + size) for white in _WHITE)
        end = end if end > start else start + size
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def batches(
    contexts: Iterable[Context], *, batch_size: int, pad_id: int, side: str = "right", decoder_start: int | None = None
) -> Iterator[Batch]:
    """Padded batches in the order of the contexts.

    With `decoder_start` an encoder-decoder model's decoder reads the same text, shifted right by that start token.
    """
    if side not in ("right", "left"):
        raise AnisoscopeError(f"padding side {side!r} is not one of right, left.")
    source = iter(contexts)
    while chunk := list(itertools.islice(source, batch_size)):
        yield _batch(chunk, pad_id=pad_id, side=side, decoder_start=decoder_start)


def _batch(chunk: list[Context], *, pad_id: int, side: str, decoder_start: int | None) -> Batch:
    mask = _padded([np.ones(len(c), dtype=np.int64) for c in chunk], fill=0, side=side)
    inputs = {"input_ids": _padded([c.ids for c in chunk], fill=pad_id, side=side), "attention_mask": mask}
    if decoder_start is not None:
        shifted = [np.concatenate([[decoder_start], c.ids[:-1]]) for c in chunk]
        inputs["decoder_input_ids"] = _padded(shifted, fill=pad_id, side=side)
        inputs["decoder_attention_mask"] = mask.clone()
    special = _padded([c.special for c in chunk], fill=True, side=side)
    groups = tuple(c.group for c in chunk)
    return Batch(inputs, special=special, groups=groups if any(groups) else None)


def _padded(rows: list[np.ndarray], *, fill: int | bool, side: str) -> Tensor:
    """Rows of different lengths as one tensor [B, T]."""
    width = max(map(len, rows))
    out = np.full((len(rows), width), fill, dtype=bool if rows[0].dtype == bool else np.int64)
    for line, row in zip(out, rows, strict=True):
        line[slice(0, len(row)) if side == "right" else slice(width - len(row), width)] = row
    return torch.from_numpy(out)


# -- masked-language-model inputs: the usual 15 %, the same for the same context ---------------------------------------

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
    real = inputs["attention_mask"] != 0
    keys = torch.stack([_content(row[keep]) for row, keep in zip(ids, real, strict=True)])
    position = real.long().cumsum(1) - 1  # within the context, whichever side is padded
    chance = (row_hash(keys[:, None].expand_as(ids), position, seed=seed) >> 1) & ((1 << 62) - 1)
    usable = real & ~special
    chosen = usable & _smallest(chance, usable, rate)
    other = (mix(chance + 1) >> 3) & ((1 << 60) - 1)
    noise = (other // 10) % max(1, len(tokenizer))
    shown = torch.where(other % 10 < 8, mask_id, torch.where(other % 10 == 8, noise, ids))
    labels = torch.where(chosen, ids, IGNORED)
    return {**inputs, "input_ids": torch.where(chosen, shown, ids), "labels": labels}


def _content(ids: Tensor) -> Tensor:
    """A hash of the content of one context."""
    return mix(row_hash(ids, torch.arange(len(ids))).sum())


def _smallest(chance: Tensor, usable: Tensor, rate: float) -> Tensor:
    """In each context the round(rate·n) usable positions with the smallest numbers, at least one."""
    largest = torch.iinfo(torch.int64).max
    order = torch.where(usable, chance, largest).argsort(dim=1, stable=True).argsort(dim=1, stable=True)
    count = (usable.sum(1, keepdim=True) * rate).round().clamp_min(1)
    return order < count
