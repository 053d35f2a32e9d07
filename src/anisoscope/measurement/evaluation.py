"""Evaluates the metrics on a bank of statistics: records of the table for every site and selection of rows.

A selection is all rows, rows without the first position, one stratum, or one half of the contexts. Also notes on the
rows (not finite, all zero) and their counts.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any

import torch

from anisoscope.capture.sites.site import Site, flow_order
from anisoscope.errors import AnisoscopeError, TooFewRows
from anisoscope.measurement.bank import COUNTED, OF_CONTEXTS, Bank, Setup, SiteStats, applies
from anisoscope.measurement.cells import FIRST, REST, WHOLE, Cell
from anisoscope.metrics.attention import PAIRS
from anisoscope.metrics.engine import estimation
from anisoscope.metrics.engine.estimation import Estimate, Part, View
from anisoscope.metrics.engine.folds import Graph, Neighbours, sample_graphs
from anisoscope.metrics.engine.metric import WEIGHT_KINDS, Request
from anisoscope.numerics.hashing import FOLDS
from anisoscope.numerics.host import few_threads
from anisoscope.option import Progress
from anisoscope.results.quantity import jackknife
from anisoscope.results.query import FIRST_OUTLIER, variant_name
from anisoscope.stats.directions import Directions, Keys
from anisoscope.stats.moments import Moments
from anisoscope.stats.sample import Sample

HALVED_KINDS = ("embed", "resid", "final")
HALVES = {"half:1": frozenset(range(FOLDS // 2)), "half:2": frozenset(range(FOLDS // 2, FOLDS))}  # by context fold
OUTLIER = 4.0  # ratio of mean squared norms from which first positions count as outliers, or its inverse
_TOGETHER, _BY_CORE = 2**26, 2**23  # bytes of covariance matrices of sites whose spectra are computed in one batch
Records = list[dict[str, Any]]


def evaluate_bank(
    bank: Bank, requests: Sequence[Request], setup: Setup, *, progress: Progress | None = None
) -> Records:
    """Every metric at every site, as records of the table."""
    outliers = {site for site, stats in bank.sites.items() if not stats.heads and first_is_outlier(stats)}
    records: Records = []
    number = 0
    for sites in _groups(bank):
        if any(bank.sites[site].sample is not None for site in sites):
            give_back()  # what activations, and neighbours of the sites before, have taken
        jobs = [_Job(bank, site, requests, outliers) for site in sites]
        estimation.find_spectra(pair for job in jobs for pair in job.spectra())
        while jobs:
            job = jobs.pop(0)  # popped, so that its cached spectra are freed after it
            depth = setup.depth(job.site.stack)
            place = {"stack": job.site.stack, "layer": job.site.layer, "kind": job.site.name or job.site.kind}
            place["depth"] = job.site.layer / depth if depth else math.nan
            records += [{**place, **record} for record in job.records()]
            job.keep_spectrum()
            number += 1
            if progress is not None:
                progress("metrics", number, len(bank.sites))
    return records


def give_back() -> None:
    """Have the C library return memory that is free to the system, where it can; it takes some milliseconds."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # of glibc alone
        ctypes.CDLL(None).malloc_trim(0)


def evaluate_pass(
    bank: Bank, requests: Sequence[Request], setup: Setup, *, progress: Progress | None = None
) -> tuple[Records, dict[str, Any]]:
    """The records of a bank, and the counts of its rows for run.json, with notes on them."""
    if bank.pieces:
        raise AnisoscopeError(
            f"the positions of contexts are split over processes at {', '.join(map(str, sorted(bank.pieces)[:4]))} "
            "(sequence parallel), and this process has some of them alone; use a Monitor in every process, which joins "
            "them."
        )
    with few_threads(bank.device):
        records = evaluate_bank(bank, requests, setup, progress=progress)
        give_back()
        return records, {**row_counts(bank), "notes": row_notes(bank)}


