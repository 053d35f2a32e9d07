"""Slow, obvious twins of every metric: float64 NumPy, all pairs, straight from the definitions, no code shared.

Notation: X n×d rows, U unit rows, σ singular values, λ eigenvalues of the covariance, r sorted distances to others.
"""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np

Array = np.ndarray


def as64(x: Any) -> Array:
    return np.asarray(x, dtype=np.float64)


# directions


def unit(x: Array) -> Array:
    """Rows of norm 1; rows without a direction are left out."""
    x = as64(x)
    norms = np.sqrt((x * x).sum(1))
    return x[norms > 0] / norms[norms > 0][:, None]


def average_cosine(x: Array) -> float:
    """The mean over all pairs i ≠ j, one pair at a time."""
    gram = unit(x) @ unit(x).T
    n = len(gram)
    return float(gram[~np.eye(n, dtype=bool)].mean())


def average_cosine_between(x: Array, contexts: Array) -> float:
    """The mean over all pairs of rows of different contexts, one pair at a time."""
    u, there = unit(x), np.linalg.norm(as64(x), axis=1) > 0
    labels = np.asarray(contexts)[there]
    pairs = [(i, j) for i in range(len(u)) for j in range(len(u)) if labels[i] != labels[j]]
    return float(np.mean([u[i] @ u[j] for i, j in pairs]))


def average_cosine_centred(x: Array) -> float:
    return average_cosine(as64(x) - as64(x).mean(0))


def explained_by_drift(x: Array) -> float:
    return 1.0 - average_cosine_centred(x) / average_cosine(x)


def drift(x: Array) -> float:
    return float(np.linalg.norm(as64(x).mean(0)))


def mean_norm(x: Array) -> float:
    return float(np.mean([np.linalg.norm(row) for row in as64(x)]))


def relative_drift(x: Array) -> float:
    return drift(x) / mean_norm(x)


def largest_norm(x: Array) -> float:
    norms = np.array([np.linalg.norm(row) for row in as64(x)])
    return float(norms.max() / np.sqrt((norms**2).mean()))


def rogue_share(x: Array, top: int = 3) -> float:
    u = unit(x)
    n, d = u.shape
    shares = np.array([(np.outer(u[:, i], u[:, i])[~np.eye(n, dtype=bool)]).mean() for i in range(d)])
    return float(np.sort(np.abs(shares))[::-1][:top].sum() / np.abs(shares).sum())


