"""Interventions on token frequency: measured strength orders the arms, the strongest decides, all are judged alike."""

from __future__ import annotations

from typing import Any

import pytest

from anisoscope.claims.catalogue import evaluate_claims
from anisoscope.claims.engine.claim import Verdict
from anisoscope.claims.engine.evidence import Study, studies_by_seed
from anisoscope.claims.revisiting.frequency_arm import ARM, FrequencyArms, biases_of, frequency_arms
from anisoscope.results.query import Table
from support.fake_training import edited, table

ARMS = ("decoder", "decoder-flat", "decoder-flatloss")
METRICS = ("gradient_enrichment", "average_cosine", "target_entropy", "loss", "probe_loss", "constant_loss")
SEEDS = (0, 1, 2)
PLACE = {"kind": "training", "layer": 0, "step": 0, "variant": "", "group": "", "stack": "single", "seed": 0}


def judged(models: tuple[str, ...] = ARMS, **effects: Any) -> list[Verdict]:
    options: dict[str, Any] = {"only": METRICS, "entropies": True, "seed_sd": 0.0, "scatter": 0.01, "bins": False}
    options |= {"seeds": SEEDS}
    return evaluate_claims(table(models=models, **options | effects), ["frequency_intervention"])


def study_of(bits: dict[str, tuple[str, float]]) -> Study:
    rows = [{"model": model, "metric": metric, "value": value, **PLACE} for model, (metric, value) in bits.items()]
    (study,) = studies_by_seed(Table.from_records(rows), {metric for metric, _ in bits.values()})
    return study


def test_arms_are_ordered_by_the_entropy_of_their_targets_not_by_their_names() -> None:
    """Contexts are resampled whole, so a `zipf1.1` arm may well have less bias than the natural one."""
    study = study_of({"decoder": ("unigram_entropy", 4.5), "decoder-zipf1.1": ("unigram_entropy", 5.0)})
    assert biases_of(list(study.values())) == {"decoder": -4.5, "decoder-zipf1.1": -5.0}
    unknown = study_of({"decoder": ("unigram_entropy", 4.5), "decoder-flat": ("other", 1.0)})
    assert biases_of(list(unknown.values())) == {"decoder": 1.0, "decoder-flat": 0.0}, "names, for both"
    weighted = study_of({"decoder": ("unigram_entropy", 4.5), "decoder-flatloss": ("target_entropy", 7.0)})
    assert biases_of(list(weighted.values()))["decoder-flatloss"] == -7.0


def test_the_strongest_intervention_of_each_direction_is_judged() -> None:
    bits = {"decoder": 9.0, "decoder-flat": 9.3, "decoder-flatloss": 12.5, "decoder-zipf1.5": 8.5}
    bits |= {"decoder-powerloss2": 6.0, "encoder": 9.0, "encoder-flat": 9.2, "gpt2": 8.0}
    found = frequency_arms(study_of({model: ("target_entropy", value) for model, value in bits.items()}))
    pairs = {"decoder-powerloss2 over decoder", "decoder over decoder-flatloss", "encoder over encoder-flat"}
    assert set(found) == pairs
    less = found["decoder over decoder-flatloss"]
    assert isinstance(less, FrequencyArms) and [run.model for run in less.weaker] == ["decoder-flat"]
    more = found["decoder-powerloss2 over decoder"]
    assert isinstance(more, FrequencyArms) and [run.model for run in more.weaker] == ["decoder-zipf1.5"]


def test_the_strong_form_decides_and_the_weak_one_stands_beside_it() -> None:
    (holds,) = judged(flat=1.0, flatloss=0.4)
    assert holds.subject == "decoder over decoder-flatloss" and holds.status == "holds"
    assert "effective entropy of its targets 12.5 bits" in holds.why and "9 bits" in holds.why
    assert "with the weaker intervention decoder-flat (effective entropy of its targets 9.3 bits)" in holds.why
    assert holds.details["aspects"]["weaker interventions"]["status"] == "fails"
    (fails,) = judged(flat=0.4, flatloss=1.0)
    assert fails.status == "fails" and fails.details["aspects"]["weaker interventions"]["status"] == "holds"
    (alone,) = judged(ARMS[:2], flat=0.4)
    assert alone.subject == "decoder over decoder-flat" and alone.status == "holds", "the only form there decides"


