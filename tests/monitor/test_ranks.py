"""Several processes that train one model: one table, that of one process with all contexts, and nobody waits."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from anisoscope.errors import AnisoscopeError
from anisoscope.models.parallel import HeldPositions, Together, piece_of
from anisoscope.monitor.analysis import ranks as joining
from anisoscope.monitor.monitor import Monitor
from anisoscope.results.query import Table
from anisoscope.tangent.plan import TangentPlan
from support.ranks import (
    PLAN,
    STEPS,
    assert_same,
    ddp,
    exact,
    first_fsdp,
    fsdp,
    in_ranks,
    padded_batch,
    probe,
    rows_of,
    sequence_parallel,
    shard,
    split_width,
    tensor_parallel,
    train,
)
from support.tiny_models import tiny


@cache
def alone(shards: int, probed: bool = False) -> tuple[Table | None, list[torch.Tensor], list[str]]:
    """One process that reads all shards of each step."""
    options: dict[str, Any] = {"probe": probe()} if probed else {}
    return train(lambda _: list(range(shards)), divided=shards, **options)


def joined(size: int, folder: Path, wrap: Callable[[nn.Module], nn.Module], **options: Any) -> list[Any]:
    return in_ranks(lambda rank: train(lambda _: [rank], wrap=wrap, **options), size, folder)


@pytest.mark.parametrize(
    ("wrap", "probed"),
    [
        pytest.param(ddp, False, id="ddp-live"),
        pytest.param(fsdp, True, id="fsdp-probe"),
        pytest.param(ddp, True, id="ddp-probe", marks=pytest.mark.slow),
        pytest.param(fsdp, False, id="fsdp-live", marks=pytest.mark.slow),
    ],
)
def test_the_table_is_that_of_one_process(wrap: Callable[[nn.Module], nn.Module], probed: bool, tmp_path: Path) -> None:
    expected, weights, _ = alone(2, probed)
    options: dict[str, Any] = {"probe": probe()} if probed else {}
    (first, trained, notes), (second, *_) = joined(2, tmp_path, wrap, out=tmp_path / "run", **options)
    assert expected is not None
    assert len(second) == 0, "results are with the first"
    if wrap is fsdp and probed:  # whose weights have no gradients of their own
        assert notes == ["the parameters are sharded over processes, so gradients of weights are left out"]
        expected = expected.where(variant=lambda variant: "embedding_out" not in variant)
    else:
        assert not notes
    assert_same(first, expected)
    assert_same(Table.read(tmp_path / "run"), expected)
    assert all(torch.equal(a, b) for a, b in zip(trained, weights, strict=True)), "training is not changed"
    assert not list((tmp_path / "run" / "state").glob("anisoscope-ranks-*")), "no part is left behind"


def without_tables(table: Table) -> Table:
    """What is measured of a model whose parameters have no rows between passes."""
    kept = table.where(variant=lambda variant: "of=" not in variant)
    return kept.where(kind=lambda kind: kind != "embed_weight")


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("original", "blocks", "probed"), [pytest.param(True, True, True, marks=pytest.mark.slow), (False, False, False)]
)
def test_the_first_fsdp(original: bool, blocks: bool, probed: bool, tmp_path: Path) -> None:
    """Everything but the rows of the embedding table, which no process has between passes."""
    expected, *_ = alone(2, probed)
    options: dict[str, Any] = {"probe": probe()} if probed else {}
    wrap = partial(first_fsdp, original=original, blocks=blocks)

    def both(rank: int) -> Any:
        return train(lambda _: [rank], wrap=wrap, **options), train(lambda _: [rank], wrap=wrap, monitored=False)[1]

    ((first, trained, notes), unwatched), ((second, others, _), same) = in_ranks(both, 2, tmp_path)
    assert expected is not None
    assert notes == ["the parameters are flat pieces in each process, so those of the embedding table are left out"]
    assert len(second) == 0
    assert_same(first, without_tables(expected))
    for watched, unwatched_ in ((trained, unwatched), (others, same)):
        assert all(torch.equal(a, b) for a, b in zip(watched, unwatched_, strict=True)), "training is not changed"


def test_a_probe_of_a_module_inside_the_first_fsdp_is_refused(tmp_path: Path) -> None:
    def act(_: int) -> str:
        with pytest.raises(AnisoscopeError) as error:
            train(lambda _: [0], wrap=lambda model: first_fsdp(model, blocks=False).module, probe=probe())
        return str(error.value)

    assert all("give the monitor the wrapper" in said for said in in_ranks(act, 2, tmp_path))


@pytest.mark.slow
def test_three_processes_of_which_some_have_fewer_batches_and_contexts_to_probe(tmp_path: Path) -> None:
    """Pieces of the probe are not a multiple of three, and passes of FSDP communicate: all run as many."""
    options: dict[str, Any] = {"probe": probe(), "live": True, "batch_size": 7, "lr": 0.0}
    expected, *_ = train(lambda _: [0, 1, 2], divided=3, **options)
    (first, *_), *_ = joined(3, tmp_path, fsdp, **options)
    assert expected is not None
    # a third of a loss is rounded
    assert_same(
        first, expected.where(variant=lambda variant: "embedding_out" not in variant), tolerance=1e-4, nothing=1e-6
    )


def test_batches_of_several_passes_take_turns(tmp_path: Path) -> None:
    expected, *_ = train(lambda _: [0, 1, 2, 3], divided=4, lr=0.0)
    (first, *_), _ = in_ranks(
        lambda rank: train(lambda _: [rank, rank + 2], divided=4, by_hand=True, lr=0.0), 2, tmp_path
    )
    assert expected is not None
    assert_same(first, expected)


def test_a_process_without_a_batch(tmp_path: Path) -> None:
    """Also the first one may have none."""

    def mine(rank: int, step: int) -> list[int]:
        return [] if (rank, step) in ((0, 1), (1, 2)) else [rank]

    expected, *_ = train(lambda step: [*mine(0, step), *mine(1, step)])
    (first, _, notes), (_, _, others) = in_ranks(
        lambda rank: train(lambda step: mine(rank, step), by_hand=True), 2, tmp_path
    )
    assert expected is not None
    assert not notes and not others
    assert_same(first, expected)


def skipping(rank: int, step: int, *, skips: int = 1, by_hand: bool = True, **options: Any) -> Any:
    """Train without telling the monitor of one step in one process."""
    from anisoscope.monitor.monitor import Monitor

    whole = Monitor.step

    def step_unless(self: Monitor, number: int, **options: Any) -> Any:
        import contextlib

        return contextlib.nullcontext() if number == step else whole(self, number, **options)

    if rank == skips:
        Monitor.step = step_unless  # type: ignore[method-assign]
    return train(lambda _: [rank if by_hand else 0], by_hand=by_hand, **options)


def test_a_step_that_the_first_process_skips_is_noted(tmp_path: Path) -> None:
    (first, _, notes), _ = in_ranks(lambda rank: skipping(rank, 1, skips=0), 2, tmp_path)
    assert notes == ["step 1: rank 0 gave nothing, and it joins the parts, so the step has no results"]
    assert first is not None and 1 not in {row["step"] for row in first.records()}


def test_a_process_that_skips_a_step(tmp_path: Path) -> None:
    (first, _, notes), _ = in_ranks(lambda rank: skipping(rank, 1), 2, tmp_path)
    assert notes == ["step 1: rank 1 gave nothing, so its contexts are missing"]
    expected, *_ = train(lambda step: [0] if step == 1 else [0, 1], by_hand=False)
    assert expected is not None
    ours, theirs = rows_of(first.where(step=1, kind="resid")), rows_of(expected.where(step=1, kind="resid"))
    assert {key: row["n"] for key, row in ours.items()} == {key: row["n"] for key, row in theirs.items()}
    assert {row["step"] for row in first.records()} == set(range(STEPS))


def test_only_the_first_process_has_a_monitor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_GRACE", 0.5)
    (first, _, notes), (nothing, *_) = in_ranks(
        lambda rank: train(lambda _: [rank], by_hand=True, monitored=rank == 0), 2, tmp_path
    )
    assert nothing is None
    assert notes[0].startswith("step 0: rank 1 has no monitor, or gave nothing, so its contexts are missing")
    assert {row["step"] for row in first.records()} == set(range(STEPS))


def test_only_another_process_has_a_monitor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_GRACE", 0.5)
    (nothing, *_), (empty, _, notes) = in_ranks(
        lambda rank: train(lambda _: [rank], by_hand=True, monitored=rank == 1), 2, tmp_path
    )
    assert nothing is None
    assert len(empty) == 0
    assert "what rank 1 saw is lost" in notes[0]


def test_processes_with_other_models_are_left_out(tmp_path: Path) -> None:
    """Such as stages of a pipeline whose monitors were not told: each has some of the blocks, under the same name."""

    def act(rank: int) -> Any:
        return train(lambda _: [0], wrap=lambda model: tiny("gpt2") if not rank else tiny("llama"))

    (first, _, notes), _ = in_ranks(act, 2, tmp_path)
    assert len(notes) == 1
    assert "rank 1 trains a model with other parameters, so it is left out; say stage= if both are parts" in notes[0]
    expected, *_ = train(lambda _: [0])
    assert expected is not None
    assert_same(first, expected)


def test_a_process_that_is_killed_leaves_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_PATIENCE", 1.0)

    def dies(rank: int) -> Any:
        def mine(step: int) -> list[int]:
            if step == 0:
                torch.distributed.barrier()  # both have begun
            if rank == 1 and step == 1:
                os.kill(os.getpid(), 9)
            return [rank]

        return train(mine, out=tmp_path / "run")

    (_, _, notes), killed = in_ranks(dies, 2, tmp_path)
    assert killed is None
    assert [note for note in notes if "rank 1 gave nothing" in note]
    table = Table.read(tmp_path / "run").where(kind="resid")
    assert {row["step"] for row in table.records()} == set(range(STEPS))
    most = {step: max(row["contexts"] or 0 for row in table.where(step=step).records()) for step in range(STEPS)}
    assert most[0] > most[1] == most[2]


def test_where_the_first_process_is_killed_the_others_say_so_and_end(tmp_path: Path) -> None:
    def dies(rank: int) -> Any:
        def mine(step: int) -> list[int]:
            if step == 0:
                torch.distributed.barrier()
            if rank == 0 and step == 1:
                os.kill(os.getpid(), 9)
            return [rank]

        return train(mine, out=tmp_path / "run")

    killed, (_, parameters, notes) = in_ranks(dies, 2, tmp_path)
    assert killed is None and parameters
    assert [note for note in notes if "rank 0 ended before it had saved everything" in note]
    assert [note for note in notes if "begin again with resume=True" in note]
    assert list((tmp_path / "run").rglob("first.json")), "what was seen is there for a run that resumes"


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_that_compute_the_same_contexts_count_once(size: int, tmp_path: Path) -> None:
    """Of tensor-parallel processes, alone and under FSDP2; products are rounded elsewhere."""
    options: dict[str, Any] = {"architecture": "llama", "lr": 0.0, "plan": PLAN}
    options |= {"probe": probe(), "live": True}
    pairs = size // 2
    expected, *_ = train(lambda _: list(range(pairs)), divided=pairs, **options)
    wrap = partial(tensor_parallel, sharded=pairs > 1)
    (first, *_), *_ = in_ranks(lambda rank: train(lambda _: [rank // 2], wrap=wrap, **options), size, tmp_path)
    assert expected is not None
    held = expected.where(variant=lambda variant: "embedding_out" not in variant)
    assert_same(first, held, tolerance=2e-5, nothing=1e-5, fitted=1e-3)


@pytest.mark.parametrize("wrap", [tensor_parallel, sequence_parallel])
def test_rounding_of_float32_is_all_that_splitting_a_model_changes(wrap: Any, tmp_path: Path) -> None:
    """In float64 everything is the same but one control, whose draws are in float32."""
    options: dict[str, Any] = {"architecture": "llama", "lr": 0.0, "dtype": torch.float64}
    options |= {"plan": replace(PLAN, splits=(1,))}
    expected, *_ = train(lambda _: [0], wrap=exact, **options)
    (first, *_), _ = in_ranks(lambda _: train(lambda _: [0], wrap=lambda m: wrap(exact(m)), **options), 2, tmp_path)
    assert expected is not None
    drawn = [table.where(variant=lambda name: "control=normal" in name) for table in (first, expected)]
    assert_same(*drawn, tolerance=1e-5, nothing=1e-7)
    rest = [table.where(variant=lambda name: "control=normal" not in name) for table in (first, expected)]
    assert_same(*(table.where(metric=lambda name: name != "gradient_ratio") for table in rest), tolerance=1e-8)


def test_semi_nmf_of_positions_that_are_split_over_processes(tmp_path: Path) -> None:
    """Of rows with the same bits: it magnifies every difference where there are no concepts to be found."""
    options: dict[str, Any] = {"architecture": "llama", "lr": 0.0, "dtype": torch.float64}
    options |= {"plan": replace(PLAN, proxies=("semi_nmf",))}
    expected, *_ = train(lambda _: [0], wrap=partial(exact, still=True), **options)
    (first, *_), _ = in_ranks(
        lambda _: train(lambda _: [0], wrap=lambda m: sequence_parallel(exact(m, still=True)), **options), 2, tmp_path
    )
    assert expected is not None
    assert_same(first, expected, tolerance=1e-10)


@pytest.mark.parametrize(
    ("size", "local", "probed"), [(2, True, True), pytest.param(4, False, False, marks=pytest.mark.slow)]
)
def test_positions_that_are_split_over_processes_are_joined(
    size: int, local: bool, probed: bool, tmp_path: Path
) -> None:
    """Sequence parallel, alone and under FSDP2: sites that are split are a union, others count once."""
    options: dict[str, Any] = {
        "architecture": "llama",
        "lr": 0.0,
        "plan": replace(PLAN, splits=(1,)),
    }
    options |= {"probe": probe(), "live": True} if probed else {}
    pairs, outs = size // 2, (tmp_path / "whole", tmp_path / "split")
    expected, *_ = train(lambda _: list(range(pairs)), divided=pairs, out=outs[0], **options)
    wrap = partial(sequence_parallel, sharded=pairs > 1, local=local)
    (first, *_), *_ = in_ranks(
        lambda rank: train(lambda _: [rank // 2], wrap=wrap, out=outs[1], **options), size, tmp_path
    )
    assert expected is not None
    held = expected.where(variant=lambda variant: "embedding_out" not in variant)
    assert_same(first, held, tolerance=2e-5, nothing=1e-5, fitted=1e-3)
    if probed:  # the map has the rows of all positions, each once
        whole, split = (pq.read_table(out / "map.parquet").to_pandas() for out in outs)
        assert whole.drop(columns=["x", "y", "z"]).equals(split.drop(columns=["x", "y", "z"]))


@pytest.mark.slow
def test_a_process_whose_positions_are_all_padding(tmp_path: Path) -> None:
    """So few rows leave too few dimensions for next components: what is not determined has no interval."""
    options: dict[str, Any] = {"architecture": "llama", "lr": 0.0, "batch": padded_batch}
    options |= {"plan": replace(PLAN, embedding=False)}
    expected, *_ = train(lambda _: [0, 1], **options)
    (first, _, notes), *_ = in_ranks(lambda _: train(lambda _: [0, 1], wrap=sequence_parallel, **options), 2, tmp_path)
    assert expected is not None
    assert not notes
    assert_same(first, expected, tolerance=2e-5, nothing=1e-5, fitted=1e-3)


@pytest.mark.slow
def test_a_training_whose_positions_are_split_is_the_same_with_a_monitor(tmp_path: Path) -> None:
    def both(_: int) -> Any:
        words: dict[str, Any] = {
            "architecture": "llama",
            "wrap": sequence_parallel,
            "plan": PLAN,
        }
        return train(lambda _: [0], **words)[1], train(lambda _: [0], monitored=False, **words)[1]

    for watched, alone_ in in_ranks(both, 2, tmp_path):
        assert all(torch.equal(a, b) for a, b in zip(watched, alone_, strict=True))


@pytest.mark.slow
def test_contexts_of_which_one_process_gave_no_positions_are_missing(tmp_path: Path) -> None:
    (first, _, notes), _ = in_ranks(
        lambda rank: skipping(
            rank, 1, architecture="llama", wrap=sequence_parallel, by_hand=False, plan=None, metrics="light"
        ),
        2,
        tmp_path,
    )
    assert notes[0] == "step 1: rank 1 gave nothing, so its contexts are missing"
    assert notes[1] == "step 1: ranks 0, 1 share contexts, so all of theirs are missing"
    assert {row["step"] for row in first.where(kind="resid").records()} == {0, 2}


def test_activations_that_are_split_otherwise_are_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"architecture": "llama", "wrap": split_width}
    (first, _, notes), _ = in_ranks(lambda _: train(lambda _: [0], **options), 2, tmp_path)
    assert "not positions of every context" in notes[0]
    assert not [row for row in first.records() if row["kind"] == "resid"]


def test_pieces_of_which_nobody_knows_where_they_belong_are_refused() -> None:
    """Plain tensors do not say how they are split: they must be 1/n of the positions."""
    group = Together((0, 1), place=1)

    def piece(*shape: int, length: int | None = 12) -> HeldPositions | None:
        return piece_of(torch.zeros(*shape), group, length=length, batch=3, what="2.resid")

    assert piece(3, 12, 8) is None
    assert piece(3, 1, 8, length=12) is None, "one row per context"
    assert piece(3, 6, 8) == HeldPositions(6, 12, 12, 2)
    for shape in [(3, 7, 8), (3, 4, 8), (6, 3, 8)]:
        with pytest.raises(AnisoscopeError, match="not 1/2 of each"):
            piece(*shape)
    group = replace(group, sequences=True)
    with pytest.raises(AnisoscopeError, match="how many positions its contexts have is not known"):
        piece(3, 6, 8, length=None)


def test_heads_of_a_tensor_parallel_model_are_left_out(tmp_path: Path) -> None:
    options: dict[str, Any] = {"architecture": "llama", "metrics": "attention", "plan": None}
    (first, _, notes), _ = in_ranks(lambda _: train(lambda _: [0], wrap=tensor_parallel, **options), 2, tmp_path)
    assert any("left out: a tensor-parallel process may have some of the heads only" in note for note in notes), notes
    kinds = {row["kind"] for row in first.records()}
    assert "resid" in kinds and not kinds & {"query", "key", "scores"}
    alone = {row["kind"] for row in train(lambda _: [0], **options)[0].records()}
    assert {"query", "key", "scores"} <= alone


def test_contexts_that_torch_splits_are_refused(tmp_path: Path) -> None:
    """Inside `context_parallel` a forward pass gets some positions; after it the next step is measured."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    def act(_: int) -> Any:
        mesh, model = init_device_mesh("cpu", (2,)), tiny("gpt2")
        model.set_attn_implementation("eager")
        with Monitor(model, when=[0, 1], metrics="average_cosine") as monitor:
            for step in range(2):
                ids = shard(step, 0)
                split = context_parallel(mesh, buffers=[ids], buffer_seq_dims=[1])
                with split if not step else contextlib.nullcontext(), monitor.step(step):
                    model(input_ids=ids, labels=ids).loss.backward()
        return monitor.table, monitor.notes

    (first, notes), _ = in_ranks(act, 2, tmp_path)
    assert "are split over processes by context_parallel" in notes[0]
    assert {row["step"] for row in first.where(metric="average_cosine").records()} == {1}


