"""The input embedding table between measured steps: its updates, and the weight decay in them.

Of a table that is sharded over processes (a DTensor), each looks at the rows that it holds; they are joined with those
of the others where a step is analysed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.capture.graph_hook import GraphHook
from anisoscope.metrics.frequency import TemporalSpread
from anisoscope.models.forward import unwrapped
from anisoscope.models.parallel import flattened

SNAPSHOTS = 16  # of the table over a training


def weight_of(model: nn.Module, reader: str) -> Any:
    """The weight of the module that a method of the model returns, or None."""
    try:
        return getattr(getattr(unwrapped(model), reader)(), "weight", None)
    except (AttributeError, NotImplementedError):
        return None


def held_rows(table: Any) -> tuple[Tensor, int] | None:
    """The rows of a table that this process holds, and the number of the first; None if it holds parts of rows."""
    if not hasattr(table, "to_local"):
        return table, 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = table.device_mesh, table.placements
    if any(not placement.is_replicate() and not placement.is_shard(0) for placement in placements):
        return None
    _, (start, *_) = compute_local_shape_and_global_offset(table.shape, mesh, placements)
    return table.to_local(), int(start)


def bare_optimizer(optimizer: Any) -> torch.optim.Optimizer | None:
    """The torch optimizer inside a framework's wrappers; step hooks of the wrappers would never be called."""
    while (inner := getattr(optimizer, "optimizer", None)) is not None and inner is not optimizer:
        optimizer = inner
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else None


@dataclass
class EmbeddingWatch:
    """Tracks the input embedding table between measured steps.

    Decoupled weight decay (AdamW) shrinks every row by lr·λ at every update, independently of the gradients; optimizer
    hooks accumulate it, so that it can be subtracted from the update.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    outer: nn.Module | None = None  # the wrapper of the model that the training loop calls, if any
    step: int | None = None
    before: Tensor | None = None  # the table at the last measured step
    decay: Tensor | None = None  # accumulated weight decay since then
    seen: Tensor | None = None  # [V] bool: types read since the interval began
    closed: Tensor | None = None  # `seen` of the interval that just ended
    paused: bool = False  # true while a probe runs, whose reads do not count
    shield: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda act: act  # keeps errors from the training
    unknown: bool = False  # whether the table has no rows between passes, which processes hold in pieces
    _shrunk: Tensor | None = None  # weight decay of the current update
    _handles: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.unknown = flattened(self.model)

    @property
    def table(self) -> Tensor | None:
        """The weight [V, d] of the input embedding, None if the model has none."""
        weight = weight_of(self.model, "get_input_embeddings")
        if self.unknown:
            return None
        return weight if isinstance(weight, Tensor) and weight.dim() == 2 and held_rows(weight) is not None else None

    @property
    def sharded(self) -> bool:
        """Whether other processes hold some of the rows."""
        return (held := self.held) is not None and self.table is not None and len(held[0]) < len(self.table)

    @property
    def held(self) -> tuple[Tensor, int] | None:
        """The rows that this process holds, all of them in most trainings, and the number of the first."""
        return None if self.table is None else held_rows(self.table.detach())

    @property
    def group(self) -> dict[str, Any] | None:
        """The optimizer's group of the table if its weight decay is decoupled; not cached, as loading replaces it."""
        table = self.table
        if self.optimizer is None or table is None:
            return None
        for group in self.optimizer.param_groups:
            mine = any(p is table for p in group["params"])
            if mine and (type(self.optimizer).__name__ == "AdamW" or group.get("decoupled_weight_decay")):
                return group
        return None

    def attach(self) -> None:
        """Add the hooks that record which types are read and how much weight decay is applied."""
        table = self.table
        if table is None:
            return
        self.seen = torch.zeros(len(table), dtype=torch.bool, device=table.device) if self.seen is None else self.seen
        outer = self.outer if self.outer is not None else self.model

        def read(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ids = kwargs.get("input_ids", args[0] if args else None)
            training = not self.paused and torch.is_grad_enabled()
            if training and self.seen is not None and isinstance(ids, Tensor) and not ids.is_floating_point():
                self.seen.index_fill_(0, ids.flatten(), True)  # an assignment would copy True and wait for the device

        reading = GraphHook(outer, self.shield(read), before=True)
        self._handles.append(outer.register_forward_pre_hook(reading, with_kwargs=True))
        if self.group is not None and self.optimizer is not None:
            # two hooks: with optimizer.step(closure) forward, backward and measurement run between them
            self._handles.append(self.optimizer.register_step_pre_hook(self.shield(self._shrink)))
            self._handles.append(self.optimizer.register_step_post_hook(self.shield(self._decay)))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @torch.no_grad()
    def _shrink(self, *_: Any) -> None:
        self._shrunk, held, group = None, self.held, self.group
        if held is not None and group is not None and not self.paused:
            # rounded as the optimizer rounds it, so that a row without a gradient has an update of exactly 0
            decayed = held[0] * (1 - float(group["lr"]) * float(group["weight_decay"]))
            self._shrunk = decayed.double() - held[0].double()

    def _decay(self, *_: Any) -> None:
        decay, self._shrunk = self._shrunk, None
        untouched = self.table is None or self.table.grad is None  # the optimizer skips parameters without a gradient
        if decay is not None and self.before is not None and not untouched:
            self.decay = decay if self.decay is None else self.decay.add_(decay)

    def updates(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(name, types, rows of ΔW) since the last measured step: raw, and without weight decay where that is known."""
        table, held = self.table, self.held
        if table is None or held is None or self.before is None or self.closed is None:
            return
        rows, start = held
        if rows.shape != self.before.shape or len(table) != len(self.closed):  # the vocabulary was changed
            return
        change = rows.double() - self.before
        # of a sharded table other processes read types that this one holds: all of them are given
        mine = torch.arange(len(rows)) if self.sharded else self.closed.nonzero().squeeze(1).cpu()
        if not len(mine):
            return
        there = mine.to(change.device)
        if self.group is not None:
            free = change if self.decay is None else change - self.decay.double()
            yield "update", start + mine, free[there]
        yield "update_raw", start + mine, change[there]

    def close(self) -> None:
        """End the interval before the batch of this step is read; later reads belong to the next interval."""
        table = self.table
        if self.seen is not None and table is not None:
            self.closed = self.seen.clone()
            self.seen = torch.zeros(len(table), dtype=torch.bool, device=table.device)

    def remember(self, step: int) -> None:
        """Begin a new interval with the current table."""
        if (held := self.held) is not None:
            self.step, self.before, self.decay = step, held[0].double().clone(), None

    def snapshot(self, step: int, total: int, into: TemporalSpread) -> None:
        """Add the rows held here to their spread over time, at evenly spaced steps of a training."""
        if (held := self.held) is not None and step % max(1, total // SNAPSHOTS) == 0:
            into.update(held[0])

    def state(self) -> dict[str, Tensor]:
        """The state for saving; later reads and updates do not change it."""
        found = {"before": self.before, "decay": self.decay, "seen": self.seen}
        return {name: v if name == "before" else v.clone() for name, v in found.items() if v is not None}

    def load(self, state: Mapping[str, Tensor], step: int | None) -> None:
        table, self.step = self.table, step
        for name, value in state.items():
            setattr(self, name, value if table is None else value.to(table.device))
