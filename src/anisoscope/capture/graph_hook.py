"""Hooks inside a graph of torch.compile that do not break it: an operator runs them, which the compiler does not enter.

Hooks of modules are traced with their module. What ours do – Python with state, on real tensors – cannot be traced, and
a hook that is kept out of the graph cuts it in two. A `GraphHook` puts an operator into the graph instead, and that
calls the hook's action with the tensors whenever the graph runs; nothing of the action is compiled or guarded on.

All but `arrived` state that they change a tensor, ORDER, which nobody reads: so they are neither dropped nor exchanged.
`tap` and `call` return a ticket, a number on the host; in the backward pass `arrived` finds by it who waits for the
gradient, and states that it changes the gradient, which stays as it is. All are tagged as unsafe for CUDA graphs, whose
replays call no Python: with them the compiler leaves the operators outside of what it records.

Where activations are checkpointed inside a graph, its backward pass computes a block again, but not the operators:
their tickets are saved for it (`_once`). Where a whole graph is computed again, as that of a block that was compiled by
itself, they return the tickets of the forward pass (`again`).

Where hooks only take some rows, the same at all sites of a pass, even one call of Python for each is too much: a
training that waits for its host gets slower. Their taking is compiled (`GraphRows`): at the first site `choose` returns
the positions and a ticket, a plain gather takes the rows of each site, and one `keep` at the end hands over all.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

_NOTHING: dict[str, Any] = {}
GradientAct = Callable[[Tensor], Any]

_library = torch.library.Library("anisoscope", "DEF")
for _schema in (
    "call(Tensor(a!) order, Tensor[] values, SymInt[] sizes, str names, str facts, Tensor number, bool grad, "
    "bool learns)"
    " -> Tensor",
    "tap(Tensor(a!) order, Tensor x, Tensor number, bool grad, bool learns) -> Tensor",
    "choose(Tensor(a!) order, Tensor x, Tensor number, int size) -> (Tensor, Tensor)",
    "keep(Tensor(a!) order, Tensor[] rows, int[] numbers, int[] learning, Tensor ticket) -> ()",
    "arrived(Tensor(a!) gradient, Tensor ticket, Tensor number) -> ()",
):
    _library.define(_schema, tags=(torch.Tag.cudagraph_unsafe,))
with torch.inference_mode(False):
    ORDER = torch.zeros(())
_hooks: weakref.WeakValueDictionary[int, HookRecord] = weakref.WeakValueDictionary()
_numbers, _tickets = itertools.count(), itertools.count()
_waiting: weakref.WeakValueDictionary[int, Waiting | Chosen] = weakref.WeakValueDictionary()
_current = threading.local()  # `graph`: whether an operator runs that begins a pass, `waiting`: of the one that runs


def _marked(number: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(number)


def _left_behind() -> Callable[..., None]:
    return do_nothing


def do_nothing(*_: Any, **__: Any) -> None:
    """The hook of a copy."""


class GraphHook(nn.Module):
    """A hook that may stand in a graph of torch.compile.

    `act` is called as any hook; in a graph `inner` is called in its place, by default the same. It is given, with
    `pick`, the tensor that this finds in the arguments of the hook, else (module, args, kwargs): of a hook `before` the
    call those of the module, tensors and whole numbers alone, after it none, or with `output` the tensors that this
    names in the module's output. With `learns` it may ask for the gradient of the tensor, or of the first of an output
    (`on_gradient`); whoever waits for one is kept in `waiting`, until that is cleared. With `keeps` it may keep what it
    is given: a graph overwrites its tensors, so these are copies. Nothing is called while `idle()`.

    A hook with `rows` and the `site` that it is always at takes rows of its tensor in the graph, if that is the graph
    where the hook that `opens` them stands; one that `closes` them hands them over.

    Blocks that are compiled one by one share a graph where they are alike. So what tells their hooks apart is no
    constant of it but one of its inputs: a tensor (`mark`) that holds the number of the hook. Blocks with other hooks
    must not share it: how many there are stands in each (`beside`, see `tell_apart`).

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
        output: Callable[[Any], dict[str, Tensor]] | None = None,
        keeps: bool = False,
        idle: Callable[[], bool] | None = None,
        waiting: list[Any] | None = None,
        rows: GraphRows | None = None,
        site: Hashable = None,
        opens: GraphRows | None = None,
        closes: Sequence[GraphRows] = (),
    ) -> None:
        super().__init__()
        self.number, self.target, self.pick, self.before, self.learns = next(_numbers), id(module), pick, before, learns
        self.mark, self.output, self.beside = _marked(self.number), output, "alone"
        self.rows, self.opens = (None if x is None else x.name for x in (rows, opens))
        self.closes = tuple(x.name for x in closes)
        act = torch.compiler.disable(act)  # outside of a graph it is not compiled either
        self.record = HookRecord(module, act, inner or act, [] if waiting is None else waiting, rows, site)
        self.record.keeps, self.record.idle = keeps, idle
        self.record.ends = (*closes, *(() if opens is None else (opens,)))
        _hooks[self.number] = self.record

    def __call__(self, called: nn.Module, *args: Any) -> None:
        if not torch.compiler.is_compiling():
            if id(called) == self.target:  # not a copy
                self.record.leave_graph()
                self.record.act(called, *args)
        elif self.beside:  # never empty: it is read so that torch.compile looks at it
            self._trace(called, *args)

    def __reduce__(self) -> Any:
        return _left_behind, ()

    def _trace(self, called: nn.Module, *args: Any) -> None:
        if self.pick is not None:
            x = self.pick(called, *args)
            if x is not None:
                self._trace_tap(x)
            return
        for name in self.closes:
            getattr(_held, name).close()
        if self.output is None:
            trace_call(self.mark, *args if self.before else ())
        else:
            self._trace_output(self.output(args[-1]))
        if self.opens is not None:
            getattr(_held, self.opens).begin()

    def _trace_tap(self, x: Tensor) -> None:
        learns, grad = self.learns and x.requires_grad, torch.is_grad_enabled()
        if self.rows is not None and grad and x.dim() == 3 and not _nested_graph() and getattr(_held, self.rows).open:
            getattr(_held, self.rows).take(x, self.number, self.mark, learns)
        else:
            tap(x, ORDER, self.mark, grad, learns)

    def _trace_output(self, parts: dict[str, Tensor]) -> None:
        names, grad = ",".join([f".{name}" for name in parts]), torch.is_grad_enabled()
        learns = self.learns and len(parts) > 0 and next(iter(parts.values())).requires_grad
        tell(list(parts.values()), ORDER, names, self.mark, grad, learns)


