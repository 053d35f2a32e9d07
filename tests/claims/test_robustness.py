"""Verdicts under other choices: each flips where its rows do and says so; what changes nothing is not listed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anisoscope.claims.catalogue import evaluate_claims
from anisoscope.claims.engine.claim import Verdict, verdicts_to_dicts
from anisoscope.results.quantity import Quantity, halved
from anisoscope.results.query import Query, Table, options_of, variant_name
from anisoscope.view.sections.findings import badge_line, robust_words
from anisoscope.view.verdict_grid import verdict_grid
from support.fake_training import edited, table

Records = list[dict[str, Any]]
TANGENT = ("gradient_energy", "gradient_enrichment", "gradient_p", "gradient_p_holm")


def rows(**effects: Any) -> Records:
    return table(**{"only": TANGENT, "proxies": ("semi_nmf",), "fits": ("refit",), **effects}).records()


def again(records: Records, **options: Any) -> Records:
    """The rows of tangent directions under further keys of their variant."""
    found = [r for r in records if "proxy" in options_of(r["variant"])]
    return [{**r, "variant": variant_name({**options_of(r["variant"]), **options})} for r in found]


def judged(records: Records, claim: str = "tangent_energy", **choice: Any) -> Verdict:
    return evaluate_claims(Table.from_records(records), [claim], robust=True, **choice)[0]


def statuses(verdict: Verdict) -> dict[str, str]:
    return {f"{b['kind']} {b['name']}": b["status"] for b in verdict.details["robust"]["badges"]}


def test_a_verdict_that_depends_on_nothing_is_the_same_everywhere() -> None:
    more = ({"coordinates": "standardised"}, {"first": "out"}, {"split": 1})
    found = judged([*rows(), *(row for options in more for row in again(rows(), **options))])
    expected = ["coordinates standardised", "first position no first", "half 1", "half 2", "split 1"]
    assert statuses(found) == dict.fromkeys(expected, "holds") and found.status == "holds"
    record = found.details["robust"]
    assert (record["same"], record["of"], record["missing"]) == (5, 5, ["rank", "proxy", "fit"])
    assert record["words"] == "same verdict in 5 of 5" and "depends" not in found.why


@pytest.mark.parametrize(
    ("other", "noun"),
    [
        ({"rank": 32}, "the rank: it fails with rank 32"),
        ({"proxy": "pca"}, "the proxy: it fails with pca"),
        ({"fit": "frozen"}, "the fit: it fails with the frozen proxy"),
        ({"coordinates": "standardised"}, "the coordinates: it fails in standardised coordinates"),
        ({"first": "out"}, "the first position: it fails without the first position"),
        ({"split": 3}, "the split of the contexts: it fails with split 3 of the contexts"),
    ],
)
def test_a_choice_on_which_a_verdict_hangs_is_named(other: dict[str, Any], noun: str) -> None:
    kind = next(iter(other))
    choice = {"fit": "refit"} if kind == "fit" else {}  # otherwise frozen directions would decide late in training
    found = judged([*rows(), *again(rows(strength=0.0), **other)], rank=16, **choice)
    kind = {"first": "first position"}.get(kind, kind)
    assert [status for name, status in statuses(found).items() if name.startswith(f"{kind} ")] == ["fails"]
    if kind in ("coordinates", "first position"):  # these leave the verdict itself open
        assert found.status == "undecided" and f"it depends on {noun.partition(':')[0]}: " in found.why
    else:
        assert found.status == "holds" and found.why.endswith(f"; it depends on {noun}.")
    assert found.details["robust"]["words"].startswith("same verdict in 2 of 3; fails ")


def test_rows_that_a_claim_does_not_read_are_no_choice_of_its_verdict() -> None:
    unread = again(rows(strength=0.0), of="weight")
    assert list(statuses(judged([*rows(), *unread]))) == ["half 1", "half 2"]
    both = [*rows(proxies=("semi_nmf", "pca"), pca=-0.05)]
    found = judged(both, "semi_nmf_beats_pca")
    assert not any(name.startswith("proxy") for name in statuses(found)), "it compares two proxies whatever is chosen"
    assert "proxy" not in found.details["robust"]["missing"]


def test_an_alternative_without_some_controls_is_judged_by_the_others() -> None:
    few = [r for r in again(rows(), proxy="pca") if options_of(r["variant"]).get("control") != "permuted"]
    badge = next(b for b in judged([*rows(), *few]).details["robust"]["badges"] if b["kind"] == "proxy")
    assert (badge["status"], badge["lacking"], badge["parts"]) == ("holds", ["early: permuted", "late: permuted"], 8)
    shown = verdicts_to_dicts([judged([*rows(), *few])])[0]
    assert badge_line(shown).replace("\u00a0", " ").startswith("pca (6/8) ✓ · half 1 ✓ 2 ✓")
    assert robust_words(shown) == "same verdict in 3 of 3 (5 not measured)"


def test_standardised_energies_are_never_read_against_controls_as_they_are() -> None:
    """Only energies in other coordinates: their controls were not measured, whatever the others are."""
    alone = [r for r in again(rows(), coordinates="standardised") if "control" not in options_of(r["variant"])]
    assert "coordinates standardised" not in statuses(judged([*rows(), *alone]))


def test_geometry_without_the_first_position() -> None:
    def plain(record: dict[str, Any]) -> dict[str, Any] | None:
        return record if record["metric"] in ("average_cosine", "unigram_entropy") else None

    base = edited(table(models=("decoder", "decoder-flat")), plain).records()
    without = [{**r, "variant": "first=out", "value": r["value"] / 2} for r in base if r["metric"] == "average_cosine"]
    found = evaluate_claims(Table.from_records([*base, *without]), ["not_inherent"], robust=True)[0]
    assert statuses(found).keys() == {"first position no first"}


def test_a_half_of_the_folds_is_what_its_contexts_give() -> None:
    """An independent twin: the ratio of sums over the contexts of four folds, with the error of the difference."""
    gaps = []
    for seed in range(60):
        generator = np.random.default_rng(seed)
        below = generator.gamma(40.0, size=8)
        above = 0.3 * below + 0.4 * generator.normal(size=8)
        left = [float((above.sum() - a) / (below.sum() - b)) for a, b in zip(above, below, strict=True)]
        whole = Quantity(float(above.sum() / below.sum()), tuple(left))
        for half, kept in ((1, slice(0, 4)), (2, slice(4, 8))):
            found = halved(whole, half)
            low, high = found.interval()
            gaps.append((found.value - above[kept].sum() / below[kept].sum()) / ((high - low) / 2 / 3.182))
    assert np.median(np.abs(gaps)) < 0.1 and abs(np.mean(gaps)) < 0.05, "a small part of the standard error, no bias"


def test_a_half_of_a_mean_is_exact_and_its_interval_covers() -> None:
    hits = 0
    for seed in range(400):
        folds = np.random.default_rng(seed).normal(size=8)
        whole = Quantity(float(folds.mean()), tuple(((folds.sum() - folds) / 7).tolist()))
        half = halved(whole, 2)
        assert half.value == pytest.approx(folds[4:].mean()) and len(half.folds) == 4
        low, high = half.interval()
        assert (high - low) / 2 == pytest.approx(3.182 * folds[4:].std(ddof=1) / 2, rel=1e-3)
        hits += low < 0 < high
    assert 0.92 <= hits / 400 <= 0.98
    assert halved(Quantity(1.0, half=0.2), 1) == Quantity(1.0, half=0.2), "without folds it stays as it is"
    nan = float("nan")
    assert halved(Quantity(1.0, (0.9, nan, nan, 1.1, 1.0, 1.0, 1.0, 1.0)), 1).thin, "two live folds are too few"


def test_a_row_on_a_half_has_its_value_and_interval() -> None:
    row = next(iter(Query(table()).where(metric="gradient_energy", control=None).known()))
    half = row.on_half(1)
    assert half.whole == row.value and half.quantity == halved(row.quantity, 1)
    assert (half.value, half.low, half.high) == (half.quantity.value, *half.quantity.interval())
    assert half.layer == row.layer and half.known


def test_verdicts_of_older_files_have_no_badges_on_the_page() -> None:
    records = verdicts_to_dicts(evaluate_claims(table(), ["tangent_energy"]))
    older = [{k: v for k, v in r.items() if not k.startswith(("p_", "q"))} for r in records]
    grid = verdict_grid(older)
    assert grid is not None
    cell = grid.papers[0][2][0].columns[0][1][0]
    assert cell.robust == [] and cell.alone == ""


def test_a_rank_without_frozen_directions_is_compared_with_refitted_ones() -> None:
    """Late the frozen directions have lost their lead; with rank 32, refitted only, it is there as with rank 16."""
    records = rows(fits=("refit", "frozen"), ranks=(16, 32))
    kept = [r for r in records if not {"fit=frozen", "rank=32"} <= set(r["variant"].split(";"))]

    def lost(row: dict[str, Any]) -> dict[str, Any]:
        mine = "fit=frozen" in row["variant"] and "control=" not in row["variant"] and row["metric"] in TANGENT[:2]
        numbers = {n: row[n] / 20 for n in ("value", "low", "high")} | {
            "replicates": [x / 20 for x in row["replicates"]]
        }
        return {**row, **numbers} if mine and row["step"] == 1000 else row

    found = judged([lost(r) if r["replicates"] else r for r in kept], rank=16)
    badges = {b["kind"]: b for b in found.details["robust"]["badges"]}
    assert found.status == "fails" and "depends on the rank" not in found.why, found.why
    rank = badges["rank"]
    assert (rank["name"], rank["status"], rank["against"]) == ("32, refitted", "holds", "holds")
    assert "with rank 32, refitted" not in found.details["robust"]["words"], "it is the same verdict"
    both = judged([lost(r) if r["replicates"] else r for r in records], rank=16)
    rank = next(b for b in both.details["robust"]["badges"] if b["kind"] == "rank")
    assert (rank["name"], rank["against"]) == ("32", "fails"), "with frozen directions of both ranks they are compared"


def test_a_rank_that_turns_the_verdict_on_refitted_directions_is_named() -> None:
    records = rows(fits=("refit", "frozen"))
    other = again(rows(strength=0.0), rank=32)
    found = judged([*records, *other], rank=16)
    assert found.status == "holds" and "it depends on the rank: it fails with rank 32, refitted" in found.why
