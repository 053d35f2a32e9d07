"""Values that few contexts do not bias: pairs and products of different contexts, beside the usual ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import anisoscope
from anisoscope.errors import AnisoscopeError, TooFewRows
from anisoscope.measurement.bank import applies
from anisoscope.metrics.catalogue import measure_rows, parse_requests
from anisoscope.numerics.hashing import fold_of
from anisoscope.results.quantity import as_equal_folds
from support import references

SIGMA = np.linspace(1.6, 0.4, 8)
RATIO = float((SIGMA**2).sum() ** 2 / (SIGMA**4).sum())


def clusters(seed: int, *, contexts: int = 12, rows: int = 20, share: float = 0.6) -> tuple[np.ndarray, np.ndarray]:
    """Gaussian rows of covariance σ², of which contexts have a share in common, about a mean."""
    rng = np.random.default_rng(seed)
    common = np.repeat(rng.normal(size=(contexts, 8)), rows, axis=0)
    noise = math.sqrt(share) * common + math.sqrt(1 - share) * rng.normal(size=(contexts * rows, 8))
    return SIGMA * noise + np.linspace(1.0, 0.0, 8), np.repeat(np.arange(contexts) + 100 * seed, rows)


def uneven(mean: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Contexts of unequal length in no order, with a zero row."""
    rng = np.random.default_rng(4)
    x = rng.normal(size=(40, 5)) @ rng.normal(size=(5, 5)) + mean * np.array([1, 0, 0, 1, 0])
    x[7] = 0.0
    return x, rng.integers(0, 9, 40)


def left_out(x: np.ndarray, contexts: np.ndarray, twin: Any) -> list[float]:
    """What the table keeps of the folds, from a slow twin."""
    fold = fold_of(torch.as_tensor(contexts)).numpy()
    live = sorted(set(fold.tolist()))
    left = [twin(x[fold != j], contexts[fold != j]) for j in live]
    return as_equal_folds(twin(x, contexts), left, [len(set(contexts[fold == j].tolist())) for j in live])


@pytest.mark.parametrize("mean", [0.0, 3000.0])
def test_pairs_of_different_contexts_equal_the_slow_twin(mean: float) -> None:
    x, contexts = uneven(mean)
    seen = anisoscope.average_cosine(x, contexts=contexts, pairs="between")
    assert seen.value == pytest.approx(references.average_cosine_between(x, contexts), rel=1e-9)
    assert list(seen.replicates) == pytest.approx(left_out(x, contexts, references.average_cosine_between), rel=1e-9)
    assert seen.n == 39 and seen.dropped == 1, "a zero row has no direction"


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("mean", [0.0, 3000.0])
def test_products_of_different_contexts_equal_the_slow_twin(mean: float, centred: bool) -> None:
    x, contexts = uneven(mean)

    def twin(x: np.ndarray, contexts: np.ndarray) -> float:
        return references.participation_ratio_clusters(x, contexts, centred=centred)

    seen = anisoscope.participation_ratio(x, contexts=contexts, clusters=True, centred=centred)
    assert seen.value == pytest.approx(twin(x, contexts), rel=1e-9)
    assert list(seen.replicates) == pytest.approx(left_out(x, contexts, twin), rel=1e-7)


def test_one_row_per_context_is_all_pairs() -> None:
    x = clusters(0)[0]
    assert anisoscope.average_cosine(x, pairs="between").value == pytest.approx(anisoscope.average_cosine(x).value)
    assert "average_cosine:pairs=between" not in measure_rows(x), "it would say the same twice"


def test_few_contexts_bias_the_usual_values_and_not_those_of_different_contexts() -> None:
    """Known answer: the population's participation ratio, and the cosine of many independent rows."""
    x, _ = clusters(1, contexts=200_000, rows=1)
    true = float(np.square((x / np.linalg.norm(x, axis=1, keepdims=True)).mean(0)).sum())
    names = ["participation_ratio", "participation_ratio:corrected=1", "participation_ratio:clusters=1",
             "average_cosine", "average_cosine:pairs=between"]  # fmt: skip
    found = []
    for seed in range(150):
        x, contexts = clusters(seed)
        found.append([e.value for e in measure_rows(x, names, contexts=contexts).values()])
    plain, corrected, mended, cosine, between = np.mean(found, axis=0)
    errors = np.std(found, axis=0) / math.sqrt(len(found))
    assert plain < 0.87 * RATIO and corrected < 0.9 * RATIO, "as if rows were independent"
    assert mended == pytest.approx(RATIO, abs=3 * errors[2] + 0.02 * RATIO)
    assert cosine > 1.15 * true and between == pytest.approx(true, abs=3 * errors[4])


def test_what_cannot_be_computed_is_said_in_a_sentence() -> None:
    x, contexts = clusters(0, contexts=3)
    with pytest.raises(TooFewRows, match="at least 4 contexts"):
        anisoscope.participation_ratio(x, contexts=contexts, clusters=True)
    with pytest.raises(TooFewRows, match="at least 2 contexts"):
        anisoscope.average_cosine(x, contexts=np.zeros(len(x)), pairs="between")
    with pytest.raises(TooFewRows, match="rows that differ"):
        anisoscope.participation_ratio(np.ones((60, 4)), contexts=np.arange(60) // 6, clusters=True)
    with pytest.raises(AnisoscopeError, match="expected one"):
        anisoscope.participation_ratio(x, contexts=contexts, clusters=True, corrected=True)
    with pytest.raises(AnisoscopeError, match="betwen"):
        anisoscope.average_cosine(x, contexts=contexts, pairs="betwen")


def test_both_stand_beside_each_other_by_default_where_rows_have_contexts() -> None:
    x, contexts = clusters(0)
    seen = measure_rows(x, contexts=contexts)
    for name in ("average_cosine", "average_cosine:pairs=between", "participation_ratio",
                 "participation_ratio:clusters=1"):  # fmt: skip
        assert math.isfinite(seen[name].value), name
    beside = [request for request in parse_requests("default") if request.beside]
    assert len(beside) == 2
    for request in beside:
        assert applies(request, "resid") and not applies(request, "query") and not applies(request, "unembed")


def test_under_32_contexts_a_note_says_what_they_bias() -> None:
    few, many = (measure_rows(*clusters(0, contexts=k)[:1], contexts=clusters(0, contexts=k)[1]) for k in (12, 32))
    assert few["average_cosine"].note == "only 12 contexts: biased by what their rows share, pairs=between is not"
    assert "clusters=1 is not" in few["participation_ratio"].note
    assert "12 contexts" in few["svd_ratio"].note
    for name in ("average_cosine:pairs=between", "participation_ratio:clusters=1", "mean_norm"):
        assert "contexts" not in few[name].note, name
    assert not any("contexts" in estimate.note for estimate in many.values())
