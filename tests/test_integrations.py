"""Callbacks: what a Trainer's model shows is what a plain loop shows, and the training does not notice."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")

from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from anisoscope.errors import AnisoscopeError
from anisoscope.integrations.hf_trainer import MonitorCallback, _refuse_unsupported
from anisoscope.runs.instruments import Instruments
from anisoscope.runs.monitor import Monitor
from anisoscope.runs.plan import TangentPlan
from anisoscope.runs.schedule import at, every
from anisoscope.runs.steprows import StepRows
from anisoscope.runs.table import Table
from anisoscope.runs.tables import EmbeddingWatch

V, T = 60, 16
# one cheap proxy: the laws here are about what reaches the study, not about the study
CHEAP = TangentPlan(
    rank=4, proxies=("pca",), draws=19, permuted=False, balanced=False, frozen=False, embedding=False, fit_rows=2048
)
UPDATES = TangentPlan(rank=4, proxies=("pca",), draws=19, permuted=False, balanced=False, embedding=True)
COUNTS = torch.arange(1, V + 1)
KEY = ("step", "stack", "layer", "kind", "head", "group", "metric", "variant")


@pytest.fixture(autouse=True)
def _quiet() -> None:
    importlib.import_module("transformers").logging.set_verbosity_error()


# -- small models and data ---------------------------------------------------------------------------------------------


def gpt2(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    off = {"attn_pdrop": dropout, "embd_pdrop": dropout, "resid_pdrop": dropout}
    sizes = {"vocab_size": V, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=2, eos_token_id=3, **off))


def _sizes() -> dict[str, Any]:
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
    return {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "pad_token_id": 1, **heads}


def llama() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**_sizes(), num_key_value_heads=2))


def bert() -> nn.Module:
    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(**_sizes(), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt2": gpt2, "llama": llama, "bert": bert}


def texts(n: int = 96, *, masked: bool = False, seed: int = 0) -> list[dict[str, Tensor]]:
    """Random contexts whose numbers of targets differ, so that a mean over the wrong number shows."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(n):
        ids = torch.randint(6, V, (T,), generator=generator)
        ignored = torch.rand(T, generator=generator) > 0.3
        if not masked:
            ignored = torch.arange(T) < int(torch.randint(0, 12, (1,), generator=generator))
        ignored[3] = False
        rows.append({"input_ids": ids, "labels": ids.masked_fill(ignored, -100)})
    return rows


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def probe() -> list[dict[str, Tensor]]:
    return [collate(texts(32, seed=5))]


def monitor_options(**more: Any) -> dict[str, Any]:
    return {"when": every(2), "metrics": "light", "plan": CHEAP, **more}


class Recorder:
    """A collator that remembers its batches, in their order."""

    def __init__(self) -> None:
        self.batches: list[dict[str, Tensor]] = []

    def __call__(self, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        self.batches.append(collate(rows))
        return self.batches[-1]


def make_trainer(
    model: nn.Module,
    out: Path,
    *callbacks: Any,
    masked: bool = False,
    sgd: bool = False,
    collator: Callable[..., Any] = collate,
    **more: Any,
) -> Trainer:
    options: dict[str, Any] = {
        "output_dir": str(out), "max_steps": 5, "per_device_train_batch_size": 8, "logging_steps": 1, "seed": 1,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True, "learning_rate": 1e-2,
    }  # fmt: skip
    optimizers: Any = (None, None)
    if sgd:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizers = (optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0))
    data = texts(masked=masked)
    words: dict[str, Any] = {"train_dataset": data, "eval_dataset": data[:16], "data_collator": collator}
    return Trainer(
        model, TrainingArguments(**{**options, **more}), callbacks=list(callbacks), optimizers=optimizers, **words
    )


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def energies(table: Table) -> dict[tuple[Any, ...], float]:
    rows = table.where(metric=["gradient_energy", "average_cosine"]).records()
    found = {tuple(row[name] for name in KEY): row["value"] for row in rows}
    assert len(found) == len(rows), "a row of the table occurs twice"
    return found


def steps_of(table: Table) -> list[int]:
    return sorted({row["step"] for row in table.where(metric="gradient_energy").records()})


def assert_same(a: Table, b: Table, tolerance: float = 0.0) -> None:
    mine, theirs = energies(a), energies(b)
    assert mine and mine.keys() == theirs.keys()
    for key, value in mine.items():
        assert value == pytest.approx(theirs[key], rel=tolerance, abs=tolerance, nan_ok=True), key


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[StepRows]:
    """The rows of every measured step, as they reach the study."""
    found: list[StepRows] = []
    measure = Instruments.measure

    def keep(self: Instruments, rows: StepRows, bank: Any) -> Any:
        found.append(rows)
        return measure(self, rows, bank)

    monkeypatch.setattr(Instruments, "measure", keep)
    return found


