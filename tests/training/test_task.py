"""Objectives of trainings on sounds and pictures: their targets, and the best constant answers by slow twins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import anisoscope.training.task as training_task
from anisoscope.capture.objective import constant_choice, find_objective
from anisoscope.claims.catalogue import evaluate_claims
from anisoscope.errors import AnisoscopeError
from anisoscope.models.load import load_model
from anisoscope.monitor.monitor import Monitor
from anisoscope.series import SweepConfig
from anisoscope.series.sweep import Sweeper
from anisoscope.studies.arms import training_monitor
from anisoscope.training.classifier import MediaConfig, media_model, media_stream, train_media
from anisoscope.training.task import FillPatches, constant_spelling

SMALL: dict[str, Any] = {"steps": 2, "layers": 2, "width": 32, "heads": 2, "examples": 240, "device": "cpu", "size": 16}


def test_the_constant_of_a_spelling_beats_other_constants_and_sums_over_alignments() -> None:
    counts, frames = torch.tensor([6.0, 3.0, 1.0], dtype=torch.float64), 5
    costs = constant_spelling(counts, frames=frames)
    best = float(counts @ costs / counts.sum())

    def cost(p: np.ndarray) -> float:
        """By all alignments: a run of i to j frames of the symbol, blanks elsewhere."""
        total = 0.0
        for symbol, count in enumerate(counts.tolist(), start=1):
            ways = [(j - i) for i in range(frames) for j in range(i + 1, frames + 1)]
            total -= count * np.log(sum(p[symbol] ** n * p[0] ** (frames - n) for n in ways))
        return total / float(counts.sum())

    random = np.random.default_rng(0)
    tried = min(cost(p) for p in random.dirichlet(np.ones(4), size=20_000))
    assert best <= tried + 1e-4 and best == pytest.approx(tried, abs=2e-2)


def test_the_constant_of_patches_is_the_median_picture() -> None:
    torch.manual_seed(0)
    known = {"pixel_values": torch.randn(9, 3, 8, 8)}
    batch = {
        "pixel_values": torch.randn(2, 3, 8, 8),
        "bool_masked_pos": torch.tensor([[1, 0, 0, 1], [0, 1, 0, 0]]).bool(),
    }
    found = FillPatches(4).constant(known, torch.zeros(9), classes=1)(batch)
    middle = np.median(known["pixel_values"].double().numpy(), axis=0)
    off = np.abs(batch["pixel_values"].double().numpy() - middle)
    wanted = [off[0, :, :4, :4].mean() + off[0, :, 4:, 4:].mean(), off[1, :, :4, 4:].mean()]
    assert found.tolist() == pytest.approx(wanted, rel=1e-12)


LATER = [pytest.param("wav2vec2", objective, marks=pytest.mark.slow) for objective in ("ctc", "masked")]


@pytest.mark.parametrize(("arch", "objective"), [("vit", "masked"), *LATER])
def test_other_objectives_are_trained_and_measured_with_gradients_and_swept(
    arch: str, objective: str, tmp_path: Path
) -> None:
    config = MediaConfig(arch=arch, objective=objective, checkpoints="0,2", **SMALL)
    assert config.arm == f"{arch}-{objective}" and config.entry["objective"] == objective

    def watch(model: Any, stream: Any, optimizer: Any, training: Any, folder: Path) -> Monitor:
        found = training_monitor(
            model, stream, optimizer, training, folder, when="0,2", monitor="drift", contexts=24, gradients=True
        )
        assert isinstance(found, Monitor)
        return found

    out = train_media(config, tmp_path / "run", monitor=watch, watch={})
    from anisoscope.results.folder import RunFolder

    table = RunFolder.open(out).table()
    for metric in ("gradient_energy", "probe_loss", "constant_loss"):
        assert {row["step"] for row in table.where(metric=metric).records()} == {0, 2}, metric
    stream = media_stream(config, tmp_path / "run")
    first, again, other = stream.batch(0), stream.batch(0), stream.batch(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    if arch == "wav2vec2" and objective == "masked":
        assert not torch.equal(first["mask_time_indices"], other["mask_time_indices"])
        assert 0.3 < float(first["mask_time_indices"].double().mean()) < 0.7
        losses = [json.loads(line)["loss"] for line in (out / "log.jsonl").read_text().splitlines()]
        torch.rand(7)  # codes are drawn at random in training, by the step and not by what was drawn before
        twin = train_media(config, tmp_path / "twin", corpus=tmp_path / "run" / "corpus")
        assert [json.loads(line)["loss"] for line in (twin / "log.jsonl").read_text().splitlines()] == losses
    elif objective == "masked":
        assert not torch.equal(first["bool_masked_pos"], other["bool_masked_pos"])
        assert first["bool_masked_pos"].sum(1).tolist() == [8] * 16
    loaded = load_model(str(out / "checkpoints" / "checkpoint-2"), device="cpu", any_head=True)
    masked = "ForMaskedImageModeling" if arch == "vit" else "ForPreTraining"
    assert type(loaded.model).__name__.endswith({"masked": masked, "ctc": "ForCTC"}[objective])
    more: dict[str, Any] = {"seconds": 1.0} if arch == "wav2vec2" else {}
    swept = SweepConfig(str(out), preset="light", draws=19, tokens=700, device="cpu", **more)
    again_table = Sweeper.at(swept, tmp_path / "sweep", resume=False).run()
    assert {row["step"] for row in again_table.where(metric="gradient_energy").records()} == {0, 2}
    assert again_table.about["models"][0]["targets"] == {"masked": "input", "ctc": "data"}[objective]


def test_an_objective_that_an_architecture_does_not_have_is_refused() -> None:
    with pytest.raises(AnisoscopeError, match="a convnext here is not trained on 'masked'; expected one of classes"):
        MediaConfig(arch="convnext", objective="masked")


# -- masked frames: codes are learned with the model, and so is what a constant answer can reach -----------------------


def _drawn(shares: list[float], frames: int = 600, others: int = 12) -> tuple[torch.Tensor, ...]:
    """Codes of frames, of their distractors and folds, all by chance."""
    random = torch.Generator().manual_seed(0)
    p = torch.tensor(shares, dtype=torch.float64)
    draw = [p.expand(frames, -1).multinomial(n, replacement=True, generator=random) for n in (1, others)]
    return draw[0][:, 0], draw[1], torch.randint(0, 8, (frames,), generator=random)


def test_the_constant_of_codes_is_the_best_of_all_scores() -> None:
    own, others, fold = _drawn([0.7, 0.2, 0.1])
    found = float(constant_choice(own, others, fold).mean())

    def cost(scores: np.ndarray) -> float:
        total = 0.0
        for mine, beside in zip(own.tolist(), others.tolist(), strict=True):
            total += np.log(1 + sum(np.exp(scores[o] - scores[mine]) for o in beside if o != mine))
        return total / len(own)

    tried = [cost(np.array([a, b, 0.0])) for a in np.arange(0, 6.1, 0.5) for b in np.arange(0, 4.1, 0.5)]
    assert found == pytest.approx(min(tried), abs=0.02), "the folds are not those that scores are fitted on"
    counted = (others != own[:, None]).sum(1)
    assert found < float((1.0 + counted).log().mean()) - 0.3, "a frequent code can be named without looking"


def test_codes_that_are_equally_frequent_leave_a_constant_nothing_but_chance() -> None:
    own, others, fold = _drawn([1 / 200] * 200, frames=900)
    counted = (others != own[:, None]).sum(1)
    assert float(constant_choice(own, others, fold).mean()) == pytest.approx(
        float((1.0 + counted).log().mean()), abs=0.1
    )
    assert float(constant_choice(own * 0, others * 0, fold).abs().max()) == 0, "one code is no choice"


def _frames(tmp_path: Path, **options: Any) -> MediaConfig:
    fields = {**SMALL, "examples": 400, "steps": 200, "batch_size": 8, "lr": 3e-3, "checkpoints": "none", **options}
    return MediaConfig(arch="wav2vec2", objective="masked", **fields)


def test_a_model_that_hears_learns_masked_frames_and_passes_the_gate(tmp_path: Path) -> None:
    from anisoscope.results.folder import RunFolder

    def watch(*given: Any) -> Any:
        return training_monitor(*given, when="0,200", monitor="svd_ratio", contexts=48)

    out = train_media(_frames(tmp_path), tmp_path / "run", monitor=watch, watch={})
    table = RunFolder.open(out).table()
    loss, constant = (
        {row["step"]: row for row in table.where(metric=metric).records()} for metric in ("probe_loss", "constant_loss")
    )
    assert loss[0]["value"] > constant[0]["value"] - 0.1
    assert loss[200]["high"] < constant[200]["low"] - 0.1 and loss[200]["n"] == constant[200]["n"] > 500
    assert constant[200]["variant"] == "" and loss[200]["contexts"] == constant[200]["contexts"]
    (verdict,) = evaluate_claims(table, ["anisotropy_grows"])
    assert [each["status"] for each in verdict.details["learned"].values()] == ["learned"]


def test_masked_frames_are_hidden_from_the_model(tmp_path: Path) -> None:
    """Another sound under the mask changes nothing but the codes that are to be guessed."""
    config = _frames(tmp_path)
    stream, model = media_stream(config, tmp_path / "run"), media_model(config, classes=10).eval()
    batch = stream.probe_batches(8)[0]
    masked, sounds = batch["mask_time_indices"], batch["input_values"]
    with torch.no_grad():
        said = model.wav2vec2(sounds, mask_time_indices=masked).last_hidden_state
        seen = model.wav2vec2(sounds).last_hidden_state
        hidden = model.wav2vec2(sounds, mask_time_indices=torch.ones_like(masked)).last_hidden_state
        others = model.wav2vec2(sounds.flip(0), mask_time_indices=torch.ones_like(masked)).last_hidden_state
    assert (said - seen).abs().amax(-1)[masked].min() > 1e-3
    torch.testing.assert_close(hidden, others)
    assert (hidden - seen).abs().max() > 0.1, "what is not hidden is seen"


def test_in_white_noise_there_is_nothing_to_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No frame tells of another, so a model that does better than a constant reads what it has to guess."""
    real = training_task.ChooseFrames.loss

    def noise(self: Any, forward: Any, batch: Any) -> Any:
        return real(self, forward, batch | {"input_values": torch.randn_like(batch["input_values"])})

    monkeypatch.setattr(training_task.ChooseFrames, "loss", noise)
    out = train_media(_frames(tmp_path), tmp_path / "run")
    losses = [json.loads(line)["loss"] for line in (out / "log.jsonl").read_text().splitlines()]
    assert len(losses) == 200 and min(losses) > 2.9


