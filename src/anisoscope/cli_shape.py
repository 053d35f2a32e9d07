"""`anisoscope study shape`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from anisoscope.cli import _listed, _seeds
from anisoscope.cli_learning import (
    Contexts,
    Data,
    Debug,
    Device,
    Limit,
    Models,
    Out,
    RemoveDownloads,
    Resume,
    Updates,
    When,
    _begin,
    study,
)
from anisoscope.errors import AnisoscopeError

PAPER = ("tokens", "models", "remove_downloads")  # what is measured there is not trained here
_TRAINED = ("arms", "sizes", "seeds", "steps", "context", "limit", "when", "contexts", "jobs")


@study.command("shape")
def shape(
    ctx: typer.Context,
    preset: Annotated[str, typer.Option(help="tiny (2 cores, minutes), small (one GPU), paper (hub models).")] = "tiny",
    data: Data = "embedded",
    arms: Annotated[str | None, typer.Option(help="causal-next, causal-masked, bidirectional-masked.")] = None,
    sizes: Annotated[str | None, typer.Option(help="Layers x width, such as 6x256,12x512.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds of every size, such as 0,1,2.")] = None,
    steps: Updates = None,
    context: Annotated[int | None, typer.Option(help="Tokens of a context.", min=4)] = None,
    limit: Limit = None,
    when: When = None,
    contexts: Contexts = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            help="Arms trained at the same time, each in a process of its own; default: 3 in tiny, else 1.", min=1
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of each model's probe (paper).", min=64)] = 65_536,
    models: Models = None,
    remove_downloads: RemoveDownloads = False,
    device: Device = "auto",
    out: Out = None,
    resume: Resume = False,
    debug: Debug = False,
) -> None:
    """The Shape of Learning: what the mask and the objective do to profiles over depth and training."""
    command = _begin(debug)
    refuse_idle(ctx, _TRAINED if preset == "paper" else PAPER, paper=preset == "paper")
    from anisoscope.view.console_shape import run_shape

    options: dict[str, Any] = {"preset": preset, "data": data, "steps": steps, "context": context, "limit": limit}
    options |= {"when": when, "contexts": contexts, "device": device, "tokens": tokens}
    options["remove_downloads"] = remove_downloads
    options |= _lists(arms=arms, sizes=sizes, models=models)
    if seeds is not None:
        options["seeds"] = _seeds(seeds)
    run_shape(options, jobs=jobs, out=out, resume=resume, command=command)


def _lists(**given: str | None) -> dict[str, tuple[str, ...]]:
    """Words of the options that were given; one that is named twice stays twice, and is refused later."""
    return {name: _listed(text, f"--{name}") for name, text in given.items() if text is not None}


def refuse_idle(ctx: typer.Context, names: Sequence[str], *, paper: bool) -> None:
    """Options that would do nothing in the preset that was asked for."""
    for name in names:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            where = "the presets that train, tiny and small" if paper else "--preset paper"
            raise AnisoscopeError(f"{option} belongs to {where}; leave it out, or take another preset.")
