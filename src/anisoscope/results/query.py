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
fields added by `tagged`. A field that a row does not have is None, and selecting `None` selects such rows. Variant
strings are parsed only in this module.
"""

from __future__ import annotations

import csv
import importlib
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from anisoscope.errors import unknown_name
from anisoscope.results.columns import NotOneRow, column_of, read_columns
from anisoscope.results.privacy import placeless_columns
from anisoscope.results.quantity import Quantity, halved, refuse_infinite

if TYPE_CHECKING:
    import pandas as pd

DRAWING = "anisoscope.commands.drawing"  # the module that draws tables, imported when the first one is drawn
SCHEMA_VERSION = 1
FIRST_OUTLIER = "the first position is an outlier here"  # note of rows with first=out
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
_COLUMNS = frozenset(SCHEMA.names)
_NUMBERS = frozenset(f.name for f in SCHEMA if pa.types.is_floating(f.type))


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
        return cls(current_names(read_columns(path, SCHEMA)))

    def write(self, path: str | Path) -> None:
        pq.write_table(self.arrow, path)

    @classmethod
    def concat(cls, tables: Iterable[Table], about: dict[str, Any] | None = None) -> Table:
        """All rows in order; `about` is by default that of a single table and empty for several or none."""
        tables = list(tables)
        arrow = pa.concat_tables([table.arrow for table in tables]) if tables else SCHEMA.empty_table()
        return cls(arrow, about if about is not None else tables[0].about if len(tables) == 1 else {})

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
        for name, value in fields.items():
            if name not in known and value is not None:  # None: rows without that variant key, here all of them
                raise unknown_name("column", name, known)
        return query.where(**fields).table(self.about) if fields else self

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


FORMER = {("gradient_alignment", "rows=batch"): "gradient_cosine"}  # names of metrics in older tables


def current_names(arrow: pa.Table) -> pa.Table:
    """A table, or some of its columns with metric and variant, with the current names of its metrics."""
    for (metric, variant), name in FORMER.items():
        old = pc.and_(pc.equal(arrow["metric"], metric), pc.equal(arrow["variant"], variant))
        if pc.any(old).as_py():
            place = arrow.column_names.index("metric")
            arrow = arrow.set_column(place, SCHEMA.field("metric"), pc.if_else(old, name, arrow["metric"]))
    return arrow


@lru_cache(maxsize=65536)
def options_of(variant: str) -> Mapping[str, str]:
    """The options of a variant.

    >>> dict(options_of("fit=refit;rank=16"))
    {'fit': 'refit', 'rank': '16'}
    """
    return {key: value for key, _, value in (part.partition("=") for part in variant.split(";") if part)}


def variant_name(options: Mapping[str, Any]) -> str:
    """A canonical string of options.

    >>> variant_name({"first": "out", "centred": True})
    'centred=1;first=out'
    """
    plain = {k: int(v) if isinstance(v, bool) else v for k, v in options.items()}
    return ";".join(f"{key}={plain[key]}" for key in sorted(plain))


def with_options(variant: str, **changes: Any) -> str:
    """A variant with some keys set, or taken out where the value is None.

    >>> with_options("control=next;rank=4", control=None, fit="refit")
    'fit=refit;rank=4'
    """
    merged = {**options_of(variant), **changes}
    return variant_name({key: value for key, value in merged.items() if value is not None})


class Row:
    """One row of the table; its fields are attributes, `row["proxy"]` reads a variant key or a column."""

    __slots__ = ("_at", "_columns", "_quantity")

    def __init__(self, columns: _Columns, at: int) -> None:
        self._columns, self._at = columns, at
        self._quantity: Quantity | None = None

    def __getattr__(self, name: str) -> Any:
        if name not in _COLUMNS:
            raise AttributeError(name)
        return self._columns.value(name, self._at)

    def __getitem__(self, field: str) -> Any:
        return self._columns.field(field, self._at)

    @property
    def options(self) -> Mapping[str, str]:
        return options_of(self.variant)

    @property
    def source(self) -> int:
        """The index of the row's table in the query."""
        return int(self._columns.sources[self._at])

    @property
    def known(self) -> bool:
        """Whether the value is a number."""
        return math.isfinite(self.value)

    @property
    def interval(self) -> tuple[float, float] | None:
        low, high = self.low, self.high
        return (low, high) if math.isfinite(low) and math.isfinite(high) else None

    @property
    def folds(self) -> tuple[float, ...]:
        return self._columns.folds(self._at)

    @property
    def quantity(self) -> Quantity:
        """The value with its leave-one-fold-out values, for means and differences with intervals."""
        if self._quantity is None:
            self._quantity = Quantity(self.value, self.folds, (self.high - self.low) / 2)
        return self._quantity

    @property
    def whole(self) -> float:
        """The value on all contexts."""
        return float(self._columns.value("value", self._at))

    def on_half(self, half: int) -> Row:
        """The row on one half of the folds, 1 or 2 (see `halved`); unchanged where it has no folds."""
        return HalfRow(self._columns, self._at, half) if self.folds else self

    def record(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SCHEMA.names if name != "replicates"}

    def __repr__(self) -> str:
        place = ", ".join(f"{name}={getattr(self, name)!r}" for name in ("model", "step", "layer", "kind", "variant"))
        return f"Row({self.metric} {self.value:.4g}, {place})"


