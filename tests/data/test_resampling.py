"""Resampling moves the frequencies towards their target as far as whole contexts and the sample size allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import sparse
from scipy.optimize import minimize

from anisoscope.data import resampling
from anisoscope.data.resampling import (
    count_matrix,
    divergence,
    parse_frequency,
    resample,
    sample_share,
    zipf_exponent,
    zipf_target,
)
from anisoscope.data.tokens import SEP, SPECIALS
from anisoscope.errors import AnisoscopeError
from anisoscope.training.corpus import Corpus, prepare_corpus
from anisoscope.training.language_model import WindowStream

FIRST = len(SPECIALS)


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return prepare_corpus("embedded", tmp_path_factory.mktemp("text") / "corpus", limit=0.4, tokens="bpe:600")


def resampled(corpus: Corpus, frequency: str) -> tuple[np.ndarray, dict[str, Any]]:
    starts = WindowStream(corpus, 32).starts
    words: dict[str, Any] = {"vocab_size": corpus.vocab_size, "specials": FIRST, "frequency": frequency}
    return resample(corpus.train.tokens, starts, context=32, **words)


def pure_windows(counts: list[int], context: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Windows that hold one type each, so that every target can be reached."""
    tokens = np.repeat(np.concatenate([np.full(n, FIRST + v) for v, n in enumerate(counts)]), context)
    return tokens, np.arange(0, len(tokens), context)


@pytest.mark.parametrize(("frequency", "wanted"), [("flat", [1, 1, 1]), ("zipf:1", [6, 3, 2]), ("zipf:2", [36, 9, 4])])
def test_a_target_that_can_be_reached_is_reached(frequency: str, wanted: list[int]) -> None:
    tokens, starts = pure_windows([600, 300, 100])
    weights, report = resample(tokens, starts, context=4, vocab_size=FIRST + 3, specials=FIRST, frequency=frequency)
    mass = weights.reshape(-1) @ np.eye(3)[tokens[starts] - FIRST]
    target = np.array(wanted) / sum(wanted)
    assert np.allclose(mass, target, atol=2e-3)
    size = 1 / (target**2 / np.array([600, 300, 100])).sum()
    assert report["effective_windows"] == pytest.approx(size, rel=0.02)


def test_the_sample_size_bounds_the_intervention() -> None:
    tokens, starts = pure_windows([9990, 10])
    (_, free), (weights, bound) = (
        resample(tokens, starts, context=4, vocab_size=FIRST + 2, specials=FIRST, frequency="flat", least=least)
        for least in (0.001, 0.1)
    )
    assert free["after"]["kl_bits"] < 1e-3, "flat can be reached, on 20 windows"
    assert bound["effective_share"] >= 0.1 and bound["after"]["kl_bits"] > 0.1
    rare = float(weights[-10:].sum())
    assert rare**2 / 10 + (1 - rare) ** 2 / 9990 == pytest.approx(1e-3, rel=0.05), "as far as 1,000 windows go"


def test_the_weights_solve_the_stated_problem() -> None:
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.full(5, 0.4), size=40)
    target, mu = zipf_target(shares.mean(0), 0.3), 0.05

    def objective(logits: np.ndarray) -> float:  # over the weights themselves, by brute force
        weights = np.exp(logits - logits.max())
        weights /= weights.sum()
        mix = weights @ shares
        return float(mix @ np.log(mix / target) + mu * weights @ np.log(weights * len(weights)))

    brute = minimize(objective, np.zeros(40), method="BFGS", options={"gtol": 1e-9})
    theta, weights = resampling._Dual(sparse.csr_array(shares), target)(mu, np.zeros(5))
    assert objective(np.log(weights)) == pytest.approx(brute.fun, abs=1e-7)
    mixed = weights @ shares
    tilt = np.log(target / mixed) / mu
    assert np.allclose(theta - theta.mean(), tilt - tilt.mean(), atol=2e-3), "p_w ∝ q e^{−μθ}"


