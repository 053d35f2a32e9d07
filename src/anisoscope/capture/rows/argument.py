"""What a module was called with and what it gave back, by name and by shape; and how to call a model."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.capture.rows.index import Contexts
from anisoscope.capture.rows.pixel import MASK
from anisoscope.capture.sites.layout import unwrapped
from anisoscope.capture.sites.part import PER_HEAD
from anisoscope.capture.sites.site import Site
from anisoscope.errors import AnisoscopeError

_FLOATS = ("inputs_embeds", "input_values", "input_features", "pixel_values")


def forward(model: nn.Module, inputs: Mapping[str, Any], **extra: Any) -> Any:
    """Calls a model on inputs moved to where it takes them, without a cache and with as few logits as it allows."""
    device = input_device(model)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    moved = {name: _moved(name, value, device, dtype) for name, value in inputs.items()}
    accepted = inspect.signature(unwrapped(model).forward).parameters
    if "use_cache" in accepted:
        moved.setdefault("use_cache", False)
    if "logits_to_keep" in accepted and moved.get("labels") is None:
        moved.setdefault("logits_to_keep", 1)
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values()):
        moved = _taken(moved, accepted)
    plain = moved.pop("", None)
    if plain is not None and "input_ids" in accepted:
        moved["input_ids"], plain = plain, None
    return model(**moved, **extra) if plain is None else model(plain, **moved, **extra)


def _taken(moved: dict[str, Any], accepted: Mapping[str, Any]) -> dict[str, Any]:
    """Images under the name a plain module has for them, without the mask of their pixels that it does not read."""
    named = "pixel_values" in accepted or "" in moved or "pixel_values" not in moved
    renamed = moved if named else {"" if name == "pixel_values" else name: x for name, x in moved.items()}
    return {name: x for name, x in renamed.items() if name != MASK or MASK in accepted}


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode (no dropout), and every module's own mode back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


def _moved(name: str, value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(device, dtype) if name in _FLOATS and dtype is not None else value.to(device)


def input_device(model: nn.Module) -> torch.device:
    """Where a model wants its inputs: with its embedding, or with its first parameter that is not offloaded."""
    with contextlib.suppress(AttributeError, NotImplementedError):
        device = unwrapped(model).get_input_embeddings().weight.device  # type: ignore[operator]
        if device.type != "meta":
            return torch.device(device)
    devices = (parameter.device for parameter in model.parameters())
    return next((device for device in devices if device.type != "meta"), torch.device("cpu"))


def by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a forward by name; those of *args and **kwargs too."""
    signature = inspect.signature(module.forward)
    named: dict[str, Any] = {}
    for name, value in signature.bind_partial(*args, **kwargs).arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named |= value
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            named |= {f"{name}{i}": item for i, item in enumerate(value)}
        else:
            named[name] = value
    return named


def with_ids(arguments: dict[str, Any], outer: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a stack, with the ids of the outer model where the stack was only given their embeddings."""
    ids, embeds = outer.get("input_ids"), arguments.get("inputs_embeds")
    lacking = arguments.get("input_ids") is None and isinstance(embeds, Tensor) and isinstance(ids, Tensor)
    return {**arguments, "input_ids": ids} if lacking and ids.shape == embeds.shape[:2] else arguments  # type: ignore[union-attr]


def given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Values a module was called with, the hidden states first."""
    names = [name for name in ("hidden_states", "x", "input") if name in kwargs]
    yield from args
    yield from (kwargs[name] for name in [*names, *(name for name in kwargs if name not in names)])


def first_tensor(path: str, *values: Any) -> Tensor:
    """The first floating tensor among values, also inside tuples and mappings."""
    found = _search(values)
    if found is None:
        raise AnisoscopeError(f"module {path!r} handled no floating tensor; name another one.")
    return found


def _search(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    return next((found for item in items if (found := _search(item)) is not None), None)


def positioned(x: Tensor, contexts: Contexts, site: Site) -> Tensor:
    """An activation as [B, T, …]: rows of a flattened one, positions of a feature map, or one row per context."""
    batch, length = contexts.batch, contexts.length
    if x.shape[0] == batch and (x.dim() == 3 or site.kind in PER_HEAD):
        return x
    if x.dim() == 4 and x.shape[0] == batch:
        last = contexts.channels_last is not None and contexts.channels_last(site, x.shape)
        return x.flatten(1, 2) if last else x.flatten(2).transpose(1, 2)
    if x.dim() == 3 and x.shape[1] == batch and length in (None, x.shape[0]):
        return x.transpose(0, 1)
    if x.dim() == 2 and x.shape[0] % batch == 0:
        return x.unflatten(0, (batch, -1))
    raise AnisoscopeError(
        f"site {site} gave a tensor of shape {tuple(x.shape)} for {batch} contexts of {length} positions; expected "
        "[contexts, positions, width]."
    )
