"""Loops of accelerate: what a monitor shows of accumulated updates is what a plain loop shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate", reason="accelerate is not installed")

import accelerate

from anisoscope.errors import AnisoscopeError
from anisoscope.integrations.accelerate import AcceleratorMonitor
from anisoscope.tangent.proxy import StepRows
from support.trainings import (
    Killed,
    assert_same,
    assert_same_rows,
    collate,
    energies,
    gpt2,
    hooks_of,
    monitor_options,
    plain_loop,
    steps_of,
    texts,
)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """An Accelerator keeps what it was first made with for the whole process."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def loop(
    *, accumulate: int = 1, contexts: int = 72, watched: bool = True, precision: str = "no", **options: Any
) -> tuple[Any, nn.Module, list[float]]:
    """Train as the pages of accelerate do; batches of eight contexts."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate, mixed_precision=precision)
    model = gpt2(dropout=options.pop("dropout", 0.0))
    kill, own = options.pop("kill", -1), options.pop("own", False)
    loader = torch.utils.data.DataLoader(texts(contexts), batch_size=8, collate_fn=collate)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5), loader)
    losses: list[float] = []
    torch.manual_seed(3)
    with AcceleratorMonitor(accelerator, model, optimizer=optimizer, **monitor_options(**options)) as watch:
        for number, batch in enumerate(loader):
            with watch.accumulate() if watched else accelerator.accumulate(model):
                if number == kill:
                    raise Killed
                output = model(**batch)
                loss = own_loss(output.logits, batch["labels"]) if own else output.loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(loss.detach()))
            if watched and accelerator.sync_gradients:
                watch.log(loss=losses[-1])
    return watch, model, losses


def own_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize(("accumulate", "own"), [(1, False), (3, False), (3, True)])
def test_an_accelerator_shows_the_rows_of_a_plain_loop(accumulate: int, own: bool, seen: list[StepRows]) -> None:
    watch, model, _ = loop(accumulate=accumulate, own=own, strict=True)
    mine = seen.copy()
    seen.clear()
    batches = [collate(texts(72)[8 * i : 8 * i + 8]) for i in range(9)]
    table = plain_loop(gpt2, batches, lambda *_: 1 / accumulate, accumulate=accumulate, clip=0.1)
    assert_same_rows(mine, seen)
    assert_same(watch.table, table, 1e-6)
    assert watch.step == 9 // accumulate and hooks_of(model) == 0
    assert len(watch.table.where(kind="training", metric="loss")) == len(steps_of(watch.table))


def test_the_last_update_of_an_epoch_may_have_fewer_turns(seen: list[StepRows]) -> None:
    watch, _, _ = loop(accumulate=4, strict=True)  # nine batches: 4, 4 and 1
    assert watch.step == 3 and steps_of(watch.table) == [0, 2]
    assert [len(next(iter(rows.test.values()))) for rows in seen] == [4, 1]


def test_losses_are_bit_identical_with_and_without() -> None:
    options: dict[str, Any] = {"accumulate": 2, "dropout": 0.1}
    with pytest.warns(match="not one step was measured"):
        _, _, plain = loop(**options, watched=False)
    _, _, watched = loop(**options)
    assert watched == plain and len(set(plain)) == 9


def test_half_precision_gives_nearly_the_same_energies() -> None:
    full, half = (energies(loop(accumulate=3, precision=p, when=[0])[0].table) for p in ("no", "bf16"))
    assert full.keys() == half.keys()
    assert 0 < max(abs(full[key] - half[key]) for key in full) < 0.02


def test_a_loop_that_breaks_off_leaves_no_hooks() -> None:
    watch = AcceleratorMonitor(accelerate.Accelerator(cpu=True), model := gpt2(), **monitor_options())

    def train() -> None:
        with watch:
            for number in range(2):
                with watch.accumulate():
                    if number:
                        raise Killed
                    model(**collate(texts(16))).loss.backward()

    with pytest.raises(Killed):
        train()
    assert hooks_of(model) == 0 and steps_of(watch.table) == [0]
    with pytest.raises(AnisoscopeError, match="enter it first"), watch.accumulate():
        pass
