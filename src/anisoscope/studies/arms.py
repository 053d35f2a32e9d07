"""Train the arms of a study, each with a monitor and its own run folder, and the executors that run them.

The default executor uses processes on this machine. Each child process has its own session, so that Ctrl-C reaches only
the parent, which forwards it once; every child then saves a checkpoint. A child whose parent has died notices this
when it next reports progress, and exits.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from anisoscope.capture.gradient_pass import LabelConvention, untouched
from anisoscope.capture.row import original_contexts
from anisoscope.errors import AnisoscopeError
from anisoscope.execution.crew import Crew
from anisoscope.execution.job import DONE, Executor, Job
from anisoscope.monitor.held_out import constant_columns, loss_records
from anisoscope.monitor.monitor import Monitor
from anisoscope.numerics.hashing import half_of
from anisoscope.option import Progress
from anisoscope.results.folder import RunFolder
from anisoscope.results.lock import abandon
from anisoscope.studies.config import PROBED, StudyArm, schedule_of
from anisoscope.tangent.plan import PLANS
from anisoscope.tangent.proxy import StepRows
from anisoscope.training.classifier import train_media
from anisoscope.training.config import CommonTrainConfig, TrainConfig
from anisoscope.training.language_model import IGNORED
from anisoscope.training.loop import train

ArmWork = Callable[[StudyArm, Progress | None], None]  # a module-level function, so that it can be pickled
GRADIENTS = replace(PLANS["standard"], balanced=False, embedding=False)  # no tokens: no frequencies and no table
FEWEST = 4  # contexts of each half below which gradients are left out
IN_PLACE = LabelConvention(shifted=False)  # how masked language models read their labels
_PATIENCE = 5.0  # seconds between checks on children that report nothing


def train_arm(arm: StudyArm, progress: Progress | None = None) -> None:
    """Train one arm (text or other data) with its monitor; resumes an interrupted arm."""

    def attach(model: Any, stream: Any, optimizer: Any, training: CommonTrainConfig, folder: Path) -> Any:
        named: dict[str, Any] = {"name": arm.model, "log_to": arm.log_to}
        return training_monitor(model, stream, optimizer, training, folder, **named, **arm.watch)

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
    split: Sequence[int] = (),
    contexts: int = 96,
    halves: bool = False,
    clean: bool = False,
    every_step: bool = False,
    weighted_gradients: bool = False,
    gradients: bool = False,
    frozen_window: str | None = None,
    skip_first: bool = False,
    skip_special: bool = False,
    standardised: bool = False,
    log_to: Any = (),
) -> Any:
    """The monitor of a training run: a held-out probe, its folder and, for text, token frequencies and the optimizer.

    `monitor` is a preset by cost, or metrics. Gradients are those of the loss in which every target counts alike, the
    same measurement for every arm, or, with `weighted_gradients`, of the loss that is trained on. With `clean` a masked
    language model is measured on unmasked text, the same as a model that predicts the next token. `gradients` adds the
    tangent study to metrics that have none, for models of sounds and pictures.
    """
    together = PROBED.get(stream.device.type, PROBED["cuda"])
    batches = stream.probe_batches(contexts, batch_size=together)
    options: dict[str, Any] = {"when": schedule_of(when, training.steps), "total_steps": training.steps}
    options |= {"metrics": monitor, "rank": rank, "split": split, "name": name or training.arm, "seed": training.seed}
    options |= {"out": folder, "resume": True, "batch_size": together, "constant_loss": stream.constant}
    options["strict"] = True  # this training is ours: it goes on with --resume, and its table is to be whole
    options |= {"frozen_window": frozen_window, "background": training.background, "log_to": log_to}
    if isinstance(training, TrainConfig):
        options |= {"counts": torch.as_tensor(stream.counts), "tokenizer": stream.corpus.tokenizer}
        options |= {"optimizer": optimizer, "halves": halves, "every_step": every_step}
        options |= {"skip_first": skip_first, "skip_special": skip_special, "standardised": standardised or None}
        options |= {"target_weights": stream.target_weights, "weighted_gradients": weighted_gradients}
        if clean and training.task == "masked":
            return CleanMonitor(model, masked=batches, probe=unmasked(batches), **options)
    if not gradients or isinstance(training, TrainConfig):
        return Monitor(model, probe=batches, **options)
    parts = torch.cat([half_of(original_contexts(batch)) for batch in batches])
    enough = int(parts.bincount(minlength=2).min()) >= FEWEST
    found = Monitor(model, probe=batches, **options | ({"plan": GRADIENTS} if enough else {}))
    if not enough:
        found.instruments.note(
            f"{len(parts)} held-out contexts are too few to fit on one half and test on the other ({FEWEST} each): "
            "gradients were left out"
        )
    return found


class CleanMonitor(Monitor):
    """A Monitor that measures a masked language model on unmasked text, to compare it with next-token models.

    `masked` are the probe batches with masks and labels, `probe` the same text without masks. The held-out loss is
    still that of the training objective, on masked text.
    """

    def __init__(
        self, model: Any, *, masked: Sequence[Mapping[str, Tensor]], constant_loss: Any = None, **options: Any
    ) -> None:
        super().__init__(model, **options)
        self.masked = [(batch, original_contexts(dict(batch), config=self.model.config)) for batch in masked]
        constant = None if constant_loss is None else constant_columns(constant_loss, self.masked, IN_PLACE)
        self.constants = [] if constant is None else [constant]

    @contextlib.contextmanager
    def step(self, step: int, **words: Any) -> Iterator[Monitor]:
        """As in Monitor; a measured step also logs the mean cross-entropy of the masked tokens as `probe_loss`."""
        with super().step(step, **words) as monitor:
            yield monitor
        if step not in self.done or (step, "probe_loss") in self.results.logged:
            return
        rows = StepRows(step)
        with untouched(self.model), torch.inference_mode():
            for batch, contexts in self.masked:
                output, count = self.model(**batch), IN_PLACE.count(batch["labels"])
                rows.add_loss(float(output.loss) * count, count, None)
                if (found := IN_PLACE.by_context(output.logits, batch["labels"])) is not None:
                    rows.by_context.append((contexts, *found))
        self.results.log(step, loss_records(rows, self.constants))


def unmasked(batches: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Batches of a masked language model with the original tokens restored and no labels.

    >>> import torch
    >>> unmasked([{"input_ids": torch.tensor([[5, 2]]), "labels": torch.tensor([[-100, 7]])}])[0]
    {'input_ids': tensor([[5, 7]]), 'labels': tensor([[-100, -100]])}
    """
    pairs = ((batch["input_ids"], batch["labels"]) for batch in batches)  # labels hold the original tokens
    return [
        {"input_ids": labels.where(labels >= 0, ids), "labels": torch.full_like(labels, IGNORED)}
        for ids, labels in pairs
    ]


