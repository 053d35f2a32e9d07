"""The common part of the trackers: a few named numbers of every measured step, histograms, and figures at the end.

A tracker is a `ResultSink` (`monitor.sink`): whatever it raises is noted once, and the training goes on without it.
Nothing is opened when a tracker is made, so that every process of a training may make one; the first starts it.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from anisoscope import __version__
from anisoscope.errors import AnisoscopeError
from anisoscope.integrations.trackers.scalars import (
    PREFIX,
    Chosen,
    Scalar,
    chosen_scalars,
    heads_of,
    numbers_of,
    plain_name,
    rows_of,
    usual_scalars,
)
from anisoscope.metrics.catalogue import registry
from anisoscope.results.folder import replace_file
from anisoscope.results.query import Query, Table
from anisoscope.view.matplotlib_renderer import panels_image
from anisoscope.view.table_plot import table_panels


class Tracker:
    """Sends a few numbers of every measured step to an experiment tracker.

    `place` is a folder or a project, where the tracker has one. `scalars` are metrics to send instead of the usual
    ones, or names for them: `{"pca_energy": {"metric": "gradient_energy", "proxy": "pca", "control": None}}`.
    `figures=False` leaves the figures at the end out.
    """

    word: ClassVar[str] = ""  # in `log_to`, and the name of the extra
    package: ClassVar[str] = ""  # that must be installed
    title: ClassVar[str] = ""

    def __init__(self, place: str | Path = "", *, scalars: Chosen | None = None, figures: bool = True) -> None:
        refuse_missing(self)
        self.place, self.figures, self._asked = str(place), figures, chosen_scalars(scalars)
        self._forget()

    def _forget(self) -> None:
        self._scalars: tuple[Scalar, ...] = self._asked
        self._kept: list[Table] = []  # rows that the figures show
        self._sent: set[str] = set()
        self.measured = False  # whether what is being sent was measured, or is what a training logged of a step

    # -- a sink --

    def start(self, manifest: Mapping[str, Any]) -> None:
        """Open a run of the tracker, or go on with the one that is active, or that this run had before."""
        self._forget()
        self._open(manifest)

    def write(self, rows: Table, step: int) -> None:
        """Send the numbers of a measured step."""
        self.measured = len(Query(rows).where(kind=lambda kind: kind != "training")) > 0
        if not self._scalars and self.measured:
            self._scalars = usual_scalars(rows)  # what a run measures is known from its first step
        scalars = self._scalars or usual_scalars(rows)
        if numbers := numbers_of(rows, scalars):
            self._sent |= {name.split("/")[1] for name in numbers}
            self._log(numbers, step)
        for name, values in heads_of(rows, scalars).items():
            self._log_values(name, values, step)
        if self.figures:
            self._kept += [self._drawn(rows, scalars)]

    def finish(self, manifest: Mapping[str, Any]) -> None:
        """Send the figures and close a run that was opened here."""
        try:
            if self.figures:
                self._draw(manifest)
        finally:
            self._close(str(manifest.get("status", "complete")))
        if lost := [scalar.name for scalar in self._asked if plain_name(scalar.name).split("/")[0] not in self._sent]:
            raise AnisoscopeError(
                f"nothing was measured for {', '.join(map(repr, lost))} of its scalars; name metrics of the table"
            )

    def _drawn(self, rows: Table, scalars: Sequence[Scalar]) -> Table:
        """The rows of these numbers that can be drawn over layers."""
        parts = [rows_of(rows, scalar).where(head=None, layer=...).table() for scalar in scalars]
        return Table.concat(parts)

    def _draw(self, manifest: Mapping[str, Any]) -> None:
        """Send a figure of each number over layers, a line for every step, those before a resumption as well."""
        table, scalars = Table.concat(self._kept), self._scalars
        if int(manifest.get("resumed", -1)) >= 0 and manifest.get("folder"):
            table = self._drawn(Table.read(manifest["folder"]), scalars)
        for scalar in scalars:
            found = rows_of(table, scalar).known()
            if len(found.values("layer")) < 2:
                continue
            panels = table_panels(found.table(), found.values("metric")[0], over="layer", catalogue=registry())
            last = max((step for step in found.values("step") if step is not None), default=0)
            self._log_figure(f"{PREFIX}/{plain_name(scalar.name)}", panels_image(panels[:1]), last)

    # -- what a tracker does --

    def _open(self, manifest: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def _log(self, numbers: dict[str, float], step: int) -> None:
        raise NotImplementedError

    def _log_values(self, name: str, values: list[float], step: int) -> None:
        """Send a histogram, where the tracker has such."""

    def _log_figure(self, name: str, image: np.ndarray, step: int) -> None:
        """Send a picture, uint8 [height, width, 3], where the tracker has such."""

    def _close(self, status: str) -> None:
        """Close a run that was opened here."""


def refuse_missing(tracker: Tracker) -> None:
    """Raise an error, when a tracker is made, if its package is not installed."""
    if tracker.package and importlib.util.find_spec(tracker.package) is None:
        raise AnisoscopeError(
            f"{tracker.title} needs the package {tracker.package}, which is not installed here; "
            f'pip install "anisoscope[{tracker.word}]".'
        )


def run_name(manifest: Mapping[str, Any]) -> str:
    """The name of a run in a tracker: that of its folder, or of its model."""
    folder = manifest.get("folder")
    return Path(folder).name if folder else str(manifest.get("name") or PREFIX)


def described(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A few words on a run, without any path."""
    models, config = manifest.get("models") or [{}], manifest.get("config") or {}
    found = {"version": __version__, "model": manifest.get("name"), "seed": manifest.get("seed")}
    found |= {name: models[0].get(name) for name in ("architecture", "layers")} | {"when": config.get("when")}
    return {name: value for name, value in found.items() if value is not None}


# -- going on with a run of a tracker ----------------------------------------------------------------------------------


def remembered(word: str, manifest: Mapping[str, Any]) -> str | None:
    """The run of a tracker that a resumed run had before; None if there is none, or the run begins."""
    if not manifest.get("folder") or int(manifest.get("resumed", -1)) < 0:
        return None
    try:
        found = json.loads(_memory(word, manifest).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return str(found["run"]) if isinstance(found, dict) and "run" in found else None


def remember(word: str, manifest: Mapping[str, Any], run: str) -> None:
    """Keep which run of a tracker belongs to a run folder."""
    if manifest.get("folder"):
        replace_file(_memory(word, manifest), lambda path: path.write_text(json.dumps({"run": run}) + "\n"))


def _memory(word: str, manifest: Mapping[str, Any]) -> Path:
    return Path(manifest["folder"]) / "state" / f"{word}.json"
