"""Nothing of a monitor stops a training: under every fault its losses are those of an unmonitored one, bit for bit."""

from __future__ import annotations

import copy
import dataclasses
import errno
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from anisoscope.capture.sampled_rows import SampledRows
from anisoscope.capture.step_capture import LiveGradients, MicroBatch, StepPass
from anisoscope.errors import AnisoscopeError
from anisoscope.monitor import saved_state
from anisoscope.monitor.analysis.analysis import Analysis
from anisoscope.monitor.embedding_watch import EmbeddingWatch
from anisoscope.monitor.every_step import EveryStep
from anisoscope.monitor.guard import MonitorWarning
from anisoscope.monitor.instruments import Instruments, Probe
from anisoscope.monitor.monitor import Monitor
from anisoscope.results.folder import RunFolder
from anisoscope.results.query import Table
from anisoscope.tangent.row_map import RowMap
from anisoscope.tangent.tangent_study import TangentStudy
from support.gradient_models import batch_of, hooks_of
from support.monitored import CHEAP as PLAN
from support.monitored import COUNTS, LENGTHS, probe_of
from support.tiny_models import tiny

STEPS, MEASURED = 5, [0, 2, 4]
# one layer and one proxy: what a fault does to a training does not depend on how much is measured
LAYERS = (2,)
Disturb = Callable[[int, Any], None]
MODES: dict[str, dict[str, Any]] = {
    "live": {},
    "probe": {"probe": [probe_of("gpt2")]},
    "every": {"probe": [probe_of("gpt2")], "every_step": True},
}
pytestmark = pytest.mark.filterwarnings("ignore::anisoscope.monitor.guard.MonitorWarning")


def nothing(step: int, model: Any) -> None: ...


def trained(disturb: Disturb = nothing, **options: Any) -> tuple[list[float], Monitor | None]:
    """The losses of a short training with dropout; `disturb` is called before each step, with or without a monitor."""
    model: Any = tiny("gpt2").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    torch.manual_seed(1)
    losses: list[float] = []

    def update(step: int) -> None:
        loss = model(**batch_of("gpt2", *LENGTHS, seed=step)).loss
        loss.backward()
        losses.append(loss.item())

    def after(step: int) -> None:
        optimizer.step()
        optimizer.zero_grad()

    if not options:
        for step in range(STEPS):
            disturb(step, model)
            update(step)
            after(step)
        return losses, None
    words: dict[str, Any] = {"when": MEASURED, "plan": PLAN, "metrics": "average_cosine,tangent", "counts": COUNTS}
    words["layers"] = LAYERS
    with Monitor(model, **words | {"optimizer": optimizer, "total_steps": STEPS} | options) as monitor:
        for step in range(STEPS):
            disturb(step, model)
            with monitor.step(step):
                update(step)
            monitor.log(step, loss=losses[-1])
            after(step)
    assert hooks_of(model) == 0
    return losses, monitor


@pytest.fixture(scope="module")
def plain() -> list[float]:
    return trained()[0]


def same(one: list[float], two: list[float]) -> bool:
    known = (torch.tensor(losses).nan_to_num(9.0) for losses in (one, two))
    return len(one) == STEPS and torch.equal(*known)


# -- the disk ----------------------------------------------------------------------------------------------------------


def disk_that_fails(patch: pytest.MonkeyPatch, name: str, *, code: int = errno.ENOSPC) -> dict[str, bool]:
    """Every write of a file whose name holds `name` fails while `broken["now"]`."""
    broken, sync = {"now": True, "hit": False}, os.fsync

    def fails(handle: int) -> None:
        if broken["now"] and name in Path(os.readlink(f"/proc/self/fd/{handle}")).name:
            broken["hit"] = True
            raise OSError(code, os.strerror(code))
        sync(handle)

    patch.setattr(os, "fsync", fails)
    return broken


FILES = ["step-", "window-", "concepts", "table.parquet", "loss", "map", "every", "finish", "every_step.parquet"]


