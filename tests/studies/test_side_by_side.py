"""Arms side by side: as many as the memory of a GPU holds, with the numbers of arms one after the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from anisoscope.errors import AnisoscopeError
from anisoscope.results.folder import RunFolder
from anisoscope.results.query import Table
from anisoscope.studies import side_by_side
from anisoscope.studies.catalogue import STUDIES
from anisoscope.studies.config import StudyArm
from anisoscope.studies.revisiting import Revisiting, RevisitingConfig
from anisoscope.training.config import TrainConfig

_GIB = 1 << 30
_TINY: dict[str, Any] = {"steps": 4, "layers": 1, "width": 16, "context": 16, "limit": 0.05, "tokens": "char"}
_TINY |= {"when": "0,4", "contexts": 8, "metrics": "light", "device": "cpu"}


def arms(tmp_path: Path, preset: str = "small") -> list[StudyArm]:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "corpus.json").write_text('{"vocab_size": 8192}')
    config = RevisitingConfig(preset=preset, seeds=(0,))
    made = [(run.model, tmp_path / run.model, run.training) for run in config.runs()]
    return [StudyArm(*fields, config.watch, tmp_path / "corpus") for fields in made]


def on_gpu(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(side_by_side, "choose_device", lambda device: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    monkeypatch.setattr("os.cpu_count", lambda: 16)


def test_as_many_arms_as_the_memory_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    four = arms(tmp_path)
    assert side_by_side.jobs_that_fit(four) is None, "nothing is known of a machine without a GPU"
    # measured on an H200: four need more than its 139 GiB, 30 to 40 each in the training and the rest beside it
    for free, number in ((280 * _GIB, 4), (139 * _GIB, 2), (80 * _GIB, 1), (8 * _GIB, 1)):
        on_gpu(monkeypatch, free)
        assert side_by_side.jobs_that_fit(four) == number
    (four[0].path).mkdir()
    (four[0].path / "run.json").write_text('{"status": "complete"}')
    on_gpu(monkeypatch, 280 * _GIB)
    assert side_by_side.jobs_that_fit(four) == 3, "what is complete needs no memory"


def test_the_estimate_is_above_what_was_measured(tmp_path: Path) -> None:
    (tmp_path / "corpus.json").write_text('{"vocab_size": 50257}')
    training = TrainConfig(layers=12, width=768, heads=12, batch_size=16, context=1024)
    found = side_by_side.memory_of(StudyArm("a", tmp_path / "a", training, {}, tmp_path)) / 1e9
    assert 25.1 < found < 35  # 25.1 on an H200, without a monitor


def study(out: Path, *, resume: bool = False, jobs: int | None = None, **options: Any) -> Path:
    config = RevisitingConfig(**_TINY | options)
    from dataclasses import asdict

    return Revisiting(config, RunFolder.create(out, asdict(config), resume=resume), jobs=jobs).run()


def test_a_failed_arm_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from anisoscope.studies import arms as trained

    whole = trained.train_arm

    def fails(arm: StudyArm, progress: Any = None) -> None:
        if arm.model == "encoder":
            raise RuntimeError("out of memory")
        whole(arm, progress)

    monkeypatch.setattr(trained, "train_arm", fails)
    with pytest.raises(AnisoscopeError, match=r"1 of 3 arms failed \(the first, encoder: .*--resume goes on"):
        study(tmp_path / "run")
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert [model["name"] for model in about["models"]] == ["decoder", "decoder-flatloss"]
    assert (tmp_path / "run" / "verdicts.json").is_file() and about["failed"][0]["arm"] == "encoder"
    monkeypatch.undo()
    study(tmp_path / "run", resume=True)
    assert set(Table.read(tmp_path / "run").arrow["model"].to_pylist()) == {"decoder", "encoder", "decoder-flatloss"}


def test_the_study_has_an_option_for_it() -> None:
    assert "as many as a GPU holds" in STUDIES["revisiting"].jobs_help


@pytest.mark.slow
def test_arms_side_by_side_give_the_numbers_of_arms_in_sequence(tmp_path: Path) -> None:
    tables = [Table.read(study(tmp_path / str(jobs), jobs=jobs)).arrow for jobs in (1, 3)]
    for name in ("model", "metric", "variant", "value", "n"):
        one, three = (table[name].to_pylist() for table in tables)
        assert one == pytest.approx(three, nan_ok=True) if name == "value" else one == three