def test_the_processes_part_before_the_monitor_ends(tmp_path: Path) -> None:
    expected, *_ = alone(2)
    (first, *_), _ = joined(2, tmp_path, ddp, leave=True)
    assert expected is not None
    assert_same(first, expected)


def test_two_models_on_processes_of_their_own(tmp_path: Path) -> None:
    """Of the same name, at the same time."""

    def act(rank: int) -> Any:
        pairs = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
        group = pairs[rank // 2]
        return train(
            lambda _: [rank], wrap=lambda model: nn.parallel.DistributedDataParallel(model, process_group=group)
        )

    (first, *_), (second, *_), (third, *_), _ = in_ranks(act, 4, tmp_path)
    other, *_ = train(lambda _: [2, 3], divided=2)
    expected, *_ = alone(2)
    assert expected is not None and other is not None
    assert len(second) == 0
    assert_same(first, expected)
    assert_same(third, other)


@pytest.mark.parametrize("wrap", [fsdp, pytest.param(ddp, marks=pytest.mark.slow)])
def test_a_training_goes_on_from_its_checkpoint(wrap: Callable[[nn.Module], nn.Module], tmp_path: Path) -> None:
    """Each process keeps the types that it has read, and the rows of a sharded table that it holds."""
    (expected, *_), _ = joined(2, tmp_path, wrap, out=tmp_path / "whole")
    saved = tmp_path / "saved"
    saved.mkdir()
    (first, *_), _ = joined(2, tmp_path, wrap, out=tmp_path / "run", paused=saved)
    assert sorted(path.name for path in saved.iterdir()) == ["monitor-1.pt", "monitor.pt"]
    assert_same(first, expected)


def test_a_folder_that_cannot_be_written_costs_no_part(tmp_path: Path) -> None:
    expected, *_ = alone(2)
    (first, _, notes), _ = joined(2, tmp_path, ddp, out="/proc/nothing/run")
    assert expected is not None
    assert notes
    assert_same(first, expected)


def test_a_folder_that_is_deleted_leaves_nobody_waiting(tmp_path: Path) -> None:
    import shutil

    def mine(rank: int, step: int) -> list[int]:
        if (rank, step) == (0, 1):
            shutil.rmtree(tmp_path / "run")
        return [rank]

    (first, *_), _ = in_ranks(
        lambda rank: train(lambda step: mine(rank, step), wrap=ddp, out=tmp_path / "run"), 2, tmp_path
    )
    assert {row["step"] for row in first.records()} == set(range(STEPS))


def test_a_process_that_cannot_measure_says_so_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it, and results are kept while the training goes on."""
    from anisoscope.monitor.monitor import Monitor

    measure, seen = Monitor._measure_live, list[int]()

    def fails(self: Monitor, *args: Any) -> Any:
        if self.ranks is not None and not self.ranks.first:
            raise MemoryError
        seen.append(len(self.tables))
        return measure(self, *args)

    monkeypatch.setattr(Monitor, "_measure_live", fails)

    def act(rank: int) -> Any:
        return train(lambda _: [rank], by_hand=True), list(seen)

    ((first, _, notes), kept), _ = in_ranks(act, 2, tmp_path)
    assert kept[-1] > 0, "the first step is kept before the last begins"
    assert "rank 1 gave nothing" in notes[0]
    assert {row["step"] for row in first.records()} == set(range(STEPS))


def test_a_monitor_made_too_early_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from anisoscope.monitor.analysis import desk

    known = iter([False, True])
    monkeypatch.setattr(desk, "several", lambda: next(known))
    with pytest.raises(AnisoscopeError, match="initialised after this monitor was made"):
        train(lambda _: [0])


def test_a_loss_of_any_kind_is_measured_with_one_batch_in_each_process(tmp_path: Path) -> None:
    """Processes train on the mean of their losses: gradients are those of each loss as it is."""

    def act(rank: int, parts: list[slice]) -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
        x, y = torch.randn(128, 8), torch.randn(128, 4)
        few: dict[str, Any] = {"permuted": False, "balanced": False, "standardised": False, "frozen": False}
        plan = TangentPlan(rank=4, proxies=("pca",), draws=19, **few)
        monitor = Monitor(net, modules=["0"], metrics="tangent", plan=plan, when=[0], strict=True, name="m")
        with monitor, monitor.step(0):
            nn.functional.mse_loss(net(x[parts[rank]]), y[parts[rank]]).backward()
        found = monitor.table.where(metric="gradient_energy", control=None, group="", proxy="pca").records()
        return [row["value"] for row in found]

    two, none = in_ranks(lambda rank: act(rank, [slice(64), slice(64, None)]), 2, tmp_path)
    assert two == pytest.approx(act(0, [slice(None)]), rel=1e-6) and two and not none
