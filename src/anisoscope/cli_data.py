"""The commands that prepare data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anisoscope.cli import _DEBUG, app

data = typer.Typer(
    name="data",
    help="Prepare data: enwik8, cleaned and over its 205 symbols.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(data)


@data.callback()
def _group() -> None:
    """Prepare data: enwik8, cleaned and over its 205 symbols."""


@data.command("enwik8")
def enwik8(
    path: Annotated[
        str, typer.Argument(help="The raw file, plain or as .gz or .zip, or 'embedded', the slice that ships.")
    ] = "embedded",
    out: Annotated[Path, typer.Option(help="Folder to make; it is complete or not there.")] = Path("enwik8-clean"),
    limit: Annotated[float | None, typer.Option(help="Megabytes of the raw file to read; default: all.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Clean enwik8 into plain articles, encode them over the 205 symbols, and say what was removed."""
    _DEBUG["on"] = _DEBUG["on"] or debug
    from anisoscope.view.console_data import run_enwik8

    run_enwik8(path, out=out, limit=limit)
