"""Where the rows of a monitored run go: into its run folder, and to sinks such as experiment trackers.

The folder is not a sink: it also holds the state that a resumed run needs. It has a table for each measured step and
the state needed for the next one. A step counts as measured when both exist; the table is written first, so a step
without a state is measured again and its table replaced. What could not be written, or was deleted, is written with the
next step or at the end: a disk that was full for a while, or a folder that was gone, costs nothing.
"""

from __future__ import annotations

import importlib
import json
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from anisoscope.errors import AnisoscopeError, UnusableFolder
from anisoscope.results.folder import RunFolder, replace_file
from anisoscope.results.lock import WriterLock
from anisoscope.results.manifest import new_manifest
from anisoscope.results.pieces import in_order
from anisoscope.results.query import Table


class ResultSink(Protocol):
    """Receives every row of a monitored run once; rows from before a resumption are not sent again."""

    def start(self, manifest: Mapping[str, Any]) -> None:
        """The run begins; `manifest` holds its options under `config` and the model's entry under `models`.

        `folder` is its run folder, if it has one, and `resumed` the last step of a run that goes on, else -1.
        """

    def write(self, rows: Table, step: int) -> None:
        """Rows of a measured step: what was measured, and, in a later call, the numbers that the training logged."""

    def finish(self, manifest: Mapping[str, Any]) -> None:
        """The run has ended; `manifest` also holds its `status` (complete or interrupted) and `warnings`."""


TRACKERS = "anisoscope.integrations.trackers.catalogue"  # makes trackers, imported when the first one is wanted
LogTo = str | ResultSink | Sequence[str | ResultSink]


