"""The loss that is logged at a measured step is that of all processes, whoever of them logs it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from anisoscope.monitor.analysis import ranks as joining
from anisoscope.monitor.analysis.desk import RankLosses
from anisoscope.monitor.monitor import Monitor
from anisoscope.results.query import Table
from support.ranks import PLAN, in_ranks, padded_batch, shard, tensor_parallel
from support.tiny_models import VOCABULARY, tiny

STEPS = 3
CHEAP: dict[str, Any] = {"when": [0, 2], "plan": PLAN, "layers": [1], "name": "m", "metrics": "tangent"}


def batches(step: int, rank: int) -> list[dict[str, Tensor]]:
    """Other numbers of targets in every process, and no batch at all in the third at step 2."""
    padded = padded_batch(step, rank)
    whole = {"input_ids": padded["input_ids"], "labels": padded["input_ids"]}
    return [[padded], [whole], [] if step == 2 else [padded]][rank]


def logged(rank: int, out: Path, loggers: Sequence[int] = (0, 1, 2), **options: Any) -> Any:
    """The losses and targets of this process, and what the table has."""
    torch.manual_seed(0)
    model, mine = tiny("gpt2"), []
    with Monitor(model, **{**CHEAP, "out": out, **options}) as monitor:
        for step in range(STEPS):
            loss, targets = math.nan, 0
            with monitor.step(step):
                for batch in batches(step, rank):
                    (found := model(**batch).loss).backward()
                    loss, targets = float(found.detach()), int((batch["labels"][:, 1:] != -100).sum())
            if rank in loggers:
                monitor.log(step, loss=loss, rank=rank)
            mine.append((loss, targets))
    return mine, losses_of(monitor.table), losses_of(Table.read(out))


def losses_of(table: Table) -> dict[int, float]:
    return {row["step"]: row["value"] for row in table.where(metric="loss", kind="training").records()}


def mean_of(found: Sequence[tuple[float, int]]) -> float:
    counted = [(loss, targets) for loss, targets in found if targets]
    return sum(loss * targets for loss, targets in counted) / sum(targets for _, targets in counted)


@pytest.mark.parametrize("loggers", [(0, 1, 2), (0,), (2, 1)])
def test_the_loss_of_a_step_is_the_mean_over_the_targets_of_all_that_log_it(
    loggers: Sequence[int], tmp_path: Path
) -> None:
    results = in_ranks(lambda rank: logged(rank, tmp_path / "run", loggers), 3, tmp_path)
    each, in_memory = [mine for mine, *_ in results], results[0][1]
    assert in_memory == results[0][2]
    assert set(in_memory) == {0, 2}
    assert all(set(other) == set() for _, other, _ in results[1:]), "results are with the first"
    for step, value in in_memory.items():
        wanted = mean_of([each[rank][step] for rank in sorted(loggers)])
        assert value == pytest.approx(wanted, rel=1e-12)
    if len(loggers) == 3:
        losses = [each[rank][0][0] for rank in range(3)]
        assert min(abs(in_memory[0] - one) for one in [*losses, sum(losses) / 3]) > 1e-3, "it could be another"


def test_other_numbers_are_those_of_the_first_process(tmp_path: Path) -> None:
    in_ranks(lambda rank: logged(rank, tmp_path / "run"), 2, tmp_path)
    found = Table.read(tmp_path / "run").where(metric="rank").records()
    assert [row["value"] for row in found] == [0.0, 0.0]


def test_where_nobody_counts_targets_processes_count_alike(tmp_path: Path) -> None:
    """A probe alone: of the training batches nothing is read."""
    ids = shard(99, 99, 40)
    words = {"probe": {"input_ids": ids, "labels": ids}}
    results = in_ranks(lambda rank: logged(rank, tmp_path / "run", **words), 2, tmp_path)
    each = [mine[0][0] for mine, *_ in results]
    assert results[0][1][0] == pytest.approx(sum(each) / 2, rel=1e-12)


def test_processes_with_the_same_contexts_count_once(tmp_path: Path) -> None:
    def act(rank: int) -> Any:
        torch.manual_seed(0)
        model = tensor_parallel(tiny("llama"))
        with Monitor(model, **CHEAP) as monitor:
            batch = padded_batch(0, rank // 2) if rank < 2 else {"input_ids": (ids := shard(0, 1)), "labels": ids}
            with monitor.step(0):
                (loss := model(**batch).loss).backward()
            monitor.log(0, loss=float(loss) if rank < 3 else 1e9)  # of the last one nobody asks
        return float(loss), int((batch["labels"][:, 1:] != -100).sum()), losses_of(monitor.table)

    results = in_ranks(act, 4, tmp_path)
    wanted = mean_of([results[0][:2], results[2][:2]])
    assert results[0][2][0] == pytest.approx(wanted, rel=1e-9)


def test_the_last_stage_of_a_pipeline_alone_has_a_loss(tmp_path: Path) -> None:
    results = in_ranks(lambda rank: stage(rank, tmp_path / "run"), 2, tmp_path)
    assert losses_of(Table.read(tmp_path / "run")) == {0: pytest.approx(results[1], rel=1e-12)}


class Stage(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.embedding = nn.Embedding(VOCABULARY, 16) if not rank else None
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)])
        self.head = nn.Linear(16, VOCABULARY) if rank else None

    def forward(self, x: Tensor | None = None, input_ids: Any = None, labels: Any = None) -> Any:
        x = self.layers[0](self.embedding(input_ids) if self.embedding is not None else x)
        if self.head is None:
            return x
        logits = self.head(x)
        return {"loss": cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


def stage(rank: int, out: Path) -> float:
    ids, model = shard(0, 0, 12), Stage(rank)
    words: dict[str, Any] = {"when": [0], "metrics": "average_cosine", "stage": (rank, 2), "out": out, "name": "m"}
    with Monitor(model, **words) as monitor:
        with monitor.step(0):
            if rank:
                dist.recv(x := torch.zeros(*ids.shape, 16), 0)
                (loss := model(x.requires_grad_(), input_ids=ids, labels=ids)["loss"]).backward()
                dist.send(x.grad, 0)
            else:
                dist.send((y := model(None, input_ids=ids, labels=ids)).detach(), 1)
                dist.recv(gradient := torch.zeros_like(y), 1)
                y.backward(gradient)
        if rank:
            monitor.log(0, loss=float(loss))
    return float(loss) if rank else 0.0


def test_a_process_that_says_nothing_and_trains_on_is_not_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "_GRACE", 0.2)

    def act(rank: int) -> Any:
        torch.manual_seed(0)
        model = tiny("gpt2")
        with Monitor(model, **CHEAP) as monitor:
            with monitor.step(0):
                model(**padded_batch(0, rank)).loss.backward()
            if not rank:
                monitor.log(0, loss=2.0)
            else:
                dist.barrier()  # in which the first one is after its monitor
        if not rank:
            dist.barrier()
        return losses_of(monitor.table)

    assert in_ranks(act, 2, tmp_path)[0] == {0: 2.0}


def test_the_loss_of_another_model_is_left_out(tmp_path: Path) -> None:
    def act(rank: int) -> Any:
        model = tiny("gpt2")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0 + rank)
        with Monitor(model, **CHEAP) as monitor:
            with monitor.step(0):
                model(**padded_batch(0, rank)).loss.backward()
            monitor.log(0, loss=float(rank + 1))
        return losses_of(monitor.table)

    assert in_ranks(act, 2, tmp_path)[0] == {0: 1.0}


def test_a_process_that_is_ahead_of_the_first_does_not_speak_for_it(tmp_path: Path) -> None:
    def act(rank: int) -> Any:
        model = tiny("gpt2")
        with Monitor(model, **CHEAP) as monitor:
            with monitor.step(0):
                model(**padded_batch(0, rank)).loss.backward()
            if rank:
                monitor.log(0, loss=2.0)
            dist.barrier()
            if not rank:
                monitor.collect(wait=True)
                monitor.log(0, loss=1.0)
        return losses_of(monitor.table)

    assert in_ranks(act, 2, tmp_path)[0] == {0: 1.5}


def test_losses_that_nobody_logged_are_awaited_once(tmp_path: Path) -> None:
    """The table is asked for again at the end and afterwards, when the other process trains on without a monitor."""

    def act(rank: int) -> int:
        torch.manual_seed(0)
        model, looks = nn.parallel.DistributedDataParallel(tiny("gpt2")), 0
        read = RankLosses._read

        def counted(self: RankLosses) -> bool:
            nonlocal looks
            looks += 1
            return read(self)

        with pytest.MonkeyPatch.context() as patch:
            with Monitor(model, **CHEAP) as monitor:
                for step in range(STEPS):
                    with monitor.step(step):
                        model(**padded_batch(step, rank)).loss.backward()
            patch.setattr(RankLosses, "_read", counted)
            assert (len(monitor.table) > 0) == (rank == 0)
        model(**padded_batch(0, rank)).loss.backward()
        return looks

    assert in_ranks(act, 2, tmp_path) == [1, 0]
