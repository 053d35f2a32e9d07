"""The first state of run.json: what is run, with what, on what, since when."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from anisoscope import __version__


def new_manifest(
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
    """The versions that numbers may depend on, read from the installed packages without importing them."""
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy")},
        "platform": f"{platform.system()} {platform.machine()}",
        "executable": Path(sys.executable).name,
    }
