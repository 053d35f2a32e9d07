"""Tokenisation: vocabularies, documents cut into contexts of bounded length, padded batches and masking.

A vocabulary is the distinct bytes of the training text, the 205 byte values of enwik8, or byte-level BPE, saved in
transformers' format; a byte without a token becomes [UNK]. Dropped tokens are counted. Shapes: B contexts, T positions.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anisoscope.capture.row import Batch
from anisoscope.data.enwik8 import SYMBOLS
from anisoscope.data.text import Document
from anisoscope.errors import AnisoscopeError
from anisoscope.models.tokenizer import Frame, plain_ids, special_frame, special_ids
from anisoscope.numerics.hashing import mix, row_hash

SLICE = 100_000  # characters tokenised at a time, so that memory does not grow with a document
FEWEST = 2  # ordinary (not special) tokens of a context, at least
IGNORED = -100  # label of a position that is not predicted
RATE = 0.15  # share of the positions that a masked language model predicts
SPECIALS = ("[PAD]", "[UNK]", "[MASK]", "[SEP]")  # the first ids of every vocabulary, so that all arms share them
PAD, UNK, MASK, SEP = range(len(SPECIALS))
LARGEST = 1_000_000  # entries of a BPE vocabulary
BYTES = ("char", "enwik8")  # vocabularies whose tokens are single bytes
SMALLEST = len(SPECIALS) + 256 + 1  # a byte-level BPE vocabulary with one merge
_GROUP = 4 << 20  # bytes encoded at a time: enough for all threads of the tokenizer
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
    tokens: int = 0  # positions of all contexts, special tokens included
    special: int = 0
    unknown: int = 0  # positions with the unknown token
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
    """Cut each document into contexts of at most `length` tokens, special tokens included; none crosses documents.

    Pieces with fewer than two ordinary tokens are dropped and counted in `counts`. Stops after the context that
    reaches `tokens`.

    >>> from anisoscope.models.tokenizer import ByteTokenizer
    >>> pieces = contexts([Document("abcdefg")], ByteTokenizer(), length=4)
    >>> [c.ids.tolist() for c in pieces]
    [[97, 98, 99, 100], [101, 102, 103]]
    """
    frame, counts = special_frame(tokenizer), counts if counts is not None else TextCounts()
    room = length - len(frame)
    if room < FEWEST:
        raise AnisoscopeError(
            f"a context of {length} tokens leaves room for {room} beside {len(frame)} special tokens; "
            f"ask for at least {len(frame) + FEWEST}."
        )
    return _cut(documents, tokenizer, frame=frame, room=room, tokens=tokens, counts=counts)


def _cut(
    documents: Iterable[Document], tokenizer: Any, *, frame: Frame, room: int, tokens: int | None, counts: TextCounts
) -> Iterator[Context]:
    special_tokens = np.array(sorted(special_ids(tokenizer)), dtype=np.int64)
    unknown_id = -1 if tokenizer.unk_token_id in (None, *special_tokens) else tokenizer.unk_token_id
    for document in documents:
        counts.documents += 1
        for block in _blocks(document.text, tokenizer, room):
            ids, special = _framed_rows(frame, block)
            special |= np.isin(ids, special_tokens)
            ordinary, unknown = (~special).sum(1).tolist(), (ids == unknown_id).sum(1).tolist()
            for row, usable in enumerate(ordinary):
                if usable < FEWEST:
                    counts.dropped_pieces += 1
                    counts.dropped_tokens += usable
                    continue
                counts.contexts += 1
                counts.tokens += ids.shape[1]
                counts.special += ids.shape[1] - usable
                counts.unknown += unknown[row]
                yield Context(ids[row], special[row], document.group)
                if tokens is not None and counts.tokens >= tokens:
                    return


def _blocks(text: str, tokenizer: Any, room: int) -> Iterator[np.ndarray]:
    """The ids of a text in pieces of `room`, as arrays [pieces, room] of a slice each, and the rest [1, fewer]."""
    rest = np.empty(0, dtype=np.int64)
    for part in slices(text):
        ids = np.concatenate([rest, np.array(plain_ids(tokenizer, part), dtype=np.int64)])
        whole = len(ids) - len(ids) % room
        if whole:
            yield ids[:whole].reshape(-1, room)
        rest = ids[whole:]
    if len(rest):
        yield rest[None]


def _framed_rows(frame: Frame, pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every row of ids with the tokenizer's special tokens before and after it, and where these are [pieces, T]."""
    before, after = (np.broadcast_to(np.array(ids, dtype=np.int64), (len(pieces), len(ids)))
                     for ids in (frame.before, frame.after))  # fmt: skip
    ids = np.concatenate([before, pieces, after], axis=1)
    place = np.arange(ids.shape[1])
    added = (place < len(frame.before)) | (place >= len(place) - len(frame.after))
    return ids, np.tile(added, (len(ids), 1))


