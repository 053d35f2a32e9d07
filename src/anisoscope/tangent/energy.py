"""Energies of subspaces with jackknife intervals, as records of the table for one site and one step.

Sums by (group, fold) of ‖gᵢQ‖² and ‖gᵢ‖² give every pooled energy, its mean over rows and their leave-one-fold-out
values. Leaving out fold j takes its contexts away from both halves: the rows tested, and those that the proxy was
fitted on, whose refit is `left_out[j]` (`tangent.refit`); where a tie of eigenvalues leaves directions open, intervals
contain what it does to the energy (`tangent.ties`). Without refits the directions stay as they are, and intervals
reflect the variation of test contexts only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anisoscope.capture.sites.site import Site
from anisoscope.errors import AnisoscopeError
from anisoscope.metrics import tangent
from anisoscope.metrics.engine.estimation import Estimate
from anisoscope.metrics.tangent import Draws, Measured
from anisoscope.numerics.factors import as_matrix
from anisoscope.numerics.hashing import FOLDS
from anisoscope.numerics.linalg import orthonormal_basis
from anisoscope.results.quantity import jackknife
from anisoscope.results.query import options_of, variant_name
from anisoscope.stats.moments import FoldCovariance, GradientMoments
from anisoscope.tangent.proxy import Half, Label
from anisoscope.tangent.ties import OpenPlanes, opened

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

    def of(self, Q: Tensor, left_out: Tensor | None = None) -> Iterator[tuple[str, str, Record]]:
        """(group, average, columns of the energy) for every group that has rows."""
        lines = [Q.to(self.g.device), *([] if left_out is None else left_out.to(self.g.device, Q.dtype))]
        inside = tangent.row_energies(self.g, torch.cat(lines, 1), blocks=len(lines))  # [lines, n]
        ties = None if left_out is None else OpenPlanes.of(lines[0], torch.stack(lines[1:]))
        if ties is not None and len(ties.turns):
            single = ties.directions
            inside = torch.cat([inside, tangent.row_energies(self.g, single, blocks=single.shape[1])])
        moving = self.norms > 0
        ratio = torch.where(moving, inside / self.norms.clamp_min(torch.finfo(torch.float64).tiny), 0.0)
        columns = torch.cat([torch.stack([self.norms, moving.double(), torch.ones_like(self.norms)]), inside, ratio])
        total = columns.new_zeros(len(columns), len(self.names) * FOLDS + 1)
        for code in self.codes:
            total.index_add_(1, code, columns)
        sums = total[:, :-1].unflatten(1, (-1, FOLDS)).cpu().numpy()  # [columns, groups, FOLDS]
        (norm, nonzero, n), energy, share = sums[:3], sums[3 : 3 + len(inside)], sums[3 + len(inside) :]
        pooled, by_row = _ratios(energy, norm, ties), _ratios(share, nonzero, ties)
        for i, name in enumerate(self.names):
            if n[i].any():
                counts = {"n": int(n[i].sum()), "contexts": self.contexts, "dropped": self.dropped}
                yield name, "", pooled[i] | counts
                yield name, "row", by_row[i] | counts


def _ratios(top: np.ndarray, bottom: np.ndarray, ties: OpenPlanes | None = None) -> list[Record]:
    """Σtop / Σbottom of every line [groups, FOLDS] with its jackknife over folds.

    The first of `top` is of the proxy; the others, if any, are those of its refits without each fold in turn, and of
    the directions that `ties` leave open.
    """
    whole, single = top[0], top[1 + FOLDS :]
    top = top[: 1 + FOLDS]
    one = np.stack([part[:, fold] for fold, part in enumerate(top[1:])], 1) if len(top) > 1 else whole
    every = top[1:].sum(2).T if len(top) > 1 else whole.sum(1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = whole.sum(1) / bottom.sum(1)
        rest = (every - one) / (bottom.sum(1, keepdims=True) - bottom)
        swings = np.zeros((0, len(value))) if ties is None else ties.swings(single.sum(2) / bottom.sum(1))
    rest = np.where(bottom > 0, rest, np.nan)  # a fold without rows must not narrow an interval
    columns = []
    for one_value, replicates, mine in zip(value.tolist(), rest.tolist(), swings.T, strict=True):
        if ties is not None:
            replicates = opened(replicates, swings=mine, turns=ties.turns)
        low, high = jackknife(one_value, replicates, bounds=(0.0, 1.0))
        columns.append({"value": one_value, "low": low, "high": high, "replicates": replicates})
    return columns


def _by_fold(folds: Tensor, directions: Tensor) -> Tensor:
    """tr QᵀMQ of each fold's second moment [folds], for a subspace [d, r] or one direction [d]."""
    Q = directions.reshape(len(directions), -1)
    return ((folds @ Q) * Q).sum((-2, -1))


