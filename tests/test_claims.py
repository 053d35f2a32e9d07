"""Verdicts: planted effects are found, absent ones are not, and what cannot be told stays open."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from anisoscope.claims.claim import (
    Verdict,
    claims,
    evaluate_claims,
    verdicts_from_dicts,
    verdicts_to_dicts,
)
from anisoscope.claims.part import Part, agreement, judge
from anisoscope.claims.quantity import Quantity, mean
from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.estimate import jackknife
from anisoscope.runs.table import Table
from fake_training import NULL, edited, table

ENERGY = ("gradient_energy", "gradient_enrichment", "gradient_p", "gradient_p_holm")


def verdict(claim: str, **effects: Any) -> Verdict:
    """The first verdict on a claim, on a table of the metrics it reads."""
    return evaluate_claims(table(**{"only": claims()[claim].metrics, **effects}), [claim])[0]


# planted, absent, and too noisy to tell

BOTH = {"models": ("decoder", "encoder")}
ARMS = {"models": ("decoder", "decoder-flat")}
CASES = [
    ("tangent_energy", {}, "holds"),
    ("tangent_energy", {"strength": 0.0}, "fails"),
    ("tangent_energy", {"strength": 0.15, "noise": 0.15}, "undecided"),
    ("tangent_energy", {"permuted": 1.0}, "fails"),  # the coordinates' own variances explain all of it
    ("tangent_energy", {"next": 1.0}, "fails"),
    ("anisotropy_share", {}, "holds"),
    ("anisotropy_share", {"strength": 0.0}, "fails"),
    ("anisotropy_share", {"share": 0.07, "noise": 0.1}, "undecided"),
    ("anisotropy_share", {"below": True}, "fails"),
    ("anisotropy_share", {"gain": 0.0}, "undecided"),  # the second measure does not confirm it
    ("emerges_early_and_persists", {}, "holds"),
    ("emerges_early_and_persists", {"strength": 0.0}, "fails"),
    ("emerges_early_and_persists", {"start": 1.0}, "fails"),
    ("emerges_early_and_persists", {"start": 0.4}, "fails"),  # it grows and stays, but was there before training
    ("emerges_early_and_persists", {"start": 0.07, "noise": 0.05}, "undecided"),
    ("emerges_early_and_persists", {"onset": 2000.0}, "fails"),
    ("emerges_early_and_persists", {"fade": 1.0}, "fails"),
    ("emerges_early_and_persists", {"strength": 0.12, "noise": 0.2}, "undecided"),
    ("frequent_most_enriched", {}, "holds"),
    ("frequent_most_enriched", {"frequency": 0.0}, "fails"),
    ("frequent_most_enriched", {"frequency": -0.5}, "fails"),
    ("frequent_most_enriched", {"balanced": 0.0}, "fails"),  # an effect of fitting frequent rows, no more
    ("frequent_most_enriched", {"frequency": 0.12, "noise": 0.2}, "undecided"),
    ("embedding_updates_aligned", {}, "holds"),
    ("embedding_updates_aligned", {"update": 0.0}, "fails"),
    ("embedding_updates_aligned", {"update": 0.03, "noise": 0.15}, "undecided"),
    ("amplified", {}, "holds"),
    ("amplified", {"amplification": 0.0}, "fails"),
    ("amplified", {"amplification": 0.05, "noise": 0.1}, "undecided"),
    ("rare_tokens_spread", {}, "holds"),
    ("rare_tokens_spread", {"spread": 0.4}, "fails"),
    ("rare_tokens_spread", {"spread_time": 0.0}, "fails"),
    ("rare_tokens_spread", {"spread": -0.12}, "undecided"),
    ("rare_tokens_spread", {"spread_normalised": 0.3}, "undecided"),  # a matter of the norm
    ("rare_tokens_spread", {"spread": 0.3, "spread_time": 0.3, "spread_normalised": -0.3}, "undecided"),
    ("rare_tokens_spread", {"spread": 0.3, "spread_normalised": 0.3}, "fails"),
    ("encoder_and_decoder", BOTH, "holds"),
    ("encoder_and_decoder", {**BOTH, "strength": 0.0}, "fails"),
    ("encoder_and_decoder", {**BOTH, "masked": 0.0}, "undecided"),  # on unmasked rows only
    ("encoder_and_decoder", {**BOTH, "masked": 0.0, "unmasked": 0.0}, "fails"),
    ("semi_nmf_beats_pca", {"pca": -0.05}, "holds"),
    ("semi_nmf_beats_pca", {"pca": 0.0}, "fails"),
    ("semi_nmf_beats_pca", {"pca": 0.05}, "fails"),
    ("semi_nmf_beats_pca", {"pca": -0.02, "noise": 0.2}, "undecided"),
    ("frequency_intervention", ARMS, "holds"),
    ("frequency_intervention", {**ARMS, "flat": 1.0, "scatter": 0.01, "seed_sd": 0.0}, "fails"),
    ("frequency_intervention", {**ARMS, "flat": 0.87, "noise": 0.3, "seed_sd": 0.0}, "undecided"),
    ("frequency_intervention", {}, "undecided"),  # no second arm
]


@pytest.mark.parametrize(("claim", "effects", "status"), CASES)
def test_a_claim_is_decided_as_it_was_planted(claim: str, effects: dict[str, Any], status: str) -> None:
    found = verdict(claim, **effects)
    assert found.status == status, found.why
    if status == "holds":
        assert found.low > found.margin
    if status == "fails":
        assert found.high < found.margin


_HOMES = ("tangent", "training", "frequency", "comparison")
TANGENT = [n for n, c in claims().items() if c.function.__module__.rpartition(".")[2] in _HOMES]


def test_every_claim_was_planted_in_all_three_ways() -> None:
    """Those about depth and training are planted in test_claims_shape, _phases and _ablation."""
    for name in TANGENT:
        assert {status for claim, _, status in CASES if claim == name} == {"holds", "fails", "undecided"}, name


@pytest.mark.parametrize("effects", [{}, NULL, {"noise": 0.2}], ids=["planted", "null", "noisy"])
def test_why_is_one_sentence_with_its_numbers(effects: dict[str, Any]) -> None:
    found = evaluate_claims(table(models=("decoder", "encoder", "decoder-flat"), **effects))
    assert {v.claim for v in found} == set(claims())
    for v in found:
        assert v.why.endswith(".") and ". " not in v.why and v.why[0].isupper() | v.why[0].isdigit(), v.why
        assert "nan" not in v.why and "unknown" not in v.why and "{" not in v.why, v.why
        assert any(letter.isdigit() for letter in v.why) or v.details["missing"], v.why


# the numbers


def test_the_effect_equals_an_independent_count_from_the_records() -> None:
    """A slow twin of `tangent_energy`: loops over plain records."""
    given = table(permuted=0.5)
    plain = "fit=refit;proxy=semi_nmf;rank=16"
    rows = [r for r in given.records() if r["metric"] in ENERGY and r["group"] == "" and r["step"]]
    cells = sorted({(r["step"], r["layer"], r["kind"]) for r in rows})

    def at(metric: str, variant: str) -> list[dict[str, Any]]:
        found = {
            (r["step"], r["layer"], r["kind"]): r for r in rows if (r["metric"], r["variant"]) == (metric, variant)
        }
        return [found[cell] for cell in cells]

    energy, enrichment = at("gradient_energy", plain), at("gradient_enrichment", plain)
    permuted = at("gradient_energy", f"control=permuted;{plain}")
    chance = np.array([e["value"] / n["value"] for e, n in zip(energy, enrichment, strict=True)])
    values = np.array([e["value"] - c["value"] for e, c in zip(energy, permuted, strict=True)]) / chance
    folds = np.array([np.subtract(e["replicates"], c["replicates"]) for e, c in zip(energy, permuted, strict=True)])
    folds = (folds / chance[:, None]).mean(0)
    half = 2.365 * math.sqrt(7 / 8 * ((folds - folds.mean()) ** 2).sum())
    found = evaluate_claims(given, ["tangent_energy"])[0]
    assert found.effect == pytest.approx(values.mean(), rel=1e-9)
    assert (found.low, found.high) == pytest.approx((values.mean() - half, values.mean() + half), rel=1e-9)
    assert found.p == pytest.approx(min(r["value"] for r in at("gradient_p_holm", plain) if r["step"] == 1000))


def _layers(generator: np.random.Generator, count: int = 6) -> list[Quantity]:
    """Layers that see the same contexts: their errors move together."""
    shared = generator.normal(size=8)
    found = []
    for _ in range(count):
        folds = shared + 0.3 * generator.normal(size=8)
        found.append(Quantity(folds.mean(), tuple((folds.sum() - folds) / 7)))
    return found


def test_an_average_over_layers_keeps_an_honest_interval() -> None:
    generator = np.random.default_rng(0)
    covered = independent = 0
    for _ in range(400):
        layers = _layers(generator)
        low, high = mean(layers).interval()
        covered += low <= 0 <= high
        half = math.sqrt(sum(((q.interval()[1] - q.interval()[0]) / 2) ** 2 for q in layers)) / len(layers)
        independent += abs(mean(layers).value) <= half
    assert 0.92 <= covered / 400 <= 0.98
    assert independent / 400 < 0.8, "the counter-test: taking layers for independent is too narrow"


def test_without_folds_an_average_is_at_least_as_wide() -> None:
    layers = _layers(np.random.default_rng(1))
    bare = [Quantity(q.value, half=(q.interval()[1] - q.interval()[0]) / 2) for q in layers]
    wide, narrow = mean(bare).interval(), mean(layers).interval()
    assert wide[1] - wide[0] >= narrow[1] - narrow[0]
    assert mean(bare).value == pytest.approx(mean(layers).value)


def test_a_difference_is_paired_fold_by_fold() -> None:
    folds = np.random.default_rng(2).normal(size=8)
    one = Quantity(1.0, tuple(1 + folds))
    two = Quantity(0.2, tuple(0.2 + folds))
    assert (one - two).interval() == pytest.approx((0.8, 0.8))
    unpaired = Quantity(0.2, half=(two.interval()[1] - two.interval()[0]) / 2)
    low, high = (one - unpaired).interval()
    alone = jackknife(1.0, one.folds, bounds=(None, None))
    assert high - low == pytest.approx(math.sqrt(2) * (alone[1] - alone[0]))


def test_folds_without_contexts_do_not_count() -> None:
    """Only folds live in all terms, and as many degrees of freedom as they give."""
    generator = np.random.default_rng(3)
    one, two = ([*map(float, 1 + 0.1 * generator.normal(size=8))] for _ in range(2))
    one[0] = two[5] = math.nan
    live = [j for j in range(8) if j not in (0, 5)]
    ours, theirs = Quantity(1.0, tuple(one)), Quantity(0.9, tuple(two))
    gaps, ratios = [one[j] - two[j] for j in live], [one[j] / two[j] for j in live]
    for found, folds in (
        (ours - theirs, gaps),
        (ours.over(theirs), ratios),
        (mean([ours, -theirs]), np.divide(gaps, 2)),
    ):
        half = 2.571 * math.sqrt(5 / 6 * ((np.array(folds) - np.mean(folds)) ** 2).sum())
        assert found.interval() == pytest.approx((found.value - half, found.value + half))
    for count, there in ((3, True), (2, False), (0, False)):
        thin = Quantity(1.0, tuple(one[1 : 1 + count]) + (math.nan,) * (8 - count))
        assert math.isfinite(thin.interval()[0]) is there and thin.thin is not there
        full = Quantity(1.0, tuple(1 + 0.1 * generator.normal(size=8)))
        assert (mean([thin, full]).thin, (thin - Quantity(0.1, half=0.1)).thin) == (not there, not there)


def _dead(r: dict[str, Any], folds: int, group: str = "") -> dict[str, Any]:
    """The last folds hold no context of a group, which therefore have no leave-one-out value."""
    if r["replicates"] is None or r["group"] != group:
        return r
    live = 8 - folds
    return {**r, "replicates": [*r["replicates"][:live], *[math.nan] * folds]}


@pytest.mark.parametrize(("dead", "strength", "status"), [
    (0, 1.0, "holds"), (4, 1.0, "holds"), (4, 0.0, "fails"), (5, 1.0, "holds"), (6, 1.0, "undecided"),
    (8, 0.0, "undecided"),
])  # fmt: skip
def test_too_few_contexts_leave_a_claim_open_and_say_so(dead: int, strength: float, status: str) -> None:
    given = table(only=ENERGY, strength=strength, noise=0.002)
    found = evaluate_claims(edited(given, lambda r: _dead(r, dead)), ["tangent_energy"])[0]
    assert found.status == status, found.why
    assert ("too few contexts" in found.why) == (status == "undecided")


def test_a_rare_bin_in_two_folds_has_no_interval() -> None:
    given = table(only=("gradient_enrichment",), noise=0.002)
    few, enough = (edited(given, lambda r, n=n: _dead(r, n, "frequency:5")) for n in (6, 4))
    one, two = (evaluate_claims(t, ["frequent_most_enriched"])[0] for t in (few, enough))
    assert (one.status, two.status) == ("undecided", "holds")
    assert "too few contexts" in one.why and math.isnan(one.low)


@pytest.mark.parametrize(
    ("low", "high", "status"),
    [(0.51, 0.9, "holds"), (0.5, 0.9, "undecided"), (0.1, 0.5, "undecided"), (0.1, 0.49, "fails"),
     (math.nan, math.nan, "undecided")],
)  # fmt: skip
def test_only_an_interval_beyond_or_short_of_the_margin_decides(low: float, high: float, status: str) -> None:
    assert Part("a", 0.5, low, high, margin=0.5).status == status


def test_all_parts_must_hold_and_one_failing_fails() -> None:
    good, bad, vague = (Part(n, 1, low, high, margin=0) for n, low, high in (("g", 1, 2), ("b", -2, -1), ("v", -1, 1)))
    missing = Part.absent("m", "nobody measured it", margin=0.0)
    assert judge([good, good])[0] == "holds"
    assert judge([good, vague, bad]) == ("fails", bad)
    assert judge([good, vague, missing]) == ("undecided", vague)
    assert judge([good, missing]) == ("undecided", missing)
    assert agreement([good, bad], "x", what="models").status == "undecided"
    assert agreement([bad, bad], "x", what="models").status == "fails"
    assert agreement([bad, vague], "x", what="models").status == "undecided"


# false alarms


@pytest.mark.parametrize("scatter", [0.05, 1.0], ids=["isotropic", "concentrated"])
def test_isotropic_gradients_rarely_pass_for_tangent_ones(scatter: float) -> None:
    """Concentrated: few directions carry the gradient, so a random subspace may hold a lot of it by luck."""
    small = {"steps": (0, 10, 100), "layers": 2, "bins": False, "proxies": ("semi_nmf",), "fits": ("refit",)}
    held = [verdict("tangent_energy", **NULL, **small, seed=s, scatter=scatter).status == "holds" for s in range(40)]
    assert sum(held) <= 4
    planted = [verdict("tangent_energy", **small, seed=s, scatter=scatter).status == "holds" for s in range(5)]
    assert all(planted), "the counter-test: it can hold"


def test_a_lucky_subspace_does_not_hold_although_its_interval_does() -> None:
    """The interval resamples contexts; only the random control knows how lucky a subspace can be."""
    few = {"steps": (0, 100), "layers": 1, "bins": False, "proxies": ("semi_nmf",), "noise": 0.001}
    found = [verdict("tangent_energy", **{**NULL, **few}, seed=s, scatter=2.0, permuted=0.0) for s in range(40)]
    lucky = [v for v in found if all(p["low"] > p["margin"] for p in v.details["parts"] if p["needed"])]
    assert lucky, "the counter-test: the interval alone would have passed some"
    held = [v for v in lucky if v.status == "holds"]
    assert len(held) <= 3
    assert all("random subspaces do as well" in v.why for v in lucky if v.status == "undecided")


# what is missing


@pytest.mark.parametrize(
    ("claim", "without"),
    [("tangent_energy", "gradient_energy"), ("anisotropy_share", "gradient_share"), ("amplified", "amplification"),
     ("emerges_early_and_persists", "gradient_enrichment"), ("frequent_most_enriched", "gradient_enrichment"),
     ("embedding_updates_aligned", "of=update"), ("rare_tokens_spread", "frequency_spread"),
     ("semi_nmf_beats_pca", "proxy=pca"), ("encoder_and_decoder", "gradient_energy")],
)  # fmt: skip
def test_missing_rows_leave_a_claim_open_and_are_named(claim: str, without: str) -> None:
    found = verdict(claim, **BOTH, without=(without,), only=None)
    assert found.status == "undecided"
    assert math.isnan(found.effect)
    assert without.partition("=")[0] in found.why or without in found.why, found.why
    assert "no " in found.why


def test_a_control_that_was_not_measured_keeps_the_claim_open_with_the_others_numbers() -> None:
    found = verdict("tangent_energy", without=("control=next",))
    assert found.status == "undecided"
    assert "control=next" in found.why and math.isfinite(found.effect)
    assert verdict("tangent_energy", without=("control=next",), strength=0.0).status == "fails"


def test_a_balanced_fit_that_was_not_measured_keeps_the_frequency_claim_open() -> None:
    found = verdict("frequent_most_enriched", without=("balanced=1",))
    assert found.status == "undecided" and "balanced" in found.why
    assert verdict("frequent_most_enriched", without=("balanced=1",), frequency=0.0).status == "fails"


def test_only_decoders_leave_the_claim_about_both_kinds_open() -> None:
    found = verdict("encoder_and_decoder")
    assert found.status == "undecided" and "--arch encoder" in found.why


def test_a_table_without_training_is_judged_where_it_can_be() -> None:
    found = {v.claim: v for v in evaluate_claims(table(steps=(1000,), stepless=True))}
    assert found["tangent_energy"].status == "holds"
    assert found["semi_nmf_beats_pca"].status == "fails"
    assert found["emerges_early_and_persists"].status == "undecided"
    assert "step 0" in found["emerges_early_and_persists"].why


def test_a_run_that_was_not_trained_is_left_open() -> None:
    found = verdict("tangent_energy", steps=(0,))
    assert found.status == "undecided" and "after initialisation" in found.why


def test_an_empty_table_and_a_plain_profile_give_open_verdicts() -> None:
    assert {v.status for v in evaluate_claims(Table.from_records([]))} == {"undecided"}
    profile = evaluate_claims(table(only=("average_cosine",)))
    assert len(profile) == len(claims())
    assert {v.status for v in profile} == {"undecided"}


def test_directions_that_were_not_measured_are_answered_with_those_that_were() -> None:
    found = evaluate_claims(table(), ["tangent_energy"], proxy="ica")[0]
    assert found.status == "undecided" and "proxy=semi_nmf" in found.why


def test_without_p_values_the_band_of_random_draws_serves() -> None:
    found = verdict("tangent_energy", without=("gradient_p_holm", "gradient_p"))
    assert found.status == "holds" and found.p < 0.05


@pytest.mark.parametrize(("claim", "p", "holm"), [
    ("embedding_updates_aligned", "gradient_p", "gradient_p_holm"), ("amplified", "amplification_p", None),
    ("tangent_energy", "gradient_p", "gradient_p_holm"),
])  # fmt: skip
def test_the_exact_p_of_random_subspaces_is_needed_to_hold(claim: str, p: str, holm: str | None) -> None:
    """The adjusted one counts, else the plain one times the number of sites, else a bound from the draws."""

    def with_p(value: float, metrics: set[str | None]) -> Verdict:
        def change(r: dict[str, Any]) -> dict[str, Any] | None:
            if r["metric"] not in (p, holm):
                return r
            return {**r, "value": value} if r["metric"] in metrics else None

        return evaluate_claims(edited(table(only=claims()[claim].metrics), change), [claim])[0]

    sites = 1 if claim == "embedding_updates_aligned" else 4
    for metrics, times in (({p}, sites), *([({p, holm}, 1)] if holm else [])):
        good, bad = with_p(0.001, metrics), with_p(0.2, metrics)
        assert good.status == "holds" and good.p == pytest.approx(0.001 * times)
        assert bad.status == "undecided" and "random subspaces do as well" in bad.why
        assert bad.p == pytest.approx(0.2 * times)
    assert with_p(0.2, set()).status == "holds", "the counter-test: without p values the draws decide"


def test_the_bound_from_the_draws_is_safe_for_skewed_draws() -> None:
    """Energies of random subspaces in one strong direction: a squared normal, whose tail is heavier than a normal's."""
    draws = np.random.default_rng(0).normal(size=200_000) ** 2
    for z in (1.0, 2.0, 3.0, 5.0):
        tail = float((draws > draws.mean() + z * draws.std()).mean())
        assert 1 / (1 + z * z) >= tail
        if z >= 3:
            assert 0.5 * math.erfc(z / math.sqrt(2)) < tail, "the counter-test: normal tails promise too much"

    def at(z: float) -> float:
        chance, bare = 16 / 256, ("gradient_p", "gradient_p_holm", "amplification_p")
        given = table(only=("amplification",), without=bare)

        def change(r: dict[str, Any]) -> dict[str, Any]:
            drawn = "control=" in r["variant"]
            return {**r, "value": chance, "sd": 0.01} if drawn else {**r, "value": chance + 0.01 * z}

        found = evaluate_claims(edited(given, change), ["amplified"])[0]
        return next(part["p"] for part in found.details["parts"] if part["name"] == "random")

    assert at(20.0) == pytest.approx(4 / 401) and at(-3.0) == 1.0


