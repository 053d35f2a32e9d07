"""The catalogue of studies: names that configurations repeat, because they may not import torch, are the true ones."""

from __future__ import annotations

import importlib
import subprocess
import sys

from anisoscope.models.attention_variant import VARIANTS
from anisoscope.numerics.linear_fits import GRID
from anisoscope.numerics.manifolds import MANIFOLDS
from anisoscope.studies import curvature
from anisoscope.studies.catalogue import STUDIES
from anisoscope.studies.performance import PENALTIES
from anisoscope.studies.sharpness import ARMS
from anisoscope.studies.study_run import Study
from anisoscope.studies.untrained import INITS, fresh_block


def test_names_in_configurations_are_those_of_what_they_name() -> None:
    assert tuple(VARIANTS) == ARMS
    assert tuple(MANIFOLDS) == curvature.MANIFOLDS
    assert GRID == PENALTIES
    assert tuple(fresh_block.INITS) == INITS


def test_every_row_leads_to_a_study_of_its_name() -> None:
    for name, entry in STUDIES.items():
        module, _, kind = entry.protocol.partition(":")
        study = getattr(importlib.import_module(module), kind)
        assert issubclass(study, Study) and study.name == name
        assert entry.config().__class__ is entry.config, "the defaults of every configuration are good"


def test_the_catalogue_needs_no_heavy_library() -> None:
    code = "import sys, anisoscope.studies.catalogue; print(sorted({'torch', 'numpy', 'pyarrow'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