# -- executors ---------------------------------------------------------------------------------------------------------


class ArmRunner(Protocol):
    """Runs arms, on this machine or others. An arm is picklable, and its result is its run folder."""

    def map(self, work: ArmWork, arms: Sequence[StudyArm], progress: Progress | None = None) -> dict[str, str]:
        """Run all arms; returns the reasons of failed arms by the names of their folders."""


@dataclass(frozen=True)
class LocalExecutor:
    """Runs `jobs` arms at a time on this machine: with one job in this process, else in child processes.

    Finished arms are skipped. A failed arm does not stop the others; an interruption stops all.
    """

    jobs: int = 1

    def __post_init__(self) -> None:
        if self.jobs < 1:
            raise AnisoscopeError(f"jobs is {self.jobs}; expected at least 1.")

    def map(self, work: ArmWork, arms: Sequence[StudyArm], progress: Progress | None = None) -> dict[str, str]:
        """Run all arms; returns the reasons of failed arms by the names of their folders."""
        if self.jobs > 1:
            arms = unfinished(arms)
            return _Pool(list(arms), self.jobs, work, progress).run()
        failed: dict[str, str] = {}
        tell = progress or (lambda what, done, of: None)
        for number, arm in enumerate(arms):
            tell("arms", number, len(arms))
            try:
                work(arm, _named(arm, progress))
            except Exception as error:
                failed[arm.path.name] = error_line(error, arm.path)
        tell("arms", len(arms), len(arms))
        return failed


