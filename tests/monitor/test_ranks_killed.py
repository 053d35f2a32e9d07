"""Processes of one training that are killed, fail or cannot begin: what was measured stays, and nobody hangs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from torch import nn

from anisoscope.errors import AnisoscopeError
from anisoscope.monitor.analysis import ranks as joining
from anisoscope.monitor.analysis.analysis import Analysis
from anisoscope.monitor.analysis.parts import PREFIX, PartFolder, left_steps, part_name, state_name
from anisoscope.monitor.analysis.ranks import Ranks
from anisoscope.monitor.files import MonitorFiles
from anisoscope.monitor.monitor import Monitor
from anisoscope.monitor.sink import MonitorStore
from anisoscope.results.query import Table
from support.ranks import PLAN, STEPS, assert_same, ddp, in_ranks, probe, train

Moment = tuple[type, str, Callable[..., bool]]  # a method, and whether a call of it is the last of its process
MOMENTS: dict[str, Moment] = {
    "before its part is there": (Ranks, "add", lambda _, seen, *__: seen.rows.step == 1),
    "before the state after the step": (Ranks, "close_step", lambda _, step, *__: step == 1),
    "in the analysis": (Analysis, "run", lambda _, seen: seen.rows.step == 1),
    "before results are written": (MonitorFiles, "write", lambda _, step, *__: step == 1),
    "between table and state": (MonitorStore, "put_state", lambda _, step, *__, **___: step == 1),
    "before parts are deleted": (Ranks, "settle", lambda ranks, _: _has_results(ranks, 1)),
    "before the table is written": (MonitorStore, "write_table", lambda *_, **__: True),
    "before the parts of all are deleted": (Ranks, "end", lambda *_, **__: True),
}
COMPLETE = set(list(MOMENTS)[2:])  # every process has given its part by then
LEFT = set(list(MOMENTS)[2:5])  # and there are no results yet, or half of them


def _has_results(ranks: Ranks, step: int) -> bool:
    assert ranks._folder is not None
    return (ranks._folder.path.parents[1] / "parts" / f"step-{step:09d}.parquet").exists()


def kill_at(moment: Moment) -> None:
    """Have this process killed in the call of a method."""
    owner, name, is_last = moment
    whole = getattr(owner, name)

    def act(*args: Any, **words: Any) -> Any:
        if is_last(*args, **words):
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(*args, **words)

    setattr(owner, name, act)


OPTIONS: dict[str, Any] = {"lr": 0.0, "plan": PLAN}  # without collectives, so that the others live on


@cache
def alone(probed: bool = False) -> Table:
    table = train(lambda _: [0, 1], **OPTIONS, **({"probe": probe(), "live": True} if probed else {}))[0]
    assert table is not None
    return table


def run_in_two(out: Path, folder: Path, moment: Moment | None = None, **options: Any) -> list[Any]:
    def act(rank: int) -> Any:
        if moment is not None and rank == 0:
            kill_at(moment)
        return train(lambda _: [rank], out=out, **OPTIONS, **options)

    return in_ranks(act, 2, folder)


QUICK = {"before the state after the step", "in the analysis"}


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in MOMENTS])
def test_the_first_process_is_killed_and_the_run_goes_on(name: str, tmp_path: Path) -> None:
    out, expected = tmp_path / "run", alone()
    first, _ = run_in_two(out, tmp_path, MOMENTS[name])
    assert first is None, "the counter-test: it was killed"
    left = list(left_steps(out / "state", _options(out)))
    steps = {int(path.stem[-9:]) for path in (out / "parts").glob("step-*.parquet")} | {one.step for one in left}
    assert {0, 1} <= steps or name not in COMPLETE, "every step that all gave their parts to"
    (table, _, notes), _ = run_in_two(out, tmp_path, resume=True)
    assert_same(table, expected)
    assert_same(Table.read(out), expected)
    found = any(re.match(r"step (0, )?1(, 2)?: analysed after a restart", note) for note in notes)
    assert found == (name in LEFT), "others may have waited, too"
    assert not list((out / "state").glob(f"{PREFIX}*"))


def _options(out: Path) -> dict[str, Any]:
    found = [json.loads((path / "first.json").read_text()) for path in (out / "state").glob(f"{PREFIX}*")]
    return found[0]["options"] if found else {}


@pytest.mark.slow
def test_a_killed_run_with_a_probe_goes_on_in_one_process(tmp_path: Path) -> None:
    """Both studies, and the rows of the map."""
    out, options = tmp_path / "run", {"probe": probe(), "live": True}
    first, _ = run_in_two(out, tmp_path, MOMENTS["in the analysis"], **options)
    assert first is None
    table, _, notes = train(lambda _: [0, 1], out=out, resume=True, **OPTIONS, **options)
    assert table is not None
    assert_same(table, alone(probed=True))
    assert any(re.match(r"step (0, )?1(, 2)?: analysed after a restart", note) for note in notes)
    train(lambda _: [0, 1], out=tmp_path / "whole", **OPTIONS, **options)
    assert _map(out) == _map(tmp_path / "whole")


def _map(out: Path) -> list[Any]:
    rows = pq.read_table(out / "map.parquet").to_pylist()
    return [{k: round(v, 6) if isinstance(v, float) else v for k, v in row.items()} for row in rows]


def test_the_map_has_rows_of_all_processes(tmp_path: Path) -> None:
    options = {**OPTIONS, "probe": probe(), "plan": None, "metrics": "average_cosine"}
    train(lambda _: [0, 1, 2], out=tmp_path / "whole", **options)
    in_ranks(lambda rank: train(lambda _: [rank], out=tmp_path / "run", **options), 3, tmp_path)
    assert _map(tmp_path / "run") == _map(tmp_path / "whole")
    assert len(_map(tmp_path / "run")) > 400


def test_a_process_that_ends_while_the_folder_goes_keeps_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, remove = PartFolder.made(tmp_path, size=2, options={}), os.rmdir

    def late(*args: Any, **words: Any) -> None:
        with contextlib.suppress(FileNotFoundError):  # as `Ranks.end` does
            folder.put("ended.1", None)
        remove(*args, **words)

    monkeypatch.setattr(os, "rmdir", late)
    folder.put("ended.2", None)
    folder.remove()
    assert not list(tmp_path.iterdir())


def test_parts_that_others_may_have_written_are_not_read(tmp_path: Path) -> None:
    folder = PartFolder.made(tmp_path, size=1, options={"seed": 0, "total_steps": 3})
    folder.put(part_name(4, "study", 0), "rows")
    folder.put(state_name(4), {"step": 4})
    folder.leave()
    same = {"seed": 0, "total_steps": 9}  # it may be extended
    assert [(left.step, left.parts) for left in left_steps(tmp_path, same)] == [(4, {"study": ["rows"]})]
    assert not list(left_steps(tmp_path, {"seed": 1}))
    folder.path.chmod(0o777)
    assert not list(left_steps(tmp_path, same))


def test_a_part_that_is_given_again_is_not_deleted_with_the_first(tmp_path: Path) -> None:
    """As of a training that is rewound."""
    folder = PartFolder.made(tmp_path, size=2)
    name = part_name(4, "study", 1)
    folder.put(name, "first")
    assert folder.read(name) == "first"
    assert not folder.names() & {name}
    folder.put(name, "second")
    folder.forget({4})
    assert (folder.path / name).exists()
    folder.forget(set())
    assert folder.names() & {name} and folder.read(name) == "second"
    folder.forget(set())
    assert not (folder.path / name).exists()


# -- the end -----------------------------------------------------------------------------------------------------------


def test_others_stay_until_the_first_has_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes: a process that fails as it exits would have the launcher end the first one."""
    whole = MonitorStore.write_table
    monkeypatch.setattr(MonitorStore, "write_table", lambda *args, **words: (time.sleep(1.0), whole(*args, **words)))
    monkeypatch.setattr(joining, "_GRACE", 0.5)
    out = tmp_path / "run"

    def act(rank: int) -> bool:
        train(lambda _: [rank], wrap=ddp, out=out, plan=None, metrics="average_cosine")
        return (out / "table.parquet").exists()

    assert in_ranks(act, 2, tmp_path) == [True, True]


