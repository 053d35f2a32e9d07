"""What studies of several arms have in common: each arm is a run of its own under arms/, the study joins and judges.

An arm that is finished is never run again; what an arm measured counts also when it broke off.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from anisoscope.capture.gradients.gradient_pass import untouched
from anisoscope.claims.catalogue import claims, evaluate_claims
from anisoscope.claims.engine.claim import verdicts_to_dicts
from anisoscope.errors import AnisoscopeError
from anisoscope.monitor.monitor import Monitor
from anisoscope.monitor.schedule import Schedule, parse_schedule
from anisoscope.results.folder import RunFolder
from anisoscope.results.manifest import new_manifest
from anisoscope.results.map_file import FILE as MAP
from anisoscope.results.map_file import write_joined
from anisoscope.results.table import Table
from anisoscope.training.config import TrainConfig
from anisoscope.training.loop import train
from anisoscope.training.windows import IGNORED

# A monitor that reads held-out text as it is: no masks in it, whatever the model is trained with.
#
# Arms with different objectives are then compared on the same tokens. The loss on held-out text is still that of the
# training objective, on masked text.


class CleanMonitor(Monitor):
    """A Monitor of a masked language model; `masked` are batches with masks and labels, `probe` the text itself."""

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


Progress = Callable[[str, int, int], None]
REVISITING, SHAPE, INHERENT = "2604.08764", "2311.05928", "2401.12143"  # on arXiv
_PROBED, _PROBED_ON_DEVICE = 32, 128  # contexts of a probe that are looked at together


def probed(stream: Any) -> int:
    """How many contexts of a probe are looked at together: a device is asked as seldom as its memory allows."""
    return _PROBED if stream.device.type == "cpu" else _PROBED_ON_DEVICE


@dataclass
class ArmsStudy(ABC):
    """One run of such a study; what its arms are, a subclass says in `arms`."""

    config: Any
    folder: RunFolder
    command: Sequence[str] = ()
    progress: Progress | None = None
    about: dict[str, Any] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    joined: list[Path] = field(default_factory=list)
    study: ClassVar[str] = ""
    paper: ClassVar[str] = REVISITING  # whose claims are judged in any case

    @abstractmethod
    def arms(self) -> None:
        """Run every arm, and `join` what it measured."""

    def run(self) -> Path:
        """Every arm, then the claims; what was skipped is tried again when a finished study is resumed."""
        old = self.folder.about()
        if old.get("status") == "complete" and not old.get("skipped"):
            return self.folder.path
        self._begin(old)
        started = time.monotonic()
        try:
            self.arms()
        except BaseException as error:
            self._end("interrupted" if isinstance(error, KeyboardInterrupt) else "failed", started, error)
            raise
        self._end("complete", started)
        return self.folder.path

    def _begin(self, old: Mapping[str, Any]) -> None:
        words = {"kind": "study", "study": self.study, "skipped": []}
        seed = self.config.seeds[0] if self.config.seeds else 0
        self.about = new_manifest(asdict(self.config), command=self.command, seed=seed, old=old, **words)
        self.folder.write_about(self.about)

    def _end(self, status: str, started: float, error: BaseException | None = None) -> None:
        self.about["status"] = status
        if error is not None and str(error):
            self.about["error"] = str(error).splitlines()[0]
        self.about["wall_seconds"] = round(self.about["wall_seconds"] + time.monotonic() - started, 1)
        if error is not None:  # it is known how it ended, whatever becomes of the verdicts
            self.folder.write_about(self.about)
        if self.tables:
            table = Table(Table.concat(self.tables).arrow, self.about)
            self.folder.write_table(table)
            judge(self.folder, table, paper=self.paper)
            if any((path / MAP).is_file() for path in self.joined):
                self.about["map"] = write_joined(self.folder.path, self.joined)
        self.folder.write_about(self.about)

    def told(self, name: str) -> Progress | None:
        """The progress of one arm, under its name."""
        tell = self.progress
        return None if tell is None else lambda what, done, total: tell(f"{name}: {what}", done, total)

    def join(self, path: Path, **words: Any) -> None:
        """Take in what an arm measured; `words` are put into its models' descriptions (name, seed)."""
        if not (path / "table.parquet").is_file():
            return
        found = RunFolder.open(path)
        self.tables.append(found.table())
        self.joined.append(path)
        about = found.about()
        for model in about.get("models", []):
            self.about["models"].append({**model, **words, "key": ""})
        name = words.get("name") or path.name
        self.about["warnings"] += [f"{name}: {text}" for text in [*about.get("warnings", []), *_unfinished(about)]]
        for part in ("device", "data"):
            self.about.setdefault(part, about.get(part))
        self.folder.write_about(self.about)

    def skip(self, model: str, reason: str) -> None:
        """Note an arm that could not be had; the others go on."""
        self.about["skipped"].append({"model": model, "reason": reason})
        self.about["warnings"].append(f"{model} was skipped: {reason}")
        self.folder.write_about(self.about)

    def refuse(self, failed: Mapping[str, str], number: int) -> None:
        """Note the arms that failed, of so many, and end with a sentence about them; nothing where none did."""
        self.about["failed"] = [{"arm": name, "reason": reason} for name, reason in failed.items()]
        if not failed:
            return
        self.about["warnings"] += [f"{name} failed: {reason}" for name, reason in failed.items()]
        name, reason = next(iter(failed.items()))
        rest = "the others were measured and judged" if self.tables else "nothing is left to judge"
        raise AnisoscopeError(
            f"{len(failed)} of {number} arms failed (the first, {name}: {reason.rstrip('.')}), and {rest}; mend that, "
            "and the same command with --resume goes on."
        )


