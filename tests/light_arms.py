"""Work that stands for a training: in a module that a process of its own can import by name."""

from __future__ import annotations

import os
import signal
import time

from anisoscope.errors import AnisoscopeError
from anisoscope.studies.arms import Arm, Progress


def light_work(arm: Arm, progress: Progress | None) -> None:
    """Stands for a training: its name says what becomes of it."""
    assert progress is not None
    progress("train", 1, 2)
    if "killed" in arm.model:
        os.kill(os.getpid(), signal.SIGKILL)
    if "failing" in arm.model:
        raise AnisoscopeError("the loss became nan.")
    while "endless" in arm.model:
        try:
            time.sleep(0.01)
        except KeyboardInterrupt:
            (arm.path / "saved").touch()
            raise
    progress("train", 2, 2)
    (arm.path / "finished").touch()
