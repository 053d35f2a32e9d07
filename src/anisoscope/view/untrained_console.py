"""What `anisoscope study untrained` shows: progress, a short table, verdicts, and the path of the page."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table as RichTable

from anisoscope.studies.untrained.figures import BiasCurves, BlockArm
from anisoscope.view.console import _terminated_as_interrupt, console, errors, progress_bars
from anisoscope.view.console_learning import _folder, print_verdicts
from anisoscope.view.sections.verdicts import leading
from anisoscope.view.subjects import RunView
from anisoscope.view.words import number


def run_untrained(options: Mapping[str, Any], *, out: Path | None, resume: bool, command: Sequence[str]) -> None:
    """Run the study, draw its page, print what came out."""
    from anisoscope.commands.report import write_study_report
    from anisoscope.results.folder import RunFolder
    from anisoscope.studies.untrained.protocol import Untrained, UntrainedConfig

    config = UntrainedConfig(**options)
    path = _folder(out, f"untrained-{config.preset}", resume=resume)
    folder = RunFolder.create(path, asdict(config), resume=resume)
    with _terminated_as_interrupt(), progress_bars() as tell:
        Untrained(config, folder, command=command, progress=tell).run()
    started = time.monotonic()
    with errors.status("drawing the report"):
        page = write_study_report(path, "untrained")
    about = folder.about()
    curves = BiasCurves.of(RunView(folder.table(), about))
    for arm in curves.leading_arms():
        console.print(_short(curves, arm))
    print_verdicts(leading(json.loads((path / "verdicts.json").read_text(encoding="utf-8"))))
    drawing = time.monotonic() - started
    errors.print(f"{about.get('wall_seconds', 0) + drawing:.0f} s, {drawing:.0f} of them for the page", highlight=False)
    console.print(str(page), soft_wrap=True, highlight=False)


_COLUMNS = {
    "cosine in": ("embed", "average_cosine"),
    "cosine out": ("resid", "average_cosine"),
    "norm out": ("resid", "mean_norm"),
    "mean |score|": ("scores", "score_magnitude"),
    "spread": ("scores", "score_spread"),
    "entropy": ("scores", "attention_entropy"),
    "max p": ("scores", "attention_max"),
}


def _short(curves: BiasCurves, arm: BlockArm) -> RichTable:
    """The main curves of one arm, a line for each bias; means over seeds."""
    table = RichTable(title=f"{arm.family}, {arm}", title_justify="left", header_style="bold")
    table.add_column("bias", justify="right")
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for bias in curves.biases:
        points = [curves.at(arm, bias, *place) for place in _COLUMNS.values()]
        table.add_row(f"{bias:g}", *(number(p.value) if p is not None else "–" for p in points))
    return table
