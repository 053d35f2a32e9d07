"""What `anisoscope study inherent` shows: progress, verdicts, what was skipped or failed, the path of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from anisoscope.view.console_learning import _end, _folder, _guarded


def run_inherent(
    options: Mapping[str, Any], *, jobs: int | None, out: Path | None, resume: bool, command: Sequence[str]
) -> None:
    """The study of seed C, `jobs` arms at a time (None: as the preset has it)."""
    from anisoscope.results.folder import RunFolder
    from anisoscope.studies.inherent.config import InherentConfig
    from anisoscope.studies.inherent.protocol import Inherent

    config = InherentConfig(**options)
    path = _folder(out, f"inherent-{config.preset}", resume=resume)
    folder = RunFolder.create(path, asdict(config), resume=resume)
    _guarded(path, lambda tell: Inherent(config, folder, command=command, progress=tell, jobs=jobs).run())
    _end(path)
