"""The causal ablation, clusters and estimators: effects with their sign, seeds, and what the table lacks."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anisoscope.claims.catalogue import claims, evaluate_claims
from anisoscope.claims.engine.claim import Verdict, verdicts_to_dicts
from anisoscope.claims.engine.evidence import arm_of, model_roles
from anisoscope.commands.drawing import joint_table
from anisoscope.results.folder import RunFolder
from anisoscope.results.quantity import correlate
from anisoscope.results.query import Table
from anisoscope.view.sections.findings import unmeasured
from anisoscope.view.verdict_grid import verdict_grid
from support.fake_profiles import Sheet, Truth, bell, flat, joined

ARMS = ("causal-next", "causal-masked", "bidirectional-masked")
Levels = tuple[float, float, float]
LEVELS: Levels = (0.3, 0.2, 0.1)


def arms(
    levels: Levels = LEVELS, *, seeds: int = 3, scatter: float = 0.0, size: str = "6x256", **more: Any
) -> list[Sheet]:
    """Runs of the three arms; arms of one seed share its luck, so that their difference does not."""
    random = np.random.default_rng(0)
    sheets = []
    for seed in range(seeds):
        luck = random.normal()
        for i, (name, level) in enumerate(zip(ARMS, levels, strict=True)):
            at = level + scatter * luck + 0.1 * scatter * random.normal()
            options = {"layers": 6, "steps": (0, 100), "entropy": (seed, i), "noise": 0.001, **more}
            sheet = Sheet(f"{name}-{size}", number=seed, **options).add("svd_ratio", at)
            sheet.add("svd_ratio_squared", at / 2).add("two_nn", 10.0 + i)
            sheet.add("attention_sharpness", 0.5 - 0.1 * i, kind="scores")
            for head in (0, 1):
                sheet.add("attention_sharpness", 9.0, kind="scores", head=head)  # the mean over heads has no head
            sheets.append(sheet.add("attention_entropy", 0.4 + 0.1 * i, kind="scores"))
    return sheets


def effect(claim: str, sheets: list[Sheet]) -> list[Verdict]:
    """The verdicts over seeds, one for each size."""
    return evaluate_claims(joined(*sheets), [claim])


def parts(found: Verdict) -> dict[str, dict[str, Any]]:
    return {part["name"]: part for part in found.details["parts"]}


EFFECTS: list[tuple[str, Levels, dict[str, Any], str]] = [
    ("mask_effect", LEVELS, {}, "holds"),
    ("mask_effect", (0.3, 0.1, 0.2), {}, "fails"),  # the other way round
    ("mask_effect", (0.3, 0.1, 0.1), {}, "fails"),
    ("mask_effect", (0.3, 0.16, 0.1), {"noise": 0.03, "common": 0.0}, "undecided"),
    ("objective_effect", LEVELS, {}, "holds"),
    ("objective_effect", (0.2, 0.3, 0.1), {}, "fails"),
    ("objective_effect", (0.2, 0.2, 0.1), {}, "fails"),
    ("objective_effect", (0.26, 0.2, 0.1), {"noise": 0.03, "common": 0.0}, "undecided"),
]


@pytest.mark.parametrize(("claim", "levels", "more", "status"), EFFECTS)
def test_effects_are_told_as_planted(claim: str, levels: Levels, more: dict[str, Any], status: str) -> None:
    (found,) = effect(claim, arms(levels, **more))
    assert found.status == status, found.why
    assert found.why.endswith(".") and ". " not in found.why and found.scope == "over 3 seeds"


@pytest.mark.parametrize("claim", ["mask_effect", "objective_effect"])
def test_two_trainings_that_differ_by_luck_decide_nothing(claim: str) -> None:
    """Their intervals over contexts are narrow: .09 to .24 of such pairs held before."""
    for levels in (LEVELS, (0.1, 0.2, 0.3)):
        (found,) = effect(claim, arms(levels, seeds=1))
        assert found.status == "undecided" and "one seed decides nothing" in found.why
        assert found.scope == "for these two runs only" and found.high - found.low < 0.1


def test_the_sign_is_that_of_the_definition_and_the_sentence_tells_both_ways() -> None:
    (mask,) = effect("mask_effect", arms())
    told = parts(mask)
    assert told["svd_ratio"]["effect"] == pytest.approx(-0.1, abs=0.005)  # bidirectional − causal
    assert mask.effect == pytest.approx(0.5, abs=0.02) and mask.subject == "6x256"  # half of 0.2 is gone: a fall
    assert "it falls by " in mask.why and "the mask effect (bidirectional-masked − causal-masked) is −0.1" in mask.why
    for metric, value in (("two_nn", 1.0), ("attention_sharpness", -0.1), ("attention_entropy", 0.1)):
        assert told[metric]["effect"] == pytest.approx(value, abs=0.005)
        assert told[metric]["low"] <= told[metric]["effect"] <= told[metric]["high"]
    (objective,) = effect("objective_effect", arms((0.2, 0.3, 0.1)))
    assert parts(objective)["svd_ratio"]["effect"] == pytest.approx(0.1, abs=0.005)  # masked − next
    assert "it rises by " in objective.why and "against the claim and by more than the margin" in objective.why
    assert objective.effect == pytest.approx(-0.5, abs=0.02)


def planted(before: float, after: float, *, squared: tuple[float, float] | None = None, **more: Any) -> Verdict:
    """The mask's pair alone, in three seeds that are alike but for noise."""
    sheets = []
    for seed, (i, name) in itertools.product(range(3), enumerate(ARMS[1:])):
        options = {"layers": 6, "steps": (100,), "entropy": (seed, i), "noise": 0.0003, "number": seed, **more}
        sheet = Sheet(f"{name}-6x256", **options).add("svd_ratio", (before, after)[i])
        sheets.append(sheet.add("svd_ratio_squared", squared[i]) if squared else sheet)
    return effect("mask_effect", sheets)[0]


