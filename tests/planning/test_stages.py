"""Measuring a machine: a part that is missing is measured, what is known is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from anisoscope.planning import stages
from anisoscope.planning.calibration import Calibration, calibration_path, read_calibration, write_calibration

STORED = Path(__file__).parents[1] / "support" / "calibration.json"


def without(found: Calibration, *names: str) -> Calibration:
    return replace(found, stages={name: part for name, part in found.stages.items() if name not in names})


def test_what_is_missing_is_measured_and_nothing_else() -> None:
    stored = read_calibration(STORED)
    told: list[tuple[str, int, int]] = []
    start = without(stored, "measure:heads", "load")
    found = stages.calibrate("cpu", parts=("forward", "heads", "load"), start=start, tell=lambda *w: told.append(w))
    assert told[-1] == ("calibration", 2, 2)
    assert found.stages["forward"] == stored.stages["forward"]
    for name in ("measure:heads", "load"):
        assert min(found.stages[name].values()) >= 0 < max(found.stages[name].values())


def test_a_kept_calibration_is_used_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    import torch

    machine = stages.Machine(torch.device("cpu"))
    path = calibration_path("cpu", machine.title, machine.threads)
    write_calibration(read_calibration(STORED), path)
    before = path.read_text()
    assert stages.here("cpu", parts=stages.ALWAYS).stages == read_calibration(STORED).stages
    assert path.read_text() == before