def test_without_replicates_the_written_intervals_serve() -> None:
    assert verdict("tangent_energy", replicates=False).status == "holds"
    assert verdict("tangent_energy", replicates=False, strength=0.0).status == "fails"
    bare = edited(table(replicates=False), lambda r: {**r, "low": None, "high": None, "sd": None})
    assert evaluate_claims(bare, ["tangent_energy"])[0].status == "undecided"


def test_cells_without_a_number_are_left_out() -> None:
    def holed(r: dict[str, Any]) -> dict[str, Any]:
        return {**r, "value": math.nan, "replicates": None} if r["layer"] == 2 and r["kind"] == "resid" else r

    whole, part = table(), edited(table(), holed)
    one, two = (evaluate_claims(t, ["tangent_energy"])[0] for t in (whole, part))
    assert two.status == "holds" and math.isfinite(two.effect) and two.effect != one.effect


# what a verdict rests on


def test_emergence_and_persistence_are_told_apart() -> None:
    late = verdict("emerges_early_and_persists", onset=2000.0).details["aspects"]
    assert (late["emerges early"]["status"], late["persists"]["status"]) == ("fails", "holds")
    faded = verdict("emerges_early_and_persists", fade=1.0).details["aspects"]
    assert (faded["emerges early"]["status"], faded["persists"]["status"]) == ("holds", "fails")
    assert verdict("emerges_early_and_persists").details["starts_at_chance"] is True
    assert verdict("emerges_early_and_persists", start=1.0).details["starts_at_chance"] is False


