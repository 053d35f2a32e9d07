"""The bank: all statistics of one pass, itself mergeable; the unit that is saved and resumed.

A cell is (group, part, fold): rows of one stratum, at the first position or not, in one fold of contexts. Cells merge,
so that every selection (all rows, without the first position, one stratum, all folds but one) comes from one pass.
What is a property of whole contexts does not merge from its parts and has a part of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from anisoscope.capture.rows import Index, Rows, Scores
from anisoscope.capture.sites import Site
from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.evaluate import context_cosines
from anisoscope.runs.cells import REST, WHOLE, Cell, Split, split_rows
from anisoscope.stats.directions import Coordinates, Directions
from anisoscope.stats.means import Attention, Coherence
from anisoscope.stats.moments import Moments
from anisoscope.stats.sample import Sample

MOST_GROUPS = 32
_HELD = 256 << 20  # bytes of rows on a device that may wait for the host to look at them, all at once
_SPLITS = 4  # kept at a time: sites of a batch take turns between a few indices (patches and class tokens)
_SPLIT: frozenset[Any] = frozenset({Directions, Coordinates})  # taken for all cells of a batch at once
_STATS: dict[str, Any] = {cls.__name__: cls for cls in (Moments, Directions, Coordinates, Attention, Coherence)}


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

    def count(self, contexts: Mapping[tuple[str, int], int]) -> None:
        for label, number in contexts.items():
            self.contexts[label] = self.contexts.get(label, 0) + number

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
            out.count(part.contexts)
        return out


@dataclass(frozen=True)
class _Waiting:
    """What came from a device and is folded in as soon as the host has read the little it must know of it."""

    read: Tensor  # one dimension
    take: Callable[[Tensor], None]  # is given the same on the host


class Bank:
    """A sink for captured rows that keeps their statistics."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.groups: list[str] = []
        self.calls = 0  # of `rows` and `scores`
        self._sites: dict[Site, SiteStats] = {}
        self._splits: list[Split] = []
        self._waiting: list[_Waiting] = []
        self._held = 0  # bytes

    @property
    def sites(self) -> dict[Site, SiteStats]:
        """The statistics of each site, with all that was seen."""
        self._settle()
        return self._sites

    @torch.inference_mode(False)  # statistics outlive the forward pass, so they must be ordinary tensors
    @torch.no_grad()
    def rows(self, rows: Rows) -> None:
        """Take the rows of one site; on a device they wait, so that the host does not for every site."""
        self.calls += 1
        split = self._split_of(rows.index)
        # NaN or infinity in any row shows in the sum of all
        self._wait(rows.x.sum().view(1), partial(self._take_rows, rows, split), rows.x)

    @torch.inference_mode(False)
    @torch.no_grad()
    def scores(self, scores: Scores) -> None:
        """Take the attention of one layer: the sharpness of some query rows of each context."""
        self.calls += 1
        split = self._split_of(scores.index)
        chosen = split.query_rows(self.plan.attention_rows, seed=self.plan.seed)
        if chosen.contexts:
            values = chosen.sharpness(scores)
            take = partial(self._take_sharpness, scores.site, scores.query.shape[-1], split, values.shape)
            self._wait(values.flatten(), take, values)

    def _wait(self, read: Tensor, take: Callable[[Tensor], None], held: Tensor) -> None:
        self._waiting.append(_Waiting(read, take))
        self._held += held.nbytes
        if self._held > _room(held.device):
            self._settle()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _settle(self) -> None:
        """Fold in what waits: the host waits for the device once for all of it."""
        if not self._waiting:
            return
        waiting, self._waiting, self._held = self._waiting, [], 0
        there = waiting[0].read.device
        read = torch.cat([item.read.to(there) for item in waiting]).cpu() if len(waiting) > 1 else waiting[0].read.cpu()
        for item, mine in zip(waiting, read.split([len(item.read) for item in waiting]), strict=True):
            item.take(mine)

    def _take_rows(self, rows: Rows, split: Split, total: Tensor) -> None:
        site = self._sites.setdefault(rows.site, SiteStats())
        site.width, site.heads = rows.x.shape[-1], rows.x.shape[1] if rows.x.ndim == 3 else 0
        site.count(split.contexts)
        bad = None if bool(total.isfinite()) else _bad_rows(rows.x)
        if bad is not None:
            for key, mine in split.cells:
                site.bad[key] = site.bad.get(key, 0) + int(bad[mine].sum())
            rows = _without(rows, bad)
            split = split_rows(rows.index, self._group_of(rows.index), self.groups)
        self._take_finite(site, rows, split)

    def _take_finite(self, site: SiteStats, rows: Rows, split: Split) -> None:
        wanted = self.plan.stats.get(rows.site.kind, frozenset())
        if Moments in wanted:
            for number, (key, _) in enumerate(split.cells):
                site.stat(key, Moments).update(split.pick(rows.x, number))
        for kind in _SPLIT & wanted:
            parts = kind.split(rows.x, split.cell, len(split.cells))
            for (key, _), part in zip(split.cells, parts, strict=True):
                cell = site.cell(key)
                cell[kind] = cell[kind].merge(part) if kind in cell else part
        if Coherence in wanted:
            _cohere(site, rows.x, split)
        if Sample in wanted:
            self._sample(site, rows, split)

    def _take_sharpness(self, place: Site, width: int, split: Split, shape: torch.Size, values: Tensor) -> None:
        site = self._sites.setdefault(place, SiteStats())
        site.heads, site.width = shape[1], width
        site.count(split.contexts)
        chosen = split.query_rows(self.plan.attention_rows, seed=self.plan.seed)
        for positions, lead, mine in zip(chosen.positions, chosen.leads, values.view(shape), strict=True):
            group = self.groups[int(split.group[lead])] if self.groups else ""
            key = (group, REST, int(split.fold[lead]))
            site.stat(key, Attention).update(mine[:, : len(positions)].transpose(0, 1))

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

    def _sample(self, site: SiteStats, rows: Rows, split: Split) -> None:
        index = rows.index
        if site.sample is None:
            site.sample = Sample(self.plan.sample_size, self.plan.seed)
        first = {} if index.first is None else {"first": index.first}
        labels = {"context": index.context, "position": index.position, "token": index.token, "group": split.group}
        site.sample.update(rows.x, **labels, **first)

    def _split_of(self, index: Index) -> Split:
        for known in self._splits:
            if known.index is index:
                return known
        split = split_rows(index, self._group_of(index), self.groups)
        self._splits = [split, *self._splits[: _SPLITS - 1]]
        return split

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


