"""The desk of a monitor: takes what a measured step saw, has it analysed wherever that is done, collects results."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.frequency import TemporalSpread
from anisoscope.monitor.analysis import ranks as joining
from anisoscope.monitor.analysis.analysis import Analysis, Found, Seen
from anisoscope.monitor.analysis.analyst import Analyst, BackgroundAnalyst, HereAnalyst, choose_analyst
from anisoscope.monitor.analysis.merging import joined_parts, of_another_model
from anisoscope.monitor.analysis.parts import LeftStep, part_name
from anisoscope.monitor.analysis.ranks import Ranks, several
from anisoscope.monitor.analysis.results import StepResults
from anisoscope.monitor.guard import FaultGuard
from anisoscope.results.folder import replace_file

_JOIN, _STATE = "join what several processes saw", "monitor.pt"
_LOSS = "loss"  # the name of parts that are losses


class Desk:
    """One for each monitor; `ranks` are the processes of its training, if there are several."""

    results: StepResults  # given once the files are known, which ask the desk

    def __init__(self, analysis: Analysis, guard: FaultGuard, ranks: Ranks | None) -> None:
        self.analyst: Analyst = HereAnalyst(analysis)
        self.guard, self.ranks, self._alone = guard, ranks, not several()
        self._losses = None if ranks is None else RankLosses(ranks, lambda step, loss: self._keep(step, {"loss": loss}))
        self.shown = 0  # the sum of hashes of all contexts of measured training batches

    @property
    def first(self) -> bool:
        """Whether results come here: in the only process, or in the first of several."""
        return self.ranks is None or self.ranks.first

    def begin(
        self, device: torch.device, *, background: bool | None, folder: Path | None, options: dict[str, Any]
    ) -> None:
        """Ready for steps of a model on this device; parts of all processes go into the folder, if there is one."""
        if self.ranks is not None:
            self.ranks.begin(folder, options)
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
        if (mapped := seen.mapped) is not None:
            seen.mapped = None
            self.results.files.keep_map(seen.rows.step, mapped, self.analyst.analysis.tokenizer)
        return self.analyst.submit(seen)

    def close_step(self, step: int, state: dict[str, Any], *, targets: int | None) -> None:
        """All was given that this process saw of a step; the state after it is kept with that until it has results.

        `targets` is over how many its loss is a mean, if that is known.
        """
        if self.ranks is not None and self._losses is not None:
            self._losses.open(step, targets)
            self.guard.call(_JOIN, self.ranks.close_step, step, state)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Keep numbers that the training logs of a measured step: the loss of all processes, others of the first."""
        numbers = {name: float(value) for name, value in numbers.items()}
        if self._losses is not None and step in self.results.done and "loss" in numbers:
            self._losses.give(step, numbers.pop("loss"))
        if self.first:
            self._keep(step, numbers)

    def _keep(self, step: int, numbers: Mapping[str, float]) -> None:
        place = {"variant": "", "group": "", "kind": "training", "step": step}
        self.results.log(step, [{**place, "metric": name, "value": value} for name, value in numbers.items()])

    def go_on(self, left: LeftStep) -> list[Future[Found]]:
        """Have a step analysed that a killed run left behind."""
        with self.guard.at(f"step {left.step}"):
            ours = [[part for part in parts if not of_another_model(part, parts[0])] for parts in left.parts.values()]
            whole = [joined_parts(parts, self.guard.note, missing=left.missing) for parts in ours]
        return [self._submit(seen) for seen in whole]

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
        if self._losses is not None:
            self.guard.call(_JOIN, partial(self._losses.poll, wait=wait))
        self.results.collect(wait=wait)
        if self.ranks is not None:
            self.guard.call(_JOIN, self.ranks.settle, self.results.waiting if self.results.files.saved else None)

    def at_work(self) -> None:
        """Something is analysed, for which the other processes may wait."""
        if self.ranks is not None:
            self.ranks.at_work()

    def closing(self) -> None:
        """The training has ended, and results are saved."""
        if self.ranks is not None:
            self.ranks.closing()

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
            saved = self.results.files.saved and not self.results.waiting
            self.guard.call("leave the other processes", lambda ranks: ranks.end(last(), saved=saved), self.ranks)
        self.analyst.close()


@dataclass(frozen=True)
class _Loss:
    """What one process logged."""

    value: float
    targets: int | None  # that it is the mean of; None if that is not known
    counts: bool  # whether it is of contexts that no other process gives


