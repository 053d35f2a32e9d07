"""The run folder and comparisons: nothing half-written, nothing lost, the same table after any interruption."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anisoscope.errors import AnisoscopeError
from anisoscope.runs import passes
from anisoscope.runs.bank import Bank
from anisoscope.runs.compare import compare
from anisoscope.runs.profile import ProfileConfig, Profiler
from anisoscope.runs.store import RunFolder, replace_file
from anisoscope.runs.table import Table, variant_name

GPT2 = "gpt2:n_layer=2,n_embd=32,n_head=2,vocab_size=300,n_positions=64"
DEEP = "gpt2:n_layer=4,n_embd=32,n_head=2,vocab_size=300,n_positions=64"
BERT = "bert:num_hidden_layers=2,hidden_size=32,num_attention_heads=2,intermediate_size=64,vocab_size=300"
PHRASE = "the quick brown fox jumps over a lazy dog while seven wizards quietly box up twelve black jugs"
WORDS = PHRASE.split()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("\n\n".join(" ".join(rng.choices(WORDS, k=30)) for _ in range(40)), encoding="utf-8")
    return path


def config(text: Path, *models: str, **options: Any) -> ProfileConfig:
    plain = {"tokens": 1500, "context": 32, "batch_size": 4, "random_init": True, "device": "cpu"}
    return ProfileConfig(models or (GPT2,), data=str(text), **{**plain, **options})


def run(wanted: ProfileConfig, out: Path, *, resume: bool = False, progress: Any = None) -> Table:
    folder = RunFolder.create(out, asdict(wanted), resume=resume)
    return Profiler(wanted, folder, progress=progress).run()


def keyed(table: Table) -> dict[tuple[Any, ...], dict[str, Any]]:
    names = ("model", "stack", "layer", "kind", "head", "group", "metric", "variant")
    rows = table.records()
    found = {tuple(row[name] for name in names): row for row in rows}
    assert len(found) == len(rows), "each row of the table has a key of its own"
    return found


def same(one: Table, two: Table, *, rel: float = 1e-12) -> None:
    mine, theirs = keyed(one), keyed(two)
    assert set(mine) == set(theirs)
    for key, row in mine.items():
        for name in ("value", "low", "high"):
            assert theirs[key][name] == pytest.approx(row[name], rel=rel, abs=1e-12, nan_ok=True), (key, name)
        assert [theirs[key][n] for n in ("n", "contexts", "dropped")] == [row[n] for n in ("n", "contexts", "dropped")]


@pytest.fixture(scope="module")
def undisturbed(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "whole"
    run(config(text), out)
    return out


# the folder


def test_a_failing_write_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    replace_file(path, lambda p: p.write_text("old"))

    def fail(beside: Path) -> None:
        beside.write_text("half of the new")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        replace_file(path, fail)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]
    replace_file(path, lambda p: p.write_text("new"))
    assert path.read_text() == "new", "the counter-test: a write that works replaces it"


def test_a_failing_table_leaves_the_old_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet as pq

    folder = RunFolder(tmp_path)
    old = Table.from_records([{"metric": "a", "value": 1.0}])
    folder.write_table(old)

    def broken(table: Any, path: Path) -> None:
        Path(path).write_bytes(b"PAR1 not much more")
        raise OSError("disk full")

    monkeypatch.setattr(pq, "write_table", broken)
    with pytest.raises(OSError, match="disk full"):
        folder.write_table(Table.from_records([{"metric": "b", "value": 2.0}]))
    assert folder.table().value(metric="a") == 1.0


def test_a_folder_with_other_files_or_another_run_is_refused(tmp_path: Path, undisturbed: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(AnisoscopeError, match=r"thesis\.tex"):
        RunFolder.create(tmp_path, {}, resume=False)
    with pytest.raises(AnisoscopeError, match="holds a run"):
        RunFolder.create(undisturbed, {}, resume=False)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    assert RunFolder.create(tmp_path / "new" / "deep", {}, resume=False).path.is_dir()


def test_resuming_with_other_settings_is_refused_and_names_the_setting(text: Path, undisturbed: Path) -> None:
    with pytest.raises(AnisoscopeError, match="batch_size = 4, not 5"):
        RunFolder.create(undisturbed, asdict(config(text, batch_size=5)), resume=True)
    assert RunFolder.create(undisturbed, asdict(config(text)), resume=True).path == undisturbed


def test_a_file_or_a_missing_run_is_told_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AnisoscopeError, match="is a file"):
        RunFolder.create(tmp_path / "file", {}, resume=False)
    with pytest.raises(AnisoscopeError, match="does not exist"):
        RunFolder.open(tmp_path / "nowhere")
    with pytest.raises(AnisoscopeError, match=r"run\.json"):
        RunFolder.open(tmp_path)
    (tmp_path / "run.json").write_text("{ not json")
    with pytest.raises(AnisoscopeError, match="JSON"):
        RunFolder.open(tmp_path).about()
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(AnisoscopeError, match="no table"):
        RunFolder.open(tmp_path).table()
    (tmp_path / "table.parquet").write_bytes(b"PAR1")
    with pytest.raises(AnisoscopeError, match="table"):
        RunFolder.open(tmp_path).table()


def test_a_run_says_what_it_was(undisturbed: Path) -> None:
    folder = RunFolder.open(undisturbed)
    about = folder.about()
    assert about["status"] == "complete"
    assert about["seed"] == 0
    assert {"torch", "transformers", "python"} <= set(about["versions"])
    (model,) = about["models"]
    assert model["data"]["fingerprint"]
    assert model["fingerprint"]
    assert model["contexts"] == model["data"]["contexts"] > 40
    assert not (undisturbed / "partial").exists()
    arrays = folder.arrays(model["key"])
    assert {"0.embed/rows", "0.embed/keys", "1.resid/spectrum"} <= set(arrays)
    table = folder.table()
    assert {row["model"] for row in table.records()} == {model["name"]}
    assert len(table.finite()) > 100


def test_partial_statistics_come_back_as_they_were(tmp_path: Path) -> None:
    from anisoscope.capture import Batch, Capture, find_layout
    from anisoscope.metrics.metric import parse_requests
    from anisoscope.runs.measure import make_plan
    from tiny_models import contexts, padded, tiny

    model = tiny("gpt2", dtype=torch.float64)
    layout = find_layout(model)
    plan = make_plan(parse_requests(["all"]), ["resid", "scores"], seed=0, sample_size=64, attention_rows=4)
    bank, folder = Bank(plan), RunFolder(tmp_path)
    with Capture(model, layout.sites(["resid", "scores"]), bank, layout=layout) as capture:
        capture.run(Batch(padded(contexts(12, 9)), groups=("a", "b")))
    assert folder.partial("m", plan) is None
    folder.write_partial("m", bank, {"batches": 1})
    found = folder.partial("m", plan)
    assert found is not None
    loaded, progress = found
    assert progress == {"batches": 1}
    assert loaded.groups == bank.groups
    one, two = bank.state(), loaded.state()
    assert one[1] == two[1]
    assert set(one[0]) == set(two[0])
    assert all(torch.equal(value, two[0][key]) for key, value in one[0].items())


def test_variants_have_one_spelling() -> None:
    assert variant_name({"b": True, "a": 0.5}) == "a=0.5;b=1"
    assert variant_name({}) == ""


# interruptions


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
    at: int, text: Path, tmp_path: Path, undisturbed: Path
) -> None:
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(config(text), out, progress=Interrupt(at))
    folder = RunFolder.open(out)
    assert folder.about()["status"] == "interrupted"
    partial = folder.table()
    assert all("interrupted" in row["note"] for row in partial.records())
    assert max(row["contexts"] for row in partial.records()) == 4 * at
    seen: list[int] = []
    table = run(config(text), out, resume=True, progress=lambda what, done, _: seen.append(what == "forward"))
    same(table, RunFolder.open(undisturbed).table())
    assert RunFolder.open(out).about()["status"] == "complete"
    assert not (out / "partial").exists()
    batches = math.ceil(RunFolder.open(undisturbed).about()["models"][0]["contexts"] / 4)
    assert sum(seen) <= batches - at + 1, "it goes on where it was, not from the start"


def test_an_interrupt_in_the_middle_of_a_batch_counts_no_row_twice(
    text: Path, tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, calls, take = tmp_path / "run", [0], Bank.rows

    def interrupted(self: Bank, rows: Any) -> None:
        calls[0] += 1
        take(self, rows)
        if calls[0] == 40:
            raise KeyboardInterrupt

    monkeypatch.setattr(Bank, "rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(config(text), out)
    same(run(config(text), out, resume=True), RunFolder.open(undisturbed).table())


def test_ctrl_c_waits_for_the_end_of_its_batch(
    text: Path, tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, calls, take = tmp_path / "run", [0], Bank.rows

    def pressed(self: Bank, rows: Any) -> None:
        calls[0] += 1
        take(self, rows)
        if calls[0] == 40:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Bank, "rows", pressed)
    with pytest.raises(KeyboardInterrupt):
        run(config(text), out)
    counts = {row["contexts"] for row in RunFolder.open(out).table().records()}
    assert len(counts) == 1, "every site saw the same batches"
    assert counts.pop() % 4 == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    same(run(config(text), out, resume=True), RunFolder.open(undisturbed).table())


def test_an_interrupt_while_metrics_are_computed_loses_nothing(text: Path, tmp_path: Path, undisturbed: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(config(text), out, progress=Interrupt(2, "metrics"))
    same(run(config(text), out, resume=True), RunFolder.open(undisturbed).table())


def test_a_second_interrupt_and_a_second_resume_change_nothing(text: Path, tmp_path: Path, undisturbed: Path) -> None:
    out = tmp_path / "run"
    for number, at in enumerate((3, 2)):
        with pytest.raises(KeyboardInterrupt):
            run(config(text), out, resume=number > 0, progress=Interrupt(at))
    same(run(config(text), out, resume=True), RunFolder.open(undisturbed).table())


def test_a_finished_model_is_not_measured_again(text: Path, tmp_path: Path) -> None:
    both, out = config(text, GPT2, BERT), tmp_path / "run"
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


def test_several_passes_give_the_same_table_as_one(text: Path, tmp_path: Path, undisturbed: Path) -> None:
    table = run(config(text, memory_mb=1), tmp_path / "run")
    about = RunFolder.open(tmp_path / "run").about()
    assert any("passes" in note for note in about["models"][0]["notes"])
    same(table, RunFolder.open(undisturbed).table())


def test_an_error_keeps_what_was_finished_and_is_written_down(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    with pytest.raises(AnisoscopeError):
        run(config(text, GPT2, BERT, layers=(99,)), out)
    assert RunFolder(out).about().get("status", "failed") == "failed"
    original = passes.save_arrays

    def fail_second(folder: RunFolder, key: str, bank: Bank) -> None:
        if key.startswith("1"):
            raise OSError("disk full")
        original(folder, key, bank)

    monkeypatch.setattr(passes, "save_arrays", fail_second)
    out = tmp_path / "other"
    with pytest.raises(OSError, match="disk full"):
        run(config(text, GPT2, BERT), out)
    about = RunFolder.open(out).about()
    assert about["status"] == "failed"
    assert "disk full" in about["error"]
    assert len(RunFolder.open(out).table().finite()) > 100


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_table(text: Path, tmp_path: Path, undisturbed: Path) -> None:
    out = tmp_path / "run"
    script = f"""
        import os, signal, sys
        from dataclasses import asdict
        from anisoscope.runs import passes
        from anisoscope.runs.profile import ProfileConfig, Profiler
        from anisoscope.runs.store import RunFolder
        passes._SAVE_EVERY = 0.0
        passes._save_if_due = lambda work, folder, key: passes._save(work, folder, key)
        config = ProfileConfig(**{asdict(config(text))!r})
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
    same(run(config(text), out, resume=True), RunFolder.open(undisturbed).table())


