"""Reading text one document at a time: from files, folders, archives, records, datasets, or the embedded corpus.

Files are read lazily and in bounded memory; bytes that cannot be decoded are an error.
"""

from __future__ import annotations

import bz2
import codecs
import contextlib
import csv
import gzip
import importlib.resources
import io
import json
import lzma
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NoReturn, cast

from anisoscope import __version__
from anisoscope.data.packing import UnpackedStream, refuse_bombs
from anisoscope.errors import AnisoscopeError, missing_path, near_miss, refuse_special
from anisoscope.models.downloads import dataset_commit
from anisoscope.models.source import hub_reachable

PART = 1 << 23  # characters; a longer plain text is read in parts, so that memory stays bounded
BLOCK = 1 << 20  # bytes decoded at a time
JSON_LIMIT = 1 << 30  # a JSON list has to be parsed whole
SEPARATOR = "\n\f\n"  # between the articles of the embedded corpus
ARTICLES = "\n\n\n"  # between the articles of a text that `anisoscope data enwik8` made: two blank lines
PREPARED = ("enwik8.txt", "enwik8.bin")  # files of a folder that `anisoscope data enwik8` made: text and token ids
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".tex", ".org")
RECORD_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".csv", ".tsv")
SUPPORTED = (*TEXT_SUFFIXES, *RECORD_SUFFIXES, ".zip")
_UNPACKERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
PACKED = (*_UNPACKERS, ".zip")
_PREPARED_SIDECARS = {"vocabulary.json", "stats.json"}
_DATASET_SIDECARS = {"dataset_info.json", "state.json", "dataset_dict.json"}  # what `datasets` writes beside its data
_DATASET = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")
MERGED = "merged"  # several sources with equal shares: `merged`, or `merged:` and their names or paths
BEGINNING = (
    1 << 13
)  # characters of a document of a merged corpus: a long article would be the whole share of its source
_BAD = re.compile("[\udc80-\udcff\ufffd]")  # what a lenient decoder writes for undecodable bytes
_ENCODINGS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",  # tested before UTF-16, whose byte-order mark is a prefix of this one
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
Record = Mapping[str, Any]
MERGED_SOURCES: dict[str, tuple[str, str]] = {  # datasets of the merged corpus, each with its field of text
    "c4": ("allenai/c4:en", "text"),
    "wikipedia": ("wikimedia/wikipedia:20231101.en", "text"),
    "fineweb": ("HuggingFaceFW/fineweb:sample-10BT", "text"),
    "arxiv": ("ccdv/arxiv-summarization:document", "article"),
    "wikipedia-fr": ("wikimedia/wikipedia:20231101.fr", "text"),
}


@dataclass(frozen=True)
class Document:
    """One text; contexts never cross its ends. `group` is the value of the field grouped by, `source` its origin."""

    text: str
    group: str = ""
    source: str = ""


def read_documents(
    source: str | Path | None, *, text_field: str = "text", group_by: str | None = None
) -> Iterator[Document]:
    """Documents of `source`, read lazily; `None` or `"embedded"` is the corpus that ships with the package.

    A document is a plain text file, a record (of JSON lines, JSON, Parquet, CSV or a dataset), or an article of a
    folder that `anisoscope data enwik8` made.
    `group_by` names a field of the records, or the pseudo-field `file`; `merged` sources are grouped by their names.

    >>> next(read_documents(None)).source
    'embedded'
    """
    if source is None or source == "embedded":
        if group_by is not None:
            raise AnisoscopeError(
                f"the embedded corpus has no field {group_by!r} to group by; give data with fields, or a folder and "
                "`file`."
            )
        _refuse_field("the embedded corpus", text_field)
        return _embedded()
    path, name = Path(source).expanduser(), str(source)
    if not name.strip():
        raise AnisoscopeError("the name of the data is empty; give a file, a folder, or 'embedded'.")
    refuse_special(path)
    if path.exists():
        return _not_empty(_local(path, text_field, group_by), name=name)
    if name.partition(":")[0] == MERGED:
        return _merged(name, text_field, group_by)
    if not looks_like_dataset(name):
        raise missing_path(path)
    records = iter(open_dataset(name))
    documents = _from_records(records, text_field, group_by, name=name, label=name)
    return _not_empty(documents, name=name)


