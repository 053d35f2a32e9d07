"""What models of sounds and pictures do: name classes, spell them (CTC), or fill in masked patches or frames.

A task says which fields its model needs, what it adds to a batch, and the best constant answer that its training data
allow, which a model that learned must beat on held-out examples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from anisoscope.capture.objective import distractors
from anisoscope.measurement.targets import SPAN, chosen_patches, chosen_spans
from anisoscope.numerics.hashing import row_hash
from anisoscope.results.modality import SPEECH
from anisoscope.training.config import ClassifierConfig

SHARE = 0.5  # of the patches are hidden
DISTRACTORS = 20  # of a masked frame; 100 as published, where sounds are longer
BLANK = 0  # symbol of CTC; class k is symbol k + 1
_UPDATES = 200  # of the optimizer that finds the best constant of CTC


class MediaTask(ABC):
    """One objective of training."""

    name: ClassVar[str]

    @abstractmethod
    def fields(self, config: ClassifierConfig, *, classes: int) -> dict[str, Any]:
        """Fields of the model's configuration beside its sizes."""

    @abstractmethod
    def targets(self, inputs: Mapping[str, Tensor], labels: Tensor, *, keys: Tensor) -> dict[str, Tensor]:
        """What a batch has beside its inputs; `keys` [B] decide what is drawn at random."""

    @abstractmethod
    def constant(self, inputs: Mapping[str, Tensor], labels: Tensor, *, classes: int) -> Any:
        """The best constant answer on training examples, as `Monitor(constant_loss=…)` takes it."""

    def loss(self, forward: Callable[..., Any], batch: Mapping[str, Tensor]) -> Tensor:
        """The mean loss that training minimises: the model's own."""
        found: Tensor = forward(**batch).loss
        return found


@dataclass(frozen=True)
class NameClasses(MediaTask):
    """One class per example, by cross-entropy; the constant is how often each class occurs."""

    name: ClassVar[str] = "classes"

    def fields(self, config: ClassifierConfig, *, classes: int) -> dict[str, Any]:
        return {"num_labels": classes, "problem_type": "single_label_classification"}

    def targets(self, inputs: Mapping[str, Tensor], labels: Tensor, *, keys: Tensor) -> dict[str, Tensor]:
        return {"labels": labels}

    def constant(self, inputs: Mapping[str, Tensor], labels: Tensor, *, classes: int) -> Any:
        return torch.bincount(labels.cpu(), minlength=classes)


@dataclass(frozen=True)
class SpellClasses(MediaTask):
    """The class of a sound as a transcript of one symbol, by CTC; the constant is the best distribution of all frames.

    The same distribution stands at every frame, and makes the classes of the training examples most probable together.
    """

    frames: int
    name: ClassVar[str] = "ctc"

    def fields(self, config: ClassifierConfig, *, classes: int) -> dict[str, Any]:
        reduction = {"ctc_loss_reduction": "mean", "ctc_zero_infinity": True}
        return {"vocab_size": classes + 1, "pad_token_id": BLANK, "objective": self.name, **reduction}

    def targets(self, inputs: Mapping[str, Tensor], labels: Tensor, *, keys: Tensor) -> dict[str, Tensor]:
        return {"labels": labels[:, None] + 1}

    def constant(self, inputs: Mapping[str, Tensor], labels: Tensor, *, classes: int) -> Any:
        counts = torch.bincount(labels.cpu(), minlength=classes).double()
        costs = constant_spelling(counts, frames=self.frames)
        return lambda batch: costs[batch["labels"][:, 0].cpu() - 1]


