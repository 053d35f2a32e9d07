"""Batched evaluation: one call over folds left out and heads gives what one statistic at a time gives."""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor

from anisoscope.errors import TooFewRows
from anisoscope.metrics.anisotropy import Centred
from anisoscope.metrics.catalogue import registry
from anisoscope.metrics.engine.estimation import View, evaluate, evaluate_heads, find_spectra
from anisoscope.metrics.engine.folds import line_of, stack_lines
from anisoscope.metrics.engine.metric import Metric
from anisoscope.numerics.hashing import FOLDS, fold_of
from anisoscope.stats.directions import Attention, Coordinates, Directions, Keys
from anisoscope.stats.moments import Moments
from anisoscope.stats.sample import Sample

BATCHED = [metric for metric in registry().values() if metric.batch is not None]
SUMS = {Directions, Coordinates, Attention, Keys, Moments}
SUMMED = [metric for metric in BATCHED if SUMS.issuperset(metric.needs)]
HEADS, WIDTH, ROWS = 4, 6, 90


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows_of(kind: type, *, seed: int) -> Tensor:
    if kind is Attention:
        return torch.rand(ROWS, HEADS, 8, generator=generator(seed), dtype=torch.float64)
    scale = torch.tensor([1.0, 1e3, 1e-3, 3.0]).view(1, HEADS, 1)
    return scale * (torch.randn(ROWS, HEADS, WIDTH, generator=generator(seed), dtype=torch.float64) + 0.3)


def parts_of(kind: type, rows: Tensor, fold: Tensor) -> list[tuple[int, Any]]:
    made = Directions if kind is Keys else kind
    return [(f, made().update(rows[fold == f])) for f in range(FOLDS) if bool((fold == f).any())]


