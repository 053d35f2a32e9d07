"""A monitored run that was killed goes on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from anisoscope.errors import AnisoscopeError
from anisoscope.monitor.monitor import Monitor
from anisoscope.monitor.schedule import at
from anisoscope.results.folder import RunFolder
from anisoscope.results.query import Table
from anisoscope.tangent.plan import TangentPlan
from support.gradient_models import batch_of
from support.monitored import LENGTHS, PLAN, compare, probe_of, resumable, trained
from support.tiny_models import tiny


@pytest.mark.parametrize(("stop", "live"), [(2, False), pytest.param(3, True, marks=pytest.mark.slow)])
def test_a_run_that_was_killed_and_resumed_has_the_same_table(tmp_path: Path, stop: int, live: bool) -> None:
    whole = resumable(tmp_path / "whole", live=live)
    with pytest.raises(KeyboardInterrupt):
        resumable(tmp_path / "killed", stop=stop, live=live)
    again = resumable(tmp_path / "killed", resume=True, live=live)
    compare(again, whole, 1e-3)
    compare(Table.read(tmp_path / "killed" / "table.parquet"), whole, 1e-3)
    assert sorted({r["step"] for r in again.records()}) == [0, 1, 2, 4, 5]


@pytest.mark.slow
@pytest.mark.parametrize(("stop", "live"), [(0, False), (1, True), (3, False), (5, False)])
def test_a_run_can_be_killed_at_any_moment(tmp_path: Path, stop: int, live: bool) -> None:
    test_a_run_that_was_killed_and_resumed_has_the_same_table(tmp_path, stop, live)


@pytest.mark.slow
def test_a_step_whose_state_was_lost_is_measured_again_and_not_twice(tmp_path: Path) -> None:
    whole = resumable(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        resumable(tmp_path / "killed", stop=3)
    newest = max((tmp_path / "killed" / "state").glob("step-*.pt"))
    newest.unlink()  # killed between the table of a step and its state
    compare(resumable(tmp_path / "killed", resume=True), whole, 1e-3)


@pytest.mark.slow
def test_a_complete_run_can_be_opened_again(tmp_path: Path) -> None:
    whole = resumable(tmp_path / "run")
    compare(resumable(tmp_path / "run", resume=True), whole, 1e-3)


def test_a_run_that_ended_inside_its_window_can_be_opened_again(tmp_path: Path) -> None:
    def run(resume: bool) -> Table:
        model = tiny("gpt2")
        plan = TangentPlan(rank=4, draws=19, proxies=("pca", "svd"))
        monitor = Monitor(
            model, when=at([0, 1]), total_steps=100, out=tmp_path / "run", plan=plan, metrics="tangent",
            probe=probe_of("gpt2"), resume=resume,
        )  # fmt: skip
        with monitor:
            for step in range(2):
                with monitor.step(step):
                    pass
        return monitor.table

    first = run(False)
    assert any("fit=frozen" in r["variant"] for r in first.records())
    compare(run(True), first, 1e-3)


def test_a_folder_with_another_run_is_refused(tmp_path: Path) -> None:
    resumable(tmp_path / "run", steps=1)
    with pytest.raises(AnisoscopeError, match="resume=True"):
        resumable(tmp_path / "run", steps=1)


def test_numbers_of_the_training_are_kept_beside_the_measurements() -> None:
    _, _, monitor = trained(
        "gpt2", {"probe": [probe_of("gpt2")], "when": at([0, 2]), "plan": PLAN, "metrics": "tangent"}
    )
    rows = monitor.table.where(metric=["loss", "learning_rate"]).records()
    assert sorted((r["step"], r["metric"]) for r in rows) == [(s, m) for s in (0, 2) for m in ("learning_rate", "loss")]
    assert {r["kind"] for r in rows} == {"training"}


def test_training_batches_have_a_fingerprint_that_survives_an_interruption(tmp_path: Path) -> None:
    def run(name: str, steps: range, *, resume: bool = False, seed: int = 0) -> str:
        model = tiny("gpt2")
        with Monitor(model, when=at([0, 2]), metrics="light", plan=PLAN, out=tmp_path / name, resume=resume) as monitor:
            for step in steps:
                ids = torch.randint(5, 60, (16, 12), generator=torch.Generator().manual_seed(seed + step))
                with monitor.step(step):
                    model(input_ids=ids, labels=ids).loss.backward()
        about = RunFolder.open(tmp_path / name).about()
        assert about["code"]["version"] and about["data"]["of"] == "training batches of the measured steps"
        return str(about["data"]["fingerprint"])

    whole = run("whole", range(3))
    first = run("again", range(1))
    assert run("again", range(3), resume=True) == whole != first
    assert run("other", range(3), seed=7) != whole


def test_numbers_that_were_logged_in_several_calls_keep_their_order(tmp_path: Path) -> None:
    """The files of a resumed run are read by name; an undisturbed run has them as they came."""

    def logged(out: Path, *, stop: int | None, resume: bool = False) -> Monitor:
        model = tiny("gpt2")
        with Monitor(model, when=[0, 1], metrics="drift", out=out, resume=resume) as monitor:
            for step in range(2):
                with monitor.step(step):
                    model(**batch_of("gpt2", *LENGTHS, seed=step)).loss.backward()
                monitor.log(step, loss=1.0)
                monitor.log(step, accuracy=0.5, gradient_norm=2.0)
                monitor.log(step, best=3.0)
                if step == stop:
                    raise KeyboardInterrupt
        return monitor

    whole = logged(tmp_path / "whole" / "run", stop=None)
    with pytest.raises(KeyboardInterrupt):
        logged(tmp_path / "cut" / "run", stop=0)
    again = logged(tmp_path / "cut" / "run", stop=None, resume=True)
    files = [Table.read(tmp_path / name / "run" / "table.parquet") for name in ("whole", "cut")]
    for first, second in ((whole.table, again.table), files):
        for name in ("step", "kind", "layer", "metric"):
            assert first.arrow[name].to_pylist() == second.arrow[name].to_pylist()
