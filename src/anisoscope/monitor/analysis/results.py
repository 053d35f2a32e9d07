"""What becomes of the results of measured steps: they are kept in memory, in the run folder and by the sinks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from anisoscope.errors import AnisoscopeError
from anisoscope.monitor.analysis.analysis import Found
from anisoscope.monitor.files import MonitorFiles
from anisoscope.monitor.instruments import Instruments
from anisoscope.monitor.open_step import OpenStep, part_name
from anisoscope.results.folder import replace_file
from anisoscope.results.query import Table
from anisoscope.tangent.energy import Record
from anisoscope.tangent.tangent_study import TangentStudy


@dataclass
class StepResults:
    """The results of one monitored training, in the order of its steps, whenever their analysis is finished."""

    files: MonitorFiles
    instruments: Instruments
    studies: Mapping[str, TangentStudy]
    send: Callable[..., None]  # to the sinks
    columns: dict[str, Any]  # of every row
    depths: Mapping[str, int]  # blocks of each stack
    tables: list[Table] = field(default_factory=list)
    concepts: list[dict[str, Any]] = field(default_factory=list)
    done: set[int] = field(default_factory=set)  # measured steps, also those whose results have not come yet
    logged: set[tuple[int, str]] = field(default_factory=set)  # (step, name) of training numbers kept already
    row_count: int = 0  # of the site that saw most, at the last measured step
    newest: tuple[dict[str, Any], dict[int, Any]] | None = None  # states of the studies, and moments of open windows
    _waiting: deque[OpenStep | Callable[[], None]] = field(default_factory=deque)

    def restore(self, done: set[int], tables: list[Table]) -> None:
        """Go on after these steps, with their tables."""
        self.done.clear()
        self.done |= done
        self.tables[:] = tables
        logs = [row for table in tables for row in table.where(kind="training").records()]
        self.logged = {(row["step"], row["metric"]) for row in logs}

    def expect(self, opened: OpenStep) -> None:
        """Add a step that has ended, but whose analysis may not have."""
        self._waiting.append(opened)

    @property
    def pending(self) -> int:
        """Steps whose analysis is not finished."""
        return sum(isinstance(one, OpenStep) and not one.ready for one in self._waiting)

    @property
    def waiting(self) -> set[int]:
        """Steps whose results are not kept yet."""
        return {one.step for one in self._waiting if isinstance(one, OpenStep)}

    def then(self, act: Callable[[], None]) -> None:
        """Call this once the results of all steps so far are kept."""
        self._waiting.append(act)

    def collect(self, *, wait: bool = False) -> None:
        """Keep the results that have come, or all."""
        guard = self.files.guard
        while self._waiting:
            first = self._waiting[0]
            if not isinstance(first, OpenStep):
                self._waiting.popleft()
                first()
            elif wait or first.ready:
                first.wait()
                self._waiting.popleft()  # not before: an interruption costs no step
                with guard.at(f"step {first.step}"):
                    guard.call("keep its results", self._keep_step, first)
            else:
                return

    def _keep_step(self, opened: OpenStep) -> None:
        """Keep the results of one step; without any the step counts as not measured."""
        step, states, window = opened.step, dict[str, Any](), dict[str, Any]()
        measured, came = bool(opened.records) or not opened.parts, False
        for what, part in opened.parts:
            found = self.files.guard.call(what, part.result)
            if found is not None:
                measured = came = True
                self.row_count = found.row_count or self.row_count
                opened.records += found.records
                self._describe(step, found)
                states, window = found.state or states, found.window or window
        if not measured:
            self.done.discard(step)
            return
        known = opened.state and (states or not self.studies)  # otherwise the state before it stays the newest
        if came and not states:
            self.newest = None  # it was not asked for, and what is held is older
        elif states:
            inside = {} if self.newest is None else self.newest[1]
            self.newest = states, _inside(states, {**inside, step: window})
        after = opened.state | {"done": sorted(s for s in self.done if s <= step)} | states
        if self.files.map is not None:  # it has the rows of all processes only now
            after["map"] = self.files.map.state(step)
        self.keep(step, opened.records, after=(after, window) if known else None)

    def _describe(self, step: int, found: Found) -> None:
        """Take over the notes of an analysis that may have run elsewhere, and its cards."""
        for note in found.notes:
            self.instruments.note(note)
        for name, notes in found.study_notes.items():
            self.studies[name].notes = notes
        with self.files.guard.catching("describe concepts"):
            if found.fault:
                raise AnisoscopeError(found.fault)
            cards = [{"model": self.columns["model"], **card} for card in found.cards]
            self.concepts += cards
            if self.files.store is not None and cards:
                self.files.store.put_concepts(step, cards)

    def write_state(self, folder: Path, state: dict[str, Any], *, ask: Callable[[str], Any]) -> None:
        """Write the state of a monitor after the steps so far, with that of the studies, unless the folder is gone."""
        studies = self.newest[0] if self.newest is not None else ask("state")
        state |= {"done": [step for step in state["done"] if step in self.done], **studies}
        if folder.is_dir():
            replace_file(folder / "monitor.pt", lambda path: torch.save(state, path))

    def log(self, step: int, records: list[Record]) -> None:
        """Keep numbers of the training itself at a measured step, each once, after what was measured at it."""
        if step in self.done:
            self.then(partial(self.files.guard.call, "log numbers", self._log, step, records))
            self.collect()

    def _log(self, step: int, records: list[Record]) -> None:
        fresh = [row for row in records if (step, row["metric"]) not in self.logged]
        names = sorted({row["metric"] for row in fresh})
        if step in self.done and fresh:
            self.logged |= {(step, name) for name in names}
            self.keep(step, fresh, part_name(names, step))

    def keep(
        self,
        step: int,
        records: list[Record],
        part: str = "",
        *,
        after: tuple[dict[str, Any], dict[str, Any]] | None = None,
    ) -> None:
        """Add the records of a measured step, or a later part of them; `after` is the state after it and its window."""
        complete = []
        for row in records:
            layer, deep = row.get("layer"), self.depths.get(row.get("stack", "single"), 0)
            more = {"depth": layer / deep} if layer is not None and deep else {}
            complete.append({**self.columns, "stack": "single", **more, **row})
        table = Table.from_records(complete)
        self.tables.append(table)
        self.files.write(step, table, part, after)
        self.send("write", table, step)


def _inside(states: Mapping[str, Any], windows: Mapping[int, Any]) -> dict[int, Any]:
    """The moments of those steps that a window still holds."""
    wanted = {step for state in states.values() if state["frozen"] for step in state["frozen"]["window"]}
    return {step: found for step, found in windows.items() if step in wanted}
