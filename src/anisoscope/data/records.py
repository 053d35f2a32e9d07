"""Records with fields: JSON lines, JSON lists, Parquet, Arrow, CSV and the `datasets` library, one at a time."""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Iterator, Mapping
from typing import Any

from anisoscope.data.files import FileEntry, decoded, lines, readable
from anisoscope.errors import AnisoscopeError, near_miss
from anisoscope.models.source import hub_reachable

Record = Mapping[str, Any]
JSON_LIMIT = 1 << 30  # a JSON list has to be parsed whole


def read_records(entry: FileEntry, columns: list[str]) -> Iterator[Record]:
    """The records of one stream; of columnar files only `columns` are read."""
    match entry.suffix:
        case ".jsonl" | ".ndjson":
            return _json_lines(entry)
        case ".json":
            return _json(entry)
        case ".csv" | ".tsv":
            return _csv(entry)
        case ".parquet":
            return _parquet(entry, columns)
        case _:
            return _arrow(entry, columns)


def _json_lines(entry: FileEntry) -> Iterator[Record]:
    for number, line in enumerate(lines(decoded(entry)), start=1):
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
    text = "".join(decoded(entry))
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # several objects, one per line, under the wrong suffix
            yield from _json_lines(entry)
            return
        raise AnisoscopeError(
            f"{entry.name!r} is not JSON ({error.msg} at line {error.lineno}, column {error.colno})."
        ) from error
    if not isinstance(content, list):
        content = _only_list(content, entry.name)
    for number, record in enumerate(content, start=1):
        yield _object(record, f"element {number} of {entry.name!r}")


def _only_list(content: Any, name: str) -> list[Any]:
    """The list of records inside an object such as {"data": [...]}, or an object that is itself one record."""
    if isinstance(content, dict):
        found = [v for v in content.values() if isinstance(v, list) and v and isinstance(v[0], dict)]
        return found[0] if len(found) == 1 else [content]
    raise AnisoscopeError(f"{name!r} holds one JSON {type(content).__name__}; expected a list of objects.")


def _object(record: Any, where: str) -> Record:
    if not isinstance(record, dict):
        raise AnisoscopeError(f"{where} is a JSON {type(record).__name__}; expected an object with fields.")
    return record


def _csv(entry: FileEntry) -> Iterator[Record]:
    csv.field_size_limit(max(csv.field_size_limit(), JSON_LIMIT))  # texts are longer than the default of 128 KiB
    source = (line + "\n" for line in lines(decoded(entry)))
    reader = csv.DictReader(source, delimiter="\t" if entry.suffix == ".tsv" else ",", restkey="(surplus)")
    try:
        yield from reader
    except csv.Error as error:
        raise AnisoscopeError(f"line {reader.line_num} of {entry.name!r} is not CSV ({error}).") from error


def _parquet(entry: FileEntry, columns: list[str]) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with readable(entry.name), entry.open() as stream, _arrow_errors(entry, "Parquet"):
        file = pq.ParquetFile(pa.PythonFile(stream, mode="r"))
        known = file.schema_arrow.names
        for batch in file.iter_batches(batch_size=1024, columns=[c for c in columns if c in known] or known):
            yield from (Columns(record, known) for record in batch.to_pylist())


def _arrow(entry: FileEntry, columns: list[str]) -> Iterator[Record]:
    import pyarrow as pa

    with readable(entry.name), entry.open() as stream, _arrow_errors(entry, "Arrow"):
        head = stream.read(6)
        stream.seek(0)
        file = pa.PythonFile(stream, mode="r")
        if head == b"ARROW1":
            whole = pa.ipc.open_file(file)
            batches: Iterator[Any] = (whole.get_batch(i) for i in range(whole.num_record_batches))
        else:
            batches = iter(pa.ipc.open_stream(file))
        for batch in batches:
            chosen = [c for c in columns if c in batch.schema.names] or batch.schema.names
            yield from (Columns(record, batch.schema.names) for record in batch.select(chosen).to_pylist())


class Columns(dict[str, Any]):
    """A record with the names of all columns of its file, also of those that were not read."""

    def __init__(self, values: Record, fields: list[str]) -> None:
        super().__init__(values)
        self.fields = fields


@contextlib.contextmanager
def _arrow_errors(entry: FileEntry, kind: str) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, pa.ArrowInvalid) as error:
        reason = str(error).splitlines()[0]
        raise AnisoscopeError(f"{entry.name!r} is not a readable {kind} file ({reason}); write it again.") from error


def open_dataset(name: str, *, split: str) -> Any:
    """A dataset of the `datasets` library, named `name` or `name:config`, streamed where possible."""
    try:
        import datasets
    except ImportError as error:
        raise AnisoscopeError(
            f"{name!r} is not a local path, and reading it as a dataset name needs the `datasets` library; "
            f"install it with `pip install datasets`, or give a path that exists."
        ) from error
    path, _, config = name.partition(":")
    online = hub_reachable()
    if not online:
        datasets.config.HF_HUB_OFFLINE, before = True, datasets.config.HF_HUB_OFFLINE
    try:
        rows = datasets.load_dataset(path, config or None, split=split, streaming=online)
    except Exception as error:  # the library raises many kinds; each becomes the same sentence
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        where = "" if online else ", and the hub cannot be reached from here"
        raise AnisoscopeError(
            f"{name!r} is neither a file or folder here nor a dataset that can be loaded{where} ({reason}); "
            f"{near_miss(name) or 'check the spelling, or give a local file.'}"
        ) from error
    finally:
        if not online:
            datasets.config.HF_HUB_OFFLINE = before
    return rows
