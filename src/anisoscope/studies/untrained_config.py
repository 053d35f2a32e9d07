"""What decides the numbers of the study of untrained blocks, checked before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from anisoscope.errors import AnisoscopeError, unknown_name
from anisoscope.studies.untrained_weights import INITS

HEAD_WIDTH = 64  # of a head, where the number of heads is not given
INPUT_NORMS = {"both": (True, False), "yes": (True,), "no": (False,)}
_BIASES = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0)


@dataclass(frozen=True)
class Preset:
    """How large a study is."""

    widths: tuple[int, ...]
    seeds: tuple[int, ...]
    sequences: int
    length: int
    rows: int = 32  # query rows of each sequence whose scores are looked at


PRESETS = {
    "tiny": Preset((64, 128), (0, 1, 2), sequences=8, length=128),
    "full": Preset((768,), (0, 1, 2, 3, 4), sequences=16, length=512),
}


class Arm(NamedTuple):
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
    def size(self) -> Preset:
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

    def arms(self) -> Iterator[Arm]:
        """Every block; those that differ in nothing but the initialisation are neighbours."""
        for family in self.families:
            for width in self.size.widths:
                for seed in self.size.seeds:
                    yield from (Arm(family, width, seed, init) for init in self.inits)

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
