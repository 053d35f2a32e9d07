"""The arguments of one attention call: queries, keys, mask, bias and scaling, in one form for every model.

Shapes: B contexts, H heads (H_kv of keys), T queries, S keys, d head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from anisoscope.models.forward import MASKED


@dataclass(frozen=True)
class Call:
    """The arguments of one attention call; `mask` is bool (True: may attend), additive float, or None."""

    query: Tensor  # [B, H, T, d]
    key: Tensor  # [B, H_kv, S, d]
    scaling: float | Tensor  # a number, or one per head [H, 1, 1]
    mask: Tensor | None = None
    bias: Tensor | None = None
    causal: bool = False  # upper-left causal, where there is no mask
    window: int | None = None  # keys a query may look back on, where the mask does not say it
    whole: bool = True  # False: scores are not scaling·qk + bias (capped, or with a sink)
    chunk: int = 0  # positions of a chunk, where the model attends within chunks that were put together here

    def batched(self, batch: int) -> Call:
        """The same call with a dimension for heads, where contexts and heads were flattened into one."""
        if self.query.dim() == 4:
            return self
        apart = {name: _apart(getattr(self, name), batch) for name in ("query", "key", "mask", "bias")}
        return replace(self, **apart)  # type: ignore[arg-type]

    def parted(self) -> tuple[Tensor, Tensor | None]:
        """Split the mask into `allowed` [B or 1, 1, T, S] and the additive bias, which masks nothing."""
        shape, mask, bias = (self.query.shape[2], self.key.shape[2]), self.mask, self.bias
        if mask is None or mask.dim() == 2:
            allowed = self._pattern(shape)
            if mask is not None:
                allowed = allowed & mask[:, None, None, : shape[1]].bool()
            return allowed, bias
        if mask.dtype == torch.bool:
            return mask.any(1, keepdim=True).expand(-1, 1, *shape), bias
        allowed = mask > _floor(mask, self.bias is not None)
        rest = mask.where(allowed, mask.new_zeros(()))
        if bool(rest.any()):
            bias = rest if bias is None else bias + rest
        return allowed.any(1, keepdim=True).expand(-1, 1, *shape), bias

    def _pattern(self, shape: tuple[int, int]) -> Tensor:
        rows, columns = (torch.arange(n, device=self.query.device) for n in shape)
        distance = rows[:, None] - columns[None, :]
        allowed = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        if self.window is not None:
            allowed = allowed & (distance.abs() < self.window)
        return allowed[None, None]


def _apart(x: Tensor | None, batch: int) -> Tensor | None:
    return x.unflatten(0, (batch, -1)) if x is not None and x.dim() == 3 else x


def _floor(mask: Tensor, mask_only: bool) -> float:
    """Values below this are masked; where the same tensor holds a bias (ALiBi), only those near the dtype's minimum."""
    return MASKED if mask_only or mask.shape[1] == 1 else float(torch.finfo(mask.dtype).min) / 2


Take = Callable[[Call], None]


def head_scaling(scaling: float | Tensor | None, width: int) -> float | Tensor:
    """The scaling of a call: 1/√d unless told, a number, or one number per head as [H, 1, 1].

    >>> head_scaling(None, 16), head_scaling(torch.ones(2, 1, 1), 16).shape
    (0.25, torch.Size([2, 1, 1]))
    """
    if scaling is None:
        return float(width**-0.5)
    if isinstance(scaling, Tensor) and scaling.numel() > 1:
        return scaling.detach().reshape(-1, 1, 1)
    return float(scaling)


def detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()
