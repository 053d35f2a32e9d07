"""Training from scratch: AdamW, warm-up and cosine, checkpoints, and a monitor that sees every step exactly once.

Step i is the state after i updates. A checkpoint of step i is written before update i, and before the monitor measures
step i; a killed run resumes from its newest checkpoint and neither loses nor repeats a step. After the last update the
monitor gets one more step, `with monitor.step(steps): pass`, without a training batch.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from anisoscope.errors import Interrupted
from anisoscope.monitor.sink import MonitorStore
from anisoscope.numerics.hashing import row_hash
from anisoscope.option import Progress
from anisoscope.results.folder import RunFolder
from anisoscope.results.lock import writing
from anisoscope.training.compiled_loss import TrainingLoss
from anisoscope.training.config import CommonTrainConfig, checkpoint_steps
from anisoscope.training.config import TrainConfig as TrainConfig
from anisoscope.training.language_model import build_model, make_stream
from anisoscope.training.run_files import WAIT, Checkpoints, TrainingLog, TrainingRecord, options_of, restore


class StepMonitor(Protocol):
    """The interface of a monitor.

    A resumable one also has `save(folder, wait=)`, which writes its state before a step into an empty folder (with
    wait=False at the latest when the monitor ends), and `load(folder)`, which restores it: the state is stored with the
    checkpoint of the same step.
    """

    def step(self, step: int) -> AbstractContextManager[Any]:
        """Context manager around forward and backward of all micro-batches of one update."""

    def log(self, step: int, **numbers: float) -> None:
        """Receive the numbers of an update, in order; on a GPU a few steps late."""


class BatchSource(Protocol):
    """A source of batches; each is a function of the step alone, so that a resumed run needs no state of it."""

    device: torch.device

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of text, None for other media."""

    @property
    def files(self) -> Path:
        """A folder whose files are copied into every checkpoint: a tokenizer, or the settings of a processor."""

    @property
    def constant(self) -> Any:
        """The best constant prediction that the training data allow, as `Monitor(constant_loss=…)` takes it."""

    def batch(self, step: int, micro: int = 0) -> dict[str, Tensor]:
        """The contexts of one micro-batch, with their labels."""

    def loss(self, forward: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
        """The loss of a batch that training minimises; `forward` is the model's. torch.compile may trace it."""

    def about(self) -> dict[str, Any]:
        """The entry `data` of run.json."""


@dataclass(frozen=True)
class Recipe:
    """How a training makes its batches and its model from a configuration."""

    stream: Callable[..., Any]  # (config, out, *, corpus, progress) -> BatchSource
    model: Callable[[Any, Any], nn.Module]  # (config, stream) -> a model whose forward returns a loss


MonitorFactory = Callable[[nn.Module, Any, torch.optim.Optimizer, Any, Path], AbstractContextManager[StepMonitor]]


def train(
    config: CommonTrainConfig,
    out: str | Path,
    *,
    monitor: StepMonitor | MonitorFactory | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    command: Sequence[str] = (),
    corpus: str | Path | None = None,
    watch: Mapping[str, Any] | None = None,
    recipe: Recipe | None = None,
) -> Path:
    """Train a model into a run folder and return that folder.

    `monitor` is a `StepMonitor`, or a function of (model, stream, optimizer, config, folder) that gives a context
    manager of one. `corpus` is a folder for the tokenised text, to be shared by several runs; `OUT/corpus` by default.
    `watch` are the monitor's options, stored in run.json: a run is not resumed with others. `recipe` makes the batches
    and the model; the default is a language model on text.
    """
    recipe = recipe or TEXT
    folder = RunFolder.create(out, options_of(config, watch), resume=resume)
    if folder.about().get("status") == "complete":  # resumed, but complete already
        return folder.path
    with writing(folder.path):
        record = TrainingRecord(config, folder, command, watch or {})
        record.begin()
        try:
            stream = recipe.stream(config, folder.path, corpus=corpus, progress=progress)
            record.describe_data(stream.about())
            _run(record, stream, recipe=recipe, monitor=monitor, progress=progress)
        except BaseException as error:
            record.end(error)
            raise
        record.end()
        MonitorStore(folder.path, resume=True, about={}).drop_window()  # kept until the end for resuming
    return folder.path


TEXT = Recipe(make_stream, lambda config, stream: build_model(config, vocab_size=stream.corpus.vocab_size))


def _run(
    record: TrainingRecord, stream: BatchSource, *, recipe: Recipe, monitor: Any, progress: Progress | None
) -> None:
    """Make the model and train it; the global random generators are restored afterwards."""
    config = record.config
    devices = [torch.cuda.current_device()] if stream.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        model = recipe.model(config, stream).to(stream.device).train()
        record.describe_model(model, stream.tokenizer)
        optimizer = make_optimizer(model, config)
        made = monitor is None or hasattr(monitor, "step")
        out = record.folder.path
        entered = contextlib.nullcontext(monitor) if made else monitor(model, stream, optimizer, config, out)
        with entered as step_monitor:
            trainer = Trainer(config, stream, model, optimizer, record, monitor=step_monitor, progress=progress)
            trainer.resume()
            try:
                with _signals() as stop:
                    trainer.run(stop)
            finally:
                record.note_measuring(step_monitor)
        record.note_faults(step_monitor)
        trainer.checkpoints.tidy(config.steps)  # the last state of the monitor is there now


def make_optimizer(model: nn.Module, config: CommonTrainConfig) -> torch.optim.AdamW:
    """AdamW with decoupled decay on matrices and embeddings, none on biases and norms."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = trained[0].device.type == "cuda"
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, betas=config.betas, fused=fused)


def precision(config: CommonTrainConfig, device: torch.device) -> AbstractContextManager[Any]:
    """The autocast context of forward passes: bfloat16 on CUDA or if requested, else none."""
    wanted = config.dtype == "bfloat16" or (config.dtype == "auto" and device.type == "cuda")
    return torch.autocast(device.type, dtype=torch.bfloat16) if wanted else contextlib.nullcontext()


@dataclass
class Trainer:
    """The training loop of one model."""

    config: CommonTrainConfig
    stream: BatchSource
    model: nn.Module
    optimizer: torch.optim.Optimizer
    record: TrainingRecord
    monitor: StepMonitor | None = None
    progress: Progress | None = None
    start: int = 0

    def __post_init__(self) -> None:
        out = self.record.folder.path
        self.log = TrainingLog(out / "log.jsonl", wait=WAIT if self.stream.device.type == "cuda" else 1)
        if self.monitor is not None:
            self.log.tell = self.monitor.log
        scheduled = checkpoint_steps(self.config.checkpoints, self.config.steps)
        self.checkpoints = Checkpoints(out / "checkpoints", self.stream.files, scheduled)
        words: dict[str, Any] = {"parts": self.config.accumulate, "compiled": self._compiles()}
        half = functools.partial(precision, self.config, self.stream.device)
        self.loss = TrainingLoss(self.stream.loss, self.model, half, failed=self._uncompiled, **words)
        self.record.note(compiled=self.loss.compiled)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]

    def _compiles(self) -> bool:
        """Whether the training is compiled; a resumed one as it was, because rounding differs."""
        before = self.record.compiled
        return self.config.compiles(self.stream.device.type) if before is None else before

    def _uncompiled(self, why: str) -> None:
        warnings.warn(why, stacklevel=2)
        self.record.about["warnings"].append(why)
        self.record.note(compiled=False)

    def resume(self) -> None:
        """Resume from the newest checkpoint, if there is one."""
        newest = self.checkpoints.newest()
        if newest is not None:
            self.start = restore(newest, self.model, self.optimizer, monitor=self.monitor)
        self.log.rewind(self.start)

    def run(self, stop: StopRequest) -> None:
        """Run all remaining updates, then let the monitor measure the final state."""
        if self.progress is not None:
            self.progress("train", self.start, self.config.steps)
        for step in range(self.start, self.config.steps):
            if step in self.checkpoints.scheduled and (step > self.start or step == 0):
                self.save(step)
            self.update(step)
            if self.progress is not None:
                self.progress("train", step + 1, self.config.steps)
            if stop.is_set():
                self.save(step + 1)
                raise Interrupted(stop.number, f"stopped by a signal after {step + 1} updates, which were saved")
        if self.start < self.config.steps:
            self.save(self.config.steps)
        if self.monitor is not None:
            with self.monitor.step(self.config.steps):
                pass
        if stop.is_set():  # everything is done, but whoever sent it must hear of it
            raise Interrupted(stop.number, f"stopped by a signal after all {self.config.steps} updates")

    def update(self, step: int) -> None:
        """One update, without device–host synchronisation."""
        rate = self.config.learning_rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with contextlib.nullcontext() if self.monitor is None else self.monitor.step(step):
            loss = self.backward(step)
        norm = nn.utils.clip_grad_norm_(self.parameters, self.config.clip or float("inf"), foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        seen = (step + 1) * self.config.tokens_per_step
        self.log.add(loss, norm, step=step, learning_rate=rate, tokens=seen)

    def backward(self, step: int) -> Tensor:
        """Accumulate gradients of the mean loss over the micro-batches of a step; returns that loss."""
        losses: list[Tensor] = []
        for micro in range(self.config.accumulate):
            hashed = row_hash(torch.tensor(step), torch.tensor(micro), seed=self.config.seed + 1)
            losses.append(self.loss.learn(self.stream.batch(step, micro), seed=int(hashed) & ((1 << 62) - 1)))
        return functools.reduce(torch.add, losses)

    def save(self, step: int) -> None:
        """Flush the log, then write a checkpoint of the state after `step` updates."""
        self.log.flush(sync=True)
        state = {"tokens": step * self.config.tokens_per_step, "seconds": self.log.seconds}
        self.checkpoints.save(step, self.model, self.optimizer, state=state, monitor=self.monitor)
        self.record.note(steps=step)


class StopRequest(threading.Event):
    """Set when a signal asked the training to stop."""

    number: int = signal.SIGINT


@contextlib.contextmanager
def _signals() -> Iterator[StopRequest]:
    """Set an event on SIGINT or SIGTERM, so that the current step ends and is saved; a second signal acts at once."""
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)}

    def request_stop(number: int, _: Any) -> None:
        stop.number = number
        stop.set()
        restore_handlers()

    def restore_handlers() -> None:
        for kind, handler in before.items():
            signal.signal(kind, handler)

    for kind in before:
        signal.signal(kind, request_stop)
    try:
        yield stop
    finally:
        restore_handlers()
