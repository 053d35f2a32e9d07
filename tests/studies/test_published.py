"""The published models of the papers: what the lists say, and that what cannot be had is named and left out."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anisoscope.errors import AnisoscopeError
from anisoscope.models.tokenizer import FINAL
from anisoscope.results.folder import RunFolder
from anisoscope.results.privacy import marked
from anisoscope.series.discovery import find_series, named_step
from anisoscope.studies.inherent import InherentConfig
from anisoscope.studies.published import INHERENT_MODELS, REVISITING_MODELS, SHAPE_MODELS, PaperModel, chosen_models
from anisoscope.studies.revisiting import Revisiting, RevisitingConfig
from anisoscope.studies.shape import ShapeConfig, ShapeStudy
from anisoscope.tangent.plan import GEOMETRY
from support.tiny_series import TEXT, Hub, letters, make_series

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
        letters().save_pretrained(tmp_path / "repo" / f"step{step}")
    Hub(tmp_path / "repo", tmp_path / "cache").install(monkeypatch).broken = {"step10"}
    models = (PaperModel("org/tiny", series=True, revisions=("step0", "step40")), PaperModel(str(tmp_path / "gated")))
    monkeypatch.setattr("anisoscope.studies.published.SHAPE_MODELS", models)
    monkeypatch.setitem(GEOMETRY, "shape", ("average_cosine", "two_nn"))
    config = ShapeConfig(preset="paper", probe_tokens=320, device="cpu", data=TEXT)

    def run(*, resume: bool) -> dict[str, Any]:
        out = ShapeStudy(config, RunFolder.create(tmp_path / "paper", asdict(config), resume=resume)).run()
        return RunFolder.open(out).about()

    about = run(resume=False)
    assert about["status"] == "complete" and [s["model"] for s in about["skipped"]] == ["gated"]
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
        for checkpoint in make_series(tmp_path / "hub" / name, (0, 10)).iterdir():
            letters().save_pretrained(checkpoint)
    models = tuple(PaperModel(str(tmp_path / "hub" / name), series=True) for name in ("one", "two", "three"))
    monkeypatch.setattr("anisoscope.studies.published.REVISITING_MODELS", models)
    chosen = ("three", models[0].spec)
    config = RevisitingConfig(preset="paper", models=chosen, probe_tokens=4_096, rank=2, device="cpu", data=TEXT)
    out = Revisiting(config, RunFolder.create(tmp_path / "run", asdict(config), resume=False)).run()
    about = RunFolder.open(out).about()
    assert about["status"] == "complete" and about["config"]["models"] == marked(chosen)
    assert [model["name"] for model in about["models"]] == ["three", "one"] and not about["skipped"]
    table = RunFolder.open(out).table()
    assert set(table.where(metric="gradient_energy").arrow["model"].to_pylist()) == {"one", "three"}


# -- what a hub lists --------------------------------------------------------------------------------------------------

LATER = tuple(f"step-{k}k-token-{t}T" for k, t in ((715, 1.5), (955, 2), (1195, 2.5), (1431, 3)))
SERIES = {model.spec: model for model in EVERY if model.wanted}


def _listing(monkeypatch: pytest.MonkeyPatch, names: Sequence[str]) -> None:
    """A hub whose repositories all have these branches, beside main and names without a step."""
    refs = SimpleNamespace(branches=[SimpleNamespace(name=n) for n in ("main", "stage1-v2", *names)], tags=[])
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: SimpleNamespace(list_repo_refs=lambda _: refs))
    monkeypatch.setattr("anisoscope.models.source.hub_reachable", lambda *_: True)


@pytest.mark.parametrize("spec", SERIES)
def test_revisions_of_every_series_are_discovered_and_a_missing_one_is_named(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub has two of three known revisions, and many between them."""
    known = SERIES[spec].revisions or LATER
    form = re.sub(r"\d+", "{}", known[1], count=1)
    between = [form.format(n) for n in range(named_step(known[0]) or 1, 20_000, 997)] if "k-" not in form else []
    kept = [name for place, name in enumerate(known) if place % 3 != 1]
    _listing(monkeypatch, [*reversed(kept), *between])
    found = find_series([spec], SERIES[spec].wanted)
    steps = [checkpoint.step for checkpoint in found.checkpoints]
    there = {named_step(name) for name in (*kept, *between)}
    assert set(steps) <= there and steps[0] == min(there) and steps[-1] == max(there) and steps == sorted(steps)
    assert 2 <= len(steps) <= SERIES[spec].most + 1
    missing = [name for name in SERIES[spec].revisions if name not in {*kept, *between}]
    assert all(any(name in note and "not on the hub" in note for note in found.notes) for name in missing)


