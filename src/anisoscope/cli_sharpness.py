"""`anisoscope study sharpness`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from anisoscope.cli import _seeds
from anisoscope.cli_learning import (
    Contexts,
    Data,
    Debug,
    Device,
    Limit,
    Out,
    Resume,
    Updates,
    When,
    _begin,
    study,
)
from anisoscope.cli_shape import _lists


@study.command("sharpness")
def sharpness(
    preset: Annotated[str, typer.Option(help="tiny (2 cores, minutes) or small (one GPU).")] = "tiny",
    data: Data = "embedded",
    arms: Annotated[
        str | None, typer.Option(help="softmax, qk-norm, mean-removed, fixed-sharp, uniform; default: all.")
    ] = None,
    sizes: Annotated[str | None, typer.Option(help="Layers x width, such as 3x64,6x256.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds such as 0,1,2; general claims need three.")] = None,
    steps: Updates = None,
    context: Annotated[int | None, typer.Option(help="Tokens of a context.", min=4)] = None,
    limit: Limit = None,
    when: When = None,
    contexts: Contexts = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            help="Arms trained at the same time, each in a process of its own; default: 2 in tiny, 4 in small.", min=1
        ),
    ] = None,
    device: Device = "auto",
    out: Out = None,
    resume: Resume = False,
    debug: Debug = False,
) -> None:
    """Does anisotropy need queries and keys that drift, and does sharp attention? Five kinds of attention compared."""
    command = _begin(debug)
    from anisoscope.view.console_sharpness import run_sharpness

    options: dict[str, Any] = {"preset": preset, "data": data, "steps": steps, "context": context, "limit": limit}
    options |= {"when": when, "contexts": contexts, "device": device}
    options |= _lists(arms=arms, sizes=sizes)
    if seeds is not None:
        options["seeds"] = _seeds(seeds)
    run_sharpness(options, jobs=jobs, out=out, resume=resume, command=command)
