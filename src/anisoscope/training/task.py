"""What models of sounds and pictures are trained to do: name classes, spell them (CTC), or fill in masked patches.

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

from anisoscope.measurement.targets import chosen_patches
from anisoscope.training.config import ClassifierConfig

SHARE = 0.5  # of the patches are hidden
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


TASKS: dict[str, Callable[[ClassifierConfig, int], MediaTask]] = {  # (config, positions) -> task
    "classes": lambda config, positions: NameClasses(),
    "ctc": lambda config, positions: SpellClasses(positions),
    "masked": lambda config, positions: FillPatches(positions),
}
