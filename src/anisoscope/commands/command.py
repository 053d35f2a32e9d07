"""What all commands share: options that come from a configuration, and the terminal that a command was typed in.

The fields of a configuration that declare an Option become the options that typer shows and parses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import signal
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from anisoscope.option import Option

if TYPE_CHECKING:
    from anisoscope.commands.pipeline import RunRequest

Out = Annotated[Path | None, typer.Option(help="Run folder; default: a new one under runs/.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run in --out.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]  # read by `app.main`
Format = Annotated[str, typer.Option(help="table, csv or json.")]
Metric = Annotated[str | None, typer.Option(help="Only these metrics, comma-separated.")]


@dataclasses.dataclass(frozen=True)
class DeclaredField:
    """A field of a configuration that is an option: its name, its type, its default and how it is given."""

    name: str
    type: Any
    default: Any
    option: Option

    @property
    def word(self) -> str:
        """What is typed: `--batch-size`."""
        return self.option.name or f"--{self.name.replace('_', '-')}"

    def parameter(self) -> inspect.Parameter:
        """The parameter of a function that typer reads as this option."""
        o, kind, default = self.option, self.type, self.default
        if o.argument:
            required = default is dataclasses.MISSING
            if typing.get_origin(kind) is tuple:
                kind = list[str] if required else list[str] | None
            default = inspect.Parameter.empty if required else None
            info: Any = typer.Argument(metavar=o.metavar, help=o.help)
        else:
            if o.parse is not None:
                kind, default = (bool, False) if o.typed is bool else (o.typed | None, None)
            spelled = (self.word,) if kind is bool or o.name else ()
            info = typer.Option(*spelled, help=o.help, min=o.least)
        annotation: Any = Annotated[kind, info]
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    def explained(self, words: str | None) -> DeclaredField:
        """With another help text, where there is one."""
        return self if words is None else dataclasses.replace(self, option=dataclasses.replace(self.option, help=words))

    def value(self, typed: Any) -> Any:
        """What was typed as the value of the field."""
        if self.option.argument:
            return tuple(typed) if isinstance(typed, list) else typed
        return typed if self.option.parse is None else self.option.parse(typed, self.word)


def declared_fields(source: Any) -> dict[str, DeclaredField]:
    """The fields of a configuration, or the parameters of a function that makes one, that are options; in order."""
    hints = typing.get_type_hints(source, include_extras=True)
    if dataclasses.is_dataclass(source):
        defaults = {field.name: field.default for field in dataclasses.fields(source)}
    else:
        plain = inspect.signature(source).parameters.values()
        defaults = {p.name: dataclasses.MISSING if p.default is p.empty else p.default for p in plain}
    found: dict[str, DeclaredField] = {}
    for name, default in defaults.items():
        if typing.get_origin(hints[name]) is Annotated:
            kind, *notes = typing.get_args(hints[name])
            for option in (note for note in notes if isinstance(note, Option)):
                found[name] = DeclaredField(name, kind, default, option)
    return found


def configured(
    config: Any,
    *,
    build: Callable[..., Any] | None = None,
    only: Sequence[str] = (),
    without: Sequence[str] = (),
    first: Sequence[str] = (),
    help: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a function of (config, …) into a command whose options are the fields of `config` and its other parameters.

    `build` makes the configuration where it takes more than its fields, and may declare further options. `only` chooses
    among the fields, `without` leaves out fields and other parameters, `first` come first in the help, `help` says of
    some what they mean here. An option that is None because it was not given leaves the field as the configuration has
    it.
    """

    def made(act: Callable[..., None]) -> Callable[..., None]:
        fields = declared_fields(config) | (declared_fields(build) if build is not None else {})
        order = only or [*first, *(name for name in fields if name not in (*first, *without))]
        chosen = {name: fields[name].explained((help or {}).get(name)) for name in order}
        _, *more = inspect.signature(act, eval_str=True).parameters.values()
        own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in more if p.name not in without]

        def command(**typed: Any) -> None:
            rest = {p.name: typed.pop(p.name) for p in own}
            values = {name: chosen[name].value(typed[name]) for name in typed if typed[name] is not None}
            act((build or config)(**values), **rest)

        parameters = [*(field.parameter() for field in chosen.values()), *own]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        command.__name__, command.__doc__ = act.__name__, act.__doc__
        return command

    return made


@contextlib.contextmanager
def under_way() -> Iterator[Callable[[str, int, int], None]]:
    """Around what takes long: progress bars; SIGTERM ends it as Ctrl-C does, with everything finished on disk."""
    from anisoscope.view.console import progress_bars

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGTERM, stop)
    try:
        with progress_bars() as tell:
            yield tell
    finally:
        signal.signal(signal.SIGTERM, old)


@contextlib.contextmanager
def requested(out: Path | None, name: str, *, resume: bool) -> Iterator[RunRequest]:
    """A run as the command line asks for it: into `out`, or a new folder of that name, with progress bars."""
    from anisoscope.commands.pipeline import RunRequest, run_path
    from anisoscope.view.console import print_note

    path = run_path(out, name, resume=resume)
    with under_way() as tell:
        yield RunRequest(path, resume, ["anisoscope", *sys.argv[1:]], tell, print_note)


def fail(message: str, code: int) -> NoReturn:
    """End a command with one sentence and an exit code."""
    typer.secho(f"anisoscope: {message}", fg="red", err=True)
    raise SystemExit(code)
