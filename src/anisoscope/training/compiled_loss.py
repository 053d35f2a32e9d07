"""The loss of a training batch and its gradients, in one graph of torch.compile where that is wanted.

The whole way from batch to loss is compiled, not the model alone: logits are then no result of the graph and need not
be written in full precision. Every training has a graph of its own, so that what was compiled for another model of the
same class, which may have other hooks, is not taken for this one. A compiler that fails is told once and left out.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.errors import AnisoscopeError

Batch = Mapping[str, Tensor]
BACKEND = "inductor"
MODE: str | None = None


@dataclass
class TrainingLoss:
    """The loss of batches, a share of `parts` micro-batches each, and its gradients.

    `of` is a function of (model, batch); `precision` makes the context of a forward pass.
    """

    of: Callable[[Any, Any], Tensor]
    model: nn.Module
    precision: Callable[[], AbstractContextManager[Any]]
    parts: int = 1
    compiled: bool = False
    failed: Callable[[str], None] = lambda why: warnings.warn(why, stacklevel=2)  # told if the compiler fails
    _call: Callable[[Batch], Tensor] = field(init=False)
    _settled: bool = False  # whether a batch was learned from

    def __post_init__(self) -> None:
        words: dict[str, Any] = {"dynamic": False, "backend": BACKEND, "mode": MODE}
        self._call = torch.compile(_own(self._plain), **words) if self.compiled else self._plain

    @property
    def _plain(self) -> Callable[[Batch], Tensor]:
        of, model, parts = self.of, self.model, self.parts

        def share(batch: Batch) -> Tensor:
            return of(model, batch) / parts

        return share

    def learn(self, batch: Batch, *, seed: int) -> Tensor:
        """Add the gradients of a batch to those of the model; returns its share of the loss, detached.

        `seed` is that of what the model draws: dropout, and the codes of a speech model.
        """
        if self._settled or not self.compiled:
            return self._learn(batch, seed)
        try:
            found = self._learn(batch, seed)
        except (AnisoscopeError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # no compiler, no triton, or a compiler's own error, which can be anything
            self._give_up(error)
            found = self._learn(batch, seed)
        self._settled = True
        return found

    def _learn(self, batch: Batch, seed: int) -> Tensor:
        seed_generators(next(iter(batch.values())).device, seed)
        with self.precision():
            loss = self._call(batch)
        loss.backward()
        return loss.detach().clone()  # what a graph returns may be overwritten when it runs again

    def _give_up(self, error: Exception) -> None:
        self.compiled, self._call = False, self._plain
        self.model.zero_grad(set_to_none=True)
        error = getattr(error, "inner_exception", error)  # what a backend raised
        lines = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": .")
        self.failed(f"torch.compile failed ({reason[:200]}), and the training goes on without it, more slowly")


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed the generators of the host and of one device, as `torch.manual_seed` does for all devices.

    That formats the stack for every kind of device that is not there, which took longer than a training step.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)


def _own(function: Any) -> Any:
    """The function with a code object of its own, by which torch.compile keeps what it compiled."""
    code, closure = function.__code__.replace(), function.__closure__
    return types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
