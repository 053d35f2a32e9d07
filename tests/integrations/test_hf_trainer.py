"""Callbacks: what a Trainer's model shows is what a plain loop shows, and the training does not notice."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")

from transformers import (
    Trainer,
    TrainerCallback,
)

from anisoscope.errors import AnisoscopeError
from anisoscope.integrations.hf_trainer import MonitorCallback
from anisoscope.monitor.monitor import Monitor
from anisoscope.monitor.schedule import at, every
from anisoscope.results.query import Table
from anisoscope.tangent.proxy import StepRows
from support.trainings import (
    MODELS,
    UPDATES,
    Killed,
    V,
    assert_same,
    assert_same_rows,
    collate,
    energies,
    gpt2,
    hooks_of,
    make_trainer,
    monitor_options,
    plain_loop,
    probe,
    sites_of,
    steps_of,
    targets_of,
)

COUNTS = torch.arange(1, V + 1)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    importlib.import_module("transformers").logging.set_verbosity_error()


class Recorder:
    """A collator that remembers its batches, in their order."""

    def __init__(self) -> None:
        self.batches: list[dict[str, Tensor]] = []

    def __call__(self, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        self.batches.append(collate(rows))
        return self.batches[-1]


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("name", list(MODELS))
def test_a_trainer_shows_the_rows_of_a_plain_loop(
    name: str, accumulate: int, tmp_path: Path, seen: list[StepRows]
) -> None:
    collator, callback = Recorder(), MonitorCallback(**monitor_options())
    options = {"gradient_accumulation_steps": accumulate, "max_grad_norm": 0.1, "max_steps": 3}
    trainer = make_trainer(
        MODELS[name](), tmp_path, callback, masked=name == "bert", sgd=True, collator=collator, **options
    )
    trainer.train()
    assert trainer.state.log_history[0]["grad_norm"] > 0.2, "clipping was to take place"
    mine = seen.copy()
    seen.clear()

    def weigh(own: int, of_all: int, _: int) -> float:
        # BERT takes num_items_in_batch and ignores it, so the Trainer adds up plain means
        return 1.0 if name == "bert" else own / of_all

    batches = collator.batches[: 3 * accumulate]
    table = plain_loop(MODELS[name], batches, weigh, accumulate=accumulate, clip=0.1)
    assert_same_rows(mine, seen)
    assert_same(callback.table, table, 1e-6)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_its_gradients_are_those_of_the_summed_loss(name: str, tmp_path: Path, seen: list[StepRows]) -> None:
    """Against autograd, for clipped, accumulated steps whose micro-batches have different numbers of targets."""
    collator, callback = Recorder(), MonitorCallback(**monitor_options(when=at([0])))
    options = {"gradient_accumulation_steps": 4, "max_grad_norm": 0.01, "max_steps": 1}
    make_trainer(MODELS[name](), tmp_path, callback, masked=name == "bert", collator=collator, **options).train()
    model = MODELS[name]().eval()
    site = next(s for s in sites_of(seen[0]) if s.layer == 1)
    parts = seen[0].test[site]
    assert len(parts) == 4
    assert len({targets_of(model, batch) for batch in collator.batches[:4]}) > 1
    for batch, (rows, factor) in zip(collator.batches, parts, strict=False):
        output = model(**batch, output_hidden_states=True)
        shifted = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        targets = batch["labels"] if name == "bert" else shifted
        total = nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten(), reduction="sum")
        g = torch.autograd.grad(total, output.hidden_states[1])[0].flatten(0, 1)
        assert rows.g is not None
        torch.testing.assert_close(rows.g * factor, g[rows.index.keep], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(rows.x, output.hidden_states[1].detach().flatten(0, 1)[rows.index.keep])


def test_a_micro_batch_without_targets_counts_nothing(tmp_path: Path, seen: list[StepRows]) -> None:
    def blank_second(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = collate(rows)
        batch["labels"] = batch["labels"] if torch.equal(batch["input_ids"][0], first) else batch["labels"] * 0 - 100
        return batch

    probe_run = Recorder()
    make_trainer(gpt2(), tmp_path, collator=probe_run, max_steps=1).train()
    first = probe_run.batches[0]["input_ids"][0]
    callback = MonitorCallback(**monitor_options(when=at([0])))
    options = {"gradient_accumulation_steps": 2, "max_steps": 1}
    make_trainer(gpt2(), tmp_path, callback, collator=blank_second, **options).train()
    (a, _), (b, _) = seen[0].test[sites_of(seen[0])[0]]
    assert a.g is not None and b.g is not None
    assert bool(a.g.any()) and not bool(b.g.any())


@pytest.mark.parametrize("mode", ["live", "probe"])
def test_the_losses_are_bit_identical_with_and_without(mode: str, tmp_path: Path) -> None:
    def losses(*callbacks: Any) -> list[float]:
        trainer = make_trainer(gpt2(dropout=0.1), tmp_path, *callbacks, max_steps=6)
        trainer.train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]

    more: dict[str, Any] = {"probe": probe()} if mode == "probe" else {}
    plain = losses()
    plan = replace(UPDATES, proxies=("semi_nmf", "pca"), permuted=True, balanced=True)
    assert losses(MonitorCallback(when=at([0, 3]), metrics="standard", plan=plan, counts=COUNTS, **more)) == plain
    assert len(set(plain)) == 6

    class Careless(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            torch.rand(1)

    assert losses(Careless()) != plain, "the counter-test: one random number more would show"


def test_a_probe_is_measured_from_the_initialisation_to_the_final_state(tmp_path: Path) -> None:
    trainer = make_trainer(gpt2(), tmp_path, callback := MonitorCallback(**monitor_options(when=None, probe=probe())))
    trainer.train()
    assert steps_of(callback.table) == [0, 1, 2, 4, 5]
    for step, model in ((0, gpt2()), (5, trainer.model)):
        with Monitor(model, **monitor_options(when=at([step]), probe=probe())) as monitor, monitor.step(step):
            pass
        assert_same(callback.table.where(step=step), monitor.table)
    assert hooks_of(trainer.model) == 0


def test_probe_and_training_batches_can_be_measured_side_by_side(tmp_path: Path) -> None:
    callback = MonitorCallback(**monitor_options(probe=probe(), live=True))
    make_trainer(gpt2(), tmp_path, callback, max_steps=3).train()
    live = {key[0] for key in energies(callback.table) if key[-1].startswith("batch=live")}
    held_out = {key[0] for key in energies(callback.table) if not key[-1].startswith("batch=live")}
    assert (live, held_out) == ({0, 2}, {0, 2, 3}), "after the last update there is no batch"


def test_a_training_that_stops_early_is_measured_where_it_stopped(tmp_path: Path) -> None:
    class Enough(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            control.should_training_stop = state.global_step == 3
            return control

    options = monitor_options(when=every(2), probe=probe())
    make_trainer(gpt2(), tmp_path, callback := MonitorCallback(**options), Enough()).train()
    assert steps_of(callback.table) == [0, 2, 3]
    make_trainer(gpt2(), tmp_path, callback := MonitorCallback(**{**options, "when": at([0, 2])}), Enough()).train()
    assert steps_of(callback.table) == [0, 2]


def test_the_final_state_is_the_last_one_not_the_best(tmp_path: Path) -> None:
    """The Trainer puts the best weights back before it says that the training has ended."""
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    options |= {"learning_rate": 5.0, "lr_scheduler_type": "constant"}
    tables = []
    for best in (True, False):
        callback = MonitorCallback(**monitor_options(when=at([0, 3]), probe=probe()))
        trainer = make_trainer(gpt2(), tmp_path / str(best), callback, load_best_model_at_end=best, **options)
        trainer.train()
        tables.append(callback.table)
    assert trainer.state.log_history[-1]["step"] == 3
    assert_same(*tables)


class Kill(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise Killed


def _resumable(out: Path, *more: Any, folder: str, **options: Any) -> tuple[Trainer, MonitorCallback]:
    words = monitor_options(when=every(2), plan=UPDATES, probe=probe(), out=out / folder, **options)
    callback = MonitorCallback(**words)
    saving = {"save_strategy": "steps", "save_steps": 3, "max_steps": 8, "weight_decay": 0.5}
    return make_trainer(gpt2(), out / "trainer", callback, *more, **saving), callback


def test_a_resumed_training_goes_on_with_its_monitor(tmp_path: Path) -> None:
    """From a checkpoint after update 3, where the last measured step was 2 or, lost again, 4."""
    trainer, whole = _resumable(tmp_path / "whole", folder="monitor")
    trainer.train()
    for kill, measured in ((4, [0, 2]), (5, [0, 2, 4])):
        out = tmp_path / str(kill)
        trainer, broken = _resumable(out, Kill(kill), folder="monitor")
        with pytest.raises(Killed):
            trainer.train()
        assert steps_of(broken.table) == measured
        assert hooks_of(trainer.model) > 0, "a Trainer says nothing when it breaks off"
        broken.close()
        assert hooks_of(trainer.model) == 0
        trainer, resumed = _resumable(out, folder="monitor")
        trainer.train(resume_from_checkpoint=str(out / "trainer" / "checkpoint-3"))
        assert steps_of(resumed.table) == [0, 2, 4, 6, 8]
        assert_same(resumed.table, whole.table, 1e-6)  # moments of the frozen window were on disk in between
        assert any("of=update;" in key[-1] for key in energies(resumed.table))
        assert_same(Table.read(out / "monitor" / "table.parquet"), whole.table, 1e-6)


def test_without_a_state_of_that_moment_no_update_is_made_up(tmp_path: Path) -> None:
    trainer, callback = _resumable(tmp_path, Kill(4), folder="monitor")
    with pytest.raises(Killed):
        trainer.train()
    callback.close()
    (tmp_path / "trainer" / "checkpoint-3" / "monitor.pt").unlink()
    trainer, resumed = _resumable(tmp_path, folder="monitor")
    trainer.train(resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-3"))
    assert steps_of(resumed.table) == [0, 2, 4, 6, 8]
    updated = {key[0] for key in energies(resumed.table) if "of=update" in key[-1]}
    assert updated == {2, 6, 8}, "of the updates between 2 and 4 only some were watched"


def test_a_folder_with_results_is_not_written_over(tmp_path: Path) -> None:
    for message in ("", "say resume=True"):
        callback = MonitorCallback(**monitor_options(when=at([0]), out=tmp_path / "monitor"))
        trainer = make_trainer(gpt2(), tmp_path, callback, max_steps=1)
        if not message:
            trainer.train()
            continue
        with pytest.raises(AnisoscopeError, match=message):
            trainer.train()


def test_logged_numbers_reach_the_table_of_their_step(tmp_path: Path) -> None:
    trainer = make_trainer(gpt2(), tmp_path, callback := MonitorCallback(**monitor_options()))
    trainer.train()
    names = {"loss": "loss", "grad_norm": "gradient_norm", "learning_rate": "learning_rate"}
    logs = [row for row in trainer.state.log_history if "loss" in row]
    assert len(logs) == 5
    for log in logs:
        found = callback.table.where(step=log["step"] - 1, kind="training", metric=list(names.values()))
        measured = (log["step"] - 1) % 2 == 0
        expected = {ours: pytest.approx(log[theirs]) for theirs, ours in names.items()} if measured else {}
        assert {row["metric"]: row["value"] for row in found.records()} == expected


def test_a_mean_over_several_steps_is_not_the_loss_of_one(tmp_path: Path) -> None:
    callback = MonitorCallback(**monitor_options(when=every(1)))
    make_trainer(gpt2(), tmp_path, callback, logging_steps=2, max_steps=4).train()
    training = callback.table.where(kind="training")
    assert {row["step"] for row in training.where(metric="learning_rate").records()} == {1, 3}
    assert "loss" not in training.metrics