def test_enrichment_before_any_training_is_said_and_decides() -> None:
    fresh, early = (verdict("emerges_early_and_persists", start=start) for start in (0.0, 0.4))
    assert fresh.details["aspects"]["absent at the start"]["status"] == "holds"
    assert "absent at the start (below 1.5 times chance)" in fresh.why and fresh.margin == 0.5
    others = {name: a["status"] for name, a in early.details["aspects"].items()}
    assert others == {"emerges early": "holds", "persists": "holds", "absent at the start": "fails"}
    assert "there before any training" in early.why
    open_ = verdict("emerges_early_and_persists", start=0.07, noise=0.05)
    assert open_.details["starts_at_chance"] is None and "cannot be told" in open_.why
    frozen = evaluate_claims(table(), ["emerges_early_and_persists"], fit="frozen")[0]
    assert frozen.status == "undecided" and "fit=refit" in frozen.why


def test_masked_and_unmasked_rows_are_judged_apart() -> None:
    found = verdict("tangent_energy", models=("encoder",), masked=0.0, unmasked=1.2)
    groups = found.details["groups"]
    assert (groups["masked"]["status"], groups["unmasked"]["status"]) == ("fails", "holds")
    both = verdict("encoder_and_decoder", **BOTH, masked=0.0)
    assert "holds in 1 and fails in 1 of 2 encoders and kinds of rows" in both.why


