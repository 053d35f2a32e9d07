"""A run folder that cannot be used, fills up or is lost stops nothing; afterwards it has all that memory had."""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from anisoscope.errors import AnisoscopeError
from anisoscope.monitor.guard import MonitorWarning
from anisoscope.monitor.monitor import Monitor
from anisoscope.results.folder import RunFolder
from anisoscope.results.query import Table
from anisoscope.tangent.plan import TangentPlan
from anisoscope.tangent.row_map import RowMap
from support.gradient_models import batch_of, hooks_of
from support.monitored import LENGTHS, probe_of
from support.tiny_models import tiny

STEPS = 4
PLAN = TangentPlan(rank=4, draws=19, proxies=("pca",), balanced=False, standardised=False, embedding=False)
MODES: dict[str, dict[str, Any]] = {"probe": {"probe": [probe_of("gpt2")], "every_step": True}, "live": {}}
Disturb = Callable[[int], None]
pytestmark = pytest.mark.filterwarnings("ignore::anisoscope.monitor.guard.MonitorWarning")


def weights_after(disturb: Disturb = lambda step: None, **options: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """The weights after a short training with dropout, and its monitor if it has one."""
    model: Any = tiny("gpt2").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)

    def update(step: int) -> None:
        model(**batch_of("gpt2", *LENGTHS, seed=step)).loss.backward()

    if not options:
        for step in range(STEPS):
            update(step)
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict(), None
    words: dict[str, Any] = {"when": [0, 1, 3], "plan": PLAN, "metrics": "drift,tangent", "total_steps": STEPS}
    words["layers"] = (0, 2)
    with Monitor(model, optimizer=optimizer, **words | options) as monitor:
        for step in range(STEPS):
            disturb(step)
            with monitor.step(step):
                update(step)
            optimizer.step()
            optimizer.zero_grad()
    assert hooks_of(model) == 0
    return model.state_dict(), monitor


@pytest.fixture(scope="module")
def plain() -> dict[str, torch.Tensor]:
    return weights_after()[0]


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


class Disk:
    """Lets no file below a folder be made, written or deleted while `code` is set, from the k-th attempt on."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.code, self.left, self.seen = str(folder), 0, 0, 0
        for owner, name in ((os, "mkdir"), (os, "link"), (os, "replace"), (os, "unlink"), (os, "rename")):
            self._watch(owner, name, patch)
        self._watch_open(builtins, patch)
        self._watch_open(io, patch)  # pathlib's
        sync = os.fsync

        def fsync(handle: int) -> None:
            self._touch(os.readlink(f"/proc/self/fd/{handle}"))
            sync(handle)

        patch.setattr(os, "fsync", fsync)

    def _touch(self, path: Any) -> None:
        if not str(path).startswith(self.folder):
            return
        self.seen += 1
        self.left -= 1
        if self.code and self.left < 0:
            raise OSError(self.code, os.strerror(self.code), str(path))

    def _watch(self, owner: Any, name: str, patch: pytest.MonkeyPatch) -> None:
        real = getattr(owner, name)

        def act(path: Any, *args: Any, **kwargs: Any) -> Any:
            self._touch(path)
            return real(path, *args, **kwargs)

        patch.setattr(owner, name, act)

    def _watch_open(self, owner: Any, patch: pytest.MonkeyPatch) -> None:
        real = owner.open

        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if set(mode) & set("wxa+"):
                self._touch(file)
            return real(file, mode, *args, **kwargs)

        patch.setattr(owner, "open", opened)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(tmp_path / "run", monkeypatch)


def rows_of(table: Table) -> Any:
    return table.arrow.drop(["run"]).to_pylist()


def files_of(folder: Path) -> set[str]:
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return {name for name in found if "every-" not in name}  # their number depends on when they could be written


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of undisturbed runs."""
    found = {mode: tmp_path_factory.mktemp(mode) / "run" for mode in MODES}
    for mode, options in MODES.items():
        weights_after(out=found[mode], **options)
    return found


def assert_whole(folder: Path, wanted: Path) -> None:
    """Everything that an undisturbed run has is there, and the state of its last step can be gone on from."""
    one, two = RunFolder.open(folder), RunFolder.open(wanted)
    assert repr(rows_of(one.table())) == repr(rows_of(two.table()))
    older = {f"state/step-{step:09d}.pt" for step in (0, 1)}  # with the last state they are of no use
    assert files_of(folder) - older == files_of(wanted) - older
    assert one.about()["status"] == "complete"
    for site, other in zip(one.row_map(), two.row_map(), strict=True):
        assert repr(site) == repr(other)


