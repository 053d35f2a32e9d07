"""What the machine can do: rates of matrix products and bandwidths, against which the jobs are held."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from alone import Way
from torch import Tensor


def _rate(call: Callable[[], object], work: float, device: torch.device) -> float:
    """Work per second in units of 10⁹, the median of five after a warm-up."""
    times = []
    for _ in range(6):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return work / statistics.median(times[1:]) / 1e9


def _product(dtype: torch.dtype, device: torch.device, side: int) -> float:
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return _rate(lambda: torch.mm(a, b, out=out), 2.0 * side**3, device)


def rates(x: Tensor, side: int = 2048) -> dict[str, float]:
    """GFLOP/s of square products in each precision, GB/s of a copy (read and written) and of one read pass."""
    found = {"float32": _product(torch.float32, x.device, side), "float64": _product(torch.float64, x.device, side)}
    found["bf16"] = _product(torch.bfloat16, x.device, side)
    if x.device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        found["tf32"] = _product(torch.float32, x.device, side)
        torch.backends.cuda.matmul.allow_tf32 = False
    size, copy = float(x.numel() * x.element_size()), torch.empty_like(x)
    found["copy"] = _rate(lambda: copy.copy_(x), 2.0 * size, x.device)
    found["read"] = _rate(lambda: x.sum(), size, x.device)
    return found


WAYS = {"rates": Way(rates, "limits of the machine")}
