"""Where the arms of a study run: an executor, by default processes on this machine.

A child is in a session of its own, so that Ctrl-C reaches this process alone; it is passed on once, and every child
saves where it stands. A child whose parent is gone notices it when it next reports progress, and ends.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import torch

from anisoscope.errors import AnisoscopeError
from anisoscope.results.folder import RunFolder
from anisoscope.studies.arms import Progress, StudyArm

Work = Callable[[StudyArm, Progress | None], None]  # a function of a module, so that another process can import it
_PATIENCE = 5.0  # seconds between looks at children that report nothing


class Executor(Protocol):
    """What runs arms: on this machine, or on others. An arm is plain values, and its folder is its result."""

    def map(self, work: Work, arms: Sequence[StudyArm], progress: Progress | None = None) -> dict[str, str]:
        """Run every arm to its end; why arms failed, by the names of their folders."""


@dataclass(frozen=True)
class LocalExecutor:
    """`jobs` arms at a time on this machine: one after the other in this process, several in processes of their own.

    A finished arm costs nothing. An arm that fails does not stop the others; an interruption stops all.
    """

    jobs: int = 1

    def __post_init__(self) -> None:
        if self.jobs < 1:
            raise AnisoscopeError(f"jobs is {self.jobs}; expected at least 1.")

    def map(self, work: Work, arms: Sequence[StudyArm], progress: Progress | None = None) -> dict[str, str]:
        """Run every arm; why arms failed, by the names of their folders."""
        if self.jobs > 1:
            arms = [arm for arm in arms if RunFolder(arm.path).about().get("status") != "complete"]
            return _Pool(list(arms), self.jobs, work, progress).run()
        failed: dict[str, str] = {}
        for arm in arms:
            try:
                work(arm, _named(arm, progress))
            except Exception as error:
                failed[arm.path.name] = error_line(error, arm.path)
        return failed


def _named(arm: StudyArm, progress: Progress | None) -> Progress | None:
    return None if progress is None else lambda what, done, of: progress(f"{arm.path.name}: {what}", done, of)


def error_line(error: Exception, folder: os.PathLike[str]) -> str:
    """One line about an error; where it was not foreseen, its traceback is left in the folder of the arm."""
    lines = str(error).strip().splitlines()
    first = lines[0] if lines else ""
    if isinstance(error, AnisoscopeError):
        return first
    with contextlib.suppress(OSError), open(os.path.join(folder, "error.txt"), "w", encoding="utf-8") as file:
        file.write("".join(traceback.format_exception(error)))  # the disk may be what is wrong
    return f"{type(error).__name__}: {first}".rstrip(": ")


@dataclass
class _Pool:
    """Children under way, and what they say: ("progress", what, done, of), ("failed", why) or ("done",)."""

    waiting: list[StudyArm]
    jobs: int
    work: Work
    progress: Progress | None
    running: dict[Connection, tuple[Any, StudyArm]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def run(self) -> dict[str, str]:
        try:
            while self.waiting or self.running:
                while self.waiting and len(self.running) < self.jobs:
                    self._start(self.waiting.pop(0))
                for pipe in wait(list(self.running), timeout=_PATIENCE):
                    self._hear(pipe)  # type: ignore[arg-type]
        except BaseException:
            self._stop()
            raise
        return self.failed

    def _start(self, arm: StudyArm) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(self.work, arm, theirs, self.jobs), daemon=True)
        process.start()
        theirs.close()  # so that the pipe ends with the child
        self.running[ours] = process, arm

    def _hear(self, pipe: Connection) -> None:
        process, arm = self.running[pipe]
        try:
            word, *rest = pipe.recv()
        except (EOFError, OSError):  # it ended without a report: killed, or out of memory
            process.join()
            self.failed[arm.path.name] = f"its process ended with code {process.exitcode}"
            self._forget(pipe)
            return
        if word == "progress":
            tell = _named(arm, self.progress)
            if tell is not None:
                tell(*rest)
            return
        if word == "failed":
            self.failed[arm.path.name] = rest[0]
        process.join()
        self._forget(pipe)

    def _forget(self, pipe: Connection) -> None:
        del self.running[pipe]
        pipe.close()

    def _stop(self) -> None:
        """Let every child save where it stands; a second interruption does not wait for that."""
        for process, _ in self.running.values():
            process.terminate()
        try:
            for pipe, (process, _) in self.running.items():
                _drain(pipe)  # a child that writes into a full pipe would never end
                process.join()
        finally:
            for process, _ in self.running.values():
                process.kill()


def _drain(pipe: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.recv()


# -- in the child ------------------------------------------------------------------------------------------------------


def _child(work: Work, arm: StudyArm, pipe: Connection, jobs: int) -> None:
    if hasattr(os, "setsid"):
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _interrupted)
    torch.set_num_threads(max(1, torch.get_num_threads() // jobs))  # the children share the cores
    try:
        work(arm, lambda what, done, of: pipe.send(("progress", what, done, of)))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        raise SystemExit(1) from None  # the parent is gone
    except Exception as error:
        pipe.send(("failed", error_line(error, arm.path)))
    else:
        pipe.send(("done",))


def _interrupted(kind: int, frame: Any) -> None:
    raise KeyboardInterrupt