def all_sinks(sinks: Sequence[ResultSink], log_to: LogTo) -> list[ResultSink]:
    """The sinks given, and those that `log_to` names."""
    named = isinstance(log_to, str) or not isinstance(log_to, Sequence) or len(log_to) > 0
    return [*sinks, *(importlib.import_module(TRACKERS).trackers(log_to) if named else ())]


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
    """The run folder of a monitor or a sweep; `about` are options that a resumed run must share with the first.

    With `waits`, a folder that cannot be used yet is no error: `unusable` says why, and `recover` tries again.
    """

    _in_use: ClassVar[weakref.WeakValueDictionary[Path, MonitorStore]] = weakref.WeakValueDictionary()

    def __init__(self, out: str | Path, *, resume: bool, about: dict[str, Any], waits: bool = False) -> None:
        path, self._key = _places(Path(out))
        self.folder, self.resume, self.about = RunFolder(path), resume, about
        self.options = _flat(json.loads(json.dumps(about, default=str)))
        self._files: dict[Path, Callable[[Path], Any]] = {}  # how to write what is in memory anyway, should it be lost
        self._waiting: dict[Path, Callable[[Path], Any] | None] = {}  # what is not written yet; None: to be deleted
        self._ours: set[Path] = set()  # results and states of this run
        self.lock: WriterLock | None = None
        self.unusable: UnusableFolder | None = None
        try:
            self._open()
        except UnusableFolder as error:
            if not waits:
                raise
            self.unusable = error

    def _open(self) -> None:
        """Make the folder and take its lock; an error if it holds a run, or is in use by somebody else."""
        path = self.folder.path
        if self._in_use.get(self._key, self) is not self:
            raise AnisoscopeError(
                f"{str(path)!r} is being written by another monitor of this process; end that one, or give another."
            )
        try:
            if path.exists() and not path.is_dir():
                raise AnisoscopeError(f"monitor folder {str(path)!r} is a file; give a folder.")
            path.mkdir(parents=True, exist_ok=True)
            lock = WriterLock(path)
            for begun in (p for name in ("parts", "state") for p in (path / name).glob(".*")):
                begun.unlink(missing_ok=True)  # partly written files of a killed process
        except OSError as error:
            raise UnusableFolder.because(path, error) from error
        if not self.resume and self._strange():
            raise AnisoscopeError(
                f"{str(path)!r} holds a monitored run; say resume=True to go on with it, or give another."
            )
        self.lock, self.unusable = lock, None

    def _strange(self) -> list[Path]:
        """Results and states in the folder that are not of this run."""
        found = [*self._states().values(), *(self.folder.path / "parts").glob("step-*.parquet")]
        return [path for path in found if path not in self._ours]

    def begin(self) -> None:
        """Call when a monitor begins to measure: no other of this process may write here until `end`."""
        self._in_use[self._key] = self

    def end(self) -> None:
        if self._in_use.get(self._key) is self:
            del self._in_use[self._key]
        if self.lock is not None:
            self.lock.release()

    def recover(self) -> str:
        """What happened to the folder since the last call, in words; empty if it is as it was.

        Where it was deleted, or could not be used until now, everything is written again with the next step. An error
        if another run has begun in its place, or if it still cannot be used.
        """
        if self.lock is None:
            self._open()
            happened = "the run folder can be used now; everything measured so far is written"
        elif self.lock.renew():
            happened = "the run folder had been deleted; it is written again"
        else:
            return ""
        if self._strange():
            raise AnisoscopeError(f"{str(self.folder.path)!r} holds another run by now; nothing more is written there.")
        self._waiting |= self._files
        return happened

    def put_part(self, name: str, table: Table) -> None:
        """A part of the table, to be written by `flush`."""
        self._put(self.folder.part_path(name), self._part_writer(table))

    def _part_writer(self, table: Table) -> Callable[[Path], Any]:
        return lambda path: self.folder.write_part_to(path, table)

    def _put(self, path: Path, write: Callable[[Path], Any]) -> None:
        self._files[path] = self._waiting[path] = write
        self._ours.add(path)

    def flush(self) -> None:
        """Write what waits, the state last, since it counts on the rest; what fails goes on waiting, and raises."""
        for path, write in sorted(self._waiting.items(), key=lambda item: _is_state(item[0])):
            if write is None:
                path.unlink(missing_ok=True)
            else:
                replace_file(path, write)
            del self._waiting[path]
        for _, old in sorted(self._states().items())[:-3]:  # keep three: a training may resume from an older checkpoint
            old.unlink()

    @property
    def flushed(self) -> bool:
        """Whether nothing waits to be written."""
        return not self._waiting and self.lock is not None

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
        self.put_part(f"step-{step:09d}", table)
        self.put_state(step, state, window, number=number)
        self.flush()

    def put_state(self, step: int, state: dict[str, Any], window: Any = None, *, number: int | None = None) -> None:
        """The state after a step, and its moments for an open window, to be written by `flush`.

        Only the newest state is held: with it the earlier ones are of no use that were not written.
        """
        self.keep_window(step, window)
        for files in (self._files, self._waiting):
            for old in filter(_is_state, list(files)):
                del files[old]
        state = {**state, "about": self.options}
        name = f"step-{step if number is None else number:09d}.pt"
        self._put(self.folder.path / "state" / name, lambda path: torch.save(state, path))

    def keep_window(self, step: int, window: Mapping[str, Any] | None) -> None:
        """Write the moments of a step inside an open window with what waits."""
        if window is not None and any(found is not None for found in window.values()):
            path = self.folder.path / "state" / f"window-{step:09d}.pt"
            self._waiting[path] = lambda path: torch.save(window, path)  # too large to hold once the window is closed

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
        self._delete(path for step, path in self._states().items() if step not in done)

    def _delete(self, paths: Iterable[Path]) -> None:
        for path in paths:
            self._files.pop(path, None)
            self._waiting[path] = None
        if self.lock is not None:
            self.flush()

    def drop_window(self) -> None:
        """Delete the moments of the window once it is closed.

        A killed run of `anisoscope train` resumes from its last checkpoint, which may be from before the window
        closed: its moments are kept until the run is complete.
        """
        about = self.folder.about()
        if about.get("kind") != "training" or about.get("status") == "complete":
            self._waiting = {path: write for path, write in self._waiting.items() if not _is_window(path)}
            self._delete((self.folder.path / "state").glob("window-*.pt"))

    def newest(self) -> dict[str, Any] | None:
        """The newest state to resume from, or None; an error if its options differ."""
        states = self._states() if self.resume else {}
        self._ours.update(self._strange() if self.resume else ())  # they are gone on with
        if not states:
            return None
        found: dict[str, Any] = torch.load(states[max(states)], map_location="cpu", weights_only=True)
        # results of different options must not be mixed in one table
        current, stored = self.options, found.get("about") or {}
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
        newer: list[Path] = []
        for path in sorted((self.folder.path / "parts").glob("*.parquet")):
            name, _, number = path.stem.partition("-")
            if number.isdigit() and int(number) in done:
                found.append((int(number), name != "step", path))  # measured before logged
            else:
                newer.append(path)
        tables = {path: Table.read(path) for _, _, path in sorted(found)}
        cards = {path: path.read_bytes() for step, path in self._card_paths().items() if step in done}
        self._files = {path: self._part_writer(table) for path, table in tables.items()}
        self._files |= {path: partial(_write_bytes, content=text) for path, text in cards.items()}
        self._waiting = {path: None for path, write in self._waiting.items() if write is None}
        self._delete(newer)
        return list(tables.values())

    def _card_paths(self) -> dict[int, Path]:
        paths = sorted((self.folder.path / "parts").glob("concepts-*.json"))
        return {int(path.stem.partition("-")[2]): path for path in paths}

    def put_concepts(self, step: int, cards: list[dict[str, Any]]) -> None:
        """The cards of one step, to be written by `flush`; `write_table` joins them into concepts.json."""
        text = json.dumps(cards, ensure_ascii=False, allow_nan=False, default=str)
        if cards:
            path = self.folder.path / "parts" / f"concepts-{step:09d}.json"
            self._put(path, partial(_write_bytes, content=f"{text}\n".encode()))

    def write_table(self, table: Table, *, done: set[int]) -> None:
        """Write all results in one table, in an order that does not depend on interruptions, and concepts.json."""
        if not len(table):
            return
        self.folder.write_table(in_order(table))
        measured = (path for step, path in self._card_paths().items() if step in done)
        if all_cards := [card for path in measured for card in json.loads(path.read_text(encoding="utf-8"))]:
            self.folder.write_json("concepts.json", all_cards)


def _places(out: Path) -> tuple[Path, Path]:
    """A folder as it stays when the training goes to another directory, and the one place that all its names have."""
    try:
        return out.absolute(), Path(os.path.realpath(out))  # links that lead in circles are left as they are
    except OSError:  # the current directory is gone
        return out, out


def _is_state(path: Path) -> bool:
    return path.parent.name == "state" and path.name.startswith("step-")


def _is_window(path: Path) -> bool:
    return path.parent.name == "state" and path.name.startswith("window-")


def _write_bytes(path: Path, content: bytes) -> None:
    path.write_bytes(content)


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
