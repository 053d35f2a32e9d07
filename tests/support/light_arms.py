"""Work that stands for a training: in a module that a process of its own can import by name."""

from __future__ import annotations

import os
import signal
import time
from typing import NoReturn

from anisoscope.errors import AnisoscopeError
from anisoscope.option import Progress
from anisoscope.studies.config import StudyArm


def light_work(arm: StudyArm, progress: Progress | None) -> None:
    """Stands for a training: its name says what becomes of it."""
    assert progress is not None
    if "endless" in arm.model:
        _until_interrupted(arm, progress)
    progress("train", 1, 2)
    if "killed" in arm.model:
        os.kill(os.getpid(), signal.SIGKILL)
    if "failing" in arm.model:
        raise AnisoscopeError("the loss became nan.")
    progress("train", 2, 2)
    (arm.path / "finished").touch()


def _until_interrupted(arm: StudyArm, progress: Progress) -> NoReturn:
    try:
        progress("train", 1, 2)  # inside: the interruption may come as soon as the word is heard
        while True:
            time.sleep(0.01)
    except KeyboardInterrupt:
        (arm.path / "saved").touch()
        raise
