"""The command line: every verb and its options, and how an error ends a command."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from anisoscope.commands.claims import claims
from anisoscope.commands.command import Debug, fail
from anisoscope.commands.compare import compare
from anisoscope.commands.data import enwik8
from anisoscope.commands.list import list_
from anisoscope.commands.profile import profile
from anisoscope.commands.report import report
from anisoscope.commands.selftest import selftest
from anisoscope.commands.show import show
from anisoscope.commands.study import studies
from anisoscope.commands.sweep import sweep, tangent
from anisoscope.commands.train import train
from anisoscope.errors import AnisoscopeError

_SETTINGS: dict[str, Any] = {"no_args_is_help": True, "context_settings": {"help_option_names": ["-h", "--help"]}}
_VERBS = (profile, list_, show, compare, report, selftest, train, tangent, sweep, claims)
_GROUPS: dict[str, tuple[str, dict[str, Callable[..., None]]]] = {
    "data": ("Prepare data: enwik8, cleaned and over its 205 symbols.", {"enwik8": enwik8}),
    "study": ("The protocol of one paper, from data to verdicts.", studies()),
}
_INTERRUPTED = 130
_AGAIN = {  # what to do about a command that broke off, by whether it has --resume
    True: "what was finished is in the run folder, and the same command with --resume goes on.",
    False: "nothing was written: run the same command again.",
}
_UsageError: Any = typer.BadParameter.__bases__[0]  # of whichever click this typer carries


def _version(value: bool) -> None:
    if value:
        from anisoscope import __version__

        typer.echo(f"anisoscope {__version__}")
        raise typer.Exit


def _options(
    debug: Debug = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """The options before a verb: --version ends here, --debug is read by `main`."""


def _build() -> typer.Typer:
    words = "The geometry of a network's representations, layer by layer, with intervals and controls."
    app = typer.Typer(name="anisoscope", help=words, add_completion=False, pretty_exceptions_enable=False, **_SETTINGS)
    app.callback()(_options)
    for act in _VERBS:
        app.command(act.__name__.rstrip("_"))(act)
    for name, (words, acts) in _GROUPS.items():
        group = typer.Typer(name=name, help=words, **_SETTINGS)
        group.callback()(lambda: None)  # without one, typer would run the one command of a group in place of the group
        for verb, act in acts.items():
            group.command(verb)(act)
        app.add_typer(group)
    return app


app = _build()


def main(run: Callable[..., Any] = app) -> None:
    """The entry point: an error is one sentence and a non-zero exit, a traceback only with --debug."""
    try:
        # standalone, the parser would swallow Ctrl-C and draw boxes around its errors
        code = run(standalone_mode=False, **_called())
    except (KeyboardInterrupt, typer.Abort):
        code = _INTERRUPTED
    except _UsageError as error:
        _refuse(error)
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        fail(*_explain(error))
    if code == _INTERRUPTED:
        fail(f"interrupted; {_AGAIN[_can_resume()]}", code)
    raise SystemExit(code if isinstance(code, int) else 0)


def _called() -> dict[str, str]:
    """The command's name in its help: that of the entry point, unless python was told to run the package."""
    return {} if Path(sys.argv[0]).name == "__main__.py" else {"prog_name": "anisoscope"}


def _can_resume() -> bool:
    """Whether the command that was typed has --resume; read from its words, as nothing else is left of it by then."""
    command: Any = typer.main.get_command(app)
    for word in sys.argv[1:]:
        command = getattr(command, "commands", {}).get(word, command)
    return any("--resume" in option.opts for option in command.params)


def _refuse(error: Any) -> NoReturn:
    """What is wrong with the words of a command; nothing to say where there were none and the help was printed."""
    message = str(error.format_message()).strip()
    if not message or "\n" in message:
        raise SystemExit(2)
    where = error.ctx.command_path if getattr(error, "ctx", None) is not None else "anisoscope"
    fail(f"{message}{'' if message[-1] in '.?!' else '.'} See `{where} --help`.", 2)


def _explain(error: Exception) -> tuple[str, int]:
    """An error in one sentence, and the exit code."""
    if isinstance(error, AnisoscopeError):
        return str(error), 2
    words = str(error).strip().splitlines()[0] if str(error).strip() else ""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
        return f"{words}; make room or rights: {_AGAIN[_can_resume()]}", 1
    if isinstance(error, MemoryError) or "out of memory" in words.lower() or "can't allocate memory" in words.lower():
        less = "use a smaller --batch-size or --context, --dtype bfloat16, or fewer --layers."
        return f"out of memory ({words}); {less}", 1
    return f"{type(error).__name__}: {words}; run again with --debug for the traceback.", 1
