"""Count what one pass of a model does – operations, products, bytes – without weights and without computing anything.

A model on the meta device has shapes alone: its forward and backward passes run in milliseconds, whatever its size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

# operations that move nothing: another view of the same numbers, or no numbers at all
_VIEWS = (
    *("view", "_unsafe_view", "t", "transpose", "expand", "slice", "unsqueeze", "squeeze", "permute", "detach"),
    *("select", "alias", "as_strided", "split", "split_with_sizes", "unbind", "_reshape_alias", "narrow", "chunk"),
    *("lift_fresh", "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"),
)


@dataclass(frozen=True)
class PassTrace:
    """What a pass does: operations that launch work, floating-point operations of products, bytes of all others.

    `kept` are bytes that a backward pass needs of the forward one, `largest` is the largest result of one operation.
    """

    operations: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    kept: float = 0.0
    largest: float = 0.0

    def times(self, number: float) -> PassTrace:
        """The same pass `number` times, one after the other: what is held at a time stays the same."""
        return PassTrace(self.operations * number, self.flops * number, self.bytes * number, self.kept, self.largest)

    def longer(self, factor: float) -> PassTrace:
        """The same pass over `factor` times as many contexts at a time."""
        return PassTrace(self.operations, *(factor * x for x in (self.flops, self.bytes, self.kept, self.largest)))

    def plus(self, other: PassTrace) -> PassTrace:
        """This pass, then another."""
        sums = (self.operations + other.operations, self.flops + other.flops, self.bytes + other.bytes)
        return PassTrace(*sums, max(self.kept, other.kept), max(self.largest, other.largest))


class _Counter(TorchDispatchMode):
    """Counts operations that launch work, and bytes that those without a product read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.bytes = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return args[0].dtype is torch.bool or 1  # what masks are asked: whether all positions are data
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__.rstrip("_") not in _VIEWS:
            made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
            read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            self.operations += 1
            self.bytes += sum(x.numel() * x.element_size() for x in (*made, *read))
            self.largest = max([self.largest, *(x.numel() * x.element_size() for x in made)])
        return out


def trace(run: Callable[[], Any]) -> PassTrace:
    """What a function does that runs a model, forward or forward and backward."""
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        owner = x if x._base is None else x._base
        if not owner.is_leaf or not owner.requires_grad:  # weights are there anyway, transposed ones too
            kept[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
    with hooks, _Counter() as counter, FlopCounterMode(display=False) as products:
        run()
    counts = (counter.operations, products.get_total_flops(), counter.bytes)
    return PassTrace(*map(float, (*counts, sum(kept.values()), counter.largest)))
