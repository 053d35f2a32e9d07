"""The bank: all statistics of one pass, itself mergeable; the unit that is saved and resumed.

A cell is (group, part, fold): rows of one stratum, at the first position or not, in one fold of contexts. Cells merge,
so that every selection (all rows, without the first position, one stratum, all folds but one) comes from one pass.
What is a property of whole contexts does not merge from its parts and has a part of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from anisoscope.capture.rows import Index, Rows, Scores
from anisoscope.capture.sites import Site
from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.evaluate import context_cosines
from anisoscope.numerics.attention import row_sharpness
from anisoscope.numerics.hashing import FOLDS, fold_of, row_hash
from anisoscope.stats.directions import Coordinates, Directions
from anisoscope.stats.means import Attention, Coherence
from anisoscope.stats.moments import Moments
from anisoscope.stats.sample import Sample

MOST_GROUPS = 32
FIRST, REST, WHOLE = "first", "rest", "whole"
_SPLIT: frozenset[Any] = frozenset({Directions, Coordinates})  # taken for all cells of a batch at once
_STATS: dict[str, Any] = {cls.__name__: cls for cls in (Moments, Directions, Coordinates, Attention, Coherence)}
Cell = tuple[str, str, int]


@dataclass(frozen=True)
class Plan:
    """Which statistics each kind of site keeps, and how large the samples are."""

    stats: Mapping[str, frozenset[type]]  # by site kind
    sample_size: int = 2 * 4096  # rows kept; with halves three times what a selection looks at: they are not alike
    attention_rows: int = 16  # query rows per context whose scores are looked at; 0 = all
    seed: int = 0
    halves: bool = False  # whether two disjoint halves of the contexts are looked at beside the whole

    @property
    def looked_at(self) -> int:
        """Sampled rows that one selection looks at: the same number with halves and without."""
        return self.sample_size // 3 if self.halves else self.sample_size


@dataclass
class SiteStats:
    """The statistics of one site."""

    cells: dict[Cell, dict[type, Any]] = field(default_factory=dict)
    sample: Sample | None = None
    contexts: dict[tuple[str, int], int] = field(default_factory=dict)  # (group, fold) -> contexts seen
    bad: dict[Cell, int] = field(default_factory=dict)  # rows that are not finite
    heads: int = 0
    width: int = 0

    @property
    def non_finite(self) -> int:
        return sum(self.bad.values())

    def cell(self, key: Cell) -> dict[type, Any]:
        return self.cells.setdefault(key, {})

    def stat(self, key: Cell, kind: type) -> Any:
        """The statistic of a cell, new where there is none yet."""
        return self.cell(key).setdefault(kind, kind())

    def merge(self, other: SiteStats) -> SiteStats:
        out = SiteStats(heads=self.heads or other.heads, width=self.width or other.width)
        out.bad = {key: self.bad.get(key, 0) + other.bad.get(key, 0) for key in {**self.bad, **other.bad}}
        samples = [s.sample for s in (self, other) if s.sample is not None]
        out.sample = reduce(Sample.merge, samples, Sample(samples[0].size, samples[0].seed)) if samples else None
        for part in (self, other):
            for key, stats in part.cells.items():
                mine = out.cell(key)
                for kind, stat in stats.items():
                    mine[kind] = mine.get(kind, kind()).merge(stat)  # a copy, so that the parts stay as they are
            for label, count in part.contexts.items():
                out.contexts[label] = out.contexts.get(label, 0) + count
        return out


@dataclass(frozen=True)
class _Split:
    """How the rows of one batch fall into cells; the same for every site with the same index."""

    index: Index
    cells: list[tuple[Cell, Tensor]]
    cell: Tensor  # which of the cells each row belongs to
    sequence: Tensor  # which context of the batch each row belongs to
    contexts: dict[tuple[str, int], int]
    group: Tensor


class Bank:
    """A sink for captured rows that keeps their statistics."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.sites: dict[Site, SiteStats] = {}
        self.groups: list[str] = []
        self.calls = 0  # of `rows` and `scores`
        self._split: _Split | None = None

    @torch.inference_mode(False)  # statistics outlive the forward pass, so they must be ordinary tensors
    @torch.no_grad()
    def rows(self, rows: Rows) -> None:
        """Take the rows of one site."""
        self.calls += 1
        wanted = self.plan.stats.get(rows.site.kind, frozenset())
        site = self.sites.setdefault(rows.site, SiteStats())
        site.width, site.heads = rows.x.shape[-1], rows.x.shape[1] if rows.x.ndim == 3 else 0
        split = self._split_of(rows.index)
        x, bad = rows.x, _bad_rows(rows.x)
        for label, count in split.contexts.items():
            site.contexts[label] = site.contexts.get(label, 0) + count
        for key, mine in split.cells:
            if bad is not None:
                site.bad[key] = site.bad.get(key, 0) + int(bad[mine].sum())
                mine = mine[~bad[mine]]
            if Moments in wanted and len(mine):
                site.stat(key, Moments).update(_pick(x, mine))
        for kind in _SPLIT & wanted:
            good, cell = (x, split.cell) if bad is None else (x[~bad.to(x.device)], split.cell[~bad])
            for (key, _), part in zip(split.cells, kind.split(good, cell, len(split.cells)), strict=True):
                if part.n:
                    site.cell(key)[kind] = site.stat(key, kind).merge(part)
        if Coherence in wanted:
            self._cohere(site, x, split, bad)
        if Sample in wanted:
            self._sample(site, rows, split, bad)

    @torch.inference_mode(False)
    @torch.no_grad()
    def scores(self, scores: Scores) -> None:
        """Take the attention of one layer: the sharpness of some query rows of each context."""
        self.calls += 1
        site = self.sites.setdefault(scores.site, SiteStats())
        site.heads, site.width = scores.query.shape[1], scores.query.shape[-1]
        split = self._split_of(scores.index)
        for label, count in split.contexts.items():
            site.contexts[label] = site.contexts.get(label, 0) + count
        fold = fold_of(scores.index.context.cpu())
        chosen = list(chosen_rows(scores.index, self.plan.attention_rows, seed=self.plan.seed))
        if not chosen:
            return
        values = sharpness_of(scores, [c for c, _, _ in chosen], [p for _, p, _ in chosen]).cpu()
        for (_, positions, row), mine in zip(chosen, values, strict=True):
            group = self.groups[int(split.group[row])] if self.groups else ""
            site.stat((group, REST, int(fold[row])), Attention).update(mine[:, : len(positions)].transpose(0, 1))

    def merge(self, other: Bank) -> Bank:
        """The bank of both passes; neither is changed."""
        out = Bank(self.plan)
        out.groups = list(dict.fromkeys([*self.groups, *other.groups]))
        for part in (self, other):
            renumber = torch.tensor([out.groups.index(name) for name in part.groups] or [0])
            for site, stats in part.sites.items():
                if stats.sample is not None and part.groups:
                    stats = replace(stats, sample=stats.sample.relabel("group", renumber))
                out.sites[site] = out.sites.get(site, SiteStats()).merge(stats)
        return out

    def _cohere(self, site: SiteStats, x: Tensor, split: _Split, bad: Tensor | None) -> None:
        """The coherence of whole contexts, and of contexts without their first position."""
        whole: dict[Cell, list[Tensor]] = {}
        for (group, part, fold), mine in split.cells:
            mine = mine if bad is None else mine[~bad[mine]]
            for name in (WHOLE, REST) if part == REST else (WHOLE,):
                whole.setdefault((group, name, fold), []).append(mine)
        for key, parts in whole.items():
            mine = torch.cat(parts)
            if len(mine):
                cosines = context_cosines(x[mine.to(x.device)].flatten(1), split.sequence[mine])
                cell = site.cell(key)
                cell[Coherence] = cell.get(Coherence, Coherence()).update(cosines)

    def _sample(self, site: SiteStats, rows: Rows, split: _Split, bad: Tensor | None) -> None:
        index = rows.index
        if site.sample is None:
            site.sample = Sample(self.plan.sample_size, self.plan.seed)
        labels = {"context": index.context, "position": index.position, "token": index.token, "group": split.group}
        if index.first is not None:
            labels["first"] = index.first
        x = rows.x
        if bad is not None:
            good = (~bad).nonzero().squeeze(1)
            x = x[good.to(x.device)]
            labels = {name: value[good.to(value.device)] for name, value in labels.items()}
        site.sample.update(x, **labels)

    def _split_of(self, index: Index) -> _Split:
        if self._split is None or self._split.index is not index:
            group = self._group_of(index)
            self._split = _split(index, group, self.groups)
        return self._split

    def _group_of(self, index: Index) -> Tensor:
        """The number of each row's stratum; new names are added in order of appearance."""
        names = ("",) if index.group is None else index.group
        for name in names:
            if name not in self.groups:
                self.groups.append(name)
        if len(self.groups) > MOST_GROUPS + ("" in self.groups):
            raise AnisoscopeError(
                f"--group-by gives more than {MOST_GROUPS} groups (such as {self.groups[0]!r}, {self.groups[-1]!r}); "
                "choose a field with fewer values"
            )
        numbers = torch.tensor([self.groups.index(name) for name in names])
        return numbers[(index.keep.cpu() // max(1, index.length)).clamp_max(len(numbers) - 1)]

    def state(self) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        """All tensors by name, and the labels that go with them."""
        tensors: dict[str, Tensor] = {}
        labels: list[dict[str, Any]] = []
        for number, (site, stats) in enumerate(self.sites.items()):
            cells: list[dict[str, Any]] = []
            for key, kinds in stats.cells.items():
                for kind, stat in kinds.items():
                    name = f"{number}/{len(cells)}"
                    cells.append({"cell": list(key), "stat": kind.__name__})
                    tensors |= {f"{name}/{k}": v.detach().cpu().contiguous() for k, v in stat.state().items()}
            if stats.sample is not None:
                tensors |= {f"{number}/sample/{k}": v.cpu().contiguous() for k, v in stats.sample.state().items()}
            labels.append(
                {
                    "site": [site.layer, site.kind, site.stack, site.name],
                    "cells": cells,
                    "contexts": [[*label, count] for label, count in stats.contexts.items()],
                    "bad": [[*cell, count] for cell, count in stats.bad.items()],
                    "heads": stats.heads,
                    "width": stats.width,
                }
            )
        return tensors, labels

    @classmethod
    def load(
        cls, plan: Plan, tensors: Mapping[str, Tensor], labels: Iterable[Mapping[str, Any]], groups: list[str]
    ) -> Bank:
        out = cls(plan)
        out.groups = list(groups)
        by_prefix: dict[str, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            prefix, _, leaf = name.rpartition("/")
            by_prefix.setdefault(prefix, {})[leaf] = value
        for number, label in enumerate(labels):
            stats = SiteStats(heads=label["heads"], width=label["width"])
            stats.bad = {(group, part, fold): count for group, part, fold, count in label["bad"]}
            stats.contexts = {(group, fold): count for group, fold, count in label["contexts"]}
            for position, entry in enumerate(label["cells"]):
                kind = _STATS[entry["stat"]]
                stats.cell(tuple(entry["cell"]))[kind] = kind.load(by_prefix[f"{number}/{position}"])
            if f"{number}/sample" in by_prefix:
                stats.sample = Sample.load(by_prefix[f"{number}/sample"])
            out.sites[Site(*label["site"])] = stats
        return out


def _split(index: Index, group: Tensor, groups: list[str]) -> _Split:
    fold = fold_of(index.context.cpu())
    first = torch.zeros_like(fold) if index.first is None else index.first.cpu().to(torch.int64)
    code = (group * 2 + first) * FOLDS + fold
    cells = []
    values, cell = torch.unique(code, return_inverse=True)
    for value in values.tolist():
        name = groups[value // (2 * FOLDS)] if groups else ""
        part = FIRST if (value // FOLDS) % 2 else REST
        cells.append(((name, part, value % FOLDS), (code == value).nonzero().squeeze(1)))
    contexts: dict[tuple[str, int], int] = {}
    sequence = index.keep.cpu() // max(1, index.length)
    _, inverse = torch.unique(sequence, return_inverse=True)
    leaders = torch.full((int(inverse.max()) + 1 if len(inverse) else 0,), len(fold), dtype=torch.int64)
    leaders.scatter_reduce_(0, inverse, torch.arange(len(fold)), reduce="amin")
    for row in leaders.tolist():
        label = (groups[int(group[row])] if groups else "", int(fold[row]))
        contexts[label] = contexts.get(label, 0) + 1
    return _Split(index, cells, cell, sequence, contexts, group)


def _bad_rows(x: Tensor) -> Tensor | None:
    """Rows with NaN or infinity, on the host; None when there are none (one cheap sum tells)."""
    if bool(x.sum().isfinite()):
        return None
    bad = ~x.flatten(1).isfinite().all(1)
    return bad.cpu() if bool(bad.any()) else None


def _pick(x: Tensor, mine: Tensor) -> Tensor:
    """Some rows, ascending: a view where they are neighbours, as the rows of one context are."""
    first, last = int(mine[0]), int(mine[-1])
    return x[first : last + 1] if last - first + 1 == len(mine) else x[mine.to(x.device)]


def chosen_rows(index: Index, most: int, *, seed: int) -> Iterable[tuple[int, Tensor, int]]:
    """For each context of a batch: its number, the positions of its chosen query rows, and one of its rows."""
    keep = index.keep.cpu()
    sequence, position = keep // index.length, keep % index.length
    order = row_hash(index.context.cpu(), index.position.cpu(), seed=seed).argsort(stable=True)
    for number in sequence.unique().tolist():
        mine = order[sequence[order] == number]
        mine = mine[:most] if most else mine
        yield number, position[mine].sort().values, int(mine[0])


def sharpness_of(scores: Scores, contexts: list[int], positions: list[Tensor]) -> Tensor:
    """Sharpness of some query rows of some contexts: [B, H, R, quantities], R the most rows of any of them."""
    device = scores.query.device
    number = torch.tensor(contexts, device=device)
    # a context with fewer rows repeats its first one; those rows are cut off by the caller
    most = max(map(len, positions))
    rows = torch.stack([torch.cat([p, p[:1].expand(most - len(p))]) for p in positions]).to(device)
    if scores.windows > 1:  # each row in the window it lies in
        places = scores.query.shape[2]
        number = (number[:, None] * scores.windows + rows // places).flatten()
        found = _sharpness(scores, number, rows.flatten()[:, None] % places)
        return found.squeeze(2).unflatten(0, rows.shape).transpose(1, 2)
    return _sharpness(scores, number, rows)


def _sharpness(scores: Scores, number: Tensor, rows: Tensor) -> Tensor:
    """Sharpness of the query rows [n, R] of n sequences."""
    allowed = scores.allowed[number if scores.allowed.shape[0] > 1 else number * 0]
    first = allowed.flatten(1, 2).any(1).to(torch.int8).argmax(1)
    return row_sharpness(
        scores.query[number].gather(
            2, rows[:, None, :, None].expand(-1, scores.query.shape[1], -1, scores.query.shape[3])
        ),
        scores.key[number],
        _of_rows(allowed, rows),
        bias=None
        if scores.bias is None
        else _of_rows(scores.bias[number if len(scores.bias) > 1 else number * 0], rows),
        scaling=scores.scaling,
        first=first,
    )


def _of_rows(matrix: Tensor, rows: Tensor) -> Tensor:
    """The chosen query rows of [B, 1 or H, T or 1, S]."""
    if matrix.shape[2] == 1:
        return matrix.expand(-1, -1, rows.shape[1], -1)
    return matrix.gather(2, rows[:, None, :, None].expand(-1, matrix.shape[1], -1, matrix.shape[3]))
