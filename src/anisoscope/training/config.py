"""The options of training runs, validated before anything is computed, and the model families that can be trained.

This file imports no torch, so that the command line can read the options without it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from anisoscope.errors import AnisoscopeError, unknown_name
from anisoscope.option import Device, Option, Seed, Text, check_least, check_most

PRECISIONS = ("auto", "float32", "float64", "bfloat16")
ARCHITECTURES = {"decoder": "gpt2", "encoder": "bert"}  # with their default family
OBJECTIVES = {"decoder": "next", "encoder": "masked"}  # with their default objective


@dataclass(frozen=True)
class TrainableFamily:
    """A trainable model family: what a transformers architecture needs beside the sizes that all of them take.

    `model_type` is transformers' name, `dropout` the configuration fields of dropout rates, `inner` the width of the
    MLP over that of the stream; with `rotary`, heads must have an even width. A family of both architectures is one
    class with the same weights in all arms: `is_causal` in its configuration decides the mask, and its loss is taken
    at the masked tokens or at the next ones.
    """

    name: str
    archs: tuple[str, ...]
    model_type: str
    dropout: tuple[str, ...]
    inner: float = 4.0
    inner_field: str = "intermediate_size"
    rotary: bool = True
    options: dict[str, Any] = field(default_factory=dict)


_BERT_DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_NEOX_DROPOUT = ("attention_dropout", "hidden_dropout")
_GPT2_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
_GATED = 8 / 3  # a gated MLP has three matrices; with this width it has the parameters of two of four times the width
_FULL_ROTARY = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0}
_SEQUENTIAL = {"use_parallel_residual": False, "rope_parameters": _FULL_ROTARY}
_MODERNBERT_DROPOUT = ("attention_dropout", "embedding_dropout", "mlp_dropout")

FAMILIES: dict[str, TrainableFamily] = {
    family.name: family
    for family in (
        TrainableFamily("bert", ("encoder",), "bert", _BERT_DROPOUT, rotary=False),
        TrainableFamily("modernbert", ("encoder",), "modernbert", _MODERNBERT_DROPOUT, inner=_GATED),
        TrainableFamily("eurobert", ("encoder",), "eurobert", ("attention_dropout",), inner=_GATED),
        TrainableFamily("gpt2", ("decoder",), "gpt2", _GPT2_DROPOUT, inner_field="n_inner", rotary=False),
        TrainableFamily("gpt_neox", ("decoder",), "gpt_neox", _NEOX_DROPOUT),
        TrainableFamily("llama", ("decoder",), "llama", ("attention_dropout",), inner=_GATED),
        # relative positions: with learned absolute ones a bidirectional masked model learns nothing but character
        # frequencies for thousands of updates
        TrainableFamily("prenorm", ("decoder", "encoder"), "gpt_neox", _NEOX_DROPOUT, options=_SEQUENTIAL),
    )
}


def choose_family(arch: str, name: str | None = None) -> TrainableFamily:
    """The family of that name, which must fit the architecture; the default family without a name.

    >>> choose_family("decoder").name, choose_family("encoder", "modernbert").name
    ('gpt2', 'modernbert')
    """
    if arch not in ARCHITECTURES:
        raise unknown_name("architecture", arch, ARCHITECTURES)
    name = name or ARCHITECTURES[arch]
    if name not in FAMILIES:
        raise unknown_name("family", name, FAMILIES)
    family = FAMILIES[name]
    if arch not in family.archs:
        fitting = ", ".join(sorted(row.name for row in FAMILIES.values() if arch in row.archs))
        raise AnisoscopeError(
            f"{name} is a family of {family.archs[0]}s, and the architecture asked for is {arch}; take one of "
            f"{fitting}, or --arch {family.archs[0]}."
        )
    return family


@dataclass(frozen=True)
class CommonTrainConfig(ABC):
    """The options of all trainings: size of the model, updates, checkpoints."""

    data: Text = "embedded"
    steps: Annotated[int, Option("Updates.")] = 1000
    layers: Annotated[int, Option("Blocks.")] = 4
    width: Annotated[int, Option("Width of the residual stream.")] = 128
    heads: Annotated[int, Option("Attention heads.")] = 4
    batch_size: Annotated[int, Option("Contexts of a micro-batch.")] = 16
    accumulate: Annotated[int, Option("Micro-batches of an update.")] = 1
    lr: Annotated[float, Option("Peak learning rate (warm-up, then cosine to a tenth).")] = 1e-3
    warmup: int | None = None  # updates; None = a twentieth of them
    weight_decay: Annotated[float, Option("Decoupled weight decay.")] = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0  # of the gradient norm; 0 = none
    dropout: Annotated[float, Option("Dropout.")] = 0.0
    checkpoints: Annotated[str, Option("Kept weights: log, every:N, none, steps, comma-separated.")] = "log,every:500"
    compile: Annotated[
        bool | None,
        Option("torch.compile the training, or not; default: language models on CUDA.", name="--compile/--no-compile"),
    ] = None
    background: Annotated[
        bool | None,
        Option("Analyse measured steps in another process; default: on CUDA.", name="--background/--no-background"),
    ] = None
    dtype: Annotated[str, Option("auto (bfloat16 autocast on CUDA), float32, float64, bfloat16.")] = "auto"
    device: Device = "auto"
    seed: Seed = 0

    least: ClassVar[dict[str, float]] = {
        "width": 2,
        "warmup": 0,
        "seed": 0,
        **dict.fromkeys(("layers", "heads", "steps", "batch_size", "accumulate"), 1),
        **dict.fromkeys(("weight_decay", "clip", "dropout"), 0.0),
    }
    most: ClassVar[dict[str, float]] = {"layers": 10_000, "steps": 10**9, "batch_size": 10**6, "accumulate": 10**6}
    below_one: ClassVar[tuple[str, ...]] = ("dropout",)
    worth_compiling: ClassVar[bool] = False  # on CUDA

    def __post_init__(self) -> None:
        from anisoscope.models.placement import choose_device

        check_least(self, self.least)
        check_most(self, self.most)
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

    def compiles(self, device: str) -> bool:
        """Whether the training is compiled on a device of this type: as it was asked, else by `worth_compiling`."""
        return self.worth_compiling and device == "cuda" if self.compile is None else self.compile

    @property
    @abstractmethod
    def arm(self) -> str:
        """The model's name."""

    @property
    @abstractmethod
    def entry(self) -> dict[str, str]:
        """Fields of the model's entry in run.json that come from the configuration."""

    @property
    @abstractmethod
    def positions(self) -> int:
        """Tokens, frames or patches of one context."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens (or frames, or patches) that one update sees."""
        return self.batch_size * self.accumulate * self.positions

    def learning_rate(self, step: int) -> float:
        """The rate of update `step`: linear warm-up, then a cosine down to a tenth at the last update."""
        warmup = max(1, self.steps // 20) if self.warmup is None else self.warmup
        if step < warmup:
            return self.lr * (step + 1) / warmup
        done = (step - warmup) / max(1, self.steps - 1 - warmup)
        return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done))))


