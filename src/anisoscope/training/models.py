"""The families of small language models that can be trained, and what each of them cannot be."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from anisoscope.errors import AnisoscopeError, unknown_name
from anisoscope.models.attention_variant import VARIANTS
from anisoscope.models.load import quiet
from anisoscope.models.source import ModelSource

ARCHITECTURES = {"decoder": "gpt2", "encoder": "bert"}  # with the family that is built when none is named
OBJECTIVES = {"decoder": "next", "encoder": "masked"}  # with what is predicted when nothing is said
_BOTH = ("decoder", "encoder")


@dataclass(frozen=True)
class TrainableFamily:
    """One row of the table: what a transformers architecture needs beside the sizes that all of them take.

    `model_type` is transformers' own name, `dropout` the fields that carry one, `inner` the width of the MLP over
    the width of the stream, `rotary` says that heads must have an even width. A family of both architectures is one
    class with the same weights in all arms: `is_causal` in its configuration decides the mask, and its loss is read at
    the masked tokens or at the next ones.
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
_GPT2_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
_GATED = 8 / 3  # a gated MLP has three matrices; with this width it has the parameters of two of four times the width
_FULL_ROTARY = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0}
_MODERNBERT_DROPOUT = ("attention_dropout", "embedding_dropout", "mlp_dropout")

FAMILIES: dict[str, TrainableFamily] = {
    family.name: family
    for family in (
        TrainableFamily("bert", ("encoder",), "bert", _BERT_DROPOUT, rotary=False),
        TrainableFamily("modernbert", ("encoder",), "modernbert", _MODERNBERT_DROPOUT, inner=_GATED),
        TrainableFamily("eurobert", ("encoder",), "eurobert", ("attention_dropout",), inner=_GATED),
        TrainableFamily("gpt2", ("decoder",), "gpt2", _GPT2_DROPOUT, inner_field="n_inner", rotary=False),
        TrainableFamily("gpt_neox", ("decoder",), "gpt_neox", ("attention_dropout", "hidden_dropout")),
        TrainableFamily("llama", ("decoder",), "llama", ("attention_dropout",), inner=_GATED),
        # positions relative to each other: with learned absolute ones a masked model that sees both sides stays at the
        # frequencies of single characters for thousands of updates
        TrainableFamily(
            "prenorm",
            _BOTH,
            "gpt_neox",
            ("attention_dropout", "hidden_dropout"),
            options={"use_parallel_residual": False, "rope_parameters": _FULL_ROTARY},
        ),
    )
}


def choose_family(arch: str, name: str | None = None) -> TrainableFamily:
    """The family of that name, which must be of that architecture; the usual one when none is named.

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


def check_objective(family: TrainableFamily, arch: str, task: str) -> None:
    """Refuse what cannot be learned, and what transformers has no class for."""
    if task not in OBJECTIVES.values():
        raise unknown_name("objective", task, OBJECTIVES.values())
    if arch == "encoder" and task == "next":
        raise AnisoscopeError(
            "an encoder sees the token it would have to predict next, so the answer leaks; take --objective masked, "
            "or --arch decoder."
        )
    if arch == "decoder" and task == "masked" and len(family.archs) == 1:
        fitting = ", ".join(row.name for row in FAMILIES.values() if len(row.archs) > 1)
        raise AnisoscopeError(
            f"{family.name} has no causal model with a masked-token loss, because its own shifts the labels; take "
            f"--family {fitting}, or --objective next."
        )


def check_sizes(family: TrainableFamily, *, width: int, heads: int) -> None:
    """Refuse widths that the heads do not share evenly."""
    step = 2 * heads if family.rotary else heads
    if width % step:
        why = " and an even width of each (rotary positions)" if family.rotary else ""
        below = width // step * step
        nearest = f"{below} or {below + step}" if below else f"{step}"
        raise AnisoscopeError(
            f"width {width} does not divide into {heads} heads{why}; take a multiple of {step}, such as {nearest}."
        )


def check_attention(family: TrainableFamily, arch: str, variant: str | None) -> None:
    """Refuse attention that is not known, and families whose queries and keys it cannot change."""
    if variant is None:
        return
    if variant not in VARIANTS:
        raise unknown_name("attention", variant, VARIANTS)
    if VARIANTS[variant] is not None and family.model_type != "gpt_neox":
        fitting = " or ".join(row.name for row in FAMILIES.values() if row.model_type == "gpt_neox")
        raise AnisoscopeError(f"{family.name} has ordinary attention only, not {variant}; take --family {fitting}.")
    if variant == "mean-removed" and arch == "encoder":
        raise AnisoscopeError(
            "mean-removed attention takes the mean over positions so far, and an encoder sees them all; take --arch "
            "decoder, or other attention."
        )


def hushed() -> AbstractContextManager[None]:
    """transformers without log lines and bars, for what is built, saved and loaded here."""
    return quiet(ModelSource("training", "config", "training"))