def _second_bin(factor: float) -> Verdict:
    """The second bin is made larger than it was."""

    def ahead(r: dict[str, Any]) -> dict[str, Any]:
        if r["group"] != "frequency:2" or r["replicates"] is None:
            return r
        return {**r, "value": factor * r["value"], "replicates": [factor * x for x in r["replicates"]]}

    given = table(only=("gradient_enrichment",), models=("decoder", "encoder"))
    return evaluate_claims(edited(given, ahead), ["frequent_most_enriched"])[0]


def test_more_than_the_rarest_and_more_than_all_others_are_told_apart() -> None:
    first, second = _second_bin(1.0), _second_bin(2.0)
    assert first.status == second.status == "holds"
    assert first.details["aspects"]["most"]["status"] == "holds" and "they are the most enriched" in first.why
    assert second.details["aspects"]["most"]["status"] == "fails" and "another is ahead" in second.why
    one, two = (found["value"] for found in first.details["bins"]["plain"][:2])
    level = _second_bin(one / two)
    assert level.details["aspects"]["most"]["status"] == "undecided" and "is open" in level.why


def test_bins_of_masked_models_are_said_to_pool_their_rows() -> None:
    decoder, encoder = evaluate_claims(table(**BOTH, only=("gradient_enrichment",)), ["frequent_most_enriched"])
    assert "pools masked and unmasked rows" in encoder.why and encoder.details["bins_pool_masked_and_unmasked"]
    assert "masked" not in decoder.why


