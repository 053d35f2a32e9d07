"""train, tangent, sweep, claims, study: as a new user would type them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anisoscope.results.folder import RunFolder

Command = Callable[..., Any]
TINY = ("--layers", 1, "--width", 32, "--heads", 2, "--context", 32, "--steps", 4)
LOOK = ("--tokens", 1200, "--context", 32, "--draws", 49)


@pytest.fixture(scope="module")
def trained(command: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder of four updates, with its monitor's table and report."""
    out = tmp_path_factory.mktemp("learning") / "run"
    done = command("train", *TINY, "--contexts", 32, "--checkpoints", "log", "--out", out)
    assert done.code == 0, done.err
    assert done.out.strip().endswith("report.html")
    return out


def test_train_leaves_a_whole_run_folder(trained: Path) -> None:
    table = RunFolder.open(trained).table()
    assert sorted(set(table.where(metric="gradient_energy").arrow["step"].to_pylist())) == [0, 1, 2, 4]
    assert {"loss", "probe_loss", "average_cosine", "amplification", "frequency_spread"} <= set(table.metrics)
    verdicts = json.loads((trained / "verdicts.json").read_text())
    assert {v["status"] for v in verdicts} <= {"holds", "fails", "undecided"}
    assert all(v["why"].endswith(".") for v in verdicts)
    cards = json.loads((trained / "concepts.json").read_text())
    assert {card["step"] for card in cards} == {0, 1, 2, 4} and all(card["tokens"] for card in cards)
    page = (trained / "report.html").read_text(encoding="utf-8")
    assert "tangent_energy" in page and "http://" not in page.split("<script")[0]


def test_step_zero_is_the_untrained_model_and_frozen_steps_are_marked(trained: Path) -> None:
    table = RunFolder.open(trained).table()
    frozen = [r for r in table.where(metric="gradient_energy", group="").records() if "fit=frozen" in r["variant"]]
    inside = {r["step"] for r in frozen if "in-sample" in (r["note"] or "")}
    assert inside == {0} and {r["step"] for r in frozen} == {0, 1, 2, 4}


def test_a_second_run_in_the_same_folder_is_refused_and_a_finished_one_resumes_at_once(
    trained: Path, command: Command
) -> None:
    before = (trained / "table.parquet").read_bytes()
    again = command("train", *TINY, "--contexts", 32, "--checkpoints", "log", "--out", trained)
    assert again.code == 2 and "holds a run" in again.sentence
    assert command("train", *TINY, "--contexts", 32, "--checkpoints", "log", "--out", trained, "--resume").code == 0
    assert (trained / "table.parquet").read_bytes() == before


def test_sweep_over_the_checkpoints_gives_the_steps_and_flags_a_repeated_one(
    trained: Path, command: Command, tmp_path: Path
) -> None:
    series = tmp_path / "series"
    shutil.copytree(trained / "checkpoints", series)
    shutil.copytree(series / "checkpoint-4", series / "checkpoint-9")
    done = command("sweep", series, *LOOK, "--preset", "light", "--out", tmp_path / "swept")
    assert done.code == 0, done.err
    folder = RunFolder.open(tmp_path / "swept")
    flags = {c["step"]: c["flags"] for c in folder.about()["checkpoints"]}
    assert list(flags) == [0, 1, 2, 4, 9]
    assert [step for step, wrong in flags.items() if wrong] == [9] and "checkpoint-4" in flags[9][0]
    table = folder.table()
    assert set(table.where(metric="gradient_energy").arrow["step"].to_pylist()) == {0, 1, 2, 4, 9}
    assert table.value(metric="checkpoint", step=9) == 0.0 and table.value(metric="checkpoint", step=4) == 1.0


def test_tangent_of_one_checkpoint_and_its_claims(trained: Path, command: Command, tmp_path: Path) -> None:
    model = trained / "checkpoints" / "checkpoint-4"
    done = command("tangent", model, *LOOK, "--out", tmp_path / "one")
    assert done.code == 0, done.err
    table = RunFolder.open(tmp_path / "one").table()
    assert set(table.arrow["step"].to_pylist()) == {None}
    found = command("claims", tmp_path / "one", "--format", "json", "--claims", "tangent_energy")
    assert found.code == 0 and json.loads(found.out)[0]["claim"] == "tangent_energy"


