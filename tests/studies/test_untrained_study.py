"""The study of untrained blocks: its table, its settings, and that it can be interrupted."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from anisoscope.claims.inherent.intervention import BETWEEN
from anisoscope.errors import AnisoscopeError
from anisoscope.results.folder import RunFolder
from anisoscope.studies.untrained import UntrainedConfig
from anisoscope.studies.untrained import protocol as study
from anisoscope.studies.untrained.protocol import Untrained

CONFIG = UntrainedConfig(
    families=("bert", "prenorm"), widths=(32,), heads=2, seeds=(0, 1, 2), sequences=8, length=24,
    biases=(0.0, 1.0, 5.0, 50.0), inits=("normal", "xavier"), device="cpu",
)  # fmt: skip


def run(path: Path, config: UntrainedConfig = CONFIG, *, resume: bool = False) -> RunFolder:
    folder = RunFolder.create(path, asdict(config), resume=resume)
    Untrained(config, folder).run()
    return folder


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return run(tmp_path_factory.mktemp("untrained") / "run")


def test_the_table_names_bias_initialisation_width_and_norm(ran: RunFolder) -> None:
    folder, table = ran, ran.table()
    assert set(table.arrow["kind"].unique().to_pylist()) == {"embed", "resid", "query", "key", "scores"}
    assert set(table.arrow["model"].unique().to_pylist()) == {"bert", "prenorm"}
    where = {"model": "bert", "seed": 2, "kind": "resid", "metric": "average_cosine"}
    low, high = (table.value(variant=f"bias={n};init=xavier;input_norm=1;width=32", **where) for n in ("0", "50"))
    assert low < 0.2 < 0.9 < high
    norm = table.value(**{**where, "metric": "mean_norm"}, variant="bias=5;init=normal;input_norm=0;width=32")
    assert norm == pytest.approx(math.sqrt(32), rel=1e-4), "a norm after the last sum"
    histograms = folder.arrays("histograms")
    assert len(histograms) == 1 + 2 * 2 * 3 * 8 and len(histograms["edges"]) == 161
    assert not (folder.path / "parts").exists()
    assert folder.about()["status"] == "complete"


def test_an_interrupted_study_ends_as_an_undisturbed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(CONFIG, families=("bert",), seeds=(0, 1), input_norm="yes")
    whole = run(tmp_path / "whole", small)
    measure, calls = study.measure_point, []

    def interrupted(*args: Any, **options: Any) -> Any:
        calls.append(None)
        if len(calls) == 11:  # within the third of four blocks
            raise KeyboardInterrupt
        return measure(*args, **options)

    monkeypatch.setattr(study, "measure_point", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", small)
    assert RunFolder(tmp_path / "cut").about()["status"] == "interrupted"
    assert len(list((tmp_path / "cut" / "parts").glob("*.parquet"))) == 2
    calls.clear()
    monkeypatch.setattr(study, "measure_point", lambda *a, **o: (calls.append(None), measure(*a, **o))[1])
    again = run(tmp_path / "cut", small, resume=True)
    assert len(calls) == 8, "two finished blocks of four biases are not measured again"
    one, two = (str(folder.table().arrow.drop(["run"]).to_pylist()) for folder in (whole, again))  # NaN is no number
    assert one == two
    assert (whole.path / "verdicts.json").read_text() == (again.path / "verdicts.json").read_text()


def test_verdicts_over_seeds_tell_the_pre_norm_block_from_the_other(ran: RunFolder) -> None:
    verdicts = json.loads((ran.path / "verdicts.json").read_text())
    assert all(verdict["details"]["pooled"] for verdict in verdicts), "a seed has no verdict of its own"
    found = {(v["claim"], v["subject"]): v for v in verdicts}
    status = {key: verdict["status"] for key, verdict in found.items()}
    assert status["anisotropy_grows_with_bias", "bert"] == "holds"
    sharp = {part["name"]: part for part in found["sharpness_grows_with_bias", "bert"]["details"]["parts"]}
    assert sharp["xavier, width 32, normed inputs: size of the rise"]["status"] == "holds"
    flat = sharp["normal, width 32, plain inputs: size of the rise"]
    assert flat["high"] < flat["margin"], "an order without a size"
    assert status["sharpness_grows_with_bias", "bert"] == "undecided", "some arms hold and others fail"
    assert status["sharpness_grows_with_bias", "prenorm"] == "fails", "a norm before attention takes the bias away"
    added = found["anisotropic_at_initialisation", "bert"]
    assert added["status"] == "fails" and "that of its inputs" in added["why"], "small weights let the inputs pass"
    parts = {part["name"]: part for part in added["details"]["parts"]}
    assert parts["xavier, width 32, normed inputs"]["effect"] > 5 * parts["normal, width 32, normed inputs"]["effect"]


def test_every_preset_has_a_bias_whose_inputs_are_half_anisotropic() -> None:
    for preset in ("tiny", "full"):
        config = UntrainedConfig(preset=preset)
        for width in config.size.widths:
            for square in (width, width * 0.02**2):  # of ‖x‖, with and without a norm
                cosines = [bias**2 / (bias**2 + square) for bias in config.biases]
                assert any(BETWEEN[0] < cosine < BETWEEN[1] for cosine in cosines), (preset, width, square)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"preset": "huge"}, "huge"),
        ({"inits": ("norml",)}, "normal"),
        ({"input_norm": "maybe"}, "maybe"),
        ({"biases": (-1.0,)}, "-1"),
        ({"biases": (math.nan,)}, "nan"),
        ({"biases": (1.0, 1.0)}, "twice"),
        ({"widths": (100,)}, "--heads"),
        ({"widths": (96,), "heads": 7}, "7 heads"),
        ({"sequences": 1}, "at least 2"),
        ({"length": 4}, "at least 8"),
        ({"seeds": ()}, "empty"),
    ],
)
def test_bad_settings_are_told_in_a_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(AnisoscopeError, match=words):
        UntrainedConfig(**options)
