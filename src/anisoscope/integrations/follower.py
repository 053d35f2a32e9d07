"""The common part of the callbacks: drives one monitor, with at most one open step, from a framework's events.

A monitor and its steps are context managers; the follower enters and exits them on events, and removes all hooks from
the model however the training ends.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anisoscope.errors import AnisoscopeError
from anisoscope.integrations.trackers.catalogue import trackers
from anisoscope.integrations.trackers.host import HostTracker, Log
from anisoscope.models.forward import original
from anisoscope.models.parallel import averaged_over
from anisoscope.monitor.monitor import Monitor
from anisoscope.monitor.schedule import Schedule, as_schedule
from anisoscope.results.query import Table

SAVED = "monitor.pt"  # what Monitor.save writes into a folder


class _Stopped(Exception):
    """Raised into a step that is not to be measured because the training ended inside it."""


class Follower:
    """Drives a monitor in a training loop; `options` are the keywords of `Monitor`, validated at once.

    With `resume=None`, a training that resumes from a checkpoint resumes its monitored run, too.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        known = [name for name in inspect.signature(Monitor).parameters if name != "model"]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}."
                raise AnisoscopeError(f"MonitorCallback has no option {name!r}; {hint}")
        when = options.get("when")
        self.options = dict(options) if when is None else {**options, "when": as_schedule(when)}
        self.host: Log | None = None  # how the trainer logs, while it trains
        if (log_to := options.get("log_to") or ()) != ():
            self.options["log_to"] = trackers(log_to, host=self._log_to_host)
        self.monitor: Monitor | None = None
        self.running = False
        self._step: contextlib.AbstractContextManager[Monitor] | None = None
        self._before: Any = None  # the handle of `close_before`

    @property
    def live(self) -> bool:
        """Whether the training batches themselves are measured."""
        wanted = self.options.get("live")
        return bool(wanted) if wanted is not None else self.options.get("probe") is None

    @property
    def logs_to_host(self) -> bool:
        """Whether `log_to` names the trainer's own logger."""
        return any(isinstance(tracker, HostTracker) for tracker in self.options.get("log_to") or ())

    def _log_to_host(self, numbers: dict[str, float], step: int) -> None:
        if self.host is not None:
            self.host(numbers, step)

    @property
    def table(self) -> Table:
        """Everything measured so far."""
        return self.monitor.table if self.monitor is not None else Table.from_records([])

    def begin(
        self,
        model: nn.Module,
        *,
        step: int,
        total: int | None,
        saved: Path | None = None,
        wrapper: Any = None,
        **more: Any,
    ) -> None:
        """Attach to a model after `step` updates, of `total` if that is known.

        `wrapper` is what the framework calls in place of the model, in a training of several processes. `saved` is a
        folder of the checkpoint that may hold the state of a monitor; `more` are options that the framework provides:
        optimizer and tokenizer.
        """
        self.abandon()
        model = original(model)
        if self.live:
            refuse_reentrant(model)
        options = {**more, **self.options}
        resume = options["resume"] if options.get("resume") is not None else step > 0
        when = options.get("when")
        if isinstance(when, Schedule) and when.kind != "at" and when.total is None and total is not None:
            when = replace(when, total=total)  # an open-ended schedule ends with the training
        options |= {"resume": resume, "when": when}
        if options.get("total_steps") is None:
            options["total_steps"] = total
        self.monitor = Monitor(model, **options)
        if isinstance(wrapper, nn.Module) and self.monitor.ranks is not None:
            self.monitor.ranks.averaged = averaged_over(original(wrapper))
        self.monitor.__enter__()
        self.running = True
        if resume and saved is not None and (saved / SAVED).is_file():
            with self.monitor.guard.reaching("read its state in the checkpoint"):
                self.monitor.load(saved)
        elif resume and self.monitor.resumed < step:  # updates of the embeddings in between were not observed
            self.monitor.watch.before = self.monitor.watch.decay = None

    def end(self) -> None:
        """End the monitor after a complete training and write its results."""
        self._leave(None, None)

    def abandon(self) -> None:
        """End the monitor of a training that failed: remove its hooks, keep its results."""
        self._leave(_Stopped, _Stopped())

    def _leave(self, *error: Any) -> None:
        self.drop_step()
        if self._before is not None:
            self._before.remove()
            self._before = None
        if self.running and self.monitor is not None:
            self.running = False
            self.monitor.__exit__(*error, None)

    def open_step(self, step: int) -> None:
        """Call before the forward passes of an update."""
        if not self.running or self.monitor is None:
            return
        self.drop_step()
        opened = self.monitor.step(step, loss="own")  # the loss is the trainer's: its user has no say in the step
        with self._abandon_on_error():
            opened.__enter__()
        self._step = opened

    def guarded(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Around what a callback does for the monitor: an error is noted, or raised by a strict one."""
        return contextlib.nullcontext() if self.monitor is None else self.monitor.guard.catching(what)

    def close_step(self) -> None:
        """Call after the last backward pass of an update."""
        opened, self._step = self._step, None
        if opened is not None:
            with self._abandon_on_error():
                opened.__exit__(None, None, None)

    def close_before(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Have the step closed before an optimizer makes its update, which some engines do inside the backward pass."""
        if optimizer is not None:
            self._before = optimizer.register_step_pre_hook(lambda *_: self.close_step())

    def drop_step(self) -> None:
        """Exit an open step without measuring it."""
        opened, self._step = self._step, None
        if opened is not None:
            opened.__exit__(_Stopped, _Stopped(), None)

    @property
    def inside(self) -> bool:
        """Whether a step is open."""
        return self._step is not None

    def measure_last(self, step: int) -> None:
        """Measure the probe, if there is one, after the last update."""
        monitor = self.monitor
        if not self.running or monitor is None or monitor.probe is None or self.inside:
            return
        if isinstance(monitor.when, Schedule) and monitor.when.kind != "at":  # schedules that include the last step
            monitor.when = replace(monitor.when, total=step)
        self.open_step(step)
        self.close_step()

    def save(self, folder: Path) -> None:
        """Save the monitor's state with a checkpoint of the training, if results are written to disk."""
        if not self.running or self.monitor is None or self.options.get("out") is None or not folder.is_dir():
            return
        with (
            self.guarded("save its state with a checkpoint"),
            tempfile.TemporaryDirectory(dir=folder) as beside,  # a kill must not leave half a file
        ):
            self.monitor.save(Path(beside))
            for path in Path(beside).glob("monitor*.pt"):  # each of several processes has a file of its own
                path.replace(folder / path.name)

    def log(self, step: int, **numbers: float) -> None:
        """Record numbers of a measured step."""
        if self.monitor is not None and numbers:
            self.monitor.log(step, **numbers)

    @contextlib.contextmanager
    def _abandon_on_error(self) -> Any:
        """Remove all hooks if the monitor raises, and pass the error on to the framework."""
        try:
            yield
        except BaseException:
            self.abandon()
            raise


class FollowerCallback:
    """What the callbacks of all frameworks share; its options are those of `Monitor`.

    It has a follower instead of being one, because Lightning adds methods such as `log` to callbacks.
    """

    def __init__(
        self,
        *,
        when: Schedule | Callable[[int], bool] | Sequence[int] | None = None,
        metrics: str | Sequence[str] = "standard",
        out: str | Path | None = None,
        probe: Any = None,
        live: bool | None = None,
        resume: bool | None = None,
        **options: Any,
    ) -> None:
        named = {"when": when, "metrics": metrics, "out": out, "probe": probe, "live": live, "resume": resume}
        self._follower = Follower({**named, **options})

    @property
    def monitor(self) -> Monitor | None:
        """The monitor, from the beginning of the training on."""
        return self._follower.monitor

    @property
    def table(self) -> Table:
        """Everything measured so far."""
        return self._follower.table


def refuse_reentrant(model: nn.Module) -> None:
    """Raise an error for re-entrant gradient checkpointing, which hides the gradients."""
    for path, module in model.named_modules():
        enabled = getattr(module, "gradient_checkpointing", False)
        keywords = getattr(getattr(module, "_gradient_checkpointing_func", None), "keywords", {})
        if enabled and keywords.get("use_reentrant"):
            raise AnisoscopeError(
                f"{path or 'the model'} uses re-entrant gradient checkpointing, whose first forward pass keeps no "
                "graph, so no gradient can be seen; set gradient_checkpointing_kwargs={'use_reentrant': False}, or "
                "measure a probe=."
            )