def leaving(*, first: bool, **options: Any) -> Monitor:
    """A monitor of one step, which a process leaves `first`, and another one when that has left."""
    net = nn.Sequential(nn.Linear(4, 4))
    with Monitor(net, modules=["0"], metrics="average_cosine", when=[0], **options) as monitor:
        with monitor.step(0):
            net(torch.randn(16, 4)).sum().backward()
        if not first:
            dist.barrier()
    if first:
        dist.barrier()
    return monitor


def test_a_first_process_that_ends_early_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has all parts, and its folder is gone when the other one ends."""
    monkeypatch.setattr(joining, "_GRACE", 0.3)

    def act(rank: int) -> list[str]:
        return leaving(first=rank == 0).notes

    assert in_ranks(act, 2, tmp_path) == [[], []]


def test_nobody_waits_for_a_first_process_that_trains_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may itself wait for the other one."""
    monkeypatch.setattr(joining, "_GRACE", 0.3)

    def act(rank: int) -> list[int]:
        return list(leaving(first=rank == 1, out=tmp_path / "run").done)

    assert in_ranks(act, 2, tmp_path) == [[0], [0]]


def test_a_training_that_fails_in_one_process_ends_in_all(tmp_path: Path) -> None:
    """With its own error, and with what was measured before."""

    def act(rank: int) -> str:
        def mine(step: int) -> list[int]:
            if (rank, step) == (1, 2):
                raise ZeroDivisionError("the training's own")
            return [rank]

        try:
            train(mine, wrap=ddp, out=tmp_path / "run", plan=None, metrics="average_cosine")
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def ended(rank: int) -> str:
        said = act(rank)
        if rank == 1:
            dist.destroy_process_group()  # as the end of the process does
        return said

    first, second = in_ranks(ended, 2, tmp_path)
    assert second == "ZeroDivisionError: the training's own"
    assert first.startswith("RuntimeError")
    assert {0, 1} <= {row["step"] for row in Table.read(tmp_path / "run").records()}


