"""`anisoscope selftest`."""

from __future__ import annotations

from typing import Annotated

import typer

from anisoscope.commands.command import fail


def selftest(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps.")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the planted data.")] = 0,
) -> None:
    """Run planted and null controls on this machine; PASS or FAIL for each metric."""
    from anisoscope.measurement.selftest import run_selftest
    from anisoscope.view.console import print_control

    failed = 0
    for result in run_selftest(device, seed=seed):
        print_control(result)
        failed += not result.passed
    if failed:
        fail(f"{failed} controls failed on this device; do not trust its numbers, and please report it.", 1)
