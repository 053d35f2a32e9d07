"""Intercept the attention calls of any model in one form: queries, keys, mask, bias and scaling.

Most models look up their attention function in a registry of transformers and pass all of these to it. While a capture
runs, the look-up returns a relay that reports the call and delegates to the original function.

In a model that computes attention in its own code, the torch calls inside its module are observed, not changed. A fused
attention call has all arguments. Otherwise queries and keys are the factors of the matrix product whose shape equals
that of a later softmax, the scaling is what the product is multiplied with, and mask and bias are the rest of the
softmax input. Where a model attends within chunks, the calls of all chunks are joined at the end of its forward.

Shapes: B contexts, H heads (H_kv of keys), T queries, S keys, d head width; N = B·H where a model flattens both."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from anisoscope.capture.graph_hook import HookRecord, observer, trace_call
from anisoscope.models.forward import MASKED
from anisoscope.numerics.linalg import has_float64

_PRODUCTS = ("matmul", "__matmul__", "bmm", "baddbmm", "einsum")
_MULTIPLIED, _DIVIDED = ("mul", "mul_", "multiply"), ("div", "div_", "true_divide")
_HOPELESS = 5e3  # scores this far below their row's maximum count as masked: exp underflows in every precision
_takers: dict[int, list[Taker]] = {}  # by id of the module that calls; several captures may share one
_observers: dict[int, HookRecord] = {}  # by the same: what is called by a graph of torch.compile
_WATCHED = "_anisoscope_watched"  # set on modules whose calls somebody takes
_lock = threading.Lock()
_replaced: dict[tuple[int, str], tuple[Any, int]] = {}  # by namespace and name: the function, and by how many captures


@dataclass(frozen=True)
class Call:
    """The arguments of one attention call; `mask` is bool (True: may attend), additive float, or None."""

    query: Tensor  # [B, H, T, d]
    key: Tensor  # [B, H_kv, S, d]
    scaling: float | Tensor  # a number, or one per head [H, 1, 1]
    mask: Tensor | None = None
    bias: Tensor | None = None
    causal: bool = False  # upper-left causal, where there is no mask
    window: int | None = None  # size of the sliding window, if the mask does not contain it
    whole: bool = True  # False: scores are not scaling·qk + bias (they are capped, or have a sink)
    chunk: int = 0  # positions per chunk, if this call joins the chunks that the model attends within

    def batched(self, batch: int) -> Call:
        """The same call with separate dimensions for contexts and heads, if they were flattened into one."""
        if self.query.dim() == 4:
            return self
        given = {name: getattr(self, name) for name in ("query", "key", "mask", "bias")}
        flat = {name: x for name, x in given.items() if x is not None and x.dim() == 3}
        return replace(self, **{name: x.unflatten(0, (batch, -1)) for name, x in flat.items()})

    def parted(self) -> tuple[Tensor, Tensor | None]:
        """The mask as bool `allowed` [B or 1, 1, T, S], and the additive bias without the mask."""
        shape, mask, bias = (self.query.shape[2], self.key.shape[2]), self.mask, self.bias
        if mask is None or mask.dim() == 2:
            rows, columns = (torch.arange(n, device=self.query.device) for n in shape)
            distance = rows[:, None] - columns[None, :]
            allowed = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
            if self.window is not None:
                allowed = allowed & (distance.abs() < self.window)
            allowed = allowed[None, None]
            return (allowed if mask is None else allowed & mask[:, None, None, : shape[1]].bool()), bias
        if mask.dtype == torch.bool:
            return mask.any(1, keepdim=True).expand(-1, 1, *shape), bias
        # where the same tensor holds a bias (ALiBi), only values near the dtype's minimum are masked
        mask_only = bias is not None or mask.shape[1] == 1
        allowed = mask > (MASKED if mask_only else float(torch.finfo(mask.dtype).min) / 2)
        rest = mask.where(allowed, mask.new_zeros(()))
        if bool(rest.any()):
            bias = rest if bias is None else bias + rest
        return allowed.any(1, keepdim=True).expand(-1, 1, *shape), bias


Take = Callable[[Call], None]
Shield = Callable[[Callable[..., Any]], Callable[..., Any]]  # makes of an observer one whose errors stay outside


@dataclass(frozen=True)
class Taker:
    """Who takes the calls of a module, and whether nothing is to be taken now."""

    seen: Callable[..., None]
    idle: Callable[[], bool]


def as_it_is(act: Callable[..., Any]) -> Callable[..., Any]:
    """The shield of observers that may raise."""
    return act


def head_scaling(scaling: float | Tensor | None, width: int) -> float | Tensor:
    """The scaling of a call: a number (1/√d if None), or one number per head as [H, 1, 1].

    >>> head_scaling(None, 16), head_scaling(torch.ones(2, 1, 1), 16).shape
    (0.25, torch.Size([2, 1, 1]))
    """
    if scaling is None:
        return float(width**-0.5)
    if isinstance(scaling, Tensor) and scaling.numel() > 1:
        return scaling.detach().reshape(-1, 1, 1)
    return float(scaling)


@contextlib.contextmanager
def replaced(space: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a function of a class or of a dictionary of globals by `make` of it, until no capture needs that."""
    key, write = (id(space), name), space.__setitem__ if isinstance(space, dict) else functools.partial(setattr, space)
    with _lock:
        original, count = _replaced.get(key) or (space[name] if isinstance(space, dict) else getattr(space, name), 0)
        _replaced[key] = (original, count + 1)
        if not count:
            write(name, make(original))
    try:
        yield
    finally:
        with _lock:
            original, count = _replaced.pop(key)
            if count > 1:
                _replaced[key] = (original, count - 1)
            else:
                write(name, original)


