"""A verdict that rests on directions that the contexts do not determine stays open, and says so in its line."""

from __future__ import annotations

import math
from typing import Any

import pytest

from anisoscope.claims.catalogue import evaluate_claims
from anisoscope.claims.engine.claim import UNDETERMINED, Part, Verdict
from anisoscope.claims.revisiting.determined import STABLE
from anisoscope.results.quantity import Quantity
from anisoscope.results.query import Table, options_of
from support.fake_training import edited, table

Row = dict[str, Any]
CLAIMS = {  # and the options of the directions that each reads
    "tangent_energy": "",
    "emerges_early_and_persists": "",
    "anisotropy_share": "",
    "embedding_updates_aligned": "update",
    "frequent_most_enriched": "",
    "semi_nmf_beats_pca": "",
    "frequency_intervention": "",
    "encoder_and_decoder": "",
}
MODELS = {"encoder_and_decoder": ("decoder", "encoder"), "frequency_intervention": ("decoder", "decoder-flat")}


def judged(given: Table, claim: str = "tangent_energy", **options: Any) -> Verdict:
    return evaluate_claims(given, [claim], **options)[0]


def with_stability(given: Table, value: float, *, fit: str = "") -> Table:
    """The table with the stability of every proxy (or of those of one fit)."""
    rows = []
    for row in given.records():
        rows.append(row)
        options = options_of(row["variant"])
        own = row["metric"] == "gradient_energy" and not row["group"] and not {"control", "average"} & options.keys()
        if own:
            mine = value if fit in ("", options["fit"]) else 1.0
            nothing = {"low": None, "high": None, "replicates": None}
            rows.append({**row, **nothing, "metric": "proxy_stability", "value": mine})
    return Table.from_records(rows, given.about)


@pytest.mark.parametrize("claim", CLAIMS)
def test_directions_that_refits_do_not_keep_leave_a_verdict_open(claim: str) -> None:
    planted = {"pca": -0.1} if claim == "semi_nmf_beats_pca" else {}
    seeds = (0, 1, 2) if claim == "frequency_intervention" else None  # two trainings are compared over seeds
    given = table(models=MODELS.get(claim, ("decoder",)), seeds=seeds, **planted)
    plain, sure, turned = (
        judged(found, claim) for found in (given, with_stability(given, 0.99), with_stability(given, STABLE - 0.02))
    )
    assert plain.status == sure.status == "holds" and sure.why == plain.why
    assert turned.status == "undecided" and UNDETERMINED in turned.why and "keep 0.95 of it" in turned.why


def test_what_would_fail_is_left_open_too() -> None:
    lost = table(strength=0.0)
    assert judged(lost).status == "fails" and judged(with_stability(lost, 0.9)).status == "undecided"


def test_late_the_frozen_directions_are_the_ones_that_must_be_determined() -> None:
    found = judged(with_stability(table(), 0.9, fit="frozen"))
    aspects = found.details["aspects"]
    assert found.status == "undecided" and UNDETERMINED in found.why
    assert (aspects["early"]["status"], aspects["late"]["status"]) == ("holds", "undecided")
    assert judged(with_stability(table(), 0.9, fit="frozen"), fit="refit").status == "holds"


def test_seeds_that_are_fitted_on_the_same_contexts_do_not_determine_them() -> None:
    given = table(seeds=(0, 1, 2))
    over = [v for v in evaluate_claims(with_stability(given, 0.9), ["tangent_energy"]) if v.details["pooled"]]
    assert [v.status for v in over] == ["undecided"] and UNDETERMINED in over[0].why
    over = [v for v in evaluate_claims(given, ["tangent_energy"]) if v.details["pooled"]]
    assert [v.status for v in over] == ["holds"]


# -- above chance is a matter of random subspaces, not of the interval over contexts


def started(given: Table, p: float) -> Table:
    """The table with gradients far in the directions at step 0, and this p there."""

    def change(row: Row) -> Row:
        if row["step"] != 0:
            return row
        if row["metric"] == "gradient_p_holm":
            return {**row, "value": p}
        if row["metric"] == "gradient_enrichment" and "control=" not in row["variant"]:
            many = [3.0 + 0.01 * i for i in range(8)]
            return {**row, "value": 3.0, "low": 2.9, "high": 3.1, "replicates": many}
        return row

    return edited(given, change)


def test_enrichment_is_there_at_the_start_only_if_random_subspaces_say_so() -> None:
    there, lucky = (judged(started(table(), p), "emerges_early_and_persists") for p in (0.01, 0.4))
    assert there.details["starts_at_chance"] is False and there.status == "fails"
    assert lucky.details["starts_at_chance"] is None and lucky.status != "fails"
    onsets = [found.details["courses"]["all"]["onset"] for found in (there, lucky)]
    assert onsets[0] == 0 and onsets[1] != 0


def test_an_interval_that_decides_alone_has_no_p() -> None:
    part = Part.of("a", Quantity(1.0, tuple(1.0 + 0.01 * i for i in range(8))), margin=0.5)
    assert part.status == "holds" and math.isnan(part.p)


def test_the_verdict_on_updates_tells_their_alignment_which_needs_no_rank() -> None:
    given = table()
    rows = [*given.records()]
    for row in given.records():
        if row["metric"] == "gradient_energy" and row["variant"] == "fit=refit;of=update;proxy=semi_nmf;rank=16":
            numbers = {"value": 2.5, "low": 2.4, "high": 2.6, "replicates": [2.5 + 0.01 * i for i in range(8)]}
            rows.append({**row, **numbers, "metric": "gradient_alignment", "variant": "of=update"})
    assert len(rows) > len(given.records())
    told = judged(Table.from_records(rows, given.about), "embedding_updates_aligned").why
    assert "alignment with the activations, which needs no rank, is 2.5" in told
