"""Metrics of the spectrum of the rows, of all of them and inside clusters.

Notation: σ singular values of the (centred) n×d rows, λ = σ², p = σ/Σσ; K clusters of n_k rows.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError, TooFewRows, unknown_name
from anisoscope.metrics.engine.clusters import PARTITIONS, Clusters
from anisoscope.metrics.engine.lines import unless
from anisoscope.metrics.engine.metric import metric
from anisoscope.stats.moments import Moments

_RIGID = ("rotation", "scale")
_spectral = partial(metric, Moments, invariant=(*_RIGID, "shift"), batched=True)
_CENTRED = "rows centred on their mean (uncentred with centred=0)"
_BATCHES = _CENTRED + "; over all rows, or with batches=1 the mean over shuffled batches of 4096 sampled rows"


def _energies(moments: Moments, *, centred: bool) -> Tensor:
    """λ [..., d], NaN (or an error) when there is no spectrum to speak of."""
    needed = 2 if centred else 1
    n = torch.as_tensor(moments.n)
    unless(n < needed, n, lambda: TooFewRows(f"a spectrum needs at least {needed} rows, seen {n}; give more tokens"))
    energies = moments.eigenvalues(centred=centred)
    total = moments.scatter.diagonal(dim1=-2, dim2=-1).sum(-1) + moments.n * moments.mean.square().sum(-1)
    # the float64 mean of equal rows is off by 1e-16 of their norm; what that leaves is no direction
    flat = energies[..., 0] <= 1e-28 * total
    unless(flat, total, lambda: TooFewRows(f"all {n} rows are equal, so there is no spectrum; give rows that differ"))
    return torch.where(((n < needed).to(flat.device) | flat).unsqueeze(-1), torch.nan, energies)


@_spectral(
    title="Anisotropy (SVD ratio)",
    formula="σ₁ / Σσ",
    reference="Razzhigaev et al. 2023, arXiv:2311.05928",
    convention=_BATCHES,
    bounds=(0.0, 1.0),
    default=True,
)
def svd_ratio(moments: Moments, *, centred: bool = True, batches: bool = False) -> Tensor:
    """Share of the largest singular value in the sum of all: 1/d for a round cloud, 1 for a line."""
    sigma = _energies(moments, centred=centred).sqrt()
    return sigma[..., 0] / sigma.sum(-1)


@_spectral(
    title="Anisotropy (squared SVD ratio)",
    formula="σ₁² / Σσ²",
    reference="Razzhigaev et al. 2023, the authors' code; 1 / stable rank",
    convention=_BATCHES,
    bounds=(0.0, 1.0),
    default=True,
)
def svd_ratio_squared(moments: Moments, *, centred: bool = True, batches: bool = False) -> Tensor:
    """Share of variance along the first principal direction."""
    energies = _energies(moments, centred=centred)
    return energies[..., 0] / energies.sum(-1)


def _participation(energies: Tensor) -> Tensor:
    return energies.sum(-1).square() / energies.square().sum(-1)


@_spectral(
    title="Participation ratio",
    formula="(Σλ)² / Σλ²",
    reference="Gao et al. 2017, bioRxiv 214262",
    convention=_CENTRED + "; corrected=1 removes the bias of a Gaussian sample of n rows",
    bounds=(1.0, None),
    default=True,
)
def participation_ratio(moments: Moments, *, centred: bool = True, corrected: bool = False) -> Tensor:
    """Number of directions that share the variance: d for a round cloud, 1 for a line."""
    energies = _energies(moments, centred=centred)
    if not corrected:
        return _participation(energies)
    # Gaussian rows: E[tr S²] = tr C² (1 + 1/ν) + (tr C)²/ν and E[(tr S)²] = (tr C)² + 2 tr C²/ν, solved for C
    nu = moments.n - 1 if centred else moments.n
    first, second = energies.sum(-1) / nu, energies.square().sum(-1) / nu**2
    below = second - first**2 / nu
    words = f"{moments.n} rows are too few for the corrected participation ratio; give more tokens"
    return unless(below <= 0, ((nu + 1) / nu * first**2 - 2 / nu * second) / below, lambda: TooFewRows(words))


@_spectral(
    title="IsoScore",
    formula="(PR − 1) / (d − 1)",
    reference="Rudman et al. 2022, arXiv:2108.07344",
    convention="rows centred on their mean",
    bounds=(0.0, 1.0),
    default=True,
)
def iso_score(moments: Moments) -> Tensor:
    """Share of the dimensions that are uniformly used: 1 for a round cloud, 0 for a line."""
    return _iso(_energies(moments, centred=True))


def _iso(energies: Tensor) -> Tensor:
    if energies.shape[-1] < 2:
        raise TooFewRows("IsoScore needs rows of at least 2 dimensions, seen 1; it is not defined on a line")
    return (_participation(energies) - 1.0) / (energies.shape[-1] - 1.0)


@_spectral(
    title="IsoScore*",
    formula="IsoScore of (1−ζ)C + ζ·tr(C)/d·I",
    reference="Rudman & Eickhoff 2024, arXiv:2305.19358",
    convention="rows centred on their mean; shrinkage target tr(C)/d·I",
    bounds=(0.0, 1.0),
)
def iso_score_star(moments: Moments, *, zeta: float = 0.2) -> Tensor:
    """IsoScore of a covariance shrunk towards a round one, steady for few rows; ζ = 0 gives IsoScore."""
    if not 0.0 <= zeta <= 1.0:
        raise AnisoscopeError(f"iso_score_star has zeta {zeta}; expected 0 to 1")
    energies = _energies(moments, centred=True)
    return _iso((1.0 - zeta) * energies + zeta * energies.mean(-1, keepdim=True))


def _entropy(energies: Tensor, *, epsilon: float = 0.0) -> Tensor:
    sigma = energies.sqrt()
    share = sigma / sigma.sum(-1, keepdim=True) + epsilon
    return -torch.xlogy(share, share).sum(-1)  # 0 log 0 = 0


@_spectral(
    title="Effective rank",
    formula="exp(−Σ p log p), p = σ/Σσ",
    reference="Roy & Vetterli 2007",
    convention=_CENTRED,
    bounds=(1.0, None),
    default=True,
)
def effective_rank(moments: Moments, *, centred: bool = True) -> Tensor:
    """Number of directions, counted by the entropy of the singular values."""
    return _entropy(_energies(moments, centred=centred)).exp()


@metric(
    Moments,
    title="RankMe",
    formula="exp(−Σ p log p), p = σ/Σσ + ε",
    reference="Garrido et al. 2023, arXiv:2210.02885",
    convention="rows not centred, ε = 1e-7",
    invariant=_RIGID,
    bounds=(1.0, None),
    batched=True,
)
def rank_me(moments: Moments, *, epsilon: float = 1e-7) -> Tensor:
    """Effective rank of the rows as they are, mean included."""
    if not 0.0 <= epsilon < 1.0:
        raise AnisoscopeError(f"rank_me has epsilon {epsilon}; expected 0 or a little more")
    return _entropy(_energies(moments, centred=False), epsilon=epsilon).exp()


@_spectral(
    title="Stable rank",
    formula="Σσ² / σ₁²",
    reference="Rudelson & Vershynin 2007",
    convention=_CENTRED,
    bounds=(1.0, None),
    default=True,
)
def stable_rank(moments: Moments, *, centred: bool = True) -> Tensor:
    """Total variance in units of the largest one: 1 / squared SVD ratio."""
    energies = _energies(moments, centred=centred)
    return energies.sum(-1) / energies[..., 0]


@metric(
    Moments,
    title="Singular entropy",
    formula="KL(σ/Σσ ‖ uniform) = log d − H(σ/Σσ)",
    reference="Godey et al. 2024, arXiv:2404.07647",
    convention="rows not centred",
    invariant=_RIGID,
    bounds=(0.0, None),
    kinds=("unembed", "embed_weight"),
    batched=True,
)
def singular_entropy(moments: Moments, *, centred: bool = False) -> Tensor:
    """How far the singular values are from equal, in nats: 0 for a round cloud; made for the output head."""
    energies = _energies(moments, centred=centred)
    return (math.log(energies.shape[-1]) - _entropy(energies)).clamp_min(0.0)


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
