"""The typer application with all commands, and `main`, which turns errors into one-line messages and exit codes."""

from __future__ import annotations

import errno
import pickle
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from anisoscope.commands.card import card
from anisoscope.commands.claims import claims
from anisoscope.commands.command import INTERRUPTED, Debug, exit_code, fail, hush, interruptible
from anisoscope.commands.compare import compare
from anisoscope.commands.data import enwik8
from anisoscope.commands.list import list_
from anisoscope.commands.plan import calibrate
from anisoscope.commands.profile import profile
from anisoscope.commands.push import push
from anisoscope.commands.report import report
from anisoscope.commands.selftest import selftest
from anisoscope.commands.serve import serve
from anisoscope.commands.show import show
from anisoscope.commands.study import studies
from anisoscope.commands.sweep import sweep, tangent
from anisoscope.commands.train import train
from anisoscope.errors import AnisoscopeError
from anisoscope.view.terminal.letters import tolerant

_SETTINGS: dict[str, Any] = {"no_args_is_help": True, "context_settings": {"help_option_names": ["-h", "--help"]}}
_VERBS = (profile, list_, show, compare, report, serve, selftest, calibrate, train, tangent, sweep, claims, card, push)
_GROUPS: dict[str, tuple[str, dict[str, Callable[..., None]]]] = {
    "data": ("Prepare data: enwik8, cleaned and over its 205 symbols.", {"enwik8": enwik8}),
    "study": ("The protocol of one paper, from data to verdicts.", studies()),
}
_ADVICE = {  # what to do after a command was aborted, by whether it has --resume
    True: "what was finished is in the run folder, and the same command with --resume goes on.",
    False: "nothing was written: run the same command again.",
}
_UsageError: Any = typer.BadParameter.__bases__[0]  # click's UsageError, from the click that this typer uses


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
    text = "The geometry of a network's representations, layer by layer, with intervals and controls."
    app = typer.Typer(name="anisoscope", help=text, add_completion=False, pretty_exceptions_enable=False, **_SETTINGS)
    app.callback()(_options)
    for act in _VERBS:
        app.command(act.__name__.rstrip("_"))(act)
    for name, (text, acts) in _GROUPS.items():
        group = typer.Typer(name=name, help=text, **_SETTINGS)
        group.callback()(lambda: None)  # without a callback typer turns a group of one command into that command
        for verb, act in acts.items():
            group.command(verb)(act)
        app.add_typer(group)
    return app


app = _build()


@cache
def _parser() -> Any:
    """The parser of all commands, made once in a process."""
    return typer.main.get_command(app)