def test_without_a_hub_the_lists_are_taken_and_a_series_without_one_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anisoscope.models.source.hub_reachable", lambda *_: False)
    monkeypatch.setattr("anisoscope.series.discovery.revisions_of", lambda *_, **__: [])
    for spec, model in SERIES.items():
        if model.revisions:
            assert tuple(c.revision for c in find_series([spec], model.wanted).checkpoints) == model.revisions
        else:  # a sentence, which `measure_models` records as the reason
            with pytest.raises(AnisoscopeError, match="the hub cannot be reached"):
                find_series([spec], model.wanted)
    (later,) = [model for model in EVERY if model.others and "TinyLlama" in model.spec]
    assert [c.step for c in find_series([later.spec, *later.others]).checkpoints] == [
        715_000,
        955_000,
        1_195_000,
        1_431_000,
    ]


def test_repositories_of_intermediate_checkpoints_have_a_final_one() -> None:
    """Most of them hold weights alone, which would be refused."""
    intermediate = {spec for spec in SERIES if "intermediate" in spec}
    assert len(intermediate) == 7 and intermediate <= set(FINAL)
    assert all(FINAL[f"bigscience/bloom-{size}-intermediate"] == f"bigscience/bloom-{size}" for size in ("560m", "1b7"))


@pytest.mark.parametrize("online", [True, False])
def test_a_chosen_series_without_a_tokenizer_is_read_with_that_of_its_final_model(
    online: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a hub that can be reached, and from its cache: the repository has weights alone, under two revisions."""
    spec, names = "bigscience/bloom-560m-intermediate", ("global_step1000", "global_step10000")
    shelf = make_series(tmp_path / "shelf", (1000, 10000))
    for name in names:
        shutil.copytree(shelf / name.replace("global_step", "checkpoint-"), tmp_path / "repo" / name)
    hub = Hub(tmp_path / "repo", tmp_path / "cache", name=spec).install(monkeypatch)
    if not online:
        for name in names:
            hub.snapshot_download(spec, revision=name)
        monkeypatch.setattr("anisoscope.models.source.hub_reachable", lambda *_: False)
        hub.fetched.clear()
    asked: list[str] = []

    def named(name: str, **_: Any) -> Any:
        asked.append(name)
        return letters()

    monkeypatch.setattr("anisoscope.models.tokenizer.named_tokenizer", named)
    monkeypatch.setitem(GEOMETRY, "shape", ("average_cosine", "two_nn"))
    config = ShapeConfig(preset="paper", models=("bloom-560m-intermediate",), probe_tokens=320, device="cpu", data=TEXT)
    out = ShapeStudy(config, RunFolder.create(tmp_path / "run", asdict(config), resume=False)).run()
    about = RunFolder.open(out).about()
    assert about["status"] == "complete" and not about["skipped"] and set(asked) == {"bigscience/bloom-560m"}
    assert hub.fetched == (list(names) if online else [])
    table = RunFolder.open(out).table().where(metric="average_cosine")
    assert set(table.arrow["step"].to_pylist()) == {1000, 10000}
    assert "the tokenizer is that of bigscience/bloom-560m" in "\n".join(about["warnings"])


def test_the_trained_arms_have_a_pre_norm_encoder_and_several_families_of_convolutions() -> None:
    runs = {run.model: run.training for run in InherentConfig().runs()}
    assert runs["text-encoder"].family == "prenorm" and runs["text-encoder"].arch == "encoder"
    assert {each.arch for name, each in runs.items() if name.startswith("convolution")} == {
        "convnext",
        "resnet",
        "efficientnet",
    }