def looks_like_dataset(name: str) -> bool:
    """Whether a name that is not a local path can be the name of a dataset of the `datasets` library.

    >>> [looks_like_dataset(n) for n in ("wikitext:wikitext-2-raw-v1", "org/name", "./name", "corpus.txt", "a/b/c")]
    [True, True, False, False, False]
    """
    if name.startswith((".", "/", "~")) or not _DATASET.fullmatch(name):
        return False
    return suffix_of(name) not in (*SUPPORTED, ".gz") and not name.endswith(".gz")


def merged_sources(name: str) -> dict[str, tuple[str, str | None]]:
    """The sources of a merged corpus by name, each with its field of text (None: the one that is asked for).

    A name is taken from the folder or file of that name if there is one here, else from the hub; `merged:FOLDER` takes
    the known names that lie in that folder.

    >>> list(merged_sources("merged")), merged_sources("merged:c4")["c4"]
    (['c4', 'wikipedia', 'fineweb', 'arxiv', 'wikipedia-fr'], ('allenai/c4:en', 'text'))
    """
    named = [part.strip() for part in name.partition(":")[2].split(",") if part.strip()] or list(MERGED_SOURCES)
    folder = Path(named[0]).expanduser()
    if len(named) == 1 and folder.is_dir():
        named = [str(p) for known in MERGED_SOURCES for p in sorted(folder.iterdir()) if p.name.split(".")[0] == known]
        if not named:
            raise AnisoscopeError(
                f"the folder {str(folder)!r} holds no source of a merged corpus; expected files or folders called "
                f"{', '.join(MERGED_SOURCES)}, or name them one by one: merged:PATH,PATH."
            )
    found: dict[str, tuple[str, str | None]] = {}
    for each in named:
        known = MERGED_SOURCES.get(each.lower())
        local = Path(each).expanduser().exists()
        label = Path(each).name.split(".")[0] if local else each.lower() if known else each
        if label in found:
            raise AnisoscopeError(f"source {label!r} of {name!r} is named twice; name each once.")
        found[label] = (each, None) if local or known is None else known
    return found


def _merged(name: str, text_field: str, group_by: str | None) -> Iterator[Document]:
    """Documents of several sources, the next always of the one that gave the fewest characters so far.

    Of a document the beginning is taken. The corpus ends where the first source does, so that shares are equal.
    """
    if group_by not in (None, "file"):
        raise AnisoscopeError(f"{name!r} has several sources, which are grouped by `file`, not by {group_by!r}.")
    streams: dict[str, Iterator[Document]] = {}
    for label, (source, field) in merged_sources(name).items():
        try:
            streams[label] = read_documents(source, text_field=field or text_field)
        except AnisoscopeError as error:
            raise _not_merged(name, label, error) from error
    given = dict.fromkeys(streams, 0)
    while True:
        label = min(given, key=given.__getitem__)  # the first of equals
        try:
            document = next(streams[label], None)
        except AnisoscopeError as error:
            raise _not_merged(name, label, error) from error
        if document is None:
            return
        text = document.text[:BEGINNING]
        given[label] += len(text)
        yield Document(text, group=label if group_by else "", source=label)


def _not_merged(name: str, label: str, error: AnisoscopeError) -> AnisoscopeError:
    reason = str(error).partition("; ")[0].rstrip(".")
    return AnisoscopeError(
        f"the source {label!r} of {name!r} cannot be had ({reason}); name those you have (merged:c4,wikipedia), or put "
        "files or folders of these names in one folder and give merged:FOLDER."
    )


def data_version(source: str | Path | None) -> dict[str, Any]:
    """What tells the version of data for run.json: of the package if it ships it, the commit of a hub dataset.

    Local files have none; their content is told by the fingerprint of what was read.

    >>> list(data_version("embedded")), data_version("LICENSE")
    (['version'], {})
    """
    if source is None or source == "embedded":
        return {"version": f"anisoscope {__version__}"}
    name = str(source)
    if Path(source).expanduser().exists():
        return {}
    if name.partition(":")[0] == MERGED:
        return {
            "sources": {
                label: {"name": each, **data_version(each)} for label, (each, _) in merged_sources(name).items()
            }
        }
    if not looks_like_dataset(name):
        return {}
    commit = dataset_commit(name.partition(":")[0], online=hub_reachable())
    return {"commit": commit} if commit else {}


