"""A page says what a model was given, what one of its rows is, and which numbers cannot be trusted."""

from __future__ import annotations

import io
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from anisoscope.claims.inherent.drift import drift_correlations
from anisoscope.claims.inherent.modalities import modality_table
from anisoscope.commands.drawing import compare, report_runs, write_report
from anisoscope.errors import AnisoscopeError
from anisoscope.results.folder import mapped_sites
from anisoscope.results.query import Table
from anisoscope.view.console import short_tables
from anisoscope.view.figure import Figure, Panel
from anisoscope.view.matplotlib_renderer import draw, few_powers
from anisoscope.view.page import DataTable, TableCell
from anisoscope.view.plotly_renderer import panel_spec
from anisoscope.view.sections.drift import drift_axis, drift_section, modality_findings
from anisoscope.view.sections.findings import find, mean_over_blocks
from anisoscope.view.sections.profiles import head_maps, head_title, heat_section, spectrum_panel
from anisoscope.view.sections.provenance import data_phrase, model_facts, row_noun, row_nouns
from anisoscope.view.subjects import ProfileRows, RunView, random_models
from anisoscope.view.words import Catalogue, estimate, p_words
from support.fake_modalities import Media, media_table
from support.fake_runs import CATALOGUE, ENCODER, Fake, Scribe, run_view

PATCH = "one patch of an image; class and register tokens are apart"
NEAR = "the next scale (GRIDE, k = 2) gives 6.31: near-copies or noise decide one of the two"


def entry(name: str, modality: str, rows: str, count: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "modality": {"single": modality}, "rows": {"single": rows}, "row_count": count, **more}


# what was read


def test_patches_and_frames_are_never_called_tokens() -> None:
    data = {"name": "odd", "tokens": 56, "contexts": 14}
    seen = data_phrase([{"data": data, "models": [entry("vit", "vision", PATCH, 2744)]}])
    assert seen == "odd (2,744 patches of an image in 14 contexts)"
    text = data_phrase([{"data": {"name": "wiki", "tokens": 1, "contexts": 1}, "models": [{"name": "old"}]}])
    assert text == "wiki (1 token in 1 context)"
    assert row_noun("one position of a feature map", 1) == "position of a feature map"


def test_the_embedded_data_are_named_by_what_reads_them() -> None:
    data = {"name": "embedded", "tokens": 100, "contexts": 4}
    for modality, words in (("speech", "sounds"), ("vision", "images"), ("convolution", "images"), ("text", "corpus")):
        phrase = data_phrase([{"data": data, "models": [entry("m", modality, "one frame of audio", 9)]}])
        assert phrase.startswith(f"the embedded {words} (")


def test_models_that_saw_other_amounts_share_the_name_alone() -> None:
    data = {"name": "wiki", "contexts": 4}
    both = [entry("a", "text", "one token", 9), entry("b", "text", "one token", 7)]
    assert data_phrase([{"data": data, "models": both}]) == "wiki"
    assert data_phrase([{"data": data, "models": both[:1]}]) == "wiki (9 tokens in 4 contexts)"
    assert row_nouns([{"models": [*both, entry("v", "vision", PATCH, 9)]}]) == ["tokens", "patches of an image"]


def test_only_models_with_random_weights_are_called_random() -> None:
    drawn = {"models": [{"name": "vit", "notes": ["random weights (seed 0)"]}]}
    learned = {"models": [{"name": "bert", "notes": []}], "config": {"random_init": False}}
    assert random_models([drawn, learned]) == (["vit"], 2)
    table = run_view([ENCODER], rich=False).table

    def told(*abouts: dict[str, Any]) -> dict[str, str]:
        rows = ProfileRows([RunView(table)])
        rows.abouts = list(abouts)
        return {f.topic: f.texts[0] for f in find(rows, Catalogue(CATALOGUE))}

    some = told(drawn, learned)["Weights"]
    assert some.startswith("The weights of vit are random")
    assert told(drawn)["Weights"].startswith("The weights are random")
    assert "Weights" not in told(learned)


def test_a_convolution_is_no_encoder_and_a_transformer_is_one() -> None:
    facts = {"type": "encoder"}
    sheets = [Media(m, m, layers=4, entry=facts).stream() for m in ("convolution", "vision")]
    table = media_table(*sheets)
    roles = {s.model: s.role for s in ProfileRows([RunView(table, dict(table.about))]).subjects}
    assert roles == {"convolution": "convolution", "vision": "encoder"}
    kinds = [fact["Kind"] for fact in model_facts([table.about])]
    assert sorted(kinds) == ["convolution", "encoder"]


# intervals and p-values


