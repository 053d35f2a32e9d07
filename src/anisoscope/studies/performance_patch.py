"""The loss of a model that goes on from changed rows: what its later layers make of a repair.

Shapes: B contexts, T positions, d width, V tokens of the vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.capture.arguments import forward
from anisoscope.capture.gradients import untouched
from anisoscope.capture.layout import Layout, Stack
from anisoscope.capture.losses import IGNORED, Reading, output_part
from anisoscope.capture.sites import Site
from anisoscope.errors import AnisoscopeError
from anisoscope.studies.performance_rows import Piece

Change = Callable[[Tensor], Tensor]
"""Rows [n, d] to the rows that take their place [n, d]."""


@contextlib.contextmanager
def patching(model: nn.Module, layout: Layout, site: Site, change: Change, *, real: Tensor) -> Iterator[None]:
    """While open, the rows of `site` at the positions in `real` [B, T] are replaced; padding is left as it is."""
    stack = layout.stack(site.stack)
    handles: list[Any] = []
    seen = {"calls": 0}

    def replace(x: Tensor) -> Tensor:
        if x.shape[:2] != real.shape or x.dim() != 3:
            raise AnisoscopeError(
                f"site {site} gave a tensor of shape {tuple(x.shape)} for contexts of shape {tuple(real.shape)}; "
                "expected [contexts, positions, width], so its rows cannot be replaced."
            )
        out, keep = x.clone(), real.to(x.device)
        out[keep] = change(x[keep]).to(x.dtype)
        return out

    path, side, number = _place(stack, site)
    module = model.get_submodule(path)

    def turn() -> bool:
        seen["calls"] += 1
        return seen["calls"] == number

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _changed_inputs(args, kwargs, replace) if turn() else None

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        return _changed(output, replace) if turn() else None

    if side == "in":
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
    else:
        handles.append(module.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if seen["calls"] < number:
        raise AnisoscopeError(f"nothing was seen at {site}, so its rows could not be replaced.")


def _place(stack: Stack, site: Site) -> tuple[str, str, int]:
    """Module, side and which call of it in a pass: a shared block is called once for each of its layers."""
    if site.kind == "embed":
        return stack.blocks[0], "in", 1
    if site.kind == "resid":
        path = stack.blocks[site.layer - 1]
        return path, "out", stack.blocks[: site.layer].count(path)
    return stack.final.path, "out", 1


def _changed_inputs(args: tuple[Any, ...], kwargs: dict[str, Any], replace: Change) -> tuple[Any, Any]:
    for i, value in enumerate(args):
        if isinstance(value, Tensor) and value.is_floating_point():
            return (*args[:i], replace(value), *args[i + 1 :]), kwargs
    for name in ("hidden_states", "x", "input", *kwargs):
        value = kwargs.get(name)
        if isinstance(value, Tensor) and value.is_floating_point():
            return args, {**kwargs, name: replace(value)}
    raise AnisoscopeError("a block was given no floating tensor whose rows could be replaced.")


def _changed(output: Any, replace: Change) -> Any:
    """What a module returned, with its hidden states replaced."""
    if isinstance(output, Tensor):
        return replace(output)
    if isinstance(output, tuple):
        place = next(i for i, v in enumerate(output) if isinstance(v, Tensor) and v.is_floating_point())
        return (*output[:place], replace(output[place]), *output[place + 1 :])
    if isinstance(output, MutableMapping):
        name = "last_hidden_state" if output.get("last_hidden_state") is not None else next(iter(output))
        output[name] = replace(output[name])
        return output
    raise AnisoscopeError(f"a module returned a {type(output).__name__}; its rows cannot be replaced.")


def token_losses(
    model: nn.Module,
    pieces: Sequence[Piece],
    *,
    reading: Reading,
    patch: Callable[[Tensor], contextlib.AbstractContextManager[None]] | None = None,
) -> tuple[Tensor, Tensor]:
    """The cross-entropy of every target token in nats [n], and the key of its context [n]."""
    losses, keys = [], []
    for piece in pieces:
        real = _real(piece.inputs)
        around = contextlib.nullcontext() if patch is None else patch(real)
        with untouched(model), torch.no_grad(), around:
            logits = output_part(forward(model, piece.inputs), "logits")
        targets = reading.targets(piece.inputs["labels"]).to(logits.device)
        counted = targets != IGNORED
        losses.append(
            torch.nn.functional.cross_entropy(logits[counted].float(), targets[counted], reduction="none").double()
        )
        keys.append(piece.key[counted.nonzero()[:, 0].cpu()])
    return torch.cat(losses).cpu(), torch.cat(keys)


def _real(inputs: Mapping[str, Any]) -> Tensor:
    """Which positions of the stack that is patched are data."""
    mask = inputs.get("decoder_attention_mask", inputs["attention_mask"])
    return mask != 0