def framed(frame: Frame, piece: list[int]) -> Context:
    """A context of the ids `piece` with the tokenizer's special tokens before and after them."""
    ids, special = _framed_rows(frame, np.array(piece, dtype=np.int64)[None])
    return Context(ids[0], special[0])


def slices(text: str, *, size: int = SLICE) -> Iterator[str]:
    """Split a text into slices of about `size` characters, before white space where possible, so no word is split.

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

    With `decoder_start` they also hold the inputs of a decoder: the same ids shifted right behind that start token.
    """
    if side not in ("right", "left"):
        raise AnisoscopeError(f"padding side {side!r} is not one of right, left.")
    source = iter(contexts)
    while chunk := list(itertools.islice(source, batch_size)):
        mask = _padded([np.ones(len(c), dtype=np.int64) for c in chunk], fill=0, side=side)
        inputs = {"input_ids": _padded([c.ids for c in chunk], fill=pad_id, side=side), "attention_mask": mask}
        if decoder_start is not None:
            shifted = [np.concatenate([[decoder_start], c.ids[:-1]]) for c in chunk]
            inputs["decoder_input_ids"] = _padded(shifted, fill=pad_id, side=side)
            inputs["decoder_attention_mask"] = mask.clone()
        special = _padded([c.special for c in chunk], fill=True, side=side)
        groups = tuple(c.group for c in chunk)
        yield Batch(inputs, special=special, groups=groups if any(groups) else None)


def _padded(rows: list[np.ndarray], *, fill: int | bool, side: str) -> Tensor:
    """Rows of different lengths as one tensor [B, T]."""
    width = max(map(len, rows))
    out = np.full((len(rows), width), fill, dtype=bool if rows[0].dtype == bool else np.int64)
    for line, row in zip(out, rows, strict=True):
        line[slice(0, len(row)) if side == "right" else slice(width - len(row), width)] = row
    return torch.from_numpy(out)


