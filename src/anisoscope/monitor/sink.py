"""Where a monitor sends its rows beside the run folder: trackers and the like.

The folder is no sink: it also keeps the state that a resumed run needs, and a run that cannot be written must fail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from anisoscope.results.query import Table


class ResultSink(Protocol):
    """Receives every row of a monitored run once; rows from before a resumption are not sent again."""

    def start(self, manifest: Mapping[str, Any]) -> None:
        """The run begins; `manifest` holds its options under `config` and the model's entry under `models`."""

    def write(self, rows: Table, step: int) -> None:
        """Rows of a measured step: what was measured, and, in a later call, what the training logged of it."""

    def finish(self, manifest: Mapping[str, Any]) -> None:
        """The run has ended; `manifest` also holds its `status` (complete or interrupted) and `warnings`."""


class ResultSinks:
    """Several sinks; one that raises is noted and dropped, since a tracker must not stop a training."""

    def __init__(self, sinks: Sequence[ResultSink], notes: list[str]) -> None:
        self.sinks, self.notes = list(sinks), notes

    def start(self, manifest: Mapping[str, Any]) -> None:
        self._call("start", manifest)

    def write(self, rows: Table, step: int) -> None:
        self._call("write", rows, step)

    def finish(self, manifest: Mapping[str, Any]) -> None:
        self._call("finish", manifest)

    def _call(self, method: str, *args: Any) -> None:
        for sink in list(self.sinks):
            try:
                getattr(sink, method)(*args)
            except Exception as error:
                self.sinks.remove(sink)
                reason = f"{type(error).__name__}: {error}".rstrip(": ")
                self.notes.append(f"the sink {type(sink).__name__} failed in {method} and was dropped ({reason})")
