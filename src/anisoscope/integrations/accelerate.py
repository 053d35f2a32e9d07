"""A monitor for loops with `accelerator.accumulate`, in which an update is made of several turns of the loop.

    with AcceleratorMonitor(accelerator, model, optimizer=optimizer, when=log_spaced(1000), out="runs/mine") as watch:
        for batch in loader:
            with watch.accumulate():  # in place of accelerator.accumulate(model)
                accelerator.backward(model(**batch).loss)
                optimizer.step(); optimizer.zero_grad()

`model` and `optimizer` are those that `accelerator.prepare` returned. In a loop that makes a whole update in each turn,
`with monitor.step(i):` of `anisoscope.Monitor` does, as in any loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from anisoscope.errors import AnisoscopeError
from anisoscope.integrations.follower import FollowerCallback
from anisoscope.monitor.embedding_watch import bare_optimizer


class AcceleratorMonitor(FollowerCallback):
    """Measures a model that an Accelerator trains; the further options are those of `Monitor`.

    A step number counts updates, from `first_step` on. Of a measured step everything before its update counts.
    """

    def __init__(
        self, accelerator: Any, model: nn.Module, *, optimizer: Any = None, first_step: int = 0, **options: Any
    ) -> None:
        super().__init__(**options)
        self.accelerator, self.model, self.step = accelerator, model, first_step
        self._optimizer = bare_optimizer(optimizer)

    def __enter__(self) -> AcceleratorMonitor:
        given: dict[str, Any] = {} if self._follower.options.get("optimizer") else {"optimizer": self._optimizer}
        self._follower.begin(
            self.model, step=self.step, total=self._follower.options.get("total_steps"), wrapper=self.model, **given
        )
        self._follower.close_before(self._optimizer)  # what is measured is the state before an update
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if kind is not None:
            self._follower.abandon()
            return
        self._follower.measure_last(self.step)
        self._follower.end()

    @contextlib.contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """`accelerator.accumulate`, and the step of the monitor around all turns of one update."""
        if not self._follower.running:
            raise AnisoscopeError("accumulate was called outside `with AcceleratorMonitor(…)`; enter it first.")
        if not self._follower.inside:
            self._follower.open_step(self.step)
        try:
            with self.accelerator.accumulate(*(models or (self.model,))):
                yield
                done = self.accelerator.sync_gradients
        except BaseException:
            self._follower.drop_step()
            raise
        if done:
            self._follower.close_step()  # if an optimizer did not, as where a loss scaler skips the update
            self.step += 1

    def log(self, **numbers: float) -> None:
        """Record numbers of the update that was made last, such as its loss."""
        self._follower.log(max(0, self.step - 1), **numbers)