@dataclass(frozen=True)
class TrainConfig(CommonTrainConfig):
    """The options of training a language model.

    >>> TrainConfig(arch="encoder").task, TrainConfig(family="prenorm", objective="masked").task
    ('masked', 'masked')
    """

    arch: Annotated[str, Option("decoder (causal attention) or encoder (both sides).")] = "decoder"
    family: Annotated[
        str | None, Option("gpt2, gpt_neox, llama; bert, modernbert, eurobert; prenorm. Default: gpt2 or bert.")
    ] = None
    objective: Annotated[
        str | None, Option("next or masked tokens; default: next in a decoder, masked in an encoder.")
    ] = None
    attention: Annotated[
        str | None, Option("softmax, qk-norm, mean-removed, fixed-sharp, uniform; families prenorm and gpt_neox.")
    ] = None
    context: Annotated[int, Option("Tokens of a context.")] = 128
    tokens: Annotated[str, Option("char, enwik8 (its 205 bytes), or bpe:8192.")] = "char"
    # off: a shared table aligns gradients with activations from the first step on
    tied: Annotated[bool, Option("One embedding table for input and output.")] = False
    frequency: Annotated[
        str, Option("natural, flat or zipf:S: resample the corpus towards that token distribution.")
    ] = "natural"
    target_weights: Annotated[
        str, Option("none, flat or power:A – weigh the loss so that targets count with frequencies f^A (flat: A = 0).")
    ] = "none"
    limit: Annotated[float | None, Option("Megabytes of text to use; default: all.")] = None
    text_field: Annotated[str, Option("Field that holds the text, in .jsonl, .csv and .parquet.")] = "text"
    mask_rate: float = 0.15  # masked language models only

    least: ClassVar[dict[str, float]] = {**CommonTrainConfig.least, "context": 4}
    below_one: ClassVar[tuple[str, ...]] = (*CommonTrainConfig.below_one, "mask_rate")
    worth_compiling: ClassVar[bool] = True

    def __post_init__(self) -> None:
        from anisoscope.data.resampling import parse_frequency
        from anisoscope.data.target_weights import parse_target_weights
        from anisoscope.data.tokens import parse_tokens

        super().__post_init__()
        if self.limit is not None and not self.limit > 0:
            raise AnisoscopeError(f"limit is {self.limit} megabytes; expected more than 0.")
        if self.mask_rate <= 0:
            raise AnisoscopeError(f"mask_rate is {self.mask_rate}; a masked language model needs some masked tokens.")
        self._check_family(choose_family(self.arch, self.family))
        self._check_attention(choose_family(self.arch, self.family))
        parse_tokens(self.tokens)
        parse_frequency(self.frequency)
        parse_target_weights(self.target_weights)

    def _check_family(self, family: TrainableFamily) -> None:
        """Raise an error if the width is not divisible by the heads, or if the objective does not fit the attention."""
        step = 2 * self.heads if family.rotary else self.heads
        if self.width % step:
            why = " and an even width of each (rotary positions)" if family.rotary else ""
            below = self.width // step * step
            raise AnisoscopeError(
                f"width {self.width} does not divide into {self.heads} heads{why}; take a multiple of {step}, such as "
                f"{f'{below} or {below + step}' if below else step}."
            )
        if self.task not in OBJECTIVES.values():
            raise unknown_name("objective", self.task, OBJECTIVES.values())
        if self.arch == "encoder" and self.task == "next":
            raise AnisoscopeError(
                "an encoder sees the token it would have to predict next, so the answer leaks; take --objective "
                "masked, or --arch decoder."
            )
        if self.arch == "decoder" and self.task == "masked" and len(family.archs) == 1:
            fitting = ", ".join(row.name for row in FAMILIES.values() if len(row.archs) > 1)
            raise AnisoscopeError(
                f"{family.name} has no causal model with a masked-token loss, because its own shifts the labels; take "
                f"--family {fitting}, or --objective next."
            )

    def _check_attention(self, family: TrainableFamily) -> None:
        """Raise an error for unknown attention variants, and for families that do not support them."""
        from anisoscope.models.attention_variant import VARIANTS

        if self.attention is None:
            return
        if self.attention not in VARIANTS:
            raise unknown_name("attention", self.attention, VARIANTS)
        if VARIANTS[self.attention] is not None and family.model_type != "gpt_neox":
            fitting = " or ".join(row.name for row in FAMILIES.values() if row.model_type == "gpt_neox")
            raise AnisoscopeError(
                f"{family.name} has ordinary attention only, not {self.attention}; take --family {fitting}."
            )
        if self.attention == "mean-removed" and self.arch == "encoder":
            raise AnisoscopeError(
                "mean-removed attention takes the mean over positions so far, and an encoder sees them all; take "
                "--arch decoder, or other attention."
            )

    @property
    def task(self) -> str:
        """The objective: `next` or `masked` tokens."""
        return self.objective or OBJECTIVES[self.arch]

    @property
    def arm(self) -> str:
        """The model's name: architecture, objective if not the default, attention, resampled corpus, weighted loss.

        >>> TrainConfig().arm, TrainConfig(frequency="flat").arm, TrainConfig(frequency="zipf:1.50").arm
        ('decoder', 'decoder-flat', 'decoder-zipf1.5')
        >>> TrainConfig(target_weights="flat").arm, TrainConfig(arch="encoder", target_weights="power:1.50").arm
        ('decoder-flatloss', 'encoder-powerloss1.5')
        >>> TrainConfig(family="prenorm", objective="masked").arm
        'decoder-masked'
        >>> TrainConfig(family="prenorm", attention="qk-norm").arm
        'decoder-qk-norm'
        """
        from anisoscope.data.resampling import parse_frequency
        from anisoscope.data.target_weights import parse_target_weights

        kind = self.arch if self.task == OBJECTIVES[self.arch] else f"{self.arch}-{self.task}"
        kind += f"-{self.attention}" if self.attention not in (None, "softmax") else ""
        if self.frequency != "natural":
            kind += "-flat" if self.frequency == "flat" else f"-zipf{parse_frequency(self.frequency):g}"
        exponent = parse_target_weights(self.target_weights)
        if exponent is None:
            return kind
        return f"{kind}-flatloss" if exponent == 0 else f"{kind}-powerloss{exponent:g}"

    @property
    def entry(self) -> dict[str, str]:
        """Architecture, objective, family and attention."""
        fields = {"type": self.arch, "objective": self.task, "family": choose_family(self.arch, self.family).name}
        return {**fields, "attention": self.attention or "softmax"}

    @property
    def positions(self) -> int:
        """Tokens of a context."""
        return self.context


