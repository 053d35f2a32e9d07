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
    share: Annotated[
        bool,
        typer.Option(
            "--share", help="A folder to give away (default: RUN-share): page, figures, table, record; no path in it."
        ),
    ] = False,
) -> None:
    """Make the report of one or several runs again."""
    from anisoscope.commands.drawing import report_runs, share_runs
    from anisoscope.results.folder import readable_runs
    from anisoscope.view.console import print_state
    from anisoscope.view.terminal.screen import print_path

    with readable_runs(*runs):
        for run in runs if all((run / "run.json").is_file() for run in runs) else ():
            print_state(run, name=len(runs) > 1)
        print_path(share_runs(runs, out) if share else report_runs(runs, out))
