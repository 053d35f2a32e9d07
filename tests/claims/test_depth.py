"""Shapes over depth: planted bells, flat lines and everything between are told apart, with honest intervals."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from anisoscope.claims.catalogue import evaluate_claims
from anisoscope.claims.engine.claim import Verdict
from anisoscope.claims.shape.depth import Curve, bell_parts, isotonic, roughness, up_down
from anisoscope.results.quantity import Quantity
from anisoscope.results.query import Table
from support.fake_profiles import Sheet, Truth, bell, flat, joined


def steps_of(*levels: float) -> Truth:
    """A profile given block by block."""
    return lambda step, depth: levels[round(depth * len(levels)) - 1]


def judged(truth: Truth, claim: str = "bell_shaped", *, metric: str = "svd_ratio", **more: Any) -> Verdict:
    return evaluate_claims(joined(Sheet(**more).add(metric, truth)), [claim])[0]


TWO_PEAKS = steps_of(0.1, 0.2, 0.3, 0.3, 0.2, 0.12, 0.12, 0.2, 0.3, 0.3, 0.2, 0.1)
RISING: Truth = lambda step, depth: 0.1 + 0.3 * depth  # noqa: E731
FALLING: Truth = lambda step, depth: 0.4 - 0.3 * depth  # noqa: E731
ONE_SIDED: Truth = lambda step, depth: 0.1 + 0.3 * min(1.0, 1.6 * depth)  # rises, then stays  # noqa: E731
CASES = [
    ("bell_shaped", bell(), {}, "holds"),
    ("bell_shaped", bell(at=0.3, width=0.15), {}, "holds"),
    ("bell_shaped", flat(), {}, "fails"),
    ("bell_shaped", RISING, {}, "fails"),
    ("bell_shaped", FALLING, {}, "fails"),
    ("bell_shaped", ONE_SIDED, {}, "fails"),
    ("bell_shaped", TWO_PEAKS, {}, "fails"),
    ("bell_shaped", bell(0.04), {}, "fails"),  # too low to be called one
    ("bell_shaped", bell(at=0.95), {}, "fails"),  # at the end
    ("bell_shaped", bell(0.06), {"noise": 0.02}, "undecided"),
    ("bell_shaped", steps_of(0.1, 0.1, 0.1, 0.3, 0.1, 0.1, 0.1, 0.1), {"layers": 8}, "undecided"),  # one block alone
]


@pytest.mark.parametrize(("claim", "truth", "more", "status"), CASES)
def test_a_planted_shape_is_told(claim: str, truth: Truth, more: dict[str, Any], status: str) -> None:
    found = judged(truth, claim, **more)
    assert found.status == status, found.why
    assert found.why.endswith(".") and ". " not in found.why and "nan" not in found.why and "unknown" not in found.why


def parts(found: Verdict) -> dict[str, dict[str, Any]]:
    return {part["name"]: part for part in found.details["parts"]}


def test_each_shape_fails_for_its_own_reason() -> None:
    bad = {
        name: {n for n, p in parts(judged(truth)).items() if p["status"] == "fails"}
        for name, truth in {"rising": RISING, "falling": FALLING, "one-sided": ONE_SIDED, "two": TWO_PEAKS}.items()
    }
    assert "above the last block" in bad["rising"] and "above the first block" not in bad["rising"]
    assert "above the first block" in bad["falling"] and "above the last block" not in bad["falling"]
    assert "above the last block" in bad["one-sided"] and bad["two"] == {"up and down"}
    assert "peak from the ends" in bad["rising"] & bad["falling"]


@pytest.mark.parametrize(("depth", "status"), [(0.1, "fails"), (0.2, "holds"), (0.8, "holds"), (0.9, "fails")])
def test_the_peak_may_lie_from_a_fifth_to_four_fifths(depth: float, status: str) -> None:
    found = judged(bell(0.3, at=depth, width=0.08), layers=10, noise=0.0005)
    assert parts(found)["peak from the ends"]["status"] == status
    assert parts(found)["peak depth"]["effect"] == pytest.approx(depth)


@pytest.mark.parametrize(("margin", "status"), [(0.06, "holds"), (0.05, "undecided"), (0.04, "fails")])
def test_both_ends_must_lie_below_the_peak_by_the_margin(margin: float, status: str) -> None:
    found = judged(
        steps_of(*(0.3 - margin * part for part in (1, 0.5, 0, 0.4, 0.8, 1))), noise=0.001, layers=6, entropy=2
    )
    assert found.status == status, found.why


def test_a_dip_of_a_fifth_of_the_range_is_allowed_and_a_deeper_one_is_not() -> None:
    for dip, status in ((0.1, "holds"), (0.3, "fails")):
        levels = [0.1, 0.2, 0.3, 0.3 - 0.2 * dip, 0.3, 0.2, 0.1]
        found = judged(steps_of(*levels), layers=7, noise=0.0005)
        assert parts(found)["up and down"]["status"] == status
        assert 1 - parts(found)["up and down"]["effect"] == pytest.approx(dip / 2, abs=0.02)


# the numbers


def best_up_down(values: np.ndarray, grid: np.ndarray) -> float:
    """The slow twin: every curve on a grid that rises and then falls."""
    best = math.inf
    for curve in itertools.product(grid, repeat=len(values)):
        signs = np.sign(np.diff(curve))
        turns = signs[signs != 0]
        if not any(a < 0 < b for a, b in itertools.pairwise(turns)):
            best = min(best, float(np.square(values - np.array(curve)).sum()))
    return best


def test_the_up_down_fit_is_the_best_one() -> None:
    random = np.random.default_rng(0)
    for _ in range(6):
        values = random.integers(0, 5, size=5) / 4
        grid = np.linspace(0, 1, 5)
        fit = up_down(values)
        assert float(np.square(values - fit).sum()) <= best_up_down(values, grid) + 1e-9
        turns = np.sign(np.diff(fit))[np.abs(np.diff(fit)) > 1e-12]
        assert not any(a < 0 < b for a, b in itertools.pairwise(turns))
    assert roughness(np.array([1.0, 2.0, 3.0])) == roughness(np.array([3.0, 1.0])) == roughness(np.ones(4)) == 0.0
    assert isotonic(np.array([3.0, 2.0, 1.0])).tolist() == [2.0, 2.0, 2.0]


def noisy(random: np.random.Generator, truth: np.ndarray, noise: float, common: float = 0.7) -> Curve:
    own = math.sqrt(1 - common**2) * random.normal(size=(8, len(truth)))
    folds = truth + noise * math.sqrt(8) * (common * random.normal(size=(8, 1)) + own)
    left_out = (folds.sum(0) - folds) / 7
    numbers = [Quantity(float(folds[:, i].mean()), tuple(left_out[:, i].tolist())) for i in range(len(truth))]
    count = len(truth)
    return Curve.of(range(1, count + 1), [(i + 1) / count for i in range(count)], numbers)


def test_the_interval_of_the_peak_covers_it() -> None:
    random = np.random.default_rng(1)
    truth = np.array([bell(0.06)(None, (i + 1) / 8) for i in range(8)])
    depth = float((truth.argmax() + 1) / 8)
    covered, width = 0, 0.0
    for _ in range(200):
        part = {p.name: p for p in bell_parts(noisy(random, truth, 0.01))}["peak depth"]
        covered += part.low <= depth <= part.high
        width += (part.high - part.low) / 200
    assert covered / 200 >= 0.93
    assert width < 0.6, "the counter-test: it says something"


def test_the_height_of_a_chosen_peak_is_not_too_large() -> None:
    """The largest of 20 equal numbers, minus the first: the naive height is biased, the cross-fitted one is not."""
    random = np.random.default_rng(2)
    truth = np.full(20, 0.2)
    curves = [noisy(random, truth, 0.02, common=0.0) for _ in range(200)]
    crossed = np.array([curve.above(0).value for curve in curves])
    naive = np.array([curve.values.max() - curve.values[0] for curve in curves])
    assert abs(crossed.mean()) < 4 * crossed.std() / math.sqrt(200) + 0.002
    assert naive.mean() > 0.03, "the counter-test"
    held = np.mean([all(curve.above(end).interval()[0] > 0 for end in (0, 19)) for curve in curves])
    assert held < 0.05


def test_a_stable_peak_has_the_plain_difference_and_its_jackknife() -> None:
    curve = noisy(np.random.default_rng(3), np.array([0.1, 0.2, 0.5, 0.2, 0.1]), 0.005)
    above = curve.above(0)
    assert above.value == pytest.approx(curve.values[2] - curve.values[0], rel=1e-12)
    folds = curve.folds[:, 2] - curve.folds[:, 0]
    plain = Quantity(above.value, tuple(folds.tolist()))
    assert above.interval() == pytest.approx(plain.interval(), rel=1e-9)


# false alarms


@pytest.mark.parametrize(("noise", "common"), [(0.01, 0.0), (0.1, 0.5)])
def test_noise_around_a_flat_profile_is_rarely_a_bell(noise: float, common: float) -> None:
    tables = [
        joined(Sheet(entropy=(7, i), noise=noise, common=common, layers=6).add("svd_ratio", flat())) for i in range(200)
    ]
    held = sum(evaluate_claims(table, ["bell_shaped"])[0].status == "holds" for table in tables)
    assert held < 10, held


def test_a_clear_bell_is_found_every_time_and_a_noisy_one_never_refuted() -> None:
    clear, vague = (
        [judged(bell(), entropy=(8, i), noise=noise, layers=8).status for i in range(40)] for noise in (0.005, 0.04)
    )
    assert clear.count("holds") == 40
    assert vague.count("fails") <= 2


# formulas, and what is missing


def both(one: Truth, two: Truth) -> Table:
    return joined(Sheet().add("svd_ratio", one).add("svd_ratio_squared", two))


def test_the_squared_ratio_is_told_and_decides_only_when_alone() -> None:
    (shape,) = evaluate_claims(both(bell(), flat(0.9)), ["bell_shaped"])
    assert shape.status == "holds" and shape.details["aspects"]["squared"]["status"] == "fails"
    assert "it fails by σ₁²/Σσ²" in shape.why
    alone = judged(bell(), metric="svd_ratio_squared")
    assert alone.status == "holds" and "σ₁²/Σσ²" in alone.why and alone.details["formula"] == "svd_ratio_squared"


def test_without_the_first_position_is_told_where_it_was_measured() -> None:
    table = joined(Sheet().add("svd_ratio", flat(0.95)).add("svd_ratio", bell(), variant="first=out"))
    found = evaluate_claims(table, ["bell_shaped"])[0]
    assert found.status == "fails" and "it holds by σ₁/Σσ without the first position" in found.why


def test_only_blocks_at_the_last_step_count() -> None:
    sheet = Sheet(steps=(0, 10, 400)).add(
        "svd_ratio", lambda step, depth: (bell() if step == 400 else RISING)(step, depth)
    )
    embed = [
        {**row, "layer": 0, "depth": 0.0, "kind": "embed", "value": 9.0} for row in sheet.rows if row["layer"] == 1
    ]
    final = [{**row, "kind": "final", "value": 9.0} for row in sheet.rows if row["layer"] == 12]
    found = evaluate_claims(Table.from_records([*sheet.rows, *embed, *final]), ["bell_shaped"])[0]
    assert found.status == "holds" and "at step 400" in found.why and "12 blocks" in found.why


@pytest.mark.parametrize("layers", [1, 5])
def test_too_few_blocks_leave_it_open_with_the_reason(layers: int) -> None:
    for found in (judged(bell(), layers=layers), uniform(flat(), bell(), layers=layers)):
        assert found.status == "undecided" and f"{layers} of {layers} have a number" in found.why
        assert not found.details["missing"]
    assert judged(bell(0.3), layers=6, noise=0.0005).status == "holds", "the counter-test: six are enough"


def holed(layers: set[int]) -> Table:
    rows = Sheet().add("svd_ratio", bell()).rows
    return Table.from_records([{**r, "value": math.nan} if r["layer"] in layers else r for r in rows])


def test_a_block_without_a_number_is_left_out_and_an_end_is_needed() -> None:
    assert evaluate_claims(holed({3, 7}), ["bell_shaped"])[0].status == "holds"
    for end in (1, 12):
        found = evaluate_claims(holed({end}), ["bell_shaped"])[0]
        assert found.status == "undecided" and f"block {end}" in found.why
    assert evaluate_claims(holed(set(range(1, 13))), ["bell_shaped"])[0].details["missing"] is False


def test_without_folds_the_written_intervals_serve_and_without_those_nothing_is_decided() -> None:
    assert judged(bell(), replicates=False).status == "holds"
    assert uniform(flat(), bell(), replicates=False).status == "holds"
    rows = [{**r, "low": None, "high": None} for r in Sheet(replicates=False).add("svd_ratio", bell()).rows]
    assert {v.status for v in evaluate_claims(Table.from_records(rows), ["bell_shaped"])} == {"undecided"}


def test_two_live_folds_are_too_few() -> None:
    rows = [{**r, "replicates": [*r["replicates"][:2], *[math.nan] * 6]} for r in Sheet().add("svd_ratio", bell()).rows]
    for found in evaluate_claims(Table.from_records(rows), ["bell_shaped"]):
        assert found.status == "undecided" and "too few contexts" in found.why


def test_a_constant_profile_of_zero_has_no_spread() -> None:
    found = uniform(flat(0.0), bell(), noise=0.0)
    assert found.status == "undecided" and "no number" in found.why


# uniform, as a comparison


def uniform(encoder: Truth, decoder: Truth, *, names: tuple[str, str] = ("bert", "gpt2"), **more: Any) -> Verdict:
    """The verdict on an encoder beside a decoder, over three seeds."""
    sheets = []
    for seed in range(3):
        sheets.append(Sheet(names[0], entropy=(1, seed), number=seed, **more).add("svd_ratio", encoder))
        sheets.append(Sheet(names[1], entropy=(2, seed), number=seed, **more).add("svd_ratio", decoder))
    types = dict(zip(names, ("encoder", "decoder"), strict=True))
    return evaluate_claims(joined(*sheets, types=types), ["encoders_more_uniform"])[0]


def test_one_encoder_and_one_decoder_differ_by_luck() -> None:
    """Their intervals over contexts are narrow: .15 to .23 of pairs from one law held before."""
    sheets = [Sheet(n, entropy=i).add("svd_ratio", (flat(), bell())[i]) for i, n in enumerate(("bert", "gpt2"))]
    types = {"bert": "encoder", "gpt2": "decoder"}
    (found,) = evaluate_claims(joined(*sheets, types=types), ["encoders_more_uniform"])
    assert found.status == "undecided" and "two trainings differ by luck: it takes 3 seeds" in found.why
    for i in range(2):
        sheets += [
            Sheet(f"{n}{i}", entropy=(i, j)).add("svd_ratio", (flat(), bell())[j]) for j, n in enumerate(("e", "d"))
        ]
        types |= {f"e{i}": "encoder", f"d{i}": "decoder"}
    (found,) = evaluate_claims(joined(*sheets, types=types), ["encoders_more_uniform"])
    assert found.status == "holds", "three of each kind"


@pytest.mark.parametrize(
    ("height", "status"), [(0.02, "holds"), (0.1, "holds"), (0.173, "undecided"), (0.3, "fails"), (0.6, "fails")]
)
def test_uniform_is_a_spread_of_two_thirds_of_the_decoders(height: float, status: str) -> None:
    """A hill of so much on a level of .3 beside one of .3: (max − min)/mean = h/(.3 + 4h/9)."""

    def hill(height: float) -> Truth:
        return steps_of(*(0.3 + height * part for part in (0, 1 / 3, 1, 1, 1 / 3, 0)))

    found = uniform(hill(height), hill(0.3), layers=6)
    ratio = height / (0.3 + 4 * height / 9) * (0.3 + 4 * 0.3 / 9) / 0.3
    assert found.effect == pytest.approx(ratio, rel=0.1) and found.status == status, found.why


def test_a_flat_decoder_with_more_noise_is_not_less_uniform() -> None:
    """The old rule asked for a spread below .2 of a mean and so let any flat profile pass, whatever a decoder has."""
    sheets = []
    for seed in range(3):
        options: dict[str, Any] = {"number": seed, "common": 0.0}
        sheets.append(Sheet("bert", entropy=(1, seed), noise=0.0005, **options).add("svd_ratio", flat()))
        sheets.append(Sheet("gpt2", entropy=(2, seed), noise=0.01, **options).add("svd_ratio", flat()))
    found = evaluate_claims(joined(*sheets, types={"bert": "encoder", "gpt2": "decoder"}), ["encoders_more_uniform"])[0]
    assert found.status != "holds" and "spread of the decoder on other contexts" in found.why
    assert uniform(flat(), bell()).status == "holds", "the counter-test"


def test_only_models_of_the_same_size_are_compared() -> None:
    found = uniform(flat(), bell(), names=("encoder-12x512", "decoder-12x256"))
    assert found.details["missing"] and "of the same size" in found.why
    assert uniform(flat(), bell(), names=("encoder-12x512", "decoder-12x512")).status == "holds"
    both = evaluate_claims(
        joined(Sheet("encoder-12x512").add("svd_ratio", flat()), Sheet("decoder-12x256").add("svd_ratio", bell())),
        ["decoders_bell_encoders_flat"],
    )[0]
    assert both.status == "undecided" and "no decoder of 12 blocks and width 512" in both.why


def test_a_model_with_two_stacks_has_two_verdicts() -> None:
    sheets = [
        Sheet("t5", stack=stack, number=seed, entropy=seed).add("svd_ratio", truth)
        for seed, (stack, truth) in itertools.product(range(3), {"encoder": flat(), "decoder": bell()}.items())
    ]
    found = {v.subject: v for v in evaluate_claims(joined(*sheets[:2]), ["bell_shaped"])}
    assert {name: v.status for name, v in found.items()} == {"t5, decoder stack": "holds", "t5, encoder stack": "fails"}
    assert {v.details["seed"] for v in found.values()} == {0}
    pair = evaluate_claims(joined(*sheets, types={"t5": "encoder-decoder"}), ["decoders_bell_encoders_flat"])[0]
    assert pair.status == "holds", pair.why


# decoders and encoders

PAIR = "decoders_bell_encoders_flat"


def kinds(shapes: dict[str, Truth], types: dict[str, str]) -> Verdict:
    sheets = [
        Sheet(name, number=seed, entropy=(seed, i)).add("svd_ratio", truth)
        for seed, (i, (name, truth)) in itertools.product(range(3), enumerate(shapes.items()))
    ]
    return evaluate_claims(joined(*sheets, types=types), [PAIR])[0]


def test_every_decoder_must_be_a_bell_and_every_encoder_flat() -> None:
    types = {"gpt2": "decoder", "opt": "decoder", "bert": "encoder"}
    good: dict[str, Truth] = {"gpt2": bell(), "opt": bell(at=0.4), "bert": flat()}
    found = kinds(good, types)
    assert found.status == "holds" and "in 2 of 2 decoders" in found.why and "in 1 of 1 encoder" in found.why
    one_bad = kinds(good | {"opt": flat()}, types)
    assert one_bad.status == "fails" and "1 of 2 decoders (opt is not)" in one_bad.why
    assert kinds(good | {"bert": bell()}, types).status == "fails"
    swapped = kinds(good, {"gpt2": "encoder", "opt": "encoder", "bert": "decoder"})
    assert swapped.status == "fails", "the counter-test: who is who matters"


def test_one_kind_alone_or_kinds_unknown_are_said() -> None:
    alone = kinds({"gpt2": bell()}, {"gpt2": "decoder"})
    assert alone.status == "undecided" and alone.details["missing"] and "measure an encoder too" in alone.why
    unknown = kinds({"a": bell(), "b": flat()}, {})
    assert unknown.status == "undecided" and "not known what a and b are" in unknown.why
    partly = kinds({"a": bell(), "b": flat(), "c": bell()}, {"a": "decoder", "b": "encoder"})
    assert partly.status == "holds" and "not known what c" in partly.why and partly.details["unknown"] == ["c"]


def test_arms_say_themselves_what_they_are_and_causal_masked_is_neither() -> None:
    shapes: dict[str, Truth] = {
        "causal-next-12x512": bell(), "causal-masked-12x512": RISING, "bidirectional-masked-12x512": flat(),
    }  # fmt: skip
    found = kinds(shapes, dict.fromkeys(shapes, "decoder"))
    assert found.status == "holds", found.why
    assert found.details["models"] == {"decoder": ["causal-next-12x512"], "encoder": ["bidirectional-masked-12x512"]}
    named = kinds({"decoder-flat": bell(), "encoder": flat(), "encoderless": bell()}, {})
    assert named.details["models"] == {"decoder": ["decoder-flat"], "encoder": ["encoder"]}
    assert named.details["unknown"] == ["encoderless"]


def test_three_seeds_decide_together() -> None:
    def table(seeds: int, heights: tuple[float, ...]) -> list[Verdict]:
        sheets = [Sheet(number=i, entropy=i).add("svd_ratio", bell(heights[i])) for i in range(seeds)]
        return evaluate_claims(joined(*sheets), ["bell_shaped"])

    pooled, *single = table(3, (0.15, 0.16, 0.14))
    assert pooled.status == "holds" and pooled.scope == "over 3 seeds" and len(single) == 3
    assert table(3, (0.15, 0.4, 0.07))[0].status == "undecided", "the seeds scatter"
    assert "needs 3" in table(2, (0.15, 0.16))[0].why
    assert [v.scope for v in table(1, (0.15,))] == ["for this model"]


def test_a_model_measured_at_stages_is_not_told_to_measure_again() -> None:
    sheet = Sheet(layers=4).add("svd_ratio", bell(), kind="stage")
    for found in evaluate_claims(joined(sheet), ["bell_shaped"]):
        assert found.details["missing"] and "measured at the ends of stages" in found.why
    bare = evaluate_claims(joined(Sheet(layers=4).add("average_cosine", bell())), ["bell_shaped"])[0]
    assert "measure it with --metrics svd_ratio" in bare.why, "the counter-test"
