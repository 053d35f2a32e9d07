"""The summed loss of a model, and the token and target token of every row, read from the labels and checked.

A gradient of a *mean* loss depends on the batching, so gradients here are always of the sum over target tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.capture.rows.row import Index
from anisoscope.errors import AnisoscopeError

IGNORED = -100
_CLOSE = 5e-3  # relative: what half precision may add to the right reading
LossRule = Callable[[nn.Module, Mapping[str, Any]], Tensor]
"""(model, inputs) -> the loss summed over target tokens, as a scalar with its graph."""


@dataclass(frozen=True)
class LabelConvention:
    """How a model reads its labels: shifted (position t predicts label t+1), or in place."""

    shifted: bool

    def targets(self, labels: Tensor) -> Tensor:
        """The target of every position [B, T]; IGNORED where it has none."""
        if not self.shifted or labels.dim() != 2:  # one label for a whole context has nowhere to be shifted to
            return labels
        return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)

    def count(self, labels: Tensor) -> int:
        """The number of target tokens."""
        return int((self.targets(labels) != IGNORED).sum())

    def summed(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The cross-entropy of all targets, in the precision of the logits."""
        targets = self.targets(labels).to(logits.device).flatten()
        flat = logits.reshape(-1, logits.shape[-1])
        return torch.nn.functional.cross_entropy(flat, targets, ignore_index=IGNORED, reduction="sum")


def unlabelled(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a pass without a loss; an encoder-decoder makes its decoder's inputs from the labels."""
    two = getattr(getattr(model, "config", None), "is_encoder_decoder", False) and "decoder_input_ids" not in inputs
    return {name: value for name, value in inputs.items() if name != "labels" or two}


def output_part(output: Any, name: str) -> Any:
    """A field of what a model returned, or None."""
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def find_reading(model: nn.Module, output: Any, labels: Tensor) -> LabelConvention:
    """How this model reads its labels, by trying which reading of its logits gives its own loss.

    Known from the numbers, not from the class name: a wrong factor would rescale every gradient.
    """
    loss, logits = output_part(output, "loss"), output_part(output, "logits")
    if not isinstance(loss, Tensor) or not isinstance(logits, Tensor):
        raise AnisoscopeError(
            f"{type(model).__name__} returned no loss and logits for its labels; load it with a language-model head "
            "(…ForCausalLM or …ForMaskedLM), or give loss=, a function of (model, inputs) that returns the summed loss."
        )
    if not bool((labels != IGNORED).any()):
        raise AnisoscopeError(
            f"every label is {IGNORED} (ignored), so there is no loss; expected labels at some positions: check the "
            "collator or the masking."
        )
    gaps = {shifted: _gap(LabelConvention(shifted), logits, labels, loss) for shifted in (True, False)}
    best = min(gaps, key=lambda shifted: gaps[shifted])  # at initialisation both are near log V: the nearer one counts
    if gaps[best] <= _CLOSE:
        return LabelConvention(best)
    raise AnisoscopeError(
        f"the loss of {type(model).__name__} ({float(loss.detach()):.4g}) is not the mean cross-entropy of its logits "
        "and labels, so its scale per token is not known; give loss=, a function of (model, inputs) that returns the "
        "summed loss."
    )


def _gap(reading: LabelConvention, logits: Tensor, labels: Tensor, loss: Tensor) -> float:
    """Relative distance of the model's loss from the mean cross-entropy under one reading."""
    if reading.shifted and labels.dim() != 2:  # one label for a whole context, as a classifier has, is read in place
        return float("inf")
    targets = reading.targets(labels).flatten().to(logits.device)
    if logits.shape[:-1].numel() != targets.numel() or not bool((targets != IGNORED).any()):
        return float("inf")
    flat = logits.detach().float().reshape(-1, logits.shape[-1])
    own = torch.nn.functional.cross_entropy(flat, targets, ignore_index=IGNORED)
    return float((own - loss.detach().float()).abs() / own.abs().clamp_min(1e-6))


@dataclass(frozen=True)
class Words:
    """Per row: original token, target token (−1 for none), and whether it was masked."""

    original: Tensor  # [n]
    target: Tensor  # [n]
    masked: Tensor | None  # [n] bool; None where nothing is masked by design

    @staticmethod
    def of(index: Index, labels: Tensor | None, reading: LabelConvention | None, *, stack: str) -> Words:
        """Token and target of the kept rows; in a masked LM the original of a masked position is its label."""
        token = index.token.cpu()
        nothing = torch.full_like(token, -1)
        fits = labels is not None and reading is not None and labels.shape == (index.batch, index.length)
        if not fits or stack == "encoder":  # an encoder's rows have no targets of their own
            return Words(token, nothing, None)
        assert labels is not None and reading is not None
        target = reading.targets(labels.cpu()).flatten()[index.keep.cpu()]
        known = target != IGNORED
        target = torch.where(known, target, -1)
        if reading.shifted or stack == "decoder":
            return Words(token, target, None)
        return Words(torch.where(known, target, token), target, known)
