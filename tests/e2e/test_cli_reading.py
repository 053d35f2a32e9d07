"""Commands that read runs, lists and the program as a process of its own."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from anisoscope.results.folder import RunFolder
from anisoscope.results.query import Table
from anisoscope.view.console import print_run
from support.command_lines import ALBERT, GPT, Command, Profiled, process
from support.pages import page_of


def test_the_long_table_is_printed_in_each_format(command: Command, tmp_path: Path) -> None:
    words = ("profile", "--random-init", GPT, "--tokens", 64, "--context", 8, "--metrics", "two_nn,drift")
    done = command(*words, "--pool", "mean", "--out", tmp_path / "run")
    assert "two_nn" in done.sentence  # 8 rows are too few for neighbours
    run = RunFolder.open(tmp_path / "run")
    table = run.table()
    assert {math.isnan(row["value"]) for row in table.records()} == {True, False}
    rows = list(csv.DictReader(io.StringIO(command("show", run.path, "--format", "csv").out)))
    found = json.loads(command("show", run.path, "--format", "json").out, parse_constant=pytest.fail)
    assert len(rows) == len(found) == len(table)
    for row, plain, record in zip(rows, found, table.records(), strict=True):
        if math.isnan(record["value"]):
            assert row["value"] == ""
            assert plain["value"] is None
            assert plain["note"] == record["note"] != ""
        else:
            assert float(row["value"]) == plain["value"] == record["value"]
    words = command("show", run.path).out
    assert "drift" in words
    assert "nan" not in words


def test_the_long_table_is_narrowed(command: Command, plain: RunFolder) -> None:
    words = ("show", plain.path, "--format", "json")
    found = json.loads(command(*words, "--metric", "drift,two_nn", "--kind", "resid").out)
    assert {(row["metric"], row["kind"]) for row in found} == {("drift", "resid"), ("two_nn", "resid")}
    heads = command("show", plain.path, "--kind", "query", "--heads").out
    assert len(heads.splitlines()) > len(command("show", plain.path, "--kind", "query").out.splitlines())


@pytest.mark.parametrize(
    ("steps", "columns"), [((0, 7), ["step", "layer", "kind"]), ((0,), ["model", "layer", "kind"])]
)
def test_several_steps_can_be_told_apart(
    steps: tuple[int, ...],
    columns: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # a wider place has room for a column that says the same of all rows
    place = {"model": "m", "layer": 1, "kind": "resid", "metric": "average_cosine", "value": 0.5, "seed": 0}
    run = RunFolder(tmp_path)
    run.write_table(Table.from_records([{**place, "step": step} for step in steps]))
    run.write_about({"status": "complete"})
    print_run(run, form="table", wanted={}, heads=False)
    head = next(line for line in capsys.readouterr().out.splitlines() if not line.startswith("in all rows"))
    assert head.split()[:3] == columns


def test_a_model_compared_with_itself_differs_nowhere(command: Command, plain: RunFolder, profiled: Profiled) -> None:
    found = json.loads(command("compare", plain.path, profiled().path, "--format", "json").out)
    assert found["paired"]
    assert all(row["difference"] == 0 and not row["differs"] for row in found["differences"])
    for i, name in enumerate(found["cka"]["first"]):
        assert found["cka"]["values"][i][found["cka"]["second"].index(name)] == pytest.approx(1, abs=1e-6)


def test_two_models_of_one_run_are_compared(command: Command, profiled: Profiled) -> None:
    run = profiled(ALBERT)
    found = json.loads(command("compare", run.path, "--format", "json").out)
    assert (found["first"], found["second"]) == ("gpt2", "albert")
    assert any(row["difference"] for row in found["differences"])
    named = command("compare", f"{run.path}#gpt2", f"{run.path}#albert", "--metric", "drift")
    assert "drift" in named.out
    assert "two_nn" not in named.out
    assert "holds 2 models" in command("compare", run.path, run.path).sentence
    rows = list(csv.DictReader(io.StringIO(command("compare", run.path, "--format", "csv").out)))
    assert float(rows[0]["difference"]) == pytest.approx(float(rows[0]["second"]) - float(rows[0]["first"]))


def test_a_comparison_has_a_page_that_says_what_differs(command: Command, profiled: Profiled, tmp_path: Path) -> None:
    run = profiled(ALBERT)
    own = (run.path / "report.html").read_bytes()
    done = command("compare", run.path)
    assert done.out.strip().endswith("compare.html")
    page = page_of(run.path / "compare.html")
    assert re.search(r"In albert .* is (higher|lower) than in gpt2 at \d of \d layers", page.text)
    assert {"hero", "differences", "cka", "table"} <= {attrs.get("id") for _, attrs in page.elements}
    assert page.data["csv"].startswith("stack,layer,kind,") and page.fetched() == []
    assert (run.path / "report.html").read_bytes() == own, "the run's own page stays"
    named = command("compare", run.path, "--format", "json", "--out", tmp_path / "both.html")
    assert json.loads(named.out) and str(tmp_path / "both.html") in named.err
    assert (tmp_path / "both.html").is_file()


def test_two_files_of_rows_are_compared_whatever_their_names(
    command: Command, profiled: Profiled, tmp_path: Path
) -> None:
    rows = np.random.default_rng(0).normal(size=(300, 8))
    np.save(tmp_path / "before.npy", rows)
    np.save(tmp_path / "after.npy", rows + 5)
    one, two = (profiled(model=tmp_path / name, fresh=False) for name in ("before.npy", "after.npy"))
    words = ("compare", one.path, two.path, "--metric", "average_cosine", "--format", "json")
    (found,) = json.loads(command(*words).out)["differences"]
    assert found["difference"] > 0.8
    assert found["differs"]


def test_other_tokens_are_not_paired(command: Command, plain: RunFolder, profiled: Profiled, shelf: Path) -> None:
    done = command("compare", plain.path, profiled("--data", shelf / "plain.txt").path)
    assert done.code == 0
    assert "not paired" in " ".join(done.err.split())


def test_a_report_is_made_again_for_one_run_or_several(
    command: Command, plain: RunFolder, profiled: Profiled, tmp_path: Path
) -> None:
    (plain.path / "report.html").unlink()
    assert command("report", plain.path).out.strip() == str(plain.path / "report.html")
    assert (plain.path / "report.html").is_file()
    other = profiled(model=ALBERT)
    done = command("report", plain.path, other.path, "--out", tmp_path / "both")
    page = (tmp_path / "both" / "report.html").read_text()
    assert done.code == 0
    assert "gpt2" in page
    assert "albert" in page


@pytest.mark.parametrize(
    ("what", "words"),
    [("metrics", ["two_nn", "formula", "reference"]), ("sites", ["resid", "unembed"]), ("models", ["albert", "t5"])],
)
def test_lists_explain_what_there_is(command: Command, what: str, words: list[str]) -> None:
    done = command("list", what)
    assert done.code == 0
    assert all(word in done.out.lower() for word in words)


def test_the_selftest_passes_here_and_can_fail(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    done = command("selftest", "--device", "cpu", "--seed", 7)  # any seed will do
    assert done.code == 0, done.out
    assert done.out.count("PASS") > 20
    assert "FAIL" not in done.out
    from anisoscope.measurement import selftest

    wrong = type("Result", (), {"metric": "two_nn", "control": "plane", "passed": False, "seen": "9"})()
    monkeypatch.setattr(selftest, "run_selftest", lambda *_, **__: [wrong])
    failed = command("selftest")
    assert failed.code == 1
    assert "1 controls failed" in failed.sentence
    assert "FAIL" in failed.out


def test_the_record_says_what_was_run_and_with_what(plain: RunFolder) -> None:
    about = plain.about()
    assert about["command"][:3] == ["anisoscope", "profile", "--random-init"]
    assert about["config"]["tokens"] == 600
    assert {"python", "torch", "transformers", "numpy"} <= set(about["versions"])
    assert about["device"] == "cpu"
    assert about["models"][0]["fingerprint"].startswith("sha256:")
    assert len(about["data"]["fingerprint"]) == 64
    assert about["wall_seconds"] > 0
    assert about["peak_memory_mb"] > 0
    assert (plain.path / "table.parquet").is_file()
    assert list((plain.path / "arrays").glob("*.safetensors"))
    assert not {p.name for p in plain.path.iterdir()} & {"partial", "parts"}


def test_a_run_without_out_lands_under_runs(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = command("profile", "--random-init", GPT, "--tokens", "100", "--context", "32")
    assert done.code == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert str(Path("runs") / folder.name / "report.html") in done.out
    assert "about" in done.err
    assert "MiB" in done.err


def test_help_needs_no_heavy_library() -> None:
    words = "import sys; sys.argv = ['anisoscope', 'profile', '--help']; from anisoscope import cli\n"
    words += "try: cli.main()\nfinally: print(sorted({'torch', 'transformers', 'plotly'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, timeout=60, check=False)
    assert "--save-rows" in done.stdout
    assert done.stdout.rstrip().endswith("[]")


def test_a_whole_run_in_a_process_of_its_own(tmp_path: Path) -> None:
    few = ("--tokens", 100, "--context", 32, "--metrics", "average_cosine", "--sites", "resid", "--layers", 1)
    done = process("profile", "--random-init", GPT, *few, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("report.html")
    assert "Traceback" not in done.stderr
    made = {path.suffix for path in (tmp_path / "run" / "figures").iterdir()}
    assert made == {".pdf", ".svg"}


def test_a_reader_that_leaves_early_is_no_error(plain: RunFolder) -> None:
    env = {**os.environ, "A": sys.executable, "R": str(plain.path)}
    line = '"$A" -m anisoscope.cli show "$R" --format csv | head -n 1'
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False, env=env)
    assert re.match("run,model,revision", done.stdout)
    assert "Traceback" not in done.stderr


def test_verdicts_of_the_performance_study_come_out_of_its_table_again(command: Command) -> None:
    folder = Path(__file__).parents[2] / "docs" / "results" / "performance"
    kept = json.loads((folder / "verdicts.json").read_text(encoding="utf-8"))
    found = json.loads(command("claims", folder, "--format", "json").out)
    assert [(v["claim"], v["subject"], v["status"]) for v in found] == [
        (v["claim"], v["subject"], v["status"]) for v in kept
    ]
    assert len({v["status"] for v in found}) == 3
    refused = command("claims", folder, "--proxy", "pca")
    assert refused.code == 2 and "does nothing" in refused.sentence
