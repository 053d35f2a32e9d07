"""The columns of the table (`SCHEMA`), made and read; one row of it (`Row`), and lines of rows along steps.

A line is a sequence of rows: here are means of lines over seeds, their ends, ratios, ranges and gaps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from anisoscope.errors import AnisoscopeError
from anisoscope.results.frame import options_of
from anisoscope.results.quantity import Quantity, halved

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
COLUMNS = frozenset(SCHEMA.names)
NUMBERS = frozenset(f.name for f in SCHEMA if pa.types.is_floating(f.type))


class Row:
    """One row of the table; its fields are attributes, `row["proxy"]` reads a variant key or a column."""

    __slots__ = ("_at", "_columns", "_quantity")

    def __init__(self, columns: TableColumns, at: int) -> None:
        self._columns, self._at = columns, at
        self._quantity: Quantity | None = None

    def __getattr__(self, name: str) -> Any:
        if name not in COLUMNS:
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

    def __init__(self, columns: TableColumns, at: int, half: int) -> None:
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


class TableColumns:
    """The columns of one or several tables, decoded at first use."""

    def __init__(self, arrow: Sequence[pa.Table]) -> None:
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
        if field in COLUMNS:
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
        if name in NUMBERS:
            return float(self.floats(name)[at])
        codes, values = self.coded(name)
        return values[codes[at]]

    def field(self, name: str, at: int) -> Any:
        if name in COLUMNS or name in self.tags:
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


# -- lines of rows -----------------------------------------------------------------------------------------------------


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


# -- columns made of values and read from a file, with errors that name what does not fit ------------------------------


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
