"""The Python of docs/table.md runs as it stands, on a run like those that it speaks of."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from anisoscope.results.folder import RunFolder
from anisoscope.results.query import Table

PAGE = Path(__file__).parents[2] / "docs" / "table.md"
VARIANTS = [f"fit=refit;proxy={proxy};rank=16" for proxy in ("pca", "semi_nmf")]


def run_of(path: Path) -> None:
    """A training that was stopped after two measured steps."""
    folder = RunFolder(path)
    folder.write_about({"kind": "training", "status": "running", "config": {"steps": 400}, "models": [{"name": "m"}]})
    (path / "log.jsonl").write_text('{"step": 0, "loss": 5.5}\n')
    for step in (0, 100):
        place: dict[str, Any] = {"model": "m", "stack": "single", "group": "", "step": step}
        rows = [
            {**place, "layer": n, "kind": "resid", "metric": metric, "variant": variant, "value": 1.0 + n + step}
            for n in (1, 2)
            for metric, variant in [("average_cosine", ""), ("average_cosine", "first=out")]
            + [("gradient_enrichment", variant) for variant in VARIANTS]
        ]
        folder.write_part(f"step-{step:09d}", Table.from_records(rows))


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    run_of(tmp_path / "runs" / "mine")
    names: dict[str, Any] = {}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    run = [block for block in blocks if '"gpt2"' not in block]
    assert len(run) >= 6 and len(run) == len(blocks) - 1
    for block in run:
        exec(compile(block, PAGE.name, "exec"), names)
    assert names["state"].state == "stopped" and len(names["energies"]) == 4 and not names["later"].whole
    assert names["frame"]["rank"].tolist() == [16] * 4 and names["axes"].get_lines()
