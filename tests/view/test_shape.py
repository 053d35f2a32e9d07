"""What the views over training promise: the table's own numbers, arms beside each other, nothing unmeasured."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from anisoscope.commands.drawing import write_report
from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.catalogue import registry
from anisoscope.results.folder import RunFolder, mapped_sites
from anisoscope.results.query import Table
from anisoscope.view.sections.ablation import designs, effects_of
from anisoscope.view.sections.shape import SIZE, arm_line, arms_of, make_shape, measures_of, sites_of
from anisoscope.view.sections.single_rows import row_maps
from anisoscope.view.subjects import DrawnSite, RunView, TrainingRows
from anisoscope.view.words import Catalogue
from support.fake_runs import HOSTILE
from support.fake_shape import ARMS, BELL, ESTIMATORS, shape_map, shape_table, write_study
from support.fake_training import training_table
from support.pages import Page, figure_names, page_of

STEPS = (0, 4, 64, 1000)
MIDDLE = DrawnSite.of(2, "resid")


def small(**more: Any) -> Table:
    return shape_table(**({"steps": STEPS, "sizes": ((4, 64),)} | more))


def history(table: Table) -> TrainingRows:
    return TrainingRows([RunView(table, dict(table.about))])


def page_for(folder: Path, table: Table, **more: Any) -> Page:
    about = more.pop("about", table.about)
    return page_of(write_report(folder, [RunView(table, about, **more)]))


def ids(page: Page) -> set[str | None]:
    return {attrs.get("id") for _, attrs in page.elements}


def arrays_of(page: Page) -> dict[str, Any]:
    return dict(page.data["arrays"])


def values(table: Table, metric: str, variant: str = "", **where: Any) -> list[float]:
    place = {"layer": 2, "kind": "resid", "group": "", "seed": 0, "model": "causal-next-4x64"} | where
    rows = table.where(metric=metric, variant=variant, **place).records()
    return [row["value"] for row in sorted(rows, key=lambda row: row["step"]) if row["head"] is None]


@pytest.fixture(scope="module")
def table() -> Table:
    return small()


@pytest.fixture(scope="module")
def study(table: Table, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shape")
    about = write_study(folder, table, steps=STEPS, layers=4)
    RunFolder(folder).write_about(about)
    with figure_names():
        return write_report(folder, [RunView(table, about, path=str(folder), map=RunFolder(folder).row_map())])


@pytest.fixture(scope="module")
def page(study: Path) -> Page:
    return page_of(study)


def test_the_page_carries_the_numbers_of_the_table(page: Page, table: Table) -> None:
    arrays, found = arrays_of(page), history(table)
    assert len(arrays["shape/x"]) == len(STEPS)
    for metric, variant in (("svd_ratio", ""), ("svd_ratio", "batches=1"), *ESTIMATORS):
        measures = measures_of(found, Catalogue(registry()))
        m = next(i for i, x in enumerate(measures) if (x.metric, x.variant) == (metric, variant))
        assert measures[m].label in page.text
        place = sites_of(found, measures[m]).index(MIDDLE)
        assert arrays[f"shape/{m}/0/mean"][place] == pytest.approx(values(table, metric, variant), rel=1e-3)
        low = values(table, metric, variant)[0] - (0.4 if (metric, variant) in ESTIMATORS else 0.01)
        assert arrays[f"shape/{m}/0/lo"][place][0] == pytest.approx(low, rel=0.15)


def test_sections_are_there_for_what_was_measured_and_for_nothing_else(page: Page, tmp_path: Path) -> None:
    assert {"shape", "grid", "moment", "rows-map", "dimension", "ablation", "course"} <= ids(page)
    assert not {"energy", "maps", "frequency", "elsewhere", "concepts", "geometry"} & ids(page)
    only = Table.from_records(
        [r for r in small(arms=("causal-next",)).records() if r["metric"] == "average_cosine"], {}
    )
    alone = page_for(tmp_path, only)
    assert "shape" in ids(alone)
    assert not {"rows-map", "dimension", "ablation", "course"} & ids(alone)
    assert "training loss (pale)" in page.text and "training loss (pale)" not in alone.text


def test_every_figure_has_a_drawing_and_words(page: Page) -> None:
    charts = [a for _, a in page.elements if "plot" in (a.get("class") or "").split()]
    assert {c["id"] for c in charts} == set(page.specs())
    assert all(c.get("aria-label") for c in charts)
    switched = [spec["by"][0] for spec in page.specs().values() if "by" in spec]
    # three courses and maps and one profile; rows; estimators over steps; one size; attention and its four layers
    assert {name: switched.count(name) for name in set(switched)} == {
        "shape.0": 7, "rows.0": 3, "dimension.0": 3, "ablation.0": 1, "sharp.0": 5, "drift.0": 3,
    }  # fmt: skip
    named = set(arrays_of(page))
    used = {part.split('"')[0] for part in json.dumps(page.specs()).split('"r": ["')[1:]}
    assert used and used <= named


def test_loss_and_gradient_norm_stand_on_the_axis_of_the_metrics(page: Page, table: Table) -> None:
    course = next(spec for spec in page.specs().values() if spec.get("by") == ["shape.0"])
    loop = {trace["name"]: trace for trace in course["data"]}
    assert set(loop) == {"training loss", "probe loss", "gradient norm"}
    assert loop["probe loss"]["x"] == arrays_of(page)["shape/x"]
    own = values(table, "probe_loss", layer=None, kind="training")
    assert loop["probe loss"]["y"] == pytest.approx(own, rel=1e-3)
    assert (loop["probe loss"]["yaxis"], loop["gradient norm"]["yaxis"]) == ("y2", "y3")


def test_seeds_are_one_arm_with_their_mean_and_their_reach() -> None:
    table = small(seeds=(0, 1, 2))
    found = history(table)
    arms = arms_of(found)
    assert [arm.label for arm in arms] == [f"{arm}-4x64" for arm in ARMS]
    measure = next(m for m in measures_of(found, Catalogue()) if m.metric == "svd_ratio" and not m.variant)
    line = arm_line(found, arms[0], measure, MIDDLE)
    seeds = [values(table, "svd_ratio", seed=s) for s in (0, 1, 2)]
    assert [m.value for m in line] == pytest.approx([fmean(v) for v in zip(*seeds, strict=True)])
    assert (line[-1].low, line[-1].high) == (min(s[-1] for s in seeds), max(s[-1] for s in seeds))
    alone = arm_line(history(small()), arms_of(history(small()))[0], measure, MIDDLE)
    assert (alone[-1].low, alone[-1].high) != (line[-1].low, line[-1].high)  # one seed has the interval of its contexts


def test_arms_of_several_runs_of_one_seed_are_not_averaged() -> None:
    table = small(arms=("causal-next",))
    both = TrainingRows([RunView(table, path="a"), RunView(table, path="b")])
    assert [len(arm.subjects) for arm in arms_of(both)] == [1, 1]


def test_halves_and_heads_are_no_lines_of_their_own(table: Table) -> None:
    found = history(table)
    measures = measures_of(found, Catalogue())
    assert len({(m.metric, m.variant, m.family) for m in measures}) == len(measures)
    sharp = next(m for m in measures if m.metric == "attention_sharpness")
    assert sharp.family == "scores"
    sites = sites_of(found, sharp)
    assert [(s.layer, s.kind) for s in sites] == [(n, "scores") for n in range(1, 5)]
    own = values(table, "attention_sharpness", kind="scores")
    assert [m.value for m in arm_line(found, arms_of(found)[0], sharp, sites[1])] == pytest.approx(own)


def test_the_ablation_tells_what_was_planted(page: Page) -> None:
    table = small(seeds=(0, 1, 2))
    found = history(table)
    effects = {(e.name, e.metric): e for e in effects_of(found, Catalogue())}
    mean = fmean(math.sin(math.pi * n / 4) for n in range(1, 5))
    mask, objective = effects["mask_effect", "svd_ratio"], effects["objective_effect", "svd_ratio"]
    assert mask.value == pytest.approx((BELL["bidirectional-masked"] - BELL["causal-masked"]) * mean, abs=0.02)
    assert objective.value == pytest.approx((BELL["causal-masked"] - BELL["causal-next"]) * mean, abs=0.02)
    assert mask.low is not None
    assert mask.high is not None
    assert mask.low < mask.value < mask.high < 0
    one = effects_of(history(small()), Catalogue())
    assert all(e.low is None and e.told == "one seed" for e in one)
    assert "Mask effect" in page.text


def test_effects_are_those_of_the_verdicts_where_there_are_any(table: Table) -> None:
    parts = [
        {"name": "svd_ratio", "effect": -0.5, "low": -0.6, "high": -0.4},
        {"name": "fall of anisotropy", "effect": 9},
    ]
    verdict = {"claim": "mask_effect", "subject": "4x64", "details": {"parts": parts}}
    found = history(table)
    effects = {(e.name, e.metric): e for e in effects_of(found, Catalogue(), [verdict])}
    assert (effects["mask_effect", "svd_ratio"].value, effects["mask_effect", "svd_ratio"].low) == (-0.5, -0.6)
    assert effects["objective_effect", "svd_ratio"].told == "one seed"
    other = effects_of(found, Catalogue(), [verdict | {"subject": "8x128"}])
    assert -0.5 not in [e.value for e in other]


def test_models_that_are_no_arms_have_no_ablation() -> None:
    assert designs(arms_of(history(training_table(steps=(0, 8), layers=1, only=("svd_ratio",))))) == {}
    assert list(designs(arms_of(history(small(sizes=((12, 8), (4, 64))))))) == ["4x64", "12x8"]


def test_flags_of_checkpoints_stand_in_a_box_and_only_where_there_are_any(tmp_path: Path, page: Page) -> None:
    table = small(arms=("causal-next",), flags=True)
    entries = [{"label": "checkpoint-9", "step": 9, "flags": ["missing: it is gone"]}]
    flagged = page_for(tmp_path, table, about=table.about | {"checkpoints": entries})
    for said in ("3 checkpoints are not what they should be", "Repeated: the same weights as checkpoint-16",
                 "Out of order", "Missing: it is gone"):  # fmt: skip
        assert said in flagged.text, said
    assert "not what they should be" not in page.text


def test_claims_without_measurements_are_one_line(tmp_path: Path) -> None:
    base = {"statement": "S.", "subject": "m", "effect": 0.2, "low": 0.1, "high": 0.3, "margin": 0.05, "why": "W."}
    verdicts = [base | {"claim": "bell", "status": "holds"}]
    verdicts += [base | {"claim": f"far_{i}", "status": "undecided", "details": {"missing": True}} for i in range(9)]
    page = page_for(tmp_path, small(arms=("causal-next",)), verdicts=verdicts)
    badges = [a for t, a in page.elements if t == "button" and "badge" in (a.get("class") or "")]
    assert len(badges) == 1
    assert "9 claims were not measured here" in page.text and "Far 3" in page.text


def test_rows_keep_their_place_and_axes_their_shares(page: Page, table: Table, tmp_path: Path) -> None:
    arrays = arrays_of(page)
    options = [
        "embedding",
        "first block",
        "middle block",
        "last block",
        "final norm",
        "token frequency",
        "position",
        "group",
    ]
    assert "axis 1 (60 % of variance)" in json.dumps(page.specs(), ensure_ascii=False)
    assert "".join(options[:5]) in page.text and "".join(options[5:]) in page.text
    planted = shape_map(["causal-next-4x64"], steps=STEPS, layers=4).to_pylist()
    own = [r["x"] for r in planted if (r["layer"], r["kind"], r["step"]) == (2, "resid", 64)]
    assert arrays["rows/0/2/at"][list(STEPS).index(64)][0] == pytest.approx(own, rel=1e-3)
    assert [text.split("<br>")[0] for text in arrays["rows/0/2/text"][:2]] == ["<b>w0␣</b>", "<b>w1␣</b>"]
    given = RunView(table, {}, map=mapped_sites(shape_map(["causal-next-4x64"], steps=STEPS, layers=4)))
    assert set(row_maps([given], arms_of(history(table)), STEPS)) == {0}
    assert row_maps([RunView(table, {})], arms_of(history(table)), STEPS) == {}
    (tmp_path / "map.parquet").write_bytes(b"no")
    with pytest.raises(AnisoscopeError, match=r"map\.parquet.*not a readable map"):
        RunFolder(tmp_path).row_map()


def test_a_large_study_is_cut_to_what_a_page_carries_and_says_so(monkeypatch: pytest.MonkeyPatch, table: Table) -> None:
    whole = make_shape(history(table), Catalogue())
    assert whole is not None
    assert not whole.left_out
    assert len(json.dumps(whole.arrays)) < SIZE
    monkeypatch.setattr("anisoscope.view.sections.shape.SIZE", 20_000)
    cut = make_shape(history(table), Catalogue())
    assert cut is not None
    assert len(json.dumps(cut.arrays)) < len(json.dumps(whole.arrays))
    assert "measures" in cut.left_out["measures"]


@pytest.mark.usefixtures("drawn_figures")
def test_names_never_become_markup(tmp_path: Path) -> None:
    records = [r | {"model": HOSTILE} for r in small(arms=("causal-next",)).records()]
    found = shape_map([HOSTILE], steps=STEPS, layers=4)
    page = page_for(tmp_path, Table.from_records(records), map=mapped_sites(found))
    assert "<" not in page.scripts["data"]
    assert "<script>alert" not in json.dumps(page.specs())
    assert "alert" in json.dumps(page.specs())  # the counter-test: it is there, as text
    drawn = list((tmp_path / "figures").glob("*.svg"))
    assert drawn and all(file.stat().st_size > 1000 for file in drawn)


def test_one_step_has_no_course(tmp_path: Path) -> None:
    page = page_for(tmp_path, small(arms=("causal-next",), steps=(64,)))
    assert "shape" not in ids(page)
    assert "geometry" in ids(page)


@pytest.mark.usefixtures("drawn_figures")
def test_what_could_not_be_computed_is_empty_not_zero(tmp_path: Path) -> None:
    records = small(arms=("causal-next",)).records()
    for r in records:
        if r["metric"] == "svd_ratio" and r["step"] == 64:
            r |= {"value": math.nan, "low": math.inf, "high": math.nan}
    page = page_for(tmp_path, Table.from_records(records))
    found = history(Table.from_records(records))
    m = next(
        i for i, x in enumerate(measures_of(found, Catalogue(registry()))) if (x.metric, x.variant) == ("svd_ratio", "")
    )
    assert {row[2] for row in arrays_of(page)[f"shape/{m}/0/mean"]} == {None}


def test_vector_figures_are_written_for_what_was_measured(study: Path, page: Page) -> None:
    stems = {p.stem for p in (study.parent / "figures").iterdir()}
    assert stems == {
        "hero", "profiles-svd_ratio", "profiles-two_nn", "profiles-attention_sharpness", "steps-by-layers-svd_ratio",
        "steps-by-layers-two_nn", "steps-by-layers-attention_sharpness", "dimension-over-training",
        "ablation-profiles", "ablation-effects", "drift-and-cosine", "drift-and-cosine-pooled",
        *(f"attention-over-training-{arm}-4x64" for arm in ARMS),
    }  # fmt: skip
    links = [a["href"] for t, a in page.elements if t == "a" and "figures/" in (a.get("href") or "")]
    assert {f"figures/{stem}.pdf" for stem in stems} == set(links)


@pytest.mark.slow
def test_a_study_of_full_size_opens_as_one_page_of_bounded_size(tmp_path: Path) -> None:
    steps = (0, *(2**i for i in range(14)))
    table = shape_table(sizes=((12, 512), (6, 256)), seeds=(0, 1, 2), steps=steps, heads=8)
    assert len(table) > 200_000
    path = write_report(tmp_path, [RunView(table, table.about)])
    assert path.stat().st_size < 12_000_000
