"""The files of a training run: log.jsonl with one line per update, run.json, and checkpoints.

A checkpoint is written to a temporary folder and renamed when complete, so that a kill cannot damage it.

    checkpoints/checkpoint-N/     config.json, model.safetensors, tokenizer files: loads like any model
    checkpoints/checkpoint-N/training/   optimizer.pt, state.json, monitor/: only in the newest

Batches and dropout are functions of the seed and the step, so that no generator state has to be saved.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anisoscope.capture.sites.layout import find_layout
from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.inspection import modality_words
from anisoscope.measurement.profile import PeakMemory
from anisoscope.metrics.engine.metric import STREAM_KINDS
from anisoscope.models.load import quiet
from anisoscope.models.placement import device_entry
from anisoscope.results.folder import RunFolder, replace_file, room_on_disk
from anisoscope.results.manifest import diverged_loss, new_manifest, outcome
from anisoscope.results.query import Query, Table
from anisoscope.training.config import CommonTrainConfig

WAIT = 10  # steps whose numbers are fetched together from a GPU: each fetch is a synchronisation


@dataclass
class TrainingLog:
    """Writes the numbers of every update to log.jsonl, in order, each step once.

    `tell` is called with the numbers of a step once they are on the host.
    """

    path: Path
    wait: int = 1
    tell: Callable[..., None] = lambda step, **numbers: None
    before: float = 0.0  # seconds of training before this process
    started: float = field(default_factory=time.monotonic)
    _pending: list[tuple[dict[str, Any], Tensor, Tensor]] = field(default_factory=list)

    def add(self, loss: Tensor, norm: Tensor, **numbers: Any) -> None:
        """Add one update; its loss and gradient norm stay on the device until `flush`."""
        numbers["seconds"] = round(self.seconds, 3)
        self._pending.append((numbers, loss, norm))
        if len(self._pending) >= self.wait:
            self.flush()

    @property
    def seconds(self) -> float:
        """Seconds of training so far, those before an interruption included."""
        return self.before + time.monotonic() - self.started

    def flush(self, *, sync: bool = False) -> None:
        """Fetch and write pending lines; a loss or norm that is not finite is an error after its line is written."""
        pending, self._pending = self._pending, []
        if not pending and not sync:
            return
        pairs = [torch.stack([loss, norm]).float() for _, loss, norm in pending]
        values = torch.stack(pairs).tolist() if pairs else []
        with self.path.open("a", encoding="utf-8") as file:
            for (numbers, _, _), (loss, norm) in zip(pending, values, strict=True):
                step, rate = numbers["step"], numbers["learning_rate"]
                line = {"step": step, "loss": loss, "gradient_norm": norm, **numbers}
                bad = [key for key, value in line.items() if isinstance(value, float) and not math.isfinite(value)]
                file.write(json.dumps({**line, **dict.fromkeys(bad)}) + "\n")  # NaN is not valid JSON
                if {"loss", "gradient_norm"} & set(bad):
                    raise AnisoscopeError(
                        f"the {bad[0].replace('_', ' ')} became {line[bad[0]]} at step {step} (learning rate "
                        f"{rate:.3g}), and the run stopped there; lower the learning rate, clip the gradients, or use "
                        f"--dtype float32."
                    )
                self.tell(step, loss=loss, gradient_norm=norm, learning_rate=rate)
            file.flush()
            if sync:
                os.fsync(file.fileno())

    def rewind(self, step: int) -> None:
        """Delete the lines from `step` on, which a run resumed there writes again."""
        kept = [line for line in read_log(self.path) if line["step"] < step]
        if [line["step"] for line in kept] != list(range(step)):
            raise AnisoscopeError(
                f"{str(self.path)!r} does not hold every step before {step}, where its last checkpoint is; "
                f"restore it, or train again into another --out."
            )
        text = "".join(json.dumps(line) + "\n" for line in kept)
        replace_file(self.path, lambda p: p.write_text(text, encoding="utf-8"))
        self.before = kept[-1]["seconds"] if kept else 0.0


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log, without an incomplete last one."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


def options_of(config: CommonTrainConfig, watch: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options that a resumed run must share with the original one, those of its monitor included."""
    # not asked for is not compiled here, as in records of earlier versions; the entry `compiled` says what was done
    shared = {name: value for name, value in asdict(config).items() if name != "background"}
    return {**shared, "compile": bool(config.compile), **(watch or {})}