def _groups(bank: Bank) -> Iterator[list[Site]]:
    """Sites whose spectra are computed in one batch to use all cores, as far as matrices and samples fit in memory."""
    group: list[Site] = []
    held, most = 0, min(_TOGETHER, _BY_CORE * torch.get_num_threads())
    for site in sorted(bank.sites, key=flow_order):
        stats = bank.sites[site]
        matrices = FOLDS + 1 if any(Moments in kinds for kinds in stats.cells.values()) else 0
        size = 8 * matrices * stats.width**2 if matrices or stats.sample is None else most
        if group and held + size > most:
            yield group
            group, held = [], 0
        group, held = [*group, site], held + size
    if group:
        yield group


@dataclass(frozen=True)
class Selection:
    """A view of some rows, and the values of the table's columns `group` and `variant` that describe it."""

    view: View
    group: str = ""
    variant: tuple[tuple[str, str], ...] = ()


class _Job:
    """The metrics to evaluate at one site, in each of its selections."""

    def __init__(self, bank: Bank, site: Site, requests: Sequence[Request], outliers: set[Site]) -> None:
        self.site, self.stats = site, bank.sites[site]
        self.outlier = FIRST_OUTLIER if site in outliers else ""  # said of the rows without first positions
        applicable = [request for request in requests if applies(request, site.kind)]
        # a metric that was named twice (`all,two_nn`) is measured once
        unique = list({(r.metric.name, variant_name(r.metric.variant(r.options))): r for r in applicable}.values())
        wanted = max((estimation.neighbours_read(r.metric, r.options) for r in unique), default=0)
        plain, groups, most = not self.stats.heads, bank.groups if any(bank.groups) else [], bank.plan.looked_at
        rest = plain and any(site.stack == other.stack for other in outliers)
        rest = rest and any(cell[1] == FIRST for cell in self.stats.cells)
        halves = plain and bank.plan.halves and site.kind in HALVED_KINDS
        chosen = list(selections(self.stats, groups, without_first=rest, wanted=wanted, most=most, halves=halves))
        keys = bank.sites.get(Site(site.layer, PAIRS[site.kind], site.stack)) if site.kind in PAIRS else None
        key_selections = selections(keys, groups, without_first=False, wanted=0, most=most) if keys is not None else ()
        for selection, of_keys in product(chosen, key_selections):
            if (of_keys.group, of_keys.variant) == (selection.group, selection.variant):  # the keys of the same layer
                for fold, with_keys in zip(selection.view.folds, of_keys.view.folds, strict=True):
                    fold |= {Keys: with_keys[Directions]} if Directions in with_keys else {}
        # query heads per key head
        self.share = self.stats.heads // keys.heads if keys is not None and keys.heads else 1
        # of halves only intrinsic dimensions: claims choose a step on one half and test it on the other
        self.tasks = [(s, r) for s in chosen for r in unique if s.group not in HALVES or Neighbours in r.metric.needs]

    def spectra(self) -> Iterator[tuple[View, dict[str, Any]]]:
        """(view, options) of the metrics that read spectra; none for heads, whose matrices are small."""
        for selection, request in self.tasks if not self.stats.heads else ():
            if Moments in request.metric.given(request.options):
                yield selection.view, request.options

    def keep_spectrum(self) -> None:
        """Keep the spectrum of all rows that the metrics have had computed: for many columns it takes long."""
        view = next((s.view for s, _ in self.tasks if not s.group and not s.variant), None)
        lines = view.lines(Moments) if view is not None and not self.stats.heads else None
        if lines is not None and lines.solved(centred=True):
            self.stats.spectrum = _variances(lines.whole_spectrum(), int(lines.n.flatten()[0]))

    def records(self) -> Iterator[dict[str, Any]]:
        """A record for each metric in each selection; with heads, one for the mean over heads and one for each."""
        names = ("value", "low", "high", "sd", "n", "contexts", "dropped")
        for selection, request in self.tasks:
            options = {**request.metric.variant(request.options), **dict(selection.variant)}
            labels = {"group": selection.group, "metric": request.metric.name, "variant": variant_name(options)}
            first_note = self.outlier if ("first", "out") in selection.variant else ""
            for head, estimate in self._estimates(request, selection.view):
                columns = {name: getattr(estimate, name) for name in names}
                columns |= {"note": "; ".join(filter(None, (estimate.note, first_note)))}
                columns |= {"replicates": list(estimate.replicates)}
                yield {**labels, **({} if head is None else {"head": head}), **columns}

    def _estimates(self, request: Request, view: View) -> Iterator[tuple[int | None, Estimate]]:
        """(head, estimate); head is None for the mean over heads and at sites without heads."""
        heads, share = self.stats.heads, self.share
        if not heads:
            yield None, _try(request, view)
            return
        if estimation.by_head(request.metric, request.options):
            by_head = estimation.evaluate_heads(request.metric, view, request.options, heads=heads, share=share)
        else:
            by_head = [_try(request, HeadView.of(view, head, share)) for head in range(heads)]
        yield None, _mean_over_heads(by_head, request)
        yield from enumerate(by_head)