def test_next_to_no_effect_is_said_of_next_to_no_effect_only() -> None:
    nothing = planted(0.1, 0.1, squared=(0.05, 0.05))
    assert nothing.status == "fails" and "next to no effect" in nothing.why
    grown = planted(0.0307, 0.0538, squared=(0.1, 0.27))
    assert grown.status == "fails" and "it rises by 7" in grown.why and "against the claim" in grown.why
    little = planted(0.1, 0.11, squared=(0.05, 0.05))
    assert "against the claim and by less than the margin of 20 %" in little.why
    less = planted(0.1, 0.09, squared=(0.05, 0.05))
    assert less.status == "fails" and "it falls by " in less.why and "by less than the margin of 20 %" in less.why
    other = planted(0.1, 0.1, squared=(0.05, 0.2))  # the other formula sees one
    unknown = planted(0.1, 0.1)
    wide = planted(0.1, 0.1, squared=(0.05, 0.05), noise=0.02, common=0.0)
    for found in (grown, little, less, other, unknown, wide):
        assert "next to no effect" not in found.why
    for found in (other, unknown, wide):
        assert "cannot be told from nothing" in found.why


@pytest.mark.parametrize("scale", [1.0, 0.1])
def test_the_margin_is_relative_so_that_small_numbers_can_fall_too(scale: float) -> None:
    status = {share: planted(0.3 * scale, 0.3 * scale * (1 - share), noise=1e-4 * scale).status for share in (0.1, 0.5)}
    assert status == {0.1: "fails", 0.5: "holds"}
    assert claims()["mask_effect"].margin == 0.2 and "fifth" in claims()["mask_effect"].statement


def test_what_the_mask_does_before_any_training_is_told() -> None:
    def course(start: float, end: float) -> Truth:
        return lambda step, depth: end if step else start

    def found(steps: tuple[int, ...]) -> Verdict:
        truths = {"causal-masked": course(0.1, 0.4), "bidirectional-masked": course(0.13, 0.2)}
        sheets = [
            Sheet(f"{name}-2x8", layers=4, steps=steps, number=seed, entropy=seed).add("svd_ratio", truth)
            for seed, (name, truth) in itertools.product(range(3), truths.items())
        ]
        return effect("mask_effect", sheets)[0]

    told = found((0, 100))
    assert parts(told)["svd_ratio at step 0"]["effect"] == pytest.approx(0.03, abs=0.005)
    assert "at step 0, before any training, 0.03" in told.why and told.status == "holds"
    later = found((50, 100))
    assert "svd_ratio at step 0" not in parts(later) and "step 0" not in later.why


def without(sheets: list[Sheet], *cells: tuple[str, int, int, int, str]) -> Table:
    """All rows but those of some (model, seed, step, layer, metric)."""
    rows = [r for sheet in sheets for r in sheet.rows]
    return Table.from_records(
        [r for r in rows if (r["model"], r["seed"], r["step"], r["layer"], r["metric"]) not in cells]
    )


