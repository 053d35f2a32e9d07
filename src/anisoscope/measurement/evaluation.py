"""From a bank to the records of the table: every metric at every site, in every selection of its rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from anisoscope.capture.sites.site import Site, flow_order
from anisoscope.errors import TooFewRows
from anisoscope.measurement.bank import Bank, SiteStats
from anisoscope.measurement.selection import HALVES, Selection, attach_keys, first_is_outlier, head_views, selections
from anisoscope.metrics.attention import PAIRS
from anisoscope.metrics.engine.estimate import Estimate, jackknife
from anisoscope.metrics.engine.estimation import (
    View,
    by_head,
    evaluate,
    evaluate_heads,
    find_spectra,
    missing,
    neighbours_read,
)
from anisoscope.metrics.engine.metric import HEAD_KINDS, Request
from anisoscope.metrics.engine.neighbourhoods import Neighbours
from anisoscope.numerics.hashing import FOLDS
from anisoscope.results.table import FIRST_OUTLIER, variant_name
from anisoscope.stats.means import Coherence
from anisoscope.stats.moments import Moments

if TYPE_CHECKING:
    from anisoscope.measurement.measure import Setup

HALVED_KINDS = ("embed", "resid", "final")
_SCORES = ("scores", "cross_scores")
_TOGETHER = 2**26  # bytes of matrices of several sites whose spectra are sought together
Progress = Callable[[str, int, int], None]  # what, done, of


def applies(request: Request, kind: str) -> bool:
    """Whether a metric is measured at a kind of site: where it is declared, or anywhere it can be when it was named."""
    metric = request.metric
    if kind in metric.kinds:
        return True
    if not request.named or kind in _SCORES or metric.kinds <= {*_SCORES, *PAIRS}:
        return False
    return not (kind in HEAD_KINDS and {Neighbours, Coherence} & set(metric.needs))


def evaluate_bank(
    bank: Bank, requests: Sequence[Request], setup: Setup, *, progress: Progress | None = None
) -> list[dict[str, Any]]:
    """Every metric at every site, as records of the table."""
    outliers = {site.stack for site, stats in bank.sites.items() if not stats.heads and first_is_outlier(stats)}
    records: list[dict[str, Any]] = []
    number = 0
    for sites in _groups(bank):
        jobs = [_job(bank, site, requests, outliers) for site in sites]
        find_spectra(pair for job in jobs for pair in job.spectra())
        while jobs:
            job = jobs.pop(0)  # what it found on the way is let go after it
            depth = setup.depth(job.site.stack)
            place = {"stack": job.site.stack, "layer": job.site.layer, "kind": job.site.name or job.site.kind}
            place["depth"] = job.site.layer / depth if depth else math.nan
            records += [{**place, **record} for record in _evaluate_site(job)]
            number += 1
            if progress is not None:
                progress("metrics", number, len(bank.sites))
    return records


def _groups(bank: Bank) -> Iterator[list[Site]]:
    """Sites whose spectra are sought together, so that every core has one, as long as there is room for their matrices
    and their samples.
    """
    group: list[Site] = []
    held = 0
    for site in sorted(bank.sites, key=flow_order):
        stats = bank.sites[site]
        matrices = FOLDS + 1 if any(Moments in kinds for kinds in stats.cells.values()) else 0
        size = 8 * matrices * stats.width**2 if matrices or stats.sample is None else _TOGETHER
        if group and held + size > _TOGETHER:
            yield group
            group, held = [], 0
        group, held = [*group, site], held + size
    if group:
        yield group


@dataclass
class _Job:
    """What is to be evaluated at one site."""

    site: Site
    stats: SiteStats
    requests: list[Request]
    chosen: list[Selection]
    key_heads: int

    def spectra(self) -> Iterator[tuple[View, dict[str, Any]]]:
        """Views with the options with which metrics will ask for their spectra; heads have narrow ones."""
        for selection in self.chosen if not self.stats.heads else []:
            for request in _asked(self.requests, selection):
                if Moments in request.metric.needs:
                    yield selection.view, request.options


def _job(bank: Bank, site: Site, requests: Sequence[Request], outliers: set[str]) -> _Job:
    stats = bank.sites[site]
    found = [request for request in requests if applies(request, site.kind)]
    # asked for twice (`all,two_nn`) is measured once
    mine = list({(r.metric.name, variant_name(r.metric.variant(r.options))): r for r in found}.values())
    wanted = max((neighbours_read(r.metric, r.options) for r in mine), default=0)
    both = site.stack in outliers and not stats.heads and any(cell[1] == "first" for cell in stats.cells)
    groups = bank.groups if bank.groups and any(bank.groups) else []
    keys = bank.sites.get(Site(site.layer, PAIRS[site.kind], site.stack)) if site.kind in PAIRS else None
    halves = bank.plan.halves and site.kind in HALVED_KINDS and not stats.heads
    most = bank.plan.looked_at
    chosen = list(selections(stats, groups, without_first=both, wanted=wanted, most=most, halves=halves))
    for selection in chosen:
        for other in selections(keys, groups, without_first=False, wanted=0, most=most) if keys is not None else ():
            if (other.group, other.variant) == (selection.group, selection.variant):
                attach_keys(selection.view, other.view)
    return _Job(site, stats, mine, chosen, keys.heads if keys is not None else 0)


def _evaluate_site(job: _Job) -> Iterator[dict[str, Any]]:
    for selection in job.chosen:
        remark = FIRST_OUTLIER if ("first", "out") in selection.variant and first_is_outlier(job.stats) else ""
        for request in _asked(job.requests, selection):
            for record in _records(request, selection, heads=job.stats.heads, key_heads=job.key_heads):
                yield {**record, "note": "; ".join(filter(None, (record["note"], remark)))}


def _asked(requests: Sequence[Request], selection: Selection) -> list[Request]:
    """The metrics of a selection: halves are there to choose a step on one and test it on the other, and it is
    dimensions that are tested so; the other metrics would cost as much again.
    """
    return [r for r in requests if selection.group not in HALVES or Neighbours in r.metric.needs]


def _records(request: Request, selection: Selection, *, heads: int, key_heads: int) -> Iterator[dict[str, Any]]:
    """The record of one metric in one selection; with heads, one for each and their mean."""
    options = {**request.metric.variant(request.options), **dict(selection.variant)}
    words = {"group": selection.group, "metric": request.metric.name, "variant": variant_name(options)}
    if not heads:
        yield {**words, **_columns(_try(request, selection.view))}
        return
    estimates = _by_head(request, selection.view, heads=heads, key_heads=key_heads)
    yield {**words, **_columns(_mean_over_heads(estimates, request))}
    for head, estimate in enumerate(estimates):
        yield {**words, "head": head, **_columns(estimate)}


def _by_head(request: Request, view: View, *, heads: int, key_heads: int) -> list[Estimate]:
    if by_head(request.metric, request.options):
        share = heads // key_heads if key_heads else 1
        return evaluate_heads(request.metric, view, request.options, heads=heads, share=share)
    return [_try(request, one) for one in head_views(view, heads, key_heads=key_heads)]


def _try(request: Request, view: View) -> Estimate:
    """The estimate, or a missing value whose note says why."""
    try:
        return evaluate(request.metric, view, request.options)
    except TooFewRows as error:
        return missing(view, error)


def _mean_over_heads(estimates: list[Estimate], request: Request) -> Estimate:
    known = [e for e in estimates if math.isfinite(e.value)]
    if not known:
        return estimates[0]
    value = sum(e.value for e in known) / len(known)
    folds = min(len(e.replicates) for e in known)
    replicates = [sum(e.replicates[j] for e in known) / len(known) for j in range(folds)]
    low, high = jackknife(value, replicates, bounds=request.metric.bounds)
    spread = float(torch.tensor([e.value for e in known]).std()) if len(known) > 1 else math.nan
    return Estimate(
        value,
        low,
        high,
        n=known[0].n,
        sd=spread,
        contexts=known[0].contexts,
        dropped=known[0].dropped,
        note=f"mean over {len(known)} heads; sd between heads",
        replicates=tuple(replicates),
    )


def _columns(estimate: Estimate) -> dict[str, Any]:
    names = ("value", "low", "high", "sd", "n", "contexts", "dropped", "note")
    return {name: getattr(estimate, name) for name in names} | {"replicates": list(estimate.replicates)}
