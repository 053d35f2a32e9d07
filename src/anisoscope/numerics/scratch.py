"""Memory that is used again: fresh pages cost the host more than the sums that are taken in them."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

_MOST = 4 << 20  # elements that are kept for the next call
_LOCAL = threading.local()


def float64_copy(x: Tensor) -> Tensor:
    """A contiguous float64 copy of x, the caller's to overwrite – but only until the next call in this thread.

    >>> float64_copy(torch.tensor([1.0, 2.0])).tolist()
    [1.0, 2.0]
    """
    if x.device.type != "cpu" or x.numel() > _MOST:
        return x.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
    buffer = getattr(_LOCAL, "buffer", None)
    if buffer is None or buffer.numel() < x.numel():
        _LOCAL.buffer = buffer = torch.empty(x.numel(), dtype=torch.float64)
    return buffer[: x.numel()].view(x.shape).copy_(x)
