"""Metrics of the spectrum of rows, and of the spectra inside k-means clusters.

Notation: σ singular values of the (centred) n×d rows, λ = σ², p = σ/Σσ. Clusters are found by k-means with K by
silhouette, once on the sampled rows: K clusters of n_k rows, σ those of a cluster's rows about their own mean.

Contexts, for the participation ratio that few of them do not bias: x rows minus the mean of all rows, so that they sum
to 0; of context c the number n_c, S_c = Σx, Q_c = Σxxᵀ, q_c = tr Q_c, p_c = ‖S_c‖²; Q = ΣQ_c, B = Σ S_c S_cᵀ, q = tr Q,
β = tr B; D_k the sum of n_a n_b … over k different contexts; C = M − mmᵀ the covariance, M = E[xxᵀ], m = E x. Then
    tr C²   = tr M² − 2 mᵀMm + (mᵀm)²      (tr C)² = (tr M)² − 2 tr M mᵀm + (mᵀm)²
and products of expectations are means over *different* contexts, which are independent whatever rows of one context
share (U-statistics, Hoeffding 1948). Summed with Σ S_c = 0:
    tr M²   of pairs:  (‖Q‖² − Σ‖Q_c‖²) / D₂            (tr M)²:   (q² − Σq_c²) / D₂
    mᵀMm   of triples: (2 Σ S_cᵀQ_cS_c − tr BQ) / D₃     tr M mᵀm: (2 Σ q_c p_c − β q) / D₃
    (mᵀm)² of fours:   (2‖B‖² − 6 Σ p_c² + β²) / D₄
Without bias for contexts of equal length. Ours; for one row per context it is the estimator of Chen, Zhang and Zhong
(2010) for tr C². Leaving a fold out moves the mean by δ: Q_c and S_c of x − δ follow from those of x and from Xδ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError, TooFewRows, unknown_name
from anisoscope.metrics.engine.folds import SampleLines, once, unless
from anisoscope.metrics.engine.metric import metric
from anisoscope.numerics.hashing import FOLDS
from anisoscope.numerics.linalg import largest_directions
from anisoscope.stats.moments import Moments
from anisoscope.stats.sample import Sample
from anisoscope.stats.spectra import Spectrum

_RIGID = ("rotation", "scale")
_spectral = partial(metric, Moments, invariant=(*_RIGID, "shift"), batched=True, leans=True)
_portion = partial(_spectral, bounds=(0.0, 1.0))
_rank = partial(_spectral, bounds=(1.0, None))
_CENTRED = "rows centred on their mean (uncentred with centred=0)"
_BATCHES = _CENTRED + "; over all rows, or with batches=1 the mean over shuffled batches of 4096 sampled rows"
MOST_ROWS = 4096
PRODUCT_ROWS = 2048  # rows whose products over different contexts are taken: more contexts matter, more rows hardly do
SILHOUETTE_ROWS = 1024
CHOICES = range(2, 11)
FEWEST = 64  # rows
_ITERATIONS = 25
_POWERS = 12
_SMALLEST = 3  # rows of a cluster that has a direction to speak of
_LINES = (-1, *range(FOLDS))  # folds left out; −1: none
PARTITIONS = ("clusters", "random", "none")
Stretches = tuple[Tensor, Tensor, list[int]]  # σ₁²/Σσ² and rows of every part [K, 1 + folds], the folds left out


def _spectrum(moments: Moments, *, centred: bool, entropy: bool = False) -> Spectrum:
    """Sums over λ; NaN, or an error for a single spectrum, if there is no variance."""
    there = _varied(moments, moments.spectrum(centred=centred).top, centred=centred)
    return moments.spectrum(centred=centred, entropy=entropy).defined(there)


def _varied(moments: Moments, top: Tensor, *, centred: bool) -> Tensor:
    """Whether there are enough rows that differ, by line; an error where a single spectrum has none."""
    needed, n = 2 if centred else 1, torch.as_tensor(moments.n)
    unless(n < needed, n, lambda: f"a spectrum needs at least {needed} rows, seen {n}; give more tokens")
    total = moments.trace + moments.n * moments.mean.square().sum(-1)
    # the float64 mean of equal rows has a relative error of 1e-16, whose scatter must not count as a direction
    flat = top <= 1e-28 * total
    unless(flat, total, lambda: f"all {n} rows are equal, so there is no spectrum; give rows that differ")
    return ~((n < needed).to(flat.device) | flat)


@_portion(
    title="Anisotropy (SVD ratio)",
    formula="σ₁ / Σσ",
    reference="Razzhigaev et al. 2023, arXiv:2311.05928",
    convention=_BATCHES,
    default=True,
)
def svd_ratio(moments: Moments, *, centred: bool = True, batches: bool = False) -> Tensor:
    """Share of the largest singular value in the sum of all: 1/d for a round cloud, 1 for a line."""
    found = _spectrum(moments, centred=centred)
    return found.top.sqrt() / found.roots


@_portion(
    title="Anisotropy (squared SVD ratio)",
    formula="σ₁² / Σσ²",
    reference="Razzhigaev et al. 2023, the authors' code; 1 / stable rank",
    convention=_BATCHES,
    default=True,
)
def svd_ratio_squared(moments: Moments, *, centred: bool = True, batches: bool = False) -> Tensor:
    """Share of variance along the first principal direction."""
    found = _spectrum(moments, centred=centred)
    return found.top / found.total


@dataclass(frozen=True)
class ContextRows(SampleLines):
    """Sampled rows with their contexts, numbered from 0."""

    context: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    @classmethod
    def of(cls, sample: Sample) -> Self:
        chosen = sample if len(sample) <= PRODUCT_ROWS else sample.part(0, PRODUCT_ROWS)
        return replace(super().of(chosen), context=torch.unique(chosen.label("context"), return_inverse=True)[1])

    def participation(self, *, centred: bool) -> Tensor:
        """(tr C)² / tr C² from products of different contexts, by line."""
        below, above = once(self.known, centred, lambda: self._products(centred=centred))
        lines = [_LINES.index(fold) for fold in self.left_out] if self.left_out else 0
        words = "products of different contexts need rows that differ, of at least 4 contexts, seen fewer; give more"
        return unless(~(below[lines] > 0), above[lines] / below[lines], words)

    def _products(self, *, centred: bool) -> tuple[Tensor, Tensor]:
        """tr C² and (tr C)² of all rows and without each fold [1 + FOLDS]; NaN with too few contexts."""
        x = self.rows - self.rows.mean(0) if centred else self.rows
        if bool(x.square().sum() <= 1e-28 * self.rows.square().sum()):  # equal rows: nothing but rounding is left
            return x.new_zeros(len(_LINES)).cpu(), x.new_zeros(len(_LINES)).cpu()
        at, counts = self.context.to(x.device), torch.bincount(self.context)  # counted on the host: nothing waits
        number = len(counts)
        home = torch.zeros(number, dtype=torch.int64).scatter_(0, self.context, self.fold)  # the fold of each context
        w = (home != torch.tensor(_LINES).unsqueeze(1)).to(x)  # [L, contexts]
        sizes = counts.to(x)
        S = x.new_zeros(number, x.shape[1]).index_add_(0, at, x)
        shift = w @ S / (w @ sizes).clamp_min(1.0).unsqueeze(1) if centred else x.new_zeros(len(w), x.shape[1])  # δ
        q, p, inner, squares = _of_contexts(x, S, context=self.context, shift=shift)
        norms = []
        for line, (Q, B) in enumerate(self._grams(x, S, home=home)):
            mean, weights = shift[line], w[line] * sizes
            cross, around = torch.outer(weights @ S, mean), torch.outer(mean, mean)
            Q = Q - weights.sum() * around
            B = B - cross - cross.T + weights @ sizes * around
            norms.append(torch.stack([Q.square().sum(), B.square().sum(), (B * Q).sum()]))
        of_q, of_b, product = torch.stack(norms, 1)
        D2, D3, D4 = _different(w, sizes)
        total, spread = (w * q).sum(1), (w * p).sum(1)
        second, first = (of_q - (w * squares).sum(1)) / D2, (total.square() - (w * q.square()).sum(1)) / D2
        if centred:
            fours = (2 * of_b - 6 * (w * p.square()).sum(1) + spread.square()) / D4
            second = second - 2 * (2 * (w * inner).sum(1) - product) / D3 + fours
            first = first - 2 * (2 * (w * q * p).sum(1) - spread * total) / D3 + fours
        return second.cpu(), first.cpu()

    def _grams(self, x: Tensor, S: Tensor, *, home: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Q and B about 0 of each line; one line at a time, because they are wide."""
        Q, B = x.T @ x, S.T @ S
        yield Q, B
        for fold in range(FOLDS):
            mine = ((of == fold).nonzero().squeeze(1).to(x.device, non_blocking=True) for of in (self.fold, home))
            rows, sums = (values[places] for values, places in zip((x, S), mine, strict=True))
            yield Q - rows.T @ rows, B - sums.T @ sums