def test_one_number_has_one_interval_on_a_page() -> None:
    def noisy(depth: float) -> float:
        return 0.3 + 0.2 * depth

    sheets = [Media("s", "speech", layers=4).stream(noisy), Media("t", "text", layers=4).stream(noisy)]
    table = media_table(*sheets)
    rows, entries = ProfileRows([RunView(table, dict(table.about))]), Catalogue(CATALOGUE)
    told = {row["model"]: row for row in modality_table(table)}
    for subject in rows.subjects:
        mean, row = mean_over_blocks(rows, entries, subject, "average_cosine"), told[subject.model]
        assert mean is not None
        assert (mean.low, mean.high) == pytest.approx((row["mean_low"], row["mean_high"]), rel=1e-12)
    words = " ".join(modality_findings(compare([RunView(table, dict(table.about))]))[0].texts)
    means = [mean_over_blocks(rows, entries, s, "average_cosine") for s in rows.subjects]
    assert all(mean is not None and mean.text in words for mean in means)


def test_an_interval_that_ends_at_what_is_possible_is_not_told_as_plus_minus() -> None:
    assert estimate(2.1, 0.0, 5.6) == "2.1 [0.0, 5.6]"
    assert estimate(0.98, 0.95, 1.0) == "0.980 [0.950, 1.000]"
    assert "±" in estimate(-0.1, -0.8, 0.6)
    assert "±" in estimate(2.1, -0.7, 4.9)


def test_the_table_has_both_correlations_of_every_stack_with_their_p() -> None:
    up = Media("up", "text", layers=7).stream(lambda d: 0.2 + 0.4 * d)
    down = Media("down", "convolution", layers=7).stream(lambda d: 0.6 - 0.4 * d, share=0.1)
    table = media_table(up, down)
    found = compare([RunView(table, dict(table.about))])
    section, records = drift_section(found), {r["label"]: r for r in found.records}
    assert section is not None
    shown = next(part for part in section.parts if isinstance(part, DataTable))
    rows = {row[-6].text: row[-6:] for group in shown.groups[:2] for row in group}
    assert set(rows) == {"up", "down"}
    for label, (_, _, pearson, spearman, *_) in rows.items():
        for cell, name in ((pearson, "pearson_p"), (spearman, "spearman_p")):
            p = p_words(records[label][name])
            assert p != "–" and cell.small[-1].endswith(p)
        assert spearman.text == ("1.00" if label == "up" else "−1.00")
    assert any("Not explained by drift: down." in str(getattr(part, "text", "")) for part in section.parts)
    figure = next(part for part in section.parts if isinstance(part, Figure))
    assert "p = " not in figure.panels[0].caption and "p < " not in figure.panels[0].caption, "it decides nothing"
    assert {r["model"] for r in drift_correlations(table)} == {"up", "down"}


# what cannot be trusted


def dimensions(notes: dict[int, str]) -> Table:
    scribe = Scribe()
    for layer in range(5):
        value = 0.4 if layer in notes else 6.0 + layer
        low, high = (0.0, 52.0) if layer in notes else (value - 0.3, value + 0.3)
        kind = "resid" if layer else "embed"
        scribe.row(ENCODER, layer, kind, "two_nn", value, value=value, low=low, high=high, note=notes.get(layer, ""))
    return Table.from_records(scribe.rows)


def test_a_dimension_that_near_copies_decide_is_marked_and_not_told() -> None:
    rows = ProfileRows([RunView(dimensions({2: NEAR}))])
    text = {f.topic: f.texts[0] for f in find(rows, Catalogue(CATALOGUE))}["Dimension"]
    assert "0.4" not in text
    assert "Not counted: block 2" in text
    section = heat_section(rows, Catalogue(CATALOGUE), compared=False)
    assert section is not None
    shown = next(part for part in section.parts if isinstance(part, DataTable))
    cells = [cell for row in shown.groups[0] for cell in row if isinstance(cell, TableCell) and not cell.head]
    assert [cell.text.endswith("?") for cell in cells] == [False, False, True, False, False]
    honest = ProfileRows([RunView(dimensions({2: "bias about +0 % at this n"}))])
    plain = {f.topic: f.texts[0] for f in find(honest, Catalogue(CATALOGUE))}["Dimension"]
    assert "Not counted" not in plain
    assert "0.4" in plain


def printed(table: Table) -> str:
    console = Console(width=140, record=True, file=io.StringIO())
    for shown in short_tables(table, catalogue=CATALOGUE):
        console.print(shown)
    return console.export_text()


def test_the_console_marks_it_too() -> None:
    assert "? near-copies or noise decide" in " ".join(printed(dimensions({2: NEAR})).split())
    assert "?" not in printed(dimensions({}))


def test_sites_that_were_asked_for_by_name_are_printed_and_others_are_not() -> None:
    scribe = Scribe()
    scribe.model(Fake("m", "encoder", 3))
    for layer in range(4):
        scribe.row(Fake("m", "encoder", 3), layer, "cls", "average_cosine", 0.5)
        scribe.row(Fake("m", "encoder", 3), layer, "stage_mean", "average_cosine", 0.5)
    for sites, there in (([], False), (["resid", "cls"], True)):
        text = printed(Table(Table.from_records(scribe.rows).arrow, {"config": {"sites": sites}}))
        assert ("block 3 · cls" in text) == there
        assert "block 3 " in text
        assert "stage_mean" not in text


