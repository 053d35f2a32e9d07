"""The tangent test on parameters: gradients and updates of the embedding table, and gradients of weights.

Notation: W the table [V, d], T = Σ g over the occurrences of each type (the gradient of W as input embedding), ΔW the
change between measured steps. Rows are types; a proxy is never tested on the types it was fitted on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.capture.gradient_pass import joined
from anisoscope.capture.sites.site import Site
from anisoscope.metrics.frequency import bin_of
from anisoscope.metrics.tangent import Measured
from anisoscope.models.forward import unwrapped
from anisoscope.numerics.hashing import FOLDS, half_of
from anisoscope.results.quantity import jackknife
from anisoscope.stats.moments import GradientMoments
from anisoscope.tangent import energy
from anisoscope.tangent.energy import Grouping, Record
from anisoscope.tangent.proxy import Half, Label, Proxy, StepRows, fit_controls, fit_proxies, rows_to_fit


def input_role(embedded: list[tuple[Tensor, Tensor, Tensor]], size: int) -> Tensor:
    """T [V, d]: the gradient of the table as input embedding, by scatter-add of the gradients of its outputs."""
    width = embedded[0][1].shape[-1]
    out = torch.zeros(size, width, dtype=torch.float64, device=embedded[0][1].device)
    for ids, grads, _ in embedded:
        out.index_add_(0, ids, grads.double())
    return out


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
    _shrunk: Tensor | None = None  # weight decay of the current update
    _handles: list[Any] = field(default_factory=list)

    @property
    def table(self) -> Tensor | None:
        """The weight [V, d] of the input embedding, None if the model has none."""
        try:
            module = unwrapped(self.model).get_input_embeddings()  # type: ignore[operator]
        except (AttributeError, NotImplementedError):
            return None
        weight = getattr(module, "weight", None)
        return weight if isinstance(weight, Tensor) and weight.dim() == 2 else None

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
                self.seen[ids] = True

        self._handles.append(outer.register_forward_pre_hook(torch.compiler.disable(read), with_kwargs=True))
        if self.group is not None and self.optimizer is not None:
            # two hooks: with optimizer.step(closure) forward, backward and measurement run between them
            self._handles.append(self.optimizer.register_step_pre_hook(self._shrink))
            self._handles.append(self.optimizer.register_step_post_hook(self._decay))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @torch.no_grad()
    def _shrink(self, *_: Any) -> None:
        table, group = self.table, self.group
        if table is not None and group is not None and not self.paused:
            # rounded as the optimizer rounds it, so that a row without a gradient has an update of exactly 0
            decayed = table * (1 - float(group["lr"]) * float(group["weight_decay"]))
            self._shrunk = decayed.double() - table.double()

    def _decay(self, *_: Any) -> None:
        decay, self._shrunk = self._shrunk, None
        untouched = self.table is None or self.table.grad is None  # the optimizer skips parameters without a gradient
        if decay is not None and self.before is not None and not untouched:
            self.decay = decay if self.decay is None else self.decay.add_(decay)

    def updates(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(name, types, rows of ΔW) since the last measured step: raw, and without weight decay where that is known."""
        table = self.table
        if table is None or self.before is None or self.closed is None or not bool(self.closed.any()):
            return
        types = self.closed.nonzero().squeeze(1)
        change = table.detach().double() - self.before
        if self.group is not None:
            free = change if self.decay is None else change - self.decay.double()
            yield "update", types.cpu(), free[types]
        yield "update_raw", types.cpu(), change[types]

    def close(self) -> None:
        """End the interval before the batch of this step is read; later reads belong to the next interval."""
        if self.seen is not None:
            self.closed = self.seen.clone()
            self.seen.zero_()

    def remember(self, step: int) -> None:
        """Begin a new interval with the current table."""
        if self.table is not None:
            self.step, self.before, self.decay = step, self.table.detach().double().clone(), None

    def state(self) -> dict[str, Tensor]:
        found = {"before": self.before, "decay": self.decay, "seen": self.seen}
        return {name: value for name, value in found.items() if value is not None}

    def load(self, state: Mapping[str, Tensor], step: int | None) -> None:
        table, self.step = self.table, step
        for name in ("before", "decay", "seen"):
            if table is not None:
                setattr(self, name, state[name].to(table.device) if name in state else getattr(self, name))


@dataclass(frozen=True)
class TableStudy:
    """Tests gradients or updates of rows of an embedding table against proxies and their controls."""

    draws: int
    seed: int
    bins: Tensor | None

    def records(self, rows: Tensor, types: Tensor, proxies: Mapping[Label, Proxy], *, of: str) -> Iterator[Record]:
        """Energies by frequency bin and the controls, of rows [m, d] that belong to these types."""
        # each type is a context of its own, so that intervals resample types
        half = Half.plain(rows.float() if rows.dtype != torch.float64 else rows, types)
        if not len(half) or not bool(rows.any()):
            return
        moment, groupings = GradientMoments().update(rows, context=types), []
        if self.bins is not None:
            names = [f"frequency:{b + 1}" for b in range(int(self.bins.max()) + 1)]
            groupings.append(Grouping(names, bin_of(types, self.bins)))
        energies, shares = energy.EnergyRows(half, groupings), energy.Shares(moment)
        drawn: dict[int, Measured] = {}  # by rank: proxies of one rank share their controls
        for label, proxy in proxies.items():
            mine, Q = replace(label, of=of), proxy.basis.to(rows.device)
            found = list(energy.proxy_records(energies, Q, mine))
            yield from found
            if label.control:
                continue
            if Q.shape[1] not in drawn:
                draws = energy.draws_for(moment.total, Q.shape[1], draws=self.draws, seed=self.seed)
                drawn[Q.shape[1]] = draws.of(moment.total)
            columns = next(row for row in found if row["metric"] == "gradient_energy" and not row["group"])
            yield from energy.control_records(drawn[Q.shape[1]], Q, mine, columns)
            yield from energy.share_records(shares, Q, mine)


