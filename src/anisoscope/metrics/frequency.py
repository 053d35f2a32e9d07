"""Token frequency: bins of equal mass, and correlations of a type's frequency with the spread of its rows.

Notation: c_v occurrences of type v in the training corpus, m occurrences of a type among the rows at hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.engine.metric import measured
from anisoscope.stats.directions import UNSET

STEPS = ("tangent", "sweep", "train")
BINS = 5
OCCURRENCES = 10  # rows used of each type; the same for all, so that frequent types do not look wider
FEWEST_TYPES = 8
_ARTICLE = "Revisiting Anisotropy, arXiv:2604.08764"
_over_types = partial(measured, *STEPS, reference=_ARTICLE, invariant=("rotation", "scale"))
_TOGETHER = 1 << 21  # elements of resamplings held at a time
_NONE = 1e-14  # share of the variance
Statistic = Callable[[Tensor, Tensor, Tensor], Tensor]  # of Σ(x − x̄)², Σ(y − ȳ)² and Σ(x − x̄)(y − ȳ)


def equal_mass_bins(counts: Tensor, *, bins: int = BINS) -> Tensor:
    """The bin of every type: about as many tokens in each, 0 for the most frequent types, −1 for unseen types.

    A type is in the bin that contains the middle of its own mass; a very frequent type may leave bins empty.

    >>> equal_mass_bins(torch.tensor([50, 25, 15, 10, 0]), bins=2).tolist()
    [0, 1, 1, 1, -1]
    """
    counts = counts.double().cpu()
    if counts.ndim != 1 or not bool((counts >= 0).all()) or float(counts.sum()) <= 0:
        raise AnisoscopeError(
            f"frequencies of shape {tuple(counts.shape)} with sum {float(counts.sum()):g} are no counts of types; "
            "expected one non-negative number per token of the vocabulary, not all 0."
        )
    order = torch.argsort(counts, descending=True, stable=True)
    mass = counts[order] / counts.sum()
    middle = mass.cumsum(0) - mass / 2
    found = torch.full(counts.shape, -1, dtype=torch.int64)
    found[order] = (middle * bins).long().clamp(0, bins - 1)
    found[counts == 0] = -1
    return found


@measured(
    *STEPS,
    title="Entropy of the tokens",
    formula="−Σ p log₂ p",
    reference="Shannon 1948",
    convention="in bits, over the types that occur",
    bounds=(0.0, None),
)
def unigram_entropy(counts: Tensor) -> float:
    """Entropy of the token types as they were sampled for training; lower is more uneven.

    >>> unigram_entropy(torch.tensor([5, 5, 0]))
    1.0
    """
    share = counts.double()[counts > 0] / counts.double().sum()
    return float(-(share * share.log2()).sum())


@measured(
    *STEPS,
    title="Effective entropy of the targets",
    formula="−Σ q log₂ q,  q ∝ p·w",
    reference="ours",
    convention="in bits, over the types that occur; w = weight of a target in the loss, 1 where nothing is weighted",
    bounds=(0.0, None),
)
def target_entropy(counts: Tensor, weights: Tensor | None = None) -> float:
    """Entropy of the target types as they count in the training loss; lower is more uneven.

    It is that of the tokens unless the loss is weighted by the frequency of the target.

    >>> target_entropy(torch.tensor([6, 2, 0]), torch.tensor([1.0, 3.0, 9.0]))
    1.0
    """
    return unigram_entropy(counts if weights is None else counts * weights.to(counts.device).double())


def bin_of(tokens: Tensor, bins: Tensor) -> Tensor:
    """The bin of every row's token; −1 for rows without a token, unseen types and ids beyond the vocabulary."""
    known = (tokens >= 0) & (tokens < len(bins))
    return torch.where(known, bins.to(tokens.device)[tokens.clamp(0, len(bins) - 1)], -1)


@dataclass(frozen=True)
class TypeSpread:
    """For each type: its log frequency, the RMS distance of its rows to their centroid, and their mean norm."""

    frequency: Tensor  # [types] log c
    distance: Tensor  # [types] √(Σ‖x − x̄‖² / (m − 1))
    norm: Tensor  # [types] mean ‖x‖


