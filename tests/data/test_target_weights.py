"""Weights by target frequency: the mean is 1, targets count as f^A, and no target counts for more than the cap."""

from __future__ import annotations

import numpy as np
import pytest

from anisoscope.data.target_weights import CAP, parse_target_weights, weights_by_frequency, weights_report
from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.frequency import target_entropy, unigram_entropy

ZIPF = np.rint(1e6 / np.arange(1, 2001) ** 1.1).astype(np.int64)


def test_weights_by_hand() -> None:
    counts = np.array([0, 8, 4, 2, 2])  # 16 tokens of 4 types; the first type does not occur
    # flat: every type counts for 4 tokens; a type that does not occur weighs as one that occurs once
    assert weights_by_frequency(counts, 0.0).tolist() == [4.0, 0.5, 1.0, 2.0, 2.0]
    # f²: 64 + 16 + 4 + 4 = 88 → each occurrence weighs f·16/88
    assert weights_by_frequency(counts, 2.0)[1:] == pytest.approx([16 / 11, 8 / 11, 4 / 11, 4 / 11])
    # at most 1.5: the two rarest weigh 1.5 (6 of 16 tokens), the others share 10: 8c/8 + 4c/4 = 10 → c = 5
    assert weights_by_frequency(counts, 0.0, cap=1.5)[1:] == pytest.approx([5 / 8, 5 / 4, 1.5, 1.5])
    assert weights_by_frequency(np.array([7]), 0.0).tolist() == [1.0]


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.5, 3.0])
@pytest.mark.parametrize("cap", [1.2, 5.0, CAP])
def test_the_mean_is_one_and_weights_follow_a_power_below_the_cap(exponent: float, cap: float) -> None:
    weights = weights_by_frequency(ZIPF, exponent, cap=cap)
    shares = ZIPF / ZIPF.sum()
    assert shares @ weights == pytest.approx(1.0, abs=1e-12) and weights.max() <= cap
    free = weights < cap
    scale = weights[free] / ZIPF[free] ** (exponent - 1.0)
    assert scale == pytest.approx(np.full(free.sum(), scale[0]), rel=1e-9)
    # the slow way: bisect the factor until the mean is 1
    low, high = 0.0, 1e12
    raw = (ZIPF / ZIPF.max()) ** (exponent - 1.0)
    for _ in range(300):
        middle = (low + high) / 2
        low, high = (middle, high) if shares @ np.minimum(cap, middle * raw) < 1 else (low, middle)
    assert weights == pytest.approx(np.minimum(cap, low * raw), rel=1e-6)


def test_flat_weights_bring_the_entropy_of_the_targets_to_its_maximum() -> None:
    import torch

    counts = torch.from_numpy(ZIPF)
    flat = torch.from_numpy(weights_by_frequency(ZIPF, 0.0, cap=1e9))
    assert target_entropy(counts, flat) == pytest.approx(np.log2(len(ZIPF)), abs=1e-9)
    steep = torch.from_numpy(weights_by_frequency(ZIPF, 1.5))
    assert target_entropy(counts, steep) < target_entropy(counts) == unigram_entropy(counts) < np.log2(len(ZIPF))


def test_the_report_says_what_is_at_the_cap() -> None:
    counts = np.array([10**6, *[1] * 9])
    weights = weights_by_frequency(counts, 0.0)
    report = weights_report(counts, weights, name="flat")
    assert report["types_at_cap"] == 9 and report["cap"] == CAP and "9 of 10 types" in report["note"]
    assert report["before"]["entropy_bits"] < report["after"]["entropy_bits"] < np.log2(10)
    free = weights_report(ZIPF, weights_by_frequency(ZIPF, 0.0), name="flat")
    assert free["types_at_cap"] == 0 and free["note"] == "", "the counter-test"
    assert free["after"]["entropy_bits"] == pytest.approx(np.log2(2000), abs=1e-9)
    assert free["effective_share"] == pytest.approx(2000**2 / (ZIPF.sum() * (1 / ZIPF).sum()), abs=1e-4)


@pytest.mark.parametrize("text", ["", "power", "power:x", "power:-1", "power:99", "zipf:1", "flat:2"])
def test_what_is_not_understood_is_said(text: str) -> None:
    with pytest.raises(AnisoscopeError, match="expected none, flat, or power:A"):
        parse_target_weights(text)
