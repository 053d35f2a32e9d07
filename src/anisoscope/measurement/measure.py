"""Measuring a model: capture, statistics, metrics, table."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.capture.rows.row import Batch, Index, Rows, Scores
from anisoscope.capture.sites.layout import pool_fits
from anisoscope.capture.sites.part import ABSENT
from anisoscope.capture.sites.site import (
    CROSS_KINDS,
    EVERY,
    ROTARY_KINDS,
    SELF_KINDS,
    Site,
    check_kinds,
    flow_order,
    names_of,
    too_deep,
)
from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.bank import Bank, Plan
from anisoscope.measurement.evaluation import Progress, applies, evaluate_bank
from anisoscope.measurement.remarks import remarks
from anisoscope.metrics.attention import PAIRS, Keys
from anisoscope.metrics.engine.estimation import ON_SAMPLE
from anisoscope.metrics.engine.metric import WEIGHT_KINDS, Request, parse_requests
from anisoscope.metrics.engine.neighbourhoods import Neighbours
from anisoscope.results.table import Table
from anisoscope.stats.directions import Directions
from anisoscope.stats.sample import Sample

DEFAULT_KINDS = ("embed", "resid", "stage", "stage_mean", "cls", "final", *SELF_KINDS, *CROSS_KINDS)
ATTENTION_KINDS = (*SELF_KINDS, *ROTARY_KINDS, *CROSS_KINDS)
_CHUNK = 4096


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
    from anisoscope.capture.capture import Capture

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
    from anisoscope.capture.capture import Capture

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
