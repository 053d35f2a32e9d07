"""What the drawing part promises: nothing invented, nothing fetched, nothing hidden, whatever the names are."""

from __future__ import annotations

import csv
import html
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from anisoscope.commands.drawing import profile_figure, write_report
from anisoscope.errors import AnisoscopeError
from anisoscope.results.query import Table
from anisoscope.view.console import short_table, table_html
from anisoscope.view.document import packed, unpacked
from anisoscope.view.sections.findings import block_rows, find, mean_over_blocks
from anisoscope.view.sections.profiles import head_maps, head_profile, profiles_elsewhere
from anisoscope.view.subjects import ProfileRows, RunView
from anisoscope.view.words import Catalogue
from support.fake_runs import CATALOGUE, DECODER, ENCODER, FOLDS, HOSTILE, NASTY, Fake, Scribe, about, run_view
from support.pages import Page, figure_names, page_of


def rows_of(*fakes: Fake, **more: Any) -> ProfileRows:
    return ProfileRows([run_view(list(fakes), rich=False, **more)])


def rows_in(scribe: Scribe) -> ProfileRows:
    return ProfileRows([RunView(Table.from_records(scribe.rows))])


def told(rows: ProfileRows, abouts: list[dict[str, Any]] | None = None) -> dict[str, str]:
    rows.abouts = list(abouts or [{}])
    return {f.topic: " ".join(f.texts).replace("\u00a0", " ") for f in find(rows, Catalogue(CATALOGUE))}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small encoder and a decoder with everything a run can have."""
    decoder = Fake("org/SmolLM2-135M", "decoder", 9, heads=4, first_out=True)
    with figure_names():
        return write_report(tmp_path_factory.mktemp("pair"), [run_view([ENCODER, decoder])], catalogue=CATALOGUE)


@pytest.fixture(scope="module")
def nasty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    view = run_view([NASTY], status="interrupted", warnings=[HOSTILE], path=HOSTILE)
    return write_report(tmp_path_factory.mktemp("nasty"), [view], catalogue=CATALOGUE)


def test_the_page_fetches_nothing(pair: Path) -> None:
    page = page_of(pair)
    assert page.fetched() == []
    policy = [
        a["content"] for t, a in page.elements if t == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy and policy[0] is not None and policy[0].startswith("default-src 'none'")
    assert unpacked(page.scripts["plotly"]).count("* plotly.js (scatter, heatmap - minified) v") == 1
    assert Page('<img src="https://example.org/x.png">').fetched()  # the check can fail


def test_names_never_become_markup(nasty: Path) -> None:
    page = page_of(nasty)
    scripts = [attrs for tag, attrs in page.elements if tag == "script"]
    assert len(scripts) == 4  # theme, data, plotly, page: none of them from a name
    assert HOSTILE in page.text
    assert "alert('x')" not in page.scripts["script"]
    hovers = json.dumps(page.specs())
    assert "<script>" not in hovers
    assert html.escape("<script>") in hovers
    assert any(tag == "script" for tag, _ in Page(HOSTILE).elements)  # the parser would have seen it


def test_numbers_in_the_page_are_json_and_what_is_missing_is_null(nasty: Path) -> None:
    page = page_of(nasty)
    assert page.specs()
    assert "371 of 4,096 rows differ" in page.text
    assert "no neighbours" in page.text
    with pytest.raises(ValueError, match="JSON"):
        packed({"value": math.nan})


def test_a_part_of_a_run_says_that_it_is_one(nasty: Path, pair: Path) -> None:
    assert "Partial results" in page_of(nasty).text
    assert "Partial results" not in page_of(pair).text


def test_every_section_is_there_when_the_table_has_it(pair: Path) -> None:
    page = page_of(pair)
    ids = {attrs.get("id") for _, attrs in page.elements}
    sections = {
        "masthead",
        "hero",
        "models",
        "profiles",
        "spectra",
        "heat",
        "attention",
        "cka",
        "groups",
        "table",
        "dropped",
        "record",
        "glossary",
    }
    assert sections <= ids
    charts = [attrs for _, attrs in page.elements if "plot" in (attrs.get("class") or "").split()]
    assert {c["id"] for c in charts} == set(page.specs())
    assert all(c.get("aria-label") for c in charts)


@pytest.mark.usefixtures("named_figures")
def test_a_metric_no_one_listed_appears_by_itself(tmp_path: Path) -> None:
    scribe = Scribe()
    for layer in range(4):
        scribe.row(ENCODER, layer, "resid" if layer else "embed", "novel_measure", 0.1 * layer)
    page = page_of(write_report(tmp_path, [RunView(Table.from_records(scribe.rows))], catalogue={}))
    assert page.text.count("Novel measure") >= 3  # profile, map, glossary
    assert (tmp_path / "figures" / "profile-novel_measure.pdf").exists()
    assert "attention" not in {attrs.get("id") for _, attrs in page.elements}


def test_the_download_holds_every_row_that_is_not_per_head(pair: Path) -> None:
    page = page_of(pair)
    assert any(attrs.get("id") == "csv" for _, attrs in page.elements)
    rows = list(csv.DictReader(io.StringIO(page.data["csv"])))
    decoder = Fake("org/SmolLM2-135M", "decoder", 9, heads=4, first_out=True)
    records = [r for r in run_view([ENCODER, decoder]).table.records() if r["head"] is None]
    assert len(rows) == len(records)
    values = [float(row["value"]) if row["value"] else math.nan for row in rows]
    wanted = [r["value"] if math.isfinite(r["value"]) else math.nan for r in records]
    np.testing.assert_allclose(values, wanted, rtol=1e-8)


def test_figures_are_named_after_what_they_show(pair: Path) -> None:
    names = {p.stem for p in (pair.parent / "figures").iterdir()}
    assert {"profile-two_nn", "spectra-all-minilm-l6-v2", "heat-map-smollm2-135m"} <= names


@pytest.mark.usefixtures("vector_figures")
def test_figures_are_vectors_with_fonts_inside_and_the_same_every_time(tmp_path: Path) -> None:
    view = run_view([NASTY], rich=False)
    first, second = (write_report(tmp_path / n, [view], catalogue=CATALOGUE).parent for n in ("a", "b"))
    pdf = (first / "figures" / "profile-average_cosine.pdf").read_bytes()
    svg = (first / "figures" / "profile-average_cosine.svg").read_text()
    assert pdf.startswith(b"%PDF")
    assert b"/FontFile2" in pdf
    assert "<text" not in svg  # letters are outlines: no font is needed to read it
    for path in (first / "figures").iterdir():
        assert path.read_bytes() == (second / "figures" / path.name).read_bytes()
    assert (first / "report.html").read_text() == (second / "report.html").read_text()


def test_a_rise_is_told_with_intervals_and_noise_is_not_told_as_a_rise() -> None:
    rising = told(rows_of(ENCODER))["Direction"]
    assert re.search(r"rises from 0\.07\d ± 0\.00\d at the embedding to 0\.3\d+ ± 0\.01\d after block 6", rising)
    scribe = Scribe()
    for layer in range(5):
        value = 0.30 + 0.001 * layer
        scribe.row(ENCODER, layer, "resid" if layer else "embed", "average_cosine", 0.3, value=value, low=0.2, high=0.4)
    level = told(rows_in(scribe))["Direction"]
    assert "rises" not in level
    assert "cannot tell from no change" in level


def test_large_dimensions_carry_their_bias() -> None:
    assert "biased low" in told(rows_of(ENCODER))["Dimension"]
    scribe = Scribe()
    scribe.row(ENCODER, 1, "resid", "two_nn", 5.0)
    small = told(rows_in(scribe))["Dimension"]
    assert "biased low" not in small


def test_the_first_position_is_named_only_where_it_is_an_outlier() -> None:
    assert "blocks 1–3" in told(rows_of(NASTY))["First position"]
    assert "First position" not in told(rows_of(ENCODER))


def test_models_are_compared_by_means_over_blocks_with_a_jackknife() -> None:
    rows = rows_of(ENCODER, Fake("gpt2", "decoder", 8))
    text = told(rows)["Comparison"]
    assert "encoder" in text
    assert "takes several of each" in text
    mean = mean_over_blocks(rows, Catalogue(CATALOGUE), rows.subjects[0], "average_cosine")
    assert mean is not None and mean.low is not None
    line = rows.line(rows.subjects[0], "average_cosine")
    folds = np.array([row.folds for row in block_rows(line)]).mean(axis=0)
    error = math.sqrt((FOLDS - 1) / FOLDS * ((folds - folds.mean()) ** 2).sum())
    assert mean.value - mean.low == pytest.approx(2.365 * error)  # t with 7 degrees of freedom, as the claims have it


def test_random_weights_and_few_contexts_are_said() -> None:
    rows = rows_of(ENCODER)
    assert "Caution" not in told(rows, [about([ENCODER])])
    assert "random" in told(rows, [about([ENCODER], config={"random_init": True})])["Weights"]
    scribe = Scribe(contexts=4)
    scribe.model(ENCODER)
    assert "fewest here are 4" in told(rows_in(scribe))["Caution"]


def test_a_run_without_a_record_and_rows_of_a_file_are_shown(tmp_path: Path) -> None:
    scribe = Scribe()
    scribe.row(Fake("cloud.npy", "rows", 1), 0, "rows", "two_nn", 6.0, depth=None)
    page = page_of(write_report(tmp_path, [RunView(Table.from_records(scribe.rows))], catalogue={}))
    assert "cloud.npy" in page.text
    with pytest.raises(AnisoscopeError, match="no run with results"):
        write_report(tmp_path, [RunView(Table.from_records([]))], catalogue={})


def test_stacks_and_namesakes_are_told_apart() -> None:
    stacks = rows_of(
        Fake("t5", "encoder-decoder", 4, stack="encoder"), Fake("t5", "encoder-decoder", 6, stack="decoder")
    )
    assert [s.label for s in stacks.subjects] == ["t5 · encoder", "t5 · decoder"]
    assert [s.role for s in stacks.subjects] == ["encoder", "decoder"]
    view = run_view([ENCODER], rich=False)

    def labels(*paths: str) -> list[str]:
        rows = ProfileRows([RunView(view.table, view.about, path=path) for path in paths])
        return [s.label.removeprefix("all-MiniLM-L6-v2 · ") for s in rows.subjects]

    assert labels("runs/a", "runs/b") == ["a", "b"], "the page does not say where the runs are"
    assert labels("old/run", "new/run", "new/b") == ["run, run 1", "run, run 2", "b"]
    assert labels("", "") == ["run 1", "run 2"]


def test_the_tables_own_mean_over_heads_is_preferred() -> None:
    view = run_view([NASTY])
    key = {"metric": "attention_entropy", "kind": "scores"}
    ours = ProfileRows([RunView(view.table)])
    assert all(point.interval and "mean over" in point.note for point in head_mean(ours, "attention_entropy"))
    scribe = Scribe()
    scribe.row(NASTY, 1, about=0.5, note="mean over 2 heads", **key)
    both = ProfileRows([RunView(Table.concat([view.table, Table.from_records(scribe.rows)]))])
    assert [row.note for row in head_mean(both, "attention_entropy")] == ["mean over 2 heads"]
    assert not profiles_elsewhere(both, Catalogue({}))


def head_mean(rows: ProfileRows, metric: str) -> list[Any]:
    key, maps = next((key, maps) for key, maps in head_maps(rows, Catalogue({})).items() if key[0] == metric)
    return [point for line in head_profile(Catalogue({}), key, maps).lines for point in line.rows]


def test_a_figure_has_a_line_a_band_and_the_final_norm_apart() -> None:
    figure = profile_figure(run_view([ENCODER]).table, "average_cosine", catalogue=CATALOGUE)
    band, line, final = figure.data[:3]
    assert band.fill == "toself"
    assert len(line.x) == ENCODER.blocks + 1
    assert list(final.x) == [ENCODER.blocks + 1.0]
    assert figure.layout.paper_bgcolor == "rgba(0,0,0,0)"
    many = profile_figure(run_view([ENCODER, DECODER]).table, catalogue=CATALOGUE)
    assert len(many.layout.annotations) == 6
    assert sum(bool(trace.showlegend) for trace in many.data) == 3  # two models, one also without the first position
    with pytest.raises(AnisoscopeError, match="did you mean 'average_cosine'"):
        profile_figure(run_view([ENCODER]).table, "average_cosin")


def test_a_notebook_table_is_safe_and_shows_intervals() -> None:
    shown = table_html(run_view([NASTY, ENCODER]).table, catalogue=CATALOGUE)
    page = Page(shown)
    assert "script" not in {tag for tag, _ in page.elements}
    assert HOSTILE in page.text
    assert "embedding" in page.text
    assert re.search(r"0\.07\d* … 0\.08", page.text)


def test_a_notebook_table_of_a_training_shows_the_last_step_or_a_few_rows() -> None:
    place = {"model": "m", "kind": "resid", "metric": "drift", "variant": "", "group": ""}
    rows = [{**place, "layer": 1, "step": step, "value": 100.0 + step} for step in range(200)]
    shown = Page(table_html(Table.from_records(rows), catalogue=CATALOGUE)).text
    assert "299" in shown and "298" not in shown and "steps 0 … 199 (200)" in shown
    energies = [{**row, "metric": "gradient_energy", "variant": "proxy=<b>"} for row in rows]
    shown = table_html(Table.from_records(energies, {"reading": "read while it runs"}), catalogue=CATALOGUE)
    assert shown.count("<tr>") == 12 and "proxy=<b>" in Page(shown).text and "read while it runs" in shown


def test_the_terminal_table_is_short_and_takes_any_name() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(short_table(run_view([NASTY, ENCODER], rich=False).table, catalogue=CATALOGUE))
    text = console.export_text()
    assert "block 6" in text
    assert "[bold]" in re.sub(r"\s", "", text)
    assert "±" in text
    console.print(short_table(run_view([ENCODER, DECODER], rich=False).table, catalogue=CATALOGUE))
    assert len(console.export_text().splitlines()) < 15


@pytest.mark.usefixtures("named_figures")
def test_names_that_look_alike_keep_their_figures(tmp_path: Path) -> None:
    fakes = [Fake("a:b", "encoder", 2), Fake("a?b", "decoder", 2)]
    write_report(tmp_path, [run_view(fakes, rich=False)], catalogue=CATALOGUE)
    assert {"heat-map-a-b.pdf", "heat-map-a-b-2.pdf"} <= {p.name for p in (tmp_path / "figures").iterdir()}


@pytest.mark.slow
def test_five_deep_models_fit_in_one_page(tmp_path: Path) -> None:
    fakes = [
        ENCODER,
        DECODER,
        Fake("a/bert", "encoder", 12),
        Fake("b/pythia", "decoder", 32),
        Fake("c/large", "encoder", 36),
    ]
    path = write_report(tmp_path, [run_view(fakes)], catalogue=CATALOGUE)
    page = page_of(path)
    assert page.specs()
    assert "averaged over blocks, runs from" in page.text
    assert path.stat().st_size < 3_000_000


def test_a_page_is_replaced_once_its_figures_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view = run_view([DECODER])
    path = write_report(tmp_path, [view], catalogue=CATALOGUE)
    path.write_text("the page before", encoding="utf-8")

    def full(*_: Any, meanwhile: Any, **__: Any) -> None:
        meanwhile([])
        raise OSError("No space left on device")

    monkeypatch.setattr("anisoscope.view.report.write_figures", full)
    with pytest.raises(OSError, match="No space"):
        write_report(tmp_path, [view], catalogue=CATALOGUE)
    assert path.read_text(encoding="utf-8") == "the page before"
