"""The table of all studies; a new study needs an entry here and a module or folder beside it. Imports no torch.

A study is a configuration (a dataclass whose fields are options of the command) and a class whose `measure` fills
the run folder: both in one file if that needs no heavy imports, else the class in `protocol`; its page is in `figures`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anisoscope.studies.curvature import CurvatureConfig, curvature_config
from anisoscope.studies.inherent import InherentConfig
from anisoscope.studies.performance import PerformanceConfig
from anisoscope.studies.revisiting import RevisitingConfig
from anisoscope.studies.shape import ShapeConfig
from anisoscope.studies.sharpness import SharpnessConfig
from anisoscope.studies.untrained import UntrainedConfig


@dataclass(frozen=True)
class StudyEntry:
    """One study: its configuration, and the class that runs it (imported when it runs)."""

    name: str
    help: str
    config: type[Any]
    protocol: str  # module:class
    build: Callable[..., Any] | None = None  # constructs the configuration from further options
    resumes: bool = True
    parallel: bool = False  # trains arms in parallel; its configuration is an ArmsConfig
    partial: bool = False  # its page can be drawn from the arms that are finished
    arrays: tuple[str, ...] = ()  # files of arrays/ that its page reads, as keyword arguments of `study_page`

    @property
    def jobs_help(self) -> str:
        """The help text of --jobs with the defaults of the presets; empty for studies without parallel arms."""
        if not self.parallel:
            return ""
        tiny, small = (self.config.presets[name].jobs for name in ("tiny", "small"))
        usual = f"{tiny} in tiny, {f'{small} in small' if small > 1 else 'else 1'}" if max(tiny, small) > 1 else "1"
        return f"Arms trained at once, each in its own process; default: as many as a GPU holds; without: {usual}."


_ALL = (
    StudyEntry(
        "revisiting",
        "Revisiting Anisotropy: train a decoder and an encoder under the monitor, and test the claims.",
        RevisitingConfig,
        "anisoscope.studies.revisiting:Revisiting",
        parallel=True,
    ),
    StudyEntry(
        "curvature",
        "The theory behind it: does frequency-biased sampling hide curvature, and where do gradients on a manifold go?",
        CurvatureConfig,
        "anisoscope.studies.curvature.protocol:Curvature",
        build=curvature_config,
    ),
    StudyEntry(
        "shape",
        "The Shape of Learning: what the mask and the objective do to profiles over depth and training.",
        ShapeConfig,
        "anisoscope.studies.shape:ShapeStudy",
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
        "anisoscope.studies.sharpness:Sharpness",
        parallel=True,
        partial=True,
    ),
    StudyEntry(
        "untrained",
        "A transformer block at initialisation with biased inputs: is it anisotropic, is its attention sharp?",
        UntrainedConfig,
        "anisoscope.studies.untrained.protocol:Untrained",
        arrays=("histograms",),
    ),
)
STUDIES = {entry.name: entry for entry in _ALL}
