"""The README's own snippet, a monitor without a probe: claims, page and figures read its training batches."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from anisoscope.claims.catalogue import evaluate_claims
from anisoscope.commands.drawing import report_runs, run_view
from anisoscope.monitor.monitor import Monitor
from anisoscope.results.folder import RunFolder
from anisoscope.results.live import by_training_batches
from anisoscope.results.query import Query, Table
from support.gradient_models import batch_of
from support.monitored import LENGTHS, PLAN, probe_of
from support.pages import figure_names
from support.tiny_models import VOCABULARY, tiny

STEPS = 16


@pytest.fixture(scope="module")
def readme(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Monitor]:
    """The run folder of the first monitored loop of README.md, run as it stands, with a tiny GPT-2 of 16 steps."""
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    snippet = next(code for code in re.findall(r"```python\n(.*?)```", text, re.S) if "Monitor(" in code)
    model = tiny("gpt2").train()
    ids = torch.randint(0, VOCABULARY, (STEPS, 32, 12), generator=torch.Generator().manual_seed(0))
    names: dict[str, Any] = {"model": model, "steps": STEPS, "loader": [{"input_ids": x, "labels": x} for x in ids]}
    names["optimizer"] = torch.optim.AdamW(model.parameters(), lr=1e-2)
    folder = tmp_path_factory.mktemp("readme")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(snippet, names)
    return folder / "runs" / "mine", names["monitor"]


def test_claims_judge_a_live_monitor(readme: tuple[Path, Monitor]) -> None:
    verdicts = {v.claim: v for v in evaluate_claims(RunFolder.open(readme[0]).table())}
    for name in ("tangent_energy", "anisotropy_share", "emerges_early_and_persists", "amplified", "semi_nmf_beats_pca"):
        assert "has no gradient" not in verdicts[name].why, name
        assert verdicts[name].effect == verdicts[name].effect, f"{name} has no effect"
        assert "constant_loss" in verdicts[name].why, "whether it learned is not known, and it says so"


def test_the_page_of_a_live_monitor_has_the_gradient_figures(readme: tuple[Path, Monitor]) -> None:
    with figure_names():
        page = report_runs([readme[0]]).read_text(encoding="utf-8")
    drawn = {path.stem for path in (readme[0] / "figures").glob("*.svg")}
    assert {"energy-over-training", "enrichment-map"} <= drawn
    assert "of the gradient energy after block" in page
    assert "training batches" in page, "whose gradients they are"


def test_the_figure_of_a_live_table_is_that_of_a_probe(readme: tuple[Path, Monitor]) -> None:
    table = readme[1].table
    plain = by_training_batches(table)
    assert len(Query(table).where(batch="live")) and not len(Query(plain).where(batch="live"))
    assert len(table.plot("gradient_energy").data) == len(plain.plot("gradient_energy").data) > 0


def test_a_probe_and_training_batches_of_one_model_are_not_mixed() -> None:
    model = tiny("gpt2").train()
    words: dict[str, Any] = {"when": [0, 1], "plan": PLAN, "metrics": "tangent", "counts": torch.ones(VOCABULARY)}
    with Monitor(model, probe=probe_of("gpt2"), live=True, **words) as monitor:
        for step in range(2):
            with monitor.step(step):
                model(**batch_of("gpt2", *LENGTHS, seed=step)).loss.backward()
    table = monitor.table
    place = ("step", "stack", "layer", "kind", "group", "metric", "variant")
    rows = [tuple(row[name] for name in place) for row in table.records()]
    assert len(set(rows)) == len(rows), "a row of the probe and one of the training batch have one name"
    assert len(Query(table).where(batch="live", metric="gradient_energy"))
    assert by_training_batches(table) is table, "a model with a probe keeps them apart"
    alone = Table.concat([table.where(batch="live")])
    assert not len(Query(by_training_batches(alone)).where(batch="live"))


def test_the_view_of_a_run_reads_what_the_claims_read(readme: tuple[Path, Monitor]) -> None:
    assert not len(Query(run_view(RunFolder.open(readme[0])).table).where(batch="live"))
