"""Moments of every step in several processes: each sends the sums over its rows, and the first adds them up.

A process writes files of sums, of several steps each, into the folder of parts (see `ranks`); the first one merges a
step once every process has given its sums, or has gone on without. Nothing is communicated while the training runs.

Second moments are d×d for every site: they are sent at measured steps, and at the others where they are small.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from anisoscope.capture.sites.site import Site, flow_order
from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.tangent import gradient_cosine
from anisoscope.monitor.analysis import ranks as joining
from anisoscope.monitor.analysis.analysis import Found
from anisoscope.monitor.analysis.ranks import Ranks
from anisoscope.stats.moments import QUANTITIES, Trace

Key = tuple[float, int]  # how often the training was rewound, and the step
_END: Key = (float("inf"), 0)
_BEFORE: Key = (-1.0, 0)
_BATCH = 8 << 20  # bytes of a file of sums, which may hold many steps
_MATRICES = 16 << 20  # bytes of second moments that a process sends at any step
MISSING = torch.inf  # stands for a quantity of second moments that were too large to be sent


def step_quantities(trace: Trace) -> Tensor:
    """What is recorded of a step [S, 13], from the sums over rows of S sites and over their gradients [2·S, …]."""
    half = trace.centred
    found = trace.quantities()
    cosine = gradient_cosine(trace.scatter[:half], trace.scatter[half:]).unsqueeze(-1)
    return torch.cat((found[:half], found[half:], cosine), dim=-1)


@cache
def _triangle(d: int, device: torch.device) -> tuple[Tensor, Tensor]:
    rows, columns = torch.triu_indices(d, d, device=device)
    return rows, columns


@dataclass(frozen=True)
class SiteSums:
    """The sums of one process over the rows of some sites of one width at one step, and over their gradients."""

    sites: tuple[Site, ...]
    counts: Tensor  # [2·sites, 5], as in `Trace`
    sums: Tensor  # [2·sites, 2, d]
    triangles: Tensor | None  # upper triangles of the second moments [2·sites, d·(d+1)/2]; None where too large

    @classmethod
    def of(cls, sites: tuple[Site, ...], trace: Trace, *, scale: float, whole: bool) -> SiteSums:
        """Sums on their way to the host; gradients are divided by `scale`, second moments left out unless `whole`."""
        half, d = len(sites), trace.sums.shape[-1]
        size = 8 * trace.scatter.shape[0] * d * (d + 1) // 2
        kept = whole or size <= _MATRICES
        triangles = trace.scatter[:, *_triangle(d, trace.scatter.device)] if kept else None
        counts, sums = trace.counts.clone(), trace.sums.clone()
        counts[half:, 1] *= scale  # Σ1/‖g‖
        counts[half:, 4] /= scale  # Σ‖g‖
        sums[half:, 0] /= scale
        if triangles is not None:
            triangles[half:] /= scale**2
        return cls(sites, *(None if x is None else x.to("cpu", non_blocking=True) for x in (counts, sums, triangles)))  # type: ignore[arg-type]

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(x.nbytes for x in (self.counts, self.sums, self.triangles) if x is not None)

    def trace(self, sites: Sequence[Site]) -> Trace:
        """The sums of these sites, 0 for those that it lacks."""
        d = self.sums.shape[-1]
        place = {site: number for number, site in enumerate(self.sites)}
        found = [number for number, site in enumerate(sites) if site in place]
        here = [place[sites[number]] for number in found]
        to = torch.tensor([*found, *(len(sites) + number for number in found)])
        take = torch.tensor([*here, *(len(self.sites) + number for number in here)])
        scatter = torch.zeros(2 * len(sites), d, d, dtype=torch.float64)
        if self.triangles is not None:
            rows, columns = _triangle(d, torch.device("cpu"))
            for target, source in zip(to.tolist(), take.tolist(), strict=True):
                scatter[target, rows, columns] = self.triangles[source].double()
                scatter[target].T[rows, columns] = self.triangles[source].double()
        counts, sums = torch.zeros(2 * len(sites), 5).double(), torch.zeros(2 * len(sites), 2, d).double()
        counts[to], sums[to] = self.counts[take].double(), self.sums[take].double()
        return Trace(len(sites), counts, sums, scatter)


def merged(parts: Sequence[SiteSums]) -> list[tuple[tuple[Site, ...], Tensor]]:
    """The quantities of a step from the sums of all processes: the sites of each width, and [sites, quantities]."""
    widths: dict[int, list[SiteSums]] = {}
    for part in parts:
        widths.setdefault(part.sums.shape[-1], []).append(part)
    found = []
    for same in widths.values():
        sites = tuple(sorted({site for part in same for site in part.sites}, key=flow_order))
        trace = same[0].trace(sites)
        for part in same[1:]:
            trace = trace.merge(part.trace(sites))
        values = step_quantities(trace)
        if any(part.triangles is None for part in same):
            last = len(QUANTITIES)
            for column, count in ((last - 1, 0), (2 * last - 1, last), (2 * last, last)):
                values[:, column].masked_fill_(values[:, count] > 0, MISSING)
        found.append((sites, values))
    return found


@dataclass
class _Given:
    """The sums of one process at one step."""

    key: Key
    parts: list[SiteSums]
    copied: list[Any] = field(default_factory=list)  # events: when they have reached the host

    @property
    def ready(self) -> bool:
        return all(event.query() for event in self.copied)


class StepSums:
    """The sums of all steps: of this process, and in the first one those of all.

    `keep` receives a merged step, in the first process.
    """

    def __init__(self, ranks: Ranks, keep: Callable[[int, list[tuple[tuple[Site, ...], Tensor]]], None]) -> None:
        self.ranks, self.keep = ranks, keep
        self._epoch, self._last = 0, -1
        self._mine: list[_Given] = []  # not sent yet, or not merged yet
        self._files = 0
        self._theirs: dict[int, dict[Key, list[SiteSums]]] = {rank: {} for rank in range(1, ranks.size)}
        self._reached: dict[int, Key] = dict.fromkeys(range(ranks.size), _BEFORE)  # up to where each process has given
        self._since: dict[Key, float] = {}  # when a step was first waited for
        self._asked: dict[int, tuple[Future[Found], Callable[[int], list[Any]]]] = {}  # by step
        self._looked, self._busy, self._hurry, self._any = 0.0, False, False, False
        ranks.also.append(self.poll)

    def add(self, step: int, parts: list[SiteSums], devices: Sequence[torch.device]) -> None:
        """Give the sums of this process at a step; none if it saw no row."""
        self._epoch += step <= self._last  # the training was rewound
        self._last = step
        copied = [torch.cuda.current_stream(d).record_event() for d in devices if d.type == "cuda"]
        self._mine.append(_Given((self._epoch, step), parts, copied))
        self._reached[self.ranks.rank] = (self._epoch, step)
        large = not self.ranks.first and sum(part.size for one in self._mine for part in one.parts) > _BATCH
        if large and all(one.ready for one in self._mine):  # otherwise after one of the next steps, without waiting
            self.send()

    def send(self) -> None:
        """Write what was given since the last time into a file, in another process than the first."""
        if self.ranks.first or not (self._mine or self._reached[self.ranks.rank] == _END):
            return
        mine, self._mine = self._mine, []
        for event in (event for one in mine for event in one.copied):
            event.synchronize()
        self._files += 1
        told = [(one.key, one.parts) for one in mine], self._reached[self.ranks.rank]
        self.ranks.post(f"sums.{self.ranks.rank}.{self._files:09d}.part", told)

    def close(self) -> None:
        """Nothing more comes from this process."""
        self._reached[self.ranks.rank] = _END
        self._hurry = sys.exception() is not None  # the training failed: others may not come to their end at all
        self.send()

    def ask(self, step: int, records: Callable[[int], list[Any]]) -> Future[Found]:
        """The records of a step, once it is merged, in the first process."""
        if step in self._asked:  # the training was rewound
            self._resolve((self._epoch, step))
        future: Future[Found] = Future()
        self._asked[step] = future, records
        return future

    def poll(self, *, wait: bool = False) -> None:
        """Merge the steps of which everything is there; with `wait` those that were asked for, at the end all."""
        now = time.monotonic()
        if not self.ranks.first or self._busy or (not wait and now < self._looked + joining._LOOK):
            return
        self._looked, self._busy = now, True
        until = now + (0.0 if self._hurry else joining._PATIENCE)
        try:
            while True:
                self._read()
                self._merge(late=wait and time.monotonic() > until, wait=wait)
                if not wait or not (self._asked or self._unfinished()):
                    return
                if time.monotonic() > until and not self._keys():
                    self._resolve(_END)
                    return
                time.sleep(joining._POLL)
        except Exception:
            self._resolve(_END)  # nobody waits for what does not come
            raise
        finally:
            self._busy = False

    def _unfinished(self) -> bool:
        """Whether this process has ended and another one, or the merging, has not."""
        going = any(self.ranks.follows(rank) and self._reached[rank] < _END for rank in self._theirs)
        return self._reached[0] == _END and (bool(self._keys()) or (going and not self._hurry))

    def _keys(self) -> list[Key]:
        """The steps that are not merged."""
        return sorted({one.key for one in self._mine}.union(*self._theirs.values()))

    def _read(self) -> None:
        """Read the files of the others.

        A folder that is listed while files come may show a later one and not an earlier one: a second list has all
        that came before the last of the first.
        """
        ended = {rank for rank in self._theirs if self.ranks.gone(rank)}  # before the list: all of theirs is in it
        names = self.ranks.names()
        ended |= {rank for rank in self._theirs if f"ended.{rank}" in names}
        newest: dict[int, str] = {}
        for name in sorted(name for name in names if name.startswith("sums.")):
            newest[int(name.split(".")[1])] = name
        later = self.ranks.names() if newest or ended else set()
        for name in sorted(name for name in later if name.startswith("sums.")):
            rank = int(name.split(".")[1])
            if name > newest.get(rank, "") and rank not in ended:
                continue
            found = self.ranks.taken(name)
            if found is not None:
                given, self._reached[rank] = found
                self._theirs[rank].update(given)
        self._reached |= dict.fromkeys(ended, _END)

    def _merge(self, *, late: bool, wait: bool) -> None:
        for key in self._keys():
            self._since.setdefault(key, time.monotonic())
            own = next((one for one in self._mine if one.key == key), None)
            if own is not None and not own.ready and not wait:
                return
            if not late and not all(self._settled(rank, key) for rank in self._reached):
                return
            for event in own.copied if own is not None else ():
                event.synchronize()
            given = {0: own.parts} if own is not None else {}
            given |= {rank: theirs.pop(key) for rank, theirs in self._theirs.items() if key in theirs}
            self._mine = [one for one in self._mine if one is not own]
            del self._since[key]
            self._note_missing(key[1], given)
            self._keep(key[1], merged([part for parts in given.values() for part in parts]))
            self._resolve(key)

    def _settled(self, rank: int, key: Key) -> bool:
        """Whether a process has given its sums of a step, or will not."""
        if self._reached[rank] >= key:
            return True
        if not rank:
            return False
        waited = time.monotonic() - self._since[key]
        if not self.ranks.follows(rank):
            return self.ranks.follows(rank) is not None or waited > joining._GRACE
        return waited > joining._LIMIT

    def _note_missing(self, step: int, given: dict[int, list[SiteSums]]) -> None:
        missing = {rank for rank in self._theirs if rank not in given and self.ranks.follows(rank)}
        missing |= {0} if 0 not in given else set()
        if missing:
            named = ", ".join(str(self.ranks.members[rank]) for rank in sorted(missing))
            with self.ranks.guard.at(f"step {step}"):
                self.ranks.guard.note(
                    f"rank {named} gave nothing to every_step; the column n says how many rows there are"
                )

    def _keep(self, step: int, found: list[tuple[tuple[Site, ...], Tensor]]) -> None:
        self._any |= bool(found)
        if found:
            self.keep(step, found)
        elif not self._any:
            self._any = True
            error = AnisoscopeError(
                f"every_step saw no training pass in step {step} in any process; run the model's forward and "
                "loss.backward() inside `with monitor.step(…)`, and attach the monitor before torch.compile."
            )
            self.ranks.guard.caught("follow every step", error)

    def _resolve(self, key: Key) -> None:
        """Give the records of a step that was asked for, of all steps at the end."""
        for step in [step for step in self._asked if key == _END or step == key[1]]:
            future, records = self._asked.pop(step)
            try:
                future.set_result(Found(records=records(step)))
            except Exception as error:
                future.set_exception(error)
