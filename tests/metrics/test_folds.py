"""Neighbour graphs without first positions, and with contexts that do not count, repeated rows and all."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import anisoscope
from anisoscope.errors import TooFewRows
from anisoscope.metrics.catalogue import registry
from anisoscope.metrics.engine.folds import Graph, Neighbours, widening
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
def test_what_is_left_without_first_positions_equals_a_new_search(noise: float, tolerance: float) -> None:
    sample = repeated(noise)
    graph = Graph.of(sample, wanted=2, tolerance=tolerance)
    assert graph.neighbours.duplicates > 300
    again, _ = Neighbours.of(sample.rows[~sample.label("first").bool()], 2, tolerance=tolerance)
    left = graph.left(without_first=True)
    assert int(left.present.sum()) == len(again)
    one, two = (near[usable].sort(0).values for near, usable in (left.near(2), again.near(2)))
    assert torch.allclose(one, two, rtol=1e-5)  # another copy may stand for the row, equal but for the noise


def test_a_row_counts_until_its_last_copy_is_left_out() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(64, 4, generator=generator)
    context = torch.arange(64)
    other = next(i for i in range(64, 200) if int(fold_of(torch.tensor([i]))[0]) != int(fold_of(torch.tensor([0]))[0]))
    alone = Graph.of(Sample(999).update(rows, context=context), wanted=2)
    twice = Graph.of(
        Sample(999).update(torch.cat([rows, rows[:1]]), context=torch.cat([context, torch.tensor([other])])), wanted=2
    )
    fold = int(fold_of(torch.tensor([0]))[0])
    one, two = (graph.lines(without_first=False, folds=[fold]).present.sum() for graph in (alone, twice))
    assert int(two) == int(one) + 1


def test_many_copies_do_not_widen_the_interval() -> None:
    generator = torch.Generator().manual_seed(1)
    kinds = torch.randn(600, 6, generator=generator)
    seen = kinds[torch.randint(0, 600, (20_000,), generator=generator)]
    contexts = torch.arange(len(seen)) // 50
    found: Any = anisoscope.two_nn(seen, contexts=contexts)
    once: Any = anisoscope.two_nn(kinds, contexts=torch.arange(600))
    assert found.value == pytest.approx(once.value, rel=1e-6), "every kind was seen"
    assert found.high - found.low < 0.2 * (once.high - once.low), "no fold holds a kind alone"


# all folds at once


def plain_value(name: str, graph: Neighbours, rows: torch.Tensor, option: int) -> float:
    """The published formulas on the distances of some rows of a graph, row by row in NumPy."""
    if name == "hubness":
        usable = graph.distance[:, 9].isfinite().numpy()
        counts = np.bincount(graph.index.numpy()[usable][:, :10].ravel(), minlength=len(rows))[rows.numpy()]
        return float(np.mean(((counts - counts.mean()) / counts.std()) ** 3))
    near = graph.distance[rows].numpy()
    if name == "two_nn":
        log_mu = np.sort(np.log(near[:, 1] / near[:, 0]))
        kept = min(math.floor(0.9 * len(log_mu)), len(log_mu) - 1)
        y = -np.log1p(-np.arange(1, kept + 1) / len(log_mu))
        return float(log_mu[:kept] @ y / (log_mu[:kept] @ log_mu[:kept]))
    if name == "levina_bickel":
        near = near[np.isfinite(near[:, 19])]
        inverse = [np.mean(np.log(near[:, k - 1 : k] / near[:, : k - 1]).sum(1) / (k - 1)) for k in range(10, 21)]
        return float(np.mean(1 / np.array(inverse)))
    k = option
    near = near[np.isfinite(near[:, 2 * k - 1])]
    log_mu = np.log(near[:, 2 * k - 1] / near[:, k - 1])
    low, high = 1e-3, 1e3
    for _ in range(200):
        d = math.sqrt(low * high)
        score = len(log_mu) / d + (k - 1) * (log_mu / -np.expm1(-d * log_mu)).sum() - (2 * k - 1) * log_mu.sum()
        low, high = (d, high) if score > 0 else (low, d)
    return math.sqrt(low * high)


@pytest.mark.parametrize("without_first", [False, True])
def test_lines_count_the_other_folds_with_the_neighbours_of_all_rows(without_first: bool) -> None:
    graph = Graph.of(repeated(kinds=300), wanted=20)
    folds = [-1, *range(8)]
    left = graph.left(without_first=without_first)
    lines = graph.lines(without_first=without_first, folds=folds)
    assert lines.distance is left.distance, "nothing is searched again"
    for name, option in [("two_nn", {}), ("levina_bickel", {}), ("hubness", {}),
                         *(("gride", {"scale": k}) for k in (1, 2, 4, 8))]:  # fmt: skip
        metric = registry()[name]
        assert metric.batch is not None
        values = metric.batch(lines, **option).tolist()
        assert values[0] == pytest.approx(metric.function(left, **option), rel=1e-12)
        for value, counted in zip(values, lines.present, strict=True):
            twin = plain_value(name, left, counted, option.get("scale", 0))
            assert value == pytest.approx(twin, rel=1e-10)


def test_rows_that_read_each_other_across_contexts_widen_the_interval() -> None:
    """By the definition: every pair of rows, one context each, looked at one by one."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(120, 3, generator=generator, dtype=torch.float64)
    context = torch.arange(120) // 4
    graph = Graph.of(Sample(999).update(rows, context=context, position=torch.arange(120)), wanted=2, spare=False)
    metric = registry()["two_nn"]
    assert metric.contributions is not None
    psi = metric.contributions(graph.left(), {"method": "ml"})
    near, number = graph.neighbours.index[:, :2], graph.contexts()
    found = widening([(psi, number, near)])
    gaps = (psi - psi.mean()).tolist()
    inside = sum(sum(g for g, c in zip(gaps, number.tolist(), strict=True) if c == one) ** 2 for one in range(30))
    links = [(i, k) for i in range(120) for k in range(120)
             if number[i] != number[k] and (k in near[i].tolist() or i in near[k].tolist())]  # fmt: skip
    shared = sum(gaps[i] * gaps[k] for i, k in links)
    assert found == pytest.approx(math.sqrt(1 + shared / inside + len(links) / (120 * 116)), rel=1e-12)
    assert found > 1.02


