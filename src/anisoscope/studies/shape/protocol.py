"""The Shape of Learning (arXiv 2311.05928): profiles over depth and training, and what causes them.

Three arms of one architecture, with the same weights at the start and the same text: causal attention with the next
token, causal attention with masked tokens, attention to both sides with masked tokens. What the mask does is the third
minus the second, what the objective does the second minus the first. The preset `paper` measures published models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from anisoscope.studies.arms import SHAPE, ArmsStudy, StudyArm
from anisoscope.studies.jobs import run_arms
from anisoscope.studies.shape.config import PRESETS
from anisoscope.studies.shape.config import ShapeConfig as ShapeConfig


@dataclass
class ShapeStudy(ArmsStudy):
    """One run of the study; `jobs` arms are trained at the same time (None: as the preset has it)."""

    config: ShapeConfig
    jobs: int | None = None
    study: ClassVar[str] = "shape"
    paper: ClassVar[str] = SHAPE

    def arms(self) -> None:
        """The models of the preset: trained here, or the paper's own."""
        if self.config.preset == "paper":
            from anisoscope.studies.published import measure_papers_models

            measure_papers_models(self)
            return
        self._train()

    def _train(self) -> None:
        if self.config.preset == "small" and self.config.data == "embedded":
            self.about["warnings"].append(
                "no --data was given, so the models are trained on the small embedded text; this preset is meant for "
                "enwik8: --data PATH"
            )
        arms = self._arms()
        self._prepare(arms[0])
        try:
            jobs = PRESETS[self.config.preset].jobs if self.jobs is None else self.jobs
            failed = run_arms(arms, jobs=jobs, progress=self.progress)
        finally:  # of arms that broke off, too: what they measured counts
            for arm in arms:
                self.join(arm.path, name=arm.model, seed=arm.training.seed)
        self.refuse(failed, len(arms))

    def _arms(self) -> list[StudyArm]:
        folder, watch, command = self.folder.path, self.config.watch, tuple(self.command)
        return [
            StudyArm(model, folder / "arms" / f"{model}-seed{seed}", training, watch, folder / "corpus", command)
            for model, training, seed in self.config.runs()
        ]

    def _prepare(self, arm: StudyArm) -> None:
        """Tokenise the text once, before arms that run at the same time would all do so."""
        from anisoscope.training.corpus import prepare_corpus

        if self.progress is not None:
            self.progress("corpus", 0, 1)
        training = arm.training
        prepare_corpus(training.data, arm.corpus, tokens=training.tokens, limit=training.limit)
        if self.progress is not None:
            self.progress("corpus", 1, 1)
