"""Trainings under a monitor, and their tables, that the tests of the monitor share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anisoscope.capture.sites.site import Site
from anisoscope.monitor.monitor import Monitor
from anisoscope.monitor.schedule import at, log_spaced
from anisoscope.results.query import Table
from anisoscope.tangent.plan import TangentPlan
from support.gradient_models import batch_of, hooks_of, parts
from support.tiny_models import VOCABULARY, tiny

SITE = Site(2, "resid")
CHEAP = TangentPlan(rank=4, draws=19, proxies=("pca",), balanced=False, standardised=False)
PLAN = replace(CHEAP, proxies=("pca", "svd"), frozen=False, embedding=False)
MAIN = "fit=refit;proxy=pca;rank=4"
LENGTHS = tuple(range(6, 14)) * 3  # 24 contexts
COUNTS = torch.arange(VOCABULARY, 0, -1)


def probe_of(name: str, seed: int = 100) -> dict[str, Tensor]:
    return batch_of(name, *LENGTHS, seed=seed)


def trained(
    name: str,
    monitor_options: dict[str, Any] | None,
    *,
    steps: int = 3,
    micro: int = 2,
    dtype: torch.dtype = torch.float32,
    disturb: bool = False,
    decay: float = 0.01,
) -> tuple[list[float], dict[str, Tensor], Any]:
    """Losses, final weights and table of a short training with dropout, with or without a monitor."""
    model = tiny(name, dtype=dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=decay)
    torch.manual_seed(1)
    losses: list[float] = []
    monitor = None if monitor_options is None else Monitor(model, optimizer=optimizer, **monitor_options)
    with monitor if monitor is not None else nothing():
        for step in range(steps):
            with monitor.step(step) if monitor is not None else nothing():
                for part in parts(batch_of(name, *LENGTHS, seed=step), micro):
                    loss = model(**part).loss / micro
                    loss.backward()
                    losses.append(float(loss.detach()))
            if disturb:
                torch.rand(1)
            if monitor is not None:
                monitor.log(step, loss=losses[-1], learning_rate=1e-2)
            optimizer.step()
            optimizer.zero_grad()
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    assert hooks_of(model) == 0
    return losses, weights, monitor


@contextmanager
def nothing() -> Iterator[None]:
    yield


EVERY_COLUMN = ("value", "low", "high", "contexts")


def compare(
    one: Table,
    two: Table,
    tolerance: float = 1e-9,
    without: tuple[str, ...] = (),
    columns: tuple[str, ...] = EVERY_COLUMN,
) -> None:
    """The same rows, with the same values, intervals and numbers of contexts."""

    def values(table: Table) -> dict[tuple[Any, ...], float | None]:
        names = ("step", "stack", "layer", "kind", "head", "group", "metric", "variant")
        rows = [r for r in table.records() if not any(w in f"{r['metric']};{r['variant']}" for w in without)]
        found = {(*(r[n] for n in names), column): r[column] for r in rows for column in columns}
        assert len(found) == len(columns) * len(rows)  # no row twice
        return found

    a, b = values(one), values(two)
    assert a.keys() == b.keys()
    for key, value in a.items():
        if value is None or b[key] is None:
            assert value is b[key], key
            continue
        assert value == pytest.approx(b[key], rel=tolerance, abs=tolerance, nan_ok=True), key


def measured(name: str, probe: Any, *, metrics: str = "tangent", plan: TangentPlan = PLAN, **options: Any) -> Table:
    model = tiny(name, dtype=torch.float64)
    monitor = Monitor(model, probe=probe, when=at([0]), plan=plan, metrics=metrics, counts=COUNTS, **options)
    with monitor, monitor.step(0):
        pass
    return monitor.table


def build(model: nn.Module | None = None, **options: Any) -> Monitor:
    options = {"when": at([0]), "plan": PLAN, "metrics": "tangent", "probe": probe_of("gpt2"), **options}
    return Monitor(tiny("gpt2") if model is None else model, **options)


def resumable(
    out: Path, *, stop: int | None = None, resume: bool = False, live: bool = False, steps: int = 5, **more: Any
) -> Table:
    """A deterministic training that is killed after `stop` steps, and replayed from the start when it resumes."""
    model = tiny("gpt2").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    torch.manual_seed(3)
    plan = TangentPlan(rank=4, draws=19, proxies=("pca",))
    options: dict[str, Any] = {"live": True} if live else {"probe": [probe_of("gpt2")]}
    options |= {"plan": plan, "metrics": "average_cosine,tangent", **more}
    monitor = Monitor(
        model, when=log_spaced(steps), out=out, counts=COUNTS, optimizer=optimizer, total_steps=steps, resume=resume,
        **options,
    )  # fmt: skip
    with monitor:
        for step in range(steps + 1):
            with monitor.step(step):
                loss = model(**batch_of("gpt2", *LENGTHS, seed=step)).loss
                loss.backward()
            if step == stop:
                raise KeyboardInterrupt
            monitor.log(step, loss=float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
    return monitor.table
