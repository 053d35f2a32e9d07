"""Claims that rest on interventions: planted courses are told, and what cannot be told stays open."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from anisoscope.claims.catalogue import evaluate_claims
from anisoscope.claims.engine.claim import Verdict
from anisoscope.claims.inherent.intervention import ADDED_MARGIN, FALL_MARGIN, NO_DRIFT, RISE_MARGIN
from anisoscope.results.query import Table
from anisoscope.studies.untrained.protocol import CLAIMS
from support.fake_profiles import Sheet, joined
from support.planted_inherent import odds

# -- blocks at initialisation ------------------------------------------------------------------------------------------

RISING = {0.0: 0.01, 10.0: 0.2, 50.0: 0.6, 100.0: 0.9, 200.0: 0.98}


def planted(
    curve: Mapping[float, float],
    *,
    added: float | Mapping[str, float] = 0.0,
    seeds: int = 3,
    noise: float = 0.0,
    metric: str = "average_cosine",
) -> Table:
    """Arms whose inputs follow a curve and whose outputs have odds that are larger by so much, by initialisation."""
    random = np.random.default_rng(0)
    sites = {"average_cosine": (("embed", 0), ("resid", 1)), "attention_sharpness": (("scores", 1),)}[metric]
    records = []
    for init, more in (added if isinstance(added, Mapping) else {"normal": added}).items():
        for seed in range(seeds):
            for bias, value in curve.items():
                shaken = value + noise * random.normal()
                own = {"model": "bert", "seed": seed, "stack": "single", "metric": metric, "group": "", "n": 10}
                own["variant"] = f"bias={bias:g};init={init};input_norm=1;width=64"
                grown = odds(shaken, 1 + more) if metric == "average_cosine" else shaken
                records += [
                    {**own, "kind": kind, "layer": layer, "value": grown if kind == "resid" else shaken}
                    for kind, layer in sites
                ]
    return Table.from_records(records)


def judged(table: Table, claim: str) -> Verdict:
    return evaluate_claims(table, [claim])[0]


def added(table: Table) -> Verdict:
    return judged(table, "anisotropic_at_initialisation")


def test_a_block_that_lets_its_inputs_pass_is_not_anisotropic_of_its_own() -> None:
    identity = added(planted(RISING, noise=1e-4))
    assert identity.status == "fails" and identity.effect == pytest.approx(0.0, abs=1e-3)
    assert "the outputs have an average cosine of 0.6" in identity.why
    assert "the anisotropy is that of its inputs" in identity.why
    more = added(planted(RISING, added=0.5, noise=1e-4))
    assert more.status == "holds" and more.effect == pytest.approx(0.5, abs=1e-3), "the counter-test"
    assert "that of its inputs" not in more.why
    assert added(planted(RISING, added=-0.5)).status == "fails", "nor one that takes anisotropy away"


@pytest.mark.parametrize("curve", [{0.0: 0.0, 20.0: 0.5}, {0.0: 0.0, 200.0: 0.981}])
def test_what_a_block_adds_does_not_depend_on_the_bias_it_is_asked_at(curve: dict[float, float]) -> None:
    """The old rule, a difference of cosines beyond .05, could never be passed where inputs have .981."""
    assert added(planted(curve, added=1.0)).status == "holds"
    assert added(planted(curve, added=0.1)).status == "fails"


def test_arms_that_differ_leave_it_open_and_are_counted() -> None:
    verdict = added(planted(RISING, added={"normal": 0.5 * ADDED_MARGIN, "xavier": 1.0}))
    assert verdict.status == "undecided" and "what decides of 2 arms is normal" in verdict.why
    assert "it holds in 1 and fails in 1 of 2 arms" in verdict.why
    assert "adds more than the margin in 1 of 2 arms" in verdict.why


def test_what_a_block_adds_is_asked_only_of_inputs_that_leave_room_for_it() -> None:
    far = {0.0: 0.0, 1.0: 0.0145, 500.0: 0.9997}
    verdict = added(planted(far, added=1.0))
    assert verdict.status == "undecided" and not verdict.details["missing"]
    assert "no bias brings the inputs to an average cosine between 0.25 and 0.99 (they have 0.0145" in verdict.why
    assert "a bias of about 8" in verdict.why, "N = ‖x‖ makes it ½"
    near = added(planted({**far, 8.0: 0.5}, added=1.0))
    assert near.status == "holds" and "at a bias of 8 the outputs" in near.why


def test_a_rising_curve_holds_and_a_falling_one_fails() -> None:
    falling = dict(zip(RISING, reversed(RISING.values()), strict=True))
    for claim, metric in (
        ("anisotropy_grows_with_bias", "average_cosine"),
        ("sharpness_grows_with_bias", "attention_sharpness"),
    ):
        assert judged(planted(RISING, metric=metric), claim).status == "holds"
        assert judged(planted(falling, metric=metric), claim).status == "fails"
        assert judged(planted(dict.fromkeys(RISING, 0.5), noise=0.1, metric=metric), claim).status != "holds"
        tiny = {bias: 0.001 + 1e-4 * i for i, bias in enumerate(RISING)}
        nothing = judged(planted(tiny, metric=metric), claim)
        assert nothing.status == "fails" and "the rise is 0.0004" in nothing.why, "a perfect order of nothing"


def test_growth_says_what_the_inputs_do_themselves() -> None:
    assert "the inputs themselves go from 0.01 to 0.98" in judged(planted(RISING), "anisotropy_grows_with_bias").why
    sharp = judged(planted(RISING, metric="attention_sharpness"), "sharpness_grows_with_bias")
    assert "the inputs themselves" not in sharp.why


@pytest.mark.parametrize("seeds", [1, 2])
@pytest.mark.parametrize("claim", ["anisotropic_at_initialisation", "anisotropy_grows_with_bias"])
def test_one_or_two_seeds_decide_nothing(claim: str, seeds: int) -> None:
    found = evaluate_claims(planted(RISING, added=1.0, seeds=seeds), [claim])
    assert [verdict.status for verdict in found] == ["undecided"]
    assert ("one seed decides nothing" if seeds == 1 else "2 seeds") in found[0].why
    three = evaluate_claims(planted(RISING, added=1.0), [claim])
    assert [verdict.status for verdict in three] == ["holds"], "the counter-test; seeds have no verdicts of their own"
    assert [each["seed"] for each in three[0].details["per_seed"]] == [0, 1, 2], "they are what it rests on"


def test_no_interval_leaves_what_is_possible() -> None:
    shaky = {bias: min(1.0, 0.1 * i) for i, bias in enumerate((0.0, 1.0, 2.0, 3.0, 4.0))}
    verdict = judged(planted(shaky, noise=0.06, seeds=4), "anisotropy_grows_with_bias")
    assert verdict.low < verdict.effect < 1 and verdict.high == 1.0


def test_other_tables_are_not_asked() -> None:
    plain = Table.from_records(
        [{"model": "m", "seed": 0, "stack": "single", "layer": 1, "kind": "resid", "metric": "average_cosine",
          "variant": "", "group": "", "value": 0.5}]
    )  # fmt: skip
    for claim in CLAIMS:
        assert judged(plain, claim).details["missing"] is True, "no block at initialisation in it"
    few = judged(planted({0.0: 0.0, 1.0: 0.5}), "anisotropy_grows_with_bias")
    assert few.status == "undecided" and few.details["missing"] is True


# -- attention without drift -------------------------------------------------------------------------------------------

STEPS = (0, 10, 100)
ARMS = ("softmax", "qk-norm", "mean-removed", "fixed-sharp", "uniform")
COURSE = (0.2, 0.8, 0.3)  # average cosine at the three steps
DRIFT = {"softmax": 0.4, "qk-norm": 0.3, "mean-removed": 0.02, "fixed-sharp": 0.3, "uniform": 0.0}
SHARP = {"softmax": 0.3, "qk-norm": 0.3, "mean-removed": 0.3, "fixed-sharp": 0.7, "uniform": 0.0}


def sheets(
    *,
    courses: Mapping[str, tuple[float, ...]] | None = None,
    drift: Mapping[str, float] | None = None,
    sharp: Mapping[str, float] | None = None,
    seeds: int = 3,
    scatter: float = 0.005,
    steps: tuple[int, ...] = STEPS,
    arms: tuple[str, ...] = ARMS,
) -> list[Sheet]:
    """Five arms whose average cosine, relative drift and sharpness are planted; seeds scatter around them."""
    random = np.random.default_rng(0)
    found = []
    for seed in range(seeds):
        for i, arm in enumerate(arms):
            course, luck = {**dict.fromkeys(ARMS, COURSE), **(courses or {})}[arm], scatter * random.normal()
            level, sharpness = {**DRIFT, **(drift or {})}[arm], {**SHARP, **(sharp or {})}[arm]
            options: dict[str, Any] = {"number": seed, "layers": 3, "steps": steps, "entropy": (seed, i), "noise": 1e-3}
            sheet = Sheet(f"{arm}-3x64", **options)
            sheet.add("average_cosine", lambda s, d, c=course, luck=luck: c[STEPS.index(s)] + luck * (s > 0))
            norm = 0.0 if arm == "uniform" else 2.0
            exact = Sheet(f"{arm}-3x64", **options | {"noise": 0.0 if arm == "uniform" else 1e-3})
            for kind in ("query", "key"):
                exact.add("drift", level * norm, kind=kind).add("mean_norm", norm, kind=kind)
            sheet.add("attention_sharpness", sharpness * (1 + luck), kind="scores")
            sheet.add("attention_entropy", 1 - sharpness, kind="scores").add("score_spread", 1.0, kind="scores")
            found += [sheet, exact]
    return found


def verdicts(claim: str, **effects: Any) -> dict[str, Verdict]:
    """The first verdict on every subject: over all seeds where there are several."""
    found: dict[str, Verdict] = {}
    for verdict in evaluate_claims(joined(*sheets(**effects)), [claim]):
        found.setdefault(verdict.subject, verdict)
    return found


def rising(**effects: Any) -> Verdict:
    return verdicts("anisotropy_without_drift", **effects)["mean-removed-3x64"]


def falling(**effects: Any) -> Verdict:
    return verdicts("sharpness_needs_drift", **effects)["3x64"]


# -- anisotropy --------------------------------------------------------------------------------------------------------


def test_a_rise_without_drift_is_told_early_and_late() -> None:
    found = verdicts("anisotropy_without_drift")
    assert set(found) == {"mean-removed-3x64", "uniform-3x64"}
    for verdict in found.values():
        assert verdict.status == "holds" and verdict.scope == "over 3 seeds" and verdict.margin == RISE_MARGIN
        assert verdict.effect == pytest.approx(0.1, abs=0.02), "the smaller of the two, late, decides"
        assert " early and " in verdict.why and "early, beyond the margin" in verdict.why
        assert {aspect: each["status"] for aspect, each in verdict.details["aspects"].items()} == {
            "early": "holds",
            "late": "holds",
        }
    assert found["uniform-3x64"].why.startswith("Over 3 seeds: without any scores")


def test_no_step_is_chosen_by_its_result() -> None:
    """The old rule took the step where softmax is highest: the highest of some steps lies above the first whatever
    happens, and what arms of a seed share carries the choice over to the arm that is judged."""
    passing = rising(courses={"softmax": (0.2, 0.2, 0.3), "mean-removed": (0.2, 0.9, 0.2)})
    assert passing.status != "holds"
    assert passing.details["aspects"]["late"]["status"] == "fails"


def test_no_rise_without_drift_beside_one_with_it_fails() -> None:
    verdict = rising(courses={"mean-removed": (0.2, 0.21, 0.2)})
    assert verdict.status == "fails" and "short of the margin" in verdict.why


def test_where_nothing_rises_nothing_can_be_told() -> None:
    flat = dict.fromkeys(ARMS, (0.2, 0.21, 0.2))
    verdict = rising(courses=flat)
    assert verdict.status == "undecided" and "with ordinary attention it does not rise beyond the margin" in verdict.why


def test_a_rise_that_does_not_last_is_told_as_such() -> None:
    """It was said to hold; with ordinary attention it does not last either, so late there is nothing to tell."""
    verdict = rising(courses=dict.fromkeys(ARMS, (0.2, 0.8, 0.2)))
    assert verdict.status == "undecided" and ": a transient rise of " in verdict.why
    assert "does not rise beyond the margin late either" in verdict.why
    assert "transient" not in rising().why, "the counter-test: one that lasts"
    assert verdict.details["aspects"]["early"]["status"] == "holds"
    gone = rising(courses={"mean-removed": (0.2, 0.8, 0.2)})
    assert gone.status == "fails", "where ordinary attention keeps it"


@pytest.mark.parametrize(("left", "status"), [(0.5 * NO_DRIFT, "holds"), (2 * NO_DRIFT, "undecided")])
def test_drift_that_was_not_removed_leaves_it_open(left: float, status: str) -> None:
    verdict = rising(drift={"mean-removed": left})
    assert verdict.status == status
    assert ("is still 0.2" in verdict.why) == (status == "undecided")


def test_one_or_two_seeds_do_not_speak_for_all() -> None:
    for told in (rising, falling):
        one, two = (told(seeds=seeds, sharp={"mean-removed": 0.1}) for seeds in (1, 2))
        assert one.status == "undecided" and one.scope == "for these runs only", "however narrow over its contexts"
        assert one.low > one.margin and "one seed decides nothing" in one.why
        assert two.status == "undecided" and "a general claim needs 3" in two.why
        assert told(seeds=3, sharp={"mean-removed": 0.1}).status == "holds", "the counter-test"


def test_seeds_are_told_as_what_a_verdict_rests_on_not_as_verdicts() -> None:
    found = evaluate_claims(joined(*sheets()), ["sharpness_needs_drift"])
    assert len(found) == 1 and [each["seed"] for each in found[0].details["per_seed"]] == [0, 1, 2]


def test_without_drift_in_ordinary_attention_a_rise_needs_none() -> None:
    verdict = rising(drift={"softmax": 0.05})
    assert verdict.status == "undecided" and "ordinary attention has no relative drift beyond 0.1" in verdict.why
    assert rising(drift={"softmax": 0.2}).status == "holds", "the counter-test"


def test_a_course_without_its_start_says_what_is_missing() -> None:
    verdict = rising(steps=(10, 100))
    assert verdict.status == "undecided" and "at step 0 and at two later steps" in verdict.why


# -- sharpness ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "status"), [(0.15, "holds"), (0.3 * (1 - FALL_MARGIN), "undecided"), (0.29, "fails"), (0.4, "fails")]
)
def test_the_relative_fall_of_sharpness_decides(level: float, status: str) -> None:
    verdict = falling(sharp={"mean-removed": level})
    assert verdict.status == status and verdict.scope == "over 3 seeds"
    assert verdict.effect == pytest.approx(1 - level / 0.3, abs=0.02)
    assert "entropy" in verdict.why and "spread of scores 1" in verdict.why
    assert "fixed-sharp has 0.699" in verdict.why and "qk-norm has 0.3" in verdict.why


def test_without_drift_in_ordinary_attention_there_is_nothing_to_need() -> None:
    verdict = falling(sharp={"mean-removed": 0.1}, drift={"softmax": 0.05})
    assert verdict.status == "undecided" and "ordinary attention has no relative drift beyond 0.1" in verdict.why
    assert falling(sharp={"mean-removed": 0.1}).status == "holds", "the counter-test"


def test_a_fifth_of_no_sharpness_is_nothing() -> None:
    """.002 against .001 fell by half: the old rule held where no attention is sharp."""
    verdict = falling(sharp={"softmax": 0.002, "mean-removed": 0.001})
    assert verdict.status == "undecided" and "ordinary attention is not sharp" in verdict.why


def test_drift_that_is_still_there_leaves_sharpness_open() -> None:
    verdict = falling(sharp={"mean-removed": 0.1}, drift={"mean-removed": 0.3})
    assert verdict.status == "undecided" and "not below 0.1" in verdict.why


def test_two_arms_are_enough_and_one_is_not() -> None:
    assert falling(arms=("softmax", "mean-removed")).status == "fails"
    for claim in ("sharpness_needs_drift", "anisotropy_without_drift"):
        (verdict,) = verdicts(claim, arms=("mean-removed",), seeds=1).values()
        assert verdict.details["missing"] and math.isnan(verdict.effect)
        assert "`anisoscope study sharpness` trains them" in verdict.why


def test_seeds_that_end_apart_are_judged_at_the_step_they_share() -> None:
    sheets_ = [*sheets(seeds=3), *sheets(seeds=4, steps=(0, 10))[-2 * len(ARMS) :]]
    found = evaluate_claims(joined(*sheets_), ["sharpness_needs_drift"])[0]
    assert found.details["step"] == 10 and "step 10 is the last that all 4 seeds have" in found.why
