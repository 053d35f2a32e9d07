"""The callback of the Trainer where a training is out of the ordinary: decay, evaluation, precision, refusals."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")

from transformers import (
    TrainerCallback,
)

from anisoscope.errors import AnisoscopeError
from anisoscope.integrations.hf_trainer import MonitorCallback, _refuse_unsupported
from anisoscope.monitor.schedule import at, every
from anisoscope.results.query import Table
from anisoscope.tangent.proxy import StepRows
from support.trainings import (
    MODELS,
    UPDATES,
    Twin,
    assert_decay_removed,
    assert_same,
    collate,
    energies,
    gpt2,
    hooks_of,
    make_trainer,
    monitor_options,
    probe,
    sites_of,
    steps_of,
)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    importlib.import_module("transformers").logging.set_verbosity_error()


def test_the_optimizer_tells_how_much_was_weight_decay(tmp_path: Path, updates: list[Any]) -> None:
    twin = Twin()

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: Any, optimizer: Any, **__: Any) -> None:
            twin.look(model.get_input_embeddings().weight, optimizer)

    callback = MonitorCallback(**monitor_options(plan=UPDATES))
    make_trainer(gpt2(), tmp_path, callback, Look(), weight_decay=0.9, max_steps=5).train()
    assert callback.monitor is not None and isinstance(callback.monitor.watch.optimizer, torch.optim.AdamW)
    assert_decay_removed(updates, twin)


def test_evaluation_in_between_is_not_counted(tmp_path: Path, updates: list[Any]) -> None:
    tables, watched = [], []
    for more in ({}, {"eval_strategy": "steps", "eval_steps": 1}):
        callback = MonitorCallback(**monitor_options(plan=UPDATES))
        trainer = make_trainer(gpt2(), tmp_path, callback, **more)
        trainer.train()
        tables.append(callback.table)
        watched.append([types.tolist() for _, types, _ in updates])
        updates.clear()
    assert any("eval_loss" in row for row in trainer.state.log_history)
    assert_same(*tables)
    assert watched[0] == watched[1] != []


def test_a_forward_pass_with_gradients_inside_a_step_would_be_counted(tmp_path: Path, seen: list[StepRows]) -> None:
    class Meddling(TrainerCallback):
        def on_step_begin(self, *_: Any, model: nn.Module, **__: Any) -> None:
            model(**probe()[0]).loss.backward()
            model.zero_grad()

    callback = MonitorCallback(**monitor_options(when=at([0])))
    make_trainer(gpt2(), tmp_path, callback, Meddling(), max_steps=1).train()
    assert len(seen[0].test[sites_of(seen[0])[0]]) == 2


def test_checkpointing_changes_nothing_and_the_re_entrant_kind_is_refused(tmp_path: Path) -> None:
    def run(model: nn.Module, *, reentrant: bool | None, **options: Any) -> Table:
        callback = MonitorCallback(**monitor_options(**options))
        more = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}} if reentrant is not None else {}
        make_trainer(model, tmp_path, callback, gradient_checkpointing=reentrant is not None, **more).train()
        return callback.table

    assert_same(run(gpt2(), reentrant=False), run(gpt2(), reentrant=None), 1e-6)
    model, bare = gpt2(), gpt2()
    with pytest.raises(AnisoscopeError, match=r"re-entrant gradient checkpointing.*'use_reentrant': False"):
        run(model, reentrant=True)
    bare.gradient_checkpointing_enable({"use_reentrant": True})
    assert hooks_of(model) == hooks_of(bare), "only what transformers itself put there"
    assert steps_of(run(gpt2(), reentrant=True, probe=probe())) == [0, 2, 4, 5], "a probe does not need the graph"


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_half_precision_gives_nearly_the_same_energies(name: str, tmp_path: Path, seen: list[StepRows]) -> None:
    tables = []
    for half in (False, True):
        callback = MonitorCallback(**monitor_options(when=at([0])))
        make_trainer(MODELS[name](), tmp_path, callback, masked=name == "bert", bf16=half, max_steps=1).train()
        tables.append(callback.table)
    for _, _, test in seen[1].halves():
        assert test.dropped == 0 and test.g is not None and bool(test.g.isfinite().all())
    full, halved = (energies(table) for table in tables)
    assert full.keys() == halved.keys()
    gaps = [abs(full[key] - halved[key]) for key in full]
    assert 0 < max(gaps) < 0.02


@pytest.mark.slow
def test_a_compiled_training_is_seen_also_if_the_model_was_compiled_before(tmp_path: Path) -> None:
    torch._dynamo.reset()
    compiled = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 2}
    make_trainer(gpt2(), tmp_path, plain := MonitorCallback(**monitor_options(when=at([1]))), max_steps=2).train()
    make_trainer(gpt2(), tmp_path, callback := MonitorCallback(**monitor_options(when=at([1]))), **compiled).train()
    assert_same(callback.table, plain.table, 1e-5)
    torch._dynamo.reset()
    trainer = make_trainer(gpt2(), tmp_path, **{**compiled, "max_steps": 1})
    trainer.train()
    trainer.add_callback(callback := MonitorCallback(**monitor_options(when=at([0]), strict=True)))
    trainer.train()
    assert hooks_of(trainer.model) == 0 and len(callback.table.where(metric="gradient_energy"))
    torch._dynamo.reset()


def test_what_cannot_be_read_is_refused() -> None:
    _refuse_unsupported(SimpleNamespace(n_gpu=2), live=False)  # type: ignore[arg-type]
    with pytest.raises(AnisoscopeError, match=r"copies the model to 2 devices.*torchrun"):
        _refuse_unsupported(SimpleNamespace(n_gpu=2), live=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["smoothing", "function", "own class"])
def test_a_loss_outside_the_model_is_measured_as_it_is(way: str, tmp_path: Path, seen: list[StepRows]) -> None:
    """Against autograd: of the smoothed loss as the Trainer divides it, or of the summed loss where that is known."""
    smoothing = 0.1 if way == "smoothing" else 0.0

    def loss_of(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        flat = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        total = nn.functional.cross_entropy(*flat, reduction="sum", label_smoothing=smoothing)
        return total / num_items_in_batch

    batches: list[dict[str, Tensor]] = []

    def remember(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batches.append(collate(rows))
        return batches[-1]

    callback = MonitorCallback(**monitor_options(when=at([0]), strict=True))
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_steps": 1, "max_grad_norm": 0.01}
    options |= {"label_smoothing_factor": smoothing}
    trainer = make_trainer(gpt2(), tmp_path, callback, collator=remember, **options)
    if way == "function":
        trainer.compute_loss_func = loss_of
    if way == "own class":

        def compute_loss(model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
            given = dict(inputs)
            return loss_of(model(input_ids=given["input_ids"]), given["labels"], num_items_in_batch)

        trainer.compute_loss = compute_loss  # type: ignore[method-assign]
    trainer.train()
    model = gpt2()
    items = sum(int((batch["labels"] != -100).sum()) for batch in batches[:2])  # as the Trainer counts them
    site = next(s for s in sites_of(seen[0]) if s.layer == 1)
    for batch, (rows, factor) in zip(batches, seen[0].test[site], strict=False):
        output = model(input_ids=batch["input_ids"], output_hidden_states=True)
        total = loss_of(output, batch["labels"], items if smoothing else 1)
        g = torch.autograd.grad(total, output.hidden_states[1])[0].flatten(0, 1)
        assert rows.g is not None
        torch.testing.assert_close(rows.g * factor, g[rows.index.keep], rtol=1e-3, atol=1e-6)
    assert callback.monitor is not None and bool(callback.monitor.notes) == bool(smoothing)


def test_bad_options_are_refused_before_the_training(tmp_path: Path) -> None:
    with pytest.raises(AnisoscopeError, match=r"no option 'metric'; did you mean 'metrics'\?"):
        MonitorCallback(metric="light")
    callback = MonitorCallback(**monitor_options(probe=probe()))
    make_trainer(gpt2(), tmp_path, callback, label_smoothing_factor=0.1).train()
    assert steps_of(callback.table) == [0, 2, 4, 5]


def test_a_step_that_is_cut_short_is_not_measured(tmp_path: Path) -> None:
    class Stop(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            control.should_training_stop = state.global_step == 2
            return control

    callback = MonitorCallback(**monitor_options(when=every(1)))
    trainer = make_trainer(gpt2(), tmp_path, callback, Stop(), gradient_accumulation_steps=2)
    trainer.train()
    assert steps_of(callback.table) == [0, 1]
    assert hooks_of(trainer.model) == 0
