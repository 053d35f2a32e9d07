"""Selections of a bank's statistics: all rows, rows without the first position, strata, heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from anisoscope.measurement.bank import FIRST, REST, WHOLE, Cell, SiteStats
from anisoscope.metrics.engine.estimation import NEIGHBOUR_BATCH, Part, View
from anisoscope.metrics.engine.neighbourhoods import Graph, sample_graphs
from anisoscope.numerics.hashing import FOLDS
from anisoscope.stats.directions import Directions, Keys
from anisoscope.stats.means import Coherence
from anisoscope.stats.moments import Moments
from anisoscope.stats.sample import Sample

HALVES = {"half:1": frozenset(range(FOLDS // 2)), "half:2": frozenset(range(FOLDS // 2, FOLDS))}  # by context fold
OUTLIER = 4.0  # times the mean squared norm of the other rows, or as many times below it


@dataclass(frozen=True)
class Selection:
    """A view with the words that go into the table's columns."""

    view: View
    group: str = ""
    variant: tuple[tuple[str, str], ...] = ()


@dataclass
class HeadView(View):
    """One head of a view whose statistics carry a head dimension."""

    whole: View | None = None
    head: int = 0
    share: int = 1  # query heads per key head

    def pieces(self, need: type) -> list[Part]:
        assert self.whole is not None
        head = self.head // self.share if need is Keys else self.head
        return [(fold, part.head(head)) for fold, part in self.whole.pieces(need)]

    def present(self) -> list[int]:
        assert self.whole is not None
        return self.whole.present()


def energy_per_row(stats: SiteStats, part: str) -> float:
    """Mean squared norm of the rows of one part, from whichever statistic is there."""
    count = total = 0.0
    for (_, name, _), kinds in stats.cells.items():
        if name != part:
            continue
        if Directions in kinds and kinds[Directions].squared_norms is not None:
            count, total = count + kinds[Directions].n, total + float(kinds[Directions].squared_norms.sum())
        elif Moments in kinds:
            moments = kinds[Moments]
            spread = moments.scatter.diagonal(dim1=-2, dim2=-1).sum()
            count, total = count + moments.n, total + float(spread + moments.n * moments.mean.square().sum())
    if not count and stats.sample is not None and len(stats.sample):
        mask = stats.sample.label("first").bool() == (part == FIRST)
        rows = stats.sample.rows[mask.to(stats.sample.rows.device)].double()
        count, total = len(rows), float(rows.square().sum())
    return total / count if count else float("nan")


def first_is_outlier(stats: SiteStats) -> bool:
    """Whether rows at the first position are far longer or shorter than the others."""
    first, rest = energy_per_row(stats, FIRST), energy_per_row(stats, REST)
    return bool(first > OUTLIER * rest or first * OUTLIER < rest)


def selections(
    stats: SiteStats, groups: list[str], *, without_first: bool, wanted: int, most: int, halves: bool = False
) -> Iterator[Selection]:
    """All rows; the same without the first position if asked; each stratum if there are any; both halves if asked.

    Each looks at `most` of its sampled rows.
    """
    sample = _fewer(stats.sample, most)
    graphs = _graph_maker(sample, wanted)
    everything = _view(stats, lambda cell: True, sample=sample, graphs=graphs)
    yield Selection(everything)
    if without_first:
        rest = None if sample is None else sample.select(~sample.label("first").bool())
        view = _view(stats, lambda cell: cell[1] == REST, sample=rest, graphs=graphs, contexts_of=REST)
        yield Selection(replace(view, without_first=True), variant=(("first", "out"),))
    seen = {group for group, _ in stats.contexts}
    for number, name in enumerate(groups):
        if not name or name not in seen:  # weight tables belong to no group
            continue
        mine = None if sample is None else sample.select(sample.label("group") == number)
        view = _view(stats, _in_group(name), sample=mine, graphs=_graph_maker(mine, wanted))
        view.contexts = sum(count for (group, _), count in stats.contexts.items() if group == name)
        yield Selection(view, group=name)
    for name, folds in HALVES.items() if halves else ():
        yield Selection(_half(stats, folds, wanted=wanted, most=most), group=name)


