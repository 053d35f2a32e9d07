"""TensorBoard: event files that `tensorboard --logdir FOLDER` shows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from anisoscope.integrations.trackers.tracker import Tracker, described

_FOLDER = "runs/tensorboard"  # of a run without a folder of its own


class TensorBoardTracker(Tracker):
    """Writes event files into a folder; by default `tensorboard` in the run folder."""

    word, package, title = "tensorboard", "tensorboard", "TensorBoard"
    _writer: Any = None

    def __init__(self, place: str | Path = "", **options: Any) -> None:
        super().__init__(str(Path(place).absolute()) if str(place) else "", **options)  # the training may go elsewhere

    def _open(self, manifest: Mapping[str, Any]) -> None:
        folder = manifest.get("folder")
        self._folder = self.place or (str(Path(folder) / "tensorboard") if folder else _FOLDER)
        self._resumed, self._about, self._writer = int(manifest.get("resumed", -1)), described(manifest), None

    def _opened(self, step: int) -> Any:
        """The writer; of a resumed run, what is measured again replaces what was there."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            again = min(step, self._resumed + 1) if self.measured else self._resumed + 1
            self._writer = SummaryWriter(self._folder, purge_step=again if self._resumed >= 0 else None)
            lines = [f"| {name} | {value} |" for name, value in self._about.items()]
            self._writer.add_text("anisoscope/run", "\n".join(["| | |", "|---|---|", *lines]), step)
        return self._writer

    def _log(self, numbers: dict[str, float], step: int) -> None:
        writer = self._opened(step)
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def _log_values(self, name: str, values: list[float], step: int) -> None:
        self._opened(step).add_histogram(name, np.asarray(values), step)

    def _log_figure(self, name: str, image: np.ndarray, step: int) -> None:
        self._opened(step).add_image(name, image, step, dataformats="HWC")

    def _close(self, status: str) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