def _embedded() -> Iterator[Document]:
    packed = importlib.resources.files("anisoscope.data") / "embedded" / "corpus.txt.gz"
    text = gzip.decompress(packed.read_bytes()).decode("utf-8")
    for article in text.rstrip("\n").split(SEPARATOR):
        yield Document(article, source="embedded")


def _not_empty(documents: Iterable[Document], *, name: str) -> Iterator[Document]:
    """The documents that hold more than white space; an error if there is none."""
    count = 0
    for document in documents:
        if document.text and not document.text.isspace():
            count += 1
            yield document
    if not count:
        raise AnisoscopeError(f"{name!r} holds no text (it is empty or white space only); give a file with text in it.")


def _refuse_field(name: str, text_field: str) -> None:
    """Raise an error if a field was named for a text that has none."""
    if text_field != "text":
        raise AnisoscopeError(
            f"{name} is plain text without fields, so --text-field {text_field} does nothing; leave it out."
        )


def _local(path: Path, text_field: str, group_by: str | None) -> Iterator[Document]:
    for entry in entries(path):
        if entry.suffix in RECORD_SUFFIXES:
            columns = [text_field] if group_by is None else [text_field, group_by]
            records = read_records(entry, columns)
            yield from _from_records(records, text_field, group_by, name=entry.name, label=entry.label)
            continue
        if group_by not in (None, "file"):
            raise AnisoscopeError(
                f"{entry.name!r} is plain text without fields, so it cannot be grouped by {group_by!r}; "
                f"group by `file`, or give records (.jsonl, .parquet, .csv) that have that field."
            )
        if path.is_file():
            _refuse_field(repr(entry.name), text_field)
        blocks = decoded(entry)
        for text in _split(blocks, entry.separator) if entry.separator else _parts(blocks):
            yield Document(text, group=entry.label if group_by else "", source=entry.name)


def _split(blocks: Iterable[str], separator: str) -> Iterator[str]:
    """The pieces between separators; an empty last one is left out."""
    rest = ""
    for block in blocks:
        *whole, rest = (rest + block).split(separator)
        yield from whole
    if rest:
        yield rest


def _parts(blocks: Iterable[str]) -> Iterator[str]:
    """The whole text, or parts of about `PART` characters, cut at line ends where possible."""
    text = ""
    for block in blocks:
        text += block
        if len(text) >= PART:
            head, line_end, tail = text.rpartition("\n")
            yield head + line_end if line_end else tail
            text = tail if line_end else ""
    if text:
        yield text


def _from_records(
    records: Iterable[Record], text_field: str, group_by: str | None, *, name: str, label: str
) -> Iterator[Document]:
    for number, record in enumerate(records, start=1):
        text = _field(record, text_field, name, option="--text-field")
        if text is None:
            continue
        if not isinstance(text, str):
            raise AnisoscopeError(
                f"field {text_field!r} of record {number} of {name!r} is a {type(text).__name__}; expected "
                f"text; name another field with --text-field."
            )
        group: object = ""
        if group_by == "file" and "file" not in record:
            group = label
        elif group_by is not None:
            group = _field(record, group_by, name, option="--group-by")
            group = "(none)" if group is None or group == "" else group
        yield Document(text, group=str(group), source=name)


def _field(record: Record, field: str, name: str, *, option: str) -> object:
    if field not in record:
        known = ", ".join(sorted(map(str, getattr(record, "fields", record)))) or "none"
        what = {"--text-field": "text field", "--group-by": "field to group by"}[option]
        raise AnisoscopeError(
            f"{name!r} has no {what} {field!r}; its fields are: {known}. Name one of them with {option}."
        )
    return record[field]


