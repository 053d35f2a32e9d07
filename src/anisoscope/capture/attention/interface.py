"""Attention calls of models that use transformers' attention interface.

Such models look their attention function up in one registry and hand it queries, keys, mask and scaling. While a
capture runs, the look-up returns a relay that reports the call and delegates to the original function. Models that
compute attention in their own code are read by `explicit.py`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from anisoscope.capture.attention.call import Call, Take, detached, head_scaling
from anisoscope.capture.attention.explicit import watched


@contextlib.contextmanager
def watching(modules: Sequence[nn.Module], take: Take) -> Iterator[None]:
    """Pass every attention call of these modules to `take`; what they compute does not change."""
    with contextlib.ExitStack() as stack:
        for module in modules:
            classes = [base for part in module.modules() for base in type(part).__mro__]
            named = any(hasattr(sys.modules.get(base.__module__), "ALL_ATTENTION_FUNCTIONS") for base in classes)
            stack.enter_context(_relayed(module, take) if named else watched(module, take))
        yield


_takers: dict[int, list[Take]] = {}  # by id of the module that calls the interface; several captures may share one
_lock = threading.Lock()
_original: list[Callable[..., Any]] = []  # the look-up of the registry, while it is replaced


@contextlib.contextmanager
def _relayed(module: nn.Module, take: Take) -> Iterator[None]:
    parts = list(module.modules())
    with _lock:
        for part in parts:
            _takers.setdefault(id(part), []).append(take)
        _replace_look_up()
    try:
        yield
    finally:
        with _lock:
            for part in parts:
                _takers[id(part)].remove(take)
                if not _takers[id(part)]:
                    del _takers[id(part)]
            _replace_look_up()


def _replace_look_up() -> None:
    """Route the registry's look-up through `_relay` while anything is captured, and restore it afterwards."""
    from transformers.modeling_utils import AttentionInterface

    if _takers and not _original:
        look_up = AttentionInterface.get_interface
        _original.append(look_up)

        @functools.wraps(look_up)
        def routed(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
            return functools.partial(_relay, look_up(self, attn_implementation, default), str(attn_implementation))

        AttentionInterface.get_interface = routed  # type: ignore[method-assign]
    elif _original and not _takers:
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
    scaling: float | Tensor | None = None,
    **kwargs: Any,
) -> Call:
    causal = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", True)) if causal is None else bool(causal)
    return Call(
        query.detach(),
        key.detach(),
        head_scaling(scaling, query.shape[-1]),
        mask=_plain_mask(attention_mask, query, key),
        bias=detached(kwargs.get("position_bias")),
        causal=causal and query.shape[2] > 1 and name != "eager",  # written-out attention knows masks alone
        window=kwargs.get("sliding_window") if "flash" in name else None,
        whole=kwargs.get("softcap") is None and kwargs.get("s_aux") is None,
    )


def _plain_mask(mask: Any, query: Tensor, key: Tensor) -> Tensor | None:
    if hasattr(mask, "mask_mod"):  # a block mask of flex attention
        from torch.nn.attention.flex_attention import create_mask

        return create_mask(mask.mask_mod, query.shape[0], 1, query.shape[2], key.shape[2], device=str(query.device))
    return mask.detach()[..., : key.shape[2]] if isinstance(mask, Tensor) else None