def mask_batch(inputs: dict[str, Tensor], special: Tensor, tokenizer: Any, *, seed: int = 0) -> Any:
    """Hide 15 % of the ordinary positions: of those 80 % become the mask token, 10 % another token, 10 % stay.

    The choice depends only on the content of the context and the seed, not on batching or order.
    """
    mask_id = getattr(tokenizer, "mask_token_id", None)
    if mask_id is None:
        raise AnisoscopeError(
            "the tokenizer has no mask token, so no masked-language-model loss can be made; give --tokenizer with one."
        )
    ids, real = inputs["input_ids"], inputs["attention_mask"] != 0
    content = [row[keep] for row, keep in zip(ids, real, strict=True)]
    keys = torch.stack([mix(row_hash(row, torch.arange(len(row))).sum()) for row in content])
    position = real.long().cumsum(1) - 1  # within the context, whichever side is padded
    chance = (row_hash(keys[:, None].expand_as(ids), position, seed=seed) >> 1) & ((1 << 62) - 1)
    # choose the round(0.15·n) usable positions of each context with the smallest hashes, at least one
    usable = real & ~special
    sort_key = torch.where(usable, chance, torch.iinfo(torch.int64).max)
    rank = sort_key.argsort(dim=1, stable=True).argsort(dim=1, stable=True)
    chosen = usable & (rank < (usable.sum(1, keepdim=True) * RATE).round().clamp_min(1))
    second_draw = (mix(chance + 1) >> 3) & ((1 << 60) - 1)
    noise = (second_draw // 10) % max(1, len(tokenizer))
    replacement = torch.where(second_draw % 10 < 8, mask_id, torch.where(second_draw % 10 == 8, noise, ids))
    labels = torch.where(chosen, ids, IGNORED)
    return {**inputs, "input_ids": torch.where(chosen, replacement, ids), "labels": labels}


def parse_tokens(tokens: str) -> int:
    """The vocabulary size N of `bpe:N`, or 0 for `char` and `enwik8`, whose tokens are bytes.

    >>> parse_tokens("char"), parse_tokens("enwik8"), parse_tokens("bpe:8192")
    (0, 0, 8192)
    """
    if tokens in BYTES:
        return 0
    kind, _, size = tokens.partition(":")
    if kind != "bpe" or not size.isdecimal():
        raise AnisoscopeError(
            f"tokens {tokens!r} is not understood; expected char, enwik8 (its 205 bytes), or bpe:N such as bpe:8192."
        )
    if len(size) < 6 and int(size) < SMALLEST:
        raise AnisoscopeError(
            f"a BPE vocabulary of {size} is too small: {SMALLEST - 1} entries are special tokens and bytes; "
            f"ask for more than that."
        )
    if len(size) > 9 or int(size) > LARGEST:
        raise AnisoscopeError(f"a BPE vocabulary of {size[:20]} is too large; expected at most {LARGEST:,} entries.")
    return int(size)


def make_vocabulary(tokens: str, documents: Iterable[bytes]) -> Any:
    """Build a `tokenizers.Tokenizer` from training documents (UTF-8 bytes); `enwik8` does not depend on them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    size = parse_tokens(tokens)
    if size:
        model = models.BPE()
    else:  # one token per byte: a BPE model without merges
        seen = np.zeros(256, dtype=bool)
        seen[list(SYMBOLS)] = tokens == "enwik8"
        for document in documents if tokens == "char" else ():
            seen[np.frombuffer(document, dtype=np.uint8)] = True
        vocabulary = [*SPECIALS, *(letter for letter, present in zip(byte_letters(), seen, strict=True) if present)]
        model = models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=[], unk_token=SPECIALS[UNK])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=size > 0)
    tokenizer.decoder = decoders.ByteLevel()
    if size:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        options: dict[str, Any] = {"special_tokens": list(SPECIALS), "initial_alphabet": alphabet}
        trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False, **options)
        texts = (piece for document in documents for piece in slices(document.decode("utf-8")))
        tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def byte_letters() -> list[str]:
    """The printable character that byte-level tokenizers write for each of the 256 bytes.

    >>> byte_letters()[65], byte_letters()[32]
    ('A', 'Ġ')
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    substitutes = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(substitutes)) for byte in range(256)]


def encoded(documents: Iterable[bytes], tokenizer: Any, *, tokens: str) -> Iterator[np.ndarray]:
    """The token ids of each document (UTF-8 bytes), int32; text such as "[MASK]" is encoded as ordinary text."""
    tokenizer.encode_special_tokens = True
    if tokens in BYTES:  # a lookup table is a hundred times faster
        vocabulary = tokenizer.get_vocab()
        table = np.array([vocabulary.get(letter, UNK) for letter in byte_letters()], dtype=np.int32)
        yield from (table[np.frombuffer(document, dtype=np.uint8)] for document in documents)
        return
    pending: list[bytes] = []
    size = 0
    for document in documents:
        pending.append(document)
        size += len(document)
        if size >= _GROUP:
            yield from _encoded_group(pending, tokenizer)
            pending, size = [], 0
    yield from _encoded_group(pending, tokenizer)


def _encoded_group(documents: list[bytes], tokenizer: Any) -> Iterator[np.ndarray]:
    pieces = [list(slices(document.decode("utf-8"))) for document in documents]
    encode = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)  # without offsets
    encodings = iter(encode([p for parts in pieces for p in parts], add_special_tokens=False))
    for parts in pieces:
        yield np.concatenate([np.empty(0, np.int32), *(np.asarray(next(encodings).ids, dtype=np.int32) for _ in parts)])


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write the files that `AutoTokenizer` loads; the tokenizer adds no special tokens around a text."""
    from transformers import PreTrainedTokenizerFast

    roles = {"pad_token": PAD, "unk_token": UNK, "mask_token": MASK, "sep_token": SEP}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # "[MASK]" in an article is text
        **{role: SPECIALS[i] for role, i in roles.items()},
    )
    fast.save_pretrained(str(folder))