@dataclass(frozen=True)
class FileEntry:
    """One readable stream: a file, or a member of an archive. `label` is its short name, `suffix` its format."""

    name: str
    label: str
    suffix: str
    open: Callable[[], BinaryIO]
    separator: str = ""  # between the documents of a text; without one it is a single document


def entries(path: Path) -> Iterator[FileEntry]:
    """All readable streams at a path: the file itself, an archive's members, or a folder's files in sorted order."""
    if not path.is_dir():
        yield from _file_entries(path, label=path.name)
        return
    files = files_in(path)
    usable = [p for p in files if _supported(p.name) and not (p.name in _PREPARED_SIDECARS and is_prepared(p.parent))]
    if not usable:
        description = files_seen([p.name for p in files], none="none that can be read as text")
        raise AnisoscopeError(
            f"the folder {str(path)!r} holds {description}; expected {', '.join(SUPPORTED)} (also packed as .gz)."
        )
    for file in usable:
        yield from _file_entries(file, label=file.relative_to(path).as_posix())


def files_in(folder: Path) -> list[Path]:
    """All files in and below a folder that are not hidden, sorted; an error where one of them cannot be looked at."""
    if (whole := folder.resolve()) == whole.parent:
        raise AnisoscopeError(f"{str(folder)!r} is everything on this machine; give the folder that holds the data.")
    found: list[Path] = []
    try:
        for place, inside, names in os.walk(folder, onerror=_raise):
            inside[:] = [name for name in inside if not _is_hidden(PurePosixPath(name))]
            paths = (Path(place, name) for name in names if not _is_hidden(PurePosixPath(name)))
            found += [path for path in paths if path.is_file()]
    except OSError as error:
        raise AnisoscopeError(
            f"{str(error.filename or folder)!r} cannot be read ({error.strerror or error}); change its rights, or give "
            "a folder in which all can be read."
        ) from error
    return sorted(found)


def _raise(error: OSError) -> NoReturn:
    """What `os.walk` calls for a folder that it cannot list, which it would leave out in silence."""
    raise error


def members_of(archive: zipfile.ZipFile) -> list[str]:
    """All files in an archive that are not hidden, sorted."""
    names = (info.filename for info in archive.infolist() if not info.is_dir())
    return sorted(name for name in names if not _is_hidden(PurePosixPath(name)))


def _is_hidden(path: Path | PurePosixPath) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in path.parts)


def files_seen(names: list[str], *, none: str) -> str:
    """A description of the files found where none is usable, for error messages.

    >>> files_seen([], none="none that is audio"), files_seen(["a.png"], none="none that is audio")
    ('no files', '1 file with suffix .png, none that is audio')
    """
    if not names:
        return "no files"
    kinds = sorted({PurePosixPath(name.lower()).suffix or "(no suffix)" for name in names})[:8]
    count = f"{len(names)} file{'s' * (len(names) != 1)}"
    return f"{count} with suffix{'es' * (len(kinds) != 1)} {', '.join(kinds)}, {none}"


def is_prepared(folder: Path) -> bool:
    """Whether `anisoscope data enwik8` made this folder."""
    return all((folder / name).is_file() for name in PREPARED)


def _supported(name: str) -> bool:
    return suffix_of(name) in SUPPORTED and PurePosixPath(name).name not in _DATASET_SIDECARS


def suffix_of(name: str) -> str:
    """The suffix of the file format, without that of the compression.

    >>> suffix_of("a/b.jsonl.gz"), suffix_of("notes"), suffix_of("enwik8.GZ")
    ('.jsonl', '', '')
    """
    path = PurePosixPath(name.lower())
    return PurePosixPath(path.stem).suffix if path.suffix in _UNPACKERS else path.suffix


def _file_entries(path: Path, *, label: str) -> Iterator[FileEntry]:
    if path.suffix.lower() != ".zip":
        opener = _unpacked(path.name, lambda: path.open("rb"))
        separator = ARTICLES if path.name == PREPARED[0] and is_prepared(path.parent) else ""
        yield FileEntry(str(path), label, suffix_of(path.name), opener, separator)
        return
    with readable(str(path)), zipfile.ZipFile(path) as archive:
        members = members_of(archive)
        usable = [m for m in members if _supported(m)] or members
        if not usable:
            raise AnisoscopeError(f"the archive {str(path)!r} holds no files; expected text or records inside it.")
        refuse_bombs(archive, usable)
        for member in usable:
            opener = _unpacked(member, lambda member=member: cast("BinaryIO", archive.open(member)))  # type: ignore[misc]
            yield FileEntry(f"{path}:{member}", f"{label}:{member}", suffix_of(member), opener)


