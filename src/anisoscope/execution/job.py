"""A job: a picklable description of work that writes its results into a folder which all workers share.

A worker needs nothing of the process that hands out the job but this description: it goes to the same directory, checks
that it sees the same files and has the same version, works, and tells how far it is in a small file. It holds a lock
meanwhile: a worker may outlive the command that sent it, and a second one would write the same files.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import anisoscope
from anisoscope.errors import AnisoscopeError, OccupiedFolder
from anisoscope.option import Progress
from anisoscope.results.lock import WriterLock

Work = Callable[[Any, Progress], None]  # a function of a module, which a worker imports by its name
TOKEN = "token"
_TELLS = 0.5  # seconds between words on the progress of a job
_DYING = 10.0  # seconds in which a worker that was killed may still be seen
LATE = 60.0  # seconds after which a file that a job wrote is seen on every machine
DONE, REFUSED, LOST = "done", "refused", "lost"


@dataclass(frozen=True)
class Outcome:
    """How a job ended: done; refused, by an error that another attempt would meet again; or lost, with its reason."""

    kind: str
    reason: str = ""


@dataclass(frozen=True)
class Job:
    """One retryable piece of work: `work(task, tell)` writes its own results."""

    name: str
    work: Work
    task: Any
    folder: Path  # an absolute path, which all workers see
    token: str = ""  # what stands in a file of the folder
    directory: str = ""  # where relative paths begin
    version: str = anisoscope.__version__

    @property
    def told(self) -> Path:
        """The file in which the job tells how far it is."""
        return self.folder / f"{self.name}.progress"

    @property
    def desk(self) -> Path:
        """The folder whose lock the worker of the job holds."""
        return self.folder / f"{self.name}.worker"

    @property
    def error_file(self) -> Path:
        """The file for the traceback of an unexpected error."""
        return self.folder / f"{self.name}.error.txt"

    def progress(self) -> tuple[str, int, int] | None:
        """How far the job is, by its own words."""
        try:
            what, done, total = json.loads(self.told.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # nothing told yet, or just being written
            return None
        return str(what), int(done), int(total)


class JobHandle(Protocol):
    """A job that was handed out."""

    def outcome(self) -> Outcome | None:
        """How it ended; None while it waits or runs."""

    def cancel(self) -> None:
        """End it; it may save what it has."""


class Executor(Protocol):
    """Runs jobs; at most `workers` are handed out at a time, and lost ones `retries` times again."""

    workers: int
    retries: int

    def start(self, folder: Path) -> None:
        """Begin to run jobs whose files are in this folder."""

    def submit(self, job: Job) -> JobHandle:
        """Hand out a job."""

    def close(self) -> None:
        """No more jobs come; end what still runs."""


def perform(job: Job, watch: Callable[[], None] = lambda: None) -> Outcome:
    """Run a job where it was sent to; `watch` is called whenever it tells of its progress, and may raise."""
    try:
        _arrive(job)
        with _alone(job):
            job.work(job.task, _teller(job, watch))
    except AnisoscopeError as error:
        return Outcome(REFUSED, str(error))
    except Exception as error:
        with contextlib.suppress(OSError):
            job.error_file.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        return Outcome(LOST, error_words(error))
    return Outcome(DONE)


def error_words(error: BaseException) -> str:
    """An unexpected error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")[:300]


def _arrive(job: Job) -> None:
    """Check that this worker sees the files of the run and has its version, and go to its directory."""
    host = platform.node()
    try:
        seen = (job.folder / TOKEN).read_text(encoding="utf-8")
        os.chdir(job.directory or os.curdir)
    except OSError as error:
        raise AnisoscopeError(
            f"the worker on {host} does not see {error.filename!r}; run where all workers share the run folder, the "
            "current directory, models and data, or give --out on a file system that they share."
        ) from error
    if seen != job.token:
        raise AnisoscopeError(
            f"the worker on {host} sees another folder under {str(job.folder)!r} than the command that sent the job; "
            "give --out on a file system that all workers share."
        )
    if job.version != anisoscope.__version__:
        raise AnisoscopeError(
            f"the worker on {host} has anisoscope {anisoscope.__version__}, the command that sent the job "
            f"{job.version}; install the same version on all machines."
        )


@contextlib.contextmanager
def _alone(job: Job) -> Iterator[None]:
    """Around the work of a job; an error if another worker is at it, such as one whose command was killed."""
    until = time.monotonic() + _DYING
    while True:
        try:
            lock = WriterLock(job.desk)
            break
        except OccupiedFolder as error:
            if time.monotonic() > until:
                raise AnisoscopeError(
                    f"{job.name} is still worked on by {error.writer}, which an earlier command began; wait until it "
                    "ends or stop it, and the same command with --resume goes on."
                ) from error
            time.sleep(_TELLS)
    try:
        yield
    finally:
        lock.release()
        with contextlib.suppress(OSError):
            job.desk.rmdir()


def arrived(path: Path) -> bool:
    """Whether a file that a job wrote on another machine is there; network file systems may show it a little later."""
    begun = time.monotonic()
    while not path.is_file():
        if time.monotonic() > begun + LATE:
            return False
        time.sleep(_TELLS)
        with contextlib.suppress(OSError):
            os.listdir(path.parent)  # has the file system look again
    return True


def _teller(job: Job, watch: Callable[[], None]) -> Progress:
    """What a job calls to tell how far it is: now and then, into its file."""
    last = [0.0]

    def tell(what: str, done: int, total: int) -> None:
        watch()
        now = time.monotonic()
        if done < total and now < last[0] + _TELLS:
            return
        last[0] = now
        beside = job.told.with_name(f".{job.told.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            beside.write_text(json.dumps([what, done, total]), encoding="utf-8")
            beside.replace(job.told)

    return tell
