"""`anisoscope study shape` as a user calls it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anisoscope.errors import AnisoscopeError
from anisoscope.results.folder import RunFolder
from anisoscope.tangent.plan import GEOMETRY

Command = Callable[..., Any]
FEW = ("--sizes", "5x16", "--steps", 2, "--context", 16, "--contexts", 24, "--limit", 0.1, "--when", "0,2")
HERE = ("--jobs", 1, "--device", "cpu")


@pytest.fixture(autouse=True)
def few_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the verdicts on anisotropy and attention read; intrinsic dimension takes its time elsewhere."""
    monkeypatch.setitem(GEOMETRY, "shape", ("svd_ratio", "svd_ratio_squared", "attention_sharpness"))


def test_the_study_ends_with_verdicts_and_a_page(command: Command, tmp_path: Path) -> None:
    done = command("study", "shape", *FEW, *HERE, "--out", tmp_path / "study")
    assert done.code == 0, done.err
    assert "mask_effect" in done.out and done.out.strip().endswith("report.html")
    assert (tmp_path / "study" / "report.html").is_file()
    verdicts = json.loads((tmp_path / "study" / "verdicts.json").read_text())
    assert {v["claim"]: v["subject"] for v in verdicts}["objective_effect"] == "5x16"
    again = command("study", "shape", *FEW, *HERE, "--out", tmp_path / "study", "--resume")
    assert again.code == 0, "a finished study is only shown again"


def test_a_failing_arm_shows_in_the_exit_code(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from anisoscope.training.loop import Trainer

    update = Trainer.update

    def trouble(self: Any, step: int) -> None:
        if self.config.arch == "encoder":
            raise AnisoscopeError("the loss became nan at step 0; lower the learning rate.")
        update(self, step)

    monkeypatch.setattr(Trainer, "update", trouble)
    done = command("study", "shape", *FEW, *HERE, "--out", tmp_path / "study")
    assert done.code == 2 and "1 of 3 arms failed" in done.sentence and "--resume" in done.sentence
    assert (tmp_path / "study" / "report.html").is_file(), "the others are drawn"
    assert RunFolder.open(tmp_path / "study").about()["status"] == "failed"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--preset", "huge"), "huge"),
        (("--arms", "causal-next,encoder"), "unknown arm 'encoder'"),
        (("--sizes", "12*512"), "size '12*512' is not understood"),
        (("--models", "gpt5", "--preset", "paper"), "unknown model of the paper 'gpt5'"),
        (("--resume",), "--resume needs --out"),
        (("--seeds", "a"), "--seeds has 'a'"),
        (("--seeds", "-1"), "--seeds has '-1'; seeds are whole numbers from 0 on"),
        (("--seeds", "0,0"), "of seed 0 is named twice"),
        (("--seeds", "0-2,1"), "of seed 1 is named twice"),
        (("--models", "gpt2"), "--models belongs to --preset paper"),
        (("--remove-downloads",), "--remove-downloads belongs to --preset paper"),
        (("--probe-tokens", "4096", "--preset", "small"), "--probe-tokens belongs to --preset paper"),
        *(
            (("--preset", "paper", option, value), f"{option} belongs to the presets that train")
            for option, value in {
                "--arms": "causal-next",
                "--sizes": "6x64",
                "--seeds": "0",
                "--steps": "9",
                "--context": "64",
                "--when": "log",
                "--jobs": "2",
                "--limit": "1",
                "--contexts": "96",
            }.items()
        ),
    ],
)
def test_slips_are_told_in_one_sentence(
    command: Command, words: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    place = () if "--resume" in words else ("--out", tmp_path / "study")
    done = command("study", "shape", *words, *place)
    assert done.code == 2 and sentence in done.sentence


def test_seeds_keep_their_order_and_their_doubles() -> None:
    from anisoscope.option import layer_numbers, seed_numbers

    assert seed_numbers("3,0-1,0") == (3, 0, 1, 0)
    assert layer_numbers("3,0-1,0") == (0, 1, 3), "layers are a set"
