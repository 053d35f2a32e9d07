"""Titles and grids say what the verdicts say, with their sign, and no more."""

from __future__ import annotations

import math
from typing import Any

from anisoscope.claims.catalogue import claims
from anisoscope.view.headline import ASKED, headline, words_of_claim
from anisoscope.view.verdict_grid import Bar, verdict_grid


def verdict(claim: str, subject: str, status: str = "holds", **more: Any) -> dict[str, Any]:
    numbers = {"effect": 0.3, "low": 0.2, "high": 0.4, "margin": 0.1}
    return {"claim": claim, "subject": subject, "status": status, "statement": "A bell.", **numbers, **more}


def test_every_claim_of_the_catalogue_has_words_and_every_study_a_question() -> None:
    for name, declared in claims().items():
        words = words_of_claim(name, declared.statement)
        assert words.label != words_of_claim("nobody knows").label and len(words.label) <= 36, name
        assert words.yes[:1].islower() or words.yes[:1].isupper(), name
        assert words.no and words.no != words.yes, name
    own = {"performance"}  # its verdicts are of its own, not of the catalogue
    assert {name for study, asked in ASKED.items() if study not in own for name in asked} <= set(claims())


def test_the_performance_study_is_asked_for_probes_and_for_checkpoints() -> None:
    verdicts = [verdict(name, "m", "fails") for name in ("mean_improves_probe", *ASKED["performance"])]
    told = "In m whitening the rows does not improve linear probes. "
    told += "In m checkpoints that are more anisotropic do not have a higher loss."
    assert headline(verdicts, "performance") == told


def test_a_title_says_where_it_holds_and_where_it_fails() -> None:
    parts = [{"name": "enrichment early", "effect": 1.62}, {"name": "enrichment late", "effect": 9.39}]
    told = headline([verdict("tangent_energy", "decoder", details={"parts": parts})])
    where, numbers = "In the decoder gradients go where", "(1.6 times chance early in training, 9.4 late)"
    assert told == f"{where} the activations already point {numbers}."
    beside = [{"name": f"refitted at every step, late: {name}", "status": "holds"} for name in ("normal", "next")]
    fails = headline([verdict("tangent_energy", "decoder", "fails", details={"parts": beside})])
    assert fails.endswith("more than controls do, though late they do where directions are refitted at every step.")
    both = headline([verdict("bell_shaped", "a"), verdict("bell_shaped", "b", "fails")])
    assert both == "In a anisotropy is highest in the middle blocks, a bell over depth; in b it is not so."
    many = headline([verdict("bell_shaped", name, "fails") for name in "abcde"])
    assert many == "In all 5 cases anisotropy over depth is no bell."


def test_a_title_leads_with_what_stands_when_all_verdicts_are_counted() -> None:
    chance, standing = verdict("amplified", "m", p_holm=0.4), verdict("bell_shaped", "m", p_holm=0.01)
    said = "anisotropy is highest in the middle blocks, a bell over depth."
    assert headline([chance, standing]) == f"In m {said}"
    assert headline([chance]).endswith(" Counting all verdicts, it does not stand.")
    assert "stand" not in headline([{**chance, "p_holm": None}])


def test_a_title_says_in_which_period_a_claim_fails() -> None:
    parts = [{"name": "early: normal", "status": "fails", "needed": True}]
    parts += [{"name": "late: normal", "status": "holds", "needed": True}]
    parts += [{"name": "enrichment early", "effect": 0.91}, {"name": "enrichment late", "effect": 3.7}]
    details = {"parts": parts, "periods": {"early": [1, 2, 8], "late": [4000]}}
    told = headline([verdict("tangent_energy", "encoder", "fails", details=details)])
    assert told.endswith("point more than controls do up to step 8 (0.91 times chance, 3.7 late).")
    holds = headline([verdict("tangent_energy", "encoder", details=details)])
    assert holds.endswith("already point (0.91 times chance up to step 8, 3.7 late).")
    alone = headline([verdict("tangent_energy", name, details=details | {"periods": {"early": [1]}}) for name in "ab"])
    assert alone.endswith("already point (at most 0.91 times chance at step 1, 3.7 late).")
    parts[1]["status"] = "fails"
    both = headline([verdict("tangent_energy", "encoder", "fails", details={"parts": parts})])
    assert both.endswith("point more than controls do (0.91 times chance early in training, 3.7 late).")


def test_a_reason_is_told_only_where_all_open_verdicts_share_it() -> None:
    first, second = (f"undecided because it holds in 8 and fails in {n} of 12 arms." for n in (4, 2))
    open_ = [verdict("bell_shaped", name, "undecided", why=why) for name, why in (("a", first), ("b", second))]
    assert headline(open_).endswith("a bell over depth.")
    assert headline([open_[0], {**open_[1], "why": first}]).endswith(": it holds in 8 and fails in 4 of 12 arms.")