def test_a_pair_is_compared_where_all_blocks_of_both_arms_are() -> None:
    sheets = arms(steps=(0, 50, 100), seeds=1)
    (whole,) = effect("mask_effect", sheets)
    assert whole.details["step"] == 100 and "mean over 6 blocks at step 100" in whole.why
    gap = ("bidirectional-masked-6x256", 0, 100, 4, "svd_ratio")
    (earlier,) = evaluate_claims(without(sheets, gap), ["mask_effect"])
    assert earlier.details["step"] == 50 and earlier.details["blocks"] == 6
    assert {len(rows) for rows in earlier.details["layers"].values()} == {6}, "one step for all metrics"
    (told,) = evaluate_claims(without(sheets, (*gap[:4], "two_nn")), ["mask_effect"])
    assert told.details["step"] == 100 and "two_nn" not in parts(told) and "two_nn" in parts(earlier)
    (refused,) = evaluate_claims(without(sheets, gap, (*gap[:2], 50, *gap[3:])), ["mask_effect"])
    assert refused.status == "undecided" and "all 6 blocks of both arms" in refused.why, "step 0 is no result"


def test_seeds_that_end_at_different_steps_are_compared_at_the_last_one_they_share() -> None:
    rising: Truth = lambda step, depth: 0.1 + step / 1000  # noqa: E731

    def table(*ends: tuple[int, ...]) -> Table:
        sheets = []
        for seed, steps in enumerate(ends):
            for i, name in enumerate(ARMS[1:]):
                truth: Truth = (lambda step, depth: 0.05) if i else rising
                options = {"layers": 6, "entropy": (seed, i), "noise": 0.001, "number": seed}
                sheets.append(Sheet(f"{name}-6x256", steps=steps, **options).add("svd_ratio", truth))
        return joined(*sheets)

    mixed = table((0, 100, 200), (0, 100, 200), (0, 50, 100))
    pooled, *single = evaluate_claims(mixed, ["mask_effect"])
    assert pooled.status == "holds" and pooled.details["step"] == 100 and "at step 100" in pooled.why
    assert "step 100 is the last that all 3 seeds have" in pooled.why
    assert pooled.effect == pytest.approx(0.75, abs=0.01), "0.05 of 0.2 in every seed"
    assert not single and len(pooled.details["per_seed"]) == 3
    same = evaluate_claims(table(*3 * [(0, 100, 200)]), ["mask_effect"])[0]
    assert same.details["step"] == 200 and "is the last that" not in same.why
    apart = evaluate_claims(table((0, 200), (0, 200), (0, 100)), ["mask_effect"])
    assert apart[0].status == "undecided" and "(200, 200 and 100) and share none" in apart[0].why
    grows = evaluate_claims(mixed, ["anisotropy_grows"])[0]
    assert grows.details["step"] == 100 and "up to step 100" in grows.why
    shapes = evaluate_claims(mixed, ["bell_shaped"])
    assert all("at step 100" in v.why for v in shapes if v.details["pooled"])
    both = evaluate_claims(table((200,), (100,), (50,)), ["bell_shaped"])
    assert all(v.status == "undecided" and "end at different steps" in v.why for v in both if v.details["pooled"])
    assert {v.status for v in both if not v.details["pooled"]} == {"fails"}, "each by itself"


def test_a_claim_about_several_models_says_where_their_seeds_ended() -> None:
    def told(last: int) -> str:
        sheets = []
        for seed, end in enumerate((200, 200, last)):
            options = {"number": seed, "entropy": seed, "steps": (0, end)}
            sheets.append(Sheet("decoder", **options).add("svd_ratio", bell()))
            sheets.append(Sheet("encoder", **{**options, "steps": (0, 200)}).add("svd_ratio", flat()))
        return evaluate_claims(joined(*sheets), ["decoders_bell_encoders_flat"])[0].why

    assert "judged at different steps, those of decoder at steps 200, 200 and 100" in told(100)
    assert "different steps" not in told(200)


def test_only_the_last_step_and_the_blocks_count() -> None:
    def late(level: float) -> Truth:
        return lambda step, depth: level if step == 100 else 0.9 - level

    sheets = [
        Sheet(f"{n}-2x8", layers=6, steps=(0, 100), number=seed, entropy=seed).add("svd_ratio", late(x))
        for seed, (n, x) in itertools.product(range(3), zip(ARMS, LEVELS, strict=True))
    ]
    (found,) = effect("mask_effect", sheets)
    assert found.status == "holds" and found.details["step"] == 100


