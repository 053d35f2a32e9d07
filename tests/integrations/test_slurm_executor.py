"""Jobs of Slurm by submitit: its local executor runs the same code in processes of this machine."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import anisoscope
from anisoscope.errors import AnisoscopeError
from anisoscope.execution.config import ExecutorConfig, Resources
from anisoscope.execution.crew import Crew
from anisoscope.execution.job import DONE, REFUSED, Outcome
from support.jobs import light_job, long_job
from support.tiny_series import LOOK, make_series, same

pytest.importorskip("submitit")
from anisoscope.integrations.slurm_executor import SlurmCluster

LOCAL = {"cluster": "local"}


@pytest.fixture(autouse=True)
def _path_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes find the package and the helpers of tests."""
    here = Path(__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(here.parent / "src"), str(here)]))


@pytest.mark.slow
def test_a_job_that_is_killed_is_submitted_again(tmp_path: Path) -> None:
    tasks: list[dict[str, Any]] = [{"value": 1, "killed": True}, {"value": 2, "refused": True}]
    with Crew(SlurmCluster(2, options=LOCAL), tmp_path / "jobs") as crew:
        jobs = [crew.job(f"job-{t['value']}", light_job, {**t, "path": tmp_path / f"{t['value']}.txt"}) for t in tasks]
        found = {job.name: outcome for job, outcome in crew.in_order(jobs)}
    assert {name: outcome.kind for name, outcome in found.items()} == {"job-1": DONE, "job-2": REFUSED}
    assert (tmp_path / "1.txt").read_text() == "1"
    assert len(crew.notes) == 1 and crew.notes[0].startswith("job-1 was lost and tried again: job "), crew.notes


def test_resources_become_options_of_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("sbatch", "echo 'Submitted batch job 1'"), ("srun", "exit 0")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    need = Resources(cpus=4, gpus=2.0, memory_gb=24, minutes=90, partition="long")
    executor = SlurmCluster(3, resources=need, options={"account": "geometry", "setup": "module load cuda"})
    executor.start(tmp_path / "jobs")
    with Crew(executor, tmp_path / "jobs") as crew:
        executor.submit(crew.job("checkpoint-10", light_job, {}))
    (script,) = (tmp_path / "jobs" / "slurm").glob("*_submission.sh")
    lines = script.read_text().splitlines()
    wanted = ("cpus-per-task=4", "gpus-per-node=2", "mem=24GB", "time=90", "partition=long", "account=geometry")
    assert {f"#SBATCH --{option}" for option in (*wanted, "job-name=anisoscope-checkpoint-10")} <= set(lines)
    assert "module load cuda" in lines


def test_what_slurm_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    cases: dict[str, dict[str, Any]] = {
        "there is no sbatch on this machine": {},
        "Slurm gives whole GPUs": {"job_gpus": 0.5},
        "cluster is 'moon'; expected slurm or local": {"executor_option": ("cluster=moon",)},
        "unknown option of executor slurm 'colour'": {"executor_option": ("colour=red",)},
    }
    for words, options in cases.items():
        with pytest.raises(AnisoscopeError, match=words):
            ExecutorConfig("slurm", **options).make()
    assert ExecutorConfig("slurm", executor_option=("cluster=local",)).make() is not None, "the counter-test"


@pytest.mark.slow
def test_a_sweep_by_submitit_is_that_of_one_process(tmp_path: Path) -> None:
    series = make_series(tmp_path / "series", (0, 10, 20))
    look = {name: value for name, value in LOOK.items() if name != "metrics"} | {"preset": "standard", "draws": 19}
    one = anisoscope.sweep(str(series), out=tmp_path / "one" / "out", report=False, **look)
    words: dict[str, Any] = {"executor": "slurm", "workers": 2, "executor_option": "cluster=local"}
    other = anisoscope.sweep(str(series), out=tmp_path / "out", report=False, **words, **look)
    same(one, other)
    assert json.loads((tmp_path / "out" / "run.json").read_text())["executor"]["kind"] == "SlurmCluster"


def begun(path: Path) -> list[int]:
    """The processes that began the job so far, at least one."""
    until = time.monotonic() + 120
    while not path.exists() or not path.read_text().endswith("\n"):
        assert time.monotonic() < until
        time.sleep(0.05)
    return [int(line) for line in path.read_text().split()]


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["command", "watcher"])
def test_a_job_that_outlives_its_command_or_watcher_has_no_second_worker(
    killed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes that submitit begins on this machine go on when the one is killed that began them."""
    monkeypatch.setattr("anisoscope.execution.job._DYING", 0.1)
    task = {"value": 1, "path": tmp_path / "1.txt"}

    def run() -> tuple[Outcome, list[str]]:
        with Crew(SlurmCluster(1, options=LOCAL), tmp_path / "jobs") as crew:
            return crew.run(crew.job("job-1", long_job, task)), crew.notes

    if killed == "command":
        if not (command := os.fork()):
            run()
            os._exit(0)
        (first,) = begun(tmp_path / "1.begun")
        os.kill(command, signal.SIGKILL)
        os.waitpid(command, 0)
        outcome, _ = run()
    else:
        watch = threading.Thread(target=lambda: os.kill(psutil.Process(begun(tmp_path / "1.begun")[0]).ppid(), 9))
        watch.start()
        outcome, notes = run()
        watch.join()
        (first,) = begun(tmp_path / "1.begun")
        assert len(notes) == 1 and notes[0].startswith("job-1 was lost and tried again"), "it was taken for lost"
    assert outcome.kind == REFUSED
    assert outcome.reason.startswith(f"job-1 is still worked on by process {first} on "), outcome.reason
    assert "wait until it ends or stop it" in outcome.reason
    (tmp_path / "1.go").touch()
    psutil.Process(first).wait(120)
    assert begun(tmp_path / "1.begun") == [first] and (tmp_path / "1.txt").read_text() == "1"
    assert run()[0].kind == DONE, "the counter-test: with the first gone the next one works"
    assert len(begun(tmp_path / "1.begun")) == 2
