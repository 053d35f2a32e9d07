"""The desk of a monitor: takes what a measured step saw, has it analysed wherever that is done, collects results."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.frequency import TemporalSpread
from anisoscope.monitor.analysis.analysis import Analysis, Found, Seen
from anisoscope.monitor.analysis.analyst import Analyst, BackgroundAnalyst, HereAnalyst, choose_analyst
from anisoscope.monitor.analysis.ranks import Ranks, several
from anisoscope.monitor.analysis.results import StepResults
from anisoscope.monitor.guard import FaultGuard
from anisoscope.results.folder import replace_file

_JOIN, _STATE = "join what several processes saw", "monitor.pt"


class Desk:
    """One for each monitor; `ranks` are the processes of its training, if there are several."""

    results: StepResults  # given once the files are known, which ask the desk

    def __init__(self, analysis: Analysis, guard: FaultGuard, ranks: Ranks | None) -> None:
        self.analyst: Analyst = HereAnalyst(analysis)
        self.guard, self.ranks, self._alone = guard, ranks, not several()
        self.shown = 0  # the sum of hashes of all contexts of measured training batches

    @property
    def first(self) -> bool:
        """Whether results come here: in the only process, or in the first of several."""
        return self.ranks is None or self.ranks.first

    def begin(self, device: torch.device, *, background: bool | None, folder: Path | None) -> None:
        """Ready for steps of a model on this device; parts of other processes go into the folder, if there is one."""
        if self.ranks is not None:
            self.ranks.begin(folder)
        elif several() and self._alone:
            raise AnisoscopeError(
                "torch.distributed was initialised after this monitor was made, which does not know of the other "
                "processes; make it afterwards."
            )
        self.analyst = choose_analyst(self.analyst.analysis, device, background=background if self.first else False)

    def analyse(self, seen: Seen) -> Future[Found]:
        """Have a step analysed, with what other processes saw of it."""
        return self._submit(seen) if self.ranks is None else self.ranks.add(seen, self._submit)

    def _submit(self, seen: Seen) -> Future[Found]:
        self._take_over()
        self.shown = (self.shown + seen.shown) % (1 << 64)
        return self.analyst.submit(seen)

    def ask(self, name: str, *args: Any, **options: Any) -> Any:
        """The result of a method of the analysis, after all steps given so far."""
        while True:
            self._take_over()
            try:
                return self.analyst.ask(name, *args, **options)
            except AnisoscopeError:
                if not self.analyst.ended:  # otherwise it ended just now
                    raise

    def collect(self, *, wait: bool = False) -> None:
        """Keep the results that have come, or all."""
        if self.ranks is not None:
            self.guard.call(_JOIN, partial(self.ranks.poll, wait=wait))
        self.results.collect(wait=wait)

    def agree(self, done: set[int], resumed: int) -> int:
        """Have all processes take the steps that the first has measured as `done`; and the step it resumes from."""
        if self.ranks is None:
            return resumed
        steps, resumed = self.ranks.agree([sorted(done), resumed])
        done.clear()
        done |= set(steps)
        return int(resumed)

    def write_own(self, folder: Path, state: dict[str, Any]) -> None:
        """Write what another process than the first must know to go on: types it has read, rows it holds."""
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(self._own(folder), lambda path: torch.save(state, path))

    def read_state(self, folder: Path) -> dict[str, Any]:
        """The state that this process, or the first, has saved; of the first's nothing that differs by process."""
        own = self._own(folder)
        whose = own if own.is_file() else folder / _STATE
        state: dict[str, Any] = torch.load(whose, map_location="cpu", weights_only=True)
        if whose != own:
            state |= {"watch": {}, "watched": None, "temporal": asdict(TemporalSpread())}
        return state

    def _own(self, folder: Path) -> Path:
        return folder / (_STATE if self.ranks is None or self.first else f"monitor-{self.ranks.rank}.pt")

    def _take_over(self) -> None:
        """If the process of the analysis is gone, or never began, this one does it, from the newest state."""
        if isinstance(self.analyst, BackgroundAnalyst) and (fault := self.analyst.fault):
            self.results.collect(wait=True)
            self.end()
            self.analyst.ask("load", *(self.results.newest or ({}, {})))
            self.guard.note(f"steps are analysed in the training process from here on ({fault})")

    def end(self) -> None:
        """End the process of the analysis, if it has one; what is asked afterwards is answered by this one."""
        analyst, self.analyst = self.analyst, HereAnalyst(self.analyst.analysis)
        analyst.end()

    def close(self, last: Callable[[], Any]) -> None:
        """Leave the other processes with what is to be said last, and end the analysis, whatever it does."""
        if self.ranks is not None:
            self.guard.call("leave the other processes", lambda ranks: ranks.end(last()), self.ranks)
        self.analyst.close()
