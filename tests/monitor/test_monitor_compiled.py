"""Hooks of a monitor are seen although torch.compile caches what it compiled for another model of the same class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anisoscope.capture import graph_hook
from anisoscope.monitor.monitor import Monitor
from support.gradient_models import batch_of
from support.monitored import LENGTHS, PLAN, probe_of
from support.tiny_models import tiny


class Net(nn.Module):
    """A plain model with a list of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(16, 64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def small_gpt() -> Any:
    """A GPT-2 of one block: tracing takes seconds for each."""
    model: Any = tiny("gpt2").train()
    model.transformer.h, model.config.n_layer = model.transformer.h[:1], 1
    return model


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def seen(monitor: Monitor) -> set[int]:
    return {row["layer"] for row in monitor.table.records() if row["metric"] == "average_cosine"}


@pytest.mark.parametrize("order", ["before the monitor", "first in the step", "after the model"])
def test_a_twin_of_the_class_does_not_hide_the_hooks(order: str) -> None:
    ids = torch.randint(0, 64, (32, 8), generator=torch.Generator().manual_seed(0))
    batch, model, twin = {"input_ids": ids, "labels": ids}, Net(), Net()
    other = compiled(twin)
    if order == "before the monitor":
        other(**batch)["loss"].backward()
    with Monitor(model, when=[0, 1], metrics="average_cosine", every_step=True, strict=True) as monitor:
        called = compiled(model)
        for step in range(2):
            with monitor.step(step):
                if order == "first in the step":
                    other(**batch)["loss"].backward()
                called(**batch)["loss"].backward()
                if order == "after the model":
                    other(**batch)["loss"].backward()
    assert seen(monitor) >= {0, 1, 2, 3}
    assert set(monitor.table.where(metric="average_cosine", rows=None).arrow["n"].to_pylist()) == {ids.numel()}
    assert set(monitor.trace.arrow["step"].to_pylist()) == {0, 1}


def test_an_operator_that_torch_compile_was_not_told_of_breaks_no_graph() -> None:
    """That of the hook which watches the types that are read, where a monitor has a probe alone."""
    number = torch.tensor(-1)

    def act(x: Tensor) -> Tensor:
        graph_hook._once(torch.ops.anisoscope.tap, graph_hook.ORDER, x, number, True, False)
        return x + 1

    compiled_act: Any = torch.compile(act, backend="eager", fullgraph=True)
    assert compiled_act(torch.zeros(2)).tolist() == [1.0, 1.0]


@pytest.mark.slow
def test_two_monitored_models_of_one_class_are_both_seen() -> None:
    for _ in range(2):
        model = small_gpt()
        words: dict[str, Any] = {"plan": PLAN, "metrics": "tangent", "strict": True}
        with Monitor(model, when=[0], every_step=True, **words) as monitor:
            called = compiled(model)
            with monitor.step(0):
                called(**batch_of("gpt2", *LENGTHS)).loss.backward()
        assert len(monitor.table.where(metric="gradient_energy")) and len(monitor.trace)


def test_a_model_that_ran_compiled_before_is_seen_as_well() -> None:
    model = small_gpt()
    compiled(model)(**probe_of("gpt2")).loss.backward()
    with Monitor(model, when=[0], plan=PLAN, metrics="tangent", strict=True) as monitor:
        called = compiled(model)
        with monitor.step(0):
            called(**batch_of("gpt2", *LENGTHS)).loss.backward()
    assert len(monitor.table.where(metric="gradient_energy"))