# comparisons


def test_a_model_does_not_differ_from_itself(text: Path, tmp_path: Path, undisturbed: Path) -> None:
    run(config(text), tmp_path / "again")
    seen = compare(str(undisturbed), str(tmp_path / "again"))
    assert seen.paired
    assert len(seen.rows) > 100
    for row in seen.rows:
        assert (row["difference"], row["low"], row["high"]) == pytest.approx((0.0, 0.0, 0.0), abs=1e-12)
        assert not row["differs"]
    one, two, matrix = seen.cka
    assert one == two
    assert np.diag(matrix) == pytest.approx(1.0, abs=1e-6)
    assert matrix == pytest.approx(matrix.T, abs=1e-6)


def test_another_model_differs_and_layers_are_matched_by_depth(text: Path, tmp_path: Path, undisturbed: Path) -> None:
    run(config(text, DEEP, seed=1), tmp_path / "deep")
    seen = compare(str(undisturbed), str(tmp_path / "deep"))
    assert seen.paired, "the same tokens"
    assert any("depth" in note for note in seen.notes)
    assert any(row["differs"] for row in seen.rows)
    pairs = {(row["layer"], row["other_layer"]) for row in seen.rows if row["kind"] == "resid"}
    assert pairs == {(1, 2), (2, 4)}
    assert {(r["layer"], r["other_layer"]) for r in seen.rows if r["kind"] == "final"} == {(2, 4)}
    assert seen.cka[2].shape == (len(seen.cka[0]), len(seen.cka[1])) == (4, 6)
    for row in seen.rows:
        assert row["low"] <= row["difference"] <= row["high"]
        assert row["difference"] == pytest.approx(row["second"] - row["first"])


