"""Models of every modality, with attention and without: what is planted is told, and what is missing is named."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anisoscope.claims.catalogue import evaluate_claims
from anisoscope.claims.engine.claim import Verdict
from anisoscope.claims.inherent.modalities import modality_table
from anisoscope.results.folder import RunFolder
from anisoscope.results.query import Table
from anisoscope.view.sections.findings import unmeasured
from support.fake_modalities import Media, media_table
from support.fake_training import edited

EVERY, DIFFERS, COUNTER = "anisotropic_in_every_modality", "convolution_differs", "not_inherent"
Planted = tuple[str, float]  # modality and average cosine


def sheets(planted: Sequence[Planted], **more: Any) -> list[Media]:
    names = [f"{modality}-{i}" for i, (modality, _) in enumerate(planted)]
    return [
        Media(name, modality, entropy=i, layers=5, **more).stream(cosine)
        for i, (name, (modality, cosine)) in enumerate(zip(names, planted, strict=True))
    ]


def judged(claim: str, *planted: Planted, **more: Any) -> Verdict:
    return evaluate_claims(media_table(*sheets(planted, **more)), [claim])[0]


ATTENTION = (("text", 0.5), ("speech", 0.6), ("vision", 0.4))
ALIKE = (("text", 0.5), ("speech", 0.51), ("vision", 0.52))
ISOTROPIC = ("vision", 0.03)
CASES: list[tuple[str, tuple[Planted, ...], dict[str, Any], str]] = [
    (EVERY, ATTENTION, {}, "holds"),
    (EVERY, (*ATTENTION, ("convolution", 0.2)), {}, "holds"),
    (EVERY, (*ATTENTION, ("characters", 0.02)), {}, "fails"),
    (EVERY, (*ATTENTION, ISOTROPIC), {}, "undecided"),  # two models of one modality that lie apart
    (EVERY, (*ATTENTION, ("vision", 0.2)), {}, "holds"),  # the counter-test
    (EVERY, (*ATTENTION, ("vision", 0.42), ("vision", 0.44)), {}, "holds"),
    (EVERY, (*ATTENTION, ("vision", 0.1), ("vision", 0.9)), {}, "undecided"),  # over models
    (EVERY, (*ATTENTION, ("characters", 0.11)), {"noise": 0.03}, "undecided"),
    (EVERY, (("text", 0.5), ("text", 0.6)), {}, "undecided"),  # one modality
    (DIFFERS, (*ATTENTION, ("convolution", 0.12), ("convolution", 0.15)), {}, "holds"),
    (DIFFERS, (("text", 0.11), ("vision", 0.12), ("convolution", 0.6), ("convolution", 0.55)), {}, "holds"),
    (DIFFERS, (("text", 0.5), ("vision", 0.51), ("convolution", 0.5), ("convolution", 0.52)), {}, "fails"),
    (DIFFERS, (("text", 0.2), ("vision", 0.7), ("convolution", 0.1), ("convolution", 0.6)), {}, "undecided"),
    (DIFFERS, (("text", 0.5), ("convolution", 0.1)), {}, "undecided"),  # one of each: any two differ
    (DIFFERS, ATTENTION, {}, "undecided"),
    (COUNTER, (*ATTENTION, ISOTROPIC, ("convolution", 0.0)), {}, "holds"),
    (COUNTER, (*ALIKE, ("convolution", 0.5), ("convolution", 0.52), ("convolution", 0.51)), {}, "holds"),
    (COUNTER, (*ALIKE, ("convolution", 0.1), ("convolution", 0.12)), {}, "fails"),
    (COUNTER, (*ALIKE, ("convolution", 0.1)), {}, "undecided"),  # one model says little of others
    (COUNTER, (*ALIKE, ("convolution", 0.4)), {"noise": 0.05}, "undecided"),
    (COUNTER, (*ATTENTION, ISOTROPIC), {}, "undecided"),  # nothing without attention: it could not fail
    (COUNTER, ATTENTION, {}, "undecided"),
    (COUNTER, (ISOTROPIC, ("convolution", 0.5)), {}, "undecided"),  # one model with attention
    (COUNTER, (*ALIKE[:2], ("convolution", 0.1), ("convolution", 0.12)), {}, "undecided"),
]


@pytest.mark.parametrize(("claim", "planted", "more", "status"), CASES)
def test_what_is_planted_is_told(claim: str, planted: tuple[Planted, ...], more: dict[str, Any], status: str) -> None:
    found = judged(claim, *planted, **more)
    assert found.status == status, found.why
    assert found.why.endswith(".") and ". " not in found.why and "nan" not in found.why and "unknown" not in found.why
    below = claim == COUNTER and found.margin > 0  # a cosine that must lie below
    if status == "holds":
        assert found.high < found.margin if below else found.low > found.margin
    if status == "fails":
        assert found.low > found.margin if below else found.high < found.margin
    assert not abs(found.low) > 2 and not abs(found.high) > 2


def test_every_claim_was_planted_in_all_three_ways() -> None:
    for name in (EVERY, DIFFERS, COUNTER):
        assert {status for claim, _, _, status in CASES if claim == name} == {"holds", "fails", "undecided"}, name


# every modality


def test_the_number_of_a_modality_is_the_mean_over_blocks_and_models() -> None:
    table = media_table(*sheets([*ATTENTION, ("vision", 0.2)], noise=0.02))
    found = evaluate_claims(table, [EVERY])[0]
    rows = [r for r in table.records() if r["metric"] == "average_cosine" and r["kind"] == "resid"]

    def expected(model: str) -> tuple[float, float, float]:
        mine = [r for r in rows if r["model"] == model]
        value, folds = np.mean([r["value"] for r in mine]), np.mean([r["replicates"] for r in mine], axis=0)
        half = 2.365 * math.sqrt(7 / 8 * ((folds - folds.mean()) ** 2).sum())
        return float(value), float(value - half), float(value + half)

    parts = {p["name"]: (p["effect"], p["low"], p["high"]) for p in found.details["parts"]}
    assert parts["text"] == pytest.approx(expected("text-0"), rel=1e-3)
    one, two = expected("vision-2"), expected("vision-3")
    assert parts["vision"] == pytest.approx(((one[0] + two[0]) / 2, two[1], one[2]), rel=1e-3), "it spans both"


def test_three_models_of_a_modality_have_a_t_interval_over_models() -> None:
    from scipy.stats import t

    planted = [("vision", 0.3), ("vision", 0.4), ("vision", 0.5)]
    found = judged(EVERY, ("text", 0.5), *planted, noise=1e-6)
    part = next(p for p in found.details["parts"] if p["name"] == "vision")
    half = t.ppf(0.975, 2) * 0.1 / math.sqrt(3)
    assert (part["low"], part["high"]) == pytest.approx((0.4 - half, 0.4 + half), abs=1e-4)


def test_a_mean_says_how_many_models_and_modalities_and_which_stacks_it_is_over() -> None:
    whisper = [Media("w", "speech", stack="encoder").stream(0.6), Media("w", "text", stack="decoder").stream(0.4)]
    found = evaluate_claims(media_table(Media("m", "text", entropy=1).stream(0.2), *whisper), [EVERY])[0]
    assert found.why.startswith("In 2 models of 2 of 5 modalities"), found.why
    assert "in text (mean of m and w (decoder stack))" in found.why and "in speech (w (encoder stack))" in found.why


def test_a_copy_of_a_model_counts_once() -> None:
    one, twin, other = Media("a", "text"), Media("b", "text"), Media("c", "text", entropy=5)
    speech = Media("s", "speech", entropy=2).stream(0.5)
    found = evaluate_claims(media_table(one.stream(0.5), twin.stream(0.5), speech), [EVERY])[0]
    assert "b has the same numbers as a and counts once" in found.why and "2 models" in found.why
    found = evaluate_claims(media_table(one, other.stream(0.5), speech), [EVERY])[0]
    assert "counts once" not in found.why and "3 models" in found.why, "the counter-test"


def test_models_that_are_not_anisotropic_are_named() -> None:
    found = judged(EVERY, *ATTENTION, ISOTROPIC)
    assert "not anisotropic is vision-3" in found.why
    assert found.details["aspects"]["every model"]["status"] == "fails"
    conv = judged(EVERY, *ATTENTION, ("convolution", 0.0))
    assert conv.status == "fails" and conv.details["aspects"]["modalities with attention"]["status"] == "holds"


def test_stacks_of_one_model_have_modalities_of_their_own() -> None:
    whisper = [Media("w", "speech", stack="encoder").stream(0.6), Media("w", "text", stack="decoder").stream(0.02)]
    found = evaluate_claims(media_table(*whisper), [EVERY])[0]
    assert found.status == "fails" and "not anisotropic is w, decoder stack" in found.why
    assert found.details["modalities"] == {"text": ["w, decoder stack"], "speech": ["w, encoder stack"]}


def test_a_run_that_does_not_say_is_text() -> None:
    table = media_table(*sheets([("speech", 0.5), ("vision", 0.5)]))
    silent = evaluate_claims(Table(table.arrow, {}), [EVERY])[0]
    assert silent.status == "undecided" and "no second modality" in silent.why and silent.details["missing"]
    assert evaluate_claims(table, [EVERY])[0].status == "holds", "the counter-test"


def test_untrained_models_do_not_count() -> None:
    fresh = Media("fresh", "characters", entry={"notes": ["random weights (seed 0)"]}).stream(0.0)
    start = Media("start", "convolution", steps=(0,)).stream(0.0)
    table = media_table(*sheets(ATTENTION), fresh, start)
    found = {v.claim: v for v in evaluate_claims(table, [EVERY, DIFFERS, COUNTER])}
    assert found[EVERY].status == "holds" and "fresh did not learn and is left out" in found[EVERY].why
    assert "start did not learn and is left out: nothing but its initialisation" in found[EVERY].why
    assert found[DIFFERS].details["missing"] and found[COUNTER].status == "undecided"
    trained = Media("trained", "characters").stream(0.0)
    assert evaluate_claims(media_table(*sheets(ATTENTION), trained), [EVERY])[0].status == "fails"
    bare = Media("bare", "convolution").stream(0.0)
    assert evaluate_claims(media_table(*sheets(ATTENTION), trained, bare), [COUNTER])[0].status == "holds"
    more = Media("more", "convolution", entropy=1).stream(0.0)
    assert evaluate_claims(media_table(*sheets(ATTENTION), fresh, bare, more), [COUNTER])[0].status == "fails"


def test_the_last_step_of_a_series_counts() -> None:
    late = Media("late", "speech", steps=(0, 10)).stream(0.5)
    early = [{**r, "value": 0.0, "replicates": [0.0] * 8} if r["step"] == 0 else r for r in late.rows]
    late.rows = early
    found = evaluate_claims(media_table(*sheets([("text", 0.5)]), late), [EVERY])[0]
    assert found.status == "holds" and found.details["ends"] == {"text-0": None, "late": 10}


def test_three_seeds_are_pooled() -> None:
    given = [
        Media(modality, modality, number=n, entropy=(n, i), noise=0.02).stream(cosine + 0.01 * n)
        for n in range(3)
        for i, (modality, cosine) in enumerate(ATTENTION)
    ]
    found = evaluate_claims(media_table(*given), [EVERY])
    assert [v.scope for v in found] == ["over 3 seeds", "for seed 0", "for seed 1", "for seed 2"]
    assert found[0].status == "holds" and found[0].details["pooled"]
    two = evaluate_claims(media_table(*(s for s in given if s.number != 2)), [EVERY])[0]
    assert two.status == "undecided" and "needs 3" in two.why


# convolution


@pytest.mark.parametrize("convolutions", [(0.1, 0.2, 0.16), (0.1, 0.3, 0.05, 0.2)])
def test_the_difference_has_the_wider_interval_of_two_t_tests(convolutions: tuple[float, ...]) -> None:
    from scipy.stats import ttest_ind

    planted = [*ATTENTION, *(("convolution", value) for value in convolutions)]
    table = media_table(*sheets(planted))
    means = {
        name: np.mean([r["value"] for r in table.records() if (r["model"], r["metric"]) == (name, "average_cosine")
                       and r["kind"] in ("resid", "stage")])
        for name in {r["model"] for r in table.records()}
    }  # fmt: skip
    one, two = ([v for n, v in means.items() if n.startswith("conv") is side] for side in (False, True))
    tests = [ttest_ind(one, two, equal_var=same) for same in (False, True)]
    theirs = max(tests, key=lambda test: test.confidence_interval(0.95).high)
    interval = theirs.confidence_interval(0.95)
    found = evaluate_claims(table, [DIFFERS])[0]
    (gap,) = (part for part in found.details["parts"] if part["needed"])
    assert (found.effect, gap["p"]) == pytest.approx((np.mean(one) - np.mean(two), theirs.pvalue))
    assert math.isnan(found.p), "the interval decides, p describes"
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert f"over 3 models and {len(convolutions)}" == found.scope
    assert "higher with attention than with convolution" in found.why


def test_two_models_that_are_alike_by_luck_do_not_differ_from_many() -> None:
    """All from one population of .05 and .6: Welch's interval alone let 36 of 100 such tables hold."""
    held = 0
    for seed in range(60):
        random = np.random.default_rng(seed)
        values = random.choice([0.05, 0.6], size=22) + 0.005 * random.normal(size=22)
        planted = [("text", v) for v in values[2:]] + [("convolution", v) for v in values[:2]]
        held += judged(DIFFERS, *planted).status == "holds"
    assert held <= 3, held


