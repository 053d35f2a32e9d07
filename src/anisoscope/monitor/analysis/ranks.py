"""Several processes that train one model: each gives what its passes saw, and the first analyses all of it as one step.

Nothing is communicated by hooks or among the collectives of the training, which a process that skips a step, or has no
batch, would leave waiting. Parts are files: the first process makes a folder and tells its name through the store of
torch.distributed; each of the others writes a part for every measured step, and goes on. The first one merges a step
when all parts are there. A part that cannot come any more – its process has ended, or is at a later step – is noted.
Contexts decide by their content where rows belong, so that the merged step is that of one process with all contexts.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from anisoscope.capture.sites.site import Site
from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.bank import Bank
from anisoscope.models.parallel import averaged_over, shapes_of, together, training_ranks
from anisoscope.monitor.analysis import transport
from anisoscope.monitor.analysis.analysis import Found, Seen, TableSeen
from anisoscope.monitor.analysis.pieces import is_split, joined_pieces, only_pieces
from anisoscope.monitor.analysis.stages import join_stages
from anisoscope.monitor.guard import FaultGuard
from anisoscope.tangent.proxy import StepRows

Submit = Callable[[Seen], Future[Found]]
_NOTHING = object()
_GRACE = 10.0  # seconds after a step in which a process may still say that it has a monitor
_PATIENCE = 30.0  # seconds at the end for the parts of others
_LIMIT = 120.0  # seconds after a step in which its parts may come, while the training goes on
_POLL = 0.02  # seconds between looks while waiting
_MOST = 16  # parts that are kept for a folder that is not known yet
_PREFIX = "anisoscope-ranks-"
_made: Counter[str] = Counter()  # monitors of this process by name: the same number in all processes


@dataclass
class _Pending:
    """A step of the first process whose other parts are not there yet."""

    seen: Seen
    submit: Submit
    future: Future[Found] = field(default_factory=Future)
    since: float = field(default_factory=time.monotonic)


def several() -> bool:
    """Whether this process is one of several."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class Ranks:
    """This process among those that train the model."""

    stage: tuple[int, int] | None = None  # of a pipeline: blocks before those of this process, and in all

    def __init__(self, name: str, guard: FaultGuard, model: nn.Module, members: Sequence[int]) -> None:
        self.members, self.guard = list(members), guard
        self.rank, self.size = self.members.index(dist.get_rank()), len(members)
        self.together = together(model)  # processes with the same contexts, None if each has its own
        self.averaged = averaged_over(model)  # losses of processes whose mean is trained on
        alike = 1 if self.together is None else len(self.together.ranks)
        self.turn = self.rank // alike, self.size // alike  # of the passes of a step: which are of this process
        self.following = False  # whether this process adds to what is recorded at every step
        self.also: list[Callable[..., None]] = []  # called by `poll`
        name = f"{name}/{members[0]}"
        self._key = f"anisoscope/{name}/{_made[name]}"
        _made[name] += 1
        # keys and values that all processes share; no collective, so that nobody waits
        self._store: Any = dist.distributed_c10d._get_default_store()
        self._folder: Path | None = None
        self._members: set[int] = set()  # known to have a monitor
        self._following: dict[int, bool] = {}
        self._shapes = shapes_of(model)
        self._others: set[int] = set()  # of those that have one of another model
        self._agreed = 0  # how often `agree` was called
        self._pending: deque[_Pending] = deque()  # of the first process
        self._unsent: list[tuple[str, transport.Parcel]] = []  # of another one, until it knows the folder

    @classmethod
    def here(cls, name: str, guard: FaultGuard, model: nn.Module, stage: tuple[int, int] | None = None) -> Ranks | None:
        """None if one process trains alone; `stage` is given if the others have other blocks of the model."""
        if not several():
            return None
        members = training_ranks(model) if stage is None else list(range(dist.get_world_size()))
        if len(members) == 1 or dist.get_rank() not in members:
            return None
        found = cls(name if stage is None else "stage", guard, model, members)  # stages are of different classes
        found.stage = stage
        if stage is not None and stage[0] and found.first:
            raise AnisoscopeError(
                f"the first process holds blocks from number {stage[0] + 1} on; expected those from number 1 on: it "
                "joins what all processes saw, and has the embedding table."
            )
        return found

    @property
    def dealt(self) -> tuple[int, int]:
        """Which part of a probe this process looks at, and of how many: all of it if several compute it together."""
        return (self.rank, self.size) if self.together is None else (0, 1)

    @property
    def leads(self) -> bool:
        """Whether this process is the first of those that compute the same contexts."""
        return self.together is None or not self.together.place

    def share(self, seen: Seen) -> Seen:
        """What this process adds to a step: of several with the same contexts one adds what is the same in all.

        A probe is read by all processes where some look at the same contexts: those of the first count.
        """
        if self.stage is not None:
            seen = replace(seen, stage=self.stage, shown=0 if self.stage[0] else seen.shown)
        group = self.together
        if group is None:
            return seen
        if seen.described and self.members[0] not in group.ranks:
            return replace(seen, rows=StepRows(seen.rows.step), bank=None, weights={}, shown=0)
        return replace(only_pieces(seen) if group.place else seen, together=group.ranks)

    @property
    def first(self) -> bool:
        """Whether this process analyses the steps and has the results."""
        return not self.rank

    def begin(self, folder: Path | None) -> None:
        """Tell the others where parts go: within this folder, which all machines must see, or one of this machine."""
        if self.first:
            self._folder = _fresh_folder(folder)
            self._store.set(f"{self._key}/folder", str(self._folder))
        else:
            follows = "every" if self.following else "measured"
            self._store.set(f"{self._key}/joined/{self.rank}", f"{follows} {self._shapes}")

    def agree(self, mine: Any) -> Any:
        """What the first process says, such as which steps are measured already; others wait some seconds for it."""
        self._agreed += 1
        name = f"agreed/{self._agreed}"
        if self.first:
            self._store.set(f"{self._key}/{name}", json.dumps(mine))
            return mine
        until = time.monotonic() + _GRACE
        while not self._known(name) and time.monotonic() < until:
            time.sleep(_POLL)
        return json.loads(self._store.get(f"{self._key}/{name}")) if self._known(name) else mine

    def missed(self, step: int) -> None:
        """Say that this process has nothing of a step, so that nobody waits for it."""
        if not self.first:
            self._unsent.append((_missed(step, self.rank), transport.Parcel.of(None)))
            self._send()

    def add(self, seen: Seen, submit: Submit) -> Future[Found]:
        """The results of a step, to which this process adds what it has seen; those of other processes are empty."""
        seen = self.share(seen)
        if self.first:
            self._pending.append(one := _Pending(seen, submit))
            return one.future
        self._unsent.append((_name(seen, self.rank), transport.Parcel.of(seen)))
        self._send()
        future: Future[Found] = Future()
        future.set_result(Found())
        return future

    def poll(self, *, wait: bool = False) -> None:
        """Have the steps analysed whose parts are all there; with `wait` all of them."""
        if not self.first:
            self._send()
        for look in self.also:
            look(wait=wait)
        until = time.monotonic() + _PATIENCE
        while self._pending:
            try:
                whole = self._whole(self._pending[0], late=time.monotonic() > until)
            except OSError:  # somebody deleted the folder: no part can come
                whole = True
            if whole:
                self._analyse(self._pending.popleft())
            elif not wait:
                return
            else:
                time.sleep(_POLL)

    def post(self, name: str, value: Any) -> None:
        """Have the first process get something else of this name."""
        self._unsent.append((name, transport.Parcel.of(value)))
        self._send()

    def names(self) -> set[str]:
        """What has come, in the first process."""
        assert self._folder is not None
        try:
            return {path.name for path in self._folder.iterdir()}
        except OSError:  # somebody deleted the folder: nothing can come
            return set()

    def taken(self, name: str) -> Any:
        """What has come under a name, which is deleted."""
        return self._take(name, "cpu")

    def follows(self, rank: int) -> bool | None:
        """Whether a process adds to what is recorded at every step; None if it has no monitor yet."""
        if rank not in self._following and self._joined(rank):
            self._following[rank] = self._said(rank)[0] == "every" and rank not in self._others
        return self._following.get(rank)

    def end(self, last: Any = None) -> None:
        """Nothing more comes from this process but what it says last, for `last_of_all`."""
        if not self.first:
            self._unsent.append((f"ended.{self.rank}", transport.Parcel.of(last)))
            self._send()
            if self._folder is None:
                self.guard.note(
                    f"rank {self.members[0]} has no monitor of this model, so what rank {self.members[self.rank]} saw "
                    "is lost; make one in every process, with stage= if each of them holds other blocks"
                )
        elif self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def last_of_all(self, mine: Any) -> list[Any]:
        """What all processes say last, in their order; of one that does not end in time nothing."""
        assert self._folder is not None
        until, found = time.monotonic() + _PATIENCE, [mine]
        for rank in range(1, self.size):
            path = self._folder / f"ended.{rank}"
            while not path.exists() and time.monotonic() < until and self._joined(rank):
                time.sleep(_POLL)
            found += [] if (said := self._take(path.name, "cpu")) is None else [said]
        return found

    def _send(self) -> None:
        """Write what is to be sent, once the folder is known; without one the first process has no monitor yet."""
        if self._folder is None and self._known("folder"):
            self._folder = Path(self._store.get(f"{self._key}/folder").decode())
        if self._folder is None:
            del self._unsent[:-_MOST]  # the first process may have no monitor at all
            return
        if not self._folder.is_dir() and self._unsent:
            self._unsent.clear()
            self.guard.note(
                f"{self._folder} is gone, or not seen here, so rank {self.members[self.rank]} adds nothing; on several "
                "machines give an out= that all of them see"
            )
        while self._unsent:
            name, parcel = self._unsent.pop(0)  # not tried again where the disk is full: its contexts are missing
            parcel.save(self._folder / name)

    def _known(self, name: str) -> bool:
        """Whether some process has said this; False where the store is gone, with the processes of the training."""
        try:
            return bool(self._store.check([f"{self._key}/{name}"]))
        except Exception:
            return False

    def _joined(self, rank: int) -> bool:
        """Whether this process has a monitor, too."""
        if rank not in self._members and self._known(f"joined/{rank}"):
            self._members.add(rank)
            if self.stage is None and self._said(rank)[1] != self._shapes:
                self._others.add(rank)
                self.guard.note(
                    f"rank {self.members[rank]} trains a model with other parameters, so it is left out; say stage= if "
                    "both are parts of one model"
                )
        return rank in self._members

    def _said(self, rank: int) -> tuple[str, str]:
        """What a process said when it joined: whether it follows every step, and the shapes of its parameters."""
        follows, _, shapes = self._store.get(f"{self._key}/joined/{rank}").decode().partition(" ")
        return follows, shapes

    def _whole(self, one: _Pending, *, late: bool) -> bool:
        """Whether all parts of a step are there that will come."""
        assert self._folder is not None
        there = {path.name for path in self._folder.iterdir()}
        return all(self._settled(one, rank, there, late=late) for rank in range(1, self.size))

    def _settled(self, one: _Pending, rank: int, there: set[str], *, late: bool) -> bool:
        name = _name(one.seen, rank)
        if rank in self._others or name in there or _missed(one.seen.rows.step, rank) in there:
            return True
        if not self._joined(rank):
            return late or time.monotonic() > one.since + _GRACE
        late = late or time.monotonic() > one.since + _LIMIT
        begun = [other.partition(".")[0] for other in there if other.endswith(f".{rank}")]
        return late or any(step > name.partition(".")[0] for step in begun)  # "ended" comes after all numbers

    def _analyse(self, one: _Pending) -> None:
        """Merge the parts of a step, and have it analysed."""
        try:
            parts, missing = [one.seen], []
            device = _device_of(one.seen)
            for rank in range(1, self.size):
                found = self._take(_name(one.seen, rank), device)
                if self._joined(rank) and rank in self._others:
                    continue
                parts += [] if found is None else [found]
                missing += [rank] if found is None else []
            if missing:
                named = ", ".join(str(self.members[rank]) for rank in missing)
                alone = "has no monitor, or " if not any(self._joined(r) for r in missing) else ""
                with self.guard.at(f"step {one.seen.rows.step}"):
                    self.guard.note(f"rank {named} {alone}gave nothing, so its contexts are missing")
            parts = self._whole_contexts(parts, one.seen.rows.step)
            if self.stage is not None:
                join_stages(parts, missing=bool(missing))
            self._follow(one.submit(merged(parts)), one.future)
        except Exception as error:
            one.future.set_exception(error)

    def _whole_contexts(self, parts: Sequence[Seen], step: int) -> list[Seen]:
        """The parts, with those of processes that have positions of the same contexts joined; a note if one is gone."""
        groups: dict[Any, list[Seen]] = {}
        for number, part in enumerate(parts):
            groups.setdefault(part.together or number, []).append(part)
        found = []
        for key, group in groups.items():
            if not any(map(is_split, group)):
                found += group
            elif len(group) == len(group[0].together):
                found.append(joined_pieces(group))
            else:
                found.append(replace(only_pieces(group[0]), rows=StepRows(step), bank=None))
                with self.guard.at(f"step {step}"):
                    self.guard.note(f"ranks {', '.join(map(str, key))} share contexts, so all of theirs are missing")
        return found

    def _take(self, name: str, device: str) -> Any:
        """The part of this name, which is deleted."""
        assert self._folder is not None
        path = self._folder / name
        try:
            file = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            return None
        path.unlink()  # the memory stays until nothing looks at it
        return transport.unpack(file, os.fstat(file).st_size, device=device)

    @staticmethod
    def _follow(inner: Future[Found], outer: Future[Found]) -> None:
        def ended(done: Future[Found]) -> None:
            error = done.exception()
            outer.set_result(done.result()) if error is None else outer.set_exception(error)

        inner.add_done_callback(ended)