def test_distances_that_disagree_are_named() -> None:
    found = verdict("rare_tokens_spread", spread_normalised=0.3)
    assert "do not agree (holds for the plain distance and fails for the distance relative to the norm)" in found.why
    alone = verdict("rare_tokens_spread", without=("normalised=1",))
    assert alone.status == "undecided" and "normalised=1" in alone.why


def test_arms_are_compared_from_more_to_less_bias() -> None:
    found = evaluate_claims(table(models=("decoder", "decoder-flat", "decoder-zipf1.5")), ["frequency_intervention"])
    assert [v.subject for v in found] == ["decoder over decoder-flat", "decoder-zipf1.5 over decoder"]
    assert all(v.status == "holds" and v.details["paired"] for v in found)
    assert found[0].scope == "for these two runs only"


def test_arms_on_other_contexts_are_not_paired() -> None:
    def other(r: dict[str, Any]) -> dict[str, Any]:
        return {**r, "contexts": 64} if r["model"] == "decoder-flat" else r

    given = table(**ARMS, noise=0.05)
    paired, apart = (evaluate_claims(t, ["frequency_intervention"])[0] for t in (given, edited(given, other)))
    assert paired.details["paired"] and not apart.details["paired"]
    assert apart.high - apart.low > paired.high - paired.low


