"""Text from anywhere, one document at a time: files, folders, archives, records, datasets, the embedded corpus."""

from __future__ import annotations

import gzip
import importlib.resources
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from anisoscope.data.files import RECORD_SUFFIXES, SUPPORTED, FileEntry, articles, decoded, entries, suffix_of
from anisoscope.data.records import Record, open_dataset, read_records
from anisoscope.errors import AnisoscopeError, missing_path

PART = 1 << 23  # characters; a longer plain text comes in parts, so that memory stays bounded
SEPARATOR = "\n\f\n"  # between the articles of the embedded corpus
_DATASET = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")


@dataclass(frozen=True)
class Document:
    """One text; contexts never cross its ends. `group` is the value of the field grouped by, `source` its origin."""

    text: str
    group: str = ""
    source: str = ""


def read_documents(
    source: str | Path | None, *, text_field: str = "text", group_by: str | None = None, split: str = "train"
) -> Iterator[Document]:
    """Documents of `source`, read lazily; `None` or `"embedded"` is the corpus that ships with the package.

    A plain text file is one document; of records (JSON lines, JSON, Parquet, CSV, a dataset) each is one, and each
    article of a folder that `anisoscope data enwik8` made.
    `group_by` names a field of the records, or the pseudo-field `file`.

    >>> next(read_documents(None)).source
    'embedded'
    """
    if source is None or source == "embedded":
        return _embedded(group_by)
    path = Path(source).expanduser()
    if path.exists():
        found = _local(path, text_field=text_field, group_by=group_by)
        return _not_empty(found, name=str(source))
    if not looks_like_dataset(str(source)):
        raise missing_path(path)
    records = iter(open_dataset(str(source), split=split))
    wanted = _Fields(text_field, group_by, name=str(source), label=str(source))
    return _not_empty(_from_records(records, wanted), name=str(source))


def looks_like_dataset(name: str) -> bool:
    """Whether a name that is no path here can be one of the `datasets` library.

    >>> [looks_like_dataset(n) for n in ("wikitext:wikitext-2-raw-v1", "org/name", "./name", "corpus.txt", "a/b/c")]
    [True, True, False, False, False]
    """
    if name.startswith((".", "/", "~")) or not _DATASET.fullmatch(name):
        return False
    return suffix_of(name) not in (*SUPPORTED, ".gz") and not name.endswith(".gz")


def _embedded(group_by: str | None) -> Iterator[Document]:
    if group_by is not None:
        raise AnisoscopeError(
            f"the embedded corpus has no field {group_by!r} to group by; give data with fields, or a folder and `file`."
        )
    return _articles()


def _articles() -> Iterator[Document]:
    packed = importlib.resources.files("anisoscope.data.embedded") / "corpus.txt.gz"
    text = gzip.decompress(packed.read_bytes()).decode("utf-8")
    for article in text.rstrip("\n").split(SEPARATOR):
        yield Document(article, source="embedded")


def _not_empty(documents: Iterable[Document], *, name: str) -> Iterator[Document]:
    """Documents that hold more than white space; an error when there is none."""
    count = 0
    for document in documents:
        if document.text and not document.text.isspace():
            count += 1
            yield document
    if not count:
        raise AnisoscopeError(f"{name!r} holds no text (it is empty or white space only); give a file with text in it.")


def _local(path: Path, *, text_field: str, group_by: str | None) -> Iterator[Document]:
    for entry in entries(path):
        wanted = _Fields(text_field, group_by, name=entry.name, label=entry.label)
        if entry.suffix in RECORD_SUFFIXES:
            yield from _from_records(read_records(entry, wanted.columns), wanted)
        else:
            yield from _plain(entry, wanted)


@dataclass(frozen=True)
class _Fields:
    """Which fields to take from the records of one stream."""

    text: str
    group: str | None
    name: str
    label: str

    @property
    def columns(self) -> list[str]:
        return [self.text] if self.group is None else [self.text, self.group]


def _plain(entry: FileEntry, wanted: _Fields) -> Iterator[Document]:
    if wanted.group not in (None, "file"):
        raise AnisoscopeError(
            f"{entry.name!r} is plain text without fields, so it cannot be grouped by {wanted.group!r}; "
            f"group by `file`, or give records (.jsonl, .parquet, .csv) that have that field."
        )
    group = entry.label if wanted.group else ""
    blocks = decoded(entry)
    for text in articles(blocks, entry.separator) if entry.separator else _parts(blocks):
        yield Document(text, group=group, source=entry.name)


def _parts(blocks: Iterable[str]) -> Iterator[str]:
    """The whole text, or parts of about `PART` characters cut at a line end where there is one."""
    held: list[str] = []
    size = 0
    for block in blocks:
        held.append(block)
        size += len(block)
        if size >= PART:
            head, found, tail = "".join(held).rpartition("\n")
            yield head + found if found else tail
            held = [tail] if found else []
            size = len(tail) if found else 0
    if size:
        yield "".join(held)


def _from_records(records: Iterable[Record], wanted: _Fields) -> Iterator[Document]:
    for number, record in enumerate(records, start=1):
        text = _field(record, wanted.text, wanted, what="text field")
        if text is None:
            continue
        if not isinstance(text, str):
            raise AnisoscopeError(
                f"field {wanted.text!r} of record {number} of {wanted.name!r} is a {type(text).__name__}; expected "
                f"text; name another field with --text-field."
            )
        yield Document(text, group=_group(record, wanted), source=wanted.name)


def _group(record: Record, wanted: _Fields) -> str:
    if wanted.group is None:
        return ""
    if wanted.group == "file" and "file" not in record:
        return wanted.label
    value = _field(record, wanted.group, wanted, what="field to group by")
    return "(none)" if value is None or value == "" else str(value)


def _field(record: Record, name: str, wanted: _Fields, *, what: str) -> object:
    if name not in record:
        known = ", ".join(sorted(map(str, getattr(record, "fields", record)))) or "none"
        option = "--text-field" if what == "text field" else "--group-by"
        raise AnisoscopeError(
            f"{wanted.name!r} has no {what} {name!r}; its fields are: {known}. Name one of them with {option}."
        )
    value: object = record[name]
    return value
