"""Courses over training: a rise and a fall that are there are found, and one that noise made is not."""

from __future__ import annotations

import math
from typing import Any

import pytest

from anisoscope.claims.catalogue import evaluate_claims
from anisoscope.claims.engine.claim import Verdict
from anisoscope.results.query import Table
from support.fake_profiles import Sheet, Truth, hump, joined

STEPS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)
ALL = ("two_nn", "levina_bickel", "gride")
HUMP = hump(STEPS)


def phased(truths: dict[str, Truth | float], *, steps: tuple[int, ...] = STEPS, **more: Any) -> Table:
    sheet = Sheet(steps=steps, **{"layers": 3, "noise": 0.05, **more})
    for metric, truth in truths.items():
        sheet.halves(metric, truth)
    return joined(sheet)


def phases(truths: dict[str, Truth | float], **more: Any) -> Verdict:
    return evaluate_claims(phased(truths, **more), ["two_phases"])[0]


def parts(found: Verdict) -> dict[str, dict[str, Any]]:
    return {part["name"]: part for part in found.details["parts"]}


RISE = hump(STEPS, end=12.0)
FALL: Truth = lambda step, depth: 12 - math.log1p(step)  # noqa: E731
CASES: list[tuple[Truth | float, dict[str, Any], str]] = [
    (HUMP, {}, "holds"),
    (RISE, {}, "fails"),
    (FALL, {}, "fails"),
    (8.0, {}, "fails"),
    (hump(STEPS, low=11.6), {}, "fails"),  # it rises by 3 %
    (hump(STEPS, end=11.6), {}, "fails"),  # it falls by 3 %
    (HUMP, {"noise": 4.0, "common": 0.0}, "undecided"),
    (hump(STEPS, low=10.8, end=10.6), {"noise": 0.4, "common": 0.0}, "undecided"),
]


@pytest.mark.parametrize(("truth", "more", "status"), CASES)
def test_two_phases_are_told_as_planted(truth: Truth | float, more: dict[str, Any], status: str) -> None:
    found = phases(dict.fromkeys(ALL, truth), **more)
    assert found.status == status, found.why
    assert found.why.endswith(".") and ". " not in found.why and "nan" not in found.why


def test_the_numbers_are_those_of_the_other_half_around_the_peak_of_the_first() -> None:
    """A slow twin over plain records."""
    table = phased(dict.fromkeys(ALL, HUMP), noise=0.5, common=0.3)
    found = evaluate_claims(table, ["two_phases"])[0]

    def mean(group: str, step: int) -> float:
        rows = [r for r in table.records() if (r["metric"], r["group"], r["step"]) == ("two_nn", group, step)]
        return sum(r["value"] for r in rows) / len(rows)

    peak = max(STEPS, key=lambda step: mean("half:1", step))
    told = parts(found)
    assert told["two_nn: peak step"]["effect"] == peak
    assert told["two_nn: rise"]["effect"] == pytest.approx(mean("half:2", peak) / mean("half:2", 0) - 1)
    assert told["two_nn: fall"]["effect"] == pytest.approx(1 - mean("half:2", 1000) / mean("half:2", peak))
    assert len(found.details["estimators"]["two_nn"]["blocks"]) == 3


OTHER = {
    "two of three": ((HUMP, HUMP, RISE), "holds"), "one of three": ((HUMP, RISE, RISE), "fails"),
    "two": ((HUMP, HUMP), "holds"), "one of two": ((HUMP, RISE), "fails"), "one": ((HUMP,), "undecided"),
    "one that fails": ((RISE,), "undecided"),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHER)
def test_two_estimators_must_agree(case: str) -> None:
    truths, status = OTHER[case]
    found = phases(dict(zip(ALL, truths, strict=False)))
    assert found.status == status, found.why
    if len(truths) == 1:
        assert "needs 2 (measure levina_bickel and gride too)" in found.why
    statuses = [aspect["status"] for aspect in found.details["aspects"].values()]
    assert statuses.count("holds") == sum(truth is HUMP for truth in truths)


