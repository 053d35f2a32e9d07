"""k-means, many fits in one go.

Notation: X n×d rows, C k×d centroids, O n×k one-hot memberships; inertia = ‖X − O C‖².
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anisoscope.numerics.factorisation.factors import nearest_centroid, squared_error


@dataclass
class KMeansFit:
    """Centroids [..., k, d], one-hot memberships [..., n, k], and the inertia after each step."""

    centroids: Tensor
    assigned: Tensor
    history: list[Tensor]


def k_means(X: Tensor, rank: int, *, seed: int, max_iter: int = 100, tol: float = 1e-5) -> KMeansFit:
    """Lloyd's iteration from k-means++ (Arthur and Vassilvitskii 2007); an empty cluster keeps its centroid.

    >>> k_means(torch.tensor([[0.0], [1.0], [9.0], [10.0]]), 2, seed=0).centroids.sort(0).values.tolist()
    [[0.5], [9.5]]
    """
    shift = X.mean(-2, keepdim=True)  # a common mean would drown the distances
    rows = X - shift
    centroids = _spread(rows, rank, seed=seed)
    assigned = nearest_centroid(rows, centroids)
    history: list[Tensor] = []
    done = torch.zeros(X.shape[:-2], dtype=torch.bool, device=X.device)
    for _ in range(max_iter):
        moved = _means(rows, assigned, centroids)
        centroids = torch.where(done[..., None, None], centroids, moved)
        assigned = nearest_centroid(rows, centroids)
        history.append(squared_error(rows, assigned.to(rows.dtype), centroids))
        if len(history) > 1:
            done = done | (history[-2] - history[-1] <= tol * history[-2])
        if bool(done.all()):
            break
    return KMeansFit(centroids + shift, assigned, history)


def _means(rows: Tensor, assigned: Tensor, centroids: Tensor) -> Tensor:
    """The mean of each cluster's rows."""
    members = assigned.to(rows.dtype)
    count = members.sum(-2).unsqueeze(-1)
    return torch.where(count > 0, members.mT @ rows / count.clamp_min(1.0), centroids)


def _spread(rows: Tensor, rank: int, *, seed: int) -> Tensor:
    """k-means++: each further centroid is a row drawn with a chance that grows with its squared distance."""
    generator = torch.Generator().manual_seed(seed)
    n = rows.shape[-2]
    waits = torch.empty(rank, n, dtype=torch.float64).exponential_(generator=generator).to(rows.device)
    chosen: list[Tensor] = []
    gaps = torch.ones(rows.shape[:-1], dtype=torch.float64, device=rows.device)
    for wait in waits:
        # the least of exponential waits at these rates is a draw with these chances
        pick = (wait / gaps.clamp_min(torch.finfo(torch.float64).tiny)).argmin(-1, keepdim=True)
        chosen.append(rows.gather(-2, pick.unsqueeze(-1).expand(*pick.shape, rows.shape[-1])))
        gap = torch.linalg.vector_norm(rows - chosen[-1], dim=-1).double().square()
        gaps = gap if len(chosen) == 1 else torch.minimum(gaps, gap)
    return torch.cat(chosen, -2)
