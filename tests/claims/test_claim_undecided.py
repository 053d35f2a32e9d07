"""What was not measured leaves a claim open, and is named."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from anisoscope.claims.catalogue import claims, evaluate_claims
from anisoscope.claims.engine.claim import Verdict
from anisoscope.errors import AnisoscopeError
from anisoscope.results.query import Table
from support.fake_training import edited, table
from support.planted_claims import BOTH, verdict


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
    with pytest.raises(AnisoscopeError, match="Known: pca, random, semi_nmf"):
        evaluate_claims(table(), ["tangent_energy"], proxy="ica")


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
        return next(part["p"] for part in found.details["parts"] if part["name"] == "late: random")

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
