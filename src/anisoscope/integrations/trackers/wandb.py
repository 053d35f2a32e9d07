"""Weights & Biases: the active run, or one of its own, online or offline as the user has set W&B up.

W&B counts the rows of a run and drops what is logged at an earlier count. Results of a measured step may come some
steps late, so they have an axis of their own, `anisoscope/step`, and never move the count of a run that the user
opened: they join the user's next row, and wait for it, or for the end of that run, if they must.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from anisoscope.errors import AnisoscopeError
from anisoscope.integrations.trackers.tracker import Tracker, described, remember, remembered, run_name

_AXIS = "anisoscope/step"


class WandbTracker(Tracker):
    """Logs to `wandb.run` if it is active, else to a run of its own in the project `place`.

    Where neither a mode nor a key is configured, a run of its own is kept offline: W&B would ask for the key.
    """

    word, package, title = "wandb", "wandb", "Weights & Biases"
    _run: Any = None

    def _open(self, manifest: Mapping[str, Any]) -> None:
        import wandb

        active: Any = wandb.run
        self._ours, self._waiting, self._joined = active is None, deque[dict[str, Any]](), (-1, -1)
        if active is not None and self.place and active.project != self.place:
            raise AnisoscopeError(
                f"W&B has an active run of the project {active.project!r}, not {self.place!r}; finish it, or say "
                "log_to='wandb'"
            )
        self._run = self._begun(wandb, manifest) if active is None else active
        if not self._ours:
            self._run.config.update({"anisoscope": described(manifest)}, allow_val_change=True)
        self._run.define_metric(_AXIS, hidden=True)
        self._run.define_metric("anisoscope/*", step_metric=_AXIS)

    def _begun(self, wandb: Any, manifest: Mapping[str, Any]) -> Any:
        words: dict[str, Any] = {"name": run_name(manifest), "config": {"anisoscope": described(manifest)}}
        if self.place or not os.environ.get("WANDB_PROJECT"):
            words["project"] = self.place or "anisoscope"
        if before := remembered(self.word, manifest):
            words |= {"id": before, "resume": "allow"}
        if not os.environ.get("WANDB_MODE") and not _key_known(wandb):
            words["mode"] = "offline"
        run = wandb.init(**words)
        remember(self.word, manifest, str(run.id))
        return run

    def _log(self, numbers: dict[str, float], step: int) -> None:
        self._add({_AXIS: step, **numbers})

    def _log_values(self, name: str, values: list[float], step: int) -> None:
        import wandb

        self._add({_AXIS: step, name: wandb.Histogram(values)})

    def _log_figure(self, name: str, image: np.ndarray, step: int) -> None:
        import wandb

        self._add({_AXIS: step, f"{name}/over_layers": wandb.Image(image)})

    def _add(self, row: dict[str, Any]) -> None:
        if self._ours:
            self._run.log(row)
            return
        if self._waiting and self._waiting[-1][_AXIS] == row[_AXIS]:
            self._waiting[-1] |= row
        else:
            self._waiting.append(row)
        while self._waiting:
            count, axis = int(self._run.step), self._waiting[0][_AXIS]
            if self._joined[0] == count and self._joined[1] != axis:
                return  # this row of the user has the results of another step already
            self._run.log(self._waiting.popleft(), commit=False)
            self._joined = count, axis

    def _close(self, status: str) -> None:
        run, self._run = self._run, None
        if run is not None and self._ours:
            run.finish(exit_code=0 if status == "complete" else 1)
        elif run is not None and self._waiting:  # the user logged less often than steps were measured
            _at_its_end(run, list(self._waiting))


def _at_its_end(run: Any, rows: list[dict[str, Any]]) -> None:
    """Log rows when the user's run ends, since the user may still log with steps of their own."""

    def log() -> None:
        with contextlib.suppress(Exception):  # the end of a run of the user is not disturbed
            run.log({}, commit=True)
            for row in rows:
                run.log(row)

    try:
        from wandb.sdk.wandb_run import TeardownHook, TeardownStage

        run._teardown_hooks.append(TeardownHook(log, TeardownStage.EARLY))
    except (ImportError, AttributeError):  # a W&B of another version
        log()


def _key_known(wandb: Any) -> bool:
    """Whether W&B would find a key without asking for one."""
    try:
        return bool(wandb.login(prompt=False, verify=False))
    except Exception:  # a W&B of another version decides by itself
        return True
