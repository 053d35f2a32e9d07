"""Jobs on a real Ray cluster of this machine with two workers, one of which is killed in the middle."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import anisoscope
from anisoscope.errors import AnisoscopeError
from anisoscope.execution.config import Resources
from anisoscope.execution.crew import Crew
from anisoscope.execution.job import DONE, LOST, REFUSED
from support.jobs import light_job
from support.tiny_series import LOOK, make_series, same

pytest.importorskip("ray")
import ray

from anisoscope.integrations.ray_executor import RayCluster


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    """One cluster for all tests of this file: a start takes seconds."""
    here = Path(__file__).parents[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(here.parent / "src"), str(here)]))
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


def test_a_task_whose_process_is_killed_is_handed_out_again(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [{"killed": True}, {"refused": True}, {"killed": "always"}, {}]
    with Crew(RayCluster(2, retries=1), tmp_path / "jobs") as crew:
        tasks = [{"value": n, "path": tmp_path / f"{n}.txt", **change} for n, change in enumerate(changes)]
        jobs = [crew.job(f"job-{task['value']}", light_job, task) for task in tasks]
        found = [outcome for _, outcome in crew.in_order(jobs)]
    assert [outcome.kind for outcome in found] == [DONE, REFUSED, LOST, DONE]
    assert found[1].reason == "the checkpoint is damaged; copy it again."
    assert "WorkerCrashedError" in found[2].reason and found[2].reason.endswith("(2 attempts)")
    assert (tmp_path / "0.txt").read_text() == "0" and ray.is_initialized(), "a cluster of somebody else goes on"


@pytest.mark.slow
def test_a_sweep_whose_worker_is_killed_is_that_of_one_process(tmp_path: Path) -> None:
    series = make_series(tmp_path / "series", (0, 10, 20, 30))
    look = {name: value for name, value in LOOK.items() if name != "metrics"}
    look |= {"preset": "standard", "draws": 19, "layers": (0, 1), "report": False}
    one = anisoscope.sweep(str(series), out=tmp_path / "one" / "out", **look)
    killed: list[int] = []

    def hear(what: str, done: int, of: int) -> None:
        if what == "checkpoint-10: gradients" and not killed:
            for process in psutil.Process().children(recursive=True):
                if any("anisoscope checkpoint-10" in word for word in process.cmdline()):
                    killed.append(process.pid)
                    process.kill()

    other = anisoscope.sweep(str(series), out=tmp_path / "out", executor="ray", workers=2, progress=hear, **look)
    assert killed, "in the middle of its work"
    same(one, other)
    (note,) = json.loads((tmp_path / "out" / "run.json").read_text())["executor"]["retried"]
    assert note.startswith("checkpoint-10 was lost and tried again: WorkerCrashedError")


def test_a_job_that_no_node_could_run_is_refused(tmp_path: Path) -> None:
    executor = RayCluster(2, resources=Resources(gpus=64))
    with pytest.raises(AnisoscopeError, match="asks for 1 CPU, 64 GPU, and no node of the Ray cluster has that"):
        executor.start(tmp_path)
    RayCluster(2, resources=Resources(gpus=64), options={"autoscale": "yes"}).start(tmp_path)  # nodes may come
    with pytest.raises(AnisoscopeError, match="unknown option of executor ray 'adress'; did you mean 'address'"):
        RayCluster(options={"adress": "auto"})


def test_an_address_without_a_cluster_is_told_with_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself gives up after a minute, by errors of several classes."""

    def refuses(**_: Any) -> None:
        raise ConnectionError("Ray is trying to start\nsee --debug")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuses)
    with pytest.raises(
        AnisoscopeError, match=r"answers at 'ray://x:1' \(ConnectionError: Ray is .* address=ray://HOST"
    ):
        RayCluster(options={"address": "ray://x:1"}).start(tmp_path)
