"""Steps analysed in a process of their own: the same table, the same training, whatever happens to that process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pyarrow
import pytest
import torch

from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.engine import metric as declared
from anisoscope.monitor.analysis import analyst as analysts
from anisoscope.monitor.analysis import transport
from anisoscope.monitor.analysis.analysis import Analysis, Found
from anisoscope.monitor.analysis.analyst import BackgroundAnalyst, HereAnalyst
from anisoscope.monitor.analysis.transport import Parcel, unpack
from anisoscope.monitor.analysis.worker import _sent, _unpacked
from anisoscope.monitor.monitor import Monitor
from anisoscope.monitor.open_step import OpenStep
from anisoscope.numerics.host import cores
from anisoscope.results.folder import RunFolder
from anisoscope.results.query import Table
from anisoscope.stats.moments import Moments
from support.copied import Copied
from support.gradient_models import batch_of
from support.monitored import CHEAP as PLAN
from support.monitored import COUNTS, LENGTHS, probe_of
from support.tiny_models import tiny

STEPS, MEASURED = 5, [0, 2, 4]
STARTED = analysts._started
pytestmark = [
    pytest.mark.filterwarnings("ignore::anisoscope.monitor.guard.MonitorWarning"),
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory without a name needs Linux"),
]


@pytest.fixture(autouse=True)
def _copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes begin as copies of this one: to import everything takes seconds, and is done in two tests."""
    monkeypatch.setattr(analysts, "_started", Copied)


@pytest.mark.parametrize(("full_for", "wanted"), [(2, [""] * 3), (30, [""] * 30 + ["cpu"])])
def test_rows_wait_for_room_on_the_gpu_and_are_analysed_on_the_host_if_there_is_none(
    monkeypatch: pytest.MonkeyPatch, full_for: int, wanted: list[str]
) -> None:
    tries: list[str] = []

    def full(file: int, size: int, *, device: str = "") -> Any:
        tries.append(device)
        if len(tries) <= full_for:
            os.close(file)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return unpack(file, size, device=device)

    monkeypatch.setattr(transport, "unpack", full)
    monkeypatch.setattr("anisoscope.monitor.analysis.worker._WAIT", 0.0)
    parcel = Parcel.of(torch.arange(3))
    assert _unpacked(parcel.written(), parcel.size).tolist() == [0, 1, 2] and tries == wanted


def test_on_the_host_sites_have_one_core_each_and_the_training_its_threads_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, seen = torch.get_num_threads(), list[tuple[int, int]]()
    measure = Analysis.measure

    def looked(self: Analysis, given: Any) -> Any:
        seen.append((torch.get_num_threads(), cores()))
        return measure(self, given)

    monkeypatch.setattr(Analysis, "measure", looked)
    torch.set_num_threads(2)
    try:
        Training(background=False).run()
        assert seen and set(seen) == {(1, 2)}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


class Training:
    """A short training with a monitor."""

    def __init__(self, *, stop: int = STEPS, **options: Any) -> None:
        self.model: Any = tiny("gpt2").train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0.1)
        self.stop, self.losses = stop, list[float]()
        words: dict[str, Any] = {"when": MEASURED, "counts": COUNTS, "plan": PLAN, "layers": (0, 2)}
        words |= {"optimizer": self.optimizer, "total_steps": STEPS}
        self.monitor = Monitor(self.model, **words | options)

    def run(self, start: int = 0) -> Training:
        with self.monitor:
            for step in range(start, self.stop):
                self.update(step)
        return self

    def update(self, step: int) -> None:
        torch.manual_seed(step)  # of dropout
        with self.monitor.step(step):
            loss = self.model(**batch_of("gpt2", *LENGTHS, seed=step)).loss
            loss.backward()
        self.losses.append(float(loss.detach()))
        self.optimizer.step()
        self.optimizer.zero_grad()


def same(one: Training, other: Training) -> None:
    """Trainings equal bit for bit, and tables but for the rounding of sums that begin at another place in memory."""
    assert one.losses == other.losses
    close(one.monitor.table, other.monitor.table)


def close(one: Table, other: Table) -> None:
    assert len(one) == len(other) > 0
    for name in set(one.arrow.column_names) - {"run"}:
        left, right = (table.arrow[name] for table in (one, other))
        if name == "replicates":
            left, right = (column.combine_chunks().flatten() for column in (left, right))
        if pyarrow.types.is_floating(left.type):
            numbers = (torch.tensor(column.to_pandas().to_numpy(dtype=float)) for column in (left, right))
            torch.testing.assert_close(*numbers, rtol=1e-6, atol=1e-12, equal_nan=True)
        else:
            assert left.equals(right), name


