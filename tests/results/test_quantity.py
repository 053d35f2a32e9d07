"""The jackknife of folds that are not equal."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import anisoscope
from anisoscope.metrics.catalogue import measure_rows
from anisoscope.numerics.hashing import fold_of
from anisoscope.results.quantity import as_equal_folds, jackknife, jackknives


def busing(value: float, left_out: list[float], sizes: list[int]) -> float:
    """The variance of Busing, Meijer and van der Leeden (1999), from their pseudo-values."""
    h = np.array([sum(sizes) / size for size in sizes])
    pseudo = h * value - (h - 1) * np.array(left_out)
    centre = float((pseudo / h).sum())
    return float(((pseudo - centre) ** 2 / (h - 1)).mean())


def test_values_as_of_equal_folds_have_the_variance_of_unequal_ones() -> None:
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(200):
        sizes = np.maximum(1, rng.multinomial(16, [1 / 8] * 8)).tolist()
        groups = [rng.normal(size=size) for size in sizes]
        value = float(np.concatenate(groups).mean())
        left = [float(np.concatenate(groups[:j] + groups[j + 1 :]).mean()) for j in range(8)]
        low, high = jackknife(value, as_equal_folds(value, left, sizes), bounds=(None, None))
        ratios.append(((high - low) / 2 / 2.365) ** 2 / busing(value, left, sizes))
    assert np.mean(ratios) == pytest.approx(1.0, abs=0.02)
    assert min(ratios) > 0.7 and max(ratios) < 1.0 + 1e-9


def test_folds_without_contexts_stay_missing() -> None:
    found = as_equal_folds(1.0, [2.0, math.nan, 0.0], [1, 0, 1])
    assert found[0] == 2.0 and math.isnan(found[1]) and found[2] == 0.0
    assert as_equal_folds(1.0, [2.0], [5]) == [2.0]
    large = as_equal_folds(1.0, [2.0, math.nan, 0.0], [1, 9, 1])  # a fold without which nothing can be computed
    assert large[0] == 2.0 and math.isnan(large[1])


def test_intervals_of_unequal_folds_are_as_wide_as_the_values_spread() -> None:
    """One fold with 9 of 16 contexts: taken as equal, the folds gave 1.6 times the variance."""
    keys = torch.arange(400)
    by_fold = [keys[fold_of(keys) == j] for j in range(8)]
    contexts = torch.cat([by_fold[0][:9], *(keys[:1] for keys in by_fold[1:])])
    values, errors, plain = [], [], []
    for seed in range(400):
        rows = 2.0 + torch.randn(16, 1, generator=torch.Generator().manual_seed(seed)).abs() * torch.ones(16, 3)
        found = anisoscope.mean_norm(rows, contexts=contexts)
        norms = rows.norm(dim=1).double()
        left = [float(norms[fold_of(contexts) != j].mean()) for j in range(8)]
        values.append(found.value)
        errors.append(float(np.var(found.replicates)) * 7)
        plain.append(float(np.var(left)) * 7)
    assert np.mean(errors) / np.var(values) == pytest.approx(1.0, abs=0.2)
    assert np.mean(plain) / np.var(values) > 1.4


def test_a_table_keeps_values_as_of_equal_folds() -> None:
    rows, contexts = torch.randn(160, 4, generator=torch.Generator().manual_seed(0)), torch.arange(160) // 10
    found = measure_rows(rows, ["drift"], contexts=contexts)["drift"]
    fold = fold_of(contexts)
    live = sorted(set(fold.tolist()))
    left = [float(rows[fold != j].double().mean(0).norm()) for j in live]
    sizes = [len(contexts[fold == j].unique()) for j in live]
    assert list(found.replicates) == pytest.approx(as_equal_folds(found.value, left, sizes), rel=1e-9)
    assert (found.low, found.high) == pytest.approx(jackknife(found.value, found.replicates, bounds=(0.0, None)))


def test_many_intervals_are_those_of_each() -> None:
    """To the last digit, with folds that are missing, values that are, and ends that are cut."""
    rng = np.random.default_rng(0)
    replicates = rng.normal(0.5, 0.3, size=(40, 8))
    replicates[rng.random(replicates.shape) < 0.3] = math.nan
    replicates[0], values = math.nan, rng.normal(0.5, 0.3, size=40)
    values[1] = math.nan
    for bounds in ((None, None), (0.0, 1.0), (0.0, None)):
        ends = np.stack(jackknives(values, replicates, bounds=bounds), 1)
        wanted = [
            jackknife(v, list(r), bounds=bounds) for v, r in zip(values.tolist(), replicates.tolist(), strict=True)
        ]
        assert np.array_equal(ends, np.array(wanted), equal_nan=True)
