"""The bank: mergeable statistics of the rows of every site, and the plan of which statistics the metrics need where.

A bank is what a pass over the data fills, saves and resumes. A cell is (group, part, fold): rows of one stratum, at the
first position or not, in one fold of contexts. Cells merge, so that every selection (all rows, without the first
position, one stratum, all folds but one) comes from one pass. Statistics of whole contexts cannot be merged from first
and other positions and have the part `whole`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.capture.row import Index, Rows, Scores
from anisoscope.capture.sites import site as vocabulary
from anisoscope.capture.sites.block import ABSENT
from anisoscope.capture.sites.layout import Layout, find_layout, refuse_unhookable
from anisoscope.capture.sites.site import EVERY, Site
from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.cells import REST, WHOLE, Cell, QueryRows, Split, alike, joined_index, split_rows
from anisoscope.metrics.attention import PAIRS
from anisoscope.metrics.engine.estimation import context_cosines
from anisoscope.metrics.engine.folds import Neighbours, on_sample
from anisoscope.metrics.engine.metric import HEAD_KINDS, STREAM_KINDS, WEIGHT_KINDS, Request, usable_rows
from anisoscope.numerics.host import each_on_host
from anisoscope.results.folder import replace_file
from anisoscope.stats.directions import (
    Attention,
    Coherence,
    ContextPairs,
    Coordinates,
    Directions,
    Keys,
    bring,
    context_units,
)
from anisoscope.stats.moments import Moments
from anisoscope.stats.sample import Sample

_SELF, _CROSS = vocabulary.SELF_KINDS, vocabulary.CROSS_KINDS
ATTENTION_KINDS = (*_SELF, *vocabulary.ROTARY_KINDS, *_CROSS)
DEFAULT_KINDS = ("embed", "resid", "stage", "stage_mean", "cls", "final", *_SELF, *_CROSS)
COUNTED = ("embed", "resid", "stage")  # kinds with one row per position
_SCORES = ("scores", "cross_scores")
_WITH_CONTEXTS = STREAM_KINDS - {"rows"}  # where variants stand beside a default metric: without heads, with contexts


@dataclass(frozen=True)
class Plan:
    """Which statistics each kind of site keeps, and how large the samples are."""

    stats: Mapping[str, frozenset[type]]  # by site kind
    sample_size: int = 2 * 4096  # rows kept; with halves three times what a selection reads, as halves differ in size
    attention_rows: int = 16  # query rows per context whose scores are read; 0 = all
    seed: int = 0
    halves: bool = False  # whether two disjoint halves of the contexts are selected beside the whole

    @property
    def looked_at(self) -> int:
        """Sampled rows that one selection reads: the same number with and without halves."""
        return self.sample_size // 3 if self.halves else self.sample_size


def applies(request: Request, kind: str) -> bool:
    """Whether a metric is measured at a kind of site: where declared, or, if requested by name, wherever possible."""
    metric = request.metric
    if request.beside and kind not in _WITH_CONTEXTS:
        return False
    if kind in metric.kinds:
        return True
    if not request.named or kind in _SCORES or metric.kinds <= {*_SCORES, *PAIRS}:
        return False
    return not (kind in HEAD_KINDS and {Neighbours, Coherence} & set(metric.needs))


def make_plan(
    requests: Sequence[Request],
    kinds: Iterable[str],
    *,
    seed: int,
    sample_size: int = 2 * 4096,
    attention_rows: int = 16,
    halves: bool = False,
) -> Plan:
    """The statistics that the metrics need at each kind of site."""
    stats: dict[str, frozenset[type]] = {}
    for kind in kinds:
        applicable = [request for request in requests if applies(request, kind)]
        needs = {need for request in applicable for need in request.metric.reads(request.options)}
        if any(map(on_sample, needs)):
            needs = {need for need in needs if not on_sample(need)} | {Sample}
        stats[kind] = frozenset(needs - {Keys})
    if any(Keys in request.metric.needs for request in requests):
        stats |= {kind: stats[kind] | {Directions} for kind in PAIRS.values() if kind in stats}
    kept = 3 * sample_size if halves else sample_size
    return Plan(stats, sample_size=kept, attention_rows=attention_rows, seed=seed, halves=halves)


@dataclass
class Setup:
    """The sites to measure in one model; `depths` are the blocks of each stack."""

    layout: Layout | None
    captured: list[Site]
    tables: list[str]  # kinds of weight tables whose rows are measured
    kinds: list[str]
    depths: dict[str, int]
    notes: list[str] = field(default_factory=list)

    def depth(self, stack: str) -> int:
        return self.depths.get(stack) or max(self.depths.values(), default=0)


def prepare(
    model: nn.Module,
    requests: Sequence[Request],
    *,
    sites: Sequence[str] | str | None = None,
    layers: Iterable[int] | int | None = None,
    modules: Sequence[str] | None = None,
    more: Sequence[str] = (),
    layout: Layout | None = None,
) -> Setup:
    """Find the sites to measure: the named ones, or those of the default ones and `more` that some metric reads."""
    refuse_unhookable(model)
    if modules:
        return Setup(None, [], [], ["module"], {})
    layout = find_layout(model) if layout is None else layout
    given = vocabulary.names_of(sites) or []
    named = vocabulary.check_kinds([kind for kind in given if kind != EVERY])
    layers = {layers} if isinstance(layers, int) else None if layers is None else set(layers)
    default = [kind for kind in (*DEFAULT_KINDS, "module", *more) if kind in layout.kinds]
    if "stage" in default and not set(default) & set(ATTENTION_KINDS):
        default.remove("resid")  # in a convolutional model stages replace blocks
    wanted = layout.kinds if EVERY in given else named or default
    kinds = [kind for kind in wanted if any(applies(request, kind) for request in requests)]
    if any(Keys in r.metric.needs for r in requests):  # some metrics of queries read the keys of the same layer
        kinds += [key for query, key in PAIRS.items() if query in kinds and key not in kinds]
    if given and not kinds:
        names = ", ".join(r.metric.name for r in requests)
        raise AnisoscopeError(
            f"none of the metrics asked for ({names}) is measured at {', '.join(given)}; see `anisoscope list metrics`"
        )
    streamed = [kind for kind in kinds if kind not in WEIGHT_KINDS]
    captured = layout.sites(kinds=streamed, layers=layers) if streamed else []
    depths = layout.depths
    reasons: dict[str, list[str]] = {}  # kinds of default sites that the model lacks, by reason
    for stack in layout.stacks if not given and not layout.modules else ():
        for kind, why in stack.missing.items():
            lacked = kind in DEFAULT_KINDS and why not in ABSENT.values()
            if lacked and any(applies(request, kind) for request in requests):
                reasons.setdefault(why, []).append(kind)
    notes = [f"no {', '.join(dict.fromkeys(lacked))}: {why}" for why, lacked in reasons.items()]
    notes += vocabulary.too_deep(layers, max(depths.values()))
    return Setup(layout, captured, [kind for kind in kinds if kind in WEIGHT_KINDS], kinds, depths, notes)


MOST_GROUPS = 32
# bytes of rows on a device that may be queued before they are added: the more batches at once, the fewer operations
_LEAST_QUEUED, _MOST_QUEUED = 256 << 20, 16 << 30
_QUEUED_SHARE = 8  # of the free memory of a device one part in so many
_SPLITS = 4  # cached at a time: sites of a batch alternate between a few indices (patches and class tokens)
_SPLIT: frozenset[Any] = frozenset({Directions, Coordinates})  # computed for all cells of a batch at once
OF_CONTEXTS: frozenset[Any] = frozenset({Coherence, ContextPairs})  # of whole contexts, first position or not
OF_CELLS = (Moments, Directions, Coordinates, Attention, *OF_CONTEXTS)
_STATS: dict[str, Any] = {cls.__name__: cls for cls in OF_CELLS}


@dataclass
class SiteStats:
    """The statistics of one site."""

    cells: dict[Cell, dict[type, Any]] = field(default_factory=dict)
    sample: Sample | None = None
    contexts: Counter[tuple[str, int]] = field(default_factory=Counter)  # by (group, fold)
    bad: Counter[Cell] = field(default_factory=Counter)  # rows that are not finite
    heads: int = 0
    width: int = 0
    spectrum: Tensor | None = None  # of all rows, once metrics have had it computed; see `mean_spectrum`
    # sums of several cells in one tensor each, which one operation adds to; their cells, and their numbers of rows
    _stacked: dict[tuple[type, tuple[Cell, ...]], tuple[Any, list[int]]] = field(default_factory=dict)

    def add(self, cells: Sequence[Cell], sums: Any, counts: Sequence[int]) -> None:
        """Add sums of some cells; every tensor of `sums` has a leading dimension of cells."""
        key = (type(sums), tuple(cells))
        if key in self._stacked:
            known, rows = self._stacked[key]
            self._stacked[key] = known.merge(sums), [a + b for a, b in zip(rows, counts, strict=True)]
        else:
            self._stacked[key] = sums, list(counts)

    def stacked(self) -> list[Any]:
        """The sums that `spread` gives to cells."""
        return [sums for sums, _ in self._stacked.values()]

    def spread(self) -> None:
        """Give every cell its own sums."""
        stacked, self._stacked = self._stacked, {}
        for (kind, cells), (sums, counts) in stacked.items():
            for cell, part in zip(cells, sums.heads(counts), strict=True):
                if part.n:
                    known = self.cells.setdefault(cell, {})
                    known[kind] = known[kind].merge(part) if kind in known else part

    @property
    def non_finite(self) -> int:
        return sum(self.bad.values())

    def stat(self, key: Cell, kind: type) -> Any:
        """The statistic of a cell, new where there is none yet."""
        return self.cells.setdefault(key, {}).setdefault(kind, kind())

    def merge(self, other: SiteStats) -> SiteStats:
        out = SiteStats(heads=self.heads or other.heads, width=self.width or other.width)
        out.bad, out.contexts = self.bad + other.bad, self.contexts + other.contexts
        samples = [s.sample for s in (self, other) if s.sample is not None]
        out.sample = reduce(Sample.merge, samples, Sample(samples[0].size, samples[0].seed)) if samples else None
        for part in (self, other):
            for key, stats in part.cells.items():
                merged = out.cells.setdefault(key, {})
                for kind, stat in stats.items():  # merged into a new one, which leaves the parts unchanged
                    merged[kind] = merged.get(kind, kind()).merge(stat)
        return out


class Bank:
    """A sink for captured rows that accumulates their statistics."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.groups: list[str] = []
        self.calls = 0  # of `rows` and `scores`
        self._sites: dict[Site, SiteStats] = {}
        self._splits: list[Split] = []
        self._queued: list[_Queued] = []
        self._queued_bytes = 0  # bytes
        self._limits: dict[torch.device, int] = {}  # bytes that may be queued
        self._stacked = False  # whether sums wait to be given to cells
        self.pieces: dict[Site, list[Rows]] = {}  # of contexts whose other positions other processes have, by pass

    @property
    def device(self) -> str:
        """The type of the device that rows came from."""
        return next((device.type for device in self._limits if device.type != "cpu"), "cpu")

    @property
    def sites(self) -> dict[Site, SiteStats]:
        """The statistics of each site; adds all queued rows first."""
        self._settle()
        if self._stacked:
            bring([sums for stats in self._sites.values() for sums in stats.stacked()])
            for stats in self._sites.values():
                stats.spread()
            self._stacked = False
        return self._sites

    def __getstate__(self) -> dict[str, Any]:
        """For another process: everything added, without the splits of the last batch."""
        return {**self.__dict__, "_sites": self.sites, "_queued": [], "_splits": []}

    @torch.inference_mode(False)  # statistics outlive the forward pass, so they must be ordinary tensors
    @torch.no_grad()
    def rows(self, rows: Rows) -> None:
        """Add the rows of one site; rows on a device are queued to avoid a synchronisation per site."""
        self.calls += 1
        if rows.index.shards > 1:  # statistics of contexts need all of their rows
            self.pieces.setdefault(rows.site, []).append(rows)
            return
        # NaN or infinity in any row shows in the sum of all
        self._queue(_Queued(rows.site, rows.x.sum().view(1), rows=rows), rows.x)

    @torch.inference_mode(False)
    @torch.no_grad()
    def scores(self, scores: Scores) -> None:
        """Add the attention of one layer: the sharpness of some query rows of each context."""
        self.calls += 1
        split = self._split_of(scores.index)
        split.queries = split.queries or QueryRows(split.index, self.plan.attention_rows, seed=self.plan.seed)
        if split.queries.contexts:
            values = split.queries.sharpness(scores)
            self._queue(_Queued(scores.site, values, split=split, width=scores.query.shape[-1]), values)

    def _queue(self, one: _Queued, held: Tensor) -> None:
        self._queued.append(one)
        self._queued_bytes += held.nbytes
        if held.device not in self._limits:
            self._limits[held.device] = _queue_limit(held.device)
        if self._queued_bytes > self._limits[held.device]:
            self._settle()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _settle(self) -> None:
        """Add everything queued, with one device–host synchronisation, and what is alike of several batches at once."""
        if not self._queued:
            return
        queued, self._queued, self._queued_bytes = self._queued, [], 0
        device = queued[0].read.device
        read = torch.cat([one.read.flatten().to(device) for one in queued]).cpu()
        by_site: dict[Site, list[_Queued]] = {}
        for one, values in zip(queued, read.split([one.read.numel() for one in queued]), strict=True):
            by_site.setdefault(one.site, []).append(replace(one, read=values.view(one.read.shape)))
        queued.clear()
        known: dict[tuple[int, ...], Index] = {}  # sites of the same batches share one index
        for place in list(by_site):
            parts = by_site.pop(place)  # freed once they are added
            self._add_sharpness(place, [one for one in parts if one.rows is None])
            totals = {id(one.rows): one.read for one in parts}
            for some in alike([one.rows for one in parts if one.rows is not None]):
                total = torch.cat([totals[id(rows)] for rows in some]).sum()
                self._add_rows(_joined(some, known), total)

    def _add_rows(self, rows: Rows, total: Tensor) -> None:
        split = self._split_of(rows.index)
        site = self._sites.setdefault(rows.site, SiteStats())
        site.spectrum, self._stacked = None, True
        site.width, site.heads = rows.x.shape[-1], rows.x.shape[1] if rows.x.ndim == 3 else 0
        site.contexts.update(split.contexts)
        if rows.x.dtype is torch.float64 or not bool(total.isfinite()):  # it may overflow although all rows are finite
            good = usable_rows(rows.x.flatten(1)).cpu()
            if not bool(good.all()):
                site.bad.update({key: int((~good[cell_rows]).sum()) for key, cell_rows in split.cells})
                finite = good.nonzero().squeeze(1)
                rows = replace(rows, x=rows.x[finite.to(rows.x.device)], index=rows.index.taken(finite))
                split = split_rows(rows.index, self._group_of(rows.index), self.groups)
        wanted = self.plan.stats.get(rows.site.kind, frozenset())
        if Sample in wanted:  # not by another thread: its allocator would not share what these rows leave free
            self._sample(site, rows, split)
        # statistics are independent: on the host one core each is quicker than all cores for every small operation
        each_on_host(_act, list(self._updates(site, rows, split, wanted)), rows.x.device.type)

    def _updates(
        self, site: SiteStats, rows: Rows, split: Split, wanted: frozenset[type]
    ) -> Iterator[Callable[[], object]]:
        """What adds the rows to each statistic of a site but its sample."""
        x = rows.x
        if Moments in wanted:
            for number, (key, at) in enumerate(split.cells):
                moments = site.stat(key, Moments)
                yield partial(moments.hold, x, at) if rows.lasting else partial(_add_cell, moments, x, split, number)
        for kind in _SPLIT & wanted if len(x) else ():
            yield partial(_add_sums, site, kind, x, split)
        if Coherence in wanted:
            yield partial(_add_coherence, site, x, split)
        if ContextPairs in wanted:
            yield partial(_add_pairs, site, x, split)

    def _sample(self, site: SiteStats, rows: Rows, split: Split) -> None:
        if site.sample is None:
            site.sample = Sample(self.plan.sample_size, self.plan.seed)
        site.sample.take(rows.x, split.labels(self.plan.seed), lasting=rows.lasting)

    def _add_sharpness(self, place: Site, parts: Sequence[_Queued]) -> None:
        found: dict[Cell, list[Tensor]] = {}
        for one in parts:
            site = self._sites.setdefault(place, SiteStats())
            site.heads, site.width = one.read.shape[1], one.width
            split = one.split
            assert split is not None and split.queries is not None
            site.contexts.update(split.contexts)
            chosen = split.queries
            for positions, lead, sharpness in zip(chosen.positions, chosen.leads, one.read, strict=True):
                key = (self.groups[int(split.group[lead])], REST, int(split.fold[lead]))
                found.setdefault(key, []).append(sharpness[:, : len(positions)].transpose(0, 1))
        for key, values in found.items():
            self._sites[place].stat(key, Attention).update(torch.cat(values))

    def merge(self, other: Bank) -> Bank:
        """A new bank with the statistics of both; neither is changed."""
        out = Bank(self.plan)
        out.groups = list(dict.fromkeys([*self.groups, *other.groups]))
        for part in (self, other):
            renumber = torch.tensor([out.groups.index(name) for name in part.groups] or [0])
            for site, stats in part.sites.items():
                if stats.sample is not None and part.groups:
                    stats = replace(stats, sample=stats.sample.relabel("group", renumber))
                out.sites[site] = out.sites.get(site, SiteStats()).merge(stats)
        return out

    def _split_of(self, index: Index) -> Split:
        for known in self._splits:
            if known.index is index:
                return known
        split = split_rows(index, self._group_of(index), self.groups)
        self._splits = [split, *self._splits[: _SPLITS - 1]]
        return split

    def foresee(self, names: Sequence[str] | None) -> None:
        """Number the strata of a batch that another process reads, in order of appearance as all do."""
        self.groups += [name for name in dict.fromkeys(names or ("",)) if name not in self.groups]

    def _group_of(self, index: Index) -> Tensor:
        """The number of each row's stratum; new names are added in order of appearance."""
        names = ("",) if index.group is None else index.group
        self.foresee(names)
        if len(self.groups) > MOST_GROUPS + ("" in self.groups):
            raise AnisoscopeError(
                f"--group-by gives more than {MOST_GROUPS} groups (such as {self.groups[0]!r}, {self.groups[-1]!r}); "
                "choose a field with fewer values"
            )
        numbers = torch.tensor([self.groups.index(name) for name in names])
        return numbers[(index.keep.cpu() // max(1, index.length)).clamp_max(len(numbers) - 1)]

    def state(self) -> dict[str, Any]:
        """The statistics as plain values and tensors on the host, for saving.

        Sums stay in their stacks, so that what goes on from here adds the same numbers in the same order.
        """
        self._settle()
        sites = []
        for site, stats in self._sites.items():
            named = [(key, kind.__name__, stat) for key, kinds in stats.cells.items() for kind, stat in kinds.items()]
            saved: dict[str, Any] = {"site": (site.layer, site.kind, site.stack, site.name)}
            saved["cells"] = [(key, name, _on_host(stat)) for key, name, stat in named]
            stacks = stats._stacked.items()
            saved["stacked"] = [(k.__name__, cells, _on_host(sums), counts) for (k, cells), (sums, counts) in stacks]
            saved["sample"] = None if stats.sample is None else _on_host(stats.sample)
            saved |= {"contexts": dict(stats.contexts), "bad": dict(stats.bad)}
            sites.append({**saved, "heads": stats.heads, "width": stats.width})
        return {"groups": list(self.groups), "sites": sites}

    @classmethod
    def load(cls, plan: Plan, state: Mapping[str, Any]) -> Bank:
        out = cls(plan)
        out.groups = list(state["groups"])
        for saved in state["sites"]:
            stats = SiteStats(heads=saved["heads"], width=saved["width"])
            stats.contexts, stats.bad = Counter(saved["contexts"]), Counter(saved["bad"])
            for key, name, tensors in saved["cells"]:
                stats.cells.setdefault(key, {})[_STATS[name]] = _STATS[name].load(tensors)
            for name, cells, tensors, counts in saved.get("stacked", ()):
                stats._stacked[_STATS[name], tuple(cells)] = _STATS[name].load(tensors), list(counts)
            out._stacked |= bool(stats._stacked)
            stats.sample = None if saved["sample"] is None else Sample.load(saved["sample"])
            out._sites[Site(*saved["site"])] = stats
        return out


def _on_host(stat: Any) -> dict[str, Tensor]:
    """The tensors of a statistic, copied, since a view would be saved with all of its storage."""
    return {name: value.detach().cpu().clone() for name, value in stat.state().items()}


@dataclass(frozen=True)
class _Queued:
    """What waits to be added: rows of a site, or the sharpness of query rows; `read` is what the host must know."""

    site: Site
    read: Tensor  # of rows their sum, of query rows their quantities
    rows: Rows | None = None
    split: Split | None = None
    width: int = 0


def _queue_limit(device: torch.device) -> int:
    """Bytes that may be queued: none on the CPU, where there is no synchronisation and memory is short."""
    if device.type == "cpu":
        return 0
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    return min(_MOST_QUEUED, max(_LEAST_QUEUED, free // _QUEUED_SHARE))


def _joined(parts: Sequence[Rows], known: dict[tuple[int, ...], Index]) -> Rows:
    """Rows of several batches as those of one."""
    if len(parts) == 1:
        return parts[0]
    key = tuple(id(rows.index) for rows in parts)
    if key not in known:
        known[key] = joined_index([rows.index for rows in parts])
    return Rows(parts[0].site, torch.cat([rows.x for rows in parts]), known[key])


@torch.no_grad()  # another thread has modes of its own
def _act(update: Callable[[], object]) -> None:
    update()


def _add_cell(moments: Moments, x: Tensor, split: Split, number: int) -> None:
    moments.update(split.pick(x, number))


def _add_sums(site: SiteStats, kind: Any, x: Tensor, split: Split) -> None:
    cells, _, counts = split.grid()
    site.add(cells, kind.by_cell(x, split.on(x.device), len(cells)), counts)


def _add_coherence(site: SiteStats, x: Tensor, split: Split) -> None:
    """The coherence of whole contexts, and of contexts without their first position."""
    whole: dict[Cell, list[Tensor]] = {}
    for (group, part, fold), rows in split.cells:
        for name in (WHOLE, REST) if part == REST else (WHOLE,):
            whole.setdefault((group, name, fold), []).append(rows)
    for key, parts in whole.items():
        rows = torch.cat(parts)
        cosines = context_cosines(x[rows.to(x.device)].flatten(1), split.sequence[rows])
        site.stat(key, Coherence).update(cosines)


def _add_pairs(site: SiteStats, x: Tensor, split: Split) -> None:
    """Pairs of rows inside whole contexts, and inside contexts without their first position, of all cells at once."""
    if not len(x):
        return
    place, home, cells, rows = split.whole_contexts()
    units, directed = context_units(x, place, 2 * len(home))  # of each context the first position and the others
    units, directed = units.unflatten(0, (-1, 2)), directed.unflatten(0, (-1, 2))
    home = home.to(units.device, non_blocking=True)
    for name, part, counts in ((WHOLE, slice(2), rows.sum(1)), (REST, slice(0, 1), rows[:, 0])):
        found = ContextPairs.of_cells(units[:, part].sum(1), directed[:, part].sum(1), home=home, cells=len(cells))
        site.add([(group, name, fold) for group, fold in cells], found, counts.tolist())


def save_bank(path: Path, bank: Bank, progress: Mapping[str, Any]) -> None:
    """Save statistics and progress of a pass in one file, so that they cannot disagree."""
    replace_file(path, lambda p: torch.save({"bank": bank.state(), "progress": dict(progress)}, p))


def load_bank(path: Path, plan: Plan) -> tuple[Bank, dict[str, Any]] | None:
    """The bank and the progress that `save_bank` wrote; None if there is no file."""
    if not path.is_file():
        return None
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, OSError, EOFError, ValueError, UnpicklingError) as error:
        why = str(error).partition("\n")[0] or type(error).__name__
        raise AnisoscopeError(f"{str(path)!r} cannot be read ({why}); delete it, and the pass begins again.") from error
    return Bank.load(plan, saved["bank"]), saved["progress"]