def tell_apart(modules: Iterable[nn.Module]) -> None:
    """Write into our hooks of each module how many it has before and after its call.

    torch.compile does not look whether a module without hooks has got some; it does look at what our hooks read.
    """
    for module in modules:
        before, after = (
            [hook for hook in hooks.values() if isinstance(hook, GraphHook)]
            for hooks in (module._forward_pre_hooks, module._forward_hooks)
        )
        for hook in (*before, *after):
            hook.beside = f"{len(before)} before, {len(after)} after"


def trace_call(number: Tensor, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = _NOTHING, facts: str = "") -> None:
    """Put the operator into a graph that calls an action with these arguments; `facts` is text that it gets, too."""
    tensors: dict[str, Tensor] = {}
    sizes: dict[str, int] = {}
    for i, value in enumerate(args):
        _gather(str(i), value, tensors, sizes)
    for name, value in kwargs.items():
        _gather(f".{name}", value, tensors, sizes)
    names, given = ",".join([*tensors, *sizes]), (list(tensors.values()), list(sizes.values()))
    call(*given, ORDER, names, facts, number, torch.is_grad_enabled())


def _gather(path: str, value: Any, tensors: dict[str, Tensor], sizes: dict[str, int]) -> None:
    """Enter the tensors and whole numbers of an argument by path: `/` parts it, `.` is before the keys of mappings."""
    if isinstance(value, Tensor):
        tensors[path] = value.detach()
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            _gather(f"{path}/{i}", item, tensors, sizes)
    elif isinstance(value, dict):
        for name, item in value.items():
            _gather(f"{path}/.{name}", item, tensors, sizes)
    elif isinstance(value, int) and not isinstance(value, bool):
        sizes[path] = value


