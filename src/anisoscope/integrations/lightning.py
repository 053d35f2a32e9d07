"""A callback that runs a monitor in Lightning's Trainer, of `lightning.pytorch` or `pytorch_lightning`.

    Trainer(max_steps=1000, callbacks=[MonitorCallback(when=log_spaced(), out="runs/mine")]).fit(module, loader)

A step number is the Trainer's `global_step` before the update, so 0 is the initialisation; with a probe, the state
after the last update is measured, too. Gradients are read before clipping, and the factors of accumulation and loss
scaling are divided out.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anisoscope.errors import AnisoscopeError
from anisoscope.integrations.follower import SAVED, FollowerCallback
from anisoscope.integrations.trackers.host import Log
from anisoscope.metrics.training import gradient_norm, learning_rate
from anisoscope.models.forward import ENGINE, FSDP
from anisoscope.models.parallel import sharded
from anisoscope.monitor.embedding_watch import bare_optimizer

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")  # two packages of one framework with separate classes


class LightningMonitorCallback(FollowerCallback):
    """Measures a model inside a LightningModule; the options are those of `Monitor`.

    `model` is a function from the LightningModule to the model; by default the module itself, the one transformers
    model or the only part with parameters inside it. `resume` follows the Trainer by default: a training that resumes
    from a checkpoint continues in `out`. An instance is a Callback of whichever Lightning package is in use.
    """

    def __new__(cls, *args: Any, **options: Any) -> LightningMonitorCallback:
        bases = tuple(importlib.import_module(name).Callback for name in _frameworks())
        if all(issubclass(cls, base) for base in bases):
            return object.__new__(cls)
        words = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        return object.__new__(type(cls.__name__, (cls, *bases), words))  # what a Trainer accepts

    def __init__(self, *, model: Callable[[Any], nn.Module] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._choose = model if model is not None else find_model
        self._saved: dict[str, Any] = {}
        self._numbers: dict[str, float] = {}
        self._number = 0
        self._whole = True  # whether parameters have gradients of their own, not pieces that processes share

    @property
    def state_key(self) -> str:
        """The name under which checkpoints keep its state, which must not follow the name of the class."""
        return "MonitorCallback"

    # hooks of the Trainer, in their order

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._follower.abandon()
        _refuse_unsupported(trainer)
        self._whole = type(trainer.model).__name__ not in (FSDP, ENGINE)
        self._follower.host = _log_of(trainer) if self._follower.logs_to_host else None
        total = trainer.estimated_stepping_batches
        with tempfile.TemporaryDirectory() as folder:
            if self._saved:
                torch.save(self._saved, Path(folder) / SAVED)
            self._follower.begin(
                self._choose(pl_module),
                step=trainer.global_step,
                total=int(total) if math.isfinite(total) and total > 0 else None,
                optimizer=bare_optimizer(trainer.optimizers[0]) if trainer.optimizers else None,
                saved=Path(folder),
                wrapper=trainer.model,
            )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self._follower.inside:  # the first micro-batch of an update
            self._number, self._numbers = trainer.global_step, {}
            self._follower.open_step(self._number)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self._follower.live and self._whole and all(p.grad is None for p in pl_module.parameters()):
            self._follower.drop_step()  # training_step returned None: the batch is skipped
        self._follower.close_step()
        if self.monitor is None or self._number not in self.monitor.done:
            return
        with self._follower.guarded("log numbers"):
            if self._whole and not sharded(pl_module):  # the norm of shards would be a collective, in a hook
                gradients = (p.grad for p in pl_module.parameters() if p.grad is not None)
                self._numbers["gradient_norm"] = gradient_norm(gradients)
            self._numbers["learning_rate"] = learning_rate(optimizer.param_groups)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        with self._follower.guarded("log numbers"):
            if isinstance(loss, torch.Tensor) and loss.numel() == 1:  # already divided by the number of micro-batches
                self._numbers["loss"] = self._numbers.get("loss", 0.0) + float(loss)
            if not self._follower.inside:
                self._follower.log(self._number, **self._numbers)

    def state_dict(self) -> dict[str, Any]:
        with self._follower.guarded("save its state with a checkpoint"), tempfile.TemporaryDirectory() as folder:
            self._follower.save(Path(folder))
            if (path := Path(folder) / SAVED).is_file():
                return dict(torch.load(path, weights_only=True))
        return {}

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._follower.measure_last(trainer.global_step)
        self._follower.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._follower.abandon()


MonitorCallback = LightningMonitorCallback  # the public name


def find_model(module: nn.Module) -> nn.Module:
    """The module itself where it is a transformers model, or the one transformers model inside it.

    Of a module without any: its only part with parameters, or itself where it has a forward of its own.
    """
    from transformers import PreTrainedModel

    found: dict[str, nn.Module] = {}
    for path, inner in module.named_modules():
        if isinstance(inner, PreTrainedModel) and not any(not o or path.startswith(f"{o}.") for o in found):
            found[path] = inner  # outermost models only
    if len(found) == 1:
        return next(iter(found.values()))
    inside = [part for part in module.children() if next(part.parameters(), None) is not None]
    if not found and len(inside) == 1 and type(inside[0]).forward is not nn.Module.forward:
        return inside[0]
    if not found and not type(module).forward.__module__.startswith(("lightning.", "pytorch_lightning.", "torch.")):
        return module
    what = f"holds {len(found)} transformers models ({', '.join(found)})" if found else "holds no transformers model"
    raise AnisoscopeError(
        f"{type(module).__name__} {what}, so it is not clear what to watch; say it: "
        "MonitorCallback(model=lambda module: module.…)."
    )


def _log_of(trainer: Any) -> Log:
    """How a Trainer logs numbers of a step, be it some steps late."""
    if not trainer.loggers:
        raise AnisoscopeError(
            "log_to names 'trainer', and this Trainer has no logger (logger=False); give it one, or name a tracker, "
            "such as log_to='tensorboard'."
        )
    held = weakref.ref(trainer)

    def log(numbers: dict[str, float], step: int) -> None:
        found = held()
        for logger in found.loggers if found is not None else ():
            logger.log_metrics(numbers, step=step)

    return log


def _refuse_unsupported(trainer: Any) -> None:
    """Raise an error, before the training begins, for setups that a monitor would measure wrongly."""
    if len(trainer.optimizers) > 1:
        raise AnisoscopeError(
            f"the module has {len(trainer.optimizers)} optimizers, so it is not clear what one step is; use "
            "anisoscope.Monitor in the loop itself."
        )


def _frameworks() -> tuple[str, ...]:
    """The Lightning packages that are imported; if none is, the first that is installed."""
    loaded = tuple(name for name in _PACKAGES if name in sys.modules)
    if loaded:
        return loaded
    installed = [name for name in _PACKAGES if importlib.util.find_spec(name.partition(".")[0]) is not None]
    if not installed:
        raise AnisoscopeError("neither lightning nor pytorch_lightning is installed; pip install lightning.")
    return (installed[0],)
