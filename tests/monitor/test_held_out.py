"""The held-out loss and that of the best constant prediction, against the same by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anisoscope.capture.gradient_pass import LabelConvention
from anisoscope.capture.objective import Classes
from anisoscope.claims.engine.evidence import studies_by_seed
from anisoscope.claims.engine.learning import learned
from anisoscope.errors import AnisoscopeError
from anisoscope.monitor.held_out import constant_columns, loss_columns
from anisoscope.monitor.monitor import Monitor
from anisoscope.numerics.hashing import fold_of
from anisoscope.results.quantity import as_equal_folds
from anisoscope.results.query import Query, Table
from support.monitored import COUNTS, PLAN, probe_of
from support.tiny_models import tiny


def _by_hand(counts: np.ndarray, targets: list[int]) -> float:
    total = 0.0
    for target in targets:
        total -= math.log((counts[target] + 0.5) / (counts.sum() + 0.5 * len(counts)))
    return total / len(targets)


def test_the_constant_is_add_half_frequencies_of_the_training_targets_left_out_fold_by_fold() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 9, (32, 7), generator=generator)
    labels[:, 3] = -100
    counts, contexts = torch.tensor([90, 40, 20, 10, 5, 2, 1, 0, 0]), torch.arange(32) * 7919
    reading = LabelConvention(shifted=True)
    found = constant_columns(counts, [({"labels": labels}, contexts)], reading)
    assert found is not None and found["variant"] == ""
    targets = [[int(t) for t in row[1:] if t >= 0] for row in labels]
    assert found["value"] == pytest.approx(_by_hand(counts.numpy(), [t for row in targets for t in row]), rel=1e-12)
    assert found["n"] == 32 * 5 and found["contexts"] == 32
    left, sizes = [], torch.bincount(fold_of(contexts), minlength=8).tolist()
    for fold in range(8):
        kept = [row for row, own in zip(targets, fold_of(contexts).tolist(), strict=True) if own != fold]
        rest = _by_hand(counts.numpy(), [t for row in kept for t in row])
        left.append(rest if sizes[fold] else math.nan)
    expected = as_equal_folds(found["value"], left, sizes)
    assert found["replicates"] == pytest.approx(expected, rel=1e-12, nan_ok=True)
    assert found["low"] < found["value"] < found["high"]


def test_weighted_targets_have_the_constant_of_their_own_loss() -> None:
    counts, weights = torch.tensor([60.0, 30.0, 10.0]), torch.tensor([0.5, 1.0, 4.0])
    labels = torch.tensor([[0, 1, 2, 2]])
    reading = LabelConvention(shifted=False)
    found = constant_columns(counts, [({"labels": labels}, torch.tensor([5]))], reading, weights=weights)
    assert found is not None and found["variant"] == "weighted=1"
    smoothed = counts * weights + 0.5
    cost = -(smoothed / smoothed.sum()).log() * weights
    assert found["value"] == pytest.approx(float(cost[labels[0]].mean()), rel=1e-6)
    logits = torch.zeros(
        3, dtype=torch.float64, requires_grad=True
    )  # the best constant by optimisation, not by formula
    optimizer = torch.optim.LBFGS([logits], max_iter=200)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -(counts * weights * logits.log_softmax(0)).sum() / counts.sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    best = logits.detach().softmax(0)
    assert torch.allclose(best, counts.double() * weights / (counts * weights).sum(), atol=1e-4)
    assert torch.allclose((smoothed / smoothed.sum()).double(), best, atol=0.01), "but for the smoothing"


@pytest.mark.parametrize("name", ["gpt2", "bert-masked"])
@pytest.mark.parametrize("metrics", ["light", "average_cosine"])
def test_a_monitor_writes_both_losses_with_intervals(name: str, metrics: str) -> None:
    model, probe = tiny(name), probe_of(name)
    options: dict[str, Any] = {"plan": PLAN} if metrics == "light" else {}
    with (
        Monitor(model, when=[0], metrics=metrics, probe=probe, counts=COUNTS, live=False, **options) as monitor,
        monitor.step(0),
    ):
        pass
    loss, constant = (monitor.table.where(metric=f"{which}_loss").records() for which in ("probe", "constant"))
    assert len(loss) == len(constant) == 1
    assert (loss[0]["n"], loss[0]["contexts"]) == (constant[0]["n"], constant[0]["contexts"])
    labels, shifted = probe["labels"] if "labels" in probe else probe["input_ids"], name == "gpt2"
    logits = model(**{k: v for k, v in probe.items() if k != "labels"}).logits.detach().double()
    if shifted:
        mask = probe["attention_mask"]
        labels = labels.masked_fill(mask == 0, -100)[:, 1:]
        logits = logits[:, :-1]
    hashes = monitor.probe.pieces  # the contexts that the loss is of: the test half where there are gradients
    tested = {int(h) for piece in hashes if piece.test or metrics != "light" for h in piece.context}
    keys = monitor_contexts(monitor, probe)
    total, cost, tokens = 0.0, 0.0, 0
    table = [
        -math.log((c + 0.5) / (int(COUNTS.sum()) + 0.5 * logits.shape[-1])) for c in [*COUNTS.tolist(), *[0] * 999]
    ]
    for row, target, key in zip(logits, labels, keys, strict=True):
        for position, t in enumerate(target.tolist()):
            if t >= 0 and key in tested:
                total -= float(row[position].log_softmax(0)[t])
                cost += table[t]
                tokens += 1
    assert loss[0]["n"] == tokens
    assert loss[0]["value"] == pytest.approx(total / tokens, rel=1e-5)
    assert constant[0]["value"] == pytest.approx(cost / tokens, rel=1e-9)
    assert len(loss[0]["replicates"]) == len(constant[0]["replicates"]) == 8
    assert loss[0]["low"] < loss[0]["value"] < loss[0]["high"]


def monitor_contexts(monitor: Monitor, probe: dict[str, Tensor]) -> list[int]:
    from anisoscope.capture.row import original_contexts

    return original_contexts(dict(probe), config=monitor.model.config).tolist()


def test_a_number_or_a_function_can_be_given_and_otherwise_it_is_not_known() -> None:
    def constant_of(**options: Any) -> list[dict[str, Any]]:
        words: dict[str, Any] = {"when": [0], "metrics": "average_cosine", "probe": probe_of("gpt2"), "live": False}
        with Monitor(tiny("gpt2"), **words, **options) as monitor, monitor.step(0):
            pass
        return Query(monitor.table).where(metric="constant_loss").table().records()

    assert constant_of() == [], "nothing is known of the training data"
    (given,) = constant_of(constant_loss=2.5)
    assert given["value"] == 2.5 and given["variant"] == "" and given["replicates"] is None
    (made,) = constant_of(constant_loss=lambda batch: torch.full((len(batch["input_ids"]),), 7.0))
    assert made["value"] == pytest.approx(7.0 * 24 / made["n"])
    with pytest.raises(AnisoscopeError, match="returned shape"):
        constant_of(constant_loss=lambda batch: torch.tensor(7.0))
    with pytest.raises(AnisoscopeError, match="3 numbers, but the probe has target"):
        constant_of(constant_loss=torch.tensor([1, 2, 3]))
    with pytest.raises(AnisoscopeError, match="expected how often each target occurs"):
        constant_of(constant_loss=torch.ones(2, 2))


def test_a_loss_of_another_kind_has_no_nats() -> None:
    def squares(model: nn.Module, inputs: Any) -> Tensor:
        return model(input_ids=inputs["input_ids"]).logits.square().sum()

    words: dict[str, Any] = {"when": [0], "metrics": "average_cosine", "probe": probe_of("gpt2"), "live": False}
    with Monitor(tiny("gpt2"), loss=squares, constant_loss=9.0, **words) as monitor, monitor.step(0):
        pass
    (row,) = monitor.table.where(metric="constant_loss").records()
    assert row["variant"] == "unit=other"


def test_an_empty_fold_is_no_number_and_unknown_contexts_give_no_interval() -> None:
    contexts = torch.arange(4)
    losses, counts = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1, 1, 1, 1])
    found = loss_columns(10.0, 4, [(contexts, losses, counts)])
    empty = set(range(8)) - set(fold_of(contexts).tolist())
    assert {j for j, value in enumerate(found["replicates"]) if math.isnan(value)} == empty
    assert "replicates" not in loss_columns(10.0, 5, [(contexts, losses, counts)])


def test_a_logged_pair_counts_as_well() -> None:
    rows = [
        {"model": "m", "kind": "training", "metric": metric, "value": value, "step": 3, "variant": "", "group": ""}
        for metric, value in (("probe_loss", 1.0), ("constant_loss", 2.0))
    ]
    run = studies_by_seed(Table.from_records(rows), {"average_cosine"})[0]["m"]
    assert learned(run).status == "learned"


def test_a_classifier_has_the_prior_of_its_classes() -> None:
    labels = torch.tensor([0, 1, 1, 2])
    batches = [({"labels": labels, "pixel_values": torch.zeros(4, 1)}, torch.arange(4))]
    counts = torch.tensor([5, 3, 1])
    found = constant_columns(counts, batches, None, loss=Classes())
    assert found is not None and found["variant"] == "" and found["n"] == 4
    assert found["value"] == pytest.approx(_by_hand(counts.numpy(), labels.tolist()), rel=1e-12)
    numbers = [({"labels": labels.float(), "pixel_values": torch.zeros(4, 1)}, torch.arange(4))]
    assert constant_columns(counts, numbers, None, loss=Classes()) is None, "a regression has no classes"
    variance = constant_columns(lambda batch: (batch["labels"] - 1.0).square(), numbers, None, loss=Classes())
    assert variance is not None and variance["variant"] == "unit=other" and variance["value"] == 0.5
