"""Revisiting Anisotropy (arXiv 2604.08764): train a decoder and an encoder with the monitor on, and test the claims.

Each arm is a training run of its own under arms/, resumable; the study joins their tables and asks the claims.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from anisoscope.studies.arms import StudyArm, train_arm
from anisoscope.studies.config import ArmRun
from anisoscope.studies.published import REVISITING_MODELS, PaperModel, measure_models, sweep_model
from anisoscope.studies.revisiting.config import RevisitingConfig as RevisitingConfig
from anisoscope.studies.study import ArmsStudy


@dataclass
class Revisiting(ArmsStudy):
    """One run of the study."""

    config: RevisitingConfig
    name: ClassVar[str] = "revisiting"

    def train(self) -> None:
        """The arms one after the other; one that fails ends the study."""
        for run in self.config.runs():
            arm = self.arm(run)
            try:
                train_arm(arm, self.progress_of(arm.path.name))
            finally:  # of an arm that broke off, too: what it measured counts
                self.join(arm.path, name=arm.model, seed=run.seed)

    def arm(self, run: ArmRun) -> StudyArm:
        """The training run of an arm; its folder names the seed only where there are several."""
        name = run.model if len(self.config.seeds) == 1 else f"{run.model}-seed{run.seed}"
        folder = self.folder.path
        paths = folder / "arms" / name, folder / "corpus"
        return StudyArm(run.model, paths[0], run.training, self.config.watch, paths[1], tuple(self.command))

    def measure_published(self) -> None:
        """The paper's models, with the checkpoints that their authors published."""
        measure_models(self, REVISITING_MODELS, self._measure, named=True)

    def _measure(self, model: PaperModel, path: Path) -> None:
        sweep_model(self, model, path, data=self.config.data, rank=self.config.rank)
