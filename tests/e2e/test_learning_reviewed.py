"""Faults that a review found in the commands about learning: each happens no more, and its neighbours still work."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from anisoscope.errors import AnisoscopeError
from anisoscope.monitor.sink import MonitorStore
from anisoscope.results.folder import RunFolder, replace_file
from anisoscope.results.query import Table
from anisoscope.studies.published import REVISITING_MODELS
from anisoscope.studies.revisiting import RevisitingConfig

Command = Callable[..., Any]
SMALL = ("--layers", 1, "--width", 32, "--heads", 2, "--context", 32, "--batch-size", 4, "--limit", 0.2)
BARE = (*SMALL, "--steps", 2, "--checkpoints", "log", "--device", "cpu")
TINY = (*BARE, "--contexts", 24, "--monitor", "light")
LOOK = ("--tokens", 1200, "--context", 32, "--draws", 19, "--preset", "light", "--device", "cpu")
STUDY = ("--arms", "decoder,encoder", "--steps", 2, "--layers", 1, "--width", 32, "--context", 32, "--metrics", "light")


@pytest.fixture(scope="module")
def arms(command: Command, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run on text as it is, another one of the same name and seed, and one on resampled text."""
    place = tmp_path_factory.mktemp("arms")
    options: dict[str, tuple[Any, ...]] = {
        "natural": (),
        "faster": ("--lr", 0.01),
        "flat": ("--frequency", "flat"),
    }
    for name, more in options.items():
        done = command("train", *TINY, *more, "--out", place / name)
        assert done.code == 0, done.err
    return {name: place / name for name in options}


def verdicts(command: Command, *runs: Path, claim: str) -> list[dict[str, Any]]:
    done = command("claims", *runs, "--format", "json", "--claims", claim)
    assert done.code == 0, done.err
    found: list[dict[str, Any]] = json.loads(done.out)
    return found


# names


def test_arms_are_named_after_their_corpus_and_compared(arms: dict[str, Path], command: Command) -> None:
    assert set(RunFolder.open(arms["flat"]).table().arrow["model"].to_pylist()) == {"decoder-flat"}
    found = verdicts(command, arms["natural"], arms["flat"], claim="frequency_intervention")
    assert [v["subject"] for v in found] == ["decoder over decoder-flat"]


def test_models_of_one_name_are_told_apart_by_their_run(arms: dict[str, Path], command: Command) -> None:
    both = verdicts(command, arms["natural"], arms["faster"], claim="tangent_energy")
    assert {v["subject"] for v in both} == {"decoder (natural)", "decoder (faster)"}
    one = verdicts(command, arms["natural"], arms["natural"], claim="tangent_energy")
    assert {v["subject"] for v in one} == {"decoder"}, "the same run twice is one run"


def test_other_seeds_of_a_model_keep_its_name() -> None:
    from anisoscope.commands.drawing import new_names

    tables = [Table.from_records([{"model": "decoder", "seed": seed}]) for seed in (0, 1, 1)]
    assert new_names(tables, ["a", "b", "c"]) == [{}, {"decoder": "decoder (b)"}, {"decoder": "decoder (c)"}]