@pytest.mark.parametrize("failing", ["made", "entered"])
def test_what_the_first_cannot_begin_with_is_told_by_all(failing: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"wrap": ddp, "out": tmp_path / "run", "plan": None, "metrics": "average_cosine"}
    in_ranks(lambda rank: train(lambda _: [rank], **options), 2, tmp_path)
    if failing == "entered":  # another seed is seen when the state is read
        options |= {"seed": 1, "resume": True}

    def act(rank: int) -> str:
        with pytest.raises(AnisoscopeError) as error:
            train(lambda _: [rank], **options)
        return str(error.value)

    first, second, third = in_ranks(act, 3, tmp_path)
    assert first == second == third
    said = {"made": "holds a monitored run; say resume=True", "entered": "monitored with seed = 0, not 1"}
    assert said[failing] in first


# -- trainings that are no one training --------------------------------------------------------------------------------


def test_models_of_one_shape_that_are_trained_apart_are_not_joined(tmp_path: Path) -> None:
    """From the same start: they are told apart once their weights are."""
    options: dict[str, Any] = {"plan": None, "metrics": "average_cosine", "lr": 1e-2}
    (first, _, notes), _ = in_ranks(lambda rank: train(lambda _: [rank], **options), 2, tmp_path)
    expected, *_ = train(lambda _: [0], **options)
    assert expected is not None
    assert [note for note in notes if "rank 1 has other weights than rank 0, so it is left out" in note]
    found, wanted = (table.where(step=tuple(range(1, STEPS))) for table in (first, expected))
    assert_same(found, wanted, least=4)


def test_two_monitors_of_one_model_at_once(tmp_path: Path) -> None:
    """Each has a table of its own, in every process."""

    def act(rank: int) -> Any:
        torch.manual_seed(0)
        net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4)))
        words: dict[str, Any] = {"modules": ["0"], "metrics": "average_cosine", "when": [0, 1], "name": "m"}
        with Monitor(net, **words) as one, Monitor(net, **words) as two:
            for step in range(2):
                with one.step(step), two.step(step):
                    generator = torch.Generator().manual_seed(rank)
                    net(torch.randn(16, 4, generator=generator)).sum().backward()
        return one.table, two.table, one.notes + two.notes

    (one, two, notes), _ = in_ranks(act, 2, tmp_path)
    assert not notes
    assert_same(one, two, least=1)
    assert {row["contexts"] for row in one.records()} == {32}


# -- kills at any time -------------------------------------------------------------------------------------------------


def _killed_after(seconds: float, victim: int, out: Path, folder: Path) -> bool:
    """Kill one of two processes some time after they began, and end the other as torchrun does; whether it lived."""
    began = folder / "began"
    began.unlink(missing_ok=True)

    def act(rank: int) -> None:
        if rank == victim:
            began.write_text(str(os.getpid()))
        with contextlib.suppress(RuntimeError):  # of gloo, in the other one
            train(lambda _: [rank], wrap=ddp, out=out, resume=out.exists(), plan=PLAN, probe=probe())

    starter = os.fork()
    if not starter:
        os.setpgid(0, 0)
        with contextlib.suppress(BaseException):
            in_ranks(act, 2, folder)
        os._exit(0)
    while not began.exists() or not began.read_text():
        time.sleep(0.001)
    time.sleep(seconds)
    lived = True
    try:
        os.kill(int(began.read_text()), signal.SIGKILL)
        time.sleep(0.1)
    except ProcessLookupError:
        lived = False
    with contextlib.suppress(ProcessLookupError):
        os.killpg(starter, signal.SIGKILL)
    os.waitpid(starter, 0)
    return lived


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_is_killed_again_and_again(victim: int, tmp_path: Path) -> None:
    """At a time that has nothing to do with what it does: the run that goes on ends with the table of one process."""
    expected = train(lambda _: [0, 1], divided=2, plan=PLAN, probe=probe())[0]
    assert expected is not None
    out, generator = tmp_path / "run", torch.Generator().manual_seed(victim)
    start = time.monotonic()
    in_ranks(lambda rank: train(lambda _: [rank], wrap=ddp, out=tmp_path / "w", plan=PLAN, probe=probe()), 2, tmp_path)
    whole = time.monotonic() - start
    killed = [
        _killed_after(whole * float(torch.rand((), generator=generator)), victim, out, tmp_path) for _ in range(8)
    ]
    assert any(killed), "the counter-test"
    (table, *_), _ = in_ranks(
        lambda rank: train(lambda _: [rank], wrap=ddp, out=out, resume=out.exists(), plan=PLAN, probe=probe()),
        2,
        tmp_path,
    )
    assert_same(table, expected)
    assert_same(Table.read(out), expected)
    assert _map(out) == _map(tmp_path / "w")
    assert not list((out / "state").glob(f"{PREFIX}*"))
