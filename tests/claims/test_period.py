"""Early and late in training are judged apart, with refitted directions early and frozen ones late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from anisoscope.claims.catalogue import evaluate_claims
from anisoscope.claims.engine.claim import Verdict
from anisoscope.results.query import Table, with_options
from support.fake_training import STEPS, edited, table
from support.planted_claims import ENERGY, verdict

Row = dict[str, Any]


def scaled(row: Row, factor: float) -> Row:
    """The row times a factor, with its interval and its leave-one-fold-out values."""
    numbers = {name: factor * row[name] for name in ("value", "low", "high") if row[name] is not None}
    return {**row, **numbers, "replicates": [factor * x for x in row["replicates"]] if row["replicates"] else None}


def behind(given: Table, when: Callable[[Row], bool], factor: float = 0.2) -> Table:
    """The same table with energies in the proxy (not in controls) shrunk at some rows."""

    def change(row: Row) -> Row:
        own = row["metric"] in ENERGY[:2] and "control=" not in row["variant"]
        return scaled(row, factor) if own and when(row) else row

    return edited(given, change)


def judged(given: Table, claim: str = "tangent_energy", **options: Any) -> Verdict:
    return evaluate_claims(given, [claim], **options)[0]


def test_a_lead_that_is_lost_at_the_end_is_not_averaged_away() -> None:
    """Eight of eleven steps are far ahead of every control and the last ones behind: their mean is far ahead."""
    given = table(only=ENERGY, steps=STEPS, strength=2.0, decline=0.0)
    lost = behind(given, lambda row: row["step"] >= 256, factor=0.05)
    assert judged(given).status == "holds"
    found = judged(lost)
    assert found.status == "fails"
    aspects = found.details["aspects"]
    assert (aspects["early"]["status"], aspects["late"]["status"]) == ("holds", "fails")
    assert found.details["periods"] == {"early": [1, 2, 4], "late": [256, 512, 1000]}
    assert "Early (refitted at every step)" in found.why and "late (frozen after the first" in found.why


@pytest.mark.parametrize(
    "claim",
    ["anisotropy_share", "amplified", "embedding_updates_aligned", "semi_nmf_beats_pca", "frequent_most_enriched"],
)
@pytest.mark.parametrize("period", ["early", "late"])
def test_every_claim_about_training_must_hold_in_both_periods(claim: str, period: str) -> None:
    planted = {"semi_nmf_beats_pca": {"pca": -0.1}}.get(claim, {})
    names = {"anisotropy_share": ("gradient_share",), "amplified": ("amplification",)}.get(claim, ENERGY[:2])
    last = {"frequent_most_enriched": "frequency:1"}.get(claim, "")
    steps = {"early": (1,), "late": (1000,)}[period]
    given = table(**planted)

    def shrink(row: Row) -> Row:
        mine = row["metric"] in names and row["step"] in steps and "control=" not in row["variant"]
        mine = mine and row["group"] == last and "proxy=pca" not in row["variant"]
        return scaled(row, 0.05) if mine else row

    good, bad = judged(given, claim), judged(edited(given, shrink), claim)
    assert good.status == "holds" and bad.status == "fails", (good.why, bad.why)
    assert {good.details["aspects"][name]["status"] for name in ("early", "late")} == {"holds"}
    other = {"early": "late", "late": "early"}[period]
    assert bad.details["aspects"][period]["status"] == "fails" and bad.details["aspects"][other]["status"] == "holds"


def test_an_encoder_behind_its_control_at_the_last_step_does_not_hold() -> None:
    given = table(only=ENERGY, models=("decoder", "encoder"), strength=2.0)
    lost = behind(given, lambda row: row["model"] == "encoder" and row["step"] == 1000, factor=0.05)
    assert judged(given, "encoder_and_decoder").status == "holds"
    assert judged(lost, "encoder_and_decoder").status != "holds"


def test_late_the_frozen_directions_decide_and_the_refitted_ones_stand_beside_them() -> None:
    given = table(only=ENERGY)
    stale = behind(given, lambda row: "fit=frozen" in row["variant"] and row["step"] == 1000)
    found = judged(stale)
    assert found.status == "fails" and found.details["fit"] == "frozen"
    assert "refitted at every step it holds late unlike here" in found.why
    assert judged(stale, fit="refit").status == "holds"
    assert "refitted at every step it holds late as well" in judged(given).why
    light = judged(table(only=ENERGY, fits=("refit",)))
    assert light.status == "holds" and light.details["fit"] == "refit"


def test_pca_that_disagrees_is_told() -> None:
    given = table(only=ENERGY)
    found = judged(behind(given, lambda row: "proxy=pca" in row["variant"], factor=0.1))
    assert found.status == "holds" and "with PCA it fails late unlike here" in found.why
    assert "with PCA it holds late as well" in judged(given).why


def with_reading(given: Table, options: Row, factor: float, chosen: Callable[[Row], bool] = lambda row: True) -> Table:
    """The table with a second reading of every energy, in which the proxy holds `factor` times as much."""
    rows = []
    for row in given.records():
        rows.append(row)
        if row["metric"] in (*ENERGY[:2], "gradient_share") and "average" not in row["variant"]:
            mine = "control=" not in row["variant"] and chosen(row)
            rows.append({**(scaled(row, factor) if mine else row), "variant": with_options(row["variant"], **options)})
    return Table.from_records(rows, given.about)


OTHER_READING: dict[str, Callable[[Row], bool]] = {  # rows that another reading has less of
    "emerges_early_and_persists": lambda row: row["step"] > 0,
    "anisotropy_share": lambda row: True,
    "embedding_updates_aligned": lambda row: "of=update" in row["variant"],
    "frequent_most_enriched": lambda row: row["group"] == "frequency:1",
    "encoder_and_decoder": lambda row: True,
    "frequency_intervention": lambda row: row["model"] == "decoder",
}


@pytest.mark.parametrize("claim", OTHER_READING)
@pytest.mark.parametrize("key", ["coordinates", "first"])
def test_every_claim_on_gradients_says_when_it_depends_on_the_reading_of_rows(claim: str, key: str) -> None:
    options = {"coordinates": {"coordinates": "standardised"}, "first": {"first": "out"}}[key]
    models = {"encoder_and_decoder": ("decoder", "encoder"), "frequency_intervention": ("decoder", "decoder-flat")}
    seeds = (0, 1, 2) if claim == "frequency_intervention" else None  # two trainings are compared over seeds
    given = table(models=models.get(claim, ("decoder",)), seeds=seeds, bins=claim == "frequent_most_enriched")
    chosen = OTHER_READING[claim]
    same, other = (judged(with_reading(given, options, factor, chosen), claim) for factor in (1.0, 0.02))
    assert same.status == judged(given, claim).status == "holds" and "depends on" not in same.why, same.why
    noun = {"coordinates": "the coordinates", "first": "the first position"}[key]
    assert other.status == "undecided" and f"it depends on {noun}" in other.why, other.why
    only = with_reading(given, options, 0.02, lambda row: "pca" in row["variant"] and chosen(row))
    assert judged(only, claim).status == "holds", "another proxy is another question"


def test_a_reading_without_frozen_directions_is_compared_with_refitted_ones() -> None:
    """Only one choice changes at a time: what the fit turns does not count as turned by the first position."""
    given = table(only=ENERGY)

    def refitted(table: Table) -> Table:
        return edited(table, lambda row: None if {"fit=frozen", "first=out"} <= set(row["variant"].split(";")) else row)

    less = refitted(with_reading(given, {"first": "out"}, 0.05))
    assert "it depends on the first position: without the first position (refitted) it fails" in judged(less).why
    stale = behind(given, lambda row: "fit=frozen" in row["variant"] and row["step"] == 1000)
    found = judged(refitted(with_reading(stale, {"first": "out"}, 1.0)))
    assert found.status == "fails" and "depends on" not in found.why
    assert "without the first position (refitted) it holds late as well" in found.why


def test_a_stack_without_an_outlying_first_position_is_read_as_it_is() -> None:
    """First positions are outliers at one layer only, where the lead is lost; the other layers still have it."""
    given = table(only=ENERGY, strength=2.0, layers=4)
    whole = with_reading(given, {"first": "out"}, 0.05)
    part = edited(whole, lambda row: None if "first=out" in row["variant"] and row["layer"] != 1 else row)
    assert judged(whole).status == "undecided" and judged(part).status == "holds"


def test_the_claim_on_encoder_and_decoder_says_early_and_late() -> None:
    given = table(only=ENERGY, models=("decoder", "encoder"), strength=2.0)
    lost = behind(given, lambda row: row["step"] == 1000, factor=0.05)
    aspects = judged(lost, "encoder_and_decoder").details["aspects"]
    assert (aspects["early"]["status"], aspects["late"]["status"]) == ("holds", "fails")


def test_masked_rows_are_judged_by_the_fit_of_all_rows() -> None:
    given = table(only=ENERGY, models=("decoder", "encoder"), strength=2.0)
    stale = behind(given, lambda row: "fit=frozen" in row["variant"] and row["group"] == "masked" and row["step"] > 1)
    named = [part["name"] for part in judged(given, "encoder_and_decoder").details["parts"] if "masked" in part["name"]]
    assert sum("frozen" in name for name in named) == 2 and len(named) == 4
    assert judged(stale, "encoder_and_decoder").status != "holds"
    found = evaluate_claims(stale, ["tangent_energy"])[1].details["groups"]
    assert (found["masked"]["status"], found["unmasked"]["status"]) == ("fails", "holds")

    def older(row: Row) -> Row | None:
        """Frozen directions were tested on all rows alone."""
        return None if "fit=frozen" in row["variant"] and row["group"] and "control=" in row["variant"] else row

    names = [p["name"] for p in judged(edited(given, older), "encoder_and_decoder").details["parts"]]
    assert "encoder: encoder (late, frozen, masked and unmasked rows)" in names
    assert "encoder: encoder (late, masked rows)" in names


@pytest.mark.parametrize(
    ("options", "noun"),
    [({"coordinates": "standardised"}, "the coordinates"), ({"first": "out"}, "the first position")],
)
def test_a_verdict_that_depends_on_the_reading_of_rows_is_undecided(options: Row, noun: str) -> None:
    given = table(only=ENERGY)
    same, other = (judged(with_reading(given, options, factor)) for factor in (1.0, 0.05))
    assert same.status == "holds" and "depends on" not in same.why
    assert other.status == "undecided" and f"it depends on {noun}" in other.why
    null = with_reading(table(only=ENERGY, strength=0.0), options, 8.0)
    assert judged(null).status == "undecided", "nor does it fail"


def test_what_is_barely_above_chance_at_the_end_has_not_persisted() -> None:
    """Late enrichment stays beyond the margin, but less than half of the early excess is left."""
    given = table(only=ENERGY, strength=2.0, decline=0.0, permuted=0.0, next=0.0)
    found = judged(given, "emerges_early_and_persists")
    assert found.status == "holds", found.why
    faded = judged(behind(given, lambda row: row["step"] == 1000, factor=0.25), "emerges_early_and_persists")
    assert faded.status == "fails" and "what is left late of the early excess" in faded.why
    parts = {part["name"]: part["status"] for part in faded.details["parts"]}
    assert parts["late over chance"] == "holds", "the counter-test: by chance alone it would have passed"


def test_one_state_of_a_model_is_late() -> None:
    found = verdict("tangent_energy", steps=(1000,), stepless=True)
    assert found.status == "holds" and found.details["periods"] == {"late": [None]}


@pytest.mark.parametrize(
    "claim", ["tangent_energy", "anisotropy_share", "emerges_early_and_persists", "amplified", "semi_nmf_beats_pca"]
)
def test_the_class_token_is_never_averaged_with_patches(claim: str) -> None:
    given = table()
    records = given.records()
    tokens = [{**row, "kind": "cls", "value": 0.01 * row["value"]} for row in records if _measured_on_patches(row)]
    assert tokens  # a class token whose gradients avoid whatever directions, and which would decide the mean
    alone, beside = (
        evaluate_claims(t, [claim])[0] for t in (given, Table.from_records([*records, *tokens], given.about))
    )
    assert (beside.status, beside.effect, beside.low) == (alone.status, alone.effect, alone.low)
    assert ("at the class token, which the mean leaves out, " in beside.why) == (claim == "tangent_energy")
    assert "class token" not in alone.why


def _measured_on_patches(row: dict[str, Any]) -> bool:
    told = row["metric"].startswith(("gradient_", "amplification"))
    return told and row["kind"] == "resid" and row["value"] is not None
