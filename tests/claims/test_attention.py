"""Queries, keys and attention over training: planted courses are told, by numbers that scipy confirms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from anisoscope.claims.catalogue import evaluate_claims
from anisoscope.claims.engine.claim import Verdict
from anisoscope.claims.inherent.attention import random_cosine
from anisoscope.results.query import Table
from support.fake_modalities import STEPS, Course, media_table
from support.fake_training import edited

TOGETHER, SHARPENS = "queries_and_keys_drift_together", "attention_sharpens"


def judged(claim: str, course: Course) -> Verdict:
    return evaluate_claims(media_table(course), [claim])[0]


def drifting(more: dict[str, Any], **drift: Any) -> Verdict:
    return judged(TOGETHER, Course(**more).drifting(**drift))


def attending(more: dict[str, Any], **attention: Any) -> Verdict:
    return judged(SHARPENS, Course(**more).attending(**attention))


CASES: list[tuple[Any, dict[str, Any], dict[str, Any], str]] = [
    (drifting, {}, {}, "holds"),
    (drifting, {}, {"query": -0.9}, "fails"),
    (drifting, {}, {"key": -0.9}, "fails"),
    (drifting, {}, {"cosine": -0.5, "start": 0.6}, "fails"),
    (drifting, {}, {"cosine": 0.03, "start": 0.0}, "fails"),  # it grows, but random directions are as parallel
    (drifting, {"noise": 0.2}, {"query": 0.02}, "undecided"),
    (drifting, {"width": None}, {}, "undecided"),  # what is a random |cos| here?
    (drifting, {"steps": (0, 1, 2, 4)}, {}, "undecided"),
    (attending, {}, {}, "holds"),
    (attending, {}, {"metrics": ("attention_max", "attention_entropy")}, "holds"),
    (attending, {}, {"sharp": -0.09}, "fails"),
    (attending, {"noise": 1e-6}, {"sharp": 0.0002}, "fails"),  # in perfect order, and next to nothing
    (attending, {"noise": 0.002}, {"sharp": 0.053}, "undecided"),
    (attending, {"noise": 0.1}, {"sharp": 0.01}, "undecided"),
    (attending, {}, {"metrics": ("attention_sharpness",)}, "undecided"),  # entropy was not measured
    (attending, {"steps": (0, 1, 2, 4)}, {}, "undecided"),
]


@pytest.mark.parametrize(("claim", "more", "planted", "status"), CASES)
def test_what_is_planted_is_told(claim: Any, more: dict[str, Any], planted: dict[str, Any], status: str) -> None:
    found = claim(more, **planted)
    assert found.status == status, found.why
    assert found.why.endswith(".") and ". " not in found.why and "nan" not in found.why and "unknown" not in found.why
    if status == "holds":
        assert found.low > found.margin == 0.5


def test_every_claim_was_planted_in_all_three_ways() -> None:
    for claim in (drifting, attending):
        assert {status for function, _, _, status in CASES if function is claim} == {"holds", "fails", "undecided"}


def _part(found: Verdict, name: str) -> dict[str, Any]:
    return next(p for p in found.details["parts"] if p["name"] == name)


def test_trends_equal_scipys_layer_by_layer_and_fold_by_fold() -> None:
    from scipy.stats import spearmanr

    table = media_table(Course(noise=0.15, layers=3, heads=3, entropy=4).drifting(query=0.5, cosine=0.3))
    found = evaluate_claims(table, [TOGETHER])[0]
    rows = table.records()

    def series(layer: int, metric: str, kind: str, *, heads: bool) -> np.ndarray:
        """[9, steps]: the value and then the folds, of |·| in the mean over heads."""
        out = []
        for step in STEPS:
            mine = [r for r in rows if (r["layer"], r["metric"], r["kind"], r["step"]) == (layer, metric, kind, step)]
            mine = [r for r in mine if (r["head"] is not None) is heads]
            out.append(np.mean([np.abs([r["value"], *r["replicates"]]) for r in mine], axis=0))
        return np.array(out).T

    for name, place in (
        ("mean query", ("drift", "query", False)),
        ("mean key", ("drift", "key", False)),
        ("alignment", ("qk_cosine", "query", True)),
    ):
        rho = np.mean(
            [
                [spearmanr(STEPS, row)[0] for row in series(layer, place[0], place[1], heads=place[2])]
                for layer in (1, 2, 3)
            ],
            axis=0,
        )
        half = 2.365 * math.sqrt(7 / 8 * ((rho[1:] - rho[1:].mean()) ** 2).sum())
        part = _part(found, name)
        assert (part["effect"], part["low"], part["high"]) == pytest.approx(
            (rho[0], max(-1, rho[0] - half), min(1, rho[0] + half)), rel=1e-6
        )
        assert part["p"] is None, "steps are no independent samples"


def test_heads_that_are_opposed_count_as_parallel() -> None:
    """The mean over heads of the signed cosine is 0 in these tables; |cos| of every head is not."""
    found = drifting({})
    assert _part(found, "at the end")["effect"] == pytest.approx(0.65, abs=0.01)


@pytest.mark.parametrize("width", [16, 64])
def test_random_directions_have_the_cosine_they_are_said_to_have(width: int) -> None:
    random = np.random.default_rng(0)
    pairs = random.normal(size=(2, 20_000, width))
    pairs /= np.linalg.norm(pairs, axis=-1, keepdims=True)
    cosines = np.abs((pairs[0] * pairs[1]).sum(-1))
    assert cosines.mean() == pytest.approx(random_cosine(width), rel=0.02)
    assert cosines.std() == pytest.approx(math.sqrt((1 - 2 / math.pi) / width), rel=0.05)


def test_the_lead_over_random_directions_knows_the_width_of_a_head() -> None:
    """128 wide with 2 heads is 64 a head; run.json may say another width."""
    found = drifting({})
    level = _part(found, "at the end")["effect"]
    part = _part(found, "beyond random directions")
    assert part["effect"] == pytest.approx(level - random_cosine(64), rel=1e-6)
    assert part["margin"] == pytest.approx(1.96 * math.sqrt((1 - 2 / math.pi) / 64 / 4), rel=1e-6)
    course = Course().drifting()
    course.entry["head_width"] = 16
    told = _part(judged(TOGETHER, course), "beyond random directions")
    assert told["effect"] == pytest.approx(level - random_cosine(16), rel=1e-6)


def rotary(course: Course) -> Course:
    course.entry["architecture"] = "GPTNeoXForCausalLM"
    return course


def test_random_directions_are_judged_before_rotation_where_a_model_rotates() -> None:
    """After rotation the mean has fewer channels than the head is wide, so that chance reaches further."""
    after = judged(TOGETHER, rotary(Course().drifting()))
    assert after.status == "undecided" and "query_unrotated" in after.why
    assert judged(TOGETHER, Course().drifting()).status == "holds", "the counter-test: a model that does not rotate"
    both = judged(TOGETHER, rotary(Course().drifting().drifting(suffix="_unrotated")))
    assert both.status == "holds" and "random directions (before rotation)" in both.why
    chance = rotary(Course().drifting().drifting(cosine=0.03, start=0.0, suffix="_unrotated"))
    assert judged(TOGETHER, chance).status == "fails", "after rotation they are parallel, before it as by chance"


def test_means_after_rotation_are_more_parallel_by_chance_than_their_width_says() -> None:
    """Why: of a mean over positions only slow channels are left, (Σw)²/Σw² of them with w = |mean rotation|²."""
    random = np.random.default_rng(0)
    turns = np.exp(1j * np.arange(512)[:, None] * 10_000.0 ** (-np.arange(0, 64, 2) / 64)).mean(0)
    q, k = (random.normal(size=(4000, 32)) + 1j * random.normal(size=(4000, 32)) for _ in range(2))

    def chance(one: np.ndarray, two: np.ndarray) -> float:
        cosine = (one * two.conj()).real.sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(two, axis=1)
        return float(np.abs(cosine).mean())

    weights = np.abs(turns) ** 2
    effective = 2 * weights.sum() ** 2 / (weights**2).sum()
    assert chance(q, k) == pytest.approx(random_cosine(64), rel=0.03)
    assert chance(q * turns, k * turns) == pytest.approx(random_cosine(round(effective)), rel=0.03) and effective < 30


def test_queries_that_share_a_key_are_fewer_draws() -> None:
    course = Course(heads=4).drifting()
    few = _part(judged(TOGETHER, course), "beyond random directions")["margin"]
    for head in range(2):
        course.add("drift", 1.0, kind="key", head=head)
    assert _part(judged(TOGETHER, course), "beyond random directions")["margin"] == pytest.approx(few * math.sqrt(2))


def test_three_steps_say_how_many_are_needed() -> None:
    found = judged(SHARPENS, Course(steps=(0, 1, 2)).attending())
    assert "no series of 5 steps or more (it has 3;" in found.why


def test_before_rotation_is_told_beside() -> None:
    found = judged(TOGETHER, Course().drifting().drifting(query=-0.9, suffix="_unrotated"))
    assert found.status == "holds" and found.details["aspects"]["before rotation"]["status"] == "fails"
    assert "before rotation" not in drifting({}).details["aspects"]


def test_without_the_first_key_is_told_beside() -> None:
    found = judged(SHARPENS, Course().attending().attending(-0.09, variant="first=0"))
    assert found.status == "holds" and "without the first key −1" in found.why
    assert found.details["aspects"]["without the first key"]["status"] == "fails"


def test_encoder_and_decoder_are_judged_apart() -> None:
    stacks = [Course("t5", stack="encoder").attending(), Course("t5", stack="decoder").attending(-0.09)]
    found = {v.subject: v.status for v in evaluate_claims(media_table(*stacks), [SHARPENS])}
    assert found == {"t5, encoder stack": "holds", "t5, decoder stack": "fails"}


def test_seeds_that_end_apart_are_judged_at_a_common_step() -> None:
    ends = [STEPS, STEPS, (*STEPS, 5000)]
    courses = [Course(number=n, entropy=n, steps=steps).drifting().attending() for n, steps in enumerate(ends)]
    for v in evaluate_claims(media_table(*courses), [TOGETHER, SHARPENS])[::4]:
        assert (
            v.scope == "over 3 seeds" and v.status == "holds" and "step 1000 is the last that all 3 seeds have" in v.why
        )


# hostile tables


def _edited(claim: str, change: Any) -> Verdict:
    table = media_table(Course().drifting().attending())
    return evaluate_claims(Table(edited(table, change).arrow, table.about), [claim])[0]


@pytest.mark.parametrize("claim", [TOGETHER, SHARPENS])
def test_without_replicates_there_is_no_interval_and_no_verdict(claim: str) -> None:
    found = _edited(claim, lambda r: {**r, "replicates": None})
    assert found.status == "undecided" and "without an interval" in found.why and math.isfinite(found.effect)


def test_a_constant_course_has_no_trend_and_says_so() -> None:
    def constant(r: dict[str, Any]) -> dict[str, Any]:
        chosen = r["kind"] in ("key", "scores") and r["metric"] != "attention_entropy"
        return {**r, "value": 1.0, "replicates": [1.0] * 8} if chosen else r

    found = _edited(TOGETHER, constant)
    assert found.status == "undecided" and "the same at every step" in found.why, found.why
    found = _edited(SHARPENS, constant)
    assert found.status == "fails" and "by 0 [0, 0]" in found.why, found.why


def test_a_cell_without_a_number_takes_its_step_out_for_all() -> None:
    found = _edited(TOGETHER, lambda r: {**r, "value": math.nan} if (r["step"], r["kind"]) == (4, "key") else r)
    assert found.low > found.margin and "over 6 steps" in found.why.lower()
    assert found.status == "undecided" and "(p = 0.0312)" in found.why, "of 32 walks one is always as good"


def test_a_head_without_a_number_is_left_out_at_every_step() -> None:
    def dead(r: dict[str, Any]) -> dict[str, Any]:
        return {**r, "value": math.nan} if (r["head"], r["layer"], r["step"]) == (1, 2, 16) else r

    found = _edited(TOGETHER, dead)
    assert found.status == "holds" and "over 7 steps" in found.why.lower()


def test_what_was_not_measured_is_named() -> None:
    found = _edited(TOGETHER, lambda r: r if r["head"] is None else None)
    assert found.status == "undecided" and "qk_cosine by head" in found.why and found.details["missing"]
    silent = evaluate_claims(media_table(Course().attending()), [TOGETHER])[0]
    assert silent.details["missing"] and "no drift at queries" in silent.why
    one = evaluate_claims(media_table(Course(steps=(None,)).add("attention_sharpness", 0.3, kind="scores")), [SHARPENS])
    assert one[0].details["missing"] and "series of 5 steps" in one[0].why


def test_rows_written_twice_are_harmless() -> None:
    table = media_table(Course().drifting())
    twice = Table(Table.concat([table, table]).arrow, table.about)
    one, two = (evaluate_claims(t, [TOGETHER])[0] for t in (table, twice))
    assert one == two or one.to_dict() == two.to_dict()


@pytest.mark.parametrize("sheet", [Course().drifting(query=-0.9), Course().attending(sharp=-0.09)])
def test_of_a_model_that_did_not_learn_nothing_is_said(sheet: Course) -> None:
    name = TOGETHER if any(row["metric"] == "qk_cosine" for row in sheet.rows) else SHARPENS
    for end, status in ((2.95, "undecided"), (2.0, "fails")):
        course = Course()
        course.rows = [*sheet.rows, *Course().losses(end=end, constant=3.0).rows]
        found = judged(name, course)
        assert found.status == status and ("the model did not learn" in found.why) == (end == 2.95)


def test_a_walk_is_no_trend_in_one_run() -> None:
    """Up in four of six steps: a high rank correlation that many walks have, with a tiny interval over contexts."""
    course = dict(zip(STEPS, (0.2, 0.3, 0.25, 0.45, 0.6, 0.58, 0.7), strict=True))

    def table(seeds: int) -> list[Verdict]:
        sheets = []
        for number in range(seeds):
            sheet = Course(number=number, entropy=number)
            sheet.add("attention_sharpness", lambda step, _: course[step], kind="scores")
            sheets.append(sheet.add("attention_entropy", lambda step, _: 1 - course[step], kind="scores"))
        return evaluate_claims(media_table(*sheets), [SHARPENS])

    one = table(1)[0]
    assert one.low > one.margin and one.status == "undecided"
    assert "steps whose changes go up or down by chance do as well too often" in one.why
    assert table(3)[0].status == "holds", "three trainings that do the same are no walks"
