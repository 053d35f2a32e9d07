"""How many contexts go through a model at a time where it has many outputs.

Logits are contexts × positions × vocabulary: with 262,144 words one context of 256 positions has 268 MB of them, more
than all its activations. A pass with gradients holds three to four tensors of that size (logits, their logarithms, and
a gradient of each).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.models.forward import unwrapped

LOGITS = {"cpu": 1 << 30, "cuda": 1 << 31}  # bytes of the logits of one pass, in the precision of the loss


def fitting_contexts(positions: int, outputs: int, most: int, *, device: str = "cpu", wide: bool = False) -> int:
    """The contexts of a pass: `most`, or as many as have room for their logits, at least one; `wide`: in float64.

    >>> fitting_contexts(256, 50_257, 16), fitting_contexts(256, 262_144, 16), fitting_contexts(1 << 20, 262_144, 16)
    (16, 4, 1)
    """
    each = positions * outputs * (8 if wide else 4)  # losses are computed in float32 where weights have half of it
    return max(1, min(most, LOGITS.get(device, LOGITS["cuda"]) // max(1, each)))


def contexts_at_once(model: nn.Module, inputs: Mapping[str, Any], most: int, *, outputs: int = 0) -> int:
    """The contexts of a pass with a loss over these inputs; `outputs` of a model whose output head is not known."""
    read = [inputs.get(name) for name in ("labels", "input_ids")]
    positions = next((x.shape[1] for x in read if isinstance(x, Tensor) and x.dim() == 2), 0)
    parameter = next(model.parameters(), None)
    if not positions or parameter is None:
        return most
    how: dict[str, Any] = {"device": parameter.device.type, "wide": parameter.dtype == torch.float64}
    return fitting_contexts(positions, vocabulary(model) or outputs, most, **how)


def vocabulary(model: nn.Module) -> int:
    """The rows of the output head of a language model; 0 without one."""
    try:
        weight = unwrapped(model).get_output_embeddings().weight  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return 0
    return len(weight) if isinstance(weight, Tensor) and weight.dim() == 2 else 0
