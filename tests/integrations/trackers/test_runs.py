"""Trackers of whole runs: several processes, an interruption, trainings and sweeps of commands, arms of studies."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anisoscope.commands.pipeline import sweep, train
from anisoscope.errors import AnisoscopeError
from anisoscope.integrations.trackers import tracker as common
from anisoscope.results.query import Table
from anisoscope.studies.revisiting import Revisiting
from support.monitored import resumable
from support.ranks import ddp, in_ranks
from support.ranks import train as train_ranks
from support.tiny_runs import tiny

COSINE = "anisoscope/average_cosine/layer_01"


def _steps(folder: Path, name: str = COSINE) -> list[int]:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    return [event.step for event in reader.EventAccumulator(str(folder)).Reload().Scalars(name)]


@pytest.mark.slow
def test_of_several_processes_the_first_alone_logs(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")

    def act(rank: int) -> Any:
        log_to = f"tensorboard:{tmp_path / 'logs' / str(rank)}"
        return train_ranks(lambda _: [rank], wrap=ddp, metrics="average_cosine", plan=None, log_to=log_to)

    in_ranks(act, 2, tmp_path)
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["0"]


def test_a_resumed_training_sends_every_step_once_and_draws_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    drawn: list[Any] = []
    draw = common.panels_image
    monkeypatch.setattr(common, "panels_image", lambda panels: (drawn.append(panels[0]), draw(panels))[1])
    words: dict[str, Any] = {"log_to": "tensorboard", "metrics": "average_cosine", "plan": None}
    with pytest.raises(KeyboardInterrupt):
        resumable(tmp_path / "run", stop=2, **words)
    drawn.clear()
    table = resumable(tmp_path / "run", resume=True, **words)
    assert _steps(tmp_path / "run" / "tensorboard") == table.steps == [0, 1, 2, 4, 5]
    (cosine,) = (panel for panel in drawn if panel.title.startswith("Average cosine"))
    assert {series.label for series in cosine.series} == {f"step {step}" for step in table.steps}


class Broken:
    """A tracker that loses its connection."""

    def start(self, manifest: Any) -> None: ...

    def write(self, rows: Table, step: int) -> None:
        raise ConnectionError("gone")

    def finish(self, manifest: Any) -> None: ...


def test_a_training_and_a_sweep_of_its_checkpoints_log_their_steps(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    watch = {"when": "0,5,12", "contexts": 16}
    run = tmp_path / "run"
    train(tiny(), run, monitor="average_cosine", watch=watch, report=False, log_to=["tensorboard", Broken()])
    assert _steps(run / "tensorboard") == [0, 5, 12]
    assert "the sink Broken failed in write and was dropped" in (run / "run.json").read_text()
    assert _steps(run / "tensorboard", "anisoscope/loss") == [0, 5]
    out, words = tmp_path / "sweep", {"metrics": "average_cosine", "tokens": 256, "context": 16, "report": False}
    table = sweep(run / "checkpoints", out=out, log_to=[f"tensorboard:{tmp_path / 'tb'}", Broken()], **words)
    assert [words for words in table.about["warnings"] if "Broken" in words] == [
        "the sink Broken failed in write and was dropped (ConnectionError: gone)"
    ]
    assert _steps(tmp_path / "tb") == table.where(metric="average_cosine").steps == [0, 5, 10, 12]
    assert "log_to" not in (run / "run.json").read_text(), "where numbers go is no option of the training"


def test_trackers_of_a_training_without_a_named_monitor_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AnisoscopeError, match="log_to does nothing here"):
        train(tiny(), tmp_path / "run", log_to="tensorboard")


def test_each_arm_of_a_study_is_a_run_of_its_own(tmp_path: Path) -> None:
    config, folder = SimpleNamespace(watch={}, chosen_seeds=(0, 1)), SimpleNamespace(path=tmp_path)
    study = Revisiting(config, folder, log_to=("tensorboard:logs", "wandb:project"))
    arm = study.arm(SimpleNamespace(model="decoder", seed=1, training=None))
    assert arm.log_to == ("tensorboard:logs/decoder-seed1", "wandb:project")