def test_the_direction_is_told() -> None:
    both = ((0.5, 0.1), (0.1, 0.5))
    up, down = (judged(DIFFERS, *2 * [("vision", a)], *2 * [("convolution", b)]) for a, b in both)
    assert up.status == down.status == "holds" and up.effect > 0 and down.effect > 0
    assert "higher with convolution than with attention" in down.why and "vision minus convolution is −0.3" in down.why


def test_one_model_on_a_side_decides_nothing() -> None:
    """Any two models differ: the interval over contexts of one of each kind, however narrow, says nothing of kinds."""
    for planted in ([("vision", 0.5), ("convolution", 0.1)], [*ATTENTION, ("convolution", 0.1)]):
        found = judged(DIFFERS, *planted)
        assert found.status == "undecided" and found.low > 0.1 and "it takes 2 models on each side" in found.why


def test_seeds_do_not_stand_for_models() -> None:
    """Three trainings of the same four models agree with each other; what other models would do they do not know."""
    planted = [("vision", 0.5), ("text", 0.2), ("convolution", 0.3), ("convolution", 0.0)]
    given = [
        Media(f"{modality}-{i}", modality, number=n, entropy=(n, i), noise=0.002).stream(cosine)
        for n in range(3)
        for i, (modality, cosine) in enumerate(planted)
    ]
    pooled = evaluate_claims(media_table(*given), [DIFFERS])[0]
    assert pooled.scope == "over 3 seeds" and pooled.status == "undecided" and pooled.low < 0 < pooled.high