def _of_contexts(x: Tensor, S: Tensor, *, context: Tensor, shift: Tensor) -> tuple[Tensor, ...]:
    """q_c, p_c, S_cᵀQ_cS_c and ‖Q_c‖² of rows minus δ [L, d], by line and context [L, contexts]."""
    at, sizes = context.to(x.device), torch.bincount(context, minlength=len(S)).to(x)

    def summed(values: Tensor) -> Tensor:
        return values.new_zeros(len(shift), len(S)).index_add_(1, at, values)

    along, s = shift @ x.T, shift.square().sum(1, keepdim=True)  # xδ [L, n], ‖δ‖² [L, 1]
    g, p0 = (x * S[at]).sum(1), S.square().sum(1)  # g: the row sums of XXᵀ, whose squared norm is that of Q_c
    a, q0 = summed(along), summed(x.square().sum(1).expand(len(shift), -1))
    row = g - sizes[at] * along - a[:, at] + s * sizes[at]
    squares = _gram_squares(x, context) - 4 * summed(g * along) + 2 * s * p0 + 2 * sizes * summed(along.square())
    squares = squares + 2 * a.square() - 4 * s * sizes * a + (s * sizes).square()
    return q0 - 2 * a + sizes * s, p0 - 2 * sizes * a + sizes.square() * s, summed(row.square()), squares