def _room(device: torch.device) -> int:
    """Bytes that may wait: none on the host, which has nothing to wait for."""
    return 0 if device.type == "cpu" else _HELD


def _bad_rows(x: Tensor) -> Tensor | None:
    """Rows with NaN or infinity, on the host; None when there are none (a sum of large numbers may be infinite)."""
    bad = ~x.flatten(1).isfinite().all(1).cpu()
    return bad if bool(bad.any()) else None


def _without(rows: Rows, bad: Tensor) -> Rows:
    """The rows without the bad ones."""
    good, index = (~bad).nonzero().squeeze(1), rows.index
    names = ("keep", "context", "position", "token", "first")
    left = {name: None if (x := getattr(index, name)) is None else x[good.to(x.device)] for name in names}
    return Rows(rows.site, rows.x[good.to(rows.x.device)], replace(index, **left))  # type: ignore[arg-type]


def _cohere(site: SiteStats, x: Tensor, split: Split) -> None:
    """The coherence of whole contexts, and of contexts without their first position."""
    whole: dict[Cell, list[Tensor]] = {}
    for (group, part, fold), mine in split.cells:
        for name in (WHOLE, REST) if part == REST else (WHOLE,):
            whole.setdefault((group, name, fold), []).append(mine)
    for key, parts in whole.items():
        mine = torch.cat(parts)
        cosines = context_cosines(x[mine.to(x.device)].flatten(1), split.sequence[mine])
        site.stat(key, Coherence).update(cosines)
