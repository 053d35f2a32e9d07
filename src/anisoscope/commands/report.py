"""`anisoscope report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    out: Annotated[
        Path | None, typer.Option(help="A folder or an .html file; default: the run, of several a folder beside them.")
    ] = None,
) -> None:
    """Make the report of one or several runs again."""
    from anisoscope.commands.drawing import report_runs
    from anisoscope.results.folder import readable_runs

    with readable_runs(*runs):
        typer.echo(str(report_runs(runs, out)))
