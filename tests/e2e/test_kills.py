"""kill -9 at any moment, then --resume: the table is that of a run that was never disturbed, value for value."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from anisoscope import sweep
from anisoscope.monitor.instruments import Probe
from anisoscope.results.folder import RunFolder
from support.tiny_series import FORKS, LOOK, TEXT, killed, make_series, same

Command = Callable[..., Any]
MODEL = ("--layers", 1, "--width", 16, "--heads", 2, "--context", 16, "--batch-size", 4, "--limit", 0.1)
TRAIN = (
    "train",
    *MODEL,
    "--steps",
    6,
    "--contexts",
    24,
    "--checkpoints",
    "log",
    "--when",
    "0,2,4,6",
    "--device",
    "cpu",
)
SWEEP = ("--tokens", 400, "--context", 16, "--data", TEXT, "--draws", 19, "--device", "cpu")


def compare(one: Path, other: Path) -> None:
    same(RunFolder.open(one).table(), RunFolder.open(other).table())
    mine, theirs = (json.loads((path / "run.json").read_text()) for path in (one, other))
    for name in ("status", "checkpoints", "models", "data"):
        assert mine.get(name) == theirs.get(name), name


def train_into(out: Path, when: str) -> Path:
    """What `anisoscope train` does, without its report."""
    from anisoscope.studies.arms import training_monitor
    from anisoscope.training.config import TrainConfig
    from anisoscope.training.loop import train

    sizes = {"layers": 1, "width": 16, "heads": 2, "context": 16, "batch_size": 4, "limit": 0.1, "device": "cpu"}
    watch = {"when": when, "contexts": 24, "monitor": "standard"}
    config = TrainConfig(**sizes, steps=6, checkpoints="log")  # type: ignore[arg-type]
    words: dict[str, Any] = {"monitor": partial(training_monitor, **watch), "watch": watch}  # type: ignore[arg-type]
    return train(config, out, corpus=out.parents[1] / "corpus", resume=True, **words)


@pytest.mark.skipif(not FORKS, reason="a process that uses torch cannot be forked here")
@pytest.mark.parametrize("when", ["0,3,6", pytest.param("0,6", marks=pytest.mark.slow)])  # closes its window at the end
def test_a_killed_training_ends_with_the_table_of_an_undisturbed_one(tmp_path: Path, when: str) -> None:
    whole, out = train_into(tmp_path / "whole" / "run", when), tmp_path / "killed" / "run"
    for after in (7, 16):
        assert killed(lambda: train_into(out, when), after)
    compare(train_into(out, when), whole)


@pytest.mark.skipif(not FORKS, reason="a process that uses torch cannot be forked here")
def test_a_training_killed_between_its_last_look_and_its_end(tmp_path: Path) -> None:
    whole, out = train_into(tmp_path / "whole" / "run", "0,6"), tmp_path / "killed" / "run"
    assert killed(lambda: _until_the_end(out), 1 << 30), "everything is written but that it is complete"
    assert RunFolder.open(out).about()["status"] == "running"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Probe, "run", lambda *_, **__: pytest.fail("its last step was measured, and is measured again"))
        train_into(out, "0,6")
    compare(out, whole)


def _until_the_end(out: Path) -> None:
    from anisoscope.training.run_files import TrainingRecord

    TrainingRecord.end = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,method-assign]
    train_into(out, "0,6")


def disturbed(act: Callable[[Path], Any], place: Path, *, kills: int, seed: int) -> list[Path]:
    """Begin again and again, killed at a random moment of what it takes, until that has happened so many times.

    A run that comes to its end is followed by another in a new folder; the last one is brought to its end.
    """
    chance, start, hit = random.Random(seed), time.monotonic(), 0
    act(place / "timed" / "run")
    seconds, folders = time.monotonic() - start, [place / "0" / "run"]
    while hit < kills:
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                act(folders[-1])
            os._exit(0)
        time.sleep(chance.uniform(0.0, 0.6) * seconds)
        os.kill(child, signal.SIGKILL)
        if os.WIFSIGNALED(os.waitpid(child, 0)[1]):
            hit += 1
        else:
            folders.append(place / str(len(folders)) / "run")
    act(folders[-1])
    return folders


@pytest.mark.slow
@pytest.mark.skipif(not FORKS, reason="a process that uses torch cannot be forked here")
@pytest.mark.parametrize("metrics", [("two_nn", "svd_ratio", "attention_sharpness"), ("tangent", "drift")])
def test_ten_random_kills_of_a_sweep(tmp_path: Path, metrics: tuple[str, ...]) -> None:
    series = str(make_series(tmp_path / "series", range(0, 80, 10)))
    draws = {"draws": 49} if "tangent" in metrics else {}

    def act(out: Path) -> None:
        sweep(series, out=out, resume=True, **LOOK | {"metrics": metrics} | draws)

    act(tmp_path / "whole" / "run")
    for out in disturbed(act, tmp_path, kills=10, seed=0):
        compare(out, tmp_path / "whole" / "run")


@pytest.mark.slow
@pytest.mark.skipif(not FORKS, reason="a process that uses torch cannot be forked here")
@pytest.mark.parametrize("when", ["0,1,2,3,4,5,6", "0,5,6"])
def test_ten_random_kills_of_a_training(tmp_path: Path, when: str) -> None:
    whole = train_into(tmp_path / "whole" / "run", when)
    for out in disturbed(lambda out: train_into(out, when), tmp_path, kills=10, seed=1):
        compare(out, whole)


def test_the_command_goes_on_after_a_kill(command: Command, tmp_path: Path) -> None:
    series = make_series(tmp_path / "series", (0, 10, 20))
    words = ("sweep", series, "--data", TEXT, "--tokens", 320, "--context", 16, "--tokenizer", "bytes")
    words = (*words, "--metrics", "average_cosine")
    whole, out = tmp_path / "whole" / "run", tmp_path / "killed" / "run"
    done = command(*words, "--out", whole)
    assert done.code == 0, done.err
    if FORKS:
        assert killed(lambda: command(*words, "--out", out), 6)
        refused = command(*words, "--out", out)
        assert refused.code == 2 and "--resume" in refused.sentence
    assert command(*words, "--out", out, "--resume").code == 0
    compare(out, whole)