def test_tangent_and_profile_of_one_model_are_of_one_model(trained: Path, command: Command, tmp_path: Path) -> None:
    model = trained / "checkpoints" / "checkpoint-4"
    look = [word for word in LOOK if word not in ("--draws", 49)]
    assert command("tangent", model, *LOOK, "--preset", "light", "--out", tmp_path / "one").code == 0
    assert command("profile", model, *look, "--metrics", "drift", "--out", tmp_path / "two").code == 0
    named = [RunFolder.open(tmp_path / each).table() for each in ("one", "two")]
    assert set(named[0]["revision"]) == set(named[1]["revision"]), "a page of both would show two models"


@pytest.mark.slow
def test_the_study_trains_its_arms_and_ends_with_verdicts(command: Command, tmp_path: Path) -> None:
    options = ("--arms", "decoder,encoder", "--steps", 4, "--layers", 2, "--width", 32, "--context", 32)
    done = command("study", "revisiting", *options, "--out", tmp_path / "study")
    assert done.code == 0, done.err
    folder = RunFolder.open(tmp_path / "study")
    table = folder.table()
    assert set(table.arrow["model"].to_pylist()) == {"decoder", "encoder"}
    assert {"masked", "unmasked"} <= set(table.where(model="encoder").arrow["group"].to_pylist())
    assert (tmp_path / "study" / "arms" / "encoder" / "checkpoints").is_dir()
    assert "encoder_and_decoder" in done.out


@pytest.mark.slow
def test_the_curvature_study_runs_and_its_report_can_be_made_again(command: Command, tmp_path: Path) -> None:
    done = command("study", "curvature", "--manifolds", "sphere,flat", "--out", tmp_path / "curvature")
    assert done.code == 0, done.err
    (tmp_path / "curvature" / "report.html").unlink()
    assert command("report", tmp_path / "curvature").code == 0
    assert (tmp_path / "curvature" / "report.html").is_file()


BAD = {
    "train --arch decodre": "did you mean 'decoder'",
    "train --arch encoder --family llama": "llama",
    "train --frequency zipf:x": "zipf",
    "train --tokens bpe:x": "bpe",
    "train --steps 0": "steps is 0",
    "train --width 30 --heads 4": "width 30",
    "train --when sometimes --steps 4": "sometimes",
    "train --rank 99 --steps 4 --layers 1 --width 32 --heads 2 --context 32": "rank 99",
    "train --monitor standart --steps 4 --layers 1 --width 32 --heads 2 --context 32": "standart",
    "tangent no/such/model/here": "no/such/model/here",
    "sweep no-such-folder": "no-such-folder",
    "claims no-such-run": "no-such-run",
    "study revisiting --preset huge": "huge",
    "study revisiting --arms decoder,translator": "translator",
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_gets_one_sentence(words: str, command: Command, tmp_path: Path) -> None:
    out = () if words.startswith("claims") else ("--out", tmp_path / "bad")
    done = command(*words.split(), *out)
    assert done.code != 0 and "Traceback" not in done.err
    assert BAD[words] in done.sentence


def test_a_training_that_diverged_is_told_before_any_verdict_and_on_top_of_its_page(
    command: Command, tmp_path: Path
) -> None:
    sizes = ("--layers", 1, "--width", 16, "--heads", 2, "--context", 32, "--steps", 12, "--device", "cpu")
    done = command("train", *sizes, "--lr", 1.0, "--monitor", "average_cosine", "--out", tmp_path / "run")
    assert done.code == 0 and done.err.count("WORSE THAN GUESSING: at step 12") == 1
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert page.index("Read this first") < page.index("WORSE THAN GUESSING") < page.index("average_cosine")
    assert page.count("decoder: WORSE THAN GUESSING") == 2, "on top, and in the list of all warnings"
