"""Where the rows of a monitored run go: into its run folder, and to sinks such as experiment trackers.

The folder is not a sink: it also holds the state that a resumed run needs. It has a table for each measured step and
the state needed for the next one. A step counts as measured when both exist; the table is written first, so a step
without a state is measured again and its table replaced. What could not be written is written with the next step: a
disk that was full for a while costs nothing but the states in between.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from anisoscope.errors import AnisoscopeError
from anisoscope.results.folder import RunFolder, replace_file
from anisoscope.results.lock import WriterLock
from anisoscope.results.manifest import new_manifest
from anisoscope.results.pieces import in_order
from anisoscope.results.query import Table


class ResultSink(Protocol):
    """Receives every row of a monitored run once; rows from before a resumption are not sent again."""

    def start(self, manifest: Mapping[str, Any]) -> None:
        """The run begins; `manifest` holds its options under `config` and the model's entry under `models`."""

    def write(self, rows: Table, step: int) -> None:
        """Rows of a measured step: what was measured, and, in a later call, the numbers that the training logged."""

    def finish(self, manifest: Mapping[str, Any]) -> None:
        """The run has ended; `manifest` also holds its `status` (complete or interrupted) and `warnings`."""


def send(sinks: list[ResultSink], method: str, *args: Any) -> list[str]:
    """Call every sink; one that raises is dropped with a note, since a tracker must not stop a training."""
    notes = []
    for sink in list(sinks):
        try:
            getattr(sink, method)(*args)
        except Exception as error:
            sinks.remove(sink)
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            notes.append(f"the sink {type(sink).__name__} failed in {method} and was dropped ({reason})")
    return notes