def massive_activation(x: Array) -> float:
    values = np.sort(np.abs(as64(x)).ravel())
    return float(values[-1] / values[(len(values) - 1) // 2])


def partition_isotropy(x: Array) -> float:
    x = as64(x)
    _, axes = np.linalg.eigh(x.T @ x)
    partition = [np.exp(x @ (sign * c)).sum() for c in axes.T for sign in (1.0, -1.0)]
    return float(min(partition) / max(partition))


def drift_alignment(x: Array) -> float:
    x = as64(x)
    mean, cov = x.mean(0), np.cov(x, rowvar=False)
    direction = mean / np.linalg.norm(mean)
    return float(direction @ cov @ direction / np.linalg.eigvalsh(cov)[-1])


# spectra


def sigma(x: Array, *, centred: bool = True) -> Array:
    """Singular values by a full SVD of the rows themselves, zeros included up to the width."""
    x = as64(x)
    values = np.linalg.svd(x - x.mean(0) if centred else x, compute_uv=False)
    return np.concatenate([values, np.zeros(max(0, x.shape[1] - len(values)))])


def svd_ratio(x: Array, *, centred: bool = True) -> float:
    s = sigma(x, centred=centred)
    return float(s.max() / s.sum())


def svd_ratio_squared(x: Array, *, centred: bool = True) -> float:
    s = sigma(x, centred=centred)
    return float(s.max() ** 2 / (s**2).sum())


def stable_rank(x: Array) -> float:
    return 1.0 / svd_ratio_squared(x)


def participation_ratio(x: Array) -> float:
    values = np.linalg.eigvalsh(np.cov(as64(x), rowvar=False).reshape(np.shape(x)[1], -1))
    return float(values.sum() ** 2 / (values**2).sum())


def participation_ratio_clusters(x: Array, contexts: Array, *, centred: bool = True) -> float:
    """(tr C)² / tr C², every product of expectations a mean over tuples of different contexts, one tuple at a time."""
    x = as64(x) - as64(x).mean(0) if centred else as64(x)
    parts = [x[contexts == c] for c in np.unique(contexts)]
    sums, squares, sizes = [p.sum(0) for p in parts], [p.T @ p for p in parts], [len(p) for p in parts]

    def mean(k: int, product: Any) -> float:
        tuples = list(permutations(range(len(parts)), k))
        return sum(product(*t) for t in tuples) / sum(np.prod([sizes[i] for i in t]) for t in tuples)

    below = mean(2, lambda a, b: (squares[a] * squares[b]).sum())
    above = mean(2, lambda a, b: np.trace(squares[a]) * np.trace(squares[b]))
    if centred:
        fours = mean(4, lambda a, b, c, d: (sums[a] @ sums[b]) * (sums[c] @ sums[d]))
        below += fours - 2 * mean(3, lambda a, b, c: sums[a] @ squares[b] @ sums[c])
        above += fours - 2 * mean(3, lambda a, b, c: np.trace(squares[b]) * (sums[a] @ sums[c]))
    return float(above / below)


def iso_score(x: Array) -> float:
    """The published algorithm, step by step: reorient by PCA, normalise the variances, defect, count, rescale."""
    x = as64(x)
    n = x.shape[1]
    _, axes = np.linalg.eigh(np.cov(x, rowvar=False))
    variances = np.diag(np.cov((x - x.mean(0)) @ axes, rowvar=False))
    normalised = np.sqrt(n) * variances / np.linalg.norm(variances)
    defect = np.linalg.norm(normalised - np.ones(n)) / np.sqrt(2 * (n - np.sqrt(n)))
    used = (n - defect**2 * (n - np.sqrt(n))) ** 2 / n**2
    return float((n * used - 1) / (n - 1))


def iso_score_star(x: Array, zeta: float = 0.2) -> float:
    cov = np.cov(as64(x), rowvar=False)
    d = len(cov)
    values = np.linalg.eigvalsh((1 - zeta) * cov + zeta * np.trace(cov) / d * np.eye(d))
    return float((values.sum() ** 2 / (values**2).sum() - 1) / (d - 1))


def effective_rank(x: Array, *, centred: bool = True) -> float:
    p = sigma(x, centred=centred)
    p = p[p > 0] / p.sum()
    return float(np.exp(-(p * np.log(p)).sum()))


def rank_me(x: Array, epsilon: float = 1e-7) -> float:
    s = sigma(x, centred=False)
    p = s / s.sum() + epsilon
    return float(np.exp(-(p * np.log(p)).sum()))


def singular_entropy(x: Array) -> float:
    p = sigma(x, centred=False)
    p = p / p.sum()
    return float(sum(v * np.log(v * len(p)) for v in p if v > 0))


# neighbours


def distances(x: Array) -> tuple[Array, Array]:
    """Sorted distances to, and indices of, all other distinct rows; from differences, one row at a time."""
    x = np.unique(as64(x), axis=0)
    full = np.stack([np.sqrt(((x - row) ** 2).sum(1)) for row in x])
    np.fill_diagonal(full, np.inf)
    order = np.argsort(full, axis=1, kind="stable")
    return np.take_along_axis(full, order, 1)[:, :-1], order[:, :-1]


def two_nn(x: Array, keep: float = 0.9) -> float:
    """Slope through the origin of −log(1 − i/N) on the i-th smallest log μ, over the first ⌊keep·N⌋."""
    r, _ = distances(x)
    log_mu = np.sort(np.log(r[:, 1] / r[:, 0]))
    n = len(log_mu)
    kept = int(np.floor(keep * n))
    y = np.array([-np.log(1 - i / n) for i in range(1, kept + 1)])
    return float(np.linalg.lstsq(log_mu[:kept, None], y, rcond=None)[0][0])


def two_nn_ml(x: Array) -> float:
    r, _ = distances(x)
    return float(len(r) / np.log(r[:, 1] / r[:, 0]).sum())


def levina_bickel(x: Array, smallest: int = 10, largest: int = 20) -> float:
    r, _ = distances(x)
    values = []
    for k in range(smallest, largest + 1):
        inverse = [np.mean([np.log(row[k - 1] / row[j]) for j in range(k - 1)]) for row in r]
        values.append(1.0 / np.mean(inverse))
    return float(np.mean(values))


def gride(x: Array, scale: int = 2) -> float:
    """The maximum of the likelihood of μ = r₂ₖ/rₖ, searched for directly."""
    from scipy.optimize import minimize_scalar

    r, _ = distances(x)
    log_mu = np.log(r[:, 2 * scale - 1] / r[:, scale - 1])

    def loss(delta: float) -> float:
        parts = np.log(delta) + (scale - 1) * np.log(np.expm1(delta * log_mu)) - ((2 * scale - 1) * delta + 1) * log_mu
        return float(-parts.sum())

    return float(minimize_scalar(loss, bounds=(0.01, 200.0), method="bounded", options={"xatol": 1e-10}).x)


def hubness(x: Array, k: int = 10) -> float:
    from scipy.stats import skew

    _, order = distances(x)
    counts = np.zeros(len(order))
    for row in order:
        for neighbour in row[:k]:
            counts[neighbour] += 1
    return float(skew(counts))


# contexts, types, layers


def self_similarity(x: Array, tokens: Array, *, fewest: int = 5, baseline: bool = True) -> float:
    types = [t for t in np.unique(tokens) if t >= 0 and (tokens == t).sum() >= fewest]
    value = np.mean([average_cosine(as64(x)[tokens == t]) for t in types])
    return float(value - (average_cosine(x) if baseline else 0.0))


def context_similarity(x: Array, contexts: Array, *, baseline: bool = True) -> float:
    values = []
    for c in np.unique(contexts):
        mine = as64(x)[contexts == c]
        mean = mine.mean(0)
        values.append(np.mean([row @ mean / (np.linalg.norm(row) * np.linalg.norm(mean)) for row in mine]))
    return float(np.mean(values) - (average_cosine(x) if baseline else 0.0))


def max_explainable_variance(x: Array, tokens: Array, *, fewest: int = 5) -> float:
    """Without the baseline, which is a random draw."""
    types = [t for t in np.unique(tokens) if t >= 0 and (tokens == t).sum() >= fewest]
    return float(np.mean([svd_ratio_squared(as64(x)[tokens == t], centred=False) for t in types]))


def hsic(k: Array, m: Array) -> float:
    """The U-statistic of HSIC: means over tuples of distinct indices, of pairs, quadruples and triples."""
    n = len(k)
    pairs = np.mean([k[i, j] * m[i, j] for i, j in permutations(range(n), 2)])
    quadruples = np.mean([k[i, j] * m[q, r] for i, j, q, r in permutations(range(n), 4)])
    triples = np.mean([k[i, j] * m[i, q] for i, j, q in permutations(range(n), 3)])
    return float(pairs + quadruples - 2 * triples)


def linear_cka(x: Array, y: Array) -> float:
    k, m = ((z - z.mean(0)) @ (z - z.mean(0)).T for z in (as64(x), as64(y)))
    return hsic(k, m) / float(np.sqrt(hsic(k, k) * hsic(m, m)))


# attention


def softmax(scores: Array, allowed: Array) -> Array:
    """One row of probabilities over the allowed keys."""
    p = np.where(allowed, np.exp(as64(scores) - as64(scores)[allowed].max()), 0.0)
    return p / p.sum()


def row_entropy(p: Array, allowed: Array) -> float:
    values = p[allowed]
    values = values[values > 0]
    return float(-(values * np.log(values)).sum() / np.log(allowed.sum()))


def row_sharpness(p: Array, allowed: Array) -> float:
    m = allowed.sum()
    return float((p[allowed].max() - 1 / m) / (1 - 1 / m))


def attention_row(scores: Array, allowed: Array, first: int, plain: Array | None = None) -> list[float]:
    """The eight quantities of one query row, in the order of the program; NaN below 8 keys."""
    scores, allowed = as64(scores), np.asarray(allowed, dtype=bool)
    plain = scores if plain is None else as64(plain)
    rest = allowed.copy()
    rest[first] = False
    nan = float("nan")
    p = softmax(scores, allowed) if allowed.sum() >= 8 else None
    q = softmax(scores, rest) if rest.sum() >= 8 else None
    return [
        row_entropy(p, allowed) if p is not None else nan,
        row_sharpness(p, allowed) if p is not None else nan,
        float(p[first]) if p is not None else nan,
        row_entropy(q, rest) if q is not None else nan,
        row_sharpness(q, rest) if q is not None else nan,
        float(scores[allowed].std()) if p is not None else nan,
        float(plain[allowed].std()) if p is not None else nan,
        float(p[allowed].max()) if p is not None else nan,
    ]


# gradients and subspaces: G n×d rows, Q d×r orthonormal


def gradient_energy(g: Array, q: Array) -> float:
    return float(((as64(g) @ as64(q)) ** 2).sum() / (as64(g) ** 2).sum())


def gradient_energy_by_row(g: Array, q: Array) -> float:
    """The mean of the rows' own ratios; rows without a gradient have none."""
    return float(np.mean([gradient_energy(row[None], q) for row in as64(g) if (row**2).sum() > 0]))


def spectral_share(c: Array, q: Array) -> float:
    c, q = as64(c), as64(q)
    level = np.trace(c) / len(c) * np.eye(len(c))
    return float(np.linalg.norm(q.T @ (c - level) @ q) ** 2 / np.linalg.norm(c - level) ** 2)


def isoscore_star_of(c: Array, zeta: float = 0.2) -> float:
    """IsoScore* of a second moment, from the eigenvalues of the shrunken matrix."""
    c = as64(c)
    d = len(c)
    values = np.linalg.eigvalsh((1 - zeta) * c + zeta * np.trace(c) / d * np.eye(d))
    return float((values.sum() ** 2 / (values**2).sum() - 1) / (d - 1))


def isoscore_gain(c: Array, q: Array) -> float:
    """From an explicit basis of the complement: what is left of a full QR after the columns of Q."""
    full = np.linalg.qr(np.concatenate([as64(q), np.eye(len(q))], axis=1))[0]
    rest = full[:, q.shape[1] : len(q)]
    return isoscore_star_of(rest.T @ as64(c) @ rest) - isoscore_star_of(c)


def drawn_subspaces(a: Array, rank: int, q: Array | None = None) -> list[Array]:
    """An orthonormal basis of each block of columns, by QR, after Q has been projected out where it is given."""
    a = as64(a) if q is None else as64(a) - as64(q) @ (as64(q).T @ as64(a))
    return [np.linalg.qr(a[:, j : j + rank])[0] for j in range(0, a.shape[1], rank)]


def holm(p: list[float]) -> list[float]:
    """For every hypothesis the largest of (m − k)·p over those at most as large, k of them smaller."""
    order = sorted(p)
    steps = [min(1.0, (len(p) - k) * value) for k, value in enumerate(order)]
    return [max(steps[: order.index(value) + order.count(value)]) for value in p]


def growth(before: Array, after: Array) -> Array:
    """The sum of λ·vvᵀ over the positive eigenvalues of the difference."""
    values, vectors = np.linalg.eigh(as64(after) - as64(before))
    return sum((v * np.outer(u, u) for v, u in zip(values, vectors.T, strict=True) if v > 0), np.zeros_like(before))


# frequency


def spread(x: Array) -> tuple[float, float]:
    """RMS distance to the centroid (m − 1), and the mean norm."""
    x = as64(x)
    centre = x.mean(0)
    squares = sum(float(((row - centre) ** 2).sum()) for row in x)
    return float(np.sqrt(squares / (len(x) - 1))), mean_norm(x)
