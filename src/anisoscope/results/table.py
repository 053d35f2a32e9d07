"""The one long table that everything downstream reads."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from anisoscope.errors import unknown_name
from anisoscope.results.query import SCHEMA, SCHEMA_VERSION, Query

if TYPE_CHECKING:
    import pandas as pd

DRAWING = "anisoscope.commands.page"  # the module that draws tables, imported when the first one is drawn


@dataclass(frozen=True)
class Table:
    """Rows of results with the columns of `SCHEMA`; `about` is the run's record (see run.json)."""

    arrow: pa.Table
    about: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_records(cls, records: Iterable[Mapping[str, Any]], about: dict[str, Any] | None = None) -> Table:
        rows = list(records)
        columns: dict[str, list[Any]] = {name: [row.get(name) for row in rows] for name in SCHEMA.names}
        columns["schema"] = [SCHEMA_VERSION] * len(rows)
        return cls(pa.table(columns, schema=SCHEMA), about or {})

    @classmethod
    def read(cls, path: str | Path) -> Table:
        return cls(pq.read_table(path, schema=SCHEMA))

    @classmethod
    def concat(cls, tables: Iterable[Table]) -> Table:
        tables = list(tables)
        return cls(pa.concat_tables([t.arrow for t in tables]), tables[0].about if len(tables) == 1 else {})

    def __len__(self) -> int:
        return self.arrow.num_rows

    def where(self, **fields: Any) -> Table:
        """Rows whose columns and variant keys equal the values given; a list means any of them, None none at all.

        >>> table = Table.from_records([{"layer": 1, "variant": "first=out"}, {"layer": 2, "variant": ""}])
        >>> len(table.where(layer=[1, 2], first="out")), len(table.where(first=None))
        (1, 1)
        """
        query = Query(self)
        known = query.fields() if any(name not in SCHEMA.names for name in fields) else SCHEMA.names
        for name in fields:
            if name not in known:
                raise unknown_name("column", name, known)
        return Table(query.where(**fields).arrow(), self.about) if fields else self

    def value(self, **fields: Any) -> float:
        """The value of the single row that matches; an error when there is none or more than one."""
        found = self.where(**fields)
        if len(found) != 1:
            raise LookupError(f"{len(found)} rows match {fields}, expected exactly one")
        return float(found.arrow["value"][0].as_py())

    def records(self) -> list[dict[str, Any]]:
        return self.arrow.to_pylist()

    def to_arrow(self) -> pa.Table:
        return self.arrow

    def to_pandas(self) -> pd.DataFrame:
        return self.arrow.to_pandas()

    def metrics(self) -> list[str]:
        return sorted(set(self.arrow["metric"].to_pylist()))

    def finite(self) -> Table:
        return Table(self.arrow.filter(pc.is_finite(self.arrow["value"])), self.about)

    def plot(self, metric: str | None = None) -> Any:
        """An interactive figure of one metric (or the main ones) over layers."""
        return importlib.import_module(DRAWING).profile_figure(self, metric)

    def _repr_html_(self) -> str:
        return str(importlib.import_module(DRAWING).table_html(self))


def is_missing(value: float | None) -> bool:
    return value is None or math.isnan(value)
