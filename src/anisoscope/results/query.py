"""The long table of results (`Table`), and `Query` to filter its rows by column or variant key, group and order them.

For example, the rows of proxy = pca without those of its controls, by site, in order of steps:

    >>> energy = {"metric": "gradient_energy", "layer": 1, "kind": "resid"}
    >>> table = Table.from_records([
    ...     {**energy, "step": 9, "value": 0.5, "variant": "proxy=pca;rank=4"},
    ...     {**energy, "step": 0, "value": 0.2, "variant": "proxy=pca;rank=4"},
    ...     {**energy, "step": 0, "value": 0.1, "variant": "control=next;proxy=pca;rank=4"},
    ... ])
    >>> lines = Query(table).where(proxy="pca", control=None).lines("layer", "kind", along="step")
    >>> {site: [row.value for row in rows] for site, rows in lines.items()}
    {(1, 'resid'): [0.2, 0.5]}

Every column of the table and every key of a variant is a *field*; so are `source`, the index of a row's table, and
fields added by `tagged`. A field that a row does not have is None, and selecting `None` selects such rows. Variants are
taken apart in `results.frame`, of which this module gives the functions as well.
"""

from __future__ import annotations

import csv
import difflib
import importlib
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from anisoscope.errors import AnisoscopeError, unknown_name
from anisoscope.results import frame
from anisoscope.results.frame import options_of as options_of
from anisoscope.results.frame import variant_name as variant_name
from anisoscope.results.frame import with_options as with_options
from anisoscope.results.privacy import placeless_columns
from anisoscope.results.quantity import refuse_infinite
from anisoscope.results.row import COLUMNS, NUMBERS, NotOneRow, TableColumns, column_of, read_columns
from anisoscope.results.row import FIRST_OUTLIER as FIRST_OUTLIER
from anisoscope.results.row import SCHEMA as SCHEMA
from anisoscope.results.row import SCHEMA_VERSION as SCHEMA_VERSION
from anisoscope.results.row import Row as Row

if TYPE_CHECKING:
    import pandas as pd

DRAWING = "anisoscope.commands.drawing"  # the module that draws tables, imported when the first one is drawn
FOLDER = "anisoscope.results.folder"  # which reads the table of a run
HUB = "anisoscope.integrations.hub"  # which downloads datasets of results
USUAL_KEYS = ("batch", "control", "first", "fit", "of", "proxy", "rank")  # may be asked to be None in any table


