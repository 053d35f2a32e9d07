"""Tokenised corpora on disk: documents split by a hash of their content into training and held-out parts.

    corpus.json      the options it was made with, and counts
    tokenizer/       files that `AutoTokenizer` reads
    train.bin, held_out.bin              token ids (int16 or int32), documents joined by one [SEP]
    train.ends.npy, held_out.ends.npy    where each document ends

Memory is bounded; the folder is made under a temporary name and renamed, so that it is complete or absent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from anisoscope.data.enwik8 import whole_folder
from anisoscope.data.markup import clean, read_raw
from anisoscope.data.text import RECORD_SUFFIXES, Document, data_version, read_documents, suffix_of
from anisoscope.data.tokens import SEP, UNK, encoded, make_vocabulary, save_tokenizer, slices
from anisoscope.errors import AnisoscopeError
from anisoscope.results.privacy import marked

HELD_OUT = 0.05  # share of the range of content hashes that is held out
FEW = 4  # least number of documents held out
SECTION = 1 << 16  # characters; a longer document is split into sections, which count as documents
FEWEST = 20  # documents below which they are split more finely
SHORTEST = 256  # least characters of a section
PARTS = ("train", "held_out")
_MEGABYTE = 10**6


@dataclass(frozen=True, eq=False)
class CorpusPart:
    """The documents of one side of the split: token ids with a [SEP] after each but the last."""

    tokens: np.ndarray  # [n], memory-mapped
    ends: np.ndarray  # [documents] int64: document i is tokens[ends[i-1] + 1 : ends[i]]

    @property
    def starts(self) -> np.ndarray:
        """Where each document begins."""
        return np.concatenate([[0], self.ends[:-1] + 1])


@dataclass(frozen=True, eq=False)
class Corpus:
    """A tokenised corpus on disk."""

    path: Path
    about: dict[str, Any]
    train: CorpusPart
    held_out: CorpusPart

    @classmethod
    def open(cls, path: str | Path) -> Corpus:
        """A corpus that `prepare_corpus` wrote."""
        path = Path(path)
        try:
            about = json.loads((path / "corpus.json").read_text(encoding="utf-8"))
            # copy-on-write, because torch wants writable memory; nothing is written
            tokens = [np.memmap(path / f"{name}.bin", dtype=np.dtype(about["dtype"]), mode="c") for name in PARTS]
            ends = [np.load(path / f"{name}.ends.npy") for name in PARTS]
            return cls(path, about, *map(CorpusPart, tokens, ends))
        except (OSError, ValueError, KeyError) as error:
            raise AnisoscopeError(
                f"{str(path)!r} is no readable tokenised corpus ({error}); delete that folder, and it is made again."
            ) from error

    @property
    def vocab_size(self) -> int:
        """Number of token ids, special ones included."""
        return int(self.about["vocab_size"])

    @cached_property
    def tokenizer(self) -> Any:
        """The transformers tokenizer, for showing tokens as text."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(self.path / "tokenizer"), local_files_only=True)


def prepare_corpus(
    data: str, folder: str | Path, *, tokens: str = "char", limit: float | None = None, text_field: str = "text"
) -> Corpus:
    """Tokenise `data` into `folder`, or open a corpus there that was made with the same options.

    `tokens` is `char` (the distinct bytes of the training part), `enwik8` (its 205 bytes, whatever the text is) or
    `bpe:N` (trained on that part); `limit` is in megabytes of text. A MediaWiki export such as enwik8 is cleaned.
    Bytes without a token are [UNK]; `corpus.json` has their number.
    """
    folder = Path(folder)
    options = {"data": data, "tokens": tokens, "limit": limit, "text_field": text_field}
    if not (folder / "corpus.json").is_file():
        with whole_folder(folder, "corpus.json") as temporary:
            _make(temporary, options)
    corpus = Corpus.open(folder)
    check_made_of(corpus.about, options, f"the tokenised corpus in {str(folder)!r} was")
    return corpus


def check_made_of(about: Mapping[str, Any], wanted: Mapping[str, Any], what: str) -> None:
    """Raise an error if prepared data was made with other options."""
    made_of = about.get("made_of", {})
    for key, value in wanted.items():
        if made_of.get(key) not in (value, marked(value)):
            raise AnisoscopeError(
                f"{what} made with {key} = {made_of.get(key)!r}, not {value!r}; give another folder, or delete it."
            )