def test_a_line_with_too_few_rows_is_missing_and_alone_says_why() -> None:
    generator = torch.Generator().manual_seed(5)
    fold = fold_of(torch.arange(64))
    largest = int(fold.bincount().argmax())
    rows = torch.randn(34, 4, generator=generator)
    context = torch.cat([torch.arange(64)[fold == largest][:4], torch.arange(64)[fold != largest][:30]])
    graph = Graph.of(Sample(99).update(rows, context=context), wanted=4)
    for name in ("two_nn", "gride"):
        metric = registry()[name]
        assert metric.batch is not None
        lines = graph.lines(without_first=False, folds=[-1, largest])
        whole, left = metric.batch(lines).tolist()
        assert math.isfinite(whole) and math.isnan(left)
        with pytest.raises(TooFewRows, match=r"at least 32 distinct rows with [24] neighbours each, seen 30"):
            metric.function(replace(graph.left(), counted=lines.counted[1]))


def test_lines_where_neighbours_are_all_equally_far_have_no_dimension() -> None:
    eye = torch.eye(40, dtype=torch.float64)
    graph = Graph.of(Sample(99).update(eye, context=torch.arange(40)), wanted=20)
    for name in ("two_nn", "gride", "levina_bickel"):
        metric = registry()[name]
        assert metric.batch is not None
        assert metric.batch(graph.lines(without_first=False, folds=[-1, 0])).isnan().all()
        with pytest.raises(TooFewRows, match="equally far"):
            metric.function(graph.left())