@pytest.mark.parametrize(
    ("others", "status"),
    [((0.1, 0.8), "undecided"), ((0.42, 0.45), "holds"), ((0.05,), "undecided"), ((0.3,), "holds")],
)
def test_seeds_do_not_stand_for_models_of_a_modality(others: tuple[float, ...], status: str) -> None:
    planted = [*ATTENTION, *(("vision", cosine) for cosine in others)]
    given = [
        Media(f"{modality}-{i}", modality, number=n, entropy=(n, i), noise=0.002).stream(cosine)
        for n in range(3)
        for i, (modality, cosine) in enumerate(planted)
    ]
    pooled = evaluate_claims(media_table(*given), [EVERY])[0]
    assert pooled.scope == "over 3 seeds" and pooled.status == status, pooled.why


def test_three_trainings_of_one_model_without_attention_are_one_model() -> None:
    planted = [("text", 0.5), ("speech", 0.5), ("vision", 0.5), ("convolution", 0.5)]
    given = [
        Media(f"{modality}-{i}", modality, number=n, entropy=(n, i)).stream(cosine)
        for n in range(3)
        for i, (modality, cosine) in enumerate([*planted, ("convolution", 0.5)])
    ]
    assert evaluate_claims(media_table(*given), [COUNTER])[0].status == "holds"
    one = evaluate_claims(media_table(*(sheet for sheet in given if sheet.model != "convolution-4")), [COUNTER])[0]
    assert one.scope == "over 3 seeds" and one.status == "undecided" and "says little of others" in one.why


