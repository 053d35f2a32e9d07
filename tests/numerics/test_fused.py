"""Functions compiled into few kernels: the same numbers, and the function itself where that cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from anisoscope.numerics import fused
from anisoscope.numerics.fused import Fused


def both(x: Tensor, y: Tensor | None = None) -> tuple[Tensor, ...]:
    """Two results, one of them of an optional argument."""
    table = torch.stack((x, x.square()), dim=1)
    return table.sum(-1), x if y is None else x + y


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "DEVICES", {"cpu"})


@pytest.mark.slow
def test_it_is_compiled_for_each_shape_up_to_some(here: None) -> None:
    act = Fused(both)
    for width in range(2, 4 + fused._SHAPES):
        given = torch.randn(3, width, dtype=torch.float64), torch.randn(3, width, dtype=torch.float64)
        for tensors in (given[:1], given):
            for found, wanted in zip(act(*tensors), both(*tensors), strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    assert len(act._compiled) == fused._SHAPES and all(value is not None for value in act._compiled.values())
    assert [note.partition(",")[0] for note in act.notes] == [
        f"every_step: rows came in more than {fused._SHAPES} shapes"
    ]


def test_where_the_compiler_fails_it_runs_as_it_is(here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def fails(*_: Any, **__: Any) -> None:
        tries.append(1)
        raise RuntimeError("no triton here")

    monkeypatch.setattr("torch._inductor.compile", fails)
    act, x = Fused(both), torch.ones(2, 3)
    for _ in range(3):
        assert all(map(torch.equal, act(x), both(x)))
    assert len(tries) == 1, "and it is tried once"
    assert len(act.notes) == 1 and "the compiler failed (RuntimeError: no triton here)" in act.notes[0]


def test_elsewhere_nothing_is_compiled() -> None:
    act, x = Fused(both), torch.ones(2, 3)
    assert all(map(torch.equal, act(x), both(x))) and not act._compiled and not act.notes
