"""The logger of the trainer that runs a callback, and with it every tracker that the trainer reports to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from anisoscope.integrations.trackers.tracker import Tracker

Log = Callable[[dict[str, float], int], None]  # numbers by name, and the step at which they were measured


class HostTracker(Tracker):
    """Logs through a trainer; `log` is how, and `scalars` are as in other trackers."""

    word = "trainer"

    def __init__(self, log: Log, **options: Any) -> None:
        super().__init__(figures=False, **options)
        self._host = log

    def _open(self, manifest: Mapping[str, Any]) -> None:
        """The trainer has begun."""

    def _log(self, numbers: dict[str, float], step: int) -> None:
        self._host(dict(numbers), step)