@pytest.mark.parametrize(("architecture", "status"), [("ConvNextModel", "holds"), ("ResNetModel", "undecided")])
def test_a_relu_is_no_evidence(architecture: str, status: str) -> None:
    """Rows without negative coordinates have a high cosine whatever was learned: the old rules passed by that alone."""
    nets = [
        Media(f"net{i}", "convolution", entropy=i, layers=5, entry={"architecture": architecture}).stream(0.8)
        for i in range(2)
    ]
    table = media_table(*sheets([("text", 0.5), ("speech", 0.5), ("vision", 0.5)]), *nets)
    for claim in (DIFFERS, COUNTER):
        found = evaluate_claims(table, [claim])[0]
        assert found.status == status, found.why
        assert ("ends in a ReLU" in found.why or "end in a ReLU" in found.why) == (status == "undecided")


def test_stages_are_blocks_of_convolutional_models_and_rows_after_blocks_are_not() -> None:
    staged = []
    for i in range(2):
        net = Media(f"c{i}", "convolution", layers=5, entropy=i).stream(0.5)
        net.kind = "resid"
        staged.append(net.stream(0.0, ends=False))
    found = evaluate_claims(media_table(*sheets([("text", 0.5), ("text", 0.5)]), *staged), [DIFFERS])[0]
    assert found.status == "fails" and found.effect < 0.02


