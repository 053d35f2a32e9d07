"""Shared by all commands: typer options generated from configurations, progress bars, signals and failure.

The fields of a configuration that declare an Option become the options that typer shows and parses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import signal
import sys
import threading
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from anisoscope.errors import Interrupted
from anisoscope.option import Option, listed, typed_options

if TYPE_CHECKING:
    from anisoscope.commands.pipeline import RunRequest

Out = Annotated[Path | None, typer.Option(help="Run folder; default: a new one under runs/.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run in --out.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]  # read by `app.main`
Why = Annotated[bool, typer.Option("--why", help="Print the sentences behind what is printed, and all notes.")]
LogTo = Annotated[
    str | None,
    typer.Option(help="Experiment trackers: tensorboard, tensorboard:FOLDER, wandb:PROJECT, mlflow:FOLDER, trackio."),
]
Format = Annotated[str, typer.Option(help="table, csv or json.")]
Metric = Annotated[str | None, typer.Option(help="Only these metrics, comma-separated.")]


@dataclasses.dataclass(frozen=True)
class DeclaredField:
    """A configuration field that is a command-line option: name, type, default and its `Option` declaration."""

    name: str
    type: Any
    default: Any
    option: Option

    @property
    def flag(self) -> str:
        """The option as typed: `--batch-size`."""
        return self.option.name or f"--{self.name.replace('_', '-')}"

    def parameter(self, help: str | None = None) -> inspect.Parameter:
        """The keyword parameter that typer reads as this option or argument; `help` replaces its help text."""
        o, kind, default, text = self.option, self.type, self.default, help or self.option.help
        if o.argument:
            required = default is dataclasses.MISSING
            if typing.get_origin(kind) is tuple:
                kind = list[str] if required else list[str] | None
            default = inspect.Parameter.empty if required else None
            info: Any = typer.Argument(metavar=o.metavar, help=text)
        else:
            if o.parse is not None:
                kind, default = (bool, False) if o.typed is bool else (o.typed | None, None)
            spelled = (self.flag,) if kind is bool or o.name else ()
            info = typer.Option(*spelled, help=text, min=o.least)
        annotation: Any = Annotated[kind, info]
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    def value(self, typed: Any) -> Any:
        """The value of the field, parsed from what typer read."""
        if self.option.argument:
            return tuple(typed) if isinstance(typed, list) else typed
        return typed if self.option.parse is None else self.option.parse(typed, self.flag)


def declared_fields(source: Any) -> dict[str, DeclaredField]:
    """The options among the fields of a dataclass, or the parameters of a function, by name and in order."""
    hints = typing.get_type_hints(source, include_extras=True)
    if dataclasses.is_dataclass(source):
        defaults = {field.name: field.default for field in dataclasses.fields(source)}
    else:
        plain = inspect.signature(source).parameters.values()
        defaults = {p.name: dataclasses.MISSING if p.default is p.empty else p.default for p in plain}
    declared: dict[str, DeclaredField] = {}
    for name, default in defaults.items():
        if typing.get_origin(hints[name]) is Annotated:
            kind, *notes = typing.get_args(hints[name])
            for option in (note for note in notes if isinstance(note, Option)):
                declared[name] = DeclaredField(name, kind, default, option)
    return declared


def configured(
    config: Any,
    *,
    build: Callable[..., Any] | None = None,
    only: Sequence[str] = (),
    without: Sequence[str] = (),
    first: Sequence[str] = (),
    help: Mapping[str, str] | None = None,
    also: Mapping[str, Any] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn `act(config, …)` into a command whose options are the fields of `config` and the other parameters of `act`.

    `build` constructs the configuration in place of `config` and may declare further options. `only` selects fields,
    `without` removes fields and other parameters, `first` moves fields to the front of the help, `help` replaces help
    texts. An option that was not given (None) keeps the default of the configuration. `also` are parameters of `act`
    that are further configurations, whose fields are options as well.
    """

    def decorate(act: Callable[..., None]) -> Callable[..., None]:
        fields = declared_fields(config) | (declared_fields(build) if build is not None else {})
        order = only or [*first, *(name for name in fields if name not in (*first, *without))]
        chosen = {name: fields[name] for name in order}
        beside = {name: declared_fields(other) for name, other in (also or {}).items() if name not in without}
        _, *more = inspect.signature(act, eval_str=True).parameters.values()
        plain = [p for p in more if p.name not in (*without, *beside)]
        extra = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in plain]

        def command(ctx: typer.Context, **typed: Any) -> None:
            rest = {p.name: typed.pop(p.name) for p in extra}
            sources = {name: ctx.get_parameter_source(name) for name in (*typed, *rest)}
            given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
            known = chosen | {name: field for found in beside.values() for name, field in found.items()}
            values = {name: known[name].value(typed[name]) for name in typed if typed[name] is not None}
            plans_only = bool(rest.get("dry_run"))
            for name, fields_of in beside.items():
                mine = {field: values.pop(field) for field in fields_of if field in values}
                with typed_options(also[name], given):  # type: ignore[index]
                    rest[name] = also[name](**mine)  # type: ignore[index]
            with typed_options(config, given), _anywhere(plans_only):
                made = (build or config)(**values)
            # what was typed need not be of use to other configurations that are made on the way
            with typed_options(made, given), _anywhere(plans_only):
                act(made, **rest)

        context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        mine = [field.parameter((help or {}).get(name)) for name, field in chosen.items()]
        others = [field.parameter() for found in beside.values() for field in found.values()]
        parameters = [context, *mine, *others, *extra]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        command.__name__, command.__doc__ = act.__name__, act.__doc__
        return command

    return decorate


