"""Several processes that measure one model: each gets the table of one process with all batches, and nobody hangs."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.measure import measure
from anisoscope.measurement.workers import processes
from anisoscope.results.query import Table
from support.ranks import assert_same, ddp, fsdp, in_ranks, plain, shard, tensor_parallel
from support.tiny_models import tiny

Wrap = Callable[[nn.Module], nn.Module]
_METRICS = ["average_cosine", "drift", "participation_ratio", "two_nn", "attention_entropy"]


def batches(*numbers: int) -> list[dict[str, Tensor]]:
    return [{"input_ids": shard(0, number)} for number in numbers]


def measured(*numbers: int, wrap: Wrap = plain, architecture: str = "gpt2", **options: Any) -> Table:
    torch.manual_seed(0)
    model = wrap(tiny(architecture))
    return measure(model, batches(*numbers), **{"metrics": _METRICS, **options})


def in_two(*shares: tuple[int, ...], folder: Path, **options: Any) -> list[Table]:
    return in_ranks(lambda rank: measured(*shares[rank], **options), len(shares), folder)


@pytest.mark.parametrize("wrap", [plain, ddp, fsdp])
def test_every_process_has_the_table_of_one_process_with_all_batches(wrap: Wrap, tmp_path: Path) -> None:
    """Also where one has more batches; passes of FSDP communicate, so the other repeats one that does not count."""
    expected = measured(0, 1, 2, 3)
    first, second = in_two((0, 2, 3), (1,), folder=tmp_path, wrap=wrap)
    assert_same(first, expected, tolerance=1e-12 if wrap is not fsdp else 1e-5)
    assert_same(second, first, tolerance=0.0, nothing=0.0, least=8)
    assert first.about == second.about == expected.about


@pytest.mark.parametrize("wrap", [plain, fsdp])
def test_a_process_without_a_batch(wrap: Wrap, tmp_path: Path) -> None:
    """Be it the first."""
    expected = measured(0, 1)
    first, _ = in_two((), (0, 1), folder=tmp_path, wrap=wrap)
    assert_same(first, expected, tolerance=1e-12 if wrap is not fsdp else 1e-5)


def test_processes_that_compute_contexts_together_count_once(tmp_path: Path) -> None:
    options: dict[str, Any] = {"architecture": "llama", "sites": "resid"}
    expected = measured(0, 1, **options)
    first, second = in_two((0, 1), (0, 1), folder=tmp_path, wrap=tensor_parallel, **options)
    assert_same(first, expected, tolerance=1e-5, nothing=1e-6, least=8)
    assert_same(second, first, tolerance=0.0, nothing=0.0, least=8)


def test_heads_that_are_split_over_processes_are_left_out_with_a_note(tmp_path: Path) -> None:
    options: dict[str, Any] = {"architecture": "llama", "wrap": tensor_parallel}
    first, _ = in_two((0,), (0,), folder=tmp_path, **options)
    why = "a tensor-parallel process may have some of the heads only"
    assert first.about["models"][0]["notes"] == [f"query, key, scores are left out: {why}"]
    assert {row["kind"] for row in first.records()} == {"embed", "resid", "final"}
    refused, _ = in_ranks(lambda _: sentence(lambda: measured(0, **options, sites="query")), 2, tmp_path)
    assert "some of the heads only, of which query would be measured" in refused


@pytest.mark.slow
def test_four_processes_two_by_two(tmp_path: Path) -> None:
    """FSDP2 over pairs that are tensor-parallel; one pair has one batch less."""
    options: dict[str, Any] = {"architecture": "llama", "sites": "resid"}
    expected = measured(0, 1, 2, **options)
    wrap = partial(tensor_parallel, sharded=True)
    first, *_ = in_two((0, 1), (0, 1), (2,), (2,), folder=tmp_path, wrap=wrap, **options)
    assert_same(first, expected, tolerance=1e-5, nothing=1e-6, least=8)


@pytest.mark.slow
def test_four_processes_that_read_their_own_batches(tmp_path: Path) -> None:
    expected = measured(0, 1, 2, 3, 4)
    for found in in_two((0, 4), (1,), (), (2, 3), folder=tmp_path, wrap=ddp):
        assert_same(found, expected, tolerance=1e-12)


def test_tables_of_weights_count_once(tmp_path: Path) -> None:
    options: dict[str, Any] = {"sites": "embed_weight,unembed,resid", "metrics": ["average_cosine", "drift", "two_nn"]}
    expected = measured(0, 1, **options)
    first, _ = in_two((0,), (1,), folder=tmp_path, wrap=fsdp, **options)
    assert_same(first, expected, tolerance=1e-5, least=8)


def sentence(act: Callable[[], Any]) -> str:
    try:
        act()
    except AnisoscopeError as error:
        return str(error)
    return ""


def test_a_process_that_fails_ends_all_with_its_reason(tmp_path: Path) -> None:
    def act(rank: int) -> str:
        wrong = [{"input_ids": torch.full((2, 4), 10**6)}]
        return sentence(lambda: measure(tiny("gpt2"), wrong if rank else batches(0), metrics=_METRICS))

    first, second = in_ranks(act, 2, tmp_path)
    assert first.startswith("rank 1 failed, and with it all 2 processes: GPT2LMHeadModel fails on a batch")
    assert second.startswith("GPT2LMHeadModel fails on a batch")


@pytest.mark.slow
def test_a_process_that_fails_in_a_pass_that_communicates(tmp_path: Path) -> None:
    """Of a sharded model: the others wait in a collective until it has ended, and then know why."""

    def act(rank: int) -> str:
        torch.manual_seed(0)
        model, wrong = fsdp(tiny("gpt2")), [{"input_ids": torch.full((2, 4), 10**6)}]
        said = sentence(lambda: measure(model, wrong if rank else batches(0), metrics=_METRICS))
        if rank:
            os._exit(1)
        return said

    first, _ = in_ranks(act, 2, tmp_path)
    assert first.startswith("rank 1 failed, and with it all 2 processes: GPT2LMHeadModel fails on a batch")


def test_the_first_process_fails(tmp_path: Path) -> None:
    def act(rank: int) -> str:
        wrong = [{"input_ids": torch.full((2, 4), 10**6)}]
        return sentence(lambda: measure(tiny("gpt2"), batches(0) if rank else wrong, metrics=_METRICS))

    _, second = in_ranks(act, 2, tmp_path)
    assert second.startswith("rank 0 failed, and with it all 2 processes: GPT2LMHeadModel fails on a batch")


def test_a_process_that_is_killed_or_does_not_come_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_LIMIT", 1.0)
    monkeypatch.setattr(processes, "_SIGN", 0.05)

    def killed(rank: int) -> Any:
        if rank == 1:
            os.kill(os.getpid(), 9)
        return sentence(lambda: measured(0))

    first, nothing = in_ranks(killed, 2, tmp_path)
    assert first == (
        "rank 1 did not call the same function for 1 s; call it in all 2 processes, in the same order, or with "
        "alone=True in one."
    )
    assert nothing is None


def test_one_process_may_measure_alone(tmp_path: Path) -> None:
    expected = measured(0)
    first, second = in_ranks(lambda rank: measured(0, alone=True) if not rank else None, 2, tmp_path)
    assert second is None
    assert_same(first, expected, tolerance=1e-12)


def test_a_sharded_model_cannot_be_measured_alone(tmp_path: Path) -> None:
    first, _ = in_ranks(lambda _: sentence(lambda: measured(0, wrap=fsdp, alone=True)), 2, tmp_path)
    assert "which no process can run alone" in first


@pytest.mark.slow
def test_tensor_parallel_processes_with_different_batches_are_refused(tmp_path: Path) -> None:
    def act(rank: int) -> str:
        try:
            return sentence(lambda: measured(rank, wrap=tensor_parallel, architecture="llama", sites="resid"))
        except RuntimeError:  # a collective whose other side has ended
            return ""

    _, second = in_ranks(act, 2, tmp_path)
    assert second == (
        "ranks 0, 1 compute the same contexts together (tensor parallel), but their batch 0 differs; give those "
        "processes the same batches."
    )


def test_nobody_has_a_batch(tmp_path: Path) -> None:
    for wrap in (plain, fsdp):
        first, second = in_ranks(lambda _, wrap=wrap: sentence(lambda: measured(wrap=wrap)), 2, tmp_path)  # type: ignore[misc]
        assert first == "none of 2 processes was given a batch; give batches to one at least."
        assert second == f"rank 0 failed, and with it all 2 processes: {first}"


def test_the_same_batches_in_all_processes_are_noted(tmp_path: Path) -> None:
    options: dict[str, Any] = {"metrics": ["drift"], "sites": "resid"}
    first, second = in_two((0,), (0, 1), folder=tmp_path, **options)
    assert first.about["models"][0]["notes"] == [
        "ranks 0, 1 were given the same first batch, and its contexts count 2 times; give each process batches of its "
        "own"
    ]
    assert second.about == first.about
    assert not in_two((0,), (1,), folder=tmp_path, **options)[0].about["models"][0]["notes"], "the counter-test"


def test_a_large_bank_comes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_PIECE", 1000)
    expected = measured(0, 1, metrics=["drift"], sites="resid")
    first, second = in_two((0,), (1,), folder=tmp_path, metrics=["drift"], sites="resid")
    assert len(expected) == len(first)
    assert first.arrow["value"].to_pylist() == pytest.approx(expected.arrow["value"].to_pylist(), rel=1e-12)
    assert first.arrow["value"].to_pylist() == second.arrow["value"].to_pylist()
