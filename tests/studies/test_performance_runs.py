"""Whole runs of the performance study: every number, the page, resuming, labels of one's own, and the command."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from anisoscope.errors import AnisoscopeError
from anisoscope.results.folder import RunFolder
from anisoscope.studies.performance import PerformanceConfig
from anisoscope.studies.performance.protocol import Performance
from support.pages import page_of
from support.performances import WORDS, write_records

STORIES = Path(__file__).parents[3] / "shared" / "models" / "stories260k"
QUICK: dict[str, Any] = {"tokens": 1600, "context": 32, "rows": 256, "penalties": (1e-2, 1.0), "articles": 4}


def run_study(out: Path, *, resume: bool = False, **options: Any) -> RunFolder:
    config = PerformanceConfig(**{**QUICK, **options})
    Performance(config, RunFolder.create(out, asdict(config), resume=resume)).run()
    return RunFolder.open(out)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from anisoscope.training.config import TrainConfig
    from anisoscope.training.loop import train

    size: dict[str, Any] = {"layers": 2, "width": 16, "heads": 2, "context": 32, "batch_size": 4, "limit": 0.3}
    out = tmp_path_factory.mktemp("runs") / "decoder"
    return train(TrainConfig(steps=6, checkpoints="0,2,4", lr=1e-2, **size), out)


@pytest.fixture(scope="module")
def measured(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return run_study(tmp_path_factory.mktemp("study") / "run", models=(str(trained),))


def test_a_run_has_every_number_for_every_checkpoint_site_and_repair(measured: RunFolder) -> None:
    table = measured.table()
    places = {(r["step"], r["layer"], r["kind"]) for r in table.where(metric="lm_loss").records()}
    assert places == {(s, *p) for s in (0, 2, 4, 6) for p in ((0, "embed"), (1, "resid"), (2, "resid"), (2, "final"))}
    at = {"step": 6, "layer": 1, "kind": "resid"}
    for repair in ("raw", "mean", "all_but_top", "whitened"):
        for reading in ("patched", "readout"):
            assert 0 < table.value(metric="lm_loss", variant=f"reading={reading};repair={repair}", **at) < 12
        for task in ("space_next", "token_class", "place_in_word", "article", "order"):
            assert 0 <= table.value(metric="probe_accuracy", variant=f"repair={repair};task={task}", **at) <= 1
        assert 0 < table.value(metric="svd_ratio", variant=f"repair={repair}", **at) < 1
    about = measured.about()
    assert about["status"] == "complete" and about["study"] == "performance"
    assert about["data"]["name"] == "held-out part of the training text"


def test_the_mean_cannot_change_a_probe_and_pooling_cannot_see_order_in_embeddings(measured: RunFolder) -> None:
    table = measured.table()
    gains = table.where(metric="probe_accuracy", variant="against=raw;repair=mean;task=token_class").records()
    assert {row["value"] for row in gains} == {0.0}
    white = table.where(metric="probe_accuracy", variant="against=raw;repair=whitened;task=token_class").records()
    assert {row["value"] for row in white} != {0.0}
    raw = table.where(metric="average_cosine", variant="repair=mean", kind="final").records()
    assert all(abs(row["value"]) < 0.1 for row in raw)


def test_correlations_and_verdicts_are_written(measured: RunFolder) -> None:
    rows = measured.table().where(metric="performance_correlation").records()
    variants = {row["variant"] for row in rows}
    want = "geometry=svd_ratio;interval=checkpoints;method=spearman;over=checkpoints;performance=loss;sites=mean"
    assert want in variants and want.replace("interval=checkpoints", "interval=contexts") in variants
    assert any("over=layers" in variant for variant in variants)
    verdicts = json.loads((measured.path / "verdicts.json").read_text(encoding="utf-8"))
    claims = {verdict["claim"] for verdict in verdicts}
    assert {"whitened_improves_probe", "mean_harms_model", "anisotropy_worse_loss_checkpoints"} <= claims


@pytest.mark.slow
def test_a_study_that_broke_off_goes_on_and_ends_alike(
    measured: RunFolder, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from anisoscope.studies.performance import protocol as performance

    real, calls = performance.load_model, []

    def breaks(spec: str, **options: Any) -> Any:
        calls.append(spec)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(spec, **options)

    monkeypatch.setattr(performance, "load_model", breaks)
    with pytest.raises(KeyboardInterrupt):
        run_study(tmp_path / "run", models=(str(trained),))
    assert RunFolder.open(tmp_path / "run").about()["status"] == "interrupted"
    again = run_study(tmp_path / "run", resume=True, models=(str(trained),))
    assert len(calls) == 5, "two were done, the third is loaded again, none a third time"
    mine, theirs = (
        [(r["metric"], r["variant"], r["step"], r["value"]) for r in f.table().records()] for f in (again, measured)
    )
    assert len(mine) == len(theirs)
    for one, two in zip(mine, theirs, strict=True):
        assert one[:3] == two[:3] and (one[3] == two[3] or (math.isnan(one[3]) and math.isnan(two[3])))


@pytest.mark.usefixtures("drawn_figures")
def test_the_page_is_complete_in_itself(measured: RunFolder) -> None:
    from anisoscope.commands.drawing import write_study_report

    page = write_study_report(measured.path, "performance")
    text = page.read_text(encoding="utf-8")
    assert "Does the geometry matter?" in text and "Rank correlations" in text
    assert page_of(page).fetched() == []
    names = {path.stem for path in (measured.path / "figures").glob("*.pdf")}
    wanted = ("loss", "probes", "cosine", "geometry", "course", "together")
    assert names == {"hero", *(f"performance-{n}" for n in wanted)}


def test_a_masked_language_model_is_asked_for_masked_tokens(tmp_path: Path) -> None:
    from anisoscope.training.config import TrainConfig
    from anisoscope.training.loop import train

    size: dict[str, Any] = {"layers": 1, "width": 16, "heads": 2, "context": 32, "batch_size": 4, "limit": 0.3}
    path = train(TrainConfig(arch="encoder", steps=1, checkpoints="none", **size), tmp_path / "encoder")
    found = run_study(tmp_path / "run", models=(str(path / "checkpoints" / "checkpoint-1"),), tasks=("token_class",))
    table = found.table()
    rows = table.where(metric="lm_loss", variant="reading=patched;repair=raw").records()
    tested = table.where(metric="probe_accuracy", variant="repair=raw;task=token_class").records()
    assert {row["step"] for row in rows} == {None}
    assert 0.1 < rows[0]["n"] / tested[0]["n"] < 0.2, "the loss is about 15 % of the tokens, the probe about all"


def test_labels_of_the_users_own_take_the_place_of_the_tasks(trained: Path, tmp_path: Path) -> None:
    texts = [{"text": f"{i} {WORDS}" if i % 2 else f"{i} {WORDS.upper()}", "label": i % 2} for i in range(60)]
    path = write_records(tmp_path / "labels.jsonl", texts)
    model = str(trained / "checkpoints" / "checkpoint-6")
    found = run_study(tmp_path / "run", models=(model,), labels=str(path), layers=(2,)).table()
    rows = found.where(metric="probe_accuracy", variant="repair=raw;task=labels").records()
    assert [row["value"] for row in rows] == [1.0, 1.0], "capitals are easy to tell"
    assert all(row["n"] == row["contexts"] < 60 for row in rows)
    mixed = found.where(metric="probe_accuracy", variant="control=shuffled;repair=raw;task=labels").records()
    assert all(row["value"] < 0.9 for row in mixed), "and shuffled labels are not"
    assert not found.where(metric="probe_accuracy", variant="repair=raw;task=order").records()


@pytest.mark.skipif(not STORIES.exists(), reason="stories260k is not here")
def test_real_weights_lose_when_their_rows_are_repaired_inside(tmp_path: Path) -> None:
    found = run_study(
        tmp_path / "run", models=(str(STORIES),), tokenizer="bytes", tasks=("token_class",), layers=(3,)
    ).table()
    at = {"metric": "lm_loss", "layer": 3, "kind": "resid"}
    raw = found.value(variant="reading=patched;repair=raw", **at)
    assert math.isfinite(raw)
    assert found.value(variant="against=raw;reading=patched;repair=whitened", **at) != 0
    shape = {"metric": "svd_ratio", "layer": 3, "kind": "resid"}
    assert found.value(variant="repair=whitened", **shape) < found.value(variant="repair=raw", **shape)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "huge"}, "unknown preset"),
        ({"pool": "max"}, "unknown pool"),
        ({"tasks": ("sentiment",)}, "unknown task"),
        ({"shrinkage": 3.0}, "from 0 to 1"),
        ({"dtype": "float31"}, "did you mean 'float32'"),  # before anything is trained
        ({"models": ("a", "a")}, "named twice"),
        ({"models": ("a",), "steps": 5}, "leave it out"),
        ({"revisions": ("step0",)}, "one model"),
        ({"penalties": (-1.0,)}, "from 0 on"),
        ({"tokens": 3}, "at least 64"),
    ],
)
def test_bad_options_are_refused_in_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(AnisoscopeError, match=message):
        PerformanceConfig(**options)


def test_the_command_is_there_and_refuses_a_missing_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from typer.testing import CliRunner

    from anisoscope.cli import app

    runner = CliRunner()
    assert "whiten" in runner.invoke(app, ["study", "performance", "--help"]).output.lower()
    result = runner.invoke(app, ["study", "performance", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")])
    assert isinstance(result.exception, AnisoscopeError)
    assert "nowhere" in str(result.exception)


def test_every_number_of_the_table_is_declared(measured: RunFolder) -> None:
    from anisoscope.metrics.catalogue import registry

    declared = registry()
    names = set(measured.table().metrics)
    assert names <= set(declared)
    assert {name for name, metric in declared.items() if "study performance" in metric.measured_by} <= names