MODES: dict[str, dict[str, Any]] = {
    "live": {},
    "probe": {"probe": [probe_of("gpt2")]},
    "both": {"probe": [probe_of("gpt2")], "live": True},
    "geometry": {"probe": [probe_of("gpt2")], "plan": None, "metrics": "shape", "optimizer": None},
}


@pytest.mark.parametrize("mode", MODES)
def test_the_table_is_that_of_one_process(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mode == "both":
        monkeypatch.setattr(analysts, "_started", STARTED)
    here, there = (Training(background=b, **MODES[mode]).run() for b in (False, True))
    same(here, there)
    assert not there.monitor.notes or there.monitor.notes == here.monitor.notes
    assert here.monitor.concepts == there.monitor.concepts
    if here.monitor.plan is not None:
        site = here.monitor.instruments.sites[0]
        left, right = (one.monitor.basis(site, proxy="pca") for one in (here, there))
        assert torch.equal(left, right), "known after the process has ended"


def test_the_default_is_a_process_of_its_own_on_a_roomy_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    analysis, cpu, gpu = Training().monitor.desk.analyst.analysis, torch.device("cpu"), torch.device("cuda")
    assert isinstance(analysts.choose_analyst(analysis, cpu, background=None), HereAnalyst)
    for roomy in (True, False):
        monkeypatch.setattr(analysts, "_roomy", lambda device, roomy=roomy: roomy)
        chosen = analysts.choose_analyst(analysis, gpu, background=None)
        assert isinstance(chosen, BackgroundAnalyst if roomy else HereAnalyst)
        chosen.end()


def test_a_run_folder_and_a_resumed_run_are_those_of_one_process(tmp_path: Path) -> None:
    resumed = []
    for background, name in ((False, "here"), (True, "there")):
        first = Training(background=background, out=tmp_path / name, stop=3, **MODES["probe"]).run()
        again = Training(background=background, out=tmp_path / name, resume=True, **MODES["probe"])
        again.model.load_state_dict(first.model.state_dict())
        again.optimizer.load_state_dict(first.optimizer.state_dict())
        resumed.append(again.run(3))
        assert RunFolder(tmp_path / name).about()["status"] == "complete"
    same(*resumed)
    close(*(RunFolder(tmp_path / name).table() for name in ("here", "there")))


def test_a_state_that_is_saved_without_waiting_is_written_when_its_steps_are_known(tmp_path: Path) -> None:
    training = Training(background=True, out=tmp_path / "run", **MODES["probe"])
    here = Training(background=False, out=tmp_path / "other", **MODES["probe"])
    for one, name in ((training, "there"), (here, "here")):
        (tmp_path / name).mkdir()
        with one.monitor:
            for step in range(3):
                one.update(step)
            one.monitor.save(tmp_path / name, wait=False)
    left, right = (torch.load(tmp_path / n / "monitor.pt", weights_only=True) for n in ("here", "there"))
    assert left.keys() == right.keys() and left["done"] == right["done"] == [0, 2]
    assert str(left["study"]) == str(right["study"])


def test_what_is_asked_in_the_middle_waits_for_the_steps_before() -> None:
    training = Training(background=True, **MODES["probe"])
    with training.monitor as monitor:
        training.update(0)
        assert set(monitor.table.arrow["step"].to_pylist()) == {0}
        assert monitor.basis(monitor.instruments.sites[0], proxy="pca").ndim == 2


def worker(training: Training) -> psutil.Process:
    assert isinstance(training.monitor.desk.analyst, BackgroundAnalyst)
    return psutil.Process(training.monitor.desk.analyst._process.pid)


@pytest.mark.parametrize("kept", [True, False])
def test_a_process_that_is_killed_costs_its_steps_and_nothing_else(kept: bool, tmp_path: Path) -> None:
    plain = Training(background=False, **MODES["probe"]).run()
    training = Training(background=True, out=tmp_path / "run" if kept else None, **MODES["probe"])
    with training.monitor as monitor:
        training.update(0)
        assert len(monitor.table)
        process = worker(training)
        process.suspend()
        for step in (1, 2):
            training.update(step)
        process.kill()
        while not monitor.desk.analyst.ended:  # type: ignore[union-attr]
            time.sleep(0.01)
        for step in (3, 4):
            training.update(step)
    assert training.losses == plain.losses
    assert monitor.done == {0, 4}
    notes = " ".join(monitor.notes)
    assert "step 2: could not measure the probe" in notes and "signal 9" in notes and "from here on" in notes
    wanted = plain.monitor.table.where(metric="gradient_energy", step=4)
    found = monitor.table.where(metric="gradient_energy", step=4)
    if kept:  # the state after step 0 was kept, so that frozen proxies go on
        assert len(found) == len(wanted)
    assert len(found)


def test_an_error_of_the_analysis_is_noted_at_its_step_or_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Training(background=False, **MODES["probe"]).run()
    for strict in (False, True):
        training = Training(background=True, strict=strict, **MODES["probe"])
        training.monitor.desk.analyst.analysis.sites = None  # type: ignore[assignment]
        if strict:
            with pytest.raises(TypeError):
                training.run()
            assert not psutil.Process().children(), "the process ends also where the end raises"
            continue
        training.run()
        assert training.losses == plain.losses and not training.monitor.done
        assert any(note.startswith("step 0: could not measure the probe (TypeError") for note in training.monitor.notes)


def test_the_process_ends_with_the_monitor_also_after_an_interruption() -> None:
    training = Training(background=True)
    training.monitor.__enter__()
    process = worker(training)
    training.update(0)
    training.monitor.__exit__(KeyboardInterrupt)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    assert training.monitor.done == {0}, "what was seen before an interruption is kept"


class Unreadable:
    """A tokenizer that another process cannot load."""

    def __setstate__(self, state: Any) -> None:
        raise FileNotFoundError("no vocabulary here")

    def __getstate__(self) -> dict[str, int]:
        return {"size": 1}


def test_no_step_is_lost_to_a_process_that_cannot_begin() -> None:
    plain = Training(background=False, **MODES["probe"]).run()
    training = Training(background=True, **MODES["probe"])
    training.monitor.desk.analyst.analysis.tokenizer = Unreadable()
    training.run()
    same(plain, training)
    (note,) = training.monitor.notes
    assert note.startswith("step 0: steps are analysed in the training process from here on (the other one could not")


class Tracker:
    """Remembers which metrics came."""

    def __init__(self) -> None:
        self.got: list[tuple[int, set[str]]] = []

    def start(self, manifest: Any) -> None: ...
    def finish(self, manifest: Any) -> None: ...
    def write(self, rows: Table, step: int) -> None:
        self.got.append((step, set(rows.arrow["metric"].to_pylist())))


def test_what_is_logged_comes_after_its_step_and_no_file_stays_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, Path("tests")])  # as some scripts have it
    monkeypatch.setattr(analysts, "_started", STARTED)
    before, got = len(os.listdir("/proc/self/fd")), []
    for background in (False, True):
        options: dict[str, Any] = {"out": tmp_path / str(background), "progress": lambda *args: None}
        training = Training(background=background, sinks=[tracker := Tracker()], **options, **MODES["probe"])
        with training.monitor as monitor:
            for step in range(STEPS):
                training.update(step)
                monitor.log(step, loss=training.losses[-1])
            open_files = len(os.listdir("/proc/self/fd"))
            assert len(monitor.table)
            assert len(os.listdir("/proc/self/fd")) <= open_files, "results that are held hold no files"
        got.append(tracker.got)
        assert not monitor.notes
    assert got[0] == got[1]
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_process_that_is_stopped_or_asked_to_end_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analysts, "_PATIENCE", 0.2)
    plain = Training(background=False, **MODES["probe"]).run()
    training = Training(background=True, **MODES["probe"])
    with training.monitor:
        training.update(0)
        process = worker(training)
        for asked in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGSTOP):
            process.send_signal(asked)  # the whole group gets some of them, of a terminal or of a queue
        for step in range(1, STEPS):
            training.update(step)
        child = os.fork()
        if not child:  # a process of the loop's own leaves the block
            training.monitor.__exit__(SystemExit)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        process.send_signal(signal.SIGSTOP)
    same(plain, training)
    assert not training.monitor.notes


