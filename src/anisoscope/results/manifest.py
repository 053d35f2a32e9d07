"""The initial content of run.json: command, configuration, versions, seed and start time of a run."""

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
    """The manifest of a new run, or of one resumed from an `old` manifest; `more` are further entries."""
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


def outcome(error: BaseException | None = None) -> dict[str, str]:
    """The entries `status` and `error` of a run that has ended.

    >>> outcome(KeyboardInterrupt()), outcome(ValueError("no data\\n…"))
    ({'status': 'interrupted'}, {'status': 'failed', 'error': 'no data'})
    """
    if error is None:
        return {"status": "complete"}
    status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
    return {"status": status} | ({"error": str(error).splitlines()[0]} if str(error) else {})


def versions() -> dict[str, str]:
    """Versions of the software that results may depend on, read without importing the packages."""
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy")},
        "platform": f"{platform.system()} {platform.machine()}",
        "executable": Path(sys.executable).name,
    }
