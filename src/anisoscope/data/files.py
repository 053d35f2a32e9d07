"""Files at a path, read lazily: folders, archives, packed files; bytes that cannot be decoded are an error."""

from __future__ import annotations

import bz2
import codecs
import contextlib
import gzip
import lzma
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from anisoscope.errors import AnisoscopeError

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".tex", ".org")
RECORD_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".csv", ".tsv")
_UNPACKERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
SUPPORTED = (*TEXT_SUFFIXES, *RECORD_SUFFIXES, ".zip")
BLOCK = 1 << 20  # bytes decoded at a time
ARTICLES = "\n\n\n"  # between the articles of a text that `anisoscope data enwik8` made: two blank lines
PREPARED = ("enwik8.txt", "enwik8.bin")  # a text, and its ids beside it, that were made so
_ITS_SIDECARS = {"vocabulary.json", "stats.json"}
_BAD = re.compile("[\udc80-\udcff\ufffd]")  # what a lenient decoder leaves where bytes were bad
_SIDECARS = {"dataset_info.json", "state.json", "dataset_dict.json"}  # what `datasets` writes beside its data
_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


@dataclass(frozen=True)
class FileEntry:
    """One readable stream: a file, or a member of an archive. `label` is its short name, `suffix` tells the format."""

    name: str
    label: str
    suffix: str
    open: Callable[[], BinaryIO]
    separator: str = ""  # between the documents of a text; without one it is a single document


def entries(path: Path) -> Iterator[FileEntry]:
    """All readable streams at a path: the file itself, an archive's members, or a folder's files in sorted order."""
    if path.is_dir():
        return _folder_entries(path)
    return _file_entries(path, label=path.name)


def files_in(folder: Path) -> list[Path]:
    """All files in and below a folder that are not hidden, sorted."""
    return sorted(p for p in folder.rglob("*") if p.is_file() and not _is_hidden(p.relative_to(folder)))


def members_of(archive: zipfile.ZipFile) -> list[str]:
    """All files in an archive that are not hidden, sorted."""
    found = (info.filename for info in archive.infolist() if not info.is_dir())
    return sorted(name for name in found if not _is_hidden(PurePosixPath(name)))


def _folder_entries(folder: Path) -> Iterator[FileEntry]:
    found = files_in(folder)
    usable = [p for p in found if _supported(p.name) and not (p.name in _ITS_SIDECARS and is_prepared(p.parent))]
    if not usable:
        seen = files_seen([p.name for p in found], none="none that can be read as text")
        raise AnisoscopeError(
            f"the folder {str(folder)!r} holds {seen}; expected {', '.join(SUPPORTED)} (also packed as .gz)."
        )
    for path in usable:
        yield from _file_entries(path, label=path.relative_to(folder).as_posix())


def files_seen(names: list[str], *, none: str) -> str:
    """The files of a place without usable ones, in words.

    >>> files_seen([], none="none that is audio"), files_seen(["a.png"], none="none that is audio")
    ('no files', '1 file with suffix .png, none that is audio')
    """
    if not names:
        return "no files"
    kinds = sorted({PurePosixPath(name.lower()).suffix or "(no suffix)" for name in names})[:8]
    count = f"{len(names)} file{'s' * (len(names) != 1)}"
    return f"{count} with suffix{'es' * (len(kinds) != 1)} {', '.join(kinds)}, {none}"


def is_prepared(folder: Path) -> bool:
    """Whether `anisoscope data enwik8` made this folder: a text of many articles, and files that are not text."""
    return all((folder / name).is_file() for name in PREPARED)


def _is_hidden(path: Path | PurePosixPath) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in path.parts)


def _supported(name: str) -> bool:
    return suffix_of(name) in SUPPORTED and PurePosixPath(name).name not in _SIDECARS


def suffix_of(name: str) -> str:
    """The suffix that tells the format, without that of the packing.

    >>> suffix_of("a/b.jsonl.gz"), suffix_of("notes"), suffix_of("enwik8.GZ")
    ('.jsonl', '', '')
    """
    path = PurePosixPath(name.lower())
    return PurePosixPath(path.stem).suffix if path.suffix in _UNPACKERS else path.suffix


