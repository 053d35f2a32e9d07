"""Weight gradients: rows of dL/dW of the linears that read the stream, against a proxy of what they read.

Notation: W out×d reads x, so dL/dW = Σ δ xᵀ has its rows in the span of the inputs; folds add up, so that leaving
one out is a subtraction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from anisoscope.capture.readers import joined
from anisoscope.capture.sites import Site
from anisoscope.metrics.estimate import jackknife
from anisoscope.metrics.tangent import Draws, next_components
from anisoscope.numerics.hashing import FOLDS
from anisoscope.runs.energies import Record, control_records, placed, record, scaled
from anisoscope.runs.proxies import Label, fit_proxies, rows_to_fit
from anisoscope.runs.steprows import Half, StepRows


def fold_gradients(model: nn.Module, names: Sequence[str], rows: StepRows) -> Tensor | None:
    """[FOLDS, out, d]: the gradient of the test contexts of each fold, of all weights that read one site."""
    found: dict[int, Tensor] = {}
    for fold, gradients in rows.weights:
        part = joined(model, names, gradients)
        if part is not None:
            found[fold] = found[fold] + part if fold in found else part
    if not found:
        return None
    like = next(iter(found.values()))
    return torch.stack([found.get(f, torch.zeros_like(like)) for f in range(FOLDS)])


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
    """Energy of the weight gradients of each reader site, with controls."""
    inputs = {site: rows_to_fit(fits[site], most=most) for site in readers if site in fits}
    seen = torch.cat([part.index.context.cpu() for parts in rows.test.values() for part, _ in parts]).unique()
    gradients = {site: fold_gradients(model, readers[site], rows) for site in inputs}
    for proxy in proxies:
        label = Label(proxy, rank, of="weight")
        shuffled = fit_proxies(inputs, replace(label, control="permuted"), seed=seed) if proxy == proxies[0] else {}
        for site, found in fit_proxies(inputs, label, seed=seed).items():
            folds = gradients[site]
            if folds is None or not bool(folds.any()):
                continue
            Q = found.basis.to(folds.device)
            words = f"{len(readers[site])} weights: {', '.join(n.removesuffix('.weight') for n in readers[site])}"
            columns = {"n": folds.shape[1], "contexts": len(seen), "note": words}
            mine = list(_records(folds.double(), Q, label, columns, draws=draws, seed=seed))
            if site in shuffled:
                beyond = next_components(torch.cov(inputs[site].double().T), Q.to(inputs[site].device))
                others = {"permuted": shuffled[site].basis, "next": beyond}
                for control, basis in others.items():
                    value = {"value": _energy(folds.double().sum(0), basis.to(folds.device))}
                    mine.append(record("gradient_energy", value | columns, replace(label, control=control)))
            yield from placed(site, rows.step, mine)


def _records(folds: Tensor, Q: Tensor, label: Label, sizes: Record, *, draws: int, seed: int) -> Iterator[Record]:
    total = folds.sum(0)
    used = [f for f in range(FOLDS) if bool(folds[f].any())]
    d, r = Q.shape
    value = _energy(total, Q)
    rest = {f: _energy(total - folds[f], Q) for f in used} if len(used) > 1 else {}
    low, high = jackknife(value, list(rest.values()), bounds=(0.0, 1.0))
    columns: Record = {"value": value, "low": low, "high": high, **sizes}
    columns["replicates"] = [rest.get(f, math.nan) for f in range(FOLDS)] if rest else []
    yield record("gradient_energy", columns, label)
    yield record("gradient_enrichment", scaled(columns, d / r), label)
    measured = Draws(d, r, draws=draws, seed=seed, device=str(Q.device)).of(total.T @ total)
    yield from control_records(measured, Q, label, columns)


def _energy(G: Tensor, Q: Tensor) -> float:
    return float((G @ Q).square().sum() / G.square().sum())