def _placed(named: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments (args, kwargs) that were entered by path.

    >>> _placed({"1": 5, ".x/.ids/0": 2, ".x/.ids/1": 3})
    ((None, 5), {'x': {'ids': (2, 3)}})
    """
    inner: dict[str, dict[str, Any]] = {}
    for path, value in named.items():
        head, _, rest = path.partition("/")
        inner.setdefault(head, {})[rest] = value
    found = {head: parts[""] if "" in parts else _nested(parts) for head, parts in inner.items()}
    numbered = {int(head): value for head, value in found.items() if head.isdecimal()}
    args = tuple(numbered.get(i) for i in range(max(numbered, default=-1) + 1))
    return args, {head[1:]: value for head, value in found.items() if head.startswith(".")}


def _nested(parts: Mapping[str, Any]) -> Any:
    args, kwargs = _placed(parts)
    return kwargs or args


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
    keeps: bool = False
    idle: Callable[[], bool] | None = None

    def sleeps(self) -> bool:
        return self.idle is not None and self.idle()

    def call(self, act: Callable[[], Any], x: Tensor | None, *, grad: bool, learns: bool) -> Tensor:
        """Call an action, which may wait for the gradient of x; the ticket of that."""
        ticket, before = next(_tickets), getattr(_current, "waiting", None)
        waiting = Waiting(x, learns, self, ticket)
        _current.waiting = waiting
        try:
            with torch.set_grad_enabled(grad):
                act()
        finally:
            # only while it acts is x asked for; CUDA graphs refuse a replay in which a tensor of theirs lives on
            _current.waiting, waiting.x = before, None
        if waiting.acts:
            _waiting[ticket] = waiting
            self.waiting.append(waiting)
        return torch.tensor(ticket)

    def again(self, x: Tensor) -> Tensor:
        """The ticket of the forward pass that is computed again: of several, that with the nearest activation."""
        mark = _mark(x)
        mine = [w for w in self.waiting if isinstance(w, Waiting) and w.owner is self and not w.done]
        mine = [w for w in mine if w.mark.shape == mark.shape]
        if len(mine) > 1:
            mine.sort(key=lambda w: float((w.mark - mark).abs().sum()))
        return torch.tensor(mine[0].ticket if mine else -1)

    def leave_graph(self) -> None:
        """Hand over what a graph that was broken left behind."""
        for rows in self.ends:
            if rows.open:
                rows.close_outside()


def observer(module: nn.Module, act: Callable[..., Any], *, idle: Callable[[], bool]) -> tuple[Tensor, HookRecord]:
    """An action (module, args, kwargs), given copies, for `trace_call` by number, as long as the record is kept."""
    number, record = next(_numbers), HookRecord(module, act, act, [], None, None)
    record.keeps, record.idle = True, idle
    _hooks[number] = record
    return _marked(number), record


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


class Waiting:
    """Those who wait for the gradient of one activation of one pass."""

    def __init__(self, x: Tensor | None, learns: bool, owner: HookRecord, ticket: int) -> None:
        self.x, self.learns, self.acts = x, learns, list[GradientAct]()
        self.owner, self.ticket, self.done = owner, ticket, False
        self.mark = _mark(x) if x is not None and learns else torch.empty(0)

    def asked(self, x: Tensor, act: GradientAct) -> bool:
        """Wait for the gradient of x; False where none comes, or x is another tensor."""
        comes = self.learns and x is self.x
        self.acts += [act] if comes else []
        return comes

    def arrived(self, gradient: Tensor, hook: HookRecord) -> None:
        self.done = True
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

    def take(self, x: Tensor, number: int, mark: Tensor, learns: bool) -> None:
        place = (x.shape[0], x.shape[1], x.shape[2], x.device)
        if self.index is None or self.ticket is None or self.place != place:  # stages may have positions of their own
            self._hand_over()
            self.index, self.ticket = choose(x, ORDER, mark, self.most)
            self.place = place
        self.rows.append(sample(x, self.index, self.ticket, mark, learns))
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


def _nested_graph() -> bool:
    """Whether what is traced becomes a graph inside another, such as a checkpointed block; constant in a graph.

    Nothing that is kept while one is traced may be used in the other.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx().output.current_tracer.parent is not None


def _mark(x: Tensor) -> Tensor:
    """A few values of an activation, by which passes are told apart."""
    return x.detach().flatten()[:: max(1, x.numel() // 64)].clone()


def _backward_runs() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def unbreakable() -> bool:
    """Whether what is traced must be one graph; constant in a graph."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return bool(InstructionTranslator.current_tx().one_graph)


def mark_constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have a function called while a graph is traced, and its result kept as a constant."""
    from torch._dynamo import assume_constant_result

    marked: Callable[..., Any] = assume_constant_result(function)
    return marked


def _once(operator: Callable[..., Tensor], *args: Any) -> Tensor:
    """The ticket of an operator of ours, which is not to run again where a block is computed again."""
    if torch.compiler.is_dynamo_compiling():  # it looks inside where only a probe is watched: `prepare_compile` was not
        return operator(*args)  # called, and what follows would break the graph
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    if mode is None:
        return operator(*args)
    nodes = mode.tracer.graph.nodes
    count, ticket = len(nodes), operator(*args)
    for node in itertools.islice(reversed(nodes), len(nodes) - count):
        for mark in ("recompute", "ac_graph_id"):  # of checkpointed blocks
            node.meta.pop(mark, None)
    return ticket


def in_graph() -> bool:
    """Whether an operator of a graph runs."""
    return getattr(_current, "graph", False)


def on_gradient(x: Tensor, act: GradientAct) -> bool:
    """Have `act` called with the gradient of x when it comes; False where none will."""
    waiting: Waiting | None = getattr(_current, "waiting", None)
    if waiting is not None:
        return waiting.asked(x, act)
    if x.requires_grad:
        x.register_hook(act)
    return x.requires_grad


def tap(x: Tensor, order: Tensor, number: Tensor, grad: bool, learns: bool) -> Tensor:
    """Put the operator into a graph, and that of the gradient; dynamo does not look inside (`prepare_compile`)."""
    ticket = _once(torch.ops.anisoscope.tap, order, x.detach(), number, grad, learns)
    if learns:
        _await(x, ticket, number)
    return ticket


def call(
    values: list[Tensor], sizes: list[int], order: Tensor, names: str, facts: str, number: Tensor, grad: bool
) -> Tensor:
    """Put the operator that is given arguments into a graph."""
    return _once(torch.ops.anisoscope.call, order, values, sizes, names, facts, number, grad, False)


def tell(values: list[Tensor], order: Tensor, names: str, number: Tensor, grad: bool, learns: bool) -> Tensor:
    """Put the operator that is given an output into a graph, and that of the gradient of its first tensor."""
    found = [value.detach() for value in values]
    ticket = _once(torch.ops.anisoscope.call, order, found, [], names, "", number, grad, learns)
    if learns:
        _await(values[0], ticket, number)
    return ticket


def choose(x: Tensor, order: Tensor, number: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Put the operator that chooses positions of x [B, T, d] into a graph: their index and a ticket."""
    size = x.shape[0] * x.shape[1]
    most = most if isinstance(size, torch.SymInt) else min(size, most)  # one graph for all lengths takes the most
    found: tuple[Tensor, Tensor] = torch.ops.anisoscope.choose(order, x.detach(), number, most)
    return found


def sample(x: Tensor, index: Tensor, ticket: Tensor, number: Tensor, learns: bool) -> Tensor:
    """The rows of x [B, T, d] at these positions, in a graph, and the operator of their gradient."""
    if learns:
        _await(x, ticket, number)
    return rows_at(x.detach(), index)


def rows_at(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x [B, T, d] in float32, or float64 if they are that."""
    rows = x.flatten(0, 1).index_select(0, index)
    return rows if rows.dtype == torch.float64 else rows.float()


def _await(x: Tensor, ticket: Tensor, number: Tensor) -> None:
    def arrived(gradient: Tensor) -> Tensor:
        torch.ops.anisoscope.arrived(gradient, ticket, number)
        return gradient

    x.register_hook(arrived)


def prepare_compile() -> None:
    """Tell torch.compile of `tap` and the like; takes seconds where nothing was compiled before.

    A hook that is called between two graphs is not to be one of its own: no gradient would come to it.
    """
    from torch._dynamo import eval_frame

    mark_constant(_nested_graph)
    mark_constant(unbreakable)
    for function in (tap, call, tell, choose, sample):
        torch.compiler.allow_in_graph(function)
    if (skip := getattr(eval_frame, "skip_code", None)) is not None:
        skip(GraphHook.__call__.__code__)


@torch.library.impl(_library, "call", "CompositeExplicitAutograd")
def _call(
    order: Tensor,
    values: list[Tensor],
    sizes: list[int],
    names: str,
    facts: str,
    number: Tensor,
    grad: bool,
    learns: bool,
) -> Tensor:
    hook = _hooks.get(int(number))
    if hook is None or hook.sleeps() or _backward_runs():
        return torch.tensor(-1)
    values = [value.clone() for value in values] if hook.keeps else values
    args, kwargs = _placed(dict(zip(names.split(","), [*values, *sizes], strict=True)) if names else {})
    kwargs |= {"facts": facts} if facts else {}
    before, _current.graph = in_graph(), True
    try:
        act, x = functools.partial(hook.inner, hook.module, args, kwargs), values[0] if learns else None
        return hook.call(act, x, grad=grad, learns=learns)
    finally:
        _current.graph = before


@torch.library.impl(_library, "tap", "CompositeExplicitAutograd")
def _tap(order: Tensor, x: Tensor, number: Tensor, grad: bool, learns: bool) -> Tensor:
    hook = _hooks.get(int(number))
    if hook is None or hook.sleeps():
        return torch.tensor(-1)
    if _backward_runs():
        return hook.again(x)
    x = x.clone() if hook.keeps else x
    return hook.call(functools.partial(hook.inner, x), x, grad=grad, learns=learns)


@torch.library.impl(_library, "choose", "CompositeExplicitAutograd")
def _choose(order: Tensor, x: Tensor, number: Tensor, size: int) -> tuple[Tensor, Tensor]:
    hook = _hooks.get(int(number))
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
def _arrived(gradient: Tensor, ticket: Tensor, number: Tensor) -> None:
    waiting, hook = _waiting.get(int(ticket)), _hooks.get(int(number))
    if waiting is not None and hook is not None:
        # CUDA graphs refuse a replay in which a tensor of theirs lives on that was freed while they were recorded
        waiting.arrived(gradient.clone() if hook.keeps else gradient, hook)


def _fake_choice(order: Tensor, x: Tensor, number: Tensor, size: int) -> tuple[Tensor, Tensor]:
    return torch.empty(size, dtype=torch.int64, device=x.device), torch.empty((), dtype=torch.int64)


for _name in ("keep", "arrived"):
    torch.library.register_fake(f"anisoscope::{_name}", lambda *_: None, lib=_library)
for _name in ("call", "tap"):
    torch.library.register_fake(f"anisoscope::{_name}", lambda *_: torch.empty((), dtype=torch.int64), lib=_library)
torch.library.register_fake("anisoscope::choose", _fake_choice, lib=_library)
