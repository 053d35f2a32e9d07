"""`Capture`: hooks that stream the activations of a model, without padding, to a sink during a forward pass."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from anisoscope.capture import padding, row
from anisoscope.capture.attention_reader import AttentionReader
from anisoscope.capture.graph_hook import do_nothing
from anisoscope.capture.row import (
    Arguments,
    Batch,
    Contexts,
    Index,
    PositionChoice,
    Rows,
    RowSelection,
    Rule,
    Ruled,
    Scores,
    Sink,
    by_rule,
    for_sinks,
)
from anisoscope.capture.sites import layout as layouts
from anisoscope.capture.sites.block import Place
from anisoscope.capture.sites.layout import Layout, Stack, StackPass, find_layout
from anisoscope.capture.sites.named_module import (
    ModuleCalls,
    PackedSequence,
    arranged,
    find_packed,
    named_sites,
    unpacked,
)
from anisoscope.capture.sites.site import CALLED_KINDS, PER_HEAD, Site
from anisoscope.capture.sites.stage import refuse_nameless
from anisoscope.errors import AnisoscopeError
from anisoscope.models.forward import (
    MEDIA,
    all_logits,
    by_name,
    evaluating,
    few_logits,
    find_tensor,
    first_tensor,
    forward,
    module_at,
    original,
    uncompiled,
    unwrapped,
    without_wrappers,
)
from anisoscope.models.parallel import (
    HeldPositions,
    piece_of,
    plain,
    refuse_context_parallel,
    refuse_split_module,
    sharded,
    together,
    without_gradients,
)

_OUTSIDE = {"embed", "resid", "final", "cls"}  # kinds of sites between blocks
_DECODED = ("decoder_input_ids", "decoder_inputs_embeds", "labels", "encoder_outputs")

Watch = Callable[[Site, Tensor, Callable[[Tensor], Tensor]], None]
"""(site, the activation itself, how its gradient is cut into the same rows), while the forward pass runs."""


class Capture:
    """Streams the rows of `sites` to `sink`; a context manager that removes its hooks on exit.

    >>> with Capture(model, find_layout(model).sites(), sink) as capture:  # doctest: +SKIP
    ...     capture.run({"input_ids": ids, "attention_mask": mask})

    Ids and mask are read from the arguments of the model's forward, so that a training loop may call the model itself;
    special-token flags and groups come from a `Batch` passed to `run`. `modules` selects modules of any `nn.Module` by
    path or pattern; `rows` returns the mask (or mask and ids) for a model whose arguments do not contain it, and
    `special_ids` are the special tokens where a batch has no flags. `watch` is called with each activation, with its
    graph, after its rows went to the sink; while `idle()` is true nothing is captured.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[Site],
        sink: Sink,
        *,
        layout: Layout | None = None,
        special: str = "in",
        first: str = "in",
        special_ids: tuple[int, ...] | None = None,
        pool: str = "none",
        modules: Sequence[str] | None = None,
        rows: Rule | None = None,
        watch: Watch | None = None,
        idle: Callable[[], bool] | None = None,
    ) -> None:
        layouts.refuse_unhookable(model)
        model = original(model)
        self.model, self.sink, self.rule, self.watch, self.idle = model, sink, rows, watch, idle
        self._spread = sharded(model)  # over processes, which may look at the same contexts
        self._together = together(model) if self._spread else None
        self.choice = PositionChoice(special, first, pool, special_ids=special_ids)
        self.notes: list[str] = []
        self.layout = layout
        places = [site for site in sites if not site.name]
        if layout is None:  # not needed if only named modules are wanted
            with contextlib.nullcontext() if places else contextlib.suppress(AnisoscopeError):
                self.layout = find_layout(model)
        self._stacks = self.layout.stacks if self.layout is not None else ()
        self.named = {site.name: site for site in sites if site.name} | named_sites(model, modules or ())
        self.sites = [*places, *self.named.values()]
        if not self.sites:
            raise AnisoscopeError("nothing to capture: neither sites nor modules were given.")
        for site in places:
            if self.layout is None or site not in self.layout.stack(site.stack).sites([site.kind]):
                raise AnisoscopeError(
                    f"site {site} cannot be captured in a forward pass of {type(model).__name__}; take sites from "
                    "find_layout(model).sites(…), and weight tables from weight_rows."
                )
        if self._together is not None and (called := sorted({s.kind for s in sites if s.kind in CALLED_KINDS})):
            raise AnisoscopeError(
                f"the model is tensor-parallel, so that a process may have some of the heads only, of which "
                f"{', '.join(called)} would be measured; ask for metrics of the stream, or use `anisoscope sweep`."
            )
        self._wanted = set(self.sites)
        self._seen: set[Site] = set()
        self._passes: dict[str, StackPass] = {}
        self._batch: Batch | None = None
        self._above: Contexts | None = None  # contexts of the encoder, for its decoder
        self._outer: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._finished = 0
        self._unfed: set[str] = set()  # stacks that the batch has no inputs for
        self._stack = contextlib.ExitStack()
        self._hooked: list[tuple[str, nn.Module, RemovableHandle]] = []
        self._edges: list[tuple[dict[str, Any], str, Any]] = []  # from the model to modules with hooks
        self._calls: dict[Site, ModuleCalls] = {}  # of named modules in the current pass
        self._packed: dict[Site, PackedSequence] = {}  # what a named module just returned
        self._readers: list[AttentionReader] = []
        self._nesting: list[nn.TransformerEncoder] = []
        self._unnested = contextlib.ExitStack()  # restores the nested tensors of encoders after a pass

    def __enter__(self) -> Self:
        try:
            if self.idle is None:  # in a graph that was compiled without hooks none is called
                self._stack.enter_context(uncompiled(self.model))
            with without_wrappers(self.model):
                self._attach()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *rest: object) -> None:
        self._stack.close()
        self._unnested.close()
        self._readers.clear()  # they know this capture: without the circle the rows of its sink go with their last user
        if kind is not None or self.idle is not None:  # a training loop may run without any measured step
            return
        if not self._finished:
            raise AnisoscopeError(
                "no forward pass was seen while capturing; call capture.run(batch), or the model itself."
            )
        self._raise_unseen()

    def run(self, batch: Batch | Mapping[str, Any] | Tensor) -> None:
        """One forward pass in evaluation and inference mode over a batch, on the device of the model's inputs."""
        batch = batch if isinstance(batch, Batch) else Batch(batch if isinstance(batch, Mapping) else {"": batch})
        self._batch, self._seen = batch, set()
        reader = self._called_part(batch.inputs)
        try:
            unread = contextlib.nullcontext() if self.named or "labels" in batch.inputs else few_logits(reader)
            with evaluating(self.model), without_gradients(self.model), unread:
                forward(reader, {**batch.inputs, **all_logits(reader)} if self.named else batch.inputs)
        finally:
            self._batch = None
        self._raise_unseen()

    def _called_part(self, inputs: Mapping[str, Any]) -> nn.Module:
        """The model, or only its encoder, with a note, if a batch of sounds or images has no decoder inputs."""
        self._unfed = set()
        stacks = {stack.name: stack for stack in self._stacks}
        media = any(name in inputs for name in MEDIA)
        if not media or set(stacks) != {"encoder", "decoder"} or any(inputs.get(name) is not None for name in _DECODED):
            return self.model
        what = f"the batch has no decoder_input_ids for the decoder of {type(unwrapped(self.model)).__name__}"
        if not any(site.stack == "encoder" for site in self.sites):
            raise AnisoscopeError(f"{what}; add them (the start token alone will do), or ask for sites of the encoder.")
        self._unfed = {"decoder"}
        self._note(f"{what}: its encoder alone was measured")
        return self.model.get_submodule(stacks["encoder"].owner)

    def _note(self, *notes: str) -> None:
        self.notes += [note for note in notes if note not in self.notes]

    @property
    def unseen(self) -> list[Site]:
        """The sites that no pass so far has reached."""
        return sorted(site for site in self._wanted - self._seen if site.stack not in self._unfed)

    @property
    def counted(self) -> set[str]:
        """The stacks where positions that may be class tokens were counted as patches."""
        return {name for name, running in self._passes.items() if running.counted}

    def _raise_unseen(self) -> None:
        if not (unseen := self.unseen):
            return
        more = f" and {len(unseen) - 6} more" if len(unseen) > 6 else ""
        names = ", ".join(site.name or str(site) for site in unseen[:6]) + more
        hint = "the modules were not called"
        if all(site.kind in CALLED_KINDS for site in unseen):
            hint = 'its attention shows no queries and keys; load the model with attn_implementation="eager" or "sdpa"'
        raise AnisoscopeError(f"nothing was seen at {names}: {hint}.")

    def lost(self) -> list[str]:
        """The paths of modules that were replaced or taken out since the hooks were attached, or lost their hooks."""
        if self._whole():
            return []
        there = {(path, id(module)) for path, module, _ in self._registered()}
        there = {(path, number) for path, number in there if id(module_at(self.model, path)) == number}
        return list(dict.fromkeys(path or "the model" for path, m, _ in self._hooked if (path, id(m)) not in there))

    def _whole(self) -> bool:
        """Whether all hooks and modules are where they were; asked at every step, so without a walk along paths."""
        held = ((handle.hooks_dict_ref(), handle.id) for _, _, handle in self._hooked)
        there = all(hooks is not None and number in hooks for hooks, number in held)
        return there and all(
            (found := parts.get(name)) is part or (found is not None and original(found) is part)
            for parts, name, part in self._edges
        )

    def reattach(self) -> None:
        """Attach all hooks anew, to the modules that the model has now."""
        self.detach()
        self.__enter__()

    def detach(self) -> None:
        """Take all hooks off, also those that came along when a module was copied into the place of another."""
        acts = {id(act) for _, _, act in self._registered()}
        self._stack.close()
        for module in self.model.modules():
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                for number in [number for number, act in hooks.items() if id(act) in acts or act is do_nothing]:
                    del hooks[number]
        self._hooked.clear()
        self._edges.clear()
        self._passes.clear()
        self._readers.clear()

    def _registered(self) -> Iterator[tuple[str, nn.Module, Any]]:
        """Path, module and function of every hook that is still registered."""
        for path, module, handle in self._hooked:
            hooks = handle.hooks_dict_ref()
            if hooks is not None and handle.id in hooks:
                yield path, module, hooks[handle.id]

    def _shielded(self, act: Callable[..., Any]) -> Callable[..., Any]:
        """A hook as it is attached; captures of a user's training catch its errors."""
        return act

    def _attach(self) -> None:
        self._nesting = [part for part in self.model.modules() if isinstance(part, nn.TransformerEncoder)]
        self._hook("", self._begin, before=True)
        owners = {stack.owner: stack.name for stack in self._stacks if stack.owner}
        # the stack whose positions a named module has; "" if they are those of the model's own arguments
        within = {
            path: next((name for owner, name in owners.items() if f"{path}.".startswith(f"{owner}.")), "")
            for path in self.named
        }
        used = {site.stack for site in self.sites if site.kind != "module"} | set(within.values())
        used |= {"encoder"} if "decoder" in used else set()  # the encoder's input is part of a decoder's context
        for stack in self._stacks:
            if stack.name in used:
                self._hook_stack(stack)
        if "" in used:
            whole = Stack("", "", (), {}, Place("", "out"), False, getattr(unwrapped(self.model), "config", None))
            self._passes[""] = StackPass(whole, self.notes)
        for path, site in self.named.items():
            self._hook_named(path, site, self._passes[within[path]])
        # hooks run in the order of registration, so the pass ends after everything else has been read
        self._hook("", self._end, always_call=True, graph={"ended": tuple(self._passes.values())})

    def _hook(
        self,
        path: str,
        act: Callable[..., None],
        *,
        before: bool = False,
        pick: Callable[..., Any] | None = None,
        learns: bool = False,
        graph: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Register a hook until exit, of a module's call, or of the tensor that `pick` finds in its arguments.

        `graph` is what a hook in a graph of torch.compile is told in addition.
        """
        module = self.model.get_submodule(path)
        whole = act if pick is None else lambda *args: act(first_tensor(path, pick(*args)))
        hook = self._made(module, self._shielded(whole), act, pick=pick, before=before, learns=learns, **(graph or {}))
        if before:
            handle = module.register_forward_pre_hook(hook, with_kwargs=True)
        else:
            handle = module.register_forward_hook(hook, **options)
        self._stack.callback(handle.remove)
        self._hooked.append((path, module, handle))
        parent = self.model
        for name in path.split(".") if path else ():
            edge = (parent._modules, name, parent._modules[name])
            parent = parent.get_submodule(name)
            if edge not in self._edges:
                self._edges.append(edge)

    def _made(self, module: nn.Module, whole: Callable[..., None], act: Callable[..., None], **_: Any) -> Any:
        """The hook as it is registered; captures of a training make one that may stand in a graph of torch.compile."""
        return whole

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.idle is not None and self.idle():
            return
        refuse_context_parallel()
        self._outer, self._above, self._calls = (args, kwargs), None, {}
        self._unnested.close()
        for part in self._nesting:  # nested tensors have no positions; their rows are the same without
            if getattr(part, "use_nested_tensor", False):
                part.use_nested_tensor = False
                self._unnested.callback(setattr, part, "use_nested_tensor", True)
        if (whole := self._passes.get("")) is not None:
            whole.begin(self._contexts(module, args, kwargs, stack=whole.stack), {})

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._outer = None
        self._unnested.close()
        self._finished += 1
        calls, self._calls = self._calls, {}
        for site, made in calls.items():
            self._keep(site, *made.joined())
            self._note(*made.notes)
        for running in self._passes.values():
            running.end()

    def _hook_stack(self, stack: Stack) -> None:
        running = self._passes[stack.name] = StackPass(stack, self.notes)
        owner = self.model.get_submodule(stack.owner)

        def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.idle is None or not self.idle():
                running.begin(self._contexts(module, args, kwargs, stack=stack), by_name(module, args, kwargs))

        def end(*_: Any) -> None:
            self._finished += 1 if self._outer is None else 0
            running.end()

        self._hook(stack.owner, begin, before=True, graph={"begun": running})
        kinds = {site.kind for site in self.sites if site.stack == stack.name}
        self._hook_blocks(stack, running)
        if stack.tokens is not None:  # no family states which positions are patches: count those of convolutions
            inside = tuple(f"{path}." for path in stack.blocks)
            for path, part in owner.named_modules(prefix=stack.owner):
                if isinstance(part, layouts.CUTTING) and not path.startswith(inside):
                    self._on(path, "out", running.cut, learns=False)
        inner = {(place, kind) for (_, kind), place in stack.places.items() if kind in kinds - set(CALLED_KINDS)}
        for place, kind in sorted(inner, key=str):
            self._on(place.path, place.side, functools.partial(self._emit_part, running, kind, place))
        if kinds & set(CALLED_KINDS):
            emit, encoder = functools.partial(self._emit, running=running), lambda: self._above
            reader = AttentionReader(running, self._wanted, emit, self._show, self.choice, encoder, self._shielded)
            self._stack.enter_context(reader.watching(self.model))
            self._readers.append(reader)
        fixed = {Site(layer, kind, stack.name): place for (layer, kind), place in stack.fixed.items()}
        for site, place in {**fixed, Site(stack.depth, "final", stack.name): stack.final}.items():
            if site.kind in kinds:
                emit = functools.partial(self._emit, site, running=running)
                always = self._always(site, running)
                self._on(place.path, place.side, emit, last=site.kind == "final", graph=always)
        if stack.owner:  # "" is the model itself, whose hook ends the pass
            self._hook(stack.owner, end, always_call=True, graph={"ended": (running,)})

    def _always(self, site: Site, running: StackPass) -> dict[str, Any]:
        """That a hook sees this site in every pass, and the same positions of it as at all others, if that is so."""
        stack, kinds = running.stack, {site.kind for site in self.sites if site.stack == running.stack.name}
        same = len({stack.prefix_at(layer) for layer in range(stack.depth + 1)}) == 1
        alone = self._outputs(running) and "cls" not in kinds and site.kind != "cls"
        return {"site": site, "running": running} if same and alone and site in self._wanted else {}

    def _outputs(self, running: StackPass) -> bool:
        """Whether nothing asks which layer a block is before its output."""
        kinds = {site.kind for site in self.sites if site.stack == running.stack.name}
        return not kinds - _OUTSIDE and running.apart and running.stack.tokens is None

    def _hook_blocks(self, stack: Stack, running: StackPass) -> None:
        kinds = {site.kind for site in self.sites if site.stack == stack.name}
        outputs = self._outputs(running)  # then a hook less for each block
        for path in dict.fromkeys(stack.blocks):
            first = path == stack.blocks[0] and (0, "embed") not in stack.fixed and bool({"embed", "cls"} & kinds)

            def enter(x: Tensor, path: str = path) -> None:
                if running.contexts is None:  # activation checkpointing recomputes the block in the backward pass
                    return
                running.enter(path, x)
                self._emit(running.site("block_in"), x, running)
                if running.layer == 1 and (0, "embed") not in stack.fixed:
                    self._emit(Site(0, "embed", stack.name), x, running)
                    self._emit(Site(0, "cls", stack.name), x, running)

            def leave(x: Tensor, path: str = path) -> None:
                if outputs and running.contexts is not None:
                    running.enter(path, x)
                self._emit(running.site("resid"), x, running)
                self._emit(running.site("cls"), x, running)

            if first or not outputs:
                always = self._always(Site(0, "embed", stack.name), running) if first else {}
                self._on(path, "in", enter, learns="block_in" in kinds or first, graph=always)
            always = self._always(Site(running.layers[path], "resid", stack.name), running)
            self._on(path, "out", leave, learns=bool({"resid", "cls"} & kinds), graph=always)

    def _on(
        self,
        path: str,
        side: str,
        act: Callable[[Tensor], None],
        *,
        last: bool = False,
        learns: bool = True,
        graph: Mapping[str, Any] | None = None,
    ) -> None:
        """Have `act` called with the input or the output of a module; with `learns` it may ask for its gradient."""
        if side == "in":

            def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
                named = [kwargs[name] for name in ("hidden_states", "x", "input") if name in kwargs]
                return find_tensor([*args, *named, *kwargs.values()])

            self._hook(path, act, before=True, pick=before, learns=learns, graph=graph)
        else:

            def after(_: nn.Module, __: Any, output: Any) -> Tensor | None:
                return find_tensor([getattr(output, "last_hidden_state", None) if last else None, output])

            self._hook(path, act, pick=after, learns=learns, graph=graph)

    def _hook_named(self, path: str, site: Site, running: StackPass) -> None:
        """Have the output of a named module emitted: the first floating-point tensor in it, or a packed sequence."""

        def after(_: nn.Module, __: Any, output: Any) -> Tensor | None:
            if not torch.compiler.is_compiling() and (packed := find_packed(output)) is not None:
                self._packed[site] = packed
            return find_tensor(output)

        self._hook(path, functools.partial(self._emit_named, site, running=running), pick=after, learns=True)

    def _show(self, scores: Scores) -> None:
        self._seen.add(scores.site)
        with for_sinks(scores.query.device):
            self.sink.scores(scores) if scores.index.keep.numel() else None

    def _emit_part(self, running: StackPass, kind: str, place: Place, x: Tensor) -> None:
        """Emit the rows of a part of a block, multiplied by the scale that the block applies before adding them."""
        scaled = x if place.scale == 1.0 else x * place.scale
        scaled = scaled * self.model.get_parameter(place.gain) if place.gain else scaled
        self._emit(running.site(kind), scaled, running)

    def _emit(self, site: Site, x: Tensor, running: StackPass, contexts: Contexts | None = None) -> None:
        contexts, activation = contexts or running.contexts, x
        if site not in self._wanted or contexts is None:
            return
        self._seen.add(site)
        row.refuse_eight_bits(x, site)
        if site.kind == "cls" and not (contexts.prefix or contexts.suffix):  # no class token; a note explains it
            return
        whole = x.dim() == 4 and site.kind not in PER_HEAD  # a feature map has no class token
        if site.kind != "cls" and self._unpooled(contexts, whole=whole, known=bool(running.stack.blocks)):
            return
        piece, x = self._piece(x, contexts, site)
        shape, x = x.shape, row.positioned(x, contexts, site)
        choice = self._choice(site, whole=whole)
        if piece is None:
            selection = contexts.select(x.shape[1], choice, x.device)
        else:
            selection = contexts.select_piece(piece, choice, x.device)
        if selection.index.keep.numel() or piece is not None:  # other processes may have rows of the same contexts
            self._send(site, x, selection)
            if self.watch is not None:
                part = functools.partial(plain, shape=shape, what=str(site)) if self._spread else lambda g: g
                self.watch(site, activation, lambda g: selection.gradients(row.positioned(part(g), contexts, site)))

    def _choice(self, site: Site, *, whole: bool) -> PositionChoice:
        """Which positions of a site are wanted; some sites are one row per context."""
        pool = {"cls": "cls", "stage_mean": "mean"}.get(site.kind, self.choice.pool)
        same = pool == self.choice.pool and whole == self.choice.whole
        return self.choice if same else replace(self.choice, pool=pool, whole=whole)

    def _emit_named(self, site: Site, x: Tensor, running: StackPass) -> None:
        """As `_emit`, for a module that a user named; its rows go to the sink when the pass ends, of all its calls."""
        contexts, packed, activation = running.contexts, self._packed.pop(site, None), x
        if contexts is None:
            return
        self._seen.add(site)
        row.refuse_eight_bits(x, site)
        length, whole = 0 if contexts.tokens is None else contexts.tokens.shape[1], packed is None and x.dim() >= 4
        if self._unpooled(contexts, whole=whole, known=bool(running.stack.blocks)):
            return
        if packed is not None:
            contexts = replace(contexts, real=unpacked(packed, length=length)[1], _cache={})
        module, given = self.model.get_submodule(site.name), contexts

        def placed(x: Tensor) -> Tensor:
            x = self._unsplit(x, given, site)
            if packed is not None:
                return unpacked(packed, x, length=length)[0]
            return row.positioned(arranged(x, module, given.batch, self.notes), given, site)

        x = placed(x)
        selection = contexts.select(x.shape[1], self._choice(site, whole=whole), x.device)
        if selection.index.keep.numel():
            calls = self._calls.setdefault(site, ModuleCalls(site.name))
            with for_sinks(x.device):
                number = calls.add(selection.rows(x), selection.index)
            if number is not None and self.watch is not None:
                self.watch(site, activation, lambda g: calls.spread(selection.gradients(placed(g)), number))

    def _unsplit(self, x: Tensor, contexts: Contexts, site: Site) -> Tensor:
        """The activation of a named module as a plain tensor; an error if other processes have positions of it."""
        piece, x = self._piece(x, contexts, site)
        refuse_split_module(piece, site.name)
        return x

    def _piece(self, x: Tensor, contexts: Contexts, site: Site) -> tuple[HeldPositions | None, Tensor]:
        """The activation of a site as a plain tensor, and which positions it has if other processes have the rest."""
        if not self._spread:
            return None, x
        sizes: dict[str, Any] = {"length": contexts.length, "batch": contexts.batch, "what": str(site)}
        return piece_of(x, self._together, **sizes), plain(x, what=str(site))

    def _send(self, site: Site, x: Tensor, selection: RowSelection) -> None:
        with for_sinks(x.device):
            self._keep(site, selection.rows(x), selection.index)

    def _keep(self, site: Site, rows: Tensor, index: Index) -> None:
        with for_sinks(rows.device):
            self.sink.rows(Rows(site, rows, index))

    def _unpooled(self, contexts: Contexts, *, whole: bool, known: bool) -> bool:
        """Whether pooling is meaningless at a site of frames, patches or a map; if so, adds a note."""
        pool = self.choice.pool
        classless = whole or (known and not (contexts.prefix or contexts.suffix))
        if not contexts.plain or pool not in ("cls", "last") or (pool == "cls" and not classless):
            return False
        what = "a class token" if pool == "cls" else "a last position that means more than any other"
        self._note(f"pool={pool}: sites of sounds or pictures without {what} are left out")
        return True

    def _contexts(self, module: nn.Module, args: tuple[Any, ...], kwargs: Arguments, *, stack: Stack) -> Contexts:
        """The contexts of a pass through a stack, by the arguments of the module that owns it and of the model."""
        outer = by_name(self.model, *self._outer) if self._outer is not None else {}
        ruled = by_rule(self.rule, *(self._outer or (args, kwargs)))
        contexts = self._read(row.with_ids(by_name(module, args, kwargs), outer), outer, ruled=ruled, stack=stack)
        contexts.windows = stack.windows
        contexts.channels_last = functools.partial(_channels_last, self.model, self.layout)  # rows outlive this capture
        contexts.prefix, contexts.suffix = stack.prefix_at(0), stack.suffix
        contexts.frames = getattr(module, "_get_feature_vector_attention_mask", None) or row.frames_by_length(module)
        return contexts

    def _read(self, arguments: Arguments, outer: Arguments, *, ruled: Ruled, stack: Stack) -> Contexts:
        batch, (more, real) = self._batch, ruled
        arguments = row.with_masks(arguments, outer, batch.inputs if batch is not None else {}) | more
        decoding = stack.name == "decoder"
        if stack.before:
            refuse_nameless(arguments, stack.before)
        real, above = None if real is None else real.cpu(), self._above if decoding else None
        contexts, notes = row.read_contexts(arguments, config=stack.config, real=real, above=above)
        self._note(*notes)
        contexts.plain |= any(isinstance(arguments.get(name), Tensor) for name in MEDIA)
        contexts.groups = batch.groups if batch is not None else None
        if decoding and contexts.tokens is not None:  # flags of a batch belong to the encoder's input
            ids = sorted(padding.special_ids(stack.config, "bos", "eos", "pad", "decoder_start"))
            contexts.special = torch.isin(contexts.tokens, torch.tensor(ids, dtype=torch.long))
        elif batch is not None and batch.special is not None:
            contexts.special = batch.special.cpu().bool()
        if stack.name == "encoder":
            self._above = contexts
        return contexts


def _channels_last(model: nn.Module, layout: Layout | None, site: Site, shape: torch.Size) -> bool:
    stack = None if site.name or layout is None else layout.stack(site.stack)
    return row.channels_last(model.get_submodule(site.name if stack is None else stack.module_at(site)), shape)