def _gram_squares(x: Tensor, context: Tensor) -> Tensor:
    """‖Q_c‖² of each context: the squared norm of XᵀX or XXᵀ, whichever is smaller; contexts of a size at once.

    `context` is on the host, where places are found without waiting for a device.
    """
    counts = torch.bincount(context)
    order, starts, out = context.argsort(stable=True), counts.cumsum(0) - counts, x.new_zeros(len(counts))
    for size in counts.unique().tolist():
        mine = (counts == size).nonzero().squeeze(1)
        places = order[starts[mine].unsqueeze(1) + torch.arange(size)]
        part = x[places.to(x.device, non_blocking=True)]  # [contexts, size, d]
        gram = part @ part.mT if size < x.shape[1] else part.mT @ part
        out[mine.to(x.device, non_blocking=True)] = gram.square().sum((1, 2))
    return out


def _different(w: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """D₂, D₃, D₄ by line, from sums of powers (Newton's identities); NaN with fewer contexts."""
    s1, s2, s3, s4 = (w @ sizes.pow(k) for k in (1, 2, 3, 4))
    found = s1**2 - s2, s1**3 - 3 * s1 * s2 + 2 * s3, s1**4 - 6 * s1**2 * s2 + 3 * s2**2 + 8 * s1 * s3 - 6 * s4
    enough = (w.sum(1) >= k for k in (2, 3, 4))
    return tuple(torch.where(there, one, torch.nan) for there, one in zip(enough, found, strict=True))  # type: ignore[return-value]


@_rank(
    title="Participation ratio",
    formula="(Σλ)² / Σλ²",
    reference="Gao et al. 2017, bioRxiv 214262",
    convention=_CENTRED
    + "; corrected=1 removes the bias of a Gaussian sample of n rows; clusters=1 that of few contexts, whose rows are "
    "alike: (tr C)² / tr C² from products of different contexts, on 2048 sampled rows",
    default=True,
    instead={("clusters", True): (ContextRows,)},
    beside={"clusters": True},
)
def participation_ratio(
    moments: Moments | ContextRows, *, centred: bool = True, corrected: bool = False, clusters: bool = False
) -> Tensor:
    """Number of directions that share the variance: d for a round cloud, 1 for a line."""
    if isinstance(moments, ContextRows):
        if corrected:
            raise AnisoscopeError("participation_ratio has corrected=1 and clusters=1; expected one, drop the other")
        return moments.participation(centred=centred)
    found = _spectrum(moments, centred=centred)
    if not corrected:
        return found.total.square() / found.squares
    # Gaussian rows: E[tr S²] = tr C² (1 + 1/ν) + (tr C)²/ν and E[(tr S)²] = (tr C)² + 2 tr C²/ν, solved for C
    nu = (moments.n - 1 if centred else moments.n) + torch.zeros_like(found.total)
    first, second = found.total / nu, found.squares / nu**2
    below = second - first**2 / nu
    words = f"{moments.n} rows are too few for the corrected participation ratio; give more tokens"
    return unless(below <= 0, ((nu + 1) / nu * first**2 - 2 / nu * second) / below, words)


@_portion(
    title="IsoScore",
    formula="(PR − 1) / (d − 1)",
    reference="Rudman et al. 2022, arXiv:2108.07344",
    convention="rows centred on their mean",
    default=True,
)
def iso_score(moments: Moments) -> Tensor:
    """Share of the dimensions that are uniformly used: 1 for a round cloud, 0 for a line."""
    found = _spectrum(moments, centred=True)
    return _iso(found.total, found.squares, width=moments.width)


def _iso(total: Tensor, squares: Tensor, *, width: int) -> Tensor:
    if width < 2:
        raise TooFewRows("IsoScore needs rows of at least 2 dimensions, seen 1; it is not defined on a line")
    return (total.square() / squares - 1.0) / (width - 1.0)


@_portion(
    title="IsoScore*",
    formula="IsoScore of (1−ζ)C + ζ·tr(C)/d·I",
    reference="Rudman & Eickhoff 2024, arXiv:2305.19358",
    convention="rows centred on their mean; shrinkage target tr(C)/d·I",
)
def iso_score_star(moments: Moments, *, zeta: float = 0.2) -> Tensor:
    """IsoScore of a covariance shrunk towards a round one, steady for few rows; ζ = 0 gives IsoScore."""
    if not 0.0 <= zeta <= 1.0:
        raise AnisoscopeError(f"iso_score_star has zeta {zeta}; expected 0 to 1")
    found, kept = _spectrum(moments, centred=True), 1.0 - zeta
    # Σ((1−ζ)λ + ζ tr/d)² in sums over λ
    squares = kept**2 * found.squares + (1.0 - kept**2) * found.total.square() / moments.width
    return _iso(found.total, squares, width=moments.width)


@_rank(
    title="Effective rank",
    formula="exp(−Σ p log p), p = σ/Σσ",
    reference="Roy & Vetterli 2007",
    convention=_CENTRED,
    default=True,
)
def effective_rank(moments: Moments, *, centred: bool = True) -> Tensor:
    """Number of directions, counted by the entropy of the singular values."""
    return _spectrum(moments, centred=centred, entropy=True).entropy().exp()


@_rank(
    title="RankMe",
    formula="exp(−Σ p log p), p = σ/Σσ + ε",
    reference="Garrido et al. 2023, arXiv:2210.02885",
    convention="rows not centred, ε = 1e-7",
    invariant=_RIGID,
)
def rank_me(moments: Moments, *, epsilon: float = 1e-7) -> Tensor:
    """Effective rank of the rows as they are, mean included."""
    if not 0.0 <= epsilon < 1.0:
        raise AnisoscopeError(f"rank_me has epsilon {epsilon}; expected 0 or a little more")
    sigma = moments.eigenvalues(centred=False).sqrt()
    there = _varied(moments, sigma[..., 0].square(), centred=False)
    share = sigma / sigma.sum(-1, keepdim=True) + epsilon
    return torch.where(there, (-torch.xlogy(share, share).sum(-1)).exp(), torch.nan)  # 0 log 0 = 0


@_rank(
    title="Stable rank", formula="Σσ² / σ₁²", reference="Rudelson & Vershynin 2007", convention=_CENTRED, default=True
)
def stable_rank(moments: Moments, *, centred: bool = True) -> Tensor:
    """Total variance in units of the largest one: 1 / squared SVD ratio."""
    found = _spectrum(moments, centred=centred)
    return found.total / found.top


@_spectral(
    title="Singular entropy",
    formula="KL(σ/Σσ ‖ uniform) = log d − H(σ/Σσ)",
    reference="Godey et al. 2024, arXiv:2404.07647",
    convention="rows not centred",
    invariant=_RIGID,
    bounds=(0.0, None),
    kinds=("unembed", "embed_weight"),
)
def singular_entropy(moments: Moments, *, centred: bool = False) -> Tensor:
    """How far the singular values are from equal, in nats: 0 for a round cloud; made for the output head."""
    return (math.log(moments.width) - _spectrum(moments, centred=centred, entropy=True).entropy()).clamp_min(0.0)


class Clusters(SampleLines):
    """Sampled rows and, at first use, their clusters; labels are kept when a fold is left out.

    Rows are centred and scaled so that the largest entry is between ½ and 1; they stay on their device.
    """

    @classmethod
    def of(cls, sample: Sample) -> Self:
        cloud = super().of(sample if len(sample) <= MOST_ROWS else sample.part(0, MOST_ROWS))
        if not len(cloud.rows):
            return cloud
        rows = cloud.rows - cloud.rows.mean(0)
        # shares are invariant to scale; squares of very large or small entries would not fit into float32
        return cls(rows / 2.0 ** math.frexp(float(rows.abs().max()))[1], cloud.fold)

    def stretch(self, *, clusters: int, partition: str) -> Tensor:
        """Σ_k (n_k/n) σ₁²/Σσ² over the parts with at least _SMALLEST rows, by line."""
        words = f"clusters need at least {FEWEST} sampled rows, seen {self.n}; give more tokens"
        left = self.staying(self.left_out or (-1,)).sum(0)
        few = left < FEWEST if self.left_out else left[0] < FEWEST
        if bool(few.all()):
            return unless(few, torch.zeros(few.shape), words)
        shares, sizes, folds = once(self.known, (clusters, partition), lambda: self._stretches(clusters, partition))
        # leaving out a fold without sampled rows changes nothing
        columns = [folds.index(fold) if fold in folds else 0 for fold in self.left_out] if self.left_out else 0
        share, size = shares[:, columns], sizes[:, columns] * (sizes[:, columns] >= _SMALLEST)
        return unless(few, (share * size).sum(0) / size.sum(0), words)

    def labels(self, clusters: int = 0) -> Tensor:
        """The k-means label of each row, with K given or (0) chosen by the silhouette of some rows."""
        return once(
            self.known, clusters, lambda: divisive_k_means(self.rows, clusters) if clusters else _chosen(self.rows)
        )

    def _stretches(self, clusters: int, partition: str) -> Stretches:
        labels = torch.zeros(len(self.rows), dtype=torch.int64, device=self.rows.device)
        if partition != "none":
            labels = self.labels(clusters)
        if partition == "random":  # sampled rows are in hash order, so consecutive rows are a random draw
            labels = labels.sort().values
        folds = [-1, *sorted(set(self.fold.tolist()))]
        pieces = _pieces(self.rows, self.staying(folds).to(self.rows), labels.unique(return_inverse=True)[1])
        shares, sizes = (torch.cat(parts).cpu() for parts in zip(*(_share(*piece) for piece in pieces), strict=True))
        return shares.reshape(-1, len(folds)), sizes.reshape(-1, len(folds)), folds


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


def _at_once(rows: Tensor) -> bool:
    """Whether to batch all parts: on a GPU, where launching an operation costs more than these operations."""
    return rows.device.type != "cpu"


def _pieces(rows: Tensor, there: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Rows minus the mean of their part, the sets they belong to, and ‖row‖²: by part, or on a GPU all at once.

    Means are subtracted first, because a difference of squares of tight, distant parts would be rounding noise.
    """
    one_hot = torch.nn.functional.one_hot(labels).to(rows)
    means = one_hot.T @ rows / one_hot.sum(0).clamp_min(1.0).unsqueeze(1)
    centred, energy = rows - means[labels], rows.square().sum(1)
    if _at_once(rows):
        yield centred, (one_hot.unsqueeze(2) * there.unsqueeze(1)).flatten(1), energy
        return
    for k in range(one_hot.shape[1]):
        part = labels == k
        yield centred[part], there[part], energy[part]


def _share(rows: Tensor, member: Tensor, energy: Tensor) -> tuple[Tensor, Tensor]:
    """σ₁²/Σσ² about its mean of each set of rows (`member` [n, sets]), and the size of each set.

    The share of equal rows is set to 1. `energy` is ‖row‖² [n] before a mean was subtracted.
    """
    sizes = member.sum(0)
    mean = member.T @ rows / sizes.clamp_min(1.0).unsqueeze(1)
    total = rows.square().sum(1) @ member - sizes * mean.square().sum(1)
    top, _ = largest_directions(rows, member)
    flat = total <= 1e-28 * (energy @ member).clamp_min(1e-300)  # only rounding errors: the rows are equal
    return torch.where(flat, 1.0, (top / total).clamp(0.0, 1.0)), sizes


def _chosen(rows: Tensor) -> Tensor:
    """The k-means labels for the K with the highest silhouette."""
    few = rows[:SILHOUETTE_ROWS]
    distances = torch.cdist(few, few)
    starts = _starts(rows, CHOICES[-1])
    labelled = _lloyd(rows, starts[1:] or starts)
    return max(labelled, key=lambda labels: silhouette(distances, labels[: len(few)]))


def divisive_k_means(rows: Tensor, clusters: int) -> Tensor:
    """The cluster of each row [n]; deterministic and independent of the order of the rows.

    >>> rows = torch.tensor([[0.0], [9.0], [0.1], [9.2]], dtype=torch.float64)
    >>> divisive_k_means(rows, 2).bincount().tolist()
    [2, 2]
    """
    return _lloyd(rows, _starts(rows, clusters)[-1:])[0]


def _starts(rows: Tensor, most: int) -> list[Tensor]:
    """Initial centres of 1, 2, …, K clusters: the cluster with the largest scatter is split along its main direction.

    After Su & Dy (2007): nothing is drawn at random, so the result does not depend on the order of the rows.
    """

    def mean_scatter(part: Tensor) -> tuple[Tensor, Tensor]:
        mean = part.mean(0)
        return mean, (part - mean).square().sum()

    parts = [rows]
    means, scatter = ([value] for value in mean_scatter(rows))
    centres = [torch.stack(means)]
    while len(parts) < most:
        widest = int(torch.stack(scatter).argmax())
        part, centred = parts[widest], parts[widest] - means[widest]
        direction = centred[centred.square().sum(1).argmax()]  # power iteration from the farthest row
        for _ in range(_POWERS):
            direction = (centred @ direction) @ centred
            direction = direction / torch.linalg.vector_norm(direction).clamp_min(1e-300)
        order = centred @ direction > 0
        if not bool(order.any()):  # equal rows cannot be split
            break
        cut = [part[~order], part[order]]
        parts[widest : widest + 1] = cut
        means[widest : widest + 1], scatter[widest : widest + 1] = zip(*map(mean_scatter, cut), strict=True)
        centres.append(torch.stack(means))
    return centres


def _lloyd(rows: Tensor, starts: list[Tensor]) -> list[Tensor]:
    """Labels by Lloyd's iteration (at most 25 steps) from each of several starts, batched.

    One product compares each row with the centres of all starts; an empty cluster keeps its centre.
    """
    rows = rows.float() if rows.device.type == "cpu" else rows  # TF32 of a training loop would be too coarse
    centres = torch.cat(starts).to(rows)
    sizes = torch.tensor([len(start) for start in starts], device=rows.device)
    first = torch.cumsum(sizes, 0) - sizes  # index of each start's first centre
    slot = torch.arange(int(sizes.max()), device=rows.device)
    column = (first.unsqueeze(1) + slot).clamp_max(len(centres) - 1)  # [starts, slots]
    padding = slot >= sizes.unsqueeze(1)
    nearest = None
    for _ in range(_ITERATIONS):
        gaps = centres.square().sum(1) - 2.0 * rows @ centres.T
        fresh = gaps[:, column].masked_fill(padding, torch.inf).argmin(2) + first  # [n, starts]
        if nearest is not None and torch.equal(fresh, nearest):
            break
        nearest = fresh
        member = torch.zeros_like(gaps).scatter_(1, nearest, 1.0)
        count = member.sum(0).unsqueeze(1)
        centres = torch.where(count > 0, member.T @ rows / count, centres)
    assert nearest is not None
    return list((nearest - first).T)


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
    own = member.bool()
    inside = sums[own] / (sizes[member.argmax(1)] - 1).clamp_min(1)
    outside = (sums / sizes).masked_fill(own, torch.inf).amin(1)
    alone = sizes[member.argmax(1)] == 1
    score = (outside - inside) / torch.maximum(outside, inside)
    return float(torch.where(alone, 0.0, score).mean())
