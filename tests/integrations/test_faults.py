"""Faults of a monitor do not reach the training of a Trainer: its losses are those of an unmonitored one."""

from __future__ import annotations

import errno
import importlib
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")

from transformers import TrainerCallback

from anisoscope.capture.step_capture import LiveGradients, MicroBatch
from anisoscope.errors import UnusableFolder
from anisoscope.integrations.hf_trainer import MonitorCallback
from anisoscope.integrations.lightning import MonitorCallback as LightningCallback
from anisoscope.monitor import saved_state
from anisoscope.monitor.guard import MonitorWarning
from anisoscope.monitor.monitor import Monitor
from anisoscope.tangent.tangent_study import TangentStudy
from support.trainings import fit, gpt2, hooks_of, make_trainer, monitor_options, probe

pytestmark = pytest.mark.filterwarnings("ignore::anisoscope.monitor.guard.MonitorWarning")
FAULTS = ["memory", "hook", "gradient hook", "disk", "unusable", "deleted", "cleared", "saving"]
SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    importlib.import_module("transformers").logging.set_verbosity_error()


def fails(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


def install(fault: str, patch: pytest.MonkeyPatch) -> None:
    places: dict[str, tuple[Any, str]] = {"memory": (TangentStudy, "alone"), "hook": (LiveGradients, "rows")}
    places |= {"gradient hook": (MicroBatch, "receive"), "saving": (saved_state, "state_of")}
    if fault in places:
        patch.setattr(*places[fault], fails)
    if fault == "unusable":  # from the beginning

        def refused(folder: Path) -> Any:
            raise UnusableFolder.because(folder, OSError(errno.EROFS, os.strerror(errno.EROFS)))

        patch.setattr("anisoscope.monitor.sink.WriterLock", refused)
    if fault == "disk":

        def full(handle: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        begun = Monitor.step

        def then_full(self: Monitor, *args: Any, **kwargs: Any) -> Any:
            patch.setattr("anisoscope.results.folder.os.fsync", full)
            return begun(self, *args, **kwargs)

        patch.setattr(Monitor, "step", then_full)


def meddle(fault: str, model: Any, out: Path) -> None:
    """What others do between two steps."""
    if fault == "deleted" and out.exists():
        shutil.rmtree(out)
    for module in model.modules() if fault == "cleared" else ():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()


class Meddler(TrainerCallback):
    def __init__(self, fault: str, out: Path) -> None:
        self.fault, self.out = fault, out

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            meddle(self.fault, kwargs["model"], self.out)


def losses_of(trainer: Any) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses without a monitor."""
    trainer = make_trainer(gpt2(), tmp_path_factory.mktemp("plain"), **SAVING)
    trainer.train()
    return losses_of(trainer)


@pytest.mark.parametrize("live", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_trainer_goes_on(
    fault: str, live: bool, plain: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(fault, monkeypatch)
    out = tmp_path / "run"
    options = monitor_options(out=out, layers=(2,), **({} if live else {"probe": probe(), "every_step": True}))
    callback = MonitorCallback(**options)
    trainer = make_trainer(gpt2(), tmp_path / "watched", callback, Meddler(fault, out), **SAVING)
    trainer.train()
    assert losses_of(trainer) == plain and len(plain) == 5
    assert hooks_of(trainer.model) == 0
    assert callback.monitor is not None
    seen_by_the_probe = not live and "hook" in fault
    assert callback.monitor.guard.faults or seen_by_the_probe, "noted"


@pytest.mark.parametrize("fault", ["memory", "hook", "saving"])
def test_a_strict_callback_stops_the_trainer(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(fault, monkeypatch)
    callback = MonitorCallback(**monitor_options(out=tmp_path / "run", strict=True))
    trainer = make_trainer(gpt2(), tmp_path, callback)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    callback.close()
    assert hooks_of(trainer.model) == 0


@pytest.mark.parametrize("fault", FAULTS)
def test_lightning_goes_on(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pl = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    out = tmp_path / "run"

    class Module(pl.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self, fault: str) -> None:
            super().__init__()
            self.model, self.losses, self.fault = gpt2(), [], fault

        def training_step(self, batch: Any, number: int) -> Tensor:
            if number == 1:
                meddle(self.fault, self.model, out)
            loss: Tensor = self.model(**batch).loss
            self.losses.append(float(loss))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    saved = {"enable_checkpointing": True}
    fit(pl, plain := Module(""), tmp_path / "plain", **saved)
    install(fault, monkeypatch)
    callback = LightningCallback(**monitor_options(out=out))
    fit(pl, watched := Module(fault), tmp_path / "watched", callback, **saved)
    assert watched.losses == plain.losses and len(plain.losses) == 5
    assert hooks_of(watched.model) == 0
    assert callback.monitor is not None and callback.monitor.guard.faults


def test_a_second_training_into_the_folder_is_refused_at_its_beginning(tmp_path: Path) -> None:
    from anisoscope.errors import AnisoscopeError

    with Monitor(gpt2(), **monitor_options(out=tmp_path / "run")):
        trainer = make_trainer(gpt2(), tmp_path, MonitorCallback(**monitor_options(out=tmp_path / "run", resume=True)))
        with pytest.raises(AnisoscopeError, match="another monitor of this process"):
            trainer.train()
    with pytest.warns(MonitorWarning), Monitor(gpt2(), **monitor_options(out=tmp_path / "run", resume=True)):
        pass
