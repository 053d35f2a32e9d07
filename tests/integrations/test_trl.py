"""TRL's trainers: rows and gradients are those of their own losses, against plain autograd in float64."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("trl", reason="TRL is not installed")

from anisoscope.capture.padding import SEVERAL
from anisoscope.integrations.hf_trainer import MonitorCallback
from anisoscope.monitor.schedule import at
from anisoscope.tangent.proxy import StepRows
from support.monitored import compare
from support.preferences import tiny_llama, trl_trainer
from support.trainings import hooks_of, monitor_options

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    importlib.import_module("transformers").logging.set_verbosity_error()


def followed(kind: str, out: Path, **options: Any) -> tuple[Any, MonitorCallback, list[dict[str, Tensor]]]:
    """A trained trainer, its callback, and the batches of its first update."""
    callback = MonitorCallback(**monitor_options(when=at([0]), strict=True))
    trainer = trl_trainer(kind, out, callback, **options)
    batches, collate = [], trainer.data_collator

    def remember(rows: Any) -> Any:
        batches.append(collate(rows))
        return batches[-1]

    trainer.data_collator = remember
    trainer.train()
    return trainer, callback, batches[: options.get("gradient_accumulation_steps", 2)]


def unwatched(kind: str, out: Path, **options: Any) -> int:
    """How many hooks the trainer itself leaves on a model."""
    trainer = trl_trainer(kind, out, **options)
    trainer.train()
    return hooks_of(trainer.model)


def log_probabilities(model: Any, batch: dict[str, Tensor], labels: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    output = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], output_hidden_states=True, use_cache=False
    )
    scores, targets = output.logits[:, :-1].log_softmax(-1), labels[:, 1:]
    found = scores.gather(2, targets.clamp_min(0)[..., None])[..., 0]
    return found.masked_fill(targets == -100, 0.0), output.hidden_states


def gradients(loss: Tensor, hidden: tuple[Tensor, ...]) -> Tensor:
    return torch.autograd.grad(loss, hidden[1])[0]


def summed_sft(batch: dict[str, Tensor]) -> Tensor:
    model: Any = tiny_llama().double().train()
    logps, hidden = log_probabilities(model, batch, batch["labels"])
    return gradients(-logps.sum(), hidden)


def dpo(batch: dict[str, Tensor], *, micro_batches: int, beta: float = 0.1, reference: int = 7) -> Tensor:
    model: Any = tiny_llama().double().train()
    fixed: Any = tiny_llama(seed=reference).double()
    labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
    logps, hidden = log_probabilities(model, batch, labels)
    with torch.no_grad():
        expected, _ = log_probabilities(fixed, batch, labels)
    chosen, rejected = (logps - expected).sum(1).chunk(2)
    return gradients(-functional.logsigmoid(beta * (chosen - rejected)).mean() / micro_batches, hidden)


def assert_rows_are(seen: StepRows, wanted: list[Tensor], batches: list[dict[str, Tensor]]) -> None:
    """The tested rows of the first block have these gradients, and rows of padding are not among them."""
    site = next(s for s in seen.test if s.layer == 1 and s.kind == "resid")
    parts = seen.test[site]
    assert len(parts) == len(wanted) == len(batches)
    assert sum(len(rows.index.keep) for rows, _ in parts) > 30
    for (rows, factor), g, batch in zip(parts, wanted, batches, strict=True):
        assert rows.g is not None and bool(batch["attention_mask"].flatten()[rows.index.keep].all())
        found = rows.g.double() * factor
        expected = g.flatten(0, 1)[rows.index.keep]
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-6 * float(expected.abs().max()) + 1e-12)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_fine_tuning_is_measured_by_the_summed_loss_of_its_answers(
    accumulate: int, tmp_path: Path, seen: list[StepRows]
) -> None:
    trainer, callback, batches = followed("sft", tmp_path, gradient_accumulation_steps=accumulate)
    assert len({int((batch["labels"] != -100).sum()) for batch in batches}) == accumulate, (
        "different numbers of targets"
    )
    assert_rows_are(seen[0], [summed_sft(batch) for batch in batches], batches)
    assert callback.monitor is not None and not callback.monitor.notes
    assert hooks_of(trainer.model) == unwatched("sft", tmp_path, gradient_accumulation_steps=accumulate)


def test_a_loss_over_all_tokens_or_weighted_by_itself_is_told_apart(tmp_path: Path, seen: list[StepRows]) -> None:
    _, callback, batches = followed("sft", tmp_path, completion_only_loss=False)
    assert_rows_are(seen[0], [summed_sft(batch) for batch in batches], batches)
    assert all(bool((batch["labels"] != -100)[:, 0].all()) for batch in batches)
    _, callback, _ = followed("sft", tmp_path, loss_type="dft")
    assert callback.monitor is not None and "no cross-entropy of tokens" in callback.monitor.notes[0]


@pytest.mark.parametrize("kind", ["dpo", "lora"])
def test_preferences_are_measured_by_their_own_loss(kind: str, tmp_path: Path, seen: list[StepRows]) -> None:
    """The reference, be it a model of its own or this one without its adapter, is no part of the batch."""
    trainer, callback, batches = followed(kind, tmp_path)
    reference = 7 if kind == "dpo" else 0  # a new adapter changes nothing yet
    assert_rows_are(seen[0], [dpo(batch, micro_batches=2, reference=reference) for batch in batches], batches)
    assert callback.monitor is not None and "no cross-entropy of tokens" in callback.monitor.notes[0]
    assert callback.table.where(metric="average_cosine").records()
    assert hooks_of(trainer.model) == unwatched(kind, tmp_path)


def test_the_rows_of_a_prompt_are_in_one_half(tmp_path: Path, seen: list[StepRows]) -> None:
    followed("dpo", tmp_path, gradient_accumulation_steps=1)
    site = next(s for s in seen[0].test if s.layer == 1 and s.kind == "resid")
    fit = torch.cat([rows.x for rows in seen[0].fit[site]])
    test = torch.cat([rows.x for rows, _ in seen[0].test[site]])
    apart = torch.cdist(fit.double(), test.double(), compute_mode="donot_use_mm_for_euclid_dist")
    first = torch.cat([rows.index.position for rows, _ in seen[0].test[site]]) > 1  # words alone may occur twice
    assert float(apart[:, first].min()) > 1e-4
    within = torch.cdist(test.double(), test.double(), compute_mode="donot_use_mm_for_euclid_dist")
    assert int((within.fill_diagonal_(1.0) < 1e-4).any(1).sum()) > 8, "both answers follow the same prompt"


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_losses_are_bit_identical_with_and_without(kind: str, tmp_path: Path) -> None:
    def losses(*callbacks: Any) -> list[float]:
        trainer = trl_trainer(kind, tmp_path, *callbacks, max_steps=3)
        trainer.train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]

    plain = losses()
    assert losses(MonitorCallback(**monitor_options(when=at([0, 1])))) == plain and len(set(plain)) == 3


def test_texts_of_packed_rows_are_contexts_of_their_own(tmp_path: Path) -> None:
    for strategy, packed in (("bfd", True), ("wrapped", False)):
        callback = MonitorCallback(**monitor_options(when=at([0]), strict=True))
        options = {"packing": True, "packing_strategy": strategy, "max_length": 64, "gradient_accumulation_steps": 1}
        trainer = trl_trainer("sft", tmp_path, callback, **options)
        trainer.train()
        assert callback.monitor is not None and (SEVERAL in callback.monitor.notes) == packed
        rows = callback.table.where(metric="gradient_energy", proxy="pca", control=None).records()
        assert len(rows) and all(row["contexts"] > (20 if packed else 4) for row in rows)


def test_a_packed_update_has_the_table_of_a_padded_one(tmp_path: Path) -> None:
    tables = []
    for padding_free in (True, False):
        callback = MonitorCallback(**monitor_options(when=at([0]), strict=True))
        options = {"padding_free": padding_free, "max_length": None, "gradient_accumulation_steps": 1, "max_steps": 1}
        trl_trainer("sft", tmp_path, callback, model=tiny_llama().double(), **options).train()
        tables.append(callback.table)
    compare(*tables, 1e-6, without=())