def test_a_rise_from_step_0_alone_leaves_it_open() -> None:
    def early(step: int, depth: float) -> float:
        return 4.0 if step == 0 else 12 - math.log1p(step) / 2

    found = phases(dict.fromkeys(ALL, early))
    assert found.status == "undecided" and "without step 0 the rise" in found.why
    later = phases(dict.fromkeys(ALL, HUMP), steps=STEPS[1:])
    assert later.status == "holds" and not any("after step 0" in name for name in parts(later)), "no step 0, no doubt"


def test_a_wrong_half_shows_what_choosing_and_testing_on_one_would_do() -> None:
    """A single lucky step on the first half is not a peak on the second."""

    def lucky(r: dict[str, Any]) -> dict[str, Any]:
        up = 1.5 if r["step"] == 16 and r["group"] == "half:1" else 1.0
        return {**r, "value": up * r["value"], "replicates": [up * x for x in r["replicates"]]}

    table = phased(dict.fromkeys(ALL, 8.0))
    assert evaluate_claims(Table.from_records(map(lucky, table.records())), ["two_phases"])[0].status == "fails"

    def swapped(r: dict[str, Any]) -> dict[str, Any]:
        return {**lucky({**r, "group": "half:1"}), "group": r["group"]} if r["group"] else r

    found = evaluate_claims(Table.from_records(map(swapped, table.records())), ["two_phases"])[0]
    assert found.low > found.margin, "the counter-test: on both halves it would be"
    assert found.status == "undecided" and "steps whose changes go up or down by chance" in found.why, "one step alone"


def test_noise_around_a_level_rarely_has_two_phases() -> None:
    small: dict[str, Any] = {"steps": (0, 1, 10, 100, 1000), "layers": 2, "noise": 0.6, "common": 0.0}
    held = sum(phases(dict.fromkeys(ALL, 8.0), entropy=(3, i), **small).status == "holds" for i in range(200))
    assert held < 10, held


def test_one_rise_without_a_fall_rarely_has_two_phases() -> None:
    small: dict[str, Any] = {"steps": (0, 1, 10, 100, 1000), "layers": 2, "noise": 0.4, "common": 0.0}
    held = sum(phases(dict.fromkeys(ALL, RISE), entropy=(4, i), **small).status == "holds" for i in range(60))
    assert held < 3, held


# what is missing


def test_without_halves_it_says_how_to_get_them() -> None:
    sheet = Sheet(steps=STEPS, layers=3)
    for metric in ALL:
        sheet.add(metric, HUMP)
    found = evaluate_claims(joined(sheet), ["two_phases"])[0]
    assert found.status == "undecided" and "--halves" in found.why and not found.details["missing"]


def test_without_a_series_or_an_estimator_there_is_nothing_to_ask() -> None:
    single = evaluate_claims(joined(Sheet().add("two_nn", 8.0).add("svd_ratio", 0.2)))
    told = {v.claim: v for v in single}
    assert told["two_phases"].details["missing"] and told["anisotropy_grows"].details["missing"]
    assert not told["bell_shaped"].details["missing"]
    assert phases({"svd_ratio": 0.2}).details["missing"]


def test_a_step_without_numbers_is_left_out() -> None:
    def holed(r: dict[str, Any]) -> dict[str, Any]:
        return {**r, "value": math.nan} if r["step"] == 0 and r["layer"] == 2 else r

    given = phased(dict.fromkeys(ALL, HUMP))
    found = evaluate_claims(Table.from_records(map(holed, given.records())), ["two_phases"])[0]
    assert found.status == "holds"
    assert [r["step"] for r in found.details["estimators"]["gride"]["tested"]] == list(STEPS[1:])


