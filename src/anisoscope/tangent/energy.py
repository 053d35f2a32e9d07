"""Energies of subspaces with jackknife intervals, as records of the table for one site and one step.

Sums by (group, fold) of ‖gᵢQ‖² and ‖gᵢ‖² give every pooled energy, its mean over rows and their leave-one-fold-out
values; the proxy is not refitted, so intervals reflect the variation of test contexts only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anisoscope.capture.sites.site import Site
from anisoscope.errors import AnisoscopeError
from anisoscope.metrics import tangent
from anisoscope.metrics.engine.estimation import Estimate
from anisoscope.metrics.tangent import Draws, Measured
from anisoscope.numerics.hashing import FOLDS
from anisoscope.numerics.linalg import orthonormal_basis
from anisoscope.results.quantity import jackknife
from anisoscope.results.query import options_of, variant_name
from anisoscope.stats.moments import GradientMoments
from anisoscope.tangent.proxy import Half, Label

Record = dict[str, Any]
_ENDS = ("value", "low", "high")
FEW = 10  # rows per dimension below which a second moment is flagged


@dataclass(frozen=True)
class Grouping:
    """A partition of rows into groups: `names[label]` of each row; rows labelled −1 belong to none."""

    names: Sequence[str]
    label: Tensor  # [n] on the host

    def masks(self) -> dict[str, Tensor]:
        return {name: self.label == i for i, name in enumerate(self.names) if bool((self.label == i).any())}


class EnergyRows:
    """Energies of any subspace over the test rows of one site: of all rows, and of groups."""

    def __init__(self, half: Half, groupings: Sequence[Grouping] = ()) -> None:
        assert half.g is not None
        self.g, self.dropped, self.contexts = half.g, half.dropped, half.contexts
        groupings = [Grouping([""], torch.zeros(len(half), dtype=torch.int64)), *groupings]
        self.names = [name for grouping in groupings for name in grouping.names]
        self.norms = half.g.double().square().sum(1)
        fold, codes, offset = half.fold, [], 0
        nowhere = len(self.names) * FOLDS
        for grouping in groupings:
            codes.append(torch.where(grouping.label >= 0, (offset + grouping.label) * FOLDS + fold, nowhere))
            offset += len(grouping.names)
        self.codes = torch.stack(codes).to(half.g.device)  # [groupings, n]

    def of(self, Q: Tensor) -> Iterator[tuple[str, str, Record]]:
        """(group, average, columns of the energy) for every group that has rows."""
        inside = tangent.row_energies(self.g, Q.to(self.g.device))
        moving = self.norms > 0
        ratio = torch.where(moving, inside / self.norms.clamp_min(torch.finfo(torch.float64).tiny), 0.0)
        columns = torch.stack([inside, self.norms, ratio, moving.double(), torch.ones_like(inside)])
        total = columns.new_zeros(5, len(self.names) * FOLDS + 1)
        for code in self.codes:
            total.index_add_(1, code, columns)
        energy, norm, share, nonzero, n = total[:, :-1].unflatten(1, (-1, FOLDS)).cpu().numpy()  # each [groups, FOLDS]
        pooled, by_row = _ratios(energy, norm), _ratios(share, nonzero)
        for i, name in enumerate(self.names):
            if n[i].any():
                counts = {"n": int(n[i].sum()), "contexts": self.contexts, "dropped": self.dropped}
                yield name, "", pooled[i] | counts
                yield name, "row", by_row[i] | counts


def _ratios(top: np.ndarray, bottom: np.ndarray) -> list[Record]:
    """Σtop / Σbottom of every line [groups, FOLDS] with its jackknife over folds."""
    with np.errstate(divide="ignore", invalid="ignore"):
        value = top.sum(1) / bottom.sum(1)
        rest = (top.sum(1, keepdims=True) - top) / (bottom.sum(1, keepdims=True) - bottom)
    rest = np.where(bottom > 0, rest, np.nan)  # a fold without rows must not narrow an interval
    columns = []
    for one_value, replicates in zip(value.tolist(), rest.tolist(), strict=True):
        low, high = jackknife(one_value, replicates, bounds=(0.0, 1.0))
        columns.append({"value": one_value, "low": low, "high": high, "replicates": replicates})
    return columns


def bands(draws: Sequence[Tensor]) -> list[Record]:
    """Mean, 95 % band and standard deviation of several sets of control draws, with one transfer to the host."""
    values = torch.stack([mine.double() for mine in draws]).cpu()
    values = torch.where(values.isfinite().all(1, keepdim=True), values, torch.nan)
    low, high = torch.quantile(values, torch.tensor([0.025, 0.975], dtype=torch.float64), dim=1)
    columns = (values.mean(1), low, high, values.std(1))
    return [dict(zip(("value", "low", "high", "sd"), row, strict=True)) for row in torch.stack(columns, 1).tolist()]


def record(metric: str, columns: Record, label: Label, *, group: str = "", **more: Any) -> Record:
    """One row of the table."""
    return {"metric": metric, "group": group, "variant": _variant(label, tuple(more.items())), **columns}


@lru_cache(maxsize=4096)
def _variant(label: Label, more: tuple[tuple[str, Any], ...]) -> str:
    return variant_name(label.options(**dict(more)))


def energy_records(columns: Record, Q: Tensor, label: Label, **where: str) -> Iterator[Record]:
    """The energy of a subspace, and its enrichment where it is no control."""
    yield record("gradient_energy", columns, label, **where)
    if not label.control:
        rich: Record = {k: tangent.gradient_enrichment(columns[k], *Q.shape) for k in _ENDS if k in columns}
        if "replicates" in columns:
            rich["replicates"] = [tangent.gradient_enrichment(value, *Q.shape) for value in columns["replicates"]]
        yield record("gradient_enrichment", columns | rich, label, **where)


def proxy_records(rows: EnergyRows, Q: Tensor, label: Label, *, few: str = "") -> Iterator[Record]:
    """Energy and enrichment of one proxy in every group; means over rows except in frequency bins."""
    for group, average, columns in rows.of(Q):
        if not average or ":" not in group:
            note = few if columns["value"] == columns["value"] else "no gradient reaches these rows"
            yield from energy_records(columns | {"note": note}, Q, label, group=group, average=average)


def draws_for(M: Tensor, rank: int, *, draws: int, seed: int) -> Draws:
    """Random subspaces of a proxy's rank, on the device of the second moment M."""
    return Draws(len(M), rank, draws=draws, seed=seed, device=str(M.device))