def test_a_model_that_reads_what_it_guesses_is_refused(tmp_path: Path) -> None:
    config = _frames(tmp_path)
    batch, model = media_stream(config, tmp_path / "run").probe_batches(8)[0], media_model(config, classes=10)
    assert find_objective(model, batch).name == "masked"
    model.config.apply_spec_augment = False
    with pytest.raises(AnisoscopeError, match="reads the frames that it is asked to guess"):
        find_objective(model, batch)


def test_a_model_whose_codes_collapsed_did_not_learn(tmp_path: Path) -> None:
    """Its loss is 0, for there is nothing to choose between."""
    config = _frames(tmp_path)
    stream = media_stream(config, tmp_path / "run")
    model: Any = media_model(config, classes=10)
    with torch.no_grad():
        model.quantizer.weight_proj.weight.zero_()
    with Monitor(model, when=[0, 4], metrics=["svd_ratio"], probe=stream.probe_batches(48), name="m") as monitor:
        for step in (0, 4):
            with monitor.step(step):
                pass
    for metric in ("probe_loss", "constant_loss"):
        found = [row["value"] for row in monitor.table.where(metric=metric).records()]
        assert found == pytest.approx([0, 0], abs=1e-6), metric
    (verdict,) = evaluate_claims(monitor.table, ["anisotropy_grows"])
    assert [each["status"] for each in verdict.details["learned"].values()] == ["did not learn"]
    assert verdict.status == "undecided" and "did not learn" in verdict.why
