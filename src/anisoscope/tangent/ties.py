"""What a tie of eigenvalues at the rank leaves open of an energy.

Where the r-th eigenvalue and the next are nearly tied, a direction u of the proxy may stand for any direction of the
plane of u and v, the direction outside that refits turn it to. Refits do not tell: the eigenvalues of a sample repel
each other, so that a tie looks like a gap by chance, with directions that hardly move and are as often wrong as right.
So each plane is *open* unless a tie is excluded at the 5 % level, and intervals contain the energies of all directions
of the open plane where they differ most. Of several open planes one counts: what they do to an energy averages out.

Notation: Q d×r the proxy, Q₍ⱼ₎ its refits without each of G folds, Dⱼ = (1 − QQᵀ)Q₍ⱼ₎Q₍ⱼ₎ᵀQ their turn to first order,
λ the eigenvalues of (G−1)/G Σ DⱼᵀDⱼ: squared standard errors of the angles.
In a tie of two the gap of the sample is 2τχ₂, with τ the standard error of the covariance of both directions, and the
angle has λ = τ̂²/gap²: 1/(8λ) is distributed as F with 2 and G − 1 degrees of freedom.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from anisoscope.numerics.linalg import small_eigh
from anisoscope.results.quantity import jackknives

_LEVEL = 0.05


def least_open(folds: int) -> float:
    """The λ above which a tie is not excluded, from the quantile (m/2)(p^(−2/m) − 1) of F with 2 and m degrees.

    >>> round(1 / least_open(8), 1)
    37.9
    """
    freedom = folds - 1
    return 1 / (8 * (freedom / 2) * (_LEVEL ** (-2 / freedom) - 1))


@dataclass(frozen=True)
class Planes:
    """The plane of every direction of several proxies, on their device.

    >>> Q, v = torch.eye(4)[:, :2], torch.eye(4)[:, 2]
    >>> turned = [torch.stack([Q[:, 0], math.cos(a) * Q[:, 1] + math.sin(a) * v], 1) for a in (0.2, -0.2, 0.1, -0.1)]
    >>> found = Planes.of(Q[None], torch.stack(turned)[None])
    >>> found.directions.shape, [round(abs(float(x)), 2) for x in found.directions[0, :, 3]]
    (torch.Size([1, 4, 4]), [0.0, 0.0, 1.0, 0.0])
    """

    directions: Tensor  # [b, d, 2r]: u of every direction, then v
    errors: Tensor  # λ [b, r]
    turns: Tensor  # [b, r, folds]: how far each refit turns in each plane

    @classmethod
    def of(cls, Q: Tensor, left_out: Tensor) -> Planes:
        """Of proxies [b, d, r] with refits [b, folds, d, r], NaN where there is none."""
        live = left_out.isfinite().all(-1).all(-1)
        count = live.sum(-1).to(Q.dtype)
        refits = torch.where(live[..., None, None], left_out, 0.0)
        inside = Q.mT.unsqueeze(1) @ refits
        moved = (refits - Q.unsqueeze(1) @ inside) @ inside.mT  # D [b, folds, d, r]
        scale = ((count - 1) / count.clamp_min(1))[:, None, None]
        tall = moved.flatten(1, 2)
        errors, turned = small_eigh(scale * (tall.mT @ tall))
        paths = (moved @ turned.unsqueeze(1)).permute(0, 3, 1, 2)  # [b, r, folds, d]: the way in every refit
        values, weights = small_eigh(paths @ paths.mT)
        size, weight = values[..., -1].clamp_min(0.0).sqrt(), weights[..., -1]  # the first singular value and vector
        v = (weight.unsqueeze(-2) @ paths).squeeze(-2) / size.clamp_min(torch.finfo(Q.dtype).tiny).unsqueeze(-1)
        turns = torch.where(live.unsqueeze(1), size.unsqueeze(-1) * weight, torch.nan)
        return cls(torch.cat([Q @ turned, v.mT], -1), errors, turns)


def opened(replicates: np.ndarray, *, swings: np.ndarray, errors: np.ndarray, turns: np.ndarray) -> np.ndarray:
    """Leave-one-fold-out values [..., folds] whose intervals reach as far as the widest swing of an open plane.

    `swings` [..., r] are by how much an energy differs over the directions of each plane, with `errors` [..., r] and
    `turns` [..., r, folds] of `Planes`. With h the half-width before, it is √(h² + swing²) at least: the pattern of the
    turns is added with the sign that it has in the values, so that numbers whose directions turn together still pair.

    >>> turns, errors = np.array([[0.1, -0.1, -0.1, 0.1]]), np.array([1.0])
    >>> before = np.array([1.1, 0.9, 1.1, 0.9])
    >>> wider = opened(before, swings=np.array([2.0]), errors=errors, turns=turns)
    >>> half = [float(jackknives(np.array(1.0), x, bounds=(None, None))[1]) - 1.0 for x in (before, wider)]
    >>> round(half[1] ** 2 - half[0] ** 2, 6)
    4.0
    """
    count = np.isfinite(turns[..., 0, :]).sum(-1)
    least = np.array([math.inf, math.inf, *(least_open(n) for n in range(2, turns.shape[-1] + 1))])[count]
    is_open = errors >= least[..., None]
    usable = is_open.any(-1) & (np.isfinite(swings) | ~is_open).all(-1)
    widest = np.where(is_open, swings, -math.inf).argmax(-1)[..., None]
    swing = np.take_along_axis(swings, widest, -1)
    turn = np.take_along_axis(turns, widest[..., None], -2).squeeze(-2)
    there = np.isfinite(replicates)
    live = there & np.isfinite(turn)
    mean = np.where(live, turn, 0.0).sum(-1, keepdims=True) / np.maximum(live.sum(-1, keepdims=True), 1)
    pattern = np.where(live, turn - mean, 0.0)
    low, high = jackknives(np.zeros(usable.shape), np.where(there, pattern, math.nan), bounds=(None, None))
    usable &= high > low
    sign = np.where((pattern * np.where(live, replicates, 0.0)).sum(-1, keepdims=True) < 0, -1.0, 1.0)
    width = np.where(usable, high - low, 1.0)[..., None]
    return np.where(usable[..., None], replicates + sign * swing * 2 / width * pattern, replicates)


def swings_of(one: np.ndarray, two: np.ndarray, cross: np.ndarray) -> np.ndarray:
    """By how much an energy differs over the directions of a plane, from uᵀMu, vᵀMv and uᵀMv.

    >>> float(swings_of(np.array(0.7), np.array(0.1), np.array(0.0)).round(6))
    0.6
    """
    found: np.ndarray = np.hypot(one - two, 2 * cross)
    return found
