"""`anisoscope study untrained` as a user calls it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anisoscope.results.folder import RunFolder

Command = Callable[..., Any]
FEW = ("--families", "bert", "--widths", "32", "--heads", 2, "--sequences", 4, "--length", 16, "--device", "cpu")
GRID = ("--biases", "0,1,5,50", "--seeds", "0-2", "--inits", "normal", "--input-norm", "yes")


def test_the_study_ends_with_verdicts_and_a_page(command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    done = command("study", "untrained", *FEW, *GRID, "--out", folder)
    assert done.code == 0, done.err
    assert "anisotropy_grows_with_bias" in done.out and done.out.strip().endswith("report.html")
    assert "s for the page" in done.err, "the time that drawing took is told, too"
    assert (folder / "report.html").is_file()
    verdicts = json.loads((folder / "verdicts.json").read_text())
    assert {v["status"] for v in verdicts if v["claim"] == "anisotropy_grows_with_bias"} == {"holds"}
    table = RunFolder.open(folder).table()
    assert len(table.where(metric="average_cosine", kind="resid")) == 4 * 3
    again = command("study", "untrained", *FEW, *GRID, "--out", folder, "--resume")
    assert again.code == 0, "a finished study is only shown again"
    refused = command("study", "untrained", *FEW, *GRID, "--out", folder)
    assert refused.code == 2 and "holds a run (complete)" in refused.sentence
    other = command("study", "untrained", *FEW, *GRID[:-2], "--out", folder, "--resume")
    assert other.code == 2 and "input_norm" in other.sentence
    page = command("report", folder)
    assert page.code == 0 and page.out.strip().endswith("report.html")
    claims = command("claims", folder, "--claims", "anisotropic_at_initialisation", "--format", "json")
    assert claims.code == 0 and json.loads(claims.out)[0]["details"]["pooled"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--preset", "huge"), "huge"),
        (("--families", "brt"), "brt"),
        (("--families", ""), "the argument after '--families' is empty"),
        (("--families", ","), "--families is empty"),
        (("--families", "mamba"), "cannot be called alone"),
        (("--families", "swin"), "attends within windows"),
        (("--biases", "0,much"), "much"),
        (("--biases", "-5"), "-5"),
        (("--seeds", "-1"), "--seeds"),
        (("--seeds", "0,0"), "twice"),
        (("--inits", "zero"), "zero"),
        (("--widths", "x"), "--widths"),
        (("--widths", "100"), "--heads"),
        (("--heads", "5", "--widths", "64"), "5 heads"),
        (("--length", "2"), "length is 2"),
        (("--input-norm", "perhaps"), "perhaps"),
        (("--device", "abacus"), "abacus"),
        (("--resume",), "--resume needs --out"),
    ],
)
def test_bad_input_is_one_sentence(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = command("study", "untrained", *words)
    assert done.code == 2 and sentence in done.sentence
