"""Metrics of training itself: losses, gradient norm, learning rate, and the state of checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anisoscope.metrics.engine.metric import measured

SMOOTHING = 0.5  # added to every count, so that a type unseen in training has a finite loss
_LOGGED = "ours: as the training loop has it"
_trained = partial(measured, "train", reference=_LOGGED)
_positive = partial(_trained, bounds=(0.0, None))


@_trained(
    title="Training loss",
    formula="Σ ℓ / n",
    convention="mean over the n predicted tokens (or examples) of the batch, in nats; as the training loop logs it",
)
def loss(losses: Tensor) -> float:
    """Loss of the training batch of that step."""
    return float(losses.double().mean())


@measured(
    "tangent",
    "sweep",
    "train",
    title="Probe loss",
    formula="Σ ℓ / n",
    reference="ours: the loss that the model is trained on",
    convention="summed loss of the held-out contexts over their n predicted tokens, in nats; every target counts alike",
    bounds=(0.0, None),
)
def probe_loss(total: float, tokens: int) -> float:
    """Mean loss on the held-out probe."""
    return total / tokens


@_positive(
    title="Weighted probe loss",
    formula="Σ w ℓ / n",
    reference="ours: the loss that the model is trained on, where targets are weighted",
    convention="over the n predicted tokens of the held-out contexts, in nats; w = weight of the target, 1 on average "
    "over the training tokens; only where the training loss is weighted",
)
def weighted_probe_loss(total: float, tokens: int) -> float:
    """Mean loss on the held-out probe, with targets weighted as in training."""
    return total / tokens


def constant_costs(counts: Tensor) -> Tensor:
    """The loss −log p of every target under the best constant prediction, p = (c + ½)/(Σc + V/2), float64 [V].

    >>> [round(p, 6) for p in constant_costs(torch.tensor([3, 0])).neg().exp().tolist()]
    [0.875, 0.125]
    """
    smoothed = counts.double() + SMOOTHING
    return smoothed.sum().log() - smoothed.log()


@measured(
    "train",
    title="Loss of the best constant",
    formula="−Σ log p(y) / n, p(y) = (c_y + ½) / (Σc + V/2)",
    reference="ours; add-½ smoothing: Krichevsky & Trofimov 1981",
    convention="in nats, on the targets of the probe loss, with c the counts of the V targets (tokens, classes) in the "
    "training data; weighted=1: w c for c and Σ w log p, for the weighted probe loss; unit=other: the loss of the "
    "constant of another objective, such as the mean in regression, as given",
    bounds=(0.0, None),
)
def constant_loss(counts: Tensor, targets: Tensor) -> float:
    """Held-out loss of the best constant prediction that the training data allow; a model that learned lies below."""
    return float(constant_costs(counts)[targets].mean())


@_positive(
    title="Gradient norm",
    formula="√Σ ‖∂L/∂θ‖²",
    reference="Pascanu et al. 2013, arXiv:1211.5063 (clipping)",
    convention="over all parameters that have a gradient, of the mean loss",
)
def gradient_norm(gradients: Iterable[Tensor]) -> float:
    """Norm of the gradient of all parameters, before clipping."""
    norms = [gradient.detach().float().norm() for gradient in gradients]
    return float(torch.stack([norm.to(norms[0].device) for norm in norms]).norm()) if norms else 0.0


@_positive(
    title="Learning rate",
    formula="η of the update that follows",
    convention="of the optimiser's first group of parameters",
)
def learning_rate(groups: Sequence[Mapping[str, Any]]) -> float:
    """Step size of the optimiser."""
    return float(groups[0]["lr"])


@measured(
    "tangent",
    "sweep",
    title="Intact checkpoint",
    formula="1 where nothing is wrong with it, else 0",
    reference="ours",
    convention="the note names what is wrong",
    bounds=(0.0, 1.0),
)
def checkpoint(flags: Sequence[str]) -> float:
    """Whether a checkpoint of a series is what its name says."""
    return float(not flags)
