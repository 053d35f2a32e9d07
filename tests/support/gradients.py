"""Rows and subspaces that stand for gradients."""

from __future__ import annotations

import torch
from torch import Tensor


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def subspace(d: int, r: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(noise(d, r, seed=seed))[0]


def skewed(n: int = 500, d: int = 24, seed: int = 1) -> Tensor:
    """Rows with a steep spectrum in a rotated basis, and a mean."""
    scale = torch.arange(1, d + 1, dtype=torch.float64) ** -1.0
    return (noise(n, d, seed=seed) * scale + 0.2) @ subspace(d, d, seed=seed + 1)
