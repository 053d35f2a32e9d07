"""Whether a model learned, and what claims say where it did not."""

from __future__ import annotations

import math
from typing import Any

import pytest

from anisoscope.claims.catalogue import claims, evaluate_claims
from anisoscope.claims.engine import evidence
from anisoscope.claims.engine.evidence import Run, studies_by_seed
from anisoscope.claims.engine.learning import Learned, learned
from anisoscope.claims.revisiting.theory import theory_claims
from anisoscope.results.query import Table
from support.fake_training import edited, table

ENERGY = ("gradient_energy", "gradient_enrichment", "gradient_p", "gradient_p_holm", "probe_loss", "constant_loss")


def _run(given: Table) -> Run:
    seeded = {"model": "decoder", "seed": 0, "metric": "gradient_energy", "layer": 1, "step": 0, "value": 0.5}
    return studies_by_seed(Table.concat([given, Table.from_records([seeded])], given.about), {"gradient_energy"})[0][
        "decoder"
    ]


def _row(metric: str, value: float, *, half: float = 0.02, step: int = 9, **more: Any) -> dict[str, Any]:
    """A row of the training log; its eight leave-one-fold-out values give an interval of about ± half."""
    spread = half / 2.365 / math.sqrt(7)  # of values at ± spread the jackknife's error is √7 times that
    folds = [value + (spread if j % 2 else -spread) for j in range(8)]
    place = {"model": "decoder", "kind": "training", "variant": "", "group": "", "stack": "single", "seed": 0}
    return {
        **place,
        "metric": metric,
        "value": value,
        "step": step,
        "n": 640,
        "contexts": 64,
        **more,
        "replicates": folds,
    }


def _gate(loss: float, constant: float, *, variant: str = "", half: float = 0.02) -> Learned:
    rows = [_row("probe_loss", loss, half=half), _row("constant_loss", constant, half=0.0, variant=variant)]
    return learned(_run(Table.from_records(rows)))


def test_a_model_learned_when_it_beats_the_best_constant_by_a_tenth_of_a_nat_and_its_interval() -> None:
    assert _gate(3.89, 4.0).status == "learned"
    assert _gate(3.92, 4.0).status == "did not learn", "0.08 nats are not 0.1"
    assert _gate(3.85, 4.0, half=0.2).status == "did not learn", "0.15 nats, but the interval holds 0"
    assert _gate(3.85, 4.0, half=0.14).status == "learned"
    assert _gate(4.3, 4.0).status == "did not learn"
    assert _gate(math.nan, 4.0).status == "did not learn"
    assert "0.08" in _gate(3.92, 4.0).why and "learning takes 0.1" in _gate(3.92, 4.0).why


def test_a_loss_without_nats_must_fall_by_a_twentieth() -> None:
    assert _gate(0.94, 1.0, variant="unit=other").status == "learned"
    assert _gate(0.96, 1.0, variant="unit=other").status == "did not learn"
    assert _gate(94.0, 100.0, variant="unit=other").status == "learned"


def test_the_difference_is_paired_over_contexts() -> None:
    """Contexts differ by far more than the model and the constant do on each of them."""
    folds = [3.0, 5.0, 4.0, 6.0, 2.0, 4.5, 3.5, 4.0]
    loss, constant = _row("probe_loss", 4.0), _row("constant_loss", 4.2)
    loss["replicates"], constant["replicates"] = folds, [value + 0.2 for value in folds]
    assert learned(_run(Table.from_records([loss, constant]))).status == "learned"
    constant["contexts"] = 63
    assert learned(_run(Table.from_records([loss, constant]))).status == "did not learn", "not the same contexts"


def test_the_last_step_decides() -> None:
    rows = [_row("probe_loss", value, step=step) for step, value in ((0, 5.0), (10, 3.0), (20, 4.5))]
    rows += [_row("constant_loss", 4.0, step=step) for step in (0, 10, 20)]
    run = _run(Table.from_records(rows))
    assert learned(run).status == "did not learn" and learned(run, until=10).status == "learned"


def test_without_a_constant_provenance_counts_and_nothing_else() -> None:
    rows = table(only=("gradient_energy",)).records()

    def gate(entry: dict[str, Any], keep: Any = lambda row: True) -> Learned:
        about = {"models": [{"name": "decoder", **entry}]}
        return learned(_run(Table.from_records([row for row in rows if keep(row)], about)))

    assert gate({"fingerprint": "ab"}).status == "learned" and "provenance" in gate({"fingerprint": "ab"}).why
    assert gate({"fingerprint": "ab", "notes": ["random weights (seed 0)"]}).status == "did not learn"
    assert gate({"fingerprint": "ab"}, lambda row: row["step"] == 0).status == "did not learn"
    assert gate({}).status == "unknown" and "no constant_loss" in gate({}).why


