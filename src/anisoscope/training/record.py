"""run.json of a training run: what was trained, on what, with what, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import nn

from anisoscope.capture.layout import find_layout
from anisoscope.metrics.metric import STREAM_KINDS
from anisoscope.runs import memory
from anisoscope.runs.checking import what_is_read
from anisoscope.runs.opening import opening
from anisoscope.runs.store import RunFolder
from anisoscope.runs.table import Table
from anisoscope.training.config import Course


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
        self.about = opening(options, command=self.command, seed=self.config.seed, old=old, **words)
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
