"""One GPU for several processes at the same time: NVIDIA's Multi-Process Service (MPS), while a command runs.

Without it a GPU gives processes turns, and a training loses about twice the time that the analysis of its measured
steps needs there. The service must be there before a process first uses the GPU, and until it has ended; so a command
that trains starts one of its own, and another process ends that when the command is gone, however it went. Nothing is
started where the user has set up a service, or where it does not work: then processes take turns as before.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_CONTROL = "nvidia-cuda-mps-control"
_PIPES, _LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_USUAL = Path("/tmp/nvidia-mps/control")  # the service that everybody uses who names no other
_DEVICES = Path("/dev")
_PATIENCE = 20.0  # seconds until a trial has succeeded
_KEEPER = """
import shutil, subprocess, sys
control, folder = sys.argv[1:]
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
service = subprocess.Popen([control, "-f"], stdin=subprocess.DEVNULL, **quiet)
sys.stdin.read()  # until the command has ended
try:
    subprocess.run([control], input=b"quit\\n", timeout=10, **quiet)
    service.wait(10)
except (OSError, subprocess.SubprocessError):
    service.kill()
shutil.rmtree(folder, ignore_errors=True)
"""
_TRIAL = """
import ctypes, os, sys, time
control, until = os.path.join(sys.argv[1], "control"), time.monotonic() + float(sys.argv[2])
while not os.path.exists(control) and time.monotonic() < until:
    time.sleep(0.05)
cuda = ctypes.CDLL("libcuda.so.1")
device, context = ctypes.c_int(), ctypes.c_void_p()
codes = [cuda.cuInit(0), cuda.cuDeviceGet(ctypes.byref(device), 0)]
codes.append(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
raise SystemExit(any(codes) or not os.path.exists(control))  # without a service CUDA works as well
"""


def share_gpu(device: str) -> bool:
    """Let this process, which must not have used the GPU, and those that it starts use it at the same time.

    For commands alone: a process that goes on after its service has ended could not use the GPU any more.
    """
    control = shutil.which(_CONTROL)
    if control is None or not _gains(device):
        return False
    folder = tempfile.mkdtemp(prefix="anisoscope-mps-")
    ours = {_PIPES: folder, _LOGS: folder}
    try:
        keeper = _keeper(control, folder, os.environ | ours)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        return False
    if works := _works(folder, os.environ | ours):
        os.environ.update(ours)
    elif keeper.stdin is not None:
        keeper.stdin.close()
    return works


def _gains(device: str) -> bool:
    """Whether work on this device would gain; to ask CUDA would be its first use."""
    used = torch.cuda.is_initialized() or _PIPES in os.environ or _USUAL.exists()
    return not used and device.startswith(("auto", "cuda")) and any(_DEVICES.glob("nvidia[0-9]*"))


def _keeper(control: str, folder: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """The process of the service; in a session of its own, since an interruption is for the training."""
    line = [sys.executable, "-S", "-c", _KEEPER, control, folder]
    files: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    keeper = subprocess.Popen(line, env=dict(environment), start_new_session=True, **files)
    _kept.append(keeper)  # its input stays open until this process ends
    return keeper


_kept: list[subprocess.Popen[bytes]] = []


def _works(folder: str, environment: Mapping[str, str]) -> bool:
    """Whether another process can use the GPU through the service."""
    line = [sys.executable, "-S", "-c", _TRIAL, folder, str(_PATIENCE / 2)]
    try:
        tried = subprocess.run(line, env=dict(environment), timeout=_PATIENCE, capture_output=True)
    except (OSError, subprocess.SubprocessError):
        return False
    return tried.returncode == 0
