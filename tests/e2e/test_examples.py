"""The examples run as they stand, and show what they say."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {"monitor_mlp_digits": "sklearn", "monitor_resnet": "sklearn", "monitor_diffusion": "sklearn"}
NEEDS["finetune_lora"] = "peft"


def _run(name: str) -> dict[str, Any]:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    return runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["monitor_mlp_digits", "monitor_resnet", "monitor_own_gpt", "monitor_diffusion"])
def test_an_example_from_scratch_begins_at_chance_and_ends_above(name: str) -> None:
    table = _run(name)["monitor"].table
    found = table.where(metric="gradient_enrichment", proxy="semi_nmf", fit="refit", control=None, average=None)
    by_step: dict[int, list[float]] = {}
    for row in found.where(group="").records():
        assert math.isfinite(row["value"]) and row["contexts"] >= 16
        by_step.setdefault(row["step"], []).append(row["value"])
    start, end = (sum(values) / len(values) for values in (by_step[min(by_step)], by_step[max(by_step)]))
    assert start < 1.5 < end, "at initialisation gradients and activations are unrelated"


@pytest.mark.slow
def test_the_example_of_lora_begins_above_chance_and_names_what_is_frozen() -> None:
    monitor = _run("finetune_lora")["monitor"]
    found = monitor.table.where(metric="gradient_enrichment", proxy="pca", fit="refit", control=None, average=None)
    assert all(row["value"] > 1.5 for row in found.where(group="", step=0, kind="resid").records())
    told = "no gradient reaches 0.embed: what lies before is frozen, or the loss does not depend on it"
    assert monitor.notes == [told]


@pytest.mark.slow
def test_the_example_of_any_loop_tells_of_its_steps(capsys: pytest.CaptureFixture[str]) -> None:
    _run("monitor_any_loop")
    assert len(capsys.readouterr().out.splitlines()) > 2
