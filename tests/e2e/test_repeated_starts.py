"""Trainings in several processes that are started again and again; `tools/repeated_starts.py` takes any number."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "repeated_starts.py"


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "count", "more"), [(2, 20, []), (4, 4, []), (3, 1, ["--torchrun"])])
def test_every_start_ends_with_the_same_table(ranks: int, count: int, more: list[str]) -> None:
    line = [sys.executable, str(TOOL), f"--ranks={ranks}", f"--count={count}", *more]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{count} of {count} starts of {ranks} processes: good" in done.stdout
