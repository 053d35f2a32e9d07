"""Queries and keys as they meet: taken from transformers' attention interface, or from the products around a softmax.

Most models look their attention function up in one registry and hand it queries, keys, mask and scaling; there a relay
stands in for the look-up while a capture runs, and delegates to the original. For models that write attention out, the
calls inside the attention module are watched: a fused attention call says everything, else the first product of the
softmax's shape gives queries and keys, and what the softmax sees beyond them is mask and bias.

Shapes: B contexts, H heads (H_kv of keys), T queries, S keys, d head width.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from anisoscope.capture.index import MASKED

_PRODUCTS = ("matmul", "__matmul__", "bmm", "baddbmm")


@dataclass(frozen=True)
class Call:
    """What one attention call was given; `mask` is bool (True: may attend), additive float, or None."""

    query: Tensor  # [B, H, T, d]
    key: Tensor  # [B, H_kv, S, d]
    scaling: float
    mask: Tensor | None = None
    bias: Tensor | None = None
    causal: bool = False  # upper-left causal, where there is no mask
    window: int | None = None  # keys a query may look back on, where the mask does not say it
    whole: bool = True  # False: scores are not scaling·qk + bias (capped, or with a sink)

    def batched(self, batch: int) -> Call:
        """The same call with heads apart, where contexts and heads came flattened into one dimension."""
        if self.query.dim() == 4:
            return self
        apart = {name: _apart(getattr(self, name), batch) for name in ("query", "key", "mask", "bias")}
        return replace(self, **apart)  # type: ignore[arg-type]

    def parted(self) -> tuple[Tensor, Tensor | None]:
        """`allowed` [B or 1, 1, T, S], and the additive scores that are no mask."""
        shape, mask, bias = (self.query.shape[2], self.key.shape[2]), self.mask, self.bias
        if mask is None or mask.dim() == 2:
            allowed = self._pattern(shape)
            if mask is not None:
                allowed = allowed & mask[:, None, None, : shape[1]].bool()
            return allowed, bias
        if mask.dtype == torch.bool:
            return mask.any(1, keepdim=True).expand(-1, 1, *shape), bias
        allowed = mask > _floor(mask, self.bias is not None)
        rest = mask.where(allowed, mask.new_zeros(()))
        if bool(rest.any()):
            bias = rest if bias is None else bias + rest
        return allowed.any(1, keepdim=True).expand(-1, 1, *shape), bias

    def _pattern(self, shape: tuple[int, int]) -> Tensor:
        rows, columns = (torch.arange(n, device=self.query.device) for n in shape)
        distance = rows[:, None] - columns[None, :]
        allowed = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        if self.window is not None:
            allowed = allowed & (distance.abs() < self.window)
        return allowed[None, None]


def _apart(x: Tensor | None, batch: int) -> Tensor | None:
    return x.unflatten(0, (batch, -1)) if x is not None and x.dim() == 3 else x


def _floor(mask: Tensor, mask_only: bool) -> float:
    """Below this a float is a mask; where biases are in the same tensor (ALiBi) only the dtype's end is."""
    return MASKED if mask_only or mask.shape[1] == 1 else float(torch.finfo(mask.dtype).min) / 2


Take = Callable[[Call], None]


@contextlib.contextmanager
def watching(modules: Sequence[nn.Module], take: Take) -> Iterator[None]:
    """Hands every call of these attention modules to `take`, and leaves what they compute as it is."""
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(_relayed(module, take) if _uses_interface(module) else _watched(module, take))
        yield


def _uses_interface(module: nn.Module) -> bool:
    classes = [base for part in module.modules() for base in type(part).__mro__]
    return any(hasattr(sys.modules.get(base.__module__), "ALL_ATTENTION_FUNCTIONS") for base in classes)


# the interface of transformers

_takers: dict[int, list[Take]] = {}  # by id of the module that calls the interface; several captures may share one
_lock = threading.Lock()
_original: list[Callable[..., Any]] = []


@contextlib.contextmanager
def _relayed(module: nn.Module, take: Take) -> Iterator[None]:
    parts = list(module.modules())
    with _lock:
        for part in parts:
            _takers.setdefault(id(part), []).append(take)
        _install()
    try:
        yield
    finally:
        with _lock:
            for part in parts:
                _takers[id(part)].remove(take)
                if not _takers[id(part)]:
                    del _takers[id(part)]
            _remove()


