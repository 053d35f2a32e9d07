"""Progress of a command on standard error: bars on a terminal, lines elsewhere.

Work is told as (what, done, total). A name such as `decoder: train` is a stage of a part; `arms`, `models` and
`checkpoints` count the parts of the whole. Rich keeps the books (speed, time left) for bars and for lines.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich import progress
from rich.console import Console, RenderableType
from rich.text import Text

from anisoscope.option import Progress
from anisoscope.view.terminal import screen

LABELS = {"load": "loading the model", "forward": "rows", "metrics": "metrics (sites)", "rows": "reading rows"}
LABELS |= {"claims": "testing the claims", "report": "drawing the report"}
WHOLES = ("arms", "models", "checkpoints")  # what counts the parts of a run
PARTLY = ": train"  # the stage of a part whose share is known: it is nearly all of its part
EVERY, EVERY_LATER, LATER = 10, 30, 120  # seconds between lines, at first and after so many seconds
SHORT = 1  # seconds that a stage must last to be told in lines
FEW = 8  # parts of which each stage is announced in lines; of more parts a line now and then must do
REMEMBERED = 3600.0  # seconds over which speed is averaged, if the 1,000 steps that rich keeps reach so far back
LEAST_BAR, MOST_BAR, MOST_NAME = 4, 40, 34


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """Yields a callback (what, done, total) that shows the progress of each kind of work on standard error."""
    shown: ProgressBars | ProgressLines = ProgressBars() if screen.animated() else ProgressLines()
    try:
        yield shown.tell
    finally:
        shown.end()


class Jobs(progress.Progress):
    """The stages that are under way: a finished one goes when another begins."""

    def __init__(self, *columns: Any, **options: Any) -> None:
        super().__init__(*columns, speed_estimate_period=REMEMBERED, **options)
        self.named: dict[str, progress.TaskID] = {}

    def note(self, what: str, done: int, total: int) -> progress.Task:
        """Take what was told into the books; the task of that stage."""
        if what in self.named and self.task(what).finished and done < total:
            self._drop(what)  # so that the next model starts again
        if what not in self.named or what in WHOLES:
            for name in [name for name in self.named if self.task(name).finished]:
                self._drop(name)
        if what not in self.named:
            part, _, stage = what.rpartition(": ")
            label = LABELS.get(stage, stage)
            self.named[what] = self.add_task(f"{part}: {label}" if part else label, total=total or None, whole=done)
        self.update(self.named[what], completed=done, total=total or None, whole=done)
        self._share()
        return self.task(what)

    def task(self, what: str) -> progress.Task:
        return self._tasks[self.named[what]]

    def whole(self) -> progress.Task | None:
        """What counts the parts of the run, if there are parts."""
        return next((self.task(name) for name in WHOLES if name in self.named), None)

    def stages(self) -> list[progress.Task]:
        """Everything else."""
        return [self.task(name) for name in self.named if name not in WHOLES]

    def _share(self) -> None:
        """Count half-trained arms among the arms, for the time that is left of the whole."""
        if (whole := self.whole()) is not None and whole.total:
            parts = sum(self.task(name).percentage / 100 for name in self.named if name.endswith(PARTLY))
            self.update(whole.id, completed=min(whole.total, whole.fields["whole"] + parts))

    def _drop(self, what: str) -> None:
        self.remove_task(self.named.pop(what))


# -- bars --------------------------------------------------------------------------------------------------------------


class ProgressBars(Jobs):
    """A bar for each stage under way; they vanish at the end, and what was found takes their place."""

    def __init__(self, console: Console | None = None, **options: Any) -> None:
        self.bar, self.name, self.drawn_on = progress.BarColumn(MOST_BAR), _NameColumn(), console or screen.errors
        columns = [self.name, self.bar, progress.MofNCompleteColumn(), progress.TimeElapsedColumn()]
        columns += [progress.TextColumn("left"), progress.TimeRemainingColumn()]
        super().__init__(*columns, console=self.drawn_on, transient=True, **options)

    def tell(self, what: str, done: int, total: int) -> None:
        self.start()  # not before there is work, so that an error in the options stays one line
        self.note(what, done, total)

    def end(self) -> None:
        if self.named:
            self.stop()

    def refresh(self) -> None:
        """Nothing: only the thread of rich draws, since Ctrl-C in the middle of a drawing would leave half of it."""

    def make_tasks_table(self, tasks: Iterable[progress.Task]) -> Any:
        """The table of rich; name and bar give way, so that the time left is never cut off."""
        shown = list(tasks)
        counts = max((2 * len(str(int(task.total or 0))) + 1 for task in shown), default=3)
        times = len("0:00:00") * 2 + len("left") + 3
        room = self.drawn_on.width - counts - times - 2 - len("^C ")  # what a terminal echoes must not break the line
        longest = max((len(task.description) for task in shown), default=0)
        self.name.most = max(LEAST_BAR, min(longest, MOST_NAME, room - 2 * LEAST_BAR))
        self.bar.bar_width = max(LEAST_BAR, min(MOST_BAR, room - self.name.most))
        return super().make_tasks_table(shown)


class _NameColumn(progress.ProgressColumn):
    most = MOST_NAME

    def render(self, task: progress.Task) -> RenderableType:
        return Text(screen.elided(task.description, self.most), no_wrap=True)


# -- lines -------------------------------------------------------------------------------------------------------------


class ProgressLines:
    """A line for each stage under way every ten seconds, and one where a stage begins and ends.

    `look` is called every second by a thread, so that a line comes also while nothing is told.
    """

    def __init__(self, write: Callable[[str], None] | None = None, clock: Callable[[], float] | None = None) -> None:
        self.jobs = Jobs(disable=True, **({"get_time": clock} if clock is not None else {}))
        self.write = write or _write_line
        self.began = self.jobs.get_time()
        self.due = self.began + EVERY
        self.told: set[progress.TaskID] = set()  # stages that a line has named
        self.lock, self.ended = threading.RLock(), threading.Event()
        self.thread: threading.Thread | None = None if clock is not None else threading.Thread(target=self._watch)

    def tell(self, what: str, done: int, total: int) -> None:
        with self.lock:
            if self.thread is not None and not self.thread.is_alive():
                self.thread.daemon = True
                self.thread.start()
            before = self.jobs.named.get(what)
            open_before = before is not None and not self.jobs.task(what).finished
            task = self.jobs.note(what, done, total)
            if task.finished and open_before and task.id in self.told and self._few():
                took = f"done in {_clock(task.finished_time or 0)}"
                self._say(task, took if (task.total or 0) <= 1 else f"{_count(task)}, {took}")

    def look(self) -> None:
        """Say what is due now."""
        with self.lock:
            now = self.jobs.get_time()
            running = [task for task in self.jobs.stages() if not task.finished]
            whole = self.jobs.whole()
            running = running or ([whole] if whole is not None and not whole.finished else [])
            if now >= self.due:
                self.due = now + (EVERY if now - self.began < LATER else EVERY_LATER)
                for task in running:
                    self._say(task, _state(task, whole))
            for task in running:
                if self._few() and task.id not in self.told and (task.elapsed or 0) >= SHORT:
                    self._say(task, _count(task) if (task.total or 0) > 1 else "")

    def _few(self) -> bool:
        """Whether the parts are so few that the stages of each are announced."""
        whole = self.jobs.whole()
        return whole is None or (whole.total or 0) <= FEW

    def end(self) -> None:
        self.ended.set()
        if self.thread is not None and self.thread.is_alive():
            self.thread.join()

    def _watch(self) -> None:
        while not self.ended.wait(SHORT):
            self.look()

    def _say(self, task: progress.Task, words: str) -> None:
        self.told.add(task.id)
        lead, rest = f"{_clock(self.jobs.get_time() - self.began)}  ", f" {words}" if words else ""
        room = max(8, screen.width() - len(lead) - len(rest))
        self.write(f"{lead}{screen.elided(task.description, room)}{rest}")


def _write_line(words: str) -> None:
    with suppress(OSError):  # a log that cannot be written is no reason to stop a training
        print(words, file=screen.errors.file, flush=True)


def _count(task: progress.Task) -> str:
    return f"{int(task.completed):,}" + (f" of {int(task.total):,}" if task.total else "")


def _state(task: progress.Task, whole: progress.Task | None) -> str:
    """How far a stage is, how fast it goes, and how long it and the whole will take."""
    if (task.total or 0) <= 1 and task.completed == 0:
        return f"{_clock(task.elapsed or 0)} so far"
    words = [_count(task)]
    if speed := task.speed:
        words.append(f"{speed:.3g}/s" if speed >= 1 else f"{1 / speed:.3g} s each")
    words += [f"{_clock(task.time_remaining)} left"] if task.time_remaining is not None else []
    if whole is not None and whole is not task:
        left = "" if whole.time_remaining is None else f", {_clock(whole.time_remaining)} left"
        words[-1] += f"; {whole.description} {int(whole.fields['whole'])}/{int(whole.total or 0)}{left}"
    return ", ".join(words)


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> _clock(75), _clock(3675)
    ('1:15', '1:01:15')
    """
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
