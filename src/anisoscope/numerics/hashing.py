"""Hashes of (context, position) keys of rows, equal on every device and for any batching and order."""

from __future__ import annotations

import torch
from torch import Tensor

FOLDS = 8  # context folds of the jackknife; fixed, so that two runs on the same contexts can be paired
_FOLD_SALT = 0x5EED_F01D
_HALF_SALT = 0x5EED_4A1F


def _signed(value: int) -> int:
    """The signed int64 with the same bits as an unsigned 64-bit value."""
    value &= 0xFFFF_FFFF_FFFF_FFFF
    return value - (1 << 64) if value >> 63 else value


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; `>>` of torch is arithmetic on int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """The splitmix64 finaliser on int64 tensors (multiplication wraps): a bijection that scrambles every bit."""
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def row_hash(context: Tensor, position: Tensor, *, seed: int = 0) -> Tensor:
    """A uniformly distributed int64 for every (context, position)."""
    salted = mix(context + _signed(0x9E3779B97F4A7C15 * (seed + 1)))
    return mix(salted ^ mix(position + 1))


def fold_of(context: Tensor) -> Tensor:
    """The jackknife fold (0..FOLDS-1) of each context.

    >>> import torch
    >>> int(fold_of(torch.arange(1000)).bincount().min()) > 80
    True
    """
    return _shift_right(mix(context ^ _FOLD_SALT), 8) % FOLDS


def even_folds(context: Tensor) -> Tensor:
    """The jackknife fold of each context in folds of equal size: by the rank of its hash among those that are there.

    Hashes alone give folds of unequal size, whose intervals are up to twice too wide with 16 contexts.

    >>> import torch
    >>> even_folds(torch.arange(18)).bincount().tolist()
    [3, 3, 2, 2, 2, 2, 2, 2]
    """
    present, place = context.unique(return_inverse=True)
    rank = torch.empty_like(present)
    rank[mix(present ^ _FOLD_SALT).argsort()] = torch.arange(len(present), device=context.device)
    return (rank % FOLDS)[place]


def half_of(context: Tensor, *, split: int = 0) -> Tensor:
    """0 for contexts to fit on, 1 for contexts to test on; independent of the folds, and of other splits.

    >>> import torch
    >>> 0.45 < float(half_of(torch.arange(1000)).double().mean()) < 0.55
    True
    """
    return _shift_right(mix(context ^ _signed(_HALF_SALT + 0x9E3779B97F4A7C15 * split)), 17) % 2
