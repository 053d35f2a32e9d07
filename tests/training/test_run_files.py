"""run.json of a training run says how much of its probe was measured, as that of a profile does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anisoscope.monitor.monitor import Monitor
from anisoscope.monitor.schedule import log_spaced
from anisoscope.results.folder import RunFolder
from anisoscope.training.loop import train
from support.tiny_runs import about, tiny

CONTEXTS = 6


def watching(model: Any, stream: Any, optimizer: Any, config: Any, folder: Path) -> Any:
    probe = stream.probe_batches(CONTEXTS)
    return Monitor(
        model, probe=probe, when=log_spaced(config.steps), metrics="average_cosine,drift", out=folder, name="m"
    )


def test_a_watched_run_says_how_many_rows_it_was_measured_on(tokenised: Path, tmp_path: Path) -> None:
    out = train(tiny(steps=2), tmp_path / "run", monitor=watching, corpus=tokenised)
    entry, table = about(out)["models"][0], RunFolder.open(out).table()
    stream = [row for row in table.records() if row["kind"] == "resid" and row["metric"] == "average_cosine"]
    assert stream
    assert entry["row_count"] == max(row["n"] for row in stream)
    assert entry["contexts"] == CONTEXTS
    assert entry["rows"] == {"single": "one character (or byte) of text"}


def test_a_run_that_nobody_watched_says_nothing_of_rows(tokenised: Path, tmp_path: Path) -> None:
    entry = about(train(tiny(steps=1), tmp_path / "run", corpus=tokenised))["models"][0]
    assert "row_count" not in entry
    assert "contexts" not in entry
