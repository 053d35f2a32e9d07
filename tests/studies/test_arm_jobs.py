"""Arms of a study as jobs: a lost one is tried again, and goes on though its worker left a lock behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from anisoscope.errors import AnisoscopeError
from anisoscope.execution.local import LocalProcesses
from anisoscope.results.folder import RunFolder
from anisoscope.results.lock import LOCK
from anisoscope.studies.arms import JobRunner
from anisoscope.studies.config import StudyArm
from anisoscope.studies.shape import ShapeConfig, ShapeStudy
from anisoscope.training.config import TrainConfig
from support.jobs import HereExecutor
from support.light_arms import light_work
from support.tiny_series import FORKS


@pytest.fixture
def arm(tmp_path: Path) -> Callable[[str], StudyArm]:
    def make(name: str) -> StudyArm:
        (tmp_path / name).mkdir()
        return StudyArm(name, tmp_path / name, TrainConfig(device="cpu"), {}, tmp_path / "corpus")

    return make


@pytest.mark.skipif(not FORKS, reason="needs processes that begin as copies")
def test_errors_of_arms_come_back_and_lost_ones_are_tried_again(
    arm: Callable[[str], StudyArm], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalProcesses, "method", "fork")
    arms = [arm(name) for name in ("failing", "killed", "good", "done")]
    (tmp_path / "done" / "run.json").write_text('{"status": "complete"}')
    (tmp_path / "killed" / LOCK).write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
    told: list[tuple[str, int, int]] = []
    runner = JobRunner(LocalProcesses(2, retries=1), tmp_path)
    failed = runner.map(light_work, arms, lambda *words: told.append(words))
    killed = "its process ended with code -9"
    assert failed == {"failing": "the loss became nan.", "killed": f"{killed} (2 attempts)"}
    assert runner.retried == [f"killed was lost and tried again: {killed}"]
    assert not (tmp_path / "killed" / LOCK).exists(), "its worker is gone"
    finished = {name: (tmp_path / name / "finished").is_file() for name in ("good", "done")}
    assert finished == {"good": True, "done": False}, "what is complete costs no job"
    assert ("good: train", 2, 2) in told and told[-1] == ("arms", 4, 4)


def test_a_preset_that_trains_nothing_has_no_use_for_an_executor(tmp_path: Path) -> None:
    config = ShapeConfig(preset="paper")
    study = ShapeStudy(config, RunFolder.create(tmp_path / "study", {}, resume=False), executor=HereExecutor())
    with pytest.raises(AnisoscopeError, match="an executor runs the arms that a study trains, and preset paper"):
        study.run()
