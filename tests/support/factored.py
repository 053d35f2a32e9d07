"""Rows of known factors that the tests of semi-NMF share."""

from __future__ import annotations

from itertools import pairwise

import torch

from anisoscope.numerics.factors import Factors

DTYPES = [torch.float32, torch.float64]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def decaying(n: int, d: int, *, seed: int = 0, power: float = 0.7) -> torch.Tensor:
    """Centred rows with variances that fall as a power of the dimension."""
    x = normal(n, d, seed=seed) * torch.arange(1, d + 1).double() ** -power
    return x - x.mean(0)


def clustered(n: int, d: int, *, seed: int = 0) -> torch.Tensor:
    """Centred rows in ten clouds: skewed directions, as activations have them."""
    centres = 3.0 * normal(10, d, seed=seed + 100)
    sizes = torch.arange(1, 11).double()
    which = torch.multinomial(sizes, n, replacement=True, generator=torch.Generator().manual_seed(seed))
    x = centres[which] + normal(n, d, seed=seed)
    return x - x.mean(0)


def planted(n: int, d: int, k: int, *, noise: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows Z D + noise with sparse Z, and D; each concept has rows of its own."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.rand(n, k, generator=generator, dtype=torch.float64)
    codes *= torch.rand(n, k, generator=generator) < 0.4
    codes[: 10 * k] = torch.eye(k, dtype=torch.float64).repeat(10, 1)
    directions = normal(k, d, seed=seed + 1)
    return codes @ directions + noise * normal(n, d, seed=seed + 2), directions


def check(fit: Factors, x: torch.Tensor) -> None:
    """What holds for every fit."""
    assert bool((fit.codes >= 0).all())
    assert all(a >= b for a, b in pairwise(fit.history))
    assert fit.error == fit.history[-1]
    missed = (x.double() - fit.decode(fit.codes).double()).square().sum() / x.double().square().sum()
    assert abs(float(missed) - fit.error) <= 1e-6 * fit.error + 1e-12
