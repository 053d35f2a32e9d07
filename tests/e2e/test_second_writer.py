"""A run folder that another process writes into is refused by every command that writes, and read by all others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from anisoscope.errors import AnisoscopeError
from anisoscope.monitor.monitor import Monitor
from anisoscope.results import lock as locks
from anisoscope.results.folder import RunFolder
from anisoscope.results.lock import LOCK
from support.tiny_models import tiny
from support.tiny_series import make_series

Command = Callable[..., Any]
GPT = "gpt2:n_layer=1,n_embd=16,n_head=2,vocab_size=64"


def occupied(folder: Path) -> None:
    """The lock of a process that is there: the one that runs the tests has a parent."""
    folder.mkdir(parents=True, exist_ok=True)
    parent = os.getppid()
    words = {"pid": parent, "began": psutil.Process(parent).create_time(), "command": "anisoscope train"}
    (folder / LOCK).write_text(json.dumps({**locks.this_process(), **words, "since": "2026-01-01T10:00:00"}))


@pytest.mark.parametrize("verb", ["profile", "train", "sweep", "tangent", "study"])
@pytest.mark.parametrize("more", [(), ("--resume",)])
def test_a_second_writer_gets_one_sentence(verb: str, more: tuple[str, ...], command: Command, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words: dict[str, tuple[Any, ...]] = {
        "profile": ("profile", "--random-init", GPT, "--tokens", 64),
        "train": ("train", "--steps", 2, "--device", "cpu"),
        "sweep": ("sweep", make_series(tmp_path / "series", (0, 10)), "--tokens", 64),
        "tangent": ("tangent", "--random-init", GPT, "--tokens", 64),
        "study": ("study", "untrained", "--preset", "tiny"),
    }
    occupied(out)
    done = command(*words[verb], "--out", out, *more)
    assert done.code == 2, done.err
    assert f"written by process {os.getppid()}" in done.sentence and "since 2026-01-01T10:00:00" in done.sentence
    assert sorted(path.name for path in out.iterdir()) == [LOCK], "it touched nothing"


def test_a_second_monitor_is_refused_when_it_is_made(tmp_path: Path) -> None:
    occupied(tmp_path / "run")
    for resume in (False, True):
        with pytest.raises(AnisoscopeError, match="is being written by process"):
            Monitor(tiny("gpt2"), out=tmp_path / "run", resume=resume)


def test_reading_commands_need_no_lock(command: Command, plain: RunFolder) -> None:
    occupied(plain.path)
    try:
        for words in (("show", plain.path), ("claims", plain.path), ("report", plain.path)):
            assert command(*words).code == 0
    finally:
        (plain.path / LOCK).unlink()


LOOP = """
    import json, resource, sys, torch
    from transformers import GPT2Config, GPT2LMHeadModel
    from anisoscope import Monitor

    sizes = dict(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0)

    def train(steps, **options):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(**sizes))
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        monitor = Monitor(model, when=[0, 1, 2, 3], every_step=True, **options) if options else None
        entered = monitor.__enter__() if monitor else None
        for step in range(steps):
            if monitor and step == 2:
                {fault}
            inside = monitor.step(step) if monitor else None
            inside and inside.__enter__()
            ids = torch.randint(0, 64, (32, 12), generator=torch.Generator().manual_seed(step))
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(loss.item())
            inside and inside.__exit__(None, None, None)
            optimizer.step(); optimizer.zero_grad()
        monitor and monitor.__exit__(None, None, None)
        return losses, monitor

    out = sys.argv[1]
    losses, monitor = train(4, out=out)
    plain, _ = train(4)
    print(json.dumps([losses == plain, sorted(monitor.done), monitor.notes]))
"""


def looped(fault: str, out: Path) -> tuple[bool, list[int], list[str]]:
    code = textwrap.dedent(LOOP).replace("{fault}", fault)
    done = subprocess.run([sys.executable, "-c", code, str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    same, measured, notes = json.loads(done.stdout.splitlines()[-1])
    return same, measured, notes


@pytest.mark.slow
def test_a_limit_on_the_size_of_files_stops_no_training(tmp_path: Path) -> None:
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (2048, resource.RLIM_INFINITY))"
    same, measured, notes = looped(limit, tmp_path / "run")
    assert same and measured == [0, 1, 2, 3]
    assert any(note.startswith("step 2: could not write results") for note in notes), notes
    parts = sorted(path.stem for path in (tmp_path / "run" / "parts").glob("step-*.parquet"))
    assert parts == ["step-000000000", "step-000000001"], "what was written before is there"


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="only root may mount a small disk")
@pytest.mark.parametrize(
    "fault", ["mount -o remount,ro {}", "dd if=/dev/zero of={}/ballast bs=1M count=64 2>/dev/null"]
)
def test_a_small_disk_that_fills_or_becomes_read_only_stops_no_training(fault: str, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)]
    if subprocess.run(mounted, capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        command = fault.format(disk)
        same, measured, notes = looped(f"import os; os.system({command!r})", disk / "run")
        assert same and measured == [0, 1, 2, 3]
        assert any(note.startswith("step 2: could not write results") for note in notes), notes
        assert len(list((disk / "run" / "parts").glob("step-*.parquet"))) >= 2
    finally:
        subprocess.run(["umount", str(disk)], check=False)
