"""The tokenizer of a model: its own, or one that the user names; UTF-8 bytes only if asked, or for random weights."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anisoscope.errors import AnisoscopeError, missing_path, refuse_special
from anisoscope.models.source import hub_reachable, looks_like_path

_SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
FILES = ("tokenizer*.json", "vocab.txt", "vocab.json", *_SENTENCEPIECE, "*.tiktoken")
BYTES = "bytes"  # what --tokenizer takes for UTF-8 bytes; a folder of that name is ./bytes
_PROBES = ("the", "a", "1", "C", ".")
_SMOLLM, _TINYLLAMA = "HuggingFaceTB/SmolLM2-", "TinyLlama/tinyLlama-intermediate-checkpoints"
# repositories of intermediate checkpoints, and the final one, whose tokenizer is used where they have none
FINAL = {f"bigscience/bloom-{size}-intermediate": f"bigscience/bloom-{size}" for size in ("560m", "1b1", "1b7")}
FINAL |= {f"{_SMOLLM}{size}-intermediate-checkpoints": f"{_SMOLLM}{size}" for size in ("135M", "360M", "1.7B")}
FINAL |= dict.fromkeys(
    (_TINYLLAMA, f"{_TINYLLAMA}-after-1T-token"), "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T"
)


class NoTokenizer(AnisoscopeError):
    """A model of text comes without a tokenizer, and none was named."""


class ByteTokenizer:
    """UTF-8 bytes as token ids, for a model that was trained on them, or for random weights.

    >>> ByteTokenizer(512)("hé")["input_ids"]
    [104, 195, 169]
    """

    all_special_ids: Sequence[int] = ()
    pad_token_id: int | None = None
    unk_token_id: int | None = None
    model_max_length = 10**30

    def __init__(self, vocab_size: int = 256, *, offset: int = 0) -> None:
        if vocab_size < 256 + offset:
            raise AnisoscopeError(
                f"the model knows {vocab_size} token ids, too few for UTF-8 bytes ({256 + offset} are needed); "
                f"give its own tokenizer with --tokenizer."
            )
        self.vocab_size = 256 + offset
        self.offset = offset

    def __len__(self) -> int:
        return self.vocab_size

    def __call__(self, text: str, *, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
        """Ids of a text; bytes have no special tokens to add."""
        return {"input_ids": [byte + self.offset for byte in text.encode("utf-8")]}

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; incomplete byte sequences become replacement characters."""
        return bytes(i - self.offset for i in ids).decode("utf-8", errors="replace")


@dataclass(frozen=True)
class Frame:
    """The special tokens that a tokenizer puts before and after a text."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.before) + len(self.after)


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text without special tokens, and without the warning about its length."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def special_frame(tokenizer: Any) -> Frame:
    """The special tokens around a text, found by encoding words with and without them."""
    for probe in _PROBES:
        plain = plain_ids(tokenizer, probe)
        full = list(tokenizer(probe)["input_ids"])
        for start in range(len(full) - len(plain) + 1):
            if plain and full[start : start + len(plain)] == plain:
                return Frame(tuple(full[:start]), tuple(full[start + len(plain) :]))
    raise AnisoscopeError(
        f"the tokenizer {type(tokenizer).__name__} gives no token ids for plain words; give another with --tokenizer."
    )


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that represent no text. The unknown token represents text, unless it also has another role."""
    ids = set(tokenizer.all_special_ids)
    roles = ("bos", "eos", "cls", "sep", "pad", "mask")
    others = {getattr(tokenizer, f"{role}_token_id", None) for role in roles}
    unknown = tokenizer.unk_token_id
    return frozenset(ids - {unknown} if unknown not in others else ids)


_SPECIAL = frozenset(("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"))


