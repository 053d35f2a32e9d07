"""`anisoscope show`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anisoscope.commands.command import Format, Metric
from anisoscope.errors import AnisoscopeError
from anisoscope.option import distinct


def show(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    format: Format = "table",
    metric: Metric = None,
    kind: Annotated[str | None, typer.Option(help="Only these sites, comma-separated.")] = None,
    heads: Annotated[bool, typer.Option("--heads", help="Rows of single heads, too (table).")] = False,
) -> None:
    """Print the long table of a run."""
    from anisoscope.results.folder import RunFolder
    from anisoscope.view.console import print_run

    wanted = {"metric": distinct(metric, "--metric") if metric is not None else ()}
    wanted["kind"] = distinct(kind, "--kind") if kind is not None else ()
    folder = RunFolder.open(run)
    if heads and format != "table":
        raise AnisoscopeError(f"--heads does nothing with --format {format}, which has all rows; leave it out.")
    table = folder.table()
    print_run(table, table.about, form=format, wanted=wanted, heads=heads)
