"""trackio: the active run, or one of its own, kept on this machine as long as the user configured nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from anisoscope.integrations.trackers.tracker import Tracker, described, remember, remembered, run_name

_PROJECT = "anisoscope"


class TrackioTracker(Tracker):
    """Logs to the active run of trackio, else to a run of its own in the project `place`."""

    word, package, title = "trackio", "trackio", "trackio"
    _run: Any = None

    def _open(self, manifest: Mapping[str, Any]) -> None:
        import trackio
        from trackio import context_vars

        self._run = context_vars.current_run.get()
        self._ours = self._run is None
        if self._ours:
            before = remembered(self.word, manifest)
            words: dict[str, Any] = {"resume": "allow"} if before else {}
            words |= {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
            about = {"anisoscope": described(manifest)}
            self._run = trackio.init(self.place or _PROJECT, before or run_name(manifest), config=about, **words)
            remember(self.word, manifest, str(self._run.name))

    def _log(self, numbers: dict[str, Any], step: int) -> None:
        if self._ours:
            self._run.log(numbers, step=step)
            return
        count = getattr(self._run, "_next_step", None)  # what the user logs without a step must not jump to ours
        self._run.log(numbers, step=step)
        if count is not None:
            self._run._next_step = count

    def _log_values(self, name: str, values: list[float], step: int) -> None:
        import trackio

        self._log({name: trackio.Histogram(values)}, step)

    def _log_figure(self, name: str, image: np.ndarray, step: int) -> None:
        import trackio

        self._log({f"{name}/over_layers": trackio.Image(image)}, step)

    def _close(self, status: str) -> None:
        run, self._run = self._run, None
        if run is not None and self._ours:
            from trackio import context_vars

            run.finish()
            if context_vars.current_run.get() is run:
                context_vars.current_run.set(None)