def load_tokenizer(
    place: str, *, config: Any, notes: list[str], gguf_file: str | None = None, **options: Any
) -> Any | None:
    """The tokenizer at `place` (a folder, a file or a hub id), or None."""
    path = Path(place).expanduser()
    if path.is_file():
        return tokenizer_from_file(path)
    if gguf_file is None and path.is_dir() and not any(any(path.glob(name)) for name in FILES):
        return architecture_tokenizer(str(getattr(config, "model_type", "")))
    from transformers import AutoTokenizer

    options |= {} if gguf_file is None else {"gguf_file": gguf_file}
    if not (path / "tokenizer.json").exists() and _of_letters(path / "vocab.txt"):
        notes.append("the tokenizer was read from vocab.txt, which has letters alone: each is a token")
        return tokenizer_from_file(path / "vocab.txt")
    tokenizer = None
    # all of these errors mean that there is no usable tokenizer; the caller reports it or uses bytes with a note
    with contextlib.suppress(OSError, ValueError, ImportError, KeyError, TypeError, AttributeError):
        tokenizer = AutoTokenizer.from_pretrained(place, config=config, **options)
    # transformers builds a tokenizer of special tokens alone if it does not find the vocabulary
    if tokenizer is not None and len(tokenizer) > len(set(tokenizer.all_special_ids)):
        if gguf_file is not None and _begins_texts(path / gguf_file):
            tokenizer.add_bos_token = True  # what the file says of it is lost on the way through transformers
        return tokenizer
    if (path / "vocab.txt").exists():
        notes.append("the tokenizer was read from vocab.txt as a WordPiece vocabulary")
        return tokenizer_from_file(path / "vocab.txt")
    return None


def _begins_texts(file: Path) -> bool:
    """Whether a GGUF file says that texts begin with the token of the beginning."""
    if not file.is_file():
        return False
    from gguf import GGUFReader

    said = GGUFReader(file).get_field("tokenizer.ggml.add_bos_token")
    return said is not None and bool(said.contents())


def named_tokenizer(name: str, *, notes: list[str], trust_remote_code: bool = False) -> Any | None:
    """The tokenizer that the user names: a folder, a file, or a hub id with or without `@revision`."""
    path = Path(name).expanduser()
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    refuse_special(path)
    if path.exists():
        return load_tokenizer(str(path), config=None, notes=notes, **options)
    if looks_like_path(name):
        raise missing_path(path)
    hub, _, revision = name.partition("@")
    options |= {"revision": revision or "main", "local_files_only": not hub_reachable()}
    return load_tokenizer(hub, config=None, notes=notes, **options)


def architecture_tokenizer(name: str) -> Any | None:
    """The tokenizer of an architecture without a vocabulary file: ByT5's bytes, CANINE's code points; else None."""
    import transformers

    known = {"byt5": "ByT5Tokenizer", "canine": "CanineTokenizer"}.get(name.lower())
    return getattr(transformers, known)() if known else None


def tokenizer_from_file(path: Path) -> Any:
    """A tokenizer from one file: `tokenizer.json`, or a WordPiece `vocab.txt`."""
    if path.suffix == ".json":
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(tokenizer_file=str(path))
    if path.suffix != ".txt":
        raise AnisoscopeError(
            f"{str(path)!r} is no tokenizer; expected a folder, a hub id, a tokenizer.json or a WordPiece vocab.txt."
        )
    from tokenizers import Regex, pre_tokenizers
    from transformers import BertTokenizer

    words = path.read_text(encoding="utf-8").splitlines()
    cased = any(word != word.lower() for word in words if not word.startswith("["))
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = BertTokenizer(vocab=vocab, do_lower_case=not cased)
    if len(tokenizer) != len(vocab):
        raise AnisoscopeError(
            f"{str(path)!r} is no WordPiece vocabulary: it lacks one of [UNK], [CLS], [SEP], [PAD], [MASK]."
        )
    if _of_letters(path):  # protein sequences have no spaces
        inner, letters = tokenizer.backend_tokenizer, pre_tokenizers.Split(Regex("."), "isolated")
        inner.pre_tokenizer = pre_tokenizers.Sequence([inner.pre_tokenizer, letters])
    return tokenizer


def _of_letters(path: Path) -> bool:
    """Whether a vocab.txt has single letters alone, beside BERT's special tokens; False where there is none."""
    try:
        words = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    except UnicodeDecodeError as error:
        raise AnisoscopeError(
            f"{str(path)!r} is not text in UTF-8 ({error}); expected a token a line: replace the file, or give another "
            "tokenizer with --tokenizer."
        ) from error
    letters = [word for word in words if not word.startswith("[")]
    return bool(letters) and all(len(word) == 1 for word in letters) and _SPECIAL.issubset(words)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A digest of a tokenizer's vocabulary and of the ids that it gives a text."""
    vocabulary = sorted(tokenizer.get_vocab().items()) if hasattr(tokenizer, "get_vocab") else len(tokenizer)
    ids = [int(i) for i in tokenizer('The 2 élèves said: "go on".')["input_ids"]]
    return hashlib.sha256(json.dumps([vocabulary, ids]).encode()).hexdigest()
