"""Queries and keys before rotation: the arguments of the model's own rotary function.

Models rotate through a function of their Python module (`apply_rotary_pos_emb` and its relatives). While a capture
runs, a relay replaces it, records arguments and results, and returns the original's result. Which result is a query,
and which of its channels are rotated, is found by comparison with the queries and keys of the attention call: nothing
is assumed about the order of arguments, dimensions or channels.

Shapes: B contexts, H heads, T positions, d head width, r ≤ d rotated channels.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_ALIBI = ("alibi",)  # configurations that have the code of a rotation and another kind of position


@dataclass(frozen=True)
class Rotation:
    """One tensor that was rotated, before and after."""

    before: Tensor
    after: Tensor


def rotates(attention: nn.Module) -> bool:
    """Whether an attention module rotates its queries and keys, by what its code calls."""
    config = getattr(attention, "config", None)
    if any(getattr(config, name, None) for name in _ALIBI) or getattr(config, "rotary", True) is False:
        return False
    return bool(_rotary_functions(attention))


def _rotary_functions(attention: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """The rotary functions that the code of a module and of its parts calls: (global namespace, name) of each."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for function in _methods(attention):
        space = function.__globals__
        for name in function.__code__.co_names:
            if "rotary" in name and inspect.isfunction(_plain(space.get(name))):
                found[(id(space), name)] = space
    return [(space, name) for (_, name), space in found.items()]


def _methods(attention: nn.Module) -> Iterator[Any]:
    for part in attention.modules():
        for base in type(part).__mro__:
            if base is nn.Module:
                break
            yield from (f for f in map(_plain, vars(base).values()) if inspect.isfunction(f))


def _plain(value: Any) -> Any:
    return inspect.unwrap(value) if inspect.isfunction(value) else value


_lock = threading.Lock()
_originals: dict[tuple[int, str], tuple[Any, int]] = {}  # by name and place: the function, and how many stand-ins


class _Active(threading.local):
    def __init__(self) -> None:
        self.rotations: list[list[Rotation]] = []  # a list for each attention module that is running in this thread


_active = _Active()


@contextlib.contextmanager
def recorded_rotations(attention: nn.Module) -> Iterator[list[Rotation]]:
    """A list of what the module's current call has rotated so far; the original functions are restored afterwards."""
    rotations: list[Rotation] = []
    functions = _rotary_functions(attention)

    def begin(*_: Any) -> None:
        rotations.clear()
        _active.rotations.append(rotations)

    def end(*_: Any) -> None:
        rotations.clear()
        _active.rotations[:] = [other for other in _active.rotations if other is not rotations]

    handles = [attention.register_forward_pre_hook(begin), attention.register_forward_hook(end, always_call=True)]
    for space, name in functions:
        _install(space, name)
    try:
        yield rotations
    finally:
        for space, name in functions:
            _remove(space, name)
        end()  # an interrupt leaves a forward without running its hooks
        for handle in handles:
            handle.remove()


def _install(space: dict[str, Any], name: str) -> None:
    with _lock:
        at = (id(space), name)
        original, count = _originals.get(at, (space[name], 0))
        _originals[at] = (original, count + 1)
        if not count:
            space[name] = _relay(original)


def _remove(space: dict[str, Any], name: str) -> None:
    with _lock:
        original, count = _originals.pop((id(space), name))
        if count > 1:
            _originals[(id(space), name)] = (original, count - 1)
        else:
            space[name] = original


def _relay(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def relay(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if _active.rotations:
            _active.rotations[-1].extend(_rotations((*args, *kwargs.values()), result))
        return result

    return relay


def _rotations(given: tuple[Any, ...], result: Any) -> Iterator[Rotation]:
    """Pairs of arguments and results in the same order and of the same shape."""
    before = [x.detach() for x in given if isinstance(x, Tensor)]
    for i, after in enumerate(result if isinstance(result, (tuple, list)) else (result,)):
        if isinstance(after, Tensor) and i < len(before) and before[i].shape == after.shape:
            yield Rotation(before[i], after.detach())


def unrotated(x: Tensor, rotations: list[Rotation]) -> Tensor | None:
    """Queries or keys [B, H, T, d] of an attention call before their rotation; None where no rotation gave them.

    Channels that are not rotated are those of x.
    """
    for rotation in rotations:
        pairs = [(rotation.before, rotation.after)]
        if rotation.after.dim() == 4:  # positions may come before heads
            pairs.append((rotation.before.transpose(1, 2), rotation.after.transpose(1, 2)))
        for before, after in pairs:
            width = after.shape[-1]
            for start in dict.fromkeys((0, x.shape[-1] - width)):
                if _within(after, x, start):
                    return torch.cat((x[..., :start], before.to(x.dtype), x[..., start + width :]), dim=-1)
    return None


def _within(after: Tensor, x: Tensor, start: int) -> bool:
    """Whether these channels of x equal the result of a rotation."""
    if after.dim() != 4 or start < 0 or after.shape[:-1] != x.shape[:-1]:
        return False
    return torch.equal(after.to(x.dtype), x[..., start : start + after.shape[-1]])