def _unfinished(about: Mapping[str, Any]) -> list[str]:
    """What to say of an arm that did not come to its end: its last step is not the last one asked for.

    >>> _unfinished({"status": "interrupted", "steps": 20, "config": {"steps": 40}})
    ['unfinished, after 20 of 40 updates; --resume goes on']
    """
    if about.get("status") == "complete":
        return []
    done, asked = about.get("steps"), (about.get("config") or {}).get("steps")
    return [f"unfinished, after {done} of {asked} updates; --resume goes on" if done and asked else "unfinished"]


# -- arms that are trained ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StudyArm:
    """One training run of a study: plain values only, so that it can be sent to a process of its own."""

    model: str  # what it is called in the table
    path: Path
    training: Any  # a TrainConfig, or whatever else the work of a study takes
    watch: Mapping[str, Any]  # options of `training_monitor`
    corpus: Path  # one tokenised text for all arms
    command: tuple[str, ...] = ()


def train_arm(arm: StudyArm, progress: Progress | None = None) -> None:
    """Train one arm under its monitor; an arm that was interrupted goes on."""

    def attach(model: Any, stream: Any, optimizer: Any, training: TrainConfig, folder: Path) -> Any:
        return training_monitor(model, stream, optimizer, training, folder, name=arm.model, **arm.watch)

    train(
        arm.training,
        arm.path,
        monitor=attach,
        resume=True,
        progress=progress,
        command=arm.command,
        corpus=arm.corpus,
        watch=arm.watch,
    )


def training_monitor(
    model: Any,
    stream: Any,
    optimizer: Any,
    training: TrainConfig,
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
    """The monitor of a training run of ours: a held-out probe, its frequencies, its optimizer, its folder.

    `monitor` is what it measures: a preset by cost, or metrics. With `clean` a masked language model is looked at
    without masks, on the same text as a model that predicts the next token.
    """
    from anisoscope.monitor.monitor import Monitor

    together = probed(stream)
    batches = stream.probe_batches(contexts, batch_size=together)
    options: dict[str, Any] = {
        "when": schedule_of(when, training.steps),
        "metrics": monitor,
        "out": folder,
        "counts": counts_of(stream),
        "tokenizer": stream.corpus.tokenizer,
        "optimizer": optimizer,
        "total_steps": training.steps,
        "rank": rank,
        "name": name or training.arm,
        "seed": training.seed,
        "batch_size": together,
        "halves": halves,
        "every_step": every_step,
        "resume": True,
    }
    if not (clean and training.task == "masked"):
        return Monitor(model, probe=batches, **options)
    return CleanMonitor(model, masked=batches, probe=unmasked(batches), **options)


def unmasked(batches: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Batches of a masked language model as the text was, nothing in it to be predicted.

    >>> import torch
    >>> unmasked([{"input_ids": torch.tensor([[5, 2]]), "labels": torch.tensor([[-100, 7]])}])[0]
    {'input_ids': tensor([[5, 7]]), 'labels': tensor([[-100, -100]])}
    """
    found = []
    for batch in batches:
        labels = batch["labels"]  # what stood under the masks
        found.append(
            {
                "input_ids": labels.where(labels >= 0, batch["input_ids"]),
                "labels": labels.new_full(labels.shape, IGNORED),
            }
        )
    return found


def schedule_of(when: str, steps: int) -> Schedule:
    """The steps that are measured, none of them after the last update.

    >>> str(schedule_of("0,10", 10))
    'at([0, 10])'
    """
    schedule = parse_schedule(when, total=steps)
    late = [step for step in sorted(schedule.steps) if step > steps]
    if late:
        raise AnisoscopeError(
            f"step {late[0]} is to be measured, but the training ends after {steps} updates; name steps up to {steps}, "
            "or train for more --steps."
        )
    return schedule


def counts_of(stream: Any) -> Any:
    """Token frequencies of the training corpus as it is sampled."""
    import torch

    return torch.as_tensor(stream.counts)


def judge_run(folder: Path) -> None:
    """Write verdicts.json of one finished run."""
    found = RunFolder.open(folder)
    judge(found, found.table())


def judge(folder: RunFolder, table: Table, *, paper: str = REVISITING) -> None:
    """Write verdicts.json: the claims of one paper, and any other that the table has the main metric of."""
    measured = set(table.arrow["metric"].to_pylist())
    names = [name for name, each in claims().items() if paper in each.source or each.metrics[0] in measured]
    folder.write_json("verdicts.json", verdicts_to_dicts(evaluate_claims(table, names)))
