"""Does anisotropy need queries and keys that drift, and does sharp attention? One decoder, five kinds of attention.

Godey et al. (arXiv 2401.12143) see queries and keys drift in parallel while attention sharpens, and leave open which of
the two needs the other. Here each is taken away from the same small decoder: drift (the means of queries and keys are
removed), freedom of scale (normed, with a temperature that is learned or fixed and sharp), and scores altogether.
Arms of a seed have the same initial weights, text and batches; only qk-norm has parameters beyond the others', a
temperature for every head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from anisoscope.studies.sharpness.config import SharpnessConfig as SharpnessConfig
from anisoscope.studies.study import INHERENT, ArmsStudy


@dataclass
class Sharpness(ArmsStudy):
    """One run of the study: every kind of attention with every seed."""

    config: SharpnessConfig
    name: ClassVar[str] = "sharpness"
    paper: ClassVar[str] = INHERENT