def test_a_frozen_proxy_is_judged_with_controls_that_have_no_interval() -> None:
    """Its next and permuted controls are single numbers."""
    for effects, status in (({}, "holds"), ({"strength": 0.0}, "fails"), ({"next": 1.0}, "fails")):
        found = evaluate_claims(table(**BOTH, **effects), ["tangent_energy", "encoder_and_decoder"], fit="frozen")
        assert {v.status for v in found} == {status}, effects
    for control in ("next", "permuted"):
        lacking = edited(table(), lambda r, c=control: None if f"control={c};fit=frozen" in r["variant"] else r)
        assert evaluate_claims(lacking, ["tangent_energy"], fit="frozen")[0].status == "undecided"


def test_encoders_without_controls_by_rows_are_judged_on_all_rows() -> None:
    def pooled(r: dict[str, Any]) -> dict[str, Any] | None:
        return None if r["group"] and "control=" in r["variant"] else r

    found = evaluate_claims(edited(table(**BOTH, only=ENERGY), pooled), ["encoder_and_decoder"])[0]
    assert found.status == "holds" and "(masked and unmasked rows)" in found.why


def test_a_frozen_proxy_is_judged_on_steps_it_has_not_seen() -> None:
    given = table()
    frozen = evaluate_claims(given, ["tangent_energy"], fit="frozen")[0]
    late = edited(given, lambda r: r if r["step"] > 300 else None)
    assert frozen.status == "holds"
    assert frozen.effect == evaluate_claims(late, ["tangent_energy"], fit="frozen")[0].effect


