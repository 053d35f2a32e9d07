"""Error control over a grid of claims × models: which verdicts stand when all that were asked are counted.

Notation
    θ, m   the effect of a part and its margin
    e      the end of the interval that decides: the one nearer to the margin
    ν      degrees of freedom of the interval
    s      the standard error, |θ − e| / t(ν, .975); with several looks the interval and its quantile are wider
    T      the grid: every measured verdict, undecided ones included; of several seeds the verdict over all of them

p of a part is 2·P(t_ν ≥ |θ − m|/s), times its looks: two-sided, since the same interval could have decided either way,
so it is ≤ .05 exactly where the 95 % interval lies beyond (or short of) the margin. Where random draws test a part as
well, the larger of the two counts.

p of a verdict that *holds* is the largest of its parts, since all must hold (an intersection–union test, Berger 1982).
p of one that *fails* is the smallest of its k parts times k, since any of them may (Bonferroni). An undecided one has
none and counts with p = 1: leaving it out of T because of its result would make the correction too weak.

Holm's adjustment (1979) bounds the probability of any wrong verdict in T, Benjamini and Yekutieli's (2001) the expected
share of wrong ones among those decided. Both are valid under any dependence, which is needed: the claims read the same
rows, some share them with opposite sign (a bell and a flat profile), and Benjamini and Hochberg's assumes otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from anisoscope.claims.engine.claim import Verdict
from anisoscope.results.quantity import among, t_quantile, t_tail

USUAL_DEGREES = 7.0  # of an interval over the 8 folds of contexts, where a part does not say


def corrected(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts with `p_decision`, and with `p_holm` and `q` over the grid that they make; NaN outside of it."""
    decided = [replace(verdict, p_decision=decision_p(verdict)) for verdict in verdicts]
    pooled = {(v.claim, v.subject) for v in verdicts if v.details["pooled"]}
    # of several seeds the verdict over all of them is the one of the grid
    single = [v.details["pooled"] or (v.claim, v.subject) not in pooled for v in verdicts]
    places = [i for i, v in enumerate(verdicts) if single[i] and not v.details["missing"]]
    tests = [1.0 if math.isnan(decided[i].p_decision) else decided[i].p_decision for i in places]
    for i, p_holm, q in zip(places, holm(tests), benjamini_yekutieli(tests), strict=True):
        decided[i] = replace(decided[i], p_holm=p_holm, q=q)
    return decided


def decision_p(verdict: Verdict) -> float:
    """p of a verdict that holds or fails; NaN for an undecided one, and where its parts have no intervals."""
    if verdict.status == "undecided":
        return math.nan
    needed = [part for part in verdict.details.get("parts", ()) if part.get("needed") and _known(part.get("margin"))]
    tests = [part_p(part, holds=verdict.status == "holds") for part in needed]
    if not tests:
        return math.nan
    return max(tests) if verdict.status == "holds" else min(1.0, len(tests) * min(tests))


def part_p(part: Mapping[str, Any], *, holds: bool) -> float:
    """p of one part, a record of `Part`, against its margin in one direction; 1 without an interval.

    >>> part = {"effect": 1.0, "low": 0.0, "high": 2.0, "margin": 0.0, "degrees": 7}
    >>> round(part_p(part, holds=True), 4), round(part_p(part, holds=False), 4)
    (0.05, 1.0)
    """
    above = holds != bool(part.get("below"))  # whether the effect has to lie above its margin
    end = part.get("low" if above else "high")
    if not (_known(part.get("effect")) and end is not None and math.isfinite(end)):
        return 1.0
    looks, degrees = int(part.get("looks") or 1), part.get("degrees") or USUAL_DEGREES
    effect, margin = part["effect"], part["margin"]
    if part.get("ratio") and min(effect, end, margin) > 0:
        effect, end, margin = math.log(effect), math.log(end), math.log(margin)
    error = abs(effect - end) / t_quantile(degrees, among(looks))
    gap = effect - margin if above else margin - effect
    p = min(1.0, 2 * looks * t_tail(gap, error, degrees=degrees))
    if not (holds and part.get("tested")):
        return p
    return max(p, part["p"]) if _known(part.get("p")) else 1.0


def _known(number: float | None) -> bool:
    return number is not None and math.isfinite(number)


def holm(tests: Sequence[float]) -> list[float]:
    """Holm's adjusted p: they are ≤ α for the verdicts that stand at a family-wise error of α.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    count, order = len(tests), np.argsort(tests, kind="stable")
    steps = np.asarray(tests, dtype=float)[order] * np.arange(count, 0, -1)
    return _placed(np.minimum(1.0, np.maximum.accumulate(steps)), order)


def benjamini_yekutieli(tests: Sequence[float]) -> list[float]:
    """Benjamini and Yekutieli's adjusted p: ≤ α for the verdicts that stand at a false discovery rate of α.

    >>> [round(q, 4) for q in benjamini_yekutieli([0.01, 0.02])]
    [0.03, 0.03]
    """
    count, order = len(tests), np.argsort(tests, kind="stable")
    ranked = np.arange(1, count + 1)
    steps = np.asarray(tests, dtype=float)[order] * (1 / ranked).sum() * count / ranked if count else np.empty(0)
    return _placed(np.minimum(1.0, np.minimum.accumulate(steps[::-1])[::-1]), order)


def _placed(values: np.ndarray, order: np.ndarray) -> list[float]:
    """Sorted values back in the order of the tests."""
    found = np.empty(len(values))
    found[order] = values
    return found.tolist()
