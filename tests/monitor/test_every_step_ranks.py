"""Moments of every step of several processes: those of one process with the same passes, and nobody waits."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from anisoscope.monitor.analysis import ranks as joining
from anisoscope.monitor.analysis import step_sums
from anisoscope.monitor.monitor import Monitor
from anisoscope.monitor.schedule import at
from anisoscope.results.query import Table
from support.ranks import assert_same, ddp, fsdp, in_ranks, plain, shard, tensor_parallel
from support.tiny_models import tiny

Wrap = Callable[[nn.Module], nn.Module]
STEPS, MEASURED = 5, (0, 2)


def follow(
    mine: Callable[[int], list[int]],
    *,
    wrap: Wrap = plain,
    divided: float = 1.0,
    architecture: str = "gpt2",
    skipped: tuple[int, ...] = (),
    steps: list[int] | None = None,
    contexts: int = 6,
    by_hand: bool = False,
    lr: float = 1e-3,
    **options: Any,
) -> tuple[Table, Table, list[str], list[torch.Tensor]]:
    """A training with `every_step`: its trace, its table, notes and weights."""
    torch.manual_seed(0)
    model = wrap(tiny(architecture))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, foreach=False)
    words: dict[str, Any] = {"when": at(MEASURED), "metrics": "drift", "every_step": 4096, "name": "m", **options}
    with Monitor(model, **words) as monitor:
        for step in range(STEPS) if steps is None else steps:
            with contextlib.nullcontext() if step in skipped else monitor.step(step):
                for number in mine(step):
                    ids = shard(step, number, contexts)
                    (model(input_ids=ids, labels=ids).loss / divided).backward()
            for parameter in model.parameters() if by_hand else ():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return monitor.trace, monitor.table, monitor.notes, [p.detach().clone() for p in whole]


@pytest.mark.parametrize(("wrap", "taken"), [(ddp, 4096), (fsdp, 20), pytest.param(ddp, 20, marks=pytest.mark.slow)])
def test_the_trace_is_that_of_one_process(wrap: Wrap, taken: int, tmp_path: Path) -> None:
    """Of the same passes in turn, also the sampled rows are the same; DDP and FSDP2 average the losses."""
    expected, table, _, weights = follow(lambda _: [0, 1], divided=2, every_step=taken)
    (first, joined, notes, trained), (second, *_) = in_ranks(
        lambda rank: follow(lambda _: [rank], wrap=wrap, every_step=taken, out=tmp_path / "run"), 2, tmp_path
    )
    assert not notes
    assert_same(first, expected, tolerance=1e-12)
    assert set(first.steps) == set(range(STEPS))
    assert_same(joined, table, tolerance=1e-12, least=8)
    assert len(joined.where(metric="mean_norm")) > 0, "measured steps have their rows in the table as well"
    assert len(second) == 0, "results are with the first"
    assert all(torch.equal(a, b) for a, b in zip(trained, weights, strict=True)), "training is not changed"
    assert_same(Table.read(tmp_path / "run" / "every_step.parquet"), expected, tolerance=1e-12)


def test_processes_with_more_passes_fewer_and_none(tmp_path: Path) -> None:
    """All rows are taken, so the number of a pass does not matter; the first process has none in the first step."""

    def mine(rank: int, step: int) -> list[int]:
        return {(0, 0): [], (1, 1): [], (0, 2): [0, 2, 3]}.get((rank, step), [rank])

    expected, *_ = follow(lambda step: [*mine(0, step), *mine(1, step)])
    (first, _, notes, _), _ = in_ranks(lambda rank: follow(lambda step: mine(rank, step), by_hand=True), 2, tmp_path)
    assert not notes
    assert_same(first, expected, tolerance=1e-12)


@pytest.mark.parametrize("skips", [0, 1])
def test_a_process_that_skips_a_step_is_missing_there(skips: int, tmp_path: Path) -> None:
    expected, *_ = follow(lambda step: [1 - skips] if step == 3 else [0, 1], divided=2)
    (first, _, notes, _), _ = in_ranks(
        lambda rank: follow(lambda _: [rank], wrap=ddp, skipped=(3,) if rank == skips else ()), 2, tmp_path
    )
    assert notes == [f"step 3: rank {skips} gave nothing to every_step; the column n says how many rows there are"]
    ours, theirs = ({row["step"]: row["n"] for row in t.where(kind="embed").records()} for t in (first, expected))
    assert ours == theirs and ours[3] * 2 == ours[2]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_that_compute_the_same_contexts_count_once(size: int, tmp_path: Path) -> None:
    pairs, options = size // 2, {"architecture": "llama"}
    expected, *_ = follow(lambda _: list(range(pairs)), divided=pairs, **options)  # type: ignore[arg-type]
    wrap = partial(tensor_parallel, sharded=pairs > 1)
    (first, _, notes, _), *_ = in_ranks(
        lambda rank: follow(lambda _: [rank // 2], wrap=wrap, **options),  # type: ignore[arg-type]
        size,
        tmp_path,
    )
    assert notes == ["query, key are left out: a tensor-parallel process may have some of the heads only"]
    assert_same(first, expected, tolerance=2e-5, nothing=1e-5)


@pytest.mark.slow
def test_four_processes(tmp_path: Path) -> None:
    expected, *_ = follow(lambda _: [0, 1, 2, 3], divided=4, every_step=20, lr=0.0)
    (first, *_), *_ = in_ranks(lambda rank: follow(lambda _: [rank], wrap=ddp, every_step=20, lr=0.0), 4, tmp_path)
    assert_same(first, expected, tolerance=1e-12)


def test_second_moments_that_are_too_large_come_at_measured_steps(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(step_sums, "_MATRICES", 0)
    expected, *_ = follow(lambda _: [0, 1], divided=2)
    (first, *_), _ = in_ranks(lambda rank: follow(lambda _: [rank], wrap=ddp), 2, tmp_path)
    cheap = ("average_cosine", "drift", "mean_norm")
    assert_same(first.where(metric=cheap), expected.where(metric=cheap), tolerance=1e-12)
    at_measured = [t.where(step=MEASURED) for t in (first, expected)]
    assert_same(*at_measured, tolerance=1e-12)
    rest = first.where(metric=("participation_ratio", "gradient_cosine"), step=(1, 3, 4))
    assert len(rest) and np.isnan(rest.to_pandas()["value"]).all()
    assert {row["note"] for row in rest.records()} == {
        "at measured steps only: second moments of this width are not sent between processes at every step"
    }


@pytest.mark.slow
def test_many_small_files_give_the_same(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(step_sums, "_BATCH", 1)
    monkeypatch.setattr(joining, "_LOOK", 0.0)
    expected, *_ = follow(lambda _: [0, 1], divided=2)
    (first, *_), _ = in_ranks(lambda rank: follow(lambda _: [rank], wrap=ddp), 2, tmp_path)
    assert_same(first, expected, tolerance=1e-12)


def test_a_training_that_is_rewound_has_each_step_once(tmp_path: Path) -> None:
    steps = [0, 1, 2, 3, 2, 3, 4]
    expected, *_ = follow(lambda _: [0, 1], divided=2, steps=steps)
    (first, _, notes, _), _ = in_ranks(lambda rank: follow(lambda _: [rank], wrap=ddp, steps=steps), 2, tmp_path)
    assert not notes
    assert_same(first, expected, tolerance=1e-12)


def test_a_process_that_is_killed_leaves_what_was_followed(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(joining, "_PATIENCE", 1.0)

    def act(rank: int) -> Any:
        def mine(step: int) -> list[int]:
            if rank == 1 and step == 3:
                os.kill(os.getpid(), 9)
            return [rank]

        return follow(mine, lr=0.0)  # nobody averages gradients, and yet they train one model

    (first, _, notes, _), killed = in_ranks(act, 2, tmp_path)
    assert killed is None
    assert set(first.steps) == set(range(STEPS))
    assert [note for note in notes if note.startswith("step 3: rank 1 gave nothing to every_step")]
    counts = {row["step"]: row["n"] for row in first.where(kind="embed").records()}
    assert counts[2] == 2 * counts[4]


def test_a_training_that_fails_keeps_what_was_followed_and_does_not_wait(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(joining, "_PATIENCE", 1e6)

    def act(rank: int) -> Any:
        def mine(step: int) -> list[int]:
            if rank == 0 and step == 3:
                raise RuntimeError("the training's own")
            return [rank]

        with contextlib.suppress(RuntimeError):
            follow(mine, out=tmp_path / "run")

    in_ranks(act, 2, tmp_path)
    assert {0, 1, 2} <= set(Table.read(tmp_path / "run" / "every_step.parquet").steps)


def test_nobody_sees_a_pass(tmp_path: Path) -> None:
    (first, _, notes, _), _ = in_ranks(lambda rank: follow(lambda _: [], by_hand=True), 2, tmp_path)
    assert len(first) == 0
    assert any("every_step saw no training pass in step 0 in any process" in note for note in notes)
