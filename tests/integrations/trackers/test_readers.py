"""What a tracker was sent is read back with the tracker's own reader; runs of the user stay the user's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from anisoscope.integrations.trackers.catalogue import trackers
from anisoscope.results.folder import RunFolder
from anisoscope.results.query import Table
from support.tracked import NAMES, cosine, logged_at, rows_at, tell

PICTURES = {f"anisoscope/{name}" for name in ("average_cosine", "tangent_enrichment", "attention_sharpness")}
COSINE = "anisoscope/average_cosine/layer_02"


# -- TensorBoard -------------------------------------------------------------------------------------------------------


def _events(folder: Path) -> Any:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    return reader.EventAccumulator(str(folder)).Reload()


def test_tensorboard_reads_scalars_histograms_and_figures(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    tell(trackers(f"tensorboard:{tmp_path}")[0], [0, 4])
    found = _events(tmp_path)
    tags = found.Tags()
    assert set(tags["scalars"]) == NAMES
    assert tags["histograms"] == ["anisoscope/attention_sharpness/heads"]
    assert set(tags["images"]) == PICTURES
    assert found.Images("anisoscope/average_cosine")[0].encoded_image_string.startswith(b"\x89PNG")
    sent = [(e.step, e.value) for e in found.Scalars(COSINE)]
    assert sent == [(step, pytest.approx(cosine(step, 2))) for step in (0, 4)]
    assert found.Histograms("anisoscope/attention_sharpness/heads")[0].histogram_value.num == 12


def test_a_resumed_run_replaces_what_it_measures_again_in_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for steps, resumed in (([0, 4, 8], -1), ([8, 12], 4)):
        tracker = trackers(f"tensorboard:{tmp_path}")[0]
        tracker.figures = False
        tell(tracker, steps, folder=tmp_path / "run", resumed=resumed)
    assert [e.step for e in _events(tmp_path).Scalars(COSINE)] == [0, 4, 8, 12]


# -- MLflow ------------------------------------------------------------------------------------------------------------


def test_mlflow_reads_metrics_tags_and_figures_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    tell(trackers(f"mlflow:{tmp_path / 'store'}")[0], [4, 0], folder=tmp_path / "run")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "store").as_uri())
    experiment = client.get_experiment_by_name("anisoscope")
    (run,) = client.search_runs([experiment.experiment_id])
    assert set(run.data.metrics) == NAMES
    assert {m.step: m.value for m in client.get_metric_history(run.info.run_id, COSINE)} == pytest.approx(
        {step: cosine(step, 2) for step in (0, 4)}
    )
    assert run.data.tags["anisoscope.architecture"] == "Tiny" and run.info.status == "FINISHED"
    assert str(tmp_path) not in json.dumps(run.data.tags)
    files = {file.path for file in client.list_artifacts(run.info.run_id, "anisoscope")}
    assert files == {f"{name}_over_layers.png" for name in PICTURES}


def test_a_resumed_run_goes_on_with_its_run_of_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    for steps, resumed in (([0, 4], -1), ([8], 4)):
        tracker = trackers(f"mlflow:{tmp_path / 'store'}")[0]
        tracker.figures = False
        tell(tracker, steps, folder=tmp_path / "run", resumed=resumed)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "store").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("anisoscope").experiment_id])
    assert sorted(m.step for m in client.get_metric_history(run.info.run_id, COSINE)) == [0, 4, 8]


def test_an_active_run_of_mlflow_is_used_and_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    try:
        with mlflow.start_run() as mine:
            tell(trackers("mlflow")[0], [0])
            assert mlflow.active_run().info.run_id == mine.info.run_id
        assert set(mlflow.MlflowClient().get_run(mine.info.run_id).data.metrics) == NAMES
    finally:
        mlflow.set_tracking_uri(before)


# -- Weights & Biases --------------------------------------------------------------------------------------------------


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    found = pytest.importorskip("wandb")
    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true", "DISABLE_GIT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    yield found
    found.teardown()


def _records(folder: Path) -> list[dict[str, Any]]:
    """The records of all offline runs, as W&B's own reader of such files prints them."""
    found = []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        found += [json.loads(line) for line in lines if line.startswith("{")]
    return found


def _history(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record["history"]["item"] for record in records if record["type"] == "history"]


def _sent(history: list[dict[str, Any]]) -> dict[int, float]:
    return {row["anisoscope/step"]: row[COSINE] for row in history if COSINE in row}


