"""What a monitor asks of a model, a probe and a loss before it believes them."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from anisoscope.capture.live import MicroBatch
from anisoscope.errors import AnisoscopeError


def width_of(model: nn.Module) -> int:
    """The configured width of a model; a very large one where it says none."""
    config = getattr(model, "config", None)
    value = getattr(config, "hidden_size", None) or getattr(config, "d_model", None)
    return int(value) if value else 1 << 30


def check_learning(model: nn.Module) -> None:
    """Refuse a model in which nothing learns."""
    if not any(p.requires_grad for p in model.parameters()):
        raise AnisoscopeError(
            f"every parameter of {type(model).__name__} is frozen, so nothing learns and there are no gradients; "
            "unfreeze some (parameter.requires_grad_(True)), or use `profile` for its geometry."
        )


def listed(probe: Any) -> list[Any]:
    """The batches of a probe, also where there is only one."""
    if isinstance(probe, Tensor) or hasattr(probe, "keys"):
        return [probe]
    return list(probe)


def loss_factor(batch: MicroBatch, loss: str, tokens: int | None, scale: float, *, step: int) -> float:
    """What turns the gradients that arrived into gradients of the summed loss."""
    if loss not in ("auto", "mean", "sum"):
        raise AnisoscopeError(f"loss={loss!r} is not known; expected auto, mean or sum.")
    if loss == "auto":
        if batch.seed is None or not batch.tokens():
            raise AnisoscopeError(
                f"the loss that the model returned took no part in the backward pass of step {step}, so the scale of "
                'its gradients is not known; say monitor.step(i, loss="mean", tokens=n) or loss="sum", or '
                "give a held-out probe= instead."
            )
        return batch.tokens() / batch.seed if batch.seed else math.nan  # a loss times 0 has lost its gradients
    if loss == "mean" and not tokens:
        raise AnisoscopeError('loss="mean" needs tokens=, the number of target tokens that the mean was taken over.')
    return (tokens or 1) / scale if loss == "mean" else 1.0 / scale


def unseen(step: int, *, forward: bool) -> AnisoscopeError:
    """A step that was to be measured and in which nothing was learned."""
    what = "no backward pass" if forward else "no forward pass"
    return AnisoscopeError(
        f"{what} was seen in step {step}, which was to be measured; run the model's forward and loss.backward() inside "
        "`with monitor.step(…)`, and attach the monitor before torch.compile."
    )