def main(run: Callable[..., Any] | None = None) -> None:
    """The entry point: an error is one sentence and a non-zero exit, a traceback only with --debug."""
    hush(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        tolerant(stream)  # a terminal of few letters shows near ones for the others
    with interruptible() as received:
        try:
            _refuse_unreadable(sys.argv[1:])
            _refuse_repeated(sys.argv[1:])
            # in standalone mode click itself handles Ctrl-C and prints usage errors
            code = (run or _parser())(standalone_mode=False, **_program_name())
            interrupted = code if code in INTERRUPTED else 0
            interrupted = 128 + received[0] if received else interrupted  # also where somebody swallowed it
        except (KeyboardInterrupt, typer.Abort) as error:
            interrupted = exit_code(error)
        except _UsageError as error:
            _fail_on_usage(error)
        except Exception as error:
            if "--debug" in sys.argv:
                raise
            fail(*_explain(error))
    if interrupted and _typed().name == "serve":  # the usual way to end it
        fail("the server has ended; runs go on.", interrupted)
    if interrupted:
        fail(f"interrupted; {_ADVICE[_can_resume()]}", interrupted)
    raise SystemExit(code if isinstance(code, int) else 0)


def _refuse_unreadable(words: Sequence[str]) -> None:
    """Raise an error for an argument that is empty or no text: run.json, tables and pages could not name it."""
    for before, word in zip(("", *words), words, strict=False):
        if not word.strip():
            after = f" after {before!r}" if before else ""
            raise AnisoscopeError(f"the argument{after} is empty; name something, or leave it out.")
        if any("\ud800" <= letter <= "\udfff" for letter in word) or "\0" in word:
            shown = word.encode("utf-8", "backslashreplace").decode()
            raise AnisoscopeError(f"the argument '{shown[:80]}' is not UTF-8 and cannot be recorded; rename it.")


def _refuse_repeated(words: Sequence[str]) -> None:
    """Raise an error for an option that is typed twice: all but the last would do nothing."""
    options = [word.partition("=")[0] for word in takewhile(lambda word: word != "--", words) if word.startswith("--")]
    for number, option in enumerate(options):
        if option in options[:number]:
            raise AnisoscopeError(f"{option} is given twice, and only the last would count; give it once.")


def _program_name() -> dict[str, str]:
    """The program name in help texts, as a keyword of `run`; none under `python -m anisoscope`: click finds it."""
    return {} if Path(sys.argv[0]).name == "__main__.py" else {"prog_name": "anisoscope"}


def _typed() -> Any:
    """The typed command; parsed from sys.argv, since an error leaves no parser context behind."""
    command = _parser()
    for word in sys.argv[1:]:
        command = getattr(command, "commands", {}).get(word, command)
    return command


def _can_resume() -> bool:
    """Whether the typed command has --resume."""
    return any("--resume" in option.opts for option in _typed().params)


def _fail_on_usage(error: Any) -> NoReturn:
    """Exit with code 2 and one sentence about a usage error; without a sentence where the help was already printed."""
    message = _seen_and_expected(error) or str(error.format_message()).strip()
    if not message or "\n" in message:
        raise SystemExit(2)
    where = error.ctx.command_path if getattr(error, "ctx", None) is not None else "anisoscope"
    fail(f"{message}{'' if message[-1] in '.?!' else '.'} See `{where} --help`.", 2)


_PLAIN = {"valid integer": "whole number", "valid number": "number", "greater than or equal to": "at least"}


def _seen_and_expected(error: Any) -> str:
    """A sentence for a value of a wrong type, where the parser says what it expects but not what it saw; else empty."""
    found: list[Any] = getattr(error.__cause__, "errors", list)()
    if not found or getattr(error, "param", None) is None:
        return ""
    expected = str(found[0]["msg"]).removeprefix("Input should be ").partition(",")[0]
    for words, plain in _PLAIN.items():
        expected = expected.replace(words, plain)
    return f"{error.param.opts[0]} is {str(found[0]['input'])[:80]!r}; expected {expected}."


def _explain(error: Exception) -> tuple[str, int]:
    """The one-line message and the exit code for an exception."""
    if isinstance(error, AnisoscopeError):
        return str(error), 2
    text = str(error).strip().splitlines()[0] if str(error).strip() else ""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
        return f"{text}; make room or rights: {_ADVICE[_can_resume()]}", 1
    if isinstance(error, OSError) and error.strerror:
        named = f" ({str(error.filename)[:80]!r})" if error.filename is not None else ""
        return f"{error.strerror}{named}; check the name, and what is there.", 1
    if isinstance(error, UnicodeError):
        return f"a name or a text is not UTF-8 ({text[:80]}); rename or re-encode it.", 1
    if isinstance(error, RecursionError):
        return "a file is nested more deeply than anything that a run, a model or a corpus holds; check its content.", 1
    if isinstance(error, pickle.UnpicklingError):
        return "a saved state is damaged or holds more than numbers, and nothing of it was run; start a new run.", 1
    if isinstance(error, MemoryError) or "out of memory" in text.lower() or "can't allocate memory" in text.lower():
        advice = "use a smaller --batch-size, --context or --seconds, --dtype bfloat16, or fewer --layers."
        return f"memory ran out{_asked(text)}; {advice}", 1
    return f"{type(error).__name__}: {text}; run again with --debug for the traceback.", 1


def _asked(text: str) -> str:
    """How much memory could not be had, as torch and NumPy say it; empty where they do not.

    >>> _asked("you tried to allocate 1310515208 bytes. Error code 12"), _asked("Tried to allocate 2.00 GiB. GPU 0")
    (' (1,250 MiB more were asked for)', ' (2.00 GiB more were asked for)')
    """
    found = re.search(r"allocate ([\d.]+) (bytes|[KMGT]iB)", text)
    if found is None:
        return ""
    amount = f"{int(found[1]) / (1 << 20):,.0f} MiB" if found[2] == "bytes" else f"{found[1]} {found[2]}"
    return f" ({amount} more were asked for)"


if __name__ == "__main__":
    main()
