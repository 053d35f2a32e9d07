"""Pages of docs/results say what the tables there hold, and verdicts come out of them again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anisoscope.errors import AnisoscopeError
from anisoscope.results.query import Query, Table

ROOT = Path(__file__).parents[2]
RESULTS = sorted(path.parent for path in (ROOT / "docs" / "results").glob("*/run.json"))
QUICK = {"untrained", "curvature"}
EACH = [pytest.param(path, id=path.name, marks=() if path.name in QUICK else pytest.mark.slow) for path in RESULTS]
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
LARGEST = 40e6  # bytes of the tracked tree


# -- what is committed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", RESULTS, ids=lambda path: path.name)
def test_a_readme_is_what_table_verdicts_and_record_say(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from result_pages.readme import readme
    from result_pages.result import Result

    written = (folder / "README.md").read_text(encoding="utf-8")
    assert written == readme(Result(folder)), "write it again with `make results`"
    assert not capsys.readouterr().err, "words of limits.md or finding.md ask for what the table has not"


@pytest.mark.parametrize("folder", EACH)
def test_verdicts_come_out_of_the_table_again(folder: Path) -> None:
    from result_pages.judging import is_robust
    from result_pages.result import Result, judged, verdict_text

    result = Result(folder)
    now = json.loads(verdict_text(judged(result, robust=is_robust(result))))
    kept, again = (
        [(v["claim"], v["subject"], v["scope"], v["status"]) for v in each] for each in (result.verdicts, now)
    )
    assert again == kept, "write them again with `make results`"
    pairs = [(one[key], two[key]) for one, two in zip(result.verdicts, now, strict=True) for key in ("effect", "low")]
    np.testing.assert_allclose(*np.array(pairs, dtype=float).T, rtol=1e-6, atol=1e-9)


def test_the_summary_and_the_front_page_are_what_the_results_say(capsys: pytest.CaptureFixture[str]) -> None:
    from result_pages.front_page import front_page
    from result_pages.result import all_results
    from result_pages.summary import summary

    written = (ROOT / "docs" / "results" / "README.md").read_text(encoding="utf-8")
    assert written == summary(all_results(ROOT / "docs")), "write it again with `make results`"
    assert not capsys.readouterr().err, "a sentence asks for what the tables have not"
    first = (ROOT / "README.md").read_text(encoding="utf-8")
    assert first == front_page(first), "write it again with `make results`"


@pytest.mark.parametrize("page", [path / "README.md" for path in RESULTS] + [ROOT / "docs" / "results" / "README.md"],
                         ids=lambda page: page.parent.name)  # fmt: skip
def test_links_of_results_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), f"{page.parent.name} links to {target}"


def test_words_of_people_hold_no_number() -> None:
    from result_pages.placeholders import refuse_numbers

    for path in (ROOT / "docs" / "results").glob("*/*.md"):
        if path.name in ("limits.md", "finding.md"):
            refuse_numbers(path.read_text(encoding="utf-8"))


def test_results_leave_room_in_the_tree() -> None:
    tracked = [p for p in (ROOT / "docs" / "results").rglob("*") if p.is_file()]
    assert sum(path.stat().st_size for path in tracked) < LARGEST - 11.2e6, "thin them: tools/results.py thin"


# -- how they are made -------------------------------------------------------------------------------------------------


def planted(folder: Path, rows: list[dict[str, Any]], verdicts: Any = ()) -> Any:
    """A result with these rows."""
    from result_pages.result import Result

    folder.mkdir(exist_ok=True)
    about = {"command": ["anisoscope", "x"], "status": "complete", "data": {"name": "text", "vocab_size": 8192}}
    (folder / "run.json").write_text(json.dumps(about), encoding="utf-8")
    (folder / "verdicts.json").write_text(json.dumps(list(verdicts)), encoding="utf-8")
    Table.from_records(rows).write(folder / "table.parquet")
    return Result(folder)


def row(value: float, **fields: Any) -> dict[str, Any]:
    place = {
        "model": "m",
        "stack": "single",
        "layer": 1,
        "kind": "resid",
        "group": "",
        "metric": "drift",
        "variant": "",
    }
    return {**place, "seed": 0, "step": 0, "value": value, **fields}


def test_options_that_are_not_named_are_not_chosen() -> None:
    from result_pages.chosen_rows import chosen

    rows = Query(Table.from_records([row(1.0, variant="proxy=pca"), row(2.0, variant="control=next;proxy=pca")]))
    assert [r.value for r in chosen(rows, {"proxy": "pca"})] == [1.0]
    assert [r.value for r in chosen(rows, {"proxy": "pca", "control": "next"})] == [2.0]
    assert [r.value for r in chosen(rows, {"proxy": "pca", "control": ...})] == [2.0]


def test_sites_are_those_of_each_model() -> None:
    from result_pages.chosen_rows import chosen

    rows = [row(float(layer), model=name, layer=layer) for name, blocks in (("a", 12), ("b", 6), ("c", 1))
            for layer in range(1, blocks + 1)]  # fmt: skip
    query = Query(Table.from_records(rows))
    places = {site: [r.layer for r in chosen(query, {"site": site})] for site in ("first block", "middle block")}
    assert places == {"first block": [1, 1, 1], "middle block": [6, 3, 1]}
    assert [r.layer for r in chosen(query, {"site": "last block"})] == [12, 6, 1]


def test_a_cell_over_three_seeds_has_students_interval_and_over_two_none() -> None:
    from result_pages.chosen_rows import cell

    three = cell(Query(Table.from_records([row(v, seed=s) for s, v in enumerate((1.0, 2.0, 3.0))])))
    two = cell(Query(Table.from_records([row(v, seed=s) for s, v in enumerate((1.0, 2.0))])))
    assert three is not None and two is not None
    assert three.value == 2.0 and three.high - three.value == pytest.approx(4.30265 / 3**0.5, rel=1e-4)
    assert two.value == 1.5 and not np.isfinite(two.low)


def test_a_key_table_leaves_out_what_the_table_has_not() -> None:
    from result_pages.key_table import KeyTable, markdown

    rows = Query(Table.from_records([row(1.5, step=step) for step in (0, 8)]))
    declared = KeyTable("T", {"metric": "drift"}, "step", {"here": {}, "not here": {"proxy": "pca"}})
    lines = markdown(declared, rows)
    assert "| m | here | 1.50 | 1.50 |" in lines and not any("not here" in line for line in lines)
    assert markdown(KeyTable("T", {"metric": "two_nn"}, "step"), rows) == []


def test_placeholders_are_looked_up_and_numbers_by_hand_refused(tmp_path: Path) -> None:
    from result_pages.placeholders import NotInTable, filled_in

    verdict = {"claim": "c", "subject": "m", "status": "holds", "effect": 0.5, "low": 0.4, "high": 0.6, "details": {}}
    result = planted(tmp_path / "r", [row(1.0), row(4.0, step=8), row(2.0, step=16)], [verdict])
    words = "{{metric=drift step=last | 2}}, {{metric=drift | peak}} at {{metric=drift | peak step}}; "
    words += "{{run data.vocab_size}}"
    assert filled_in(words, result) == "2.0, 4.00 at 8; 8,192"
    assert (
        filled_in("{{verdict claim=c subject=m}} {{effect claim=c subject=m}}", result) == "holds 0.500 [0.400, 0.600]"
    )
    assert filled_in("{{r metric=drift step=first | 1}}", {"r": result}) == "1"
    for text in ("the loss is 2.95", "a fall of 3 %"):
        with pytest.raises(AnisoscopeError, match="written by hand"):
            filled_in(text, result)
    with pytest.raises(NotInTable):
        filled_in("{{metric=two_nn}}", result)


def test_an_item_that_asks_for_what_is_absent_is_left_out_with_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from result_pages.readme import readme

    result = planted(tmp_path / "r", [row(1.0)])
    (result.folder / "limits.md").write_text(
        "- It is {{metric=drift | 1}}.\n- Or {{metric=two_nn}}.\n", encoding="utf-8"
    )
    text = readme(result)
    assert "- It is 1." in text and "- Or" not in text
    assert "left out of r/README.md" in capsys.readouterr().err


def test_data_of_one_name_that_models_read_differently_are_told_apart(tmp_path: Path) -> None:
    from result_pages.readme import _data
    from result_pages.result import Result

    sets = {"a": ("x", 3), "b": ("y", 5), "c": ("x", 3)}
    models = [{"name": name, "seed": seed, "data": {"name": "text", "fingerprint": mark, "contexts": count}}
              for name, (mark, count) in sets.items() for seed in (0, 1)]  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps({"data": "text.jsonl", "models": models}), encoding="utf-8")
    told = "\n".join(_data(Result(tmp_path)))
    assert "Data: text (fingerprint `x`), read by a and c: 3 contexts." in told
    assert "Data: text (fingerprint `y`), read by b: 5 contexts." in told
    (tmp_path / "run.json").write_text(json.dumps({"models": [models[0]]}), encoding="utf-8")
    assert _data(Result(tmp_path))[0] == "Data: text (fingerprint `x`): 3 contexts."


# -- thinning ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def thin_me(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the smallest result with rows that nothing reads."""
    import shutil

    folder = tmp_path_factory.mktemp("thin") / "untrained"
    shutil.copytree(ROOT / "docs" / "results" / "untrained", folder)
    (folder / "arms").mkdir()
    table, unread = Table.read(folder / "table.parquet"), {"model": "bert", "step": None, "metric": "two_nn"}
    beside = Table.from_records([row(1.0 + i, **unread, replicates=[1.0, 2.0]) for i in range(50)])
    beside = Table.concat([beside, Table.from_records([row(float("nan"), **unread, note="why")])])
    Table.concat([table, beside]).write(folder / "table.parquet")
    return folder


