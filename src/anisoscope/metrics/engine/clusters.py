"""Clusters of sampled rows: k-means with K by silhouette, made once and kept when folds of contexts are left out.

Notation: n rows X about their mean, K clusters of n_k rows, L the label of each row, σ singular values of a cluster's
rows about their own mean. Rows are looked at where they are: on a GPU all of this runs there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from anisoscope.errors import TooFewRows
from anisoscope.metrics.engine.lines import unless
from anisoscope.numerics.factorisation.krylov import largest_directions
from anisoscope.numerics.linalg import has_float64
from anisoscope.stats.sample import Sample

MOST_ROWS = 4096
SILHOUETTE_ROWS = 1024
CHOICES = range(2, 11)
FEWEST = 64  # rows
_ITERATIONS = 25
_POWERS = 12
_SMALLEST = 3  # rows of a cluster that has a direction to speak of
PARTITIONS = ("clusters", "random", "none")
Stretches = tuple[Tensor, Tensor, list[int]]  # σ₁²/Σσ² and rows of every part [K, 1 + folds], the folds left out


@dataclass(frozen=True)
class Clusters:
    """Sampled rows and, once asked for, their clusters; leaving a fold out keeps the labels of the rows that stay."""

    rows: Tensor  # [n, d] float64 about their mean, the largest entry between ½ and 1
    fold: Tensor  # [n]
    left_out: tuple[int, ...] = ()  # a line for each; () for all rows
    _known: dict[Any, Any] = field(default_factory=dict, repr=False)  # shared with every fold left out

    @classmethod
    def of(cls, sample: Sample) -> Clusters:
        rows = sample.rows[:MOST_ROWS].flatten(1)
        rows = rows.double() if has_float64(rows.device) else rows.cpu().double()
        if not len(rows):
            return cls(rows, sample.fold)
        rows = rows - rows.mean(0)
        # shares do not depend on the unit; squares of rows far from 1 would leave float32
        return cls(rows / 2.0 ** math.frexp(float(rows.abs().max()))[1], sample.fold[:MOST_ROWS])

    def without(self, *folds: int) -> Clusters:
        """Lines of the rows that stay when each of these folds is left out; −1 leaves out none."""
        return replace(self, left_out=folds)

    @property
    def n(self) -> int:
        return len(self.rows)

    def stretch(self, *, clusters: int, partition: str) -> Tensor:
        """Σ_k (n_k/n) σ₁²/Σσ² over the parts of a partition that are not too small, by line."""
        left = (self.fold.unsqueeze(1) != torch.tensor(self.left_out or (-1,))).sum(0)
        few = left < FEWEST if self.left_out else left[0] < FEWEST
        if bool(few.all()):
            return unless(few, torch.zeros(few.shape), lambda: _too_few(self.n))
        shares, sizes, folds = self._stretches(clusters, partition)
        # a fold of which none was sampled is the line of all rows
        columns = [folds.index(fold) if fold in folds else 0 for fold in self.left_out] if self.left_out else 0
        share, size = shares[:, columns], sizes[:, columns] * (sizes[:, columns] >= _SMALLEST)
        return unless(few, (share * size).sum(0) / size.sum(0), lambda: _too_few(self.n))

    def labels(self, clusters: int = 0) -> Tensor:
        """The k-means label of each row, with K given or chosen by the silhouette of some rows."""
        if clusters not in self._known:
            self._known[clusters] = k_means(self.rows, clusters) if clusters else _chosen(self.rows)
        found: Tensor = self._known[clusters]
        return found

    def _stretches(self, clusters: int, partition: str) -> Stretches:
        """Those of one partition, kept."""
        if (clusters, partition) not in self._known:
            self._known[clusters, partition] = self._find_stretches(self._parts(clusters, partition))
        known: Stretches = self._known[clusters, partition]
        return known

    def _parts(self, clusters: int, partition: str) -> Tensor:
        if partition == "none":
            return torch.zeros(len(self.rows), dtype=torch.int64, device=self.rows.device)
        labels = self.labels(clusters)
        # sampled rows lie in hash order, so runs of them are random draws
        return labels.sort().values if partition == "random" else labels

    def _find_stretches(self, labels: Tensor) -> Stretches:
        """Of a partition, given as labels."""
        folds = [-1, *sorted(set(self.fold.tolist()))]
        there = (self.fold.unsqueeze(1) != torch.tensor(folds)).to(self.rows)  # [n, 1 + folds]
        pieces = _pieces(self.rows, there, labels.unique(return_inverse=True)[1])
        shares, sizes = (torch.cat(parts).cpu() for parts in zip(*(_share(*piece) for piece in pieces), strict=True))
        return shares.reshape(-1, len(folds)), sizes.reshape(-1, len(folds)), folds


def _too_few(n: int) -> TooFewRows:
    return TooFewRows(f"clusters need at least {FEWEST} sampled rows, seen {n}; give more tokens")


def _at_once(rows: Tensor) -> bool:
    """Whether starting an operation costs more than what it works out, as on a GPU."""
    return rows.device.type != "cpu"


def _pieces(rows: Tensor, there: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Rows about the mean of their part, the sets they belong to, and ‖row‖²: part by part, or on a GPU all at once.

    About the mean first: of the squares of tight, distant parts a difference would leave rounding alone.
    """
    one_hot = torch.nn.functional.one_hot(labels).to(rows)
    means = one_hot.T @ rows / one_hot.sum(0).clamp_min(1.0).unsqueeze(1)
    centred, energy = rows - means[labels], rows.square().sum(1)
    if _at_once(rows):
        yield centred, (one_hot.unsqueeze(2) * there.unsqueeze(1)).flatten(1), energy
        return
    for k in range(one_hot.shape[1]):
        mine = labels == k
        yield centred[mine], there[mine], energy[mine]


