"""Leave-one-fold-out versions of statistics: sums and moments, sampled rows, neighbour graphs.

One object holds a statistic of all folds and of all folds but each; its leading dimension are the *lines*.
Notation: L lines (the first is everything), P parts of which a fold may have several, w [L, P] of zeros and ones: which
parts a line includes. Sums are w @ parts: without subtraction no digits are lost if one fold dominates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from anisoscope.errors import TooFewRows
from anisoscope.numerics.host import each_on_host
from anisoscope.numerics.linalg import as_float64, row_norms
from anisoscope.numerics.neighbours import first_equal, nearest
from anisoscope.stats.gram import GramMoments
from anisoscope.stats.moments import Moments
from anisoscope.stats.sample import Sample

Part = tuple[int, Any]  # fold, statistic
_READ = 4  # neighbours that the warning in the note of TwoNN reads
_AT_ONCE = 1 << 16  # elements of a matrix that are summed over folds at a time, so that they stay in the cache
_ROUNDS = 8  # rounds of removing near-duplicates; each finds at most as many per row as it has neighbours


def unless(bad: Tensor, value: Tensor, why: str | Callable[[], str]) -> Tensor:
    """The values, NaN where `bad`; a single bad value raises `why` instead.

    >>> unless(torch.tensor([False, True]), torch.tensor([1.0, 2.0]), "the second is not there").tolist()
    [1.0, nan]
    """
    if not bad.ndim and bool(bad):
        raise TooFewRows(why if isinstance(why, str) else why())
    return torch.where(bad, torch.nan, value)


def once(known: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """The cached value of a key; `make` is called at first use."""
    if key not in known:
        known[key] = make()
    return known[key]


def stack_lines(parts: Sequence[Part], folds: Sequence[int]) -> Any:
    """One statistic with a line for all parts and one without each of these folds.

    Every part must have rows; moments must have one part per fold.
    """
    w = torch.tensor([[float(fold != gone) for fold, _ in parts] for gone in (-1, *folds)], dtype=torch.float64)
    counts = w @ torch.tensor([float(part.n) for _, part in parts], dtype=torch.float64)
    if isinstance(parts[0][1], Moments) and _few_and_wide([part for _, part in parts]):
        return GramMoments.of([part for _, part in parts], w)
    if isinstance(parts[0][1], Moments):
        return _moment_lines([part.on_host() for _, part in parts], w, counts)
    kind, states = type(parts[0][1]), [part.tensors() for _, part in parts]
    found: dict[str, Tensor] = {}
    for name, like in states[0].items():
        stacked = torch.stack([state[name].to(like.device) for state in states]).cpu()  # resumed parts are on the host
        if name in kind.largest:  # maxima of values ≥ 0; 0 for a line without parts
            found[name] = (w.view(*w.shape, *[1] * (stacked.ndim - 1)) * stacked).amax(1)
        else:
            found[name] = _sum(w, stacked)
    heads = max(0, max(value.ndim for value in found.values()) - 2)
    return kind(n=counts.reshape(-1, *[1] * heads), **found)


def _few_and_wide(parts: Sequence[Moments]) -> bool:
    """Whether all rows together are no more than their width, so that their Gram matrix is the smaller one."""
    return all(part.thin for part in parts) and sum(part.n for part in parts) <= parts[0].width


def line_of(stacked: Any, index: int) -> Any:
    """One line of a stacked statistic, as a plain statistic."""
    n = int(stacked.n.flatten()[index])
    if isinstance(stacked, GramMoments):
        return stacked.line(index)
    if isinstance(stacked, Moments):
        return Moments(n, stacked.mean[index], stacked.scatter[index])
    return replace(stacked.head(index), n=n)


def _sum(w: Tensor, parts: Tensor) -> Tensor:
    return (w @ parts.reshape(len(parts), -1).double()).view(len(w), *parts.shape[1:])


def _moment_lines(parts: Sequence[Moments], w: Tensor, counts: Tensor) -> Moments:
    """Chan, Golub and LeVeque (1983) for all lines at once: Σ Sₚ + Σ nₚ (mₚ − m)(mₚ − m)ᵀ over the parts of a line."""
    home = parts[0].rows[0].source if parts[0].rows else parts[0].mean
    each_on_host(lambda part: part.scatter, parts, home.device.type)  # products of rows that wait
    device = parts[0].mean.device
    heads = parts[0].mean.ndim - 1
    n = torch.tensor([float(part.n) for part in parts], dtype=torch.float64, device=device)
    w, counts = w.to(device), counts.to(device)
    means = torch.stack([part.mean for part in parts])  # [P, ..., d]
    mean = _sum(w * n, means) / counts.clamp_min(1.0).reshape(-1, *[1] * (heads + 1))
    gaps = means - mean.unsqueeze(1)  # [L, P, ..., d]
    weighted = gaps * (w * n).view(*w.shape, *[1] * (heads + 1))
    scatter = _left_out_sums([part.scatter for part in parts], w)
    if heads:
        scatter += weighted.movedim(1, -1) @ gaps.movedim(1, -2)  # [L, ..., d, P] @ [L, ..., P, d]
    else:
        each_on_host(lambda line: scatter[line].addmm_(weighted[line].T, gaps[line]), range(len(w)), device.type)
    return Moments(counts.reshape(-1, *[1] * heads), mean, scatter)


def _left_out_sums(parts: Sequence[Tensor], w: Tensor) -> Tensor:
    """w @ parts for lines of all parts or all but one, without stacking the (large) parts; few of their rows a time."""
    out = parts[0].new_empty(len(w), *parts[0].shape)
    lacking = [row.index(0.0) if 0.0 in row else -1 for row in w.tolist()]
    place = {p: line for line, p in enumerate(lacking) if p >= 0}
    flat = [part.flatten(0, -2) for part in parts]
    into, step = out.flatten(1, -2), max(1, _AT_ONCE // out.shape[-1]) if out.device.type == "cpu" else len(flat[0])

    def some(start: int) -> None:
        here = slice(start, start + step)
        for places in (range(len(parts)), range(len(parts) - 1, -1, -1)):  # sums of the parts before and after each
            run = torch.zeros_like(flat[0][here])
            for p in places:
                if p in place and places[0] == 0:
                    into[place[p], here] = run
                elif p in place:
                    into[place[p], here] += run
                run += flat[p][here]
        for line, p in enumerate(lacking):
            if p < 0:
                into[line, here] = run

    each_on_host(some, range(0, len(flat[0]), step), out.device.type)
    return out


@dataclass(frozen=True)
class SampleLines:
    """Sampled rows with cached results for all rows and without each fold; metrics subclass it."""

    rows: Tensor  # [n, d] float64
    fold: Tensor  # [n]
    left_out: tuple[int, ...] = ()  # a line for each; () for all rows
    known: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)  # cache, shared by all lines

    @classmethod
    def of(cls, sample: Sample) -> Self:
        return cls(as_float64(sample.rows.flatten(1)), sample.fold)

    def without(self, *folds: int) -> Self:
        """The same rows with a line without each of these folds; −1 leaves out none."""
        return replace(self, left_out=folds)

    @property
    def n(self) -> int:
        """The number of rows of the first line."""
        return int((self.fold != self.left_out[0]).sum()) if self.left_out else len(self.rows)

    def staying(self, folds: Sequence[int]) -> Tensor:
        """Whether each row remains without each of these folds: bool [n, folds], on the host."""
        return self.fold.unsqueeze(1) != torch.tensor(folds)


def on_sample(need: type) -> bool:
    """Whether a statistic is computed from the sampled rows instead of by fold."""
    return issubclass(need, Sample | Neighbours | SampleLines)


def spared(wanted: int) -> int:
    """Neighbours stored for a metric that reads `wanted`: enough in most cases without the first positions.

    >>> spared(2), spared(20)
    (9, 36)
    """
    return wanted + 6 + wanted // 2


@dataclass(frozen=True)
class Neighbours:
    """The nearest-neighbour graph of distinct rows, distances ascending.

    `wanted` is the number of neighbours that metrics read; the graph stores a few more, so that rows can be taken out.
    A row that is taken out is nobody's neighbour. A row that is not *counted* is still a neighbour of others; lines are
    the same graph with other rows counted.
    """

    distance: Tensor  # [n, k] float64
    index: Tensor  # [n, k]
    wanted: int
    duplicates: int = 0  # rows removed as duplicates
    there: Tensor | None = None  # [n] whether a row was not taken out; None if none was
    counted: Tensor | None = None  # [lines, n] whether a row counts; None without lines
    known: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, rows: Tensor, wanted: int, *, tolerance: float = 0.0, spare: bool = True) -> tuple[Neighbours, Tensor]:
        """The graph of the distinct rows, and for every row the index of the distinct row that represents it.

        Rows closer than `tolerance` times their norm count as equal: a causal model gives equal rows for equal
        prefixes, but in a float32 forward pass whether they are bit-equal depends on the batch.
        """
        stands, held = first_equal(rows), spared(wanted) if spare else max(wanted, _READ)
        for rounds_left in range(_ROUNDS if tolerance else 0, -1, -1):
            kept = (stands == torch.arange(len(stands), device=stands.device)).nonzero().squeeze(1)
            distinct = rows if len(kept) == len(rows) else rows[kept]
            if len(kept) < 2:
                distance, index = torch.empty(len(kept), 0).double(), torch.empty(len(kept), 0).long()
                break
            distance, index = nearest(distinct, held)
            if not rounds_left:
                break
            # the earliest row within the tolerance represents the others; a sample's order is independent of batching
            limit = tolerance * row_norms(distinct).unsqueeze(1).to(distance.device)
            number = torch.arange(len(distinct), device=index.device).unsqueeze(1)
            earlier = torch.where((distance <= limit) & (index < number), index, number).amin(1).to(kept.device)
            if bool((kept[earlier] == kept).all()):
                break
            stands[kept] = kept[earlier]
        stands = stands.cpu()
        while not bool((stands[stands] == stands).all()):  # a representative may have one itself
            stands = stands[stands]
        return cls(distance, index, wanted, len(rows) - len(kept)), torch.searchsorted(kept.cpu(), stands)

    def __len__(self) -> int:
        return len(self.distance)

    @property
    def present(self) -> Tensor:
        """Whether each row [n], or each row of a line [lines, n], is there and counts."""
        there = torch.ones(len(self), dtype=torch.bool, device=self.index.device) if self.there is None else self.there
        return there if self.counted is None else there & self.counted

    def near(self, k: int) -> tuple[Tensor, Tensor]:
        """Distances to the k nearest [n, k], infinite where there are fewer; which rows have k and count [..., n]."""
        near = self.distance[:, :k]
        if near.shape[1] < k:
            near = torch.nn.functional.pad(near, (0, k - near.shape[1]), value=torch.inf)
        return near, (near[:, -1] < torch.inf) & self.present

    def without(self, there: Tensor) -> Neighbours:
        """The graph of the rows to keep by a mask [n]; indices stay, rows taken out are at infinite distance."""
        left = there[self.index].logical_and_(there.unsqueeze(-1))
        # the new column of each neighbour that is kept; an extra last column collects the others
        place = left.cumsum(-1).sub_(1).masked_fill_(left.logical_not_(), self.wanted).clamp_max_(self.wanted)
        shape = (len(left), self.wanted + 1)
        distance = self.distance.new_full(shape, torch.inf).scatter_(-1, place, self.distance)
        index = self.index.new_zeros(shape).scatter_(-1, place, self.index)
        return Neighbours(distance[:, : self.wanted], index[:, : self.wanted], self.wanted, there=there)

    def cut(self, wanted: int) -> Neighbours:
        """The graph that a search for fewer neighbours would give."""
        held = spared(wanted)
        return replace(self, distance=self.distance[:, :held], index=self.index[:, :held], wanted=wanted)


@dataclass(frozen=True)
class Graph:
    """One batch's neighbour graph of its distinct rows, with the labels of all copies."""

    neighbours: Neighbours
    stands: Tensor  # for every row of the batch, the index of the distinct row that represents it
    fold: Tensor
    first: Tensor
    context: Tensor
    _known: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, sample: Sample, *, wanted: int, tolerance: float = 0.0, spare: bool = True) -> Graph:
        neighbours, stands = Neighbours.of(sample.rows.flatten(1), wanted, tolerance=tolerance, spare=spare)
        return cls(neighbours, stands, sample.fold, sample.label("first").bool(), sample.label("context"))

    def left(self, *, without_first: bool = False) -> Neighbours:
        """The graph without the first rows of contexts, or whole; a row goes only if all of its copies do."""

        def build() -> Neighbours:
            there = self._there(without_first, [-1])[0]
            return (
                self.neighbours
                if bool(there.all())
                else self.neighbours.without(there.to(self.neighbours.index.device))
            )

        return once(self._known, without_first, build)

    def lines(self, *, without_first: bool, folds: Sequence[int]) -> Neighbours:
        """The graph with a line that does not count each of these folds (−1: all count).

        The neighbours are those among all rows: the jackknife leaves out what the rows of a fold contribute, not what
        they are to others. To search again without them would add the noise of other neighbours, and give intervals
        that are 1.4 to 1.6 times too wide.
        """

        def build() -> Neighbours:
            counted = self._there(without_first, folds).to(self.neighbours.index.device)
            return replace(self.left(without_first=without_first), counted=counted, known={})

        return once(self._known, (without_first, *folds), build)

    def rows(self, *, without_first: bool) -> tuple[int, int]:
        """The numbers of distinct rows and of rows removed as duplicates."""
        distinct = int(self._there(without_first, [-1]).sum())
        return distinct, int(self._rows(without_first, [-1]).sum()) - distinct

    def contexts(self) -> Tensor:
        """A context [n] of each distinct row: of its copies the one with the smallest key."""
        found = torch.full((len(self.neighbours),), torch.iinfo(torch.int64).max)
        return found.scatter_reduce_(0, self.stands, self.context, reduce="amin")

    def _there(self, without_first: bool, folds: Sequence[int]) -> Tensor:
        """Whether each distinct row remains without each of these folds: bool [folds, n]."""
        found = torch.zeros(len(folds), len(self.neighbours), dtype=torch.int32)
        return found.index_add_(1, self.stands, self._rows(without_first, folds).to(torch.int32)) > 0

    def _rows(self, without_first: bool, folds: Sequence[int]) -> Tensor:
        stay = self.fold != torch.tensor(folds).unsqueeze(1)
        return stay & ~self.first if without_first else stay


