"""Several processes that train one model: each gives what its passes saw, and the first analyses all of it as one step.

Nothing is communicated by hooks or among the collectives of the training, which a process that skips a step, or has no
batch, would leave waiting. Parts are files: the first process makes a folder and tells its name through the store of
torch.distributed; each of the others writes a part for every measured step, and goes on. The first one merges a step
when all parts are there. A part that cannot come any more – its process has ended, or is at a later step – is noted.
At their end the others wait, for as long as the first is at work on it, until it has saved the results of all.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from anisoscope.errors import AnisoscopeError
from anisoscope.models.parallel import averaged_over, few_parameters, shapes_of, together, training_ranks
from anisoscope.monitor.analysis import transport
from anisoscope.monitor.analysis.analysis import Found, Seen
from anisoscope.monitor.analysis.merging import joined_parts, of_another_model
from anisoscope.monitor.analysis.parts import (
    ANALYSING,
    CLOSING,
    TRAINING,
    PartFolder,
    missed_name,
    part_name,
    state_name,
    step_of,
)
from anisoscope.monitor.analysis.pieces import only_pieces
from anisoscope.monitor.guard import FaultGuard
from anisoscope.results.lock import has_ended, this_process
from anisoscope.tangent.proxy import StepRows

Submit = Callable[[Seen], Future[Found]]
_GRACE = 10.0  # seconds in which a process may still say that it has a monitor, and the first one that it ends
_HURRY = 2.0  # the latter if the training has failed here
_CLOSING = 600.0  # seconds for which the first process may be at work on one thing while others wait at their end
_FAREWELL = 3.0  # seconds for which the first process waits until others have heard why it cannot begin
_PATIENCE = 30.0  # seconds at the end for the parts of others
_LIMIT = 120.0  # seconds after a step in which its parts may come, while the training goes on
_POLL = 0.02  # seconds between looks while waiting
_LOOK = 0.2  # seconds between looks into the folder while the training runs
LAST = 10**12 - 1  # a step that nobody reaches
_MOST = 16  # parts that are kept for a folder that is not known yet
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
        self.ending = False  # whether the training has ended here
        name = f"{name}/{members[0]}"
        self._key = f"anisoscope/{name}/{_made[name]}"
        _made[name] += 1
        # keys and values that all processes share; no collective, so that nobody waits
        self._store: Any = dist.distributed_c10d._get_default_store()
        self._lost = False  # whether it has ended
        self._model = model
        self._folder: PartFolder | None = None
        self._begun, self._absent = 0, False  # how often `beginning` was called; whether the first has no monitor
        self._members: dict[int, dict[str, Any]] = {}  # what those said that are known to have a monitor
        self._shapes = shapes_of(model)
        self.others: set[int] = set()  # of those that have one of another model
        self._newest: dict[int, int] = {}  # the last step of which a part of theirs was read
        self._agreed = 0  # how often `agree` was called
        self._pending: deque[_Pending] = deque()  # of the first process
        self._known_steps: set[int] = set()  # of the first process: those it gave a part to, or told about
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
            error = AnisoscopeError(
                f"the first process holds blocks from number {stage[0] + 1} on; expected those from number 1 on: it "
                "joins what all processes saw, and has the embedding table."
            )
            found._fail(error)
            raise error
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
            return replace(seen, rows=StepRows(seen.rows.step), bank=None, weights={}, shown=0, mapped=None)
        return replace(only_pieces(seen) if group.place else seen, together=group.ranks)

    @property
    def first(self) -> bool:
        """Whether this process analyses the steps and has the results."""
        return not self.rank

    @contextlib.contextmanager
    def beginning(self) -> Iterator[None]:
        """Around what may fail in the first process alone, such as a folder that is in use: then it fails in all."""
        self._begun += 1
        done = f"begun/{self._begun}"
        try:
            yield
        except Exception as error:
            if self.first:
                self._fail(error)
            raise
        if self.first:
            self._tell(done, "1")
        elif not self._absent:
            self._absent = not self._awaited(done)
            self._raise_failure()

    def _fail(self, error: Exception) -> None:
        """Tell the others why this process cannot begin; and be there until they know, as a launcher ends them then."""
        said = str(error).strip() or type(error).__name__
        self._tell("failed", said)
        until = time.monotonic() + _FAREWELL
        others = range(1, self.size)
        while time.monotonic() < until and not self._lost and not all(self._known(f"heard/{rank}") for rank in others):
            time.sleep(_POLL)

    def _raise_failure(self) -> None:
        if not self.first and self._known("failed"):
            self._tell(f"heard/{self.rank}", "1")
            raise AnisoscopeError(self._store.get(f"{self._key}/failed").decode())

    def begin(self, folder: Path | None, options: Mapping[str, Any] | None = None) -> None:
        """Tell the others where parts go: within this folder, which all machines must see, or one of this machine.

        `options` are those that a run shares with one that goes on with it.
        """
        if self.first:
            self._folder = PartFolder.made(folder, size=self.size, options=options)
            self._folder.say(TRAINING)
            self._tell("folder", str(self._folder.path))
        else:
            about = {"follows": self.following, "shapes": self._shapes, "process": this_process()}
            self._tell(f"joined/{self.rank}", json.dumps(about))

    def agree(self, mine: Any) -> Any:
        """What the first process says, such as which steps are measured already; others wait some seconds for it."""
        self._agreed += 1
        name = f"agreed/{self._agreed}"
        if self.first:
            self._tell(name, json.dumps(mine))
            return mine
        return json.loads(self._store.get(f"{self._key}/{name}")) if self._awaited(name) else mine

    def _awaited(self, name: str) -> bool:
        """Whether the first process says this, and has not failed; within some seconds in which it does nothing."""
        start, idle = time.monotonic(), 0.0
        while not self._known(name) and not self._known("failed") and idle < _GRACE:
            if self._lost or time.monotonic() > start + _CLOSING:
                break
            time.sleep(_POLL)
            self._find_folder()
            idle += _POLL if self._folder is None or self._folder.first().get("state") != ANALYSING else 0.0
        return self._known(name)

    def _find_folder(self) -> None:
        if self._folder is None and self._known("folder"):
            self._folder = PartFolder(Path(self._store.get(f"{self._key}/folder").decode()))

    def missed(self, step: int) -> None:
        """Say that this process has nothing of a step, so that nobody waits for it."""
        self._known_steps.add(step)
        if not self.first:
            self.post(missed_name(step, self.rank), None)

    def add(self, seen: Seen, submit: Submit) -> Future[Found]:
        """The results of a step, to which this process adds what it has seen; those of other processes are empty."""
        seen = self.share(seen)
        if self.stage is None:
            seen.parameters = self.guard.call("compare the weights of processes", few_parameters, self._model)
        name = part_name(seen.rows.step, seen.study, self.rank)
        if self.first:
            self._known_steps.add(seen.rows.step)
            self._keep(name, seen)
            self._pending.append(one := _Pending(seen, submit))
            return one.future
        self.post(name, seen)
        future: Future[Found] = Future()
        future.set_result(Found())
        return future

    def close_step(self, step: int, state: Mapping[str, Any]) -> None:
        """Keep the state of the first process after a step, to which it has added all that it saw."""
        if self.first and state:
            self._keep(state_name(step), dict(state))

    def _keep(self, name: str, value: Any) -> None:
        """Write what the first process itself has, should it be killed before there are results."""
        if self._folder is not None and self._folder.kept:
            with self.guard.catching("keep its part of the step until there are results"):
                self._folder.put(name, value)
                self._folder.written(name)

    def settle(self, waiting: set[int] | None) -> None:
        """Delete the parts of all steps whose results are on disk: all but those that are waiting; None if no step is.

        The training goes on then.
        """
        if self.first and self._folder is not None:
            if waiting is not None:
                self._folder.forget(waiting)
            self._folder.say(TRAINING)

    def at_work(self) -> None:
        """Say that the first process analyses something, for which others may wait."""
        if self.first and self._folder is not None:
            self._folder.say(ANALYSING)

    def closing(self) -> None:
        """Say that the first process saves its results, and does so until it removes the folder."""
        self.ending = True
        if self.first and self._folder is not None:
            self._folder.say(CLOSING)

    def poll(self, *, wait: bool = False) -> None:
        """Have the steps analysed whose parts are all there; with `wait` all of them."""
        if not self.first:
            self._send()
        for look in self.also:
            look(wait=wait)
        until = time.monotonic() + _PATIENCE
        while self._pending:
            if self._whole(self._pending[0], late=time.monotonic() > until):
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
        return self._folder.names()

    def taken(self, name: str) -> Any:
        """What has come under a name, which is deleted."""
        assert self._folder is not None
        return self._folder.take(name)

    def follows(self, rank: int) -> bool | None:
        """Whether a process adds to what is recorded at every step; None if it has no monitor yet."""
        if not self._joined(rank):
            return None
        return bool(self._members[rank]["follows"]) and rank not in self.others

    def gone(self, rank: int) -> bool:
        """Whether a process that had a monitor is known to have ended, so that nothing comes any more."""
        return self._joined(rank) and bool(has_ended(self._members[rank]["process"]))

    def end(self, last: Any = None, *, saved: bool = True) -> None:
        """Nothing more comes from this process but what it says last, for `last_of_all`.

        The first one removes the parts, if all results are `saved`; the others wait until it does.
        """
        if self.first:
            if self._folder is not None:
                self._folder.leave() if self._folder.kept and not saved else self._folder.remove()
            return
        self._send()
        if self._folder is not None:
            with contextlib.suppress(FileNotFoundError):  # the first one has all that it waited for, and has ended
                self._folder.put(f"ended.{self.rank}", last)
        if self._folder is None:
            self.guard.note(
                f"rank {self.members[0]} has no monitor of this model, so what rank {self.members[self.rank]} saw "
                "is lost; make one in every process, with stage= if each of them holds other blocks"
            )
        else:
            self._await_first(self._folder)

    def _await_first(self, folder: PartFolder) -> None:
        """Wait until the first process has saved everything: a launcher ends all of them if one fails as it exits.

        Not for one that is gone, nor for long for one that trains on, which may itself wait for this process.
        """
        grace = _GRACE if sys.exception() is None else _HURRY
        trained, since, before = 0.0, time.monotonic(), dict[str, Any]()
        while said := folder.first():
            now = time.monotonic()
            since, before = (since, before) if said == before else (now, said)
            trained += _POLL if said["state"] == TRAINING else 0.0
            if trained > grace or now > since + _CLOSING:
                return
            time.sleep(_POLL)
        if words := folder.abandoned(by=self.members[0], seen=self.members[self.rank]):
            self.guard.note(words)

    def last_of_all(self, mine: Any) -> list[Any]:
        """What all processes say last, in their order; of one that does not end in time nothing."""
        until, found = time.monotonic() + _PATIENCE, [mine]
        for rank in range(1, self.size):
            name = f"ended.{rank}"
            while name not in self.names() and time.monotonic() < until and self._joined(rank) and not self.gone(rank):
                time.sleep(_POLL)
            found += [] if (said := self.taken(name)) is None else [said]
        return found

    def _send(self) -> None:
        """Write what is to be sent, once the folder is known; without one the first process has no monitor yet."""
        self._find_folder()
        if self._folder is None:
            del self._unsent[:-_MOST]  # the first process may have no monitor at all
            return
        if not self._folder.path.is_dir() and self._unsent:
            self._unsent.clear()
            self.guard.note(
                f"{self._folder.path} is gone, or not seen here, so rank {self.members[self.rank]} adds nothing; on "
                "several machines give an out= that all of them see"
            )
        while self._unsent:
            name, parcel = self._unsent.pop(0)  # not tried again where the disk is full: its contexts are missing
            self._folder.put(name, parcel)

    def _tell(self, name: str, value: str) -> None:
        """Say something to all processes, unless the store is gone with them."""
        if not self._lost:
            try:
                self._store.set(f"{self._key}/{name}", value)
            except Exception:
                self._lost = True

    def _known(self, name: str) -> bool:
        """Whether some process has said this; False where the store is gone, with the processes of the training."""
        if not self._lost:
            try:
                return bool(self._store.check([f"{self._key}/{name}"]))
            except Exception:
                self._lost = True  # not asked again: each time it would write pages of its own about it
        return False

    def _joined(self, rank: int) -> bool:
        """Whether this process has a monitor, too."""
        if rank not in self._members and self._known(f"joined/{rank}"):
            self._members[rank] = json.loads(self._store.get(f"{self._key}/joined/{rank}"))
            if self.stage is None and self._members[rank]["shapes"] != self._shapes:
                self._leave_out(
                    rank, "trains a model with other parameters", "say stage= if both are parts of one model"
                )
        return rank in self._members

    def _leave_out(self, rank: int, why: str, hint: str) -> None:
        self.others.add(rank)
        self.guard.note(f"rank {self.members[rank]} {why}, so it is left out; {hint}")

    def _whole(self, one: _Pending, *, late: bool) -> bool:
        """Whether all parts of a step are there that will come."""
        assert self._folder is not None
        if not self._folder.path.is_dir():  # somebody deleted it: no part can come
            return True
        there = self.names()
        return all(self._settled(one, rank, there, late=late) for rank in range(1, self.size))

    def _settled(self, one: _Pending, rank: int, there: set[str], *, late: bool) -> bool:
        step = one.seen.rows.step
        name = part_name(step, one.seen.study, rank)
        if rank in self.others or name in there or missed_name(step, rank) in there:
            return True
        if not self._joined(rank):
            return late or time.monotonic() > one.since + _GRACE
        return late or time.monotonic() > one.since + _LIMIT or self.beyond(step, rank, there)

    def beyond(self, step: int, rank: int, there: set[str]) -> bool:
        """Whether nothing more of a step comes from a process that has a monitor: it is at a later one, or has ended.

        Of one that is gone a last part may have come since `there` was listed.
        """
        if rank in self.others or self._newest.get(rank, -1) > step:
            return True
        begun = [other.partition(".")[0] for other in there if other.endswith(f".{rank}")]
        return any(other > f"{step:012d}" for other in begun) or self.gone(rank)  # "ended" comes after all numbers

    def _analyse(self, one: _Pending) -> None:
        """Merge the parts of a step, and have it analysed."""
        assert self._folder is not None
        self.at_work()
        try:
            with self.guard.at(f"step {one.seen.rows.step}"):
                parts, missing = self._parts(one.seen)
                self._note_skipped(one.seen)
                if missing:
                    named = ", ".join(str(self.members[rank]) for rank in missing)
                    alone = "has no monitor, or " if not any(self._joined(r) for r in missing) else ""
                    self.guard.note(f"rank {named} {alone}gave nothing, so its contexts are missing")
                whole = joined_parts(parts, self.guard.note, missing=bool(missing))
            self._follow(one.submit(whole), one.future)
        except Exception as error:
            one.future.set_exception(error)

    def _note_skipped(self, mine: Seen) -> None:
        """Tell of earlier steps that others gave a part to and the first process passed over, which have no results."""
        for step in sorted({step for name in self.names() if (step := step_of(name, mine.study)) is not None}):
            if step < mine.rows.step and step not in self._known_steps:
                self._known_steps.add(step)
                with self.guard.at(f"step {step}"):
                    first = self.members[0]
                    self.guard.note(f"rank {first} gave nothing, and it joins the parts, so the step has no results")

    def _parts(self, mine: Seen) -> tuple[list[Seen], list[int]]:
        """The parts of a step of all processes that train this model, and those that gave none."""
        assert self._folder is not None
        parts, missing = [mine], []
        for rank in range(1, self.size):
            found = self._folder.read(part_name(mine.rows.step, mine.study, rank), _device_of(mine))
            if self._joined(rank) and rank in self.others:
                continue
            if found is not None and of_another_model(found, mine):
                why = f"has other weights than rank {self.members[0]}"
                hint = "to train several models at once, give each its own init_process_group, or none"
                self._leave_out(rank, why, hint)
            elif found is not None:
                parts.append(found)
                self._newest[rank] = mine.rows.step
            else:
                missing.append(rank)
        return parts, missing

    @staticmethod
    def _follow(inner: Future[Found], outer: Future[Found]) -> None:
        def ended(done: Future[Found]) -> None:
            error = done.exception()
            outer.set_result(done.result()) if error is None else outer.set_exception(error)

        inner.add_done_callback(ended)


def _device_of(seen: Seen) -> str:
    """The device of the rows of a step, on which those of others go."""
    rows = [part.x for parts in seen.rows.fit.values() for part in parts]
    return str(rows[0].device) if rows else "cpu"
