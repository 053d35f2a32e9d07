"""A fixed number of rows of every site at every training step, taken without device–host synchronisation.

The mask stays on its device, where the rows are chosen.

Shapes: B contexts, T positions, m of the B·T positions data, k rows taken, S sites, d width."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.capture import padding, row
from anisoscope.capture.graph_hook import Chosen, GraphRows, in_graph, rows_at
from anisoscope.capture.row import Arguments, Contexts, Index, PositionChoice, Rows, RowSelection, Rule, Ruled
from anisoscope.capture.sites.layout import Layout, Stack, StackPass
from anisoscope.capture.sites.site import Site
from anisoscope.capture.step_capture import Report, StepCapture, StepPass
from anisoscope.errors import AnisoscopeError
from anisoscope.models.forward import CONTENT, PIXEL_MASK, SOUND
from anisoscope.models.parallel import HeldPositions
from anisoscope.numerics.fused import Fused

_GOLDEN = 0.6180339887498949  # golden ratio − 1, whose multiples modulo 1 are evenly spread


@dataclass(frozen=True)
class SampledIndex(Index):
    """Rows sampled from a pass; rows that are not `valid` are padding to a constant number."""

    valid: Tensor | None = None  # [k] bool; None where all are


@dataclass
class SampledContexts(Contexts):
    """Contexts whose mask stays on the device; `select` samples at most `most` evenly spread positions."""

    most: int = 2048
    turn: float = 0.0  # relative position taken within each stretch; changes at every pass
    compiled: bool = False  # whether the pass is
    _taken: dict[tuple[int, int, int, PositionChoice, torch.device], RowSelection] = field(default_factory=dict)

    def select(self, length: int, choice: PositionChoice, device: torch.device) -> RowSelection:
        """One position from each of k equal stretches of the data, the same for all sites of a pass."""
        prefix, suffix = (0, 0) if choice.whole or length <= self.prefix + self.suffix else (self.prefix, self.suffix)
        key = (length, prefix, suffix, choice, device)
        if key not in self._taken:
            real = self._wanted(length, choice, prefix=prefix, device=device)
            take, valid = self._sample(real, length, prefix=prefix, suffix=suffix, device=device)
            nothing = take[:0]  # context, position and token of sampled rows are not used
            index = SampledIndex(self.batch, length, take, nothing, nothing, nothing, valid=valid)
            self._taken[key] = RowSelection(take, index)
        return self._taken[key]

    def select_piece(self, piece: HeldPositions, choice: PositionChoice, device: torch.device) -> RowSelection:
        raise AnisoscopeError(
            "the positions of contexts are split over processes (sequence parallel), of which one would see its own "
            "alone at every step; leave every_step out."
        )

    def _wanted(self, length: int, choice: PositionChoice, *, prefix: int, device: torch.device) -> Tensor | None:
        """Which positions are data and not left out [B, length]; None if all are."""
        if choice.first == "in" and choice.special == "in":
            return self.real
        real = torch.ones(self.batch, length, dtype=torch.bool) if self.real is None else self.real
        wanted = real = real.to(device, non_blocking=True)
        if choice.first == "out":
            wanted = real & ~row.first_of(real & (torch.arange(real.shape[1], device=device) >= prefix))
        if choice.special == "out" and choice.special_ids is not None and self.tokens is not None:
            ids = torch.tensor(choice.special_ids, dtype=torch.long, device=device)
            wanted = wanted & ~torch.isin(self.tokens.to(device), ids)
        return wanted

    def _sample(
        self, real: Tensor | None, length: int, *, prefix: int, suffix: int, device: torch.device
    ) -> tuple[Tensor, Tensor | None]:
        inner = length - prefix - suffix
        if real is None:  # every position is data
            ranks, _ = spread(self.batch * inner, min(self.most, self.batch * inner), turn=self.turn, device=device)
            return ranks if inner == length else ranks // inner * length + ranks % inner + prefix, None
        if length == 1 != real.shape[1]:  # one row of each context
            real = real.any(1, keepdim=True)
        if real.shape[1] != length:
            raise AnisoscopeError(
                f"a site has {length} positions where the mask has {real.shape[1]}, which cannot be told apart "
                "without waiting for the device; leave every_step out, or give contexts without padding."
            )
        real = real.to(device, non_blocking=True)
        if inner != length:
            place = torch.arange(length, device=device)
            real = real & (place >= prefix) & (place < length - suffix)
        most = min(self.most, real.numel())
        find = _spread_over_compiled if self.compiled else _spread_over
        index, valid = find(real, _places(most, device)[0], _fractions(most, self.turn, device))
        return index, valid


def spread(count: int | Tensor, most: int, *, turn: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """`most` different numbers below `count`, one from each of equal stretches; and which of them are valid.

    >>> spread(8, 4, turn=0.0, device=torch.device("cpu"))[0].tolist()
    [0, 3, 4, 7]
    >>> spread(torch.tensor(2), 4, turn=0.5, device=torch.device("cpu"))[1].tolist()
    [True, True, False, False]
    """
    j, part = _places(most, device)[0], _fractions(most, turn, device)
    if isinstance(count, Tensor):
        return _placed(count, j, part)
    start, sizes = _stretches(count, most, device)
    return start + (part * sizes).long(), j[:-1] < count


# what does not change from step to step is made once: a training may wait for every operation of its host


@functools.lru_cache(maxsize=8)
def _places(most: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The numbers from 0 to `most`, and all but the last times the golden ratio."""
    j = torch.arange(most + 1, device=device)
    return j, j[:-1] * _GOLDEN


