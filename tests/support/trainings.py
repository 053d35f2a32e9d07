"""Small models, data and trainers that the tests of callbacks share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
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
    TrainingArguments,
)

from anisoscope.capture.sites.site import Site
from anisoscope.monitor.monitor import Monitor
from anisoscope.monitor.schedule import every
from anisoscope.results.query import Query, Table
from anisoscope.tangent.plan import TangentPlan
from anisoscope.tangent.proxy import StepRows

V, T = 60, 16
# one cheap proxy: the laws here are about what reaches the study, not about the study
UPDATES = TangentPlan(rank=4, proxies=("pca",), draws=19, permuted=False, balanced=False, standardised=False)
CHEAP = replace(UPDATES, frozen=False, embedding=False, fit_rows=2048)
KEY = ("step", "stack", "layer", "kind", "head", "group", "metric", "variant")


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
    rows = Query(table).where(metric=["gradient_energy", "average_cosine"]).table().records()
    found = {tuple(row[name] for name in KEY): row["value"] for row in rows}
    assert len(found) == len(rows), "a row of the table occurs twice"
    return found


def steps_of(table: Table) -> list[int]:
    return sorted({row.step for row in Query(table).where(metric="gradient_energy")})


def assert_same(a: Table, b: Table, tolerance: float = 0.0) -> None:
    mine, theirs = energies(a), energies(b)
    assert mine and mine.keys() == theirs.keys()
    for key, value in mine.items():
        assert value == pytest.approx(theirs[key], rel=tolerance, abs=tolerance, nan_ok=True), key


def sites_of(rows: StepRows) -> list[Site]:
    """The sites with rows in both halves."""
    return [site for site in rows.fit if site in rows.test]


def assert_same_rows(a: list[StepRows], b: list[StepRows]) -> None:
    assert [rows.step for rows in a] == [rows.step for rows in b] != []
    for mine, theirs in zip(a, b, strict=True):
        assert sites_of(mine) == sites_of(theirs) != []
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
            counts = [targets_of(model, batch) for batch in group]
            with monitor.step(step):
                for batch, count in zip(group, counts, strict=True):
                    (model(**batch).loss * weigh(count, sum(counts), accumulate)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return monitor.table


def targets_of(model: nn.Module, batch: dict[str, Tensor]) -> int:
    labels = batch["labels"] if "Bert" in type(model).__name__ else batch["labels"][:, 1:]
    return int((labels != -100).sum())


class Killed(Exception):
    pass


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


def assert_decay_removed(updates: list[Any], twin: Twin) -> None:
    assert [since for since, _, _ in updates] == [0, 2]
    for since, types, rows in updates:
        expected = twin.change(since, since + 2)[types]
        torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-6)
        raw = (twin.weights[since + 2] - twin.weights[since])[types]
        assert not torch.allclose(raw, expected, rtol=1e-2), "the counter-test: decay is not nothing"


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