CODES = [errno.ENOSPC, errno.EROFS, errno.EACCES]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("code", CODES)
def test_a_folder_that_never_can_be_used_stops_nothing(
    code: int, mode: str, tmp_path: Path, plain: dict[str, torch.Tensor], disk: Disk
) -> None:
    disk.code = code
    with pytest.warns(MonitorWarning, match=os.strerror(code)) as seen:
        weights, monitor = weights_after(out=tmp_path / "run", **MODES[mode])
    assert same(weights, plain) and not (tmp_path / "run").exists()
    assert monitor.done == {0, 1, 3} and len(monitor.table)
    told = [str(w.message) for w in seen if os.strerror(code) in str(w.message)]
    assert len(told) == 1 and "before the first step" in told[0]
    assert sum(os.strerror(code) in note for note in monitor.notes) == 1


def test_a_strict_monitor_says_so_in_one_sentence(tmp_path: Path, disk: Disk) -> None:
    disk.code = errno.ENOSPC
    with pytest.raises(AnisoscopeError, match=r"cannot be used \(No space left on device\); make room"):
        weights_after(out=tmp_path / "run", strict=True)
    disk.left = disk.code = 0
    monitor = Monitor(tiny("gpt2"), when=[0], metrics="drift", out=tmp_path / "run", strict=True)
    disk.code = errno.ENOSPC
    with pytest.raises(AnisoscopeError, match=r"could not write run\.json .*No space left"), monitor:
        pass


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("until", [1, 2, STEPS])
def test_a_folder_that_can_be_used_later_is_written_then(
    until: int, mode: str, tmp_path: Path, whole: dict[str, Path], disk: Disk
) -> None:
    disk.code = errno.ENOSPC

    def room(step: int) -> None:
        disk.code = errno.ENOSPC if step < until else 0

    weights_after(room, out=tmp_path / "run", **MODES[mode])
    if until < STEPS:
        assert_whole(tmp_path / "run", whole[mode])
        notes = RunFolder(tmp_path / "run").about()["warnings"]
        assert any(
            "can be used now" in note and note.startswith(f"step {until if until != 2 else 3}") for note in notes
        )


def test_a_state_that_a_full_disk_refused_is_written_at_the_end(
    tmp_path: Path, whole: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from anisoscope.monitor.files import MonitorFiles

    disk, write_end = Disk(tmp_path / "run", monkeypatch), MonitorFiles.write_end

    def with_room(self: Any, *args: Any, **kwargs: Any) -> None:
        disk.code = 0
        write_end(self, *args, **kwargs)

    def fill(step: int) -> None:
        disk.code = errno.ENOSPC if step == 3 else 0

    monkeypatch.setattr(MonitorFiles, "write_end", with_room)
    weights_after(fill, out=tmp_path / "run", **MODES["probe"])
    assert_whole(tmp_path / "run", whole["probe"])
    late, usual = (torch.load(path / "state" / "step-000000003.pt") for path in (tmp_path / "run", whole["probe"]))
    assert late.keys() == usual.keys() and late["done"] == usual["done"]
    assert torch.equal(late["watch"]["seen"], usual["watch"]["seen"]), "it is the state of its step, not of the end"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "at", [0, STEPS - 1, *(pytest.param(at, marks=pytest.mark.slow) for at in range(1, STEPS - 1))]
)
def test_a_folder_deleted_at_any_step_is_whole_again(
    at: int, mode: str, tmp_path: Path, plain: dict[str, torch.Tensor], whole: dict[str, Path]
) -> None:
    def delete(step: int) -> None:
        if step == at:
            shutil.rmtree(tmp_path / "run")

    weights, _ = weights_after(delete, out=tmp_path / "run", **MODES[mode])
    assert same(weights, plain)
    assert_whole(tmp_path / "run", whole[mode])
    notes = [note for note in RunFolder(tmp_path / "run").about()["warnings"] if "deleted" in note]
    assert len(notes) == 1 and notes[0].startswith(f"step {at if at != 2 else 3}:")


def test_a_folder_deleted_after_the_last_measured_step_is_whole_again(tmp_path: Path) -> None:
    def delete(step: int) -> None:
        if step == 3:
            shutil.rmtree(tmp_path / "run")

    for name, disturb in (("whole", lambda step: None), ("run", delete)):
        weights_after(disturb, out=tmp_path / name, when=[0, 1], **MODES["probe"])
    assert_whole(tmp_path / "run", tmp_path / "whole")


