"""What a monitor writes into its run folder, and what it does where the folder is lost, full or not to be used yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anisoscope.errors import AnisoscopeError, UnusableFolder
from anisoscope.monitor.every_step import FILE, EveryStep
from anisoscope.monitor.guard import FaultGuard
from anisoscope.monitor.sink import MonitorStore
from anisoscope.results.folder import replace_file
from anisoscope.results.query import Table
from anisoscope.tangent.row_map import OpenRows, RowMap, write_map

WRITE = "write results; they wait in memory for the next step"


@dataclass
class MonitorFiles:
    """The files of a monitored run; without a store nothing is written and everything stays in memory."""

    guard: FaultGuard
    windows: Callable[[], Mapping[int, dict[str, Any]]]  # moments of all steps inside open windows, by study
    describe: Callable[[str], None]  # writes run.json with a status
    store: MonitorStore | None = None
    every: EveryStep | None = None
    map: RowMap | None = None

    def begin(self) -> str:
        """Call when the monitor begins to measure; returns a note, if there is one."""
        if self.store is None:
            return ""
        self.store.begin()
        if self.store.lock is None:
            self._go_on_in(None)
            return ""
        return self.store.lock.note

    def end(self) -> None:
        if self.store is not None:
            self.store.end()

    def reach(self) -> bool:
        """Whether the folder can be written now: made again where it was deleted; given up if others have it."""
        with self.guard.catching(WRITE):
            self._recover()
            return self.store is not None
        return False

    def _recover(self) -> None:
        if self.store is None:
            return
        try:
            happened = self.store.recover()
        except UnusableFolder:
            raise  # it is tried again
        except AnisoscopeError:
            self.give_up()
            raise
        if happened:
            lost = self._go_on_in(self.store.folder.path / "state")
            gone = f", but for the rows of {lost} earlier steps on the map" if lost else ""
            self.guard.note(f"{happened}{gone}")
            self.describe("running")

    def give_up(self) -> None:
        """Results stay in memory alone from now on."""
        self.end()
        self.store = None
        self._go_on_in(None)

    def _go_on_in(self, folder: Path | None) -> int:
        """Have everything that is in memory saved in this folder; returns how many steps the map has lost."""
        if folder is not None and self.store is not None:
            for step, found in self.windows().items():
                self.store.keep_window(step, found)
        if self.every is not None:
            self.every.rewrite(folder)
        return self.map.rewrite(folder) if self.map is not None else 0

    def write(self, step: int, table: Table, part: str, after: tuple[dict[str, Any], dict[str, Any]] | None) -> None:
        """Write the table of a measured step and the state and window after it, or a later part of the table."""
        if self.store is None:
            return
        with self.guard.catching(WRITE):
            self.store.put_part(part or f"step-{step:09d}", table)
            if after is not None:
                self.store.put_state(step, *after)
        if self.reach():
            with self.guard.catching(WRITE):
                self.store.flush()

    @property
    def saved(self) -> bool:
        """Whether everything that was given to be written is on disk; also if there is no folder."""
        return self.store is None or self.store.flushed

    def keep_map(self, step: int, rows: OpenRows, tokenizer: Any) -> None:
        """Keep the rows of a step for the map."""
        if self.map is not None:
            with self.guard.catching("keep rows for the map"):
                self.map.keep(step, rows, tokenizer=tokenizer)

    def drop_window(self) -> None:
        """Delete the moments of a window that is closed."""
        if self.store is not None:
            self.guard.call("delete the moments of the window", self.store.drop_window)

    def write_end(self, table: Callable[[], Table], trace: Callable[[], Table], *, done: set[int]) -> None:
        """Write the table and what else the folder has at the end, as much of it as possible."""
        if self.store is None or not self.reach():
            return
        with self.guard.catching("write the steps that wait"):
            self.store.flush()
        with self.guard.catching("write table.parquet"):
            self.store.write_table(table(), done=done)
        if self.every is not None:
            with self.guard.catching(f"write {FILE}"):
                if len(found := trace()):
                    replace_file(self.store.folder.path / FILE, found.write)

    def write_map(self, **labels: Any) -> dict[str, Any]:
        """Write the map of rows at the end of a complete run; returns its entry of run.json."""
        if self.store is None or self.map is None or self.store.lock is None:
            return {}
        self.guard.call("keep rows for the map", self.map.save)
        found = self.guard.call("write the map of rows", write_map, self.store.folder.path, self.map, **labels)
        return {"map": found} if found is not None else {}