def assert_same_rows(a: list[StepRows], b: list[StepRows]) -> None:
    assert [rows.step for rows in a] == [rows.step for rows in b] != []
    for mine, theirs in zip(a, b, strict=True):
        assert mine.sites() == theirs.sites() != []
        for (_, fit, test), (_, fit2, test2) in zip(mine.halves(), theirs.halves(), strict=True):
            assert torch.equal(fit.context, fit2.context) and torch.equal(test.position, test2.position)
            assert len(test) > 8 and test.g is not None and test2.g is not None
            torch.testing.assert_close(fit.x, fit2.x, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(test.x, test2.x, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(test.g, test2.g, rtol=1e-4, atol=1e-6)


Weigh = Callable[[int, int, int], float]  # (own targets, targets of the update, micro-batches) -> weight of a mean loss


def plain_loop(
    build: Callable[[], nn.Module], batches: list[dict[str, Tensor]], weigh: Weigh, *, accumulate: int, clip: float
) -> Table:
    """The loop that a Trainer is expected to run, written out."""
    model = build().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with Monitor(model, **monitor_options()) as monitor:
        for step in range(len(batches) // accumulate):
            group = batches[step * accumulate : (step + 1) * accumulate]
            counts = [_targets(model, batch) for batch in group]
            with monitor.step(step):
                for batch, count in zip(group, counts, strict=True):
                    (model(**batch).loss * weigh(count, sum(counts), accumulate)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return monitor.table


def _targets(model: nn.Module, batch: dict[str, Tensor]) -> int:
    labels = batch["labels"] if "Bert" in type(model).__name__ else batch["labels"][:, 1:]
    return int((labels != -100).sum())


# -- transformers: what is measured ------------------------------------------------------------------------------------


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
    site = next(s for s in seen[0].sites() if s.layer == 1)
    parts = seen[0].test[site]
    assert len(parts) == 4
    assert len({_targets(model, batch) for batch in collator.batches[:4]}) > 1
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
    (a, _), (b, _) = seen[0].test[seen[0].sites()[0]]
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


# -- transformers: what surrounds it -----------------------------------------------------------------------------------


class Killed(Exception):
    pass


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
    assert len(training.where(metric="loss")) == 0


class Twin:
    """Weight decay of the embedding table, written down at every update."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []
        self.rates: list[float] = []

    def look(self, weight: Tensor, optimizer: Any) -> None:
        group = next(g for g in optimizer.param_groups if any(p is weight for p in g["params"]))
        self.weights.append(weight.detach().double().clone())
        self.rates.append(group["lr"] * group["weight_decay"])

    def change(self, start: int, end: int) -> Tensor:
        """ΔW between two steps without what decay alone did."""
        decay = sum((self.rates[i] * self.weights[i] for i in range(start, end)), torch.zeros(()))
        return self.weights[end] - self.weights[start] + decay


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int | None, Tensor, Tensor]]:
    """(since step, types, ΔW without decay) at every measured step."""
    found: list[tuple[int | None, Tensor, Tensor]] = []
    plain = EmbeddingWatch.updates

    def keep(self: EmbeddingWatch) -> Iterator[tuple[str, Tensor, Tensor]]:
        for of, types, rows in plain(self):
            if of == "update":
                found.append((self.step, types, rows))
            yield of, types, rows

    monkeypatch.setattr(EmbeddingWatch, "updates", keep)
    return found


def test_the_optimizer_tells_how_much_was_weight_decay(tmp_path: Path, updates: list[Any]) -> None:
    twin = Twin()

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: Any, optimizer: Any, **__: Any) -> None:
            twin.look(model.get_input_embeddings().weight, optimizer)

    callback = MonitorCallback(**monitor_options(plan=UPDATES))
    make_trainer(gpt2(), tmp_path, callback, Look(), weight_decay=0.9, max_steps=5).train()
    assert callback.monitor is not None and isinstance(callback.monitor.watch.optimizer, torch.optim.AdamW)
    _assert_decay_removed(updates, twin)


def _assert_decay_removed(updates: list[Any], twin: Twin) -> None:
    assert [since for since, _, _ in updates] == [0, 2]
    for since, types, rows in updates:
        expected = twin.change(since, since + 2)[types]
        torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-6)
        raw = (twin.weights[since + 2] - twin.weights[since])[types]
        assert not torch.allclose(raw, expected, rtol=1e-2), "the counter-test: decay is not nothing"


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
    assert len(seen[0].test[seen[0].sites()[0]]) == 2


# -- transformers: precision, checkpointing, compilation, refusals -----------------------------------------------------


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


def test_a_compiled_training_is_seen_if_the_callback_was_there_first(tmp_path: Path) -> None:
    torch._dynamo.reset()
    compiled = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 2}
    make_trainer(gpt2(), tmp_path, plain := MonitorCallback(**monitor_options(when=at([1]))), max_steps=2).train()
    make_trainer(gpt2(), tmp_path, callback := MonitorCallback(**monitor_options(when=at([1]))), **compiled).train()
    assert_same(callback.table, plain.table, 1e-5)
    torch._dynamo.reset()
    trainer = make_trainer(gpt2(), tmp_path, **{**compiled, "max_steps": 1})
    trainer.train()
    trainer.add_callback(MonitorCallback(**monitor_options()))
    with pytest.raises(AnisoscopeError, match=r"attach the monitor before torch\.compile"):
        trainer.train()
    assert hooks_of(trainer.model) == 0
    torch._dynamo.reset()


def test_what_cannot_be_read_in_one_place_is_refused() -> None:
    usual = {"fsdp": False, "deepspeed": None, "n_gpu": 1, "label_smoothing_factor": 0.0}
    _refuse_unsupported(SimpleNamespace(**usual), live=True)  # type: ignore[arg-type]
    _refuse_unsupported(SimpleNamespace(**usual | {"n_gpu": 2}), live=False)  # type: ignore[arg-type]
    for live, change, why in (
        (False, {"fsdp": ["full_shard"]}, "sharded"),
        (False, {"deepspeed": "config.json"}, "sharded"),
        (True, {"n_gpu": 2}, "copies the model to 2 devices.*torchrun"),
    ):
        with pytest.raises(AnisoscopeError, match=why):
            _refuse_unsupported(SimpleNamespace(**usual | change), live=live)  # type: ignore[arg-type]


def test_bad_options_are_refused_before_the_training(tmp_path: Path) -> None:
    with pytest.raises(AnisoscopeError, match=r"no option 'metric'; did you mean 'metrics'\?"):
        MonitorCallback(metric="light")
    trainer = make_trainer(gpt2(), tmp_path, MonitorCallback(**monitor_options()), label_smoothing_factor=0.1)
    with pytest.raises(AnisoscopeError, match=r"label_smoothing_factor.*measure a probe="):
        trainer.train()
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


# -- Lightning ---------------------------------------------------------------------------------------------------------


def lightning(name: str = "lightning.pytorch") -> Any:
    package = pytest.importorskip(name, reason=f"{name} is not installed")
    for logger in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    return package


def lightning_module(pl: Any, model: nn.Module, *, adam: bool = False) -> Any:
    class Module(pl.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses, self.batches, self.kill, self.skip = model, [], [], -1, -1

        def training_step(self, batch: Any, number: int) -> Tensor | None:
            if self.trainer.global_step == self.kill:
                raise Killed
            if number == self.skip:
                return None
            loss: Tensor = self.model(**batch).loss
            self.losses.append(float(loss))
            self.batches.append(batch)
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.model(**batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            if adam:
                return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.9)
            return torch.optim.SGD(self.parameters(), lr=0.5)

    return Module()


def fit(
    pl: Any, module: Any, out: Path, *callbacks: Any, n: int = 96, checkpoint: Path | None = None, **more: Any
) -> Any:
    options: dict[str, Any] = {
        "max_steps": 5, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": out,
    }  # fmt: skip
    trainer = pl.Trainer(**{**options, **more}, callbacks=list(callbacks))
    loader = torch.utils.data.DataLoader(texts(n), batch_size=8, collate_fn=collate)  # type: ignore[arg-type]
    torch.manual_seed(3)
    trainer.fit(module, loader, loader, ckpt_path=checkpoint)
    return trainer


def lightning_callback(**options: Any) -> Any:
    from anisoscope.integrations.lightning import MonitorCallback as Callback

    return Callback(**monitor_options(**options))


QUIET = pytest.mark.filterwarnings("ignore")


@QUIET
@pytest.mark.parametrize("accumulate", [1, 3])
def test_lightning_shows_the_rows_of_a_plain_loop(accumulate: int, tmp_path: Path, seen: list[StepRows]) -> None:
    pl = lightning()
    callback, module = lightning_callback(), lightning_module(pl, gpt2())
    options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.1, "max_steps": 3}
    fit(pl, module, tmp_path, callback, val_check_interval=2, **options)
    mine = seen.copy()
    seen.clear()
    table = plain_loop(gpt2, module.batches, lambda *counts: 1 / accumulate, accumulate=accumulate, clip=0.1)
    assert_same_rows(mine, seen)
    assert_same(callback.table, table, 1e-6)
    losses = torch.tensor(module.losses).view(-1, accumulate).mean(1)
    for step in (0, 2):
        found = {row["metric"]: row["value"] for row in callback.table.where(step=step, kind="training").records()}
        assert found["loss"] == pytest.approx(float(losses[step]), rel=1e-6)
        assert found["learning_rate"] == 0.5
        assert found["gradient_norm"] > 0.2, "as it was before clipping"
    assert hooks_of(module) == 0


@QUIET
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_lightning_losses_are_bit_identical_with_and_without(package: str, tmp_path: Path) -> None:
    pl = lightning(package)
    plain = lightning_module(pl, gpt2(dropout=0.1))
    fit(pl, plain, tmp_path)
    for more in ({}, {"probe": probe()}):
        module = lightning_module(pl, gpt2(dropout=0.1))
        callback = lightning_callback(when=None, **more)
        assert isinstance(callback, pl.Callback)
        fit(pl, module, tmp_path, callback)
        assert module.losses == plain.losses
        assert steps_of(callback.table) == ([0, 1, 2, 4, 5] if more else [0, 1, 2, 4])


@QUIET
def test_a_resumed_lightning_training_goes_on_with_its_monitor(tmp_path: Path) -> None:
    pl = lightning()

    def run(folder: Path, **more: Any) -> Any:
        kill = more.pop("kill", -1)
        callback = lightning_callback(when=every(2), plan=UPDATES, probe=probe(), out=folder / "monitor")
        saver = pl.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
        module = lightning_module(pl, gpt2(), adam=True)
        module.kill = kill
        # an epoch of three batches, for Lightning begins a loader anew in the middle of one
        options = {"enable_checkpointing": True, "max_steps": 8, "n": 24}
        if kill < 0:
            fit(pl, module, folder, callback, saver, **options, **more)
        else:
            with pytest.raises(Killed):
                fit(pl, module, folder, callback, saver, **options, **more)
        assert hooks_of(module) == 0, "also where it broke off"
        return callback.table

    whole = run(tmp_path / "whole")
    assert steps_of(run(tmp_path / "broken", kill=4)) == [0, 2]
    resumed = run(tmp_path / "broken", checkpoint=tmp_path / "broken" / "step=3.ckpt")
    assert steps_of(resumed) == [0, 2, 4, 6, 8]
    assert_same(resumed, whole, 1e-6)
    assert any("of=update;" in key[-1] for key in energies(resumed))


@QUIET
def test_a_batch_that_lightning_skips_stops_nothing(tmp_path: Path) -> None:
    pl = lightning()
    module = lightning_module(pl, gpt2())
    module.skip = 2
    fit(pl, module, tmp_path, callback := lightning_callback())
    assert len(module.losses) >= 4
    assert steps_of(callback.table) == [0, 4]


@QUIET
def test_loss_scaling_is_taken_out(tmp_path: Path, seen: list[StepRows]) -> None:
    pl = lightning()
    scale = 1024.0
    norms = []
    for plugins in ([], [_scaled(pl, scale)]):
        fit(pl, lightning_module(pl, gpt2()), tmp_path, lightning_callback(when=at([0])), max_steps=1, plugins=plugins)
        norms.append([float(test.g.norm()) for _, _, test in seen[-1].halves() if test.g is not None])
    (rows, factor), *_ = seen[-1].test[seen[-1].sites()[0]]
    (_, unscaled), *_ = seen[0].test[seen[0].sites()[0]]
    assert factor == pytest.approx(unscaled / scale)
    assert rows.g is not None and norms[1] == pytest.approx(norms[0], rel=0.02)


def _scaled(pl: Any, scale: float) -> Any:
    """Half precision whose loss is multiplied before the backward pass, as on a GPU."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    return pl.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)


@QUIET
def test_in_lightning_the_optimizer_tells_how_much_was_weight_decay(tmp_path: Path, updates: list[Any]) -> None:
    """Lightning runs the whole step inside optimizer.step(closure): decay of step i must not count before it."""
    pl = lightning()
    twin = Twin()

    class Look(pl.Callback):  # type: ignore[misc,name-defined]
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            twin.look(module.model.get_input_embeddings().weight, optimizer)

    module = lightning_module(pl, gpt2(), adam=True)
    fit(pl, module, tmp_path, lightning_callback(plan=UPDATES), Look())
    _assert_decay_removed(updates, twin)


@QUIET
def test_the_model_inside_a_lightning_module_is_found_or_asked_for(tmp_path: Path) -> None:
    pl = lightning()
    from anisoscope.integrations.lightning import find_model

    module, model = lightning_module(pl, gpt2()), llama()
    assert find_model(module) is module.model
    assert find_model(model) is model
    with pytest.raises(AnisoscopeError, match=r"holds no transformers model.*model=lambda module"):
        find_model(nn.Linear(2, 2))
    module.other = model
    with pytest.raises(AnisoscopeError, match=r"holds 2 transformers models \(model, other\)"):
        fit(pl, module, tmp_path, lightning_callback())
    callback = lightning_callback(model=lambda m: m.model)
    fit(pl, module, tmp_path, callback)
    assert steps_of(callback.table) == [0, 2, 4]
    assert callback.monitor.model is module.model
