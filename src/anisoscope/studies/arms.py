"""Arms: training runs of a study, each under a monitor and into a run folder of its own, and where they run.

An executor runs them, by default in processes on this machine. A child is in a session of its own, so that Ctrl-C
reaches this process alone; it is passed on once, and every child saves where it stands. A child whose parent is gone
notices it when it next reports progress, and ends.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from anisoscope.capture.gradients.gradient_pass import untouched
from anisoscope.errors import AnisoscopeError
from anisoscope.monitor.monitor import Monitor
from anisoscope.results.folder import RunFolder
from anisoscope.studies.config import Progress, StudyArm, schedule_of
from anisoscope.training.config import CommonTrainConfig, TrainConfig
from anisoscope.training.language_model import IGNORED
from anisoscope.training.loop import train
from anisoscope.training.media import train_media

Work = Callable[[StudyArm, Progress | None], None]  # a function of a module, so that another process can import it
_PROBED, _PROBED_ON_DEVICE = 32, 128  # contexts of a probe that are looked at together
_PATIENCE = 5.0  # seconds between looks at children that report nothing


def train_arm(arm: StudyArm, progress: Progress | None = None) -> None:
    """Train one arm under its monitor, whatever it reads; an arm that was interrupted goes on."""

    def attach(model: Any, stream: Any, optimizer: Any, training: CommonTrainConfig, folder: Path) -> Any:
        return training_monitor(model, stream, optimizer, training, folder, name=arm.model, **arm.watch)

    work = train if isinstance(arm.training, TrainConfig) else train_media
    options: dict[str, Any] = {"progress": progress, "command": arm.command, "corpus": arm.corpus, "watch": arm.watch}
    work(arm.training, arm.path, monitor=attach, resume=True, **options)


def training_monitor(
    model: Any,
    stream: Any,
    optimizer: Any,
    training: CommonTrainConfig,
    folder: Path,
    *,
    name: str = "",
    when: str = "log",
    monitor: str = "standard",
    rank: int | None = None,
    contexts: int = 96,
    halves: bool = False,
    clean: bool = False,
    every_step: bool = False,
) -> Any:
    """The monitor of a training run of ours: a held-out probe, its folder, and of text its frequencies and optimizer.

    `monitor` is what it measures: a preset by cost, or metrics. With `clean` a masked language model is looked at
    without masks, on the same text as a model that predicts the next token.
    """
    together = _PROBED if stream.device.type == "cpu" else _PROBED_ON_DEVICE
    batches = stream.probe_batches(contexts, batch_size=together)
    options: dict[str, Any] = {"when": schedule_of(when, training.steps), "total_steps": training.steps}
    options |= {"metrics": monitor, "rank": rank, "name": name or training.arm, "seed": training.seed}
    options |= {"out": folder, "resume": True, "batch_size": together}
    if isinstance(training, TrainConfig):
        options |= {"counts": torch.as_tensor(stream.counts), "tokenizer": stream.corpus.tokenizer}
        options |= {"optimizer": optimizer, "halves": halves, "every_step": every_step}
        if clean and training.task == "masked":
            return CleanMonitor(model, masked=batches, probe=unmasked(batches), **options)
    return Monitor(model, probe=batches, **options)


class CleanMonitor(Monitor):
    """A Monitor of a masked language model that is looked at without masks, so that it can be compared with others.

    `masked` are batches with masks and labels, `probe` the text itself. The loss on held-out text is still that of the
    training objective, on masked text.
    """

    def __init__(self, model: Any, *, masked: Sequence[Mapping[str, Tensor]], **options: Any) -> None:
        super().__init__(model, **options)
        self.masked = list(masked)

    @contextlib.contextmanager
    def step(self, step: int, **words: Any) -> Iterator[Monitor]:
        """As Monitor's; a measured step also gets its loss on masked text: mean cross-entropy of the masked tokens."""
        with super().step(step, **words) as monitor:
            yield monitor
        if step not in self.done or (step, "probe_loss") in self.logged:
            return
        total, tokens = 0.0, 0
        with untouched(self.model), torch.inference_mode():
            for batch in self.masked:
                count = int((batch["labels"] != IGNORED).sum())
                total, tokens = total + float(self.model(**batch).loss) * count, tokens + count
        self.log(step, probe_loss=total / max(1, tokens))


def unmasked(batches: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Batches of a masked language model as the text was, nothing in it to be predicted.

    >>> import torch
    >>> unmasked([{"input_ids": torch.tensor([[5, 2]]), "labels": torch.tensor([[-100, 7]])}])[0]
    {'input_ids': tensor([[5, 7]]), 'labels': tensor([[-100, -100]])}
    """
    pairs = ((batch["input_ids"], batch["labels"]) for batch in batches)  # labels: what stood under the masks
    return [
        {"input_ids": labels.where(labels >= 0, ids), "labels": torch.full_like(labels, IGNORED)}
        for ids, labels in pairs
    ]


# -- executors ---------------------------------------------------------------------------------------------------------


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
            word, rest = "ended", []
        if word == "progress":
            if (tell := _named(arm, self.progress)) is not None:
                tell(*rest)
            return
        process.join()
        if word != "done":
            self.failed[arm.path.name] = rest[0] if rest else f"its process ended with code {process.exitcode}"
        del self.running[pipe]
        pipe.close()

    def _stop(self) -> None:
        """Let every child save where it stands; a second interruption does not wait for that."""
        for process, _ in self.running.values():
            process.terminate()
        try:
            for pipe, (process, _) in self.running.items():
                with contextlib.suppress(EOFError, OSError):
                    while True:
                        pipe.recv()  # a child that writes into a full pipe would never end
                process.join()
        finally:
            for process, _ in self.running.values():
                process.kill()


def _child(work: Work, arm: StudyArm, pipe: Connection, jobs: int) -> None:
    """What runs in a process of its own."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    if hasattr(os, "setsid"):
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, interrupted)
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
