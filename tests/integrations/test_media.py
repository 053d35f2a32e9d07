"""Callbacks in trainings of models that hear and see: the rows of every update against autograd by hand in float64."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")

from transformers import Trainer, TrainerCallback, TrainingArguments

from anisoscope.capture.objective import UNREAD
from anisoscope.capture.sites.site import Site
from anisoscope.measurement.targets import chosen_patches
from anisoscope.monitor.schedule import at
from anisoscope.tangent.proxy import StepRows
from support.tiny_media import _COMMON, _speech, padded_sound, sound
from support.trainings import CHEAP, hooks_of

SIZE, STEPS = 8, 2  # contexts of a micro-batch, updates
_STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_IMAGE = {**_COMMON, **_STILL, "image_size": 16, "patch_size": 4, "num_labels": 5, "encoder_stride": 4}
_QUIET = ("hidden_dropout", "activation_dropout", "attention_dropout", "feat_proj_dropout", "final_dropout")
_HEARD = {**_speech(pad_token_id=0, layerdrop=0.0, apply_spec_augment=False), **dict.fromkeys(_QUIET, 0.0)}
_CODES: dict[str, Any] = {"num_codevectors_per_group": 8, "codevector_dim": 16, "proj_codevector_dim": 16}
_CODES |= {"num_negatives": 5, "feat_quantizer_dropout": 0.0}
_STAGES = {"hidden_sizes": [16, 24], "depths": [1, 2], "num_labels": 5}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "HubertForCTC": ("HubertConfig", {**_HEARD, "ctc_loss_reduction": "mean"}),
    "Wav2Vec2ForCTC": ("Wav2Vec2Config", {**_HEARD, "ctc_loss_reduction": "sum"}),
    "Wav2Vec2ForPreTraining": ("Wav2Vec2Config", {**_HEARD, **_CODES}),
    "ViTForImageClassification": ("ViTConfig", _IMAGE),
    "ViTForMaskedImageModeling": ("ViTConfig", _IMAGE),
    "ResNetForImageClassification": ("ResNetConfig", {**_STAGES, "embedding_size": 16}),
    "ConvNextForImageClassification": ("ConvNextConfig", {**_STAGES, "num_stages": 2, "patch_size": 2}),
}
Batch = dict[str, Tensor]


def model_of(kind: str) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(3)
    config, options = MODELS[kind]
    model = getattr(transformers, kind)(getattr(transformers, config)(**options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.double()


def examples(kind: str, number: int = 2 * STEPS * SIZE) -> list[dict[str, Tensor]]:
    if "Wav2Vec2" in kind or "CTC" in kind:
        lengths = [600 - 20 * (i % 4) for i in range(number)]
        words = [torch.tensor([1 + i % 7, 9, *([3, 4] if i % 3 else [])]) for i in range(number)]
        clips = [clip.double() for clip in sound(*lengths)]
        if "CTC" not in kind:
            return [{"clip": clip} for clip in clips]
        return [{"clip": clip, "labels": w} for clip, w in zip(clips, words, strict=True)]
    x = torch.randn(number, 3, 16, 16, generator=torch.Generator().manual_seed(5)).double()
    rows = [{"pixel_values": each} for each in x]
    if "Masked" not in kind:
        return [row | {"labels": torch.tensor(i % 5)} for i, row in enumerate(rows)]
    shares = [0.25 if i < SIZE else 0.5 for i in range(number)]  # micro-batches differ in what they hide
    masks = [chosen_patches(torch.tensor([i]), 16, share=share)[0] for i, share in enumerate(shares)]
    return [row | {"bool_masked_pos": mask} for row, mask in zip(rows, masks, strict=True)]


def collate(rows: list[dict[str, Tensor]]) -> Batch:
    if "clip" not in rows[0]:
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    if "labels" not in rows[0]:
        return _hidden(padded_sound([row["clip"] for row in rows]))
    labels = nn.utils.rnn.pad_sequence([row["labels"] for row in rows], batch_first=True, padding_value=-100)
    return {**padded_sound([row["clip"] for row in rows]), "labels": labels}


def _hidden(inputs: Batch) -> Batch:
    """Spans of four frames are masked, and each has five other masked frames of its sound beside it."""
    from transformers.models.wav2vec2.modeling_wav2vec2 import _sample_negative_indices

    masked = torch.zeros(len(inputs["input_values"]), 29, dtype=torch.bool)
    for row, start in zip(masked, range(len(masked)), strict=True):
        row[start : start + 4] = row[14 : 16 + start % 3] = True
    drawn = _sample_negative_indices(tuple(masked.shape), 5, mask_time_indices=masked.numpy())
    return inputs | {"mask_time_indices": masked, "sampled_negative_indices": torch.from_numpy(drawn)}


def summed_loss(kind: str, output: Any, batch: Mapping[str, Tensor], model: Any) -> Tensor:
    """The loss summed over what is predicted, from what the model hands out."""
    if "Masked" in kind:  # an L1 distance for each pixel and channel; of a patch the mean of those
        off = (batch["pixel_values"] - output.reconstruction).abs().mean(1)
        off = off.unfold(1, 4, 4).unfold(2, 4, 4).mean((-1, -2)).flatten(1)
        return off[batch["bool_masked_pos"]].sum()
    if "PreTraining" in kind:
        return output.contrastive_loss + model.config.diversity_loss_weight * output.diversity_loss
    if "CTC" not in kind:
        return nn.functional.cross_entropy(output.logits, batch["labels"], reduction="sum")
    frames = model._get_feat_extract_output_lengths(batch["attention_mask"].sum(1))
    total = torch.zeros((), dtype=torch.float64)
    for row, count, labels in zip(output.logits, frames.tolist(), batch["labels"], strict=True):
        symbols = labels[labels >= 0]
        scores = row[:count].log_softmax(-1)
        total = total + nn.functional.ctc_loss(
            scores, symbols, torch.tensor(count), torch.tensor(len(symbols)), blank=0, reduction="none"
        )
    return total


def assert_by_hand(kind: str, seen: list[StepRows], batches: list[Batch], models: list[Any], accumulate: int) -> None:
    """Every row of every micro-batch, at every hidden state that the model hands out."""
    assert [rows.step for rows in seen] == list(range(STEPS)) and len(models) == STEPS
    for rows, model in zip(seen, models, strict=True):
        group = batches[rows.step * accumulate : (rows.step + 1) * accumulate]
        compared = 0
        for number, batch in enumerate(group):
            output = model.train()(**batch, output_hidden_states=True)
            total = summed_loss(kind, output, batch, model)
            grads = torch.autograd.grad(total, output.hidden_states, allow_unused=True)
            for layer, (state, g) in enumerate(zip(output.hidden_states, grads, strict=True)):
                if g is None or (site := _site(rows, layer)) is None:
                    continue
                found, factor = rows.test[site][number]
                x, g = (t.flatten(2).transpose(1, 2) if t.dim() == 4 else t for t in (state.detach(), g))
                assert found.g is not None and found.index.length == x.shape[1]
                torch.testing.assert_close(found.x, x.flatten(0, 1)[found.index.keep], rtol=1e-9, atol=1e-12)
                wanted = g.flatten(0, 1)[found.index.keep]
                # losses of speech models are computed in float32
                size = 1e-13 if "Image" in kind else 5e-5 * float(g.abs().max())
                torch.testing.assert_close(found.g * factor, wanted, rtol=1e-9, atol=size)
                compared += len(wanted)
        assert compared > 50  # contexts of a micro-batch may all be in the half that directions are fitted on


def _site(rows: StepRows, layer: int) -> Site | None:
    kinds = ("stage", "resid") if layer else ("embed",)
    return next((site for kind in kinds if (site := Site(layer, kind)) in rows.test), None)


class Recorder:
    """Batches as they are collated, and the model before each update."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.models: list[Any] = []

    def collate(self, rows: list[dict[str, Tensor]]) -> Batch:
        self.batches.append(collate(rows))
        return self.batches[-1]

    def keep(self, model: nn.Module) -> None:
        self.models.append(copy.deepcopy(model))


