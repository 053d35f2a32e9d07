"""Which rows of a table are read, and of which the leave-one-fold-out values, while something is made of it.

Rows are known again by a number in their column `schema`, which nobody else reads, also in tables made of this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa

from anisoscope.results.query import SCHEMA, Query, Table
from anisoscope.results.row import NUMBERS, TableColumns
from anisoscope.view.sections import provenance


@dataclass
class Reading:
    """The rows that were read, by their numbers; True in an array for each."""

    size: int
    rows: np.ndarray = field(init=False)
    folds: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.rows, self.folds = (np.zeros(self.size, dtype=bool) for _ in range(2))

    def note(self, columns: TableColumns, at: Any, *, folds: bool = False) -> None:
        """Rows of some columns were read."""
        numbers = columns.floats("schema")[at].astype(np.int64)
        self.rows[numbers] = True
        if folds:
            self.folds[numbers] = True


def numbered(table: Table) -> Table:
    """The table with the number of each row in the column `schema`."""
    numbers = pa.array(np.arange(len(table)), pa.int32())
    return Table(table.arrow.set_column(0, SCHEMA.field("schema"), numbers), table.about)


@contextmanager
def reading(size: int) -> Iterator[Reading]:
    """Notes which rows of a numbered table are read until the end of the block; downloads and counts are no reading."""
    seen, quiet = Reading(size), [False]
    value, folds = TableColumns.value, TableColumns.folds

    def value_read(self: TableColumns, name: str, at: int) -> Any:
        if name in NUMBERS and name != "depth" and not quiet[0]:
            seen.note(self, at)
        return value(self, name, at)

    def folds_read(self: TableColumns, at: int) -> Any:
        seen.note(self, at, folds=True)
        return folds(self, at)

    def many_read(old: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: Query, name: str = "value") -> Any:
            if name in NUMBERS and not quiet[0]:
                seen.note(self._columns, self.positions)
            return old(self, name)

        return read

    def unnoticed(old: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **options: Any) -> Any:
            quiet[0] = True
            try:
                return old(*arguments, **options)
            finally:
                quiet[0] = False

        return made

    with (
        patch.object(TableColumns, "value", value_read),
        patch.object(TableColumns, "folds", folds_read),
        patch.object(Query, "numbers", many_read(Query.numbers)),
        patch.object(Query, "column", many_read(Query.column)),
        patch.object(Query, "csv", unnoticed(Query.csv)),
        patch.object(provenance, "notes_of", unnoticed(provenance.notes_of)),
    ):
        yield seen