def control_records(
    measured: Measured, Q: Tensor, label: Label, columns: Record, *, group: str = "", average: str = ""
) -> Iterator[Record]:
    """Records of random and normal controls of one proxy for one second moment, of the ratio and of p."""
    more = {"n": columns["n"], "contexts": columns["contexts"], "dropped": columns.get("dropped", 0)}
    where: dict[str, Any] = {"group": group, "average": average}
    controls = {"random": measured.random(shares=not average), "normal": measured.normal(Q, shares=not average)}
    drawn = {(name, metric): part for name, c in controls.items() for metric, part in c.by_metric().items()}
    summaries = dict(zip(drawn, bands(list(drawn.values())), strict=True))
    for (name, metric), columns_of in summaries.items():
        yield record(metric, columns_of | more, label, control=name, **where)
    value, edges = columns["value"], summaries["normal", "gradient_energy"]
    ends = {"value": edges["value"], "low": edges["high"], "high": edges["low"]}
    ratio = {end: tangent.gradient_ratio(value, level) for end, level in ends.items()}
    yield record("gradient_ratio", ratio | more, label, **where)
    p = tangent.gradient_p(value, controls["random"].energy.cpu())
    yield record("gradient_p", {"value": p} | more, label, **where)


class Shares:
    """The normalised second moments of a site: of all rows, leaving out each fold, and of groups."""

    def __init__(self, moments: GradientMoments, groups: Sequence[str] = ()) -> None:
        assert moments.folds is not None
        self.moments, whole = moments, moments.total
        every = torch.stack([whole, *moments.folds, *(moments.groups[g] for g in groups)])
        alive = (every.diagonal(dim1=-2, dim2=-1).sum(-1) > 0).tolist()
        self.used = [f for f in range(FOLDS) if alive[1 + f]]
        self.groups = [g for g, lives in zip(groups, alive[1 + FOLDS :], strict=True) if lives]
        rest = [whole - moments.folds[f] for f in self.used] if len(self.used) > 1 else []
        self.lines = 1 + len(rest)
        stacked = torch.stack([whole, *rest, *(moments.groups[g] for g in self.groups)])
        self.spread = tangent.Anisotropy(stacked / stacked.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None])


