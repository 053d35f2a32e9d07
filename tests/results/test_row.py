"""Columns that do not fit are named."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anisoscope import AnisoscopeError, Table


@pytest.mark.parametrize("row", [{"layer": 10**12}, {"value": "x"}, {"metric": 3}, {"replicates": "x"}])
def test_a_value_that_no_column_takes_is_named(row: dict[str, object]) -> None:
    (name,) = row
    with pytest.raises(AnisoscopeError, match=f"{name} is '.*' in a row; expected"):
        Table.from_records([{}, row])


def test_a_file_that_is_no_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no table")
    pq.write_table(pa.table({"text": [1]}), tmp_path / "other")
    for name in ("text", "other", "nowhere.parquet"):
        with pytest.raises(AnisoscopeError, match=f"{name}' is not a readable table"):
            Table.read(tmp_path / name)


def test_one_row_that_is_none_or_several_is_an_error_of_ours() -> None:
    with pytest.raises(AnisoscopeError, match="0 rows match"):
        Table.from_records([]).value(metric="drift")
    with pytest.raises(LookupError):
        Table.from_records([]).value(metric="drift")
