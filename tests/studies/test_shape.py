"""The study of learning's shape: arms that differ in one thing each, joined, resumable, and none lost to another."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from anisoscope.errors import AnisoscopeError
from anisoscope.execution.local import LocalProcesses
from anisoscope.results.folder import RunFolder
from anisoscope.studies.arms import CleanMonitor, LocalExecutor, train_arm, unmasked
from anisoscope.studies.config import StudyArm
from anisoscope.studies.published import SHAPE_MODELS, PaperModel
from anisoscope.studies.shape import ARMS, PRESETS, ShapeConfig, ShapeStudy
from anisoscope.tangent.plan import GEOMETRY
from anisoscope.training.config import TrainConfig
from anisoscope.training.corpus import prepare_corpus
from anisoscope.training.language_model import WindowStream, build_model
from anisoscope.training.loop import Trainer
from support.light_arms import light_work

TINY: dict[str, Any] = {
    "sizes": ("1x16",),
    "steps": 4,
    "context": 16,
    "contexts": 24,
    "limit": 0.1,
    "when": "0,2,4",
    "metrics": "svd_ratio,average_cosine,two_nn",
    "device": "cpu",
}


def study(out: Path, *, jobs: int = 1, resume: bool = False, **more: Any) -> Path:
    config = ShapeConfig(**TINY | more)
    return ShapeStudy(config, RunFolder.create(out, asdict(config), resume=resume), jobs=jobs).run()


def values(folder: Path) -> dict[tuple[Any, ...], float]:
    names = ("model", "seed", "step", "layer", "kind", "head", "group", "metric", "variant")
    rows = RunFolder.open(folder).table().records()
    found = {tuple(row[name] for name in names): row["value"] for row in rows}
    assert len(found) == len(rows), "one row for each"
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return study(tmp_path_factory.mktemp("study") / "whole")


# -- what is run -------------------------------------------------------------------------------------------------------


def test_arms_differ_in_one_thing_each() -> None:
    runs = {name: asdict(training) for name, training, _ in ShapeConfig(**TINY).runs()}
    first, second, third = (runs[f"{arm}-1x16"] for arm in ARMS)
    assert {key for key in first if first[key] != second[key]} == {"objective"}
    assert {key for key in second if second[key] != third[key]} == {"arch"}


def test_presets_are_those_of_the_protocol() -> None:
    small = ShapeConfig(preset="small").runs()
    each = [(f"{arm}-{size}", seed) for size in ("6x256", "12x512") for seed in (0, 1, 2) for arm in ARMS]
    assert sorted((name, seed) for name, _, seed in small) == sorted(each)
    assert {t.tokens for _, t, _ in small} == {"enwik8"} and {t.context for _, t, _ in small} == {256}
    assert all(t.steps == 4000 and t.heads == 8 for name, t, _ in small if "12x512" in name)
    tiny = ShapeConfig().runs()
    assert len(tiny) == 3 and all(training.layers >= 5 for _, training, _ in tiny), "a bell needs blocks"
    for name, preset in PRESETS.items():
        assert preset.contexts * preset.train["context"] >= 2 * 1.25 * 4096, (
            f"{name}: 4096 rows in each half, with room"
        )
    given = ShapeConfig(preset="small", sizes=("2x64",), seeds=(3, 4), arms=("causal-next",), steps=7)
    assert [(name, t.seed, t.steps) for name, t, _ in given.runs()] == [("causal-next-2x64", s, 7) for s in (3, 4)]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"preset": "large"}, "unknown preset 'large'"),
        ({"arms": ("causal",)}, "unknown arm 'causal'; did you mean 'causal-next'"),
        ({"arms": ()}, "at least one arm"),
        ({"sizes": ("12-512",)}, "size '12-512' is not understood; expected layers x width such as 12x512"),
        ({"sizes": ("2x64", "2x64")}, "'causal-next-2x64' of seed 0 is named twice"),
        ({"seeds": (1, 1)}, "of seed 1 is named twice"),
        ({"sizes": ("2x66",)}, "width 66 does not divide into 4 heads"),
        ({"steps": 10, "when": "0,11"}, "step 11 is to be measured, but the training ends after 10"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_trained(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(AnisoscopeError, match=sentence):
        ShapeConfig(**wrong)


# -- trained arms ------------------------------------------------------------------------------------------------------


def test_the_study_joins_its_arms_and_judges_them(whole: Path) -> None:
    about = RunFolder.open(whole).about()
    assert (about["kind"], about["study"], about["status"]) == ("study", "shape", "complete")
    assert [(m["name"], m["seed"], m["type"]) for m in about["models"]] == [
        ("causal-next-1x16", 0, "decoder"),
        ("causal-masked-1x16", 0, "decoder"),
        ("bidirectional-masked-1x16", 0, "encoder"),
    ]
    assert len({model["parameters"] for model in about["models"]}) == 1
    assert sorted(p.name for p in (whole / "arms").iterdir()) == sorted(f"{arm}-1x16-seed0" for arm in ARMS)
    table = RunFolder.open(whole).table()
    for arm in ARMS:
        mine = table.where(model=f"{arm}-1x16")
        assert set(mine.where(metric="svd_ratio").arrow["step"].to_pylist()) == {0, 2, 4}
        assert set(mine.where(metric="probe_loss").arrow["step"].to_pylist()) == {0, 2, 4}, "held-out loss of every arm"
        assert {"", "half:1", "half:2"} <= set(mine.where(metric="two_nn").arrow["group"].to_pylist())
    judged = {verdict["claim"] for verdict in json.loads((whole / "verdicts.json").read_text())}
    assert {"mask_effect", "objective_effect", "bell_shaped", "two_phases"} <= judged
    assert not judged & {"tangent_energy", "amplified"}, "what was not looked at is not listed"


def test_all_arms_begin_alike_on_the_same_text(whole: Path) -> None:
    """At step 0 two arms of the same mask are the same model; another mask shows at once."""
    found = values(whole)
    start = {key: value for key, value in found.items() if key[2] == 0 and key[4] == "resid"}
    next_, masked, both = ({k[1:]: v for k, v in start.items() if k[0] == f"{arm}-1x16"} for arm in ARMS)
    assert next_ and next_ == pytest.approx(masked, nan_ok=True) and next_.keys() == both.keys()
    assert any(abs(next_[key] - both[key]) > 1e-9 for key in next_)
    end = [{k[3:]: v for k, v in found.items() if k[0] == f"{a}-1x16" and k[2] == 4 and k[4] == "resid"} for a in ARMS]
    assert any(abs(end[0][key] - end[1][key]) > 1e-9 for key in end[0]), "they do learn different things"


def test_a_masked_model_is_looked_at_without_masks_and_its_loss_with(tmp_path: Path) -> None:
    corpus = prepare_corpus("embedded", tmp_path / "corpus", tokens="enwik8", limit=0.1)
    stream = WindowStream(corpus, 16, objective="masked")
    masked = stream.probe_batches(24)
    clean = unmasked(masked)
    assert torch.equal(torch.cat([b["input_ids"] for b in clean]), torch.as_tensor(stream.probe_ids(24)))
    config = TrainConfig(family="prenorm", objective="masked", layers=2, width=16, heads=2, context=16, device="cpu")
    model = build_model(config, vocab_size=corpus.vocab_size)
    monitor = CleanMonitor(model, masked=masked, probe=clean, metrics=["average_cosine"], when=lambda step: True)
    with monitor, monitor.step(0):
        pass
    labels = torch.cat([batch["labels"] for batch in masked])
    with torch.no_grad():
        logits = model(input_ids=torch.cat([batch["input_ids"] for batch in masked])).logits.double()
        rows = model(torch.cat([b["input_ids"] for b in clean]), output_hidden_states=True).hidden_states[1]
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    found = monitor.table.where(metric="probe_loss").records()
    assert [row["value"] for row in found] == pytest.approx([wanted.item()], rel=1e-5)
    mean = torch.nn.functional.normalize(rows.flatten(0, 1).double(), dim=1).mean(0)
    alike = monitor.table.where(metric="average_cosine", kind="resid", layer=1).records()[0]
    n = 24 * 16
    assert alike["value"] == pytest.approx(float((n * mean @ mean - 1) / (n - 1)), rel=1e-4), "of the text as it is"


def test_a_study_killed_in_one_arm_goes_on_with_the_same_numbers(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _stop_in(monkeypatch, lambda training, step: training.objective == "masked" and step == 2)
    with pytest.raises(KeyboardInterrupt):
        study(tmp_path / "study")
    about = RunFolder.open(tmp_path / "study").about()
    assert about["status"] == "interrupted" and (tmp_path / "study" / "verdicts.json").is_file()
    assert {key[0] for key in values(tmp_path / "study")} == {"causal-next-1x16", "causal-masked-1x16"}
    monkeypatch.undo()
    before = (tmp_path / "study" / "arms" / "causal-next-1x16-seed0" / "log.jsonl").read_bytes()
    study(tmp_path / "study", resume=True)
    assert values(tmp_path / "study") == pytest.approx(values(whole), nan_ok=True)
    after = (tmp_path / "study" / "arms" / "causal-next-1x16-seed0" / "log.jsonl").read_bytes()
    assert before == after, "a finished arm is not run again"


def _stop_in(monkeypatch: pytest.MonkeyPatch, when: Callable[[TrainConfig, int], bool], error: Any = None) -> None:
    update = Trainer.update

    def then(self: Trainer, step: int) -> None:
        if when(self.config, step):
            raise error or KeyboardInterrupt
        update(self, step)

    monkeypatch.setattr(Trainer, "update", then)


def test_a_failing_arm_does_not_lose_the_others(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _stop_in(monkeypatch, lambda t, step: t.arm == "decoder-masked" and step == 1, AnisoscopeError("the loss is nan."))
    with pytest.raises(
        AnisoscopeError, match=r"1 of 3 arms failed .*causal-masked-1x16-seed0: the loss is nan.*--resume"
    ):
        study(tmp_path / "study")
    about = RunFolder.open(tmp_path / "study").about()
    assert about["status"] == "failed" and [f["arm"] for f in about["failed"]] == ["causal-masked-1x16-seed0"]
    found = values(tmp_path / "study")
    for arm in ("causal-next-1x16", "bidirectional-masked-1x16"):
        assert {k: v for k, v in found.items() if k[0] == arm} == pytest.approx(
            {k: v for k, v in values(whole).items() if k[0] == arm}, nan_ok=True
        )
    assert "objective_effect" in {v["claim"] for v in json.loads((tmp_path / "study" / "verdicts.json").read_text())}
    monkeypatch.undo()
    study(tmp_path / "study", resume=True)
    assert values(tmp_path / "study") == pytest.approx(values(whole), nan_ok=True)
    assert RunFolder.open(tmp_path / "study").about()["failed"] == []


def test_nothing_left_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _stop_in(monkeypatch, lambda *_: True, RuntimeError("out of memory"))
    with pytest.raises(AnisoscopeError, match=r"3 of 3 arms failed .*RuntimeError: out of memory.* nothing is left"):
        study(tmp_path / "study")
    trace = tmp_path / "study" / "arms" / "causal-next-1x16-seed0" / "error.txt"
    assert "Traceback" in trace.read_text(), "what was not foreseen can be looked into"


def test_small_without_data_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalExecutor, "map", lambda *_: {})
    study(tmp_path / "study", preset="small")
    assert "meant for enwik8: --data PATH" in RunFolder.open(tmp_path / "study").about()["warnings"][0]


# -- at the same time --------------------------------------------------------------------------------------------------


@pytest.fixture
def arm(tmp_path: Path) -> Iterator[Callable[[str], StudyArm]]:
    def make(name: str) -> StudyArm:
        (tmp_path / name).mkdir()
        return StudyArm(name, tmp_path / name, TrainConfig(device="cpu"), {}, tmp_path / "corpus")

    return (yield make)


@pytest.mark.slow
def test_arms_run_at_the_same_time_and_their_errors_come_back(arm: Callable[[str], StudyArm], tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    arms = [arm(name) for name in ("failing", "killed", "good", "done")]
    (tmp_path / "done" / "run.json").write_text('{"status": "complete"}')
    failed = LocalExecutor(2).map(light_work, arms, lambda *words: told.append(words))
    assert failed == {"failing": "the loss became nan.", "killed": f"its process ended with code {-signal.SIGKILL}"}
    finished = {name: (tmp_path / name / "finished").is_file() for name in ("good", "done")}
    assert finished == {"good": True, "done": False}, "what is complete costs no process"
    assert ("good: train", 2, 2) in told and ("failing: train", 1, 2) in told


@pytest.mark.slow
def test_an_interruption_lets_every_arm_save(arm: Callable[[str], StudyArm], tmp_path: Path) -> None:
    heard: set[str] = set()

    def hear(what: str, done: int, of: int) -> None:
        heard.update([what] if what.endswith("train") else [])
        if len(heard) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LocalExecutor(2).map(light_work, [arm(f"endless{k}") for k in range(3)], hear)
    assert [(tmp_path / f"endless{k}" / "saved").is_file() for k in range(3)] == [True, True, False]


def test_jobs_are_counted(arm: Callable[[str], StudyArm]) -> None:
    with pytest.raises(AnisoscopeError, match="jobs is 0"):
        LocalExecutor(0)


@pytest.mark.slow
def test_arms_trained_together_give_the_same_numbers(whole: Path, tmp_path: Path) -> None:
    out = study(tmp_path / "study", jobs=2)
    assert values(out) == pytest.approx(values(whole), rel=1e-5, abs=1e-7, nan_ok=True)
    assert [m["name"] for m in RunFolder.open(out).about()["models"]] == [f"{arm}-1x16" for arm in ARMS]


@pytest.mark.slow
def test_arms_by_jobs_of_which_one_is_killed_give_the_same_numbers(whole: Path, tmp_path: Path) -> None:
    killed: list[int] = []

    def hear(what: str, done: int, of: int) -> None:
        if what.endswith("seed0: train") and not killed:  # some arm is under way
            worker = multiprocessing.active_children()[0]
            killed.append(worker.pid or 0)
            worker.kill()

    config = ShapeConfig(**TINY)
    folder = RunFolder.create(tmp_path / "study", asdict(config), resume=False)
    out = ShapeStudy(config, folder, executor=LocalProcesses(1), progress=hear).run()
    assert values(out) == pytest.approx(values(whole), rel=1e-5, abs=1e-7, nan_ok=True)
    about = RunFolder.open(out).about()
    assert [m["name"] for m in about["models"]] == [f"{arm}-1x16" for arm in ARMS]
    assert len(about["executor"]["retried"]) == 1 and killed


# -- the models of the paper -------------------------------------------------------------------------------------------


@pytest.fixture
def shelf(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[PaperModel, ...]:
    """Folders that stand for hub ids: a decoder, one that is missing, a series, one that cannot be read."""
    source = whole / "arms" / "causal-next-1x16-seed0" / "checkpoints" / "checkpoint-4"
    for name in ("one", "series/checkpoint-0", "series/checkpoint-4", "broken"):
        shutil.copytree(source, tmp_path / "hub" / name, ignore=shutil.ignore_patterns("training"))
    shutil.copytree(
        whole / "arms" / "bidirectional-masked-1x16-seed0" / "checkpoints" / "checkpoint-4",
        tmp_path / "hub" / "encoder",
        ignore=shutil.ignore_patterns("training"),
    )
    (tmp_path / "hub" / "broken" / "model.safetensors").write_bytes(b"half")
    specs = ("one", "missing", "series", "broken", "encoder")
    models = tuple(PaperModel(str(tmp_path / "hub" / s), series=s == "series", large=s == "one") for s in specs)
    monkeypatch.setattr("anisoscope.studies.published.SHAPE_MODELS", models)
    monkeypatch.setitem(GEOMETRY, "shape", ("svd_ratio", "average_cosine", "two_nn"))
    return models


PAPERS: dict[str, Any] = {"preset": "paper", "probe_tokens": 512, "device": "cpu"}


@pytest.mark.slow
def test_what_cannot_be_had_is_skipped_and_the_rest_goes_on(shelf: tuple[PaperModel, ...], tmp_path: Path) -> None:
    config = ShapeConfig(**PAPERS)
    out = ShapeStudy(config, RunFolder.create(tmp_path / "paper", asdict(config), resume=False)).run()
    about = RunFolder.open(out).about()
    assert about["status"] == "complete"
    assert [Path(skipped["model"]).name for skipped in about["skipped"]] == ["missing", "broken"]
    assert all(skipped["reason"] for skipped in about["skipped"])
    assert [(m["name"], m["type"]) for m in about["models"]] == [
        ("one", "decoder"),
        ("series", "decoder"),
        ("encoder", "encoder"),
    ]
    table = RunFolder.open(out).table().where(metric="svd_ratio", kind="resid", group="")
    assert set(table.where(model="series").arrow["step"].to_pylist()) == {0, 4}
    assert set(table.arrow["model"].to_pylist()) == {"one", "series", "encoder"}

    shutil.copytree(tmp_path / "hub" / "one", tmp_path / "hub" / "missing")  # it has come; the others are not looked at
    kept = RunFolder.open(out / "arms" / _arm_of(shelf[0])).about()["started"]
    ShapeStudy(config, RunFolder.create(out, asdict(config), resume=True)).run()
    again = RunFolder.open(out).about()
    assert [Path(skipped["model"]).name for skipped in again["skipped"]] == ["broken"]
    assert [model["name"] for model in again["models"]] == ["one", "missing", "series", "encoder"]
    assert RunFolder.open(out / "arms" / _arm_of(shelf[0])).about()["started"] == kept


def _arm_of(model: PaperModel) -> str:
    from anisoscope.results.folder import slug

    return slug(model.spec)


def test_when_no_model_is_here_all_are_named(
    shelf: tuple[PaperModel, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tuple(replace(model, spec=f"{model.spec}-gone") for model in shelf)
    monkeypatch.setattr("anisoscope.studies.published.SHAPE_MODELS", gone)
    config = ShapeConfig(**PAPERS)
    with pytest.raises(AnisoscopeError, match=r"none of the 5 models of the paper could be loaded \(the first: .*gone"):
        ShapeStudy(config, RunFolder.create(tmp_path / "paper", asdict(config), resume=False)).run()
    about = RunFolder.open(tmp_path / "paper").about()
    assert about["status"] == "failed" and [s["model"] for s in about["skipped"]] == [m.name for m in gone]


def test_the_papers_models_are_all_there() -> None:
    specs = [model.spec for model in SHAPE_MODELS]
    assert len(set(specs)) == len(specs)
    words = ("bert", "roberta", "albert", "gpt2", "opt-125m", "opt-13b", "llama-2", "gpt-j", "falcon-7b", "bloom")
    assert all(any(word in spec.lower() for spec in specs) for word in words)
    series = {model.spec: model for model in SHAPE_MODELS if model.series}
    assert series["EleutherAI/pythia-2.8b"].revisions[0] == "step0"
    assert {f"bigscience/bloom-{size}-intermediate" for size in ("560m", "1b1", "1b7")} < set(series)
    assert "TinyLlama/tinyLlama-intermediate-checkpoints-after-1T-token" in series
    large = [model.spec.partition("/")[2] for model in SHAPE_MODELS if model.large]
    assert " ".join(large) == "opt-6.7b opt-13b Llama-2-7b-hf Llama-2-13b-hf gpt-j-6b falcon-7b bloom-7b1", "from 6B on"


def test_train_arm_is_what_children_run() -> None:
    assert train_arm.__module__ == "anisoscope.studies.arms", "a process of its own must find it by name"
