"""Interrupted trainings go on as if nothing had happened, and folders are protected."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from anisoscope.errors import AnisoscopeError, Interrupted
from anisoscope.training import corpus as corpus_module
from anisoscope.training import run_files as record_module
from anisoscope.training.config import TrainConfig
from anisoscope.training.loop import train
from anisoscope.training.run_files import read_log
from support.tiny_runs import TINY, Seen, about, losses, tiny, weights


class Killed(BaseException):
    """Stands for the end of the process."""


def same_weights(one: Path, two: Path) -> bool:
    a, b = weights(one), weights(two)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Kept(Seen):
    def save(self, folder: Path, *, wait: bool = True) -> None:
        (folder / "seen.json").write_text(json.dumps([self.steps, list(self.numbers.items())]))

    def load(self, folder: Path) -> None:
        self.steps, numbers = json.loads((folder / "seen.json").read_text())
        self.numbers = dict(numbers)


def kill_at(wanted: int) -> Callable[[int], None]:
    def trouble(step: int) -> None:
        if step == wanted:
            raise Killed

    return trouble


# -- interruptions -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(tokenised: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tiny(dropout=0.1), tmp_path_factory.mktemp("runs") / "undisturbed", corpus=tokenised)


@pytest.mark.parametrize("moment", [0, 1, 4, 5, 6, 10, 11, 12])
def test_a_run_killed_at_a_step_goes_on_as_if_nothing_had_happened(
    moment: int, undisturbed: Path, tokenised: Path, tmp_path: Path
) -> None:
    with pytest.raises(Killed):
        train(tiny(dropout=0.1), tmp_path / "run", monitor=Kept(kill_at(moment)), corpus=tokenised)
    torch.manual_seed(moment)  # whatever the new process's generator holds
    seen = Kept()
    out = train(tiny(dropout=0.1), tmp_path / "run", monitor=seen, corpus=tokenised, resume=True)
    assert losses(out) == losses(undisturbed)
    assert same_weights(out, undisturbed)
    assert seen.steps == list(range(13)), "no measured step is lost or repeated"
    assert [seen.numbers[s]["loss"] for s in range(12)] == losses(undisturbed)


def test_a_monitor_that_keeps_nothing_sees_steps_again(tokenised: Path, tmp_path: Path) -> None:
    seen = Seen(kill_at(8))
    with pytest.raises(Killed):
        train(tiny(), tmp_path / "run", monitor=seen, corpus=tokenised)
    seen.trouble, seen.numbers = None, {}
    train(tiny(), tmp_path / "run", monitor=seen, corpus=tokenised, resume=True)
    assert seen.steps == [*range(9), *range(5, 13)]


def test_the_state_of_the_optimiser_is_needed_for_that(undisturbed: Path, tokenised: Path, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        train(tiny(dropout=0.1), tmp_path / "run", monitor=Seen(kill_at(7)), corpus=tokenised)
    stored = tmp_path / "run" / "checkpoints" / "checkpoint-5" / "training" / "optimizer.pt"
    state = torch.load(stored, weights_only=True)
    for slot in state["state"].values():
        slot["exp_avg"].zero_()
    torch.save(state, stored)
    spoilt = losses(train(tiny(dropout=0.1), tmp_path / "run", corpus=tokenised, resume=True))
    assert spoilt[:6] == losses(undisturbed)[:6] and spoilt[6:] != losses(undisturbed)[6:]


@pytest.mark.parametrize("place", ["before the rename", "after the rename", "in the weights", "in the log"])
def test_a_kill_while_writing_spoils_nothing(
    place: str, undisturbed: Path, tokenised: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _kill_while_writing(place, monkeypatch)
    with pytest.raises(Killed):
        train(tiny(dropout=0.1), tmp_path / "run", corpus=tokenised)
    monkeypatch.undo()
    for path in (tmp_path / "run" / "checkpoints").glob("checkpoint-*"):
        assert load_file(path / "model.safetensors"), "what has its name is complete"
    out = train(tiny(dropout=0.1), tmp_path / "run", corpus=tokenised, resume=True)
    assert losses(out) == losses(undisturbed) and same_weights(out, undisturbed)
    assert not list((out / "checkpoints").glob(".*"))


def _kill_while_writing(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settle, flush = record_module._rename_synced, record_module.TrainingLog.flush
    calls = {"settle": 0, "flush": 0}

    def settled(beside: Path, target: Path) -> None:
        calls["settle"] += 1
        if calls["settle"] == 3 and place == "in the weights":
            (beside / "model.safetensors").write_bytes(b"half")
            raise Killed
        if calls["settle"] == 3 and place == "before the rename":
            raise Killed
        settle(beside, target)
        if calls["settle"] == 3 and place == "after the rename":
            raise Killed

    def flushed(self: Any, *, sync: bool = False) -> None:
        flush(self, sync=sync)
        calls["flush"] += 1
        if calls["flush"] == 9 and place == "in the log":
            with self.path.open("a") as file:
                file.write('{"step": 9, "lo')
            raise Killed

    monkeypatch.setattr(record_module, "_rename_synced", settled)
    monkeypatch.setattr(record_module.TrainingLog, "flush", flushed)


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_step_and_stops(kind: int, undisturbed: Path, tokenised: Path, tmp_path: Path) -> None:
    def trouble(step: int) -> None:
        if step == 6:
            os.kill(os.getpid(), kind)

    handler = signal.getsignal(kind)
    with pytest.raises(KeyboardInterrupt, match="after 7 updates"):
        train(tiny(dropout=0.1), tmp_path / "run", monitor=Kept(trouble), corpus=tokenised)
    assert signal.getsignal(kind) == handler
    assert about(tmp_path / "run")["status"] == "interrupted" and about(tmp_path / "run")["steps"] == 7
    seen = Kept()
    out = train(tiny(dropout=0.1), tmp_path / "run", monitor=seen, corpus=tokenised, resume=True)
    assert losses(out) == losses(undisturbed) and seen.steps == list(range(13))
    assert not (out / "checkpoints" / "checkpoint-7").exists(), "it was only for resuming"


@pytest.mark.parametrize(("kind", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_the_last_look_is_not_swallowed(kind: int, code: int, tokenised: Path, tmp_path: Path) -> None:
    def trouble(step: int) -> None:
        if step == 12:  # after the last update
            os.kill(os.getpid(), kind)

    with pytest.raises(Interrupted, match="after all 12 updates") as found:
        train(tiny(), tmp_path / "run", monitor=Kept(trouble), corpus=tokenised)
    assert found.value.code == code
    out = train(tiny(), tmp_path / "run", monitor=Kept(), corpus=tokenised, resume=True)
    assert about(out)["status"] == "complete"


def test_a_resumed_run_does_not_tokenise_or_weight_again(
    tokenised: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(frequency="flat")
    with pytest.raises(Killed):
        train(config, tmp_path / "run", monitor=Kept(kill_at(7)))
    monkeypatch.setattr(corpus_module, "_make", lambda *_: pytest.fail("tokenised again"))
    monkeypatch.setattr("anisoscope.training.language_model.resample", lambda *_, **__: pytest.fail("weighted again"))
    out = train(config, tmp_path / "run", monitor=Kept(), resume=True)
    assert about(out)["status"] == "complete" and len(losses(out)) == 12


def test_a_number_that_is_not_finite_ends_the_run_with_a_sentence(tokenised: Path, tmp_path: Path) -> None:
    with pytest.raises(
        AnisoscopeError, match=r"the (loss|gradient norm) became (nan|inf) at step \d+ .*lower the learning"
    ):
        train(tiny(lr=1e30, warmup=0, clip=0.0), tmp_path / "run", corpus=tokenised)
    lines = read_log(tmp_path / "run" / "log.jsonl")
    last = lines[-1]
    assert last["loss"] is None or last["gradient_norm"] is None, "the line is there, in valid JSON"
    assert about(tmp_path / "run")["status"] == "failed" and "learning rate" in about(tmp_path / "run")["error"]
    for path in (tmp_path / "run" / "checkpoints").glob("checkpoint-*"):
        assert all(value.isfinite().all() for value in load_file(path / "model.safetensors").values())


def test_a_folder_is_protected_from_another_run(tokenised: Path, tmp_path: Path) -> None:
    out = train(tiny(steps=2), tmp_path / "run", corpus=tokenised)
    with pytest.raises(AnisoscopeError, match="holds a run"):
        train(tiny(steps=2), out, corpus=tokenised)
    with pytest.raises(AnisoscopeError, match="a run with seed = 0, not 1"):
        train(tiny(steps=2, seed=1), out, corpus=tokenised, resume=True)
    before = (out / "log.jsonl").read_bytes()
    assert (
        train(tiny(steps=2), out, corpus=tokenised, resume=True) == out and (out / "log.jsonl").read_bytes() == before
    )


def test_a_log_that_lost_lines_is_noticed(tokenised: Path, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        train(tiny(), tmp_path / "run", monitor=Seen(kill_at(7)), corpus=tokenised)
    log = tmp_path / "run" / "log.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[2:]))
    with pytest.raises(AnisoscopeError, match="does not hold every step before 5"):
        train(tiny(), tmp_path / "run", corpus=tokenised, resume=True)


@pytest.mark.slow
def test_a_process_killed_outright_again_and_again_ends_with_the_same_numbers(tokenised: Path, tmp_path: Path) -> None:
    config = {**TINY, "steps": 60, "checkpoints": "every:7", "layers": 2, "width": 32, "dropout": 0.1}
    code = (
        "import json, sys; from anisoscope.training.loop import TrainConfig, train; "
        f"train(TrainConfig(**json.loads(sys.argv[1])), sys.argv[2], corpus={str(tokenised)!r}, resume=True)"
    )
    wanted = losses(train(TrainConfig(**config), tmp_path / "undisturbed", corpus=tokenised))
    out, kills = tmp_path / "killed", 0
    while kills < 8:
        process = subprocess.Popen([sys.executable, "-c", code, json.dumps(config), str(out)])
        already = len(read_log(out / "log.jsonl"))
        while process.poll() is None and len(read_log(out / "log.jsonl")) < min(59, already + 3 + kills):
            time.sleep(0.002)
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
    assert kills >= 3
    subprocess.run([sys.executable, "-c", code, json.dumps(config), str(out)], check=True)
    assert losses(out) == wanted and about(out)["status"] == "complete"
    one, two = weights(tmp_path / "undisturbed", 60), weights(out, 60)
    assert all(torch.equal(one[name], two[name]) for name in one)
