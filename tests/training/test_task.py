"""Objectives of trainings on sounds and pictures: their targets, and the best constant answers by slow twins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anisoscope.errors import AnisoscopeError
from anisoscope.models.load import load_model
from anisoscope.monitor.monitor import Monitor
from anisoscope.series import SweepConfig
from anisoscope.series.sweep import Sweeper
from anisoscope.studies.arms import training_monitor
from anisoscope.training.classifier import MediaConfig, media_stream, train_media
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


@pytest.mark.parametrize(("arch", "objective"), [("vit", "masked"), ("wav2vec2", "ctc")])
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
    if objective == "masked":
        assert not torch.equal(first["bool_masked_pos"], other["bool_masked_pos"])
        assert first["bool_masked_pos"].sum(1).tolist() == [8] * 16
    loaded = load_model(str(out / "checkpoints" / "checkpoint-2"), device="cpu", any_head=True)
    assert type(loaded.model).__name__.endswith({"masked": "ForMaskedImageModeling", "ctc": "ForCTC"}[objective])
    more: dict[str, Any] = {"seconds": 1.0} if arch == "wav2vec2" else {}
    swept = SweepConfig(str(out), preset="light", draws=19, tokens=700, device="cpu", **more)
    again_table = Sweeper.at(swept, tmp_path / "sweep", resume=False).run()
    assert {row["step"] for row in again_table.where(metric="gradient_energy").records()} == {0, 2}
    assert again_table.about["models"][0]["targets"] == {"masked": "input", "ctc": "data"}[objective]


def test_an_objective_that_an_architecture_does_not_have_is_refused() -> None:
    with pytest.raises(AnisoscopeError, match="a convnext here is not trained on 'masked'; expected one of classes"):
        MediaConfig(arch="convnext", objective="masked")