def test_a_process_that_is_killed_before_the_end_costs_nothing_that_is_known(tmp_path: Path) -> None:
    plain = Training(background=False, out=tmp_path / "here", **MODES["probe"]).run()
    training = Training(background=True, out=tmp_path / "there", **MODES["probe"])
    with training.monitor as monitor:
        for step in range(STEPS):
            training.update(step)
        assert len(monitor.table)
        worker(training).kill()
    same(plain, training)
    assert any("from here on (the other one has ended)" in note for note in monitor.notes)


def test_an_interruption_of_waiting_costs_no_step() -> None:
    class Interrupted(Future[Any]):
        waits = 0

        def exception(self, timeout: float | None = None) -> BaseException | None:
            self.waits += 1
            if self.waits == 1:
                raise KeyboardInterrupt
            return super().exception(timeout)

    results, future = Training(background=False).monitor.results, Interrupted()
    results.expect(OpenStep(0, parts=[("measure it", future)]))
    with pytest.raises(KeyboardInterrupt):
        results.collect(wait=True)
    future.set_result(Found([{"metric": "drift", "value": 1.0}], row_count=7))
    results.collect(wait=True)
    assert len(results.tables) == 1 and results.row_count == 7


def test_a_state_without_a_folder_is_that_of_the_last_step(tmp_path: Path) -> None:
    saved = []
    for out in (None, tmp_path / "run"):
        training = Training(background=False, out=out, **MODES["probe"])
        with training.monitor as monitor:
            for step in range(3):
                training.update(step)
                if step == 0 and out is not None:
                    monitor.files.give_up()  # as where another run has begun in it
            monitor.save(tmp_path)
        saved.append(str(torch.load(tmp_path / "monitor.pt", weights_only=True)["study"]))
    assert saved[0] == saved[1]