def test_a_page_of_several_runs_judges_them_together(
    arms: dict[str, Path], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from anisoscope.commands import drawing as load

    seen: list[Any] = []
    draw = load._report_page
    monkeypatch.setattr(load, "_report_page", lambda views, **how: seen.append(views) or draw(views, **how))
    assert command("report", arms["natural"], arms["flat"], "--out", tmp_path).code == 0
    views = seen[0]
    alone = [v for name in ("natural", "flat") for v in json.loads((arms[name] / "verdicts.json").read_text())]
    pair = "frequency_intervention"
    assert {v["subject"] for v in alone if v["claim"] == pair} == {"frequency arms"}, "each run alone has no pair"
    joint = [v for view in views for v in view.verdicts if v["claim"] == pair]
    assert [v["subject"] for v in joint] == ["decoder over decoder-flat"]


def test_the_page_of_two_namesakes_can_be_drawn(arms: dict[str, Path], command: Command, tmp_path: Path) -> None:
    done = command("report", arms["natural"], arms["faster"], "--out", tmp_path / "page")
    assert done.code == 0, done.err
    page = (tmp_path / "page" / "report.html").read_text(encoding="utf-8")
    assert "decoder (natural)" in page and "decoder (faster)" in page


# resuming


@pytest.mark.parametrize(
    ("option", "value"), [("--rank", 4), ("--when", "0,2"), ("--contexts", 32), ("--monitor", "standard")]
)
def test_a_training_is_not_resumed_with_another_monitor(
    arms: dict[str, Path], command: Command, option: str, value: object
) -> None:
    done = command("train", *TINY, option, value, "--out", arms["natural"], "--resume")
    assert done.code == 2 and f"a run with {option[2:]} = " in done.sentence


def test_a_refused_training_leaves_the_page_as_it_was(arms: dict[str, Path], command: Command) -> None:
    before = (arms["natural"] / "report.html").stat().st_mtime_ns
    done = command("train", *TINY, "--out", arms["natural"])
    assert done.code == 2 and "unfinished" not in done.err
    assert (arms["natural"] / "report.html").stat().st_mtime_ns == before


@pytest.mark.parametrize("changed", [{"seed": 1}, {"plan": {"rank": 8}}, {"probe": "other"}, {"live": True}])
def test_a_monitor_is_not_resumed_with_other_options(tmp_path: Path, changed: dict[str, Any]) -> None:
    about: dict[str, Any] = {"when": "every(1)", "seed": 0, "plan": {"rank": 4}, "live": False, "probe": "this"}
    MonitorStore(tmp_path, resume=False, about=about).write_step(3, Table.from_records([]), {"step": 3})
    found = MonitorStore(tmp_path, resume=True, about=about).newest()
    assert found is not None and found["step"] == 3
    name = {"plan": "plan.rank"}.get(next(iter(changed)), next(iter(changed)))
    with pytest.raises(AnisoscopeError, match=f"monitored with {name} = "):
        MonitorStore(tmp_path, resume=True, about=about | changed).newest()


def test_a_mistyped_option_does_not_occupy_the_folder(command: Command, tmp_path: Path) -> None:
    wrong = command("train", *TINY, "--rank", 99, "--out", tmp_path / "run")
    assert wrong.code == 2 and "rank 99" in wrong.sentence
    right = command("train", *BARE, "--monitor", "none", "--out", tmp_path / "run")
    assert right.code == 0, right.err
    none = command("claims", tmp_path / "run")
    assert none.code == 2 and "--monitor none" in none.sentence


def interrupted(arch: str, patch: pytest.MonkeyPatch) -> None:
    """Send SIGTERM in the first update of that kind of model."""
    from anisoscope.training.loop import Trainer

    update = Trainer.update

    def then_stop(self: Trainer, step: int) -> None:
        update(self, step)
        if self.config.arch == arch and step == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    patch.setattr(Trainer, "update", then_stop)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [pytest.param("decoder", marks=pytest.mark.slow), "encoder"])
def test_a_study_that_was_stopped_has_a_page_and_goes_on(command: Command, tmp_path: Path, arch: str) -> None:
    out = tmp_path / "study"
    with pytest.MonkeyPatch.context() as patch:
        interrupted(arch, patch)
        done = command("study", "revisiting", *STUDY, "--limit", 0.2, "--device", "cpu", "--out", out)
    assert done.code == 143 and "--resume" in done.sentence
    assert RunFolder.open(out).about()["status"] == "interrupted"
    assert command("report", out).code == 0
    assert {0} <= set(RunFolder.open(out).table().where(model=arch).arrow["step"].to_pylist())
    again = command("study", "revisiting", *STUDY, "--limit", 0.2, "--device", "cpu", "--out", out, "--resume")
    assert again.code == 0, again.err
    energy = RunFolder.open(out).table().where(metric="gradient_energy", group="")
    for model in ("decoder", "encoder"):
        assert set(energy.where(model=model).arrow["step"].to_pylist()) == {0, 1, 2}
    assert [m["name"] for m in RunFolder.open(out).about()["models"]] == ["decoder", "encoder"]


# series