@functools.lru_cache(maxsize=8)
def _stretches(count: int, most: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where equal stretches of `count` rows begin, and their sizes."""
    ends = _places(most, device)[0] * count // max(1, min(count, most))
    return ends[:-1], ends[1:] - ends[:-1]


def _fractions(most: int, turn: float, device: torch.device) -> Tensor:
    """Which relative position of each stretch is taken."""
    return (_places(most, device)[1] + turn).remainder_(1.0)


def _placed(count: Tensor, j: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
    ends = j * count // count.clamp(1, len(part))
    start = ends[:-1]
    return start + (part * (ends[1:] - start)).long(), j[:-1] < count


def _spread_over(real: Tensor, j: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
    """The same among the positions that are data [B, T]."""
    counts = real.flatten().cumsum(0)
    ranks, valid = _placed(counts[-1], j, part)
    return torch.searchsorted(counts, ranks + 1).clamp_(max=counts.numel() - 1), valid


_spread_over_compiled = Fused(_spread_over)


def mask_of(arguments: Mapping[str, Any], content: Tensor, config: Any, ids: Fused | None = None) -> Tensor | None:
    """Which positions are data [B, T], as by `read_contexts` but without leaving their device; None if all are.

    `ids` is `padding.unpadded_ids` for this configuration, compiled.
    """
    stated = padding.stated_mask(arguments, content, [])
    if stated is not None or content.is_floating_point():
        return stated
    return padding.unpadded_ids(content, config) if ids is None else ids(content)[0]


@dataclass
class SampledPass(StepPass):
    """A pass with some of its rows; the gradients of several backward passes add up."""

    rows: dict[Site, Tensor] = field(default_factory=dict)  # [k, d]
    valid: dict[Site, Tensor | None] = field(default_factory=dict)  # [k] bool
    compiled: bool = False  # whether its rows came out of a graph of torch.compile

    @property
    def learned_from(self) -> bool:
        """Whether gradients arrived, or no site could receive any."""
        return bool(self.rows) and (bool(self.gradients) or not self.awaited)


class SampledRows(StepCapture):
    """Samples rows and gradients of every training pass and hands them to `take`; never waits for the device.

    Its hooks stand in the graph of torch.compile and do not break it.
    """

    batches: list[SampledPass]

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[Site],
        *,
        layout: Layout,
        take: Callable[[SampledPass], None],
        most: int = 2048,
        rows: Rule | None = None,
        kept: PositionChoice | None = None,
        report: Report | None = None,
        turn: tuple[int, int] = (0, 1),
    ) -> None:
        self._graphed: dict[str, GraphRows] = {}  # by stack
        self._masks: dict[str, Fused | None] = {}  # by stack
        super().__init__(model, sites, layout=layout, rows=rows, kept=kept, report=report)
        self.take, self.most, self.turn = take, most, 0.0
        self._number, self._start = 0, 0.0
        # of the passes of a step in several processes, the number of the first one here and the stride
        self._first, self._stride = turn

    def begin(self, step: int) -> None:
        """Record every pass from now on; the sampled rows depend on the step and the number of the pass."""
        self.batches, self._number, self.active, self.failed = [], self._first, True, False
        self._start = step * _GOLDEN % 1.0

    def end(self) -> None:
        """Stop recording and hand over the passes that received gradients."""
        batches = self.batches
        self.drop()
        for seen in batches:
            if seen.learned_from:
                self.take(seen)

    # hooks

    def _attach(self) -> None:
        self._graphed.clear()
        super()._attach()

    def _made(
        self,
        module: nn.Module,
        whole: Callable[..., None],
        act: Callable[..., None],
        *,
        site: Site | None = None,
        running: StackPass | None = None,
        begun: StackPass | None = None,
        ended: Sequence[StackPass] = (),
        **words: Any,
    ) -> Any:
        """`running` is the stack of a hook that always sees `site`; those begun and ended are told to a graph, too."""
        rows, opens = (None if of is None else self._in_graph(of) for of in (running, begun))
        words |= {"site": site, "rows": rows, "opens": opens, "closes": tuple(map(self._in_graph, ended))}
        return super()._made(module, whole, act, **words)

    def _in_graph(self, running: StackPass) -> GraphRows:
        """Where the hooks of a stack keep rows while a graph is traced."""

        def find(site: Site, x: Tensor) -> Chosen | None:
            contexts = running.contexts
            if contexts is None or not self.batches:
                return None
            placed = row.positioned(x, contexts, site)
            selection = contexts.select(placed.shape[1], self.choice, x.device)
            index = selection.take
            if placed.shape[:2] != x.shape[:2]:  # positions come first
                index = index % placed.shape[1] * placed.shape[0] + index // placed.shape[1]
            return self._chosen(self.batches[-1], index, selection.index)

        name = running.stack.name
        if name not in self._graphed:
            self._graphed[name] = GraphRows(self._shielded(find), most=self.most, waiting=self._waiting)
            self._stack.callback(self._graphed[name].remove)
        return self._graphed[name]

    def _chosen(self, seen: SampledPass, index: Tensor, about: Index) -> Chosen:
        assert isinstance(about, SampledIndex)

        def keep(rows: Tensor, sites: list[Site], learning: set[Site]) -> None:
            self._seen.update(sites)
            seen.compiled = True
            if len(index):
                seen.rows.update(zip(sites, rows[:, : len(index)].unbind(0), strict=True))
                seen.valid.update(dict.fromkeys(sites, about.valid))
                seen.awaited |= learning
                seen.unreached += [site for site in sites if site not in learning]

        def receive(site: Site, gradient: Tensor) -> None:
            seen.receive(site, rows_at(gradient, index))

        return Chosen(index, self._shielded(keep), self._shielded(receive))

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._idle():
            # micro-batches are handed over one by one; those still waiting for gradients stay until the step ends
            for seen in [seen for seen in self.batches if seen.learned_from and seen.awaited <= seen.gradients.keys()]:
                self.batches.remove(seen)
                self.take(seen)
            self.batches.append(SampledPass())
            self.turn = (self._start + self._number * _GOLDEN**2) % 1.0
            self._number += self._stride
        super()._begin(module, args, kwargs)

    def _read(self, arguments: Arguments, outer: Arguments, *, ruled: Ruled, stack: Stack) -> Contexts:
        more, real = ruled
        arguments |= more
        for name in (*SOUND, PIXEL_MASK):
            if isinstance(arguments.get(name, outer.get(name)), Tensor):
                raise AnisoscopeError(
                    f"the model was given {name}, and which of its rows are data cannot be told without waiting for "
                    "the device; leave every_step out (a probe at scheduled steps reads it), or give text or unpadded "
                    "pictures."
                )
        named = [held[name] for held in (arguments, outer) for name in CONTENT if isinstance(held.get(name), Tensor)]
        others = (value for value in arguments.values() if isinstance(value, Tensor) and value.dim())
        content: Tensor | None = next(iter([*named, *others]), None)
        if content is None:
            raise row.no_content(arguments)
        if real is None and content.dim() < 4:
            real = mask_of(arguments, content, stack.config, self._unpadded(stack) if in_graph() else None)
        tokens = None if content.is_floating_point() or content.dim() != 2 else content
        words: dict[str, Any] = {"most": self.most, "turn": self.turn, "compiled": in_graph()}
        return SampledContexts(torch.zeros(content.shape[0]), real, tokens, **words)

    @property
    def fused(self) -> list[Fused]:
        """What is compiled for it."""
        return [_spread_over_compiled, *(mask for mask in self._masks.values() if mask is not None)]

    def _unpadded(self, stack: Stack) -> Fused | None:
        """`padding.unpadded_ids` for the configuration of a stack, compiled; None where it finds nothing."""
        if stack.name not in self._masks:
            config = stack.config

            def unpadded(ids: Tensor) -> tuple[Tensor, ...]:
                found = padding.unpadded_ids(ids, config)
                assert found is not None
                return (found,)

            self._masks[stack.name] = None if padding.padding_id(config) is None else Fused(unpadded)
        return self._masks[stack.name]

    def _send(self, site: Site, x: Tensor, selection: RowSelection) -> None:
        """Keep the rows; nothing is computed, and so no precision or mode is to be changed for it."""
        if self.batches:
            self._keep(site, selection.rows(x), selection.index)

    def _keep(self, site: Site, rows: Tensor, index: Index) -> None:
        if self.batches and rows.ndim == 2:
            assert isinstance(index, SampledIndex)
            self.batches[-1].rows[site], self.batches[-1].valid[site] = rows, index.valid

    def rows(self, rows: Rows) -> None:
        """Not used: `_keep` keeps them."""
