"""What a verdict says beside its status: steps, kinds of rows, arms, ranks, and the order of the table."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from typing import Any

import pytest

from anisoscope.claims.catalogue import claims, evaluate_claims
from anisoscope.claims.engine import evidence
from anisoscope.claims.engine.claim import Verdict, verdicts_from_dicts, verdicts_to_dicts
from anisoscope.errors import AnisoscopeError
from anisoscope.results.query import Table
from support.fake_training import edited, table
from support.planted_claims import ARMS, BOTH, ENERGY, verdict


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
    assert "absent at the start (below 1.5 times chance)" in fresh.why
    others = {name: a["status"] for name, a in early.details["aspects"].items()}
    assert others == {"emerges early": "holds", "persists": "holds", "absent at the start": "fails"}
    assert "there before any training" in early.why
    open_ = verdict("emerges_early_and_persists", start=0.07, noise=0.05)
    assert open_.details["starts_at_chance"] is None and "cannot be told" in open_.why
    frozen = evaluate_claims(table(), ["emerges_early_and_persists"], fit="frozen")[0]
    assert frozen.status == "holds" and "late (frozen after the first measured steps)" in frozen.why


def test_masked_and_unmasked_rows_are_judged_apart() -> None:
    found = verdict("tangent_energy", models=("encoder",), masked=0.0, unmasked=1.2)
    groups = found.details["groups"]
    assert (groups["masked"]["status"], groups["unmasked"]["status"]) == ("fails", "holds")
    both = verdict("encoder_and_decoder", **BOTH, masked=0.0)
    assert "fails in 2 of 4 encoders, periods and kinds of rows" in both.why


def _second_bin(factor: float) -> Verdict:
    """The second bin is made larger than it was."""

    def ahead(r: dict[str, Any]) -> dict[str, Any]:
        if r["group"] != "frequency:2" or r["replicates"] is None:
            return r
        return {**r, "value": factor * r["value"], "replicates": [factor * x for x in r["replicates"]]}

    given = table(only=("gradient_enrichment", "gradient_energy"), models=("decoder", "encoder"), scatter=0.05)
    return evaluate_claims(edited(given, ahead), ["frequent_most_enriched"])[0]


def test_a_lead_that_random_directions_have_between_bins_is_left_open() -> None:
    only = ("gradient_enrichment", "gradient_energy")
    sure, lucky = (verdict("frequent_most_enriched", only=only, scatter=scatter) for scatter in (0.05, 1.0))
    assert sure.status == "holds" and lucky.status == "undecided"
    assert "in random directions two bins may differ by" in lucky.why
    bare = verdict("frequent_most_enriched", only=only[:1])
    assert bare.status == "undecided" and "random directions were not drawn" in bare.why


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
    arms, subjects = ("decoder", "decoder-flat", "decoder-zipf1.5"), ["decoder over decoder-flat"]
    found = evaluate_claims(table(models=arms), ["frequency_intervention"])
    assert [v.subject for v in found] == [*subjects, "decoder-zipf1.5 over decoder"]
    assert all(v.low > v.margin and v.details["paired"] for v in found)
    assert found[0].scope == "for these two runs only"
    seeds = evaluate_claims(table(models=arms, seeds=(0, 1, 2), seed_sd=0.01, bins=False), ["frequency_intervention"])
    assert [v.status for v in seeds] == ["holds", "holds"]


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
    assert found.status == "holds" and ", masked and unmasked rows)" in found.why


def test_a_frozen_proxy_is_judged_on_steps_it_has_not_seen() -> None:
    given = table()
    seen = edited(given, lambda r: {**r, "note": "in-sample"} if "fit=frozen" in r["variant"] else r)
    frozen, within = (evaluate_claims(t, ["tangent_energy"])[0] for t in (given, seen))
    assert frozen.status == "holds" and frozen.details["fit"] == "frozen"
    assert within.details["fit"] == "refit", "no late step is outside the window"
    asked = evaluate_claims(seen, ["tangent_energy"], fit="frozen")[0]
    assert asked.status == "undecided" and "outside the window" in asked.why


def test_the_most_common_rank_is_taken_unless_one_is_given() -> None:
    given = Table.concat([table(ranks=(8, 16)), table(ranks=(16,), models=("other",))])
    assert evaluate_claims(given, ["tangent_energy"])[0].details["rank"] == 16
    assert evaluate_claims(given, ["tangent_energy"], rank=8)[0].status == "holds"


def test_the_order_of_rows_does_not_matter() -> None:
    given = table(**BOTH)
    records = given.records()
    random.Random(0).shuffle(records)
    one, two = (verdicts_to_dicts(evaluate_claims(t)) for t in (given, Table.from_records(records, given.about)))
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
    code = "import sys, anisoscope.claims.catalogue as c; c.claims(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_early_and_late_take_steps_from_a_generator() -> None:
    for steps in ([0, 1, 2, 4, 8, 16], [0, 10], [None], []):
        for period in (evidence.early, evidence.late):
            assert period(step for step in steps) == period(steps)
