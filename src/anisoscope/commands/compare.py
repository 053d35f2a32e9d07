"""`anisoscope compare`."""

from __future__ import annotations

from typing import Annotated

import typer

from anisoscope.commands.command import Format, Metric
from anisoscope.option import distinct


def compare(
    first: Annotated[str, typer.Argument(help="A run folder, or RUN#MODEL.")],
    second: Annotated[str | None, typer.Argument(help="Another one; left out: the two models of the first.")] = None,
    format: Format = "table",
    metric: Metric = None,
) -> None:
    """Differences of two models on the same tokens, with intervals, and CKA between their layers."""
    from anisoscope.measurement import compare as comparison
    from anisoscope.results.folder import readable_runs
    from anisoscope.view.console import print_comparison

    metrics = distinct(metric, "--metric") if metric is not None else ()
    with readable_runs(*filter(None, (first, second))):
        found = comparison.compare(first, second)
    print_comparison(found, form=format, metrics=metrics)
