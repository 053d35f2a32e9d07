"""The tables of several runs as one, in which models of the same name are told apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from anisoscope.results.table import Table


def joint(tables: Sequence[Table], paths: Sequence[str]) -> Table:
    """The tables of the runs at these paths as one."""
    renamed = new_names(tables, paths)
    return joined([renamed_table(table, names) for table, names in zip(tables, renamed, strict=True)])


def joined(tables: Sequence[Table]) -> Table:
    """Some tables as one, with what each says about its models: claims ask which are encoders."""
    models = [entry for table in tables for entry in _models(table)]
    return Table(Table.concat(tables).arrow, tables[0].about if len(tables) == 1 else {"models": models})


def new_names(tables: Sequence[Table], paths: Sequence[str]) -> list[dict[str, str]]:
    """For each run in which a model has a name that another run uses for the same seed: all its names, with the run.

    All of them, because arms are paired by their names. Other seeds of one model keep its name: they repeat it.
    """
    owned = [_owners(table) for table in tables]
    counts = Counter(owner for owners in owned for owner in owners)
    runs = _run_names(paths)
    clashing = [any(counts[owner] > 1 for owner in owners) for owners in owned]
    return [
        {model: f"{model} ({run})" for model, _ in sorted(owners, key=str)} if clash else {}
        for owners, run, clash in zip(owned, runs, clashing, strict=True)
    ]


def _owners(table: Table) -> set[tuple[str, int | None]]:
    pairs = table.arrow.select(["model", "seed"]).group_by(["model", "seed"]).aggregate([]).to_pylist()
    return {(pair["model"] or "", pair["seed"]) for pair in pairs}


def _run_names(paths: Sequence[str]) -> list[str]:
    """The last part of each path, or as much more as tells them apart.

    >>> _run_names(["runs/a", "runs/b"]), _run_names(["x/run", "y/run"])
    (['a', 'b'], ['x/run', 'y/run'])
    """
    parts = [Path(path).resolve().parts for path in paths]
    for length in range(1, max(map(len, parts), default=1)):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return list(paths)


def renamed_table(table: Table, names: Mapping[str, str]) -> Table:
    """The same rows with other names of models, in its record too."""
    if not names:
        return table
    entries = [{**entry, "name": names.get(entry.get("name", ""), entry.get("name"))} for entry in _models(table)]
    column = table.arrow["model"].to_pylist()
    models = pa.array([names.get(model or "", model) for model in column], type=pa.string())
    place = table.arrow.schema.get_field_index("model")
    arrow = table.arrow.set_column(place, table.arrow.schema.field(place), models)
    return Table(arrow, {**table.about, "models": entries} if entries else table.about)


def _models(table: Table) -> list[dict[str, Any]]:
    return list(table.about.get("models") or ())
