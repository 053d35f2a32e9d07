"""The Shape of Learning (arXiv 2311.05928): profiles over depth and training, and what causes them.

Three arms of one architecture, with the same weights at the start and the same text: causal attention with the next
token, causal attention with masked tokens, attention to both sides with masked tokens. What the mask does is the third
minus the second, what the objective does the second minus the first. The preset `paper` measures published models.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from anisoscope.studies.published import SHAPE_MODELS, PaperModel, chosen_models, measure_models, sweep_model
from anisoscope.studies.shape.config import ShapeConfig as ShapeConfig
from anisoscope.studies.study import SHAPE, ArmsStudy


@dataclass
class ShapeStudy(ArmsStudy):
    """One run of the study."""

    config: ShapeConfig
    name: ClassVar[str] = "shape"
    paper: ClassVar[str] = SHAPE

    def measure_published(self) -> None:
        """The paper's models, or those of them that were named."""
        measure_models(self, chosen_models(self.config.models, SHAPE_MODELS), self._measure)

    def _measure(self, model: PaperModel, path: Path) -> None:
        remove = self.config.remove_downloads
        sweep_model(self, model, path, preset="shape", halves=True, data=self.config.data, remove_downloads=remove)
