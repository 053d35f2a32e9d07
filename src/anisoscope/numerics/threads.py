"""Many small problems at a time: one core each is quicker than all cores on one problem after another."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")
_LOCK = threading.Lock()
_limits = 0  # of NumPy's threads, that are in force


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
    first = not _count(1)
    try:
        with _blas().limit(limits=1) if first else contextlib.nullcontext():
            yield
    finally:
        _count(-1)


def _count(change: int) -> int:
    """How many limits were in force before this one came or went."""
    global _limits
    with _LOCK:
        before, _limits = _limits, _limits + change
    return before


@cache
def _blas() -> Any:
    """The threads of NumPy's own linear algebra, which torch does not know of."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")
