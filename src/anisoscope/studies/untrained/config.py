"""What decides the numbers of the study of untrained blocks, checked before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from anisoscope.errors import AnisoscopeError, unknown_name
from anisoscope.studies.untrained.block import STANDARD_DEVIATION, UntrainedBlock, generator

# Weights of an untrained block: N(0, 0.02²), Xavier, orthogonal, or what its family begins with.


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
def initialise(block: UntrainedBlock, init: str, *, seed: int) -> None:
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


HEAD_WIDTH = 64  # of a head, where the number of heads is not given
INPUT_NORMS = {"both": (True, False), "yes": (True,), "no": (False,)}
_BIASES = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0)


@dataclass(frozen=True)
class UntrainedPreset:
    """How large a study is."""

    widths: tuple[int, ...]
    seeds: tuple[int, ...]
    sequences: int
    length: int
    rows: int = 32  # query rows of each sequence whose scores are looked at


PRESETS = {
    "tiny": UntrainedPreset((64, 128), (0, 1, 2), sequences=8, length=128),
    "full": UntrainedPreset((768,), (0, 1, 2, 3, 4), sequences=16, length=512),
}


class BlockArm(NamedTuple):
    """One block: what is measured and kept together."""

    family: str
    width: int
    seed: int
    init: str

    @property
    def name(self) -> str:
        """What its part of the run is called."""
        return f"{self.family}-{self.init}-{self.width}-{self.seed}"


@dataclass(frozen=True)
class UntrainedConfig:
    """Everything that decides the numbers; what is None is as the preset has it."""

    preset: str = "tiny"
    families: tuple[str, ...] = ("bert", "prenorm")
    biases: tuple[float, ...] = _BIASES
    inits: tuple[str, ...] = ("normal", "xavier", "orthogonal")
    input_norm: str = "both"
    widths: tuple[int, ...] | None = None
    heads: int | None = None
    seeds: tuple[int, ...] | None = None
    sequences: int | None = None
    length: int | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise unknown_name("preset", self.preset, PRESETS)
        if self.input_norm not in INPUT_NORMS:
            raise unknown_name("input norm", self.input_norm, INPUT_NORMS)
        for init in self.inits:
            if init not in INITS:
                raise unknown_name("initialisation", init, INITS)
        for name in ("families", "biases", "inits", "widths", "seeds"):
            _check_list(name, getattr(self, name))
        for name, least in (("sequences", 2), ("length", 8), ("heads", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise AnisoscopeError(f"{name} is {value}; expected at least {least}.")
        self._check_numbers()

    def _check_numbers(self) -> None:
        for bias in self.biases:
            if not 0 <= bias < math.inf:
                raise AnisoscopeError(f"a bias is {bias:g}; expected sizes from 0 on, such as 0,50,100.")
        for seed in self.size.seeds:
            if seed < 0:
                raise AnisoscopeError(f"a seed is {seed}; expected whole numbers from 0 on.")
        for width in self.size.widths:
            self.heads_of(width)

    @property
    def size(self) -> UntrainedPreset:
        """Sizes as asked for, else as the preset has them."""
        from dataclasses import replace

        names = ("widths", "seeds", "sequences", "length")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return replace(PRESETS[self.preset], **given)

    def heads_of(self, width: int) -> int:
        """The heads of a width: as given, else one for every 64."""
        heads = self.heads or width // HEAD_WIDTH
        if self.heads is None and (width < 1 or width % HEAD_WIDTH):
            raise AnisoscopeError(
                f"width {width} is no multiple of {HEAD_WIDTH}, the width of a head; take one, or give --heads."
            )
        if width < 1 or width % (2 * heads):
            raise AnisoscopeError(
                f"width {width} does not divide into {heads} heads of an even width; take a multiple of {2 * heads}."
            )
        return heads

    @property
    def norms(self) -> tuple[bool, ...]:
        """Whether inputs go through a LayerNorm before the bias, in the order of measuring."""
        return INPUT_NORMS[self.input_norm]

    def arms(self) -> Iterator[BlockArm]:
        """Every block; those that differ in nothing but the initialisation are neighbours."""
        for family in self.families:
            for width in self.size.widths:
                for seed in self.size.seeds:
                    yield from (BlockArm(family, width, seed, init) for init in self.inits)

    @property
    def points(self) -> int:
        """Measurements of one block."""
        return len(self.biases) * len(self.norms)


def _check_list(name: str, values: Sequence[object] | None) -> None:
    """Refuse lists that are empty or name something twice."""
    if values is None:
        return
    if not values:
        raise AnisoscopeError(f"{name} is empty; name something, or leave it out.")
    twice = next((value for value in values if list(values).count(value) > 1), None)
    if twice is not None:
        told = f"{twice:g}" if isinstance(twice, float) else f"{twice}"
        raise AnisoscopeError(f"{name} has {told} twice; name each once.")