@pytest.mark.slow
def test_thinning_drops_what_nothing_reads_and_keeps_verdicts(thin_me: Path) -> None:
    from result_pages.thinning import thin

    before = json.loads((thin_me / "verdicts.json").read_text(encoding="utf-8"))
    thin(thin_me)
    after = json.loads((thin_me / "verdicts.json").read_text(encoding="utf-8"))
    table = Table.read(thin_me / "table.parquet")
    assert [v["status"] for v in after] == [v["status"] for v in before]
    left = table.where(metric="two_nn")
    assert [r.note for r in left] == ["why"], "a row without a number says what failed"
    assert not (thin_me / "arms").exists() and not list((thin_me / "figures").glob("*.svg"))
    assert "rows that verdicts, tables and figures read" in (thin_me / "run.json").read_text(encoding="utf-8")


def test_reading_notes_rows_and_folds_also_in_tables_made_of_the_first() -> None:
    from result_pages.reading import numbered, reading

    table = numbered(Table.from_records([row(float(i), layer=i, replicates=[1.0, 2.0]) for i in range(6)]))
    with reading(len(table)) as seen:
        later = Query(table).where(layer=[3, 4, 5]).table()
        assert [r.value for r in Query(later).where(layer=4)] == [4.0]
        assert next(iter(Query(later).where(layer=5))).folds == (1.0, 2.0)
        assert Query(table).where(layer=[0, 1]).numbers().tolist() == [0.0, 1.0]
        assert Query(table).csv(["value"]).startswith("value"), "a download is no reading"
    assert np.flatnonzero(seen.rows).tolist() == [0, 1, 4, 5] and np.flatnonzero(seen.folds).tolist() == [5]