def test_three_seeds_decide_by_their_scatter() -> None:
    sheets = arms(scatter=0.02)
    (pooled,) = effect("mask_effect", sheets)
    assert pooled.status == "holds" and pooled.scope == "over 3 seeds"
    single = [effect("mask_effect", sheets[3 * seed : 3 * seed + 3])[0] for seed in range(3)]
    gaps = [v.effect for v in single]
    assert gaps == pytest.approx([each["effect"] for each in pooled.details["per_seed"]], rel=1e-7)
    assert pooled.effect == pytest.approx(np.mean(gaps), rel=1e-6)
    assert pooled.high - pooled.effect == pytest.approx(4.303 * np.std(gaps, ddof=1) / math.sqrt(3), rel=1e-3)
    assert parts(pooled)["two_nn"]["effect"] == pytest.approx(1.0, abs=0.01)
    # arms of a seed share its luck: paired, the scatter of seeds cancels; unpaired it would not
    levels, differences = ([parts(v)[name]["effect"] for v in single] for name in ("causal-masked", "svd_ratio"))
    assert np.std(levels) > 2 * np.std(differences)
    assert effect("mask_effect", arms(seeds=3, scatter=0.5))[0].status == "undecided"
    (two,) = effect("mask_effect", arms(seeds=2))
    assert two.status == "undecided" and "needs 3" in two.why
    (one,) = effect("mask_effect", arms(seeds=1))
    assert one.status == "undecided" and one.details["paired"]


def test_sizes_are_judged_apart_and_a_missing_arm_is_said() -> None:
    sheets = arms() + arms((0.3, 0.1, 0.2), size="12x512")
    found = {v.subject: v.status for v in effect("mask_effect", sheets)}
    assert found == {"6x256": "holds", "12x512": "fails"}
    without_third = [sheet for sheet in arms() if not sheet.model.startswith("bidirectional")]
    alone = effect("mask_effect", without_third)[0]
    assert alone.status == "undecided" and alone.details["missing"] and "bidirectional-masked" in alone.why
    assert effect("objective_effect", without_third)[0].status == "holds", "the counter-test: the other pair is there"


def test_arms_on_other_contexts_are_not_paired() -> None:
    three = arms(noise=0.01, common=0.95, seeds=1)
    for sheet in three:  # the same luck of the contexts in all arms
        sheet.rows = [dict(r) for r in sheet.rows]
    other = [{**r, "contexts": 64} if r["model"].startswith("bidirectional") else r for s in three for r in s.rows]
    found = evaluate_claims(Table.from_records(other), ["mask_effect"])[0]
    assert found.details["paired"] is False
    assert evaluate_claims(joined(*three), ["mask_effect"])[0].details["paired"] is True
    fewer = [{**r, "n": 8990} if r["model"].startswith("bidirectional") else r for s in three for r in s.rows]
    assert evaluate_claims(Table.from_records(fewer), ["mask_effect"])[0].details["paired"] is True, "a few duplicates"


def test_arms_measured_without_steps_are_compared_too() -> None:
    assert effect("mask_effect", arms(steps=(None,)))[0].status == "holds"


def test_svd_ratio_not_measured_is_missing() -> None:
    rows = [r for sheet in arms() for r in sheet.rows if r["metric"] != "svd_ratio"]
    found = evaluate_claims(Table.from_records(rows), ["mask_effect", "objective_effect"])
    assert {v.status for v in found} == {"undecided"} and all(v.details["missing"] for v in found)


def test_roles_come_from_the_record_the_arms_or_the_names() -> None:
    names = ("gpt2", "decoder-flat", "causal-next-6x256", "causal-masked-6x256", "bidirectional-masked-6x256 (a)", "x")
    table = joined(*(Sheet(n, layers=1).add("svd_ratio", 0.1) for n in names), types={"gpt2": "decoder", "x": "rows"})
    assert model_roles(table) == {
        "gpt2": "decoder", "decoder-flat": "decoder", "causal-next-6x256": "decoder", "causal-masked-6x256": "neither",
        "bidirectional-masked-6x256 (a)": "encoder",
    }  # fmt: skip
    assert arm_of("causal-next") is None and arm_of("my-causal-next-6x256") is None


# clusters


def local(clusters: float, drawn: float, whole: float, **more: Any) -> Verdict:
    sheet = Sheet(layers=4, **more).add("local_anisotropy", clusters)
    sheet.add("local_anisotropy", drawn, variant="partition=random").add(
        "local_anisotropy", whole, variant="partition=none"
    )
    return evaluate_claims(joined(sheet), ["locally_isotropic"])[0]


