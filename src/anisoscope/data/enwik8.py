"""Preparing enwik8, the first 10⁸ bytes of the English Wikipedia of March 2006, as a folder of plain articles.

    enwik8.txt         the articles in plain text, UTF-8, two blank lines between them (no article holds two)
    enwik8.bin         the same, byte for byte, as ids 0…204, uint8
    enwik8.ends.npy    where each article ends in both, int64
    enwik8.titles      the title of each article, one a line
    vocabulary.json    the byte of each id
    stats.json         what was read, kept and removed, and the fingerprints

The folder is complete or absent; its fingerprint is the SHA-256 of `enwik8.txt`. The 205 symbols are the distinct byte
values of enwik8 in ascending order, fixed here so that every text has the same ids:

    id        0  1  2 … 96   97 … 160   161 … 187   188   189 … 202   203 204
    byte      9 10 32 … 126  128 … 191  194 … 220   222   224 … 237   239 240

A byte outside of them is an error that says how many there are and at which offset.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from anisoscope.data.markup import CleaningStats, clean, read_raw
from anisoscope.data.text import ARTICLES, PACKED, Document, read_documents
from anisoscope.errors import AnisoscopeError
from anisoscope.option import Progress

MD5 = "a1fa5ffddb56f4953e226637dabbb36a"  # of the plain 100,000,000 bytes
SIZE = 100_000_000
RULES = 2  # version of the cleaning rules; every version has its own fingerprint
FINGERPRINT = "1a84883e4709453682a3d2eab3f9959e6d4ed5c116d7c3f80f9319c8fb0cfae9"  # of the original enwik8, cleaned
EMBEDDED = "embedded"
_MEGABYTE = 10**6
_CLOCKS = 10.0  # seconds by which process start times and file times may differ
_DROPPED = ("other_namespaces", "redirects", "empty", "truncated")

SYMBOLS = (9, 10, *range(32, 127), *range(128, 192), *range(194, 221), 222, *range(224, 238), 239, 240)
NO_SYMBOL = 255  # in `ID_OF_BYTE`, where a byte has no id
BYTE_OF_ID = np.array(SYMBOLS, dtype=np.uint8)
ID_OF_BYTE = np.full(256, NO_SYMBOL, dtype=np.uint8)
ID_OF_BYTE[BYTE_OF_ID] = np.arange(len(SYMBOLS), dtype=np.uint8)
BYTE_OF_ID.flags.writeable = ID_OF_BYTE.flags.writeable = False


def encode(text: str | bytes) -> np.ndarray:
    """The ids 0…204 of a text's UTF-8 bytes, uint8.

    >>> encode("a cat").tolist()
    [67, 2, 69, 67, 86]
    >>> decode(encode("naïve 漢字"))
    'naïve 漢字'
    """
    try:
        raw = text.encode("utf-8") if isinstance(text, str) else bytes(text)
    except UnicodeEncodeError as error:
        raise AnisoscopeError(
            f"the text holds half a surrogate pair at character {error.start}, which is no UTF-8; remove it first."
        ) from error
    ids = ID_OF_BYTE[np.frombuffer(raw, dtype=np.uint8)]
    places = np.flatnonzero(ids == NO_SYMBOL)
    if len(places):
        values = sorted({raw[place] for place in places.tolist()})
        shown = ", ".join(f"0x{value:02x}" for value in values[:4]) + (", …" if len(values) > 4 else "")
        amount = "1 byte that is" if len(places) == 1 else f"{len(places)} bytes that are"
        raise AnisoscopeError(
            f"the text holds {amount} not among the {len(SYMBOLS)} symbols of enwik8 ({shown}; the first at byte "
            f"offset {int(places[0])}); remove such characters, or use another vocabulary."
        )
    return ids


def decode(ids: Any, *, errors: str = "strict") -> str:
    """The text of some ids; `errors="replace"` for a piece that was cut inside a character."""
    raw = decode_bytes(ids)
    try:
        return raw.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise AnisoscopeError(
            f"these {len(raw)} ids are no whole UTF-8 text (at place {error.start}): perhaps a piece that was cut "
            f"inside a character; use errors='replace', or decode_bytes."
        ) from error


def decode_bytes(ids: Any) -> bytes:
    """The bytes of some ids, whether or not they are a whole UTF-8 text."""
    array = np.asarray(ids)
    if array.size == 0:
        return b""
    if array.dtype.kind not in "iu":
        raise AnisoscopeError(
            f"ids of the type {array.dtype} are no ids; expected integers from 0 to {len(SYMBOLS) - 1}."
        )
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= len(SYMBOLS):
        raise AnisoscopeError(
            f"the ids reach from {low} to {high}; expected 0 to {len(SYMBOLS) - 1}, the symbols of enwik8."
        )
    return BYTE_OF_ID[array].tobytes()


@dataclass(frozen=True)
class Prepared:
    """A prepared folder and what `stats.json` says about it; `made` is false when it was there already."""

    path: Path
    stats: dict[str, Any]
    made: bool = True


def prepare_enwik8(
    source: str | Path | None, folder: str | Path, *, limit: float | None = None, progress: Progress | None = None
) -> Prepared:
    """Clean enwik8 (plain, `.gz`, `.zip`; `None` or `"embedded"` is the slice that ships) into a folder.

    `limit` is in megabytes of the raw file. A folder made from the same input with the same rules is reused; any other
    that is not empty is refused.
    """
    folder = Path(folder).expanduser()
    if limit is not None and not limit > 0:
        raise AnisoscopeError(f"a limit of {limit:g} MB leaves nothing; give a positive number, or none.")
    sweep_leftovers(folder.absolute())  # also if the folder exists already
    path = None if source is None or str(source) == EMBEDDED else Path(source).expanduser()
    if path is not None:
        _check_head(path)  # refuse a wrong or missing file before anything is written
    # the inputs that determine the result, as far as they are known before reading
    name, size = (EMBEDDED, None) if path is None else (path.name, path.stat().st_size)
    made_of = {"source": name, "bytes_on_disk": size, "limit": limit, "rules": RULES}
    if (prepared := _already_prepared(folder, made_of)) is not None:
        return prepared
    with whole_folder(folder, "stats.json") as temporary:
        stats = {"made_of": made_of, **_write(temporary, path, limit, progress or (lambda what, done, total: None))}
        shown = [chr(byte) if 32 < byte < 127 else f"0x{byte:02x}" for byte in SYMBOLS]
        vocabulary = {"name": "enwik8", "size": len(SYMBOLS), "unit": "byte of UTF-8", "bytes": SYMBOLS, "shown": shown}
        for file, content in (("vocabulary.json", vocabulary), ("stats.json", stats)):
            (temporary / file).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return open_prepared(folder)


def open_prepared(folder: str | Path, *, made: bool = True) -> Prepared:
    """A folder that `prepare_enwik8` wrote."""
    path = Path(folder).expanduser() / "stats.json"
    try:
        return Prepared(path.parent, json.loads(path.read_text(encoding="utf-8")), made)
    except (OSError, ValueError) as error:
        raise AnisoscopeError(
            f"{str(folder)!r} is no folder that `anisoscope data enwik8` made ({error}); make it first."
        ) from error


def _check_head(path: Path) -> None:
    head = next(read_raw(path), b"")
    if not head:
        raise AnisoscopeError(f"{str(path)!r} is empty; expected enwik8, a MediaWiki XML export.")
    if b"<mediawiki" not in head and b"<page>" not in head:
        raise AnisoscopeError(
            f"{str(path)!r} is no MediaWiki XML export (neither <mediawiki> nor <page> stands near its beginning); "
            f"expected enwik8; other text needs no preparing and goes into --data as it is."
        )


def _already_prepared(folder: Path, made_of: dict[str, Any]) -> Prepared | None:
    """The prepared folder if it exists and was made from the same input; an error if it holds anything else."""
    if folder.exists() and not folder.is_dir():
        raise AnisoscopeError(f"{str(folder)!r} is a file; give another place with --out.")
    if not folder.is_dir() or not any(folder.iterdir()):
        return None
    if not (folder / "stats.json").is_file():
        raise AnisoscopeError(f"the folder {str(folder)!r} holds other files; give a new or an empty one with --out.")
    prepared = open_prepared(folder, made=False)
    before = prepared.stats.get("made_of", {})
    for key, value in made_of.items():
        if before.get(key) != value:
            raise AnisoscopeError(
                f"the folder {str(folder)!r} was made with {key} = {before.get(key)!r}, not {value!r}; give another "
                f"one with --out, or delete it."
            )
    return prepared


@contextmanager
def whole_folder(folder: Path, mark: str) -> Iterator[Path]:
    """A temporary folder, renamed to `folder` on success and else removed; `mark` is a file of a complete one."""
    folder = folder.absolute()
    sweep_leftovers(folder)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise AnisoscopeError(f"{str(folder)!r} cannot be made: {error.strerror or error}.") from error
    try:
        yield temporary
        try:
            if folder.is_dir():
                folder.rmdir()  # it is empty, or this fails
            temporary.rename(folder)
        except OSError:
            if not (folder / mark).is_file():  # otherwise another process has made it meanwhile
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sweep_leftovers(folder: Path) -> None:
    """Remove temporary folders of killed processes, not those of processes still at work."""
    if not folder.parent.is_dir():
        return
    for path in list(folder.parent.iterdir()):  # no glob: the name may hold wildcard characters
        name, _, pid = path.name.rpartition(".")
        if name == f".{folder.name}" and pid.isdecimal() and not _at_work(int(pid), path):
            shutil.rmtree(path, ignore_errors=True)


def _at_work(pid: int, path: Path) -> bool:
    """Whether the process that writes `path` is alive: no zombie, and not a later process with the same id."""
    if pid == os.getpid():
        return False
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= path.stat().st_mtime + _CLOCKS
    except (psutil.NoSuchProcess, FileNotFoundError):
        return False
    except psutil.AccessDenied:
        return True


@dataclass
class _Source:
    """The raw file as it is read: its size and MD5 so far."""

    path: Path
    limit: int | None
    tell: Progress
    size: int = 0
    md5: Any = field(default_factory=hashlib.md5)

    def blocks(self) -> Iterator[bytes]:
        # for the progress bar; a packed file is taken for the whole of enwik8
        total = SIZE if self.path.suffix.lower() in PACKED else self.path.stat().st_size
        total = total if self.limit is None else min(self.limit, total)
        for block in read_raw(self.path):
            kept = block if self.limit is None else block[: self.limit - self.size]
            self.md5.update(kept)
            self.size += len(kept)
            self.tell("megabytes read", self.size // _MEGABYTE, max(total, self.size) // _MEGABYTE)
            yield kept
            if self.cut:
                return

    @property
    def cut(self) -> bool:
        """Whether the limit was reached."""
        return self.limit is not None and self.size >= self.limit


def _write(folder: Path, path: Path | None, limit: float | None, tell: Progress) -> dict[str, Any]:
    started = time.perf_counter()
    most_bytes = None if limit is None else int(limit * _MEGABYTE)
    if path is None:
        kept = _write_articles(folder, _first(read_documents(None), most_bytes))
        stats: dict[str, Any] = {"raw": None, "cleaning": None, "note": "the slice that ships is clean already"}
    else:
        raw, cleaning = _Source(path, most_bytes, tell), CleaningStats()
        too_little = f"no whole article was found within the first {(most_bytes or 0) / _MEGABYTE:g} MB; raise --limit."
        try:
            kept = _write_articles(folder, clean(raw.blocks(), stats=cleaning))
        except AnisoscopeError as error:
            why = too_little if raw.cut and not cleaning.pages else str(error)
            raise error if path.name in why else AnisoscopeError(f"{str(path)!r}: {why}") from error
        if raw.cut and not cleaning.articles:
            raise AnisoscopeError(f"{str(path)!r}: {too_little}")
        stats = _about(raw, cleaning)
        stats["raw"]["as_expected"] = kept["sha256"] == FINGERPRINT if stats["raw"]["is_enwik8"] else None
    if not kept["articles"]:
        raise AnisoscopeError(f"{str(path)!r} holds no article that is text; expected a MediaWiki XML export.")
    return {**stats, "kept": kept, "seconds": round(time.perf_counter() - started, 1)}


def _first(documents: Iterator[Document], most_bytes: int | None) -> Iterator[Document]:
    size = 0
    for document in documents:
        yield document
        size += len(document.text.encode("utf-8"))
        if most_bytes is not None and size >= most_bytes:
            return


def _write_articles(folder: Path, documents: Iterator[Document]) -> dict[str, Any]:
    """Write text, ids, ends and titles; return what was kept."""
    ends: list[int] = []
    position, characters, counts, digest = 0, 0, np.zeros(len(SYMBOLS), np.int64), hashlib.sha256()
    with (
        (folder / "enwik8.txt").open("wb") as text,
        (folder / "enwik8.bin").open("wb") as ids,
        (folder / "enwik8.titles").open("w", encoding="utf-8", newline="\n") as titles,
    ):
        for document in documents:
            piece = (ARTICLES if ends else "") + document.text
            raw = piece.encode("utf-8")
            encoded = encode(raw)
            digest.update(raw)
            counts += np.bincount(encoded, minlength=len(SYMBOLS))
            text.write(raw)
            ids.write(encoded.tobytes())
            titles.write(document.source.replace("\n", " ") + "\n")
            position, characters = position + len(raw), characters + len(piece)
            ends.append(position)
    np.save(folder / "enwik8.ends.npy", np.array(ends, dtype=np.int64))
    used = int(np.count_nonzero(counts))
    kept = {"articles": len(ends), "characters": characters, "bytes": position, "symbols_used": used}
    return kept | {"sha256": digest.hexdigest()}


def _about(raw: _Source, cleaning: CleaningStats) -> dict[str, Any]:
    """The entries of stats.json on what was read and removed, in characters of articles and bytes of the file."""
    counts = asdict(cleaning)
    removed = counts.pop("removed")
    sizes = {key: counts.pop(key) for key in ("characters_in", "characters_out")}
    pages = {key: counts.pop(key) for key in ("pages", "articles", *_DROPPED)}
    table = {kind: {"count": counts.get(kind), "characters": size} for kind, size in sorted(removed.items())}
    md5, cut = raw.md5.hexdigest(), ", and its last page is cut" if cleaning.truncated else ""
    note = f"this is not the true enwik8: {raw.size:,} bytes with MD5 {md5}{cut} (another export, or changed)"
    if md5 == MD5:
        note = "this is the true enwik8 (verified by MD5)"
    elif raw.cut:
        note = f"only the first {raw.size:,} bytes were read, so it could not be verified that this is enwik8"
    elif raw.size < SIZE:
        note = f"this is not the true enwik8: {raw.size:,} bytes instead of {SIZE:,}{cut}"
        note += " (truncated, or another export)"
    return {
        "raw": {"bytes": raw.size, "md5": md5, "is_enwik8": md5 == MD5},
        "note": note,
        "cleaning": {"pages": pages, **sizes, "kept_share": sizes["characters_out"] / max(1, sizes["characters_in"])}
        | {"removed": table, "empty_headings": counts["empty_headings"]},
    }
