"""docs/scaling.md: what is written between its markers, and its figure."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    for name in ("record", "scaling_page"):
        sys.modules.pop(name, None)


def results() -> dict[str, Any]:
    row = {"command": "profile x", "predicted s": 9.0, "measured s": 10.0, "ratio": 0.9}
    table = {"title": "profile, predicted and measured", "columns": list(row), "rows": [row]}
    checks = [{"what": "profile off by", "value": 0.1, "bar": "≤ 0.3", "met": True}]
    line = {"axis": "tokens", "fixed": "2 layers", "at": [1.0, 2.0, 4.0], "seconds": [1.0, 2.0, 4.0], "exponent": 1.0}
    grown = {"title": "Exponents", "columns": ["axis", "exponent"], "rows": [{"axis": "tokens", "exponent": 1.0}]}
    return {"Scaling": {"tables": [table], "checks": checks}, "Growth of runs": {"tables": [grown], "series": [line]}}


def test_tables_and_figure_are_written_and_the_prose_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import scaling_page

    monkeypatch.setattr(scaling_page, "examples", lambda: "an example")
    marks = "\n\nbetween\n\n".join(f"{begin}\nold\n{end}" for begin, end in scaling_page.MARKS.values())
    (tmp_path / "figures").mkdir()
    (tmp_path / "scaling.md").write_text(f"# Title\n\n{marks}\n\nend\n")
    for _ in range(2):  # a second time changes nothing
        scaling_page.write_page(results(), tmp_path)
        page = (tmp_path / "scaling.md").read_text()
        assert page.count("`profile x`") == 1 and "an example" in page and "old" not in page
        assert page.startswith("# Title") and page.endswith("end\n") and page.count("between") == 2
    assert (tmp_path / scaling_page.FIGURE).stat().st_size > 1000


def test_the_page_has_every_marker() -> None:
    import scaling_page

    page = (scaling_page.DOCS / "scaling.md").read_text()
    assert all(page.count(mark) == 1 for pair in scaling_page.MARKS.values() for mark in pair)
