"""What the training page promises: the table's own numbers, nothing invented, nothing lost without a word."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from anisoscope.commands.drawing import run_view, write_report
from anisoscope.errors import AnisoscopeError
from anisoscope.results.folder import RunFolder
from anisoscope.results.query import Query, Table
from anisoscope.results.row import StepMean
from anisoscope.view.figure import Time
from anisoscope.view.sections.gradients import Gradients
from anisoscope.view.sections.provenance import PAGE_ROWS, page_table
from anisoscope.view.sections.shape import logged_series
from anisoscope.view.sections.single_rows import concept_cards
from anisoscope.view.sections.training_page import find_training
from anisoscope.view.subjects import RunView, TrainingRows
from anisoscope.view.words import Catalogue
from support.fake_runs import ENCODER, HOSTILE
from support.fake_runs import run_view as profile_view
from support.fake_training import training_table
from support.pages import Page, figure_names, page_of

STEPS = (0, 1, 8, 64)
REFIT = "fit=refit;proxy=semi_nmf;rank=16"
VERDICTS: list[dict[str, Any]] = [
    {"claim": "tangent_energy", "statement": "Energy lies above every control.", "status": "holds", "effect": 0.31,
     "low": 0.28, "high": 0.34, "p": 0.001, "margin": 0.02, "why": "At 5 of 5 layers.", "subject": "decoder",
     "scope": "for this model", "details": {"parts": [{"name": "next", "effect": 0.4, "low": 0.3, "high": 0.5,
                                                       "status": "holds"}, {"name": "lost", "effect": None}]}},
    {"claim": "tangent_energy", "statement": "Energy lies above every control.", "status": "undecided",
     "effect": math.nan, "low": math.nan, "high": math.nan, "p": math.nan, "margin": 0.02, "why": "No rows.",
     "subject": "encoder", "scope": "for this model"},
    {"claim": "frequent", "statement": "Frequent tokens are enriched most.", "status": "fails", "effect": -0.1,
     "low": -0.2, "high": -0.04, "p": None, "margin": 0.0, "why": "Rare ones are.", "subject": "decoder",
     "scope": "for three seeds"},
]  # fmt: skip


def concept(step: int = 64, **more: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"model": "decoder", "step": step, "stack": "single", "layer": 2, "kind": "resid"}
    base |= {"concept": 0, "share": 0.4, "tokens": [[" the", 0.2], ["\n", 0.1]], "from": None}
    base["examples"] = [{"before": "out of", "token": " the", "after": " house\n", "code": 3.2}]
    return base | more


def small_table(**more: Any) -> Table:
    return training_table(**({"steps": STEPS, "layers": 4} | more))


def page_for(folder: Path, table: Table, **more: Any) -> Page:
    return page_of(write_report(folder, [RunView(table, table.about, **more)]))


@pytest.fixture(scope="module")
def table() -> Table:
    return small_table()


@pytest.fixture(scope="module")
def study(table: Table, tmp_path_factory: pytest.TempPathFactory) -> Path:
    view = RunView(table, table.about, path="runs/study", verdicts=VERDICTS, concepts=[concept(), concept(0)])
    with figure_names():
        return write_report(tmp_path_factory.mktemp("study"), [view])


@pytest.fixture(scope="module")
def page(study: Path) -> Page:
    return page_of(study)


def ids(page: Page) -> set[str | None]:
    return {attrs.get("id") for _, attrs in page.elements}


def switched(page: Page, switch: str) -> list[dict[str, Any]]:
    """The figures that a switch changes."""
    return [spec for spec in page.specs().values() if spec.get("by", [""])[0].split(".")[0] == switch]


def drawn(page: Page, switch: str, line: int, key: str, which: int = 0) -> dict[str, dict[str, Any]]:
    """The lines of one view of a model's figure by name, made whole again."""
    own = [spec for spec in switched(page, switch) if key in spec["views"]]
    spec = own[line * (len(own) // 2) + which] if len(own) > 1 else own[0]
    found = {}
    for trace in spec["views"][key]["data"]:
        whole = spec["styles"][trace["style"]] | trace
        whole["x"] = spec["shared"][whole["x"]]
        found[whole["name"]] = whole
    return found


def values(table: Table, metric: str, variant: str = REFIT, column: str = "value", **where: Any) -> list[float]:
    place = {"model": "decoder", "layer": 2, "kind": "resid", "group": ""} | where
    rows = table.where(metric=metric, variant=variant, **place).records()
    return [row[column] for row in sorted(rows, key=lambda row: row["step"])]


def test_the_page_shows_the_energies_and_bands_of_the_table(page: Page, table: Table) -> None:
    view = drawn(page, "against", 0, "0|2|0")
    assert view["semi-NMF"]["y"] == pytest.approx(values(table, "gradient_energy"), rel=1e-4)
    assert view["PCA"]["y"] == pytest.approx(values(table, "gradient_energy", "fit=refit;proxy=pca;rank=16"), rel=1e-4)
    for control, name in (("next", "next r"), ("permuted", "permuted"), ("normal", "normal subspaces")):
        own = values(table, "gradient_energy", f"control={control};{REFIT}")
        assert view[name]["y"] == pytest.approx(own, rel=1e-4)
    low, high = (values(table, "gradient_energy", f"control=normal;{REFIT}", c) for c in ("low", "high"))
    band = view["normal subspaces"]
    assert (band["low"], band["high"]) == (pytest.approx(low, rel=1e-4), pytest.approx(high, rel=1e-4))
    assert (band["band"], band["line"]["color"]) == (0.26, "@s3")
    assert view["chance"]["y"] == pytest.approx([16 / 256] * 2)
    assert view["semi-NMF"]["low"] == pytest.approx(values(table, "gradient_energy", column="low"), rel=1e-4)


def test_encoder_and_decoder_stand_side_by_side_on_one_scale(page: Page, table: Table) -> None:
    encoder = drawn(page, "against", 1, "0|2|0")["semi-NMF"]["y"]
    assert encoder == pytest.approx(values(table, "gradient_energy", model="encoder"), rel=1e-4)
    specs = switched(page, "against")
    assert len(specs) == 2
    assert specs[0]["views"]["0|2|0"]["y"] == specs[1]["views"]["0|2|0"]["y"]


def test_steps_that_the_frozen_proxy_has_seen_are_hollow(page: Page) -> None:
    frozen = drawn(page, "against", 0, "0|2|1")["semi-NMF"]["marker"]
    assert frozen["hollow"] == [True] + [False] * 3  # 30 % of four steps, one at least
    assert "hollow" not in drawn(page, "against", 0, "0|2|0")["semi-NMF"]["marker"]


def test_the_map_holds_every_layer_at_every_step(page: Page, table: Table) -> None:
    spec, _ = switched(page, "map")
    trace = spec["styles"][spec["views"]["0"]["data"][0]["style"]] | spec["views"]["0"]["data"][0]
    assert trace["y"] == ["embedding", "block 1", "block 2", "block 3", "block 4", "final norm"]
    assert trace["z"][2] == pytest.approx(values(table, "gradient_enrichment"), rel=1e-4)


def test_frequency_bins_are_those_of_the_table_plain_and_balanced(page: Page, table: Table) -> None:
    bins = [f"frequency:{i}" for i in range(1, 6)]
    last = drawn(page, "frequency", 0, "2|0")
    plain = [values(table, "gradient_enrichment", group=g)[-1] for g in bins]
    balanced = [values(table, "gradient_enrichment", f"balanced=1;{REFIT}", group=g)[-1] for g in bins]
    assert last["refitted at each step"]["y"] == pytest.approx(plain, rel=1e-4)
    assert last["refitted at each step, balanced over frequency"]["y"] == pytest.approx(balanced, rel=1e-4)
    over = drawn(page, "frequency", 0, "2|1|0")  # by the target token
    assert over["bin 5 (rarest)"]["y"] == pytest.approx(
        values(table, "gradient_enrichment", group="target:5"), rel=1e-4
    )


def test_masked_and_unmasked_rows_are_apart_where_there_are_any(page: Page, table: Table, tmp_path: Path) -> None:
    view = drawn(page, "masked", 0, "2|0")
    for name in ("masked", "unmasked"):
        own = values(table, "gradient_enrichment", model="encoder", group=name)
        assert view[f"{name} rows"]["y"] == pytest.approx(own, rel=1e-4)
    alone = page_for(tmp_path, small_table(models=("decoder",), layers=1, steps=(0, 64)))
    assert "Masked and unmasked" in page.text
    assert "Masked and unmasked" not in alone.text


def test_spread_updates_and_loop_are_told(page: Page, table: Table) -> None:
    assert {"frequency", "elsewhere", "course", "shape", "maps", "energy", "concepts"} <= ids(page)
    spread = table.where(model="decoder", metric="frequency_spread", variant="correlation=pearson;over=time").records()
    assert f"{spread[0]['value']:.2f}".replace("-", "−") in page.text
    update = drawn(page, "elsewhere", 0, "2|0")["semi-NMF"]["y"]
    own = values(table, "gradient_energy", "fit=refit;of=update;proxy=semi_nmf;rank=16", layer=0, kind="embed")
    assert update == pytest.approx(own, rel=1e-4)
    loop = [s for s in page.specs().values() if s.get("data") and s["data"][0].get("meta") == {"line": 0}]
    losses = [t["y"] for s in loop for t in s["data"] if t.get("name") == "decoder · probe"]
    assert losses[0] == pytest.approx(values(table, "probe_loss", "", layer=None, kind="training"), rel=1e-4)


def test_verdicts_stand_at_the_top_with_words_numbers_and_reasons(study: Path, page: Page) -> None:
    first = page.text.index("Verdicts", page.text.index("Skip"))
    assert first < page.text.index("Where gradients go")
    badges = [a["class"] for t, a in page.elements if t == "button" and "badge" in (a.get("class") or "")]
    assert badges == ["badge holds", "badge undecided", "badge fails"]
    for said in (
        "0.31",
        "0.28 to 0.34",
        "above 0.02",
        "0.001",
        "At 5 of 5 layers.",
        "No rows.",
        "✓",
        "✕",
        "?",
    ):
        assert said in page.text, said
    assert "Of 3 verdicts, 1 holds, 1 fails and 1 is undecided." in page.text
    assert "nan" not in page.text.lower().split()
    assert "nextholds0.4 (0.3 to 0.5)" in " ".join(page.text.split())
    assert "lost" not in page.text


def test_a_run_without_claims_or_concepts_says_nothing_of_them(tmp_path: Path) -> None:
    page = page_for(tmp_path, small_table(models=("decoder",), layers=1, steps=(0, 64), without=("fit=frozen",)))
    assert "Verdict" not in page.text
    assert "concepts" not in ids(page)
    assert "concepts" not in page.data
    assert "in-sample" not in page.text


PARTS: dict[str, dict[str, Any]] = {
    "one step": {"steps": (64,)},
    "no steps": {"steps": (0,), "stepless": True},
    "two models": {"models": ("decoder", "encoder")},
    "no groups": {"only": ("gradient_energy", "gradient_share")},
    "no controls": {"without": tuple(f"control={c}" for c in ("normal", "random", "next", "permuted"))},
    "geometry alone": {"only": ("average_cosine", "svd_ratio")},
    "the loop alone": {"only": ("loss", "learning_rate")},
    "one proxy": {"proxies": ("pca",), "fits": ("refit",)},
    "another rank": {"ranks": (8,)},
    "two seeds": {"models": ("decoder",), "seeds": (0, 1)},
}


@pytest.mark.usefixtures("drawn_figures")
@pytest.mark.parametrize("part", PARTS)
def test_a_table_with_parts_missing_still_makes_a_page(part: str, tmp_path: Path) -> None:
    page = page_for(tmp_path, small_table(**({"models": ("encoder",), "layers": 1, "steps": (0, 64)} | PARTS[part])))
    charts = [a for _, a in page.elements if "plot" in (a.get("class") or "").split()]
    assert {c["id"] for c in charts} == set(page.specs())
    assert charts
    assert all(c.get("aria-label") for c in charts)
    assert "None" not in page.text
    for spec in page.specs().values():
        assert "views" not in spec or spec["views"]


def test_what_is_missing_is_null_in_the_page_and_told(tmp_path: Path) -> None:
    records = small_table(models=("decoder",), only=("gradient_energy", "gradient_enrichment")).records()
    lost = next(r for r in records if r["step"] == 8 and r["layer"] == 2 and r["variant"] == REFIT and not r["group"])
    lost |= {"value": math.nan, "low": math.inf, "high": -math.inf, "note": "only 12 rows had gradients"}
    page = page_for(tmp_path, Table.from_records(records), verdicts=VERDICTS, concepts=[concept(share=math.nan)])
    assert drawn(page, "against", 0, "0|2|0")["semi-NMF"]["y"][2] is None
    assert "only 12 rows had gradients" in page.text
    assert page.data["concepts"][0]["cards"]["0|64"][0]["share"] is None


@pytest.mark.usefixtures("drawn_figures")
def test_names_never_become_markup(tmp_path: Path) -> None:
    bad = {"model": HOSTILE, "tokens": [[HOSTILE, 0.5]], "examples": [{"before": HOSTILE, "token": "<b>", "after": ""}]}
    records = [r | {"model": HOSTILE, "note": HOSTILE} for r in small_table(models=("decoder",), layers=2).records()]
    records += [r | {"kind": HOSTILE} for r in records if r["kind"] == "resid" and r["metric"] == "average_cosine"]
    records += [r | {"kind": "resid", "group": f"frequency:{HOSTILE}"} for r in records[:40]]
    verdict = VERDICTS[0] | {"claim": HOSTILE, "statement": HOSTILE, "why": HOSTILE, "subject": HOSTILE}
    table = Table.from_records(records, {"warnings": [HOSTILE], "models": [{"name": HOSTILE, "type": HOSTILE}]})
    page = page_for(tmp_path, table, verdicts=[verdict], concepts=[concept(**bad)], path=HOSTILE)
    assert HOSTILE in page.text
    # theme, data, plotly, page
    assert sum(tag == "script" for tag, _ in page.elements) == 4
    assert "<script>alert" not in json.dumps(page.specs())
    assert "<" not in page.scripts["data"]
    assert "alert" in json.dumps(page.data["concepts"])  # the counter-test: it is there, as text


def test_white_space_of_tokens_can_be_seen_and_cards_keep_their_origin() -> None:
    came = {"step": 8, "concept": 3, "cosine": 0.91}
    found = concept_cards([concept(**{"from": came}), concept(8)])["models"][0]
    card = found["cards"]["0|64"][0]
    assert card["tokens"][0] == ["␣the", 0.2]
    assert card["tokens"][1][0] == "⏎"
    assert card["examples"][0] == ["out of", "␣the", " house⏎", 3.2]
    assert card["from"] == [8, 3, 0.91]
    assert found["steps"] == [8, 64]
    assert concept_cards([]) == {}


def test_cards_that_do_not_fit_are_left_out_from_the_middle_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [0, *(2**i for i in range(12))]
    many = [concept(step, concept=i, layer=layer) for step in steps for layer in range(4) for i in range(8)]
    assert not concept_cards(many)["cut"]
    monkeypatch.setattr("anisoscope.view.sections.single_rows.BUDGET", 40_000)
    cards = concept_cards(many)
    assert cards["cut"]
    assert {0, 2048} <= set(cards["models"][0]["steps"])
    assert len(json.dumps(cards["models"], ensure_ascii=False)) < 44_000


def test_a_large_table_is_cut_to_what_a_page_carries_and_a_small_one_is_not() -> None:
    big = small_table(steps=(0, 1, 2, 4, 8, 16, 64), layers=4)
    small = small_table(models=("decoder",), steps=(0, 8), layers=2)
    cut, whole = (page_table(Query(t), most=PAGE_ROWS) for t in (big, small))
    assert cut["rows"] <= PAGE_ROWS < cut["total"] == len(big)
    assert "controls" in cut["gone"]
    assert whole["rows"] == whole["total"] == len(small)
    assert not whole["gone"]


def test_many_seeds_are_carried_but_not_all_shown_at_first(tmp_path: Path) -> None:
    table = small_table(seeds=(0, 1, 2), layers=1, steps=(0, 64), without=("fit=frozen",))
    page = page_for(tmp_path, table)
    pressed = {a["data-line"]: a["aria-pressed"] for t, a in page.elements if t == "button" and "aria-pressed" in a}
    assert list(pressed.values()).count("true") == 2  # the first seed of each model
    assert len(pressed) == 6
    assert "decoder · seed 2" in page.text
    assert (tmp_path / "report.html").stat().st_size < 3_000_000


def test_step_zero_stands_apart_on_a_logarithmic_axis() -> None:
    time = Time.of([0, 1, 10, 100, 1000])
    places = [time.place(step) for step in (0, 1, 10, 100, 1000)]
    assert places == sorted(places)
    assert places[1:] == pytest.approx([0, 1, 2, 3])
    assert time.ticks()[1] == ["0", "1", "10", "100", "1k"]
    late = Time.of([500, 143_000])
    assert "0" not in late.ticks()[1]
    assert Time.of([64]).ticks()[1] == ["64"]


def test_a_long_log_is_averaged_and_a_short_one_is_kept() -> None:
    line = [StepMean(step, float(step % 7)) for step in range(5000)]
    time = Time.of(range(5000))
    short = logged_series(line, time, 240, label="loss")
    assert len(short.x) <= 241
    assert list(short.x) == sorted(short.x)
    assert short.y[-1] == pytest.approx(3, abs=1)  # a mean over many steps
    assert logged_series(line[:100], time, 240, label="loss").y == [dot.value for dot in line[:100]]


def test_sentences_say_no_more_than_the_intervals() -> None:
    def sentences(table: Table) -> dict[str, str]:
        found = Gradients(TrainingRows([RunView(table)]), Catalogue({}))
        return {f.topic: " ".join(f.texts) for f in find_training(found)}

    told = sentences(small_table(frequency=0.5))
    assert re.search(r"decoder: the proxy of rank 16 holds .* after block 2 at step 0, .* at step 64", told["Energy"])
    assert "chance is 0.0625" in told["Energy"]
    assert "cannot tell apart" not in told["Frequency"]
    flat = sentences(small_table(frequency=0.0))
    assert "cannot tell apart" in flat["Frequency"]
    assert "One seed" in flat["Caution"]


def test_a_table_without_steps_keeps_the_profile_page(tmp_path: Path) -> None:
    profile = page_of(write_report(tmp_path / "a", [profile_view([ENCODER], rich=False)]))
    assert {"profiles", "spectra", "heat"} <= ids(profile)
    assert "energy" not in ids(profile)
    training = page_for(tmp_path / "b", small_table(models=("decoder",), layers=2, only=("average_cosine",)))
    assert "profiles" not in ids(training)
    assert "shape" in ids(training)


def test_every_figure_has_its_files_and_a_link(study: Path) -> None:
    names = {p.name for p in (study.parent / "figures").iterdir()}
    stems = {"energy-over-training", "enrichment-map-decoder", "enrichment-map-encoder", "frequency-strata"}
    stems |= {"hero", "profiles-svd_ratio", "steps-by-layers-svd_ratio"}
    assert names == {f"{stem}{suffix}" for stem in stems for suffix in (".pdf", ".svg")}
    links = [a["href"] for t, a in page_of(study).elements if t == "a" and "figures/" in (a.get("href") or "")]
    assert {f"figures/{stem}.pdf" for stem in stems} == set(links)


@pytest.mark.slow
@pytest.mark.usefixtures("vector_figures")
def test_figures_are_vectors_and_the_same_every_time(study: Path, table: Table, tmp_path: Path) -> None:
    view = RunView(table, table.about, path="runs/study", verdicts=VERDICTS, concepts=[concept(), concept(0)])
    one, two = (write_report(tmp_path / name, [view]) for name in ("one", "two"))
    assert one.read_text() == two.read_text() == study.read_text()
    for path in (one.parent / "figures").iterdir():
        assert path.read_bytes() == (two.parent / "figures" / path.name).read_bytes()


def test_a_study_folder_is_read_with_verdicts_and_the_concepts_of_its_arms(tmp_path: Path, table: Table) -> None:
    folder = RunFolder(tmp_path)
    folder.write_about(table.about | {"status": "complete", "models": [{"name": "decoder", "key": "decoder"}]})
    folder.write_table(table)
    assert run_view(folder).verdicts == []  # and no arrays: nothing fails
    (tmp_path / "verdicts.json").write_text(json.dumps(VERDICTS))
    for arm in ("decoder", "encoder"):
        (tmp_path / "arms" / arm).mkdir(parents=True)
        (tmp_path / "arms" / arm / "concepts.json").write_text(json.dumps([concept(model=arm)]))
    view = run_view(folder)
    assert [v["status"] for v in view.verdicts] == ["holds", "undecided", "fails"]
    assert [c["arm"] for c in view.concepts] == ["decoder", "encoder"]
    (tmp_path / "concepts.json").write_text(json.dumps([concept()]))
    assert len(run_view(folder).concepts) == 1  # a run's own come first
    (tmp_path / "verdicts.json").write_text("{")
    with pytest.raises(AnisoscopeError, match=r"verdicts\.json.*not readable JSON"):
        run_view(folder)


def test_other_coordinates_stand_beside_what_was_found_and_are_not_missed_in_older_tables(
    table: Table, page: Page, tmp_path: Path
) -> None:
    more: list[dict[str, Any]] = []
    for row in table.where(metric="gradient_enrichment", variant=REFIT, group="").records():
        more.append({**row, "variant": f"coordinates=standardised;{REFIT}", "value": 7.25, "low": 7.0, "high": 7.5})
        more.append({**row, "metric": "gradient_alignment", "variant": "", "value": 1.75})
        more.append({**row, "metric": "gradient_alignment", "variant": "coordinates=standardised", "value": 2.5})
    whole = Table.concat([table, Table.from_records(more)], table.about)
    found = page_for(tmp_path, whole)
    assert "In other coordinates" in found.text and "In other coordinates" not in page.text
    assert "times in standardised coordinates" in found.text
    assert "Alignment, standardised" in found.text and "Alignment, as it is" in found.text