def test_the_most_common_rank_is_taken_unless_one_is_given() -> None:
    given = Table.concat([table(ranks=(8, 16)), table(ranks=(16,), models=("other",))])
    assert evaluate_claims(given, ["tangent_energy"])[0].details["rank"] == 16
    assert evaluate_claims(given, ["tangent_energy"], rank=8)[0].status == "holds"


# tables


def test_the_order_of_rows_does_not_matter() -> None:
    given = table(**BOTH)
    records = given.records()
    random.Random(0).shuffle(records)
    one, two = (verdicts_to_dicts(evaluate_claims(t)) for t in (given, Table.from_records(records)))
    assert {(v["claim"], v["subject"]): v["effect"] for v in one} == {
        (v["claim"], v["subject"]): v["effect"] for v in two
    }


def test_rows_written_twice_are_harmless_and_contradicting_ones_are_refused() -> None:
    given = table()
    twice = Table.concat([given, given])
    assert evaluate_claims(twice, ["tangent_energy"])[0].effect == evaluate_claims(given, ["tangent_energy"])[0].effect
    with pytest.raises(AnisoscopeError, match="two different rows"):
        evaluate_claims(Table.concat([given, table(strength=0.5)]), ["tangent_energy"])


def test_an_unknown_claim_is_answered_with_the_nearest() -> None:
    with pytest.raises(AnisoscopeError, match="did you mean 'tangent_energy'"):
        evaluate_claims(table(only=("loss",)), ["tangent_enery"])


def test_verdicts_survive_json() -> None:
    found = evaluate_claims(table(**BOTH, seeds=(0, 1, 2), steps=(0, 10, 100), layers=1))
    found += evaluate_claims(table(only=("loss",)))
    text = json.dumps(verdicts_to_dicts(found), allow_nan=False)
    back = verdicts_from_dicts(json.loads(text))
    assert verdicts_to_dicts(back) == verdicts_to_dicts(found)
    assert any(math.isnan(v.effect) for v in back)
    assert [v.status for v in back] == [v.status for v in found]


def test_every_claim_declares_what_it_says_and_where_it_comes_from() -> None:
    for name, declared in claims().items():
        assert declared.name == name and declared.statement.endswith(".") and declared.source and declared.metrics
        assert declared.description and declared.margin > 0


def test_claims_are_read_without_torch() -> None:
    code = "import sys, anisoscope.claims.claim as c; c.claims(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
