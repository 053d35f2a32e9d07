"""The folder in which processes leave their parts of measured steps, and what a killed run left there.

The first process makes the folder: within that of the run, or a temporary one of this machine. Every part is one file,
whole from the moment it has its name. Within the folder of a run also the first process writes its own parts and, last
of all, its state after the step; files stay until the results made of them are on disk. So a step to which every
process gave its part is never lost: a run that goes on after it was killed begins with the analysis of what is left.

`first.json` says which process is the first, and what it does: others wait at their end until it has saved everything.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anisoscope
from anisoscope.monitor.analysis import transport
from anisoscope.monitor.analysis.analysis import Seen
from anisoscope.results.lock import has_ended, this_process

PREFIX = "anisoscope-ranks-"
TRAINING, ANALYSING, CLOSING = "training", "analysing", "closing"
_FIRST, _STATE, _NOTHING = "first.json", "state", "nothing"
_PART = re.compile(r"(\d{12})\.(\w+)\.(\d+)")


def part_name(step: int, study: str, rank: int) -> str:
    return f"{step:012d}.{study}.{rank}"


def step_of(name: str, study: str) -> int | None:
    """The step of a part of a study; None for other files.

    >>> step_of(part_name(4, "study", 1), "study"), step_of(state_name(4), "study")
    (4, None)
    """
    found = _PART.fullmatch(name)
    return int(found[1]) if found is not None and found[2] == study else None


def state_name(step: int) -> str:
    """The state of the first process after a step, which it writes when its parts of the step are there."""
    return part_name(step, _STATE, 0)


def missed_name(step: int, rank: int) -> str:
    """Says that a process has nothing of a step."""
    return part_name(step, _NOTHING, rank)


@dataclass
class PartFolder:
    """The folder of one run; `kept`: whether files stay there until results are on disk."""

    path: Path
    kept: bool = False
    about: Mapping[str, Any] = field(default_factory=dict)  # what `first.json` says beside the state
    _merged: dict[str, int] = field(default_factory=dict)  # parts that were read, with their inodes
    _state: str = ""

    @classmethod
    def made(cls, within: Path | None, *, size: int, options: Mapping[str, Any] | None = None) -> PartFolder:
        """A new one for as many processes; within this folder where that can be, else a temporary one."""
        about = {"process": this_process(), "size": size, "version": anisoscope.__version__, "options": options}
        if within is not None:
            with contextlib.suppress(OSError):  # which is noted when results are written there
                within.mkdir(parents=True, exist_ok=True)
                return cls(Path(tempfile.mkdtemp(prefix=PREFIX, dir=within)).absolute(), kept=True, about=about)
        return cls(Path(tempfile.mkdtemp(prefix=PREFIX)).absolute(), about=about)

    # -- parts --

    def put(self, name: str, value: Any) -> None:
        """Write a part, of an object or a parcel of it."""
        parcel = value if isinstance(value, transport.Parcel) else transport.Parcel.of(value)
        parcel.save(self.path / name)

    def names(self) -> set[str]:
        """The parts that have come and were not read yet; none if somebody deleted the folder."""
        try:
            return {path.name for path in self.path.iterdir()} - self._merged.keys()
        except OSError:
            return set()

    def read(self, name: str, device: str = "cpu") -> Any:
        """A part; None if there is none. Its file stays until `forget`, or goes at once where nothing is kept."""
        try:
            file = os.open(self.path / name, os.O_RDWR)
        except FileNotFoundError:
            return None
        self._merged[name] = os.fstat(file).st_ino
        if not self.kept:
            self._remove(name)  # the memory stays until nothing looks at it
        return transport.unpack(file, os.fstat(file).st_size, device=device)

    def take(self, name: str) -> Any:
        """A part, whose file goes at once."""
        found = self.read(name)
        if name in self._merged:
            self._remove(name)
        return found

    def written(self, name: str) -> None:
        """Say that a part is of this process, which has it in memory and does not read it."""
        with contextlib.suppress(OSError):
            self._merged[name] = (self.path / name).stat().st_ino

    def forget(self, waiting: set[int]) -> None:
        """Delete the parts that were read, but for those of steps whose results are not on disk."""
        for name in list(self._merged):
            found = _PART.fullmatch(name)
            if found is None or int(found[1]) not in waiting:
                self._remove(name)

    def _remove(self, name: str) -> None:
        """Delete a part, unless it was replaced since it was read: a training that was rewound gives steps again."""
        path, inode = self.path / name, self._merged.pop(name)
        with contextlib.suppress(OSError):
            if path.stat().st_ino == inode:
                path.unlink()

    def leave(self) -> None:
        """Leave the folder to a run that goes on after this one, which could not save everything."""
        self.about, self._state = {**self.about, "process": {}}, ""
        self.say(CLOSING)

    def remove(self) -> None:
        """Delete the folder; what another process writes meanwhile finds no folder, and keeps none from going."""
        going = self.path.with_name(f"{self.path.name}-going")
        with contextlib.suppress(OSError):
            self.path.rename(going)
        for folder in (going, self.path):
            shutil.rmtree(folder, ignore_errors=True)

    # -- the first process --

    def say(self, state: str) -> None:
        """Say what the first process does."""
        if state != self._state and self._state != CLOSING:  # after which there is nothing else
            self._state = state
            text = json.dumps({**self.about, "state": state, "kept": self.kept})
            with contextlib.suppress(OSError):  # nobody waits for what cannot be read
                hidden = self.path / f".{_FIRST}"
                hidden.write_text(text, encoding="utf-8")
                hidden.replace(self.path / _FIRST)

    def first(self) -> dict[str, Any]:
        """What the first process said last; nothing if it is gone, or has removed the folder."""
        said = _said(self.path)
        return said if said.get("process") and not has_ended(said["process"]) else {}

    def abandoned(self, *, by: int, seen: int) -> str:
        """What is lost if the first process was killed, which neither removed the folder nor left it to another run.

        "" if it was not. A folder that no run could take up is removed.
        """
        said = _said(self.path)
        if not said.get("process") or not has_ended(said["process"]):
            return ""
        if not said["kept"]:
            self.remove()
        again = "begin again with resume=True" if said["kept"] else "with out= and resume=True it could be taken up"
        return (
            f"rank {by} ended before it had saved everything: of what rank {seen} saw since, no table has anything; "
            f"{again}"
        )


def _said(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / _FIRST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# -- what a killed run left --------------------------------------------------------------------------------------------


@dataclass
class LeftStep:
    """A step of a killed run that every process gave its part to, but that has no results."""

    step: int
    state: dict[str, Any]  # of the monitor after it
    parts: dict[str, list[Seen]]  # by study, in the order of the processes
    missing: bool  # whether a process said that it has nothing


def left_steps(within: Path, options: Mapping[str, Any]) -> Iterator[LeftStep]:
    """The steps that a killed run of the same options left in its folder; `total_steps` may differ."""
    for folder in _left_folders(within):
        said = _said(folder)
        theirs, ours = ({**found, "total_steps": None} for found in (said.get("options") or {}, options))
        if said.get("version") != anisoscope.__version__ or theirs != ours or not _private(folder):
            continue
        names = {path.name for path in folder.iterdir()}
        steps = {int(m[1]) for name in names if (m := _PART.fullmatch(name)) and m[2] == _STATE}
        for step in sorted(steps):
            found = _left(PartFolder(folder, kept=True), names, step, int(said["size"]))
            if found is not None:
                yield found


def _left(folder: PartFolder, names: set[str], step: int, size: int) -> LeftStep | None:
    """One step of a killed run; None if a process did not come to give its part."""
    own = [m[2] for name in names if (m := _PART.fullmatch(name)) and int(m[1]) == step and m[3] == "0"]
    parts: dict[str, list[Seen]] = {}
    missing = False
    for study in sorted(set(own) - {_STATE}):
        for rank in range(size):
            found = folder.read(part_name(step, study, rank))
            if found is not None:
                parts.setdefault(study, []).append(found)
            elif missed_name(step, rank) in names or f"ended.{rank}" in names:
                missing = True
            else:
                return None
    return LeftStep(step, folder.read(state_name(step)), parts, missing) if parts else None


def remove_left(within: Path) -> None:
    """Delete the folders of earlier runs."""
    for folder in _left_folders(within):
        shutil.rmtree(folder, ignore_errors=True)


def _left_folders(within: Path) -> list[Path]:
    """The folders of parts whose first process is gone, or has left them."""
    found = sorted(within.glob(f"{PREFIX}*")) if within.is_dir() else []
    return [folder for folder in found if not PartFolder(folder).first()]


def _private(folder: Path) -> bool:
    """Whether nobody else can have written there: parts are read with pickle."""
    status = folder.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022