def _install() -> None:
    from transformers.modeling_utils import AttentionInterface

    if _original:
        return
    look_up = AttentionInterface.get_interface
    _original.append(look_up)

    @functools.wraps(look_up)
    def routed(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(_relay, look_up(self, attn_implementation, default), str(attn_implementation))

    AttentionInterface.get_interface = routed  # type: ignore[method-assign]


def _remove() -> None:
    from transformers.modeling_utils import AttentionInterface

    if not _takers and _original:
        AttentionInterface.get_interface = _original.pop()  # type: ignore[method-assign]


def _relay(function: Callable[..., Any], name: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    for take in tuple(_takers.get(id(module), ())):
        take(_call(name, module, *args, **kwargs))
    return function(module, *args, **kwargs)


def _call(
    name: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *,
    scaling: float | None = None,
    **kwargs: Any,
) -> Call:
    causal = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", True)) if causal is None else bool(causal)
    return Call(
        query.detach(),
        key.detach(),
        query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        mask=_plain_mask(attention_mask, query, key),
        bias=_detached(kwargs.get("position_bias")),
        causal=causal and query.shape[2] > 1 and name != "eager",  # written-out attention knows masks alone
        window=kwargs.get("sliding_window") if "flash" in name else None,
        whole=kwargs.get("softcap") is None and kwargs.get("s_aux") is None,
    )


def _plain_mask(mask: Any, query: Tensor, key: Tensor) -> Tensor | None:
    if hasattr(mask, "mask_mod"):  # a block mask of flex attention
        from torch.nn.attention.flex_attention import create_mask

        return create_mask(mask.mask_mod, query.shape[0], 1, query.shape[2], key.shape[2], device=str(query.device))
    return mask.detach()[..., : key.shape[2]] if isinstance(mask, Tensor) else None


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


# attention written out by the model


class _Watcher(TorchFunctionMode):
    """Sees the functions called while it is active, and changes nothing."""

    def __init__(self, take: Take) -> None:
        super().__init__()
        self.take = take
        self.products: list[tuple[Tensor, Tensor, float | None]] = []
        self.done = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if not self.done:
            self._see(name, args, kwargs)
        return func(*args, **kwargs)

    def _see(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name in _PRODUCTS:
            self._product(name, args, kwargs)
        elif name == "scaled_dot_product_attention":
            self._finish(_fused(*args, **kwargs))
        elif name in ("softmax", "_softmax") and self.products:
            self._softmax((args or (kwargs.get("input"),))[0])

    def _product(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = (kwargs.get(name) for name in ("batch1", "batch2", "mat2", "other"))
        tensors = [x for x in (*args, *named) if isinstance(x, Tensor)]
        if len(tensors) >= 2 and min(x.dim() for x in tensors[-2:]) >= 3:
            alpha = kwargs.get("alpha", 1.0) if name == "baddbmm" else None
            self.products.append((tensors[-2].detach(), tensors[-1].detach().transpose(-1, -2), alpha))

    def _softmax(self, scores: Tensor) -> None:
        for query, key, alpha in self.products:
            size = query.shape[:-2].numel(), query.shape[-2], key.shape[-2]
            if size == (scores.shape[:-2].numel(), *scores.shape[-2:]):
                self._finish(_written(query, key, scores.detach(), alpha))
                return

    def _finish(self, call: Call) -> None:
        self.done = True
        self.take(call)


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **kwargs: Any,
) -> Call:
    scaling = query.shape[-1] ** -0.5 if scale is None else float(scale)
    return Call(query.detach(), key.detach(), scaling, mask=_detached(attn_mask), causal=is_causal)


_HOPELESS = 5e3  # scores below the largest of their row: exp underflows in every precision long before


def _written(query: Tensor, key: Tensor, scores: Tensor, alpha: float | None) -> Call:
    """The call behind a softmax: the scaling that leaves no bias, and the rest as additive scores."""
    if scores.dim() == 4:
        query, key = ((x if x.dim() == 4 else x.unflatten(0, (scores.shape[0], -1))) for x in (query, key))
    scores = scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores
    product = query.to(scores.dtype) @ key.to(scores.dtype).transpose(-1, -2)
    # a model that masks by itself adds finfo.min, divided or not, or -1e4; so far below the largest the weight is 0
    open_ = scores > scores.amax(-1, keepdim=True) - _HOPELESS
    default = query.shape[-1] ** -0.5
    for scaling in (alpha,) if alpha is not None else (default, 1.0):
        rest = (scores - scaling * product).where(open_, scores.new_zeros(()))
        if float(rest.abs().max()) <= 1e-5 * max(1.0, float(scores.where(open_, scores.new_zeros(())).abs().max())):
            return Call(query, key, scaling, mask=open_)
    scaling = default if alpha is None else alpha
    rest = (scores - scaling * product).where(open_, scores.new_zeros(()))
    return Call(query, key, scaling, mask=open_, bias=rest)


@contextlib.contextmanager
def _watched(module: nn.Module, take: Take) -> Iterator[None]:
    active: list[_Watcher] = []

    def begin(*_: Any) -> None:
        active.append(_Watcher(take))
        active[-1].__enter__()

    def end(*_: Any) -> None:
        if active:
            active.pop().__exit__(None, None, None)

    handles = [module.register_forward_pre_hook(begin), module.register_forward_hook(end, always_call=True)]
    try:
        yield
    finally:
        end() if active else None  # an interrupt leaves a forward without running its hooks
        for handle in handles:
            handle.remove()
