"""β of a model: a slow twin, planted exponents, and that the study uses the value that was measured."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anisoscope.capture.row import Batch
from anisoscope.commands.drawing import write_study_report
from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.frequency import OCCURRENCES
from anisoscope.results.folder import RunFolder
from anisoscope.results.query import Query, Table
from anisoscope.studies.curvature import CurvatureConfig
from anisoscope.studies.curvature import exponent as exponents
from anisoscope.studies.curvature.exponent import MeasuredExponent, _chosen, measure_exponent
from anisoscope.studies.curvature.protocol import Curvature
from support.loaded import saved
from support.pages import figures_too


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(saved(tmp_path_factory.mktemp("model")))


def test_the_rows_that_are_kept_are_as_many_of_every_type_and_never_the_first() -> None:
    ids = torch.tensor([[7, *([1, 2] * 12), 3], [7, *([1, 2] * 12), 3]])
    mask = torch.ones_like(ids)
    mask[1, -1] = 0
    chosen = _chosen([Batch({"input_ids": ids, "attention_mask": mask})], torch.ones(8), seed=0)[0].view_as(ids)
    assert not chosen[:, 0].any(), "the first position of a context"
    kept = torch.bincount(ids[chosen], minlength=8).tolist()
    assert kept == [0, OCCURRENCES, OCCURRENCES, 0, 0, 0, 0, 0], "type 3 occurs too seldom"


def test_the_exponent_is_that_of_plain_loops_over_hidden_states(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[Any] = []
    original = exponents._chosen
    monkeypatch.setattr(exponents, "_chosen", lambda *a, **k: masks.append((a, original(*a, **k))) or masks[-1][1])
    found = measure_exponent(model, data="embedded", tokens=1500, device="cpu", seed=0, tokenizer="bytes")
    (batches, counts), chosen = masks[0]
    loaded = exponents.load_model(model, device="cpu", tokenizer="bytes")
    rows: dict[int, list[np.ndarray]] = {}
    for batch, mask in zip(batches, chosen, strict=True):
        with torch.no_grad():
            states = loaded.model(**batch.inputs, output_hidden_states=True).hidden_states[1].double().flatten(0, 1)
        for token, row in zip(batch.inputs["input_ids"].flatten()[mask].tolist(), states[mask].numpy(), strict=True):
            rows.setdefault(token, []).append(row)
    points = []
    for token, members in rows.items():
        assert len(members) == OCCURRENCES
        spread = math.sqrt(sum(((m - np.mean(members, 0)) ** 2).sum() for m in members) / (OCCURRENCES - 1))
        points.append((math.log(float(counts[token])), math.log(spread)))
    x, y = np.array(points).T
    first = next(r for r in found.records if r["layer"] == 1 and "normalised" not in r["variant"])
    assert first["value"] == pytest.approx(-np.polyfit(x, y, 1)[0], rel=1e-4) and first["n"] == len(points)
    plain = [r["value"] for r in found.records if "normalised" not in r["variant"]]
    assert found.used.value == pytest.approx(np.mean(plain), rel=1e-9), "the mean over blocks"
    assert found.used.low < found.used.value < found.used.high and len(plain) == found.entry["blocks"]


def test_too_little_text_is_refused_in_a_sentence(model: str, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a few words only, and no more than that.\n")
    with pytest.raises(AnisoscopeError, match="β needs 8 at least: give more text, or --beta"):
        measure_exponent(model, data=str(tmp_path / "short.txt"), tokens=512, device="cpu", seed=0, tokenizer="bytes")


SIZES = {"manifolds": ("sphere",), "samples": 128, "tokens": 512, "draws": 3, "neighbourhoods": 8, "replicates": 3}
SIZES |= {
    "loop_runs": 3,
    "loop_steps": 10,
    "pinned_runs": 3,
    "pinned_steps": 80,
    "pinned_types": 8,
    "text_tokens": 1500,
}


def test_the_measured_value_is_used_stands_in_the_table_and_survives_an_interruption(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CurvatureConfig.tiny(**SIZES, model=model, tokenizer="bytes")
    folder = RunFolder.create(tmp_path / "run", asdict(config), resume=False)
    real, calls = Curvature._pinning, []

    def stop(study: Curvature) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Curvature, "_pinning", stop)
    with pytest.raises(KeyboardInterrupt):
        Curvature(config, folder).run()
    monkeypatch.setattr(Curvature, "_pinning", real)
    monkeypatch.setattr(Curvature, "_manifold", lambda *a: calls.append(a))
    resumed = RunFolder.create(tmp_path / "run", asdict(config), resume=True)
    Curvature(config, resumed).run()
    assert not calls, "manifolds that were finished are not measured again"
    query, about = Query(Table.read(tmp_path / "run" / "table.parquet")), resumed.about()
    used = query.where(metric="frequency_beta", used=1).one()
    assert used is not None and used["from"] == "measured" and used.low < used.value < used.high
    assert about["reference"]["beta"] == round(used.value, 3) and about["models"][0]["blocks"] >= 1
    betas = {float(beta) for beta in query.where(metric="curvature_attenuation").values("beta")}
    assert {0.0, round(used.value, 3), round(used.low, 3), round(used.high, 3)} <= betas, "and the ends of its interval"
    verdicts = json.loads((tmp_path / "run" / "verdicts.json").read_text())
    scope = next(v["scope"] for v in verdicts if v["claim"] == "frequency_hides_curvature")
    assert scope == f"for s = 1 and β = {round(used.value, 3) + 0.0:g} (measured in {about['models'][0]['name']})"
    with figures_too("curvature-exponent"):  # the others are drawn in test_curvature.py
        page = write_study_report(tmp_path / "run", "curvature").read_text(encoding="utf-8")
    assert (tmp_path / "run" / "figures" / "curvature-exponent.pdf").is_file()
    assert "was measured first" in page and "β by block" in page


def test_a_negative_exponent_is_said_to_show_curvature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = exponents.Correlation(-0.2, -0.25, -0.15, math.nan, 40)
    entry = {"name": "wide", "data": {"name": "embedded"}, "notes": []}
    monkeypatch.setattr(
        "anisoscope.studies.curvature.protocol.measure_exponent", lambda *a, **k: MeasuredExponent(planted, [], entry)
    )
    config = CurvatureConfig.tiny(**{**SIZES, "tokens": 2048}, model="wide")
    folder = RunFolder.create(tmp_path / "run", asdict(config), resume=False)
    Curvature(config, folder).run()
    verdicts = {v["claim"]: v for v in json.loads((tmp_path / "run" / "verdicts.json").read_text())}
    found = verdicts["frequency_hides_curvature"]
    assert found["effect"] > 1 and found["status"] == "fails" and "more visible for them" in found["why"]
    assert any("more visible for frequent tokens" in warning for warning in folder.about()["warnings"])
    assert "β = -0.2 (measured in wide)" in found["scope"]


def test_a_given_and_a_measured_exponent_exclude_each_other() -> None:
    with pytest.raises(AnisoscopeError, match="--beta and --model were both given"):
        CurvatureConfig(model="gpt2", beta=0.1)
