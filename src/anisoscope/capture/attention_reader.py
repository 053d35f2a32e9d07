"""Queries, keys and scores of every attention call of a stack, handed to a sink while a forward pass runs.

Queries and keys before rotation are the arguments of the model's own rotary function (`apply_rotary_pos_emb` and its
relatives). While a capture runs, a relay replaces it, records arguments and results, and returns the original's result.
Which result is a query, and which of its channels are rotated, is found by comparison with the queries and keys of the
attention call: nothing is assumed about the order of arguments, dimensions or channels.

Shapes: B contexts, W windows of a context (1 where a model has none), H heads, T queries, S keys, d head width."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.capture.attention_call import Call, Shield, around_calls, as_it_is, looks_up, replaced, watching
from anisoscope.capture.row import Contexts, Index, PositionChoice, Scores
from anisoscope.capture.sites.block import rotary_functions
from anisoscope.capture.sites.layout import StackPass
from anisoscope.capture.sites.site import CROSS_KINDS, ROTARY_KINDS, SELF_KINDS, Site
from anisoscope.errors import AnisoscopeError
from anisoscope.models.forward import by_name

Rotation = tuple[Tensor, Tensor]
"""One tensor that was rotated, before and after."""


class _Active(threading.local):
    def __init__(self) -> None:
        self.rotations: list[list[Rotation]] = []  # a list for each attention module that is running in this thread


_active = _Active()


@contextlib.contextmanager
def recorded_rotations(attention: nn.Module) -> Iterator[list[Rotation]]:
    """The list of rotations in the module's current call so far; the original functions are restored afterwards."""
    rotations: list[Rotation] = []

    def begin(*_: Any) -> None:
        rotations.clear()
        _active.rotations.append(rotations)

    def end(*_: Any) -> None:
        rotations.clear()
        _active.rotations[:] = [other for other in _active.rotations if other is not rotations]

    with contextlib.ExitStack() as stack:
        for space, name in rotary_functions(attention):
            stack.enter_context(replaced(space, name, _relay))
        stack.enter_context(around_calls(attention, begin, end))
        yield rotations


