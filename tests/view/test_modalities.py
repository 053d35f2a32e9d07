"""What the page says of drift and modalities: the numbers of the claims' readers, and nothing where there are none."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from anisoscope.claims.inherent.drift import drift_correlations, pooled_correlations
from anisoscope.commands.drawing import compare, write_report
from anisoscope.results.query import Table
from anisoscope.view.figure import Figure
from anisoscope.view.page import DataTable
from anisoscope.view.sections.drift import (
    Comparison,
    bundle_words,
    bundles_of,
    drift_section,
    modality_findings,
    modality_section,
    pooled_series,
)
from anisoscope.view.sections.findings import block_rows
from anisoscope.view.sections.provenance import model_facts
from anisoscope.view.subjects import ProfileRows, RunView, TrainingRows
from anisoscope.view.words import interval_words
from support.fake_modalities import Media, media_table
from support.fake_runs import CATALOGUE, HOSTILE
from support.pages import Page, figures_too, page_of


def models(**more: Any) -> Table:
    """Trained models of four modalities; drift explains all but the convolution."""
    return media_table(
        Media("text-model", "text", layers=6).stream(lambda d: 0.2 + 0.4 * d, lambda d: 1 + 5 * d),
        Media("letters", "characters", layers=6).stream(lambda d: 0.1 + 0.2 * d, lambda d: 2 + d),
        Media("speech-model", "speech", layers=6).stream(lambda d: 0.5 + 0.1 * d, lambda d: 3 + d),
        Media("convolution-model", "convolution", layers=6, **more).stream(lambda d: 0.6 - 0.3 * d, lambda d: 1 + d),
    )


def view_of(table: Table, path: str = "runs/demo") -> RunView:
    return RunView(table, dict(table.about), path=path)


def compared(*tables: Table) -> Comparison:
    return compare([RunView(table, dict(table.about), path=f"runs/{i}") for i, table in enumerate(tables)])


def ids(page: Page) -> set[str | None]:
    return {attributes.get("id") for tag, attributes in page.elements if tag == "section"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(tmp_path_factory.mktemp("modal"), [view_of(models())], catalogue=CATALOGUE).parent


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return page_of(folder / "report.html")


def test_models_of_several_modalities_are_compared_and_one_modality_is_not(page: Page, tmp_path: Path) -> None:
    assert {"modalities", "drift"} <= ids(page)
    plain = media_table(Media("one", layers=4).stream(), Media("two", layers=4).stream())
    text = page_of(write_report(tmp_path, [view_of(plain)], catalogue=CATALOGUE))
    assert "modalities" not in ids(text)
    assert "drift" in ids(text)


def test_a_profile_without_drift_has_no_scatter_plot(tmp_path: Path) -> None:
    table = media_table(Media("one", layers=4).stream(drift=None, share=None, norm=None))
    page = page_of(write_report(tmp_path, [view_of(table)], catalogue=CATALOGUE))
    assert ids(page).isdisjoint({"drift", "modalities", "mean-qk", "sharpness"})


def test_lines_are_the_blocks_of_the_table_coloured_by_modality(page: Page) -> None:
    traces = {trace["name"].split(" ")[0]: trace for trace in page.specs()["modality-1"]["data"]}
    told = {record["model"]: record for record in drift_correlations(models())}
    for name, trace in traces.items():
        sites = [p for p in told[name]["points"] if p["kind"] != "final"]
        assert trace["y"] == pytest.approx([p["cosine"] for p in sites], rel=1e-3)
        assert trace["x"] == pytest.approx([p["depth"] for p in sites])
    assert len({trace["line"]["color"] for trace in traces.values()}) == 4


def test_a_model_that_drift_does_not_explain_is_marked_and_the_others_are_not(page: Page) -> None:
    symbols = {t["name"].split(" ")[0]: t["marker"]["symbol"] for t in page.specs()["modality-1"]["data"]}
    assert symbols["convolution-model"] == "diamond-open"
    assert {symbols[name] for name in ("text-model", "letters", "speech-model")} == {"circle"}
    assert "◇ no" in page.text
    assert "The anisotropy of convolution-model is not explained by drift." in page.text


def test_scatter_plots_hold_drift_and_cosine_and_the_near_identity_is_named(page: Page) -> None:
    told = {record["model"]: record for record in drift_correlations(models())}
    spec = page.specs()["drift-1"]
    record = next(iter(told.values()))
    sites = [p for p in record["points"] if p["counted"]]
    for key, places in (("0", [p["drift"] for p in sites]), ("1", [p["relative_drift"] ** 2 for p in sites])):
        trace = spec["views"][key]["data"][0]
        assert trace["y"] == pytest.approx([p["cosine"] for p in sites], rel=1e-3)
        assert spec["shared"][trace["x"]] == pytest.approx(places, rel=1e-3)
    assert "a near-identity" in page.text
    assert bundle_words(bundles_of([record])[0]) in page.text


def test_the_final_norm_is_told_and_never_drawn(page: Page) -> None:
    drawn = [y for view in page.specs()["drift-1"]["views"].values() for y in view["data"][0]["y"]]
    assert -0.5 not in drawn
    assert "Not counted: the final norm, drift 100" in page.text


def test_the_pool_is_that_of_the_claim_and_leaves_untrained_models_out() -> None:
    table = models(entry={"notes": ["random weights (seed 0)"]})
    found = compared(table)
    section = drift_section(found)
    assert section is not None
    whole = pooled_correlations(table)[0]
    row = next(part for part in section.parts if isinstance(part, DataTable)).groups[-1][-1]
    words = interval_words(whole["spearman"], whole["low"], whole["high"])
    assert row[0].text == "all models"
    spearman = row[4]
    assert spearman.text == words.split(" ")[0]
    assert spearman.small[0] == words.partition(" ")[2].strip("[]").replace(", ", " to ")
    assert len(pooled_series(found)) == whole["stacks"] == 3
    assert len(compared(models()).units) == 4
    top = max(max(drawn.y) for drawn in pooled_series(found))
    assert 0.5 < top < 1


def test_the_pool_is_told_in_the_page(page: Page) -> None:
    whole = pooled_correlations(models())[0]
    value, _, ends = interval_words(whole["spearman"], whole["low"], whole["high"]).partition(" ")
    assert f"{value} {ends.strip('[]').replace(', ', ' to ')} p " in page.text
    assert f"pooled {len(whole['models'])} models, {whole['stacks']} stacks" in page.text


def test_one_model_has_no_pool() -> None:
    section = drift_section(compared(media_table(Media("one", layers=4).stream())))
    assert section is not None
    figures = [part for part in section.parts if isinstance(part, Figure)]
    assert [figure.id for figure in figures] == ["drift"]
    assert len(figures[0].panels) == 1


def test_a_model_with_too_few_layers_for_a_correlation_is_in_the_table_and_not_drawn() -> None:
    section = drift_section(compared(media_table(Media("long", layers=4).stream(), Media("short", layers=1).stream())))
    assert section is not None
    table = next(part for part in section.parts if isinstance(part, DataTable))
    assert {str(row[0].text) for group in table.groups for row in group} >= {"long", "short"}
    assert len(next(part for part in section.parts if isinstance(part, Figure)).panels) == 1


def test_runs_of_one_name_are_told_apart_and_pooled_together() -> None:
    tables = [media_table(Media("same", layers=4).stream(lambda d, up=up: 0.2 + up * d)) for up in (0.3, 0.5)]
    found = compared(*tables)
    assert len({record["label"] for record in found.records}) == 2
    assert found.pooled[0]["stacks"] == 2


def test_seeds_and_stacks_have_names_of_their_own() -> None:
    sheets = [Media("m", layers=4, number=seed).stream() for seed in (0, 1)]
    sides = [Media("w", m, layers=4, stack=s).stream() for s, m in (("encoder", "speech"), ("decoder", "text"))]
    labels = [record["label"] for record in compared(media_table(*sheets, *sides)).records]
    assert sorted(labels) == ["m · seed 0", "m · seed 1", "w · decoder", "w · encoder"]


def test_sentences_count_trained_models_only() -> None:
    told = modality_findings(compared(models()))
    assert told[0].topic == "Modality"
    assert "in text" in told[0].texts[0]
    entry = {"notes": ["random weights (seed 0)"]}
    raw = [Media(m, m, layers=4, entry=entry).stream() for m in ("text", "vision")]
    assert modality_findings(compared(media_table(*raw))) == []
    section = modality_section(compared(media_table(*raw)))
    assert section is not None
    groups = next(part for part in section.parts if isinstance(part, DataTable)).groups
    named = [(row[1].text, row[1].small) for rows in groups for row in rows]
    assert named == [("text", ["untrained weights"]), ("vision", ["untrained weights"])]


def test_stages_stand_for_the_blocks_of_a_convolution_and_not_of_a_model_with_blocks() -> None:
    sheet = Media("c", "convolution", layers=4).stream()
    both = Media("b", "vision", layers=4).stream()
    both.place("average_cosine", 0.9, layer=4, kind="stage")
    drawn = ProfileRows([RunView(media_table(sheet, both))])
    lines = {s.model: block_rows(drawn.line(s, "average_cosine")) for s in drawn.subjects}
    assert [row.kind for row in lines["c"]] == ["stage"] * 4
    assert {row.kind for row in lines["b"]} == {"resid"}


def test_stages_of_a_convolution_have_a_course_over_training() -> None:
    sheets = [Media(m, m, layers=4, steps=(0, 10, 100)).stream() for m in ("convolution", "vision")]
    table = media_table(*sheets)
    rows = TrainingRows([RunView(table, dict(table.about))])
    for subject in rows.subjects:
        sites = [s for s in rows.sites(["average_cosine"]) if rows.line(subject, "average_cosine", s)]
        assert [site.short for site in sites] == ["embed", "1", "2", "3", "4", "final"]


def test_every_row_says_what_it_is(tmp_path: Path) -> None:
    entry = {"rows": {"encoder": "one frame of audio", "decoder": "one token"}}
    named = (("encoder", "speech"), ("decoder", "text"))
    sides = [Media("w", m, layers=3, stack=s, entry=entry).stream() for s, m in named]
    page = page_of(write_report(tmp_path, [view_of(media_table(*sides))], catalogue=CATALOGUE))
    assert "A row is" in page.text
    assert "one frame of audio (encoder), one token (decoder)" in page.text
    old = model_facts([{"models": [{"name": "old", "rows": 4096}]}])
    assert old == [{"Model": "old", "Rows": "4,096"}]


@pytest.mark.slow
def test_vector_twins_are_written_and_the_same_every_time(tmp_path: Path) -> None:
    names = {"modalities", "drift-and-cosine", "drift-near-identity", "drift-and-cosine-pooled"}
    view = view_of(models())
    with figures_too(*names):
        first, again = (write_report(tmp_path / n, [view], catalogue=CATALOGUE).parent / "figures" for n in "ab")
    files = [first / f"{name}{suffix}" for name in names for suffix in (".pdf", ".svg")]
    assert all(file.stat().st_size > 2000 for file in files)
    assert all(file.read_bytes() == (again / file.name).read_bytes() for file in files)


@pytest.mark.usefixtures("drawn_figures")
def test_names_never_become_markup_and_numbers_that_are_none_are_null(tmp_path: Path) -> None:
    odd = Media("odd", "vision", layers=4).stream(lambda d: math.nan if d == 0.5 else 0.2 + d / 4)
    table = media_table(Media(HOSTILE, "speech", layers=4).stream(lambda d: 0.2 + d), odd)
    path = write_report(tmp_path, [view_of(table)], catalogue=CATALOGUE)
    page = page_of(path)
    assert {"modalities", "drift"} <= ids(page)
    assert "alert('x')" not in "".join(page.scripts.get(name, "") for name in ("script",))
    assert "<script>alert" not in json.dumps(page.specs())
    assert page.fetched() == []
