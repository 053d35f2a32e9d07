"""Engines of DeepSpeed: activations are plain in all stages of ZeRO, so that the table is that of one process."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from anisoscope.monitor.monitor import Monitor
from anisoscope.monitor.schedule import at
from anisoscope.results.query import Table
from support.ranks import COUNTS, PLAN, STEPS, assert_same, in_ranks, probe, shard, train
from support.tiny_models import tiny

pytestmark = pytest.mark.slow
_PLAN = replace(PLAN, proxies=("pca",))


def trained(rank: int, zero: int, *, monitored: bool = True, **options: Any) -> tuple[Any, list[float], list[str]]:
    """Train by an engine of this stage of ZeRO; weights move only without a table to compare, as sums are rounded."""
    import deepspeed

    # its own shared-memory operations would be compiled
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    torch.manual_seed(0)
    model = tiny("gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.pop("lr", 0.0), foreach=False)
    config = {"train_micro_batch_size_per_gpu": 6, "zero_optimization": {"stage": zero}}
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.module.eval()
    words: dict[str, Any] = {"when": at(range(STEPS)), "plan": _PLAN, "counts": COUNTS, "total_steps": STEPS}
    losses = []
    with contextlib.ExitStack() as stack:
        monitor = stack.enter_context(Monitor(engine, name="m", **words, **options)) if monitored else None
        for step in range(STEPS):
            with monitor.step(step) if monitor is not None else contextlib.nullcontext():
                ids = shard(step, rank)
                loss = engine(input_ids=ids, labels=ids).loss
                engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
    return (None, losses, []) if monitor is None else (monitor.table, losses, monitor.notes)


def without_tables(table: Table) -> Table:
    kept = table.where(variant=lambda variant: "of=" not in variant)
    return kept.where(kind=lambda kind: kind != "embed_weight")


@pytest.mark.filterwarnings("ignore")
def test_the_table_of_an_engine_is_that_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    options: dict[str, Any] = {"plan": _PLAN, "optimizer": None, "lr": 0.0}
    live, *_ = train(lambda _: [0, 1], divided=2, **options)
    probed, *_ = train(lambda _: [0, 1], divided=2, probe=probe(), **options)
    assert live is not None and probed is not None

    def act(rank: int) -> Any:
        os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": "2"}
        found = {zero: trained(rank, zero) for zero in (1, 2, 3)}
        moved = [trained(rank, 3, lr=1e-3, monitored=watched)[1] for watched in (True, False)]
        return found, trained(rank, 3, probe=probe()), moved

    (found, third, moved), (others, *_) = in_ranks(act, 2, tmp_path)
    for zero, (table, _, notes) in found.items():
        assert len(others[zero][0]) == 0
        assert [note for note in notes if "flat pieces" in note] == (notes if zero == 3 else [])
        assert_same(table, live if zero < 3 else without_tables(live), tolerance=1e-6, nothing=1e-9)
    assert_same(third[0], without_tables(probed), tolerance=1e-6, nothing=1e-9)
    assert moved[0] == moved[1], "training is not changed"
    assert moved[0][-1] != found[3][1][-1], "and it moves"
