"""Local isotropy within global anisotropy: how stretched the clusters of a cloud are.

Notation: K clusters of n_k rows each, σ singular values inside a cluster.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from anisoscope.errors import TooFewRows, unknown_name
from anisoscope.metrics.metric import metric
from anisoscope.stats.sample import Sample

_MOST_ROWS = 4096
_SILHOUETTE_ROWS = 1024
_CHOICES = range(2, 11)
_PARTITIONS = ("clusters", "random", "none")


@metric(
    Sample,
    title="Local anisotropy",
    formula="Σ_k (n_k/n) σ₁²/Σσ² inside cluster k",
    reference="Cai et al. 2021 (isotropy in the contextual embedding space); Razzhigaev et al. 2023",
    convention="k-means on 4096 sampled rows, K = 2…10 by silhouette (or clusters=K); partition=random gives clusters "
    "of the same sizes drawn at random, partition=none the whole cloud",
    invariant=("rotation", "scale", "shift"),
    bounds=(0.0, 1.0),
)
def local_anisotropy(sample: Sample, *, clusters: int = 0, partition: str = "clusters") -> float:
    """Share of variance along the first direction inside clusters; to be read beside its two controls."""
    if partition not in _PARTITIONS:
        raise unknown_name("partition", partition, _PARTITIONS)
    rows = sample.rows[:_MOST_ROWS].flatten(1).cpu().double()
    if len(rows) < 64:
        raise TooFewRows(f"clusters need at least 64 sampled rows, seen {len(rows)}; give more tokens")
    if partition == "none":
        return _stretch(rows)
    labels = _labels(rows, clusters)
    if partition == "random":  # sampled rows lie in hash order, so runs of them are random draws
        labels = labels.sort().values
    parts = [rows[labels == k] for k in labels.unique()]
    parts = [part for part in parts if len(part) > 2]
    total = sum(map(len, parts))
    return sum(len(part) / total * _stretch(part) for part in parts)


def _stretch(rows: Tensor) -> float:
    """σ₁²/Σσ² of centred rows; 1 where they are all equal."""
    energies = torch.linalg.svdvals(rows - rows.mean(0)).square()
    total = float(energies.sum())
    return float(energies[0]) / total if total > 0 else 1.0


def _labels(rows: Tensor, clusters: int) -> Tensor:
    """k-means labels, with K given or chosen by the silhouette of some rows."""
    if clusters:
        return _k_means(rows, clusters)
    few = rows[:_SILHOUETTE_ROWS]
    distances = torch.cdist(few, few)
    labelled = [_k_means(rows, k) for k in _CHOICES]
    return max(labelled, key=lambda labels: silhouette(distances, labels[: len(few)]))


def _k_means(rows: Tensor, clusters: int) -> Tensor:
    from scipy.cluster.vq import kmeans2

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a cluster that runs empty is left out below
        _, labels = kmeans2(rows.numpy(), clusters, iter=25, minit="++", seed=0)
    return torch.as_tensor(labels, dtype=torch.int64)


def silhouette(distances: Tensor, labels: Tensor) -> float:
    """Mean of (b − a) / max(a, b): a the mean distance within a row's cluster, b to the nearest other (Rousseeuw 1987).

    >>> points = torch.tensor([[0.0], [0.1], [9.0], [9.1]])
    >>> silhouette(torch.cdist(points, points), torch.tensor([0, 0, 1, 1])) > 0.9
    True
    """
    kinds = labels.unique()
    if len(kinds) < 2:
        return -1.0
    member = (labels.unsqueeze(1) == kinds).double()
    sums, sizes = distances.double() @ member, member.sum(0)
    mine = member.bool()
    inside = sums[mine] / (sizes[member.argmax(1)] - 1).clamp_min(1)
    outside = (sums / sizes).masked_fill(mine, torch.inf).amin(1)
    alone = sizes[member.argmax(1)] == 1
    score = (outside - inside) / torch.maximum(outside, inside)
    return float(torch.where(alone, 0.0, score).mean())
