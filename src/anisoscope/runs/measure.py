"""Measuring a model: capture, statistics, metrics, table."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.capture.modality import pool_fits
from anisoscope.capture.parts import ABSENT, CROSS_KINDS, ROTARY_KINDS, SELF_KINDS
from anisoscope.capture.rows import Batch, Index, Rows, Scores
from anisoscope.capture.sites import Site, check_kinds, flow_order
from anisoscope.errors import AnisoscopeError, TooFewRows
from anisoscope.metrics.attention import PAIRS, Keys
from anisoscope.metrics.estimate import Estimate, jackknife
from anisoscope.metrics.evaluate import (
    ON_SAMPLE,
    View,
    by_head,
    evaluate,
    evaluate_heads,
    find_spectra,
    missing,
    neighbours_read,
)
from anisoscope.metrics.metric import HEAD_KINDS, WEIGHT_KINDS, Request, parse_requests
from anisoscope.metrics.neighbourhoods import Neighbours
from anisoscope.numerics.hashing import FOLDS
from anisoscope.runs.asked import EVERY, names_of, too_deep
from anisoscope.runs.bank import Bank, Plan, SiteStats
from anisoscope.runs.remarks import remarks
from anisoscope.runs.table import FIRST_OUTLIER, Table, variant_name
from anisoscope.runs.views import HALVES, Selection, attach_keys, first_is_outlier, head_views, selections
from anisoscope.stats.directions import Directions
from anisoscope.stats.means import Coherence
from anisoscope.stats.moments import Moments
from anisoscope.stats.sample import Sample

DEFAULT_KINDS = ("embed", "resid", "stage", "stage_mean", "cls", "final", *SELF_KINDS, *CROSS_KINDS)
HALVED_KINDS = ("embed", "resid", "final")
ATTENTION_KINDS = (*SELF_KINDS, *ROTARY_KINDS, *CROSS_KINDS)
_SCORES = ("scores", "cross_scores")
_CHUNK = 4096
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


def make_plan(
    requests: Sequence[Request],
    kinds: Iterable[str],
    *,
    seed: int,
    sample_size: int,
    attention_rows: int,
    halves: bool = False,
) -> Plan:
    """The statistics that the metrics need at each kind of site."""
    stats: dict[str, frozenset[type]] = {}
    for kind in kinds:
        needs = {
            need for request in requests if applies(request, kind) for need in request.metric.reads(request.options)
        }
        if needs & {Neighbours, *ON_SAMPLE}:
            needs = (needs - {Neighbours, *ON_SAMPLE}) | {Sample}
        stats[kind] = frozenset(needs - {Keys})
    if any(Keys in request.metric.needs for request in requests):
        stats |= {kind: stats[kind] | {Directions} for kind in PAIRS.values() if kind in stats}
    kept = 3 * sample_size if halves else sample_size
    return Plan(stats, sample_size=kept, attention_rows=attention_rows, seed=seed, halves=halves)


def measure(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    sites: Sequence[str] | str | None = None,
    layers: Iterable[int] | int | None = None,
    metrics: Sequence[str] | str | None = None,
    modules: Sequence[str] | str | None = None,
    rows: Callable[..., Tensor] | None = None,
    special: str = "in",
    first: str = "in",
    pool: str = "none",
    seed: int = 0,
    sample_size: int = 2 * 4096,
    attention_rows: int = 16,
    halves: bool = False,
    name: str = "",
    progress: Progress | None = None,
) -> Table:
    """The geometry of every layer of a model over some batches, as a table.

    `batches` are what the model takes (dicts with `input_ids` and `attention_mask`, or tensors of ids); padding is
    never counted. `sites` are kinds such as "resid" or "attn_out" ("all": every kind there is), `layers` the layers to
    look at, `metrics` names such as "two_nn" or "svd_ratio:centred=0"; several are a list, or one string with commas.
    Any `nn.Module` works by naming `modules` to look at instead. With `halves` the intrinsic dimensions of the residual
    stream come also for two disjoint halves of the contexts (groups half:1 and half:2).
    """
    from anisoscope.capture.hooks import Capture

    requests = parse_requests(metrics)
    sites, modules = names_of(sites), names_of(modules)
    setup = prepare(model, requests, sites=sites, layers=layers, modules=modules)
    if setup.layout is not None and not pool_fits(model, pool, setup.layout):
        want = "it has no class token" if pool == "cls" else "no position is the last of a text"
        raise AnisoscopeError(f"pool={pool!r} means nothing for {type(model).__name__}: {want}; take 'mean' or 'none'.")
    sizes: dict[str, Any] = {"sample_size": sample_size, "attention_rows": attention_rows, "halves": halves}
    bank = Bank(make_plan(requests, setup.kinds, seed=seed, **sizes))
    if setup.captured or modules:
        options: dict[str, Any] = {"special": special, "first": first, "pool": pool, "rows": rows, "modules": modules}
        batches = _tried(model, batches, setup, named=bool(modules or (sites and EVERY not in sites)), rows=rows)
        with Capture(model, setup.captured, bank, layout=setup.layout, **options) as capture:
            for number, batch in enumerate(batches, 1):
                with _explained(model, batch):
                    capture.run(batch)
                if progress is not None:
                    progress("forward", number, 0)
        setup.notes.extend(capture.notes)
    feed_tables(bank, model, setup.tables, depth=setup.depth("single"))
    setup.notes.extend(remarks(bank))
    about = {"models": [{"name": name or type(model).__name__, "notes": setup.notes}], "seed": seed}
    records = evaluate_bank(bank, requests, setup, progress=progress)
    columns = {"model": name or type(model).__name__, "seed": seed}
    return Table.from_records(({**columns, **record} for record in records), about)


@contextlib.contextmanager
def _explained(model: nn.Module, batch: Any) -> Iterator[None]:
    """A sentence for a batch that lacks what the decoder of a model reads."""
    try:
        yield
    except ValueError as error:
        inputs = batch.inputs if isinstance(batch, Batch) else batch
        given = set(inputs) if isinstance(inputs, Mapping) else set()
        two_sided = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        if not two_sided or given & {"decoder_input_ids", "decoder_inputs_embeds", "labels"}:
            raise
        raise AnisoscopeError(
            f"the decoder of {type(model).__name__} was given nothing to read; put decoder_input_ids into the batches "
            "beside what its encoder reads, or measure model.get_encoder()."
        ) from error


class _Nobody:
    """A sink that keeps nothing."""

    def rows(self, rows: Rows) -> None: ...

    def scores(self, scores: Scores) -> None: ...


def _one_context(batch: Any) -> Any:
    """The first context of a batch, where it is a dict of tensors; else the batch as it is."""
    inputs = batch.inputs if isinstance(batch, Batch) else batch
    if isinstance(inputs, Tensor):
        return inputs[:1]
    if not isinstance(inputs, Mapping):
        return batch
    size = next((len(v) for v in inputs.values() if isinstance(v, Tensor) and v.dim() > 1), 0)
    return {k: v[:1] if isinstance(v, Tensor) and v.dim() and len(v) == size else v for k, v in inputs.items()}


def _tried(model: nn.Module, batches: Iterable[Any], setup: Setup, *, named: bool, rows: Any) -> Iterator[Any]:
    """The same batches; before the first, default attention sites that the model does not show are left out."""
    rest = iter(batches)
    first = next(rest, None)
    if first is not None and not named:
        with _explained(model, first):
            leave_unseen_out(model, first, setup, rows=rows)
    return rest if first is None else chain([first], rest)


def leave_unseen_out(model: nn.Module, batch: Any, setup: Setup, *, rows: Any = None) -> None:
    """Drop the attention sites that the model does not show in a forward pass over one context, with a note."""
    from anisoscope.capture.hooks import Capture

    wanted = [site for site in setup.captured if site.kind in ATTENTION_KINDS]
    while wanted:
        capture = Capture(model, wanted, _Nobody(), layout=setup.layout, rows=rows)
        try:
            with capture:
                capture.run(_one_context(batch))
            return
        except AnisoscopeError as error:
            lost = set(capture.unseen) or set(wanted)
            setup.captured[:] = [site for site in setup.captured if site not in lost]
            wanted = [site for site in wanted if site not in lost]
            kinds = dict.fromkeys(site.kind for site in sorted(lost, key=flow_order))
            setup.notes.append(f"{_listed(list(kinds))} are left out: {error}")


def _listed(words: list[str]) -> str:
    """Words as a person lists them.

    >>> _listed(["query", "key", "scores"])
    'query, key and scores'
    """
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


@dataclass
class Setup:
    """What will be looked at in one model."""

    layout: Any
    captured: list[Site]
    tables: list[str]  # weight tables read as rows
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
) -> Setup:
    """Find the sites asked for; the default ones, and `more`, are those the model has and some metric reads."""
    from anisoscope.capture import find_layout

    if modules:
        return Setup(None, [], [], ["module"], {})
    layout = find_layout(model)
    words = names_of(sites) or []
    sites = check_kinds([kind for kind in words if kind != EVERY]) or None
    layers = {layers} if isinstance(layers, int) else None if layers is None else set(layers)
    default = [kind for kind in (*DEFAULT_KINDS, *more) if kind in layout.kinds]
    if "stage" in default and not set(default) & set(ATTENTION_KINDS):
        default.remove("resid")  # what a convolutional model hands on are its stages
    named = layout.kinds if EVERY in words else list(sites) if sites else default
    kinds = [kind for kind in named if any(applies(request, kind) for request in requests)]
    if any(Keys in r.metric.needs for r in requests):  # some metrics of queries read the keys of the same layer
        kinds += [key for query, key in PAIRS.items() if query in kinds and key not in kinds]
    if words and not kinds:
        asked = ", ".join(r.metric.name for r in requests)
        raise AnisoscopeError(
            f"none of the metrics asked for ({asked}) is measured at {', '.join(words)}; see `anisoscope list metrics`"
        )
    tables = [kind for kind in kinds if kind in WEIGHT_KINDS]
    wanted = [kind for kind in kinds if kind not in WEIGHT_KINDS]
    captured = layout.sites(kinds=wanted, layers=layers) if wanted else []
    depths = {stack.name: stack.depth for stack in layout.stacks}
    notes = [*([] if words else _missing(layout, requests)), *too_deep(layers, max(depths.values()))]
    return Setup(layout, captured, tables, kinds, depths, notes)


def _missing(layout: Any, requests: Sequence[Request]) -> list[str]:
    """Default sites that the model has not, and why."""
    reasons: dict[str, list[str]] = {}
    for stack in layout.stacks:
        for kind, why in stack.missing.items():
            lacked = kind in DEFAULT_KINDS and why not in ABSENT.values()
            if lacked and any(applies(request, kind) for request in requests):
                reasons.setdefault(why, []).append(kind)
    return [f"no {', '.join(dict.fromkeys(kinds))}: {why}" for why, kinds in reasons.items()]


def feed_tables(bank: Bank, model: nn.Module, tables: Iterable[str], *, depth: int) -> None:
    """Read the weight tables of a model as rows."""
    from anisoscope.capture import weight_rows

    for kind in tables:
        layer = 0 if kind == "embed_weight" else depth
        if Site(layer, kind) not in bank.sites:  # a resumed bank has them already
            feed_rows(bank, Site(layer, kind), weight_rows(model, kind))


def feed_rows(bank: Bank, site: Site, rows: Any) -> None:
    """Read an n×d array as rows, each a context of its own."""
    for start in range(0, len(rows), _CHUNK):
        x = torch.as_tensor(rows[start : start + _CHUNK]).detach()
        x = x if x.dtype in (torch.float32, torch.float64) else x.float()
        number = torch.arange(start, start + len(x))
        keep = torch.arange(len(x))
        zeros = torch.zeros_like(number)
        bank.rows(Rows(site, x, Index(len(x), 1, keep, context=number, position=zeros, token=number)))


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