def contextual_spread(x: Tensor, tokens: Tensor, counts: Tensor, *, order: Tensor) -> TypeSpread:
    """The spread of every type with at least OCCURRENCES rows, over its first OCCURRENCES rows in `order`."""
    found, at = rows_of_types(tokens, counts, order=order)
    distance, norm = type_distances(x, at).cpu()
    return TypeSpread(found, distance, norm)


def rows_of_types(tokens: Tensor, counts: Tensor, *, order: Tensor) -> tuple[Tensor, Tensor]:
    """Log frequencies of the types that have OCCURRENCES rows, and these rows [types, OCCURRENCES]."""
    m = OCCURRENCES
    tokens, counts = tokens.cpu(), counts.cpu().double()
    usable = (tokens >= 0) & (tokens < len(counts))
    ranked = order.cpu().argsort(stable=True)
    ranked = ranked[usable[ranked]]
    ranked = ranked[tokens[ranked].argsort(stable=True)]  # by type, and by `order` within a type
    types, number = torch.unique_consecutive(tokens[ranked], return_counts=True)
    enough = (number >= m) & (counts[types] > 0)
    start = (number.cumsum(0) - number)[enough]
    return counts[types[enough]].log(), ranked[start[:, None] + torch.arange(m)]


def type_distances(x: Tensor, at: Tensor) -> Tensor:
    """The RMS distance of the rows of each type to their centroid, and their mean norm [2, types]."""
    rows = x[at.to(x.device)].double()  # [types, m, d]
    distance = ((rows - rows.mean(1, keepdim=True)).square().sum((1, 2)) / (at.shape[1] - 1)).sqrt()
    return torch.stack([distance, rows.norm(dim=-1).mean(1)])


@dataclass
class TemporalSpread:
    """The spread of each row of a weight table over evenly spaced training steps, from running sums."""

    n: int = 0
    total: Tensor = UNSET  # [V, d]
    squares: Tensor = UNSET  # [V]
    norms: Tensor = UNSET

    def update(self, table: Tensor) -> TemporalSpread:
        rows = table.detach().double()
        parts = {"total": rows, "squares": rows.square().sum(1), "norms": rows.norm(dim=1)}
        for name, part in parts.items():  # a state read from disk is on the host
            kept = getattr(self, name)
            setattr(self, name, part.clone() if kept is None else kept.to(part.device).add_(part))
        self.n += 1
        return self

    @classmethod
    def joined(cls, parts: Sequence[tuple[int, TemporalSpread]]) -> TemporalSpread:
        """That of a whole table from those of its rows, each with the number of its first row; empty if some lack."""
        firsts = dict(sorted(parts, key=lambda pair: pair[0]))
        kept, ends = list(firsts.values()), [start + len(part.norms) for start, part in firsts.items()]
        if list(firsts) != [0, *ends[:-1]] or len({part.n for part in kept}) > 1:
            return cls()
        names = ("total", "squares", "norms")
        return cls(kept[0].n, *(torch.cat([getattr(part, name).cpu() for part in kept]) for name in names))

    def spread(self, counts: Tensor) -> TypeSpread:
        """The spread of the types that occur."""
        if self.n < 2:
            return TypeSpread(*torch.empty(3, 0, dtype=torch.float64))
        about = (self.squares - self.total.square().sum(1) / self.n).clamp_min(0.0) / (self.n - 1)
        counts = counts.cpu().double()[: len(about)]
        seen = (counts > 0).nonzero().squeeze(1)  # a table may be longer than the vocabulary
        return TypeSpread(counts[seen].log(), about.sqrt().cpu()[seen], (self.norms / self.n).cpu()[seen])


@dataclass(frozen=True)
class Correlation:
    """A correlation over types with a bootstrap interval and a permutation p (two-sided)."""

    value: float
    low: float
    high: float
    p: float
    types: int


