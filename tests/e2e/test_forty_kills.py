"""Forty signals at random moments of every command that resumes: the table is that of a run never disturbed.

SIGKILL, SIGTERM and SIGINT in turn, each followed by the same command with --resume; signals end with 143 and 130.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from anisoscope.results.folder import RunFolder
from support.command_lines import ALBERT, GPT
from support.tiny_series import FORKS, TEXT, make_series, same

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
MODEL = ("--layers", 1, "--width", 16, "--heads", 2, "--context", 16, "--limit", 0.1)
READ = ("--data", TEXT, "--tokens", 400, "--context", 16, "--device", "cpu")
TRAIN = (
    "train",
    *MODEL,
    "--batch-size",
    4,
    "--steps",
    6,
    "--contexts",
    24,
    "--when",
    "0,2,4,6",
    "--checkpoints",
    "log",
)
UNTRAINED = (
    "--families",
    "bert",
    "--widths",
    "32",
    "--heads",
    2,
    "--sequences",
    4,
    "--length",
    16,
    "--inits",
    "normal",
)
COMMANDS: dict[str, tuple[int, Callable[[Path], Sequence[Any]]]] = {
    "profile": (8, lambda _: ("profile", "--random-init", GPT, ALBERT, *READ, "--batch-size", 2)),
    "sweep": (8, lambda place: ("sweep", make_series(place), *READ, "--tokenizer", "bytes", "--draws", 19)),
    "tangent": (8, lambda place: ("tangent", _first(place), *READ, "--tokenizer", "bytes", "--draws", 19)),
    "train": (8, lambda _: (*TRAIN, "--device", "cpu")),
    "study untrained": (
        4,
        lambda _: ("study", "untrained", *UNTRAINED, "--biases", "0,1", "--seeds", "0-2", "--device", "cpu"),
    ),
    "study revisiting": (
        4,
        lambda _: (
            *("study", "revisiting", "--arms", "decoder", "--layers", 1, "--width", 32, "--context", 32),
            *("--steps", 4, "--when", "0,2,4", "--limit", 0.1, "--device", "cpu"),
        ),
    ),
}


def _first(place: Path) -> Path:
    return make_series(place, (0, 10)) / "checkpoint-10"


def begin(words: Sequence[Any], out: Path) -> int:
    """A process that runs a command, resuming what is there; its number."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    os.setsid()  # its workers end with it
    for number in SIGNALS[1:]:  # those that come before the command has begun
        signal.signal(number, lambda number, _: os._exit(128 + number))
    with (out.parent / "said").open("a") as said:
        for stream in (1, 2):
            os.dup2(said.fileno(), stream)
    sys.argv = ["anisoscope", *map(str, words), "--out", str(out)]
    sys.argv += ["--resume"] if (out / "run.json").is_file() else []
    from anisoscope.cli import main

    code = 1
    try:
        main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return 0


def ended(child: int) -> int:
    """How a process ended: its exit code, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.slow
@pytest.mark.skipif(not FORKS, reason="a process that uses torch cannot be forked here")
@pytest.mark.parametrize("name", COMMANDS)
def test_signals_at_random_moments(name: str, tmp_path: Path) -> None:
    kills, make = COMMANDS[name]
    words, chance = make(tmp_path / "models"), random.Random(len(name))
    for place in ("whole", "timed"):  # the second time nothing is to be imported
        (tmp_path / place).mkdir()
        start = time.monotonic()
        assert ended(begin(words, tmp_path / place / "run")) == 0, (tmp_path / place / "said").read_text()
    seconds, folders, how = time.monotonic() - start, [0], itertools.cycle(SIGNALS)
    said: list[tuple[int, int]] = []
    while len(said) < kills:
        place = tmp_path / str(folders[-1])
        place.mkdir(exist_ok=True)
        child, number = begin(words, place / "run"), next(how)
        time.sleep(chance.uniform(0.0, 0.8) * seconds)
        os.kill(child, number)
        code = ended(child)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # the workers of a killed study, as a machine that goes down
        if code == 0:  # it had come to its end
            folders.append(folders[-1] + 1)
            continue
        said.append((number, code))
        assert code == (-number if number == signal.SIGKILL else 128 + number), (place / "said").read_text()
    (tmp_path / str(folders[-1])).mkdir(exist_ok=True)
    assert ended(begin(words, tmp_path / str(folders[-1]) / "run")) == 0, (place / "said").read_text()
    wanted = RunFolder.open(tmp_path / "whole" / "run")
    for folder in folders:
        found = RunFolder.open(tmp_path / str(folder) / "run")
        assert found.about()["status"] == "complete"
        same(found.table(), wanted.table())
    print(name, "signals and codes", said, "runs", len(folders))
