"""One writer for each run folder: a second is told who is there, what a killed one left behind is taken over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from anisoscope.errors import AnisoscopeError
from anisoscope.results import lock as locks
from anisoscope.results.folder import RunFolder
from anisoscope.results.lock import LOCK, WriterLock, refuse_other_writer, writing

HOLD = "import sys, time; from pathlib import Path; from anisoscope.results.lock import WriterLock; " \
       "lock = WriterLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(600)"  # fmt: skip


class Holder:
    """Another process that writes into a folder."""

    def __init__(self, folder: Path) -> None:
        words = [sys.executable, "-c", HOLD, str(folder)]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None and self.process.stdout.readline() == "held\n"

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.kill()
        self.process.communicate()


def forged(folder: Path, **words: Any) -> None:
    mine = locks.this_process() | {"command": "anisoscope train", "since": "2026-01-01T00:00:00"}
    (folder / LOCK).write_text(json.dumps(mine | words))


def test_a_second_process_is_told_who_writes_and_since_when(tmp_path: Path) -> None:
    with Holder(tmp_path) as other:
        for act in (WriterLock, refuse_other_writer, lambda path: RunFolder.create(path, {}, resume=True)):
            with pytest.raises(AnisoscopeError, match=rf"written by process {other.process.pid} on .* since 20\d\d-"):
                act(tmp_path)
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == other.process.pid
    lock = WriterLock(tmp_path)
    assert f"process {other.process.pid}" in lock.note and "is gone" in lock.note
    lock.release()
    assert not list(tmp_path.iterdir()), "nothing stays behind"


def test_a_process_that_ended_but_was_not_asked_about_is_gone(tmp_path: Path) -> None:
    other = Holder(tmp_path)
    other.process.kill()
    while psutil.Process(other.process.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert "is gone" in WriterLock(tmp_path).note
    other.process.communicate()


def test_the_number_of_a_process_may_be_given_again(tmp_path: Path) -> None:
    began = psutil.Process(os.getppid()).create_time()
    forged(tmp_path, pid=os.getppid(), began=began)
    with pytest.raises(AnisoscopeError, match="being written by"):
        WriterLock(tmp_path)
    forged(tmp_path, pid=os.getppid(), began=began - 1000)
    assert "is gone" in WriterLock(tmp_path).note


def test_on_another_machine_the_sign_of_life_decides(tmp_path: Path) -> None:
    forged(tmp_path, host="elsewhere")
    with pytest.raises(AnisoscopeError, match="on elsewhere"):
        WriterLock(tmp_path)
    long_ago = time.time() - 2 * locks.SILENT
    os.utime(tmp_path / LOCK, (long_ago, long_ago))
    assert "no sign of life for 20 minutes" in WriterLock(tmp_path).note


def test_a_writer_shows_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "BEAT", 0.01)
    monkeypatch.setattr(locks._Held, "thread", None)
    lock = WriterLock(tmp_path)
    os.utime(tmp_path / LOCK, (0, 0))
    for _ in range(3000):  # a thread of its own touches it: sooner or later, not for ever
        if alive := (tmp_path / LOCK).stat().st_mtime > 0:
            break
        time.sleep(0.01)
    assert alive, "the lock was not touched"
    lock.release()


def test_one_process_may_write_from_several_places(tmp_path: Path) -> None:
    with writing(tmp_path):
        inner = WriterLock(tmp_path)
        inner.release()
        inner.release()  # twice is once
        assert (tmp_path / LOCK).exists()
        refuse_other_writer(tmp_path)
    assert not (tmp_path / LOCK).exists()
    WriterLock(tmp_path)  # forgotten at once
    assert not (tmp_path / LOCK).exists()


def test_a_fork_holds_no_lock_of_its_parent(tmp_path: Path) -> None:
    with writing(tmp_path):
        child = os.fork()
        if child == 0:
            try:
                WriterLock(tmp_path)
            except AnisoscopeError:
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert (tmp_path / LOCK).exists()


def test_of_many_that_want_a_lock_left_behind_one_gets_it(tmp_path: Path) -> None:
    forged(tmp_path, pid=2**22 + 1)
    won: list[str] = []

    def want() -> None:
        code = HOLD.replace("time.sleep(600)", "time.sleep(2)")
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
        won.append(done.stdout.strip())

    threads = [threading.Thread(target=want) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won.count("held") >= 1  # those that begin after it ended may have it in turn
    assert not list(tmp_path.iterdir())


def test_a_lock_that_cannot_be_read_is_respected(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("{")
    with pytest.raises(AnisoscopeError, match="cannot be read"):
        WriterLock(tmp_path)


def test_reading_needs_no_lock(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with Holder(tmp_path):
        assert RunFolder.open(tmp_path).about() == {}