@dataclass(frozen=True)
class ClassifierConfig(CommonTrainConfig):
    """The options of training a classifier of pictures or sounds."""

    arch: str = "vit"  # vit, its convolutional counterpart convnext, or wav2vec2
    size: int = 32  # pixels of a side
    patch: int = 4
    seconds: float = 1.0  # of a sound
    examples: int = 2048  # number of examples generated, or most that are read
    objective: str = "classes"  # or masked (patches of a vit, frames of a wav2vec2), or ctc (classes spelt out)

    least: ClassVar[dict[str, float]] = {**CommonTrainConfig.least, "size": 4, "patch": 1, "examples": 4}


def last_step(schedule: str) -> int:
    """The largest step that a checkpoint schedule names, 0 where it names none.

    >>> last_step("log,64,5000"), last_step("every:7")
    (5000, 0)
    """
    return max((int(part) for part in schedule.replace(" ", "").split(",") if part.isdecimal()), default=0)


def checkpoint_steps(schedule: str, steps: int) -> tuple[int, ...]:
    """Steps of a checkpoint schedule: `log` (0, 1, 2, 4, …), `every:N`, numbers, joined by commas; always the last.

    >>> checkpoint_steps("log", 10), checkpoint_steps("0,every:4", 10), checkpoint_steps("none", 10)
    ((0, 1, 2, 4, 8, 10), (0, 4, 8, 10), (10,))
    """
    kept = {steps}
    parts = [part.strip() for part in schedule.split(",") if part.strip()]
    if not parts:
        raise AnisoscopeError(
            f"checkpoints {schedule!r} names none; expected log, every:N, none or steps such as 0,64."
        )
    for part in parts:
        if part == "log":
            kept |= {0, *(1 << k for k in range(steps.bit_length()))}
        elif part.startswith("every:") and part[6:].isdecimal() and int(part[6:]) > 0:
            kept |= set(range(int(part[6:]), steps + 1, int(part[6:])))
        elif part.isdecimal():
            kept.add(int(part))
        elif part != "none":
            raise AnisoscopeError(
                f"checkpoints {part!r} is not understood; expected log, every:N, none or steps such as 0,64,512."
            )
    return tuple(sorted(step for step in kept if step <= steps))
