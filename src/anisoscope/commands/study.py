"""`anisoscope study NAME`: a command for each row of the catalogue of studies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from anisoscope.commands.signature import Debug, Out, Resume, configured, declared_fields, given
from anisoscope.commands.terminal import command_line, under_way
from anisoscope.errors import AnisoscopeError
from anisoscope.studies.catalogue import STUDIES, StudyEntry


def studies() -> dict[str, Callable[..., None]]:
    """The commands of all studies, by name."""
    return {entry.name: _command(entry) for entry in STUDIES.values()}


def _command(entry: StudyEntry) -> Callable[..., None]:
    """The command of one study; --jobs and --resume where it has them."""

    def plain(config: Any, out: Out = None, debug: Debug = False) -> None:
        run(entry, config, out=out)

    def resumed(config: Any, out: Out = None, resume: Resume = False, debug: Debug = False) -> None:
        run(entry, config, out=out, resume=resume)

    def parallel(
        config: Any,
        ctx: typer.Context,
        jobs: int | None = None,
        out: Out = None,
        resume: Resume = False,
        debug: Debug = False,
    ) -> None:
        _refuse_idle(ctx, config)
        run(entry, config, out=out, resume=resume, jobs=jobs)

    parallel.__annotations__["jobs"] = Annotated[int | None, typer.Option(help=entry.jobs_help, min=1)]
    act = parallel if entry.jobs_help else resumed if entry.resumes else plain
    act.__doc__ = entry.help
    return configured(entry.config, build=entry.build)(act)


def run(entry: StudyEntry, config: Any, *, out: Any, resume: bool = False, **options: Any) -> None:
    """Carry out a study and print what came out."""
    from anisoscope.commands.page import study_summary
    from anisoscope.commands.pipeline import RunRequest, run_path, run_study
    from anisoscope.view.console import print_note, print_run_end

    preset = getattr(config, "preset", "")
    path = run_path(out, f"{entry.name}-{preset}" if preset else entry.name, resume=resume)
    with under_way() as tell:
        done = run_study(entry, config, RunRequest(path, resume, command_line(), tell, print_note), **options)
    print_run_end(done.folder, done.page, done.drawing_seconds, summary=study_summary(done.folder, entry.name))


def _refuse_idle(ctx: typer.Context, config: Any) -> None:
    """Options that would do nothing in the preset that was asked for."""
    paper = config.preset == "paper"
    idle = [f for f in declared_fields(type(config)).values() if f.option.preset == ("trained" if paper else "paper")]
    typed = [field.word for field in idle if given(ctx, field.name)]
    typed += ["--jobs"] if paper and given(ctx, "jobs") else []
    if typed:
        where = "the presets that train, tiny and small" if paper else "--preset paper"
        raise AnisoscopeError(f"{typed[0]} belongs to {where}; leave it out, or take another preset.")