@contextlib.contextmanager
def around_calls(module: nn.Module, begin: Callable[..., None], end: Callable[..., None]) -> Iterator[None]:
    """Call `begin` before and `end` after each forward of a module, whatever happens in it, but not in a graph."""

    def before(*args: Any) -> None:
        if not torch.compiler.is_compiling():
            begin(*args)

    def after(*args: Any) -> None:
        if not torch.compiler.is_compiling():
            end(*args)

    handles = [module.register_forward_pre_hook(before), module.register_forward_hook(after, always_call=True)]
    try:
        yield
    finally:
        end()  # an interrupt leaves a forward without running its hooks
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def watched(module: nn.Module, take: Take, shield: Shield = as_it_is) -> Iterator[None]:
    """Pass the attention call that a module computes to `take` while it runs."""
    active: list[_Watcher] = []
    chunked = bool(getattr(module, "local", False)) and hasattr(module, "attend_from_chunk_width")

    def begin(*_: Any) -> None:
        active.append(_Watcher(take, shield, chunked=chunked))
        active[-1].__enter__()

    def end(_: nn.Module | None = None, __: Any = None, output: Any = None) -> None:
        if active:
            watcher = active.pop()
            watcher.__exit__(None, None, None)
            if output is not None and (call := _joined(watcher.chunks)) is not None:
                take(call)

    with around_calls(module, shield(begin), shield(end)):
        yield


@dataclass
class _Product:
    """A product of queries and keys, the scaling applied to it so far, and the latest resulting tensor."""

    query: Tensor
    key: Tensor
    latest: weakref.ref[Tensor]
    scaling: float | Tensor | None = None