def in_trainer(kind: str, out: Path, recorder: Recorder, accumulate: int) -> tuple[Any, nn.Module]:
    from anisoscope.integrations.hf_trainer import MonitorCallback

    class Keep(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            recorder.keep(more["model"])

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            recorder.keep(more["model"])

    model = model_of(kind)
    callback = MonitorCallback(when=at(range(STEPS)), metrics="light", plan=CHEAP)
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=STEPS,
        per_device_train_batch_size=SIZE,
        gradient_accumulation_steps=accumulate,
        max_grad_norm=0.01,
        learning_rate=1e-2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
        seed=1,
    )
    words: dict[str, Any] = {"train_dataset": examples(kind), "data_collator": recorder.collate}
    Trainer(model, arguments, callbacks=[Keep(), callback], **words).train()  # models are kept without hooks
    del recorder.models[STEPS:]
    return callback, model


def in_lightning(kind: str, out: Path, recorder: Recorder, accumulate: int) -> tuple[Any, nn.Module]:
    pl = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    from anisoscope.integrations.lightning import MonitorCallback

    class Module(pl.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = model_of(kind)

        def on_train_start(self) -> None:
            recorder.keep(self.model)

        def training_step(self, batch: Batch, number: int) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Batch, number: int) -> None:
            if (number + 1) % accumulate == 0:
                recorder.keep(self.model)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    options |= {"enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": out}
    options |= {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.01, "max_steps": STEPS}
    module, callback = Module(), MonitorCallback(when=at(range(STEPS)), metrics="light", plan=CHEAP)
    loader = torch.utils.data.DataLoader(examples(kind), batch_size=SIZE, collate_fn=recorder.collate)  # type: ignore[arg-type]
    pl.Trainer(**options, callbacks=[callback]).fit(module, loader)
    del recorder.models[STEPS:]
    return callback, module.model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("framework", [in_trainer, in_lightning])
@pytest.mark.parametrize("kind", MODELS)
def test_rows_of_a_training_have_the_gradients_of_the_summed_loss(
    kind: str,
    framework: Callable[..., tuple[Any, nn.Module]],
    accumulate: int,
    tmp_path: Path,
    seen: list[StepRows],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # in training the codes of wav2vec 2.0 are drawn anew in every pass; by hand they are to be those of the training
    monkeypatch.setattr(nn.functional, "gumbel_softmax", lambda x, **_: x.softmax(-1))
    recorder = Recorder()
    callback, model = framework(kind, tmp_path, recorder, accumulate)
    assert_by_hand(kind, seen, recorder.batches, recorder.models, accumulate)
    assert hooks_of(model) == 0 and UNREAD not in callback.monitor.notes
    rows = callback.table.where(metric="gradient_energy", step=1, control=None).records()
    assert any(0 < row["value"] <= 1 for row in rows)
    assert all(row["note"] for row in rows if math.isnan(row["value"])), "the head of ViT reads the class token alone"