def widening(parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> float:
    """By how much intervals over contexts must be widened because rows of different contexts share neighbours.

    Notation: ψᵢ what row i contributes to an estimate, minus the mean; c(i) its context; i ~ k where one of two rows of
    different contexts is among the neighbours that the estimator reads of the other.
    The jackknife over contexts has the variance Σ_c (Σ_{c(i)=c} ψᵢ)². Rows that read each other are dependent, so that
    Σ_{i~k} ψᵢψₖ is missing from it (as in estimators for spatial dependence, Conley 1999); the share of pairs that are
    linked is added, because the ψ sum to 0. √(1 + both), at least 1; ψ of several batches are summed by context.
    `parts` are ψ [n] (NaN: row not used), contexts [n] and neighbours read [n, k] of each batch.
    """
    shared = links = apart = 0.0
    terms, homes = [], []
    for contributions, contexts, index in parts:
        used = contributions.isfinite()
        n = int(used.sum())
        psi = torch.where(used, contributions - contributions[used].mean(), 0.0) / max(1, n)
        terms.append(psi[used])
        homes.append(contexts[used])
        i, k = _links(index, used, contexts)
        shared, links = shared + 2.0 * float((psi[i] * psi[k]).sum()), links + 2.0 * len(i)
        apart += n * n - float(_by_context(torch.ones(n, dtype=torch.float64), homes[-1]).square().sum())
    within = float(_by_context(torch.cat(terms), torch.cat(homes)).square().sum())
    return max(1.0, 1.0 + shared / within + links / apart) ** 0.5 if within and apart else 1.0


def _by_context(values: Tensor, contexts: Tensor) -> Tensor:
    """The sum of the values of each context; rows that are a context each, in rising order, need no sorting.

    >>> _by_context(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([5, 4, 5])).tolist()
    [2.0, 4.0]
    """
    if bool((contexts[1:] > contexts[:-1]).all()):
        return values
    kinds, place = torch.unique(contexts, return_inverse=True)
    return values.new_zeros(len(kinds)).index_add_(0, place, values)


def _links(index: Tensor, used: Tensor, contexts: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of used rows of different contexts, one of which has the other among its neighbours; each pair once."""
    n, k = index.shape
    one, two = torch.arange(n).repeat_interleave(k), index.flatten()
    chosen = used[one] & used[two] & (contexts[one] != contexts[two])
    pairs = torch.unique((torch.minimum(one, two) * n + torch.maximum(one, two))[chosen])
    return pairs // n, pairs % n


def sample_graphs(
    sample: Sample, *, wanted: int, batch: int | None, tolerance: float = 0.0, spare: bool = True
) -> list[Graph]:
    """Graphs of consecutive batches of the sample, whose hash order is random; see `sample_batches`.

    Rows closer than `tolerance` times their norm are one row; without `spare` no rows can be taken out later.
    """
    parts = sample_batches(sample, batch or max(1, len(sample)))
    return [Graph.of(part, wanted=wanted, tolerance=tolerance, spare=spare) for part in parts]


def sample_batches(sample: Sample, size: int) -> list[Sample]:
    """Consecutive batches of `size` rows; a shorter last batch is dropped unless it is the only one.

    >>> ten = Sample(10).update(torch.eye(10), context=torch.arange(10))
    >>> [len(part) for part in sample_batches(ten, 4)], [len(part) for part in sample_batches(ten, 12)]
    ([4, 4], [10])
    """
    count = max(1, len(sample) // size) if len(sample) else 0
    return [sample.part(i * size, (i + 1) * size) for i in range(count)]
