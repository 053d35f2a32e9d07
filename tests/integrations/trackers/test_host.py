"""`log_to="trainer"`: numbers go where the trainer logs its own, at the step they were measured at."""

from __future__ import annotations

import csv
import gc
import importlib
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")

from transformers import Trainer, TrainingArguments

from anisoscope.errors import AnisoscopeError
from anisoscope.integrations.hf_trainer import MonitorCallback
from anisoscope.monitor.schedule import at
from support.trainings import CHEAP, collate, gpt2, make_trainer, probe, texts

COSINE = "anisoscope/average_cosine/layer_01"


@pytest.fixture(autouse=True)
def _quiet() -> None:
    importlib.import_module("transformers").logging.set_verbosity_error()


def _options(**more: Any) -> dict[str, Any]:
    return {"when": at([0, 2, 5]), "metrics": "light", "plan": CHEAP, "probe": probe(), "log_to": "trainer", **more}


def _measured(table: Any) -> dict[int, float]:
    rows = table.where(metric="average_cosine", kind="resid", layer=1, variant="", group="")
    return {row.step: row.value for row in rows}


def test_a_trainer_has_the_numbers_in_its_history_and_trains_the_same(tmp_path: Path) -> None:
    callback = MonitorCallback(**_options())
    trainer = make_trainer(gpt2(), tmp_path, callback)
    trainer.train()
    history = trainer.state.log_history
    assert {entry["step"]: entry[COSINE] for entry in history if COSINE in entry} == _measured(callback.table)
    assert {entry["step"] for entry in history if "anisoscope/loss" in entry} == {0, 2}, "each logged once"
    plain = make_trainer(gpt2(), tmp_path)
    plain.train()
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert losses == [entry["loss"] for entry in plain.state.log_history if "loss" in entry]
    assert [e["step"] for e in history if "loss" in e] == [1, 2, 3, 4, 5], "its own count is as it was"
    held = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert held() is None, "the callback does not keep the Trainer alive"


def test_report_to_of_a_trainer_gets_the_numbers_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tb"))
    callback = MonitorCallback(**_options())
    make_trainer(gpt2(), tmp_path, callback, report_to="tensorboard").train()
    found: dict[int, float] = {}
    for folder in {path.parent for path in tmp_path.rglob("events.out.*")}:
        events = reader.EventAccumulator(str(folder)).Reload()
        if f"train/{COSINE}" in events.Tags()["scalars"]:
            found |= {event.step: event.value for event in events.Scalars(f"train/{COSINE}")}
    assert found == pytest.approx(_measured(callback.table), rel=1e-6)


class Averaging(Trainer):
    """A Trainer that, like those of TRL, adds means to what it logs and then forgets them."""

    def log(self, logs: dict[str, float], *rest: Any) -> None:
        self.forgotten = getattr(self, "forgotten", 0) + 1
        super().log({**logs, "own_mean": 1.0}, *rest)


def test_means_that_a_subclass_logs_are_left_alone(tmp_path: Path) -> None:
    callback = MonitorCallback(**_options())
    words: dict[str, Any] = {"max_steps": 5, "logging_steps": 5, "save_strategy": "no", "report_to": "none"}
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, disable_tqdm=True, **words)
    trainer = Averaging(gpt2(), arguments, train_dataset=texts(), data_collator=collate, callbacks=[callback])
    trainer.train()
    with_mean = [entry for entry in trainer.state.log_history if "own_mean" in entry]
    assert not any(COSINE in entry for entry in with_mean)
    assert len(with_mean) == 2 == trainer.forgotten  # the one logging step, and the end
    assert sum(COSINE in entry for entry in trainer.state.log_history) == 3


def test_a_callback_that_no_trainer_calls_is_told_so() -> None:
    from anisoscope.integrations.hf_trainer import _log_of, _running_trainer

    with pytest.raises(AnisoscopeError, match="is calling this callback"):
        _log_of(_running_trainer(MonitorCallback(log_to="trainer")))


def _lightning(folder: Path, callback: Any, logger: Any) -> Any:
    pl = pytest.importorskip("lightning.pytorch")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(pl.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = gpt2()

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    words = {"max_steps": 5, "accelerator": "cpu", "default_root_dir": folder, "logger": logger, **quiet}
    loader = torch.utils.data.DataLoader(texts(), batch_size=8, collate_fn=collate)
    pl.Trainer(**words, callbacks=[callback]).fit(Module(), loader)


def test_a_logger_of_lightning_reads_the_numbers_back(tmp_path: Path) -> None:
    loggers = pytest.importorskip("lightning.pytorch.loggers")
    from anisoscope.integrations.lightning import MonitorCallback as Callback

    callback = Callback(**_options())
    _lightning(tmp_path, callback, loggers.CSVLogger(tmp_path))
    (path,) = tmp_path.rglob("metrics.csv")
    with path.open() as file:
        found = {int(row["step"]): float(row[COSINE]) for row in csv.DictReader(file) if row.get(COSINE)}
    assert found == pytest.approx(_measured(callback.table), rel=1e-6)
    with pytest.raises(AnisoscopeError, match="this Trainer has no logger"):
        _lightning(tmp_path, Callback(**_options()), False)
