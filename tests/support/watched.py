"""Fixtures that write down what a monitor sees on its way into the study."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from anisoscope.monitor.embedding_watch import EmbeddingWatch
from anisoscope.monitor.instruments import Instruments
from anisoscope.tangent.proxy import StepRows


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[StepRows]:
    """The rows of every measured step, as they reach the study."""
    found: list[StepRows] = []
    plain = Instruments.seen

    def keep(self: Instruments, rows: StepRows, *rest: Any) -> Any:
        found.append(rows)
        return plain(self, rows, *rest)

    monkeypatch.setattr(Instruments, "seen", keep)
    return found


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int | None, Tensor, Tensor]]:
    """(since step, types, ΔW without decay) at every measured step."""
    found: list[tuple[int | None, Tensor, Tensor]] = []
    plain = EmbeddingWatch.updates

    def keep(self: EmbeddingWatch) -> Iterator[tuple[str, Tensor, Tensor]]:
        for of, types, rows in plain(self):
            if of == "update":
                found.append((self.step, types, rows))
            yield of, types, rows

    monkeypatch.setattr(EmbeddingWatch, "updates", keep)
    return found
