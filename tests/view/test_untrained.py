"""The page of untrained blocks: what it shows, what it leaves out, and that its numbers are those of the table."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anisoscope.commands.drawing import write_study_report
from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.catalogue import registry
from anisoscope.results.folder import RunFolder
from anisoscope.results.quantity import over_seeds
from anisoscope.results.query import Table
from anisoscope.studies.untrained.figures import (
    LINES,
    REFERENCE,
    BiasCurves,
    CurveArm,
    bias_axis,
    bias_place,
    block_figure,
    prediction,
    reference_rows,
    variants_figure,
)
from anisoscope.studies.untrained.protocol import EDGES
from anisoscope.view.subjects import RunView
from support.pages import page_of

BIASES = (0.0, 0.5, 1.0, 50.0, 100.0, 200.0)
ABOUT = {
    "kind": "study", "study": "untrained", "status": "complete", "anisoscope": "0", "started": "2026-01-01",
    "config": {"preset": "full"}, "size": {"length": 512, "sequences": 16}, "command": ["anisoscope"],
    "models": [{"name": "bert", "about": "encoder, norm after each sublayer", "block": "BertLayer", "rows": "tokens"}],
}  # fmt: skip


def records(
    *,
    families: tuple[str, ...] = ("bert",),
    widths: tuple[int, ...] = (768,),
    norms: tuple[bool, ...] = (True, False),
    seeds: int = 3,
) -> list[dict[str, Any]]:
    """A table whose outputs follow a known curve; outputs of bert have norm √d."""
    random = np.random.default_rng(0)
    places = {line[1] for line in LINES}
    rows = []
    for family, width, norm, bias, seed in itertools.product(families, widths, norms, BIASES, range(seeds)):
        shake = 1 + 0.01 * random.normal()
        cosine = bias**2 / (bias**2 + (width if norm else width * 0.0004)) * shake + 0.01
        special = {
            ("resid", "mean_norm"): math.sqrt(width) if family == "bert" else bias + 1,
            ("scores", "score_magnitude"): (0.1 + bias**2) * shake,
        }
        variant = f"bias={bias:g};init=normal;input_norm={int(norm)};width={width}"
        own = {"model": family, "seed": seed, "variant": variant, "layer": 1, "stack": "single", "group": ""}
        rows += [{**own, "kind": k, "metric": m, "value": special.get((k, m), cosine)} for k, m in places]
    return rows


def curves_of(rows: list[dict[str, Any]], **about: Any) -> BiasCurves:
    return BiasCurves.of(RunView(Table.from_records(rows), {**ABOUT, **about}), registry())


def folder_of(path: Path, rows: list[dict[str, Any]], **about: Any) -> RunFolder:

    folder = RunFolder(path)
    path.mkdir()
    folder.write_about({**ABOUT, **about})
    folder.write_table(Table.from_records(rows))
    folder.write_json("verdicts.json", [])
    counts = np.histogram(np.random.default_rng(0).normal(size=500), EDGES)[0]
    keys = {f"bert-normal-768-{s}/input_norm={n}/bias={b:g}": counts for s in range(3) for n in (0, 1) for b in BIASES}
    folder.write_arrays("histograms", {"edges": EDGES, **keys})
    return folder


@pytest.mark.usefixtures("vector_figures")
def test_the_page_holds_figures_reference_and_numbers_and_fetches_nothing(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "run", records(widths=(256, 768), norms=(True,)))
    text = write_study_report(folder.path, "untrained").read_text(encoding="utf-8")
    assert text.count('class="plot"') == 2 + 8 + 3, (
        "the hero, a panel for each quantity and the histogram, small multiples"
    )
    for name in ("panel-bert-normed", "variants-bert-normed"):
        assert (folder.path / "figures" / f"untrained-{name}.pdf").stat().st_size > 1000
        assert f"figures/untrained-{name}.pdf" in text
    assert 'id="reference"' in text and "0.765" in text and "√d by construction" in text
    assert page_of(folder.path / "report.html").fetched() == []


def test_without_the_block_of_the_reference_there_is_no_such_table(tmp_path: Path) -> None:
    other = folder_of(tmp_path / "run", records(families=("gpt2",), norms=(True,)))
    text = write_study_report(other.path, "untrained").read_text(encoding="utf-8")
    assert 'id="reference"' not in text and "√d by construction" not in text
    short = curves_of(records(), size={"length": 128})
    assert not reference_rows(short), "nor for shorter sequences"
    assert len(reference_rows(curves_of(records()))) == len(REFERENCE)


def test_marks_are_means_over_seeds_with_students_interval() -> None:
    curves = curves_of(records())
    arm = CurveArm("bert", "normal", 768, True)
    seeds = curves.seeds_at(arm, 50.0, ("resid", "average_cosine"))
    mark = curves.at(arm, 50.0, ("resid", "average_cosine"))
    assert mark is not None and len(seeds) == 3 and mark.value == pytest.approx(np.mean(seeds))
    half = 4.302653 * np.std(seeds, ddof=1) / math.sqrt(3)
    assert mark.high - mark.value == pytest.approx(half, rel=1e-6)
    high = prediction(seeds)[1]
    assert high - mark.value == pytest.approx(2 * half, rel=1e-6), "√(1 + 1/3) over √(1/3) is 2"
    for few in (1, 2):
        one = curves_of(records(seeds=few)).at(arm, 50.0, ("resid", "average_cosine"))
        assert one is not None and math.isnan(one.low), "fewer than three seeds have no interval"
    assert curves.at(arm, 7.0, ("resid", "average_cosine")) is None


def test_intervals_end_where_their_quantity_does() -> None:
    for values, metric, ends in (
        ([0.9, 1.0, 1.0], "attention_entropy", (0.7, 1.0)),
        ([0.9, 1.0, 1.0], "average_cosine", (0.7, 1.0)),
        ([0.0, 0.0, 0.3], "mean_norm", (0.0, 0.6)),
        ([0.0, 0.0, 0.3], "attention_min", (0.0, 0.6)),
    ):
        bounds = curves_of(records(seeds=1)).bounds(metric)
        mark, (low, high) = over_seeds(values, bounds=bounds), prediction(values, bounds=bounds)
        assert mark is not None and ends[0] <= mark.low <= mark.high <= ends[1], metric
        assert low <= mark.low and mark.high <= high and high <= 1 + (metric == "mean_norm")
    free = over_seeds([0.9, 1.0, 1.0])
    assert free is not None and free.high > 1, "the counter-test"


@pytest.mark.parametrize(("plain", "ratio"), [(0.02, 50.0), (1.0, 1.0)])
def test_plain_inputs_are_as_short_as_they_were_measured(plain: float, ratio: float) -> None:
    rows = records()
    for row in rows:
        if (row["kind"], row["metric"]) == ("embed", "mean_norm"):
            row["value"] = math.sqrt(768) * (1.0 if "input_norm=1" in row["variant"] else plain)
    assert curves_of(rows).norm_ratios() == {"bert": pytest.approx(ratio)}
    assert curves_of(records(norms=(True,))).norm_ratios() == {}, "nothing to compare"


def test_the_exponent_of_the_scores_is_that_of_the_curve() -> None:
    curves = curves_of(records())
    mark, biases = curves.exponent(CurveArm("bert", "normal", 768, True))
    assert biases == [50.0, 100.0, 200.0] and mark is not None and mark.value == pytest.approx(2, abs=0.05)


def test_a_fixed_output_norm_is_told_only_where_it_is_fixed() -> None:
    curves = curves_of(records(families=("bert", "gpt2")))
    assert curves.fixed_norm("bert") and not curves.fixed_norm("gpt2")


def test_the_axis_of_the_bias_is_logarithmic_and_has_a_zero() -> None:
    axis = bias_axis(BIASES)
    assert axis.ticks is not None and list(axis.ticks[1]) == ["0", "1", "10", "100"]
    places = [bias_place(bias, 0.5) for bias in BIASES]
    assert places == sorted(places) and places[0] < places[1] - 0.2, "0 stands apart"
    assert places[4] - places[3] == pytest.approx(math.log10(2))


def test_single_points_and_single_seeds_are_drawn_too() -> None:
    rows = [row for row in records(seeds=1) if "bias=50;" in row["variant"]]
    curves = curves_of(rows)
    drawn = [block_figure(curves, arm, {}) for arm in curves.leading_arms()]
    assert {stem for figure in drawn for stem in figure.files} == {
        "untrained-panel-bert-normed",
        "untrained-panel-bert-plain",
    }
    assert all(panel.series for figure in drawn for panel in figure.panels)
    assert variants_figure(curves, "bert", True) is None, "one width and initialisation: nothing to compare"


def test_an_unfinished_study_is_no_page(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "run", records(), status="interrupted")
    with pytest.raises(AnisoscopeError, match="no finished untrained study"):
        write_study_report(folder.path, "untrained")
