"""log.jsonl: one line for every update; numbers wait on the device and are fetched a few steps at a time."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError
from anisoscope.runs.store import replace_file

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
