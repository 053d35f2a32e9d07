"""How `tools/real_result.py` joins runs of real models, and what it keeps of a result that is there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from anisoscope.results.folder import RunFolder
from anisoscope.results.query import Table

real_result = pytest.importorskip("real_result")


@dataclass(frozen=True)
class Model:
    """What the join asks of a model."""

    name: str
    loss: str = "next tokens"
    data: str = "articles"
    source: str = "package==1.0"
    lean: bool = False


ONE, TWO = Model("one"), Model("one-and-a-half")
PROFILE, TANGENT = {"drift": 1.0}, {"drift": 1.0, "gradient_energy": 0.5}


def run(out: Path, name: str, kind: str, values: dict[str, float], *, started: str = "2026-11-18T12:00:00") -> None:
    """A run of one command on one model."""
    folder = RunFolder(out / "arms" / f"{name}-{kind}")
    folder.path.mkdir(parents=True)
    place = {"model": "file", "stack": "single", "layer": 1, "kind": "resid", "group": "", "variant": "", "data": "x"}
    rows = [{**place, "metric": metric, "value": value, "seed": 0} for metric, value in values.items()]
    folder.write_table(Table.from_records(rows))
    about = {"command": ["anisoscope", kind], "status": "complete", "started": started, "wall_seconds": 2.0}
    folder.write_about({**about, "models": [{"name": "file", "layers": 1}], "warnings": [f"{kind} of {name}"]})


def write(parts: dict[str, Any], absent: list[dict[str, Any]], target: Path) -> None:
    """What the join writes before it thins."""
    target.mkdir(exist_ok=True)
    RunFolder(target).write_about(real_result.record_of(parts, absent))
    RunFolder(target).write_table(Table.from_records(row for part in parts.values() for row in part.rows))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A result of two models, of which the second has no gradients."""
    out = tmp_path / "before"
    run(out, "one", "profile", PROFILE)
    run(out, "one", "tangent", TANGENT)
    run(out, TWO.name, "profile", PROFILE)
    (out / "skipped.json").write_text('{"one-and-a-half": "out of memory"}')
    write(*real_result.joined(out, [ONE, TWO], {}), tmp_path / "result")
    return tmp_path / "result"


def values(part: Any) -> dict[str, float]:
    return {row["metric"]: row["value"] for row in part.rows}


def test_a_model_has_the_rows_of_its_profile_and_what_the_gradients_add(target: Path) -> None:
    found = real_result.former(target)
    assert {name: values(part) for name, part in found.items()} == {"one": TANGENT, TWO.name: PROFILE}
    assert {row["model"] for row in found["one"].rows} == {"one"} and {row["data"] for row in found["one"].rows} == {
        "articles"
    }
    assert [each["name"] for each in found["one"].runs] == ["one-profile", "one-tangent"]
    assert found[TWO.name].skipped == [{"model": TWO.name, "reason": "out of memory"}]


def test_what_was_not_run_again_stays(target: Path, tmp_path: Path) -> None:
    run(tmp_path / "now", TWO.name, "profile", {"drift": 3.0})
    run(tmp_path / "now", TWO.name, "tangent", {"gradient_energy": 0.25}, started="2026-11-19T12:00:00")
    before = real_result.former(target)
    parts, absent = real_result.joined(tmp_path / "now", [ONE, TWO], before)
    assert list(parts) == ["one", TWO.name] and parts["one"] == before["one"] and absent == []
    assert values(parts[TWO.name]) == {"drift": 3.0, "gradient_energy": 0.25}
    about = real_result.record_of(parts, absent)
    assert [each["name"] for each in about["models"]] == ["one", TWO.name] and about["skipped"] == []
    assert about["wall_seconds"] == 8.0 and about["started"] == "2026-11-18T12:00:00"
    assert about["warnings"] == [f"{name}: {kind} of {name}" for name in parts for kind in ("profile", "tangent")]


def test_a_profile_alone_does_not_replace_gradients(target: Path, tmp_path: Path) -> None:
    run(tmp_path / "now", "one", "profile", {"drift": 3.0})
    parts, _ = real_result.joined(tmp_path / "now", [ONE], real_result.former(target))
    assert values(parts["one"]) == TANGENT and list(parts) == ["one", TWO.name]
    run(tmp_path / "now", TWO.name, "profile", {"drift": 4.0})
    parts, _ = real_result.joined(tmp_path / "now", [ONE, TWO], real_result.former(target))
    assert values(parts[TWO.name]) == {"drift": 4.0} and parts[TWO.name].skipped[0]["reason"] == "not measured"


def test_a_model_without_runs_that_is_not_there_either_is_told(target: Path, tmp_path: Path) -> None:
    third, fourth = replace(ONE, name="third"), Model("fourth", loss="")
    run(tmp_path / "now", "fourth", "profile", {"drift": 4.0})
    parts, absent = real_result.joined(tmp_path / "now", [third, fourth], real_result.former(target))
    assert list(parts) == ["one", TWO.name, "fourth"] and absent == [{"model": "third", "reason": "not measured"}]
    assert real_result.record_of(parts, absent)["skipped"] == [{"model": TWO.name, "reason": "out of memory"}, *absent]
