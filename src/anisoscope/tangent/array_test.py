"""The tangent test on plain arrays: gradients, a subspace, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.engine.estimation import Estimate
from anisoscope.metrics.tangent import Draws, check_rank
from anisoscope.numerics.linalg import orthonormal_basis
from anisoscope.stats.gradient_moments import GradientMoments
from anisoscope.tangent.energy import (
    EnergyRows,
    Grouping,
    Record,
    Shares,
    control_records,
    proxy_records,
    share_records,
)
from anisoscope.tangent.proxy import Label
from anisoscope.tangent.step_rows import Half


@dataclass(frozen=True)
class TangentTest:
    """How much of some gradients lies in a subspace, against random subspaces of the same rank."""

    energy: Estimate  # ‖GQ‖²/‖G‖²
    energy_by_row: Estimate  # the mean of ‖gQ‖²/‖g‖²
    enrichment: Estimate  # energy / (r/d): 1 for isotropic gradients
    ratio: Estimate  # energy / mean energy of normal controls
    p: float  # against uniformly random subspaces
    share: Estimate  # of the spectral anisotropy
    isoscore_gain: Estimate
    normal: Estimate  # control energies: mean, 95 % band
    random: Estimate
    rank: int


def tangent_test(G: Any, directions: Any, *, contexts: Any = None, draws: int = 999, seed: int = 0) -> TangentTest:
    """Test gradients G (n×d) against the span of `directions` (k×d rows, need not be orthogonal).

    `contexts` are integer labels of the rows: rows of one context are dependent, so intervals leave whole contexts out.

    >>> Q = torch.eye(40, dtype=torch.float64)[:4]
    >>> inside = torch.randn(200, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) @ Q
    >>> found = tangent_test(inside, Q)
    >>> round(found.energy.value, 9), found.p
    (1.0, 0.001)
    """
    rows = _rows(G)
    Q = orthonormal_basis(torch.as_tensor(directions)).to(rows.device)
    if Q.shape[0] != rows.shape[1]:
        raise AnisoscopeError(f"gradients have width {rows.shape[1]}, the directions {Q.shape[0]}; expected the same.")
    rank = check_rank(Q.shape[1], width=rows.shape[1])
    half = _half(rows, contexts)
    label = Label("given", rank)
    moments = GradientMoments().update(half.x, context=half.context)
    found = list(proxy_records(EnergyRows(half, [Grouping([""], torch.zeros(len(half), dtype=torch.int64))]), Q, label))
    measured = Draws(rows.shape[1], rank, draws=draws, seed=seed, device=str(rows.device)).of(moments.total)
    found += control_records(measured, Q, label, found[0])
    found += share_records(Shares(moments), Q, label)
    return TangentTest(
        energy=_pick(found, "gradient_energy"),
        energy_by_row=_pick(found, "gradient_energy", "average=row"),
        enrichment=_pick(found, "gradient_enrichment"),
        ratio=_pick(found, "gradient_ratio"),
        p=_pick(found, "gradient_p").value,
        share=_pick(found, "gradient_share"),
        isoscore_gain=_pick(found, "gradient_isoscore_gain"),
        normal=_pick(found, "gradient_energy", "control=normal"),
        random=_pick(found, "gradient_energy", "control=random"),
        rank=rank,
    )


def _rows(G: Any) -> Tensor:
    rows = torch.as_tensor(G).detach()
    if rows.ndim != 2 or not len(rows):
        raise AnisoscopeError(f"gradients have shape {tuple(rows.shape)}; expected rows × width, at least one row.")
    rows = rows if rows.dtype in (torch.float32, torch.float64) else rows.float()
    if not bool(rows.any()) or not bool(rows.isfinite().all(1).any()):
        raise AnisoscopeError("the gradients are all zero or not finite, so they have no direction; check the loss.")
    return rows


def _half(rows: Tensor, contexts: Any) -> Half:
    number = torch.arange(len(rows)) if contexts is None else torch.as_tensor(contexts).long().cpu()
    if number.shape != (len(rows),):
        raise AnisoscopeError(f"contexts have shape {tuple(number.shape)} for {len(rows)} rows; expected one for each.")
    finite = rows.isfinite().all(1)
    rows, number = rows[finite], number[finite.cpu()]
    nothing = torch.full_like(number, -1)
    dropped = int((~finite).sum())
    return Half(rows, rows, number, torch.arange(len(rows)), nothing, nothing, nothing, dropped)


def _pick(records: list[Record], metric: str, extra: str = "") -> Estimate:
    words = ("control=", "average=")
    for row in records:
        plain = not any(word in row["variant"] for word in words)
        if row["metric"] == metric and (extra in row["variant"] if extra else plain):
            names = ("low", "high", "n", "contexts", "dropped", "note", "sd")
            return Estimate(row["value"], **{name: row[name] for name in names if name in row})
    raise LookupError(metric)
