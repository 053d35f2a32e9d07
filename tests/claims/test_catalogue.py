"""Seeds: what several trainings say together, and what one training measured several times does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anisoscope.claims.catalogue import evaluate_claims
from anisoscope.results.quantity import t_interval
from anisoscope.results.query import Table
from support.fake_training import edited, table

ENERGY = ("gradient_energy", "gradient_enrichment", "gradient_p", "gradient_p_holm")
ARMS = {"models": ("decoder", "decoder-flat")}


def test_several_seeds_give_each_its_verdict_and_one_over_all() -> None:
    found = evaluate_claims(table(seeds=(1, 2, 3, 4)), ["tangent_energy"])
    pooled, single = found[0], found[1:]
    assert pooled.scope == "over 4 seeds" and pooled.details["seeds"] == [1, 2, 3, 4] and pooled.status == "holds"
    assert [v.scope for v in single] == [f"for seed {s}" for s in (1, 2, 3, 4)]
    effects = [v.effect for v in single]
    half, _ = t_interval(effects)
    assert pooled.effect == pytest.approx(np.mean(effects))
    assert pooled.high - pooled.effect == pytest.approx(half)
    assert half == pytest.approx(3.182 * np.std(effects, ddof=1) / 2, rel=1e-3)
    assert pooled.why.startswith("Over 4 seeds: ")


def measured_again(
    original: Table, seeds: tuple[int, ...], *, of: int, models: tuple[str, ...] = ("decoder",)
) -> Table:
    """The same weights under further seeds of the measurement: draws and fits differ a little, losses do not."""
    generator, more = np.random.default_rng(1), []
    for seed in seeds:
        for r in original.records():
            if r["seed"] == of and r["model"] in models:
                moved = (
                    r["metric"] == "gradient_p" or "control=random" in r["variant"] or "proxy=random" in r["variant"]
                )
                more.append({**r, "seed": seed, "value": r["value"] * (1 + 1e-3 * generator.normal() * moved)})
    return Table.concat([original, Table.from_records(more)])


@pytest.mark.parametrize("witness", ["probe_loss", "loss", None])
def test_one_run_measured_three_times_is_one_run(witness: str | None) -> None:
    only = (*ENERGY, *([witness] if witness else []))
    found = evaluate_claims(measured_again(table(only=only), (1, 2), of=0), ["tangent_energy"])
    assert len(found) == 1 and found[0].scope == "for this model" and not found[0].details["pooled"]
    assert found[0].why.endswith("seeds 1 and 2 are the same run as seed 0, measured again.")
    apart = evaluate_claims(table(only=only, seeds=(0, 1, 2)), ["tangent_energy"])
    assert [v.scope for v in apart] == ["over 3 seeds", *(f"for seed {s}" for s in (0, 1, 2))], "the counter-test"
    assert [v.details["pooled"] for v in apart] == [True, False, False, False]
    assert not any("measured again" in v.why for v in apart)


def test_a_repeated_run_does_not_make_up_the_third_seed() -> None:
    given = measured_again(table(only=(*ENERGY, "loss"), seeds=(0, 5)), (1,), of=0)
    pooled, *single = evaluate_claims(given, ["tangent_energy"])
    assert pooled.status == "undecided" and "needs 3" in pooled.why and pooled.details["seeds"] == [0, 5]
    assert "seed 1 is the same run as seed 0, measured again" in pooled.why
    assert pooled.details["measured_again"] == {"decoder": ["seed 1 is the same run as seed 0, measured again"]}
    assert [v.details["seed"] for v in single] == [0, 5]


def test_models_stay_paired_by_seed_when_one_was_measured_again() -> None:
    given = table(only=(*ENERGY, "loss"), **ARMS, seeds=(0, 1, 2, 3), bins=False)
    given = edited(given, lambda r: None if (r["model"], r["seed"]) == ("decoder", 1) else r)
    given = measured_again(given, (1,), of=0)
    found = evaluate_claims(given, ["frequency_intervention"])
    assert found[0].details["seeds"] == [0, 2, 3] and found[0].status == "holds"
    assert "seed 1 is the same run as seed 0" in found[0].why


def test_the_same_start_is_not_the_same_run() -> None:
    """A head that starts at zero, or one initialisation and two orders of the data: equal at step 0, then no more."""
    given = table(only=(*ENERGY, "loss"), seeds=(0, 1, 2))
    start = {
        (r["layer"], r["kind"], r["metric"], r["variant"], r["group"]): r for r in given.records() if not r["step"]
    }

    def alike(r: dict[str, Any]) -> dict[str, Any]:
        if r["step"]:
            return r
        return {**start[r["layer"], r["kind"], r["metric"], r["variant"], r["group"]], "seed": r["seed"]}

    assert evaluate_claims(edited(given, alike), ["tangent_energy"])[0].scope == "over 3 seeds"


def test_over_seeds_random_subspaces_are_still_tested() -> None:
    """One seed in which random subspaces do as well leaves the general claim open, whatever the scatter."""
    given = table(only=ENERGY, seeds=(0, 1, 2, 3))

    def lucky(r: dict[str, Any]) -> dict[str, Any]:
        return {**r, "value": 0.3} if r["seed"] == 2 and r["metric"] == "gradient_p_holm" else r

    good, bad = (evaluate_claims(t, ["tangent_energy"])[0] for t in (given, edited(given, lucky)))
    assert good.status == "holds" and next(p for p in good.details["parts"] if p["name"] == "late: random")["tested"]
    assert bad.status == "undecided" and bad.p == pytest.approx(0.3) and "random subspaces" in bad.why


def test_two_seeds_are_too_few_for_a_general_claim() -> None:
    found = evaluate_claims(table(seeds=(1, 2)), ["tangent_energy"])
    assert [v.status for v in found] == ["undecided", "holds", "holds"]
    assert "needs 3" in found[0].why


def test_seeds_that_disagree_leave_it_open() -> None:
    parts = [table(seeds=(s,), strength=g) for s, g in ((1, 1.0), (2, 0.0), (3, 0.4))]
    found = evaluate_claims(Table.concat(parts), ["tangent_energy"])
    assert [v.status for v in found] == ["undecided", "holds", "fails", "holds"]


def test_claims_about_several_models_pool_seeds_too() -> None:
    given = table(models=("decoder", "encoder", "decoder-flat"), seeds=(1, 2, 3), bins=False, layers=1)
    found = evaluate_claims(given, ["encoder_and_decoder", "frequency_intervention"])
    both = [v for v in found if v.claim == "encoder_and_decoder"]
    arms = [v for v in found if v.claim == "frequency_intervention"]
    assert [v.scope for v in both] == ["over 3 seeds", *(f"for seed {s}" for s in (1, 2, 3))]
    assert [v.scope for v in arms] == ["over 3 seeds"], "single seeds decide nothing between two trainings"
    assert both[0].status == arms[0].status == "holds"


def test_rows_that_name_no_seed_belong_to_the_one_seed_of_their_model() -> None:
    given = edited(table(), lambda r: {**r, "seed": None} if r["metric"] == "gradient_enrichment" else r)
    assert len(evaluate_claims(given, ["emerges_early_and_persists"])) == 1
    assert evaluate_claims(given, ["emerges_early_and_persists"])[0].status == "holds"


def test_models_of_other_widths_are_judged_at_their_own_rank() -> None:
    from anisoscope.claims.engine.evidence import most_common_ranks
    from anisoscope.results.query import Table

    rows = [
        {"model": "wide", "metric": "gradient_energy", "variant": "fit=refit;proxy=pca;rank=16", "value": 0.5},
        {"model": "wide", "metric": "gradient_energy", "variant": "fit=refit;proxy=semi_nmf;rank=16", "value": 0.5},
        {"model": "narrow", "metric": "gradient_energy", "variant": "fit=refit;proxy=pca;rank=8", "value": 0.5},
    ]
    assert most_common_ranks(Table.from_records(rows)) == {"wide": 16, "narrow": 8}
