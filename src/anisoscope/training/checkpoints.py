"""Checkpoints that a kill cannot spoil: written beside their place, renamed when complete.

    checkpoints/checkpoint-N/     config.json, model.safetensors, tokenizer files: loads like any model
    checkpoints/checkpoint-N/training/   optimizer.pt, state.json, monitor/: only in the newest

Batches and dropout are functions of the seed and the step, so that no generator state has to be kept.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from anisoscope.errors import AnisoscopeError
from anisoscope.results.folder import room_on_disk
from anisoscope.training.models import hushed

_NAME = re.compile(r"checkpoint-(\d+)")


@runtime_checkable
class SavedMonitor(Protocol):
    """A monitor that survives a kill: its state is kept with the checkpoint of the same step."""

    def save(self, folder: Path) -> None:
        """Write what was gathered before this step into an empty folder."""

    def load(self, folder: Path) -> None:
        """Go back to what `save` wrote there."""


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run. `scheduled` are the steps whose weights stay."""

    path: Path
    tokenizer: Path
    scheduled: Collection[int]

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        state: dict[str, Any],
        monitor: Any = None,
    ) -> Path:
        """Write the checkpoint of `step` (updates done) and take from older ones what only the newest needs."""
        beside = self.path / f".checkpoint-{step}.{os.getpid()}"
        shutil.rmtree(beside, ignore_errors=True)
        target = self.path / f"checkpoint-{step}"
        try:
            with room_on_disk(target):
                self._write(beside, model, optimizer, state={"step": step, **state}, monitor=monitor)
            _settle(beside, target)
        finally:
            shutil.rmtree(beside, ignore_errors=True)  # half a checkpoint only takes room
        self._thin(newest=step)
        return target

    def _write(
        self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, state: dict[str, Any], monitor: Any
    ) -> None:
        training = folder / "training"
        training.mkdir(parents=True)
        with hushed():
            model.save_pretrained(str(folder))  # type: ignore[operator]
        for file in self.tokenizer.iterdir():
            shutil.copy(file, folder / file.name)
        torch.save(optimizer.state_dict(), training / "optimizer.pt")
        if isinstance(monitor, SavedMonitor):
            (training / "monitor").mkdir()
            monitor.save(training / "monitor")
        (training / "state.json").write_text(json.dumps(state) + "\n", encoding="utf-8")

    def _thin(self, *, newest: int) -> None:
        for step, path in self.found().items():
            if step == newest:
                continue
            shutil.rmtree(path if step not in self.scheduled else path / "training", ignore_errors=True)

    def found(self) -> dict[int, Path]:
        """Complete checkpoints by step, in order."""
        paths = self.path.iterdir() if self.path.is_dir() else iter(())
        matches = [(match, path) for path in paths if (match := _NAME.fullmatch(path.name))]
        return {int(match[1]): path for match, path in sorted(matches, key=lambda pair: int(pair[0][1]))}

    def newest(self) -> Path | None:
        """The checkpoint to go on from; what a kill left half written is removed."""
        if self.path.is_dir():
            for path in self.path.glob(".checkpoint-*"):
                shutil.rmtree(path, ignore_errors=True)
        usable = [path for path in self.found().values() if (path / "training" / "state.json").is_file()]
        return usable[-1] if usable else None


def restore(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, monitor: Any = None) -> dict[str, Any]:
    """Put a checkpoint's weights, optimiser state and monitor state in place; its `state.json` comes back."""
    try:
        with hushed():
            kind: Any = type(model)
            loaded = kind.from_pretrained(str(path), local_files_only=True, dtype=next(model.parameters()).dtype)
        model.load_state_dict(loaded.state_dict())
        optimizer.load_state_dict(torch.load(path / "training" / "optimizer.pt", map_location="cpu", weights_only=True))
        state: dict[str, Any] = json.loads((path / "training" / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise AnisoscopeError(
            f"the checkpoint {str(path)!r} cannot be read ({reason}); delete it to go on from an earlier one."
        ) from error
    if isinstance(monitor, SavedMonitor) and (path / "training" / "monitor").is_dir():
        monitor.load(path / "training" / "monitor")
    return state


def _settle(beside: Path, target: Path) -> None:
    """Flush every file to disk, then rename the folder into its place."""
    for path in beside.rglob("*"):
        if path.is_file():
            with path.open("rb") as handle:
                os.fsync(handle.fileno())
    shutil.rmtree(target, ignore_errors=True)  # of a run that was rewound further than here
    beside.replace(target)
    if hasattr(os, "O_DIRECTORY"):
        parent = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)
