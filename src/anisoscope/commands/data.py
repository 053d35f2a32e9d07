"""`anisoscope data enwik8`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anisoscope.commands.command import Debug, progress_shown


def enwik8(
    path: Annotated[
        str, typer.Argument(help="The raw file, plain or as .gz or .zip, or 'embedded', the slice that ships.")
    ] = "embedded",
    out: Annotated[Path, typer.Option(help="Folder to make; it is complete or not there.")] = Path("enwik8-clean"),
    limit: Annotated[float | None, typer.Option(help="Megabytes of the raw file to read; default: all.")] = None,
    debug: Debug = False,
) -> None:
    """Clean enwik8 into plain articles, encode them over the 205 symbols, and say what was removed."""
    from anisoscope.data.enwik8 import prepare_enwik8
    from anisoscope.view.console import print_prepared
    from anisoscope.view.terminal.screen import print_note, print_path

    with progress_shown() as tell:
        prepared = prepare_enwik8(path, out, limit=limit, progress=tell)
    if not prepared.made:
        print_note(f"{out} was made of the same before; nothing was done again.", style="yellow")
    print_prepared(prepared.stats)
    print_path(prepared.path)
