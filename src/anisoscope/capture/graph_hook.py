"""Hooks inside a graph of torch.compile that do not break it: an operator runs them, which the compiler does not enter.

Hooks of modules are traced with their module. What ours do – Python with state, on real tensors – cannot be traced, and
a hook that is kept out of the graph cuts it in two. A `GraphHook` puts an operator into the graph instead, and that
calls the hook's action with the tensors whenever the graph runs; nothing of the action is compiled or guarded on.

All but `arrived` state that they change a tensor, ORDER, which nobody reads: so they are neither dropped nor exchanged.
`tap` returns a ticket, a number on the host; in the backward pass `arrived` finds by it who waits for the gradient, and
states that it changes the gradient, which stays as it is.

Where hooks only take some rows, the same at all sites of a pass, even one call of Python for each is too much: a
training that waits for its host gets slower. Their taking is compiled (`GraphRows`): at the first site `choose` returns
the positions and a ticket, a plain gather takes the rows of each site, and one `keep` at the end hands over all.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

_NOTHING: dict[str, Any] = {}
GradientAct = Callable[[Tensor], Any]

_library = torch.library.Library("anisoscope", "DEF")
_library.define("call(Tensor(a!) order, Tensor[] values, str names, int number, bool grad) -> ()")
_library.define("tap(Tensor(a!) order, Tensor x, int number, bool grad, bool learns) -> Tensor")
_library.define("choose(Tensor(a!) order, Tensor x, int number, int size) -> (Tensor, Tensor)")
_library.define("keep(Tensor(a!) order, Tensor[] rows, int[] numbers, int[] learning, Tensor ticket) -> ()")
_library.define("arrived(Tensor(a!) gradient, Tensor ticket, int number) -> ()")
with torch.inference_mode(False):
    ORDER = torch.zeros(())
_hooks: weakref.WeakValueDictionary[int, HookRecord] = weakref.WeakValueDictionary()
_numbers, _tickets = itertools.count(), itertools.count()
_waiting: weakref.WeakValueDictionary[int, Waiting | Chosen] = weakref.WeakValueDictionary()
_current = threading.local()  # `graph`: whether an operator runs that begins a pass, `waiting`: of the one that runs


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


class GraphHook(nn.Module):
    """A hook that may stand in a graph of torch.compile.

    `act` is called as any hook; in a graph `inner` is called in its place, by default the same. It is given, with
    `pick`, the tensor that this finds in the arguments of the hook, else (module, args, kwargs): of a hook `before` the
    call those of the module that are tensors, after it none. With `learns` it may ask for the gradient of that tensor
    (`on_gradient`); whoever waits for one is kept in `waiting`, until that is cleared. While `recomputing` the graph is
    broken: an operator that changes a tensor cannot be recomputed.

    A hook with `rows` and the `site` that it is always at takes rows of its tensor in the graph, if that is the graph
    where the hook that `opens` them stands; one that `closes` them hands them over.

    torch.compile looks at every step whether what it traced is still the same. Modules whose attributes are numbers,
    names and functions are looked at quickly, and so are those that hold them: so a hook is a module, and has names of
    the objects that it uses while it is traced (`_held`).
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
        waiting: list[Any] | None = None,
        recomputing: Recomputing | None = None,
        rows: GraphRows | None = None,
        site: Hashable = None,
        opens: GraphRows | None = None,
        closes: Sequence[GraphRows] = (),
    ) -> None:
        super().__init__()
        self.number, self.target, self.pick, self.before, self.learns = next(_numbers), id(module), pick, before, learns
        self.recomputing, self.rows, self.opens = (None if x is None else x.name for x in (recomputing, rows, opens))
        self.closes = tuple(x.name for x in closes)
        act = torch.compiler.disable(act)  # outside of a graph it is not compiled either
        self.record = HookRecord(module, act, inner or act, [] if waiting is None else waiting, rows, site)
        self.record.ends = (*closes, *(() if opens is None else (opens,)))
        _hooks[self.number] = self.record

    def __call__(self, called: nn.Module, *args: Any) -> None:
        if id(called) != self.target:  # a copy
            return
        if not torch.compiler.is_compiling():
            self.record.leave_graph()
            self.record.act(called, *args)
        elif self.recomputing is not None and getattr(_held, self.recomputing).now:
            self.record.act(called, *args)
        elif self.pick is None:
            for name in self.closes:
                getattr(_held, name).close()
            self._trace_call(*args if self.before else ())
            if self.opens is not None:
                getattr(_held, self.opens).begin()
        else:
            x = self.pick(called, *args)
            if x is not None:
                self._trace_tap(x)

    def __reduce__(self) -> Any:
        return _left_behind, ()

    def _trace_tap(self, x: Tensor) -> None:
        learns, grad = self.learns and x.requires_grad, torch.is_grad_enabled()
        if self.rows is not None and grad and x.dim() == 3 and getattr(_held, self.rows).open:
            getattr(_held, self.rows).take(x, self.number, learns)
        else:
            tap(x, ORDER, self.number, grad, learns)

    def _trace_call(self, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] = _NOTHING) -> None:
        tensors = {str(i): value.detach() for i, value in enumerate(args) if isinstance(value, Tensor)}
        tensors |= {name: value.detach() for name, value in kwargs.items() if isinstance(value, Tensor)}
        grad = torch.is_grad_enabled()
        torch.ops.anisoscope.call(ORDER, list(tensors.values()), ",".join(tensors), self.number, grad)