class RankLosses:
    """The loss that processes log of a measured step: the first one keeps their mean over all targets.

    They travel as parts do. A process need not log any: the first knows of that once it is at a later step, or ends.
    """

    def __init__(self, ranks: Ranks, keep: Callable[[int, float], None]) -> None:
        self.ranks, self.keep = ranks, keep
        self._targets: tuple[int, int | None] = -1, None  # the last measured step, and the targets of this process
        self._told: set[int] = set()
        self._given: dict[int, dict[int, _Loss]] = {}  # in the first process, by step and process
        self._looked, self._since = 0.0, time.monotonic()
        self._awaited = False  # at the end; what says that others have ended is gone soon after

    def open(self, step: int, targets: int | None) -> None:
        """A step was measured, in which this process has so many targets; None if that is not known."""
        self._targets, self._since = (step, targets), time.monotonic()
        self._told.discard(step)  # if the training was rewound

    def give(self, step: int, loss: float) -> None:
        """The loss of this process; of several for one step the first counts."""
        if step in self._told:
            return
        self._told.add(step)
        mine = _Loss(loss, self._targets[1] if self._targets[0] == step else None, self.ranks.leads)
        if self.ranks.first:
            self._given.setdefault(step, {})[0] = mine
        else:
            self.ranks.post(part_name(step, _LOSS, self.ranks.rank), mine)

    def poll(self, *, wait: bool = False) -> None:
        """Keep the losses that are complete; at the end of the training all, for which it waits some seconds, once.

        Called after `Ranks.poll`, which finds out who trains another model.
        """
        now, ending = time.monotonic(), wait and self.ranks.ending
        if not self.ranks.first or (not wait and now < self._looked + joining._LOOK):
            return
        self._looked = now
        until = now + (joining._GRACE if ending and not self._awaited and sys.exception() is None else 0.0)
        while not self._read() and time.monotonic() < until:
            time.sleep(joining._POLL)
        self._awaited |= ending
        for step in sorted(self._given) if ending else ():
            self._join(step)

    def _read(self) -> bool:
        """Take what has come and keep what is complete; whether nothing is awaited.

        A folder that is listed while files come may show a later one and not an earlier one: a second list has all
        that came before what the first shows.
        """
        there, others = self.ranks.names(), range(1, self.ranks.size)
        # others alone may have the loss: the last stage of a pipeline, or those that log where the first does not
        quiet = self._targets[0] >= 0 and self._targets[0] not in self._told
        others_alone = self.ranks.stage is not None or (self.ranks.ending and quiet)
        steps = [*self._given, *([joining.LAST] if others_alone else [])]
        silent = time.monotonic() > self._since + joining._GRACE  # a process that has no monitor yet has none
        absent = {rank for rank in others if silent and self.ranks.follows(rank) is None}
        past = {(step, rank) for step in steps for rank in others if self.ranks.beyond(step, rank, there)}
        past |= {(step, rank) for step in steps for rank in absent}
        for name in self.ranks.names():
            place, study, rank = [*name.split("."), "", ""][:3]
            if study == _LOSS and (found := self.ranks.taken(name)) is not None:
                self._given.setdefault(int(place), {})[int(rank)] = found
        for step, given in sorted(self._given.items()):
            mine = 0 in given or step != self._targets[0] or self.ranks.ending
            if mine and all(rank in given or (step, rank) in past for rank in others):
                self._join(step)
        monitored = (rank for rank in others if self.ranks.stage is not None or self.ranks.follows(rank) is not None)
        return not self._given and (not others_alone or all((joining.LAST, rank) in past for rank in monitored))

    def _join(self, step: int) -> None:
        given = {rank: loss for rank, loss in self._given.pop(step).items() if rank not in self.ranks.others}
        if counted := [loss for _, loss in sorted(given.items()) if loss.counts]:
            self.keep(step, mean_loss(counted))


def mean_loss(given: Sequence[_Loss]) -> float:
    """The mean over all targets; over processes if their numbers are not known of all, or nobody has any.

    >>> mean_loss([_Loss(1.0, 30, True), _Loss(3.0, 10, True), _Loss(math.nan, 0, True)])
    1.5
    """
    sizes = [loss.targets for loss in given if loss.targets is not None]
    if len(sizes) < len(given) or not any(sizes):
        sizes = [1] * len(given)
    counted = [(loss.value, size) for loss, size in zip(given, sizes, strict=True) if size]
    if len({value for value, _ in counted}) == 1:  # already joined by the training: to the last bit
        return counted[0][0]
    return math.fsum(value * size for value, size in counted) / sum(size for _, size in counted)
