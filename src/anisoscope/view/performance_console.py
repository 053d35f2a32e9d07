"""What `anisoscope study performance` shows: progress, a short table, verdicts, and the path of the page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table as RichTable

from anisoscope.studies.performance.figures import READINGS, REPAIRS, ModelNumbers, words_of
from anisoscope.view.console import _terminated_as_interrupt, console, errors, progress_bars
from anisoscope.view.console_learning import _folder, print_verdicts
from anisoscope.view.subjects import RunView


def run_performance(options: Mapping[str, Any], *, out: Path | None, resume: bool, command: Sequence[str]) -> None:
    """Run the study, draw its page, print what came out."""
    from anisoscope.commands.report import write_study_report
    from anisoscope.results.folder import RunFolder
    from anisoscope.studies.performance.protocol import Performance, PerformanceConfig

    config = PerformanceConfig(**options)
    path = _folder(out, f"performance-{config.preset}", resume=resume)
    folder = RunFolder.create(path, asdict(config), resume=resume)
    with _terminated_as_interrupt(), progress_bars() as tell:
        Performance(config, folder, command=command, progress=tell).run()
    with errors.status("drawing the report"):
        page = write_study_report(path, "performance")
    about = folder.about()
    for book in ModelNumbers.all(RunView(folder.table())):
        console.print(_short(book))
    print_verdicts(json.loads((path / "verdicts.json").read_text(encoding="utf-8")))
    for warning in about.get("warnings", []):
        errors.print(f"note: {warning}", style="yellow", highlight=False, soft_wrap=True)
    errors.print(f"{about.get('wall_seconds', 0):.0f} s", highlight=False)
    console.print(str(page), soft_wrap=True, highlight=False)


def _short(book: ModelNumbers) -> RichTable:
    """Loss and mean accuracy by site and repair, at the last checkpoint."""
    step = book.last
    when = "" if step is None else f" at step {step:,}"
    table = RichTable(title=f"{book.model}{when}, test contexts", title_justify="left", header_style="bold")
    table.add_column("site")
    table.add_column("repair")
    for title in (*(f"loss, {name}" for name in READINGS), "linear probes", "nearest class mean"):
        table.add_column(title, justify="right")
    for site in book.places:
        for i, repair in enumerate(REPAIRS):
            loss = [book.value("lm_loss", step, site, reading=reading, repair=repair) for reading in READINGS]
            marks = [*loss, book.accuracy(step, site, repair), book.accuracy(step, site, repair, probe="cosine")]
            table.add_row(site[1].name if not i else "", repair, *map(words_of, marks))
    return table