def _name(seen: Seen, rank: int) -> str:
    return f"{seen.rows.step:012d}.{seen.study}.{rank}"


def _missed(step: int, rank: int) -> str:
    return f"{step:012d}.nothing.{rank}"


def _fresh_folder(folder: Path | None) -> Path:
    """A new folder for parts within this one, where that can be, else a temporary one; what a killed run left goes."""
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.glob(f"{_PREFIX}*"):
                shutil.rmtree(old, ignore_errors=True)
            return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folder)).absolute()
        except OSError:  # which is noted when results are written there
            pass
    return Path(tempfile.mkdtemp(prefix=_PREFIX)).absolute()


def _device_of(seen: Seen) -> str:
    """The device of the rows of a step, on which those of others go."""
    rows = [part.x for parts in seen.rows.fit.values() for part in parts]
    return str(rows[0].device) if rows else "cpu"


def merged(parts: Sequence[Seen]) -> Seen:
    """What several processes saw of one step, as if one had seen it; of the model's own tensors those of the first."""
    first = parts[0]
    rows = _joined_rows([part.rows for part in parts])
    banks = [part.bank for part in parts if part.bank is not None]
    bank = reduce(Bank.merge, banks) if banks else None
    weights: dict[Site, Tensor] = dict(first.weights)
    for part in parts[1:]:
        for site, found in part.weights.items():
            weights[site] = weights[site] + found.to(weights[site].device) if site in weights else found
    readers = next((part.readers for part in parts if part.readers), {})
    table = None if first.table is None else _joined_table(first.table, [p.table for p in parts[1:] if p.table])
    told: dict[str, Any] = {"described": first.described, "saved": first.saved, "shown": sum(p.shown for p in parts)}
    return Seen(rows, bank, first.study, first.constants, table, readers, weights, **told, stage=first.stage)


