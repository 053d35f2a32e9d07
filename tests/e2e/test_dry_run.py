"""`--dry-run`: what is printed, that nothing is written, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

STORED = str(Path(__file__).parents[1] / "support" / "calibration.json")
SMALL = "shape:layers=4,width=128,heads=4,vocab=512"
Command = Callable[..., Any]


def test_a_dry_run_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (
        ["profile", SMALL],
        ["sweep", SMALL, "--checkpoints", "3", "--preset", "light"],
        ["tangent", SMALL, "--preset", "light"],
        ["train", "--steps", "20"],
        ["study", "shape"],
    ):
        done = command(*words, "--dry-run", "--calibration", STORED, "--json")
        assert done.code == 0, done.err
        assert json.loads(done.out)["seconds"] > 0
    assert list(tmp_path.iterdir()) == []


def test_the_printed_plan_fits_a_terminal(command: Command) -> None:
    done = command("profile", SMALL, "--dry-run", "--calibration", STORED)
    assert done.code == 0 and max(map(len, done.out.splitlines())) <= 80
    for word in ("time", "memory", "disk", "nothing is run", "forward passes"):
        assert word in done.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["profile", SMALL], "add --dry-run"),
        (["train", "--json"], "--json does nothing without --dry-run"),
        (["profile", SMALL, "--dry-run", "--wanted-width", "5%"], "add --pilot"),
        (["profile", SMALL, "--dry-run", "--calibration", "h2000"], "unknown device"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(words: list[str], said: str, command: Command) -> None:
    done = command(*words)
    assert done.code == 2 and said in done.notes


def test_a_pilot_says_how_many_contexts_an_interval_needs(command: Command) -> None:
    model = "gpt2:n_layer=1,n_embd=16,n_head=2,n_positions=32,vocab_size=300"
    words = ("--random-init", "--metrics", "average_cosine,drift", "--pilot", "16", "--wanted-width", "2%", "--json")
    done = command("profile", model, "--dry-run", "--calibration", STORED, *words)
    assert done.code == 0, done.err
    pilot = json.loads(done.out)["pilot"]
    assert pilot["contexts"] == 16 and {row["metric"] for row in pilot["metrics"]} == {"average_cosine", "drift"}
    assert pilot["metrics"][0]["contexts"] >= pilot["metrics"][1]["contexts"] > 0
    assert "The dearest is" in pilot["sentence"]
