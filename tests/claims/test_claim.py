"""Verdicts: planted effects are found, absent ones are not, and what cannot be told stays open."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from anisoscope.claims.catalogue import claims, evaluate_claims
from anisoscope.claims.engine.claim import DECLARED, Finding, Part, agreement, claim, judge
from anisoscope.claims.engine.evidence import Run, models
from anisoscope.results.quantity import Quantity, jackknife, mean
from support.fake_training import NULL, edited, table
from support.planted_claims import ARMS, BOTH, ENERGY, verdict

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
    ("frequency_intervention", {**ARMS, "seeds": (0, 1, 2)}, "holds"),
    ("frequency_intervention", {**ARMS, "flat": 1.0, "scatter": 0.01, "seed_sd": 0.0, "seeds": (0, 1, 2)}, "fails"),
    ("frequency_intervention", {**ARMS, "flat": 0.87, "noise": 0.3, "seed_sd": 0.0, "seeds": (0, 1, 2)}, "undecided"),
    ("frequency_intervention", {}, "undecided"),  # no second arm
]


@pytest.mark.parametrize(("claim", "effects", "status"), CASES)
def test_a_claim_is_decided_as_it_was_planted(claim: str, effects: dict[str, Any], status: str) -> None:
    found = verdict(claim, **effects)
    assert found.status == status, found.why
    if status == {True: "fails", False: "holds"}[found.below]:
        assert found.low > found.margin
    elif status != "undecided":
        assert found.high < found.margin


_HOMES = ("tangent", "training", "comparison")


TANGENT = [n for n, c in claims().items() if c.function.__module__.rpartition(".")[2] in _HOMES]


def test_every_claim_was_planted_in_all_three_ways() -> None:
    """Those about depth and training are planted in test_depth, test_phases and test_ablation."""
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


@pytest.mark.parametrize(("period", "step"), [("early", 1), ("late", 1000)])
def test_the_effect_equals_an_independent_count_from_the_records(period: str, step: int) -> None:
    """A slow twin of `tangent_energy`: loops over plain records of the only step of a period."""
    given = table(permuted=0.5)
    plain = "fit=refit;proxy=semi_nmf;rank=16"
    rows = [r for r in given.records() if r["metric"] in ENERGY and r["group"] == "" and r["step"] == step]
    cells = sorted({(r["layer"], r["kind"]) for r in rows})

    def at(metric: str, variant: str) -> list[dict[str, Any]]:
        found = {(r["layer"], r["kind"]): r for r in rows if (r["metric"], r["variant"]) == (metric, variant)}
        return [found[cell] for cell in cells]

    energy, enrichment = at("gradient_energy", plain), at("gradient_enrichment", plain)
    permuted = at("gradient_energy", f"control=permuted;{plain}")
    chance = np.array([e["value"] / n["value"] for e, n in zip(energy, enrichment, strict=True)])
    values = np.array([e["value"] - c["value"] for e, c in zip(energy, permuted, strict=True)]) / chance
    folds = np.array([np.subtract(e["replicates"], c["replicates"]) for e, c in zip(energy, permuted, strict=True)])
    folds = (folds / chance[:, None]).mean(0)
    half = 2.365 * math.sqrt(7 / 8 * ((folds - folds.mean()) ** 2).sum())
    found = evaluate_claims(given, ["tangent_energy"], fit="refit")[0]
    parts = {part["name"]: part for part in found.details["parts"]}
    part = parts[f"{period}: permuted"]
    assert part["effect"] == pytest.approx(values.mean(), rel=1e-7)
    assert (part["low"], part["high"]) == pytest.approx((values.mean() - half, values.mean() + half), rel=1e-7)
    p = min(r["value"] for r in at("gradient_p_holm", plain))
    assert parts[f"{period}: random"]["p"] == pytest.approx(p)


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
    given = table(only=("gradient_enrichment", "gradient_energy"), noise=0.002, scatter=0.05)
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


def test_a_claim_is_one_decorated_function() -> None:
    before = list(claims())

    @claim(of=models, source="here", metrics=["gradient_energy"], margin=0.0, about="training")
    def ratio_is_there(run: Run) -> Finding:
        """It
        is.

        The energy of the first cell.
        """
        row = next(iter(run.needed("gradient_energy").values()))
        return Finding((Part.of("energy", row.quantity, margin=0.0),), lambda parts, part: f"it is {part}")

    try:
        assert ratio_is_there.statement == "It is."
        assert list(claims()) == [*before, "ratio_is_there"] and ratio_is_there.description.startswith("The energy")
        found = evaluate_claims(table(), ["ratio_is_there"])[0]
        assert found.status == "holds" and found.why.startswith("It is 0.") and found.subject == "decoder"
    finally:
        del DECLARED["ratio_is_there"]
