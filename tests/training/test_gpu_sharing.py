"""A private MPS service: started where it works, ended with the command, left alone where the user has one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from anisoscope.training import gpu_sharing

CONTROL = """#!{python} -S
import os, sys, time
folder = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
if "-f" in sys.argv:
    open(os.path.join(folder, "control"), "w").close()
    while not os.path.exists(os.path.join(folder, "quit")):
        time.sleep(0.02)
    open({ended!r}, "w").close()
elif "quit" in sys.stdin.read():
    open(os.path.join(folder, "quit"), "w").close()
"""
COMMAND = """
import os, sys
from pathlib import Path
from anisoscope.training import gpu_sharing
gpu_sharing._DEVICES, gpu_sharing._TRIAL = Path(sys.argv[1]), sys.argv[2]
print(gpu_sharing.share_gpu("auto"), os.environ.get("CUDA_MPS_PIPE_DIRECTORY", ""), flush=True)
"""
WORKS = "import os, sys, time\nwhile not os.path.exists(sys.argv[1] + '/control'): time.sleep(0.02)"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine with a GPU and NVIDIA's program, as far as can be seen before the GPU is used."""
    program = tmp_path / "nvidia-cuda-mps-control"
    program.write_text(CONTROL.format(python=sys.executable, ended=str(tmp_path / "ended")))
    program.chmod(0o755)
    (tmp_path / "nvidia0").touch()
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setattr(gpu_sharing, "_DEVICES", tmp_path)
    yield tmp_path


def command(machine: Path, trial: str, after: str = "") -> tuple[str, str]:
    line = [sys.executable, "-c", COMMAND + after, str(machine), trial]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    shared, _, folder = done.stdout.strip().partition(" ")
    return shared, folder


def wait_for(path: Path, there: bool = True) -> bool:
    until = time.monotonic() + 20
    while path.exists() != there and time.monotonic() < until:
        time.sleep(0.02)
    return path.exists() == there


@pytest.mark.parametrize("after", ["", "import signal; os.kill(os.getpid(), signal.SIGKILL)"], ids=["ends", "killed"])
def test_the_service_ends_with_the_command_and_leaves_nothing(machine: Path, after: str) -> None:
    shared, folder = command(machine, WORKS, after)
    assert shared == "True" and folder.startswith(str(machine / "anisoscope-mps-"))
    assert wait_for(machine / "ended") and wait_for(Path(folder), there=False)


def test_a_service_that_does_not_work_is_not_used(machine: Path) -> None:
    assert command(machine, WORKS + "\nraise SystemExit(1)") == ("False", "")
    assert wait_for(machine / "ended")
    assert not list(machine.glob("anisoscope-mps-*")) or wait_for(next(machine.glob("anisoscope-mps-*")), there=False)


def test_nothing_is_started_without_need(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_sharing._gains("auto") and gpu_sharing._gains("cuda:1"), "where it would be of use"
    assert not gpu_sharing._gains("cpu")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(machine))
    assert not gpu_sharing._gains("cuda"), "the user has one"
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY")
    (machine / "nvidia0").unlink()
    assert not gpu_sharing._gains("auto"), "there is no GPU"
