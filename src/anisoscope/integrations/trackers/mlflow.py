"""MLflow: the active run, or one of its own, on the user's tracking server or in a folder."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from anisoscope.integrations.trackers.tracker import Tracker, described, remember, remembered, run_name

_EXPERIMENT, _FOLDER = "anisoscope", "mlruns"
_ALLOWED = "MLFLOW_ALLOW_FILE_STORE"  # MLflow 3 keeps runs in a folder only where this says so


class MlflowTracker(Tracker):
    """Logs to the active run, else to a run of its own; `place` is a folder that keeps runs as files.

    Without `place` the user's tracking URI is used. Where none is set and MLflow has no database (mlflow-skinny), the
    folder `mlruns` is.
    """

    word, package, title = "mlflow", "mlflow", "MLflow"
    _client: Any = None

    def _open(self, manifest: Mapping[str, Any]) -> None:
        import mlflow

        active = None if self.place else mlflow.active_run()
        self._ours = active is None
        self._client = self._store(mlflow)
        if active is not None:
            self._run = active.info.run_id
        elif before := remembered(self.word, manifest):
            self._run = before
            self._client.update_run(before, status="RUNNING")
        else:
            self._run = self._begun(mlflow, manifest)
            remember(self.word, manifest, self._run)
        for name, value in described(manifest).items():
            self._client.set_tag(self._run, f"anisoscope.{name}", value)

    def _store(self, mlflow: Any) -> Any:
        folder = self.place
        if (
            not folder
            and self._ours
            and not mlflow.is_tracking_uri_set()
            and not importlib.util.find_spec("sqlalchemy")
        ):
            folder = _FOLDER
        if not folder:
            return mlflow.MlflowClient()
        with _files_allowed():
            return mlflow.MlflowClient(tracking_uri=folder if "://" in folder else Path(folder).absolute().as_uri())

    def _begun(self, mlflow: Any, manifest: Mapping[str, Any]) -> str:
        named = os.environ.get("MLFLOW_EXPERIMENT_NAME") or _EXPERIMENT
        found = self._client.get_experiment_by_name(named)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(named)
        return str(self._client.create_run(experiment, run_name=run_name(manifest)).info.run_id)

    def _log(self, numbers: dict[str, float], step: int) -> None:
        import time

        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._run, [Metric(name, value, now, step) for name, value in numbers.items()])

    def _log_figure(self, name: str, image: np.ndarray, step: int) -> None:
        self._client.log_image(self._run, image, f"{name}_over_layers.png")

    def _close(self, status: str) -> None:
        client, self._client = self._client, None
        if client is not None and self._ours:
            client.set_terminated(self._run, "FINISHED" if status == "complete" else "KILLED")


@contextlib.contextmanager
def _files_allowed() -> Iterator[None]:
    """Around the opening of a folder that the user named: MLflow takes it, unless the user has decided otherwise."""
    if _ALLOWED in os.environ:
        yield
        return
    os.environ[_ALLOWED] = "true"
    try:
        yield
    finally:
        os.environ.pop(_ALLOWED, None)
