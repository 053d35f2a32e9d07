"""A loss that was computed outside the model, known from the gradients that arrive at what the model returned.

Where a training loop computes its own loss, the model's forward does not see it. If that loss is a cross-entropy of
tokens, each of them with the same weight c (1/n for a mean over n tokens, times loss scaling, accumulation and so on),
the gradient at the logits z of a token with target y is c (softmax(z) − e_y), and at its log-probability it is −c. So c
is read off, and whether the loss is of that kind is checked by the same numbers.

Shapes: B contexts, T positions, V words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anisoscope.capture.graph_hook import on_gradient
from anisoscope.capture.objective import CLOSE, IGNORED, logits_of, output_part

_LOOKED_AT = 64  # tokens whose logits are compared with their gradients
_EXACT = 1e-4  # relative difference that float32 may cause; a smoothed loss of an untrained model is further away
_ROUNDED, _MOST_ROUNDED = 8.0, 0.02  # units in the last place of softmax(z) − e_y, and what they may be of it at most
_LEAST = 1e-3  # a gradient this much smaller than the largest one is of a token that is predicted already


@dataclass(frozen=True)
class TokenWeight:
    """A loss that is Σ c ℓ over some tokens: the weight c and the number of tokens."""

    each: float
    tokens: int


def watch_tokens(output: Any, tell: Callable[[TokenWeight | None], None], *, shield: Callable[..., Any]) -> None:
    """Have the weight of tokens told when gradients arrive at a model's output: None if the loss is of another kind."""
    log_probs, logits = output_part(output, "log_probs"), logits_of(output)
    if isinstance(log_probs, Tensor):
        watched, read = log_probs, _of_log_probabilities
    elif logits is not None and logits.dim() > 1 and logits.is_floating_point():
        watched, read = logits, partial(_of_logits, logits=_lasting(logits))
    else:
        return

    def arrived(gradient: Tensor | None) -> None:
        if gradient is not None:  # as it is at outputs of a compiled graph that the loss was not computed from
            tell(read(gradient))

    on_gradient(watched, shield(arrived))


def _lasting(logits: Tensor) -> Tensor:
    """The logits, to be kept until the backward pass: a copy of those that a compiled graph returned on a GPU.

    They may lie in the memory of CUDA graphs, which refuse a replay in which somebody holds what they would overwrite.
    """
    compiled = type(logits.grad_fn).__name__ == "CompiledFunctionBackward"
    return logits.detach().clone() if compiled and logits.is_cuda else logits.detach()


def shifted_log_probabilities(output: Any, labels: Tensor) -> bool | None:
    """Whether log-probabilities that a model returns are of the next token; None if they do not explain its loss."""
    log_probs, loss = output_part(output, "log_probs"), output_part(output, "loss")
    if not isinstance(log_probs, Tensor) or not isinstance(loss, Tensor) or labels.dim() != 2:
        return None
    for shifted, targets in ((True, labels[:, 1:]), (False, labels)):
        if log_probs.shape != targets.shape:
            continue
        summed = -log_probs.detach().double().sum()
        mean = summed / (targets != IGNORED).sum().clamp_min(1)
        close = (mean - loss.detach().double()).abs() <= CLOSE * mean.abs().clamp_min(1e-6)
        return shifted if bool(close) else None
    return None


def _of_log_probabilities(g: Tensor) -> TokenWeight | None:
    flat = g.detach().double().flatten()
    counted = flat[flat != 0]
    if not len(counted):
        return None
    each = -counted.mean()
    same = (counted + each).abs().max() <= _tolerance(g) * each.abs()
    return TokenWeight(float(each), len(counted)) if bool(same & (each > 0)) else None


def _of_logits(g: Tensor, logits: Tensor) -> TokenWeight | None:
    """From a few tokens, those with the largest gradients; the others are only counted."""
    flat, z = g.detach().reshape(-1, g.shape[-1]), logits.reshape(-1, logits.shape[-1])
    sizes = flat.float().norm(dim=1)
    counted = int((sizes > 0).sum())
    if not counted:
        return None
    top = sizes.topk(min(counted, _LOOKED_AT)).indices
    top = top[sizes[top] >= _LEAST * sizes[top[0]]]
    mine = flat[top].double()
    p = z[top].double().softmax(1)
    y = mine.argmin(1, keepdim=True)
    direction = p.scatter_add(1, y, -torch.ones_like(y, dtype=p.dtype))  # softmax(z) − e_y
    squared = direction.square().sum(1)
    products = (mine * direction).sum(1)
    each = products.sum() / squared.sum()
    # of a token that is predicted well softmax(z) − e_y is little more than what the precision of the loss rounds
    allowed = _tolerance(g) + (_ROUNDED * torch.finfo(_precision(g)).eps / squared.sqrt()).clamp_max(_MOST_ROUNDED)
    same = (products / squared - each).abs() <= allowed * each
    left = (mine - each * direction).norm(dim=1) <= 2 * allowed * each * squared.sqrt()
    return TokenWeight(float(each), counted) if bool((each > 0) & same.all() & left.all()) else None


def _precision(g: Tensor) -> torch.dtype:
    """That of the loss: of half precision it is computed in float32."""
    return torch.float64 if g.dtype == torch.float64 else torch.float32


def _tolerance(g: Tensor) -> float:
    return _EXACT if g.dtype in (torch.float32, torch.float64) else CLOSE