def test_every_claim_says_what_it_is_about() -> None:
    about = {name: declared.about for name, declared in claims().items()}
    exempt = {name for name, what in about.items() if what != "training"}
    assert exempt == {
        "anisotropic_at_initialisation", "anisotropy_grows_with_bias", "sharpness_grows_with_bias", "estimators_agree",
        *theory_claims(),
    }  # fmt: skip


def test_a_model_that_did_not_learn_leaves_its_verdict_open() -> None:
    good, bad = (evaluate_claims(table(only=ENERGY, constant=c), ["tangent_energy"])[0] for c in (4.2, 1.6))
    assert good.status == "holds" and good.details["learned"]["decoder"]["status"] == "learned"
    assert bad.status == "undecided" and "the model did not learn: its held-out loss" in bad.why
    assert bad.effect == good.effect, "the numbers are told all the same"
    fails = evaluate_claims(table(only=ENERGY, constant=1.6, strength=0.0), ["tangent_energy"])[0]
    assert fails.status == "undecided", "nor does it fail"


def test_an_older_table_is_judged_with_a_note() -> None:
    found = evaluate_claims(table(only=ENERGY[:4]), ["tangent_energy"])[0]
    assert found.status == "holds" and "whether it learned is not known" in found.why


def test_a_seed_that_did_not_learn_is_left_out_of_the_verdict_over_seeds() -> None:
    given = table(only=ENERGY, seeds=(1, 2, 3, 4))

    def idle(row: dict[str, Any]) -> dict[str, Any]:
        stuck = row["seed"] == 3 and row["metric"] == "probe_loss"
        return {**row, "value": 4.3, "replicates": [4.3] * 8} if stuck else row

    pooled, *single = evaluate_claims(edited(given, idle), ["tangent_energy"])
    assert pooled.details["seeds"] == [1, 2, 4] and pooled.status == "holds"
    assert "seed 3 is left out: the model did not learn" in pooled.why
    assert [v.status for v in single] == ["holds", "holds", "undecided", "holds"]


def test_a_study_loses_the_models_that_did_not_learn() -> None:
    given = table(only=ENERGY, models=("decoder", "encoder", "encoder-late"))

    def idle(row: dict[str, Any], model: str) -> dict[str, Any]:
        stuck = row["model"] == model and row["metric"] == "probe_loss"
        return {**row, "value": 4.3, "replicates": [4.3] * 8} if stuck else row

    found = evaluate_claims(edited(given, lambda row: idle(row, "encoder-late")), ["encoder_and_decoder"])[0]
    assert found.status == "holds" and "encoder-late did not learn and is left out" in found.why
    assert found.details["models"]["encoder"] == ["encoder"]
    found = evaluate_claims(edited(given, lambda row: idle(row, "decoder")), ["encoder_and_decoder"])[0]
    assert found.status == "undecided" and "decoder did not learn and is left out" in found.why
    assert found.details["missing"] is False, "it is shown"


@pytest.mark.parametrize(
    ("steps", "early", "late"),
    [
        ([0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4000], [1, 2, 4, 8], [512, 1024, 2048, 4000]),
        ([0, 10, 20], [10], [20]),
        ([5, 10, 20, 40], [5], [40]),
        ([0, 10], [], [10]),
        ([0], [], []),
        ([None], [], [None]),
        ([], [], []),
    ],
)
def test_early_and_late_are_the_outer_thirds_after_initialisation(steps: list, early: list, late: list) -> None:
    assert evidence.early(steps) == early and evidence.late(steps) == late


def test_the_last_loss_is_held_against_a_constant_that_was_told_before() -> None:
    """A constant at one step must not make an earlier loss the one that is judged."""
    rows = [_row("probe_loss", 2.0, step=64), _row("constant_loss", 4.0, step=64), _row("probe_loss", 4.5, step=256)]
    assert learned(_run(Table.from_records(rows))).status == "did not learn"
    once = [_row("constant_loss", 4.0, step=0), _row("probe_loss", 5.0, step=0), _row("probe_loss", 2.0, step=256)]
    assert learned(_run(Table.from_records(once))).status == "learned"


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_seeds_that_did_not_learn_make_no_general_claim_of_the_one_that_did(lost: int) -> None:
    def change(r: dict[str, Any]) -> dict[str, Any]:
        stuck = r["metric"] == "probe_loss" and r["seed"] < lost
        return {**r, "value": 9.0, "replicates": None} if stuck else r

    given = edited(table(only=ENERGY, seeds=(0, 1, 2)), change)
    pooled = evaluate_claims(given, ["tangent_energy"])[0]
    assert pooled.details["pooled"] and pooled.status == ("undecided" if lost else "holds"), pooled.why
    assert not lost or "needs 3" in pooled.why
