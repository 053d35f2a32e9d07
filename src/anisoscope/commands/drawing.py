"""Tables drawn with the declared titles of their metrics: the public functions of `anisoscope.view`, and `Table.plot`.

The view itself knows no metric; here it is given their declarations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from anisoscope.metrics.catalogue import registry
from anisoscope.results.table import Table
from anisoscope.view import console
from anisoscope.view.sections import profiles

if TYPE_CHECKING:
    from rich.table import Table as RichTable


def profile_figure(table: Table, metric: str | None = None, *, catalogue: Mapping[str, Any] | None = None) -> Any:
    """An interactive figure of one metric (or the main ones) over layers."""
    return profiles.profile_figure(table, metric, catalogue=registry() if catalogue is None else catalogue)


def table_html(table: Table, *, catalogue: Mapping[str, Any] | None = None) -> str:
    """A compact pivot of layers by main metrics."""
    return console.table_html(table, catalogue=registry() if catalogue is None else catalogue)


def short_table(table: Table, *, catalogue: Mapping[str, Any] | None = None) -> RichTable:
    """What the terminal shows at the end of a run: a row per layer, or per model where that would be too long."""
    return console.short_table(table, catalogue=registry() if catalogue is None else catalogue)