def _make(folder: Path, wanted: dict[str, Any]) -> None:
    spool = _spooled(wanted, folder)
    sides = dict(zip(PARTS, (~spool.held_out, spool.held_out), strict=True))
    tokenizer = make_vocabulary(wanted["tokens"], spool.documents(sides["train"]))
    size = tokenizer.get_vocab_size()
    dtype = np.dtype(np.int16 if size <= np.iinfo(np.int16).max else np.int32)
    about: dict[str, Any] = {"made_of": marked(wanted), "of": data_version(wanted["data"])}
    about |= {"vocab_size": size, "dtype": dtype.name}
    about |= {"fingerprint": spool.fingerprint, "bytes": int(spool.ends[-1]), "parts": {}}
    for name, side in sides.items():
        ids = encoded(spool.documents(side), tokenizer, tokens=wanted["tokens"])
        about["parts"][name] = _write_part(folder, name, ids, dtype=dtype)
    save_tokenizer(tokenizer, folder / "tokenizer")
    spool.path.unlink()
    (folder / "corpus.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def _write_part(folder: Path, name: str, documents: Iterable[np.ndarray], *, dtype: np.dtype) -> dict[str, int]:
    ends: list[int] = []
    position, unknown = 0, 0
    with (folder / f"{name}.bin").open("wb") as file:
        for ids in documents:
            if ends:
                file.write(np.array([SEP], dtype=dtype).tobytes())
                position += 1
            file.write(ids.astype(dtype).tobytes())
            position += len(ids)
            unknown += int(np.count_nonzero(ids == UNK))
            ends.append(position)
    np.save(folder / f"{name}.ends.npy", np.array(ends, dtype=np.int64))
    return {"documents": len(ends), "tokens": position - max(0, len(ends) - 1), "unknown": unknown}


@dataclass(frozen=True, eq=False)
class _Spool:
    """The text of all documents in one temporary file, so that the source is read (and cleaned) only once."""

    path: Path
    ends: np.ndarray  # [documents] int64, in bytes
    digests: np.ndarray  # [documents] uint64, of the content
    fingerprint: str

    @property
    def held_out(self) -> np.ndarray:
        """Documents whose content hash lies in the lowest 5 %, and at least four: equal documents stay together."""
        least = np.sort(np.unique(self.digests))[: FEW + 1]
        threshold = max(HELD_OUT * 2.0**64, float(least[min(FEW, len(least) - 1)]))
        return self.digests.astype(np.float64) < threshold

    def documents(self, chosen: np.ndarray) -> Iterator[bytes]:
        """The chosen documents, in their order."""
        starts = np.concatenate([[0], self.ends[:-1]])
        with self.path.open("rb") as file:
            for i in np.flatnonzero(chosen):
                file.seek(starts[i])
                yield file.read(int(self.ends[i] - starts[i]))


def _spooled(wanted: dict[str, Any], folder: Path) -> _Spool:
    """Write the text to a spool; a corpus of few long documents is split again into about forty sections."""
    spool = _write_spool(wanted, folder, section=SECTION)
    if len(spool.ends) < FEWEST:
        spool = _write_spool(wanted, folder, section=max(SHORTEST, int(spool.ends[-1]) // (2 * FEWEST)))
    different = len(np.unique(spool.digests))
    if different < 2 * FEW <= len(spool.ends):
        raise AnisoscopeError(
            f"{wanted['data']!r} repeats itself: of its {len(spool.ends)} pieces of text only {different} "
            f"{'differ' if different > 1 else 'is different'}, so nothing that was not trained on could be held out; "
            "give more varied text."
        )
    if different < 2 * FEW:
        raise AnisoscopeError(
            f"{wanted['data']!r} holds {int(spool.ends[-1])} bytes of text, too little to train on and to hold "
            f"some out; give more text."
        )
    return spool


def _write_spool(wanted: dict[str, Any], folder: Path, *, section: int) -> _Spool:
    most_bytes = None if wanted["limit"] is None else int(wanted["limit"] * _MEGABYTE)
    path, fingerprint = folder / "text.bin", hashlib.sha256()
    ends, digests, size = [], [], 0
    with path.open("wb") as file:
        documents = training_documents(wanted["data"], text_field=wanted["text_field"])
        pieces = (piece for document in documents for piece in slices(document.text, size=section))
        for raw in (piece.encode("utf-8") for piece in pieces if not piece.isspace()):
            size += file.write(raw)
            ends.append(size)
            digest = hashlib.sha256(raw).digest()
            digests.append(int.from_bytes(digest[:8], "little"))
            fingerprint.update(digest)
            if most_bytes is not None and size >= most_bytes:
                break
    return _Spool(path, np.array(ends, np.int64), np.array(digests, np.uint64), fingerprint.hexdigest())


def training_documents(data: str, *, text_field: str) -> Iterator[Document]:
    """The documents of a source (see `read_documents`), or the cleaned articles of a MediaWiki export."""
    path = Path(data).expanduser()
    if path.is_file() and suffix_of(path.name) not in RECORD_SUFFIXES:
        head = next(read_raw(path), b"")[:4096]
        if b"<mediawiki" in head or b"<page>" in head:
            return clean(read_raw(path))
    return read_documents(data, text_field=text_field)