@pytest.mark.parametrize(
    "name",
    [
        n if n in ("step-", "table.parquet", "every_step.parquet") else pytest.param(n, marks=pytest.mark.slow)
        for n in FILES
    ],
)
def test_a_full_disk_at_any_write_stops_nothing(
    name: str, tmp_path: Path, plain: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = dataclasses.replace(PLAN, proxies=("semi_nmf",))  # has concepts
    broken = disk_that_fails(monkeypatch, name)
    with pytest.warns(MonitorWarning, match="No space left on device"):
        losses, monitor = trained(out=tmp_path / "run", **MODES["every"], plan=plan)
    assert broken["hit"] and same(losses, plain)
    assert monitor is not None and monitor.done == set(MEASURED)
    assert set(monitor.table.arrow["step"].to_pylist()) == set(MEASURED)
    noted = RunFolder(tmp_path / "run").about()["warnings"]
    assert any("No space left" in note and note.startswith(("step", "the end")) for note in noted), noted


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EFBIG])
def test_a_disk_that_takes_nothing_at_all_leaves_the_table_in_memory(
    code: int, tmp_path: Path, plain: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = disk_that_fails(monkeypatch, "", code=code)
    broken["now"] = False

    def fill(step: int, model: Any) -> None:
        broken["now"] = step >= 1

    losses, monitor = trained(fill, out=tmp_path / "run", **MODES["every"])
    assert same(losses, plain) and monitor is not None
    assert set(monitor.table.arrow["step"].to_pylist()) == set(MEASURED)
    parts = [Table.read(path) for path in (tmp_path / "run" / "parts").glob("step-*.parquet")]
    assert {step for part in parts for step in part.arrow["step"].to_pylist()} == {0}, "what was written is readable"


def test_once_there_is_room_again_everything_is_written(
    tmp_path: Path, plain: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = disk_that_fails(monkeypatch, "")
    broken["now"] = False

    def fill(step: int, model: Any) -> None:
        broken["now"] = step in (1, 2)

    losses, monitor = trained(fill, out=tmp_path / "run", **MODES["every"])
    assert same(losses, plain) and monitor is not None
    trained(out=tmp_path / "whole", **MODES["every"])
    found, wanted = (RunFolder(tmp_path / name).table().arrow.drop(["run", "replicates"]) for name in ("run", "whole"))
    assert found.to_pandas().equals(wanted.to_pandas())
    names = {path.name for path in (tmp_path / "run" / "parts").iterdir()}
    assert names == {path.name for path in (tmp_path / "whole" / "parts").iterdir()}


@pytest.mark.parametrize("mode", MODES)
def test_a_run_folder_that_is_deleted_is_written_again(mode: str, tmp_path: Path, plain: list[float]) -> None:
    def delete(step: int, model: Any) -> None:
        if step == 2 and (tmp_path / "run").exists():
            shutil.rmtree(tmp_path / "run")

    losses, monitor = trained(delete, out=tmp_path / "run", **MODES[mode])
    assert same(losses, plain) and monitor is not None
    table = RunFolder(tmp_path / "run").table()
    assert set(table.arrow["step"].to_pylist()) == set(MEASURED)
    steps = sorted(path.stem for path in (tmp_path / "run" / "parts").glob("step-*.parquet"))
    assert steps == [f"step-{step:09d}" for step in MEASURED]
    assert any("deleted" in note and "step 2" in note for note in RunFolder(tmp_path / "run").about()["warnings"])


# -- the model ---------------------------------------------------------------------------------------------------------


def clear(step: int, model: Any) -> None:
    if step == 2:
        for module in model.modules():
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()


def replace_block(step: int, model: Any) -> None:
    if step == 2:
        model.transformer.h[1] = copy.deepcopy(model.transformer.h[1])


def remove_block(step: int, model: Any) -> None:
    if step == 2:
        del model.transformer.h[1]


def poison(step: int, model: Any) -> None:
    if step == 2:
        with torch.no_grad():
            model.transformer.h[0].mlp.c_fc.bias[0] = torch.nan


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("disturb", [clear, replace_block, remove_block, poison])
def test_a_model_that_others_change_goes_on_training(disturb: Disturb, mode: str, tmp_path: Path) -> None:
    plain, _ = trained(disturb)
    losses, monitor = trained(disturb, out=tmp_path / "run", **MODES[mode])
    assert same(losses, plain) and monitor is not None
    table = RunFolder(tmp_path / "run").table()
    assert 0 in table.arrow["step"].to_pylist(), "what was measured before stays"
    if disturb in (clear, replace_block) and mode != "probe":
        assert any("attached again" in note and "step 2" in note for note in monitor.notes), monitor.notes
        assert set(table.where(metric="gradient_energy").arrow["step"].to_pylist()) == set(MEASURED)
    if disturb is remove_block:
        assert any("step 2" in note for note in monitor.notes), monitor.notes
    if mode == "every" and disturb is clear:
        assert set(monitor.trace.arrow["step"].to_pylist()) == set(range(STEPS))


# -- errors of our own -------------------------------------------------------------------------------------------------


def out_of_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def broken_code(*_: Any, **__: Any) -> Any:
    raise RuntimeError("the size of tensor a (3) must match the size of tensor b (4)")


PLACES: list[tuple[Any, str, tuple[str, ...]]] = [
    (TangentStudy, "alone", ("live", "probe")),
    (Instruments, "bank", ("live", "probe")),
    (Instruments, "seen", ("live", "probe")),
    (Analysis, "measure", ("live", "probe")),
    (Analysis, "concepts", ("probe",)),
    (Probe, "run", ("probe",)),
    (RowMap, "rows", ("probe",)),
    (RowMap, "close", ("probe",)),
    (LiveGradients, "_begin", ("live",)),
    (LiveGradients, "_end", ("live",)),
    (LiveGradients, "rows", ("live",)),
    (LiveGradients, "_watch", ("live",)),
    (LiveGradients, "end", ("live",)),
    (MicroBatch, "receive", ("live",)),
    (StepPass, "receive", ("live",)),
    (SampledRows, "_begin", ("every",)),
    (SampledRows, "_send", ("every",)),
    (SampledRows, "_read", ("every",)),
    (EveryStep, "end", ("every",)),
    (EveryStep, "_take", ("every",)),
    (EveryStep, "table", ("every",)),
    (EmbeddingWatch, "updates", ("live", "probe")),
    (EmbeddingWatch, "close", ("live", "probe")),
    (EmbeddingWatch, "_shrink", ("live", "probe")),
    (EmbeddingWatch, "_decay", ("live", "probe")),
    (saved_state, "state_of", ("live", "probe")),
    (Monitor, "_finish", ("live", "probe")),
]
CASES = [(owner, name, mode) for owner, name, modes in PLACES for mode in modes]
FIRST = [(owner, name, modes[0]) for owner, name, modes in PLACES]  # in every run of the tests


@pytest.mark.parametrize(
    ("owner", "name", "mode"),
    [
        pytest.param(
            *case, id=f"{case[0].__name__}.{case[1]}-{case[2]}", marks=[] if case in FIRST else pytest.mark.slow
        )
        for case in CASES
    ],
)
def test_an_error_anywhere_inside_is_noted_and_passes(
    owner: Any, name: str, mode: str, tmp_path: Path, plain: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = out_of_memory if name in ("alone", "measure", "run", "receive") else broken_code
    works, now = getattr(owner, name), {"step": 0}

    def disturb(step: int, model: Any) -> None:
        now["step"] = step

    def fails(*args: Any, **kwargs: Any) -> Any:  # for one step
        return (fault if now["step"] == 2 or name == "_finish" else works)(*args, **kwargs)

    monkeypatch.setattr(owner, name, fails)
    losses, monitor = trained(disturb, out=tmp_path / "run", **MODES[mode])
    assert same(losses, plain) and monitor is not None
    where = "the end" if name == "_finish" else "step 2"
    said = "out of memory" if fault is out_of_memory else "size of tensor"
    assert any(note.startswith(where) and said in note for note in monitor.notes), monitor.notes
    assert {0, 4} <= monitor.done, "afterwards it measures again"
    table = RunFolder(tmp_path / "run").table()
    assert {0, 4} <= set(table.where(metric="gradient_energy").arrow["step"].to_pylist())
    assert said in " ".join(RunFolder(tmp_path / "run").about()["warnings"])


@pytest.mark.parametrize(("owner", "name", "mode"), [CASES[0], CASES[10], CASES[13], CASES[18]])
def test_a_strict_monitor_raises(
    owner: Any, name: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, broken_code)
    with pytest.raises(RuntimeError, match="size of tensor"):
        trained(out=tmp_path / "run", strict=True, **MODES[mode])


def test_a_strict_monitor_raises_for_a_full_disk_and_cleared_hooks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AnisoscopeError, match="hooks were removed"):
        trained(clear, out=tmp_path / "hooks", strict=True)
    disk_that_fails(monkeypatch, "step-")
    with pytest.raises(OSError, match="No space left"):
        trained(out=tmp_path / "disk", strict=True)


def test_warnings_that_are_errors_stop_nothing(plain: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TangentStudy, "alone", out_of_memory)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MonitorWarning)
        losses, _ = trained(**MODES["live"], live=True)
    assert same(losses, plain)


def test_a_kind_of_fault_is_noted_once_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TangentStudy, "alone", out_of_memory)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        _, monitor = trained(**MODES["live"], live=True)
    assert monitor is not None
    faults = [note for note in monitor.notes if "out of memory" in note]
    assert len(faults) == 1 and faults[0].startswith("step 0:") and "2 times more, the last at step 4" in faults[0]
    ours = [str(w.message) for w in seen if isinstance(w.message, MonitorWarning)]
    assert sum("out of memory" in text for text in ours) == 1
    assert any("not one step was measured" in text for text in ours), "an empty table is never the silent end"


