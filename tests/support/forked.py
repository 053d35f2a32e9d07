"""Commands and calls tried in a forked process, so that time, memory and a crash of each are its own."""

from __future__ import annotations

import contextlib
import io
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS, MEMORY = 20, 2 << 30  # of the processor, and bytes, that a bad input may take
_WAIT = 15  # times as many seconds by the clock, where other processes take the cores
_MOST_LINES, _MOST_LETTERS = 4, 700
_INTERNALS = re.compile(
    r"torch\.|pyarrow|Arrow|numpy\.|site-packages|\bat 0x|\[Errno|--debug|out of memory|Traceback|dataclass"
    r"|__\w+__|NoneType|subscriptable|\b(Runtime|Type|Key|Index|Attribute|Value|Recursion|Overflow|Assertion)Error"
)
_PROGRESS = re.compile(r"\d+:\d\d(:\d\d)?  ")  # how many such lines there are depends on how busy the machine is


@dataclass(frozen=True)
class Ended:
    """What a forked process left behind; `code` is negative for a signal, as in subprocess."""

    code: int
    out: str
    err: str
    seconds: float
    grown: int  # bytes of resident memory beyond those at its start

    @property
    def sentence(self) -> str:
        """The lines that say what went wrong, joined."""
        return " | ".join(line for line in self.err.splitlines() if line.startswith("anisoscope: "))


def command_line(*words: object) -> Callable[[], Any]:
    """The command line as a call; without vector figures, which take seconds and are tested elsewhere."""

    def run() -> None:
        from anisoscope import cli
        from anisoscope.view import report

        sys.argv = ["anisoscope", *map(str, words)]
        report.write_figures = lambda *_, meanwhile, **__: meanwhile([])  # type: ignore[assignment]
        cli.main()

    return run


def python_call(act: Callable[[], Any]) -> Callable[[], Any]:
    """A call of the library; an AnisoscopeError ends it as it ends a command."""

    def run() -> None:
        from anisoscope.errors import AnisoscopeError

        try:
            act()
        except AnisoscopeError as error:
            print(f"anisoscope: {error}", file=sys.stderr)
            raise SystemExit(2) from error

    return run


def in_fork(act: Callable[[], Any], *, seconds: float = SECONDS, memory: int = MEMORY) -> Ended:
    """Run `act` in a fork of this process with limits of time and memory."""
    with tempfile.TemporaryDirectory() as place:
        paths = [Path(place) / name for name in ("out", "err")]
        started, before = time.monotonic(), _resident()
        pid = os.fork()
        if pid == 0:
            os.chdir(place)  # what a command writes into `-1` or `runs/` is gone with it
            _be_child(act, paths, memory, seconds)
        status, used = _wait(pid, started + seconds * _WAIT)
        took = time.monotonic() - started
        out, err = (path.read_text(errors="replace") for path in paths)
    return Ended(os.waitstatus_to_exitcode(status), out, err, took, used.ru_maxrss * 1024 - before)


def _be_child(act: Callable[[], Any], paths: list[Path], memory: int, seconds: float) -> None:
    code: Any = 99
    try:
        os.setpgid(0, 0)
        for number, path in enumerate(paths, 1):
            os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
        sys.stdout, sys.stderr = (io.TextIOWrapper(open(n, "wb", 0), write_through=True) for n in (1, 2))  # noqa: SIM115
        limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 1))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        act()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        with contextlib.suppress(BaseException):
            traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _wait(pid: int, until: float) -> tuple[int, Any]:
    while True:
        done, status, used = os.wait4(pid, os.WNOHANG)
        if done:
            return status, used
        if time.monotonic() > until:
            os.killpg(pid, signal.SIGKILL)
            _, status, used = os.wait4(pid, 0)
            return status, used
        time.sleep(0.005)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def complaints(ended: Ended, *, legal: bool = False) -> list[str]:
    """What is wrong with the end of a bad input; a `legal` one may also come out well."""
    if ended.code == 0:
        return ([] if legal else ["accepted"]) + (["traceback"] if "Traceback" in ended.err else [])
    found = []
    if ended.code < 0 or ended.code == 99:
        found.append(f"ended by {ended.code} after {ended.seconds:.0f} s")
    if ended.grown > MEMORY:
        found.append(f"took {ended.grown >> 20} MiB")
    if match := _INTERNALS.search(ended.err):
        found.append(f"shows internals: {match[0]}")
    lines = [line for line in ended.err.strip().splitlines() if not _PROGRESS.match(line)]
    if len(lines) > (_MOST_LINES if ended.code != 3 else 3 * _MOST_LINES):  # 3: with notes
        found.append(f"says {len(lines)} lines")
    if not ended.sentence:
        found += [] if "Usage: " in ended.out + ended.err else ["says nothing"]
    elif len(ended.sentence) > _MOST_LETTERS or " | " in ended.sentence:
        found.append(f"says {len(ended.sentence)} letters")
    return found
