"""The study of sharpness: arms that differ in their attention alone, joined, resumable, drawn."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from anisoscope.commands.drawing import write_study_report
from anisoscope.errors import AnisoscopeError
from anisoscope.models.attention_variant import VARIANTS
from anisoscope.models.load import load_model
from anisoscope.results.folder import RunFolder
from anisoscope.studies.sharpness import ARMS, PRESETS, Sharpness, SharpnessConfig
from anisoscope.studies.sharpness.figures import RELATIVE, ArmNumbers
from anisoscope.training.corpus import prepare_corpus
from anisoscope.training.language_model import make_stream
from anisoscope.training.loop import Trainer
from anisoscope.training.run_files import read_log
from anisoscope.view.subjects import RunView

TINY: dict[str, Any] = {
    "sizes": ("1x16",),
    "seeds": (0,),
    "steps": 3,
    "context": 16,
    "contexts": 24,
    "limit": 0.1,
    "when": "0,1,3",
    "device": "cpu",
}


def study(out: Path, *, resume: bool = False, **more: Any) -> Path:
    config = SharpnessConfig(**TINY | more)
    return Sharpness(config, RunFolder.create(out, asdict(config), resume=resume), jobs=1).run()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return study(tmp_path_factory.mktemp("study") / "whole")


# -- what is run -------------------------------------------------------------------------------------------------------


def test_arms_differ_in_their_attention_alone() -> None:
    runs = [asdict(training) for _, training, seed in SharpnessConfig(**TINY).runs() if seed == 0]
    assert [run["attention"] for run in runs] == list(ARMS) == list(VARIANTS)
    assert all({key for key in run if run[key] != runs[0][key]} <= {"attention"} for run in runs)


def test_arms_see_the_same_batches_in_the_same_order(tmp_path: Path) -> None:
    prepare_corpus("embedded", tmp_path / "corpus", tokens="enwik8", limit=0.1)
    runs = SharpnessConfig(**TINY | {"seeds": (0, 1)}).runs()
    streams = [make_stream(training, tmp_path, corpus=tmp_path / "corpus") for _, training, _ in runs]
    batches = [[stream.batch(step, 0)["input_ids"] for step in range(3)] for stream in streams]
    first, other = batches[: len(ARMS)], batches[len(ARMS)]
    assert all(torch.equal(a, b) for arm in first for a, b in zip(first[0], arm, strict=True))
    assert not torch.equal(first[0][0], other[0]), "the counter-test: another seed"


def test_presets_have_three_seeds_and_all_arms() -> None:
    for name, preset in PRESETS.items():
        runs = SharpnessConfig(preset=name).runs()
        assert len(runs) == len(ARMS) * 3 and {seed for *_, seed in runs} == {0, 1, 2}, name
        assert {training.family for _, training, _ in runs} == {"prenorm"} and preset.jobs > 1
    small = SharpnessConfig(preset="small").runs()[0][1]
    assert (small.layers, small.width, small.steps, small.context) == (12, 512, 2000, 256)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"preset": "paper"}, "unknown preset 'paper'"),
        ({"arms": ("qknorm",)}, "unknown arm 'qknorm'; did you mean 'qk-norm'"),
        ({"arms": ()}, "at least one arm"),
        ({"sizes": ("3-64",)}, "size '3-64' is not understood"),
        ({"seeds": (1, 1)}, "of seed 1 is named twice"),
        ({"steps": 3, "when": "0,4"}, "step 4 is to be measured, but the training ends after 3"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_trained(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(AnisoscopeError, match=sentence):
        SharpnessConfig(**TINY | wrong)


# -- what comes out ----------------------------------------------------------------------------------------------------


def test_arms_start_as_one_model_and_part(whole: Path) -> None:
    folder = RunFolder.open(whole)
    assert folder.about()["study"] == "sharpness" and folder.about()["status"] == "complete"
    rows = [r for r in folder.table().records() if r["metric"] == "probe_loss" and r["seed"] == 0]
    losses = {(r["model"].removesuffix("-1x16"), r["step"]): r["value"] for r in rows}
    assert len(losses) == len(ARMS) * 3
    logs = {arm: read_log(whole / "arms" / f"{arm}-1x16-seed0" / "log.jsonl") for arm in ARMS}
    assert {len(log) for log in logs.values()} == {3}
    assert len({losses[arm, 3] for arm in ARMS}) == len(ARMS), "they learn differently"


def test_every_arm_has_the_geometry_of_its_attention(whole: Path) -> None:
    (results,) = ArmNumbers.all(RunView(RunFolder.open(whole).table()))
    assert results.arms == list(ARMS) and results.steps == [0, 1, 3] and results.seeds == [0]
    sharp = {arm: results.mark(arm, 3, "scores", "attention_sharpness").value for arm in ARMS}
    assert sharp["uniform"] == pytest.approx(0.0, abs=1e-6) and sharp["fixed-sharp"] > 3 * sharp["softmax"]
    for kind in ("query", "key"):
        drift = {arm: results.mark(arm, 3, kind, RELATIVE).value for arm in ARMS}
        assert drift["uniform"] == 0.0 and drift["mean-removed"] < 0.1 < drift["softmax"]
        assert math.isnan(results.mark("uniform", 3, kind, "average_cosine").value), "zero rows have no direction"


def test_both_questions_are_judged(whole: Path) -> None:
    verdicts = json.loads((whole / "verdicts.json").read_text())
    found = {(v["claim"], v["subject"]) for v in verdicts if not v["details"]["missing"]}
    assert {("anisotropy_without_drift", f"{arm}-1x16") for arm in ("mean-removed", "uniform")} <= found
    assert ("sharpness_needs_drift", "1x16") in found


@pytest.mark.usefixtures("drawn_figures")
def test_the_page_shows_every_arm_and_figure(whole: Path) -> None:
    page = write_study_report(whole, "sharpness").read_text(encoding="utf-8")
    hero = 2
    assert page.count('class="plot"') == hero + 2 + 3 + 6 + 4 + 2 and all(f"<code>{arm}</code>" in page for arm in ARMS)
    assert "anisotropy_without_drift" in page and "held-out loss of" in page
    assert {p.suffix for p in (whole / "figures").iterdir()} == {".pdf", ".svg"}


def test_a_checkpoint_of_an_arm_is_loaded_with_its_attention(whole: Path) -> None:
    path = whole / "arms" / "qk-norm-1x16-seed0" / "checkpoints" / "checkpoint-3"
    loaded = load_model(str(path), device="cpu")
    stored = load_file(path / "model.safetensors")
    kept = {name: value for name, value in loaded.model.state_dict().items() if name.endswith("log_temperature")}
    assert len(kept) == 1 and all(torch.equal(stored[name], value) for name, value in kept.items())
    assert loaded.is_decoder and loaded.predicts_next and not loaded.notes


def test_an_interrupted_study_goes_on_and_ends_the_same(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = Trainer.update

    def trouble(self: Any, step: int) -> None:
        if self.config.attention == "mean-removed" and step == 2:
            raise KeyboardInterrupt
        update(self, step)

    monkeypatch.setattr(Trainer, "update", trouble)
    with pytest.raises(KeyboardInterrupt):
        study(tmp_path / "parts", arms=("softmax", "mean-removed"))
    assert RunFolder.open(tmp_path / "parts").about()["status"] == "interrupted"
    monkeypatch.setattr(Trainer, "update", update)
    study(tmp_path / "parts", arms=("softmax", "mean-removed"), resume=True)
    found, expected = values(tmp_path / "parts"), values(whole)
    assert found == {key: value for key, value in expected.items() if key in found}
    assert {key[0] for key in found} == {"softmax-1x16", "mean-removed-1x16"}


def values(folder: Path) -> dict[tuple[Any, ...], str]:
    names = ("model", "seed", "step", "layer", "kind", "head", "group", "metric", "variant")
    return {tuple(row[n] for n in names): str(row["value"]) for row in RunFolder.open(folder).table().records()}
