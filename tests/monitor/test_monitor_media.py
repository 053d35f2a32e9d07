"""A monitor without a probe looks at the training of classifiers and listeners, whatever their loss is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
from transformers import (
    HubertConfig,
    HubertForCTC,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

from anisoscope import Monitor
from anisoscope.errors import AnisoscopeError
from anisoscope.integrations.hf_trainer import MonitorCallback

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def pictures(rows: list[int]) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {
        "pixel_values": torch.randn(len(rows), 3, 32, 32, generator=random),
        "labels": torch.tensor([row % 3 for row in rows]),
    }


def test_a_trainer_of_an_image_classifier_goes_on_and_its_patches_are_measured(tmp_path: Path) -> None:
    model = ViTForImageClassification(ViTConfig(**SIZES, image_size=32, patch_size=8, num_labels=3))
    callback = MonitorCallback(when=[0, 2], metrics="attention")
    more: dict[str, Any] = {"per_device_train_batch_size": 16, "max_steps": 3, "report_to": [], "use_cpu": True}
    arguments = TrainingArguments(output_dir=str(tmp_path), remove_unused_columns=False, disable_tqdm=True, **more)
    Trainer(model, arguments, data_collator=pictures, train_dataset=list(range(48)), callbacks=[callback]).train()
    assert callback.monitor is not None
    found = callback.monitor.table.where(metric="average_cosine", kind="resid").to_pandas()
    assert set(found.step) == {0, 2} and set(found.n) == {16 * 16}, "16 pictures of 4 × 4 patches, no class token"


def listener(**more: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = HubertConfig(
        **SIZES,
        conv_dim=(32,) * 7,
        vocab_size=10,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        mask_time_prob=0.0,
        **more,
    )
    batch = {"input_values": torch.randn(16, 8000), "labels": torch.tensor([[1, 2]] * 16)}
    return HubertForCTC(config).train(), batch


def test_the_geometry_of_a_batch_needs_no_loss_that_we_know() -> None:
    model, batch = listener(layerdrop=0.0)
    with Monitor(model, when=[0], metrics="attention") as monitor, monitor.step(0):
        model(**batch).loss.backward()
    assert len(monitor.table.where(metric="average_cosine", kind="resid").to_pandas()) == 2
    with (
        pytest.raises(AnisoscopeError, match="not the mean cross-entropy"),
        Monitor(model, when=[0], metrics="light") as monitor,
        monitor.step(0),
    ):
        model(**batch).loss.backward()  # gradients would be of an unknown scale


def test_layers_that_are_dropped_in_training_are_named() -> None:
    model, batch = listener(layerdrop=1.0)
    with Monitor(model, when=[0], metrics="attention") as monitor, monitor.step(0):
        model(**batch).loss.backward()
    assert any("nothing came through" in note and "1.resid" in note for note in monitor.notes)


def test_a_pass_that_is_not_learned_from_is_no_training_batch() -> None:
    model, batch = listener(layerdrop=0.0)
    with (
        pytest.raises(AnisoscopeError, match="no backward pass"),
        Monitor(model, when=[0], metrics="attention") as monitor,
        monitor.step(0),
    ):
        model(**batch)