# -- errors of the user ------------------------------------------------------------------------------------------------


class Odd(Exception):
    pass


def failing(error: BaseException, made: list[Monitor], **options: Any) -> None:
    """A training that raises inside its second step."""
    model = tiny("gpt2").train()
    with Monitor(model, when=[0, 1], plan=PLAN, layers=LAYERS, **options) as monitor:
        made.append(monitor)
        for step in range(2):
            with monitor.step(step):
                model(**batch_of("gpt2", *LENGTHS)).loss.backward()
                if step:
                    raise error


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("error", [Odd("mine"), KeyboardInterrupt(), SystemExit(3), StopIteration(), GeneratorExit()])
def test_errors_of_the_training_pass_unchanged(error: BaseException, mode: str, tmp_path: Path) -> None:
    monitors: list[Monitor] = []
    with pytest.raises(type(error)) as found:
        failing(error, monitors, out=tmp_path, **MODES[mode])
    assert found.value is error
    assert set(monitors[0].table.arrow["step"].to_pylist()) >= {0}
    assert RunFolder(tmp_path).about()["status"] == "interrupted"


def test_an_error_of_the_training_is_not_replaced_by_one_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_that_fails(monkeypatch, "table.parquet")
    error = Odd("mine")
    for strict in (False, True):
        with pytest.raises(Odd) as found:
            failing(error, [], out=tmp_path / str(strict), strict=strict)
        assert found.value is error


