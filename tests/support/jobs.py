"""Light work for jobs, in a module that other processes import by name, and executors that need no process."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anisoscope.errors import AnisoscopeError
from anisoscope.execution.job import LOST, Job, Outcome, perform
from anisoscope.option import Progress


@dataclass
class AtOnce:
    """A handle whose job has ended."""

    found: Outcome
    cancelled: bool = False

    def outcome(self) -> Outcome:
        return self.found

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class HereExecutor:
    """Runs every job in this process when it is submitted; the first attempts at some are lost."""

    workers: int = 2
    retries: int = 2
    losing: dict[str, int] = field(default_factory=dict)  # how many attempts, by the name of the job
    submitted: list[str] = field(default_factory=list)
    closed: bool = False

    def start(self, folder: Path) -> None:
        assert folder.is_absolute()

    def submit(self, job: Job) -> AtOnce:
        self.submitted.append(job.name)
        if self.losing.get(job.name, 0) > 0:
            self.losing[job.name] -= 1
            return AtOnce(Outcome(LOST, "its node was lost"))
        return AtOnce(perform(job))

    def close(self) -> None:
        self.closed = True


def light_job(task: dict[str, Any], tell: Progress) -> None:
    """Writes its value; before, at the first attempt, what its task says becomes of it."""
    path = Path(task["path"])
    tell("work", 0, 2)
    first = not path.with_suffix(".begun").exists()
    path.with_suffix(".begun").write_text(str(os.getpid()))
    if task.get("refused"):
        raise AnisoscopeError("the checkpoint is damaged; copy it again.")
    if task.get("wrong"):
        raise ZeroDivisionError("nothing to divide")
    if task.get("killed") == "always" or (first and task.get("killed")):
        os.kill(os.getpid(), signal.SIGKILL)
    path.write_text(str(task["value"]))
    tell("work", 2, 2)


def long_job(task: dict[str, Any], tell: Progress) -> None:
    """Begins, says who it is, and writes its value once it may, or its controller has been gone for long enough."""
    path = Path(task["path"])
    with path.with_suffix(".begun").open("a") as begun:
        begun.write(f"{os.getpid()}\n")
    until = time.monotonic() + 120
    while not path.with_suffix(".go").exists() and time.monotonic() < until:
        time.sleep(0.05)
    path.write_text(str(task["value"]))