def _relay(original: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper of a rotary function that records its arguments with the results of equal shape, in order."""

    @functools.wraps(original)
    def relay(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if _active.rotations:
            before = [x.detach() for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            for i, after in enumerate(result if isinstance(result, (tuple, list)) else (result,)):
                if isinstance(after, Tensor) and i < len(before) and before[i].shape == after.shape:
                    _active.rotations[-1].append((before[i], after.detach()))
        return result

    return relay


def unrotated(x: Tensor, rotations: list[Rotation]) -> Tensor | None:
    """Queries or keys [B, H, T, d] before the rotation of all or some of their channels; None if none produced x."""
    for given, result in rotations:
        pairs = [(given, result)]
        if result.dim() == 4:  # positions may come before heads
            pairs.append((given.transpose(1, 2), result.transpose(1, 2)))
        for before, after in pairs:
            width = after.shape[-1]
            if after.dim() != 4 or after.shape[:-1] != x.shape[:-1] or width > x.shape[-1]:
                continue
            for start in dict.fromkeys((0, x.shape[-1] - width)):
                if torch.equal(after.to(x.dtype), x[..., start : start + width]):
                    return torch.cat((x[..., :start], before.to(x.dtype), x[..., start + width :]), dim=-1)
    return None


@dataclass(frozen=True)
class WindowGrid:
    """Which position of a feature map (row by row) each of the w places of each of W windows holds."""

    places: Tensor  # [W, w] position that each place holds, −1 where the map was padded
    allowed: Tensor  # [W, w, w] bool: places that are neighbours in the map, not only in the window
    known: bool = True  # False: the layout is unknown, and positions are numbered window by window

    @property
    def padded(self) -> bool:
        """Whether windows extend beyond the edge of the map."""
        return bool((self.places < 0).any())

    @property
    def order(self) -> Tensor:
        """For each position of the map its index among the places of all windows."""
        flat = self.places.flatten()
        found = (flat >= 0).nonzero().squeeze(1)
        return found[flat[found].argsort()]

    def restored(self, x: Tensor) -> Tensor:
        """Rows [B·W, H, w, d] of windows, rearranged to [B, positions, H, d] of the map."""
        flat = x.transpose(1, 2).unflatten(0, (-1, len(self.places))).flatten(1, 2)
        return flat.index_select(1, self.order.to(x.device))

    def index(self, index: Index) -> Index:
        """Convert an index of positions of the map to one of places in the windows: the same rows, reordered."""
        total = self.places.numel()
        keep = index.keep // index.length * total + self.order.to(index.keep.device)[index.keep % index.length]
        keep, order = keep.sort()
        return replace(index.taken(order), length=total, keep=keep)


def partition(height: int, width: int, *, size: int, shift: int) -> WindowGrid:
    """Windows of size×size over a map that is padded to a multiple of `size` and rolled by `shift`.

    >>> partition(2, 3, size=2, shift=0).places.tolist()
    [[0, 1, 3, 4], [2, -1, 5, -1]]
    """
    tall, wide = (-(-side // size) * size for side in (height, width))
    row, column = torch.meshgrid(torch.arange(tall), torch.arange(wide), indexing="ij")
    position = torch.where((row < height) & (column < width), row * width + column, -1)
    places, rows, columns = (_windows(x.roll((-shift, -shift), (0, 1)), size) for x in (position, row, column))
    near = [(x[:, :, None] - x[:, None, :]).abs() < size for x in (rows, columns)]
    return WindowGrid(places, near[0] & near[1])


def _windows(x: Tensor, size: int) -> Tensor:
    """[h, w] as [W, size²]."""
    parts = x.unflatten(1, (-1, size)).unflatten(0, (-1, size))  # [rows of windows, size, windows of a row, size]
    return parts.transpose(1, 2).flatten(2, 3).flatten(0, 1)


@dataclass
class AttentionReader:
    """Turns the attention calls of one stack into rows and scores."""

    running: StackPass
    wanted: set[Site]
    emit: Callable[..., None]  # (site, rows, contexts=)
    show: Callable[[Scores], None]
    choice: PositionChoice
    above: Callable[[], Contexts | None]  # contexts of the stack that cross-attention reads
    shield: Shield = as_it_is
    _noted: set[Any] = field(default_factory=set)
    _masks: tuple[Any, Any, tuple[Tensor, Tensor | None]] | None = None  # last call: cache key, tensors, result
    _padded: Tensor | None = None  # the mask that was last checked for attention to padding
    _dimensions: dict[str, Any] = field(default_factory=dict)  # path of a block -> the block, size of its feature map

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Observe the attention modules of the stack that the wanted sites need."""
        kinds = {site.kind for site in self.wanted if site.stack == self.running.stack.name}
        with contextlib.ExitStack() as stack:
            if kinds & {*SELF_KINDS, *ROTARY_KINDS}:
                for path in dict.fromkeys(self.running.stack.blocks):
                    block = model.get_submodule(path)
                    if hasattr(block, "window_size"):  # height and width of the map come with the call
                        begin = self.shield(functools.partial(self._begin_block, path))
                        stack.callback(block.register_forward_pre_hook(begin, with_kwargs=True).remove)
                for module in self._modules(model, "query"):
                    rotations = stack.enter_context(recorded_rotations(module)) if kinds & set(ROTARY_KINDS) else []
                    take = functools.partial(self._within, rotations=rotations)
                    stack.enter_context(watching([module], take, self.shield, idle=self._resting))
            if kinds & set(CROSS_KINDS):
                modules = self._modules(model, "cross_query")
                stack.enter_context(watching(modules, self._across, self.shield, idle=self._resting))
            yield

    def _resting(self) -> bool:
        return self.running.contexts is None

    def read(self, model: nn.Module) -> dict[nn.Module, bool]:
        """The attention modules that are observed, and whether a graph of torch.compile can tell of their calls."""
        kinds = {site.kind for site in self.wanted if site.stack == self.running.stack.name}
        own = self._modules(model, "query") if kinds & {*SELF_KINDS, *ROTARY_KINDS} else []
        cross = self._modules(model, "cross_query") if kinds & set(CROSS_KINDS) else []
        rotating = bool(kinds & set(ROTARY_KINDS))
        return {part: looks_up(part) and not (rotating and part in own) for part in (*own, *cross)}

    def _modules(self, model: nn.Module, kind: str) -> list[nn.Module]:
        paths = dict.fromkeys(place.path for (_, k), place in self.running.stack.places.items() if k == kind)
        return [model.get_submodule(path) for path in paths]

    def _begin_block(self, path: str, block: nn.Module, args: Any, kwargs: Any) -> None:
        self._dimensions[path] = block, by_name(block, args, kwargs).get("input_dimensions")

    def _within(self, call: Call, *, rotations: list[Rotation]) -> None:
        """Emit rows and scores of a self-attention call."""
        contexts = self.running.contexts
        if contexts is None:
            return
        call = call.batched(contexts.batch)
        if call.query.dim() != 4:
            raise AnisoscopeError(
                f"the attention of layer {self.running.layer} has queries of shape {tuple(call.query.shape)}; expected "
                "four dimensions (contexts or windows, heads, positions, width): leave query, key and scores out."
            )
        windows, odd = divmod(call.query.shape[0], contexts.batch)
        if odd or (windows == 1 and call.key.shape[2] > call.query.shape[2]):  # keys from a cache
            return
        grid = self._grid(call, windows)
        self._note_peculiarities(call, grid, apart=contexts.prefix + contexts.suffix)
        found = {"query": call.query, "key": call.key}
        for kind, x in tuple(found.items()):
            if self.running.site(raw := f"{kind}_unrotated") in self.wanted:
                before = unrotated(x, rotations)
                if before is None:
                    layer = self.running.layer
                    self._note(raw, f"{raw} from layer {layer} on is as it meets: no rotation leads to it")
                found[raw] = x if before is None else before
        for kind, x in found.items():
            rows = x.transpose(1, 2) if grid is None else grid.restored(x)
            self.emit(self.running.site(kind), rows, contexts=contexts)
        site = self.running.site("scores")
        if site in self.wanted and call.whole:
            self.show(self._scores(site, call, contexts, keys=contexts, grid=grid))

    def _across(self, call: Call) -> None:
        """Emit rows and scores of a cross-attention call."""
        contexts, read = self.running.contexts, self.above()
        if contexts is None:
            return
        call = call.batched(contexts.batch)
        self.emit(self.running.site("cross_query"), call.query.transpose(1, 2), contexts=contexts)
        if read is not None and read.batch == contexts.batch:
            # keys get the context hashes of their queries, so that both are in the same fold
            paired = replace(read, hashes=contexts.hashes, _cache={})
            self.emit(self.running.site("cross_key"), call.key.transpose(1, 2), contexts=paired)
        site = self.running.site("cross_scores")
        if site in self.wanted and call.whole:
            self.show(self._scores(site, call, contexts, keys=read))

    def _grid(self, call: Call, windows: int) -> WindowGrid | None:
        """The grid of windows, None without windows; windows of unknown size or shift are numbered in order."""
        path, places = self.running.stack.block_at(self.running.layer), call.query.shape[2]
        block, dimensions = self._dimensions.get(path, (None, None))
        size, shift = getattr(block, "window_size", None), getattr(block, "shift_size", None)
        if isinstance(size, int) and isinstance(shift, int) and dimensions is not None:
            found = partition(int(dimensions[0]), int(dimensions[1]), size=size, shift=max(0, shift))
            if tuple(found.places.shape) == (windows, places):
                return found if windows > 1 or found.padded else None
        if windows == 1:
            return None
        counted = torch.arange(windows * places).view(windows, places)
        return WindowGrid(counted, torch.ones(windows, places, places, dtype=torch.bool), known=False)

    def _scores(
        self, site: Site, call: Call, contexts: Contexts, *, keys: Contexts | None, grid: WindowGrid | None = None
    ) -> Scores:
        allowed, bias = self._parted(call)
        plain = replace(self.choice, pool="none")
        length = call.query.shape[2] if grid is None else int((grid.places >= 0).sum())
        index = contexts.select(length, plain, call.query.device).index
        if grid is not None:
            near = grid.allowed.repeat(contexts.batch, 1, 1).unsqueeze(1)  # [B·W, 1, w, w]
            index, allowed = grid.index(index), allowed & near.to(allowed.device)
        elif keys is not None:
            self._note_padding(site, allowed, keys)
        windows = 1 if grid is None else len(grid.places)
        return Scores(site, call.query, call.key, allowed, bias, call.scaling, index, windows, call.chunk)

    def _parted(self, call: Call) -> tuple[Tensor, Tensor | None]:
        """`allowed` and bias of a call, cached for all layers of a pass that share the mask.

        The mask is kept alive with the result, because the cache key contains its memory address.
        """
        given = (call.mask, call.bias)
        tensors = tuple(None if x is None else (x.data_ptr(), x.shape, x.stride()) for x in given)
        sizes = (call.query.shape[2], call.key.shape[2], call.causal, call.window, call.query.device)
        key = (id(self.running.contexts), *tensors, *sizes)
        if self._masks is None or self._masks[0] != key:
            self._masks = (key, (self.running.contexts, *given), call.parted())
        return self._masks[2]

    def _note(self, key: Any, text: str) -> None:
        """Add a note, once per key."""
        if key not in self._noted:
            self._noted.add(key)
            self.running.notes.append(self.running.stack.labelled(text))

    def _note_peculiarities(self, call: Call, grid: WindowGrid | None, *, apart: int) -> None:
        """Note windows, chunks, reduced keys and temperatures of a call, once for each size."""
        queries, keys, since = call.query.shape[2], call.key.shape[2], f"from layer {self.running.layer} on"
        if grid is not None:
            text = f"{since} attention is within {len(grid.places)} windows of {queries} positions: scores are of "
            text += "one window, m counts its keys"
            if grid.padded:
                text += ", padding at the edge of the map too, as the model does; padded rows are left out"
            text += "" if grid.known else "; rows are in the order of the windows"
            self._note((len(grid.places), queries), text)
        elif keys < queries:
            self._note((queries, keys), f"{since} {_reduced_keys(queries - apart, keys - apart)}")
        if 0 < call.chunk < queries:
            text = f"{since} attention is within chunks of {call.chunk} positions: queries and keys were put together"
            self._note(("chunk", call.chunk), f"{text}, scores are those of a chunk, and m counts its keys")
        if isinstance(call.scaling, Tensor):
            self._note("scaling", f"{since} scores have a temperature of each head; queries and keys are without it")

    def _note_padding(self, site: Site, allowed: Tensor, keys: Contexts) -> None:
        if site.kind in self._noted or self._padded is allowed:
            return
        self._padded = allowed
        with contextlib.suppress(AnisoscopeError):  # which input positions the keys stand for may be unknown
            padding = ~keys.real_at(allowed.shape[3], prefix=keys.prefix, suffix=keys.suffix)
            if bool(padding.any()) and bool((allowed.flatten(1, 2).any(1).cpu() & padding).any()):
                self._note(site.kind, f"{site.kind} reach padded positions, as the model does: m counts them")


def _reduced_keys(queries: int, keys: int) -> str:
    """The note on models with fewer keys than queries.

    >>> _reduced_keys(4096, 64)
    '64 keys meet 4096 queries: the model reduces its keys 8×8'
    """
    side = math.isqrt(queries // keys)
    factor = f"{side}×{side}" if side * side * keys == queries else f"{queries / keys:.3g} to one"
    return f"{keys} keys meet {queries} queries: the model reduces its keys {factor}"