def test_a_monitor_is_entered_once() -> None:
    training = Training(background=False)
    with training.monitor, pytest.raises(AnisoscopeError, match="entered before"):
        training.monitor.__enter__()
    with pytest.raises(AnisoscopeError, match="entered before"), training.monitor:
        pass


def test_an_answer_that_cannot_be_sent_is_an_error_of_its_step() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        assert _sent(theirs, 3, (True, lambda: None))
        message = transport.receive(ours)
        assert message is not None and message[0] == 3
        good, error = unpack(*message[1:], copied=True)
        assert not good and isinstance(error, Exception)
        ours.close()
        assert not _sent(theirs, 4, (True, None))


@pytest.mark.slow
def test_the_process_ends_with_a_training_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time\nsys.path[:0] = ['tests']\n"
        "from monitor.test_background import Training, worker\n"
        "t = Training(background=True)\nt.monitor.__enter__()\nprint(worker(t).pid, flush=True)\ntime.sleep(60)\n"
    )
    running = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    number = int(running.stdout.readline())
    running.send_signal(signal.SIGKILL)
    running.wait()
    until = time.monotonic() + 60
    while psutil.pid_exists(number) and time.monotonic() < until:
        time.sleep(0.1)
    assert not psutil.pid_exists(number), "nobody is left behind"


@pytest.mark.slow
def test_a_script_without_a_main_guard_is_not_run_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nsys.path[:0] = ['tests']\nprint('begins', flush=True)\n"
        "from monitor.test_background import Training\nprint(len(Training(background=True).run().monitor.done))\n"
    )
    said = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout.split()
    assert said == ["begins", "3"]


def test_a_metric_of_the_script_itself_is_refused_or_analysed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def own_width(moments: Moments) -> float:
        """The number of columns."""
        return float(moments.mean.shape[-1])

    own_width.__module__ = "__main__"
    monkeypatch.setattr(declared, "REGISTRY", dict(declared.REGISTRY))
    made = declared.metric(Moments, title="Width", formula="d")(own_width)
    training = Training(background=True)
    training.monitor.desk.analyst.analysis.requests = [declared.Request(made, {})]
    with pytest.raises(AnisoscopeError, match="declared in the script itself"), training.monitor:
        pass
    monkeypatch.setattr(analysts, "_roomy", lambda device: True)
    chosen = analysts.choose_analyst(training.monitor.desk.analyst.analysis, torch.device("cuda"), background=None)
    assert isinstance(chosen, HereAnalyst)


def test_steps_wait_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Training(background=False).run()
    training = Training(background=True)
    with training.monitor as monitor:
        assert isinstance(monitor.desk.analyst, BackgroundAnalyst)
        monitor.desk.analyst._room = 1
        for step in range(STEPS):
            training.update(step)
            assert len(monitor.desk.analyst._waiting) <= 1, "no second step waits beside the first"
    same(here, training)


def test_parcels_keep_values_shapes_types_and_what_is_shared() -> None:
    rows = torch.randn(7, 5)
    given: dict[str, Any] = {
        "rows": rows,
        "again": [rows],
        "turned": rows.mT,
        "half": rows.bfloat16(),
        "none": rows[:0],
    }
    given |= {"flags": rows > 0, "number": torch.tensor(3), "text": "x" * 1000, "whole": torch.arange(5)}
    parcel = Parcel.of(given)
    rows.zero_()  # whoever owns it may go on
    found = unpack(parcel.written(), parcel.size)
    assert found["again"][0] is found["rows"] and not bool((found["rows"] == 0).any())
    assert torch.equal(found["turned"].mT, found["rows"]) and torch.equal(found["half"], found["rows"].bfloat16())
    assert found["none"].shape == (0, 5) and found["number"].shape == () and int(found["number"]) == 3
    assert found["flags"].dtype is torch.bool and found["text"] == given["text"]
    assert found["whole"].tolist() == [0, 1, 2, 3, 4]
