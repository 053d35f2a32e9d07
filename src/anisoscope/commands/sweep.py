"""`anisoscope sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from anisoscope.commands.signature import Debug, Out, configured
from anisoscope.commands.terminal import command_line, under_way
from anisoscope.option import Option
from anisoscope.series import SweepConfig

_MODELS = (
    "A folder of checkpoint-N folders or checkpoint files, a hub id with --revisions, or several models in the order "
    "of training."
)


def _series(
    models: Annotated[tuple[str, ...], Option(_MODELS, argument=True, metavar="MODEL...")], **options: Any
) -> SweepConfig:
    return SweepConfig(models[0], others=models[1:], **options)


@configured(SweepConfig, build=_series, without=("model", "random_init"))
def sweep(
    config: SweepConfig,
    out: Out = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on in --out: with what is not done, and what could not be loaded.")
    ] = False,
    debug: Debug = False,
) -> None:
    """A series of checkpoints in the order of training; repeated, missing, broken and swapped ones are flagged."""
    measure(config, out=out, resume=resume)


def measure(config: SweepConfig, *, out: Path | None, resume: bool) -> None:
    """Carry out a sweep, or a tangent study, which is a sweep of one model."""
    from anisoscope.commands.pipeline import RunRequest, run_path, run_sweep
    from anisoscope.view.console import print_note, print_run_end

    kind = "sweep" if config.series else "tangent"
    path = run_path(out, f"{kind}-{config.model.rstrip('/').split('/')[-1]}", resume=resume)
    with under_way() as tell:
        run = run_sweep(config, RunRequest(path, resume, command_line(), tell, print_note))
    print_run_end(run.folder, run.page, run.drawing_seconds)
