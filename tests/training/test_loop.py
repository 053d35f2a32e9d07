"""The training loop: the same numbers whatever interrupts it, every step watched once, the folder always complete."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import anisoscope
from anisoscope.training.compiled_loss import TrainingLoss
from anisoscope.training.config import TrainConfig
from anisoscope.training.language_model import build_model, make_stream
from anisoscope.training.loop import Trainer, train
from anisoscope.training.run_files import read_log
from support.tiny_runs import TINY, Seen, about, losses, tiny, weights

# -- one run -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["decoder", "encoder"])
def test_a_run_writes_its_log_its_checkpoints_and_what_it_was(arch: str, tokenised: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    config = tiny(arch=arch, steps=40, checkpoints="log")
    out = train(
        config,
        tmp_path / "run",
        corpus=tokenised,
        command=["train", "--arch", arch],
        progress=lambda *x: told.append(x),
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


def test_a_checkpoint_can_be_profiled(tokenised: Path, tmp_path: Path) -> None:
    out = train(tiny(steps=2, checkpoints="none"), tmp_path / "run", corpus=tokenised)
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


def test_only_the_newest_checkpoint_keeps_what_resuming_needs(tokenised: Path, tmp_path: Path) -> None:
    out = train(tiny(), tmp_path / "run", corpus=tokenised)
    found = {p.name: (p / "training").is_dir() for p in (out / "checkpoints").iterdir()}
    assert found == {"checkpoint-0": False, "checkpoint-5": False, "checkpoint-10": False, "checkpoint-12": True}
    assert all((out / "checkpoints" / name / "model.safetensors").is_file() for name in found)


def test_checkpoint_zero_holds_the_initial_weights(tokenised: Path, tmp_path: Path) -> None:
    config = tiny(steps=1)
    out = train(config, tmp_path / "run", corpus=tokenised)
    fresh = build_model(config, vocab_size=about(out)["data"]["vocab_size"]).state_dict()
    stored = weights(out, 0)
    assert all(torch.equal(fresh[name], value) for name, value in stored.items())
    assert not all(torch.equal(weights(out, 1)[name], value) for name, value in stored.items())


def test_micro_batches_add_up_to_the_mean_gradient(tokenised: Path, tmp_path: Path) -> None:
    config = tiny(accumulate=3, dtype="float64")
    stream = make_stream(config, tmp_path, corpus=tokenised)
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
    trainer.config, trainer.stream = config, stream
    trainer.loss = TrainingLoss(stream.loss, model, contextlib.nullcontext, parts=config.accumulate)
    return trainer


def test_the_logged_norm_is_that_before_clipping(tokenised: Path, tmp_path: Path) -> None:
    runs = [train(tiny(steps=1, clip=clip), tmp_path / str(clip), corpus=tokenised) for clip in (0.0, 1e-3)]
    free, clipped = (read_log(out / "log.jsonl")[0]["gradient_norm"] for out in runs)
    assert free == clipped and free > 1e-2


def test_training_leaves_the_global_generator_alone(tokenised: Path, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    train(tiny(steps=2, dropout=0.2), tmp_path / "run", corpus=tokenised)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_seeds_repeat_and_differ(dropout: float, tokenised: Path, tmp_path: Path) -> None:
    series = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.manual_seed(len(series))
        series.append(losses(train(tiny(steps=4, seed=seed, dropout=dropout), tmp_path / name, corpus=tokenised)))
    assert series[0] == series[1] != series[2]


def test_autocast_trains_in_bfloat16(tokenised: Path, tmp_path: Path) -> None:
    half = losses(train(tiny(steps=5, dtype="bfloat16"), tmp_path / "half", corpus=tokenised))
    full = losses(train(tiny(steps=5), tmp_path / "full", corpus=tokenised))
    assert half != full and half == pytest.approx(full, rel=0.02)


def test_resampled_runs_record_what_was_reached(tokenised: Path, tmp_path: Path) -> None:
    out = train(tiny(steps=2, frequency="flat"), tmp_path / "flat", corpus=tokenised)
    sampling = about(out)["sampling"]
    assert sampling["after"]["entropy_bits"] > sampling["before"]["entropy_bits"]
    assert "approached, not reached" in about(out)["warnings"][0]
    assert losses(out) != losses(train(tiny(steps=2), tmp_path / "natural", corpus=tokenised))


# -- watching ----------------------------------------------------------------------------------------------------------


def test_the_monitor_sees_every_step_and_the_final_state(tokenised: Path, tmp_path: Path) -> None:
    seen = Seen()
    out = train(tiny(), tmp_path / "run", monitor=seen, corpus=tokenised)
    assert seen.steps == list(range(13)), "the last one is the state after the last update"
    assert [seen.numbers[s]["loss"] for s in range(12)] == losses(out)
    assert set(seen.numbers[0]) == {"loss", "gradient_norm", "learning_rate"}


def test_a_monitor_that_draws_random_numbers_changes_no_loss(tokenised: Path, tmp_path: Path) -> None:
    def draw(step: int) -> None:
        torch.rand(step + 1)

    plain = train(tiny(dropout=0.1), tmp_path / "plain", corpus=tokenised)
    watched = train(tiny(dropout=0.1), tmp_path / "watched", monitor=Seen(draw), corpus=tokenised)
    assert losses(plain) == losses(watched)


def test_a_factory_gets_what_a_monitor_needs(tokenised: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {}

    @contextlib.contextmanager
    def factory(model: Any, stream: Any, optimizer: Any, config: Any, folder: Path) -> Iterator[Seen]:
        given.update(model=model, stream=stream, optimizer=optimizer, config=config, folder=folder, open=True)
        yield Seen()
        given["open"] = False

    out = train(tiny(arch="encoder"), tmp_path / "run", monitor=factory, corpus=tokenised)
    assert given["folder"] == out and given["config"] == tiny(arch="encoder") and not given["open"]
    probe = given["stream"].probe_batches(8)
    assert math.isfinite(given["model"](**probe[0]).loss.item())
    assert given["stream"].counts.shape == (given["stream"].corpus.vocab_size,)
    assert given["optimizer"].param_groups[0]["lr"] == tiny().learning_rate(11)
