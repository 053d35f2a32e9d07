"""The study *The Shape of Learning* (arXiv 2311.05928): profiles over depth and training, and what causes them.

Three arms of one architecture with the same initial weights and text: causal attention and next-token prediction,
causal attention and masked tokens, bidirectional attention and masked tokens. The mask effect is the third minus the
second, the objective effect the second minus the first. The preset `paper` measures published models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from anisoscope.option import Option, listed, seed_numbers
from anisoscope.studies.config import PaperModels, PaperPreset, Preset, ProbeTokens, RemoveDownloads, SizedArmsConfig
from anisoscope.studies.study_run import SHAPE, ArmsStudy

if TYPE_CHECKING:
    from anisoscope.studies.published import PaperModel

ARMS: dict[str, dict[str, Any]] = {  # attention and objective of each arm
    "causal-next": {"arch": "decoder", "objective": "next"},
    "causal-masked": {"arch": "decoder", "objective": "masked"},
    "bidirectional-masked": {"arch": "encoder", "objective": "masked"},
}
PRESETS = {
    "tiny": Preset(
        {"context": 64, "steps": 300, "batch_size": 16, "lr": 3e-3, "checkpoints": "every:100"},
        sizes={"6x64": {}},
        contexts=192,
        when="log:6",
        jobs=3,  # on two cores, three single-threaded arms are faster than one arm with two threads
    ),
    "small": Preset(
        {"context": 256, "steps": 2000, "batch_size": 64, "lr": 6e-4, "checkpoints": "0,64,512,every:2000"},
        sizes={"6x256": {"seeds": (0, 1, 2)}, "12x512": {"seeds": (0, 1, 2), "steps": 4000}},
    ),
}


@dataclass(frozen=True)
class ShapeConfig(SizedArmsConfig):
    """What the study runs; what is None is as the preset has it.

    >>> [(name, seed) for name, _, seed in ShapeConfig(arms=("causal-next",), seeds=(0, 1)).runs()]
    [('causal-next-6x64', 0), ('causal-next-6x64', 1)]
    """

    preset: PaperPreset = "tiny"
    arms: Annotated[
        tuple[str, ...], Option("causal-next, causal-masked, bidirectional-masked.", parse=listed, preset="trained")
    ] = tuple(ARMS)
    sizes: Annotated[
        tuple[str, ...], Option("Layers x width, such as 6x256,12x512.", parse=listed, preset="trained")
    ] = ()
    seeds: Annotated[
        tuple[int, ...], Option("Seeds of every size, such as 0,1,2.", parse=seed_numbers, preset="trained")
    ] = ()
    metrics: str = "shape"
    probe_tokens: ProbeTokens = 65_536
    models: PaperModels = ()
    remove_downloads: RemoveDownloads = False

    presets: ClassVar[Mapping[str, Preset]] = PRESETS
    differences: ClassVar[Mapping[str, Mapping[str, Any]]] = ARMS
    measures_published: ClassVar[bool] = True

    def published(self) -> list[PaperModel]:
        from anisoscope.studies.published import SHAPE_MODELS, chosen_models

        return chosen_models(self.models, SHAPE_MODELS)

    @property
    def watch(self) -> dict[str, Any]:
        """As in the base class, with groups for halves of the contexts, and masked models measured on unmasked text."""
        return {**super().watch, "halves": True, "clean": True}


@dataclass
class ShapeStudy(ArmsStudy):
    """One run of the study."""

    config: ShapeConfig
    name: ClassVar[str] = "shape"
    paper: ClassVar[str] = SHAPE

    def measure_published(self) -> None:
        """Measure the models of the paper, or those that were named."""
        from anisoscope.studies.published import measure_models, sweep_model

        c = self.config
        options: dict[str, Any] = {"preset": "shape", "halves": True, "data": c.data, "tokens": c.probe_tokens}
        measure = partial(sweep_model, self, remove_downloads=c.remove_downloads, **options)
        measure_models(self, c.published(), measure)
