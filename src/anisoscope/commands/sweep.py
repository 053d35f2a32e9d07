"""`anisoscope sweep`, and `anisoscope tangent`, a sweep of one model with gradients."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from anisoscope.commands import plan as plans
from anisoscope.commands.command import Debug, LogTo, Out, Resume, Why, configured, fail, requested
from anisoscope.errors import check_known
from anisoscope.execution.config import ExecutorConfig
from anisoscope.option import Option
from anisoscope.series import SweepConfig

_MODELS = (
    "A folder of checkpoint-N folders or checkpoint files, a hub id with --revisions, or several models in the order "
    "of training."
)
_HERE = ExecutorConfig()


def _series(
    models: Annotated[tuple[str, ...], Option(_MODELS, argument=True, metavar="MODEL...")], **options: Any
) -> SweepConfig:
    return SweepConfig(models[0], others=models[1:], **options)


@configured(SweepConfig, build=_series, without=("model", "random_init"), also={"jobs": ExecutorConfig})
def sweep(
    config: SweepConfig,
    jobs: ExecutorConfig,
    out: Out = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on in --out: with what is not done, and what could not be loaded.")
    ] = False,
    log_to: LogTo = None,
    why: Why = False,
    dry_run: plans.DryRun = False,
    calibration: plans.CalibrationFile = None,
    checkpoints: plans.Count = None,
    json: plans.AsJson = False,
    debug: Debug = False,
) -> None:
    """A series of checkpoints in the order of training; repeated, missing, broken and swapped ones are flagged."""
    chosen = plans.dry(dry_run, calibration=calibration, json=json, checkpoints=checkpoints)
    if chosen is not None:
        _show_plan(config, chosen)
        return
    _measure(config, out=out, resume=resume, why=why, jobs=jobs, log_to=log_to)


def _show_plan(config: SweepConfig, options: plans.DryOptions) -> None:
    from anisoscope.planning.plans import plan_sweep

    make = partial(plan_sweep, config, checkpoints=options.checkpoints)
    plans.show_plan(make, options, device=config.device)


def _measure(
    config: SweepConfig,
    *,
    out: Path | None,
    resume: bool,
    why: bool,
    jobs: ExecutorConfig = _HERE,
    log_to: str | None = None,
) -> None:
    from anisoscope.claims.catalogue import papers
    from anisoscope.commands.pipeline import run_sweep
    from anisoscope.results.query import Query
    from anisoscope.view.console import print_run_end

    kind = "sweep" if config.series else "tangent"
    executor, name = jobs.make(), f"{kind}-{config.model.rstrip('/').split('/')[-1]}"
    with requested(out, name, resume=resume, log_to=log_to) as request:
        run = run_sweep(config, request, executor)
    print_run_end(run.folder, run.page, run.drawing_seconds, papers=papers(), why=why)
    rows = list(Query(run.folder.table()))
    measured = [row for row in rows if row.kind != "training"]  # none of a checkpoint that was flagged
    if not any(math.isfinite(row.value) for row in measured):
        why_not = next((row.note for row in (*measured, *rows) if row.note), "no value is finite")
        fail(f"nothing could be computed: {why_not}. The table has the reasons.", 3)


_OPTIONS = ("model", "data", "tokens", "context", "seconds", "batch_size", "preset", "rank", "draws", "layers")
_ROWS = ("split", "standardised", "first", "special")
_LOADING = ("text_field", "tokenizer", "random_init", "device", "dtype", "seed", "trust_remote_code")
_HELP = {
    "tokens": "Rows to look at (tokens, frames, patches, positions); half to fit on, half to test on.",
    "preset": "light, standard or full.",
    "dtype": "auto, float32, float64, bfloat16.",
}


def _single(**options: Any) -> SweepConfig:
    from anisoscope.tangent.plan import PLANS

    check_known("preset", options.get("preset", "standard"), PLANS)  # the others of a sweep look at no gradients
    return SweepConfig(**options, series=False)


@configured(SweepConfig, build=_single, only=(*_OPTIONS, *_ROWS, *_LOADING), help=_HELP)
def tangent(
    config: SweepConfig,
    out: Out = None,
    resume: Resume = False,
    why: Why = False,
    dry_run: plans.DryRun = False,
    calibration: plans.CalibrationFile = None,
    json: plans.AsJson = False,
    debug: Debug = False,
) -> None:
    """Do tangent directions of one given model hold its gradients? Its own loss gives them."""
    chosen = plans.dry(dry_run, calibration=calibration, json=json)
    if chosen is not None:
        _show_plan(config, chosen)
        return
    _measure(config, out=out, resume=resume, why=why)