# the counter-claim


def test_both_routes_are_told_with_the_number_that_is_judged() -> None:
    found = judged(COUNTER, *ALIKE, ("convolution", 0.1), ("convolution", 0.12))
    assert "closest to isotropy" in found.why and "not anisotropic, or less so by more than 0.1" in found.why
    assert "learned is not known" in found.why
    weak = judged(COUNTER, *3 * [("text", 0.15)], *2 * [("convolution", 0.06)])
    assert weak.status == "fails", "within .1 of them, but not anisotropic themselves: the old rule let it hold"
    both = judged(COUNTER, *3 * [("text", 0.5)], *2 * [("convolution", 0.45)])
    assert both.status == "holds" and "at least as much, to within" in both.why and "beyond the 0.1" in both.why
    first = judged(COUNTER, *ATTENTION, ISOTROPIC, ("convolution", 0.0))
    assert 0.02 < first.effect < 0.04 and f"{first.effect:.3g}"[:6] in first.why and first.margin == 0.1


def test_one_anisotropic_block_is_enough_to_be_anisotropic() -> None:
    flat, peak = (
        Media("v", "vision", layers=5).stream(lambda depth, top=top: top if depth == 0.6 else 0.02)
        for top in (0.02, 0.4)
    )
    rest = sheets([*ALIKE, *2 * [("convolution", 0.0)]])
    found = [evaluate_claims(media_table(*rest, one), [COUNTER])[0] for one in (flat, peak)]
    assert [v.status for v in found] == ["holds", "fails"]


