"""Weights of an untrained block: N(0, 0.02²), Xavier, orthogonal, or what its family begins with."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from anisoscope.errors import unknown_name
from anisoscope.studies.untrained_block import STANDARD_DEVIATION, Block, generator


def _normal(weight: Tensor, random: torch.Generator) -> None:
    nn.init.normal_(weight, std=STANDARD_DEVIATION, generator=random)


def _xavier(weight: Tensor, random: torch.Generator) -> None:
    nn.init.xavier_uniform_(weight, generator=random)


def _orthogonal(weight: Tensor, random: torch.Generator) -> None:
    nn.init.orthogonal_(weight, generator=random)


INITS: dict[str, Callable[[Tensor, torch.Generator], None] | None] = {
    "normal": _normal,  # N(0, 0.02²)
    "xavier": _xavier,  # Glorot and Bengio 2010, uniform
    "orthogonal": _orthogonal,  # Saxe et al. 2014
    "own": None,  # as transformers builds the family
}


@torch.no_grad()
def initialise(block: Block, init: str, *, seed: int) -> None:
    """New weights for every matrix of a block; its biases become 0 and its norms stay the identity."""
    if init not in INITS:
        raise unknown_name("initialisation", init, INITS)
    fill = INITS[init]
    if fill is None:
        return
    random = generator(seed, "weights")
    inside = {id(p) for p in block.attention.parameters()}
    for name, parameter in block.module.named_parameters():
        if parameter.dim() == 2:
            fresh = torch.empty(parameter.shape)
            for piece in _pieces(fresh, block.width) if id(parameter) in inside else (fresh,):
                fill(piece, random)
            parameter.copy_(fresh)
        elif name.endswith("bias"):
            parameter.zero_()


def _pieces(weight: Tensor, width: int) -> Iterator[Tensor]:
    """A fused projection is several square ones side by side: each gets weights of its own scale.

    >>> [tuple(piece.shape) for piece in _pieces(torch.empty(4, 12), 4)]
    [(4, 4), (4, 4), (4, 4)]
    """
    long = 0 if weight.shape[0] >= weight.shape[1] else 1
    whole = weight.shape[1 - long] == width and weight.shape[long] % width == 0
    yield from weight.split(width, dim=long) if whole else (weight,)
