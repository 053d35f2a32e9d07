"""A sweep whose checkpoints are measured by jobs has the table of one that measures them itself, digit for digit."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import anisoscope
from anisoscope.errors import AnisoscopeError
from anisoscope.execution.local import LocalProcesses
from anisoscope.series import examination
from support.jobs import HereExecutor
from support.tiny_series import FORKS, LOOK, flags, killed, make_series, same

sweep = partial(anisoscope.sweep, report=False)
GRADIENTS: dict[str, Any] = {name: value for name, value in LOOK.items() if name != "metrics"}
GRADIENTS |= {"preset": "standard", "draws": 19, "layers": (0, 1)}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five checkpoints: one is cut off, one is a copy of another."""
    folder = make_series(tmp_path_factory.mktemp("shelf"), range(0, 50, 10))
    file = folder / "checkpoint-20" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:900])
    shutil.rmtree(folder / "checkpoint-40")
    shutil.copytree(folder / "checkpoint-30", folder / "checkpoint-40")
    return folder


@pytest.fixture(scope="module")
def alone(shelf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sweep of one process."""
    out = tmp_path_factory.mktemp("alone") / "out"
    sweep(str(shelf), out=out, **GRADIENTS)
    return out


def about(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "run.json").read_text())
    times = ("wall_seconds", "started", "executor", "command", "code")
    return {name: value for name, value in found.items() if name not in times}


def as_alone(out: Path, alone: Path) -> None:
    same(anisoscope.Table.read(out), anisoscope.Table.read(alone))
    assert about(out) == about(alone)
    assert all((out / name).read_bytes() == (alone / name).read_bytes() for name in ("concepts.json", "map.parquet"))
    assert not (out / "jobs").exists()


def test_frozen_proxies_and_comparisons_between_neighbours_are_those_of_one_process(
    shelf: Path, alone: Path, tmp_path: Path
) -> None:
    executor = HereExecutor(3, losing={"checkpoint-30": 2})
    table = sweep(str(shelf), out=tmp_path / "out", executor=executor, **GRADIENTS)
    as_alone(tmp_path / "out", alone)
    for metric in ("amplification", "concept_turn"):
        assert len(table.where(metric=metric)), "the counter-test: something is compared"
    variants = set(table.arrow["variant"].to_pylist())
    assert any("fit=frozen" in each for each in variants) and any("of=update_raw" in each for each in variants)
    retried = json.loads((tmp_path / "out" / "run.json").read_text())["executor"]["retried"]
    assert retried == ["checkpoint-30 was lost and tried again: its node was lost"] * 2


@pytest.mark.skipif(not FORKS, reason="needs processes that begin as copies")
@pytest.mark.slow
def test_a_killed_sweep_goes_on_in_one_process_or_with_jobs(shelf: Path, alone: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    act = partial(sweep, str(shelf), out=out, **GRADIENTS)
    assert killed(lambda: act(executor=HereExecutor()), 18)
    done = len(list((out / "parts").glob("step-*")))
    assert 0 < done < 4, "in the middle"
    if list((out / "jobs").glob("checkpoint-*.pt")):
        shutil.copytree(out, tmp_path / "again" / "out")
        sweep(str(shelf), out=tmp_path / "again" / "out", resume=True, **GRADIENTS)
        as_alone(tmp_path / "again" / "out", alone)
    executor = HereExecutor()
    act(executor=executor, resume=True)
    as_alone(out, alone)
    assert len(executor.submitted) <= 5 - done, "what is saved is not measured again"


def test_what_a_job_wrote_before_the_sweep_was_killed_is_used(
    shelf: Path, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, taken = tmp_path / "out", "anisoscope.series.sweep.Sweeper._outcome"

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(taken, stop)
        with pytest.raises(KeyboardInterrupt):
            sweep(str(shelf), out=out, executor=HereExecutor(2), **GRADIENTS)
    assert (out / "jobs" / "checkpoint-0.pt").is_file()
    executor = HereExecutor(2)
    sweep(str(shelf), out=out, executor=executor, resume=True, **GRADIENTS)
    assert "checkpoint-0" not in executor.submitted and "checkpoint-40" in executor.submitted
    as_alone(out, alone)


@pytest.mark.skipif(not FORKS, reason="needs processes that begin as copies")
def test_a_local_worker_that_is_killed_in_the_middle_changes_nothing(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalProcesses, "method", "fork")
    measured, told = examination.describe, tmp_path / "killed"

    def once(*args: Any, **words: Any) -> None:
        if not told.exists():
            told.touch()
            os.kill(os.getpid(), 9)
        measured(*args, **words)

    one = sweep(str(shelf), out=tmp_path / "one" / "out", **LOOK)
    monkeypatch.setattr(examination, "describe", once)
    out = tmp_path / "out"
    other = sweep(str(shelf), out=out, executor="local", workers=2, **LOOK)
    same(one, other)
    notes = json.loads((out / "run.json").read_text())["executor"]["retried"]
    assert len(notes) == 1 and notes[0].endswith("its process ended with code -9")


@pytest.mark.slow
def test_a_job_that_is_lost_too_often_leaves_its_checkpoint_out_until_the_sweep_is_resumed(
    shelf: Path, tmp_path: Path
) -> None:
    out, executor = tmp_path / "out", HereExecutor(retries=1, losing={"checkpoint-10": 2})
    sweep(str(shelf), out=out, executor=executor, **LOOK)
    assert flags(out)[10] == ["failed: its node was lost (2 attempts)"] and flags(out)[30] == []
    warnings = about(out)["warnings"]
    assert "checkpoint-10 was left out: its node was lost (2 attempts)" in warnings
    table = sweep(str(shelf), out=out, executor=executor, resume=True, **LOOK)
    assert flags(out)[10] == [] and executor.submitted.count("checkpoint-30") == 1, "the others are not measured again"
    same(table, sweep(str(shelf), out=tmp_path / "one" / "out", **LOOK))


def test_options_of_executors_are_checked_before_anything_is_measured(shelf: Path, tmp_path: Path) -> None:
    act = partial(sweep, str(shelf), out=tmp_path / "out", **LOOK)
    cases: dict[str, dict[str, Any]] = {
        "unknown executor 'rays'; did you mean 'ray'": {"executor": "rays"},
        "workers does nothing without --executor": {"workers": 3},
        "job-gpus does nothing with --executor local": {"executor": "local", "job_gpus": 1},
        "partition does nothing with --executor ray": {"executor": "ray", "partition": "gpu"},
        "workers is 0; expected at least 1": {"executor": "local", "workers": 0},
        "is a int without start": {"executor": 3},
        "workers belongs to an executor by name": {"executor": HereExecutor(), "workers": 3},
        "remove-downloads cannot go": {"executor": "local", "revisions": ("a", "b"), "remove_downloads": True},
    }
    for words, options in cases.items():
        with pytest.raises(AnisoscopeError, match=words):
            act(**options)
    assert not (tmp_path / "out").exists()
