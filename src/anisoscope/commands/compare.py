"""`anisoscope compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anisoscope.commands.command import Format, Metric
from anisoscope.option import distinct


def compare(
    first: Annotated[str, typer.Argument(help="A run folder, or RUN#MODEL.")],
    second: Annotated[str | None, typer.Argument(help="Another one; left out: the two models of the first.")] = None,
    format: Format = "table",
    metric: Metric = None,
    out: Annotated[
        Path | None, typer.Option(help="Page: a folder or an .html file; default: a folder beside the first run.")
    ] = None,
) -> None:
    """Differences of two models on the same tokens, with intervals, and CKA between their layers; and their page."""
    from anisoscope.commands.drawing import write_compared
    from anisoscope.measurement import compare as comparison
    from anisoscope.results.folder import readable_runs
    from anisoscope.view.console import print_comparison, print_line

    metrics = distinct(metric, "--metric") if metric is not None else ()
    with readable_runs(*filter(None, (first, second))):
        found = comparison.compare(first, second)
    print_comparison(found, form=format, metrics=metrics)
    try:
        told = str(write_compared(found, [word.partition("#")[0] for word in filter(None, (first, second))], out))
    except OSError as error:
        if out is not None:
            raise
        told = f"no page was written ({error.strerror}); --out names another place"
    print_line(told, error=format != "table")
