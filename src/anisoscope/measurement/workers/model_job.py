"""Models of a profile that are measured by jobs elsewhere: what a job is told, and the file of its results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anisoscope
from anisoscope.errors import AnisoscopeError
from anisoscope.execution.crew import Crew
from anisoscope.execution.job import DONE, Outcome, Work, arrived
from anisoscope.measurement.config import ProfileConfig
from anisoscope.measurement.evaluation import Records
from anisoscope.measurement.inspection import Entry
from anisoscope.results.folder import replace_file


@dataclass(frozen=True)
class ModelTask:
    """The work of one job: a model, and the run folder that its rows and arrays go to."""

    config: ProfileConfig
    folder: Path
    key: str
    spec: str

    @property
    def result(self) -> Path:
        return self.folder / "jobs" / f"{self.key}.json"

    def write(self, records: Records, entry: Entry, peaks: Mapping[str, int]) -> None:
        """Write the results of the model; JSON keeps every digit."""
        found = {"version": anisoscope.__version__, "records": records, "entry": entry, "peaks": dict(peaks)}
        text = json.dumps(found, default=lambda value: value.item())  # numbers of numpy
        replace_file(self.result, lambda path: path.write_text(text, encoding="utf-8"))

    def read(self) -> dict[str, Any] | None:
        """What was written; None if there is nothing, or another version wrote it."""
        try:
            found = json.loads(self.result.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) and found.get("version") == anisoscope.__version__ else None


def results_of(crew: Crew, tasks: Sequence[ModelTask], work: Work) -> Iterator[tuple[ModelTask, dict[str, Any] | str]]:
    """The results of each model in order, or why there are none; those that are there are not measured again."""
    fresh = [task for task in tasks if task.read() is None]
    outcomes = crew.in_order([crew.job(task.key, work, task) for task in fresh])
    for task in tasks:
        outcome = next(outcomes)[1] if task.key in {each.key for each in fresh} else Outcome(DONE)
        there = outcome.kind == DONE and arrived(task.result)
        yield task, (task.read() if there else None) or outcome.reason or "its job ended without results"


def refuse_failed(failed: Mapping[str, str], number: int, *, some: bool) -> None:
    """An error if some of the models (of `number`) could not be measured; `some`: whether others were."""
    if not failed:
        return
    name, reason = next(iter(failed.items()))
    rest = "the others were measured" if some else "nothing was measured"
    raise AnisoscopeError(
        f"{len(failed)} of {number} models failed (the first, {name}: {reason.rstrip('.')}), and {rest}; mend that, "
        "and the same command with --resume goes on."
    )