def test_arms_that_part_late_are_judged_late() -> None:
    """An average over log-spaced steps would dilute what training did with steps at which nothing had happened."""

    def grown(r: dict[str, Any]) -> dict[str, Any]:
        late = r["metric"] == "gradient_enrichment" and r["step"] and r["step"] >= 1000
        scale = 0.5 if late and r["model"] == "decoder-flatloss" else 1.0
        return {**r, "value": r["value"] * scale, "replicates": [x * scale for x in r["replicates"] or []] or None}

    options: dict[str, Any] = {"only": METRICS, "entropies": True, "seed_sd": 0.0, "scatter": 0.01, "bins": False}
    given = table(models=ARMS[::2], flatloss=1.0, seeds=SEEDS, **options)
    (found,) = evaluate_claims(edited(given, grown), ["frequency_intervention"])
    assert found.status == "holds" and found.effect == pytest.approx(1.0, abs=0.1)
    assert found.details["aspects"]["early"]["status"] == "fails" and found.details["step"] == 1000


def test_gradients_of_another_loss_are_not_compared() -> None:
    options: dict[str, Any] = {"only": METRICS, "entropies": True, "flatloss": 0.4, "bins": False, "seeds": SEEDS}
    given = table(models=ARMS[::2], **options)
    entries = [
        {**entry, **({"gradients_of": "weighted loss"} if "flatloss" in entry["name"] else {})}
        for entry in given.about["models"]
    ]
    other = Table(given.arrow, {**given.about, "models": entries})
    (verdict,) = evaluate_claims(other, ["frequency_intervention"])
    assert verdict.status == "undecided" and "--weighted-gradients" in verdict.why
    assert evaluate_claims(given, ["frequency_intervention"])[0].status == "holds", "the counter-test"


def test_a_weak_arm_that_did_not_learn_is_left_out_and_a_strong_one_leaves_it_open() -> None:
    def stuck(model: str) -> Verdict:
        def change(r: dict[str, Any]) -> dict[str, Any]:
            lost = r["model"] == model and r["metric"] == "probe_loss"
            return {**r, "value": 9.0, "replicates": None} if lost else r

        options: dict[str, Any] = {"only": METRICS, "entropies": True, "flatloss": 0.4, "bins": False, "seeds": SEEDS}
        return evaluate_claims(edited(table(models=ARMS, **options), change), ["frequency_intervention"])[0]

    weak, strong = stuck("decoder-flat"), stuck("decoder-flatloss")
    assert weak.status == "holds" and "weaker" not in weak.why
    assert strong.status == "undecided" and "decoder-flatloss did not learn" in strong.why


def test_two_trainings_that_differ_by_luck_decide_nothing() -> None:
    for flatloss in (0.4, 1.6):
        (found,) = judged(ARMS[::2], flatloss=flatloss, seeds=(0,))
        assert found.status == "undecided" and "one seed decides nothing" in found.why


def test_seeds_make_it_general() -> None:
    found = judged(ARMS[::2], flatloss=0.4, seeds=(0, 1, 2), seed_sd=0.05, scatter=0.15)
    assert found[0].scope == "over 3 seeds" and found[0].status == "holds"


def test_names_of_arms() -> None:
    names = ("decoder-flat (a)", "decoder (a)", "decoder-zipf1.5", "encoder-flatloss", "decoder-flat-powerloss0.5")
    assert [ARM.sub("", name) for name in names] == ["decoder (a)", "decoder (a)", "decoder", "encoder", "decoder"]
    assert ARM.sub("", "decoder-flatter") == "decoder-flatter"
