"""How far a run is, and the pieces that it has written so far."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from anisoscope.errors import AnisoscopeError
from anisoscope.results.folder import RunFolder
from anisoscope.results.lock import LOCK, WriterLock
from anisoscope.results.pieces import log_since, rows_since
from anisoscope.results.query import Table
from anisoscope.results.state import run_state


def rows(step: int, count: int = 3, **more: Any) -> Table:
    place = {"model": "m", "metric": "drift", "kind": "resid", "variant": "", "step": step}
    return Table.from_records([{**place, "layer": layer, "value": float(step), **more} for layer in range(count)])


def training(path: Path, *steps: int, status: str = "running", **more: Any) -> RunFolder:
    """A training that has written the tables of some steps, and a log of ten updates."""
    folder = RunFolder(path)
    path.mkdir(parents=True, exist_ok=True)
    entry = {"name": "m", "type": "decoder"}
    folder.write_about(
        {"kind": "training", "status": status, "config": {"steps": 40}, "models": [entry], "seed": 0, **more}
    )
    for step in steps:
        folder.write_part(f"step-{step:09d}", rows(step))
    log = [{"step": step, "loss": 5.0 - step / 10, "gradient_norm": 1.0, "learning_rate": 0.1} for step in range(10)]
    (path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log) + '{"step": 10, "lo')
    return folder


def test_a_run_is_running_while_its_writer_lives(tmp_path: Path) -> None:
    training(tmp_path / "run", 0, 4)
    state = run_state(tmp_path / "run")
    assert (state.state, state.step, state.steps, state.measured, state.loss) == ("stopped", 10, 40, 4, 4.1)
    lock = WriterLock(tmp_path / "run")
    state = run_state(tmp_path / "run")
    assert state.state == "running" and state.since() < 600
    words = state.words(now=state.written + 12)
    assert words == "read while it runs: step 10 of 40, measured until step 4; last written 12 s ago"
    lock.release()
    owner = {"pid": 2**22 + 1, "host": "elsewhere", "space": "", "began": 1.0}
    (tmp_path / "run" / LOCK).write_text(json.dumps(owner))  # of a machine that is heard of
    assert run_state(tmp_path / "run").state == "running"
    os.utime(tmp_path / "run" / LOCK, (time.time() - 1000, time.time() - 1000))
    assert run_state(tmp_path / "run").state == "stopped"


@pytest.mark.parametrize(
    ("status", "state"),
    [("complete", "done"), ("interrupted", "stopped"), ("failed", "failed"), ("running", "stopped")],
)
def test_the_words_of_a_state(tmp_path: Path, status: str, state: str) -> None:
    training(tmp_path / "run", 0, status=status, **({"error": "no room"} if status == "failed" else {}))
    found = run_state(tmp_path / "run")
    assert found.state == state and bool(found.words()) == (state != "done")
    assert ("(no room)" in found.words()) == (state == "failed")
    with pytest.raises(AnisoscopeError, match="did you mean"):
        run_state(tmp_path / "rum")


def test_the_table_of_an_unfinished_run_is_made_of_its_parts(tmp_path: Path) -> None:
    folder = training(tmp_path / "run", 4, 0)
    folder.write_part("loss-000000000", rows(0, 1, kind="training", metric="loss"))
    folder.write_part("finish", rows(4, 1, metric="late"))
    table = Table.read(tmp_path / "run")
    assert table["step"].tolist() == [0, 0, 0, 0, 4, 4, 4, 4] and table["metric"].tolist()[3] == "loss"
    assert table.about["reading"].startswith("this run is stopped: step 10 of 40, measured until step 4")
    assert table.about["models"][0]["name"] == "m" and "this run is stopped" in repr(table)
    folder.write_table(table)
    assert Table.read(tmp_path / "run").arrow == table.arrow, "the table holds everything"
    folder.write_part("step-000000008", rows(8))
    assert Table.read(tmp_path / "run").steps == [0, 4, 8], "a resumed run has parts that are newer than its table"
    folder.write_about({**folder.about(), "status": "complete"})
    assert Table.read(tmp_path / "run").steps == [0, 4] and "reading" not in Table.read(tmp_path / "run").about


def test_a_run_that_measured_nothing_has_the_numbers_of_its_log(tmp_path: Path) -> None:
    training(tmp_path / "run")
    table = Table.read(tmp_path / "run")
    assert table.metrics == ["gradient_norm", "learning_rate", "loss"] and table.value(metric="loss", step=9) == 4.1
    (tmp_path / "run" / "log.jsonl").unlink()
    with pytest.raises(AnisoscopeError, match="has measured nothing: this run is stopped"):
        Table.read(tmp_path / "run")


def test_a_pass_over_a_model_counts_until_the_model_is_whole(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.write_about({"status": "running", "config": {"models": ["a/one", "b/two-1.5"]}, "seed": 3, "models": [{}]})
    whole, pass_ = rows(0), rows(0, 2, model=None)
    for name, table in {"0-a-one": whole, "0-a-one.0": pass_, "1-b-two-1.5.0": pass_, "1-b-two-1.5.1": pass_}.items():
        folder.write_part(name, table)
    found = Table.read(tmp_path / "run")
    assert found["model"].tolist() == ["m"] * 3 + ["two-1.5"] * 4 and set(found["seed"].tolist()[3:]) == {3}
    assert "1 of 2 models" in found.about["reading"]


def test_a_study_is_read_from_its_arms(tmp_path: Path) -> None:
    study = RunFolder(tmp_path / "study")
    study.write_about({"kind": "study", "study": "shape", "status": "running", "config": {}, "models": []})
    training(tmp_path / "study" / "arms" / "a-seed0", 0, 4, status="complete").write_table(rows(0))
    training(tmp_path / "study" / "arms" / "b-seed1", 0, 4, 8)
    table = Table.read(tmp_path / "study")
    assert len(table) == 3 + 9 and [model["name"] for model in table.about["models"]] == ["m", "m"]
    assert "1 of 2 begun arms done, b-seed1 at step 10 of 40" in table.about["reading"]


def test_rows_that_came_since_are_few_and_a_change_gives_all(tmp_path: Path) -> None:
    folder = training(tmp_path / "run", 0, 4)
    first = rows_since(tmp_path / "run")
    assert first.whole and len(first.table) == 6 and json.loads(json.dumps(first.stamp)) == first.stamp
    same = rows_since(tmp_path / "run", first.stamp)
    assert not same.whole and len(same.table) == 0
    folder.write_part("step-000000008", rows(8))
    more = rows_since(tmp_path / "run", first.stamp)
    assert not more.whole and more.table.steps == [8] and len(rows_since(tmp_path / "run", more.stamp).table) == 0
    folder.write_part("step-000000004", rows(4, 7))  # measured again after a resumption
    again = rows_since(tmp_path / "run", more.stamp)
    assert again.whole and len(again.table) == 3 + 7 + 3
    folder.write_table(again.table)
    end = rows_since(tmp_path / "run", again.stamp)
    assert end.whole and len(end.table) == 13 and list(end.stamp) == ["table.parquet"]


def test_lines_of_a_log_come_once(tmp_path: Path) -> None:
    training(tmp_path / "run")
    lines, offset = log_since(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(10))
    with (tmp_path / "run" / "log.jsonl").open("a") as file:
        file.write('ss": 1.0}\n')
    more, offset = log_since(tmp_path / "run", offset)
    assert more == [{"step": 10, "loss": 1.0}] and log_since(tmp_path / "run", offset) == ([], offset)
    (tmp_path / "run" / "log.jsonl").write_text('{"step": 0}\n')
    assert log_since(tmp_path / "run", offset)[0] == [{"step": 0}]
    assert log_since(tmp_path) == ([], 0)


WRITER = """
import sys
from pathlib import Path
from anisoscope.results.folder import RunFolder
from anisoscope.results.lock import WriterLock
from anisoscope.results.query import Table
folder = RunFolder(Path(sys.argv[1]))
lock = WriterLock(folder.path)
folder.write_about({"kind": "monitor", "status": "running", "config": {"total_steps": 400}, "models": []})
place = {"model": "m", "metric": "drift", "kind": "resid", "variant": ""}
made = []
for step in range(400):
    made.append(Table.from_records([{**place, "step": step, "layer": n, "value": 1.0} for n in range(5)]))
    folder.write_part(f"step-{step:09d}", made[-1])
    if step % 50 == 49:
        folder.write_table(Table.concat(made))
        folder.write_part(f"step-{step:09d}", made[-1])
    print(step, flush=True)