def _unpacked(name: str, opener: Callable[[], BinaryIO]) -> Callable[[], BinaryIO]:
    unpack = _UNPACKERS.get(PurePosixPath(name.lower()).suffix)
    return opener if unpack is None else lambda: io.BufferedReader(UnpackedStream(opener(), unpack, name), BLOCK)


@contextlib.contextmanager
def readable(name: str) -> Iterator[None]:
    """Turn the exceptions of a damaged or unreadable file into an AnisoscopeError that names it."""
    try:
        yield
    except (EOFError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise AnisoscopeError(f"{name!r} is truncated or damaged ({error}); copy or download it again.") from error
    except OSError as error:
        raise AnisoscopeError(f"{name!r} cannot be read: {error.strerror or error}.") from error
    except RecursionError as error:
        raise AnisoscopeError(f"{name!r} is nested too deeply to be read; check what it holds.") from error
    except RuntimeError as error:  # of zipfile
        if "encrypted" not in str(error):
            raise
        raise AnisoscopeError(f"{name!r} is encrypted; unpack it with its password first.") from error


def decoded(entry: FileEntry) -> Iterator[str]:
    """The text of a stream in blocks: UTF-8 (a byte-order mark is allowed), or UTF-16/32 with a byte-order mark."""
    with readable(entry.name), entry.open() as stream:
        block, offset = stream.read(BLOCK), 0
        encoding = next((name for mark, name in _ENCODINGS.items() if block.startswith(mark)), "utf-8")
        if encoding == "utf-8" and b"\0" in block[:8192]:
            raise AnisoscopeError(f"{entry.name!r} is a binary file (it holds NUL bytes); expected text.")
        decoder = codecs.getincrementaldecoder(encoding)("strict")
        while True:
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise _undecodable(entry, encoding, first=offset - pending + error.start) from error
            if text:
                yield text
            if not block:
                return
            offset += len(block)
            block = stream.read(BLOCK)


def _undecodable(entry: FileEntry, encoding: str, *, first: int) -> AnisoscopeError:
    """An error that gives the offset of the first undecodable byte and their number in the whole stream."""
    lenient = "surrogateescape" if encoding.startswith("utf-8") else "replace"
    with readable(entry.name), entry.open() as stream:
        texts = codecs.iterdecode(iter(lambda: stream.read(BLOCK), b""), encoding, lenient)
        count = sum(len(_BAD.findall(text)) for text in texts)
    amount = f"{count} byte{'s' if count != 1 else ''} that {'are' if count != 1 else 'is'}"
    return AnisoscopeError(
        f"{entry.name!r} holds {amount} not {encoding.removesuffix('-sig').upper()} (the first at byte offset "
        f"{first}); re-encode it to UTF-8 from the encoding that it was written in."
    )


def read_records(entry: FileEntry, columns: list[str]) -> Iterator[Record]:
    """The records of one stream (JSON lines, a JSON list, CSV, Parquet, Arrow); of columnar files only `columns`."""
    if entry.suffix in (".parquet", ".arrow"):
        return _columnar(entry, columns)
    readers = {".jsonl": _json_lines, ".ndjson": _json_lines, ".json": _json, ".csv": _csv, ".tsv": _csv}
    return readers[entry.suffix](entry)


def _json_lines(entry: FileEntry) -> Iterator[Record]:
    # only line feeds separate lines: U+2028 and form feeds belong to the text
    for number, line in enumerate(_split(decoded(entry), "\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise AnisoscopeError(
                f"line {number} of {entry.name!r} is not JSON ({error.msg} at column {error.colno}); "
                f"expected one JSON object per line."
            ) from error
        yield _object(record, f"line {number} of {entry.name!r}")


def _json(entry: FileEntry) -> Iterator[Record]:
    """Records of a JSON list, of an object with one such list ({"data": [...]}), or of an object that is one record."""
    try:
        content = json.loads("".join(decoded(entry)))
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # several objects, one per line, under the wrong suffix
            yield from _json_lines(entry)
            return
        raise AnisoscopeError(
            f"{entry.name!r} is not JSON ({error.msg} at line {error.lineno}, column {error.colno})."
        ) from error
    if isinstance(content, dict):
        lists = [v for v in content.values() if isinstance(v, list) and v and isinstance(v[0], dict)]
        content = lists[0] if len(lists) == 1 else [content]
    if not isinstance(content, list):
        raise AnisoscopeError(f"{entry.name!r} holds one JSON {type(content).__name__}; expected a list of objects.")
    for number, record in enumerate(content, start=1):
        yield _object(record, f"element {number} of {entry.name!r}")


def _object(record: Any, where: str) -> Record:
    if not isinstance(record, dict):
        raise AnisoscopeError(f"{where} is a JSON {type(record).__name__}; expected an object with fields.")
    return record


def _csv(entry: FileEntry) -> Iterator[Record]:
    csv.field_size_limit(max(csv.field_size_limit(), JSON_LIMIT))  # texts are longer than the default of 128 KiB
    source = (line + "\n" for line in _split(decoded(entry), "\n"))
    reader = csv.DictReader(source, delimiter="\t" if entry.suffix == ".tsv" else ",", restkey="(surplus)")
    try:
        yield from reader
    except csv.Error as error:
        raise AnisoscopeError(f"line {reader.line_num} of {entry.name!r} is not CSV ({error}).") from error


class Columns(dict[str, Any]):
    """A record of the columns read, with the names of all columns of its file in `fields`."""

    def __init__(self, values: Record, fields: list[str]) -> None:
        super().__init__(values)
        self.fields = fields


def _columnar(entry: FileEntry, columns: list[str]) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    kind = entry.suffix[1:].capitalize()
    with readable(entry.name), entry.open() as stream:
        try:
            is_file = kind == "Arrow" and stream.read(6) == b"ARROW1"  # the file format; otherwise the stream format
            stream.seek(0)
            source = pa.PythonFile(stream, mode="r")
            if kind == "Parquet":
                file: Any = pq.ParquetFile(source)
                known = file.schema_arrow.names
                chosen = [c for c in columns if c in known] or known
                batches = file.iter_batches(batch_size=1024, columns=chosen)
            else:
                file = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
                known = file.schema.names
                chosen = [c for c in columns if c in known] or known
                whole = map(file.get_batch, range(file.num_record_batches)) if is_file else file
                batches = (batch.select(chosen) for batch in whole)
            for batch in batches:
                yield from (Columns(record, known) for record in batch.to_pylist())
        except pa.ArrowException as error:
            reason = str(error).splitlines()[0]
            raise AnisoscopeError(
                f"{entry.name!r} is not a readable {kind} file ({reason}); write it again."
            ) from error


def open_dataset(name: str) -> Any:
    """The split `train` of a dataset of the `datasets` library, `name` or `name:config`; streamed if the hub is up."""
    try:
        import datasets
    except ImportError as error:
        raise AnisoscopeError(
            f"{name!r} is not a local path, and reading it as a dataset name needs the `datasets` library; "
            f"install it with `pip install datasets`, or give a path that exists."
        ) from error
    path, _, config = name.partition(":")
    online, before = hub_reachable(), datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = before or not online
    commit = dataset_commit(path, online=True) if online else ""
    pinned = {"revision": commit} if commit else {}  # the one that run.json names, should it change meanwhile
    try:
        return datasets.load_dataset(path, config or None, split="train", streaming=online, **pinned)
    except Exception as error:  # the library raises exceptions of many types
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        where = "" if online else ", and the hub cannot be reached from here"
        raise AnisoscopeError(
            f"{name!r} is neither a file or folder here nor a dataset that can be loaded{where} ({reason}); "
            f"{near_miss(name) or 'check the spelling, or give a local file.'}"
        ) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = before