def bands(draws: Sequence[Tensor]) -> list[Record]:
    """Mean, 95 % band and standard deviation of several sets of control draws, with one transfer to the host."""
    values = torch.stack([mine.double() for mine in draws]).cpu()
    values = torch.where(values.isfinite().all(1, keepdim=True), values, torch.nan)
    low, high = torch.quantile(values, torch.tensor([0.025, 0.975], dtype=torch.float64), dim=1)
    columns = (values.mean(1), low, high, values.std(1))
    return [dict(zip(("value", "low", "high", "sd"), row, strict=True)) for row in torch.stack(columns, 1).tolist()]


def record(metric: str, columns: Record, label: Label, *, group: str = "", **more: Any) -> Record:
    """One row of the table."""
    return {"metric": metric, "group": group, "variant": variant_name(label.options(**more)), **columns}


def energy_records(columns: Record, Q: Tensor, label: Label, **where: str) -> Iterator[Record]:
    """The energy of a subspace, and its enrichment where it is no control."""
    yield record("gradient_energy", columns, label, **where)
    if not label.control:
        rich: Record = {k: tangent.gradient_enrichment(columns[k], *Q.shape) for k in _ENDS if k in columns}
        if "replicates" in columns:
            rich["replicates"] = [tangent.gradient_enrichment(value, *Q.shape) for value in columns["replicates"]]
        yield record("gradient_enrichment", columns | rich, label, **where)


def draws_for(M: Tensor, rank: int, *, draws: int, seed: int) -> Draws:
    """Random subspaces of a proxy's rank, on the device of the second moment M."""
    return Draws(len(M), rank, draws=draws, seed=seed, device=str(M.device))


def control_records(
    measured: Measured,
    Q: Tensor,
    label: Label,
    columns: Record,
    *,
    group: str = "",
    average: str = "",
    shares: bool = True,
) -> Iterator[Record]:
    """Records of random and normal controls of one proxy for one second moment, of the ratio and of p."""
    shares &= not average
    more = {"n": columns["n"], "contexts": columns["contexts"], "dropped": columns.get("dropped", 0)}
    where: dict[str, Any] = {"group": group, "average": average}
    controls = {"random": measured.random(shares=shares), "normal": measured.normal(Q, shares=shares)}
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


def few_rows(n: int, d: int) -> str:
    return "" if n >= FEW * d else f"fewer than {FEW} d rows ({n} of {FEW * d})"


