"""All studies: a row here and a folder beside it is all that a new one takes. Imports no torch.

A folder holds `config` (a dataclass whose fields are options of the command), `protocol` (a class whose `run` writes
the run folder) and `figures` (what its page shows).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anisoscope.studies.config import ArmsConfig
from anisoscope.studies.curvature.config import CurvatureConfig, curvature_config
from anisoscope.studies.inherent.config import InherentConfig
from anisoscope.studies.performance.config import PerformanceConfig
from anisoscope.studies.revisiting.config import RevisitingConfig
from anisoscope.studies.shape.config import ShapeConfig
from anisoscope.studies.sharpness.config import SharpnessConfig
from anisoscope.studies.untrained.config import UntrainedConfig


@dataclass(frozen=True)
class StudyEntry:
    """One study: its configuration, and the class that runs it, imported when it is run."""

    name: str
    help: str
    config: type[Any]
    protocol: str  # module:class
    build: Callable[..., Any] | None = None  # makes the configuration where it takes more than its fields
    resumes: bool = True
    parallel: bool = False  # trains arms at the same time

    @property
    def jobs_help(self) -> str:
        """What --jobs says, with the defaults of the presets; nothing where arms are not trained side by side."""
        if not self.parallel or not issubclass(self.config, ArmsConfig):
            return ""
        tiny, small = (self.config.presets[name].jobs for name in ("tiny", "small"))
        usual = f"{tiny} in tiny, {f'{small} in small' if small > 1 else 'else 1'}"
        return f"Arms trained at the same time, each in a process of its own; default: {usual}."


_ALL = (
    StudyEntry(
        "revisiting",
        "Revisiting Anisotropy: train a decoder and an encoder under the monitor, and test the claims.",
        RevisitingConfig,
        "anisoscope.studies.revisiting.protocol:Revisiting",
    ),
    StudyEntry(
        "curvature",
        "The geometry behind it: does frequency-biased sampling hide curvature?",
        CurvatureConfig,
        "anisoscope.studies.curvature.protocol:Curvature",
        build=curvature_config,
        resumes=False,
    ),
    StudyEntry(
        "shape",
        "The Shape of Learning: what the mask and the objective do to profiles over depth and training.",
        ShapeConfig,
        "anisoscope.studies.shape.protocol:ShapeStudy",
        parallel=True,
    ),
    StudyEntry(
        "inherent",
        "Anisotropy Is Inherent to Self-Attention: tokens, characters, speech, pictures, and convolutions beside them.",
        InherentConfig,
        "anisoscope.studies.inherent.protocol:Inherent",
        parallel=True,
    ),
    StudyEntry(
        "performance",
        "Does the geometry matter? Loss and linear probes of raw and repaired rows, layer by layer.",
        PerformanceConfig,
        "anisoscope.studies.performance.protocol:Performance",
    ),
    StudyEntry(
        "sharpness",
        "Does anisotropy need queries and keys that drift, and does sharp attention? Five kinds of attention compared.",
        SharpnessConfig,
        "anisoscope.studies.sharpness.protocol:Sharpness",
        parallel=True,
    ),
    StudyEntry(
        "untrained",
        "A transformer block at initialisation with biased inputs: is it anisotropic, is its attention sharp?",
        UntrainedConfig,
        "anisoscope.studies.untrained.protocol:Untrained",
    ),
)
STUDIES = {entry.name: entry for entry in _ALL}
