"""Queries and keys before rotation: what the model's own rotary function is given while an attention module runs.

Models rotate through a function of their module (`apply_rotary_pos_emb` and its relatives); while a capture runs, a
relay stands in for it, notes what went in and what came out, and returns the original's result. Which of the tensors
that came out is a query, and which of its channels are rotated, is found by comparing them with what the attention is
given: nothing is assumed about the order of the arguments, of the dimensions or of the channels.

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
class Turn:
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
    """The rotary functions that the code of a module and of its parts looks up: where, and under which name."""
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
_active = threading.local()  # .turns: a list per attention module that is running in this thread


@contextlib.contextmanager
def turning(attention: nn.Module) -> Iterator[list[Turn]]:
    """A list of what the module's current call has rotated so far; its functions come back afterwards."""
    turns: list[Turn] = []
    functions = _rotary_functions(attention)

    def begin(*_: Any) -> None:
        turns.clear()
        _running().append(turns)

    def end(*_: Any) -> None:
        turns.clear()
        _running()[:] = [other for other in _running() if other is not turns]

    handles = [attention.register_forward_pre_hook(begin), attention.register_forward_hook(end, always_call=True)]
    for space, name in functions:
        _install(space, name)
    try:
        yield turns
    finally:
        for space, name in functions:
            _remove(space, name)
        end()  # an interrupt leaves a forward without running its hooks
        for handle in handles:
            handle.remove()


def _running() -> list[list[Turn]]:
    if not hasattr(_active, "turns"):
        _active.turns = []
    found: list[list[Turn]] = _active.turns
    return found


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
        if running := _running():
            running[-1].extend(_turns((*args, *kwargs.values()), result))
        return result

    return relay


def _turns(given: tuple[Any, ...], result: Any) -> Iterator[Turn]:
    """What went in beside what came out: in the same order, and of the same shape."""
    before = [x.detach() for x in given if isinstance(x, Tensor)]
    for i, after in enumerate(result if isinstance(result, (tuple, list)) else (result,)):
        if isinstance(after, Tensor) and i < len(before) and before[i].shape == after.shape:
            yield Turn(before[i], after.detach())


def unrotated(x: Tensor, turns: list[Turn]) -> Tensor | None:
    """The queries or keys [B, H, T, d] that an attention is given, before their rotation; None where none led to them.

    Channels that are not rotated are those of x.
    """
    for turn in turns:
        pairs = [(turn.before, turn.after)]
        if turn.after.dim() == 4:  # positions may come before heads
            pairs.append((turn.before.transpose(1, 2), turn.after.transpose(1, 2)))
        for before, after in pairs:
            width = after.shape[-1]
            for start in dict.fromkeys((0, x.shape[-1] - width)):
                if _within(after, x, start):
                    return torch.cat((x[..., :start], before.to(x.dtype), x[..., start + width :]), dim=-1)
    return None


def _within(after: Tensor, x: Tensor, start: int) -> bool:
    """Whether these channels of x are what the rotation gave."""
    if after.dim() != 4 or start < 0 or after.shape[:-1] != x.shape[:-1]:
        return False
    return torch.equal(after.to(x.dtype), x[..., start : start + after.shape[-1]])