class HalfRow(Row):
    """A row on one half of the folds: its value, interval and folds are those of the half."""

    __slots__ = ("_half",)

    def __init__(self, columns: _Columns, at: int, half: int) -> None:
        super().__init__(columns, at)
        self._half = half

    @property
    def quantity(self) -> Quantity:
        if self._quantity is None:
            self._quantity = halved(Quantity(self.whole, self._columns.folds(self._at)), self._half)
        return self._quantity

    @property
    def value(self) -> float:
        return self.quantity.value

    @property
    def folds(self) -> tuple[float, ...]:
        return self.quantity.folds

    @property
    def low(self) -> float:
        return self.quantity.interval()[0]

    @property
    def high(self) -> float:
        return self.quantity.interval()[1]


class _Columns:
    """The columns of one or several tables, decoded at first use."""

    def __init__(self, tables: Sequence[Table]) -> None:
        arrow = [t.arrow for t in tables]
        self.arrow = pa.concat_tables(arrow).combine_chunks() if arrow else SCHEMA.empty_table()
        self.sources = np.repeat(np.arange(len(arrow)), [t.num_rows for t in arrow])
        self._codes: dict[str, tuple[np.ndarray, list[Any]]] = {}
        self.tags: set[str] = set()
        self.tag("source", self.sources, list(range(len(arrow))) or [0])
        self._floats: dict[str, np.ndarray] = {}

    def tag(self, name: str, codes: np.ndarray, values: list[Any]) -> None:
        """Add a computed field: row i has values[codes[i]]."""
        self.tags.add(name)
        self._codes[name] = (np.asarray(codes, dtype=np.int64), values)

    def coded(self, field: str) -> tuple[np.ndarray, list[Any]]:
        """A field as (codes, distinct values): row i has values[codes[i]]."""
        if field in self._codes:
            return self._codes[field]
        if field in _COLUMNS:
            column = self.arrow[field]
            if pa.types.is_string(column.type):
                column = pc.fill_null(column, "")
            encoded = column.combine_chunks().dictionary_encode(null_encoding="encode")
            if isinstance(encoded, pa.ChunkedArray):
                encoded = encoded.combine_chunks()
            self._codes[field] = np.asarray(encoded.indices, dtype=np.int64), encoded.dictionary.to_pylist()
        else:
            codes, variants = self.coded("variant")
            by_variant = [options_of(variant).get(field) for variant in variants]
            number = {value: i for i, value in enumerate(dict.fromkeys(by_variant))}
            self._codes[field] = np.array([number[value] for value in by_variant], dtype=np.int64)[codes], list(number)
        return self._codes[field]

    def floats(self, name: str) -> np.ndarray:
        if name not in self._floats:
            self._floats[name] = np.asarray(pc.fill_null(pc.cast(self.arrow[name], pa.float64(), safe=False), math.nan))
        return self._floats[name]

    def value(self, name: str, at: int) -> Any:
        if name in _NUMBERS:
            return float(self.floats(name)[at])
        codes, values = self.coded(name)
        return values[codes[at]]

    def field(self, name: str, at: int) -> Any:
        if name in _COLUMNS or name in self.tags:
            return self.value(name, at)
        return options_of(self.value("variant", at)).get(name)

    @cached_property
    def _replicates(self) -> tuple[np.ndarray, np.ndarray]:
        column = self.arrow["replicates"]
        lengths = np.asarray(pc.fill_null(pc.list_value_length(column), 0), dtype=np.int64)
        return np.asarray(pc.fill_null(pc.list_flatten(column), math.nan)), np.concatenate([[0], np.cumsum(lengths)])

    def folds(self, at: int) -> tuple[float, ...]:
        flat, offsets = self._replicates
        return tuple(flat[offsets[at] : offsets[at + 1]].tolist())


