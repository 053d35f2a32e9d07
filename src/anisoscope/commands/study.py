"""`anisoscope study NAME`: a command for each row of the catalogue of studies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from anisoscope.commands.command import Debug, Out, Resume, configured, declared_fields, requested
from anisoscope.errors import AnisoscopeError
from anisoscope.studies.catalogue import STUDIES, StudyEntry


def studies() -> dict[str, Callable[..., None]]:
    """The commands of all studies, by name."""
    return {entry.name: _command(entry) for entry in STUDIES.values()}


def _command(entry: StudyEntry) -> Callable[..., None]:
    """The command of one study; --jobs and --resume where it has them."""

    def run(
        config: Any, ctx: typer.Context, jobs: Any = None, out: Out = None, resume: Resume = False, debug: Debug = False
    ) -> None:
        from anisoscope.commands.page import study_summary
        from anisoscope.commands.pipeline import run_study
        from anisoscope.view.console import print_run_end

        if entry.jobs_help:
            _refuse_idle(ctx, config)
        preset = getattr(config, "preset", "")
        with requested(out, f"{entry.name}-{preset}" if preset else entry.name, resume=resume) as request:
            done = run_study(entry, config, request, **({"jobs": jobs} if entry.jobs_help else {}))
        print_run_end(done.folder, done.page, done.drawing_seconds, summary=study_summary(done.folder, entry.name))

    run.__annotations__["jobs"] = Annotated[int | None, typer.Option(help=entry.jobs_help, min=1)]
    run.__doc__ = entry.help
    lacking = [name for name, there in (("jobs", entry.jobs_help), ("resume", entry.resumes)) if not there]
    return configured(entry.config, build=entry.build, without=lacking)(run)


def _refuse_idle(ctx: typer.Context, config: Any) -> None:
    """Options that would do nothing in the preset that was asked for."""
    paper = config.preset == "paper"
    idle = [f for f in declared_fields(type(config)).values() if f.option.preset == ("trained" if paper else "paper")]
    options = {field.name: field.word for field in idle} | ({"jobs": "--jobs"} if paper else {})
    sources = {word: ctx.get_parameter_source(name) for name, word in options.items()}
    if typed := [word for word, source in sources.items() if source is not None and source.name == "COMMANDLINE"]:
        where = "the presets that train, tiny and small" if paper else "--preset paper"
        raise AnisoscopeError(f"{typed[0]} belongs to {where}; leave it out, or take another preset.")