@dataclass(eq=False)
class HookRecord:
    """What a hook does, beyond what is traced."""

    module: nn.Module
    act: Callable[..., Any]
    inner: Callable[..., Any]
    waiting: list[Any]
    rows: GraphRows | None
    site: Any
    ends: tuple[GraphRows, ...] = ()  # which this hook opens or closes

    def leave_graph(self) -> None:
        """Hand over what a graph that was broken left behind."""
        for rows in self.ends:
            if rows.open:
                rows.close_outside()


class Held:
    """Objects that hooks name: an attribute for each."""


_held = Held()


class HeldObject:
    """One of them, until `remove`."""

    def __init__(self) -> None:
        self.name = f"n{next(_numbers)}"
        setattr(_held, self.name, self)

    def remove(self) -> None:
        vars(_held).pop(self.name, None)


class Recomputing(HeldObject):
    """Whether one of these modules uses gradient checkpointing, when last looked."""

    def __init__(self, parts: Sequence[Any]) -> None:
        super().__init__()
        self.parts = [part for part in parts if hasattr(part, "gradient_checkpointing")]
        self.look()

    def look(self) -> None:
        self.now = any(part.gradient_checkpointing for part in self.parts)


class Waiting:
    """Those who wait for the gradient of one activation of one pass."""

    def __init__(self, learns: bool) -> None:
        self.learns, self.acts = learns, list[GradientAct]()

    def arrived(self, gradient: Tensor, hook: HookRecord) -> None:
        for act in self.acts:
            act(gradient)


@dataclass(frozen=True, eq=False)
class Chosen:
    """The rows that are taken at all sites of one pass through one stack, at `index` of its B·T positions."""

    index: Tensor  # [k]
    keep: Callable[[Tensor, list[Any], set[Any]], Any]  # of rows [S, k, d], their sites, those that a gradient comes to
    receive: Callable[[Any, Tensor], Any]  # of a site and the gradient [B, T, d] of its activation

    def arrived(self, gradient: Tensor, hook: HookRecord) -> None:
        self.receive(hook.site, gradient)


class GraphRows(HeldObject):
    """Rows that the hooks of one stack take inside a graph, of at most `most` positions.

    `find(site, x)` chooses them when the graph runs; None where nothing is recorded. The rest is there while a graph is
    traced; since the last hook empties it, nothing of it stays when the graph was not broken in between.
    """

    def __init__(self, find: Callable[[Any, Tensor], Chosen | None], *, most: int, waiting: list[Any]) -> None:
        super().__init__()
        self.find, self.most, self.waiting = find, most, waiting
        self.forget()

    def forget(self) -> None:
        self.open = False
        self.index: Tensor | None = None
        self.ticket: Tensor | None = None
        self.place: tuple[Any, ...] | None = None  # shape and device of the tensors at `index`
        self._empty()

    def _empty(self) -> None:
        self.rows: list[Tensor] = []
        self.numbers: list[int] = []  # of the hooks that took them
        self.learning: list[int] = []  # those of them to which gradients come

    def begin(self) -> None:
        self.forget()
        self.open = True

    def take(self, x: Tensor, number: int, learns: bool) -> None:
        place = (x.shape[0], x.shape[1], x.shape[2], x.device)
        if self.index is None or self.ticket is None or self.place != place:  # stages may have positions of their own
            self._hand_over()
            self.index, self.ticket = choose(x, ORDER, number, self.most)
            self.place = place
        self.rows.append(sample(x, self.index, self.ticket, number, learns))
        self.numbers.append(number)
        if learns:
            self.learning.append(number)

    def _hand_over(self) -> None:
        if self.rows:
            torch.ops.anisoscope.keep(ORDER, self.rows, self.numbers, self.learning, self.ticket)
            self._empty()

    def close(self) -> None:
        self._hand_over()
        self.forget()

    @torch.compiler.disable
    def close_outside(self) -> None:
        self.close()


