"""Imports that earlier documents and examples named still work, and say where the names are now."""

from __future__ import annotations

import importlib
import sys

import pytest

from anisoscope.moved import MOVED

NAMES = [
    ("anisoscope.capture.loading", "load_model"),
    ("anisoscope.capture.processors", "PlainImages"),
    ("anisoscope.metrics.calibration", "two_nn_bias"),
    ("anisoscope.metrics.metric", "metric"),
    ("anisoscope.runs.feed", "make_feed"),
    ("anisoscope.runs.profile", "ProfileConfig"),
    ("anisoscope.runs.schedule", "log_spaced"),
    ("anisoscope.runs.table", "Table"),
    ("anisoscope.studies.page", "page_of"),
    ("anisoscope.studies.study", "Study"),
]


@pytest.mark.parametrize(("old", "name"), NAMES)
def test_a_name_is_found_at_its_old_path_with_a_warning(old: str, name: str) -> None:
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {MOVED[old]}"):
        module = importlib.import_module(old)
    assert getattr(module, name) is getattr(importlib.import_module(MOVED[old]), name)


def test_every_other_old_path_is_unknown() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("anisoscope.runs.nothing")
