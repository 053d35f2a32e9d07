"""Leaving contexts out of a neighbour graph equals making it again without them, repeated rows and all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import anisoscope
from anisoscope.metrics.graphs import Graph
from anisoscope.metrics.neighbourhoods import Neighbours
from anisoscope.numerics.hashing import fold_of
from anisoscope.stats.sample import Sample


def repeated(noise: float = 0.0, *, kinds: int = 120, times: int = 4) -> Sample:
    """Rows of a few kinds, each seen in several contexts: an embedding of characters looks like this."""
    generator = torch.Generator().manual_seed(3)
    kind = torch.randint(0, kinds, (kinds * times,), generator=generator)
    rows = torch.randn(kinds, 6, generator=generator)[kind] + 5
    rows = rows * (1 + noise * torch.rand(len(rows), 1, generator=generator))
    context = torch.arange(len(rows)) // 8
    position = torch.arange(len(rows)) % 8
    return Sample(4096).update(rows, context=context, position=position, first=position == 0)


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.0), (3e-7, 2e-6)])
@pytest.mark.parametrize("without_first", [False, True])
def test_what_is_left_equals_a_new_search(noise: float, tolerance: float, without_first: bool) -> None:
    sample = repeated(noise)
    graph = Graph.of(sample, wanted=2, tolerance=tolerance)
    assert graph.neighbours.duplicates > 300
    for fold in sorted(set(graph.fold.tolist())):
        mask = sample.fold != fold
        if without_first:
            mask &= ~sample.label("first").bool()
        again, _ = Neighbours.of(sample.rows[mask], 2, tolerance=tolerance)
        left = graph.left(without_first=without_first, fold=fold)
        assert len(left) == len(again)
        assert torch.allclose(
            left.first(2).sort(0).values, again.first(2).sort(0).values, rtol=1e-5
        )  # another copy may stand for the row, equal but for the noise


def test_a_row_goes_only_with_its_last_copy() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(64, 4, generator=generator)
    context = torch.arange(64)
    other = next(i for i in range(64, 200) if int(fold_of(torch.tensor([i]))[0]) != int(fold_of(torch.tensor([0]))[0]))
    alone = Graph.of(Sample(999).update(rows, context=context), wanted=2)
    twice = Graph.of(
        Sample(999).update(torch.cat([rows, rows[:1]]), context=torch.cat([context, torch.tensor([other])])), wanted=2
    )
    fold = int(fold_of(torch.tensor([0]))[0])
    assert len(twice.left(fold=fold)) == len(alone.left(fold=fold)) + 1


def test_many_copies_do_not_widen_the_interval() -> None:
    generator = torch.Generator().manual_seed(1)
    kinds = torch.randn(600, 6, generator=generator)
    seen = kinds[torch.randint(0, 600, (20_000,), generator=generator)]
    contexts = torch.arange(len(seen)) // 50
    found: Any = anisoscope.two_nn(seen, contexts=contexts)
    once: Any = anisoscope.two_nn(kinds, contexts=torch.arange(600))
    assert found.value == pytest.approx(once.value, rel=1e-6), "every kind was seen"
    assert found.high - found.low < 0.2 * (once.high - once.low), "no fold holds a kind alone"
