"""CPU threads and buffers: run many small problems in parallel, one core each, and reuse scratch memory."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")
Result = TypeVar("Result")
_LOCK = threading.Lock()
_limits = 0  # active `one_blas_thread` contexts
_MOST = 4 << 20  # elements of the largest buffer kept for reuse, which saves the page faults of new memory
_BESIDE = 4  # threads that pay beside an accelerator, where the host has only small operations
_LOCAL = threading.local()


def cores() -> int:
    """How many cores `together` uses when it is called from this thread.

    >>> cores() >= 1
    True
    """
    return _LOCAL.__dict__.get("cores") or torch.get_num_threads()


def together(act: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """`act(item)` for each item, in order, by a thread pool with one core per item.

    This is parallel only as far as `act` runs inside torch or NumPy linear algebra, which release the GIL.

    >>> together(lambda n: n + 1, [1, 2, 3])
    [2, 3, 4]
    """
    workers = min(cores(), len(items))
    if workers < 2:
        return [act(item) for item in items]
    with one_thread():
        return list(_pool(workers).map(act, items))


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    """Threads that wait for the next call: to start them takes longer than many a small problem."""
    return ThreadPoolExecutor(workers, thread_name_prefix="linear-algebra")


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not live on in a forked process


def each_on_host(act: Callable[[Item], Result], items: Sequence[Item], device: str) -> list[Result]:
    """As `together`, but sequential if the work runs on an accelerator, where the host only launches it."""
    return together(act, items) if device == "cpu" else [act(item) for item in items]


@contextlib.contextmanager
def few_threads(device: str) -> Iterator[None]:
    """A few threads for operations of the host beside an accelerator: many take longer to wake than the work does.

    >>> with few_threads("cuda"):
    ...     torch.get_num_threads() <= 4
    True
    """
    before = torch.get_num_threads()
    if device != "cpu":
        torch.set_num_threads(min(_BESIDE, before))
    try:
        yield
    finally:
        if device != "cpu":
            torch.set_num_threads(before)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One thread for torch and NumPy: for many small operations the overhead of threads exceeds their gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with one_blas_thread():
            yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def single_steps() -> Iterator[None]:
    """One thread for each operation of this thread, while `together` still uses all cores.

    Threads that wait for each other after every small operation cost more than they gain, most on a busy machine.
    """
    outer = _LOCAL.__dict__.get("cores")
    _LOCAL.cores = cores()
    try:
        with one_thread():
            yield
    finally:
        _LOCAL.cores = outer


@contextlib.contextmanager
def one_blas_thread() -> Iterator[None]:
    """One thread for NumPy's linear algebra: on a busy machine its threads spend their time waiting for each other.

    A nested use does nothing, because setting the limit takes longer than a small spectrum.
    """
    global _limits
    with _LOCK:
        first, _limits = not _limits, _limits + 1
    try:
        with _blas().limit(limits=1) if first else contextlib.nullcontext():
            yield
    finally:
        with _LOCK:
            _limits -= 1


@cache
def _blas() -> Any:
    """The controller of the BLAS threads of NumPy, which torch.set_num_threads does not affect."""
    import scipy.linalg  # noqa: F401 – has linear algebra of its own, whose threads are known once it is loaded
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")


def float64_copy(x: Tensor) -> Tensor:
    """A contiguous float64 copy of x in a buffer that the caller may overwrite; valid until this thread's next call.

    >>> float64_copy(torch.tensor([1.0, 2.0])).tolist()
    [1.0, 2.0]
    """
    if x.device.type != "cpu":
        return x.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
    return room("copy", x.shape, torch.float64).copy_(x)


def room(name: str, shape: Sequence[int], dtype: torch.dtype, *, most: int = _MOST) -> Tensor:
    """An uninitialised host tensor; calls of one thread with the same name and dtype share its memory.

    Of more than `most` elements it is new memory, which is not kept.

    >>> room("doctest", (2, 3), torch.float64).shape
    torch.Size([2, 3])
    """
    size, key = math.prod(shape), f"{name} {dtype}"
    if size > most:
        return torch.empty(tuple(shape), dtype=dtype)
    kept = _LOCAL.__dict__.get(key)
    if kept is None or kept.numel() < size:
        with torch.inference_mode(False):  # the buffer is used again outside the caller's inference mode
            _LOCAL.__dict__[key] = kept = torch.empty(size, dtype=dtype)
    return kept[:size].view(tuple(shape))
