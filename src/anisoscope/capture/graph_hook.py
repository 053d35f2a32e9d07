"""Hooks inside a graph of torch.compile that do not break it: an operator runs them, which the compiler does not enter.

Hooks of modules are traced with their module. What ours do – Python with state, on real tensors – cannot be traced, and
a hook that is kept out of the graph cuts it in two. A `GraphHook` puts an operator into the graph instead, and that
calls the hook's action with the tensors whenever the graph runs; nothing of the action is compiled or guarded on.

`call` and `tap` state that they change a tensor, ORDER, which nobody reads: so they are neither dropped nor exchanged.
`tap` returns a ticket, a number on the host; in the backward pass `arrived` finds by it who waits for the gradient, and
states that it changes the gradient, which stays as it is.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_NOTHING: dict[str, Any] = {}
GradientAct = Callable[[Tensor], Any]

_library = torch.library.Library("anisoscope", "DEF")
_library.define("call(Tensor(a!) order, Tensor[] values, str names, int number, bool grad) -> ()")
_library.define("tap(Tensor(a!) order, Tensor x, int number, bool grad, bool learns) -> Tensor")
_library.define("arrived(Tensor(a!) gradient, Tensor ticket) -> ()")
with torch.inference_mode(False):
    ORDER = torch.zeros(())
_hooks: weakref.WeakValueDictionary[int, GraphHook] = weakref.WeakValueDictionary()
_numbers, _tickets = itertools.count(), itertools.count()
_waiting: weakref.WeakValueDictionary[int, Waiting] = weakref.WeakValueDictionary()
_current = threading.local()  # `waiting`: of the operator that runs


class ModuleHook:
    """A hook of one module; in copies and pickles of it, such as averaged weights, it does nothing."""

    def __init__(self, module: nn.Module, act: Callable[..., Any]) -> None:
        self.module, self.act = module, act

    def __call__(self, called: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.act(called, *args, **kwargs) if called is self.module else None

    def __reduce__(self) -> Any:
        return _left_behind, ()


def _left_behind() -> Callable[..., None]:
    return do_nothing


def do_nothing(*_: Any, **__: Any) -> None:
    """The hook of a copy."""


class GraphHook(ModuleHook):
    """A hook that may stand in a graph of torch.compile.

    `act` is called as any hook; in a graph `inner` is called in its place, by default the same. It is given, with
    `pick`, the tensor that this finds in the arguments of the hook, else (module, args, kwargs): of a hook `before` the
    call those of the module that are tensors, after it none. With `learns` it may ask for the gradient of that tensor
    (`on_gradient`); whoever waits for one is kept in `waiting`, until that is cleared. If a module of `recomputing`
    uses gradient checkpointing the graph is broken: an operator that changes a tensor cannot be recomputed.
    """

    def __init__(
        self,
        module: nn.Module,
        act: Callable[..., Any],
        *,
        inner: Callable[..., Any] | None = None,
        pick: Callable[..., Tensor | None] | None = None,
        before: bool = False,
        learns: bool = False,
        waiting: list[Waiting] | None = None,
        recomputing: Sequence[Any] = (),
    ) -> None:
        super().__init__(module, torch.compiler.disable(act))  # outside of a graph it is not compiled either
        self.inner, self.pick, self.learns, self.number = inner or act, pick, learns, next(_numbers)
        self.before, self.recomputing, self.waiting = before, recomputing, [] if waiting is None else waiting
        _hooks[self.number] = self

    def __call__(self, called: nn.Module, *args: Any) -> None:
        if called is not self.module:
            return
        if not torch.compiler.is_compiling() or self._recomputes():
            self.act(called, *args)
        elif self.pick is None:
            self._trace_call(*args if self.before else ())
        else:
            x = self.pick(called, *args)
            if x is not None:
                tap(x, ORDER, self.number, torch.is_grad_enabled(), self.learns)

    def _recomputes(self) -> bool:
        for part in self.recomputing:  # noqa: SIM110 – plain, because torch.compile traces it
            if part.gradient_checkpointing:
                return True
        return False

    def _trace_call(self, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] = _NOTHING) -> None:
        tensors = {str(i): value.detach() for i, value in enumerate(args) if isinstance(value, Tensor)}
        tensors |= {name: value.detach() for name, value in kwargs.items() if isinstance(value, Tensor)}
        grad = torch.is_grad_enabled()
        torch.ops.anisoscope.call(ORDER, list(tensors.values()), ",".join(tensors), self.number, grad)


class Waiting:
    """Those who wait for the gradient of one activation of one pass."""

    def __init__(self, learns: bool) -> None:
        self.learns, self.acts = learns, list[GradientAct]()


def on_gradient(x: Tensor, act: GradientAct) -> bool:
    """Have `act` called with the gradient of x when it comes; False where none will."""
    waiting: Waiting | None = getattr(_current, "waiting", None)
    if waiting is not None:
        waiting.acts += [act] if waiting.learns else []
        return waiting.learns
    if x.requires_grad:
        x.register_hook(act)
    return x.requires_grad


def tap(x: Tensor, order: Tensor, number: int, grad: bool, learns: bool) -> Tensor:
    """Put the operator into a graph, and that of the gradient; dynamo does not look inside (`prepare_compile`)."""
    learns = learns and x.requires_grad
    ticket = torch.ops.anisoscope.tap(order, x.detach(), number, grad, learns)
    if learns:

        def arrived(gradient: Tensor) -> Tensor:
            torch.ops.anisoscope.arrived(gradient, ticket)
            return gradient

        x.register_hook(arrived)
    return ticket


def prepare_compile() -> None:
    """Tell torch.compile of `tap`; takes seconds where nothing was compiled before.

    A hook that is called between two graphs is not to be one of its own: no gradient would come to it.
    """
    from torch._dynamo import eval_frame

    torch.compiler.allow_in_graph(tap)
    if (skip := getattr(eval_frame, "skip_code", None)) is not None:
        skip(GraphHook.__call__.__code__)


@torch.library.impl(_library, "call", "CompositeExplicitAutograd")
def _call(order: Tensor, values: list[Tensor], names: str, number: int, grad: bool) -> None:
    hook = _hooks.get(number)
    if hook is None:
        return
    named = dict(zip(names.split(","), values, strict=True)) if names else {}
    placed = {int(name): named.pop(name) for name in list(named) if name.isdecimal()}
    args = tuple(placed.get(i) for i in range(max(placed, default=-1) + 1))
    with torch.set_grad_enabled(grad):
        hook.inner(hook.module, args, named)


@torch.library.impl(_library, "tap", "CompositeExplicitAutograd")
def _tap(order: Tensor, x: Tensor, number: int, grad: bool, learns: bool) -> Tensor:
    ticket, hook = next(_tickets), _hooks.get(number)
    if hook is not None:
        before, waiting = getattr(_current, "waiting", None), Waiting(learns)
        _current.waiting = waiting
        try:
            with torch.set_grad_enabled(grad):
                hook.inner(x)
        finally:
            _current.waiting = before
        if waiting.acts:
            _waiting[ticket] = waiting
            hook.waiting.append(waiting)
    return torch.tensor(ticket)


@torch.library.impl(_library, "arrived", "CompositeExplicitAutograd")
def _arrived(gradient: Tensor, ticket: Tensor) -> None:
    waiting = _waiting.get(int(ticket))
    for act in waiting.acts if waiting is not None else ():
        act(gradient)


torch.library.register_fake("anisoscope::call", lambda *_: None, lib=_library)
torch.library.register_fake("anisoscope::arrived", lambda *_: None, lib=_library)
torch.library.register_fake("anisoscope::tap", lambda *_: torch.empty((), dtype=torch.int64), lib=_library)
