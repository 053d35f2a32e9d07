"""Python's functions end with the same folder as the commands of their names."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anisoscope
from anisoscope import cli
from anisoscope.commands import drawing, pipeline
from anisoscope.errors import AnisoscopeError
from anisoscope.results.folder import RunFolder
from anisoscope.training.config import TrainConfig
from support.pages import figure_names

TINY: dict[str, Any] = {"layers": 1, "width": 16, "heads": 2, "context": 16, "steps": 2, "batch_size": 2}


@pytest.fixture(autouse=True)
def _names_alone() -> Iterator[None]:
    with figure_names():
        yield


def test_a_training_that_is_measured_by_name_is_judged(tmp_path: Path) -> None:
    config = TrainConfig(**TINY, limit=0.05, checkpoints="none", device="cpu")
    out = anisoscope.train(config, tmp_path / "run", monitor="average_cosine", watch={"when": "0,2", "contexts": 16})
    run = RunFolder.open(out)
    assert set(run.table().where(metric="average_cosine").arrow["step"].to_pylist()) == {0, 2}
    assert json.loads((out / "verdicts.json").read_text()) and run.about()["config"]["monitor"] == "average_cosine"
    assert (out / "report.html").is_file(), "and drawn"
    alone = anisoscope.train(config, tmp_path / "alone")
    named = [alone / name for name in ("verdicts.json", "report.html")]
    assert not any(path.exists() for path in named), "the counter-test: nothing was measured, nothing is judged"


def test_python_and_the_command_line_write_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, small = "gpt2:n_layer=1,n_embd=16,n_head=2,n_positions=32", {"tokens": 128, "context": 32, "device": "cpu"}
    anisoscope.profile(model, out=tmp_path / "python", random_init=True, metrics=("drift",), **small)
    options = ("--random-init", "--metrics", "drift", "--tokens", "128", "--context", "32", "--device", "cpu")
    command = ["anisoscope", "profile", model, *options, "--out", str(tmp_path / "command")]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    files = [sorted(p.relative_to(out) for p in out.rglob("*") if p.is_file()) for out in sorted(tmp_path.iterdir())]
    assert files[0] == files[1] and Path("report.html") in files[0]


def test_a_finished_run_is_drawn_again_from_what_it_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).normal(size=(256, 8)) + 1)
    out = tmp_path / "run"
    anisoscope.profile(str(tmp_path / "rows.npy"), out=out, report=True)
    assert set(json.loads((out / "comparison.json").read_text())) == {"cka", "drift"}
    page = (out / "report.html").read_text(encoding="utf-8")

    def forbidden(*_: Any) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(drawing, "compare", forbidden)
    assert drawing.report_runs([out]).read_text(encoding="utf-8") == page
    (out / "comparison.json").unlink()
    with pytest.raises(AssertionError, match="computed again"):  # an older run: computed on demand
        drawing.report_runs([out])


def test_what_was_finished_is_drawn_when_the_rest_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "table.parquet").touch()
    noted: list[str] = []
    monkeypatch.setattr("anisoscope.commands.drawing.report_runs", lambda paths: paths[0] / "report.html")

    def broken() -> None:
        raise AnisoscopeError("it broke.")

    with pytest.raises(AnisoscopeError, match="it broke"):
        pipeline._carry_out(pipeline.RunRequest(tmp_path, note=noted.append), broken)
    assert noted == [f"unfinished; what was measured is in {tmp_path / 'report.html'}"]
    with pytest.raises(AnisoscopeError, match="--resume needs --out"):
        pipeline.run_path(None, "x", resume=True)