class _Watcher(TorchFunctionMode):
    """Observes torch function calls and reports the attention call among them to `take`."""

    def __init__(self, take: Take, shield: Shield, *, chunked: bool) -> None:
        super().__init__()
        self.take, self.chunked = take, chunked
        self.before, self.after = shield(self._before), shield(self._after)
        self.products: list[_Product] = []
        self.chunks: list[Call] = []
        self.done = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self.done:
            return func(*args, **kwargs)
        self.before(name, args, kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            self.after(name, args, kwargs, result)
        return result

    def _before(self, name: str, args: Any, kwargs: Any) -> None:
        if name == "scaled_dot_product_attention":
            self._finish(_fused(*args, **kwargs))
        elif name == "multi_head_attention_forward":
            if (call := _multihead(args, kwargs)) is not None:
                self._finish(call)
        elif name in ("softmax", "_softmax") and self.products:
            self._softmax((args or (kwargs.get("input"),))[0])

    def _after(self, name: str, args: Any, kwargs: Any, result: Tensor) -> None:
        if name in _PRODUCTS and (pair := _factors(name, args, kwargs)) is not None:
            alpha = kwargs.get("alpha", 1.0) if name == "baddbmm" else None
            self.products.append(_Product(*pair, weakref.ref(result), alpha))
        elif name in (*_MULTIPLIED, *_DIVIDED) and len(args) == 2:
            self._scaled(name, args, result)

    def _scaled(self, name: str, args: tuple[Any, ...], result: Tensor) -> None:
        for product in self.products:
            latest = product.latest()
            if latest is None or not any(x is latest for x in args):
                continue
            other = args[1] if args[0] is latest else args[0]
            heads = product.query.shape[1] if product.query.dim() == 4 else 0
            if isinstance(other, Tensor):  # a number, or one per head
                per_head = other.numel() == heads and other.dim() >= 3 and other.shape[-3] == heads
                other = head_scaling(other.detach(), 1) if other.numel() == 1 or per_head else None
            if isinstance(other, (int, float, Tensor)) and (name in _MULTIPLIED or args[0] is latest):
                factor = other if name in _MULTIPLIED else 1.0 / other
                product.scaling = factor * (1.0 if product.scaling is None else product.scaling)
                product.latest = weakref.ref(result)

    def _softmax(self, scores: Tensor) -> None:
        # the values of one chunk come before the queries of the next, and may have the same shape
        for product in reversed(self.products) if self.chunked else self.products:
            query, key = product.query, product.key
            size = query.shape[:-2].numel(), query.shape[-2], key.shape[-2]
            if size == (scores.shape[:-2].numel(), *scores.shape[-2:]):
                self._finish(_written(query, key, scores.detach(), product.scaling))
                return

    def _finish(self, call: Call) -> None:
        self.products.clear()
        if self.chunked:
            self.chunks.append(call)
            return
        self.done = True
        self.take(call)


def _factors(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """The left factor and the transposed right factor of a matrix product."""
    named = (kwargs.get(name) for name in ("batch1", "batch2", "mat2", "other"))
    listed = args[1] if name == "einsum" and isinstance(args[-1], (list, tuple)) else args
    tensors = [x.detach() for x in (*listed, *named) if isinstance(x, Tensor)]
    if len(tensors) < 2 or min(x.dim() for x in tensors[-2:]) < 3:
        return None
    if name == "einsum":
        return (tensors[0], tensors[1]) if _meets(str(args[0])) else None
    return tensors[-2], tensors[-1].transpose(-1, -2)


def _meets(equation: str) -> bool:
    """Whether an einsum contracts the last dimension of both operands, as queries with keys.

    >>> _meets("bhlk,bhtk->bhlt"), _meets("bhlt,bhtv->bhlv")
    (True, False)
    """
    left, _, out = equation.replace(" ", "").partition("->")
    one, _, two = left.partition(",")
    same = one[:-2] == two[:-2] == out[:-2] and one[-1:] == two[-1:]
    return same and out[-2:] == one[-2:-1] + two[-2:-1]


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
    mask = None if attn_mask is None else attn_mask.detach()
    return Call(query.detach(), key.detach(), head_scaling(scale, query.shape[-1]), mask=mask, causal=is_causal)


def _multihead(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """The call inside torch's multi-head attention, with recomputed projections; None if it adds keys."""
    given = inspect.signature(functional.multi_head_attention_forward).bind(*args, **kwargs)
    given.apply_defaults()
    a = given.arguments
    if a["query"].dim() != 3 or a["add_zero_attn"] or any(a[x] is not None for x in ("bias_k", "static_k")):
        return None
    width = a["embed_dim_to_check"]
    weights = (a["q_proj_weight"], a["k_proj_weight"])
    if not a["use_separate_proj_weight"]:
        weights = a["in_proj_weight"].split(width)[:2]
    biases = (None, None) if a["in_proj_bias"] is None else a["in_proj_bias"].split(width)[:2]
    with torch.no_grad():
        query, key = (
            functional.linear(a[name], weight, bias).unflatten(-1, (a["num_heads"], -1)).permute(1, 2, 0, 3)
            for name, weight, bias in zip(("query", "key"), weights, biases, strict=True)
        )
    scores, padding, mask, bias = a["attn_mask"], a["key_padding_mask"], None, None  # True in torch's masks is masked
    if scores is not None:
        four = scores.detach()[None, None] if scores.dim() == 2 else scores.detach().unflatten(0, (len(query), -1))
        hidden = four if four.dtype == torch.bool else four <= MASKED
        mask = ~hidden.all(1, keepdim=True)
        bias = None if four.dtype == torch.bool else four.masked_fill(hidden, 0.0)
    if padding is not None:
        real = (~padding if padding.dtype == torch.bool else padding > MASKED)[:, None, None]
        mask = real if mask is None else mask & real
    bias = bias if bias is not None and bool(bias.any()) else None
    return Call(query.detach(), key.detach(), query.shape[-1] ** -0.5, mask=mask, bias=bias)


def _written(query: Tensor, key: Tensor, scores: Tensor, scaling: float | Tensor | None) -> Call:
    """The call that leads to a softmax input: with the scaling that explains it fully, else with the rest as bias."""
    if scores.dim() == 4:
        query, key = ((x if x.dim() == 4 else x.unflatten(0, (scores.shape[0], -1))) for x in (query, key))
    candidates = (float(query.shape[-1] ** -0.5), 1.0) if scaling is None else (scaling,)
    # keys that some head may attend to, one head at a time
    if scores.dim() == 4:
        allowed = torch.zeros_like(scores[:, :1], dtype=torch.bool)
        for head in _by_head(scores):
            allowed[:, 0] |= _open(head)
    else:
        allowed = torch.cat([_open(head) for head in _by_head(scores)])
    for candidate in candidates:
        rests = _rests(query, key, scores, candidate)
        if all(float(rest.abs().max()) <= 1e-5 * max(1.0, float(seen.abs().max())) for rest, seen in rests):
            return Call(query, key, candidate, mask=allowed)
    rest = [rest for rest, _ in _rests(query, key, scores, candidates[0])]
    bias = torch.stack(rest, 1) if scores.dim() == 4 else torch.cat(rest)
    return Call(query, key, candidates[0], mask=allowed, bias=bias)


def _by_head(x: Tensor) -> Sequence[Tensor]:
    """x split by head: [B, T, S] each, or [1, T, S] per entry if contexts and heads are one dimension."""
    return x.unbind(1) if x.dim() == 4 else x.split(1)


def _open(scores: Tensor) -> Tensor:
    """Keys that are not masked; models that mask in their own code add finfo.min (possibly scaled) or -1e4."""
    largest = scores.amax(-1, keepdim=True)
    return (scores > largest - _HOPELESS) & (largest > -_HOPELESS)


def _rests(query: Tensor, key: Tensor, scores: Tensor, scaling: float | Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Per head: scores minus scaled products of queries and keys, and the scores, both 0 at masked keys."""
    zero = scores.new_zeros((), dtype=torch.float32 if scores.dtype in (torch.float16, torch.bfloat16) else None)
    keys = _by_head(key)  # fewer than queries if heads share keys
    for h, (q, s) in enumerate(zip(_by_head(query), _by_head(scores), strict=True)):
        k = keys[h * len(keys) // query.shape[1 if query.dim() == 4 else 0]]
        factor = scaling if isinstance(scaling, float) else scaling[h % len(scaling)].to(zero.dtype)
        s, allowed = s.to(zero.dtype), _open(s)
        yield (s - factor * (q.to(zero.dtype) @ k.to(zero.dtype).mT)).where(allowed, zero), s.where(allowed, zero)


def _joined(chunks: Sequence[Call]) -> Call | None:
    """One call for all chunks of a sequence; keys of other chunks are not allowed."""
    queries, keys = ([getattr(c, name).shape[2] for c in chunks] for name in ("query", "key"))
    if not chunks or sum(queries) != sum(keys):  # overlapping chunks are not joined
        return None
    query, key = (torch.cat([getattr(c, name) for c in chunks], dim=2) for name in ("query", "key"))
    mask = torch.zeros(query.shape[0], 1, sum(queries), sum(keys), dtype=torch.bool, device=query.device)
    row = column = 0
    for chunk, height, width in zip(chunks, queries, keys, strict=True):
        mask[:, :, row : row + height, column : column + width] = chunk.parted()[0]
        row, column = row + height, column + width
    whole = all(c.bias is None for c in chunks)
    return Call(query, key, chunks[0].scaling, mask=mask, whole=whole, chunk=max(queries))


@contextlib.contextmanager
def watching(
    modules: Sequence[nn.Module], take: Take, shield: Shield = as_it_is, *, idle: Callable[[], bool] = bool
) -> Iterator[None]:
    """Pass every attention call of these modules to `take`, without changing their results, unless `idle()`."""
    with contextlib.ExitStack() as stack:
        for module in modules:
            known = looks_up(module)
            stack.enter_context(_relayed(module, take, shield, idle) if known else watched(module, take, shield))
        yield


def looks_up(module: nn.Module) -> bool:
    """Whether a module takes its attention function from the registry of transformers."""
    classes = [base for part in module.modules() for base in type(part).__mro__]
    return any(hasattr(sys.modules.get(base.__module__), "ALL_ATTENTION_FUNCTIONS") for base in classes)


class Watched:
    """The id of a module whose calls somebody takes, and the mark of its observer in graphs; a copy has nothing."""

    def __init__(self, target: int = 0, mark: Tensor | None = None) -> None:
        self.target, self.mark = target, mark

    def __reduce__(self) -> Any:
        return Watched, ()


@contextlib.contextmanager
def _relayed(module: nn.Module, take: Take, shield: Shield, idle: Callable[[], bool]) -> Iterator[None]:
    from transformers.modeling_utils import AttentionInterface

    parts, seen = list(module.modules()), shield(lambda *args, **kwargs: take(_call(*args, **kwargs)))
    taker = Taker(seen, idle)
    with _lock:
        for part in parts:
            _takers.setdefault(id(part), []).append(taker)
            if id(part) not in _observers:
                rest = functools.partial(_resting, id(part))
                mark, _observers[id(part)] = observer(part, _tell_traced, idle=rest)
                vars(part)[_WATCHED] = Watched(id(part), mark)
    try:
        with replaced(AttentionInterface, "get_interface", _routed):
            yield
    finally:
        with _lock:
            for part in parts:
                _takers[id(part)].remove(taker)
                if not _takers[id(part)]:
                    del _takers[id(part)], _observers[id(part)]
                    vars(part).pop(_WATCHED, None)


def _resting(number: int) -> bool:
    return all(taker.idle() for taker in _takers.get(number, ()))


def _routed(look_up: Callable[..., Any]) -> Callable[..., Any]:
    """The registry's look-up, whose results are relayed."""

    @functools.wraps(look_up)
    def routed(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(_relay, look_up(self, attn_implementation, default), str(attn_implementation))

    return routed


def _relay(function: Callable[..., Any], name: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    watched = getattr(module, _WATCHED, None)
    if watched is None or watched.mark is None:
        return function(module, *args, **kwargs)
    if torch.compiler.is_compiling() and not hasattr(_mask_of(*args, **kwargs), "mask_mod"):
        _trace(name, watched.mark, *args, **kwargs)  # not by the id: blocks that are alike share a graph
    elif watched.target == id(module):  # replicas have it from their originals
        _tell(name, module, *args, **kwargs)
    return function(module, *args, **kwargs)


def _mask_of(query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **_: Any) -> Any:
    return attention_mask


def _trace(
    name: str,
    mark: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *,
    scaling: float | Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> None:
    """Have the call told by an operator in the graph of torch.compile, which is not broken by it."""
    if scaling is not None and not isinstance(scaling, Tensor):  # numbers are symbols where shapes are dynamic
        kind = torch.float64 if has_float64(query.device) else torch.float32
        # beside the queries: on the host it would have a C++ compiler called for a graph that is on a device
        scaling = torch.scalar_tensor(scaling, dtype=kind, device=query.device)
    given = {"query": query, "key": key, "attention_mask": attention_mask, "position_bias": position_bias}
    causal, capped = None if is_causal is None else bool(is_causal), softcap is not None or s_aux is not None
    given |= {"scaling": scaling, "sliding_window": sliding_window}
    trace_call(mark, (), given, f"({name!r}, {causal!r}, {capped!r})")


def _tell_traced(module: nn.Module, _: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    name, causal, capped = ast.literal_eval(kwargs.pop("facts"))
    _tell_all(name, module, value=None, is_causal=causal, softcap=1.0 if capped else None, **kwargs)


@torch.compiler.disable
def _tell(name: str, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    _tell_all(name, module, *args, **kwargs)


def _tell_all(name: str, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    for taker in tuple(_takers.get(id(module), ())):
        taker.seen(name, module, *args, **kwargs)


def _call(
    name: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    attention_mask: Any = None,
    *,
    scaling: float | Tensor | None = None,
    **kwargs: Any,
) -> Call:
    causal = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", True)) if causal is None else bool(causal)
    bias, mask = kwargs.get("position_bias"), None
    if hasattr(attention_mask, "mask_mod"):  # a block mask of flex attention
        from torch.nn.attention.flex_attention import create_mask

        sizes = (query.shape[0], 1, query.shape[2], key.shape[2])
        mask = create_mask(attention_mask.mask_mod, *sizes, device=str(query.device))
    elif isinstance(attention_mask, Tensor):
        mask = attention_mask.detach()[..., : key.shape[2]]
    return Call(
        query.detach(),
        key.detach(),
        head_scaling(scaling, query.shape[-1]),
        mask=mask,
        bias=None if bias is None else bias.detach(),
        causal=causal and query.shape[2] > 1 and name != "eager",  # eager attention uses only the mask
        window=kwargs.get("sliding_window") if "flash" in name else None,
        whole=kwargs.get("softcap") is None and kwargs.get("s_aux") is None,
    )