@dataclass(frozen=True, repr=False)
class Table:
    """Rows of results: one for each (model, step, site, head, group, metric, variant); `about` is the run's record.

    TableColumns are those of `SCHEMA`, and every key of a variant is a column as well:

    >>> place = {"model": "m", "metric": "gradient_energy", "kind": "resid", "layer": 1}
    >>> table = Table.from_records([
    ...     {**place, "step": 0, "value": 0.2, "variant": "proxy=pca;rank=4"},
    ...     {**place, "step": 9, "value": 0.5, "variant": "proxy=pca;rank=4"},
    ...     {**place, "step": 9, "value": 0.1, "variant": "control=next;proxy=pca;rank=4"},
    ... ])
    >>> table
    Table: 3 rows · model m · steps 0 … 9 (2) · kind resid · metric gradient_energy
    step  metric           variant                        value  interval
       0  gradient_energy  proxy=pca;rank=4                 0.2
       9  gradient_energy  proxy=pca;rank=4                 0.5
       9  gradient_energy  control=next;proxy=pca;rank=4    0.1
    >>> energies = table.where(metric="gradient_energy", proxy="pca", control=None)
    >>> energies.steps, energies["value"].tolist(), energies["rank"].tolist()
    ([0, 9], [0.2, 0.5], [4, 4])
    >>> [row.value for row in table if row["control"] == "next"], table[-1].step, len(table[:2])
    ([0.1], 9, 2)
    """

    arrow: pa.Table
    about: dict[str, Any] = field(default_factory=dict)

    # -- making and storing --

    @classmethod
    def from_records(cls, records: Iterable[Mapping[str, Any]], about: dict[str, Any] | None = None) -> Table:
        rows = list(records)
        columns: dict[str, list[Any]] = {name: [row.get(name) for row in rows] for name in SCHEMA.names}
        columns["schema"] = [SCHEMA_VERSION] * len(rows)
        placeless_columns(columns)
        refuse_infinite(columns)
        return cls(pa.table({f.name: column_of(f, columns[f.name]) for f in SCHEMA}, schema=SCHEMA), about or {})

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any], size: int) -> Table:
        """A table of `size` rows from arrays; columns that are not given are null."""
        arrays = [pa.array(columns[f.name], f.type) if f.name in columns else pa.nulls(size, f.type) for f in SCHEMA]
        return cls(pa.table(arrays, schema=SCHEMA))

    @classmethod
    def read(cls, path: str | Path) -> Table:
        """The table of a run folder, also of one that is still being written, of a parquet file, or of a dataset.

        `about` then holds the run's record; where the run is not done, `about["reading"]` says how far it is. A dataset
        is what `anisoscope push` wrote: a folder, `hub:organisation/dataset` or `hub:organisation/dataset/run`.

        >>> Table.read("runs/mine"), Table.read("hub:organisation/dataset")  # doctest: +SKIP
        """
        if isinstance(path, str) and path.startswith("hub:"):
            path = importlib.import_module(HUB).downloaded(path)
        if Path(path).is_file() or Path(path).suffix == ".parquet":
            return cls(current_names(read_columns(path, SCHEMA)))
        table: Table = importlib.import_module(FOLDER).table_of(path)
        return table

    def write(self, path: str | Path) -> None:
        pq.write_table(self.arrow, path)

    @classmethod
    def concat(cls, tables: Iterable[Table], about: dict[str, Any] | None = None) -> Table:
        """All rows in order; `about` is by default that of a single table and empty for several or none."""
        tables = list(tables)
        arrow = pa.concat_tables([table.arrow for table in tables]) if tables else SCHEMA.empty_table()
        return cls(arrow, about if about is not None else tables[0].about if len(tables) == 1 else {})

    # -- what is in it --

    def __len__(self) -> int:
        return self.arrow.num_rows

    def __iter__(self) -> Iterator[Row]:
        """Its rows; their columns are attributes (`row.value`), and `row["proxy"]` is a column or a variant key."""
        return iter(Query(self))

    def __getitem__(self, which: int | slice | str) -> Any:
        """`table["value"]`: a column or a variant key as an array; `table[0]`: a row; `table[:9]`: a table of rows."""
        if isinstance(which, str):
            if which in SCHEMA.names:
                return self.arrow[which].to_numpy()
            self._check_field(which)
            return frame.key_column(self.arrow, which).to_numpy(zero_copy_only=False)
        if isinstance(which, slice):
            return self.take(np.arange(len(self))[which])
        return next(iter(self.take(np.array([range(len(self))[which]]))))

    def head(self, rows: int = 5) -> Table:
        """The first rows."""
        return self[:rows]

    @property
    def columns(self) -> list[str]:
        """The columns, then the keys of its variants: everything that `where` takes."""
        return [*SCHEMA.names, *frame.variant_keys(pc.unique(self.arrow["variant"]).to_pylist())]

    def unique(self, column: str) -> list[Any]:
        """The values that occur in a column, or under a variant key, sorted; missing ones are left out.

        >>> Table.from_records([{"layer": 2}, {"layer": 0}, {"layer": 2}, {}]).unique("layer")
        [0, 2]
        """
        if column not in SCHEMA.names:
            self._check_field(column)
        array = self.arrow[column] if column in SCHEMA.names else frame.key_column(self.arrow, column)
        return sorted(value for value in pc.unique(array).to_pylist() if value not in (None, ""))

    @property
    def metrics(self) -> list[str]:
        return self.unique("metric")

    @property
    def models(self) -> list[str]:
        return self.unique("model")

    @property
    def steps(self) -> list[int]:
        return self.unique("step")

    @property
    def layers(self) -> list[int]:
        return self.unique("layer")

    # -- choosing rows --

    def where(self, **fields: Any) -> Table:
        """Rows whose columns and variant keys have the values given; a misspelt name is an error with the nearest one.

        A list means any of its values, None rows without the key, `...` rows with it, a function those values for which
        it is true. Values of variant keys may be numbers or text.

        >>> table = Table.from_records([{"layer": 1, "variant": "first=out"}, {"layer": 2, "variant": ""}])
        >>> len(table.where(layer=[1, 2], first="out")), len(table.where(first=None))
        (1, 1)
        """
        if not fields:
            return self
        self._check_metrics(fields.get("metric"))  # first: without a metric its keys are not there either
        for name, value in fields.items():
            self._check_field(name, absent=value is None)
        return Query(self).where(**fields).table(self.about)

    def _check_field(self, name: str, *, absent: bool = False) -> None:
        """Raise an error for a name that is no column; one that rows may not have must look like none to be an error.

        `control=None` chooses rows without a control: all of them where there are none.
        """
        if name in SCHEMA.names or name in (known := self.columns):
            return
        if name in USUAL_KEYS and not len(self):  # nothing was measured, or another process has the results
            return
        if not absent and name in USUAL_KEYS:
            raise AnisoscopeError(
                f"no row of this table has the key {name!r}; what has it was not measured, or was left out: notes of "
                f"the run say why. Metrics: {', '.join(self.metrics)}."
            )
        if not absent:
            raise unknown_name("column", name, known)
        if name not in USUAL_KEYS and difflib.get_close_matches(name, [*known, *USUAL_KEYS], n=1, cutoff=0.75):
            raise unknown_name("column", name, {*known, *USUAL_KEYS})

    def _check_metrics(self, wanted: Any) -> None:
        """Raise an error for the name of a metric that the table, if it has rows, does not hold."""
        names = [wanted] if isinstance(wanted, str) else wanted if isinstance(wanted, list | tuple | set) else ()
        there = self.metrics if names and len(self) else []
        for name in names if there else ():
            if isinstance(name, str) and name not in there:
                raise unknown_name("metric of this table", name, there)

    def renamed(self, names: Mapping[str, str]) -> Table:
        """The same table with models renamed, in the rows and in `about`."""
        if not names:
            return self
        models = pa.array([names.get(model or "", model) for model in self.arrow["model"].to_pylist()], pa.string())
        named = [(entry, entry.get("name")) for entry in self.about.get("models") or ()]
        entries = [{**entry, "name": names.get(name or "", name)} for entry, name in named]
        arrow = self.arrow.set_column(SCHEMA.get_field_index("model"), SCHEMA.field("model"), models)
        return Table(arrow, {**self.about, "models": entries} if entries else self.about)

    def value(self, **fields: Any) -> float:
        """The value of the single row that matches, or of the one in its metric's default variant; else an error."""
        found = self.where(**fields)
        if len(found) > 1 and "variant" not in fields:
            found = found.where(variant="")
        if len(found) != 1:
            raise NotOneRow(f"{len(found)} rows match {fields}, expected exactly one; name more columns, or fewer.")
        return float(found.arrow["value"][0].as_py())

    def take(self, rows: np.ndarray) -> Table:
        """The rows with these indices, in this order."""
        return Table(self.arrow.take(rows), self.about)

    def finite(self) -> Table:
        """Rows whose value is a number."""
        return Table(self.arrow.filter(pc.is_finite(self.arrow["value"])), self.about)

    # -- other forms of it --

    def records(self) -> list[dict[str, Any]]:
        return self.arrow.to_pylist()

    def to_arrow(self) -> pa.Table:
        return self.arrow

    def to_pandas(self) -> pd.DataFrame:
        """A data frame with a column for every column and every variant key; numbers where all values of a key are."""
        return frame.pandas_frame(self.arrow)

    def to_polars(self) -> Any:
        """As `to_pandas`, for polars."""
        return frame.polars_frame(self.arrow)

    def plot(
        self,
        metric: str | None = None,
        over: str | None = None,
        *,
        backend: str = "plotly",
        ax: Any = None,
        **where: Any,
    ) -> Any:
        """One metric (or the main ones) over "step", "layer" or "depth"; by default over steps if there are several.

        Lines are the layers of one model, or one for each of several models. Of a metric in several variants the plain
        one is drawn, or what `where` says: `table.plot("gradient_energy", over="step", proxy="pca", layer=[1, 6])`.
        Returns a plotly figure; with backend="matplotlib" the axes, drawn into `ax` if given.
        """
        drawing = importlib.import_module(DRAWING)
        return drawing.plot(self, metric, over=over, backend=backend, ax=ax, where=where)

    def __repr__(self) -> str:
        head = "Table: " + " · ".join(filter(None, (frame.summary(self.arrow), str(self.about.get("reading") or ""))))
        return f"{head}\n{frame.preview_text(self.arrow)}" if len(self) else head

    def _repr_html_(self) -> str:
        return str(importlib.import_module(DRAWING).table_html(self))


