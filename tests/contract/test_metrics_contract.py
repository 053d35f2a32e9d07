"""Laws that every declared metric obeys; a new one inherits them from its declaration and its known answer."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anisoscope.errors import AnisoscopeError, TooFewRows
from anisoscope.metrics.attention import Keys
from anisoscope.metrics.engine.estimation import ON_SAMPLE, View, evaluate
from anisoscope.metrics.engine.metric import Metric, registry
from anisoscope.metrics.engine.neighbourhoods import Neighbours, sample_graphs
from anisoscope.numerics.attention_rows import row_sharpness
from anisoscope.numerics.hashing import FOLDS, fold_of
from anisoscope.stats.directions import Directions
from anisoscope.stats.means import Attention, Coherence
from anisoscope.stats.sample import Sample
from support.known_answers import KNOWN

METRICS = {name: m for name, m in registry().items() if m.function.__module__.startswith("anisoscope.")}
ON_ROWS = sorted(name for name, m in METRICS.items() if not {Attention, Keys} & set(m.needs))
ON_ATTENTION = sorted(set(METRICS) - set(ON_ROWS))
CHANGES = ("rotation", "scale", "shift")
# these draw rows at random, told apart by their place in an array: what must not depend on it is asked without the draw
PLAIN: dict[str, dict[str, Any]] = {"max_explainable_variance": {"baseline": False}}


def cloud(seed: int = 0, *, n: int = 240, d: int = 6) -> np.ndarray:
    """Correlated rows with a mean, in contexts of ten, a few of them long."""
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(d, d))
    common = np.repeat(rng.normal(size=(n // 10, d)), 10, axis=0)
    return (rng.normal(size=(n, d)) + 0.5 * common) @ mix * 0.3 + rng.normal(size=d) * 0.4


def labels(n: int = 240) -> dict[str, np.ndarray]:
    return {"contexts": np.repeat(np.arange(n // 10), 10), "tokens": np.arange(n) % 7}


def value(metric: Metric, x: Any, **changed: Any) -> float:
    return metric(x, **{**labels(len(x)), **changed}).value


def transform(x: np.ndarray, change: str) -> np.ndarray:
    rng = np.random.default_rng(5)
    if change == "rotation":
        return x @ np.linalg.qr(rng.normal(size=(x.shape[1], x.shape[1])))[0]
    return x * 2.5 if change == "scale" else x + rng.normal(size=x.shape[1])


def attention_value(metric: Metric, seed: int, change: str = "") -> float:
    """A metric of queries and keys; the change is made to the queries alone."""
    rng = np.random.default_rng(seed)
    query, key = rng.normal(size=(12, 4)) + 1.0, rng.normal(size=(12, 4)) + 0.5
    q, k = torch.as_tensor(transform(query, change) if change else query), torch.as_tensor(key)
    if Attention in metric.needs:
        allowed = torch.ones(1, 12, 12, dtype=torch.bool)
        values = row_sharpness(q[None], k[None], allowed, bias=None, scaling=0.5, first=0)
        return metric.function(Attention().update(values.transpose(0, 1)).head(0))
    return metric.function(Directions().update(q), Keys().update(k))


def test_every_metric_has_a_known_answer_and_every_answer_a_metric() -> None:
    assert set(KNOWN) == set(METRICS)


def test_every_metric_says_what_it_is() -> None:
    for metric in METRICS.values():
        assert metric.title and metric.formula and metric.description, metric.name
        assert metric.invariant <= set(CHANGES), metric.name
        low, high = metric.bounds
        assert low is None or high is None or low < high, metric.name


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_known_answer(name: str) -> None:
    metric, known = METRICS[name], KNOWN[name]
    if known.rows is None:
        assert known.stats is not None
        seen = metric.function(*known.stats(), **known.options)
    else:
        seen = metric(known.rows(), **known.labels(), **known.options).value
    assert seen == pytest.approx(known.expected, abs=known.tolerance)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", sorted(METRICS))
def test_declared_invariances_hold_and_undeclared_ones_fail(name: str, change: str) -> None:
    metric = METRICS[name]
    gaps = []
    for seed in range(3):
        if name in ON_ATTENTION:
            before, after = attention_value(metric, seed), attention_value(metric, seed, change)
        else:
            before, after = value(metric, cloud(seed)), value(metric, transform(cloud(seed), change))
        gaps.append(abs(after - before) / max(abs(before), 1e-3))
    if change in metric.invariant:
        assert max(gaps) < 1e-6, f"{name} is declared invariant to {change}"
    else:
        assert max(gaps) > 1e-4, f"{name} could be declared invariant to {change}"


@pytest.mark.parametrize("name", ON_ROWS)
def test_the_order_of_rows_does_not_matter(name: str) -> None:
    x, known = cloud(), labels()
    order = np.random.default_rng(3).permutation(len(x))
    one = METRICS[name](x, **known, **PLAIN.get(name, {}))
    two = METRICS[name](x[order], **{k: v[order] for k, v in known.items()}, **PLAIN.get(name, {}))
    assert two.value == pytest.approx(one.value, rel=1e-9)
    assert (two.low, two.high) == pytest.approx((one.low, one.high), rel=1e-6)
    assert (two.n, two.contexts, two.dropped) == (one.n, one.contexts, one.dropped)


@pytest.mark.parametrize("name", ON_ROWS)
def test_an_estimate_lies_in_its_interval_and_says_what_it_was_made_from(name: str) -> None:
    seen = METRICS[name](cloud(), **labels())
    assert seen.low <= seen.value <= seen.high
    assert seen.contexts == 24
    assert seen.n == (24 if METRICS[name].needs[0] is Coherence else 240)
    assert seen.dropped == 0
    assert len(seen.replicates) >= 2
    low, high = METRICS[name].bounds
    assert low is None or seen.low >= low or seen.low == seen.value
    assert high is None or seen.high <= high or seen.high == seen.value
    assert float(seen) == seen.value
    assert "nan" not in repr(seen)


def _stats_in_batches(metric: Metric, x: np.ndarray, cuts: list[int]) -> View:
    """What an array call keeps, but filled by one update for each slice between the cuts."""
    rows, known = torch.as_tensor(x), {k: torch.as_tensor(v) for k, v in labels(len(x)).items()}
    fold = fold_of(known["contexts"])
    folds: list[dict[type, Any]] = [{} for _ in range(FOLDS)]
    sample = Sample(len(x))
    for part in torch.arange(len(x)).tensor_split(cuts):
        for j in range(FOLDS):
            for need in set(metric.needs) - {Sample, Neighbours, *ON_SAMPLE}:
                mine = part[fold[part] == j]
                folds[j][need] = folds[j].get(need, need()).update(rows[mine])
        mine = {"context": known["contexts"][part], "token": known["tokens"][part]}
        sample.update(rows[part], position=part, **mine)
    folds = [{k: v for k, v in fold.items() if v.n} for fold in folds]
    return View(folds, sample, lambda wanted: sample_graphs(sample, wanted=wanted, batch=None), contexts=24)


@pytest.mark.parametrize("name", [name for name in ON_ROWS if Coherence not in METRICS[name].needs])
def test_any_partition_into_updates_gives_the_same_number(name: str) -> None:
    metric, x = METRICS[name], cloud()
    whole = metric(x, **labels(), **PLAIN.get(name, {}))
    for cuts in ([1, 2, 3], [120], list(range(10, 240, 10)), [7, 7, 200]):
        seen = evaluate(metric, _stats_in_batches(metric, x, cuts), metric.check(PLAIN.get(name, {})))
        assert seen.value == pytest.approx(whole.value, rel=1e-9)
        assert (seen.low, seen.high) == pytest.approx((whole.low, whole.high), rel=1e-7)


@pytest.mark.parametrize("name", ON_ROWS)
def test_numpy_torch_lists_and_views_give_the_same_number(name: str) -> None:
    metric, x = METRICS[name], cloud()
    expected = value(metric, x)
    wide = np.zeros((len(x), 2 * x.shape[1]))
    wide[:, ::2] = x
    backwards = x[::-1].copy()[::-1]
    forms = [torch.as_tensor(x), torch.as_tensor(x, dtype=torch.float64).requires_grad_(), np.asfortranarray(x)]
    forms += [wide[:, ::2], torch.as_tensor(np.ascontiguousarray(x.T)).T, backwards, x.astype(">f8"), x.tolist()]
    for form in forms:
        assert value(metric, form) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", ON_ROWS)
def test_half_precision_equals_its_own_promotion(name: str) -> None:
    metric, x = METRICS[name], torch.as_tensor(cloud())
    for dtype in (torch.bfloat16, torch.float16):
        half = x.to(dtype)
        assert value(metric, half) == value(metric, half.float())


@pytest.mark.parametrize("name", ON_ROWS)
def test_integers_and_booleans_are_numbers(name: str) -> None:
    x = np.random.default_rng(0).integers(-50, 50, size=(240, 6))
    for form in (x.astype(np.int16), x.astype(np.uint8), x > 0):
        if Neighbours in METRICS[name].needs and form.dtype == bool:
            continue  # at most 64 distinct rows on the corners of a cube
        assert value(METRICS[name], form) == pytest.approx(value(METRICS[name], form.astype(np.float64)), rel=1e-9)


@pytest.mark.parametrize("name", ON_ATTENTION)
def test_metrics_of_attention_refuse_plain_rows(name: str) -> None:
    with pytest.raises(AnisoscopeError, match="measure"):
        METRICS[name](cloud())


@pytest.mark.parametrize("name", ON_ROWS)
def test_every_metric_of_rows_is_public(name: str) -> None:
    import anisoscope

    assert getattr(anisoscope, name) is METRICS[name]


@given(n=st.integers(40, 60), d=st.integers(2, 7), seed=st.integers(0, 10**6), name=st.sampled_from(ON_ROWS))
def test_small_shapes_give_a_number_in_bounds_or_one_sentence(n: int, d: int, seed: int, name: str) -> None:
    metric = METRICS[name]
    x = np.random.default_rng(seed).normal(size=(n, d)) + 1.0
    try:
        seen = metric(x, contexts=np.arange(n) // 3, tokens=np.arange(n) % 4)
    except TooFewRows:
        assert name == "local_anisotropy", "the only one that needs more than 40 rows"
        return
    low, high = metric.bounds
    assert math.isfinite(seen.value)
    assert low is None or seen.value >= low - 1e-12
    assert high is None or seen.value <= high + 1e-12
    assert seen.low <= seen.value <= seen.high
