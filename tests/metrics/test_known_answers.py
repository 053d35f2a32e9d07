"""Metrics on arrays: equal to slow twins in every precision, with honest intervals, and calm under hostile input."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import anisoscope
from anisoscope.results.quantity import jackknife
from support import references
from support.clouds import METRICS, ON_ROWS, cloud

TOKENS, CONTEXTS = np.arange(300) % 9, np.arange(300) // 12


# name -> (twin, relative tolerance, options of the metric)
TWINS: dict[str, tuple[Callable[..., float], float, dict[str, Any]]] = {
    "average_cosine": (references.average_cosine, 1e-9, {}),
    "average_cosine_centred": (references.average_cosine_centred, 1e-9, {}),
    "explained_by_drift": (references.explained_by_drift, 1e-9, {}),
    "drift": (references.drift, 1e-9, {}),
    "mean_norm": (references.mean_norm, 1e-9, {}),
    "relative_drift": (references.relative_drift, 1e-9, {}),
    "largest_norm": (references.largest_norm, 1e-9, {}),
    "rogue_share": (references.rogue_share, 1e-9, {}),
    "massive_activation": (references.massive_activation, 1e-9, {}),
    "drift_alignment": (references.drift_alignment, 1e-6, {}),
    "svd_ratio": (references.svd_ratio, 1e-6, {}),
    "svd_ratio_squared": (references.svd_ratio_squared, 1e-6, {}),
    "stable_rank": (references.stable_rank, 1e-6, {}),
    "participation_ratio": (references.participation_ratio, 1e-6, {}),
    "iso_score": (references.iso_score, 1e-6, {}),
    "iso_score_star": (references.iso_score_star, 1e-6, {}),
    "effective_rank": (references.effective_rank, 1e-6, {}),
    "rank_me": (references.rank_me, 1e-6, {}),
    "singular_entropy": (references.singular_entropy, 1e-6, {}),
    "two_nn": (references.two_nn, 1e-6, {}),
    "levina_bickel": (references.levina_bickel, 1e-6, {}),
    "gride": (references.gride, 1e-6, {}),
    "hubness": (references.hubness, 1e-9, {}),
    "self_similarity": (lambda x: references.self_similarity(x, TOKENS), 1e-9, {"tokens": TOKENS}),
    "context_similarity": (lambda x: references.context_similarity(x, CONTEXTS), 1e-9, {"contexts": CONTEXTS}),
    "max_explainable_variance": (
        lambda x: references.max_explainable_variance(x, TOKENS),
        1e-6,
        {"tokens": TOKENS, "baseline": False},
    ),
    "partition_isotropy": (references.partition_isotropy, 1e-6, {}),
    "local_anisotropy": (references.svd_ratio_squared, 1e-6, {"partition": "none"}),
}


PRECISIONS = {
    "float64": lambda x: torch.as_tensor(x),
    "float32": lambda x: torch.as_tensor(x).float(),
    "bfloat16": lambda x: torch.as_tensor(x).bfloat16(),
    "numpy float32": lambda x: x.astype(np.float32),
    "numpy float16": lambda x: x.astype(np.float16),
}


def promoted(x: Any) -> np.ndarray:
    return x.double().numpy() if isinstance(x, torch.Tensor) else x.astype(np.float64)


def test_every_metric_of_rows_has_a_twin() -> None:
    assert set(TWINS) == set(ON_ROWS)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", sorted(TWINS))
def test_a_metric_equals_its_slow_twin(name: str, precision: str) -> None:
    twin, tolerance, options = TWINS[name]
    x = PRECISIONS[precision](cloud())
    assert METRICS[name](x, **options).value == pytest.approx(twin(promoted(x)), rel=tolerance, abs=1e-12)


@pytest.mark.parametrize("name", sorted(set(TWINS) - {"partition_isotropy"}))
def test_a_metric_equals_its_twin_under_a_common_mean_of_norm_3000(name: str) -> None:
    twin, tolerance, options = TWINS[name]
    for x in (torch.as_tensor(cloud(mean=3000.0)).float(), torch.as_tensor(cloud(1, mean=3000.0))):
        seen, expected = METRICS[name](x, **options).value, twin(promoted(x))
        assert seen == pytest.approx(expected, rel=tolerance, abs=1e-9)


@pytest.mark.parametrize(
    ("name", "options", "twin"),
    [
        ("svd_ratio", {"centred": False}, lambda x: references.svd_ratio(x, centred=False)),
        ("svd_ratio_squared", {"centred": False}, lambda x: references.svd_ratio_squared(x, centred=False)),
        ("effective_rank", {"centred": False}, lambda x: references.effective_rank(x, centred=False)),
        ("iso_score_star", {"zeta": 0.0}, references.iso_score),
        ("iso_score_star", {"zeta": 0.7}, lambda x: references.iso_score_star(x, 0.7)),
        ("rogue_share", {"top": 1}, lambda x: references.rogue_share(x, 1)),
        ("two_nn", {"method": "ml"}, references.two_nn_ml),
        ("two_nn", {"keep": 0.5}, lambda x: references.two_nn(x, 0.5)),
        ("levina_bickel", {"smallest": 3, "largest": 30}, lambda x: references.levina_bickel(x, 3, 30)),
        ("gride", {"scale": 1}, references.two_nn_ml),
        ("gride", {"scale": 8}, lambda x: references.gride(x, 8)),
        ("hubness", {"k": 5}, lambda x: references.hubness(x, 5)),
        ("partition_isotropy", {"log": True}, lambda x: math.log(references.partition_isotropy(x))),
    ],
)
def test_options_change_what_they_say(name: str, options: dict[str, Any], twin: Callable[..., float]) -> None:
    x = cloud()
    seen = METRICS[name](x, **options).value
    assert seen == pytest.approx(twin(x), rel=1e-6)
    if (name, options) not in [("gride", {"scale": 1})]:
        assert seen != pytest.approx(METRICS[name](x).value, rel=1e-6)


@given(n=st.integers(2, 30), d=st.integers(2, 8), seed=st.integers(0, 10**6))
def test_spectra_of_any_shape_equal_a_full_svd(n: int, d: int, seed: int) -> None:
    x = np.random.default_rng(seed).normal(size=(n, d)) + 2
    for name in ("svd_ratio", "svd_ratio_squared", "participation_ratio", "iso_score"):
        assert METRICS[name](x).value == pytest.approx(TWINS[name][0](x), rel=1e-6, abs=1e-12)


@given(n=st.integers(2, 30), d=st.integers(1, 8), seed=st.integers(0, 10**6))
def test_the_average_cosine_of_any_shape_equals_all_pairs(n: int, d: int, seed: int) -> None:
    x = np.random.default_rng(seed).normal(size=(n, d)) + 0.3
    assert anisoscope.average_cosine(x).value == pytest.approx(references.average_cosine(x), abs=1e-12)


def test_the_corrected_participation_ratio_removes_the_bias_of_few_rows() -> None:
    rng = np.random.default_rng(0)
    draws = [rng.normal(size=(40, 20)) for _ in range(40)]
    plain = np.mean([anisoscope.participation_ratio(x).value for x in draws])
    corrected = np.mean([anisoscope.participation_ratio(x, corrected=True).value for x in draws])
    assert plain < 14.5, "the counter-test: true value 20"
    assert corrected == pytest.approx(20.0, rel=0.05)


@pytest.mark.parametrize(("n", "d"), [(5, 3), (6, 2), (7, 9)])
def test_cka_equals_the_u_statistic_over_distinct_indices(n: int, d: int) -> None:
    rng = np.random.default_rng(n)
    x = rng.normal(size=(n, d)) * 2 + 1
    y = x[:, :2] @ rng.normal(size=(2, 4)) + 0.3 * rng.normal(size=(n, 4))
    assert anisoscope.linear_cka(x, y) == pytest.approx(references.linear_cka(x, y), rel=1e-9)


def test_cka_does_not_see_rotation_scale_and_shift_but_sees_noise() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 6))
    turn = np.linalg.qr(rng.normal(size=(6, 6)))[0]
    assert anisoscope.linear_cka(x, 3 * x @ turn + 100) == pytest.approx(1.0, abs=1e-9)
    chance = [anisoscope.linear_cka(rng.normal(size=(60, 40)), rng.normal(size=(60, 40))) for _ in range(20)]
    assert abs(np.mean(chance)) < 0.05, "debiased: about 0 also where rows are few"


@pytest.mark.parametrize("m", [2, 5, 9])
def test_dimension_estimators_find_a_sphere(m: int) -> None:
    rng = np.random.default_rng(m)
    x = rng.normal(size=(2000, m + 1))
    x = x / np.linalg.norm(x, axis=1, keepdims=True) @ np.linalg.qr(rng.normal(size=(30, m + 1)))[0].T
    for name, options in (("two_nn", {}), ("two_nn", {"method": "ml"}), ("levina_bickel", {}), ("gride", {"scale": 4})):
        seen = METRICS[name](x, **options)
        assert seen.value == pytest.approx(m, rel=0.12)
        assert seen.value != pytest.approx(m + 2, rel=0.05)


def test_local_anisotropy_is_low_inside_round_clusters_that_lie_on_a_line() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 8)) + np.repeat(np.arange(4), 100)[:, None] * 40
    inside = np.mean([references.svd_ratio_squared(x[i : i + 100]) for i in range(0, 400, 100)])
    assert METRICS["local_anisotropy"](x, clusters=4).value == pytest.approx(inside, rel=1e-6)
    assert METRICS["local_anisotropy"](x, partition="random").value > 0.9, "the size-matched control"
    assert METRICS["local_anisotropy"](x, partition="none").value > 0.9


def test_one_row_per_context_uses_one_row_per_context() -> None:
    contexts = np.arange(600) // 5
    x = np.repeat(cloud(n=120), 5, axis=0) + 1e-3 * np.random.default_rng(0).normal(size=(600, 7))
    seen, pooled = anisoscope.two_nn(x, contexts=contexts, per_context=True), anisoscope.two_nn(x, contexts=contexts)
    assert seen.n == 120
    assert pooled.n == 600
    assert seen.value == pytest.approx(references.two_nn(x[::5]), rel=0.02)
    assert pooled.value != pytest.approx(seen.value, rel=0.05), "rows of one context are near copies"


def clustered(rng: np.random.Generator, contexts: int = 80, rows: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Rows that share most of their variance with their context."""
    spread = np.array([1.0, 0.8, 0.6, 0.4])
    common = np.repeat(rng.normal(size=(contexts, 4)), rows, axis=0)
    x = (np.sqrt(0.8) * common + np.sqrt(0.2) * rng.normal(size=(contexts * rows, 4))) * spread + [1.0, 0.0, 0.0, 0.0]
    return x, np.repeat(np.arange(contexts), rows)