def test_an_interrupt_inside_a_hook_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    for owner, name in ((LiveGradients, "rows"), (MicroBatch, "receive"), (TangentStudy, "alone")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                trained(live=True)


def test_a_step_after_the_end_only_warns() -> None:
    _, monitor = trained(live=True)
    assert monitor is not None
    with pytest.warns(MonitorWarning, match="has ended"), monitor.step(9):
        pass


# -- nothing was seen --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["live", "every"])
def test_a_monitor_that_saw_nothing_says_so_at_the_first_step(mode: str) -> None:
    other: nn.Module = tiny("gpt2").train()

    def elsewhere(**options: Any) -> Monitor:
        with Monitor(tiny("gpt2").train(), when=[0, 1], plan=PLAN, layers=LAYERS, **MODES[mode], **options) as monitor:
            for step in range(2):
                with monitor.step(step):
                    other(**batch_of("gpt2", *LENGTHS)).loss.backward()
        return monitor

    with pytest.warns(MonitorWarning, match=r"step 0: .*(no forward pass was seen|saw no training pass) in step 0"):
        monitor = elsewhere()
    assert any("in step 0" in note for note in monitor.notes)
    with pytest.raises(AnisoscopeError, match=r"(no forward pass was seen|saw no training pass) in step 0"):
        elsewhere(strict=True)


def test_a_probe_with_live_gradients_that_never_come_says_so() -> None:
    with (
        pytest.warns(MonitorWarning, match="no forward pass was seen in step 0"),
        Monitor(tiny("gpt2"), when=[0], plan=PLAN, probe=[probe_of("gpt2")], live=True) as monitor,
        monitor.step(0),
    ):
        pass
    assert set(monitor.table.arrow["step"].to_pylist()) == {0}, "the probe was measured"


def test_a_monitor_without_a_measured_step_does_not_end_silently() -> None:
    model = tiny("gpt2")
    with pytest.warns(MonitorWarning, match=r"5 steps were seen and 0 of them"):
        trained(when=[99])
    with pytest.warns(MonitorWarning, match=r"around every update"), Monitor(model, when=[0]):
        model(**batch_of("gpt2", *LENGTHS)).loss.backward()
    with pytest.raises(AnisoscopeError, match="not one step was measured"), Monitor(model, when=[0], strict=True):
        pass


def test_an_embedding_table_of_another_size_begins_a_new_interval() -> None:
    model: Any = tiny("gpt2")
    watch = EmbeddingWatch(model)
    watch.attach()
    watch.remember(0)
    model(input_ids=torch.arange(8)[None])
    model.resize_token_embeddings(model.config.vocab_size + 8)
    watch.close()
    assert not list(watch.updates())
    watch.remember(1)
    model(input_ids=torch.arange(model.config.vocab_size)[None, :60])
    watch.close()
    assert [types.tolist() for _, types, _ in watch.updates()] == [list(range(60))]
    watch.detach()


def test_a_copy_of_the_model_is_not_taken_for_it() -> None:
    """Averaged weights and target networks are deep copies, which have copies of the hooks."""
    model = tiny("gpt2").eval()
    with Monitor(model, when=[0], metrics="average_cosine") as monitor:
        other = copy.deepcopy(model)
        with monitor.step(0):
            other(**batch_of("gpt2", *LENGTHS, seed=5)).loss.backward()
            model(**batch_of("gpt2", *LENGTHS)).loss.backward()
    alone = tiny("gpt2").eval()
    with Monitor(alone, when=[0], metrics="average_cosine") as wanted, wanted.step(0):
        alone(**batch_of("gpt2", *LENGTHS)).loss.backward()
    assert monitor.table.arrow["value"].to_pylist() == wanted.table.arrow["value"].to_pylist()
