"""How every run.json begins: what is run, with what, on what, since when."""

from __future__ import annotations

import datetime
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from anisoscope import __version__


def opening(
    config: Mapping[str, Any], *, command: Sequence[str], seed: int, old: Mapping[str, Any], **more: Any
) -> dict[str, Any]:
    """The record of a run that begins, or that goes on from an `old` record; `more` is put beside it."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {
        "schema": 1,
        "anisoscope": __version__,
        **{name: more.pop(name) for name in ("kind", "study") if name in more},
        "command": list(command),
        "config": dict(config),
        "versions": versions(),
        "seed": seed,
        "status": "running",
        "started": old.get("started") or now,
        "wall_seconds": float(old.get("wall_seconds", 0.0)),
        "models": [],
        "warnings": [],
        **more,
    }


def versions() -> dict[str, str]:
    """The versions that numbers may depend on."""
    import numpy
    import transformers

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": numpy.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "executable": Path(sys.executable).name,
    }