def test_paired_intervals_are_narrower_than_unpaired_ones(text: Path, tmp_path: Path, undisturbed: Path) -> None:
    other = text.with_name("other.txt")
    rng = random.Random(7)
    other.write_text("\n\n".join(" ".join(rng.choices(WORDS, k=30)) for _ in range(40)), encoding="utf-8")
    run(config(text, seed=1), tmp_path / "same")
    run(config(other, seed=1), tmp_path / "other")
    paired, apart = (
        compare(str(undisturbed), str(tmp_path / "same")),
        compare(str(undisturbed), str(tmp_path / "other")),
    )
    assert paired.paired
    assert not apart.paired
    assert any("not paired" in note for note in apart.notes)
    wide = {(r["layer"], r["kind"], r["metric"]): r["high"] - r["low"] for r in apart.rows if r["head"] is None}
    narrow = {(r["layer"], r["kind"], r["metric"]): r["high"] - r["low"] for r in paired.rows if r["head"] is None}
    ratios = [narrow[key] / wide[key] for key in narrow if wide.get(key)]
    assert np.median(ratios) < 1.1


def test_two_models_of_one_run_are_compared_and_others_must_be_named(text: Path, tmp_path: Path) -> None:
    run(config(text, GPT2, BERT), tmp_path / "both")
    seen = compare(str(tmp_path / "both"))
    assert (seen.first, seen.second) != ("", "")
    assert seen.paired
    with pytest.raises(AnisoscopeError, match="#"):
        compare(str(tmp_path / "both"), str(tmp_path / "both"))
    with pytest.raises(AnisoscopeError, match="does not exist"):
        compare(str(tmp_path / "none"), str(tmp_path / "both"))


def test_the_same_model_twice_in_one_run_stays_two(text: Path, tmp_path: Path) -> None:
    table = run(config(text, GPT2, GPT2), tmp_path / "twice")
    keyed(table)
    seen = compare(str(tmp_path / "twice"))
    assert max(abs(row["difference"]) for row in seen.rows) == 0.0
