"""A compiled training: one graph whatever is measured, the numbers of an uncompiled one, no end if a compiler fails."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from anisoscope.results.query import Table
from anisoscope.studies.arms import training_monitor
from anisoscope.training import compiled_loss
from anisoscope.training.compiled_loss import TrainingLoss
from anisoscope.training.config import ClassifierConfig, TrainConfig
from anisoscope.training.loop import train
from support.tiny_runs import about, losses, tiny, weights


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without code generation: what is traced, cut and recorded is the same, and takes a second, not a minute."""
    monkeypatch.setattr(compiled_loss, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> tuple[int, int]:
    """Compiled graphs, and places where a graph was broken."""
    counted = torch._dynamo.utils.counters
    return counted["stats"]["unique_graphs"], sum(counted["graph_break"].values())


def run(out: Path, corpus: Path, *, watch: dict[str, Any] | None = None, **options: Any) -> Path:
    if watch is None:
        return train(tiny(**options), out, corpus=corpus)
    attach = functools.partial(training_monitor, **{"monitor": "light", "contexts": 8, **watch})
    return train(tiny(**options), out, corpus=corpus, monitor=attach)


def test_language_models_are_compiled_on_a_gpu_unless_told() -> None:
    wanted = {(None, "cuda"): True, (None, "cpu"): False, (True, "cpu"): True, (False, "cuda"): False}
    assert all(TrainConfig(compile=asked).compiles(device) is found for (asked, device), found in wanted.items())
    assert not ClassifierConfig.worth_compiling


OTHERS = [pytest.param(options, marks=pytest.mark.slow) for options in ({"target_weights": "flat"}, {"accumulate": 2})]


@pytest.mark.parametrize("options", [{}, {"arch": "encoder"}, *OTHERS])
def test_the_way_from_batch_to_loss_is_one_graph(options: dict[str, Any], tokenised: Path, tmp_path: Path) -> None:
    plain = losses(run(tmp_path / "plain", tokenised, steps=4, **options))
    found = run(tmp_path / "compiled", tokenised, steps=4, compile=True, **options)
    assert graphs() == (1, 0)
    assert losses(found) == pytest.approx(plain, rel=1e-5)
    assert about(found)["compiled"] is True and about(tmp_path / "plain")["compiled"] is False


@pytest.mark.parametrize("every_step", [pytest.param(False, marks=pytest.mark.slow), True])
def test_measured_steps_change_neither_graph_nor_weights(every_step: bool, tokenised: Path, tmp_path: Path) -> None:
    words: dict[str, Any] = {"steps": 5, "compile": True}
    plain = run(tmp_path / "plain", tokenised, **words)
    seen = run(tmp_path / "seen", tokenised, watch={"when": "0,2,3", "every_step": every_step}, **words)
    assert graphs() == (2, 0), "one for each training"
    same = weights(plain, 5)
    assert all(torch.equal(value, same[name]) for name, value in weights(seen, 5).items())
    assert losses(seen) == losses(plain)


def test_the_table_is_that_of_an_uncompiled_training(tokenised: Path, tmp_path: Path) -> None:
    watch = {"when": "0,3", "every_step": True, "monitor": "standard"}
    outs = [run(tmp_path / str(c), tokenised, steps=3, compile=c, watch=watch, lr=1e-5) for c in (False, True)]
    for name in ("table.parquet", "every_step.parquet"):
        plain, found = (Table.read(out / name).arrow for out in outs)
        assert plain["metric"].to_pylist() == found["metric"].to_pylist()
        assert plain["n"].to_pylist() == found["n"].to_pylist()
        a, b = (np.array(table["value"].to_pylist(), dtype=float) for table in (plain, found))
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_training_does_not_take_the_graph_of_another(tokenised: Path, tmp_path: Path) -> None:
    run(tmp_path / "first", tokenised, steps=2, compile=True)
    seen = run(tmp_path / "second", tokenised, steps=3, compile=True, watch={"when": "0,1,3", "monitor": "standard"})
    table = Table.read(seen / "table.parquet")
    assert len(table.where(kind="embed_weight", step=3)), "types read by the compiled training were noticed"


def test_a_compiler_that_fails_is_told_once(monkeypatch: pytest.MonkeyPatch, tokenised: Path, tmp_path: Path) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(compiled_loss, "BACKEND", broken)
    with pytest.warns(UserWarning, match="no compiler here.*goes on without") as told:
        out = run(tmp_path / "run", tokenised, steps=3, compile=True)
    assert len([w for w in told if "goes on without" in str(w.message)]) == 1
    assert about(out)["compiled"] is False and "goes on without" in about(out)["warnings"][0]
    assert losses(out) == losses(run(tmp_path / "plain", tokenised, steps=3))


def test_a_backward_pass_that_cannot_be_compiled_leaves_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model, told = nn.Linear(3, 1), list[str]()
    batch = {"x": torch.randn(4, 3)}
    loss = TrainingLoss(lambda m, b: m(b["x"]).square().mean(), model, torch.enable_grad, failed=told.append)
    loss.learn(batch, seed=0)
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *g: Any) -> Any:
            raise RuntimeError("lowering failed")

    loss = TrainingLoss(lambda m, b: m(b["x"]).square().mean(), model, torch.enable_grad, failed=told.append)
    loss.compiled, loss._call = True, lambda b: Broken.apply(model(b["x"]).square().mean())
    loss.learn(batch, seed=0)
    assert len(told) == 1 and "lowering failed" in told[0] and not loss.compiled
    assert all(torch.equal(a, p.grad) for a, p in zip(wanted, model.parameters(), strict=True))


@pytest.mark.slow
def test_a_resumed_run_is_compiled_as_it_was(tokenised: Path, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def halfway(what: str, done: int, of: int) -> None:
        if what == "train" and done == 3:
            raise Stop

    words: dict[str, Any] = {"steps": 5, "checkpoints": "every:2", "compile": True}
    whole = run(tmp_path / "whole", tokenised, **words)
    with pytest.raises(Stop):
        train(tiny(**words), tmp_path / "run", corpus=tokenised, progress=halfway)
    before = graphs()[0]
    train(tiny(**words), tmp_path / "run", corpus=tokenised, resume=True)
    assert graphs()[0] == before + 1 and about(tmp_path / "run")["compiled"] is True
    assert all(torch.equal(value, weights(whole, 5)[name]) for name, value in weights(tmp_path / "run", 5).items())


def test_seeds_are_those_of_torch_and_no_stack_is_formatted(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1 << 61)
    wanted = torch.rand(4)

    def formatted(*_: Any, **__: Any) -> Any:
        raise AssertionError("for a device that is not there")

    monkeypatch.setattr("traceback.format_stack", formatted)
    compiled_loss.seed_generators(torch.device("cpu"), 1 << 61)
    assert torch.equal(torch.rand(4), wanted)


@pytest.mark.slow
def test_inductor_gives_the_same_numbers(monkeypatch: pytest.MonkeyPatch, tokenised: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(compiled_loss, "BACKEND", "inductor")
    watch = {"when": "0,2", "every_step": True}
    outs = [run(tmp_path / str(c), tokenised, steps=3, compile=c, watch=watch, lr=1e-5) for c in (False, True)]
    assert graphs() == (1, 0)
    assert losses(outs[1]) == pytest.approx(losses(outs[0]), rel=1e-5)
    plain, found = (np.array(Table.read(out / "every_step.parquet").arrow["value"].to_pylist()) for out in outs)
    np.testing.assert_allclose(found, plain, rtol=1e-4, atol=1e-5)