def _try(request: Request, view: View) -> Estimate:
    """The estimate, or a missing value whose note gives the reason."""
    try:
        return estimation.evaluate(request.metric, view, request.options)
    except TooFewRows as error:
        return estimation.missing_estimate(view, error)


def _mean_over_heads(estimates: list[Estimate], request: Request) -> Estimate:
    known = [e for e in estimates if math.isfinite(e.value)]
    if not known:
        return estimates[0]
    value = sum(e.value for e in known) / len(known)
    folds = min(len(e.replicates) for e in known)
    replicates = tuple(sum(e.replicates[j] for e in known) / len(known) for j in range(folds))
    low, high = jackknife(value, replicates, bounds=request.metric.bounds)
    spread = float(torch.tensor([e.value for e in known]).std()) if len(known) > 1 else math.nan
    note = f"mean over {len(known)} heads; sd between heads"
    return replace(known[0], value=value, low=low, high=high, sd=spread, note=note, replicates=replicates)


def selections(
    stats: SiteStats, groups: list[str], *, without_first: bool, wanted: int, most: int, halves: bool = False
) -> Iterator[Selection]:
    """All rows; then, if requested, those without the first position, each stratum, and both halves.

    Each selection reads at most `most` sampled rows and `wanted` neighbours of each.
    """
    sample = _fewer(stats.sample, most)
    graphs = _graph_maker(sample, wanted)
    yield Selection(_view(stats, lambda cell: True, sample, graphs))
    if without_first:
        rest = None if sample is None else sample.select(~sample.label("first").bool())
        view = _view(stats, lambda cell: cell[1] == REST, rest, graphs, contexts_of=REST)
        yield Selection(replace(view, without_first=True), variant=(("first", "out"),))
    present = {group for group, _ in stats.contexts}
    for number, name in enumerate(groups):
        if not name or name not in present:  # weight tables belong to no group
            continue
        part = None if sample is None else sample.select(sample.label("group") == number)
        view = _view(stats, lambda cell, name=name: cell[0] == name, part, _graph_maker(part, wanted))  # type: ignore[misc]
        yield Selection(view, group=name)
    for name, folds in HALVES.items() if halves else ():  # the same as measuring only the contexts of these folds
        part = stats.sample
        if part is not None and len(part):
            part = _fewer(part.select(torch.isin(part.fold, torch.tensor(sorted(folds)))), most)
        view = _view(stats, lambda cell, folds=folds: cell[2] in folds, part, _graph_maker(part, wanted))  # type: ignore[misc]
        yield Selection(view, group=name)


def _fewer(sample: Sample | None, most: int) -> Sample | None:
    """The `most` rows of the sample with the smallest hashes."""
    return sample if sample is None or len(sample) <= most else sample.part(0, most)