def share_records(shares: Shares, Q: Tensor, label: Label, *, groups: bool = False) -> Iterator[Record]:
    """Both anisotropy shares of one proxy (or fitted control) with jackknife intervals; of groups without."""
    moments, (d, r) = shares.moments, Q.shape
    share, level, gain = torch.stack(shares.spread.held(Q.to(shares.spread.C.device))).tolist()
    note = f"{'above' if level[0] >= 1 else 'below'} tr(C)/d; chance is about {r * (r + 1) / d**2:.3g}"
    few = few_rows(moments.n - moments.still, d)
    more = {"n": moments.n, "contexts": moments.contexts}
    both = {"gradient_share": (share, "; ".join(filter(None, (note, few)))), "gradient_isoscore_gain": (gain, few)}
    for metric, (values, text) in both.items():
        value, *rest = values[: shares.lines]
        low, high = jackknife(value, rest, bounds=(None, None))
        by_fold = dict(zip(shares.used, rest, strict=False))
        replicates = [by_fold.get(f, math.nan) for f in range(FOLDS)]
        columns = {"value": value, "low": low, "high": high, "replicates": replicates, "note": text}
        yield record(metric, columns | more, label)
    for place, group in enumerate(shares.groups if groups else (), shares.lines):
        counts = {"n": moments.counts[group], "contexts": moments.contexts}
        for metric, (values, _) in both.items():
            yield record(metric, {"value": values[place]} | counts, label, group=group)


def few_rows(n: int, d: int) -> str:
    return "" if n >= FEW * d else f"fewer than {FEW} d rows ({n} of {FEW * d})"


def moment_records(
    shares: Shares, Q: Tensor, label: Label, measured: Measured | None = None, *, note: str = ""
) -> Iterator[Record]:
    """Records of a subspace that was fitted at another step, from second moments alone.

    Energy and shares of a fitted control (`measured` is None); of a proxy also groups and the drawn controls.
    """
    moments = shares.moments
    assert moments.folds is not None and moments.unit is not None
    Q, more = Q.to(moments.folds.device), {"n": moments.n, "contexts": moments.contexts, "note": note}
    found: list[Record] = []
    if measured is None:
        value = {"value": float(tangent.gradient_energy(moments.total, Q))}
        yield record("gradient_energy", value | more, label)
    else:
        inside = ((moments.folds @ Q) * Q).sum((-2, -1)).cpu()
        whole = moments.folds.diagonal(dim1=-2, dim2=-1).sum(-1).cpu()
        columns = _ratios(inside[None].numpy(), whole[None].numpy())[0] | more
        yield from energy_records(columns, Q, label)
        mean, *parts = tangent.gradient_energy(torch.stack([moments.unit, *moments.groups.values()]), Q).tolist()
        yield record("gradient_energy", {"value": mean} | more, label, average="row")
        for group, part in zip(moments.groups, parts, strict=True):
            if part == part:  # NaN if no gradient reaches the group
                yield from energy_records(more | {"value": part, "n": moments.counts[group]}, Q, label, group=group)
        found += control_records(measured, Q, label, columns)
    for row in [*found, *share_records(shares, Q, label)]:
        yield {**row, "note": "; ".join(filter(None, (row.get("note", ""), note)))}


def placed(site: Site, step: int, records: Iterable[Record]) -> list[Record]:
    """Add the columns of the site and the step to records."""
    place = {"stack": site.stack, "layer": site.layer, "kind": site.name or site.kind, "step": step}
    return [{**place, **row} for row in records]