def test_a_series_says_what_is_wrong_with_its_checkpoints(
    arms: dict[str, Path], command: Command, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    series = tmp_path / "series"
    shutil.copytree(arms["natural"] / "checkpoints", series)
    for number in (3, 4, 5):
        shutil.copytree(series / "checkpoint-2", series / f"checkpoint-{number}")
    weights = load_file(series / "checkpoint-3" / "model.safetensors")
    next(iter(weights.values())).fill_(float("nan"))
    save_file(weights, series / "checkpoint-3" / "model.safetensors", metadata={"format": "pt"})
    path = series / "checkpoint-4" / "tokenizer.json"
    words = json.loads(path.read_text())
    vocabulary = words["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(words))
    (series / "checkpoint-5" / "model.safetensors").unlink()
    done = command("sweep", series, *LOOK, "--out", tmp_path / "swept")
    assert done.code == 0, done.err
    about = RunFolder.open(tmp_path / "swept").about()
    flags = {entry["step"]: entry["flags"] for entry in about["checkpoints"]}
    assert list(flags) == [0, 1, 2, 3, 4, 5] and flags[0] == flags[1] == flags[2] == []
    assert flags[3] == ["non-finite weights"]
    assert any(flag.startswith("another tokenizer than checkpoint-0") for flag in flags[4])
    assert flags[5][0].startswith("missing: ")
    energy = RunFolder.open(tmp_path / "swept").table().where(metric="gradient_energy")
    assert set(energy.arrow["step"].to_pylist()) == {0, 1, 2}
    cards = tmp_path / "swept" / "concepts.json"
    assert not cards.is_file() or {card["step"] for card in json.loads(cards.read_text())} <= {0, 1, 2}


def test_a_checkpoint_that_is_not_measured_has_no_cards_of_another(
    arms: dict[str, Path], command: Command, tmp_path: Path
) -> None:
    series = tmp_path / "series"
    shutil.copytree(arms["natural"] / "checkpoints", series)
    look = tuple("standard" if word == "light" else word for word in LOOK)
    shutil.rmtree(series / "checkpoint-1")
    for path in (series / "checkpoint-2").glob("tokenizer*"):
        path.unlink()
    done = command("sweep", series, *look, "--out", tmp_path / "swept")
    assert done.code == 0, done.err
    (flag,) = RunFolder.open(tmp_path / "swept").about()["checkpoints"][1]["flags"]
    assert flag.startswith("unreadable: ") and "comes without a tokenizer" in flag
    parts = [p.name for p in (tmp_path / "swept" / "parts").glob("concepts-*.json")]
    assert parts == ["concepts-000000000.json"]


def test_a_resumed_series_names_a_missing_checkpoint_once(
    arms: dict[str, Path], command: Command, tmp_path: Path
) -> None:
    from anisoscope.series.measurer import CheckpointMeasurer

    series, out = tmp_path / "series", tmp_path / "swept"
    shutil.copytree(arms["natural"] / "checkpoints", series)
    (series / "checkpoint-0" / "model.safetensors").unlink()
    alone = CheckpointMeasurer.alone

    def stop(self: CheckpointMeasurer, loaded: Any, step: int | None, **words: Any) -> Any:
        if step == 2:
            raise KeyboardInterrupt
        return alone(self, loaded, step, **words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointMeasurer, "alone", stop)
        assert command("sweep", series, *LOOK, "--out", out).code == 130
    done = command("sweep", series, *LOOK, "--out", out, "--resume")
    assert done.code == 0, done.err
    about = RunFolder.open(out).about()
    assert sorted(entry["step"] for entry in about["checkpoints"]) == [0, 1, 2]
    assert sum("was left out" in text for text in about["warnings"]) == 1


def test_a_series_of_nothing_ends_with_its_first_reason_and_can_be_mended(
    arms: dict[str, Path], command: Command, tmp_path: Path
) -> None:
    series, out = tmp_path / "series", tmp_path / "swept"
    shutil.copytree(arms["natural"] / "checkpoints", series)
    kept = {path: path.read_bytes() for path in series.glob("*/model.safetensors")}
    for path in kept:
        path.unlink()
    done = command("sweep", series, *LOOK, "--out", out)
    assert done.code == 2 and "none of the 3 checkpoints" in done.sentence and "checkpoint-0" in done.sentence
    assert RunFolder.open(out).about()["status"] == "failed"
    for path, weights in kept.items():
        path.write_bytes(weights)
    assert command("sweep", series, *LOOK, "--out", out, "--resume").code == 0
    assert [entry["flags"] for entry in RunFolder.open(out).about()["checkpoints"]] == [[], [], []]


@pytest.mark.slow
def test_the_models_of_the_paper_are_all_named_when_none_is_here(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from anisoscope.models import load as loading

    def offline(spec: str, **_: Any) -> Any:
        raise AnisoscopeError(f"{spec!r} is not in the cache, and the hub cannot be reached; get it first.")

    monkeypatch.setattr(loading, "load_model", offline)
    done = command("study", "revisiting", "--preset", "paper", "--out", tmp_path / "paper")
    assert done.code == 2 and f"none of the {len(REVISITING_MODELS)} models" in done.sentence
    about = RunFolder.open(tmp_path / "paper").about()
    assert about["status"] == "failed" and [s["model"] for s in about["skipped"]] == [
        model.spec for model in REVISITING_MODELS
    ]


# one model


def test_a_model_that_hears_has_gradients_of_frames_and_of_tokens(command: Command, tmp_path: Path) -> None:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 300, "pad_token_id": 0}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "max_target_positions": 32}
    model = WhisperForConditionalGeneration(WhisperConfig(**sizes, **heads, **ends, max_source_positions=32))
    model.save_pretrained(tmp_path / "whisper")
    few = ("--tokens", "700", "--preset", "light", "--draws", "19", "--batch-size", "16")
    done = command("tangent", tmp_path / "whisper", *few, "--out", tmp_path / "out")
    assert done.code == 0
    found = RunFolder.open(tmp_path / "out")
    stacks = {row["stack"] for row in found.table().where(metric="gradient_energy").records()}
    assert stacks == {"encoder", "decoder"}
    assert any("else the model's own greedy text" in text for text in found.about()["warnings"])


def test_a_picture_model_without_a_head_says_what_it_lacks(command: Command, tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    ViTModel(ViTConfig(**sizes, image_size=16, patch_size=4)).save_pretrained(tmp_path / "vit")
    done = command("tangent", tmp_path / "vit", "--tokens", "64", "--out", tmp_path / "out")
    assert done.code == 2 and "predicts nothing that a loss could be taken of" in done.sentence


def test_a_model_without_a_head_says_that_and_no_more(command: Command, tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=32, vocab_size=300
    )
    BertModel(config).save_pretrained(tmp_path / "headless")
    done = command("tangent", tmp_path / "headless", *LOOK, "--tokenizer", "bytes", "--out", tmp_path / "out")
    assert done.code == 2 and "without a language-model head" in done.sentence and "loss=" not in done.sentence


def test_the_folder_of_a_training_is_no_model(arms: dict[str, Path], command: Command, tmp_path: Path) -> None:
    done = command("tangent", arms["natural"], *LOOK, "--out", tmp_path / "out")
    assert done.code == 2 and "anisoscope sweep" in done.sentence and "checkpoint-N" in done.sentence
    assert not (tmp_path / "out").exists()


# options


@pytest.mark.parametrize(
    ("arms_", "words"),
    [
        (("decoder-foo",), "decoder-foo"),
        (("decoder", "decoder-zipfx"), "decoder-zipfx"),
        (("decoder", "encoder-zipf99"), "zipf:99"),
        (("decoder", "decoder"), "twice"),
        (("decoder-zipf1.5", "decoder-zipf1.50"), "twice"),
    ],
)
def test_arms_are_checked_before_the_first_is_trained(arms_: tuple[str, ...], words: str) -> None:
    with pytest.raises(AnisoscopeError, match=words):
        RevisitingConfig(arms=arms_)


def test_an_arm_named_twice_is_refused_on_the_command_line(command: Command, tmp_path: Path) -> None:
    done = command("study", "revisiting", "--arms", "decoder,decoder", "--out", tmp_path / "study")
    assert done.code == 2 and "twice" in done.sentence and not (tmp_path / "study").exists()


def test_steps_after_the_last_are_not_to_be_measured(command: Command, tmp_path: Path) -> None:
    done = command("train", *TINY, "--when", "0,99", "--out", tmp_path / "run")
    assert done.code == 2 and "step 99" in done.sentence and "2 updates" in done.sentence
    with pytest.raises(AnisoscopeError, match="step 99"):
        RevisitingConfig(steps=9, when="0,99")
    assert RevisitingConfig(steps=99, when="0,99").watch["when"] == "0,99"


def test_text_of_one_letter_is_said_to_repeat_itself(command: Command, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 200_000)
    done = command("train", *TINY, "--data", tmp_path / "a.txt", "--out", tmp_path / "run")
    assert done.code == 2 and "repeats itself" in done.sentence and "too little" not in done.sentence


# a full disk


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_called_so(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left") as caught:
        replace_file(tmp_path / "state.pt", lambda _: torch.save({"a": torch.zeros(1 << 16)}, "/dev/full"))
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(RuntimeError, match="something else"):
        replace_file(tmp_path / "state.pt", _fail)
    assert list(tmp_path.iterdir()) == []


def _fail(_: Path) -> None:
    raise RuntimeError("something else")


def test_a_page_that_cannot_be_written_leaves_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from anisoscope.view.page import Page, Section
    from anisoscope.view.report import write_page

    page = Page("title", "heading", [Section("summary", "Summary", [])])

    def full(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            write_page(tmp_path, page)
    assert list(tmp_path.iterdir()) == []
    assert "heading" in write_page(tmp_path, page).read_text()
