"""How far a run is: `run_state` reads names, times and the ends of its files, so that it can be asked every second.

running   a process writes it: its lock is held
done      complete
stopped   interrupted, or its process was killed; --resume goes on
failed    ended by an error
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anisoscope.errors import missing_path
from anisoscope.results.lock import LOCK, is_written

RUNNING, DONE, STOPPED, FAILED = "running", "done", "stopped", "failed"
_ENDED = {"complete": DONE, "interrupted": STOPPED, "failed": FAILED}
_TAIL = 4096  # bytes at the end of a log in which its last line is
_WRITTEN = ("run.json", "log.jsonl", "parts", "partial", "state", "table.parquet")


@dataclass(frozen=True)
class RunState:
    """What is known of a run without reading its results; what does not apply is None."""

    state: str
    step: int | None = None  # updates of the training
    steps: int | None = None  # that there will be
    measured: int | None = None  # the last measured step
    done: int | None = None  # models of a profile, checkpoints of a series, arms of a study
    total: int | None = None
    unit: str = ""  # what these are
    loss: float | None = None
    error: str = ""
    written: float = 0.0  # when anything was last written, in seconds since the epoch
    arms: dict[str, RunState] = field(default_factory=dict)

    def since(self, now: float | None = None) -> float:
        """Seconds since anything was written."""
        return max(0.0, (time.time() if now is None else now) - self.written)

    def words(self, now: float | None = None) -> str:
        """One sentence for whoever reads a run that is not done; empty for one that is.

        >>> RunState("running", 1200, 4000, 1024, written=88.0).words(now=100.0)
        'read while it runs: step 1,200 of 4,000, measured until step 1,024; last written 12 s ago'
        >>> RunState("failed", error="no space").words(), RunState("done").words()
        ('this run is failed (no space)', '')
        """
        if self.state == DONE:
            return ""
        told = "read while it runs" if self.state == RUNNING else f"this run is {self.state}"
        told += f" ({self.error})" if self.error else ""
        how_far = ", ".join(filter(None, (self.progress(), self._measured(), self._arms())))
        ago = f"; last written {duration(self.since(now))} ago" if self.written else ""
        return f"{told}{': ' if how_far else ''}{how_far}{ago}"

    def progress(self) -> str:
        """How far the run is, in a few words."""
        if self.done is not None:
            return f"{self.done:,}{f' of {self.total:,}' if self.total else ''} {self.unit}"
        if self.step is None:
            return ""
        return f"step {self.step:,}{f' of {self.steps:,}' if self.steps else ''}"

    def _measured(self) -> str:
        if self.measured is None:
            return "" if self.step is None else "nothing measured yet"
        whole = f" of {self.steps:,}" if self.steps and self.step is None else ""
        return f"measured until step {self.measured:,}{whole}"

    def _arms(self) -> str:
        open_ = {name: arm for name, arm in self.arms.items() if arm.state != DONE and arm.step is not None}
        return ", ".join(f"{name} at {arm.progress()}" for name, arm in list(open_.items())[:3])


def run_state(folder: str | Path) -> RunState:
    """The state of the run in a folder: from the names and times of its files, its record and its lock."""
    path = Path(folder)
    if not path.is_dir():
        raise missing_path(path)
    about = record_of(path)
    arms = {arm.name: run_state(arm) for arm in arm_folders(path)}
    state = _ENDED.get(str(about.get("status")), "") or (RUNNING if is_written(path) else STOPPED)
    config: dict[str, Any] = found if isinstance(found := about.get("config"), dict) else {}
    last, measured = _last_line(path / "log.jsonl"), _numbers(path / "parts")
    step = int(last["step"]) + 1 if isinstance(last.get("step"), int) else about.get("steps")
    loss = last.get("loss")
    fields: dict[str, Any] = {"step": step, "steps": config.get("steps") or config.get("total_steps")}
    fields["measured"] = max(measured, default=None)
    fields["loss"] = loss if isinstance(loss, float) and math.isfinite(loss) else None
    fields |= _counted(about, config, len(measured), arms)
    written = max([_written(path), *(arm.written for arm in arms.values())])
    return RunState(state, **fields, error=str(about.get("error") or ""), written=written, arms=arms)


def _counted(about: dict[str, Any], config: dict[str, Any], measured: int, arms: dict[str, RunState]) -> dict[str, Any]:
    """What a run without steps of its own has done, of how many."""
    if arms:
        return {"done": sum(arm.state == DONE for arm in arms.values()), "total": len(arms), "unit": "begun arms done"}
    if about.get("kind") == "sweep":
        return {"done": measured, "total": _size(about.get("revisions")) or None, "unit": "checkpoints"}
    if isinstance(config.get("models"), list) and not about.get("kind"):
        return {"done": _size(about.get("models")), "total": len(config["models"]), "unit": "models"}
    return {}


def _size(value: Any) -> int:
    """The length of a list of the record, which somebody may have changed by hand."""
    return len(value) if isinstance(value, list) else 0


def arm_folders(path: Path) -> list[Path]:
    """The runs of the arms of a study that have begun, in order."""
    return sorted(record.parent for record in (path / "arms").glob("*/run.json"))


def record_of(path: Path) -> dict[str, Any]:
    try:
        found = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _last_line(path: Path) -> dict[str, Any]:
    """The last whole line of a log; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            lines = file.read().split(b"\n")[:-1]
        found = json.loads(lines[-1]) if lines else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _numbers(parts: Path) -> list[int]:
    """The steps whose tables are in a folder of parts."""
    try:
        names = [entry.name for entry in os.scandir(parts)]
    except OSError:
        return []
    stems = [name[5:-8] for name in names if name.startswith("step-") and name.endswith(".parquet")]
    return [int(stem) for stem in stems if stem.isdigit()]


def _written(path: Path) -> float:
    """When one of a run's files was last written, or put into one of its folders; the lock is touched all the time."""
    assert LOCK not in _WRITTEN
    found = []
    for name in _WRITTEN:
        try:
            found.append((path / name).stat().st_mtime)
        except OSError:
            continue
    return max(found, default=0.0)


def duration(seconds: float) -> str:
    """A time span in its largest unit.

    >>> [duration(s) for s in (0.4, 12, 150, 9000, 400_000)]
    ['0 s', '12 s', '2 min', '2 h', '4 days']
    """
    for size, unit in ((172_800, "days"), (7200, "h"), (120, "min")):
        if seconds >= size:
            return f"{seconds // {'days': 86_400, 'h': 3600, 'min': 60}[unit]:.0f} {unit}"
    return f"{seconds:.0f} s"
