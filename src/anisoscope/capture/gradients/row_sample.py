"""A fixed number of rows of every site of a training step, with their gradients, without device–host synchronisation.

The mask is read from the model's own arguments and stays on its device, where the rows are chosen.

Shapes: B contexts, T positions, m of the B·T positions data, k rows taken.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.capture.capture import Capture, Rule, by_rule
from anisoscope.capture.gradients.micro_batch import StepHooks, refuse_graphless
from anisoscope.capture.rows.index import (
    Contexts,
    PositionChoice,
    RowSelection,
    no_content,
    stated_mask,
    unpadded_ids,
    with_ids,
)
from anisoscope.capture.rows.pixel import reads_last
from anisoscope.capture.rows.row import Index, Rows, Scores
from anisoscope.capture.sites.layout import Layout, Stack
from anisoscope.capture.sites.site import Site
from anisoscope.errors import AnisoscopeError
from anisoscope.models.forward import CONTENT, PIXEL_MASK, SOUND, by_name, unwrapped

_GOLDEN = 0.6180339887498949  # its multiples are spread evenly over the unit interval


@dataclass(frozen=True)
class SampledIndex(Index):
    """Rows taken from a pass; rows that are not `valid` fill up to the same number at every step."""

    valid: Tensor | None = None  # [k] bool; None where all are


@dataclass
class SampledContexts(Contexts):
    """Contexts of a pass whose mask lies on the device; `select` takes at most `most` positions, evenly spread."""

    most: int = 2048
    turn: float = 0.0  # which position of a stretch is taken; another at every pass
    _taken: dict[tuple[int, int, int, torch.device], RowSelection] = field(default_factory=dict)

    def select(self, length: int, choice: PositionChoice, device: torch.device) -> RowSelection:
        """One position from each of k equal stretches of the data, the same for all sites of a pass."""
        prefix, suffix = (0, 0) if choice.whole or length <= self.prefix + self.suffix else (self.prefix, self.suffix)
        key = (length, prefix, suffix, device)
        if key not in self._taken:
            take, valid = self._sample(length, prefix, suffix, device)
            nothing = take[:0]  # context, position and token of these rows are not used
            index = SampledIndex(self.batch, length, take, nothing, nothing, nothing, valid=valid)
            self._taken[key] = RowSelection(take, index)
        return self._taken[key]

    def _sample(self, length: int, prefix: int, suffix: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
        inner = length - prefix - suffix
        if self.real is None:  # all is data, and its number is known
            ranks, _ = spread(self.batch * inner, min(self.most, self.batch * inner), turn=self.turn, device=device)
            return ranks if inner == length else ranks // inner * length + ranks % inner + prefix, None
        if self.real.shape[1] != length:
            raise AnisoscopeError(
                f"a site has {length} positions where the mask has {self.real.shape[1]}, which cannot be told apart "
                "without waiting for the device; leave every_step out, or give contexts without padding."
            )
        real = self.real.to(device, non_blocking=True)
        if inner != length:
            place = torch.arange(length, device=device)
            real = real & (place >= prefix) & (place < length - suffix)
        counts = real.flatten().cumsum(0)
        ranks, valid = spread(counts[-1], min(self.most, counts.numel()), turn=self.turn, device=device)
        return torch.searchsorted(counts, ranks + 1).clamp_(max=counts.numel() - 1), valid


def spread(count: int | Tensor, most: int, *, turn: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """`most` different numbers below `count`, one from each of equal stretches; and which of them there are.

    >>> spread(8, 4, turn=0.0, device=torch.device("cpu"))[0].tolist()
    [0, 3, 4, 7]
    >>> spread(torch.tensor(2), 4, turn=0.5, device=torch.device("cpu"))[1].tolist()
    [True, True, False, False]
    """
    j = torch.arange(most + 1, device=device)
    least = count.clamp(1, most) if isinstance(count, Tensor) else max(1, min(count, most))
    ends = j * count // least
    start = ends[:-1]
    within = (j[:-1] * _GOLDEN + turn).remainder_(1.0) * (ends[1:] - start)
    return start + within.long(), j[:-1] < count


def mask_of(arguments: Mapping[str, Any], content: Tensor, config: Any) -> Tensor | None:
    """Which positions are data [B, T], on their device, as `read_contexts` says it; None where all are."""
    stated = stated_mask(arguments, content, [])
    return stated if stated is not None or content.is_floating_point() else unpadded_ids(content, config)


class SampledCapture(Capture):
    """A capture that reads contexts without device–host synchronisation."""

    most = 2048
    turn = 0.0

    def _contexts(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, stack: Stack | None
    ) -> Contexts:
        arguments = by_name(module, args, kwargs)
        outer = by_name(self.model, *self._outer) if self._outer is not None else {}
        more, real = by_rule(self.rule, *(self._outer or (args, kwargs)))
        arguments = {**with_ids(arguments, outer), **more}
        _refuse_unreadable({**outer, **arguments})
        content = _content(arguments, outer)
        config = stack.config if stack is not None else getattr(unwrapped(self.model), "config", None)
        if real is None and content.dim() < 4:
            real = mask_of(arguments, content, config)
        contexts = SampledContexts(torch.zeros(content.shape[0]), real, most=self.most, turn=self.turn)
        contexts.prefix, contexts.suffix = (stack.prefix_at(0), stack.suffix) if stack is not None else (0, 0)
        contexts.channels_last = functools.partial(reads_last, self.model, self.layout)
        return contexts


def _content(arguments: Mapping[str, Any], outer: Mapping[str, Any]) -> Tensor:
    tensors = [value for value in arguments.values() if isinstance(value, Tensor) and value.dim() > 1]
    named = [given[name] for given in (arguments, outer) for name in CONTENT if isinstance(given.get(name), Tensor)]
    found: Tensor | None = next(iter([*named, *tensors]), None)
    if found is None:
        raise no_content(arguments)
    return found


def _refuse_unreadable(arguments: Mapping[str, Any]) -> None:
    seen = [name for name in (*SOUND, PIXEL_MASK) if isinstance(arguments.get(name), Tensor)]
    if seen:
        raise AnisoscopeError(
            f"the model was given {seen[0]}, and which of its rows are data cannot be told without waiting for the "
            "device; leave every_step out (a probe at scheduled steps reads it), or give text or unpadded pictures."
        )


@dataclass
class SampledPass:
    """Rows and gradients of one forward and backward pass."""

    rows: dict[Site, Tensor] = field(default_factory=dict)  # [k, d]
    valid: dict[Site, Tensor | None] = field(default_factory=dict)  # [k] bool
    gradients: dict[Site, Tensor] = field(default_factory=dict)  # [k, d]
    awaited: set[Site] = field(default_factory=set)  # sites that a gradient can reach

    @property
    def complete(self) -> bool:
        return self.awaited <= self.gradients.keys()

    @property
    def learned_from(self) -> bool:
        """Whether gradients arrived, or no site could receive any."""
        return bool(self.rows) and (bool(self.gradients) or not self.awaited)


class SampledRows(StepHooks):
    """Hooks that stay on a model for a whole training run; `take` is given every pass that was learned from."""

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[Site],
        *,
        layout: Layout,
        take: Callable[[SampledPass], None],
        most: int = 2048,
        rows: Rule | None = None,
    ) -> None:
        options: dict[str, Any] = {"layout": layout, "watch": self._watch, "idle": self._idle, "rows": rows}
        self._sampled = SampledCapture(model, sites, self, **options)
        self._sampled.most = most
        super().__init__(model, self._sampled)
        self.take = take
        self._passes: list[SampledPass] = []
        self._number, self._start = 0, 0.0

    def __enter__(self) -> SampledRows:
        before = torch.compiler.disable(self._begin)
        self._handles.append(self.model.register_forward_pre_hook(before))
        self._capture.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.drop()
        super().__exit__(*error)

    def begin(self, step: int) -> None:
        """Record every pass from now on; which rows are taken depends on the step and the number of the pass."""
        self._passes, self._number, self.active = [], 0, True
        self._start = step * _GOLDEN % 1.0

    def end(self) -> None:
        """Stop recording and pass on what was learned from."""
        passes = self._passes
        self.drop()
        for seen in passes:
            if seen.learned_from:
                self.take(seen)

    def drop(self) -> None:
        """Stop recording and forget the passes."""
        self._passes, self.active = [], False

    # hooks

    def _begin(self, *_: Any) -> None:
        if self._idle():
            return
        # micro-batches are handed on one by one; those that still wait for gradients stay until the step ends
        for seen in [seen for seen in self._passes if seen.complete and seen.learned_from]:
            self._passes.remove(seen)
            self.take(seen)
        self._passes.append(SampledPass())
        self._sampled.turn = (self._start + self._number * _GOLDEN**2) % 1.0
        self._number += 1

    def rows(self, rows: Rows) -> None:
        if self._passes and rows.x.ndim == 2:
            assert isinstance(rows.index, SampledIndex)
            self._passes[-1].rows[rows.site] = rows.x
            self._passes[-1].valid[rows.site] = rows.index.valid

    def scores(self, scores: Scores) -> None: ...

    def _watch(self, site: Site, activation: Tensor, rows_of: Callable[[Tensor], Tensor]) -> None:
        refuse_graphless(site)
        if not self._passes or not activation.requires_grad:
            return
        seen = self._passes[-1]
        seen.awaited.add(site)

        def arrived(g: Tensor) -> None:
            found, earlier = rows_of(g), seen.gradients.get(site)  # several losses may come back one after the other
            seen.gradients[site] = found if earlier is None else earlier + found

        activation.register_hook(arrived)
