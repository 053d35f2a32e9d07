"""`anisoscope study sharpness` and `train --attention` as a user calls them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]
FEW = ("--sizes", "1x16", "--steps", 2, "--context", 16, "--contexts", 24, "--limit", 0.1, "--when", "0,2")
HERE = ("--jobs", 1, "--device", "cpu")


def test_the_study_ends_with_verdicts_losses_and_a_page(command: Command, tmp_path: Path) -> None:
    words = ("study", "sharpness", *FEW, *HERE, "--seeds", "0", "--arms", "softmax,mean-removed,uniform")
    done = command(*words, "--out", tmp_path / "study")
    assert done.code == 0, done.err
    told = " ".join(done.out.split())
    assert "anisotropy_without_drift" in told and "1x16, step 2: ordinary attention has a held-out loss" in told
    assert done.out.strip().endswith("report.html") and (tmp_path / "study" / "report.html").is_file()
    again = command(*words, "--out", tmp_path / "study", "--resume")
    assert again.code == 0, "a finished study is only shown again"
    assert command("report", tmp_path / "study").code == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--preset", "paper"), "unknown preset 'paper'"),
        (("--arms", "softmax,linear"), "unknown arm 'linear'"),
        (("--arms", ""), "the argument after '--arms' is empty"),
        (("--arms", ","), "--arms is empty"),
        (("--resume",), "--resume needs --out"),
        (("--seeds", "0,0"), "of seed 0 is named twice"),
    ],
)
def test_slips_are_one_sentence(command: Command, words: tuple[str, ...], sentence: str) -> None:
    done = command("study", "sharpness", *words)
    assert done.code == 2 and sentence in done.sentence


@pytest.mark.slow
def test_a_decoder_with_other_attention_is_trained_swept_and_profiled(command: Command, tmp_path: Path) -> None:
    small = ("--layers", 1, "--width", 16, "--heads", 2, "--context", 16, "--steps", 2, "--limit", 0.1)
    done = command(
        "train", "--family", "prenorm", "--attention", "uniform", *small, "--monitor", "none", "--device", "cpu",
        "--checkpoints", "0", "--out", tmp_path / "run",
    )  # fmt: skip
    assert done.code == 0, done.err
    folder = tmp_path / "run" / "checkpoints"
    config = json.loads((folder / "checkpoint-2" / "config.json").read_text())
    assert (config["attention_variant"], config["model_type"]) == ("uniform", "anisoscope_neox")
    few = ("--metrics", "attention_entropy", "--tokens", 512, "--context", 16, "--device", "cpu")
    done = command("sweep", folder, *few, "--out", tmp_path / "sweep")
    assert done.code == 0, done.err
    shown = command("show", tmp_path / "sweep", "--format", "json", "--metric", "attention_entropy")
    rows = [row for row in json.loads(shown.out) if row["head"] is None]
    assert len(rows) == 2 and all(row["value"] == pytest.approx(1.0, abs=1e-6) for row in rows), (
        "uniform on the way back"
    )
    refused = command("train", "--family", "llama", "--attention", "uniform", *small, "--out", tmp_path / "no")
    assert refused.code == 2 and "llama has ordinary attention only" in refused.sentence