def constant_spelling(counts: Tensor, *, frames: int) -> Tensor:
    """−log p of each one-symbol transcript under the best constant distribution of frames, float64 [classes]."""
    logits = torch.zeros(len(counts) + 1, dtype=torch.float64, requires_grad=True)
    symbols = torch.arange(1, len(counts) + 1)[:, None]
    sizes = torch.full((len(counts),), frames), torch.ones(len(counts), dtype=torch.int64)

    def costs() -> Tensor:
        scores = logits.log_softmax(0).expand(frames, len(counts), -1)
        return nn.functional.ctc_loss(scores, symbols, *sizes, blank=BLANK, reduction="none")

    optimizer = torch.optim.Adam([logits], lr=0.2)
    for update in range(_UPDATES):
        optimizer.param_groups[0]["lr"] = 0.2 * (1 - update / _UPDATES)
        optimizer.zero_grad()
        (counts @ costs() / counts.sum()).backward()
        optimizer.step()
    return costs().detach()


@dataclass(frozen=True)
class FillPatches(MediaTask):
    """Half of the patches are hidden and reconstructed, by their mean absolute error.

    The constant is the median picture of the training examples, which no constant answer beats in that error.
    """

    patches: int
    name: ClassVar[str] = "masked"

    def fields(self, config: ClassifierConfig, *, classes: int) -> dict[str, Any]:
        return {"encoder_stride": config.patch}

    def targets(self, inputs: Mapping[str, Tensor], labels: Tensor, *, keys: Tensor) -> dict[str, Tensor]:
        return {"bool_masked_pos": chosen_patches(keys, self.patches, share=SHARE)}

    def constant(self, inputs: Mapping[str, Tensor], labels: Tensor, *, classes: int) -> Any:
        middle = inputs["pixel_values"].cpu().double().median(0).values

        def cost(batch: Mapping[str, Any]) -> Tensor:
            hidden = batch["bool_masked_pos"].cpu()
            off = (batch["pixel_values"].cpu().double() - middle).abs().mean(1)  # [B, H, W]
            side = round(hidden.shape[1] ** 0.5)
            squares = off.unflatten(2, (side, -1)).unflatten(1, (side, -1)).mean((2, 4)).flatten(1)
            return squares.where(hidden, 0.0).sum(1)

        return cost


@dataclass(frozen=True)
class ChooseFrames(MediaTask):
    """About half of the frames are masked, in spans, and the code of each is chosen among others of its sound.

    The contrastive objective of wav2vec 2.0 with fewer codes and distractors than published: sounds here are short. The
    codes are learned with the model, so the best constant is found for those it has (`MaskedFrames.own_constant`).
    """

    frames: int
    name: ClassVar[str] = "masked"

    def fields(self, config: ClassifierConfig, *, classes: int) -> dict[str, Any]:
        codes = {"num_codevectors_per_group": 32, "num_codevector_groups": 2, "feat_quantizer_dropout": 0.0}
        codes["apply_spec_augment"] = True  # without it transformers shows the model the frames it has to guess
        sizes = {"codevector_dim": config.width, "proj_codevector_dim": config.width, "mask_time_length": SPAN}
        return {**codes, **sizes, "num_negatives": DISTRACTORS}

    def targets(self, inputs: Mapping[str, Tensor], labels: Tensor, *, keys: Tensor) -> dict[str, Tensor]:
        every = torch.ones(len(labels), self.frames, dtype=torch.bool, device=labels.device)
        return {"mask_time_indices": chosen_spans(keys, every)}

    def constant(self, inputs: Mapping[str, Tensor], labels: Tensor, *, classes: int) -> Any:
        return None

    def loss(self, forward: Callable[..., Any], batch: Mapping[str, Tensor]) -> Tensor:
        masked = batch["mask_time_indices"]
        places = torch.arange(self.frames, device=masked.device)
        keys = (masked * row_hash(places, places)).sum(1)  # other distractors where other frames are masked
        drawn = distractors(masked, keys, number=DISTRACTORS)
        found: Tensor = forward(**batch, sampled_negative_indices=drawn).loss / masked.sum()
        return found


def _masked(config: Any, positions: int) -> MediaTask:
    return ChooseFrames(positions) if config.kind.modality is SPEECH else FillPatches(positions)


TASKS: dict[str, Callable[[ClassifierConfig, int], MediaTask]] = {  # (config, positions) -> task
    "classes": lambda config, positions: NameClasses(),
    "ctc": lambda config, positions: SpellClasses(positions),
    "masked": _masked,
}
