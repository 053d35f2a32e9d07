"""The table of a run from the pieces that it has written so far, and the rows that came since it was last read.

Until a run ends its rows lie in parts/, one file for each measured step, model or pass, and those of a study in its
arms. Pieces are written beside their place and renamed, so each is whole; one that is replaced while it is read is read
again. A server that follows a run keeps the `stamp` of what it has read:

    update = rows_since("runs/mine")
    later = rows_since("runs/mine", update.stamp)     # `later.whole`: its rows replace all earlier ones
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from anisoscope.results.query import SCHEMA, Table
from anisoscope.results.state import arm_folders

TABLE = "table.parquet"
TRIES = 5  # to read pieces while a writer replaces them
NO_ROWS = pa.Table.from_batches([], SCHEMA)  # `SCHEMA.empty_table()` imports pandas, half a second
LOGGED = ("loss", "gradient_norm", "learning_rate")  # numbers of a training's log that are rows of its table
Stamp = dict[str, list[int]]  # by the path of a piece in its run: time of its last change in ns, and its size


class RowUpdate(NamedTuple):
    """Rows of a run that came since a stamp was taken."""

    table: Table
    stamp: Stamp
    whole: bool  # whether they are all rows of the run, in the place of those read before


def rows_since(folder: str | Path, stamp: Mapping[str, Sequence[int]] | None = None) -> RowUpdate:
    """The rows that a run has written since `stamp`; all of them without one, or where pieces changed or went."""
    for _ in range(TRIES):
        found = piece_stamps(Path(folder))
        before = {name: list(values) for name, values in (stamp or {}).items()}
        whole = stamp is None or any(found.get(name) != values for name, values in before.items())
        fresh = [name for name in found if whole or name not in before]
        try:
            return RowUpdate(_joined(Path(folder), fresh), found, whole)
        except FileNotFoundError:  # replaced or tidied away in the meantime
            continue
    raise FileNotFoundError(f"{folder} changes too quickly to be read")


def piece_stamps(folder: Path) -> Stamp:
    """The pieces of a run, in order: its table where nothing is newer, else its parts and those of its arms."""
    table, parts = _stamps(folder, [TABLE]), _stamps(folder, _parts(folder))
    for arm in arm_folders(folder):
        parts |= {f"arms/{arm.name}/{name}": values for name, values in piece_stamps(arm).items()}
    newest = max((changed for changed, _ in parts.values()), default=0)
    if table and (not parts or table[TABLE][0] >= newest or _is_complete(folder)):
        return table
    return parts


def _is_complete(folder: Path) -> bool:
    """Whether a run is complete; then its table is whole, though copying may have made its parts look newer."""
    return _json(folder / "run.json").get("status") == "complete"


def _parts(folder: Path) -> list[str]:
    """The names of the parts: by step, measured before logged, and what came at the end last.

    A pass over a model (`NAME.0`) counts until the model's own part is there.
    """
    stems = [path.stem for path in (folder / "parts").glob("*.parquet") if not path.name.startswith(".")]
    wholes = set(stems)
    passes = {stem for stem in stems if stem.rpartition(".")[0] in wholes and stem.rpartition(".")[2].isdigit()}
    return [f"parts/{stem}.parquet" for stem in sorted(wholes - passes, key=_place)]


def _place(stem: str) -> tuple[Any, ...]:
    name, _, number = stem.rpartition("-")
    return (0, int(number), name != "step", name) if number.isdigit() else (1, 0, stem == "finish", stem)


def _stamps(folder: Path, names: Sequence[str]) -> Stamp:
    found: Stamp = {}
    for name in names:
        try:
            status = (folder / name).stat()
        except OSError:
            continue
        found[name] = [status.st_mtime_ns, status.st_size]
    return found


def _joined(folder: Path, names: Sequence[str]) -> Table:
    """The rows of some pieces, in order."""
    return Table(pa.concat_tables([NO_ROWS, *(_piece(folder / name) for name in names)]))


def _piece(path: Path) -> pa.Table:
    """One piece; a pass of a profile does not name its model yet, so the run's record does."""
    if path.name == TABLE:
        return Table.read(path).arrow
    arrow = pq.ParquetFile(path).read(use_threads=False).cast(SCHEMA)  # threads cost more than a part
    if path.parent.name != "parts" or not len(arrow) or arrow["model"].null_count < len(arrow):
        return arrow
    about = _json(path.parents[1] / "run.json")
    models = (about.get("config") or {}).get("models") or ()
    number = path.name.partition("-")[0]
    named = number.isdigit() and int(number) < len(models)
    columns = {"run": path.parents[1].name, "model": Path(str(models[int(number)])).name if named else None}
    columns["seed"] = about.get("seed")
    for name, value in columns.items():
        field = SCHEMA.field(name)
        arrow = arrow.set_column(SCHEMA.get_field_index(name), field, pa.array([value] * len(arrow), field.type))
    return arrow


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def log_since(folder: str | Path, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The lines of a training's log after a number of bytes, and how many bytes have been read then.

    The log of a resumed training begins again at its checkpoint: where it has become shorter, all of it is given.
    """
    path = Path(folder) / "log.jsonl"
    if not path.is_file():
        return [], 0
    with path.open("rb") as file:
        file.seek(offset if offset <= path.stat().st_size else 0)
        start, text = file.tell(), file.read()
    whole = text[: text.rfind(b"\n") + 1]  # a line that is being written is read later
    return [json.loads(line) for line in whole.splitlines()], start + len(whole)


def logged_rows(folder: Path, about: Mapping[str, Any]) -> Table:
    """The numbers of a training's log as rows, for a run that has measured nothing yet."""
    lines, _ = log_since(folder)
    models = about.get("models") or [{}]
    columns = {"run": folder.name, "model": models[0].get("name"), "seed": about.get("seed"), "stack": "single"}
    columns |= {"kind": "training", "group": "", "variant": "", "data": "live"}
    return Table.from_records(
        {**columns, "step": line["step"], "metric": name, "value": line[name]}
        for line in lines
        for name in LOGGED
        if line.get(name) is not None
    )


def with_arms(folder: Path, about: dict[str, Any]) -> dict[str, Any]:
    """The record of a study with the models and data of its arms, which it adds itself only when it ends."""
    records = [(arm, _json(arm / "run.json")) for arm in arm_folders(folder)]
    if not records or about.get("models"):
        return about
    models = [
        {**model, "seed": record.get("seed"), "key": ""}
        for _, record in records
        for model in record.get("models") or ()
    ]
    warnings = [f"{arm.name}: {text}" for arm, record in records for text in record.get("warnings") or ()]
    first: dict[str, Any] = {}
    for name in ("device", "data"):
        first |= next(({name: record[name]} for _, record in records if record.get(name)), {})
    return {**first, **about, "models": models, "warnings": [*about.get("warnings", []), *warnings]}


def in_order(table: Table) -> Table:
    """Sort rows by step, numbers logged by the training last and by name; otherwise in the order written.

    A training may log its numbers in several calls, in whatever order; a resumed one reads them back from files.
    """
    arrow = table.arrow
    steps = pc.fill_null(arrow["step"], -1).to_numpy()
    logged = pc.fill_null(pc.equal(arrow["kind"], "training"), False).to_numpy()
    at = np.flatnonzero(logged)
    training = arrow.select(["metric", "variant"]).take(at).to_pylist()
    names = [f"{row['metric']};{row['variant'] or ''}" for row in training]
    order = {name: number for number, name in enumerate(sorted(set(names)))}
    by_name = np.zeros(len(arrow), dtype=np.int64)
    by_name[at] = [order[name] for name in names]
    rows = np.lexsort((by_name, logged, steps))
    return table if (np.diff(rows) == 1).all() else table.take(rows)  # taking a million rows takes a second
