"""A live monitor in compiled, checkpointed, mixed and partly frozen trainings: the plain one's table, or a note."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anisoscope.capture.capture import Capture
from anisoscope.capture.row import KeptRows
from anisoscope.errors import AnisoscopeError
from anisoscope.monitor.guard import MonitorWarning
from anisoscope.monitor.monitor import Monitor
from anisoscope.monitor.schedule import at
from support import home_made as home
from support.gradient_models import batch_of, hooks_of
from support.home_made import counted, followed, home_made
from support.monitored import LENGTHS, PLAN, compare, probe_of
from support.tiny_models import tiny

WAYS = [home.whole, home.own_method, home.train_step, home.blocks_compiled, home.blocks_wrapped]


def one_fast(first: Any, *others: Any) -> list[Any]:
    """Cases of which one is tried by `make test`: each takes seconds to compile."""
    return [first, *(pytest.param(other, marks=pytest.mark.slow) for other in others)]


Count = Callable[[], tuple[int, int]]


@pytest.fixture(autouse=True)
def graphs() -> Iterator[Count]:
    with counted() as count:
        yield count


@pytest.fixture(scope="module")
def plain() -> Any:
    return followed(home_made()).table


@pytest.mark.parametrize("how", one_fast(*WAYS))
def test_a_model_compiled_inside_the_monitor_gives_the_table_of_eager(how: Any, plain: Any, graphs: Count) -> None:
    model = home_made()
    monitor = followed(model, how)
    compare(monitor.table, plain, 1e-5)
    assert not monitor.notes and not hooks_of(model)
    number, breaks = graphs()
    assert breaks == 0 and number <= (2 if "blocks" in how.__name__ else 1)


@pytest.mark.parametrize("how", one_fast(home.blocks_wrapped, home.whole, home.train_step, home.blocks_compiled))
def test_a_model_compiled_before_is_seen_with_one_graph_more(how: Any, plain: Any, graphs: Count) -> None:
    compare(followed(home_made(), how, first=True).table, plain, 1e-5)
    assert graphs()[1] == 0 and graphs()[0] <= 3


@pytest.mark.slow
def test_a_model_that_compiled_itself_before_is_seen(plain: Any) -> None:
    """Its own hooks run outside of that graph, where no gradient comes to logits: the loss is inside."""
    compare(followed(home_made(), home.own_method, first=True).table, plain, 1e-5)


@pytest.mark.parametrize("how", one_fast(home.blocks_compiled, home.blocks_wrapped))
def test_blocks_that_are_alike_share_a_graph(how: Any, graphs: Count) -> None:
    """The first has one of its own, since its input is a site, too; in later passes it must not take that of others."""
    wanted = followed(home_made(depth=5)).table
    torch.compiler.reset()
    compare(followed(home_made(depth=5), how).table, wanted, 1e-5)
    assert graphs() == (2, 0)


@pytest.mark.parametrize("backend", one_fast("aot_eager", "inductor"))
def test_a_loss_outside_of_a_graph_is_read_for_several_batches(backend: str, graphs: Count) -> None:
    def table(how: Callable[[Any], Any]) -> Any:
        with Monitor(model := home_made(), when=at([0]), metrics="tangent", plan=PLAN, strict=True) as monitor:
            called = how(model)
            with monitor.step(0):
                for seed, contexts in ((1, 24), (2, 8)):
                    ids = home.ids_of(seed, contexts)
                    logits = called(input_ids=ids)["logits"]
                    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        assert not monitor.notes
        return monitor.table

    wanted = table(lambda model: model)
    compare(table(lambda model: torch.compile(model, backend=backend, dynamic=False)), wanted, 1e-5)
    assert graphs() == (2, 0), "one for each shape"


@pytest.mark.slow
@pytest.mark.parametrize("first", [False, True])
def test_more_blocks_than_versions_of_a_code_are_compiled(first: bool) -> None:
    words: dict[str, Any] = {"options": {"fullgraph": True}, "first": first, "layers": [9, 10], "steps": 1}
    wanted = followed(home_made(depth=10), layers=[9, 10], steps=1).table
    for how in (home.blocks_compiled, home.blocks_wrapped):
        torch.compiler.reset()
        compare(followed(home_made(depth=10), how, **words).table, wanted, 1e-5)


@pytest.mark.slow
def test_a_twin_compiled_earlier_does_not_hide_the_hooks(plain: Any) -> None:
    twin = home.whole(home_made(), backend="aot_eager")
    twin(input_ids=home.ids_of(0), labels=home.ids_of(0))["loss"].backward()
    compare(followed(home_made(), home.whole).table, plain, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"fullgraph": True}, {"dynamic": True, "fullgraph": True}])
def test_options_of_the_compiler_change_nothing(options: dict[str, Any], graphs: Count) -> None:
    wanted = followed(home_made(), lengths=(9, 7)).table
    compare(followed(home_made(), home.whole, lengths=(9, 7), options=options).table, wanted, 1e-5)
    assert graphs() == (1 if "dynamic" in options else 2, 0)


def test_inductor_gives_the_table_of_eager_in_one_graph(plain: Any, graphs: Count) -> None:
    options = {"backend": "inductor", "fullgraph": True}
    compare(followed(home_made(), home.whole, options=options).table, plain, 1e-5)
    assert graphs() == (1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("recompute", [None, "no"])
def test_modes_of_inductor_change_nothing(mode: str, recompute: str | None, plain: Any, graphs: Count) -> None:
    options = {"backend": "inductor", "mode": mode, "fullgraph": True}
    compare(followed(home_made(recompute=recompute), home.whole, options=options).table, plain, 1e-5)
    assert graphs() == (1, 0)


def test_our_operators_are_left_out_of_cuda_graphs() -> None:
    from torch._inductor.utils import get_first_incompatible_cudagraph_node

    for name in ("call", "tap", "choose", "keep", "arrived"):
        graph = torch.fx.Graph()
        graph.call_function(getattr(torch.ops.anisoscope, name).default)
        graph.output(())
        assert get_first_incompatible_cudagraph_node(torch.fx.GraphModule({}, graph)) is not None, name
    harmless = torch.fx.Graph()
    harmless.call_function(torch.ops.aten.relu.default, (harmless.placeholder("x"),))
    harmless.output(())
    assert get_first_incompatible_cudagraph_node(torch.fx.GraphModule({}, harmless)) is None


# checkpointing


@pytest.mark.parametrize("how", one_fast(home.whole, home.as_it_is, home.blocks_compiled))
def test_checkpointed_blocks_count_once(how: Any, plain: Any, graphs: Count) -> None:
    compare(followed(home_made(recompute="no"), how).table, plain, 1e-5)
    assert graphs()[1] == 0


@pytest.mark.slow
def test_a_compiled_graph_takes_the_re_entrant_kind_as_well(plain: Any) -> None:
    compare(followed(home_made(recompute="reentrant"), home.whole).table, plain, 1e-5)


@pytest.mark.parametrize("how", one_fast(home.as_it_is, home.blocks_compiled))
def test_the_re_entrant_kind_is_refused_elsewhere(how: Any) -> None:
    with pytest.warns(MonitorWarning, match=r"re-entrant checkpoint.*use_reentrant"):
        monitor = followed(home_made(recompute="reentrant"), how, strict=False)
    assert not len(monitor.table)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["first", "last", "sum"])
def test_recomputed_micro_batches_are_told_apart(order: str) -> None:
    def table(recompute: str | None, how: Any) -> Any:
        losses: list[Tensor] = []

        def backward(loss: Tensor) -> None:
            losses.append(loss)
            if len(losses) == 2:
                for each in {"first": losses, "last": losses[::-1], "sum": [sum(losses)]}[order]:
                    each.backward()
                losses.clear()

        return followed(home_made(recompute=recompute), how, backward=backward).table

    compare(table("no", home.whole), table(None, home.as_it_is), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_gradient_checkpointing_of_transformers(whole: bool) -> None:
    def table(recompute: bool, how: Callable[[Any], Any]) -> Any:
        model: Any = tiny("llama", layers=1).train()
        model.loss_type, model.config.use_cache = "ForCausalLM", False
        if recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        with Monitor(model, when=at([0]), metrics="average_cosine,tangent", plan=PLAN, strict=True) as monitor:
            called = how(model)
            with monitor.step(0):
                called(**batch_of("llama", *LENGTHS)).loss.backward()
        return monitor.table

    how = (lambda m: torch.compile(m, backend="aot_eager")) if whole else (lambda m: m)
    compare(table(True, how), table(False, lambda m: m), 1e-5)


# precision


def autocast() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.slow
def test_autocast_compiled_is_autocast() -> None:
    compare(
        followed(home_made(), home.whole, around=autocast).table, followed(home_made(), around=autocast).table, 1e-5
    )


@pytest.mark.parametrize("how", one_fast(home.as_it_is, home.whole))
def test_a_scaled_loss_is_unscaled(how: Any, plain: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    compare(followed(home_made(), how, backward=lambda loss: scaler.scale(loss).backward()).table, plain, 1e-5)


@pytest.mark.slow
def test_a_step_that_overflows_is_noted_and_the_next_one_measured() -> None:
    scales = iter([torch.inf, torch.inf, 1.0, 1.0])
    monitor = followed(home_made(), home.whole, backward=lambda loss: (loss * next(scales)).backward(), strict=False)
    energies = {row["step"] for row in monitor.table.records() if row["metric"] == "gradient_energy"}
    assert energies == {1} and any("finite" in note for note in monitor.notes), monitor.notes


def test_a_site_of_8_bit_floats_is_refused() -> None:
    class Eight(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to(torch.float8_e4m3fn)

    with (
        pytest.raises(AnisoscopeError, match="8-bit floats"),
        Capture(model := nn.Sequential(Eight()), [], KeptRows(), modules=["0"]),
    ):
        model(torch.ones(2, 3, 4))


# parts that do not learn


def freeze(*names: str) -> Callable[[nn.Module], None]:
    def act(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(names))

    return act


def tie(model: nn.Module) -> None:
    model.head.weight = model.embedding.weight  # type: ignore[union-attr]


FROZEN = {
    "embedding": (freeze("embedding", "places"), {0}),
    "first block": (freeze("embedding", "places", "blocks.0"), {0, 1}),
    "all but the head": (freeze("embedding", "places", "blocks"), {0, 1, 2}),
    "tied": (tie, set()),
}


@pytest.mark.parametrize("case", one_fast("first block", "embedding", "all but the head", "tied"))
def test_frozen_parts_are_named_and_the_rest_is_measured(case: str) -> None:
    def found(how: Any) -> Monitor:
        FROZEN[case][0](model := home_made())
        return followed(model, how)

    wanted, monitor = found(home.as_it_is), found(home.whole)
    compare(monitor.table, wanted.table, 1e-5)
    assert len(monitor.table.where(metric="gradient_energy"))
    silent = FROZEN[case][1]
    assert monitor.notes == wanted.notes and bool(monitor.notes) == bool(silent)
    assert all(f"{layer}." in monitor.notes[0] for layer in silent)


def adapted(*, recompute: bool) -> Any:
    peft = pytest.importorskip("peft")
    base: Any = tiny("llama", layers=2).train()
    base.loss_type, base.config.use_cache = "ForCausalLM", False
    if recompute:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        base.enable_input_require_grads()
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(base, config)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_an_adapted_model_is_measured_compiled_as_it_is(recompute: bool) -> None:
    def table(how: Callable[[Any], Any], recompute: bool) -> Any:
        with Monitor(model := adapted(recompute=recompute), when=at([0]), metrics="tangent", plan=PLAN) as monitor:
            called = how(model)
            with monitor.step(0):
                called(**batch_of("llama", *LENGTHS)).loss.backward()
        return monitor.table.where(metric="gradient_energy")

    wanted = table(lambda model: model, False)
    assert {row["layer"] for row in wanted.records()} >= {1, 2}
    found = table(lambda model: torch.compile(model, backend="aot_eager"), recompute)
    layers = {row["layer"] for row in wanted.records()}  # with inputs that require gradients also layer 0
    compare(found.where(layer=sorted(layers)), wanted, 1e-5)


# what it leaves alone


@pytest.mark.slow
def test_weights_are_those_of_a_training_without_it() -> None:
    def weights(monitored: bool) -> list[Tensor]:
        torch.compiler.reset()
        model = home_made(recompute="no")
        optimizer, called = torch.optim.SGD(model.parameters(), lr=0.1), None
        monitor = Monitor(model, when=at([1]), metrics="tangent", plan=PLAN, strict=True) if monitored else None
        if monitor is not None:
            monitor.__enter__()
        called = home.whole(model, backend="aot_eager")
        for step in range(3):
            ids = home.ids_of(step)
            if monitor is not None:
                with monitor.step(step):
                    called(input_ids=ids, labels=ids)["loss"].backward()
            else:
                called(input_ids=ids, labels=ids)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
        if monitor is not None:
            monitor.__exit__(None)
        return [parameter.detach().clone() for parameter in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(weights(True), weights(False), strict=True))


@pytest.mark.slow
def test_a_probe_runs_the_compiled_model_as_it_is(plain: Any, graphs: Count) -> None:
    probe = [{"input_ids": home.ids_of(9), "labels": home.ids_of(9)}]
    wanted = followed(home_made(), probe=probe, live=False).table
    graphs_of_training = graphs()
    for how in WAYS:
        compare(followed(home_made(), how, first=True, probe=probe, live=False).table, wanted, 1e-9)
    assert graphs_of_training == (0, 0) and graphs()[1] == 0


@pytest.mark.slow
def test_queries_and_keys_of_transformers_break_no_graph(graphs: Count) -> None:
    def table(how: Callable[[Any], Any]) -> Any:
        model: Any = tiny("llama", layers=2).train()
        model.loss_type = "ForCausalLM"
        with Monitor(model, when=at([0]), metrics="average_cosine", strict=True) as monitor:
            called = how(model)
            with monitor.step(0):
                called(**probe_of("llama")).loss.backward()
        return monitor.table

    wanted = table(lambda model: model)
    compare(table(lambda model: torch.compile(model, backend="aot_eager", fullgraph=True)), wanted, 1e-5)
    assert graphs() == (1, 0) and {"query", "key"} <= {row["kind"] for row in wanted.records()}


@pytest.mark.parametrize("fullgraph", one_fast(True, False))
def test_attention_that_a_model_computes_itself_is_read_between_graphs_or_refused(fullgraph: bool) -> None:
    words = {"metrics": "average_cosine", "plan": None}
    if not fullgraph:
        wanted = followed(home_made(), **words).table
        compare(followed(home_made(), home.whole, **words).table, wanted, 1e-5)
        assert "query" in {row["kind"] for row in wanted.records()}
        return
    with pytest.warns(MonitorWarning, match=r"queries and keys .*fullgraph=True.*leave fullgraph out"):
        monitor = followed(home_made(), home.whole, options={"fullgraph": True}, strict=False, **words)
    kinds = {row["kind"] for row in monitor.table.records()}
    assert "resid" in kinds and "query" not in kinds