def _graph_maker(sample: Sample | None, wanted: int) -> Callable[[int], list[Graph]]:
    """A function that returns the neighbour graphs of a sample, computed when a metric first reads them."""

    @cache
    def graphs() -> tuple[Graph, ...]:
        if sample is None:
            return ()
        # larger than the noise of a forward pass (4e-7 between batch sizes), smaller than distances of distinct rows
        tolerance = 1e-14 if sample.rows.dtype == torch.float64 else 1e-6
        return tuple(sample_graphs(sample, wanted=wanted, batch=estimation.NEIGHBOUR_BATCH, tolerance=tolerance))

    return lambda _: list(graphs())


def _view(
    stats: SiteStats,
    is_chosen: Callable[[Cell], bool],
    sample: Sample | None,
    graphs: Callable[[int], list[Graph]] | None,
    *,
    contexts_of: str = WHOLE,
) -> View:
    """A view of the statistics of the chosen cells, by fold."""
    folds: list[dict[type, Any]] = [{} for _ in range(FOLDS)]
    for cell, kinds in stats.cells.items():
        for kind, stat in kinds.items() if is_chosen(cell) else ():
            if kind in OF_CONTEXTS and cell[1] != contexts_of:
                continue
            parts = folds[cell[2]].setdefault(kind, [])
            if parts and kind is Moments:  # merged now to hold one matrix; other statistics are merged when read
                parts[0] = parts[0].merge(stat)
            else:
                parts.append(stat)
    sizes: Counter[int] = Counter()
    for (group, fold), count in stats.contexts.items():
        sizes[fold] += count if is_chosen((group, REST, fold)) else 0
    dropped = sum(count for cell, count in stats.bad.items() if is_chosen(cell))
    return View(folds, sample, graphs, contexts=sizes.total(), sizes=sizes, dropped=dropped)


@dataclass
class HeadView(View):
    """One head of a view whose statistics carry a head dimension."""

    whole: View = field(kw_only=True)
    head: int = field(kw_only=True)
    share: int = field(kw_only=True)  # query heads per key head

    @classmethod
    def of(cls, view: View, head: int, share: int) -> HeadView:
        sample = None if view.sample is None or not len(view.sample) else view.sample.head(head)
        counts: dict[str, Any] = {
            "contexts": view.contexts,
            "sizes": view.sizes,
            "dropped": view.dropped,
            "whole": view,
        }
        return cls(view.folds, sample, **counts, head=head, share=share)

    def pieces(self, need: type) -> list[Part]:
        head = self.head // self.share if need is Keys else self.head
        return [(fold, part.head(head)) for fold, part in self.whole.pieces(need)]

    def present(self) -> list[int]:
        return self.whole.present()


def mean_spectrum(stats: SiteStats) -> torch.Tensor | None:
    """Eigenvalues [d] of the covariance over all rows, descending; None without moments and for heads."""
    if stats.spectrum is not None:
        return stats.spectrum
    view = _view(stats, lambda cell: True, None, None)
    if not any(Moments in fold for fold in view.folds) or stats.heads:
        return None
    moments = view.stat(Moments)
    return _variances(moments.eigenvalues(), moments.n)


def _variances(energies: torch.Tensor, n: int) -> torch.Tensor:
    """Eigenvalues of the covariance of n rows from those of their scatter."""
    return energies.cpu() / max(1, n - 1)


def _energy_per_row(stats: SiteStats, part: str) -> float:
    """Mean squared norm of the rows of one part, from whichever statistic is available; NaN without rows."""
    count = total = 0.0
    for kinds in (kinds for (_, name, _), kinds in stats.cells.items() if name == part):
        if Directions in kinds and kinds[Directions].squared_norms is not None:
            count, total = count + kinds[Directions].n, total + float(kinds[Directions].squared_norms.sum())
        elif Moments in kinds:
            count, total = count + kinds[Moments].n, total + kinds[Moments].energy
    if not count and stats.sample is not None and len(stats.sample):
        mask = stats.sample.label("first").bool() == (part == FIRST)
        rows = stats.sample.rows[mask.to(stats.sample.rows.device)].double()
        count, total = len(rows), float(rows.square().sum())
    return total / count if count else math.nan


