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
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from anisoscope.results.quantity import jackknife

_LEVEL = 0.05


def least_open(folds: int) -> float:
    """The λ above which a tie is not excluded, from the quantile (m/2)(p^(−2/m) − 1) of F with 2 and m degrees.

    >>> round(1 / least_open(8), 1)
    37.9
    """
    freedom = folds - 1
    return 1 / (8 * (freedom / 2) * (_LEVEL ** (-2 / freedom) - 1))


@dataclass(frozen=True)
class OpenPlanes:
    """The open planes of a proxy: single directions whose energies give theirs, and how far each refit turns in them.

    >>> Q, v = torch.eye(4)[:, :2], torch.eye(4)[:, 2]
    >>> turned = [torch.stack([Q[:, 0], math.cos(a) * Q[:, 1] + math.sin(a) * v], 1) for a in (0.2, -0.2, 0.1, -0.1)]
    >>> found = OpenPlanes.of(Q, torch.stack(turned))
    >>> found.directions.shape, found.swings(np.array([[0.7], [0.1], [0.4]])).round(6).tolist()
    (torch.Size([4, 3]), [[0.6]])
    """

    directions: Tensor  # [d, 3k]: u, v and (u + v)/√2 of each plane
    turns: np.ndarray  # [k, folds]; NaN without a refit

    @classmethod
    def of(cls, Q: Tensor, left_out: Tensor) -> OpenPlanes:
        live = left_out.isfinite().all(-1).all(-1)
        inside = Q.mT @ left_out[live]
        moved = (left_out[live] - Q @ inside) @ inside.mT  # D [live, d, r]
        turns = np.full((0, len(left_out)), np.nan)
        count = len(moved)
        if count < 2:
            return cls(Q[:, :0], turns)
        errors, turned = torch.linalg.eigh((count - 1) / count * (moved.mT @ moved).sum(0))
        chosen = turned[:, errors >= least_open(count)]
        paths = (moved @ chosen).movedim(-1, 0)  # [k, live, d]: the way of each open direction in every refit
        v = torch.linalg.svd(paths, full_matrices=False).Vh[:, 0].T  # [d, k]
        u = Q @ chosen
        turns = np.full((chosen.shape[1], len(left_out)), np.nan)
        turns[:, live.cpu().numpy()] = torch.einsum("kld,dk->kl", paths, v).cpu().numpy()
        return cls(torch.stack([u, v, (u + v) / math.sqrt(2)], 2).flatten(1), turns)

    def swings(self, energies: np.ndarray) -> np.ndarray:
        """By how much the energy differs over the directions of each plane [k, ...], from those of `directions`."""
        one, two, between = energies.reshape(-1, 3, *energies.shape[1:]).swapaxes(0, 1)
        return np.hypot(one - two, 2 * between - one - two)


def opened(replicates: Sequence[float], *, swings: Sequence[float] | np.ndarray, turns: np.ndarray) -> list[float]:
    """Leave-one-fold-out values whose interval reaches as far as the widest swing, in the pattern of its turns.

    With h the half-width before, it is √(h² + swing²) at least: the pattern is added with the sign that it has in the
    values themselves, so that numbers whose directions turn together still pair.

    >>> wider = opened([1.1, 0.9, 1.1, 0.9], swings=[2.0], turns=np.array([[0.1, -0.1, -0.1, 0.1]]))
    >>> low, high = jackknife(1.0, wider, bounds=(None, None))
    >>> before = jackknife(1.0, [1.1, 0.9, 1.1, 0.9], bounds=(None, None))
    >>> round(((high - low) / 2) ** 2 - ((before[1] - before[0]) / 2) ** 2, 6)
    4.0
    """
    given = np.asarray(replicates, dtype=float)
    if not len(swings) or not np.isfinite(swings).all():
        return list(replicates)
    widest = int(np.argmax(swings))
    turn = turns[widest]
    live = np.isfinite(given) & np.isfinite(turn)
    pattern = np.where(live, turn - turn[live].mean(), 0.0) if live.any() else np.zeros_like(given)
    low, high = jackknife(0.0, pattern[np.isfinite(given)].tolist(), bounds=(None, None))
    if not high > low:
        return list(replicates)
    sign = -1.0 if float((pattern[live] * given[live]).sum()) < 0 else 1.0
    moved: list[float] = (given + sign * swings[widest] * 2 / (high - low) * pattern).tolist()
    return moved