def folds_of(kinds: tuple[type, ...], *, fold: Tensor, change: Any = None, heads: int | None = None) -> list[dict]:
    found: list[dict[type, Any]] = [{} for _ in range(FOLDS)]
    for number, kind in enumerate(kinds):
        rows = rows_of(kind, seed=number // 2 if Coordinates in kinds else number)  # coordinates of the same rows
        rows = change(rows) if change is not None else rows
        rows = rows if heads is None else rows[:, heads]
        for f, part in parts_of(kind, rows, fold):
            found[f][kind] = part
    return found


def one_by_one(metric: Metric, folds: list[dict[type, Any]], *, without: int, head: int | None) -> float:
    """The slow twin: merge the folds that stay, take the head, call the function; NaN where there is nothing."""
    stats = []
    for need in metric.needs:
        merged = reduce(lambda a, b: a.merge(b), [f[need] for i, f in enumerate(folds) if i != without and need in f])
        stats.append(merged if head is None else merged.head(head))
    return alone(metric, stats)[0]


def alone(metric: Metric, stats: list[Any]) -> tuple[float, str]:
    """The value, or NaN and why there is none."""
    try:
        return metric.function(*stats), ""
    except TooFewRows as error:
        return math.nan, str(error)


@pytest.mark.parametrize("metric", SUMMED, ids=lambda m: m.name)
@pytest.mark.parametrize("empty", [False, True], ids=["all folds", "an empty fold"])
def test_all_heads_and_folds_at_once_equal_one_at_a_time(metric: Metric, empty: bool) -> None:
    fold = torch.arange(ROWS) % (FOLDS - 2 if empty else FOLDS)
    folds = folds_of(metric.needs, fold=fold)
    found = evaluate_heads(metric, View(folds, contexts=5, dropped=2), {}, heads=HEADS)
    for head, estimate in enumerate(found):
        there = sorted(set(fold.tolist()))
        twin = [one_by_one(metric, folds, without=f, head=head) for f in (-1, *there)]
        assert [estimate.value, *estimate.replicates] == pytest.approx(twin, rel=1e-12, nan_ok=True)
        assert estimate.contexts == 5 and estimate.n + estimate.dropped == ROWS + 2


@pytest.mark.parametrize("metric", SUMMED, ids=lambda m: m.name)
def test_without_heads_the_lines_equal_one_at_a_time(metric: Metric) -> None:
    folds = folds_of(metric.needs, fold=torch.arange(ROWS) % FOLDS, heads=1)
    found = evaluate(metric, View(folds), {})
    twin = [one_by_one(metric, folds, without=f, head=None) for f in (-1, *range(FOLDS))]
    assert [found.value, *found.replicates] == pytest.approx(twin, rel=1e-12)


def test_moments_of_folds_are_let_go_once_their_lines_are_known() -> None:
    """Memory: they are as large as the lines; results are those of a view that still has them."""
    metric, fold = registry()["participation_ratio"], torch.arange(ROWS) % FOLDS
    kept, view = (View(folds_of((Moments,), fold=fold, heads=1)) for _ in range(2))
    find_spectra([(view, {})])
    assert view.pieces(Moments) == [] and len(kept.pieces(Moments)) == FOLDS
    assert evaluate(metric, view, {}) == evaluate(metric, kept, {})
    assert view.present() == list(range(FOLDS))


@pytest.mark.parametrize("metric", SUMMED, ids=lambda m: m.name)
def test_a_head_of_zero_rows_says_why_and_leaves_the_others_alone(metric: Metric) -> None:
    def silence(rows: Tensor) -> Tensor:
        rows = rows.clone()
        rows[:, 2] = math.nan if Attention in metric.needs else 0.0  # attention that sees no key is NaN
        return rows

    fold = torch.arange(ROWS) % FOLDS
    folds, whole = folds_of(metric.needs, fold=fold, change=silence), folds_of(metric.needs, fold=fold)
    found = evaluate_heads(metric, View(folds), {}, heads=HEADS)
    intact = evaluate_heads(metric, View(whole), {}, heads=HEADS)
    assert [found[h] for h in (0, 1, 3)] == [intact[h] for h in (0, 1, 3)]
    value, why = alone(metric, [reduce(lambda a, b: a.merge(b), [f[n] for f in folds]).head(2) for n in metric.needs])
    assert found[2].value == pytest.approx(value, nan_ok=True)
    assert not why or (found[2].note == why and found[2].n == 0)


@pytest.mark.parametrize("metric", SUMMED, ids=lambda m: m.name)
def test_a_fold_that_holds_all_but_one_row_leaves_no_replicate_behind(metric: Metric) -> None:
    """One row is too few for most metrics: that replicate is NaN, as it is for the rows alone."""
    fold = torch.zeros(ROWS, dtype=torch.int64)
    fold[7] = 3
    folds = folds_of(metric.needs, fold=fold)
    for head, estimate in enumerate(evaluate_heads(metric, View(folds), {}, heads=HEADS)):
        twin = [one_by_one(metric, folds, without=f, head=head) for f in (0, 3)]
        assert list(estimate.replicates) == pytest.approx(twin, rel=1e-9, nan_ok=True)


@pytest.mark.parametrize("metric", SUMMED, ids=lambda m: m.name)
def test_nothing_seen_is_said_for_every_head(metric: Metric) -> None:
    found = evaluate_heads(metric, View([{} for _ in range(FOLDS)], dropped=4), {}, heads=HEADS)
    assert len(found) == HEADS and all("no finite row (4 were not finite" in estimate.note for estimate in found)


def test_grouped_heads_share_their_key() -> None:
    fold = torch.arange(ROWS) % FOLDS
    query, key = rows_of(Directions, seed=1), rows_of(Directions, seed=2)
    folds: list[dict[type, Any]] = [{} for _ in range(FOLDS)]
    for kind, rows in ((Directions, query), (Keys, key[:, :2])):
        for f, part in parts_of(kind, rows, fold):
            folds[f][kind] = part
    found = evaluate_heads(registry()["qk_cosine"], View(folds), {}, heads=HEADS, share=2)
    means = query.mean(0), key.mean(0)[:2].repeat_interleave(2, 0)
    assert [e.value for e in found] == pytest.approx(torch.cosine_similarity(*means, dim=-1).tolist(), rel=1e-12)


@pytest.mark.parametrize("kind", [Directions, Coordinates, Attention, Moments])
def test_leaving_out_a_fold_that_outweighs_the_others_costs_no_digit(kind: type) -> None:
    fold = torch.arange(ROWS) % FOLDS
    rows = rows_of(kind, seed=0)
    rows = torch.where((fold == 2).view(-1, 1, 1), 1e12 * rows, rows)
    parts = parts_of(kind, rows, fold)
    line = line_of(stack_lines(parts, list(range(FOLDS))), 3)
    alone = kind().update(rows[fold != 2])
    assert line.n == alone.n
    for name, value in alone.state().items():
        assert torch.allclose(line.state()[name].double(), value.double(), rtol=1e-11, atol=0.0), name


def test_a_fold_may_have_several_parts() -> None:
    rows, fold = rows_of(Directions, seed=0), torch.arange(ROWS) % FOLDS
    halves = torch.arange(ROWS) < 40
    folds: list[dict[type, Any]] = [{Directions: []} for _ in range(FOLDS)]
    for mask in (halves, ~halves):
        for f, part in parts_of(Directions, rows[mask], fold[mask]):
            folds[f][Directions].append(part)
    metric = registry()["average_cosine"]
    found = evaluate_heads(metric, View(folds), {}, heads=HEADS)
    twin = evaluate_heads(metric, View(folds_of(metric.needs, fold=fold)), {}, heads=HEADS)
    for one, two in zip(found, twin, strict=True):
        assert [one.value, *one.replicates] == pytest.approx([two.value, *two.replicates], rel=1e-12)


@pytest.mark.parametrize("name", ["average_cosine_centred", "explained_by_drift"])
def test_cosines_of_the_sample_equal_those_of_the_rows_that_stay(name: str) -> None:
    rows, context = rows_of(Directions, seed=3)[:, 0], torch.arange(ROWS) // 4
    sample = Sample(ROWS).update(rows, context=context, position=torch.arange(ROWS))
    metric = registry()[name]
    found = evaluate(metric, View([], sample), {})
    fold = fold_of(context)
    folds = sorted(set(fold.tolist()))
    for j, value in zip(folds, found.replicates, strict=True):
        mine = (fold != j).nonzero().squeeze(1)
        few = Sample(ROWS).update(rows[mine], context=context[mine], position=mine)
        assert value == pytest.approx(metric.function(Centred.of(few)), rel=1e-9, abs=1e-12)