folder.write_table(Table.concat(made))
folder.write_about({**folder.about(), "status": "complete"})
"""


def test_a_run_is_read_again_and_again_while_another_process_writes_it(tmp_path: Path) -> None:
    """What is read is always whole steps, never fewer than before; what came since adds up to all."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None and writer.stdout.readline().strip() == "0"
    seen, total, stamp, states = 0, 0, None, set()
    while writer.poll() is None:
        states.add(run_state(tmp_path / "run").state)
        table = Table.read(tmp_path / "run")
        assert len(table) % 5 == 0 and len(table) >= seen
        seen, update = len(table), rows_since(tmp_path / "run", stamp)
        stamp, total = update.stamp, len(update.table) + (0 if update.whole else total)
        assert total >= seen
    writer.stdout.close()
    assert writer.returncode == 0 and len(Table.read(tmp_path / "run")) == 2000 and "running" in states
    assert run_state(tmp_path / "run").state == "done"
    update = rows_since(tmp_path / "run", stamp)
    assert len(update.table) + (0 if update.whole else total) == 2000


def test_the_state_is_read_without_torch(tmp_path: Path) -> None:
    training(tmp_path / "run", 0)
    code = "import sys; from anisoscope.results.state import run_state; print(run_state(sys.argv[1]).state, "
    code += "{'torch', 'pyarrow', 'numpy'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "stopped set()"
