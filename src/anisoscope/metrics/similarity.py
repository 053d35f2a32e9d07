"""Similarity of contexts, of layers and of models.

Notation: u unit rows, A the average cosine (the baseline that anisotropy alone would give).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError, TooFewRows
from anisoscope.metrics.anisotropy import average_cosine, pair_cosines
from anisoscope.metrics.engine.metric import STREAM_KINDS, array_rows, metric
from anisoscope.stats.directions import Coherence, Directions
from anisoscope.stats.sample import Sample

OCCURRENCES = 5  # minimum occurrences of a token type in the sample
_TYPES = f"token types with at least {OCCURRENCES} occurrences in the sample; minus the baseline (baseline=0: raw)"
_similar = partial(
    metric,
    reference="Ethayarajh 2019, arXiv:1909.00512",
    invariant=("rotation", "scale"),
    kinds=STREAM_KINDS - {"rows"},
)
_of_types = partial(_similar, Sample, convention=_TYPES)


def _types(sample: Sample) -> tuple[list[Tensor], Tensor]:
    """The rows of each token type that occurs often enough, and the rows of all types, in float64 without zero rows."""
    rows = sample.rows.cpu().double()  # many small matrices follow, which are faster on the host
    directed = (rows != 0).any(1)
    rows, tokens = rows[directed], sample.label("token")[directed]
    values, inverse, counts = torch.unique(tokens, return_inverse=True, return_counts=True)
    chosen = [i for i in range(len(values)) if counts[i] >= OCCURRENCES and values[i] >= 0]
    if not chosen:
        raise TooFewRows(
            f"no token type occurs {OCCURRENCES} times among {len(tokens)} sampled rows; "
            "give more tokens (arrays: tokens=…)"
        )
    order = inverse.argsort(stable=True)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return [rows[order[starts[i] : starts[i + 1]]] for i in chosen], rows


def _mean_cosine(rows: Tensor) -> float:
    units = rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return float(pair_cosines(units.sum(0), torch.tensor(len(rows), dtype=torch.float64)))


@_of_types(
    title="Self-similarity",
    formula="mean over types of the mean cosine between occurrences, minus A",
    bounds=(-2.0, 1.0),
)
def self_similarity(sample: Sample, *, baseline: bool = True) -> float:
    """How alike a token is to itself in other contexts: near 1 when context changes nothing, 0 when it changes all."""
    types, rows = _types(sample)
    return sum(map(_mean_cosine, types)) / len(types) - (_mean_cosine(rows) if baseline else 0.0)


@_similar(
    Coherence,
    Directions,
    title="Intra-context similarity",
    formula="mean over contexts of the mean cosine between a row and its context's mean row, minus A",
    convention="every row of every context; minus the baseline (baseline=0: raw)",
    bounds=(-2.0, 1.0),
)
def context_similarity(coherence: Coherence, directions: Directions, *, baseline: bool = True) -> float:
    """How alike the rows of one context are."""
    return float(coherence.mean()) - (average_cosine.function(directions) if baseline else 0.0)


def _explained(rows: Tensor) -> float:
    energies = torch.linalg.svdvals(rows).square()
    return float(energies[0] / energies.sum())


@_of_types(
    title="Maximum explainable variance",
    formula="mean over types of σ₁²/Σσ² of their occurrences, minus that of as many random rows",
    bounds=(-1.0, 1.0),
)
def max_explainable_variance(sample: Sample, *, baseline: bool = True) -> float:
    """How much of a token's occurrences one static vector could explain."""
    types, rows = _types(sample)
    values, start = [], 0
    for occurrences in types:
        m = len(occurrences)
        start = 0 if start + m > len(rows) else start  # rows are in hash order, so consecutive rows are a random draw
        values.append(_explained(occurrences) - (_explained(rows[start : start + m]) if baseline else 0.0))
        start += m
    return sum(values) / len(values)


def linear_cka(first: Any, second: Any) -> float:
    """Debiased linear CKA of two sets of rows of the same tokens: 1 for a rotation and scaling, about 0 by chance.

    HSIC₁(K, L) / √(HSIC₁(K, K) HSIC₁(L, L)) with the unbiased HSIC₁ of Song et al. 2012 (Nguyen et al. 2021,
    arXiv:2010.15327).

    >>> x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    >>> round(linear_cka(x, 3 * x.flip(1) + 5), 6)
    1.0
    """
    return kernel_cka(hollow_kernel(first), hollow_kernel(second))


def hollow_kernel(rows: Any) -> Tensor:
    """The linear kernel of centred rows with its diagonal set to 0."""
    x = array_rows(rows).double()
    bad = len(x) - int(x.isfinite().all(1).sum())
    if bad:
        raise AnisoscopeError(
            f"{bad} rows of the array are not finite; expected the same finite rows in both, drop them"
        )
    if len(x) < 4:
        raise TooFewRows(f"debiased CKA needs at least 4 rows, seen {len(x)}; give more")
    x = x - x.mean(0)
    return (x @ x.T).fill_diagonal_(0.0)


def kernel_cka(first: Tensor, second: Tensor) -> float:
    """Debiased CKA of two hollow kernels of the same rows."""
    if len(first) != len(second):
        raise AnisoscopeError(f"CKA compares the same rows, seen {len(first)} and {len(second)}; align them first")
    value = float(kernel_ckas(first[None], second[None]))
    if math.isnan(value):
        raise TooFewRows("the rows of one array have no structure beyond noise, so CKA is not defined; give more rows")
    return value


def kernel_ckas(first: Tensor, second: Tensor) -> Tensor:
    """Debiased CKA of every pair of hollow kernels [a, n, n] and [b, n, n]; NaN where one is nothing but noise."""
    alone = [torch.stack([_hsic(k[None], k[None]).squeeze() for k in kernels]) for kernels in (first, second)]
    below = alone[0].unsqueeze(1) * alone[1]
    there = (alone[0] > 0).unsqueeze(1) & (alone[1] > 0)
    return torch.where(there, _hsic(first, second) / below.clamp_min(0.0).sqrt(), torch.nan)


def _hsic(k: Tensor, kernel: Tensor) -> Tensor:
    """The unbiased estimator of Song et al. 2012 for all pairs of hollow kernels [a, n, n] and [b, n, n]."""
    n = k.shape[-1]
    sums, others = k.sum(1), kernel.sum(1)
    ones = torch.outer(sums.sum(1), others.sum(1)) / ((n - 1) * (n - 2)) - 2.0 * (sums @ others.T) / (n - 2)
    return (k.flatten(1) @ kernel.flatten(1).T + ones) / (n * (n - 3))
