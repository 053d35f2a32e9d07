"""The sharpness study: do anisotropy and sharp attention need drift of queries and keys? Five kinds of attention.

*Anisotropy Is Inherent to Self-Attention* (arXiv 2401.12143) observes that queries and keys drift in parallel while
attention sharpens, and leaves open which needs the other. Here each is removed from the same small decoder: drift
(means of queries and keys are subtracted), free scale (normalised, with a learned or a fixed sharp temperature), and
all scores. Arms of a seed have the same initial weights, text and batches; only qk-norm has additional parameters, one
temperature per head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from anisoscope.option import Option, listed
from anisoscope.studies.config import Preset, SizedArmsConfig
from anisoscope.studies.study_run import INHERENT, ArmsStudy

ARMS = ("softmax", "qk-norm", "mean-removed", "fixed-sharp", "uniform")  # as in models.attention_variant
PRESETS = {
    "tiny": Preset(
        {"context": 64, "steps": 300, "batch_size": 16, "lr": 3e-3, "checkpoints": "none"},
        seeds=(0, 1, 2),
        sizes={"3x64": {}},
        when="log:6",
        jobs=2,
    ),
    "small": Preset(
        {"context": 256, "steps": 2000, "batch_size": 32, "lr": 6e-4, "checkpoints": "0,every:500"},
        seeds=(0, 1, 2),
        sizes={"12x512": {}},
        jobs=4,
    ),
}


@dataclass(frozen=True)
class SharpnessConfig(SizedArmsConfig):
    """The configuration of the study; fields that are None default to the preset.

    >>> [(name, seed) for name, _, seed in SharpnessConfig(arms=("uniform",), seeds=(0, 1)).runs()]
    [('uniform-3x64', 0), ('uniform-3x64', 1)]
    """

    arms: Annotated[
        tuple[str, ...], Option("softmax, qk-norm, mean-removed, fixed-sharp, uniform; default: all.", parse=listed)
    ] = ARMS
    sizes: Annotated[tuple[str, ...], Option("Layers x width, such as 3x64,6x256.", parse=listed)] = ()
    metrics: str = "attention"

    presets: ClassVar[Mapping[str, Preset]] = PRESETS
    differences: ClassVar[Mapping[str, Mapping[str, Any]]] = {arm: {"attention": arm} for arm in ARMS}


@dataclass
class Sharpness(ArmsStudy):
    """One run of the study: each kind of attention with each seed."""

    config: SharpnessConfig
    name: ClassVar[str] = "sharpness"
    paper: ClassVar[str] = INHERENT
