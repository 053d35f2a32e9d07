"""`anisoscope train`."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from anisoscope.commands import plan as plans
from anisoscope.commands.command import Debug, LogTo, Out, Resume, Why, configured, requested
from anisoscope.errors import AnisoscopeError
from anisoscope.option import numbers, refuse_typed, was_typed
from anisoscope.training.config import TrainConfig, last_step

_WATCHED = (  # options of the monitor
    *("when", "contexts", "every_step", "weighted_gradients", "skip_first", "skip_special", "standardised"),
    *("rank", "frozen_window", "split", "log_to"),
)


@configured(TrainConfig, first=("arch", "family", "objective", "attention", "data", "steps", "layers", "width"))
def train(
    config: TrainConfig,
    monitor: Annotated[
        str, typer.Option(help="What is measured on the way: none, light, standard, full, or metrics.")
    ] = "standard",
    when: Annotated[str, typer.Option(help="When: log, log:COUNT, every:N, or steps such as 0,10,100.")] = "log",
    contexts: Annotated[int, typer.Option(help="Held-out contexts that are looked at.")] = 96,
    every_step: Annotated[
        bool, typer.Option("--every-step", help="Moments of activations and gradients at all steps, too.")
    ] = False,
    weighted_gradients: Annotated[
        bool,
        typer.Option(
            "--weighted-gradients", help="Look at gradients of the loss with --target-weights, not of the plain one."
        ),
    ] = False,
    skip_first: Annotated[
        bool, typer.Option("--skip-first", help="Leave the first position out of all measurements.")
    ] = False,
    skip_special: Annotated[
        bool, typer.Option("--skip-special", help="Leave special tokens out of all measurements.")
    ] = False,
    standardised: Annotated[
        bool, typer.Option("--standardised", help="Energies also in standardised coordinates, with light too.")
    ] = False,
    rank: Annotated[
        int | None, typer.Option(help="Directions of the tangent proxy; default: 16, at most a quarter of d.")
    ] = None,
    frozen_window: Annotated[
        str | None, typer.Option(help="What the frozen proxy is fitted on: checkpoints:0.3 (default), or steps:0.3.")
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Energies also for other splits of the contexts to fit and to test: 1,2.")
    ] = None,
    log_to: LogTo = None,
    out: Out = None,
    resume: Resume = False,
    why: Why = False,
    dry_run: plans.DryRun = False,
    calibration: plans.CalibrationFile = None,
    json: plans.AsJson = False,
    debug: Debug = False,
) -> None:
    """Train a small encoder or decoder from scratch, measured while it learns; ends with a report."""
    from anisoscope.claims.catalogue import papers
    from anisoscope.commands.pipeline import run_train
    from anisoscope.training.gpu_sharing import share_gpu
    from anisoscope.view.console import print_run_end
    from anisoscope.view.terminal.screen import print_path

    if was_typed("checkpoints") and (late := last_step(config.checkpoints)) > config.steps:
        raise AnisoscopeError(
            f"--checkpoints names step {late}, after the last of {config.steps} updates; leave it out."
        )
    if monitor == "none":
        refuse_typed(filter(was_typed, _WATCHED), "with --monitor none, which measures nothing")
    watch: dict[str, Any] = {"monitor": monitor, "when": when, "contexts": contexts, "rank": rank}
    watch |= {"split": numbers(int, "1,2")(split, "--split")} if split is not None else {}
    watch |= {"every_step": True} if every_step else {}  # --resume compares these options with run.json
    watch |= {"frozen_window": frozen_window} if frozen_window is not None else {}
    flags = {"weighted_gradients": weighted_gradients, "standardised": standardised}
    flags |= {"skip_first": skip_first, "skip_special": skip_special}
    watch |= {name: True for name, flag in flags.items() if flag}
    chosen = plans.dry(dry_run, calibration=calibration, json=json)
    if chosen is not None:
        from anisoscope.planning.plans import plan_train
        from anisoscope.studies.config import check_watch

        check_watch(watch, config)
        plans.show_plan(partial(plan_train, config, watch), chosen, device=config.device)
        return
    if monitor != "none" and config.background is not False:
        share_gpu(config.device)
    with requested(out, f"train-{config.arm}", resume=resume, log_to=log_to) as request:
        run = run_train(config, watch, request)
    if run.page is None:
        print_path(run.folder.path)
    else:
        print_run_end(run.folder, run.page, run.drawing_seconds, papers=papers(), why=why)
