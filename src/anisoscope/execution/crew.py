"""A crew hands out the jobs of a run, brings their outcomes back in order, and retries lost ones."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from anisoscope.execution.job import LOST, TOKEN, Executor, Job, JobHandle, Outcome, Work
from anisoscope.option import Progress
from anisoscope.results.folder import replace_file
from anisoscope.results.lock import abandon

POLL = 0.05  # seconds between looks at running jobs
AHEAD = 2  # results that may wait, in jobs that run at a time: they lie on the disk


@dataclass
class _Running:
    job: Job
    handle: JobHandle
    attempts: int = 1
    heard: Any = None


@dataclass
class Crew:
    """The jobs of one run; `folder` is where their files are, shared by all workers.

    `lost` is called before a lost job is tried again, for instance to remove the lock that its worker left behind.
    """

    executor: Executor
    folder: Path
    progress: Progress | None = None
    lost: Callable[[Job], None] = lambda job: None
    notes: list[str] = field(default_factory=list)  # on jobs that were lost and tried again
    _running: dict[str, _Running] = field(default_factory=dict)

    def __enter__(self) -> Crew:
        self.folder = Path(os.path.abspath(self.folder))
        self.token = uuid.uuid4().hex
        replace_file(self.folder / TOKEN, lambda path: path.write_text(self.token, encoding="utf-8"))
        try:
            self.executor.start(self.folder)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in self._running.values():
            with contextlib.suppress(Exception):  # what goes wrong here must not replace the error of the run
                one.handle.cancel()
        self.executor.close()
        for path in (*self.folder.glob("*.progress"), self.folder / TOKEN):
            path.unlink(missing_ok=True)

    def job(self, name: str, work: Work, task: Any) -> Job:
        """A job of this crew."""
        return Job(name, work, task, self.folder, self.token, os.getcwd())

    def in_order(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Outcome]]:
        """Run jobs side by side and give their outcomes in the order of the jobs.

        Where the first takes long, only so many others are begun as may wait for it.
        """
        found: dict[str, Outcome] = {}
        waiting, next_up, most = deque(enumerate(jobs)), 0, self.executor.workers
        while next_up < len(jobs):
            while waiting and len(self._running) < most and waiting[0][0] < next_up + (1 + AHEAD) * most:
                self._submit(waiting.popleft()[1])
            found |= self._heard()
            if (outcome := found.pop(jobs[next_up].name, None)) is not None:
                next_up += 1
                yield jobs[next_up - 1], outcome
            else:
                time.sleep(POLL)

    def run(self, job: Job) -> Outcome:
        """Run one job and wait for it."""
        return next(outcome for _, outcome in self.in_order([job]))

    def _submit(self, job: Job, attempts: int = 1) -> None:
        job.told.unlink(missing_ok=True)
        self._running[job.name] = _Running(job, self.executor.submit(job), attempts)

    def _heard(self) -> dict[str, Outcome]:
        """The outcomes that came; lost jobs are handed out again."""
        found: dict[str, Outcome] = {}
        for name, one in list(self._running.items()):
            outcome = one.handle.outcome()
            self._tell(one)
            if outcome is None:
                continue
            del self._running[name]
            if outcome.kind == LOST:
                outcome = self._again(one, outcome)
            if outcome is not None:
                found[name] = outcome
        return found

    def _again(self, one: _Running, outcome: Outcome) -> Outcome | None:
        """Hand a lost job out again; its outcome, if that was done often enough."""
        abandon(one.job.desk)
        self.lost(one.job)
        if one.attempts > self.executor.retries:
            times = "" if one.attempts == 1 else f" ({one.attempts} attempts)"
            return Outcome(LOST, f"{outcome.reason}{times}")
        self.notes.append(f"{one.job.name} was lost and tried again: {outcome.reason}")
        self._submit(one.job, one.attempts + 1)
        return None

    def _tell(self, one: _Running) -> None:
        """Pass on what a job tells of its progress."""
        if self.progress is None:
            return
        heard = one.job.progress()
        if heard is not None and heard != one.heard:
            one.heard = heard
            self.progress(f"{one.job.name}: {heard[0]}", *heard[1:])