def _file_entries(path: Path, *, label: str) -> Iterator[FileEntry]:
    if path.suffix.lower() == ".zip":
        yield from _zip_entries(path, label=label)
        return
    opener = _unpacked(path.name, lambda: path.open("rb"))
    separator = ARTICLES if path.name == PREPARED[0] and is_prepared(path.parent) else ""
    yield FileEntry(name=str(path), label=label, suffix=suffix_of(path.name), open=opener, separator=separator)


def _zip_entries(path: Path, *, label: str) -> Iterator[FileEntry]:
    with readable(str(path)), zipfile.ZipFile(path) as archive:
        members = members_of(archive)
        usable = [m for m in members if _supported(m)] or members
        if not usable:
            raise AnisoscopeError(f"the archive {str(path)!r} holds no files; expected text or records inside it.")
        for member in usable:
            opener = _unpacked(member, lambda member=member: cast("BinaryIO", archive.open(member)))  # type: ignore[misc]
            yield FileEntry(name=f"{path}:{member}", label=f"{label}:{member}", suffix=suffix_of(member), open=opener)


def _unpacked(name: str, opener: Callable[[], BinaryIO]) -> Callable[[], BinaryIO]:
    unpack = _UNPACKERS.get(PurePosixPath(name.lower()).suffix)
    return opener if unpack is None else lambda: cast("BinaryIO", unpack(opener()))


@contextlib.contextmanager
def readable(name: str) -> Iterator[None]:
    """Turns the many exceptions of a damaged or unreadable file into one sentence."""
    try:
        yield
    except (EOFError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise AnisoscopeError(f"{name!r} is truncated or damaged ({error}); copy or download it again.") from error
    except OSError as error:
        raise AnisoscopeError(f"{name!r} cannot be read: {error.strerror or error}.") from error


def decoded(entry: FileEntry) -> Iterator[str]:
    """The text of a stream in blocks: UTF-8 (a byte-order mark is allowed), or UTF-16/32 with its mark."""
    with readable(entry.name), entry.open() as stream:
        block = stream.read(BLOCK)
        encoding = next((name for mark, name in _BOMS if block.startswith(mark)), "utf-8")
        if encoding == "utf-8" and b"\0" in block[:8192]:
            raise AnisoscopeError(f"{entry.name!r} is a binary file (it holds NUL bytes); expected text.")
        decoder = codecs.getincrementaldecoder(encoding)("strict")
        while block:
            try:
                text = decoder.decode(block)
            except UnicodeDecodeError as error:
                raise _undecodable(entry, encoding) from error
            if text:
                yield text
            block = stream.read(BLOCK)
        try:
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            raise _undecodable(entry, encoding) from error


def _undecodable(entry: FileEntry, encoding: str) -> AnisoscopeError:
    """Where the first bad byte is and how many there are, over the whole stream."""
    strict, block = codecs.getincrementaldecoder(encoding)("strict"), b""
    first, count, offset = -1, 0, 0
    lenient = codecs.getincrementaldecoder(encoding)("surrogateescape" if encoding.startswith("utf-8") else "replace")
    with readable(entry.name), entry.open() as stream:
        while first < 0 or block:
            block = stream.read(BLOCK)
            if first < 0:
                pending = len(strict.getstate()[0])
                try:
                    strict.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    first = offset - pending + error.start
            offset += len(block)
            count += len(_BAD.findall(lenient.decode(block, final=not block)))
    amount = f"{count} byte{'s' if count != 1 else ''} that {'are' if count != 1 else 'is'}"
    return AnisoscopeError(
        f"{entry.name!r} holds {amount} not {encoding.removesuffix('-sig').upper()} (the first at byte offset "
        f"{first}); re-encode it to UTF-8, for instance with `iconv -f LATIN1 -t UTF-8`."
    )


def articles(blocks: Iterator[str], separator: str) -> Iterator[str]:
    """The documents of a text, one at a time."""
    rest = ""
    for block in blocks:
        *whole, rest = (rest + block).split(separator)
        yield from whole
    yield rest


def lines(blocks: Iterator[str]) -> Iterator[str]:
    """Lines without their end, split at line feeds only (U+2028 and form feed belong to the text)."""
    rest: list[str] = []
    for block in blocks:
        head, found, tail = block.rpartition("\n")
        if not found:
            rest.append(block)
            continue
        yield from ("".join(rest) + head).split("\n")
        rest = [tail]
    last = "".join(rest)
    if last:
        yield last
