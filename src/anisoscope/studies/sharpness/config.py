"""What the study of sharpness trains: one decoder with five kinds of attention, by preset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from anisoscope.option import Option, listed
from anisoscope.studies.config import Preset, SizedArmsConfig

ARMS = ("softmax", "qk-norm", "mean-removed", "fixed-sharp", "uniform")  # of models.attention_variant
PRESETS = {
    "tiny": Preset(
        {"context": 64, "steps": 300, "batch_size": 16, "lr": 3e-3, "checkpoints": "none"},
        seeds=(0, 1, 2),
        sizes={"3x64": {}},
        when="log:6",
        jobs=2,
    ),
    "small": Preset(
        {"context": 256, "steps": 1500, "batch_size": 64, "lr": 6e-4, "checkpoints": "0,every:500"},
        seeds=(0, 1, 2),
        sizes={"6x256": {}},
        jobs=4,
    ),
}


@dataclass(frozen=True)
class SharpnessConfig(SizedArmsConfig):
    """What the study runs; what is None is as the preset has it.

    >>> [(name, seed) for name, _, seed in SharpnessConfig(arms=("uniform",), seeds=(0, 1)).runs()]
    [('uniform-3x64', 0), ('uniform-3x64', 1)]
    """

    arms: Annotated[
        tuple[str, ...],
        Option("softmax, qk-norm, mean-removed, fixed-sharp, uniform; default: all.", parse=listed),
    ] = ARMS
    sizes: Annotated[tuple[str, ...], Option("Layers x width, such as 3x64,6x256.", parse=listed)] = ()
    metrics: str = "attention"

    presets: ClassVar[Mapping[str, Preset]] = PRESETS
    differences: ClassVar[Mapping[str, Mapping[str, Any]]] = {arm: {"attention": arm} for arm in ARMS}
