"""Every step followed inside the graph of torch.compile: one graph without a break, and the numbers of an eager one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from anisoscope.capture import graph_hook, sampled_rows
from anisoscope.monitor.monitor import Monitor
from anisoscope.monitor.schedule import at
from anisoscope.numerics import fused
from anisoscope.results.query import Table
from support.gradient_models import batch_of, hooks_of
from support.monitored import compare
from support.tiny_models import tiny

LENGTHS = (6, 9, 13, 4, 11)
PROBE = [batch_of("gpt2", 6, 9)]


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
    return torch.compile(model, backend=backend, **{"fullgraph": True, "dynamic": False, **options})


def fresh_model(name: str, *, recomputing: bool = False, layers: int = 1) -> Any:
    model: Any = tiny(name, layers=layers).train()  # the time of a compilation grows with them
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


@pytest.mark.parametrize(
    ("name", "together"),
    [
        ("gpt2", False),
        ("bert-masked", True),
        pytest.param("gpt2", True, marks=pytest.mark.slow),
        pytest.param("bert-masked", False, marks=pytest.mark.slow),
    ],
)
def test_the_numbers_are_those_of_an_eager_training(name: str, together: bool) -> None:
    wanted, weights = follow(name, lambda model: model, together=together)
    found, others = follow(name, compiled, together=together)
    assert graphs() == (1, 0)
    compare(found, wanted, 1e-5)
    assert found.arrow["n"].to_pylist() == wanted.arrow["n"].to_pylist()
    assert all(torch.allclose(others[key], value, atol=1e-6) for key, value in weights.items())


@pytest.mark.slow
def test_inductor_gives_them_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "DEVICES", {"cpu"})  # moments and positions are compiled, too
    wanted, _ = follow("llama", lambda model: model)  # no dropout: inductor draws other numbers
    found, _ = follow("llama", lambda model: compiled(model, "inductor"))
    assert graphs() == (1, 0)
    compare(found, wanted, 1e-4)


def test_moments_that_run_uncompiled_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(fused, "DEVICES", {"cpu"})
    monkeypatch.setattr("torch._inductor.compile", fails)
    anew = fused.Fused(sampled_rows._spread_over)  # it is one for the whole process
    monkeypatch.setattr(sampled_rows, "_spread_over_compiled", anew)
    model, batch = fresh_model("gpt2").eval(), batch_of("gpt2", *LENGTHS)
    with Monitor(model, when=at([9]), metrics="drift", every_step=16, probe=PROBE, strict=True) as monitor:
        called = compiled(model)
        assert not monitor.notes
        with monitor.step(0):
            called(**batch).loss.backward()
        assert any("the compiler failed (RuntimeError: no compiler here)" in note for note in monitor.notes)
    assert len(monitor.trace)


def operators(*names: str) -> tuple[Any, dict[str, int]]:
    """A backend that counts our functions in the graphs it is given."""
    counts = dict.fromkeys(names, 0)

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        for node in graph.graph.nodes:
            name = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
            counts[name] = counts.get(name, 0) + 1
        return graph.forward

    return backend, counts


def test_rows_of_all_sites_are_handed_over_at_once() -> None:
    backend, counts = operators("tap", "choose", "sample", "keep", "call")
    wanted, _ = follow("llama", lambda model: model)
    found, _ = follow("llama", lambda model: torch.compile(model, backend=backend, dynamic=False, fullgraph=True))
    compare(found, wanted, 1e-6)
    sites = {(row["layer"], row["kind"]) for row in found.records()}
    assert (counts["tap"], counts["choose"], counts["sample"], counts["keep"]) == (0, 1, len(sites), 1)


def lengths_in_turn(how: Any, lengths: list[tuple[int, ...]], *, layers: int = 1) -> Table:
    model = fresh_model("gpt2", layers=layers).eval()
    with Monitor(model, when=at([99]), metrics="drift", every_step=16, strict=True, live=False, probe=PROBE) as monitor:
        called = how(model)
        for step, sizes in enumerate(lengths):
            with monitor.step(step):
                called(**batch_of("gpt2", *sizes, seed=step)).loss.backward()
    return monitor.trace


def test_one_graph_takes_rows_of_batches_of_all_lengths() -> None:
    lengths = [(6, 9, 13, 4), (3, 3), (20, 17, 2), (5, 2, 6, 6, 6), (2, 3, 4)]  # fewer and more rows than are taken
    wanted = lengths_in_turn(lambda model: model, lengths)
    found = lengths_in_turn(lambda model: compiled(model, dynamic=True), lengths)
    compare(found, wanted, 1e-6)
    assert found.arrow["n"].to_pylist() == wanted.arrow["n"].to_pylist()
    assert graphs() == (1, 0)


LATER = [pytest.param(where, marks=pytest.mark.slow) for where in ("between", "last")]


@pytest.mark.parametrize("where", ["first", *LATER])
def test_a_graph_that_is_broken_loses_nothing(where: str) -> None:
    def broken(model: Any) -> Any:
        block = model.transformer.h[{"first": 0, "between": 1, "last": -1}[where]]
        forward = block.mlp.forward

        def breaking(x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return forward(x)

        block.mlp.forward = breaking
        return torch.compile(model, backend="aot_eager", dynamic=False)

    lengths, layers = [LENGTHS, LENGTHS], 3 if where == "between" else 2
    wanted = lengths_in_turn(lambda model: model, lengths, layers=layers)
    compare(lengths_in_turn(broken, lengths, layers=layers), wanted, 1e-6)
    assert graphs()[1]


def test_blocks_that_are_compiled_one_by_one_are_followed() -> None:
    def parts(model: Any) -> Any:
        for block in model.transformer.h:
            block.compile(backend="aot_eager", dynamic=False)
        return model

    wanted = lengths_in_turn(lambda model: model, [LENGTHS, LENGTHS])
    compare(lengths_in_turn(parts, [LENGTHS, LENGTHS]), wanted, 1e-6)


def test_copies_of_a_model_in_training_are_models_without_hooks() -> None:
    model, batch = fresh_model("gpt2").eval(), batch_of("gpt2", *LENGTHS)
    with Monitor(model, when=at([99]), metrics="drift", every_step=16, strict=True, probe=PROBE) as monitor:
        called = compiled(model)
        with monitor.step(0):
            called(**batch).loss.backward()
            copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
            for other in copies:
                torch.testing.assert_close(other(**batch).loss, model(**batch).loss)
    assert set(monitor.trace.arrow["n"].to_pylist()) == {16}, "their passes were not seen"


def test_nothing_stays_of_a_monitor_that_ended() -> None:
    lengths_in_turn(compiled, [LENGTHS])
    assert not vars(graph_hook._held)


@pytest.mark.slow
def test_attention_that_is_asked_for_does_not_compile_each_layer_again() -> None:
    config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=10,
                         num_attention_heads=2, num_key_value_heads=2, use_cache=False)  # fmt: skip
    model: Any = LlamaForCausalLM(config).train()
    ids = torch.randint(3, 60, (4, 9))
    with Monitor(model, when=at([1]), metrics="drift", strict=True) as monitor:  # also of queries and keys
        called = torch.compile(model, backend="eager")
        for step in range(3):
            with monitor.step(step):
                called(input_ids=ids, labels=ids).loss.backward()
    kinds = {row["kind"] for row in monitor.table.records()}
    assert {"query", "key"} <= kinds and graphs()[0] < config.num_hidden_layers


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_attention_that_is_watched_elsewhere_breaks_no_graph() -> None:
    """Another model of the process may be measured meanwhile, or a monitor never have ended."""
    other = fresh_model("gpt2", layers=2).eval()
    with Monitor(other, when=at([0]), metrics="drift", live=True) as watching:
        wanted, _ = follow("gpt2", lambda model: model)
        found, _ = follow("gpt2", compiled)
        del watching
    compare(found, wanted, 1e-6)
    assert not [part for part in other.modules() if "_anisoscope_watched" in vars(part)]