@dataclass
class TrainingRecord:
    """The content of run.json, rewritten at the beginning, at every checkpoint and at the end."""

    config: CommonTrainConfig
    folder: RunFolder
    command: Sequence[str] = ()
    watch: Mapping[str, Any] = field(default_factory=dict)  # the monitor's options
    about: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    peak: PeakMemory = field(default_factory=PeakMemory)
    compiled: bool | None = None  # whether a run that is resumed was; None for a new one
    _before: float = 0.0
    _measured: float = 0.0

    def begin(self) -> None:
        """Write run.json of a run that begins or resumes."""
        old = self.folder.about()
        self._before = float(old.get("wall_seconds", 0.0))
        self._measured = float(old.get("monitor_seconds", 0.0))
        self.compiled = old.get("compiled", old.get("config", {}).get("compile"))
        options = options_of(self.config, self.watch)
        entries = {"kind": "training", "steps": int(old.get("steps", 0))}
        self.about = new_manifest(options, command=self.command, seed=self.config.seed, old=old, **entries)
        self.note()

    def note(self, **entries: Any) -> None:
        """Add entries to run.json, with the time and memory used so far."""
        self.about |= {**entries, "wall_seconds": round(self._before + time.monotonic() - self.started, 2)}
        self.about |= self.peak.about()
        self.folder.write_about(self.about)

    def describe_data(self, entries: Mapping[str, Any]) -> None:
        """Add entries of the training data, with notes on what was left out, of its resampling, of target weights."""
        self.about["data"] = {"name": self.config.data, **entries}
        self.about["warnings"] += self.about["data"].pop("notes", [])
        sampling = self.about["data"].pop("sampling", None)
        if sampling is not None:
            self.about["sampling"] = sampling
            frequency = getattr(self.config, "frequency", "")
            self.about["warnings"].append(f"--frequency {frequency}: {sampling['note']}")
        weights = self.about["data"].pop("target_weights", None)
        if weights is not None:
            self.about["target_weights"] = weights
            self.about["warnings"] += [weights["note"]] if weights["note"] else []
        self.note()

    def describe_model(self, model: nn.Module, tokenizer: Any = None) -> None:
        """Add the model's entry, with the same fields as `profile`."""
        parameter = next(model.parameters())
        entry = {
            "key": self.folder.path.name,
            "name": self.config.arm,
            **self.config.entry,
            **modality_words(model, ["single"], tokenizer, layout=find_layout(model)),
            "architecture": type(model).__name__,
            "parameters": sum(p.numel() for p in model.parameters()),
            "layers": self.config.layers,
            "width": self.config.width,
            **device_entry(parameter.device),
            "dtype": str(parameter.dtype).removeprefix("torch."),
        }
        entry |= {"gradients_of": "weighted loss"} if self.watch.get("weighted_gradients") else {}
        self.note(models=[entry], device=entry["device"])

    def note_measuring(self, monitor: Any) -> None:
        """Record the time spent measuring, including that before an interruption."""
        if (seconds := getattr(monitor, "seconds", None)) is not None:
            self.about["monitor_seconds"] = round(self._measured + seconds, 2)

    def note_faults(self, monitor: Any) -> None:
        """Record what the monitor could not do, such as reach a tracker."""
        told = getattr(getattr(monitor, "guard", None), "notes", ())
        self.about["warnings"] += [note for note in told if note not in self.about["warnings"]]

    def end(self, error: BaseException | None = None) -> None:
        """Record how the run ended."""
        if error is None and (self.folder.path / "table.parquet").is_file():
            table = self.folder.table()
            grave = diverged(table, self.about["data"].get("vocab_size"))
            self.about["models"][0] |= {**rows_seen(table), **({"notes": grave} if grave else {})}
            self.about["warnings"] = [*grave, *self.about["warnings"]]
        self.note(**outcome(error))


def rows_seen(table: Table) -> dict[str, int]:
    """The largest numbers of rows and contexts of any site of the stream, for run.json; {} without rows.

    >>> row = {"metric": "drift", "kind": "resid", "layer": 1, "value": 1.0, "n": 64, "contexts": 4}
    >>> types = {**row, "variant": "of=update", "contexts": 99}  # of the embedding table, whose units are types
    >>> rows_seen(Table.from_records([row, {**row, "n": 9}, types, {**row, "kind": "training", "n": 99}]))
    {'row_count': 64, 'contexts': 4}
    """
    stream = Query(table).where(kind=STREAM_KINDS, head=None, of=None)
    counts = {"row_count": stream.numbers("n"), "contexts": stream.numbers("contexts")}
    return {name: int(np.nanmax(numbers)) for name, numbers in counts.items() if (numbers > 0).any()}