def test_a_hybrid_is_no_model_without_attention() -> None:
    hybrid = Media("cvt", "convolution", layers=5, entry={"sites": ["embed", "stage", "query"]}).stream(0.5)
    plain = [Media(f"net{i}", "convolution", layers=5, entropy=i).stream(0.5) for i in range(2)]
    rest = sheets(ALIKE)
    assert evaluate_claims(media_table(*rest, hybrid), [COUNTER])[0].status == "undecided"
    assert evaluate_claims(media_table(*rest, *plain), [COUNTER])[0].status == "holds"
    assert evaluate_claims(media_table(*rest, plain[0]), [COUNTER])[0].status == "undecided", (
        "one says little of others"
    )
    measured = Media("cvt", "convolution", layers=5).stream(0.5).place("average_cosine", 0.3, layer=1, kind="query")
    assert evaluate_claims(media_table(*rest, measured), [COUNTER])[0].status == "undecided"


def test_what_a_table_lacks_for_the_counter_claim_is_counted() -> None:
    found = judged(COUNTER, ISOTROPIC, ("convolution", 0.5))
    assert "3 trained models with attention and 1 without any, and the table has 1 and 1" in found.why


def _trained(cosine: float, *, end: float | None = None) -> Media:
    """A model whose held-out loss ends there, beside a constant prediction with 3.0."""
    sheet = Media("late", "vision", steps=(0, 10), layers=5, entropy=9).stream(cosine)
    if end is not None:
        sheet.losses(end=end, constant=3.0)
    return sheet


def test_a_model_that_did_not_learn_settles_nothing() -> None:
    """The isotropic one is the only one that lets the claim hold."""
    rest = sheets([*ALIKE, *2 * [("convolution", 0.0)]])

    def found(end: float | None) -> Verdict:
        return evaluate_claims(media_table(*rest, _trained(0.02, end=end)), [COUNTER])[0]

    assert found(2.95).status == "fails" and "late did not learn and is left out" in found(2.95).why
    assert found(2.0).status == "holds" and "late did not learn" not in found(2.0).why
    assert found(None).status == "holds" and "learned is not known" in found(None).why


def test_what_learned_nothing_or_read_nothing_is_no_evidence_for_a_modality() -> None:
    rest = sheets([("text", 0.5), ("speech", 0.6)])
    counted = evaluate_claims(media_table(*rest, _trained(0.02, end=2.0)), [EVERY])[0]
    assert counted.status == "fails", "a vision model that learned counts"
    idle = evaluate_claims(media_table(*rest, _trained(0.02, end=2.95)), [EVERY])[0]
    assert idle.status == "holds" and "late did not learn" in idle.why
    lost = Media("lost", "vision", entry={"notes": ["WRONG TEXT: its tokenizer …"]}, entropy=9, layers=5).stream(0.02)
    found = evaluate_claims(media_table(*rest, lost), [EVERY])[0]
    assert found.status == "holds" and "lost was shown a text that it does not know" in found.why


def test_the_best_of_many_models_must_be_better_than_luck() -> None:
    """Every stack lies at the margin; uncorrected, 1 − .975¹² = 26 % of such tables would hold."""
    status = []
    for entropy in range(40):
        many = [Media(f"m{i}", entropy=(entropy, i), layers=1, noise=0.01).stream(0.1) for i in range(12)]
        bare = Media("net", "convolution", entropy=(entropy, 99), layers=4, noise=0.001).stream(-0.3)
        status.append(evaluate_claims(media_table(*many, bare), [COUNTER])[0].status)
    assert status.count("holds") <= 4
    clear = [Media(f"m{i}", entropy=i, layers=1, noise=0.01).stream(0.0 if i == 3 else 0.5) for i in range(12)]
    assert evaluate_claims(media_table(*clear, bare), [COUNTER])[0].status == "holds", "the counter-test"


