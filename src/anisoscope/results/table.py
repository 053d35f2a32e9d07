"""The one long table that everything downstream reads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from anisoscope.errors import unknown_name

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 1
FIRST_OUTLIER = "the first position is an outlier here"  # the note of a row with first=out where it is one
SCHEMA = pa.schema(
    [
        ("schema", pa.int32()),
        ("run", pa.string()),
        ("model", pa.string()),
        ("revision", pa.string()),
        ("data", pa.string()),
        ("step", pa.int64()),  # null outside a series
        ("stack", pa.string()),  # encoder | decoder | single
        ("layer", pa.int32()),  # 0 = embed, l = after block l, final and unembed = L
        ("depth", pa.float64()),  # layer / L
        ("kind", pa.string()),
        ("head", pa.int32()),  # null where there are no heads
        ("group", pa.string()),  # "" = all rows
        ("metric", pa.string()),
        ("variant", pa.string()),  # canonical "key=value;key=value", sorted; "" = the metric's default
        ("value", pa.float64()),  # NaN where it could not be computed; `note` says why
        ("low", pa.float64()),
        ("high", pa.float64()),
        ("sd", pa.float64()),
        ("n", pa.int64()),
        ("contexts", pa.int64()),
        ("dropped", pa.int64()),
        ("seed", pa.int64()),
        ("note", pa.string()),
        ("replicates", pa.list_(pa.float64())),  # leave-one-fold-out values, for paired differences
    ]
)


def variant_name(options: Mapping[str, Any]) -> str:
    """A canonical string of options.

    >>> variant_name({"first": "out", "centred": True})
    'centred=1;first=out'
    """
    plain = {k: int(v) if isinstance(v, bool) else v for k, v in options.items()}
    return ";".join(f"{key}={plain[key]}" for key in sorted(plain))


@dataclass(frozen=True)
class Table:
    """Rows of results with the schema above; `about` is the run's record (see run.json)."""

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

    def where(self, **columns: Any) -> Table:
        """Rows whose columns equal the values given; a list means any of them."""
        mask: Any = None
        for name, wanted in columns.items():
            if name not in SCHEMA.names:
                raise unknown_name("column", name, SCHEMA.names)
            values = wanted if isinstance(wanted, list | tuple | set) else [wanted]
            hit = pc.is_in(self.arrow[name], value_set=pa.array(list(values), type=SCHEMA.field(name).type))
            mask = hit if mask is None else pc.and_(mask, hit)
        return self if mask is None else Table(self.arrow.filter(mask), self.about)

    def value(self, **columns: Any) -> float:
        """The value of the single row that matches; an error when there is none or more than one."""
        found = self.where(**columns)
        if len(found) != 1:
            raise LookupError(f"{len(found)} rows match {columns}, expected exactly one")
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
        from anisoscope.view.sections.profiles import profile_figure

        return profile_figure(self, metric)

    def _repr_html_(self) -> str:
        from anisoscope.view.tables import table_html

        return table_html(self)


def is_missing(value: float | None) -> bool:
    return value is None or math.isnan(value)
