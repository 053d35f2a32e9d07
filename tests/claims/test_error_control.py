"""Error control over a grid of verdicts: known answers, an independent twin, the error it promises on null grids."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from anisoscope.claims.catalogue import evaluate_claims
from anisoscope.claims.engine.claim import (
    Finding,
    Part,
    Verdict,
    verdict_of,
    verdicts_from_dicts,
    verdicts_to_dicts,
)
from anisoscope.claims.engine.error_control import benjamini_yekutieli, corrected, decision_p, holm
from anisoscope.results.quantity import Quantity
from support.fake_training import table

T7 = 2.364624  # 97.5 % quantile of Student's t with 7 degrees of freedom


def judged(*parts: Part, subject: str = "m", claim: str = "c", **about: Any) -> Verdict:
    return verdict_of(claim, "", Finding(parts, lambda parts, part: "so"), subject=subject, about=about)


def noisy(generator: np.random.Generator, effect: float) -> Quantity:
    """The mean of eight folds of unit noise around an effect, with its leave-one-out values."""
    folds = effect + generator.normal(size=8)
    return Quantity(float(folds.mean()), tuple(((folds.sum() - folds) / 7).tolist()))


def test_the_decision_has_p_of_its_interval_against_its_margin() -> None:
    part = Part("a", 3.0, 3.0 - T7, 3.0 + T7, margin=0.5, degrees=7.0)
    from scipy.stats import t

    assert judged(part).status == "holds"
    assert decision_p(judged(part)) == pytest.approx(2 * t.sf(2.5, 7), rel=1e-5)
    short = Part("a", -3.0, -3.0 - T7, -3.0 + T7, margin=-0.5)
    assert judged(short).status == "fails" and decision_p(judged(short)) == pytest.approx(2 * t.sf(2.5, 7), rel=1e-5)
    below = Part("a", -3.0, -3.0 - T7, -3.0 + T7, margin=-0.5, below=True)
    assert judged(below).status == "holds" and decision_p(judged(below)) == pytest.approx(2 * t.sf(2.5, 7), rel=1e-5)
    assert math.isnan(decision_p(judged(Part("a", 1.0, 0.0, 2.0, margin=0.5)))), "an undecided one has none"


def test_all_parts_must_hold_and_any_may_fail() -> None:
    sure, tight = Part("a", 30.0, 29.0, 31.0, margin=0.5), Part("b", 3.0, 0.6, 5.4, margin=0.5)
    one = decision_p(judged(tight))
    assert decision_p(judged(sure, tight)) == one, "the weakest part decides that it holds"
    lost = Part("b", -3.0, -5.4, -0.6, margin=-0.5)
    assert decision_p(judged(sure, lost)) == pytest.approx(2 * decision_p(judged(lost))), "one of two may have failed"
    drawn = Part("b", 30.0, 29.0, 31.0, margin=0.5, p=0.04, tested=True)
    assert decision_p(judged(sure, drawn)) == 0.04, "random draws give no smaller p than they can"
    described = Part("c", 0.0, -1.0, 1.0, margin=0.5, needed=False)
    assert decision_p(judged(tight, described)) == one


@pytest.mark.parametrize("shift", [0.5, 1.2, 2.0])
def test_alone_a_verdict_stands_exactly_where_its_interval_decides(shift: float) -> None:
    for seed in range(40):
        quantity = noisy(np.random.default_rng(seed), shift)
        for looks in (1, 3):
            verdict = corrected([judged(Part.of("a", quantity, margin=0.5, looks=looks))])[0]
            stands = not math.isnan(verdict.p_decision) and verdict.p_holm <= 0.05 and verdict.q <= 0.05
            assert stands == (verdict.status != "undecided")


def test_known_answers_by_hand() -> None:
    tests = [0.001, 0.02, 0.03, 0.5]
    assert holm(tests) == pytest.approx([0.004, 0.06, 0.06, 0.5])
    c = 1 + 1 / 2 + 1 / 3 + 1 / 4
    assert benjamini_yekutieli(tests) == pytest.approx([0.004 * c, 0.04 * c, 0.04 * c, min(1, 0.5 * c)])
    assert holm([]) == [] and benjamini_yekutieli([]) == []


def test_the_adjusted_p_are_those_of_others() -> None:
    stats = pytest.importorskip("scipy.stats")
    generator = np.random.default_rng(0)
    for size in (1, 2, 7, 60):
        tests = generator.random(size) ** 3
        assert benjamini_yekutieli(tests) == pytest.approx(stats.false_discovery_control(tests, method="by"))
        slow = [  # an independent twin of Holm's: the largest bound over the hypotheses with a smaller or equal p
            min(1.0, max((np.sum(tests >= other)) * other for other in tests if other <= p)) for p in tests
        ]
        assert holm(tests) == pytest.approx(slow)


def test_wrong_verdicts_on_null_grids() -> None:
    """Effects exactly at their margin: every decision is wrong. Single verdicts err often, the grid at most in 5 %."""
    alone = together = 0
    runs, models, claims = 400, 4, 5
    for seed in range(runs):
        generator = np.random.default_rng(seed)
        shared = [noisy(generator, 0.5) for _ in range(models)]  # claims of one model share half of their noise
        grid = []
        for i, common in enumerate(shared):
            for c in range(claims):
                own = noisy(generator, 0.5)
                mixed = Quantity(
                    (common.value + own.value) / 2,
                    tuple((a + b) / 2 for a, b in zip(common.folds, own.folds, strict=True)),
                )
                grid.append(judged(Part.of("a", mixed, margin=0.5), subject=f"m{i}", claim=f"c{c}"))
        found = corrected(grid)
        alone += any(v.status != "undecided" for v in found)
        together += any(v.p_holm <= 0.05 for v in found)
    assert alone / runs > 0.3, "without a correction most such grids have a wrong verdict"
    assert together / runs <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / runs)


def test_the_grid_counts_every_measured_verdict_and_seeds_once() -> None:
    holding = Part("a", 3.0, 0.6, 5.4, margin=0.5)
    open_ = Part("a", 1.0, 0.0, 2.0, margin=0.5)
    grid = [judged(holding), judged(open_, subject="n"), judged(open_, subject="o", missing=True)]
    found = corrected(grid)
    assert found[0].p_holm == pytest.approx(2 * found[0].p_decision), "two tests: the missing one was not made"
    assert found[1].p_holm == 1.0 and math.isnan(found[1].p_decision) and math.isnan(found[2].p_holm)
    seeds = [judged(holding, pooled=True), judged(holding, seed=1), judged(holding, seed=2)]
    found = corrected(seeds)
    assert found[0].p_holm == found[0].p_decision and math.isnan(found[1].p_holm)
    assert found[1].p_decision == found[0].p_decision


def test_a_table_s_verdicts_carry_it_and_older_files_are_read() -> None:
    verdicts = evaluate_claims(table(strength=1.0), ["tangent_energy", "anisotropy_share"])
    assert all(v.p_decision <= 0.05 and v.p_holm >= v.p_decision for v in verdicts if v.status != "undecided")
    records = verdicts_to_dicts(verdicts)
    assert {"p_decision", "p_holm", "q"} <= set(records[0])
    older = [{k: v for k, v in r.items() if k not in ("p_decision", "p_holm", "q")} for r in records]
    read = verdicts_from_dicts(older)
    assert math.isnan(read[0].p_holm) and read[0].status == verdicts[0].status
    assert [decision_p(v) for v in read] == pytest.approx([decision_p(v) for v in verdicts], nan_ok=True)
