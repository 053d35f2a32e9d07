"""Functions of tensors whose operations are compiled into few kernels.

On a GPU that computes quickly a training waits for its host, which takes longer to start an operation than the device
to do it. The compiler of torch.compile is used directly: what it counts for a user's model is left alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

DEVICES = {"cuda"}  # elsewhere the operations themselves take the time
_SHAPES = 4  # compiled for at most so many combinations of shapes


class Fused:
    """A function of tensors, without side effects and branches on values; compiled for the first shapes it sees.

    Where the compiler fails, for further shapes, and on other devices it runs as it is; `notes` says so of the former.

    >>> Fused(lambda x: (x + 1,))(torch.ones(2))
    (tensor([2., 2.]),)
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
        self.function = function
        self._compiled: dict[Any, Callable[..., Any] | None] = {}  # None: runs as it is
        self.notes: list[str] = []

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if tensors[0].device.type not in DEVICES:
            return self.function(*tensors)
        key = tuple((x.shape, x.stride(), x.dtype, x.device) for x in tensors)
        if key not in self._compiled:
            if len(self._compiled) >= _SHAPES:
                self._note(f"rows came in more than {_SHAPES} shapes")
                return self.function(*tensors)
            self._compiled[key] = self._compile(tensors)
        compiled = self._compiled[key]
        if compiled is None:
            return self.function(*tensors)
        with torch.no_grad():
            return tuple(compiled(*tensors))

    def _compile(self, tensors: tuple[Tensor, ...]) -> Callable[..., Any] | None:
        try:
            from torch._inductor import compile as inductor
            from torch.fx.experimental.proxy_tensor import make_fx

            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                traced = make_fx(lambda *given: self.function(*given))(*tensors)  # without its defaults
                compiled: Callable[..., Any] = inductor(traced, list(tensors), options={"triton.cudagraphs": False})
                compiled(*tensors)  # kernels are made when they first run
        except Exception as error:  # no compiler, no triton, or a compiler's own error, which can be anything
            said = str(error).strip().splitlines()
            self._note(f"the compiler failed ({type(error).__name__}: {said[0][:160] if said else ''})")
            return None
        return compiled

    def _note(self, why: str) -> None:
        note = f"every_step: {why}, so a part of it runs uncompiled, with the same numbers and more time on the host"
        self.notes += [note] if note not in self.notes else []
