"""Embedding tables and weights: their gradients and updates in proxies of what they hold or read, as records.

Rows of a table belong to types, each a context of its own, so that intervals resample types.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anisoscope.capture.gradient_pass import joined
from anisoscope.capture.sites.site import Site
from anisoscope.metrics.frequency import bin_of
from anisoscope.numerics.hashing import FOLDS, even_folds, half_of
from anisoscope.results.quantity import jackknife
from anisoscope.stats.moments import FoldCovariance, GradientMoments
from anisoscope.tangent.energy import (
    Asked,
    EnergyRows,
    Grouping,
    Record,
    SubspaceTest,
    alignment_numbers,
    alignment_records,
    control_records,
    energy_records,
    placed,
    record,
    records_of,
)
from anisoscope.tangent.plan import TangentPlan
from anisoscope.tangent.proxy import (
    Half,
    Label,
    Proxy,
    StepRows,
    fit_controls,
    fit_proxies,
    fit_standardised,
    fit_with_controls,
)
from anisoscope.tangent.refit import FitRows, Fitted, refits_of, standardised_set, with_refits
from anisoscope.tangent.ties import Planes, opened, swings_of
from anisoscope.tangent.together import Targets, on_host

_TYPES = 1 << 15  # rows of a table that are looked at together: copies of all those of a large vocabulary take GBs


def input_role(embedded: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The gradient of the table as input embedding, by scatter-add of the gradients of its outputs.

    The types that were read [m], ascending, and their rows [m, d]; those of all others are 0.
    """
    here, width = embedded[0][1].device, embedded[0][1].shape[-1]
    types, place = torch.cat([ids.to(here) for ids, _ in embedded]).unique(return_inverse=True)
    out = torch.zeros(len(types), width, dtype=torch.float64, device=here)
    for at, (_, grads) in zip(place.split([len(ids) for ids, _ in embedded]), embedded, strict=True):
        out.index_add_(0, at, grads.to(here, torch.float64))
    return types, out


def table_records(
    rows: Tensor, types: Tensor, proxies: Mapping[Label, Proxy], *, of: str, bins: Tensor | None, draws: int, seed: int
) -> Iterator[Record]:
    """Tests of gradients or updates of rows [m, d] of an embedding table that belong to these types, by frequency.

    Proxies in standardised coordinates are those of updates: a row of the table moves as the rows of the stream do, so
    its update is divided by their standard deviations; a gradient would be multiplied.
    """
    if not len(rows) or not bool(rows.any()):
        return
    groupings = []
    if bins is not None:
        names = [f"frequency:{b + 1}" for b in range(int(bins.max()) + 1)]
        groupings.append(Grouping(names, bin_of(types, bins)))
    rows = rows.float() if rows.dtype != torch.float64 else rows
    tests, asked = [], []
    for space in dict.fromkeys(label.coordinates for label in proxies):
        mine = {label: proxy for label, proxy in proxies.items() if label.coordinates == space}
        scale = next(iter(mine.values())).scale  # one for all proxies
        half = Half.plain(rows if scale is None else scale.to(rows.device).rows(rows), types)
        tests.append(SubspaceTest(_moments_of(half), EnergyRows(half, groupings), draws=draws, seed=seed))
        asked.append(
            [
                Asked(proxy.basis, replace(label, of=of), not label.control, int(not label.control), proxy.left_out)
                for label, proxy in mine.items()
            ]
        )
    for found in records_of(tests, asked):
        yield from found


def _moments_of(half: Half) -> GradientMoments:
    """The second moments of rows of a table, some at a time: every type is a context of its own, so that these add."""
    found, parts = GradientMoments(), (half.x, half.context, half.fold)
    for x, context, fold in zip(*(part.split(_TYPES) for part in parts), strict=True):
        found.update(x, context=context, fold=fold)
    return found


@dataclass(frozen=True)
class TypeFit:
    """Proxies of the embedding site fitted on rows of half of the types, for updates of the other half."""

    proxies: dict[Label, Proxy]
    spread: FoldCovariance  # of the rows fitted on, by folds of types

    @classmethod
    def of(cls, fit: Half, labels: Sequence[Label], *, site: Site, seed: int, standardised: bool) -> TypeFit | None:
        """Proxies with their controls, also in standardised coordinates; None if rows or types are too few."""
        # a masked row shows [MASK] or noise, not the type it stands for
        fitted = (fit.token >= 0) & (half_of(fit.token) == 0) & (fit.masked != 1)
        mine = fit.few(len(fit))  # an order that batches and processes do not change, on which permuted controls depend
        mine = mine[fitted[mine]]
        rows, types = fit.x[mine.to(fit.x.device)], fit.token[mine]
        if len(rows) <= 2 * labels[0].rank or len(types.unique()) < 2:
            return None
        fits = {site: FitRows.of_rows(rows, even_folds(types))}
        found: dict[Label, dict[Site, Proxy]] = {}
        for label in labels:
            found |= fit_with_controls({site: rows}, label, seed=seed, covariances={site: fits[site].covariance})
        sets: list[Fitted] = [(fits, found)]
        if standardised:
            scaled = [replace(label, coordinates="standardised") for label in labels]
            others = fit_standardised({site: rows}, scaled, seed=seed, covariances={site: fits[site].covariance})
            sets.append(standardised_set(fits, others))
        found = {label: proxies for mine in refits_of(sets, seed=seed) for label, proxies in mine.items()}
        return cls({how: proxies[site] for how, proxies in found.items() if site in proxies}, fits[site].spread)

    def records(self, change: Tensor, types: Tensor, *, of: str, **sizes: Any) -> Iterator[Record]:
        """Energies of updates [m, d] of types that were not fitted on, and their alignment, which needs no rank."""
        unseen = (half_of(types) == 1).nonzero().squeeze(1)
        rows, types = change[unseen.to(change.device)], types[unseen]
        if not len(rows) or not bool(rows.any()):
            return
        yield from table_records(rows, types, self.proxies, of=of, **sizes)
        moments = _moments_of(Half.plain(rows, types))
        (numbers,) = on_host([alignment_numbers(self.spread, moments, moved=True)])
        yield from alignment_records(numbers, moments, of=of)


