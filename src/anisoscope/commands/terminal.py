"""A command and the terminal it was typed in: its words, its bars, its signals, its end."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

import typer


def command_line() -> list[str]:
    """The words of this command, for run.json."""
    return ["anisoscope", *sys.argv[1:]]


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


def fail(message: str, code: int) -> NoReturn:
    """End a command with one sentence and an exit code."""
    typer.secho(f"anisoscope: {message}", fg="red", err=True)
    raise SystemExit(code)
