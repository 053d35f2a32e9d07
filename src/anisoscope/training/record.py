"""run.json of a training run: what was trained, on what, with what, and how it ended."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor, nn

from anisoscope.capture.sites.layout import find_layout
from anisoscope.errors import AnisoscopeError
from anisoscope.measurement import memory
from anisoscope.measurement.inspection import what_is_read
from anisoscope.metrics.engine.metric import STREAM_KINDS
from anisoscope.results.folder import RunFolder, replace_file
from anisoscope.results.manifest import new_manifest
from anisoscope.results.table import Table
from anisoscope.training.config import Course

# log.jsonl: one line for every update; numbers wait on the device and are fetched a few steps at a time.


WAIT = 10  # steps whose numbers are fetched together on a GPU: each fetch makes it wait


@dataclass
class TrainingLog:
    """The numbers of every update, in order, each step once.

    `tell` is called with the numbers of a step once they are on the host.
    """

    path: Path
    wait: int = 1
    tell: Callable[[int, dict[str, float]], None] | None = None
    before: float = 0.0  # seconds of training before this process
    started: float = field(default_factory=time.monotonic)
    _pending: list[tuple[dict[str, Any], Tensor, Tensor]] = field(default_factory=list)

    def add(self, loss: Tensor, norm: Tensor, **numbers: Any) -> None:
        """Note one update: its loss and gradient norm stay where they are."""
        numbers["seconds"] = round(self.seconds, 3)
        self._pending.append((numbers, loss, norm))
        if len(self._pending) >= self.wait:
            self.flush()

    @property
    def seconds(self) -> float:
        """Seconds of training so far, those before an interruption included."""
        return self.before + time.monotonic() - self.started

    def flush(self, *, sync: bool = False) -> None:
        """Fetch and write what waits; a number that is not finite ends the run, after its line was written."""
        pending, self._pending = self._pending, []
        if not pending and not sync:
            return
        values = (
            torch.stack([torch.stack([loss, norm]).float() for _, loss, norm in pending]).tolist() if pending else []
        )
        lines = [_line(numbers, *value) for (numbers, _, _), value in zip(pending, values, strict=True)]
        bad = next((k for k, line in enumerate(lines) if not _is_finite(line)), None)
        lines = lines if bad is None else lines[: bad + 1]
        self._append(lines, sync=sync)
        for line in lines if bad is None else lines[:-1]:
            if self.tell is not None:
                self.tell(line["step"], {key: line[key] for key in ("loss", "gradient_norm", "learning_rate")})
        if bad is not None:
            raise _not_finite(lines[bad])

    def _append(self, lines: list[dict[str, Any]], *, sync: bool) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({k: _plain(v) for k, v in line.items()}) + "\n" for line in lines)
            file.flush()
            if sync:
                os.fsync(file.fileno())

    def rewind(self, step: int) -> None:
        """Forget every line from `step` on: a run resumed there writes them again."""
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
    """The lines of a log; a last one that a kill cut off is left out."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


def _line(numbers: dict[str, Any], loss: float, norm: float) -> dict[str, Any]:
    return {"step": numbers["step"], "loss": loss, "gradient_norm": norm, **numbers}


def _is_finite(line: dict[str, Any]) -> bool:
    return math.isfinite(line["loss"]) and math.isfinite(line["gradient_norm"])


