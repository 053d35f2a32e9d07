"""A model whose blocks are spread over processes, cut by hand or by torch: one table, that of one process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from anisoscope.capture.sites.stage import find_stage
from anisoscope.errors import AnisoscopeError
from anisoscope.monitor.monitor import Monitor
from support.ranks import assert_same, in_ranks, probe, shard
from support.stages import BLOCKS, Gpt, cuts, train_pipeline, train_stages
from support.tiny_models import tiny


@cache
def alone(count: int, **options: Any) -> tuple[Any, dict[str, torch.Tensor], list[str]]:
    """One process with all blocks that reads all shards."""
    return train_stages([0], list(range(count)), divided=count, **options)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_table_is_that_of_one_process(size: int, tmp_path: Path) -> None:
    """Rows, targets, scales of gradients and updates of the embedding table; some stages have one block, or none."""
    expected, weights, _ = alone(2)
    results = in_ranks(lambda _: train_stages(list(range(size)), [0, 1], divided=2), size, tmp_path)
    (first, _, notes), *others = results
    assert not notes and not any(len(table) or said for table, _, said in others)
    assert_same(first, expected)
    for (start, _), (_, trained, _) in zip(cuts(size), results, strict=True):
        for name, value in trained.items():
            _, number, rest = name.split(".", 2) if name.startswith("blocks.") else ("", "", "")
            there = f"blocks.{int(number) + start}.{rest}" if number else name
            assert torch.equal(value, weights[there]), "training is not changed"


@pytest.mark.slow
def test_replicas_of_a_pipeline_of_which_one_has_no_batch(tmp_path: Path) -> None:
    """Two pipelines of two stages; weights do not move, since sums of gradients are rounded otherwise."""
    expected, *_ = alone(3, lr=0.0)
    shares: list[Sequence[int]] = [[0, 2], [1]]
    results = in_ranks(
        lambda rank: train_stages([0, 1] if rank < 2 else [2, 3], shares[rank // 2], divided=3, lr=0.0), 4, tmp_path
    )
    assert_same(results[0][0], expected)
    expected, *_ = train_stages([0], [0], lr=0.0)
    results = in_ranks(
        lambda rank: train_stages([0, 1] if rank < 2 else [2, 3], [] if rank < 2 else [0], lr=0.0), 4, tmp_path
    )
    assert_same(results[0][0], expected)


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", pytest.param("Schedule1F1B", marks=pytest.mark.slow)])
def test_stages_and_schedules_of_torch(schedule: str, tmp_path: Path) -> None:
    """They compute the loss outside the stages, and first run each on tensors without content."""
    expected, *_ = train_pipeline(None)
    (first, notes), (_, others) = in_ranks(lambda _: train_pipeline(schedule), 2, tmp_path)
    assert not notes and not others
    assert_same(first, expected, tolerance=1e-6, nothing=1e-9)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"told": ("labels",)}, "was not given input_ids"),
        ({"rows": lambda args, kwargs: {"input_ids": kwargs["input_ids"] * 1 + 1}}, "saw different contexts"),
    ],
)
def test_stages_that_do_not_know_their_contexts_are_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    def act(rank: int) -> Any:
        mine = {name: value for name, value in options.items() if rank or name != "rows"}
        return train_stages([0, 1], [0, 1], metrics="average_cosine,tangent", **mine)

    (first, _, notes), (_, _, others) = in_ranks(act, 2, tmp_path)
    assert any(said in note for note in [*notes, *others])
    assert not [row for row in first.records() if row["kind"] == "final"]


@pytest.mark.slow
def test_a_pipeline_without_a_loss_in_its_last_stage_must_say_its_scale(tmp_path: Path) -> None:
    (first, notes), _ = in_ranks(lambda _: train_pipeline("ScheduleGPipe", told=False), 2, tmp_path)
    assert "no stage of the pipeline returned the loss" in notes[0]
    assert not [row for row in first.records() if row["metric"] == "gradient_energy"]


def test_layers_are_numbered_as_in_the_whole_model() -> None:
    model = tiny("gpt2")  # three blocks by its configuration
    model.transformer.h = model.transformer.h[2:]
    found = [str(site) for site in find_stage(model, (2, 3)).sites(["resid", "final", "attn_out"])]
    assert found == ["3.resid", "3.final", "3.attn_out"]
    assert [str(site) for site in find_stage(Gpt(0, 1), (0, 4)).sites()] == ["0.embed", "1.resid"]
    assert [str(site) for site in find_stage(Gpt(1, 3), (1, 4)).sites()] == ["2.resid", "3.resid"]


def test_what_cannot_be_a_stage_is_refused(tmp_path: Path) -> None:
    for stage in ((4, 4), (-1, 4), (0, 0)):
        with pytest.raises(AnisoscopeError, match="expected the number of blocks before this stage"):
            Monitor(Gpt(), stage=stage)
    with pytest.raises(AnisoscopeError, match="has 4 blocks"):
        Monitor(Gpt(), stage=(1, BLOCKS))
    with pytest.raises(AnisoscopeError, match="has several"):
        find_stage(nn.ModuleDict({"a": Gpt(0, 2), "b": Gpt(2, 4)}), (0, 4))
    with pytest.raises(AnisoscopeError, match="has none"):
        find_stage(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), (0, 4))
    for words in ({"probe": probe()}, {"every_step": True}):
        with pytest.raises(AnisoscopeError, match="needs the whole model"):
            Monitor(Gpt(0, 2), stage=(0, 4), **words)  # type: ignore[arg-type]

    def act(rank: int) -> str:
        with pytest.raises(AnisoscopeError) as error:
            Monitor(Gpt(0, 2) if rank else Gpt(2, 4), stage=(0, 4) if rank else (2, 4))
        return str(error.value)

    for said in in_ranks(act, 2, tmp_path):
        assert "the first process holds blocks from number 3 on" in said


def test_a_stage_alone_is_measured_by_its_own_numbers() -> None:
    """Without other processes, as where stages are tried one by one."""
    model = Gpt(2, 4)
    with Monitor(model, stage=(2, 4), when=[0], metrics="average_cosine") as monitor, monitor.step(0):
        ids = shard(0, 0)
        hidden = torch.randn(*ids.shape, 16, requires_grad=True)
        model(hidden, input_ids=ids, labels=ids)["loss"].backward()
    assert {row["layer"] for row in monitor.table.records()} == {3, 4}