def test_thinning_refuses_another_verdict() -> None:
    from result_pages.thinning import _check_same

    one = {"claim": "c", "subject": "m", "scope": "for this model", "status": "holds"}
    _check_same([one], [dict(one)])
    with pytest.raises(AnisoscopeError, match="nothing was written"):
        _check_same([one], [{**one, "status": "undecided"}])
    told = {**one, "effect": 0.919, "low": 0.869, "high": 0.969}
    _check_same([told], [{**told, "effect": 0.9189, "low": 0.868}])
    with pytest.raises(AnisoscopeError, match="more digits"):
        _check_same([told], [{**told, "effect": 0.892}])


def test_rounded_numbers_are_within_seven_digits(tmp_path: Path) -> None:
    from result_pages.reading import Reading
    from result_pages.thinning import thinned, write_small

    values = np.random.default_rng(0).lognormal(size=64)
    table = Table.from_records([row(float(v), low=v - 0.1, high=v + 0.1, replicates=[v, 2 * v]) for v in values])
    seen = Reading(len(table))
    seen.rows[:], seen.folds[:8] = True, True
    write_small(thinned(table, seen), tmp_path / "table.parquet")
    again = Table.read(tmp_path / "table.parquet")
    np.testing.assert_allclose(again["value"], values, rtol=6e-8)
    folds = again.arrow["replicates"].to_pylist()
    assert all(folds[:8]) and not any(folds[8:])


# -- joining: test_joining.py ------------------------------------------------------------------------------------------


def test_a_model_that_was_measured_twice_has_the_rows_of_the_first_run_and_what_the_second_adds() -> None:
    from result_pages.joining import without_repeats

    rows = [row(1.0), row(2.0, metric="two_nn"), row(9.0), row(3.0, model="other")]
    assert without_repeats(Table.from_records(rows).arrow)["value"].to_pylist() == [1.0, 2.0, 3.0]


def test_runs_of_one_study_are_joined_as_that_study_with_the_options_they_share() -> None:
    from result_pages.joining import Part, record_of

    def of(about: dict[str, Any]) -> Part:
        return Part(about["config"]["data"], Table.from_records([row(1.0)]).arrow, about)

    one, two = ({"study": "performance", "kind": "study", "config": {"context": 64, "data": d}, "command": [d],
                 "status": "complete"} for d in ("a", "b"))  # fmt: skip
    record = record_of([of(one), of(two)])
    assert record["study"] == "performance" and record["config"] == {"context": 64}
    assert record["commands"] == [["a"], ["b"]]
    assert "study" not in record_of([of(one), of({**two, "study": "shape"})])


def test_verdicts_of_the_performance_study_are_made_again_model_by_model(tmp_path: Path) -> None:
    from result_pages.result import Result, judged

    variants = {"probe_selectivity": "repair=raw;task=t", "probe_accuracy": "against=raw;repair=whitened;task=t"}
    rows = [row(0.1, model=model, metric=metric, variant=variant, step=None, replicates=[0.1] * 8)
            for model in ("a", "b") for metric, variant in variants.items()]  # fmt: skip
    result = planted(tmp_path / "r", rows)
    about = json.loads((result.folder / "run.json").read_text(encoding="utf-8"))
    (result.folder / "run.json").write_text(json.dumps({**about, "study": "performance"}), encoding="utf-8")
    found = [(v["claim"], v["subject"], v["status"]) for v in judged(Result(result.folder))]
    assert found == [("whitened_improves_probe", name, "holds") for name in ("a", "b")]