def _half(stats: SiteStats, folds: frozenset[int], *, wanted: int, most: int) -> View:
    """The contexts of some folds, with neighbours among themselves: as if they alone had been measured."""
    sample = stats.sample
    if sample is not None and len(sample):
        sample = _fewer(sample.select(torch.isin(sample.fold, torch.tensor(sorted(folds)))), most)
    view = _view(stats, lambda cell: cell[2] in folds, sample=sample, graphs=_graph_maker(sample, wanted))
    view.contexts = sum(count for (_, fold), count in stats.contexts.items() if fold in folds)
    return view


def _fewer(sample: Sample | None, most: int) -> Sample | None:
    """The sample of a smaller size: the rows with the smallest hashes."""
    return sample if sample is None or len(sample) <= most else sample.part(0, most)


def _in_group(name: str) -> Callable[[Cell], bool]:
    return lambda cell: cell[0] == name


def head_views(view: View, heads: int, *, key_heads: int = 0) -> list[HeadView]:
    """One view per head."""
    share = heads // key_heads if key_heads else 1
    shared: dict[str, Any] = {"folds": view.folds, "contexts": view.contexts, "dropped": view.dropped}
    return [
        HeadView(**shared, sample=_head_sample(view.sample, head), graphs=None, whole=view, head=head, share=share)
        for head in range(heads)
    ]


def attach_keys(view: View, keys: View) -> None:
    """Put the key side of a layer beside its query side."""
    for mine, theirs in zip(view.folds, keys.folds, strict=True):
        if Directions in theirs:
            mine[Keys] = theirs[Directions]


def _head_sample(sample: Sample | None, head: int) -> Sample | None:
    return None if sample is None or not len(sample) else sample.head(head)


def _graph_maker(sample: Sample | None, wanted: int) -> Callable[[int], list[Graph]]:
    """Neighbour graphs made once, when a metric first asks."""

    @cache
    def made() -> tuple[Graph, ...]:
        if sample is None:
            return ()
        # above the noise of a forward pass (4e-7 between batch sizes), below the distances of rows that differ
        tolerance = 1e-14 if sample.rows.dtype == torch.float64 else 1e-6
        return tuple(sample_graphs(sample, wanted=wanted, batch=NEIGHBOUR_BATCH, tolerance=tolerance))

    return lambda _: list(made())


def _view(
    stats: SiteStats,
    chosen: Callable[[Cell], bool],
    *,
    sample: Sample | None,
    graphs: Callable[[int], list[Graph]],
    contexts_of: str = WHOLE,
) -> View:
    folds: list[dict[type, Any]] = [{} for _ in range(FOLDS)]
    for cell, kinds in stats.cells.items():
        if chosen(cell):
            mine = folds[cell[2]]
            for kind, stat in kinds.items():
                if kind is not Coherence or cell[1] == contexts_of:
                    _put(mine.setdefault(kind, []), stat)
    contexts = sum(stats.contexts.values())
    dropped = sum(count for cell, count in stats.bad.items() if chosen(cell))
    return View(folds, sample, graphs, contexts=contexts, dropped=dropped)


def _put(parts: list[Any], stat: Any) -> None:
    """One more part of a fold: sums are added when they are read, all at once; a matrix is not kept twice."""
    if parts and isinstance(stat, Moments):
        parts[0] = parts[0].merge(stat)
    else:
        parts.append(stat)


def mean_spectrum(stats: SiteStats) -> torch.Tensor | None:
    """Eigenvalues of the covariance over all rows, descending, for the report's spectra."""
    view = _view(stats, lambda cell: True, sample=None, graphs=lambda _: [])
    if not any(Moments in fold for fold in view.folds) or stats.heads:
        return None
    moments = view.stat(Moments)
    return moments.eigenvalues().cpu() / max(1, moments.n - 1)
