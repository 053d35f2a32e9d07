"""A callback that runs a monitor in transformers' Trainer.

    Trainer(model, args, train_dataset=…, callbacks=[MonitorCallback(when=log_spaced(), out="runs/mine")])

A step number is the Trainer's `global_step` before the update, so 0 is the initialisation; with a probe, the state
after the last update is measured, too. Gradients are read before clipping, and the factors of accumulation and loss
scaling are divided out.
"""

from __future__ import annotations

import sys
import weakref
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from anisoscope.errors import AnisoscopeError
from anisoscope.integrations.follower import FollowerCallback
from anisoscope.integrations.trackers.host import Log
from anisoscope.monitor.embedding_watch import bare_optimizer

_LOGGED = {"grad_norm": "gradient_norm", "learning_rate": "learning_rate"}


class TrainerMonitorCallback(FollowerCallback, TrainerCallback):
    """Measures the model of a Trainer; the options are those of `Monitor`.

    `resume` follows the Trainer by default: a training that resumes from a checkpoint continues in `out`. The loss of
    a measured step is kept if the Trainer logs that step alone (`logging_steps=1`). A training that ended with an
    exception leaves inactive hooks on its model, which `close` removes.
    """

    _logged = 0  # the last step that was logged

    def close(self) -> None:
        """Remove all hooks from the model after a training that ended with an exception."""
        self._follower.abandon()

    # events of the Trainer, in their order: (TrainingArguments, TrainerState, TrainerControl)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._follower.abandon()
        self._logged = state.global_step
        _refuse_unsupported(args, live=self._follower.live)
        trainer = _running_trainer(self)
        self._follower.host = _log_of(trainer) if self._follower.logs_to_host else None
        optimizer = bare_optimizer(kwargs.get("optimizer"))
        self._follower.begin(
            kwargs["model"],
            step=state.global_step,
            total=state.max_steps,
            wrapper=getattr(trainer, "model_wrapped", None),
            optimizer=optimizer,
            tokenizer=kwargs.get("processing_class"),
            saved=_checkpoint(args, state) if state.global_step else None,
        )
        self._follower.close_before(optimizer)  # DeepSpeed makes the update before on_pre_optimizer_step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._follower.open_step(state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._follower.close_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # not in on_train_end, where the best model may have replaced the last
        if control.should_training_stop or state.global_step >= state.max_steps:
            self._follower.measure_last(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = kwargs.get("logs") or {}
        if "loss" not in logs:  # logs of an evaluation, or of the whole training
            return
        numbers = {ours: logs[theirs] for theirs, ours in _LOGGED.items() if theirs in logs}
        if state.global_step - self._logged == 1:  # otherwise it is a mean over several steps
            numbers["loss"] = logs["loss"]
        self._logged = state.global_step
        self._follower.log(state.global_step - 1, **numbers)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._follower.save(_checkpoint(args, state))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not (args.load_best_model_at_end and state.best_model_checkpoint):
            self._follower.measure_last(state.global_step)
        self._follower.end()


MonitorCallback = TrainerMonitorCallback  # the public name


def _running_trainer(callback: TrainerCallback) -> Any:
    """The Trainer that calls this callback; callbacks are not told which, so it is looked for among the callers."""
    from transformers import Trainer

    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        frame, found = caller, caller.f_locals.get("self")
        if isinstance(found, Trainer) and callback in found.callback_handler.callbacks:
            return found
    return None


def _log_of(trainer: Any) -> Log:
    """How a Trainer logs numbers of a step, be it some steps late: into its log_history, and by `report_to`."""
    from transformers import Trainer

    if trainer is None:
        raise AnisoscopeError(
            "log_to names 'trainer', and no transformers.Trainer is calling this callback; name a tracker, such as "
            "log_to='tensorboard'."
        )
    held = weakref.ref(trainer)

    def log(numbers: dict[str, float], step: int) -> None:
        found = held()
        if found is None:
            return
        state, control = found.state, found.control
        now, due, state.global_step = state.global_step, control.should_log, step
        try:
            Trainer.log(found, numbers)  # not the method of a subclass, which may add means that it then forgets
        finally:
            state.global_step, found.control.should_log = now, due  # what the Trainer is about to log itself is due yet

    return log


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    """The folder of the checkpoint of this step: `resume_from_checkpoint` if it names it, else inside `output_dir`."""
    name = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
    named = args.resume_from_checkpoint
    given = Path(named) if isinstance(named, str) else None
    return given if given is not None and given.name == name else Path(args.output_dir or ".") / name


def _refuse_unsupported(args: TrainingArguments, *, live: bool) -> None:
    """Raise an error, before the training begins, for setups that a monitor would measure wrongly."""
    if live and args.n_gpu > 1:
        raise AnisoscopeError(
            f"the Trainer copies the model to {args.n_gpu} devices (DataParallel), where hooks see parts of a batch; "
            "launch with torchrun, show one device (CUDA_VISIBLE_DEVICES=0), or measure a probe=."
        )
