"""Calibrations: fits, files, devices of published rates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from anisoscope.errors import AnisoscopeError
from anisoscope.planning import calibration
from anisoscope.planning.calibration import KNOWN, Calibration, fitted, read_calibration, write_calibration

STORED = Path(__file__).parents[1] / "support" / "calibration.json"


def test_planted_coefficients_come_back_and_predict_other_sizes() -> None:
    generator = np.random.default_rng(0)
    truth = {"fixed": 0.3, "rows": 2e-7, "cubes": 4e-10}
    sizes = [(n, d) for n in (500, 4000, 30_000) for d in (32, 128, 512)]
    amounts = [{"fixed": 1.0, "rows": float(n * d), "cubes": float(d**3)} for n, d in sizes]
    exact = [sum(truth[name] * value for name, value in row.items()) for row in amounts]
    noisy = [value * float(np.exp(0.05 * generator.standard_normal())) for value in exact]
    found = fitted(amounts, noisy)
    later = {"fixed": 1.0, "rows": 1e5 * 1024, "cubes": 1024.0**3}
    said = sum(found[name] * value for name, value in later.items())
    assert said == pytest.approx(sum(truth[name] * value for name, value in later.items()), rel=0.15)


def test_no_coefficient_is_negative() -> None:
    found = fitted([{"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 3.0}], [3.0, 2.0, 1.0])
    assert min(found.values()) >= 0


def test_a_calibration_is_read_as_it_was_written(tmp_path: Path) -> None:
    stored = read_calibration(STORED)
    write_calibration(stored, tmp_path / "deep" / "one.json")
    assert read_calibration(tmp_path / "deep" / "one.json") == stored


def test_files_that_are_no_calibration_are_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(AnisoscopeError, match="is no calibration"):
        read_calibration(tmp_path / "bad.json")
    with pytest.raises(AnisoscopeError, match="unknown device 'h2000'"):
        calibration.known_device("h2000")


def test_another_device_is_quicker_where_it_computes_and_the_same_where_the_host_works() -> None:
    host = read_calibration(STORED)
    there = host.on(KNOWN["h200"])
    work = {"operations": 1.0, "flops": 1e15, "bytes": 0.0}
    assert there.seconds("forward", work) == pytest.approx(
        1e15 * host.stages["forward"]["flops"] * host.rates["float32"] / (0.4 * 67e12), rel=1e-6
    )
    assert there.seconds("claims", {"runs": 1.0, "records": 100.0}) == host.seconds(
        "claims", {"runs": 1.0, "records": 100.0}
    )
    assert there.speed("bfloat16") == pytest.approx(990 / 67)
    assert there.published and there.device == "cuda" and there.memory == 141e9


def test_launches_and_arithmetic_of_a_gpu_overlap() -> None:
    one = Calibration("cuda", "", 1, {"forward": {"operations": 1.0, "flops": 1.0}}, {"float32": 1.0})
    assert one.seconds("forward", {"operations": 3.0, "flops": 2.0}) == 3.0
    assert replace(one, device="cpu").seconds("forward", {"operations": 3.0, "flops": 2.0}) == 5.0


def test_a_stage_that_was_not_measured_is_named() -> None:
    with pytest.raises(AnisoscopeError, match="does not know 'forward'"):
        Calibration("cpu", "old", 1).seconds("forward", {})


def test_the_cache_is_where_the_user_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    one, two = (calibration.calibration_path("cpu", "x86", threads) for threads in (1, 2))
    assert one.parent == tmp_path / "anisoscope" and one != two