def in_graph() -> bool:
    """Whether an operator of a graph runs."""
    return getattr(_current, "graph", False)


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
    ticket: Tensor = torch.ops.anisoscope.tap(order, x.detach(), number, grad, learns)
    if learns:
        _await(x, ticket, number)
    return ticket


def choose(x: Tensor, order: Tensor, number: int, most: int) -> tuple[Tensor, Tensor]:
    """Put the operator that chooses positions of x [B, T, d] into a graph: their index and a ticket."""
    size = x.shape[0] * x.shape[1]
    most = most if isinstance(size, torch.SymInt) else min(size, most)  # one graph for all lengths takes the most
    found: tuple[Tensor, Tensor] = torch.ops.anisoscope.choose(order, x.detach(), number, most)
    return found


def sample(x: Tensor, index: Tensor, ticket: Tensor, number: int, learns: bool) -> Tensor:
    """The rows of x [B, T, d] at these positions, in a graph, and the operator of their gradient."""
    if learns:
        _await(x, ticket, number)
    return rows_at(x.detach(), index)


def rows_at(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x [B, T, d] in float32, or float64 if they are that."""
    rows = x.flatten(0, 1).index_select(0, index)
    return rows if rows.dtype == torch.float64 else rows.float()


def _await(x: Tensor, ticket: Tensor, number: int) -> None:
    def arrived(gradient: Tensor) -> Tensor:
        torch.ops.anisoscope.arrived(gradient, ticket, number)
        return gradient

    x.register_hook(arrived)


def prepare_compile() -> None:
    """Tell torch.compile of `tap` and the like; takes seconds where nothing was compiled before.

    A hook that is called between two graphs is not to be one of its own: no gradient would come to it.
    """
    from torch._dynamo import eval_frame

    for function in (tap, choose, sample):
        torch.compiler.allow_in_graph(function)
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
    _current.graph = True
    try:
        with torch.set_grad_enabled(grad):
            hook.inner(hook.module, args, named)
    finally:
        _current.graph = False


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


@torch.library.impl(_library, "choose", "CompositeExplicitAutograd")
def _choose(order: Tensor, x: Tensor, number: int, size: int) -> tuple[Tensor, Tensor]:
    hook = _hooks.get(number)
    found = hook.rows.find(hook.site, x) if hook is not None and hook.rows is not None else None
    if hook is None or hook.rows is None or found is None:
        return torch.zeros(size, dtype=torch.int64, device=x.device), torch.tensor(-1)
    ticket = next(_tickets)
    _waiting[ticket] = found
    hook.rows.waiting.append(found)
    return pad(found.index, (0, size - len(found.index))), torch.tensor(ticket)  # a copy, which the graph may overwrite


@torch.library.impl(_library, "keep", "CompositeExplicitAutograd")
def _keep(order: Tensor, rows: list[Tensor], numbers: list[int], learning: list[int], ticket: Tensor) -> None:
    chosen = _waiting.get(int(ticket))
    if isinstance(chosen, Chosen):
        hooks = [_hooks[number] for number in numbers]
        chosen.keep(torch.stack(rows), [hook.site for hook in hooks], {_hooks[number].site for number in learning})


@torch.library.impl(_library, "arrived", "CompositeExplicitAutograd")
def _arrived(gradient: Tensor, ticket: Tensor, number: int) -> None:
    waiting, hook = _waiting.get(int(ticket)), _hooks.get(number)
    if waiting is not None and hook is not None:
        waiting.arrived(gradient, hook)


def _fake_choice(order: Tensor, x: Tensor, number: int, size: int) -> tuple[Tensor, Tensor]:
    return torch.empty(size, dtype=torch.int64, device=x.device), torch.empty((), dtype=torch.int64)


for _name in ("call", "keep", "arrived"):
    torch.library.register_fake(f"anisoscope::{_name}", lambda *_: None, lib=_library)
torch.library.register_fake("anisoscope::tap", lambda *_: torch.empty((), dtype=torch.int64), lib=_library)
torch.library.register_fake("anisoscope::choose", _fake_choice, lib=_library)
