"""What `anisoscope study sharpness` shows: progress, verdicts, what each arm costs, and the path of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from anisoscope.view.console import console
from anisoscope.view.console_learning import _end, _folder, _guarded


def run_sharpness(
    options: Mapping[str, Any], *, jobs: int | None, out: Path | None, resume: bool, command: Sequence[str]
) -> None:
    """The study of seed C's open question, `jobs` arms at a time (None: as the preset has it)."""
    from anisoscope.results.folder import RunFolder
    from anisoscope.studies.sharpness.figures import ArmNumbers, loss_sentence
    from anisoscope.studies.sharpness.protocol import Sharpness, SharpnessConfig
    from anisoscope.view.subjects import RunView

    config = SharpnessConfig(**options)
    path = _folder(out, f"sharpness-{config.preset}", resume=resume)
    folder = RunFolder.create(path, asdict(config), resume=resume)
    _guarded(path, lambda tell: Sharpness(config, folder, command=command, progress=tell, jobs=jobs).run())
    for results in ArmNumbers.all(RunView(folder.table())):
        if results.steps and (words := loss_sentence(results)):
            console.print(words, soft_wrap=True, highlight=False, markup=False)
    _end(path)
