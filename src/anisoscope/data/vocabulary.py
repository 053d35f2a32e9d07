"""Token vocabularies: the bytes of the training text, the 205 of enwik8, or byte-level BPE; saved for transformers.

A byte that has no token becomes [UNK]; `corpus.json` counts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from anisoscope.data.enwik8.symbols import SYMBOLS
from anisoscope.data.tokens import slices
from anisoscope.errors import AnisoscopeError

SPECIALS = ("[PAD]", "[UNK]", "[MASK]", "[SEP]")  # the first ids of every vocabulary, so that all arms share them
PAD, UNK, MASK, SEP = range(len(SPECIALS))
BYTES = ("char", "enwik8")  # kinds of tokens that are single bytes
FEWEST = len(SPECIALS) + 256 + 1  # a byte-level BPE vocabulary with one merge


def parse_tokens(tokens: str) -> int:
    """The size asked for by `bpe:N`, or 0 for `char` and `enwik8`, whose tokens are bytes.

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
    if int(size) < FEWEST:
        raise AnisoscopeError(
            f"a BPE vocabulary of {size} is too small: {FEWEST - 1} entries are special tokens and bytes; "
            f"ask for more than that."
        )
    return int(size)


def make_vocabulary(tokens: str, documents: Iterable[bytes]) -> Any:
    """The `tokenizers` tokenizer of some training documents (UTF-8); that of `enwik8` is the same for every text."""
    size = parse_tokens(tokens)
    if size:
        return _trained_bpe(size, documents)
    return _byte_vocabulary(SYMBOLS if tokens == "enwik8" else _distinct_bytes(documents))


def _distinct_bytes(documents: Iterable[bytes]) -> list[int]:
    seen = np.zeros(256, dtype=bool)
    for document in documents:
        seen[np.frombuffer(document, dtype=np.uint8)] = True
    return np.flatnonzero(seen).tolist()


def byte_letters() -> list[str]:
    """The printable letter that byte-level tokenizers write for each byte: itself where it is printable.

    >>> byte_letters()[65], byte_letters()[32]
    ('A', 'Ġ')
    """
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def _byte_vocabulary(present: Sequence[int]) -> Any:
    """Each byte a token. Merges are what makes a BPE model more than its letters; this one has none."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = byte_letters()
    words = [*SPECIALS, *(letters[byte] for byte in present)]
    model = models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token=SPECIALS[UNK])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _trained_bpe(size: int, documents: Iterable[bytes]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (piece for document in documents for piece in slices(document.decode("utf-8")))
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def encoder_of(tokenizer: Any, *, tokens: str) -> Encoder:
    """How documents become ids: a table for bytes, the tokenizer itself for BPE."""
    return ByteEncoder(tokenizer) if tokens in BYTES else Encoder(tokenizer)


class Encoder:
    """Documents (UTF-8) to ids; words of the text that look like special tokens stay text."""

    group = 4 << 20  # bytes encoded at a time: enough for all threads of the tokenizer

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        tokenizer.encode_special_tokens = True

    def __call__(self, documents: Iterable[bytes]) -> Iterator[np.ndarray]:
        held: list[bytes] = []
        size = 0
        for document in documents:
            held.append(document)
            size += len(document)
            if size >= self.group:
                yield from self._encoded(held)
                held, size = [], 0
        yield from self._encoded(held)

    def _encoded(self, documents: list[bytes]) -> Iterator[np.ndarray]:
        pieces = [list(slices(document.decode("utf-8"))) for document in documents]
        encode = getattr(self.tokenizer, "encode_batch_fast", self.tokenizer.encode_batch)  # without offsets
        encoded = iter(encode([p for of in pieces for p in of], add_special_tokens=False))
        for of in pieces:
            ids = [next(encoded).ids for _ in of]
            yield np.concatenate([np.asarray(i, dtype=np.int32) for i in ids]) if ids else np.empty(0, np.int32)


class ByteEncoder(Encoder):
    """The same by table, which is a hundred times faster."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        known = tokenizer.get_vocab()
        self.table = np.array([known.get(letter, UNK) for letter in byte_letters()], dtype=np.int32)

    def _encoded(self, documents: list[bytes]) -> Iterator[np.ndarray]:
        for document in documents:
            yield self.table[np.frombuffer(document, dtype=np.uint8)]


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Files from which `AutoTokenizer` makes the same tokenizer; it adds no tokens around a text."""
    from transformers import PreTrainedTokenizerFast

    roles = {"pad_token": PAD, "unk_token": UNK, "mask_token": MASK, "sep_token": SEP}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # "[MASK]" in an article is text
        **{role: SPECIALS[i] for role, i in roles.items()},
    )
    fast.save_pretrained(str(folder))
