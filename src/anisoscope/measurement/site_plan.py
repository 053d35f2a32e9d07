"""Which sites of a model are measured, and which statistics the metrics need there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from anisoscope.capture.sites.block import ABSENT
from anisoscope.capture.sites.layout import Layout, find_layout
from anisoscope.capture.sites.site import (
    CROSS_KINDS,
    EVERY,
    ROTARY_KINDS,
    SELF_KINDS,
    Site,
    check_kinds,
    names_of,
    too_deep,
)
from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.bank import Plan
from anisoscope.metrics.attention import PAIRS
from anisoscope.metrics.engine.folds import Neighbours, on_sample
from anisoscope.metrics.engine.metric import HEAD_KINDS, WEIGHT_KINDS, Request
from anisoscope.stats.directions import Directions, Keys
from anisoscope.stats.means import Coherence
from anisoscope.stats.sample import Sample

DEFAULT_KINDS = ("embed", "resid", "stage", "stage_mean", "cls", "final", *SELF_KINDS, *CROSS_KINDS)
ATTENTION_KINDS = (*SELF_KINDS, *ROTARY_KINDS, *CROSS_KINDS)
COUNTED = ("embed", "resid", "stage")  # one row per position, at every resolution that a model has
_SCORES = ("scores", "cross_scores")


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
    sample_size: int = 2 * 4096,
    attention_rows: int = 16,
    halves: bool = False,
) -> Plan:
    """The statistics that the metrics need at each kind of site."""
    stats: dict[str, frozenset[type]] = {}
    for kind in kinds:
        mine = [request for request in requests if applies(request, kind)]
        needs = {need for request in mine for need in request.metric.reads(request.options)}
        if any(map(on_sample, needs)):
            needs = {need for need in needs if not on_sample(need)} | {Sample}
        stats[kind] = frozenset(needs - {Keys})
    if any(Keys in request.metric.needs for request in requests):
        stats |= {kind: stats[kind] | {Directions} for kind in PAIRS.values() if kind in stats}
    kept = 3 * sample_size if halves else sample_size
    return Plan(stats, sample_size=kept, attention_rows=attention_rows, seed=seed, halves=halves)


@dataclass
class Setup:
    """What is measured in one model."""

    layout: Layout | None
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
    """Find the sites that were named; the default ones, and `more`, are those the model has and some metric reads."""
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
        names = ", ".join(r.metric.name for r in requests)
        raise AnisoscopeError(
            f"none of the metrics asked for ({names}) is measured at {', '.join(words)}; see `anisoscope list metrics`"
        )
    tables = [kind for kind in kinds if kind in WEIGHT_KINDS]
    wanted = [kind for kind in kinds if kind not in WEIGHT_KINDS]
    captured = layout.sites(kinds=wanted, layers=layers) if wanted else []
    depths = {stack.name: stack.depth for stack in layout.stacks}
    notes = [*([] if words else _missing(layout, requests)), *too_deep(layers, max(depths.values()))]
    return Setup(layout, captured, tables, kinds, depths, notes)


def _missing(layout: Any, requests: Sequence[Request]) -> list[str]:
    """Default sites that the model does not have, and why."""
    reasons: dict[str, list[str]] = {}
    for stack in layout.stacks:
        for kind, why in stack.missing.items():
            lacked = kind in DEFAULT_KINDS and why not in ABSENT.values()
            if lacked and any(applies(request, kind) for request in requests):
                reasons.setdefault(why, []).append(kind)
    return [f"no {', '.join(dict.fromkeys(kinds))}: {why}" for why, kinds in reasons.items()]
