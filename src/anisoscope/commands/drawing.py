"""How a table draws itself in a notebook: `Table.plot` and its HTML representation find this module by name."""

from __future__ import annotations

from typing import Any

from anisoscope.metrics.catalogue import registry
from anisoscope.results.table import Table
from anisoscope.view import tables
from anisoscope.view.sections import profiles


def plot_metric(table: Table, metric: str | None = None) -> Any:
    """An interactive figure of one metric (or the main ones) over layers."""
    return profiles.profile_figure(table, metric, catalogue=registry())


def table_html(table: Table) -> str:
    """A compact pivot of layers by main metrics."""
    return tables.table_html(table, catalogue=registry())
