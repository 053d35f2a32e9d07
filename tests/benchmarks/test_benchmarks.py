"""The benchmark suite runs, keeps what it was not asked to measure again, and its pages follow from the results."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def _path() -> Iterator[None]:
    """The scripts import each other as they do when they run."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield
    sys.path.remove(str(ROOT / "benchmarks"))


def entry(**more: Any) -> dict[str, Any]:
    """A made-up entry of results.json, in the form that the suite writes."""
    rows = [
        {"tool": "anisoscope.two_nn", "seconds": 2.0, "× ours": 1.0, "peak MB": 100.0, "relative error": 1e-9},
        {"tool": "slow", "seconds": 20.0, "× ours": 10.0, "peak MB": 900.0, "relative error": None},
        {"tool": "gone – not installed: no module"},
    ]
    table = {"title": "20 × 3", "columns": list(rows[0]), "rows": rows}
    checks = [
        {"what": "quicker", "value": 10.0, "bar": "≥ 8", "met": True},
        {"what": "small", "value": 5.0, "bar": "≤ 1", "met": False},
        {"what": "absent", "value": None, "bar": "≥ 1", "met": None},
    ]
    found = {"about": "words", "command": "python x", "tables": [table], "checks": checks, "series": []}
    return found | {"machine": {"cores": 2}, "limits": {"float32": 50.0}, "threads": 2, "versions": {"p": "1"}} | more


def growth() -> dict[str, Any]:
    """Made-up curves of two tools against both sizes."""
    lines = [
        {"job": "two_nn", "tool": tool, "axis": axis, "fixed": "x = 3", "at": [1.0, 2.0, 4.0],
         "seconds": [s, 2 * s, 4 * s], "exponent": 1.0}
        for axis in ("n", "d") for tool, s in (("slow", 2.0), ("anisoscope.two_nn", 1.0))
    ]  # fmt: skip
    return entry(series=lines)


def test_the_ways_of_a_job_give_the_same() -> None:
    import torch
    from jobs.moments import WAYS

    found = [
        float(way.function(torch.randn(64, 8, generator=torch.Generator().manual_seed(0)))["trace"])
        for way in WAYS.values()
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-9)


@pytest.mark.slow
def test_a_job_runs_at_a_tiny_size_and_is_as_exact_as_it_says(tmp_path: Path, capsys: Any) -> None:
    from run import main

    old = {"Old job": {"about": "a", "command": "c", "figures": {"x": 1.5}, "bars": {"x": "under 2"}, "machine": {}}}
    (tmp_path / "results.json").write_text(json.dumps(old))
    words = ["moments", "--scale", "0.0001", "--threads", "1", "--no-peers", "--out", str(tmp_path)]
    assert main(words) == 0, capsys.readouterr().out
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["Old job"] == old["Old job"]  # what was not run again is kept
    found = results["Moments"]
    assert found["machine"]["torch"] and found["limits"]["float64"] > 0 and "run.py moments" in found["command"]
    ours = found["tables"][0]["rows"][0]
    assert ours["tool"] == "anisoscope Moments" and ours["seconds"] > 0
    assert ours["relative error"] < 1e-9
    page = (tmp_path / "RESULTS.md").read_text()
    assert "## Moments" in page and "## Old job" in page and "under 2" in page


def test_a_failing_job_is_told_and_ends_with_an_error(tmp_path: Path, capsys: Any) -> None:
    from run import main

    assert main(["no_such_job", "--scale", "0.0001", "--out", str(tmp_path)]) == 1
    assert "failed: no_such_job" in capsys.readouterr().out


def test_every_job_that_is_named_is_there() -> None:
    import importlib

    from jobs import CPU, CUDA

    for name in {*CPU, *CUDA}:
        assert callable(importlib.import_module(f"jobs.{name}").run)