def _truth(name: str) -> float:
    if name == "participation_ratio":
        variance = np.array([1.0, 0.8, 0.6, 0.4]) ** 2
        return float(variance.sum() ** 2 / (variance**2).sum())
    x, _ = clustered(np.random.default_rng(99), contexts=200_000, rows=1)
    return float((references.unit(x).mean(0) ** 2).sum())


@pytest.mark.parametrize("name", ["average_cosine", "participation_ratio"])
def test_intervals_cover_the_truth_when_contexts_are_resampled_and_not_when_rows_are(name: str) -> None:
    truth, rng = _truth(name), np.random.default_rng(4)
    by_context, by_row, repeats = 0, 0, 80
    for repeat in range(repeats):
        x, contexts = clustered(rng)
        honest = METRICS[name](x, contexts=contexts + 1000 * repeat)
        naive = METRICS[name](x)
        by_context += honest.low <= truth <= honest.high
        by_row += naive.low <= truth <= naive.high
    assert by_context / repeats >= 0.85
    assert by_row / repeats <= by_context / repeats - 0.15, "the counter-test: rows of one context are no evidence"


def test_an_interval_shrinks_with_the_number_of_contexts() -> None:
    rng = np.random.default_rng(0)
    widths = []
    for count in (40, 640):
        seen = [anisoscope.average_cosine(x, contexts=c) for x, c in (clustered(rng, count) for _ in range(10))]
        widths.append(np.mean([e.high - e.low for e in seen]))
    assert 2.5 < widths[0] / widths[1] < 6.5  # √16 = 4


