"""Several processes that measure one model together: each reads batches of its own, and the first has all statistics.

Every process calls the same function, as under torchrun. Each fills a bank; banks merge, and contexts decide by their
content where rows belong, so that the merged bank is that of one process with all batches. What processes tell each
other goes through the store of torch.distributed (keys and values), never through its collectives: nobody waits in
silence. A process that fails says why, and whoever waits for it fails with that sentence; one that gives no sign for
some minutes is taken for dead.

Passes of a model whose parameters are sharded are collectives themselves. There all processes run as many passes: one
that has no batch left repeats its last one, which does not count.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from anisoscope.capture.row import Batch
from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.bank import Bank
from anisoscope.models.parallel import sharded, together, training_ranks
from anisoscope.option import Progress

_LIMIT = 600.0  # seconds without a sign after which a process is taken for dead
_SIGN = 1.0  # least seconds between signs
_POLL = 0.01  # seconds between looks while waiting
_FAREWELL = 5.0  # seconds that a process which failed waits for others to hear of it
_ARRIVAL = 120.0  # seconds in which all processes of a command must have started
_PIECE = 2 << 20  # bytes of one value of the store, which takes at most 8 MiB
_AHEAD = 8  # values that may wait to be taken
_STARTED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # what torchrun tells a process
_made: Counter[int] = Counter()  # by first member: the same number in all processes
Value = TypeVar("Value")


class PeerFailure(AnisoscopeError):
    """Another process failed, or gave no sign; the message says which, and why."""


class Processes:
    """This process among those that measure one model together."""

    def __init__(
        self, members: list[int], model: nn.Module | None = None, *, rank: int | None = None, store: Any = None
    ) -> None:
        self.members, self.size = members, len(members)
        self.rank = members.index(dist.get_rank() if rank is None else rank)
        self.sharded = model is not None and sharded(model)
        # those that compute the same contexts together with this one, of which one counts
        alike = together(model) if model is not None else None
        self.same = [self.rank] if alike is None else [members.index(rank) for rank in alike.ranks]
        self._key = f"anisoscope/together/{members[0]}/{_made[members[0]]}"
        _made[members[0]] += 1
        self._store: Any = dist.distributed_c10d._get_default_store() if store is None else store
        self._agreed = self._sent = 0  # how often `agree` and `merged` were called
        self._signed, self._opened = 0.0, b""  # when it gave a sign, and a digest of its first batch
        self.sign()

    @classmethod
    def here(cls, model: nn.Module | None = None, *, alone: bool = False) -> Processes | None:
        """None if this process measures on its own."""
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return None
        if alone and model is not None and sharded(model):
            raise AnisoscopeError(
                "alone=True was said of a model whose parameters are sharded over processes, which no process can run "
                "alone; call it in all of them without alone=True."
            )
        members = training_ranks(model) if model is not None else list(range(dist.get_world_size()))
        if alone or len(members) < 2 or dist.get_rank() not in members:
            return None
        return cls(members, model)

    @property
    def first(self) -> bool:
        """Whether this process has the results first."""
        return not self.rank

    @property
    def counts(self) -> bool:
        """Whether rows of this process count: of several with the same contexts only those of one."""
        return self.rank == min(self.same)

    # -- batches --

    def mine(self, number: int) -> bool:
        """Whether this process reads the batch of this number, of batches that all processes know."""
        return number % self.size == self.rank

    def passes(self, batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
        """The batches that this process runs, and whether each counts; as many in all processes if they communicate."""
        if not self.sharded:
            yield from ((batch, True) for batch in batches)
            return
        number, last = 0, None
        for last in batches:
            self._set(f"begun/{self.rank}", str(number + 1).encode())
            self._refuse_different(last, number)
            yield last, True
            number += 1
        self._set(f"ended/{self.rank}", b"1")
        while self._others_go_on(number):
            yield last, False
            number += 1

    def first_batch(self, batches: Iterable[Any]) -> tuple[Any, Iterator[Any]]:
        """The first batch, and all of them; one that another process has where this one has none and passes need it.

        None if there is none at all.
        """
        rest = iter(batches)
        first = next(rest, None)
        self._opened = b"" if first is None else _digest(first)
        every = rest if first is None else chain([first], rest)
        if not self.sharded:
            return first, every
        self._set(f"has/{self.rank}", b"1" if first is not None else b"0")
        having = [rank for rank in range(self.size) if self._wait(f"has/{rank}", of=rank) == b"1"]
        if len(having) in (0, self.size):
            return first, every
        if self.rank == having[0]:
            self._put("lent", pickle.dumps(first), readers=self.size - len(having))
        return (first, every) if first is not None else (pickle.loads(self._take("lent", of=having[0])), every)

    def _refuse_different(self, batch: Any, number: int) -> None:
        """Raise an error if processes that compute contexts together were given different ones."""
        if len(self.same) < 2:
            return
        leader, mine = min(self.same), _digest(batch)
        if leader == self.rank:
            self._set(f"read/{number}/{self.rank}", mine)
        elif self._wait(f"read/{number}/{leader}", of=leader) != mine:
            raise AnisoscopeError(
                f"ranks {self._named(self.same)} compute the same contexts together (tensor parallel), but their batch "
                f"{number} differs; give those processes the same batches."
            )

    def _others_go_on(self, number: int) -> bool:
        """Whether another process begins a pass of this number; waits until it does, or all have ended."""
        since = self._patience()
        while True:
            counts = {rank: int(self._seen(f"begun/{rank}") or 0) for rank in range(self.size)}
            if any(count > number for count in counts.values()):
                return True
            going = [rank for rank in range(self.size) if self._seen(f"ended/{rank}") is None]
            if not going:
                return False
            since = self._still(going[0], since)

    # -- what is told --

    def sign(self) -> None:
        """Say that this process is alive and at work; an error if another one has failed."""
        if time.monotonic() > self._signed + _SIGN:
            self._signed = time.monotonic()
            self._raise_by(f"sign/{self.rank}", 1)
            self._raise_failure()

    def agree(self, mine: Value) -> Value:
        """What the first process gives, in all of them."""
        self._agreed += 1
        name = f"agreed/{self._agreed}"
        if self.first:
            self._put(name, pickle.dumps(mine), readers=self.size - 1)
            return mine
        found: Value = pickle.loads(self._take(name, of=0))
        return found

    def merged(self, bank: Bank, notes: list[str]) -> tuple[Bank, list[str]] | None:
        """In the first process the bank and the notes of all; None in the others, whose bank is sent."""
        self._sent += 1
        if not self.first:
            sent = (bank if self.counts else None, notes, self._opened if self.counts else b"")
            self._put(f"bank/{self._sent}/{self.rank}", _packed(sent), readers=1)
            return None
        every, opened = list(notes), {0: self._opened}
        for rank in range(1, self.size):
            packed = self._take(f"bank/{self._sent}/{rank}", of=rank)
            other, more, opened[rank] = _unpacked(packed, _device_of(bank))
            del packed
            bank = bank if other is None else bank.merge(other)
            every += more
            self.sign()
        return bank, list(dict.fromkeys([*every, *self._repeated(opened)]))

    def _repeated(self, opened: Mapping[int, bytes]) -> Iterator[str]:
        """A note on processes whose first batch, of these digests, is the same."""
        for digest in dict.fromkeys(filter(None, opened.values())):
            same = [rank for rank, other in opened.items() if other == digest]
            if len(same) > 1:
                yield (
                    f"ranks {self._named(same)} were given the same first batch, and its contexts count {len(same)} "
                    "times; give each process batches of its own"
                )

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Around the common work: an error is told to the other processes, which end with it."""
        try:
            yield
            self._part()
        except PeerFailure:
            raise
        except BaseException as error:
            cause = None
            with contextlib.suppress(PeerFailure):  # the store may be gone with the other processes
                cause = self._failure() if isinstance(error, Exception) else None
                if cause is None:
                    self._tell_failure(error)
            if cause is not None:  # a pass that communicates fails where another process has
                raise cause from error
            raise

    def _part(self) -> None:
        """The first process, which may have the store, stays until the others have what it said."""
        if not self.first:
            self._set(f"left/{self.rank}", b"1")
            return
        for rank in range(1, self.size):
            with contextlib.suppress(PeerFailure):  # the results are there
                self._wait(f"left/{rank}", of=rank)

    def _tell_failure(self, error: BaseException) -> None:
        self._set(f"heard/{self.rank}", b"1")  # nobody needs to tell this one
        if self._seen("failed") is None and not isinstance(error, KeyboardInterrupt):
            why = (str(error).strip() or type(error).__name__).splitlines()[0][:500]
            why = why if isinstance(error, AnisoscopeError) else f"{type(error).__name__}: {why}"
            self._set("failed", json.dumps([self.members[self.rank], why]).encode())
            until = time.monotonic() + _FAREWELL
            others = range(1, self.size) if self.first else [0]
            while time.monotonic() < until and any(self._seen(f"heard/{rank}") is None for rank in others):
                time.sleep(_POLL)  # a launcher ends all processes once one has ended, before the first could say why

    def _failure(self) -> PeerFailure | None:
        """The failure of another process, if there was one."""
        found = self._seen("failed")
        rank, why = json.loads(found) if found is not None else (self.members[self.rank], "")
        if rank == self.members[self.rank]:
            return None
        self._set(f"heard/{self.rank}", b"1")
        return PeerFailure(f"rank {rank} failed, and with it all {self.size} processes: {why}")

    def _raise_failure(self) -> None:
        if (failure := self._failure()) is not None:
            raise failure

    # -- the store --

    def _set(self, name: str, value: bytes) -> None:
        with _reachable():
            self._store.set(f"{self._key}/{name}", value)

    def _raise_by(self, name: str, number: int) -> int:
        """Add to a count; returns the new one."""
        with _reachable():
            return int(self._store.add(f"{self._key}/{name}", number))

    def _delete(self, name: str) -> None:
        with _reachable():
            self._store.delete_key(f"{self._key}/{name}")

    def _there(self, name: str) -> bool:
        """Whether something is said under a name."""
        with _reachable():
            return bool(self._store.check([f"{self._key}/{name}"]))

    def _seen(self, name: str) -> bytes | None:
        """What was said under a name, which nobody takes away meanwhile; None if nothing was yet."""
        if not self._there(name):
            return None
        with _reachable():
            return bytes(self._store.get(f"{self._key}/{name}"))

    def _wait(self, name: str, *, of: int) -> bytes:
        """What a process says under a name, once it does."""
        since = self._patience()
        while (found := self._seen(name)) is None:
            since = self._still(of, since)
        return found

    def _patience(self) -> tuple[float, int]:
        return time.monotonic(), -1

    def _still(self, rank: int, since: tuple[float, int]) -> tuple[float, int]:
        """Wait a little for a process; an error if one failed, or if this one gave no sign for long."""
        self._raise_failure()
        time.sleep(_POLL)
        start, last = since
        if time.monotonic() < start + _SIGN:
            return since
        signs = self._raise_by(f"sign/{rank}", 0)
        if signs != last:
            self.sign()  # also for those who wait for this one
            return time.monotonic(), signs
        if time.monotonic() > start + _LIMIT:
            name = self.members[rank]
            what = "gave no sign" if signs else "did not call the same function"
            raise PeerFailure(
                f"rank {name} {what} for {_LIMIT:.0f} s; call it in all {self.size} processes, in the same order, or "
                "with alone=True in one."
            )
        return since

    def _put(self, name: str, value: bytes, *, readers: int) -> None:
        """Say something large in pieces; the last reader of each takes it away."""
        pieces = range(0, len(value), _PIECE)
        self._set(f"{name}/size", f"{len(pieces)} {readers}".encode())
        for number, start in enumerate(pieces):
            since = self._patience()
            while number >= _AHEAD and self._there(f"{name}/{number - _AHEAD}"):
                since = self._still(0 if not self.first else self.size - 1, since)
            self._set(f"{name}/{number}", value[start : start + _PIECE])
            self.sign()

    def _take(self, name: str, *, of: int) -> bytes:
        count, readers = map(int, self._wait(f"{name}/size", of=of).split())
        parts = []
        for number in range(count):
            parts.append(self._wait(f"{name}/{number}", of=of))
            if self._raise_by(f"{name}/{number}/read", 1) == readers:
                self._delete(f"{name}/{number}")
                self._delete(f"{name}/{number}/read")
            self.sign()
        return b"".join(parts)

    def _named(self, ranks: Iterable[int]) -> str:
        return ", ".join(str(self.members[rank]) for rank in sorted(ranks))