def test_seeds_with_peaks_of_their_own_are_pooled() -> None:
    sheets = []
    for i, at in enumerate((16, 64, 64)):
        sheet = Sheet(number=i, entropy=i, steps=STEPS, layers=3, noise=0.05)
        for metric in ALL:
            sheet.halves(metric, hump(STEPS, at=at))
        sheets.append(sheet)
    pooled, *single = evaluate_claims(joined(*sheets), ["two_phases"])
    assert pooled.status == "holds" and pooled.scope == "over 3 seeds" and "step 48" in pooled.why
    assert [v.status for v in single] == ["holds"] * 3
    assert evaluate_claims(joined(*sheets[:2]), ["two_phases"])[0].status == "undecided"


# anisotropy over training


def growing(end: float, *, start: float = 0.05, first: float | None = None) -> Truth:
    def course(step: int, depth: float) -> float:
        if step == 0:
            return start
        begin = start if first is None else first
        return begin + (end - begin) * math.log(max(step, 1)) / math.log(1000)

    return course


GROWTH: list[tuple[Truth, dict[str, Any], str]] = [
    (growing(0.3), {}, "holds"),
    (growing(0.05), {}, "fails"),
    (growing(0.02), {}, "fails"),
    (growing(0.3, first=0.29), {}, "fails"),  # all of it from step 0 to step 1
    (growing(0.1), {"noise": 0.03, "common": 0.0}, "undecided"),
]


@pytest.mark.parametrize(("truth", "more", "status"), GROWTH)
def test_growth_is_told_as_planted(truth: Truth, more: dict[str, Any], status: str) -> None:
    sheet = Sheet(steps=STEPS, layers=3, **more).add("svd_ratio", truth).add("average_cosine", growing(0.5))
    found = evaluate_claims(joined(sheet), ["anisotropy_grows"])[0]
    assert found.status == status, found.why
    told = parts(found)
    assert told["average cosine: since step 0"]["effect"] == pytest.approx(0.45, abs=0.05)
    assert told["average cosine: since step 0"]["status"] is None, "the average cosine is told, not judged"


@pytest.mark.parametrize(("ratio", "status"), [(1.3, "holds"), (1.2, "undecided"), (1.1, "fails")])
@pytest.mark.parametrize("level", [0.02, 0.4])
def test_growth_is_relative_and_from_early_to_late(level: float, ratio: float, status: str) -> None:
    """The old margin, .05 of σ₁/Σσ, could never be passed by a model whose ratio goes from .01 to .03."""
    third = dict.fromkeys((0, 1, 2, 4, 6, 8), 0.0) | {8 + 4 * n: n / 8 for n in range(1, 8)}
    third |= dict.fromkeys(range(64, 69), 1.0)
    sheet = Sheet(steps=tuple(third), layers=3, noise=0.003 * level)
    sheet.add("svd_ratio", lambda step, depth: level * (1 + (ratio - 1) * third[step]))
    found = evaluate_claims(joined(sheet), ["anisotropy_grows"])[0]
    assert found.status == status and found.effect == pytest.approx(ratio - 1, abs=0.02), found.why


def test_growth_that_a_walk_has_too_often_stays_open_in_one_run() -> None:
    up_and_down = dict(zip(STEPS, (1, 1.1, 0.9, 1.3, 1.1, 1.5, 1.3, 1.6), strict=False))
    sheet = Sheet(steps=tuple(up_and_down), layers=3).add("svd_ratio", lambda step, depth: 0.2 * up_and_down[step])
    found = evaluate_claims(joined(sheet), ["anisotropy_grows"])[0]
    assert found.status == "undecided" and found.low > found.margin and "by chance do as well too often" in found.why


def test_a_series_without_step_0_is_judged_from_early_on() -> None:
    found = evaluate_claims(
        joined(Sheet(steps=STEPS[1:], layers=3).add("svd_ratio", growing(0.3))), ["anisotropy_grows"]
    )
    assert found[0].status == "holds" and "since early in training" in found[0].why
    assert "since step 0" not in found[0].why
    two = evaluate_claims(joined(Sheet(steps=(0, 1000), layers=3).add("svd_ratio", growing(0.3))), ["anisotropy_grows"])
    assert two[0].status == "undecided" and "by chance do as well too often (p = 0.5)" in two[0].why
