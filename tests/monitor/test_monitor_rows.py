"""`Monitor(rows=…)`: a model whose forward takes neither mask nor ids is told which rows are data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.measure import measure
from anisoscope.monitor.monitor import Monitor
from anisoscope.monitor.schedule import at
from anisoscope.results.query import Table
from anisoscope.tangent.plan import TangentPlan

WIDTH, LENGTH, CONTEXTS = 16, 10, 24
PLAN = TangentPlan(rank=3, draws=19, proxies=("pca",), frozen=False, balanced=False, embedding=False)
SITE = {"layer": 2, "kind": "resid"}


class Block(nn.Module):
    """A residual block that works on every position by itself, so that padding changes no other row."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x).tanh()


class Homemade(nn.Module):
    """Reads features [B, T, d] and lengths, which no other model calls so, and returns a prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        x = features
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def _model() -> Homemade:
    torch.manual_seed(0)
    return Homemade()


def _batch(seed: int = 1, *, padding: float = 50.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(CONTEXTS, LENGTH, WIDTH, generator=generator)
    lengths = torch.arange(CONTEXTS) % 5 + 4
    features[torch.arange(LENGTH) >= lengths[:, None]] = padding
    return {"features": features, "lengths": lengths}


def _mask(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    lengths = kwargs["lengths"] if "lengths" in kwargs else args[1]
    return torch.arange(LENGTH, device=lengths.device) < lengths[:, None]


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """The same, under the names that transformers models have; ids are the first feature in ten steps."""
    features = kwargs["features"] if "features" in kwargs else args[0]
    ids = (features[..., 0] * 3).long().clamp(-4, 5) + 4
    return {"attention_mask": _mask(args, kwargs).long(), "input_ids": ids}


def _loss(model: nn.Module, inputs: Any) -> Tensor:
    """The summed loss over what is data."""
    out = model(**{name: inputs[name] for name in ("features", "lengths")})
    total: Tensor = (out.square().sum(-1) * _mask((), dict(inputs))).sum()
    return total


def _monitored(rows: Any, *, step: Callable[[Monitor, nn.Module], None] | None = None, **options: Any) -> Monitor:
    model = _model()
    monitor = Monitor(model, rows=rows, when=at([0]), metrics="average_cosine,tangent", plan=PLAN, **options)
    with monitor, monitor.step(0, loss="sum"):
        if step is not None:
            step(monitor, model)
    return monitor


def _learn(_: Monitor, model: nn.Module) -> None:
    _loss(model, _batch()).backward()


def _rows_counted(table: Table, metric: str, **variant: Any) -> int:
    found = table.where(**SITE, metric=metric, **variant)
    return max(int(n) for n in found.arrow["n"].to_pylist())


@pytest.mark.parametrize("rows", [_mask, _arguments])
def test_a_probe_counts_the_rows_that_are_data(rows: Any) -> None:
    batch = _batch()
    real = int(batch["lengths"].sum())
    table = _monitored(rows, probe=[batch], loss=_loss).table
    assert _rows_counted(table, "average_cosine") == real
    everything = _monitored(None, probe=[batch], loss=_loss).table
    assert _rows_counted(everything, "average_cosine") == CONTEXTS * LENGTH
    expected = measure(_model(), [batch], sites=["resid"], metrics=["average_cosine"], rows=_mask)
    assert table.value(**SITE, metric="average_cosine", variant="", group="") == pytest.approx(
        expected.value(**SITE, metric="average_cosine", variant="", group=""), rel=1e-6
    )


@pytest.mark.parametrize("options", [{"probe": [_batch()], "loss": _loss}, {"step": _learn}])
def test_padding_changes_no_number(options: dict[str, Any]) -> None:
    """Rows that are no data have no part in a proxy, in its controls or in the geometry."""
    found = []
    for padding in (50.0, -3.0):
        batch = _batch(padding=padding)
        if "probe" in options:
            monitor = _monitored(_mask, probe=[batch], loss=_loss)
        else:
            monitor = _monitored(_mask, step=lambda _, model, batch=batch: _loss(model, batch).backward())
        rows = monitor.table.where(**SITE).records()
        found.append({(r["metric"], r["variant"], r["group"]): r["value"] for r in rows})
    assert {metric for metric, _, _ in found[0]} >= {"gradient_energy", "average_cosine"}
    assert found[0] == pytest.approx(found[1], nan_ok=True, rel=1e-6)


def test_a_training_batch_counts_the_rows_that_are_data() -> None:
    table = _monitored(_mask, step=_learn).table
    assert _rows_counted(table, "average_cosine") == int(_batch()["lengths"].sum())


def test_ids_of_a_rule_are_the_tokens_of_the_rows() -> None:
    """With ids there are frequency bins; a mask alone has none."""
    counts = torch.arange(10, 0, -1)
    options: dict[str, Any] = {"probe": [_batch()], "loss": _loss, "counts": counts}
    with_ids = _monitored(_arguments, **options).table
    groups = set(with_ids.where(metric="gradient_energy").arrow["group"].to_pylist())
    assert any(group.startswith("frequency:") for group in groups)
    without = _monitored(_mask, **options).table
    assert not any(
        g.startswith("frequency:") for g in without.where(metric="gradient_energy").arrow["group"].to_pylist()
    )


@pytest.mark.parametrize("rows", [_mask, _arguments])
def test_every_step_reads_the_rule_too(rows: Any) -> None:
    found = []
    for padding in (50.0, -3.0):
        batch = _batch(padding=padding)
        monitor = _monitored(rows, step=lambda _, model, b=batch: _loss(model, b).backward(), every_step=True)
        table = monitor.trace.where(**SITE, metric="mean_norm")
        assert max(table.arrow["n"].to_pylist()) == int(batch["lengths"].sum())
        found.append(table.arrow["value"].to_pylist())
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_a_rule_that_says_nothing_is_refused() -> None:
    with pytest.raises(AnisoscopeError, match="rows= returned a list; expected a bool tensor"):
        _monitored(lambda args, kwargs: [True], probe=[_batch()], loss=_loss)