# where pages are written


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs of a few rows, each with a page of its own."""
    made, base = [], tmp_path_factory.mktemp("runs")
    for name in ("one", "two"):
        folder = base / name
        folder.mkdir()
        view = run_view([Fake(name, "encoder", 2)], rich=False)
        pq.write_table(view.table.arrow, folder / "table.parquet")
        (folder / "run.json").write_text(json.dumps({"status": "complete", **view.about}), encoding="utf-8")
        (folder / "report.html").write_text("its own", encoding="utf-8")
        made.append(folder)
    return made


@pytest.mark.usefixtures("named_figures")
def test_a_page_of_several_runs_takes_no_runs_own_page(runs: list[Path]) -> None:
    page = report_runs(runs)
    assert page.parent == runs[0].parent / "comparison-one-two"
    assert all((run / "report.html").read_text(encoding="utf-8") == "its own" for run in runs)
    figures = {path.stem for path in (page.parent / "figures").iterdir()}
    assert any(name.startswith("profile-") for name in figures)
    assert not any(name.startswith("heat-map") for name in figures)  # a run's own folder has that of its models


@pytest.mark.usefixtures("named_figures")
def test_out_may_be_a_folder_or_a_page_but_no_other_file(runs: list[Path], tmp_path: Path) -> None:
    assert report_runs(runs[:1], tmp_path / "folder") == tmp_path / "folder" / "report.html"
    page = report_runs(runs[:1], tmp_path / "x.html")
    assert page == tmp_path / "x.html"
    assert page.is_file()
    assert (tmp_path / "x-figures").is_dir()
    assert 'href="x-figures/' in page.read_text(encoding="utf-8")
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(AnisoscopeError, match="is a file"):
        report_runs(runs[:1], tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "mine"


# figures


def test_a_spectrum_that_is_all_zero_draws_nothing_and_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        panel = spectrum_panel({"1.stage": np.array([2.0, 1.0]), "2.final": np.zeros(2)})
        assert not draw(Figure((panel,)), [panel], {}).legends
        named = spectrum_panel({"1.stage": np.array([2.0, 1.0]), "2.final": np.array([1.0, 0.5])})
        assert draw(Figure((named,)), [named], {}).legends


@pytest.mark.parametrize("orders", [3, 40])
def test_a_logarithmic_axis_has_a_few_ticks_however_many_orders_it_spans(orders: int) -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    axes.loglog([10.0**-orders, 1.0], [1.0, 1.0])
    few_powers(axes.xaxis)
    ticks = [tick for tick in axes.get_xticks() if 10.0**-orders <= tick <= 1]
    assert 2 <= len(ticks) <= 6
    assert len(axes.get_xticks(minor=True)) == 0


def test_the_page_spaces_its_logarithmic_ticks_by_the_orders_it_spans() -> None:
    panels = {orders: Panel(drift_axis([10.0**-orders, 1.0], "drift")) for orders in (1, 3, 40)}
    axes = {orders: panel_spec(panel)["layout"]["xaxis"] for orders, panel in panels.items()}
    assert {orders: axis.get("dtick") for orders, axis in axes.items()} == {1: None, 3: 1, 40: 8}


def test_scores_of_cross_attention_stand_with_scores_and_not_with_queries() -> None:
    scribe = Scribe()
    owner = Fake("w", "decoder", 2, heads=2)
    for kind, metric in (("scores", "attention_entropy"), ("cross_scores", "attention_entropy"), ("query", "drift")):
        for layer in (1, 2):
            for head in (0, 1):
                scribe.row(owner, layer, kind, metric, 0.5, head=head)
    keys = list(head_maps(ProfileRows([RunView(Table.from_records(scribe.rows))]), Catalogue(CATALOGUE)))
    assert [kind for _, kind, _ in keys] == ["scores", "cross_scores", "query"]
    assert head_title(Catalogue(CATALOGUE), keys[1]).endswith("cross-attention")


def test_rows_of_stages_are_drawn_over_training_and_the_page_says_what_rows_are(tmp_path: Path) -> None:
    sheet = Media("c", "convolution", layers=4, steps=(0, 10), entry={"rows": {"single": "one position of a map"}})
    table = media_table(sheet.stream())
    rows = [
        {"model": "c", "seed": None, "stack": "single", "layer": layer, "kind": "stage", "step": step, "row": row,
         "x": 1.0 * row, "y": 2.0, "token": "", "frequency": None, "position": row, "group": ""}
        for layer in (2, 4) for step in (0, 10) for row in range(9)
    ]  # fmt: skip
    drawn = mapped_sites(pa.Table.from_pylist(rows))
    path = write_report(tmp_path, [RunView(table, dict(table.about), map=drawn)], catalogue=CATALOGUE)
    text = path.read_text(encoding="utf-8")
    assert "9 positions of a map, the same at every step" in text
    assert "token occurrences" not in text
    assert 'label="first block"' in text and 'label="last block"' in text