def first_is_outlier(stats: SiteStats) -> bool:
    """Whether rows at the first position have a far larger or smaller mean squared norm than the others."""
    return far_apart(_energy_per_row(stats, FIRST), _energy_per_row(stats, REST))


def far_apart(first: float, rest: float) -> bool:
    """The rule for outliers, from the mean squared norms at the first position and at the others; NaN without rows.

    >>> far_apart(9.0, 2.0), far_apart(2.0, 9.0), far_apart(3.0, 2.0), far_apart(math.nan, 2.0)
    (True, True, False, False)
    """
    return bool(first > OUTLIER * rest or first * OUTLIER < rest)


def row_notes(bank: Bank) -> list[str]:
    """Notes on rows that are not finite, and on blocks or stages from which on all rows are exactly zero."""
    notes = []
    bad = {site: stats.non_finite for site, stats in bank.sites.items() if stats.non_finite}
    if bad:
        worst = max(bad, key=lambda site: bad[site])
        contexts = sum(bank.sites[worst].contexts.values())
        total = bad[worst] + _finite_rows(bank.sites[worst])
        lost = f"{bad[worst]} of {total} rows of {contexts} context{'s' * (contexts != 1)}"
        more = f", and some at {len(bad) - 1} more site{'s' * (len(bad) != 2)}" if len(bad) > 1 else ""
        beyond = "were not finite (NaN or infinity, or beyond 1e±60)"
        notes.append(f"{lost} {beyond} and were left out at {worst}{more}")
    stacks = dict.fromkeys(site.stack for site in bank.sites)
    for stack, (kind, noun) in product(stacks, (("resid", "block"), ("stage", "stage"))):
        sites = sorted((s for s in bank.sites if (s.stack, s.kind) == (stack, kind)), key=flow_order)
        first = 1
        for number, site in enumerate(sites, 1):
            energies = [_energy_per_row(bank.sites[site], part) for part in (FIRST, REST)]
            if all(math.isnan(e) for e in energies) or any(e > 0 for e in energies):
                first = number + 1
        if first <= len(sites):
            whose = "" if stack == "single" else f" of the {stack}"
            where = f"{noun} {first} of {len(sites)}"
            notes.append(f"outputs{whose} are exactly zero from {where} on: nothing of the input gets past it")
    return notes


def row_counts(bank: Bank) -> dict[str, Any]:
    """Rows of the data, contexts, dropped rows, and rows `given`, finite or not.

    The rows are those of the site with most of them, without weight tables and the decoder of an encoder-decoder; those
    given are the fewest of any site of the stream (None without such a site).
    """
    plain = {site: stats for site, stats in bank.sites.items() if not stats.heads} or bank.sites
    read = {site: stats for site, stats in plain.items() if site.stack != "decoder"}
    data_sites = [stats for site, stats in read.items() if site.kind not in WEIGHT_KINDS]
    given = [_finite_rows(stats) + stats.non_finite for site, stats in read.items() if site.kind in COUNTED]
    return {
        "row_count": max(map(_finite_rows, data_sites or plain.values()), default=0),
        "contexts": max((sum(stats.contexts.values()) for stats in plain.values()), default=0),
        "dropped": {"non_finite": max((stats.non_finite for stats in plain.values()), default=0)},
        "given": min(given, default=None),
    }


def _finite_rows(stats: SiteStats) -> int:
    rows = (kinds for (_, part, _), kinds in stats.cells.items() if part != WHOLE)  # whole contexts are in the others
    return sum(max((stat.n for stat in kinds.values()), default=0) for kinds in rows)
