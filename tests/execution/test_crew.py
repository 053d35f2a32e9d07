"""Jobs come back in order, lost ones are tried again, and what another attempt would meet again is not."""

from __future__ import annotations

import json
import os
import platform
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anisoscope.execution.crew import AHEAD, Crew
from anisoscope.execution.job import DONE, LOST, REFUSED, TOKEN, Job, perform
from anisoscope.execution.local import LocalProcesses
from anisoscope.results.lock import LOCK, _identity
from support.jobs import HereExecutor, light_job
from support.tiny_series import FORKS


def tasks_in(folder: Path, *changes: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"path": folder / f"{number}.txt", "value": number, **change} for number, change in enumerate(changes)]


def run(crew: Crew, tasks: list[dict[str, Any]]) -> list[tuple[str, str]]:
    jobs = [crew.job(f"job-{task['value']}", light_job, task) for task in tasks]
    return [(outcome.kind, outcome.reason) for _, outcome in crew.in_order(jobs)]


def test_outcomes_come_in_the_order_of_jobs_and_lost_ones_are_tried_again(tmp_path: Path) -> None:
    executor = HereExecutor(losing={"job-0": 2, "job-2": 3})
    told: list[tuple[str, int, int]] = []
    with Crew(executor, tmp_path / "jobs", lambda *words: told.append(words)) as crew:
        found = run(crew, tasks_in(tmp_path, {}, {"refused": True}, {}, {"wrong": True}))
    damaged = (REFUSED, "the checkpoint is damaged; copy it again.")
    wrong = (LOST, "ZeroDivisionError: nothing to divide (3 attempts)")
    assert found == [(DONE, ""), damaged, (LOST, "its node was lost (3 attempts)"), wrong]
    assert [executor.submitted.count(f"job-{n}") for n in range(4)] == [3, 1, 3, 3], "what is refused is not repeated"
    assert (tmp_path / "0.txt").read_text() == "0" and ("job-0: work", 2, 2) in told
    assert "job-0 was lost and tried again: its node was lost" in crew.notes
    assert "ZeroDivisionError" in (tmp_path / "jobs" / "job-3.error.txt").read_text()
    assert executor.closed and not (tmp_path / "jobs" / TOKEN).exists()


def test_without_retries_a_lost_job_is_lost(tmp_path: Path) -> None:
    executor = HereExecutor(retries=0, losing={"job-0": 1})
    with Crew(executor, tmp_path / "jobs") as crew:
        assert run(crew, tasks_in(tmp_path, {}, {})) == [(LOST, "its node was lost"), (DONE, "")]


def test_only_so_many_results_wait_for_the_first(tmp_path: Path) -> None:
    executor = HereExecutor(workers=1)
    with Crew(executor, tmp_path / "jobs") as crew:
        jobs = [crew.job(f"job-{task['value']}", light_job, task) for task in tasks_in(tmp_path, *[{}] * 9)]
        outcomes = crew.in_order(jobs)
        next(outcomes)
        assert len(executor.submitted) <= 1 + AHEAD + 1
        assert len(list(outcomes)) == 8 and len(executor.submitted) == 9


def test_a_worker_that_does_not_share_the_folder_says_so(tmp_path: Path) -> None:
    job = Job("one", light_job, {"path": tmp_path / "x.txt", "value": 1}, tmp_path / "jobs", "mine", os.getcwd())
    assert "does not see" in perform(job).reason and perform(job).kind == REFUSED
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / TOKEN).write_text("of another run")
    assert "sees another folder" in perform(job).reason
    (tmp_path / "jobs" / TOKEN).write_text("mine")
    assert "install the same version" in perform(replace(job, version="0.0.1")).reason
    assert perform(job).kind == DONE, "the counter-test"


def test_a_job_that_another_process_is_at_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anisoscope.execution.job._DYING", 0.0)
    desk = tmp_path / "jobs" / "job-0.worker"
    desk.mkdir(parents=True)
    (desk / LOCK).write_text(json.dumps({**_identity(os.getppid()), "command": "anisoscope sweep", "since": "today"}))
    with Crew(HereExecutor(losing={"job-0": 1}), tmp_path / "jobs") as crew:
        found = run(crew, tasks_in(tmp_path, {}, {}))
    who = f"process {os.getppid()} on {platform.node()} ('anisoscope sweep') since today"
    assert found[0][0] == REFUSED and found[0][1].startswith(f"job-0 is still worked on by {who}"), found
    assert found[1] == (DONE, "") and not (tmp_path / "0.txt").exists()
    assert [path.name for path in (tmp_path / "jobs").iterdir()] == ["job-0.worker"], "locks are taken off"


def test_a_job_whose_worker_is_gone_is_done_by_the_next(tmp_path: Path) -> None:
    """Of this machine when its process is gone; of another one when the executor says so."""
    child = os.fork()
    if not child:
        time.sleep(60)
    gone = _identity(child)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for number, owner in enumerate((gone, {**gone, "host": "node-7"})):
        (tmp_path / "jobs" / f"job-{number}.worker").mkdir(parents=True)
        (tmp_path / "jobs" / f"job-{number}.worker" / LOCK).write_text(json.dumps(owner))
    with Crew(HereExecutor(losing={"job-1": 1}), tmp_path / "jobs") as crew:
        assert run(crew, tasks_in(tmp_path, {}, {})) == [(DONE, ""), (DONE, "")]


@pytest.mark.skipif(not FORKS, reason="needs processes that begin as copies")
def test_a_local_process_that_is_killed_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalProcesses, "method", "fork")
    tasks = tasks_in(tmp_path, {"killed": True}, {"killed": "always"}, {}, {"refused": True})
    with Crew(LocalProcesses(2, retries=1), tmp_path / "jobs") as crew:
        found = run(crew, tasks)
    killed = "its process ended with code -9"
    assert [kind for kind, _ in found] == [DONE, LOST, DONE, REFUSED] and found[1][1] == f"{killed} (2 attempts)"
    assert crew.notes[0].endswith(killed) and (tmp_path / "2.txt").read_text() == "2"
    pids = [int((tmp_path / f"{n}.begun").read_text()) for n in range(4)]
    assert os.getpid() not in pids, "the counter-test: they were other processes"
