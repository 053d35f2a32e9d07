"""Jobs in processes of this machine, which serve one job after the other."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

from anisoscope.errors import AnisoscopeError
from anisoscope.execution.job import LOST, Job, Outcome, perform

_PATIENCE = 30.0  # seconds in which an interrupted job may save what it has


@dataclass
class _Worker:
    """A process that waits for jobs."""

    process: Any
    pipe: Connection
    busy: bool = False


@dataclass
class LocalHandle:
    """A job that a process of this machine runs."""

    worker: _Worker
    found: Outcome | None = None

    def outcome(self) -> Outcome | None:
        """How it ended; None while it runs."""
        if self.found is None and self.worker.pipe.poll():
            try:
                self.found = self.worker.pipe.recv()
                self.worker.busy = False
            except (EOFError, OSError):  # killed, or out of memory
                self.worker.process.join()
                self.found = Outcome(LOST, f"its process ended with code {self.worker.process.exitcode}")
        return self.found

    def cancel(self) -> None:
        """Interrupt it."""
        if self.found is None:
            self.worker.process.terminate()


@dataclass
class LocalProcesses:
    """Runs `workers` jobs at a time in processes of this machine."""

    workers: int = 2
    retries: int = 2
    running: list[_Worker] = field(default_factory=list)
    method: ClassVar[str] = "spawn"

    def __post_init__(self) -> None:
        if self.workers < 1 or self.retries < 0:
            raise AnisoscopeError(
                f"workers is {self.workers} and retries {self.retries}; expected at least one worker, and 0 or more."
            )

    def start(self, folder: Path) -> None:
        """Processes are begun with the first jobs."""

    def submit(self, job: Job) -> LocalHandle:
        """Hand a job to a process that waits, or to a new one."""
        self.running = [worker for worker in self.running if worker.process.is_alive()]
        worker = next((worker for worker in self.running if not worker.busy), None) or self._begun()
        worker.busy = True
        try:
            worker.pipe.send(job)
        except OSError:  # it has just ended
            return LocalHandle(worker, Outcome(LOST, "its process ended before it began"))
        return LocalHandle(worker)

    def _begun(self) -> _Worker:
        context: Any = multiprocessing.get_context(self.method)
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, os.getpid(), self.workers), daemon=True)
        with _nameless_main():
            process.start()
        theirs.close()  # so that the pipe closes when the process ends
        self.running.append(_Worker(process, ours))
        return self.running[-1]

    def close(self) -> None:
        """End all processes; one that was interrupted may save what it has."""
        try:
            for worker in self.running:
                with contextlib.suppress(OSError):  # it may have ended
                    worker.pipe.send(None)
            for worker in self.running:
                worker.process.join(_PATIENCE)
        finally:
            for worker in self.running:
                worker.process.kill()
                worker.pipe.close()
            self.running = []


@contextlib.contextmanager
def _nameless_main() -> Iterator[None]:
    """A new process does not run the script that began this one: the work of jobs is in modules."""
    main = sys.modules["__main__"].__dict__
    hidden: dict[str, Any] = {name: main.pop(name) for name in ("__file__", "__spec__") if name in main}
    main["__spec__"] = None
    try:
        yield
    finally:
        main.update(hidden)


def _serve(pipe: Connection, parent: int, workers: int) -> None:
    """The main function of a process: jobs until there are no more."""
    import torch

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    if hasattr(os, "setsid"):
        os.setsid()  # Ctrl-C reaches only the parent, which tells its children
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, interrupted)
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))  # processes share the cores

    def watch() -> None:
        if os.getppid() != parent:  # nobody waits for the results
            raise KeyboardInterrupt

    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        while (job := pipe.recv()) is not None:
            pipe.send(perform(job, watch))