def correlate_types(x: Tensor, y: Tensor, *, method: str = "pearson", draws: int = 999, seed: int = 0) -> Correlation:
    """Pearson or Spearman correlation of two columns; NaN with fewer than 8 points or without variance.

    >>> correlate_types(torch.arange(20.0), -torch.arange(20.0)).value
    -1.0
    """
    return resampled([_correlated(x, y, method=method)], draws=draws, seed=seed)[0]


@dataclass(frozen=True)
class Points:
    """Two columns of points, and a statistic of them that is to be resampled."""

    statistic: Statistic
    x: Tensor
    y: Tensor
    permuted: bool = True  # whether permutations of it give a p


def _correlated(x: Tensor, y: Tensor, *, method: str) -> Points:
    x, y = x.double().cpu(), y.double().cpu()
    return Points(_pearson, *((_ranks(x), _ranks(y)) if method == "spearman" else (x, y)))


@_over_types(
    title="Frequency and spread",
    formula="corr(log f, RMS distance to the type's centroid)",
    convention=f"over types, {OCCURRENCES} rows of each in context (over=context) or its row of the embedding through "
    "training (over=time); a bootstrap interval over types; normalised=1: distance over the mean norm",
    bounds=(-1.0, 1.0),
)
def frequency_spread(found: TypeSpread, *, method: str, normalised: bool, seed: int = 0) -> Correlation:
    """Correlation, over token types, of log frequency with how far a type's rows lie from their own centroid."""
    return resampled([spread_points(found, method=method, normalised=normalised)], seed=seed)[0]


def spread_points(found: TypeSpread, *, method: str, normalised: bool) -> Points:
    """What `frequency_spread` is a statistic of."""
    distance = found.distance / found.norm.clamp_min(1e-300) if normalised else found.distance
    return _correlated(found.frequency, distance, method=method)


@_over_types(
    title="Frequency and spread, p",
    formula="permutation p",
    convention="two-sided, (1 + #{|r| as large}) / (draws + 1)",
    bounds=(0.0, 1.0),
)
def frequency_spread_p(correlation: Correlation) -> float:
    """How often a permutation of the types correlates as strongly."""
    return correlation.p


@_over_types(
    title="Exponent of spread",
    formula="β of distance ∝ f^−β",
    convention="minus the slope of log distance on log frequency, with a bootstrap interval over types",
)
def frequency_beta(found: TypeSpread, *, draws: int = 999, seed: int = 0) -> Correlation:
    """How fast the distance of a type's rows to their centroid falls with its frequency.

    >>> f = torch.arange(1.0, 30.0)
    >>> round(frequency_beta(TypeSpread(f.log(), f**-0.25, f)).value, 6)
    0.25
    """
    return resampled([beta_points(found)], draws=draws, seed=seed)[0]


def beta_points(found: TypeSpread) -> Points:
    """What `frequency_beta` is a statistic of: the types whose rows differ."""
    alive = found.distance > 0
    x, y = found.frequency[alive].double().cpu(), found.distance[alive].double().cpu().log()
    return Points(_decay, x, y, permuted=False)


def resampled(points: Sequence[Points], *, draws: int = 999, seed: int = 0) -> list[Correlation]:
    """Statistics with their bootstrap intervals (of the values that are finite) and permutation p.

    NaN with fewer than 8 points or without variance. A statistic is a function of sums over the points, so that
    resamplings are products with their multiplicities; those with equally many points share the resamplings, whose
    drawing takes longer than all products together.
    """
    found = [Correlation(math.nan, math.nan, math.nan, math.nan, len(one.x)) for one in points]
    alike: dict[int, list[int]] = {}
    for i, one in enumerate(points):
        flat = len(one.x) < FEWEST_TYPES or float(one.x.std()) == 0 or (one.permuted and float(one.y.std()) == 0)
        if not flat:
            alike.setdefault(len(one.x), []).append(i)
    for numbers in alike.values():
        mine = _resampled([points[i] for i in numbers], draws=draws, seed=seed)
        for i, correlation in zip(numbers, mine, strict=True):
            found[i] = correlation
    return found


