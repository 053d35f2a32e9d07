"""Columns of the table made of values and read from a file, with errors that name what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from anisoscope.errors import AnisoscopeError


class NotOneRow(AnisoscopeError, LookupError):
    """One row was asked for, and there is none, or there are several."""


def column_of(field: pa.Field, values: list[Any]) -> pa.Array:
    """Values as a column of the table; an error that names one that does not fit."""
    try:
        return pa.array(values, field.type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        wrong = next((value for value in values if not _converts(value, field.type)), values)
        raise AnisoscopeError(f"{field.name} is {str(wrong)[:60]!r} in a row; expected {field.type}.") from error


def _converts(value: Any, kind: pa.DataType) -> bool:
    try:
        pa.array([value], kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return False
    return True


def read_columns(path: str | Path, schema: pa.Schema) -> pa.Table:
    """The table in a Parquet file, which has exactly the columns of `schema`."""
    try:
        check_columns(path, schema)
        return pq.read_table(path, schema=schema)
    except (OSError, ValueError, TypeError, pa.ArrowException) as error:
        raise unreadable(path, error) from error


def check_columns(path: str | Path, schema: pa.Schema) -> None:
    """Raise an error if a Parquet file has other columns than `schema`."""
    if foreign := set(pq.read_schema(path).names) ^ set(schema.names):
        verb = "has no" if (name := min(foreign)) in schema.names else "has a foreign"
        raise ValueError(f"it {verb} column {name!r}")


def unreadable(path: str | Path, error: Exception) -> AnisoscopeError:
    """What is said of a table that cannot be read."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).partition(":")[0]
    return AnisoscopeError(f"{str(path)!r} is not a readable table ({reason}); run again.")
