"""map.parquet: the same few rows at every measured step, on fixed axes; tangent/row_map.py makes it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from anisoscope.results.folder import replace_file

FILE, SHARES = "map.parquet", "shares"
SCHEMA = pa.schema(
    [
        ("model", pa.string()), ("seed", pa.int64()), ("step", pa.int64()), ("stack", pa.string()),
        ("layer", pa.int64()), ("kind", pa.string()), ("row", pa.int64()), ("x", pa.float32()), ("y", pa.float32()),
        ("z", pa.float32()), ("token", pa.string()), ("frequency", pa.int64()), ("position", pa.int64()),
        ("group", pa.string()),
    ]
)  # fmt: skip


def write_rows(folder: Path, table: pa.Table, shares: Mapping[str, Any]) -> None:
    """The shares go into the file too: a training run writes its run.json itself."""
    told = table.replace_schema_metadata({SHARES: json.dumps(shares)})
    replace_file(folder / FILE, lambda path: pq.write_table(told, path, compression="zstd"))


def shares_in(table: pa.Table) -> dict[str, Any]:
    """The share of variance of each axis, by model and site, as the file of a map has it."""
    text = (table.schema.metadata or {}).get(SHARES.encode())
    return dict(json.loads(text)) if text else {}


def map_name(model: str, seed: int | None) -> str:
    """Under which name the shares of a model's axes are kept.

    >>> map_name("causal-next-6x256", 1), map_name("gpt2", None)
    ('causal-next-6x256-seed1', 'gpt2')
    """
    return model if seed is None else f"{model}-seed{seed}"


def join_maps(folders: Sequence[Path]) -> tuple[pa.Table, dict[str, Any]]:
    """The maps of several runs in one table, and the shares of their axes; runs without a map have no rows in it."""
    tables: list[pa.Table] = [SCHEMA.empty_table()]
    shares: dict[str, Any] = {}
    for folder in map(Path, folders):
        if (folder / FILE).is_file():
            found = pq.read_table(folder / FILE)
            tables.append(found.replace_schema_metadata(None).cast(SCHEMA))
            shares |= shares_in(found)
    return pa.concat_tables(tables), shares


def write_joined(out: Path, folders: Sequence[Path]) -> dict[str, Any]:
    """Write the map of a study from those of its arms; what its run.json says of it under `map`."""
    table, shares = join_maps(folders)
    if len(table):
        write_rows(Path(out), table, shares)
    return shares
