"""GPT-NeoX decoders with modified queries and keys, for the sharpness study.

A variant replaces the fused linear of a block by one that changes queries and keys; rotation, mask, softmax and the
implementation of attention stay those of transformers. So a capture and the model's own attention probabilities see
the changed queries and keys.

Notation: q, k of one head, width d; q̂ = q/‖q‖; E the mean over positions so far; scores are q·k/√d.

    softmax       q, k                                    as they are
    qk-norm       (τ√d)^½ q̂, (τ√d)^½ k̂                    scores τ cos(q, k); τ = exp(t) learned by head, √d at first
    mean-removed  q − E q, k − E k                        no drift; see `MeanRemoved`
    fixed-sharp   as qk-norm, τ = 4√d and not learned     scores from −4√d to 4√d, whatever the weights do
    uniform       0, 0                                    every key that the mask allows has the same weight

`attention_variant` in the configuration names the variant, under a model type of its own: a program that does not know
the type refuses the checkpoint instead of running it with ordinary attention.
"""

from __future__ import annotations

import abc
import functools
import math
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.errors import AnisoscopeError, unknown_name
from anisoscope.models.forward import MASKED

MODEL_TYPE = "anisoscope_neox"
SHARP = 4.0  # a fixed temperature in units of √d, which is where the learned one starts


class Projection(nn.Linear, abc.ABC):
    """The fused linear of an attention module with changed queries and keys."""

    def __init__(self, plain: nn.Linear, heads: int) -> None:
        nn.Module.__init__(self)  # not nn.Linear's, because the weights are those of `plain`
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight, self.bias = plain.weight, plain.bias
        self.heads, self.head_width = heads, plain.out_features // (3 * heads)

    def forward(self, x: Tensor) -> Tensor:
        """[…, width] to […, heads·3·d]: query, key and value of the first head, then of the second, and so on."""
        query, key, value = super().forward(x).unflatten(-1, (self.heads, -1)).chunk(3, dim=-1)
        query, key = self.changed(query, key)
        return torch.cat((query, key, value), dim=-1).flatten(-2)

    @abc.abstractmethod
    def changed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """The queries and keys […, heads, d] that attention is given."""


class FixedSharp(Projection):
    """Cosine scores at a fixed temperature."""

    @property
    def temperature(self) -> Tensor:
        """Per head: the largest possible score."""
        return torch.full((self.heads,), SHARP * math.sqrt(self.head_width), device=self.weight.device)

    def changed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        scale = (self.temperature * math.sqrt(self.head_width)).sqrt()[:, None]
        return _unit(query, scale), _unit(key, scale)


class Normed(FixedSharp):
    """Cosine scores at a learned temperature per head (Query-Key Normalization for Transformers, arXiv:2010.04245)."""

    def __init__(self, plain: nn.Linear, heads: int) -> None:
        super().__init__(plain, heads)
        start = 0.5 * math.log(self.head_width)
        self.log_temperature = nn.Parameter(torch.full((heads,), start, dtype=plain.weight.dtype))

    @property
    def temperature(self) -> Tensor:
        return self.log_temperature.exp()


def _unit(x: Tensor, scale: Tensor) -> Tensor:
    """Rows of length `scale`; the norm is taken in float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (nn.functional.normalize(wide, dim=-1) * scale).to(x.dtype)


class MeanRemoved(Projection):
    """Queries and keys without their mean over the positions of the context so far.

    A vector added to all queries, or to all keys, changes nothing, so attention cannot use drift at any step. A mean
    over the whole context or batch would leak later positions; a running mean of earlier batches lags behind when drift
    is fastest (in the first updates it left half of it). The price: what a context has in common so far is removed,
    too, and the first position has no scores.
    """

    def changed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return _without_mean(query), _without_mean(key)


def _without_mean(x: Tensor) -> Tensor:
    """[B, T, heads, d] minus the mean over positions 1 … t at every position t, summed in float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    count = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=wide.dtype)
    return (wide - wide.cumsum(1) / count[:, None, None]).to(x.dtype)


def _refuse_parts(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Refuse contexts that do not begin at the first position: their means would be of other positions."""
    mask = kwargs.get("attention_mask")
    if kwargs.get("layer_past") is not None:
        raise AnisoscopeError("mean-removed attention reads whole contexts; run the model with use_cache=False.")
    if isinstance(mask, Tensor) and mask.dim() == 4:
        first = mask[..., -1, 0]  # the last position sees the first one unless that is padding
        if bool((~first if mask.dtype == torch.bool else first < MASKED).any()):
            raise AnisoscopeError("mean-removed attention was given padding before a context; pad on the right.")


class Uniform(Projection):
    """No scores: every allowed key has the same weight; the weights of queries and keys get no gradient."""

    def changed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(query), torch.zeros_like(key)


VARIANTS: dict[str, type[Projection] | None] = {
    "softmax": None,
    "qk-norm": Normed,
    "mean-removed": MeanRemoved,
    "fixed-sharp": FixedSharp,
    "uniform": Uniform,
}


def vary(model: nn.Module, variant: str) -> None:
    """Replace the projection of every attention module of a GPT-NeoX model by the variant's, keeping the weights."""
    if variant not in VARIANTS:
        raise unknown_name("attention variant", variant, VARIANTS)
    kind = VARIANTS[variant]
    found = [(module, getattr(module, "query_key_value", None)) for module in model.modules()]
    for module, plain in found:
        if kind is None or not isinstance(plain, nn.Linear):
            continue
        module.query_key_value = kind(plain, plain.out_features // (3 * module.head_size))  # type: ignore[arg-type, operator]
        if kind is MeanRemoved:
            module.register_forward_pre_hook(_refuse_parts, with_kwargs=True)


@functools.cache
def register_variants() -> Any:
    """Register the model type with transformers, so that such configurations load like any other.

    Its models are registered by `register_models` when a configuration has this type: the modules of GPT-NeoX take a
    second or more to import, which other models need not wait for.
    """
    from transformers import AutoConfig, GPTNeoXConfig

    class VariedNeoXConfig(GPTNeoXConfig):
        model_type = MODEL_TYPE
        attention_variant = "softmax"

    AutoConfig.register(MODEL_TYPE, VariedNeoXConfig)
    return VariedNeoXConfig


def register_models(config: Any) -> None:
    """Register the models of a configuration of this type, before one is built; nothing for other types."""
    if getattr(config, "model_type", None) == MODEL_TYPE:
        _register_models()


@functools.cache
def _register_models() -> None:
    from transformers import AutoModel, AutoModelForCausalLM, GPTNeoXForCausalLM, GPTNeoXModel

    kind = register_variants()

    class VariedNeoXModel(GPTNeoXModel):
        config_class = kind

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            vary(self, config.attention_variant)

    class VariedNeoXForCausalLM(GPTNeoXForCausalLM):
        config_class = kind

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            vary(self, config.attention_variant)

    AutoModel.register(kind, VariedNeoXModel)
    AutoModelForCausalLM.register(kind, VariedNeoXForCausalLM)


def refuse_unhonoured(config: Any) -> None:
    """Raise an error if a configuration names a variant but has a model type that would ignore it."""
    variant = getattr(config, "attention_variant", None)
    if variant not in (None, "softmax") and config.model_type != MODEL_TYPE:
        raise AnisoscopeError(
            f"config.json has attention_variant {variant!r}, which {config.model_type} does not know, and would be "
            f'measured with ordinary attention; give it "model_type": "{MODEL_TYPE}", or take the field out.'
        )
