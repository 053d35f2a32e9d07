"""Threads and memory of the host: many small problems side by side, one core each, and buffers that are used again."""

from __future__ import annotations

import contextlib
import math
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
_limits = 0  # of NumPy's threads, that are in force
_MOST = 4 << 20  # elements of a buffer that is kept for the next call: fresh pages cost more than sums taken in them
_LOCAL = threading.local()


def together(act: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """What `act` gives for each item, in their order; `act` must spend its time in torch or in NumPy's products and
    spectra, which let others run.

    >>> together(lambda n: n + 1, [1, 2, 3])
    [2, 3, 4]
    """
    cores = min(torch.get_num_threads(), len(items))
    if cores < 2:
        return [act(item) for item in items]
    with one_thread(), ThreadPoolExecutor(cores) as pool:
        return list(pool.map(act, items))


def each_on_host(act: Callable[[Item], Result], items: Sequence[Item], device: str) -> list[Result]:
    """The same, but one after another where the work is a device's: there the host only hands it over."""
    return together(act, items) if device == "cpu" else [act(item) for item in items]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Thousands of small operations: handing each to several threads costs many times what it saves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with one_blas_thread():
            yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def one_blas_thread() -> Iterator[None]:
    """One thread for NumPy's linear algebra: several that wait for each other at every column are slower when busy.

    Within another such limit nothing is done: setting it takes longer than a small spectrum.
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
    """The threads of NumPy's own linear algebra, which torch does not know of."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")


def float64_copy(x: Tensor) -> Tensor:
    """A contiguous float64 copy of x, the caller's to overwrite – but only until the next call in this thread.

    >>> float64_copy(torch.tensor([1.0, 2.0])).tolist()
    [1.0, 2.0]
    """
    if x.device.type != "cpu":
        return x.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
    return room("copy", x.shape, torch.float64).copy_(x)


def room(name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory of this thread on the host, whatever was left in it: the same as long as the name and the type are.

    >>> room("doctest", (2, 3), torch.float64).shape
    torch.Size([2, 3])
    """
    size, key = math.prod(shape), f"{name} {dtype}"
    if size > _MOST:
        return torch.empty(tuple(shape), dtype=dtype)
    kept = _LOCAL.__dict__.get(key)
    if kept is None or kept.numel() < size:
        with torch.inference_mode(False):  # it outlives the mode that it happens to be made in
            _LOCAL.__dict__[key] = kept = torch.empty(size, dtype=dtype)
    return kept[:size].view(tuple(shape))