def test_wandb_reads_an_offline_run_in_which_results_came_late(wandb: Any, tmp_path: Path) -> None:
    tell(trackers("wandb:geometry")[0], [4, 0], folder=tmp_path / "run")
    assert wandb.run is None, "its own run is closed"
    records = _records(tmp_path)
    history = _history(records)
    assert _sent(history) == pytest.approx({step: cosine(step, 2) for step in (0, 4)})
    assert {name for row in history for name in row if name in NAMES} == NAMES
    assert any(row.get("anisoscope/attention_sharpness/heads._type") == "histogram" for row in history)
    assert {f"{name}/over_layers._type" for name in PICTURES} <= {name for row in history for name in row}
    axes = {r["metric"].get("glob_name"): r["metric"].get("step_metric") for r in records if r["type"] == "metric"}
    assert axes["anisoscope/*"] == "anisoscope/step"
    (run,) = {r["run"]["project"] for r in records if r["type"] == "run"}
    assert run == "geometry"


@pytest.mark.slow
def test_an_active_run_of_wandb_keeps_every_row_of_the_user_and_stays_open(wandb: Any, tmp_path: Path) -> None:
    mine = wandb.init(project="mine")
    tracker = trackers("wandb")[0]
    tracker.start({"name": "tiny", "models": [{}], "config": {}})
    for step in range(4):  # each measured step comes before what the user logs of it
        tracker.write(rows_at(step), step)
        tracker.write(logged_at(step), step)
        mine.log({"train/loss": float(step)}, step=step)
    tracker.write(rows_at(4), 4)
    tracker.write(rows_at(5), 5)  # the user logs nothing in between
    tracker.finish({"status": "complete"})
    assert wandb.run is mine, "it is the user's to close"
    mine.log({"train/loss": 4.0}, step=4)  # what the user logs afterwards is not lost either
    mine.finish()
    history = _history(_records(tmp_path))
    assert {row["_step"]: row["train/loss"] for row in history if "train/loss" in row} == dict(enumerate(range(5)))
    assert _sent(history) == pytest.approx({step: cosine(step, 2) for step in range(6)})


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_its_run_of_wandb(wandb: Any, tmp_path: Path) -> None:
    for steps, resumed in (([0, 4], -1), ([8], 4)):
        tracker = trackers("wandb")[0]
        tracker.figures = False
        tell(tracker, steps, folder=tmp_path / "run", resumed=resumed)
    records = _records(tmp_path)
    assert len({r["run"]["run_id"] for r in records if r["type"] == "run"}) == 1
    assert set(_sent(_history(records))) == {0, 4, 8}


# -- trackio -----------------------------------------------------------------------------------------------------------


_TOLD = """
import sys
from pathlib import Path
import trackio
from anisoscope.integrations.trackers.catalogue import trackers
from support.tracked import tell
run = Path(sys.argv[1])
mine = None
for steps, resumed in (([4, 0], -1), ([8], 4)):
    tell(trackers("trackio:geometry")[0], steps, folder=run, resumed=resumed)
    assert trackio.context_vars.current_run.get() is None, "its own run is closed"
mine = trackio.init("mine", "mine", embed=False, auto_log_cpu=False, auto_log_gpu=False)
trackio.log({"loss": 1.0})
tell(trackers("trackio")[0], [7])
trackio.log({"loss": 2.0})
assert trackio.context_vars.current_run.get() is mine, "it is the user's to close"
trackio.finish()
"""
_READ = """
import json
from trackio.sqlite_storage import SQLiteStorage
print(json.dumps({project: {run["name"]: SQLiteStorage.get_logs(project, run["name"], run_id=run["id"])
    for run in SQLiteStorage.get_run_records(project)} for project in ("geometry", "mine")}))
"""


@pytest.mark.slow
def test_trackio_reads_its_own_runs_and_the_active_run_of_the_user(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    (tmp_path / "run").mkdir()
    table = Table.concat([rows_at(step) for step in (0, 4, 8)])  # what the folder of a resumed run holds
    RunFolder(tmp_path / "run").write_table(table)
    RunFolder(tmp_path / "run").write_about({"kind": "monitor", "status": "complete"})
    places = [str(Path(__file__).parents[3] / "src"), str(Path(__file__).parents[2])]
    env = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "PYTHONPATH": os.pathsep.join(places)}
    subprocess.run([sys.executable, "-c", _TOLD, str(tmp_path / "run")], env=env, check=True, capture_output=True)
    done = subprocess.run([sys.executable, "-c", _READ], env=env, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    (logs,) = found["geometry"].values()  # one run, which was gone on with
    assert {row["step"]: row[COSINE] for row in logs if COSINE in row} == pytest.approx(
        {step: cosine(step, 2) for step in (0, 4, 8)}
    )
    assert {name for row in logs for name in row if name in NAMES} == NAMES
    assert {f"{name}/over_layers" for name in PICTURES} <= {name for row in logs for name in row}
    theirs = found["mine"]["mine"]
    assert {row["step"]: row["loss"] for row in theirs if "loss" in row} == {0: 1.0, 1: 2.0}, "its count is the user's"
    assert [row["step"] for row in theirs if COSINE in row] == [7]