def test_the_jackknife_of_a_mean_is_students_interval() -> None:
    from scipy.stats import t

    x = np.random.default_rng(0).normal(size=8)
    replicates = [np.delete(x, i).mean() for i in range(8)]
    low, high = jackknife(x.mean(), replicates, bounds=(None, None))
    half = t.ppf(0.975, 7) * x.std(ddof=1) / math.sqrt(8)
    assert (low, high) == pytest.approx((x.mean() - half, x.mean() + half), rel=1e-3)


def test_an_interval_stays_in_bounds_and_around_its_value() -> None:
    assert jackknife(0.9, [0.2, 0.9, 1.0], bounds=(0.0, 1.0))[1] == 1.0
    assert jackknife(1.1, [1.0, 1.1, 1.2], bounds=(0.0, 1.0))[1] == 1.1
    assert all(math.isnan(v) for v in jackknife(0.5, [0.5], bounds=(None, None)))


def test_one_context_gives_a_value_without_an_interval() -> None:
    seen = anisoscope.average_cosine(cloud(), contexts=np.zeros(300, dtype=int))
    assert math.isfinite(seen.value)
    assert math.isnan(seen.low)
    assert seen.contexts == 1


def test_words_numbers_and_tensors_label_contexts_alike() -> None:
    x, numbers = cloud(), np.arange(300) // 30
    words = np.array([f"doc-{i}" for i in numbers])
    one = anisoscope.average_cosine(x, contexts=numbers)
    assert anisoscope.average_cosine(x, contexts=torch.as_tensor(numbers)) == one
    for labels in (words, words.tolist(), numbers.astype(float), words.astype(object)):
        assert anisoscope.average_cosine(x, contexts=labels).contexts == 10
