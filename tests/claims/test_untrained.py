"""Claims on blocks at initialisation: planted curves are told, an identity is not, one seed decides nothing."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from anisoscope.claims.catalogue import evaluate_claims
from anisoscope.claims.engine.claim import Verdict
from anisoscope.claims.inherent.intervention import ADDED_MARGIN
from anisoscope.results.table import Table
from anisoscope.studies.untrained.protocol import CLAIMS

RISING = {0.0: 0.01, 10.0: 0.2, 50.0: 0.6, 100.0: 0.9, 200.0: 0.98}


def planted(
    curve: Mapping[float, float],
    *,
    added: float | Mapping[str, float] = 0.0,
    seeds: int = 3,
    noise: float = 0.0,
    metric: str = "average_cosine",
) -> Table:
    """Arms whose inputs follow a curve and whose outputs have more by what is added, by initialisation."""
    random = np.random.default_rng(0)
    sites = {"average_cosine": (("embed", 0), ("resid", 1)), "attention_sharpness": (("scores", 1),)}[metric]
    records = []
    for init, more in (added if isinstance(added, Mapping) else {"normal": added}).items():
        for seed in range(seeds):
            for bias, value in curve.items():
                shaken = value + noise * random.normal()
                own = {"model": "bert", "seed": seed, "stack": "single", "metric": metric, "group": "", "n": 10}
                own["variant"] = f"bias={bias:g};init={init};input_norm=1;width=64"
                records += [
                    {**own, "kind": kind, "layer": layer, "value": shaken + (more if kind == "resid" else 0.0)}
                    for kind, layer in sites
                ]
    return Table.from_records(records)


def judged(table: Table, claim: str) -> Verdict:
    return evaluate_claims(table, [claim])[0]


def added(table: Table) -> Verdict:
    return judged(table, "anisotropic_at_initialisation")


def test_a_block_that_lets_its_inputs_pass_is_not_anisotropic_of_its_own() -> None:
    identity = added(planted(RISING, noise=1e-4))
    assert identity.status == "fails" and identity.effect == pytest.approx(0.0, abs=1e-3)
    assert "the outputs have an average cosine of 0.6" in identity.why
    assert "the anisotropy is that of its inputs" in identity.why
    more = added(planted(RISING, added=0.2, noise=1e-4))
    assert more.status == "holds" and more.effect == pytest.approx(0.2, abs=1e-3), "the counter-test"
    assert "that of its inputs" not in more.why
    assert added(planted(RISING, added=-0.2)).status == "fails", "nor one that takes anisotropy away"


def test_one_arm_that_adds_nothing_decides_and_the_others_are_counted() -> None:
    verdict = added(planted(RISING, added={"normal": 0.5 * ADDED_MARGIN, "xavier": 0.2}))
    assert verdict.status == "fails" and "what decides of 2 arms is normal" in verdict.why
    assert "adds more than the margin in 1 of 2 arms" in verdict.why


def test_what_a_block_adds_is_asked_only_of_inputs_that_leave_room_for_it() -> None:
    far = {0.0: 0.0, 1.0: 0.0145, 50.0: 0.975}
    verdict = added(planted(far, added=0.2))
    assert verdict.status == "undecided" and not verdict.details["missing"]
    assert (
        "no bias brings the inputs to an average cosine between 0.25 and 0.75 (they have 0.0145 and 0.975)"
        in verdict.why
    )
    assert "a bias of about 8" in verdict.why, "N = ‖x‖ makes it ½"
    near = added(planted({**far, 8.0: 0.5}, added=0.2))
    assert near.status == "holds" and "at a bias of 8 the outputs" in near.why


def test_a_rising_curve_holds_and_a_falling_one_fails() -> None:
    falling = dict(zip(RISING, reversed(RISING.values()), strict=True))
    for claim, metric in (
        ("anisotropy_grows_with_bias", "average_cosine"),
        ("sharpness_grows_with_bias", "attention_sharpness"),
    ):
        assert judged(planted(RISING, metric=metric), claim).status == "holds"
        assert judged(planted(falling, metric=metric), claim).status == "fails"
        assert judged(planted(dict.fromkeys(RISING, 0.5), noise=0.1, metric=metric), claim).status != "holds"


def test_growth_says_what_the_inputs_do_themselves() -> None:
    assert "the inputs themselves go from 0.01 to 0.98" in judged(planted(RISING), "anisotropy_grows_with_bias").why
    sharp = judged(planted(RISING, metric="attention_sharpness"), "sharpness_grows_with_bias")
    assert "the inputs themselves" not in sharp.why


@pytest.mark.parametrize("seeds", [1, 2])
@pytest.mark.parametrize("claim", ["anisotropic_at_initialisation", "anisotropy_grows_with_bias"])
def test_one_or_two_seeds_decide_nothing(claim: str, seeds: int) -> None:
    found = evaluate_claims(planted(RISING, added=0.2, seeds=seeds), [claim])
    assert [verdict.status for verdict in found] == ["undecided"]
    assert ("one seed decides nothing" if seeds == 1 else "2 seeds") in found[0].why
    three = evaluate_claims(planted(RISING, added=0.2), [claim])
    assert [verdict.status for verdict in three] == ["holds"], "the counter-test; seeds have no verdicts of their own"
    assert [each["seed"] for each in three[0].details["per_seed"]] == [0, 1, 2], "they are what it rests on"


def test_no_interval_leaves_what_is_possible() -> None:
    shaky = {bias: min(1.0, 0.1 * i) for i, bias in enumerate((0.0, 1.0, 2.0, 3.0, 4.0))}
    verdict = judged(planted(shaky, noise=0.06, seeds=4), "anisotropy_grows_with_bias")
    assert verdict.low < verdict.effect < 1 and verdict.high == 1.0


def test_other_tables_are_not_asked() -> None:
    plain = Table.from_records(
        [{"model": "m", "seed": 0, "stack": "single", "layer": 1, "kind": "resid", "metric": "average_cosine",
          "variant": "", "group": "", "value": 0.5}]
    )  # fmt: skip
    for claim in CLAIMS:
        assert judged(plain, claim).details["missing"] is True, "no block at initialisation in it"
    few = judged(planted({0.0: 0.0, 1.0: 0.5}), "anisotropy_grows_with_bias")
    assert few.status == "undecided" and few.details["missing"] is True