def diverged(table: Table, vocabulary: int | None) -> list[str]:
    """The warning for a language model whose held-out loss at the last measured step is above that of guessing.

    Where targets are weighted, the weighted loss counts too: a model may give up much of the one for the other.

    >>> loss = {"metric": "probe_loss", "kind": "training", "value": 9.0}
    >>> diverged(Table.from_records([{**loss, "step": 0}, {**loss, "step": 8, "value": 2.0}]), 256)
    []
    """
    rows = list(Query(table).where(metric=("probe_loss", "weighted_probe_loss")))
    last = max((row.step or 0 for row in rows), default=0)
    if not last:
        return []
    best = min((row for row in rows if row.step == last), key=lambda row: row.value)
    low = best.value if best.low is None or math.isnan(best.low) else best.low
    return diverged_loss(best.value, vocabulary, low=low, step=last)


_NAME = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run; those of `scheduled` steps are kept."""

    path: Path
    tokenizer: Path
    scheduled: Collection[int]

    def save(
        self, step: int, model: nn.Module, optimizer: Optimizer, *, state: dict[str, Any], monitor: Any = None
    ) -> Path:
        """Write the checkpoint after `step` updates; delete unscheduled ones and the training state of older ones."""
        temporary = self.path / f".checkpoint-{step}.{os.getpid()}"
        shutil.rmtree(temporary, ignore_errors=True)
        target = self.path / f"checkpoint-{step}"
        try:
            with room_on_disk(target):
                training = temporary / "training"
                training.mkdir(parents=True)
                with quiet():
                    model.save_pretrained(str(temporary))  # type: ignore[operator]
                for file in self.tokenizer.iterdir():
                    shutil.copy(file, temporary / file.name)
                torch.save(optimizer.state_dict(), training / "optimizer.pt")
                if hasattr(monitor, "save"):
                    (training / "monitor").mkdir()
                (training / "state.json").write_text(json.dumps({"step": step, **state}) + "\n", encoding="utf-8")
            _rename_synced(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # an incomplete checkpoint
        if hasattr(monitor, "save"):  # written when its steps have been analysed; the training does not wait for that
            monitor.save(target / "training" / "monitor", wait=False)
        self.tidy(step)
        return target

    def tidy(self, step: int) -> None:
        """Keep what can be resumed at this step, or soon can be, and scheduled weights; delete everything else."""
        found = self.by_step()
        newest = max((at for at, path in found.items() if at <= step and _complete(path)), default=0)
        for at, path in found.items():
            if not newest <= at <= step:
                shutil.rmtree(path if at not in self.scheduled else path / "training", ignore_errors=True)

    def by_step(self) -> dict[int, Path]:
        """Complete checkpoints by step, in order."""
        paths = {int(match[1]): path for path in self.path.glob("*") if (match := _NAME.fullmatch(path.name))}
        return dict(sorted(paths.items()))

    def newest(self) -> Path | None:
        """The checkpoint to resume from, or None; removes incomplete ones."""
        for path in self.path.glob(".checkpoint-*"):
            shutil.rmtree(path, ignore_errors=True)
        usable = [path for path in self.by_step().values() if _complete(path)]
        return usable[-1] if usable else None


def _complete(path: Path) -> bool:
    """Whether a training can go on from a checkpoint: the state of its monitor comes later, by a hidden name first."""
    monitor = path / "training" / "monitor"
    return (path / "training" / "state.json").is_file() and (not monitor.is_dir() or any(monitor.glob("[!.]*")))


def restore(path: Path, model: nn.Module, optimizer: Optimizer, *, monitor: Any = None) -> int:
    """Load a checkpoint's weights, optimiser state and monitor state; returns its step."""
    try:
        with quiet():
            kind: Any = type(model)
            loaded = kind.from_pretrained(str(path), local_files_only=True, dtype=next(model.parameters()).dtype)
        model.load_state_dict(loaded.state_dict())
        optimizer.load_state_dict(torch.load(path / "training" / "optimizer.pt", map_location="cpu", weights_only=True))
        step = int(json.loads((path / "training" / "state.json").read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise AnisoscopeError(
            f"the checkpoint {str(path)!r} cannot be read ({reason}); delete it to go on from an earlier one."
        ) from error
    if hasattr(monitor, "load") and (path / "training" / "monitor").is_dir():
        monitor.load(path / "training" / "monitor")
    return step


def _rename_synced(temporary: Path, target: Path) -> None:
    """Flush every file to disk, then rename the folder into its place."""
    for path in temporary.rglob("*"):
        if path.is_file():
            with path.open("rb") as handle:
                os.fsync(handle.fileno())
    shutil.rmtree(target, ignore_errors=True)  # left by a run that was rewound to before this step
    temporary.replace(target)
    if hasattr(os, "O_DIRECTORY"):
        parent = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)
