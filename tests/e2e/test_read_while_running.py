"""Runs that other processes are writing, and those that were killed, are read by every reading command."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from anisoscope.results.query import Table
from anisoscope.results.state import run_state

Command = Callable[..., Any]
LOOP = """
    import sys, torch
    from transformers import GPT2Config, GPT2LMHeadModel
    from anisoscope import Monitor
    from anisoscope.tangent.plan import TangentPlan

    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = dict(when=[0, 2, 4, 8], total_steps=10_000, metrics=["tangent", "average_cosine"], out=sys.argv[1])
    options["plan"] = TangentPlan(rank=4, draws=19, proxies=("pca",), standardised=False)
    with Monitor(model, **options) as monitor:
        for step in range(10_000):
            ids = torch.randint(0, 64, (32, 12), generator=torch.Generator().manual_seed(step))
            with monitor.step(step):
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
            monitor.log(step, loss=loss.item())
            optimizer.step(); optimizer.zero_grad()
"""


@contextlib.contextmanager
def held(words: list[str], waits_for: Callable[[], bool]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is halted as soon as something is there, so that what is read of it does not change."""
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        end = time.monotonic() + 400
        while not waits_for():
            assert process.poll() is None and time.monotonic() < end, "it ended, or wrote nothing"
            time.sleep(0.02)
        signalled(process.pid, signal.SIGSTOP)
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            signalled(process.pid, signal.SIGKILL)
        process.wait()


def signalled(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process and to those that it started: arms of a study have sessions of their own."""
    begun = psutil.Process(pid)
    for each in (begun, *begun.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.send_signal(number)


def parts(folder: Path, steps: int) -> Callable[[], bool]:
    return lambda: len(list(folder.glob("parts/step-*.parquet"))) >= steps


def check_readable(command: Command, run: Path, words: str, tmp_path: Path) -> None:
    shown = command("show", run, "--format", "csv")
    assert shown.code == 0 and words in shown.err and shown.out.count("\n") == len(Table.read(run)) + 1
    judged = command("claims", run, "--format", "json")
    assert judged.code == 0 and words in judged.err
    drawn = command("report", run, "--out", tmp_path / "page.html")
    assert drawn.code == 0, drawn.err
    assert words in drawn.err and words[1:] in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_monitored_loop_is_read_while_it_runs_and_after_it_was_killed(command: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with held([sys.executable, "-c", textwrap.dedent(LOOP), str(run)], parts(run, 3)):
        state = run_state(run)
        assert (state.state, state.steps) == ("running", 10_000) and state.measured in (4, 8)
        table = Table.read(run)
        assert table.steps[:3] == [0, 2, 4] and {"average_cosine", "gradient_energy"} <= set(table.metrics)
        words = f"read while it runs: measured until step {state.measured} of 10,000; last written "
        check_readable(command, run, words, tmp_path)
    assert run_state(run).state == "stopped" and len(Table.read(run)) == len(table)
    check_readable(command, run, "this run is stopped: measured until step ", tmp_path)


@pytest.mark.slow
def test_a_training_is_read_while_it_runs_and_after_it_was_killed(command: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    sizes = {"steps": 400, "layers": 2, "width": 32, "context": 32, "batch-size": 16, "contexts": 32, "device": "cpu"}
    words = [sys.executable, "-m", "anisoscope", "train", "--arch", "decoder", "--out", str(run)]
    words += [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    with held(words, parts(run, 3)):
        assert run_state(run).state == "running" and (run_state(run).step or 0) >= 1
        assert {"loss", "probe_loss"} <= set(Table.read(run).metrics)
        check_readable(command, run, "read while it runs: step ", tmp_path)
    check_readable(command, run, "this run is stopped: step ", tmp_path)


@pytest.mark.slow
def test_a_study_is_read_while_it_runs_and_after_it_was_killed(command: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [sys.executable, "-m", "anisoscope", "study", "sharpness", "--preset", "tiny", "--out", str(run)]

    def begun() -> bool:
        return any(parts(arm, 2)() for arm in (run / "arms").glob("*"))

    with held(words, begun):
        state, table = run_state(run), Table.read(run)
        assert state.state == "running" and state.unit == "begun arms done" and len(table.steps) >= 2
        assert len(table.about["models"]) == len(state.arms)
        check_readable(command, run, "read while it runs: 0 of ", tmp_path)
    check_readable(command, run, "this run is stopped: 0 of ", tmp_path)
