"""The training loop: the same numbers whatever interrupts it, every step watched once, the folder always complete."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import anisoscope
from anisoscope.errors import AnisoscopeError
from anisoscope.training import checkpoints as checkpoints_module
from anisoscope.training import corpus as corpus_module
from anisoscope.training import log as log_module
from anisoscope.training.corpus import prepare_corpus
from anisoscope.training.log import read_log
from anisoscope.training.loop import TrainConfig, Trainer, make_stream, train
from anisoscope.training.models import build_model

TINY: dict[str, Any] = {
    "layers": 1,
    "width": 16,
    "heads": 2,
    "context": 16,
    "batch_size": 4,
    "steps": 12,
    "lr": 3e-3,
    "limit": 0.1,
    "device": "cpu",
    "checkpoints": "0,every:5",
}


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "corpus"
    prepare_corpus("embedded", folder, limit=TINY["limit"])
    return folder


def tiny(**more: Any) -> TrainConfig:
    return TrainConfig(**TINY | more)


def losses(out: Path) -> list[float]:
    lines = read_log(out / "log.jsonl")
    assert [line["step"] for line in lines] == list(range(len(lines))), "each step once, in order"
    return [line["loss"] for line in lines]


def weights(out: Path, step: int = 12) -> dict[str, torch.Tensor]:
    return load_file(out / "checkpoints" / f"checkpoint-{step}" / "model.safetensors")


def about(out: Path) -> dict[str, Any]:
    return json.loads((out / "run.json").read_text())


def same_weights(one: Path, two: Path) -> bool:
    a, b = weights(one), weights(two)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Seen:
    """A monitor that only notes what it saw, and can go back."""

    def __init__(self, trouble: Callable[[int], None] | None = None) -> None:
        self.steps: list[int] = []
        self.numbers: dict[int, dict[str, float]] = {}
        self.trouble = trouble

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        self.steps.append(step)
        if self.trouble is not None:
            self.trouble(step)
        yield

    def log(self, step: int, **numbers: float) -> None:
        assert step not in self.numbers, "each step is logged once"
        self.numbers[step] = numbers


class Kept(Seen):
    def save(self, folder: Path) -> None:
        (folder / "seen.json").write_text(json.dumps([self.steps, list(self.numbers.items())]))

    def load(self, folder: Path) -> None:
        self.steps, numbers = json.loads((folder / "seen.json").read_text())
        self.numbers = dict(numbers)


def kill_at(wanted: int) -> Callable[[int], None]:
    def trouble(step: int) -> None:
        if step == wanted:
            raise Killed

    return trouble


# -- one run -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["decoder", "encoder"])
def test_a_run_writes_its_log_its_checkpoints_and_what_it_was(arch: str, text: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    config = tiny(arch=arch, steps=40, checkpoints="log")
    out = train(
        config, tmp_path / "run", corpus=text, command=["train", "--arch", arch], progress=lambda *x: told.append(x)
    )
    lines = read_log(out / "log.jsonl")
    assert list(lines[0]) == ["step", "loss", "gradient_norm", "learning_rate", "tokens", "seconds"]
    assert [line["learning_rate"] for line in lines] == [config.learning_rate(s) for s in range(40)]
    assert lines[-1]["tokens"] == 40 * 4 * 16 and lines[-1]["seconds"] >= lines[0]["seconds"]
    assert sum(losses(out)[-5:]) < 0.9 * sum(losses(out)[:5]), "it learns"
    kept = sorted(int(p.name.partition("-")[2]) for p in (out / "checkpoints").iterdir())
    assert kept == [0, 1, 2, 4, 8, 16, 32, 40]
    record = about(out)
    assert record["status"] == "complete" and record["steps"] == 40 and record["command"] == ["train", "--arch", arch]
    assert record["seed"] == 0 and record["config"]["arch"] == arch and record["device"] == "cpu"
    assert len(record["data"]["fingerprint"]) == 64 and record["versions"]["torch"] == torch.__version__
    assert record["models"][0]["parameters"] > 1000 and record["wall_seconds"] > 0
    assert ("train", 40, 40) in told and told[0] == ("corpus", 0, 1)


def test_a_checkpoint_can_be_profiled(text: Path, tmp_path: Path) -> None:
    out = train(tiny(steps=2, checkpoints="none"), tmp_path / "run", corpus=text)
    table = anisoscope.profile(
        str(out / "checkpoints" / "checkpoint-2"),
        out=tmp_path / "profile",
        tokens=256,
        metrics=("average_cosine",),
        sites=("resid",),
        device="cpu",
    )
    assert all(math.isfinite(row["value"]) for row in table.arrow.to_pylist())
    assert table.about["data"]["context_length"] == TINY["context"]


def test_only_the_newest_checkpoint_keeps_what_resuming_needs(text: Path, tmp_path: Path) -> None:
    out = train(tiny(), tmp_path / "run", corpus=text)
    found = {p.name: (p / "training").is_dir() for p in (out / "checkpoints").iterdir()}
    assert found == {"checkpoint-0": False, "checkpoint-5": False, "checkpoint-10": False, "checkpoint-12": True}
    assert all((out / "checkpoints" / name / "model.safetensors").is_file() for name in found)


def test_checkpoint_zero_holds_the_initial_weights(text: Path, tmp_path: Path) -> None:
    config = tiny(steps=1)
    out = train(config, tmp_path / "run", corpus=text)
    fresh = build_model(config, vocab_size=about(out)["data"]["vocab_size"]).state_dict()
    stored = weights(out, 0)
    assert all(torch.equal(fresh[name], value) for name, value in stored.items())
    assert not all(torch.equal(weights(out, 1)[name], value) for name, value in stored.items())


def test_micro_batches_add_up_to_the_mean_gradient(text: Path, tmp_path: Path) -> None:
    config = tiny(accumulate=3, dtype="float64")
    stream = make_stream(config, tmp_path, corpus=text)
    model = build_model(config, vocab_size=stream.corpus.vocab_size)
    whole = {name: torch.cat([stream.batch(2, m)[name] for m in range(3)]) for name in ("input_ids", "labels")}
    loss = model(**whole).loss
    loss.backward()
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    found = Trainer.backward(_standing(config, stream, model), 2)
    assert found.item() == pytest.approx(loss.item(), rel=1e-6), "transformers computes the loss in float32"
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(wanted, grads, strict=True))


def _standing(config: TrainConfig, stream: Any, model: Any) -> Trainer:
    trainer = object.__new__(Trainer)
    trainer.config, trainer.stream, trainer.forward = config, stream, model
    return trainer


def test_the_logged_norm_is_that_before_clipping(text: Path, tmp_path: Path) -> None:
    runs = [train(tiny(steps=1, clip=clip), tmp_path / str(clip), corpus=text) for clip in (0.0, 1e-3)]
    free, clipped = (read_log(out / "log.jsonl")[0]["gradient_norm"] for out in runs)
    assert free == clipped and free > 1e-2


def test_training_leaves_the_global_generator_alone(text: Path, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    train(tiny(steps=2, dropout=0.2), tmp_path / "run", corpus=text)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_seeds_repeat_and_differ(dropout: float, text: Path, tmp_path: Path) -> None:
    series = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.manual_seed(len(series))
        series.append(losses(train(tiny(steps=4, seed=seed, dropout=dropout), tmp_path / name, corpus=text)))
    assert series[0] == series[1] != series[2]


def test_autocast_trains_in_bfloat16(text: Path, tmp_path: Path) -> None:
    half = losses(train(tiny(steps=5, dtype="bfloat16"), tmp_path / "half", corpus=text))
    full = losses(train(tiny(steps=5), tmp_path / "full", corpus=text))
    assert half != full and half == pytest.approx(full, rel=0.02)


def test_resampled_runs_record_what_was_reached(text: Path, tmp_path: Path) -> None:
    out = train(tiny(steps=2, frequency="flat"), tmp_path / "flat", corpus=text)
    sampling = about(out)["sampling"]
    assert sampling["after"]["entropy_bits"] > sampling["before"]["entropy_bits"]
    assert "approached, not reached" in about(out)["warnings"][0]
    assert losses(out) != losses(train(tiny(steps=2), tmp_path / "natural", corpus=text))


# -- watching ----------------------------------------------------------------------------------------------------------


def test_the_monitor_sees_every_step_and_the_final_state(text: Path, tmp_path: Path) -> None:
    seen = Seen()
    out = train(tiny(), tmp_path / "run", monitor=seen, corpus=text)
    assert seen.steps == list(range(13)), "the last one is the state after the last update"
    assert [seen.numbers[s]["loss"] for s in range(12)] == losses(out)
    assert set(seen.numbers[0]) == {"loss", "gradient_norm", "learning_rate"}


def test_a_monitor_that_draws_random_numbers_changes_no_loss(text: Path, tmp_path: Path) -> None:
    def draw(step: int) -> None:
        torch.rand(step + 1)

    plain = train(tiny(dropout=0.1), tmp_path / "plain", corpus=text)
    watched = train(tiny(dropout=0.1), tmp_path / "watched", monitor=Seen(draw), corpus=text)
    assert losses(plain) == losses(watched)


def test_a_factory_gets_what_a_monitor_needs(text: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {}

    @contextlib.contextmanager
    def factory(model: Any, stream: Any, optimizer: Any, config: Any, folder: Path) -> Iterator[Seen]:
        given.update(model=model, stream=stream, optimizer=optimizer, config=config, folder=folder, open=True)
        yield Seen()
        given["open"] = False

    out = train(tiny(arch="encoder"), tmp_path / "run", monitor=factory, corpus=text)
    assert given["folder"] == out and given["config"] == tiny(arch="encoder") and not given["open"]
    probe = given["stream"].probe_batches(8)
    assert math.isfinite(given["model"](**probe[0]).loss.item())
    assert given["stream"].counts.shape == (given["stream"].corpus.vocab_size,)
    assert given["optimizer"].param_groups[0]["lr"] == tiny().learning_rate(11)


# -- interruptions -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tiny(dropout=0.1), tmp_path_factory.mktemp("runs") / "undisturbed", corpus=text)


@pytest.mark.parametrize("moment", [0, 1, 4, 5, 6, 10, 11, 12])
def test_a_run_killed_at_a_step_goes_on_as_if_nothing_had_happened(
    moment: int, undisturbed: Path, text: Path, tmp_path: Path
) -> None:
    with pytest.raises(Killed):
        train(tiny(dropout=0.1), tmp_path / "run", monitor=Kept(kill_at(moment)), corpus=text)
    torch.manual_seed(moment)  # whatever the new process's generator holds
    seen = Kept()
    out = train(tiny(dropout=0.1), tmp_path / "run", monitor=seen, corpus=text, resume=True)
    assert losses(out) == losses(undisturbed)
    assert same_weights(out, undisturbed)
    assert seen.steps == list(range(13)), "no measured step is lost or repeated"
    assert [seen.numbers[s]["loss"] for s in range(12)] == losses(undisturbed)


def test_a_monitor_that_keeps_nothing_sees_steps_again(text: Path, tmp_path: Path) -> None:
    seen = Seen(kill_at(8))
    with pytest.raises(Killed):
        train(tiny(), tmp_path / "run", monitor=seen, corpus=text)
    seen.trouble, seen.numbers = None, {}
    train(tiny(), tmp_path / "run", monitor=seen, corpus=text, resume=True)
    assert seen.steps == [*range(9), *range(5, 13)]


def test_the_state_of_the_optimiser_is_needed_for_that(undisturbed: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        train(tiny(dropout=0.1), tmp_path / "run", monitor=Seen(kill_at(7)), corpus=text)
    stored = tmp_path / "run" / "checkpoints" / "checkpoint-5" / "training" / "optimizer.pt"
    state = torch.load(stored, weights_only=True)
    for slot in state["state"].values():
        slot["exp_avg"].zero_()
    torch.save(state, stored)
    spoilt = losses(train(tiny(dropout=0.1), tmp_path / "run", corpus=text, resume=True))
    assert spoilt[:6] == losses(undisturbed)[:6] and spoilt[6:] != losses(undisturbed)[6:]


@pytest.mark.parametrize("place", ["before the rename", "after the rename", "in the weights", "in the log"])
def test_a_kill_while_writing_spoils_nothing(
    place: str, undisturbed: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _kill_while_writing(place, monkeypatch)
    with pytest.raises(Killed):
        train(tiny(dropout=0.1), tmp_path / "run", corpus=text)
    monkeypatch.undo()
    for path in (tmp_path / "run" / "checkpoints").glob("checkpoint-*"):
        assert load_file(path / "model.safetensors"), "what has its name is complete"
    out = train(tiny(dropout=0.1), tmp_path / "run", corpus=text, resume=True)
    assert losses(out) == losses(undisturbed) and same_weights(out, undisturbed)
    assert not list((out / "checkpoints").glob(".*"))


def _kill_while_writing(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settle, append = checkpoints_module._settle, log_module.TrainingLog._append
    calls = {"settle": 0, "append": 0}

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

    def appended(self: Any, lines: Any, *, sync: bool) -> None:
        append(self, lines, sync=sync)
        calls["append"] += 1
        if calls["append"] == 9 and place == "in the log":
            with self.path.open("a") as file:
                file.write('{"step": 9, "lo')
            raise Killed

    monkeypatch.setattr(checkpoints_module, "_settle", settled)
    monkeypatch.setattr(log_module.TrainingLog, "_append", appended)


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_step_and_stops(kind: int, undisturbed: Path, text: Path, tmp_path: Path) -> None:
    def trouble(step: int) -> None:
        if step == 6:
            os.kill(os.getpid(), kind)

    handler = signal.getsignal(kind)
    with pytest.raises(KeyboardInterrupt, match="after 7 updates"):
        train(tiny(dropout=0.1), tmp_path / "run", monitor=Kept(trouble), corpus=text)
    assert signal.getsignal(kind) == handler
    assert about(tmp_path / "run")["status"] == "interrupted" and about(tmp_path / "run")["steps"] == 7
    seen = Kept()
    out = train(tiny(dropout=0.1), tmp_path / "run", monitor=seen, corpus=text, resume=True)
    assert losses(out) == losses(undisturbed) and seen.steps == list(range(13))
    assert not (out / "checkpoints" / "checkpoint-7").exists(), "it was only for resuming"


def test_a_resumed_run_does_not_tokenise_or_weight_again(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(frequency="flat")
    with pytest.raises(Killed):
        train(config, tmp_path / "run", monitor=Kept(kill_at(7)))
    monkeypatch.setattr(corpus_module, "_make", lambda *_: pytest.fail("tokenised again"))
    monkeypatch.setattr("anisoscope.training.loop.resample", lambda *_, **__: pytest.fail("weighted again"))
    out = train(config, tmp_path / "run", monitor=Kept(), resume=True)
    assert about(out)["status"] == "complete" and len(losses(out)) == 12


def test_a_number_that_is_not_finite_ends_the_run_with_a_sentence(text: Path, tmp_path: Path) -> None:
    with pytest.raises(
        AnisoscopeError, match=r"the (loss|gradient norm) became (nan|inf) at step \d+ .*lower the learning"
    ):
        train(tiny(lr=1e30, warmup=0, clip=0.0), tmp_path / "run", corpus=text)
    lines = read_log(tmp_path / "run" / "log.jsonl")
    last = lines[-1]
    assert last["loss"] is None or last["gradient_norm"] is None, "the line is there, in valid JSON"
    assert about(tmp_path / "run")["status"] == "failed" and "learning rate" in about(tmp_path / "run")["error"]
    for path in (tmp_path / "run" / "checkpoints").glob("checkpoint-*"):
        assert all(value.isfinite().all() for value in load_file(path / "model.safetensors").values())


def test_a_folder_is_protected_from_another_run(text: Path, tmp_path: Path) -> None:
    out = train(tiny(steps=2), tmp_path / "run", corpus=text)
    with pytest.raises(AnisoscopeError, match="holds a run"):
        train(tiny(steps=2), out, corpus=text)
    with pytest.raises(AnisoscopeError, match="a run with seed = 0, not 1"):
        train(tiny(steps=2, seed=1), out, corpus=text, resume=True)
    before = (out / "log.jsonl").read_bytes()
    assert train(tiny(steps=2), out, corpus=text, resume=True) == out and (out / "log.jsonl").read_bytes() == before


def test_a_log_that_lost_lines_is_noticed(text: Path, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        train(tiny(), tmp_path / "run", monitor=Seen(kill_at(7)), corpus=text)
    log = tmp_path / "run" / "log.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[2:]))
    with pytest.raises(AnisoscopeError, match="does not hold every step before 5"):
        train(tiny(), tmp_path / "run", corpus=text, resume=True)


@pytest.mark.slow
def test_a_process_killed_outright_again_and_again_ends_with_the_same_numbers(text: Path, tmp_path: Path) -> None:
    config = {**TINY, "steps": 60, "checkpoints": "every:7", "layers": 2, "width": 32, "dropout": 0.1}
    code = (
        "import json, sys; from anisoscope.training.loop import TrainConfig, train; "
        f"train(TrainConfig(**json.loads(sys.argv[1])), sys.argv[2], corpus={str(text)!r}, resume=True)"
    )
    wanted = losses(train(TrainConfig(**config), tmp_path / "undisturbed", corpus=text))
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
