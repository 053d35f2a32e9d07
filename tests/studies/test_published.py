"""The published models of the papers: what the lists say, and that what cannot be had is named and left out."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from anisoscope.errors import AnisoscopeError
from anisoscope.results.folder import RunFolder
from anisoscope.series.discovery import named_step
from anisoscope.studies.inherent import InherentConfig
from anisoscope.studies.published import INHERENT_MODELS, REVISITING_MODELS, SHAPE_MODELS, PaperModel, chosen_models
from anisoscope.studies.revisiting import Revisiting, RevisitingConfig
from anisoscope.studies.shape import ShapeConfig, ShapeStudy
from anisoscope.tangent.plan import GEOMETRY
from support.tiny_series import TEXT, Hub, make_series

EVERY = (*REVISITING_MODELS, *SHAPE_MODELS, *INHERENT_MODELS)


def test_lists_of_revisions_are_in_order_and_name_their_steps() -> None:
    for model in EVERY:
        steps = [
            named_step(name) for name in (model.revisions or ((model.spec, *model.others) if model.others else ()))
        ]
        assert None not in steps and steps == sorted(set(steps)), model.spec
        assert bool(model.revisions) <= model.series and not (model.revisions and model.others)


@pytest.mark.parametrize(
    ("spec", "last"),
    [
        ("allenai/OLMo-1B-hf", "step738020-tokens3094B"),
        ("HuggingFaceTB/SmolLM2-360M-intermediate-checkpoints", "step-2560000"),
        ("HuggingFaceTB/SmolLM2-1.7B-intermediate-checkpoints", "step-5125000"),
        ("EuroBERT/EuroBERT-210m", "step480000"),
        ("EuroBERT/EuroBERT-610m", "step480000"),
        ("bigscience/bloom-560m-intermediate", "global_step600000"),
    ],
)
def test_series_end_where_the_published_ones_do(spec: str, last: str) -> None:
    (model,) = [model for model in EVERY if model.spec == spec]
    assert model.revisions[-1] == last and model.wanted == (f"log:{model.most}", *model.revisions)


def test_single_models_and_folders_have_no_revisions(tmp_path: Path) -> None:
    assert PaperModel("gpt2").wanted == () == PaperModel(str(tmp_path), series=True).wanted
    assert PaperModel("a/b-step1", series=True, others=("a/b-step2",)).wanted == ()


def test_revisions_are_those_of_the_hub_and_a_missing_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub has 0, 10, 20, of which 10 cannot be fetched; the list also names one that is not there."""
    shelf = make_series(tmp_path / "shelf", (0, 10, 20))
    for step in (0, 10, 20):
        shutil.copytree(shelf / f"checkpoint-{step}", tmp_path / "repo" / f"step{step}")
    Hub(tmp_path / "repo", tmp_path / "cache").install(monkeypatch).broken = {"step10"}
    models = (PaperModel("org/tiny", series=True, revisions=("step0", "step40")), PaperModel(str(tmp_path / "gated")))
    monkeypatch.setattr("anisoscope.studies.published.SHAPE_MODELS", models)
    monkeypatch.setitem(GEOMETRY, "shape", ("average_cosine",))
    config = ShapeConfig(preset="paper", probe_tokens=320, device="cpu", data=TEXT)

    def run(*, resume: bool) -> dict[str, Any]:
        out = ShapeStudy(config, RunFolder.create(tmp_path / "paper", asdict(config), resume=resume)).run()
        return RunFolder.open(out).about()

    about = run(resume=False)
    assert about["status"] == "complete" and [s["model"] for s in about["skipped"]] == [models[1].spec]
    warned = "\n".join(about["warnings"])
    assert "step40 of org/tiny is not on the hub" in warned and "step10 could not be downloaded" in warned
    arm = RunFolder.open(tmp_path / "paper" / "arms" / "org-tiny")
    assert arm.about()["revisions"] == ["step0", "step10", "step20"]
    assert "revisions are 3 of the 3 that the hub has" in arm.about()["revision_notes"][-1]
    assert set(arm.table().where(metric="average_cosine").arrow["step"].to_pylist()) == {0, 20}
    shutil.rmtree(tmp_path / "repo" / "step20")  # a series goes on with the revisions that it began with
    again = run(resume=True)
    assert "step40 of org/tiny is not on the hub" in "\n".join(again["warnings"])
    assert arm.about()["revisions"] == ["step0", "step10", "step20"]


def test_models_are_chosen_by_name_or_id_and_each_once() -> None:
    names = ("pythia-160m", "allenai/OLMo-1B-hf", "EleutherAI/pythia-160m")
    assert [m.spec for m in chosen_models(names, REVISITING_MODELS)] == ["EleutherAI/pythia-160m", names[1]]
    assert chosen_models((), SHAPE_MODELS) == list(SHAPE_MODELS)
    for models in (REVISITING_MODELS, SHAPE_MODELS, INHERENT_MODELS):
        assert [chosen_models((m.name,), models)[0] for m in models] == list(models), "no name stands for two models"


@pytest.mark.parametrize(("config", "near"), [(RevisitingConfig, "pythia-1b"), (ShapeConfig, "gpt2-xl")])
def test_an_unknown_model_is_one_sentence_with_the_nearest(config: Any, near: str) -> None:
    with pytest.raises(AnisoscopeError, match=f"unknown model of the paper '{near}0'; did you mean '{near}' or '"):
        config(preset="paper", models=(f"{near}0",))
    with pytest.raises(AnisoscopeError, match=r"unknown model of the paper '\?'\. Known: bert-base-uncased, "):
        InherentConfig(preset="paper", models=("?",))


def test_part_of_a_preset_is_measured_with_its_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three folders stand for hub ids; two are named, one of them by its path, and the third is not looked at."""
    for name in ("one", "two", "three"):
        make_series(tmp_path / "hub" / name, (0, 10))
    models = tuple(PaperModel(str(tmp_path / "hub" / name), series=True) for name in ("one", "two", "three"))
    monkeypatch.setattr("anisoscope.studies.published.REVISITING_MODELS", models)
    chosen = ("three", models[0].spec)
    config = RevisitingConfig(preset="paper", models=chosen, probe_tokens=16_384, rank=2, device="cpu", data=TEXT)
    out = Revisiting(config, RunFolder.create(tmp_path / "run", asdict(config), resume=False)).run()
    about = RunFolder.open(out).about()
    assert about["status"] == "complete" and about["config"]["models"] == list(chosen)
    assert [model["name"] for model in about["models"]] == ["three", "one"] and not about["skipped"]
    table = RunFolder.open(out).table()
    assert set(table.where(metric="gradient_energy").arrow["model"].to_pylist()) == {"one", "three"}