def test_merging_takes_the_entries_of_another_machine(tmp_path: Path) -> None:
    from run import main

    (tmp_path / "other.json").write_text(json.dumps({"A, GPU": entry(), "B": entry(about="new")}))
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "results.json").write_text(json.dumps({"B": entry(about="old"), "C": entry()}))
    assert main(["--merge", str(tmp_path / "other.json"), "--out", str(tmp_path / "here")]) == 0
    results = json.loads((tmp_path / "here" / "results.json").read_text())
    assert sorted(results) == ["A, GPU", "B", "C"] and results["B"]["about"] == "new"


def test_the_results_page_says_what_was_met_missed_and_absent() -> None:
    from record import page

    text = page({"Job": entry()})
    assert "| quicker | 10 | ≥ 8 | met |" in text
    assert "| small | 5 | ≤ 1 | **missed** |" in text
    assert "| absent | not measured | ≥ 1 |  |" in text
    assert "gone – not installed: no module" in text and "float32 50 GFLOP/s" in text


def test_the_performance_page_changes_only_between_its_markers(tmp_path: Path) -> None:
    from performance_page import BEGIN, END, write_page

    page = tmp_path / "performance.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    results = {"Job": entry(), "Growth": growth()}
    write_page(results, tmp_path)
    first = page.read_text()
    assert first.startswith("before\n") and first.endswith("after\n") and "old" not in first
    assert "slow 10×" in first and "**missed**" in first and "absent" not in first
    for axis in ("n", "d"):
        drawing = (tmp_path / "figures" / f"cost_against_{axis}.svg").read_text()
        assert drawing.lstrip().startswith("<?xml") and "<path" in drawing
    write_page(results, tmp_path)
    assert page.read_text() == first


def test_pages_say_what_was_recorded_last() -> None:
    """A script that records figures of its own leaves the page of the documentation to `performance_page.py`."""
    from performance_page import BEGIN, DOCS, END, with_summary
    from record import HERE, load, page

    results = load(HERE / "results.json")
    text = (DOCS / "performance.md").read_text(encoding="utf-8")
    assert text.count(BEGIN) == 1 and text.count(END) == 1 and text.index(BEGIN) < text.index(END)
    assert with_summary(text, results) == text
    assert page(results) == (HERE / "RESULTS.md").read_text(encoding="utf-8")


def test_clouds_are_the_same_again_and_have_the_spectrum_and_mean_that_they_say() -> None:
    import torch
    from sources import cloud

    x = cloud(20_000, 16, seed=3, mean=7.0)
    assert torch.equal(x, cloud(20_000, 16, seed=3, mean=7.0)) and x.dtype == torch.float32
    assert float(x.mean(0).norm()) == pytest.approx(7.0, abs=0.1)
    values = torch.linalg.eigvalsh(torch.cov(x.T.double())).flip(0)
    assert torch.allclose(values, 1.0 / torch.arange(1, 17).double(), rtol=0.06)


def test_the_neighbour_twin_is_brute_force_and_its_slope_the_published_one() -> None:
    import torch
    from jobs.two_nn import slope, twin
    from sources import cloud

    import anisoscope

    x = cloud(300, 12, mean=3000.0)
    gaps = torch.linalg.vector_norm(x.double().unsqueeze(1) - x.double(), dim=2).fill_diagonal_(torch.inf)
    found = twin(x)
    assert torch.allclose(found["distances"], gaps.sort(dim=1).values[:, :2], rtol=1e-12)
    assert slope(found["distances"].numpy()) == pytest.approx(anisoscope.two_nn(x).value, rel=1e-9)


def test_exponents_are_those_of_the_law() -> None:
    from jobs.growth import exponent

    sizes = np.array([1.0, 10.0, 20.0, 40.0])
    assert exponent(list(sizes), list(3 * sizes**2)) == pytest.approx(2.0)
    assert exponent(list(sizes), [100.0, 1.0, 2.0, 4.0]) == pytest.approx(1.0)  # small sizes are start-up, not growth
