"""The map of rows as the page's script draws it: the same rows at every step, on axes that do not move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from anisoscope.errors import AnisoscopeError
from anisoscope.results.map_file import FILE, shares_in
from anisoscope.view.concepts import visible
from anisoscope.view.shape_arms import Arm
from anisoscope.view.training import Site

if TYPE_CHECKING:
    from anisoscope.view.report import RunView

NUMBERS = 360_000  # coordinates that the page carries
COLOURS = {"frequency": "frequency", "position": "position", "group": "group"}
BY = ["model", "seed", "stack", "layer", "kind"]
COLUMNS = [*BY, "step", "row", "x", "y", "token", "frequency", "position", "group"]


def map_of(run: RunView) -> pa.Table | None:
    """The map of a run: as it was given, or from its folder."""
    if run.map is not None:
        return run.map
    path = Path(run.path) / FILE if run.path else None
    if path is None or not path.is_file():
        return None
    try:
        found = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise AnisoscopeError(f"{str(path)!r} is not a readable map ({error}); delete it or run again.") from error
    missing = [name for name in COLUMNS if name not in found.column_names]
    if missing:
        raise AnisoscopeError(f"{str(path)!r} has no column {missing[0]!r}; delete it or run again.")
    return found


def rows_data(runs: Sequence[RunView], arms: Sequence[Arm], steps: Sequence[int]) -> dict[str, Any]:
    """For each arm and site the rows of its first seed that has any, step by step; empty where there is no map."""
    found: dict[int, list[dict[str, Any]]] = {}
    for run in runs:
        table = map_of(run)
        if table is not None and len(table):
            _take(found, table, arms, about=shares_in(table) or run.about.get("map") or {}, steps=steps)
    if not found:
        return {}
    # models of other depths have other last blocks: places are named by what they are
    order = {_place(e, arms[i].blocks): Site.of(e["layer"], e["kind"]) for i, entries in found.items() for e in entries}
    names = sorted(order, key=lambda name: order[name])
    drawn = {str(i): _compact(entries, names, arms[i].blocks) for i, entries in found.items()}
    colours = [c for c in COLOURS if any(_told(e, c) for entries in drawn.values() for e in entries.values())]
    return {"places": names, "colours": colours, "arms": drawn}


def _take(
    found: dict[int, list[dict[str, Any]]],
    table: pa.Table,
    arms: Sequence[Arm],
    *,
    about: Mapping[str, Any],
    steps: Sequence[int],
) -> None:
    by: dict[tuple[Any, ...], dict[int, dict[int, tuple[Any, ...]]]] = {}
    for values in zip(*(table[name].to_pylist() for name in COLUMNS), strict=True):
        step, row = values[5:7]
        by.setdefault(values[:5], {}).setdefault(step, {})[row] = values[7:]
    wanted = set(steps)
    total = sum(len(rows) for marks in by.values() for step, rows in marks.items() if step in wanted)
    keep = max(0.05, min(1.0, NUMBERS / (2 * max(1, total))))
    for arm in arms:
        mine = [key for key in by if key[0] == arm.model and key[2] in (arm.learners[0].stack, "single")]
        seeds = [one.seed for one in arm.learners if any(key[1] in (one.seed, None) for key in mine)]
        if arm.index in found or not mine or not seeds:
            continue
        own = [key for key in mine if key[1] in (seeds[0], None)]
        first = min((key[3] for key in own if key[4] == "stage"), default=0)
        for key in own:
            marks = {step: rows for step, rows in by[key].items() if step in wanted}
            shares = _shares(about, key)
            entry = {"layer": key[3], "kind": key[4], "steps": marks, "shares": shares, "keep": keep}
            entry["first"] = key[4] == "stage" and key[3] == first < arm.blocks
            found.setdefault(arm.index, []).append(entry)


def _shares(about: Mapping[str, Any], key: tuple[Any, ...]) -> list[float]:
    model, seed, stack, layer, kind = key
    site = f"{layer}.{kind}" if stack == "single" else f"{stack}.{layer}.{kind}"
    for name in (f"{model}-seed{seed}", model):
        shares = (about.get(name) or {}).get(site)
        if shares:
            return [round(float(share), 4) for share in shares]
    return []


def _place(entry: Mapping[str, Any], blocks: int) -> str:
    """A place by what it is, so that models of other depths can be put beside each other."""
    if entry["kind"] not in ("resid", "stage"):
        return Site.of(entry["layer"], entry["kind"]).name
    if entry["layer"] == 1 or entry["first"]:
        return "first block"
    return "last block" if entry["layer"] == blocks else "middle block"


def _compact(entries: Sequence[Mapping[str, Any]], names: Sequence[str], blocks: int) -> dict[str, Any]:
    found = {}
    for entry in entries:
        rows = sorted({row for marks in entry["steps"].values() for row in marks})
        rows = rows[: max(8, int(len(rows) * entry["keep"]))]
        labels: dict[int, tuple[Any, ...]] = {}
        for marks in entry["steps"].values():
            labels |= {row: values[2:] for row, values in marks.items()}
        told = [labels[row] for row in rows]
        found[str(names.index(_place(entry, blocks)))] = {
            "name": Site.of(entry["layer"], entry["kind"]).name,
            "shares": entry["shares"],
            "token": [visible(str(t[0] or "")) for t in told],
            "frequency": [t[1] for t in told],
            "position": [t[2] for t in told],
            "group": [t[3] or "" for t in told],
            "at": {str(step): _coordinates(marks, rows) for step, marks in sorted(entry["steps"].items())},
        }
    return found


def _coordinates(marks: Mapping[int, tuple[Any, ...]], rows: Sequence[int]) -> list[list[float | None]]:
    def column(i: int) -> list[float | None]:
        return [None if row not in marks or marks[row][i] is None else float(f"{marks[row][i]:.4g}") for row in rows]

    return [column(0), column(1)]


def _told(entry: Mapping[str, Any], colour: str) -> bool:
    return len({value for value in entry[colour] if value not in (None, "")}) > 1