def _joined_rows(parts: Sequence[StepRows]) -> StepRows:
    """The rows of several processes: batches take turns, as samplers deal them and as one process would read them."""
    out = StepRows(parts[0].step)
    for part in parts:
        out.add_loss(part.loss, part.tokens, part.weighted_loss)
        out.unreached |= part.unreached
    for site in dict.fromkeys(site for part in parts for site in part.fit):
        out.fit[site] = _in_turn([part.fit.get(site, []) for part in parts])
    for site in dict.fromkeys(site for part in parts for site in part.test):
        out.test[site] = _in_turn([part.test.get(site, []) for part in parts])
    for name in ("weights", "embedded", "by_context", "passes"):
        setattr(out, name, _in_turn([getattr(part, name) for part in parts]))
    return out


def _in_turn(lists: Sequence[list[Any]]) -> list[Any]:
    """The first of each list, then the second of each.

    >>> _in_turn([[1, 4], [2], [3, 5]])
    [1, 2, 3, 4, 5]
    """
    return [x for turn in zip_longest(*lists, fillvalue=_NOTHING) for x in turn if x is not _NOTHING]


def _joined_table(first: TableSeen, others: Sequence[TableSeen]) -> TableSeen:
    """The embedding table of the first process, with updates of the types that any of them has read."""
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for name, types, change in (update for table in (first, *others) for update in table.updates):
        found.setdefault(name, []).append((types, change))
    read = [table.read.cpu() for table in (first, *others) if table.read is not None]
    updates = []
    for name, parts in found.items():
        rows = torch.cat([change.to(parts[0][1].device) for _, change in parts])
        types, place = torch.cat([types for types, _ in parts]).unique(return_inverse=True)
        where = torch.empty_like(types).scatter_(0, place, torch.arange(len(place)))
        kept = torch.stack(read).any(0)[types] if read else torch.ones_like(types, dtype=torch.bool)
        if read and len(types) < first.size:  # a process that holds some of the rows gave none, as after a restart
            continue
        if bool(kept.any()):
            updates.append((name, types[kept], rows[where[kept].to(rows.device)]))
    return TableSeen(first.size, first.width, first.output, first.tied, first.since, updates)