def unseen_types(size: int) -> Tensor:
    """A mask [V] of the types on which `fit_on_types` does not fit."""
    return half_of(torch.arange(size)) == 1


def fit_on_types(fit: Half, label: Label, *, site: Site, seed: int) -> dict[Label, Proxy]:
    """A proxy of the embedding site fitted on rows of half of the types, and its controls; {} if rows are too few."""
    # a masked row shows [MASK] or noise, not the type it stands for
    mine = (fit.token >= 0) & (half_of(fit.token) == 0) & (fit.masked != 1)
    rows = fit.x[mine.nonzero().squeeze(1).to(fit.x.device)]
    if len(rows) <= 2 * label.rank or len(fit.token[mine].unique()) < 2:
        return {}
    found = {label: fit_proxies({site: rows}, label, seed=seed)}
    found |= fit_controls({site: rows}, label, found[label], seed=seed)
    return {how: proxies[site] for how, proxies in found.items()}


def weight_records(
    model: nn.Module,
    readers: Mapping[Site, Sequence[str]],
    rows: StepRows,
    *,
    fits: Mapping[Site, Half],
    proxies: Sequence[str],
    rank: int,
    draws: int,
    most: int,
    seed: int,
) -> Iterator[Record]:
    """Energy of weight gradients in proxies of the inputs of the linears that read each site, with controls.

    W [out, d] reads x, so dL/dW = Σ δ xᵀ has its rows in the span of the inputs; leaving out a fold is a subtraction.
    """
    inputs = {site: rows_to_fit(fits[site], most=most) for site in readers if site in fits}
    seen = torch.cat([part.index.context.cpu() for parts in rows.test.values() for part, _ in parts]).unique()
    gradients = {site: _fold_gradients(model, readers[site], rows) for site in inputs}
    for proxy in proxies:
        label = Label(proxy, rank, of="weight")
        found = fit_proxies(inputs, label, seed=seed)
        controls = fit_controls(inputs, label, found, seed=seed) if proxy == proxies[0] else {}
        for site, mine in found.items():
            folds = gradients[site]
            if folds is None or not bool(folds.any()):
                continue
            Q, folds = mine.basis.to(folds.device), folds.double()
            note = f"{len(readers[site])} weights: {', '.join(n.removesuffix('.weight') for n in readers[site])}"
            sizes = {"n": folds.shape[1], "contexts": len(seen), "note": note}
            columns = _energy_columns(folds, Q) | sizes
            records = list(energy.energy_records(columns, Q, label))
            total = folds.sum(0)
            measured = energy.draws_for(total.T @ total, Q.shape[1], draws=draws, seed=seed).of(total.T @ total)
            records += energy.control_records(measured, Q, label, columns)
            for control, others in controls.items():
                value = {"value": _energy(total, others[site].basis.to(folds.device))}
                records.append(energy.record("gradient_energy", value | sizes, control))
            yield from energy.placed(site, rows.step, records)


def _fold_gradients(model: nn.Module, names: Sequence[str], rows: StepRows) -> Tensor | None:
    """[FOLDS, out, d]: gradients of the test contexts of each fold for all weights that read one site, or None."""
    found: dict[int, Tensor] = {}
    for fold, gradients in rows.weights:
        part = joined(model, names, gradients)
        if part is not None:
            found[fold] = found[fold] + part if fold in found else part
    if not found:
        return None
    like = next(iter(found.values()))
    return torch.stack([found.get(f, torch.zeros_like(like)) for f in range(FOLDS)])


def _energy_columns(folds: Tensor, Q: Tensor) -> Record:
    """The energy with its jackknife interval over the folds that have a gradient."""
    total = folds.sum(0)
    used = [f for f in range(FOLDS) if bool(folds[f].any())]
    value = _energy(total, Q)
    rest = {f: _energy(total - folds[f], Q) for f in used} if len(used) > 1 else {}
    low, high = jackknife(value, list(rest.values()), bounds=(0.0, 1.0))
    replicates = [rest.get(f, math.nan) for f in range(FOLDS)] if rest else []
    return {"value": value, "low": low, "high": high, "replicates": replicates}


def _energy(G: Tensor, Q: Tensor) -> float:
    """‖GQ‖² / ‖G‖² from G itself, which is cheaper than its second moment."""
    return float((G @ Q).square().sum() / G.square().sum())
