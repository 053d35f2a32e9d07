"""run.json of a training run says how much of its probe was measured, as that of a profile does."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from anisoscope.monitor.monitor import Monitor
from anisoscope.monitor.schedule import log_spaced
from anisoscope.results.folder import RunFolder
from anisoscope.results.query import Table
from anisoscope.training.loop import train
from anisoscope.training.run_files import diverged
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


# -- a model that is worse than guessing -------------------------------------------------------------------------------


def losses(*rows: tuple[int, float], metric: str = "probe_loss", **more: Any) -> list[dict[str, Any]]:
    return [{"metric": metric, "kind": "training", "step": step, "value": value, **more} for step, value in rows]


def warned(*rows: dict[str, Any], vocabulary: int | None = 256) -> list[str]:
    return diverged(Table.from_records(rows), vocabulary)


def test_a_training_that_diverged_says_so_before_anything_else(tokenised: Path, tmp_path: Path) -> None:
    out = train(tiny(steps=12, lr=1.0), tmp_path / "run", monitor=watching, corpus=tokenised)
    found, table = about(out), RunFolder.open(out).table()
    size = found["data"]["vocab_size"]
    loss, first = table.value(metric="probe_loss", step=12), found["warnings"][0]
    assert loss > math.log(size)
    assert (
        first.startswith(f"WORSE THAN GUESSING: at step 12 its held-out loss is {loss:.3g} nats")
        and f"its {size:,} tokens" in first
    )
    assert found["models"][0]["notes"] == [first], "so that pages and studies name the model"


def test_a_model_that_learned_gets_no_such_warning(tokenised: Path, tmp_path: Path) -> None:
    found = about(train(tiny(steps=40, lr=1e-2), tmp_path / "run", monitor=watching, corpus=tokenised))
    assert "notes" not in found["models"][0] and not any("GUESSING" in text for text in found["warnings"])


def test_the_last_measured_step_counts_and_its_interval_too() -> None:
    guess = math.log(256)
    assert warned(*losses((0, 2.0), (8, guess + 1))) and not warned(*losses((0, 9.0), (8, guess - 0.1)))
    assert not warned(*losses((0, 9.0))), "the untrained model is not expected to know anything"
    assert not warned(*losses((8, guess + 0.1), low=guess - 0.1, high=guess + 0.3)), "it may be as good as guessing"
    assert not warned(*losses((8, 9.0)), vocabulary=None), "pictures and sounds have no vocabulary"
    weighted = losses((8, guess - 1), metric="weighted_probe_loss")
    assert not warned(*losses((8, guess + 1)), *weighted), "what it was trained for, it learned"
    assert warned() == []
