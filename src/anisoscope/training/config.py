"""Everything that decides a training run, checked before anything is computed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from anisoscope.data.resampling import parse_frequency
from anisoscope.data.vocabulary import parse_tokens
from anisoscope.errors import AnisoscopeError, unknown_name
from anisoscope.models.placement import choose_device
from anisoscope.training.models import OBJECTIVES, check_attention, check_objective, check_sizes, choose_family

PRECISIONS = ("auto", "float32", "float64", "bfloat16")


@dataclass(frozen=True)
class CommonTrainConfig(ABC):
    """What all trainings have in common: the size of the model, the updates, and the checkpoints."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    dropout: float = 0.0
    data: str = "embedded"
    steps: int = 1000
    batch_size: int = 16  # contexts of one micro-batch
    accumulate: int = 1  # micro-batches of one update
    lr: float = 1e-3
    warmup: int | None = None  # updates; None = a twentieth of them
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0  # of the gradient norm; 0 = none
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"  # bfloat16 autocast on CUDA, float32 elsewhere
    checkpoints: str = "log,every:500"  # see checkpoint_steps
    compile: bool = False

    least: ClassVar[dict[str, float]] = {
        "width": 2,
        "warmup": 0,
        "seed": 0,
        **dict.fromkeys(("layers", "heads", "steps", "batch_size", "accumulate"), 1),
        **dict.fromkeys(("weight_decay", "clip", "dropout"), 0.0),
    }
    below_one: ClassVar[tuple[str, ...]] = ("dropout",)

    def __post_init__(self) -> None:
        for name, least in self.least.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise AnisoscopeError(f"{name} is {value}; expected at least {least}.")
        for name in self.below_one:
            if not 0 <= getattr(self, name) < 1:
                raise AnisoscopeError(f"{name} is {getattr(self, name)}; expected a share from 0 up to, not with, 1.")
        if self.seed >= 1 << 31:
            raise AnisoscopeError(f"seed is {self.seed}; expected less than 2**31.")
        if not 0 < self.lr < math.inf:
            raise AnisoscopeError(f"the learning rate is {self.lr}; expected a number above 0.")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise AnisoscopeError(f"betas are {self.betas}; expected two numbers from 0 up to, not with, 1.")
        checkpoint_steps(self.checkpoints, self.steps)
        choose_device(self.device)
        if self.dtype not in PRECISIONS:
            raise unknown_name("dtype", self.dtype, PRECISIONS)

    @property
    @abstractmethod
    def arm(self) -> str:
        """What the model is called."""

    @property
    @abstractmethod
    def entry(self) -> dict[str, str]:
        """Words about the model that only its configuration knows."""

    @property
    @abstractmethod
    def tokens_per_step(self) -> int:
        """Tokens (or frames, or patches) that one update sees."""

    def learning_rate(self, step: int) -> float:
        """The rate of update `step`: linear warm-up, then a cosine down to a tenth at the last update."""
        warmup = max(1, self.steps // 20) if self.warmup is None else self.warmup
        if step < warmup:
            return self.lr * (step + 1) / warmup
        done = (step - warmup) / max(1, self.steps - 1 - warmup)
        return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done))))


@dataclass(frozen=True)
class TrainConfig(CommonTrainConfig):
    """What to train, on what, how, and what to keep of it.

    >>> TrainConfig(arch="encoder").task, TrainConfig(family="prenorm", objective="masked").task
    ('masked', 'masked')
    """

    arch: str = "decoder"  # decoder: causal attention; encoder: attention to both sides
    family: str | None = None  # see models.FAMILIES; None = gpt2 or bert
    objective: str | None = None  # next or masked; None = next in a decoder, masked in an encoder
    attention: str | None = None  # see capture.variants; None = softmax
    context: int = 128
    tied: bool = False  # one table for input and output; it aligns gradients with activations from the first step on
    tokens: str = "char"  # enwik8 (its 205 bytes), or bpe:8192
    text_field: str = "text"
    limit: float | None = None  # megabytes of text
    frequency: str = "natural"  # or flat, or zipf:S
    mask_rate: float = 0.15  # masked language models only

    least: ClassVar[dict[str, float]] = {**CommonTrainConfig.least, "context": 4}
    below_one: ClassVar[tuple[str, ...]] = (*CommonTrainConfig.below_one, "mask_rate")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.limit is not None and not self.limit > 0:
            raise AnisoscopeError(f"limit is {self.limit} megabytes; expected more than 0.")
        if self.mask_rate <= 0:
            raise AnisoscopeError(f"mask_rate is {self.mask_rate}; a masked language model needs some masked tokens.")
        family = choose_family(self.arch, self.family)
        check_sizes(family, width=self.width, heads=self.heads)
        check_objective(family, self.arch, self.task)
        check_attention(family, self.arch, self.attention)
        parse_tokens(self.tokens)
        parse_frequency(self.frequency)

    @property
    def task(self) -> str:
        """What is predicted: the `next` token, or `masked` ones."""
        return self.objective or OBJECTIVES[self.arch]

    @property
    def arm(self) -> str:
        """What the model is called: its kind, its task if that is not the usual one, and how its corpus was resampled.

        >>> TrainConfig().arm, TrainConfig(frequency="flat").arm, TrainConfig(frequency="zipf:1.50").arm
        ('decoder', 'decoder-flat', 'decoder-zipf1.5')
        >>> TrainConfig(family="prenorm", objective="masked").arm
        'decoder-masked'
        >>> TrainConfig(family="prenorm", attention="qk-norm").arm
        'decoder-qk-norm'
        """
        kind = self.arch if self.task == OBJECTIVES[self.arch] else f"{self.arch}-{self.task}"
        kind += f"-{self.attention}" if self.attention not in (None, "softmax") else ""
        if self.frequency in ("natural", "flat"):
            return kind if self.frequency == "natural" else f"{kind}-flat"
        return f"{kind}-zipf{parse_frequency(self.frequency):g}"

    @property
    def entry(self) -> dict[str, str]:
        """Kind, objective, family and attention."""
        words = {"type": self.arch, "objective": self.task, "family": choose_family(self.arch, self.family).name}
        return {**words, "attention": self.attention or "softmax"}

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one update sees."""
        return self.batch_size * self.accumulate * self.context


def checkpoint_steps(schedule: str, steps: int) -> tuple[int, ...]:
    """After which updates weights are kept: `log` (0, 1, 2, 4, …), `every:N`, numbers, joined by commas; and the last.

    >>> checkpoint_steps("log", 10), checkpoint_steps("0,every:4", 10), checkpoint_steps("none", 10)
    ((0, 1, 2, 4, 8, 10), (0, 4, 8, 10), (10,))
    """
    found = {steps}
    for word in filter(None, (word.strip() for word in schedule.split(","))):
        if word == "log":
            found |= {0, *(1 << k for k in range(steps.bit_length()))}
        elif word.startswith("every:") and word[6:].isdecimal() and int(word[6:]) > 0:
            found |= set(range(int(word[6:]), steps + 1, int(word[6:])))
        elif word.isdecimal():
            found.add(int(word))
        elif word != "none":
            raise AnisoscopeError(
                f"checkpoints {word!r} is not understood; expected log, every:N, none or steps such as 0,64,512."
            )
    return tuple(sorted(step for step in found if step <= steps))