@pytest.mark.parametrize(
    ("numbers", "more", "status"),
    [((0.1, 0.5, 0.5), {}, "holds"), ((0.5, 0.5, 0.5), {}, "fails"), ((0.1, 0.12, 0.5), {}, "fails"),
     ((0.01, 0.08, 0.08), {}, "fails"), ((0.1, 0.17, 0.17), {"noise": 0.05, "common": 0.0}, "undecided"),
     ((0.6, 0.5, 0.5), {}, "fails")],
)  # fmt: skip
def test_local_isotropy_needs_both_controls_and_a_whole_that_is_anisotropic(
    numbers: Levels, more: dict[str, Any], status: str
) -> None:
    found = local(*numbers, **more)
    assert found.status == status, found.why


def test_a_cosine_or_a_partition_that_is_missing_decides_nothing() -> None:
    assert "average_cosine" not in claims()["locally_isotropic"].metrics
    found = evaluate_claims(joined(Sheet(layers=4).add("local_anisotropy", 0.1)), ["locally_isotropic"])[0]
    assert found.status == "undecided" and "partition=random" in found.why and not found.details["missing"]


# estimators


def test_estimators_agree_where_their_profiles_do() -> None:
    def table(third: Truth, noise: float = 0.02) -> Table:
        sheet = Sheet(noise=noise).add("two_nn", bell(4, base=8, at=0.3)).add("levina_bickel", bell(3, base=6, at=0.3))
        return joined(sheet.add("gride", third))

    good = evaluate_claims(table(bell(5, base=7, at=0.3)), ["estimators_agree"])[0]
    assert good.status == "holds" and good.effect > 0.9
    bad = evaluate_claims(table(lambda step, depth: 9 - bell(2, base=1, at=0.3)(step, depth)), ["estimators_agree"])[0]
    assert bad.status == "fails" and "GRIDE" in bad.why
    assert evaluate_claims(table(flat(8)), ["estimators_agree"])[0].status != "holds"
    constant = evaluate_claims(joined(Sheet(noise=0.0).add("two_nn", 8.0).add("gride", 7.0)), ["estimators_agree"])[0]
    assert constant.status == "undecided" and "no number" in constant.why


def test_rank_correlation_is_spearmans() -> None:
    from scipy.stats import spearmanr

    random = np.random.default_rng(0)
    for _ in range(5):
        one, two = random.integers(0, 6, size=(2, 12)).astype(float)
        assert correlate(one.tolist(), two.tolist(), "spearman") == pytest.approx(spearmanr(one, two).statistic)
    assert math.isnan(correlate([1.0, 1.0], [1.0, 2.0], "spearman"))


# any table


def test_a_table_of_anything_is_judged_and_what_it_lacks_is_one_line() -> None:
    found = verdicts_to_dicts(evaluate_claims(joined(Sheet().add("svd_ratio", bell()))))
    assert {v["claim"] for v in found} == set(claims())
    grid = verdict_grid(found, claims())
    assert grid is not None
    shown = [row.name for _, _, rows in grid.papers for row in rows]
    assert shown == ["bell_shaped"]
    assert set(unmeasured(found)) == set(claims()) - set(shown)
    assert grid.tally == "The verdict: holds."
    assert len(grid.missing) == len(claims()) - 1 and all(why for _, why in grid.missing)
    empty = verdicts_to_dicts(evaluate_claims(Table.from_records([])))
    assert all(v["details"]["missing"] for v in empty) and verdict_grid(empty) is None


def test_a_claim_tested_on_one_model_only_names_the_other() -> None:
    table = joined(Sheet("a").add("svd_ratio", bell()), Sheet("b").add("two_nn", 8.0))
    found = verdicts_to_dicts(evaluate_claims(table, ["bell_shaped"]))
    assert unmeasured(found) == ["bell_shaped (b)"]
    grid = verdict_grid(found)
    assert grid is not None
    assert grid.columns == ["a"]


def test_runs_joined_keep_what_they_know_of_their_models(tmp_path: Path) -> None:
    """Two folders with models of one name: the roles follow the new names."""
    for name, kind, truth in (("one", "decoder", bell()), ("two", "encoder", flat())):
        folder = RunFolder.create(tmp_path / name, {}, resume=False)
        folder.write_about({"models": [{"name": "m", "type": kind}]})
        seeds = [Sheet("m", number=seed, entropy=seed).add("svd_ratio", truth) for seed in range(3)]
        folder.write_table(joined(*seeds))
    table = joint_table([RunFolder.open(tmp_path / name) for name in ("one", "two")])
    assert model_roles(table) == {"m (one)": "decoder", "m (two)": "encoder"}
    found = evaluate_claims(table, ["decoders_bell_encoders_flat"])[0]
    assert found.status == "holds", found.why
