"""The Python of the README and of the how-to pages runs as it stands, and leaves the page it promises."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from anisoscope import evaluate_claims
from anisoscope.commands.drawing import report_runs
from anisoscope.results.query import Table

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = sorted(page for page in (ROOT / "docs" / "howto").glob("*.md") if BLOCK.search(page.read_text("utf-8")))
LEFT = {
    "plain-loop": "runs/mine",
    "hf-trainer": "runs/trainer",
    "lightning": "runs/lightning",
    "checkpoints": "runs/swept",
    "accelerate": "runs/accelerate",
    "trl": "runs/dpo-monitor",
    "torchtitan": "runs/mesh",
}
NEEDS = {
    "lightning": ["lightning"],
    "accelerate": ["accelerate"],
    "trl": ["trl", "peft", "datasets"],
    "trackers": ["tensorboard"],
}


def run_blocks(text: str, folder: Path) -> None:
    """Run all Python blocks of a page as one script, in an empty folder."""
    script = folder / "page.py"
    script.write_text("\n".join(BLOCK.findall(text)), encoding="utf-8")
    done = subprocess.run([sys.executable, script.name], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_of_a_how_to_page_runs(page: Path, tmp_path: Path) -> None:
    for package in NEEDS.get(page.stem, ()):
        pytest.importorskip(package)
    run_blocks(page.read_text(encoding="utf-8"), tmp_path)
    if page.stem in LEFT:
        assert (tmp_path / LEFT[page.stem] / "table.parquet").is_file()


def readme_snippet() -> str:
    """The training loop of the README, behind the model and the data that the how-to page begins with."""
    [snippet] = [block for block in BLOCK.findall((ROOT / "README.md").read_text("utf-8")) if "monitor.step" in block]
    before, *_ = BLOCK.findall((ROOT / "docs" / "howto" / "plain-loop.md").read_text("utf-8"))
    return f"```python\n{before}```\n\n```python\n{snippet}```\n"


@pytest.mark.slow
def test_the_loop_of_the_readme_gives_a_page_of_gradients_and_geometry_and_verdicts(tmp_path: Path) -> None:
    run_blocks(readme_snippet(), tmp_path)
    run = tmp_path / "runs" / "mine"
    table = Table.read(run / "table.parquet")
    measured = set(table.to_arrow()["metric"].to_pylist())
    assert {"gradient_enrichment", "gradient_alignment", "average_cosine", "drift"} <= measured
    told = {verdict.claim: verdict for verdict in evaluate_claims(table)}
    assert math.isfinite(told["tangent_energy"].effect) and math.isfinite(told["amplified"].effect)
    page = report_runs([run]).read_text(encoding="utf-8")
    assert "GPT2LMHeadModel" in page and "gradient" in page.lower()
