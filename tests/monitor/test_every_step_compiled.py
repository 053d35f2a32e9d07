"""Every step followed inside the graph of torch.compile: one graph without a break, and the numbers of an eager one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from anisoscope.monitor.monitor import Monitor
from anisoscope.monitor.schedule import at
from anisoscope.results.query import Table
from support.gradient_models import batch_of, hooks_of
from support.monitored import compare
from support.tiny_models import tiny

LENGTHS = (6, 9, 13, 4, 11)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


def graphs() -> tuple[int, int]:
    counted = torch._dynamo.utils.counters
    return counted["stats"]["unique_graphs"], sum(counted["graph_break"].values())


def compiled(model: Any, backend: str = "aot_eager", **options: Any) -> Any:
    return torch.compile(model, backend=backend, dynamic=False, **{"fullgraph": True, **options})


def fresh_model(name: str, *, recomputing: bool = False) -> Any:
    model: Any = tiny(name, layers=1).train()  # the time of a compilation grows with them
    if recomputing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.loss_type = {"gpt2": "ForCausalLM", "llama": "ForCausalLM", "bert-masked": "ForMaskedLM"}[name]
    return model  # with its kind of loss: else transformers logs a line, at which torch.compile breaks the graph


def follow(
    name: str, how: Any, *, together: bool = False, steps: int = 2, **options: Any
) -> tuple[Table, dict[str, Tensor]]:
    """Some steps of two micro-batches; the trace, and the weights at the end."""
    model = fresh_model(name, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    probe = [batch_of(name, *LENGTHS)]
    before = hooks_of(model)
    with Monitor(model, when=at([1]), metrics="drift", every_step=16, probe=probe, strict=True) as monitor:
        called = how(model)
        for step in range(steps):
            torch.manual_seed(step)  # dropout
            with monitor.step(step):
                losses = []
                for micro in range(2):
                    losses.append(called(**batch_of(name, *LENGTHS, seed=micro + step)).loss)
                    if not together:
                        losses.pop().backward()
                if together:
                    sum(losses).backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
    assert hooks_of(model) == before and not any("forward" in vars(part) for part in model.modules())
    return monitor.trace, {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize("name", ["gpt2", "bert-masked"])
@pytest.mark.parametrize("together", [False, True])
def test_the_numbers_are_those_of_an_eager_training(name: str, together: bool) -> None:
    wanted, weights = follow(name, lambda model: model, together=together)
    found, others = follow(name, compiled, together=together)
    assert graphs() == (1, 0)
    compare(found, wanted, 1e-5)
    assert found.arrow["n"].to_pylist() == wanted.arrow["n"].to_pylist()
    assert all(torch.allclose(others[key], value, atol=1e-6) for key, value in weights.items())


@pytest.mark.slow
def test_inductor_gives_them_as_well() -> None:
    wanted, _ = follow("gpt2", lambda model: model)
    found, _ = follow("gpt2", lambda model: compiled(model, "inductor"))
    assert graphs() == (1, 0)
    compare(found, wanted, 1e-4)


def test_following_changes_no_weight() -> None:
    _, weights = follow("gpt2", compiled)
    model = fresh_model("gpt2")
    optimizer, called = torch.optim.SGD(model.parameters(), lr=1e-3), compiled(model)
    for step in range(2):
        torch.manual_seed(step)
        for micro in range(2):
            called(**batch_of("gpt2", *LENGTHS, seed=micro + step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(weights[name], value) for name, value in model.named_parameters())


def test_what_was_compiled_for_others_stays() -> None:
    batch = batch_of("gpt2", *LENGTHS)
    other = compiled(fresh_model("gpt2"))
    other(**batch).loss.backward()
    assert graphs() == (1, 0)
    model = fresh_model("gpt2")
    with Monitor(model, when=at([9]), metrics="drift", every_step=True, strict=True) as monitor:
        called = torch.compile(model, backend="aot_eager", dynamic=False)
        for step in range(3):
            with monitor.step(step):
                called(**batch).loss.backward()
            other(**batch).loss.backward()
        number = graphs()[0]
    assert set(monitor.trace.arrow["step"].to_pylist()) == {0, 1, 2}
    other(**batch).loss.backward()
    assert graphs()[0] == number, "the twin was not compiled again"


def test_recomputed_blocks_count_once() -> None:
    wanted, _ = follow("llama", lambda model: model, steps=1)
    found, _ = follow("llama", lambda model: compiled(model, fullgraph=False), steps=1, recomputing=True)
    compare(found, wanted, 1e-5)


def test_a_pass_without_gradients_does_not_count() -> None:
    model, batch = fresh_model("gpt2").eval(), batch_of("gpt2", *LENGTHS)
    words: dict[str, Any] = {"every_step": True, "probe": [batch], "strict": True}
    with Monitor(model, when=at([9]), metrics="drift", **words) as monitor:
        called = compiled(model)
        with monitor.step(0):
            with torch.no_grad():
                called(**batch_of("gpt2", 3, 3, seed=5))
            called(**batch).loss.backward()
    assert set(monitor.trace.arrow["n"].to_pylist()) == {sum(LENGTHS)}


class OwnCheckpoints(GPT2Block):
    """A block that is recomputed without telling so, as in home-made models."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(super().__call__, *args, use_reentrant=False, **kwargs)


def test_a_model_that_calls_checkpoint_itself_trains_on() -> None:
    def losses(how: Any) -> list[float]:
        model, found = fresh_model("gpt2"), []
        for block in model.transformer.h:
            block.__class__ = OwnCheckpoints
        with Monitor(
            model, when=at([0]), metrics="drift", every_step=16, probe=[batch_of("gpt2", *LENGTHS)]
        ) as monitor:
            called = how(model)
            for step in range(2):
                torch.manual_seed(step)
                with monitor.step(step):
                    batch = batch_of("gpt2", *LENGTHS, seed=step)
                    loss = called(**batch, use_cache=False).loss  # keys of a recomputed block would be there twice
                    loss.backward()
                found.append(float(loss.detach()))
        assert monitor.trace.arrow["step"].to_pylist()
        return found

    assert losses(lambda model: compiled(model, fullgraph=False)) == pytest.approx(
        losses(lambda model: model), rel=1e-5
    )