def holm_records(records: Iterable[Record]) -> list[Record]:
    """Holm-corrected p-values over the layers of one step, for each variant and group."""
    families: dict[tuple[str, str], list[Record]] = {}
    for row in records:
        if row["metric"] == "gradient_p":
            families.setdefault((row["variant"], row["group"]), []).append(row)
    return [
        {**row, "metric": "gradient_p_holm", "value": value, "note": f"Holm over {len(rows)} layers"}
        for rows in families.values()
        for row, value in zip(rows, tangent.gradient_p_holm([r["value"] for r in rows]), strict=True)
    ]


@dataclass(frozen=True)
class TangentTest:
    """Result of `tangent_test`: how much of the gradients lies in a subspace, against random ones of its rank."""

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


_FIELDS: dict[str, tuple[str, tuple[str, str] | None]] = {  # metric, and the variant key that tells its row apart
    "energy": ("gradient_energy", None),
    "energy_by_row": ("gradient_energy", ("average", "row")),
    "enrichment": ("gradient_enrichment", None),
    "ratio": ("gradient_ratio", None),
    "share": ("gradient_share", None),
    "isoscore_gain": ("gradient_isoscore_gain", None),
    "normal": ("gradient_energy", ("control", "normal")),
    "random": ("gradient_energy", ("control", "random")),
}


def tangent_test(G: Any, directions: Any, *, contexts: Any = None, draws: int = 999, seed: int = 0) -> TangentTest:
    """Test gradients G (n×d) against the span of `directions` (k×d rows, need not be orthogonal).

    `contexts` are integer labels of the rows: rows of one context are dependent, so intervals leave out whole contexts.

    >>> Q = torch.eye(40, dtype=torch.float64)[:4]
    >>> inside = torch.randn(200, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) @ Q
    >>> found = tangent_test(inside, Q)
    >>> round(found.energy.value, 9), found.p
    (1.0, 0.001)
    """
    rows = torch.as_tensor(G).detach()
    if rows.ndim != 2 or not len(rows):
        raise AnisoscopeError(f"gradients have shape {tuple(rows.shape)}; expected rows × width, at least one row.")
    rows = rows if rows.dtype in (torch.float32, torch.float64) else rows.float()
    finite = rows.isfinite().all(1)
    if not bool(rows.any()) or not bool(finite.any()):
        raise AnisoscopeError("the gradients are all zero or not finite, so they have no direction; check the loss.")
    Q = orthonormal_basis(torch.as_tensor(directions)).to(rows.device)
    if Q.shape[0] != rows.shape[1]:
        raise AnisoscopeError(f"gradients have width {rows.shape[1]}, the directions {Q.shape[0]}; expected the same.")
    rank = tangent.check_rank(Q.shape[1], width=rows.shape[1])
    number = torch.arange(len(rows)) if contexts is None else torch.as_tensor(contexts).long().cpu()
    if number.shape != (len(rows),):
        raise AnisoscopeError(f"contexts have shape {tuple(number.shape)} for {len(rows)} rows; expected one for each.")
    half = Half.plain(rows[finite], number[finite.cpu()], dropped=int((~finite).sum()))
    label = Label("given", rank)
    moments = GradientMoments().update(half.x, context=half.context)
    found = list(proxy_records(EnergyRows(half), Q, label))
    found += control_records(
        draws_for(moments.total, rank, draws=draws, seed=seed).of(moments.total), Q, label, found[0]
    )
    found += share_records(Shares(moments), Q, label)
    p = next(row["value"] for row in found if row["metric"] == "gradient_p")
    return TangentTest(**{name: _pick(found, *field) for name, field in _FIELDS.items()}, p=p, rank=rank)


def _pick(records: list[Record], metric: str, option: tuple[str, str] | None) -> Estimate:
    for row in records:
        options = options_of(row["variant"])
        matches = options.keys().isdisjoint({"control", "average"}) if option is None else option in options.items()
        if row["metric"] == metric and matches:
            names = ("low", "high", "n", "contexts", "dropped", "note", "sd")
            return Estimate(row["value"], **{name: row[name] for name in names if name in row})
    raise LookupError(metric)