def unfinished(arms: Sequence[StudyArm]) -> list[StudyArm]:
    """The arms that are not complete."""
    return [arm for arm in arms if RunFolder(arm.path).about().get("status") != "complete"]


@dataclass
class JobRunner:
    """Runs every arm as a job of an executor, such as that of a cluster; a lost one goes on from its checkpoint.

    Finished arms are skipped. A failed arm does not stop the others; an interruption stops all.
    """

    executor: Executor
    folder: Path  # of the study; all workers share it
    retried: list[str] = field(default_factory=list)  # notes on arms that were lost and tried again

    def map(self, work: ArmWork, arms: Sequence[StudyArm], progress: Progress | None = None) -> dict[str, str]:
        """Run all arms; returns the reasons of failed arms by the names of their folders."""
        left, failed = unfinished(arms), {}
        tell = progress or (lambda what, done, of: None)
        with Crew(self.executor, self.folder / "jobs", progress, _left_behind, self.retried) as crew:
            jobs = [crew.job(arm.path.name, work, _settled(arm)) for arm in left]
            tell("arms", len(arms) - len(left), len(arms))
            for number, (job, outcome) in enumerate(crew.in_order(jobs)):
                tell("arms", len(arms) - len(left) + number + 1, len(arms))
                if outcome.kind != DONE:
                    failed[job.name] = outcome.reason
        if not failed:
            shutil.rmtree(self.folder / "jobs", ignore_errors=True)
        return failed


def _settled(arm: StudyArm) -> StudyArm:
    """An arm with absolute paths."""
    return replace(arm, path=arm.path.absolute(), corpus=arm.corpus.absolute())


def _left_behind(job: Job) -> None:
    """The lock of a lost arm, on another machine, would keep the next worker out for a while."""
    abandon(job.task.path)


def _named(arm: StudyArm, progress: Progress | None) -> Progress | None:
    return None if progress is None else lambda what, done, of: progress(f"{arm.path.name}: {what}", done, of)


def error_line(error: Exception, folder: os.PathLike[str]) -> str:
    """One line about an error; the traceback of an unexpected one is written into the folder of the arm."""
    lines = str(error).strip().splitlines()
    first = lines[0] if lines else ""
    if isinstance(error, AnisoscopeError):
        return first
    with contextlib.suppress(OSError), open(os.path.join(folder, "error.txt"), "w", encoding="utf-8") as file:
        file.write("".join(traceback.format_exception(error)))  # may fail: the disk may be full
    return f"{type(error).__name__}: {first}".rstrip(": ")


@dataclass
class _Pool:
    """Running child processes; their messages are ("progress", what, done, of), ("failed", why) or ("done",)."""

    waiting: list[StudyArm]
    jobs: int
    work: ArmWork
    progress: Progress | None
    running: dict[Connection, tuple[Any, StudyArm]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.total = len(self.waiting)

    def run(self) -> dict[str, str]:
        self._tell_arms()
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
        theirs.close()  # so that the pipe closes when the child exits
        self.running[ours] = process, arm

    def _hear(self, pipe: Connection) -> None:
        process, arm = self.running[pipe]
        try:
            word, *rest = pipe.recv()
        except (EOFError, OSError):  # the child exited without a message: killed, or out of memory
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
        self._tell_arms()

    def _tell_arms(self) -> None:
        if self.progress is not None and self.total:
            self.progress("arms", self.total - len(self.waiting) - len(self.running), self.total)

    def _stop(self) -> None:
        """Interrupt all children and wait until they have saved; a second interruption does not wait."""
        for process, _ in self.running.values():
            process.terminate()
        try:
            for pipe, (process, _) in self.running.items():
                with contextlib.suppress(EOFError, OSError):
                    while True:
                        pipe.recv()  # drain: a child that writes into a full pipe would block
                process.join()
        finally:
            for process, _ in self.running.values():
                process.kill()


def _child(work: ArmWork, arm: StudyArm, pipe: Connection, jobs: int) -> None:
    """The main function of a child process."""

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