@pytest.mark.parametrize("frequency", ["flat", "zipf:0.4", "zipf:1.5"])
def test_real_text_comes_nearer_to_its_target(embedded: Corpus, frequency: str) -> None:
    _, report = resampled(embedded, frequency)
    before, after, target = report["before"], report["after"], report["target"]
    assert after["kl_bits"] < 0.95 * before["kl_bits"]
    assert report["effective_share"] >= 0.1
    flatter = target["zipf_exponent"] < before["zipf_exponent"]
    assert (after["zipf_exponent"] < before["zipf_exponent"]) == flatter
    assert (after["entropy_bits"] > before["entropy_bits"]) == flatter
    assert after["types"] == before["types"], "no type disappears"
    assert "approached, not reached" in report["note"] and after["kl_bits"] > 0.01


def test_natural_changes_nothing(embedded: Corpus) -> None:
    _, report = resampled(embedded, "natural")
    assert report["before"] == report["after"] and report["effective_share"] == 1 and report["note"] == ""
    assert report["before"]["kl_bits"] == 0


def test_what_is_drawn_has_the_reported_frequencies(embedded: Corpus) -> None:
    weights, report = resampled(embedded, "flat")
    stream = WindowStream(embedded, 32, batch_size=4096, weights=weights)
    drawn = np.bincount(np.concatenate([stream.batch(s)["labels"].numpy().ravel() for s in range(4)]))[FIRST:]
    share = drawn[drawn > 0] / drawn.sum()
    assert -(share @ np.log2(share)) == pytest.approx(report["after"]["entropy_bits"], abs=0.03)
    expected = stream.counts / stream.counts.sum()
    assert -(expected[expected > 0] @ np.log2(expected[expected > 0])) == pytest.approx(
        report["after"]["entropy_bits"], abs=0.005
    )


def test_an_exponent_that_moves_the_other_way_is_said() -> None:
    before, after, target = ({"zipf_exponent": e, "kl_bits": k} for e, k in ((1.2, 0.5), (1.1, 0.3), (1.5, 0.0)))
    assert "moved the other way (1.200 to 1.100)" in resampling._note(before, after, target)
    assert "other way" not in resampling._note(after, before, target)


def test_the_count_matrix_counts_and_leaves_specials_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resampling, "ROWS", 3)
    tokens = np.random.default_rng(1).integers(SEP, FIRST + 6, 200).astype(np.int16)
    starts = np.arange(0, 190, 7)
    dense = count_matrix(tokens, starts, context=10, vocab_size=FIRST + 9, specials=FIRST).toarray()
    for row, start in zip(dense, starts, strict=True):
        slow = np.bincount(tokens[start : start + 10], minlength=FIRST + 9)
        slow[:FIRST] = 0
        assert np.array_equal(row, slow)


def test_the_fitted_exponent_is_that_of_the_law() -> None:
    for exponent in (0.0, 0.5, 1.0, 2.0):
        law = np.arange(1, 400.0) ** -exponent
        assert zipf_exponent(np.random.default_rng(0).permutation(law)) == pytest.approx(exponent, abs=1e-8)
    assert zipf_exponent(np.array([1.0])) == 0


def test_known_divergence_and_sample_size() -> None:
    assert divergence(np.array([0.5, 0.5, 0.0]), np.array([0.25, 0.25, 0.5])) == pytest.approx(1.0)
    assert sample_share(np.array([0.5, 0.5, 0, 0])) == pytest.approx(0.5)


@pytest.mark.parametrize("bad", ["zipf", "zipf:", "zipf:x", "zipf:-1", "zipf:nan", "zipf:99", "flat:2", "uniform", ""])
def test_a_malformed_frequency_is_refused_with_what_was_expected(bad: str) -> None:
    with pytest.raises(AnisoscopeError, match="expected natural, flat, or zipf:S"):
        parse_frequency(bad)


def test_a_window_of_nothing_but_specials_does_no_harm(tmp_path: Path) -> None:
    tokens, starts = pure_windows([50, 30])
    tokens[:4] = SEP
    weights, report = resample(tokens, starts, context=4, vocab_size=FIRST + 2, specials=FIRST, frequency="flat")
    assert np.isfinite(weights).all() and report["after"]["kl_bits"] < report["before"]["kl_bits"]