def test_what_is_open_is_told_as_open_with_its_reason() -> None:
    why = "It is 0.3; undecided because the model did not learn: its loss is that of a constant."
    told = headline([verdict("bell_shaped", "a", "undecided", why=why)])
    assert told.startswith("In a it stays undecided whether anisotropy is highest")
    assert "it had not learned by the last step" in told
    open_ = headline([verdict("bell_shaped", "a", "undecided", why="It is 0.3.")])
    assert "the interval reaches across the margin" in open_
    assert headline([]) == ""
    assert headline([verdict("bell_shaped", "a", details={"missing": True})]) == ""


def test_a_study_asks_its_own_question_first_and_a_run_what_was_decided() -> None:
    found = [verdict("tangent_energy", "a", "undecided", why=""), verdict("bell_shaped", "a", "fails")]
    assert "bell" in headline(found)
    assert headline(found, "revisiting").startswith("In a it stays undecided whether gradients")
    assert headline(found, "shape") == "In a anisotropy over depth is no bell."


def test_a_claim_that_nobody_worded_is_told_by_its_statement() -> None:
    assert headline([verdict("odd", "a", statement="Cats grow.")]) == "In a cats grow."
    assert headline([verdict("odd", "a", "fails", statement="Cats grow.")]) == "In a it is not so that cats grow."


def cells(*verdicts: dict[str, Any], **how: Any) -> dict[tuple[str, str], Any]:
    grid = verdict_grid(verdicts, claims(), **how)
    assert grid is not None
    rows = [row for _, _, rows in grid.papers for row in rows]
    return {(row.name, one.subject): one for row in rows for _, found in row.columns for one in found}


def test_an_effect_has_the_sign_of_its_sentence() -> None:
    """The table stores how far anisotropy falls; the sentence says that it rises by 75 %."""
    fell = verdict("mask_effect", "6x256", "fails", effect=-0.754, low=-0.8, high=-0.71, margin=0.2)
    cell = cells(fell)["mask_effect", "6x256"]
    assert dict(cell.facts)["Effect"] == "0.754" and dict(cell.facts)["Margin"] == "below −0.2"
    assert cell.bar is not None and cell.bar.at > cell.bar.margin, "right of what it would have to be below"


def test_p_is_shown_only_where_it_decides() -> None:
    assert "p of random directions" in dict(cells(verdict("amplified", "a", p=0.01))["amplified", "a"].facts)
    assert "p of random directions" not in dict(cells(verdict("amplified", "a", p=None))["amplified", "a"].facts)
    fails = cells(verdict("amplified", "a", "fails", p=0.01))["amplified", "a"]
    assert "p of random directions" not in dict(fails.facts)


def test_the_bar_shades_what_must_be_passed() -> None:
    above = Bar.of(0.3, 0.2, 0.4, 0.1, below=False)
    below = Bar.of(0.3, 0.2, 0.4, 0.1, below=True)
    assert above is not None and below is not None
    assert above.margin < above.low < above.at < above.high and (above.from_, above.to) == (above.margin, 100.0)
    assert (below.from_, below.to) == (0.0, below.margin)
    assert Bar.of(None, None, None, 0.1, below=False) is None and Bar.of(0.1, None, None, math.nan, below=False) is None
    alone = Bar.of(0.3, None, None, 0.1, below=False)
    assert alone is not None and alone.low == alone.at == alone.high


def test_the_grid_is_by_paper_and_names_what_was_not_measured() -> None:
    found = [verdict("tangent_energy", "a"), verdict("tangent_energy", "b", details={"missing": True}, why="No rows.")]
    found += [verdict("bell_shaped", "a", "fails"), verdict("bell_shaped", "b"), verdict("two_phases", "both")]
    found.append(verdict("amplified", "a", details={"missing": True}, why="Nothing to amplify."))
    grid = verdict_grid(found, claims())
    assert grid is not None
    assert [(title, arxiv) for title, arxiv, _ in grid.papers] == [
        ("Revisiting Anisotropy", "2604.08764"),
        ("The Shape of Learning", "2311.05928"),
    ]
    assert grid.columns == ["a", "b", "together"] and grid.worded and not grid.wide
    assert grid.tally == "Of 4 verdicts, 3 hold and 1 fails."
    assert grid.missing == [("Training amplifies it", "Nothing to amplify.")]
    assert cells(*found)["tangent_energy", "b"].status == "not measured"


def test_many_models_make_signs_without_words() -> None:
    grid = verdict_grid([verdict(name, f"m{i}") for name in ("bell_shaped", "two_phases") for i in range(20)], claims())
    assert grid is not None and len(grid.columns) == 20 and not grid.worded and grid.wide


def test_seeds_stand_behind_the_verdict_over_all_of_them() -> None:
    over = verdict("bell_shaped", "a", details={"pooled": True}, scope="over 2 seeds")
    seeds = [verdict("bell_shaped", "a", scope=f"for seed {i}") for i in range(2)]
    cell = cells(over, *seeds)["bell_shaped", "a"]
    assert [seed["name"] for seed in cell.seeds] == ["seed 0", "seed 1"]
    alone = verdict("bell_shaped", "a", details={"per_seed": [{"seed": 3, "status": "fails", "effect": 0.1}]})
    assert cells(alone)["bell_shaped", "a"].seeds[0]["name"] == "seed 3"