class SubspaceTest:
    """Tests subspaces on the gradients of one site: their energies, anisotropy shares and drawn controls.

    Energies come from `rows`, or from the second moments alone where the rows are of an earlier step. `groups` get
    shares and controls of their own, and so do unit-norm rows; None: all rows alone. `note` is that of energies.
    """

    def __init__(
        self,
        moments: GradientMoments,
        rows: EnergyRows | None = None,
        *,
        draws: int,
        seed: int,
        groups: Sequence[str] | None = None,
        note: str = "",
    ) -> None:
        assert moments.folds is not None
        self.moments, self.rows, self.note, whole = moments, rows, note, moments.total
        self.sizes = {"n": moments.n, "contexts": moments.contexts}
        self._draws: dict[str, int] = {"draws": draws, "seed": seed}
        self._drawn: dict[tuple[int, str, str], Measured] = {}  # by rank and target: subspaces of one rank share it
        every = torch.stack([whole, *moments.folds, *(moments.groups[g] for g in groups or ())])
        alive = (every.diagonal(dim1=-2, dim2=-1).sum(-1) > 0).tolist()
        self.used = [f for f in range(FOLDS) if alive[1 + f]]
        self.groups = [g for g, lives in zip(groups or (), alive[1 + FOLDS :], strict=True) if lives]
        self.targets = [("", "", whole)] if alive[0] or rows is None else []  # second moments that get controls
        if groups is not None and alive[0]:
            self.targets += [("", "row", moments.unit), *((g, "", moments.groups[g]) for g in self.groups)]
        self.lines = 1 + (len(self.used) if len(self.used) > 1 else 0)

    @cached_property
    def spread(self) -> tangent.Anisotropy:
        """The anisotropy of all rows, without each fold in turn, and of groups."""
        moments, whole = self.moments, self.moments.total
        rest = [whole - moments.folds[f] for f in self.used] if self.lines > 1 else []
        stacked = torch.stack([whole, *rest, *(moments.groups[g] for g in self.groups)])
        return tangent.Anisotropy(stacked / stacked.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None])

    def records(
        self, Q: Tensor, label: Label, *, shares: bool, controls: int = 0, left_out: Tensor | None = None
    ) -> Iterator[Record]:
        """Energy and enrichment in every group; where asked, shares, and drawn controls of so many of the targets.

        A fitted control has no enrichment, and no shares of groups. `left_out` are the refits of the subspace.
        """
        Q = Q.to(self.moments.folds.device)
        left_out = None if left_out is None else left_out.to(Q)
        energies = {(group, average): columns for group, average, columns in self._energies(Q, label, left_out)}
        for (group, average), columns in energies.items():
            if average and self.rows is None:
                yield record("gradient_energy", columns, label, average=average)
            else:
                yield from energy_records(columns, Q, label, group=group, average=average)
        for group, average, M in self.targets[:controls]:
            measured = self._measured(M, (Q.shape[1], group, average))
            where: dict[str, Any] = {"group": group, "average": average, "shares": shares}
            yield from control_records(measured, Q, label, energies[group, average], **where)
        if shares:
            yield from self._shares(Q, label, left_out)
        if left_out is not None and not label.control:
            yield record("proxy_stability", {"value": tangent.proxy_stability(Q, left_out)} | self.sizes, label)

    def _energies(self, Q: Tensor, label: Label, left_out: Tensor | None) -> Iterator[tuple[str, str, Record]]:
        """(group, average, columns); means over rows except in frequency bins."""
        moments = self.moments
        if self.rows is not None:
            for group, average, columns in self.rows.of(Q, left_out):
                if not average or ":" not in group:
                    note = self.note if columns["value"] == columns["value"] else "no gradient reaches these rows"
                    yield group, average, columns | {"note": note}
        elif label.control and left_out is None:
            yield "", "", {"value": float(tangent.gradient_energy(moments.total, Q))} | self.sizes
        else:
            whole = moments.folds.diagonal(dim1=-2, dim2=-1).sum(-1).cpu()
            ties = None if left_out is None else OpenPlanes.of(Q, left_out)
            lines = [Q, *(() if left_out is None else left_out), *(() if ties is None else ties.directions.T)]
            inside = torch.stack([_by_fold(moments.folds, one) for one in lines]).cpu()
            yield "", "", _ratios(inside[:, None].numpy(), whole[None].numpy(), ties)[0] | self.sizes
            if label.control:
                return
            others = {("", "row"): moments.unit} if moments.unit is not None else {}  # not in other coordinates
            others |= {(group, ""): M for group, M in moments.groups.items() if group not in moments.parts}
            parts = tangent.gradient_energy(torch.stack([*others.values()]), Q).tolist() if others else []
            for (group, average), part in zip(others, parts, strict=True):
                if average or part == part:  # NaN if no gradient reaches the group
                    n = moments.counts[group] if group else moments.n
                    yield group, average, self.sizes | {"value": part, "n": n}

    def _measured(self, M: Tensor, key: tuple[int, str, str]) -> Measured:
        if key not in self._drawn:
            alike = next((found.draws for (rank, *_), found in self._drawn.items() if rank == key[0]), None)
            self._drawn[key] = (alike or draws_for(M, key[0], **self._draws)).of(M)
        return self._drawn[key]

    def _shares(self, Q: Tensor, label: Label, left_out: Tensor | None) -> Iterator[Record]:
        """Both anisotropy shares with jackknife intervals; of groups without."""
        moments, (d, r) = self.moments, Q.shape
        lines = Q
        if left_out is not None:
            refits = [left_out[fold] for fold in self.used] if self.lines > 1 else []
            lines = torch.stack([Q, *refits, *[Q] * len(self.groups)])
        share, level, gain = torch.stack(self.spread.held(lines)).tolist()
        note = f"{'above' if level[0] >= 1 else 'below'} tr(C)/d; chance is about {r * (r + 1) / d**2:.3g}"
        few = few_rows(moments.n - moments.still, d)
        both = {"gradient_share": (share, "; ".join(filter(None, (note, few)))), "gradient_isoscore_gain": (gain, few)}
        for metric, (values, text) in both.items():
            value, *rest = values[: self.lines]
            low, high = jackknife(value, rest, bounds=(None, None))
            by_fold = dict(zip(self.used, rest, strict=False))
            replicates = [by_fold.get(f, math.nan) for f in range(FOLDS)]
            columns = {"value": value, "low": low, "high": high, "replicates": replicates, "note": text}
            yield record(metric, columns | self.sizes, label)
        for place, group in enumerate(self.groups if not label.control else (), self.lines):
            counts = {"n": moments.counts[group], "contexts": moments.contexts}
            for metric, (values, _) in both.items():
                yield record(metric, {"value": values[place]} | counts, label, group=group)