def weight_records(
    gradients: Mapping[Site, Tensor],
    readers: Mapping[Site, Sequence[str]],
    rows: StepRows,
    *,
    plan: TangentPlan,
    rank: int,
    seed: int,
) -> Iterator[Record]:
    """Energy of weight gradients in proxies of the inputs of the linears that read each site, with controls.

    W [out, d] reads x, so dL/dW = Σ δ xᵀ has its rows in the span of the inputs; leaving out a fold is a subtraction.
    """
    fits = {site: rows.fit_half(site) for site in readers if site in rows.fit}
    used = {site: FitRows.of(fit, plan.fit_rows) for site, fit in fits.items()}
    inputs = {site: mine.x for site, mine in used.items()}
    seen = torch.cat([part.index.context.cpu() for parts in rows.test.values() for part, _ in parts]).unique()
    for proxy in plan.proxies[:2]:
        label = Label(proxy, rank, of="weight")
        found = with_refits(used, {label: fit_proxies(inputs, label, seed=seed)}, seed=seed)[label]
        controls = fit_controls(inputs, label, found, seed=seed) if proxy == plan.proxies[0] else {}
        for site, mine in found.items():
            folds = gradients.get(site)
            if folds is None or not bool(folds.any()):
                continue
            Q, folds = mine.basis.to(folds.device), folds.double()
            note = f"{len(readers[site])} weights: {', '.join(n.removesuffix('.weight') for n in readers[site])}"
            sizes = {"n": folds.shape[1], "contexts": len(seen), "note": note}
            columns = _energy_columns(folds, Q, mine.left_out) | sizes
            records = list(energy_records(columns, Q, label))
            total = folds.sum(0)
            drawn = Targets([[total.T @ total]], draws=plan.draws, seed=seed)
            (numbers,) = on_host(drawn.of(0, [(Q[None], torch.tensor([columns["value"]]).to(Q))], shares=True))
            bands, count = numbers["bands 0"][0].tolist(), float(numbers["reached 0"][0])
            records += control_records(bands, count, label, columns, draws=plan.draws)
            for control, others in controls.items():
                value = {"value": _energy(total, others[site].basis.to(folds.device))}
                records.append(record("gradient_energy", value | sizes, control))
            yield from placed(site, rows.step, records)


def weight_gradients(model: nn.Module, readers: Mapping[Site, Sequence[str]], rows: StepRows) -> dict[Site, Tensor]:
    """By site the gradients [FOLDS, out, d] of all weights that read it, on the test contexts of each fold."""
    found = {site: _fold_gradients(model, names, rows) for site, names in readers.items()}
    return {site: folds for site, folds in found.items() if folds is not None}


def _fold_gradients(model: nn.Module, names: Sequence[str], rows: StepRows) -> Tensor | None:
    """[FOLDS, out, d]: gradients of the test contexts of each fold for all weights that read one site, or None."""
    found: dict[int, Tensor] = {}
    for fold, gradients in rows.weights.items():
        part = joined(model, names, gradients)
        if part is not None:
            found[fold] = part
    if not found:
        return None
    like = next(iter(found.values()))
    return torch.stack([found.get(f, torch.zeros_like(like)) for f in range(FOLDS)])


def _energy_columns(folds: Tensor, Q: Tensor, left_out: Tensor | None) -> Record:
    """The energy with its jackknife interval over the folds that have a gradient, the proxy refitted without each."""
    total = folds.sum(0)
    used = [f for f in range(FOLDS) if bool(folds[f].any())]
    value, refits = _energy(total, Q), [Q] * FOLDS if left_out is None else left_out.to(Q)
    rest = {f: _energy(total - folds[f], refits[f]) for f in used} if len(used) > 1 else {}
    replicates = [rest.get(f, math.nan) for f in range(FOLDS)] if rest else []
    if rest and left_out is not None:
        planes = Planes.of(Q[None], left_out.to(Q)[None])
        u, v = (total @ planes.directions[0]).chunk(2, -1)
        products = torch.stack([u.square().sum(0), v.square().sum(0), (u * v).sum(0)]) / total.square().sum()
        (found,) = on_host([{"products": products, "errors": planes.errors[0], "turns": planes.turns[0]}])
        how = {"errors": found["errors"], "turns": found["turns"]}
        replicates = opened(np.array(replicates), swings=swings_of(*found["products"]), **how).tolist()
    low, high = jackknife(value, replicates, bounds=(0.0, 1.0))
    return {"value": value, "low": low, "high": high, "replicates": replicates}


def _energy(G: Tensor, Q: Tensor) -> float:
    """‖GQ‖² / ‖G‖² from G itself, which is cheaper than its second moment."""
    return float((G @ Q).square().sum() / G.square().sum())
