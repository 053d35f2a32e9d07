"""Configuration of the study of untrained blocks: is a transformer block anisotropic before training?"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, NamedTuple

from anisoscope.errors import AnisoscopeError, check_known
from anisoscope.option import Device, Option, check_least, given, listed, numbers, seed_numbers

INITS = ("normal", "xavier", "orthogonal", "own")  # see `fresh_block.INITS`
HEAD_WIDTH = 64  # width of a head if the number of heads is not given
INPUT_NORMS = {"both": (True, False), "yes": (True,), "no": (False,)}
_BIASES = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0)


@dataclass(frozen=True)
class UntrainedPreset:
    """The size of a study."""

    widths: tuple[int, ...]
    seeds: tuple[int, ...]
    sequences: int
    length: int
    rows: int = 32  # query rows of each sequence whose scores are measured


PRESETS = {
    "tiny": UntrainedPreset((64, 128), (0, 1, 2), sequences=8, length=128),
    "full": UntrainedPreset((768,), (0, 1, 2, 3, 4), sequences=16, length=512),
}


class BlockArm(NamedTuple):
    """One block (family, initialisation, width, seed), measured and stored as a unit."""

    family: str
    width: int
    seed: int
    init: str

    @property
    def name(self) -> str:
        """The name of its files in the run folder."""
        return f"{self.family}-{self.init}-{self.width}-{self.seed}"


@dataclass(frozen=True)
class UntrainedConfig:
    """The configuration of the study; fields that are None default to the preset."""

    preset: Annotated[str, Option("tiny (2 cores, a minute or two) or full (BERT-base size; half an hour of CPU).")] = (
        "tiny"
    )
    families: Annotated[
        tuple[str, ...],
        Option(
            "Families of blocks: bert, gpt2, llama, vit, …; prenorm is our own. Default: bert,prenorm.", parse=listed
        ),
    ] = ("bert", "prenorm")
    biases: Annotated[
        tuple[float, ...],
        Option("Sizes N of the bias; default: 0,0.2,0.5,1,2,5,10,20,50,100,200.", parse=numbers(float, "0,0.5,50")),
    ] = _BIASES
    seeds: Annotated[
        tuple[int, ...] | None, Option("Seeds such as 0-4; intervals are over them.", parse=seed_numbers)
    ] = None
    inits: Annotated[
        tuple[str, ...],
        Option("normal, xavier, orthogonal, own (as the family has it); default: the first 3.", parse=listed),
    ] = INITS[:3]
    widths: Annotated[
        tuple[int, ...] | None, Option("Widths such as 128,256,512,768.", parse=numbers(int, "128,768"))
    ] = None
    heads: Annotated[int | None, Option("Heads; default: one for every 64 of the width.")] = None
    length: Annotated[int | None, Option("Positions of a sequence.")] = None
    sequences: Annotated[int | None, Option("Sequences.")] = None
    input_norm: Annotated[str, Option("Embeddings through a LayerNorm before the bias: yes, no or both.")] = "both"
    device: Device = "auto"

    def __post_init__(self) -> None:
        check_known("preset", self.preset, PRESETS)
        check_known("input norm", self.input_norm, INPUT_NORMS)
        for init in self.inits:
            check_known("initialisation", init, INITS)
        for name in ("families", "biases", "inits", "widths", "seeds"):
            values = getattr(self, name)
            if values is None:
                continue
            if not values:
                raise AnisoscopeError(f"{name} is empty; name something, or leave it out.")
            if twice := [value for value in values if values.count(value) > 1]:
                repeated = f"{twice[0]:g}" if isinstance(twice[0], float) else f"{twice[0]}"
                raise AnisoscopeError(f"{name} has {repeated} twice; name each once.")
        check_least(self, {"sequences": 2, "length": 8, "heads": 1})
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
        """Sizes as given, else from the preset."""
        return replace(PRESETS[self.preset], **given(self, "widths", "seeds", "sequences", "length"))

    @property
    def seed(self) -> int:
        """The first seed."""
        return self.size.seeds[0]

    def heads_of(self, width: int) -> int:
        """The number of heads of a width: as given, else width / 64."""
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
        """Whether inputs are layer-normalised before the bias is added: the cases to measure, in order."""
        return INPUT_NORMS[self.input_norm]

    def arms(self) -> list[BlockArm]:
        """All blocks."""
        return [BlockArm(*arm) for arm in product(self.families, self.size.widths, self.size.seeds, self.inits)]

    @property
    def points(self) -> int:
        """The number of measurements of one block."""
        return len(self.biases) * len(self.norms)
