"""Local isotropy within global anisotropy: how stretched the clusters of a cloud are.

Notation: K clusters of n_k rows each, σ singular values inside a cluster.
"""

from __future__ import annotations

from torch import Tensor

from anisoscope.errors import unknown_name
from anisoscope.metrics.clusters import PARTITIONS, Clusters
from anisoscope.metrics.engine.metric import metric


@metric(
    Clusters,
    title="Local anisotropy",
    formula="Σ_k (n_k/n) σ₁²/Σσ² inside cluster k",
    reference="Cai et al. 2021 (isotropy in the contextual embedding space); Razzhigaev et al. 2023",
    convention="k-means on 4096 sampled rows, K = 2…10 by silhouette (or clusters=K); partition=random gives clusters "
    "of the same sizes drawn at random, partition=none the whole cloud; the clusters are found once on all rows and "
    "kept when folds are left out for the interval",
    invariant=("rotation", "scale", "shift"),
    bounds=(0.0, 1.0),
    batched=True,
)
def local_anisotropy(cloud: Clusters, *, clusters: int = 0, partition: str = "clusters") -> Tensor:
    """Share of variance along the first direction inside clusters; to be read beside its two controls."""
    if partition not in PARTITIONS:
        raise unknown_name("partition", partition, PARTITIONS)
    return cloud.stretch(clusters=clusters, partition=partition)