FORMER = {("gradient_alignment", "rows=batch"): "gradient_cosine"}  # names of metrics in older tables


def current_names(arrow: pa.Table) -> pa.Table:
    """A table, or some of its columns with metric and variant, with the current names of its metrics."""
    for (metric, variant), name in FORMER.items():
        old = pc.and_(pc.equal(arrow["metric"], metric), pc.equal(arrow["variant"], variant))
        if pc.any(old).as_py():
            place = arrow.column_names.index("metric")
            arrow = arrow.set_column(place, SCHEMA.field("metric"), pc.if_else(old, name, arrow["metric"]))
    return arrow


class Query:
    """A selection of the rows of one or several tables; `where` narrows it without copying."""

    def __init__(self, *tables: Table, _columns: TableColumns | None = None, _rows: np.ndarray | None = None) -> None:
        self._columns = _columns or TableColumns([table.arrow for table in tables])
        self._rows = np.arange(len(self._columns.sources)) if _rows is None else _rows

    def _only(self, rows: np.ndarray) -> Query:
        return Query(_columns=self._columns, _rows=rows)

    def where(self, keep: Callable[[Row], bool] | None = None, /, **fields: Any) -> Query:
        """Rows whose fields equal the values given.

        A list, tuple or set selects any of its values, a function the values for which it is true, `...` rows that have
        the field. Values of variant keys are compared as text: `rank=16` and `rank="16"` are the same.
        """
        rows = self._rows
        for name, wanted in fields.items():
            codes, values = self._columns.coded(name)
            hits = np.array([_matches(value, wanted, name) for value in values], dtype=bool)
            rows = rows[hits[codes[rows]]]
        found = self._only(rows)
        return found if keep is None else self._only(np.array([r._at for r in found if keep(r)], dtype=np.int64))

    def exactly(self, **options: Any) -> Query:
        """Rows whose variant has these options and no others; an option that is None is left out."""
        return self.where(variant=with_options("", **options))

    def tagged(self, name: str, values: Sequence[Any]) -> Query:
        """The same query with a computed field, given one value per row; other rows of its tables have None.

        >>> found = Query(Table.from_records([{"layer": 1}, {"layer": 2}])).tagged("half", ["low", "high"])
        >>> [row.layer for row in found.where(half="high")]
        [2]
        """
        distinct = list(dict.fromkeys([None, *values]))
        index = {value: i for i, value in enumerate(distinct)}
        codes = np.zeros(len(self._columns.sources), dtype=np.int64)
        codes[self._rows] = [index[value] for value in values]
        self._columns.tag(name, codes, distinct)
        return self

    def known(self) -> Query:
        """Rows whose value is a number."""
        return self._only(self._rows[np.isfinite(self._columns.floats("value")[self._rows])])

    def at_last_step(self, *by: str) -> Query:
        """The rows of the last step of each group, and rows without a step.

        >>> found = Query(Table.from_records([{"model": "a", "step": 0}, {"model": "a", "step": 9}, {"model": "b"}]))
        >>> [row.step for row in found.at_last_step("model")]
        [9, None]
        """
        groups = self.where(step=...).groups(*by).values()
        kept = [self.where(step=None), *(rows.where(step=max(rows.values("step"))) for rows in groups)]
        return self._only(np.sort(np.concatenate([part.positions for part in kept])))

    @property
    def positions(self) -> np.ndarray:
        """The indices of its rows in the concatenated tables."""
        return self._rows

    def first(self, count: int) -> Query:
        """The first rows, at most `count`."""
        return self._only(self._rows[:count])

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return (Row(self._columns, int(at)) for at in self._rows)

    def fields(self) -> list[str]:
        """The columns, and the keys of all variants."""
        return [*SCHEMA.names, *frame.variant_keys(self.values("variant"))]

    def column(self, field: str) -> list[Any]:
        """The values of a field, one per row; a missing number is NaN."""
        if field in NUMBERS:
            return self.numbers(field).tolist()
        codes, values = self._columns.coded(field)
        return [values[code] for code in codes[self._rows].tolist()]

    def values(self, field: str) -> list[Any]:
        """The distinct values of a field, in order of appearance."""
        codes, values = self._columns.coded(field)
        here = codes[self._rows]
        first = np.full(len(values), len(here))
        first[here[::-1]] = np.arange(len(here))[::-1]  # the last to be written is the first place
        return [values[code] for code in np.argsort(first, kind="stable")[: int((first < len(here)).sum())]]

    def numbers(self, column: str = "value") -> np.ndarray:
        """A numeric column as an array; a missing number is NaN."""
        return self._columns.floats(column)[self._rows]

    def groups(self, *by: str) -> dict[Any, Query]:
        """The rows by the values of some fields, in order of appearance; the key is a tuple where there are several."""
        columns = [self._columns.coded(name) for name in by]
        key = np.zeros(len(self._rows), dtype=np.int64)
        for codes, values in columns:
            key = key * len(values) + codes[self._rows]
        order = np.argsort(key, kind="stable")
        starts = np.flatnonzero(np.diff(key[order], prepend=-1))
        parts = sorted(np.split(self._rows[order], starts[1:]), key=lambda rows: int(rows[0])) if len(order) else []
        found = {tuple(values[codes[rows[0]]] for codes, values in columns): self._only(rows) for rows in parts}
        return {key[0]: rows for key, rows in found.items()} if len(by) == 1 else found

    def lines(self, *by: str, along: str | Sequence[str] = "step") -> dict[Any, list[Row]]:
        """The rows of each group, sorted by one or several fields; None comes first."""
        order = (along,) if isinstance(along, str) else tuple(along)
        return {
            key: sorted(rows, key=lambda row: tuple((row[name] is not None, row[name]) for name in order))
            for key, rows in self.groups(*by).items()
        }

    def one(self, **fields: Any) -> Row | None:
        """The only row that matches, or None; several are an error."""
        found = self.where(**fields) if fields else self
        if len(found) > 1:
            raise LookupError(f"{len(found)} rows match {fields}, expected at most one")
        return next(iter(found), None)

    def csv(self, columns: Sequence[str]) -> str:
        """The rows as text with comma-separated values, numbers with nine digits; what is missing is empty."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*(map(_cell, self.column(name)) for name in columns), strict=True))
        return out.getvalue()

    def table(self, about: Mapping[str, Any] | None = None) -> Table:
        """The same rows as a table of their own."""
        return Table(self._columns.arrow.take(pa.array(self._rows)), dict(about or {}))


def _cell(value: Any) -> Any:
    """A value as it is written into CSV."""
    if isinstance(value, float):
        return f"{value:.9g}" if math.isfinite(value) else ""
    return "" if value is None else value


def _matches(word: Any, wanted: Any, field: str) -> bool:
    if wanted is ...:
        return word is not None
    if callable(wanted):
        return bool(wanted(word))
    if isinstance(wanted, list | tuple | set | frozenset):
        return any(_matches(word, one, field) for one in wanted)
    if word is None or wanted is None:
        return word is wanted or (field in COLUMNS and word == "" and wanted is None)
    if field in COLUMNS or not isinstance(word, str):
        return bool(word == wanted)
    return bool(word == str(int(wanted) if isinstance(wanted, bool) else wanted))
