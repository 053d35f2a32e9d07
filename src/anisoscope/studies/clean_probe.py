"""A monitor that reads held-out text as it is: no masks in it, whatever the model is trained with.

Arms with different objectives are then compared on the same tokens. The loss on held-out text is still that of the
training objective, on masked text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anisoscope.capture.gradients import untouched
from anisoscope.runs.monitor import Monitor
from anisoscope.training.windows import IGNORED


class CleanMonitor(Monitor):
    """A Monitor of a masked language model; `masked` are batches with masks and labels, `probe` the text itself."""

    def __init__(self, model: Any, *, masked: Sequence[Mapping[str, Tensor]], **options: Any) -> None:
        super().__init__(model, **options)
        self.masked = list(masked)

    @contextlib.contextmanager
    def step(self, step: int, **words: Any) -> Iterator[Monitor]:
        """As Monitor's; a measured step also gets its loss on masked text."""
        with super().step(step, **words) as monitor:
            yield monitor
        if step in self.done and (step, "probe_loss") not in self.logged:
            self.log(step, probe_loss=self.held_out_loss())

    def held_out_loss(self) -> float:
        """Mean cross-entropy of the masked tokens."""
        total, tokens = 0.0, 0
        with untouched(self.model), torch.inference_mode():
            for batch in self.masked:
                count = int((batch["labels"] != IGNORED).sum())
                total, tokens = total + float(self.model(**batch).loss) * count, tokens + count
        return total / max(1, tokens)
