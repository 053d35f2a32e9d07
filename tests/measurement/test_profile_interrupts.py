"""Interrupted profiles lose nothing and resume to the same table."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from anisoscope.errors import AnisoscopeError
from anisoscope.measurement import profile as profiles
from anisoscope.measurement.bank import Bank
from anisoscope.results.folder import RunFolder
from support.tiny_profiles import BERT, GPT2, config, run, same


class Interrupt:
    """A progress callback that presses Ctrl-C at one call."""

    def __init__(self, at: int, what: str = "forward") -> None:
        self.at, self.what, self.calls = at, what, 0

    def __call__(self, what: str, done: int, total: int) -> None:
        self.calls += what == self.what
        if what == self.what and self.calls == self.at:
            raise KeyboardInterrupt


@pytest.mark.parametrize("at", [1, 4, 11])
def test_an_interrupted_run_is_readable_and_resumes_to_the_same_table(
    at: int, prose: Path, tmp_path: Path, whole_profile: Path
) -> None:
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(config(prose), out, progress=Interrupt(at))
    folder = RunFolder.open(out)
    assert folder.about()["status"] == "interrupted"
    partial = folder.table()
    assert all("interrupted" in row["note"] for row in partial.records())
    assert max(row["contexts"] for row in partial.records()) == 4 * at
    seen: list[int] = []
    table = run(config(prose), out, resume=True, progress=lambda what, done, _: seen.append(what == "forward"))
    same(table, RunFolder.open(whole_profile).table())
    assert RunFolder.open(out).about()["status"] == "complete"
    assert not (out / "partial").exists()
    batches = math.ceil(RunFolder.open(whole_profile).about()["models"][0]["contexts"] / 4)
    assert sum(seen) <= batches - at + 1, "it goes on where it was, not from the start"


def test_an_interrupt_in_the_middle_of_a_batch_counts_no_row_twice(
    prose: Path, tmp_path: Path, whole_profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, calls, take = tmp_path / "run", [0], Bank.rows

    def interrupted(self: Bank, rows: Any) -> None:
        calls[0] += 1
        take(self, rows)
        if calls[0] == 40:
            raise KeyboardInterrupt

    monkeypatch.setattr(Bank, "rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(config(prose), out)
    same(run(config(prose), out, resume=True), RunFolder.open(whole_profile).table())


def test_a_model_killed_between_its_passes_and_its_own_part_keeps_its_name(
    prose: Path, tmp_path: Path, whole_profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def kill(*_: Any) -> None:
        raise Killed

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(profiles.ModelPasses, "_conclude", kill)
        patch.setattr(profiles.Profiler, "_finish", lambda *_: None)
        with pytest.raises(Killed):
            run(config(prose), out)
    assert list((out / "parts").glob("*.0.parquet")) and not (out / "table.parquet").exists()
    table = run(config(prose), out, resume=True)
    same(table, RunFolder.open(whole_profile).table())
    for name in ("run", "model", "seed", "data"):
        assert None not in table.arrow[name].to_pylist(), name


def test_ctrl_c_waits_for_the_end_of_its_batch(
    prose: Path, tmp_path: Path, whole_profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, calls, take = tmp_path / "run", [0], Bank.rows

    def pressed(self: Bank, rows: Any) -> None:
        calls[0] += 1
        take(self, rows)
        if calls[0] == 40:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Bank, "rows", pressed)
    with pytest.raises(KeyboardInterrupt):
        run(config(prose), out)
    counts = {row["contexts"] for row in RunFolder.open(out).table().records()}
    assert len(counts) == 1, "every site saw the same batches"
    assert counts.pop() % 4 == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    same(run(config(prose), out, resume=True), RunFolder.open(whole_profile).table())


def test_an_interrupt_while_metrics_are_computed_loses_nothing(
    prose: Path, tmp_path: Path, whole_profile: Path
) -> None:
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(config(prose), out, progress=Interrupt(2, "metrics"))
    assert list((out / "partial").glob("*.pt"))
    seen: list[str] = []
    again = run(config(prose), out, resume=True, progress=lambda what, *_: seen.append(what))
    assert "metrics" in seen and "forward" not in seen, "its pass is kept"
    same(again, RunFolder.open(whole_profile).table())


def test_a_second_interrupt_and_a_second_resume_change_nothing(
    prose: Path, tmp_path: Path, whole_profile: Path
) -> None:
    out = tmp_path / "run"
    for number, at in enumerate((3, 2)):
        with pytest.raises(KeyboardInterrupt):
            run(config(prose), out, resume=number > 0, progress=Interrupt(at))
    same(run(config(prose), out, resume=True), RunFolder.open(whole_profile).table())


def test_a_finished_model_is_not_measured_again(prose: Path, tmp_path: Path) -> None:
    both, out = config(prose, GPT2, BERT), tmp_path / "run"
    first = Interrupt(1, "load")

    def second_load(what: str, done: int, total: int) -> None:
        first.calls += what == "load"
        if first.calls == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(both, out, progress=second_load)
    before = RunFolder.open(out).table()
    assert len({row["model"] for row in before.records()}) == 1
    loads: list[str] = []
    table = run(both, out, resume=True, progress=lambda what, done, total: loads.append(what))
    assert loads.count("load") == 2, "only the second model is loaded"
    assert len({row["model"] for row in table.records()}) == 2
    same(table.where(model=before.records()[0]["model"]), before)


def test_several_passes_give_the_same_table_as_one(prose: Path, tmp_path: Path, whole_profile: Path) -> None:
    table = run(config(prose, memory_mb=1), tmp_path / "run")
    about = RunFolder.open(tmp_path / "run").about()
    assert any("passes" in note for note in about["models"][0]["notes"])
    same(table, RunFolder.open(whole_profile).table())


def test_an_error_keeps_what_was_finished_and_is_written_down(
    prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    with pytest.raises(AnisoscopeError):
        run(config(prose, GPT2, BERT, layers=(99,)), out)
    assert RunFolder(out).about().get("status", "failed") == "failed"
    original = profiles.save_arrays

    def fail_second(folder: RunFolder, key: str, bank: Bank) -> None:
        if key.startswith("1"):
            raise OSError("disk full")
        original(folder, key, bank)

    monkeypatch.setattr(profiles, "save_arrays", fail_second)
    out = tmp_path / "other"
    with pytest.raises(OSError, match="disk full"):
        run(config(prose, GPT2, BERT), out)
    about = RunFolder.open(out).about()
    assert about["status"] == "failed"
    assert "disk full" in about["error"]
    assert len(RunFolder.open(out).table().finite()) > 100


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_table(prose: Path, tmp_path: Path, whole_profile: Path) -> None:
    out = tmp_path / "run"
    script = f"""
        import os, signal, sys
        from dataclasses import asdict
        from anisoscope.measurement import profile as profiles
        from anisoscope.measurement.profile import ProfileConfig, Profiler
        from anisoscope.results.folder import RunFolder
        profiles._Pass.due = property(lambda work: 0.0, lambda work, when: None)  # a save is always due
        config = ProfileConfig(**{asdict(config(prose))!r})
        calls = 0
        def kill(what, done, total):
            global calls
            calls += what == "forward"
            if calls == 6:
                os.kill(os.getpid(), signal.SIGKILL)
        Profiler(config, RunFolder.create({str(out)!r}, asdict(config), resume=False), progress=kill).run()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False, capture_output=True,
                          env={**os.environ, "HF_HUB_OFFLINE": "1"})  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert json.loads((out / "run.json").read_text())["status"] == "running"
    assert (out / "partial").is_dir()
    same(run(config(prose), out, resume=True), RunFolder.open(whole_profile).table())
