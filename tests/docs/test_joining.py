"""How `tools/results.py join` makes one result of several runs, and puts models of another beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anisoscope.results.folder import RunFolder
from anisoscope.results.query import Table

joining = pytest.importorskip("result_pages.joining")
PLACE = {"stack": "single", "layer": 1, "kind": "resid", "group": "", "variant": "", "data": "x", "head": None}


def run(
    path: Path, values: dict[str, dict[str, float]], *, data: str = "a", seeds: tuple[int, ...] = (0,), **about: Any
) -> Any:
    """A run folder: values by model and metric, the same for each seed."""
    rows = [
        {**PLACE, "model": model, "metric": metric, "value": value, "seed": seed, "step": None}
        for model, metrics in values.items()
        for metric, value in metrics.items()
        for seed in seeds
    ]
    entries = [
        {"name": model, "seed": seed if len(seeds) > 1 else None, "data": {"name": "text", "fingerprint": data}}
        for model in values
        for seed in seeds
    ]
    folder = RunFolder(path)
    path.mkdir(parents=True)
    folder.write_table(Table.from_records(rows))
    said = {"command": ["anisoscope", "profile", path.name], "status": "complete", "started": "2026-11-18T12:00:00"}
    folder.write_about({**said, "wall_seconds": 2.0, "kind": "profile", "models": entries, **about})
    return joining.Part.of(folder)


def values(parts: list[Any]) -> dict[tuple[str, str], list[float]]:
    found: dict[tuple[str, str], list[float]] = {}
    for row in Table(joining.rows_of(parts)).records():
        found.setdefault((row["model"], row["metric"]), []).append(row["value"])
    return found


def test_the_first_run_that_has_a_number_counts_and_later_ones_add(tmp_path: Path) -> None:
    now = run(tmp_path / "now", {"one": {"drift": 3.0}})
    before = run(tmp_path / "before", {"one": {"drift": 1.0, "two_nn": 9.0}, "other": {"drift": 5.0}})
    assert values([now, before]) == {("one", "drift"): [3.0], ("one", "two_nn"): [9.0], ("other", "drift"): [5.0]}
    assert values([before, now])["one", "drift"] == [1.0], "the order decides"


def test_rows_on_different_data_are_never_mixed(tmp_path: Path) -> None:
    now = run(tmp_path / "now", {"one": {"drift": 3.0}}, data="b")
    before = run(tmp_path / "before", {"one": {"drift": 1.0, "two_nn": 9.0}, "other": {"drift": 5.0}})
    assert values([now, before]) == {("one", "drift"): [3.0], ("other", "drift"): [5.0]}
    entries = joining.record_of([now, before])["models"]
    assert [(entry["name"], entry["data"]["fingerprint"]) for entry in entries] == [("one", "b"), ("other", "a")]


def test_the_record_has_every_seed_and_every_run_and_each_command_once(tmp_path: Path) -> None:
    study = run(
        tmp_path / "study", {"arm": {"drift": 1.0}}, seeds=(0, 1, 2), study="inherent", config={"preset": "small"}
    )
    more = run(
        tmp_path / "more",
        {"m": {"drift": 1.0}},
        commands=[["anisoscope", "x"], [*joining.TOOL, "a", "b"]],
        runs=[{"name": "m-profile"}],
        started="2026-11-17T12:00:00",
    )
    record = joining.record_of([study], [more])
    assert [(entry["name"], entry["seed"]) for entry in record["models"]] == [
        ("arm", 0),
        ("arm", 1),
        ("arm", 2),
        ("m", None),
    ]
    assert [each["name"] for each in record["runs"]] == ["study", "m-profile"]
    assert record["commands"] == [["anisoscope", "profile", "study"], ["anisoscope", "x"]]
    assert (record["study"], record["config"]) == ("inherent", {"preset": "small"}), "models beside change neither"
    assert (record["wall_seconds"], record["started"]) == (2.0, "2026-11-18T12:00:00")
    both = joining.record_of([study, more])
    assert "study" not in both and both["config"] == {} and both["started"] == "2026-11-17T12:00:00"


def test_many_runs_of_a_folder_are_told_as_all_of_it() -> None:
    runs = [Path("runs/arms") / name for name in "abcdef"]
    assert joining.said(Path("out"), [*runs, Path("old")]) == [*joining.TOOL, "out", "runs/arms/*", "old"]
    assert joining.said(Path("out"), runs[:2]) == [*joining.TOOL, "out", "runs/arms/a", "runs/arms/b"]


def test_declared_models_of_another_result_stand_beside_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from result_pages.declared import Beside, Declared

    warnings = ["one: odd", "all of it"]
    run(
        tmp_path / "real",
        {"one": {"average_cosine": 0.5, "two_nn": 9.0}, "copy": {"average_cosine": 0.5}},
        warnings=warnings,
        skipped=[{"model": "copy", "reason": "…"}],
    )
    run(tmp_path / "study", {"arm": {"average_cosine": 0.1}}, seeds=(0, 1, 2), study="inherent")
    declared = Declared("?", "", (), (Beside("real", ("one",), ("average_cosine",)),))
    monkeypatch.setattr(joining, "COMMITTED", tmp_path)
    monkeypatch.setattr(joining, "RESULTS", {"out": declared})
    out = tmp_path / "out"
    joining.join(out, [tmp_path / "study"])
    table, about = RunFolder(out).table(), RunFolder(out).about()
    assert {(row["model"], row["metric"]) for row in table.records()} == {
        ("arm", "average_cosine"),
        ("one", "average_cosine"),
    }
    assert [(entry["name"], entry.get("result")) for entry in about["models"]] == [("arm", None)] * 3 + [
        ("one", "real")
    ]
    assert about["warnings"] == ["one: odd"] and about["skipped"] == [] and about["study"] == "inherent"
    assert about["command"][3:] == [str(out), str(tmp_path / "study")]
    (out / "limits.md").write_text("- words", encoding="utf-8")
    before = (out / "verdicts.json").read_text(encoding="utf-8")
    joining.join(out, [out])  # once more, from itself: what stands beside comes from its own result again
    assert RunFolder(out).table().arrow.num_rows == table.arrow.num_rows and (out / "limits.md").is_file()
    assert [(v["claim"], v["status"]) for v in json.loads((out / "verdicts.json").read_text(encoding="utf-8"))] == [
        (v["claim"], v["status"]) for v in json.loads(before)
    ]
    again = RunFolder(out).about()
    assert again["commands"][:-1] == about["commands"][:-1] and len(again["models"]) == 4


def test_a_model_that_is_declared_and_not_there_ends_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from anisoscope.errors import AnisoscopeError
    from result_pages.declared import Beside

    run(tmp_path / "real", {"one": {"average_cosine": 0.5}})
    monkeypatch.setattr(joining, "COMMITTED", tmp_path)
    with pytest.raises(AnisoscopeError, match="has no two, which"):
        joining.part_beside(Beside("real", ("one", "two"), ("average_cosine",)))


def test_a_real_model_has_its_name_its_source_and_that_its_weights_were_loaded(tmp_path: Path) -> None:
    real_models = pytest.importorskip("real_models")
    run(tmp_path / "arms" / "IgLM-profile", {"file": {"drift": 1.0}}, warnings=["file: odd"])
    run(tmp_path / "arms" / "IgLM-tangent", {"file": {"drift": 7.0, "gradient_energy": 0.5}})
    real_models.write_joined(tmp_path, {"IgLM-S": "out of memory"})
    about, table = RunFolder(tmp_path).about(), RunFolder(tmp_path).table()
    assert {(row["model"], row["data"], row["metric"], row["value"]) for row in table.records()} == {
        ("IgLM", "antibodies", "drift", 1.0),
        ("IgLM", "antibodies", "gradient_energy", 0.5),
    }
    (entry,) = about["models"]
    assert (entry["name"], entry["source"], entry["fingerprint"]) == ("IgLM", "iglm==0.1.0", "iglm==0.1.0")
    assert about["warnings"] == ["IgLM: odd"] and about["study"] == "real"
    assert about["skipped"] == [{"model": "IgLM-S", "reason": "out of memory"}]
    assert [each["name"] for each in about["runs"]] == ["IgLM-profile", "IgLM-tangent"]


def test_a_joined_table_is_asked_what_its_runs_were_asked(tmp_path: Path) -> None:
    """Claims that a new run was asked are not lost because the folder of before was not asked them."""
    study = run(tmp_path / "study", {"arm": {"average_cosine": 0.1, "drift": 1.0}})
    (tmp_path / "before").mkdir()
    table = Table(joining.rows_of([study]), {})
    asked = lambda *runs: {v["claim"] for v in joining.verdicts_of(table, runs)}  # noqa: E731
    assert len(asked(tmp_path / "study")) > 20, "nobody was asked anything: all claims"
    for name, claims in (("study", ["not_inherent"]), ("before", ["convolution_differs"])):
        verdicts = [{"claim": claim, "subject": "x", "status": "holds", "details": {}} for claim in claims]
        (tmp_path / name / "verdicts.json").write_text(json.dumps(verdicts), encoding="utf-8")
    assert asked(tmp_path / "study") == {"not_inherent"}
    assert asked(tmp_path / "study", tmp_path / "before") == {"not_inherent", "convolution_differs"}
