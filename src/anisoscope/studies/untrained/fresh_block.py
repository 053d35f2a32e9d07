"""One transformer block at initialisation, taken out of a fresh model of its family and called alone.

The full model prepares the call of its first block (mask, rotary positions, biases); the call is intercepted before the
block runs, and then repeated with our rows as hidden states. So no code is specific to a family.

Notation: S sequences, T positions, d width, H heads, N the size of the bias.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.capture.attention_call import Call, watching
from anisoscope.capture.sites.layout import find_layout
from anisoscope.errors import AnisoscopeError
from anisoscope.models.checkpoint import LoadOptions, fresh_config, fresh_model
from anisoscope.models.forward import first_tensor, forward
from anisoscope.models.load import quiet
from anisoscope.models.source import ALIASES, architecture
from anisoscope.training.config import FAMILIES

PRENORM = "prenorm"  # our variant of GPT-NeoX blocks: sequential sublayers, bidirectional attention
STANDARD_DEVIATION = 0.02
_WIDTH = re.compile(r"(hidden_size|d_model|n_embd|dim|embedding_size|word_embed_proj_dim|pooler_hidden_size)$")
_HEADS = re.compile(r"(n_heads?|num_heads|(num|encoder|decoder)_attention_heads)$")
_INNER = r"intermediate_size|(encoder_|decoder_)?ffn_dim|ffn_hidden_size|d_ff|hidden_dim"
_IMAGE = 224  # default image size in pixels
_SPARE = 8  # additional positions, which some families reserve for padding
# exceptions that model code raises for unexpected shapes or sizes
_FOREIGN: tuple[type[Exception], ...] = (RuntimeError, ValueError, TypeError, LookupError, AttributeError)
_FOREIGN += (ArithmeticError, AssertionError, ImportError)
_SALTS = {"ids": 1, "direction": 2, "weights": 3, "rows": 4}


def generator(seed: int, what: str) -> torch.Generator:
    """A random generator for one purpose, so that draws for different purposes are independent."""
    return torch.Generator().manual_seed(1_000 * seed + _SALTS[what])


class _BlockReached(Exception):
    """Raised to stop the full model once it has prepared the call of its first block."""


@dataclass(frozen=True)
class UntrainedBlock:
    """A block, its attention module, and its call with all arguments of the full model except the hidden states."""

    family: str
    width: int
    heads: int
    module: nn.Module
    attention: nn.Module
    table: nn.Embedding | None  # token embeddings, if the family reads tokens
    call: Callable[[Tensor], Any]
    length: int | None = None  # positions in the intercepted call

    def rows(self, sequences: int, length: int, *, seed: int) -> Tensor:
        """Embeddings [S, T, d] of random tokens, without positions or types; N(0, 0.02²) where there are no tokens."""
        if self.table is None:
            drawn = torch.randn(sequences, length, self.width, generator=generator(seed, "rows"))
            return STANDARD_DEVIATION * drawn
        ids = torch.randint(self.table.num_embeddings, (sequences, length), generator=generator(seed, "ids"))
        with torch.no_grad():
            return self.table(ids.to(self.table.weight.device)).float()

    def run(self, x: Tensor) -> tuple[Tensor, Call]:
        """The output of the block for rows [S, T, d], and the recorded call of its attention."""
        try:
            out, calls = self._called(x)
        except _FOREIGN as error:  # the intercepted call was prepared for other shapes
            why = f"it fails on rows of width {x.shape[-1]} with {self.heads} heads"
            if self.length not in (None, x.shape[1]):
                why = f"it takes the {self.length} positions of its own model only"
            raise _refused(self.family, why) from error
        if out.shape != x.shape:
            raise _refused(self.family, f"it makes shape {tuple(out.shape)} of {tuple(x.shape)}")
        return out, _whole(self.family, [call.batched(len(x)) for call in calls], length=x.shape[1])

    def _called(self, x: Tensor) -> tuple[Tensor, list[Call]]:
        calls: list[Call] = []
        with torch.inference_mode(), watching([self.attention], calls.append):
            return first_tensor(self.family, self.call(x)), calls

    def check(self, states: Tensor) -> None:
        """Raise if the block does not attend over all positions for the hidden states of its full model, `own`."""
        if states.dim() != 3:
            raise _refused(self.family, "its rows are a map of positions, not a sequence")
        try:
            _, calls = self._called(states)
        except _FOREIGN as error:
            raise _refused(self.family, f"it does not run with {self.heads} heads and width {self.width}") from error
        _whole(self.family, calls, length=states.shape[1])
        if states.shape[-1] != self.width:
            raise _refused(self.family, f"its first block is {states.shape[-1]} wide, whatever width is asked for")


def _whole(family: str, calls: list[Call], *, length: int) -> Call:
    """The single attention call, which must attend from every position to every position."""
    if not calls:
        raise _refused(family, "its attention shows no queries and keys")
    queries, keys = calls[0].query.shape[-2], calls[0].key.shape[-2]
    if queries == keys < length:
        raise _refused(family, f"it attends within windows of {keys} of its {length} positions")
    if keys < length:
        raise _refused(family, f"it attends to {keys} keys that stand for all {length} positions")
    if len(calls) > 1 or not calls[0].whole or {queries, keys} != {length}:
        raise _refused(family, "its attention is not one softmax over all positions")
    return calls[0]


def _refused(family: str, why: str) -> AnisoscopeError:
    return AnisoscopeError(
        f"the block of {family} cannot be called alone on biased rows ({why.rstrip('.')}); take another family, such "
        "as bert, gpt2, llama or vit."
    )


def direction(width: int, *, seed: int) -> Tensor:
    """A random unit vector b/‖b‖, the same for all families of a width."""
    drawn = torch.randn(width, generator=generator(seed, "direction"), dtype=torch.float64)
    return (drawn / drawn.norm()).float()


def biased(x: Tensor, b: Tensor, *, bias: float, input_norm: bool) -> Tensor:
    """x + N·b, with x layer-normalised (before the bias is added) if `input_norm`.

    >>> float(biased(torch.zeros(1, 4), torch.tensor([1.0, 0, 0, 0]), bias=3, input_norm=True).norm())
    3.0
    """
    rows = nn.functional.layer_norm(x, x.shape[-1:], eps=1e-12) if input_norm else x
    return rows + bias * b.to(rows)


# -- initialisation: N(0, 0.02²), Xavier, orthogonal, or the default of the family -------------------------------------

INITS: dict[str, Callable[..., Any] | None] = {
    "normal": partial(nn.init.normal_, std=STANDARD_DEVIATION),
    "xavier": nn.init.xavier_uniform_,  # Glorot and Bengio 2010
    "orthogonal": nn.init.orthogonal_,  # Saxe et al. 2014
    "own": None,  # the default initialisation of transformers
}


@torch.no_grad()
def initialise(block: UntrainedBlock, init: str, *, seed: int) -> None:
    """Redraw every weight matrix of a block; biases become 0 and norms stay the identity."""
    fill = INITS[init]
    if fill is None:
        return
    random = generator(seed, "weights")
    inside = {id(p) for p in block.attention.parameters()}
    for name, parameter in block.module.named_parameters():
        if parameter.dim() == 2:
            fresh = torch.empty(parameter.shape)
            long = 0 if fresh.shape[0] >= fresh.shape[1] else 1
            fused = fresh.shape[1 - long] == block.width and fresh.shape[long] % block.width == 0
            # a fused projection is several square matrices side by side: each is initialised separately
            for piece in fresh.split(block.width, dim=long) if fused and id(parameter) in inside else (fresh,):
                fill(piece, generator=random)
            parameter.copy_(fresh)
        elif name.endswith("bias"):
            parameter.zero_()


# -- taking a block out of its model -----------------------------------------------------------------------------------


def build_block(
    family: str, *, width: int, heads: int, length: int, sequences: int, seed: int, device: str = "cpu"
) -> UntrainedBlock:
    """The first block of a fresh one-block model of a family, ready to be called on [sequences, length, width]."""
    with quiet():
        config = block_config(family, width=width, heads=heads, length=length)
        try:
            model = fresh_model(config, LoadOptions(torch.device("cpu"), seed=seed, with_head=False))
        except _FOREIGN as error:
            raise _refused(family, f"no model of it can be made with width {width} and {heads} heads") from error
    model = model.eval().to(device)
    try:
        stack = find_layout(model).stacks[0]
    except AnisoscopeError as error:
        raise _refused(family, str(error).rstrip(".")) from error
    for kind in ("query", "scores"):
        if (1, kind) not in stack.places:
            raise _refused(family, stack.missing.get(kind, f"its block has no {kind}"))
    module = model.get_submodule(stack.blocks[0])
    call, states = _prepared_call(model, module, family, sequences=sequences, length=length, seed=seed)
    attention = model.get_submodule(stack.places[(1, "query")].path)
    block = UntrainedBlock(family, width, heads, module, attention, _token_table(model, width), call, states.shape[1])
    block.check(states)
    return block


def block_config(family: str, *, width: int, heads: int, length: int) -> Any:
    """The family's own configuration with one block of these sizes; what else it has keeps its proportions."""
    kind, options = known_family(family)
    default = fresh_config(kind, {}).to_dict()
    integers = {
        name: value for name, value in default.items() if isinstance(value, int) and not isinstance(value, bool)
    }
    before = next((value for name, value in integers.items() if _WIDTH.match(name) and name != "embedding_size"), width)
    many = next((value for name, value in integers.items() if _HEADS.match(name)), heads)
    rules: dict[str, Callable[[int], int]] = {  # field names of any family, and new value from old value
        r"n_layers?|num_layers|num_(hidden|encoder|decoder)_layers|(encoder|decoder)_layers": lambda _: 1,
        _WIDTH.pattern: lambda _: width,
        _HEADS.pattern: lambda _: heads,
        r"num_(key_value|kv)_heads": lambda old: _divisor(heads, heads * old / many),
        r"head_dim|d_kv": lambda _: width // heads,
        r"rotary_dim": lambda old: min(old, width // heads),
        _INNER: lambda old: max(1, round(width * old / before)),
        r"max_position_embeddings|n_positions|max_seq_len": lambda old: max(old, length + _SPARE),
    }
    sizes: dict[str, int] = {}
    for name, value in integers.items():
        sizes |= next(({name: rule(value)} for pattern, rule in rules.items() if re.fullmatch(pattern, name)), {})
    if "attention_types" in default:  # GPT-Neo lists its attention types by layer
        options = {**options, "attention_types": [[["global"], 1]]}
    config = fresh_config(kind, {**sizes, **options})
    if family == PRENORM:
        config.is_causal = False
    return config


def known_family(family: str) -> tuple[str, dict[str, Any]]:
    """The transformers model type behind a name, and the options that the name implies."""
    if family == PRENORM:
        return FAMILIES[PRENORM].model_type, dict(FAMILIES[PRENORM].options)
    return architecture(family), dict(ALIASES.get(family.lower(), ("", {}))[1])


def _divisor(heads: int, wanted: float) -> int:
    """The divisor of `heads` that is nearest to `wanted`.

    >>> _divisor(12, 3.4), _divisor(2, 0.5)
    (3, 1)
    """
    return min((n for n in range(1, heads + 1) if heads % n == 0), key=lambda n: abs(n - wanted))


def _token_table(model: nn.Module, width: int) -> nn.Embedding | None:
    """The token embedding of the model with this width, or None."""
    if str(getattr(model, "main_input_name", "input_ids")) != "input_ids":
        return None
    with contextlib.suppress(AttributeError, NotImplementedError):
        table = model.get_input_embeddings()  # type: ignore[operator]
        if isinstance(table, nn.Embedding) and table.embedding_dim == width:
            return table
    return None


def _prepared_call(
    model: nn.Module, module: nn.Module, family: str, *, sequences: int, length: int, seed: int
) -> tuple[Callable[[Tensor], Any], Tensor]:
    """The call of the block by its full model as a function of hidden states; and the original hidden states."""
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((args, kwargs))
        raise _BlockReached

    handle = module.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with torch.inference_mode(), contextlib.suppress(_BlockReached):
            forward(model, _random_inputs(model, sequences=sequences, length=length, seed=seed))
    except _FOREIGN as error:
        raise _refused(family, "its own model does not run on random inputs of the shape that it asks for") from error
    finally:
        handle.remove()
    if not seen:
        raise _refused(family, "its own model never calls it")
    args, kwargs = seen[0]
    if args:
        return (lambda x: module(x, *args[1:], **kwargs)), args[0]
    if "hidden_states" not in kwargs:
        raise _refused(family, f"it is called with {', '.join(kwargs) or 'nothing'}, not with hidden states")
    return (lambda x: module(**{**kwargs, "hidden_states": x})), kwargs["hidden_states"]


def _random_inputs(model: nn.Module, *, sequences: int, length: int, seed: int) -> dict[str, Tensor]:
    """Random ids, samples, features or pixels of a shape that a model takes."""
    config: Any = model.config
    name = str(getattr(model, "main_input_name", "input_ids"))
    random = generator(seed, "ids")
    if name == "pixel_values":
        size = getattr(config, "image_size", _IMAGE)
        size = size if isinstance(size, int) else size[0]
        return {name: torch.randn(1, config.num_channels, size, size, generator=random)}
    if name == "input_values":  # waveforms or, in some families, spectrograms
        shape = (config.max_length, config.num_mel_bins) if hasattr(config, "num_mel_bins") else (16_000,)
        return {name: torch.randn(1, *shape, generator=random)}
    if name == "input_features":
        return {name: torch.randn(1, config.num_mel_bins, 2 * config.max_source_positions, generator=random)}
    most = int(getattr(config, "vocab_size", 0) or 1000)
    return {name: torch.randint(most, (sequences, length), generator=random)}