class MonitorStore:
    """The run folder of a monitor or a sweep; `about` are options that a resumed run must share with the first."""

    _in_use: ClassVar[weakref.WeakValueDictionary[Path, MonitorStore]] = weakref.WeakValueDictionary()

    def __init__(self, out: str | Path, *, resume: bool, about: dict[str, Any]) -> None:
        self.folder, self.resume, self.about = RunFolder(Path(out)), resume, about
        self._options = _flat(json.loads(json.dumps(about, default=str)))
        self._parts: dict[str, Table] = {}  # everything that belongs into parts/
        self._waiting: dict[Path, Callable[[Path], Any]] = {}  # what could not be written yet
        try:
            self.folder.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise AnisoscopeError(
                f"monitor folder {str(out)!r} cannot be made ({error.strerror}); give another."
            ) from error
        if self.folder.path.resolve() in self._in_use:
            raise AnisoscopeError(
                f"{str(out)!r} is being written by another monitor of this process; end that one, or give another."
            )
        self.lock = WriterLock(self.folder.path)
        for path in (p for name in ("parts", "state") for p in (self.folder.path / name).glob(".*")):
            path.unlink(missing_ok=True)  # partly written files of a killed process
        if not resume and (self._states() or list((self.folder.path / "parts").glob("step-*.parquet"))):
            raise AnisoscopeError(
                f"{str(out)!r} holds a monitored run; say resume=True to go on with it, or give another."
            )

    def begin(self) -> None:
        """Call when a monitor begins to measure: no other of this process may write here until `end`."""
        self._in_use[self.folder.path.resolve()] = self

    def end(self) -> None:
        if self._in_use.get(self.folder.path.resolve()) is self:
            del self._in_use[self.folder.path.resolve()]
        self.lock.release()

    def recover(self) -> bool:
        """Whether the folder was deleted in the meantime; if so, everything is written again with the next step.

        An error if another process has begun a run in its place.
        """
        if not self.lock.renew():
            return False
        for name, table in self._parts.items():
            self._waiting[self.folder.part_path(name)] = self._part_writer(table)
        return True

    def write_part(self, name: str, table: Table) -> None:
        """Write a part of the table, after those that could not be written before."""
        self._parts[name] = table
        self._write(self.folder.part_path(name), self._part_writer(table))

    def _part_writer(self, table: Table) -> Callable[[Path], Any]:
        return lambda path: self.folder.write_part_to(path, table)

    def _write(self, path: Path, write: Callable[[Path], Any]) -> None:
        self._waiting[path] = write
        self.flush()

    def flush(self) -> None:
        """Write what waits; what fails again goes on waiting, and raises."""
        for path, write in list(self._waiting.items()):
            replace_file(path, write)
            del self._waiting[path]

    def describe(self, status: str, model: Mapping[str, Any], **more: Any) -> None:
        """Write run.json, unless the folder is that of `anisoscope train`, which writes its own."""
        old = self.folder.about()
        if old and old.get("kind") != "monitor":
            return
        entry = {"kind": "monitor", "models": [{**model, "notes": []}], **more, "status": status}
        self.folder.write_about(new_manifest(self.about, command=[], seed=self.about.get("seed", 0), old=old, **entry))

    def _states(self) -> dict[int, Path]:
        paths = sorted((self.folder.path / "state").glob("step-*.pt"))
        return {int(path.stem.partition("-")[2]): path for path in paths}

    def write_step(
        self, step: int, table: Table, state: dict[str, Any], window: Any = None, *, number: int | None = None
    ) -> None:
        """Write the table of a step, its moments for an open window, and the state after it.

        States are numbered by step, or by `number` if steps may come in another order.
        """
        if window is not None and any(found is not None for found in window.values()):
            self._waiting[self.folder.path / "state" / f"window-{step:09d}.pt"] = lambda path: torch.save(window, path)
        self.write_part(f"step-{step:09d}", table)
        name = f"step-{step if number is None else number:09d}.pt"
        replace_file(self.folder.path / "state" / name, lambda p: torch.save({**state, "about": self._options}, p))
        for _, old in sorted(self._states().items())[:-3]:  # keep three: a training may resume from an older checkpoint
            old.unlink()

    def window(self, steps: list[int]) -> dict[int, dict[str, Any]]:
        """The moments of these steps, saved for an open window."""
        found: dict[int, dict[str, Any]] = {}
        for step in steps:
            path = self.folder.path / "state" / f"window-{step:09d}.pt"
            if not path.is_file():
                raise AnisoscopeError(
                    f"the moments of step {step} are gone from {str(self.folder.path)!r}, because the run went on "
                    "to its end; go on from a later checkpoint, or begin again in another folder."
                )
            found[step] = torch.load(path, map_location="cpu", weights_only=True)
        return found

    def rewind(self, done: set[int]) -> None:
        """Delete the states of steps that are to be measured again."""
        for step, path in self._states().items():
            if step not in done:
                path.unlink()

    def drop_window(self) -> None:
        """Delete the moments of the window once it is closed.

        A killed run of `anisoscope train` resumes from its last checkpoint, which may be from before the window
        closed: its moments are kept until the run is complete.
        """
        about = self.folder.about()
        if about.get("kind") != "training" or about.get("status") == "complete":
            for path in (self.folder.path / "state").glob("window-*.pt"):
                path.unlink()

    def newest(self) -> dict[str, Any] | None:
        """The newest state to resume from, or None; an error if its options differ."""
        states = self._states() if self.resume else {}
        if not states:
            return None
        found: dict[str, Any] = torch.load(states[max(states)], map_location="cpu", weights_only=True)
        # results of different options must not be mixed in one table
        current, stored = self._options, found.get("about") or {}
        for key in {**current, **stored} if current and stored else ():
            if key != "total_steps" and stored.get(key) != current.get(key):  # a training may be extended
                raise AnisoscopeError(
                    f"{str(states[max(states)].parents[1])!r} holds a run monitored with {key} = {stored.get(key)!r}, "
                    f"not {current.get(key)!r}; repeat its options, or give another folder."
                )
        return found

    def tables(self, done: set[int]) -> list[Table]:
        """The tables of these steps; tables of other steps are newer than the state and are deleted."""
        found: list[tuple[int, bool, Path]] = []
        for path in sorted((self.folder.path / "parts").glob("*.parquet")):
            name, _, number = path.stem.partition("-")
            if number.isdigit() and int(number) in done:
                found.append((int(number), name != "step", path))  # measured before logged
            else:
                path.unlink()
        self._parts = {path.stem: Table.read(path) for _, _, path in sorted(found)}
        self._waiting.clear()
        return list(self._parts.values())

    def write_concepts(self, step: int, cards: list[dict[str, Any]]) -> None:
        """Write the cards of one step; `write_table` joins them into concepts.json."""
        text = json.dumps(cards, ensure_ascii=False, allow_nan=False, default=str)
        if cards:
            path = self.folder.path / "parts" / f"concepts-{step:09d}.json"
            self._write(path, lambda p: p.write_text(text + "\n", encoding="utf-8"))

    def write_table(self, table: Table, *, done: set[int]) -> None:
        """Write all results in one table, in an order that does not depend on interruptions, and concepts.json."""
        if not len(table):
            return
        self.folder.write_table(in_order(table))
        paths = sorted((self.folder.path / "parts").glob("concepts-*.json"))
        measured = (path for path in paths if int(path.stem.partition("-")[2]) in done)
        if all_cards := [card for path in measured for card in json.loads(path.read_text(encoding="utf-8"))]:
            self.folder.write_json("concepts.json", all_cards)


def _flat(about: dict[str, Any]) -> dict[str, Any]:
    """Flatten nested options to one level; drop objects without a stable text, such as functions.

    >>> _flat({"seed": 0, "plan": {"rank": 4}})
    {'seed': 0, 'plan.rank': 4}
    """
    flat: dict[str, Any] = {}
    for key, value in about.items():
        inner = {f"{key}.{name}": part for name, part in _flat(value).items()} if isinstance(value, dict) else None
        flat |= {key: value} if inner is None else inner
    return {key: value for key, value in flat.items() if " at 0x" not in str(value)}