def _plain(value: Any) -> Any:
    """JSON has no word for NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _not_finite(line: dict[str, Any]) -> AnisoscopeError:
    which = "loss" if not math.isfinite(line["loss"]) else "gradient norm"
    return AnisoscopeError(
        f"the {which} became {line[which.replace(' ', '_')]} at step {line['step']} (learning rate "
        f"{line['learning_rate']:.3g}), and the run stopped there; lower the learning rate, clip the gradients, or use "
        f"--dtype float32."
    )


def options_of(config: Course, watch: Mapping[str, Any] | None) -> dict[str, Any]:
    """Everything that a resumed run must have in common with its beginning: also what it was watched with."""
    return {**asdict(config), **(watch or {})}


@dataclass
class Record:
    """What run.json says, rewritten at the beginning, at every checkpoint and at the end."""

    config: Course
    folder: RunFolder
    command: Sequence[str] = ()
    watch: Mapping[str, Any] = field(default_factory=dict)  # the monitor's options
    about: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    peak: memory.PeakMemory = field(default_factory=memory.PeakMemory)
    _before: float = 0.0
    _measured: float = 0.0

    def begin(self) -> None:
        """Say that the run is under way."""
        old = self.folder.about()
        self._before = float(old.get("wall_seconds", 0.0))
        self._measured = float(old.get("monitor_seconds", 0.0))
        options = options_of(self.config, self.watch)
        words = {"kind": "training", "steps": int(old.get("steps", 0))}
        self.about = new_manifest(options, command=self.command, seed=self.config.seed, old=old, **words)
        self._write()

    def describe_data(self, words: Mapping[str, Any]) -> None:
        """What the model is trained on, what was left out of it, and the resampling if there is one."""
        self.about["data"] = {"name": self.config.data, **words}
        self.about["warnings"] += self.about["data"].pop("notes", [])
        sampling = self.about["data"].pop("sampling", None)
        if sampling is not None:
            self.about["sampling"] = sampling
            frequency = getattr(self.config, "frequency", "")
            self.about["warnings"].append(f"--frequency {frequency}: {sampling['note']}")
        self._write()

    def describe_model(self, model: nn.Module, tokenizer: Any = None) -> None:
        """Which model it is, in the words of `profile`."""
        parameter = next(model.parameters())
        entry = {
            "key": self.folder.path.name,
            "name": self.config.arm,
            **self.config.entry,
            **what_is_read(model, ["single"], tokenizer, layout=find_layout(model)),
            "architecture": type(model).__name__,
            "parameters": sum(p.numel() for p in model.parameters()),
            "layers": self.config.layers,
            "width": self.config.width,
            "device": str(parameter.device),
            "dtype": str(parameter.dtype).removeprefix("torch."),
        }
        self.about["models"], self.about["device"] = [entry], entry["device"]
        self._write()

    def note_step(self, step: int) -> None:
        """A checkpoint was written after `step` updates."""
        self.about["steps"] = step
        self._write()

    def note_measuring(self, watcher: Any) -> None:
        """How much of the wall time went into measuring, with that before an interruption."""
        if (seconds := getattr(watcher, "seconds", None)) is not None:
            self.about["monitor_seconds"] = round(self._measured + seconds, 2)

    def end(self, status: str, error: BaseException | None = None) -> None:
        """How the run ended."""
        self.about["status"] = status
        if error is not None and str(error):
            self.about["error"] = str(error).splitlines()[0]
        if status == "complete" and (self.folder.path / "table.parquet").is_file():
            self.about["models"][0] |= rows_seen(self.folder.table())
        self._write()

    def _write(self) -> None:
        self.about["wall_seconds"] = round(self._before + time.monotonic() - self.started, 2)
        self.about["peak_memory_mb"] = round(self.peak.look() / memory.MIB)
        if torch.cuda.is_available():
            self.about["peak_cuda_memory_mb"] = round(torch.cuda.max_memory_allocated() / memory.MIB)
        self.folder.write_about(self.about)


def rows_seen(table: Table) -> dict[str, int]:
    """How many rows, in how many contexts, the site of the stream that saw most was measured on; none without any.

    >>> row = {"metric": "drift", "kind": "resid", "layer": 1, "value": 1.0, "n": 64, "contexts": 4}
    >>> rows_seen(Table.from_records([row, {**row, "n": 9}, {**row, "kind": "training", "n": 99}]))
    {'row_count': 64, 'contexts': 4}
    """
    arrow = table.arrow
    stream = pc.is_in(arrow["kind"], value_set=pa.array(sorted(STREAM_KINDS), pa.string()))
    kept = arrow.filter(pc.and_(stream, pc.is_null(arrow["head"])))
    counts = {name: pc.max(kept[column]).as_py() for name, column in (("row_count", "n"), ("contexts", "contexts"))}
    return {name: int(count) for name, count in counts.items() if count}
