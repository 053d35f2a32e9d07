"""`anisoscope show`: every form of a long table has the same rows, and is read and written in blocks."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from anisoscope.errors import AnisoscopeError
from anisoscope.results.folder import RunFolder
from anisoscope.results.query import SCHEMA, Table
from anisoscope.view import console

METRICS = ("average_cosine", "two_nn", "drift")
VALUES = (0.0, -0.0, 1.0, 1e-5, 1e15, 1e22, 5e-324, 0.1, -123456.789, math.nan, 1 / 3)


def _records(size: int) -> list[dict[str, Any]]:
    records = []
    for i in range(size):
        value = VALUES[i % len(VALUES)]
        row = {"model": 'a "name", größer\n\\', "layer": i % 5, "kind": "resid" if i % 4 else "query"}
        row |= {"metric": METRICS[i % 3], "variant": "first=out" if i % 2 else "", "value": value, "low": value / 3}
        row |= {"n": i, "head": None if i % 3 else i % 7, "note": None if i % 6 else "few rows, ‖x‖ = 0"}
        row |= {"replicates": None if i % 5 == 1 else [value, math.nan, float(i)][: i % 4]}
        records.append(row)
    return records


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setattr(console, "BLOCK", 37)  # several blocks, the last one shorter
    Table.from_records(_records(500)).write(tmp_path / "table.parquet")
    (tmp_path / "run.json").write_text(json.dumps({"status": "complete"}))
    return RunFolder(tmp_path)


def _printed(run: RunFolder, capsys: pytest.CaptureFixture[str], form: str, **chosen: Any) -> str:
    wanted = {name: chosen.get(name, ()) for name in ("metric", "kind")}
    console.print_run(run, form=form, wanted=wanted, heads=chosen.get("heads", False))
    return capsys.readouterr().out


def _without_nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nan(v) for v in value]
    return None if isinstance(value, float) and math.isnan(value) else value


@pytest.mark.parametrize("chosen", [{}, {"metric": ["two_nn"]}, {"metric": ["drift", "two_nn"], "kind": ["query"]}])
def test_json_has_every_row_of_the_table_in_its_order(
    run: RunFolder, chosen: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(_printed(run, capsys, "json", **chosen))
    rows = [row for row in run.table().records() if all(row[name] in words for name, words in chosen.items())]
    assert found == [{name: _without_nan(value) for name, value in row.items()} for row in rows]
    assert [list(row) for row in found] == [SCHEMA.names] * len(rows)
    kinds = {type(value) for row in found for value in (row["value"], *(row["replicates"] or ()))}
    assert kinds == {float, type(None)}, "a number with a whole value stays a floating-point number"


def test_csv_has_every_row_of_the_table_in_its_order(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    found = list(csv.DictReader(io.StringIO(_printed(run, capsys, "csv"))))
    rows = run.table().records()
    assert len(found) == len(rows)
    for line, row in zip(found, rows, strict=True):
        assert (line["model"], line["metric"], int(line["n"])) == (row["model"], row["metric"], row["n"])
        assert (float(line["value"]) if line["value"] else None) == _without_nan(row["value"])


def test_an_empty_table_is_an_empty_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Table.from_records([]).write(tmp_path / "table.parquet")
    (tmp_path / "run.json").write_text(json.dumps({"status": "complete"}))
    assert json.loads(_printed(RunFolder(tmp_path), capsys, "json")) == []
    assert len(_printed(RunFolder(tmp_path), capsys, "csv").splitlines()) == 1


def test_a_table_on_a_terminal_shows_the_first_rows_and_counts_them_all(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "SHOWN_ROWS", 50)
    for heads in (False, True):
        notes: list[str] = []
        monkeypatch.setattr(console, "print_note", lambda words, notes=notes, **_: notes.append(words))
        shown: list[int] = []
        monkeypatch.setattr(
            console, "_print_rows", lambda rows, form, names, shown=shown: shown.extend(row["n"] for row in rows)
        )
        _printed(run, capsys, "table", heads=heads)
        rows = [row["n"] for row in run.table().records() if heads or row["head"] is None]
        assert shown == rows[:50] and notes[0].startswith(f"the first 50 of {len(rows)} rows")


def test_no_form_reads_the_whole_table_at_once(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pq, "read_table", lambda *_, **__: pytest.fail("the whole table was read"))
    for form in ("table", "csv", "json"):
        assert _printed(run, capsys, form)
    assert max(map(len, run.batches(size=64))) <= 64


def test_what_is_not_in_the_table_is_told(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AnisoscopeError, match="did you mean"):
        _printed(run, capsys, "csv", metric=["two_n"])
    with pytest.raises(AnisoscopeError, match="format"):
        _printed(run, capsys, "yaml")