def alignment_records(
    spread: FoldCovariance,
    moments: GradientMoments,
    *,
    standardised: bool,
    note: str = "",
    moved: bool = False,
    **options: str,
) -> Iterator[Record]:
    """The alignment of gradients with the covariance of the rows fitted on; of groups without an interval.

    The jackknife leaves out one fold of contexts in both halves; standard deviations are those of the rows left.
    `moved`: the moments are of updates, which move as rows do and are divided by these where gradients are multiplied.
    """
    C, M = spread.covariance(), moments.total
    options |= {"coordinates": "standardised"} if standardised else {}
    where = {"metric": "gradient_alignment", "variant": variant_name({k: v for k, v in options.items() if v})}
    align = tangent.update_alignment if moved else tangent.gradient_alignment
    align = partial(align, standardised=standardised)
    value, rest = float(align(C, M)), []
    tested = moments.folds.diagonal(dim1=-2, dim2=-1).sum(-1)
    used = ((spread.n > 0) | (tested > 0)).tolist()  # a fold without rows must not narrow an interval
    for fold, lives in enumerate(used):
        rest.append(float(align(spread.covariance(fold), M - moments.folds[fold])) if lives else math.nan)
    low, high = jackknife(value, rest, bounds=(0.0, None))
    columns = {"value": value, "low": low, "high": high, "replicates": rest, "n": moments.n, "note": note}
    yield {**where, "group": "", "contexts": moments.contexts, **columns}
    for group, moment in moments.groups.items():
        counts = {"n": moments.counts[group], "contexts": moments.contexts}
        if (part := float(align(C, moment))) == part:  # NaN if no gradient reaches the group
            yield {**where, "group": group, "value": part, **counts}


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


_FIELDS = {  # metric, control and average of the row that gives a field
    "energy": ("gradient_energy", "", ""),
    "energy_by_row": ("gradient_energy", "", "row"),
    "enrichment": ("gradient_enrichment", "", ""),
    "ratio": ("gradient_ratio", "", ""),
    "share": ("gradient_share", "", ""),
    "isoscore_gain": ("gradient_isoscore_gain", "", ""),
    "normal": ("gradient_energy", "normal", ""),
    "random": ("gradient_energy", "random", ""),
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
    rows = as_matrix(G)
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
    moments = GradientMoments().update(half.x, context=half.context, fold=half.fold)
    test = SubspaceTest(moments, EnergyRows(half), draws=draws, seed=seed)
    by_name: dict[tuple[str, ...], Record] = {}
    for row in test.records(Q, label, shares=True, controls=1):
        options = options_of(row["variant"])
        by_name[row["metric"], options.get("control", ""), options.get("average", "")] = row
    columns = ("value", "low", "high", "n", "contexts", "dropped", "note", "sd")
    estimates = {
        field: Estimate(**{name: by_name[key][name] for name in columns if name in by_name[key]})
        for field, key in _FIELDS.items()
    }
    return TangentTest(**estimates, p=by_name["gradient_p", "", ""]["value"], rank=rank)