def _anywhere(dry_run: bool) -> contextlib.AbstractContextManager[None]:
    """Around a command that only plans, a device need not be one of this machine."""
    if not dry_run:
        return contextlib.nullcontext()
    from anisoscope.models.placement import elsewhere

    return elsewhere()


def hush(words: Sequence[str]) -> None:
    """Of the processes that torchrun started a command in only the first prints; what others say goes through it."""
    several = all(name in os.environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"))
    if several and words[:1] == ["profile"] and os.environ["RANK"] != "0" and "--debug" not in words:
        nothing = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nothing, stream)


INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)  # exit codes
_received: list[int] = []  # signals of the running command


@contextlib.contextmanager
def interruptible() -> Iterator[list[int]]:
    """Around a command: SIGTERM interrupts it as Ctrl-C does, saving results; yields the signals that came."""

    def stop(number: int, _: object) -> None:
        _received.append(number)
        raise Interrupted(number)

    _received.clear()
    kinds = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {kind: signal.signal(kind, stop) for kind in kinds}  # also where a shell had them ignored
    try:
        yield _received
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler or signal.SIG_DFL)


@contextlib.contextmanager
def progress_shown() -> Iterator[Callable[[str, int, int], None]]:
    """Progress shown during long work; yields its callback, which raises an interruption that somebody swallowed."""
    from anisoscope.view.terminal.progress import progress_bars

    with progress_bars() as tell:

        def heard(what: str, done: int, total: int) -> None:
            if _received and not isinstance(sys.exception(), KeyboardInterrupt):  # not while it is being dealt with
                raise Interrupted(_received[0])
            tell(what, done, total)

        yield heard


def exit_code(error: BaseException | None) -> int:
    """The exit code of an interrupted command: by its signal, 130 if that is not known."""
    while error is not None and not isinstance(error, Interrupted):
        error = error.__cause__ or error.__context__
    return error.code if isinstance(error, Interrupted) else INTERRUPTED[0]


@contextlib.contextmanager
def requested(out: Path | None, name: str, *, resume: bool, log_to: str | None = None) -> Iterator[RunRequest]:
    """The `RunRequest` of a command, with progress bars: into `out`, or into a new folder called `name`."""
    from anisoscope.commands.pipeline import RunRequest, run_path
    from anisoscope.view.terminal.screen import print_note

    path, named = run_path(out, name, resume=resume), listed(log_to, "--log-to") if log_to is not None else ()
    with progress_shown() as tell:
        try:
            yield RunRequest(path, resume, ["anisoscope", *sys.argv[1:]], tell, print_note, log_to=named)
        except Interrupted as error:  # typer knows 130 only
            raise typer.Exit(error.code) from error


def fail(message: str, code: int) -> NoReturn:
    """End a command with one sentence and an exit code."""
    typer.secho(f"anisoscope: {message}", fg="red", err=True)
    raise SystemExit(code)
