"""`anisoscope serve`: pages of runs in a browser, kept up to date while the runs go on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anisoscope.commands.command import exit_code

Runs = Annotated[
    list[Path] | None, typer.Argument(metavar="[RUN]...", help="Run folders, or folders with runs; default: runs/.")
]
Host = Annotated[str, typer.Option(help="The address to listen on; another than this machine's own is your choice.")]
Port = Annotated[int, typer.Option(help="The port; 0 for any that is free.", min=0, max=65535)]
Names = Annotated[
    str | None, typer.Option(help="Further host names that browsers may use, comma-separated, such as of a proxy.")
]
Open = Annotated[bool, typer.Option("--open", help="Open the page in a browser.")]


def serve(
    runs: Runs = None, host: Host = "127.0.0.1", port: Port = 8642, names: Names = None, open: Open = False
) -> None:
    """Show runs in a browser, also while they go on. The printed link holds a token: give it only to whom you trust."""
    from anisoscope.serve.run import serve_runs

    def ready(link: str, number: int) -> None:
        typer.echo(f"{number} run{'' if number == 1 else 's'}; open {link}")
        typer.echo("Ctrl-C ends the server; runs go on.")
        if open:
            typer.launch(link)

    try:
        serve_runs(runs or [Path("runs")], host=host, port=port, names=(names or "").split(","), ready=ready)
    except KeyboardInterrupt as error:  # the usual way to end it
        raise typer.Exit(exit_code(error)) from None