def test_a_table_of_one_model_has_nothing_to_say_and_is_one_line() -> None:
    found = [v.to_dict() for v in evaluate_claims(media_table(*sheets([("text", 0.5)])), [EVERY, DIFFERS, COUNTER])]
    assert unmeasured(found) == [EVERY, DIFFERS, COUNTER]


# hostile tables


@pytest.mark.parametrize("claim", [EVERY, DIFFERS, COUNTER])
def test_numbers_without_intervals_decide_nothing(claim: str) -> None:
    def bare(r: dict[str, Any]) -> dict[str, Any]:
        return {**r, "replicates": None, "low": None, "high": None}

    table = media_table(*sheets([("text", 0.5), ("convolution", 0.1)]))
    found = evaluate_claims(Table(edited(table, bare).arrow, table.about), [claim])[0]
    assert found.status == "undecided" and "unknown" not in found.why and "nan" not in found.why, found.why


def test_cells_without_numbers_are_left_out_and_an_empty_table_is_open() -> None:
    table = media_table(*sheets(ATTENTION))
    holed = edited(table, lambda r: {**r, "value": math.nan, "replicates": None} if r["layer"] == 2 else r)
    assert evaluate_claims(Table(holed.arrow, table.about), [EVERY])[0].status == "holds"
    gone = edited(table, lambda r: {**r, "value": math.nan} if r["model"] == "text-0" else r)
    left = evaluate_claims(Table(gone.arrow, table.about), [EVERY])[0]
    assert left.status == "holds" and "text" not in left.details["modalities"]
    assert modality_table(Table.from_records([])) == []
    assert {v.status for v in evaluate_claims(Table.from_records([]), [EVERY, DIFFERS, COUNTER])} == {"undecided"}


# the table of the paper


def test_the_table_by_modality_holds_what_the_rows_say() -> None:
    shape = {1: 0.1, 2: 0.5, 3: 0.3, 4: 0.25}
    sheet = Media("v", "vision", layers=4, noise=0.001, entry={"type": "encoder"}).stream(
        lambda depth: shape.get(round(4 * depth), 0.05), lambda depth: 1 + depth
    )
    found = modality_table(media_table(*sheets([("convolution", 0.3)]), sheet))
    assert [r["modality"] for r in found] == ["vision", "convolution"]
    row = found[0]
    assert (row["layers"], row["middle_layer"], row["max_layer"], row["min_layer"]) == (4, 2, 2, 1)
    assert (row["middle"], row["max"], row["min"]) == pytest.approx((0.5, 0.5, 0.1), abs=0.01)
    assert row["mean"] == pytest.approx(0.2875, abs=0.005) and row["mean_low"] < row["mean"] < row["mean_high"]
    assert row["share_beyond"] == 0.75 and row["drift"] == pytest.approx(1.5, abs=0.01) and row["max_depth"] == 0.5
    assert (row["role"], row["attends"], found[1]["attends"]) == ("encoder", True, False)
    assert row["explained_by_drift"] in ("yes", "no", "open") and -1 <= row["pearson"] <= 1


def test_one_layer_is_a_table_too() -> None:
    row = modality_table(media_table(Media("m", layers=1).stream(0.4)))[0]
    assert row["layers"] == 1 and row["middle"] == row["max"] == row["min"] and math.isnan(row["pearson"])
    assert row["explained_by_drift"] == "open" and row["note"].startswith("2 sites only")


def test_claims_are_asked_of_run_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from anisoscope.commands.claims import claims

    for name, sheet in zip(("a", "b"), sheets([("text", 0.5), ("convolution", 0.1)]), strict=True):
        folder = RunFolder.create(tmp_path / name, {}, resume=False)
        folder.write_about({"models": [sheet.entry]})
        folder.write_table(media_table(sheet))
    claims([tmp_path / "a", tmp_path / "b"], f"{EVERY},{DIFFERS}", format="json")
    found = json.loads(capsys.readouterr().out)
    assert {v["claim"]: v["status"] for v in found} == {EVERY: "undecided", DIFFERS: "undecided"}