def _share(rows: Tensor, member: Tensor, energy: Tensor) -> tuple[Tensor, Tensor]:
    """σ₁²/Σσ² of some rows about their own mean, for each of several sets of them, and the rows of each.

    Rows that are all equal have no direction: 1. `energy` is ‖row‖² before a mean was taken away.
    """
    sizes = member.sum(0)
    mean = member.T @ rows / sizes.clamp_min(1.0).unsqueeze(1)
    total = rows.square().sum(1) @ member - sizes * mean.square().sum(1)
    top, _ = largest_directions(rows, member)
    flat = total <= 1e-28 * (energy @ member).clamp_min(1e-300)  # what rounding leaves of equal rows
    return torch.where(flat, 1.0, (top / total).clamp(0.0, 1.0)), sizes


def _chosen(rows: Tensor) -> Tensor:
    """Labels with the K whose silhouette is highest."""
    few = rows[:SILHOUETTE_ROWS]
    distances = torch.cdist(few, few)
    starts = _starts(rows, CHOICES[-1])
    labelled = _lloyd(rows, starts[1:] or starts)
    return max(labelled, key=lambda labels: silhouette(distances, labels[: len(few)]))


def k_means(rows: Tensor, clusters: int) -> Tensor:
    """The label of each row; the same for any order of the rows.

    >>> rows = torch.tensor([[0.0], [9.0], [0.1], [9.2]], dtype=torch.float64)
    >>> k_means(rows, 2).bincount().tolist()
    [2, 2]
    """
    return _lloyd(rows, _starts(rows, clusters)[-1:])[0]


def _starts(rows: Tensor, most: int) -> list[Tensor]:
    """Centres of 1, 2, …, K clusters: the one with the largest scatter is cut in two across its longest direction.

    After Su & Dy (2007): no draw, so the result depends on the rows and not on their order.
    """
    parts = [rows]
    means, scatter = ([value] for value in _mean_scatter(rows))
    centres = [torch.stack(means)]
    while len(parts) < most:
        widest = int(torch.stack(scatter).argmax())
        part = parts[widest]
        order = _along(part - means[widest]) > 0
        if not bool(order.any()):  # equal rows cannot be cut
            break
        cut = [part[~order], part[order]]
        parts[widest : widest + 1] = cut
        means[widest : widest + 1], scatter[widest : widest + 1] = zip(*map(_mean_scatter, cut), strict=True)
        centres.append(torch.stack(means))
    return centres


def _along(centred: Tensor) -> Tensor:
    """Where each row lies along a long direction: that of the farthest row, turned by a few powers of the scatter."""
    direction = centred[centred.square().sum(1).argmax()]
    for _ in range(_POWERS):
        direction = (centred @ direction) @ centred
        direction = direction / torch.linalg.vector_norm(direction).clamp_min(1e-300)
    return centred @ direction


def _mean_scatter(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The mean row, and the sum of squared distances from it."""
    mean = rows.mean(0)
    return mean, (rows - mean).square().sum()


def _lloyd(rows: Tensor, starts: list[Tensor]) -> list[Tensor]:
    """Lloyd's iterations from several starts side by side, 25 at most: labels of each, in the order of the starts.

    Each row is compared with the centres of all starts in one product; a cluster that runs empty stays where it is.
    """
    rows = rows.float() if rows.device.type == "cpu" else rows  # TF32 of a training loop would be too coarse
    centres = torch.cat(starts).to(rows)
    sizes = torch.tensor([len(start) for start in starts], device=rows.device)
    first = torch.cumsum(sizes, 0) - sizes  # of each start's own centres among all
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
    mine = member.bool()
    inside = sums[mine] / (sizes[member.argmax(1)] - 1).clamp_min(1)
    outside = (sums / sizes).masked_fill(mine, torch.inf).amin(1)
    alone = sizes[member.argmax(1)] == 1
    score = (outside - inside) / torch.maximum(outside, inside)
    return float(torch.where(alone, 0.0, score).mean())
