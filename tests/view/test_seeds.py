"""Many models and seeds on one page: seeds stand together, random weights stand behind, lists stay short."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anisoscope.commands.drawing import compare, write_report
from anisoscope.results.query import Query, Table
from anisoscope.view.figure import Figure
from anisoscope.view.page import DataTable, Fold, Section, TableCell
from anisoscope.view.sections import attention
from anisoscope.view.sections.attention import carried, head_numbers
from anisoscope.view.sections.drift import (
    Comparison,
    bundles_of,
    drift_section,
    in_front,
    modality_findings,
    modality_section,
    modality_series,
    pool_size,
)
from anisoscope.view.sections.findings import unmeasured
from anisoscope.view.sections.provenance import dropped, page_table, warnings
from anisoscope.view.subjects import RunView
from anisoscope.view.verdict_grid import verdict_grid
from support.fake_modalities import Course, Media, media_table
from support.fake_runs import CATALOGUE
from support.pages import page_of

RANDOM = {"notes": ["random weights (seed 0)"]}


def study(*, random: bool = True, seeds: int = 3, steps: Any = (None,)) -> Table:
    """Two trained models of two modalities, and two that drew their weights, all of several seeds."""
    sheets = []
    for seed in range(seeds):
        up, shift = (lambda d: 1 + 5 * d), 0.02 * seed
        sheets.append(
            Media("words", "text", layers=6, number=seed, steps=steps).stream(lambda d, s=shift: 0.2 + s + d / 2, up)
        )
        fall = (lambda d, s=shift: 0.5 + s - d / 3) if seed else (lambda d: 0.3 + d / 3)
        sheets.append(Media("sounds", "speech", layers=6, number=seed, steps=steps).stream(fall, up))
        if random:
            raw = (("drawn", "text"), ("cast", "vision"))
            sheets += [
                Media(n, m, layers=6, number=seed, entry=RANDOM).stream(lambda d: 0.1 + d / 9, up) for n, m in raw
            ]
    return media_table(*sheets)


def compared(table: Table) -> Comparison:
    return compare([RunView(table, dict(table.about))])


def inside(section: Section | Fold | None, kind: type) -> list[Any]:
    """Parts of a kind, those that are folded away not among them."""
    assert section is not None
    return [part for part in section.parts if isinstance(part, kind)]


def labels(table: DataTable) -> list[str]:
    """The models of a table."""
    return [cell.text for group in table.groups for row in group for cell in row if isinstance(cell, TableCell)
            and cell.head and cell.css != "group"]  # fmt: skip


# seeds


def test_seeds_of_a_model_are_one_row_and_one_figure_and_models_are_not() -> None:
    found = compared(study())
    modal, drift = modality_section(found), drift_section(found)
    assert labels(inside(modal, DataTable)[0]) == ["words", "sounds"]
    panels = inside(drift, Figure)[0].panels
    assert [panel.title for panel in panels] == ["words", "sounds"]
    assert len(panels[0].views["0"].series) == 3
    alone = modality_section(compared(study(seeds=1)))
    assert alone is not None and modal is not None
    assert "seeds" not in alone.parts[0].text and "Of several seeds" in modal.parts[0].text


def test_the_line_of_a_model_is_the_mean_of_its_seeds_over_thin_ones() -> None:
    found = compared(study(random=False))
    *thin, mean = [drawn for drawn in modality_series(found) if drawn.label.startswith("words")]
    assert len(thin) == 3 and not thin[0].size
    assert mean.y == pytest.approx([sum(column) / 3 for column in zip(*(t.y for t in thin), strict=True)], rel=1e-3)
    assert len(modality_series(compared(study(random=False, seeds=1)))) == 2


def test_sentences_speak_of_models_and_numbers_of_seeds() -> None:
    texts = " ".join(modality_findings(compared(study()))[0].texts)
    assert "sounds in 2 of 3 seeds is not explained by drift" in texts
    assert "in text (3 seeds, " in texts and "seed 1" not in texts
    assert "2 models × 3 seeds with untrained weights are shown" in texts
    one = " ".join(modality_findings(compared(study(seeds=1)))[0].texts)
    assert "seeds" not in one


def test_pools_say_models_times_seeds() -> None:
    for seeds, words in ((3, "2 models × 3 seeds"), (1, "2 models, 2 stacks")):
        found = compared(study(seeds=seeds))
        whole = next(row for row in found.pooled if row["modality"] == "all")
        assert pool_size(found, whole) == words
        last = inside(drift_section(found), DataTable)[0].groups[-1][-1]
        assert any(words in cell.small for cell in last)


# random weights


def test_random_weights_stand_behind_trained_ones_and_in_front_where_there_are_no_others() -> None:
    found = compared(study())
    modal, drift = modality_section(found), drift_section(found)
    assert set(labels(inside(inside(modal, Fold)[0], DataTable)[0])) == {"drawn", "cast"}
    figures, tables = inside(drift, Fold)
    assert {panel.title for panel in inside(figures, Figure)[0].panels} == {"drawn", "cast"}
    assert tables.summary.startswith("2 models × 3 seeds with random weights: ")
    drawn = [Media(m, m, layers=6, entry=RANDOM).stream() for m in ("text", "vision")]
    raw = compared(media_table(*drawn))
    assert not inside(modality_section(raw), Fold) and not inside(drift_section(raw), Fold)
    assert len(inside(drift_section(raw), Figure)[0].panels) == 2
    assert not in_front(bundles_of(raw.rows))[1]


def verdict(subject: str, status: str = "holds", claim: str = "c", **more: Any) -> dict[str, Any]:
    return {"claim": claim, "statement": "It is so.", "subject": subject, "status": status, "effect": 1.0} | more


def test_verdicts_on_random_weights_are_folded_and_those_on_others_are_not() -> None:
    found = [verdict("a"), verdict("t5, decoder stack", "fails"), verdict("t5, encoder stack"), verdict("t5-small")]
    grid = verdict_grid(found, random=["t5"])
    assert grid is not None and grid.random is not None
    assert grid.columns == ["a", "t5-small"] and grid.tally == "Of 2 verdicts, 2 hold."
    assert grid.random.tally == "Of 2 verdicts, 1 holds and 1 fails."
    alone = verdict_grid(found[1:3], random=["t5"])
    assert alone is not None and alone.random is None, "claims on random weights alone have nothing to fold"


def test_the_page_folds_them_without_a_script(tmp_path: Path) -> None:
    table = study(steps=(0, 10))
    names = ("words", "sounds", "drawn", "cast")
    view = RunView(table, dict(table.about), verdicts=[verdict(name) for name in names])
    page = write_report(tmp_path, [view], catalogue=CATALOGUE)
    text = page.read_text(encoding="utf-8")
    folded = text.partition("<summary>Models with random weights: ")[2].partition("</table>")[0]
    assert folded.startswith("Of 2 verdicts, 2 hold.")
    assert 'data-who="drawn"' in folded and 'data-who="words"' not in folded
    assert page_of(page).fetched() == []
    plain = RunView(table, {}, verdicts=view.verdicts)
    assert '<tr class="folded">' not in write_report(tmp_path / "plain", [plain], catalogue=CATALOGUE).read_text(
        "utf-8"
    )


# lists


def test_the_tally_counts_every_verdict() -> None:
    many = verdict_grid([verdict(name, "fails" if name == "a" else "holds") for name in "abcdefgh"])
    assert many is not None and many.tally == "Of 8 verdicts, 7 hold and 1 fails."


def test_what_was_not_measured_names_three_subjects_at_most() -> None:
    lost = [verdict(name, details={"missing": True}) for name in "bcdefg"]
    assert unmeasured([verdict("a"), *lost]) == ["c (b, c, d and 3 more)"]
    assert unmeasured([verdict("a"), *lost[:2]]) == ["c (b and c)"]


def test_equal_warnings_are_said_once_with_all_they_are_true_of() -> None:
    seeds = [{"name": name, "notes": [f"random weights (seed {n})", "odd"]} for n in range(3) for name in ("a", "b")]
    about = {"warnings": ["a: encoder: slow", "b-seed1: slow", "nothing in particular: here"], "models": seeds}
    assert warnings([about]) == [
        "a (encoder) and b: slow",
        "nothing in particular: here",
        "a and b: random weights (seeds 0–2)",
        "a and b: odd",
    ]
    other = {"models": [{"name": "a", "notes": ["odd"]}, {"name": "b", "notes": ["even"]}]}
    assert warnings([other]) == ["a: odd", "b: even"]


def test_models_that_lost_the_same_rows_share_a_line_and_others_have_their_own() -> None:
    entries = [{"name": name, "dropped": {"padding": n}} for name, n in (("a", 0), ("b", 0), ("b", 0), ("c", 7))]
    assert dropped([{"models": entries}]) == [("a and b", [("padding", "0")]), ("c", [("padding", "7")])]


# what a page can carry


def test_heads_of_further_seeds_go_before_steps_do(monkeypatch: pytest.MonkeyPatch) -> None:
    followed = [Course("m", number=seed, heads=4).drifting() for seed in range(3)]
    for sheet in followed:
        for head in range(4):
            for kind in ("query", "key"):
                sheet.add("drift", 1.0, kind=kind, head=head)
    table = media_table(*followed)
    heads = head_numbers([RunView(table, dict(table.about))])
    whole = carried(heads)
    assert whole is not None and (len(whole.heads), whole.left_out) == (3, [])
    monkeypatch.setattr(attention, "SIZE", len(json.dumps(whole.arrays)) // 2)
    cut = carried(heads)
    assert cut is not None and len(cut.steps) == len(whole.steps)
    assert cut.left_out == ["1 of 3 models and seeds"]


def test_a_long_table_keeps_the_last_step_of_every_model_and_a_short_one_every_step() -> None:
    table = study(steps=(0, 10, 100))
    whole = page_table(Query(table))
    assert whole["rows"] == whole["total"] == len(table)
    cut = page_table(Query(table), most=len(table) // 2)
    assert cut["gone"][-1] == "all steps but the last" and not cut["cut"]
    assert all(name in cut["csv"] for name in ("words", "sounds", "drawn", "cast"))
