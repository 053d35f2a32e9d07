"""A run that is interrupted, killed or resumed, from the command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anisoscope.results.folder import RunFolder
from support.command_lines import GPT, Command, Profiled, same, saved


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make the forward pass end after some batches: with an error in the next one, or with Ctrl-C in the last."""
    from anisoscope.capture.capture import Capture

    real = Capture.run

    def arrange(after: int, error: type[BaseException] | None = None) -> None:
        left = [after]

        def run(self: Any, batch: Any) -> None:
            if not left[0] and error is not None:
                raise error
            left[0] -= 1
            if not left[0] and error is None:
                signal.raise_signal(signal.SIGINT)
            real(self, batch)

        monkeypatch.setattr(Capture, "run", run)

    return arrange


LONG = ("--batch-size", "2", "--save-rows", "--dtype", "float64")


def test_a_resumed_run_equals_an_undisturbed_one(
    profiled: Profiled, command: Command, stops: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = profiled(*LONG)
    words = ("profile", "--random-init", GPT, "--tokens", "600", "--context", "32", *LONG, "--out", tmp_path / "run")
    stops(5)
    broken = command(*words)
    assert broken.code == 130
    assert "--resume" in broken.sentence
    run = RunFolder.open(tmp_path / "run")
    assert run.about()["status"] == "interrupted"
    assert all("interrupted after 5 batches" in row["note"] for row in run.table().records())
    assert (run.path / "report.html").is_file()
    monkeypatch.undo()
    assert "add --resume" in command(*words).sentence  # the same command alone overwrites nothing
    done = command(*words, "--resume")
    assert done.code == 0, done.err
    assert run.about()["status"] == "complete"
    same(whole.table(), run.table(), 1e-12)
    np.testing.assert_array_equal(saved(whole, "2.resid"), saved(run, "2.resid"))
    assert not (run.path / "partial").exists()


def test_rows_of_a_run_that_died_are_not_counted_twice(
    profiled: Profiled, command: Command, stops: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("profile", "--random-init", GPT, "--tokens", "600", "--context", "32", *LONG, "--out", tmp_path / "run")
    stops(3, MemoryError)
    assert "memory ran out; use a smaller --batch-size" in command(*words).sentence
    monkeypatch.undo()
    assert command(*words, "--resume").code == 0
    np.testing.assert_array_equal(saved(profiled(*LONG), "1.resid"), saved(RunFolder.open(tmp_path / "run"), "1.resid"))


def test_a_run_is_resumed_only_by_the_same_command(command: Command, plain: RunFolder) -> None:
    words = ("profile", "--random-init", GPT, "--context", "32", "--out", plain.path)
    assert "holds a run (complete)" in command(*words, "--tokens", "600").sentence
    assert "tokens = 600, not 700" in command(*words, "--tokens", "700", "--resume").sentence
    assert plain.about()["status"] == "complete"
    assert command(*words, "--tokens", "600", "--resume").code == 0
    assert "--resume needs --out" in command("profile", "--random-init", GPT, "--resume").sentence


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_with_what_was_finished(tmp_path: Path, how: signal.Signals) -> None:
    words = ["profile", "--random-init", GPT, "--context", "32", "--tokens", "2000000", "--out", str(tmp_path / "run")]
    process = subprocess.Popen([sys.executable, "-m", "anisoscope.cli", *words], stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "run" / "run.json").exists():
        time.sleep(0.1)
    time.sleep(6)
    process.send_signal(how)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + how
    assert "Traceback" not in err
    assert "--resume" in err
    run = RunFolder.open(tmp_path / "run")
    assert run.about()["status"] == "interrupted"
    assert len(run.table())


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_training_that_is_stopped_ends_with_the_code_of_its_signal(
    how: signal.Signals, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from anisoscope.training.loop import Trainer

    update = Trainer.update

    def then_stop(self: Trainer, step: int) -> None:
        update(self, step)
        os.kill(os.getpid(), how)

    monkeypatch.setattr(Trainer, "update", then_stop)
    sizes = ("--layers", 1, "--width", 16, "--heads", 2, "--context", 16, "--batch-size", 4, "--limit", 0.1)
    done = command("train", *sizes, "--steps", 2, "--monitor", "none", "--device", "cpu", "--out", tmp_path / "run")
    assert done.code == 128 + how and "--resume" in done.sentence
    assert RunFolder.open(tmp_path / "run").about()["status"] == "interrupted"