def _resampled(points: Sequence[Points], *, draws: int, seed: int) -> list[Correlation]:
    """The same of statistics that have equally many points."""
    n = len(points[0].x)
    columns, of = _distinct([one.x for one in points])  # most have the same frequencies
    A, B = [x - x.mean() for x in columns], torch.stack([one.y - one.y.mean() for one in points], 1)
    X = torch.stack(A, 1)[:, of]
    xx, yy, xy = X.square().sum(0), B.square().sum(0), (X * B).sum(0)
    values = _each(points, xx, yy, xy)
    products = torch.cat([X, B, X * X, B * B, X * B], 1)
    orders = (_few_resamplings if draws * n <= _TOGETHER else _resamplings)(n, draws, seed)
    null, boot = [], []
    for order, often in orders:
        mixed = [torch.empty_like(often).scatter_(1, order, a.expand_as(often)) @ B for a in A]  # Σ a_i b_order(i)
        null.append(_each(points, xx, yy, torch.stack([mixed[j][:, i] for i, j in enumerate(of)], 1)))
        first, second, aa, bb, ab = (often @ products).chunk(5, 1)
        spreads = [(aa - first.square() / n) / xx, (bb - second.square() / n) / yy]
        same = (spreads[0] <= _NONE) | (spreads[1] <= _NONE)  # resamples without variance, but for rounding
        drawn = _each(points, spreads[0] * xx, spreads[1] * yy, ab - first * second / n)
        boot.append(torch.where(same, torch.nan, drawn))
    reached = (torch.cat(null).abs() >= values.abs() - 1e-12).sum(0)
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    found = []
    for one, value, number, mine in zip(points, values.tolist(), reached.tolist(), torch.cat(boot).T, strict=True):
        low, high = torch.quantile(mine[mine.isfinite()], ends).tolist()
        found.append(Correlation(value, low, high, (1 + number) / (draws + 1) if one.permuted else math.nan, n))
    return found


def _distinct(columns: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
    """The columns that differ, and which of them each one is."""
    found: list[Tensor] = []
    of = []
    for column in columns:
        same = next((i for i, other in enumerate(found) if torch.equal(other, column)), len(found))
        found += [column] if same == len(found) else []
        of.append(same)
    return found, of


def _each(points: Sequence[Points], xx: Tensor, yy: Tensor, xy: Tensor) -> Tensor:
    """The statistic of each of the points, of sums [..., points]."""
    columns = zip(points, *(part.unbind(-1) for part in (xx, yy, xy)), strict=True)
    return torch.stack([one.statistic(*sums) for one, *sums in columns], -1)


def _decay(xx: Tensor, yy: Tensor, xy: Tensor) -> Tensor:
    return -(xy / xx)


def _resamplings(n: int, draws: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Permutations of n points, and how often each is in bootstrap samples, in batches: all would take gigabytes."""
    size, generator = max(1, _TOGETHER // n), torch.Generator().manual_seed(seed)
    for count in (min(size, draws - done) for done in range(0, draws, size)):
        order = torch.rand(count, n, generator=generator).argsort(1)
        drawn, often = torch.randint(n, (count, n), generator=generator), torch.zeros(count, n, dtype=torch.float64)
        yield order, often.scatter_add_(1, drawn, torch.ones(1, 1, dtype=torch.float64).expand(count, n))


@lru_cache(maxsize=8)  # every layer uses the same
def _few_resamplings(n: int, draws: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    return list(_resamplings(n, draws, seed))


def _pearson(xx: Tensor, yy: Tensor, xy: Tensor) -> Tensor:
    return (xy / (xx * yy).sqrt()).clamp(-1.0, 1.0)


def _ranks(x: Tensor) -> Tensor:
    """Ranks; ties have their average rank."""
    _, inverse, count = torch.unique(x, return_inverse=True, return_counts=True)
    return (count.cumsum(0).double() - (count.double() - 1) / 2)[inverse]