class Query:
    """A selection of the rows of one or several tables; `where` narrows it without copying."""

    def __init__(self, *tables: Table, _columns: _Columns | None = None, _rows: np.ndarray | None = None) -> None:
        self._columns = _columns or _Columns(tables)
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
        keys = {key for variant in self.values("variant") for key in options_of(variant)}
        return [*SCHEMA.names, *sorted(keys)]

    def column(self, field: str) -> list[Any]:
        """The values of a field, one per row; a missing number is NaN."""
        if field in _NUMBERS:
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
        for row in self:
            values = [getattr(row, name) for name in columns]
            missing = [v is None or (isinstance(v, float) and not math.isfinite(v)) for v in values]
            plain = [f"{v:.9g}" if isinstance(v, float) else v for v in values]
            writer.writerow(["" if gone else v for v, gone in zip(plain, missing, strict=True)])
        return out.getvalue()

    def table(self, about: Mapping[str, Any] | None = None) -> Table:
        """The same rows as a table of their own."""
        return Table(self._columns.arrow.take(pa.array(self._rows)), dict(about or {}))


def _matches(word: Any, wanted: Any, field: str) -> bool:
    if wanted is ...:
        return word is not None
    if callable(wanted):
        return bool(wanted(word))
    if isinstance(wanted, list | tuple | set | frozenset):
        return any(_matches(word, one, field) for one in wanted)
    if word is None or wanted is None:
        return word is wanted or (field in _COLUMNS and word == "" and wanted is None)
    if field in _COLUMNS or not isinstance(word, str):
        return bool(word == wanted)
    return bool(word == str(int(wanted) if isinstance(wanted, bool) else wanted))


def pairs(one: Iterable[Row], two: Iterable[Row], *by: str) -> dict[Any, tuple[Row, Row]]:
    """Pairs of rows from two series with equal values of some fields, for differences of runs, controls or variants."""
    other = {tuple(row[name] for name in by): row for row in two}
    return {key: (row, other[key]) for row in one if (key := tuple(row[name] for name in by)) in other}


class StepMean(NamedTuple):
    """The mean of several rows, such as seeds, at one step; the interval is their range."""

    step: int | None
    value: float
    low: float = math.nan
    high: float = math.nan
    sd: float = math.nan

    @property
    def known(self) -> bool:
        return math.isfinite(self.value)


def step_mean(step: int | None, rows: Sequence[Any]) -> StepMean:
    values, spreads = [row.value for row in rows], [row.sd for row in rows if math.isfinite(row.sd)]
    low, high = (min(values), max(values)) if len(values) > 1 else (math.nan, math.nan)
    return StepMean(step, fmean(values), low, high, fmean(spreads) if spreads else math.nan)


def seeds_mean(lines: Sequence[Sequence[Any]]) -> Sequence[Any]:
    """A single line unchanged; for several the mean at each step."""
    if len(lines) == 1:
        return lines[0]
    steps: dict[Any, list[Any]] = {}
    for row in (row for line in lines for row in line if row.known):
        steps.setdefault(row.step, []).append(row)
    return [step_mean(step, steps[step]) for step in sorted(steps)]


def last_mean(lines: Iterable[Sequence[Any]]) -> float | None:
    """The mean over several lines, such as those of all blocks, at the last step that any of them has."""
    ends = [rows[-1] for line in lines if (rows := [row for row in line if row.known])]
    last = max((row.step for row in ends), default=None)
    return fmean(row.value for row in ends if row.step == last) if ends else None


def median_ratio(pairs: Iterable[tuple[Sequence[Any], Sequence[Any]]]) -> float | None:
    """The median over steps of the ratio of two lines; None if no step has both."""
    ratios: list[float] = []
    for above, below in pairs:
        numerators = {row.step: row.value for row in above}
        ratios += [
            numerators[row.step] / row.value for row in below if row.known and row.value and numerators.get(row.step)
        ]
    return median(ratios) if ratios else None


def envelope(lines: Iterable[Sequence[Row]]) -> dict[int, tuple[float, float]]:
    """The lowest and the highest end of the intervals of several lines, by step in order."""
    ends: dict[int, list[float]] = {}
    for row in (row for line in lines for row in line if row.interval):
        ends.setdefault(row.step or 0, []).extend((row.low, row.high))
    return {step: (min(ends[step]), max(ends[step])) for step in sorted(ends)}


def largest_gap(line: Iterable[Row], other: Iterable[Row]) -> float | None:
    """The largest difference of two lines at the steps that both have."""
    values = {row.step: row.value for row in other if row.known}
    return max((abs(row.value - values[row.step]) for row in line if row.known and row.step in values), default=None)
