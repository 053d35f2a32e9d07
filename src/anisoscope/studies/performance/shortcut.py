"""Runs that begin in the middle of a model: where the rows after a block are given, the blocks before are not computed.

A block that is skipped gives back the rows it gets, and is left out as a module: nothing inside of it runs. That needs
blocks that return their rows and nothing beside, which one context tells.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.capture.gradient_pass import unlabelled, untouched
from anisoscope.capture.sites.layout import Stack
from anisoscope.models.forward import forward


@contextlib.contextmanager
def skipping(model: nn.Module, stack: Stack, count: int) -> Iterator[None]:
    """A context in which the first `count` blocks of a stack give back what they get; a shared one at those layers."""
    paths = stack.blocks[:count]
    modules = {path: model.get_submodule(path) for path in dict.fromkeys(paths)}
    own = {path: module.__dict__.get("forward") for path, module in modules.items()}
    for path, module in modules.items():
        module.forward = _idle(module.forward, times=paths.count(path))
    try:
        yield
    finally:
        for path, module in modules.items():
            del module.__dict__["forward"]
            if (before := own[path]) is not None:
                module.forward = before


def _idle(run: Callable[..., Any], *, times: int) -> Callable[..., Any]:
    calls = itertools.count(1)

    @functools.wraps(run)
    def given(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs) if next(calls) > times else rows_of(args, kwargs)

    return given


def rows_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The rows among the arguments of a block."""
    named = (kwargs.get(name) for name in ("hidden_states", "x", "input"))
    return next((v for v in (*args, *named) if isinstance(v, Tensor) and v.is_floating_point()), None)


def can_skip(model: nn.Module, stack: Stack, inputs: Mapping[str, Any]) -> bool:
    """Whether every block takes rows and returns rows of their shape and nothing else, as seen on one context."""
    fit: list[bool] = []

    def seen(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        rows = rows_of(args, kwargs)
        fit.append(rows is not None and isinstance(output, Tensor) and output.shape == rows.shape)

    blocks = {path: model.get_submodule(path) for path in stack.blocks}
    one = {k: v[:1] if isinstance(v, Tensor) and v.dim() else v for k, v in unlabelled(model, dict(inputs)).items()}
    handles = [block.register_forward_hook(seen, with_kwargs=True) for block in blocks.values()]
    try:
        with untouched(model), torch.no_grad():
            forward(model, one)
    finally:
        for handle in handles:
            handle.remove()
    return all(fit) and len(fit) == len(stack.blocks)