@contextlib.contextmanager
def _reachable() -> Iterator[None]:
    """Around a call of the store, which may have ended with its process."""
    try:
        yield
    except dist.DistError as error:
        raise PeerFailure(
            "the process that holds the store of torch.distributed, usually rank 0, has ended before the others; see "
            "what it said."
        ) from error


def in_all(peers: Processes | None, act: Callable[[], Value]) -> Value:
    """Do something that all processes do, if there are several; an error in one ends it in all."""
    with peers.together() if peers is not None else contextlib.nullcontext():
        return act()


def signing(peers: Processes | None, progress: Progress | None) -> Progress | None:
    """The callback of progress, which also says that this process is at work."""
    if peers is None:
        return progress

    def tell(what: str, done: int, total: int) -> None:
        peers.sign()
        if progress is not None:
            progress(what, done, total)

    return tell


# -- banks as bytes ----------------------------------------------------------------------------------------------------


class _Writer(pickle.Pickler):
    """Pickles everything but tensors, which are collected on the host."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        self.tensors.append(value.detach().cpu().clone())  # a view would be saved with all of its storage
        return len(self.tensors) - 1, value.device.type


class _Reader(pickle.Unpickler):
    def __init__(self, text: bytes, tensors: list[Tensor], device: torch.device) -> None:
        super().__init__(io.BytesIO(text))
        self.tensors, self.device = tensors, device

    def persistent_load(self, key: Any) -> Tensor:
        number, kind = key
        return self.tensors[number] if kind == "cpu" else self.tensors[number].to(self.device)


def _packed(value: Any) -> bytes:
    text, out = io.BytesIO(), io.BytesIO()
    (writer := _Writer(text)).dump(value)
    torch.save((text.getvalue(), writer.tensors), out)
    return out.getvalue()


def _unpacked(packed: bytes, device: torch.device) -> Any:
    """What was packed by another process; what it had on its own device is on this one."""
    text, tensors = torch.load(io.BytesIO(packed), weights_only=True)
    return _Reader(text, tensors, device).load()


def _device_of(bank: Bank) -> torch.device:
    return torch.device(bank.device)


def _digest(batch: Any) -> bytes:
    """A hash of the tensors of a batch."""
    inputs = batch.inputs if isinstance(batch, Batch) else batch
    found = inputs.items() if isinstance(inputs, Mapping) else [("", inputs)]
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(found, key=lambda item: item[0]):
        if isinstance(value, Tensor):
            plain = value.detach().cpu().contiguous()
            digest.update(f"{name} {tuple(plain.shape)} {plain.dtype}".encode())
            digest.update(plain.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest().encode()


# -- a command that torchrun started -----------------------------------------------------------------------------------


def started() -> bool:
    """Whether a launcher such as torchrun started this command as one of several processes."""
    return all(name in os.environ for name in _STARTED) and int(os.environ["WORLD_SIZE"]) > 1


def joined() -> Processes | None:
    """This process of a command among those that torchrun started it in; None if it was started alone.

    Only the store is shared: the command needs no collectives.
    """
    if not started():
        return None
    size = int(os.environ["WORLD_SIZE"])
    try:
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=_ARRIVAL)))
        store.add("anisoscope/arrived", 1)
        until = time.monotonic() + _ARRIVAL
        while store.add("anisoscope/arrived", 0) < size:
            if time.monotonic() > until:
                raise TimeoutError
            time.sleep(_POLL)
    except Exception as error:
        raise AnisoscopeError(
            f"RANK and WORLD_SIZE say that this is one of {size} processes, which did not meet within "
            f"{_ARRIVAL:.0f} s; start all of them with torchrun, or unset WORLD_SIZE."
        ) from error
    return Processes(list(range(size)), rank=rank, store=store)


def placed(device: str) -> str:
    """The device of this process: of several on one machine each has the GPU of its local number.

    >>> placed("cpu")
    'cpu'
    """
    if device not in ("auto", "cuda") or "LOCAL_RANK" not in os.environ or not torch.cuda.is_available():
        return device
    return f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"


def local_size() -> int:
    """Processes that a launcher started on this machine, and that share its memory."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) if started() else 1
