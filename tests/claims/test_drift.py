"""Drift against anisotropy: the numbers are those of an independent computation, and what is planted is told."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from anisoscope.claims.catalogue import evaluate_claims
from anisoscope.claims.engine.claim import Verdict
from anisoscope.claims.engine.correlation import correlated
from anisoscope.claims.inherent.drift import drift_correlations, pooled_correlations
from anisoscope.results.quantity import Quantity
from anisoscope.results.query import Table
from support.fake_modalities import Media, media_table
from support.fake_training import edited

T95 = 2.365  # of 7 degrees of freedom
Z95 = 1.959964


def rising(depth: float) -> float:
    return 0.2 + 0.5 * depth


def bumpy(depth: float) -> float:
    """Goes with no straight drift: up, down, up."""
    return 0.4 + 0.2 * math.sin(9 * depth)


def verdicts(*sheets: Media) -> dict[str, Verdict]:
    found = evaluate_claims(media_table(*sheets), ["drift_explains_anisotropy"])
    return {v.subject: v for v in found}


CASES = [
    ({}, {}, "holds"),
    ({"drift": lambda depth: 2 - depth}, {}, "fails"),  # the further from the origin, the less anisotropic
    ({"share": 0.2}, {}, "fails"),  # they go together, but little vanishes with the mean
    ({"cosine": bumpy}, {}, "undecided"),  # 13 sites do not tell no correlation from a small one
    ({"cosine": 0.5}, {"noise": 0.05, "layers": 6}, "undecided"),  # nothing but noise
    ({"share": 0.5}, {"noise": 0.01}, "undecided"),
    ({"share": None}, {}, "undecided"),  # not measured
]


@pytest.mark.parametrize(("stream", "more", "status"), CASES)
def test_what_is_planted_is_told(stream: dict[str, Any], more: dict[str, Any], status: str) -> None:
    found = verdicts(Media(**more).stream(**{"cosine": rising, **stream}))["m"]
    assert found.status == status, found.why
    assert found.why.endswith(".") and ". " not in found.why and "nan" not in found.why and "unknown" not in found.why
    if status == "holds":
        assert found.low > found.margin == 0.3


def test_it_was_planted_in_all_three_ways() -> None:
    assert {status for _, _, status in CASES} == {"holds", "fails", "undecided"}


def _noisy() -> Table:
    return media_table(Media(noise=0.02, entropy=7).stream(rising, norm=3.0))


def test_correlations_equal_scipys_and_the_jackknife_a_slow_one() -> None:
    from scipy.stats import pearsonr, spearmanr

    table = _noisy()
    rows = [r for r in table.records() if r["kind"] in ("embed", "resid")]
    by_site = {(r["metric"], r["layer"]): r for r in rows}
    layers = range(13)
    drift, cosine = ([by_site[m, n] for n in layers] for m in ("drift", "average_cosine"))
    found = drift_correlations(table)[0]
    assert found["n"] == 13 and found["p_note"].startswith("descriptive")
    for name, function in (("pearson", pearsonr), ("spearman", spearmanr)):
        value, p = function([r["value"] for r in drift], [r["value"] for r in cosine])
        p = max(p, 2 / math.factorial(13))
        assert (found[name], found[f"{name}_p"]) == pytest.approx((value, p), rel=1e-9)
        folds = np.array([
            function([r["replicates"][j] for r in drift], [r["replicates"][j] for r in cosine])[0] for j in range(8)
        ])  # fmt: skip
        half = T95 * math.sqrt(7 / 8 * ((folds - folds.mean()) ** 2).sum())
        inside = min(value, 1 - 6 / (13 * (13**2 - 1))) if name == "spearman" else value  # ranks are coarse
        wide = Z95 * math.sqrt((1 + (inside**2 / 2 if name == "spearman" else 0)) / 10)
        low, high = (math.tanh(math.atanh(inside) + sign * wide) for sign in (-1, 1))
        bounds = max(-1, min(low, value - half)), min(1, max(high, value + half))
        assert (found[f"{name}_low"], found[f"{name}_high"]) == pytest.approx(bounds, rel=1e-9)
    shares = [by_site["explained_by_drift", n] for n in layers]
    assert found["explained"] == pytest.approx(np.median([r["value"] for r in shares]))
    folds = np.median([r["replicates"] for r in shares], axis=0)
    half = T95 * math.sqrt(7 / 8 * ((folds - folds.mean()) ** 2).sum())
    assert found["explained_high"] - found["explained"] == pytest.approx(half)
    near = [by_site["drift", n]["value"] / by_site["mean_norm", n]["value"] for n in layers]
    assert found["near_identity"] == pytest.approx(pearsonr(np.square(near), [r["value"] for r in cosine])[0])
    assert "near-identity" in found["near_identity_note"]


def test_the_final_norm_is_apart_and_stages_are_blocks() -> None:
    """A staged model also has rows after every block, which do not count."""
    staged = Media("c", "convolution", layers=5).stream(rising)
    staged.kind = "resid"
    staged.stream(lambda depth: 0.9 - 0.5 * depth, ends=False)
    found = drift_correlations(media_table(staged))[0]
    assert (found["kind"], found["n"], found["spearman"]) == ("stage", 6, 1.0)
    assert [p["kind"] for p in found["points"]] == ["embed", *["stage"] * 5, "final"]
    assert [p["counted"] for p in found["points"]] == [True] * 6 + [False]
    plain = drift_correlations(media_table(Media(layers=5).stream(lambda depth: 0.9 - 0.5 * depth)))[0]
    assert plain["kind"] == "resid" and plain["spearman"] == -1.0, "the counter-test: rows after blocks can count"


def _altered(change: Any) -> dict[str, Any]:
    table = _noisy()
    about = table.about
    return drift_correlations(Table(edited(table, change).arrow, about))[0]


def test_what_has_no_number_says_why() -> None:
    def constant(r: dict[str, Any]) -> dict[str, Any]:
        return {**r, "value": 2.0, "replicates": [2.0] * 8} if r["metric"] == "drift" else r

    found = _altered(constant)
    assert math.isnan(found["pearson"]) and math.isnan(found["spearman_p"]) and "same at every site" in found["note"]
    found = _altered(lambda r: {**r, "replicates": None})
    assert math.isfinite(found["pearson"]) and math.isnan(found["pearson_low"]) and "replicates" in found["note"]
    found = _altered(lambda r: r if r["layer"] < 2 and r["kind"] != "final" else None)
    assert math.isnan(found["spearman"]) and found["note"].startswith("2 sites only")
    found = _altered(lambda r: {**r, "value": math.nan} if r["layer"] == 4 else r)
    assert found["n"] == 12 and math.isfinite(found["pearson_low"]) and not found["note"]
    found = _altered(lambda r: r if r["metric"] != "drift" else None)
    assert found["n"] == 0 and found["note"] == "drift was not measured"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: {**r, "value": 2.0, "replicates": [2.0] * 8} if r["metric"] == "drift" else r, "same at every site"),
        (lambda r: {**r, "replicates": None}, "without an interval"),
        (lambda r: r if r["layer"] < 2 else None, "2 have both"),
        (lambda r: r if r["metric"] != "drift" else None, "no drift"),
    ],
)
def test_a_hostile_table_leaves_the_claim_open_and_says_so(change: Any, words: str) -> None:
    found = evaluate_claims(edited(_noisy(), change), ["drift_explains_anisotropy"])[0]
    assert found.status == "undecided" and words in found.why and "unknown" not in found.why, found.why


def _sites(random: np.random.Generator, signal: float, *, count: int = 8) -> list[Quantity]:
    shared, found = random.normal(size=8), []
    for i in range(count):
        folds = signal * i / count + 0.3 * math.sqrt(8) * (0.7 * shared + 0.71 * random.normal(size=8))
        found.append(Quantity(folds.mean(), tuple((folds.sum() - folds) / 7)))
    return found


def test_noise_rarely_passes_for_a_correlation_and_a_signal_does() -> None:
    random = np.random.default_rng(3)

    def holds(signal: float) -> float:
        pairs = [(_sites(random, signal), _sites(random, signal)) for _ in range(150)]
        return float(np.mean([correlated(*pair, "spearman").interval()[0] > 0.3 for pair in pairs]))

    assert holds(0.0) <= 0.03
    assert holds(3.0) >= 0.95, "the counter-test"


def test_rows_written_twice_are_harmless() -> None:
    table = _noisy()
    twice = Table(Table.concat([table, table]).arrow, table.about)
    one, two = drift_correlations(table)[0], drift_correlations(twice)[0]
    assert one == two


def test_seeds_are_pooled_and_each_is_told() -> None:
    sheets = [Media(number=n, entropy=n, noise=0.02).stream(rising) for n in range(3)]
    found = evaluate_claims(media_table(*sheets), ["drift_explains_anisotropy"])
    assert [v.scope for v in found] == ["over 3 seeds", "for seed 0", "for seed 1", "for seed 2"]
    assert found[0].status == "holds"
    assert found[0].effect == pytest.approx(np.mean([v.effect for v in found[1:]]))
    assert len(drift_correlations(media_table(*sheets))) == 3


# all models together


def _models(*streams: Any) -> list[Media]:
    return [Media(f"m{i}", entropy=i, layers=6 + i).stream(**stream) for i, stream in enumerate(streams)]


GOOD, BAD = {"cosine": rising}, {"cosine": rising, "drift": lambda depth: 2 - depth}


def test_models_that_are_not_explained_are_named() -> None:
    found = verdicts(*_models(GOOD, GOOD, GOOD, GOOD, BAD))["all models"]
    assert found.status == "undecided" and "does not hold in m4" in found.why and "holds in 4 of 5" in found.why
    assert found.details["models"]["m4"] == "fails"
    assert verdicts(*_models(GOOD, GOOD, GOOD))["all models"].status == "holds"
    assert verdicts(*_models(BAD, BAD, BAD))["all models"].status == "fails"
    few = verdicts(*_models(GOOD, GOOD))["all models"]
    assert few.status == "undecided" and "needs 3" in few.why
    assert "all models" not in verdicts(*_models(GOOD))


def test_over_seeds_a_model_holds_or_fails_only_where_it_does_in_each() -> None:
    def seed(number: int, last: Any) -> list[Media]:
        sheets = enumerate((GOOD, GOOD, BAD, last))
        return [Media(f"m{i}", number=number, entropy=9 * number + i, layers=7).stream(**kind) for i, kind in sheets]

    table = media_table(*seed(0, GOOD), *seed(1, BAD), *seed(2, GOOD))
    found = [v for v in evaluate_claims(table, ["drift_explains_anisotropy"]) if v.subject == "all models"]
    assert found[0].scope == "over 3 seeds" and "holds in 2 of 4" in found[0].why
    assert "does not hold in m2, is open in m3" in found[0].why
    assert "holds in 3 of 4" in found[1].why, "in the first seed m3 is explained"


def test_untrained_models_do_not_count_among_all() -> None:
    fresh = Media("fresh", entry={"notes": ["random weights (seed 0)"]}).stream(**BAD)
    found = verdicts(*_models(GOOD, GOOD, GOOD), fresh)
    assert (
        found["all models"].status == "holds"
        and "fresh did not learn and is left out: its weights are random" in found["all models"].why
    )
    assert found["fresh"].status == "undecided" and "its weights are random" in found["fresh"].why
    record = pooled_correlations(media_table(*_models(GOOD, GOOD, GOOD), fresh))[0]
    assert record["models"] == ["m0", "m1", "m2"]


def test_pooled_is_pearson_of_within_model_ranks() -> None:
    from scipy.stats import pearsonr, rankdata

    table = media_table(*[Media(f"m{i}", m, entropy=i, noise=0.1, layers=4 + 2 * i).stream(rising)
                          for i, m in enumerate(("text", "text", "speech", "convolution"))])  # fmt: skip
    x, y = [], []
    for record in drift_correlations(table):
        counted = [p for p in record["points"] if p["counted"]]
        n = len(counted)
        x += [(r - (n + 1) / 2) / n for r in rankdata([p["drift"] for p in counted])]
        y += [(r - (n + 1) / 2) / n for r in rankdata([p["cosine"] for p in counted])]
    found = {r["modality"]: r for r in pooled_correlations(table)}
    assert found["all"]["spearman"] == pytest.approx(pearsonr(x, y)[0])
    assert list(found) == ["all", "text", "speech", "convolution"]
    speech = next(r for r in drift_correlations(table) if r["modality"] == "speech")
    assert found["speech"]["spearman"] == pytest.approx(speech["spearman"]), "of one stack it is Spearman's"
    assert found["all"]["low"] < found["all"]["spearman"] < found["all"]["high"]
    assert math.isnan(found["text"]["low"]) and "needs 3" in found["text"]["note"]
    assert pooled_correlations(table) == pooled_correlations(table), "seeded"


def test_six_sites_decide_nothing_and_seven_may() -> None:
    few = verdicts(Media(layers=5).stream(rising))["m"]
    assert few.status == "undecided" and "6 sites are too few, 7 are needed" in few.why and few.effect == 1.0
    seeds = [Media(number=n, entropy=n, layers=5).stream(rising) for n in range(3)]
    assert evaluate_claims(media_table(*seeds), ["drift_explains_anisotropy"])[0].status == "undecided"
    assert verdicts(Media(layers=6).stream(rising))["m"].status == "holds"


def test_one_coincidence_of_profiles_is_not_confirmed_by_seeds_or_sister_models() -> None:
    """Both profiles are those of an architecture: their chance agreement is in all of its seeds."""

    def shared(seed: int, *, models: int, seeds: int) -> str:
        random = np.random.default_rng(seed)
        drift, cosine = (np.cumsum(random.normal(size=13)) for _ in range(2))
        sheets = []
        for i in range(models * seeds):
            own = 0.2 * np.random.default_rng((seed, i)).normal(size=(2, 13))
            sheet = Media(f"m{i % models}", number=i // models, entropy=(seed, i))
            at = lambda d, w=20 + drift + own[0]: w[round(12 * d)]  # noqa: E731
            sheets.append(sheet.stream(lambda d, w=0.5 + 0.02 * (cosine + own[1]): w[round(12 * d)], at))
        found = evaluate_claims(media_table(*sheets), ["drift_explains_anisotropy"])
        return next(v for v in found if v.subject == ("all models" if models > 1 else "m0")).status

    for models, seeds in ((1, 3), (4, 1)):
        held = sum(shared(seed, models=models, seeds=seeds) == "holds" for seed in range(60))
        assert held <= 3, (models, seeds, held)


def test_both_correlations_are_told_with_p_and_stay_in_their_range() -> None:
    for entropy in range(10):
        found = verdicts(Media(noise=0.3, entropy=entropy, layers=5).stream(rising))["m"]
        assert found.why.count("p = ") + found.why.count("p < ") == 2 and math.isnan(found.p), "it decides nothing"
        parts = {p["name"]: p for p in found.details["parts"]}
        for name in ("rank correlation", "linear correlation"):
            assert -1 <= parts[name]["low"] <= parts[name]["effect"] <= parts[name]["high"] <= 1
        assert parts["explained share"]["high"] <= max(1.0, parts["explained share"]["effect"])
        record = drift_correlations(media_table(Media(noise=0.3, entropy=entropy, layers=5).stream(rising)))[0]
        assert (record["spearman_low"], record["spearman_high"]) == pytest.approx(
            (parts["rank correlation"]["low"], parts["rank correlation"]["high"]), rel=1e-6
        ), "one number has one interval"


def test_copies_of_a_model_count_once_among_all() -> None:
    copies = [Media(name, entropy=1).stream(rising) for name in "abc"]
    assert "all models" not in verdicts(copies[0])
    found = verdicts(*copies)["all models"]
    assert found.status == "undecided" and found.details["missing"]
    assert pooled_correlations(media_table(*copies))[0]["stacks"] == 1
    apart = verdicts(*(Media(name, entropy=i).stream(rising) for i, name in enumerate("abc")))["all models"]
    assert apart.status == "holds", "the counter-test"


def test_the_pool_of_the_report_has_the_interval_of_the_claim() -> None:
    sheets = [Media(f"m{i}", entropy=i, layers=6 + i, noise=0.1).stream(rising) for i in range(4)]
    found, record = verdicts(*sheets)["all models"], pooled_correlations(media_table(*sheets))[0]
    part = next(p for p in found.details["parts"] if p["name"] == "rank correlation")
    told = [part[name] for name in ("effect", "low", "high", "p")]
    assert told == pytest.approx([record[name] for name in ("spearman", "low", "high", "p")], rel=1e-6)


def test_without_the_first_position_is_told_beside() -> None:
    sheet = Media().stream(rising).stream(rising, lambda depth: 2 - depth, variant="first=out")
    found = verdicts(sheet)["m"]
    assert found.status == "holds" and "without the first position −1" in found.why
    assert found.details["aspects"]["without the first position"]["status"] == "fails"
