"""The Lightning callback: what it shows is what a plain loop shows, and the training does not notice."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")


from anisoscope.errors import AnisoscopeError
from anisoscope.monitor.schedule import at, every
from anisoscope.tangent.proxy import StepRows
from support.trainings import (
    UPDATES,
    Killed,
    Twin,
    assert_decay_removed,
    assert_same,
    assert_same_rows,
    energies,
    fit,
    gpt2,
    hooks_of,
    llama,
    monitor_options,
    plain_loop,
    probe,
    sites_of,
    steps_of,
)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    importlib.import_module("transformers").logging.set_verbosity_error()


def lightning(name: str = "lightning.pytorch") -> Any:
    package = pytest.importorskip(name, reason=f"{name} is not installed")
    for logger in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    return package


def lightning_module(pl: Any, model: nn.Module, *, adam: bool = False) -> Any:
    class Module(pl.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses, self.batches, self.kill, self.skip = model, [], [], -1, -1

        def training_step(self, batch: Any, number: int) -> Tensor | None:
            if self.trainer.global_step == self.kill:
                raise Killed
            if number == self.skip:
                return None
            loss: Tensor = self.model(**batch).loss
            self.losses.append(float(loss))
            self.batches.append(batch)
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.model(**batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            if adam:
                return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.9)
            return torch.optim.SGD(self.parameters(), lr=0.5)

    return Module()


def lightning_callback(**options: Any) -> Any:
    from anisoscope.integrations.lightning import MonitorCallback as Callback

    return Callback(**monitor_options(**options))


QUIET = pytest.mark.filterwarnings("ignore")


@QUIET
@pytest.mark.parametrize("accumulate", [1, 3])
def test_lightning_shows_the_rows_of_a_plain_loop(accumulate: int, tmp_path: Path, seen: list[StepRows]) -> None:
    pl = lightning()
    callback, module = lightning_callback(), lightning_module(pl, gpt2())
    options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.1, "max_steps": 3}
    fit(pl, module, tmp_path, callback, val_check_interval=2, **options)
    mine = seen.copy()
    seen.clear()
    table = plain_loop(gpt2, module.batches, lambda *counts: 1 / accumulate, accumulate=accumulate, clip=0.1)
    assert_same_rows(mine, seen)
    assert_same(callback.table, table, 1e-6)
    losses = torch.tensor(module.losses).view(-1, accumulate).mean(1)
    for step in (0, 2):
        found = {row["metric"]: row["value"] for row in callback.table.where(step=step, kind="training").records()}
        assert found["loss"] == pytest.approx(float(losses[step]), rel=1e-6)
        assert found["learning_rate"] == 0.5
        assert found["gradient_norm"] > 0.2, "as it was before clipping"
    assert hooks_of(module) == 0


@QUIET
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_lightning_losses_are_bit_identical_with_and_without(package: str, tmp_path: Path) -> None:
    pl = lightning(package)
    plain = lightning_module(pl, gpt2(dropout=0.1))
    fit(pl, plain, tmp_path)
    for more in ({}, {"probe": probe()}):
        module = lightning_module(pl, gpt2(dropout=0.1))
        callback = lightning_callback(when=None, **more)
        assert isinstance(callback, pl.Callback)
        assert callback.state_key == "MonitorCallback"  # older checkpoints keep the state under this name
        fit(pl, module, tmp_path, callback)
        assert module.losses == plain.losses
        assert steps_of(callback.table) == ([0, 1, 2, 4, 5] if more else [0, 1, 2, 4])


@QUIET
def test_a_resumed_lightning_training_goes_on_with_its_monitor(tmp_path: Path) -> None:
    pl = lightning()

    def run(folder: Path, **more: Any) -> Any:
        kill = more.pop("kill", -1)
        callback = lightning_callback(when=every(2), plan=UPDATES, probe=probe(), out=folder / "monitor")
        saver = pl.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
        module = lightning_module(pl, gpt2(), adam=True)
        module.kill = kill
        # an epoch of three batches, for Lightning begins a loader anew in the middle of one
        options = {"enable_checkpointing": True, "max_steps": 8, "n": 24}
        if kill < 0:
            fit(pl, module, folder, callback, saver, **options, **more)
        else:
            with pytest.raises(Killed):
                fit(pl, module, folder, callback, saver, **options, **more)
        assert hooks_of(module) == 0, "also where it broke off"
        return callback.table

    whole = run(tmp_path / "whole")
    assert steps_of(run(tmp_path / "broken", kill=4)) == [0, 2]
    resumed = run(tmp_path / "broken", checkpoint=tmp_path / "broken" / "step=3.ckpt")
    assert steps_of(resumed) == [0, 2, 4, 6, 8]
    assert_same(resumed, whole, 1e-6)
    assert any("of=update;" in key[-1] for key in energies(resumed))


@QUIET
def test_a_batch_that_lightning_skips_stops_nothing(tmp_path: Path) -> None:
    pl = lightning()
    module = lightning_module(pl, gpt2())
    module.skip = 2
    fit(pl, module, tmp_path, callback := lightning_callback())
    assert len(module.losses) >= 4
    assert steps_of(callback.table) == [0, 4]


@QUIET
def test_loss_scaling_is_taken_out(tmp_path: Path, seen: list[StepRows]) -> None:
    pl = lightning()
    scale = 1024.0
    norms = []
    for plugins in ([], [_scaled(pl, scale)]):
        fit(pl, lightning_module(pl, gpt2()), tmp_path, lightning_callback(when=at([0])), max_steps=1, plugins=plugins)
        norms.append([float(test.g.norm()) for _, _, test in seen[-1].halves() if test.g is not None])
    (rows, factor), *_ = seen[-1].test[sites_of(seen[-1])[0]]
    (_, unscaled), *_ = seen[0].test[sites_of(seen[0])[0]]
    assert factor == pytest.approx(unscaled / scale)
    assert rows.g is not None and norms[1] == pytest.approx(norms[0], rel=0.02)


def _scaled(pl: Any, scale: float) -> Any:
    """Half precision whose loss is multiplied before the backward pass, as on a GPU."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    return pl.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)


@QUIET
def test_in_lightning_the_optimizer_tells_how_much_was_weight_decay(tmp_path: Path, updates: list[Any]) -> None:
    """Lightning runs the whole step inside optimizer.step(closure): decay of step i must not count before it."""
    pl = lightning()
    twin = Twin()

    class Look(pl.Callback):  # type: ignore[misc,name-defined]
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            twin.look(module.model.get_input_embeddings().weight, optimizer)

    module = lightning_module(pl, gpt2(), adam=True)
    fit(pl, module, tmp_path, lightning_callback(plan=UPDATES), Look())
    assert_decay_removed(updates, twin)


@QUIET
def test_the_model_inside_a_lightning_module_is_found_or_asked_for(tmp_path: Path) -> None:
    pl = lightning()
    from anisoscope.integrations.lightning import find_model

    module, model = lightning_module(pl, gpt2()), llama()
    assert find_model(module) is module.model
    assert find_model(model) is model
    with pytest.raises(AnisoscopeError, match=r"holds no transformers model.*model=lambda module"):
        find_model(nn.Linear(2, 2))
    module.other = model
    with pytest.raises(AnisoscopeError, match=r"holds 2 transformers models \(model, other\)"):
        fit(pl, module, tmp_path, lightning_callback())
    callback = lightning_callback(model=lambda m: m.model)
    fit(pl, module, tmp_path, callback)
    assert steps_of(callback.table) == [0, 2, 4]
    assert callback.monitor.model is module.model
