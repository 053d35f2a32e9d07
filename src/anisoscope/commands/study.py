"""`anisoscope study NAME`: one command for each study in `studies.catalogue`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer

from anisoscope.commands import plan as plans
from anisoscope.commands.command import Debug, LogTo, Out, Resume, Why, configured, declared_fields, requested
from anisoscope.errors import AnisoscopeError
from anisoscope.option import was_typed
from anisoscope.studies.catalogue import STUDIES, StudyEntry


def studies() -> dict[str, Callable[..., None]]:
    """The commands of all studies, by name."""
    return {entry.name: _command(entry) for entry in STUDIES.values()}


def _command(entry: StudyEntry) -> Callable[..., None]:
    """The command of one study; with --jobs and --resume only where the study supports them."""

    def run(
        config: Any,
        jobs: Any = None,
        log_to: LogTo = None,
        out: Out = None,
        resume: Resume = False,
        why: Why = False,
        dry_run: plans.DryRun = False,
        calibration: plans.CalibrationFile = None,
        json: plans.AsJson = False,
        debug: Debug = False,
    ) -> None:
        from anisoscope.claims.catalogue import papers
        from anisoscope.commands.drawing import study_summary
        from anisoscope.commands.pipeline import run_study
        from anisoscope.training.gpu_sharing import share_gpu
        from anisoscope.view.console import print_run_end

        if getattr(config, "measures_published", False):
            _refuse_unused(config)
        chosen = plans.dry(dry_run, calibration=calibration, json=json)
        if chosen is not None:
            from anisoscope.planning.study_plans import plan_study

            make = partial(plan_study, entry.name, config, jobs=jobs)
            plans.show_plan(make, chosen, device=getattr(config, "device", "cpu"))
            return
        if entry.jobs_help:  # it trains arms, on a GPU side by side
            share_gpu(getattr(config, "device", "cpu"))
        preset = getattr(config, "preset", "")
        name = f"{entry.name}-{preset}" if preset else entry.name
        with requested(out, name, resume=resume, log_to=log_to) as request:
            done = run_study(entry, config, request, **({"jobs": jobs} if entry.jobs_help else {}))
        shown: dict[str, Any] = {"summary": study_summary(done.folder, entry.name), "papers": papers(), "why": why}
        print_run_end(done.folder, done.page, done.drawing_seconds, **shown)

    run.__annotations__["jobs"] = Annotated[int | None, typer.Option(help=entry.jobs_help, min=1)]
    run.__doc__ = entry.help
    supported = (("jobs", entry.jobs_help), ("log_to", entry.parallel), ("resume", entry.resumes))
    unsupported = [name for name, has in supported if not has]
    return configured(entry.config, build=entry.build, without=unsupported)(run)


def _refuse_unused(config: Any) -> None:
    """Raise if an option was typed that has no effect with the chosen preset."""
    paper = config.preset == "paper"
    unused = [f for f in declared_fields(type(config)).values() if f.option.preset == ("trained" if paper else "paper")]
    options = {field.name: field.flag for field in unused} | ({"jobs": "--jobs", "log_to": "--log-to"} if paper else {})
    if typed := [flag for name, flag in options.items() if was_typed(name)]:
        where = "the presets that train, tiny and small" if paper else "--preset paper"
        raise AnisoscopeError(f"{typed[0]} belongs to {where}; leave it out, or take another preset.")