def test_a_folder_replaced_by_a_file_is_written_when_the_file_is_gone(
    tmp_path: Path, plain: dict[str, torch.Tensor], whole: dict[str, Path]
) -> None:
    def replace(step: int) -> None:
        if step == 1:
            shutil.rmtree(tmp_path / "run")
            (tmp_path / "run").write_text("mine")
        elif step == 2:
            (tmp_path / "run").unlink()

    weights, _ = weights_after(replace, out=tmp_path / "run", **MODES["probe"])
    assert same(weights, plain)
    assert_whole(tmp_path / "run", whole["probe"])


def test_a_run_that_others_began_in_the_meantime_is_left_alone(
    tmp_path: Path, whole: dict[str, Path], disk: Disk, plain: dict[str, torch.Tensor]
) -> None:
    disk.code = errno.ENOSPC

    def begun(step: int) -> None:
        if step == 1:
            disk.code = 0
            shutil.copytree(whole["live"], tmp_path / "run")

    weights, monitor = weights_after(begun, out=tmp_path / "run", **MODES["probe"])
    assert same(weights, plain) and monitor.done == {0, 1, 3}
    assert any("holds a monitored run" in note for note in monitor.notes)
    assert files_of(tmp_path / "run") == files_of(whole["live"])


def test_a_map_too_large_for_memory_says_what_it_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anisoscope.tangent.row_map.HELD", 0)

    def delete(step: int) -> None:
        if step == 3:
            shutil.rmtree(tmp_path / "run")

    _, monitor = weights_after(delete, out=tmp_path / "run", **MODES["probe"])
    assert any("but for the rows of 2 earlier steps" in note for note in monitor.notes)
    assert {step for site in RunFolder(tmp_path / "run").row_map() for step in site.at} == {3}


def test_a_map_saves_what_it_could_not(tmp_path: Path) -> None:
    kept = RowMap(folder=tmp_path)
    kept._steps, kept._unsaved = {1: {}}, {1}
    assert set(kept.state()["steps"]) == {1}
    kept.save()
    assert not kept._unsaved and (tmp_path / "map-000000001.pt").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_disk_that_is_full_from_any_attempt_on_stops_nothing(
    mode: str, tmp_path: Path, plain: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        count = Disk(tmp_path / "counted", patch)
        weights_after(out=tmp_path / "counted", **MODES[mode])
    for k in range(0, count.seen - 1, 3):  # the last attempt takes the lock off, after all is written
        with monkeypatch.context() as patch:
            disk = Disk(tmp_path / str(k), patch)
            disk.code, disk.left = errno.ENOSPC, k
            weights, monitor = weights_after(out=tmp_path / str(k), **MODES[mode])
        assert same(weights, plain), k
        assert monitor.done == {0, 1, 3} and any("No space left" in note for note in monitor.notes), k


@pytest.mark.parametrize("mode", MODES)
def test_a_link_in_a_circle_in_place_of_the_folder_stops_nothing(
    mode: str, tmp_path: Path, plain: dict[str, torch.Tensor]
) -> None:
    def circle(step: int) -> None:
        if step == 1:
            shutil.rmtree(tmp_path / "run")
            (tmp_path / "run").symlink_to(tmp_path / "run")

    weights, monitor = weights_after(circle, out=tmp_path / "run", **MODES[mode])
    assert same(weights, plain) and monitor.done == {0, 1, 3}
    weights, monitor = weights_after(out=tmp_path / "run", **MODES[mode])  # there from the start
    assert same(weights, plain) and monitor.done == {0, 1, 3}


@pytest.mark.parametrize("mode", MODES)
def test_a_training_that_goes_to_another_directory_has_one_folder(
    mode: str, tmp_path: Path, whole: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    weights_after(lambda step: os.chdir(tmp_path / "other"), out="run", **MODES[mode])
    assert_whole(tmp_path / "run", whole[mode])
    assert not list((tmp_path / "other").iterdir())


@pytest.mark.parametrize("background", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_current_directory_that_is_gone_stops_nothing(
    background: bool, tmp_path: Path, plain: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    weights, monitor = weights_after(out="run", background=background)
    os.chdir(tmp_path)
    assert same(weights, plain) and monitor.done == {0, 1, 3}
