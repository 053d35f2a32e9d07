"""Seconds and bytes of the parts that runs are made of: passes over a model, measured steps, loading, tables, pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from anisoscope.capture.sites.site import Site
from anisoscope.measurement.bank import Plan, Setup, make_plan, prepare
from anisoscope.measurement.inspection import MIB, Amount, amount_of, pass_memory, record_count
from anisoscope.metrics.engine.metric import Request
from anisoscope.models.pass_size import fitting_contexts, vocabulary
from anisoscope.monitor.instruments import stream_kinds
from anisoscope.numerics.hashing import FOLDS
from anisoscope.planning.calibration import Calibration
from anisoscope.planning.features import (
    added,
    capture_features,
    evaluation_features,
    pass_features,
    tangent_features,
    update_features,
)
from anisoscope.planning.subject import ModelShape
from anisoscope.tangent.plan import PLANS, TangentPlan

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_ROW = 74.0  # bytes of a row of the table on disk
_PART = 100.0  # bytes of the same row in the table of its step
_STATES = 3 * 19.4 * 8  # bytes of the last three states of a monitor, for each entry of a covariance
_PAGE = 0.9e6  # bytes of a page and its figures without their numbers
_SHOWN = 60.0  # bytes of a page for a row of the table
_CUDA = 700 * MIB  # what CUDA's libraries take on a device
_MAPPED, _MAP = 128 * 4.0, 120e3  # bytes of the map of rows, for a measured step: by widths of sites, and fixed
_SPACE = 120 * MIB  # what a measured step works in, and what the allocator keeps


@dataclass(frozen=True)
class Cost:
    """Seconds by part, in order; peak bytes of the host and of the device; bytes that stay on disk."""

    parts: tuple[tuple[str, float], ...] = ()
    host: float = 0.0
    device: float = 0.0
    disk: float = 0.0
    records: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(seconds for _, seconds in self.parts)

    def plus(self, other: Cost) -> Cost:
        """Both, one after the other: parts of one name are added up, memory is that of the larger."""
        parts: dict[str, float] = {}
        for name, seconds in (*self.parts, *other.parts):
            parts[name] = parts.get(name, 0.0) + seconds
        peaks = {"host": max(self.host, other.host), "device": max(self.device, other.device)}
        return Cost(tuple(parts.items()), **peaks, disk=self.disk + other.disk, records=self.records + other.records)

    def times(self, number: float) -> Cost:
        parts = tuple((name, seconds * number) for name, seconds in self.parts)
        return replace(self, parts=parts, disk=self.disk * number, records=self.records * number)


@dataclass(frozen=True)
class Passage:
    """How a model is read: rows, positions of a context, contexts of a batch; numbers of its type."""

    tokens: int
    length: int
    batch: int
    dtype: str = "float32"
    memory: float | None = None  # bytes that statistics may take

    @property
    def contexts(self) -> int:
        return max(1, -(-self.tokens // self.length))


@dataclass
class Costs:
    """The cost of parts of runs with one model on one machine."""

    calibration: Calibration
    subject: ModelShape
    reading: Passage
    notes: list[str] = field(default_factory=list)

    @property
    def on_host(self) -> bool:
        return self.calibration.device == "cpu"

    @property
    def weights(self) -> float:
        return float(self.subject.parameters) * BYTES[self.reading.dtype]

    def _speed(self) -> float:
        return self.calibration.speed(self.reading.dtype)

    def forward_seconds(self, contexts: float) -> float:
        """Forward passes over so many contexts."""
        r = self.reading
        found = self.subject.passed(min(r.batch, math.ceil(contexts)), r.length)
        batches = max(1.0, contexts / r.batch)
        return self.calibration.seconds("forward", pass_features(found, batches=batches, speed=self._speed()))

    def backward_seconds(self, contexts: float) -> float:
        """Forward and backward passes over so many contexts, without an update."""
        r = self.reading
        found = self.subject.updated(min(r.batch, math.ceil(contexts)), r.length)
        batches = max(1.0, contexts / r.batch)
        return self.calibration.seconds("update", pass_features(found, batches=batches, speed=self._speed()))

    def load(self) -> Cost:
        """Loading the model: on the host, then moved."""
        c, parameters = self.calibration, float(self.subject.parameters)
        seconds = c.seconds("load", {"runs": 1.0, "parameters": parameters})
        seconds += self.subject.files / c.rates["disk"] if self.subject.files > 2e9 else 0.0  # beyond any cache
        # what is read stays on the host until it is moved, a file at a time
        host = c.base + (self.weights if self.on_host else min(self.weights, 5e9))
        return Cost((("load", seconds),), host, 0.0 if self.on_host else self.weights + _CUDA)

    def geometry(
        self, setup: Setup, requests: Sequence[Request], *, selections: int = 1, kept: int = 0, **plan_options: Any
    ) -> tuple[Cost, int]:
        """Measuring metrics at the sites of a setup, and in how many passes over the data; `kept` rows stay on disk."""
        c, r = self.calibration, self.reading
        plan = make_plan(requests, setup.kinds, seed=0, **plan_options)
        sites = setup.captured
        shapes = self.subject.shapes(setup, r.length)
        amount = amount_of(sites, shapes, tokens=r.tokens, length=r.length if self.subject.reads_text else None)
        bank, work = self._memory(sites, plan, requests, setup=setup, amount=amount)
        passes = max(1, math.ceil(bank / r.memory)) if r.memory else 1
        batches = max(1.0, amount.contexts / r.batch)
        sizes: dict[str, Any] = {"amount": amount}
        collected = capture_features(sites, shapes, plan, batches=batches, **sizes)
        evaluated = evaluation_features(sites, shapes, plan, requests, **sizes, selections=selections)
        parts = (
            ("forward passes", passes * self.forward_seconds(amount.contexts)),
            ("rows and metrics", c.seconds("measure", added(collected[0], evaluated[0]))),
            ("attention", c.seconds("measure:heads", added(collected[1], evaluated[1]))),
        )
        records = float(record_count(sites, shapes, requests)) * selections
        held = bank / passes + work
        stream = stream_kinds(self.subject.layout)
        arrays = sum(kept * s.width * s.heads * 4.0 for site, s in shapes.items() if site.kind in stream)
        host = c.base + (self.weights + held if self.on_host else work)  # statistics stay where the rows are
        device = 0.0 if self.on_host else self.weights + _CUDA + held
        return Cost(parts, host, device, records * _ROW + arrays, records), passes

    def _memory(
        self, sites: Sequence[Site], plan: Plan, requests: Sequence[Request], *, setup: Setup, amount: Amount
    ) -> tuple[float, float]:
        shapes = self.subject.shapes(setup, self.reading.length)
        fused = getattr(self.subject.config, "_attn_implementation", None) not in (None, "eager")
        heads = 0 if fused else self.subject.size("num_attention_heads", "n_head")
        sizes: dict[str, Any] = {"amount": amount, "batch": self.reading.batch, "heads": heads}
        bank, work, table = pass_memory(sites, shapes, plan, requests, **sizes)
        return float(bank), float(max(work, table - bank))

    def tangent(self, preset: str, plan: TangentPlan, *, layers: Sequence[int] | None, steps: float = 1.0) -> Cost:
        """Measured steps with gradients: passes over the probe, fits, controls."""
        c, r = self.calibration, self.reading
        kinds = stream_kinds(self.subject.layout)
        setup = prepare(self.subject.model, [], sites=None)
        sites = self.subject.layout.sites(kinds, layers)
        shapes = self.subject.shapes(replace(setup, captured=sites), r.length)
        widths = [shapes[site].width for site in sites]
        rows = float(r.contexts * max((shapes[site].positions for site in sites), default=r.length))
        features = tangent_features(widths, plan, rows=rows)
        name = preset if preset in PLANS else "standard"
        words, most = vocabulary(self.subject.model), min(r.batch, r.contexts)
        at_once = fitting_contexts(r.length, words, most, device=c.device, wide=r.dtype == "float64")
        passes = replace(self, reading=replace(r, batch=at_once))
        probe = passes.forward_seconds(r.contexts / 2) + passes.backward_seconds(r.contexts / 2)
        records = c.seconds(f"records:{name}", {"steps": 1.0, "sites": float(len(sites))})
        seconds = probe + c.seconds(f"tangent:{name}", features)
        held = rows_held = sum(rows * width * 4 * 2.5 for width in widths) + _SPACE  # with gradients and fits
        # logits go backward as gradients of their logarithms and of themselves, beside what the forward pass kept
        held += self.subject.updated(at_once, r.length).kept + 2.0 * at_once * r.length * words * 4
        head = float(words * self.subject.width)
        # the head has a gradient in each pass, as a tied table in two parts, and their sum in float64
        held += self.weights + (head * (8 + 2 * BYTES[r.dtype]) if plan.embedding else 0.0)
        held += FOLDS * (self.weights - head * BYTES[r.dtype]) if plan.weights else 0.0
        host = c.base + (held if self.on_host else rows_held)
        device = 0.0 if self.on_host else held + _CUDA
        disk = records * (_ROW + _PART) + map_bytes(widths)
        return Cost((("measured steps", seconds),), host, device, disk, records).times(steps)

    def updates(self, steps: int, *, batch: int, accumulate: int = 1, compiled: bool = False) -> Cost:
        """Updates of a training."""
        c, r = self.calibration, self.reading
        found = self.subject.updated(batch, r.length)
        tensors = float(sum(1 for _ in self.subject.model.parameters()))
        features = update_features(found, float(self.subject.parameters), tensors=tensors, speed=self._speed())
        seconds = accumulate * c.seconds("update", features) / (2.0 if compiled and not self.on_host else 1.0)
        held = self.subject.parameters * 16.0 + found.kept + 2 * found.largest  # weights, gradients, two moments
        host = c.base + (held if self.on_host else 0.0)
        return Cost((("updates", steps * seconds),), host, 0.0 if self.on_host else held + _CUDA)


def state_bytes(widths: Sequence[int]) -> float:
    """Bytes of the states of a training's monitor, from which it can be resumed; measured."""
    return _STATES * sum(width**2 for width in widths)


def map_bytes(widths: Sequence[int]) -> float:
    """Bytes of the map of rows at one step."""
    return _MAP + _MAPPED * sum(widths)


def closing(calibration: Calibration, records: float, *, judged: bool) -> Cost:
    """Claims and the page of a run with so many rows in its table."""
    features = {"runs": 1.0, "records": records}
    parts = (("claims", calibration.seconds("claims", features)),) if judged else ()
    page = calibration.seconds("page", features) if judged else calibration.seconds("page:profile", features)
    return Cost((*parts, ("page", page)), disk=_PAGE + records * _SHOWN)


def starting(calibration: Calibration) -> Cost:
    """A new process that has imported what runs need."""
    return Cost((("start", calibration.seconds("start", {"runs": 1.0})),), host=calibration.base)
