"""Arms: training runs of a study, each under a monitor and into a run folder of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anisoscope.capture.gradients.gradient_pass import untouched
from anisoscope.monitor.monitor import Monitor
from anisoscope.studies.config import schedule_of
from anisoscope.training.config import CommonTrainConfig, TrainConfig
from anisoscope.training.language_model import IGNORED
from anisoscope.training.loop import train
from anisoscope.training.media import train_media

Progress = Callable[[str, int, int], None]  # what, done, of
_PROBED, _PROBED_ON_DEVICE = 32, 128  # contexts of a probe that are looked at together


@dataclass(frozen=True)
class StudyArm:
    """One training run of a study: plain values only, so that it can be sent to a process of its own."""

    model: str  # what it is called in the table
    path: Path
    training: Any  # a CommonTrainConfig, or whatever else the work of a study takes
    watch: Mapping[str, Any]  # options of `training_monitor`
    corpus: Path  # the data as trainings read it, shared by all arms that read the same
    command: tuple[str, ...] = ()


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
    options: dict[str, Any] = {
        "when": schedule_of(when, training.steps),
        "metrics": monitor,
        "out": folder,
        "total_steps": training.steps,
        "rank": rank,
        "name": name or training.arm,
        "seed": training.seed,
        "batch_size": together,
        "resume": True,
    }
    if isinstance(training, TrainConfig):
        options |= {"counts": torch.as_tensor(stream.counts), "tokenizer": stream.corpus.tokenizer}
        options |= {"optimizer": optimizer, "halves": halves, "every_step": every_step}
        if clean and training.task == "masked":
            return CleanMonitor(model, masked=batches, probe=unmasked(batches), **options)
    return Monitor(model, probe=batches, **options)


# -- masked language models, looked at without masks: arms with different objectives are compared on the same tokens ---


class CleanMonitor(Monitor):
    """A Monitor of a masked language model; `masked` are batches with masks and labels, `probe` the text itself.

    The loss on held-out text is still that of the training objective, on masked text.
    """

    def __init__(self, model: Any, *, masked: Sequence[Mapping[str, Tensor]], **options: Any) -> None:
        super().__init__(model, **options)
        self.masked = list(masked)

    @contextlib.contextmanager
    def step(self, step: int, **words: Any) -> Iterator[Monitor]:
        """As Monitor's; a measured step also gets its loss on masked text."""
        with super().step(step, **words) as monitor:
            yield monitor
        if step in self.done and (step, "probe_loss") not in self.logged:
            self.log(step, probe_loss=self.held_out_loss())

    def held_out_loss(self) -> float:
        """Mean cross-entropy of the masked tokens."""
        total, tokens = 0.0, 0
        with untouched(self.model), torch.inference_mode():
            for batch in self.masked:
                count = int((batch["labels"] != IGNORED).sum())
                total, tokens = total + float(self.model(**batch).loss) * count, tokens + count
        return total / max(1, tokens)


def unmasked(batches: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Batches of a masked language model as the text was, nothing in it to be predicted.

    >>> import torch
    >>> unmasked([{"input_ids": torch.tensor([[5, 2]]), "labels": torch.tensor([[-100, 7]])}])[0]
    {'input_ids': tensor([[5, 7]]), 'labels': tensor([[-100, -100]])}
    """
    found = []
    for batch in batches:
        labels = batch["labels"]  # what stood under the masks
        text = labels.where(labels >= 0, batch["input_ids"])
        found.append({"input_ids": text, "labels": labels.new_full(labels.shape, IGNORED)})
    return found
